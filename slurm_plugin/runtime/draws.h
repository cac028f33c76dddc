/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What jobs draw, and budgets that are lowered for a while, as immutable snapshots.
 *
 * The controllers' daemon writes them to `sluice.power` in StateSaveLocation; see listing.h. If the file cannot be read
 * or is damaged, the last good one stays in force, and this is logged; if it is removed, nothing is known.
 *
 *   sluice-power 1
 *   estimate USER CLASS WATTS      a GPU of the class under jobs of the user (a number; "-": of any)
 *   job JOBID WATTS                a GPU of a running job
 *   budget NAME WATTS UNTIL_S      no more than that until then (Unix time; 0: until the line goes)
 *   checksum = crc32:0123abcd      of all bytes before this line
 */
#ifndef SLUICE_RUNTIME_DRAWS_H
#define SLUICE_RUNTIME_DRAWS_H

#include "rules/rules.h"
#include "runtime/listing.h"

#define SLUICE_DRAWS_FILE "sluice.power"

enum { SLUICE_DRAWS_MAX = 65536 /* lines */ };
#define SLUICE_DRAWS_ANY UINT32_MAX /* user */

enum sluice_draw_kind { SLUICE_DRAW_ESTIMATE, SLUICE_DRAW_JOB, SLUICE_DRAW_BUDGET, SLUICE_DRAW_KINDS };

struct sluice_draw {
    enum sluice_draw_kind kind;
    uint32_t id;                          /* of a user or a job; 0 in a budget's line */
    int32_t watts;                        /* of a GPU */
    char name[SLUICE_RULES_MAX_NAME + 1]; /* of a class or a budget; "" in a job's line */
    int64_t until_s;                      /* of a budget; INT64_MAX: for good */
};

struct sluice_draws {
    struct sluice_listed listed;
    struct sluice_draw lines[]; /* sorted by kind, id and name */
};

/* Read a file's content; needs no terminating zero. On success *draws is the caller's, to be released. Errors: INVALID
 * (`text` says the line), VERSION, CORRUPT, CAPACITY, NO_MEMORY. */
enum sluice_error sluice_draws_parse(const char *data, size_t length, struct sluice_draws **draws,
                                     struct sluice_error_text *text);

/* What is in force, which stays as it is until it is released; NULL before the controller's start, and then nothing is
 * known. */
const struct sluice_draws *sluice_draws_acquire(void);
void sluice_draws_release(const struct sluice_draws *draws);

/* Watts; 0: not known. O(log lines). */
int32_t sluice_draws_estimate(const struct sluice_draws *draws, uint32_t user, const char *class);
int32_t sluice_draws_job(const struct sluice_draws *draws, uint32_t job_id);
/* The line of a budget; NULL: none. */
const struct sluice_draw *sluice_draws_budget(const struct sluice_draws *draws, const char *name);

#endif
