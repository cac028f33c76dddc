/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/draws.h"

#include "runtime/controller.h"
#include "runtime/published.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool read_kind(struct sluice_line *line, enum sluice_draw_kind *kind)
{
    static const char *const names[SLUICE_DRAW_KINDS] = {"estimate", "job", "budget"};
    const char *word;
    const size_t length = sluice_line_word(line, &word);
    for (*kind = 0; *kind < SLUICE_DRAW_KINDS; ++*kind)
        if (length == strlen(names[*kind]) && !memcmp(word, names[*kind], length))
            return true;
    return false;
}

static bool read_user(struct sluice_line *line, uint64_t *user)
{
    struct sluice_line any = *line;
    const char *word;
    if (sluice_line_word(&any, &word) == 1 && *word == '-') {
        *line = any;
        *user = SLUICE_DRAWS_ANY;
        return true;
    }
    return sluice_line_number(line, UINT32_MAX - 1, user);
}

static bool read_line(struct sluice_line *line, void *item)
{
    struct sluice_draw *draw = item;
    uint64_t id = 0, watts, until = 0;
    if (!read_kind(line, &draw->kind))
        return false;
    const bool budget = draw->kind == SLUICE_DRAW_BUDGET, job = draw->kind == SLUICE_DRAW_JOB;
    if (job ? !sluice_line_number(line, UINT32_MAX - 1, &id) : !budget && !read_user(line, &id))
        return false;
    if ((!job && !sluice_line_name(line, draw->name, sizeof(draw->name))) ||
        !sluice_line_number(line, budget ? SLUICE_POWER_MAX_WATTS : SLUICE_POWER_MAX_GPU_WATTS, &watts) ||
        (budget && !sluice_line_number(line, UINT64_C(1) << 40, &until)))
        return false;
    draw->id = (uint32_t)id;
    draw->watts = (int32_t)watts;
    draw->until_s = until ? (int64_t)until : INT64_MAX;
    return !line->at || line->at == line->end; /* a blank at the end is no harm */
}

static int compare(const void *a, const void *b)
{
    const struct sluice_draw *one = a, *other = b;
    if (one->kind != other->kind)
        return one->kind < other->kind ? -1 : 1;
    if (one->id != other->id)
        return one->id < other->id ? -1 : 1;
    return strcmp(one->name, other->name);
}

static void say_twice(const void *item, struct sluice_error_text *text)
{
    const struct sluice_draw *draw = item;
    snprintf(text->text, sizeof(text->text), "%s%" PRIu32 " is there twice", draw->name, draw->id);
}

static const struct sluice_listing_kind kind = {.name = "sluice-power",
                                                .items = "lines",
                                                .wanted = "an estimate, a job or a budget with its watts",
                                                .most = SLUICE_DRAWS_MAX,
                                                .first = offsetof(struct sluice_draws, lines),
                                                .size = sizeof(struct sluice_draw),
                                                .read = read_line,
                                                .compare = compare,
                                                .twice = say_twice};
static struct sluice_published draws = {.kind = &kind,
                                        .name = "power",
                                        .file = SLUICE_DRAWS_FILE,
                                        .kept = "what was known of jobs' power stays so",
                                        .lock = PTHREAD_MUTEX_INITIALIZER};

enum sluice_error sluice_draws_parse(const char *data, size_t length, struct sluice_draws **made,
                                     struct sluice_error_text *text)
{
    struct sluice_listed *listed;
    enum sluice_error error = sluice_listing_parse(&kind, data, length, &listed, text);
    *made = (struct sluice_draws *)listed;
    return error;
}

const struct sluice_draws *sluice_draws_acquire(void)
{
    return (const struct sluice_draws *)sluice_published_acquire(&draws);
}

void sluice_draws_release(const struct sluice_draws *released)
{
    sluice_listed_release((const struct sluice_listed *)released);
}

static const struct sluice_draw *find(const struct sluice_draws *known, enum sluice_draw_kind of, uint32_t id,
                                      const char *name)
{
    struct sluice_draw wanted = {.kind = of, .id = id};
    snprintf(wanted.name, sizeof(wanted.name), "%s", name);
    return known ? bsearch(&wanted, known->lines, known->listed.count, sizeof(*known->lines), compare) : NULL;
}

int32_t sluice_draws_estimate(const struct sluice_draws *known, uint32_t user, const char *class)
{
    const struct sluice_draw *line = find(known, SLUICE_DRAW_ESTIMATE, user, class);
    if (!line)
        line = find(known, SLUICE_DRAW_ESTIMATE, SLUICE_DRAWS_ANY, class);
    return line ? line->watts : 0;
}

int32_t sluice_draws_job(const struct sluice_draws *known, uint32_t job_id)
{
    const struct sluice_draw *line = find(known, SLUICE_DRAW_JOB, job_id, "");
    return line ? line->watts : 0;
}

const struct sluice_draw *sluice_draws_budget(const struct sluice_draws *known, const char *name)
{
    return find(known, SLUICE_DRAW_BUDGET, 0, name);
}

static bool start(const struct sluice_site *site)
{
    return sluice_published_start(&draws, site->state_folder);
}

static void stop(void)
{
    sluice_published_stop(&draws);
}

__attribute__((constructor)) static void enlist(void)
{
    static struct sluice_module module = {.name = "power", .start = start, .stop = stop};
    sluice_controller_module(&module);
}
