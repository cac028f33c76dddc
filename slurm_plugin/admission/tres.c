/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "admission/tres.h"

#include <stdio.h>
#include <string.h>

enum { NAME_MAX_LENGTH = 63, PARTS_MAX = 3 };

struct item {
    const char *text; /* up to the next comma */
    size_t length;
    char name[NAME_MAX_LENGTH + 1]; /* without "gres:" or "gres/" */
    char type[SLUICE_GPU_TYPE_LENGTH + 1];
    uint64_t count;
};

static bool is_alphanumeric(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

static bool is_word(char c)
{
    return is_alphanumeric(c) || c == '_' || c == '-' || c == '.' || c == '+';
}

static bool fail(char *why, size_t why_size, const char *what, const char *text, size_t length)
{
    char shown[65];
    size_t i = 0;
    for (; i < length && i + 1 < sizeof shown; i++)
        shown[i] = text[i] >= ' ' && text[i] <= '~' ? text[i] : '?';
    shown[i] = '\0';
    snprintf(why, why_size, "\"%s\" %s", shown, what);
    return false;
}

/* Slurm's suffixes: powers of 1024, and of 1000 with a single "b". 0 for an unknown one, or a product beyond the
 * bound. */
static uint64_t suffix_factor(const char *suffix, size_t length)
{
    static const char letters[] = "kmgtp";
    if (length == 0)
        return 1;
    char letter = (char)(suffix[0] | 0x20);
    const char *found = strchr(letters, letter);
    bool thousands = length == 2 && (suffix[1] | 0x20) == 'b';
    bool binary = length == 3 && (suffix[1] | 0x20) == 'i' && (suffix[2] | 0x20) == 'b';
    if (!found || !*found || !(length == 1 || thousands || binary))
        return 0;
    uint64_t factor = 1;
    for (const char *at = letters; at <= found; at++)
        factor *= thousands ? 1000 : 1024;
    return factor;
}

enum count_kind { COUNT_GOOD, COUNT_ABSURD, COUNT_NONE };

/* Whether a word is a count as Slurm reads it. */
static enum count_kind read_count(const char *word, size_t length, uint64_t *count)
{
    uint64_t value = 0;
    size_t digits = 0;
    bool absurd = false;
    for (; digits < length && word[digits] >= '0' && word[digits] <= '9'; digits++) {
        value = value * 10 + (uint64_t)(word[digits] - '0');
        if (value > SLUICE_GRES_COUNT_MAX) {
            absurd = true;
            value = SLUICE_GRES_COUNT_MAX;
        }
    }
    uint64_t factor = suffix_factor(word + digits, length - digits);
    if (digits == 0 || factor == 0)
        return COUNT_NONE;
    if (absurd || value > SLUICE_GRES_COUNT_MAX / factor)
        return COUNT_ABSURD;
    *count = value * factor;
    return COUNT_GOOD;
}

/* One item: [gres:|gres/]NAME[:TYPE][:COUNT], and = for the last colon as --tres-per-task has it. */
static bool read_item(struct item *item, char *why, size_t why_size)
{
    const char *text = item->text, *end = text + item->length, *parts[PARTS_MAX];
    size_t lengths[PARTS_MAX], count = 0;
    if (item->length > 5 && strncmp(text, "gres", 4) == 0 && (text[4] == ':' || text[4] == '/'))
        text += 5;
    while (true) {
        const char *start = text;
        while (text < end && is_word(*text))
            text++;
        if (text == start || count == PARTS_MAX || !is_alphanumeric(*start)) /* a sign would be read with the number */
            return fail(why, why_size, "is not a GRES request; write NAME:COUNT or NAME:TYPE:COUNT", item->text,
                        item->length);
        parts[count] = start;
        lengths[count++] = (size_t)(text - start);
        if (text == end)
            break;
        if (*text != ':' && *text != '=')
            return fail(why, why_size, "is not a GRES request; write NAME:COUNT or NAME:TYPE:COUNT", item->text,
                        item->length);
        text++;
    }
    if (lengths[0] > NAME_MAX_LENGTH)
        return fail(why, why_size, "has a name that is too long", item->text, item->length);
    memcpy(item->name, parts[0], lengths[0]);
    item->name[lengths[0]] = '\0';
    item->type[0] = '\0';
    item->count = 1;
    size_t typed = 0; /* index of the type's part */
    switch (count == 1 ? COUNT_NONE : read_count(parts[count - 1], lengths[count - 1], &item->count)) {
    case COUNT_ABSURD:
        return fail(why, why_size, "asks for more than any cluster has", item->text, item->length);
    case COUNT_GOOD:
        typed = count == 3;
        break;
    case COUNT_NONE:
        if (count == 3)
            return fail(why, why_size, "has no number for its count", item->text, item->length);
        typed = count - 1;
    }
    if (typed) {
        if (lengths[typed] > SLUICE_GPU_TYPE_LENGTH)
            return fail(why, why_size, "has a type that is too long", item->text, item->length);
        memcpy(item->type, parts[typed], lengths[typed]);
        item->type[lengths[typed]] = '\0';
    }
    return true;
}

/* Another resource than GPUs is left to Slurm, unless its text could be read as GRES. */
static bool is_foreign(const char *text, size_t length)
{
    for (size_t i = 0; i + 4 <= length; i++)
        if (memcmp(text + i, "gres", 4) == 0)
            return false;
    for (size_t i = 0; i < length; i++)
        if (text[i] < ' ' || text[i] > '~')
            return false;
    return true;
}

static struct sluice_gres_counts *find_type(struct sluice_tres_request *request, const char *type)
{
    for (size_t i = 0; i < request->gpu_types; i++)
        if (strcmp(request->gpus[i].type, type) == 0)
            return &request->gpus[i];
    if (request->gpu_types == SLUICE_GPU_TYPES_MAX)
        return NULL;
    struct sluice_gres_counts *counts = &request->gpus[request->gpu_types++];
    memset(counts, 0, sizeof *counts);
    memcpy(counts->type, type, strlen(type) + 1);
    return counts;
}

static bool is_gpu_item(const struct item *item)
{
    return strcmp(item->name, "gpu") == 0 || strcmp(item->name, "shard") == 0 || strcmp(item->name, "mps") == 0;
}

static bool next_item(const char **text, struct item *item)
{
    while (**text == ',')
        (*text)++;
    if (**text == '\0')
        return false;
    item->text = *text;
    item->length = strcspn(*text, ",");
    *text += item->length;
    return true;
}

bool sluice_tres_add(struct sluice_tres_request *request, enum sluice_per per, const char *text, char *why,
                     size_t why_size)
{
    struct item item;
    if (!text)
        return true;
    size_t length = strnlen(text, SLUICE_TRES_TEXT_MAX);
    if (length == SLUICE_TRES_TEXT_MAX)
        return fail(why, why_size, "is too long a request", text, length);
    while (next_item(&text, &item)) {
        bool gres = item.length > 5 && memcmp(item.text, "gres", 4) == 0;
        if (!gres && strncmp(item.text, "gpu", 3) != 0 && strncmp(item.text, "shard", 5) != 0 &&
            strncmp(item.text, "mps", 3) != 0 && is_foreign(item.text, item.length))
            continue;
        if (!read_item(&item, why, why_size))
            return false;
        if (strstr(item.name, "gres") || strstr(item.type, "gres"))
            return fail(why, why_size, "names a GRES that could be mistaken for another", item.text, item.length);
        if (!is_gpu_item(&item) || item.count == 0)
            continue;
        struct sluice_gres_counts *counts = &request->shards;
        if (item.name[0] == 'g' && !(counts = find_type(request, item.type)))
            return fail(why, why_size, "is one type of GPU too many for one job", item.text, item.length);
        if (item.name[0] == 'm')
            counts = &request->mps;
        if (item.name[0] == 's' && item.type[0])
            request->shards_typed = true;
        if (item.name[0] == 'g') { /* --gres in a script and --gpus-per-node on the command line, say */
            request->gpus_differ |= counts->per[per] && counts->per[per] != item.count;
            counts->per[per] = 0;
        }
        counts->per[per] += item.count;
        if (counts->per[per] > SLUICE_GRES_COUNT_MAX)
            return fail(why, why_size, "asks for more than any cluster has", item.text, item.length);
    }
    return true;
}

size_t sluice_tres_without_gpus(const char *text, char *rest)
{
    struct item item;
    char why[1];
    size_t length = 0;
    rest[0] = '\0';
    while (text && next_item(&text, &item)) {
        bool ours = read_item(&item, why, sizeof why) && is_gpu_item(&item);
        if (ours || length + item.length + 2 > SLUICE_TRES_TEXT_MAX)
            continue;
        if (length)
            rest[length++] = ',';
        memcpy(rest + length, item.text, item.length);
        length += item.length;
        rest[length] = '\0';
    }
    return length;
}

bool sluice_tres_names(const char *text, const char *name)
{
    struct item item;
    char why[1];
    while (text && next_item(&text, &item))
        if (read_item(&item, why, sizeof why) && strcmp(item.name, name) == 0)
            return true;
    return false;
}

const char *sluice_per_option(enum sluice_per per)
{
    static const char *const options[SLUICE_PER_COUNT] = {"--gpus", "--gpus-per-node", "--gpus-per-socket",
                                                          "--gpus-per-task"};
    return options[per];
}
