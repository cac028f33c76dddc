/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What each node will have free from now on: for every node a list of segments of time in which nothing changes. Times
 * are whole seconds from the plan's now, 0 to TIMELINE_NEVER. Everything lies in memory of fixed size.
 */
#ifndef SLUICE_CORE_TIMELINE_H
#define SLUICE_CORE_TIMELINE_H

#include "cluster.h"

#define TIMELINE_NEVER INT32_MAX

/*
 * One node's segments: segments[first .. first + count) of the pool, in a chunk of 1 << room; and of the node what
 * questions need, so that it lies in the same cache line.
 */
struct timeline {
    uint32_t first;
    uint32_t count;
    uint16_t room;
    uint16_t healthy; /* GPUs */
    const struct shape *shape;
};

enum { TIMELINE_ROOMS = 32 };

struct timelines {
    const struct sluice_cluster *cluster;
    struct timeline *nodes;
    /*
     * What is free from a segment's start to the next one's, the last one's for ever. A question reads few of these
     * of many segments, LANES at a time, so each has an array of its own. `most` and `idle` are of healthy GPUs only.
     */
    int32_t *starts;
    int32_t *cpus; /* below 0 while a request has the node for itself */
    int32_t *host_memory;
    int32_t *most; /* MiB of the GPU that has most */
    int32_t *idle; /* GPUs: their number above a bit for each */
    uint32_t *holders;
    uint32_t *nics;          /* free NICs, a bit each */
    int32_t *gpu_free;       /* per segment `gpus` numbers: free MiB, also of GPUs that are not healthy; then as many
                                bytes: percent of their compute that is not claimed */
    uint32_t gpus;           /* the most that a node has, a multiple of 4 */
    uint32_t stride;         /* of gpu_free, in numbers */
    uint32_t capacity, used; /* segments */
    uint32_t free_chunks[TIMELINE_ROOMS];
};

/* What is booked on one node. */
struct booking {
    uint32_t node;
    int32_t share; /* MiB of each of `gpus`; 0: whole */
    int32_t cpus;
    int32_t host_memory;
    uint16_t gpus;
    bool exclusive;
    uint8_t compute; /* percent of each of `gpus` */
    uint32_t nics;
    int32_t watts; /* of each of `gpus`; this and what follows does not matter to timelines */
    uint64_t power_budgets;
};

/* A node as it is over a window of time: the least of everything. */
struct window {
    int32_t cpus;
    int32_t host_memory;
    uint16_t fit;  /* GPUs that can take part in the request throughout */
    uint32_t nics; /* of an accepted kind, and in the need's plane, that are free throughout */
    struct gpu_amounts gpu_free;
};

/* Room for up to `changes` moments at which something changes, on up to `nodes` nodes. */
bool timelines_new(struct timelines *timelines, uint32_t nodes, uint64_t changes);
void timelines_free(struct timelines *timelines);

/* Everything as the cluster is now, for ever. */
void timelines_reset(struct timelines *timelines, const struct sluice_cluster *cluster);

/* Book from `from` to `to`, or give back what is booked then. False when the room is used up. */
bool timelines_take(struct timelines *timelines, const struct booking *booking, int32_t from, int32_t to);
bool timelines_give(struct timelines *timelines, const struct booking *booking, int32_t from, int32_t to);

/*
 * The first time from `from` on at which the node can take its share of the need (need->gpus GPUs) for `duration`
 * without a break; TIMELINE_NEVER if there is none. Always `from` or the start of a segment. The need's preferences are
 * required ones only.
 */
int32_t timelines_earliest(const struct timelines *timelines, uint32_t node, const struct need *need, int32_t duration,
                           int32_t from);

/* The node will be used soon. */
static inline void timelines_prefetch(const struct timelines *timelines, uint32_t node)
{
    const uint32_t first = timelines->nodes[node].first;
    __builtin_prefetch(&timelines->starts[first]);
    __builtin_prefetch(&timelines->cpus[first]);
    __builtin_prefetch(&timelines->host_memory[first]);
    __builtin_prefetch(&timelines->most[first]);
    __builtin_prefetch(&timelines->idle[first]);
}

/* The node over a window in which it can take the need. */
void timelines_window(const struct timelines *timelines, uint32_t node, const struct need *need, int32_t duration,
                      int32_t from, struct window *window);

/* Does the booking fit with all others? */
bool timelines_fits(const struct timelines *timelines, const struct booking *booking, int32_t from, int32_t to);

/* The start of the first segment that starts after `time`; TIMELINE_NEVER if there is none. */
int32_t timelines_next_change(const struct timelines *timelines, uint32_t node, int32_t time);

/* time + duration, no later than never */
static inline int32_t timelines_end(int32_t time, int32_t duration)
{
    int64_t end = (int64_t)time + duration;
    return end < TIMELINE_NEVER ? (int32_t)end : TIMELINE_NEVER;
}

#endif
