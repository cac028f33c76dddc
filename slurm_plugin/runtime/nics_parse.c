/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/nics.h"

#include "runtime/listing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct of_node {
    char name[SLUICE_NICS_MAX_NAME + 1];
    struct sluice_nic_groups groups;
};

struct sluice_nics {
    struct sluice_listed listed;
    struct of_node nodes[]; /* sorted by name */
};

/* The next word: numbers with commas between them, each with /PLANE behind it where it has one and `planes` is not NULL;
 * how many, 0 for what is no such list. */
static uint32_t read_groups(struct sluice_line *line, uint8_t *groups, uint8_t *planes, uint32_t most)
{
    const char *word;
    const size_t length = sluice_line_word(line, &word);
    if (!length)
        return 0;
    struct sluice_line list = {.at = word, .end = word + length, .between = ','};
    uint32_t count = 0;
    do {
        uint64_t value, plane = 0;
        const char *one;
        const size_t size = sluice_line_word(&list, &one);
        struct sluice_line parts = {.at = one, .end = one + size, .between = '/'};
        if (count == most || !sluice_line_number(&parts, SLUICE_MAX_NIC_GROUPS - 1, &value))
            return 0;
        if (parts.at && (!planes || !sluice_line_number(&parts, SLUICE_MAX_NIC_PLANES, &plane) || !plane || parts.at))
            return 0;
        if (planes)
            planes[count] = (uint8_t)plane;
        groups[count++] = (uint8_t)value;
    } while (list.at);
    return count;
}

static bool read_line(struct sluice_line *line, void *item)
{
    struct of_node *node = item;
    if (!sluice_line_name(line, node->name, sizeof(node->name)))
        return false;
    node->groups.gpu_count = read_groups(line, node->groups.gpu_group, NULL, SLUICE_MAX_GPUS);
    node->groups.nic_count = read_groups(line, node->groups.nic_group, node->groups.nic_plane, SLUICE_MAX_NICS);
    return node->groups.gpu_count && node->groups.nic_count && !line->at;
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

static void say_twice(const void *item, struct sluice_error_text *text)
{
    const struct of_node *node = item;
    snprintf(text->text, sizeof(text->text), "node %s is there twice", node->name);
}

static const struct sluice_listing_kind kind = {.name = "sluice-nics",
                                                .items = "nodes",
                                                .wanted = "a node with the groups of its GPUs and NICs",
                                                .most = SLUICE_NICS_MAX,
                                                .first = offsetof(struct sluice_nics, nodes),
                                                .size = sizeof(struct of_node),
                                                .read = read_line,
                                                .compare = compare,
                                                .twice = say_twice};

enum sluice_error sluice_nics_parse(const char *data, size_t length, struct sluice_nics **made,
                                    struct sluice_error_text *text)
{
    struct sluice_listed *listed;
    enum sluice_error error = sluice_listing_parse(&kind, data, length, &listed, text);
    *made = (struct sluice_nics *)listed;
    return error;
}

void sluice_nics_free(struct sluice_nics *nics)
{
    sluice_listed_release((const struct sluice_listed *)nics);
}

const struct sluice_nic_groups *sluice_nics_of(const struct sluice_nics *nics, const char *node)
{
    const struct of_node *found =
        nics ? bsearch(node, nics->nodes, nics->listed.count, sizeof(*nics->nodes), compare_name) : NULL;
    return found ? &found->groups : NULL;
}
