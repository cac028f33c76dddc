/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Nodes that an administrator empties (`sluice node empty`): what is asked, ordered and said. Knows no Slurm;
 * choice_slurm.c does what the core (sluice_leave_plan) decides.
 *
 * The order is the reason for which the node is drained, in Slurm's own state:
 *
 *   sluice empty: TEXT
 *   sluice empty by 2026-11-30T03:00:00Z: TEXT
 *
 * `sluice.empty` in StateSaveLocation has nodes of which is asked what would become of their jobs; nothing is done to them.
 *
 *   sluice-empty 1
 *   NODE UNTIL_S DEADLINE_S
 *   checksum = crc32:0123abcd
 *
 * `sluice.emptying` there says what becomes of the jobs on ordered nodes, and of those on nodes that are asked about.
 *
 *   sluice-emptying 1
 *   at NOW_S
 *   node NAME DEADLINE_S order|ask
 *   job JOBID NODE DECISION WHY END_S TO
 *   checksum = crc32:0123abcd
 */
#ifndef SLUICE_PLANNER_EMPTYING_H
#define SLUICE_PLANNER_EMPTYING_H

#include "runtime/runtime.h"
#include "sluice/core.h"

#include <stdbool.h>
#include <stdint.h>

#define SLUICE_EMPTY_FILE "sluice.empty"
#define SLUICE_EMPTYING_FILE "sluice.emptying"

enum { SLUICE_EMPTY_NODE = 65 }; /* bytes of a node's name */

/* Is a node with this drain reason to be emptied? By *deadline_s, since 1970; 0: as soon as it can be. */
bool sluice_empty_ordered(const char *reason, int64_t *deadline_s);

struct sluice_empty_ask {
    int64_t until_s; /* nobody waits for the answer any more */
    int64_t deadline_s;
    char node[SLUICE_EMPTY_NODE];
};

struct sluice_empty_asks {
    struct sluice_listed listed;
    struct sluice_empty_ask items[]; /* by name */
};

/* Read `sluice.empty`; to be released with sluice_listed_release. Errors: sluice_listing_parse's. */
enum sluice_error sluice_empty_asks_parse(const char *data, size_t length, struct sluice_empty_asks **asks,
                                          struct sluice_error_text *text);

struct sluice_emptying_node {
    const char *name;
    int64_t deadline_s;
    bool ordered; /* or only asked about */
};

struct sluice_emptying_job {
    uint32_t job_id;
    const char *node, *to; /* `to` NULL: nowhere */
    int64_t end_s;         /* at the latest; INT64_MAX: no limit */
    enum sluice_leave_decision decision;
    enum sluice_leave_why why;
};

/* What is said. */
struct sluice_emptying {
    int64_t now_s;
    const struct sluice_emptying_node *nodes;
    const struct sluice_emptying_job *jobs;
    uint32_t node_count, job_count;
};

/* Write `sluice.emptying`; whole at any time. False: errno says why. */
bool sluice_emptying_write(const char *path, const struct sluice_emptying *said);

#endif
