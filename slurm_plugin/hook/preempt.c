/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Preempting: the core chooses the victims. */
#include "hook/hook_internal.h"

#include "src/common/list.h"

#include <inttypes.h>
#include <stdlib.h>

struct candidates {
    const struct sluice_job_times *saves, *save_times;
    int64_t now_s, restart_s;
    bool moves; /* jobs may be moved instead: what both lose is compared. Else victims are chosen as without moves */
    uint32_t count;
};

/* For how long it saves before it goes; 0: it does not, or not within its time of grace. */
static int64_t save_of(const struct candidates *candidates, job_record_t *job)
{
    int64_t save_s = sluice_job_times_of(candidates->save_times, job->job_id);
    return save_s <= slurm_job_get_grace_time(job) ? save_s : 0;
}

static int add_candidate(void *item, void *argument)
{
    job_record_t *job = item;
    struct candidates *candidates = argument;
    uint64_t allocations[SLUICE_MAX_GPUS + 1];
    uint32_t held = sluice_mirror_allocations(sluice_hook.mirror, job->job_id, allocations, SLUICE_MAX_GPUS + 1);
    uint16_t mode = slurm_job_preempt_mode(job);
    if ((mode != PREEMPT_MODE_REQUEUE && mode != PREEMPT_MODE_CANCEL) || job->het_job_id)
        return 0;
    int64_t saved_s = sluice_job_times_of(candidates->saves, job->job_id), save_s = save_of(candidates, job);
    for (uint32_t i = 0; i < held && candidates->count < sluice_hook.candidate_room; i++) {
        sluice_hook.candidate_jobs[candidates->count] = job;
        sluice_hook.candidates[candidates->count++] = (struct sluice_candidate){
            .allocation = allocations[i],
            .gang = held > 1 ? job->job_id : 0,
            .started_s = job->start_time,
            .checkpoint_s = saved_s < candidates->now_s ? saved_s : candidates->now_s,
            /* Slurm has said that all of them may be preempted. */
            .tier = sluice_job_rank(job),
            .save_s = save_s,
            .restart_s = candidates->restart_s,
        };
    }
    return 0;
}

/* One line for each job that has to go, with what it loses; not again in its time of grace. */
static void say_victims(const job_record_t *job, uint32_t victims, int64_t now_s)
{
    for (uint32_t i = 0; i < victims; i++) {
        const struct sluice_candidate *victim = &sluice_hook.candidates[sluice_hook.victims[i]];
        const job_record_t *goes = sluice_hook.candidate_jobs[sluice_hook.victims[i]];
        bool saved = victim->checkpoint_s > victim->started_s;
        if (goes->preempt_time || (i && goes == sluice_hook.candidate_jobs[sluice_hook.victims[i - 1]]))
            continue;
        if (victim->save_s)
            info("select/sluice: job %u makes room for job %u and loses %" PRId64 " s, for which it saves before",
                 goes->job_id, job->job_id, victim->save_s);
        else
            info("select/sluice: job %u makes room for job %u and loses %" PRId64 " s of work, since its %s",
                 goes->job_id, job->job_id, now_s - (saved ? victim->checkpoint_s : victim->started_s),
                 saved ? "last save" : "start");
    }
}

static bool make_preemption(uint32_t candidates)
{
    if (sluice_hook.preemption && candidates <= sluice_hook.candidate_room)
        return true;
    uint32_t room = 1024;
    while (room < candidates)
        room *= 2;
    sluice_preemption_free(sluice_hook.preemption);
    sluice_hook.preemption = NULL;
    free(sluice_hook.candidates);
    free(sluice_hook.candidate_jobs);
    free(sluice_hook.victims);
    sluice_hook.candidates = calloc(room, sizeof(*sluice_hook.candidates));
    sluice_hook.candidate_jobs = calloc(room, sizeof(*sluice_hook.candidate_jobs));
    sluice_hook.victims = calloc(room, sizeof(*sluice_hook.victims));
    sluice_hook.candidate_room = room;
    return sluice_hook.candidates && sluice_hook.candidate_jobs && sluice_hook.victims &&
           !sluice_preemption_new(sluice_mirror_cluster(sluice_hook.mirror), room, &sluice_hook.preemption, NULL);
}

static void list_candidates(const struct decision *decision, struct candidates *candidates)
{
    const struct sluice_settings *settings = sluice_settings_acquire();
    *candidates = (struct candidates){.saves = sluice_saves_acquire(), .now_s = decision->now};
    if (settings->rules->compaction_wait_s) {
        candidates->moves = true;
        candidates->save_times = sluice_save_times_acquire();
        candidates->restart_s = settings->rules->compaction_move_cost_s;
    }
    sluice_settings_release(settings);
    list_for_each_ro(decision->call->preemptees, add_candidate, candidates);
    sluice_job_times_release(candidates->saves);
    sluice_job_times_release(candidates->save_times);
}

/* Does it wait for the planner's answer, or for moves? Its victims are not sought again meanwhile: that takes milliseconds
 * on large clusters. */
static bool is_held(const struct decision *decision)
{
    const job_record_t *job = decision->call->job;
    enum sluice_instead_state state = sluice_instead_of(job->job_id, decision->now).state;
    return !job->details->preempt_start_time && (state == SLUICE_INSTEAD_LOOK || state == SLUICE_INSTEAD_MOVES);
}

/* Is it to wait, as the planner is to look whether others can be moved for it? Not once others have been asked to end,
 * which an earlier slurmctld may have done, and not arrays, for which none is moved. */
static bool hold_back(const struct decision *decision, uint32_t victims)
{
    const job_record_t *job = decision->call->job;
    bool asked;
    if (job->details->preempt_start_time || job->array_recs)
        return false;
    for (uint32_t i = 0; i < victims; i++)
        if (sluice_hook.candidate_jobs[sluice_hook.victims[i]]->preempt_time)
            return false;
    if (!sluice_instead_hold(job->job_id, sluice_preemption_loss(sluice_hook.preemption), decision->now, &asked))
        return false;
    if (asked)
        sluice_plan_wake();
    return true;
}

int sluice_hook_run_now_preempting(struct decision *decision)
{
    const struct sluice_hook_call *call = decision->call;
    sluice_hook.chosen_job = 0;
    sluice_hook_choose(decision, true);
    if (!decision->verdict) {
        if (!sluice_hook_start_narrowed(decision)) {
            sluice_hook_record(decision, SLUICE_DECISION_RUN_NOW, SLUICE_DECISION_USED);
            return sluice_hook_part_overlaps(decision);
        }
        restore_nodes(decision);
    } else if (is_held(decision)) {
        count(sluice_hook.held_back);
        return decision->rc = refuse(call->job);
    } else if (make_preemption((uint32_t)list_count(call->preemptees) * 2)) {
        struct candidates candidates;
        uint32_t victims = 0;
        sluice_hook_set_allowed(decision, true); /* what is preempted for it, it may have */
        list_candidates(decision, &candidates);
        struct sluice_preemptor preemptor = {.tier = UINT32_MAX, .weighs_shares = candidates.moves};
        struct sluice_request *wanted = &decision->request.wanted;
        wanted->allowed = sluice_hook.allowed;
        wanted->allowed_words = sluice_hook.words;
        if (!sluice_preemption_plan(sluice_hook.preemption, decision->policy, wanted, &preemptor,
                                    sluice_hook.candidates, candidates.count, decision->now, &decision->placement,
                                    sluice_hook.victims, &victims, NULL) &&
            victims) {
            if (candidates.moves && hold_back(decision, victims)) {
                count(sluice_hook.held_back);
                return decision->rc = refuse(call->job);
            }
            struct xlist *chosen = list_create(NULL);
            for (uint32_t i = 0; i < victims; i++)
                if (!i || sluice_hook.candidate_jobs[sluice_hook.victims[i]] !=
                              sluice_hook.candidate_jobs[sluice_hook.victims[i - 1]])
                    list_append(chosen, sluice_hook.candidate_jobs[sluice_hook.victims[i]]);
            set_nodes(call->nodes, decision->placement.parts, decision->placement.part_count);
            int rc = sluice_hook_ask_stock_on(decision, decision->placement.part_count, chosen, call->rest);
            list_destroy(chosen);
            /* Stock found that nobody has to be preempted: it counts no compute. */
            if (rc == SLURM_SUCCESS && call->job->job_resrcs)
                return sluice_hook_part_overlaps(decision);
            if (rc == SLURM_SUCCESS) {
                count(sluice_hook.preempted);
                say_victims(call->job, victims, decision->now);
                if (candidates.moves)
                    sluice_instead_preempts(call->job->job_id, sluice_preemption_loss(sluice_hook.preemption),
                                            decision->now);
                return rc;
            }
            restore_nodes(decision);
            if (call->preempted && *call->preempted) {
                list_destroy(*call->preempted);
                *call->preempted = NULL;
            }
        }
    }
    sluice_plan_keep_out(decision->plan, &decision->question, true, words_of(call->nodes), sluice_hook.words);
    save_nodes(decision);
    sluice_hook_ask_stock(decision, is_held(decision) ? NULL : call->preemptees);
    sluice_hook_record(decision, SLUICE_DECISION_RUN_NOW,
                       decision->verdict ? SLUICE_DECISION_STOCK_FOUND : SLUICE_DECISION_OVERRULED);
    return sluice_hook_part_overlaps(decision);
}
