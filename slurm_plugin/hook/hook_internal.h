/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * What the files of the placement hook (hook.h) need of each other; for files of hook/ only. All of it runs under
 * slurmctld's locks as select plugins do (job and node write), one call at a time: that guards sluice_hook, too.
 *
 *   hook.c          entry points: which mode is it, is it left to stock
 *   state.c    what is kept between the calls: made, brought up to date, freed; counters
 *   modes.c    RUN_NOW, WILL_RUN, TEST_ONLY, level shadow, and jobs that are left to stock
 *   preempt.c  RUN_NOW where others may be preempted
 *   core.c     asking the core and the plan
 *   stock.c    asking stock
 *   nics.c     which NICs the job gets, and GPUs near them
 *   power.c    whether power budgets allow a start
 *   layout.c   whether a start's nodes lie in the network as the job asks
 *   roles.c    which GPUs of a start belong to which of the job's roles
 *   record.c   decisions as they are recorded
 */
#ifndef SLUICE_HOOK_HOOK_INTERNAL_H
#define SLUICE_HOOK_HOOK_INTERNAL_H

#include "hook/hook.h"

#include "hook/cache.h"

#include "decisions/decisions.h"
#include "mirror/mirror.h"
#include "planner/planner_slurm.h"
#include "rules/rules.h"
#include "runtime/runtime.h"

#include <stdatomic.h>
#include <string.h>

/* How often the core may choose again, when the plan keeps its choice for others or a node turns out to differ. */
enum { TRIES = 4 };
enum { TIME_CLASSES = 16 }; /* of the histogram of the hook's own time */

typedef _Atomic uint64_t counter;

/* What is kept between the calls. */
struct sluice_hook_state {
    sluice_stock_test stock;
    struct sluice_mirror *mirror;
    bool following; /* the mirror got every change since its last sync */
    bool failed;    /* logged: the mirror cannot be made */
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

    /* the choice for the job that is about to start */
    uint32_t chosen_job;
    uint32_t chosen_count;
    struct sluice_part *chosen;

    uint32_t kept_job; /* starts next to reserved cores or GRES: it keeps stock's GPUs and NICs */

    /* what the job draws that is about to start */
    uint32_t powered_job;
    struct sluice_job_watts power;

    uint32_t cross_permille; /* also ask stock about refusals and remembered answers; for tests */
    uint32_t check_every;    /* decisions between checks of the whole mirror; 0: never; for tests */
    uint64_t random;
    uint64_t decisions;

    counter *asked, *stock_alone, *narrowed, *fell_back, *refused, *shadowed, *kept_waiting, *cross_checked,
        *cross_wrong, *remembered, *stock_tests, *preempted, *index_asked, *index_kept, *index_denied, *overlaps_moved,
        *overlaps_refused, *checks, *check_failures, *mirror_builds, *mirror_mismatches, *follow_us_most,
        *workload_us_most, *nothing_allocated, *layout_refused, *held_back, *times[TIME_CLASSES],
        *by_reason[SLUICE_STOCK_COUNT];
};

/* One decision: the question, what was asked for it, and the answer. */
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
    bool budgets;                  /* the policy has power budgets ... */
    struct sluice_request drawing; /* ... and what it draws follows from the GPUs of this */
    struct sluice_job_watts power;
    bool by_plan; /* the plan kept some nodes for others */
    bool planned; /* the answer is the plan's, not the core's to `used` */
    uint64_t core_ns, stock_ns;
    bool stock_answered;
    int rc;
};

#pragma GCC visibility push(hidden) /* called within the plugin only */

extern struct sluice_hook_state sluice_hook;

/* ---- small things ---- */

static inline void count(counter *which)
{
    atomic_fetch_add_explicit(which, 1, memory_order_relaxed);
}

/* Keep the longest. */
static inline void note_time(counter *most, uint64_t begin_ns)
{
    uint64_t us = (sluice_now_ns() - begin_ns) / 1000;
    if (us > atomic_load_explicit(most, memory_order_relaxed))
        atomic_store_explicit(most, us, memory_order_relaxed);
}

static inline uint64_t *words_of(bitstr_t *bitmap)
{
    size_t words;
    return (uint64_t *)(uintptr_t)sluice_bitmap_words(bitmap, &words);
}

static inline bool same_words(const uint64_t *a, const uint64_t *b)
{
    return !memcmp(a, b, sluice_hook.words * sizeof(*a));
}

static inline void set_nodes(bitstr_t *bitmap, const struct sluice_part *parts, uint32_t part_count)
{
    uint64_t *words = words_of(bitmap);
    memset(words, 0, sluice_hook.words * sizeof(*words));
    for (uint32_t i = 0; i < part_count; i++)
        words[parts[i].node / 64] |= UINT64_C(1) << (parts[i].node % 64);
}

/* The candidates, kept for when stock has changed them. */
static inline void save_nodes(const struct decision *decision)
{
    memcpy(sluice_hook.saved, words_of(decision->call->nodes), sluice_hook.words * sizeof(*sluice_hook.saved));
}

static inline void restore_nodes(const struct decision *decision)
{
    memcpy(words_of(decision->call->nodes), sluice_hook.saved, sluice_hook.words * sizeof(*sluice_hook.saved));
}

/* Has stock looked at the job before? Then it has completed its record. */
static inline bool seen_by_stock(const job_record_t *job)
{
    return job->details->mc_ptr && (!job->gres_list_req || job->gres_list_req_accum);
}

/* What stock leaves behind in the record of a job that it refuses to start. */
static inline int refuse(job_record_t *job)
{
    free_job_resources(&job->job_resrcs);
    return SLURM_ERROR;
}

/* ---- state.c ---- */

/* The mirror, as it is now; false: it cannot be had. */
bool sluice_hook_follow(time_t now);
/* For tests, where it is due: compare the whole mirror with Slurm's records; if it differs, it is made again. */
void sluice_hook_check_mirror(void);
/* Count a decision by the hook's own time in microseconds. */
void sluice_hook_count_time(uint64_t hook_us);

/* ---- modes.c: each returns what slurmctld gets, Slurm's error or SLURM_SUCCESS ---- */

int sluice_hook_run_now(struct decision *decision);
int sluice_hook_will_run(struct decision *decision);
int sluice_hook_test_only(struct decision *decision);
/* At level shadow, RUN_NOW and WILL_RUN: stock's answer is used. */
int sluice_hook_shadow(struct decision *decision);
/* A job for which only stock finds nodes, at level place: where it delays no reserved start. */
int sluice_hook_left_to_stock(struct decision *decision, bool preempting);

/* ---- preempt.c ---- */

/* Start without preempting anyone, or else preempt those that the core would, on the nodes that it would free. */
int sluice_hook_run_now_preempting(struct decision *decision);

/* ---- core.c: decision->verdict, ->placement and ->used have the core's answer ---- */

/* Has the mirror some of these nodes without their GPUs (not yet registered, GPUs without File)? Then the core's "no
 * place" proves nothing. */
bool sluice_hook_any_opaque(const uint64_t *candidates);
/* Candidates for the core: nodes that stock would look at now. */
void sluice_hook_set_allowed(const struct decision *decision, bool start);
/* The core's answer for the candidates in sluice_hook.allowed. */
void sluice_hook_ask_core(struct decision *decision);
/* The core's answer, of those that delay no start that is reserved for others; where the job is to start, or else what
 * the plan has for it now. The candidates are kept in sluice_hook.saved. */
void sluice_hook_choose(struct decision *decision, bool start);
/* Is it proven that stock would find no place either? sluice_hook.allowed has the candidates. */
bool sluice_hook_proven(struct decision *decision, const uint64_t *candidates);
/* When the job starts it is to get the GPUs of this placement, or others of its nodes that are near its NICs. */
void sluice_hook_remember_choice(const struct decision *decision);

/* ---- stock.c: decision->rc has stock's answer, which is returned, too ---- */

/* Stock's function, timed; on all of the candidates where `nodes` is not 0: they are the choice. */
int sluice_hook_ask_stock_on(struct decision *decision, uint32_t nodes, struct xlist *preemptees,
                             struct sluice_job_test_rest rest);
/* ... with the scheduler's own question. */
int sluice_hook_ask_stock(struct decision *decision, struct xlist *preemptees);
/* Stock with the chosen nodes only; they are in the scheduler's bitmap of candidates afterwards. */
int sluice_hook_ask_stock_narrowed(struct decision *decision);
/* ... for a start: the choice is remembered, and cores near its GPUs come first. */
int sluice_hook_start_narrowed(struct decision *decision);
/* If stock gave out a GPU a second time: another GPU, or other nodes, or no start. */
int sluice_hook_part_overlaps(struct decision *decision);

/* ---- power.c ---- */

/* What the job draws, if the policy has budgets: decision->power. */
void sluice_hook_read_power(struct decision *decision);
/* Clear, in `words`, the nodes whose power budgets have too few watts for it now. */
void sluice_hook_keep_out_power(const struct decision *decision, uint64_t *words);
/* Has stock's answer, that a job which is left to it can start now on these nodes, no watts? */
bool sluice_hook_lacks_power(const struct decision *decision);
/* Does a job that stock would start now break a power budget of the policy? Its start is refused then, else it starts
 * with the cap that the budgets allow. `decision->rc` has stock's answer. */
int sluice_hook_power(struct decision *decision);

/* ---- layout.c ---- */

/* Does a start have to be in whole segments, or together? */
bool sluice_hook_asks_layout(const struct decision *decision);
/* Of a start: refused where its nodes are not in whole segments, or not together while the job waits for that. Returns
 * decision->rc. */
int sluice_hook_layout(struct decision *decision);
/* Would the job's segments have no place even if all candidates were up and idle? */
bool sluice_hook_segments_never(struct decision *decision);

/* ---- roles.c ---- */

/* The GPUs of a job that starts, by role. `gpus` is to be freed. */
struct sluice_hook_roles {
    struct sluice_options options; /* has the names */
    uint32_t *gpus;
    struct sluice_decision_roles said; /* count is 0 where it has no roles, or they cannot be laid out */
};

/* Lay out the roles of a job that holds `parts`, and tell its nodes; only once `*roles` is all zeros. */
void sluice_hook_lay_out(job_record_t *job, const struct sluice_part *parts, uint32_t part_count,
                         struct sluice_hook_roles *roles);
/* Of an earlier start. */
void sluice_hook_forget_roles(job_record_t *job);

/* ---- record.c ---- */

/* `request`: NULL where it is not known. As long as the job's record. */
struct sluice_decision_job sluice_hook_job_facts(const job_record_t *job, const struct sluice_job_request *request);
/* Record the decision, if there is a recorder and the core was asked. */
void sluice_hook_record(const struct decision *decision, enum sluice_decision_mode mode,
                        enum sluice_decision_outcome outcome);

#pragma GCC visibility pop

#endif
