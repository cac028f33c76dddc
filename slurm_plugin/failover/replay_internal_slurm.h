/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * What the files of the replay share with no other files: replay_slurm.c (both steps), replay_pictures_slurm.c (the
 * journal, folded to one picture a job), replay_edit_slurm.c (job records that are there), replay_return_slurm.c (those
 * that are missing), replay_scripts_slurm.c (their scripts), replay_outcome_slurm.c (log and report).
 *
 * All of it runs within Slurm's own start, under its locks and before any request is answered: nothing here locks.
 */
#ifndef SLUICE_FAILOVER_REPLAY_INTERNAL_SLURM_H
#define SLUICE_FAILOVER_REPLAY_INTERNAL_SLURM_H

#include "failover/failover_internal_slurm.h"

#include <stdbool.h>
#include <stdint.h>

enum { SLUICE_FAILOVER_PATH = 4400 }; /* room for a path */

/* An entry's payload, kept. */
struct bytes {
    uint8_t *data;
    uint32_t length;
};

/* What the journal says of a job. */
struct picture {
    uint32_t job_id, next; /* next: of the same bucket, as index + 1 */
    struct bytes submit, start, ending, modification;
    enum { KNOWN, VOID, WAITS, RUNS, ENDED, REQUEUED } state;
    uint32_t modifications;
    bool missing, done;
};

enum outcome { RESUBMITTED, RESTORED, ENDINGS, REQUEUES, UNSETTLED, OUTCOMES };

/* The current replay; all zero before the first step and after the second. */
struct replay {
    struct picture *items;
    uint32_t count, room;
    uint32_t *buckets, bucket_count;
    int64_t covered_us;
    uint32_t jobs; /* with entries behind the state's time */
    struct sluice_segments found;
    char *list[OUTCOMES]; /* ids, or for UNSETTLED objects, with commas */
    uint32_t counts[OUTCOMES];
    int64_t began_us;
};
extern struct replay sluice_replay;

/* While it is handed to the hooks, they journal nothing. */
extern const struct sluice_submission_facts sluice_failover_nothing;

/* ---- pictures: what the journal says (replay_pictures_slurm.c) ---- */

/* An entry of the journal, for sluice_segments_read: always true. */
bool sluice_pictures_fold(const struct sluice_journal_entry *entry, void *argument);
/* In the order of the ids, which is that of their making: a start may be journalled before an earlier task's. */
void sluice_pictures_sort(void);
void sluice_pictures_free(void);
/* The job's picture, or NULL; `make`: a new one then. It stays until the next one is made. */
struct picture *sluice_picture_of(uint32_t job_id, bool make);
/* A buffer of Slurm's over a copy of the bytes; the caller's. */
buf_t *sluice_picture_buffer(const struct bytes *bytes);
/* False: none, or damaged. */
bool sluice_picture_ending(const struct picture *job, struct sluice_ending *ending);
bool sluice_picture_start(const struct picture *job, struct sluice_start *start);
/* Which task of which array its start or end was; task NO_VAL: none. */
void sluice_picture_task(const struct picture *picture, uint32_t *array_id, uint32_t *task_id);
/* The last task to leave an array's record keeps it, with the array's id: it comes after all the others. */
bool sluice_picture_is_last_task(const struct picture *picture);
/* The request as it was taken in, Slurm's memory; NULL: damaged. Texts in `facts` are Slurm's memory either way. */
job_desc_msg_t *sluice_picture_request(const struct picture *picture, struct sluice_submission_facts *facts);

/* ---- its outcome (replay_outcome_slurm.c) ---- */

void sluice_failover_note(enum outcome outcome, uint32_t job_id);
/* What could not be settled, and why: for the log and the report. */
__attribute__((format(printf, 2, 3))) void sluice_failover_unsettled(uint32_t job_id, const char *format, ...);
/* A line of replays.jsonl, durable, and the counters of the status. */
void sluice_failover_report(void);

/* ---- scripts and environments in StateSaveLocation (replay_scripts_slurm.c) ---- */

/* The folder of a missing job's script: Slurm would delete it, and could not make it again while it is there. */
void sluice_script_move_aside(uint32_t job_id);
/* Scripts moved aside are not needed once their jobs are back. */
void sluice_script_forget_aside(uint32_t job_id);
/*
 * Slurm syncs its state, but not a job's script and environment: after a power cut they may be empty, which ends
 * slurmctld when it launches the job. They are written again from the job's submission.
 */
void sluice_script_repair(const struct picture *picture);

/* ---- job records that are there (replay_edit_slurm.c) ---- */

/* Bring a job record that is there to what the journal says; nothing is derived from it yet. */
void sluice_failover_edit(struct picture *picture);
/* The job's record, or that of the array that it was a task of, made its own. NULL: there is none. */
job_record_t *sluice_failover_record(const struct picture *picture);
/* Its record as that of a job that runs, as the journal has it; false: damaged, which is reported. */
bool sluice_failover_make_running(job_record_t *job, const struct picture *picture);
void sluice_failover_make_ended(job_record_t *job, const struct sluice_ending *ending);
/* A requeued job does not start again while nodes may still know the credential of what ran of it, as Slurm does it. */
void sluice_failover_wait_for_nodes(job_record_t *job, const struct sluice_ending *ending);

/* ---- job records that are missing (replay_return_slurm.c) ---- */

/* What is missing is there again, as it was when it was submitted. True: something has changed. */
bool sluice_failover_take_in(struct picture *picture);
/* A job that was missing: to where it was. True: something has changed. */
bool sluice_failover_bring_back(struct picture *picture);
/* A job that was restored, and has ended: its nodes are asked to end it, as something of it may be left there. */
void sluice_failover_end_again(struct picture *picture);
/* Slurm sees a batch script's end by its step. */
void sluice_failover_give_batch_step(job_record_t *job);

#endif
