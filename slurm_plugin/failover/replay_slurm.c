/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Replay of the failover journal: what Slurm's own state file did not have yet when the last controller ended.
 *
 * The journal's entries behind the state file's time are folded to one picture a job: was it submitted, where does it
 * run, how did it end. As entries and state are about the same events in the same order, the last entry of a job has
 * its state, however much of it the state file has already.
 *
 * In two steps, both within Slurm's own start and under its locks, before any request is answered:
 *   loaded  job records are there, and nothing has been derived from them: they are edited, as if Slurm had loaded
 *           them so. What Slurm would delete as unknown is moved aside.
 *   ready   nodes, reservations and limits are there, too: jobs that are missing are submitted again by their own id,
 *           and entered where they run. The next job id is raised above all of them.
 * What cannot be settled is written to the log and to replays.jsonl; nothing is guessed.
 */
#include "failover/replay_internal_slurm.h"

#include "runtime/runtime.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "src/common/xmalloc.h"
#include "src/common/xstring.h"
#include "src/slurmctld/state_save.h"

struct replay sluice_replay;
const struct sluice_submission_facts sluice_failover_nothing;

/* ---- the first step ---- */

/* Saved while slurmdbd was asked for the index of its row: nobody asks any more, and until it ends Slurm would let
 * nobody change the job, not even report its end. Asked again, slurmdbd answers with the same row. */
static int forget_asking(void *item, void *argument)
{
    job_record_t *job = item;
    (void)argument;
    if (job->db_index == NO_VAL64 && !IS_JOB_FINISHED(job))
        job->db_index = 0;
    return 0;
}

static void settle_loaded(struct picture *picture)
{
    picture->missing = true;
    sluice_failover_edit(picture);
    if (!picture->missing || picture->state == KNOWN)
        sluice_script_repair(picture);
    else if (picture->submit.length && picture->state != VOID)
        sluice_script_move_aside(picture->job_id);
}

void sluice_failover_loaded(void)
{
    if (sluice_failover_is_writing())
        return;
    sluice_replay.began_us = sluice_wall_us();
    sluice_replay.covered_us = sluice_failover_covered_us();
    if (!sluice_segments_read(sluice_failover_folder(), sluice_pictures_fold, NULL, &sluice_replay.found))
        error("sluice: failover journal: %s: nothing of it is used", sluice_replay.found.problem);
    else if (sluice_replay.found.problem[0])
        error("sluice: failover journal: %s", sluice_replay.found.problem);
    sluice_pictures_sort();
    sluice_failover_restoring(&sluice_failover_nothing); /* what Slurm's hooks report meanwhile is not journalled */
    for (uint32_t i = 0; i < sluice_replay.count; i++)
        if (!sluice_picture_is_last_task(&sluice_replay.items[i]))
            settle_loaded(&sluice_replay.items[i]);
    for (uint32_t i = 0; i < sluice_replay.count; i++)
        if (sluice_picture_is_last_task(&sluice_replay.items[i]))
            settle_loaded(&sluice_replay.items[i]);
    list_for_each(job_list, forget_asking, NULL);
    sluice_failover_restoring(NULL);
    if (sluice_replay.jobs)
        info("sluice: failover journal: %u jobs since the state was saved at %" PRId64, sluice_replay.jobs,
             sluice_replay.covered_us / 1000000);
}

/* ---- the second step ---- */

/* The next job gets that id, or a higher one. */
static void raise_id(uint32_t job_id)
{
    uint32_t first = slurm_conf.first_job_id;
    if (job_id >= slurm_conf.max_job_id)
        return;
    slurm_conf.first_job_id = job_id;
    reset_first_job_id();
    slurm_conf.first_job_id = first;
}

static void report_modifications(const struct picture *picture)
{
    uint32_t uid = 0, size;
    uint16_t version;
    char *what = NULL;
    if (!picture->modifications || picture->state == ENDED)
        return;
    buf_t *buffer = sluice_picture_buffer(&picture->modification);
    if (unpack16(&version, buffer) || unpack32(&uid, buffer) || unpackstr_xmalloc_chooser(&what, &size, buffer))
        what = NULL;
    sluice_failover_unsettled(
        picture->job_id,
        "%u changes were asked for since Slurm's state was saved; whether they took effect is not known, "
        "and they are not repeated. The last: by uid %u, %s",
        picture->modifications, uid, what ? what : "");
    xfree(what);
    free_buf(buffer);
}

static void forget_all(void)
{
    sluice_pictures_free();
    for (int i = 0; i < OUTCOMES; i++)
        xfree(sluice_replay.list[i]);
    free(sluice_replay.found.items);
    memset(&sluice_replay, 0, sizeof sluice_replay);
}

void sluice_failover_ready(int (*recount)(void))
{
    bool changed = false;
    if (!sluice_replay.began_us)
        return;
    sluice_failover_restoring(&sluice_failover_nothing);
    for (uint32_t i = 0; i < sluice_replay.count; i++)
        changed |= sluice_failover_take_in(&sluice_replay.items[i]);
    for (uint32_t i = 0; i < sluice_replay.count; i++)
        changed |= !sluice_picture_is_last_task(&sluice_replay.items[i]) &&
                   sluice_failover_bring_back(&sluice_replay.items[i]);
    for (uint32_t i = 0; i < sluice_replay.count; i++)
        changed |=
            sluice_picture_is_last_task(&sluice_replay.items[i]) && sluice_failover_bring_back(&sluice_replay.items[i]);
    if (changed)
        (void)recount();
    for (uint32_t i = 0; i < sluice_replay.count; i++) {
        job_record_t *job = find_job_record(sluice_replay.items[i].job_id);
        sluice_failover_end_again(&sluice_replay.items[i]);
        if (job && sluice_replay.items[i].state == RUNS)
            sluice_failover_give_batch_step(job);
        report_modifications(&sluice_replay.items[i]);
    }
    sluice_failover_restoring(NULL);
    if (sluice_replay.found.highest_id) /* last: tasks that leave their arrays get their ids from Slurm's sequence */
        raise_id(sluice_replay.found.highest_id + 1);
    if (sluice_replay.jobs || sluice_replay.found.problem[0]) {
        sluice_failover_report();
        last_job_update = time(NULL);
        schedule_job_save();
        info("sluice: failover journal: %u resubmitted, %u restored as running, %u ended, %u requeued, %u not settled",
             sluice_replay.counts[RESUBMITTED], sluice_replay.counts[RESTORED], sluice_replay.counts[ENDINGS],
             sluice_replay.counts[REQUEUES], sluice_replay.counts[UNSETTLED]);
    }
    sluice_failover_open(&sluice_replay.found);
    if (sluice_failover_is_writing())
        sluice_failover_leads();
    forget_all();
}
