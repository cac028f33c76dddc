/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The order of pending jobs: what the core's factors make of a queue, published for the hooks of site_factor.
 *
 * A *ranker* belongs to one thread. Each step charges usage to the tree of accounts, learns from jobs that ended,
 * scores every pending job and publishes an immutable table; hooks look a job up in it (a hash table) or score a job
 * that the table does not have yet. No hook waits for the thread: the lock around the published pointer is held only
 * while a pointer is copied.
 *
 * Site factor of a job: its score in whole units of weight (a weight of 1000 gives at most 1000, as Slurm's own
 * PriorityWeight*); a job that waited longer than the starvation bound gets SLUICE_SITE_STARVING and more, growing with
 * its wait, and goes before everything but jobs of higher partition tiers.
 *
 * This header includes no header of Slurm.
 */
#ifndef SLUICE_ORDER_ORDER_H
#define SLUICE_ORDER_ORDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "queue/queue.h"
#include "sluice/core.h"

enum {
    SLUICE_SITE_STARVING = 1 << 30,
    SLUICE_RANKER_MAX_TENANTS = 65536,
    SLUICE_RANKER_MAX_RUNS = 16384, /* ended runs that are remembered, over a restart too */
};

struct sluice_ranker_tenant {
    const char *account; /* Slurm's account */
    const char *parent;  /* another tenant's account; NULL or "": top of the tree */
    uint32_t shares;     /* 0 to 1,000,000 */
    uint32_t priority;   /* 0 to SLUICE_FACTOR_ONE */
    uint32_t tier;       /* jobs of higher tiers go before those of lower ones; accounts that are no tenants have 0 */
};

/* Everything is copied. */
struct sluice_ranker_config {
    struct sluice_order_policy policy;
    int64_t half_life_s;       /* of usage; 0: it never decays */
    int64_t gpu_memory_mib;    /* of one GPU: so much shared memory counts as one GPU; 0: 80 GiB */
    uint32_t quantile_percent; /* of run times that is expected; 0: 75 */
    const struct sluice_ranker_tenant *tenants;
    uint32_t tenant_count;
};

struct sluice_ranker;

/* Errors: RANGE, UNKNOWN (parent), DUPLICATE (account), those of sluice_order_score, NO_MEMORY. */
enum sluice_error sluice_ranker_new(const struct sluice_ranker_config *config, struct sluice_ranker **ranker,
                                    struct sluice_error_text *text);
void sluice_ranker_free(struct sluice_ranker *ranker);

/* Another policy or other tenants: usage goes with the account's name, what was learnt of run times stays. A failed
 * call changes nothing. Errors as sluice_ranker_new. */
enum sluice_error sluice_ranker_configure(struct sluice_ranker *ranker, const struct sluice_ranker_config *config,
                                          struct sluice_error_text *text);

/* True until usage was seeded or loaded: then a caller that knows Slurm's own usage should seed it. */
bool sluice_ranker_wants_usage(const struct sluice_ranker *ranker);
/* Usage of an account up to now, in GPU-seconds; unknown accounts are charged to "(others)". */
void sluice_ranker_seed(struct sluice_ranker *ranker, const char *account, uint64_t gpu_seconds, int64_t now_s);

/*
 * One step, at queue->taken_s: usage of what ran since the last step, run times of what ended since then, scores of all
 * pending jobs. The table becomes what sluice_ranks_acquire gives. Without any weight no table is published, and every
 * site factor is 0. Errors: NO_MEMORY, after which the last table stays.
 */
enum sluice_error sluice_ranker_step(struct sluice_ranker *ranker, const struct sluice_queue *queue,
                                     struct sluice_error_text *text);

/*
 * Keep usage and run times in a file (written atomically: a temporary file next to it, fsync, rename), and read them
 * again: a file that is missing is no error and changes nothing, one that is damaged or of another version is CORRUPT
 * or VERSION and changes nothing. Errors: SYSTEM, NO_MEMORY.
 */
enum sluice_error sluice_ranker_save(const struct sluice_ranker *ranker, const char *path,
                                     struct sluice_error_text *text);
enum sluice_error sluice_ranker_load(struct sluice_ranker *ranker, const char *path, struct sluice_error_text *text);

/* ---- what is published ---- */

/* One pending job in the table. */
struct sluice_rank {
    uint32_t job_id;
    int32_t site;        /* site factor, without NICE_OFFSET */
    uint32_t site_was;   /* job's site_factor when the queue was taken, with NICE_OFFSET */
    bool operators;      /* an operator set site_was: it is kept, and `site` is not used */
    int32_t urgent;      /* of `site`: what deadline, fair-share and starvation give, which should not wait */
    uint32_t place;      /* 0: first in the core's order */
    uint32_t tenant;     /* index for sluice_ranks_tenant */
    uint32_t gpus;       /* that service and size are counted with */
    int64_t remaining_s; /* predicted run time */
    struct sluice_order_terms terms;
    int32_t slurm_term[SLUICE_QUEUE_TERM_COUNT];
};

/* One leaf or inner account of the fair-share tree as of the step. */
struct sluice_rank_tenant {
    const char *account; /* "(others)" for all accounts that are no tenants */
    uint32_t shares;
    uint32_t factor; /* of SLUICE_FACTOR_ONE */
    uint64_t usage;  /* decayed, in GPU-milliseconds */
    uint32_t priority;
};

struct sluice_ranks;

/* The last table, or NULL where none was published; give it back with sluice_ranks_release. Any thread, any hook. */
const struct sluice_ranks *sluice_ranks_acquire(void);
void sluice_ranks_release(const struct sluice_ranks *ranks);
/* Remove the published table: site factors are 0 from now on. */
void sluice_ranks_withdraw(void);

int64_t sluice_ranks_taken_s(const struct sluice_ranks *ranks);
/* All entries, in no particular order. */
const struct sluice_rank *sluice_ranks_all(const struct sluice_ranks *ranks, uint32_t *count);
/* The job's entry, or NULL. O(1). */
const struct sluice_rank *sluice_ranks_find(const struct sluice_ranks *ranks, uint32_t job_id);
const struct sluice_rank_tenant *sluice_ranks_tenant(const struct sluice_ranks *ranks, uint32_t tenant);
uint32_t sluice_ranks_tenant_count(const struct sluice_ranks *ranks);
const struct sluice_order_policy *sluice_ranks_policy(const struct sluice_ranks *ranks);

/* The site factor of a job that the table does not have: just submitted. Its run time is taken to be its limit.
 * O(1). */
int32_t sluice_ranks_score(const struct sluice_ranks *ranks, const char *account, const struct sluice_order_job *job,
                           int64_t now_s);

/* Write the table as lines of text, atomically, for `sluice explain` (docs/explain.md). Errors: SYSTEM. */
enum sluice_error sluice_ranks_write(const struct sluice_ranks *ranks, const char *path,
                                     struct sluice_error_text *text);

/* ---- whose a job's site factor is ---- */

/* Slurm says nothing of who set a job's factor: one that differs from what the job was given last is an operator's.
 * Factors here are Slurm's, with NICE_OFFSET. */
enum { SLUICE_SITE_NONE = 0x80000000U }; /* NICE_OFFSET: a factor of 0 */

struct sluice_site_factor {
    uint32_t job_id, value;
    bool operators, loaded; /* loaded: not compared yet with what the job has */
};

/* By job id: open addressing, job_id 0 is empty. All zero is an empty one. Not locked here. */
struct sluice_site_factors {
    struct sluice_site_factor *slots;
    uint32_t size, count;
};

/*
 * What a job is to have: `ours`, or what it has where an operator set that. It is remembered. `array_id`: whose factor a
 * task has inherited; 0: none. `exists`: entries of other jobs are dropped before the table grows. `*fresh` becomes true
 * where an operator's factor is seen for the first time. A job that is not known has ours, and so has every job when
 * memory is short. O(1).
 */
uint32_t sluice_site_factors_choose(struct sluice_site_factors *factors, uint32_t job_id, uint32_t array_id,
                                    uint32_t has, uint32_t ours, bool (*exists)(uint32_t job_id), bool *fresh);
/* Did an operator set what the job has? A job that is not known has ours from now on. O(1). */
bool sluice_site_factors_kept(struct sluice_site_factors *factors, uint32_t job_id, uint32_t array_id, uint32_t has);
void sluice_site_factors_clear(struct sluice_site_factors *factors);
/* Operators' factors, from what sluice_ranks_write has written: believed of jobs that still have them. A file that is
 * missing is no error. Errors: SYSTEM, CORRUPT, NO_MEMORY. */
enum sluice_error sluice_site_factors_load(struct sluice_site_factors *factors, const char *path,
                                           struct sluice_error_text *text);

#endif /* SLUICE_ORDER_ORDER_H */
