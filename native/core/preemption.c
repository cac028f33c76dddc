/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whom to preempt. Candidates of one gang form a unit, which goes as a whole. A node is freed by the cheapest set of
 * the units on it (branch and bound, cheapest units first); a request for several nodes frees the cheapest node until
 * it fits, and then takes back every unit that turned out unnecessary. What-if is done on the cluster itself:
 * allocations are suspended and resumed, which costs their parts.
 */
#include <stdlib.h>

#include "cluster.h"
#include "sluice/loss.h"
#include "sort.h"

/* Larger is worse, compared in this order. Adding a unit never makes a cost smaller, so that a partial set is a
 * bound. */
struct cost {
    uint32_t rank; /* highest of the units: 2 * tier, + 1 within quota */
    int64_t lost;  /* thousandths of a GPU-second (sluice/loss.h), sum */
    uint32_t candidates;
};

struct unit {
    uint32_t first, count; /* its candidates: by_gang[first .. first + count) */
    struct cost cost;
    bool eligible;
    bool suspended;
};

/* A candidate with what it is sorted by: its allocation, then its gang. */
struct keyed {
    uint64_t key;
    uint32_t index;
};

/* A unit with a part on a node, in the node's list. */
struct presence {
    uint32_t unit;
    uint32_t next;
};

struct sluice_preemption {
    struct sluice_cluster *cluster;
    uint32_t max_candidates;
    const struct sluice_candidate *candidates; /* of the call under way */
    struct keyed *by_gang;
    struct keyed *keyed_scratch;
    struct unit *units;
    uint32_t unit_count;
    uint32_t *first_presence; /* per node; NONE: no unit */
    struct presence *presences;
    uint32_t presence_count;
    uint32_t *touched; /* nodes that have presences */
    uint32_t touched_count;
    /* branch and bound on one node */
    struct unit **local; /* its units, cheapest first */
    struct unit **local_scratch;
    uint32_t local_count;
    bool *chosen, *best;
    struct cost best_cost;
    bool found;
    uint32_t tries;
    int64_t lost; /* by the last plan's victims */
};

enum sluice_error sluice_preemption_new(struct sluice_cluster *cluster, uint32_t max_candidates,
                                        struct sluice_preemption **preemption, struct sluice_error_text *text)
{
    if (max_candidates < 1 || max_candidates > SLUICE_MAX_ALLOCATIONS)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "preemption of %u candidates: 1 to %d", max_candidates,
                           SLUICE_MAX_ALLOCATIONS);
    struct sluice_preemption *made = calloc(1, sizeof *made);
    if (!made)
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "preemption of %u candidates: out of host memory",
                           max_candidates);
    made->cluster = cluster;
    made->max_candidates = max_candidates;
    made->by_gang = calloc(max_candidates, sizeof *made->by_gang);
    made->units = calloc(max_candidates, sizeof *made->units);
    made->keyed_scratch = calloc(max_candidates, sizeof *made->keyed_scratch);
    made->first_presence = malloc(cluster->size.max_nodes * sizeof *made->first_presence);
    made->presences = calloc(cluster->size.max_parts, sizeof *made->presences);
    made->touched = calloc(cluster->size.max_nodes, sizeof *made->touched);
    made->local = calloc(max_candidates, sizeof *made->local);
    made->local_scratch = calloc(max_candidates, sizeof *made->local_scratch);
    made->chosen = calloc(max_candidates, sizeof *made->chosen);
    made->best = calloc(max_candidates, sizeof *made->best);
    if (!made->by_gang || !made->keyed_scratch || !made->units || !made->first_presence || !made->presences ||
        !made->touched || !made->local || !made->local_scratch || !made->chosen || !made->best) {
        sluice_preemption_free(made);
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "preemption of %u candidates: out of host memory",
                           max_candidates);
    }
    for (uint32_t node = 0; node < cluster->size.max_nodes; node++)
        made->first_presence[node] = NONE;
    *preemption = made;
    return SLUICE_OK;
}

void sluice_preemption_free(struct sluice_preemption *preemption)
{
    if (!preemption)
        return;
    free(preemption->by_gang);
    free(preemption->units);
    free(preemption->keyed_scratch);
    free(preemption->first_presence);
    free(preemption->presences);
    free(preemption->touched);
    free(preemption->local);
    free(preemption->local_scratch);
    free(preemption->chosen);
    free(preemption->best);
    free(preemption);
}

/* ---- costs ---- */

static int compare_costs(const struct cost *left, const struct cost *right)
{
    if (left->rank != right->rank)
        return left->rank < right->rank ? -1 : 1;
    if (left->lost != right->lost)
        return left->lost < right->lost ? -1 : 1;
    return (left->candidates > right->candidates) - (left->candidates < right->candidates);
}

static struct cost add_costs(struct cost left, struct cost right)
{
    struct cost sum = {.rank = left.rank > right.rank ? left.rank : right.rank,
                       .candidates = left.candidates + right.candidates};
    if (__builtin_add_overflow(left.lost, right.lost, &sum.lost))
        sum.lost = INT64_MAX;
    return sum;
}

/* Of pointers to units; equal ones stay in their order. */
static int compare_units(const void *left_unit, const void *right_unit)
{
    return compare_costs(&(*(struct unit *const *)left_unit)->cost, &(*(struct unit *const *)right_unit)->cost);
}

static int compare_keys(const void *left_keyed, const void *right_keyed)
{
    const struct keyed *left = left_keyed, *right = right_keyed;
    return (left->key > right->key) - (left->key < right->key);
}

static bool may_go(const struct sluice_candidate *candidate, const struct sluice_preemptor *preemptor, int64_t now_s)
{
    if (now_s - candidate->started_s < candidate->min_run_s)
        return false;
    return candidate->tier < preemptor->tier ||
           (preemptor->reclaims && candidate->over_quota && candidate->tier == preemptor->tier);
}

static int64_t gpus_milli(const struct sluice_cluster *cluster, uint64_t allocation, bool weighs_shares)
{
    if (weighs_shares)
        return sluice_allocation_gpus_milli(cluster, allocation);
    int64_t milli = 0;
    for (uint32_t at = sluice_allocation_first_part(cluster, allocation); at != NONE; at = cluster->parts[at].next)
        milli += INT64_C(1000) * sluice_count(cluster->parts[at].gpus);
    return milli;
}

static struct cost cost_of(const struct sluice_cluster *cluster, const struct sluice_candidate *candidate,
                           const struct sluice_preemptor *preemptor, int64_t now_s)
{
    const struct sluice_stake stake = {.started_s = candidate->started_s,
                                       .saved_s = candidate->checkpoint_s,
                                       .save_s = candidate->save_s,
                                       .restart_s = candidate->restart_s,
                                       .gpus_milli =
                                           gpus_milli(cluster, candidate->allocation, preemptor->weighs_shares)};
    return (struct cost){.rank = 2 * candidate->tier + (candidate->over_quota ? 0 : 1),
                         .lost = sluice_loss(&stake, SLUICE_WAY_PREEMPT, now_s),
                         .candidates = 1};
}

/* ---- set-up of a call ---- */

static enum sluice_error check_candidates(const struct sluice_preemption *preemption,
                                          const struct sluice_candidate *candidates, uint32_t count, int64_t now_s,
                                          struct sluice_error_text *text)
{
    if (count > preemption->max_candidates)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY, "%u candidates: the preemption was made for %u", count,
                           preemption->max_candidates);
    for (uint32_t i = 0; i < count; i++) {
        const struct sluice_candidate *candidate = &candidates[i];
        if (!sluice_allocation_known(preemption->cluster, candidate->allocation))
            return sluice_fail(text, SLUICE_ERROR_UNKNOWN, "candidate %u: the cluster has no allocation %llu", i,
                               (unsigned long long)candidate->allocation);
        if (candidate->started_s < 0 || candidate->started_s > now_s || candidate->checkpoint_s < 0 ||
            candidate->checkpoint_s > now_s || candidate->min_run_s < 0 || candidate->save_s < 0 ||
            candidate->restart_s < 0)
            return sluice_fail(text, SLUICE_ERROR_RANGE,
                               "candidate %u: started %lld s, checkpoint %lld s, minimum run %lld s, save %lld s, "
                               "restart %lld s: negative or after now, %lld s",
                               i, (long long)candidate->started_s, (long long)candidate->checkpoint_s,
                               (long long)candidate->min_run_s, (long long)candidate->save_s,
                               (long long)candidate->restart_s, (long long)now_s);
        if (candidate->tier >= UINT32_MAX / 2)
            return sluice_fail(text, SLUICE_ERROR_RANGE, "candidate %u: tier %u: below 2^31", i, candidate->tier);
    }
    return SLUICE_OK;
}

static enum sluice_error check_duplicates(struct sluice_preemption *preemption, uint32_t count,
                                          struct sluice_error_text *text)
{
    struct keyed *keyed = preemption->by_gang;
    for (uint32_t i = 0; i < count; i++)
        keyed[i] = (struct keyed){.key = preemption->candidates[i].allocation, .index = i};
    sluice_sort(keyed, preemption->keyed_scratch, count, sizeof *keyed, compare_keys);
    for (uint32_t i = 1; i < count; i++) {
        if (keyed[i].key == keyed[i - 1].key)
            return sluice_fail(text, SLUICE_ERROR_DUPLICATE, "candidates %u and %u: both are allocation %llu",
                               keyed[i - 1].index, keyed[i].index, (unsigned long long)keyed[i].key);
    }
    return SLUICE_OK;
}

static void make_units(struct sluice_preemption *preemption, const struct sluice_preemptor *preemptor, uint32_t count,
                       int64_t now_s)
{
    struct keyed *keyed = preemption->by_gang;
    for (uint32_t i = 0; i < count; i++)
        keyed[i] = (struct keyed){.key = preemption->candidates[i].gang, .index = i};
    sluice_sort(keyed, preemption->keyed_scratch, count, sizeof *keyed, compare_keys);
    preemption->unit_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        const struct sluice_candidate *candidate = &preemption->candidates[keyed[i].index];
        if (candidate->gang == 0 || i == 0 || keyed[i].key != keyed[i - 1].key)
            preemption->units[preemption->unit_count++] = (struct unit){.first = i, .eligible = true};
        struct unit *unit = &preemption->units[preemption->unit_count - 1];
        unit->count++;
        unit->eligible = unit->eligible && may_go(candidate, preemptor, now_s);
        unit->cost = add_costs(unit->cost, cost_of(preemption->cluster, candidate, preemptor, now_s));
    }
}

static uint64_t member(const struct sluice_preemption *preemption, const struct unit *unit, uint32_t number)
{
    return preemption->candidates[preemption->by_gang[unit->first + number].index].allocation;
}

/* Lists the eligible units by node; a unit's parts are met together, so that it is listed once a node. */
static void list_presences(struct sluice_preemption *preemption)
{
    const struct sluice_cluster *cluster = preemption->cluster;
    preemption->presence_count = preemption->touched_count = 0;
    for (uint32_t u = 0; u < preemption->unit_count; u++) {
        const struct unit *unit = &preemption->units[u];
        for (uint32_t i = 0; unit->eligible && i < unit->count; i++) {
            for (uint32_t at = sluice_allocation_first_part(cluster, member(preemption, unit, i)); at != NONE;
                 at = cluster->parts[at].next) {
                uint32_t node = cluster->parts[at].node;
                uint32_t first = preemption->first_presence[node];
                if (first == NONE)
                    preemption->touched[preemption->touched_count++] = node;
                else if (preemption->presences[first].unit == u)
                    continue;
                preemption->presences[preemption->presence_count] = (struct presence){.unit = u, .next = first};
                preemption->first_presence[node] = preemption->presence_count++;
            }
        }
    }
}

static void forget_presences(struct sluice_preemption *preemption)
{
    for (uint32_t i = 0; i < preemption->touched_count; i++)
        preemption->first_presence[preemption->touched[i]] = NONE;
}

/* ---- what if ---- */

static void suspend(struct sluice_preemption *preemption, struct unit *unit)
{
    for (uint32_t i = 0; i < unit->count; i++)
        sluice_allocation_suspend(preemption->cluster, member(preemption, unit, i));
    unit->suspended = true;
}

static void resume(struct sluice_preemption *preemption, struct unit *unit)
{
    for (uint32_t i = 0; i < unit->count; i++)
        sluice_allocation_resume(preemption->cluster, member(preemption, unit, i));
    unit->suspended = false;
}

/* ---- the cheapest set of one node ---- */

struct node_search {
    struct sluice_preemption *preemption;
    const struct need *need;
    uint32_t node;
    uint32_t units; /* that the node is to offer */
};

static uint32_t node_offers(const struct node_search *search)
{
    const struct sluice_cluster *cluster = search->preemption->cluster;
    search->preemption->tries++;
    if (!sluice_node_open(cluster, search->node) || !sluice_node_allowed(search->need, search->node))
        return 0;
    return sluice_offer_now(cluster, search->node, search->need).units;
}

static bool node_fits(const struct node_search *search)
{
    return node_offers(search) >= search->units;
}

/* Decides units from `index` on; what is chosen so far is suspended and costs `cost`. Including comes first, so that
 * the first find is the greedy one and a search that runs out of tries still has it. */
static void search_node(const struct node_search *search, uint32_t index, struct cost cost)
{
    struct sluice_preemption *preemption = search->preemption;
    if (preemption->found &&
        (compare_costs(&cost, &preemption->best_cost) >= 0 || preemption->tries >= SLUICE_PREEMPTION_TRIES))
        return;
    if (node_fits(search)) {
        preemption->found = true;
        preemption->best_cost = cost;
        for (uint32_t i = 0; i < preemption->local_count; i++)
            preemption->best[i] = i < index && preemption->chosen[i];
        return;
    }
    if (index == preemption->local_count)
        return;
    struct unit *unit = preemption->local[index];
    suspend(preemption, unit);
    preemption->chosen[index] = true;
    search_node(search, index + 1, add_costs(cost, unit->cost));
    resume(preemption, unit);
    preemption->chosen[index] = false;
    search_node(search, index + 1, cost);
}

/* The node's units that are not suspended yet, cheapest first. */
static void list_local(struct sluice_preemption *preemption, uint32_t node)
{
    preemption->local_count = 0;
    for (uint32_t at = preemption->first_presence[node]; at != NONE; at = preemption->presences[at].next) {
        struct unit *unit = &preemption->units[preemption->presences[at].unit];
        if (!unit->suspended)
            preemption->local[preemption->local_count++] = unit;
    }
    sluice_sort(preemption->local, preemption->local_scratch, preemption->local_count, sizeof *preemption->local,
                compare_units);
}

/* Whether the node would fit without any of its units. */
static bool can_be_freed(const struct node_search *search)
{
    struct sluice_preemption *preemption = search->preemption;
    for (uint32_t i = 0; i < preemption->local_count; i++)
        suspend(preemption, preemption->local[i]);
    bool fits = node_fits(search);
    for (uint32_t i = 0; i < preemption->local_count; i++)
        resume(preemption, preemption->local[i]);
    return fits;
}

/* Suspends the cheapest set of units that makes one more node fit, or with a total offer one more GPU; false when there
 * is none. */
static bool free_cheapest_node(struct sluice_preemption *preemption, const struct need *need)
{
    struct node_search search = {.preemption = preemption, .need = need};
    uint32_t cheapest = NONE;
    preemption->found = false;
    for (uint32_t i = 0; i < preemption->touched_count; i++) {
        search.node = preemption->touched[i];
        preemption->tries = 0;
        list_local(preemption, search.node);
        uint32_t units_now = node_offers(&search);
        search.units = need->total ? units_now + 1 : 1;
        if (units_now >= search.units || preemption->local_count == 0 || !can_be_freed(&search))
            continue;
        struct cost before = preemption->best_cost;
        bool found_before = preemption->found;
        search_node(&search, 0, (struct cost){0});
        if (!found_before || compare_costs(&preemption->best_cost, &before) < 0)
            cheapest = search.node;
    }
    if (cheapest == NONE)
        return false;
    /* `best` belongs to the cheapest node: no later search improved on it. */
    list_local(preemption, cheapest);
    for (uint32_t i = 0; i < preemption->local_count; i++) {
        if (preemption->best[i])
            suspend(preemption, preemption->local[i]);
    }
    return true;
}

/* ---- the plan ---- */

/* Resumes, most expensive first, every suspended unit without which the request still fits. */
static void take_back_needless(struct sluice_preemption *preemption, enum sluice_policy policy,
                               const struct sluice_request *request, struct sluice_placement *placement)
{
    preemption->local_count = 0;
    for (uint32_t u = 0; u < preemption->unit_count; u++) {
        if (preemption->units[u].suspended)
            preemption->local[preemption->local_count++] = &preemption->units[u];
    }
    sluice_sort(preemption->local, preemption->local_scratch, preemption->local_count, sizeof *preemption->local,
                compare_units);
    for (uint32_t i = preemption->local_count; i-- > 0;) {
        resume(preemption, preemption->local[i]);
        if (sluice_place(preemption->cluster, policy, request, placement, NULL) != SLUICE_OK)
            suspend(preemption, preemption->local[i]);
    }
}

static uint32_t list_victims(struct sluice_preemption *preemption, uint32_t count, uint32_t *victims)
{
    bool *goes = preemption->chosen;
    for (uint32_t i = 0; i < count; i++)
        goes[i] = false;
    struct cost cost = {0};
    for (uint32_t u = 0; u < preemption->unit_count; u++) {
        const struct unit *unit = &preemption->units[u];
        if (unit->suspended)
            cost = add_costs(cost, unit->cost);
        for (uint32_t i = 0; unit->suspended && i < unit->count; i++)
            goes[preemption->by_gang[unit->first + i].index] = true;
    }
    preemption->lost = cost.lost;
    uint32_t found = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (goes[i])
            victims[found++] = i;
        goes[i] = false;
    }
    return found;
}

enum sluice_error sluice_preemption_plan(struct sluice_preemption *preemption, enum sluice_policy policy,
                                         const struct sluice_request *request, const struct sluice_preemptor *preemptor,
                                         const struct sluice_candidate *candidates, uint32_t count, int64_t now_s,
                                         struct sluice_placement *placement, uint32_t *victims, uint32_t *victim_count,
                                         struct sluice_error_text *text)
{
    struct sluice_cluster *cluster = preemption->cluster;
    struct need need;
    preemption->lost = 0;
    enum sluice_error error = sluice_need_from_request(cluster, request, &need, text);
    if (error == SLUICE_OK)
        error = check_candidates(preemption, candidates, count, now_s, text);
    preemption->candidates = candidates;
    if (error == SLUICE_OK)
        error = check_duplicates(preemption, count, text);
    if (error != SLUICE_OK)
        return error;

    make_units(preemption, preemptor, count, now_s);
    list_presences(preemption);
    bool preempts = false;
    while ((error = sluice_place(cluster, policy, request, placement, text)) == SLUICE_ERROR_NO_PLACE &&
           free_cheapest_node(preemption, &need))
        preempts = true;
    if (error == SLUICE_OK && preempts) {
        take_back_needless(preemption, policy, request, placement);
        error = sluice_place(cluster, policy, request, placement, text);
    }
    if (error == SLUICE_OK)
        *victim_count = list_victims(preemption, count, victims);
    for (uint32_t u = 0; u < preemption->unit_count; u++) {
        if (preemption->units[u].suspended)
            resume(preemption, &preemption->units[u]);
    }
    forget_presences(preemption);
    return error;
}

int64_t sluice_preemption_loss(const struct sluice_preemption *preemption)
{
    return preemption->lost;
}
