/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sluice's scheduling core: where jobs go, in which order, and who holds how much GPU memory.
 *
 * Contract of the whole header
 *   - The core knows no Slurm, files, clocks or logging: `now` is a parameter, so every decision can be
 * replayed.
 *   - Handles are opaque, made by *_new and given back by *_free; *_free(NULL) does nothing.
 *   - Distinct handles are independent; calls on one handle must not overlap, unless a function says
 * otherwise.
 *   - Every function that can fail returns enum sluice_error and writes results through out-pointers, which
 * it leaves untouched on failure. A last parameter `struct sluice_error_text *text` may be NULL; on failure
 * it receives one line that names the value, the place and the remedy. A failed call changes nothing.
 *   - After set-up no function on the decision path allocates memory.
 *   - Decisions are deterministic: the same calls give the same results on every machine. No floating point
 * decides.
 *   - Memory is in MiB, CPUs in thousandths of a CPU, time in seconds, unless a name says otherwise.
 *
 * cffi definitions are generated from this file: declarations, enums and structs only, no function-like
 * macros.
 */
#ifndef SLUICE_CORE_H
#define SLUICE_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ======== errors ======== */

/* Append only: values are part of the ABI. */
enum sluice_error {
    SLUICE_OK = 0,
    SLUICE_ERROR_NO_MEMORY = 1, /* the host is out of memory */
    SLUICE_ERROR_INVALID = 2,   /* an argument is malformed or contradicts another */
    SLUICE_ERROR_RANGE = 3,     /* a number is negative, overflows or lies outside its documented bounds */
    SLUICE_ERROR_UNKNOWN = 4,   /* an id or name that the handle does not know */
    SLUICE_ERROR_DUPLICATE = 5, /* an id or name that the handle knows already */
    SLUICE_ERROR_CAPACITY = 6,  /* more than the handle was made for, or more than a device has */
    SLUICE_ERROR_NO_PLACE = 7,  /* valid, but nothing fits now; see sluice_explanation */
    SLUICE_ERROR_NEVER = 8,     /* valid, but nothing would fit even on an idle cluster */
    SLUICE_ERROR_QUOTA = 9,     /* an owner's quota or limit forbids it */
    SLUICE_ERROR_CORRUPT = 10,  /* shared or serialised state fails its checks */
    SLUICE_ERROR_BUSY = 11,     /* in use; try again */
    SLUICE_ERROR_VERSION = 12,  /* made by an incompatible version */
    SLUICE_ERROR_SYSTEM = 13,   /* the operating system refused; text carries errno's words */
};

enum { SLUICE_ERROR_TEXT_SIZE = 256 };

/* Caller-owned room for one line of explanation; always NUL-terminated after a failed call. */
struct sluice_error_text {
    char text[SLUICE_ERROR_TEXT_SIZE];
};

/* The error's name in words, e.g. "no place now". Never NULL; static storage. */
const char *sluice_strerror(enum sluice_error error);

/* Version of this library, "MAJOR.MINOR.PATCH"; static storage. */
const char *sluice_core_version(void);

/* ======== cluster model (nodes, GPUs, state) ======== */

/* ======== requests, placement, gang, release, explain ======== */

/* ======== order: priority, fair-share, deadline ... ======== */

/* A factor of one; every factor lies in [0, SLUICE_FACTOR_ONE]. */
enum { SLUICE_FACTOR_ONE = 1 << 30 };

/* What an order is composed of. Append only. With all weights zero the order is FIFO. */
enum sluice_factor {
    SLUICE_FACTOR_PRIORITY = 0,   /* the job's own priority, normalised by the caller (partition, QOS, nice ...) */
    SLUICE_FACTOR_AGE = 1,        /* time eligible / age_full_s */
    SLUICE_FACTOR_FAIR_SHARE = 2, /* Fair Tree rank of the job's account */
    SLUICE_FACTOR_DEADLINE = 3,   /* least laxity first; 0 without a deadline or when it cannot be met any more */
    SLUICE_FACTOR_SERVICE = 4,    /* least remaining GPU-seconds first, on a logarithmic scale */
    SLUICE_FACTOR_TIME = 5,       /* least remaining seconds first, on a logarithmic scale */
    SLUICE_FACTOR_SIZE = 6,       /* GPUs asked / size_full_gpus: larger first */
};
enum { SLUICE_FACTOR_COUNT = 7, SLUICE_ORDER_MAX_WEIGHT = 1000000 };

/* How jobs are ordered: score = sum of weight * factor; see sluice_order_sort for what comes before and after it. */
struct sluice_order_policy {
    uint32_t weight[SLUICE_FACTOR_COUNT]; /* by enum sluice_factor, 0 to SLUICE_ORDER_MAX_WEIGHT */
    int64_t age_full_s;                   /* > 0 where AGE has weight */
    int64_t laxity_horizon_s;             /* > 0 where DEADLINE has weight: laxity at which urgency begins */
    uint32_t size_full_gpus;              /* > 0 where SIZE has weight */
    int64_t starvation_s;                 /* a job that waited so long goes before all that did not; 0: never */
};

/* One pending (or preemptible running) job as the order sees it. Times in seconds of the caller's clock. */
struct sluice_order_job {
    uint64_t id;         /* last tie-break */
    int64_t submit_s;    /* FIFO's key */
    int64_t eligible_s;  /* age counts from here; at least submit_s */
    int64_t deadline_s;  /* 0: none */
    int64_t remaining_s; /* predicted run time that is left, >= 0; see sluice_predictor_predict */
    uint32_t gpus;       /* whole GPUs asked; a share of one counts as one */
    uint32_t priority;   /* 0 to SLUICE_FACTOR_ONE */
    uint32_t account;    /* of the fair-share tree; ignored without one */
    uint32_t reserved;   /* 0 */
};

enum sluice_deadline_verdict {
    SLUICE_DEADLINE_NONE = 0,
    SLUICE_DEADLINE_FEASIBLE = 1,
    SLUICE_DEADLINE_INFEASIBLE = 2, /* even a start now would end after the deadline */
};

/* Why a job stands where it stands. */
struct sluice_order_terms {
    int64_t score;                     /* sum of term[] */
    int64_t term[SLUICE_FACTOR_COUNT]; /* weight * factor, in units of 1 / SLUICE_FACTOR_ONE */
    int64_t laxity_s;                  /* deadline - now - remaining; 0 without a deadline */
    enum sluice_deadline_verdict deadline;
    bool starving;
};

struct sluice_fairshare;

/* The score of one job. `fairshare` may be NULL when FAIR_SHARE has no weight. O(1).
 * INVALID: a policy or job outside the bounds above; UNKNOWN: an account that the tree does not know. */
enum sluice_error sluice_order_score(const struct sluice_order_policy *policy, const struct sluice_fairshare *fairshare,
                                     const struct sluice_order_job *job, int64_t now_s,
                                     struct sluice_order_terms *terms, struct sluice_error_text *text);

struct sluice_order;

/* Room for ordering up to `capacity` jobs. */
enum sluice_error sluice_order_new(uint32_t capacity, struct sluice_order **order, struct sluice_error_text *text);
void sluice_order_free(struct sluice_order *order);

/* Writes to `ranked[0..count)` the indices into `jobs`, first to run first: starving jobs by submit time, then the rest
 * by falling score; ties by submit time, then id. O(n log n), no allocation. On failure (as in sluice_order_score, or
 * CAPACITY) `ranked` is untouched and the text names the job. */
enum sluice_error sluice_order_sort(struct sluice_order *order, const struct sluice_order_policy *policy,
                                    const struct sluice_fairshare *fairshare, const struct sluice_order_job *jobs,
                                    uint32_t count, int64_t now_s, uint32_t *ranked, struct sluice_error_text *text);

/*
 * Fair-share: a tree of accounts with shares and usage that decays by half every half-life. The factor is the account's
 * place in the Fair Tree (R. Cox, L. Morrison, "Fair Tree: Fairshare Algorithm for Slurm", 2014): at each level
 * siblings are ordered by shares over usage, each normalised among the siblings, and a subtree's accounts all come
 * before those of the next subtree, so that an account never suffers from what its siblings' siblings did.
 */
enum { SLUICE_FAIRSHARE_ROOT = 0 };

/* `max_accounts` includes the root; half_life_s > 0, or 0 for usage that never decays. */
enum sluice_error sluice_fairshare_new(uint32_t max_accounts, int64_t half_life_s, struct sluice_fairshare **fairshare,
                                       struct sluice_error_text *text);
void sluice_fairshare_free(struct sluice_fairshare *fairshare);

/* Adds an account below `parent`; ids count up from 1. shares: 0 (only idle GPUs) to 1,000,000. */
enum sluice_error sluice_fairshare_add(struct sluice_fairshare *fairshare, uint32_t parent, uint32_t shares,
                                       uint32_t *account, struct sluice_error_text *text);
enum sluice_error sluice_fairshare_set_shares(struct sluice_fairshare *fairshare, uint32_t account, uint32_t shares,
                                              struct sluice_error_text *text);

/* Charges `usage` (any unit, e.g. GPU-milliseconds; at most 2^40 a call) to an account and all above it. Time must not
 * go backwards by more than the caller's clock does: an earlier now_s is treated as the latest seen. O(depth). */
enum sluice_error sluice_fairshare_charge(struct sluice_fairshare *fairshare, uint32_t account, uint64_t usage,
                                          int64_t now_s, struct sluice_error_text *text);

/* Usage decayed to now_s. */
enum sluice_error sluice_fairshare_usage(const struct sluice_fairshare *fairshare, uint32_t account, int64_t now_s,
                                         uint64_t *usage, struct sluice_error_text *text);

/* Recomputes every account's factor; call it before a pass, not for each job. O(n log n), no allocation. */
void sluice_fairshare_refresh(struct sluice_fairshare *fairshare, int64_t now_s);

/* The factor as of the last refresh: SLUICE_FACTOR_ONE for the first in the tree, towards 0 for the last. */
enum sluice_error sluice_fairshare_factor(const struct sluice_fairshare *fairshare, uint32_t account, uint32_t *factor,
                                          struct sluice_error_text *text);

/*
 * Run-time prediction from a user's own history: the quantile of the last run times that were recorded under the most
 * specific key with at least two of them (after D. Tsafrir, Y. Etsion, D. Feitelson, "Backfilling Using
 * System-Generated Predictions Rather than User Runtime Estimates", IEEE TPDS 2007, who average the user's last two).
 */
struct sluice_predictor;
enum { SLUICE_PREDICTOR_HISTORY = 8, SLUICE_PREDICTOR_MAX_KEYS = 4 };

/* Remembers up to `capacity` keys; the key that was recorded least recently makes room. `quantile_percent`: 1 to 100.
 */
enum sluice_error sluice_predictor_new(uint32_t capacity, uint32_t quantile_percent,
                                       struct sluice_predictor **predictor, struct sluice_error_text *text);
void sluice_predictor_free(struct sluice_predictor *predictor);

/* Records a finished run under all of its keys (hashes chosen by the caller, most specific first, e.g. of user + name +
 * GPUs, user + GPUs, user; 1 to SLUICE_PREDICTOR_MAX_KEYS). O(keys). */
enum sluice_error sluice_predictor_record(struct sluice_predictor *predictor, const uint64_t *keys, uint32_t key_count,
                                          int64_t run_s, struct sluice_error_text *text);

/* Predicted seconds that are left to a job that ran `elapsed_s` so far (0: not started) under a limit of `limit_s`
 * (0: none). Without history the limit itself. A job that outlived its prediction is expected to run as long again,
 * which is the median of a heavy-tailed run time of index one; never more than the limit leaves. */
enum sluice_error sluice_predictor_predict(const struct sluice_predictor *predictor, const uint64_t *keys,
                                           uint32_t key_count, int64_t elapsed_s, int64_t limit_s, int64_t *remaining_s,
                                           struct sluice_error_text *text);

/* ======== preemption ======== */

/* ======== backfill ======== */

/* ======== memory ledger ======== */

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_CORE_H */
