/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What each power budget will have free from a plan's now on; see "power budgets" in sluice/core.h. Times are whole
 * seconds from now, as in timeline.h. Everything lies in memory of fixed size.
 *
 * A change of what is used is moved outwards to a grid that gets coarser with its distance (a 64th of it), so that a
 * budget has a bounded number of segments however many jobs there are. The grid's points are multiples of powers of two
 * of the caller's clock: from plan to plan the same change never moves further outwards.
 */
#ifndef SLUICE_CORE_POWER_H
#define SLUICE_CORE_POWER_H

#include "cluster.h"

enum {
    POWER_EXACT_S = 128, /* up to which the grid is of seconds */
    POWER_STEPS = 64,    /* of the grid for each doubling of the distance */
    POWER_SEGMENTS = 4096,
};

/* What is free from a segment's start to the next one's. */
struct power_profile {
    int64_t left[POWER_SEGMENTS]; /* watts; below 0: more is used than there is */
    int32_t starts[POWER_SEGMENTS];
    uint32_t count;
};

struct power_budget {
    int64_t watts, base, lowered, lowered_until_s;
    struct sluice_power_hours hours[SLUICE_POWER_MAX_HOURS];
    uint32_t hour_count;
};

struct sluice_power {
    uint32_t count, max_nodes;
    int64_t week_s, now_s;
    struct power_budget budgets[SLUICE_POWER_MAX_BUDGETS];
    struct power_profile *profiles; /* [SLUICE_POWER_MAX_BUDGETS] */
    uint64_t *counting;             /* per node: the budgets that it belongs to */
    uint64_t everywhere;            /* those that every node belongs to */

    /* Of the need that was asked for last: the first time at which a budget has enough for one node's share. */
    int32_t first[SLUICE_POWER_MAX_BUDGETS];
    uint64_t first_known;
    int64_t first_watts;
    int32_t first_duration;
};

/* For a new plan: nothing is used. */
void power_reset(struct sluice_power *power, int64_t now_s);

/* Use so many watts of some budgets, or give them back. */
void power_change(struct sluice_power *power, uint64_t budgets, int64_t watts, int32_t from, int32_t to);

/* The first time from `from` on at which all of the budgets have so much for `duration`; TIMELINE_NEVER if there is
 * none. */
int32_t power_earliest(const struct sluice_power *power, uint64_t budgets, int64_t watts, int32_t duration,
                       int32_t from);

/* The least that a budget has from `from` to `to`. */
int64_t power_left(const struct sluice_power *power, uint32_t budget, int32_t from, int32_t to);

/* The next time after `time` at which one of the budgets changes; TIMELINE_NEVER if there is none. */
int32_t power_next_change(const struct sluice_power *power, uint64_t budgets, int32_t time);

/* From now on power_bound is about needs of so many watts on a node. */
void power_ask(struct sluice_power *power, int64_t watts, int32_t duration);

/* A lower bound of the time at which these budgets have what power_ask said. */
int32_t power_bound(struct sluice_power *power, uint64_t budgets);

#endif
