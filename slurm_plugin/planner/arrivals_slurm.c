/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Jobs whose nodes have just booted.
 *
 * slurmctld looks every 30 s which jobs waited for nodes that are there now, and starts them (job_time_limit). Where nodes
 * are powered up and down, a thread looks at their states and has it look at once when one has registered.
 */
#include "planner/planner_internal_slurm.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "runtime/runtime.h"
#include "src/slurmctld/locks.h"

enum { PERIOD_MS = 200 };

static struct {
    pthread_t thread;
    pthread_mutex_t lock; /* of `stop` */
    pthread_cond_t wake;
    bool stop;
    /* The thread's own: which nodes were not there at the last look. */
    bool *absent;
    int count;
    _Atomic uint64_t *looks; /* that slurmctld was made to take */
} arrivals = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* With slurmctld's read locks. After a change of the nodes' count nothing is known of before. */
static bool make_room(void)
{
    if (arrivals.count == node_record_count)
        return true;
    free(arrivals.absent);
    arrivals.absent = calloc((size_t)node_record_count, sizeof(*arrivals.absent));
    arrivals.count = arrivals.absent ? node_record_count : 0;
    return arrivals.absent != NULL;
}

/* Has a node registered that was not there at the last look? Not one with other GPUs than slurm.conf says: Slurm would
 * start the job that waits for it, and what watches over the pool takes the job away first. */
static bool one_has_come(void)
{
    const slurmctld_lock_t locks = {.conf = READ_LOCK, .node = READ_LOCK};
    bool come = false;
    lock_slurmctld(locks);
    if (slurm_conf.resume_program && make_room())
        for (int i = 0; i < arrivals.count; i++) {
            const node_record_t *node = node_record_table_ptr[i];
            if (!node)
                continue;
            bool absent = IS_NODE_POWERED_DOWN(node) || IS_NODE_POWERING_UP(node);
            come = come || (arrivals.absent[i] && !absent && !IS_NODE_INVALID_REG(node));
            arrivals.absent[i] = absent;
        }
    unlock_slurmctld(locks);
    return come;
}

static bool wait_for(int64_t ms)
{
    struct timespec until = sluice_deadline(CLOCK_MONOTONIC, ms);
    pthread_mutex_lock(&arrivals.lock);
    while (!arrivals.stop && pthread_cond_timedwait(&arrivals.wake, &arrivals.lock, &until) != ETIMEDOUT)
        ;
    bool go_on = !arrivals.stop;
    pthread_mutex_unlock(&arrivals.lock);
    return go_on;
}

static void *run(void *unused)
{
    (void)unused;
    while (wait_for(PERIOD_MS))
        if (sluice_in_charge() && one_has_come() && sluice_settings_level() > SLUICE_LEVEL_OFF &&
            sluice_start_lock()) { /* the locks that slurmctld has there */
            job_time_limit();
            sluice_start_unlock();
            atomic_fetch_add(arrivals.looks, 1);
        }
    free(arrivals.absent);
    arrivals.absent = NULL;
    arrivals.count = 0;
    return NULL;
}

static bool start(const struct sluice_site *site)
{
    (void)site;
    arrivals.looks = sluice_status_counter("arrivals.looks");
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&arrivals.wake, &attributes);
    pthread_condattr_destroy(&attributes);
    arrivals.stop = false;
    bool good = pthread_create(&arrivals.thread, NULL, run, NULL) == 0;
    if (!good)
        pthread_cond_destroy(&arrivals.wake);
    return good;
}

static void stop(void)
{
    pthread_mutex_lock(&arrivals.lock);
    arrivals.stop = true;
    pthread_cond_signal(&arrivals.wake);
    pthread_mutex_unlock(&arrivals.lock);
    pthread_join(arrivals.thread, NULL);
    pthread_cond_destroy(&arrivals.wake);
}

static struct sluice_module module = {.name = "arrivals", .start = start, .stop = stop};

__attribute__((constructor)) static void announce(void)
{
    sluice_controller_module(&module);
}
