/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "admission/admission.h"

#include "admission/admission_internal.h"
#include "admission/constraint.h"
#include "admission/gpu_mem.h"
#include "admission/nics_per_gpu.h"
#include "admission/wording.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static bool is_listed(struct sluice_words words, const char *word, size_t length)
{
    for (uint32_t i = 0; i < words.count; i++)
        if (strlen(words.items[i]) == length && memcmp(words.items[i], word, length) == 0)
            return true;
    return false;
}

static void join(struct sluice_words words, const char *separator, char *text, size_t size)
{
    size_t length = 0;
    text[0] = '\0';
    for (uint32_t i = 0; i < words.count && length < size; i++)
        length += (size_t)snprintf(text + length, size - length, "%s%s", i ? separator : "", words.items[i]);
}

/* ---- the request as it was written ---- */

static bool read_request(struct sluice_check *check)
{
    static const char *const origins[SLUICE_PER_COUNT] = {"--gpus", "--gres", "--gpus-per-socket", "--tres-per-task"};
    char why[SLUICE_OPTION_WHY_MAX];
    for (int per = 0; per < SLUICE_PER_COUNT; per++)
        if (!sluice_tres_add(&check->request, (enum sluice_per)per, check->submission->tres[per], why, sizeof why))
            return sluice_refuse(check->admission, SLUICE_REFUSED_REQUEST, "%s: %s", origins[per], why);
    return true;
}

static bool has_gpus(const struct sluice_tres_request *request)
{
    return request->gpu_types > 0;
}

static bool has_any(const struct sluice_gres_counts *counts)
{
    for (int per = 0; per < SLUICE_PER_COUNT; per++)
        if (counts->per[per])
            return true;
    return false;
}

static const char *plural(uint64_t count)
{
    return count == 1 ? "" : "s";
}

static bool uses_gpus(const struct sluice_check *check)
{
    return has_gpus(&check->request) || has_any(&check->request.shards) || has_any(&check->request.mps) ||
           check->submission->tasks_per_gpu;
}

/* What CRIU and sluice-launch can do; entry/launch.c looks again where the job runs. */
static bool check_saved_by_system(struct sluice_check *check)
{
    const struct sluice_submission *submission = check->submission;
    const char *why = NULL;
    if (!check->rules || !check->rules->checkpoint_system)
        why = "nodes of this cluster do not save jobs as they run; use --checkpoint=app";
    else if (!submission->script)
        why = "srun and salloc have no script that can be resumed; submit it with sbatch";
    else if (submission->heterogeneous || submission->min_nodes > 1 || submission->required_nodes > 1)
        why = "jobs of several nodes cannot be saved so; ask for one node, or use --checkpoint=app";
    else if (has_any(&check->request.shards) || has_any(&check->request.mps))
        why = "the state of a part of a GPU cannot be saved; ask for whole GPUs, or use --checkpoint=app";
    else if (submission->stays_ended)
        why = "a job that was saved is requeued to be resumed; leave out --no-requeue";
    else if (submission->truncates)
        why = "what the job has written would be lost as it is resumed; leave out --open-mode=truncate";
    if (why)
        return sluice_refuse(check->admission, SLUICE_REFUSED_REQUEST, "--checkpoint=system: %s", why);
    check->admission->max_nodes = 1;
    return true;
}

static bool check_options(struct sluice_check *check)
{
    const struct sluice_options *options = &check->submission->options;
    const struct sluice_tres_request *request = &check->request;
    if (has_any(&request->shards) && (has_gpus(request) || has_any(&request->mps)))
        return sluice_refuse(
            check->admission, SLUICE_REFUSED_REQUEST,
            "--gres=shard with gpu or mps: Slurm gives a job either parts of GPUs or whole ones; submit "
            "two jobs, or one heterogeneous job with a component for each");
    if (request->shards_typed)
        return sluice_refuse(
            check->admission, SLUICE_REFUSED_REQUEST,
            "--gres=shard with a type: jobs ask for parts of GPUs without one; write --gres=shard:MIB, or "
            "--gpu-mem=SIZE, and name the type with --constraint");
    if (options->gpu_mem_mib && check->submission->admitted_before) {
        if (has_gpus(request) || !has_any(&request->shards))
            return sluice_refuse(
                check->admission, SLUICE_REFUSED_REQUEST,
                "the job was submitted with --gpu-mem, so its GRES can only be changed to another number of "
                "shards (one is one MiB); submit a new job for whole GPUs");
    } else if (options->gpu_mem_mib &&
               !sluice_gpu_mem_rewrite(check->slurm, check->submission, &check->request, check->admission)) {
        return false;
    }
    if (options->gpu_share && check->rules && check->rules->gpu_shares) {
        if (!uses_gpus(check))
            return sluice_refuse(
                check->admission, SLUICE_REFUSED_REQUEST,
                "--gpu-share is a share of GPUs, and the job asks for none; add --gpu-mem=SIZE or --gpus=N");
    } else if (options->gpu_share)
        return sluice_refuse(
            check->admission, SLUICE_REFUSED_REQUEST,
            "--gpu-share=%u: no GPU of this cluster can be held to a share of its compute time; ask for a part of "
            "its memory with --gpu-mem=SIZE",
            options->gpu_share);
    if (options->gpu_power_w && !uses_gpus(check))
        return sluice_refuse(check->admission, SLUICE_REFUSED_REQUEST,
                             "--gpu-power=%" PRIu32
                             "W is about GPUs, and the job asks for none; add --gpus=N or --gpu-mem=SIZE, or "
                             "leave it out",
                             options->gpu_power_w);
    if (options->checkpoint_s && options->checkpoint != SLUICE_CHECKPOINT_APP)
        return sluice_refuse(check->admission, SLUICE_REFUSED_REQUEST,
                             "--checkpoint-interval is the time between signals of jobs with --checkpoint=app; add "
                             "that, or leave it out");
    if (options->checkpoint == SLUICE_CHECKPOINT_SYSTEM && !check->submission->admitted_before &&
        !check_saved_by_system(check))
        return false;
    bool shaped = options->gpu_affinity != SLUICE_AFFINITY_UNSET || options->gpu_spread;
    if (shaped && !uses_gpus(check))
        return sluice_refuse(
            check->admission, SLUICE_REFUSED_REQUEST,
            "%s is about GPUs, and the job asks for none; add --gpus=N or --gpu-mem=SIZE, or leave it out",
            options->gpu_spread ? "--gpu-spread" : "--gpu-affinity");
    if (options->gpu_spread && check->submission->max_nodes == 1)
        return sluice_refuse(
            check->admission, SLUICE_REFUSED_REQUEST,
            "--gpu-spread with one node: there is nothing to spread over; allow more nodes (-N) or leave it "
            "out");
    if (shaped && !check->slurm->places)
        sluice_notice(check->admission,
                      "--gpu-affinity and --gpu-spread have no effect here, as only Slurm chooses the GPUs");
    if (!options->gang_count)
        return true;
    if (check->submission->heterogeneous)
        return sluice_refuse(
            check->admission, SLUICE_REFUSED_REQUEST,
            "--gang=%s:%u in a heterogeneous job: its components start together anyway; leave out --gang",
            options->gang_name, options->gang_count);
    if (!check->slurm->places)
        return sluice_refuse(
            check->admission, SLUICE_REFUSED_REQUEST,
            "--gang=%s:%u: this cluster cannot start jobs together (it runs Sluice below level place); submit "
            "one job of %u nodes, or a heterogeneous job",
            options->gang_name, options->gang_count, options->gang_count);
    return true;
}

/* ---- classes of GPUs ---- */

static const struct sluice_class_rule *rule_of(const struct sluice_check *check, uint32_t class)
{
    return &check->tenant->classes[class];
}

static bool limits_memory(const struct sluice_check *check)
{
    return check->tenant->gpu_memory_mib_per_gpu != SLUICE_NO_LIMIT_64 ||
           check->tenant->gpu_memory_mib_per_job != SLUICE_NO_LIMIT_64;
}

static bool is_restricted(const struct sluice_check *check)
{
    if (!check->tenant || !check->rules)
        return false;
    for (uint32_t i = 0; i < check->rules->class_count; i++) {
        const struct sluice_class_rule *rule = rule_of(check, i);
        if (!rule->allowed || rule->gpus_per_job != SLUICE_NO_LIMIT || rule->run_time_s != SLUICE_NO_LIMIT ||
            rule->gpus_limit != SLUICE_NO_LIMIT)
            return true;
    }
    return false;
}

/* Whether anything limits the tenant in GPUs. */
static bool limits_gpus(const struct sluice_check *check)
{
    return check->tenant->gpus_per_job != SLUICE_NO_LIMIT || limits_memory(check) || is_restricted(check);
}

/* GPUs running at once are limited by class: Slurm keeps that limit, and counts only GPUs that are asked for by
 * type. */
static bool is_counted_by_type(const struct sluice_check *check)
{
    for (uint32_t i = 0; i < check->rules->class_count; i++)
        if (rule_of(check, i)->gpus_limit != SLUICE_NO_LIMIT)
            return true;
    return false;
}

static bool has_allow_list(const struct sluice_check *check)
{
    for (uint32_t i = 0; i < check->rules->class_count; i++)
        if (!rule_of(check, i)->allowed)
            return true;
    return false;
}

/* The GPU types of classes that the tenant may use, joined for a message or as alternatives of a constraint. */
static uint32_t allowed_types(const struct sluice_check *check, const char *separator, char *text, size_t size)
{
    uint32_t count = 0;
    size_t length = 0;
    text[0] = '\0';
    for (uint32_t i = 0; i < check->rules->class_count; i++) {
        const struct sluice_class *class = &check->rules->classes[i];
        for (uint32_t j = 0; rule_of(check, i)->allowed && j < class->gpu_types.count; j++, count++)
            if (length < size)
                length += (size_t)snprintf(text + length, size - length, "%s%s", count ? separator : "",
                                           class->gpu_types.items[j]);
    }
    return length < size ? count : UINT32_MAX;
}

static uint32_t whole_minutes(uint32_t seconds)
{
    return seconds >= 60 ? seconds / 60 : 1;
}

static bool check_run_time(struct sluice_check *check, uint32_t most_s, const char *where)
{
    const struct sluice_submission *submission = check->submission;
    char asked[SLUICE_DURATION_MAX], most[SLUICE_DURATION_MAX];
    if (most_s == SLUICE_NO_LIMIT)
        return true;
    uint32_t minutes = whole_minutes(most_s);
    if (submission->time_limit == 0) {
        if (!check->admission->time_limit || minutes < check->admission->time_limit)
            check->admission->time_limit = minutes;
        return true;
    }
    if (submission->time_limit <= minutes)
        return true;
    sluice_duration(submission->time_limit, asked);
    sluice_duration(minutes, most);
    return sluice_refuse(check->admission, SLUICE_REFUSED_TIME,
                         "--time=%s: account %s may run a job%s for %s at most; ask for --time=%s or less",
                         submission->time_limit == UINT32_MAX ? "UNLIMITED" : asked, check->tenant->account, where,
                         most, most);
}

/* A class by the index, for `gpus` GPUs written as `type` ("" where they came without one). */
static bool check_class(struct sluice_check *check, uint32_t class, const char *type, uint64_t gpus)
{
    const struct sluice_class_rule *rule = rule_of(check, class);
    const char *name = check->rules->classes[class].name;
    char types[SLUICE_NAME_LIST_MAX], where[SLUICE_RULES_MAX_NAME + 32];
    if (!rule->allowed) {
        allowed_types(check, ", ", types, sizeof types);
        return sluice_refuse(check->admission, SLUICE_REFUSED_LIMIT,
                             "GPUs of type %s (class %s) are not open to account %s; it may use %s", type, name,
                             check->tenant->account, types[0] ? types : "no GPUs at all");
    }
    if (gpus > rule->gpus_per_job)
        return sluice_refuse(check->admission, SLUICE_REFUSED_LIMIT,
                             "%" PRIu64
                             " GPU%s of class %s: account %s may use %u of them in one job; ask for %u or fewer",
                             gpus, plural(gpus), name, check->tenant->account, rule->gpus_per_job, rule->gpus_per_job);
    snprintf(where, sizeof where, " on GPUs of class %s", name);
    return check_run_time(check, rule->run_time_s, where);
}

static bool class_accepts(const struct sluice_check *check, uint32_t class, uint64_t gpus)
{
    const struct sluice_class_rule *rule = rule_of(check, class);
    bool in_time =
        rule->run_time_s == SLUICE_NO_LIMIT || check->submission->time_limit <= whole_minutes(rule->run_time_s);
    return rule->allowed && gpus <= rule->gpus_per_job && in_time;
}

/* The type that the constraint names, NULL for none. */
const char *sluice_type_in_constraint(const struct sluice_check *check)
{
    for (uint32_t i = 0; i < check->rules->class_count; i++) {
        struct sluice_words types = check->rules->classes[i].gpu_types;
        for (uint32_t j = 0; j < types.count; j++)
            if (sluice_has_feature(check->submission, check->admission, types.items[j]))
                return types.items[j];
    }
    return NULL;
}

/* Where limits depend on the type and the request has none: nodes with a type, or one of "a|b", and no others. */
static bool require_type(const struct sluice_check *check, const char *types)
{
    return sluice_require_feature(check->submission, types, "A GPU that your account may use", check->admission);
}

static void append(char *text, size_t size, const char *item)
{
    size_t length = strlen(text);
    snprintf(text + length, size - length, "%s%s", length ? "," : "", item);
}

/* Names each GPU once, with the count that limits are checked with: Slurm takes the last count, but adds up others. */
static bool name_gpus_once(struct sluice_check *check)
{
    const struct sluice_tres_request *request = &check->request;
    if (!request->gpus_differ)
        return true;
    if (has_any(&request->mps))
        return sluice_refuse(
            check->admission, SLUICE_REFUSED_REQUEST,
            "--gres=mps with gpu: Slurm gives a job either parts of GPUs or whole ones; leave out one");
    for (int per = 0; per < SLUICE_PER_COUNT; per++) {
        char *text = check->admission->tres[per], gpu[SLUICE_GPU_TYPE_LENGTH + 32];
        sluice_tres_without_gpus(check->submission->tres[per], text);
        for (size_t i = 0; i < request->gpu_types; i++) {
            if (!request->gpus[i].per[per])
                continue;
            sluice_gres_text(check->slurm, "gpu", request->gpus[i].type, request->gpus[i].per[per], gpu, sizeof gpu);
            append(text, sizeof check->admission->tres[per], gpu);
        }
    }
    check->admission->set_tres = true;
    return true;
}

/* Gives untyped GPUs a type: the same request with it in every count. */
static bool set_type(struct sluice_check *check, const char *type)
{
    const struct sluice_gres_counts *gpus = &check->request.gpus[0];
    if (strlen(type) > SLUICE_GPU_TYPE_LENGTH || type[strcspn(type, "|&,*()[]! \t:=/")])
        return sluice_refuse(
            check->admission, SLUICE_REFUSED_REQUEST,
            "GPU type \"%s\" of this cluster's policy cannot be asked for; report this to your administrators", type);
    for (int per = 0; per < SLUICE_PER_COUNT; per++) {
        char rest[SLUICE_TRES_TEXT_MAX], gpu[SLUICE_GPU_TYPE_LENGTH + 32] = "";
        size_t length = sluice_tres_without_gpus(check->submission->tres[per], rest);
        if (gpus->per[per])
            sluice_gres_text(check->slurm, "gpu", type, gpus->per[per], gpu, sizeof gpu);
        snprintf(check->admission->tres[per], sizeof check->admission->tres[per], "%s%s%s", rest,
                 length && gpu[0] ? "," : "", gpu);
    }
    check->admission->set_tres = true;
    memcpy(check->request.gpus[0].type, type, strlen(type) + 1);
    return true;
}

/* The classes that would accept the job: how many, and their types joined by |. The count is UINT32_MAX where they do
 * not fit. */
static uint32_t accepting_classes(const struct sluice_check *check, uint64_t gpus, char *types, size_t size,
                                  uint32_t *count)
{
    uint32_t accepting = 0;
    size_t length = 0;
    *count = 0;
    types[0] = '\0';
    for (uint32_t i = 0; i < check->rules->class_count; i++) {
        struct sluice_words words = check->rules->classes[i].gpu_types;
        if (!class_accepts(check, i, gpus))
            continue;
        accepting++;
        for (uint32_t j = 0; j < words.count && length < size; j++, (*count)++)
            length += (size_t)snprintf(types + length, size - length, "%s%s", *count ? "|" : "", words.items[j]);
    }
    if (length >= size) /* too many for a constraint */
        *count = UINT32_MAX;
    return accepting;
}

/* Every class that is open to the tenant is checked: it gives a refusal, or the run time where the job names none. */
static bool check_open_classes(struct sluice_check *check, uint64_t gpus, bool accepting_only)
{
    for (uint32_t i = 0; i < check->rules->class_count; i++)
        if (rule_of(check, i)->allowed && (!accepting_only || class_accepts(check, i, gpus)) &&
            !check_class(check, i, "", gpus))
            return false;
    return true;
}

/*
 * GPUs without a type: each class that they could come from must accept them, or the type is completed. `gres`: as a
 * type in the request; else (parts of GPUs) as a constraint.
 */
static bool check_untyped(struct sluice_check *check, bool gres, uint64_t gpus)
{
    char types[SLUICE_NAME_LIST_MAX];
    const char *type = sluice_type_in_constraint(check);
    uint32_t count;
    if (type)
        return check_class(check, sluice_rules_class_of_type(check->rules, type), type, gpus) &&
               (gres ? set_type(check, type) : require_type(check, type));
    uint32_t accepting = accepting_classes(check, gpus, types, sizeof types, &count);
    bool typed = !has_any(&check->request.shards) && is_counted_by_type(check);
    if (accepting == check->rules->class_count && !typed)
        return check_open_classes(check, gpus, false);
    if (accepting == 0)
        return check_open_classes(check, gpus, false) &&
               sluice_refuse(
                   check->admission, SLUICE_REFUSED_LIMIT,
                   "GPUs: account %s may use none; leave out the request for GPUs, or submit with another account "
                   "(-A)",
                   check->tenant->account);
    if (gres ? count == 1 : count != UINT32_MAX && !typed)
        return check_open_classes(check, gpus, true) && (gres ? set_type(check, types) : require_type(check, types));
    size_t first = strcspn(types, "|");
    for (char *at = types; *at; at++)
        *at = *at == '|' ? ' ' : *at;
    return sluice_refuse(
        check->admission, SLUICE_REFUSED_LIMIT,
        "GPUs without a type %s account %s; name the type, as in --gres=gpu:%.*s:%" PRIu64 "; it may be one of: %s",
        typed ? "are not counted in the limits of" : "could be of a class that is not open for this job to",
        check->tenant->account, (int)first, types, gpus, types);
}

/* GPUs of one class in a request: its types add up. */
static uint64_t gpus_of_class(const struct sluice_check *check, uint32_t class)
{
    uint64_t gpus = 0;
    for (size_t i = 0; i < check->request.gpu_types; i++)
        if (sluice_rules_class_of_type(check->rules, check->request.gpus[i].type) == class)
            gpus += sluice_total_of(check, &check->request.gpus[i]);
    return gpus;
}

static uint64_t each_node(const struct sluice_check *check, const struct sluice_gres_counts *counts)
{
    if (counts->per[SLUICE_PER_JOB])
        return 0;
    return larger(counts->per[SLUICE_PER_NODE], counts->per[SLUICE_PER_SOCKET] * sluice_per_socket_factor(check));
}

static void cap_nodes_to(struct sluice_check *check, uint64_t gpus_each, uint64_t gpus_per_job)
{
    if (gpus_each && gpus_per_job && gpus_per_job != SLUICE_NO_LIMIT)
        sluice_cap_nodes(check, gpus_each, gpus_per_job);
}

/* Where the number of nodes is open: not more of them than the limits on GPUs allow. */
static void cap_nodes_by_gpus(struct sluice_check *check)
{
    const struct sluice_tres_request *request = &check->request;
    uint64_t each = has_any(&request->shards) && !request->shards.per[SLUICE_PER_TASK] ? 1 : 0, widest = 0;
    for (size_t i = 0; i < request->gpu_types; i++) {
        uint64_t of_type = each_node(check, &request->gpus[i]);
        uint32_t class = request->gpus[i].type[0] ? sluice_rules_class_of_type(check->rules, request->gpus[i].type)
                                                  : SLUICE_NO_CLASS;
        each += of_type;
        if (class != SLUICE_NO_CLASS)
            cap_nodes_to(check, of_type, rule_of(check, class)->gpus_per_job);
    }
    for (uint32_t i = 0; i < check->rules->class_count; i++)
        if (rule_of(check, i)->allowed)
            widest = larger(widest, rule_of(check, i)->gpus_per_job);
    cap_nodes_to(check, each, widest);
    cap_nodes_to(check, each, check->tenant->gpus_per_job);
}

static uint64_t all_gpus(const struct sluice_check *check)
{
    const struct sluice_tres_request *request = &check->request;
    uint64_t total = has_any(&request->shards) ? sluice_shared_gpus(check) : 0;
    for (size_t i = 0; i < request->gpu_types; i++)
        total += sluice_total_of(check, &request->gpus[i]);
    if (!total && check->submission->tasks_per_gpu)
        total = (sluice_most_tasks(check) - 1) / check->submission->tasks_per_gpu + 1;
    if (has_any(&request->mps)) /* 100 are a GPU */
        total += larger(check->nodes, (sluice_total_of(check, &request->mps) - 1) / 100 + 1);
    return total;
}

/* Slurm tells types apart by this number alone, which others can have, too: gpu:xeeexeeexfee gives GPUs of type h100. */
static uint32_t slurms_number_of(const char *type)
{
    uint32_t number = 0;
    for (size_t i = 0; type[i]; i++)
        number += (uint32_t)(unsigned char)type[i] << 8 * (i % 4);
    return number;
}

/* The type of a class that Slurm takes a type of no class for; NULL: none. */
static const char *mistaken_for(const struct sluice_check *check, const char *type)
{
    for (uint32_t i = 0; i < check->rules->class_count; i++) {
        struct sluice_words types = check->rules->classes[i].gpu_types;
        for (uint32_t j = 0; j < types.count; j++)
            if (slurms_number_of(types.items[j]) == slurms_number_of(type))
                return types.items[j];
    }
    return NULL;
}

static bool check_types(struct sluice_check *check)
{
    const struct sluice_tres_request *request = &check->request;
    bool untyped = request->gpu_types == 0;
    for (size_t i = 0; i < request->gpu_types; i++) {
        const char *type = request->gpus[i].type;
        uint32_t class = sluice_rules_class_of_type(check->rules, type);
        if (!type[0] && request->gpu_types > 1)
            return sluice_refuse(check->admission, SLUICE_REFUSED_REQUEST,
                                 "GPUs with a type and GPUs without one; name the type of all of them");
        const char *same = type[0] && class == SLUICE_NO_CLASS ? mistaken_for(check, type) : NULL;
        if (same)
            return sluice_refuse(check->admission, SLUICE_REFUSED_REQUEST,
                                 "GPUs of type %s: no GPU has it, but Slurm takes it for %s; name that type", type,
                                 same);
        if (!type[0])
            untyped = true;
        else if (class != SLUICE_NO_CLASS && !check_class(check, class, type, gpus_of_class(check, class)))
            return false;
        else if (class == SLUICE_NO_CLASS && has_allow_list(check)) {
            char types[SLUICE_NAME_LIST_MAX];
            allowed_types(check, ", ", types, sizeof types);
            return sluice_refuse(check->admission, SLUICE_REFUSED_LIMIT,
                                 "GPUs of type %s belong to no class that is open to account %s; it may use %s", type,
                                 check->tenant->account, types[0] ? types : "no GPUs at all");
        }
    }
    return !untyped || check_untyped(check, request->gpu_types == 1, all_gpus(check));
}

static bool has_gpus_per_task(const struct sluice_check *check)
{
    for (size_t i = 0; i < check->request.gpu_types; i++)
        if (check->request.gpus[i].per[SLUICE_PER_TASK])
            return true;
    return false;
}

static bool check_gpus(struct sluice_check *check)
{
    uint32_t limit = check->tenant->gpus_per_job;
    if (check->submission->whole_nodes && (limit != SLUICE_NO_LIMIT || is_restricted(check)))
        return sluice_refuse(
            check->admission, SLUICE_REFUSED_LIMIT,
            "--exclusive takes all GPUs of a node, and account %s may not use all; leave it out and ask for "
            "GPUs, CPUs and memory by number",
            check->tenant->account);
    if (check->submission->tasks_per_gpu && limits_gpus(check) && has_gpus_per_task(check)) /* Slurm multiplies them */
        return sluice_refuse(check->admission, SLUICE_REFUSED_REQUEST,
                             "--ntasks-per-gpu and --gpus-per-task contradict each other; leave out one of them");
    cap_nodes_by_gpus(check);
    uint64_t total = all_gpus(check);
    if (total > limit && limit != SLUICE_NO_LIMIT)
        return sluice_refuse(
            check->admission, SLUICE_REFUSED_LIMIT,
            "%" PRIu64 " GPU%s (on %" PRIu64 " node%s): account %s may use %u in one job; ask for %u or fewer", total,
            plural(total), check->nodes, plural(check->nodes), check->tenant->account, limit, limit);
    return !is_restricted(check) || check_types(check);
}

/* The class that a request's GPUs are of: by type, else by the constraint; SLUICE_NO_CLASS where it says neither. */
static uint32_t class_of(const struct sluice_check *check, const struct sluice_gres_counts *gpus)
{
    const char *type = gpus && gpus->type[0] ? gpus->type : sluice_type_in_constraint(check);
    return type ? sluice_rules_class_of_type(check->rules, type) : SLUICE_NO_CLASS;
}

/* ---- power ---- */

/* The range that a class gives --gpu-power for this tenant; 0: not known. The node knows it, and checks again. */
static void power_range(const struct sluice_check *check, uint32_t class, uint32_t *least, uint32_t *most, bool *policy)
{
    const struct sluice_class *of = &check->rules->classes[class];
    const struct sluice_class_rule *rule = check->tenant ? rule_of(check, class) : NULL;
    uint32_t granted = !rule ? 0 : rule->power_most_w ? rule->power_most_w : rule->power_w;
    *least = of->power_most_w ? of->power_least_w : 0;
    *policy = granted && (!of->power_most_w || granted < of->power_most_w);
    *most = *policy ? granted : of->power_most_w;
}

static bool power_fits(const struct sluice_check *check, uint32_t class)
{
    uint32_t watts = check->submission->options.gpu_power_w, least, most;
    bool policy;
    power_range(check, class, &least, &most, &policy);
    return watts >= least && (!most || watts <= most);
}

static bool check_power_of(struct sluice_check *check, uint32_t class)
{
    uint32_t watts = check->submission->options.gpu_power_w, least, most;
    const char *name = check->rules->classes[class].name;
    bool policy;
    if (power_fits(check, class))
        return true;
    power_range(check, class, &least, &most, &policy);
    if (policy && watts > most)
        return sluice_refuse(check->admission, SLUICE_REFUSED_LIMIT,
                             "--gpu-power=%" PRIu32 "W: account %s may ask for %" PRIu32
                             " W at most on GPUs of class %s; ask for less, or leave it out",
                             watts, check->tenant->account, most, name);
    return sluice_refuse(check->admission, SLUICE_REFUSED_REQUEST,
                         "--gpu-power=%" PRIu32 "W: GPUs of class %s take %" PRIu32 " to %" PRIu32
                         " W; ask for a value of this range",
                         watts, name, least, most);
}

/* Each class that the request names must allow it; without a class, one of all. */
static bool check_power(struct sluice_check *check)
{
    const struct sluice_tres_request *request = &check->request;
    bool named = false, fits = false;
    if (!check->submission->options.gpu_power_w || !check->rules || !check->rules->class_count)
        return true;
    for (size_t i = 0; i < request->gpu_types || i == 0; i++) {
        uint32_t class = class_of(check, i < request->gpu_types ? &request->gpus[i] : NULL);
        if (class == SLUICE_NO_CLASS)
            continue;
        named = true;
        if (!check_power_of(check, class))
            return false;
    }
    for (uint32_t i = 0; i < check->rules->class_count && !named; i++)
        fits |= power_fits(check, i);
    return named || fits || check_power_of(check, 0);
}

/* Memory of a GPU of that class, or of the largest GPU where the class is open. 0 where the policy does not say. */
static uint64_t memory_of_gpu(const struct sluice_check *check, uint32_t class)
{
    uint64_t largest = 0;
    if (class != SLUICE_NO_CLASS)
        return check->rules->classes[class].gpu_memory_mib;
    for (uint32_t i = 0; i < check->rules->class_count; i++) {
        if (!check->rules->classes[i].gpu_memory_mib)
            return 0;
        largest = larger(largest, check->rules->classes[i].gpu_memory_mib);
    }
    return largest;
}

/* Whole GPUs where memory is limited: counted with all the memory that they have. */
static bool check_memory_of_whole(struct sluice_check *check, uint64_t per_gpu, uint64_t per_job)
{
    const struct sluice_tres_request *request = &check->request;
    char most[24], asked[24];
    uint64_t total = 0;
    bool known = request->gpu_types > 0 && !check->submission->whole_nodes;
    sluice_format_mib(per_gpu == SLUICE_NO_LIMIT_64 ? per_job : per_gpu, most, sizeof most);
    for (size_t i = 0; i < request->gpu_types && known; i++) {
        const char *type = request->gpus[i].type[0] ? NULL : sluice_type_in_constraint(check);
        if (type && !require_type(check, type))
            return false;
        uint64_t memory = memory_of_gpu(check, class_of(check, &request->gpus[i]));
        known = memory > 0 && memory <= per_gpu;
        total += mul_saturating(memory, sluice_total_of(check, &request->gpus[i]));
    }
    if (!known)
        return sluice_refuse(
            check->admission, SLUICE_REFUSED_LIMIT,
            "whole GPUs: account %s may use %s of GPU memory %s, and whole GPUs have more or cannot be held to "
            "it; ask with --gpu-mem=%s or less",
            check->tenant->account, most, per_gpu == SLUICE_NO_LIMIT_64 ? "in one job" : "of each GPU", most);
    if (total <= per_job)
        return true;
    return sluice_refuse(
        check->admission, SLUICE_REFUSED_LIMIT,
        "whole GPUs with %s of memory: account %s may use %s in one job; ask for fewer GPUs, or for parts with "
        "--gpu-mem",
        sluice_format_mib(total, asked, sizeof asked), check->tenant->account,
        sluice_format_mib(per_job, most, sizeof most));
}

static bool check_memory(struct sluice_check *check)
{
    const struct sluice_gres_counts *shards = &check->request.shards;
    uint64_t per_gpu = check->tenant->gpu_memory_mib_per_gpu, per_job = check->tenant->gpu_memory_mib_per_job;
    char asked[24], most[24], fitting_text[24];
    if (!limits_memory(check))
        return true;
    if (!has_any(shards) || check->submission->whole_nodes)
        return check_memory_of_whole(check, per_gpu, per_job);
    uint64_t one = sluice_shards_of_one_gpu(check);
    if (one > per_gpu)
        return sluice_refuse(check->admission, SLUICE_REFUSED_LIMIT,
                             "%s of one GPU's memory: account %s may use %s of each; ask for --gpu-mem=%s or less",
                             sluice_format_mib(one, asked, sizeof asked), check->tenant->account,
                             sluice_format_mib(per_gpu, most, sizeof most), most);
    if (per_job == SLUICE_NO_LIMIT_64)
        return true;
    if (shards->per[SLUICE_PER_NODE])
        sluice_cap_nodes(check, shards->per[SLUICE_PER_NODE], per_job);
    uint64_t total = sluice_total_of(check, shards);
    if (total <= per_job)
        return true;
    uint64_t gpus = larger(sluice_shared_gpus(check), 1), fitting = larger(per_job / gpus, 1);
    return sluice_refuse(
        check->admission, SLUICE_REFUSED_LIMIT,
        "%s of GPU memory on %" PRIu64 " GPU%s: account %s may use %s in one job; ask for --gpu-mem=%s or "
        "less%s",
        sluice_format_mib(total, asked, sizeof asked), gpus, plural(gpus), check->tenant->account,
        sluice_format_mib(per_job, most, sizeof most), sluice_format_mib(fitting, fitting_text, sizeof fitting_text),
        gpus > 1 ? ", or for fewer GPUs" : "");
}

/* ---- changes ---- */

static bool names_type(const struct sluice_tres_request *request, enum sluice_per per, const char *type)
{
    for (size_t i = 0; i < request->gpu_types; i++)
        if (request->gpus[i].per[per] && strcmp(request->gpus[i].type, type) == 0)
            return true;
    return false;
}

/* What a job's old request has and the new one does not name, as a user writes it; NULL: nothing. */
static const char *left_out(const struct sluice_tres_request *old, const struct sluice_tres_request *new,
                            enum sluice_per per, char *text, size_t size)
{
    for (size_t i = 0; i < old->gpu_types; i++) {
        const char *type = old->gpus[i].type;
        if (!old->gpus[i].per[per] || names_type(new, per, type))
            continue;
        snprintf(text, size, "gpu%s%s", type[0] ? ":" : "", type);
        return text;
    }
    if (old->shards.per[per] && !new->shards.per[per])
        return "shard";
    return old->mps.per[per] && !new->mps.per[per] ? "mps" : NULL;
}

/* Slurm keeps what a job asked for, type by type, unless a change names it again or is empty (gres_job_state_validate):
 * what the change does not name would not be counted. */
static bool check_replaced(struct sluice_check *check)
{
    for (int per = 0; per < SLUICE_PER_COUNT; per++) {
        struct sluice_tres_request old = {.gpu_types = 0}, new = {.gpu_types = 0};
        char why[SLUICE_OPTION_WHY_MAX], kind[SLUICE_GPU_TYPE_LENGTH + 8];
        const char *was = check->submission->replaced[per], *is = check->submission->tres[per];
        if (!was || !is || !*is || !sluice_tres_add(&old, (enum sluice_per)per, was, why, sizeof why) ||
            !sluice_tres_add(&new, (enum sluice_per)per, is, why, sizeof why))
            continue;
        const char *missing = left_out(&old, &new, (enum sluice_per)per, kind, sizeof kind);
        if (missing)
            return sluice_refuse(check->admission, SLUICE_REFUSED_REQUEST,
                                 "the job asks for %s, and would then ask for both; submit a new job for other GPUs",
                                 missing);
    }
    return true;
}

/* ---- the tenant ---- */

static bool check_account(struct sluice_check *check)
{
    const struct sluice_tenant *tenant = check->tenant;
    char when[SLUICE_STAMP_MAX];
    if (!tenant->expires_s || check->slurm->now < tenant->expires_s)
        return true;
    return sluice_refuse(check->admission, SLUICE_REFUSED_ACCOUNT,
                         "account %s expired on %s; submit with another account (-A), or ask your administrators",
                         tenant->account, sluice_stamp(tenant->expires_s, when));
}

static bool complete_partition(struct sluice_check *check)
{
    const struct sluice_tenant *tenant = check->tenant;
    const char *asked = check->submission->partition;
    char list[SLUICE_NAME_LIST_MAX];
    if (tenant->partitions.count == 0)
        return true;
    if (!asked || !*asked) {
        snprintf(check->admission->partition, SLUICE_NAME_LIST_MAX, "%s", tenant->partitions.items[0]);
        return true;
    }
    while (*asked) {
        size_t length = strcspn(asked, ",");
        if (length && !is_listed(tenant->partitions, asked, length)) {
            join(tenant->partitions, ", ", list, sizeof list);
            return sluice_refuse(
                check->admission, SLUICE_REFUSED_LIMIT, "partition %.*s: account %s may use %s; submit with -p %s",
                (int)(length < 64 ? length : 64), asked, tenant->account, list, tenant->partitions.items[0]);
        }
        asked += length + (asked[length] == ',');
    }
    return true;
}

static bool complete_features(struct sluice_check *check)
{
    struct sluice_words features = check->tenant->features;
    for (uint32_t i = 0; i < features.count; i++)
        if (!sluice_require_feature(check->submission, features.items[i], "your account", check->admission))
            return false;
    return true;
}

static bool check_gang(struct sluice_check *check)
{
    const struct sluice_submission *submission = check->submission;
    if (!submission->options.gang_count || !check->tenant || check->tenant->gang)
        return true;
    return sluice_refuse(check->admission, SLUICE_REFUSED_LIMIT,
                         "--gang=%s:%u is not open to account %s; submit without it", submission->options.gang_name,
                         submission->options.gang_count, check->tenant->account);
}

/* ---- defaults ---- */

/* What a whole GPU brings along by default. */
static void defaults_of(const struct sluice_check *check, uint32_t class, uint64_t *cpus_milli, uint64_t *memory)
{
    const struct sluice_class *rule = class == SLUICE_NO_CLASS ? NULL : &check->rules->classes[class];
    *cpus_milli = rule && rule->cpus_per_gpu_milli ? rule->cpus_per_gpu_milli : check->rules->cpus_per_gpu_milli;
    *memory = rule && rule->memory_mib_per_gpu ? rule->memory_mib_per_gpu : check->rules->memory_mib_per_gpu;
}

/* Where the user has given a number of tasks or CPUs, it is kept: each task needs a CPU. */
static bool has_counted_cpus(const struct sluice_check *check)
{
    const struct sluice_submission *submission = check->submission;
    return submission->cpus_per_tres || submission->cpus_per_task || submission->min_cpus_per_node ||
           submission->tasks > 1 || submission->tasks_per_node > 1 || submission->tasks_per_gpu ||
           check->admission->min_cpus_per_node;
}

static void complete_whole(struct sluice_check *check)
{
    struct sluice_admission *admission = check->admission;
    uint64_t cpus_milli, memory;
    defaults_of(check, class_of(check, &check->request.gpus[0]), &cpus_milli, &memory);
    if (cpus_milli && !has_counted_cpus(check)) {
        sluice_gres_text(check->slurm, "gpu", "", larger(cpus_milli / 1000, 1), admission->cpus_per_tres,
                         sizeof admission->cpus_per_tres);
        admission->set_cpus_per_tres = true;
    }
    if (memory && !check->submission->memory_asked && !check->submission->mem_per_tres) {
        sluice_gres_text(check->slurm, "gpu", "", memory, admission->mem_per_tres, sizeof admission->mem_per_tres);
        admission->set_mem_per_tres = true;
    }
}

/* A part of a GPU brings that part of the defaults along, rounded down, so that as many jobs fit as its memory
 * allows. */
static void complete_part(struct sluice_check *check)
{
    uint64_t shards = check->request.shards.per[SLUICE_PER_NODE], cpus_milli, memory;
    uint32_t class = class_of(check, NULL);
    uint64_t whole = memory_of_gpu(check, class);
    if (!shards || !whole)
        return;
    defaults_of(check, class, &cpus_milli, &memory);
    shards = shards < whole ? shards : whole;
    uint64_t cpus = mul_saturating(cpus_milli, shards) / whole / 1000;
    if (cpus > 1 && cpus < UINT16_MAX - 1 && !has_counted_cpus(check))
        check->admission->min_cpus_per_node = (uint32_t)cpus;
    if (memory && !check->submission->memory_asked && !check->submission->mem_per_tres)
        check->admission->memory_per_node_mib = larger(mul_saturating(memory, shards) / whole, 1);
}

static void complete_cpus_and_memory(struct sluice_check *check)
{
    if (check->submission->whole_nodes || check->submission->admitted_before)
        return;
    if (check->request.gpu_types == 1)
        complete_whole(check);
    else if (check->request.gpu_types == 0)
        complete_part(check);
}

void sluice_admit(const struct sluice_rules *rules, const struct sluice_tenant *tenant,
                  const struct sluice_slurm *slurm, const struct sluice_submission *submission,
                  struct sluice_admission *admission)
{
    struct sluice_check check = {
        .rules = rules, .tenant = tenant, .slurm = slurm, .submission = submission, .admission = admission};
    memset(admission, 0, sizeof *admission);
    if ((tenant && !check_account(&check)) || !read_request(&check) || !check_options(&check) || !check_gang(&check))
        return;
    check.nodes = sluice_most_nodes(&check);
    if (tenant) {
        if (!name_gpus_once(&check) || !complete_partition(&check) || !complete_features(&check) ||
            !check_run_time(&check, tenant->run_time_s, ""))
            return;
        if (!(submission->qos && *submission->qos) && tenant->qos)
            snprintf(admission->qos, sizeof admission->qos, "%s", tenant->qos);
        if (uses_gpus(&check) && limits_gpus(&check))
            sluice_bound_gaps(&check);
        if ((uses_gpus(&check) || submission->whole_nodes) && (!check_memory(&check) || !check_gpus(&check)))
            return;
        if (limits_gpus(&check) && !check_replaced(&check))
            return;
    }
    if (submission->options.nics_per_gpu && !sluice_add_nics_per_gpu(slurm, submission, &check.request, admission))
        return;
    if (!sluice_check_roles(&check) || !sluice_check_fabric(&check) || !check_power(&check) ||
        !sluice_check_deadline(&check))
        return;
    if (rules)
        complete_cpus_and_memory(&check);
}
