/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A node's report of a batch job that ended while no controller received its end (prolog_epilog/end_notices.py): the text of
 * an administrator's comment on the job, which job_submit/sluice intercepts before Slurm sees it.
 *
 *   sluice-ended 1 JOB RESTARTS UID STATUS TIME NODE
 *
 * All decimal but NODE: which job, how often it had been requeued before it ran, whose it is, the batch script's wait
 * status, when it ended (seconds since 1970), and the node that ran the script.
 */
#ifndef SLUICE_FAILOVER_END_NOTICE_H
#define SLUICE_FAILOVER_END_NOTICE_H

#include <stdbool.h>
#include <stdint.h>

enum { SLUICE_END_NOTICE_NODE = 256 }; /* bytes of a node's name, its end included */

struct sluice_end_notice {
    uint32_t job, restarts, uid, status;
    int64_t ended;
    char node[SLUICE_END_NOTICE_NODE];
};

/* Whether a comment is meant for this, well-formed or not. */
bool sluice_is_end_notice(const char *comment);
/* False: it is not well-formed. */
bool sluice_end_notice_parse(const char *comment, struct sluice_end_notice *notice);

struct job_record;

/*
 * Ends `job` as its slurmstepd would have done, when it is the very run that `comment` is about: still running, on that
 * node, of that user, as often requeued. Under slurmctld's job and node write locks. The answer is always one of
 * Slurm's errors, so that the change that brought it has no other effect: ESLURM_ALREADY_DONE when the job has ended,
 * by this or before; ESLURM_NOT_SUPPORTED without a journal. `uid` asks: root or SlurmUser.
 *
 * Weak, as job_submit is also built without Slurm's sources: then NULL.
 */
__attribute__((weak)) int sluice_end_notice_apply(struct job_record *job, const char *comment, uint32_t uid);

#endif
