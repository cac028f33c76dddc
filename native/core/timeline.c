/* SPDX-License-Identifier: Apache-2.0 */
#include "timeline.h"
#include "lanes.h"

#include <stdlib.h>
#include <string.h>

enum {
    FIRST_ROOM = 2,
    NO_CHUNK = UINT32_MAX,
    IDLE_COUNT_SHIFT = 16,
};

/* Numbers that a segment's GPUs take: their memory, and a byte each. */
static uint32_t stride_of(uint32_t gpus)
{
    return gpus + gpus / (uint32_t)sizeof(int32_t);
}

bool timelines_new(struct timelines *timelines, uint32_t nodes, uint64_t changes)
{
    /* A chunk is half full when it is made, and the smaller ones that a node left behind, which others may use again,
     * are together no larger than the one it has. */
    uint64_t capacity = 4 * (changes + ((uint64_t)nodes << FIRST_ROOM));
    if (capacity >= NO_CHUNK)
        return false;
    *timelines = (struct timelines){.capacity = (uint32_t)capacity};
    timelines->nodes = calloc(nodes ? nodes : 1, sizeof *timelines->nodes);
    const uint64_t padded = capacity + LANES; /* the last segments are looked at with what follows them */
    timelines->starts = calloc(padded, sizeof *timelines->starts);
    timelines->cpus = calloc(padded, sizeof *timelines->cpus);
    timelines->host_memory = calloc(padded, sizeof *timelines->host_memory);
    timelines->most = calloc(padded, sizeof *timelines->most);
    timelines->idle = calloc(padded, sizeof *timelines->idle);
    timelines->holders = calloc(capacity, sizeof *timelines->holders);
    timelines->nics = calloc(capacity, sizeof *timelines->nics);
    timelines->gpu_free = malloc(capacity * stride_of(SLUICE_MAX_GPUS) * sizeof *timelines->gpu_free);
    return timelines->nodes && timelines->starts && timelines->cpus && timelines->host_memory && timelines->most &&
           timelines->idle && timelines->holders && timelines->nics && timelines->gpu_free;
}

void timelines_free(struct timelines *timelines)
{
    free(timelines->nodes);
    free(timelines->starts);
    free(timelines->cpus);
    free(timelines->host_memory);
    free(timelines->most);
    free(timelines->idle);
    free(timelines->holders);
    free(timelines->nics);
    free(timelines->gpu_free);
}

/* ---- the pool ---- */

static int32_t *amounts(const struct timelines *timelines, uint32_t segment)
{
    return &timelines->gpu_free[(size_t)segment * timelines->stride];
}

static uint8_t *unclaimed(const struct timelines *timelines, uint32_t segment)
{
    return (uint8_t *)(amounts(timelines, segment) + timelines->gpus);
}

static void move_segments(struct timelines *timelines, uint32_t to, uint32_t from, uint32_t count)
{
    memmove(&timelines->starts[to], &timelines->starts[from], count * sizeof *timelines->starts);
    memmove(&timelines->cpus[to], &timelines->cpus[from], count * sizeof *timelines->cpus);
    memmove(&timelines->host_memory[to], &timelines->host_memory[from], count * sizeof *timelines->host_memory);
    memmove(&timelines->most[to], &timelines->most[from], count * sizeof *timelines->most);
    memmove(&timelines->idle[to], &timelines->idle[from], count * sizeof *timelines->idle);
    memmove(&timelines->holders[to], &timelines->holders[from], count * sizeof *timelines->holders);
    memmove(&timelines->nics[to], &timelines->nics[from], count * sizeof *timelines->nics);
    memmove(amounts(timelines, to), amounts(timelines, from), (size_t)count * timelines->stride * sizeof(int32_t));
}

static uint32_t new_chunk(struct timelines *timelines, uint32_t room)
{
    uint32_t chunk = timelines->free_chunks[room];
    if (chunk != NO_CHUNK) {
        timelines->free_chunks[room] = timelines->holders[chunk]; /* the next free one */
        return chunk;
    }
    if (timelines->capacity - timelines->used < UINT32_C(1) << room)
        return NO_CHUNK;
    chunk = timelines->used;
    timelines->used += UINT32_C(1) << room;
    return chunk;
}

static bool grow(struct timelines *timelines, struct timeline *timeline)
{
    uint32_t chunk = new_chunk(timelines, timeline->room + 1);
    if (chunk == NO_CHUNK)
        return false;
    move_segments(timelines, chunk, timeline->first, timeline->count);
    timelines->holders[timeline->first] = timelines->free_chunks[timeline->room];
    timelines->free_chunks[timeline->room] = timeline->first;
    timeline->first = chunk;
    timeline->room++;
    return true;
}

/* ---- changes ---- */

/* What follows from the GPUs' free amounts. */
static void derive(struct timelines *timelines, const struct timeline *timeline, uint32_t segment)
{
    const int32_t *gpu_free = amounts(timelines, segment);
    int32_t idle = 0, most = 0;
    for (uint16_t left = timeline->healthy; left; left &= (uint16_t)(left - 1)) {
        int i = __builtin_ctz(left);
        if (gpu_free[i] == timeline->shape->memory.mib[i])
            idle += 1 << IDLE_COUNT_SHIFT | 1 << i;
        most = gpu_free[i] > most ? gpu_free[i] : most;
    }
    timelines->idle[segment] = idle;
    timelines->most[segment] = most;
}

/* Free CPUs, whether or not a request has the node for itself; and how both are kept. */
static int32_t cpus_of(int32_t kept)
{
    return kept & INT32_MAX;
}

static int32_t keep_cpus(int32_t cpus, bool exclusive)
{
    return exclusive ? cpus | INT32_MIN : cpus;
}

void timelines_reset(struct timelines *timelines, const struct sluice_cluster *cluster)
{
    timelines->cluster = cluster;
    timelines->used = 0;
    timelines->gpus = 4;
    for (uint32_t i = 0; i < cluster->shape_count; i++)
        while (timelines->gpus < cluster->shapes[i].gpu_count)
            timelines->gpus += 4;
    timelines->stride = stride_of(timelines->gpus);
    for (int room = 0; room < TIMELINE_ROOMS; room++)
        timelines->free_chunks[room] = NO_CHUNK;
    for (uint32_t node = 0; node < cluster->node_count; node++) {
        const struct node *row = &cluster->nodes[node];
        const struct shape *shape = sluice_shape_of(cluster, node);
        uint32_t chunk = new_chunk(timelines, FIRST_ROOM);
        timelines->nodes[node] = (struct timeline){
            .first = chunk, .count = 1, .room = FIRST_ROOM, .healthy = row->healthy & shape->all, .shape = shape};
        memcpy(amounts(timelines, chunk), cluster->gpu_free[node].mib, timelines->gpus * sizeof(int32_t));
        memcpy(unclaimed(timelines, chunk), cluster->compute_free[node].percent, timelines->gpus);
        timelines->cpus[chunk] = keep_cpus(row->cpus_free, row->exclusive);
        timelines->host_memory[chunk] = row->host_memory_free;
        timelines->starts[chunk] = 0;
        timelines->holders[chunk] = row->parts;
        timelines->nics[chunk] = cluster->nics_free[node];
        derive(timelines, &timelines->nodes[node], chunk);
    }
}

/* The node's first segment that starts at `time` or later. */
static uint32_t find_segment(const struct timelines *timelines, const struct timeline *timeline, int32_t time)
{
    uint32_t at = 0;
    for (; at < timeline->count; at += LANES) {
        const uint32_t later = LANES_ALL & ~lanes_below(&timelines->starts[timeline->first + at], time);
        if (later) {
            at += (uint32_t)__builtin_ctz(later);
            break;
        }
    }
    return at < timeline->count ? at : timeline->count;
}

/* Make a segment start at `time`; its index, or NO_CHUNK when the room is used up. */
static uint32_t split(struct timelines *timelines, uint32_t node, int32_t time)
{
    struct timeline *timeline = &timelines->nodes[node];
    uint32_t at = find_segment(timelines, timeline, time);
    if (time == TIMELINE_NEVER || (at < timeline->count && timelines->starts[timeline->first + at] == time))
        return at;
    if (timeline->count == UINT32_C(1) << timeline->room && !grow(timelines, timeline))
        return NO_CHUNK;
    /* The first segment starts at 0, so there is one before. */
    move_segments(timelines, timeline->first + at + 1, timeline->first + at, timeline->count - at);
    move_segments(timelines, timeline->first + at, timeline->first + at - 1, 1);
    timelines->starts[timeline->first + at] = time;
    timeline->count++;
    return at;
}

/* Undo a split that has become unnecessary. */
static void join(struct timelines *timelines, uint32_t node, int32_t time)
{
    struct timeline *timeline = &timelines->nodes[node];
    uint32_t at = find_segment(timelines, timeline, time), index = timeline->first + at;
    if (at == 0 || at == timeline->count || timelines->starts[index] != time)
        return;
    if (timelines->cpus[index - 1] != timelines->cpus[index] ||
        timelines->host_memory[index - 1] != timelines->host_memory[index] ||
        timelines->holders[index - 1] != timelines->holders[index] ||
        timelines->nics[index - 1] != timelines->nics[index] ||
        memcmp(amounts(timelines, index - 1), amounts(timelines, index), timelines->stride * sizeof(int32_t)) != 0)
        return;
    timeline->count--;
    move_segments(timelines, index, index + 1, timeline->count - at);
}

static bool change(struct timelines *timelines, const struct booking *booking, int32_t from, int32_t to, int32_t sign)
{
    uint32_t first = split(timelines, booking->node, from);
    uint32_t end = first == NO_CHUNK ? NO_CHUNK : split(timelines, booking->node, to);
    if (end == NO_CHUNK)
        return false;
    const struct timeline *timeline = &timelines->nodes[booking->node];
    for (uint32_t i = timeline->first + first; i < timeline->first + end; i++) {
        const bool exclusive = booking->exclusive ? sign > 0 : timelines->cpus[i] < 0;
        timelines->cpus[i] = keep_cpus(cpus_of(timelines->cpus[i]) - sign * booking->cpus, exclusive);
        timelines->host_memory[i] -= sign * booking->host_memory;
        timelines->holders[i] += (uint32_t)sign;
        timelines->nics[i] ^= booking->nics; /* free ones are taken, taken ones given back */
        if (!booking->gpus)
            continue;
        int32_t *gpu_free = amounts(timelines, i);
        uint8_t *compute_free = unclaimed(timelines, i);
        for (uint16_t left = booking->gpus; left; left &= (uint16_t)(left - 1)) {
            int gpu = __builtin_ctz(left);
            gpu_free[gpu] -= sign * (booking->share ? booking->share : timeline->shape->memory.mib[gpu]);
            compute_free[gpu] = (uint8_t)(compute_free[gpu] - sign * booking->compute);
        }
        derive(timelines, timeline, i);
    }
    return true;
}

bool timelines_take(struct timelines *timelines, const struct booking *booking, int32_t from, int32_t to)
{
    return change(timelines, booking, from, to, 1);
}

bool timelines_give(struct timelines *timelines, const struct booking *booking, int32_t from, int32_t to)
{
    if (!change(timelines, booking, from, to, -1))
        return false;
    join(timelines, booking->node, to);
    join(timelines, booking->node, from);
    return true;
}

/* ---- questions ---- */

/* The index, in its timeline, of the segment that `time` lies in. */
static uint32_t segment_at(const struct timelines *timelines, const struct timeline *timeline, int32_t time)
{
    uint32_t at = find_segment(timelines, timeline, time);
    return at < timeline->count && timelines->starts[timeline->first + at] == time ? at : at - 1;
}

/* Is there what does not depend on which GPUs? */
static inline bool roomy(const struct timelines *timelines, uint32_t segment, const struct need *need)
{
    return timelines->cpus[segment] >= need->cpus && timelines->host_memory[segment] >= need->host_memory &&
           !(need->exclusive && timelines->holders[segment]);
}

static inline bool enough(const struct shape *shape, const struct need *need, uint16_t fit)
{
    uint8_t preferred;
    if (need->preferences)
        return sluice_best_group(shape, need, need->gpus, fit, &preferred) != 0;
    if (need->gpus == 0)
        return true;
    for (int32_t others = need->gpus - 1; others > 0; others--)
        fit &= (uint16_t)(fit - 1);
    return fit != 0;
}

/* The GPUs of a node that are of a kind the need accepts, and healthy. */
static inline uint16_t eligible_gpus(const struct timeline *timeline, const struct need *need)
{
    if (need->gpus == 0)
        return 0;
    return need->any_gpu ? timeline->healthy : sluice_eligible(timeline->shape, need) & timeline->healthy;
}

/* Enough NICs for the need, of those that a segment or window has free? */
static inline bool enough_nics(const struct need *need, uint32_t accepted, uint32_t nics)
{
    return __builtin_popcount(nics & accepted) >= (int)need->nics;
}

/*
 * Which of the LANES segments from `at` on may be part of a window, as far as can be said without the GPUs' own
 * amounts, a bit each; bits beyond the timeline's end mean nothing.
 */
static inline uint32_t suiting(const struct timelines *timelines, const struct timeline *timeline,
                               const struct need *need, uint32_t accepted, uint32_t at)
{
    const uint32_t first = timeline->first + at;
    const int32_t *cpus = &timelines->cpus[first], *host_memory = &timelines->host_memory[first];
    const int32_t *gpus = need->share ? &timelines->most[first] : &timelines->idle[first];
    const int32_t gpus_least = need->share ? need->share : need->gpus << IDLE_COUNT_SHIFT;
    four_lanes fails[4];
    for (int i = 0; i < 4; i++)
        fails[i] = (lanes_same(need->cpus) > lanes_load(&cpus[4 * i])) |
                   (lanes_same(need->host_memory) > lanes_load(&host_memory[4 * i])) |
                   (lanes_same(gpus_least) > lanes_load(&gpus[4 * i]));
    uint32_t bits = LANES_ALL & ~lanes_bits(fails);
    for (uint32_t left = need->exclusive ? bits : 0; left; left &= left - 1)
        if (timelines->holders[first + (uint32_t)__builtin_ctz(left)])
            bits &= ~(left & -left);
    for (uint32_t left = need->nics ? bits : 0; left; left &= left - 1)
        if (!enough_nics(need, accepted, timelines->nics[first + (uint32_t)__builtin_ctz(left)]))
            bits &= ~(left & -left);
    return bits;
}

/* The GPUs of `fit` that have a share and so much compute free in each of the segments from `at` on that start before
 * `end`. */
static uint16_t with_share(const struct timelines *timelines, const struct timeline *timeline, uint32_t at, int32_t end,
                           int32_t share, int32_t compute, uint16_t fit)
{
    for (; at < timeline->count && timelines->starts[timeline->first + at] < end && fit; at++) {
        const int32_t *gpu_free = amounts(timelines, timeline->first + at);
        unsigned has = 0;
        for (unsigned i = 0; i < timelines->gpus; i += 4)
            has |= ((unsigned)(gpu_free[i] >= share) | (unsigned)(gpu_free[i + 1] >= share) << 1 |
                    (unsigned)(gpu_free[i + 2] >= share) << 2 | (unsigned)(gpu_free[i + 3] >= share) << 3)
                   << i;
        fit = sluice_with_compute(unclaimed(timelines, timeline->first + at), fit & (uint16_t)has, compute);
    }
    return fit;
}

/* Which GPUs have what the need asks from segment `at` on until `end`, given that each segment suits. */
static uint16_t fit_throughout(const struct timelines *timelines, const struct timeline *timeline,
                               const struct need *need, uint32_t at, int32_t end, uint16_t fit)
{
    if (need->share)
        return with_share(timelines, timeline, at, end, need->share, need->compute, fit);
    for (; at < timeline->count && timelines->starts[timeline->first + at] < end; at++)
        fit &= (uint16_t)timelines->idle[timeline->first + at];
    return fit;
}

/* Of so many NICs those that are free from segment `at` on until `end`. */
static uint32_t nics_throughout(const struct timelines *timelines, const struct timeline *timeline, uint32_t at,
                                int32_t end, uint32_t nics)
{
    for (; at < timeline->count && timelines->starts[timeline->first + at] < end; at++)
        nics &= timelines->nics[timeline->first + at];
    return nics;
}

/* A node's segments as a need sees them, LANES at a time: bit i of `suit` is of segment group + i. */
struct view {
    const struct timelines *timelines;
    const struct timeline *timeline;
    const struct need *need;
    uint32_t accepted; /* NICs */
    uint32_t group;
    uint32_t suit;
};

static void look_at(struct view *view, uint32_t segment)
{
    view->group = segment - segment % LANES;
    view->suit = suiting(view->timelines, view->timeline, view->need, view->accepted, view->group);
}

/* The first segment from `at` on that suits or does not, as is wanted; the timeline's count if none that starts before
 * `end` does. */
static inline uint32_t next_segment(struct view *view, uint32_t at, bool wanted, int32_t end)
{
    const uint32_t count = view->timeline->count;
    while (at < count && view->timelines->starts[view->timeline->first + at] < end) {
        if (at - view->group >= LANES)
            look_at(view, at);
        const uint32_t found = (wanted ? view->suit : LANES_ALL & ~view->suit) >> (at - view->group);
        if (found) {
            at += (uint32_t)__builtin_ctz(found);
            return at < count ? at : count;
        }
        at = view->group + LANES;
    }
    return count;
}

int32_t timelines_earliest(const struct timelines *timelines, uint32_t node, const struct need *need, int32_t duration,
                           int32_t from)
{
    const struct timeline *timeline = &timelines->nodes[node];
    const int32_t *starts = &timelines->starts[timeline->first];
    const uint32_t count = timeline->count;
    const uint16_t eligible = eligible_gpus(timeline, need);
    const uint32_t accepted = need->nics ? sluice_nics_accepted(timeline->shape, need->nic_kinds, need->plane) : 0;
    if (!enough(timeline->shape, need, eligible) || !enough_nics(need, accepted, accepted))
        return TIMELINE_NEVER;
    /* If any one GPU is enough, a segment that suits has it. */
    const bool any = need->gpus == 1 && eligible == timeline->healthy && !need->preferences && !need->compute;
    uint32_t at = segment_at(timelines, timeline, from);
    struct view view = {.timelines = timelines, .timeline = timeline, .need = need, .accepted = accepted};
    look_at(&view, at);
    for (;; at++) {
        at = next_segment(&view, at, true, TIMELINE_NEVER);
        if (at == count)
            return TIMELINE_NEVER;
        const int32_t time = starts[at] > from ? starts[at] : from, end = timelines_end(time, duration);
        const uint32_t blocked = next_segment(&view, at + 1, false, end);
        if (blocked < count && starts[blocked] < end) {
            at = blocked; /* no window has room for this segment */
            continue;
        }
        if (need->nics && !enough_nics(need, accepted, nics_throughout(timelines, timeline, at, end, accepted)))
            continue;
        if (need->gpus == 0 || (any && (at + 1 == count || starts[at + 1] >= end)) ||
            enough(timeline->shape, need, fit_throughout(timelines, timeline, need, at, end, eligible)))
            return time;
    }
}

void timelines_window(const struct timelines *timelines, uint32_t node, const struct need *need, int32_t duration,
                      int32_t from, struct window *window)
{
    const struct timeline *timeline = &timelines->nodes[node];
    int32_t end = timelines_end(from, duration);
    *window = (struct window){.cpus = INT32_MAX, .host_memory = INT32_MAX, .fit = eligible_gpus(timeline, need)};
    if (need->nics)
        window->nics = sluice_nics_accepted(timeline->shape, need->nic_kinds, need->plane);
    for (int i = 0; i < SLUICE_MAX_GPUS; i++)
        window->gpu_free.mib[i] = INT32_MAX;
    uint32_t first = segment_at(timelines, timeline, from);
    for (uint32_t at = first; at < timeline->count; at++) {
        const uint32_t segment = timeline->first + at;
        if (timelines->starts[segment] >= end)
            break;
        const int32_t cpus = cpus_of(timelines->cpus[segment]), host_memory = timelines->host_memory[segment];
        window->cpus = cpus < window->cpus ? cpus : window->cpus;
        window->host_memory = host_memory < window->host_memory ? host_memory : window->host_memory;
        window->nics &= timelines->nics[segment];
        if (!need->share)
            window->fit &= (uint16_t)timelines->idle[segment];
        const int32_t *gpu_free = amounts(timelines, segment);
        for (uint32_t i = 0; i < timelines->gpus; i++)
            window->gpu_free.mib[i] = gpu_free[i] < window->gpu_free.mib[i] ? gpu_free[i] : window->gpu_free.mib[i];
    }
    if (need->share)
        window->fit = with_share(timelines, timeline, first, end, need->share, need->compute, window->fit);
}

bool timelines_fits(const struct timelines *timelines, const struct booking *booking, int32_t from, int32_t to)
{
    const struct timeline *timeline = &timelines->nodes[booking->node];
    const struct need need = {
        .cpus = booking->cpus, .host_memory = booking->host_memory, .exclusive = booking->exclusive};
    if (timelines->cluster->nodes[booking->node].state != SLUICE_NODE_UP || (booking->gpus & ~timeline->healthy))
        return false;
    uint32_t first = segment_at(timelines, timeline, from);
    for (uint32_t at = first; at < timeline->count; at++) {
        const uint32_t segment = timeline->first + at;
        if (timelines->starts[segment] >= to)
            break;
        if (!roomy(timelines, segment, &need) || (booking->nics & ~timelines->nics[segment]) ||
            (!booking->share && (booking->gpus & ~timelines->idle[segment])))
            return false;
    }
    return !booking->share ||
           with_share(timelines, timeline, first, to, booking->share, booking->compute, booking->gpus) == booking->gpus;
}

int32_t timelines_next_change(const struct timelines *timelines, uint32_t node, int32_t time)
{
    const struct timeline *timeline = &timelines->nodes[node];
    uint32_t at = find_segment(timelines, timeline, time + 1);
    return at < timeline->count ? timelines->starts[timeline->first + at] : TIMELINE_NEVER;
}
