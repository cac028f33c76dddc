/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/instead.h"

#include <pthread.h>
#include <string.h>

static struct {
    pthread_mutex_t lock;
    int64_t open_until_s;
    struct sluice_instead jobs[SLUICE_INSTEAD_MOST];
} instead = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* All below with the lock. */

/* Until the hook has heard of it, however rarely it asks. */
static void let_preempt(struct sluice_instead *job, int64_t from_s)
{
    job->state = SLUICE_INSTEAD_PREEMPT;
    job->heard = false;
    job->until_s = from_s + SLUICE_INSTEAD_UNHEARD_S;
}

static void hear(struct sluice_instead *job, int64_t now_s)
{
    job->heard = true;
    job->until_s = now_s + SLUICE_INSTEAD_AGAIN_S;
}

/* A state that is over: an answer that did not come and moves that take too long let the job preempt. */
static void expire(struct sluice_instead *job, int64_t now_s)
{
    if ((job->state == SLUICE_INSTEAD_LOOK || job->state == SLUICE_INSTEAD_MOVES) && now_s > job->until_s)
        let_preempt(job, job->until_s);
    if (job->state == SLUICE_INSTEAD_PREEMPT && now_s > job->until_s)
        *job = (struct sluice_instead){.state = SLUICE_INSTEAD_NONE};
}

static struct sluice_instead *find(uint32_t job_id, int64_t now_s)
{
    for (uint32_t i = 0; i < SLUICE_INSTEAD_MOST; i++) {
        expire(&instead.jobs[i], now_s);
        if (instead.jobs[i].state && instead.jobs[i].job_id == job_id)
            return &instead.jobs[i];
    }
    return NULL;
}

/* NULL: there are too many. */
static struct sluice_instead *find_or_add(uint32_t job_id, int64_t now_s)
{
    struct sluice_instead *found = find(job_id, now_s);
    for (uint32_t i = 0; i < SLUICE_INSTEAD_MOST && !found; i++)
        if (!instead.jobs[i].state)
            found = &instead.jobs[i];
    return found;
}

/* ---- the hook ---- */

bool sluice_instead_hold(uint32_t job_id, int64_t victims_lose, int64_t now_s, bool *asked)
{
    *asked = false;
    pthread_mutex_lock(&instead.lock);
    struct sluice_instead *job = find_or_add(job_id, now_s);
    if (job && !job->state && now_s <= instead.open_until_s) {
        *job = (struct sluice_instead){.job_id = job_id,
                                       .state = SLUICE_INSTEAD_LOOK,
                                       .victims_lose = victims_lose,
                                       .until_s = now_s + SLUICE_INSTEAD_LOOK_S};
        *asked = true;
    }
    bool hold = job && (job->state == SLUICE_INSTEAD_LOOK || job->state == SLUICE_INSTEAD_MOVES);
    if (job && job->state == SLUICE_INSTEAD_PREEMPT && !job->heard)
        hear(job, now_s);
    pthread_mutex_unlock(&instead.lock);
    return hold;
}

void sluice_instead_preempts(uint32_t job_id, int64_t victims_lose, int64_t now_s)
{
    pthread_mutex_lock(&instead.lock);
    struct sluice_instead *job = find_or_add(job_id, now_s);
    if (job) {
        *job = (struct sluice_instead){
            .job_id = job_id, .state = SLUICE_INSTEAD_PREEMPT, .preempts = true, .victims_lose = victims_lose};
        hear(job, now_s);
    }
    pthread_mutex_unlock(&instead.lock);
}

/* ---- the planner ---- */

void sluice_instead_open(bool open, int64_t now_s)
{
    pthread_mutex_lock(&instead.lock);
    instead.open_until_s = open ? now_s + SLUICE_INSTEAD_OPEN_S : 0;
    pthread_mutex_unlock(&instead.lock);
}

uint32_t sluice_instead_list(struct sluice_instead *jobs, enum sluice_instead_state state, int64_t now_s)
{
    uint32_t count = 0;
    pthread_mutex_lock(&instead.lock);
    for (uint32_t i = 0; i < SLUICE_INSTEAD_MOST; i++) {
        expire(&instead.jobs[i], now_s);
        if (instead.jobs[i].state == state)
            jobs[count++] = instead.jobs[i];
    }
    pthread_mutex_unlock(&instead.lock);
    return count;
}

void sluice_instead_answer(uint32_t job_id, enum sluice_instead_state state, int64_t moves_lose, int64_t now_s,
                           int64_t until_s)
{
    pthread_mutex_lock(&instead.lock);
    struct sluice_instead *job = find(job_id, now_s);
    /* Moves have begun: they count if the answer is late, too, and the hook has not let it preempt meanwhile. */
    bool late = job && job->state == SLUICE_INSTEAD_PREEMPT && !job->heard;
    if (state == SLUICE_INSTEAD_MOVES && job && (job->state == SLUICE_INSTEAD_LOOK || late)) {
        job->state = state;
        job->moves_lose = moves_lose;
        job->until_s = until_s;
    } else if (job && job->state == SLUICE_INSTEAD_LOOK) {
        let_preempt(job, now_s);
    }
    pthread_mutex_unlock(&instead.lock);
}

void sluice_instead_moved(uint32_t job_id, int64_t now_s)
{
    pthread_mutex_lock(&instead.lock);
    struct sluice_instead *job = find(job_id, now_s);
    if (job && job->state == SLUICE_INSTEAD_MOVES)
        let_preempt(job, now_s);
    pthread_mutex_unlock(&instead.lock);
}

void sluice_instead_gone(uint32_t job_id, int64_t now_s)
{
    pthread_mutex_lock(&instead.lock);
    struct sluice_instead *job = find(job_id, now_s);
    if (job)
        job->state = SLUICE_INSTEAD_NONE;
    pthread_mutex_unlock(&instead.lock);
}

struct sluice_instead sluice_instead_of(uint32_t job_id, int64_t now_s)
{
    pthread_mutex_lock(&instead.lock);
    const struct sluice_instead *job = find(job_id, now_s);
    struct sluice_instead found = job ? *job : (struct sluice_instead){.job_id = job_id};
    pthread_mutex_unlock(&instead.lock);
    return found;
}

void sluice_instead_forget(void)
{
    pthread_mutex_lock(&instead.lock);
    instead.open_until_s = 0;
    memset(instead.jobs, 0, sizeof instead.jobs);
    pthread_mutex_unlock(&instead.lock);
}
