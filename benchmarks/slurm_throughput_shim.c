/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Times select_p_job_test of whatever select plugin it is linked to, by the clock and by the thread's use of the
 * processor, and writes one sample a call into a file that is mapped into memory: $SLUICE_SHIM_SAMPLES. It knows no
 * header of Slurm: the arguments go through as they come.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { ROOM = 4 * 1024 * 1024 };

struct samples {
    uint64_t count; /* of all calls; what is beyond the room is not kept */
    struct {
        uint32_t ns, cpu_ns;
        uint16_t mode;
        int16_t ok;
    } sample[ROOM];
};

typedef int (*test)(void *, void *, uint32_t, uint32_t, uint32_t, uint16_t, void *, void *, void *, void *);
static struct samples *samples;
static test wrapped;
static int (*wrapped_init)(void);

int init(void)
{
    wrapped = (test)(uintptr_t)dlsym(RTLD_NEXT, "select_p_job_test");
    wrapped_init = (int (*)(void))(uintptr_t)dlsym(RTLD_NEXT, "init");
    const char *path = getenv("SLUICE_SHIM_SAMPLES");
    int file = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (file >= 0 && !ftruncate(file, sizeof(struct samples))) {
        void *map = mmap(NULL, sizeof(struct samples), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        samples = map == MAP_FAILED ? NULL : map;
    }
    if (file >= 0)
        close(file);
    return wrapped && wrapped_init ? wrapped_init() : -1;
}

static uint32_t between(const struct timespec *begin, const struct timespec *end)
{
    int64_t ns = (end->tv_sec - begin->tv_sec) * 1000000000L + (end->tv_nsec - begin->tv_nsec);
    return ns > UINT32_MAX ? UINT32_MAX : (uint32_t)ns;
}

int select_p_job_test(void *job, void *nodes, uint32_t min_nodes, uint32_t max_nodes, uint32_t req_nodes, uint16_t mode,
                      void *preemptees, void *preempted, void *rest, void *more)
{
    struct timespec begin, end, cpu_begin, cpu_end;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &cpu_begin);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    int rc = wrapped(job, nodes, min_nodes, max_nodes, req_nodes, mode, preemptees, preempted, rest, more);
    clock_gettime(CLOCK_MONOTONIC, &end);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &cpu_end);
    if (samples) {
        uint64_t at = __atomic_fetch_add(&samples->count, 1, __ATOMIC_RELAXED);
        if (at < ROOM) {
            samples->sample[at].ns = between(&begin, &end);
            samples->sample[at].cpu_ns = between(&cpu_begin, &cpu_end);
            samples->sample[at].mode = mode;
            samples->sample[at].ok = rc == 0;
        }
    }
    return rc;
}
