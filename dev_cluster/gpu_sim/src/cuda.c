/* The memory part of the simulated CUDA driver. Kernels are not run; every operation is complete when it returns. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cuda.h"
#include "mps.h"

typedef struct cu_array *CUarray;

typedef struct {
    int type, requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    unsigned char allocFlags[8];
} CUmemAllocationProp;

typedef struct {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;

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

/* A second exported name with the same behaviour. */
#define ALIAS(NEW, OLD, PARAMETERS, ...)                                                                               \
    CU(NEW, __VA_ARGS__)                                                                                               \
    {                                                                                                                  \
        return OLD PARAMETERS;                                                                                         \
    }

/* ---- the driver and its devices ---- */

CU(cuInit, unsigned int flags)
{
    static const char *const lists[] = {"CUDA_VISIBLE_DEVICES"};
    return flags != 0 ? CUDA_ERROR_INVALID_VALUE : result_of(rt_open(SIM_VENDOR_NVIDIA, GRANULE, lists, 1));
}

CU(cuDriverGetVersion, int *version)
{
    struct sim_state head;
    if (version == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *version = sim_enter(0, &head) == SIM_OK ? (int)head.drivers[SIM_VENDOR_NVIDIA].runtime : 12040;
    return CUDA_SUCCESS;
}

CU(cuDeviceGetCount, int *count)
{
    CUresult result = count != NULL ? result_of(rt_ready()) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *count = rt_count();
    }
    return result;
}

CU(cuDeviceGet, CUdevice *device, int ordinal)
{
    CUresult result = device != NULL ? result_of(rt_ready()) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && (ordinal < 0 || ordinal >= rt_count())) {
        result = CUDA_ERROR_INVALID_DEVICE;
    }
    if (result == CUDA_SUCCESS) {
        *device = ordinal;
    }
    return result;
}

CU(cuDeviceGetName, char *name, int size, CUdevice device)
{
    struct sim_gpu gpu;
    uint8_t instance;
    CUresult result =
        name != NULL && size > 0 ? result_of(rt_gpu(device, &gpu, NULL, &instance)) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        char text[192];
        bool whole = instance == SIM_NO_INSTANCE;
        snprintf(text, sizeof text, "%s%s%s", gpu.name, whole ? "" : " MIG ",
                 whole ? "" : gpu.profiles[gpu.instances[instance].profile].name);
        sim_text(name, (size_t)size, text);
    }
    return result;
}

CU(cuDeviceGetUuid_v2, unsigned char *uuid, CUdevice device)
{
    struct sim_gpu gpu;
    uint8_t instance;
    CUresult result = uuid != NULL ? result_of(rt_gpu(device, &gpu, NULL, &instance)) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) { /* after "GPU-" or "MIG-" */
        const char *text = (instance == SIM_NO_INSTANCE ? gpu.uuid : gpu.instances[instance].uuid) + 4;
        for (unsigned i = 0; i < 16 && text[0] != 0 && text[1] != 0; i++, text += 2) {
            text += *text == '-';
            char pair[3] = {text[0], text[1], 0};
            uuid[i] = (unsigned char)strtoul(pair, NULL, 16);
        }
    }
    return result;
}

ALIAS(cuDeviceGetUuid, cuDeviceGetUuid_v2, (uuid, device), unsigned char *uuid, CUdevice device)

CU(cuDeviceTotalMem_v2, size_t *bytes, CUdevice device)
{
    uint64_t free_bytes, total;
    CUresult result = bytes != NULL ? result_of(rt_memory(device, &free_bytes, &total)) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *bytes = total;
    }
    return result;
}

CU(cuDeviceComputeCapability, int *major, int *minor, CUdevice device)
{
    struct sim_gpu gpu;
    CUresult result =
        major != NULL && minor != NULL ? result_of(rt_gpu(device, &gpu, NULL, NULL)) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *major = (int)gpu.capability_major;
        *minor = (int)gpu.capability_minor;
    }
    return result;
}

CU(cuDeviceGetAttribute, int *value, int attribute, CUdevice device)
{
    struct sim_gpu gpu;
    uint8_t instance;
    CUresult result = value != NULL ? result_of(rt_gpu(device, &gpu, NULL, &instance)) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS) {
        return result;
    }
    uint32_t sms = (sim_multiprocessors(&gpu, instance) * mps_percentage() + 99) / 100;
    const struct {
        int attribute;
        uint32_t value;
    } known[] = {
        {1, 1024},                           /* threads a block */
        {10, 32},                            /* warp */
        {13, gpu.clock_graphics_max * 1000}, /* kHz */
        {16, sms},                           /* multiprocessors */
        {20, gpu.compute_mode},              /* compute mode */
        {32, gpu.ecc_enabled},               /* ECC */
        {33, gpu.pci.bus},                   /* PCI bus */
        {34, gpu.pci.device},                /* PCI device */
        {36, gpu.clock_memory_max * 1000},   /* kHz */
        {37, gpu.bus_width},                 /* bits */
        {40, 3},                             /* copy engines */
        {41, 1},                             /* unified addressing */
        {50, gpu.pci.domain},                /* PCI domain */
        {75, gpu.capability_major},          /* compute capability */
        {76, gpu.capability_minor},          /* compute capability */
        {83, 1},                             /* managed memory */
        {89, 1},                             /* concurrent managed access */
        {102, 1},                            /* virtual memory management */
        {115, 1},                            /* memory pools */
    };
    *value = 0;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (known[i].attribute == attribute) {
            *value = (int)known[i].value;
        }
    }
    return attribute > 0 && attribute < 200 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CU(cuDeviceGetPCIBusId, char *text, int size, CUdevice device)
{
    struct sim_gpu gpu;
    CUresult result = text != NULL && size > 0 ? result_of(rt_gpu(device, &gpu, NULL, NULL)) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        snprintf(text, (size_t)size, "%04X:%02X:%02X.%X", gpu.pci.domain, gpu.pci.bus, gpu.pci.device,
                 gpu.pci.function);
    }
    return result;
}

CU(cuDeviceGetByPCIBusId, CUdevice *device, const char *text)
{
    unsigned domain, bus, slot;
    CUresult result = device != NULL && text != NULL ? result_of(rt_ready()) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS || sscanf(text, "%x:%x:%x", &domain, &bus, &slot) != 3) {
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_INVALID_VALUE;
    }
    for (int i = 0; i < rt_count(); i++) {
        struct sim_gpu gpu;
        if (rt_gpu(i, &gpu, NULL, NULL) == RT_OK && gpu.pci.domain == domain && gpu.pci.bus == bus &&
            gpu.pci.device == slot) {
            *device = i;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_DEVICE;
}

CU(cuDeviceCanAccessPeer, int *can, CUdevice device, CUdevice peer)
{
    struct sim_gpu one, other;
    unsigned index;
    CUresult result = can != NULL ? result_of(rt_gpu(device, &one, NULL, NULL)) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        result = result_of(rt_gpu(peer, &other, &index, NULL));
    }
    if (result == CUDA_SUCCESS) {
        *can = device != peer && (one.link_count > 0 || one.p2p[index]) && !one.mig_enabled && !other.mig_enabled;
    }
    return result;
}

/* ---- contexts: a stack for each thread ---- */

enum { STACK = 32 };
static _Thread_local CUcontext stack[STACK];
static _Thread_local int depth;

static CUcontext current(void)
{
    return depth > 0 && rt_ready() == RT_OK && rt_context_valid(stack[depth - 1]) ? stack[depth - 1] : NULL;
}

static CUresult need_context(CUcontext *context)
{
    CUresult result = result_of(rt_ready());
    *context = result == CUDA_SUCCESS ? current() : NULL;
    return result == CUDA_SUCCESS && *context == NULL ? CUDA_ERROR_INVALID_CONTEXT : result;
}

CU(cuCtxPushCurrent_v2, CUcontext context)
{
    if (rt_ready() != RT_OK) {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    if (!rt_context_valid(context) || depth == STACK) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

CU(cuCtxPopCurrent_v2, CUcontext *context)
{
    if (depth == 0) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    depth--;
    if (context != NULL) {
        *context = stack[depth];
    }
    return CUDA_SUCCESS;
}

CU(cuCtxSetCurrent, CUcontext context)
{
    if (rt_ready() != RT_OK) {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    if (context != NULL && !rt_context_valid(context)) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    depth -= depth > 0;
    return context != NULL ? cuCtxPushCurrent_v2(context) : CUDA_SUCCESS;
}

CU(cuCtxGetCurrent, CUcontext *context)
{
    if (context == NULL || rt_ready() != RT_OK) {
        return context == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_NOT_INITIALIZED;
    }
    *context = current();
    return CUDA_SUCCESS;
}

CU(cuCtxGetDevice, CUdevice *device)
{
    CUcontext context;
    CUresult result = device != NULL ? need_context(&context) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *device = context->device;
    }
    return result;
}

CU(cuCtxCreate_v2, CUcontext *context, unsigned int flags, CUdevice device)
{
    (void)flags;
    CUresult result = context != NULL ? result_of(rt_context_new(device, context)) : CUDA_ERROR_INVALID_VALUE;
    return result == CUDA_SUCCESS ? cuCtxPushCurrent_v2(*context) : result;
}

CU(cuCtxCreate_v3, CUcontext *context, void *affinity, int count, unsigned int flags, CUdevice device)
{
    (void)affinity;
    (void)count;
    return cuCtxCreate_v2(context, flags, device);
}

CU(cuCtxCreate_v4, CUcontext *context, void *parameters, unsigned int flags, CUdevice device)
{
    (void)parameters;
    return cuCtxCreate_v2(context, flags, device);
}

CU(cuCtxDestroy_v2, CUcontext context)
{
    if (depth > 0 && stack[depth - 1] == context) {
        depth--;
    }
    CUresult result = result_of(rt_context_free(context));
    return result == CUDA_ERROR_INVALID_VALUE ? CUDA_ERROR_INVALID_CONTEXT : result;
}

CU(cuDevicePrimaryCtxRetain, CUcontext *context, CUdevice device)
{
    return context != NULL ? result_of(rt_primary(device, context)) : CUDA_ERROR_INVALID_VALUE;
}

CU(cuDevicePrimaryCtxRelease_v2, CUdevice device)
{
    CUresult result = result_of(rt_primary_release(device, false));
    return result == CUDA_ERROR_INVALID_VALUE ? CUDA_ERROR_INVALID_CONTEXT : result;
}

CU(cuDevicePrimaryCtxReset_v2, CUdevice device)
{
    return result_of(rt_primary_release(device, true));
}

CU(cuDevicePrimaryCtxGetState, CUdevice device, unsigned int *flags, int *active)
{
    if (flags == NULL || active == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *flags = 0;
    *active = rt_primary_active(device);
    return result_of(rt_ready());
}

CU(cuDevicePrimaryCtxSetFlags_v2, CUdevice device, unsigned int flags)
{
    (void)flags;
    return device >= 0 && device < rt_count() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CU(cuCtxSynchronize, void)
{
    CUcontext context;
    return need_context(&context);
}

CU(cuCtxGetFlags, unsigned int *flags)
{
    CUcontext context;
    CUresult result = flags != NULL ? need_context(&context) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *flags = 0;
    }
    return result;
}

CU(cuCtxGetApiVersion, CUcontext context, unsigned int *version)
{
    (void)context;
    if (version == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *version = 3020;
    return CUDA_SUCCESS;
}

enum { LIMIT_PRINT = 1, LIMIT_HEAP = 2 }; /* the buffer of printf and the heap of malloc in kernels */

static size_t first_size(int limit)
{
    return limit == LIMIT_HEAP ? 8 * SIM_MIB : SIM_MIB;
}

CU(cuCtxGetLimit, size_t *value, int limit)
{
    CUcontext context;
    CUresult result = value != NULL && limit < 7 ? need_context(&context) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *value = limit == LIMIT_PRINT || limit == LIMIT_HEAP ? first_size(limit) + context->extra[limit - 1] : 1024;
    }
    return result;
}

CU(cuCtxSetLimit, int limit, size_t value)
{
    CUcontext context;
    CUresult result = limit < 7 ? need_context(&context) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS &&
        (limit == LIMIT_PRINT || limit == LIMIT_HEAP)) { /* beyond its first size: device memory */
        size_t first = first_size(limit), beyond = value > first ? value - first : 0;
        uint64_t wanted = (beyond + GRANULE - 1) / GRANULE * GRANULE, before = context->extra[limit - 1];
        result = result_of(rt_context_grow(context, (unsigned)limit - 1, (int64_t)(wanted - before)));
    }
    return result;
}

CU(cuCtxEnablePeerAccess, CUcontext peer, unsigned int flags)
{
    (void)flags;
    return rt_context_valid(peer) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

/* ---- memory ---- */

static void *pointer(CUdeviceptr address)
{
    return (void *)(uintptr_t)address;
}

CU(cuMemGetInfo_v2, size_t *free_bytes, size_t *total)
{
    CUcontext context;
    uint64_t left, all;
    CUresult result = free_bytes != NULL && total != NULL ? need_context(&context) : CUDA_ERROR_INVALID_VALUE;
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
    CUresult result = address != NULL && size > 0 ? need_context(&context) : CUDA_ERROR_INVALID_VALUE;
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
    return result != CUDA_SUCCESS || address == 0 ? result : result_of(rt_free(pointer(address), RT_DEVICE));
}

CU(cuMemGetAddressRange_v2, CUdeviceptr *base, size_t *size, CUdeviceptr address)
{
    struct rt_block block;
    enum rt_status status = rt_find(pointer(address), &block);
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
    CUresult result = memory != NULL ? need_context(&context) : CUDA_ERROR_INVALID_VALUE;
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
    return memory != NULL && size > 0 ? need_context(&context) : CUDA_ERROR_INVALID_VALUE;
}

CU(cuMemHostUnregister, void *memory)
{
    return memory != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CU(cuMemPrefetchAsync, CUdeviceptr address, size_t size, CUdevice device, CUstream stream)
{
    (void)size;
    (void)stream;
    return result_of(rt_move(pointer(address), device < 0));
}

CU(cuMemAdvise, CUdeviceptr address, size_t size, int advice, CUdevice device)
{
    enum { SET_PREFERRED_LOCATION = 3 };
    struct rt_block block;
    if (advice == SET_PREFERRED_LOCATION) {
        return cuMemPrefetchAsync(address, size, device, NULL);
    }
    bool managed = rt_find(pointer(address), &block) == RT_OK && block.kind == RT_MANAGED;
    return managed ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CU(cuPointerGetAttribute, void *out, int attribute, CUdeviceptr address)
{
    enum { CONTEXT = 1, MEMORY_TYPE = 2, DEVICE_POINTER = 3, HOST_POINTER = 4, IS_MANAGED = 8, DEVICE_ORDINAL = 9 };
    struct rt_block block;
    if (out == NULL || rt_find(pointer(address), &block) != RT_OK) {
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
        *array = pointer(address);
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
    if (array == NULL || bytes == 0 || levels == 0 || levels > 21 || what->Width == 0 || what->Width > most ||
        what->Height > most || what->Depth > most) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    size_t width = what->Width, height = what->Height, planes = what->Depth;
    for (unsigned level = 0; level < levels; level++) {
        sum += bytes * (width > 0 ? width : 1) * (height > 0 ? height : 1) * (planes > 0 ? planes : 1);
        width /= 2;
        height /= 2;
        planes /= (what->Flags & LAYERED) != 0 ? 1 : 2;
    }
    CUdeviceptr address;
    CUresult result = allocate(RT_ARRAY, &address, sum);
    if (result == CUDA_SUCCESS) {
        *array = pointer(address);
    }
    return result;
}

ALIAS(cuMipmappedArrayDestroy, cuArrayDestroy, (array), CUarray array)

/* ---- pools ---- */

CU(cuDeviceGetDefaultMemPool, CUmemoryPool *pool, CUdevice device)
{
    if (pool == NULL || rt_default_pool(device) == NULL) {
        return pool == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_DEVICE;
    }
    *pool = rt_default_pool(device);
    return CUDA_SUCCESS;
}

CU(cuDeviceGetMemPool, CUmemoryPool *pool, CUdevice device)
{
    if (pool == NULL || rt_current_pool(device) == NULL) {
        return pool == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_DEVICE;
    }
    *pool = rt_current_pool(device);
    return CUDA_SUCCESS;
}

CU(cuDeviceSetMemPool, CUdevice device, CUmemoryPool pool)
{
    return result_of(rt_set_pool(device, pool));
}

CU(cuMemPoolCreate, CUmemoryPool *pool, const CUmemPoolProps *properties)
{
    return pool != NULL && properties != NULL ? result_of(rt_pool_new(properties->location.id, pool))
                                              : CUDA_ERROR_INVALID_VALUE;
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

CU(cuMemAllocFromPoolAsync, CUdeviceptr *address, size_t size, CUmemoryPool pool, CUstream stream)
{
    CUcontext context;
    void *memory;
    (void)stream;
    CUresult result = address != NULL ? need_context(&context) : CUDA_ERROR_INVALID_VALUE;
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
    CUresult result = need_context(&context);
    if (result == CUDA_SUCCESS && (uintptr_t)stream > 2 && stream->capture != NULL) {
        return cuda_graph_capture_alloc(stream->capture, context->device, address, size);
    }
    return result == CUDA_SUCCESS ? cuMemAllocFromPoolAsync(address, size, rt_current_pool(context->device), stream)
                                  : result;
}

CU(cuMemFreeAsync, CUdeviceptr address, CUstream stream)
{
    if ((uintptr_t)stream > 2 && stream->capture != NULL) {
        return cuda_graph_capture_free(stream->capture, address);
    }
    return cuMemFree_v2(address);
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
    return result_of(rt_range_free(pointer(address), size));
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
    return offset == 0 && flags == 0 ? result_of(rt_map(pointer(address), size, handle)) : CUDA_ERROR_INVALID_VALUE;
}

CU(cuMemUnmap, CUdeviceptr address, size_t size)
{
    return result_of(rt_unmap(pointer(address), size));
}

CU(cuMemSetAccess, CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count)
{
    struct rt_block block;
    bool good = size > 0 && access != NULL && count > 0 && rt_find(pointer(address), &block) == RT_OK;
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
    return result_of(rt_share(pointer(address), &handle->shared));
}

CU(cuIpcOpenMemHandle_v2, CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
    CUcontext context;
    void *memory;
    (void)flags;
    CUresult result = address != NULL ? need_context(&context) : CUDA_ERROR_INVALID_VALUE;
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
    return result_of(rt_free(pointer(address), RT_IMPORT));
}

CU(cuMemGetAllocationPropertiesFromHandle, CUmemAllocationProp *properties, uint64_t handle)
{
    struct rt_block block;
    if (properties == NULL || rt_find(pointer(handle), &block) != RT_OK || block.kind != RT_PHYSICAL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *properties = (CUmemAllocationProp){.type = 1, .location = {.type = 1, .id = block.device}};
    return CUDA_SUCCESS;
}

/* ---- copies and fills ---- */

static CUresult copy(void *to, const void *from, size_t size)
{
    CUcontext context;
    CUresult result = need_context(&context);
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
    return copy(pointer(to), pointer(from), size);
}

CU(cuMemcpyHtoD_v2, CUdeviceptr to, const void *from, size_t size)
{
    return copy(pointer(to), from, size);
}

CU(cuMemcpyDtoH_v2, void *to, CUdeviceptr from, size_t size)
{
    return copy(to, pointer(from), size);
}

CU(cuMemcpyDtoD_v2, CUdeviceptr to, CUdeviceptr from, size_t size)
{
    return copy(pointer(to), pointer(from), size);
}

CU(cuMemcpyAsync, CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    (void)stream;
    return copy(pointer(to), pointer(from), size);
}

CU(cuMemcpyHtoDAsync_v2, CUdeviceptr to, const void *from, size_t size, CUstream stream)
{
    (void)stream;
    return copy(pointer(to), from, size);
}

CU(cuMemcpyDtoHAsync_v2, void *to, CUdeviceptr from, size_t size, CUstream stream)
{
    (void)stream;
    return copy(to, pointer(from), size);
}

CU(cuMemcpyDtoDAsync_v2, CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    (void)stream;
    return copy(pointer(to), pointer(from), size);
}

static CUresult fill(CUdeviceptr to, const void *value, size_t width, size_t count)
{
    CUcontext context;
    CUresult result = need_context(&context);
    if (result == CUDA_SUCCESS && to == 0 && count > 0) {
        result = CUDA_ERROR_INVALID_VALUE;
    }
    if (result == CUDA_SUCCESS) {
        rt_fill(pointer(to), value, width, count);
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

/* ---- streams and events ---- */

struct cu_event {
    struct timespec when;
};

CU(cuStreamCreateWithPriority, CUstream *stream, unsigned int flags, int priority)
{
    CUcontext context;
    (void)flags;
    CUresult result = stream != NULL ? need_context(&context) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *stream = calloc(1, sizeof **stream);
        result = *stream != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result == CUDA_SUCCESS) {
        (*stream)->priority = priority;
        (*stream)->context = context;
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
    CUcontext context;
    (void)stream;
    return need_context(&context);
}

CU(cuStreamGetCtx, CUstream stream, CUcontext *context)
{
    CUcontext now;
    CUresult result = context != NULL ? need_context(&now) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *context = (uintptr_t)stream > 2 ? stream->context : now;
    }
    return result;
}

CU(cuStreamQuery, CUstream stream)
{
    return cuStreamSynchronize(stream);
}

CU(cuStreamWaitEvent, CUstream stream, struct cu_event *event, unsigned int flags)
{
    (void)flags;
    return event != NULL ? cuStreamSynchronize(stream) : CUDA_ERROR_INVALID_HANDLE;
}

CU(cuEventCreate, struct cu_event **event, unsigned int flags)
{
    CUcontext context;
    (void)flags;
    CUresult result = event != NULL ? need_context(&context) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *event = calloc(1, sizeof **event);
        result = *event != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
    return result;
}

CU(cuEventRecord, struct cu_event *event, CUstream stream)
{
    (void)stream;
    if (event == NULL) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    clock_gettime(CLOCK_MONOTONIC, &event->when);
    return CUDA_SUCCESS;
}

CU(cuEventQuery, struct cu_event *event)
{
    return event != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

ALIAS(cuEventSynchronize, cuEventQuery, (event), struct cu_event *event)

CU(cuEventElapsedTime, float *ms, struct cu_event *start, struct cu_event *end)
{
    if (ms == NULL || start == NULL || end == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    double seconds = (double)(end->when.tv_sec - start->when.tv_sec);
    double rest = (double)(end->when.tv_nsec - start->when.tv_nsec);
    *ms = (float)(seconds * 1e3 + rest / 1e6);
    return CUDA_SUCCESS;
}

CU(cuEventDestroy_v2, struct cu_event *event)
{
    free(event);
    return event != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* ---- errors and entry points ---- */

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE",
     "CUDA-capable device(s) is/are busy or unavailable"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static CUresult error_text(CUresult error, const char **text, bool name)
{
    for (size_t i = 0; text != NULL && i < sizeof errors / sizeof *errors; i++) {
        if (errors[i].code == error) {
            *text = name ? errors[i].name : errors[i].text;
            return CUDA_SUCCESS;
        }
    }
    if (text != NULL) {
        *text = NULL;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

CU(cuGetErrorName, CUresult error, const char **text)
{
    return error_text(error, text, true);
}

CU(cuGetErrorString, CUresult error, const char **text)
{
    return error_text(error, text, false);
}

/* The newest form of a function that a program written for `version` knows. */
static void *entry_point(void *library, const char *symbol, int version)
{
    static const struct {
        const char *symbol;
        int since;
        const char *suffix;
    } exceptions[] = {
        {"cuCtxCreate", 12050, "_v4"},
        {"cuCtxCreate", 11040, "_v3"},
        {"cuGetProcAddress", 12000, "_v2"},
        {"cuGetProcAddress", 0, ""},
    };
    const char *suffix = NULL;
    for (size_t i = 0; i < sizeof exceptions / sizeof *exceptions && suffix == NULL; i++) {
        if (strcmp(exceptions[i].symbol, symbol) == 0 && version >= exceptions[i].since) {
            suffix = exceptions[i].suffix;
        }
    }
    char name[128];
    snprintf(name, sizeof name, "%s%s", symbol, suffix != NULL ? suffix : "_v2");
    void *found = dlsym(library, name);
    return found != NULL || suffix != NULL ? found : dlsym(library, symbol);
}

/* As the driver does, this answers with its own functions, whatever was loaded before it. */
CU(cuGetProcAddress_v2, const char *symbol, void **function, int version, uint64_t flags, int *found)
{
    Dl_info self;
    (void)flags;
    if (symbol == NULL || function == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *function = NULL;
    if (dladdr((void *)errors, &self) != 0) {
        void *library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
        if (library != NULL) {
            *function = entry_point(library, symbol, version);
            dlclose(library);
        }
    }
    if (found != NULL) {
        *found = *function != NULL ? 0 : 1; /* success, symbol not found */
    }
    return *function != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CU(cuGetProcAddress, const char *symbol, void **function, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
