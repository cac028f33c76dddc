/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What `sluice plugin status` shows: one JSON object in the file `sluice.status.HOST` of the StateSaveLocation, written
 * by the ticker when it has changed. Modules count things into it.
 */
#ifndef SLUICE_RUNTIME_STATUS_H
#define SLUICE_RUNTIME_STATUS_H

#include <stdbool.h>
#include <stdint.h>

enum { SLUICE_STATUS_COUNTERS = 256, SLUICE_STATUS_NAME = 48 };

/*
 * A counter, shown as counters.NAME (a-z, 0-9, '.', '_'; e.g. "select.passed_through"); the same for the same name.
 * Made in init; lives as long as the process. When there is no room, which is logged once: one that is not shown, never
 * NULL.
 */
_Atomic uint64_t *sluice_status_counter(const char *name);

/* For controller.c: where the file goes, and which plugins are loaded, by type, e.g. "select". */
void sluice_status_start(const char *folder, const char *slurm_version);
void sluice_status_plugin(const char *type, bool loaded);
/* Write the file if it would change. Does I/O: never under a lock of Slurm's. */
void sluice_status_write(void);
/* Remove the file. */
void sluice_status_stop(void);

#endif
