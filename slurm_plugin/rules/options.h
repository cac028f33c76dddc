/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The job options that Sluice adds to srun, sbatch and salloc, parsed. One parser for the commands (SPANK), for
 * job_submit and for the controller, so that all three read it the same way. No Slurm headers; no allocation, no
 * globals; every function may be called from any thread.
 */
#ifndef SLUICE_RULES_OPTIONS_H
#define SLUICE_RULES_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    SLUICE_GANG_NAME_MAX = 64,
    SLUICE_PROFILE_MAX_S = 86400,   /* of a profile whose end is not its step's */
    SLUICE_SAVE_SIGNAL = 62,        /* native/launch/launch.h */
    SLUICE_CHECKPOINT_LEAST_S = 60, /* between two signals to save; to a month */
    SLUICE_CHECKPOINT_MOST_S = 30 * 86400,
    SLUICE_NICS_PER_GPU_MAX = 32, /* as many as a node may have: SLUICE_MAX_NICS */
    SLUICE_SEGMENT_MAX = 65533,   /* as Slurm's own */
    SLUICE_FABRIC_MOST_S = 30 * 86400,
    SLUICE_GPU_ROLES_MAX = 8, /* as the core lays out: SLUICE_MAX_ROLES */
    SLUICE_GPU_ROLE_NAME_MAX = 16,
    SLUICE_GPU_ROLE_GPUS_MAX = 4096, /* of all roles together: SLUICE_MAX_ROLE_GPUS */
    SLUICE_GANG_COUNT_MAX = 256,     /* as many as the core places together: SLUICE_MAX_GROUP */
    SLUICE_OPTION_WHY_MAX = 256,     /* room that any message of this parser fits in */
    SLUICE_OPTION_TEXT_MAX = 256,    /* and any option as sluice_option_canonical writes it */
    /*
     * Bytes of all of a job's strings. Prologs have them in their environment, and the kernel starts no program with
     * more than 128 KiB in one string or some MiB in all: Slurm would drain the node.
     */
    SLUICE_SPANK_ENV_MAX = 64 * 1024,
    SLUICE_SPANK_ENV_MOST = 1024, /* strings, empty ones and NULL included: they are read for each plan */
};

/* 16 TiB: more than any GPU has, and small enough that sums over a cluster stay far from overflow. */
#define SLUICE_GPU_MEM_MAX_MIB (UINT64_C(1) << 24)

/* More than any GPU draws. */
#define SLUICE_GPU_POWER_MAX_W 100000

/* The name under which Slurm knows the SPANK plugin, and the prefix that it gives the options of a submitted job. */
#define SLUICE_SPANK_NAME "sluice"
#define SLUICE_SPANK_ENV_PREFIX "_SLURM_SPANK_OPTION_" SLUICE_SPANK_NAME "_"

#define SLUICE_PROFILE_WHOLE UINT32_MAX /* until the step ends */

enum sluice_affinity {
    SLUICE_AFFINITY_UNSET, /* the site's placement policy decides */
    SLUICE_AFFINITY_NONE,
    SLUICE_AFFINITY_LINK, /* GPUs that are linked with each other */
    SLUICE_AFFINITY_NUMA, /* GPUs of one NUMA node */
};

enum sluice_checkpoint {
    SLUICE_CHECKPOINT_AUTO, /* the site's policy decides */
    SLUICE_CHECKPOINT_NO,
    SLUICE_CHECKPOINT_APP,    /* the job's programs save their state when they are signalled */
    SLUICE_CHECKPOINT_SYSTEM, /* the node saves it as it runs */
};

/* How near the nodes of a job of several nodes are to be. */
enum sluice_fabric {
    SLUICE_FABRIC_UNSET, /* the site's policy decides */
    SLUICE_FABRIC_ANY,
    SLUICE_FABRIC_BLOCK,  /* in one block, or below one leaf switch */
    SLUICE_FABRIC_RAIL,   /* below the switches where their rails meet */
    SLUICE_FABRIC_SPREAD, /* evenly over as many leaf switches as there are */
};

/* In which planes of the network the job's NICs are to be. */
enum sluice_nic_planes {
    SLUICE_NIC_PLANES_UNSET, /* the site's policy decides */
    SLUICE_NIC_PLANES_ANY,
    SLUICE_NIC_PLANES_ONE,    /* all NICs of all nodes in one, wherever one has room */
    SLUICE_NIC_PLANES_SPREAD, /* those of each node evenly over planes */
};

#define SLUICE_FABRIC_NO_TIME UINT32_MAX /* as long as the site lets jobs wait for switches */

/* GPUs of the job with one purpose. */
struct sluice_gpu_role {
    char name[SLUICE_GPU_ROLE_NAME_MAX + 1];
    uint32_t gpus; /* at least 1 */
};

#define SLUICE_CHECKPOINT_DALY UINT32_MAX /* an interval from the measured time of a save and rate of failures */

/* Zero is "not asked" for every field. */
struct sluice_options {
    uint64_t gpu_mem_mib;   /* of each GPU; 1 to SLUICE_GPU_MEM_MAX_MIB */
    uint32_t gpu_share;     /* percent of a GPU's compute time; 1 to 100 */
    uint32_t gpu_power_w;   /* that each GPU may draw; 1 to SLUICE_GPU_POWER_MAX_W */
    uint32_t gpu_profile;   /* seconds of each step; 1 to SLUICE_PROFILE_MAX_S, or SLUICE_PROFILE_WHOLE */
    uint32_t nics_per_gpu;  /* RDMA NICs with each GPU; 1 to SLUICE_NICS_PER_GPU_MAX */
    uint32_t gang_count;    /* jobs that start together; 1 to SLUICE_GANG_COUNT_MAX */
    uint32_t checkpoint_s;  /* between two signals, or SLUICE_CHECKPOINT_DALY */
    uint32_t fabric_wait_s; /* where `fabric` is block or rail: until any nodes will do, or SLUICE_FABRIC_NO_TIME */
    uint32_t segment;       /* nodes of each segment; 1 to SLUICE_SEGMENT_MAX */
    enum sluice_fabric fabric;
    enum sluice_nic_planes nic_planes;
    enum sluice_checkpoint checkpoint;
    enum sluice_affinity gpu_affinity;
    uint32_t gpu_role_count;
    struct sluice_gpu_role gpu_roles[SLUICE_GPU_ROLES_MAX];
    bool gpu_spread; /* the job's GPUs on as many nodes as it may have */
    char gang_name[SLUICE_GANG_NAME_MAX + 1];
};

/*
 * One option: `name` as a user writes it without dashes ("gpu-mem"), `value` what follows, NULL for none. Returns true
 * and sets the option's fields, or returns false, leaves `options` as it was, and writes one line for the user into
 * `why` (of `why_size` bytes, always terminated; control characters of the value are never repeated). Giving an option
 * again replaces it, as Slurm's own options do.
 */
bool sluice_option_set(struct sluice_options *options, const char *name, const char *value, char *why, size_t why_size);

/*
 * All options of a submitted job from `count` strings NAME=VALUE (its spank_job_env); strings of others are left alone,
 * NULL entries are skipped. False with `why` for an unknown or malformed option of ours, one that is there twice or
 * that no command sends like this, more than SLUICE_SPANK_ENV_MAX bytes in all, or more than SLUICE_SPANK_ENV_MOST
 * strings: they come from the submitting client and are not trusted.
 */
bool sluice_options_from_env(struct sluice_options *options, char *const *env, size_t count, char *why,
                             size_t why_size);

/*
 * The one spelling of a string that `options` were parsed from: "..._gpu_share=50" for "..._gpu-share=050%". Nodes read
 * only this one (prolog_epilog/jobs.py). False for a string of others.
 */
bool sluice_option_canonical(const struct sluice_options *options, const char *variable, char *text, size_t size);

/*
 * What the controllers' daemon reads of a job's comment (policy/checkpoint.py): "sluice:checkpoint=1200s". False where
 * the job asks for nothing, or `text` is too small.
 */
bool sluice_checkpoint_words(const struct sluice_options *options, char *text, size_t size);

/* The name of a role, as a step chooses it: 1 to SLUICE_GPU_ROLE_NAME_MAX letters, digits and '_', no digit first. */
bool sluice_is_role_name(const char *text);

/* "gpu-mem" for the i-th option, NULL past the last; for callers that need them all. */
const char *sluice_option_name(size_t index);

/*
 * A size of memory: digits, at most one point with up to three digits behind it, K, M, G or T (else MiB), "B" or "iB".
 * Whole MiB, rounded up. False for anything else, zero, or more than `most` MiB.
 */
bool sluice_parse_mib(const char *text, uint64_t most, uint64_t *mib);

/* "10G" where whole, else "10300M": what a user can write back. Returns `text`; 24 bytes hold every value. */
const char *sluice_format_mib(uint64_t mib, char *text, size_t size);

#endif
