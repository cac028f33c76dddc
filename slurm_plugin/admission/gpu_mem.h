/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Inside of admission: what --gpu-mem means with every other way to ask for GPUs. */
#ifndef SLUICE_ADMISSION_GPU_MEM_H
#define SLUICE_ADMISSION_GPU_MEM_H

#include "admission/submission.h"

/*
 * Turns submission->options.gpu_mem_mib into a request for shards: fills admission's tres, nodes, features, CPU and
 * memory fields, and changes `request` (what the submission's strings say) to what they say then. False with a refusal.
 */
bool sluice_gpu_mem_rewrite(const struct sluice_slurm *slurm, const struct sluice_submission *submission,
                            struct sluice_tres_request *request, struct sluice_admission *admission);

#endif
