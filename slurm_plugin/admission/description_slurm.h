/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Inside of admission: Slurm's description of a job as a submission, and what admission made of it back into it. */
#ifndef SLUICE_ADMISSION_DESCRIPTION_SLURM_H
#define SLUICE_ADMISSION_DESCRIPTION_SLURM_H

#include "slurm_compat.h"

#include "admission/admission.h"

/* All of `submission` but its options. Its strings are the description's. */
void sluice_description_read(const job_desc_msg_t *job, struct sluice_submission *submission);

/* Completes what was read from a modification: the job as that would leave it. */
void sluice_description_merge(const job_desc_msg_t *job, const struct sluice_job_facts *facts,
                              struct sluice_submission *submission);

/* Writes an admitted request. `old` is the job as it is, NULL for a new one. */
void sluice_description_write(job_desc_msg_t *job, const struct sluice_admission *admission,
                              const struct sluice_job_facts *old);

/* A job that goes on where it was saved: it may be requeued, and its output is appended to. */
void sluice_description_write_resumable(job_desc_msg_t *job);

/* The job's own key for what is saved of it, which Slurm gives to the prologs of the nodes where the job starts, and to
 * nobody else (SLUICE_SAVE_KEY). What the user sent as such is replaced. False: there is none, with a message. */
bool sluice_description_write_key(job_desc_msg_t *job);

/* What Slurm sends to the whole job when it is preempted, instead of SIGTERM to its steps. */
void sluice_description_write_signal(job_desc_msg_t *job, uint16_t signal);

/* However a user spelled the options, those who read them later, on nodes too, find them in one spelling. */
void sluice_description_write_options(job_desc_msg_t *job, const struct sluice_options *options);

/* Replaces a text that Slurm allocated; "" leaves NULL. */
void sluice_description_set(char **field, const char *text);

#endif
