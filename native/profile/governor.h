/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether tracing may go on: it costs the process no more than a part of its time. A bucket fills with the budget and
 * is emptied by what tracing costs; empty, collection stops until some of it is full again. No clock of its own.
 */
#ifndef SLUICE_PROFILE_GOVERNOR_H
#define SLUICE_PROFILE_GOVERNOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { GOVERNOR_SAMPLES = 64 };

struct governor {
    uint32_t budget;    /* millionths */
    uint64_t price;     /* ns that an event costs the thread that causes it */
    int64_t credit;     /* ns; below 0: overdrawn */
    uint64_t looked;    /* ns, when credit was last brought up to date */
    uint64_t collected; /* ns of collection, and events in them: their rate */
    uint64_t events;
    uint64_t cost; /* ns, in all */
    uint64_t rate; /* what collection cost when it was last looked at: ns in a second */
    bool on;
};

/* Begins with collection on, and little to spend. */
void governor_start(struct governor *governor, uint32_t budget, uint64_t now);
/*
 * What was spent since: events, and time of our own threads; `usable` is the time that has passed, as far as the budget
 * is a part of it. Decides about `on`.
 */
void governor_look(struct governor *governor, uint64_t now, uint64_t usable, uint64_t events, uint64_t own_ns);
/* When to look again: before the credit is gone, at the rate of now. ns */
uint64_t governor_interval(const struct governor *governor);
/* Events that a span of time without collection would have had. */
uint64_t governor_estimate(const struct governor *governor, uint64_t ns);
/*
 * The price by two sets of measured durations of the same call, with and without collection; both are sorted. Too few
 * of either say nothing, and are answered with false.
 */
bool governor_measure(struct governor *governor, uint32_t *without, size_t without_count, uint32_t *with,
                      size_t with_count);

#endif
