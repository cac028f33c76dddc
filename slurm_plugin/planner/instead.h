/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Moves instead of preemption: what the placement hook and the planner tell each other of a waiting job that may preempt
 * others. Knows no Slurm and no clock.
 *
 * The hook knows whom the job would preempt, and what they lose (sluice/loss.h); the planner knows which moves make the
 * same room. So the hook holds the preemption back and asks (LOOK), and the planner answers: jobs are being moved for it
 * (MOVES), which costs less by the policy's factor, or the job may preempt (PREEMPT). Each of these has an end: where there
 * is no answer in time, and where moves fail or take too long, the job preempts as it would have before.
 *
 * Threads: everything here may be called from any thread. It is kept in memory alone: after a start of slurmctld the hook
 * asks again, and the planner goes on with the moves that are under way.
 */
#ifndef SLUICE_PLANNER_INSTEAD_H
#define SLUICE_PLANNER_INSTEAD_H

#include <stdbool.h>
#include <stdint.h>

enum {
    SLUICE_INSTEAD_MOST = 64,   /* jobs; others preempt at once */
    SLUICE_INSTEAD_LOOK_S = 10, /* for an answer */
    SLUICE_INSTEAD_AGAIN_S =
        60, /* the job is not held back again so long after the hook has heard that it may preempt ... */
    SLUICE_INSTEAD_UNHEARD_S = 4 * 3600, /* ... nor before, for so long: passes of Slurm's may be 3 hours apart */
    SLUICE_INSTEAD_OPEN_S = 30,          /* the planner is asked so long after it said that it looks */
};

enum sluice_instead_state {
    SLUICE_INSTEAD_NONE = 0, /* nothing is known of the job */
    SLUICE_INSTEAD_LOOK = 1,
    SLUICE_INSTEAD_MOVES = 2,
    SLUICE_INSTEAD_PREEMPT = 3,
};

/* Losses are thousandths of a GPU-second. */
struct sluice_instead {
    uint32_t job_id; /* which waits */
    enum sluice_instead_state state;
    bool heard;           /* PREEMPT: the hook has asked since */
    bool preempts;        /* PREEMPT: others have been asked to end */
    int64_t victims_lose; /* if it preempts */
    int64_t moves_lose;   /* MOVES: all of them */
    int64_t until_s;      /* the state's end */
};

/* ---- the hook ---- */

/* The job would preempt others now, who lose so much: is it to wait? *asked: the planner is to look, and is to be woken. */
bool sluice_instead_hold(uint32_t job_id, int64_t victims_lose, int64_t now_s, bool *asked);
/* It has asked others to end. */
void sluice_instead_preempts(uint32_t job_id, int64_t victims_lose, int64_t now_s);

/* ---- the planner ---- */

/* Does it look for moves? Where it does not, or has not said so of late, nobody is held back. */
void sluice_instead_open(bool open, int64_t now_s);
/* The jobs in a state; `jobs` has room for SLUICE_INSTEAD_MOST. Returns how many. */
uint32_t sluice_instead_list(struct sluice_instead *jobs, enum sluice_instead_state state, int64_t now_s);
/* The answer, MOVES or PREEMPT; until_s: of MOVES. */
void sluice_instead_answer(uint32_t job_id, enum sluice_instead_state state, int64_t moves_lose, int64_t now_s,
                           int64_t until_s);
/* No moves for it are under way any more: it may preempt, if it still has to. */
void sluice_instead_moved(uint32_t job_id, int64_t now_s);
/* It does not wait any more. */
void sluice_instead_gone(uint32_t job_id, int64_t now_s);
/* What is known of a job; NONE where its state is over. */
struct sluice_instead sluice_instead_of(uint32_t job_id, int64_t now_s);

/* All is forgotten; for tests and the end. */
void sluice_instead_forget(void);

#endif
