/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The order of pending jobs (order/order.h), without Slurm: scores, usage, what is learnt, what is kept. */
#include <pthread.h>
#include <stdbool.h>
#include <unistd.h>

#include "check.h"
#include "order/order.h"

enum { NOW = 1800000000 };

static const struct sluice_ranker_tenant TENANTS[] = {
    {.account = "atoms", .parent = "physics", .shares = 10}, /* before its parent: any sequence will do */
    {.account = "physics", .shares = 10},
    {.account = "stars", .parent = "physics", .shares = 10},
    {.account = "biology", .shares = 10, .priority = SLUICE_FACTOR_ONE},
    {.account = "rescue", .shares = 1, .tier = 7},
};

static struct sluice_ranker_config config_with(int factor, uint32_t weight)
{
    struct sluice_ranker_config config = {
        .half_life_s = 86400, .gpu_memory_mib = 1000, .tenants = TENANTS, .tenant_count = 5};
    config.policy.age_full_s = 86400;
    config.policy.laxity_horizon_s = 3600;
    config.policy.size_full_gpus = 8;
    if (factor >= 0)
        config.policy.weight[factor] = weight;
    return config;
}

static struct sluice_ranker *ranker_with(int factor, uint32_t weight)
{
    struct sluice_ranker_config config = config_with(factor, weight);
    struct sluice_ranker *ranker = NULL;
    struct sluice_error_text text;
    if (sluice_ranker_new(&config, &ranker, &text) != SLUICE_OK) {
        fprintf(stderr, "%s\n", text.text);
        exit(1);
    }
    return ranker;
}

static struct sluice_queue *empty_queue(int64_t now_s)
{
    struct sluice_queue *queue = sluice_queue_new(NULL);
    CHECK(queue);
    sluice_queue_clear(queue, 4);
    queue->taken_s = now_s;
    return queue;
}

static struct sluice_queue_job *pending(struct sluice_queue *queue, uint32_t id, const char *account, uint32_t gpus)
{
    struct sluice_queue_job *job = sluice_queue_add_pending(queue);
    CHECK(job);
    job->id = id;
    job->uid = 1000;
    job->account = sluice_queue_intern(queue, account);
    job->gpus = gpus;
    job->limit_s = 3600;
    job->submit_s = queue->taken_s - 100;
    job->eligible_s = queue->taken_s - 100;
    return job;
}

static struct sluice_queue_job *ended(struct sluice_queue *queue, const char *account, uint32_t gpus, int64_t start_s,
                                      int64_t end_s)
{
    struct sluice_queue_job *job = sluice_queue_add_ended(queue);
    CHECK(job);
    job->id = 1;
    job->uid = 1000;
    job->account = sluice_queue_intern(queue, account);
    job->gpus = gpus;
    job->start_s = start_s;
    job->end_s = end_s;
    job->flags = SLUICE_QUEUE_RAN_OUT;
    return job;
}

static struct sluice_rank rank_of(uint32_t job)
{
    const struct sluice_ranks *ranks = sluice_ranks_acquire();
    CHECK(ranks);
    const struct sluice_rank *rank = sluice_ranks_find(ranks, job);
    CHECK(rank);
    struct sluice_rank copy = *rank;
    sluice_ranks_release(ranks);
    return copy;
}

static uint64_t usage_of(const char *account)
{
    const struct sluice_ranks *ranks = sluice_ranks_acquire();
    CHECK(ranks);
    uint64_t usage = UINT64_MAX;
    for (uint32_t i = 0; i < sluice_ranks_tenant_count(ranks); i++) {
        if (strcmp(sluice_ranks_tenant(ranks, i)->account, account) == 0)
            usage = sluice_ranks_tenant(ranks, i)->usage;
    }
    sluice_ranks_release(ranks);
    return usage;
}

static void step(struct sluice_ranker *ranker, const struct sluice_queue *queue)
{
    CHECK_INT(sluice_ranker_step(ranker, queue, NULL), SLUICE_OK);
}

static void test_no_weight_publishes_nothing(void)
{
    struct sluice_ranker_config config = config_with(-1, 0);
    config.tenant_count = 4; /* without the one of a higher tier */
    struct sluice_ranker *ranker = NULL;
    CHECK_INT(sluice_ranker_new(&config, &ranker, NULL), SLUICE_OK);
    struct sluice_queue *queue = empty_queue(NOW);
    pending(queue, 1, "atoms", 1);
    step(ranker, queue);
    CHECK(!sluice_ranks_acquire());
    sluice_queue_free(queue);
    sluice_ranker_free(ranker);
}

static void test_factors(void)
{
    struct sluice_queue *queue = empty_queue(NOW);
    pending(queue, 1, "atoms", 1);
    pending(queue, 2, "biology", 4);
    pending(queue, 3, "nobody", 8)->deadline_s = NOW + 3600 + 1800;

    struct sluice_ranker *ranker = ranker_with(SLUICE_FACTOR_SIZE, 800);
    step(ranker, queue);
    CHECK_INT(rank_of(1).site, 100);
    CHECK_INT(rank_of(2).site, 400);
    CHECK_INT(rank_of(3).site, 800);
    CHECK_INT(rank_of(3).place, 0);
    sluice_ranker_free(ranker);

    queue->pending[0].gpus = 0; /* a part of a GPU is of no size: whole GPUs go first */
    queue->pending[0].gpu_memory_mib = 40000;
    ranker = ranker_with(SLUICE_FACTOR_SIZE, 800);
    step(ranker, queue);
    CHECK_INT(rank_of(1).site, 0);
    CHECK_INT(rank_of(2).site, 400);
    sluice_ranker_free(ranker);

    ranker = ranker_with(SLUICE_FACTOR_PRIORITY, 500);
    step(ranker, queue);
    CHECK_INT(rank_of(1).site, 0);
    CHECK_INT(rank_of(2).site, 500);
    sluice_ranker_free(ranker);

    ranker = ranker_with(SLUICE_FACTOR_DEADLINE, 1000); /* laxity 1800 of 3600 */
    step(ranker, queue);
    CHECK_INT(rank_of(1).site, 0);
    CHECK_INT(rank_of(3).site, 500);
    CHECK_INT(rank_of(3).urgent, 500);
    CHECK_INT(rank_of(3).terms.laxity_s, 1800);
    sluice_ranker_free(ranker);
    sluice_queue_free(queue);
}

static void test_held_jobs_do_not_age(void)
{
    struct sluice_ranker *ranker = ranker_with(SLUICE_FACTOR_AGE, 1000);
    struct sluice_queue *queue = empty_queue(NOW);
    pending(queue, 1, "atoms", 1)->eligible_s = NOW - 43200;
    queue->pending[0].submit_s = NOW - 43200;
    struct sluice_queue_job *held = pending(queue, 2, "atoms", 1);
    held->submit_s = NOW - 43200;
    held->eligible_s = 0;
    step(ranker, queue);
    CHECK_INT(rank_of(1).site, 500);
    CHECK_INT(rank_of(2).site, 0);
    sluice_queue_free(queue);
    sluice_ranker_free(ranker);
}

static void test_usage_of_running_and_ended_jobs(void)
{
    struct sluice_ranker_config config = config_with(SLUICE_FACTOR_FAIR_SHARE, 1000);
    config.half_life_s = 0; /* exact sums */
    struct sluice_ranker *ranker = NULL;
    CHECK_INT(sluice_ranker_new(&config, &ranker, NULL), SLUICE_OK);
    struct sluice_queue *queue = empty_queue(NOW);
    step(ranker, queue); /* the first step only begins to count */

    sluice_queue_clear(queue, 4);
    queue->taken_s = NOW + 10;
    struct sluice_queue_job *running = sluice_queue_add_running(queue);
    running->account = sluice_queue_intern(queue, "atoms");
    running->gpus = 2;
    running->start_s = NOW - 1000; /* what lies before the first step is not charged */
    running->end_s = NOW + 5000;
    struct sluice_queue_job *shared = sluice_queue_add_running(queue);
    shared->account = sluice_queue_intern(queue, "stars");
    shared->gpu_memory_mib = 250; /* a quarter of a GPU */
    shared->start_s = NOW + 6;
    ended(queue, "biology", 8, NOW + 1, NOW + 4);
    ended(queue, "biology", 8, NOW - 60, NOW - 1); /* ended before the last step */
    pending(queue, 1, "atoms", 1);
    pending(queue, 2, "stars", 1);
    pending(queue, 3, "biology", 1);
    step(ranker, queue);
    CHECK_INT(usage_of("atoms"), 2000 * 10);
    CHECK_INT(usage_of("stars"), 250 * 4);
    CHECK_INT(usage_of("physics"), 2000 * 10 + 250 * 4);
    CHECK_INT(usage_of("biology"), 8000 * 3);
    /* physics used less than biology, and below it stars less than atoms */
    CHECK(rank_of(2).site > rank_of(1).site);
    CHECK(rank_of(1).site > rank_of(3).site);

    /* What has ended meanwhile is charged up to its end, once. */
    sluice_queue_clear(queue, 4);
    queue->taken_s = NOW + 20;
    ended(queue, "atoms", 2, NOW - 1000, NOW + 15);
    ended(queue, "biology", 8, NOW + 1, NOW + 4);
    step(ranker, queue);
    CHECK_INT(usage_of("atoms"), 2000 * 15);
    CHECK_INT(usage_of("biology"), 8000 * 3);

    /* So is what ended in the second of the step: once, though the next step meets it again. */
    sluice_queue_clear(queue, 5);
    queue->taken_s = NOW + 25;
    ended(queue, "atoms", 2, NOW + 21, NOW + 25);
    step(ranker, queue);
    CHECK_INT(usage_of("atoms"), 2000 * 19);
    queue->taken_s = NOW + 30;
    step(ranker, queue);
    CHECK_INT(usage_of("atoms"), 2000 * 19);
    sluice_queue_free(queue);
    sluice_ranker_free(ranker);
}

static void test_starvation_bound_and_tiers(void)
{
    struct sluice_ranker_config config = config_with(SLUICE_FACTOR_SIZE, 1000);
    config.policy.starvation_s = 50000;
    struct sluice_ranker *ranker = NULL;
    CHECK_INT(sluice_ranker_new(&config, &ranker, NULL), SLUICE_OK);
    struct sluice_queue *queue = empty_queue(NOW);
    pending(queue, 1, "atoms", 8);
    pending(queue, 2, "rescue", 1);
    for (uint32_t id = 3; id <= 4; id++) {
        struct sluice_queue_job *old = pending(queue, id, "atoms", 1);
        old->submit_s = old->eligible_s = NOW - 50000 - (id == 4 ? 10 : 0);
    }
    step(ranker, queue);
    CHECK_INT(rank_of(4).place, 0);
    CHECK_INT(rank_of(3).place, 1);
    CHECK(rank_of(4).site > rank_of(3).site);
    CHECK(rank_of(3).site > SLUICE_SITE_STARVING);
    CHECK(rank_of(2).site > rank_of(1).site); /* a higher tier before any factor */
    CHECK_INT(rank_of(1).site, 1000);
    CHECK_INT(rank_of(2).site, 1001 + 125);
    sluice_queue_free(queue);
    sluice_ranker_free(ranker);
}

static void test_prediction_from_history(void)
{
    struct sluice_ranker *ranker = ranker_with(SLUICE_FACTOR_TIME, 1000);
    struct sluice_queue *queue = empty_queue(NOW);
    step(ranker, queue);
    for (int i = 0; i < 3; i++) {
        sluice_queue_clear(queue, 4);
        queue->taken_s = NOW + 1000 * (i + 1);
        ended(queue, "atoms", 1, queue->taken_s - 130, queue->taken_s - 10);
        pending(queue, 2, "atoms", 1);
        step(ranker, queue);
    }
    CHECK_INT(rank_of(2).remaining_s, 120); /* not the hour of its limit */
    pending(queue, 3, "atoms", 1)->uid = 1001;
    step(ranker, queue);
    CHECK_INT(rank_of(3).remaining_s, 3600); /* nothing is known of that user */
    CHECK(rank_of(2).site > rank_of(3).site);
    sluice_queue_free(queue);
    sluice_ranker_free(ranker);
}

static void test_new_job_scores_as_in_the_table(void)
{
    struct sluice_ranker_config config = config_with(SLUICE_FACTOR_FAIR_SHARE, 1000);
    config.policy.weight[SLUICE_FACTOR_SIZE] = 300;
    config.policy.weight[SLUICE_FACTOR_PRIORITY] = 70;
    struct sluice_ranker *ranker = NULL;
    CHECK_INT(sluice_ranker_new(&config, &ranker, NULL), SLUICE_OK);
    struct sluice_queue *queue = empty_queue(NOW);
    const char *accounts[] = {"atoms", "biology", "nobody", "rescue"};
    for (uint32_t i = 0; i < 4; i++)
        pending(queue, i + 1, accounts[i], i + 1);
    step(ranker, queue);
    const struct sluice_ranks *ranks = sluice_ranks_acquire();
    for (uint32_t i = 0; i < 4; i++) {
        struct sluice_order_job job = {
            .id = 99, .submit_s = NOW, .eligible_s = NOW, .remaining_s = 3600, .gpus = i + 1};
        CHECK_INT(sluice_ranks_score(ranks, accounts[i], &job, NOW), rank_of(i + 1).site);
    }
    CHECK(!sluice_ranks_find(ranks, 99));
    sluice_ranks_release(ranks);
    sluice_queue_free(queue);
    sluice_ranker_free(ranker);
}

static char *state_path(void)
{
    static char path[64];
    snprintf(path, sizeof path, "/tmp/test_ranker.%d", (int)getpid());
    return path;
}

static void write_text(const char *text)
{
    FILE *file = fopen(state_path(), "w");
    CHECK(file);
    fputs(text, file);
    fclose(file);
}

static void test_state_survives(void)
{
    struct sluice_ranker_config config = config_with(SLUICE_FACTOR_FAIR_SHARE, 1000);
    config.half_life_s = 0;
    struct sluice_ranker *ranker = NULL, *again = NULL;
    CHECK_INT(sluice_ranker_new(&config, &ranker, NULL), SLUICE_OK);
    CHECK(sluice_ranker_wants_usage(ranker));
    sluice_ranker_seed(ranker, "atoms", 500, NOW - 100);
    CHECK(!sluice_ranker_wants_usage(ranker));
    struct sluice_queue *queue = empty_queue(NOW);
    ended(queue, "stars", 1, NOW - 90, NOW - 50);
    ended(queue, "nobody", 1, NOW - 90, NOW - 50);
    pending(queue, 1, "atoms", 1);
    step(ranker, queue);
    CHECK_INT(sluice_ranker_save(ranker, state_path(), NULL), SLUICE_OK);

    CHECK_INT(sluice_ranker_new(&config, &again, NULL), SLUICE_OK);
    CHECK_INT(sluice_ranker_load(again, state_path(), NULL), SLUICE_OK);
    CHECK(!sluice_ranker_wants_usage(again));
    sluice_queue_clear(queue, 4);
    queue->taken_s = NOW + 10;
    ended(queue, "biology", 1, NOW - 30, NOW + 5); /* ran while the controller was away: charged from what was saved */
    pending(queue, 1, "atoms", 1);
    step(again, queue);
    CHECK_INT(usage_of("atoms"), 500 * 1000);
    CHECK_INT(usage_of("physics"), 540 * 1000);
    CHECK_INT(usage_of("(others)"), 40 * 1000);
    CHECK_INT(usage_of("biology"), 5 * 1000);

    /* Another policy keeps usage by name; a tenant that is gone is charged to the others. */
    struct sluice_ranker_config other = config;
    const struct sluice_ranker_tenant fewer[] = {{.account = "atoms", .shares = 3}};
    other.tenants = fewer;
    other.tenant_count = 1;
    CHECK_INT(sluice_ranker_configure(again, &other, NULL), SLUICE_OK);
    step(again, queue);
    CHECK_INT(usage_of("atoms"), 500 * 1000);
    CHECK_INT(usage_of("(others)"), 85 * 1000);

    sluice_ranker_free(again);
    CHECK_INT(sluice_ranker_new(&config, &again, NULL), SLUICE_OK);
    struct sluice_error_text text;
    write_text("sluice-order 1\ncharged 5\nend 00000000\n");
    CHECK_INT(sluice_ranker_load(again, state_path(), &text), SLUICE_ERROR_CORRUPT);
    write_text("sluice-order 2\n");
    CHECK_INT(sluice_ranker_load(again, state_path(), &text), SLUICE_ERROR_VERSION);
    write_text("sluice-order 1\nrun 1 2\n");
    CHECK_INT(sluice_ranker_load(again, state_path(), &text), SLUICE_ERROR_CORRUPT);
    write_text("");
    CHECK_INT(sluice_ranker_load(again, state_path(), &text), SLUICE_ERROR_CORRUPT);
    CHECK(sluice_ranker_wants_usage(again));
    unlink(state_path());
    CHECK_INT(sluice_ranker_load(again, state_path(), &text), SLUICE_OK);
    sluice_ranker_free(again);
    sluice_ranker_free(ranker);
    sluice_queue_free(queue);
}

static void test_refused_configurations(void)
{
    struct sluice_ranker *ranker = NULL;
    struct sluice_error_text text;
    struct sluice_ranker_config config = config_with(SLUICE_FACTOR_AGE, SLUICE_ORDER_MAX_WEIGHT + 1);
    CHECK_INT(sluice_ranker_new(&config, &ranker, &text), SLUICE_ERROR_INVALID);
    config = config_with(SLUICE_FACTOR_AGE, 1);
    const struct sluice_ranker_tenant twice[] = {{.account = "a", .shares = 1}, {.account = "a", .shares = 1}};
    config.tenants = twice;
    config.tenant_count = 2;
    CHECK_INT(sluice_ranker_new(&config, &ranker, &text), SLUICE_ERROR_DUPLICATE);
    const struct sluice_ranker_tenant orphan[] = {{.account = "a", .parent = "b", .shares = 1}};
    config.tenants = orphan;
    config.tenant_count = 1;
    CHECK_INT(sluice_ranker_new(&config, &ranker, &text), SLUICE_ERROR_UNKNOWN);
    const struct sluice_ranker_tenant circle[] = {{.account = "a", .parent = "b", .shares = 1},
                                                  {.account = "b", .parent = "a", .shares = 1}};
    config.tenants = circle;
    config.tenant_count = 2;
    CHECK_INT(sluice_ranker_new(&config, &ranker, &text), SLUICE_ERROR_INVALID);
    CHECK(!ranker);
}

/* Readers while the table is published again: each sees a whole one. */
static void *read_tables(void *stop)
{
    while (!__atomic_load_n((bool *)stop, __ATOMIC_ACQUIRE)) {
        const struct sluice_ranks *ranks = sluice_ranks_acquire();
        uint32_t count = 0;
        if (ranks) {
            const struct sluice_rank *all = sluice_ranks_all(ranks, &count);
            for (uint32_t i = 0; i < count; i++)
                CHECK(sluice_ranks_find(ranks, all[i].job_id) == &all[i]);
        }
        sluice_ranks_release(ranks);
    }
    return NULL;
}

static void test_readers_next_to_the_thread(void)
{
    struct sluice_ranker *ranker = ranker_with(SLUICE_FACTOR_SIZE, 800);
    bool stop = false;
    pthread_t readers[2];
    for (int i = 0; i < 2; i++)
        CHECK_INT(pthread_create(&readers[i], NULL, read_tables, &stop), 0);
    struct sluice_queue *queue = empty_queue(NOW);
    for (int round = 0; round < 200; round++) {
        sluice_queue_clear(queue, 4);
        for (uint32_t id = 1; id <= (uint32_t)round * 3; id++)
            pending(queue, id * 7, "atoms", 1 + id % 8);
        step(ranker, queue);
    }
    __atomic_store_n(&stop, true, __ATOMIC_RELEASE);
    for (int i = 0; i < 2; i++)
        pthread_join(readers[i], NULL);
    sluice_queue_free(queue);
    sluice_ranker_free(ranker);
    sluice_ranks_withdraw();
}

static void test_queue_bounds(void)
{
    struct sluice_queue *queue = sluice_queue_new(&(struct sluice_queue_config){.max_pending = 100});
    sluice_queue_clear(queue, 130);
    for (int i = 0; i < 120; i++)
        CHECK((sluice_queue_add_pending(queue) != NULL) == (i < 100));
    CHECK_INT(queue->pending_count, 100);
    CHECK_INT(queue->left_out, 20);
    struct sluice_queue_partition *partition = sluice_queue_add_partition(queue);
    CHECK_INT(queue->node_words, 3);
    partition->nodes[2] |= 2;
    sluice_queue_clear(queue, 200);
    CHECK_INT(sluice_queue_add_partition(queue)->nodes[2], 0);
    sluice_queue_name_t name = sluice_queue_intern(queue, "physics");
    CHECK_INT(sluice_queue_intern(queue, "physics"), name);
    CHECK_STR(sluice_queue_name(queue, name), "physics");
    CHECK_STR(sluice_queue_name(queue, 12345), "");
    CHECK_INT(sluice_queue_intern(queue, NULL), 0);
    char text[32];
    for (int i = 0; i < SLUICE_QUEUE_MAX_NAMES + 10; i++) { /* a flood of names ends at the bound */
        snprintf(text, sizeof text, "name-%d", i);
        name = sluice_queue_intern(queue, text);
    }
    CHECK_INT(name, 0);
    CHECK_STR(sluice_queue_name(queue, sluice_queue_intern(queue, "name-17")), "name-17");
    sluice_queue_free(queue);
}

static bool is_odd(uint32_t job_id)
{
    return job_id % 2;
}

static void test_operators_site_factors(void)
{
    enum { NONE = SLUICE_SITE_NONE };
    struct sluice_site_factors factors = {0};
    bool fresh;
    /* A job that is not known has ours: the factor may be one of before a restart. */
    CHECK_INT(sluice_site_factors_choose(&factors, 7, 0, NONE + 5U, NONE + 10U, is_odd, &fresh), NONE + 10U);
    CHECK(!fresh);
    CHECK_INT(sluice_site_factors_choose(&factors, 7, 0, NONE + 10U, NONE + 20U, is_odd, &fresh), NONE + 20U);
    CHECK(!fresh && !sluice_site_factors_kept(&factors, 7, 0, NONE + 20U));
    /* An operator's is kept, said once, and may change. */
    CHECK_INT(sluice_site_factors_choose(&factors, 7, 0, NONE - 77U, NONE + 30U, is_odd, &fresh), NONE - 77U);
    CHECK(fresh && sluice_site_factors_kept(&factors, 7, 0, NONE - 77U));
    CHECK_INT(sluice_site_factors_choose(&factors, 7, 0, NONE - 77U, NONE + 40U, is_odd, &fresh), NONE - 77U);
    CHECK(!fresh);
    CHECK_INT(sluice_site_factors_choose(&factors, 7, 0, NONE + 78U, NONE + 40U, is_odd, &fresh), NONE + 78U);
    CHECK(fresh && !sluice_site_factors_kept(&factors, 7, 0, NONE - 77U));
    /* A task of the array inherits it; one whose array has ours has ours. */
    CHECK_INT(sluice_site_factors_choose(&factors, 9, 7, NONE + 78U, NONE + 1U, is_odd, &fresh), NONE + 78U);
    CHECK(!fresh && sluice_site_factors_kept(&factors, 11, 7, NONE + 78U));
    CHECK_INT(sluice_site_factors_choose(&factors, 13, 7, NONE + 40U, NONE + 1U, is_odd, &fresh), NONE + 1U);
    /* Many jobs come and go: what is left is known, and the table stays small. */
    for (uint32_t id = 100; id < 100000; id += 2)
        CHECK_INT(sluice_site_factors_choose(&factors, id, 0, NONE, NONE + id, is_odd, &fresh), NONE + id);
    CHECK(factors.size <= 256);
    CHECK(sluice_site_factors_kept(&factors, 7, 0, NONE + 78U));
    for (uint32_t id = 101; id < 10000; id += 2)
        CHECK(!sluice_site_factors_kept(&factors, id, 0, NONE + id));
    for (uint32_t id = 101; id < 10000; id += 2)
        CHECK_INT(sluice_site_factors_choose(&factors, id, 0, NONE + 1U, NONE, is_odd, &fresh), NONE + 1U);
    /* 0 gives it back. */
    CHECK_INT(sluice_site_factors_choose(&factors, 7, 0, NONE, NONE + 50U, is_odd, &fresh), NONE + 50U);
    CHECK(!fresh && !sluice_site_factors_kept(&factors, 7, 0, NONE + 50U));
    sluice_site_factors_clear(&factors);
}

static void test_operators_site_factors_survive(void)
{
    enum { NONE = SLUICE_SITE_NONE };
    struct sluice_ranker *ranker = ranker_with(SLUICE_FACTOR_SIZE, 800);
    struct sluice_queue *queue = empty_queue(NOW);
    static const uint32_t SITES[] = {NONE - 77U, NONE + 2000000000U, NONE + 5U};
    for (uint32_t i = 0; i < 3; i++) {
        struct sluice_queue_job *job = pending(queue, i + 1, "atoms", 8);
        job->site_factor = SITES[i];
        job->flags |= i < 2 ? SLUICE_QUEUE_SITE_KEPT : 0;
    }
    step(ranker, queue);
    const struct sluice_ranks *ranks = sluice_ranks_acquire();
    CHECK_INT(sluice_ranks_write(ranks, state_path(), NULL), SLUICE_OK);
    sluice_ranks_release(ranks);

    struct sluice_site_factors factors = {0};
    bool fresh;
    CHECK_INT(sluice_site_factors_load(&factors, state_path(), NULL), SLUICE_OK);
    CHECK_INT(factors.count, 2);
    CHECK(sluice_site_factors_kept(&factors, 1, 0, SITES[0]) && !sluice_site_factors_kept(&factors, 3, 0, SITES[2]));
    CHECK_INT(sluice_site_factors_choose(&factors, 1, 0, SITES[0], NONE + 9U, NULL, &fresh), SITES[0]);
    CHECK(!fresh);
    /* Slurm's saved state has another factor: from before the operator set his, so it is ours. */
    CHECK_INT(sluice_site_factors_choose(&factors, 2, 0, NONE + 800U, NONE + 9U, NULL, &fresh), NONE + 9U);
    CHECK(!fresh);
    sluice_site_factors_clear(&factors);
    unlink(state_path());
    CHECK_INT(sluice_site_factors_load(&factors, state_path(), NULL), SLUICE_OK);
    CHECK_INT(factors.count, 0);
    sluice_ranks_withdraw();
    sluice_queue_free(queue);
    sluice_ranker_free(ranker);
}

int main(void)
{
    test_operators_site_factors();
    test_operators_site_factors_survive();
    test_no_weight_publishes_nothing();
    test_factors();
    test_held_jobs_do_not_age();
    test_usage_of_running_and_ended_jobs();
    test_starvation_bound_and_tiers();
    test_prediction_from_history();
    test_new_job_scores_as_in_the_table();
    test_state_survives();
    test_refused_configurations();
    test_readers_next_to_the_thread();
    test_queue_bounds();
    return 0;
}
