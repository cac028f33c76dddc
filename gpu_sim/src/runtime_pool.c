/* Pools, which keep what was freed as their thresholds say. */
#include "runtime_internal.h"

#include <stdlib.h>

struct rt_pool *rt_default_pool(int device, enum rt_home home)
{
    if (rt_check_device(device) != RT_OK) {
        return NULL;
    }
    return home == RT_IN_HOST      ? &rt_all.host
           : home == RT_IN_MANAGED ? &rt_all.devices[device].managed
                                   : &rt_all.devices[device].standard;
}

static struct rt_pool **current_place(int device, enum rt_home home)
{
    return home == RT_IN_MANAGED ? &rt_all.devices[device].current_managed : &rt_all.devices[device].current;
}

struct rt_pool *rt_current_pool(int device, enum rt_home home)
{
    bool own = rt_check_device(device) == RT_OK && home != RT_IN_HOST;
    return own ? *current_place(device, home) : rt_default_pool(device, home);
}

bool rt_pool_valid(struct rt_pool *pool)
{
    bool valid = pool == &rt_all.host;
    pthread_mutex_lock(&rt_all.lock);
    for (int i = 0; i < rt_all.count; i++) {
        struct rt_device *device = &rt_all.devices[i];
        valid = valid || pool == &device->standard || pool == &device->graphs || pool == &device->managed;
    }
    valid = rt_ready() == RT_OK && (valid || rt_block_of(pool, RT_POOL) != NULL);
    pthread_mutex_unlock(&rt_all.lock);
    return valid;
}

enum rt_status rt_set_pool(int device, struct rt_pool *pool)
{
    if (rt_check_device(device) != RT_OK || !rt_pool_valid(pool) || pool->device != device ||
        pool->home == RT_IN_HOST) {
        return RT_INVALID;
    }
    *current_place(device, pool->home) = pool;
    return RT_OK;
}

enum rt_status rt_pool_new(int device, enum rt_home home, struct rt_pool **pool)
{
    enum rt_status status = rt_check_device(device);
    if (status != RT_OK) {
        return status;
    }
    pthread_mutex_lock(&rt_all.lock);
    *pool = calloc(1, sizeof **pool);
    if (rt_new_handle(RT_POOL, device, 0, *pool) == NULL) {
        free(*pool);
        status = RT_NO_MEMORY;
    } else {
        (*pool)->device = device;
        (*pool)->home = home;
    }
    pthread_mutex_unlock(&rt_all.lock);
    return status;
}

/* The lock is held. */
static void not_pending(struct rt_pool *pool)
{
    struct rt_pool **place = &rt_all.pending;
    while (*place != NULL && *place != pool) {
        place = &(*place)->next_pending;
    }
    if (*place != NULL) {
        *place = pool->next_pending;
    }
    pool->pending = 0;
}

void rt_settle_pending(int device)
{
    for (struct rt_pool *pool = rt_all.pending, *next; pool != NULL; pool = next) {
        next = pool->next_pending;
        if (pool->device == device) {
            not_pending(pool);
            rt_pool_release(pool, pool->threshold);
        }
    }
}

void rt_waited(int device)
{
    pthread_mutex_lock(&rt_all.lock);
    rt_settle_pending(device);
    pthread_mutex_unlock(&rt_all.lock);
}

enum rt_status rt_pool_free(struct rt_pool *pool)
{
    pthread_mutex_lock(&rt_all.lock);
    struct rt_block *block = rt_ready() == RT_OK ? rt_block_of(pool, RT_POOL) : NULL;
    enum rt_status status = block == NULL ? RT_INVALID : pool->used > 0 ? RT_BUSY : RT_OK;
    if (status == RT_OK) {
        not_pending(pool);
        rt_pool_release(pool, 0);
        struct rt_pool **current = current_place(pool->device, pool->home);
        if (*current == pool) {
            *current = rt_default_pool(pool->device, pool->home);
        }
        rt_forget(block);
        free(pool);
    }
    pthread_mutex_unlock(&rt_all.lock);
    return status;
}

/* The lock is held. */
static enum rt_status pool_grow(struct rt_pool *pool, uint64_t bytes)
{
    uint64_t need = pool->used + bytes;
    enum rt_status status = RT_OK;
    if (need > pool->reserved) {
        uint64_t more = rt_round_up(need - pool->reserved, rt_all.pool_step);
        status = pool->home == RT_IN_HOST ? RT_OK : rt_hold(pool->device, (int64_t)more);
        pool->reserved += status == RT_OK ? more : 0;
    }
    return status;
}

static void pool_take(struct rt_pool *pool, uint64_t bytes)
{
    pool->used += bytes;
    if (pool->used + pool->pending > pool->reserved) { /* it is used again */
        pool->pending = pool->reserved - pool->used;
        if (pool->pending == 0) {
            not_pending(pool);
        }
    }
    pool->used_high = pool->used > pool->used_high ? pool->used : pool->used_high;
    pool->reserved_high = pool->reserved > pool->reserved_high ? pool->reserved : pool->reserved_high;
}

struct rt_pool *rt_graph_pool(int device)
{
    return rt_check_device(device) == RT_OK ? &rt_all.devices[device].graphs : NULL;
}

enum rt_status rt_pool_use(struct rt_pool *pool, uint64_t bytes)
{
    pthread_mutex_lock(&rt_all.lock);
    enum rt_status status = pool_grow(pool, rt_round_up(bytes, 512));
    if (status == RT_OK) {
        pool_take(pool, rt_round_up(bytes, 512));
    }
    pthread_mutex_unlock(&rt_all.lock);
    return status;
}

void rt_pool_unuse(struct rt_pool *pool, uint64_t bytes)
{
    pthread_mutex_lock(&rt_all.lock);
    pool->used -= rt_round_up(bytes, 512);
    rt_pool_release(pool, pool->threshold);
    pthread_mutex_unlock(&rt_all.lock);
}

enum rt_status rt_pool_alloc(struct rt_context *context, struct rt_pool *pool, size_t size, void **memory)
{
    struct sim_gpu gpu;
    if (size == 0 || !rt_pool_valid(pool)) {
        return RT_INVALID;
    }
    enum rt_status status = rt_gpu(pool->device, &gpu, NULL, NULL);
    if (status != RT_OK) {
        return status;
    }
    pthread_mutex_lock(&rt_all.lock);
    uint64_t bytes = rt_round_up(size, 512);
    status = pool_grow(pool, bytes);
    struct rt_block *block = status == RT_OK ? rt_place(context, RT_DEVICE, size) : NULL;
    if (block != NULL) {
        block->charge = bytes;
        block->pool = pool;
        *memory = (void *)block->base;
        pool_take(pool, bytes);
    } else {
        status = status == RT_OK ? RT_NO_MEMORY : status;
        rt_pool_release(pool, pool->threshold);
    }
    pthread_mutex_unlock(&rt_all.lock);
    return status;
}

enum rt_status rt_pool_trim(struct rt_pool *pool, uint64_t keep)
{
    if (!rt_pool_valid(pool)) {
        return RT_INVALID;
    }
    pthread_mutex_lock(&rt_all.lock);
    rt_pool_release(pool, keep);
    pthread_mutex_unlock(&rt_all.lock);
    return RT_OK;
}
