/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What happens in each mode of the question (hook.h). */
#include "hook/hook_internal.h"

#include "hook/recount.h"

#include "src/common/list.h"

enum { PUT_OFF_S = 60 }; /* by how much a start is put off that would delay others */

static bool cross_check(void)
{
    if (!sluice_hook.cross_permille)
        return false;
    sluice_hook.random = sluice_hook.random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (sluice_hook.random >> 33) % 1000 < sluice_hook.cross_permille;
}

int sluice_hook_run_now(struct decision *decision)
{
    const struct sluice_hook_call *call = decision->call;
    uint64_t *candidates = words_of(call->nodes);
    enum sluice_decision_outcome outcome = SLUICE_DECISION_OVERRULED;
    sluice_hook.chosen_job = 0;
    sluice_hook_choose(decision, true);
    if (!decision->verdict && !sluice_hook_start_narrowed(decision)) {
        sluice_hook_record(decision, SLUICE_DECISION_RUN_NOW, SLUICE_DECISION_USED);
        return sluice_hook_part_overlaps(decision);
    }
    if (decision->verdict) {
        outcome = SLUICE_DECISION_STOCK_FOUND;
        if (sluice_hook_proven(decision, sluice_hook.saved)) {
            bool reserved = decision->by_plan;
            outcome = reserved ? SLUICE_DECISION_RESERVED : SLUICE_DECISION_REFUSED;
            count(sluice_hook.refused);
            if (!cross_check()) {
                sluice_hook_record(decision, SLUICE_DECISION_RUN_NOW, outcome);
                return refuse(call->job);
            }
            count(sluice_hook.cross_checked);
        }
    }
    restore_nodes(decision);
    sluice_plan_keep_out(decision->plan, &decision->question, true, candidates, sluice_hook.words);
    sluice_hook_keep_out_power(decision, candidates);
    memcpy(sluice_hook.saved, candidates, sluice_hook.words * sizeof(*sluice_hook.saved));
    sluice_hook_ask_stock(decision, NULL);
    /* The core is right to refuse what stock can only give out twice, or against what the job asks of the network. */
    int rc = sluice_hook_part_overlaps(decision);
    if (rc == SLURM_SUCCESS)
        rc = sluice_hook_layout(decision);
    if (rc == SLURM_SUCCESS && (outcome == SLUICE_DECISION_REFUSED || outcome == SLUICE_DECISION_RESERVED)) {
        count(sluice_hook.cross_wrong);
        error("select/sluice: %pJ: the core proved that it cannot start, but stock Slurm starts it on %s", call->job,
              call->job->job_resrcs ? call->job->job_resrcs->nodes : "unknown nodes");
        outcome = SLUICE_DECISION_STOCK_FOUND;
    } else if (rc && outcome == SLUICE_DECISION_STOCK_FOUND) {
        outcome = SLUICE_DECISION_REFUSED;
    }
    sluice_hook_record(decision, SLUICE_DECISION_RUN_NOW, outcome);
    return rc;
}

int sluice_hook_will_run(struct decision *decision)
{
    const struct sluice_hook_call *call = decision->call;
    if (sluice_hook_segments_never(decision)) /* sbatch --test-only asks nothing else before */
        return SLUICE_NEVER_IN_TOPOLOGY;
    sluice_hook_choose(decision, false);
    if (!decision->verdict) {
        /* Without this, stock would simulate the future of only the chosen nodes if it finds no place now. */
        uint64_t flag = call->job->bit_flags & TEST_NOW_ONLY;
        call->job->bit_flags |= TEST_NOW_ONLY;
        int rc = sluice_hook_ask_stock_narrowed(decision);
        if (!flag)
            call->job->bit_flags &= ~(uint64_t)TEST_NOW_ONLY;
        if (rc == SLURM_SUCCESS) {
            sluice_hook_record(decision, SLUICE_DECISION_WILL_RUN, SLUICE_DECISION_USED);
            return rc;
        }
        restore_nodes(decision);
    }
    int rc = sluice_hook_ask_stock(decision, call->preemptees);
    if (rc == SLURM_SUCCESS && !call->preemptees) {
        struct sluice_plan_answer answer = sluice_plan_ask(decision->plan, call->job->job_id);
        if (answer.state == SLUICE_PLAN_LATER && call->job->start_time < answer.start_s)
            call->job->start_time = answer.start_s;
        /* Stock counts no compute, and keeps segments in blocks only: all that it knows of may be there. */
        const struct sluice_request *wanted = &decision->request.wanted;
        if (decision->verdict && (wanted->gpu_compute_percent || wanted->segment > 1) &&
            call->job->start_time <= decision->now && sluice_hook_proven(decision, sluice_hook.saved))
            call->job->start_time = decision->now + PUT_OFF_S;
    }
    sluice_hook_record(decision, SLUICE_DECISION_WILL_RUN,
                       decision->verdict ? SLUICE_DECISION_STOCK_FOUND : SLUICE_DECISION_OVERRULED);
    return rc;
}

int sluice_hook_test_only(struct decision *decision)
{
    const struct sluice_hook_call *call = decision->call;
    const job_record_t *job = call->job;
    const uint64_t *nodes = NULL;
    int rc;
    if (sluice_hook_segments_never(decision))
        return SLUICE_NEVER_IN_TOPOLOGY;
    if (sluice_hook.cache_part_update != last_part_update) {
        sluice_cache_clear(sluice_hook.cache);
        sluice_hook.cache_part_update = last_part_update;
    }
    /* Stock works out some of a job's record at its first look: it gets that look, at the known nodes. */
    bool seen = seen_by_stock(job);
    save_nodes(decision);
    if (sluice_cache_find(sluice_hook.cache, &decision->shape, sluice_hook.saved, &rc, &nodes)) {
        if (seen && !cross_check()) {
            if (rc == SLURM_SUCCESS)
                memcpy(words_of(call->nodes), nodes, sluice_hook.words * sizeof(*nodes));
            count(sluice_hook.remembered);
            return rc;
        }
        if (rc == SLURM_SUCCESS && !seen) {
            memcpy(words_of(call->nodes), nodes, sluice_hook.words * sizeof(*nodes));
            if (sluice_hook_ask_stock(decision, call->preemptees) == SLURM_SUCCESS) {
                count(sluice_hook.remembered);
                return SLURM_SUCCESS;
            }
            restore_nodes(decision);
        } else {
            count(sluice_hook.cross_checked);
            if ((sluice_hook_ask_stock(decision, call->preemptees) == SLURM_SUCCESS) != (rc == SLURM_SUCCESS)) {
                count(sluice_hook.cross_wrong);
                error("select/sluice: %pJ: remembered: such a job can%s run; stock Slurm's answer now: %d", job,
                      rc == SLURM_SUCCESS ? "" : " never", decision->rc);
                sluice_cache_clear(sluice_hook.cache);
            }
            return decision->rc;
        }
    }
    count(sluice_hook.stock_tests);
    rc = sluice_hook_ask_stock(decision, call->preemptees);
    /* The job's record may say more now than before the first look: an answer is kept under what it says afterwards. */
    struct sluice_job_request again;
    sluice_job_request_make(sluice_hook.mirror, call->job, call->min_nodes, call->max_nodes, call->req_nodes, &again,
                            &decision->shape);
    if (!sluice_recount_waits())
        sluice_cache_put(sluice_hook.cache, &decision->shape, sluice_hook.saved, rc, words_of(call->nodes));
    return rc;
}

/* ---- level shadow ---- */

int sluice_hook_shadow(struct decision *decision)
{
    uint16_t mode = decision->call->mode;
    bool start = mode == SELECT_MODE_RUN_NOW;
    sluice_hook_set_allowed(decision, start);
    sluice_hook_ask_core(decision);
    count(sluice_hook.shadowed);
    sluice_hook_ask_stock(decision, decision->call->preemptees);
    sluice_hook_record(decision, start ? SLUICE_DECISION_RUN_NOW : SLUICE_DECISION_WILL_RUN, SLUICE_DECISION_SHADOWED);
    return decision->rc;
}

/* ---- left to stock ---- */

/* Take away the nodes on which a start now could delay a reserved one, but not those that the plan has for the job now:
 * what it takes there was counted. `before`: the candidates as they were. */
static void keep_out(const struct decision *decision, const uint64_t *before, uint64_t *candidates)
{
    struct sluice_plan_answer answer = sluice_plan_ask(decision->plan, decision->call->job->job_id);
    sluice_plan_keep_out(decision->plan, &decision->question, true, candidates, sluice_hook.words);
    for (uint32_t i = 0; answer.state == SLUICE_PLAN_NOW && i < answer.part_count; i++) {
        uint32_t node = answer.parts[i].node;
        if (node / 64 < sluice_hook.words)
            candidates[node / 64] |= before[node / 64] & (UINT64_C(1) << node % 64);
    }
}

/* Stock's answer that the job can start now is put off where that would delay a reserved start, or no watts are free:
 * sched/backfill would try, and be refused. Of a heterogeneous job it would have started some components by then, and
 * would queue them again for 20 minutes; those that it counts as started would be counted twice (acct_policy.c,
 * accrue_cnt). */
static void put_off(const struct decision *decision)
{
    const struct sluice_hook_call *call = decision->call;
    if (call->job->start_time > decision->now)
        return;
    memcpy(sluice_hook.tried, words_of(call->nodes), sluice_hook.words * sizeof(*sluice_hook.tried));
    keep_out(decision, words_of(call->nodes), sluice_hook.tried);
    if (!same_words(sluice_hook.tried, words_of(call->nodes)) || sluice_hook_lacks_power(decision))
        call->job->start_time = decision->now + PUT_OFF_S;
}

int sluice_hook_left_to_stock(struct decision *decision, bool preempting)
{
    const struct sluice_hook_call *call = decision->call;
    const job_record_t *job = call->job;
    /* The plan does not know of it, and may have reserved starts for jobs after it: those do not count. */
    const struct sluice_plan_place place = {
        .tier = job->part_ptr ? job->part_ptr->priority_tier : 0, .priority = job->priority, .job_id = job->job_id};
    const enum sluice_plan_state state = sluice_plan_ask(decision->plan, job->job_id).state;
    if (state == SLUICE_PLAN_UNKNOWN || state == SLUICE_PLAN_WATTS)
        decision->question.place = &place;
    if (call->mode == SELECT_MODE_WILL_RUN) {
        int rc = sluice_hook_ask_stock(decision, call->preemptees);
        if (rc == SLURM_SUCCESS && !preempting)
            put_off(decision);
        return rc;
    }
    if (call->mode != SELECT_MODE_RUN_NOW)
        return sluice_hook_ask_stock(decision, call->preemptees);
    sluice_hook.chosen_job = 0;
    /* Components of a heterogeneous job start together or not: they were put off, or none is refused. */
    if (!preempting && !call->job->het_job_id) {
        memcpy(sluice_hook.tried, words_of(call->nodes), sluice_hook.words * sizeof(*sluice_hook.tried));
        keep_out(decision, sluice_hook.tried, words_of(call->nodes));
        sluice_hook_keep_out_power(decision, words_of(call->nodes));
    }
    save_nodes(decision);
    sluice_hook_ask_stock(decision, call->preemptees);
    return sluice_hook_part_overlaps(decision);
}
