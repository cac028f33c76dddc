/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Admission inside slurmctld: what job_submit/sluice does with a job description. Public headers of Slurm only. Runs
 * under slurmctld's read locks, from 24.11 on in several threads at once: no I/O, no waiting.
 *
 * Each function returns what job_submit and job_modify return, and writes a refusal or a notice for the user to
 * *message (allocated by Slurm), if there is one and `message` is not NULL.
 */
#ifndef SLUICE_ADMISSION_ADMISSION_SLURM_H
#define SLUICE_ADMISSION_ADMISSION_SLURM_H

#include "slurm_compat.h"

#include "admission/admission.h"
#include "runtime/runtime.h"

#include <stdbool.h>

/* A new job: checked, completed and rewritten in place. */
int sluice_submit(job_desc_msg_t *job, const struct sluice_settings *settings, char **message);

/* The same for a modification of `record`'s job, which is checked as the modification would leave it. */
int sluice_modify(job_desc_msg_t *job, struct job_record *record, const struct sluice_settings *settings,
                  char **message);

/* Whether a modification changes anything that admission checks. */
bool sluice_modifies_request(const job_desc_msg_t *job);

/* At level off: refuses a job that asks for what only Sluice can give. */
int sluice_refuse_options(const job_desc_msg_t *job, char **message);

/* Keeps the trace that a job with these checks behind it is submitted in, as spank_sluice passed it, in the job's
 * AdminComment, where accounting has it; an operator's own comment stays. `took_ns`: how long the checks took. */
void sluice_keep_trace(job_desc_msg_t *job, uint64_t took_ns);

#endif
