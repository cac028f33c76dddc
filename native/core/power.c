/* SPDX-License-Identifier: Apache-2.0 */
#include "power.h"
#include "error.h"
#include "timeline.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum sluice_error sluice_power_new(uint32_t max_nodes, struct sluice_power **power, struct sluice_error_text *text)
{
    if (!power)
        return sluice_fail(text, SLUICE_ERROR_INVALID, "no place for the budgets' handle");
    if (max_nodes == 0 || max_nodes > SLUICE_MAX_NODES)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "budgets for %" PRIu32 " nodes: 1 to %d", max_nodes,
                           SLUICE_MAX_NODES);
    struct sluice_power *made = calloc(1, sizeof *made);
    if (made) {
        made->max_nodes = max_nodes;
        made->profiles = malloc(SLUICE_POWER_MAX_BUDGETS * sizeof *made->profiles);
        made->counting = calloc(max_nodes, sizeof *made->counting);
    }
    if (!made || !made->profiles || !made->counting) {
        sluice_power_free(made);
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "no memory for power budgets");
    }
    *power = made;
    return SLUICE_OK;
}

void sluice_power_free(struct sluice_power *power)
{
    if (!power)
        return;
    free(power->profiles);
    free(power->counting);
    free(power);
}

/* ---- budgets ---- */

static bool is_watts(int64_t watts)
{
    return watts >= 0 && watts <= SLUICE_POWER_MAX_WATTS;
}

static enum sluice_error check_budget(const struct sluice_power_budget *budget, uint32_t index,
                                      struct sluice_error_text *text)
{
    if (!is_watts(budget->watts) || !is_watts(budget->base_watts) || !is_watts(budget->lowered_watts))
        return sluice_fail(text, SLUICE_ERROR_RANGE, "budget %" PRIu32 ": watts must be 0 to %d", index,
                           SLUICE_POWER_MAX_WATTS);
    if (budget->hour_count > SLUICE_POWER_MAX_HOURS)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY, "budget %" PRIu32 ": %" PRIu32 " times of the week, at most %d",
                           index, budget->hour_count, SLUICE_POWER_MAX_HOURS);
    int32_t before = 0;
    for (uint32_t i = 0; i < budget->hour_count; i++) {
        const struct sluice_power_hours *hours = &budget->hours[i];
        if (hours->from_s < before || hours->to_s <= hours->from_s || hours->to_s > SLUICE_POWER_WEEK_S ||
            !is_watts(hours->watts))
            return sluice_fail(text, SLUICE_ERROR_INVALID,
                               "budget %" PRIu32 ": from %" PRId32 " to %" PRId32 " s of the week with %" PRId64
                               " W: times must ascend within a week",
                               index, hours->from_s, hours->to_s, hours->watts);
        before = hours->to_s;
    }
    return SLUICE_OK;
}

enum sluice_error sluice_power_set(struct sluice_power *power, const struct sluice_power_budget *budgets,
                                   uint32_t count, int64_t week_s, struct sluice_error_text *text)
{
    if (count > SLUICE_POWER_MAX_BUDGETS)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY, "%" PRIu32 " budgets, at most %d", count,
                           SLUICE_POWER_MAX_BUDGETS);
    for (uint32_t i = 0; i < count; i++) {
        enum sluice_error error = check_budget(&budgets[i], i, text);
        if (error)
            return error;
    }
    power->count = count;
    power->week_s = week_s;
    power->everywhere = 0;
    memset(power->counting, 0, power->max_nodes * sizeof *power->counting);
    for (uint32_t i = 0; i < count; i++) {
        const struct sluice_power_budget *budget = &budgets[i];
        struct power_budget *kept = &power->budgets[i];
        kept->watts = budget->watts;
        kept->base = budget->base_watts;
        kept->lowered = budget->lowered_watts;
        kept->lowered_until_s = budget->lowered_until_s;
        kept->hour_count = budget->hour_count;
        if (budget->hour_count)
            memcpy(kept->hours, budget->hours, budget->hour_count * sizeof *kept->hours);
        power->everywhere |= (uint64_t)!budget->nodes << i;
        for (uint32_t node = 0; node < power->max_nodes; node++)
            if (!budget->nodes || (node / 64 < budget->node_words && sluice_bit(budget->nodes, node)))
                power->counting[node] |= UINT64_C(1) << i;
    }
    return SLUICE_OK;
}

/* The budget by the hours of the week, and until which second of the week that holds. */
static int64_t by_hours(const struct power_budget *budget, int32_t second, int32_t *until)
{
    for (uint32_t i = 0; i < budget->hour_count; i++) {
        const struct sluice_power_hours *hours = &budget->hours[i];
        if (second < hours->from_s) {
            *until = hours->from_s;
            return budget->watts;
        }
        if (second < hours->to_s) {
            *until = hours->to_s;
            return hours->watts;
        }
    }
    *until = SLUICE_POWER_WEEK_S;
    return budget->watts;
}

static int32_t second_of_week(const struct sluice_power *power, int64_t at_s)
{
    int64_t second = (at_s % SLUICE_POWER_WEEK_S - power->week_s % SLUICE_POWER_WEEK_S) % SLUICE_POWER_WEEK_S;
    return (int32_t)(second < 0 ? second + SLUICE_POWER_WEEK_S : second);
}

/* The budget at a time, and until when that holds at the least. */
static int64_t budget_at(const struct sluice_power *power, uint32_t index, int64_t at_s, int64_t *until_s)
{
    const struct power_budget *budget = &power->budgets[index];
    int32_t until, second = second_of_week(power, at_s);
    int64_t watts = by_hours(budget, second, &until);
    *until_s = at_s + until - second;
    if (at_s < budget->lowered_until_s) {
        *until_s = budget->lowered_until_s < *until_s ? budget->lowered_until_s : *until_s;
        watts = budget->lowered < watts ? budget->lowered : watts;
    }
    return watts;
}

int64_t sluice_power_watts(const struct sluice_power *power, uint32_t budget, int64_t at_s)
{
    int64_t until_s;
    return budget < power->count ? budget_at(power, budget, at_s, &until_s) : 0;
}

/* The budget of each hour for a week from now on; after that the least of the week. */
static void begin_profile(struct sluice_power *power, uint32_t index)
{
    const struct power_budget *budget = &power->budgets[index];
    struct power_profile *profile = &power->profiles[index];
    const int64_t end_s = power->now_s + SLUICE_POWER_WEEK_S;
    profile->count = 0;
    for (int64_t at_s = power->now_s, until_s; at_s < end_s; at_s = until_s) {
        profile->left[profile->count] = budget_at(power, index, at_s, &until_s) - budget->base;
        profile->starts[profile->count++] = (int32_t)(at_s - power->now_s);
    }
    int64_t least = budget->watts;
    for (uint32_t i = 0; i < budget->hour_count; i++)
        least = budget->hours[i].watts < least ? budget->hours[i].watts : least;
    if (budget->lowered_until_s > end_s && budget->lowered < least)
        least = budget->lowered;
    profile->left[profile->count] = least - budget->base;
    profile->starts[profile->count++] = SLUICE_POWER_WEEK_S;
}

void power_reset(struct sluice_power *power, int64_t now_s)
{
    power->now_s = now_s;
    power->first_known = 0;
    for (uint32_t i = 0; i < power->count; i++)
        begin_profile(power, i);
}

/* ---- profiles ---- */

/* The segment that `time` lies in. */
static uint32_t segment_at(const struct power_profile *profile, int32_t time)
{
    uint32_t low = 0, high = profile->count;
    while (high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        if (profile->starts[middle] <= time)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Make a segment start at `time`, a point of the grid; its index. There is room: POWER_SEGMENTS is more than a budget's
 * hours and the grid's points together. */
static uint32_t split(struct power_profile *profile, int32_t time)
{
    const uint32_t at = segment_at(profile, time);
    if (profile->starts[at] == time)
        return at;
    const uint32_t moved = profile->count - at;
    memmove(&profile->starts[at + 1], &profile->starts[at], moved * sizeof *profile->starts);
    memmove(&profile->left[at + 1], &profile->left[at], moved * sizeof *profile->left);
    profile->starts[at + 1] = time;
    profile->count++;
    return at + 1;
}

/* The grid's point at or before a time, or at or after it. */
static int32_t on_grid(const struct sluice_power *power, int32_t time, bool after)
{
    if (time < POWER_EXACT_S || time == TIMELINE_NEVER)
        return time;
    const int64_t step = (INT64_C(1) << (31 - __builtin_clz((unsigned)time))) / POWER_STEPS;
    const int64_t at_s = power->now_s + time, before_s = at_s - at_s % step;
    const int64_t moved = (after && before_s < at_s ? before_s + step : before_s) - power->now_s;
    return moved < TIMELINE_NEVER ? (int32_t)moved : TIMELINE_NEVER;
}

void power_change(struct sluice_power *power, uint64_t budgets, int64_t watts, int32_t from, int32_t to)
{
    const int32_t begin = on_grid(power, from, false), end = on_grid(power, to, true);
    for (uint64_t left = watts ? budgets : 0; left; left &= left - 1) {
        struct power_profile *profile = &power->profiles[__builtin_ctzll(left)];
        const uint32_t first = split(profile, begin);
        const uint32_t last = end == TIMELINE_NEVER ? profile->count : split(profile, end);
        for (uint32_t i = first; i < last; i++)
            profile->left[i] -= watts;
    }
    power->first_known = 0;
}

int64_t power_left(const struct sluice_power *power, uint32_t budget, int32_t from, int32_t to)
{
    const struct power_profile *profile = &power->profiles[budget];
    uint32_t at = segment_at(profile, from);
    int64_t least = profile->left[at];
    for (at++; at < profile->count && profile->starts[at] < to; at++)
        least = profile->left[at] < least ? profile->left[at] : least;
    return least;
}

/* The first time from `from` on at which a budget has so much for `duration`. */
static int32_t earliest_of(const struct sluice_power *power, uint32_t budget, int64_t watts, int32_t duration,
                           int32_t from)
{
    const struct power_profile *profile = &power->profiles[budget];
    uint32_t at = segment_at(profile, from);
    for (int32_t start = from;; start = profile->starts[at]) {
        const int32_t end = timelines_end(start, duration);
        while (at < profile->count && profile->starts[at] < end && profile->left[at] >= watts)
            at++;
        if (at == profile->count || profile->starts[at] >= end)
            return start;
        while (at < profile->count && profile->left[at] < watts)
            at++;
        if (at == profile->count)
            return TIMELINE_NEVER;
    }
}

int32_t power_earliest(const struct sluice_power *power, uint64_t budgets, int64_t watts, int32_t duration,
                       int32_t from)
{
    if (watts == 0 || !budgets)
        return from;
    for (uint64_t agreed = 0; agreed != budgets && from != TIMELINE_NEVER;) {
        const uint64_t left = budgets & ~agreed;
        const int32_t start = earliest_of(power, (uint32_t)__builtin_ctzll(left), watts, duration, from);
        agreed = (start == from ? agreed : 0) | (left & -left);
        from = start;
    }
    return from;
}

int32_t power_next_change(const struct sluice_power *power, uint64_t budgets, int32_t time)
{
    int32_t next = TIMELINE_NEVER;
    for (uint64_t left = budgets; left; left &= left - 1) {
        const struct power_profile *profile = &power->profiles[__builtin_ctzll(left)];
        const uint32_t at = segment_at(profile, time) + 1;
        if (at < profile->count && profile->starts[at] < next)
            next = profile->starts[at];
    }
    return next;
}

void power_ask(struct sluice_power *power, int64_t watts, int32_t duration)
{
    if (power->first_watts == watts && power->first_duration == duration)
        return;
    power->first_watts = watts;
    power->first_duration = duration;
    power->first_known = 0;
}

int32_t power_bound(struct sluice_power *power, uint64_t budgets)
{
    int32_t bound = 0;
    for (uint64_t left = power->first_watts ? budgets : 0; left; left &= left - 1) {
        const int budget = __builtin_ctzll(left);
        if (!(power->first_known >> budget & 1)) {
            power->first[budget] = earliest_of(power, (uint32_t)budget, power->first_watts, power->first_duration, 0);
            power->first_known |= UINT64_C(1) << budget;
        }
        bound = power->first[budget] > bound ? power->first[budget] : bound;
    }
    return bound;
}

/* ---- what a plan left ---- */

uint32_t sluice_power_profile(const struct sluice_power *power, uint32_t budget, uint32_t capacity, int64_t *starts_s,
                              int64_t *watts)
{
    if (budget >= power->count)
        return 0;
    const struct power_profile *profile = &power->profiles[budget];
    const uint32_t count = profile->count < capacity ? profile->count : capacity;
    for (uint32_t i = 0; i < count; i++) {
        starts_s[i] = power->now_s + profile->starts[i];
        watts[i] = profile->left[i];
    }
    return profile->count;
}
