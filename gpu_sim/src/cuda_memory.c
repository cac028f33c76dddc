/* Simulated CUDA: memory of every kind, virtual memory, memory of other processes, copies and fills. */
#include "cuda.h"

#include <stdlib.h>
#include <string.h>

typedef struct cu_array *CUarray;

typedef struct {
    int type, requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    unsigned char allocFlags[8];
} CUmemAllocationProp;

typedef struct {
    size_t Width, Height;
    int Format;
    unsigned int NumChannels;
} CUDA_ARRAY_DESCRIPTOR;

typedef struct {
    size_t Width, Height, Depth;
    int Format;
    unsigned int NumChannels, Flags;
} CUDA_ARRAY3D_DESCRIPTOR;

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

static CUresult allocate(enum rt_kind kind, CUdeviceptr *address, size_t size)
{
    CUcontext context;
    void *memory;
    CUresult result = address != NULL && size > 0 ? cuda_context(&context) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        result = result_of(rt_alloc(context, kind, size, &memory));
    }
    if (result == CUDA_SUCCESS) {
        *address = (uintptr_t)memory;
    }
    return result;
}

CU(cuMemAlloc_v2, CUdeviceptr *address, size_t size)
{
    return allocate(RT_DEVICE, address, size);
}

CU(cuMemAllocManaged, CUdeviceptr *address, size_t size, unsigned int flags)
{
    return flags == 1 || flags == 2 ? allocate(RT_MANAGED, address, size) : CUDA_ERROR_INVALID_VALUE;
}

CU(cuMemAllocPitch_v2, CUdeviceptr *address, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    if (pitch == NULL || width == 0 || height == 0 || (element != 4 && element != 8 && element != 16) ||
        width > SIZE_MAX / 2 / height) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *pitch = (width + PITCH - 1) / PITCH * PITCH;
    return allocate(RT_DEVICE, address, *pitch * height);
}

CU(cuMemFree_v2, CUdeviceptr address)
{
    CUresult result = result_of(rt_ready());
    if (result == CUDA_SUCCESS && cuda_graph_free(address)) {
        return CUDA_SUCCESS;
    }
    return result != CUDA_SUCCESS || address == 0 ? result : result_of(rt_free(cuda_pointer(address), RT_DEVICE));
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

CU(cuMemPrefetchAsync, CUdeviceptr address, size_t size, CUdevice device, CUstream stream)
{
    (void)size;
    (void)stream;
    return result_of(rt_move(cuda_pointer(address), device < 0));
}

CU(cuMemAdvise, CUdeviceptr address, size_t size, int advice, CUdevice device)
{
    enum { SET_PREFERRED_LOCATION = 3 };
    struct rt_block block;
    if (advice == SET_PREFERRED_LOCATION) {
        return cuMemPrefetchAsync(address, size, device, NULL);
    }
    bool managed = rt_find(cuda_pointer(address), &block) == RT_OK && block.kind == RT_MANAGED;
    return managed ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CU(cuPointerGetAttribute, void *out, int attribute, CUdeviceptr address)
{
    enum { CONTEXT = 1, MEMORY_TYPE = 2, DEVICE_POINTER = 3, HOST_POINTER = 4, IS_MANAGED = 8, DEVICE_ORDINAL = 9 };
    struct rt_block block;
    if (out == NULL || rt_find(cuda_pointer(address), &block) != RT_OK) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    switch (attribute) {
    case CONTEXT:
        memcpy(out, &block.context, sizeof block.context);
        return CUDA_SUCCESS;
    case MEMORY_TYPE:
        *(unsigned int *)out = block.kind == RT_HOST ? 1 : 2;
        return CUDA_SUCCESS;
    case DEVICE_POINTER:
        memcpy(out, &address, sizeof address);
        return CUDA_SUCCESS;
    case HOST_POINTER:
        memcpy(out, &address, sizeof address);
        return block.kind == RT_DEVICE ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    case IS_MANAGED:
        *(unsigned int *)out = block.kind == RT_MANAGED;
        return CUDA_SUCCESS;
    case DEVICE_ORDINAL:
        *(int *)out = block.device;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

/* ---- arrays ---- */

static size_t texel(int format, unsigned int channels)
{
    size_t bytes = format == 0x01 || format == 0x08                     ? 1
                   : format == 0x02 || format == 0x09 || format == 0x10 ? 2
                   : format == 0x03 || format == 0x0a || format == 0x20 ? 4
                                                                        : 0;
    return channels == 1 || channels == 2 || channels == 4 ? bytes * channels : 0;
}

CU(cuArray3DCreate_v2, CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *what)
{
    size_t bytes = what != NULL ? texel(what->Format, what->NumChannels) : 0;
    if (array == NULL || bytes == 0 || what->Width == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const size_t sides[] = {what->Width, what->Height, what->Depth};
    for (size_t i = 0; i < 3; i++) {
        if (sides[i] > (size_t)1 << 20) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        bytes *= sides[i] > 0 ? sides[i] : 1;
    }
    CUdeviceptr address;
    CUresult result = allocate(RT_ARRAY, &address, bytes);
    if (result == CUDA_SUCCESS) {
        *array = cuda_pointer(address);
    }
    return result;
}

CU(cuArrayCreate_v2, CUarray *array, const CUDA_ARRAY_DESCRIPTOR *what)
{
    if (what == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    CUDA_ARRAY3D_DESCRIPTOR full = {
        .Width = what->Width, .Height = what->Height, .Format = what->Format, .NumChannels = what->NumChannels};
    return cuArray3DCreate_v2(array, &full);
}

CU(cuArrayDestroy, CUarray array)
{
    CUresult result = result_of(rt_free(array, RT_ARRAY));
    return result == CUDA_ERROR_INVALID_VALUE ? CUDA_ERROR_INVALID_HANDLE : result;
}

/* All levels of detail in one: each has half the side lengths of the one before. */
CU(cuMipmappedArrayCreate, CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *what, unsigned int levels)
{
    enum { LAYERED = 1 };
    size_t bytes = what != NULL ? texel(what->Format, what->NumChannels) : 0, sum = 0;
    size_t most = (size_t)1 << 20;
    if (array == NULL || bytes == 0 || what->Width == 0 || what->Width > most || what->Height > most ||
        what->Depth > most) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    size_t width = what->Width, height = what->Height, planes = what->Depth;
    bool more = true; /* CUDA clamps levels: one at the least, and none behind that of one element */
    for (unsigned level = 0; level == 0 || (level < levels && more); level++) {
        more = width > 1 || height > 1 || (planes > 1 && !(what->Flags & LAYERED));
        sum += bytes * (width > 0 ? width : 1) * (height > 0 ? height : 1) * (planes > 0 ? planes : 1);
        width /= 2;
        height /= 2;
        planes /= (what->Flags & LAYERED) != 0 ? 1 : 2;
    }
    CUdeviceptr address;
    CUresult result = allocate(RT_ARRAY, &address, sum);
    if (result == CUDA_SUCCESS) {
        *array = cuda_pointer(address);
    }
    return result;
}

ALIAS(cuMipmappedArrayDestroy, cuArrayDestroy, (array), CUarray array)

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
    enum { PINNED = 1, ON_DEVICE = 1 };
    if (handle == NULL || properties == NULL || flags != 0 || properties->type != PINNED ||
        properties->location.type != ON_DEVICE) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return result_of(rt_physical(properties->location.id, size, handle));
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

/* ---- copies and fills ---- */

static CUresult copy(void *to, const void *from, size_t size)
{
    CUcontext context;
    CUresult result = cuda_context(&context);
    if (result == CUDA_SUCCESS && size > 0 && (to == NULL || from == NULL)) {
        result = CUDA_ERROR_INVALID_VALUE;
    }
    if (result == CUDA_SUCCESS) {
        memmove(to, from, size);
    }
    return result;
}

CU(cuMemcpy, CUdeviceptr to, CUdeviceptr from, size_t size)
{
    return copy(cuda_pointer(to), cuda_pointer(from), size);
}

CU(cuMemcpyHtoD_v2, CUdeviceptr to, const void *from, size_t size)
{
    return copy(cuda_pointer(to), from, size);
}

CU(cuMemcpyDtoH_v2, void *to, CUdeviceptr from, size_t size)
{
    return copy(to, cuda_pointer(from), size);
}

CU(cuMemcpyDtoD_v2, CUdeviceptr to, CUdeviceptr from, size_t size)
{
    return copy(cuda_pointer(to), cuda_pointer(from), size);
}

CU(cuMemcpyAsync, CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    (void)stream;
    return copy(cuda_pointer(to), cuda_pointer(from), size);
}

CU(cuMemcpyHtoDAsync_v2, CUdeviceptr to, const void *from, size_t size, CUstream stream)
{
    (void)stream;
    return copy(cuda_pointer(to), from, size);
}

CU(cuMemcpyDtoHAsync_v2, void *to, CUdeviceptr from, size_t size, CUstream stream)
{
    (void)stream;
    return copy(to, cuda_pointer(from), size);
}

CU(cuMemcpyDtoDAsync_v2, CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    (void)stream;
    return copy(cuda_pointer(to), cuda_pointer(from), size);
}

static CUresult fill(CUdeviceptr to, const void *value, size_t width, size_t count)
{
    CUcontext context;
    CUresult result = cuda_context(&context);
    if (result == CUDA_SUCCESS && to == 0 && count > 0) {
        result = CUDA_ERROR_INVALID_VALUE;
    }
    if (result == CUDA_SUCCESS) {
        rt_fill(cuda_pointer(to), value, width, count);
    }
    return result;
}

#define MEMSET(NAME, TYPE)                                                                                             \
    CU(cuMemset##NAME##_v2, CUdeviceptr to, TYPE value, size_t count)                                                  \
    {                                                                                                                  \
        return fill(to, &value, sizeof value, count);                                                                  \
    }                                                                                                                  \
    CU(cuMemset##NAME##Async, CUdeviceptr to, TYPE value, size_t count, CUstream stream)                               \
    {                                                                                                                  \
        (void)stream;                                                                                                  \
        return fill(to, &value, sizeof value, count);                                                                  \
    }

MEMSET(D8, unsigned char)
MEMSET(D16, unsigned short)
MEMSET(D32, unsigned int)
