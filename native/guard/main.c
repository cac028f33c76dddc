/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sluice-guard FOLDER COMMAND...: the parent of the node agent.
 *
 * Starts COMMAND and starts it again when it dies or hangs; freezes the jobs that have been unwatched for too long, and
 * thaws them when they are watched again. It reads what the agent says on a socket of theirs, the numbers of the jobs
 * whose data the agent is reading in a page that both have, and root's cgroup folders: nothing that a tenant wrote.
 * FOLDER/guard is what it remembers, for the agent to report and for the next guard to go on with.
 */
#include "notify.h"
#include "watch.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    AGENT_SOCKET = 3, /* the agent's ends, as SLUICE_GUARD says */
    AGENT_ABOUT = 4,
    ABOUT_SLOTS = 64,
    ROUND_MS = 250,
    MOST_STEP_MS = 1000, /* what the clock advances in one round at most */
    MOST_MESSAGES = 4096,
    LOCK_TRIES = 40,
    LOCK_WAIT_MS = 50,
    STOP_MS = 20000,  /* for an agent that is asked to end */
    QUICK_DEATHS = 3, /* within a minute, after which the next start waits */
    LAST_WAIT_S = 30,
};

static const char memory_name[] = "guard", fresh_name[] = "guard.new";

static struct guard_watch watch;
static struct {
    char **command;
    const char *path;
    int folder, signals, socket;
    const volatile uint32_t *about; /* a slot each of the agent's threads: a job, 0: none */
    int about_file;
    pid_t pid;            /* 0: none runs */
    bool was_ready;       /* one of the agents was */
    bool says_ready;      /* the last that systemd has got */
    bool hung;            /* it was killed for that */
    int64_t now;          /* the guard's clock */
    int64_t start_at;     /* when there is none */
    int64_t stop_by;      /* -1: nobody ends the guard */
    int64_t last_reading; /* of the kernel's clock */
} guard;

static int64_t today(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return 1000 * (int64_t)now.tv_sec + now.tv_nsec / 1000000;
}

static void save(void);

static const struct guard_tools tools = {guard_look, guard_freeze, guard_thaw, today, save};

static int64_t monotonic(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1000 * (int64_t)now.tv_sec + now.tv_nsec / 1000000;
}

static void advance_clock(void)
{
    int64_t reading = monotonic(), step = reading - guard.last_reading;
    guard.now += step > MOST_STEP_MS ? MOST_STEP_MS : step;
    guard.last_reading = reading;
}

static _Noreturn void fail(const char *what, const char *remedy)
{
    fprintf(stderr, "sluice-guard: %s: %s%s%s\n", what, strerror(errno), remedy ? "; " : "", remedy ? remedy : "");
    exit(1);
}

/* ---- what it remembers ---- */

static void lock(void)
{
    mkdir(guard.path, 0700);
    guard.folder = open(guard.path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (guard.folder < 0)
        fail(guard.path, "it is made by the service, or by hand with mode 0700");
    for (int tries = LOCK_TRIES; flock(guard.folder, LOCK_EX | LOCK_NB); tries--) {
        if (tries == 0) {
            fputs("sluice agent: another one runs on this node; see: systemctl status sluice-agent\n", stderr);
            exit(1);
        }
        usleep(1000 * LOCK_WAIT_MS);
    }
}

/* False if there is no room. */
static bool write_memory(void)
{
    int descriptor = openat(guard.folder, fresh_name, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
    FILE *file = descriptor < 0 ? NULL : fdopen(descriptor, "w");
    if (!file) {
        int number = errno;
        if (descriptor >= 0)
            close(descriptor);
        errno = number;
        return false;
    }
    guard_save(&watch, file);
    bool written = !fflush(file) && !ferror(file);
    fclose(file);
    return written && renameat(guard.folder, fresh_name, guard.folder, memory_name) == 0;
}

static void save(void)
{
    static bool fails;
    if (!watch.changed)
        return;
    if (write_memory()) {
        fails = watch.changed = false;
        return;
    }
    if (!fails)
        fprintf(stderr, "sluice: action=problem what=\"%s/%s: %s; tried again\"\n", guard.path, fresh_name,
                strerror(errno));
    fails = true;
}

static void load(void)
{
    int descriptor = openat(guard.folder, memory_name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    FILE *file = descriptor < 0 ? NULL : fdopen(descriptor, "r");
    if (!file)
        return;
    guard_load(&watch, file, guard.now);
    fclose(file);
}

/* ---- the agent ---- */

static void become_agent(pid_t parent, int theirs)
{
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) || getppid() != parent)
        _exit(1); /* the guard has died meanwhile */
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    int high = fcntl(theirs, F_DUPFD_CLOEXEC, 16), page = fcntl(guard.about_file, F_DUPFD_CLOEXEC, 16);
    if (dup2(high, AGENT_SOCKET) < 0 || dup2(page, AGENT_ABOUT) < 0)
        _exit(1);
    execvp(guard.command[0], guard.command);
    fprintf(stderr, "sluice-guard: %s: %s\n", guard.command[0], strerror(errno));
    _exit(127);
}

static void start_agent(void)
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends)) {
        guard.start_at = guard.now + 1000;
        return;
    }
    pid_t parent = getpid(), pid = fork();
    if (pid == 0)
        become_agent(parent, ends[1]);
    close(ends[1]);
    if (pid < 0) {
        close(ends[0]);
        guard.start_at = guard.now + 1000;
        return;
    }
    guard.pid = pid;
    guard.socket = ends[0];
    guard.hung = false;
    guard_agent_starts(&watch, guard.now);
}

static struct guard_names jobs_read(void)
{
    struct guard_names names = {0};
    for (int slot = 0; slot < ABOUT_SLOTS && names.count < GUARD_NAMED; slot++) {
        uint32_t job = guard.about[slot];
        bool known = job == 0;
        for (uint32_t i = 0; i < names.count; i++)
            known |= names.jobs[i] == job;
        if (!known)
            names.jobs[names.count++] = job;
    }
    return names;
}

static void clear_about(void)
{
    memset((void *)(uintptr_t)guard.about, 0, ABOUT_SLOTS * sizeof *guard.about);
}

static int64_t wait_before_start(void)
{
    uint32_t deaths = guard_deaths(&watch, today());
    if (deaths <= QUICK_DEATHS)
        return 0;
    int64_t seconds = deaths - QUICK_DEATHS < 5 ? 1 << (deaths - QUICK_DEATHS - 1) : LAST_WAIT_S;
    return 1000 * seconds;
}

static void exit_in_order(int status)
{
    guard_notify("STOPPING=1");
    guard_release(&watch, &tools);
    watch.changed = true;
    save();
    exit(status);
}

static void read_messages(void)
{
    char text[GUARD_MESSAGE + 1];
    for (int left = MOST_MESSAGES; guard.socket >= 0 && left > 0; left--) {
        ssize_t size = recv(guard.socket, text, sizeof text, MSG_DONTWAIT);
        if (size < 0)
            return;
        if (size == 0) { /* the agent has closed its end; its own end follows */
            close(guard.socket);
            guard.socket = -1;
            return;
        }
        struct guard_message message;
        if (guard_parse(text, (size_t)size, &message))
            guard_take(&watch, &tools, &message, guard.now);
    }
}

static void take_messages(void)
{
    read_messages();
    if (watch.ready && !guard.says_ready)
        guard.says_ready = guard_notify("READY=1\nSTATUS=the agent answers");
    guard.was_ready |= watch.ready;
}

/* An agent that wants to be restarted ends with 0. If no job is to be watched and the agent never came up, the guard
 * ends, and its caller decides. */
static void agent_ended(int status)
{
    guard.pid = 0;
    take_messages(); /* its last ones: a job may have got its limits just now */
    if (guard.socket >= 0)
        close(guard.socket);
    guard.socket = -1;
    bool exited = WIFEXITED(status);
    if (guard.stop_by >= 0)
        exit_in_order(0);
    if (exited && WEXITSTATUS(status) != 0 && !guard.was_ready && watch.count == 0)
        exit(WEXITSTATUS(status));
    guard.start_at = guard.now;
    guard.says_ready = false;
    guard_notify("STATUS=the agent is started again");
    if (!exited || WEXITSTATUS(status) != 0) {
        char cause[GUARD_CAUSE];
        snprintf(cause, sizeof cause, "%s-%d", exited ? "exit" : "signal",
                 exited ? WEXITSTATUS(status) : WTERMSIG(status));
        struct guard_names about = jobs_read();
        guard_agent_lost(&watch, &tools, guard.hung ? "hung" : cause, &about, guard.now);
        guard.start_at += wait_before_start();
        fprintf(stderr, "sluice: action=agent-lost cause=%s deaths=%u again_in_ms=%lld\n", guard.hung ? "hung" : cause,
                guard_deaths(&watch, today()), (long long)(guard.start_at - guard.now));
    }
    clear_about();
}

static void reap(void)
{
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        if (pid == guard.pid)
            agent_ended(status);
}

static void take_signals(void)
{
    struct signalfd_siginfo one;
    while (read(guard.signals, &one, sizeof one) == sizeof one) {
        if (one.ssi_signo == SIGCHLD)
            reap();
        else if (guard.stop_by < 0) {
            guard.stop_by = guard.now + STOP_MS;
            if (guard.pid == 0)
                exit_in_order(0);
            kill(guard.pid, SIGTERM);
        }
    }
}

/* ---- the guard ---- */

static void prepare(void)
{
    sigset_t taken;
    sigemptyset(&taken);
    sigaddset(&taken, SIGCHLD);
    sigaddset(&taken, SIGTERM);
    sigaddset(&taken, SIGINT);
    sigprocmask(SIG_BLOCK, &taken, NULL);
    guard.signals = signalfd(-1, &taken, SFD_NONBLOCK | SFD_CLOEXEC);
    guard.about_file = memfd_create("sluice-about", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    size_t size = ABOUT_SLOTS * sizeof *guard.about;
    if (guard.signals < 0 || guard.about_file < 0 || ftruncate(guard.about_file, (off_t)size) ||
        fcntl(guard.about_file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
        fail("what it needs from the kernel", NULL);
    void *page = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, guard.about_file, 0);
    if (page == MAP_FAILED)
        fail("a page of memory", NULL);
    guard.about = page;
    guard.socket = -1;
    guard.stop_by = -1;
    guard.last_reading = monotonic();
    if (setenv("SLUICE_GUARD", "3,4", 1)) /* AGENT_SOCKET, AGENT_ABOUT */
        fail("the environment", NULL);
    guard_notify_open();
}

static void one_round(void)
{
    struct pollfd files[] = {{.fd = guard.signals, .events = POLLIN}, {.fd = guard.socket, .events = POLLIN}};
    poll(files, 2, ROUND_MS);
    advance_clock();
    take_messages();
    take_signals();
    if (guard.pid == 0 && guard.now >= guard.start_at)
        start_agent();
    else if (guard.pid && guard.stop_by < 0 && !guard.hung && guard_hangs(&watch, guard.now)) {
        fputs("sluice: action=agent-hangs\n", stderr);
        guard.hung = true;
        kill(guard.pid, SIGKILL);
    } else if (guard.pid && guard.stop_by >= 0 && guard.now > guard.stop_by)
        kill(guard.pid, SIGKILL);
    if (guard.stop_by < 0)
        guard_tick(&watch, &tools, guard.now);
    save();
    if (!guard.was_ready && watch.count > 0) /* at TimeoutStartSec= the guard would be ended, and thaw them */
        guard_notify_start_lasts(guard.last_reading);
    guard_notify_alive(guard.last_reading);
}

int main(int count, char **words)
{
    if (count < 3 || words[1][0] != '/') {
        fputs("usage: sluice-guard FOLDER COMMAND...   (started by: sluice agent)\n", stderr);
        return 2;
    }
    guard.path = words[1];
    guard.command = words + 2;
    prepare();
    lock();
    guard_start(&watch, guard.now);
    load();
    guard_freeze_again(&watch, &tools);
    start_agent();
    for (;;)
        one_round();
}
