/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/emptying.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_ASKS = 4096 };
#define MOST_S (INT64_C(1) << 40)
#define ORDER "sluice empty"
#define BY " by "

static const char *const decisions[SLUICE_LEAVE_DECISIONS] = {"moves", "later", "ends", "stays"};
static const char *const whys[SLUICE_LEAVE_WHYS] = {"-",    "in-time", "soon",   "place",   "hour", "off",
                                                    "kind", "requeue", "tenant", "unsaved", "spent"};

/* ---- the order ---- */

/* In this form alone, and after 1970: what is said of it is read again. */
static bool read_utc(const char *text, int64_t *moment_s)
{
    static const char form[] = "0000-00-00T00:00:00Z";
    struct tm time = {0};
    for (size_t i = 0; form[i]; i++)
        if (form[i] == '0' ? text[i] < '0' || text[i] > '9' : text[i] != form[i])
            return false;
    if (!strptime(text, "%Y-%m-%dT%H:%M:%SZ", &time))
        return false;
    *moment_s = timegm(&time);
    return *moment_s > 0;
}

bool sluice_empty_ordered(const char *reason, int64_t *deadline_s)
{
    *deadline_s = 0;
    if (!reason || strncmp(reason, ORDER, strlen(ORDER)) != 0)
        return false;
    reason += strlen(ORDER);
    if (!strncmp(reason, BY, strlen(BY))) {
        reason += strlen(BY);
        if (!read_utc(reason, deadline_s)) {
            *deadline_s = 0;
            return false;
        }
        reason = strchr(reason, 'Z') + 1;
    }
    return *reason == ':';
}

/* ---- what is asked ---- */

static bool read_ask(struct sluice_line *line, void *item)
{
    struct sluice_empty_ask *ask = item;
    uint64_t until, deadline;
    if (!sluice_line_name(line, ask->node, sizeof ask->node) || !sluice_line_number(line, MOST_S, &until) ||
        !sluice_line_number(line, MOST_S, &deadline))
        return false;
    ask->until_s = (int64_t)until;
    ask->deadline_s = (int64_t)deadline;
    return !line->at;
}

static int compare(const void *item, const void *other)
{
    return strcmp(((const struct sluice_empty_ask *)item)->node, ((const struct sluice_empty_ask *)other)->node);
}

static void say_twice(const void *item, struct sluice_error_text *text)
{
    snprintf(text->text, sizeof text->text, "node %s is there twice", ((const struct sluice_empty_ask *)item)->node);
}

static const struct sluice_listing_kind kind = {.name = "sluice-empty",
                                                .items = "nodes",
                                                .wanted = "a node",
                                                .most = MOST_ASKS,
                                                .first = offsetof(struct sluice_empty_asks, items),
                                                .size = sizeof(struct sluice_empty_ask),
                                                .read = read_ask,
                                                .compare = compare,
                                                .twice = say_twice};

enum sluice_error sluice_empty_asks_parse(const char *data, size_t length, struct sluice_empty_asks **asks,
                                          struct sluice_error_text *text)
{
    struct sluice_listed *listed = NULL;
    enum sluice_error error = sluice_listing_parse(&kind, data, length, &listed, text);
    *asks = (struct sluice_empty_asks *)listed;
    return error;
}

/* ---- what is said ---- */

static void render(FILE *to, const struct sluice_emptying *said)
{
    fprintf(to, "sluice-emptying 1\nat %" PRId64 "\n", said->now_s);
    for (uint32_t i = 0; i < said->node_count; i++)
        fprintf(to, "node %s %" PRId64 " %s\n", said->nodes[i].name, said->nodes[i].deadline_s,
                said->nodes[i].ordered ? "order" : "ask");
    for (uint32_t i = 0; i < said->job_count; i++) {
        const struct sluice_emptying_job *job = &said->jobs[i];
        fprintf(to, "job %" PRIu32 " %s %s %s %" PRId64 " %s\n", job->job_id, job->node, decisions[job->decision],
                whys[job->why], job->end_s == INT64_MAX ? 0 : job->end_s, job->to ? job->to : "-");
    }
}

bool sluice_emptying_write(const char *path, const struct sluice_emptying *said)
{
    char *text = NULL;
    size_t length = 0;
    FILE *to = open_memstream(&text, &length);
    if (!to)
        return false;
    render(to, said);
    bool good = sluice_listing_end(to, &text, &length) && sluice_listing_write(path, text, length);
    free(text);
    return good;
}
