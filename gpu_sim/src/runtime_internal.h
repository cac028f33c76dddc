/* What the files of the runtime share. All of it is used with `rt_all.lock` held. */
#ifndef RUNTIME_INTERNAL_H
#define RUNTIME_INTERNAL_H

#include <pthread.h>
#include <search.h>
#include <unistd.h>

#include "runtime.h"

#define RT_SHARED_MAGIC 0x73696d2d69706331u /* begins what is handed to other processes */

struct rt_device {
    unsigned index;
    uint8_t instance;
    uint64_t small;            /* bytes of allocations below a granule, which share granules */
    struct rt_context primary; /* active while it has uses */
    struct rt_pool standard, graphs, *current;
    struct rt_pool managed, *current_managed;
};

extern struct rt_state {
    pthread_mutex_t lock;
    pid_t owner; /* 0: closed */
    bool forked; /* since then: a driver does not survive that */
    uint64_t granule, pool_step;
    int count;
    struct rt_device devices[RT_MAX_DEVICES];
    struct rt_pool *pending; /* pools that have some */
    struct rt_pool host;     /* of the host's memory, which costs nothing here */
    void *blocks;            /* tree of struct rt_block by address */
    void *mappings;          /* tree of struct rt_mapping by address; runtime_range.c */
} rt_all;

uint64_t rt_round_up(uint64_t bytes, uint64_t unit);
enum rt_status rt_check_device(int device);
/* Charge bytes of a device to this process, or give them back. */
enum rt_status rt_hold(int device, int64_t change);
void rt_give_back(int device, uint64_t bytes);

/* The block that an address is in; the one of a kind that begins there. */
struct rt_block *rt_block_at(uintptr_t address);
struct rt_block *rt_block_of(const void *handle, enum rt_kind kind);
bool rt_remember(struct rt_block *block);
/* Take a block out of the tree, give back what it holds, and free it. */
void rt_forget(struct rt_block *block);
/* A block without memory of its own, found by the address of `memory`. */
struct rt_block *rt_new_handle(enum rt_kind kind, int device, uint64_t charge, void *memory);
/* Memory in the address space of this process for a block that is paid for. */
struct rt_block *rt_place(struct rt_context *context, enum rt_kind kind, size_t size);
void *rt_reserve(size_t size, int protection);
/* Give back what a pool has beyond its use and `keep`. */
void rt_pool_release(struct rt_pool *pool, uint64_t keep);
/* What was freed in streams is free. */
void rt_settle_pending(int device);

#endif
