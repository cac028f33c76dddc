/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Times job_submit/sluice on a corpus of job descriptions: submit_hook CALLS TENANTS. Each is submitted twice, in turns
 * first and last: traced, and without what spank_sluice passes for it. Prints one line for each: nanoseconds of the
 * traced call, whether it was refused (1) or not (0), nanoseconds of the other call, and of what the trace adds alone (0
 * where refused). Each description is made afresh, outside the time.
 */
#include "../slurm_plugin/tests/job_submit_harness.h"

enum { OTHERS = 5, TRACED = 2 }; /* variables of SPANK */

struct shape {
    const char *per_job, *per_node, *per_task, *features, *option;
    uint32_t nodes, tasks, minutes, deadline_minutes;
};

/* What users send, and what is refused in each of the ways. */
static const struct shape shapes[] = {
    {NULL, NULL, NULL, NULL, NULL, 1, 1, 60},
    {NULL, "gres:gpu:1", NULL, NULL, NULL, 1, 1, NO_VAL},
    {NULL, "gres:gpu:type3:2", NULL, NULL, NULL, 4, 8, 30},
    {"gres:gpu:2", NULL, NULL, "ib&nvlink8", NULL, NO_VAL, NO_VAL, NO_VAL},
    {"gres:gpu:type1:2,gres:gpu:type2:2", NULL, NULL, NULL, NULL, NO_VAL, 4, 10},
    {NULL, NULL, NULL, NULL, "_SLURM_SPANK_OPTION_sluice_gpu_mem=10G", NO_VAL, NO_VAL, NO_VAL},
    {"gres:gpu:1", NULL, NULL, "ib", "_SLURM_SPANK_OPTION_sluice_gpu_mem=1.5G", 1, 1, 20},
    {NULL, "gres:gpu:type2:1,gres:nic:1", NULL, "ib", "_SLURM_SPANK_OPTION_sluice_gpu_mem=4G", 1, 1, 20},
    {NULL, "gres:shard:20480", NULL, "type5", NULL, 2, 2, 600},
    {NULL, NULL, "gres:gpu:1", NULL, "_SLURM_SPANK_OPTION_sluice_gpu_mem=10G", 1, 8, 20},
    {NULL, "gres:gpu:64", NULL, NULL, NULL, 64, 64, 100000},
    {NULL, "gres:gpu:1,gres:shard:5", NULL, NULL, NULL, 1, 1, 20},
    {NULL, "foogres:gpu:+9999999999999999999999", NULL, NULL, NULL, 1, 1, 20},
    {NULL, NULL, NULL, NULL, "_SLURM_SPANK_OPTION_sluice_gpu_mem=9999T", NO_VAL, NO_VAL, NO_VAL},
    {NULL, "gres:gpu:1", NULL, NULL, "_SLURM_SPANK_OPTION_sluice_gang=train:8", 1, 1, 60},
    {NULL, "gres:gpu:4", NULL, NULL, NULL, 1, 1, 60, 120},
    {NULL, "gres:gpu:type2:8", NULL, NULL, NULL, 64, 64, 60, 61},
    {NULL, "gres:gpu:8", NULL, NULL, NULL, 64, 64, 60, 59},
};

/* 1,024 nodes of eight GPUs, most of them taken for some hours: what deadlines are looked up in. */
static void publish_outlook(void)
{
    enum { NODES = 1024, SPANS = 12 * NODES };
    static struct sluice_outlook_node nodes[NODES];
    static struct sluice_outlook_span spans[SPANS];
    static uint64_t all[NODES / 64];
    const struct sluice_outlook_partition partition = {"main", all, true};
    int64_t now = time(NULL);
    memset(all, 0xff, sizeof all);
    for (uint32_t i = 0; i < NODES; i++)
        nodes[i] = (struct sluice_outlook_node){0xff, "type2"};
    for (uint32_t i = 0; i < SPANS; i++)
        spans[i] = (struct sluice_outlook_span){i % NODES, 1U << (i * 7 + i / NODES) % 8, 0, now + 600 + i % 20011};
    struct sluice_outlook_parts parts = {now, nodes, NODES, spans, SPANS, &partition, 1};
    sluice_outlook_publish(sluice_outlook_new(&parts), INT64_MAX);
}

void sluice_job_facts(const struct job_record *record, struct sluice_job_facts *facts)
{
    (void)record;
    memset(facts, 0, sizeof *facts);
}

static char *copy(const char *text)
{
    return text ? strdup(text) : NULL;
}

/* What spank_sluice passes, after the others. */
static const char *const passed_on[TRACED] = {SLUICE_TRACE_VARIABLE
                                              "=00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
                                              SLUICE_TRACE_BEGAN "=1760000000123456"};

static void make(job_desc_msg_t *job, const struct shape *shape, unsigned long tenant, bool traced)
{
    char account[32];
    memset(job, 0, sizeof *job);
    snprintf(account, sizeof account, "tenant%lu", tenant);
    job->account = strdup(account);
    job->tres_per_job = copy(shape->per_job);
    job->tres_per_node = copy(shape->per_node);
    job->tres_per_task = copy(shape->per_task);
    job->features = copy(shape->features);
    job->min_nodes = job->max_nodes = shape->nodes;
    job->num_tasks = shape->tasks;
    job->time_limit = shape->minutes;
    job->deadline = shape->deadline_minutes ? time(NULL) + shape->deadline_minutes * 60 : 0;
    job->time_min = job->min_cpus = job->het_job_offset = NO_VAL;
    job->ntasks_per_node = job->ntasks_per_tres = job->sockets_per_node = job->cpus_per_task = NO_VAL16;
    job->pn_min_cpus = job->shared = NO_VAL16;
    job->pn_min_memory = NO_VAL64;
    job->spank_job_env_size = traced ? OTHERS + TRACED : OTHERS;
    job->spank_job_env = calloc(job->spank_job_env_size, sizeof(char *));
    for (uint32_t i = 0; i < job->spank_job_env_size; i++)
        job->spank_job_env[i] = copy(i == 3 && shape->option ? shape->option
                                     : i < OTHERS            ? "_SLURM_SPANK_OPTION_other_plugin=value"
                                                             : passed_on[i - OTHERS]);
}

static void discard(job_desc_msg_t *job)
{
    char *texts[] = {job->account,       job->tres_per_job,  job->tres_per_node, job->tres_per_socket,
                     job->tres_per_task, job->cpus_per_tres, job->mem_per_tres,  job->features,
                     job->partition,     job->qos,           job->admin_comment};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        free(texts[i]);
    for (uint32_t i = 0; i < job->spank_job_env_size; i++)
        free(job->spank_job_env[i]);
    free(job->spank_job_env);
}

static char *make_policy(unsigned long tenants)
{
    size_t size = 4096 + tenants * 400, length = 0;
    char *text = malloc(size);
    require(text != NULL);
    length += (size_t)snprintf(text, size, "[global]\ncpus-per-gpu-milli = 4000\nmemory-mib-per-gpu = 8192\n");
    for (int i = 0; i < 8; i++)
        length += (size_t)snprintf(text + length, size - length,
                                   "[class class%d]\ngpu-types = type%d,other%d\ngpu-memory-mib = 81920\n", i, i, i);
    for (unsigned long i = 0; i < tenants; i++)
        length += (size_t)snprintf(
            text + length, size - length,
            "[tenant tenant%lu]\ngpus-per-job = 64\nrun-time-s = 86400\nclasses = class1,class2,class3,class5\n"
            "class.class1.gpus-per-job = 4\nclass.class2.run-time-s = 3600\npartitions = gpu,fast\nqos = silver\n"
            "gpu-memory-mib-per-gpu = 81920\nsubmissions-per-minute = 1000000\n",
            i);
    return text;
}

/* Nanoseconds that a submission takes, and if `alone` is not NULL it is traced: those of keeping its trace, once more. */
static int submit(const struct shape *shape, unsigned long tenant, uint64_t *took, uint64_t *alone)
{
    job_desc_msg_t job;
    char *message = NULL;
    make(&job, shape, tenant, alone);
    uint64_t began = sluice_now_ns();
    int code = job_submit(&job, 1000, &message);
    *took = sluice_now_ns() - began;
    require(!!job.admin_comment == (alone && code == SLURM_SUCCESS));
    if (job.admin_comment) {
        free(job.admin_comment);
        job.admin_comment = NULL;
        began = sluice_now_ns();
        sluice_keep_trace(&job, 1000);
        *alone = sluice_now_ns() - began;
        require(job.admin_comment);
    }
    free(message);
    discard(&job);
    return code;
}

int main(int count, char **words)
{
    unsigned long calls = count == 3 ? strtoul(words[1], NULL, 10) : 0,
                  tenants = calls ? strtoul(words[2], NULL, 10) : 0;
    if (!calls || !tenants || freopen("/dev/null", "w", stderr) == NULL)
        return 2;
    char *policy = make_policy(tenants);
    start_plugin(policy);
    publish_outlook();
    free(policy);
    for (unsigned long i = 0; i < calls; i++) {
        const struct shape *shape = &shapes[i % (sizeof shapes / sizeof shapes[0])];
        unsigned long tenant = i * 2654435761u % tenants;
        uint64_t with = 0, without = 0, alone = 0;
        int code = 0;
        for (unsigned long turn = 0; turn < 2; turn++)
            if ((i / (sizeof shapes / sizeof shapes[0]) + turn) % 2)
                code = submit(shape, tenant, &with, &alone);
            else
                submit(shape, tenant, &without, NULL);
        printf("%llu %d %llu %llu\n", (unsigned long long)with, code != SLURM_SUCCESS, (unsigned long long)without,
               (unsigned long long)alone);
    }
    return 0;
}
