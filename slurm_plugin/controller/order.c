/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "controller/order.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "controller/fail.h"
#include "policy/policy.h"

enum {
    OTHERS_SHARES = 1, /* accounts that are no tenants stand together, as one tenant with one share */
    DEFAULT_QUANTILE = 75,
    DEFAULT_GPU_MIB = 81920,
    PREDICTOR_KEYS = 65536,
    KEYS = 3,
    STATE_VERSION = 1,
    MAX_STATE_BYTES = 64 * 1024 * 1024,
    MAX_ACCOUNT = 256,
};
/* What a fair-share tree takes in one charge. */
static const uint64_t MOST_CHARGE = UINT64_C(1) << 40;
static const char OTHERS[] = "(others)";
enum { NONE = UINT32_MAX };

/* An account of the tree; index 0 stands for all that are no tenants. */
struct tenant {
    char *account;
    uint32_t id;     /* in the fair-share tree */
    uint32_t parent; /* NONE: the top of the tree */
    uint32_t shares;
    uint32_t priority;
    uint32_t tier; /* among the tiers in use: 0 the lowest */
};

/* Accounts by name: open addressing, index + 1. */
struct account_table {
    uint32_t *slots;
    uint32_t mask;
};

/* A run that ended, as the predictor learnt it. */
struct run {
    uint32_t uid, gpus;
    uint64_t name_hash;
    int64_t run_s;
};

struct sluice_ranker {
    struct sluice_order_policy policy;
    int64_t half_life_s, gpu_memory_mib;
    uint32_t quantile_percent;
    struct tenant *tenants;
    uint32_t tenant_count;
    struct account_table accounts;
    struct sluice_fairshare *fairshare;
    struct sluice_predictor *predictor;
    struct run *runs; /* a ring */
    uint64_t run_count;
    int64_t charged_to_s; /* usage is charged up to here; 0: never yet */
    bool usage_known;

    struct sluice_order *order; /* room for order_room jobs */
    uint32_t order_room;
    struct sluice_order_job *jobs;
    uint32_t *ranked;
};

struct sluice_ranks {
    atomic_uint users;
    int64_t taken_s;
    struct sluice_order_policy policy;
    uint64_t weight_sum;
    struct sluice_rank *ranks;
    uint32_t count;
    uint32_t *slots; /* by job id: open addressing, index + 1 */
    uint32_t mask;
    struct sluice_rank_tenant *tenants;
    uint32_t *tiers; /* of each tenant */
    uint32_t tenant_count;
    char *names;
    struct account_table accounts;
};

/* ---- accounts ---- */

static bool table_new(struct account_table *table, uint32_t count)
{
    uint32_t size = 16;
    while (size < 2 * count)
        size *= 2;
    table->slots = calloc(size, sizeof *table->slots);
    table->mask = size - 1;
    return table->slots;
}

/* The slot of an account: that it is in, or the empty one where it belongs. `names[i]` of stride `stride`. */
static uint32_t *table_slot(const struct account_table *table, const char *account, const void *names, size_t stride)
{
    uint32_t at = (uint32_t)sluice_queue_hash(account) & table->mask;
    for (; table->slots[at]; at = (at + 1) & table->mask) {
        const char *known = *(const char *const *)((const char *)names + stride * (table->slots[at] - 1));
        if (strcmp(known, account) == 0)
            break;
    }
    return &table->slots[at];
}

static uint32_t tenant_of(const struct sluice_ranker *ranker, const char *account)
{
    uint32_t slot =
        *table_slot(&ranker->accounts, account ? account : "", &ranker->tenants[0].account, sizeof *ranker->tenants);
    return slot ? slot - 1 : 0;
}

static void free_tree(struct sluice_ranker *ranker)
{
    for (uint32_t i = 0; ranker->tenants && i < ranker->tenant_count; i++)
        free(ranker->tenants[i].account);
    free(ranker->tenants);
    free(ranker->accounts.slots);
    sluice_fairshare_free(ranker->fairshare);
    ranker->tenants = NULL;
    ranker->accounts.slots = NULL;
    ranker->fairshare = NULL;
}

static int compare_numbers(const void *left, const void *right)
{
    uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;
    return (a > b) - (a < b);
}

/* Tiers as 0, 1, 2 ...: how many different ones are lower. */
static enum sluice_error number_tiers(struct sluice_ranker *ranker, struct sluice_error_text *text)
{
    uint32_t *tiers = calloc(ranker->tenant_count, sizeof *tiers);
    if (!tiers)
        return sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "order: out of memory for %u tenants",
                                ranker->tenant_count);
    for (uint32_t i = 0; i < ranker->tenant_count; i++)
        tiers[i] = ranker->tenants[i].tier;
    qsort(tiers, ranker->tenant_count, sizeof *tiers, compare_numbers);
    uint32_t different = 0;
    for (uint32_t i = 0; i < ranker->tenant_count; i++) {
        if (i == 0 || tiers[i] != tiers[different - 1])
            tiers[different++] = tiers[i];
    }
    for (uint32_t i = 0; i < ranker->tenant_count; i++) {
        const uint32_t *found = bsearch(&ranker->tenants[i].tier, tiers, different, sizeof *tiers, compare_numbers);
        ranker->tenants[i].tier = (uint32_t)(found - tiers);
    }
    free(tiers);
    return SLUICE_OK;
}

static enum sluice_error enter_tenants(struct sluice_ranker *ranker, const struct sluice_ranker_config *config,
                                       struct sluice_error_text *text)
{
    ranker->tenants = calloc((size_t)config->tenant_count + 1, sizeof *ranker->tenants);
    if (!ranker->tenants || !table_new(&ranker->accounts, config->tenant_count + 1))
        return sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "order: out of memory for %u tenants",
                                config->tenant_count);
    ranker->tenants[0] = (struct tenant){.account = strdup(OTHERS), .shares = OTHERS_SHARES, .parent = NONE};
    ranker->tenant_count = 1;
    for (uint32_t i = 0; i < config->tenant_count; i++) {
        const struct sluice_ranker_tenant *from = &config->tenants[i];
        uint32_t *slot =
            table_slot(&ranker->accounts, from->account, &ranker->tenants[0].account, sizeof *ranker->tenants);
        if (*slot)
            return sluice_fail_with(text, SLUICE_ERROR_DUPLICATE, "tenant %s: given twice", from->account);
        if (from->priority > SLUICE_FACTOR_ONE)
            return sluice_fail_with(text, SLUICE_ERROR_RANGE, "tenant %s: priority %u: at most %d", from->account,
                                    from->priority, SLUICE_FACTOR_ONE);
        struct tenant *to = &ranker->tenants[ranker->tenant_count];
        *to = (struct tenant){.account = strdup(from->account),
                              .parent = NONE,
                              .shares = from->shares,
                              .priority = from->priority,
                              .tier = from->tier};
        ranker->tenant_count++;
        *slot = ranker->tenant_count;
        if (!to->account)
            return sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "order: out of memory for %u tenants",
                                    config->tenant_count);
    }
    return ranker->tenants[0].account ? number_tiers(ranker, text)
                                      : sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "order: out of memory");
}

/* Parents before children, whatever the list's order: as often as the tree is deep, every tenant whose parent is there
 * is added. */
static enum sluice_error grow_tree(struct sluice_ranker *ranker, const struct sluice_ranker_config *config,
                                   struct sluice_error_text *text)
{
    enum sluice_error error =
        sluice_fairshare_new(config->tenant_count + 2, config->half_life_s, &ranker->fairshare, text);
    if (error == SLUICE_OK)
        error =
            sluice_fairshare_add(ranker->fairshare, SLUICE_FAIRSHARE_ROOT, OTHERS_SHARES, &ranker->tenants[0].id, text);
    uint32_t left = config->tenant_count;
    for (bool more = true; error == SLUICE_OK && left && more;) {
        more = false;
        for (uint32_t i = 0; error == SLUICE_OK && i < config->tenant_count; i++) {
            const struct sluice_ranker_tenant *from = &config->tenants[i];
            struct tenant *tenant = &ranker->tenants[i + 1];
            uint32_t parent = SLUICE_FAIRSHARE_ROOT;
            if (tenant->id)
                continue;
            if (from->parent && *from->parent) {
                uint32_t above = tenant_of(ranker, from->parent);
                if (!above)
                    return sluice_fail_with(text, SLUICE_ERROR_UNKNOWN, "tenant %s: parent %s is no tenant",
                                            from->account, from->parent);
                parent = ranker->tenants[above].id;
                if (!parent)
                    continue;
                tenant->parent = above;
            }
            error = sluice_fairshare_add(ranker->fairshare, parent, from->shares, &tenant->id, text);
            left--;
            more = true;
        }
    }
    if (error == SLUICE_OK && left)
        return sluice_fail_with(text, SLUICE_ERROR_INVALID, "tenants: %u of them are above one another in a circle",
                                left);
    return error;
}

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

static void learn(struct sluice_ranker *ranker, const struct run *run)
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
    enum sluice_error error = enter_tenants(ranker, config, text);
    if (error == SLUICE_OK)
        error = grow_tree(ranker, config, text);
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
    free_tree(ranker);
    free_orders(ranker);
    sluice_predictor_free(ranker->predictor);
    free(ranker->runs);
    free(ranker);
}

/* ---- usage ---- */

static void charge(struct sluice_ranker *ranker, uint32_t tenant, uint64_t usage, int64_t now_s)
{
    while (usage) { /* at most a few times: 2^40 GPU-milliseconds are 35 GPU-years */
        uint64_t part = usage < MOST_CHARGE ? usage : MOST_CHARGE;
        (void)sluice_fairshare_charge(ranker->fairshare, ranker->tenants[tenant].id, part, now_s, NULL);
        usage -= part;
    }
}

static uint64_t usage_of(const struct sluice_ranker *ranker, uint32_t tenant, int64_t now_s)
{
    uint64_t usage = 0;
    (void)sluice_fairshare_usage(ranker->fairshare, ranker->tenants[tenant].id, now_s, &usage, NULL);
    return usage;
}

/* What was charged to each account itself, without what was charged below it; NULL when memory is short. */
static uint64_t *own_usage(const struct sluice_ranker *ranker, int64_t now_s)
{
    uint64_t *own = calloc(ranker->tenant_count, sizeof *own);
    for (uint32_t i = 0; own && i < ranker->tenant_count; i++)
        own[i] = usage_of(ranker, i, now_s);
    for (uint32_t i = 0; own && i < ranker->tenant_count; i++) {
        uint32_t parent = ranker->tenants[i].parent;
        uint64_t below = usage_of(ranker, i, now_s);
        if (parent != NONE)
            own[parent] -= below < own[parent] ? below : own[parent];
    }
    return own;
}

enum sluice_error sluice_ranker_configure(struct sluice_ranker *ranker, const struct sluice_ranker_config *config,
                                          struct sluice_error_text *text)
{
    struct sluice_ranker fresh = {0};
    enum sluice_error error = build(&fresh, config, text);
    uint64_t *own = error == SLUICE_OK ? own_usage(ranker, ranker->charged_to_s) : NULL;
    if (error == SLUICE_OK && !own)
        error =
            sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "order: out of memory for %u tenants", ranker->tenant_count);
    if (error != SLUICE_OK) {
        free_tree(&fresh);
        sluice_predictor_free(fresh.predictor);
        return error;
    }
    for (uint32_t i = 0; i < ranker->tenant_count; i++)
        charge(&fresh, i ? tenant_of(&fresh, ranker->tenants[i].account) : 0, own[i], ranker->charged_to_s);
    free(own);
    learn_again(ranker, fresh.predictor);
    free_tree(ranker);
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

bool sluice_ranker_wants_usage(const struct sluice_ranker *ranker)
{
    return !ranker->usage_known;
}

void sluice_ranker_seed(struct sluice_ranker *ranker, const char *account, uint64_t gpu_seconds, int64_t now_s)
{
    ranker->usage_known = true;
    ranker->charged_to_s = now_s;
    charge(ranker, tenant_of(ranker, account), gpu_seconds < UINT64_MAX / 1000 ? gpu_seconds * 1000 : UINT64_MAX,
           now_s);
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
        charge(ranker, tenant_of(ranker, sluice_queue_name(queue, job->account)),
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
 * last one: it is charged now, and learnt from by the next step, which has nothing left of it to charge. */
static void follow(struct sluice_ranker *ranker, const struct sluice_queue *queue)
{
    if (ranker->charged_to_s == 0 || ranker->charged_to_s > queue->taken_s)
        ranker->charged_to_s = queue->taken_s; /* first step; or the clock was set back */
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
            learn(ranker, &run);
        }
    }
    ranker->charged_to_s = queue->taken_s;
    ranker->usage_known = true;
}

/* ---- the table ---- */

static pthread_mutex_t published_lock = PTHREAD_MUTEX_INITIALIZER; /* held while a pointer is copied */
static struct sluice_ranks *published;

static void free_ranks(struct sluice_ranks *ranks)
{
    if (!ranks)
        return;
    free(ranks->ranks);
    free(ranks->slots);
    free(ranks->tenants);
    free(ranks->tiers);
    free(ranks->names);
    free(ranks->accounts.slots);
    free(ranks);
}

const struct sluice_ranks *sluice_ranks_acquire(void)
{
    pthread_mutex_lock(&published_lock);
    struct sluice_ranks *ranks = published;
    if (ranks)
        atomic_fetch_add_explicit(&ranks->users, 1, memory_order_relaxed);
    pthread_mutex_unlock(&published_lock);
    return ranks;
}

void sluice_ranks_release(const struct sluice_ranks *ranks)
{
    struct sluice_ranks *own = (struct sluice_ranks *)(uintptr_t)ranks;
    if (own && atomic_fetch_sub_explicit(&own->users, 1, memory_order_acq_rel) == 1)
        free_ranks(own);
}

static void publish(struct sluice_ranks *ranks)
{
    pthread_mutex_lock(&published_lock);
    struct sluice_ranks *before = published;
    published = ranks;
    pthread_mutex_unlock(&published_lock);
    sluice_ranks_release(before);
}

void sluice_ranks_withdraw(void)
{
    publish(NULL);
}

int64_t sluice_ranks_taken_s(const struct sluice_ranks *ranks)
{
    return ranks->taken_s;
}

const struct sluice_rank *sluice_ranks_all(const struct sluice_ranks *ranks, uint32_t *count)
{
    *count = ranks->count;
    return ranks->ranks;
}

static uint32_t job_slot(const struct sluice_ranks *ranks, uint32_t job_id)
{
    uint32_t at = job_id * UINT32_C(2654435769) & ranks->mask;
    while (ranks->slots[at] && ranks->ranks[ranks->slots[at] - 1].job_id != job_id)
        at = (at + 1) & ranks->mask;
    return at;
}

const struct sluice_rank *sluice_ranks_find(const struct sluice_ranks *ranks, uint32_t job_id)
{
    uint32_t slot = ranks->slots[job_slot(ranks, job_id)];
    return slot ? &ranks->ranks[slot - 1] : NULL;
}

const struct sluice_rank_tenant *sluice_ranks_tenant(const struct sluice_ranks *ranks, uint32_t tenant)
{
    return &ranks->tenants[tenant < ranks->tenant_count ? tenant : 0];
}

uint32_t sluice_ranks_tenant_count(const struct sluice_ranks *ranks)
{
    return ranks->tenant_count;
}

const struct sluice_order_policy *sluice_ranks_policy(const struct sluice_ranks *ranks)
{
    return &ranks->policy;
}

static uint64_t weight_sum(const struct sluice_order_policy *policy)
{
    uint64_t sum = 0;
    for (int factor = 0; factor < SLUICE_FACTOR_COUNT; factor++)
        sum += policy->weight[factor];
    return sum;
}

static int32_t whole(int64_t score)
{
    return (int32_t)((score + SLUICE_FACTOR_ONE / 2) / SLUICE_FACTOR_ONE);
}

/* A tier outweighs all factors together; starvation outweighs all tiers. */
static int32_t site_of(const struct sluice_ranks *ranks, uint32_t tenant, int64_t score)
{
    uint64_t site = (uint64_t)ranks->tiers[tenant] * (ranks->weight_sum + 1) + (uint64_t)whole(score);
    return site < SLUICE_SITE_STARVING ? (int32_t)site : SLUICE_SITE_STARVING - 1;
}

int32_t sluice_ranks_score(const struct sluice_ranks *ranks, const char *account, const struct sluice_order_job *job,
                           int64_t now_s)
{
    uint32_t slot =
        *table_slot(&ranks->accounts, account ? account : "", &ranks->tenants[0].account, sizeof *ranks->tenants);
    const struct sluice_rank_tenant *tenant = &ranks->tenants[slot ? slot - 1 : 0];
    struct sluice_order_policy policy = ranks->policy;
    policy.weight[SLUICE_FACTOR_FAIR_SHARE] = 0; /* known already, and the tree is the thread's */
    struct sluice_order_job asked = *job;
    asked.priority = tenant->priority;
    struct sluice_order_terms terms;
    if (sluice_order_score(&policy, NULL, &asked, now_s, &terms, NULL) != SLUICE_OK)
        return 0;
    if (terms.starving)
        return SLUICE_SITE_STARVING;
    return site_of(ranks, slot ? slot - 1 : 0,
                   terms.score + (int64_t)ranks->policy.weight[SLUICE_FACTOR_FAIR_SHARE] * tenant->factor);
}

static bool copy_tenants(struct sluice_ranks *ranks, const struct sluice_ranker *ranker)
{
    size_t bytes = 0;
    for (uint32_t i = 0; i < ranker->tenant_count; i++)
        bytes += strlen(ranker->tenants[i].account) + 1;
    ranks->names = malloc(bytes);
    ranks->tenants = calloc(ranker->tenant_count, sizeof *ranks->tenants);
    ranks->tiers = calloc(ranker->tenant_count, sizeof *ranks->tiers);
    if (!ranks->names || !ranks->tenants || !ranks->tiers || !table_new(&ranks->accounts, ranker->tenant_count))
        return false;
    char *name = ranks->names;
    for (uint32_t i = 0; i < ranker->tenant_count; i++) {
        const struct tenant *from = &ranker->tenants[i];
        struct sluice_rank_tenant *to = &ranks->tenants[i];
        to->account = name;
        name = stpcpy(name, from->account) + 1;
        to->shares = from->shares;
        to->priority = from->priority;
        to->usage = usage_of(ranker, i, ranker->charged_to_s);
        (void)sluice_fairshare_factor(ranker->fairshare, from->id, &to->factor, NULL);
        ranks->tiers[i] = from->tier;
        if (i)
            *table_slot(&ranks->accounts, to->account, &ranks->tenants[0].account, sizeof *ranks->tenants) = i + 1;
    }
    ranks->tenant_count = ranker->tenant_count;
    return true;
}

static struct sluice_ranks *new_ranks(const struct sluice_ranker *ranker, const struct sluice_queue *queue)
{
    struct sluice_ranks *ranks = calloc(1, sizeof *ranks);
    if (!ranks)
        return NULL;
    uint32_t size = 64;
    while (size < 2 * queue->pending_count)
        size *= 2;
    atomic_init(&ranks->users, 1);
    ranks->taken_s = queue->taken_s;
    ranks->policy = ranker->policy;
    ranks->weight_sum = weight_sum(&ranker->policy);
    ranks->mask = size - 1;
    ranks->slots = calloc(size, sizeof *ranks->slots);
    ranks->ranks = calloc(queue->pending_count ? queue->pending_count : 1, sizeof *ranks->ranks);
    if (ranks->slots && ranks->ranks && copy_tenants(ranks, ranker))
        return ranks;
    free_ranks(ranks);
    return NULL;
}

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
    /* Who is held, dependent or not due does not age. */
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

static void enter_rank(struct sluice_ranks *ranks, const struct sluice_ranker *ranker,
                       const struct sluice_queue_job *job, const struct sluice_order_job *asked, uint32_t tenant,
                       uint32_t place)
{
    struct sluice_rank *rank = &ranks->ranks[ranks->count];
    *rank = (struct sluice_rank){.job_id = job->id,
                                 .site_was = job->site_factor,
                                 .place = place,
                                 .tenant = tenant,
                                 .gpus = asked->gpus,
                                 .remaining_s = asked->remaining_s};
    (void)sluice_order_score(&ranker->policy, ranker->fairshare, asked, ranks->taken_s, &rank->terms, NULL);
    rank->site = site_of(ranks, tenant, rank->terms.score);
    rank->urgent = whole(rank->terms.term[SLUICE_FACTOR_DEADLINE] + rank->terms.term[SLUICE_FACTOR_FAIR_SHARE]);
    memcpy(rank->slurm_term, job->slurm_term, sizeof rank->slurm_term);
    uint32_t at = job_slot(ranks, job->id);
    if (!ranks->slots[at])
        ranks->slots[at] = ++ranks->count;
}

/* Starving jobs come first in the order; their site factors keep that sequence. */
static void raise_starving(struct sluice_ranks *ranks)
{
    uint32_t starving = 0;
    for (uint32_t i = 0; i < ranks->count; i++)
        starving += ranks->ranks[i].terms.starving;
    for (uint32_t i = 0; i < ranks->count; i++) {
        struct sluice_rank *rank = &ranks->ranks[i];
        if (!rank->terms.starving)
            continue;
        rank->site = SLUICE_SITE_STARVING + (int32_t)(starving - rank->place);
        rank->urgent = rank->site;
    }
}

/* Is there anything that makes one job go before another? */
static bool orders(const struct sluice_ranker *ranker)
{
    bool tiers = false;
    for (uint32_t i = 0; i < ranker->tenant_count; i++)
        tiers |= ranker->tenants[i].tier > 0;
    return tiers || ranker->policy.starvation_s > 0 || weight_sum(&ranker->policy) > 0;
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
    struct sluice_ranks *ranks = new_ranks(ranker, queue);
    if (!ranks || !make_room(ranker, queue->pending_count)) {
        free_ranks(ranks);
        return sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "order: out of memory for %u pending jobs",
                                queue->pending_count);
    }
    for (uint32_t i = 0; i < queue->pending_count; i++)
        describe(ranker, queue, &queue->pending[i],
                 tenant_of(ranker, sluice_queue_name(queue, queue->pending[i].account)), &ranker->jobs[i]);
    enum sluice_error error = sluice_order_sort(ranker->order, &ranker->policy, ranker->fairshare, ranker->jobs,
                                                queue->pending_count, queue->taken_s, ranker->ranked, text);
    if (error != SLUICE_OK) {
        free_ranks(ranks);
        return error;
    }
    for (uint32_t place = 0; place < queue->pending_count; place++) {
        const struct sluice_queue_job *job = &queue->pending[ranker->ranked[place]];
        enter_rank(ranks, ranker, job, &ranker->jobs[ranker->ranked[place]],
                   tenant_of(ranker, sluice_queue_name(queue, job->account)), place);
    }
    raise_starving(ranks);
    publish(ranks);
    return SLUICE_OK;
}

/* ---- files ---- */

/* A file that is written beside `path` and takes its place when it is whole. */
struct new_file {
    FILE *file;
    const char *path;
    char temporary[4096];
    uint32_t crc; /* of the lines so far, as sluice_crc32 would have it */
};

/* Of a line, mixed into the sum of the lines before it. */
static uint32_t add_line(uint32_t sum, const char *line, size_t length)
{
    return sluice_crc32(line, length) + ((sum << 5) | (sum >> 27));
}

static void put_line(struct new_file *to, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void put_line(struct new_file *to, const char *format, ...)
{
    char line[2048];
    va_list values;
    va_start(values, format);
    int length = vsnprintf(line, sizeof line, format, values);
    va_end(values);
    if (length < 0 || (size_t)length >= sizeof line)
        return;
    to->crc = add_line(to->crc, line, (size_t)length);
    fputs(line, to->file);
    fputc('\n', to->file);
}

static enum sluice_error open_new(struct new_file *to, const char *path, struct sluice_error_text *text)
{
    *to = (struct new_file){.path = path};
    int length = snprintf(to->temporary, sizeof to->temporary, "%s.new", path);
    if (length < 0 || (size_t)length >= sizeof to->temporary)
        return sluice_fail_with(text, SLUICE_ERROR_RANGE, "%s: path too long", path);
    int descriptor = open(to->temporary, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
    to->file = descriptor >= 0 ? fdopen(descriptor, "w") : NULL;
    if (to->file)
        return SLUICE_OK;
    int reason = errno;
    if (descriptor >= 0)
        close(descriptor);
    return sluice_fail_with(text, SLUICE_ERROR_SYSTEM, "%s: %s", to->temporary, strerror(reason));
}

static enum sluice_error close_new(struct new_file *to, struct sluice_error_text *text)
{
    fprintf(to->file, "end %08" PRIx32 "\n", to->crc);
    bool good = !ferror(to->file) && fflush(to->file) == 0 && fsync(fileno(to->file)) == 0;
    int reason = errno;
    if (fclose(to->file) != 0 && good) {
        reason = errno;
        good = false;
    }
    if (good && rename(to->temporary, to->path) == 0)
        return SLUICE_OK;
    if (good)
        reason = errno;
    unlink(to->temporary);
    return sluice_fail_with(text, SLUICE_ERROR_SYSTEM, "%s: %s", to->path, strerror(reason));
}

enum sluice_error sluice_ranker_save(const struct sluice_ranker *ranker, const char *path,
                                     struct sluice_error_text *text)
{
    uint64_t *own = own_usage(ranker, ranker->charged_to_s);
    if (!own)
        return sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "order: out of memory for %u tenants",
                                ranker->tenant_count);
    struct new_file to;
    enum sluice_error error = open_new(&to, path, text);
    if (error == SLUICE_OK) {
        put_line(&to, "sluice-order %d", STATE_VERSION);
        put_line(&to, "charged %" PRId64, ranker->charged_to_s);
        for (uint32_t i = 0; i < ranker->tenant_count; i++) {
            if (own[i])
                put_line(&to, "usage %" PRIu64 " %s", own[i], ranker->tenants[i].account);
        }
        uint64_t first = ranker->run_count > SLUICE_RANKER_MAX_RUNS ? ranker->run_count - SLUICE_RANKER_MAX_RUNS : 0;
        for (uint64_t i = first; i < ranker->run_count; i++) {
            const struct run *run = &ranker->runs[i % SLUICE_RANKER_MAX_RUNS];
            put_line(&to, "run %" PRIu32 " %" PRIu32 " %016" PRIx64 " %" PRId64, run->uid, run->gpus, run->name_hash,
                     run->run_s);
        }
        error = close_new(&to, text);
    }
    free(own);
    return error;
}

/* A decimal number at *from, which is moved behind it and one following blank; false when there is none or it is
 * larger than `most`. */
static bool take_number(const char **from, uint64_t most, uint64_t *number)
{
    uint64_t value = 0;
    const char *at = *from;
    if (*at < '0' || *at > '9')
        return false;
    for (; *at >= '0' && *at <= '9'; at++) {
        if (__builtin_mul_overflow(value, UINT64_C(10), &value) ||
            __builtin_add_overflow(value, (uint64_t)(*at - '0'), &value) || value > most)
            return false;
    }
    if (*at == ' ')
        at++;
    *number = value;
    *from = at;
    return true;
}

static bool take_hash(const char **from, uint64_t *hash)
{
    uint64_t value = 0;
    for (int i = 0; i < 16; i++) {
        char digit = (*from)[i];
        int number = digit >= '0' && digit <= '9' ? digit - '0' : digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
        if (number < 0)
            return false;
        value = value << 4 | (uint64_t)number;
    }
    *from += 16;
    if (**from == ' ')
        ++*from;
    *hash = value;
    return true;
}

/* What a state file says, before any of it is believed. */
struct state {
    int64_t charged_to_s;
    struct {
        uint64_t usage;
        const char *account;
    } *usages;
    struct run *runs;
    uint32_t usage_count, run_count;
};

static bool read_state_line(struct state *state, const char *line)
{
    uint64_t number[3], hash;
    if (strncmp(line, "charged ", 8) == 0) {
        line += 8;
        if (!take_number(&line, INT64_MAX, &number[0]) || *line)
            return false;
        state->charged_to_s = (int64_t)number[0];
        return true;
    }
    if (strncmp(line, "usage ", 6) == 0) {
        line += 6;
        if (!take_number(&line, UINT64_MAX, &number[0]) || !*line || strlen(line) > MAX_ACCOUNT)
            return false;
        state->usages[state->usage_count].usage = number[0];
        state->usages[state->usage_count++].account = line;
        return true;
    }
    if (strncmp(line, "run ", 4) != 0)
        return false;
    line += 4;
    if (!take_number(&line, UINT32_MAX, &number[0]) || !take_number(&line, UINT32_MAX, &number[1]) ||
        !take_hash(&line, &hash) || !take_number(&line, INT64_MAX, &number[2]) || *line)
        return false;
    state->runs[state->run_count++] = (struct run){
        .uid = (uint32_t)number[0], .gpus = (uint32_t)number[1], .name_hash = hash, .run_s = (int64_t)number[2]};
    return true;
}

/* Cuts `data` into lines. The caller made room for as many entries as there are lines. */
static enum sluice_error read_state(struct state *state, char *data, const char *path, struct sluice_error_text *text)
{
    uint32_t sum = 0, line_number = 0;
    for (char *line = data, *next; *line; line = next) {
        char *end = strchr(line, '\n');
        line_number++;
        if (!end)
            break;
        *end = '\0';
        next = end + 1;
        char wanted[32];
        snprintf(wanted, sizeof wanted, "end %08" PRIx32, sum);
        if (strcmp(line, wanted) == 0 && !*next)
            return SLUICE_OK;
        sum = add_line(sum, line, (size_t)(end - line));
        if (line_number == 1) {
            char first[32];
            snprintf(first, sizeof first, "sluice-order %d", STATE_VERSION);
            if (strcmp(line, first) == 0)
                continue;
            if (strncmp(line, "sluice-order ", 13) == 0)
                return sluice_fail_with(text, SLUICE_ERROR_VERSION, "%s: \"%.40s\": this Sluice writes version %d",
                                        path, line, STATE_VERSION);
            break;
        }
        if (!read_state_line(state, line))
            break;
    }
    return sluice_fail_with(text, SLUICE_ERROR_CORRUPT, "%s:%u: damaged or cut off; usage starts anew", path,
                            line_number);
}

/* The whole file, NUL-terminated; NULL with `error` set. */
static char *read_file(const char *path, size_t *length, enum sluice_error *error, struct sluice_error_text *text)
{
    *error = SLUICE_OK;
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (descriptor < 0 && errno == ENOENT)
        return NULL;
    struct stat status;
    if (descriptor < 0 || fstat(descriptor, &status) != 0) {
        *error = sluice_fail_with(text, SLUICE_ERROR_SYSTEM, "%s: %s", path, strerror(errno));
        if (descriptor >= 0)
            close(descriptor);
        return NULL;
    }
    if (!S_ISREG(status.st_mode) || status.st_size > MAX_STATE_BYTES) {
        *error =
            sluice_fail_with(text, SLUICE_ERROR_CORRUPT, "%s: no file, or larger than %d bytes", path, MAX_STATE_BYTES);
        close(descriptor);
        return NULL;
    }
    char *data = malloc((size_t)status.st_size + 1);
    size_t have = 0;
    while (data && have < (size_t)status.st_size) {
        ssize_t got = read(descriptor, data + have, (size_t)status.st_size - have);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        have += (size_t)got;
    }
    close(descriptor);
    if (!data) {
        *error = sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "%s: out of memory", path);
        return NULL;
    }
    data[have] = '\0';
    *length = strlen(data);
    return data;
}

static void believe(struct sluice_ranker *ranker, const struct state *state)
{
    ranker->charged_to_s = state->charged_to_s;
    ranker->usage_known = true;
    for (uint32_t i = 0; i < state->usage_count; i++)
        charge(ranker, tenant_of(ranker, state->usages[i].account), state->usages[i].usage, state->charged_to_s);
    for (uint32_t i = 0; i < state->run_count; i++)
        learn(ranker, &state->runs[i]);
}

enum sluice_error sluice_ranker_load(struct sluice_ranker *ranker, const char *path, struct sluice_error_text *text)
{
    enum sluice_error error;
    size_t length = 0;
    char *data = read_file(path, &length, &error, text);
    if (!data)
        return error;
    uint32_t lines = 0;
    for (const char *at = data; (at = strchr(at, '\n')); at++)
        lines++;
    struct state state = {0};
    state.usages = calloc((size_t)lines + 1, sizeof *state.usages);
    state.runs = calloc((size_t)lines + 1, sizeof *state.runs);
    error = state.usages && state.runs ? read_state(&state, data, path, text)
                                       : sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "%s: out of memory", path);
    if (error == SLUICE_OK)
        believe(ranker, &state);
    free(state.usages);
    free(state.runs);
    free(data);
    return error;
}

enum sluice_error sluice_ranks_write(const struct sluice_ranks *ranks, const char *path, struct sluice_error_text *text)
{
    struct new_file to;
    enum sluice_error error = open_new(&to, path, text);
    if (error != SLUICE_OK)
        return error;
    put_line(&to, "sluice-ranks 1");
    put_line(&to, "taken %" PRId64, ranks->taken_s);
    const struct sluice_order_policy *policy = &ranks->policy;
    put_line(&to,
             "policy %" PRIu32 " %" PRIu32 " %" PRIu32 " %" PRIu32 " %" PRIu32 " %" PRIu32 " %" PRIu32 " %" PRId64
             " %" PRId64 " %" PRIu32 " %" PRId64,
             policy->weight[0], policy->weight[1], policy->weight[2], policy->weight[3], policy->weight[4],
             policy->weight[5], policy->weight[6], policy->age_full_s, policy->laxity_horizon_s, policy->size_full_gpus,
             policy->starvation_s);
    for (uint32_t i = 0; i < ranks->tenant_count; i++)
        put_line(&to, "tenant %" PRIu32 " %" PRIu32 " %" PRIu64 " %" PRIu32 " %" PRIu32 " %s", ranks->tenants[i].shares,
                 ranks->tenants[i].factor, ranks->tenants[i].usage, ranks->tenants[i].priority, ranks->tiers[i],
                 ranks->tenants[i].account);
    for (uint32_t i = 0; i < ranks->count; i++) {
        const struct sluice_rank *rank = &ranks->ranks[i];
        const int64_t *term = rank->terms.term;
        const int32_t *slurm = rank->slurm_term;
        put_line(&to,
                 "job %" PRIu32 " %" PRId32 " %" PRIu32 " %" PRIu32 " %" PRIu32 " %" PRId64 " %d %d %" PRId64
                 " %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %" PRId32
                 " %" PRId32 " %" PRId32 " %" PRId32 " %" PRId32 " %" PRId32 " %" PRId32 " %" PRId32,
                 rank->job_id, rank->site, rank->place, rank->tenant, rank->gpus, rank->remaining_s,
                 (int)rank->terms.deadline, rank->terms.starving, rank->terms.laxity_s, term[0], term[1], term[2],
                 term[3], term[4], term[5], term[6], slurm[0], slurm[1], slurm[2], slurm[3], slurm[4], slurm[5],
                 slurm[6], slurm[7]);
    }
    return close_new(&to, text);
}
