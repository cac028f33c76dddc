/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "planner/gang.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int same_gang(const struct sluice_gang_member *one, const struct sluice_gang_member *other)
{
    if (one->uid != other->uid)
        return one->uid < other->uid ? -1 : 1;
    if (one->count != other->count)
        return one->count < other->count ? -1 : 1;
    return strcmp(one->name, other->name);
}

static int by_gang(const void *a, const void *b)
{
    const struct sluice_gang_member *one = a, *other = b;
    int order = same_gang(one, other);
    if (order)
        return order;
    if (one->configuring != other->configuring)
        return one->configuring ? -1 : 1;
    return one->job_id < other->job_id ? -1 : one->job_id > other->job_id;
}

/* How many of a record's tasks the instance takes. */
static uint32_t take(struct sluice_gang_instance *instance, const struct sluice_gang_member *member)
{
    uint32_t tasks = member->tasks, room = member->count - instance->present;
    if (tasks > room)
        tasks = room;
    instance->members++;
    if (member->submitted_s > instance->newest_s)
        instance->newest_s = member->submitted_s;
    instance->last_tasks = tasks;
    instance->present += tasks;
    instance->configuring += member->configuring ? tasks : 0;
    instance->blocked += member->blocked ? tasks : 0;
    instance->unplaced += member->unplaced ? tasks : 0;
    return tasks;
}

static enum sluice_gang_phase phase_of(const struct sluice_gang_instance *instance, uint32_t count)
{
    if (instance->configuring)
        return SLUICE_GANG_STARTING;
    if (instance->present < count)
        return SLUICE_GANG_INCOMPLETE;
    return instance->blocked ? SLUICE_GANG_BLOCKED : SLUICE_GANG_READY;
}

/* The rest of the array at `at` that an instance leaves becomes a record of its own after it. */
static bool split(struct sluice_gang_member *members, uint32_t *count, uint32_t capacity, uint32_t at, uint32_t taken)
{
    if (*count >= capacity)
        return false;
    memmove(&members[at + 1], &members[at], (*count - at) * sizeof *members);
    members[at].tasks = taken;
    members[at + 1].tasks -= taken;
    ++*count;
    return true;
}

uint32_t sluice_gang_form(struct sluice_gang_member *members, uint32_t *count, uint32_t capacity,
                          struct sluice_gang_instance *instances, uint32_t room)
{
    uint32_t made = 0, at = 0;
    qsort(members, *count, sizeof *members, by_gang);
    while (at < *count && made < room) {
        struct sluice_gang_instance *instance = &instances[made++];
        *instance = (struct sluice_gang_instance){.first = at};
        const struct sluice_gang_member *first = &members[at];
        while (at < *count && instance->present < first->count && !same_gang(first, &members[at])) {
            uint32_t taken = take(instance, &members[at]);
            if (taken < members[at].tasks && !split(members, count, capacity, at, taken))
                members[at].tasks = taken; /* no room: the rest of the array waits for the next picture */
            at++;
        }
        instance->phase = phase_of(instance, first->count);
    }
    return made;
}

void sluice_gang_give_up(struct sluice_gang_instance *instances, uint32_t count, int64_t now_s, uint32_t after_s)
{
    for (uint32_t i = 0; after_s && i < count; i++)
        if (instances[i].phase == SLUICE_GANG_INCOMPLETE && instances[i].newest_s + after_s <= now_s)
            instances[i].phase = SLUICE_GANG_GIVEN_UP;
}

/* As squeue writes times. */
static const char *stamp(int64_t seconds, char *text, size_t size)
{
    time_t when = (time_t)seconds;
    struct tm parts;
    if (!localtime_r(&when, &parts) || !strftime(text, size, "%Y-%m-%dT%H:%M:%S", &parts))
        text[0] = '\0';
    return text;
}

const char *sluice_gang_reason(const struct sluice_gang_member *member, const struct sluice_gang_instance *instance,
                               char *text, size_t size)
{
    char more[96], when[32];
    switch (instance->phase) {
    case SLUICE_GANG_INCOMPLETE:
        snprintf(more, sizeof more, "%u of %u members submitted", instance->present, member->count);
        break;
    case SLUICE_GANG_GIVEN_UP:
        snprintf(more, sizeof more, "only %u of %u members submitted, none since %s; submit the rest or cancel",
                 instance->present, member->count, stamp(instance->newest_s, when, sizeof when));
        break;
    case SLUICE_GANG_BLOCKED:
        if (instance->unplaced)
            snprintf(more, sizeof more, "%u of %u members ask for what gangs cannot have; see sluice explain",
                     instance->unplaced, member->count);
        else
            snprintf(more, sizeof more, "%u of %u members held, dependent or not eligible yet", instance->blocked,
                     member->count);
        break;
    case SLUICE_GANG_STARTING:
        snprintf(more, sizeof more, "%u of %u members have nodes", instance->configuring, member->count);
        break;
    case SLUICE_GANG_READY:
    default:
        snprintf(more, sizeof more, "waits for room for %u members", member->count);
    }
    snprintf(text, size, SLUICE_GANG_MARK "%s: %s", member->name, more);
    return text;
}
