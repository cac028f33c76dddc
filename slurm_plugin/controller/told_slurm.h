/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The end of a batch job that its node tells later than Slurm's own report, which nobody took (journal/told.h). */
#ifndef SLUICE_CONTROLLER_TOLD_SLURM_H
#define SLUICE_CONTROLLER_TOLD_SLURM_H

#include <stdint.h>

struct job_record;

/*
 * Ends `job` as its slurmstepd would have done, when it is the very run that `comment` is about: still running, on that
 * node, of that user, as often requeued. Under slurmctld's job and node write locks. The answer is an error of Slurm's
 * in each case, so that nothing else comes of the change that brought it: ESLURM_ALREADY_DONE when the job has ended,
 * by this or before; ESLURM_NOT_SUPPORTED without a journal. `uid` asks: root or SlurmUser.
 *
 * Weak, as job_submit is also built where Slurm's sources are not to be had: NULL there.
 */
__attribute__((weak)) int sluice_job_told_ended(struct job_record *job, const char *comment, uint32_t uid);

#endif
