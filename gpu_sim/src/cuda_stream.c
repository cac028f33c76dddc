/* Simulated CUDA: pools, streams and events. */
#include "cuda.h"

#include <stdlib.h>

/* ---- pools ---- */

static CUresult pool_found(CUmemoryPool *pool, CUmemoryPool found)
{
    if (pool == NULL || found == NULL) {
        return pool == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_DEVICE;
    }
    *pool = found;
    return CUDA_SUCCESS;
}

CU(cuDeviceGetDefaultMemPool, CUmemoryPool *pool, CUdevice device)
{
    return pool_found(pool, rt_default_pool(device, RT_IN_DEVICE));
}

CU(cuDeviceGetMemPool, CUmemoryPool *pool, CUdevice device)
{
    return pool_found(pool, rt_current_pool(device, RT_IN_DEVICE));
}

CU(cuDeviceSetMemPool, CUdevice device, CUmemoryPool pool)
{
    return result_of(rt_set_pool(device, pool));
}

/* Where memory of a type at a location is; false: no such combination. Managed memory without a location is the first
 * device's. */
static bool home_of(const CUmemLocation *where, int type, CUdevice *device, enum rt_home *home)
{
    enum { PINNED = 1, MANAGED = 2, NOWHERE = 0, HOST = 2, HOST_NODE = 3 };
    bool host = where->type == HOST || where->type == HOST_NODE;
    *device = cuda_device_at(where);
    *device = *device < 0 ? 0 : *device;
    *home = host ? RT_IN_HOST : type == MANAGED ? RT_IN_MANAGED : RT_IN_DEVICE;
    return (type == PINNED && (host || cuda_device_at(where) >= 0)) ||
           (type == MANAGED && (host || where->type == NOWHERE || where->type == CU_ON_DEVICE));
}

CU(cuMemGetDefaultMemPool, CUmemoryPool *pool, const CUmemLocation *where, int type)
{
    CUdevice device;
    enum rt_home home;
    return where != NULL && home_of(where, type, &device, &home) ? pool_found(pool, rt_default_pool(device, home))
                                                                 : CUDA_ERROR_INVALID_VALUE;
}

CU(cuMemGetMemPool, CUmemoryPool *pool, const CUmemLocation *where, int type)
{
    CUdevice device;
    enum rt_home home;
    return where != NULL && home_of(where, type, &device, &home) ? pool_found(pool, rt_current_pool(device, home))
                                                                 : CUDA_ERROR_INVALID_VALUE;
}

CU(cuMemSetMemPool, const CUmemLocation *where, int type, CUmemoryPool pool)
{
    CUdevice device;
    enum rt_home home;
    bool fits = where != NULL && home_of(where, type, &device, &home) && rt_pool_valid(pool) && pool->home == home;
    return fits ? result_of(rt_set_pool(device, pool)) : CUDA_ERROR_INVALID_VALUE;
}

CU(cuMemPoolCreate, CUmemoryPool *pool, const CUmemPoolProps *properties)
{
    CUdevice device;
    enum rt_home home;
    bool fits =
        pool != NULL && properties != NULL && home_of(&properties->location, properties->allocType, &device, &home);
    return fits ? result_of(rt_pool_new(device, home, pool)) : CUDA_ERROR_INVALID_VALUE;
}

CU(cuMemPoolDestroy, CUmemoryPool pool)
{
    return result_of(rt_pool_free(pool));
}

CU(cuMemPoolTrimTo, CUmemoryPool pool, size_t keep)
{
    return result_of(rt_pool_trim(pool, keep));
}

enum { POOL_REUSE = 3, POOL_THRESHOLD, POOL_RESERVED, POOL_RESERVED_HIGH, POOL_USED, POOL_USED_HIGH };

CU(cuMemPoolGetAttribute, CUmemoryPool pool, int attribute, void *value)
{
    if (value == NULL || !rt_pool_valid(pool) || attribute < 1 || attribute > POOL_USED_HIGH) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (attribute <= POOL_REUSE) {
        *(int *)value = 1;
        return CUDA_SUCCESS;
    }
    const uint64_t values[] = {pool->threshold, pool->reserved, pool->reserved_high, pool->used, pool->used_high};
    *(uint64_t *)value = values[attribute - POOL_THRESHOLD];
    return CUDA_SUCCESS;
}

CU(cuMemPoolSetAttribute, CUmemoryPool pool, int attribute, const void *value)
{
    if (value == NULL || !rt_pool_valid(pool) || attribute < 1 || attribute > POOL_USED_HIGH) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (attribute == POOL_THRESHOLD) {
        pool->threshold = *(const uint64_t *)value;
    } else if (attribute == POOL_RESERVED_HIGH) {
        pool->reserved_high = pool->reserved;
    } else if (attribute == POOL_USED_HIGH) {
        pool->used_high = pool->used;
    }
    return CUDA_SUCCESS;
}

CU(cuMemPoolSetAccess, CUmemoryPool pool, const CUmemAccessDesc *access, size_t count)
{
    return rt_pool_valid(pool) && access != NULL && count > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CU(cuMemPoolGetAccess, int *flags, CUmemoryPool pool, const CUmemLocation *where)
{
    enum { READ_WRITE = 3 };
    if (flags == NULL || where == NULL || !rt_pool_valid(pool)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *flags = where->type == CU_ON_DEVICE && where->id == pool->device ? READ_WRITE : 0;
    return CUDA_SUCCESS;
}

CU(cuMemAllocFromPoolAsync, CUdeviceptr *address, size_t size, CUmemoryPool pool, CUstream stream)
{
    CUcontext context;
    void *memory;
    (void)stream;
    CUresult result = address != NULL ? cuda_context(&context) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        result = result_of(rt_pool_alloc(context, pool, size, &memory));
    }
    if (result == CUDA_SUCCESS) {
        *address = (uintptr_t)memory;
    }
    return result;
}

CU(cuMemAllocAsync, CUdeviceptr *address, size_t size, CUstream stream)
{
    CUcontext context;
    CUresult result = cuda_context(&context);
    if (result == CUDA_SUCCESS && cuda_recording(stream) != NULL) {
        return cuda_graph_capture_alloc(stream->capture, context->device, address, size);
    }
    return result == CUDA_SUCCESS
               ? cuMemAllocFromPoolAsync(address, size, rt_current_pool(context->device, RT_IN_DEVICE), stream)
               : result;
}

CU(cuMemFreeAsync, CUdeviceptr address, CUstream stream)
{
    if (cuda_recording(stream) != NULL) {
        return cuda_graph_capture_free(stream->capture, address);
    }
    return cuda_free_in_stream(address);
}

/* ---- streams and events ---- */

struct cu_event {
    uint64_t when; /* the stream will have done what was before it; ns */
};

enum { NON_BLOCKING = 1 };

CU(cuStreamCreateWithPriority, CUstream *stream, unsigned int flags, int priority)
{
    enum { FIRST_STREAM = 13 };
    CUcontext context;
    CUresult result = stream != NULL ? cuda_context(&context) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *stream = calloc(1, sizeof **stream);
        result = *stream != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result == CUDA_SUCCESS) {
        (*stream)->priority = priority;
        (*stream)->flags = flags;
        (*stream)->line.alone = (flags & NON_BLOCKING) != 0;
        (*stream)->context = context;
        static _Atomic uint32_t last = FIRST_STREAM;
        (*stream)->id = atomic_fetch_add(&last, 1);
    }
    return result;
}

CU(cuStreamCreate, CUstream *stream, unsigned int flags)
{
    return cuStreamCreateWithPriority(stream, flags, 0);
}

CU(cuStreamDestroy_v2, CUstream stream)
{
    free(stream);
    return stream != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CU(cuStreamSynchronize, CUstream stream)
{
    return cuda_wait(stream);
}

CU(cuStreamGetCtx, CUstream stream, CUcontext *context)
{
    CUcontext now;
    CUresult result = context != NULL ? cuda_context(&now) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *context = (uintptr_t)stream > 2 ? stream->context : now;
    }
    return result;
}

CU(cuStreamGetPriority, CUstream stream, int *priority)
{
    if (priority == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *priority = (uintptr_t)stream > 2 ? stream->priority : 0;
    return CUDA_SUCCESS;
}

CU(cuStreamGetFlags, CUstream stream, unsigned int *flags)
{
    if (flags == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *flags = (uintptr_t)stream > 2 ? stream->flags : 0;
    return CUDA_SUCCESS;
}

CU(cuStreamGetId, CUstream stream, unsigned long long *id)
{
    if (id == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *id = (uintptr_t)stream;
    return CUDA_SUCCESS;
}

CU(cuStreamGetDevice, CUstream stream, CUdevice *device)
{
    CUcontext context;
    CUresult result = device != NULL ? cuStreamGetCtx(stream, &context) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *device = context->device;
    }
    return result;
}

CU(cuCtxGetStreamPriorityRange, int *least, int *greatest)
{
    CUcontext context;
    if (least != NULL) {
        *least = 0;
    }
    if (greatest != NULL) {
        *greatest = -5;
    }
    return cuda_context(&context);
}

CU(cuStreamAttachMemAsync, CUstream stream, CUdeviceptr address, size_t size, unsigned int flags)
{
    struct rt_block block;
    (void)size;
    (void)flags;
    bool managed = rt_find(cuda_pointer(address), &block) == RT_OK && block.kind == RT_MANAGED;
    return managed ? cuStreamSynchronize(stream) : CUDA_ERROR_INVALID_VALUE;
}

CU(cuStreamQuery, CUstream stream)
{
    CUcontext context;
    CUresult result = cuda_context(&context);
    return result == CUDA_SUCCESS && cuda_stream_end(context, stream) > line_now() ? CUDA_ERROR_NOT_READY : result;
}

CU(cuStreamWaitEvent, CUstream stream, struct cu_event *event, unsigned int flags)
{
    CUcontext context;
    (void)flags;
    CUresult result = event != NULL ? cuda_context(&context) : CUDA_ERROR_INVALID_HANDLE;
    if (result == CUDA_SUCCESS) {
        cuda_stream_waits(stream, context, event->when);
    }
    return result;
}

CU(cuEventCreate, struct cu_event **event, unsigned int flags)
{
    CUcontext context;
    (void)flags;
    CUresult result = event != NULL ? cuda_context(&context) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *event = calloc(1, sizeof **event);
        result = *event != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
    return result;
}

CU(cuEventRecord, struct cu_event *event, CUstream stream)
{
    CUcontext context;
    CUresult result = event != NULL ? cuda_context(&context) : CUDA_ERROR_INVALID_HANDLE;
    if (result == CUDA_SUCCESS) {
        uint64_t now = line_now(), end = cuda_stream_end(context, stream);
        event->when = end > now ? end : now;
    }
    return result;
}

CU(cuEventRecordWithFlags, struct cu_event *event, CUstream stream, unsigned int flags)
{
    return flags <= 1 ? cuEventRecord(event, stream) : CUDA_ERROR_INVALID_VALUE;
}

CU(cuEventQuery, struct cu_event *event)
{
    if (event == NULL) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    return event->when > line_now() ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

CU(cuEventSynchronize, struct cu_event *event)
{
    return event != NULL ? cuda_wait_for_event(event->when) : CUDA_ERROR_INVALID_HANDLE;
}

CU(cuEventElapsedTime, float *ms, struct cu_event *start, struct cu_event *end)
{
    if (ms == NULL || start == NULL || end == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *ms = (float)((double)(int64_t)(end->when - start->when) / 1e6);
    return CUDA_SUCCESS;
}

ALIAS(cuEventElapsedTime_v2, cuEventElapsedTime, (ms, start, end), float *ms, struct cu_event *start,
      struct cu_event *end)

CU(cuEventDestroy_v2, struct cu_event *event)
{
    free(event);
    return event != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
