/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The processes of a batch job that can be saved as it runs:
 *
 *   slurmstepd
 *     sluice-launch wait     root's; slurmstepd waits for this one, whatever becomes of those below
 *       sluice-launch init   the first of a PID namespace; what is saved and resumed is this one and all below
 *         the batch script
 *
 * A save is asked for by SLUICE_LAUNCH_SAVE, a signal that only Slurm, and so the job's owner and operators, can send.
 */
#ifndef SLUICE_LAUNCH_H
#define SLUICE_LAUNCH_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

enum {
    SLUICE_LAUNCH_SAVE = 62, /* sluice/slurm/control.py has the same number */
    LAUNCH_AGAIN = 75,       /* the helper's exit status where the job may be resumed a moment later; EX_TEMPFAIL */
    LAUNCH_SIGNALLED = 128,  /* init's exit status for a script that a signal has ended, less the signal */
    LAUNCH_NAME_MAX = 16,    /* of a process, with its end */
};

/* The name that init takes before it exits for a script that a signal has ended: only an exit status of 8 bits gets
 * out of a PID namespace. */
#define LAUNCH_ENDED_BY "signal "

struct launch {
    pid_t init; /* as this namespace numbers it */
    int gate; /* to the process that is to become the script: it says how often the job was restarted, and is let go */
    uint32_t job, user;
    const char *helper; /* prolog_epilog/programs/sluice-checkpoint */
};

/* Ends as the script does; never returns. `script`: its number in this namespace, whose first process this is. */
_Noreturn void launch_init(pid_t script);

/* Resumes the job or lets its script begin, then waits; its end is the job's. */
_Noreturn void launch_wait(const struct launch *launch);

/* Puts a process, and its children, into all cgroups of this one; false with errno where one is refused. */
bool launch_join(pid_t pid);

#endif
