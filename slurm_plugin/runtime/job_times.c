/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/job_times.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static bool read_line(struct sluice_line *line, void *item)
{
    struct sluice_job_time *made = item;
    uint64_t job, time;
    if (!sluice_line_number(line, UINT32_MAX, &job) || !sluice_line_number(line, SLUICE_JOB_TIMES_MAX_S, &time))
        return false;
    *made = (struct sluice_job_time){.job_id = (uint32_t)job, .at_s = (int64_t)time};
    return !line->at;
}

static int compare(const void *a, const void *b)
{
    const struct sluice_job_time *one = a, *other = b;
    return (one->job_id > other->job_id) - (one->job_id < other->job_id);
}

static void say_twice(const void *item, struct sluice_error_text *text)
{
    const struct sluice_job_time *twice = item;
    snprintf(text->text, sizeof(text->text), "job %" PRIu32 " is there twice", twice->job_id);
}

struct sluice_listing_kind sluice_job_times_kind(const char *name)
{
    return (struct sluice_listing_kind){.name = name,
                                        .items = "jobs",
                                        .wanted = "a job's id and a time",
                                        .most = SLUICE_JOB_TIMES_MAX,
                                        .first = offsetof(struct sluice_job_times, jobs),
                                        .size = sizeof(struct sluice_job_time),
                                        .read = read_line,
                                        .compare = compare,
                                        .twice = say_twice};
}

enum sluice_error sluice_job_times_parse(const char *name, const char *data, size_t length,
                                         struct sluice_job_times **made, struct sluice_error_text *text)
{
    const struct sluice_listing_kind kind = sluice_job_times_kind(name);
    struct sluice_listed *listed;
    enum sluice_error error = sluice_listing_parse(&kind, data, length, &listed, text);
    *made = (struct sluice_job_times *)listed;
    return error;
}

void sluice_job_times_release(const struct sluice_job_times *times)
{
    sluice_listed_release((const struct sluice_listed *)times);
}

int64_t sluice_job_times_of(const struct sluice_job_times *times, uint32_t job_id)
{
    const struct sluice_job_time wanted = {.job_id = job_id};
    const struct sluice_job_time *found =
        times ? bsearch(&wanted, times->jobs, times->listed.count, sizeof(*times->jobs), compare) : NULL;
    return found ? found->at_s : 0;
}
