/* SPDX-License-Identifier: Apache-2.0 */
/* Accuracy of estimates, makespan guard, and replays of random jobs under every mode, for the sanitizers. */
#include "check.h"
#include "sluice/core.h"

static struct sluice_error_text text;

static void test_accuracy_believes_until_it_knows(void)
{
    struct sluice_accuracy *accuracy;
    CHECK_INT(sluice_accuracy_new(100, &accuracy, &text), SLUICE_OK);
    static const struct {
        int64_t estimate, elapsed, left;
    } believed[] = {{100, 0, 100}, {100, 30, 70}, {100, 100, 100}, {100, 250, 250}, {1, 0, 1}};
    for (size_t i = 0; i < sizeof believed / sizeof *believed; i++) {
        int64_t expected, longest;
        sluice_accuracy_remaining(accuracy, believed[i].estimate, believed[i].elapsed, &expected, &longest);
        CHECK_INT(expected, believed[i].left);
        CHECK_INT(longest, believed[i].left);
        sluice_accuracy_remaining(NULL, believed[i].estimate, believed[i].elapsed, &expected, &longest);
        CHECK_INT(expected, believed[i].left);
    }
    CHECK_INT(sluice_accuracy_spread(accuracy), 0);
    sluice_accuracy_free(accuracy);
}

static void test_accuracy_learns(void)
{
    struct sluice_accuracy *accuracy;
    int64_t expected, longest;
    CHECK_INT(sluice_accuracy_new(100, &accuracy, &text), SLUICE_OK);
    /* half of the jobs run a quarter of their estimate, half of them the whole */
    for (int i = 0; i < 100; i++)
        CHECK_INT(sluice_accuracy_record(accuracy, 1000, i % 2 ? 1000 : 250, &text), SLUICE_OK);
    sluice_accuracy_remaining(accuracy, 400, 0, &expected, &longest);
    CHECK_INT(expected, 250);
    CHECK_INT(longest, 400);
    sluice_accuracy_remaining(accuracy, 400, 100, &expected, &longest); /* it is one of the long ones, then */
    CHECK_INT(expected, 300);
    CHECK_INT(longest, 300);
    sluice_accuracy_remaining(accuracy, 400, 400, &expected, &longest); /* none ran so long */
    CHECK_INT(expected, 400);
    CHECK_INT(sluice_accuracy_spread(accuracy), 750);
    /* the history forgets: a hundred exact ones later nothing else is remembered */
    for (int i = 0; i < 100; i++)
        CHECK_INT(sluice_accuracy_record(accuracy, 7, 7, &text), SLUICE_OK);
    CHECK_INT(sluice_accuracy_spread(accuracy), 0);
    sluice_accuracy_remaining(accuracy, 123456789, 1, &expected, &longest);
    CHECK_INT(expected, 123456788);
    CHECK_INT(sluice_accuracy_record(accuracy, 1, INT64_MAX, &text), SLUICE_OK); /* stops at a bound */
    CHECK_INT(sluice_accuracy_record(accuracy, 0, 1, &text), SLUICE_ERROR_RANGE);
    CHECK_INT(sluice_accuracy_record(accuracy, 1, -1, &text), SLUICE_ERROR_RANGE);
    sluice_accuracy_free(accuracy);
    CHECK_INT(sluice_accuracy_new(0, &accuracy, &text), SLUICE_ERROR_RANGE);
    sluice_accuracy_free(NULL);
}

static void test_guard(void)
{
    struct sluice_guard *guard;
    struct sluice_guard_policy policy = {.capacity_milli = 2000, .margin_permille = 100};
    CHECK_INT(sluice_guard_new(&policy, 4, &guard, &text), SLUICE_OK);
    /* On two GPUs the work of 200 GPU-ticks lasts until 100: with the margin, who needs 90 is critical. */
    struct sluice_guard_job jobs[] = {
        {.submit = 3, .expected = 20, .longest = 20, .gpus_milli = 1000},
        {.submit = 2, .expected = 90, .longest = 90, .gpus_milli = 1000},
        {.submit = 1, .expected = 89, .longest = 89, .gpus_milli = 1000},
        {.submit = 0, .expected = 1, .longest = 95, .gpus_milli = 1000},
    };
    uint32_t ranked[] = {0, 2, 1, 3}, critical;
    CHECK_INT(sluice_guard_apply(guard, jobs, 4, 0, 1000, ranked, &critical, &text), SLUICE_OK);
    CHECK_INT(critical, 2);
    static const uint32_t longest_first[] = {3, 1, 0, 2};
    CHECK(memcmp(ranked, longest_first, sizeof ranked) == 0);
    /* estimates that are not to be trusted: in order of submission */
    uint32_t again[] = {0, 2, 1, 3};
    CHECK_INT(sluice_guard_apply(guard, jobs, 4, 800, 1000, again, &critical, &text), SLUICE_OK);
    static const uint32_t first_come[] = {3, 1, 0, 2};
    CHECK(memcmp(again, first_come, sizeof again) == 0);
    jobs[3].submit = 9;
    CHECK_INT(sluice_guard_apply(guard, jobs, 4, 800, 1000, again, &critical, &text), SLUICE_OK);
    CHECK_INT(again[0], 1);
    sluice_guard_free(guard);
    CHECK_INT(sluice_guard_new(&policy, 2, &guard, &text), SLUICE_OK);
    CHECK_INT(sluice_guard_apply(guard, jobs, 4, 0, 1000, ranked, &critical, &text), SLUICE_ERROR_CAPACITY);
    /* what keeps arriving moves the horizon away */
    for (int64_t now = 0; now < 100; now++)
        sluice_guard_arrival(guard, now, 10, 1000);
    uint32_t pair[] = {0, 1};
    CHECK_INT(sluice_guard_apply(guard, jobs, 2, 0, 100, pair, &critical, &text), SLUICE_OK);
    CHECK_INT(critical, 0);
    CHECK_INT(sluice_guard_apply(guard, jobs, 2, 0, 100000, pair, &critical, &text), SLUICE_OK);
    CHECK_INT(critical, 1); /* nothing came for long */
    CHECK_INT(pair[0], 1);
    sluice_guard_free(guard);
    policy.capacity_milli = 0;
    CHECK_INT(sluice_guard_new(&policy, 2, &guard, &text), SLUICE_ERROR_RANGE);
}

static uint64_t chance = 42;

static int64_t draw(int64_t below)
{
    chance = chance * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (int64_t)(chance >> 33) % below;
}

static struct sluice_cluster *cluster_of(uint32_t nodes)
{
    struct sluice_cluster *cluster;
    struct sluice_cluster_config config = {.max_nodes = nodes};
    CHECK_INT(sluice_cluster_new(&config, &cluster, &text), SLUICE_OK);
    uint32_t model, shape, node;
    CHECK_INT(sluice_cluster_add_model(cluster, "a", &model, &text), SLUICE_OK);
    struct sluice_node_shape kind = {.gpu_count = 4};
    for (int i = 0; i < 4; i++)
        kind.gpus[i] = (struct sluice_gpu_shape){.model = model, .memory_mib = 1000};
    CHECK_INT(sluice_cluster_add_shape(cluster, &kind, &shape, &text), SLUICE_OK);
    for (uint32_t i = 0; i < nodes; i++)
        CHECK_INT(sluice_cluster_add_node(cluster, shape, 8000, 8000, 0, &node, &text), SLUICE_OK);
    return cluster;
}

enum { JOBS = 400, REQUESTS = 8 };

static void replay_once(struct sluice_replay_config config)
{
    static const struct sluice_request requests[REQUESTS] = {
        {.gpus = 1},
        {.gpus = 2, .cpus_milli = 1000},
        {.gpus = 4, .nodes_min = 2},
        {.gpus = 1, .gpu_memory_mib = 300},
        {.cpus_milli = 2000},
        {.gpus = 3, .nodes_min = 1, .nodes_max = 3, .flags = SLUICE_GPUS_TOTAL},
        {.gpus = 8}, /* fits nowhere */
        {.gpus = 1, .gpu_memory_mib = 300, .gpu_compute_percent = 60},
    };
    static const uint32_t milli[REQUESTS] = {1000, 2000, 8000, 300, 1, 3000, 8000, 300};
    struct sluice_replay_job jobs[JOBS];
    int64_t submit = 0;
    for (uint32_t i = 0; i < JOBS; i++) {
        uint32_t request = (uint32_t)draw(REQUESTS);
        submit += draw(6);
        jobs[i] = (struct sluice_replay_job){.submit = submit,
                                             .run = draw(50),
                                             .estimate = 1 + draw(100),
                                             .deadline = draw(2) ? submit + draw(200) : 0,
                                             .restart = draw(3),
                                             .request = request,
                                             .gpus_milli = milli[request],
                                             .tier = (uint32_t)draw(3)};
    }
    struct sluice_cluster *cluster = cluster_of(4);
    struct sluice_replay *replay;
    uint32_t ended = 0, samples;
    config.sample_interval = 1;
    config.second = 1;
    CHECK_INT(sluice_replay_new(cluster, &config, requests, REQUESTS, jobs, JOBS, NULL, &replay, &text), SLUICE_OK);
    while (ended < JOBS) {
        CHECK_INT(sluice_replay_run(replay, 10, &ended, &text), SLUICE_OK);
        CHECK_INT(sluice_cluster_check(cluster, &text), SLUICE_OK);
    }
    const struct sluice_replay_outcome *outcomes = sluice_replay_outcomes(replay);
    for (uint32_t i = 0; i < JOBS; i++) {
        CHECK_INT(outcomes[i].state, jobs[i].request == 6 ? SLUICE_REPLAY_REJECTED : SLUICE_REPLAY_ENDED);
        CHECK(outcomes[i].state == SLUICE_REPLAY_REJECTED || outcomes[i].busy >= jobs[i].run);
    }
    (void)sluice_replay_samples(replay, &samples);
    CHECK(samples > 0 && samples <= SLUICE_REPLAY_MAX_SAMPLES);
    CHECK(sluice_replay_decisions(replay) > 0);
    struct sluice_cluster_totals totals;
    sluice_cluster_read_totals(cluster, &totals);
    CHECK_INT(totals.allocations, 0);
    sluice_replay_free(replay);
    sluice_cluster_free(cluster);
}

static void test_every_mode(void)
{
    struct sluice_order_policy service = {.weight = {[SLUICE_FACTOR_SERVICE] = 1}, .starvation_s = 300};
    for (int placement = 0; placement < SLUICE_POLICY_COUNT; placement++) {
        for (int mode = 0; mode < 12; mode++) {
            struct sluice_replay_config config = {
                .placement = (enum sluice_policy)placement,
                .backfill = (enum sluice_replay_backfill)(mode % 4),
                .preemption = (enum sluice_replay_preemption)(mode / 4),
                .learn = placement % 2,
                .guarded = placement % 3 == 0,
                .restart_each_decision = mode / 4 == SLUICE_REPLAY_ORDER && placement % 2,
                .interval = placement == 4 ? 5 : 0,
                .depth = placement == 5 ? 3 : 0,
                .checkpoint = placement % 3 - 1,
            };
            if (config.preemption == SLUICE_REPLAY_ORDER && config.backfill >= SLUICE_REPLAY_EASY)
                continue;
            replay_once(config);
            config.order = service;
            replay_once(config);
        }
    }
}

static void test_stopped_half_way_gives_everything_back(void)
{
    struct sluice_cluster *cluster = cluster_of(1);
    struct sluice_request request = {.gpus = 1};
    struct sluice_replay_job job = {.run = 100, .estimate = 1, .gpus_milli = 1000};
    struct sluice_replay_config config = {.sample_interval = 1, .second = 1};
    struct sluice_replay *replay;
    uint32_t ended;
    CHECK_INT(sluice_replay_new(cluster, &config, &request, 1, &job, 1, NULL, &replay, &text), SLUICE_OK);
    CHECK_INT(sluice_replay_run(replay, 1, &ended, &text), SLUICE_OK);
    CHECK_INT(ended, 0);
    struct sluice_replay *second;
    CHECK_INT(sluice_replay_new(cluster, &config, &request, 1, &job, 1, NULL, &second, &text), SLUICE_ERROR_INVALID);
    sluice_replay_free(replay);
    struct sluice_cluster_totals totals;
    sluice_cluster_read_totals(cluster, &totals);
    CHECK_INT(totals.allocations, 0);
    sluice_replay_free(NULL);
    sluice_cluster_free(cluster);
}

int main(void)
{
    test_accuracy_believes_until_it_knows();
    test_accuracy_learns();
    test_guard();
    test_every_mode();
    test_stopped_half_way_gives_everything_back();
    return 0;
}
