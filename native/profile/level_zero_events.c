/* SPDX-License-Identifier: Apache-2.0 */
#include "level_zero_events.h"

#include <stdlib.h>

enum { POOL_EVENTS = 512, MOST_POOLS = 64 };

struct pool {
    struct pool *next;
    ze_handle handle;
    struct ze_times *times;
    struct ze_work works[POOL_EVENTS];
};

struct ze_context {
    struct ze_context *next;
    ze_handle handle; /* NULL: it is destroyed, and its place is free */
    uint32_t number;
    struct pool *pools;
    struct ze_work *free;
    unsigned busy; /* all others */
};

static struct ze_context *contexts;
static unsigned pool_count;
static uint32_t context_count;

/* ---- contexts ---- */

struct ze_context *ze_context_find(ze_handle handle)
{
    struct ze_context *context = contexts;
    while (context != NULL && context->handle != handle) {
        context = context->next;
    }
    return context;
}

struct ze_context *ze_context_of(ze_handle handle)
{
    struct ze_context *context = ze_context_find(handle);
    if (context != NULL) {
        return context;
    }
    context = ze_context_find(NULL);
    if (context == NULL && (context = calloc(1, sizeof *context)) != NULL) {
        context->next = contexts;
        contexts = context;
    }
    if (context != NULL) {
        context->handle = handle;
        context->number = ++context_count;
    }
    return context;
}

ze_handle ze_context_handle(const struct ze_context *context)
{
    return context->handle;
}

uint32_t ze_context_number(const struct ze_context *context)
{
    return context->number;
}

/* ---- events ---- */

static void add_events(struct ze_context *context, struct pool *pool)
{
    for (uint32_t i = 0; i < POOL_EVENTS; i++) {
        struct ze_work *work = &pool->works[i];
        const struct ze_event how = {.type = ZE_TYPE_EVENT, .index = i, .signal = ZE_SCOPE_HOST, .wait = ZE_SCOPE_HOST};
        *work = (struct ze_work){.context = context, .times = pool->times != NULL ? &pool->times[i] : NULL};
        if (ze.zeEventCreate(pool->handle, &how, &work->event) == ZE_OK) {
            work->next = context->free;
            context->free = work;
        }
    }
}

static void add_pool(struct ze_context *context)
{
    const struct ze_event_pool how = {
        .type = ZE_TYPE_EVENT_POOL, .flags = ZE_POOL_HOST_VISIBLE | ZE_POOL_TIMESTAMPS, .count = POOL_EVENTS};
    const struct ze_host_memory how_memory = {.type = ZE_TYPE_HOST_MEMORY};
    struct pool *pool = pool_count < MOST_POOLS ? calloc(1, sizeof *pool) : NULL;
    if (pool == NULL || ze.zeEventPoolCreate(context->handle, &how, 0, NULL, &pool->handle) != ZE_OK) {
        free(pool);
        return;
    }
    void *times = NULL; /* without them, what has times of its own is not seen */
    if (ze.zeMemAllocHost(context->handle, &how_memory, POOL_EVENTS * sizeof *pool->times, 64, &times) == ZE_OK) {
        pool->times = times;
    }
    pool->next = context->pools;
    context->pools = pool;
    pool_count++;
    add_events(context, pool);
}

struct ze_work *ze_event_take(struct ze_context *context)
{
    if (context->free == NULL) {
        add_pool(context);
    }
    struct ze_work *work = context->free;
    if (work != NULL) {
        context->free = work->next;
        context->busy++;
    }
    return work;
}

void ze_event_return(struct ze_work *work)
{
    work->context->busy--;
    work->next = work->context->free;
    work->context->free = work;
}

void ze_events_destroy(struct ze_context *context)
{
    struct pool *next;
    for (struct pool *pool = context->pools; pool != NULL; pool = next) {
        next = pool->next;
        for (unsigned i = 0; i < POOL_EVENTS; i++) {
            if (pool->works[i].event != NULL) {
                ze.zeEventDestroy(pool->works[i].event);
            }
        }
        ze.zeEventPoolDestroy(pool->handle);
        if (pool->times != NULL) {
            ze.zeMemFree(context->handle, pool->times);
        }
        free(pool);
        pool_count--;
    }
    context->pools = NULL;
    context->free = NULL;
    context->busy = 0;
    context->handle = NULL;
}

void ze_events_destroy_all(void)
{
    for (struct ze_context *context = contexts; context != NULL; context = context->next) {
        ze_events_destroy(context);
    }
}

bool ze_events_used(void)
{
    unsigned busy = 0;
    for (const struct ze_context *context = contexts; context != NULL; context = context->next) {
        busy += context->busy;
    }
    return busy > 0;
}
