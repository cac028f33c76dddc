/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The first process of a job's PID namespace: it passes signals on to the script, and ends as the script does. It is part
 * of what is saved, and therefore has no open files.
 *
 * It is root's: CRIU finds the namespace's processes only with a /proc that the first of them mounts for a moment.
 */
#include "launch.h"

#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static void end_as(int status)
{
    char name[LAUNCH_NAME_MAX];
    if (WIFEXITED(status))
        _exit(WEXITSTATUS(status));
    snprintf(name, sizeof name, LAUNCH_ENDED_BY "%d", WTERMSIG(status));
    prctl(PR_SET_NAME, name);
    _exit(LAUNCH_SIGNALLED + WTERMSIG(status));
}

static void reap(pid_t script)
{
    int status;
    for (pid_t ended; (ended = waitpid(-1, &status, WNOHANG)) > 0;)
        if (ended == script)
            end_as(status);
}

void launch_init(pid_t script)
{
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    for (;;) {
        reap(script);
        int number = sigwaitinfo(&all, NULL);
        if (number == SIGCONT) /* all of the job was stopped while it was saved */
            kill(-1, SIGCONT);
        else if (number > 0 && number != SIGCHLD)
            kill(script, number);
    }
}
