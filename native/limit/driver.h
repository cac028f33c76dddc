/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What CUDA's driver and HIP's runtime have in common: pieces of memory freed by address, pools, graphs that allocate,
 * virtual memory. Their wrappers differ in names and types only, and stand in cuda.c and hip.c.
 */
#ifndef SLUICE_LIMIT_DRIVER_H
#define SLUICE_LIMIT_DRIVER_H

#include "session.h"

/* The vendor's own answers; each false where it has none. Ordinals are the driver's numbers of devices. */
struct limit_driver {
    unsigned char number;       /* 0: CUDA, 1: HIP */
    uint64_t granule;           /* bytes of a page of device memory */
    int (*device)(int ordinal); /* of the ledger */
    bool (*pool_attribute)(void *pool, int attribute, uint64_t *value);
    bool (*graph_attribute)(int ordinal, int attribute, uint64_t *value);
    bool (*graph_nodes)(void *graph, void **nodes, size_t *count);
    bool (*node_memory)(void *node, int *ordinal, uint64_t *bytes); /* of a node that allocates device memory */
    bool (*node_graph)(void *node, void **graph);                   /* of a node that is a graph */
};

/* A pool, or (handle NULL) a device's memory for graphs. */
struct limit_pool {
    const struct limit_driver *driver;
    void *handle;
    int ordinal;
};

/* Called by the program, not by the vendor's library in the course of another call. */
static inline bool limit_outside(void)
{
    return limit_inside == 0;
}

/* ---- pieces ---- */

/* Charge a piece, in what this process no longer uses if need be. */
bool limit_driver_take(const struct limit_driver *driver, int device, uint64_t size, struct limit_entry *entry);
bool limit_driver_open_context(const struct limit_driver *driver, int device);
void limit_driver_give(const struct limit_driver *driver, const struct limit_entry *entry);
/* Where the table has no room, the charge stays: too much is safe, too little is not. */
void limit_remember(struct limit_entry *entry, enum limit_class class, uint64_t key);
/* What was at an address is free. */
void limit_freed(const struct limit_driver *driver, struct limit_session *session, const struct limit_entry *entry);
/* Everything that `owner`, a context, held is gone with it. */
void limit_drop_owner(const struct limit_driver *driver, struct limit_session *session, const void *owner);

/* ---- pools: charged with what the driver keeps in them (its own figure), not with what it handed out ---- */

/* Charge growth by `size` bytes before it happens. True: the lock is held until limit_pool_end, which must follow. */
bool limit_pool_begin(struct limit_session *session, struct limit_pool pool, uint64_t size);
/* `allocated`: the driver did. False: its pool grew by more than there is room for; the caller frees, trims, settles.
 */
bool limit_pool_end(struct limit_session *session, struct limit_pool pool, bool allocated);
void limit_pool_made(struct limit_pool pool, int device);
/* The ordinal of a known pool's device; -1: unknown. */
int limit_pool_ordinal(struct limit_session *session, const struct limit_driver *driver, void *handle);
/* A destroyed pool is gone; the caller holds session->pools. */
void limit_pool_gone(struct limit_session *session, const struct limit_driver *driver, void *handle);
/* Bring all pools' charges to what the driver keeps; true: something was given back. */
bool limit_settle_pools(const struct limit_driver *driver, struct limit_session *session);
/* The same, for a while after something was freed: the driver gives it up when the program waits for the device. */
void limit_pools_may_have_shrunk(const struct limit_driver *driver);

/* ---- graphs: their allocation nodes draw on a pool of the device's, which grows when they are launched ---- */

void limit_graph_made(const struct limit_driver *driver, void *graph, void *executable);
/* True: `*entry` is a graph that allocates, its growth is charged, and the lock held until limit_graph_end. */
enum limit_launch { LIMIT_PLAIN, LIMIT_CHARGED, LIMIT_REFUSED };
enum limit_launch limit_graph_begin(const struct limit_driver *driver, void *executable, struct limit_entry *entry);
void limit_graph_end(const struct limit_driver *driver, struct limit_entry *entry, bool launched);
/* Takes a graph out before it is destroyed; what became of it decides `destroyed`. */
bool limit_graph_take(struct limit_session *session, void *executable, struct limit_entry *entry);
void limit_graph_destroyed(struct limit_session *session, struct limit_entry *entry, bool destroyed);

/* ---- virtual memory: charged until the last handle, mapping and exported file is gone. ---- */
/* The caller holds session->objects. */

void limit_physical_made(const struct limit_entry *charge, uint64_t handle);
void limit_physical_released(struct limit_session *session, uint64_t handle);
void limit_physical_retained(struct limit_session *session, uint64_t address, uint64_t handle);
void limit_physical_exported(struct limit_session *session, uint64_t handle, int file); /* -1: to who knows where */
void limit_physical_pinned(struct limit_session *session,
                           uint64_t handle); /* its end cannot be seen: never given back */
void limit_mapped(struct limit_session *session, uint64_t address, uint64_t size, uint64_t handle);
void limit_unmapped(struct limit_session *session, uint64_t address, uint64_t size);

/* Somebody else's: not charged here, but known to be held as long as handle, mappings and file (-1: none) are. */
void limit_physical_imported(struct limit_session *session, uint64_t handle, int file);

/* ---- sharing with other processes ---- */

static inline void limit_exported(struct limit_session *session)
{
    atomic_store(&session->sharing->exports, 1); /* for good: who imported it cannot be asked */
}

static inline void limit_imported(struct limit_session *session)
{
    atomic_fetch_add(&session->sharing->imports, 1);
}

static inline void limit_import_ended(struct limit_session *session)
{
    atomic_fetch_sub(&session->sharing->imports, 1);
}

/* ---- shared forms of wrappers ---- */

/* `CALL`; AFTER, with `session`, when it succeeded. */
#define LIMIT_SHARE(RESULT, CALL, AFTER)                                                                               \
    do {                                                                                                               \
        struct limit_session *session = limit_outside() ? limit_session() : NULL;                                      \
        RESULT result = CALL;                                                                                          \
        if (session && result == 0)                                                                                    \
            AFTER;                                                                                                     \
        return result;                                                                                                 \
    } while (0)

/* `FREE` frees what is known as KEY. Forgotten before, as another thread may get the same address right afterwards. */
#define LIMIT_FORGET(DRIVER, KEY, RESULT, FREE)                                                                        \
    do {                                                                                                               \
        struct limit_session *session = limit_outside() ? limit_session() : NULL;                                      \
        struct limit_entry entry;                                                                                      \
        bool known = session && limit_table_take(&session->table, LIMIT_ADDRESS, (uint64_t)(KEY), &entry);             \
        RESULT result = FREE;                                                                                          \
        if (known && result == 0)                                                                                      \
            limit_freed(DRIVER, session, &entry);                                                                      \
        else if (known)                                                                                                \
            limit_table_put(&session->table, &entry);                                                                  \
        else if (session && atomic_load_explicit(&session->graphs, memory_order_relaxed) != 0)                         \
            limit_settle_pools(DRIVER, session); /* a graph's memory may be freed like any other */                    \
        return result;                                                                                                 \
    } while (0)

/* `CALL` under the lock of virtual memory; AFTER, with `session`, when it succeeded. */
#define LIMIT_OBJECT(RESULT, CALL, AFTER)                                                                              \
    do {                                                                                                               \
        struct limit_session *session = limit_outside() ? limit_session() : NULL;                                      \
        if (!session)                                                                                                  \
            return CALL;                                                                                               \
        pthread_mutex_lock(&session->objects);                                                                         \
        RESULT result = CALL;                                                                                          \
        if (result == 0)                                                                                               \
            AFTER;                                                                                                     \
        pthread_mutex_unlock(&session->objects);                                                                       \
        return result;                                                                                                 \
    } while (0)

#endif
