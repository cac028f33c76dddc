/* SPDX-License-Identifier: Apache-2.0 */
/* Which jobs leave nodes that are to be empty: a rule for each job, then places for those that it lets move. */
#include "cluster.h"
#include "error.h"

#include <stdlib.h>

/* Without places and moves: what holds of the job alone. */
static struct sluice_leave decide(const struct sluice_leaver *leaver, const struct sluice_leave_limits *limits)
{
    if (leaver->deadline_s && leaver->end_s <= leaver->deadline_s)
        return (struct sluice_leave){.decision = SLUICE_LEAVE_ENDS, .why = SLUICE_LEAVE_WHY_IN_TIME};
    if (leaver->end_s <= limits->now_s || leaver->end_s - limits->now_s <= leaver->move_s)
        return (struct sluice_leave){.decision = SLUICE_LEAVE_ENDS, .why = SLUICE_LEAVE_WHY_SOON};
    if (leaver->bar)
        return (struct sluice_leave){.decision = SLUICE_LEAVE_STAYS, .why = leaver->bar};
    return (struct sluice_leave){.decision = SLUICE_LEAVE_LATER};
}

/* Of the jobs that could move and were not looked at, the one that ends last; `count`: there is none. */
static uint32_t last_to_end(const struct sluice_leaver *leavers, const struct sluice_leave *leaves, uint32_t count)
{
    uint32_t last = count;
    for (uint32_t i = 0; i < count; i++)
        if (leaves[i].decision == SLUICE_LEAVE_LATER && !leaves[i].why &&
            (last == count || leavers[i].end_s > leavers[last].end_s))
            last = i;
    return last;
}

enum sluice_error sluice_leave_plan(struct sluice_cluster *cluster, enum sluice_policy policy,
                                    const struct sluice_request *requests, uint32_t request_count,
                                    const struct sluice_leaver *leavers, uint32_t count,
                                    const struct sluice_leave_limits *limits, struct sluice_leave *leaves,
                                    struct sluice_error_text *text)
{
    enum sluice_error error = SLUICE_OK;
    uint32_t held_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (leavers[i].move_s < 0)
            return sluice_fail(text, SLUICE_ERROR_RANGE, "job %u: a move of %lld s: at least 0", i,
                               (long long)leavers[i].move_s);
        leaves[i] = decide(&leavers[i], limits);
        if (leaves[i].decision == SLUICE_LEAVE_LATER && leavers[i].request >= request_count)
            return sluice_fail(text, SLUICE_ERROR_RANGE, "job %u: request %u of %u", i, leavers[i].request,
                               request_count);
    }
    uint64_t *held = calloc(count ? count : 1, sizeof *held);
    if (!held)
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "%u jobs: out of host memory", count);
    for (uint32_t i; !error && (i = last_to_end(leavers, leaves, count)) < count;) {
        struct sluice_placement to = {.parts = &leaves[i].to, .part_capacity = 1};
        leaves[i].why = SLUICE_LEAVE_WHY_HOUR;
        if (held_count == limits->moves)
            continue;
        error = sluice_start(cluster, policy, &requests[leavers[i].request], &to, &held[held_count], text);
        if (error == SLUICE_ERROR_NO_PLACE || error == SLUICE_ERROR_NEVER) {
            error = SLUICE_OK;
            leaves[i].why = SLUICE_LEAVE_WHY_PLACE;
        } else if (!error) {
            leaves[i].decision = SLUICE_LEAVE_MOVES;
            leaves[i].why = SLUICE_LEAVE_WHY_NONE;
            held_count++;
        }
    }
    while (held_count > 0)
        (void)sluice_release(cluster, held[--held_count], NULL);
    free(held);
    return error;
}
