/* SPDX-License-Identifier: Apache-2.0 */
/*
 * When running jobs last saved their work, and how long a save takes, as immutable snapshots.
 *
 * The controllers' daemon writes them to `sluice.saves` and `sluice.save-times` in StateSaveLocation (kinds sluice-saves
 * and sluice-save-times of job_times.h; the second has seconds for times). If a file cannot be read or is damaged, the last good one stays in force, and this is logged; if it is removed, nothing is
 * known.
 */
#ifndef SLUICE_RUNTIME_SAVES_H
#define SLUICE_RUNTIME_SAVES_H

#include "runtime/job_times.h"

#define SLUICE_SAVES_FILE "sluice.saves"
#define SLUICE_SAVE_TIMES_FILE "sluice.save-times"

/* What is in force, which stays as it is until it is released (sluice_job_times_release); NULL: nothing is known. */
const struct sluice_job_times *sluice_saves_acquire(void);
/* Likewise: jobs that save when they are asked to, and for how many seconds, measured or estimated. */
const struct sluice_job_times *sluice_save_times_acquire(void);

#endif
