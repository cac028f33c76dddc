/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What this process holds, by address or handle. Any thread may call. A table that is all zero is an empty one, so that
 * a forked child, which finds its session wiped, starts with nothing.
 */
#ifndef SLUICE_LIMIT_TABLE_H
#define SLUICE_LIMIT_TABLE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Keys of different classes never meet. */
enum limit_class {
    LIMIT_ADDRESS = 1, /* memory and arrays */
    LIMIT_PHYSICAL,    /* handles of virtual memory management */
    LIMIT_MAPPING,     /* addresses of the same */
    LIMIT_GRAPH,       /* executable graphs */
    LIMIT_CONTEXT,     /* contexts but the primary ones */
    LIMIT_HEAP,        /* what a context's own memory was grown by */
    LIMIT_CL_DEVICE,   /* OpenCL's devices, looked up once */
    LIMIT_CL_SVM,
    LIMIT_GREEN, /* green contexts: of which device, by the driver's number */
};

struct limit_entry {
    uint64_t key;
    enum limit_class class;
    int device;        /* of the ledger */
    uint64_t bytes;    /* charged; of a small piece, its part of a page */
    uint64_t size;     /* of the address range, where one is needed */
    const void *owner; /* the context that it ends with, or NULL */
    uint64_t link;     /* the pool that it came from, or an object of its class */
    bool small, spilled;
};

enum { LIMIT_SHARDS = 64 };

struct limit_table {
    struct limit_shard {
        pthread_mutex_t lock;
        struct limit_entry *entries; /* open addressing; class 0 is free */
        size_t room, used;
    } shards[LIMIT_SHARDS];
};

/* False: no host memory. The key must not be there. */
bool limit_table_put(struct limit_table *table, const struct limit_entry *entry);
bool limit_table_get(struct limit_table *table, enum limit_class class, uint64_t key, struct limit_entry *entry);
bool limit_table_take(struct limit_table *table, enum limit_class class, uint64_t key, struct limit_entry *entry);

typedef bool limit_match(const struct limit_entry *entry, const void *argument);
/* Take one entry for which `match` says true; O(all). */
bool limit_table_take_any(struct limit_table *table, limit_match *match, const void *argument,
                          struct limit_entry *entry);
/* Take all of them, and do `each` with every one, which must not use the table; O(all). */
void limit_table_drain(struct limit_table *table, limit_match *match, const void *argument,
                       void (*each)(const struct limit_entry *entry, const void *context), const void *context);
/* Find one without taking it. */
bool limit_table_find(struct limit_table *table, limit_match *match, const void *argument, struct limit_entry *entry);

#endif
