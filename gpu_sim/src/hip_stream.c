/* Simulated HIP: pools, streams and events. */
#include "hip.h"

#include <stdlib.h>

/* ---- pools ---- */

HIP(hipDeviceGetDefaultMemPool, hipMemPool_t *pool, int device)
{
    hipError_t error = pool != NULL ? hip_start() : hipErrorInvalidValue;
    if (error == hipSuccess) {
        *pool = rt_default_pool(device, RT_IN_DEVICE);
        error = *pool != NULL ? hipSuccess : hipErrorInvalidDevice;
    }
    return hip_told(error);
}

HIP(hipDeviceGetMemPool, hipMemPool_t *pool, int device)
{
    hipError_t error = pool != NULL ? hip_start() : hipErrorInvalidValue;
    if (error == hipSuccess) {
        *pool = rt_current_pool(device, RT_IN_DEVICE);
        error = *pool != NULL ? hipSuccess : hipErrorInvalidDevice;
    }
    return hip_told(error);
}

HIP(hipDeviceSetMemPool, int device, hipMemPool_t pool)
{
    return hip_told(hip_result(rt_set_pool(device, pool)));
}

HIP(hipMemPoolCreate, hipMemPool_t *pool, const hipMemPoolProps *properties)
{
    hipError_t error = pool != NULL && properties != NULL ? hip_start() : hipErrorInvalidValue;
    return hip_told(error == hipSuccess ? hip_result(rt_pool_new(properties->location.id, RT_IN_DEVICE, pool)) : error);
}

HIP(hipMemPoolDestroy, hipMemPool_t pool)
{
    return hip_told(hip_result(rt_pool_free(pool)));
}

HIP(hipMemPoolTrimTo, hipMemPool_t pool, size_t keep)
{
    return hip_told(hip_result(rt_pool_trim(pool, keep)));
}

enum { POOL_REUSE = 3, POOL_THRESHOLD, POOL_RESERVED, POOL_RESERVED_HIGH, POOL_USED, POOL_USED_HIGH };

HIP(hipMemPoolGetAttribute, hipMemPool_t pool, int attribute, void *value)
{
    if (value == NULL || !rt_pool_valid(pool) || attribute < 1 || attribute > POOL_USED_HIGH) {
        return hip_told(hipErrorInvalidValue);
    }
    if (attribute <= POOL_REUSE) {
        *(int *)value = 1;
        return hipSuccess;
    }
    const uint64_t values[] = {pool->threshold, pool->reserved, pool->reserved_high, pool->used, pool->used_high};
    *(uint64_t *)value = values[attribute - POOL_THRESHOLD];
    return hipSuccess;
}

HIP(hipMemPoolSetAttribute, hipMemPool_t pool, int attribute, const void *value)
{
    if (value == NULL || !rt_pool_valid(pool) || attribute < 1 || attribute > POOL_USED_HIGH) {
        return hip_told(hipErrorInvalidValue);
    }
    if (attribute == POOL_THRESHOLD) {
        pool->threshold = *(const uint64_t *)value;
    }
    return hipSuccess;
}

HIP(hipMallocFromPoolAsync, void **memory, size_t size, hipMemPool_t pool, hipStream_t stream)
{
    struct rt_context *context;
    (void)stream;
    hipError_t error = memory != NULL ? hip_context(&context) : hipErrorInvalidValue;
    return hip_told(error == hipSuccess ? hip_result(rt_pool_alloc(context, pool, size, memory)) : error);
}

HIP(hipMallocAsync, void **memory, size_t size, hipStream_t stream)
{
    hipError_t error = hip_start();
    return error == hipSuccess ? hipMallocFromPoolAsync(memory, size, rt_current_pool(hip_chosen, RT_IN_DEVICE), stream)
                               : hip_told(error);
}

HIP(hipFreeAsync, void *memory, hipStream_t stream)
{
    (void)stream;
    return hipFree(memory);
}

/* ---- streams and events ---- */

struct hip_event {
    uint64_t when;
};

HIP(hipStreamCreateWithFlags, hipStream_t *stream, unsigned int flags)
{
    enum { NON_BLOCKING = 1 };
    static _Atomic uint32_t numbers;
    hipError_t error = stream != NULL ? hip_start() : hipErrorInvalidValue;
    if (error == hipSuccess) {
        *stream = calloc(1, sizeof **stream);
        error = *stream != NULL ? hipSuccess : hipErrorOutOfMemory;
    }
    if (error == hipSuccess) {
        (*stream)->device = hip_chosen;
        (*stream)->id = ++numbers;
        (*stream)->line.alone = (flags & NON_BLOCKING) != 0;
    }
    return hip_told(error);
}

HIP(hipStreamCreate, hipStream_t *stream)
{
    return hipStreamCreateWithFlags(stream, 0);
}

HIP(hipStreamDestroy, hipStream_t stream)
{
    free(stream);
    return hip_told(stream != NULL ? hipSuccess : hipErrorInvalidHandle);
}

static int device_of(hipStream_t stream)
{
    return stream != NULL ? stream->device : hip_chosen;
}

void hip_happened(int device, hipStream_t stream, struct sim_activity *activity)
{
    const struct sim_tracer *tracer = sim_tracer();
    if (tracer != NULL) {
        activity->device = (uint32_t)device;
        activity->context = (uint32_t)device + 1;
        activity->stream = stream != NULL ? stream->id : 0;
        tracer->happened(activity);
    }
}

void hip_wait(hipStream_t stream, uint64_t when, uint32_t how)
{
    struct sim_activity activity = {.kind = SIM_WAITED, .start = line_now(), .waited = how};
    line_sleep_until(when);
    activity.end = line_now();
    hip_happened(device_of(stream), stream, &activity);
}

HIP(hipStreamSynchronize, hipStream_t stream)
{
    enum { STREAM_SYNCHRONIZE = 3 };
    hipError_t error = hip_start();
    if (error == hipSuccess) {
        hip_wait(stream, line_end(device_of(stream), hip_line(stream)), STREAM_SYNCHRONIZE);
    }
    return hip_told(error);
}

HIP(hipStreamQuery, hipStream_t stream)
{
    hipError_t error = hip_start();
    bool busy = error == hipSuccess && line_end(device_of(stream), hip_line(stream)) > line_now();
    return hip_told(busy ? hipErrorNotReady : error);
}

HIP(hipEventCreate, hipEvent_t *event)
{
    hipError_t error = event != NULL ? hip_start() : hipErrorInvalidValue;
    if (error == hipSuccess) {
        *event = calloc(1, sizeof **event);
        error = *event != NULL ? hipSuccess : hipErrorOutOfMemory;
    }
    return hip_told(error);
}

HIP(hipEventCreateWithFlags, hipEvent_t *event, unsigned int flags)
{
    (void)flags;
    return hipEventCreate(event);
}

HIP(hipEventRecord, hipEvent_t event, hipStream_t stream)
{
    if (event == NULL) {
        return hip_told(hipErrorInvalidHandle);
    }
    uint64_t now = line_now(), end = line_end(device_of(stream), hip_line(stream));
    event->when = end > now ? end : now;
    return hipSuccess;
}

HIP(hipEventQuery, hipEvent_t event)
{
    if (event == NULL) {
        return hip_told(hipErrorInvalidHandle);
    }
    return hip_told(event->when > line_now() ? hipErrorNotReady : hipSuccess);
}

HIP(hipEventSynchronize, hipEvent_t event)
{
    enum { EVENT_SYNCHRONIZE = 1 };
    if (event == NULL) {
        return hip_told(hipErrorInvalidHandle);
    }
    hip_wait(NULL, event->when, EVENT_SYNCHRONIZE);
    return hipSuccess;
}

HIP(hipEventElapsedTime, float *ms, hipEvent_t begin, hipEvent_t end)
{
    if (ms == NULL || begin == NULL || end == NULL) {
        return hip_told(hipErrorInvalidHandle);
    }
    *ms = (float)((double)(int64_t)(end->when - begin->when) / 1e6);
    return hipSuccess;
}

HIP(hipEventDestroy, hipEvent_t event)
{
    free(event);
    return hip_told(event != NULL ? hipSuccess : hipErrorInvalidHandle);
}
