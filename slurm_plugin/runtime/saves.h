/* SPDX-License-Identifier: Apache-2.0 */
/*
 * When running jobs last saved their work, as immutable snapshots.
 *
 * The controllers' daemon writes them to `sluice.saves` in StateSaveLocation; see listing.h. If the file cannot be read
 * or is damaged, the last good one stays in force, and this is logged; if it is removed, nothing is known.
 *
 *   sluice-saves 1
 *   JOBID TIME_S                   Unix time; a line each, any order, no duplicates
 *   checksum = crc32:0123abcd      of all bytes before this line
 */
#ifndef SLUICE_RUNTIME_SAVES_H
#define SLUICE_RUNTIME_SAVES_H

#include "runtime/listing.h"

#define SLUICE_SAVES_FILE "sluice.saves"

enum { SLUICE_SAVES_MAX = 65536 /* jobs */ };
#define SLUICE_SAVES_MAX_S (INT64_C(1) << 40)

struct sluice_save {
    uint32_t job_id;
    int64_t at_s;
};

struct sluice_saves {
    struct sluice_listed listed;
    struct sluice_save jobs[]; /* sorted by id */
};

/* Read a file's content; needs no terminating zero. On success *saves is the caller's, to be released. Errors: INVALID
 * (`text` says the line), VERSION, CORRUPT, CAPACITY, NO_MEMORY. */
enum sluice_error sluice_saves_parse(const char *data, size_t length, struct sluice_saves **saves,
                                     struct sluice_error_text *text);

/* What is in force, which stays as it is until it is released; NULL: nothing is known. */
const struct sluice_saves *sluice_saves_acquire(void);
void sluice_saves_release(const struct sluice_saves *saves);

/* When the job last saved its work; 0: not known. O(log jobs). */
int64_t sluice_saves_of(const struct sluice_saves *saves, uint32_t job_id);

#endif
