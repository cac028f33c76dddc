/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * What the files of the order share with no other files: order.c (the ranker and its step), tenants.c (accounts as
 * tenants, and their usage), ranks.c (the published table), factors.c (whose a job's site factor is), files.c (what is
 * kept and what is shown).
 *
 * A ranker, and a table that is not published yet, belong to the one thread that steps; no function here locks but
 * sluice_ranks_publish.
 */
#ifndef SLUICE_ORDER_ORDER_INTERNAL_H
#define SLUICE_ORDER_ORDER_INTERNAL_H

#include <stdatomic.h>

#include "order/order.h"

/* An account of the tree; index 0 is for all that are not tenants. */
struct tenant {
    char *account;
    uint32_t id;     /* in the fair-share tree */
    uint32_t parent; /* UINT32_MAX: the top of the tree */
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

/* ---- accounts by name (tenants.c) ---- */

/* Room for so many; false: out of memory. The slots are the caller's to free. */
bool sluice_account_table_new(struct account_table *table, uint32_t count);
/* The slot of an account: that it is in, or the empty one where it belongs. `names[i]` of stride `stride`. */
uint32_t *sluice_account_table_slot(const struct account_table *table, const char *account, const void *names,
                                    size_t stride);

/* ---- tenants of a ranker (tenants.c) ---- */

/* The list's tenants, and index 0 for all others. Errors: DUPLICATE, RANGE, NO_MEMORY; sluice_tenants_free frees what
 * was made until then. */
enum sluice_error sluice_tenants_enter(struct sluice_ranker *ranker, const struct sluice_ranker_config *config,
                                       struct sluice_error_text *text);
/* The fair-share tree of the entered ones. Errors: UNKNOWN (parent), INVALID (a circle), those of the core. */
enum sluice_error sluice_tenants_grow(struct sluice_ranker *ranker, const struct sluice_ranker_config *config,
                                      struct sluice_error_text *text);
void sluice_tenants_free(struct sluice_ranker *ranker);
/* Index of the account's tenant; 0: it is none. NULL is no account. O(1). */
uint32_t sluice_tenant_of(const struct sluice_ranker *ranker, const char *account);

/* Usage is in GPU-milliseconds. */
void sluice_tenant_charge(struct sluice_ranker *ranker, uint32_t tenant, uint64_t usage, int64_t now_s);
/* With what is below it, decayed to `now_s`. */
uint64_t sluice_tenant_usage(const struct sluice_ranker *ranker, uint32_t tenant, int64_t now_s);
/* What was charged to each account itself, without what was charged below it; NULL when memory is short. */
uint64_t *sluice_tenants_direct_usage(const struct sluice_ranker *ranker, int64_t now_s);

/* ---- what was learnt (order.c) ---- */

/* A run that ended, into the predictor and what is remembered. */
void sluice_ranker_learn(struct sluice_ranker *ranker, const struct run *run);

/* ---- a table in the making (ranks.c) ---- */

/* Without jobs, with room for the queue's pending ones, and with one user: who publishes it or frees it. NULL: out of
 * memory. */
struct sluice_ranks *sluice_ranks_new(const struct sluice_ranker *ranker, const struct sluice_queue *queue);
/* NULL is fine. */
void sluice_ranks_free(struct sluice_ranks *ranks);
/* The next job of the order; `asked`: as the core sees it. A job id that is in it already is left out. */
void sluice_ranks_enter(struct sluice_ranks *ranks, const struct sluice_ranker *ranker,
                        const struct sluice_queue_job *job, const struct sluice_order_job *asked, uint32_t tenant,
                        uint32_t place);
/* Starving jobs come first in the order; their site factors keep that sequence. */
void sluice_ranks_raise_starving(struct sluice_ranks *ranks);
/* Replaces the last one; NULL: none from now on. The table is freed once all users have released it. */
void sluice_ranks_publish(struct sluice_ranks *ranks);

/* An operator's factor that a table on disk has (factors.c). */
void sluice_site_factors_enter_loaded(struct sluice_site_factors *factors, uint32_t job_id, uint32_t value);

uint64_t sluice_weight_sum(const struct sluice_order_policy *policy);

#endif /* SLUICE_ORDER_ORDER_INTERNAL_H */
