/* SPDX-License-Identifier: Apache-2.0 */
/* The process that slurmstepd waits for. It is root's, so that nobody but Slurm can signal it, and keeps nothing open:
 * what is saved below it does not hang on it. */
#include "launch.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    ANSWER_MAX = 64,
    RESUMES_MAX = 4, /* tries: the agent allows two of CRIU, the others are for helpers that are killed */
    RESUME_PAUSE_S = 1,
};

static struct {
    const struct launch *launch;
    uint32_t restarts; /* of the job before this run; 0: there can be nothing to resume */
    pid_t init, saver; /* 0: none is running */
    bool saved;        /* its processes are gone, and the job is about to be requeued */
} now;

static _Noreturn void die_of(int number)
{
    sigset_t one;
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    signal(number, SIG_DFL);
    sigemptyset(&one);
    sigaddset(&one, number);
    sigprocmask(SIG_UNBLOCK, &one, NULL);
    kill(getpid(), number);
    _exit(LAUNCH_SIGNALLED + number);
}

/* What the helper does for this job; its standard output goes to `output`. */
static pid_t start_helper(const char *act, int output)
{
    const struct launch *launch = now.launch;
    char variables[4][48], *environment[5] = {NULL};
    snprintf(variables[0], sizeof variables[0], "SLUICE_JOB=%" PRIu32, launch->job);
    snprintf(variables[1], sizeof variables[1], "SLUICE_UID=%" PRIu32, launch->user);
    snprintf(variables[2], sizeof variables[2], "SLUICE_RESTARTS=%" PRIu32, now.restarts);
    snprintf(variables[3], sizeof variables[3], "SLUICE_INIT=%d", (int)now.init);
    for (size_t i = 0; i < 4; i++)
        environment[i] = variables[i];
    pid_t pid = fork();
    if (pid != 0)
        return pid < 0 ? 0 : pid;
    char *const words[] = {(char *)launch->helper, (char *)act, NULL};
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (output >= 0)
        dup2(output, STDOUT_FILENO);
    execve(launch->helper, words, environment);
    _exit(127);
}

/* The first process of what was saved, running again; 0: there is nothing, or it could not be resumed. `again`: it may
 * be the next time. */
static pid_t try_to_resume(bool *again)
{
    int ends[2], status = -1, found = 0;
    char answer[ANSWER_MAX] = "";
    size_t used = 0;
    *again = false;
    if (pipe2(ends, O_CLOEXEC) != 0)
        return 0;
    pid_t helper = start_helper("resume", ends[1]);
    close(ends[1]);
    for (ssize_t got; helper && used < sizeof answer - 1; used += (size_t)got)
        if ((got = read(ends[0], answer + used, sizeof answer - 1 - used)) <= 0)
            break;
    close(ends[0]);
    if (helper)
        waitpid(helper, &status, 0);
    *again = helper && (WIFSIGNALED(status) || (WIFEXITED(status) && WEXITSTATUS(status) == LAUNCH_AGAIN));
    /* It is a child of this process: the helper that started it has ended. */
    if (status != 0 || sscanf(answer, "resumed %d", &found) != 1 || found <= 1)
        return 0;
    return found;
}

/* 0: there is none but init. */
static pid_t other_child(void)
{
    char path[64];
    int child, found = 0;
    snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)getpid());
    FILE *children = fopen(path, "re");
    if (!children) /* what is not seen may go on next to what is started: the job fails */
        _exit(1);
    while (!found && fscanf(children, "%d", &child) == 1)
        found = child != now.init ? child : 0;
    fclose(children);
    return found;
}

/* What could not be resumed, CRIU, and a helper's that did not come to its end, whose children become this process's.
 * The first process of a PID namespace has ended when all of it has. */
static void end_others(void)
{
    for (pid_t child; (child = other_child());) {
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
    }
}

static pid_t resume(void)
{
    bool again = true;
    for (int tries = 0; again && tries < RESUMES_MAX; tries++) {
        if (tries > 0)
            sleep(RESUME_PAUSE_S);
        pid_t found = try_to_resume(&again);
        if (found)
            return found;
        end_others();
    }
    return 0;
}

static _Noreturn void end_as_init(const char *name, int status)
{
    int number = 0;
    if (WIFSIGNALED(status))
        die_of(WTERMSIG(status));
    if (sscanf(name, LAUNCH_ENDED_BY "%d", &number) == 1 && WEXITSTATUS(status) == LAUNCH_SIGNALLED + number)
        die_of(number);
    _exit(WEXITSTATUS(status));
}

static void read_name(pid_t pid, char name[LAUNCH_NAME_MAX])
{
    char path[32];
    snprintf(path, sizeof path, "/proc/%d/comm", (int)pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = file < 0 ? 0 : read(file, name, LAUNCH_NAME_MAX - 1);
    name[length > 0 ? length : 0] = '\0';
    if (file >= 0)
        close(file);
}

/* The end of the helper that saves: either the job is saved, and waits here until Slurm ends this run of it, or goes
 * on. A helper that was killed does not know: the agent may be about to end what it has saved, and is asked again. */
static void save_ended(int status)
{
    now.saver = WIFSIGNALED(status) ? start_helper("save", -1) : 0;
    if (now.saver)
        return;
    now.saved = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    if (!now.saved)
        kill(now.init, SIGCONT);
}

static void look_at_children(void)
{
    char name[LAUNCH_NAME_MAX];
    int status = 0;
    if (now.saver && waitpid(now.saver, &status, WNOHANG) == now.saver)
        save_ended(status);
    if (now.saver) /* the job was saved and ended, or died: the helper knows */
        return;
    for (siginfo_t ended = {0}; waitid(P_ALL, 0, &ended, WEXITED | WNOHANG | WNOWAIT) == 0 && ended.si_pid;
         ended = (siginfo_t){0}) {
        read_name(ended.si_pid, name);
        waitpid(ended.si_pid, &status, 0);
        if (ended.si_pid == now.init && !now.saved)
            end_as_init(name, status);
    }
}

static void pass_on(int number)
{
    if (now.saved) {
        if (number != SIGCONT && number != SLUICE_LAUNCH_SAVE)
            die_of(number);
    } else if (number != SLUICE_LAUNCH_SAVE)
        kill(now.init, number);
    else if (!now.saver)
        now.saver = start_helper("save", -1);
}

/* Only now is this process in the job's cgroups: slurmstepd lets its tasks go when it has put it there. */
static void begin(void)
{
    const char byte = 0;
    if (read(now.launch->gate, &now.restarts, sizeof now.restarts) != sizeof now.restarts)
        return; /* it has ended before */
    if (!launch_join(now.init))
        _exit(1);
    pid_t resumed = now.restarts ? resume() : 0;
    if (resumed) {
        kill(now.init, SIGKILL);
        waitpid(now.init, NULL, 0);
        now.init = resumed;
        return;
    }
    if (write(now.launch->gate, &byte, 1) != 1)
        kill(now.init, SIGKILL);
}

void launch_wait(const struct launch *launch)
{
    sigset_t all;
    now.launch = launch;
    fcntl(launch->gate, F_SETFD, FD_CLOEXEC);
    now.init = launch->init;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    begin();
    close(launch->gate);
    for (;;) {
        look_at_children();
        int number = sigwaitinfo(&all, NULL);
        if (number > 0 && number != SIGCHLD)
            pass_on(number);
    }
}
