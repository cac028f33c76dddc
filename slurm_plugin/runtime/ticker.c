/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/ticker.h"

#include "runtime/clock.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { NAME_SIZE = 16 }; /* as a thread's */

struct sluice_tick {
    struct sluice_tick *next;
    char name[NAME_SIZE];
    void (*function)(void *);
    void *argument;
    int64_t due_ns, period_ns;
    bool running;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t life =
    PTHREAD_MUTEX_INITIALIZER; /* held around start and join of the thread; taken before `lock` */
static pthread_cond_t changed, finished = PTHREAD_COND_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct sluice_tick *ticks;
static pthread_t thread;
static bool started, ending;

static void make_condition(void)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&changed, &attributes);
    pthread_condattr_destroy(&attributes);
}

static struct sluice_tick *next_due(void)
{
    struct sluice_tick *next = ticks;
    for (struct sluice_tick *tick = ticks; tick; tick = tick->next)
        if (tick->due_ns < next->due_ns)
            next = tick;
    return next;
}

static void *run(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&lock);
    while (!ending) {
        struct sluice_tick *next = next_due();
        if (!next) {
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        int64_t now = sluice_clock_ns(CLOCK_MONOTONIC);
        if (next->due_ns > now) {
            struct timespec until = sluice_timespec(next->due_ns);
            pthread_cond_timedwait(&changed, &lock, &until);
            continue;
        }
        next->due_ns = now + next->period_ns;
        next->running = true;
        pthread_mutex_unlock(&lock);
        next->function(next->argument);
        pthread_mutex_lock(&lock);
        next->running = false;
        pthread_cond_broadcast(&finished);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

/* slurmctld handles signals in a thread of its own: ours takes none. */
static bool start_thread(void)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    ending = false;
    bool good = pthread_create(&thread, NULL, run, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (good)
        pthread_setname_np(thread, "sluice_ticker");
    return good;
}

struct sluice_tick *sluice_ticker_add(const char *name, uint32_t period_ms, void (*function)(void *), void *argument)
{
    pthread_once(&once, make_condition);
    struct sluice_tick *tick = calloc(1, sizeof(*tick));
    if (!tick)
        return NULL;
    snprintf(tick->name, sizeof(tick->name), "%s", name);
    tick->function = function;
    tick->argument = argument;
    tick->period_ns = (int64_t)(period_ms < 10 ? 10 : period_ms > 3600000 ? 3600000 : period_ms) * 1000000;
    tick->due_ns = sluice_clock_ns(CLOCK_MONOTONIC) + tick->period_ns;
    pthread_mutex_lock(&life);
    pthread_mutex_lock(&lock);
    tick->next = ticks;
    ticks = tick;
    if (!started && !(started = start_thread())) {
        ticks = tick->next;
        free(tick);
        tick = NULL;
    }
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&lock);
    pthread_mutex_unlock(&life);
    return tick;
}

void sluice_ticker_wake(struct sluice_tick *tick)
{
    pthread_mutex_lock(&lock);
    tick->due_ns = 0;
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&lock);
}

void sluice_ticker_remove(struct sluice_tick *tick)
{
    if (!tick)
        return;
    pthread_mutex_lock(&life);
    pthread_mutex_lock(&lock);
    while (tick->running)
        pthread_cond_wait(&finished, &lock);
    for (struct sluice_tick **at = &ticks; *at; at = &(*at)->next)
        if (*at == tick) {
            *at = tick->next;
            break;
        }
    bool last = !ticks;
    ending = last;
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&lock);
    free(tick);
    if (last) {
        pthread_join(thread, NULL);
        started = false;
    }
    pthread_mutex_unlock(&life);
}
