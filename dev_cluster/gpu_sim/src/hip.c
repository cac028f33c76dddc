/* The memory part of the simulated HIP runtime. Kernels are not run; every operation is complete when it returns. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "runtime.h"

typedef struct hip_stream *hipStream_t;
typedef struct hip_event *hipEvent_t;
typedef struct rt_pool *hipMemPool_t;

typedef enum {
    hipSuccess = 0,
    hipErrorInvalidValue = 1,
    hipErrorOutOfMemory = 2,
    hipErrorNotInitialized = 3,
    hipErrorInvalidDevicePointer = 17,
    hipErrorNoDevice = 100,
    hipErrorInvalidDevice = 101,
    hipErrorInvalidHandle = 400,
    hipErrorIllegalState = 401,
    hipErrorNotFound = 500,
    hipErrorNotSupported = 801,
    hipErrorUnknown = 999
} hipError_t;

typedef struct {
    int type, id;
} hipMemLocation;

typedef struct {
    int type, requestedHandleType;
    hipMemLocation location;
    void *win32HandleMetaData;
    unsigned char allocFlags[8];
} hipMemAllocationProp;

typedef struct {
    int allocType, handleTypes;
    hipMemLocation location;
    void *win32SecurityAttributes;
    size_t maxSize;
    unsigned char reserved[56];
} hipMemPoolProps;

typedef struct {
    hipMemLocation location;
    int flags;
} hipMemAccessDesc;

typedef struct {
    int type, device;
    void *devicePointer, *hostPointer;
    int isManaged;
    unsigned allocationFlags;
} hipPointerAttribute_t;

/* hipDeviceProp_t of HIP 6 (symbol hipGetDevicePropertiesR0600); figures that nobody asks for are left out by size. */
typedef struct {
    char name[256];
    unsigned char uuid[16];
    char luid[8];
    unsigned int luidDeviceNodeMask;
    size_t totalGlobalMem, sharedMemPerBlock;
    int regsPerBlock, warpSize;
    size_t memPitch;
    int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3], clockRate;
    size_t totalConstMem;
    int major, minor;
    size_t textureAlignment, texturePitchAlignment;
    int deviceOverlap, multiProcessorCount, kernelExecTimeoutEnabled, integrated, canMapHostMemory, computeMode;
    int textures[40];
    size_t surfaceAlignment;
    int concurrentKernels, ECCEnabled, pciBusID, pciDeviceID, pciDomainID, tccDriver, asyncEngineCount,
        unifiedAddressing, memoryClockRate, memoryBusWidth, l2CacheSize, persistingL2CacheMaxSize,
        maxThreadsPerMultiProcessor, streamPrioritiesSupported, globalL1CacheSupported, localL1CacheSupported;
    size_t sharedMemPerMultiprocessor;
    int regsPerMultiprocessor, managedMemory, features[10];
    size_t sharedMemPerBlockOptin;
    int blocks[4];
    size_t reservedSharedMemPerBlock;
    int registration[4], memoryPoolsSupported, rdma[3], arrays[5], reserved[63], hipReserved[32];
    char gcnArchName[256];
    size_t maxSharedMemoryPerMultiProcessor;
    int clockInstructionRate;
    unsigned int arch;
    unsigned int *hdpMemFlushCntl, *hdpRegFlushCntl;
    int cooperative[4], isLargeBar, asicRevision;
} hipDeviceProp_t;

#define GRANULE ((uint64_t)4096) /* device memory comes in pages of 4 KiB */
#define RANGE_GRANULE (2 * SIM_MIB)

static _Thread_local int chosen; /* device of this thread */
static _Thread_local hipError_t last;

static hipError_t result_of(enum rt_status status)
{
    static const hipError_t results[] = {
        [RT_OK] = hipSuccess,
        [RT_INVALID] = hipErrorInvalidValue,
        [RT_NO_MEMORY] = hipErrorOutOfMemory,
        [RT_CLOSED] = hipErrorNotInitialized,
        [RT_NO_DEVICE] = hipErrorNoDevice,
        [RT_BAD_DEVICE] = hipErrorInvalidDevice,
        [RT_UNAVAILABLE] = hipErrorUnknown,
        [RT_BUSY] = hipErrorIllegalState,
    };
    return results[status];
}

static hipError_t told(hipError_t error)
{
    last = error != hipSuccess ? error : last;
    return error;
}

#define HIP(NAME, ...) SIM_API hipError_t NAME(__VA_ARGS__)

/* ---- the driver and its devices ---- */

/* Every function starts the runtime where it was not. */
static hipError_t start(void)
{
    static const char *const lists[] = {"ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"};
    return result_of(rt_open(SIM_VENDOR_AMD, GRANULE, lists, 2));
}

static hipError_t device_of(int device, struct sim_gpu *gpu)
{
    hipError_t error = start();
    return error == hipSuccess ? result_of(rt_gpu(device, gpu, NULL, NULL)) : error;
}

/* The context of this thread's device: there is one for each, from its first use to the end. */
static hipError_t context_of(struct rt_context **context)
{
    hipError_t error = start();
    if (error != hipSuccess) {
        return error;
    }
    error = result_of(rt_primary(chosen, context));
    if (error == hipSuccess && (*context)->uses > 1) {
        (*context)->uses--; /* not counted here: hipDeviceReset ends it */
    }
    return error;
}

HIP(hipInit, unsigned int flags)
{
    return told(flags != 0 ? hipErrorInvalidValue : start());
}

static hipError_t version_of(int *version)
{
    struct sim_state head;
    if (version == NULL) {
        return hipErrorInvalidValue;
    }
    hipError_t error = start();
    if (error == hipSuccess && sim_enter(0, &head) == SIM_OK) {
        *version = (int)head.drivers[SIM_VENDOR_AMD].runtime;
    }
    return error;
}

HIP(hipRuntimeGetVersion, int *version)
{
    return told(version_of(version));
}

HIP(hipDriverGetVersion, int *version)
{
    return told(version_of(version));
}

HIP(hipGetDeviceCount, int *count)
{
    if (count == NULL) {
        return told(hipErrorInvalidValue);
    }
    *count = 0;
    hipError_t error = start();
    if (error == hipSuccess) {
        *count = rt_count();
    }
    return told(error);
}

HIP(hipSetDevice, int device)
{
    struct sim_gpu gpu;
    hipError_t error = device_of(device, &gpu);
    if (error == hipSuccess) {
        chosen = device;
    }
    return told(error);
}

HIP(hipGetDevice, int *device)
{
    hipError_t error = device != NULL ? start() : hipErrorInvalidValue;
    if (error == hipSuccess) {
        *device = chosen;
    }
    return told(error);
}

HIP(hipDeviceGet, int *device, int ordinal)
{
    struct sim_gpu gpu;
    hipError_t error = device != NULL ? device_of(ordinal, &gpu) : hipErrorInvalidValue;
    if (error == hipSuccess) {
        *device = ordinal;
    }
    return told(error);
}

HIP(hipDeviceGetName, char *name, int size, int device)
{
    struct sim_gpu gpu;
    hipError_t error = name != NULL && size > 0 ? device_of(device, &gpu) : hipErrorInvalidValue;
    if (error == hipSuccess) {
        sim_text(name, (size_t)size, gpu.name);
    }
    return told(error);
}

/* As ROCm prints it after "GPU-": the sixteen digits of the serial number, which are also the identifier's bytes. */
static void serial_of(const struct sim_gpu *gpu, unsigned char *out)
{
    char text[17] = "";
    if (strlen(gpu->uuid) == 36) {
        snprintf(text, sizeof text, "%.2s%.2s%.12s", gpu->uuid, gpu->uuid + 21, gpu->uuid + 24);
    }
    memcpy(out, text, 16);
}

HIP(hipDeviceGetUuid, unsigned char *uuid, int device)
{
    struct sim_gpu gpu;
    hipError_t error = uuid != NULL ? device_of(device, &gpu) : hipErrorInvalidValue;
    if (error == hipSuccess) {
        serial_of(&gpu, uuid);
    }
    return told(error);
}

HIP(hipDeviceTotalMem, size_t *bytes, int device)
{
    uint64_t left, total;
    hipError_t error = bytes != NULL ? start() : hipErrorInvalidValue;
    if (error == hipSuccess) {
        error = result_of(rt_memory(device, &left, &total));
    }
    if (error == hipSuccess) {
        *bytes = total;
    }
    return told(error);
}

HIP(hipDeviceGetPCIBusId, char *text, int size, int device)
{
    struct sim_gpu gpu;
    hipError_t error = text != NULL && size > 0 ? device_of(device, &gpu) : hipErrorInvalidValue;
    if (error == hipSuccess) {
        snprintf(text, (size_t)size, "%04x:%02x:%02x.%x", gpu.pci.domain, gpu.pci.bus, gpu.pci.device,
                 gpu.pci.function);
    }
    return told(error);
}

HIP(hipDeviceGetByPCIBusId, int *device, const char *text)
{
    unsigned domain, bus, slot;
    hipError_t error = device != NULL && text != NULL ? start() : hipErrorInvalidValue;
    if (error != hipSuccess || sscanf(text, "%x:%x:%x", &domain, &bus, &slot) != 3) {
        return told(error != hipSuccess ? error : hipErrorInvalidValue);
    }
    for (int i = 0; i < rt_count(); i++) {
        struct sim_gpu gpu;
        if (rt_gpu(i, &gpu, NULL, NULL) == RT_OK && gpu.pci.domain == domain && gpu.pci.bus == bus &&
            gpu.pci.device == slot) {
            *device = i;
            return hipSuccess;
        }
    }
    return told(hipErrorInvalidDevice);
}

HIP(hipDeviceCanAccessPeer, int *can, int device, int peer)
{
    struct sim_gpu one, other;
    unsigned index = 0;
    hipError_t error = can != NULL ? device_of(device, &one) : hipErrorInvalidValue;
    if (error == hipSuccess) {
        error = result_of(rt_gpu(peer, &other, &index, NULL));
    }
    if (error == hipSuccess) {
        *can = device != peer && (one.link_count > 0 || one.p2p[index]);
    }
    return told(error);
}

static int gfx_part(const char *target, bool major)
{
    unsigned long number = strncmp(target, "gfx", 3) == 0 ? strtoul(target + 3, NULL, 16) : 0;
    return (int)(major ? number >> 8 : number >> 4 & 0xF); /* gfx942: 9 and 4 */
}

HIP(hipGetDevicePropertiesR0600, hipDeviceProp_t *out, int device)
{
    struct sim_gpu gpu;
    uint8_t part = SIM_NO_INSTANCE;
    hipError_t error = out != NULL ? device_of(device, &gpu) : hipErrorInvalidValue;
    if (error == hipSuccess) {
        error = result_of(rt_gpu(device, &gpu, NULL, &part));
    }
    if (error != hipSuccess) {
        return told(error);
    }
    *out = (hipDeviceProp_t){
        .totalGlobalMem = sim_capacity(&gpu, part),
        .sharedMemPerBlock = 65536,
        .regsPerBlock = 65536,
        .warpSize = 64,
        .maxThreadsPerBlock = 1024,
        .maxThreadsDim = {1024, 1024, 1024},
        .maxGridSize = {2147483647, 65536, 65536},
        .clockRate = (int)gpu.clock_graphics_max * 1000,
        .major = gfx_part(gpu.architecture_name, true),
        .minor = gfx_part(gpu.architecture_name, false),
        .multiProcessorCount = (int)sim_multiprocessors(&gpu, part),
        .canMapHostMemory = 1,
        .concurrentKernels = 1,
        .ECCEnabled = (int)gpu.ecc_enabled,
        .pciBusID = gpu.pci.bus,
        .pciDeviceID = gpu.pci.device,
        .pciDomainID = (int)gpu.pci.domain,
        .unifiedAddressing = 1,
        .memoryClockRate = (int)gpu.clock_memory_max * 1000,
        .memoryBusWidth = (int)gpu.bus_width,
        .maxThreadsPerMultiProcessor = 2048,
        .managedMemory = 1,
        .memoryPoolsSupported = 1,
        .isLargeBar = gpu.bar1_mib >= gpu.memory_total_mib,
    };
    sim_text(out->name, sizeof out->name, gpu.name);
    serial_of(&gpu, out->uuid);
    snprintf(out->gcnArchName, sizeof out->gcnArchName, "%s:sramecc%c:xnack-", gpu.architecture_name,
             gpu.ecc_enabled ? '+' : '-');
    return hipSuccess;
}

HIP(hipDeviceGetAttribute, int *value, int attribute, int device)
{
    struct sim_gpu gpu;
    hipError_t error = value != NULL ? device_of(device, &gpu) : hipErrorInvalidValue;
    if (error == hipSuccess) { /* the first of the list: ECC */
        *value = attribute == 0 ? (int)gpu.ecc_enabled : 0;
    }
    return told(error);
}

HIP(hipDeviceSynchronize, void)
{
    struct sim_gpu gpu;
    return told(device_of(chosen, &gpu));
}

HIP(hipDeviceReset, void)
{
    hipError_t error = start();
    return told(error == hipSuccess ? result_of(rt_primary_release(chosen, true)) : error);
}

HIP(hipDevicePrimaryCtxGetState, int device, unsigned int *flags, int *active)
{
    hipError_t error = flags != NULL && active != NULL ? start() : hipErrorInvalidValue;
    if (error == hipSuccess) {
        *flags = 0;
        *active = rt_primary_active(device);
    }
    return told(error);
}

/* ---- memory ---- */

bool cuda_graph_free(uint64_t address); /* of hip_graph.c */

HIP(hipMemGetInfo, size_t *free_bytes, size_t *total)
{
    struct rt_context *context;
    uint64_t left, all;
    hipError_t error = context_of(&context);
    if (error == hipSuccess) {
        error = result_of(rt_memory(chosen, &left, &all));
    }
    if (error == hipSuccess && free_bytes != NULL) {
        *free_bytes = left;
    }
    if (error == hipSuccess && total != NULL) {
        *total = all;
    }
    return told(error);
}

static hipError_t allocate(enum rt_kind kind, void **memory, size_t size)
{
    struct rt_context *context;
    hipError_t error = memory != NULL ? context_of(&context) : hipErrorInvalidValue;
    if (error == hipSuccess && size == 0) {
        *memory = NULL;
        return hipSuccess;
    }
    return told(error == hipSuccess ? result_of(rt_alloc(context, kind, size, memory)) : error);
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
    return flags == 1 || flags == 2 ? allocate(RT_MANAGED, memory, size) : told(hipErrorInvalidValue);
}

HIP(hipMemAdvise, void *memory, size_t size, int advice, int device)
{
    enum { SET_PREFERRED_LOCATION = 3 };
    struct rt_block block;
    (void)size;
    if (start() != hipSuccess || rt_find(memory, &block) != RT_OK || block.kind != RT_MANAGED) {
        return told(hipErrorInvalidValue);
    }
    return told(advice == SET_PREFERRED_LOCATION ? result_of(rt_move(memory, device < 0)) : hipSuccess);
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
            return told(hipErrorInvalidValue);
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
    hipError_t error = start();
    return told(error == hipSuccess ? result_of(rt_free(array, RT_ARRAY)) : error);
}

/* ---- memory with rows ---- */

HIP(hipMallocPitch, void **memory, size_t *pitch, size_t width, size_t height)
{
    if (pitch == NULL || width > (size_t)1 << 40 || height > (size_t)1 << 20) {
        return told(hipErrorInvalidValue);
    }
    *pitch = (width + 127) / 128 * 128;
    return allocate(RT_DEVICE, memory, *pitch * height);
}

HIP(hipFree, void *memory)
{
    hipError_t error = start();
    if (error != hipSuccess || memory == NULL) {
        return told(error);
    }
    if (cuda_graph_free((uintptr_t)memory)) {
        return hipSuccess;
    }
    error = result_of(rt_free(memory, RT_DEVICE));
    return told(error == hipErrorInvalidValue ? hipErrorInvalidDevicePointer : error);
}

HIP(hipHostMalloc, void **memory, size_t size, unsigned int flags)
{
    (void)flags;
    return allocate(RT_HOST, memory, size);
}

HIP(hipHostFree, void *memory)
{
    hipError_t error = start();
    return told(error == hipSuccess && memory != NULL ? result_of(rt_free(memory, RT_HOST)) : error);
}

HIP(hipPointerGetAttributes, hipPointerAttribute_t *out, const void *memory)
{
    enum { HOST = 1, DEVICE = 2, MANAGED = 3, ARRAY = 10 };
    struct rt_block block;
    if (out == NULL || start() != hipSuccess || rt_find(memory, &block) != RT_OK) {
        return told(hipErrorInvalidValue);
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
    if (start() != hipSuccess || rt_find(memory, &block) != RT_OK || block.kind > RT_MANAGED) {
        return told(hipErrorNotFound);
    }
    if (base != NULL) {
        *base = (void *)block.base;
    }
    if (size != NULL) {
        *size = block.size;
    }
    return hipSuccess;
}

/* ---- pools ---- */

HIP(hipDeviceGetDefaultMemPool, hipMemPool_t *pool, int device)
{
    hipError_t error = pool != NULL ? start() : hipErrorInvalidValue;
    if (error == hipSuccess) {
        *pool = rt_default_pool(device);
        error = *pool != NULL ? hipSuccess : hipErrorInvalidDevice;
    }
    return told(error);
}

HIP(hipDeviceGetMemPool, hipMemPool_t *pool, int device)
{
    hipError_t error = pool != NULL ? start() : hipErrorInvalidValue;
    if (error == hipSuccess) {
        *pool = rt_current_pool(device);
        error = *pool != NULL ? hipSuccess : hipErrorInvalidDevice;
    }
    return told(error);
}

HIP(hipDeviceSetMemPool, int device, hipMemPool_t pool)
{
    return told(result_of(rt_set_pool(device, pool)));
}

HIP(hipMemPoolCreate, hipMemPool_t *pool, const hipMemPoolProps *properties)
{
    hipError_t error = pool != NULL && properties != NULL ? start() : hipErrorInvalidValue;
    return told(error == hipSuccess ? result_of(rt_pool_new(properties->location.id, pool)) : error);
}

HIP(hipMemPoolDestroy, hipMemPool_t pool)
{
    return told(result_of(rt_pool_free(pool)));
}

HIP(hipMemPoolTrimTo, hipMemPool_t pool, size_t keep)
{
    return told(result_of(rt_pool_trim(pool, keep)));
}

enum { POOL_REUSE = 3, POOL_THRESHOLD, POOL_RESERVED, POOL_RESERVED_HIGH, POOL_USED, POOL_USED_HIGH };

HIP(hipMemPoolGetAttribute, hipMemPool_t pool, int attribute, void *value)
{
    if (value == NULL || !rt_pool_valid(pool) || attribute < 1 || attribute > POOL_USED_HIGH) {
        return told(hipErrorInvalidValue);
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
        return told(hipErrorInvalidValue);
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
    hipError_t error = memory != NULL ? context_of(&context) : hipErrorInvalidValue;
    return told(error == hipSuccess ? result_of(rt_pool_alloc(context, pool, size, memory)) : error);
}

HIP(hipMallocAsync, void **memory, size_t size, hipStream_t stream)
{
    hipError_t error = start();
    return error == hipSuccess ? hipMallocFromPoolAsync(memory, size, rt_current_pool(chosen), stream) : told(error);
}

HIP(hipFreeAsync, void *memory, hipStream_t stream)
{
    (void)stream;
    return hipFree(memory);
}

/* ---- virtual memory ---- */

HIP(hipMemGetAllocationGranularity, size_t *granularity, const hipMemAllocationProp *properties, int option)
{
    if (granularity == NULL || properties == NULL || option < 0 || option > 1) {
        return told(hipErrorInvalidValue);
    }
    *granularity = RANGE_GRANULE;
    return hipSuccess;
}

HIP(hipMemAddressReserve, void **address, size_t size, size_t alignment, void *hint, unsigned long long flags)
{
    (void)hint;
    hipError_t error = address != NULL && flags == 0 ? start() : hipErrorInvalidValue;
    return told(error == hipSuccess ? result_of(rt_range(size, alignment, address)) : error);
}

HIP(hipMemAddressFree, void *address, size_t size)
{
    return told(result_of(rt_range_free(address, size)));
}

HIP(hipMemCreate, uint64_t *handle, size_t size, const hipMemAllocationProp *properties, unsigned long long flags)
{
    hipError_t error = handle != NULL && properties != NULL && flags == 0 ? start() : hipErrorInvalidValue;
    return told(error == hipSuccess ? result_of(rt_physical(properties->location.id, size, handle)) : error);
}

HIP(hipMemRelease, uint64_t handle)
{
    return told(result_of(rt_physical_free(handle)));
}

HIP(hipMemMap, void *address, size_t size, size_t offset, uint64_t handle, unsigned long long flags)
{
    return told(offset == 0 && flags == 0 ? result_of(rt_map(address, size, handle)) : hipErrorInvalidValue);
}

HIP(hipMemUnmap, void *address, size_t size)
{
    return told(result_of(rt_unmap(address, size)));
}

HIP(hipMemSetAccess, void *address, size_t size, const hipMemAccessDesc *access, size_t count)
{
    struct rt_block block;
    bool good = size > 0 && access != NULL && count > 0 && rt_find(address, &block) == RT_OK && block.kind == RT_RANGE;
    return told(good ? hipSuccess : hipErrorInvalidValue);
}

/* ---- copies and fills ---- */

static hipError_t copy(void *to, const void *from, size_t size)
{
    struct rt_context *context;
    hipError_t error = context_of(&context);
    if (error == hipSuccess && size > 0 && (to == NULL || from == NULL)) {
        error = hipErrorInvalidValue;
    }
    if (error == hipSuccess && size > 0) {
        memmove(to, from, size);
    }
    return told(error);
}

HIP(hipMemcpy, void *to, const void *from, size_t size, int kind)
{
    (void)kind;
    return copy(to, from, size);
}

HIP(hipMemcpyAsync, void *to, const void *from, size_t size, int kind, hipStream_t stream)
{
    (void)kind;
    (void)stream;
    return copy(to, from, size);
}

HIP(hipMemcpyHtoD, void *to, void *from, size_t size)
{
    return copy(to, from, size);
}

HIP(hipMemcpyDtoH, void *to, void *from, size_t size)
{
    return copy(to, from, size);
}

HIP(hipMemcpyDtoD, void *to, void *from, size_t size)
{
    return copy(to, from, size);
}

static hipError_t fill(void *to, const void *value, size_t width, size_t count)
{
    struct rt_context *context;
    hipError_t error = to != NULL || count == 0 ? context_of(&context) : hipErrorInvalidValue;
    if (error == hipSuccess && count > 0) {
        rt_fill(to, value, width, count);
    }
    return told(error);
}

HIP(hipMemset, void *to, int value, size_t size)
{
    unsigned char byte = (unsigned char)value;
    return fill(to, &byte, 1, size);
}

HIP(hipMemsetAsync, void *to, int value, size_t size, hipStream_t stream)
{
    (void)stream;
    return hipMemset(to, value, size);
}

HIP(hipMemsetD32, void *to, int value, size_t count)
{
    return fill(to, &value, sizeof value, count);
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
    hipError_t error = stream != NULL ? start() : hipErrorInvalidValue;
    if (error == hipSuccess) {
        *stream = calloc(1, sizeof **stream);
        error = *stream != NULL ? hipSuccess : hipErrorOutOfMemory;
    }
    return told(error);
}

HIP(hipStreamCreate, hipStream_t *stream)
{
    return hipStreamCreateWithFlags(stream, 0);
}

HIP(hipStreamDestroy, hipStream_t stream)
{
    free(stream);
    return told(stream != NULL ? hipSuccess : hipErrorInvalidHandle);
}

HIP(hipStreamSynchronize, hipStream_t stream)
{
    (void)stream;
    return told(start());
}

HIP(hipStreamQuery, hipStream_t stream)
{
    (void)stream;
    return told(start());
}

HIP(hipEventCreate, hipEvent_t *event)
{
    hipError_t error = event != NULL ? start() : hipErrorInvalidValue;
    if (error == hipSuccess) {
        *event = calloc(1, sizeof **event);
        error = *event != NULL ? hipSuccess : hipErrorOutOfMemory;
    }
    return told(error);
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
        return told(hipErrorInvalidHandle);
    }
    clock_gettime(CLOCK_MONOTONIC, &event->when);
    return hipSuccess;
}

HIP(hipEventQuery, hipEvent_t event)
{
    return told(event != NULL ? hipSuccess : hipErrorInvalidHandle);
}

HIP(hipEventSynchronize, hipEvent_t event)
{
    return told(event != NULL ? hipSuccess : hipErrorInvalidHandle);
}

HIP(hipEventElapsedTime, float *ms, hipEvent_t begin, hipEvent_t end)
{
    if (ms == NULL || begin == NULL || end == NULL) {
        return told(hipErrorInvalidHandle);
    }
    double seconds = (double)(end->when.tv_sec - begin->when.tv_sec);
    *ms = (float)(seconds * 1e3 + (double)(end->when.tv_nsec - begin->when.tv_nsec) / 1e6);
    return hipSuccess;
}

HIP(hipEventDestroy, hipEvent_t event)
{
    free(event);
    return told(event != NULL ? hipSuccess : hipErrorInvalidHandle);
}

/* ---- errors ---- */

static const struct {
    hipError_t code;
    const char *name, *text;
} errors[] = {
    {hipSuccess, "hipSuccess", "no error"},
    {hipErrorInvalidValue, "hipErrorInvalidValue", "invalid argument"},
    {hipErrorOutOfMemory, "hipErrorOutOfMemory", "out of memory"},
    {hipErrorNotInitialized, "hipErrorNotInitialized", "initialization error"},
    {hipErrorInvalidDevicePointer, "hipErrorInvalidDevicePointer", "invalid device pointer"},
    {hipErrorNoDevice, "hipErrorNoDevice", "no ROCm-capable device is detected"},
    {hipErrorInvalidDevice, "hipErrorInvalidDevice", "invalid device ordinal"},
    {hipErrorInvalidHandle, "hipErrorInvalidHandle", "invalid resource handle"},
    {hipErrorIllegalState, "hipErrorIllegalState", "the operation cannot be performed in the present state"},
    {hipErrorNotFound, "hipErrorNotFound", "named symbol not found"},
    {hipErrorNotSupported, "hipErrorNotSupported", "operation not supported"},
};

static const char *error_text(hipError_t error, bool name)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        if (errors[i].code == error) {
            return name ? errors[i].name : errors[i].text;
        }
    }
    return name ? "hipErrorUnknown" : "unknown error";
}

SIM_API const char *hipGetErrorName(hipError_t error)
{
    return error_text(error, true);
}

SIM_API const char *hipGetErrorString(hipError_t error)
{
    return error_text(error, false);
}

HIP(hipPeekAtLastError, void)
{
    return last;
}

HIP(hipGetLastError, void)
{
    hipError_t error = last;
    last = hipSuccess;
    return error;
}
