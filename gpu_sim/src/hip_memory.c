/* Simulated HIP: memory of every kind, virtual memory, copies and fills. */
#include "hip.h"

#include <stdlib.h>
#include <string.h>

#define RANGE_GRANULE (2 * SIM_MIB)

/* ---- memory ---- */

bool cuda_graph_free(uint64_t address); /* of hip_graph.c */

HIP(hipMemGetInfo, size_t *free_bytes, size_t *total)
{
    struct rt_context *context;
    uint64_t left, all;
    hipError_t error = hip_context(&context);
    if (error == hipSuccess) {
        error = hip_result(rt_memory(hip_chosen, &left, &all));
    }
    if (error == hipSuccess && free_bytes != NULL) {
        *free_bytes = left;
    }
    if (error == hipSuccess && total != NULL) {
        *total = all;
    }
    return hip_told(error);
}

static void held(enum sim_activity_kind kind, const void *memory, size_t size)
{
    uint64_t now = line_now();
    hip_happened(
        hip_chosen, NULL,
        &(struct sim_activity){.kind = kind, .start = now, .end = now, .bytes = size, .address = (uintptr_t)memory});
}

static hipError_t allocate(enum rt_kind kind, void **memory, size_t size)
{
    struct rt_context *context;
    hipError_t error = memory != NULL ? hip_context(&context) : hipErrorInvalidValue;
    if (error == hipSuccess && size == 0) {
        *memory = NULL;
        return hipSuccess;
    }
    if (error == hipSuccess) {
        error = hip_result(rt_alloc(context, kind, size, memory));
    }
    if (error == hipSuccess) {
        held(SIM_ALLOCATED, *memory, size);
    }
    return hip_told(error);
}

HIP(hipMalloc, void **memory, size_t size)
{
    return allocate(RT_DEVICE, memory, size);
}

HIP(hipExtMallocWithFlags, void **memory, size_t size, unsigned int flags)
{
    (void)flags;
    return allocate(RT_DEVICE, memory, size);
}

HIP(hipMallocManaged, void **memory, size_t size, unsigned int flags)
{
    return flags == 1 || flags == 2 ? allocate(RT_MANAGED, memory, size) : hip_told(hipErrorInvalidValue);
}

HIP(hipMemAdvise, void *memory, size_t size, int advice, int device)
{
    enum { SET_PREFERRED_LOCATION = 3 };
    struct rt_block block;
    (void)size;
    if (hip_start() != hipSuccess || rt_find(memory, &block) != RT_OK || block.kind != RT_MANAGED) {
        return hip_told(hipErrorInvalidValue);
    }
    return hip_told(advice == SET_PREFERRED_LOCATION ? hip_result(rt_move(memory, device < 0)) : hipSuccess);
}

/* ---- arrays ---- */

typedef struct {
    int x, y, z, w, kind;
} hipChannelFormatDesc;

typedef struct {
    size_t width, height, depth;
} hipExtent;

HIP(hipMalloc3DArray, void **array, const hipChannelFormatDesc *what, hipExtent extent, unsigned int flags)
{
    const size_t sides[] = {extent.width, extent.height, extent.depth};
    (void)flags;
    size_t bytes = what != NULL ? (size_t)(what->x + what->y + what->z + what->w) / 8 : 0;
    for (size_t i = 0; i < 3; i++) {
        if (bytes == 0 || bytes > (size_t)1 << 44 || sides[i] > (size_t)1 << 20 || extent.width == 0) {
            return hip_told(hipErrorInvalidValue);
        }
        bytes *= sides[i] > 0 ? sides[i] : 1;
    }
    return allocate(RT_ARRAY, array, bytes);
}

HIP(hipMallocArray, void **array, const hipChannelFormatDesc *what, size_t width, size_t height, unsigned int flags)
{
    return hipMalloc3DArray(array, what, (hipExtent){.width = width, .height = height}, flags);
}

HIP(hipFreeArray, void *array)
{
    hipError_t error = hip_start();
    return hip_told(error == hipSuccess ? hip_result(rt_free(array, RT_ARRAY)) : error);
}

/* ---- memory with rows ---- */

HIP(hipMallocPitch, void **memory, size_t *pitch, size_t width, size_t height)
{
    if (pitch == NULL || width > (size_t)1 << 40 || height > (size_t)1 << 20) {
        return hip_told(hipErrorInvalidValue);
    }
    *pitch = (width + 127) / 128 * 128;
    return allocate(RT_DEVICE, memory, *pitch * height);
}

HIP(hipFree, void *memory)
{
    hipError_t error = hip_start();
    if (error != hipSuccess || memory == NULL) {
        return hip_told(error);
    }
    if (cuda_graph_free((uintptr_t)memory)) {
        return hipSuccess;
    }
    error = hip_result(rt_free(memory, RT_DEVICE));
    if (error == hipSuccess) {
        held(SIM_FREED, memory, 0); /* AMD's records do not say how much */
    }
    return hip_told(error == hipErrorInvalidValue ? hipErrorInvalidDevicePointer : error);
}

HIP(hipHostMalloc, void **memory, size_t size, unsigned int flags)
{
    (void)flags;
    return allocate(RT_HOST, memory, size);
}

HIP(hipHostFree, void *memory)
{
    hipError_t error = hip_start();
    return hip_told(error == hipSuccess && memory != NULL ? hip_result(rt_free(memory, RT_HOST)) : error);
}

HIP(hipPointerGetAttributes, hipPointerAttribute_t *out, const void *memory)
{
    enum { HOST = 1, DEVICE = 2, MANAGED = 3, ARRAY = 10 };
    struct rt_block block;
    if (out == NULL || hip_start() != hipSuccess || rt_find(memory, &block) != RT_OK) {
        return hip_told(hipErrorInvalidValue);
    }
    *out = (hipPointerAttribute_t){.type = block.kind == RT_HOST      ? HOST
                                           : block.kind == RT_MANAGED ? MANAGED
                                           : block.kind == RT_ARRAY   ? ARRAY
                                                                      : DEVICE,
                                   .device = block.device,
                                   .isManaged = block.kind == RT_MANAGED};
    memcpy(&out->devicePointer, &memory, sizeof memory);
    if (block.kind == RT_HOST || block.kind == RT_MANAGED) {
        memcpy(&out->hostPointer, &memory, sizeof memory);
    }
    return hipSuccess;
}

HIP(hipMemGetAddressRange, void **base, size_t *size, void *memory)
{
    struct rt_block block;
    if (hip_start() != hipSuccess || rt_find(memory, &block) != RT_OK || block.kind > RT_MANAGED) {
        return hip_told(hipErrorNotFound);
    }
    if (base != NULL) {
        *base = (void *)block.base;
    }
    if (size != NULL) {
        *size = block.size;
    }
    return hipSuccess;
}

/* ---- virtual memory ---- */

HIP(hipMemGetAllocationGranularity, size_t *granularity, const hipMemAllocationProp *properties, int option)
{
    if (granularity == NULL || properties == NULL || option < 0 || option > 1) {
        return hip_told(hipErrorInvalidValue);
    }
    *granularity = RANGE_GRANULE;
    return hipSuccess;
}

HIP(hipMemAddressReserve, void **address, size_t size, size_t alignment, void *hint, unsigned long long flags)
{
    (void)hint;
    hipError_t error = address != NULL && flags == 0 ? hip_start() : hipErrorInvalidValue;
    return hip_told(error == hipSuccess ? hip_result(rt_range(size, alignment, address)) : error);
}

HIP(hipMemAddressFree, void *address, size_t size)
{
    return hip_told(hip_result(rt_range_free(address, size)));
}

HIP(hipMemCreate, uint64_t *handle, size_t size, const hipMemAllocationProp *properties, unsigned long long flags)
{
    hipError_t error = handle != NULL && properties != NULL && flags == 0 ? hip_start() : hipErrorInvalidValue;
    return hip_told(error == hipSuccess ? hip_result(rt_physical(properties->location.id, size, handle)) : error);
}

HIP(hipMemRelease, uint64_t handle)
{
    return hip_told(hip_result(rt_physical_free(handle)));
}

HIP(hipMemMap, void *address, size_t size, size_t offset, uint64_t handle, unsigned long long flags)
{
    return hip_told(offset == 0 && flags == 0 ? hip_result(rt_map(address, size, handle)) : hipErrorInvalidValue);
}

HIP(hipMemUnmap, void *address, size_t size)
{
    return hip_told(hip_result(rt_unmap(address, size)));
}

HIP(hipMemSetAccess, void *address, size_t size, const hipMemAccessDesc *access, size_t count)
{
    struct rt_block block;
    bool good = size > 0 && access != NULL && count > 0 && rt_find(address, &block) == RT_OK && block.kind == RT_RANGE;
    return hip_told(good ? hipSuccess : hipErrorInvalidValue);
}

/* ---- copies and fills ---- */

enum { PAGEABLE = 1, PINNED, ON_DEVICE, IN_ARRAY, MANAGED }; /* CUpti_ActivityMemoryKind */

static uint8_t memory_kind(const void *memory)
{
    struct rt_block block;
    if (rt_find(memory, &block) != RT_OK) {
        return PAGEABLE;
    }
    return block.kind == RT_HOST ? PINNED : block.kind == RT_MANAGED ? MANAGED : ON_DEVICE;
}

static void put(hipStream_t stream, uint64_t began, uint64_t took, struct sim_activity *activity)
{
    uint64_t start = line_put_since(hip_chosen, hip_line(stream), began, took);
    activity->start = start;
    activity->end = start + took;
}

static void copied(hipStream_t stream, void *to, const void *from, size_t size, uint64_t began)
{
    struct sim_activity activity = {.kind = SIM_COPIED, .bytes = size};
    put(stream, began, rt_copied(to, from, size, line_now() - began), &activity);
    if (sim_tracer() != NULL) {
        activity.from = memory_kind(from);
        activity.to = memory_kind(to);
        hip_happened(hip_chosen, stream, &activity);
    }
}

/* A fill is a kernel of HIP's own. */
static void filled(hipStream_t stream, uint64_t began)
{
    static const unsigned block[] = {256, 1, 1}, grid[] = {64, 1, 1};
    struct sim_activity activity = {
        .kind = SIM_RAN, .name = "__amd_rocclr_fillBufferAligned", .grid = grid, .block = block};
    put(stream, began, line_now() - began, &activity);
    if (sim_tracer() != NULL) {
        activity.kernel = hip_own_kernel(activity.name);
        hip_happened(hip_chosen, stream, &activity);
    }
}

static hipError_t copy(void *to, const void *from, size_t size, hipStream_t stream)
{
    struct rt_context *context;
    hipError_t error = hip_context(&context);
    if (error == hipSuccess && size > 0 && (to == NULL || from == NULL)) {
        error = hipErrorInvalidValue;
    }
    if (error == hipSuccess && size > 0) {
        uint64_t began = line_now();
        memmove(to, from, size);
        copied(stream, to, from, size, began);
    }
    return hip_told(error);
}

HIP(hipMemcpy, void *to, const void *from, size_t size, int kind)
{
    (void)kind;
    return copy(to, from, size, NULL);
}

HIP(hipMemcpyAsync, void *to, const void *from, size_t size, int kind, hipStream_t stream)
{
    (void)kind;
    return copy(to, from, size, stream);
}

HIP(hipMemcpyHtoD, void *to, void *from, size_t size)
{
    return copy(to, from, size, NULL);
}

HIP(hipMemcpyDtoH, void *to, void *from, size_t size)
{
    return copy(to, from, size, NULL);
}

HIP(hipMemcpyDtoD, void *to, void *from, size_t size)
{
    return copy(to, from, size, NULL);
}

static hipError_t fill(void *to, const void *value, size_t width, size_t count, hipStream_t stream)
{
    struct rt_context *context;
    hipError_t error = to != NULL || count == 0 ? hip_context(&context) : hipErrorInvalidValue;
    if (error == hipSuccess && count > 0) {
        uint64_t began = line_now();
        rt_fill(to, value, width, count);
        filled(stream, began);
    }
    return hip_told(error);
}

HIP(hipMemsetAsync, void *to, int value, size_t size, hipStream_t stream)
{
    unsigned char byte = (unsigned char)value;
    return fill(to, &byte, 1, size, stream);
}

HIP(hipMemset, void *to, int value, size_t size)
{
    return hipMemsetAsync(to, value, size, NULL);
}

HIP(hipMemsetD32, void *to, int value, size_t count)
{
    return fill(to, &value, sizeof value, count, NULL);
}
