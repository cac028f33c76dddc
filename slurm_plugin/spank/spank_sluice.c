/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The options of Sluice in srun, sbatch and salloc. They are checked here as they are read, so that a mistake is told
 * before anything is submitted; slurmctld checks them again, as what a client sends is not to be trusted. On a node the
 * plugin does one thing: a task whose job asked for --gpu-mem does not start where Slurm has granted no shards, which
 * can only be when nobody turned the option into a request (job_submit/sluice is not loaded).
 */
#include <slurm/slurm.h>
#include <slurm/spank.h>

#include "options/options.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

SPANK_PLUGIN(sluice, 1)

/* A command parses its options, and a step has its job's, once in a process: SPANK passes its callbacks no other place.
 */
static struct sluice_options asked;

static const char *surrounding_job(void)
{
    const char *job = getenv("SLURM_JOB_ID");
    return job ? job : getenv("SLURM_JOBID");
}

/* srun inside an allocation starts a step; sbatch and salloc there make jobs of their own. */
static bool is_step_of_allocation(void)
{
    return spank_context() == S_CTX_LOCAL && surrounding_job();
}

static int take(int index, const char *value, int remote)
{
    const char *name = sluice_option_name((size_t)index);
    char why[SLUICE_OPTION_WHY_MAX];
    if (!name)
        return ESPANK_BAD_ARG;
    if (!remote && is_step_of_allocation()) {
        slurm_error(
            "sluice: --%s is an option of jobs, and this srun starts a step of job %s; give a step its part of the "
            "job's GPUs with --gres",
            name, surrounding_job());
        return ESPANK_BAD_ARG;
    }
    if (sluice_option_set(&asked, name, value, why, sizeof why))
        return ESPANK_SUCCESS;
    slurm_error("sluice: %s", why);
    return ESPANK_BAD_ARG;
}

/* In the order of sluice_option_name. */
static struct spank_option options[] = {
    {"gpu-mem", "SIZE", "memory of each GPU, shared with other jobs: 10G", 1, 0, take},
    {"gpu-share", "PERCENT", "share of each GPU's compute time", 1, 1, take},
    {"gpu-affinity", "WHAT", "GPUs near each other: link, numa or none", 1, 2, take},
    {"gpu-spread", NULL, "GPUs on as many nodes as allowed", 0, 3, take},
    {"gang", "NAME:COUNT", "start together with the COUNT jobs of that name", 1, 4, take},
};

/* What salloc left in the environment is about the job; a step must not carry it as its own. */
static void forget_options_of_job(void)
{
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) {
        char variable[64];
        snprintf(variable, sizeof variable, SLUICE_SPANK_ENV_PREFIX "%s", options[i].name);
        for (char *at = variable; *at; at++)
            *at = *at == '-' ? '_' : *at;
        unsetenv(variable);
    }
}

int slurm_spank_init(spank_t spank, int argument_count, char *arguments[])
{
    (void)argument_count;
    (void)arguments;
    spank_context_t context = spank_context();
    if (context != S_CTX_LOCAL && context != S_CTX_ALLOCATOR && context != S_CTX_REMOTE)
        return ESPANK_SUCCESS;
    if (is_step_of_allocation())
        forget_options_of_job();
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) {
        spank_err_t error = spank_option_register(spank, &options[i]);
        if (error != ESPANK_SUCCESS) {
            slurm_error("sluice: --%s: %s", options[i].name, spank_strerror(error));
            return -1;
        }
    }
    return ESPANK_SUCCESS;
}

int slurm_spank_task_init(spank_t spank, int argument_count, char *arguments[])
{
    (void)argument_count;
    (void)arguments;
    char shards[24];
    if (!spank_remote(spank) || !asked.gpu_mem_mib)
        return ESPANK_SUCCESS;
    if (spank_getenv(spank, "SLURM_SHARDS_ON_NODE", shards, sizeof shards) == ESPANK_SUCCESS)
        return ESPANK_SUCCESS;
    slurm_error("sluice: --gpu-mem=%" PRIu64
                "M was asked for, but Slurm granted no GPU memory: submissions are not checked "
                "by Sluice on this cluster; ask with --gres=shard:%" PRIu64 ", or tell your administrators",
                asked.gpu_mem_mib, asked.gpu_mem_mib);
    /* The plugin may be loaded as optional, whose failures are ignored. This process is the task before it becomes the
     * user's program. */
    _exit(1);
}
