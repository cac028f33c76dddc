/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/fail.h"
#include "runtime/listing.h"
#include "runtime/saves.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* Digits up to `stop`, and that; *at is behind it then. */
static bool read_number(const char **at, char stop, uint64_t most, uint64_t *number)
{
    const char *first = *at;
    *number = 0;
    for (; **at >= '0' && **at <= '9'; ++*at) {
        *number = *number * 10 + (uint64_t)(**at - '0');
        if (*number > most)
            return false;
    }
    return *at > first && *(*at)++ == stop;
}

static int compare(const void *a, const void *b)
{
    const struct sluice_save *one = a, *other = b;
    return (one->job_id > other->job_id) - (one->job_id < other->job_id);
}

/* All lines end with a newline. */
static enum sluice_error read_lines(struct sluice_saves *made, const char *data, size_t length,
                                    struct sluice_error_text *text)
{
    for (const char *at = data; at < data + length; made->count++) {
        uint64_t job = 0, time = 0;
        if (!read_number(&at, ' ', UINT32_MAX, &job) || !read_number(&at, '\n', SLUICE_SAVES_MAX_S, &time))
            return sluice_fail_with(text, SLUICE_ERROR_INVALID, "line %" PRIu32 ": not a job's id and a time",
                                    made->count + 2);
        made->jobs[made->count] = (struct sluice_save){.job_id = (uint32_t)job, .at_s = (int64_t)time};
    }
    qsort(made->jobs, made->count, sizeof(*made->jobs), compare);
    for (uint32_t i = 1; i < made->count; i++)
        if (!compare(&made->jobs[i - 1], &made->jobs[i]))
            return sluice_fail_with(text, SLUICE_ERROR_INVALID, "job %" PRIu32 " is there twice", made->jobs[i].job_id);
    return SLUICE_OK;
}

enum sluice_error sluice_saves_parse(const char *data, size_t length, struct sluice_saves **saves,
                                     struct sluice_error_text *text)
{
    const char *lines;
    size_t body;
    uint32_t count = 0;
    *saves = NULL;
    if (length > SLUICE_LISTING_MAX_BYTES)
        return sluice_fail_with(text, SLUICE_ERROR_CAPACITY, "larger than %d bytes", SLUICE_LISTING_MAX_BYTES);
    enum sluice_error error = sluice_listing_open(data, length, "sluice-saves", &lines, &body, text);
    if (error)
        return error;
    for (size_t i = 0; i < body; i++)
        count += lines[i] == '\n';
    if (count > SLUICE_SAVES_MAX)
        return sluice_fail_with(text, SLUICE_ERROR_CAPACITY, "more than %d jobs", SLUICE_SAVES_MAX);
    struct sluice_saves *made = calloc(1, sizeof(*made) + count * sizeof(*made->jobs));
    if (!made)
        return sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "no memory");
    atomic_init(&made->users, 1);
    error = read_lines(made, lines, body, text);
    if (error)
        free(made);
    else
        *saves = made;
    return error;
}

void sluice_saves_release(const struct sluice_saves *saves)
{
    struct sluice_saves *shared = (struct sluice_saves *)(uintptr_t)saves;
    if (shared && atomic_fetch_sub(&shared->users, 1) == 1)
        free(shared);
}

int64_t sluice_saves_of(const struct sluice_saves *saves, uint32_t job_id)
{
    const struct sluice_save wanted = {.job_id = job_id};
    const struct sluice_save *found =
        saves && saves->count ? bsearch(&wanted, saves->jobs, saves->count, sizeof(*saves->jobs), compare) : NULL;
    return found ? found->at_s : 0;
}
