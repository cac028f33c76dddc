/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "mirror/cores.h"

#include "src/common/bitstring.h"
#include "src/common/node_conf.h"

#include <stdlib.h>
#include <string.h>

struct of_node {
    uint32_t count;
    uint32_t jobs[]; /* by core; 0: no job's */
};

struct sluice_cores {
    uint32_t nodes;
    struct of_node *of[]; /* NULL: no job has been there */
};

struct sluice_cores *sluice_cores_new(uint32_t nodes)
{
    struct sluice_cores *cores = calloc(1, sizeof(*cores) + nodes * sizeof(cores->of[0]));
    if (cores)
        cores->nodes = nodes;
    return cores;
}

void sluice_cores_free(struct sluice_cores *cores)
{
    for (uint32_t n = 0; cores && n < cores->nodes; n++)
        free(cores->of[n]);
    free(cores);
}

bool sluice_cores_oversubscribed(const job_record_t *job)
{
    return job->job_resrcs && job->job_resrcs->node_req == NODE_CR_AVAILABLE;
}

void sluice_cores_clear(struct sluice_cores *cores, bitstr_t *nodes)
{
    for (uint32_t n = 0; n < cores->nodes; n++)
        if (cores->of[n] && (!nodes || (n < (uint32_t)bit_size(nodes) && bit_test(nodes, n))))
            memset(cores->of[n]->jobs, 0, cores->of[n]->count * sizeof(cores->of[n]->jobs[0]));
}

static struct of_node *of_node(struct sluice_cores *cores, uint32_t node, uint32_t count)
{
    struct of_node **of = &cores->of[node];
    if (!*of && (*of = calloc(1, sizeof(**of) + count * sizeof((*of)->jobs[0]))))
        (*of)->count = count;
    return *of;
}

void sluice_cores_claim(struct sluice_cores *cores, const job_record_t *job, bitstr_t *nodes)
{
    const job_resources_t *resources = job->job_resrcs;
    uint32_t begin = 0, number = 0, size = resources->core_bitmap ? (uint32_t)bit_size(resources->core_bitmap) : 0;
    for (bitoff_t n = bit_ffs(resources->node_bitmap), last = bit_fls(resources->node_bitmap); n >= 0 && n <= last;
         n++) {
        const node_record_t *node = (uint32_t)n < cores->nodes ? node_record_table_ptr[n] : NULL;
        if (!bit_test(resources->node_bitmap, n))
            continue;
        uint32_t first = begin, given = number++;
        if (!node)
            continue;
        begin += node->tot_cores;
        if ((nodes && !bit_test(nodes, n)) || (resources->cpus && !resources->cpus[given]))
            continue;
        struct of_node *of = of_node(cores, (uint32_t)n, node->tot_cores);
        for (uint32_t c = 0; of && c < of->count; c++)
            if (!of->jobs[c] &&
                (resources->whole_node == 1 || (first + c < size && bit_test(resources->core_bitmap, first + c))))
                of->jobs[c] = job->job_id;
    }
}

int64_t sluice_cores_of(const struct sluice_cores *cores, uint32_t node, uint32_t job_id)
{
    const struct of_node *of = node < cores->nodes ? cores->of[node] : NULL;
    int64_t count = 0;
    for (uint32_t c = 0; of && c < of->count; c++)
        count += of->jobs[c] == job_id;
    return count;
}
