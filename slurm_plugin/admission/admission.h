/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Whether a submission may enter the queue, and what it becomes: --gpu-mem is turned into shards, defaults are
 * completed, the limits of its tenant are kept. Pure functions over the structures in submission.h: no Slurm, no clock,
 * no allocation, no globals; the same for a new job, an array, one component of a heterogeneous job, and a job as a
 * modification would leave it. description_slurm.c fills the structures from Slurm's and writes the result back.
 */
#ifndef SLUICE_ADMISSION_ADMISSION_H
#define SLUICE_ADMISSION_ADMISSION_H

#include "admission/charge.h"
#include "admission/job_facts.h"
#include "admission/outlook.h"
#include "admission/submission.h"
#include "admission/tres.h"
#include "rules/rules.h"

/*
 * Completes and checks one submission. `rules` may be NULL and `tenant` (the account's) too: then only the request
 * itself is checked and rewritten.
 */
void sluice_admit(const struct sluice_rules *rules, const struct sluice_tenant *tenant,
                  const struct sluice_slurm *slurm, const struct sluice_submission *submission,
                  struct sluice_admission *admission);

#endif
