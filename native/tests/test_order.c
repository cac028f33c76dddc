/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"
#include "fixed.h"
#include "sluice/core.h"
#include "sort.h"

static struct sluice_error_text text;

static void test_log2(void)
{
    static const struct {
        uint64_t value, whole;
    } powers[] = {{1, 0}, {2, 1}, {1024, 10}, {UINT64_C(1) << 63, 63}};
    for (size_t i = 0; i < sizeof powers / sizeof *powers; i++)
        CHECK_INT(sluice_log2_fixed(powers[i].value), powers[i].whole << SLUICE_LOG2_FRACTION_BITS);
    /* log2(3) = 1.5849625007..., in units of 2^-24 */
    CHECK_INT(sluice_log2_fixed(3), 26591258);
    uint64_t before = 0;
    for (uint64_t value = 1; value < 100000; value += 7) {
        uint64_t log2 = sluice_log2_fixed(value);
        CHECK(log2 >= before);
        before = log2;
    }
}

static void test_decay(void)
{
    static const struct {
        uint64_t value;
        int64_t age, half_life;
        uint64_t low, high;
    } cases[] = {
        {1000000, 0, 100, 1000000, 1000000},
        {1000000, 100, 100, 499999, 500000},
        {1000000, 50, 100, 707100, 707107},
        {1000000, 250, 100, 176770, 176777},
        {UINT64_MAX, 6400, 100, 0, 0},
        {UINT64_MAX, 6300, 100, 1, 1},
        {5, INT64_MAX, 1, 0, 0},
        {1000000, 1, INT64_MAX, 999999, 1000000},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint64_t decayed = sluice_decay(cases[i].value, cases[i].age, cases[i].half_life);
        CHECK(decayed >= cases[i].low && decayed <= cases[i].high);
    }
}

struct item {
    int key, place;
};

static int compare_items(const void *left, const void *right)
{
    return ((const struct item *)left)->key - ((const struct item *)right)->key;
}

static void test_sort(void)
{
    struct item items[300], scratch[300];
    for (int count = 0; count <= 300; count += count < 20 ? 1 : 35) {
        unsigned random = 12345;
        for (int i = 0; i < count; i++) {
            random = random * 1103515245U + 12345U;
            items[i] = (struct item){.key = (int)(random >> 24) % 17, .place = i};
        }
        sluice_sort(items, scratch, (size_t)count, sizeof *items, compare_items);
        for (int i = 1; i < count; i++) {
            CHECK(items[i - 1].key <= items[i].key);
            CHECK(items[i - 1].key < items[i].key || items[i - 1].place < items[i].place); /* stable */
        }
    }
}

static const struct sluice_order_job plain = {
    .id = 1, .submit_s = 100, .eligible_s = 100, .remaining_s = 60, .gpus = 1};

static struct sluice_order_terms score(struct sluice_order_policy policy, struct sluice_order_job job, int64_t now_s)
{
    struct sluice_order_terms terms;
    CHECK_INT(sluice_order_score(&policy, NULL, &job, now_s, &terms, &text), SLUICE_OK);
    return terms;
}

static void test_terms(void)
{
    struct sluice_order_policy policy = {.age_full_s = 1000, .laxity_horizon_s = 1000, .size_full_gpus = 64};
    CHECK_INT(score(policy, plain, 5000).score, 0);

    policy.weight[SLUICE_FACTOR_AGE] = 10;
    CHECK_INT(score(policy, plain, 50).score, 0);
    CHECK_INT(score(policy, plain, 600).score, 5 * (int64_t)SLUICE_FACTOR_ONE);
    CHECK_INT(score(policy, plain, 1000000).score, 10 * (int64_t)SLUICE_FACTOR_ONE);

    policy.weight[SLUICE_FACTOR_AGE] = 0;
    policy.weight[SLUICE_FACTOR_DEADLINE] = 4;
    struct sluice_order_job job = plain;
    CHECK_INT(score(policy, job, 0).deadline, SLUICE_DEADLINE_NONE);
    job.deadline_s = 1060;
    struct sluice_order_terms terms = score(policy, job, 500);
    CHECK_INT(terms.laxity_s, 500);
    CHECK_INT(terms.deadline, SLUICE_DEADLINE_FEASIBLE);
    CHECK_INT(terms.term[SLUICE_FACTOR_DEADLINE], 2 * (int64_t)SLUICE_FACTOR_ONE);
    CHECK_INT(score(policy, job, 1000).score, 4 * (int64_t)SLUICE_FACTOR_ONE);
    terms = score(policy, job, 1001);
    CHECK_INT(terms.deadline, SLUICE_DEADLINE_INFEASIBLE);
    CHECK_INT(terms.score, 0);

    policy.weight[SLUICE_FACTOR_DEADLINE] = 0;
    policy.weight[SLUICE_FACTOR_SERVICE] = 1;
    job = plain;
    job.remaining_s = 0;
    CHECK_INT(score(policy, job, 0).score, SLUICE_FACTOR_ONE);
    job.remaining_s = 1 << 30;
    CHECK_INT(score(policy, job, 0).score, SLUICE_FACTOR_ONE / 2);
    job.gpus = 1 << 15;
    CHECK_INT(score(policy, job, 0).score, SLUICE_FACTOR_ONE / 4);
    job.remaining_s = INT64_MAX;
    job.gpus = UINT32_MAX;
    CHECK_INT(score(policy, job, 0).score, 0);

    policy.starvation_s = 900;
    CHECK(!score(policy, plain, 999).starving);
    CHECK(score(policy, plain, 1000).starving);
}

static void expect_order(const struct sluice_order_policy *policy, const struct sluice_order_job *jobs, uint32_t count,
                         int64_t now_s, const char *expected)
{
    struct sluice_order *order;
    CHECK_INT(sluice_order_new(count, &order, &text), SLUICE_OK);
    uint32_t ranked[16];
    CHECK_INT(sluice_order_sort(order, policy, NULL, jobs, count, now_s, ranked, &text), SLUICE_OK);
    char ids[17] = "";
    for (uint32_t i = 0; i < count; i++)
        ids[i] = (char)('0' + jobs[ranked[i]].id);
    CHECK_STR(ids, expected);
    sluice_order_free(order);
}

static void test_orders(void)
{
    const struct sluice_order_job jobs[] = {
        {.id = 1, .submit_s = 0, .eligible_s = 0, .remaining_s = 1000, .gpus = 1},
        {.id = 2, .submit_s = 10, .eligible_s = 10, .remaining_s = 100, .gpus = 64, .deadline_s = 500},
        {.id = 3, .submit_s = 20, .eligible_s = 20, .remaining_s = 10, .gpus = 1},
        {.id = 4, .submit_s = 20, .eligible_s = 20, .remaining_s = 300, .gpus = 2, .deadline_s = 400},
    };
    struct sluice_order_policy policy = {.laxity_horizon_s = 1000, .size_full_gpus = 64};
    expect_order(&policy, jobs, 4, 50, "1234"); /* FIFO */
    policy.weight[SLUICE_FACTOR_SERVICE] = 1;
    expect_order(&policy, jobs, 4, 50, "3412");
    policy.starvation_s = 45; /* jobs 1 and 2 have waited so long at 60 */
    expect_order(&policy, jobs, 4, 60, "1234");
    policy.starvation_s = 0;
    policy.weight[SLUICE_FACTOR_SERVICE] = 0;
    policy.weight[SLUICE_FACTOR_TIME] = 1;
    expect_order(&policy, jobs, 4, 50, "3241");
    policy.weight[SLUICE_FACTOR_TIME] = 0;
    policy.weight[SLUICE_FACTOR_DEADLINE] = 1;
    expect_order(&policy, jobs, 4, 50, "4213");
    policy.weight[SLUICE_FACTOR_DEADLINE] = 0;
    policy.weight[SLUICE_FACTOR_SIZE] = 1;
    expect_order(&policy, jobs, 4, 50, "2413");
}

static void test_refused(void)
{
    static const struct {
        struct sluice_order_policy policy;
        struct sluice_order_job job;
        enum sluice_error error;
        const char *says;
    } cases[] = {
        {.policy.weight[0] = SLUICE_ORDER_MAX_WEIGHT + 1, .error = SLUICE_ERROR_INVALID, .says = "weight 1000001"},
        {.policy.weight[SLUICE_FACTOR_AGE] = 1, .error = SLUICE_ERROR_INVALID, .says = "age_full_s 0"},
        {.policy.weight[SLUICE_FACTOR_DEADLINE] = 1, .error = SLUICE_ERROR_INVALID, .says = "laxity_horizon_s 0"},
        {.policy.weight[SLUICE_FACTOR_SIZE] = 1, .error = SLUICE_ERROR_INVALID, .says = "size_full_gpus 0"},
        {.policy.weight[SLUICE_FACTOR_FAIR_SHARE] = 1, .error = SLUICE_ERROR_INVALID, .says = "no fair-share tree"},
        {.policy.starvation_s = -1, .error = SLUICE_ERROR_INVALID, .says = "starvation_s -1"},
        {.job = {.id = 7, .submit_s = -5}, .error = SLUICE_ERROR_INVALID, .says = "job 7: submitted at -5"},
        {.job = {.id = 7, .submit_s = 5}, .error = SLUICE_ERROR_INVALID, .says = "eligible at 0"},
        {.job = {.id = 7, .remaining_s = -1}, .error = SLUICE_ERROR_INVALID, .says = "remaining -1"},
        {.job = {.id = 7, .deadline_s = -1}, .error = SLUICE_ERROR_INVALID, .says = "deadline -1"},
        {.job = {.id = 7, .priority = SLUICE_FACTOR_ONE + 1U}, .error = SLUICE_ERROR_INVALID, .says = "priority"},
    };
    struct sluice_order *order;
    CHECK_INT(sluice_order_new(1, &order, &text), SLUICE_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct sluice_order_terms terms = {.score = 42};
        CHECK_INT(sluice_order_score(&cases[i].policy, NULL, &cases[i].job, 0, &terms, &text), cases[i].error);
        CHECK(strstr(text.text, cases[i].says));
        CHECK_INT(terms.score, 42);
        uint32_t ranked = 42;
        CHECK_INT(sluice_order_sort(order, &cases[i].policy, NULL, &cases[i].job, 1, 0, &ranked, NULL), cases[i].error);
        CHECK_INT(ranked, 42);
    }
    const struct sluice_order_job two[2] = {plain, plain};
    uint32_t ranked[2];
    CHECK_INT(sluice_order_sort(order, &cases[8].policy, NULL, two, 2, 0, ranked, &text), SLUICE_ERROR_CAPACITY);
    sluice_order_free(order);
    sluice_order_free(NULL);
}

int main(void)
{
    test_log2();
    test_decay();
    test_sort();
    test_terms();
    test_orders();
    test_refused();
    return 0;
}
