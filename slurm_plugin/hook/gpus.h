/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Which GPUs a job gets: stock select/cons_tres has picked them per node in the job's gres_bit_select; the core's
 * choice is put in their place before the allocation is entered.
 */
#ifndef SLUICE_HOOK_GPUS_H
#define SLUICE_HOOK_GPUS_H

#include "mirror/mirror.h"

/* Are the parts' nodes exactly those that the job got? */
bool sluice_gpus_same_nodes(const job_record_t *job, const struct sluice_part *parts, uint32_t count);

/*
 * Exchange the GPUs that stock picked for those of the parts (ascending by node, the job's nodes): as many of the same
 * kind, all of them free in Slurm's records. False where that could not be done for some node, which keeps stock's.
 */
bool sluice_gpus_choose(struct sluice_mirror *mirror, job_record_t *job, const struct sluice_part *parts,
                        uint32_t count);

/*
 * Stock is to take cores near the chosen GPUs, which it does not know yet: the others are kept from it. True when that
 * makes a difference: then `rest` has it, and sluice_exclusion_end must be called; false where all cores are near, or
 * those that are could not be enough.
 */
bool sluice_gpus_exclude_far_cores(const struct sluice_part *parts, uint32_t count,
                                   struct sluice_core_exclusion *exclusion, struct sluice_job_test_rest *rest);

/* On how many nodes GPUs were chosen, and on how many of them the job got just these. Jobs that get whole nodes do not
 * count, nor do nodes on which stock gave another number of GPUs than the core had thought (--gpus, --gpus-per-task).
 */
void sluice_gpus_compare(const job_record_t *job, const struct sluice_part *parts, uint32_t count, uint32_t *chosen,
                         uint32_t *kept);

/*
 * The GPUs that a start takes, as stock picked them: of each of the job's nodes a part with `gpus`, and with
 * `gpu_memory_mib` where they are shares; all GPUs of nodes that the job gets whole, and of MPS the whole GPU. `parts` has
 * room for each node. How many parts there are; nodes without GPUs have none.
 */
uint32_t sluice_gpus_picked(struct sluice_mirror *mirror, const job_record_t *job, struct sluice_part *parts);

enum sluice_overlap {
    SLUICE_OVERLAP_NONE,  /* what stock picked is free */
    SLUICE_OVERLAP_MOVED, /* it was not; now it is another GPU of the same kind */
    SLUICE_OVERLAP_STUCK, /* there is no other one on that node */
};
/*
 * Correct the GPUs that stock picked. It gives some out twice: 22.05 shares of a GPU that is held whole, when none of
 * the job's sockets has another, and all versions whole GPUs of which shares are held, when one line of gres.conf names
 * several GPUs, as it then only counts. And it knows no compute: a job that claims some gets its shares of memory on a
 * GPU where others have claimed it. *node: the node where no other GPU is left.
 */
enum sluice_overlap sluice_gpus_part_overlaps(struct sluice_mirror *mirror, job_record_t *job, uint32_t *node);

/* sluice_mirror_free_fn: what stock's records of cores and memory leave free. */
bool sluice_gpus_free_of_node(uint32_t node, int64_t *cpus, int64_t *memory_mib);

#endif
