/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Options and GRES requests of any content: what is accepted is within the bounds that the headers promise, a refusal
 * says why in printable words, and taking GPUs out of a request leaves none.
 */
#include "admission/tres.h"
#include "options/options.h"

#include <stdlib.h>
#include <string.h>

static void require(bool holds)
{
    if (!holds)
        abort();
}

static void require_printable(const char *text)
{
    require(*text);
    for (; *text; text++)
        require(*text >= ' ' && *text <= '~');
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char text[1024], why[SLUICE_OPTION_WHY_MAX], rest[SLUICE_TRES_TEXT_MAX];
    size_t length = size < sizeof text - 1 ? size : sizeof text - 1;
    memcpy(text, data, length);
    text[length] = '\0';

    struct sluice_options options = {.gpu_mem_mib = 0};
    for (size_t i = 0; sluice_option_name(i); i++)
        if (!sluice_option_set(&options, sluice_option_name(i), text, why, sizeof why))
            require_printable(why);
    require(options.gpu_mem_mib <= SLUICE_GPU_MEM_MAX_MIB && options.gpu_share <= 100);
    require(options.gang_count <= SLUICE_GANG_COUNT_MAX && strlen(options.gang_name) <= SLUICE_GANG_NAME_MAX);
    require((options.gang_count == 0) == (options.gang_name[0] == '\0'));

    char *lines[16] = {NULL};
    size_t count = 0;
    for (char *at = text; *at && count < 16; count++) {
        lines[count] = at;
        at += strcspn(at, "\n");
        if (*at)
            *at++ = '\0';
    }
    if (!sluice_options_from_env(&options, lines, count, why, sizeof why))
        require_printable(why);

    struct sluice_tres_request request = {.gpu_types = 0}, left = {.gpu_types = 0};
    static const struct sluice_gres_counts none;
    if (!sluice_tres_add(&request, SLUICE_PER_NODE, text, why, sizeof why)) {
        require_printable(why);
        return 0;
    }
    require(request.gpu_types <= SLUICE_GPU_TYPES_MAX);
    for (size_t i = 0; i < request.gpu_types; i++)
        require(request.gpus[i].per[SLUICE_PER_NODE] <= SLUICE_GRES_COUNT_MAX);
    require(sluice_tres_without_gpus(text, rest) == strlen(rest) && strlen(rest) <= strlen(text));
    require(sluice_tres_add(&left, SLUICE_PER_NODE, rest, why, sizeof why));
    require(left.gpu_types == 0 && !memcmp(left.shards.per, none.per, sizeof none.per) &&
            !memcmp(left.mps.per, none.per, sizeof none.per));
    return 0;
}
