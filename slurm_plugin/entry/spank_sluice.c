/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The options of Sluice in srun, sbatch and salloc. They are checked here as they are read, so that a mistake is
 * reported before anything is submitted; slurmctld checks them again, as what a client sends is not trusted. On a node
 * a task whose job asked for --gpu-mem does not start if Slurm has granted no shards, which only happens if the option
 * did not become a request (job_submit/sluice is not loaded).
 *
 * plugstack.conf: optional spank_sluice.so [trace]
 *
 * With `trace`, a submission passes on the trace that it is made in, or begins one, and a task whose environment still
 * names the submission as its parent gets the job as its parent. A parent that was set later, e.g. by the user's own
 * tracer in the job, stays.
 */
#include "slurm_compat.h"

#include "rules/rules.h"

#include <slurm/spank.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

SPANK_PLUGIN(sluice, 1)

#define SUBMITTED_IN "SLUICE_" SLUICE_TRACE_VARIABLE

/* A command parses its options, and a step has its job's, once in a process: SPANK passes its callbacks no other
 * place. */
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

/* A profile is of steps; it is the only option that a step can have without its job. */
#define PROFILE "gpu-profile"
#define PROFILE_VARIABLE "SLUICE_GPU_PROFILE" /* for the task prolog: seconds, or 0 until the step ends */

/* A job counts the GPUs of its roles, and a step names one of them, whose GPUs its tasks get. */
#define ROLE "gpu-role"
#define ROLE_VARIABLE "SLUICE_STEP_ROLE" /* for the task prolog */
static char role_of_step[SLUICE_GPU_ROLE_NAME_MAX + 1];

static int take_role_of_step(const char *value, int remote)
{
    if (!value || !sluice_is_role_name(value)) {
        slurm_error("sluice: --" ROLE " of a step is the name of one of its job's roles, e.g. --" ROLE "=decode");
        return ESPANK_BAD_ARG;
    }
    /* srun parses the options of all components of a heterogeneous step in one process. */
    if (!remote && role_of_step[0] && strcmp(role_of_step, value) != 0) {
        slurm_error("sluice: --" ROLE "=%s and --" ROLE "=%s: a step has one role; start a step for each, as in "
                    "`srun --" ROLE "=%s ... & srun --" ROLE "=%s ... & wait`",
                    role_of_step, value, role_of_step, value);
        return ESPANK_BAD_ARG;
    }
    snprintf(role_of_step, sizeof role_of_step, "%s", value);
    return ESPANK_SUCCESS;
}

static int take(int index, const char *value, int remote)
{
    const char *name = sluice_option_name((size_t)index);
    char why[SLUICE_OPTION_WHY_MAX];
    if (!name)
        return ESPANK_BAD_ARG;
    if (strcmp(name, ROLE) == 0 && (remote ? !strchr(value ? value : "", ':') : is_step_of_allocation()))
        return take_role_of_step(value, remote);
    if (!remote && is_step_of_allocation() && strcmp(name, PROFILE) != 0) {
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
    {"gpu-power", "WATTS", "power that each GPU may draw: 300W", 1, 5, take},
    {PROFILE, "SECONDS", "profile what the job's GPUs do: sluice-profile(1)", 2, 6, take},
    {"checkpoint", "HOW", "how its state is saved: app, system, no or auto", 1, 7, take},
    {"checkpoint-interval", "TIME", "between two signals to save: 20m or daly", 1, 8, take},
    {"nics-per-gpu", "COUNT", "RDMA interfaces with each GPU", 1, 9, take},
    {"fabric", "WHERE", "all nodes in one block, below one rail's switches, spread over switches, or any", 1, 10, take},
#if !SLUICE_HAS_SEGMENT
    {"segment", "NODES", "each segment of so many nodes in one block", 1, 11, take},
#endif
    {ROLE, "ROLES", "GPUs by purpose: prefill:4,decode:4; of a step: decode", 1, 12, take},
    {"nic-planes", "WHERE", "RDMA interfaces in one plane of the network, spread over planes, or any", 1, 13, take},
};

/* Variables that count whole GPUs in a job's environment, and would make each srun in the job ask for GPUs that it does
 * not have. */
static const char *const gpu_counts[] = {
    "SLURM_GPUS",         "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_SOCKET", "SLURM_GPUS_PER_TASK",
    "SLURM_CPUS_PER_GPU", "SLURM_MEM_PER_GPU",   "SLURM_TRES_PER_TASK",   "SLURM_TRES_BIND",
};

/* Replaces them by the request that --gpu-mem became. In srun (`spank` NULL) in the command's own environment. */
static void rewrite_counts(spank_t spank, uint64_t mib)
{
    char value[128], request[64];
    bool by_task = false;
    for (size_t i = 0; i < sizeof gpu_counts / sizeof gpu_counts[0]; i++) {
        const char *name = gpu_counts[i], *found = spank ? NULL : getenv(name);
        if (spank && spank_getenv(spank, name, value, sizeof value) == ESPANK_SUCCESS)
            found = value;
        if (!found)
            continue;
        if (strncmp(name, "SLURM_TRES_", 11) == 0 && !strstr(found, "gpu"))
            continue;
        by_task |= strstr(name, "_PER_TASK") != NULL;
        if (spank)
            spank_unsetenv(spank, name);
        else
            unsetenv(name);
    }
    if (!by_task || !SLUICE_GRES_SLASH) /* before 23.11 a step's tasks cannot have parts of several GPUs */
        return;
    snprintf(request, sizeof request, "gres/shard:%" PRIu64, mib);
    if (spank)
        spank_setenv(spank, "SLURM_TRES_PER_TASK", request, 1);
    else
        setenv("SLURM_TRES_PER_TASK", request, 1);
}

/*
 * Inside a job its options are in the environment, as variables that Slurm's commands read as their own options. A step
 * does not ask for memory again, and a job submitted from a job asks for itself, as with all other options. Nor does it
 * inherit a count of shards, which slurmstepd leaves to a job with whole GPUs as it finds it.
 */
static void forget_options_of_job(void)
{
    char variable[96];
    const char *const inherited = "SLURM_SPANK_", *value;
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) {
        uint64_t mib;
        snprintf(variable, sizeof variable, "%s" SLUICE_SPANK_ENV_PREFIX "%s", inherited, options[i].name);
        for (char *at = variable; *at; at++)
            *at = *at == '-' ? '_' : *at;
        char *plain = variable + strlen(inherited);
        value = getenv(plain) ? getenv(plain) : getenv(variable);
        if (i == 0 && spank_context() == S_CTX_LOCAL && sluice_parse_mib(value, SLUICE_GPU_MEM_MAX_MIB, &mib))
            rewrite_counts(NULL, mib);
        unsetenv(plain);
        unsetenv(variable);
    }
    unsetenv("SLURM_SHARDS_ON_NODE");
}

static bool has_argument(const char *name, int count, char *arguments[])
{
    for (int i = 0; i < count; i++)
        if (strcmp(arguments[i], name) == 0)
            return true;
    return false;
}

/* When this command had read its options, which only it knows. */
static void pass_time(spank_t spank)
{
    char now_us[32];
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    snprintf(now_us, sizeof now_us, "%010" PRId64 "%06ld", (int64_t)now.tv_sec, now.tv_nsec / 1000);
    spank_job_control_setenv(spank, SLUICE_TRACE_BEGAN, now_us, 1);
}

/* The trace of the submitting environment, or a new one, goes to slurmctld and into the job's environment. */
static void trace_submission(spank_t spank)
{
    char parent[SLUICE_TRACE_SIZE];
    unsigned char random[SLUICE_TRACE_RANDOM];
    if (!sluice_trace_parse(getenv(SLUICE_TRACE_VARIABLE), parent)) {
        if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
            return;
        sluice_trace_begin(random, parent);
        setenv(SLUICE_TRACE_VARIABLE, parent, 1);
    }
    setenv(SUBMITTED_IN, parent, 1);
    spank_err_t error = spank_job_control_setenv(spank, SLUICE_TRACE_VARIABLE, parent, 1);
    if (error == ESPANK_SUCCESS)
        pass_time(spank);
    else
        slurm_verbose("sluice: the job is not traced: %s", spank_strerror(error));
}

static void trace_task(spank_t spank)
{
    char found[SLUICE_TRACE_SIZE + 64], submitted[SLUICE_TRACE_SIZE], parent[SLUICE_TRACE_SIZE], own[SLUICE_TRACE_SIZE];
    char cluster[64];
    uint32_t job;
    if (spank_getenv(spank, SLUICE_TRACE_VARIABLE, found, sizeof found) == ESPANK_SUCCESS &&
        spank_getenv(spank, SUBMITTED_IN, submitted, sizeof submitted) == ESPANK_SUCCESS &&
        spank_getenv(spank, "SLURM_CLUSTER_NAME", cluster, sizeof cluster) == ESPANK_SUCCESS &&
        spank_get_item(spank, S_JOB_ID, &job) == ESPANK_SUCCESS && sluice_trace_parse(found, parent) &&
        strcmp(parent, submitted) == 0) {
        sluice_trace_of_job(parent, cluster, job, own);
        spank_setenv(spank, SLUICE_TRACE_VARIABLE, own, 1);
    }
}

/* The steps of a batch script have its environment, and so its profile; a job that is submitted there has not. */
static void profile_tasks(spank_t spank)
{
    char seconds[16];
    if (spank_context() == S_CTX_ALLOCATOR || (spank_context() == S_CTX_LOCAL && !is_step_of_allocation()))
        unsetenv(PROFILE_VARIABLE);
    if (spank_context() != S_CTX_REMOTE || !asked.gpu_profile)
        return;
    snprintf(seconds, sizeof seconds, "%" PRIu32, asked.gpu_profile == SLUICE_PROFILE_WHOLE ? 0 : asked.gpu_profile);
    spank_setenv(spank, PROFILE_VARIABLE, seconds, 1);
}

/* The role that its srun named, and not one of a task that this srun is started by. */
static void choose_role(spank_t spank)
{
    if (spank_context() != S_CTX_REMOTE)
        return;
    if (role_of_step[0])
        spank_setenv(spank, ROLE_VARIABLE, role_of_step, 1);
    else
        spank_unsetenv(spank, ROLE_VARIABLE);
}

int slurm_spank_init(spank_t spank, int argument_count, char *arguments[])
{
    (void)argument_count;
    (void)arguments;
    spank_context_t context = spank_context();
    if (context != S_CTX_LOCAL && context != S_CTX_ALLOCATOR && context != S_CTX_REMOTE)
        return ESPANK_SUCCESS;
    if (context != S_CTX_REMOTE && surrounding_job())
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

/* srun forgets what was set before it has read its options. */
int slurm_spank_init_post_opt(spank_t spank, int argument_count, char *arguments[])
{
    spank_context_t context = spank_context();
    if ((context == S_CTX_LOCAL || context == S_CTX_ALLOCATOR) && !is_step_of_allocation() &&
        has_argument("trace", argument_count, arguments))
        trace_submission(spank);
    profile_tasks(spank);
    choose_role(spank);
    return ESPANK_SUCCESS;
}

int slurm_spank_task_init(spank_t spank, int argument_count, char *arguments[])
{
    char shards[24];
    if (!spank_remote(spank))
        return ESPANK_SUCCESS;
    if (has_argument("trace", argument_count, arguments))
        trace_task(spank);
    if (!asked.gpu_mem_mib)
        return ESPANK_SUCCESS;
    if (spank_getenv(spank, "SLURM_SHARDS_ON_NODE", shards, sizeof shards) == ESPANK_SUCCESS) {
        rewrite_counts(spank, asked.gpu_mem_mib);
        return ESPANK_SUCCESS;
    }
    slurm_error("sluice: --gpu-mem=%" PRIu64
                "M was asked for, but Slurm granted no GPU memory: submissions are not checked "
                "by Sluice on this cluster; ask with --gres=shard:%" PRIu64 ", or contact your administrators",
                asked.gpu_mem_mib, asked.gpu_mem_mib);
    /* The plugin may be loaded as optional, whose failures are ignored. This process is the task before it becomes the
     * user's program. */
    _exit(1);
}
