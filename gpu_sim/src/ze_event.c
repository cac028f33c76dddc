/* Simulated Level Zero: contexts, events and the devices' clocks. An event knows when it will have its signal. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ze_sim.h"

enum { FREQUENCY = 1000000000, EPOCH = 1000000007 };
enum { BITS = 32 }; /* of the counters, as level_zero.c says: they overflow every 4.3 s */

struct ze_sim_pool {
    struct ze_sim_context *context;
    uint32_t flags, count;
};

uint64_t ze_sim_cycles(uint64_t ns)
{
    return (ns - EPOCH) & ((UINT64_C(1) << BITS) - 1);
}

ZE(zeDeviceGetGlobalTimestamps, ze_handle device, uint64_t *host, uint64_t *cycles)
{
    unsigned index;
    if (!ze_sim_device(device, &index)) {
        return ZE_BAD_ARGUMENT;
    }
    *host = line_now();
    *cycles = ze_sim_cycles(*host);
    return ZE_OK;
}

uint32_t ze_sim_wait(uint64_t until, uint64_t timeout)
{
    uint64_t now = line_now(), last = timeout < UINT64_MAX - now ? now + timeout : UINT64_MAX;
    line_sleep_until(until < last ? until : last);
    return until <= last ? ZE_OK : ZE_NOT_READY;
}

/* ---- contexts ---- */

ZE(zeContextCreate, ze_handle driver, const void *how, ze_handle *context)
{
    struct sim_state head;
    if (driver == NULL || how == NULL || context == NULL || sim_enter(0, &head) != SIM_OK) {
        return ZE_BAD_ARGUMENT;
    }
    *context = calloc(1, sizeof(struct ze_sim_context));
    return *context != NULL ? ZE_OK : ZE_NO_DEVICE_MEMORY;
}

static uint32_t destroy_context(struct ze_sim_context *context)
{
    if (context == NULL || context->pools > 0) {
        return context == NULL ? ZE_BAD_ARGUMENT : ZE_IN_USE;
    }
    free(context);
    return ZE_OK;
}

ZE(zeContextDestroy, ze_handle context)
{
    ZE_TRACE(ContextDestroy, ze_one, destroy_context(context), &context);
}

/* ---- pools ---- */

ZE(zeEventPoolCreate, struct ze_sim_context *context, const struct ze_event_pool *how, uint32_t count,
   ze_handle *devices, struct ze_sim_pool **pool)
{
    (void)count;
    (void)devices;
    if (context == NULL || how == NULL || how->count == 0 || pool == NULL) {
        return ZE_BAD_ARGUMENT;
    }
    *pool = calloc(1, sizeof **pool);
    if (*pool == NULL) {
        return ZE_NO_DEVICE_MEMORY;
    }
    **pool = (struct ze_sim_pool){.context = context, .flags = how->flags, .count = how->count};
    context->pools++;
    return ZE_OK;
}

ZE(zeEventPoolDestroy, struct ze_sim_pool *pool)
{
    pool->context->pools--;
    free(pool);
    return ZE_OK;
}

ZE(zeEventPoolGetFlags, struct ze_sim_pool *pool, uint32_t *flags)
{
    *flags = pool->flags;
    return ZE_OK;
}

/* ---- events ---- */

void ze_sim_signal(struct ze_sim_event *event, uint64_t start, uint64_t end)
{
    if (event != NULL) {
        event->start = start;
        event->end = end;
    }
}

bool ze_sim_has_times(const struct ze_sim_event *event)
{
    return (event->pool->flags & ZE_POOL_TIMESTAMPS) != 0;
}

struct ze_times ze_sim_times(const struct ze_sim_event *event)
{
    struct ze_span span = {.start = ze_sim_cycles(event->start), .end = ze_sim_cycles(event->end)};
    return (struct ze_times){.global = span, .context = span};
}

ZE(zeEventCreate, struct ze_sim_pool *pool, const struct ze_event *how, struct ze_sim_event **event)
{
    if (pool == NULL || how == NULL || how->index >= pool->count || event == NULL) {
        return ZE_BAD_ARGUMENT;
    }
    *event = calloc(1, sizeof **event);
    if (*event == NULL) {
        return ZE_NO_DEVICE_MEMORY;
    }
    (*event)->pool = pool;
    return ZE_OK;
}

ZE(zeEventDestroy, struct ze_sim_event *event)
{
    free(event);
    return ZE_OK;
}

ZE(zeEventGetEventPool, struct ze_sim_event *event, ze_handle *pool)
{
    *pool = event->pool;
    return ZE_OK;
}

ZE(zeEventHostReset, struct ze_sim_event *event)
{
    if (event->awaited > line_now()) {
        fputs("simulated Level Zero: an event is reset for which a device waits, which hangs\n", stderr);
        abort();
    }
    event->end = 0;
    return ZE_OK;
}

ZE(zeEventQueryStatus, struct ze_sim_event *event)
{
    uint64_t end = event->end;
    return end == 0 || end > line_now() ? ZE_NOT_READY : ZE_OK;
}

ZE(zeEventQueryKernelTimestamp, struct ze_sim_event *event, struct ze_times *times)
{
    if (!ze_sim_has_times(event)) {
        return ZE_BAD_ARGUMENT;
    }
    *times = ze_sim_times(event);
    return event->end == 0 || event->end > line_now() ? ZE_NOT_READY : ZE_OK;
}

static uint32_t synchronize_event(struct ze_sim_event *event, uint64_t timeout)
{
    return ze_sim_wait(event->end != 0 ? event->end : UINT64_MAX, timeout);
}

ZE(zeEventHostSynchronize, ze_handle event, uint64_t timeout)
{
    ZE_TRACE(EventHostSynchronize, ze_one, synchronize_event(event, timeout), &event);
}
