/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/fail.h"
#include "runtime/listing.h"
#include "runtime/nics.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

struct of_node {
    char name[SLUICE_NICS_MAX_NAME + 1];
    struct sluice_nic_groups groups;
};

struct sluice_nics {
    uint32_t count;
    struct of_node nodes[]; /* sorted by name */
};

/* The next word of a line, which ends at a blank or at `end`; its length. */
static size_t next_word(const char **at, const char *end, const char **word)
{
    const char *blank = memchr(*at, ' ', (size_t)(end - *at));
    *word = *at;
    *at = blank ? blank + 1 : end;
    return (size_t)((blank ? blank : end) - *word);
}

/* Numbers with commas between them; how many, 0 for what is no such list. */
static uint32_t read_groups(const char *word, size_t length, uint8_t *groups, uint32_t most)
{
    uint32_t count = 0, value = 0;
    bool digit = false;
    for (size_t i = 0; i <= length; i++) {
        if (i == length || word[i] == ',') {
            if (!digit || count == most)
                return 0;
            groups[count++] = (uint8_t)value;
            value = 0;
            digit = false;
            continue;
        }
        if (word[i] < '0' || word[i] > '9')
            return 0;
        value = value * 10 + (uint32_t)(word[i] - '0');
        digit = true;
        if (value >= SLUICE_MAX_NIC_GROUPS)
            return 0;
    }
    return count;
}

static bool read_line(const char *at, const char *end, struct of_node *node)
{
    const char *word;
    size_t length = next_word(&at, end, &word);
    if (length == 0 || length > SLUICE_NICS_MAX_NAME)
        return false;
    for (size_t i = 0; i < length; i++)
        if (word[i] <= ' ' || word[i] > '~')
            return false;
    memcpy(node->name, word, length);
    length = next_word(&at, end, &word);
    node->groups.gpu_count = read_groups(word, length, node->groups.gpu_group, SLUICE_MAX_GPUS);
    length = next_word(&at, end, &word);
    node->groups.nic_count = read_groups(word, length, node->groups.nic_group, SLUICE_MAX_NICS);
    return node->groups.gpu_count && node->groups.nic_count && at == end && end[-1] != ' ';
}

static int compare(const void *a, const void *b)
{
    const struct of_node *one = a, *other = b;
    return strcmp(one->name, other->name);
}

static int compare_name(const void *name, const void *node)
{
    return strcmp(name, ((const struct of_node *)node)->name);
}

static enum sluice_error read_lines(struct sluice_nics *made, const char *data, size_t length,
                                    struct sluice_error_text *text)
{
    uint32_t number = 1;
    for (const char *at = data, *end; at < data + length; at = end + 1) {
        end = memchr(at, '\n', (size_t)(data + length - at)); /* all lines end with one */
        number++;
        if (!read_line(at, end, &made->nodes[made->count++]))
            return sluice_fail_with(text, SLUICE_ERROR_INVALID,
                                    "line %" PRIu32 ": not a node with the groups of its GPUs and NICs", number);
    }
    qsort(made->nodes, made->count, sizeof(*made->nodes), compare);
    for (uint32_t i = 1; i < made->count; i++)
        if (!compare(&made->nodes[i - 1], &made->nodes[i]))
            return sluice_fail_with(text, SLUICE_ERROR_INVALID, "node %s is there twice", made->nodes[i].name);
    return SLUICE_OK;
}

enum sluice_error sluice_nics_parse(const char *data, size_t length, struct sluice_nics **nics,
                                    struct sluice_error_text *text)
{
    const char *lines;
    size_t body;
    uint32_t count = 0;
    *nics = NULL;
    if (length > SLUICE_LISTING_MAX_BYTES)
        return sluice_fail_with(text, SLUICE_ERROR_CAPACITY, "larger than %d bytes", SLUICE_LISTING_MAX_BYTES);
    enum sluice_error error = sluice_listing_open(data, length, "sluice-nics", &lines, &body, text);
    if (error)
        return error;
    for (size_t i = 0; i < body; i++)
        count += lines[i] == '\n';
    if (count > SLUICE_NICS_MAX)
        return sluice_fail_with(text, SLUICE_ERROR_CAPACITY, "more than %d nodes", SLUICE_NICS_MAX);
    struct sluice_nics *made = calloc(1, sizeof(*made) + (count + 1) * sizeof(*made->nodes));
    if (!made)
        return sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "no memory");
    error = read_lines(made, lines, body, text);
    if (error)
        free(made);
    else
        *nics = made;
    return error;
}

void sluice_nics_free(struct sluice_nics *nics)
{
    free(nics);
}

const struct sluice_nic_groups *sluice_nics_of(const struct sluice_nics *nics, const char *node)
{
    const struct of_node *found =
        nics && nics->count ? bsearch(node, nics->nodes, nics->count, sizeof(*nics->nodes), compare_name) : NULL;
    return found ? &found->groups : NULL;
}
