/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sluice-supervise [--lease SECONDS] [--patience SECONDS] [--run-dir DIR] -- slurmctld -D ...
 *
 * Runs slurmctld so that it writes state only while it holds the lease in the shared state folder (lease.h). It kills
 * slurmctld with SIGKILL, which works on a stopped process, when
 *   - the lease was not renewed in time, or is another's: the storage hangs, or this host was paused;
 *   - slurmctld has not shown for that time that it runs (the plugins do so, every 50 ms);
 *   - it asks to lead and does not get the lease. A backup that has given its place back is restarted. In turn,
 *     slurmctld dies when its supervisor does (PR_SET_PDEATHSIG), and ends by itself when the supervisor does not
 *     confirm the lease in time (failover/fence.c).
 *
 * Signals are passed on to slurmctld; its exit status is ours, and so is its death by a signal. 75: it was killed by
 * us. 2: usage.
 */
#include "supervisor/say.h"
#include "supervisor/storage.h"
#include "supervisor/supervisor.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define SECOND_NS INT64_C(1000000000)
enum { LOOP_MS = 50, END_MS = 2000, UNLOADED_S = 60 };

struct supervisor {
    struct sluice_watch *watch;
    struct sluice_storage *shared;
    char path[4096]; /* of the watch */
    int file;        /* the watch, until it is slurmctld's user's */
    int64_t lease_ns, patience_ns;
    pid_t child, storage;
    int64_t started_ns, asked_ns, storage_ns; /* when slurmctld began, asked; when a process for the storage began */
    bool killed, warned;
    bool led;        /* it leads, or did */
    bool restarting; /* it was killed to be restarted */
};

void sluice_say(const char *format, ...)
{
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof(text) - 1, format, arguments);
    va_end(arguments);
    if (length > 0)
        dprintf(STDERR_FILENO, "sluice-supervise: %s\n", text);
}

/* ---- start ---- */

static const int passed_on[] = {SIGTERM, SIGINT,  SIGHUP,  SIGQUIT, SIGUSR1,
                                SIGUSR2, SIGABRT, SIGALRM, SIGCONT, SIGWINCH};

static void *share(int file, size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | (file < 0 ? MAP_ANONYMOUS : 0), file, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

/* The page that the plugins find. It is handed over to slurmctld's user as soon as slurmctld has become that user. */
static bool make_watch(struct supervisor *self, const char *run_dir)
{
    snprintf(self->path, sizeof(self->path), "%s/sluice-supervise.XXXXXX", run_dir);
    int file = mkostemp(self->path, O_CLOEXEC);
    if (file < 0) {
        sluice_say("%s: %s", run_dir, strerror(errno));
        return false;
    }
    bool good = ftruncate(file, sizeof(struct sluice_watch)) == 0 &&
                (self->watch = share(file, sizeof(struct sluice_watch))) != NULL;
    if (!good) {
        sluice_say("%s: %s", self->path, strerror(errno));
        unlink(self->path);
        return false;
    }
    self->file = file;
    self->watch->magic = SLUICE_WATCH_MAGIC;
    self->watch->supervisor = getpid();
    self->watch->lease_ns = self->lease_ns;
    self->watch->patience_ns = self->patience_ns;
    return true;
}

static pid_t start_child(const struct supervisor *self, char **argv, const sigset_t *mask)
{
    pid_t parent = getpid(), pid = fork();
    if (pid != 0)
        return pid;
    sigprocmask(SIG_SETMASK, mask, NULL);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(SLUICE_FENCED_STATUS);
    setenv(SLUICE_WATCH_ENV, self->path, 1);
    execvp(argv[0], argv);
    sluice_say("%s: %s", argv[0], strerror(errno));
    _exit(127);
}

/* As whom slurmctld runs. */
static bool child_user(pid_t pid, uid_t *uid, gid_t *gid)
{
    char line[256], path[64];
    unsigned found_uid = 0, found_gid = 0;
    int found = 0;
    snprintf(path, sizeof(path), "/proc/%d/status", (int)pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    while (fgets(line, sizeof(line), file))
        found += sscanf(line, "Uid: %*u %u", &found_uid) == 1 || sscanf(line, "Gid: %*u %u", &found_gid) == 1;
    fclose(file);
    *uid = found_uid;
    *gid = found_gid;
    return found == 2;
}

/* The plugins wait for it in their init. */
static void hand_over(struct supervisor *self)
{
    uid_t uid;
    gid_t gid;
    if (geteuid() != 0 || (child_user(self->child, &uid, &gid) && uid != 0 && fchown(self->file, uid, gid) == 0)) {
        close(self->file);
        self->file = -1;
    }
}

/* Once the plugins have said where the shared folder is. */
static void start_storage(struct supervisor *self)
{
    uid_t uid;
    gid_t gid;
    char folder[SLUICE_WATCH_FOLDER];
    memcpy(folder, self->watch->folder, sizeof(folder));
    folder[sizeof(folder) - 1] = '\0';
    self->storage_ns = sluice_boottime_ns();
    if (folder[0] != '/' || !child_user(self->child, &uid, &gid))
        return;
    self->shared->child = self->child;
    self->shared->beat_ns = sluice_boottime_ns();
    self->storage = sluice_storage_start(self->shared, folder, uid, gid, self->lease_ns);
    if (self->storage < 0) {
        sluice_say("no process for the storage: %s", strerror(errno));
        return;
    }
    sluice_say("watches slurmctld %d, lease %.1f s in %s", (int)self->child, (double)self->lease_ns / 1e9, folder);
    if (self->watch->timeout_s && (double)self->watch->timeout_s < (double)self->lease_ns * 2 / 1e9)
        sluice_say("SlurmctldTimeout=%u is less than twice the lease: the backup will try before it may",
                   self->watch->timeout_s);
}

/* ---- watching ---- */

__attribute__((format(printf, 2, 3))) static void fence(struct supervisor *self, const char *format, ...)
{
    if (!self->killed) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(self->shared->why, sizeof(self->shared->why), format, arguments);
        va_end(arguments);
    }
    kill(self->child, SIGKILL);
    if (!self->killed)
        sluice_say("slurmctld %d killed: %s", (int)self->child, self->shared->why);
    self->killed = true;
    self->watch->until_ns = 0;
}

static void check(struct supervisor *self)
{
    struct sluice_watch *watch = self->watch;
    struct sluice_storage *shared = self->shared;
    int64_t now = sluice_boottime_ns(), from = shared->from_ns;
    int64_t limit = self->lease_ns - self->lease_ns / 8; /* slurmctld is dead when it lapses, not killed only then */
    uint32_t role = watch->role;
    shared->beat_ns = now;
    shared->wanted = role != SLUICE_STANDBY && !self->killed;
    watch->epoch = shared->epoch;
    watch->until_ns = from && !self->killed ? from + self->lease_ns : 0;
    if (role != SLUICE_ASKS)
        self->asked_ns = 0;
    else if (!self->asked_ns)
        self->asked_ns = now;
    if (shared->lost) {
        fence(self, "the lease was lost, or renewed too late: %s", shared->leader);
    } else if (role == SLUICE_LEADS) {
        if (!from || now - from >= limit)
            fence(self, "the lease was not renewed for %.1f s: the shared state folder hangs, or this host was paused",
                  from ? (double)(now - from) / 1e9 : 0.0);
        else if (now - watch->tick_ns >= limit)
            fence(self, "it has not run for %.1f s", (double)(now - watch->tick_ns) / 1e9);
    } else if (self->asked_ns && now - self->asked_ns >= self->patience_ns) {
        fence(self, "it asks to lead, but for %.1f s did not get the lease from %s", (double)self->patience_ns / 1e9,
              shared->leader[0] ? shared->leader : "anyone: the shared state folder fails");
    }
    if (self->killed)
        kill(self->child, SIGKILL);
    self->led |= role == SLUICE_LEADS;
    if (self->led && role == SLUICE_STANDBY && !from && !self->killed && !self->restarting) {
        sluice_say("slurmctld %d is a backup again; restarting it", (int)self->child);
        self->restarting = true;
        kill(self->child, SIGKILL);
    }
}

/*
 * Slurm 22.05 cannot lead twice in one process: it forgets that its scheduler's thread has ended, starts none the
 * second time, and then waits for the dead one, which hangs or crashes. A restart loses nothing of a backup that waits.
 */
static bool restart_slurmctld(struct supervisor *self, char **argv, const sigset_t *mask)
{
    self->led = self->restarting = false;
    self->watch->ready = 0;
    self->watch->role = SLUICE_STANDBY;
    self->child = start_child(self, argv, mask);
    self->shared->child = self->child;
    return self->child > 0;
}

/* ---- end ---- */

static void end_storage(struct supervisor *self, int status)
{
    if (self->storage <= 0)
        return;
    self->shared->status = status;
    self->shared->ended = 1;
    for (int waited = 0; waited < END_MS; waited += 10) {
        if (waitpid(self->storage, NULL, WNOHANG) == self->storage)
            return;
        poll(NULL, 0, 10);
    }
    sluice_say("the shared state folder hangs: the lease was not given back, and lapses");
    kill(self->storage, SIGKILL);
}

static int leave(struct supervisor *self, int status)
{
    end_storage(self, status);
    unlink(self->path);
    if (self->killed)
        return SLUICE_FENCED_STATUS;
    if (WIFEXITED(status))
        return WEXITSTATUS(status);
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none); /* slurmctld's own core dump says more */
    sigset_t mask;
    sigemptyset(&mask);
    signal(WTERMSIG(status), SIG_DFL);
    sigprocmask(SIG_SETMASK, &mask, NULL);
    raise(WTERMSIG(status));
    return 128 + WTERMSIG(status);
}

static int supervise(struct supervisor *self, int signals, char **argv, const sigset_t *mask)
{
    for (;;) {
        struct pollfd ready = {.fd = signals, .events = POLLIN};
        poll(&ready, 1, LOOP_MS);
        struct signalfd_siginfo got;
        while (read(signals, &got, sizeof(got)) == sizeof(got))
            if (got.ssi_signo != SIGCHLD) {
                self->restarting &= got.ssi_signo != SIGTERM && got.ssi_signo != SIGINT; /* it is to end */
                kill(self->child, (int)got.ssi_signo);
            }
        for (int status;;) {
            pid_t pid = waitpid(-1, &status, WNOHANG);
            if (pid <= 0)
                break;
            if (pid == self->child && !(self->restarting && restart_slurmctld(self, argv, mask)))
                return leave(self, status);
            if (pid == self->storage) {
                sluice_say("the process for the storage has ended; another one is started");
                self->storage = 0;
                self->shared->from_ns = 0; /* its lease is not taken over: when we lead, slurmctld ends */
            }
        }
        int64_t now = sluice_boottime_ns();
        if (self->file >= 0)
            hand_over(self);
        if (self->storage <= 0 && self->watch->ready && now - self->storage_ns > SECOND_NS)
            start_storage(self);
        if (self->watch->ready) {
            check(self);
        } else if (!self->warned && now - self->started_ns > UNLOADED_S * SECOND_NS) {
            sluice_say("slurmctld has not loaded Sluice's plugins: it is not fenced");
            self->warned = true;
        }
    }
}

static bool seconds(const char *option, const char *text, double least, double most, int64_t *ns)
{
    char *end = NULL;
    double value = strtod(text, &end);
    if (end == text || *end || !(value >= least && value <= most)) {
        sluice_say("--%s %s: give seconds, from %g to %g", option, text, least, most);
        return false;
    }
    *ns = (int64_t)(value * 1e9);
    return true;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"lease", required_argument, NULL, 'l'},
        {"patience", required_argument, NULL, 'p'},
        {"run-dir", required_argument, NULL, 'r'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    struct supervisor self = {.file = -1, .lease_ns = INT64_C(4000000000)};
    const char *run_dir = "/run";
    for (int option; (option = getopt_long(argc, argv, "+h", options, NULL)) != -1;) {
        if (option == 'r')
            run_dir = optarg;
        else if (!((option == 'l' && seconds("lease", optarg, 0.2, 600, &self.lease_ns)) ||
                   (option == 'p' && seconds("patience", optarg, 0.2, 3600, &self.patience_ns)))) {
            dprintf(option == 'h' ? 1 : 2,
                    "usage: sluice-supervise [--lease SECONDS] [--patience SECONDS] [--run-dir DIR] -- slurmctld -D\n");
            return option == 'h' ? 0 : 2;
        }
    }
    if (optind >= argc) {
        sluice_say("no program named; e.g. sluice-supervise -- slurmctld -D");
        return 2;
    }
    if (!self.patience_ns)
        self.patience_ns =
            30 * SECOND_NS; /* a backup gives its place back in two seconds, and is asked again after a restart */
    sigset_t wanted, before;
    sigemptyset(&wanted);
    sigaddset(&wanted, SIGCHLD);
    for (size_t i = 0; i < sizeof(passed_on) / sizeof(*passed_on); i++)
        sigaddset(&wanted, passed_on[i]);
    sigprocmask(SIG_BLOCK, &wanted, &before);
    int signals = signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK);
    self.shared = share(-1, sizeof(*self.shared));
    if (signals < 0 || !self.shared || !make_watch(&self, run_dir)) {
        sluice_say("cannot start: %s", strerror(errno));
        return 1;
    }
    self.started_ns = sluice_boottime_ns();
    self.child = start_child(&self, argv + optind, &before);
    if (self.child < 0) {
        sluice_say("no process: %s", strerror(errno));
        unlink(self.path);
        return 1;
    }
    return supervise(&self, signals, argv + optind, &before);
}
