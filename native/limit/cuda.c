/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA driver's memory calls. The runtime library, static or shared, asks the driver for its functions through
 * cuGetProcAddress, so that this one layer covers both.
 *
 * - Contexts: what creates one charges the measured size first; what destroys one gives it back with all that lived in
 *   it.
 * - Memory: reserve, ask the driver, give back where it refuses; freed by address.
 * - Pools are charged with what the driver keeps in them (its own figure), not with what it handed out.
 * - Graphs: the memory of allocation nodes is a pool of the device's, which grows when a graph is launched.
 * - Virtual memory: charged from cuMemCreate until the last handle, mapping and exported file is gone.
 * - Queries answer within the limit.
 *
 * Each entry point is once in the list below; driver_wrappers.h has the wrappers that HIP shares. Host memory and
 * imported memory (which its exporter is charged for) are not charged; launches and copies are not touched.
 */

/* Each wrapper: name, interface version that brought it; another name that means it, and from which version on. */
#define WRAPPED(CALL)                                                                                                  \
    CALL(cuGetProcAddress, 11030)                                                                                      \
    CALL(cuGetProcAddress_v2, 12000)                                                                                   \
    CALL(cuGetExportTable, 3000)                                                                                       \
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
    CALL(cuGreenCtxCreate, 12040)                                                                                      \
    CALL(cuGreenCtxDestroy, 12040)                                                                                     \
    /* memory; the first forms are of 32 bits */                                                                       \
    CALL(cuMemAlloc, 0)                                                                                                \
    CALL(cuMemAlloc_v2, 3020)                                                                                          \
    CALL(cuMemAllocPitch, 0)                                                                                           \
    CALL(cuMemAllocPitch_v2, 3020)                                                                                     \
    CALL(cuMemAllocManaged, 6000)                                                                                      \
    CALL(cuMemFree_v2, 3020)                                                                                           \
    CALL(cuMemPrefetchAsync, 8000)                                                                                     \
    CALL(cuMemPrefetchAsync_ptsz, 8000)                                                                                \
    CALL(cuMemPrefetchAsync_v2, 12020)                                                                                 \
    CALL(cuMemPrefetchAsync_v2_ptsz, 12020)                                                                            \
    CALL(cuMemPrefetchBatchAsync, 13000)                                                                               \
    CALL(cuMemPrefetchBatchAsync_ptsz, 13000)                                                                          \
    CALL(cuMemDiscardAndPrefetchBatchAsync, 13000)                                                                     \
    CALL(cuMemDiscardAndPrefetchBatchAsync_ptsz, 13000)                                                                \
    CALL(cuMemAdvise, 8000)                                                                                            \
    CALL(cuMemAdvise_v2, 12020)                                                                                        \
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
    CALL(cuMemGetDefaultMemPool, 13000)                                                                                \
    CALL(cuMemGetMemPool, 13000)                                                                                       \
    CALL(cuMemPoolDestroy, 11020)                                                                                      \
    CALL(cuMemPoolTrimTo, 11020)                                                                                       \
    CALL(cuStreamSynchronize, 2000)                                                                                    \
    CALL(cuStreamSynchronize_ptsz, 2000)                                                                               \
    CALL(cuEventSynchronize, 2000)                                                                                     \
    CALL(cuCtxSynchronize, 2000)                                                                                       \
    /* graphs */                                                                                                       \
    CALL(cuGraphInstantiate, 10000)                                                                                    \
    CALL(cuGraphInstantiate_v2, 11000)                                                                                 \
    CALL(cuGraphInstantiateWithFlags, 11040, "cuGraphInstantiate", 12000)                                              \
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

#define NEEDED(CALL)                                                                                                   \
    CALL(cuDeviceGetUuid, unsigned char *, int)                                                                        \
    CALL(cuDeviceGetUuid_v2, unsigned char *, int)                                                                     \
    CALL(cuDeviceGetPCIBusId, char *, int, int)                                                                        \
    CALL(cuDeviceGetCount, int *)                                                                                      \
    CALL(cuCtxGetDevice, int *)                                                                                        \
    CALL(cuCtxGetCurrent, void **)                                                                                     \
    CALL(cuCtxFromGreenCtx, void **, void *)                                                                           \
    CALL(cuCtxPushCurrent_v2, void *)                                                                                  \
    CALL(cuCtxPopCurrent_v2, void **)                                                                                  \
    CALL(cuCtxGetLimit, size_t *, int)                                                                                 \
    CALL(cuDevicePrimaryCtxGetState, int, unsigned *, int *)                                                           \
    CALL(cuStreamGetCtx, void *, void **)                                                                              \
    CALL(cuDeviceGetMemPool, void **, int)                                                                             \
    CALL(cuDeviceGetDefaultMemPool, void **, int)                                                                      \
    CALL(cuMemPoolGetAttribute, void *, int, void *)                                                                   \
    CALL(cuDeviceGetGraphMemAttribute, int, int, void *)                                                               \
    CALL(cuGraphGetNodes, void *, void **, size_t *)                                                                   \
    CALL(cuGraphNodeGetType, void *, int *)                                                                            \
    CALL(cuGraphChildGraphNodeGetGraph, void *, void **)                                                               \
    CALL(cuGraphMemAllocNodeGetParams, void *, struct allocation_node *)                                               \
    CALL(cuMemGetAddressRange_v2, device_address *, size_t *, device_address)

#define API(NAME) cu##NAME
#define MALLOC_MANAGED cuMemAllocManaged
#define FREE cuMemFree_v2
#define MALLOC_ASYNC cuMemAllocAsync
#define MALLOC_FROM_POOL_ASYNC cuMemAllocFromPoolAsync
#define FREE_ASYNC cuMemFreeAsync
#define GET_DEVICE_COUNT cuDeviceGetCount
#define GET_ADDRESS_RANGE cuMemGetAddressRange_v2
#define LIBRARY limit_cuda
#define ORDINALS LIMIT_CUDA
enum { GRANULE = 2 << 20, POOL_STEP = 32 << 20 }; /* the latter measured on an H200, driver 580.159.04 */

#include "driver_wrappers.h"

#include <string.h>

/* Others are of their types. */
HOOK(cuCtxDestroy_v2, void *);
HOOK(cuDevicePrimaryCtxRelease_v2, int);
HOOK(cuMemPrefetchBatchAsync, device_address *, size_t *, size_t, struct location *, size_t *, size_t,
     unsigned long long, void *);

/* ---- devices ---- */

static bool identify(int ordinal, int *device)
{
    unsigned char uuid[16];
    char pci[32] = "";
    bool named =
        VENDOR(cuDeviceGetUuid_v2, uuid, ordinal) == SUCCESS || VENDOR(cuDeviceGetUuid, uuid, ordinal) == SUCCESS;
    VENDOR(cuDeviceGetPCIBusId, pci, (int)sizeof pci, ordinal);
    if (!named && !*pci)
        return false;
    *device = limit_device(named ? uuid : NULL, *pci ? pci : NULL, NULL);
    return true;
}

/* -1: the calling thread has no context, and the driver says so. */
static int current_ordinal(void)
{
    int ordinal;
    return VENDOR(cuCtxGetDevice, &ordinal) == SUCCESS ? ordinal : -1;
}

static void *current_context(void)
{
    void *context = NULL;
    VENDOR(cuCtxGetCurrent, &context);
    return context;
}

static bool enter(int *ordinal)
{
    *ordinal = limit_outside() ? current_ordinal() : -1;
    return true; /* a context was charged when it was created */
}

static const void *owner_of(int ordinal)
{
    (void)ordinal;
    return current_context();
}

static int stream_ordinal(void *stream, int current)
{
    void *context = NULL, *popped;
    if (VENDOR(cuStreamGetCtx, stream, &context) != SUCCESS || !context || context == current_context() ||
        VENDOR(cuCtxPushCurrent_v2, context) != SUCCESS)
        return current;
    int ordinal = current_ordinal();
    VENDOR(cuCtxPopCurrent_v2, &popped);
    return ordinal;
}

/* ---- look-up ---- */

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
        if (!limit_outside())                                                                                          \
            return CREATE;                                                                                             \
        int device = device_of(ORDINAL);                                                                               \
        if (!limit_driver_open_context(&driver, device))                                                               \
            return OUT_OF_MEMORY;                                                                                      \
        int result = CREATE;                                                                                           \
        if (result == SUCCESS)                                                                                         \
            limit_remember(&(struct limit_entry){.device = device}, LIMIT_CONTEXT, (uint64_t)(uintptr_t) * (CONTEXT)); \
        else                                                                                                           \
            limit_close_context(device);                                                                               \
        return result;                                                                                                 \
    } while (0)

HOOK(cuCtxCreate, void **context, unsigned flags, int ordinal)
{
    NEW_CONTEXT(ordinal, context, VENDOR(cuCtxCreate, context, flags, ordinal));
}

HOOK(cuCtxCreate_v2, void **context, unsigned flags, int ordinal)
{
    NEW_CONTEXT(ordinal, context, VENDOR(cuCtxCreate_v2, context, flags, ordinal));
}

HOOK(cuCtxCreate_v3, void **context, void *affinity, int count, unsigned flags, int ordinal)
{
    NEW_CONTEXT(ordinal, context, VENDOR(cuCtxCreate_v3, context, affinity, count, flags, ordinal));
}

HOOK(cuCtxCreate_v4, void **context, void *parameters, unsigned flags, int ordinal)
{
    NEW_CONTEXT(ordinal, context, VENDOR(cuCtxCreate_v4, context, parameters, flags, ordinal));
}

/*
 * Of the driver's tables of unnamed functions, the one that creates contexts: a copy with the function that charges for
 * them. The runtime library takes the addresses of its own tables into account, and none of those allocates.
 */
typedef int create_function(void **context, unsigned flags, int ordinal);
static _Atomic(create_function *) unnamed_create;

static int create_unnamed(void **context, unsigned flags, int ordinal)
{
    create_function *create = atomic_load(&unnamed_create);
    NEW_CONTEXT(ordinal, context, LIMIT_IN(create(context, flags, ordinal)));
}

HOOK(cuGetExportTable, const void **table, const unsigned char *id)
{
    static const unsigned char creates[16] = {0x0c, 0xa5, 0x0b, 0x8c, 0x10, 0x04, 0x92, 0x9a,
                                              0x89, 0xa7, 0xd0, 0xdf, 0x10, 0xe7, 0x72, 0x86};
    enum { CREATE = 1, MOST = 64 }; /* places; the first one has the size of all in bytes */
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static union {
        size_t bytes;
        create_function *function;
    } limited[MOST];
    int result = VENDOR(cuGetExportTable, table, id);
    if (result != SUCCESS || !limit_outside() || memcmp(id, creates, sizeof creates) != 0)
        return result;
    size_t bytes = *(const size_t *)*table;
    if (bytes < (CREATE + 1) * sizeof *limited)
        return result; /* it has no such function */
    if (bytes > sizeof limited) {
        *table = NULL;
        return NOT_SUPPORTED;
    }
    pthread_mutex_lock(&lock);
    if (limited[0].bytes == 0) {
        memcpy(limited, *table, bytes);
        atomic_store(&unnamed_create, limited[CREATE].function);
        limited[CREATE].function = create_unnamed;
    }
    pthread_mutex_unlock(&lock);
    *table = limited;
    return result;
}

static void end_context(struct limit_session *session, int device, void *context)
{
    limit_drop_owner(&driver, session, context);
    limit_settle_pools(&driver, session); /* what pools and graphs had is gone with it */
    limit_close_context(device);
}

static int destroy_context(struct limit_call *call, void *context)
{
    struct limit_session *session = limit_program_session();
    struct limit_entry entry;
    bool known = session && limit_table_take(&session->table, LIMIT_CONTEXT, (uint64_t)(uintptr_t)context, &entry);
    int result = VENDOR_AS(cuCtxDestroy_v2, call, context);
    if (known && result == SUCCESS)
        end_context(session, entry.device, context);
    else if (known)
        limit_table_put(&session->table, &entry);
    return result;
}

HOOK(cuCtxDestroy, void *context)
{
    return destroy_context(CALL_OF(cuCtxDestroy), context);
}

HOOK(cuCtxDestroy_v2, void *context)
{
    return destroy_context(CALL_OF(cuCtxDestroy_v2), context);
}

static bool primary_active(int ordinal)
{
    unsigned flags;
    int active = 0;
    return VENDOR(cuDevicePrimaryCtxGetState, ordinal, &flags, &active) == SUCCESS && active;
}

/* RETAIN makes one more use of a device's primary context, which the first one creates; AFTER it succeeded. */
#define RETAIN_PRIMARY(ORDINAL, RETAIN, AFTER)                                                                         \
    do {                                                                                                               \
        struct limit_session *session = limit_program_session();                                                       \
        if (!limit_outside())                                                                                          \
            return RETAIN;                                                                                             \
        int device = device_of(ORDINAL);                                                                               \
        if (device == LIMIT_NO_DEVICE)                                                                                 \
            return RETAIN;                                                                                             \
        if (!session || device == LIMIT_CLOSED)                                                                        \
            return OUT_OF_MEMORY;                                                                                      \
        pthread_mutex_lock(&session->contexts);                                                                        \
        bool first = !primary_active(ORDINAL);                                                                         \
        int result = OUT_OF_MEMORY;                                                                                    \
        if (!first || limit_driver_open_context(&driver, device)) {                                                    \
            result = RETAIN;                                                                                           \
            if (first && result != SUCCESS)                                                                            \
                limit_close_context(device);                                                                           \
            else if (result == SUCCESS)                                                                                \
                AFTER;                                                                                                 \
        }                                                                                                              \
        pthread_mutex_unlock(&session->contexts);                                                                      \
        return result;                                                                                                 \
    } while (0)

HOOK(cuDevicePrimaryCtxRetain, void **context, int ordinal)
{
    RETAIN_PRIMARY(ordinal, VENDOR(cuDevicePrimaryCtxRetain, context, ordinal), session->primary[ordinal] = *context);
}

/* The lock `contexts` is held, and the primary context was active. */
static void may_have_ended(struct limit_session *session, int ordinal)
{
    if (primary_active(ordinal))
        return;
    end_context(session, device_of(ordinal), session->primary[ordinal]);
    session->primary[ordinal] = NULL;
}

static int end_primary(struct limit_call *call, int ordinal)
{
    struct limit_session *session = limit_program_session();
    if (!session || ordinal < 0 || ordinal >= LIMIT_ORDINALS)
        return VENDOR_AS(cuDevicePrimaryCtxRelease_v2, call, ordinal);
    pthread_mutex_lock(&session->contexts);
    bool active = primary_active(ordinal);
    int result = VENDOR_AS(cuDevicePrimaryCtxRelease_v2, call, ordinal);
    if (active)
        may_have_ended(session, ordinal);
    pthread_mutex_unlock(&session->contexts);
    return result;
}

#define END_PRIMARY(NAME)                                                                                              \
    HOOK(NAME, int ordinal)                                                                                            \
    {                                                                                                                  \
        return end_primary(CALL_OF(NAME), ordinal);                                                                    \
    }

END_PRIMARY(cuDevicePrimaryCtxRelease)
END_PRIMARY(cuDevicePrimaryCtxRelease_v2)
END_PRIMARY(cuDevicePrimaryCtxReset)
END_PRIMARY(cuDevicePrimaryCtxReset_v2)

/* A green context is a part of the primary one, which it keeps. */
static void green_made(void *green, int ordinal)
{
    struct limit_entry entry = {.device = ordinal};
    void *context = NULL;
    if (VENDOR(cuCtxFromGreenCtx, &context, green) == SUCCESS)
        entry.owner = context;
    limit_remember(&entry, LIMIT_GREEN, (uint64_t)(uintptr_t)green);
}

HOOK(cuGreenCtxCreate, void **green, void *resources, int ordinal, unsigned flags)
{
    RETAIN_PRIMARY(ordinal, VENDOR(cuGreenCtxCreate, green, resources, ordinal, flags), green_made(*green, ordinal));
}

HOOK(cuGreenCtxDestroy, void *green)
{
    struct limit_session *session = limit_program_session();
    struct limit_entry entry;
    if (!session || !limit_table_take(&session->table, LIMIT_GREEN, (uint64_t)(uintptr_t)green, &entry))
        return VENDOR(cuGreenCtxDestroy, green);
    pthread_mutex_lock(&session->contexts);
    bool active = primary_active(entry.device);
    int result = VENDOR(cuGreenCtxDestroy, green);
    if (active && !primary_active(entry.device))
        limit_drop_owner(&driver, session, entry.owner); /* allocated while it was current */
    if (active)
        may_have_ended(session, entry.device);
    if (result != SUCCESS)
        limit_table_put(&session->table, &entry);
    pthread_mutex_unlock(&session->contexts);
    return result;
}

/* The heap and the print buffer of kernels are device memory, too; their first sizes are part of the context. */
HOOK(cuCtxSetLimit, int which, size_t value)
{
    enum { PRINT_BUFFER = 1, HEAP = 2 };
    struct limit_session *session = limit_program_session();
    int ordinal = session && (which == PRINT_BUFFER || which == HEAP) ? current_ordinal() : -1;
    size_t before;
    if (ordinal < 0 || VENDOR(cuCtxGetLimit, &before, which) != SUCCESS)
        return VENDOR(cuCtxSetLimit, which, value);
    void *context = current_context();
    struct limit_entry entry, more;
    uint64_t key = (uint64_t)(uintptr_t)context * 4 + (unsigned)which;
    if (!limit_table_take(&session->table, LIMIT_HEAP, key, &entry))
        entry = (struct limit_entry){.device = device_of(ordinal), .owner = context};
    uint64_t grown = (value > before ? value - before : 0) + GRANULE - 1;
    grown -= grown % GRANULE;
    int result = OUT_OF_MEMORY;
    if (grown == 0 || limit_driver_take(&driver, entry.device, grown, &more)) {
        result = VENDOR(cuCtxSetLimit, which, value);
        uint64_t less = result != SUCCESS ? grown : value < before ? (before - value) / GRANULE * GRANULE : 0;
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

HOOK(cuMemAlloc_v2, device_address *address, size_t size)
{
    ALLOCATE(address, size, VENDOR(cuMemAlloc_v2, address, size), spill(address, size, ordinal));
}

HOOK(cuMemAllocManaged, device_address *address, size_t size, unsigned flags)
{
    ALLOCATE(address, size, VENDOR(cuMemAllocManaged, address, size, flags), spill(address, size, ordinal));
}

/* Rows are padded to the driver's pitch, which is known afterwards only: 512 bytes, or else the difference is
 * charged. */
HOOK(cuMemAllocPitch_v2, device_address *address, size_t *pitch, size_t width, size_t height, unsigned element)
{
    enum { PITCH = 512 };
    size_t size = 0, padded = width <= SIZE_MAX - PITCH ? (width + PITCH - 1) / PITCH * PITCH : 0;
    if (!pitch || __builtin_mul_overflow(padded, height, &size))
        size = 0;
    ALLOCATE(address, size, VENDOR(cuMemAllocPitch_v2, address, pitch, width, height, element), OUT_OF_MEMORY);
}

/* Their addresses have 32 bits: to a program of 64 bits they are of use only as a way around the limit. */
#define TOO_OLD(NAME)                                                                                                  \
    HOOK(NAME, void)                                                                                                   \
    {                                                                                                                  \
        return NOT_SUPPORTED;                                                                                          \
    }

TOO_OLD(cuMemAlloc)
TOO_OLD(cuMemAllocPitch)
TOO_OLD(cuArrayCreate)
TOO_OLD(cuArray3DCreate)

HOOK(cuMemFree_v2, device_address address)
{
    FORGET(address, VENDOR(cuMemFree_v2, address));
}

HOOK(cuMemPrefetchAsync_ptsz, device_address address, size_t size, int ordinal, void *stream)
{
    return prefetch(CALL_OF(cuMemPrefetchAsync_ptsz), address, size, ordinal, stream);
}

HOOK(cuMemPrefetchAsync_v2_ptsz, device_address address, size_t size, struct location to, unsigned flags, void *stream)
{
    return prefetch_to(CALL_OF(cuMemPrefetchAsync_v2_ptsz), address, size, to, flags, stream);
}

/* Of a batch with such memory in it, nothing is moved: hints, as is that contents are not needed. */
static int prefetch_batch(struct limit_call *call, device_address *addresses, size_t *sizes, size_t count,
                          struct location *to, size_t *firsts, size_t locations, unsigned long long flags, void *stream)
{
    for (size_t i = 0; addresses && i < count; i++)
        if (is_spilled(addresses[i]))
            return SUCCESS;
    return VENDOR_AS(cuMemPrefetchBatchAsync, call, addresses, sizes, count, to, firsts, locations, flags, stream);
}

#define PREFETCH_BATCH(NAME)                                                                                           \
    HOOK(NAME, device_address *addresses, size_t *sizes, size_t count, struct location *to, size_t *firsts,            \
         size_t locations, unsigned long long flags, void *stream)                                                     \
    {                                                                                                                  \
        return prefetch_batch(CALL_OF(NAME), addresses, sizes, count, to, firsts, locations, flags, stream);           \
    }

PREFETCH_BATCH(cuMemPrefetchBatchAsync)
PREFETCH_BATCH(cuMemPrefetchBatchAsync_ptsz)
PREFETCH_BATCH(cuMemDiscardAndPrefetchBatchAsync)
PREFETCH_BATCH(cuMemDiscardAndPrefetchBatchAsync_ptsz)

/* ---- arrays ---- */

static uint64_t array_bytes(const struct array_3d *what, unsigned levels)
{
    enum { SPARSE = 0x40, DEFERRED = 0x80 };
    bool without_memory = what && (what->flags & (SPARSE | DEFERRED)) != 0;
    return without_memory ? 0 : limit_array_3d_bytes(what, levels);
}

HOOK(cuArrayCreate_v2, void **array, const struct array_2d *what)
{
    uint64_t size = limit_array_2d_bytes(what);
    ALLOCATE(array, size, VENDOR(cuArrayCreate_v2, array, what), OUT_OF_MEMORY);
}

HOOK(cuArray3DCreate_v2, void **array, const struct array_3d *what)
{
    uint64_t size = array_bytes(what, 1);
    ALLOCATE(array, size, VENDOR(cuArray3DCreate_v2, array, what), OUT_OF_MEMORY);
}

HOOK(cuMipmappedArrayCreate, void **array, const struct array_3d *what, unsigned levels)
{
    uint64_t size = array_bytes(what, levels);
    ALLOCATE(array, size, VENDOR(cuMipmappedArrayCreate, array, what, levels), OUT_OF_MEMORY);
}

HOOK(cuArrayDestroy, void *array)
{
    FORGET(array, VENDOR(cuArrayDestroy, array));
}

HOOK(cuMipmappedArrayDestroy, void *array)
{
    FORGET(array, VENDOR(cuMipmappedArrayDestroy, array));
}

/* ---- pools ---- */

FROM_STREAM(cuMemAllocAsync)
FROM_STREAM(cuMemAllocAsync_ptsz)
FROM_POOL(cuMemAllocFromPoolAsync)
FROM_POOL(cuMemAllocFromPoolAsync_ptsz)
FREED_IN_STREAM(cuMemFreeAsync)
FREED_IN_STREAM(cuMemFreeAsync_ptsz)
MAY_SHRINK(cuStreamSynchronize_ptsz, void *stream, stream)
MAY_SHRINK(cuCtxSynchronize, void, )

/* ---- graphs ---- */

HOOK(cuGraphInstantiate_v2, void **exec, void *graph, void **node, char *log, size_t size)
{
    return instantiated(VENDOR(cuGraphInstantiate_v2, exec, graph, node, log, size), exec, graph);
}

HOOK(cuGraphInstantiateWithParams_ptsz, void **exec, void *graph, void *parameters)
{
    return instantiated(VENDOR(cuGraphInstantiateWithParams_ptsz, exec, graph, parameters), exec, graph);
}

#define LAUNCH(NAME)                                                                                                   \
    HOOK(NAME, void *executable, void *stream)                                                                         \
    {                                                                                                                  \
        return launch(CALL_OF(NAME), executable, stream);                                                              \
    }

LAUNCH(cuGraphLaunch)
LAUNCH(cuGraphLaunch_ptsz)
LAUNCH(cuGraphUpload)
LAUNCH(cuGraphUpload_ptsz)

/* ---- virtual memory ---- */

struct array_mapping { /* CUarrayMapInfo: a part of a sparse array */
    int resource_type;
    void *resource;
    int subresource_type;
    uint64_t subresource[4];
    int operation, handle_type;
    memory_handle handle;
    unsigned long long offset;
    unsigned devices, flags, reserved[2];
};

static void pin_mapped(struct limit_session *session, const struct array_mapping *list, unsigned count)
{
    enum { MAP = 1 };
    for (unsigned i = 0; i < count; i++)
        if (list[i].operation == MAP)
            limit_physical_pinned(session, list[i].handle);
}

/* Parts of a sparse array: when they are unmapped, the array is named, but not the memory. */
HOOK(cuMemMapArrayAsync, struct array_mapping *list, unsigned count, void *stream)
{
    WITH_OBJECTS(VENDOR(cuMemMapArrayAsync, list, count, stream), pin_mapped(session, list, count));
}

HOOK(cuMemMapArrayAsync_ptsz, struct array_mapping *list, unsigned count, void *stream)
{
    WITH_OBJECTS(VENDOR(cuMemMapArrayAsync_ptsz, list, count, stream), pin_mapped(session, list, count));
}

/* ---- memory of other processes ---- */

HOOK(cuIpcOpenMemHandle_v2, device_address *address, struct ipc_memory handle, unsigned flags)
{
    return shared(VENDOR(cuIpcOpenMemHandle_v2, address, handle, flags), limit_imported);
}

/* ---- queries ---- */

HOOK(cuMemGetInfo_v2, size_t *free_bytes, size_t *total)
{
    int result = VENDOR(cuMemGetInfo_v2, free_bytes, total);
    int ordinal = result == SUCCESS && limit_outside() && free_bytes && total ? current_ordinal() : -1;
    if (ordinal >= 0) {
        limit_pools_may_have_shrunk(&driver);
        limit_narrow(device_of(ordinal), free_bytes, total);
    }
    return result;
}

HOOK(cuDeviceTotalMem_v2, size_t *bytes, int ordinal)
{
    int result = VENDOR(cuDeviceTotalMem_v2, bytes, ordinal);
    if (result == SUCCESS && limit_outside())
        limit_narrow(device_of(ordinal), NULL, bytes);
    return result;
}

/* ---- the table ---- */

static struct limit_call calls[CALLS] = {WRAPPED(LIMIT_ROW) NEEDED(LIMIT_ROW_NEEDED)};
static const char *const sonames[] = {"libcuda.so.1", NULL};
struct limit_library limit_cuda = {.sonames = sonames, .calls = calls, .count = CALLS};
