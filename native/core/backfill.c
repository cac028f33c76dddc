/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backfill: which pending job starts when and where. The rules are in sluice/core.h; timeline.c keeps what each node
 * has free over time, and first_starts.c finds the first start without asking every node.
 */
#include "first_starts.h"
#include "sort.h"
#include "timeline.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum {
    DEFAULT_JOBS = 16384,
    DEFAULT_RUNNING = 65536,
    MAX_PARTS = 16777216,
};

/* A node that takes part in a plan for several: its first start, and the switch it counts for. */
struct member {
    uint32_t position;
    uint32_t site;
    uint32_t lower; /* where these are limited (need->lower_most): the switch one level below the site; else 0 */
    uint32_t leaf;  /* of segments, and below limited switches; else 0 */
    int32_t start;
    int32_t units;
};

/* With how many watts a job is planned. */
enum draw {
    DRAW_WANTED,
    DRAW_LEAST,
    DRAW_NONE, /* as if there were no budgets */
};

struct sluice_backfill {
    uint32_t max_jobs, max_running, max_planned, max_nodes;
    struct timelines timelines;
    struct first_starts first_starts;

    struct member *members, *member_scratch; /* [max_nodes] */
    int32_t *earliest, *earliest_scratch;    /* [max_nodes] a heap of starts; sorted ones of segments */
    struct lower *lower, *lower_scratch;     /* [max_nodes] of one site */
    struct sluice_part *parts_read;          /* [max_nodes] of one running allocation */

    uint64_t *seen; /* hash set of running allocations */
    size_t seen_size;

    struct sluice_backfill_start *starts; /* [max_jobs] */
    struct booking *planned;              /* [max_planned], in the order of starts[].first_part */
    struct booking *booking_scratch;      /* [max_nodes] */
    uint32_t planned_count;
    bool *held; /* [max_jobs] the job's earlier reservation is booked */

    struct sluice_power *power;                   /* NULL: no budgets */
    int64_t watts_left[SLUICE_POWER_MAX_BUDGETS]; /* while nodes are chosen */
    enum draw draw;                               /* what jobs are read with */
};

/* ---- making and freeing ---- */

enum sluice_error sluice_backfill_new(const struct sluice_backfill_config *config, uint32_t max_nodes,
                                      struct sluice_backfill **backfill, struct sluice_error_text *text)
{
    if (!backfill)
        return sluice_fail(text, SLUICE_ERROR_INVALID, "no place for the backfill's handle");
    uint32_t jobs = config && config->max_jobs ? config->max_jobs : DEFAULT_JOBS;
    uint32_t running = config && config->max_running ? config->max_running : DEFAULT_RUNNING;
    uint64_t planned = config && config->max_planned ? config->max_planned : 2 * (uint64_t)jobs;
    if (max_nodes == 0 || max_nodes > SLUICE_MAX_NODES)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "backfill for %" PRIu32 " nodes: 1 to %d", max_nodes,
                           SLUICE_MAX_NODES);
    if (jobs > SLUICE_BACKFILL_MAX_JOBS || running > MAX_PARTS || planned > MAX_PARTS)
        return sluice_fail(text, SLUICE_ERROR_RANGE,
                           "backfill of %" PRIu32 " jobs, %" PRIu32 " running and %" PRIu64
                           " planned parts: at most %d, %d and %d",
                           jobs, running, planned, SLUICE_BACKFILL_MAX_JOBS, MAX_PARTS, MAX_PARTS);
    struct sluice_backfill *made = calloc(1, sizeof *made);
    if (!made)
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "no memory for a backfill");
    made->max_jobs = jobs;
    made->max_running = running;
    made->max_planned = (uint32_t)planned;
    made->max_nodes = max_nodes;
    made->seen_size = 64;
    while (made->seen_size < 2 * (size_t)running)
        made->seen_size *= 2;
    made->members = calloc(max_nodes, sizeof *made->members);
    made->member_scratch = calloc(max_nodes, sizeof *made->member_scratch);
    made->earliest = calloc(max_nodes, sizeof *made->earliest);
    made->earliest_scratch = calloc(max_nodes, sizeof *made->earliest_scratch);
    made->lower = calloc(max_nodes, sizeof *made->lower);
    made->lower_scratch = calloc(max_nodes, sizeof *made->lower_scratch);
    made->parts_read = calloc(max_nodes, sizeof *made->parts_read);
    made->seen = calloc(made->seen_size, sizeof *made->seen);
    made->starts = calloc(jobs, sizeof *made->starts);
    made->planned = calloc(planned, sizeof *made->planned);
    made->booking_scratch = calloc(max_nodes, sizeof *made->booking_scratch);
    made->held = calloc(jobs, sizeof *made->held);
    /* A running part has an end; a planned one a start and an end, and may be booked together with the one that it
     * replaces. */
    bool fine = timelines_new(&made->timelines, max_nodes, running + 4 * planned) &&
                first_starts_new(&made->first_starts, &made->timelines, max_nodes) && made->members &&
                made->member_scratch && made->earliest && made->earliest_scratch && made->lower &&
                made->lower_scratch && made->parts_read && made->seen && made->starts && made->planned &&
                made->booking_scratch && made->held;
    if (!fine) {
        sluice_backfill_free(made);
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "no memory for a backfill of %" PRIu32 " jobs", jobs);
    }
    *backfill = made;
    return SLUICE_OK;
}

void sluice_backfill_free(struct sluice_backfill *backfill)
{
    if (!backfill)
        return;
    timelines_free(&backfill->timelines);
    first_starts_free(&backfill->first_starts);
    free(backfill->members);
    free(backfill->member_scratch);
    free(backfill->earliest);
    free(backfill->earliest_scratch);
    free(backfill->lower);
    free(backfill->lower_scratch);
    free(backfill->parts_read);
    free(backfill->seen);
    free(backfill->starts);
    free(backfill->planned);
    free(backfill->booking_scratch);
    free(backfill->held);
    free(backfill);
}

void sluice_backfill_set_power(struct sluice_backfill *backfill, struct sluice_power *power)
{
    backfill->power = power;
    backfill->first_starts.power = power;
}

/* ---- watts ---- */

/* Those of a job's budgets that a node belongs to. */
static uint64_t budgets_of(const struct sluice_backfill *backfill, uint64_t budgets, uint32_t node)
{
    return backfill->power ? backfill->power->counting[node] & budgets : 0;
}

/* What budgets have for a job in a window, before its first node is chosen. */
static void begin_choice(struct sluice_backfill *backfill, const struct need *need, int32_t time, int32_t duration)
{
    for (uint64_t left = backfill->power && need->watts ? need->power_budgets : 0; left; left &= left - 1) {
        const uint32_t budget = (uint32_t)__builtin_ctzll(left);
        backfill->watts_left[budget] = power_left(backfill->power, budget, time, timelines_end(time, duration));
    }
}

/* As many GPUs of a node, up to `gpus`, as budgets still have watts for. */
static int32_t powered_gpus(const struct sluice_backfill *backfill, const struct need *need, uint32_t node,
                            int32_t gpus)
{
    for (uint64_t left = need->watts ? budgets_of(backfill, need->power_budgets, node) : 0; left; left &= left - 1) {
        const int64_t most = backfill->watts_left[__builtin_ctzll(left)] / need->watts;
        gpus = most < gpus ? (int32_t)(most < 0 ? 0 : most) : gpus;
    }
    return gpus;
}

/* So many GPUs of a node are chosen. */
static void choose_watts(struct sluice_backfill *backfill, const struct need *need, uint32_t node, int32_t gpus)
{
    for (uint64_t left = budgets_of(backfill, need->power_budgets, node); left; left &= left - 1)
        backfill->watts_left[__builtin_ctzll(left)] -= (int64_t)need->watts * gpus;
}

/* Use so many watts more of each GPU of a booking; below 0: fewer. */
static void draw_more(struct sluice_backfill *backfill, const struct booking *booking, int32_t watts, int32_t from,
                      int32_t to)
{
    if (backfill->power)
        power_change(backfill->power, budgets_of(backfill, booking->power_budgets, booking->node),
                     (int64_t)watts * sluice_count(booking->gpus), from, to);
}

/* Book a share of a node with its watts, or give it back. False when the room is used up. */
static bool take(struct sluice_backfill *backfill, const struct booking *booking, int32_t from, int32_t to)
{
    draw_more(backfill, booking, booking->watts, from, to);
    return timelines_take(&backfill->timelines, booking, from, to);
}

static bool give(struct sluice_backfill *backfill, const struct booking *booking, int32_t from, int32_t to)
{
    draw_more(backfill, booking, -booking->watts, from, to);
    return timelines_give(&backfill->timelines, booking, from, to);
}

static bool fits(const struct sluice_backfill *backfill, const struct booking *booking, int32_t from, int32_t to)
{
    if (!timelines_fits(&backfill->timelines, booking, from, to))
        return false;
    if (!backfill->power)
        return true;
    const uint64_t budgets = budgets_of(backfill, booking->power_budgets, booking->node);
    const int64_t watts = (int64_t)booking->watts * sluice_count(booking->gpus);
    return power_earliest(backfill->power, budgets, watts, to - from, from) == from;
}

/* ---- several nodes ---- */

/* What one node gives of a request; where GPUs are asked in total, the least that it may give. */
static struct need share_of(const struct need *need)
{
    struct need share = *need;
    if (need->total) {
        share.total = false;
        share.gpus = 1;
        share.cpus = need->cpus + need->cpus_per_gpu;
        share.host_memory = need->host_memory + need->host_memory_per_gpu;
        share.nics = need->nics + need->nics_per_gpu;
        share.nics_per_gpu = 0;
    }
    return share;
}

/* The switch that a node counts for: the highest one of an allowed level; 0 where that does not matter. */
static uint32_t site_of(const struct sluice_cluster *cluster, const struct need *need, uint32_t node)
{
    uint32_t site = cluster->nodes[node].leaf;
    if (need->segment > 1 && site == cluster->unplaced)
        return NONE;
    if (need->one_switch != SLUICE_REQUIRED)
        return 0;
    if (site == cluster->unplaced || cluster->switches[site].height > need->switch_level)
        return NONE;
    for (uint32_t above = cluster->switches[site].parent;
         above && cluster->switches[above].height <= need->switch_level; above = cluster->switches[above].parent)
        site = above;
    return site;
}

/* The switch one level below the site that a node counts for; the site itself where that is lower than the request
 * allows. */
static uint32_t lower_of(const struct sluice_cluster *cluster, const struct need *need, uint32_t node, uint32_t site)
{
    uint32_t at = cluster->nodes[node].leaf;
    while (at != site && cluster->switches[at].height + 1 < need->switch_level)
        at = cluster->switches[at].parent;
    return at;
}

static int by_site(const void *a, const void *b)
{
    const struct member *x = a, *y = b;
    if (x->site != y->site)
        return x->site < y->site ? -1 : 1;
    if (x->lower != y->lower)
        return x->lower < y->lower ? -1 : 1;
    if (x->leaf != y->leaf)
        return x->leaf < y->leaf ? -1 : 1;
    return (x->position > y->position) - (x->position < y->position);
}

/* All nodes that may take part, by site, leaf switch of segments and then rank, with a lower bound of their first
 * start. */
static uint32_t gather_members(struct sluice_backfill *backfill, const struct need *need, const struct kind *kind)
{
    const struct first_starts *first_starts = &backfill->first_starts;
    const struct sluice_cluster *cluster = backfill->timelines.cluster;
    uint32_t count = 0;
    for (uint32_t position = 0; position < first_starts->node_count; position++) {
        uint32_t node = first_starts->node_at[position], site = site_of(cluster, need, node);
        uint32_t leaf = need->segment > 1 || need->lower_most ? cluster->nodes[node].leaf : 0;
        int32_t bound = first_starts_bound(first_starts, kind, position);
        if (site != NONE && bound != TIMELINE_NEVER)
            backfill->members[count++] =
                (struct member){.position = position,
                                .site = site,
                                .lower = need->lower_most ? lower_of(cluster, need, node, site) : 0,
                                .leaf = leaf,
                                .start = bound};
    }
    if (need->one_switch == SLUICE_REQUIRED || need->segment > 1)
        sluice_sort(backfill->members, backfill->member_scratch, count, sizeof *backfill->members, by_site);
    return count;
}

/* Put `value` in the place of the largest of a heap's `count` values, its first. */
static void replace_largest(int32_t *heap, uint32_t count, int32_t value)
{
    uint32_t at = 0;
    for (uint32_t below = 1; below < count; below = 2 * at + 1) {
        below += below + 1 < count && heap[below + 1] > heap[below];
        if (heap[below] <= value)
            break;
        heap[at] = heap[below];
        at = below;
    }
    heap[at] = value;
}

/* Members of one site follow each other: the end of the site that begins at `first`. */
static uint32_t end_of_site(const struct sluice_backfill *backfill, uint32_t first, uint32_t count)
{
    uint32_t end = first;
    while (end < count && backfill->members[end].site == backfill->members[first].site)
        end++;
    return end;
}

/* Of members of one site: the end of the leaf switch that begins at `first`. */
static uint32_t end_of_leaf(const struct sluice_backfill *backfill, uint32_t first, uint32_t end)
{
    uint32_t at = first;
    while (at < end && backfill->members[at].leaf == backfill->members[first].leaf)
        at++;
    return at;
}

static int by_time(const void *a, const void *b)
{
    const int32_t *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

/* The first time by which a site, members[first .. end), has `segments` whole segments that might start. */
static int32_t segments_of_site(struct sluice_backfill *backfill, uint32_t first, uint32_t end, uint32_t segment,
                                uint32_t segments)
{
    int32_t *times = backfill->earliest; /* of segments, from the front; behind them the starts of one leaf's nodes */
    uint32_t found = 0;
    for (uint32_t at = first, next; at < end; at = next) {
        next = end_of_leaf(backfill, at, end);
        int32_t *starts = &times[found];
        for (uint32_t i = at; i < next; i++)
            starts[i - at] = backfill->members[i].start;
        sluice_sort(starts, backfill->earliest_scratch, next - at, sizeof *starts, by_time);
        for (uint32_t last = segment - 1; last < next - at; last += segment)
            times[found++] = starts[last];
    }
    if (found < segments)
        return TIMELINE_NEVER;
    sluice_sort(times, backfill->earliest_scratch, found, sizeof *times, by_time);
    return times[segments - 1];
}

/* The first time by which some site has all segments of the request that might start. */
static int32_t first_segments(struct sluice_backfill *backfill, uint32_t count, const struct need *need)
{
    int32_t best = TIMELINE_NEVER;
    for (uint32_t first = 0, end; first < count; first = end) {
        end = end_of_site(backfill, first, count);
        int32_t time = segments_of_site(backfill, first, end, need->segment, need->nodes_min / need->segment);
        best = time < best ? time : best;
    }
    return best;
}

/* Of one site, members[first .. end), what is below each limited switch and can start by `time`: how many of these
 * switches the request fills then (backfill->lower), 0 if it does not fit. */
static uint32_t fill_by(struct sluice_backfill *backfill, const struct need *need, uint32_t first, uint32_t end,
                        int32_t time)
{
    const struct sluice_cluster *cluster = backfill->timelines.cluster;
    uint32_t count = 0, leaf = 0, leaves = 0;
    for (uint32_t i = first; i < end; i++) {
        const struct member *member = &backfill->members[i];
        if (member->start > time)
            continue;
        if (!count || backfill->lower[count - 1].id != member->lower) {
            backfill->lower[count++] = (struct lower){.id = member->lower};
            leaf = leaves = 0;
        }
        struct lower *lower = &backfill->lower[count - 1];
        lower->nodes++;
        leaves += member->leaf != leaf;
        leaf = member->leaf;
        lower->whole = leaves == cluster->switches[member->lower].leaves;
    }
    return sluice_fill_lower(backfill->lower, backfill->lower_scratch, count, need->lower_most, need->nodes_min);
}

/* The first time by which some site's limited switches might hold the request: more nodes never hold less. */
static int32_t first_filled(struct sluice_backfill *backfill, uint32_t count, const struct need *need)
{
    int32_t best = TIMELINE_NEVER, *times = backfill->earliest;
    for (uint32_t first = 0, end; first < count; first = end) {
        end = end_of_site(backfill, first, count);
        for (uint32_t i = first; i < end; i++)
            times[i - first] = backfill->members[i].start;
        sluice_sort(times, backfill->earliest_scratch, end - first, sizeof *times, by_time);
        uint32_t low = need->nodes_min - 1, high = end - first; /* an index at which it does not hold, and one after */
        while (low < high) {
            const uint32_t middle = low + (high - low) / 2;
            if (fill_by(backfill, need, first, end, times[middle]))
                high = middle;
            else
                low = middle + 1;
        }
        if (high < end - first && times[high] < best)
            best = times[high];
    }
    return best;
}

/* The first time by which some site has `nodes` members that might start. */
static int32_t first_quorum(struct sluice_backfill *backfill, uint32_t count, uint32_t nodes)
{
    int32_t best = TIMELINE_NEVER, *earliest = backfill->earliest;
    for (uint32_t first = 0, end; first < count; first = end) {
        end = end_of_site(backfill, first, count);
        if (end - first < nodes)
            continue;
        for (uint32_t i = 0; i < nodes; i++)
            earliest[i] = best; /* what is later does not matter */
        for (uint32_t i = first; i < end; i++)
            if (backfill->members[i].start < earliest[0])
                replace_largest(earliest, nodes, backfill->members[i].start);
        best = earliest[0];
    }
    return best;
}

/* Do budgets that count all nodes lack watts for all members at `time`? Then no member starts before they have them. */
static bool wait_for_watts(struct sluice_backfill *backfill, const struct need *need, int32_t duration, int32_t time,
                           uint32_t count)
{
    if (!backfill->power)
        return false;
    const int32_t powered = power_earliest(backfill->power, backfill->power->everywhere & need->power_budgets,
                                           (int64_t)need->watts * need->gpus * need->nodes_min, duration, time);
    for (uint32_t i = 0; powered > time && i < count; i++)
        if (backfill->members[i].start < powered)
            backfill->members[i].start = powered;
    return powered > time;
}

/*
 * The first start from `from` on of a request for a fixed share of nodes_min nodes; the members that can start then
 * have it as their `start`. Each round's time is a lower bound of the answer: earlier, no site has enough nodes.
 */
static int32_t find_several(struct sluice_backfill *backfill, const struct need *need, int32_t duration, int32_t from,
                            int32_t latest, uint32_t *count)
{
    const struct kind *kind = first_starts_kind(&backfill->first_starts, need, duration);
    *count = gather_members(backfill, need, kind);
    for (uint32_t i = 0; i < *count; i++) {
        struct member *member = &backfill->members[i];
        member->start = member->start < from ? from : member->start;
        member->units = -1; /* the time for which `start` was asked last */
    }
    for (;;) {
        int32_t time = need->lower_most    ? first_filled(backfill, *count, need)
                       : need->segment > 1 ? first_segments(backfill, *count, need)
                                           : first_quorum(backfill, *count, need->nodes_min);
        if (time == TIMELINE_NEVER || time > latest)
            return TIMELINE_NEVER;
        bool sure = !wait_for_watts(backfill, need, duration, time, *count);
        for (uint32_t i = 0; i < *count; i++) {
            struct member *member = &backfill->members[i];
            if (member->start > time || member->units == time)
                continue;
            const uint32_t node = backfill->first_starts.node_at[member->position];
            int32_t start = first_starts_ask(&backfill->first_starts, kind, member->position, time);
            if (start <= time) {
                start = first_starts_on_node(&backfill->first_starts, node, need, duration, time);
                member->units = time;
            }
            member->start = start;
            sure = sure && start == time;
        }
        if (sure)
            return time;
    }
}

/* All members with a `start` of `time` where they can start then, else later. Bounds stay as they are: those of NICs in
 * any plane, which hold for one plane, too. */
static uint32_t ask_members(struct sluice_backfill *backfill, const struct need *need, int32_t duration, int32_t time)
{
    struct need share = share_of(need), any = share;
    any.plane = 0;
    uint32_t count = gather_members(backfill, need, first_starts_kind(&backfill->first_starts, &any, duration));
    for (uint32_t i = 0; i < count; i++) {
        struct member *member = &backfill->members[i];
        if (member->start <= time)
            member->start = timelines_earliest(&backfill->timelines, backfill->first_starts.node_at[member->position],
                                               &share, duration, time);
    }
    return count;
}

/* The most GPUs that a node can give to a request for GPUs in total. */
static int32_t most_units(struct sluice_backfill *backfill, const struct need *need, int32_t duration, int32_t time,
                          uint32_t node)
{
    struct need share = share_of(need);
    struct window window;
    timelines_window(&backfill->timelines, node, &share, duration, time, &window);
    const struct shape *shape = sluice_shape_of(backfill->timelines.cluster, node);
    int32_t units = sluice_count(window.fit);
    uint8_t preferred;
    while (units > 0 && need->preferences && !sluice_best_group(shape, need, units, window.fit, &preferred))
        units--;
    if (need->cpus_per_gpu && (window.cpus - need->cpus) / need->cpus_per_gpu < units)
        units = (window.cpus - need->cpus) / need->cpus_per_gpu;
    if (need->host_memory_per_gpu && (window.host_memory - need->host_memory) / need->host_memory_per_gpu < units)
        units = (window.host_memory - need->host_memory) / need->host_memory_per_gpu;
    const int32_t nics = __builtin_popcount(window.nics) - (int32_t)need->nics;
    if (need->nics_per_gpu && nics / (int32_t)need->nics_per_gpu < units)
        units = nics / (int32_t)need->nics_per_gpu;
    return units;
}

static int by_units(const void *a, const void *b)
{
    const struct member *x = a, *y = b;
    if (x->units != y->units)
        return x->units > y->units ? -1 : 1;
    return (x->position > y->position) - (x->position < y->position);
}

/* Deals the total out to members[first .. first + count), which can give most first; how many take part, 0 if none. */
static uint32_t deal_units(struct sluice_backfill *backfill, const struct need *need, uint32_t first, uint32_t count)
{
    struct member *members = &backfill->members[first];
    sluice_sort(members, backfill->member_scratch, count, sizeof *members, by_units);
    int32_t missing = need->gpus;
    uint32_t used = 0;
    for (uint32_t i = 0; i < count && used < need->nodes_max && missing > 0; i++) {
        const uint32_t node = backfill->first_starts.node_at[members[i].position];
        uint32_t others = used + 1 < need->nodes_min ? need->nodes_min - used - 1 : 0;
        int32_t most = missing - (int32_t)others;
        int32_t units = powered_gpus(backfill, need, node, members[i].units < most ? members[i].units : most);
        if (units == 0)
            continue;
        choose_watts(backfill, need, node, units);
        members[used] = members[i];
        members[used++].units = units;
        missing -= units;
    }
    return missing == 0 && used >= need->nodes_min ? used : 0;
}

/* Of the members chosen so far, those in whole segments: what is left of one is in no other leaf switch, and gives its
 * watts back. */
static uint32_t keep_segments(struct sluice_backfill *backfill, const struct need *need, const struct member *chosen,
                              uint32_t count)
{
    for (; count % need->segment; count--)
        choose_watts(backfill, need, backfill->first_starts.node_at[chosen[count - 1].position], -need->gpus);
    return count;
}

/* May one more member give a node, of those below limited switches? Takes it off what fill_by has left for them. */
static bool takes_lower(struct sluice_backfill *backfill, const struct member *member, uint32_t filled)
{
    for (uint32_t i = 0; i < filled; i++)
        if (backfill->lower[i].id == member->lower && backfill->lower[i].taken)
            return backfill->lower[i].taken--;
    return false;
}

/*
 * Moves to the front those of the members that can start at `time` which the rules select, with the GPUs that each
 * gives; how many, 0 if there are too few.
 */
static uint32_t choose_members(struct sluice_backfill *backfill, const struct need *need, int32_t duration,
                               int32_t time, uint32_t count)
{
    struct member *members = backfill->members;
    for (uint32_t first = 0, end; first < count; first = end) {
        end = end_of_site(backfill, first, count);
        uint32_t ready = 0, wanted = need->total ? UINT32_MAX : need->nodes_min, leaf = members[first].leaf;
        const uint32_t filled = need->lower_most ? fill_by(backfill, need, first, end, time) : 0;
        if (need->lower_most && !filled)
            continue;
        begin_choice(backfill, need, time, duration);
        for (uint32_t i = first; i < end && ready < wanted; i++) {
            const uint32_t node = backfill->first_starts.node_at[members[i].position];
            if (need->segment > 1 && members[i].leaf != leaf) {
                leaf = members[i].leaf;
                ready = keep_segments(backfill, need, &members[first], ready);
            }
            if (members[i].start != time ||
                (!need->total && powered_gpus(backfill, need, node, need->gpus) < need->gpus) ||
                (need->lower_most && !takes_lower(backfill, &members[i], filled)))
                continue;
            members[first + ready] = members[i];
            members[first + ready].units = need->total ? most_units(backfill, need, duration, time, node) : need->gpus;
            if (!need->total)
                choose_watts(backfill, need, node, need->gpus);
            ready++;
        }
        uint32_t chosen = need->total ? deal_units(backfill, need, first, ready) : ready == wanted ? wanted : 0;
        if (chosen) {
            memmove(members, &members[first], chosen * sizeof *members);
            return chosen;
        }
    }
    return 0;
}

static uint32_t ask_and_choose(struct sluice_backfill *backfill, const struct need *need, int32_t duration,
                               int32_t time)
{
    return choose_members(backfill, need, duration, time, ask_members(backfill, need, duration, time));
}

/* The planes, as bits, in which nodes of some shape have as many NICs as one would give, where one plane is asked. */
static uint64_t planes_of(const struct sluice_backfill *backfill, const struct need *need)
{
    const struct sluice_cluster *cluster = backfill->timelines.cluster;
    const int nics = (int)share_of(need).nics;
    uint64_t found = 0;
    for (uint32_t plane = 1; need->one_plane && plane <= cluster->planes; plane++)
        for (uint32_t i = 0; i < cluster->shape_count; i++)
            if (__builtin_popcount(sluice_nics_accepted(&cluster->shapes[i], need->nic_kinds, plane)) >= nics)
                found |= UINT64_C(1) << plane;
    return found;
}

/*
 * The same of all nodes at `time`, with all NICs in one plane where the request asks for that and one has room then: the
 * first such plane, which need->plane becomes; else in any. That is no reason to start later: a start now would not wait for
 * a plane either. Where there is no room in all planes together no single one is searched.
 */
static uint32_t choose_in_planes(struct sluice_backfill *backfill, struct need *need, int32_t duration, int32_t time)
{
    uint64_t left = planes_of(backfill, need);
    uint32_t chosen = ask_and_choose(backfill, need, duration, time);
    if (!chosen || !left)
        return chosen;
    for (; left; left &= left - 1) {
        need->plane = (uint32_t)__builtin_ctzll(left);
        if ((chosen = ask_and_choose(backfill, need, duration, time)))
            return chosen;
    }
    need->plane = 0;
    return ask_and_choose(backfill, need, duration, time);
}

/* Likewise of a job of one node, members[0], which is the first of any plane: no node before it has room in one. */
static void choose_node_in_plane(struct sluice_backfill *backfill, struct need *need, int32_t duration, int32_t time)
{
    const struct first_starts *first_starts = &backfill->first_starts;
    const struct kind *kind = first_starts_kind(&backfill->first_starts, need, duration);
    struct need one = *need;
    uint64_t planes = planes_of(backfill, need); /* those before the best so far */
    for (uint32_t position = backfill->members[0].position; planes && position < first_starts->node_count; position++) {
        if (first_starts_bound(first_starts, kind, position) > time)
            continue;
        for (uint64_t left = planes; left; left &= left - 1) {
            one.plane = (uint32_t)__builtin_ctzll(left);
            if (first_starts_on_node(first_starts, first_starts->node_at[position], &one, duration, time) != time)
                continue;
            need->plane = one.plane;
            backfill->members[0].position = position;
            planes &= (UINT64_C(1) << one.plane) - 1;
            break;
        }
    }
}

/* ---- booking ---- */

static uint16_t choose_gpus(const struct shape *shape, const struct need *need, int32_t gpus,
                            const struct window *window)
{
    uint8_t preferred;
    uint16_t fit = need->preferences ? sluice_best_group(shape, need, gpus, window->fit, &preferred) : window->fit;
    if (!need->share)
        return sluice_lowest(fit, gpus);
    uint16_t chosen = 0;
    while (gpus-- > 0) {
        int best = -1;
        for (int i = 0; i < SLUICE_MAX_GPUS; i++)
            if ((fit & ~chosen) >> i & 1 && (best < 0 || window->gpu_free.mib[i] < window->gpu_free.mib[best]))
                best = i;
        chosen |= (uint16_t)(1 << best);
    }
    return chosen;
}

/* As many of the window's NICs: over planes where that is asked, with as many pairs with these GPUs as there can be. */
static uint32_t choose_nics(const struct shape *shape, const struct need *need, uint16_t gpus,
                            const struct window *window, int count)
{
    const uint32_t nics = need->spread_planes && shape->several_planes && count
                              ? sluice_nics_evenly(shape, gpus, sluice_count(gpus), shape->all, window->nics, count)
                              : window->nics;
    return sluice_nics_for(shape, gpus, nics, count);
}

static int by_node(const void *a, const void *b)
{
    const struct booking *x = a, *y = b;
    return (x->node > y->node) - (x->node < y->node);
}

static enum sluice_error fail_room(const struct sluice_backfill *backfill, struct sluice_error_text *text)
{
    return sluice_fail(text, SLUICE_ERROR_CAPACITY,
                       "the plan needs more than %" PRIu32
                       " planned parts: make the backfill with a larger max_planned",
                       backfill->max_planned);
}

/* Book the first `count` members for a job. */
static enum sluice_error book_members(struct sluice_backfill *backfill, const struct need *need, int32_t duration,
                                      int32_t time, uint32_t count, struct sluice_backfill_start *start,
                                      struct sluice_error_text *text)
{
    struct need share = share_of(need);
    if (count > backfill->max_planned - backfill->planned_count)
        return fail_room(backfill, text);
    struct booking *bookings = &backfill->planned[backfill->planned_count];
    for (uint32_t i = 0; i < count; i++) {
        uint32_t node = backfill->first_starts.node_at[backfill->members[i].position];
        int32_t gpus = backfill->members[i].units;
        struct window window;
        timelines_window(&backfill->timelines, node, &share, duration, time, &window);
        const struct shape *shape = sluice_shape_of(backfill->timelines.cluster, node);
        const uint16_t chosen = choose_gpus(shape, need, gpus, &window);
        bookings[i] = (struct booking){
            .node = node,
            .share = need->share,
            .cpus = need->cpus + gpus * need->cpus_per_gpu,
            .host_memory = need->host_memory + gpus * need->host_memory_per_gpu,
            .gpus = chosen,
            .exclusive = need->exclusive,
            .compute = (uint8_t)need->compute,
            .nics = choose_nics(shape, need, chosen, &window, (int)need->nics + gpus * (int)need->nics_per_gpu),
            .watts = need->watts,
            .power_budgets = need->power_budgets,
        };
        if (!take(backfill, &bookings[i], time, timelines_end(time, duration)))
            return fail_room(backfill, text);
        first_starts_taken(&backfill->first_starts, node);
    }
    if (count > 1)
        sluice_sort(bookings, backfill->booking_scratch, count, sizeof *bookings, by_node);
    *start = (struct sluice_backfill_start){
        .start_s = time, .first_part = backfill->planned_count, .part_count = count, .watts = need->watts};
    backfill->planned_count += count;
    return SLUICE_OK;
}

/* Give back what was planned for a job, the last that was planned. */
static bool unbook(struct sluice_backfill *backfill, const struct sluice_backfill_start *start, int32_t duration)
{
    int32_t time = (int32_t)start->start_s;
    for (uint32_t i = 0; i < start->part_count; i++)
        if (!give(backfill, &backfill->planned[start->first_part + i], time, timelines_end(time, duration)))
            return false;
    backfill->planned_count = start->first_part;
    return true;
}

/* ---- jobs and groups ---- */

static const struct sluice_backfill_start no_start = {.start_s = SLUICE_BACKFILL_NO_START};

/* The fewest watts that a job may start with. */
static int32_t least_of(const struct sluice_backfill_job *job)
{
    return job->power_guaranteed ? 0 : job->least_watts ? job->least_watts : job->watts;
}

/* The watts that a job is planned with, and in which budgets. */
static enum sluice_error read_watts(const struct sluice_backfill *backfill, const struct sluice_backfill_job *jobs,
                                    uint32_t job, struct need *need, struct sluice_error_text *text)
{
    const int32_t watts = jobs[job].watts, least = jobs[job].least_watts;
    if (watts < 0 || watts > SLUICE_POWER_MAX_GPU_WATTS || least < 0 || least > watts)
        return sluice_fail(text, SLUICE_ERROR_RANGE,
                           "job %" PRIu32 ": %" PRId32 " W a GPU, at least %" PRId32 ": must be 0 to %d", job, watts,
                           least, SLUICE_POWER_MAX_GPU_WATTS);
    const uint32_t count = backfill->power->count;
    need->watts = backfill->draw == DRAW_NONE ? 0 : backfill->draw == DRAW_LEAST ? least_of(&jobs[job]) : watts;
    need->power_budgets = count ? jobs[job].power_budgets & UINT64_MAX >> (64 - count) : 0;
    return SLUICE_OK;
}

/* A job's request for planning: only what is required. */
static enum sluice_error read_job(const struct sluice_backfill *backfill, const struct sluice_backfill_job *jobs,
                                  uint32_t job, struct need *need, struct sluice_error_text *text)
{
    struct sluice_error_text reason = {""};
    enum sluice_error error = SLUICE_OK;
    if (jobs[job].watts_only)
        *need = (struct need){0};
    else
        error = jobs[job].request
                    ? sluice_need_from_request(backfill->timelines.cluster, jobs[job].request, need, &reason)
                    : sluice_fail(&reason, SLUICE_ERROR_INVALID, "no request");
    if (error)
        return sluice_fail(text, error, "job %" PRIu32 ": %.200s", job, reason.text);
    if (jobs[job].limit_s < 1 || jobs[job].limit_s > SLUICE_BACKFILL_HORIZON_S)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "job %" PRIu32 ": limit_s %" PRId64 ": must be 1 to %d", job,
                           jobs[job].limit_s, SLUICE_BACKFILL_HORIZON_S);
    uint8_t *preferences[] = {&need->link, &need->numa, &need->nic, &need->one_switch};
    for (size_t i = 0; i < sizeof preferences / sizeof preferences[0]; i++)
        if (*preferences[i] == SLUICE_PREFERRED)
            *preferences[i] = SLUICE_ANY;
    if (need->nodes_max == 1)
        need->one_switch = SLUICE_ANY;
    need->preferences = need->link || need->numa || need->nic;
    return backfill->power ? read_watts(backfill, jobs, job, need, text) : SLUICE_OK;
}

/* The next time after `time` at which anything changes. */
static int32_t next_candidate(const struct sluice_backfill *backfill, int32_t time)
{
    const struct sluice_power *power = backfill->power;
    int32_t next =
        power && power->count ? power_next_change(power, UINT64_MAX >> (64 - power->count), time) : TIMELINE_NEVER;
    for (uint32_t node = 0; node < backfill->first_starts.node_count; node++) {
        int32_t change = timelines_next_change(&backfill->timelines, node, time);
        next = change < next ? change : next;
    }
    return next;
}

/* Book all members of a group at `time`, one after the other, or none; *fits says which. `planes`: with the NICs of those
 * that ask for it in one plane, where one has room. */
static enum sluice_error try_together(struct sluice_backfill *backfill, const struct sluice_backfill_job *jobs,
                                      uint32_t first, uint32_t count, int32_t time, bool planes, bool *fits,
                                      struct sluice_error_text *text)
{
    *fits = true;
    uint32_t done = 0;
    for (; done < count && *fits; done++) {
        uint32_t job = first + done;
        struct need need;
        int32_t duration = (int32_t)jobs[job].limit_s;
        enum sluice_error error = read_job(backfill, jobs, job, &need, text);
        if (error)
            return error;
        need.one_plane = need.one_plane && planes;
        uint32_t chosen = choose_in_planes(backfill, &need, duration, time);
        *fits = chosen > 0;
        if (*fits && (error = book_members(backfill, &need, duration, time, chosen, &backfill->starts[job], text)))
            return error;
    }
    if (*fits)
        return SLUICE_OK;
    for (done--; done-- > 0;)
        if (!unbook(backfill, &backfill->starts[first + done], (int32_t)jobs[first + done].limit_s))
            return fail_room(backfill, text);
    return SLUICE_OK;
}

/* The first time from *time on at which each member of a group could start if it were alone; a fixed point. */
static enum sluice_error first_alone(struct sluice_backfill *backfill, const struct sluice_backfill_job *jobs,
                                     uint32_t first, uint32_t count, int32_t latest, int32_t *time,
                                     struct sluice_error_text *text)
{
    for (uint32_t agreed = 0, i = 0; agreed < count && *time != TIMELINE_NEVER; i = (i + 1) % count) {
        struct need need;
        enum sluice_error error = read_job(backfill, jobs, first + i, &need, text);
        if (error)
            return error;
        uint32_t members;
        int32_t start = need.total
                            ? *time
                            : find_several(backfill, &need, (int32_t)jobs[first + i].limit_s, *time, latest, &members);
        agreed = start == *time ? agreed + 1 : 1;
        *time = start;
    }
    return SLUICE_OK;
}

/* Does more than one job start together, one of them with its NICs in one plane? What it leaves to the others depends on
 * the plane. */
static bool shares_planes(const struct sluice_backfill *backfill, const struct sluice_backfill_job *jobs,
                          uint32_t first, uint32_t count)
{
    const bool several = count > 1 && backfill->timelines.cluster->planes;
    bool asks = false;
    for (uint32_t i = first; i < first + count && several; i++)
        asks |= jobs[i].request && jobs[i].request->nic_planes == SLUICE_PACK;
    return asks;
}

/* A group, or a job that asks GPUs in total: candidate by candidate. */
static enum sluice_error plan_together(struct sluice_backfill *backfill, const struct sluice_backfill_job *jobs,
                                       uint32_t first, uint32_t count, int32_t latest, struct sluice_error_text *text)
{
    for (int32_t time = 0;; time = next_candidate(backfill, time)) {
        bool fits = false;
        enum sluice_error error = first_alone(backfill, jobs, first, count, latest, &time, text);
        if (!error && time != TIMELINE_NEVER && time <= latest)
            error = try_together(backfill, jobs, first, count, time, true, &fits, text);
        if (!error && !fits && time != TIMELINE_NEVER && time <= latest && shares_planes(backfill, jobs, first, count))
            error = try_together(backfill, jobs, first, count, time, false, &fits, text);
        if (error || fits)
            return error;
        if (time == TIMELINE_NEVER || time >= latest) {
            for (uint32_t i = first; i < first + count; i++)
                backfill->starts[i] = no_start;
            return SLUICE_OK;
        }
    }
}

/* One job or one group, to start at `latest` at the latest, with what `draw` says. */
static enum sluice_error plan(struct sluice_backfill *backfill, const struct sluice_backfill_job *jobs, uint32_t first,
                              uint32_t count, int32_t latest, struct sluice_error_text *text)
{
    struct need need;
    enum sluice_error error = read_job(backfill, jobs, first, &need, text);
    if (error)
        return error;
    if (count > 1 || need.total || (need.nodes_min > 1 && need.watts))
        return plan_together(backfill, jobs, first, count, latest, text);
    int32_t duration = (int32_t)jobs[first].limit_s, time;
    uint32_t nodes = 1, members = 0;
    if (need.nodes_min == 1) {
        backfill->members[0] = (struct member){.units = need.gpus};
        time = first_starts_find(&backfill->first_starts, &need, duration, latest, &backfill->members[0].position);
    } else {
        time = find_several(backfill, &need, duration, 0, latest, &members);
    }
    if (time != TIMELINE_NEVER && need.nodes_min > 1)
        nodes = need.one_plane ? choose_in_planes(backfill, &need, duration, time)
                               : choose_members(backfill, &need, duration, time, members);
    else if (time != TIMELINE_NEVER && need.one_plane)
        choose_node_in_plane(backfill, &need, duration, time);
    if (time == TIMELINE_NEVER || !nodes) {
        backfill->starts[first] = no_start;
        return SLUICE_OK;
    }
    return book_members(backfill, &need, duration, time, nodes, &backfill->starts[first], text);
}

/* ---- jobs that watts are short for ---- */

/* What jobs that could start now but for watts would draw of each budget. */
struct demand {
    uint64_t budgets;
    int64_t watts[SLUICE_POWER_MAX_BUDGETS];
};

static void add_demand(const struct sluice_backfill *backfill, struct demand *demand,
                       const struct sluice_backfill_job *job, uint32_t node, int32_t gpus)
{
    for (uint64_t left = gpus ? budgets_of(backfill, job->power_budgets, node) : 0; left; left &= left - 1) {
        const int budget = __builtin_ctzll(left);
        if (!(demand->budgets >> budget & 1))
            demand->watts[budget] = 0;
        demand->budgets |= UINT64_C(1) << budget;
        demand->watts[budget] += (int64_t)job->watts * gpus;
    }
}

/* Where a job of one node could start now, without booking it. */
static void demand_of_one(struct sluice_backfill *backfill, const struct sluice_backfill_job *job,
                          const struct need *need, struct demand *demand)
{
    uint32_t position;
    if (first_starts_find(&backfill->first_starts, need, (int32_t)job->limit_s, 0, &position) == 0)
        add_demand(backfill, demand, job, backfill->first_starts.node_at[position], need->gpus);
}

/* Of several nodes, or a group: planned as if there were no budgets, and given up again. */
static enum sluice_error demand_of_several(struct sluice_backfill *backfill, const struct sluice_backfill_job *jobs,
                                           uint32_t first, uint32_t count, struct demand *demand,
                                           struct sluice_error_text *text)
{
    enum sluice_error error = plan(backfill, jobs, first, count, 0, text);
    if (error || backfill->starts[first].start_s == SLUICE_BACKFILL_NO_START)
        return error;
    for (uint32_t job = first + count; job-- > first; backfill->starts[job] = no_start) {
        const struct sluice_backfill_start *start = &backfill->starts[job];
        for (uint32_t i = 0; i < start->part_count; i++) {
            const struct booking *booking = &backfill->planned[start->first_part + i];
            add_demand(backfill, demand, &jobs[job], booking->node, sluice_count(booking->gpus));
        }
        if (!unbook(backfill, start, (int32_t)jobs[job].limit_s))
            return fail_room(backfill, text);
    }
    return SLUICE_OK;
}

/* The budget that is shortest for jobs that could start now but for watts, 1 + its index, those of all nodes first; 0
 * where it is something else that they lack. */
static enum sluice_error find_short(struct sluice_backfill *backfill, const struct sluice_backfill_job *jobs,
                                    uint32_t first, uint32_t count, uint32_t *budget, struct sluice_error_text *text)
{
    struct demand demand;
    struct need need;
    demand.budgets = 0;
    *budget = 0;
    backfill->draw = DRAW_NONE;
    enum sluice_error error = read_job(backfill, jobs, first, &need, text);
    if (!error && count == 1 && need.nodes_min == 1 && !need.total)
        demand_of_one(backfill, &jobs[first], &need, &demand);
    else if (!error)
        error = demand_of_several(backfill, jobs, first, count, &demand, text);
    backfill->draw = DRAW_WANTED;
    int64_t most = 0;
    for (uint64_t left = demand.budgets; left; left &= left - 1) {
        const uint32_t index = (uint32_t)__builtin_ctzll(left);
        const int64_t missing =
            demand.watts[index] - power_left(backfill->power, index, 0, (int32_t)jobs[first].limit_s);
        const bool passable = !(backfill->power->everywhere >> index & 1); /* another node might do */
        const int64_t weight = missing + (passable ? 0 : SLUICE_POWER_MAX_WATTS);
        if (missing > 0 && weight > most) {
            most = weight;
            *budget = index + 1;
        }
    }
    return error;
}

/* A job was planned now with its least watts: give it what is left, up to what it wants. */
static void raise_watts(struct sluice_backfill *backfill, const struct sluice_backfill_job *job,
                        struct sluice_backfill_start *start)
{
    const int32_t end = (int32_t)job->limit_s;
    struct demand demand; /* of one watt a GPU more */
    struct sluice_backfill_job one = *job;
    int64_t more = job->watts - start->watts;
    demand.budgets = 0;
    one.watts = 1;
    for (uint32_t i = 0; i < start->part_count; i++) {
        const struct booking *booking = &backfill->planned[start->first_part + i];
        add_demand(backfill, &demand, &one, booking->node, sluice_count(booking->gpus));
    }
    for (uint64_t left = demand.budgets; left; left &= left - 1) {
        const uint32_t budget = (uint32_t)__builtin_ctzll(left);
        const int64_t watts = power_left(backfill->power, budget, 0, end) / demand.watts[budget];
        more = watts < more ? watts < 0 ? 0 : watts : more;
    }
    for (uint32_t i = 0; i < start->part_count; i++) {
        struct booking *booking = &backfill->planned[start->first_part + i];
        draw_more(backfill, booking, (int32_t)more, 0, end);
        booking->watts += (int32_t)more;
    }
    start->watts += (int32_t)more;
}

static bool may_draw_less(const struct sluice_backfill_job *jobs, uint32_t first, uint32_t count)
{
    bool may = false;
    for (uint32_t i = first; i < first + count; i++)
        may |= least_of(&jobs[i]) < jobs[i].watts;
    return may;
}

/* As plan(), with budgets: now, with fewer watts now where a budget is short, or later. */
static enum sluice_error plan_powered(struct sluice_backfill *backfill, const struct sluice_backfill_job *jobs,
                                      uint32_t first, uint32_t count, int32_t latest, struct sluice_error_text *text)
{
    const struct sluice_backfill_start *start = &backfill->starts[first];
    uint32_t budget = 0;
    enum sluice_error error = plan(backfill, jobs, first, count, 0, text);
    if (error || start->start_s == 0)
        return error;
    error = find_short(backfill, jobs, first, count, &budget, text);
    if (!error && budget && may_draw_less(jobs, first, count)) {
        backfill->draw = DRAW_LEAST;
        error = plan(backfill, jobs, first, count, 0, text);
        backfill->draw = DRAW_WANTED;
        if (!error && start->start_s == 0 && count == 1)
            raise_watts(backfill, &jobs[first], &backfill->starts[first]);
    }
    if (error || start->start_s == 0)
        return error;
    if (latest)
        error = plan(backfill, jobs, first, count, latest, text);
    for (uint32_t i = first; i < first + count; i++)
        backfill->starts[i].waits_for_power = budget;
    return error;
}

/* One job or one group, to start at `latest` at the latest. */
static enum sluice_error plan_job(struct sluice_backfill *backfill, const struct sluice_backfill_job *jobs,
                                  uint32_t first, uint32_t count, int32_t latest, struct sluice_error_text *text)
{
    return backfill->power ? plan_powered(backfill, jobs, first, count, latest, text)
                           : plan(backfill, jobs, first, count, latest, text);
}

/* ---- reservations of earlier plans ---- */

static bool is_amount(int64_t value)
{
    return value >= 0 && value <= INT32_MAX;
}

/* A part as a booking, without watts; false if it makes no sense. */
static bool read_part(const struct sluice_cluster *cluster, const struct sluice_part *part, struct booking *booking)
{
    if (part->node >= cluster->node_count || part->gpus & ~(uint32_t)sluice_shape_of(cluster, part->node)->all ||
        part->nics & ~sluice_shape_of(cluster, part->node)->all_nics || !is_amount(part->gpu_memory_mib) ||
        !is_amount(part->cpus_milli) || !is_amount(part->host_memory_mib) || part->gpu_compute_percent > ALL_COMPUTE)
        return false;
    *booking = (struct booking){
        .node = part->node,
        .share = (int32_t)part->gpu_memory_mib,
        .cpus = (int32_t)part->cpus_milli,
        .host_memory = (int32_t)part->host_memory_mib,
        .gpus = (uint16_t)part->gpus,
        .exclusive = part->exclusive,
        .compute = (uint8_t)part->gpu_compute_percent,
        .nics = part->nics,
    };
    return true;
}

/* The same for one of those that a job holds. */
static bool read_held(const struct sluice_backfill *backfill, const struct sluice_backfill_job *job, uint32_t part,
                      struct booking *booking)
{
    if (!read_part(backfill->timelines.cluster, &job->held[part], booking))
        return false;
    booking->watts = job->watts;
    booking->power_budgets = job->power_budgets;
    return true;
}

static int32_t held_start(const struct sluice_backfill_job *job, int64_t now)
{
    int64_t start;
    if (job->held_start_s <= now)
        return 0;
    return __builtin_sub_overflow(job->held_start_s, now, &start) || start >= TIMELINE_NEVER ? TIMELINE_NEVER
                                                                                             : (int32_t)start;
}

/* Give back the first `count` held parts of a job. */
static enum sluice_error give_held(struct sluice_backfill *backfill, const struct sluice_backfill_job *job, int64_t now,
                                   uint32_t count, struct sluice_error_text *text)
{
    int32_t start = held_start(job, now), end = timelines_end(start, (int32_t)job->limit_s);
    for (uint32_t i = 0; i < count; i++) {
        struct booking booking = {0};
        read_held(backfill, job, i, &booking);
        if (!give(backfill, &booking, start, end))
            return fail_room(backfill, text);
        first_starts_given(&backfill->first_starts, booking.node, start);
    }
    return SLUICE_OK;
}

/* Book a job's held reservation, if it still fits; *held says so. */
static enum sluice_error take_held(struct sluice_backfill *backfill, const struct sluice_backfill_job *job, int64_t now,
                                   bool *held, struct sluice_error_text *text)
{
    int32_t start = held_start(job, now), end = timelines_end(start, (int32_t)job->limit_s);
    *held = false;
    if (!job->held_count || !job->held || start == TIMELINE_NEVER)
        return SLUICE_OK;
    for (uint32_t i = 0; i < job->held_count; i++) {
        struct booking booking;
        if (!read_held(backfill, job, i, &booking) || !fits(backfill, &booking, start, end))
            return give_held(backfill, job, now, i, text);
        if (!take(backfill, &booking, start, end))
            return fail_room(backfill, text);
        first_starts_taken(&backfill->first_starts, booking.node);
    }
    *held = true;
    return SLUICE_OK;
}

/* Keep the held reservation: the same parts as the job's planned start. */
static enum sluice_error keep_held(struct sluice_backfill *backfill, const struct sluice_backfill_job *job, int64_t now,
                                   struct sluice_backfill_start *start, struct sluice_error_text *text)
{
    bool held;
    if (job->held_count > backfill->max_planned - backfill->planned_count)
        return fail_room(backfill, text);
    enum sluice_error error = take_held(backfill, job, now, &held, text);
    if (error)
        return error;
    for (uint32_t i = 0; i < job->held_count; i++)
        read_held(backfill, job, i, &backfill->planned[backfill->planned_count + i]);
    sluice_sort(&backfill->planned[backfill->planned_count], backfill->booking_scratch, job->held_count,
                sizeof *backfill->planned, by_node);
    *start = (struct sluice_backfill_start){.start_s = held_start(job, now),
                                            .first_part = backfill->planned_count,
                                            .part_count = job->held_count,
                                            .watts = backfill->power ? job->watts : 0};
    backfill->planned_count += job->held_count;
    return SLUICE_OK;
}

/* Plan a job or group that holds reservations (all of its jobs do): no later than they are. */
static enum sluice_error plan_held(struct sluice_backfill *backfill, int64_t now,
                                   const struct sluice_backfill_job *jobs, uint32_t first, uint32_t count,
                                   struct sluice_error_text *text)
{
    enum sluice_error error = SLUICE_OK;
    int32_t latest = held_start(&jobs[first], now);
    for (uint32_t i = first; i < first + count && !error; i++)
        error = give_held(backfill, &jobs[i], now, jobs[i].held_count, text);
    if (!error)
        error = plan_job(backfill, jobs, first, count, latest, text);
    /* The rules' choice of nodes can fail where the reservation's nodes fit: then the reservation is kept. */
    for (uint32_t i = first; i < first + count && !error; i++)
        if (backfill->starts[i].start_s == SLUICE_BACKFILL_NO_START)
            error = keep_held(backfill, &jobs[i], now, &backfill->starts[i], text);
    return error;
}

/* ---- jobs of which only watts are planned ---- */

/* The first time from `from` on at which all budgets have so many watts for each GPU of `demand`, which is of one watt. */
static int32_t earliest_watts(const struct sluice_backfill *backfill, const struct demand *demand, int32_t watts,
                              int32_t duration, int32_t from)
{
    for (int32_t time = from;; from = time) {
        for (uint64_t left = demand->budgets; left && time != TIMELINE_NEVER; left &= left - 1) {
            const int budget = __builtin_ctzll(left);
            time =
                power_earliest(backfill->power, UINT64_C(1) << budget, demand->watts[budget] * watts, duration, time);
        }
        if (time == from || time == TIMELINE_NEVER)
            return time;
    }
}

/* 1 + the first budget that has not so many watts for each GPU at `from`; 0: all have. */
static uint32_t short_of(const struct sluice_backfill *backfill, const struct demand *demand, int32_t watts,
                         int32_t duration, int32_t from)
{
    const int32_t end = timelines_end(from, duration);
    for (uint64_t left = demand->budgets; left; left &= left - 1) {
        const uint32_t budget = (uint32_t)__builtin_ctzll(left);
        if (power_left(backfill->power, budget, from, end) < demand->watts[budget] * watts)
            return budget + 1;
    }
    return 0;
}

/* Book the watts of a job whose nodes somebody else finds: with as many as are left, where that is from now on. */
static enum sluice_error plan_watts(struct sluice_backfill *backfill, const struct sluice_backfill_job *job,
                                    int64_t now, int32_t latest, struct sluice_backfill_start *start,
                                    struct sluice_error_text *text)
{
    const int32_t duration = (int32_t)job->limit_s, least = least_of(job), from = held_start(job, now);
    struct booking *bookings = &backfill->planned[backfill->planned_count];
    struct sluice_backfill_job one = *job;
    struct demand demand = {.budgets = 0};
    *start = no_start;
    if (!backfill->power || !job->held || from == TIMELINE_NEVER)
        return SLUICE_OK;
    if (job->held_count > backfill->max_planned - backfill->planned_count)
        return fail_room(backfill, text);
    one.watts = 1;
    for (uint32_t i = 0; i < job->held_count; i++) {
        if (!read_held(backfill, job, i, &bookings[i]))
            return SLUICE_OK; /* as another cluster had it */
        bookings[i].watts = least;
        add_demand(backfill, &demand, &one, bookings[i].node, sluice_count(bookings[i].gpus));
    }
    const int32_t time = earliest_watts(backfill, &demand, least, duration, from);
    const uint32_t waits = time > from ? short_of(backfill, &demand, least, duration, from) : 0;
    if (time != TIMELINE_NEVER && time <= latest) {
        *start = (struct sluice_backfill_start){
            .start_s = time, .first_part = backfill->planned_count, .part_count = job->held_count, .watts = least};
        backfill->planned_count += job->held_count;
        for (uint32_t i = 0; i < job->held_count; i++)
            draw_more(backfill, &bookings[i], least, time, timelines_end(time, duration));
        if (time == 0)
            raise_watts(backfill, job, start);
    }
    start->waits_for_power = waits;
    return SLUICE_OK;
}

/* ---- the plan ---- */

static enum sluice_error read_nodes(struct sluice_backfill *backfill, const struct sluice_cluster *cluster, int64_t now,
                                    struct sluice_error_text *text)
{
    if (cluster->node_count > backfill->max_nodes)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "%" PRIu32 " nodes: the backfill was made for %" PRIu32,
                           cluster->node_count, backfill->max_nodes);
    if (backfill->power && cluster->node_count > backfill->power->max_nodes)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "%" PRIu32 " nodes: the power budgets were made for %" PRIu32,
                           cluster->node_count, backfill->power->max_nodes);
    first_starts_reset(&backfill->first_starts, cluster);
    timelines_reset(&backfill->timelines, cluster);
    if (backfill->power)
        power_reset(backfill->power, now);
    backfill->draw = DRAW_WANTED;
    return SLUICE_OK;
}

/* Was the allocation seen before? */
static bool seen_before(struct sluice_backfill *backfill, uint64_t allocation)
{
    size_t slot = (allocation * UINT64_C(0x9e3779b97f4a7c15) >> 32) % backfill->seen_size;
    for (; backfill->seen[slot]; slot = (slot + 1) % backfill->seen_size)
        if (backfill->seen[slot] == allocation)
            return true;
    backfill->seen[slot] = allocation;
    return false;
}

/* Running allocations give back what they hold when they end. */
static enum sluice_error read_running(struct sluice_backfill *backfill, int64_t now,
                                      const struct sluice_backfill_running *running, uint32_t count,
                                      struct sluice_error_text *text)
{
    uint32_t parts = 0;
    memset(backfill->seen, 0, backfill->seen_size * sizeof *backfill->seen);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t part_count;
        enum sluice_error error = sluice_allocation_read(backfill->timelines.cluster, running[i].allocation,
                                                         backfill->parts_read, backfill->max_nodes, &part_count, text);
        if (error)
            return error;
        if (part_count > backfill->max_running - parts)
            return sluice_fail(text, SLUICE_ERROR_CAPACITY,
                               "more than %" PRIu32 " running parts: make the backfill with a larger max_running",
                               backfill->max_running);
        parts += part_count;
        if (part_count && seen_before(backfill, running[i].allocation))
            return sluice_fail(text, SLUICE_ERROR_DUPLICATE, "running allocation %" PRIu64 " is named twice",
                               running[i].allocation);
        int64_t end;
        if (__builtin_sub_overflow(running[i].end_s, now, &end))
            end = running[i].end_s < now ? 1 : TIMELINE_NEVER;
        end = end < 1 ? 1 : end < TIMELINE_NEVER ? end : TIMELINE_NEVER;
        for (uint32_t j = 0; j < part_count; j++) {
            struct booking booking;
            if (!read_part(backfill->timelines.cluster, &backfill->parts_read[j], &booking))
                return fail_room(backfill, text);
            booking.power_budgets = running[i].power_budgets;
            draw_more(backfill, &booking, running[i].watts, 0, (int32_t)end);
            if (end < TIMELINE_NEVER && !timelines_give(&backfill->timelines, &booking, (int32_t)end, TIMELINE_NEVER))
                return fail_room(backfill, text);
        }
    }
    return SLUICE_OK;
}

/* The end of the group that begins with job `first`. */
static uint32_t end_of_group(const struct sluice_backfill_job *jobs, uint32_t first, uint32_t count)
{
    uint32_t end = first + 1;
    while (end < count && jobs[first].group && jobs[end].group == jobs[first].group)
        end++;
    return end;
}

static enum sluice_error check_jobs(struct sluice_backfill *backfill, const struct sluice_backfill_job *jobs,
                                    uint32_t count, struct sluice_error_text *text)
{
    if (count > backfill->max_jobs)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY, "%" PRIu32 " jobs: the backfill was made for %" PRIu32, count,
                           backfill->max_jobs);
    struct need need;
    for (uint32_t i = 0; i < count; i++) {
        enum sluice_error error = read_job(backfill, jobs, i, &need, text);
        if (error)
            return error;
        if (jobs[i].watts_only)
            continue;
        struct need share = share_of(&need);
        first_starts_expect(&backfill->first_starts, &share, (int32_t)jobs[i].limit_s);
    }
    return SLUICE_OK;
}

/* Reservations of earlier plans; a group's are kept or dropped together, and all have the same time. */
static enum sluice_error take_all_held(struct sluice_backfill *backfill, int64_t now,
                                       const struct sluice_backfill_job *jobs, uint32_t count,
                                       struct sluice_error_text *text)
{
    enum sluice_error error = SLUICE_OK;
    for (uint32_t first = 0, end; first < count && !error; first = end) {
        end = end_of_group(jobs, first, count);
        bool all = true;
        for (uint32_t i = first; i < end && !error; i++) {
            backfill->held[i] = false;
            if (all && !jobs[i].watts_only && held_start(&jobs[i], now) == held_start(&jobs[first], now))
                error = take_held(backfill, &jobs[i], now, &backfill->held[i], text);
            all = all && backfill->held[i];
        }
        for (uint32_t i = first; i < end && !all && !error; i++) {
            if (backfill->held[i])
                error = give_held(backfill, &jobs[i], now, jobs[i].held_count, text);
            backfill->held[i] = false;
        }
    }
    return error;
}

enum sluice_error sluice_backfill_plan(struct sluice_backfill *backfill, const struct sluice_cluster *cluster,
                                       int64_t now_s, const struct sluice_backfill_running *running,
                                       uint32_t running_count, const struct sluice_backfill_job *jobs,
                                       uint32_t job_count, uint32_t reservations, struct sluice_backfill_start *starts,
                                       struct sluice_part *parts, uint32_t part_capacity, uint32_t *part_count,
                                       struct sluice_error_text *text)
{
    if (now_s < 0)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "now_s %" PRId64 ": must not be negative", now_s);
    enum sluice_error error = read_nodes(backfill, cluster, now_s, text);
    if (!error)
        error = check_jobs(backfill, jobs, job_count, text);
    if (!error)
        error = read_running(backfill, now_s, running, running_count, text);
    if (!error)
        error = take_all_held(backfill, now_s, jobs, job_count, text);
    backfill->planned_count = 0;
    for (uint32_t first = 0, end; first < job_count && !error; first = end) {
        end = end_of_group(jobs, first, job_count);
        if (jobs[first].watts_only)
            error = plan_watts(backfill, &jobs[first], now_s, reservations ? TIMELINE_NEVER : 0,
                               &backfill->starts[first], text);
        else if (backfill->held[first])
            error = plan_held(backfill, now_s, jobs, first, end - first, text);
        else
            error = plan_job(backfill, jobs, first, end - first, reservations ? TIMELINE_NEVER : 0, text);
        if (!error && backfill->starts[first].start_s > 0 && reservations)
            reservations--;
    }
    if (error)
        return error;
    if (backfill->planned_count > part_capacity)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY, "a plan of %" PRIu32 " parts: room for %" PRIu32,
                           backfill->planned_count, part_capacity);
    for (uint32_t i = 0; i < job_count; i++) {
        starts[i] = backfill->starts[i];
        if (starts[i].start_s != SLUICE_BACKFILL_NO_START)
            starts[i].start_s += now_s;
    }
    for (uint32_t i = 0; i < backfill->planned_count; i++) {
        const struct booking *booking = &backfill->planned[i];
        parts[i] = (struct sluice_part){
            .node = booking->node,
            .gpus = booking->gpus,
            .gpu_memory_mib = booking->share,
            .cpus_milli = booking->cpus,
            .host_memory_mib = booking->host_memory,
            .exclusive = booking->exclusive,
            .gpu_compute_percent = booking->compute,
            .nics = booking->nics,
        };
    }
    *part_count = backfill->planned_count;
    return SLUICE_OK;
}
