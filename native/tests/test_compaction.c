/* SPDX-License-Identifier: Apache-2.0 */
/* Compaction: hand-made cases, then random small clusters against every way to place the jobs. */
#include "check.h"
#include "cluster.h"

enum { NODES = 3, GPUS = 2, ALL_GPUS = NODES * GPUS, MEMORY = 1000, CPUS = 8000, MAX_JOBS = 6 };

static struct sluice_error_text text;

/* Request i is that of job i; request MAX_JOBS is that of the waiting one. */
struct scene {
    struct sluice_cluster *cluster;
    struct sluice_compaction *compaction;
    struct sluice_request requests[MAX_JOBS + 1];
    struct sluice_movable jobs[MAX_JOBS];
    uint32_t count;
};

struct plan {
    enum sluice_error error;
    struct sluice_part starts[NODES];
    uint32_t start_count;
    struct sluice_move moves[MAX_JOBS];
    uint32_t count;
};

/* The last node's GPUs are of model b, the others of model a; on each node GPU 0 is near a NIC, and there are two NICs
 * that requests count. */
static struct scene new_scene(void)
{
    struct scene scene = {0};
    const struct sluice_cluster_config config = {.max_nodes = NODES};
    CHECK_INT(sluice_cluster_new(&config, &scene.cluster, &text), SLUICE_OK);
    for (uint32_t i = 0; i < NODES; i++) {
        struct sluice_node_shape shape = {.gpu_count = GPUS,
                                          .nics = {.gpu_count = GPUS, .nic_count = 2, .nic_group = {0, 1}}};
        uint32_t model, shape_id, node;
        CHECK_INT(sluice_cluster_add_model(scene.cluster, i == NODES - 1 ? "b" : "a", &model, &text), SLUICE_OK);
        for (int gpu = 0; gpu < GPUS; gpu++)
            shape.gpus[gpu] = (struct sluice_gpu_shape){.model = model, .memory_mib = MEMORY, .near_nic = gpu == 0};
        CHECK_INT(sluice_cluster_add_shape(scene.cluster, &shape, &shape_id, &text), SLUICE_OK);
        CHECK_INT(sluice_cluster_add_node(scene.cluster, shape_id, CPUS, 64000, 0, &node, &text), SLUICE_OK);
    }
    for (int i = 0; i <= MAX_JOBS; i++)
        scene.requests[i].gpus = 1;
    CHECK_INT(sluice_compaction_new(scene.cluster, MAX_JOBS, MAX_JOBS + 1, &scene.compaction, &text), SLUICE_OK);
    return scene;
}

static void free_scene(struct scene *scene)
{
    sluice_compaction_free(scene->compaction);
    sluice_cluster_free(scene->cluster);
}

static uint64_t commit(struct scene *scene, struct sluice_part part)
{
    const struct sluice_placement placement = {.parts = &part, .part_capacity = 1, .part_count = 1};
    uint64_t allocation;
    CHECK_INT(sluice_commit(scene->cluster, &placement, &allocation, &text), SLUICE_OK);
    return allocation;
}

static void fill_node(struct scene *scene, uint32_t node)
{
    commit(scene, (struct sluice_part){.node = node, .gpus = 3});
}

/* Runs a job of one GPU, which costs 1 to move; share 0: all of it. */
static void run_on(struct scene *scene, uint32_t node, uint32_t gpu, int64_t share, int64_t cpus)
{
    scene->requests[scene->count] = (struct sluice_request){.gpus = 1, .gpu_memory_mib = share, .cpus_milli = cpus};
    uint64_t allocation = commit(
        scene, (struct sluice_part){.node = node, .gpus = 1u << gpu, .gpu_memory_mib = share, .cpus_milli = cpus});
    scene->jobs[scene->count] = (struct sluice_movable){.allocation = allocation, .request = scene->count, .cost = 1};
    scene->count++;
}

static struct plan make_plan(struct scene *scene, struct sluice_request request, struct sluice_compaction_limits limits)
{
    struct plan plan = {0};
    struct sluice_placement placement = {.parts = plan.starts, .part_capacity = NODES};
    struct sluice_node_view before[NODES], after;
    for (uint32_t node = 0; node < NODES; node++)
        CHECK_INT(sluice_node_read(scene->cluster, node, &before[node], &text), SLUICE_OK);
    scene->requests[MAX_JOBS] = request;
    plan.error =
        sluice_compaction_plan(scene->compaction, SLUICE_POLICY_SLUICE, scene->requests, MAX_JOBS + 1, MAX_JOBS,
                               scene->jobs, scene->count, &limits, &placement, plan.moves, &plan.count, &text);
    plan.start_count = placement.part_count;
    CHECK_INT(sluice_cluster_check(scene->cluster, NULL), SLUICE_OK);
    for (uint32_t node = 0; node < NODES; node++) { /* nothing changed */
        memset(&after, 0, sizeof after);
        CHECK_INT(sluice_node_read(scene->cluster, node, &after, NULL), SLUICE_OK);
        CHECK_INT(after.cpus_milli_free, before[node].cpus_milli_free);
        CHECK_INT(after.parts, before[node].parts);
        CHECK(!memcmp(after.gpu_memory_mib_free, before[node].gpu_memory_mib_free, sizeof after.gpu_memory_mib_free));
    }
    return plan;
}

/* All that moves leaves, then everything fits where the plan says: commit checks it. */
static void carry_out(struct scene *scene, const struct plan *plan)
{
    uint32_t moved = 0;
    for (uint32_t i = 0; i < plan->count; i++) {
        CHECK(!(moved >> plan->moves[i].movable & 1)); /* each once */
        moved |= 1u << plan->moves[i].movable;
        CHECK_INT(sluice_release(scene->cluster, scene->jobs[plan->moves[i].movable].allocation, &text), SLUICE_OK);
    }
    for (uint32_t i = 0; i < plan->count; i++)
        commit(scene, plan->moves[i].to);
    const struct sluice_placement placement = {
        .parts = (struct sluice_part *)plan->starts, .part_capacity = NODES, .part_count = plan->start_count};
    uint64_t allocation;
    CHECK_INT(sluice_commit(scene->cluster, &placement, &allocation, &text), SLUICE_OK);
    CHECK_INT(sluice_cluster_check(scene->cluster, &text), SLUICE_OK);
}

static const struct sluice_compaction_limits any_cost = {.moves = MAX_JOBS, .gain = 1000, .factor_permille = 1};

static void expect_moves(struct scene *scene, struct sluice_request request, struct sluice_compaction_limits limits,
                         const char *jobs)
{
    struct plan plan = make_plan(scene, request, limits);
    char found[MAX_JOBS + 1] = "";
    for (uint32_t i = 0; plan.error == SLUICE_OK && i < plan.count; i++)
        found[i] = (char)('0' + plan.moves[i].movable);
    CHECK_STR(plan.error == SLUICE_OK ? found : sluice_strerror(plan.error), jobs);
}

static void test_clearing(void)
{
    struct scene scene = new_scene();
    run_on(&scene, 0, 0, 600, 1000); /* 0 */
    run_on(&scene, 0, 1, 300, 1000); /* 1 */
    run_on(&scene, 1, 0, 600, 1000); /* 2 */
    run_on(&scene, 1, 1, 700, 1000); /* 3 */
    run_on(&scene, 2, 0, 600, 1000); /* 4 */
    run_on(&scene, 2, 1, 400, 1000); /* 5 */
    const struct sluice_request whole = {.gpus = 1}, two = {.gpus = 2}, half = {.gpus = 1, .gpu_memory_mib = 500};
    expect_moves(&scene, whole, any_cost, "1");
    expect_moves(&scene, half, any_cost, "");  /* fits as it is */
    expect_moves(&scene, two, any_cost, "10"); /* 600 goes next to 400, 300 next to another 600 */
    expect_moves(&scene, (struct sluice_request){.gpus = 3}, any_cost, "no place even when idle");
    scene.jobs[0].cost = scene.jobs[2].cost = scene.jobs[3].cost = scene.jobs[4].cost = 9;
    scene.jobs[1].cost = 5;
    expect_moves(&scene, whole, any_cost, "5"); /* 400 goes next to 600 */

    /* The gain over the cost exceeds the factor, or nothing moves. */
    struct sluice_compaction_limits limits = {.moves = MAX_JOBS, .gain = 10, .factor_permille = 10000};
    expect_moves(&scene, whole, limits, "no place now");
    limits.factor_permille = 9999;
    expect_moves(&scene, whole, limits, "5");
    const struct sluice_compaction_limits most = {
        .moves = MAX_JOBS, .gain = INT64_MAX / 1000, .factor_permille = UINT32_MAX};
    expect_moves(&scene, whole, most, "5");
    limits.moves = 0;
    expect_moves(&scene, whole, limits, "no place now");

    /* Only those that are listed may move, and only to where their own requests allow. */
    scene.count = 5;
    expect_moves(&scene, whole, any_cost, "1");
    scene.requests[1].models = 2; /* model b: only next to job 5, where it has room */
    expect_moves(&scene, whole, any_cost, "1");
    scene.requests[1].gpu_memory_mib = 700;
    expect_moves(&scene, whole, any_cost, "0");
    scene.count = 6;
    const struct plan plan = make_plan(&scene, whole, any_cost);
    carry_out(&scene, &plan);
    free_scene(&scene);
}

/* Every hole is too small for every job: jobs change places until the holes meet. */
static void test_exchanges(void)
{
    struct scene scene = new_scene();
    run_on(&scene, 0, 0, 600, 1000); /* holes of 400, 400, 300, 300 */
    run_on(&scene, 0, 1, 600, 1000);
    run_on(&scene, 1, 0, 700, 1000);
    run_on(&scene, 1, 1, 700, 1000);
    fill_node(&scene, 2);
    const struct sluice_request share = {.gpus = 1, .gpu_memory_mib = 450};
    expect_moves(&scene, share, any_cost, "no place now"); /* no exchange helps: sizes are too alike */
    CHECK_INT(sluice_release(scene.cluster, scene.jobs[3].allocation, &text), SLUICE_OK);
    scene.count = 3;
    run_on(&scene, 1, 1, 300, 1000);
    run_on(&scene, 1, 1, 450, 1000); /* 600|400, 600|400, 700|300, 300+450|250 */
    struct plan plan = make_plan(&scene, (struct sluice_request){.gpus = 1, .gpu_memory_mib = 550}, any_cost);
    CHECK_INT(plan.error, SLUICE_OK); /* 300 goes into a hole, and leaves 550 */
    CHECK_INT(plan.count, 1);
    carry_out(&scene, &plan);
    free_scene(&scene);

    scene = new_scene();
    run_on(&scene, 0, 0, 470, 1000); /* 470 + 320 | 210 */
    run_on(&scene, 0, 0, 320, 1000);
    run_on(&scene, 0, 1, 650, 1000); /* 650 + 230 | 120 */
    run_on(&scene, 0, 1, 230, 1000);
    run_on(&scene, 1, 0, 810, 1000); /* 190 */
    run_on(&scene, 1, 1, 810, 1000);
    fill_node(&scene, 2);
    const struct sluice_request wide = {.gpus = 1, .gpu_memory_mib = 300};
    plan = make_plan(&scene, wide, any_cost);
    CHECK_INT(plan.error, SLUICE_OK);
    CHECK_INT(plan.count, 2); /* 320 and 230 change places: 470 + 230 | 300 */
    struct sluice_compaction_limits limits = any_cost;
    limits.moves = 1;
    CHECK_INT(make_plan(&scene, wide, limits).error, SLUICE_ERROR_NO_PLACE);
    carry_out(&scene, &plan);
    free_scene(&scene);
}

/* A job of several nodes gets all of them, or nothing moves. */
static void test_several_nodes(void)
{
    struct scene scene = new_scene();
    run_on(&scene, 0, 0, 600, 1000); /* 0 */
    run_on(&scene, 1, 0, 300, 1000); /* 1 */
    run_on(&scene, 2, 0, 500, 1000); /* 2 */
    const struct sluice_request two = {.gpus = 2, .nodes_min = 2},
                                shares = {.gpus = 2, .nodes_min = 3, .gpu_memory_mib = 450};
    expect_moves(&scene, two, any_cost, "01"); /* both go next to job 2, on GPUs of its node */
    expect_moves(&scene, (struct sluice_request){.gpus = 2, .nodes_min = 3}, any_cost, "no place now");
    expect_moves(&scene, (struct sluice_request){.gpus = 2, .nodes_min = 2, .nodes_max = 3}, any_cost, "01");
    expect_moves(&scene, (struct sluice_request){.gpus = 1, .nodes_min = 3}, any_cost, "");
    expect_moves(&scene, shares, any_cost, "no place now"); /* 600 goes nowhere once the others have their 450 */
    scene.jobs[1].cost = 5;
    expect_moves(&scene, two, any_cost, "02");
    struct sluice_compaction_limits limits = any_cost;
    limits.moves = 1; /* the bounds are of the whole plan, not of each node */
    expect_moves(&scene, two, limits, "no place now");
    limits = (struct sluice_compaction_limits){.moves = MAX_JOBS, .gain = 2, .factor_permille = 1000};
    expect_moves(&scene, two, limits, "no place now");
    limits.gain = 3;
    expect_moves(&scene, two, limits, "02");
    free_scene(&scene);

    scene = new_scene(); /* a node is free, and is held: its GPUs are no place for what moves */
    run_on(&scene, 0, 0, 0, 1000);
    run_on(&scene, 1, 0, 0, 1000);
    commit(&scene, (struct sluice_part){.node = 1, .gpus = 2});
    expect_moves(&scene, two, any_cost, "no place now");
    free_scene(&scene);

    scene = new_scene(); /* each job has a place, on the same GPU */
    run_on(&scene, 0, 0, 600, 1000);
    run_on(&scene, 1, 0, 600, 1000);
    run_on(&scene, 2, 0, 0, 1000);
    expect_moves(&scene, two, any_cost, "no place now");
    CHECK_INT(sluice_release(scene.cluster, scene.jobs[2].allocation, &text), SLUICE_OK);
    scene.count = 2;
    expect_moves(&scene, two, any_cost, "0"); /* one node is free already */
    free_scene(&scene);
}

/* An idle GPU that the request does not accept is no room for it. */
static void test_preferences(void)
{
    struct scene scene = new_scene();
    run_on(&scene, 0, 0, 0, 1000);
    fill_node(&scene, 1);
    fill_node(&scene, 2);
    expect_moves(&scene, (struct sluice_request){.gpus = 1, .near_nic = SLUICE_REQUIRED}, any_cost, "0");
    free_scene(&scene);
}

/* Who holds NICs moves for one who needs them; a GPU that lacks none is no reason to move. */
static void test_nics(void)
{
    struct scene scene = new_scene();
    run_on(&scene, 0, 0, 300, 1000); /* 0 */
    scene.requests[1] = (struct sluice_request){.nics = 2, .cpus_milli = 1000};
    scene.jobs[1] = (struct sluice_movable){
        .allocation = commit(&scene, (struct sluice_part){.node = 0, .nics = 3, .cpus_milli = 1000}),
        .request = 1,
        .cost = 9};
    scene.count = 2;
    commit(&scene, (struct sluice_part){.node = 1, .nics = 3});
    fill_node(&scene, 2); /* with its NICs free */
    const struct sluice_request one = {.gpus = 1, .nics = 1}, two = {.gpus = 1, .nics = 1, .nodes_min = 2};
    expect_moves(&scene, one, any_cost, "1");
    expect_moves(&scene, (struct sluice_request){.gpus = 2, .nics_per_gpu = 1}, any_cost, "01");
    expect_moves(&scene, (struct sluice_request){.gpus = 1, .nics = 1, .nic_kinds = 2}, any_cost,
                 "no place even when idle");
    expect_moves(&scene, two, any_cost, "no place now");
    const struct plan plan = make_plan(&scene, one, any_cost);
    CHECK_INT(plan.moves[0].to.node, 2);
    CHECK_INT(plan.moves[0].to.nics, 3);
    CHECK_INT(__builtin_popcount(plan.starts[0].nics), 1);
    carry_out(&scene, &plan);
    free_scene(&scene);
}

/* Jobs of 320 and 230 that leave 300 where they change places. */
static void run_pair(struct scene *scene, uint32_t node, int64_t cpus_of_larger, int64_t cpus_of_smaller)
{
    run_on(scene, node, 0, 320, cpus_of_larger);
    run_on(scene, node, 1, 230, cpus_of_smaller);
    commit(scene, (struct sluice_part){.node = node, .gpus = 1, .gpu_memory_mib = 470});
    commit(scene, (struct sluice_part){.node = node, .gpus = 2, .gpu_memory_mib = 650});
}

static const struct sluice_request asks_300 = {.gpus = 1, .gpu_memory_mib = 300};

/* Both leave the node's CPUs before both come back. */
static void test_exchange_on_one_node(void)
{
    struct scene scene = new_scene();
    run_pair(&scene, 0, 1000, 3000);
    commit(&scene, (struct sluice_part){.node = 0, .cpus_milli = CPUS - 4000});
    fill_node(&scene, 1);
    fill_node(&scene, 2);
    expect_moves(&scene, asks_300, any_cost, "01");
    free_scene(&scene);
}

/* Two jobs hold fewer CPUs than they ask again when they move: where one finds them, both do not. */
static void test_exchange_of_resized(void)
{
    struct scene scene = new_scene();
    run_pair(&scene, 0, 1000, 1000);
    run_pair(&scene, 1, 3000, 3000);
    fill_node(&scene, 2);
    for (uint32_t gpu = 0; gpu < GPUS; gpu++) {
        const struct sluice_movable *job = &scene.jobs[GPUS + gpu];
        const struct sluice_part less = {.node = 1,
                                         .gpus = 1u << gpu,
                                         .gpu_memory_mib = scene.requests[job->request].gpu_memory_mib,
                                         .cpus_milli = 1000};
        CHECK_INT(sluice_resize(scene.cluster, job->allocation, &less, &text), SLUICE_OK);
    }
    commit(&scene, (struct sluice_part){.node = 1, .cpus_milli = 3500});
    const struct plan plan = make_plan(&scene, asks_300, any_cost);
    CHECK_INT(plan.error, SLUICE_OK);
    carry_out(&scene, &plan);
    free_scene(&scene);
}

/* No moves are spent on room where nothing may start, however much it is. */
static void test_exchanges_where_jobs_start(void)
{
    for (int drained = 0; drained < 2; drained++) {
        struct scene scene = new_scene();
        run_pair(&scene, 0, 1000, 1000);
        fill_node(&scene, 1);
        for (uint32_t gpu = 0; gpu < GPUS; gpu++) {
            run_on(&scene, 2, gpu, 100, 1000);
            CHECK_INT(sluice_gpu_set_health(scene.cluster, 2, gpu, drained, &text), SLUICE_OK);
        }
        if (drained)
            CHECK_INT(sluice_node_set_state(scene.cluster, 2, SLUICE_NODE_DRAINED, &text), SLUICE_OK);
        expect_moves(&scene, asks_300, any_cost, "01");
        free_scene(&scene);
    }
}

static void test_refused(void)
{
    struct scene scene = new_scene();
    for (uint32_t gpu = 0; gpu < ALL_GPUS; gpu++)
        run_on(&scene, gpu / GPUS, gpu % GPUS, 0, 1000);
    static const struct {
        struct sluice_movable job;
        enum sluice_error error;
        const char *says;
    } cases[] = {
        {{.allocation = 12345, .cost = 1}, SLUICE_ERROR_UNKNOWN, "no allocation 12345"},
        {{.request = MAX_JOBS + 1, .cost = 1}, SLUICE_ERROR_INVALID, "request 7 of 7"},
        {{.cost = 0}, SLUICE_ERROR_INVALID, "cost 0"},
        {{.request = MAX_JOBS - 1, .cost = 1}, SLUICE_ERROR_INVALID, "on one node"},
    };
    const struct sluice_request one = {.gpus = 1};
    scene.count--;
    scene.requests[MAX_JOBS - 1].nodes_max = 2;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct sluice_movable before = scene.jobs[1];
        scene.jobs[1] = cases[i].job;
        if (!scene.jobs[1].allocation)
            scene.jobs[1].allocation = before.allocation;
        CHECK_INT(make_plan(&scene, one, any_cost).error, cases[i].error);
        CHECK(strstr(text.text, "movable job 1") && strstr(text.text, cases[i].says));
        scene.jobs[1] = before;
    }
    scene.requests[MAX_JOBS - 1].nodes_max = 0;
    scene.count++;
    struct sluice_movable before = scene.jobs[2];
    scene.jobs[2] = scene.jobs[0];
    CHECK_INT(make_plan(&scene, one, any_cost).error, SLUICE_ERROR_DUPLICATE);
    scene.jobs[2] = before;
    scene.count = MAX_JOBS + 1;
    CHECK_INT(make_plan(&scene, one, any_cost).error, SLUICE_ERROR_CAPACITY);
    scene.count = MAX_JOBS;
    CHECK_INT(
        make_plan(&scene, (struct sluice_request){.gpus = 3, .nodes_max = 2, .flags = SLUICE_GPUS_TOTAL}, any_cost)
            .error,
        SLUICE_ERROR_INVALID);
    struct sluice_compaction_limits limits = any_cost;
    limits.factor_permille = 0;
    CHECK_INT(make_plan(&scene, one, limits).error, SLUICE_ERROR_RANGE);
    limits = any_cost;
    limits.moves = SLUICE_COMPACTION_MAX_MOVES + 1;
    CHECK_INT(make_plan(&scene, one, limits).error, SLUICE_ERROR_RANGE);
    CHECK_INT(make_plan(&scene, one, any_cost).error, SLUICE_ERROR_NO_PLACE);
    CHECK_INT(make_plan(&scene, (struct sluice_request){.gpus = 1, .nodes_min = NODES + 1}, any_cost).error,
              SLUICE_ERROR_CAPACITY);
    struct sluice_compaction *none;
    CHECK_INT(sluice_compaction_new(scene.cluster, 0, 1, &none, &text), SLUICE_ERROR_RANGE);
    free_scene(&scene);
    sluice_compaction_free(NULL);
}

/* ---- every way to place the jobs ---- */

static uint32_t random_state;

static uint32_t draw(uint32_t below)
{
    random_state = random_state * 1664525U + 1013904223U;
    return (random_state >> 8) % below;
}

/* What is free on all GPUs, and CPUs on all nodes. */
struct left {
    int64_t memory[ALL_GPUS], cpus[NODES];
};

static bool take(struct left *left, const struct sluice_request *request, uint32_t gpu)
{
    int64_t memory = request->gpu_memory_mib ? request->gpu_memory_mib : MEMORY;
    if ((request->models && (gpu >= GPUS * (NODES - 1)) != (request->models >> 1 & 1)) || left->memory[gpu] < memory ||
        left->cpus[gpu / GPUS] < request->cpus_milli)
        return false;
    left->memory[gpu] -= memory;
    left->cpus[gpu / GPUS] -= request->cpus_milli;
    return true;
}

/* Can the waiting job have so many nodes from `node` on? */
static bool has_nodes(const struct scene *scene, uint32_t node, int64_t nodes, const struct left *left)
{
    for (uint32_t gpu = node * GPUS; gpu < ALL_GPUS && nodes > 0; gpu++) {
        struct left then = *left;
        if (take(&then, &scene->requests[MAX_JOBS], gpu) && has_nodes(scene, gpu / GPUS + 1, nodes - 1, &then))
            return true;
    }
    return nodes <= 0;
}

/* Can jobs from `job` on be placed, of which at most `moves` move, and the waiting one then? */
static bool possible(const struct scene *scene, const uint32_t *at, uint32_t job, uint32_t moves, struct left left)
{
    if (job == scene->count)
        return has_nodes(scene, 0, scene->requests[MAX_JOBS].nodes_min, &left);
    for (uint32_t gpu = 0; gpu < ALL_GPUS; gpu++) {
        struct left then = left;
        bool moving = gpu != at[job];
        if ((moving && !moves) || !take(&then, &scene->requests[job], gpu))
            continue;
        if (possible(scene, at, job + 1, moves - moving, then))
            return true;
    }
    return false;
}

static void fill_at_random(struct scene *scene, uint32_t *at)
{
    while (scene->count < MAX_JOBS) {
        struct sluice_request request = {.gpus = 1,
                                         .gpu_memory_mib = draw(5) ? 100 + draw(700) : 0,
                                         .cpus_milli = 500 + draw(4000),
                                         .models = draw(4) ? 0 : 1 + draw(2)};
        struct sluice_part part;
        struct sluice_placement placement = {.parts = &part, .part_capacity = 1};
        uint64_t allocation;
        if (sluice_start(scene->cluster, SLUICE_POLICY_ROUND_ROBIN, &request, &placement, &allocation, NULL))
            return;
        at[scene->count] = part.node * GPUS + (uint32_t)__builtin_ctz(part.gpus);
        scene->requests[scene->count] = request;
        scene->jobs[scene->count] =
            (struct sluice_movable){.allocation = allocation, .request = scene->count, .cost = 1 + draw(3)};
        scene->count++;
    }
}

/* `nodes` of the waiting job; in how many of ten cases a plan is found at the least. */
static void test_against_every_way(int64_t nodes, uint32_t least)
{
    uint32_t found = 0, there = 0;
    for (uint32_t seed = 1; seed <= 2000; seed++) {
        random_state = seed * 7919;
        struct scene scene = new_scene();
        uint32_t at[MAX_JOBS];
        fill_at_random(&scene, at);
        const struct sluice_compaction_limits limits = {
            .moves = 1 + draw(4), .gain = 4 + draw(8), .factor_permille = 1000};
        struct plan plan = make_plan(&scene,
                                     (struct sluice_request){.gpus = 1,
                                                             .nodes_min = nodes,
                                                             .gpu_memory_mib = draw(2) ? 300 + draw(700) : 0,
                                                             .cpus_milli = 500 + draw(4000),
                                                             .models = draw(4) ? 0 : 1 + draw(2)},
                                     limits);
        struct left left;
        for (uint32_t gpu = 0; gpu < ALL_GPUS; gpu++)
            left.memory[gpu] = MEMORY;
        for (uint32_t node = 0; node < NODES; node++)
            left.cpus[node] = CPUS;
        bool is_there = possible(&scene, at, 0, limits.moves, left);
        bool without_moves = possible(&scene, at, 0, 0, left);
        if (plan.error == SLUICE_OK) {
            int64_t cost = 0;
            for (uint32_t i = 0; i < plan.count; i++)
                cost += scene.jobs[plan.moves[i].movable].cost;
            CHECK(is_there);
            CHECK(plan.count <= limits.moves && (cost < limits.gain || !plan.count));
            CHECK_INT(plan.count == 0, without_moves);
            for (uint32_t i = 0; i < plan.count; i++) {
                const struct sluice_move *move = &plan.moves[i];
                struct left empty = {.memory = {MEMORY, MEMORY, MEMORY, MEMORY, MEMORY, MEMORY},
                                     .cpus = {CPUS, CPUS, CPUS}};
                uint32_t gpu = move->to.node * GPUS + (uint32_t)__builtin_ctz(move->to.gpus);
                CHECK(gpu != at[move->movable] && take(&empty, &scene.requests[move->movable], gpu));
            }
            carry_out(&scene, &plan);
        }
        there += is_there && !without_moves;
        found += plan.error == SLUICE_OK && plan.count;
        free_scene(&scene);
    }
    printf("%d nodes: plans found where there are any: %u of %u\n", (int)nodes, found, there);
    CHECK(there > 200 && found * 10 >= there * least);
}

int main(void)
{
    test_clearing();
    test_exchanges();
    test_several_nodes();
    test_preferences();
    test_nics();
    test_exchange_on_one_node();
    test_exchange_of_resized();
    test_exchanges_where_jobs_start();
    test_refused();
    test_against_every_way(1, 9);
    test_against_every_way(2, 7);
    return 0;
}
