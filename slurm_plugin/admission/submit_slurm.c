/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "admission/admission_slurm.h"

#include "admission/description_slurm.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

static struct sluice_slurm this_slurm(enum sluice_level level)
{
    return (struct sluice_slurm){
        .slash = SLUICE_GRES_SLASH,
        .several_sharing = SLUICE_TASKS_SHARE_SEVERAL,
        .places = level >= SLUICE_LEVEL_PLACE,
        .list_offers = SLUICE_NODELIST_OFFERS,
        .topology = sluice_known_topology ? sluice_known_topology() : SLUICE_TOPOLOGY_SWITCHES,
        .now = (int64_t)time(NULL),
    };
}

static void show(char **message, const char *text)
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
    case SLUICE_REFUSED_TIME_MIN:
        return ESLURM_INVALID_TIME_MIN_LIMIT;
    case SLUICE_REFUSED_ACCOUNT:
        return ESLURM_INVALID_ACCOUNT;
    case SLUICE_REFUSED_LIMIT:
    case SLUICE_REFUSED_RATE:
        break;
    }
    return ESLURM_ACCOUNTING_POLICY;
}

/* `why` comes from admission or the options' parser: printable, whatever was submitted. */
static void log_refusal(const char *what, uint32_t user_id, const char *account, const char *why)
{
    sluice_log_info("job_submit/sluice: refused %s of user %u, account %s: %s", what, user_id, account, why);
}

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
                 "account %s may submit no jobs; submit with another account (-A)", tenant->account);
    else
        snprintf(admission->message, sizeof admission->message,
                 "account %s may submit %u jobs a minute, and has; try again in %" PRId64
                 " s, or submit a job array (it counts as one)",
                 tenant->account, tenant->submissions_per_minute, (wait_ms + 999) / 1000);
}

/* What Slurm alone cannot give a job, as options are spelled here, and what to do instead. */
static const struct {
    const char *option, *instead;
} lost[] = {
    {"gpu_mem=", "ask for GPU memory with --gres=shard:MIB (one shard is one MiB)"},
    {"gpu_share=", "ask for GPU memory with --gres=shard:MIB (one shard is one MiB)"},
    {"gpu_power=", "leave it out"},
    {"gpu_role=", "leave it out, or submit a heterogeneous job with a component for each role"},
    {"nics_per_gpu=", "ask for interfaces with --gres=nic:N"},
    {"nic_planes=one", "leave it out"},
    {"nic_planes=spread", "leave it out"},
    {"gang=", "leave it out"},
    {"fabric=block", "ask for nodes near each other with --switches=1@TIME"},
    {"fabric=rail", "ask for nodes near each other with --switches=1@TIME"},
    {"fabric=spread", "leave it out"},
    {"segment=", "leave it out"},
};

/* Is a variable, which `options` were parsed from, one of these? */
static bool is_lost(const struct sluice_options *options, const char *variable, char *why, size_t size)
{
    char text[SLUICE_OPTION_WHY_MAX], *option = text + sizeof SLUICE_SPANK_ENV_PREFIX - 1;
    if (!variable || !sluice_option_canonical(options, variable, text, sizeof text))
        return false;
    for (size_t i = 0; i < sizeof lost / sizeof lost[0]; i++) {
        if (strncmp(option, lost[i].option, strlen(lost[i].option)) != 0)
            continue;
        for (char *at = option; *at != '='; at++)
            *at = *at == '_' ? '-' : *at;
        snprintf(why, size, "--%s has no effect now, as Sluice is off on this cluster; %s", option, lost[i].instead);
        return true;
    }
    return false;
}

/* Stock Slurm does not know our options, and a job must not run without what it asked for. */
int sluice_refuse_options(const job_desc_msg_t *job, char **message)
{
    struct sluice_options options;
    char why[2 * SLUICE_OPTION_WHY_MAX];
    if (!job->spank_job_env_size || !job->spank_job_env)
        return SLURM_SUCCESS;
    if (sluice_options_from_env(&options, job->spank_job_env, job->spank_job_env_size, why, sizeof why)) {
        uint32_t i = 0;
        while (i < job->spank_job_env_size && !is_lost(&options, job->spank_job_env[i], why, sizeof why))
            i++;
        if (i == job->spank_job_env_size)
            return SLURM_SUCCESS;
    }
    log_refusal("job", job->user_id, "-", why);
    show(message, why);
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
    /* Slurm refuses the job next if the account is not the user's: it is not charged to the account. */
    bool theirs = tenant && (!sluice_has_account || sluice_has_account(user_id, account));
    if (!admission->refusal && theirs && !old && (!submission->heterogeneous || job->het_job_offset == 0))
        check_rate(tenant, admission);
    if (admission->refusal) {
        log_refusal(old ? "change of a job" : "job", user_id, tenant ? tenant->account : "-", admission->message);
    } else {
        sluice_description_write(job, admission, old);
        if (tenant && !old) /* the account that was checked: a default may change at any time */
            sluice_description_set(&job->account, account);
    }
    return code_of(admission->refusal);
}

int sluice_submit(job_desc_msg_t *job, const struct sluice_settings *settings, char **message)
{
    struct sluice_submission submission;
    struct sluice_admission admission;
    char why[SLUICE_OPTION_WHY_MAX];
    if (job->prefer && !*job->prefer) /* Slurm reads it as features that every node has */
        slurm_xfree((void **)&job->prefer);
    sluice_description_read(job, &submission);
    if (!sluice_options_from_env(&submission.options, job->spank_job_env,
                                 job->spank_job_env ? job->spank_job_env_size : 0, why, sizeof why)) {
        log_refusal("job", job->user_id, "-", why);
        show(message, why);
        return ESLURM_INVALID_GRES;
    }
    sluice_description_write_options(job, &submission.options);
    if (submission.options.checkpoint == SLUICE_CHECKPOINT_APP)
        sluice_description_write_signal(job, (uint16_t)settings->rules->checkpoint_signal);
    if (submission.options.checkpoint == SLUICE_CHECKPOINT_SYSTEM) {
        sluice_description_write_resumable(job);
        if (!sluice_description_write_key(job))
            return SLURM_ERROR;
    }
    if (!sluice_default_account && settings->rules->tenant_count && !(job->account && *job->account)) {
        const char *unnamed = "on this cluster a job must name its account: submit with -A ACCOUNT";
        log_refusal("job", job->user_id, "-", unnamed);
        show(message, unnamed);
        return ESLURM_INVALID_ACCOUNT;
    }
    int code = decide(job, settings, &submission, job->account, NULL, &admission);
    show(message, admission.message);
    return code;
}

int sluice_modify(job_desc_msg_t *job, struct job_record *record, const struct sluice_settings *settings,
                  char **message)
{
    struct sluice_submission submission;
    struct sluice_admission admission;
    struct sluice_job_facts facts;
    char why[SLUICE_OPTION_WHY_MAX];
    if (!sluice_job_facts) {
        show(message, "on this cluster a job's request cannot be changed; cancel the job and submit it again");
        return ESLURM_NOT_SUPPORTED;
    }
    sluice_job_facts(record, &facts);
    sluice_description_read(job, &submission);
    sluice_description_merge(job, &facts, &submission);
    if (!sluice_options_from_env(&submission.options, facts.spank_env, facts.spank_env_count, why, sizeof why))
        memset(&submission.options, 0,
               sizeof submission.options); /* of an older Sluice: no options to check the change against */
    submission.options.gang_count = 0;     /* membership was settled at submission */
    submission.options.gpu_share = 0;
    submission.options.gpu_power_w = 0;
    submission.options.nics_per_gpu = 0; /* it has become a count of NICs */
    int code = decide(job, settings, &submission, job->account ? job->account : facts.account, &facts, &admission);
    show(message, admission.message);
    if (code && !SLUICE_JOB_MODIFY_HAS_MESSAGE && sluice_job_show_reason)
        sluice_job_show_reason(record, admission.message);
    return code;
}
