/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sluice-supervise [--lease SECONDS] [--patience SECONDS] [--run-dir DIR] -- slurmctld -D ...
 *
 * Runs slurmctld so that it writes state only while it holds the lease in the shared state folder (lease.h). It kills
 * slurmctld with SIGKILL, which works on a stopped process, when
 *   - the lease was not renewed in time, or is another's: the storage hangs, or this host was paused;
 *   - slurmctld has not shown for that time that it runs (the plugins do so, every 50 ms);
 *   - it asks to lead and does not get the lease.
 * A backup that has given its place back is started anew.
 * The other way round slurmctld dies when its supervisor does (PR_SET_PDEATHSIG), and ends by itself when the
 * supervisor does not tell it in time that the lease is good (controller/fence.c).
 *
 * Signals go on to slurmctld; its exit status is ours, its death by a signal too. 75: it was killed by us. 2: usage.
 */
#include "supervisor/say.h"
#include "supervisor/storage.h"
#include "supervisor/watch.h"

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
    bool led;   /* it leads, or did */
    bool again; /* it was killed to be started anew */
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
static bool make_watch(struct supervisor *own, const char *run_dir)
{
    snprintf(own->path, sizeof(own->path), "%s/sluice-supervise.XXXXXX", run_dir);
    int file = mkostemp(own->path, O_CLOEXEC);
    if (file < 0) {
        sluice_say("%s: %s", run_dir, strerror(errno));
        return false;
    }
    bool good = ftruncate(file, sizeof(struct sluice_watch)) == 0 &&
                (own->watch = share(file, sizeof(struct sluice_watch))) != NULL;
    if (!good) {
        sluice_say("%s: %s", own->path, strerror(errno));
        unlink(own->path);
        return false;
    }
    own->file = file;
    own->watch->magic = SLUICE_WATCH_MAGIC;
    own->watch->supervisor = getpid();
    own->watch->lease_ns = own->lease_ns;
    own->watch->patience_ns = own->patience_ns;
    return true;
}

static pid_t start_child(const struct supervisor *own, char **argv, const sigset_t *mask)
{
    pid_t parent = getpid(), pid = fork();
    if (pid != 0)
        return pid;
    sigprocmask(SIG_SETMASK, mask, NULL);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(SLUICE_FENCED_STATUS);
    setenv(SLUICE_WATCH_ENV, own->path, 1);
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
static void hand_over(struct supervisor *own)
{
    uid_t uid;
    gid_t gid;
    if (geteuid() != 0 || (child_user(own->child, &uid, &gid) && uid != 0 && fchown(own->file, uid, gid) == 0)) {
        close(own->file);
        own->file = -1;
    }
}

/* Once the plugins have said where the shared folder is. */
static void start_storage(struct supervisor *own)
{
    uid_t uid;
    gid_t gid;
    char folder[SLUICE_WATCH_FOLDER];
    memcpy(folder, own->watch->folder, sizeof(folder));
    folder[sizeof(folder) - 1] = '\0';
    own->storage_ns = sluice_boottime_ns();
    if (folder[0] != '/' || !child_user(own->child, &uid, &gid))
        return;
    own->shared->child = own->child;
    own->shared->beat_ns = sluice_boottime_ns();
    own->storage = sluice_storage_start(own->shared, folder, uid, gid, own->lease_ns);
    if (own->storage < 0) {
        sluice_say("no process for the storage: %s", strerror(errno));
        return;
    }
    sluice_say("watches slurmctld %d, lease %.1f s in %s", (int)own->child, (double)own->lease_ns / 1e9, folder);
    if (own->watch->timeout_s && (double)own->watch->timeout_s < (double)own->lease_ns * 2 / 1e9)
        sluice_say("SlurmctldTimeout=%u is less than twice the lease: the backup will try before it may",
                   own->watch->timeout_s);
}

/* ---- watching ---- */

__attribute__((format(printf, 2, 3))) static void fence(struct supervisor *own, const char *format, ...)
{
    if (!own->killed) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(own->shared->why, sizeof(own->shared->why), format, arguments);
        va_end(arguments);
    }
    kill(own->child, SIGKILL);
    if (!own->killed)
        sluice_say("slurmctld %d killed: %s", (int)own->child, own->shared->why);
    own->killed = true;
    own->watch->until_ns = 0;
}

static void check(struct supervisor *own)
{
    struct sluice_watch *watch = own->watch;
    struct sluice_storage *shared = own->shared;
    int64_t now = sluice_boottime_ns(), from = shared->from_ns;
    int64_t limit = own->lease_ns - own->lease_ns / 8; /* dead when it lapses, not only then killed */
    uint32_t role = watch->role;
    shared->beat_ns = now;
    shared->wanted = role != SLUICE_STANDBY && !own->killed;
    watch->epoch = shared->epoch;
    watch->until_ns = from && !own->killed ? from + own->lease_ns : 0;
    if (role != SLUICE_ASKS)
        own->asked_ns = 0;
    else if (!own->asked_ns)
        own->asked_ns = now;
    if (shared->lost) {
        fence(own, "the lease was lost, or came too late: %s", shared->leader);
    } else if (role == SLUICE_LEADS) {
        if (!from || now - from >= limit)
            fence(own, "the lease was not renewed for %.1f s: the shared state folder hangs, or this host was paused",
                  from ? (double)(now - from) / 1e9 : 0.0);
        else if (now - watch->tick_ns >= limit)
            fence(own, "it has not run for %.1f s", (double)(now - watch->tick_ns) / 1e9);
    } else if (own->asked_ns && now - own->asked_ns >= own->patience_ns) {
        fence(own, "it would lead, but for %.1f s the lease was not to be had from %s", (double)own->patience_ns / 1e9,
              shared->leader[0] ? shared->leader : "nobody: the shared state folder fails");
    }
    if (own->killed)
        kill(own->child, SIGKILL);
    own->led |= role == SLUICE_LEADS;
    if (own->led && role == SLUICE_STANDBY && !from && !own->killed && !own->again) {
        sluice_say("slurmctld %d is a backup again, and is started anew", (int)own->child);
        own->again = true;
        kill(own->child, SIGKILL);
    }
}

/*
 * Slurm 22.05 cannot lead twice in one process: it forgets that its scheduler's thread has ended, starts none the
 * second time, and then waits for the dead one, which hangs or crashes. A backup that waits has nothing to lose.
 */
static bool start_anew(struct supervisor *own, char **argv, const sigset_t *mask)
{
    own->led = own->again = false;
    own->watch->ready = 0;
    own->watch->role = SLUICE_STANDBY;
    own->child = start_child(own, argv, mask);
    own->shared->child = own->child;
    return own->child > 0;
}

/* ---- end ---- */

static void end_storage(struct supervisor *own, int status)
{
    if (own->storage <= 0)
        return;
    own->shared->status = status;
    own->shared->ended = 1;
    for (int waited = 0; waited < END_MS; waited += 10) {
        if (waitpid(own->storage, NULL, WNOHANG) == own->storage)
            return;
        poll(NULL, 0, 10);
    }
    sluice_say("the shared state folder hangs: the lease was not given back, and lapses");
    kill(own->storage, SIGKILL);
}

static int leave(struct supervisor *own, int status)
{
    end_storage(own, status);
    unlink(own->path);
    if (own->killed)
        return SLUICE_FENCED_STATUS;
    if (WIFEXITED(status))
        return WEXITSTATUS(status);
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none); /* slurmctld's own core says more */
    sigset_t mask;
    sigemptyset(&mask);
    signal(WTERMSIG(status), SIG_DFL);
    sigprocmask(SIG_SETMASK, &mask, NULL);
    raise(WTERMSIG(status));
    return 128 + WTERMSIG(status);
}

static int supervise(struct supervisor *own, int signals, char **argv, const sigset_t *mask)
{
    for (;;) {
        struct pollfd ready = {.fd = signals, .events = POLLIN};
        poll(&ready, 1, LOOP_MS);
        struct signalfd_siginfo got;
        while (read(signals, &got, sizeof(got)) == sizeof(got))
            if (got.ssi_signo != SIGCHLD) {
                own->again &= got.ssi_signo != SIGTERM && got.ssi_signo != SIGINT; /* it is to end */
                kill(own->child, (int)got.ssi_signo);
            }
        for (int status;;) {
            pid_t pid = waitpid(-1, &status, WNOHANG);
            if (pid <= 0)
                break;
            if (pid == own->child && !(own->again && start_anew(own, argv, mask)))
                return leave(own, status);
            if (pid == own->storage) {
                sluice_say("the process for the storage has ended; another one is started");
                own->storage = 0;
                own->shared->from_ns = 0; /* its lease is not taken over: when we lead, slurmctld ends */
            }
        }
        int64_t now = sluice_boottime_ns();
        if (own->file >= 0)
            hand_over(own);
        if (own->storage <= 0 && own->watch->ready && now - own->storage_ns > SECOND_NS)
            start_storage(own);
        if (own->watch->ready) {
            check(own);
        } else if (!own->warned && now - own->started_ns > UNLOADED_S * SECOND_NS) {
            sluice_say("slurmctld has not loaded Sluice's plugins: nothing is fenced");
            own->warned = true;
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
    struct supervisor own = {.file = -1, .lease_ns = INT64_C(4000000000)};
    const char *run_dir = "/run";
    for (int option; (option = getopt_long(argc, argv, "+h", options, NULL)) != -1;) {
        if (option == 'r')
            run_dir = optarg;
        else if (!((option == 'l' && seconds("lease", optarg, 0.2, 600, &own.lease_ns)) ||
                   (option == 'p' && seconds("patience", optarg, 0.2, 3600, &own.patience_ns)))) {
            dprintf(option == 'h' ? 1 : 2,
                    "usage: sluice-supervise [--lease SECONDS] [--patience SECONDS] [--run-dir DIR] -- slurmctld -D\n");
            return option == 'h' ? 0 : 2;
        }
    }
    if (optind >= argc) {
        sluice_say("no program named; e.g. sluice-supervise -- slurmctld -D");
        return 2;
    }
    if (!own.patience_ns)
        own.patience_ns =
            30 * SECOND_NS; /* a backup gives its place back in two, and is asked again after a new start */
    sigset_t wanted, before;
    sigemptyset(&wanted);
    sigaddset(&wanted, SIGCHLD);
    for (size_t i = 0; i < sizeof(passed_on) / sizeof(*passed_on); i++)
        sigaddset(&wanted, passed_on[i]);
    sigprocmask(SIG_BLOCK, &wanted, &before);
    int signals = signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK);
    own.shared = share(-1, sizeof(*own.shared));
    if (signals < 0 || !own.shared || !make_watch(&own, run_dir)) {
        sluice_say("cannot start: %s", strerror(errno));
        return 1;
    }
    own.started_ns = sluice_boottime_ns();
    own.child = start_child(&own, argv + optind, &before);
    if (own.child < 0) {
        sluice_say("no process: %s", strerror(errno));
        unlink(own.path);
        return 1;
    }
    return supervise(&own, signals, argv + optind, &before);
}
