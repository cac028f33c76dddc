/* SPDX-License-Identifier: Apache-2.0 */
/* Preemption: hand-made cases, then random small clusters against every subset of the candidates. */
#include "check.h"
#include "cluster.h"

enum { NODES = 3, GPUS = 4, MAX_JOBS = 10 };

static struct sluice_error_text text;

struct scene {
    struct sluice_cluster *cluster;
    struct sluice_preemption *preemption;
    struct sluice_candidate jobs[MAX_JOBS];
    uint32_t count;
};

static struct scene new_scene(void)
{
    struct scene scene = {0};
    const struct sluice_cluster_config config = {.max_nodes = NODES};
    CHECK_INT(sluice_cluster_new(&config, &scene.cluster, &text), SLUICE_OK);
    struct sluice_node_shape shape = {.gpu_count = GPUS};
    CHECK_INT(sluice_cluster_add_model(scene.cluster, "h100", &shape.gpus[0].model, &text), SLUICE_OK);
    for (int i = 0; i < GPUS; i++)
        shape.gpus[i] = (struct sluice_gpu_shape){.model = shape.gpus[0].model, .memory_mib = 1000};
    uint32_t shape_id, node;
    CHECK_INT(sluice_cluster_add_shape(scene.cluster, &shape, &shape_id, &text), SLUICE_OK);
    for (int i = 0; i < NODES; i++)
        CHECK_INT(sluice_cluster_add_node(scene.cluster, shape_id, 16000, 64000, 0, &node, &text), SLUICE_OK);
    CHECK_INT(sluice_preemption_new(scene.cluster, MAX_JOBS, &scene.preemption, &text), SLUICE_OK);
    return scene;
}

static void free_scene(struct scene *scene)
{
    sluice_preemption_free(scene->preemption);
    sluice_cluster_free(scene->cluster);
}

/* Runs `job` on GPUs of one node; share 0: whole. */
static void run_on(struct scene *scene, uint32_t node, uint32_t gpus, int64_t share, struct sluice_candidate job)
{
    struct sluice_part part = {.node = node, .gpus = gpus, .gpu_memory_mib = share, .cpus_milli = 1000};
    struct sluice_placement placement = {.parts = &part, .part_capacity = 1, .part_count = 1};
    CHECK_INT(sluice_commit(scene->cluster, &placement, &job.allocation, &text), SLUICE_OK);
    scene->jobs[scene->count++] = job;
}

struct plan {
    enum sluice_error error;
    uint32_t victims[MAX_JOBS];
    uint32_t victim_count;
    struct sluice_part parts[NODES];
    struct sluice_placement placement;
};

static struct plan make_plan(struct scene *scene, struct sluice_request request, struct sluice_preemptor preemptor,
                             int64_t now_s)
{
    struct plan plan = {0};
    plan.placement = (struct sluice_placement){.parts = plan.parts, .part_capacity = NODES};
    plan.error = sluice_preemption_plan(scene->preemption, SLUICE_POLICY_FIRST_FIT, &request, &preemptor, scene->jobs,
                                        scene->count, now_s, &plan.placement, plan.victims, &plan.victim_count, &text);
    plan.placement.parts = NULL;
    CHECK_INT(sluice_cluster_check(scene->cluster, &text), SLUICE_OK); /* nothing changed */
    return plan;
}

static void expect(struct scene *scene, struct sluice_request request, struct sluice_preemptor preemptor,
                   const char *victims)
{
    struct plan plan = make_plan(scene, request, preemptor, 1000);
    char found[MAX_JOBS + 1] = "";
    for (uint32_t i = 0; plan.error == SLUICE_OK && i < plan.victim_count; i++)
        found[i] = (char)('0' + plan.victims[i]);
    CHECK_STR(plan.error == SLUICE_OK ? found : sluice_strerror(plan.error), victims);
}

static void test_rules(void)
{
    struct scene scene = new_scene();
    run_on(&scene, 0, 0x3, 0, (struct sluice_candidate){.tier = 1, .started_s = 0}); /* 2000 lost */
    run_on(&scene, 0, 0xC, 0, (struct sluice_candidate){.tier = 1, .started_s = 0, .checkpoint_s = 900}); /* 200 lost */
    run_on(&scene, 1, 0xF, 0, (struct sluice_candidate){.tier = 1, .started_s = 990, .gang = 7});         /* 40 lost */
    run_on(&scene, 2, 0x3, 0, (struct sluice_candidate){.tier = 3, .started_s = 0, .gang = 7});
    run_on(&scene, 2, 0xC, 0, (struct sluice_candidate){.tier = 2, .started_s = 999, .over_quota = true});

    const struct sluice_request two = {.gpus = 2}, four = {.gpus = 4}, five = {.gpus = 5};
    expect(&scene, two, (struct sluice_preemptor){.tier = 1}, "no place now");
    expect(&scene, two, (struct sluice_preemptor){.tier = 2}, "1"); /* the gang has a member of tier 3 */
    expect(&scene, four, (struct sluice_preemptor){.tier = 2}, "01");
    expect(&scene, four, (struct sluice_preemptor){.tier = 9}, "01"); /* tier 1 only, before the gang's tier 3 */
    expect(&scene, five, (struct sluice_preemptor){.tier = 9}, "no place even when idle");
    expect(&scene, (struct sluice_request){.gpus = 2, .nodes_min = 2}, (struct sluice_preemptor){.tier = 3}, "14");
    expect(&scene, (struct sluice_request){.gpus = 4, .nodes_min = 3}, (struct sluice_preemptor){.tier = 9}, "01234");
    expect(&scene, (struct sluice_request){.gpus = 6, .nodes_max = 3, .flags = SLUICE_GPUS_TOTAL},
           (struct sluice_preemptor){.tier = 3}, "014");

    scene.jobs[1].min_run_s = 1001; /* protected for another second */
    expect(&scene, two, (struct sluice_preemptor){.tier = 2}, "0");
    scene.jobs[1].min_run_s = 1000;
    expect(&scene, two, (struct sluice_preemptor){.tier = 2}, "1");

    scene.jobs[0].save_s = 80; /* saved before it goes: 180 lost with its restart, and not 2000 */
    scene.jobs[0].restart_s = 10;
    expect(&scene, two, (struct sluice_preemptor){.tier = 2}, "0");
    scene.jobs[0].save_s = 0;
    scene.jobs[0].restart_s = 0;

    scene.jobs[0].tier = scene.jobs[1].tier = 2;
    expect(&scene, two, (struct sluice_preemptor){.tier = 2}, "no place now");
    expect(&scene, two, (struct sluice_preemptor){.tier = 2, .reclaims = true}, "4"); /* what was borrowed */
    scene.jobs[4].tier = 3;
    expect(&scene, two, (struct sluice_preemptor){.tier = 2, .reclaims = true}, "no place now");

    CHECK_INT(sluice_release(scene.cluster, scene.jobs[4].allocation, &text), SLUICE_OK);
    scene.count = 4;
    expect(&scene, two, (struct sluice_preemptor){.tier = 9}, ""); /* fits already */
    free_scene(&scene);
}

/* Of a share of a GPU for 100 s and a GPU for 60 s, the one whose loss is less goes, by what a share counts. */
static void test_shares_count_by_memory_or_as_gpus(void)
{
    struct scene scene = new_scene();
    run_on(&scene, 0, 0xF, 500, (struct sluice_candidate){.started_s = 900});
    run_on(&scene, 1, 0xF, 0, (struct sluice_candidate){.started_s = 940});
    run_on(&scene, 2, 0xF, 0, (struct sluice_candidate){.tier = 5});
    const struct sluice_request four = {.gpus = 4};
    expect(&scene, four, (struct sluice_preemptor){.tier = 1}, "1");
    CHECK_INT(sluice_preemption_loss(scene.preemption), 4 * 60 * 1000);
    expect(&scene, four, (struct sluice_preemptor){.tier = 1, .weighs_shares = true}, "0");
    CHECK_INT(sluice_preemption_loss(scene.preemption), 4 * 100 * 500);
    free_scene(&scene);
}

static void test_refused(void)
{
    struct scene scene = new_scene();
    for (uint32_t node = 0; node < NODES; node++)
        run_on(&scene, node, 0xF, 0, (struct sluice_candidate){.started_s = 10});
    static const struct {
        struct sluice_candidate job;
        enum sluice_error error;
        const char *says;
    } cases[] = {
        {{.allocation = 12345}, SLUICE_ERROR_UNKNOWN, "no allocation 12345"},
        {{.started_s = 1001}, SLUICE_ERROR_RANGE, "started 1001"},
        {{.started_s = -1}, SLUICE_ERROR_RANGE, "started -1"},
        {{.checkpoint_s = 2000}, SLUICE_ERROR_RANGE, "checkpoint 2000"},
        {{.min_run_s = -5}, SLUICE_ERROR_RANGE, "minimum run -5"},
        {{.save_s = -6}, SLUICE_ERROR_RANGE, "save -6"},
        {{.restart_s = -7}, SLUICE_ERROR_RANGE, "restart -7"},
        {{.tier = UINT32_MAX}, SLUICE_ERROR_RANGE, "tier 4294967295"},
    };
    const struct sluice_request one = {.gpus = 1};
    const struct sluice_preemptor preemptor = {.tier = 1};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct sluice_candidate before = scene.jobs[1];
        scene.jobs[1] = cases[i].job;
        if (!scene.jobs[1].allocation)
            scene.jobs[1].allocation = before.allocation;
        CHECK_INT(make_plan(&scene, one, preemptor, 1000).error, cases[i].error);
        CHECK(strstr(text.text, "candidate 1") && strstr(text.text, cases[i].says));
        scene.jobs[1] = before;
    }
    struct sluice_candidate before = scene.jobs[2];
    scene.jobs[2] = scene.jobs[0];
    CHECK_INT(make_plan(&scene, one, preemptor, 1000).error, SLUICE_ERROR_DUPLICATE);
    scene.jobs[2] = before;
    scene.count = MAX_JOBS + 1;
    CHECK_INT(make_plan(&scene, one, preemptor, 1000).error, SLUICE_ERROR_CAPACITY);
    scene.count = NODES;
    CHECK_INT(make_plan(&scene, (struct sluice_request){.gpus = -1}, preemptor, 1000).error, SLUICE_ERROR_RANGE);
    CHECK_INT(make_plan(&scene, one, preemptor, 1000).error, SLUICE_OK);
    free_scene(&scene);
    sluice_preemption_free(NULL);
}

/* ---- every subset ---- */

static uint32_t random_state;

static uint32_t draw(uint32_t below)
{
    random_state = random_state * 1664525U + 1013904223U;
    return (random_state >> 8) % below;
}

struct price {
    uint32_t rank;
    int64_t lost;
    uint32_t jobs;
};

static int compare_prices(struct price left, struct price right)
{
    if (left.rank != right.rank)
        return left.rank < right.rank ? -1 : 1;
    if (left.lost != right.lost)
        return left.lost < right.lost ? -1 : 1;
    return (left.jobs > right.jobs) - (left.jobs < right.jobs);
}

static bool may_go(const struct scene *scene, uint32_t job, struct sluice_preemptor preemptor, int64_t now_s)
{
    const struct sluice_candidate *candidate = &scene->jobs[job];
    bool below = candidate->tier < preemptor.tier;
    bool borrowed = preemptor.reclaims && candidate->over_quota && candidate->tier == preemptor.tier;
    return (below || borrowed) && candidate->started_s + candidate->min_run_s <= now_s;
}

/* Whether the set is allowed to go (gangs whole), and what it costs. */
static bool price_of(const struct scene *scene, uint32_t set, struct sluice_preemptor preemptor, int64_t now_s,
                     struct price *price)
{
    *price = (struct price){0};
    for (uint32_t i = 0; i < scene->count; i++) {
        const struct sluice_candidate *job = &scene->jobs[i];
        if (!(set >> i & 1))
            continue;
        if (!may_go(scene, i, preemptor, now_s))
            return false;
        for (uint32_t other = 0; other < scene->count; other++) {
            if (job->gang && scene->jobs[other].gang == job->gang && !(set >> other & 1))
                return false;
        }
        struct sluice_part part;
        uint32_t parts;
        CHECK_INT(sluice_allocation_read(scene->cluster, job->allocation, &part, 1, &parts, &text), SLUICE_OK);
        int64_t saved_s = job->checkpoint_s > job->started_s ? job->checkpoint_s : job->started_s;
        uint32_t rank = 2 * job->tier + (job->over_quota ? 0 : 1);
        price->rank = rank > price->rank ? rank : price->rank;
        bool share = preemptor.weighs_shares && part.gpu_memory_mib;
        int64_t milli = share ? part.gpu_memory_mib : 1000; /* of GPUs of 1000 MiB */
        int64_t lost_s = (job->save_s ? job->save_s : now_s - saved_s) + job->restart_s;
        price->lost += lost_s * milli * __builtin_popcount(part.gpus);
        price->jobs++;
    }
    return true;
}

static bool fits_without(struct scene *scene, uint32_t set, const struct sluice_request *request)
{
    for (uint32_t i = 0; i < scene->count; i++) {
        if (set >> i & 1)
            sluice_allocation_suspend(scene->cluster, scene->jobs[i].allocation);
    }
    struct sluice_part parts[NODES];
    struct sluice_placement placement = {.parts = parts, .part_capacity = NODES};
    enum sluice_error error = sluice_place(scene->cluster, SLUICE_POLICY_FIRST_FIT, request, &placement, NULL);
    for (uint32_t i = 0; i < scene->count; i++) {
        if (set >> i & 1)
            sluice_allocation_resume(scene->cluster, scene->jobs[i].allocation);
    }
    return error == SLUICE_OK;
}

static void fill_at_random(struct scene *scene)
{
    while (scene->count < MAX_JOBS) {
        struct sluice_candidate job = {.tier = draw(3),
                                       .started_s = draw(100),
                                       .checkpoint_s = draw(3) ? 0 : draw(100),
                                       .min_run_s = draw(4) ? 0 : 50,
                                       .gang = draw(3) ? 0 : 1 + draw(2),
                                       .save_s = draw(2) ? 0 : 1 + draw(60),
                                       .restart_s = draw(40),
                                       .over_quota = draw(2) == 0};
        struct sluice_request request = {.gpus = 1 + draw(3),
                                         .gpu_memory_mib = draw(2) ? 0 : 100 + draw(800),
                                         .gpu_compute_percent = draw(2) ? 0 : 20 + draw(60)};
        struct sluice_part part;
        struct sluice_placement placement = {.parts = &part, .part_capacity = 1};
        enum sluice_policy policy = draw(2) ? SLUICE_POLICY_FIRST_FIT : SLUICE_POLICY_ROUND_ROBIN;
        if (sluice_start(scene->cluster, policy, &request, &placement, &job.allocation, NULL) != SLUICE_OK)
            return;
        scene->jobs[scene->count++] = job;
    }
}

static void test_against_every_subset(void)
{
    uint32_t planned = 0, preempted = 0;
    for (random_state = 1; random_state < 400; random_state = planned + 1) {
        planned++;
        struct scene scene = new_scene();
        fill_at_random(&scene);
        const struct sluice_preemptor preemptor = {
            .tier = draw(4), .reclaims = draw(2) == 0, .weighs_shares = draw(2) == 0};
        struct sluice_request request = {.gpus = 1 + draw(GPUS),
                                         .gpu_memory_mib = draw(2) ? 0 : 100 + draw(900),
                                         .gpu_compute_percent = draw(2) ? 0 : 20 + draw(80)};
        bool gang = draw(4) == 0;
        request.nodes_min = gang ? 2 : 1;
        struct plan plan = make_plan(&scene, request, preemptor, 100);

        bool possible = false;
        struct price best = {0}, price;
        for (uint32_t set = 0; set < 1U << scene.count; set++) {
            if (price_of(&scene, set, preemptor, 100, &price) && (!possible || compare_prices(price, best) < 0) &&
                fits_without(&scene, set, &request)) {
                possible = true;
                best = price;
            }
        }
        CHECK_INT(plan.error == SLUICE_OK, possible);
        CHECK(possible || !sluice_preemption_loss(scene.preemption));
        if (possible) {
            uint32_t victims = 0;
            for (uint32_t i = 0; i < plan.victim_count; i++)
                victims |= 1U << plan.victims[i];
            preempted += victims != 0;
            CHECK(price_of(&scene, victims, preemptor, 100, &price));
            CHECK_INT(sluice_preemption_loss(scene.preemption), price.lost);
            CHECK(fits_without(&scene, victims, &request));
            if (!gang)
                CHECK_INT(compare_prices(price, best), 0);
            for (uint32_t i = 0; i < scene.count; i++) { /* no gang or lone job is superfluous */
                uint32_t unit = 0;
                for (uint32_t other = 0; other < scene.count; other++) {
                    if (other == i || (scene.jobs[i].gang && scene.jobs[other].gang == scene.jobs[i].gang))
                        unit |= 1U << other;
                }
                CHECK(!(victims & unit) || !fits_without(&scene, victims & ~unit, &request));
            }
        }
        free_scene(&scene);
    }
    CHECK(preempted > 50);
}

int main(void)
{
    test_rules();
    test_shares_count_by_memory_or_as_gpus();
    test_refused();
    test_against_every_subset();
    return 0;
}
