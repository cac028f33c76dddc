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

/*
 * Who holds how much memory of which device, exact to the byte, in memory that processes share.
 *
 * The caller maps the region (shared and writable) into every process and passes it here; the ledger does no I/O and
 * keeps no pointers in it, so each process may map it elsewhere. In it are
 *   devices    GPUs or MIG instances, each with its capacity, granularity and oversubscription;
 *   owners     jobs or tenants, each with a quota on every device;
 *   processes  each of one owner, known by pid and start time, because a pid alone is used again.
 * For every device at every moment: the charge of the device is the sum of its owners' charges and of its processes'
 * charges, and is granted only within the device's limit and the owner's quota. A process may be killed or stopped at
 * any instruction: no byte is lost or counted twice, and nobody waits for it. What a dead process held stays charged
 * until someone who knows that it is dead calls sluice_ledger_reap.
 *
 * Use: reserve, then allocate on the device, then commit; or release where the device refused. That order never lets
 * the sum of allocations exceed a limit, whoever races.
 *
 * Unlike other handles a ledger may be used by many threads at once, except where a function says otherwise. Every
 * operation is lock-free; after `attempts` lost races in a row (a hostile or corrupt peer) it gives SLUICE_ERROR_BUSY.
 * Nothing in the region is trusted: nonsense gives SLUICE_ERROR_CORRUPT. Yet who can write the region can falsify the
 * figures in it, so a limit on hostile code needs a stronger guard beside the ledger.
 */
struct sluice_ledger;

enum {
    SLUICE_LEDGER_MAX_DEVICES = 128,
    SLUICE_LEDGER_MAX_OWNERS = 4096,
    SLUICE_LEDGER_MAX_PROCESSES = 4096,
    SLUICE_LEDGER_ALIGNMENT = 64, /* of a region's address */
};

/* How much a region has room for; each at least 1. */
struct sluice_ledger_shape {
    uint32_t devices;
    uint32_t owners;
    uint32_t processes; /* alive at one time, of all owners */
};

struct sluice_ledger_device {
    uint64_t capacity;         /* bytes that may be handed out, at most 2^46; 0 closes the device */
    uint64_t granularity;      /* charges are rounded up to a multiple of it: a power of two, e.g. 2 MiB for CUDA */
    uint32_t oversubscription; /* limit = capacity * this / 1000, rounded down to the granularity: 1000 to 8000 */
    uint32_t reserved;         /* 0 */
};

/* One reservation or allocation. The caller keeps it, next to the allocation's address, until it is released. */
struct sluice_ledger_charge {
    uint64_t asked;   /* bytes */
    uint64_t charged; /* bytes, asked rounded up; 0: this charge holds nothing */
    uint32_t device;
    uint32_t committed; /* 1 after sluice_ledger_commit */
};

/* Bytes of a device, or of one owner or one process on it. charged = committed + what is reserved. */
struct sluice_ledger_usage {
    uint64_t limit;     /* device: capacity with oversubscription; owner and process: the owner's quota */
    uint64_t charged;   /* exact at one moment */
    uint64_t available; /* what one more reservation may get, device's limit and owner's quota considered */
    uint64_t peak;      /* highest `charged` ever; a process's: 0 */
    uint64_t committed; /* of charged: allocated, contexts included */
    uint64_t context;   /* of committed: driver contexts */
    uint64_t slack;     /* of committed: lost to rounding */
    uint64_t refused;   /* reservations refused for lack of room or quota; a process's: 0 */
};

struct sluice_ledger_process {
    uint32_t owner;
    uint32_t pid;
    uint64_t start; /* as given to sluice_ledger_join */
};

/*
 * Free memory that large requests cannot use. The driver maps any free page of a device at any address, so inside a
 * device nothing is fragmented; what fragments is free memory spread over several devices.
 */
struct sluice_ledger_fragmentation {
    uint64_t free;              /* bytes, over all devices */
    uint64_t largest;           /* most that one device has free: the largest request that fits */
    uint32_t largest_device;    /* the lowest that has it */
    uint32_t external_permille; /* 1000 * (free - largest) / free, rounded down; 0 when nothing is free */
    uint64_t slack;             /* bytes charged but not asked for, over all devices */
};

/* One step of a compaction plan: move everything that one process holds on `from` to `to`. */
struct sluice_ledger_move {
    uint32_t process; /* as sluice_ledger_join gave it */
    uint32_t from;
    uint32_t to;
    uint32_t reserved; /* 0 */
    uint64_t bytes;
};

/* Bytes that a region of this shape takes; 0 when the shape is out of bounds. */
size_t sluice_ledger_size(const struct sluice_ledger_shape *shape);

/*
 * Make an empty ledger in `region`, before anyone else uses it. Devices are closed and owners have no quota yet.
 * SLUICE_ERROR_RANGE: shape; SLUICE_ERROR_CAPACITY: size; SLUICE_ERROR_INVALID: address not aligned.
 */
enum sluice_error sluice_ledger_format(void *region, size_t size, const struct sluice_ledger_shape *shape,
                                       struct sluice_error_text *text);

/*
 * A handle on a formatted region, which must stay mapped until sluice_ledger_free. `attempts`: lost races in a row
 * before SLUICE_ERROR_BUSY; 0 for 2^20. Errors: INVALID, CORRUPT, VERSION, NO_MEMORY.
 */
enum sluice_error sluice_ledger_new(void *region, size_t size, uint32_t attempts, struct sluice_ledger **ledger,
                                    struct sluice_error_text *text);
void sluice_ledger_free(struct sluice_ledger *ledger);

void sluice_ledger_get_shape(const struct sluice_ledger *ledger, struct sluice_ledger_shape *shape);

/*
 * Terms of a device and quota of an owner on it (bytes; UINT64_MAX: only the device's limit). May change at any time;
 * when lowered below what is charged, nothing is taken away, but nothing more is granted either.
 */
enum sluice_error sluice_ledger_set_device(struct sluice_ledger *ledger, uint32_t device,
                                           const struct sluice_ledger_device *terms, struct sluice_error_text *text);
enum sluice_error sluice_ledger_set_quota(struct sluice_ledger *ledger, uint32_t owner, uint32_t device, uint64_t quota,
                                          struct sluice_error_text *text);

/*
 * Enter the process (pid not 0, start time in any unit, both as all users of the region see them) under `owner`.
 * *process names it until it is reaped, also in other processes that use the region. Whatever the same pid left in the
 * ledger, before exec or in an earlier life, is released first. Once per process; a forked child joins anew.
 * SLUICE_ERROR_CAPACITY: no slot is free: reap dead processes.
 */
enum sluice_error sluice_ledger_join(struct sluice_ledger *ledger, uint32_t owner, uint32_t pid, uint64_t start,
                                     uint32_t *process, struct sluice_error_text *text);

/*
 * Release everything that a process holds and strike it off. For a process that has ended, or by that process itself
 * after its last operation. Any number of callers may do so at once, and again after one was killed in it. A process
 * that is not in the ledger releases 0 bytes, which is no error. *released (may be NULL): bytes, over all devices.
 */
enum sluice_error sluice_ledger_reap(struct sluice_ledger *ledger, uint32_t pid, uint64_t start, uint64_t *released,
                                     struct sluice_error_text *text);

/*
 * Charge `bytes` (1 or more), rounded up to `granularity` (a power of two; 0: the device's). Granted at once or refused
 * at once: SLUICE_ERROR_CAPACITY: the device's limit; SLUICE_ERROR_QUOTA: the owner's. O(1), no system call.
 */
enum sluice_error sluice_ledger_reserve(struct sluice_ledger *ledger, uint32_t process, uint32_t device, uint64_t bytes,
                                        uint64_t granularity, struct sluice_ledger_charge *charge,
                                        struct sluice_error_text *text);

/* The device has granted what was reserved. Charges of one process are independent; one charge is the caller's. */
enum sluice_error sluice_ledger_commit(struct sluice_ledger *ledger, uint32_t process,
                                       struct sluice_ledger_charge *charge, struct sluice_error_text *text);

/* Give a charge back, committed or not; it holds nothing afterwards, and releasing it again is INVALID. O(1). */
enum sluice_error sluice_ledger_release(struct sluice_ledger *ledger, uint32_t process,
                                        struct sluice_ledger_charge *charge, struct sluice_error_text *text);

/*
 * Say how much the process's driver context takes on a device: charges (or gives back) the difference to what was said
 * before, exactly, without rounding; 0 when the context is gone. Errors as sluice_ledger_reserve. Calls for one process
 * and device must not overlap.
 */
enum sluice_error sluice_ledger_set_context(struct sluice_ledger *ledger, uint32_t process, uint32_t device,
                                            uint64_t bytes, struct sluice_error_text *text);

/* Figures of a device, of an owner on it, of a process on it. O(processes), O(processes) and O(1). */
enum sluice_error sluice_ledger_device_usage(struct sluice_ledger *ledger, uint32_t device,
                                             struct sluice_ledger_usage *usage, struct sluice_error_text *text);
enum sluice_error sluice_ledger_owner_usage(struct sluice_ledger *ledger, uint32_t owner, uint32_t device,
                                            struct sluice_ledger_usage *usage, struct sluice_error_text *text);
enum sluice_error sluice_ledger_process_usage(struct sluice_ledger *ledger, uint32_t process, uint32_t device,
                                              struct sluice_ledger_usage *usage, struct sluice_error_text *text);

/*
 * The processes in the ledger, up to `room` of them (their names in ids[], who they are in processes[]); *count is how
 * many there are, which may be more. O(processes).
 */
enum sluice_error sluice_ledger_processes(struct sluice_ledger *ledger, uint32_t room, uint32_t *ids,
                                          struct sluice_ledger_process *processes, uint32_t *count,
                                          struct sluice_error_text *text);

/*
 * Audit: for every device the charge equals the sum over owners and the sum over processes, at one moment while others
 * go on. SLUICE_ERROR_CORRUPT says where not. O(devices * (owners + processes)).
 */
enum sluice_error sluice_ledger_audit(struct sluice_ledger *ledger, struct sluice_error_text *text);

enum sluice_error sluice_ledger_get_fragmentation(struct sluice_ledger *ledger,
                                                  struct sluice_ledger_fragmentation *fragmentation,
                                                  struct sluice_error_text *text);

/*
 * How to bring some device to `wanted` free bytes by moving whole processes' holdings to other devices: the moves in
 * order, each within limits and quotas when it is made, in moves[0 .. *count). For every device the smallest holding
 * that suffices, or else the largest ones first until they do, less those that turn out needless; of all devices the
 * plan that moves the fewest bytes, then the fewest processes, then the lowest device. *freed: bytes moved, 0 when the
 * room is there already. Advice from figures that others may change meanwhile: moving is reserve on `to`, copy, release
 * on `from`. SLUICE_ERROR_NO_PLACE: no such plan; SLUICE_ERROR_CAPACITY: more than `room` moves (processes in the
 * ledger always suffice). O(devices * processes * (devices + processes)).
 */
enum sluice_error sluice_ledger_plan_compaction(struct sluice_ledger *ledger, uint64_t wanted, uint32_t room,
                                                struct sluice_ledger_move *moves, uint32_t *count, uint32_t *device,
                                                uint64_t *freed, struct sluice_error_text *text);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_CORE_H */
