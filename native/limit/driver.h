/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What CUDA's driver and HIP's runtime have in common: pieces of memory freed by address, pools, graphs that allocate,
 * virtual memory. Here is the accounting, driver_wrappers.h has the wrappers.
 */
#ifndef SLUICE_LIMIT_DRIVER_H
#define SLUICE_LIMIT_DRIVER_H

#include "driver_abi.h"
#include "session.h"

/* The vendor's own answers; each false where it has none. Ordinals are the driver's numbers of devices. */
struct limit_driver {
    uint64_t granule;           /* bytes of a page of device memory */
    uint64_t pool_step;         /* bytes that pools grow by, or a multiple of it */
    int (*device)(int ordinal); /* of the ledger */
    bool (*pool_attribute)(void *pool, int attribute, uint64_t *value);
    bool (*graph_attribute)(int ordinal, int attribute, uint64_t *value);
    void (*trim_pool)(void *pool);
    void (*trim_graphs)(int ordinal);
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

/* The session to charge what the program itself calls; NULL: the vendor's library calls, or there is none. */
static inline struct limit_session *limit_program_session(void)
{
    return limit_outside() ? limit_session() : NULL;
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

/* ---- arrays ---- */

/* An array with all its levels of detail; layers keep their number. 0: larger than any driver accepts. */
uint64_t limit_array_bytes(struct extent extent, unsigned levels, bool layered, uint64_t texel);
/* The same, as described; NULL: 0. A format that is not known counts as the widest. */
uint64_t limit_array_2d_bytes(const struct array_2d *what);
uint64_t limit_array_3d_bytes(const struct array_3d *what, unsigned levels);

/* ---- pools: charged with what the driver keeps in them (its own figure), not with what it handed out ---- */

/* Charge what `size` bytes more in use make the pool grow by, in whole steps, before it happens. True: the lock is held
 * until limit_pool_end, which must follow. */
bool limit_pool_begin(struct limit_session *session, struct limit_pool pool, uint64_t size);
/* `allocated`: the driver did. False: its pool grew by more than there is room for; the caller frees and settles. */
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
/* Something at an address that is not known here was freed, which may be a graph's. */
void limit_graph_memory_freed(const struct limit_driver *driver, struct limit_session *session);
/* Takes a graph out before it is destroyed; what became of it decides `destroyed`. */
bool limit_graph_take(struct limit_session *session, void *executable, struct limit_entry *entry);
void limit_graph_destroyed(struct limit_session *session, struct limit_entry *entry, bool destroyed);

/* ---- virtual memory: charged until the last handle, mapping and exported file is gone. ---- */
/* The caller holds session->objects. */

void limit_physical_made(const struct limit_entry *charge, uint64_t handle);
void limit_physical_released(struct limit_session *session, uint64_t handle);
void limit_physical_retained(struct limit_session *session, uint64_t address, uint64_t handle);
void limit_physical_exported(struct limit_session *session, uint64_t handle, int file); /* -1: to an unknown place */
void limit_physical_pinned(struct limit_session *session,
                           uint64_t handle); /* its end cannot be seen: never given back */
void limit_mapped(struct limit_session *session, uint64_t address, uint64_t size, uint64_t handle);
void limit_unmapped(struct limit_session *session, uint64_t address, uint64_t size);

/* Another process's: not charged here, but known to be held as long as handle, mappings and file (-1: none) are. */
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

#endif
