/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Inside of admission: what --gpu-mem means beside every other way to ask for GPUs. */
#ifndef SLUICE_ADMISSION_GPU_MEM_H
#define SLUICE_ADMISSION_GPU_MEM_H

#include "admission/admission.h"

/*
 * Turns submission->options.gpu_mem_mib into a request for shards: fills admission's tres, nodes, features, CPU and
 * memory fields, and changes `request` (what the submission's strings say) to what they say then. False with a refusal.
 */
bool sluice_gpu_mem_rewrite(const struct sluice_slurm *slurm, const struct sluice_submission *submission,
                            struct sluice_tres_request *request, struct sluice_admission *admission);

/* Writes a refusal; returns false, so that a check can end with it. */
__attribute__((format(printf, 3, 4))) bool sluice_refuse(struct sluice_admission *admission,
                                                         enum sluice_refusal refusal, const char *format, ...);

/*
 * Adds a feature, or alternatives "a|b", to the job's constraint: "x&y" becomes "x&y&a", or "x&y&(a|b)". False, with a
 * refusal that says `because`, where the user's own constraint is more than a list of features joined by &.
 */
bool sluice_require_feature(const struct sluice_submission *submission, const char *feature, const char *because,
                            struct sluice_admission *admission);

/* Whether the constraint, as it is by now, is a list joined by & that has the feature. */
bool sluice_has_feature(const struct sluice_submission *submission, const struct sluice_admission *admission,
                        const char *feature);

/* "gres:gpu" or "gres/gpu", as this Slurm writes it. */
void sluice_gres_text(const struct sluice_slurm *slurm, const char *name, const char *type, uint64_t count, char *text,
                      size_t size);

#endif
