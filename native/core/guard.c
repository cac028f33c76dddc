/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How far estimates of run time can be trusted, and the makespan guard that brings forward what would end last.
 *
 * Serving the least remaining work first is best for the average wait, but leaves the longest jobs to the end, where
 * they run while other GPUs are idle. A preemptive schedule is as short as possible if no job is ever left with more
 * remaining time than all remaining work takes on all GPUs (R. McNaughton, "Scheduling with Deadlines and Loss
 * Functions", Management Science 6(1), 1959). So the guard keeps the order until a job comes near that bound.
 */
#include "error.h"
#include "fixed.h"
#include "sort.h"

#include <stdlib.h>
#include <string.h>

enum {
    RATIO_ONE = 1 << 20,
    RATIO_MAX = 1 << 30, /* larger ratios count as 1024 times the estimate */
    TRUSTED_FROM = 16,   /* ends that must have been seen before the history counts */
    ARRIVALS = 64,       /* that the arrival rate is measured over */
    VAGUE_PERMILLE = 200 /* spread above which "the longest first" would follow noise */
};

/* ---- accuracy ---- */

struct sluice_accuracy {
    uint32_t capacity, count, oldest;
    uint32_t *recent; /* ring, in order of recording */
    uint32_t *sorted; /* the same ratios */
    uint64_t *tail;   /* tail[i]: sum of sorted[i ..] */
};

enum sluice_error sluice_accuracy_new(uint32_t history, struct sluice_accuracy **accuracy,
                                      struct sluice_error_text *text)
{
    if (history < 1 || history > SLUICE_ACCURACY_MAX_HISTORY)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "accuracy history %u: must be 1 to %d", history,
                           SLUICE_ACCURACY_MAX_HISTORY);
    struct sluice_accuracy *made = calloc(1, sizeof *made);
    if (made) {
        made->capacity = history;
        made->recent = calloc(history, sizeof *made->recent);
        made->sorted = calloc(history, sizeof *made->sorted);
        made->tail = calloc((size_t)history + 1, sizeof *made->tail);
    }
    if (!made || !made->recent || !made->sorted || !made->tail) {
        sluice_accuracy_free(made);
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "accuracy history of %u: out of host memory", history);
    }
    *accuracy = made;
    return SLUICE_OK;
}

void sluice_accuracy_free(struct sluice_accuracy *accuracy)
{
    if (!accuracy)
        return;
    free(accuracy->recent);
    free(accuracy->sorted);
    free(accuracy->tail);
    free(accuracy);
}

/* The first index whose ratio is above `ratio`. */
static uint32_t first_above(const struct sluice_accuracy *accuracy, uint64_t ratio)
{
    uint32_t low = 0, high = accuracy->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (accuracy->sorted[middle] > ratio)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static uint64_t ratio_of(int64_t time, int64_t estimate)
{
    sluice_u128 ratio = (sluice_u128)(uint64_t)time * RATIO_ONE / (uint64_t)estimate;
    return ratio > RATIO_MAX ? RATIO_MAX : (uint64_t)ratio;
}

enum sluice_error sluice_accuracy_record(struct sluice_accuracy *accuracy, int64_t estimate, int64_t actual,
                                         struct sluice_error_text *text)
{
    if (estimate < 1 || actual < 0)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "estimate %lld, actual %lld: must be at least 1 and 0",
                           (long long)estimate, (long long)actual);
    uint32_t ratio = (uint32_t)ratio_of(actual, estimate);
    uint32_t *sorted = accuracy->sorted;
    if (accuracy->count == accuracy->capacity) {
        uint32_t gone = first_above(accuracy, accuracy->recent[accuracy->oldest]) - 1;
        memmove(sorted + gone, sorted + gone + 1, (accuracy->count - gone - 1) * sizeof *sorted);
        accuracy->count--;
    }
    uint32_t place = first_above(accuracy, ratio);
    memmove(sorted + place + 1, sorted + place, (accuracy->count - place) * sizeof *sorted);
    sorted[place] = ratio;
    accuracy->count++;
    accuracy->recent[accuracy->oldest] = ratio;
    accuracy->oldest = (accuracy->oldest + 1) % accuracy->capacity;
    accuracy->tail[accuracy->count] = 0;
    for (uint32_t i = accuracy->count; i-- > 0;)
        accuracy->tail[i] = accuracy->tail[i + 1] + sorted[i];
    return SLUICE_OK;
}

void sluice_accuracy_remaining(const struct sluice_accuracy *accuracy, int64_t estimate, int64_t elapsed,
                               int64_t *expected, int64_t *longest)
{
    /* Without better knowledge the estimate is used, and a job that ran longer is expected to run as long again. */
    int64_t plain = estimate > elapsed ? estimate - elapsed : elapsed > 0 ? elapsed : 1;
    *expected = *longest = plain;
    if (!accuracy || accuracy->count < TRUSTED_FROM || estimate < 1)
        return;
    uint32_t from = first_above(accuracy, ratio_of(elapsed, estimate));
    uint32_t like = accuracy->count - from;
    if (!like)
        return;
    sluice_u128 whole = (sluice_u128)(uint64_t)estimate * accuracy->tail[from] / like / RATIO_ONE;
    sluice_u128 most = (sluice_u128)(uint64_t)estimate * accuracy->sorted[accuracy->count - 1] / RATIO_ONE;
    uint64_t done = (uint64_t)elapsed;
    *expected = whole > done ? (int64_t)(whole - done) : 1;
    *longest = most > done ? (int64_t)(most - done) : 1;
    if (*longest < *expected)
        *longest = *expected;
}

uint32_t sluice_accuracy_spread(const struct sluice_accuracy *accuracy)
{
    if (!accuracy || accuracy->count < TRUSTED_FROM)
        return 0;
    uint64_t low = accuracy->sorted[accuracy->count / 20];
    uint64_t high = accuracy->sorted[(uint64_t)accuracy->count * 19 / 20];
    return high ? (uint32_t)(1000 - 1000 * low / high) : 0;
}

/* ---- guard ---- */

struct guarded {
    int64_t key;
    uint32_t index; /* into the caller's jobs */
};

struct sluice_guard {
    struct sluice_guard_policy policy;
    uint32_t capacity;
    struct guarded *critical, *scratch;
    uint32_t *rest;
    int64_t arrived[ARRIVALS]; /* ring of the last arrivals' times */
    uint64_t arrivals;
    sluice_u128 work; /* of all arrivals so far */
};

enum sluice_error sluice_guard_new(const struct sluice_guard_policy *policy, uint32_t max_jobs,
                                   struct sluice_guard **guard, struct sluice_error_text *text)
{
    if (policy->margin_permille > 1000 || policy->doubt_permille > 1000 || policy->capacity_milli < 1)
        return sluice_fail(text, SLUICE_ERROR_RANGE,
                           "guard: margin %u, doubt %u: at most 1000; capacity %lld: at least 1",
                           policy->margin_permille, policy->doubt_permille, (long long)policy->capacity_milli);
    struct sluice_guard *made = calloc(1, sizeof *made);
    size_t room = max_jobs ? max_jobs : 1;
    if (made) {
        made->policy = *policy;
        made->capacity = max_jobs;
        made->critical = calloc(room, sizeof *made->critical);
        made->scratch = calloc(room, sizeof *made->scratch);
        made->rest = calloc(room, sizeof *made->rest);
    }
    if (!made || !made->critical || !made->scratch || !made->rest) {
        sluice_guard_free(made);
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "guard of %u jobs: out of host memory", max_jobs);
    }
    *guard = made;
    return SLUICE_OK;
}

void sluice_guard_free(struct sluice_guard *guard)
{
    if (!guard)
        return;
    free(guard->critical);
    free(guard->scratch);
    free(guard->rest);
    free(guard);
}

static uint64_t work_of(int64_t time, uint32_t gpus_milli)
{
    sluice_u128 work = (sluice_u128)(uint64_t)time * gpus_milli;
    return work > INT64_MAX ? INT64_MAX : (uint64_t)work;
}

void sluice_guard_arrival(struct sluice_guard *guard, int64_t now, int64_t expected, uint32_t gpus_milli)
{
    guard->arrived[guard->arrivals++ % ARRIVALS] = now;
    guard->work += work_of(expected, gpus_milli);
}

/* Work that will arrive during `time` if jobs keep coming as the last ones did. */
static sluice_u128 arriving(const struct sluice_guard *guard, int64_t now, int64_t time)
{
    if (!guard->arrivals)
        return 0;
    uint64_t seen = guard->arrivals < ARRIVALS ? guard->arrivals : ARRIVALS;
    int64_t span = now - guard->arrived[(guard->arrivals - seen) % ARRIVALS];
    sluice_u128 each = guard->work / guard->arrivals;
    return each * seen * (uint64_t)time / (uint64_t)(span > 1 ? span : 1);
}

static int compare_keys(const void *a, const void *b)
{
    const struct guarded *left = a, *right = b;
    return (left->key > right->key) - (left->key < right->key);
}

enum sluice_error sluice_guard_apply(struct sluice_guard *guard, const struct sluice_guard_job *jobs, uint32_t count,
                                     uint32_t spread_permille, int64_t now, uint32_t *ranked, uint32_t *critical,
                                     struct sluice_error_text *text)
{
    if (count > guard->capacity)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY, "guard: %u jobs, made for %u", count, guard->capacity);
    sluice_u128 work = 0;
    int64_t longest = 0;
    for (uint32_t i = 0; i < count; i++) {
        work += work_of(jobs[i].expected, jobs[i].gpus_milli);
        /* Midway: with expectations alone the horizon would be too near if estimates are vague, and all jobs would be
         * critical. */
        int64_t midway = jobs[i].expected + (jobs[i].longest - jobs[i].expected) / 2;
        longest = midway > longest ? midway : longest;
    }
    sluice_u128 horizon = (work + arriving(guard, now, longest)) / (uint64_t)guard->policy.capacity_milli;
    if (horizon < (sluice_u128)longest)
        horizon = (sluice_u128)longest;
    uint32_t spread = spread_permille > 1000 ? 1000 : spread_permille;
    uint32_t margin = guard->policy.margin_permille + guard->policy.doubt_permille * spread / 1000;
    sluice_u128 bound = horizon * (margin < 1000 ? 1000 - margin : 0);

    uint32_t found = 0, others = 0;
    for (uint32_t place = 0; place < count; place++) {
        const struct sluice_guard_job *job = &jobs[ranked[place]];
        if ((sluice_u128)(uint64_t)job->longest * 1000 >= bound)
            guard->critical[found++] = (struct guarded){
                .key = spread > VAGUE_PERMILLE ? job->submit : -job->longest,
                .index = ranked[place],
            };
        else
            guard->rest[others++] = ranked[place];
    }
    sluice_sort(guard->critical, guard->scratch, found, sizeof *guard->critical, compare_keys);
    for (uint32_t i = 0; i < found; i++)
        ranked[i] = guard->critical[i].index;
    memcpy(ranked + found, guard->rest, others * sizeof *ranked);
    *critical = found;
    return SLUICE_OK;
}
