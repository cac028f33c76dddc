/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a node tells about a batch job that ended while no controller took its end (prolog_epilog/ends.py): the text of
 * an administrator's comment on the job, which job_submit/sluice takes for itself before Slurm sees it.
 *
 *   sluice-ended 1 JOB RESTARTS UID STATUS TIME NODE
 *
 * All decimal but NODE: which job, how often it had been requeued before it ran, whose it is, the batch script's wait
 * status, when it ended (seconds since 1970), and the node that ran the script.
 */
#ifndef SLUICE_JOURNAL_TOLD_H
#define SLUICE_JOURNAL_TOLD_H

#include <stdbool.h>
#include <stdint.h>

enum { SLUICE_TOLD_NODE = 256 }; /* bytes of a node's name, its end included */

struct sluice_told {
    uint32_t job, restarts, uid, status;
    int64_t ended;
    char node[SLUICE_TOLD_NODE];
};

/* Whether a comment is meant for this, well-formed or not. */
bool sluice_told_is(const char *comment);
/* False: it is not well-formed. */
bool sluice_told_read(const char *comment, struct sluice_told *told);

#endif
