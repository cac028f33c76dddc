/* SPDX-License-Identifier: Apache-2.0 */
/*
 * HIP's memory calls, as in cuda.c. HIP has no contexts to create: a device's context appears with the first call that
 * needs one, so that its cost is charged before the first of the calls below, and given back by hipDeviceReset. What a
 * program allocates below HIP, through HSA itself, is not seen here.
 */
#include "driver.h"
#include "hook.h"

#include <string.h>

typedef enum {
    hipSuccess = 0,
    hipErrorInvalidValue = 1,
    hipErrorOutOfMemory = 2,
    hipErrorNotInitialized = 3,
} hipError_t;

typedef void *hipStream_t, *hipEvent_t, *hipMemPool_t, *hipArray_t, *hipGraph_t, *hipGraphExec_t, *hipGraphNode_t;
typedef unsigned long long hipMemHandle; /* hipMemGenericAllocationHandle_t */

typedef struct {
    int type, id;
} hipMemLocation;
enum { HIP_ON_DEVICE = 1 };

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

typedef struct { /* hipMemAllocNodeParams */
    hipMemPoolProps poolProps;
    const void *accessDescs;
    size_t accessDescCount, bytesize;
    void *address;
} hipMemAllocNodeParams;

typedef struct {
    size_t width, height, depth;
} hipExtent;

typedef struct {
    void *address;
    size_t pitch, width, height;
} hipPitchedPtr;

typedef struct {
    int x, y, z, w, kind; /* bits of each channel */
} hipChannelFormatDesc;

typedef struct {
    size_t width, height;
    int format;
    unsigned channels;
} HIP_ARRAY_DESCRIPTOR;

typedef struct {
    size_t width, height, depth;
    int format;
    unsigned channels, flags;
} HIP_ARRAY3D_DESCRIPTOR;

enum { TOTAL_IN_R0600 = 288, TOTAL_IN_R0000 = 256 }; /* where hipDeviceProp_t has totalGlobalMem */

#define HOOK(NAME, ...) LIMIT_EXPORT hipError_t NAME(__VA_ARGS__)

#define WRAPPED(CALL)                                                                                                  \
    CALL(hipGetProcAddress)                                                                                            \
    /* memory */                                                                                                       \
    CALL(hipMalloc)                                                                                                    \
    CALL(hipExtMallocWithFlags)                                                                                        \
    CALL(hipMallocManaged)                                                                                             \
    CALL(hipMallocPitch)                                                                                               \
    CALL(hipMemAllocPitch)                                                                                             \
    CALL(hipMalloc3D)                                                                                                  \
    CALL(hipFree)                                                                                                      \
    CALL(hipHostMalloc)                                                                                                \
    CALL(hipMemcpy)                                                                                                    \
    CALL(hipMemcpyAsync)                                                                                               \
    CALL(hipMemset)                                                                                                    \
    CALL(hipMemsetAsync)                                                                                               \
    CALL(hipDeviceReset)                                                                                               \
    /* arrays */                                                                                                       \
    CALL(hipMallocArray)                                                                                               \
    CALL(hipMalloc3DArray)                                                                                             \
    CALL(hipArrayCreate)                                                                                               \
    CALL(hipArray3DCreate)                                                                                             \
    CALL(hipMallocMipmappedArray)                                                                                      \
    CALL(hipMipmappedArrayCreate)                                                                                      \
    CALL(hipFreeArray)                                                                                                 \
    CALL(hipArrayDestroy)                                                                                              \
    CALL(hipFreeMipmappedArray)                                                                                        \
    CALL(hipMipmappedArrayDestroy)                                                                                     \
    /* pools */                                                                                                        \
    CALL(hipMallocAsync)                                                                                               \
    CALL(hipMallocAsync_spt)                                                                                           \
    CALL(hipMallocFromPoolAsync)                                                                                       \
    CALL(hipMallocFromPoolAsync_spt)                                                                                   \
    CALL(hipFreeAsync)                                                                                                 \
    CALL(hipFreeAsync_spt)                                                                                             \
    CALL(hipMemPoolCreate)                                                                                             \
    CALL(hipMemPoolDestroy)                                                                                            \
    CALL(hipMemPoolTrimTo)                                                                                             \
    CALL(hipStreamSynchronize)                                                                                         \
    CALL(hipStreamSynchronize_spt)                                                                                     \
    CALL(hipEventSynchronize)                                                                                          \
    CALL(hipDeviceSynchronize)                                                                                         \
    /* graphs */                                                                                                       \
    CALL(hipGraphInstantiate)                                                                                          \
    CALL(hipGraphInstantiateWithFlags)                                                                                 \
    CALL(hipGraphInstantiateWithParams)                                                                                \
    CALL(hipGraphExecDestroy)                                                                                          \
    CALL(hipGraphLaunch)                                                                                               \
    CALL(hipGraphLaunch_spt)                                                                                           \
    CALL(hipGraphUpload)                                                                                               \
    CALL(hipDeviceGraphMemTrim)                                                                                        \
    /* virtual memory */                                                                                               \
    CALL(hipMemCreate)                                                                                                 \
    CALL(hipMemRelease)                                                                                                \
    CALL(hipMemRetainAllocationHandle)                                                                                 \
    CALL(hipMemMap)                                                                                                    \
    CALL(hipMemUnmap)                                                                                                  \
    CALL(hipMemImportFromShareableHandle)                                                                              \
    /* other processes */                                                                                              \
    CALL(hipIpcGetMemHandle)                                                                                           \
    CALL(hipIpcOpenMemHandle)                                                                                          \
    CALL(hipIpcCloseMemHandle)                                                                                         \
    CALL(hipMemPoolExportToShareableHandle)                                                                            \
    CALL(hipMemPoolImportFromShareableHandle)                                                                          \
    CALL(hipMemExportToShareableHandle)                                                                                \
    /* queries */                                                                                                      \
    CALL(hipMemGetInfo)                                                                                                \
    CALL(hipDeviceTotalMem)                                                                                            \
    CALL(hipGetDeviceProperties)                                                                                       \
    CALL(hipGetDevicePropertiesR0000)                                                                                  \
    CALL(hipGetDevicePropertiesR0600)

#define NEEDED(CALL)                                                                                                   \
    CALL(hipGetDevice)                                                                                                 \
    CALL(hipGetDeviceCount)                                                                                            \
    CALL(hipDeviceGetPCIBusId)                                                                                         \
    CALL(hipDevicePrimaryCtxGetState)                                                                                  \
    CALL(hipStreamGetDevice)                                                                                           \
    CALL(hipDeviceGetMemPool)                                                                                          \
    CALL(hipDeviceGetDefaultMemPool)                                                                                   \
    CALL(hipMemPoolGetAttribute)                                                                                       \
    CALL(hipDeviceGetGraphMemAttribute)                                                                                \
    CALL(hipGraphGetNodes)                                                                                             \
    CALL(hipGraphNodeGetType)                                                                                          \
    CALL(hipGraphChildGraphNodeGetGraph)                                                                               \
    CALL(hipGraphMemAllocNodeGetParams)                                                                                \
    CALL(hipMemAdvise)

#define NUMBER(NAME) CALL_##NAME,
enum { WRAPPED(NUMBER) NEEDED(NUMBER) CALLS };
static struct limit_call calls[CALLS];

typedef hipError_t hipGetDevice(int *);
typedef hipError_t hipGetDeviceCount(int *);
typedef hipError_t hipDeviceGetPCIBusId(char *, int, int);
typedef hipError_t hipDevicePrimaryCtxGetState(int, unsigned *, int *);
typedef hipError_t hipStreamGetDevice(hipStream_t, int *);
typedef hipError_t hipDeviceGetMemPool(hipMemPool_t *, int);
typedef hipError_t hipDeviceGetDefaultMemPool(hipMemPool_t *, int);
typedef hipError_t hipMemPoolGetAttribute(hipMemPool_t, int, void *);
typedef hipError_t hipDeviceGetGraphMemAttribute(int, int, void *);
typedef hipError_t hipGraphGetNodes(hipGraph_t, hipGraphNode_t *, size_t *);
typedef hipError_t hipGraphNodeGetType(hipGraphNode_t, int *);
typedef hipError_t hipGraphChildGraphNodeGetGraph(hipGraphNode_t, hipGraph_t *);
typedef hipError_t hipGraphMemAllocNodeGetParams(hipGraphNode_t, hipMemAllocNodeParams *);
typedef hipError_t hipMemAdvise(const void *, size_t, int, int);

static hipError_t absent(void)
{
    return hipErrorNotInitialized;
}

static void (*function_of(struct limit_call *call))(void)
{
    void *found = limit_vendor(&limit_hip, call);
    void (*function)(void) = (void (*)(void))absent;
    if (found)
        memcpy(&function, &found, sizeof function);
    return function;
}

#define VENDOR_AS(LIKE, CALL, ...) LIMIT_IN(((__typeof__(&LIKE))function_of(CALL))(__VA_ARGS__))
#define VENDOR(NAME, ...) VENDOR_AS(NAME, &calls[CALL_##NAME], __VA_ARGS__)
#define NEED(NAME, ...) LIMIT_IN(((NAME *)function_of(&calls[CALL_##NAME]))(__VA_ARGS__))

static bool outside(void)
{
    return limit_outside();
}

/* ---- devices and what driver.c asks ---- */

static int device_of(int ordinal)
{
    struct limit_session *session = limit_session();
    char pci[32] = "";
    if (!session)
        return LIMIT_CLOSED;
    atomic_schar *kept = ordinal >= 0 && ordinal < LIMIT_ORDINALS ? &session->ordinals[1][ordinal] : NULL;
    int known = kept ? atomic_load_explicit(kept, memory_order_relaxed) : 0, count = 0;
    if (known != 0)
        return known - 3;
    if (NEED(hipGetDeviceCount, &count) != hipSuccess || ordinal < 0 || ordinal >= count)
        return LIMIT_NO_DEVICE;
    if (!kept)
        return LIMIT_CLOSED;
    if (NEED(hipDeviceGetPCIBusId, pci, (int)sizeof pci, ordinal) != hipSuccess)
        return LIMIT_CLOSED;
    int found = limit_device(NULL, pci, NULL);
    atomic_store_explicit(kept, (signed char)(found + 3), memory_order_relaxed);
    return found;
}

static bool pool_attribute(void *pool, int attribute, uint64_t *value)
{
    return NEED(hipMemPoolGetAttribute, pool, attribute, value) == hipSuccess;
}

static bool graph_attribute(int ordinal, int attribute, uint64_t *value)
{
    return NEED(hipDeviceGetGraphMemAttribute, ordinal, attribute, value) == hipSuccess;
}

static bool graph_nodes(void *graph, void **nodes, size_t *count)
{
    return NEED(hipGraphGetNodes, graph, nodes, count) == hipSuccess;
}

static bool node_memory(void *node, int *ordinal, uint64_t *bytes)
{
    enum { MEM_ALLOC = 10 };
    int type;
    hipMemAllocNodeParams parameters = {0};
    if (NEED(hipGraphNodeGetType, node, &type) != hipSuccess || type != MEM_ALLOC ||
        NEED(hipGraphMemAllocNodeGetParams, node, &parameters) != hipSuccess ||
        parameters.poolProps.location.type != HIP_ON_DEVICE)
        return false;
    *ordinal = parameters.poolProps.location.id;
    *bytes = parameters.bytesize;
    return true;
}

static bool node_graph(void *node, void **graph)
{
    enum { GRAPH = 4 };
    int type;
    return NEED(hipGraphNodeGetType, node, &type) == hipSuccess && type == GRAPH &&
           NEED(hipGraphChildGraphNodeGetGraph, node, graph) == hipSuccess;
}

static const struct limit_driver driver = {
    .granule = 4096,
    .device = device_of,
    .pool_attribute = pool_attribute,
    .graph_attribute = graph_attribute,
    .graph_nodes = graph_nodes,
    .node_memory = node_memory,
    .node_graph = node_graph,
};

/* What a device's allocations belong to: something that is its own. */
static const void *owner_of(struct limit_session *session, int ordinal)
{
    return &session->ordinals[1][ordinal];
}

/* The current device, with its context charged. A context that was there before us is charged late, as far as there is
 * room. */
static bool touch(int *ordinal, int *device)
{
    struct limit_session *session = limit_session();
    if (NEED(hipGetDevice, ordinal) != hipSuccess)
        return true; /* HIP shall say why */
    *device = device_of(*ordinal);
    if (!session || *device < 0)
        return *device == LIMIT_NO_LIMIT || *device == LIMIT_NO_DEVICE;
    if (__atomic_load_n(&session->opened[*device], __ATOMIC_RELAXED))
        return true;
    pthread_mutex_lock(&session->contexts);
    bool done = session->opened[*device] || limit_driver_open_context(&driver, *device);
    __atomic_store_n(&session->opened[*device], done, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&session->contexts);
    return done;
}

#define TOUCH()                                                                                                        \
    int ordinal = -1, device = LIMIT_CLOSED;                                                                           \
    if (outside() && !touch(&ordinal, &device))                                                                        \
    return hipErrorOutOfMemory

HOOK(hipDeviceReset, void)
{
    struct limit_session *session = outside() ? limit_session() : NULL;
    int ordinal;
    hipError_t result = VENDOR(hipDeviceReset);
    if (!session || result != hipSuccess || NEED(hipGetDevice, &ordinal) != hipSuccess || device_of(ordinal) < 0)
        return result;
    limit_drop_owner(&driver, session, owner_of(session, ordinal));
    limit_settle_pools(&driver, session);
    pthread_mutex_lock(&session->contexts);
    if (session->opened[device_of(ordinal)])
        limit_close_context(device_of(ordinal));
    session->opened[device_of(ordinal)] = false;
    pthread_mutex_unlock(&session->contexts);
    return result;
}

/* Calls that charge nothing themselves, but bring the context. */
HOOK(hipHostMalloc, void **memory, size_t size, unsigned flags)
{
    TOUCH();
    return VENDOR(hipHostMalloc, memory, size, flags);
}

HOOK(hipMemcpy, void *to, const void *from, size_t size, int kind)
{
    TOUCH();
    return VENDOR(hipMemcpy, to, from, size, kind);
}

HOOK(hipMemcpyAsync, void *to, const void *from, size_t size, int kind, hipStream_t stream)
{
    TOUCH();
    return VENDOR(hipMemcpyAsync, to, from, size, kind, stream);
}

HOOK(hipMemset, void *to, int value, size_t size)
{
    TOUCH();
    return VENDOR(hipMemset, to, value, size);
}

HOOK(hipMemsetAsync, void *to, int value, size_t size, hipStream_t stream)
{
    TOUCH();
    return VENDOR(hipMemsetAsync, to, value, size, stream);
}

/* ---- look-up ---- */

HOOK(hipGetProcAddress, const char *symbol, void **function, int version, uint64_t flags, void *status)
{
    enum { PER_THREAD = 2 };
    hipError_t result = VENDOR(hipGetProcAddress, symbol, function, version, flags, status);
    if (result == hipSuccess && symbol && function && *function && outside()) {
        struct limit_call *call = limit_find_form(&limit_hip, symbol, version, (flags & PER_THREAD) != 0, *function);
        *function = call ? limit_replace(call, *function) : *function;
    }
    return result;
}

/* ---- memory ---- */

HOOK(hipMallocManaged, void **, size_t, unsigned);
HOOK(hipFree, void *);

/* In host memory that the device reaches: where policy allows more than the limit. */
static hipError_t spill(void **address, size_t size, int ordinal, int device)
{
    enum { GLOBAL = 1, PREFERRED_LOCATION = 3, ACCESSED_BY = 5, HOST = -1 };
    struct limit_session *session = limit_session();
    struct limit_entry entry = {
        .device = device, .bytes = (size + driver.granule - 1) / driver.granule * driver.granule, .spilled = true};
    if (!session || !limit_take_spill(device, entry.bytes))
        return hipErrorOutOfMemory;
    entry.owner = owner_of(session, ordinal);
    atomic_fetch_add(&session->spills, 1);
    hipError_t result = VENDOR(hipMallocManaged, address, size, GLOBAL);
    if (result == hipSuccess && (NEED(hipMemAdvise, *address, size, PREFERRED_LOCATION, HOST) != hipSuccess ||
                                 NEED(hipMemAdvise, *address, size, ACCESSED_BY, ordinal) != hipSuccess)) {
        VENDOR(hipFree, *address);
        result = hipErrorOutOfMemory;
    }
    if (result == hipSuccess) {
        limit_remember(&entry, LIMIT_ADDRESS, (uint64_t)(uintptr_t)*address);
    } else {
        limit_give_spill(device, entry.bytes);
        atomic_fetch_sub(&session->spills, 1);
    }
    return result;
}

/* `ALLOCATION` gets SIZE bytes on the current device, found at *ADDRESS; OTHERWISE is for where the limit refuses them.
 */
#define ALLOCATE(ADDRESS, SIZE, ALLOCATION, OTHERWISE)                                                                 \
    do {                                                                                                               \
        TOUCH();                                                                                                       \
        struct limit_entry entry = {0};                                                                                \
        if (!outside() || !(ADDRESS) || (SIZE) == 0 || ordinal < 0)                                                    \
            return ALLOCATION; /* to be refused by HIP itself */                                                       \
        if (!limit_driver_take(&driver, device, SIZE, &entry))                                                         \
            return OTHERWISE;                                                                                          \
        hipError_t result = ALLOCATION;                                                                                \
        struct limit_session *session = limit_session();                                                               \
        entry.owner = session ? owner_of(session, ordinal) : NULL;                                                     \
        if (result == hipSuccess)                                                                                      \
            limit_remember(&entry, LIMIT_ADDRESS, (uint64_t)(uintptr_t) * (ADDRESS));                                  \
        else                                                                                                           \
            limit_driver_give(&driver, &entry);                                                                        \
        return result;                                                                                                 \
    } while (0)

#define FORGET(KEY, FREE) LIMIT_FORGET(&driver, (uintptr_t)(KEY), hipError_t, FREE)

HOOK(hipMalloc, void **memory, size_t size)
{
    ALLOCATE(memory, size, VENDOR(hipMalloc, memory, size), spill(memory, size, ordinal, device));
}

HOOK(hipExtMallocWithFlags, void **memory, size_t size, unsigned flags)
{
    ALLOCATE(memory, size, VENDOR(hipExtMallocWithFlags, memory, size, flags), hipErrorOutOfMemory);
}

HOOK(hipMallocManaged, void **memory, size_t size, unsigned flags)
{
    ALLOCATE(memory, size, VENDOR(hipMallocManaged, memory, size, flags), spill(memory, size, ordinal, device));
}

/* Rows are padded to 128 bytes or more. */
static size_t padded(size_t width, size_t height, size_t depth)
{
    enum { PITCH = 128 };
    size_t size = 0, row = width <= SIZE_MAX - PITCH ? (width + PITCH - 1) / PITCH * PITCH : SIZE_MAX;
    if (__builtin_mul_overflow(row, height, &size) || __builtin_mul_overflow(size, depth, &size))
        size = SIZE_MAX / 2;
    return size;
}

HOOK(hipMallocPitch, void **memory, size_t *pitch, size_t width, size_t height)
{
    size_t size = padded(width, height, 1);
    ALLOCATE(memory, size, VENDOR(hipMallocPitch, memory, pitch, width, height), hipErrorOutOfMemory);
}

HOOK(hipMemAllocPitch, void **memory, size_t *pitch, size_t width, size_t height, unsigned element)
{
    size_t size = padded(width, height, 1);
    ALLOCATE(memory, size, VENDOR(hipMemAllocPitch, memory, pitch, width, height, element), hipErrorOutOfMemory);
}

HOOK(hipMalloc3D, hipPitchedPtr *memory, hipExtent extent)
{
    size_t size = padded(extent.width, extent.height, extent.depth);
    void **address = memory ? &memory->address : NULL;
    ALLOCATE(address, size, VENDOR(hipMalloc3D, memory, extent), hipErrorOutOfMemory);
}

HOOK(hipFree, void *memory)
{
    FORGET(memory, VENDOR(hipFree, memory));
}

/* ---- arrays ---- */

/* With all levels of detail; layers keep their number. */
static uint64_t texels(size_t width, size_t height, size_t depth, unsigned levels, bool layered)
{
    enum { MAX_SIDE = 1 << 20 };
    uint64_t sum = 0;
    if (width > MAX_SIDE || height > MAX_SIDE || depth > MAX_SIDE)
        return 0; /* to be refused by HIP itself */
    for (unsigned level = 0; level < levels && level < 32; level++) {
        sum += (uint64_t)(width ? width : 1) * (height ? height : 1) * (depth ? depth : 1);
        width /= 2;
        height /= 2;
        depth /= layered ? 1 : 2;
    }
    return sum;
}

static uint64_t format_bytes(int format, unsigned channels)
{
    bool one = format == 0x01 || format == 0x08, two = format == 0x02 || format == 0x09 || format == 0x10;
    return (one ? 1u : two ? 2u : 4u) * (uint64_t)(channels <= 4 ? channels : 4);
}

static uint64_t channel_bytes(const hipChannelFormatDesc *what)
{
    return what && what->x >= 0 && what->y >= 0 && what->z >= 0 && what->w >= 0
               ? ((uint64_t)what->x + (uint64_t)what->y + (uint64_t)what->z + (uint64_t)what->w) / 8
               : 0;
}

HOOK(hipMallocArray, hipArray_t *array, const hipChannelFormatDesc *what, size_t width, size_t height, unsigned flags)
{
    uint64_t size = channel_bytes(what) * texels(width, height, 0, 1, false);
    ALLOCATE(array, size, VENDOR(hipMallocArray, array, what, width, height, flags), hipErrorOutOfMemory);
}

HOOK(hipMalloc3DArray, hipArray_t *array, const hipChannelFormatDesc *what, hipExtent extent, unsigned flags)
{
    uint64_t size = channel_bytes(what) * texels(extent.width, extent.height, extent.depth, 1, false);
    ALLOCATE(array, size, VENDOR(hipMalloc3DArray, array, what, extent, flags), hipErrorOutOfMemory);
}

HOOK(hipArrayCreate, hipArray_t *array, const HIP_ARRAY_DESCRIPTOR *what)
{
    uint64_t size =
        what ? format_bytes(what->format, what->channels) * texels(what->width, what->height, 0, 1, false) : 0;
    ALLOCATE(array, size, VENDOR(hipArrayCreate, array, what), hipErrorOutOfMemory);
}

HOOK(hipArray3DCreate, hipArray_t *array, const HIP_ARRAY3D_DESCRIPTOR *what)
{
    uint64_t size =
        what ? format_bytes(what->format, what->channels) * texels(what->width, what->height, what->depth, 1, false)
             : 0;
    ALLOCATE(array, size, VENDOR(hipArray3DCreate, array, what), hipErrorOutOfMemory);
}

HOOK(hipMallocMipmappedArray, hipArray_t *array, const hipChannelFormatDesc *what, hipExtent extent, unsigned levels,
     unsigned flags)
{
    uint64_t size = channel_bytes(what) * texels(extent.width, extent.height, extent.depth, levels, (flags & 1) != 0);
    ALLOCATE(array, size, VENDOR(hipMallocMipmappedArray, array, what, extent, levels, flags), hipErrorOutOfMemory);
}

HOOK(hipMipmappedArrayCreate, hipArray_t *array, const HIP_ARRAY3D_DESCRIPTOR *what, unsigned levels)
{
    uint64_t size = what ? format_bytes(what->format, what->channels) *
                               texels(what->width, what->height, what->depth, levels, (what->flags & 1) != 0)
                         : 0;
    ALLOCATE(array, size, VENDOR(hipMipmappedArrayCreate, array, what, levels), hipErrorOutOfMemory);
}

#define FREE_ARRAY(NAME)                                                                                               \
    HOOK(NAME, hipArray_t array)                                                                                       \
    {                                                                                                                  \
        FORGET(array, VENDOR(NAME, array));                                                                            \
    }

FREE_ARRAY(hipFreeArray)
FREE_ARRAY(hipArrayDestroy)
FREE_ARRAY(hipFreeMipmappedArray)
FREE_ARRAY(hipMipmappedArrayDestroy)

/* ---- pools ---- */

static bool stream_ordinal(hipStream_t stream, int current, int *ordinal)
{
    bool standard = (uintptr_t)stream <= 2;
    if (standard || NEED(hipStreamGetDevice, stream, ordinal) != hipSuccess)
        *ordinal = current;
    return *ordinal >= 0;
}

static int pool_ordinal(struct limit_session *session, hipMemPool_t handle, int current)
{
    int ordinal = limit_pool_ordinal(session, &driver, handle), count = 0;
    if (ordinal >= 0)
        return ordinal;
    NEED(hipGetDeviceCount, &count);
    for (int i = 0; i < count; i++) {
        hipMemPool_t standard = NULL;
        if (NEED(hipDeviceGetDefaultMemPool, &standard, i) == hipSuccess && standard == handle)
            return i;
    }
    return current;
}

HOOK(hipMallocAsync, void **, size_t, hipStream_t);
HOOK(hipMallocFromPoolAsync, void **, size_t, hipMemPool_t, hipStream_t);
HOOK(hipFreeAsync, void *, hipStream_t);
HOOK(hipMemPoolTrimTo, hipMemPool_t, size_t);

#define VENDOR_ASYNC()                                                                                                 \
    (named ? VENDOR_AS(hipMallocFromPoolAsync, call, memory, size, handle, stream)                                     \
           : VENDOR_AS(hipMallocAsync, call, memory, size, stream))

/* Freed again where the driver's pool grew by more than there is room for: it may take more at a time than is asked. */
static hipError_t alloc_from(struct limit_call *call, bool named, void **memory, size_t size, hipMemPool_t handle,
                             hipStream_t stream)
{
    TOUCH();
    struct limit_session *session = outside() ? limit_session() : NULL;
    if (!outside() || !memory || size == 0 || ordinal < 0 || (named && !handle))
        return VENDOR_ASYNC();
    if (!session)
        return hipErrorOutOfMemory;
    struct limit_pool pool = {.driver = &driver, .handle = handle};
    if (named)
        pool.ordinal = pool_ordinal(session, handle, ordinal);
    else if (!stream_ordinal(stream, ordinal, &pool.ordinal) ||
             NEED(hipDeviceGetMemPool, &pool.handle, pool.ordinal) != hipSuccess)
        return VENDOR_ASYNC();
    if (!limit_pool_begin(session, pool, size))
        return hipErrorOutOfMemory;
    hipError_t result = VENDOR_ASYNC();
    if (!limit_pool_end(session, pool, result == hipSuccess)) {
        VENDOR(hipFreeAsync, *memory, stream);
        VENDOR(hipMemPoolTrimTo, pool.handle, 0);
        limit_settle_pools(&driver, session);
        return hipErrorOutOfMemory;
    }
    if (result == hipSuccess)
        limit_remember(&(struct limit_entry){.device = LIMIT_NO_LIMIT, .link = (uint64_t)(uintptr_t)pool.handle},
                       LIMIT_ADDRESS, (uint64_t)(uintptr_t)*memory);
    return result;
}

#define FROM_STREAM(NAME)                                                                                              \
    HOOK(NAME, void **memory, size_t size, hipStream_t stream)                                                         \
    {                                                                                                                  \
        return alloc_from(&calls[CALL_##NAME], false, memory, size, NULL, stream);                                     \
    }

#define FROM_POOL(NAME)                                                                                                \
    HOOK(NAME, void **memory, size_t size, hipMemPool_t pool, hipStream_t stream)                                      \
    {                                                                                                                  \
        return alloc_from(&calls[CALL_##NAME], true, memory, size, pool, stream);                                      \
    }

FROM_STREAM(hipMallocAsync)
FROM_STREAM(hipMallocAsync_spt)
FROM_POOL(hipMallocFromPoolAsync)
FROM_POOL(hipMallocFromPoolAsync_spt)

HOOK(hipFreeAsync, void *memory, hipStream_t stream)
{
    FORGET(memory, VENDOR(hipFreeAsync, memory, stream));
}

HOOK(hipFreeAsync_spt, void *memory, hipStream_t stream)
{
    FORGET(memory, VENDOR(hipFreeAsync_spt, memory, stream));
}

HOOK(hipMemPoolCreate, hipMemPool_t *pool, const hipMemPoolProps *properties)
{
    hipError_t result = VENDOR(hipMemPoolCreate, pool, properties);
    if (result == hipSuccess && outside()) {
        hipMemLocation where = properties->location;
        struct limit_pool made = {.driver = &driver, .handle = *pool, .ordinal = where.id};
        limit_pool_made(made, where.type == HIP_ON_DEVICE ? device_of(where.id) : LIMIT_NO_LIMIT);
    }
    return result;
}

HOOK(hipMemPoolDestroy, hipMemPool_t pool)
{
    struct limit_session *session = outside() ? limit_session() : NULL;
    if (!session)
        return VENDOR(hipMemPoolDestroy, pool);
    pthread_mutex_lock(&session->pools);
    hipError_t result = VENDOR(hipMemPoolDestroy, pool);
    if (result == hipSuccess)
        limit_pool_gone(session, &driver, pool);
    pthread_mutex_unlock(&session->pools);
    return result;
}

HOOK(hipMemPoolTrimTo, hipMemPool_t pool, size_t keep)
{
    hipError_t result = VENDOR(hipMemPoolTrimTo, pool, keep);
    struct limit_session *session = outside() ? limit_session() : NULL;
    if (session)
        limit_settle_pools(&driver, session);
    return result;
}

#define MAY_SHRINK(NAME, PARAMETERS, ...)                                                                              \
    HOOK(NAME, PARAMETERS)                                                                                             \
    {                                                                                                                  \
        hipError_t result = VENDOR(NAME, __VA_ARGS__);                                                                 \
        if (outside())                                                                                                 \
            limit_pools_may_have_shrunk(&driver);                                                                      \
        return result;                                                                                                 \
    }

MAY_SHRINK(hipStreamSynchronize, hipStream_t stream, stream)
MAY_SHRINK(hipStreamSynchronize_spt, hipStream_t stream, stream)
MAY_SHRINK(hipEventSynchronize, hipEvent_t event, event)
MAY_SHRINK(hipDeviceSynchronize, void, )

/* ---- graphs ---- */

static hipError_t instantiated(hipError_t result, const hipGraphExec_t *exec, hipGraph_t graph)
{
    if (result == hipSuccess && outside())
        limit_graph_made(&driver, graph, *exec);
    return result;
}

HOOK(hipGraphInstantiate, hipGraphExec_t *exec, hipGraph_t graph, hipGraphNode_t *node, char *log, size_t size)
{
    return instantiated(VENDOR(hipGraphInstantiate, exec, graph, node, log, size), exec, graph);
}

HOOK(hipGraphInstantiateWithFlags, hipGraphExec_t *exec, hipGraph_t graph, unsigned long long flags)
{
    return instantiated(VENDOR(hipGraphInstantiateWithFlags, exec, graph, flags), exec, graph);
}

HOOK(hipGraphInstantiateWithParams, hipGraphExec_t *exec, hipGraph_t graph, void *parameters)
{
    return instantiated(VENDOR(hipGraphInstantiateWithParams, exec, graph, parameters), exec, graph);
}

#define LAUNCH(NAME)                                                                                                   \
    HOOK(NAME, hipGraphExec_t exec, hipStream_t stream)                                                                \
    {                                                                                                                  \
        TOUCH();                                                                                                       \
        struct limit_entry entry;                                                                                      \
        enum limit_launch kind = limit_graph_begin(&driver, exec, &entry);                                             \
        if (kind == LIMIT_REFUSED)                                                                                     \
            return hipErrorOutOfMemory;                                                                                \
        hipError_t result = VENDOR(NAME, exec, stream);                                                                \
        if (kind == LIMIT_CHARGED)                                                                                     \
            limit_graph_end(&driver, &entry, result == hipSuccess);                                                    \
        return result;                                                                                                 \
    }

LAUNCH(hipGraphLaunch)
LAUNCH(hipGraphLaunch_spt)
LAUNCH(hipGraphUpload)

HOOK(hipGraphExecDestroy, hipGraphExec_t exec)
{
    struct limit_session *session = outside() ? limit_session() : NULL;
    struct limit_entry entry;
    bool known = session && limit_graph_take(session, exec, &entry);
    hipError_t result = VENDOR(hipGraphExecDestroy, exec);
    if (known)
        limit_graph_destroyed(session, &entry, result == hipSuccess);
    return result;
}

HOOK(hipDeviceGraphMemTrim, int ordinal)
{
    hipError_t result = VENDOR(hipDeviceGraphMemTrim, ordinal);
    struct limit_session *session = outside() ? limit_session() : NULL;
    if (session)
        limit_settle_pools(&driver, session);
    return result;
}

/* ---- virtual memory ---- */

/* Charged where it will lie, whatever device is current; in pages of 2 MiB. */
HOOK(hipMemCreate, hipMemHandle *handle, size_t size, const hipMemAllocationProp *properties, unsigned long long flags)
{
    enum { PAGE = 2 << 20 };
    if (!outside() || !handle || !properties || size == 0 || size > SIZE_MAX / 2 ||
        properties->location.type != HIP_ON_DEVICE)
        return VENDOR(hipMemCreate, handle, size, properties, flags);
    struct limit_entry entry = {0};
    if (!limit_driver_take(&driver, device_of(properties->location.id), (size + PAGE - 1) / PAGE * PAGE, &entry))
        return hipErrorOutOfMemory;
    hipError_t result = VENDOR(hipMemCreate, handle, size, properties, flags);
    if (result == hipSuccess)
        limit_physical_made(&entry, *handle);
    else
        limit_driver_give(&driver, &entry);
    return result;
}

HOOK(hipMemRelease, hipMemHandle handle)
{
    LIMIT_OBJECT(hipError_t, VENDOR(hipMemRelease, handle), limit_physical_released(session, handle));
}

HOOK(hipMemMap, void *address, size_t size, size_t offset, hipMemHandle handle, unsigned long long flags)
{
    LIMIT_OBJECT(hipError_t, VENDOR(hipMemMap, address, size, offset, handle, flags),
                 limit_mapped(session, (uint64_t)(uintptr_t)address, size, handle));
}

HOOK(hipMemUnmap, void *address, size_t size)
{
    LIMIT_OBJECT(hipError_t, VENDOR(hipMemUnmap, address, size),
                 limit_unmapped(session, (uint64_t)(uintptr_t)address, size));
}

HOOK(hipMemRetainAllocationHandle, hipMemHandle *handle, void *address)
{
    LIMIT_OBJECT(hipError_t, VENDOR(hipMemRetainAllocationHandle, handle, address),
                 limit_physical_retained(session, (uint64_t)(uintptr_t)address, *handle));
}

HOOK(hipMemExportToShareableHandle, void *shareable, hipMemHandle handle, int type, unsigned long long flags)
{
    enum { FILE_DESCRIPTOR = 1 };
    LIMIT_OBJECT(hipError_t, VENDOR(hipMemExportToShareableHandle, shareable, handle, type, flags),
                 limit_physical_exported(session, handle, type == FILE_DESCRIPTOR ? *(int *)shareable : -1));
}

HOOK(hipMemImportFromShareableHandle, hipMemHandle *handle, void *shareable, int type)
{
    enum { FILE_DESCRIPTOR = 1 };
    LIMIT_OBJECT(hipError_t, VENDOR(hipMemImportFromShareableHandle, handle, shareable, type),
                 limit_physical_imported(session, *handle, type == FILE_DESCRIPTOR ? (int)(intptr_t)shareable : -1));
}

/* ---- memory of other processes ---- */

typedef struct {
    char bytes[64];
} hipIpcMemHandle_t;

HOOK(hipIpcGetMemHandle, hipIpcMemHandle_t *handle, void *memory)
{
    LIMIT_SHARE(hipError_t, VENDOR(hipIpcGetMemHandle, handle, memory), limit_exported(session));
}

HOOK(hipIpcOpenMemHandle, void **memory, hipIpcMemHandle_t handle, unsigned flags)
{
    LIMIT_SHARE(hipError_t, VENDOR(hipIpcOpenMemHandle, memory, handle, flags), limit_imported(session));
}

HOOK(hipIpcCloseMemHandle, void *memory)
{
    LIMIT_SHARE(hipError_t, VENDOR(hipIpcCloseMemHandle, memory), limit_import_ended(session));
}

HOOK(hipMemPoolExportToShareableHandle, void *shareable, hipMemPool_t pool, int type, unsigned flags)
{
    LIMIT_SHARE(hipError_t, VENDOR(hipMemPoolExportToShareableHandle, shareable, pool, type, flags),
                limit_exported(session));
}

HOOK(hipMemPoolImportFromShareableHandle, hipMemPool_t *pool, void *shareable, int type, unsigned flags)
{
    LIMIT_SHARE(hipError_t, VENDOR(hipMemPoolImportFromShareableHandle, pool, shareable, type, flags),
                limit_imported(session));
}

/* ---- queries ---- */

HOOK(hipMemGetInfo, size_t *free_bytes, size_t *total)
{
    TOUCH();
    size_t left, all;
    if (!outside())
        return VENDOR(hipMemGetInfo, free_bytes, total);
    hipError_t result = VENDOR(hipMemGetInfo, &left, &all);
    if (result == hipSuccess) {
        limit_pools_may_have_shrunk(&driver);
        limit_narrow(device, &left, &all);
        if (free_bytes)
            *free_bytes = left;
        if (total)
            *total = all;
    }
    return result;
}

HOOK(hipDeviceTotalMem, size_t *bytes, int ordinal)
{
    hipError_t result = VENDOR(hipDeviceTotalMem, bytes, ordinal);
    if (result == hipSuccess && outside())
        limit_narrow(device_of(ordinal), NULL, bytes);
    return result;
}

static hipError_t narrowed(hipError_t result, void *properties, size_t place, int ordinal)
{
    size_t bytes;
    if (result == hipSuccess && outside()) {
        memcpy(&bytes, (char *)properties + place, sizeof bytes);
        limit_narrow(device_of(ordinal), NULL, &bytes);
        memcpy((char *)properties + place, &bytes, sizeof bytes);
    }
    return result;
}

HOOK(hipGetDeviceProperties, void *properties, int ordinal)
{
    return narrowed(VENDOR(hipGetDeviceProperties, properties, ordinal), properties, TOTAL_IN_R0000, ordinal);
}

HOOK(hipGetDevicePropertiesR0000, void *properties, int ordinal)
{
    return narrowed(VENDOR(hipGetDevicePropertiesR0000, properties, ordinal), properties, TOTAL_IN_R0000, ordinal);
}

HOOK(hipGetDevicePropertiesR0600, void *properties, int ordinal)
{
    return narrowed(VENDOR(hipGetDevicePropertiesR0600, properties, ordinal), properties, TOTAL_IN_R0600, ordinal);
}

/* ---- the table ---- */

#define ROW_WRAPPED(NAME) [CALL_##NAME] = {.name = #NAME, .wrapper = (void *)(NAME)},
#define ROW_NEEDED(NAME) [CALL_##NAME] = {.name = #NAME},
static struct limit_call calls[CALLS] = {WRAPPED(ROW_WRAPPED) NEEDED(ROW_NEEDED)};
static const char *const sonames[] = {"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5",
                                      NULL};
struct limit_library limit_hip = {.sonames = sonames, .calls = calls, .count = CALLS};
