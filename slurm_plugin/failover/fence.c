/* SPDX-License-Identifier: Apache-2.0 */
#include "failover/fence.h"

#include "runtime/runtime.h"
#include "supervisor/supervisor.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

enum { TICK_MS = 50, OPEN_TRIES = 250, OPEN_MS = 20, GATE_MS = 10 };
static const int64_t FIRST_ASK_NS = INT64_C(3000000000), NEXT_ASK_NS = INT64_C(5000000000);

static struct {
    struct sluice_watch *_Atomic watch; /* NULL: no supervisor */
    bool (*relinquished)(void);
    void (*waits)(void);
    pthread_t thread;
    atomic_bool ending;
} fence;

static void nap(long ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

/* At once, whatever other threads do, without taking a lock that one of them may hold. */
void sluice_fence_end(const char *why)
{
    if (write(STDERR_FILENO, why, strlen(why)) < 0)
        why = NULL;
    _exit(SLUICE_FENCED_STATUS);
}

bool sluice_fence_holds(void)
{
    struct sluice_watch *watch = fence.watch;
    return !watch || (watch->role == SLUICE_LEADS && sluice_boottime_ns() < watch->until_ns);
}

uint64_t sluice_fence_epoch(void)
{
    struct sluice_watch *watch = fence.watch;
    return watch ? watch->epoch : 0;
}

void sluice_fence_lead(void)
{
    struct sluice_watch *watch = fence.watch;
    if (!watch || watch->role == SLUICE_LEADS)
        return;
    sluice_log_info("sluice: waits for the lease of the state folder");
    int64_t begun = sluice_boottime_ns(), next = begun + FIRST_ASK_NS;
    watch->role = SLUICE_ASKS;
    while (sluice_boottime_ns() >= watch->until_ns) {
        /* The supervisor kills us before; unless it is stopped itself. */
        if (sluice_boottime_ns() - begun > watch->patience_ns + watch->lease_ns) {
            sluice_log_error("sluice: another controller holds the lease; slurmctld ends");
            sluice_fence_end("sluice: slurmctld did not get the lease and ends\n");
        }
        if (fence.waits && sluice_boottime_ns() >= next) {
            next += NEXT_ASK_NS;
            fence.waits();
        }
        nap(GATE_MS);
    }
    watch->tick_ns = sluice_boottime_ns();
    watch->role = SLUICE_LEADS;
    sluice_log_info("sluice: this controller holds the lease, epoch %llu", (unsigned long long)watch->epoch);
}

static void *tick(void *unused)
{
    struct sluice_watch *watch = fence.watch;
    (void)unused;
    for (; !fence.ending; nap(TICK_MS)) {
        int64_t now = sluice_boottime_ns();
        if (watch->role == SLUICE_LEADS && now >= watch->until_ns)
            sluice_fence_end("sluice: the lease lapsed: slurmctld ends, so that no two controllers write state\n");
        watch->tick_ns = now;
        if (watch->role == SLUICE_LEADS && fence.relinquished()) {
            watch->role = SLUICE_STANDBY;
            sluice_log_info("sluice: this controller is a backup again: it releases the lease");
        }
    }
    return NULL;
}

static struct sluice_watch *find_watch(const char *path)
{
    int file = -1;
    for (int i = 0; file < 0 && i < OPEN_TRIES; i++) { /* it becomes our user's when we have become that user */
        file = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
        if (file < 0 && errno != EACCES)
            break;
        if (file < 0)
            nap(OPEN_MS);
    }
    struct stat facts;
    if (file < 0 || fstat(file, &facts) != 0 || facts.st_size < (off_t)sizeof(struct sluice_watch)) {
        sluice_log_error("sluice: %s: %s", path, file < 0 ? strerror(errno) : "not a supervisor's");
        if (file >= 0)
            close(file);
        return NULL;
    }
    void *memory = mmap(NULL, sizeof(struct sluice_watch), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    struct sluice_watch *watch = memory == MAP_FAILED ? NULL : memory;
    if (watch && (watch->magic != SLUICE_WATCH_MAGIC)) {
        sluice_log_error("sluice: %s: of another version of the supervisor", path);
        munmap(memory, sizeof(struct sluice_watch));
        watch = NULL;
    }
    return watch;
}

/* slurmctld handles signals in a thread of its own: ours takes none. */
static bool start_thread(void)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    fence.ending = false;
    bool good = pthread_create(&fence.thread, NULL, tick, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (good)
        pthread_setname_np(fence.thread, "sluice_fence");
    return good;
}

bool sluice_fence_start(const char *folder, uint32_t timeout_s, bool (*relinquished)(void))
{
    const char *path = getenv(SLUICE_WATCH_ENV);
    if (!path)
        return true;
    struct sluice_watch *watch = find_watch(path);
    if (!watch)
        return false;
    if (watch->supervisor != getppid()) { /* e.g. a slurmctld that a script of the first one starts */
        sluice_log_error("sluice: %s: belongs to process %lld, which is not our parent", path,
                         (long long)watch->supervisor);
        munmap(watch, sizeof(*watch));
        return false;
    }
    /* Once more, as a change of user clears it; then check again that the parent still runs. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (watch->supervisor != getppid())
        sluice_fence_end("sluice: the supervisor has ended\n");
    fence.relinquished = relinquished;
    fence.watch = watch;
    snprintf(watch->folder, sizeof(watch->folder), "%s", folder);
    watch->timeout_s = timeout_s;
    watch->tick_ns = sluice_boottime_ns();
    if (!start_thread()) {
        fence.watch = NULL;
        return false;
    }
    watch->ready = 1;
    return true;
}

void sluice_fence_at_gate(void (*waits)(void))
{
    fence.waits = waits;
}

void sluice_fence_stop(void)
{
    if (!fence.watch)
        return;
    fence.ending = true;
    pthread_join(fence.thread, NULL);
    fence.watch = NULL; /* stays mapped: another thread may be reading it */
}
