/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * job_submit/sluice, whole, on job descriptions of any content, in the tenants of a policy: never a crash, a refusal
 * says why in printable words, and what is admitted is a fixed point: submitted again as it then is, it is admitted and
 * stays as it is. Then the same description as a modification of that job.
 */
#include "../tests/job_submit_harness.h"

static const char policy[] = "[global]\ncpus-per-gpu-milli = 4000\nmemory-mib-per-gpu = 8192\n"
                             "[class big]\ngpu-types = h100,h200\n[class small]\ngpu-types = l4\n"
                             "[tenant memory]\ngpu-memory-mib-per-gpu = 20480\ngpu-memory-mib-per-job = 40960\n"
                             "[tenant few]\ngpus-per-job = 4\nrun-time-s = 7200\n"
                             "[tenant big]\nclasses = big\nclass.big.gpus-per-job = 4\nclass.big.run-time-s = 3600\n"
                             "[tenant small]\nclasses = small\nfeatures = ib\npartitions = gpu,fast\nqos = silver\n"
                             "[tenant strict]\ngang = no\ndeadline = no\n";

static job_desc_msg_t job; /* as submitted, and what the "record" of it says */

void sluice_job_facts(const struct job_record *record, struct sluice_job_facts *facts)
{
    (void)record;
    *facts = (struct sluice_job_facts){
        .account = job.account,
        .partition = job.partition,
        .features = job.features,
        .tres_per_job = job.tres_per_job,
        .tres_per_node = job.tres_per_node,
        .tres_per_socket = job.tres_per_socket,
        .tres_per_task = job.tres_per_task,
        .spank_env = job.spank_job_env,
        .spank_env_count = job.spank_job_env_size,
        .min_nodes = given32(job.min_nodes),
        .max_nodes = given32(job.max_nodes),
        .tasks = given32(job.num_tasks),
        .time_limit = given_minutes(job.time_limit),
        .pending = true,
    };
}

struct input {
    const uint8_t *data;
    size_t size;
};

static uint64_t take(struct input *input, size_t bytes)
{
    uint64_t value = 0;
    bytes = bytes < input->size ? bytes : input->size;
    memcpy(&value, input->data, bytes);
    input->data += bytes;
    input->size -= bytes;
    return value;
}

/* NULL mostly, a usual word often, else any bytes. */
static char *word(struct input *input, const char *const *usual, size_t count)
{
    uint64_t kind = take(input, 1);
    if (kind < 100)
        return NULL;
    if (kind < 230)
        return strdup(usual[kind % count]);
    size_t length = take(input, kind < 250 ? 1 : 2);
    length = length < input->size ? length : input->size;
    char *text = malloc(length + 1);
    memcpy(text, input->data, length);
    text[length] = '\0';
    input->data += length;
    input->size -= length;
    return text;
}

static uint32_t number(struct input *input, uint32_t unset)
{
    uint64_t kind = take(input, 1);
    return kind < 120 ? unset : kind < 240 ? (uint32_t)(kind - 120) / 8 : (uint32_t)take(input, 4);
}

#define USUAL(...) (const char *const[]){__VA_ARGS__}, sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *)

static char *gres(struct input *input)
{
    return word(input, USUAL("gres:gpu:1", "gres:gpu:2", "gres:gpu:h100:2", "gres:gpu:h100:1,gres:gpu:h200:4",
                             "gres:gpu:l4", "gres:shard:10240", "gres:shard:4096,gres:nic:1", "gres:mps:50",
                             "license:a:1", "gres:none", "gres:gpu:h200:1,gres:nic:2", "gres:gpu:64", ""));
}

static void make(struct input *input, job_desc_msg_t *made)
{
    memset(made, 0, sizeof *made);
    made->user_id = (uint32_t)take(input, 1);
    made->account = word(input, USUAL("memory", "few", "big", "small", "strict", "other", "BIG"));
    made->tres_per_job = gres(input);
    made->tres_per_node = gres(input);
    made->tres_per_socket = gres(input);
    made->tres_per_task = gres(input);
    made->cpus_per_tres = word(input, USUAL("gres:gpu:4"));
    made->mem_per_tres = word(input, USUAL("gres:gpu:4096"));
    made->features =
        word(input, USUAL("ib", "h100", "l4&ib", "h100|l4", "[a*2&b*3]", "h100|h200", "ib&(h100|h200)", ""));
    made->partition = word(input, USUAL("gpu", "fast,gpu", "slow", ",", ""));
    made->submit_line = word(input, USUAL("srun x", "/usr/bin/sbatch", "salloc"));
    made->min_nodes = number(input, NO_VAL);
    made->max_nodes = number(input, NO_VAL);
    made->num_tasks = number(input, NO_VAL);
    made->ntasks_per_node = (uint16_t)number(input, NO_VAL16);
    made->ntasks_per_tres = (uint16_t)number(input, NO_VAL16);
    made->sockets_per_node = (uint16_t)number(input, NO_VAL16);
    made->cpus_per_task = (uint16_t)number(input, NO_VAL16);
    made->min_cpus = number(input, NO_VAL);
    made->pn_min_cpus = (uint16_t)number(input, NO_VAL16);
    made->pn_min_memory = take(input, 1) & 1 ? NO_VAL64 : 1024;
    made->time_limit = number(input, NO_VAL);
    made->time_min = number(input, NO_VAL);
    made->shared = (uint16_t)number(input, NO_VAL16);
    made->het_job_offset = number(input, NO_VAL);
    made->deadline = take(input, 1) & 1 ? 0 : (time_t)take(input, 8);
    made->begin_time = take(input, 1) & 1 ? 0 : (time_t)take(input, 8);
    size_t count = take(input, 1) % 4;
    made->spank_job_env = calloc(count + 1, sizeof(char *));
    for (size_t i = 0; i < count; i++)
        made->spank_job_env[i] =
            word(input, USUAL("_SLURM_SPANK_OPTION_sluice_gpu_mem=10G", "_SLURM_SPANK_OPTION_sluice_gpu_mem=1T",
                              "_SLURM_SPANK_OPTION_sluice_gang=a:4", "_SLURM_SPANK_OPTION_sluice_gpu_spread=(null)",
                              "_SLURM_SPANK_OPTION_sluice_gpu_affinity=link", "_SLURM_SPANK_OPTION_other_x=1"));
    made->spank_job_env_size = (uint32_t)count;
}

static char **texts_of(job_desc_msg_t *made, size_t i)
{
    char **const texts[] = {&made->account,       &made->tres_per_job,  &made->tres_per_node, &made->tres_per_socket,
                            &made->tres_per_task, &made->cpus_per_tres, &made->mem_per_tres,  &made->features,
                            &made->partition,     &made->qos,           &made->submit_line,   &made->tres_bind};
    return i < sizeof texts / sizeof texts[0] ? texts[i] : NULL;
}

static void forget_options(job_desc_msg_t *made)
{
    for (uint32_t i = 0; i < made->spank_job_env_size; i++)
        free(made->spank_job_env[i]);
    free(made->spank_job_env);
    made->spank_job_env = NULL;
    made->spank_job_env_size = 0;
}

static void discard(job_desc_msg_t *made)
{
    for (size_t i = 0; texts_of(made, i); i++)
        free(*texts_of(made, i));
    forget_options(made);
}

static void require_reason(int code, char **message)
{
    require(code == SLURM_SUCCESS || (*message && **message));
    for (const char *at = *message; at && *at; at++)
        require(*at >= ' ' && *at <= '~');
    free(*message);
    *message = NULL;
}

static void require_fixed_point(void)
{
    job_desc_msg_t before = job;
    char *message = NULL;
    for (size_t i = 0; texts_of(&before, i); i++)
        *texts_of(&before, i) = *texts_of(&job, i) ? strdup(*texts_of(&job, i)) : NULL;
    require(job_submit(&job, job.user_id, &message) == SLURM_SUCCESS || (job.deadline && message));
    free(message);
    for (size_t i = 0; texts_of(&before, i); i++) {
        const char *was = *texts_of(&before, i), *is = *texts_of(&job, i);
        require((!was || !*was) == (!is || !*is) && (!was || !is || strcmp(was, is) == 0));
        free(*texts_of(&before, i));
    }
    require(job.min_nodes == before.min_nodes && job.max_nodes == before.max_nodes);
    require(job.time_limit == before.time_limit && job.pn_min_cpus == before.pn_min_cpus);
}

/* A node of eight GPUs, half of them taken for a day, for those who give a deadline. */
static void publish_outlook(void)
{
    static const uint64_t all = 1;
    const struct sluice_outlook_node node = {0xff, "h100"};
    const struct sluice_outlook_partition partition = {"gpu", &all, true};
    int64_t now = time(NULL);
    struct sluice_outlook_span span = {0, 0xf, 0, now + 86400};
    struct sluice_outlook_parts parts = {now, &node, 1, &span, 1, &partition, 1};
    sluice_outlook_publish(sluice_outlook_new(&parts), INT64_MAX);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static bool started;
    struct input input = {data, size};
    char *message = NULL;
    if (!started) {
        start_plugin(policy);
        publish_outlook();
    }
    started = true;
    make(&input, &job);
    int code = job_submit(&job, job.user_id, &message);
    require_reason(code, &message);
    if (code == SLURM_SUCCESS) {
        job_desc_msg_t change;
        forget_options(&job);
        require_fixed_point();
        make(&input, &change);
#if SLUICE_JOB_MODIFY_TELLS
        code = job_modify(&change, NULL, change.user_id, &message);
        require_reason(code, &message);
#else
        (void)job_modify(&change, NULL, change.user_id);
#endif
        discard(&change);
    }
    discard(&job);
    return 0;
}
