/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which running jobs to move so that a waiting one can start. First a node is sought that the cheapest set of jobs
 * (branch and bound) can leave for places that are free, and another one, until the waiting job has as many as it needs.
 * Where there are not enough, jobs are exchanged until one large hole is made of several small ones (exchange.c). Whether
 * a set can really go, all of it together, is tried on the cluster itself, and taken back: what-if, as in preemption.c.
 */
#include "compaction.h"

#include <stdlib.h>
#include <string.h>

enum {
    LOCAL_MAX = 64,   /* jobs of one node that are considered, cheapest first */
    NODE_TRIES = 256, /* steps of the branch and bound on one node */
    PLACE_TRIES = 16, /* nodes, or sets of them, that are tried */
};

/* A node to clear. */
struct room {
    int64_t cost;
    uint32_t node; /* NONE: there is none */
    uint32_t count;
    uint32_t victims[SLUICE_COMPACTION_MAX_MOVES];
};

enum sluice_error sluice_compaction_new(struct sluice_cluster *cluster, uint32_t max_movables, uint32_t max_requests,
                                        struct sluice_compaction **compaction, struct sluice_error_text *text)
{
    if (max_movables < 1 || max_movables > SLUICE_MAX_ALLOCATIONS || max_requests < 1 ||
        max_requests > SLUICE_MAX_ALLOCATIONS)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "compaction of %u jobs of %u requests: each 1 to %d", max_movables,
                           max_requests, SLUICE_MAX_ALLOCATIONS);
    size_t slots = max_movables + (size_t)cluster->size.max_nodes * SLUICE_MAX_GPUS;
    struct sluice_compaction *made = calloc(1, sizeof *made);
    if (made) {
        made->cluster = cluster;
        made->max_movables = max_movables;
        made->max_requests = max_requests;
        made->needs = calloc(max_requests, sizeof *made->needs);
        made->vacancies = calloc(max_requests, sizeof *made->vacancies);
        made->first_on_node = malloc(cluster->size.max_nodes * sizeof *made->first_on_node);
        made->next_on_node = calloc(max_movables, sizeof *made->next_on_node);
        made->moved = calloc(max_movables, sizeof *made->moved);
        made->now = calloc(max_movables, sizeof *made->now);
        made->slots = calloc(slots, sizeof *made->slots);
        made->seen = calloc(cluster->size.max_allocations, sizeof *made->seen);
        made->barred = calloc(cluster->size.max_nodes, sizeof *made->barred);
        made->holds = calloc(cluster->size.max_nodes, sizeof *made->holds);
    }
    if (!made || !made->needs || !made->vacancies || !made->first_on_node || !made->next_on_node || !made->moved ||
        !made->now || !made->slots || !made->seen || !made->barred || !made->holds) {
        sluice_compaction_free(made);
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "compaction of %u jobs: out of host memory", max_movables);
    }
    *compaction = made;
    return SLUICE_OK;
}

void sluice_compaction_free(struct sluice_compaction *compaction)
{
    if (!compaction)
        return;
    free(compaction->needs);
    free(compaction->vacancies);
    free(compaction->first_on_node);
    free(compaction->next_on_node);
    free(compaction->moved);
    free(compaction->now);
    free(compaction->slots);
    free(compaction->seen);
    free(compaction->barred);
    free(compaction->holds);
    free(compaction);
}

/* ---- what-if ---- */

static void record(struct sluice_compaction *compaction, struct step step)
{
    compaction->steps[compaction->step_count++] = step;
}

void sluice_compaction_take_off(struct sluice_compaction *compaction, uint32_t movable)
{
    const struct sluice_movable *job = &compaction->movables[movable];
    bool first = !compaction->moved[movable];
    if (first) {
        sluice_allocation_suspend(compaction->cluster, job->allocation);
        compaction->moved[movable] = true;
        compaction->moves++;
        compaction->spent += job->cost;
    } else {
        sluice_part_give(compaction->cluster, &compaction->now[movable]);
    }
    record(compaction,
           (struct step){.leaves = true, .first = first, .movable = movable, .part = compaction->now[movable]});
}

void sluice_compaction_put_on(struct sluice_compaction *compaction, uint32_t movable, const struct sluice_part *part)
{
    struct part held = sluice_part_held(part);
    sluice_part_take(compaction->cluster, &held);
    compaction->now[movable] = held;
    record(compaction, (struct step){.movable = movable, .part = held});
}

void sluice_compaction_undo(struct sluice_compaction *compaction, uint32_t step_count)
{
    while (compaction->step_count > step_count) {
        const struct step *step = &compaction->steps[--compaction->step_count];
        if (!step->leaves) {
            sluice_part_give(compaction->cluster, &step->part);
            continue;
        }
        compaction->now[step->movable] = step->part;
        if (step->first) {
            const struct sluice_movable *job = &compaction->movables[step->movable];
            sluice_allocation_resume(compaction->cluster, job->allocation);
            compaction->moved[step->movable] = false;
            compaction->moves--;
            compaction->spent -= job->cost;
        } else {
            sluice_part_take(compaction->cluster, &step->part);
        }
    }
}

/* ---- the cheapest node to clear ---- */

/* What a node has free if some of its jobs go. */
struct remainder {
    struct gpu_amounts gpu_free;
    struct gpu_percents compute_free;
    int32_t cpus, host_memory;
    uint32_t parts;
    uint32_t nics;
};

struct node_search {
    const struct need *need;
    const struct shape *shape;
    uint16_t usable; /* GPUs that are healthy and will do */
    struct remainder left;
    uint32_t locals[LOCAL_MAX]; /* movables */
    uint32_t count, tries, most_moves;
    const struct sluice_compaction *compaction;
    uint32_t chosen[SLUICE_COMPACTION_MAX_MOVES];
    struct room *best;
    uint32_t node;
};

static bool enough_besides_gpus(const struct node_search *search)
{
    const struct need *need = search->need;
    uint32_t nics = search->left.nics & sluice_nics_accepted(search->shape, need->nic_kinds, 0);
    return search->left.cpus >= need->cpus && search->left.host_memory >= need->host_memory &&
           __builtin_popcount(nics) >= (int)need->nics;
}

static bool fits(const struct node_search *search)
{
    const struct need *need = search->need;
    if (need->exclusive && search->left.parts)
        return false;
    uint16_t fit = search->usable;
    if (need->share) {
        fit = sluice_with_free(&search->left.gpu_free, fit, need->share);
        fit = sluice_with_compute(search->left.compute_free.percent, fit, need->compute);
    } else {
        for (unsigned set = fit; set; set &= set - 1) {
            int gpu = __builtin_ctz(set);
            if (search->left.gpu_free.mib[gpu] != search->shape->memory.mib[gpu])
                fit ^= (uint16_t)(1u << gpu);
        }
    }
    struct offer offer = sluice_offer_of(search->shape, need, search->left.cpus, search->left.host_memory, fit);
    return sluice_offer_with_nics(search->shape, need, search->left.nics, offer).units;
}

/* With `sign` 1 the part goes, with -1 it comes back. */
static void change(struct node_search *search, const struct part *part, int sign)
{
    for (unsigned set = part->gpus; set; set &= set - 1) {
        int gpu = __builtin_ctz(set);
        search->left.gpu_free.mib[gpu] += sign * (part->share ? part->share : search->shape->memory.mib[gpu]);
        search->left.compute_free.percent[gpu] =
            (uint8_t)(search->left.compute_free.percent[gpu] + sign * part->compute);
    }
    search->left.cpus += sign * part->cpus;
    search->left.host_memory += sign * part->host_memory;
    search->left.parts -= (uint32_t)sign;
    search->left.nics ^= part->nics;
}

/* Decides jobs from `index` on, `count` are chosen so far; cheapest first, so that no later one can be cheaper. */
static void choose(struct node_search *search, uint32_t index, uint32_t count, int64_t cost)
{
    struct room *best = search->best;
    if (fits(search)) {
        *best = (struct room){.cost = cost, .node = search->node, .count = count};
        memcpy(best->victims, search->chosen, count * sizeof *best->victims);
        return;
    }
    for (; index < search->count && count < search->most_moves && search->tries; index++) {
        uint32_t movable = search->locals[index];
        int64_t its = search->compaction->movables[movable].cost;
        if (its >= best->cost - cost)
            return;
        search->tries--;
        search->chosen[count] = movable;
        change(search, &search->compaction->now[movable], 1);
        choose(search, index + 1, count + 1, cost + its);
        change(search, &search->compaction->now[movable], -1);
    }
}

/* Is there a place for a request, in addition to what is held? Worked out once in a call: what is cleared and held since was no
 * place before. */
static bool has_place(struct sluice_compaction *compaction, uint32_t request)
{
    struct vacancy *vacancy = &compaction->vacancies[request];
    struct sluice_part part;
    struct sluice_placement placement = {.parts = &part, .part_capacity = 1};
    if (vacancy->call != compaction->call)
        *vacancy = (struct vacancy){.call = compaction->call,
                                    .place = !sluice_place(compaction->cluster, SLUICE_POLICY_SLUICE,
                                                           &compaction->requests[request], &placement, NULL)};
    return vacancy->place;
}

/* The node's jobs that could go, cheapest first. */
static void list_locals(struct sluice_compaction *compaction, struct node_search *search)
{
    bool only_gpus = enough_besides_gpus(search) && !search->need->exclusive;
    search->count = 0;
    for (uint32_t at = compaction->first_on_node[search->node]; at != NONE; at = compaction->next_on_node[at]) {
        const struct sluice_movable *movable = &compaction->movables[at];
        if ((only_gpus && !(compaction->now[at].gpus & search->usable)) || !has_place(compaction, movable->request))
            continue;
        if (search->count == LOCAL_MAX && compaction->movables[search->locals[LOCAL_MAX - 1]].cost <= movable->cost)
            continue;
        uint32_t place = search->count < LOCAL_MAX ? search->count++ : LOCAL_MAX - 1;
        for (; place > 0 && compaction->movables[search->locals[place - 1]].cost > movable->cost; place--)
            search->locals[place] = search->locals[place - 1];
        search->locals[place] = at;
    }
}

/* Could the node take it, were all that can go gone? */
static bool can_be_cleared(struct node_search *search)
{
    for (uint32_t i = 0; i < search->count; i++)
        change(search, &search->compaction->now[search->locals[i]], 1);
    bool possible = fits(search);
    for (uint32_t i = 0; i < search->count; i++)
        change(search, &search->compaction->now[search->locals[i]], -1);
    return possible;
}

/* The cheapest node that is not barred and could be cleared for a request. */
static struct room find_room(struct sluice_compaction *compaction, const struct need *need)
{
    struct sluice_cluster *cluster = compaction->cluster;
    struct room best = {.cost = compaction->most_cost - compaction->spent, .node = NONE};
    for (uint32_t node = 0; node < cluster->node_count; node++) {
        const struct node *row = &cluster->nodes[node];
        if (compaction->barred[node] || compaction->first_on_node[node] == NONE || !sluice_node_open(cluster, node) ||
            !sluice_node_allowed(need, node) || !sluice_offer_idle(cluster, sluice_class_of(cluster, node), need).units)
            continue;
        struct node_search search = {
            .compaction = compaction,
            .need = need,
            .shape = sluice_shape_of(cluster, node),
            .usable = sluice_eligible(sluice_shape_of(cluster, node), need) & row->healthy,
            .left = {.gpu_free = cluster->gpu_free[node],
                     .compute_free = cluster->compute_free[node],
                     .cpus = row->cpus_free,
                     .host_memory = row->host_memory_free,
                     .parts = row->parts,
                     .nics = cluster->nics_free[node]},
            .tries = NODE_TRIES,
            .most_moves = compaction->most_moves - compaction->moves,
            .best = &best,
            .node = node,
        };
        list_locals(compaction, &search);
        if (can_be_cleared(&search))
            choose(&search, 0, 0, 0);
    }
    return best;
}

/* Which of two goes first to where there is room: the one with the larger GPU need. */
static bool larger(const struct need *a, const struct need *b)
{
    if (a->gpus != b->gpus)
        return a->gpus > b->gpus;
    if (a->share != b->share)
        return !a->share || (b->share && a->share > b->share);
    return a->cpus > b->cpus;
}

static bool put_on_free_place(struct sluice_compaction *compaction, uint32_t movable)
{
    struct sluice_part part;
    struct sluice_placement placement = {.parts = &part, .part_capacity = 1};
    const struct sluice_request *request = &compaction->requests[compaction->movables[movable].request];
    if (sluice_place(compaction->cluster, compaction->policy, request, &placement, NULL))
        return false;
    sluice_compaction_put_on(compaction, movable, &part);
    return true;
}

/* Hold the waiting job's place on a node, if there is one. */
static bool hold(struct sluice_compaction *compaction, const struct need *need, uint32_t node)
{
    struct choice choice;
    if (!sluice_try_node(compaction->cluster, &sluice_policies[compaction->policy], need, need->gpus, node, &choice,
                         NULL))
        return false;
    struct sluice_part part = sluice_part_of(need, choice.node, choice.gpus, choice.nics);
    struct part *held = &compaction->holds[compaction->hold_count++];
    *held = sluice_part_held(&part);
    sluice_part_take(compaction->cluster, held);
    compaction->barred[node] = true;
    return true;
}

static void let_go(struct sluice_compaction *compaction)
{
    while (compaction->hold_count) {
        const struct part *held = &compaction->holds[--compaction->hold_count];
        sluice_part_give(compaction->cluster, held);
        compaction->barred[held->node] = false;
    }
}

/* A request for several nodes needs all nodes where there is room for it now: they are too few. */
static void hold_what_is_free(struct sluice_compaction *compaction, const struct need *need)
{
    for (uint32_t node = 0;
         need->nodes_min > 1 && node < compaction->cluster->node_count && compaction->hold_count < need->nodes_min;
         node++)
        (void)hold(compaction, need, node);
}

/* Put all that was taken off its node elsewhere, what is hard to place first. NONE: all found a place; or the node of
 * one that did not. */
static uint32_t put_back(struct sluice_compaction *compaction)
{
    uint32_t order[SLUICE_COMPACTION_MAX_MOVES], count = compaction->step_count;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = i, victim = compaction->steps[i].movable;
        const struct need *its = &compaction->needs[compaction->movables[victim].request];
        for (; at > 0 && larger(its, &compaction->needs[compaction->movables[order[at - 1]].request]); at--)
            order[at] = order[at - 1];
        order[at] = victim;
    }
    for (uint32_t i = 0; i < count; i++) {
        uint32_t from = compaction->now[order[i]].node;
        if (!put_on_free_place(compaction, order[i]))
            return from;
    }
    return NONE;
}

/* Clear nodes until the waiting job has as many as it needs, and put the others elsewhere. False, with some steps done:
 * *stuck is a node for which that is no use, or NONE, where there is no other to clear. */
static bool clear(struct sluice_compaction *compaction, const struct need *need, uint32_t *stuck)
{
    uint32_t last = NONE;
    *stuck = NONE;
    while (compaction->hold_count < need->nodes_min) {
        struct room room = find_room(compaction, need);
        if (room.node == NONE)
            return false;
        for (uint32_t i = 0; i < room.count; i++)
            sluice_compaction_take_off(compaction, room.victims[i]);
        last = room.node;
        if (!hold(compaction, need, last))
            break;
    }
    bool held = compaction->hold_count == need->nodes_min;
    uint32_t without = held ? put_back(compaction) : last;
    *stuck = without == NONE ? last : without;
    return without == NONE;
}

static bool place_asked(struct sluice_compaction *compaction, uint32_t asked, struct sluice_placement *placement)
{
    return !sluice_place(compaction->cluster, compaction->policy, &compaction->requests[asked], placement, NULL);
}

static bool clear_nodes(struct sluice_compaction *compaction, uint32_t asked, struct sluice_placement *placement)
{
    const struct need *need = &compaction->needs[asked];
    uint32_t stuck = NONE;
    memset(compaction->barred, 0, compaction->cluster->node_count * sizeof *compaction->barred);
    for (uint32_t tries = 0; tries == 0 || (tries < PLACE_TRIES && stuck != NONE); tries++) {
        hold_what_is_free(compaction, need);
        bool cleared = clear(compaction, need, &stuck);
        let_go(compaction);
        if (cleared && place_asked(compaction, asked, placement))
            return true;
        sluice_compaction_undo(compaction, 0);
        if (stuck != NONE)
            compaction->barred[stuck] = true;
    }
    return false;
}

static bool exchange_until_it_fits(struct sluice_compaction *compaction, uint32_t asked,
                                   struct sluice_placement *placement)
{
    while (sluice_compaction_exchange(compaction))
        if (place_asked(compaction, asked, placement))
            return true;
    return false;
}

/* ---- a call ---- */

static enum sluice_error check_limits(const struct sluice_compaction_limits *limits, struct sluice_error_text *text)
{
    if (limits->gain < 0 || limits->gain > INT64_MAX / 1000 || limits->factor_permille < 1 ||
        limits->moves > SLUICE_COMPACTION_MAX_MOVES)
        return sluice_fail(text, SLUICE_ERROR_RANGE,
                           "compaction: gain %lld, factor %u permille, %u moves: 0 to %lld, at least 1, at most %d",
                           (long long)limits->gain, limits->factor_permille, limits->moves,
                           (long long)(INT64_MAX / 1000), SLUICE_COMPACTION_MAX_MOVES);
    return SLUICE_OK;
}

static enum sluice_error read_requests(struct sluice_compaction *compaction, const struct sluice_request *requests,
                                       uint32_t count, uint32_t asked, struct sluice_error_text *text)
{
    if (count > compaction->max_requests || asked >= count)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY, "request %u of %u: the compaction was made for %u", asked,
                           count, compaction->max_requests);
    for (uint32_t i = 0; i < count; i++) {
        enum sluice_error error =
            sluice_need_from_request(compaction->cluster, &requests[i], &compaction->needs[i], text);
        if (error)
            return error;
    }
    if (compaction->needs[asked].total)
        return sluice_fail(text, SLUICE_ERROR_INVALID,
                           "request %u: GPUs in total of up to %u nodes; room is made where each node's are known",
                           asked, compaction->needs[asked].nodes_max);
    compaction->requests = requests;
    compaction->request_count = count;
    return SLUICE_OK;
}

static enum sluice_error list_movables(struct sluice_compaction *compaction, const struct sluice_movable *movables,
                                       uint32_t count, struct sluice_error_text *text)
{
    struct sluice_cluster *cluster = compaction->cluster;
    if (count > compaction->max_movables)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY, "%u movable jobs: the compaction was made for %u", count,
                           compaction->max_movables);
    for (uint32_t node = 0; node < cluster->node_count; node++)
        compaction->first_on_node[node] = NONE;
    compaction->call++;
    for (uint32_t i = 0; i < count; i++) {
        const struct sluice_movable *movable = &movables[i];
        if (!sluice_allocation_known(cluster, movable->allocation))
            return sluice_fail(text, SLUICE_ERROR_UNKNOWN, "movable job %u: the cluster has no allocation %llu", i,
                               (unsigned long long)movable->allocation);
        uint32_t *seen = &compaction->seen[(uint32_t)movable->allocation];
        if (*seen == compaction->call)
            return sluice_fail(text, SLUICE_ERROR_DUPLICATE, "movable job %u: allocation %llu is listed twice", i,
                               (unsigned long long)movable->allocation);
        *seen = compaction->call;
        const struct part *part = &cluster->parts[sluice_allocation_first_part(cluster, movable->allocation)];
        if (movable->request >= compaction->request_count || movable->cost < 1 || part->next != NONE ||
            compaction->needs[movable->request].nodes_max > 1)
            return sluice_fail(text, SLUICE_ERROR_INVALID,
                               "movable job %u: request %u of %u, cost %lld: it must be, and ask to be, on one node "
                               "and cost at least 1",
                               i, movable->request, compaction->request_count, (long long)movable->cost);
        compaction->next_on_node[i] = compaction->first_on_node[part->node];
        compaction->first_on_node[part->node] = i;
        compaction->moved[i] = false;
        compaction->now[i] = *part;
    }
    compaction->movables = movables;
    compaction->movable_count = count;
    return SLUICE_OK;
}

/* A job may come back to where it was. */
static bool same_part(const struct part *a, const struct part *b)
{
    return a->node == b->node && a->gpus == b->gpus && a->share == b->share && a->compute == b->compute &&
           a->cpus == b->cpus && a->host_memory == b->host_memory && a->nics == b->nics;
}

static void write_moves(const struct sluice_compaction *compaction, struct sluice_move *moves, uint32_t *move_count)
{
    *move_count = 0;
    for (uint32_t i = 0; i < compaction->step_count; i++) {
        const struct step *step = &compaction->steps[i];
        if (!step->first)
            continue;
        const struct part *to = &compaction->now[step->movable];
        if (!same_part(to, &step->part))
            moves[(*move_count)++] = (struct sluice_move){.movable = step->movable, .to = sluice_part_shown(to)};
    }
}

enum sluice_error sluice_compaction_plan(struct sluice_compaction *compaction, enum sluice_policy policy,
                                         const struct sluice_request *requests, uint32_t request_count, uint32_t asked,
                                         const struct sluice_movable *movables, uint32_t count,
                                         const struct sluice_compaction_limits *limits,
                                         struct sluice_placement *placement, struct sluice_move *moves,
                                         uint32_t *move_count, struct sluice_error_text *text)
{
    enum sluice_error error = check_limits(limits, text);
    if (!error)
        error = read_requests(compaction, requests, request_count, asked, text);
    if (!error)
        error = list_movables(compaction, movables, count, text);
    if (!error)
        error = sluice_place(compaction->cluster, policy, &requests[asked], placement, text);
    if (!error)
        *move_count = 0;
    if (error != SLUICE_ERROR_NO_PLACE)
        return error;
    compaction->policy = policy;
    compaction->most_moves = limits->moves;
    int64_t gain_permille = limits->gain * 1000;
    compaction->most_cost = gain_permille / limits->factor_permille + (gain_permille % limits->factor_permille ? 1 : 0);
    if (clear_nodes(compaction, asked, placement) || exchange_until_it_fits(compaction, asked, placement))
        error = SLUICE_OK;
    if (!error)
        write_moves(compaction, moves, move_count);
    sluice_compaction_undo(compaction, 0);
    if (error)
        return sluice_fail(text, SLUICE_ERROR_NO_PLACE, "no place now, and no moves within the limits make one");
    return SLUICE_OK;
}
