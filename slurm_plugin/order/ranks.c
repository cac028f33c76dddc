/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The table of ranks: made by a step, published for the hooks, read by them without waiting for the thread. */
#include "order/order_internal.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t published_lock = PTHREAD_MUTEX_INITIALIZER; /* held while a pointer is copied */
static struct sluice_ranks *published;

void sluice_ranks_free(struct sluice_ranks *ranks)
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
    struct sluice_ranks *shared = (struct sluice_ranks *)(uintptr_t)ranks;
    if (shared && atomic_fetch_sub_explicit(&shared->users, 1, memory_order_acq_rel) == 1)
        sluice_ranks_free(shared);
}

void sluice_ranks_publish(struct sluice_ranks *ranks)
{
    pthread_mutex_lock(&published_lock);
    struct sluice_ranks *before = published;
    published = ranks;
    pthread_mutex_unlock(&published_lock);
    sluice_ranks_release(before);
}

void sluice_ranks_withdraw(void)
{
    sluice_ranks_publish(NULL);
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

uint64_t sluice_weight_sum(const struct sluice_order_policy *policy)
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
    uint32_t slot = *sluice_account_table_slot(&ranks->accounts, account ? account : "", &ranks->tenants[0].account,
                                               sizeof *ranks->tenants);
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
    if (!ranks->names || !ranks->tenants || !ranks->tiers ||
        !sluice_account_table_new(&ranks->accounts, ranker->tenant_count))
        return false;
    char *name = ranks->names;
    for (uint32_t i = 0; i < ranker->tenant_count; i++) {
        const struct tenant *from = &ranker->tenants[i];
        struct sluice_rank_tenant *to = &ranks->tenants[i];
        to->account = name;
        name = stpcpy(name, from->account) + 1;
        to->shares = from->shares;
        to->priority = from->priority;
        to->usage = sluice_tenant_usage(ranker, i, ranker->charged_to_s);
        (void)sluice_fairshare_factor(ranker->fairshare, from->id, &to->factor, NULL);
        ranks->tiers[i] = from->tier;
        if (i)
            *sluice_account_table_slot(&ranks->accounts, to->account, &ranks->tenants[0].account,
                                       sizeof *ranks->tenants) = i + 1;
    }
    ranks->tenant_count = ranker->tenant_count;
    return true;
}

struct sluice_ranks *sluice_ranks_new(const struct sluice_ranker *ranker, const struct sluice_queue *queue)
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
    ranks->weight_sum = sluice_weight_sum(&ranker->policy);
    ranks->mask = size - 1;
    ranks->slots = calloc(size, sizeof *ranks->slots);
    ranks->ranks = calloc(queue->pending_count ? queue->pending_count : 1, sizeof *ranks->ranks);
    if (ranks->slots && ranks->ranks && copy_tenants(ranks, ranker))
        return ranks;
    sluice_ranks_free(ranks);
    return NULL;
}

void sluice_ranks_enter(struct sluice_ranks *ranks, const struct sluice_ranker *ranker,
                        const struct sluice_queue_job *job, const struct sluice_order_job *asked, uint32_t tenant,
                        uint32_t place)
{
    struct sluice_rank *rank = &ranks->ranks[ranks->count];
    *rank = (struct sluice_rank){.job_id = job->id,
                                 .site_was = job->site_factor,
                                 .operators = job->flags & SLUICE_QUEUE_SITE_KEPT,
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

void sluice_ranks_raise_starving(struct sluice_ranks *ranks)
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
