/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * job_submit/sluice, whole, on job descriptions of any content, in the tenants of a policy: never a crash, a refusal
 * says why in printable words, and what is admitted is a fixed point: submitted again as it then is, it is admitted and
 * stays as it is. Then the same description as a modification of that job: as slurmctld leaves the job after one that
 * is admitted, the job could have been submitted, too, and stays as it is.
 */
#include "tests/job_submit_harness.h"

#include "admission/wording.h"

static const char policy[] = "[global]\ncpus-per-gpu-milli = 4000\nmemory-mib-per-gpu = 8192\n"
                             "[class big]\ngpu-types = h100,h200\n[class small]\ngpu-types = l4\n"
                             "[tenant memory]\ngpu-memory-mib-per-gpu = 20480\ngpu-memory-mib-per-job = 40960\n"
                             "[tenant few]\ngpus-per-job = 4\nrun-time-s = 7200\n"
                             "[tenant big]\nclasses = big\nclass.big.gpus-per-job = 4\nclass.big.run-time-s = 3600\n"
                             "[tenant both]\nclasses = big,small\nfeatures = ib\nclass.small.gpus-per-job = 2\n"
                             "[tenant small]\nclasses = small\nfeatures = ib\npartitions = gpu,fast\nqos = silver\n"
                             "[tenant strict]\ngang = no\ndeadline = no\n";

static job_desc_msg_t job; /* as submitted, and what the "record" of it says */

void sluice_job_facts(const struct job_record *record, struct sluice_job_facts *facts)
{
    (void)record;
    *facts = (struct sluice_job_facts){
        .account = job.account,
        .user_id = job.user_id,
        .partition = job.partition,
        .features = job.features,
        .prefer = job.prefer,
        .qos = job.qos,
        .required_nodes = job.req_nodes,
        .cpus_per_tres = job.cpus_per_tres,
        .mem_per_tres = job.mem_per_tres,
        .tres_per_job = job.tres_per_job,
        .tres_per_node = job.tres_per_node,
        .tres_per_socket = job.tres_per_socket,
        .tres_per_task = job.tres_per_task,
        .spank_env = job.spank_job_env,
        .spank_env_count = job.spank_job_env_size,
        .min_nodes = given32(job.min_nodes),
        .max_nodes = given32(job.max_nodes),
        .tasks = given32(job.num_tasks),
        .tasks_per_node = given16(job.ntasks_per_node),
        .tasks_per_gpu = given16(job.ntasks_per_tres),
        .sockets_per_node = given16(job.sockets_per_node),
        .cpus_per_task = given16(job.cpus_per_task),
        .min_cpus = given32(job.min_cpus),
        .min_cpus_per_node = given16(job.pn_min_cpus),
        .time_limit = given_minutes(job.time_limit),
        .time_min = given_minutes(job.time_min),
        .deadline = given_time(job.deadline),
        .begin = given_time(job.begin_time),
        .memory_asked = job.pn_min_memory != NO_VAL64,
        .whole_nodes = job.shared == 0,
        .heterogeneous = job.het_job_offset != NO_VAL,
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
    made->account = word(input, USUAL("memory", "few", "big", "small", "both", "strict", "other", "BIG"));
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
        made->spank_job_env[i] = word(
            input, USUAL("_SLURM_SPANK_OPTION_sluice_gpu_mem=10G", "_SLURM_SPANK_OPTION_sluice_gpu_mem=1T",
                         "_SLURM_SPANK_OPTION_sluice_gang=a:4", "_SLURM_SPANK_OPTION_sluice_gpu_spread=(null)",
                         "_SLURM_SPANK_OPTION_sluice_gpu_affinity=link", "_SLURM_SPANK_OPTION_sluice_checkpoint=app",
                         "_SLURM_SPANK_OPTION_sluice_checkpoint=system", "SLUICE_SAVE_KEY=1",
                         "_SLURM_SPANK_OPTION_sluice_checkpoint_interval=20m", "_SLURM_SPANK_OPTION_other_x=1",
                         SLUICE_TRACE_VARIABLE "=00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
                         SLUICE_TRACE_VARIABLE "=00-4bf92f3577b34da6a3ce929d0e0e4736 --",
                         SLUICE_TRACE_BEGAN "=1760000000123456", SLUICE_TRACE_BEGAN "=17600000001234567"));
    made->spank_job_env_size = (uint32_t)count;
    made->prefer = word(input, USUAL("ib", "h100", "l4", "a|b", "ib&(a|b)", "[a*1&b*1]", ""));
    made->req_nodes = word(input, USUAL("a", "a,b", "x8", "x64", ""));
    made->contiguous = (uint16_t)number(input, NO_VAL16);
}

static char **texts_of(job_desc_msg_t *made, size_t i)
{
    char **const texts[] = {&made->account,       &made->tres_per_job,  &made->tres_per_node, &made->tres_per_socket,
                            &made->tres_per_task, &made->cpus_per_tres, &made->mem_per_tres,  &made->features,
                            &made->partition,     &made->qos,           &made->submit_line,   &made->tres_bind,
                            &made->prefer,        &made->req_nodes};
    return i < sizeof texts / sizeof texts[0] ? texts[i] : NULL;
}

static void replace(char **text, char **with)
{
    if (!*with)
        return;
    free(*text);
    *text = **with ? *with : NULL;
    if (*text)
        *with = NULL;
}

/* What a change may set, and what says that it does not. */
#define NUMBERS(each)                                                                                                  \
    each(min_nodes, NO_VAL) each(max_nodes, NO_VAL) each(num_tasks, NO_VAL) each(ntasks_per_node, NO_VAL16)            \
        each(ntasks_per_tres, NO_VAL16) each(sockets_per_node, NO_VAL16) each(cpus_per_task, NO_VAL16)                 \
            each(min_cpus, NO_VAL) each(pn_min_cpus, NO_VAL16) each(pn_min_memory, NO_VAL64) each(time_limit, NO_VAL)  \
                each(time_min, NO_VAL) each(shared, NO_VAL16)

/* Most changes have one or two fields. */
static void thin(struct input *input, job_desc_msg_t *change)
{
    uint64_t kept = take(input, 1) & 1 ? take(input, 4) : UINT64_MAX;
    for (size_t i = 0; texts_of(change, i); i++, kept >>= 1)
        if (!(kept & 1))
            free(*texts_of(change, i)), *texts_of(change, i) = NULL;
#define THIN(field, unset)                                                                                             \
    change->field = kept & 1 ? change->field : (unset);                                                                \
    kept >>= 1;
    NUMBERS(THIN)
}

/* The request that slurmctld has after a change: what the old one named and the new one does not stays, unless the new
 * one is empty (gres_job_state_validate). */
static void keep_gres(enum sluice_per per, const char *old, char **new)
{
    struct sluice_tres_request was = {.gpu_types = 0}, is = {.gpu_types = 0};
    struct sluice_slurm slurm = this_slurm(SLUICE_LEVEL_PLACE);
    char why[SLUICE_OPTION_WHY_MAX], more[128], joined[4 * SLUICE_TRES_TEXT_MAX];
    if (!old || !*new || !**new || !sluice_tres_add(&was, per, old, why, sizeof why) ||
        !sluice_tres_add(&is, per, *new, why, sizeof why))
        return;
    int length = snprintf(joined, sizeof joined, "%s", *new);
    for (size_t i = 0; i < was.gpu_types; i++) {
        bool named = false;
        for (size_t j = 0; j < is.gpu_types; j++)
            named |= is.gpus[j].per[per] && !strcmp(is.gpus[j].type, was.gpus[i].type);
        if (named || !was.gpus[i].per[per])
            continue;
        sluice_gres_text(&slurm, "gpu", was.gpus[i].type, was.gpus[i].per[per], more, sizeof more);
        length += snprintf(joined + length, sizeof joined - (size_t)length, ",%s", more);
    }
    free(*new);
    *new = strdup(joined);
}

/* Slurm refuses GPUs with a type together with some without, and shards together with GPUs
 * (gres_job_state_validate). */
static bool is_refused_by_slurm(const job_desc_msg_t *made)
{
    const char *const texts[] = {made->tres_per_job, made->tres_per_node, made->tres_per_socket, made->tres_per_task};
    struct sluice_tres_request request = {.gpu_types = 0};
    char why[SLUICE_OPTION_WHY_MAX];
    for (int per = 0; per < SLUICE_PER_COUNT; per++)
        (void)sluice_tres_add(&request, (enum sluice_per)per, texts[per], why, sizeof why);
    bool untyped = false, shared = false;
    for (size_t i = 0; i < request.gpu_types; i++)
        untyped |= !request.gpus[i].type[0];
    for (int per = 0; per < SLUICE_PER_COUNT; per++)
        shared |= request.shards.per[per] || request.mps.per[per];
    return (untyped && request.gpu_types > 1) || (shared && request.gpu_types > 0);
}

/* What slurmctld makes of the job: each field that the change sets (update_job in job_mgr.c). */
static void apply(job_desc_msg_t *change)
{
    keep_gres(SLUICE_PER_JOB, job.tres_per_job, &change->tres_per_job);
    keep_gres(SLUICE_PER_NODE, job.tres_per_node, &change->tres_per_node);
    keep_gres(SLUICE_PER_SOCKET, job.tres_per_socket, &change->tres_per_socket);
    keep_gres(SLUICE_PER_TASK, job.tres_per_task, &change->tres_per_task);
    for (size_t i = 0; texts_of(change, i); i++)
        replace(texts_of(&job, i), texts_of(change, i));
    if (change->min_nodes == INFINITE) /* gives a job the nodes of another */
        change->min_nodes = NO_VAL;
#define APPLY(field, unset) job.field = change->field == (unset) ? job.field : change->field;
    NUMBERS(APPLY)
    job.contiguous = NO_VAL16;
    job.deadline = 0; /* what can be met depends on when it is asked */
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
    free(made->admin_comment);
    free(made->comment);
}

static void require_reason(int code, char **message)
{
    require(code == SLURM_SUCCESS || (*message && **message));
    for (const char *at = *message; at && *at; at++)
        require(*at >= ' ' && *at <= '~');
    free(*message);
    *message = NULL;
}

/* Submitted as it is, the job is admitted and stays so; for a changed one the account's name may be written again, and
 * the defaults of --cpus-per-gpu and the like may be new. */
static void require_fixed_point(bool defaults_too)
{
    job_desc_msg_t before = job;
    char *message = NULL;
    for (size_t i = 0; texts_of(&before, i); i++)
        *texts_of(&before, i) = *texts_of(&job, i) ? strdup(*texts_of(&job, i)) : NULL;
    require(job_submit(&job, job.user_id, &message) == SLURM_SUCCESS || (job.deadline && message));
    free(message);
    for (size_t i = 0; texts_of(&before, i); i++) {
        const char *was = *texts_of(&before, i), *is = *texts_of(&job, i);
        char **field = texts_of(&before, i);
        bool given = field == &before.cpus_per_tres || field == &before.mem_per_tres || field == &before.account;
        require((given && !defaults_too) ||
                ((!was || !*was) == (!is || !*is) && (!was || !is || strcmp(was, is) == 0)));
        free(*texts_of(&before, i));
    }
    require(job.min_nodes == before.min_nodes && job.max_nodes == before.max_nodes);
    require(job.time_limit == before.time_limit && (job.pn_min_cpus == before.pn_min_cpus || !defaults_too));
}

/* Of what the client sent, a traceparent alone becomes part of the job, and an operator's comment stays. */
static void require_comment(const char *before)
{
    static const size_t word_length = sizeof SLUICE_TRACE_WORD - 1;
    char text[SLUICE_TRACE_SIZE], parent[SLUICE_TRACE_SIZE], began[SLUICE_TRACE_TIME_SIZE] = "";
    long long arrived_us;
    unsigned long took_us;
    int end = 0;
    if (before)
        require(strcmp(job.admin_comment, before) == 0);
    if (before || !job.admin_comment)
        return;
    require(strncmp(job.admin_comment, SLUICE_TRACE_WORD, word_length) == 0);
    snprintf(text, sizeof text, "%s", job.admin_comment + word_length);
    require(sluice_trace_parse(text, parent) && strcmp(text, parent) == 0);
    const char *rest = job.admin_comment + word_length + strlen(parent);
    require(sscanf(rest, " submitted:%16lld,%9lu%n", &arrived_us, &took_us, &end) == 2 && end);
    if (rest[end] == ',')
        snprintf(began, sizeof began, "%s", rest + end + 1);
    require(rest[end] ? sluice_trace_is_time(began) && strlen(rest + end + 1) == strlen(began) : true);
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
    const char *comment = take(&input, 1) & 1 ? "an operator's" : NULL;
    job.admin_comment = comment ? strdup(comment) : NULL;
    int code = job_submit(&job, job.user_id, &message);
    require_reason(code, &message);
    require_comment(comment);
    if (code == SLURM_SUCCESS) {
        job_desc_msg_t change;
        forget_options(&job);
        require_fixed_point(true);
        make(&input, &change);
        free(change.submit_line); /* which nothing can change */
        change.submit_line = NULL;
        thin(&input, &change);
        const uint32_t nobody = 1000;
#if SLUICE_JOB_MODIFY_HAS_MESSAGE
        code = job_modify(&change, NULL, nobody, &message);
        require_reason(code, &message);
#else
        code = job_modify(&change, NULL, nobody);
#endif
        if (code == SLURM_SUCCESS) {
            apply(&change);
            if (!is_refused_by_slurm(&job))
                require_fixed_point(false);
        }
        discard(&change);
    }
    discard(&job);
    return 0;
}
