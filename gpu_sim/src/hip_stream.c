/* Simulated HIP: pools, streams and events. */
#include "hip.h"

#include <stdlib.h>
#include <time.h>

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

struct hip_stream {
    int device;
};

struct hip_event {
    struct timespec when;
};

HIP(hipStreamCreateWithFlags, hipStream_t *stream, unsigned int flags)
{
    (void)flags;
    hipError_t error = stream != NULL ? hip_start() : hipErrorInvalidValue;
    if (error == hipSuccess) {
        *stream = calloc(1, sizeof **stream);
        error = *stream != NULL ? hipSuccess : hipErrorOutOfMemory;
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

HIP(hipStreamSynchronize, hipStream_t stream)
{
    (void)stream;
    return hip_told(hip_start());
}

HIP(hipStreamQuery, hipStream_t stream)
{
    (void)stream;
    return hip_told(hip_start());
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
    (void)stream;
    if (event == NULL) {
        return hip_told(hipErrorInvalidHandle);
    }
    clock_gettime(CLOCK_MONOTONIC, &event->when);
    return hipSuccess;
}

HIP(hipEventQuery, hipEvent_t event)
{
    return hip_told(event != NULL ? hipSuccess : hipErrorInvalidHandle);
}

HIP(hipEventSynchronize, hipEvent_t event)
{
    return hip_told(event != NULL ? hipSuccess : hipErrorInvalidHandle);
}

HIP(hipEventElapsedTime, float *ms, hipEvent_t begin, hipEvent_t end)
{
    if (ms == NULL || begin == NULL || end == NULL) {
        return hip_told(hipErrorInvalidHandle);
    }
    double seconds = (double)(end->when.tv_sec - begin->when.tv_sec);
    *ms = (float)(seconds * 1e3 + (double)(end->when.tv_nsec - begin->when.tv_nsec) / 1e6);
    return hipSuccess;
}

HIP(hipEventDestroy, hipEvent_t event)
{
    free(event);
    return hip_told(event != NULL ? hipSuccess : hipErrorInvalidHandle);
}
