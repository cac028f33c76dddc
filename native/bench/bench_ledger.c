/* SPDX-License-Identifier: Apache-2.0 */
/* The memory ledger among processes: time of a pair of allocation and free, and exactness when processes are killed. */
#include "bench.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_PROCESSES = 256, HELD = 8 };

static enum sluice_error fail(struct sluice_error_text *text, enum sluice_error error, const char *what)
{
    if (text)
        snprintf(text->text, sizeof text->text, "%s: %s", what,
                 error == SLUICE_ERROR_SYSTEM ? strerror(errno) : sluice_strerror(error));
    return error;
}

/* The peer: counters like the ledger's, under a mutex or atomics. */
struct counters {
    pthread_mutex_t mutex;
    uint64_t limit, total, quota, owned;
    uint64_t held[MAX_PROCESSES], committed[MAX_PROCESSES];
};

/* Everything that the processes share, in one mapping. */
struct pool {
    atomic_uint ready;
    atomic_bool go;
    struct counters counters;
    _Alignas(SLUICE_LEDGER_ALIGNMENT) unsigned char region[];
};

static const struct sluice_ledger_shape shape = {.devices = 1, .owners = 1, .processes = MAX_PROCESSES};

static size_t pool_size(void)
{
    return sizeof(struct pool) + sluice_ledger_size(&shape);
}

static struct pool *new_pool(struct sluice_ledger **ledger, struct sluice_error_text *text)
{
    struct pool *pool = mmap(NULL, pool_size(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (pool == MAP_FAILED) {
        fail(text, SLUICE_ERROR_SYSTEM, "mmap");
        return NULL;
    }
    size_t size = sluice_ledger_size(&shape);
    struct sluice_ledger_device terms = {.capacity = UINT64_C(1) << 40, .granularity = 512, .oversubscription = 1000};
    if (sluice_ledger_format(pool->region, size, &shape, text) ||
        sluice_ledger_new(pool->region, size, 0, ledger, text)) {
        munmap(pool, pool_size());
        return NULL;
    }
    (void)sluice_ledger_set_device(*ledger, 0, &terms, text);
    (void)sluice_ledger_set_quota(*ledger, 0, 0, terms.capacity, text);
    struct counters *counters = &pool->counters;
    counters->limit = counters->quota = terms.capacity;
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&counters->mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
    return pool;
}

static void free_pool(struct pool *pool, struct sluice_ledger *ledger)
{
    sluice_ledger_free(ledger);
    pthread_mutex_destroy(&pool->counters.mutex);
    munmap(pool, pool_size());
}

static bool time_ledger(struct sluice_ledger *ledger, uint32_t number, uint32_t pairs, uint64_t bytes, uint64_t *times)
{
    uint32_t process;
    if (sluice_ledger_join(ledger, 0, (uint32_t)getpid(), number, &process, NULL))
        return false;
    for (uint32_t i = 0; i < pairs; i++) {
        struct sluice_ledger_charge charge;
        uint64_t begin = bench_now_ns();
        if (sluice_ledger_reserve(ledger, process, 0, bytes, 0, &charge, NULL) ||
            sluice_ledger_commit(ledger, process, &charge, NULL) ||
            sluice_ledger_release(ledger, process, &charge, NULL))
            return false;
        times[i] = bench_now_ns() - begin;
    }
    return true;
}

static bool time_mutex(struct counters *counters, uint32_t number, uint32_t pairs, uint64_t bytes, uint64_t *times)
{
    for (uint32_t i = 0; i < pairs; i++) {
        uint64_t begin = bench_now_ns();
        pthread_mutex_lock(&counters->mutex);
        bool granted = bytes <= counters->limit - counters->total && bytes <= counters->quota - counters->owned;
        if (granted) {
            counters->total += bytes;
            counters->owned += bytes;
            counters->held[number] += bytes;
        }
        pthread_mutex_unlock(&counters->mutex);
        if (!granted)
            return false;
        counters->committed[number] += bytes;
        pthread_mutex_lock(&counters->mutex);
        counters->total -= bytes;
        counters->owned -= bytes;
        counters->held[number] -= bytes;
        pthread_mutex_unlock(&counters->mutex);
        counters->committed[number] -= bytes;
        times[i] = bench_now_ns() - begin;
    }
    return true;
}

enum sluice_error sluice_bench_ledger(enum sluice_bench_guard guard, uint32_t processes, uint32_t pairs, uint64_t bytes,
                                      uint64_t *times, uint64_t *elapsed_ns, struct sluice_error_text *text)
{
    if (!processes || processes > MAX_PROCESSES)
        return fail(text, SLUICE_ERROR_RANGE, "processes");
    struct sluice_ledger *ledger = NULL;
    struct pool *pool = new_pool(&ledger, text);
    if (!pool)
        return SLUICE_ERROR_SYSTEM;
    size_t size = sizeof *times * processes * pairs;
    uint64_t *shared_times = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared_times == MAP_FAILED) {
        free_pool(pool, ledger);
        return fail(text, SLUICE_ERROR_SYSTEM, "mmap");
    }
    memset(shared_times, 0, size); /* its pages are there before the clock runs */
    uint32_t started = 0;
    for (; started < processes; started++) {
        pid_t pid = fork();
        if (pid < 0)
            break;
        if (pid == 0) {
            atomic_fetch_add(&pool->ready, 1);
            while (!atomic_load(&pool->go))
                usleep(50);
            uint64_t *process_times = shared_times + (size_t)started * pairs;
            bool fine = guard == SLUICE_BENCH_LEDGER
                            ? time_ledger(ledger, started, pairs, bytes, process_times)
                            : time_mutex(&pool->counters, started, pairs, bytes, process_times);
            _exit(fine ? 0 : 1);
        }
    }
    while (started == processes && atomic_load(&pool->ready) < processes)
        usleep(50);
    uint64_t begin = bench_now_ns();
    atomic_store(&pool->go, true);
    bool fine = started == processes;
    for (uint32_t i = 0; i < started; i++) {
        int status;
        fine = wait(&status) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0 && fine;
    }
    *elapsed_ns = bench_now_ns() - begin;
    struct sluice_ledger_usage usage = {0};
    enum sluice_error error = sluice_ledger_audit(ledger, text);
    if (!error)
        error = sluice_ledger_device_usage(ledger, 0, &usage, text);
    if (!error && (!fine || usage.charged || pool->counters.total))
        error = fail(text, SLUICE_ERROR_CORRUPT, "a process failed, or bytes are left over");
    memcpy(times, shared_times, size);
    munmap(shared_times, size);
    free_pool(pool, ledger);
    return error;
}

/* ---- kills ---- */

/* xorshift64*, Vigna 2016 */
static uint64_t next_random(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(2685821657736338717);
}

static void run_for_ever(struct sluice_ledger *ledger, uint64_t start)
{
    struct sluice_ledger_charge charges[HELD] = {0};
    uint64_t random = start;
    uint32_t process;
    if (sluice_ledger_join(ledger, 0, (uint32_t)getpid(), start, &process, NULL))
        _exit(1);
    for (;;) {
        struct sluice_ledger_charge *charge = &charges[next_random(&random) % HELD];
        enum sluice_error error;
        if (charge->charged) {
            error = sluice_ledger_release(ledger, process, charge, NULL);
        } else {
            error = sluice_ledger_reserve(ledger, process, 0, 1 + next_random(&random) % 1000000, 0, charge, NULL);
            if (!error)
                error = sluice_ledger_commit(ledger, process, charge, NULL);
        }
        if (error)
            _exit(1);
    }
}

static pid_t start_runner(struct sluice_ledger *ledger, uint64_t start)
{
    pid_t pid = fork();
    if (pid == 0)
        run_for_ever(ledger, start);
    return pid;
}

static uint64_t distance(uint64_t a, uint64_t b)
{
    return a > b ? a - b : b - a;
}

enum sluice_error sluice_bench_ledger_kills(uint32_t processes, uint32_t kills, uint64_t seed, uint64_t *lost,
                                            uint64_t *reaped, struct sluice_error_text *text)
{
    if (!processes || processes > MAX_PROCESSES)
        return fail(text, SLUICE_ERROR_RANGE, "processes");
    struct sluice_ledger *ledger = NULL;
    struct pool *pool = new_pool(&ledger, text);
    if (!pool)
        return SLUICE_ERROR_SYSTEM;
    struct {
        pid_t pid;
        uint64_t start;
    } runners[MAX_PROCESSES];
    uint64_t random = seed | 1, left = 0, wrong = 0;
    enum sluice_error error = SLUICE_OK;
    for (uint32_t i = 0; i < processes; i++) {
        runners[i].start = next_random(&random);
        runners[i].pid = start_runner(ledger, runners[i].start);
    }
    for (uint32_t n = 0; n < kills + processes; n++) {
        bool last_round = n >= kills;
        uint32_t i = last_round ? n - kills : (uint32_t)(next_random(&random) % processes);
        int status = 0;
        uint64_t bytes = 0;
        usleep((unsigned)(next_random(&random) % 2000));
        if (runners[i].pid < 0 || kill(runners[i].pid, SIGKILL) || waitpid(runners[i].pid, &status, 0) < 0) {
            error = fail(text, SLUICE_ERROR_SYSTEM, "a process to kill");
            continue;
        }
        if (!WIFSIGNALED(status))
            error = fail(text, SLUICE_ERROR_CORRUPT, "a process ended by itself");
        enum sluice_error failed = sluice_ledger_reap(ledger, (uint32_t)runners[i].pid, runners[i].start, &bytes, text);
        error = failed ? failed : error;
        left += bytes;
        failed = sluice_ledger_audit(ledger, text);
        error = failed && failed != SLUICE_ERROR_BUSY ? failed : error;
        if (!last_round) {
            runners[i].start = next_random(&random);
            runners[i].pid = start_runner(ledger, runners[i].start);
        }
    }
    struct sluice_ledger_usage device = {0}, owner = {0};
    (void)sluice_ledger_device_usage(ledger, 0, &device, NULL);
    (void)sluice_ledger_owner_usage(ledger, 0, 0, &owner, NULL);
    wrong = device.charged + distance(device.charged, owner.charged) + distance(device.available, device.limit);
    free_pool(pool, ledger);
    if (error)
        return error;
    *lost = wrong;
    *reaped = left;
    return SLUICE_OK;
}
