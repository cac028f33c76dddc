/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "mirror/blocks.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_SIZES = 32 };

/* The number behind " BlockSize=" in a line. */
static uint32_t size_in(const char *line)
{
    const char *at = strstr(line, " BlockSize=");
    return at ? (uint32_t)strtoul(at + strlen(" BlockSize="), NULL, 10) : 0;
}

static bool add_size(uint32_t *sizes, uint32_t *count, uint32_t size)
{
    for (uint32_t i = 0; i < *count; i++)
        if (sizes[i] == size)
            return true;
    if (*count == MOST_SIZES)
        return false;
    sizes[(*count)++] = size;
    return true;
}

/* "BlockName=b1 BlockIndex=0 Nodes=n[1-4] BlockSize=4", then "AggregatedBlock=b[1-2] ... BlockSize=8". */
static bool read_line(char *line, struct sluice_block_names *names, uint32_t *sizes, uint32_t *size_count)
{
    static const char base[] = "BlockName=", larger[] = "AggregatedBlock=";
    const uint32_t size = size_in(line);
    const bool is_base = !strncmp(line, base, strlen(base));
    if (!is_base && strncmp(line, larger, strlen(larger)) != 0)
        return !*line;
    if (!size || !add_size(sizes, size_count, size))
        return false;
    if (!is_base)
        return true;
    char *name = line + strlen(base), *end = strstr(name, " BlockIndex=");
    if (!end || names->count == names->room)
        return false;
    snprintf(names->names[names->count++], sizeof(names->names[0]), "%.*s", (int)(end - name), name);
    return true;
}

bool sluice_blocks_read(char *text, struct sluice_block_names *names, struct sluice_blocks *blocks)
{
    uint32_t sizes[MOST_SIZES], size_count = 0;
    char *rest = NULL;
    names->count = 0;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest))
        if (!read_line(line, names, sizes, &size_count))
            return false;
    return size_count && !sluice_blocks_make(sizes, size_count, names->count, blocks, NULL);
}
