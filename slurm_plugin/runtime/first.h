/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Jobs that are planned before all others, each until a time: they have lost their nodes by a fault of these, and start
 * on others. Their places are kept while Slurm lets them wait for the end of their first run.
 *
 * The controllers' daemon writes them to `sluice.first` in StateSaveLocation (kind sluice-first of job_times.h). If the
 * file cannot be read or is damaged, the last good one stays in force, and this is logged; without a file there are none.
 */
#ifndef SLUICE_RUNTIME_FIRST_H
#define SLUICE_RUNTIME_FIRST_H

#include "runtime/job_times.h"

#define SLUICE_FIRST_FILE "sluice.first"

/* What is in force, which stays as it is until it is released (sluice_job_times_release); NULL: none. */
const struct sluice_job_times *sluice_first_acquire(void);

#endif
