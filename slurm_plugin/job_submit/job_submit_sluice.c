/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * job_submit/sluice: takes Slurm's description of a new or changed job apart for admission/, and writes the answer
 * back. Public headers only. Runs under slurmctld's read locks (from 24.11 on in several threads at once): no I/O, no
 * waiting.
 */
#include "slurm_compat.h"

#include "admission/admission.h"
#include "controller/charge.h"
#include "controller/controller.h"
#include "controller/failover.h"
#include "controller/log.h"
#include "controller/records.h"
#include "controller/settings.h"
#include "controller/status.h"
#include "controller/told_slurm.h"
#include "journal/told.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

const char plugin_name[] = "Submissions checked and completed by Sluice";
const char plugin_type[] = "job_submit/sluice";
const uint32_t plugin_version = SLURM_VERSION_NUMBER;

static const uint64_t slow_ns = 50000; /* what a submission may cost */

static bool active;
static struct {
    _Atomic uint64_t *submitted, *modified, *refused, *total_ns, *slowest_ns, *slow;
} counters;

/* ---- from Slurm's words to ours ---- */

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

static struct sluice_slurm this_slurm(enum sluice_level level)
{
    return (struct sluice_slurm){
        .slash = SLUICE_GRES_SLASH,
        .several_sharing = SLUICE_TASKS_SHARE_SEVERAL,
        .places = level >= SLUICE_LEVEL_PLACE,
        .list_offers = SLUICE_NODELIST_OFFERS,
        .now = (int64_t)time(NULL),
    };
}

/* How many nodes a list names. As in slurmctld: a name that stands there twice counts twice. */
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

/* Of the commands that run a job at once, srun alone repeats the request for its step; salloc's steps have their own.
 */
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

static void read_description(const job_desc_msg_t *job, struct sluice_submission *submission)
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
        .time_limit = given_minutes(job->time_limit),
        .time_min = given_minutes(job->time_min),
        .deadline = given_time(job->deadline),
        .begin = given_time(job->begin_time),
        .memory_asked = job->pn_min_memory != NO_VAL64,
        .whole_nodes = job->shared == 0,
        .contiguous = given16(job->contiguous),
        .step_at_once = is_srun(job),
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

/* Nodes: what is pending has each bound by itself, and the list of those that it must have; other jobs have theirs, and
 * Slurm lets nobody give them more. */
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

/* A job as the modification would leave it. */
static void merge(const job_desc_msg_t *job, const struct sluice_job_facts *facts, struct sluice_submission *submission)
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

/* Whether a modification changes anything that admission looks at. */
static bool concerns_us(const job_desc_msg_t *job)
{
    return job->account || job->partition || job->features || job->prefer || job->req_nodes || job->tres_per_job ||
           job->tres_per_node || job->tres_per_socket || job->tres_per_task || job->cpus_per_tres ||
           job->mem_per_tres || job->min_nodes != NO_VAL || job->max_nodes != NO_VAL || job->num_tasks != NO_VAL ||
           job->ntasks_per_node != NO_VAL16 || job->ntasks_per_tres != NO_VAL16 || job->sockets_per_node != NO_VAL16 ||
           job->cpus_per_task != NO_VAL16 || job->min_cpus != NO_VAL || job->pn_min_cpus != NO_VAL16 ||
           job->time_limit != NO_VAL || job->time_min != NO_VAL || job->shared != NO_VAL16 || given_time(job->deadline);
}

/* ---- and back ---- */

static void set_text(char **field, const char *text)
{
    if (*field && strcmp(*field, text) == 0)
        return;
    slurm_xfree((void **)field);
    *field = text[0] ? slurm_xstrdup(text) : NULL;
}

/* Empty is how a modification says that a job's old value goes. */
static void set_or_clear(char **field, const char *text, bool clear)
{
    set_text(field, text);
    if (clear && !*field)
        *field = slurm_xstrdup("");
}

static void write_back(job_desc_msg_t *job, const struct sluice_admission *admission,
                       const struct sluice_job_facts *old)
{
    if (admission->set_tres) {
        set_or_clear(&job->tres_per_job, admission->tres[SLUICE_PER_JOB], old && old->tres_per_job);
        set_or_clear(&job->tres_per_node, admission->tres[SLUICE_PER_NODE], old && old->tres_per_node);
        set_or_clear(&job->tres_per_socket, admission->tres[SLUICE_PER_SOCKET], old && old->tres_per_socket);
        set_or_clear(&job->tres_per_task, admission->tres[SLUICE_PER_TASK], old && old->tres_per_task);
    }
    if (admission->clear_binding)
        set_text(&job->tres_bind, "");
    if (admission->set_cpus_per_tres)
        set_text(&job->cpus_per_tres, admission->cpus_per_tres);
    if (admission->set_mem_per_tres)
        set_text(&job->mem_per_tres, admission->mem_per_tres);
    if (admission->features[0])
        set_text(&job->features, admission->features);
    if (admission->prefer[0])
        set_text(&job->prefer, admission->prefer);
    if (admission->partition[0])
        set_text(&job->partition, admission->partition);
    if (admission->qos[0])
        set_text(&job->qos, admission->qos);
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
    if (admission->one_task_per_sharing)
        SLUICE_SET_ONE_TASK_PER_SHARING(job->bitflags);
}

static void tell(char **message, const char *text)
{
    if (!message || !text[0])
        return;
    slurm_xfree((void **)message);
    *message = slurm_xstrdup(text);
}

static int code_of(enum sluice_refusal refusal)
{
    switch (refusal) {
    case SLUICE_ADMITTED:
        return SLURM_SUCCESS;
    case SLUICE_REFUSED_REQUEST:
        return ESLURM_INVALID_GRES;
    case SLUICE_REFUSED_TIME:
        return ESLURM_INVALID_TIME_LIMIT;
    case SLUICE_REFUSED_ACCOUNT:
        return ESLURM_INVALID_ACCOUNT;
    case SLUICE_REFUSED_LIMIT:
    case SLUICE_REFUSED_RATE:
        break;
    }
    return ESLURM_ACCOUNTING_POLICY;
}

/* Words that admission or the options' parser made: printable, whatever was submitted. */
static void log_refusal(const char *what, uint32_t user_id, const char *account, const char *why)
{
    sluice_log_info("job_submit/sluice: refused %s of user %u, account %s: %s", what, user_id, account, why);
}

/* ---- one decision ---- */

/* The account as slurmctld will store it: a user's default where none is named, in lower case. "" for none. */
static void find_account(const char *asked, uint32_t user_id, char *account, size_t size)
{
    account[0] = '\0';
    if (asked && *asked)
        snprintf(account, size, "%s", asked);
    else if (!sluice_default_account || !sluice_default_account(user_id, account, size))
        account[0] = '\0';
    for (char *at = account; *at; at++)
        *at = (char)tolower((unsigned char)*at);
}

static void check_rate(const struct sluice_tenant *tenant, struct sluice_admission *admission)
{
    int64_t wait_ms;
    if (tenant->submissions_per_minute == SLUICE_NO_LIMIT ||
        sluice_charge_take(tenant->account, tenant->submissions_per_minute, &wait_ms))
        return;
    admission->refusal = SLUICE_REFUSED_RATE;
    if (wait_ms < 0)
        snprintf(admission->message, sizeof admission->message,
                 "account %s may submit nothing; submit with another (-A)", tenant->account);
    else
        snprintf(admission->message, sizeof admission->message,
                 "account %s may submit %u jobs a minute, and has; try again in %" PRId64
                 " s, or submit a job array (it counts as one)",
                 tenant->account, tenant->submissions_per_minute, (wait_ms + 999) / 1000);
}

/* Level off: stock Slurm, which knows nothing of our options; a job must not run without what it asked for. */
static int refuse_options_when_off(const job_desc_msg_t *job, char **message)
{
    struct sluice_options options;
    char why[SLUICE_OPTION_WHY_MAX];
    if (!job->spank_job_env_size || !job->spank_job_env)
        return SLURM_SUCCESS;
    if (sluice_options_from_env(&options, job->spank_job_env, job->spank_job_env_size, why, sizeof why)) {
        if (!options.gpu_mem_mib && !options.gpu_share && !options.gang_count)
            return SLURM_SUCCESS;
        snprintf(why, sizeof why,
                 "--gpu-mem, --gpu-share and --gang have no effect now, as Sluice is off on this cluster; ask for GPU "
                 "memory with --gres=shard:MIB (one shard is one MiB)");
    }
    log_refusal("job", job->user_id, "-", why);
    tell(message, why);
    return ESLURM_INVALID_GRES;
}

static int decide(job_desc_msg_t *job, const struct sluice_settings *settings, struct sluice_submission *submission,
                  const char *asked_account, const struct sluice_job_facts *old, struct sluice_admission *admission)
{
    char account[SLUICE_RULES_MAX_NAME + 1];
    struct sluice_slurm slurm = this_slurm(settings->level);
    const uint32_t user_id = old ? old->user_id : job->user_id;
    find_account(asked_account, user_id, account, sizeof account);
    const struct sluice_tenant *tenant = account[0] ? sluice_rules_tenant(settings->rules, account) : NULL;
    struct sluice_outlook *outlook = submission->deadline ? sluice_outlook_acquire(slurm.now) : NULL;
    slurm.outlook = outlook;
    sluice_admit(settings->rules, tenant, &slurm, submission, admission);
    sluice_outlook_release(outlook);
    if (!admission->refusal && tenant && !old && (!submission->heterogeneous || job->het_job_offset == 0))
        check_rate(tenant, admission);
    if (admission->refusal) {
        log_refusal(old ? "change of a job" : "job", user_id, tenant ? tenant->account : "-", admission->message);
    } else {
        write_back(job, admission, old);
        if (tenant && !old) /* what it was checked as: a default may change at any time */
            set_text(&job->account, account);
    }
    return code_of(admission->refusal);
}

/* However a user spelled the options, those who read them later, on nodes too, find them in one spelling. */
static void rewrite_options(job_desc_msg_t *job, const struct sluice_options *options)
{
    char text[SLUICE_OPTION_TEXT_MAX];
    for (uint32_t i = 0; job->spank_job_env && i < job->spank_job_env_size; i++)
        if (job->spank_job_env[i] && sluice_option_canonical(options, job->spank_job_env[i], text, sizeof text))
            set_text(&job->spank_job_env[i], text);
}

static int submit(job_desc_msg_t *job, const struct sluice_settings *settings, char **message)
{
    struct sluice_submission submission;
    struct sluice_admission admission;
    char why[SLUICE_OPTION_WHY_MAX];
    if (job->prefer && !*job->prefer) /* which Slurm takes for features that every node has */
        slurm_xfree((void **)&job->prefer);
    read_description(job, &submission);
    if (!sluice_options_from_env(&submission.options, job->spank_job_env,
                                 job->spank_job_env ? job->spank_job_env_size : 0, why, sizeof why)) {
        log_refusal("job", job->user_id, "-", why);
        tell(message, why);
        return ESLURM_INVALID_GRES;
    }
    rewrite_options(job, &submission.options);
    int code = decide(job, settings, &submission, job->account, NULL, &admission);
    tell(message, admission.message);
    return code;
}

static int modify(job_desc_msg_t *job, struct job_record *record, const struct sluice_settings *settings,
                  char **message)
{
    struct sluice_submission submission;
    struct sluice_admission admission;
    struct sluice_job_facts facts;
    char why[SLUICE_OPTION_WHY_MAX];
    if (!sluice_job_facts) {
        tell(message, "on this cluster a job's request cannot be changed; cancel the job and submit it again");
        return ESLURM_NOT_SUPPORTED;
    }
    sluice_job_facts(record, &facts);
    read_description(job, &submission);
    merge(job, &facts, &submission);
    if (!sluice_options_from_env(&submission.options, facts.spank_env, facts.spank_env_count, why, sizeof why))
        memset(&submission.options, 0,
               sizeof submission.options); /* of an older Sluice: nothing to hold the change to */
    submission.options.gang_count = 0;     /* membership was settled at submission */
    submission.options.gpu_share = 0;
    int code = decide(job, settings, &submission, job->account ? job->account : facts.account, &facts, &admission);
    tell(message, admission.message);
    if (code && !SLUICE_JOB_MODIFY_TELLS && sluice_job_tell)
        sluice_job_tell(record, admission.message);
    return code;
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

static void count(_Atomic uint64_t *kind, uint64_t began_ns, int code)
{
    uint64_t took = now_ns() - began_ns, slowest = atomic_load_explicit(counters.slowest_ns, memory_order_relaxed);
    atomic_fetch_add_explicit(kind, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(counters.total_ns, took, memory_order_relaxed);
    if (code)
        atomic_fetch_add_explicit(counters.refused, 1, memory_order_relaxed);
    if (took > slow_ns)
        atomic_fetch_add_explicit(counters.slow, 1, memory_order_relaxed);
    while (took > slowest && !atomic_compare_exchange_weak_explicit(counters.slowest_ns, &slowest, took,
                                                                    memory_order_relaxed, memory_order_relaxed))
        ;
}

/* ---- what slurmctld calls ---- */

extern int init(void)
{
    counters.submitted = sluice_status_counter("submit.submitted");
    counters.modified = sluice_status_counter("submit.modified");
    counters.refused = sluice_status_counter("submit.refused");
    counters.total_ns = sluice_status_counter("submit.total_ns");
    counters.slowest_ns = sluice_status_counter("submit.slowest_ns");
    counters.slow = sluice_status_counter("submit.over_50_us");
    static char version[24]; /* as Slurm writes it: 22.05.8 */
    snprintf(version, sizeof version, "%u.%02u.%u", (unsigned)SLURM_VERSION_MAJOR(plugin_version),
             (unsigned)SLURM_VERSION_MINOR(plugin_version), (unsigned)SLURM_VERSION_MICRO(plugin_version));
    if (sluice_in_slurmctld())
        active = sluice_controller_start(
            "job_submit", &(struct sluice_site){slurm_conf.slurm_conf, slurm_conf.state_save_location, version});
    return SLURM_SUCCESS;
}

extern SLUICE_FINI_TYPE fini(void)
{
    if (active)
        sluice_controller_stop("job_submit");
    active = false;
    SLUICE_FINI_RETURN;
}

/* What a change is about, for a report after a failover. */
static void tell_journal(const job_desc_msg_t *job_desc, uint32_t submit_uid)
{
    char text[256];
    uint32_t job_id = SLUICE_DESCRIBED_JOB(job_desc);
    if (!sluice_failover_modified)
        return;
    if ((!job_id || job_id == NO_VAL) && job_desc->job_id_str)
        job_id = (uint32_t)strtoul(job_desc->job_id_str, NULL, 10);
    snprintf(text, sizeof text, "job %.40s:%s%s%s%s%s%s", job_desc->job_id_str ? job_desc->job_id_str : "",
             job_desc->priority == 0          ? " hold"
             : job_desc->priority == INFINITE ? " release"
             : job_desc->priority != NO_VAL   ? " priority"
                                              : "",
             job_desc->time_limit != NO_VAL ? " time limit" : "", job_desc->partition ? " partition" : "",
             job_desc->qos ? " QOS" : "", job_desc->dependency ? " dependency" : "",
             job_desc->begin_time ? " begin" : "");
    sluice_failover_modified(job_id, submit_uid, text);
}

extern int job_submit(job_desc_msg_t *job_desc, uint32_t submit_uid, char **err_msg)
{
    (void)submit_uid; /* Slurm's habit: the limits of an account hold whoever submits for it */
    /* Slurm asks for each component of a heterogeneous job in turn, then takes them in, in this thread. */
    if (active && sluice_failover_components)
        sluice_failover_components(job_desc->het_job_offset == NO_VAL ? 0 : job_desc->het_job_offset + 1);
    if (!active || sluice_settings_level() == SLUICE_LEVEL_OFF)
        return refuse_options_when_off(job_desc, err_msg);
    uint64_t began = now_ns();
    sluice_charge_begin();
    const struct sluice_settings *settings = sluice_settings_acquire();
    int code = submit(job_desc, settings, err_msg);
    sluice_settings_release(settings);
    count(counters.submitted, began, code);
    return code;
}

#if SLUICE_JOB_MODIFY_TELLS
extern int job_modify(job_desc_msg_t *job_desc, struct job_record *job_ptr, uint32_t submit_uid, char **err_msg)
{
#else
extern int job_modify(job_desc_msg_t *job_desc, struct job_record *job_ptr, uint32_t submit_uid)
{
    char **err_msg = NULL;
#endif
    if (active && sluice_job_told_ended && sluice_told_is(job_desc->admin_comment))
        return sluice_job_told_ended(job_ptr, job_desc->admin_comment, submit_uid);
    if (!active || sluice_settings_level() == SLUICE_LEVEL_OFF)
        return SLURM_SUCCESS;
    tell_journal(job_desc, submit_uid);
    if (sluice_accrual_restore && sluice_settings_level() >= SLUICE_LEVEL_PLACE)
        sluice_accrual_restore(job_ptr);
    if (!concerns_us(job_desc))
        return SLURM_SUCCESS;
    uint64_t began = now_ns();
    /* Slurm's habit here, too: what an operator changes is not held to limits. */
    if (submit_uid == 0 || (sluice_is_operator && sluice_is_operator(submit_uid)))
        return SLURM_SUCCESS;
    const struct sluice_settings *settings = sluice_settings_acquire();
    int code = modify(job_desc, job_ptr, settings, err_msg);
    sluice_settings_release(settings);
    count(counters.modified, began, code);
    return code;
}
