/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/withdrawn_internal.h"

#include "runtime/listing.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

__attribute__((format(printf, 3, 4))) static enum sluice_error fail(struct sluice_error_text *text,
                                                                    enum sluice_error error, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    if (text)
        vsnprintf(text->text, sizeof(text->text), format, arguments);
    va_end(arguments);
    return error;
}

static bool is_name_byte(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
           c == '.';
}

/* One line without its end: NODE NUMBER. */
static bool read_line(const char *line, size_t length, struct sluice_withdrawn_gpu *gpu)
{
    size_t name = 0, digits;
    while (name < length && is_name_byte(line[name]))
        name++;
    if (!name || name > SLUICE_WITHDRAWN_MAX_NAME || name >= length || line[name] != ' ')
        return false;
    memcpy(gpu->node, line, name);
    gpu->node[name] = '\0';
    gpu->gpu = 0;
    line += name + 1;
    length -= name + 1;
    for (digits = 0; digits < length && digits < 3 && line[digits] >= '0' && line[digits] <= '9'; digits++)
        gpu->gpu = gpu->gpu * 10 + (uint32_t)(line[digits] - '0');
    return digits && digits == length && gpu->gpu <= SLUICE_WITHDRAWN_MAX_GPU && (digits == 1 || line[0] != '0');
}

static int compare(const void *a, const void *b)
{
    const struct sluice_withdrawn_gpu *one = a, *other = b;
    int names = strcmp(one->node, other->node);
    return names ? names : (one->gpu > other->gpu) - (one->gpu < other->gpu);
}

/* All lines but the first and the last. */
static enum sluice_error read_gpus(struct shared_list *list, const char *data, size_t length,
                                   struct sluice_error_text *text)
{
    uint32_t number = 1;
    for (size_t at = 0; at < length;) {
        const char *line = data + at, *end = memchr(line, '\n', length - at);
        size_t bytes = end ? (size_t)(end - line) : length - at;
        number++;
        at += bytes + 1;
        if (list->shown.count == SLUICE_WITHDRAWN_MAX)
            return fail(text, SLUICE_ERROR_CAPACITY, "more than %d GPUs", SLUICE_WITHDRAWN_MAX);
        if (!read_line(line, bytes, &list->gpus[list->shown.count]))
            return fail(text, SLUICE_ERROR_INVALID, "line %" PRIu32 ": not a node's name and a GPU's number", number);
        list->shown.count++;
    }
    qsort(list->gpus, list->shown.count, sizeof(*list->gpus), compare);
    for (uint32_t i = 1; i < list->shown.count; i++)
        if (!compare(&list->gpus[i - 1], &list->gpus[i]))
            return fail(text, SLUICE_ERROR_INVALID, "GPU %" PRIu32 " of node %s is named twice", list->gpus[i].gpu,
                        list->gpus[i].node);
    return SLUICE_OK;
}

struct shared_list *sluice_withdrawn_new(size_t lines)
{
    struct shared_list *list = calloc(1, sizeof(*list));
    if (list)
        list->gpus = calloc(lines + 1, sizeof(*list->gpus));
    if (!list || !list->gpus) {
        free(list);
        return NULL;
    }
    list->shown.gpus = list->gpus;
    atomic_init(&list->users, 1);
    return list;
}

enum sluice_error sluice_withdrawn_parse(const char *data, size_t length, struct sluice_withdrawn **list,
                                         struct sluice_error_text *text)
{
    const char *lines_at;
    size_t body, lines = 0;
    *list = NULL;
    if (length > SLUICE_LISTING_MAX_BYTES)
        return fail(text, SLUICE_ERROR_CAPACITY, "larger than %d bytes", SLUICE_LISTING_MAX_BYTES);
    enum sluice_error error = sluice_listing_open(data, length, "sluice-withdrawn", &lines_at, &body, text);
    if (error)
        return error;
    for (size_t i = 0; i < body; i++)
        lines += lines_at[i] == '\n';
    if (lines > SLUICE_WITHDRAWN_MAX)
        lines = SLUICE_WITHDRAWN_MAX;
    struct shared_list *made = sluice_withdrawn_new(lines);
    if (!made)
        return fail(text, SLUICE_ERROR_NO_MEMORY, "no memory");
    error = read_gpus(made, lines_at, body, text);
    if (error) {
        sluice_withdrawn_free(&made->shown);
        return error;
    }
    *list = &made->shown;
    return SLUICE_OK;
}

void sluice_withdrawn_free(struct sluice_withdrawn *list)
{
    struct shared_list *shared = (struct shared_list *)list;
    if (shared && atomic_fetch_sub(&shared->users, 1) == 1) {
        free(shared->gpus);
        free(shared);
    }
}
