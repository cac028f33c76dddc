/* SPDX-License-Identifier: GPL-2.0-or-later */
#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

#include "entry/prep_shares.h"

#include "src/common/env.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_GPUS = 1024, ENTRY = 48 };

/* What the job has on its node number `node`, of each GPU by its place there. */
struct split {
    uint32_t node;
    uint64_t shares[MOST_GPUS];
};

/* What the job has of a GPU by its place on the node; Slurm 22.05 says how much in all, which is of one GPU there. */
static uint64_t shares_of(const gres_job_state_t *job, uint32_t node, int64_t gpu)
{
#ifdef SLUICE_SHARES_BY_GPU
    if (job->gres_per_bit_alloc && job->gres_per_bit_alloc[node])
        return job->gres_per_bit_alloc[node][gpu];
#else
    (void)gpu;
#endif
    bool alone = bit_set_count(job->gres_bit_alloc[node]) == 1;
    return alone && job->gres_cnt_node_alloc ? job->gres_cnt_node_alloc[node] : 0;
}

/* A job has an entry for each type of its nodes' shards, and one for those without. */
static int add_shares(void *item, void *argument)
{
    const gres_state_t *gres = item;
    const gres_job_state_t *job = gres->gres_data;
    struct split *split = argument;
    if (!gres->gres_name || strcmp(gres->gres_name, "shard") != 0 || split->node >= job->node_cnt ||
        !job->gres_bit_alloc || !job->gres_bit_alloc[split->node])
        return 0;
    bitstr_t *gpus = job->gres_bit_alloc[split->node];
    for (int64_t gpu = 0; gpu < bit_size(gpus) && gpu < MOST_GPUS; gpu++)
        if (bit_test(gpus, gpu))
            split->shares[gpu] += shares_of(job, split->node, gpu);
    return 0;
}

static char *describe(const struct split *split)
{
    char *text = calloc(MOST_GPUS + 1, ENTRY), *end = text;
    for (int64_t gpu = 0; text && gpu < MOST_GPUS; gpu++)
        if (split->shares[gpu])
            end += snprintf(end, ENTRY, "%s%" PRId64 ":%" PRIu64, end == text ? "" : ",", gpu, split->shares[gpu]);
    return text;
}

/* This node's place among the job's. */
static int place_of(const char *nodes)
{
    slurmd_conf_t **slurmd_conf = dlsym(RTLD_DEFAULT, "conf"); /* slurmd's; there is none in slurmctld */
    hostlist_t SLUICE_HOSTLIST_POINTER list =
        slurmd_conf && *slurmd_conf && nodes ? slurm_hostlist_create(nodes) : NULL;
    if (!list)
        return -1;
    int place = slurm_hostlist_find(list, (*slurmd_conf)->node_name);
    slurm_hostlist_destroy(list);
    return place;
}

void sluice_prep_export_shares(job_env_t *environment, slurm_cred_t *credential)
{
    struct split split = {0};
    char *text = NULL;
    slurm_cred_arg_t *said = credential ? slurm_cred_get_args(credential) : NULL;
    if (!said)
        return;
    int node = place_of(said->job_hostlist);
    if (node >= 0 && said->job_gres_list) {
        split.node = (uint32_t)node;
        list_for_each(said->job_gres_list, add_shares, &split);
        text = describe(&split);
    }
    slurm_cred_unlock_args(credential);
    if (text && text[0])
        env_array_append(&environment->gres_job_env, "SLUICE_GPU_SHARDS", text);
    free(text);
}
