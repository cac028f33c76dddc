/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * --nics-per-gpu=N as Slurm counts: gres/nic next to gres/gpu, N times as many for each node, socket or task. GPUs that
 * are counted for all nodes together (--gpus) are counted by node or task where the number of these divides them, and
 * refused otherwise: Slurm would divide the NICs in another way.
 */
#ifndef SLUICE_ADMISSION_NICS_PER_GPU_H
#define SLUICE_ADMISSION_NICS_PER_GPU_H

#include "admission/submission.h"

/* Adds the NICs to the admission's request, which has the submission's where it has not changed it. False: refused. */
bool sluice_add_nics_per_gpu(const struct sluice_slurm *slurm, const struct sluice_submission *submission,
                             const struct sluice_tres_request *request, struct sluice_admission *admission);

#endif
