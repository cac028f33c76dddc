/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "entry/launch.h"

#include "rules/rules.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/kcmp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

enum {
    FIRST_PIDS = 300, /* as after a boot; scripts name files after their process, so jobs begin at different numbers */
    MOST_PIDS = 30000,
    SPREAD = 7919,
};

/* As slurmctld gives a batch job the options of its submission. */
#define VARIABLE "SLURM_SPANK_" SLUICE_SPANK_ENV_PREFIX "checkpoint"

static int gate = -1; /* in the script's process, from launch_split to launch_begin */

static bool is_set(spank_t spank, const char *name, const char *wanted)
{
    char value[64];
    return spank_getenv(spank, name, value, sizeof value) == ESPANK_SUCCESS && strcmp(value, wanted) == 0;
}

bool launch_is_wanted(spank_t spank, uint32_t step)
{
    return step == SLURM_BATCH_SCRIPT && is_set(spank, VARIABLE, "system") && is_set(spank, "SLURM_JOB_NUM_NODES", "1");
}

static void close_all_but(int keep)
{
    int null = open("/dev/null", O_RDWR);
    for (int file = 0; file <= STDERR_FILENO; file++)
        dup2(null, file);
    if (keep > STDERR_FILENO) {
        dup2(keep, STDERR_FILENO + 1);
        keep = STDERR_FILENO + 1;
        fcntl(keep, F_SETFD, 0); /* where it had that number already, dup2 did nothing */
    } else
        keep = STDERR_FILENO;
    syscall(SYS_close_range, keep + 1, ~0U, 0);
}

static _Noreturn void become(const char *program, char *const words[])
{
    char *const nothing[] = {NULL};
    if (chdir("/run") == 0)
        execve(program, words, nothing);
    _exit(127);
}

static _Noreturn void become_init(const char *program, pid_t script)
{
    char text[16];
    snprintf(text, sizeof text, "%d", (int)script);
    close_all_but(-1);
    char *const words[] = {"sluice-launch", "init", text, NULL};
    become(program, words);
}

static _Noreturn void become_waiter(const char *program, pid_t init, int end, const uint32_t facts[2],
                                    const char *helper)
{
    char texts[3][16];
    snprintf(texts[0], sizeof texts[0], "%d", (int)init);
    for (size_t i = 0; i < 2; i++)
        snprintf(texts[i + 1], sizeof texts[i + 1], "%" PRIu32, facts[i]);
    close_all_but(end);
    /* slurmstepd gives this process a group, which it cannot do with another program; then it lets the script go. */
    struct pollfd script = {.fd = STDERR_FILENO + 1, .events = POLLIN};
    while (poll(&script, 1, -1) < 0 && errno == EINTR)
        ;
    char *const words[] = {"sluice-launch", "wait", texts[0], "3", texts[1], texts[2], (char *)helper, NULL};
    become(program, words);
}

/* Of this PID namespace. */
static void set_first_pid(uint32_t job)
{
    FILE *last = fopen("/proc/sys/kernel/ns_last_pid", "we");
    if (!last)
        return;
    fprintf(last, "%" PRIu32, FIRST_PIDS + job * SPREAD % MOST_PIDS);
    fclose(last);
}

/* The job sees its own processes in /proc, as they are numbered for it. NVIDIA's driver looks for its threads there, and
 * does not start where it finds none. */
static bool mount_own_proc(void)
{
    return unshare(CLONE_NEWNS) == 0 && mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) == 0 &&
           mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) == 0;
}

int launch_split(spank_t spank, const char *program, const char *helper)
{
    uint32_t facts[2] = {0}; /* job, user */
    uid_t user = 0;
    int ends[2];
    if (spank_get_item(spank, S_JOB_ID, &facts[0]) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_JOB_UID, &user) != ESPANK_SUCCESS ||
        socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
        slurm_error("sluice: the job's launcher cannot be prepared: %s; the script is not started", strerror(errno));
        return -1;
    }
    facts[1] = user;
    /* Not unshare: this process starts helpers, which belong into the node's namespace. */
    pid_t init = (pid_t)syscall(SYS_clone, CLONE_NEWPID | SIGCHLD, NULL, NULL, NULL, NULL);
    if (init < 0) {
        slurm_error("sluice: no PID namespace for the job: %s; the script is not started", strerror(errno));
        return -1;
    }
    if (init > 0)
        become_waiter(program, init, ends[0], facts, helper);
    setsid();
    if (!mount_own_proc()) {
        slurm_error("sluice: no /proc of the job's own: %s; the script is not started", strerror(errno));
        _exit(1); /* and with it the namespace; the one that waits ends, too */
    }
    set_first_pid(facts[0]);
    pid_t script = fork();
    if (script != 0)
        become_init(program, script);
    setpgid(0, 0);
    close(ends[0]);
    gate = ends[1];
    return ESPANK_SUCCESS;
}

/* slurmstepd sets the variable only now, unless it is a first run, where it may be the user's: of such a job there is
 * nothing to resume. S_SLURM_RESTART_COUNT is always 0. */
static uint32_t restarts_of(spank_t spank)
{
    char value[16];
    if (spank_getenv(spank, "SLURM_RESTART_COUNT", value, sizeof value) != ESPANK_SUCCESS)
        return 0;
    return (uint32_t)strtoul(value, NULL, 10);
}

static bool is_file_or_null(const struct stat *about)
{
    return S_ISREG(about->st_mode) || (S_ISCHR(about->st_mode) && about->st_rdev == makedev(1, 3));
}

/* The same file by the same name; -1: there is none that could be opened. */
static int open_again(int file)
{
    char name[PATH_MAX], link[32];
    struct stat had, has;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, name, sizeof name - 1);
    if (length <= 0 || fstat(file, &had) != 0 || !is_file_or_null(&had))
        return -1;
    name[length] = 0;
    int found = open(name, O_PATH | O_NOFOLLOW | O_CLOEXEC), again = -1;
    if (found >= 0 && fstat(found, &has) == 0 && has.st_dev == had.st_dev && has.st_ino == had.st_ino) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", found);
        again = open(link, (fcntl(file, F_GETFL) & (O_ACCMODE | O_APPEND)) | O_CLOEXEC);
    }
    if (found >= 0)
        close(found);
    if (again >= 0)
        lseek(again, lseek(file, 0, SEEK_CUR), SEEK_SET);
    return again;
}

/* What slurmstepd has opened belongs to its own mount namespace, and CRIU saves only what was opened in the job's. A
 * file that cannot be opened again stays as it is; then the job cannot be saved. */
static void open_streams_again(void)
{
    bool shared = syscall(SYS_kcmp, getpid(), getpid(), KCMP_FILE, STDOUT_FILENO, STDERR_FILENO) == 0;
    for (int file = 0; file <= STDERR_FILENO; file++) {
        int again = file == STDERR_FILENO && shared ? dup(STDOUT_FILENO) : open_again(file);
        if (again >= 0) {
            dup2(again, file);
            close(again);
        }
    }
}

int launch_begin(spank_t spank)
{
    char byte = 0;
    if (gate < 0)
        return ESPANK_SUCCESS;
    uint32_t restarts = restarts_of(spank);
    bool let_go = write(gate, &restarts, sizeof restarts) == sizeof restarts && read(gate, &byte, 1) == 1;
    close(gate);
    gate = -1;
    open_streams_again();
    /* What slurmstepd has open is nothing of the script's, and would be missing where it is resumed. */
    syscall(SYS_close_range, STDERR_FILENO + 1, ~0U, 1U << 2 /* CLOSE_RANGE_CLOEXEC */);
    return let_go ? ESPANK_SUCCESS : -1;
}
