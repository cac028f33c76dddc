/* Simulated CUDA: linear, managed and host memory, virtual memory, memory of other processes. */
#include "cuda.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    int type, requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    unsigned char allocFlags[8];
} CUmemAllocationProp;

#define PITCH 512u

/* ---- memory ---- */

CU(cuMemGetInfo_v2, size_t *free_bytes, size_t *total)
{
    CUcontext context;
    uint64_t left, all;
    CUresult result = free_bytes != NULL && total != NULL ? cuda_context(&context) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        result = result_of(rt_memory(context->device, &left, &all));
    }
    if (result == CUDA_SUCCESS) {
        *free_bytes = left;
        *total = all;
    }
    return result;
}

void cuda_held(CUcontext context, enum sim_activity_kind kind, CUdeviceptr address)
{
    enum { ON_DEVICE = 3, MANAGED = 5 };
    struct rt_block block;
    if (sim_tracer() == NULL || rt_find(cuda_pointer(address), &block) != RT_OK) {
        return;
    }
    uint64_t now = line_now();
    uint8_t where = block.kind == RT_MANAGED ? MANAGED : ON_DEVICE;
    cuda_happened(context, NULL,
                  &(struct sim_activity){
                      .kind = kind, .start = now, .end = now, .bytes = block.size, .address = address, .to = where});
}

CUresult cuda_allocate(enum rt_kind kind, CUdeviceptr *address, size_t size)
{
    CUcontext context;
    void *memory;
    CUresult result = address != NULL && size > 0 ? cuda_context(&context) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        result = result_of(rt_alloc(context, kind, size, &memory));
    }
    if (result == CUDA_SUCCESS) {
        *address = (uintptr_t)memory;
        cuda_held(context, SIM_ALLOCATED, *address);
    }
    return result;
}

CU(cuMemAlloc_v2, CUdeviceptr *address, size_t size)
{
    return cuda_allocate(RT_DEVICE, address, size);
}

CU(cuMemAllocManaged, CUdeviceptr *address, size_t size, unsigned int flags)
{
    return flags == 1 || flags == 2 ? cuda_allocate(RT_MANAGED, address, size) : CUDA_ERROR_INVALID_VALUE;
}

CU(cuMemAllocPitch_v2, CUdeviceptr *address, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    if (pitch == NULL || width == 0 || height == 0 || (element != 4 && element != 8 && element != 16) ||
        width > SIZE_MAX / 2 / height) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *pitch = (width + PITCH - 1) / PITCH * PITCH;
    return cuda_allocate(RT_DEVICE, address, *pitch * height);
}

static CUresult free_by(enum rt_status (*way)(void *memory), CUdeviceptr address)
{
    CUresult result = result_of(rt_ready());
    if (result == CUDA_SUCCESS && cuda_graph_free(address)) {
        return CUDA_SUCCESS;
    }
    CUcontext context;
    if (address != 0 && cuda_context(&context) == CUDA_SUCCESS) {
        cuda_held(context, SIM_FREED, address);
    }
    return result != CUDA_SUCCESS || address == 0 ? result : result_of(way(cuda_pointer(address)));
}

static enum rt_status free_now(void *memory)
{
    return rt_free(memory, RT_DEVICE);
}

CU(cuMemFree_v2, CUdeviceptr address)
{
    return free_by(free_now, address);
}

CUresult cuda_free_in_stream(CUdeviceptr address)
{
    return free_by(rt_free_in_stream, address);
}

CU(cuMemGetAddressRange_v2, CUdeviceptr *base, size_t *size, CUdeviceptr address)
{
    struct rt_block block;
    enum rt_status status = rt_find(cuda_pointer(address), &block);
    if (status != RT_OK || (block.kind != RT_DEVICE && block.kind != RT_MANAGED)) {
        return CUDA_ERROR_NOT_FOUND;
    }
    if (base != NULL) {
        *base = block.base;
    }
    if (size != NULL) {
        *size = block.size;
    }
    return CUDA_SUCCESS;
}

CU(cuMemHostAlloc, void **memory, size_t size, unsigned int flags)
{
    CUcontext context;
    (void)flags;
    CUresult result = memory != NULL ? cuda_context(&context) : CUDA_ERROR_INVALID_VALUE;
    return result == CUDA_SUCCESS ? result_of(rt_alloc(context, RT_HOST, size, memory)) : result;
}

CU(cuMemAllocHost_v2, void **memory, size_t size)
{
    return cuMemHostAlloc(memory, size, 0);
}

CU(cuMemFreeHost, void *memory)
{
    return result_of(rt_free(memory, RT_HOST));
}

CU(cuMemHostGetDevicePointer_v2, CUdeviceptr *address, void *memory, unsigned int flags)
{
    (void)flags;
    if (address == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *address = (uintptr_t)memory;
    return CUDA_SUCCESS;
}

CU(cuMemHostGetFlags, unsigned int *flags, void *memory)
{
    enum { PORTABLE = 1, DEVICE_MAP = 2 };
    struct rt_block block;
    if (flags == NULL || rt_find(memory, &block) != RT_OK || block.kind != RT_HOST) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *flags = PORTABLE | DEVICE_MAP;
    return CUDA_SUCCESS;
}

CU(cuMemHostRegister_v2, void *memory, size_t size, unsigned int flags)
{
    CUcontext context;
    (void)flags;
    return memory != NULL && size > 0 ? cuda_context(&context) : CUDA_ERROR_INVALID_VALUE;
}

CU(cuMemHostUnregister, void *memory)
{
    return memory != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult move(CUdeviceptr address, bool to_host)
{
    return result_of(rt_move(cuda_pointer(address), to_host));
}

CU(cuMemPrefetchAsync, CUdeviceptr address, size_t size, CUdevice device, CUstream stream)
{
    (void)size;
    (void)stream;
    return move(address, device < 0);
}

CU(cuMemPrefetchAsync_v2, CUdeviceptr address, size_t size, CUmemLocation to, unsigned int flags, CUstream stream)
{
    (void)size;
    (void)stream;
    return flags == 0 ? move(address, cuda_device_at(&to) < 0) : CUDA_ERROR_INVALID_VALUE;
}

/* `firsts` has, for each location, from which address on it is meant. */
CU(cuMemPrefetchBatchAsync, const CUdeviceptr *addresses, const size_t *sizes, size_t count, const CUmemLocation *to,
   const size_t *firsts, size_t locations, unsigned long long flags, CUstream stream)
{
    bool good = addresses != NULL && sizes != NULL && to != NULL && firsts != NULL && locations > 0 && flags == 0;
    if (!good || firsts[0] != 0 || stream == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0, at = 0; i < count && result == CUDA_SUCCESS; i++) {
        at += at + 1 < locations && firsts[at + 1] <= i;
        result = move(addresses[i], cuda_device_at(&to[at]) < 0);
    }
    return result;
}

CU(cuMemDiscardAndPrefetchBatchAsync, const CUdeviceptr *addresses, const size_t *sizes, size_t count,
   const CUmemLocation *to, const size_t *firsts, size_t locations, unsigned long long flags, CUstream stream)
{
    return cuMemPrefetchBatchAsync(addresses, sizes, count, to, firsts, locations, flags, stream);
}

static CUresult advise(CUdeviceptr address, int advice, bool host)
{
    enum { SET_PREFERRED_LOCATION = 3 };
    struct rt_block block;
    if (advice == SET_PREFERRED_LOCATION) {
        return move(address, host);
    }
    bool managed = rt_find(cuda_pointer(address), &block) == RT_OK && block.kind == RT_MANAGED;
    return managed ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CU(cuMemAdvise, CUdeviceptr address, size_t size, int advice, CUdevice device)
{
    (void)size;
    return advise(address, advice, device < 0);
}

CU(cuMemAdvise_v2, CUdeviceptr address, size_t size, int advice, CUmemLocation where)
{
    (void)size;
    return advise(address, advice, cuda_device_at(&where) < 0);
}

enum pointer_attribute {
    POINTER_CONTEXT = 1,
    POINTER_MEMORY_TYPE = 2,
    POINTER_DEVICE = 3,
    POINTER_HOST = 4,
    POINTER_BUFFER_ID = 7,
    POINTER_IS_MANAGED = 8,
    POINTER_DEVICE_ORDINAL = 9,
    POINTER_RANGE_START = 11,
    POINTER_RANGE_SIZE = 12,
    POINTER_MAPPED = 13,
    POINTER_POOL = 17,
};

static CUresult pointer_attribute(void *out, int attribute, CUdeviceptr address, const struct rt_block *block)
{
    switch ((enum pointer_attribute)attribute) {
    case POINTER_CONTEXT:
        memcpy(out, &block->context, sizeof block->context);
        return CUDA_SUCCESS;
    case POINTER_MEMORY_TYPE:
        *(unsigned int *)out = block->kind == RT_HOST ? 1 : 2;
        return CUDA_SUCCESS;
    case POINTER_DEVICE:
        memcpy(out, &address, sizeof address);
        return CUDA_SUCCESS;
    case POINTER_HOST:
        memcpy(out, &address, sizeof address);
        return block->kind == RT_DEVICE ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    case POINTER_IS_MANAGED:
        *(unsigned int *)out = block->kind == RT_MANAGED;
        return CUDA_SUCCESS;
    case POINTER_DEVICE_ORDINAL:
        *(int *)out = block->device;
        return CUDA_SUCCESS;
    case POINTER_BUFFER_ID:
    case POINTER_RANGE_START:
        memcpy(out, &block->base, sizeof block->base);
        return CUDA_SUCCESS;
    case POINTER_RANGE_SIZE:
        memcpy(out, &block->size, sizeof block->size);
        return CUDA_SUCCESS;
    case POINTER_MAPPED:
        *(unsigned int *)out = 1;
        return CUDA_SUCCESS;
    case POINTER_POOL:
        memcpy(out, &block->pool, sizeof block->pool);
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE; /* newer than this driver */
}

CU(cuPointerGetAttribute, void *out, int attribute, CUdeviceptr address)
{
    struct rt_block block;
    return out != NULL && rt_find(cuda_pointer(address), &block) == RT_OK
               ? pointer_attribute(out, attribute, address, &block)
               : CUDA_ERROR_INVALID_VALUE;
}

/* Unlike the one above, this one knows the host's own memory: of no type, and on no device. */
CU(cuPointerGetAttributes, unsigned int count, const int *attributes, void **out, CUdeviceptr address)
{
    enum { NO_DEVICE = -2 };
    struct rt_block block;
    bool known = rt_find(cuda_pointer(address), &block) == RT_OK;
    if (attributes == NULL || out == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (unsigned i = 0; i < count; i++) {
        if (known && pointer_attribute(out[i], attributes[i], address, &block) == CUDA_SUCCESS) {
            continue;
        }
        switch (attributes[i]) {
        case POINTER_DEVICE_ORDINAL:
            *(int *)out[i] = NO_DEVICE;
            break;
        case POINTER_MEMORY_TYPE:
        case POINTER_IS_MANAGED:
        case POINTER_MAPPED:
            *(unsigned int *)out[i] = 0;
            break;
        case POINTER_CONTEXT:
        case POINTER_DEVICE:
        case POINTER_HOST:
        case POINTER_BUFFER_ID:
        case POINTER_RANGE_START:
        case POINTER_RANGE_SIZE:
        case POINTER_POOL:
            memset(out[i], 0, sizeof(uint64_t));
            break;
        default:
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    return CUDA_SUCCESS;
}

/* ---- virtual memory ---- */

CU(cuMemGetAllocationGranularity, size_t *granularity, const CUmemAllocationProp *properties, int option)
{
    if (granularity == NULL || properties == NULL || option < 0 || option > 1) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *granularity = GRANULE;
    return CUDA_SUCCESS;
}

CU(cuMemAddressReserve, CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint, unsigned long long flags)
{
    void *start;
    (void)hint;
    CUresult result =
        address != NULL && flags == 0 ? result_of(rt_range(size, alignment, &start)) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *address = (uintptr_t)start;
    }
    return result;
}

CU(cuMemAddressFree, CUdeviceptr address, size_t size)
{
    return result_of(rt_range_free(cuda_pointer(address), size));
}

CU(cuMemCreate, uint64_t *handle, size_t size, const CUmemAllocationProp *properties, unsigned long long flags)
{
    enum { PINNED = 1 };
    if (handle == NULL || properties == NULL || flags != 0 || properties->type != PINNED ||
        cuda_device_at(&properties->location) < 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return result_of(rt_physical(cuda_device_at(&properties->location), size, handle));
}

CU(cuMemRelease, uint64_t handle)
{
    return result_of(rt_physical_free(handle));
}

CU(cuMemMap, CUdeviceptr address, size_t size, size_t offset, uint64_t handle, unsigned long long flags)
{
    return offset == 0 && flags == 0 ? result_of(rt_map(cuda_pointer(address), size, handle))
                                     : CUDA_ERROR_INVALID_VALUE;
}

CU(cuMemUnmap, CUdeviceptr address, size_t size)
{
    return result_of(rt_unmap(cuda_pointer(address), size));
}

CU(cuMemSetAccess, CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count)
{
    struct rt_block block;
    bool good = size > 0 && access != NULL && count > 0 && rt_find(cuda_pointer(address), &block) == RT_OK;
    return good && block.kind == RT_RANGE ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CU(cuMemRetainAllocationHandle, uint64_t *handle, void *address)
{
    return handle != NULL ? result_of(rt_physical_retain(address, handle)) : CUDA_ERROR_INVALID_VALUE;
}

enum { FILE_DESCRIPTOR = 1 };

CU(cuMemExportToShareableHandle, void *shareable, uint64_t handle, int type, unsigned long long flags)
{
    return shareable != NULL && type == FILE_DESCRIPTOR && flags == 0 ? result_of(rt_physical_export(handle, shareable))
                                                                      : CUDA_ERROR_INVALID_VALUE;
}

CU(cuMemImportFromShareableHandle, uint64_t *handle, void *shareable, int type)
{
    return handle != NULL && type == FILE_DESCRIPTOR ? result_of(rt_physical_import((int)(intptr_t)shareable, handle))
                                                     : CUDA_ERROR_INVALID_VALUE;
}

/* ---- memory of other processes ---- */

typedef union {
    struct rt_shared shared;
    char reserved[64];
} CUipcMemHandle;

CU(cuIpcGetMemHandle, CUipcMemHandle *handle, CUdeviceptr address)
{
    if (handle == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    memset(handle, 0, sizeof *handle);
    return result_of(rt_share(cuda_pointer(address), &handle->shared));
}

CU(cuIpcOpenMemHandle_v2, CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
    CUcontext context;
    void *memory;
    (void)flags;
    CUresult result = address != NULL ? cuda_context(&context) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        result = result_of(rt_import(&handle.shared, &memory));
    }
    if (result == CUDA_SUCCESS) {
        *address = (uintptr_t)memory;
    }
    return result;
}

CU(cuIpcCloseMemHandle, CUdeviceptr address)
{
    return result_of(rt_free(cuda_pointer(address), RT_IMPORT));
}

CU(cuMemGetAllocationPropertiesFromHandle, CUmemAllocationProp *properties, uint64_t handle)
{
    struct rt_block block;
    if (properties == NULL || rt_find(cuda_pointer(handle), &block) != RT_OK || block.kind != RT_PHYSICAL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *properties = (CUmemAllocationProp){.type = 1, .location = {.type = 1, .id = block.device}};
    return CUDA_SUCCESS;
}
