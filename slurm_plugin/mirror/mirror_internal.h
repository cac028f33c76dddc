/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * What the files of a mirror (mirror.h) need of each other; for files of mirror/ only, and for one mirror one call at a
 * time. Callers of mirror.h hold the locks; nothing here takes one. Where Slurm's records are read, it is under config,
 * job, node and partition read at least.
 *
 *   mirror.c          making one, following Slurm, reading it
 *   node.c     what Slurm says of one node: configuration, GRES
 *   build.c    the core's cluster from Slurm's nodes
 *   table.c    the table of jobs, and the core's allocations of each
 *   jobs.c     what a job holds, and who is still running
 *   compare.c  the mirror compared with the nodes' GRES: corrected, or checked
 */
#ifndef SLUICE_MIRROR_MIRROR_INTERNAL_H
#define SLUICE_MIRROR_MIRROR_INTERNAL_H

#include "mirror/mirror.h"

#include "decisions/decisions.h"
#include "mirror/cores.h"
#include "mirror/gres.h"

enum { NONE = UINT32_MAX };
/* What Slurm says is held, but no job explains, is in the table of jobs under this and the node's number. */
enum { FOREIGN = 0xf0000000u };
enum { MAX_GROUPS = SLUICE_MAX_GPUS + 1 };

/* A job that holds something: an entry of an open-addressed table. */
struct entry {
    uint32_t job_id; /* 0: empty */
    uint32_t first;  /* of its holdings */
    uint32_t seen;   /* by which comparison with Slurm's list of jobs */
    bool sharing;    /* holds no CPUs, as its cores may be others', too */
    bool pooled;     /* it holds those of its cores that count for it (cores.h) */
    bool clipped;    /* holds less compute than it claims, as the claims on its GPU exceed what that has */
    uint64_t signature;
};

/* One allocation of the core; those of a job, and the free ones, are chained. */
struct holding {
    uint64_t allocation;
    uint32_t next;
};

struct sluice_mirror {
    struct sluice_cluster *cluster; /* NULL: to be made */
    uint64_t generation;
    bool valid;
    uint32_t nodes;
    size_t words;
    uint64_t *opaque;
    uint64_t *given_back; /* nodes that a job gave back while it ran */
    uint64_t *light;      /* weight classes: for each, the nodes of its weight or less, `words` of them */
    uint32_t weights[SLUICE_MIRROR_MAX_WEIGHTS];
    uint32_t weight_count;       /* SLUICE_MIRROR_MAX_WEIGHTS + 1: more than there is room for */
    uint32_t switch_count;       /* known to Slurm */
    struct sluice_blocks blocks; /* levels 0: Slurm knows none */
    uint64_t *fingerprint;       /* per node: its configuration as it was when the cluster was made */
    struct sluice_part *parts;   /* scratch */
    uint32_t part_room;
    char (*models)[64];
    uint32_t model_count, shape_count;
    char (*nic_types)[64]; /* by the core's kind, 0: none */
    uint32_t nic_type_count;
    bool nics_unclear;      /* some node has NICs that Slurm does not distinguish */
    time_t scanned;         /* when a round of comparing configurations began */
    uint32_t scan_next;     /* where it goes on; 0: it is over */
    uint64_t configuration; /* `configurations` as it was when the cluster was made */

    struct entry *table;
    uint32_t table_size, entries, foreign, sharing, clipped;
    struct holding *holdings;
    uint32_t holding_count, holding_room, free_holding;
    uint32_t seen;
    uint64_t *suspended_once; /* while all jobs are held again: nodes of those that are or were suspended; else NULL */
    bool short_of;            /* a job holds a GPU that is taken, as Slurm gave it out twice, or MPS */
    struct sluice_cores *cores;
    bool reshare; /* a job that oversubscribes its cores started or ended: find again for whom they count */

    struct sluice_decision_recorder *recorder;
    struct sluice_decision_topology *notes; /* how the cluster was made, for the recorder */
    struct sluice_mirror_counts counts;
    uint8_t shape_models[SLUICE_MAX_SHAPES]; /* by shape: 1 + the model of all its GPUs, 0 where they differ */
};

static inline uint64_t mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ (hash >> 29);
}

/* Can the node's GPUs not be distinguished? */
static inline bool is_opaque(const struct sluice_mirror *mirror, uint32_t node)
{
    return mirror->opaque[node / 64] >> (node % 64) & 1;
}

#pragma GCC visibility push(hidden) /* called within the library only */

/* ---- node.c ---- */

/* The amounts of a GRES that shares GPUs, per GPU; false if the node's records do not distinguish GPUs. */
bool sluice_mirror_shares_per_gpu(const gres_node_state_t *shared, uint32_t gpus, const uint64_t *counts, int64_t *out);
/* Everything of a node's configuration that a mirror, or stock's answer to "could it ever run there", is made of, but
 * links and which cores are near which GPU: these come with the same registration as the rest. */
uint64_t sluice_mirror_fingerprint(const node_record_t *node);
/* What of each GPU is free, as Slurm has it. */
void sluice_mirror_free_by_slurm(const struct sluice_node_gres *gres, const struct sluice_node_view *view,
                                 int64_t *free_mib);

/* ---- build.c ---- */

/* Make the cluster again from Slurm's nodes; nothing is held in it. Errors: NO_MEMORY, CAPACITY (more nodes than the
 * core can have), and then there is none. O(nodes). */
enum sluice_error sluice_mirror_build(struct sluice_mirror *mirror, struct sluice_error_text *text);
/* No cluster, and no job in the table; the memory of both goes, but the table's. */
void sluice_mirror_forget(struct sluice_mirror *mirror);

/* ---- table.c ---- */

/* The entry of a job; NULL: it holds nothing. Entries do not move until one is added or removed. */
struct entry *sluice_mirror_find_entry(const struct sluice_mirror *mirror, uint32_t job_id);
/* The entry of a job, without allocations where it is a new one. NULL: out of memory. */
struct entry *sluice_mirror_add_entry(struct sluice_mirror *mirror, uint32_t job_id);
/* The job of the entry holds these parts, too, in one allocation; nothing at all where the core refuses. */
void sluice_mirror_hold(struct sluice_mirror *mirror, struct entry *entry, struct sluice_part *parts, uint32_t count);
/* Give back all that a job holds, and remove it. Overwrites mirror->parts. */
void sluice_mirror_let_go(struct sluice_mirror *mirror, uint32_t job_id);

/* ---- jobs.c ---- */

/* Hold what the job's record says, instead of what was held for it. `suspended`: without its cores. */
void sluice_mirror_hold_job(struct sluice_mirror *mirror, const job_record_t *job, bool suspended);
/* The same for all jobs on a node. O(jobs). */
void sluice_mirror_hold_again(struct sluice_mirror *mirror, uint32_t node);
/* Find again for which jobs the cores of some nodes (NULL: of all) count that several jobs oversubscribe. O(jobs). */
void sluice_mirror_share_out(struct sluice_mirror *mirror, bitstr_t *nodes);
/* Claims on compute have gone: hold again the jobs that hold less of it than they claim. O(entries) where there are
 * any. */
void sluice_mirror_hold_clipped(struct sluice_mirror *mirror);
/* Percent of compute that running jobs claim, by their records: claims[node][GPU]. O(jobs). For checks. */
void sluice_mirror_add_claims(const struct sluice_mirror *mirror, uint32_t (*claims)[SLUICE_MAX_GPUS]);
/* Compare the list of running jobs. */
void sluice_mirror_sync_jobs(struct sluice_mirror *mirror);
/* The same for a mirror that was made again. */
void sluice_mirror_hold_all(struct sluice_mirror *mirror);

/* ---- compare.c ---- */

/* Are the node's GPUs as free as in Slurm's record of it? free_mib: room for SLUICE_MAX_GPUS, what is free of each in
 * Slurm's; unset where the node cannot be read, which counts as the same. */
bool sluice_mirror_same_free(const struct sluice_mirror *mirror, uint32_t node, int64_t *free_mib);
/* Make the node's GPUs agree with Slurm's. */
void sluice_mirror_correct(struct sluice_mirror *mirror, uint32_t node);
/* Make all nodes' GPUs agree with Slurm's. */
void sluice_mirror_correct_all(struct sluice_mirror *mirror);

#pragma GCC visibility pop

#endif
