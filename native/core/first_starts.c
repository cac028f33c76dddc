/* SPDX-License-Identifier: Apache-2.0 */
#include "first_starts.h"
#include "lanes.h"

#include <stdlib.h>
#include <string.h>

enum {
    GROUP = 256, /* nodes under one low */
    MIN_KINDS = 16,
    KIND_MEMORY = 64 << 20,
    SURE_GAP = 32, /* so that rows of `sure` do not all fall into the same lines of the cache */
};

/*
 * How closely the kinds of a chain describe their requests, the roughest first: the leading binary digits of amounts
 * that count (0: not at all), the steps in which durations do, and how many jobs must share a kind so described. The
 * closer a kind is, the more it saves for its requests, but the fewer jobs share its bounds. Steps of durations are
 * powers of the next ones, so that rounding down goes on from kind to kind.
 */
static const struct detail {
    uint8_t share, compute, cpus, host_memory;
    int32_t duration_step;
    uint32_t worth;
} details[] = {
    {1, 0, 0, 0, INT32_MAX, 0},
    {3, 2, 2, 1, INT32_MAX, 0},
    {31, 31, 31, 31, 64, 30},
};
enum { DETAILS = sizeof details / sizeof details[0] };

/* ---- making and freeing ---- */

bool first_starts_new(struct first_starts *first_starts, const struct timelines *timelines, uint32_t max_nodes)
{
    struct first_starts *made = first_starts;
    made->timelines = timelines;
    made->max_nodes = max_nodes;
    made->bounds_each = ((size_t)max_nodes + GROUP - 1) / GROUP * GROUP;
    size_t kinds = KIND_MEMORY / (made->bounds_each * sizeof *made->bounds);
    made->max_kinds = (uint32_t)(kinds < MIN_KINDS                ? MIN_KINDS
                                 : kinds > FIRST_STARTS_MAX_KINDS ? FIRST_STARTS_MAX_KINDS
                                                                  : kinds);
    made->sure_each = made->max_kinds + SURE_GAP;
    made->node_at = calloc(max_nodes, sizeof *made->node_at);
    made->position_of = calloc(max_nodes, sizeof *made->position_of);
    made->bounds = aligned_alloc(64, made->max_kinds * made->bounds_each * sizeof *made->bounds);
    made->lows = calloc(made->max_kinds * (made->bounds_each / GROUP), sizeof *made->lows);
    made->sure = calloc(made->bounds_each / LANES * made->sure_each, sizeof *made->sure);
    made->possible = calloc(max_nodes, sizeof *made->possible);
    return made->node_at && made->position_of && made->bounds && made->lows && made->sure && made->possible;
}

void first_starts_free(struct first_starts *first_starts)
{
    free(first_starts->node_at);
    free(first_starts->position_of);
    free(first_starts->bounds);
    free(first_starts->lows);
    free(first_starts->sure);
    free(first_starts->possible);
}

static void forget_kinds(struct first_starts *first_starts)
{
    first_starts->kind_count = 0;
    memset(first_starts->kind_table, 0, sizeof first_starts->kind_table);
}

void first_starts_reset(struct first_starts *first_starts, const struct sluice_cluster *cluster)
{
    forget_kinds(first_starts);
    memset(first_starts->jobs_of_kind, 0, sizeof first_starts->jobs_of_kind);
    first_starts->node_count = cluster->node_count;
    for (uint32_t node = 0; node < cluster->node_count; node++) {
        uint32_t rank = cluster->nodes[node].rank;
        first_starts->node_at[rank] = node;
        first_starts->position_of[node] = rank;
    }
}

/* ---- bounds ---- */

static size_t index_of(const struct first_starts *first_starts, const struct kind *kind)
{
    return (size_t)(kind - first_starts->kinds);
}

static int32_t *bounds_of(const struct first_starts *first_starts, const struct kind *kind)
{
    return &first_starts->bounds[index_of(first_starts, kind) * first_starts->bounds_each];
}

static int32_t *lows_of(const struct first_starts *first_starts, const struct kind *kind)
{
    return &first_starts->lows[index_of(first_starts, kind) * (first_starts->bounds_each / GROUP)];
}

static uint16_t *sure_of(const struct first_starts *first_starts, const struct kind *kind, uint32_t position)
{
    return &first_starts->sure[(size_t)position / LANES * first_starts->sure_each + index_of(first_starts, kind)];
}

/* A start with its position, so that the least of them is the first start and of several that of lowest rank. */
static uint64_t entry(int32_t start, uint32_t position)
{
    return (uint64_t)(uint32_t)start << 32 | position;
}

static int32_t start_of(uint64_t entry)
{
    return (int32_t)(entry >> 32);
}

static bool may_be_used(const struct sluice_cluster *cluster, const struct need *need, uint32_t node)
{
    return cluster->nodes[node].state == SLUICE_NODE_UP && sluice_node_allowed(need, node);
}

/* Could the kind ever start on the node? */
static bool ever(struct first_starts *first_starts, const struct kind *kind, uint32_t node)
{
    const struct sluice_cluster *cluster = first_starts->timelines->cluster;
    if (!may_be_used(cluster, &kind->need, node))
        return false;
    const uint32_t class = cluster->nodes[node].class_id;
    if (class < first_starts->max_nodes && first_starts->possible[class] != 2)
        return first_starts->possible[class];
    bool possible = sluice_offer_idle(cluster, &cluster->classes[class], &kind->need).units > 0;
    if (class < first_starts->max_nodes)
        first_starts->possible[class] = possible;
    return possible;
}

/* What a new kind knows: its parent's bounds, and where it can never start. */
static void begin_bounds(struct first_starts *first_starts, const struct kind *kind)
{
    const struct sluice_cluster *cluster = first_starts->timelines->cluster;
    int32_t *bounds = bounds_of(first_starts, kind);
    memset(first_starts->possible, 2,
           cluster->class_count < first_starts->max_nodes ? cluster->class_count : first_starts->max_nodes);
    for (uint32_t position = 0; position < first_starts->bounds_each; position++) {
        if (position % LANES == 0)
            *sure_of(first_starts, kind, position) = 0;
        if (position >= first_starts->node_count || !ever(first_starts, kind, first_starts->node_at[position]))
            bounds[position] = TIMELINE_NEVER;
        else
            bounds[position] = kind->parent ? first_starts_bound(first_starts, kind->parent, position) : 0;
    }
    memset(lows_of(first_starts, kind), 0, first_starts->bounds_each / GROUP * sizeof(int32_t));
}

int32_t first_starts_bound(const struct first_starts *first_starts, const struct kind *kind, uint32_t position)
{
    int32_t bound = 0;
    for (; kind; kind = kind->parent) {
        const int32_t known = bounds_of(first_starts, kind)[position];
        bound = known > bound ? known : bound;
    }
    return bound;
}

void first_starts_taken(struct first_starts *first_starts, uint32_t node)
{
    const uint32_t position = first_starts->position_of[node];
    uint16_t *sure = &first_starts->sure[(size_t)position / LANES * first_starts->sure_each];
    const uint16_t others = (uint16_t) ~(1 << position % LANES);
    for (uint32_t i = 0; i < first_starts->kind_count; i++)
        sure[i] &= others;
}

void first_starts_given(struct first_starts *first_starts, uint32_t node, int32_t time)
{
    const uint32_t position = first_starts->position_of[node];
    first_starts_taken(first_starts, node);
    for (uint32_t i = 0; i < first_starts->kind_count; i++) {
        const struct kind *kind = &first_starts->kinds[i];
        int32_t *bound = &bounds_of(first_starts, kind)[position];
        int32_t *low = &lows_of(first_starts, kind)[position / GROUP];
        if (*bound <= time ||
            (*bound == TIMELINE_NEVER && !may_be_used(first_starts->timelines->cluster, &kind->need, node)))
            continue;
        *bound = time;
        *low = time < *low ? time : *low;
    }
}

/* ---- kinds ---- */

/* The number with all but its `bits` leading binary digits zero. */
static int32_t rounded_down(int32_t value, int bits)
{
    if (bits == 0 || value >> bits == 0)
        return bits == 0 ? 0 : value;
    int dropped = 32 - __builtin_clz((unsigned)value) - bits;
    return value >> dropped << dropped;
}

static uint64_t mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ hash >> 29;
}

/* Of what kinds copy unchanged from their requests. */
static uint64_t hash_exact(const struct need *need)
{
    uint64_t hash = mix(0, (uint64_t)need->gpus << 32 | need->capability);
    hash = mix(hash, (uint64_t)need->gpu_memory_min << 32 | (uint64_t)need->exclusive << 24 |
                         (uint64_t)need->link << 16 | (uint64_t)need->numa << 8 | need->nic);
    hash = mix(hash, need->models);
    if (need->nics)
        hash = mix(mix(hash, need->nics), need->nic_kinds);
    return need->allowed ? mix(mix(hash, (uintptr_t)need->allowed), need->allowed_words) : hash;
}

static bool same_kind(const struct kind *a, const struct kind *b)
{
    return a->hash == b->hash && a->duration == b->duration && a->need.gpus == b->need.gpus &&
           a->need.share == b->need.share && a->need.compute == b->need.compute && a->need.cpus == b->need.cpus &&
           a->need.host_memory == b->need.host_memory && a->need.models == b->need.models &&
           a->need.capability == b->need.capability && a->need.gpu_memory_min == b->need.gpu_memory_min &&
           a->need.exclusive == b->need.exclusive && a->need.link == b->need.link && a->need.numa == b->need.numa &&
           a->need.nic == b->need.nic && a->need.nics == b->need.nics && a->need.nic_kinds == b->need.nic_kinds &&
           a->need.allowed == b->need.allowed && a->need.allowed_words == b->need.allowed_words;
}

/* Round a kind, so far the request itself or a closer kind than `detail` says. */
static void round_kind(struct kind *kind, uint64_t exact, const struct detail *detail)
{
    int32_t duration = 1;
    while ((int64_t)duration * detail->duration_step <= kind->duration)
        duration *= detail->duration_step;
    kind->duration = duration;
    kind->need.share = rounded_down(kind->need.share, detail->share);
    kind->need.compute = rounded_down(kind->need.compute, detail->compute);
    kind->need.cpus = rounded_down(kind->need.cpus, detail->cpus);
    kind->need.host_memory = rounded_down(kind->need.host_memory, detail->host_memory);
    kind->hash = mix(exact, (uint64_t)kind->duration << 32 | (uint32_t)kind->need.share) ^ (uint64_t)kind->need.compute;
    kind->hash = mix(kind->hash, (uint64_t)kind->need.cpus << 32 | (uint32_t)kind->need.host_memory);
}

void first_starts_expect(struct first_starts *first_starts, const struct need *need, int32_t duration)
{
    struct kind kind = {.need = *need, .duration = duration};
    const uint64_t exact = hash_exact(need);
    for (int i = DETAILS - 1; i >= 0; i--) {
        round_kind(&kind, exact, &details[i]);
        first_starts->jobs_of_kind[kind.hash % FIRST_STARTS_JOBS_OF_KIND]++;
    }
}

/* The kind that is like `wanted`, made if it is new; NULL if there is no room. */
static struct kind *find_kind(struct first_starts *first_starts, const struct kind *wanted)
{
    uint32_t slot = wanted->hash % FIRST_STARTS_KIND_TABLE;
    for (; first_starts->kind_table[slot]; slot = (slot + 1) % FIRST_STARTS_KIND_TABLE)
        if (same_kind(&first_starts->kinds[first_starts->kind_table[slot] - 1], wanted))
            return &first_starts->kinds[first_starts->kind_table[slot] - 1];
    if (first_starts->kind_count == first_starts->max_kinds)
        return NULL;
    struct kind *kind = &first_starts->kinds[first_starts->kind_count++];
    first_starts->kind_table[slot] = first_starts->kind_count;
    *kind = *wanted;
    begin_bounds(first_starts, kind);
    return kind;
}

/* The closest kind that is shared by enough jobs and that there is room for. */
static struct kind *closest_kind(struct first_starts *first_starts, const struct need *need, int32_t duration)
{
    const uint64_t exact = hash_exact(need);
    struct kind *kind = NULL;
    for (int i = 0; i < DETAILS; i++) {
        struct kind wanted = {.need = *need, .duration = duration, .parent = kind};
        round_kind(&wanted, exact, &details[i]);
        if (first_starts->jobs_of_kind[wanted.hash % FIRST_STARTS_JOBS_OF_KIND] < details[i].worth)
            break;
        struct kind *closer = find_kind(first_starts, &wanted);
        if (!closer && !kind) {
            forget_kinds(first_starts); /* all of them: bounds only save time */
            closer = find_kind(first_starts, &wanted);
        }
        if (!closer)
            break;
        kind = closer;
    }
    return kind;
}

const struct kind *first_starts_kind(struct first_starts *first_starts, const struct need *need, int32_t duration)
{
    return closest_kind(first_starts, need, duration);
}

/* ---- the search ---- */

/* A kind's first start on a node, or what is known of it if that is `limit` or later. */
static int32_t ask_kind(struct first_starts *first_starts, const struct kind *kind, uint32_t position, uint64_t limit)
{
    int32_t *bound = &bounds_of(first_starts, kind)[position];
    uint16_t *sure = sure_of(first_starts, kind, position);
    if (*sure >> position % LANES & 1 || entry(*bound, position) >= limit)
        return *bound;
    if (kind->parent) {
        const int32_t least = ask_kind(first_starts, kind->parent, position, limit);
        *bound = least > *bound ? least : *bound;
        if (entry(*bound, position) >= limit)
            return *bound;
    }
    *bound = timelines_earliest(first_starts->timelines, first_starts->node_at[position], &kind->need, kind->duration,
                                *bound);
    *sure |= (uint16_t)(1 << position % LANES);
    return *bound;
}

int32_t first_starts_ask(struct first_starts *first_starts, const struct kind *kind, uint32_t position, int32_t time)
{
    return ask_kind(first_starts, kind, position, entry(time, UINT32_MAX));
}

struct search {
    struct first_starts *first_starts;
    const struct kind *kind;
    const struct need *need;
    int32_t duration;
    const int32_t *chain[DETAILS]; /* the bounds of the kind and its parents */
    int depth;
    uint64_t best; /* the first start found */
    uint64_t next; /* the first bound of the limit or later that was met */
};

/* Which of 64 nodes from `position` on may start at `time` or earlier. */
static uint64_t candidates(const struct search *search, size_t position, int32_t time, four_lanes *low)
{
    uint64_t found = 0;
    for (int i = 0; i < 64; i += LANES) {
        four_lanes later[LANES / 4];
        for (int j = 0; j < LANES / 4; j++) {
            const size_t at = position + (size_t)(i + 4 * j);
            four_lanes bounds = lanes_load(&search->chain[0][at]);
            for (int k = 1; k < search->depth; k++)
                bounds = lanes_max(bounds, lanes_load(&search->chain[k][at]));
            *low = lanes_min(*low, bounds);
            later[j] = bounds > lanes_same(time);
        }
        found |= (uint64_t)(LANES_ALL & ~lanes_bits(later)) << i;
    }
    return found;
}

/* The budgets that count the need on a node. */
static uint64_t budgets_on(const struct first_starts *first_starts, const struct need *need, uint32_t node)
{
    return first_starts->power->counting[node] & need->power_budgets;
}

int32_t first_starts_on_node(const struct first_starts *first_starts, uint32_t node, const struct need *need,
                             int32_t duration, int32_t from)
{
    int32_t start = timelines_earliest(first_starts->timelines, node, need, duration, from);
    if (!first_starts->power)
        return start;
    const uint64_t budgets = budgets_on(first_starts, need, node);
    const int64_t watts = (int64_t)need->watts * need->gpus;
    while (start != TIMELINE_NEVER) {
        const int32_t powered = power_earliest(first_starts->power, budgets, watts, duration, start);
        if (powered == start || powered == TIMELINE_NEVER)
            return powered;
        start = timelines_earliest(first_starts->timelines, node, need, duration, powered);
        if (start == powered)
            return start;
    }
    return start;
}

/* A lower bound of the start of the need on a node, by its watts. */
static int32_t powered_on(const struct search *search, uint32_t position)
{
    const struct first_starts *first_starts = search->first_starts;
    if (!first_starts->power)
        return 0;
    return power_bound(first_starts->power, budgets_on(first_starts, search->need, first_starts->node_at[position]));
}

/* Ask one node for a start before `limit`, which moves to what it finds; not the request, if that was asked before. */
static uint64_t ask_node(struct search *search, uint32_t position, uint64_t asked, uint64_t limit)
{
    const struct first_starts *first_starts = search->first_starts;
    const int32_t powered = powered_on(search, position);
    int32_t bound = powered;
    if (entry(powered, position) < limit) {
        const int32_t fits = ask_kind(search->first_starts, search->kind, position, limit);
        bound = fits > bound ? fits : bound;
    }
    const uint64_t known = entry(bound, position);
    if (known >= limit)
        search->next = known < search->next ? known : search->next;
    if (known >= limit || known < asked)
        return limit;
    const int32_t start =
        first_starts_on_node(first_starts, first_starts->node_at[position], search->need, search->duration, bound);
    const uint64_t found = entry(start, position);
    search->best = found < search->best ? found : search->best;
    return found < limit ? found : limit;
}

/* The latest start before `limit` of nodes from `position` on. */
static int32_t latest_at(uint64_t limit, size_t position)
{
    return start_of(limit) - (position >= (uint32_t)limit);
}

/* Ask those of 64 nodes from `position` on that may start before `limit`, which moves to what they offer; adds to
 * `low` what bounds them. */
static uint64_t ask_nodes(struct search *search, size_t position, uint64_t asked, uint64_t limit, four_lanes *low)
{
    const struct first_starts *first_starts = search->first_starts;
    uint64_t left = candidates(search, position, latest_at(limit, position), low);
    for (uint64_t soon = left; soon; soon &= soon - 1)
        timelines_prefetch(first_starts->timelines, first_starts->node_at[position + (size_t)__builtin_ctzll(soon)]);
    while (left) {
        const size_t at = position + (size_t)__builtin_ctzll(left);
        const uint64_t found = ask_node(search, (uint32_t)at, asked, limit);
        left &= left - 1;
        if (found < limit && left) /* those that follow must start earlier */
            left &= candidates(search, position, latest_at(found, at), low);
        limit = found;
    }
    return limit;
}

/* Ask all nodes that may start before `limit`, as long as that is before the best start found; those that may start
 * before `asked` were asked. */
static void sweep(struct search *search, uint64_t asked, uint64_t limit)
{
    int32_t *lows = lows_of(search->first_starts, search->kind);
    for (size_t group = 0; group < search->first_starts->bounds_each / GROUP; group++) {
        if (lows[group] > latest_at(limit, group * GROUP))
            continue;
        four_lanes low = lanes_same(TIMELINE_NEVER);
        for (size_t at = group * GROUP; at < (group + 1) * GROUP; at += 64)
            limit = ask_nodes(search, at, asked, limit, &low);
        lows[group] = TIMELINE_NEVER;
        for (int i = 0; i < 4; i++)
            lows[group] = low[i] < lows[group] ? low[i] : lows[group];
    }
}

int32_t first_starts_find(struct first_starts *first_starts, const struct need *need, int32_t duration, int32_t latest,
                          uint32_t *position)
{
    struct kind *kind = closest_kind(first_starts, need, duration);
    struct search search = {
        .first_starts = first_starts, .kind = kind, .need = need, .duration = duration, .best = UINT64_MAX};
    for (const struct kind *above = kind; above; above = above->parent)
        search.chain[search.depth++] = bounds_of(first_starts, above);
    /* The first guess is that the request starts when the last one of its kind did; the next, what that showed. */
    const uint64_t end = latest == TIMELINE_NEVER ? entry(TIMELINE_NEVER, 0) : entry(latest, UINT32_MAX);
    uint64_t asked = 0, limit = entry(kind->last, UINT32_MAX);
    if (first_starts->power) {
        power_ask(first_starts->power, (int64_t)need->watts * need->gpus, duration);
        const int32_t powered = power_bound(first_starts->power, first_starts->power->everywhere & need->power_budgets);
        if (powered > latest || powered == TIMELINE_NEVER)
            return TIMELINE_NEVER;
        limit = powered > kind->last ? entry(powered, UINT32_MAX) : limit;
    }
    for (;;) {
        limit = limit < end ? limit : end;
        search.next = end;
        sweep(&search, asked, limit);
        if (search.best <= limit || limit == end)
            break;
        asked = limit;
        limit = search.best < search.next ? search.best : search.next | UINT32_MAX;
    }
    if (search.best >= end)
        return TIMELINE_NEVER;
    *position = (uint32_t)search.best;
    return kind->last = start_of(search.best);
}
