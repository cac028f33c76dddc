/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * --gpu-role: as a job starts, its GPUs are given to its roles, and its nodes get the result (prolog_epilog/roles.py):
 * "prefill,decode n1=0-3/4-7 n2=/0-7". Nodes read nothing whose size is not that of the text.
 */
#include "hook/hook_internal.h"

#include "src/common/node_conf.h"
#include "src/common/xmalloc.h"

#include <stdarg.h>
#include <stdlib.h>

/* As the prolog gets it, with SPANK_ before it. */
#define ROLES "SLUICE_GPU_ROLES="

enum { MOST_TEXT = 32 * 1024 }; /* that a node agent reads (prolog_epilog/roles.py) */

/* What is past MOST_TEXT is left out, and `length` is then more than that. */
struct layout_text {
    char text[MOST_TEXT + 1];
    size_t length;
};

__attribute__((format(printf, 2, 3))) static void add(struct layout_text *to, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    if (to->length <= MOST_TEXT)
        to->length += (size_t)vsnprintf(to->text + to->length, sizeof to->text - to->length, format, arguments);
    va_end(arguments);
}

static void add_gpus(struct layout_text *to, uint32_t gpus)
{
    const char *before = "";
    for (int first = 0, end; first < SLUICE_MAX_GPUS; first = end + 1) {
        for (end = first; end < SLUICE_MAX_GPUS && (gpus >> end & 1); end++)
            continue;
        if (end == first)
            continue;
        add(to, "%s%d", before, first);
        if (end > first + 1)
            add(to, "-%d", end - 1);
        before = ",";
    }
}

/* A job's parts are in ascending order of node; several on one node are one here. */
static void write_layout(const struct sluice_decision_roles *roles, const struct sluice_part *parts,
                         uint32_t part_count, struct layout_text *to)
{
    for (uint32_t role = 0; role < roles->count; role++)
        add(to, "%s%s", role ? "," : "", roles->names[role]);
    for (uint32_t first = 0, end; first < part_count && to->length <= MOST_TEXT; first = end) {
        const node_record_t *node = node_record_table_ptr[parts[first].node];
        for (end = first + 1; end < part_count && parts[end].node == parts[first].node; end++)
            continue;
        add(to, " %s", node ? node->name : "");
        for (uint32_t role = 0; role < roles->count; role++) {
            uint32_t gpus = 0;
            for (uint32_t i = first; i < end; i++)
                gpus |= roles->gpus[i * roles->count + role];
            add(to, "%s", role ? "/" : "=");
            add_gpus(to, gpus);
        }
    }
}

void sluice_hook_forget_roles(job_record_t *job)
{
    sluice_job_tell_prologs(job, ROLES, NULL);
}

static bool tell_nodes(job_record_t *job, const struct sluice_decision_roles *roles, const struct sluice_part *parts,
                       uint32_t part_count)
{
    struct sluice_options options;
    struct layout_text *layout = xmalloc(sizeof *layout);
    write_layout(roles, parts, part_count, layout);
    bool told = layout->length <= MOST_TEXT;
    if (told) {
        sluice_job_tell_prologs(job, ROLES, layout->text);
        told = sluice_job_options(job, &options); /* its strings are no more than prologs can have */
    }
    xfree(layout);
    if (!told) {
        sluice_hook_forget_roles(job);
        error("select/sluice: %pJ starts without roles: there is no room for their layout next to the options of its "
              "SPANK plugins",
              job);
    }
    return told;
}

void sluice_hook_lay_out(job_record_t *job, const struct sluice_part *parts, uint32_t part_count,
                         struct sluice_hook_roles *roles)
{
    struct sluice_error_text text = {.text = ""};
    uint32_t wanted[SLUICE_MAX_ROLES];
    roles->said.count = 0;
    sluice_hook_forget_roles(job);
    if (!sluice_job_options(job, &roles->options) || !roles->options.gpu_role_count)
        return;
    const uint32_t count = roles->options.gpu_role_count;
    for (uint32_t role = 0; role < count; role++) {
        wanted[role] = roles->options.gpu_roles[role].gpus;
        roles->said.names[role] = roles->options.gpu_roles[role].name;
    }
    roles->gpus = calloc((size_t)part_count * count + 1, sizeof *roles->gpus);
    if (!roles->gpus || sluice_lay_out_roles(sluice_mirror_cluster(sluice_hook.mirror), parts, part_count, wanted,
                                             count, roles->gpus, &text)) {
        info("select/sluice: %pJ starts without roles: %s", job, roles->gpus ? text.text : "out of memory");
        return;
    }
    roles->said.count = count;
    roles->said.gpus = roles->gpus;
    if (!tell_nodes(job, &roles->said, parts, part_count))
        roles->said.count = 0;
}
