/* SPDX-License-Identifier: Apache-2.0 */
#include "supervisor/storage.h"

#include "supervisor/lease.h"
#include "supervisor/say.h"
#include "supervisor/supervisor.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <inttypes.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { EVENTS_LIMIT = 1 << 20, LINE = 1024, FILE_NAME = 256 };
#define STATUS_EVERY_NS INT64_C(2000000000)

struct worker {
    struct sluice_storage *shared;
    struct sluice_lease_side side;
    pid_t parent;
    uint64_t event; /* seq of the last one */
    int64_t wanted_ns, written_ns, slowest_ns, last_ns;
    bool failure_logged;
};

/* ---- files for people ---- */

/* The seq of the last line, as we write lines ourselves alone. */
static uint64_t last_event(int file)
{
    char tail[2 * LINE + 1];
    off_t size = lseek(file, 0, SEEK_END);
    off_t from = size > 2 * LINE ? size - 2 * LINE : 0;
    ssize_t length = pread(file, tail, sizeof(tail) - 1, from);
    uint64_t seq = 0;
    if (length <= 0)
        return 0;
    tail[length] = '\0';
    for (char *at = strstr(tail, "{\"seq\":"); at; at = strstr(at + 1, "{\"seq\":"))
        seq = strtoull(at + 7, NULL, 10);
    return seq;
}

__attribute__((format(printf, 3, 4))) static void write_event(struct worker *worker, const char *kind,
                                                              const char *format, ...)
{
    char name[FILE_NAME], old[FILE_NAME + 8], line[LINE], fields[LINE / 2];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(fields, sizeof(fields), format, arguments);
    va_end(arguments);
    if (length < 0 || (size_t)length >= sizeof(fields))
        return;
    snprintf(name, sizeof(name), "sluice.failover.%s.jsonl", worker->side.host);
    snprintf(old, sizeof(old), "%s.1", name);
    int file = openat(worker->side.folder, name, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (file < 0)
        return;
    if (!worker->event)
        worker->event = last_event(file);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    length =
        snprintf(line, sizeof(line), "{\"seq\":%" PRIu64 ",\"time\":%lld.%03ld,\"kind\":\"%s\",\"host\":\"%s\"%s%s}\n",
                 ++worker->event, (long long)now.tv_sec, now.tv_nsec / 1000000, kind, worker->side.host,
                 *fields ? "," : "", fields);
    struct stat facts;
    if (length > 0 && (size_t)length < sizeof(line) && fstat(file, &facts) == 0 && S_ISREG(facts.st_mode)) {
        if (write(file, line, (size_t)length) != length && ftruncate(file, facts.st_size) != 0)
            sluice_say("%s: a partly written line stays", name);
        fsync(file);
        if (facts.st_size + length > EVENTS_LIMIT)
            renameat(worker->side.folder, name, worker->side.folder, old);
    }
    close(file);
}

static void write_status(struct worker *worker, int64_t now)
{
    char name[FILE_NAME], fresh[FILE_NAME + 8], text[LINE];
    struct timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    snprintf(name, sizeof(name), "sluice.supervise.%s", worker->side.host);
    snprintf(fresh, sizeof(fresh), ".%s.new", name);
    int length =
        snprintf(text, sizeof(text),
                 "{\"schema_version\": 1, \"host\": \"%s\", \"boot_id\": \"%s\", \"time\": %lld.%03ld, "
                 "\"boottime_ms\": %" PRId64 ", \"supervisor\": %d, \"slurmctld\": %d, \"holds\": %s, "
                 "\"epoch\": %" PRIu64 ", \"valid_ms\": %" PRId64 ", \"write_ms\": %.1f, \"slowest_write_ms\": %.1f}\n",
                 worker->side.host, worker->side.boot, (long long)wall.tv_sec, wall.tv_nsec / 1000000, now / 1000000,
                 (int)worker->parent, (int)worker->shared->child, worker->side.holds ? "true" : "false",
                 worker->side.holds ? worker->side.epoch : 0, worker->side.valid_ns / 1000000,
                 (double)worker->last_ns / 1e6, (double)worker->slowest_ns / 1e6);
    int file = openat(worker->side.folder, fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (file < 0)
        return;
    bool good = length > 0 && write(file, text, (size_t)length) == length;
    good = close(file) == 0 && good;
    if (!good || renameat(worker->side.folder, fresh, worker->side.folder, name) != 0)
        unlinkat(worker->side.folder, fresh, 0);
    worker->last_ns = sluice_boottime_ns() - now; /* from open to rename: what storage costs */
    if (worker->last_ns > worker->slowest_ns)
        worker->slowest_ns = worker->last_ns;
    worker->written_ns = now;
}

/* ---- the lease ---- */

static void log_failure(struct worker *worker, bool bad)
{
    if (bad && !worker->failure_logged)
        sluice_say("the shared state folder fails: %s", strerror(errno));
    else if (!bad && worker->failure_logged)
        sluice_say("the shared state folder works again");
    worker->failure_logged = bad;
}

static void note_leader(struct worker *worker)
{
    const struct sluice_lease *seen = &worker->side.seen;
    if (worker->side.damaged)
        snprintf(worker->shared->leader, sizeof(worker->shared->leader), "unknown: sluice.lease cannot be read");
    else if (worker->side.any)
        snprintf(worker->shared->leader, sizeof(worker->shared->leader), "%s (%s, epoch %" PRIu64 ")", seen->host,
                 seen->held ? "holds it" : "gave it back", seen->epoch);
}

static void hold(struct worker *worker, int64_t now)
{
    struct sluice_storage *shared = worker->shared;
    bool held = worker->side.holds;
    char before[SLUICE_LEASE_NAME] = "";
    bool given_back = true;
    if (!held && !worker->wanted_ns)
        worker->wanted_ns = now;
    if (!held && sluice_lease_watch(&worker->side) && worker->side.any) {
        memcpy(before, worker->side.seen.host, sizeof(before));
        given_back = !worker->side.seen.held;
    }
    enum sluice_lease_answer answer = sluice_lease_hold(&worker->side);
    log_failure(worker, answer == SLUICE_LEASE_ERROR);
    if (worker->side.holds) {
        shared->epoch = worker->side.epoch;
        shared->from_ns = worker->side.from_ns;
    }
    if (answer == SLUICE_LEASE_OURS && !held) {
        sluice_say("this controller holds the lease: epoch %" PRIu64, worker->side.epoch);
        write_event(worker, "lease.taken",
                    "\"epoch\":%" PRIu64 ",\"from\":\"%s\",\"given_back\":%s,\"waited_ms\":%" PRId64,
                    worker->side.epoch, before, given_back ? "true" : "false", (now - worker->wanted_ns) / 1000000);
        worker->wanted_ns = 0;
    } else if (answer == SLUICE_LEASE_LOST) {
        shared->lost = 1;
        shared->from_ns = 0;
        note_leader(worker);
        write_event(worker, "lease.lost", "\"epoch\":%" PRIu64 ",\"leader\":\"%s\"", worker->side.epoch,
                    worker->side.any ? worker->side.seen.host : "");
    } else {
        note_leader(worker);
    }
}

static void give_back(struct worker *worker, const char *why)
{
    worker->wanted_ns = 0;
    if (!worker->side.holds)
        return;
    worker->shared->from_ns = 0;
    if (sluice_lease_release(&worker->side) == SLUICE_LEASE_OURS)
        write_event(worker, "lease.released", "\"epoch\":%" PRIu64 ",\"why\":\"%s\"", worker->side.epoch, why);
}

static void end(struct worker *worker)
{
    struct sluice_storage *shared = worker->shared;
    int status = shared->status;
    give_back(worker, "slurmctld ended");
    if (shared->why[0]) {
        char why[SLUICE_STORAGE_WHY];
        size_t length = 0;
        for (const char *at = shared->why; *at && length < sizeof(why) - 1; at++)
            why[length++] = *at < ' ' || *at > '~' || *at == '"' || *at == '\\' ? '\'' : *at;
        why[length] = '\0';
        write_event(worker, "fenced", "\"why\":\"%s\"", why);
    } else if (WIFSIGNALED(status)) {
        write_event(worker, "slurmctld.died", "\"signal\":%d", WTERMSIG(status));
    } else if (WIFEXITED(status) && WEXITSTATUS(status) != 0) {
        write_event(worker, "slurmctld.died", "\"status\":%d", WEXITSTATUS(status));
    }
    write_status(worker, sluice_boottime_ns());
    _exit(0);
}

static void work(struct worker *worker)
{
    int64_t period = worker->side.valid_ns / 8;
    period = period < 20000000 ? 20000000 : period > 500000000 ? 500000000 : period;
    for (;;) {
        if (getppid() != worker->parent)
            _exit(0); /* slurmctld dies with its supervisor; its lease lapses */
        if (worker->shared->ended)
            end(worker);
        int64_t now = sluice_boottime_ns();
        bool alive = now - worker->shared->beat_ns < worker->side.valid_ns / 2;
        if (worker->shared->wanted && alive && !worker->shared->lost)
            hold(worker, now);
        else if (!worker->shared->wanted) {
            give_back(worker, "standby");
            log_failure(worker, !sluice_lease_watch(&worker->side));
        }
        if (now - worker->written_ns > STATUS_EVERY_NS)
            write_status(worker, now);
        struct timespec nap = {.tv_sec = period / 1000000000, .tv_nsec = period % 1000000000};
        nanosleep(&nap, NULL);
    }
}

static void read_boot_id(char *boot, size_t size)
{
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (!file || !fgets(boot, (int)size, file) || !*boot)
        snprintf(boot, size, "unknown");
    boot[strcspn(boot, "\n")] = '\0';
    if (file)
        fclose(file);
}

static void run(struct worker *worker, const char *folder, uid_t uid, gid_t gid)
{
    sigset_t none;
    sigemptyset(&none);
    for (int number = 1; number < 32; number++)
        signal(number, number == SIGTERM || number == SIGINT || number == SIGHUP ? SIG_IGN : SIG_DFL);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (geteuid() == 0 && (setgroups(0, NULL) != 0 || setresgid(gid, gid, gid) != 0 || setresuid(uid, uid, uid) != 0)) {
        sluice_say("cannot become slurmctld's user: %s", strerror(errno));
        _exit(1);
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* after the change of user, which clears it */
    prctl(PR_SET_NAME, "sluice-storage");
    worker->side.now_ns = sluice_boottime_ns;
    if (gethostname(worker->side.host, sizeof(worker->side.host) - 1) != 0 || strchr(worker->side.host, '/'))
        snprintf(worker->side.host, sizeof(worker->side.host), "localhost");
    worker->side.host[strcspn(worker->side.host, ".")] = '\0'; /* as Slurm names controllers */
    read_boot_id(worker->side.boot, sizeof(worker->side.boot));
    while ((worker->side.folder = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0) {
        log_failure(worker, true);
        if (getppid() != worker->parent || worker->shared->ended)
            _exit(1);
        nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
    }
    work(worker);
}

pid_t sluice_storage_start(struct sluice_storage *shared, const char *folder, uid_t uid, gid_t gid, int64_t valid_ns)
{
    struct worker worker = {.shared = shared, .parent = getpid(), .side.valid_ns = valid_ns};
    pid_t pid = fork();
    if (pid == 0) {
        run(&worker, folder, uid, gid);
        _exit(0);
    }
    return pid;
}
