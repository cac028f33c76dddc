/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "error.h"
#include "fairshare.h"
#include "fixed.h"
#include "sort.h"

/* Services above 2^LOG2_FULL have factor 0: in microseconds 2^60 are 36,559 GPU-years. */
enum { LOG2_FULL = 60 };

struct ranked_job {
    int64_t score;
    uint64_t least; /* what a logarithmic factor rounds off: the exact service or time that is left */
    int64_t submit_s;
    uint64_t id;
    uint32_t index;
    bool starving;
};

struct sluice_order {
    uint32_t capacity;
    struct ranked_job *jobs;
    struct ranked_job *scratch;
};

enum sluice_error sluice_order_new(uint32_t capacity, struct sluice_order **order, struct sluice_error_text *text)
{
    struct sluice_order *made = calloc(1, sizeof *made);
    if (made) {
        made->capacity = capacity;
        made->jobs = calloc(capacity ? capacity : 1, sizeof *made->jobs);
        made->scratch = calloc(capacity ? capacity : 1, sizeof *made->scratch);
    }
    if (!made || !made->jobs || !made->scratch) {
        sluice_order_free(made);
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "order of %u jobs: out of host memory", capacity);
    }
    *order = made;
    return SLUICE_OK;
}

void sluice_order_free(struct sluice_order *order)
{
    if (!order)
        return;
    free(order->jobs);
    free(order->scratch);
    free(order);
}

static enum sluice_error check_policy(const struct sluice_order_policy *policy,
                                      const struct sluice_fairshare *fairshare, struct sluice_error_text *text)
{
    for (int factor = 0; factor < SLUICE_FACTOR_COUNT; factor++) {
        if (policy->weight[factor] > SLUICE_ORDER_MAX_WEIGHT)
            return sluice_fail(text, SLUICE_ERROR_INVALID, "order policy: weight %u of factor %d: at most %d",
                               policy->weight[factor], factor, SLUICE_ORDER_MAX_WEIGHT);
    }
    if (policy->weight[SLUICE_FACTOR_AGE] && policy->age_full_s <= 0)
        return sluice_fail(text, SLUICE_ERROR_INVALID,
                           "order policy: age_full_s %lld: must be positive where age has weight",
                           (long long)policy->age_full_s);
    if (policy->weight[SLUICE_FACTOR_DEADLINE] && policy->laxity_horizon_s <= 0)
        return sluice_fail(text, SLUICE_ERROR_INVALID,
                           "order policy: laxity_horizon_s %lld: must be positive where deadline has weight",
                           (long long)policy->laxity_horizon_s);
    if (policy->weight[SLUICE_FACTOR_SIZE] && policy->size_full_gpus == 0)
        return sluice_fail(text, SLUICE_ERROR_INVALID,
                           "order policy: size_full_gpus 0: must be positive where size has weight");
    if (policy->starvation_s < 0)
        return sluice_fail(text, SLUICE_ERROR_INVALID, "order policy: starvation_s %lld: must not be negative",
                           (long long)policy->starvation_s);
    if (policy->weight[SLUICE_FACTOR_FAIR_SHARE] && !fairshare)
        return sluice_fail(text, SLUICE_ERROR_INVALID,
                           "order policy: fair-share has weight, but there is no fair-share tree");
    return SLUICE_OK;
}

static enum sluice_error check_job(const struct sluice_order_policy *policy, const struct sluice_fairshare *fairshare,
                                   const struct sluice_order_job *job, struct sluice_error_text *text)
{
    unsigned long long id = job->id;
    if (job->submit_s < 0 || job->eligible_s < job->submit_s)
        return sluice_fail(text, SLUICE_ERROR_INVALID,
                           "job %llu: submitted at %lld s, eligible at %lld s: must not be earlier", id,
                           (long long)job->submit_s, (long long)job->eligible_s);
    if (job->deadline_s < 0 || job->remaining_s < 0)
        return sluice_fail(text, SLUICE_ERROR_INVALID,
                           "job %llu: deadline %lld s, remaining %lld s: must not be negative", id,
                           (long long)job->deadline_s, (long long)job->remaining_s);
    if (job->priority > SLUICE_FACTOR_ONE)
        return sluice_fail(text, SLUICE_ERROR_INVALID, "job %llu: priority %u: at most %d", id, job->priority,
                           SLUICE_FACTOR_ONE);
    if (policy->weight[SLUICE_FACTOR_FAIR_SHARE] && !sluice_fairshare_knows(fairshare, job->account))
        return sluice_fail(text, SLUICE_ERROR_UNKNOWN, "job %llu: account %u is not in the fair-share tree", id,
                           job->account);
    return SLUICE_OK;
}

/* 1 at a service of 0 or 1, falling by the same amount each time the service doubles. */
static int64_t smallness(uint64_t service)
{
    const uint64_t full = (uint64_t)LOG2_FULL << SLUICE_LOG2_FRACTION_BITS;
    uint64_t log2 = sluice_log2_fixed(service ? service : 1);
    return log2 >= full ? 0 : (int64_t)sluice_scale(SLUICE_FACTOR_ONE, full - log2, full);
}

/* part / whole as a factor, at most one; whole > 0. */
static int64_t saturating(int64_t part, int64_t whole)
{
    if (part <= 0)
        return 0;
    return part >= whole ? SLUICE_FACTOR_ONE
                         : (int64_t)sluice_scale(SLUICE_FACTOR_ONE, (uint64_t)part, (uint64_t)whole);
}

/* a - b for b >= 0, stopping at the smallest number. */
static int64_t subtract(int64_t a, int64_t b)
{
    int64_t difference;
    return __builtin_sub_overflow(a, b, &difference) ? INT64_MIN : difference;
}

static int64_t deadline_factor(const struct sluice_order_policy *policy, const struct sluice_order_terms *terms)
{
    if (terms->deadline != SLUICE_DEADLINE_FEASIBLE)
        return 0;
    return SLUICE_FACTOR_ONE - saturating(terms->laxity_s, policy->laxity_horizon_s);
}

/* GPU-seconds that are left. */
static uint64_t service_of(const struct sluice_order_job *job)
{
    uint64_t service;
    if (__builtin_mul_overflow((uint64_t)job->remaining_s, (uint64_t)(job->gpus ? job->gpus : 1), &service))
        service = UINT64_MAX;
    return service;
}

static void score_job(const struct sluice_order_policy *policy, const struct sluice_fairshare *fairshare,
                      const struct sluice_order_job *job, int64_t now_s, struct sluice_order_terms *terms)
{
    *terms = (struct sluice_order_terms){0};
    if (job->deadline_s) {
        terms->laxity_s = subtract(subtract(job->deadline_s, now_s), job->remaining_s);
        terms->deadline = terms->laxity_s >= 0 ? SLUICE_DEADLINE_FEASIBLE : SLUICE_DEADLINE_INFEASIBLE;
    }
    int64_t waited_s = subtract(now_s, job->eligible_s);
    terms->starving = policy->starvation_s > 0 && waited_s >= policy->starvation_s;

    const uint32_t *weight = policy->weight;
    uint64_t remaining = (uint64_t)job->remaining_s, service = service_of(job);
    int64_t factor[SLUICE_FACTOR_COUNT] = {
        [SLUICE_FACTOR_PRIORITY] = job->priority,
        [SLUICE_FACTOR_AGE] = weight[SLUICE_FACTOR_AGE] ? saturating(waited_s, policy->age_full_s) : 0,
        [SLUICE_FACTOR_FAIR_SHARE] =
            weight[SLUICE_FACTOR_FAIR_SHARE] ? sluice_fairshare_factor_of(fairshare, job->account) : 0,
        [SLUICE_FACTOR_DEADLINE] = weight[SLUICE_FACTOR_DEADLINE] ? deadline_factor(policy, terms) : 0,
        [SLUICE_FACTOR_SERVICE] = weight[SLUICE_FACTOR_SERVICE] ? smallness(service) : 0,
        [SLUICE_FACTOR_TIME] = weight[SLUICE_FACTOR_TIME] ? smallness(remaining) : 0,
        [SLUICE_FACTOR_SIZE] = weight[SLUICE_FACTOR_SIZE] ? saturating(job->gpus, policy->size_full_gpus) : 0,
    };
    for (int i = 0; i < SLUICE_FACTOR_COUNT; i++) {
        terms->term[i] = (int64_t)weight[i] * factor[i];
        terms->score += terms->term[i];
    }
}

enum sluice_error sluice_order_score(const struct sluice_order_policy *policy, const struct sluice_fairshare *fairshare,
                                     const struct sluice_order_job *job, int64_t now_s,
                                     struct sluice_order_terms *terms, struct sluice_error_text *text)
{
    enum sluice_error error = check_policy(policy, fairshare, text);
    if (error == SLUICE_OK)
        error = check_job(policy, fairshare, job, text);
    if (error == SLUICE_OK)
        score_job(policy, fairshare, job, now_s, terms);
    return error;
}

static int compare_numbers(int64_t left, int64_t right)
{
    return (left > right) - (left < right);
}

static int compare_jobs(const void *left_job, const void *right_job)
{
    const struct ranked_job *left = left_job, *right = right_job;
    if (left->starving != right->starving)
        return left->starving ? -1 : 1;
    if (!left->starving && left->score != right->score)
        return left->score > right->score ? -1 : 1;
    if (!left->starving && left->least != right->least)
        return left->least < right->least ? -1 : 1;
    int order = compare_numbers(left->submit_s, right->submit_s);
    if (order)
        return order;
    return (left->id > right->id) - (left->id < right->id);
}

enum sluice_error sluice_order_sort(struct sluice_order *order, const struct sluice_order_policy *policy,
                                    const struct sluice_fairshare *fairshare, const struct sluice_order_job *jobs,
                                    uint32_t count, int64_t now_s, uint32_t *ranked, struct sluice_error_text *text)
{
    if (count > order->capacity)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY, "%u jobs: the order was made for %u", count, order->capacity);
    enum sluice_error error = check_policy(policy, fairshare, text);
    for (uint32_t i = 0; error == SLUICE_OK && i < count; i++)
        error = check_job(policy, fairshare, &jobs[i], text);
    if (error != SLUICE_OK)
        return error;
    for (uint32_t i = 0; i < count; i++) {
        struct sluice_order_terms terms;
        score_job(policy, fairshare, &jobs[i], now_s, &terms);
        uint64_t least = policy->weight[SLUICE_FACTOR_SERVICE] ? service_of(&jobs[i])
                         : policy->weight[SLUICE_FACTOR_TIME]  ? (uint64_t)jobs[i].remaining_s
                                                               : 0;
        order->jobs[i] = (struct ranked_job){.score = terms.score,
                                             .least = least,
                                             .submit_s = jobs[i].submit_s,
                                             .id = jobs[i].id,
                                             .index = i,
                                             .starving = terms.starving};
    }
    sluice_sort(order->jobs, order->scratch, count, sizeof *order->jobs, compare_jobs);
    for (uint32_t i = 0; i < count; i++)
        ranked[i] = order->jobs[i].index;
    return SLUICE_OK;
}
