/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The library that a vendor's driver loads into a job's process (CUDA_INJECTION64_PATH, ROCP_TOOL_LIBRARIES), or that a
 * preloaded one loads when the program begins with Level Zero. Until a profile is asked for it is one sleeping thread,
 * and no call of the program passes through it, but on Intel's GPUs what is appended to command lists and calls of
 * oneCCL. CUPTI is not loaded before; AMD's tracing library, which loads this one, is there from the program's start.
 * Whatever goes wrong here, the program runs on as it would have without it.
 */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "clock.h"
#include "cupti.h"
#include "inject.h"
#include "session.h"

enum { STACK_BYTES = 1 << 20, EXIT_SECONDS = 3, LOOK_NS = 250000000 };

static struct {
    const struct tracer *tracer;
    int folder;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool profiling; /* with the lock */
    atomic_bool exiting;
    bool child; /* of a process that has this library: there is no thread */
} here = {.folder = -1, .lock = PTHREAD_MUTEX_INITIALIZER, .ended = PTHREAD_COND_INITIALIZER};

/* ---- what is asked for ---- */

/* False: there is no such file, or it is not one. */
static bool read_control(struct sluice_profile_control *control)
{
    int file = openat(here.folder, SLUICE_PROFILE_CONTROL_NAME, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (file < 0) {
        return false;
    }
    ssize_t got = read(file, control, sizeof *control);
    close(file);
    return got == sizeof *control && memcmp(control->magic, SLUICE_PROFILE_CONTROL_MAGIC, sizeof control->magic) == 0;
}

static enum sluice_profile_reason asked(const struct sluice_profile_control *mine)
{
    struct sluice_profile_control now;
    if (mine->until != 0 && clock_now(CLOCK_MONOTONIC) >= mine->until) {
        return SLUICE_PROFILE_TIME;
    }
    return read_control(&now) && (now.wanted == 0 || now.number != mine->number) ? SLUICE_PROFILE_STOPPED : 0;
}

/* ---- the thread ---- */

static void profile(const struct sluice_profile_control *control)
{
    pthread_mutex_lock(&here.lock);
    here.profiling = !atomic_load(&here.exiting);
    bool go_on = here.profiling;
    pthread_mutex_unlock(&here.lock);
    if (go_on) {
        session_run(here.tracer, here.folder, control, asked);
    }
    pthread_mutex_lock(&here.lock);
    here.profiling = false;
    pthread_cond_broadcast(&here.ended);
    pthread_mutex_unlock(&here.lock);
}

/* Its seconds count from now. */
static void set_end(struct sluice_profile_control *control)
{
    uint64_t end = clock_now(CLOCK_MONOTONIC) + control->seconds * UINT64_C(1000000000);
    if (control->seconds != 0 && (control->until == 0 || end < control->until)) {
        control->until = end;
    }
}

static void *watch(void *unused)
{
    const struct timespec pause = {.tv_nsec = LOOK_NS};
    bool any = false; /* `done` is the number of a profile that this process had */
    uint32_t done = 0;
    (void)unused;
    for (;;) {
        struct sluice_profile_control control;
        if (read_control(&control) && control.wanted != 0 && (!any || control.number != done) &&
            (control.until == 0 || clock_now(CLOCK_MONOTONIC) < control.until)) {
            set_end(&control);
            profile(&control);
            any = true;
            done = control.number;
        } else {
            nanosleep(&pause, NULL);
        }
    }
    return NULL;
}

/* ---- forks and exits ---- */

static void after_fork(void)
{
    here.child = true;
    session_abandon();
    if (here.tracer->abandon != NULL) {
        here.tracer->abandon();
    }
}

/* The profile's end is written by its own thread, which gets a bounded time for it. */
void inject_end(void)
{
    struct timespec until;
    if (here.child) {
        return;
    }
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += EXIT_SECONDS;
    atomic_store(&here.exiting, true);
    pthread_mutex_lock(&here.lock);
    if (here.profiling) {
        session_end();
    }
    int failed = 0;
    while (here.profiling && failed == 0) {
        failed = pthread_cond_timedwait(&here.ended, &here.lock, &until);
    }
    pthread_mutex_unlock(&here.lock);
}

static void start_thread(void)
{
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t every, before;
    sigfillset(&every);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &every, &before); /* the program's signals are the program's */
    if (pthread_create(&thread, &attributes, watch, NULL) == 0) {
        pthread_atfork(NULL, NULL, after_fork);
        atexit(inject_end);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

static void start(void)
{
    const char *folder = getenv(SLUICE_PROFILE_FOLDER_VARIABLE);
    if (folder != NULL && *folder == '/') {
        here.folder = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    }
    if (here.folder >= 0) {
        if (here.tracer->begin != NULL) {
            here.tracer->begin();
        }
        start_thread();
    }
}

void inject_start(const struct tracer *tracer)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    const struct tracer *none = NULL;
    __atomic_compare_exchange_n(&here.tracer, &none, tracer, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    pthread_once(&once, start);
}

/* NVIDIA's driver calls this at the end of cuInit. */
__attribute__((visibility("default"))) int InitializeInjection(void)
{
    inject_start(&cupti_tracer);
    return 1;
}
