/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Files of the controllers' daemon (listing.h) with a job and a time in each line:
 *
 *   KIND 1
 *   JOBID TIME_S                   Unix time; a line each, any order, no duplicates
 *   checksum = crc32:0123abcd      of all bytes before this line
 */
#ifndef SLUICE_RUNTIME_JOB_TIMES_H
#define SLUICE_RUNTIME_JOB_TIMES_H

#include "runtime/listing.h"

enum { SLUICE_JOB_TIMES_MAX = 65536 /* jobs */ };
#define SLUICE_JOB_TIMES_MAX_S (INT64_C(1) << 40)

struct sluice_job_time {
    uint32_t job_id;
    int64_t at_s;
};

struct sluice_job_times {
    struct sluice_listed listed;
    struct sluice_job_time jobs[]; /* sorted by id */
};

/* A kind of such files. */
struct sluice_listing_kind sluice_job_times_kind(const char *name);

/* Read a content of a kind; needs no terminating zero. On success *made is the caller's, to be released. Errors: INVALID
 * (`text` says the line), VERSION, CORRUPT, CAPACITY, NO_MEMORY. */
enum sluice_error sluice_job_times_parse(const char *name, const char *data, size_t length,
                                         struct sluice_job_times **made, struct sluice_error_text *text);
void sluice_job_times_release(const struct sluice_job_times *times);

/* The job's time; 0: it is not there, or `times` is NULL. O(log jobs). */
int64_t sluice_job_times_of(const struct sluice_job_times *times, uint32_t job_id);

#endif
