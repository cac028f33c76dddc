/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Cores that several jobs have at once, in partitions that oversubscribe them: each core counts for one of its jobs, so
 * that the cores of a node's jobs add up to those in use. Job and node locks as for a mirror.
 */
#ifndef SLUICE_MIRROR_CORES_H
#define SLUICE_MIRROR_CORES_H

#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

struct sluice_cores;

/* NULL: out of memory. */
struct sluice_cores *sluice_cores_new(uint32_t nodes);
void sluice_cores_free(struct sluice_cores *cores);

/* May others have the job's cores, too? */
bool sluice_cores_oversubscribed(const job_record_t *job);

/* From now on no core of these nodes (NULL: of any) counts for a job. */
void sluice_cores_clear(struct sluice_cores *cores, bitstr_t *nodes);
/* Those of the job's cores on these nodes (NULL: on all) that count for no job count for this job. Without memory they
 * stay uncounted. */
void sluice_cores_claim(struct sluice_cores *cores, const job_record_t *job, bitstr_t *nodes);
/* How many of a node's cores count for a job. */
int64_t sluice_cores_of(const struct sluice_cores *cores, uint32_t node, uint32_t job_id);

#endif
