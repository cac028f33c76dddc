/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "order/order_internal.h"

#include <stdlib.h>

#include "runtime/runtime.h"

enum {
    DEFAULT_QUANTILE = 75,
    DEFAULT_GPU_MIB = 81920,
    PREDICTOR_KEYS = 65536,
    KEYS = 3,
};

/* ---- what is learnt of run times ---- */

static void keys_of(const struct run *run, uint64_t keys[KEYS])
{
    /* Steps of splitmix64 (G. Steele, D. Lea, C. Flood, OOPSLA 2014), so that near ids give far keys. */
    uint64_t part[KEYS] = {run->uid, run->gpus, run->name_hash}, mixed = 0;
    for (int i = 0; i < KEYS; i++) {
        uint64_t z = (mixed ^ part[i]) + UINT64_C(0x9e3779b97f4a7c15) * (uint64_t)(i + 1);
        z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
        z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
        mixed = z ^ (z >> 31);
        keys[KEYS - 1 - i] = mixed;
    }
}

void sluice_ranker_learn(struct sluice_ranker *ranker, const struct run *run)
{
    uint64_t keys[KEYS];
    keys_of(run, keys);
    (void)sluice_predictor_record(ranker->predictor, keys, KEYS, run->run_s, NULL);
    ranker->runs[ranker->run_count++ % SLUICE_RANKER_MAX_RUNS] = *run;
}

/* The remembered runs into a new predictor, the oldest first. */
static void learn_again(const struct sluice_ranker *ranker, struct sluice_predictor *predictor)
{
    uint64_t first = ranker->run_count > SLUICE_RANKER_MAX_RUNS ? ranker->run_count - SLUICE_RANKER_MAX_RUNS : 0;
    for (uint64_t i = first; i < ranker->run_count; i++) {
        const struct run *run = &ranker->runs[i % SLUICE_RANKER_MAX_RUNS];
        uint64_t keys[KEYS];
        keys_of(run, keys);
        (void)sluice_predictor_record(predictor, keys, KEYS, run->run_s, NULL);
    }
}

/* ---- start, end and configuration ---- */

/* Does the core take this policy? */
static enum sluice_error check_policy(const struct sluice_ranker *ranker, struct sluice_error_text *text)
{
    const struct sluice_order_job job = {.id = 1, .account = ranker->tenants[0].id};
    struct sluice_order_terms terms;
    return sluice_order_score(&ranker->policy, ranker->fairshare, &job, 0, &terms, text);
}

static enum sluice_error new_predictor(struct sluice_ranker *ranker, struct sluice_error_text *text)
{
    return sluice_predictor_new(PREDICTOR_KEYS, ranker->quantile_percent, &ranker->predictor, text);
}

static enum sluice_error build(struct sluice_ranker *ranker, const struct sluice_ranker_config *config,
                               struct sluice_error_text *text)
{
    if (config->tenant_count > SLUICE_RANKER_MAX_TENANTS)
        return sluice_fail_with(text, SLUICE_ERROR_RANGE, "%u tenants: at most %d", config->tenant_count,
                                SLUICE_RANKER_MAX_TENANTS);
    ranker->policy = config->policy;
    ranker->half_life_s = config->half_life_s;
    ranker->gpu_memory_mib = config->gpu_memory_mib > 0 ? config->gpu_memory_mib : DEFAULT_GPU_MIB;
    ranker->quantile_percent = config->quantile_percent ? config->quantile_percent : DEFAULT_QUANTILE;
    enum sluice_error error = sluice_tenants_enter(ranker, config, text);
    if (error == SLUICE_OK)
        error = sluice_tenants_grow(ranker, config, text);
    if (error == SLUICE_OK)
        error = check_policy(ranker, text);
    if (error == SLUICE_OK)
        error = new_predictor(ranker, text);
    return error;
}

enum sluice_error sluice_ranker_new(const struct sluice_ranker_config *config, struct sluice_ranker **ranker,
                                    struct sluice_error_text *text)
{
    struct sluice_ranker *made = calloc(1, sizeof *made);
    if (made)
        made->runs = calloc(SLUICE_RANKER_MAX_RUNS, sizeof *made->runs);
    enum sluice_error error = made && made->runs
                                  ? build(made, config, text)
                                  : sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "order: out of memory");
    if (error != SLUICE_OK) {
        sluice_ranker_free(made);
        return error;
    }
    *ranker = made;
    return SLUICE_OK;
}

static void free_orders(struct sluice_ranker *ranker)
{
    sluice_order_free(ranker->order);
    free(ranker->jobs);
    free(ranker->ranked);
    ranker->order = NULL;
    ranker->jobs = NULL;
    ranker->ranked = NULL;
    ranker->order_room = 0;
}

void sluice_ranker_free(struct sluice_ranker *ranker)
{
    if (!ranker)
        return;
    sluice_tenants_free(ranker);
    free_orders(ranker);
    sluice_predictor_free(ranker->predictor);
    free(ranker->runs);
    free(ranker);
}

enum sluice_error sluice_ranker_configure(struct sluice_ranker *ranker, const struct sluice_ranker_config *config,
                                          struct sluice_error_text *text)
{
    struct sluice_ranker fresh = {0};
    enum sluice_error error = build(&fresh, config, text);
    uint64_t *direct = error == SLUICE_OK ? sluice_tenants_direct_usage(ranker, ranker->charged_to_s) : NULL;
    if (error == SLUICE_OK && !direct)
        error =
            sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "order: out of memory for %u tenants", ranker->tenant_count);
    if (error != SLUICE_OK) {
        sluice_tenants_free(&fresh);
        sluice_predictor_free(fresh.predictor);
        return error;
    }
    for (uint32_t i = 0; i < ranker->tenant_count; i++)
        sluice_tenant_charge(&fresh, i ? sluice_tenant_of(&fresh, ranker->tenants[i].account) : 0, direct[i],
                             ranker->charged_to_s);
    free(direct);
    learn_again(ranker, fresh.predictor);
    sluice_tenants_free(ranker);
    sluice_predictor_free(ranker->predictor);
    ranker->policy = fresh.policy;
    ranker->half_life_s = fresh.half_life_s;
    ranker->gpu_memory_mib = fresh.gpu_memory_mib;
    ranker->quantile_percent = fresh.quantile_percent;
    ranker->tenants = fresh.tenants;
    ranker->tenant_count = fresh.tenant_count;
    ranker->accounts = fresh.accounts;
    ranker->fairshare = fresh.fairshare;
    ranker->predictor = fresh.predictor;
    return SLUICE_OK;
}

/* ---- what has happened since the last step ---- */

bool sluice_ranker_wants_usage(const struct sluice_ranker *ranker)
{
    return !ranker->usage_known;
}

void sluice_ranker_seed(struct sluice_ranker *ranker, const char *account, uint64_t gpu_seconds, int64_t now_s)
{
    ranker->usage_known = true;
    ranker->charged_to_s = now_s;
    sluice_tenant_charge(ranker, sluice_tenant_of(ranker, account),
                         gpu_seconds < UINT64_MAX / 1000 ? gpu_seconds * 1000 : UINT64_MAX, now_s);
}

/* GPUs in thousandths that a job holds. */
static uint64_t gpus_milli(const struct sluice_ranker *ranker, const struct sluice_queue_job *job)
{
    return (uint64_t)job->gpus * 1000 + job->gpu_memory_mib * 1000 / (uint64_t)ranker->gpu_memory_mib;
}

/* Charge what the job held between the last step and this one, or its end. */
static void charge_job(struct sluice_ranker *ranker, const struct sluice_queue *queue,
                       const struct sluice_queue_job *job, int64_t end_s)
{
    int64_t from = job->start_s > ranker->charged_to_s ? job->start_s : ranker->charged_to_s;
    int64_t to = end_s < queue->taken_s ? end_s : queue->taken_s;
    if (job->start_s > 0 && to > from)
        sluice_tenant_charge(ranker, sluice_tenant_of(ranker, sluice_queue_name(queue, job->account)),
                             gpus_milli(ranker, job) * (uint64_t)(to - from), queue->taken_s);
}

static uint32_t gpus_of(const struct sluice_queue_job *job)
{
    return job->gpus ? job->gpus : job->gpu_memory_mib > 0; /* a share counts as one */
}

static struct run run_of(const struct sluice_queue_job *job)
{
    int64_t run_s = job->end_s - job->start_s - job->suspended_s;
    return (struct run){
        .uid = job->uid, .gpus = gpus_of(job), .name_hash = job->name_hash, .run_s = run_s > 0 ? run_s : 0};
}

/* Since the last step: usage, and run times of what ended. A job that ended in the second of the step has run since the
 * last one: it is charged now; the next step learns its run time and charges nothing more. */
static void follow(struct sluice_ranker *ranker, const struct sluice_queue *queue)
{
    if (ranker->charged_to_s == 0 || ranker->charged_to_s > queue->taken_s)
        ranker->charged_to_s = queue->taken_s; /* first step, or the clock was set back */
    for (uint32_t i = 0; i < queue->running_count; i++) {
        const struct sluice_queue_job *job = &queue->running[i];
        if (!(job->flags & (SLUICE_QUEUE_COMPLETING | SLUICE_QUEUE_SUSPENDED)))
            charge_job(ranker, queue, job, queue->taken_s);
    }
    for (uint32_t i = 0; i < queue->ended_count; i++) {
        const struct sluice_queue_job *job = &queue->ended[i];
        if (job->start_s <= 0 || job->end_s < ranker->charged_to_s || job->end_s > queue->taken_s)
            continue;
        charge_job(ranker, queue, job, job->end_s);
        if (job->end_s < queue->taken_s && job->flags & SLUICE_QUEUE_RAN_OUT) {
            struct run run = run_of(job);
            sluice_ranker_learn(ranker, &run);
        }
    }
    ranker->charged_to_s = queue->taken_s;
    ranker->usage_known = true;
}

/* ---- a step ---- */

static bool make_room(struct sluice_ranker *ranker, uint32_t count)
{
    if (count <= ranker->order_room && ranker->order)
        return true;
    free_orders(ranker);
    uint32_t room = 1024;
    while (room < count)
        room *= 2;
    ranker->jobs = calloc(room, sizeof *ranker->jobs);
    ranker->ranked = calloc(room, sizeof *ranker->ranked);
    if (!ranker->jobs || !ranker->ranked || sluice_order_new(room, &ranker->order, NULL) != SLUICE_OK) {
        free_orders(ranker);
        return false;
    }
    ranker->order_room = room;
    return true;
}

/* A job as the core's order sees it. */
static void describe(const struct sluice_ranker *ranker, const struct sluice_queue *queue,
                     const struct sluice_queue_job *job, uint32_t tenant, struct sluice_order_job *to)
{
    struct run run = {.uid = job->uid, .gpus = gpus_of(job), .name_hash = job->name_hash};
    uint64_t keys[KEYS];
    keys_of(&run, keys);
    int64_t submit_s = job->submit_s > 0 ? job->submit_s : 0;
    /* A job that is held, dependent or not due does not age. */
    int64_t eligible_s = job->eligible_s > 0 ? job->eligible_s : queue->taken_s;
    *to = (struct sluice_order_job){.id = job->id,
                                    .submit_s = submit_s,
                                    .eligible_s = eligible_s > submit_s ? eligible_s : submit_s,
                                    .deadline_s = job->deadline_s > 0 ? job->deadline_s : 0,
                                    .gpus = job->gpus, /* whole ones: a part of one is of no size */
                                    .priority = ranker->tenants[tenant].priority,
                                    .account = ranker->tenants[tenant].id};
    (void)sluice_predictor_predict(ranker->predictor, keys, KEYS, 0, job->limit_s > 0 ? job->limit_s : 0,
                                   &to->remaining_s, NULL);
}

/* Is there anything that makes one job go before another? */
static bool orders(const struct sluice_ranker *ranker)
{
    bool tiers = false;
    for (uint32_t i = 0; i < ranker->tenant_count; i++)
        tiers |= ranker->tenants[i].tier > 0;
    return tiers || ranker->policy.starvation_s > 0 || sluice_weight_sum(&ranker->policy) > 0;
}

enum sluice_error sluice_ranker_step(struct sluice_ranker *ranker, const struct sluice_queue *queue,
                                     struct sluice_error_text *text)
{
    follow(ranker, queue);
    if (!orders(ranker)) {
        sluice_ranks_withdraw();
        return SLUICE_OK;
    }
    sluice_fairshare_refresh(ranker->fairshare, queue->taken_s);
    struct sluice_ranks *ranks = sluice_ranks_new(ranker, queue);
    if (!ranks || !make_room(ranker, queue->pending_count)) {
        sluice_ranks_free(ranks);
        return sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "order: out of memory for %u pending jobs",
                                queue->pending_count);
    }
    for (uint32_t i = 0; i < queue->pending_count; i++)
        describe(ranker, queue, &queue->pending[i],
                 sluice_tenant_of(ranker, sluice_queue_name(queue, queue->pending[i].account)), &ranker->jobs[i]);
    enum sluice_error error = sluice_order_sort(ranker->order, &ranker->policy, ranker->fairshare, ranker->jobs,
                                                queue->pending_count, queue->taken_s, ranker->ranked, text);
    if (error != SLUICE_OK) {
        sluice_ranks_free(ranks);
        return error;
    }
    for (uint32_t place = 0; place < queue->pending_count; place++) {
        const struct sluice_queue_job *job = &queue->pending[ranker->ranked[place]];
        sluice_ranks_enter(ranks, ranker, job, &ranker->jobs[ranker->ranked[place]],
                           sluice_tenant_of(ranker, sluice_queue_name(queue, job->account)), place);
    }
    sluice_ranks_raise_starving(ranks);
    sluice_ranks_publish(ranks);
    return SLUICE_OK;
}
