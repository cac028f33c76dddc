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

/* "gres:gpu" or "gres/gpu", as this Slurm writes it. */
void sluice_gres_text(const struct sluice_slurm *slurm, const char *name, const char *type, uint64_t count, char *text,
                      size_t size);

#endif
