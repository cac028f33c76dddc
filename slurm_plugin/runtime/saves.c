/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/saves.h"

#include "runtime/controller.h"
#include "runtime/published.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static bool read_line(struct sluice_line *line, void *item)
{
    struct sluice_save *save = item;
    uint64_t job, time;
    if (!sluice_line_number(line, UINT32_MAX, &job) || !sluice_line_number(line, SLUICE_SAVES_MAX_S, &time))
        return false;
    *save = (struct sluice_save){.job_id = (uint32_t)job, .at_s = (int64_t)time};
    return !line->at;
}

static int compare(const void *a, const void *b)
{
    const struct sluice_save *one = a, *other = b;
    return (one->job_id > other->job_id) - (one->job_id < other->job_id);
}

static void say_twice(const void *item, struct sluice_error_text *text)
{
    const struct sluice_save *save = item;
    snprintf(text->text, sizeof(text->text), "job %" PRIu32 " is there twice", save->job_id);
}

static const struct sluice_listing_kind kind = {.name = "sluice-saves",
                                                .items = "jobs",
                                                .wanted = "a job's id and a time",
                                                .most = SLUICE_SAVES_MAX,
                                                .first = offsetof(struct sluice_saves, jobs),
                                                .size = sizeof(struct sluice_save),
                                                .read = read_line,
                                                .compare = compare,
                                                .twice = say_twice};
static struct sluice_published saves = {.kind = &kind,
                                        .name = "saves",
                                        .file = SLUICE_SAVES_FILE,
                                        .kept = "what was known of saves stays so",
                                        .lock = PTHREAD_MUTEX_INITIALIZER};

enum sluice_error sluice_saves_parse(const char *data, size_t length, struct sluice_saves **made,
                                     struct sluice_error_text *text)
{
    struct sluice_listed *listed;
    enum sluice_error error = sluice_listing_parse(&kind, data, length, &listed, text);
    *made = (struct sluice_saves *)listed;
    return error;
}

const struct sluice_saves *sluice_saves_acquire(void)
{
    return (const struct sluice_saves *)sluice_published_acquire(&saves);
}

void sluice_saves_release(const struct sluice_saves *released)
{
    sluice_listed_release((const struct sluice_listed *)released);
}

int64_t sluice_saves_of(const struct sluice_saves *known, uint32_t job_id)
{
    const struct sluice_save wanted = {.job_id = job_id};
    const struct sluice_save *found =
        known ? bsearch(&wanted, known->jobs, known->listed.count, sizeof(*known->jobs), compare) : NULL;
    return found ? found->at_s : 0;
}

static bool start(const struct sluice_site *site)
{
    return sluice_published_start(&saves, site->state_folder);
}

static void stop(void)
{
    sluice_published_stop(&saves);
}

__attribute__((constructor)) static void enlist(void)
{
    static struct sluice_module module = {.name = "saves", .start = start, .stop = stop};
    sluice_controller_module(&module);
}
