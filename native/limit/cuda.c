/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA driver's memory calls. The runtime library, static or shared, asks the driver for its functions through
 * cuGetProcAddress, so that this one layer covers both.
 *
 * - Contexts: what creates one charges the measured size first; what destroys one gives it back with all that lived in
 * it.
 * - Memory: reserve, ask the driver, give back where it refuses; freed by address.
 * - Pools are charged with what the driver keeps in them (its own figure), not with what it handed out.
 * - Graphs: the memory of allocation nodes is a pool of the device's, which grows when a graph is launched.
 * - Virtual memory: charged from cuMemCreate until the last handle, mapping and exported file is gone.
 * - Queries answer within the limit.
 *
 * Each entry point stands once in the list below. Host memory and imported memory (which its exporter is charged
 * for) are not charged; launches and copies are not touched.
 */
#include "cuda.h"

#include "driver.h"
#include "hook.h"

#include <string.h>

#define HOOK(NAME, ...) LIMIT_EXPORT CUresult NAME(__VA_ARGS__)

/* Every wrapper, and what else of the driver we call: name, interface version that brought it. */
#define WRAPPED(CALL)                                                                                                  \
    CALL(cuGetProcAddress, 11030)                                                                                      \
    CALL(cuGetProcAddress_v2, 12000)                                                                                   \
    /* contexts */                                                                                                     \
    CALL(cuCtxCreate, 0)                                                                                               \
    CALL(cuCtxCreate_v2, 3020)                                                                                         \
    CALL(cuCtxCreate_v3, 11040)                                                                                        \
    CALL(cuCtxCreate_v4, 12050)                                                                                        \
    CALL(cuCtxDestroy, 0)                                                                                              \
    CALL(cuCtxDestroy_v2, 4000)                                                                                        \
    CALL(cuCtxSetLimit, 3010)                                                                                          \
    CALL(cuDevicePrimaryCtxRetain, 7000)                                                                               \
    CALL(cuDevicePrimaryCtxRelease, 7000)                                                                              \
    CALL(cuDevicePrimaryCtxRelease_v2, 11000)                                                                          \
    CALL(cuDevicePrimaryCtxReset, 7000)                                                                                \
    CALL(cuDevicePrimaryCtxReset_v2, 11000)                                                                            \
    /* memory; the first forms are of 32 bits */                                                                       \
    CALL(cuMemAlloc, 0)                                                                                                \
    CALL(cuMemAlloc_v2, 3020)                                                                                          \
    CALL(cuMemAllocPitch, 0)                                                                                           \
    CALL(cuMemAllocPitch_v2, 3020)                                                                                     \
    CALL(cuMemAllocManaged, 6000)                                                                                      \
    CALL(cuMemFree_v2, 3020)                                                                                           \
    CALL(cuMemPrefetchAsync, 8000)                                                                                     \
    CALL(cuMemPrefetchAsync_ptsz, 8000)                                                                                \
    CALL(cuMemPrefetchAsync_v2, 13000)                                                                                 \
    CALL(cuMemPrefetchAsync_v2_ptsz, 13000)                                                                            \
    CALL(cuMemAdvise, 8000)                                                                                            \
    CALL(cuMemAdvise_v2, 13000)                                                                                        \
    /* arrays */                                                                                                       \
    CALL(cuArrayCreate, 0)                                                                                             \
    CALL(cuArrayCreate_v2, 3020)                                                                                       \
    CALL(cuArray3DCreate, 0)                                                                                           \
    CALL(cuArray3DCreate_v2, 3020)                                                                                     \
    CALL(cuArrayDestroy, 2000)                                                                                         \
    CALL(cuMipmappedArrayCreate, 5000)                                                                                 \
    CALL(cuMipmappedArrayDestroy, 5000)                                                                                \
    /* pools */                                                                                                        \
    CALL(cuMemAllocAsync, 11020)                                                                                       \
    CALL(cuMemAllocAsync_ptsz, 11020)                                                                                  \
    CALL(cuMemAllocFromPoolAsync, 11020)                                                                               \
    CALL(cuMemAllocFromPoolAsync_ptsz, 11020)                                                                          \
    CALL(cuMemFreeAsync, 11020)                                                                                        \
    CALL(cuMemFreeAsync_ptsz, 11020)                                                                                   \
    CALL(cuMemPoolCreate, 11020)                                                                                       \
    CALL(cuMemPoolDestroy, 11020)                                                                                      \
    CALL(cuMemPoolTrimTo, 11020)                                                                                       \
    CALL(cuStreamSynchronize, 2000)                                                                                    \
    CALL(cuStreamSynchronize_ptsz, 2000)                                                                               \
    CALL(cuEventSynchronize, 2000)                                                                                     \
    CALL(cuCtxSynchronize, 2000)                                                                                       \
    /* graphs */                                                                                                       \
    CALL(cuGraphInstantiate, 10000)                                                                                    \
    CALL(cuGraphInstantiate_v2, 11000)                                                                                 \
    CALL(cuGraphInstantiateWithParams, 12000)                                                                          \
    CALL(cuGraphInstantiateWithParams_ptsz, 12000)                                                                     \
    CALL(cuGraphExecDestroy, 10000)                                                                                    \
    CALL(cuGraphLaunch, 10000)                                                                                         \
    CALL(cuGraphLaunch_ptsz, 10000)                                                                                    \
    CALL(cuGraphUpload, 11010)                                                                                         \
    CALL(cuGraphUpload_ptsz, 11010)                                                                                    \
    CALL(cuDeviceGraphMemTrim, 11040)                                                                                  \
    /* virtual memory */                                                                                               \
    CALL(cuMemCreate, 10020)                                                                                           \
    CALL(cuMemRelease, 10020)                                                                                          \
    CALL(cuMemRetainAllocationHandle, 11000)                                                                           \
    CALL(cuMemMap, 10020)                                                                                              \
    CALL(cuMemUnmap, 10020)                                                                                            \
    CALL(cuMemMapArrayAsync, 11010)                                                                                    \
    CALL(cuMemMapArrayAsync_ptsz, 11010)                                                                               \
    CALL(cuMemImportFromShareableHandle, 10020)                                                                        \
    /* other processes */                                                                                              \
    CALL(cuIpcGetMemHandle, 4010)                                                                                      \
    CALL(cuIpcOpenMemHandle, 4010)                                                                                     \
    CALL(cuIpcOpenMemHandle_v2, 11000)                                                                                 \
    CALL(cuIpcCloseMemHandle, 4010)                                                                                    \
    CALL(cuMemPoolExportToShareableHandle, 11020)                                                                      \
    CALL(cuMemPoolImportFromShareableHandle, 11020)                                                                    \
    CALL(cuMemExportToShareableHandle, 10020)                                                                          \
    /* queries */                                                                                                      \
    CALL(cuMemGetInfo_v2, 3020)                                                                                        \
    CALL(cuDeviceTotalMem_v2, 3020)

/* The same, with another name that means it, from a version on. */
#define RENAMED(CALL) CALL(cuGraphInstantiateWithFlags, 11040, cuGraphInstantiate, 12000)

#define NEEDED(CALL)                                                                                                   \
    CALL(cuDeviceGetUuid)                                                                                              \
    CALL(cuDeviceGetUuid_v2)                                                                                           \
    CALL(cuDeviceGetPCIBusId)                                                                                          \
    CALL(cuDeviceGetCount)                                                                                             \
    CALL(cuCtxGetDevice)                                                                                               \
    CALL(cuCtxGetCurrent)                                                                                              \
    CALL(cuCtxPushCurrent_v2)                                                                                          \
    CALL(cuCtxPopCurrent_v2)                                                                                           \
    CALL(cuCtxGetLimit)                                                                                                \
    CALL(cuDevicePrimaryCtxGetState)                                                                                   \
    CALL(cuStreamGetCtx)                                                                                               \
    CALL(cuDeviceGetMemPool)                                                                                           \
    CALL(cuDeviceGetDefaultMemPool)                                                                                    \
    CALL(cuMemPoolGetAttribute)                                                                                        \
    CALL(cuDeviceGetGraphMemAttribute)                                                                                 \
    CALL(cuGraphGetNodes)                                                                                              \
    CALL(cuGraphNodeGetType)                                                                                           \
    CALL(cuGraphChildGraphNodeGetGraph)                                                                                \
    CALL(cuGraphMemAllocNodeGetParams)                                                                                 \
    CALL(cuMemGetAddressRange_v2)

#define NUMBER_WRAPPED(NAME, SINCE) CALL_##NAME,
#define NUMBER_RENAMED(NAME, SINCE, ALIAS, ALIAS_SINCE) CALL_##NAME,
#define NUMBER_NEEDED(NAME) CALL_##NAME,
enum { WRAPPED(NUMBER_WRAPPED) RENAMED(NUMBER_RENAMED) NEEDED(NUMBER_NEEDED) CALLS };
static struct limit_call calls[CALLS];

typedef CUresult cuDeviceGetUuid(unsigned char *, CUdevice);
typedef CUresult cuDeviceGetUuid_v2(unsigned char *, CUdevice);
typedef CUresult cuDeviceGetPCIBusId(char *, int, CUdevice);
typedef CUresult cuDeviceGetCount(int *);
typedef CUresult cuCtxGetDevice(CUdevice *);
typedef CUresult cuCtxGetCurrent(CUcontext *);
typedef CUresult cuCtxPushCurrent_v2(CUcontext);
typedef CUresult cuCtxPopCurrent_v2(CUcontext *);
typedef CUresult cuCtxGetLimit(size_t *, int);
typedef CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *, int *);
typedef CUresult cuStreamGetCtx(CUstream, CUcontext *);
typedef CUresult cuDeviceGetMemPool(CUmemoryPool *, CUdevice);
typedef CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *, CUdevice);
typedef CUresult cuMemPoolGetAttribute(CUmemoryPool, int, void *);
typedef CUresult cuDeviceGetGraphMemAttribute(CUdevice, int, void *);
typedef CUresult cuGraphGetNodes(CUgraph, CUgraphNode *, size_t *);
typedef CUresult cuGraphNodeGetType(CUgraphNode, int *);
typedef CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode, CUgraph *);
typedef CUresult cuGraphMemAllocNodeGetParams(CUgraphNode, CUmemAllocNodeParams *);
typedef CUresult cuMemGetAddressRange_v2(CUdeviceptr *, size_t *, CUdeviceptr);

/* Wrappers whose originals others call, too. */
HOOK(cuMemAllocManaged, CUdeviceptr *, size_t, unsigned);
HOOK(cuMemAdvise, CUdeviceptr, size_t, int, CUdevice);
HOOK(cuMemFree_v2, CUdeviceptr);
HOOK(cuMemFreeAsync, CUdeviceptr, CUstream);
HOOK(cuMemPrefetchAsync, CUdeviceptr, size_t, CUdevice, CUstream);
HOOK(cuMemPrefetchAsync_v2, CUdeviceptr, size_t, CUmemLocation, unsigned, CUstream);
HOOK(cuMemAllocAsync, CUdeviceptr *, size_t, CUstream);
HOOK(cuMemAllocFromPoolAsync, CUdeviceptr *, size_t, CUmemoryPool, CUstream);
HOOK(cuGraphLaunch, CUgraphExec, CUstream);
HOOK(cuCtxDestroy_v2, CUcontext);
HOOK(cuDevicePrimaryCtxRelease_v2, CUdevice);

static CUresult absent(void)
{
    return CUDA_ERROR_NOT_INITIALIZED;
}

static void (*function_of(struct limit_call *call))(void)
{
    void *found = limit_vendor(&limit_cuda, call);
    void (*function)(void) = (void (*)(void))absent; /* no driver is loaded: what it would say before cuInit */
    if (found)
        memcpy(&function, &found, sizeof function);
    return function;
}

/* Call the vendor's function; `LIKE` is one of the same type. */
#define VENDOR_AS(LIKE, CALL, ...) LIMIT_IN(((__typeof__(&LIKE))function_of(CALL))(__VA_ARGS__))
#define VENDOR(NAME, ...) VENDOR_AS(NAME, &calls[CALL_##NAME], __VA_ARGS__)
#define NEED(NAME, ...) LIMIT_IN(((NAME *)function_of(&calls[CALL_##NAME]))(__VA_ARGS__))

static bool outside(void)
{
    return limit_outside();
}

/* ---- devices ---- */

static int device_of(CUdevice ordinal)
{
    struct limit_session *session = limit_session();
    if (!session)
        return LIMIT_CLOSED;
    atomic_schar *kept = ordinal >= 0 && ordinal < LIMIT_ORDINALS ? &session->ordinals[0][ordinal] : NULL;
    int known = kept ? atomic_load_explicit(kept, memory_order_relaxed) : 0, count = 0;
    if (known != 0)
        return known - 3;
    if (NEED(cuDeviceGetCount, &count) != CUDA_SUCCESS || ordinal < 0 || ordinal >= count)
        return LIMIT_NO_DEVICE;
    if (!kept)
        return LIMIT_CLOSED;
    unsigned char uuid[16];
    char pci[32] = "";
    bool named =
        NEED(cuDeviceGetUuid_v2, uuid, ordinal) == CUDA_SUCCESS || NEED(cuDeviceGetUuid, uuid, ordinal) == CUDA_SUCCESS;
    NEED(cuDeviceGetPCIBusId, pci, (int)sizeof pci, ordinal);
    int found = named || *pci ? limit_device(named ? uuid : NULL, *pci ? pci : NULL, NULL) : LIMIT_CLOSED;
    if (named || *pci)
        atomic_store_explicit(kept, (signed char)(found + 3), memory_order_relaxed);
    return found;
}

/* The calling thread's device; false: it has no context, and the driver shall say so. */
static bool current_ordinal(CUdevice *ordinal)
{
    return NEED(cuCtxGetDevice, ordinal) == CUDA_SUCCESS;
}

static CUcontext current_context(void)
{
    CUcontext context = NULL;
    NEED(cuCtxGetCurrent, &context);
    return context;
}

/* ---- what driver.c asks ---- */

static bool pool_attribute(void *pool, int attribute, uint64_t *value)
{
    return NEED(cuMemPoolGetAttribute, pool, attribute, value) == CUDA_SUCCESS;
}

static bool graph_attribute(int ordinal, int attribute, uint64_t *value)
{
    return NEED(cuDeviceGetGraphMemAttribute, ordinal, attribute, value) == CUDA_SUCCESS;
}

static bool graph_nodes(void *graph, void **nodes, size_t *count)
{
    return NEED(cuGraphGetNodes, graph, nodes, count) == CUDA_SUCCESS;
}

static bool node_memory(void *node, int *ordinal, uint64_t *bytes)
{
    enum { MEM_ALLOC = 10 };
    int type;
    CUmemAllocNodeParams parameters = {0};
    if (NEED(cuGraphNodeGetType, node, &type) != CUDA_SUCCESS || type != MEM_ALLOC ||
        NEED(cuGraphMemAllocNodeGetParams, node, &parameters) != CUDA_SUCCESS ||
        parameters.poolProps.location.type != CU_ON_DEVICE)
        return false;
    *ordinal = parameters.poolProps.location.id;
    *bytes = parameters.bytesize;
    return true;
}

enum { GRANULE = 2 << 20 }; /* device memory comes in pages of 2 MiB */

static bool node_graph(void *node, void **graph)
{
    enum { GRAPH = 4 };
    int type;
    return NEED(cuGraphNodeGetType, node, &type) == CUDA_SUCCESS && type == GRAPH &&
           NEED(cuGraphChildGraphNodeGetGraph, node, graph) == CUDA_SUCCESS;
}

static const struct limit_driver driver = {
    .granule = GRANULE,
    .device = device_of,
    .pool_attribute = pool_attribute,
    .graph_attribute = graph_attribute,
    .graph_nodes = graph_nodes,
    .node_memory = node_memory,
    .node_graph = node_graph,
};

static bool take_piece(int device, uint64_t size, struct limit_entry *entry)
{
    return limit_driver_take(&driver, device, size, entry);
}

/* ---- look-up ---- */

static CUresult replaced(CUresult result, const char *symbol, void **function, int version, uint64_t flags)
{
    enum { PER_THREAD = 2 };
    if (result == CUDA_SUCCESS && symbol && function && *function && outside()) {
        struct limit_call *call = limit_find_form(&limit_cuda, symbol, version, (flags & PER_THREAD) != 0, *function);
        *function = call ? limit_replace(call, *function) : *function;
    }
    return result;
}

HOOK(cuGetProcAddress, const char *symbol, void **function, int version, uint64_t flags)
{
    return replaced(VENDOR(cuGetProcAddress, symbol, function, version, flags), symbol, function, version, flags);
}

HOOK(cuGetProcAddress_v2, const char *symbol, void **function, int version, uint64_t flags, int *status)
{
    return replaced(VENDOR(cuGetProcAddress_v2, symbol, function, version, flags, status), symbol, function, version,
                    flags);
}

/* ---- contexts ---- */

/* `CREATE` makes a context on a device; its size is charged before. */
#define NEW_CONTEXT(ORDINAL, CONTEXT, CREATE)                                                                          \
    do {                                                                                                               \
        if (!outside())                                                                                                \
            return CREATE;                                                                                             \
        int device = device_of(ORDINAL);                                                                               \
        if (!limit_driver_open_context(&driver, device))                                                               \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                           \
        CUresult result = CREATE;                                                                                      \
        if (result == CUDA_SUCCESS)                                                                                    \
            limit_remember(&(struct limit_entry){.device = device}, LIMIT_CONTEXT, (uint64_t)(uintptr_t) * (CONTEXT)); \
        else                                                                                                           \
            limit_close_context(device);                                                                               \
        return result;                                                                                                 \
    } while (0)

HOOK(cuCtxCreate, CUcontext *context, unsigned flags, CUdevice ordinal)
{
    NEW_CONTEXT(ordinal, context, VENDOR(cuCtxCreate, context, flags, ordinal));
}

HOOK(cuCtxCreate_v2, CUcontext *context, unsigned flags, CUdevice ordinal)
{
    NEW_CONTEXT(ordinal, context, VENDOR(cuCtxCreate_v2, context, flags, ordinal));
}

HOOK(cuCtxCreate_v3, CUcontext *context, void *affinity, int count, unsigned flags, CUdevice ordinal)
{
    NEW_CONTEXT(ordinal, context, VENDOR(cuCtxCreate_v3, context, affinity, count, flags, ordinal));
}

HOOK(cuCtxCreate_v4, CUcontext *context, void *parameters, unsigned flags, CUdevice ordinal)
{
    NEW_CONTEXT(ordinal, context, VENDOR(cuCtxCreate_v4, context, parameters, flags, ordinal));
}

static void end_context(struct limit_session *session, int device, CUcontext context)
{
    limit_drop_owner(&driver, session, context);
    limit_close_context(device);
}

static CUresult destroy_context(struct limit_call *call, CUcontext context)
{
    struct limit_session *session = outside() ? limit_session() : NULL;
    struct limit_entry entry;
    bool known = session && limit_table_take(&session->table, LIMIT_CONTEXT, (uint64_t)(uintptr_t)context, &entry);
    CUresult result = VENDOR_AS(cuCtxDestroy_v2, call, context);
    if (known && result == CUDA_SUCCESS)
        end_context(session, entry.device, context);
    else if (known)
        limit_table_put(&session->table, &entry);
    return result;
}

HOOK(cuCtxDestroy, CUcontext context)
{
    return destroy_context(&calls[CALL_cuCtxDestroy], context);
}

HOOK(cuCtxDestroy_v2, CUcontext context)
{
    return destroy_context(&calls[CALL_cuCtxDestroy_v2], context);
}

static bool primary_active(CUdevice ordinal)
{
    unsigned flags;
    int active = 0;
    return NEED(cuDevicePrimaryCtxGetState, ordinal, &flags, &active) == CUDA_SUCCESS && active;
}

HOOK(cuDevicePrimaryCtxRetain, CUcontext *context, CUdevice ordinal)
{
    struct limit_session *session = outside() ? limit_session() : NULL;
    if (!outside())
        return VENDOR(cuDevicePrimaryCtxRetain, context, ordinal);
    int device = device_of(ordinal);
    if (device == LIMIT_NO_DEVICE)
        return VENDOR(cuDevicePrimaryCtxRetain, context, ordinal);
    if (!session || device == LIMIT_CLOSED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&session->contexts);
    bool first = !primary_active(ordinal);
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    if (!first || limit_driver_open_context(&driver, device)) {
        result = VENDOR(cuDevicePrimaryCtxRetain, context, ordinal);
        if (first && result != CUDA_SUCCESS)
            limit_close_context(device);
        else if (result == CUDA_SUCCESS)
            session->primary[ordinal] = *context;
    }
    pthread_mutex_unlock(&session->contexts);
    return result;
}

static CUresult end_primary(struct limit_call *call, CUdevice ordinal)
{
    struct limit_session *session = outside() ? limit_session() : NULL;
    if (!session || ordinal < 0 || ordinal >= LIMIT_ORDINALS)
        return VENDOR_AS(cuDevicePrimaryCtxRelease_v2, call, ordinal);
    pthread_mutex_lock(&session->contexts);
    bool active = primary_active(ordinal);
    CUresult result = VENDOR_AS(cuDevicePrimaryCtxRelease_v2, call, ordinal);
    if (active && !primary_active(ordinal)) {
        end_context(session, device_of(ordinal), session->primary[ordinal]);
        session->primary[ordinal] = NULL;
    }
    pthread_mutex_unlock(&session->contexts);
    return result;
}

#define END_PRIMARY(NAME)                                                                                              \
    HOOK(NAME, CUdevice ordinal)                                                                                       \
    {                                                                                                                  \
        return end_primary(&calls[CALL_##NAME], ordinal);                                                              \
    }

END_PRIMARY(cuDevicePrimaryCtxRelease)
END_PRIMARY(cuDevicePrimaryCtxRelease_v2)
END_PRIMARY(cuDevicePrimaryCtxReset)
END_PRIMARY(cuDevicePrimaryCtxReset_v2)

/* The heap and the print buffer of kernels are device memory, too; their first sizes are part of the context. */
HOOK(cuCtxSetLimit, int which, size_t value)
{
    enum { PRINT_BUFFER = 1, HEAP = 2 };
    struct limit_session *session = outside() ? limit_session() : NULL;
    CUdevice ordinal;
    size_t before;
    if (!session || (which != PRINT_BUFFER && which != HEAP) || !current_ordinal(&ordinal) ||
        NEED(cuCtxGetLimit, &before, which) != CUDA_SUCCESS)
        return VENDOR(cuCtxSetLimit, which, value);
    CUcontext context = current_context();
    struct limit_entry entry, more;
    uint64_t key = (uint64_t)(uintptr_t)context * 4 + (unsigned)which;
    if (!limit_table_take(&session->table, LIMIT_HEAP, key, &entry))
        entry = (struct limit_entry){.device = device_of(ordinal), .owner = context};
    uint64_t grown = (value > before ? value - before : 0) + GRANULE - 1;
    grown -= grown % GRANULE;
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    if (grown == 0 || take_piece(entry.device, grown, &more)) {
        result = VENDOR(cuCtxSetLimit, which, value);
        uint64_t less = result != CUDA_SUCCESS ? grown : value < before ? (before - value) / GRANULE * GRANULE : 0;
        entry.bytes += grown;
        less = less < entry.bytes ? less : entry.bytes;
        limit_give(entry.device, less);
        entry.bytes -= less;
    }
    if (entry.bytes > 0)
        limit_remember(&entry, LIMIT_HEAP, key);
    return result;
}

/* ---- memory ---- */

/* In host memory that the device reaches: where policy allows more than the limit. */
static CUresult spill(CUdeviceptr *address, size_t size, CUdevice ordinal, CUcontext context)
{
    enum { GLOBAL = 1, PREFERRED_LOCATION = 3, ACCESSED_BY = 5, HOST = -1 };
    struct limit_session *session = limit_session();
    struct limit_entry entry = {.device = device_of(ordinal),
                                .owner = context,
                                .bytes = (size + GRANULE - 1) / GRANULE * GRANULE,
                                .spilled = true};
    if (!session || !limit_take_spill(entry.device, entry.bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    atomic_fetch_add(&session->spills, 1);
    CUresult result = VENDOR(cuMemAllocManaged, address, size, GLOBAL);
    if (result == CUDA_SUCCESS) {
        result = VENDOR(cuMemAdvise, *address, size, PREFERRED_LOCATION, HOST);
        if (result == CUDA_SUCCESS)
            result = VENDOR(cuMemAdvise, *address, size, ACCESSED_BY, ordinal);
        if (result != CUDA_SUCCESS)
            VENDOR(cuMemFree_v2, *address);
    }
    if (result == CUDA_SUCCESS) {
        limit_remember(&entry, LIMIT_ADDRESS, *address);
    } else {
        limit_give_spill(entry.device, entry.bytes);
        atomic_fetch_sub(&session->spills, 1);
    }
    return result;
}

/* `ALLOCATE` gets SIZE bytes on the current device at *ADDRESS; OTHERWISE is tried where the limit refuses them. */
#define ALLOCATE(ADDRESS, SIZE, ALLOCATION, OTHERWISE)                                                                 \
    do {                                                                                                               \
        CUdevice ordinal;                                                                                              \
        if (!outside() || !(ADDRESS) || (SIZE) == 0 || !current_ordinal(&ordinal))                                     \
            return ALLOCATION; /* to be refused by the driver itself */                                                \
        CUcontext context = current_context();                                                                         \
        struct limit_entry entry = {.owner = context};                                                                 \
        if (!take_piece(device_of(ordinal), SIZE, &entry))                                                             \
            return OTHERWISE;                                                                                          \
        CUresult result = ALLOCATION;                                                                                  \
        if (result == CUDA_SUCCESS)                                                                                    \
            limit_remember(&entry, LIMIT_ADDRESS, (uint64_t) * (ADDRESS));                                             \
        else                                                                                                           \
            limit_driver_give(&driver, &entry);                                                                        \
        return result;                                                                                                 \
    } while (0)

HOOK(cuMemAlloc_v2, CUdeviceptr *address, size_t size)
{
    ALLOCATE(address, size, VENDOR(cuMemAlloc_v2, address, size), spill(address, size, ordinal, context));
}

HOOK(cuMemAllocManaged, CUdeviceptr *address, size_t size, unsigned flags)
{
    ALLOCATE(address, size, VENDOR(cuMemAllocManaged, address, size, flags), spill(address, size, ordinal, context));
}

/* Rows are padded to the driver's pitch, which is known afterwards only: 512 bytes, or else the difference is charged.
 */
HOOK(cuMemAllocPitch_v2, CUdeviceptr *address, size_t *pitch, size_t width, size_t height, unsigned element)
{
    enum { PITCH = 512 };
    size_t size = 0, padded = width <= SIZE_MAX - PITCH ? (width + PITCH - 1) / PITCH * PITCH : 0;
    if (!pitch || __builtin_mul_overflow(padded, height, &size))
        size = 0;
    ALLOCATE(address, size, VENDOR(cuMemAllocPitch_v2, address, pitch, width, height, element),
             CUDA_ERROR_OUT_OF_MEMORY);
}

/* Of a time of 32-bit addresses; a program of 64 bits has no use for them but to go around. */
#define TOO_OLD(NAME)                                                                                                  \
    HOOK(NAME, void)                                                                                                   \
    {                                                                                                                  \
        return CUDA_ERROR_NOT_SUPPORTED;                                                                               \
    }

TOO_OLD(cuMemAlloc)
TOO_OLD(cuMemAllocPitch)
TOO_OLD(cuArrayCreate)
TOO_OLD(cuArray3DCreate)

#define FORGET(KEY, FREE) LIMIT_FORGET(&driver, KEY, CUresult, FREE)

HOOK(cuMemFree_v2, CUdeviceptr address)
{
    FORGET(address, VENDOR(cuMemFree_v2, address));
}

static bool is_spilled(CUdeviceptr address)
{
    struct limit_session *session = outside() ? limit_session() : NULL;
    struct limit_entry entry;
    CUdeviceptr base;
    size_t size;
    return session && atomic_load_explicit(&session->spills, memory_order_relaxed) != 0 &&
           NEED(cuMemGetAddressRange_v2, &base, &size, address) == CUDA_SUCCESS &&
           limit_table_get(&session->table, LIMIT_ADDRESS, base, &entry) && entry.spilled;
}

/* What was spilled stays on the host: a wish to move it is only a hint. */
static CUresult prefetch(struct limit_call *call, CUdeviceptr address, size_t size, CUdevice ordinal, CUstream stream)
{
    return ordinal >= 0 && is_spilled(address) ? CUDA_SUCCESS
                                               : VENDOR_AS(cuMemPrefetchAsync, call, address, size, ordinal, stream);
}

HOOK(cuMemPrefetchAsync, CUdeviceptr address, size_t size, CUdevice ordinal, CUstream stream)
{
    return prefetch(&calls[CALL_cuMemPrefetchAsync], address, size, ordinal, stream);
}

HOOK(cuMemPrefetchAsync_ptsz, CUdeviceptr address, size_t size, CUdevice ordinal, CUstream stream)
{
    return prefetch(&calls[CALL_cuMemPrefetchAsync_ptsz], address, size, ordinal, stream);
}

static CUresult prefetch_to(struct limit_call *call, CUdeviceptr address, size_t size, CUmemLocation to, unsigned flags,
                            CUstream stream)
{
    return to.type == CU_ON_DEVICE && is_spilled(address)
               ? CUDA_SUCCESS
               : VENDOR_AS(cuMemPrefetchAsync_v2, call, address, size, to, flags, stream);
}

HOOK(cuMemPrefetchAsync_v2, CUdeviceptr address, size_t size, CUmemLocation to, unsigned flags, CUstream stream)
{
    return prefetch_to(&calls[CALL_cuMemPrefetchAsync_v2], address, size, to, flags, stream);
}

HOOK(cuMemPrefetchAsync_v2_ptsz, CUdeviceptr address, size_t size, CUmemLocation to, unsigned flags, CUstream stream)
{
    return prefetch_to(&calls[CALL_cuMemPrefetchAsync_v2_ptsz], address, size, to, flags, stream);
}

static bool moves(int advice)
{
    enum { SET_PREFERRED_LOCATION = 3, UNSET_PREFERRED_LOCATION = 4 };
    return advice == SET_PREFERRED_LOCATION || advice == UNSET_PREFERRED_LOCATION;
}

HOOK(cuMemAdvise, CUdeviceptr address, size_t size, int advice, CUdevice ordinal)
{
    return moves(advice) && is_spilled(address) ? CUDA_SUCCESS : VENDOR(cuMemAdvise, address, size, advice, ordinal);
}

HOOK(cuMemAdvise_v2, CUdeviceptr address, size_t size, int advice, CUmemLocation to)
{
    return moves(advice) && is_spilled(address) ? CUDA_SUCCESS : VENDOR(cuMemAdvise_v2, address, size, advice, to);
}

/* ---- arrays ---- */

/* Bytes of a texel's channel; what is not known counts as the widest. */
static size_t channel_bytes(int format)
{
    static const struct {
        int format;
        size_t bytes;
    } known[] = {{0x01, 1}, {0x02, 2}, {0x03, 4}, {0x08, 1}, {0x09, 2}, {0x0a, 4}, {0x10, 2},
                 {0x20, 4}, {0xc0, 1}, {0xc1, 1}, {0xc2, 1}, {0xc3, 2}, {0xc4, 2}, {0xc5, 2}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].format == format)
            return known[i].bytes;
    return 4;
}

static uint64_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *what, unsigned levels)
{
    enum { LAYERED = 1, SPARSE = 0x40, DEFERRED = 0x80, MAX_SIDE = 1 << 20 };
    if (!what || (what->flags & (SPARSE | DEFERRED)) != 0 || what->width > MAX_SIDE || what->height > MAX_SIDE ||
        what->depth > MAX_SIDE || what->channels > 4)
        return 0; /* no memory yet, or nothing that a driver would accept */
    uint64_t width = what->width, height = what->height, depth = what->depth, bytes = 0;
    for (unsigned level = 0; level < levels && level < 32; level++) {
        uint64_t texels = (width ? width : 1) * (height ? height : 1);
        uint64_t texel = channel_bytes(what->format) * what->channels, planes = depth ? depth : 1;
        if (texels > (UINT64_C(1) << 50) / planes / (texel ? texel : 1))
            return UINT64_C(1) << 50;
        bytes += texels * planes * texel;
        width /= 2;
        height /= 2;
        depth /= (what->flags & LAYERED) != 0 ? 1 : 2;
    }
    return bytes;
}

HOOK(cuArray3DCreate_v2, CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *what)
{
    uint64_t size = array_bytes(what, 1);
    ALLOCATE(array, size, VENDOR(cuArray3DCreate_v2, array, what), CUDA_ERROR_OUT_OF_MEMORY);
}

HOOK(cuArrayCreate_v2, CUarray *array, const CUDA_ARRAY_DESCRIPTOR *what)
{
    CUDA_ARRAY3D_DESCRIPTOR full = {0};
    if (what)
        full = (CUDA_ARRAY3D_DESCRIPTOR){
            .width = what->width, .height = what->height, .format = what->format, .channels = what->channels};
    uint64_t size = array_bytes(&full, 1);
    ALLOCATE(array, size, VENDOR(cuArrayCreate_v2, array, what), CUDA_ERROR_OUT_OF_MEMORY);
}

HOOK(cuMipmappedArrayCreate, CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *what, unsigned levels)
{
    uint64_t size = array_bytes(what, levels);
    ALLOCATE(array, size, VENDOR(cuMipmappedArrayCreate, array, what, levels), CUDA_ERROR_OUT_OF_MEMORY);
}

HOOK(cuArrayDestroy, CUarray array)
{
    FORGET((uintptr_t)array, VENDOR(cuArrayDestroy, array));
}

HOOK(cuMipmappedArrayDestroy, CUmipmappedArray array)
{
    FORGET((uintptr_t)array, VENDOR(cuMipmappedArrayDestroy, array));
}

/* ---- pools ---- */

/* The device that a stream belongs to: that of its context, which need not be the current one. */
static bool stream_ordinal(CUstream stream, CUdevice *ordinal)
{
    CUcontext context = NULL, popped;
    bool standard = (uintptr_t)stream <= 2; /* legacy and per-thread default streams */
    if (standard || NEED(cuStreamGetCtx, stream, &context) != CUDA_SUCCESS || !context ||
        context == current_context() || NEED(cuCtxPushCurrent_v2, context) != CUDA_SUCCESS)
        return current_ordinal(ordinal);
    bool found = current_ordinal(ordinal);
    NEED(cuCtxPopCurrent_v2, &popped);
    return found;
}

static CUdevice pool_ordinal(struct limit_session *session, CUmemoryPool handle)
{
    CUdevice ordinal = limit_pool_ordinal(session, &driver, handle);
    int count = 0;
    if (ordinal >= 0)
        return ordinal;
    NEED(cuDeviceGetCount, &count);
    for (CUdevice i = 0; i < count; i++) {
        CUmemoryPool standard = NULL;
        if (NEED(cuDeviceGetDefaultMemPool, &standard, i) == CUDA_SUCCESS && standard == handle)
            return i;
    }
    return current_ordinal(&ordinal) ? ordinal : 0; /* an imported pool, which nobody allocates from */
}

HOOK(cuMemPoolTrimTo, CUmemoryPool pool, size_t keep)
{
    CUresult result = VENDOR(cuMemPoolTrimTo, pool, keep);
    struct limit_session *session = outside() ? limit_session() : NULL;
    if (session)
        limit_settle_pools(&driver, session);
    return result;
}

static CUresult free_async(struct limit_call *call, CUdeviceptr address, CUstream stream);
static CUresult alloc_from(struct limit_call *call, bool named, CUdeviceptr *address, size_t size, CUmemoryPool handle,
                           CUstream stream);

#define VENDOR_ASYNC()                                                                                                 \
    (named ? VENDOR_AS(cuMemAllocFromPoolAsync, call, address, size, handle, stream)                                   \
           : VENDOR_AS(cuMemAllocAsync, call, address, size, stream))

HOOK(cuMemAllocAsync, CUdeviceptr *address, size_t size, CUstream stream)
{
    return alloc_from(&calls[CALL_cuMemAllocAsync], false, address, size, NULL, stream);
}

HOOK(cuMemAllocAsync_ptsz, CUdeviceptr *address, size_t size, CUstream stream)
{
    return alloc_from(&calls[CALL_cuMemAllocAsync_ptsz], false, address, size, NULL, stream);
}

HOOK(cuMemAllocFromPoolAsync, CUdeviceptr *address, size_t size, CUmemoryPool pool, CUstream stream)
{
    return alloc_from(&calls[CALL_cuMemAllocFromPoolAsync], true, address, size, pool, stream);
}

HOOK(cuMemAllocFromPoolAsync_ptsz, CUdeviceptr *address, size_t size, CUmemoryPool pool, CUstream stream)
{
    return alloc_from(&calls[CALL_cuMemAllocFromPoolAsync_ptsz], true, address, size, pool, stream);
}

HOOK(cuMemFreeAsync, CUdeviceptr address, CUstream stream)
{
    return free_async(&calls[CALL_cuMemFreeAsync], address, stream);
}

HOOK(cuMemFreeAsync_ptsz, CUdeviceptr address, CUstream stream)
{
    return free_async(&calls[CALL_cuMemFreeAsync_ptsz], address, stream);
}

static CUresult free_async(struct limit_call *call, CUdeviceptr address, CUstream stream)
{
    FORGET(address, VENDOR_AS(cuMemFreeAsync, call, address, stream));
}

/* Freed again where the driver's pool grew by more than there is room for: it may take more at a time than is asked. */
static CUresult alloc_from(struct limit_call *call, bool named, CUdeviceptr *address, size_t size, CUmemoryPool handle,
                           CUstream stream)
{
    struct limit_session *session = outside() ? limit_session() : NULL;
    if (!outside() || !address || size == 0 || (named && !handle))
        return VENDOR_ASYNC();
    if (!session)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct limit_pool pool = {.driver = &driver, .handle = handle};
    if (named)
        pool.ordinal = pool_ordinal(session, handle);
    else if (!stream_ordinal(stream, &pool.ordinal) ||
             NEED(cuDeviceGetMemPool, &pool.handle, pool.ordinal) != CUDA_SUCCESS)
        return VENDOR_ASYNC();
    if (!limit_pool_begin(session, pool, size))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = VENDOR_ASYNC();
    if (!limit_pool_end(session, pool, result == CUDA_SUCCESS)) {
        VENDOR(cuMemFreeAsync, *address, stream);
        VENDOR(cuMemPoolTrimTo, pool.handle, 0);
        limit_settle_pools(&driver, session);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result == CUDA_SUCCESS)
        limit_remember(&(struct limit_entry){.device = LIMIT_NO_LIMIT, .link = (uint64_t)(uintptr_t)pool.handle},
                       LIMIT_ADDRESS, *address);
    return result;
}

HOOK(cuMemPoolCreate, CUmemoryPool *pool, const CUmemPoolProps *properties)
{
    CUresult result = VENDOR(cuMemPoolCreate, pool, properties);
    if (result == CUDA_SUCCESS && outside()) {
        CUmemLocation where = properties->location;
        struct limit_pool made = {.driver = &driver, .handle = *pool, .ordinal = where.id};
        limit_pool_made(made, where.type == CU_ON_DEVICE ? device_of(where.id) : LIMIT_NO_LIMIT);
    }
    return result;
}

HOOK(cuMemPoolDestroy, CUmemoryPool pool)
{
    struct limit_session *session = outside() ? limit_session() : NULL;
    if (!session)
        return VENDOR(cuMemPoolDestroy, pool);
    pthread_mutex_lock(&session->pools);
    CUresult result = VENDOR(cuMemPoolDestroy, pool);
    if (result == CUDA_SUCCESS)
        limit_pool_gone(session, &driver, pool);
    pthread_mutex_unlock(&session->pools);
    return result;
}

#define MAY_SHRINK(NAME, PARAMETERS, ...)                                                                              \
    HOOK(NAME, PARAMETERS)                                                                                             \
    {                                                                                                                  \
        CUresult result = VENDOR(NAME, __VA_ARGS__);                                                                   \
        if (outside())                                                                                                 \
            limit_pools_may_have_shrunk(&driver);                                                                      \
        return result;                                                                                                 \
    }

MAY_SHRINK(cuStreamSynchronize, CUstream stream, stream)
MAY_SHRINK(cuStreamSynchronize_ptsz, CUstream stream, stream)
MAY_SHRINK(cuEventSynchronize, CUevent event, event)
MAY_SHRINK(cuCtxSynchronize, void, )

/* ---- graphs ---- */

static CUresult instantiated(CUresult result, const CUgraphExec *exec, CUgraph graph)
{
    if (result == CUDA_SUCCESS && outside())
        limit_graph_made(&driver, graph, *exec);
    return result;
}

HOOK(cuGraphInstantiate, CUgraphExec *exec, CUgraph graph, CUgraphNode *node, char *log, size_t size)
{
    return instantiated(VENDOR(cuGraphInstantiate, exec, graph, node, log, size), exec, graph);
}

HOOK(cuGraphInstantiate_v2, CUgraphExec *exec, CUgraph graph, CUgraphNode *node, char *log, size_t size)
{
    return instantiated(VENDOR(cuGraphInstantiate_v2, exec, graph, node, log, size), exec, graph);
}

HOOK(cuGraphInstantiateWithFlags, CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
    return instantiated(VENDOR(cuGraphInstantiateWithFlags, exec, graph, flags), exec, graph);
}

HOOK(cuGraphInstantiateWithParams, CUgraphExec *exec, CUgraph graph, void *parameters)
{
    return instantiated(VENDOR(cuGraphInstantiateWithParams, exec, graph, parameters), exec, graph);
}

HOOK(cuGraphInstantiateWithParams_ptsz, CUgraphExec *exec, CUgraph graph, void *parameters)
{
    return instantiated(VENDOR(cuGraphInstantiateWithParams_ptsz, exec, graph, parameters), exec, graph);
}

static CUresult launch(struct limit_call *call, CUgraphExec exec, CUstream stream)
{
    struct limit_entry entry;
    enum limit_launch kind = limit_graph_begin(&driver, exec, &entry);
    if (kind == LIMIT_REFUSED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = VENDOR_AS(cuGraphLaunch, call, exec, stream);
    if (kind == LIMIT_CHARGED)
        limit_graph_end(&driver, &entry, result == CUDA_SUCCESS);
    return result;
}

HOOK(cuGraphLaunch, CUgraphExec exec, CUstream stream)
{
    return launch(&calls[CALL_cuGraphLaunch], exec, stream);
}

HOOK(cuGraphLaunch_ptsz, CUgraphExec exec, CUstream stream)
{
    return launch(&calls[CALL_cuGraphLaunch_ptsz], exec, stream);
}

HOOK(cuGraphUpload, CUgraphExec exec, CUstream stream)
{
    return launch(&calls[CALL_cuGraphUpload], exec, stream);
}

HOOK(cuGraphUpload_ptsz, CUgraphExec exec, CUstream stream)
{
    return launch(&calls[CALL_cuGraphUpload_ptsz], exec, stream);
}

HOOK(cuGraphExecDestroy, CUgraphExec exec)
{
    struct limit_session *session = outside() ? limit_session() : NULL;
    struct limit_entry entry;
    bool known = session && limit_graph_take(session, exec, &entry);
    CUresult result = VENDOR(cuGraphExecDestroy, exec);
    if (known)
        limit_graph_destroyed(session, &entry, result == CUDA_SUCCESS);
    return result;
}

HOOK(cuDeviceGraphMemTrim, CUdevice ordinal)
{
    CUresult result = VENDOR(cuDeviceGraphMemTrim, ordinal);
    struct limit_session *session = outside() ? limit_session() : NULL;
    if (session)
        limit_settle_pools(&driver, session);
    return result;
}

/* ---- virtual memory ---- */

/* Charged where it will lie, whatever device is current. */
HOOK(cuMemCreate, CUmemHandle *handle, size_t size, const CUmemAllocationProp *properties, unsigned long long flags)
{
    if (!outside() || !handle || !properties || size == 0 || size > SIZE_MAX / 2 ||
        properties->location.type != CU_ON_DEVICE)
        return VENDOR(cuMemCreate, handle, size, properties, flags);
    struct limit_entry entry = {0};
    if (!take_piece(device_of(properties->location.id), (size + GRANULE - 1) / GRANULE * GRANULE, &entry))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = VENDOR(cuMemCreate, handle, size, properties, flags);
    if (result == CUDA_SUCCESS)
        limit_physical_made(&entry, *handle);
    else
        limit_driver_give(&driver, &entry);
    return result;
}

HOOK(cuMemRelease, CUmemHandle handle)
{
    LIMIT_OBJECT(CUresult, VENDOR(cuMemRelease, handle), limit_physical_released(session, handle));
}

HOOK(cuMemMap, CUdeviceptr address, size_t size, size_t offset, CUmemHandle handle, unsigned long long flags)
{
    LIMIT_OBJECT(CUresult, VENDOR(cuMemMap, address, size, offset, handle, flags),
                 limit_mapped(session, address, size, handle));
}

HOOK(cuMemUnmap, CUdeviceptr address, size_t size)
{
    LIMIT_OBJECT(CUresult, VENDOR(cuMemUnmap, address, size), limit_unmapped(session, address, size));
}

HOOK(cuMemRetainAllocationHandle, CUmemHandle *handle, void *address)
{
    LIMIT_OBJECT(CUresult, VENDOR(cuMemRetainAllocationHandle, handle, address),
                 limit_physical_retained(session, (CUdeviceptr)(uintptr_t)address, *handle));
}

/* An exported file keeps the memory, and could bring it back by import. A handle for other nodes cannot be followed. */
HOOK(cuMemExportToShareableHandle, void *shareable, CUmemHandle handle, int type, unsigned long long flags)
{
    enum { FILE_DESCRIPTOR = 1 };
    LIMIT_OBJECT(CUresult, VENDOR(cuMemExportToShareableHandle, shareable, handle, type, flags),
                 limit_physical_exported(session, handle, type == FILE_DESCRIPTOR ? *(int *)shareable : -1));
}

HOOK(cuMemImportFromShareableHandle, CUmemHandle *handle, void *shareable, int type)
{
    enum { FILE_DESCRIPTOR = 1 };
    LIMIT_OBJECT(CUresult, VENDOR(cuMemImportFromShareableHandle, handle, shareable, type),
                 limit_physical_imported(session, *handle, type == FILE_DESCRIPTOR ? (int)(intptr_t)shareable : -1));
}

static void pin_mapped(struct limit_session *session, const CUarrayMapInfo *list, unsigned count)
{
    enum { MAP = 1 };
    for (unsigned i = 0; i < count; i++)
        if (list[i].operation == MAP)
            limit_physical_pinned(session, list[i].handle);
}

/* Parts of a sparse array: when they are unmapped, the array is named, but not the memory. */
HOOK(cuMemMapArrayAsync, CUarrayMapInfo *list, unsigned count, CUstream stream)
{
    LIMIT_OBJECT(CUresult, VENDOR(cuMemMapArrayAsync, list, count, stream), pin_mapped(session, list, count));
}

HOOK(cuMemMapArrayAsync_ptsz, CUarrayMapInfo *list, unsigned count, CUstream stream)
{
    LIMIT_OBJECT(CUresult, VENDOR(cuMemMapArrayAsync_ptsz, list, count, stream), pin_mapped(session, list, count));
}

/* ---- memory of other processes ---- */

typedef struct {
    char bytes[64];
} CUipcMemHandle;

HOOK(cuIpcGetMemHandle, CUipcMemHandle *handle, CUdeviceptr address)
{
    LIMIT_SHARE(CUresult, VENDOR(cuIpcGetMemHandle, handle, address), limit_exported(session));
}

HOOK(cuIpcOpenMemHandle, CUdeviceptr *address, CUipcMemHandle handle, unsigned flags)
{
    LIMIT_SHARE(CUresult, VENDOR(cuIpcOpenMemHandle, address, handle, flags), limit_imported(session));
}

HOOK(cuIpcOpenMemHandle_v2, CUdeviceptr *address, CUipcMemHandle handle, unsigned flags)
{
    LIMIT_SHARE(CUresult, VENDOR(cuIpcOpenMemHandle_v2, address, handle, flags), limit_imported(session));
}

HOOK(cuIpcCloseMemHandle, CUdeviceptr address)
{
    LIMIT_SHARE(CUresult, VENDOR(cuIpcCloseMemHandle, address), limit_import_ended(session));
}

HOOK(cuMemPoolExportToShareableHandle, void *shareable, CUmemoryPool pool, int type, unsigned long long flags)
{
    LIMIT_SHARE(CUresult, VENDOR(cuMemPoolExportToShareableHandle, shareable, pool, type, flags),
                limit_exported(session));
}

/* When an imported pool is destroyed, what was imported from it may still be there: it counts to the end. */
HOOK(cuMemPoolImportFromShareableHandle, CUmemoryPool *pool, void *shareable, int type, unsigned long long flags)
{
    LIMIT_SHARE(CUresult, VENDOR(cuMemPoolImportFromShareableHandle, pool, shareable, type, flags),
                limit_imported(session));
}

/* ---- queries ---- */

HOOK(cuMemGetInfo_v2, size_t *free_bytes, size_t *total)
{
    CUresult result = VENDOR(cuMemGetInfo_v2, free_bytes, total);
    CUdevice ordinal;
    if (result == CUDA_SUCCESS && outside() && free_bytes && total && current_ordinal(&ordinal)) {
        limit_pools_may_have_shrunk(&driver);
        limit_narrow(device_of(ordinal), free_bytes, total);
    }
    return result;
}

HOOK(cuDeviceTotalMem_v2, size_t *bytes, CUdevice ordinal)
{
    CUresult result = VENDOR(cuDeviceTotalMem_v2, bytes, ordinal);
    if (result == CUDA_SUCCESS && outside())
        limit_narrow(device_of(ordinal), NULL, bytes);
    return result;
}

/* ---- the table ---- */

#define ROW_WRAPPED(NAME, SINCE) [CALL_##NAME] = {.name = #NAME, .since = (SINCE), .wrapper = (void *)(NAME)},
#define ROW_NEEDED(NAME) [CALL_##NAME] = {.name = #NAME},
#define ROW_RENAMED(NAME, SINCE, ALIAS, ALIAS_SINCE)                                                                   \
    [CALL_##NAME] = {                                                                                                  \
        .name = #NAME, .since = (SINCE), .alias = #ALIAS, .alias_since = (ALIAS_SINCE), .wrapper = (void *)(NAME)},
static struct limit_call calls[CALLS] = {WRAPPED(ROW_WRAPPED) RENAMED(ROW_RENAMED) NEEDED(ROW_NEEDED)};
static const char *const sonames[] = {"libcuda.so.1", NULL};
struct limit_library limit_cuda = {.sonames = sonames, .calls = calls, .count = CALLS};
