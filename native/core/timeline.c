/* SPDX-License-Identifier: Apache-2.0 */
#include "timeline.h"

#include <stdlib.h>
#include <string.h>

enum { FIRST_ROOM = 2, NO_CHUNK = UINT32_MAX };

bool timelines_new(struct timelines *timelines, uint32_t nodes, uint64_t changes)
{
    /* A chunk is half full when it is made, and the smaller ones that a node left behind, which others may use again,
     * are together no larger than the one it has. */
    uint64_t capacity = 4 * (changes + ((uint64_t)nodes << FIRST_ROOM));
    if (capacity >= NO_CHUNK)
        return false;
    *timelines = (struct timelines){.capacity = (uint32_t)capacity};
    timelines->nodes = calloc(nodes ? nodes : 1, sizeof *timelines->nodes);
    timelines->starts = calloc(capacity, sizeof *timelines->starts);
    timelines->segments = calloc(capacity, sizeof *timelines->segments);
    timelines->holders = calloc(capacity, sizeof *timelines->holders);
    timelines->gpu_free = malloc(capacity * SLUICE_MAX_GPUS * sizeof *timelines->gpu_free);
    return timelines->nodes && timelines->starts && timelines->segments && timelines->holders && timelines->gpu_free;
}

void timelines_free(struct timelines *timelines)
{
    free(timelines->nodes);
    free(timelines->starts);
    free(timelines->segments);
    free(timelines->holders);
    free(timelines->gpu_free);
}

/* ---- the pool ---- */

static int32_t *amounts(const struct timelines *timelines, uint32_t segment)
{
    return &timelines->gpu_free[(size_t)segment * timelines->gpus];
}

static void move_segments(struct timelines *timelines, uint32_t to, uint32_t from, uint32_t count)
{
    memmove(&timelines->starts[to], &timelines->starts[from], count * sizeof *timelines->starts);
    memmove(&timelines->segments[to], &timelines->segments[from], count * sizeof *timelines->segments);
    memmove(&timelines->holders[to], &timelines->holders[from], count * sizeof *timelines->holders);
    memmove(amounts(timelines, to), amounts(timelines, from), (size_t)count * timelines->gpus * sizeof(int32_t));
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
static void derive(const struct timeline *timeline, struct segment *segment, const int32_t *gpu_free)
{
    segment->idle = 0;
    segment->most = 0;
    for (uint16_t left = timeline->healthy; left; left &= (uint16_t)(left - 1)) {
        int i = __builtin_ctz(left);
        segment->idle |= (uint16_t)((gpu_free[i] == timeline->shape->memory.mib[i]) << i);
        segment->most = gpu_free[i] > segment->most ? gpu_free[i] : segment->most;
    }
}

void timelines_reset(struct timelines *timelines, const struct sluice_cluster *cluster)
{
    timelines->cluster = cluster;
    timelines->used = 0;
    timelines->gpus = 4;
    for (uint32_t i = 0; i < cluster->shape_count; i++)
        while (timelines->gpus < cluster->shapes[i].gpu_count)
            timelines->gpus += 4;
    for (int room = 0; room < TIMELINE_ROOMS; room++)
        timelines->free_chunks[room] = NO_CHUNK;
    for (uint32_t node = 0; node < cluster->node_count; node++) {
        const struct node *row = &cluster->nodes[node];
        const struct shape *shape = sluice_shape_of(cluster, node);
        uint32_t chunk = new_chunk(timelines, FIRST_ROOM);
        timelines->nodes[node] = (struct timeline){
            .first = chunk, .count = 1, .room = FIRST_ROOM, .healthy = row->healthy & shape->all, .shape = shape};
        memcpy(amounts(timelines, chunk), cluster->gpu_free[node].mib, timelines->gpus * sizeof(int32_t));
        struct segment *segment = &timelines->segments[chunk];
        *segment = (struct segment){
            .cpus = row->cpus_free,
            .host_memory = row->host_memory_free,
            .in_use = row->parts > 0,
            .exclusive = row->exclusive,
        };
        timelines->starts[chunk] = 0;
        timelines->holders[chunk] = row->parts;
        derive(&timelines->nodes[node], segment, amounts(timelines, chunk));
    }
}

/* The node's first segment that starts at `time` or later. */
static uint32_t find_segment(const struct timelines *timelines, const struct timeline *timeline, int32_t time)
{
    const int32_t *starts = &timelines->starts[timeline->first];
    uint32_t before = 0; /* counted rather than bisected: no branch to guess wrong */
    for (uint32_t i = 0; i < timeline->count; i++)
        before += starts[i] < time;
    return before;
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

/* Undo a split that has become needless. */
static void join(struct timelines *timelines, uint32_t node, int32_t time)
{
    struct timeline *timeline = &timelines->nodes[node];
    uint32_t at = find_segment(timelines, timeline, time), index = timeline->first + at;
    if (at == 0 || at == timeline->count || timelines->starts[index] != time)
        return;
    const struct segment *a = &timelines->segments[index - 1], *b = &timelines->segments[index];
    if (a->cpus != b->cpus || a->host_memory != b->host_memory || a->exclusive != b->exclusive ||
        timelines->holders[index - 1] != timelines->holders[index] ||
        memcmp(amounts(timelines, index - 1), amounts(timelines, index), timelines->gpus * sizeof(int32_t)) != 0)
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
        struct segment *segment = &timelines->segments[i];
        segment->cpus -= sign * booking->cpus;
        segment->host_memory -= sign * booking->host_memory;
        timelines->holders[i] += (uint32_t)sign;
        segment->in_use = timelines->holders[i] > 0;
        if (booking->exclusive)
            segment->exclusive = sign > 0;
        if (!booking->gpus)
            continue;
        int32_t *gpu_free = amounts(timelines, i);
        for (uint16_t left = booking->gpus; left; left &= (uint16_t)(left - 1)) {
            int gpu = __builtin_ctz(left);
            gpu_free[gpu] -= sign * (booking->share ? booking->share : timeline->shape->memory.mib[gpu]);
        }
        derive(timeline, segment, gpu_free);
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
static inline bool roomy(const struct segment *segment, const struct need *need)
{
    return segment->cpus >= need->cpus && segment->host_memory >= need->host_memory &&
           !(need->exclusive ? segment->in_use : segment->exclusive);
}

static inline bool enough(const struct shape *shape, const struct need *need, uint16_t fit)
{
    uint8_t wish;
    if (need->wishes)
        return sluice_best_group(shape, need, need->gpus, fit, &wish) != 0;
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

/* May the segment be part of a window, as far as can be said without the GPUs' own amounts? */
static inline bool suits(const struct segment *segment, const struct timeline *timeline, const struct need *need,
                         uint16_t eligible)
{
    return roomy(segment, need) && segment->most >= need->share &&
           (need->share || enough(timeline->shape, need, segment->idle & eligible));
}

/* The GPUs of `fit` that have a share free in each of the segments from `at` on that start before `end`. */
static uint16_t with_share(const struct timelines *timelines, const struct timeline *timeline, uint32_t at, int32_t end,
                           int32_t share, uint16_t fit)
{
    for (; at < timeline->count && timelines->starts[timeline->first + at] < end && fit; at++) {
        const int32_t *gpu_free = amounts(timelines, timeline->first + at);
        unsigned has = 0;
        for (unsigned i = 0; i < timelines->gpus; i += 4)
            has |= ((unsigned)(gpu_free[i] >= share) | (unsigned)(gpu_free[i + 1] >= share) << 1 |
                    (unsigned)(gpu_free[i + 2] >= share) << 2 | (unsigned)(gpu_free[i + 3] >= share) << 3)
                   << i;
        fit &= (uint16_t)has;
    }
    return fit;
}

int32_t timelines_earliest(const struct timelines *timelines, uint32_t node, const struct need *need, int32_t duration,
                           int32_t from)
{
    const struct timeline *timeline = &timelines->nodes[node];
    const struct segment *segments = &timelines->segments[timeline->first];
    const int32_t *starts = &timelines->starts[timeline->first];
    const uint32_t count = timeline->count;
    const uint16_t eligible = eligible_gpus(timeline, need);
    if (!enough(timeline->shape, need, eligible))
        return TIMELINE_NEVER;
    for (uint32_t first = segment_at(timelines, timeline, from);; first++) {
        while (first < count && !suits(&segments[first], timeline, need, eligible))
            first++;
        if (first == count)
            return TIMELINE_NEVER;
        int32_t time = starts[first] > from ? starts[first] : from, end = timelines_end(time, duration);
        uint16_t fit = need->share ? eligible : segments[first].idle & eligible;
        uint32_t at = first + 1;
        for (; at < count && starts[at] < end; at++) {
            if (!suits(&segments[at], timeline, need, eligible)) {
                first = at; /* no window has room for this segment */
                break;
            }
            if (need->share)
                continue;
            fit &= segments[at].idle;
            if (!enough(timeline->shape, need, fit))
                break;
        }
        if (at < count && starts[at] < end)
            continue;
        /* Which GPUs have the share throughout, unless it is plain that one does. */
        bool plain = need->gpus == 1 && at == first + 1 && eligible == timeline->healthy && !need->wishes;
        if (!need->share || plain ||
            enough(timeline->shape, need, with_share(timelines, timeline, first, end, need->share, fit)))
            return time;
    }
}

void timelines_window(const struct timelines *timelines, uint32_t node, const struct need *need, int32_t duration,
                      int32_t from, struct window *window)
{
    const struct timeline *timeline = &timelines->nodes[node];
    int32_t end = timelines_end(from, duration);
    *window = (struct window){.cpus = INT32_MAX, .host_memory = INT32_MAX, .fit = eligible_gpus(timeline, need)};
    for (int i = 0; i < SLUICE_MAX_GPUS; i++)
        window->gpu_free.mib[i] = INT32_MAX;
    uint32_t first = segment_at(timelines, timeline, from);
    for (uint32_t at = first; at < timeline->count; at++) {
        const struct segment *segment = &timelines->segments[timeline->first + at];
        if (timelines->starts[timeline->first + at] >= end)
            break;
        window->cpus = segment->cpus < window->cpus ? segment->cpus : window->cpus;
        window->host_memory = segment->host_memory < window->host_memory ? segment->host_memory : window->host_memory;
        if (!need->share)
            window->fit &= segment->idle;
        const int32_t *gpu_free = amounts(timelines, timeline->first + at);
        for (uint32_t i = 0; i < timelines->gpus; i++)
            window->gpu_free.mib[i] = gpu_free[i] < window->gpu_free.mib[i] ? gpu_free[i] : window->gpu_free.mib[i];
    }
    if (need->share)
        window->fit = with_share(timelines, timeline, first, end, need->share, window->fit);
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
        const struct segment *segment = &timelines->segments[timeline->first + at];
        if (timelines->starts[timeline->first + at] >= to)
            break;
        if (!roomy(segment, &need) || (!booking->share && (booking->gpus & ~segment->idle)))
            return false;
    }
    return !booking->share ||
           with_share(timelines, timeline, first, to, booking->share, booking->gpus) == booking->gpus;
}

int32_t timelines_next_change(const struct timelines *timelines, uint32_t node, int32_t time)
{
    const struct timeline *timeline = &timelines->nodes[node];
    uint32_t at = find_segment(timelines, timeline, time + 1);
    return at < timeline->count ? timelines->starts[timeline->first + at] : TIMELINE_NEVER;
}
