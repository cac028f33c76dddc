/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Options and GRES requests of any content: what is accepted is within the bounds that the headers promise, a refusal
 * says why in printable words, and taking GPUs out of a request leaves none.
 */
#include "admission/tres.h"
#include "rules/options.h"
#include "rules/trace.h"

#include <stdio.h>
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

static bool same(const struct sluice_options *one, const struct sluice_options *other)
{
    return one->gpu_mem_mib == other->gpu_mem_mib && one->gpu_share == other->gpu_share &&
           one->gpu_power_w == other->gpu_power_w && one->gang_count == other->gang_count &&
           one->gpu_affinity == other->gpu_affinity && one->gpu_spread == other->gpu_spread &&
           one->gpu_profile == other->gpu_profile && one->checkpoint == other->checkpoint &&
           one->checkpoint_s == other->checkpoint_s && one->fabric == other->fabric &&
           one->fabric_wait_s == other->fabric_wait_s && one->segment == other->segment &&
           one->nic_planes == other->nic_planes && strcmp(one->gang_name, other->gang_name) == 0;
}

/* The node's rule (prolog_epilog/jobs.py: _PERCENT), on the one variable that it looks at. */
static uint32_t read_on_node(char *const *lines, size_t count)
{
    static const char name[] = SLUICE_SPANK_ENV_PREFIX "gpu_share=";
    for (size_t i = 0; i < count; i++) {
        if (strncmp(lines[i], name, sizeof name - 1) != 0)
            continue;
        const char *value = lines[i] + sizeof name - 1;
        size_t length = strlen(value);
        require(length == strspn(value, "0123456789") && value[0] != '0');
        require(length == 1 || length == 2 || strcmp(value, "100") == 0);
        return (uint32_t)atoi(value);
    }
    return 0;
}

/* What was admitted, written as job_submit does, says the same to all who read it, and once more so. */
static void check_spelling(const struct sluice_options *admitted, char *const *lines, size_t count)
{
    char texts[16][SLUICE_OPTION_TEXT_MAX], again[SLUICE_OPTION_TEXT_MAX], why[SLUICE_OPTION_WHY_MAX];
    char *rewritten[16];
    struct sluice_options read;
    for (size_t i = 0; i < count; i++) {
        bool ours = strncmp(lines[i], SLUICE_SPANK_ENV_PREFIX, sizeof SLUICE_SPANK_ENV_PREFIX - 1) == 0;
        require(sluice_option_canonical(admitted, lines[i], texts[i], sizeof texts[i]) == ours);
        rewritten[i] = ours ? texts[i] : lines[i];
        if (ours) {
            require(sluice_option_canonical(admitted, texts[i], again, sizeof again));
            require(strcmp(texts[i], again) == 0);
        }
    }
    require(sluice_options_from_env(&read, rewritten, count, why, sizeof why));
    require(same(admitted, &read));
    require(read_on_node(rewritten, count) == admitted->gpu_share);
}

/* Each option with the input as its value, and its name in the spelling that the first byte chooses. */
static void check_each(const char *text)
{
    char entry[1200], why[SLUICE_OPTION_WHY_MAX], *lines[] = {entry};
    for (size_t i = 0; *text && sluice_option_name(i); i++) {
        struct sluice_options options;
        char name[32];
        snprintf(name, sizeof name, "%s", sluice_option_name(i));
        for (char *at = name; *at; at++)
            *at = *at == '-' && (text[0] & 1) ? '_' : *at;
        snprintf(entry, sizeof entry, "%s%s=%s", SLUICE_SPANK_ENV_PREFIX, name, text + 1);
        if (sluice_options_from_env(&options, lines, 1, why, sizeof why))
            check_spelling(&options, lines, 1);
        else
            require_printable(why);
    }
}

/* What is kept of a traceparent is one itself, and is kept as it is. */
static void check_trace(const char *text)
{
    char parent[SLUICE_TRACE_SIZE], again[SLUICE_TRACE_SIZE], own[SLUICE_TRACE_SIZE];
    if (!sluice_trace_parse(text, parent))
        return;
    require(strlen(parent) == SLUICE_TRACE_SIZE - 1 && sluice_trace_parse(parent, again) && !strcmp(parent, again));
    sluice_trace_of_job(parent, text, 1, own);
    require(sluice_trace_parse(own, again) && !strcmp(own, again));
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
    require(options.gpu_power_w <= SLUICE_GPU_POWER_MAX_W);
    require(options.segment <= SLUICE_SEGMENT_MAX);
    require(options.fabric_wait_s <= SLUICE_FABRIC_MOST_S || options.fabric_wait_s == SLUICE_FABRIC_NO_TIME);
    require(options.gang_count <= SLUICE_GANG_COUNT_MAX && strlen(options.gang_name) <= SLUICE_GANG_NAME_MAX);
    require((options.gang_count == 0) == (options.gang_name[0] == '\0'));

    check_each(text);
    check_trace(text);

    char *lines[16] = {NULL};
    size_t count = 0;
    for (char *at = text; *at && count < 16; count++) {
        lines[count] = at;
        at += strcspn(at, "\n");
        if (*at)
            *at++ = '\0';
    }
    if (sluice_options_from_env(&options, lines, count, why, sizeof why))
        check_spelling(&options, lines, count);
    else
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
