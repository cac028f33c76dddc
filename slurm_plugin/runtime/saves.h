/* SPDX-License-Identifier: Apache-2.0 */
/*
 * When running jobs last saved their work, as immutable snapshots.
 *
 * The controllers' daemon writes them to `sluice.saves` in StateSaveLocation (kind sluice-saves of job_times.h). If the
 * file cannot be read or is damaged, the last good one stays in force, and this is logged; if it is removed, nothing is
 * known.
 */
#ifndef SLUICE_RUNTIME_SAVES_H
#define SLUICE_RUNTIME_SAVES_H

#include "runtime/job_times.h"

#define SLUICE_SAVES_FILE "sluice.saves"

/* What is in force, which stays as it is until it is released (sluice_job_times_release); NULL: nothing is known. */
const struct sluice_job_times *sluice_saves_acquire(void);

#endif
