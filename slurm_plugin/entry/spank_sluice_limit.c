/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * On a node: holds the tasks of a job with GPUs to what was granted. As root, in the process that becomes the task, it
 * asks the node agent through a helper program; where the job has a region of limits it gives the task a mount
 * namespace of its own, in which the region is at SLUICE_LIMIT_JOB and /etc/ld.so.preload names the limiting library,
 * whatever the task's environment says. No answer, no task.
 *
 * Batch scripts with --checkpoint=system are started below the program sluice-launch, where it is next to the helper
 * and the node agent can save them.
 *
 * plugstack.conf: required spank_sluice_limit.so [helper=PATH]
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "entry/freezer.h"
#include "entry/launch.h"

#include "rules/rules.h"
#include "runtime/runtime.h"
#include "sluice/limit.h"

#include <slurm/slurm.h>
#include <slurm/spank.h>

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

SPANK_PLUGIN(sluice_limit, 1)

#define HELPER "/usr/libexec/sluice/sluice-task-init"
#define RUN "/run/sluice"
#define PRELOAD RUN "/preload" /* the agent's */
#define TARGET "/etc/ld.so.preload"
#define READY RUN "/checkpoint" /* the agent's: it can save jobs */

enum {
    ANSWER_MAX = 1024,
    VALUE_MAX = 4096,
    HELPER_MS = 90 * 1000, /* longer than the helper waits for the agent */
    JOBS_OWN_FAULT = 3,    /* the helper's exit status (prolog_epilog/programs/node_program.py) */
    REQUEUE_MS = 3 * 1000, /* until the agent has requeued such a job; one that ends before would be FAILED */
};

/* Of Linux 5.2, on all architectures; glibc has them since 2.36. */
enum { OPEN_TREE = 428, MOVE_MOUNT = 429, TREE_CLONE = 1, TREE_RECURSIVE = 0x8000, MOVE_OF_FILE = 4 };

static bool is_whole_job(uint32_t step)
{
    return step == SLURM_BATCH_SCRIPT || step == SLURM_INTERACTIVE_STEP;
}

static const char *helper_path(int argument_count, char *arguments[])
{
    for (int i = 0; i < argument_count; i++)
        if (strncmp(arguments[i], "helper=", 7) == 0)
            return arguments[i] + 7;
    return HELPER;
}

/* Waits until there is something to read, or the other side has closed; false at `end`. */
static bool await(int file, int64_t end)
{
    struct pollfd waiting = {.fd = file, .events = POLLIN};
    for (int64_t left; (left = end - sluice_clock_us(CLOCK_MONOTONIC) / 1000) > 0;) {
        int ready = poll(&waiting, 1, (int)left);
        if (ready > 0 || (ready < 0 && errno != EINTR))
            return true;
    }
    return false;
}

/* Runs the helper with nothing of the job's environment; its output, cut at `size`. Its exit status, -1 for none. */
static int ask(const char *helper, char *const environment[], char *answer, size_t size)
{
    int ends[2], status = -1;
    size_t used = 0;
    int64_t end = sluice_clock_us(CLOCK_MONOTONIC) / 1000 + HELPER_MS;
    answer[0] = '\0';
    if (pipe2(ends, O_CLOEXEC) != 0)
        return -1;
    pid_t pid = fork();
    if (pid == 0) {
        char *const arguments[] = {(char *)helper, NULL};
        dup2(ends[1], STDOUT_FILENO);
        dup2(ends[1], STDERR_FILENO);
        execve(helper, arguments, environment);
        dprintf(STDOUT_FILENO, "%s: %s\n", helper, strerror(errno));
        _exit(127);
    }
    close(ends[1]);
    while (pid > 0 && used < size - 1) {
        if (!await(ends[0], end)) {
            kill(pid, SIGKILL);
            break;
        }
        ssize_t got = read(ends[0], answer + used, size - 1 - used);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        used += (size_t)got;
    }
    close(ends[0]);
    answer[used] = '\0';
    answer[strcspn(answer, "\n")] = '\0';
    while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    return pid > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static bool place(const char *source, const char *target)
{
    if (mount(source, target, NULL, MS_BIND, NULL) == 0)
        return true;
    slurm_error("sluice: %s cannot be put at %s: %s; the task is not started", source, target, strerror(errno));
    return false;
}

static bool is_same(int one, int other)
{
    struct stat first, second;
    return fstat(one, &first) == 0 && fstat(other, &second) == 0 && first.st_ino == second.st_ino;
}

struct visit {
    int other, copy, error;
};

static int copy_run_there(void *argument)
{
    struct visit *visit = argument;
    if (setns(visit->other, CLONE_NEWNS) == 0)
        visit->copy = (int)syscall(OPEN_TREE, AT_FDCWD, RUN, TREE_CLONE | TREE_RECURSIVE | O_CLOEXEC);
    visit->error = errno;
    return 0;
}

/*
 * What is mounted at RUN in another mount namespace; -1 with errno. A child that shares this process's open files goes
 * there: this one would lose its working directory, to which root cannot go back where it is a user's own, on NFS.
 */
static int copy_run(int other)
{
    static _Alignas(16) char stack[64 * 1024];
    struct visit visit = {.other = other, .copy = -1};
    pid_t pid = clone(copy_run_there, stack + sizeof stack, CLONE_FILES | CLONE_VM | CLONE_VFORK | SIGCHLD, &visit);
    if (pid < 0)
        return -1;
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
        ;
    errno = visit.error;
    return visit.copy;
}

/* What is mounted for the task is visible only to the task, and what the node mounts is visible to the task, too. */
static bool show_run(int copy)
{
    return syscall(MOVE_MOUNT, copy, "", AT_FDCWD, RUN, MOVE_OF_FILE) == 0 &&
           mount(NULL, RUN, NULL, MS_REC | MS_SLAVE, NULL) == 0;
}

/*
 * A namespace that Slurm made for the job (job_container/tmpfs) is older than what the agent has mounted for it: there
 * the task gets RUN of slurmstepd's namespace, which is the node's.
 */
static bool make_namespace(void)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/ns/mnt", (int)getppid());
    int here = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC), nodes = open(path, O_RDONLY | O_CLOEXEC), run = -1;
    bool same = is_same(here, nodes);
    bool done = (same || (run = copy_run(nodes)) >= 0) && unshare(CLONE_NEWNS) == 0 &&
                mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) == 0 && (same || show_run(run));
    if (!done)
        slurm_error("sluice: no mount namespace for the task: %s; it is not started", strerror(errno));
    const int files[] = {here, nodes, run};
    for (size_t i = 0; i < 3; i++)
        if (files[i] >= 0)
            close(files[i]);
    return done;
}

static int limit_task(const char *region)
{
    bool done = make_namespace() && place(region, SLUICE_LIMIT_JOB) && place(PRELOAD, TARGET);
    return done ? ESPANK_SUCCESS : -1;
}

/* A job that the signal to save ends could not be resumed. */
static void ignore_save(const char *why)
{
    slurm_info("sluice: this node cannot save the job as it runs: %s", why);
    signal(SLUICE_SAVE_SIGNAL, SIG_IGN);
}

static int launch(spank_t spank, const char *other)
{
    char program[VALUE_MAX], helper[VALUE_MAX];
    const char *name = strrchr(other, '/');
    int folder = name ? (int)(name - other) : 0;
    snprintf(program, sizeof program, "%.*s/sluice-launch", folder, other);
    snprintf(helper, sizeof helper, "%.*s/sluice-checkpoint", folder, other);
    if (access(READY, F_OK) == 0 && access(program, X_OK) == 0)
        return launch_split(spank, program, helper);
    ignore_save(READY " or sluice-launch is missing");
    return ESPANK_SUCCESS;
}

int slurm_spank_task_init(spank_t spank, int argument_count, char *arguments[])
{
    (void)argument_count;
    (void)arguments;
    return spank_remote(spank) ? launch_begin(spank) : ESPANK_SUCCESS;
}

int slurm_spank_task_init_privileged(spank_t spank, int argument_count, char *arguments[])
{
    uint32_t job = 0, step = 0;
    uid_t user = 0;
    char gpus[VALUE_MAX] = "", shards[32] = "", answer[ANSWER_MAX];
    if (!spank_remote(spank))
        return ESPANK_SUCCESS;
    if (spank_get_item(spank, S_JOB_ID, &job) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_JOB_STEPID, &step) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_JOB_UID, &user) != ESPANK_SUCCESS) {
        slurm_error("sluice: Slurm does not give this task's job, step and user; the task is not started");
        return -1;
    }
    freezer_take_steps(job, user);
    /*
     * slurmstepd sets or removes these after it has read the user's environment; for a job with whole GPUs it leaves
     * SLURM_SHARDS_ON_NODE as the user set it (GRES_INTERNAL_FLAG_PROTECT_ENV), which can only lower the user's own
     * limit.
     */
    const char *name = is_whole_job(step) ? "SLURM_JOB_GPUS" : "SLURM_STEP_GPUS";
    spank_err_t found = spank_getenv(spank, name, gpus, sizeof gpus);
    const char *helper = helper_path(argument_count, arguments);
    bool saved = launch_is_wanted(spank, step);
    if (found == ESPANK_ENV_NOEXIST)
        return saved ? launch(spank, helper) : ESPANK_SUCCESS;
    spank_err_t counted = spank_getenv(spank, "SLURM_SHARDS_ON_NODE", shards, sizeof shards);
    if (found != ESPANK_SUCCESS || (counted != ESPANK_SUCCESS && counted != ESPANK_ENV_NOEXIST)) {
        slurm_error("sluice: %s cannot be read: %s; the task is not started", name, spank_strerror(found));
        return -1;
    }

    char variables[6][VALUE_MAX + 32], *environment[7] = {NULL};
    snprintf(variables[0], sizeof variables[0], "SLUICE_JOB=%" PRIu32, job);
    snprintf(variables[1], sizeof variables[1], "SLUICE_STEP=%s", is_whole_job(step) ? "whole" : "part");
    snprintf(variables[2], sizeof variables[2], "SLUICE_UID=%ju", (uintmax_t)user);
    snprintf(variables[3], sizeof variables[3], "SLUICE_GPUS=%s", gpus);
    snprintf(variables[4], sizeof variables[4], "SLUICE_SHARDS=%s", counted == ESPANK_SUCCESS ? shards : "");
    snprintf(variables[5], sizeof variables[5], "SLUICE_SAVED=%d", saved);
    for (size_t i = 0; i < 6; i++)
        environment[i] = variables[i];
    int status = ask(helper, environment, answer, sizeof answer);
    if (saved && status == 0 && strcmp(answer, "none saves") == 0)
        return launch(spank, helper);
    if (saved)
        ignore_save("the node agent's log says why");
    if (status == 0 && strcmp(answer, "none") == 0)
        return ESPANK_SUCCESS;
    if (status == 0 &&
        strncmp(answer, "region " SLUICE_LIMIT_FOLDER "/", strlen("region " SLUICE_LIMIT_FOLDER "/")) == 0)
        return limit_task(answer + strlen("region "));
    slurm_error("sluice: the task is not started: %s", answer[0] ? answer : "the helper said nothing");
    if (status == JOBS_OWN_FAULT)
        (void)poll(NULL, 0, REQUEUE_MS);
    return -1;
}
