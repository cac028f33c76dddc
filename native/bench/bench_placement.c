/* SPDX-License-Identifier: Apache-2.0 */
/* Placement: replays in which nothing departs, and decisions at a steady use of the cluster. */
#include "bench.h"

#include "../core/cluster.h"

#include <inttypes.h>
#include <stdlib.h>

enum { ENOUGH = 1000 };

static enum sluice_error fail(struct sluice_error_text *text, enum sluice_error error)
{
    return sluice_fail(text, error, "%s", sluice_strerror(error));
}

static bool refused(enum sluice_error error)
{
    return error == SLUICE_ERROR_NO_PLACE || error == SLUICE_ERROR_NEVER;
}

enum sluice_error sluice_bench_replay(struct sluice_cluster *cluster, enum sluice_policy policy,
                                      const struct sluice_request *requests, uint32_t request_count,
                                      const uint32_t *arrivals, uint32_t arrival_count, bool *placed,
                                      uint64_t *elapsed_ns, struct sluice_error_text *text)
{
    struct sluice_part part;
    struct sluice_placement placement = {.parts = &part, .part_capacity = 1};
    uint64_t before = bench_now_ns(), allocation;
    for (uint32_t i = 0; i < arrival_count; i++) {
        if (arrivals[i] >= request_count)
            return fail(text, SLUICE_ERROR_RANGE);
        struct sluice_request request = requests[arrivals[i]];
        request.seed = i;
        enum sluice_error error = sluice_start(cluster, policy, &request, &placement, &allocation, text);
        if (error && !refused(error))
            return error;
        placed[i] = !error;
    }
    *elapsed_ns = bench_now_ns() - before;
    return SLUICE_OK;
}

/* ---- replay in which jobs move ---- */

struct moving {
    struct sluice_cluster *cluster;
    struct sluice_compaction *compaction;
    struct sluice_bench_moves *moves;
    struct sluice_movable *movables; /* that have not moved yet */
    uint32_t count;
};

/* What the plan says: all that moves leaves, then each goes to its new place, and the arrival starts. */
static enum sluice_error carry_out(struct moving *moving, const struct sluice_move *moves, uint32_t count,
                                   const struct sluice_placement *placement, uint64_t *allocation,
                                   struct sluice_error_text *text)
{
    enum sluice_error error = SLUICE_OK;
    for (uint32_t i = 0; i < count && !error; i++)
        error = sluice_release(moving->cluster, moving->movables[moves[i].movable].allocation, text);
    for (uint32_t i = 0; i < count && !error; i++) {
        struct sluice_part part = moves[i].to;
        const struct sluice_placement to = {.parts = &part, .part_capacity = 1, .part_count = 1};
        uint64_t moved;
        error = sluice_commit(moving->cluster, &to, &moved, text);
    }
    return error ? SLUICE_ERROR_CORRUPT : sluice_commit(moving->cluster, placement, allocation, text);
}

/* Those that moved may not move again. */
static void forget_moved(struct moving *moving, const struct sluice_move *moves, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        moving->movables[moves[i].movable].cost = 0;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < moving->count; i++)
        if (moving->movables[i].cost)
            moving->movables[kept++] = moving->movables[i];
    moving->count = kept;
}

static enum sluice_error start_by_moves(struct moving *moving, enum sluice_policy policy,
                                        const struct sluice_request *requests, uint32_t request_count, uint32_t asked,
                                        struct sluice_placement *placement, uint64_t *allocation,
                                        struct sluice_error_text *text)
{
    struct sluice_bench_moves *figures = moving->moves;
    struct sluice_compaction_limits limits = figures->limits;
    struct sluice_move moves[SLUICE_COMPACTION_MAX_MOVES];
    uint32_t count = 0, left = figures->budget - figures->moved;
    limits.gain = figures->gains[asked];
    limits.moves = limits.moves < left ? limits.moves : left;
    if (!limits.gain || !limits.moves)
        return SLUICE_ERROR_NO_PLACE;
    uint64_t before = bench_now_ns();
    enum sluice_error error =
        sluice_compaction_plan(moving->compaction, policy, requests, request_count, asked, moving->movables,
                               moving->count, &limits, placement, moves, &count, text);
    uint64_t took = bench_now_ns() - before;
    figures->plans++;
    figures->plan_ns += took;
    figures->longest_plan_ns = took > figures->longest_plan_ns ? took : figures->longest_plan_ns;
    if (error)
        return error;
    figures->started++;
    figures->moved += count;
    error = carry_out(moving, moves, count, placement, allocation, text);
    forget_moved(moving, moves, count);
    return error;
}

static enum sluice_error replay_moving(struct moving *moving, enum sluice_policy policy,
                                       const struct sluice_request *requests, uint32_t request_count,
                                       const uint32_t *arrivals, uint32_t arrival_count, bool *placed,
                                       struct sluice_error_text *text)
{
    struct sluice_part part;
    struct sluice_placement placement = {.parts = &part, .part_capacity = 1};
    for (uint32_t i = 0; i < arrival_count; i++) {
        uint32_t asked = arrivals[i];
        uint64_t allocation;
        if (asked >= request_count)
            return fail(text, SLUICE_ERROR_RANGE);
        enum sluice_error error =
            sluice_start(moving->cluster, policy, &requests[asked], &placement, &allocation, text);
        if (error == SLUICE_ERROR_NO_PLACE)
            error = start_by_moves(moving, policy, requests, request_count, asked, &placement, &allocation, text);
        if (error && !refused(error))
            return error;
        placed[i] = !error;
        if (!error && moving->moves->movable[i])
            moving->movables[moving->count++] = (struct sluice_movable){
                .allocation = allocation, .request = asked, .cost = moving->moves->costs[asked]};
    }
    return SLUICE_OK;
}

enum sluice_error sluice_bench_moves(struct sluice_cluster *cluster, enum sluice_policy policy,
                                     const struct sluice_request *requests, uint32_t request_count,
                                     const uint32_t *arrivals, uint32_t arrival_count, struct sluice_bench_moves *moves,
                                     bool *placed, struct sluice_error_text *text)
{
    struct moving moving = {.cluster = cluster, .moves = moves};
    moving.movables = calloc((size_t)arrival_count + 1, sizeof *moving.movables);
    enum sluice_error error = moving.movables ? SLUICE_OK : fail(text, SLUICE_ERROR_NO_MEMORY);
    if (!error)
        error = sluice_compaction_new(cluster, arrival_count + 1, request_count, &moving.compaction, text);
    if (!error)
        error = replay_moving(&moving, policy, requests, request_count, arrivals, arrival_count, placed, text);
    sluice_compaction_free(moving.compaction);
    free(moving.movables);
    return error;
}

/* ---- steady use ---- */

/* SplitMix64 (G. Steele, D. Lea, C. Flood, OOPSLA 2014). */
static uint64_t random_next(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static uint64_t random_below(uint64_t *state, uint64_t bound)
{
    return random_next(state) % bound;
}

/* Between half and one and a half of it, to the MiB. */
static int64_t blur(uint64_t *state, int64_t mib)
{
    return mib < 2 ? mib : mib / 2 + (int64_t)random_below(state, (uint64_t)mib);
}

static struct sluice_request draw(const struct sluice_request *pool, uint32_t pool_count, uint64_t *state)
{
    struct sluice_request request = pool[random_below(state, pool_count)];
    request.gpu_memory_mib = blur(state, request.gpu_memory_mib);
    request.host_memory_mib = blur(state, request.host_memory_mib);
    return request;
}

struct steady {
    struct sluice_cluster *cluster;
    enum sluice_policy policy;
    uint64_t drawing, leaving; /* random states */
    uint64_t *live;
    uint32_t live_count, live_room;
    uint64_t in_use_limit; /* MiB of GPU memory */
};

static uint64_t in_use(const struct sluice_cluster *cluster)
{
    struct sluice_cluster_totals totals;
    sluice_cluster_read_totals(cluster, &totals);
    return (uint64_t)(totals.gpu_memory_mib - totals.gpu_memory_mib_free);
}

/* One random allocation ends. */
static uint64_t release_one(struct steady *steady)
{
    uint32_t gone = (uint32_t)random_below(&steady->leaving, steady->live_count);
    uint64_t allocation = steady->live[gone];
    steady->live[gone] = steady->live[--steady->live_count];
    uint64_t before = bench_now_ns();
    sluice_release(steady->cluster, allocation, NULL);
    return bench_now_ns() - before;
}

/* Does placing find what scoring every node finds? */
static bool choice_is_best(struct sluice_cluster *cluster, enum sluice_policy policy,
                           const struct sluice_request *request, const struct sluice_placement *placement,
                           enum sluice_error answer)
{
    struct need need;
    struct choice best;
    if (sluice_need_from_request(cluster, request, &need, NULL))
        return false;
    if (!sluice_scan(cluster, &sluice_policies[policy], &need, &best))
        return refused(answer);
    return !answer && placement->score == best.score && placement->parts[0].node == best.node &&
           placement->parts[0].gpus == best.gpus;
}

enum sluice_error sluice_bench_steady(struct sluice_cluster *cluster, enum sluice_policy policy,
                                      const struct sluice_request *pool, uint32_t pool_count, uint32_t use_permille,
                                      uint32_t decisions, uint64_t seed, struct sluice_bench_steady_result *result,
                                      struct sluice_error_text *text)
{
    struct sluice_part part;
    struct sluice_placement placement = {.parts = &part, .part_capacity = 1};
    struct sluice_cluster_totals totals;
    sluice_cluster_read_totals(cluster, &totals);
    if (pool_count == 0 || use_permille > 1000)
        return fail(text, SLUICE_ERROR_RANGE);
    struct steady steady = {.cluster = cluster,
                            .policy = policy,
                            .drawing = seed,
                            .leaving = ~seed,
                            .live_room = cluster->size.max_allocations,
                            .in_use_limit = (uint64_t)totals.gpu_memory_mib / 1000 * use_permille};
    steady.live = malloc(steady.live_room * sizeof *steady.live);
    if (!steady.live)
        return fail(text, SLUICE_ERROR_NO_MEMORY);
    enum sluice_error error = SLUICE_OK;
    /* Until the limit is reached for the first time, or as near as it can be, nothing counts. */
    bool full = false;
    uint32_t refused_while_filling = 0;
    uint64_t use_sum = 0;
    for (uint32_t done = 0; done < decisions && !error;) {
        struct sluice_request request = draw(pool, pool_count, &steady.drawing);
        while (in_use(cluster) > steady.in_use_limit || steady.live_count == steady.live_room) {
            full = true;
            uint64_t took = release_one(&steady);
            if (result->release_ns && result->releases < decisions)
                result->release_ns[result->releases++] = (uint32_t)took;
        }
        uint64_t allocation, took = 0;
        enum sluice_policy now = full ? policy : SLUICE_POLICY_SLUICE; /* filled fast */
        if (result->check) {
            error = sluice_place(cluster, now, &request, &placement, text);
            if (full && !choice_is_best(cluster, policy, &request, &placement, error))
                result->wrong++;
            if (!error)
                error = sluice_commit(cluster, &placement, &allocation, text);
        } else {
            uint64_t before = bench_now_ns();
            error = sluice_start(cluster, now, &request, &placement, &allocation, text);
            took = bench_now_ns() - before;
        }
        if (!error)
            steady.live[steady.live_count++] = allocation;
        if (full) {
            result->refused += refused(error);
            use_sum += in_use(cluster);
            if (result->start_ns)
                result->start_ns[done] = (uint32_t)took;
            done++;
        }
        if (refused(error)) {
            error = SLUICE_OK;
            full = full || ++refused_while_filling == ENOUGH;
            if (steady.live_count)
                release_one(&steady);
        }
    }
    if (!error && decisions)
        result->use_permille = (uint32_t)(use_sum / decisions * 1000 / (uint64_t)totals.gpu_memory_mib);
    free(steady.live);
    return error;
}

static int compare(const void *left, const void *right)
{
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a > b) - (a < b);
}

enum sluice_error sluice_bench_shapes(const struct sluice_request *pool, uint32_t pool_count, uint32_t decisions,
                                      uint64_t seed, uint32_t *distinct, struct sluice_error_text *text)
{
    uint64_t *hashes = malloc(((size_t)decisions + 1) * sizeof *hashes);
    if (!hashes)
        return fail(text, SLUICE_ERROR_NO_MEMORY);
    for (uint32_t i = 0; i < decisions; i++) {
        struct sluice_request request = draw(pool, pool_count, &seed);
        uint64_t hash = (uint64_t)request.gpus;
        const int64_t fields[] = {request.gpu_memory_mib, request.cpus_milli, request.host_memory_mib,
                                  (int64_t)request.models};
        for (size_t j = 0; j < sizeof fields / sizeof fields[0]; j++) {
            hash ^= (uint64_t)fields[j];
            hash = random_next(&hash);
        }
        hashes[i] = hash;
    }
    qsort(hashes, decisions, sizeof *hashes, compare);
    *distinct = decisions > 0;
    for (uint32_t i = 1; i < decisions; i++)
        *distinct += hashes[i] != hashes[i - 1];
    free(hashes);
    return SLUICE_OK;
}
