/* SPDX-License-Identifier: Apache-2.0 */
/* What a program loses by waiting for processors: by made-up figures, and by two threads on one processor. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "check.h"
#include "clock.h"
#include "demand.h"

enum { MS = 1000000 };

static void test_figures(void)
{
    static const struct {
        uint64_t ran, waited, lost; /* ms of a second */
    } cases[] = {
        {0, 0, 0},         /* it sleeps */
        {20, 0, 0},        /* it waits for its GPU, on a quiet node */
        {20, 80, 80},      /* and on a busy one: the rest of the second is its own */
        {100, 900, 900},   /* it computes, and has a tenth of a processor */
        {4000, 0, 0},      /* four threads, each with a processor */
        {1000, 3000, 750}, /* with one for all */
        {1280, 1280, 500}, /* many that sleep most of the time */
        {0, 60000, 1000},  /* stopped by a limit of its cgroup */
    };
    const struct demand before = {.ran = 7 * MS, .waited = 9 * MS};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct demand now = {.ran = before.ran + cases[i].ran * MS, .waited = before.waited + cases[i].waited * MS};
        CHECK_INT(demand_lost(&before, &now, 1000 * MS) / MS, cases[i].lost);
    }
    const struct demand fewer = {.ran = 1, .waited = 1}; /* threads have ended */
    CHECK_INT(demand_lost(&before, &fewer, 1000 * MS), 0);
}

static atomic_bool over;

static void *spin(void *unused)
{
    (void)unused;
    while (!atomic_load(&over)) {
    }
    return NULL;
}

static void test_two_threads_on_one_processor(void)
{
    cpu_set_t allowed, one;
    pthread_t other;
    CHECK(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    CPU_ZERO(&one);
    for (size_t cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; cpu++) {
        if (CPU_ISSET(cpu, &allowed)) {
            CPU_SET(cpu, &one);
        }
    }
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    CHECK(pthread_create(&other, NULL, spin, NULL) == 0);
    uint64_t began = clock_now(CLOCK_MONOTONIC), passed = 0;
    struct demand before = demand_now(), now = before;
    while (passed < 500 * (uint64_t)MS) {
        passed = clock_now(CLOCK_MONOTONIC) - began;
    }
    now = demand_now();
    atomic_store(&over, true);
    pthread_join(other, NULL);
    if (now.ran == 0) {
        return; /* a kernel without these figures */
    }
    uint64_t lost = demand_lost(&before, &now, passed);
    CHECK(lost > passed / 3 && lost <= passed); /* a half; more where others want that processor, too */
}

int main(void)
{
    test_figures();
    test_two_threads_on_one_processor();
    return 0;
}
