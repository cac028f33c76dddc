/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "planner/watts.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_LEVELS = 64 /* of tenants */ };

uint32_t sluice_watts_default(const struct sluice_class *class)
{
    return class->power_default_w ? class->power_default_w : class->power_most_w;
}

static bool below(const struct sluice_rules *rules, const char *account, const char *tenant)
{
    for (int level = 0; account && level < MOST_LEVELS; level++) {
        if (strcmp(account, tenant) == 0)
            return true;
        const struct sluice_tenant *found = sluice_rules_tenant(rules, account);
        account = found ? found->parent : NULL;
    }
    return false;
}

static uint64_t budgets_of(const struct sluice_rules *rules, const char *account)
{
    uint64_t budgets = 0;
    for (uint32_t i = 0; i < rules->budget_count; i++)
        if (!rules->budgets[i].tenant || below(rules, account, rules->budgets[i].tenant))
            budgets |= UINT64_C(1) << i;
    return budgets;
}

/* A GPU's watts under the job, idle ones included, if it is of this class. */
static int32_t of_class(const struct sluice_rules *rules, const struct sluice_draws *draws,
                        const struct sluice_job_draw *job, uint32_t index)
{
    const struct sluice_class *class = &rules->classes[index];
    const struct sluice_tenant *tenant = sluice_rules_tenant(rules, job->account);
    int32_t watts = job->job_id ? sluice_draws_job(draws, job->job_id) : 0;
    if (watts)
        return watts;
    uint32_t cap = job->cap_w ? job->cap_w : tenant ? tenant->classes[index].power_w : 0;
    cap = cap && cap < class->power_least_w ? class->power_least_w : cap; /* no GPU has a cap that low */
    watts = sluice_draws_estimate(draws, job->user, class->name);
    if (!watts)
        watts = (int32_t)sluice_watts_default(class);
    return cap && (int64_t)cap < watts ? (int32_t)cap : watts;
}

/* The part of a GPU that a share is, rounded up. */
static int32_t part_of(int32_t watts, int64_t share_mib, uint64_t gpu_mib)
{
    if (!gpu_mib || (uint64_t)share_mib >= gpu_mib)
        return watts;
    return (int32_t)(((uint64_t)watts * (uint64_t)share_mib + gpu_mib - 1) / gpu_mib);
}

/* Of a GPU that draws so much under a job: what budgets keep for it, as it is within its tenant's guarantee, which the
 * tenant's own QOS limits it to. None for shares: that limit does not count them as GPUs. */
static int32_t kept_for(const struct sluice_rules *rules, const struct sluice_job_draw *job, uint32_t class,
                        int32_t watts, int32_t least)
{
    const struct sluice_tenant *tenant = sluice_rules_tenant(rules, job->account);
    if (!tenant || !tenant->classes[class].gpus_guaranteed || !tenant->qos || !job->qos || job->gpu_memory_mib ||
        strcmp(job->qos, tenant->qos) != 0 || least < 0)
        return 0;
    return watts < least ? watts : least;
}

struct sluice_job_watts sluice_watts_of(const struct sluice_rules *rules, const struct sluice_draws *draws,
                                        const struct sluice_job_draw *job)
{
    struct sluice_job_watts found = {.budgets = budgets_of(rules, job->account)};
    for (uint32_t i = 0; i < rules->class_count; i++) {
        const struct sluice_class *class = &rules->classes[i];
        if (!(job->classes >> i & 1))
            continue;
        const int32_t idle = (int32_t) class->power_idle_w, least = (int32_t) class->power_start_least_w - idle;
        int32_t watts = of_class(rules, draws, job, i) - idle;
        if (job->gpu_memory_mib)
            watts = part_of(watts, job->gpu_memory_mib, class->gpu_memory_mib);
        const int32_t kept = kept_for(rules, job, i, watts, least);
        if (watts - kept < found.watts || (watts - kept == found.watts && kept <= found.kept))
            continue;
        found.watts = watts - kept;
        found.counted = idle + kept;
        found.kept = kept;
        found.guaranteed = kept > 0;
        found.least = least > kept && least < watts && !job->gpu_memory_mib ? least : 0;
    }
    return found;
}

void sluice_watts_count_kept(int64_t *guaranteed, const uint64_t *counting, uint32_t nodes,
                             const struct sluice_job_watts *job, const struct sluice_part *parts, uint32_t count)
{
    for (uint32_t i = 0; i < count && job->kept; i++)
        for (uint64_t left = parts[i].node < nodes ? job->budgets & counting[parts[i].node] : 0; left; left &= left - 1)
            guaranteed[__builtin_ctzll(left)] += (int64_t)job->kept * __builtin_popcount(parts[i].gpus);
}

struct sluice_power_budget sluice_watts_budget(const struct sluice_budget *budget, const struct sluice_draw *lowered,
                                               int64_t idle_w, int64_t guaranteed_w)
{
    /* Where guaranteed jobs have more GPUs than their part, all that they need is theirs. */
    const int64_t base = idle_w + (guaranteed_w > budget->kept ? guaranteed_w : budget->kept);
    return (struct sluice_power_budget){.watts = budget->watts,
                                        .base_watts = base < SLUICE_POWER_MAX_WATTS ? base : SLUICE_POWER_MAX_WATTS,
                                        .hours = budget->hours,
                                        .hour_count = budget->hour_count,
                                        .lowered_watts = lowered ? lowered->watts : 0,
                                        .lowered_until_s = lowered ? lowered->until_s : 0};
}

int64_t sluice_watts_week(int64_t now_s)
{
    time_t now = (time_t)now_s;
    struct tm local;
    if (!localtime_r(&now, &local))
        return 0;
    const int64_t minutes = ((local.tm_wday + 6) % 7 * 24 + local.tm_hour) * 60 + local.tm_min;
    return now_s - minutes * 60 - local.tm_sec;
}

/* ---- what a plan leaves ---- */

struct profile {
    uint32_t count;
    int64_t *starts_s, *watts;
};

struct sluice_watts_left {
    uint32_t budgets, nodes;
    uint64_t *counting; /* by node: the budgets that it belongs to */
    struct profile profiles[SLUICE_POWER_MAX_BUDGETS];
};

static bool copy_profile(const struct sluice_power *power, uint32_t budget, struct profile *profile)
{
    profile->count = sluice_power_profile(power, budget, 0, NULL, NULL);
    profile->starts_s = calloc(profile->count + 1, sizeof *profile->starts_s);
    profile->watts = calloc(profile->count + 1, sizeof *profile->watts);
    if (!profile->starts_s || !profile->watts)
        return false;
    sluice_power_profile(power, budget, profile->count, profile->starts_s, profile->watts);
    return true;
}

struct sluice_watts_left *sluice_watts_left_new(const struct sluice_power *power, uint32_t budgets,
                                                const uint64_t *counting, uint32_t nodes)
{
    struct sluice_watts_left *left = calloc(1, sizeof *left);
    if (!left)
        return NULL;
    left->budgets = budgets;
    left->nodes = nodes;
    left->counting = calloc(nodes + 1, sizeof *left->counting);
    bool whole = left->counting;
    for (uint32_t i = 0; i < budgets && whole; i++)
        whole = copy_profile(power, i, &left->profiles[i]);
    if (!whole) {
        sluice_watts_left_free(left);
        return NULL;
    }
    memcpy(left->counting, counting, nodes * sizeof *counting);
    return left;
}

void sluice_watts_left_free(struct sluice_watts_left *left)
{
    if (!left)
        return;
    for (uint32_t i = 0; i < SLUICE_POWER_MAX_BUDGETS; i++) {
        free(left->profiles[i].starts_s);
        free(left->profiles[i].watts);
    }
    free(left->counting);
    free(left);
}

/* How many GPUs of the parts a budget counts. */
static int64_t counted(const struct sluice_watts_left *left, uint32_t budget, const struct sluice_part *parts,
                       uint32_t count)
{
    int64_t gpus = 0;
    for (uint32_t i = 0; i < count; i++)
        if (parts[i].node < left->nodes && left->counting[parts[i].node] >> budget & 1)
            gpus += __builtin_popcount(parts[i].gpus);
    return gpus;
}

/* Does segment i end after a time? */
static bool lasts(const struct profile *profile, uint32_t i, int64_t from_s)
{
    return i + 1 == profile->count || profile->starts_s[i + 1] > from_s;
}

/* The most watts, up to job->watts, that each of so many GPUs may draw of a budget. */
static int64_t allowed_of(const struct sluice_watts_left *left, uint32_t budget, const struct sluice_job_watts *job,
                          const struct sluice_watts_own *own, int64_t gpus, int64_t from_s, int64_t to_s)
{
    const struct profile *profile = &left->profiles[budget];
    const int64_t own_watts = counted(left, budget, own->parts, own->count) * own->watts;
    int64_t allowed = job->watts;
    for (uint32_t i = 0; i < profile->count && profile->starts_s[i] < to_s; i++) {
        const int64_t watts = profile->watts[i] + own_watts;
        if (watts < allowed * gpus && lasts(profile, i, from_s))
            allowed = watts < 0 ? -1 : watts / gpus;
    }
    return allowed;
}

static bool may_start_with(const struct sluice_job_watts *job, int64_t watts)
{
    return job->guaranteed || watts >= (job->least ? job->least : job->watts);
}

int32_t sluice_watts_allowed(const struct sluice_watts_left *left, const struct sluice_job_watts *job,
                             const struct sluice_watts_own *own, const struct sluice_part *parts, uint32_t count,
                             int64_t from_s, int64_t to_s)
{
    int64_t allowed = job->watts;
    for (uint32_t budget = 0; budget < left->budgets && job->watts; budget++) {
        const int64_t gpus = job->budgets >> budget & 1 ? counted(left, budget, parts, count) : 0;
        const int64_t most = gpus ? allowed_of(left, budget, job, own, gpus, from_s, to_s) : allowed;
        allowed = most < allowed ? most : allowed;
    }
    return !may_start_with(job, allowed) ? -1 : allowed > 0 ? (int32_t)allowed : 0;
}

int32_t sluice_watts_allowed_anywhere(const struct sluice_watts_left *left, const struct sluice_job_watts *job,
                                      const struct sluice_watts_own *own, int64_t gpus, int64_t from_s, int64_t to_s)
{
    uint64_t everywhere = job->budgets;
    int64_t allowed = job->watts;
    for (uint32_t node = 0; node < left->nodes; node++)
        everywhere &= left->counting[node];
    for (uint32_t budget = 0; budget < left->budgets; budget++) {
        const int64_t most =
            everywhere >> budget & 1 ? allowed_of(left, budget, job, own, gpus, from_s, to_s) : allowed;
        allowed = most < allowed ? most : allowed;
    }
    return !may_start_with(job, allowed) ? -1 : allowed > 0 ? (int32_t)allowed : 0;
}

void sluice_watts_keep_out(const struct sluice_watts_left *left, const struct sluice_job_watts *job,
                           const struct sluice_watts_own *own, int64_t gpus, int64_t from_s, int64_t to_s,
                           uint64_t *words, size_t count)
{
    uint64_t lacking = 0;
    for (uint32_t budget = 0; budget < left->budgets && job->watts && gpus > 0; budget++)
        if ((job->budgets >> budget & 1) &&
            !may_start_with(job, allowed_of(left, budget, job, own, gpus, from_s, to_s)))
            lacking |= UINT64_C(1) << budget;
    for (uint32_t node = 0; lacking && node < left->nodes && node / 64 < count; node++)
        if (left->counting[node] & lacking)
            words[node / 64] &= ~(UINT64_C(1) << node % 64);
}

void sluice_watts_take(struct sluice_watts_left *left, uint64_t budgets, int32_t watts, const struct sluice_part *parts,
                       uint32_t count, int64_t to_s)
{
    for (uint32_t budget = 0; budget < left->budgets; budget++) {
        const int64_t gpus = budgets >> budget & 1 ? counted(left, budget, parts, count) : 0;
        struct profile *profile = &left->profiles[budget];
        for (uint32_t i = 0; gpus && i < profile->count && profile->starts_s[i] < to_s; i++)
            profile->watts[i] -= watts * gpus;
    }
}
