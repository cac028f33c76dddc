/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The wrappers that CUDA's driver and HIP's runtime share: functions with the same parameters and meaning under other
 * names. cuda.c and hip.c include this file once each, after they define their dialect:
 *
 *   API(NAME)          a function whose name differs in the prefix only
 *   MALLOC_MANAGED, FREE, MALLOC_ASYNC, MALLOC_FROM_POOL_ASYNC, FREE_ASYNC, GET_DEVICE_COUNT, GET_ADDRESS_RANGE
 *                      functions whose names differ more
 *   LIBRARY            its limit_library
 *   ORDINALS           its row of limit_session's ordinals
 *   GRANULE            bytes of a page of device memory
 *   WRAPPED, NEEDED    its lists of calls (hook.h)
 *
 * Allocation, contexts and queries differ in more than names, and are in cuda.c and hip.c.
 */
#ifndef SLUICE_LIMIT_DRIVER_WRAPPERS_H
#define SLUICE_LIMIT_DRIVER_WRAPPERS_H

#include "driver.h"
#include "driver_abi.h"
#include "hook.h"

enum { WRAPPED(LIMIT_NUMBER) NEEDED(LIMIT_NUMBER) CALLS };
static struct limit_call calls[CALLS];

#define HOOK(NAME, ...) LIMIT_EXPORT int NAME(__VA_ARGS__)

/* Called, or used as a type, before they are defined. */
NEEDED(LIMIT_DECLARE)
HOOK(MALLOC_MANAGED, device_address *, size_t, unsigned);
HOOK(FREE, device_address);
HOOK(API(MemAdvise), device_address, size_t, int, int);
HOOK(API(MemPrefetchAsync), device_address, size_t, int, void *);
HOOK(API(MemPrefetchAsync_v2), device_address, size_t, struct location, unsigned, void *);
HOOK(MALLOC_ASYNC, device_address *, size_t, void *);
HOOK(MALLOC_FROM_POOL_ASYNC, device_address *, size_t, void *, void *);
HOOK(API(MemPoolTrimTo), void *, size_t);
HOOK(API(DeviceGraphMemTrim), int);
HOOK(FREE_ASYNC, device_address, void *);
HOOK(API(GraphLaunch), void *, void *);

/* ---- what cuda.c and hip.c define ---- */

/* The ledger's device of a valid ordinal; false: the driver does not say which it is. */
static bool identify(int ordinal, int *device);
/* The calling thread's device; -1: the driver does not say, or calls us itself. False: no room for its context. */
static bool enter(int *ordinal);
/* What the memory of the current device belongs to: it is freed with it. */
static const void *owner_of(int ordinal);
/* The device of a stream that is not a default one, which need not be the current device; -1: not known. */
static int stream_ordinal(void *stream, int current);

/* ---- the vendor's functions ---- */

static int absent(void)
{
    return NOT_INITIALIZED;
}

static limit_function *function_of(struct limit_call *call)
{
    return limit_function_of(&LIBRARY, call, (limit_function *)absent);
}

#define NUMBER_OF(NAME) CALL_##NAME
#define CALL_OF(NAME) (&calls[NUMBER_OF(NAME)])
/* Call the vendor's function; `LIKE` is one of the same type. */
#define VENDOR_AS(LIKE, CALL, ...) LIMIT_IN(((__typeof__(&LIKE))function_of(CALL))(__VA_ARGS__))
#define VENDOR(NAME, ...) VENDOR_AS(NAME, CALL_OF(NAME), __VA_ARGS__)

static int device_of(int ordinal)
{
    struct limit_session *session = limit_session();
    int count = 0, found;
    if (!session)
        return LIMIT_CLOSED;
    atomic_schar *kept = ordinal >= 0 && ordinal < LIMIT_ORDINALS ? &session->ordinals[ORDINALS][ordinal] : NULL;
    int known = kept ? atomic_load_explicit(kept, memory_order_relaxed) : 0;
    if (known != 0)
        return known - 3;
    if (VENDOR(GET_DEVICE_COUNT, &count) != SUCCESS || ordinal < 0 || ordinal >= count)
        return LIMIT_NO_DEVICE;
    if (!kept || !identify(ordinal, &found))
        return LIMIT_CLOSED;
    atomic_store_explicit(kept, (signed char)(found + 3), memory_order_relaxed);
    return found;
}

enum { PER_THREAD = 2 }; /* a flag of look-ups: the default stream is the thread's own */

static int replaced(int result, const char *symbol, void **function, int version, uint64_t flags)
{
    if (result == SUCCESS && symbol && function && *function && limit_outside()) {
        struct limit_call *call = limit_find_form(&LIBRARY, symbol, version, (flags & PER_THREAD) != 0, *function);
        *function = call ? limit_replace(call, *function) : *function;
    }
    return result;
}

/* The device that memory of a type at a location is charged to: the current one where the location does not say, or is
 * not known here. -1: it is the host's. */
static int ordinal_at(struct location where, int type)
{
    enum { DEVICE_OF_DOMAIN = 0xff };
    int current = -1;
    if (where.type == ON_DEVICE)
        return where.id;
    if (where.type == IN_DOMAIN)
        return where.id & DEVICE_OF_DOMAIN;
    if (where.type >= ON_HOST && where.type <= ON_THIS_HOST_NODE && type != MANAGED_MEMORY)
        return -1;
    return enter(&current) && current >= 0 ? current : 0;
}

/* ---- what driver.c asks ---- */

static bool pool_attribute(void *pool, int attribute, uint64_t *value)
{
    return VENDOR(API(MemPoolGetAttribute), pool, attribute, value) == SUCCESS;
}

static bool graph_attribute(int ordinal, int attribute, uint64_t *value)
{
    return VENDOR(API(DeviceGetGraphMemAttribute), ordinal, attribute, value) == SUCCESS;
}

static void trim_pool(void *pool)
{
    VENDOR(API(MemPoolTrimTo), pool, 0);
}

static void trim_graphs(int ordinal)
{
    VENDOR(API(DeviceGraphMemTrim), ordinal);
}

static bool graph_nodes(void *graph, void **nodes, size_t *count)
{
    return VENDOR(API(GraphGetNodes), graph, nodes, count) == SUCCESS;
}

static bool node_is(void *node, int type)
{
    int found;
    return VENDOR(API(GraphNodeGetType), node, &found) == SUCCESS && found == type;
}

static bool node_memory(void *node, int *ordinal, uint64_t *bytes)
{
    enum { MEM_ALLOC = 10 };
    struct allocation_node parameters = {0};
    if (!node_is(node, MEM_ALLOC) || VENDOR(API(GraphMemAllocNodeGetParams), node, &parameters) != SUCCESS)
        return false;
    *ordinal = ordinal_at(parameters.pool.location, parameters.pool.type);
    *bytes = parameters.bytes;
    return *ordinal >= 0;
}

static bool node_graph(void *node, void **graph)
{
    enum { GRAPH = 4 };
    return node_is(node, GRAPH) && VENDOR(API(GraphChildGraphNodeGetGraph), node, graph) == SUCCESS;
}

static const struct limit_driver driver = {
    .granule = GRANULE,
    .pool_step = POOL_STEP,
    .device = device_of,
    .pool_attribute = pool_attribute,
    .graph_attribute = graph_attribute,
    .trim_pool = trim_pool,
    .trim_graphs = trim_graphs,
    .graph_nodes = graph_nodes,
    .node_memory = node_memory,
    .node_graph = node_graph,
};

/* ---- memory ---- */

/* ALLOCATION gets SIZE bytes on the current device at *ADDRESS; OTHERWISE is tried where the limit refuses them. */
#define ALLOCATE(ADDRESS, SIZE, ALLOCATION, OTHERWISE)                                                                 \
    do {                                                                                                               \
        int ordinal;                                                                                                   \
        if (!enter(&ordinal))                                                                                          \
            return OUT_OF_MEMORY;                                                                                      \
        if (ordinal < 0 || !(ADDRESS) || (SIZE) == 0)                                                                  \
            return ALLOCATION; /* the driver itself refuses it */                                                      \
        struct limit_entry entry = {.owner = owner_of(ordinal)};                                                       \
        if (!limit_driver_take(&driver, device_of(ordinal), SIZE, &entry))                                             \
            return OTHERWISE;                                                                                          \
        int result = ALLOCATION;                                                                                       \
        if (result == SUCCESS)                                                                                         \
            limit_remember(&entry, LIMIT_ADDRESS, (uint64_t) * (ADDRESS));                                             \
        else                                                                                                           \
            limit_driver_give(&driver, &entry);                                                                        \
        return result;                                                                                                 \
    } while (0)

/* FREEING frees what is known as KEY. Forgotten before, as another thread may get the same address right afterwards. */
#define FORGET(KEY, FREEING)                                                                                           \
    do {                                                                                                               \
        struct limit_session *session = limit_program_session();                                                       \
        struct limit_entry entry;                                                                                      \
        bool known = session && limit_table_take(&session->table, LIMIT_ADDRESS, (uint64_t)(KEY), &entry);             \
        int result = FREEING;                                                                                          \
        if (known && result == SUCCESS)                                                                                \
            limit_freed(&driver, session, &entry);                                                                     \
        else if (known)                                                                                                \
            limit_table_put(&session->table, &entry);                                                                  \
        else if (session && atomic_load_explicit(&session->graphs, memory_order_relaxed) != 0)                         \
            limit_graph_memory_freed(&driver, session);                                                                \
        return result;                                                                                                 \
    } while (0)

static int spilled(device_address *address, size_t size, int ordinal)
{
    enum { GLOBAL = 1, PREFERRED_LOCATION = 3, ACCESSED_BY = 5, HOST = -1 };
    int result = VENDOR(MALLOC_MANAGED, address, size, GLOBAL);
    if (result != SUCCESS)
        return result;
    if (VENDOR(API(MemAdvise), *address, size, PREFERRED_LOCATION, HOST) == SUCCESS &&
        VENDOR(API(MemAdvise), *address, size, ACCESSED_BY, ordinal) == SUCCESS)
        return SUCCESS;
    VENDOR(FREE, *address);
    return OUT_OF_MEMORY;
}

/* In host memory that the device reaches: where policy allows more than the limit. */
static int spill(device_address *address, size_t size, int ordinal)
{
    struct limit_session *session = limit_session();
    struct limit_entry entry = {.device = device_of(ordinal),
                                .owner = owner_of(ordinal),
                                .bytes = (size + GRANULE - 1) / GRANULE * GRANULE,
                                .spilled = true};
    if (!session || !limit_take_spill(entry.device, entry.bytes))
        return OUT_OF_MEMORY;
    atomic_fetch_add(&session->spills, 1);
    int result = spilled(address, size, ordinal);
    if (result == SUCCESS) {
        limit_remember(&entry, LIMIT_ADDRESS, *address);
    } else {
        limit_give_spill(entry.device, entry.bytes);
        atomic_fetch_sub(&session->spills, 1);
    }
    return result;
}

static bool is_spilled(device_address address)
{
    struct limit_session *session = limit_program_session();
    struct limit_entry entry;
    device_address base;
    size_t size;
    return session && atomic_load_explicit(&session->spills, memory_order_relaxed) != 0 &&
           VENDOR(GET_ADDRESS_RANGE, &base, &size, address) == SUCCESS &&
           limit_table_get(&session->table, LIMIT_ADDRESS, base, &entry) && entry.spilled;
}

/* What was spilled stays on the host: a request to move it is only a hint. */
static int prefetch(struct limit_call *call, device_address address, size_t size, int ordinal, void *stream)
{
    return ordinal >= 0 && is_spilled(address) ? SUCCESS
                                               : VENDOR_AS(API(MemPrefetchAsync), call, address, size, ordinal, stream);
}

HOOK(API(MemPrefetchAsync), device_address address, size_t size, int ordinal, void *stream)
{
    return prefetch(CALL_OF(API(MemPrefetchAsync)), address, size, ordinal, stream);
}

static int prefetch_to(struct limit_call *call, device_address address, size_t size, struct location to, unsigned flags,
                       void *stream)
{
    return is_spilled(address) && ordinal_at(to, 0) >= 0
               ? SUCCESS
               : VENDOR_AS(API(MemPrefetchAsync_v2), call, address, size, to, flags, stream);
}

HOOK(API(MemPrefetchAsync_v2), device_address address, size_t size, struct location to, unsigned flags, void *stream)
{
    return prefetch_to(CALL_OF(API(MemPrefetchAsync_v2)), address, size, to, flags, stream);
}

static bool moves(int advice)
{
    enum { SET_PREFERRED_LOCATION = 3, UNSET_PREFERRED_LOCATION = 4 };
    return advice == SET_PREFERRED_LOCATION || advice == UNSET_PREFERRED_LOCATION;
}

HOOK(API(MemAdvise), device_address address, size_t size, int advice, int ordinal)
{
    return moves(advice) && is_spilled(address) ? SUCCESS : VENDOR(API(MemAdvise), address, size, advice, ordinal);
}

HOOK(API(MemAdvise_v2), device_address address, size_t size, int advice, struct location to)
{
    return moves(advice) && is_spilled(address) ? SUCCESS : VENDOR(API(MemAdvise_v2), address, size, advice, to);
}

/* ---- pools ---- */

static int pool_ordinal(struct limit_session *session, void *handle, int current)
{
    int ordinal = limit_pool_ordinal(session, &driver, handle), count = 0;
    if (ordinal >= 0)
        return ordinal;
    VENDOR(GET_DEVICE_COUNT, &count);
    for (int i = 0; i < count; i++) {
        void *standard = NULL;
        if (VENDOR(API(DeviceGetDefaultMemPool), &standard, i) == SUCCESS && standard == handle)
            return i;
    }
    return current >= 0 ? current : 0; /* an imported pool, which nobody allocates from */
}

static int settled(int result)
{
    struct limit_session *session = limit_program_session();
    if (session)
        limit_settle_pools(&driver, session);
    return result;
}

HOOK(API(MemPoolTrimTo), void *pool, size_t keep)
{
    return settled(VENDOR(API(MemPoolTrimTo), pool, keep));
}

#define VENDOR_ASYNC()                                                                                                 \
    (named ? VENDOR_AS(MALLOC_FROM_POOL_ASYNC, call, address, size, handle, stream)                                    \
           : VENDOR_AS(MALLOC_ASYNC, call, address, size, stream))

/* Freed again where the driver's pool grew by more than was charged, and there is no room for it: where its free memory
 * is in pieces that are too small. */
static int alloc_from(struct limit_call *call, bool named, device_address *address, size_t size, void *handle,
                      void *stream)
{
    int current;
    if (!enter(&current))
        return OUT_OF_MEMORY;
    if (!limit_outside() || !address || size == 0 || (named && !handle))
        return VENDOR_ASYNC();
    struct limit_session *session = limit_session();
    if (!session)
        return OUT_OF_MEMORY;
    struct limit_pool pool = {.driver = &driver, .handle = handle};
    bool default_stream = (uintptr_t)stream <= 2; /* legacy or per thread */
    if (named)
        pool.ordinal = pool_ordinal(session, handle, current);
    else
        pool.ordinal = default_stream ? current : stream_ordinal(stream, current);
    if (pool.ordinal < 0 || (!named && VENDOR(API(DeviceGetMemPool), &pool.handle, pool.ordinal) != SUCCESS))
        return VENDOR_ASYNC();
    if (!limit_pool_begin(session, pool, size))
        return OUT_OF_MEMORY;
    int result = VENDOR_ASYNC();
    if (!limit_pool_end(session, pool, result == SUCCESS)) {
        VENDOR(FREE_ASYNC, *address, stream);
        limit_settle_pools(&driver, session);
        return OUT_OF_MEMORY;
    }
    if (result == SUCCESS)
        limit_remember(&(struct limit_entry){.device = LIMIT_NO_LIMIT, .link = (uint64_t)(uintptr_t)pool.handle},
                       LIMIT_ADDRESS, *address);
    return result;
}

#define FROM_STREAM(NAME)                                                                                              \
    HOOK(NAME, device_address *address, size_t size, void *stream)                                                     \
    {                                                                                                                  \
        return alloc_from(CALL_OF(NAME), false, address, size, NULL, stream);                                          \
    }

#define FROM_POOL(NAME)                                                                                                \
    HOOK(NAME, device_address *address, size_t size, void *pool, void *stream)                                         \
    {                                                                                                                  \
        return alloc_from(CALL_OF(NAME), true, address, size, pool, stream);                                           \
    }

#define FREED_IN_STREAM(NAME)                                                                                          \
    HOOK(NAME, device_address address, void *stream)                                                                   \
    {                                                                                                                  \
        FORGET(address, VENDOR(NAME, address, stream));                                                                \
    }

HOOK(API(MemPoolCreate), void **pool, const struct pool_properties *properties)
{
    int result = VENDOR(API(MemPoolCreate), pool, properties);
    if (result == SUCCESS && limit_outside()) {
        int ordinal = ordinal_at(properties->location, properties->type);
        struct limit_pool made = {.driver = &driver, .handle = *pool, .ordinal = ordinal >= 0 ? ordinal : 0};
        limit_pool_made(made, ordinal >= 0 ? device_of(ordinal) : LIMIT_NO_LIMIT);
    }
    return result;
}

/* A location's own pool: what device it is charged to is only known from where it is. */
static int located(int result, void *const *pool, const struct location *where, int type)
{
    struct limit_session *session = result == SUCCESS ? limit_program_session() : NULL;
    if (!session || limit_pool_ordinal(session, &driver, *pool) >= 0)
        return result;
    int ordinal = ordinal_at(*where, type);
    struct limit_pool found = {.driver = &driver, .handle = *pool, .ordinal = ordinal >= 0 ? ordinal : 0};
    limit_pool_made(found, ordinal >= 0 ? device_of(ordinal) : LIMIT_NO_LIMIT);
    return result;
}

HOOK(API(MemGetDefaultMemPool), void **pool, const struct location *where, int type)
{
    return located(VENDOR(API(MemGetDefaultMemPool), pool, where, type), pool, where, type);
}

HOOK(API(MemGetMemPool), void **pool, const struct location *where, int type)
{
    return located(VENDOR(API(MemGetMemPool), pool, where, type), pool, where, type);
}

HOOK(API(MemPoolDestroy), void *pool)
{
    struct limit_session *session = limit_program_session();
    if (!session)
        return VENDOR(API(MemPoolDestroy), pool);
    pthread_mutex_lock(&session->pools);
    int result = VENDOR(API(MemPoolDestroy), pool);
    if (result == SUCCESS)
        limit_pool_gone(session, &driver, pool);
    pthread_mutex_unlock(&session->pools);
    return result;
}

#define MAY_SHRINK(NAME, PARAMETERS, ...)                                                                              \
    HOOK(NAME, PARAMETERS)                                                                                             \
    {                                                                                                                  \
        int result = VENDOR(NAME, __VA_ARGS__);                                                                        \
        if (limit_outside())                                                                                           \
            limit_pools_may_have_shrunk(&driver);                                                                      \
        return result;                                                                                                 \
    }

MAY_SHRINK(API(StreamSynchronize), void *stream, stream)
MAY_SHRINK(API(EventSynchronize), void *event, event)

/* ---- graphs ---- */

static int instantiated(int result, void **executable, void *graph)
{
    if (result == SUCCESS && limit_outside())
        limit_graph_made(&driver, graph, *executable);
    return result;
}

HOOK(API(GraphInstantiate), void **executable, void *graph, void **node, char *log, size_t size)
{
    return instantiated(VENDOR(API(GraphInstantiate), executable, graph, node, log, size), executable, graph);
}

HOOK(API(GraphInstantiateWithFlags), void **executable, void *graph, unsigned long long flags)
{
    return instantiated(VENDOR(API(GraphInstantiateWithFlags), executable, graph, flags), executable, graph);
}

HOOK(API(GraphInstantiateWithParams), void **executable, void *graph, void *parameters)
{
    return instantiated(VENDOR(API(GraphInstantiateWithParams), executable, graph, parameters), executable, graph);
}

static int launch(struct limit_call *call, void *executable, void *stream)
{
    struct limit_entry entry;
    enum limit_launch kind = limit_graph_begin(&driver, executable, &entry);
    if (kind == LIMIT_REFUSED)
        return OUT_OF_MEMORY;
    int result = VENDOR_AS(API(GraphLaunch), call, executable, stream);
    if (kind == LIMIT_CHARGED)
        limit_graph_end(&driver, &entry, result == SUCCESS);
    return result;
}

HOOK(API(GraphExecDestroy), void *executable)
{
    struct limit_session *session = limit_program_session();
    struct limit_entry entry;
    bool known = session && limit_graph_take(session, executable, &entry);
    int result = VENDOR(API(GraphExecDestroy), executable);
    if (known)
        limit_graph_destroyed(session, &entry, result == SUCCESS);
    return result;
}

HOOK(API(DeviceGraphMemTrim), int ordinal)
{
    return settled(VENDOR(API(DeviceGraphMemTrim), ordinal));
}

/* ---- virtual memory ---- */

/* CALL under the lock of virtual memory; AFTER, with `session`, when it succeeded. */
#define WITH_OBJECTS(CALL, AFTER)                                                                                      \
    do {                                                                                                               \
        struct limit_session *session = limit_program_session();                                                       \
        if (!session)                                                                                                  \
            return CALL;                                                                                               \
        pthread_mutex_lock(&session->objects);                                                                         \
        int result = CALL;                                                                                             \
        if (result == SUCCESS)                                                                                         \
            AFTER;                                                                                                     \
        pthread_mutex_unlock(&session->objects);                                                                       \
        return result;                                                                                                 \
    } while (0)

/* Charged to the device that it is created on, whatever device is current; in pages of 2 MiB. */
HOOK(API(MemCreate), memory_handle *handle, size_t size, const struct allocation_properties *properties,
     unsigned long long flags)
{
    enum { PAGE = 2 << 20 };
    bool asks = limit_outside() && handle && properties && size > 0 && size <= SIZE_MAX / 2;
    int ordinal = asks ? ordinal_at(properties->location, properties->type) : -1;
    if (ordinal < 0)
        return VENDOR(API(MemCreate), handle, size, properties, flags);
    struct limit_entry entry = {0};
    if (!limit_driver_take(&driver, device_of(ordinal), (size + PAGE - 1) / PAGE * PAGE, &entry))
        return OUT_OF_MEMORY;
    int result = VENDOR(API(MemCreate), handle, size, properties, flags);
    if (result == SUCCESS)
        limit_physical_made(&entry, *handle);
    else
        limit_driver_give(&driver, &entry);
    return result;
}

HOOK(API(MemRelease), memory_handle handle)
{
    WITH_OBJECTS(VENDOR(API(MemRelease), handle), limit_physical_released(session, handle));
}

HOOK(API(MemMap), device_address address, size_t size, size_t offset, memory_handle handle, unsigned long long flags)
{
    WITH_OBJECTS(VENDOR(API(MemMap), address, size, offset, handle, flags),
                 limit_mapped(session, address, size, handle));
}

HOOK(API(MemUnmap), device_address address, size_t size)
{
    WITH_OBJECTS(VENDOR(API(MemUnmap), address, size), limit_unmapped(session, address, size));
}

HOOK(API(MemRetainAllocationHandle), memory_handle *handle, device_address address)
{
    WITH_OBJECTS(VENDOR(API(MemRetainAllocationHandle), handle, address),
                 limit_physical_retained(session, address, *handle));
}

enum { FILE_DESCRIPTOR = 1 }; /* the type of a handle that other processes open */

/* An exported file keeps the memory, and could bring it back by import. A handle for other nodes cannot be followed. */
HOOK(API(MemExportToShareableHandle), void *shareable, memory_handle handle, int type, unsigned long long flags)
{
    WITH_OBJECTS(VENDOR(API(MemExportToShareableHandle), shareable, handle, type, flags),
                 limit_physical_exported(session, handle, type == FILE_DESCRIPTOR ? *(int *)shareable : -1));
}

HOOK(API(MemImportFromShareableHandle), memory_handle *handle, void *shareable, int type)
{
    WITH_OBJECTS(VENDOR(API(MemImportFromShareableHandle), handle, shareable, type),
                 limit_physical_imported(session, *handle, type == FILE_DESCRIPTOR ? (int)(intptr_t)shareable : -1));
}

/* ---- memory of other processes ---- */

static int shared(int result, void (*count)(struct limit_session *session))
{
    struct limit_session *session = result == SUCCESS ? limit_program_session() : NULL;
    if (session)
        count(session);
    return result;
}

HOOK(API(IpcGetMemHandle), struct ipc_memory *handle, device_address address)
{
    return shared(VENDOR(API(IpcGetMemHandle), handle, address), limit_exported);
}

HOOK(API(IpcOpenMemHandle), device_address *address, struct ipc_memory handle, unsigned flags)
{
    return shared(VENDOR(API(IpcOpenMemHandle), address, handle, flags), limit_imported);
}

HOOK(API(IpcCloseMemHandle), device_address address)
{
    return shared(VENDOR(API(IpcCloseMemHandle), address), limit_import_ended);
}

HOOK(API(MemPoolExportToShareableHandle), void *shareable, void *pool, int type, unsigned long long flags)
{
    return shared(VENDOR(API(MemPoolExportToShareableHandle), shareable, pool, type, flags), limit_exported);
}

/* When an imported pool is destroyed, what was imported from it may still be there: it counts to the end. */
HOOK(API(MemPoolImportFromShareableHandle), void **pool, void *shareable, int type, unsigned long long flags)
{
    return shared(VENDOR(API(MemPoolImportFromShareableHandle), pool, shareable, type, flags), limit_imported);
}

#endif
