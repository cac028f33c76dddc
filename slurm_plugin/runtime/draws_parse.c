/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/draws.h"

#include "runtime/listing.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum kind { ESTIMATE, JOB, BUDGET, KINDS };

/* A line that is being read: words, one blank between two of them. */
struct words {
    const char *at, *end;
};

/* The next word; its length, 0 where there is none. */
static size_t next_word(struct words *words, const char **word)
{
    const char *blank = memchr(words->at, ' ', (size_t)(words->end - words->at));
    *word = words->at;
    size_t length = (size_t)((blank ? blank : words->end) - words->at);
    words->at = blank ? blank + 1 : words->end;
    return length;
}

static bool next_number(struct words *words, uint64_t most, uint64_t *number)
{
    const char *word;
    size_t length = next_word(words, &word);
    *number = 0;
    for (size_t i = 0; i < length; i++) {
        if (word[i] < '0' || word[i] > '9')
            return false;
        *number = *number * 10 + (uint64_t)(word[i] - '0');
        if (*number > most)
            return false;
    }
    return length > 0;
}

static bool next_name(struct words *words, char *name)
{
    const char *word;
    size_t length = next_word(words, &word);
    if (length == 0 || length > SLUICE_RULES_MAX_NAME)
        return false;
    for (size_t i = 0; i < length; i++)
        if (word[i] <= ' ' || word[i] > '~')
            return false;
    memcpy(name, word, length);
    name[length] = '\0';
    return true;
}

static bool read_line(struct words words, enum kind *kind, struct sluice_draw *draw)
{
    static const char *const names[KINDS] = {"estimate", "job", "budget"};
    const char *word;
    size_t length = next_word(&words, &word);
    uint64_t number = 0, watts = 0;
    for (*kind = 0; *kind < KINDS; ++*kind)
        if (length == strlen(names[*kind]) && !memcmp(word, names[*kind], length))
            break;
    if (*kind == KINDS)
        return false;
    *draw = (struct sluice_draw){.until_s = INT64_MAX};
    bool any = *kind == ESTIMATE && words.end - words.at > 1 && words.at[0] == '-' && words.at[1] == ' ';
    if (any)
        words.at += 2;
    else if (*kind != BUDGET && !next_number(&words, UINT32_MAX - 1, &number))
        return false;
    draw->id = any ? SLUICE_DRAWS_ANY : (uint32_t)number;
    if (*kind != JOB && !next_name(&words, draw->name))
        return false;
    if (!next_number(&words, *kind == BUDGET ? SLUICE_POWER_MAX_WATTS : SLUICE_POWER_MAX_GPU_WATTS, &watts))
        return false;
    draw->watts = (int32_t)watts;
    if (*kind == BUDGET) {
        if (!next_number(&words, INT64_C(1) << 40, &number))
            return false;
        draw->until_s = number ? (int64_t)number : INT64_MAX;
    }
    return words.at == words.end;
}

static int compare(const void *a, const void *b)
{
    const struct sluice_draw *one = a, *other = b;
    if (one->id != other->id)
        return one->id < other->id ? -1 : 1;
    return strcmp(one->name, other->name);
}

/* The lines of each kind, behind one another in made->lines. */
static enum sluice_error read_lines(struct sluice_draws *made, uint32_t count, const char *data, size_t length,
                                    struct sluice_error_text *text)
{
    const struct sluice_draw **places[KINDS] = {&made->estimates, &made->jobs, &made->budgets};
    uint32_t *counts[KINDS] = {&made->estimate_count, &made->job_count, &made->budget_count}, used = 0;
    for (enum kind wanted = 0; wanted < KINDS; wanted++) {
        const uint32_t first = used;
        uint32_t number = 1;
        for (const char *at = data, *end; at < data + length; at = end + 1) {
            enum kind kind;
            struct sluice_draw draw;
            end = memchr(at, '\n', (size_t)(data + length - at)); /* all lines end with one */
            number++;
            if (!read_line((struct words){at, end}, &kind, &draw)) {
                snprintf(text->text, sizeof(text->text),
                         "line %" PRIu32 ": not an estimate, a job or a budget with its watts", number);
                return SLUICE_ERROR_INVALID;
            }
            if (kind == wanted && used < count)
                made->lines[used++] = draw;
        }
        *places[wanted] = &made->lines[first];
        *counts[wanted] = used - first;
        qsort(&made->lines[first], used - first, sizeof(*made->lines), compare);
        for (uint32_t i = first + 1; i < used; i++)
            if (!compare(&made->lines[i - 1], &made->lines[i])) {
                snprintf(text->text, sizeof(text->text), "%s%" PRIu32 " is there twice", made->lines[i].name,
                         made->lines[i].id);
                return SLUICE_ERROR_INVALID;
            }
    }
    return SLUICE_OK;
}

enum sluice_error sluice_draws_parse(const char *data, size_t length, struct sluice_draws **draws,
                                     struct sluice_error_text *text)
{
    const char *lines;
    size_t body;
    uint32_t count = 0;
    struct sluice_error_text unused;
    text = text ? text : &unused;
    *draws = NULL;
    if (length > SLUICE_LISTING_MAX_BYTES) {
        snprintf(text->text, sizeof(text->text), "larger than %d bytes", SLUICE_LISTING_MAX_BYTES);
        return SLUICE_ERROR_CAPACITY;
    }
    enum sluice_error error = sluice_listing_open(data, length, "sluice-power", &lines, &body, text);
    if (error)
        return error;
    for (size_t i = 0; i < body; i++)
        count += lines[i] == '\n';
    if (count > SLUICE_DRAWS_MAX) {
        snprintf(text->text, sizeof(text->text), "more than %d lines", SLUICE_DRAWS_MAX);
        return SLUICE_ERROR_CAPACITY;
    }
    struct sluice_draws *made = calloc(1, sizeof(*made) + (count + 1) * sizeof(*made->lines));
    if (!made) {
        snprintf(text->text, sizeof(text->text), "no memory");
        return SLUICE_ERROR_NO_MEMORY;
    }
    atomic_init(&made->users, 1);
    error = read_lines(made, count, lines, body, text);
    if (error)
        free(made);
    else
        *draws = made;
    return error;
}

void sluice_draws_release(const struct sluice_draws *draws)
{
    struct sluice_draws *shared = (struct sluice_draws *)(uintptr_t)draws;
    if (shared && atomic_fetch_sub(&shared->users, 1) == 1)
        free(shared);
}

static const struct sluice_draw *find(const struct sluice_draw *lines, uint32_t count, uint32_t id, const char *name)
{
    struct sluice_draw wanted = {.id = id};
    snprintf(wanted.name, sizeof(wanted.name), "%s", name);
    return count ? bsearch(&wanted, lines, count, sizeof(*lines), compare) : NULL;
}

int32_t sluice_draws_estimate(const struct sluice_draws *draws, uint32_t user, const char *class)
{
    const struct sluice_draw *line = NULL;
    if (draws && !(line = find(draws->estimates, draws->estimate_count, user, class)))
        line = find(draws->estimates, draws->estimate_count, SLUICE_DRAWS_ANY, class);
    return line ? line->watts : 0;
}

int32_t sluice_draws_job(const struct sluice_draws *draws, uint32_t job_id)
{
    const struct sluice_draw *line = draws ? find(draws->jobs, draws->job_count, job_id, "") : NULL;
    return line ? line->watts : 0;
}

const struct sluice_draw *sluice_draws_budget(const struct sluice_draws *draws, const char *name)
{
    return draws ? find(draws->budgets, draws->budget_count, 0, name) : NULL;
}
