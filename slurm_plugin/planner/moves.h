/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Running jobs that are moved to make room for one that waits: what became of each move, and what comes next. Knows no
 * Slurm and no clock; moves_slurm.c does what is decided here.
 *
 * One plan of moves is under way at a time. Its jobs are asked to save, all of them (ASKED); when all have, all are
 * requeued (LEFT), and each is BACK when it runs again. If one does not save in time, or the job that waits no longer
 * does, all of them have STAYED, and nothing was moved.
 *
 * Jobs are moved to empty a node as well: for no job (FOR_JOBID 0), as long as the node is to be emptied.
 *
 * `sluice.moves` in StateSaveLocation has them, so that a controller that takes over goes on where the last one was, and
 * `sluice explain` can tell. It is written before anything is done.
 *
 *   sluice-moves 1
 *   JOBID FOR_JOBID STAGE STARTED_S ASKED_S SAVED_S LEFT_S BACK_S FROM TO ROOM WHY [LOSE_S INSTEAD_S]
 *   checksum = crc32:0123abcd      of all bytes before this line
 */
#ifndef SLUICE_PLANNER_MOVES_H
#define SLUICE_PLANNER_MOVES_H

#include "sluice/core.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SLUICE_MOVES_FILE "sluice.moves"
#define SLUICE_MOVES_MOST_S (INT64_C(1) << 40) /* of all numbers of seconds there */

enum {
    SLUICE_MOVES_MAX = 4096,   /* that are remembered */
    SLUICE_MOVES_NODE = 65,    /* bytes of a node's name */
    SLUICE_MOVES_ROOM = 256,   /* bytes of a list of nodes, as n[1-4]; no room is made on nodes whose list is longer */
    SLUICE_MOVES_AGAIN_S = 60, /* no others are asked for a job so long after some were and stayed */
    SLUICE_MOVES_KEEP_S = 300, /* the room that was made is kept for so long after the jobs have left */
};

/* Append only: the file has their names. */
enum sluice_move_stage {
    SLUICE_MOVE_ASKED = 0,  /* to save; it runs */
    SLUICE_MOVE_LEFT = 1,   /* saved, and requeued */
    SLUICE_MOVE_BACK = 2,   /* runs again */
    SLUICE_MOVE_STAYED = 3, /* was not moved: `why` */
    SLUICE_MOVE_GONE = 4,   /* ended before it ran again */
};
enum { SLUICE_MOVE_STAGES = 5 };

/* Why a job was not moved. Append only: the file has their names. */
enum sluice_move_why {
    SLUICE_MOVE_WHY_NONE = 0,
    SLUICE_MOVE_WHY_UNSAVED = 1, /* it did not save in time */
    SLUICE_MOVE_WHY_OTHER = 2,   /* another job of the plan was not moved */
    SLUICE_MOVE_WHY_WAITS = 3,   /* the job for which room was made does not wait any more, or the node may stay */
    SLUICE_MOVE_WHY_CHANGED = 4, /* the places are no longer free, or a job has ended */
    SLUICE_MOVE_WHY_REFUSED = 5, /* Slurm did not requeue it */
};
enum { SLUICE_MOVE_WHYS = 6 };

/* Times are seconds since 1970, 0: not yet. */
struct sluice_job_move {
    uint32_t job_id, for_job; /* for_job 0: to empty `room` */
    enum sluice_move_stage stage;
    enum sluice_move_why why;
    int64_t started_s; /* the run that is moved */
    int64_t asked_s, saved_s, left_s, back_s;
    /* GPU-seconds, at most SLUICE_MOVES_MOST_S: that all moves of the plan lose, and that preempting for for_job would
     * have lost; instead_s 0: nobody would have been preempted, and lose_s is not known */
    int64_t lose_s, instead_s;
    char from[SLUICE_MOVES_NODE], to[SLUICE_MOVES_NODE]; /* nodes */
    char room[SLUICE_MOVES_ROOM];                        /* the nodes where room is made */
};

/* The oldest first; those of the plan that is under way, at most SLUICE_COMPACTION_MAX_MOVES, are ASKED or LEFT. All
 * zero: none. */
struct sluice_moves {
    struct sluice_job_move *items;
    uint32_t count, room;
};

void sluice_moves_free(struct sluice_moves *moves);
/* One more; the oldest that is not under way goes where there are too many. False: no memory. */
bool sluice_moves_add(struct sluice_moves *moves, const struct sluice_job_move *move);

/* Read a file's content, which needs no terminating zero. On failure *moves is as it was. Errors: INVALID (`text` says
 * the line), VERSION, CORRUPT, CAPACITY, NO_MEMORY. */
enum sluice_error sluice_moves_parse(const char *data, size_t length, struct sluice_moves *moves,
                                     struct sluice_error_text *text);
/* The file; no file: none. Errors: also FAILED, which `text` explains. */
enum sluice_error sluice_moves_read(const char *path, struct sluice_moves *moves, struct sluice_error_text *text);
/* Durable when it returns, and whole at any time. False: errno says why. */
bool sluice_moves_write(const char *path, const struct sluice_moves *moves);

bool sluice_move_is_open(const struct sluice_job_move *move);
/* Of the plan under way; NULL: there is none. */
const struct sluice_job_move *sluice_moves_open(const struct sluice_moves *moves);
/* The job's move that is under way; NULL: none. */
const struct sluice_job_move *sluice_moves_of(const struct sluice_moves *moves, uint32_t job_id);

/* How many are under way for a job. */
uint32_t sluice_moves_for(const struct sluice_moves *moves, uint32_t for_job);

/* How many more may be moved now, if `most` are within an hour. */
uint32_t sluice_moves_left(const struct sluice_moves *moves, uint32_t most, int64_t now_s);
/* May a job be moved that runs since started_s? Not if it was `most` times, nor if it did not save in this run. */
bool sluice_moves_may(const struct sluice_moves *moves, uint32_t job_id, int64_t started_s, uint32_t most);

/* Were others asked for the job lately, and stayed? O(moves). */
bool sluice_moves_failed(const struct sluice_moves *moves, uint32_t for_job, int64_t now_s);

/* What Slurm shows of a job on its way. */
struct sluice_move_job {
    bool there;   /* it waits or runs */
    bool runs;    /* since started_s */
    bool movable; /* ... and could be moved, as far as is known: after a start of slurmctld that takes some time */
    int64_t started_s, saved_s;
};

/* What else is known. */
struct sluice_move_view {
    int64_t now_s;
    uint32_t save_s; /* that a job has to save */
    bool waits;      /* the job for which room is made could still start, or the node is still to be emptied */
};

/*
 * A look at the plan under way: moves that are through, in vain or done get their stage. `jobs`: by index in `moves`;
 * those that are not under way do not count. *changed: something was. True: all have saved, and may leave now; where
 * they cannot for half a minute, they stay. O(moves).
 */
bool sluice_moves_follow(struct sluice_moves *moves, const struct sluice_move_job *jobs,
                         const struct sluice_move_view *view, bool *changed);
/* All that are only asked have stayed. */
void sluice_moves_give_up(struct sluice_moves *moves, enum sluice_move_why why);
/* All that are asked have left. */
void sluice_moves_leave(struct sluice_moves *moves, int64_t now_s);

/* Is the room still kept? */
bool sluice_moves_keep(const struct sluice_job_move *open, int64_t now_s);

#endif
