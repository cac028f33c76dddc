/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The compiled policy: what `sluice apply` hands to the plugins. Versioned text with a checksum; docs/plugins.md
 * describes the format, policy/compiled.py writes it. Knows no Slurm, files or clocks.
 */
#ifndef SLUICE_RULES_POLICY_H
#define SLUICE_RULES_POLICY_H

#include <sluice/core.h>

/* A file with another major version is refused; keys that a newer minor version may have brought are kept as
 * warnings. */
enum { SLUICE_RULES_MAJOR = 1, SLUICE_RULES_MINOR = 0 };

enum {
    SLUICE_RULES_MAX_BYTES = 16 * 1024 * 1024,
    SLUICE_RULES_MAX_CLASSES = 64,
    SLUICE_RULES_MAX_TENANTS = 65536,
    SLUICE_RULES_MAX_TYPES = 1024, /* GPU types of all classes together */
    SLUICE_RULES_MAX_LIST = 256,   /* words in one list */
    SLUICE_RULES_MAX_NAME = 128,
    SLUICE_RULES_MAX_NODES = 4096,  /* bytes of a hostlist expression */
    SLUICE_RULES_MAX_WARNINGS = 16, /* kept; all are counted */
    SLUICE_MOST_PLANNED = 16384,    /* pending jobs: what a pass of the planner has room for */
};

/* A limit that is not set. */
#define SLUICE_NO_LIMIT UINT32_MAX
#define SLUICE_NO_LIMIT_64 UINT64_MAX

/* No class: an index for which there is none. */
#define SLUICE_NO_CLASS UINT32_MAX

/* How GPUs of a class are shared out among tenants. */
enum sluice_class_strategy {
    SLUICE_CLASS_STATIC = 0,  /* each tenant only its guarantee */
    SLUICE_CLASS_DYNAMIC = 1, /* any tenant, within the limits */
    SLUICE_CLASS_HYBRID = 2,  /* guarantees, and what others leave idle */
};

/* Words of a list, in the file's order; `items` is NULL where count is 0. */
struct sluice_words {
    const char *const *items;
    uint32_t count;
};

/* A class of GPUs. */
struct sluice_class {
    const char *name;
    struct sluice_words gpu_types; /* GRES types, e.g. h100 */
    enum sluice_class_strategy strategy;
    uint64_t gpu_memory_mib;      /* of one GPU, the largest of the class; 0: not known */
    uint32_t reserved_permille;   /* of the class, kept free for guarantees: 0 to 1000 */
    uint32_t cpus_per_gpu_milli;  /* default of a job that names none, in thousandths; 0: the global one */
    uint64_t memory_mib_per_gpu;  /* likewise; 0: the global one */
    uint32_t power_default_w;     /* of one GPU without a cap; 0: power_most_w */
    uint32_t power_idle_w;        /* of one GPU that does nothing */
    uint32_t power_start_least_w; /* a job that budgets are short for may start with a cap down to this; 0: it waits */
    uint32_t power_least_w;       /* what the limit of a GPU's power can be set to; 0: not known */
    uint32_t power_most_w;
    uint32_t compaction_wait_s; /* as the global one, for jobs that would start here; 0: that one */
    bool spread_nodes;          /* jobs of several nodes with its GPUs are spread over leaf switches */
    uint32_t nic_planes;        /* enum sluice_layout: of the NICs of jobs with its GPUs */
};

/* A tenant's limits in one class. */
struct sluice_class_rule {
    bool allowed;
    uint32_t gpus_per_job;    /* SLUICE_NO_LIMIT: any */
    uint32_t run_time_s;      /* SLUICE_NO_LIMIT: any */
    uint32_t gpus_limit;      /* running at once; SLUICE_NO_LIMIT: any */
    uint32_t gpus_guaranteed; /* 0: none */
    uint32_t power_w;         /* power cap of each GPU of a job; 0: none */
    uint32_t power_most_w;    /* that a job may ask for; 0: power_w */
};

/* A tenant: one Slurm account. */
struct sluice_tenant {
    const char *account;
    const char *parent;                      /* account; NULL: the root */
    const char *qos;                         /* given to jobs that name none; NULL: Slurm's default */
    struct sluice_words partitions;          /* the first is given to jobs that name none; empty: Slurm's default */
    struct sluice_words features;            /* required of the nodes of the tenant's jobs */
    uint32_t shares;                         /* for fair-share, 0 to 1,000,000 */
    uint32_t tier;                           /* higher goes before lower, 0 to 1000 */
    uint32_t default_priority;               /* 0 to SLUICE_FACTOR_ONE / 1,000,000 steps: 0 to 1,000,000 */
    uint64_t gpu_memory_mib_per_job;         /* SLUICE_NO_LIMIT_64: any */
    uint64_t gpu_memory_mib_per_gpu;         /* a job's most on one shared GPU; SLUICE_NO_LIMIT_64: any */
    uint32_t gpus_per_job;                   /* over all classes; SLUICE_NO_LIMIT: any */
    uint32_t run_time_s;                     /* SLUICE_NO_LIMIT: any */
    uint32_t submissions_per_minute;         /* SLUICE_NO_LIMIT: any */
    int64_t expires_s;                       /* Unix time from which nothing is admitted; 0: never */
    uint32_t one_block_s;                    /* its jobs of several nodes wait so long for one block; 0: not */
    bool gang;                               /* may form gang groups */
    bool deadline;                           /* may give deadlines */
    bool borrow;                             /* may use what others leave idle in hybrid classes */
    bool movable;                            /* its running jobs may be moved to make room */
    const struct sluice_class_rule *classes; /* one for each class of the policy, by its index */
};

/* A power budget. */
struct sluice_budget {
    const char *name;
    const char *nodes;  /* hostlist expression; NULL: all */
    const char *tenant; /* account: jobs of it and of those below it; NULL: all jobs */
    int64_t watts;      /* outside `hours` */
    int64_t kept;       /* of them, above what idle GPUs draw, for jobs within guarantees */
    const struct sluice_power_hours *hours;
    uint32_t hour_count;
};

/* A whole policy, immutable; all pointers live as long as it. */
struct sluice_rules {
    uint32_t minor;      /* version of the file's format */
    int64_t generated_s; /* Unix time */
    const char *source;  /* what it was made from, e.g. "sha256:..."; "" where not said */
    uint32_t checksum;   /* CRC-32 of the file up to its last line */
    bool empty;          /* says nothing: no global key, class or tenant */

    struct sluice_order_policy order;
    int64_t fair_share_half_life_s; /* 0: usage never decays */
    enum sluice_policy placement;
    bool spread_nodes;   /* jobs of several nodes are spread over leaf switches; a class's own goes before it */
    uint32_t nic_planes; /* enum sluice_layout: of a job's NICs; likewise */
    uint32_t backfill_reservations; /* how many jobs of a plan get one */
    uint32_t backfill_depth;        /* pending jobs that are planned, 1 to SLUICE_MOST_PLANNED */
    uint32_t planner_interval_ms;   /* between plans, 100 to 600,000 */
    uint32_t gang_limit_s;          /* how long allocated members wait for the others, 1 to 86,400 */
    uint32_t gang_incomplete_s;     /* an incomplete gang is given up so long after its last member; 0: never */
    bool gang_incomplete_cancel;    /* its members are cancelled then; else they stay held, with another reason */
    bool deadlines;                 /* deadlines are looked at */
    uint32_t cpus_per_gpu_milli;    /* default of a job that names none, in thousandths; 0: Slurm's */
    uint64_t memory_mib_per_gpu;    /* likewise; 0: Slurm's */
    bool gpu_shares;                /* nodes hold jobs to shares of a GPU's compute time */
    uint32_t checkpoint_signal;     /* what jobs that save their state get when they are preempted */
    bool checkpoint_system;         /* nodes save jobs as they run */

    uint32_t compaction_wait_s;          /* a job that has waited so long may have others moved; 0: none is moved */
    uint32_t compaction_factor_permille; /* gain over cost, at the least; not 0 */
    uint32_t compaction_move_cost_s;     /* for which a job that is moved does no work */
    uint32_t compaction_save_s;          /* the longest that it has to save */
    uint32_t compaction_moves_per_job;
    uint32_t compaction_moves_per_hour; /* of all jobs; 1 to SLUICE_COMPACTION_MAX_MOVES */
    bool compaction_moves_unlisted;     /* jobs of accounts that are no tenants, too */
    uint32_t compaction_empty_within_s; /* nodes that drain, or have maintenance so soon, are emptied; 0: none is */

    bool journal;             /* what happens to jobs is journalled for failover */
    uint32_t journal_wait_ms; /* that a hook waits for its entry at most, 1 to 10,000 */
    bool journal_warn;        /* what cannot be journalled is let through with a warning, not refused */
    uint64_t journal_max_mib; /* bound of the journal, 8 to 65,536 */

    const struct sluice_class *classes;
    uint32_t class_count;
    const struct sluice_tenant *tenants; /* in the file's order */
    uint32_t tenant_count;
    const struct sluice_budget *budgets; /* in the file's order */
    uint32_t budget_count;

    uint32_t warning_count;                   /* all that there were */
    const struct sluice_error_text *warnings; /* the first SLUICE_RULES_MAX_WARNINGS of them */
};

/*
 * Parse `length` bytes. The result is the caller's, given back with sluice_rules_free.
 * Errors, each with the line's number in `text`: INVALID (malformed, contradictory), RANGE, DUPLICATE, UNKNOWN (a class
 * or placement policy that is not there), CAPACITY (more than the bounds above), VERSION (another major version),
 * CORRUPT (checksum missing or wrong: a file that was cut off or changed by hand), NO_MEMORY. O(length).
 */
enum sluice_error sluice_rules_parse(const char *data, size_t length, struct sluice_rules **rules,
                                     struct sluice_error_text *text);
void sluice_rules_free(struct sluice_rules *rules);

/* The tenant of a Slurm account, NULL for none. Letter case counts, as slurmdbd stores accounts in lower case. O(1). */
const struct sluice_tenant *sluice_rules_tenant(const struct sluice_rules *rules, const char *account);

/* Index of the class that a GPU type belongs to, or that has the name; SLUICE_NO_CLASS for none. O(1); O(classes). */
uint32_t sluice_rules_class_of_type(const struct sluice_rules *rules, const char *gpu_type);
uint32_t sluice_rules_class_by_name(const struct sluice_rules *rules, const char *name);

/* CRC-32 (ISO 3309, as zlib's) of some bytes. */
uint32_t sluice_crc32(const void *data, size_t length);

#endif
