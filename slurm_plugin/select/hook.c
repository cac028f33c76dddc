/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "hook.h"

#include "cache.h"
#include "gpus.h"
#include "recount.h"
#include "workload.h"

#include "controller/clock.h"
#include "controller/decision.h"
#include "controller/gang.h"
#include "controller/log.h"
#include "controller/mirror.h"
#include "controller/plan.h"
#include "controller/request.h"
#include "controller/settings.h"
#include "controller/status.h"
#include "policy/policy.h"

#include "src/common/list.h"
#include "src/common/xmalloc.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* How often the core may choose again, when the plan keeps its choice for others or a node turns out to differ. */
enum { TRIES = 4 };
enum { PUT_OFF_S = 60 }; /* by how much a start is put off that would delay others */
enum { CACHE_ENTRIES = 512 };
/* Boundaries of the histogram of the hook's own time, in microseconds. */
static const uint32_t own_us[] = {5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 150, 200, 500, 1000};
enum { OWN_CLASSES = sizeof(own_us) / sizeof(own_us[0]) + 1 };

typedef _Atomic uint64_t counter;

static struct {
    sluice_stock_test stock;
    struct sluice_mirror *mirror;
    bool following; /* the mirror was told of everything since its last sync */
    bool failed;    /* said in the log: the mirror cannot be made */
    uint64_t mirror_built;
    uint64_t generation;
    size_t words;
    uint64_t *allowed, *up, *tried, *saved; /* scratch bitmaps of candidates */
    struct sluice_part *parts;              /* of the core's choice */
    struct sluice_cache *cache;
    time_t cache_part_update;
    struct sluice_preemption *preemption;
    struct sluice_candidate *candidates;
    job_record_t **candidate_jobs;
    uint32_t *victims;
    uint32_t candidate_room;

    /* what was chosen for the job that is about to start */
    uint32_t chosen_job;
    uint32_t chosen_count;
    struct sluice_part *chosen;

    uint32_t cross_permille; /* refusals and remembered answers that stock is asked about, too; for tests */
    uint32_t check_every;    /* decisions between checks of the whole mirror; 0: never; for tests */
    uint64_t random;
    uint64_t decisions;

    counter *asked, *stock_alone, *narrowed, *fell_back, *refused, *shadowed, *kept_waiting, *cross_checked,
        *cross_wrong, *remembered, *stock_tests, *preempted, *index_asked, *index_kept, *index_denied, *overlaps_moved,
        *overlaps_refused, *checks, *check_failures, *mirror_builds, *mirror_mismatches, *follow_us_most,
        *workload_us_most, *nothing_allocated, *own[OWN_CLASSES], *by_reason[SLUICE_STOCK_COUNT];
} hook;

/* ---- small things ---- */

static void count(counter *which)
{
    atomic_fetch_add_explicit(which, 1, memory_order_relaxed);
}

/* Keep the longest. */
static void note_time(counter *most, uint64_t begin_ns)
{
    uint64_t us = (sluice_now_ns() - begin_ns) / 1000;
    if (us > atomic_load_explicit(most, memory_order_relaxed))
        atomic_store_explicit(most, us, memory_order_relaxed);
}

static uint64_t *words_of(bitstr_t *bitmap)
{
    size_t words;
    return (uint64_t *)(uintptr_t)sluice_bitmap_words(bitmap, &words);
}

static bool any_of(const uint64_t *a, const uint64_t *b)
{
    for (size_t w = 0; w < hook.words; w++)
        if (a[w] & b[w])
            return true;
    return false;
}

static bool same_words(const uint64_t *a, const uint64_t *b)
{
    return !memcmp(a, b, hook.words * sizeof(*a));
}

static void set_nodes(bitstr_t *bitmap, const struct sluice_part *parts, uint32_t part_count)
{
    uint64_t *words = words_of(bitmap);
    memset(words, 0, hook.words * sizeof(*words));
    for (uint32_t i = 0; i < part_count; i++)
        words[parts[i].node / 64] |= UINT64_C(1) << (parts[i].node % 64);
}

static bool is_gpu_job(const struct sluice_job_request *request)
{
    return request->wanted.gpus > 0;
}

/* ---- one decision ---- */

struct decision {
    const struct sluice_hook_call *call;
    enum sluice_level level;
    enum sluice_policy policy;
    time_t now;
    struct sluice_job_request request;
    struct sluice_job_shape shape;
    const struct sluice_request *used; /* the core answered this one, `allowed` included */
    enum sluice_error verdict;
    struct sluice_placement placement;
    struct sluice_plan *plan;
    struct sluice_plan_question question;
    bool by_plan; /* the plan kept some nodes for others */
    bool planned; /* the answer is the plan's, not the core's to `used` */
    uint64_t core_ns, stock_ns;
    bool stock_answered;
    int rc;
};

/*
 * Has stock said that the job starts, with nothing allocated and nobody preempted? Its search for whom to preempt takes
 * nodes that still complete another job for free, and may so find a place where nobody has to go (_run_now in its
 * job_test.c). slurmctld would log an error, and have the job wait with half of a start in its record.
 */
static bool starts_with_nothing(const struct decision *decision)
{
    const struct sluice_hook_call *call = decision->call;
    return decision->level == SLUICE_LEVEL_PLACE && call->mode == SELECT_MODE_RUN_NOW && !call->job->job_resrcs &&
           !(call->preempted && *call->preempted);
}

static int counted_for_all_nodes(void *item, void *argument)
{
    const gres_state_t *state = item;
    const gres_job_state_t *gres = state->gres_data;
    (void)argument;
    return gres && gres->gres_per_job ? -1 : 0;
}

/* A job that must not be spread, as slurmctld would end. */
static bool dangerous(const struct decision *decision)
{
    const job_record_t *job = decision->call->job;
    return SLUICE_SPREAD_ENDS_SLURMCTLD && decision->level >= SLUICE_LEVEL_ADMIT && (job->bit_flags & SPREAD_JOB) &&
           job->gres_list_req && list_for_each_ro(job->gres_list_req, counted_for_all_nodes, NULL) < 0;
}

/* Stock's function, timed; on all of the candidates where `nodes` is not 0: they are the choice. */
static int ask_stock_on(struct decision *decision, uint32_t nodes, struct xlist *preemptees,
                        struct sluice_job_test_rest rest)
{
    const struct sluice_hook_call *call = decision->call;
    uint64_t begin = sluice_now_ns(), spread = dangerous(decision) ? SPREAD_JOB : 0;
    call->job->bit_flags &= ~spread;
    int rc = hook.stock(call->job, call->nodes, nodes ? nodes : call->min_nodes, call->max_nodes,
                        nodes ? nodes : call->req_nodes, call->mode, preemptees, call->preempted,
                        SLUICE_REST_ARGUMENTS(rest));
    call->job->bit_flags |= spread;
    decision->stock_ns += sluice_now_ns() - begin;
    decision->stock_answered = true;
    if (rc == SLURM_SUCCESS && starts_with_nothing(decision)) {
        count(hook.nothing_allocated);
        rc = SLURM_ERROR;
    }
    decision->rc = rc;
    return rc;
}

static int ask_stock(struct decision *decision, struct xlist *preemptees)
{
    return ask_stock_on(decision, 0, preemptees, decision->call->rest);
}

/* The core's choice within a set of nodes, those of low weight first. */
static enum sluice_error place_within(struct decision *decision, struct sluice_request *request, const uint64_t *within)
{
    struct sluice_cluster *cluster = sluice_mirror_cluster(hook.mirror);
    uint32_t weights = sluice_mirror_weights(hook.mirror);
    request->allowed = within;
    request->allowed_words = hook.words;
    decision->used = request;
    enum sluice_error verdict = sluice_place(cluster, decision->policy, request, &decision->placement, NULL);
    for (uint32_t weight = 0; !verdict && weight + 1 < weights; weight++) {
        const uint64_t *light = sluice_mirror_light(hook.mirror, weight);
        for (size_t w = 0; w < hook.words; w++)
            hook.tried[w] = within[w] & light[w];
        request->allowed = hook.tried;
        if (!sluice_place(cluster, decision->policy, request, &decision->placement, NULL))
            return SLUICE_OK;
        request->allowed = within;
        if (weight + 2 == weights)
            verdict = sluice_place(cluster, decision->policy, request, &decision->placement, NULL);
    }
    return verdict;
}

/* ... and those that are up. */
static enum sluice_error place(struct decision *decision, struct sluice_request *request)
{
    const uint64_t *down = SLUICE_POWERED_DOWN ? words_of(SLUICE_POWERED_DOWN) : NULL;
    const uint64_t *booting = booting_node_bitmap ? words_of(booting_node_bitmap) : NULL;
    if ((down && any_of(hook.allowed, down)) || (booting && any_of(hook.allowed, booting))) {
        for (size_t w = 0; w < hook.words; w++)
            hook.up[w] = hook.allowed[w] & ~(down ? down[w] : 0) & ~(booting ? booting[w] : 0);
        if (!place_within(decision, request, hook.up))
            return SLUICE_OK;
    }
    return place_within(decision, request, hook.allowed);
}

/* Do the chosen nodes' GPUs look in Slurm as in the mirror? */
static bool choice_agrees(const struct decision *decision)
{
    bool agrees = true;
    for (uint32_t i = 0; i < decision->placement.part_count; i++)
        agrees &= sluice_mirror_node_agrees(hook.mirror, decision->placement.parts[i].node);
    return agrees;
}

/* The core's answer for the candidates in hook.allowed. */
static void ask_core(struct decision *decision)
{
    uint64_t begin = sluice_now_ns();
    struct sluice_job_request *request = &decision->request;
    decision->verdict = SLUICE_ERROR_NO_PLACE;
    for (int try = 0; try < TRIES; try++) {
        decision->verdict = place(decision, &request->wanted);
        if (decision->verdict && request->has_wider)
            decision->verdict = place(decision, &request->wider);
        if (decision->verdict || choice_agrees(decision))
            break;
        decision->verdict = SLUICE_ERROR_BUSY; /* the mirror was corrected: once more */
    }
    decision->core_ns += sluice_now_ns() - begin;
    count(hook.asked);
}

/* As ask_core, for a start that must not delay those that are reserved for others. */
static void ask_core_and_plan(struct decision *decision)
{
    for (int try = 0; try < TRIES; try++) {
        ask_core(decision);
        if (decision->verdict)
            return;
        if (sluice_plan_allows_start(decision->plan, &decision->question, decision->placement.parts,
                                     decision->placement.part_count))
            return;
        decision->by_plan = true;
        decision->verdict = SLUICE_ERROR_NO_PLACE;
        for (uint32_t i = 0; i < decision->placement.part_count; i++) {
            const struct sluice_part *part = &decision->placement.parts[i];
            if (!sluice_plan_allows_start(decision->plan, &decision->question, part, 1))
                hook.allowed[part->node / 64] &= ~(UINT64_C(1) << (part->node % 64));
        }
    }
    decision->planned = true; /* the plan allows none of those that the core would take */
}

/* Is what the plan had for it still free? */
static bool free_now(const struct sluice_part *part)
{
    struct sluice_node_view view;
    if (sluice_node_read(sluice_mirror_cluster(hook.mirror), part->node, &view, NULL) ||
        view.cpus_milli_free < part->cpus_milli || view.host_memory_mib_free < part->host_memory_mib)
        return false;
    for (uint32_t i = 0; i < view.gpu_count; i++)
        if ((part->gpus >> i & 1) &&
            (part->gpu_memory_mib ? view.gpu_memory_mib_free[i] < part->gpu_memory_mib : !(view.gpus_idle >> i & 1)))
            return false;
    return true;
}

/* What the plan has for the job now, if it can be had. */
static bool take_from_plan(struct decision *decision, const uint64_t *candidates)
{
    struct sluice_plan_say say = sluice_plan_ask(decision->plan, decision->call->job->job_id);
    if (say.state != SLUICE_PLAN_NOW || !say.part_count || say.part_count > decision->placement.part_capacity)
        return false;
    for (uint32_t i = 0; i < say.part_count; i++) {
        uint32_t node = say.parts[i].node;
        if (node >= hook.words * 64 || !(candidates[node / 64] >> (node % 64) & 1) || !free_now(&say.parts[i]))
            return false;
    }
    memcpy(decision->placement.parts, say.parts, say.part_count * sizeof(*say.parts));
    decision->placement.part_count = say.part_count;
    decision->placement.score = 0;
    return choice_agrees(decision);
}

/* Has stock looked at the job before? Then it has completed its record. */
static bool seen_by_stock(const job_record_t *job)
{
    return job->details->mc_ptr && (!job->gres_list_req || job->gres_list_req_accum);
}

/* Is it proven that stock would find no place either? hook.allowed has the candidates. */
static bool proven(struct decision *decision, const uint64_t *candidates)
{
    struct sluice_job_request *request = &decision->request;
    const job_record_t *job = decision->call->job;
    if (request->fit != SLUICE_JOB_MODELLED || any_of(candidates, sluice_mirror_opaque(hook.mirror)))
        return false;
    /* What stock does to a job's record when it first looks at it is left to stock. */
    if (!seen_by_stock(job))
        return false;
    if (request->same && !decision->by_plan)
        return decision->verdict == SLUICE_ERROR_NO_PLACE || decision->verdict == SLUICE_ERROR_NEVER;
    uint64_t begin = sluice_now_ns();
    request->needed.allowed = hook.allowed;
    request->needed.allowed_words = hook.words;
    struct sluice_placement placement = decision->placement;
    enum sluice_error verdict =
        sluice_place(sluice_mirror_cluster(hook.mirror), SLUICE_POLICY_FIRST_FIT, &request->needed, &placement, NULL);
    decision->core_ns += sluice_now_ns() - begin;
    return verdict == SLUICE_ERROR_NO_PLACE || verdict == SLUICE_ERROR_NEVER;
}

static bool cross_check(void)
{
    if (!hook.cross_permille)
        return false;
    hook.random = hook.random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (hook.random >> 33) % 1000 < hook.cross_permille;
}

/* What stock leaves behind in the record of a job that it refuses to start. */
static int refuse(job_record_t *job)
{
    free_job_resources(&job->job_resrcs);
    return SLURM_ERROR;
}

/* ---- records ---- */

static struct sluice_decision_job job_facts(const job_record_t *job, const struct sluice_job_request *request)
{
    int64_t nodes = request && request->wanted.nodes_min ? request->wanted.nodes_min : 1;
    int64_t gpus = request ? request->wanted.gpus : 0;
    if (request && !(request->wanted.flags & SLUICE_GPUS_TOTAL))
        gpus *= nodes;
    return (struct sluice_decision_job){
        .id = job->job_id,
        .array_id = job->array_job_id,
        .array_task = job->array_job_id ? job->array_task_id : UINT32_MAX,
        .uid = job->user_id,
        .priority = job->priority,
        .gpus = (uint32_t)gpus,
        .submit_s = job->details ? job->details->submit_time : 0,
        .limit_s = job->time_limit == NO_VAL || job->time_limit == INFINITE ? -1 : (int64_t)job->time_limit * 60,
        .account = job->account,
        .partition = job->part_ptr ? job->part_ptr->name : job->partition,
    };
}

static void record(const struct decision *decision, enum sluice_decision_mode mode,
                   enum sluice_decision_outcome outcome)
{
    struct sluice_decision_recorder *recorder = sluice_decision_shared();
    if (!recorder || !decision->used)
        return;
    uint32_t nodes[64], node_count = 0;
    if (decision->stock_answered && decision->rc == SLURM_SUCCESS)
        for (size_t w = 0; w < hook.words && node_count < 64; w++)
            for (uint64_t set = words_of(decision->call->nodes)[w]; set && node_count < 64; set &= set - 1)
                nodes[node_count++] = (uint32_t)(w * 64) + (uint32_t)__builtin_ctzll(set);
    sluice_decision_placed(recorder, &(struct sluice_decision){
                                         .job = job_facts(decision->call->job, &decision->request),
                                         .mode = mode,
                                         .outcome = outcome,
                                         .planned = decision->planned,
                                         .backfill = (decision->call->job->bit_flags & BACKFILL_TEST) != 0,
                                         .policy = decision->policy,
                                         .request = decision->used,
                                         .verdict = decision->verdict,
                                         .placement = decision->verdict ? NULL : &decision->placement,
                                         .stock_answered = decision->stock_answered,
                                         .stock_fits = decision->rc == SLURM_SUCCESS,
                                         .stock_nodes = nodes,
                                         .stock_node_count = node_count,
                                         .core_ns = (uint32_t)decision->core_ns,
                                         .stock_ns = (uint32_t)decision->stock_ns,
                                     });
}

static void remember_choice(const struct decision *decision)
{
    hook.chosen_job = decision->call->job->job_id;
    hook.chosen_count = decision->placement.part_count;
    memcpy(hook.chosen, decision->placement.parts, hook.chosen_count * sizeof(*hook.chosen));
}

/* ---- the modes ---- */

static void save_nodes(const struct decision *decision)
{
    memcpy(hook.saved, words_of(decision->call->nodes), hook.words * sizeof(*hook.saved));
}

static void restore_nodes(const struct decision *decision)
{
    memcpy(words_of(decision->call->nodes), hook.saved, hook.words * sizeof(*hook.saved));
}

/* Stock with the chosen nodes only. */
static int ask_stock_narrowed(struct decision *decision)
{
    const struct sluice_placement *placement = &decision->placement;
    struct sluice_job_test_rest rest = decision->call->rest;
    struct sluice_core_exclusion exclusion;
    int rc = SLURM_ERROR;
    set_nodes(decision->call->nodes, placement->parts, placement->part_count);
    if (decision->call->mode == SELECT_MODE_RUN_NOW && !(decision->used->flags & SLUICE_EXCLUSIVE) &&
        sluice_gpus_exclude_far_cores(placement->parts, placement->part_count, &exclusion, &rest)) {
        rc = ask_stock_on(decision, placement->part_count, NULL, rest);
        sluice_exclusion_end(&exclusion);
        if (rc)
            set_nodes(decision->call->nodes, placement->parts, placement->part_count);
    }
    if (rc)
        rc = ask_stock_on(decision, placement->part_count, NULL, decision->call->rest);
    count(rc ? hook.fell_back : hook.narrowed);
    return rc;
}

/* Candidates for the core: nodes that stock would look at now. */
static void set_allowed(const struct decision *decision, bool start)
{
    const uint64_t *candidates = words_of(decision->call->nodes);
    const uint64_t *completing = cg_node_bitmap ? words_of(cg_node_bitmap) : NULL;
    bool skip = start && completing && !(decision->call->job->bit_flags & BACKFILL_TEST);
    for (size_t w = 0; w < hook.words; w++)
        hook.allowed[w] = skip ? candidates[w] & ~completing[w] : candidates[w];
}

/* Where stock gave out a GPU a second time: another GPU, or other nodes, or no start. */
static int part_overlaps(struct decision *decision)
{
    for (int try = 0; try < TRIES && decision->rc == SLURM_SUCCESS; try++) {
        uint32_t node = 0;
        enum sluice_overlap verdict = sluice_gpus_part_overlaps(decision->call->job, &node);
        if (verdict == SLUICE_OVERLAP_MOVED)
            count(hook.overlaps_moved);
        if (verdict != SLUICE_OVERLAP_STUCK)
            return decision->rc;
        count(hook.overlaps_refused);
        free_job_resources(&decision->call->job->job_resrcs);
        hook.saved[node / 64] &= ~(UINT64_C(1) << (node % 64));
        restore_nodes(decision);
        ask_stock(decision, decision->call->preemptees);
    }
    return decision->rc == SLURM_SUCCESS ? refuse(decision->call->job) : decision->rc;
}

static int run_now(struct decision *decision)
{
    const struct sluice_hook_call *call = decision->call;
    uint64_t *candidates = words_of(call->nodes);
    enum sluice_decision_outcome outcome = SLUICE_DECISION_OVERRULED;
    hook.chosen_job = 0;
    set_allowed(decision, true);
    save_nodes(decision);
    sluice_plan_keep_out(decision->plan, &decision->question, false, hook.allowed, hook.words);
    decision->by_plan = !same_words(hook.allowed, candidates);
    ask_core_and_plan(decision);
    if (decision->verdict && take_from_plan(decision, hook.saved)) {
        decision->verdict = SLUICE_OK;
        decision->planned = true;
    }
    if (!decision->verdict && !ask_stock_narrowed(decision)) {
        remember_choice(decision);
        record(decision, SLUICE_DECISION_RUN_NOW, SLUICE_DECISION_USED);
        return part_overlaps(decision);
    }
    if (decision->verdict) {
        outcome = SLUICE_DECISION_STOCK_FOUND;
        if (proven(decision, hook.saved)) {
            bool reserved = decision->by_plan;
            outcome = reserved ? SLUICE_DECISION_RESERVED : SLUICE_DECISION_REFUSED;
            count(hook.refused);
            if (!cross_check()) {
                record(decision, SLUICE_DECISION_RUN_NOW, outcome);
                return refuse(call->job);
            }
            count(hook.cross_checked);
        }
    }
    restore_nodes(decision);
    sluice_plan_keep_out(decision->plan, &decision->question, true, candidates, hook.words);
    memcpy(hook.saved, candidates, hook.words * sizeof(*hook.saved));
    ask_stock(decision, NULL);
    int rc = part_overlaps(decision); /* the core is right to refuse what stock can only give out twice */
    if (rc == SLURM_SUCCESS && (outcome == SLUICE_DECISION_REFUSED || outcome == SLUICE_DECISION_RESERVED)) {
        count(hook.cross_wrong);
        error("select/sluice: %pJ: the core proved that it cannot start, but stock Slurm starts it on %s", call->job,
              call->job->job_resrcs ? call->job->job_resrcs->nodes : "unknown nodes");
        outcome = SLUICE_DECISION_STOCK_FOUND;
    } else if (rc && outcome == SLUICE_DECISION_STOCK_FOUND) {
        outcome = SLUICE_DECISION_REFUSED;
    }
    record(decision, SLUICE_DECISION_RUN_NOW, outcome);
    return rc;
}

static int will_run(struct decision *decision)
{
    const struct sluice_hook_call *call = decision->call;
    set_allowed(decision, false);
    save_nodes(decision);
    sluice_plan_keep_out(decision->plan, &decision->question, false, hook.allowed, hook.words);
    ask_core_and_plan(decision);
    if (!decision->verdict) {
        /* Without this stock would look into the future of the chosen nodes alone where it finds no place now. */
        uint64_t flag = call->job->bit_flags & TEST_NOW_ONLY;
        call->job->bit_flags |= TEST_NOW_ONLY;
        int rc = ask_stock_narrowed(decision);
        if (!flag)
            call->job->bit_flags &= ~(uint64_t)TEST_NOW_ONLY;
        if (rc == SLURM_SUCCESS) {
            record(decision, SLUICE_DECISION_WILL_RUN, SLUICE_DECISION_USED);
            return rc;
        }
        restore_nodes(decision);
    }
    int rc = ask_stock(decision, call->preemptees);
    if (rc == SLURM_SUCCESS && !call->preemptees) {
        struct sluice_plan_say say = sluice_plan_ask(decision->plan, call->job->job_id);
        if (say.state == SLUICE_PLAN_LATER && call->job->start_time < say.start_s)
            call->job->start_time = say.start_s;
    }
    record(decision, SLUICE_DECISION_WILL_RUN,
           decision->verdict ? SLUICE_DECISION_STOCK_FOUND : SLUICE_DECISION_OVERRULED);
    return rc;
}

static int test_only(struct decision *decision)
{
    const struct sluice_hook_call *call = decision->call;
    const job_record_t *job = call->job;
    const uint64_t *nodes = NULL;
    int rc;
    if (hook.cache_part_update != last_part_update) {
        sluice_cache_clear(hook.cache);
        hook.cache_part_update = last_part_update;
    }
    /* Stock works out some of a job's record at its first look: it gets that look, at the known nodes. */
    bool seen = seen_by_stock(job);
    save_nodes(decision);
    if (sluice_cache_find(hook.cache, &decision->shape, hook.saved, &rc, &nodes)) {
        if (seen && !cross_check()) {
            if (rc == SLURM_SUCCESS)
                memcpy(words_of(call->nodes), nodes, hook.words * sizeof(*nodes));
            count(hook.remembered);
            return rc;
        }
        if (rc == SLURM_SUCCESS && !seen) {
            memcpy(words_of(call->nodes), nodes, hook.words * sizeof(*nodes));
            if (ask_stock(decision, call->preemptees) == SLURM_SUCCESS) {
                count(hook.remembered);
                return SLURM_SUCCESS;
            }
            restore_nodes(decision);
        } else {
            count(hook.cross_checked);
            if ((ask_stock(decision, call->preemptees) == SLURM_SUCCESS) != (rc == SLURM_SUCCESS)) {
                count(hook.cross_wrong);
                error("select/sluice: %pJ: it was remembered that such a job could%s run, but now stock Slurm says %d",
                      job, rc == SLURM_SUCCESS ? "" : " never", decision->rc);
                sluice_cache_clear(hook.cache);
            }
            return decision->rc;
        }
    }
    count(hook.stock_tests);
    rc = ask_stock(decision, call->preemptees);
    /* The job's record may say more now than before the first look: an answer is kept under what it says afterwards. */
    struct sluice_job_request again;
    sluice_job_request_make(hook.mirror, call->job, call->min_nodes, call->max_nodes, call->req_nodes, &again,
                            &decision->shape);
    if (!sluice_recount_waits())
        sluice_cache_put(hook.cache, &decision->shape, hook.saved, rc, words_of(call->nodes));
    return rc;
}

/* ---- preemption ---- */

static int add_candidate(void *item, void *argument)
{
    job_record_t *job = item;
    uint32_t *candidates = argument;
    uint64_t allocations[SLUICE_MAX_GPUS + 1];
    uint32_t held = sluice_mirror_allocations(hook.mirror, job->job_id, allocations, SLUICE_MAX_GPUS + 1);
    uint16_t mode = slurm_job_preempt_mode(job);
    if ((mode != PREEMPT_MODE_REQUEUE && mode != PREEMPT_MODE_CANCEL) || job->het_job_id)
        return 0;
    for (uint32_t i = 0; i < held && *candidates < hook.candidate_room; i++) {
        hook.candidate_jobs[*candidates] = job;
        hook.candidates[(*candidates)++] = (struct sluice_candidate){
            .allocation = allocations[i],
            .gang = held > 1 ? job->job_id : 0,
            .started_s = job->start_time,
            /* Slurm has said that all of them may go; of which rank they are it says by partition and QOS. */
            .tier = (uint32_t)job->part_ptr->priority_tier + (job->qos_ptr ? job->qos_ptr->priority : 0),
        };
    }
    return 0;
}

static bool make_preemption(uint32_t candidates)
{
    if (hook.preemption && candidates <= hook.candidate_room)
        return true;
    uint32_t room = 1024;
    while (room < candidates)
        room *= 2;
    sluice_preemption_free(hook.preemption);
    hook.preemption = NULL;
    free(hook.candidates);
    free(hook.candidate_jobs);
    free(hook.victims);
    hook.candidates = calloc(room, sizeof(*hook.candidates));
    hook.candidate_jobs = calloc(room, sizeof(*hook.candidate_jobs));
    hook.victims = calloc(room, sizeof(*hook.victims));
    hook.candidate_room = room;
    return hook.candidates && hook.candidate_jobs && hook.victims &&
           !sluice_preemption_new(sluice_mirror_cluster(hook.mirror), room, &hook.preemption, NULL);
}

/* Start without preempting anyone, or else preempt those that the core would, on the nodes that it would free. */
static int run_now_preempting(struct decision *decision)
{
    const struct sluice_hook_call *call = decision->call;
    hook.chosen_job = 0;
    set_allowed(decision, true);
    save_nodes(decision);
    ask_core(decision);
    if (!decision->verdict) {
        if (!ask_stock_narrowed(decision)) {
            remember_choice(decision);
            record(decision, SLUICE_DECISION_RUN_NOW, SLUICE_DECISION_USED);
            return part_overlaps(decision);
        }
        restore_nodes(decision);
    } else if (make_preemption((uint32_t)list_count(call->preemptees) * 2)) {
        uint32_t candidates = 0, victims = 0;
        list_for_each_ro(call->preemptees, add_candidate, &candidates);
        struct sluice_preemptor preemptor = {.tier = UINT32_MAX};
        struct sluice_request *wanted = &decision->request.wanted;
        wanted->allowed = hook.allowed;
        wanted->allowed_words = hook.words;
        if (!sluice_preemption_plan(hook.preemption, decision->policy, wanted, &preemptor, hook.candidates, candidates,
                                    decision->now, &decision->placement, hook.victims, &victims, NULL) &&
            victims) {
            struct xlist *chosen = list_create(NULL);
            for (uint32_t i = 0; i < victims; i++)
                if (!i || hook.candidate_jobs[hook.victims[i]] != hook.candidate_jobs[hook.victims[i - 1]])
                    list_append(chosen, hook.candidate_jobs[hook.victims[i]]);
            set_nodes(call->nodes, decision->placement.parts, decision->placement.part_count);
            int rc = ask_stock_on(decision, decision->placement.part_count, chosen, call->rest);
            list_destroy(chosen);
            if (rc == SLURM_SUCCESS) {
                count(hook.preempted);
                return rc;
            }
            restore_nodes(decision);
            if (call->preempted && *call->preempted) {
                list_destroy(*call->preempted);
                *call->preempted = NULL;
            }
        }
    }
    ask_stock(decision, call->preemptees);
    record(decision, SLUICE_DECISION_RUN_NOW,
           decision->verdict ? SLUICE_DECISION_STOCK_FOUND : SLUICE_DECISION_OVERRULED);
    return part_overlaps(decision);
}

/* ---- level shadow ---- */

static int shadow(struct decision *decision)
{
    uint16_t mode = decision->call->mode;
    bool start = mode == SELECT_MODE_RUN_NOW;
    set_allowed(decision, start);
    ask_core(decision);
    count(hook.shadowed);
    ask_stock(decision, decision->call->preemptees);
    record(decision, start ? SLUICE_DECISION_RUN_NOW : SLUICE_DECISION_WILL_RUN, SLUICE_DECISION_SHADOWED);
    return decision->rc;
}

/* ---- getting ready ---- */

static bool fit_scratch(void)
{
    uint32_t nodes = sluice_mirror_nodes(hook.mirror);
    hook.words = sluice_mirror_words(hook.mirror);
    free(hook.allowed);
    free(hook.up);
    free(hook.tried);
    free(hook.saved);
    free(hook.parts);
    free(hook.chosen);
    sluice_cache_free(hook.cache);
    sluice_preemption_free(hook.preemption);
    hook.preemption = NULL;
    hook.chosen_job = 0;
    hook.allowed = calloc(hook.words + 1, sizeof(uint64_t));
    hook.up = calloc(hook.words + 1, sizeof(uint64_t));
    hook.tried = calloc(hook.words + 1, sizeof(uint64_t));
    hook.saved = calloc(hook.words + 1, sizeof(uint64_t));
    hook.parts = calloc((size_t)nodes + 1, sizeof(*hook.parts));
    hook.chosen = calloc((size_t)nodes + 1, sizeof(*hook.chosen));
    hook.cache = sluice_cache_new(CACHE_ENTRIES, hook.words);
    return hook.allowed && hook.up && hook.tried && hook.saved && hook.parts && hook.chosen && hook.cache;
}

/* The mirror, as it is now; false: it cannot be had. */
static bool follow(time_t now)
{
    struct sluice_error_text text = {.text = ""};
    uint64_t begin = sluice_now_ns();
    sluice_mirror_record(hook.mirror, sluice_decision_shared());
    if (!hook.following)
        sluice_mirror_invalidate(hook.mirror);
    enum sluice_error failed = sluice_mirror_sync(hook.mirror, false, now, &text);
    hook.following = !failed;
    if (!failed && sluice_mirror_generation(hook.mirror) != hook.generation) {
        if (!fit_scratch())
            failed = SLUICE_ERROR_NO_MEMORY;
        else
            hook.generation = sluice_mirror_generation(hook.mirror);
        sluice_workload_apply(hook.mirror);
    }
    if (failed && !hook.failed)
        sluice_log_error("select/sluice: stock Slurm places all jobs: %s", text.text[0] ? text.text : "out of memory");
    hook.failed = failed != SLUICE_OK;
    struct sluice_mirror_counts counts = sluice_mirror_counts(hook.mirror);
    atomic_store_explicit(hook.mirror_builds, counts.builds, memory_order_relaxed);
    atomic_store_explicit(hook.mirror_mismatches, counts.mismatches, memory_order_relaxed);
    if (hook.mirror_built == counts.builds) /* else it was made anew, which is another matter */
        note_time(hook.follow_us_most, begin);
    hook.mirror_built = counts.builds;
    return !failed;
}

static void check_mirror(void)
{
    struct sluice_error_text text = {.text = ""};
    if (!hook.check_every || ++hook.decisions % hook.check_every)
        return;
    count(hook.checks);
    if (sluice_mirror_check(hook.mirror, sluice_gpus_free_of_node, &text)) {
        count(hook.check_failures);
        error("select/sluice: the mirror differs from Slurm: %s", text.text);
        sluice_mirror_invalidate(hook.mirror);
    }
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
    if ((uint32_t)bit_size(call->nodes) != sluice_mirror_nodes(hook.mirror))
        return SLUICE_STOCK_MIRROR;
    return SLUICE_STOCK_NONE;
}

/* Stock's answer that the job can start now is put off where that would delay a reserved start: sched/backfill would
 * try, and be refused. Of a heterogeneous job it would have started some components by then, and would queue them again
 * for 20 minutes; those that it counts as started would be counted twice (acct_policy.c, accrue_cnt). */
static void put_off(const struct decision *decision)
{
    const struct sluice_hook_call *call = decision->call;
    if (call->job->start_time > decision->now)
        return;
    memcpy(hook.tried, words_of(call->nodes), hook.words * sizeof(*hook.tried));
    sluice_plan_keep_out(decision->plan, &decision->question, true, hook.tried, hook.words);
    if (!same_words(hook.tried, words_of(call->nodes)))
        call->job->start_time = decision->now + PUT_OFF_S;
}

/* A job that stock alone finds nodes, at level place: where it delays nobody whose start is reserved. */
static int left_to_stock(struct decision *decision, bool preempting)
{
    const struct sluice_hook_call *call = decision->call;
    if (call->mode == SELECT_MODE_WILL_RUN) {
        int rc = ask_stock(decision, call->preemptees);
        if (rc == SLURM_SUCCESS && !preempting)
            put_off(decision);
        return rc;
    }
    if (call->mode != SELECT_MODE_RUN_NOW)
        return ask_stock(decision, call->preemptees);
    hook.chosen_job = 0;
    /* Components of a heterogeneous job start together or not: they were put off, or none is refused. */
    if (!preempting && !call->job->het_job_id)
        sluice_plan_keep_out(decision->plan, &decision->question, true, words_of(call->nodes), hook.words);
    save_nodes(decision);
    ask_stock(decision, call->preemptees);
    return part_overlaps(decision);
}

static int decide(struct decision *decision)
{
    const struct sluice_hook_call *call = decision->call;
    sluice_job_request_make(hook.mirror, call->job, call->min_nodes, call->max_nodes, call->req_nodes,
                            &decision->request, &decision->shape);
    enum sluice_job_stock reason = stock_alone(decision);
    if (!reason && decision->request.fit == SLUICE_JOB_STOCK)
        reason = decision->request.reason;
    bool place_level = decision->level == SLUICE_LEVEL_PLACE;
    bool preempting = call->preemptees && list_count(call->preemptees);
    if (reason) {
        count(hook.stock_alone);
        count(hook.by_reason[reason]);
        return place_level && reason != SLUICE_STOCK_MIRROR ? left_to_stock(decision, preempting)
                                                            : ask_stock(decision, call->preemptees);
    }
    decision->placement = (struct sluice_placement){
        .parts = hook.parts,
        .part_capacity = sluice_mirror_nodes(hook.mirror) + 1,
    };
    if (is_gpu_job(&decision->request) && !seen_by_stock(call->job))
        sluice_workload_arrival(&decision->request.wanted);
    if (call->mode == SELECT_MODE_TEST_ONLY)
        return place_level ? test_only(decision) : ask_stock(decision, call->preemptees);
    if (!place_level)
        return shadow(decision);
    if (call->mode == SELECT_MODE_WILL_RUN)
        return will_run(decision);
    return preempting ? run_now_preempting(decision) : run_now(decision);
}

/* ---- entry points ---- */

int sluice_hook_test(const struct sluice_hook_call *call)
{
    struct decision decision = {.call = call, .level = sluice_settings_level(), .rc = SLURM_ERROR};
    if (decision.level < SLUICE_LEVEL_SHADOW || !hook.mirror || !call->job->details) {
        hook.following = hook.following && decision.level >= SLUICE_LEVEL_SHADOW;
        return ask_stock(&decision, call->preemptees);
    }
    uint64_t begin = sluice_now_ns();
    decision.now = time(NULL);
    if (call->mode == SELECT_MODE_RUN_NOW && sluice_gang_refuses(call->job)) {
        count(hook.kept_waiting);
        return refuse(call->job);
    }
    if (call->mode == SELECT_MODE_RUN_NOW && decision.level == SLUICE_LEVEL_PLACE)
        sluice_recount_keep_out(call->job, call->nodes);
    if (!follow(decision.now))
        return ask_stock(&decision, call->preemptees);
    check_mirror();
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
    };
    int rc = decide(&decision);
    sluice_plan_release(decision.plan);
    uint64_t own = (sluice_now_ns() - begin - decision.stock_ns) / 1000;
    uint32_t class = 0;
    while (class + 1 < OWN_CLASSES && own > own_us[class])
        class ++;
    count(hook.own[class]);
    return rc;
}

void sluice_hook_begin(job_record_t *job)
{
    if (sluice_settings_level() != SLUICE_LEVEL_PLACE || !hook.following || !job->job_resrcs)
        return;
    if (hook.chosen_job != job->job_id || !sluice_gpus_same_nodes(job, hook.chosen, hook.chosen_count)) {
        /* Stock chose the nodes: the core still chooses their GPUs. */
        struct sluice_job_request request;
        struct sluice_placement placement = {.parts = hook.chosen,
                                             .part_capacity = sluice_mirror_nodes(hook.mirror) + 1};
        hook.chosen_job = 0;
        sluice_job_request_make(hook.mirror, job, 0, 0, 0, &request, NULL);
        if (request.fit == SLUICE_JOB_STOCK || !request.gpus_by_node)
            return;
        size_t words;
        int64_t nodes = bit_set_count(job->job_resrcs->node_bitmap);
        request.wanted.allowed = sluice_bitmap_words(job->job_resrcs->node_bitmap, &words);
        request.wanted.allowed_words = words;
        request.wanted.nodes_min = request.wanted.nodes_max = nodes;
        request.wanted.cpus_milli = request.wanted.cpus_milli_per_gpu = 0;
        request.wanted.host_memory_mib = request.wanted.host_memory_mib_per_gpu = 0;
        const struct sluice_settings *settings = sluice_settings_acquire();
        enum sluice_error verdict = sluice_place(sluice_mirror_cluster(hook.mirror), settings->rules->placement,
                                                 &request.wanted, &placement, NULL);
        sluice_settings_release(settings);
        if (verdict)
            return;
        hook.chosen_job = job->job_id;
        hook.chosen_count = placement.part_count;
    }
    if (!sluice_gpus_choose(hook.mirror, job, hook.chosen, hook.chosen_count))
        count(hook.index_denied);
}

void sluice_hook_started(job_record_t *job)
{
    if (!hook.mirror)
        return;
    if (sluice_settings_level() < SLUICE_LEVEL_SHADOW) {
        hook.following = false;
        return;
    }
    if (!hook.following || !job->job_resrcs)
        return;
    sluice_mirror_job_changed(hook.mirror, job, SLUICE_MIRROR_RUNS);
    uint32_t held_count = 0;
    const struct sluice_part *held = sluice_mirror_parts(hook.mirror, job->job_id, &held_count);
    sluice_plan_job_started(job->job_id, job->array_job_id, held, held_count, job->end_time);
    struct sluice_decision_recorder *recorder = sluice_decision_shared();
    if (recorder) {
        struct sluice_decision_job facts = job_facts(job, NULL);
        sluice_decision_started(recorder, &facts, held, held_count);
    }
    if (hook.chosen_job == job->job_id) {
        uint32_t asked = 0, kept = 0;
        sluice_gpus_compare(job, hook.chosen, hook.chosen_count, &asked, &kept);
        atomic_fetch_add_explicit(hook.index_asked, asked ? 1 : 0, memory_order_relaxed);
        atomic_fetch_add_explicit(hook.index_kept, asked && kept == asked ? 1 : 0, memory_order_relaxed);
    }
    hook.chosen_job = 0;
    uint64_t begin = sluice_now_ns();
    sluice_workload_refresh(hook.mirror, time(NULL));
    note_time(hook.workload_us_most, begin);
}

void sluice_hook_changed(job_record_t *job, enum sluice_mirror_job what)
{
    if (!hook.mirror)
        return;
    if (sluice_settings_level() < SLUICE_LEVEL_SHADOW)
        hook.following = false;
    if (hook.following)
        sluice_mirror_job_changed(hook.mirror, job, what);
    sluice_plan_wake();
}

void sluice_hook_reconfigured(void)
{
    hook.following = false;
    sluice_plan_invalidate();
}

static uint32_t from_environment(const char *name, uint32_t most)
{
    const char *text = getenv(name);
    char *end = NULL;
    unsigned long value = text ? strtoul(text, &end, 10) : 0;
    return text && end != text && !*end && value <= most ? (uint32_t)value : 0;
}

bool sluice_hook_start(sluice_stock_test stock)
{
    static const char *const names[] = {
        "select.asked",          "select.stock_alone",      "select.narrowed",
        "select.fell_back",      "select.refused",          "select.shadowed",
        "select.kept_waiting",   "select.cross_checked",    "select.cross_wrong",
        "select.remembered",     "select.stock_tests",      "select.preempted",
        "select.index_asked",    "select.index_kept",       "select.index_denied",
        "select.overlaps_moved", "select.overlaps_refused", "select.checks",
        "select.check_failures", "select.mirror_builds",    "select.mirror_mismatches",
        "select.follow_us_most", "select.workload_us_most", "select.nothing_allocated",
    };
    counter **const counters[] = {
        &hook.asked,          &hook.stock_alone,      &hook.narrowed,
        &hook.fell_back,      &hook.refused,          &hook.shadowed,
        &hook.kept_waiting,   &hook.cross_checked,    &hook.cross_wrong,
        &hook.remembered,     &hook.stock_tests,      &hook.preempted,
        &hook.index_asked,    &hook.index_kept,       &hook.index_denied,
        &hook.overlaps_moved, &hook.overlaps_refused, &hook.checks,
        &hook.check_failures, &hook.mirror_builds,    &hook.mirror_mismatches,
        &hook.follow_us_most, &hook.workload_us_most, &hook.nothing_allocated,
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        *counters[i] = sluice_status_counter(names[i]);
    char name[SLUICE_STATUS_NAME];
    for (uint32_t i = 0; i < OWN_CLASSES; i++) {
        if (i + 1 < OWN_CLASSES)
            snprintf(name, sizeof(name), "select.own_us_to_%u", own_us[i]);
        else
            snprintf(name, sizeof(name), "select.own_us_more");
        hook.own[i] = sluice_status_counter(name);
    }
    for (uint32_t i = 0; i < SLUICE_STOCK_COUNT; i++) {
        snprintf(name, sizeof(name), "select.stock_alone.%s", sluice_job_stock_name(i));
        hook.by_reason[i] = sluice_status_counter(name);
    }
    hook.stock = stock;
    hook.cross_permille = from_environment("SLUICE_CROSS_CHECK_PERMILLE", 1000);
    hook.check_every = from_environment("SLUICE_MIRROR_CHECK_EVERY", UINT32_MAX);
    hook.random = (uint64_t)time(NULL);
    return sluice_mirror_new(&hook.mirror, NULL) == SLUICE_OK;
}

void sluice_hook_stop(void)
{
    sluice_preemption_free(hook.preemption);
    sluice_mirror_free(hook.mirror);
    sluice_cache_free(hook.cache);
    free(hook.allowed);
    free(hook.up);
    free(hook.tried);
    free(hook.saved);
    free(hook.parts);
    free(hook.chosen);
    free(hook.candidates);
    free(hook.candidate_jobs);
    free(hook.victims);
    memset(&hook, 0, sizeof(hook));
}
