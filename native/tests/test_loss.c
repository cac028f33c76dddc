/* SPDX-License-Identifier: Apache-2.0 */
/* What it costs that jobs leave: case by case; then whether others are moved or preempted for a job, on random small
 * clusters against every set of victims and every way to place the jobs. */
#include "sluice/loss.h"

#include "check.h"
#include "sluice/core.h"

enum { NODES = 3, GPUS = 4, MAX_JOBS = 6, NOW = 10000, ROUNDS = 3000, FACTOR_PERMILLE = 2000 };

static struct sluice_error_text text;

static void test_each_way(void)
{
    static const struct {
        struct sluice_stake stake;
        enum sluice_way way;
        int64_t lost_s, loss;
    } cases[] = {
        {{.started_s = 6000, .save_s = 30, .restart_s = 60, .gpus_milli = 2000}, SLUICE_WAY_MOVE, 90, 180000},
        {{.started_s = 6000, .save_s = 30, .restart_s = 60, .gpus_milli = 2000}, SLUICE_WAY_PREEMPT, 90, 180000},
        {{.started_s = 6000, .save_s = 30, .restart_s = 60, .gpus_milli = 2000}, SLUICE_WAY_REQUEUE, 4060, 8120000},
        {{.started_s = 6000, .restart_s = 60, .gpus_milli = 500}, SLUICE_WAY_PREEMPT, 4060, 2030000},
        {{.started_s = 6000, .restart_s = 60, .gpus_milli = 500}, SLUICE_WAY_MOVE, INT64_MAX, INT64_MAX},
        {{.started_s = 6000, .saved_s = 9990, .gpus_milli = 1000}, SLUICE_WAY_PREEMPT, 10, 10000},
        {{.started_s = 6000, .saved_s = 9990, .save_s = 30, .gpus_milli = 1}, SLUICE_WAY_REQUEUE, 10, 10},
        {{.started_s = 6000, .saved_s = 5000, .gpus_milli = 1}, SLUICE_WAY_REQUEUE, 4000, 4000}, /* in an earlier run */
        {{.started_s = NOW + 5, .gpus_milli = 1000}, SLUICE_WAY_REQUEUE, 0, 0},                  /* clocks differ */
        {{.started_s = 6000, .restart_s = -5, .save_s = -5}, SLUICE_WAY_PREEMPT, 4000, 0},
        {{.save_s = INT64_MAX, .restart_s = 1, .gpus_milli = 1}, SLUICE_WAY_MOVE, INT64_MAX, INT64_MAX},
        {{.save_s = INT64_MAX / 2, .gpus_milli = 3}, SLUICE_WAY_MOVE, INT64_MAX / 2, INT64_MAX},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK_INT(sluice_lost_s(&cases[i].stake, cases[i].way, NOW), cases[i].lost_s);
        CHECK_INT(sluice_loss(&cases[i].stake, cases[i].way, NOW), cases[i].loss);
    }
}

/* ---- move or preempt ---- */

struct job {
    uint32_t node;
    int64_t gpus;
    struct sluice_stake moved, preempted; /* no time of grace: it cannot be saved when it is preempted */
    bool safe;                            /* from preemption */
};

/* The waiting job's request is the last one. */
struct scene {
    struct sluice_cluster *cluster;
    struct sluice_compaction *compaction;
    struct sluice_preemption *preemption;
    struct sluice_request requests[MAX_JOBS + 1];
    struct sluice_candidate candidates[MAX_JOBS];
    struct sluice_movable movables[MAX_JOBS];
    struct job jobs[MAX_JOBS];
    uint32_t count, movable_count;
    int64_t asked;
};

static uint32_t random_state;

static uint32_t draw(uint32_t below)
{
    random_state = random_state * 1664525U + 1013904223U;
    return (random_state >> 8) % below;
}

static void add_job(struct scene *scene)
{
    struct job job = {.gpus = 1 + draw(3),
                      .safe = draw(3) == 0,
                      .moved = {.started_s = draw(NOW),
                                .saved_s = draw(2) ? 0 : draw(NOW),
                                .save_s = draw(3) ? 1 + draw(300) : 0,
                                .restart_s = draw(200)}};
    struct sluice_request request = {.gpus = job.gpus};
    struct sluice_part part;
    struct sluice_placement placement = {.parts = &part, .part_capacity = 1};
    uint64_t allocation;
    enum sluice_policy policy = draw(2) ? SLUICE_POLICY_FIRST_FIT : SLUICE_POLICY_ROUND_ROBIN;
    if (sluice_start(scene->cluster, policy, &request, &placement, &allocation, NULL))
        return;
    job.node = part.node;
    job.moved.gpus_milli = sluice_allocation_gpus_milli(scene->cluster, allocation);
    CHECK_INT(job.moved.gpus_milli, 1000 * job.gpus);
    job.preempted = job.moved;
    job.preempted.save_s = draw(2) ? job.moved.save_s : 0;
    scene->requests[scene->count] = request;
    scene->candidates[scene->count] = (struct sluice_candidate){.allocation = allocation,
                                                                .tier = job.safe ? 1 : 0,
                                                                .started_s = job.preempted.started_s,
                                                                .checkpoint_s = job.preempted.saved_s,
                                                                .save_s = job.preempted.save_s,
                                                                .restart_s = job.preempted.restart_s};
    if (job.moved.save_s)
        scene->movables[scene->movable_count++] = (struct sluice_movable){
            .allocation = allocation, .request = scene->count, .cost = sluice_loss(&job.moved, SLUICE_WAY_MOVE, NOW)};
    scene->jobs[scene->count++] = job;
}

static void make_scene(struct scene *scene)
{
    const struct sluice_cluster_config config = {.max_nodes = NODES};
    struct sluice_node_shape shape = {.gpu_count = GPUS};
    uint32_t shape_id, node, jobs = 2 + draw(MAX_JOBS - 1);
    *scene = (struct scene){.count = 0};
    CHECK_INT(sluice_cluster_new(&config, &scene->cluster, &text), SLUICE_OK);
    CHECK_INT(sluice_cluster_add_model(scene->cluster, "a", &shape.gpus[0].model, &text), SLUICE_OK);
    for (int i = 0; i < GPUS; i++)
        shape.gpus[i] = (struct sluice_gpu_shape){.model = shape.gpus[0].model, .memory_mib = 1000};
    CHECK_INT(sluice_cluster_add_shape(scene->cluster, &shape, &shape_id, &text), SLUICE_OK);
    for (int i = 0; i < NODES; i++)
        CHECK_INT(sluice_cluster_add_node(scene->cluster, shape_id, 16000, 64000, 0, &node, &text), SLUICE_OK);
    CHECK_INT(sluice_compaction_new(scene->cluster, MAX_JOBS, MAX_JOBS + 1, &scene->compaction, &text), SLUICE_OK);
    CHECK_INT(sluice_preemption_new(scene->cluster, MAX_JOBS, &scene->preemption, &text), SLUICE_OK);
    for (uint32_t i = 0; i < jobs; i++)
        add_job(scene);
    scene->asked = 2 + draw(GPUS - 1);
    scene->requests[scene->count] = (struct sluice_request){.gpus = scene->asked};
}

static void free_scene(struct scene *scene)
{
    sluice_compaction_free(scene->compaction);
    sluice_preemption_free(scene->preemption);
    sluice_cluster_free(scene->cluster);
}

static bool fits(const int64_t *free_gpus, int64_t asked)
{
    bool found = false;
    for (uint32_t node = 0; node < NODES; node++)
        found |= free_gpus[node] >= asked;
    return found;
}

static void take_free(const struct scene *scene, int64_t *free_gpus)
{
    for (uint32_t node = 0; node < NODES; node++)
        free_gpus[node] = GPUS;
    for (uint32_t i = 0; i < scene->count; i++)
        free_gpus[scene->jobs[i].node] -= scene->jobs[i].gpus;
}

/* The least loss of all sets of victims. INT64_MAX: none makes room. */
static int64_t best_victims(const struct scene *scene)
{
    int64_t best = INT64_MAX;
    for (uint32_t set = 0; set < 1u << scene->count; set++) {
        int64_t free_gpus[NODES], loss = 0;
        bool possible = true;
        take_free(scene, free_gpus);
        for (uint32_t i = 0; i < scene->count; i++) {
            if (!(set >> i & 1))
                continue;
            free_gpus[scene->jobs[i].node] += scene->jobs[i].gpus;
            loss += sluice_loss(&scene->jobs[i].preempted, SLUICE_WAY_PREEMPT, NOW);
            possible &= !scene->jobs[i].safe;
        }
        if (possible && loss < best && fits(free_gpus, scene->asked))
            best = loss;
    }
    return best;
}

/* The least loss of all sets of moves: each job that can be saved on any node. INT64_MAX: none makes room. */
static int64_t best_moves(const struct scene *scene)
{
    int64_t best = INT64_MAX;
    uint32_t ways = 1;
    for (uint32_t i = 0; i < scene->count; i++)
        ways *= NODES;
    for (uint32_t way = 0; way < ways; way++) {
        int64_t free_gpus[NODES] = {GPUS, GPUS, GPUS}, loss = 0;
        bool possible = true;
        for (uint32_t i = 0, rest = way; i < scene->count; i++, rest /= NODES) {
            const struct job *job = &scene->jobs[i];
            free_gpus[rest % NODES] -= job->gpus;
            if (rest % NODES == job->node)
                continue;
            possible &= job->moved.save_s > 0;
            loss += possible ? sluice_loss(&job->moved, SLUICE_WAY_MOVE, NOW) : 0;
        }
        for (uint32_t node = 0; node < NODES; node++)
            possible &= free_gpus[node] >= 0;
        if (possible && loss < best && fits(free_gpus, scene->asked))
            best = loss;
    }
    return best;
}

/* What the moves of a plan cost, which is one that can be carried out; INT64_MAX: there is none. */
static int64_t plan_moves(struct scene *scene, int64_t gain)
{
    const struct sluice_compaction_limits limits = {
        .moves = MAX_JOBS, .gain = gain, .factor_permille = FACTOR_PERMILLE};
    struct sluice_part start;
    struct sluice_placement placement = {.parts = &start, .part_capacity = 1};
    struct sluice_move moves[MAX_JOBS];
    uint32_t move_count;
    int64_t free_gpus[NODES], cost = 0;
    enum sluice_error error =
        sluice_compaction_plan(scene->compaction, SLUICE_POLICY_SLUICE, scene->requests, scene->count + 1, scene->count,
                               scene->movables, scene->movable_count, &limits, &placement, moves, &move_count, &text);
    if (error) {
        CHECK_INT(error, SLUICE_ERROR_NO_PLACE);
        return INT64_MAX;
    }
    take_free(scene, free_gpus);
    for (uint32_t i = 0; i < move_count; i++) {
        const struct job *job = &scene->jobs[scene->movables[moves[i].movable].request];
        cost += scene->movables[moves[i].movable].cost;
        free_gpus[job->node] += job->gpus;
        free_gpus[moves[i].to.node] -= job->gpus;
    }
    free_gpus[start.node] -= scene->asked;
    for (uint32_t node = 0; node < NODES; node++)
        CHECK(free_gpus[node] >= 0);
    return cost;
}

static bool cheaper(int64_t moves, int64_t victims)
{
    return moves < INT64_MAX && moves * FACTOR_PERMILLE < victims * 1000;
}

static void test_move_or_preempt_against_every_set(void)
{
    uint32_t asked = 0, moved = 0, should = 0, dearer = 0;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        struct scene scene;
        random_state = round + 1;
        make_scene(&scene);
        struct sluice_part part;
        struct sluice_placement placement = {.parts = &part, .part_capacity = 1};
        const struct sluice_preemptor preemptor = {.tier = 1};
        uint32_t victims[MAX_JOBS], victim_count;
        enum sluice_error error =
            sluice_preemption_plan(scene.preemption, SLUICE_POLICY_SLUICE, &scene.requests[scene.count], &preemptor,
                                   scene.candidates, scene.count, NOW, &placement, victims, &victim_count, &text);
        int64_t loss = error ? INT64_MAX : sluice_preemption_loss(scene.preemption);
        CHECK_INT(loss, best_victims(&scene)); /* the cheapest set, always */
        if (!error && victim_count && scene.movable_count) {
            int64_t found = plan_moves(&scene, loss), best = best_moves(&scene);
            asked++;
            CHECK(found >= best);
            CHECK(found == INT64_MAX || cheaper(found, loss)); /* never dearer than preempting */
            should += cheaper(best, loss);
            moved += found < INT64_MAX;
            dearer += found < INT64_MAX && found > best;
        }
        free_scene(&scene);
    }
    printf("of %u jobs that may preempt, moves are cheaper for %u: found for %u, for %u of them not the cheapest\n",
           asked, should, moved, dearer);
    CHECK(should > ROUNDS / 20 && asked - should > ROUNDS / 20);
    CHECK(moved * 10 >= should * 9 && dearer * 10 <= moved);
}

int main(void)
{
    test_each_way();
    test_move_or_preempt_against_every_set();
    return 0;
}
