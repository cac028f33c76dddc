/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Which GPUs a job gets: stock select/cons_tres has picked them per node in the job's gres_bit_select; the core's choice is
 * put in their place before the allocation is entered.
 */
#ifndef SLUICE_SELECT_GPUS_H
#define SLUICE_SELECT_GPUS_H

#include "controller/mirror.h"

/* Are the parts' nodes exactly those that the job got? */
bool sluice_gpus_same_nodes(const job_record_t *job, const struct sluice_part *parts, uint32_t count);

/*
 * Exchange the GPUs that stock picked for those of the parts (ascending by node, the job's nodes): as many of the same
 * kind, all of them free in Slurm's records. False where that could not be done for some node, which keeps stock's.
 */
bool sluice_gpus_choose(struct sluice_mirror *mirror, job_record_t *job, const struct sluice_part *parts,
                        uint32_t count);

/* How many nodes' GPUs were chosen, and on how many the job got just these. Jobs that get whole nodes do not count. */
void sluice_gpus_compare(const job_record_t *job, const struct sluice_part *parts, uint32_t count, uint32_t *chosen,
                         uint32_t *kept);

enum sluice_shards {
    SLUICE_SHARDS_FINE,  /* no shares, or on GPUs that nobody holds whole */
    SLUICE_SHARDS_MOVED, /* stock had picked a GPU that is held whole or too full; now it is another one */
    SLUICE_SHARDS_NONE,  /* there is no other one on that node */
};
/* Look after the GPUs that stock picked for a job's shares. *node: where there is none. */
enum sluice_shards sluice_gpus_check_shards(job_record_t *job, uint32_t *node);

/* sluice_mirror_free_fn: what stock's records of cores and memory leave free. */
bool sluice_gpus_free_of_node(uint32_t node, int64_t *cpus, int64_t *memory_mib);

#endif
