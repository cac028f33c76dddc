/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * A job of Slurm as a request of the core.
 */
#ifndef SLUICE_MIRROR_REQUEST_H
#define SLUICE_MIRROR_REQUEST_H

#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

#include "rules/rules.h"
#include "sluice/core.h"

struct sluice_mirror;

/* How much of a job the core's request says. Append only. */
enum sluice_job_fit {
    SLUICE_JOB_STOCK = 0,     /* stock decides; see `reason` */
    SLUICE_JOB_PLACEABLE = 1, /* the core may choose nodes, but its "no place" proves nothing */
    SLUICE_JOB_MODELLED = 2,  /* ... and where `needed` has no place, stock would find none either */
};

/* Why stock decides. */
enum sluice_job_stock {
    SLUICE_STOCK_NONE = 0,
    SLUICE_STOCK_HET = 1,            /* component of a heterogeneous job: placed together with the others */
    SLUICE_STOCK_REQUIRED_NODES = 2, /* --nodelist, --distribution=arbitrary: the nodes are chosen */
    SLUICE_STOCK_FEATURES = 3,       /* XOR, XAND or counted features: slurmctld asks for parts of the job */
    SLUICE_STOCK_RESERVED_CORES = 4, /* a reservation holds some cores or GRES of nodes */
    SLUICE_STOCK_SHARED = 5,         /* cores may be oversubscribed, or jobs are time-sliced */
    SLUICE_STOCK_SWITCHES = 6,       /* --switches=2 and more: stock counts and waits */
    SLUICE_STOCK_CONTIGUOUS = 7,     /* adjacent nodes */
    SLUICE_STOCK_CORE_SPEC = 8,      /* changes which cores of a node there are */
    SLUICE_STOCK_LICENSES = 9,       /* stock answers with another code where licences lack */
    SLUICE_STOCK_GRES = 10,          /* MPS, counts by socket, several types of GPU, shares with GPUs */
    SLUICE_STOCK_BIND = 11,          /* --gres-flags=enforce-binding: which GPUs depends on which cores */
    SLUICE_STOCK_NO_GPUS = 12,       /* several nodes without GPUs */
    SLUICE_STOCK_LLN = 13,           /* the site configured "least loaded node first" */
    SLUICE_STOCK_RESIZE = 14,        /* expands another job */
    SLUICE_STOCK_FUTURE = 15,        /* asked for a later time */
    SLUICE_STOCK_TOPOLOGY = 16,      /* whole blocks, a set of sizes */
    SLUICE_STOCK_CONSTRAINTS = 17,   /* extra constraints, no node at all, a reservation that is being made */
    SLUICE_STOCK_OPTIONS = 18,       /* options that do not parse */
    SLUICE_STOCK_UNKNOWN_TYPE = 19,  /* a GPU type that no node has */
    SLUICE_STOCK_MIRROR = 20,        /* the mirror cannot be made: out of memory */
    SLUICE_STOCK_WEIGHTS = 21,       /* the site ranks its nodes by more weights than the mirror keeps */
    SLUICE_STOCK_REQUEST = 22,       /* the core takes no such request: fewer GPUs than nodes */
    SLUICE_STOCK_OWNER = 23,         /* --exclusive=user or =mcs: who else has jobs on a node counts */
};
enum { SLUICE_STOCK_COUNT = 24 };
/* One word for it, in counters; never NULL. */
const char *sluice_job_stock_name(enum sluice_job_stock reason);
/* The reason in words; never NULL. */
const char *sluice_job_stock_text(enum sluice_job_stock reason);

/* Everything of a job that stock's answer to "could it ever run on these nodes" depends on, as plain words. */
enum { SLUICE_SHAPE_WORDS = 96 };
struct sluice_job_shape {
    uint64_t hash;
    uint32_t count; /* 0: too long, not to be remembered */
    uint64_t words[SLUICE_SHAPE_WORDS];
};

struct sluice_job_request {
    enum sluice_job_fit fit;
    enum sluice_job_stock reason; /* where fit is SLUICE_JOB_STOCK */
    struct sluice_request wanted; /* what to place; `allowed` is the caller's to set */
    struct sluice_request wider;  /* to be tried where `wanted` has no place: the same on more nodes */
    bool has_wider;
    struct sluice_request needed;      /* what stock asks at the least */
    bool same;                         /* `needed` is `wanted`, and there is no `wider`: one answer is both */
    bool gpus_by_node;                 /* of Slurm's counts: --gpus-per-node or --gres, so many on each node */
    bool shares;                       /* gres/shard */
    enum sluice_fabric fabric;         /* what it says of the network itself */
    enum sluice_nic_planes nic_planes; /* and of its NICs' planes */
    const char *gpu_type;              /* that it names, of the job's record; NULL: none */
};

/*
 * What a job asks, for min_nodes to max_nodes nodes as given to select_p_job_test (0, 0, 0: by the job's own record).
 * The job is not changed; `shape` may be NULL. O(its GRES and options); no allocation. Locks: config, job, node and
 * partition read.
 */
void sluice_job_request_make(struct sluice_mirror *mirror, job_record_t *job, uint32_t min_nodes, uint32_t max_nodes,
                             uint32_t req_nodes, struct sluice_job_request *out, struct sluice_job_shape *shape);

/* The planes of its NICs: as the job says, else by the policy of its type of GPU. Nothing changes where it has no NICs. */
void sluice_job_request_set_planes(struct sluice_job_request *request, const struct sluice_rules *rules);

/* The most that one node has. */
struct sluice_node_size {
    uint32_t cpus, gpus;
};

/*
 * What a job takes where stock chooses its nodes (--nodelist, several nodes without GPUs), or where it asks for no number
 * of nodes and one has not enough: to reserve room for it, not to choose. `largest`: of the nodes that it may have. The
 * nodes that it requires, too, are left to the caller, who sets `allowed`. False: its amount cannot be said. Cost and
 * locks: as above.
 */
bool sluice_job_request_estimate(struct sluice_mirror *mirror, job_record_t *job, struct sluice_node_size largest,
                                 struct sluice_request *out);

/* What of GPUs any job asks, also one of which nothing else can be said. */
struct sluice_gpus_asked {
    uint32_t gpus;     /* whole ones, in all, at the least */
    uint32_t per_node; /* of them, on each node; 0: it does not say */
    bool shares;       /* shards, or MPS */
    bool whole_nodes;  /* with all their GPUs */
};
struct sluice_gpus_asked sluice_job_gpus_asked(const job_record_t *job);
/* The GPUs that it takes on one of `nodes` nodes, evenly, that has `most`. */
uint32_t sluice_gpus_on_node(const struct sluice_gpus_asked *asked, uint32_t nodes, uint32_t most);

/* The GPUs that a job takes on the nodes that stock chooses: of all of them together, where it does not say how many on
 * each. False: they cannot be said. Cost and locks: as above. */
bool sluice_job_request_gpus(struct sluice_mirror *mirror, job_record_t *job, struct sluice_request *out);

struct sluice_options;

/* What a job asked of Sluice, from the options that its record keeps; false: it has none, or they do not parse. Locks:
 * job read. */
bool sluice_job_options(const job_record_t *job, struct sluice_options *options);

/* The job's prologs get `value` as SPANK_NAME, or nothing where it is NULL, in place of what an earlier start set; `name`
 * ends with '='. Locks: job write. */
void sluice_job_tell_prologs(job_record_t *job, const char *name, const char *value);

/* The percentage of each of its GPUs' compute that a job claims (--gpu-share), from the options that its record keeps;
 * 0 where it claims none, or its options do not parse. Locks: job read. */
uint32_t sluice_job_gpu_share(const job_record_t *job);

/* Nodes of each segment of the job: Slurm's --segment where it has one, else Sluice's; 0: none. Locks: job read. */
uint32_t sluice_job_segment(const job_record_t *job);

/* Does it still wait for nodes below one leaf switch or in one block (--switches=1, --fabric)? Locks: job read. */
bool sluice_job_waits_for_switch(const job_record_t *job);

/* The order in which Slurm preempts jobs, lower ones first: by partition and QOS. Locks: as above. */
static inline uint32_t sluice_job_rank(const job_record_t *job)
{
    return (job->part_ptr ? (uint32_t)job->part_ptr->priority_tier : 0) + (job->qos_ptr ? job->qos_ptr->priority : 0);
}

#endif
