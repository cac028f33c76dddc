/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Slurm's description of a new or changed job as a sluice_submission, and the admission written into it. */
#include "admission/description_slurm.h"

#include "admission/admission_slurm.h"
#include "runtime/runtime.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

enum { SLURM_COMMENT_MAX = 1024 };

/* ---- from Slurm's fields to a submission ---- */

static uint32_t given32(uint32_t value)
{
    return value == NO_VAL || value == INFINITE ? 0 : value;
}

static uint32_t given16(uint16_t value)
{
    return value == NO_VAL16 || value == INFINITE16 ? 0 : value;
}

static uint32_t given_minutes(uint32_t value)
{
    return value == NO_VAL ? 0 : value == INFINITE ? UINT32_MAX : value;
}

static int64_t given_time(time_t value)
{
    return value == (time_t)NO_VAL ? 0 : (int64_t)value;
}

/* How many nodes a list names. As in slurmctld, a name that is in it twice counts twice. */
static uint32_t count_nodes(const char *list)
{
    if (!list || !*list)
        return 0;
    sluice_hostlist nodes = slurm_hostlist_create(list);
    int count = nodes ? slurm_hostlist_count(nodes) : 0;
    if (nodes)
        slurm_hostlist_destroy(nodes);
    return count > 0 ? (uint32_t)count : 0;
}

/* Of the commands that run a job at once, only srun repeats the request for its step; salloc's steps have their
 * own. */
static bool is_srun(const job_desc_msg_t *job)
{
    const char *command = job->submit_line, *end;
    if (job->script || !command)
        return false;
    end = command + strcspn(command, " ");
    while (end > command && *end != '/')
        end--;
    return strncmp(*end == '/' ? end + 1 : end, "srun", 4) == 0;
}

void sluice_description_read(const job_desc_msg_t *job, struct sluice_submission *submission)
{
    *submission = (struct sluice_submission){
        .tres = {job->tres_per_job, job->tres_per_node, job->tres_per_socket, job->tres_per_task},
        .cpus_per_tres = job->cpus_per_tres,
        .mem_per_tres = job->mem_per_tres,
        .features = job->features,
        .prefer = job->prefer,
        .partition = job->partition,
        .qos = job->qos,
        .min_nodes = given32(job->min_nodes),
        .max_nodes = given32(job->max_nodes),
        .tasks = given32(job->num_tasks),
        .tasks_per_node = given16(job->ntasks_per_node),
        .tasks_per_gpu = given16(job->ntasks_per_tres),
        .sockets_per_node = given16(job->sockets_per_node),
        .cpus_per_task = given16(job->cpus_per_task),
        .min_cpus = given32(job->min_cpus),
        .min_cpus_per_node = given16(job->pn_min_cpus),
        .required_nodes = count_nodes(job->req_nodes),
        .switches = given32(job->req_switch),
        .slurm_segment = given16(SLUICE_DESCRIPTION_SEGMENT(job)),
        .time_limit = given_minutes(job->time_limit),
        .time_min = given_minutes(job->time_min),
        .deadline = given_time(job->deadline),
        .begin = given_time(job->begin_time),
        .memory_asked = job->pn_min_memory != NO_VAL64,
        .whole_nodes = job->shared == 0,
        .contiguous = given16(job->contiguous),
        .step_at_once = is_srun(job),
        .script = job->script != NULL,
        .stays_ended = job->requeue == 0,
        .truncates = job->open_mode == OPEN_MODE_TRUNCATE,
        .heterogeneous = job->het_job_offset != NO_VAL,
    };
}

static void or_else(const char **text, const char *old)
{
    if (!*text)
        *text = old;
}

static void keep_unless(uint32_t *number, bool changed, uint32_t old)
{
    if (!changed)
        *number = old;
}

/* A pending job has both bounds and the list of nodes that it must have; another has its nodes, and Slurm lets nobody
 * give it more. */
static void merge_nodes(const job_desc_msg_t *job, const struct sluice_job_facts *facts,
                        struct sluice_submission *submission)
{
    submission->contiguous = false; /* Slurm fills gaps at submission only */
    if (!facts->pending) {
        submission->min_nodes = submission->max_nodes = facts->nodes;
        submission->required_nodes = 0;
        return;
    }
    keep_unless(&submission->min_nodes, job->min_nodes != NO_VAL && job->min_nodes != INFINITE, facts->min_nodes);
    keep_unless(&submission->max_nodes, job->max_nodes != NO_VAL, facts->max_nodes);
    if (!job->req_nodes)
        submission->required_nodes = count_nodes(facts->required_nodes);
}

void sluice_description_merge(const job_desc_msg_t *job, const struct sluice_job_facts *facts,
                              struct sluice_submission *submission)
{
    const char *const tres[SLUICE_PER_COUNT] = {facts->tres_per_job, facts->tres_per_node, facts->tres_per_socket,
                                                facts->tres_per_task};
    for (int per = 0; per < SLUICE_PER_COUNT; per++) {
        submission->replaced[per] = submission->tres[per] ? tres[per] : NULL;
        or_else(&submission->tres[per], tres[per]);
    }
    or_else(&submission->cpus_per_tres, facts->cpus_per_tres);
    or_else(&submission->mem_per_tres, facts->mem_per_tres);
    or_else(&submission->features, facts->features);
    or_else(&submission->prefer, facts->prefer);
    or_else(&submission->partition, facts->partition);
    or_else(&submission->qos, facts->qos);
    merge_nodes(job, facts, submission);
    keep_unless(&submission->tasks, job->num_tasks != NO_VAL, facts->tasks);
    keep_unless(&submission->tasks_per_node, job->ntasks_per_node != NO_VAL16, facts->tasks_per_node);
    keep_unless(&submission->tasks_per_gpu, job->ntasks_per_tres != NO_VAL16, facts->tasks_per_gpu);
    keep_unless(&submission->sockets_per_node, job->sockets_per_node != NO_VAL16, facts->sockets_per_node);
    keep_unless(&submission->cpus_per_task, job->cpus_per_task != NO_VAL16, facts->cpus_per_task);
    keep_unless(&submission->min_cpus, job->min_cpus != NO_VAL, facts->min_cpus);
    keep_unless(&submission->min_cpus_per_node, job->pn_min_cpus != NO_VAL16, facts->min_cpus_per_node);
    keep_unless(&submission->time_limit, job->time_limit != NO_VAL, facts->time_limit);
    keep_unless(&submission->time_min, job->time_min != NO_VAL, facts->time_min);
    if (!submission->deadline && facts->pending)
        submission->deadline = facts->deadline;
    if (!submission->begin && facts->pending)
        submission->begin = facts->begin;
    submission->memory_asked |= facts->memory_asked;
    submission->whole_nodes = job->shared == NO_VAL16 ? facts->whole_nodes : job->shared == 0;
    submission->heterogeneous = facts->heterogeneous;
    submission->tasks_split = facts->one_task_per_sharing;
    submission->admitted_before = true;
}

bool sluice_modifies_request(const job_desc_msg_t *job)
{
    return job->account || job->partition || job->features || job->prefer || job->req_nodes || job->tres_per_job ||
           job->tres_per_node || job->tres_per_socket || job->tres_per_task || job->cpus_per_tres ||
           job->mem_per_tres || job->min_nodes != NO_VAL || job->max_nodes != NO_VAL || job->num_tasks != NO_VAL ||
           job->ntasks_per_node != NO_VAL16 || job->ntasks_per_tres != NO_VAL16 || job->sockets_per_node != NO_VAL16 ||
           job->cpus_per_task != NO_VAL16 || job->min_cpus != NO_VAL || job->pn_min_cpus != NO_VAL16 ||
           job->time_limit != NO_VAL || job->time_min != NO_VAL || job->shared != NO_VAL16 || given_time(job->deadline);
}

/* ---- and back ---- */

void sluice_description_set(char **field, const char *text)
{
    if (*field && strcmp(*field, text) == 0)
        return;
    slurm_xfree((void **)field);
    *field = text[0] ? slurm_xstrdup(text) : NULL;
}

/* An empty text in a modification removes the job's old value. */
static void set_or_clear(char **field, const char *text, bool clear)
{
    sluice_description_set(field, text);
    if (clear && !*field)
        *field = slurm_xstrdup("");
}

void sluice_description_write(job_desc_msg_t *job, const struct sluice_admission *admission,
                              const struct sluice_job_facts *old)
{
    if (admission->set_tres) {
        set_or_clear(&job->tres_per_job, admission->tres[SLUICE_PER_JOB], old && old->tres_per_job);
        set_or_clear(&job->tres_per_node, admission->tres[SLUICE_PER_NODE], old && old->tres_per_node);
        set_or_clear(&job->tres_per_socket, admission->tres[SLUICE_PER_SOCKET], old && old->tres_per_socket);
        set_or_clear(&job->tres_per_task, admission->tres[SLUICE_PER_TASK], old && old->tres_per_task);
    }
    if (admission->clear_binding)
        sluice_description_set(&job->tres_bind, "");
    if (admission->set_cpus_per_tres)
        sluice_description_set(&job->cpus_per_tres, admission->cpus_per_tres);
    if (admission->set_mem_per_tres)
        sluice_description_set(&job->mem_per_tres, admission->mem_per_tres);
    if (admission->features[0])
        sluice_description_set(&job->features, admission->features);
    if (admission->prefer[0])
        sluice_description_set(&job->prefer, admission->prefer);
    if (admission->partition[0])
        sluice_description_set(&job->partition, admission->partition);
    if (admission->qos[0])
        sluice_description_set(&job->qos, admission->qos);
    if (admission->min_nodes)
        job->min_nodes = admission->min_nodes;
    if (admission->max_nodes)
        job->max_nodes = admission->max_nodes;
    if (admission->time_limit)
        job->time_limit = admission->time_limit;
    if (admission->min_cpus_per_node)
        job->pn_min_cpus = (uint16_t)admission->min_cpus_per_node;
    if (admission->memory_per_node_mib)
        job->pn_min_memory = admission->memory_per_node_mib;
    if (admission->set_switches) {
        job->req_switch = admission->switches;
        job->wait4switch = admission->switch_wait_s == UINT32_MAX ? INFINITE : admission->switch_wait_s;
    }
    if (admission->one_task_per_sharing)
        SLUICE_SET_ONE_TASK_PER_SHARING(job->bitflags);
}

/*
 * A job's comment is the only text of it that every version of Slurm keeps and lists; the last such words in it count.
 * Slurm refuses a comment that does not fit here.
 */
static void write_checkpoint(job_desc_msg_t *job, const struct sluice_options *options)
{
    char words[SLUICE_OPTION_TEXT_MAX], comment[SLURM_COMMENT_MAX + sizeof words];
    const char *own = job->comment ? job->comment : "";
    if (!sluice_checkpoint_words(options, words, sizeof words))
        return;
    int length = snprintf(comment, sizeof comment, "%s%s%s", own, *own ? "," : "", words);
    if ((size_t)length < sizeof comment)
        sluice_description_set(&job->comment, comment);
}

void sluice_description_write_resumable(job_desc_msg_t *job)
{
    job->open_mode = OPEN_MODE_APPEND; /* what was written before it is resumed stays */
    job->requeue = 1;
    if (job->warn_signal && job->warn_signal != NO_VAL16)
        return;                            /* the user's own --signal */
    job->warn_signal = SLUICE_SAVE_SIGNAL; /* to its launcher, when it is preempted */
    job->warn_flags = KILL_JOB_BATCH;
    job->warn_time = 0;
}

bool sluice_description_write_key(job_desc_msg_t *job)
{
    static const char name[] = "SLUICE_SAVE_KEY="; /* prolog_epilog/programs/node_program.py, with SPANK_ before it */
    unsigned char random[32];
    char text[sizeof name + 2 * sizeof random];
    uint32_t count = job->spank_job_env ? job->spank_job_env_size : 0, kept = 0;
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random) {
        sluice_log_error("job_submit/sluice: no random numbers for a job's key: %s", strerror(errno));
        return false;
    }
    memcpy(text, name, sizeof name);
    for (size_t i = 0; i < sizeof random; i++)
        snprintf(text + sizeof name - 1 + 2 * i, 3, "%02x", random[i]);
    for (uint32_t i = 0; i < count; i++) {
        char **variable = &job->spank_job_env[i];
        if (*variable && strncmp(*variable, name, sizeof name - 1) == 0)
            slurm_xfree((void **)variable);
        else
            job->spank_job_env[kept++] = *variable;
    }
    slurm_xrecalloc((void **)&job->spank_job_env, kept + 1, sizeof(char *), true, false, __FILE__, __LINE__, __func__);
    job->spank_job_env[kept] = slurm_xstrdup(text);
    job->spank_job_env_size = kept + 1;
    return true;
}

void sluice_description_write_signal(job_desc_msg_t *job, uint16_t signal)
{
    if (job->warn_signal && job->warn_signal != NO_VAL16)
        return; /* the user's own --signal */
    job->warn_signal = signal;
    job->warn_flags = KILL_FULL_JOB; /* the batch script, too: as the controllers' daemon signals it */
    job->warn_time = 0;
}

void sluice_description_write_options(job_desc_msg_t *job, const struct sluice_options *options)
{
    char text[SLUICE_OPTION_TEXT_MAX];
    for (uint32_t i = 0; job->spank_job_env && i < job->spank_job_env_size; i++)
        if (job->spank_job_env[i] && sluice_option_canonical(options, job->spank_job_env[i], text, sizeof text))
            sluice_description_set(&job->spank_job_env[i], text);
    write_checkpoint(job, options);
}
