/* SPDX-License-Identifier: Apache-2.0 */
#include "launches.h"

#include <stdatomic.h>

#include "clock.h"

static struct launches *_Atomic timing;
static atomic_uint round_now;

static _Thread_local uint64_t entered;
static _Thread_local unsigned depth, my_round;

static void begin_round(void)
{
    unsigned now_round = atomic_load_explicit(&round_now, memory_order_relaxed);
    if (my_round != now_round) { /* it may be in a call that began in another one */
        my_round = now_round;
        depth = 0;
    }
}

void launches_begin(void)
{
    begin_round();
    if (depth++ == 0) {
        entered = clock_now(CLOCK_MONOTONIC);
    }
}

void launches_end(void)
{
    struct launches *set = atomic_load_explicit(&timing, memory_order_acquire);
    begin_round();
    if (depth > 0 && --depth == 0 && set != NULL) {
        uint64_t took = clock_now(CLOCK_MONOTONIC) - entered;
        unsigned at = atomic_fetch_add(&set->count, 1);
        if (at < GOVERNOR_SAMPLES) {
            set->ns[at] = took < UINT32_MAX ? (uint32_t)took : UINT32_MAX;
        }
    }
}

void launches_time(struct launches *set)
{
    if (set != NULL) {
        atomic_store(&set->count, 0);
    }
    atomic_fetch_add(&round_now, 1);
    atomic_store(&timing, set);
}

size_t launches_timed(const struct launches *set)
{
    unsigned count = atomic_load(&set->count);
    return count < GOVERNOR_SAMPLES ? count : GOVERNOR_SAMPLES;
}
