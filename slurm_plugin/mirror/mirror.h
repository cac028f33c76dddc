/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * A mirror is a cluster of the core (sluice_cluster) that follows Slurm's nodes, GRES and running jobs.
 *
 *   - Node n of the cluster is Slurm's node index n, so that the words of a node bitmap are a request's `allowed`.
 *   - GPU i of a node is bit i of its gres/gpu; its memory in MiB is its gres/shard, or SLUICE_MIRROR_PLAIN_GPU_MIB
 *     where the node has no shards. GPU types are the core's models.
 *   - NIC i of a node is bit i of its gres/nic, of the kind of its type; near GPUs as nics.sluice.conf says. A node whose
 *     NICs Slurm does not distinguish has as many as there can be, and they stay free.
 *   - CPUs are those of the cores that jobs may use; host memory is RealMemory less MemSpecLimit.
 *   - Every running or suspended job holds what its job_resrcs and GRES say, and of its GPUs' compute what its option
 *     --gpu-share claims, as far as it is free: below level place stock Slurm counts none. The mirror does not hold
 *     what it cannot express: it may count as free what is not, never the reverse. So "no place" is a proof.
 *   - A core that several jobs oversubscribe is held by one of them, whichever ends last.
 *   - Nodes whose GPUs cannot be distinguished (no File, not yet registered, more than SLUICE_MAX_GPUS) are opaque:
 *     they are in the cluster as drained nodes without GPUs, and sluice_mirror_opaque has their bits.
 *   - A mirror does not know drained, down and completing nodes: Slurm's bitmaps say which nodes may be used.
 *
 * Not a singleton: the placement hook has one, used under slurmctld's write locks and notified of every start and end;
 * the planner has its own, updated by sluice_mirror_sync under read locks (config, job, node, partition). Calls on one
 * mirror must not overlap.
 */
#ifndef SLUICE_MIRROR_MIRROR_H
#define SLUICE_MIRROR_MIRROR_H

#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

#include "mirror/gres.h"
#include "mirror/nics.h"
#include "mirror/request.h"
#include "sluice/core.h"

struct sluice_mirror;

enum { SLUICE_MIRROR_PLAIN_GPU_MIB = 81920 };

/* What it cost to follow; counted since the mirror was made. */
struct sluice_mirror_counts {
    uint64_t builds;     /* made again: start, reconfigure, other nodes or GRES */
    uint64_t scans;      /* all nodes' configuration compared */
    uint64_t jobs_held;  /* jobs entered */
    uint64_t jobs_freed; /* jobs removed */
    uint64_t mismatches; /* a node's GRES was not what the mirror said, and was corrected */
};

/* Errors: NO_MEMORY. Reads nothing yet: the first sync does. */
enum sluice_error sluice_mirror_new(struct sluice_mirror **mirror, struct sluice_error_text *text);
void sluice_mirror_free(struct sluice_mirror *mirror);

/*
 * Bring up to date with Slurm. `jobs`: compare the list of running jobs and all nodes' configuration, which is O(nodes
 * + jobs); a caller that reports each start and end to the mirror leaves it out, and a few nodes' configuration is
 * compared at a time. Configurations are compared when last_node_update says that something may have changed, at most
 * once a second; all mirrors know a change that one of them finds. It makes the mirror again: sluice_mirror_cluster and
 * all allocations are then others, and sluice_mirror_generation has grown. Locks: config, job, node and partition read.
 * Errors: NO_MEMORY, CAPACITY (more nodes than the core can have): the mirror is not usable.
 */
enum sluice_error sluice_mirror_sync(struct sluice_mirror *mirror, bool jobs, time_t now,
                                     struct sluice_error_text *text);
/* Every mirror is made again by its next sync: something that is not a job began or ceased to hold GPUs. */
void sluice_mirrors_outdated(void);
/* The next sync makes it again: nodes, partitions or topology were reconfigured. */
void sluice_mirror_invalidate(struct sluice_mirror *mirror);

/* NULL before the first sync. */
struct sluice_cluster *sluice_mirror_cluster(struct sluice_mirror *mirror);
/* Grows whenever the cluster was made again. */
uint64_t sluice_mirror_generation(const struct sluice_mirror *mirror);
struct sluice_mirror_counts sluice_mirror_counts(const struct sluice_mirror *mirror);

/* What happened to a job. Slurm's record has it only after the select plugin was called. */
enum sluice_mirror_job {
    SLUICE_MIRROR_RUNS,      /* started, resumed, resized */
    SLUICE_MIRROR_SUSPENDED, /* gives up its cores, keeps memory and GPUs */
    SLUICE_MIRROR_ENDED,
};
/* One job changed: hold what its record says now. O(its nodes), and O(jobs) where it oversubscribes its cores. Before
 * the first sync and after an invalidation it does nothing. */
void sluice_mirror_job_changed(struct sluice_mirror *mirror, job_record_t *job, enum sluice_mirror_job what);

/* The core's allocations of a job: one, or several where it holds GPUs of a node in unequal shares; returns how many
 * there are, 0 for a job that holds nothing, and writes up to `capacity` of them. */
uint32_t sluice_mirror_allocations(const struct sluice_mirror *mirror, uint32_t job_id, uint64_t *allocations,
                                   uint32_t capacity);

/* What a job holds, all its allocations together (a node may occur in several parts); the mirror's own memory, valid
 * until the next call. */
const struct sluice_part *sluice_mirror_parts(struct sluice_mirror *mirror, uint32_t job_id, uint32_t *count);

/* Opaque nodes, as a bitmap of sluice_mirror_words words. */
const uint64_t *sluice_mirror_opaque(const struct sluice_mirror *mirror);
size_t sluice_mirror_words(const struct sluice_mirror *mirror);
uint32_t sluice_mirror_nodes(const struct sluice_mirror *mirror);

/* Nodes of low weight are used first. How many different weights there are, and a bitmap of the nodes of the lowest
 * `weight` + 1 of them. More than SLUICE_MIRROR_MAX_WEIGHTS: the site ranks its nodes itself, and there are no bitmaps.
 */
enum { SLUICE_MIRROR_MAX_WEIGHTS = 16 };
uint32_t sluice_mirror_weights(const struct sluice_mirror *mirror);
const uint64_t *sluice_mirror_light(const struct sluice_mirror *mirror, uint32_t weight);

/* Does Slurm know switches or blocks? */
bool sluice_mirror_has_switches(const struct sluice_mirror *mirror);
/* The blocks of topology/block; NULL with another topology. */
const struct sluice_blocks *sluice_mirror_blocks(const struct sluice_mirror *mirror);

/* The core's model of a GPU type, as a set (bit m); 0: no node has that type. */
uint64_t sluice_mirror_models(const struct sluice_mirror *mirror, const char *type);

/* The type of a node's GPUs where all have the same; else "". As long as the cluster. */
const char *sluice_mirror_node_type(const struct sluice_mirror *mirror, uint32_t node);

/* The core's kind of a type of NICs, as a set (bit k); 0: no node has that type, or not all nodes' NICs are known. */
uint64_t sluice_mirror_nic_kinds(const struct sluice_mirror *mirror, const char *type);

/* Of all GPU types in their order: as long as it stays, so do the sets. */
uint64_t sluice_mirror_models_hash(const struct sluice_mirror *mirror);

/* sluice_cluster_set_workload on the mirror's cluster, until it is made again. Errors: its own. */
enum sluice_error sluice_mirror_set_workload(struct sluice_mirror *mirror, const struct sluice_request *shapes,
                                             const uint32_t *weights, uint32_t count);

/* The words of a Slurm node bitmap: what a request takes as `allowed`. The bitmap's own memory. */
const uint64_t *sluice_bitmap_words(bitstr_t *bitmap, size_t *words);

/* Does the mirror agree with the node's GRES as Slurm has it? If not, it is corrected and false returned. O(1). */
bool sluice_mirror_node_agrees(struct sluice_mirror *mirror, uint32_t node);

struct sluice_decision_recorder;
/* From now on the recorder gets how the cluster is made and which nodes change; the next sync makes it again. */
void sluice_mirror_record(struct sluice_mirror *mirror, struct sluice_decision_recorder *recorder);

/* What Slurm says is free on a node, from its own records of cores and memory; false: not known. */
typedef bool (*sluice_mirror_free_fn)(uint32_t node, int64_t *cpus, int64_t *memory_mib);

/* Every node's configuration, GPUs and shards against Slurm's own records, cores and memory against `free_of` (may be
 * NULL), and the core's own check; for tests. Errors: CORRUPT with the first difference. O(nodes + jobs). */
enum sluice_error sluice_mirror_check(struct sluice_mirror *mirror, sluice_mirror_free_fn free_of,
                                      struct sluice_error_text *text);

#endif
