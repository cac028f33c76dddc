/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The failover journal inside slurmctld: what the plugins' hooks pass to it, and what is done with it at the next
 * start.
 *
 * All hooks run under slurmctld's job write lock, before the requester is answered. They pass an entry to the writer's
 * thread (journal/journal.h) and wait for it for a bounded time: the one exception to the rule that nothing here makes
 * slurmctld wait. Off (policy `journal = no`, the default, or level off) each returns at once.
 *
 *   burst_buffer  bb_p_job_validate, bb_p_job_validate2: a submission; the request as Slurm has completed it
 *                 bb_p_job_start_stage_out, bb_p_job_cancel: an end, a cancellation, a requeue
 *   prep          prep_p_prolog_slurmctld: a start; nothing of the job runs before its entry is durable
 *   job_submit    job_modify: what a user asked to change; reported after a failover, never repeated
 *   select        select_p_job_init, select_p_reconfigure: replay
 *
 * Slurm's own state file covers an entry when the time in its header is later; segments whose entries are all covered
 * are removed.
 */
#ifndef SLUICE_FAILOVER_FAILOVER_H
#define SLUICE_FAILOVER_FAILOVER_H

#include "failover/end_notice.h"
#include "failover/fence.h"

#include <stdbool.h>
#include <stdint.h>

struct job_record;
struct job_descriptor;

/* Weak: what job_submit calls, which is also built without Slurm's sources; then NULL. */

/* What continues for a job once its start is durable. */
struct sluice_failover_prolog {
    bool (*go)(struct job_record *job);                        /* the site's own prolog; true: in the background */
    void (*done)(int status, uint32_t job_id, bool timed_out); /* the prolog has ended */
};

/* The request of a submission that follows in this thread. */
void sluice_failover_request(struct job_descriptor *wanted);
/* It was accepted as `job`. Returns Slurm's error number, with a text for the submitter in *text (Slurm's memory), if
 * it has to be refused because it could not be journalled. */
int sluice_failover_submitted(struct job_record *job, char **text);
/* A job, or what ran of it, has ended; its state says how. */
void sluice_failover_ended(struct job_record *job);
/* Whether the requeue of a job would be durable before its nodes hear of it: the journal is written, without error
 * and in time, and this controller leads. */
bool sluice_failover_keeps_requeues(void);
/* What this thread ends is waited for, up to the policy's `journal-wait-ms` each, whatever others have waited. The
 * caller bounds their number. */
void sluice_failover_wait_for_all(bool all);
/* It has nodes. True: the prolog continues in the background once that is durable. */
bool sluice_failover_started(struct job_record *job, const struct sluice_failover_prolog *prolog);
/* A user asked to change it. */
__attribute__((weak)) void sluice_failover_modified(uint32_t job_id, uint32_t uid, const char *what);
/* How many components the heterogeneous job has whose request this thread handles; 0: it is not heterogeneous. */
__attribute__((weak)) void sluice_failover_components(uint32_t count);

/* Job state is loaded, nothing has been derived from it yet: change the loaded job records to what the journal says. */
void sluice_failover_loaded(void);
/* All else is loaded, too: restore what is missing. `recount` makes Slurm count again who uses what. */
void sluice_failover_ready(int (*recount)(void));

/* The plugin that passes on submissions and ends is loaded, or unloaded; `named`: BurstBufferType names it. */
void sluice_failover_adapter(bool loaded, bool named);
/* slurm.conf has been read again: if BurstBufferType no longer names the plugin, it stays until slurmctld's next start,
 * as in Slurm, which would report the reconfiguration as failed. */
void sluice_failover_reconfigured(void);

#endif
