/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The entry points: which questions the hook answers, and in which mode. */
#include "hook/hook_internal.h"

#include "hook/gpus.h"
#include "hook/nics.h"
#include "hook/recount.h"
#include "hook/workload.h"

#include "planner/planner.h"
#include "rules/rules.h"

#include "src/common/list.h"

#include <stdlib.h>
#include <time.h>

static bool is_gpu_job(const struct sluice_job_request *request)
{
    return request->wanted.gpus > 0;
}

/* What the scheduler's question itself leaves to stock, beyond the job. */
static enum sluice_job_stock stock_alone(const struct decision *decision)
{
    const struct sluice_hook_call *call = decision->call;
    if (call->mode != SELECT_MODE_RUN_NOW && call->mode != SELECT_MODE_WILL_RUN && call->mode != SELECT_MODE_TEST_ONLY)
        return SLUICE_STOCK_CONSTRAINTS;
    if (SLUICE_REST_RESERVED(call->rest))
        return SLUICE_STOCK_RESERVED_CORES;
    if (SLUICE_REST_FUTURE(call->rest, decision->now))
        return SLUICE_STOCK_FUTURE;
    if ((uint32_t)bit_size(call->nodes) != sluice_mirror_nodes(sluice_hook.mirror))
        return SLUICE_STOCK_MIRROR;
    return SLUICE_STOCK_NONE;
}

static bool may_preempt(const struct sluice_hook_call *call)
{
    return call->preemptees && list_count(call->preemptees);
}

/* Whose reserved starts count: for a job that may preempt, not those of lower ranks; for one that has preempted, none,
 * as it would preempt again if others got what it has freed. */
static uint32_t rank_of(const struct sluice_hook_call *call)
{
    if (call->job->details->preempt_start_time)
        return UINT32_MAX;
    return may_preempt(call) ? sluice_job_rank(call->job) : 0;
}

/* Its nodes over as many leaf switches as there are: where it asks for that, or says nothing and the policy has it so.
 * What it must have of the network goes before, and --switches also when its time has passed. */
static void set_spread(struct sluice_job_request *request, const job_record_t *job, const struct sluice_rules *rules)
{
    const uint32_t class = request->gpu_type ? sluice_rules_class_of_type(rules, request->gpu_type) : SLUICE_NO_CLASS;
    const bool policy = class == SLUICE_NO_CLASS ? rules->spread_nodes : rules->classes[class].spread_nodes;
    const bool silent = request->fabric == SLUICE_FABRIC_UNSET && !job->req_switch;
    if (request->fabric != SLUICE_FABRIC_SPREAD && !(policy && silent))
        return;
    struct sluice_request *requests[] = {&request->wanted, &request->wider};
    for (size_t i = 0; i < (request->has_wider ? 2 : 1); i++)
        if (requests[i]->nodes_max > 1 && !requests[i]->one_switch && !(requests[i]->flags & SLUICE_GPUS_TOTAL))
            requests[i]->switch_layout = SLUICE_SPREAD;
}

static int decide(struct decision *decision)
{
    const struct sluice_hook_call *call = decision->call;
    sluice_job_request_make(sluice_hook.mirror, call->job, call->min_nodes, call->max_nodes, call->req_nodes,
                            &decision->request, &decision->shape);
    const struct sluice_settings *settings = sluice_settings_acquire();
    if (sluice_mirror_has_switches(sluice_hook.mirror))
        set_spread(&decision->request, call->job, settings->rules);
    sluice_job_request_set_planes(&decision->request, settings->rules);
    sluice_settings_release(settings);
    sluice_hook_read_power(decision);
    enum sluice_job_stock reason = stock_alone(decision);
    if (!reason && decision->request.fit == SLUICE_JOB_STOCK)
        reason = decision->request.reason;
    bool place_level = decision->level == SLUICE_LEVEL_PLACE;
    if (call->mode == SELECT_MODE_RUN_NOW)
        sluice_hook.kept_job = SLUICE_REST_RESERVED(call->rest) ? call->job->job_id : 0;
    if (reason) {
        count(sluice_hook.stock_alone);
        count(sluice_hook.by_reason[reason]);
        return place_level && reason != SLUICE_STOCK_MIRROR ? sluice_hook_left_to_stock(decision, may_preempt(call))
                                                            : sluice_hook_ask_stock(decision, call->preemptees);
    }
    decision->placement = (struct sluice_placement){
        .parts = sluice_hook.parts,
        .part_capacity = sluice_mirror_nodes(sluice_hook.mirror) + 1,
    };
    if (is_gpu_job(&decision->request) && !seen_by_stock(call->job))
        sluice_workload_arrival(&decision->request.wanted);
    if (call->mode == SELECT_MODE_TEST_ONLY)
        return place_level ? sluice_hook_test_only(decision) : sluice_hook_ask_stock(decision, call->preemptees);
    if (!place_level)
        return sluice_hook_shadow(decision);
    if (call->mode == SELECT_MODE_WILL_RUN)
        return sluice_hook_will_run(decision);
    return may_preempt(call) ? sluice_hook_run_now_preempting(decision) : sluice_hook_run_now(decision);
}

/* Without the mirror stock alone decides; but there is no plan either, and so no job starts that needs watts. */
static int without_mirror(struct decision *decision)
{
    job_record_t *job = decision->call->job;
    const struct sluice_settings *settings = sluice_settings_acquire();
    const struct sluice_gpus_asked asked = sluice_job_gpus_asked(job);
    const bool keep = decision->level == SLUICE_LEVEL_PLACE && decision->call->mode == SELECT_MODE_RUN_NOW &&
                      settings->rules->budget_count && (asked.gpus || asked.shares);
    sluice_settings_release(settings);
    if (!keep)
        return sluice_hook_ask_stock(decision, decision->call->preemptees);
    count(sluice_hook.kept_waiting);
    return refuse(job);
}

/* Components of a heterogeneous job start one after another once backfill has found that each can start now; where one is
 * refused then, those that have started are requeued, for two minutes or more. So it must not find that. */
static bool may_start(const struct sluice_hook_call *call)
{
    return call->mode == SELECT_MODE_RUN_NOW || (call->mode == SELECT_MODE_WILL_RUN && call->job->het_job_id);
}

/* ---- entry points ---- */

int sluice_hook_test(const struct sluice_hook_call *call)
{
    struct decision decision = {.call = call, .level = sluice_settings_level(), .rc = SLURM_ERROR};
    if (call->mode == SELECT_MODE_RUN_NOW) {
        sluice_watts_set_cap(call->job, 0); /* of an earlier start: budgets may have been removed since */
        sluice_hook_forget_roles(call->job);
    }
    if (decision.level > SLUICE_LEVEL_OFF && call->job->details && may_start(call))
        sluice_recount_keep_out(call->job, call->nodes);
    if (decision.level < SLUICE_LEVEL_SHADOW || !sluice_hook.mirror || !call->job->details) {
        sluice_hook.following = sluice_hook.following && decision.level >= SLUICE_LEVEL_SHADOW;
        return without_mirror(&decision);
    }
    uint64_t begin = sluice_now_ns();
    decision.now = time(NULL);
    if (call->mode == SELECT_MODE_RUN_NOW && sluice_gang_refuses(call->job)) {
        count(sluice_hook.kept_waiting);
        return refuse(call->job);
    }
    if (call->mode == SELECT_MODE_RUN_NOW && call->job->req_switch && !call->job->wait4switch_start)
        call->job->wait4switch_start = decision.now; /* as topology/tree does; others do not count the time */
    if (!sluice_hook_follow(decision.now))
        return without_mirror(&decision);
    sluice_hook_check_mirror();
    const struct sluice_settings *settings = sluice_settings_acquire();
    decision.policy = settings->rules->placement;
    sluice_settings_release(settings);
    if (decision.level == SLUICE_LEVEL_PLACE && call->mode != SELECT_MODE_TEST_ONLY)
        decision.plan = sluice_plan_acquire(decision.now);
    decision.question = (struct sluice_plan_question){
        .job_id = call->job->job_id,
        .limit_s = call->job->time_limit == NO_VAL || call->job->time_limit == INFINITE
                       ? 0
                       : (int64_t)call->job->time_limit * 60,
        .now_s = decision.now,
        .rank = rank_of(call),
    };
    decision.rc = decide(&decision);
    sluice_hook_layout(&decision);
    int rc = sluice_hook_power(&decision);
    sluice_plan_release(decision.plan);
    sluice_hook_count_time((sluice_now_ns() - begin - decision.stock_ns) / 1000);
    return rc;
}

void sluice_hook_begin(job_record_t *job)
{
    if (sluice_settings_level() != SLUICE_LEVEL_PLACE || !sluice_hook.following || !job->job_resrcs ||
        sluice_hook.kept_job == job->job_id)
        return;
    if (sluice_hook.chosen_job != job->job_id ||
        !sluice_gpus_same_nodes(job, sluice_hook.chosen, sluice_hook.chosen_count)) {
        /* Stock chose the nodes: the core still chooses their GPUs. */
        struct sluice_job_request request;
        struct sluice_placement placement = {.parts = sluice_hook.chosen,
                                             .part_capacity = sluice_mirror_nodes(sluice_hook.mirror) + 1};
        sluice_hook.chosen_job = 0;
        sluice_job_request_make(sluice_hook.mirror, job, 0, 0, 0, &request, NULL);
        if (request.fit == SLUICE_JOB_STOCK || !request.gpus_by_node)
            return;
        size_t words;
        int64_t nodes = bit_set_count(job->job_resrcs->node_bitmap);
        request.wanted.allowed = sluice_bitmap_words(job->job_resrcs->node_bitmap, &words);
        request.wanted.allowed_words = words;
        request.wanted.nodes_min = request.wanted.nodes_max = nodes;
        request.wanted.segment = 0; /* which nodes is settled */
        request.wanted.one_switch = SLUICE_ANY;
        request.wanted.lower_switches = 0;
        request.wanted.cpus_milli = request.wanted.cpus_milli_per_gpu = 0;
        request.wanted.host_memory_mib = request.wanted.host_memory_mib_per_gpu = 0;
        const struct sluice_settings *settings = sluice_settings_acquire();
        sluice_job_request_set_planes(&request, settings->rules);
        enum sluice_error verdict = sluice_place(sluice_mirror_cluster(sluice_hook.mirror), settings->rules->placement,
                                                 &request.wanted, &placement, NULL);
        sluice_settings_release(settings);
        if (verdict)
            return;
        sluice_hook.chosen_job = job->job_id;
        sluice_hook.chosen_count = placement.part_count;
        if (!request.wanted.one_link_domain && !request.wanted.one_numa_node)
            for (uint32_t i = 0; i < placement.part_count; i++)
                sluice_nics_pair(sluice_hook.mirror, job, &placement.parts[i]);
    }
    if (!sluice_gpus_choose(sluice_hook.mirror, job, sluice_hook.chosen, sluice_hook.chosen_count))
        count(sluice_hook.index_denied);
}

void sluice_hook_started(job_record_t *job)
{
    if (!sluice_hook.mirror)
        return;
    if (sluice_settings_level() < SLUICE_LEVEL_SHADOW) {
        sluice_hook.following = false;
        return;
    }
    if (!sluice_hook.following || !job->job_resrcs)
        return;
    sluice_mirror_job_changed(sluice_hook.mirror, job, SLUICE_MIRROR_RUNS);
    uint32_t held_count = 0;
    const struct sluice_part *held = sluice_mirror_parts(sluice_hook.mirror, job->job_id, &held_count);
    sluice_plan_job_started(job->job_id, job->array_job_id, held, held_count, job->end_time,
                            sluice_hook.powered_job == job->job_id ? &sluice_hook.power : NULL);
    sluice_hook.powered_job = 0;
    struct sluice_hook_roles roles = {.gpus = NULL};
    sluice_hook_lay_out(job, held, held_count, &roles);
    struct sluice_decision_recorder *recorder = sluice_decision_shared();
    if (recorder) {
        struct sluice_decision_job facts = sluice_hook_job_facts(job, NULL);
        sluice_decision_started(recorder, &facts, held, held_count, &roles.said);
    }
    free(roles.gpus);
    if (sluice_hook.chosen_job == job->job_id) {
        uint32_t asked = 0, kept = 0;
        sluice_gpus_compare(job, sluice_hook.chosen, sluice_hook.chosen_count, &asked, &kept);
        atomic_fetch_add_explicit(sluice_hook.index_asked, asked ? 1 : 0, memory_order_relaxed);
        atomic_fetch_add_explicit(sluice_hook.index_kept, asked && kept == asked ? 1 : 0, memory_order_relaxed);
    }
    sluice_hook.chosen_job = 0;
    uint64_t begin = sluice_now_ns();
    sluice_workload_refresh(sluice_hook.mirror, time(NULL));
    note_time(sluice_hook.workload_us_most, begin);
}

void sluice_hook_changed(job_record_t *job, enum sluice_mirror_job what)
{
    if (!sluice_hook.mirror)
        return;
    if (sluice_settings_level() < SLUICE_LEVEL_SHADOW)
        sluice_hook.following = false;
    if (sluice_hook.following)
        sluice_mirror_job_changed(sluice_hook.mirror, job, what);
    sluice_plan_room_came(job);
    sluice_plan_wake();
}

void sluice_hook_reconfigured(void)
{
    sluice_hook.following = false;
    sluice_plan_invalidate();
    sluice_nics_read();
}

void sluice_hook_share_created(void)
{
    for (int n = 0; share_node_bitmap && n < node_record_count; n++) {
        const node_record_t *node = node_record_table_ptr[n];
        if (node && IS_NODE_DYNAMIC_NORM(node) && !node->no_share_job_cnt)
            bit_set(share_node_bitmap, n);
    }
}
