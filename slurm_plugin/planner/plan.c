/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "planner/plan.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { NONE = UINT32_MAX };

/* One planned job, or one task of an array. */
struct entry {
    uint32_t job_id;
    uint32_t group;
    uint32_t next;    /* the next task of the same job record; NONE */
    uint32_t ordinal; /* among those */
    uint32_t rank;
    struct sluice_plan_place place;
    enum sluice_plan_state state;
    int64_t start_s;
    int64_t limit_s;
    uint32_t first_part, part_count;
    int32_t watts;
    uint32_t waits_for_power;
};

/* A job record of the plan. */
struct known {
    uint32_t job_id;     /* 0: free slot */
    uint32_t first;      /* entry */
    atomic_uint started; /* so many of its tasks have started since */
};

/* A share of a node that is reserved from start_s on, and what else is free there as long as it lasts. */
struct claim {
    uint32_t node, entry;
    int64_t start_s, end_s;
    int64_t cpus_milli, host_memory_mib;
    uint32_t gpu_count;
    int64_t gpu_total[SLUICE_MAX_GPUS], gpu_free[SLUICE_MAX_GPUS]; /* MiB */
    int32_t unclaimed[SLUICE_MAX_GPUS];                            /* percent of compute */
    uint32_t nics_taken;
};

struct sluice_plan {
    atomic_uint references;
    int64_t made_s, valid_until_s;
    struct entry *entries;
    uint32_t entry_count;
    struct sluice_part *parts;
    struct known *known;
    uint32_t known_mask;
    struct claim *claims; /* by node */
    uint32_t claim_count;
    struct sluice_watts_left *left; /* of budgets; NULL: there are none */
};

/* The plan in force, and what started while the next one is being made. */
enum { STARTS_REMEMBERED = 1024, START_PARTS = 16 };
struct started {
    uint32_t job_id;
    uint32_t count;
    int64_t end_s;
    struct sluice_job_watts power;
    struct sluice_part parts[START_PARTS];
};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct sluice_plan *in_force;
static struct started *starts; /* ring of those since sluice_planner_begin; NULL: no planner */
static uint32_t start_count;
static bool outdated; /* the plan being made must not be published */
static struct sluice_plan_counts counts;

struct sluice_planner {
    struct sluice_planner_config config;
    struct sluice_backfill *backfill;
    uint32_t backfill_nodes;
    struct sluice_backfill_job *jobs;
    struct sluice_backfill_start *starts;
    struct sluice_part *parts, *running_parts;
    uint32_t *claimed; /* by node: first claim, NONE */
    uint32_t claimed_room;
    struct sluice_plan *last; /* whose reservations are held */
    struct sluice_power *power;
    uint32_t budgets;
    const uint64_t *counting;
};

/* ---- plans ---- */

static uint32_t slot_of(const struct sluice_plan *plan, uint32_t job_id)
{
    uint32_t slot = (job_id * 2654435761u) & plan->known_mask;
    while (plan->known[slot].job_id && plan->known[slot].job_id != job_id)
        slot = (slot + 1) & plan->known_mask;
    return slot;
}

static struct known *find(const struct sluice_plan *plan, uint32_t job_id)
{
    if (!plan || !job_id)
        return NULL;
    struct known *known = &plan->known[slot_of(plan, job_id)];
    return known->job_id ? known : NULL;
}

static void plan_free(struct sluice_plan *plan)
{
    if (!plan)
        return;
    free(plan->entries);
    free(plan->parts);
    free(plan->known);
    free(plan->claims);
    sluice_watts_left_free(plan->left);
    free(plan);
}

void sluice_plan_release(struct sluice_plan *plan)
{
    if (plan && atomic_fetch_sub(&plan->references, 1) == 1)
        plan_free(plan);
}

struct sluice_plan *sluice_plan_acquire(int64_t now_s)
{
    pthread_mutex_lock(&lock);
    struct sluice_plan *plan = in_force && now_s <= in_force->valid_until_s ? in_force : NULL;
    if (plan)
        atomic_fetch_add(&plan->references, 1);
    pthread_mutex_unlock(&lock);
    return plan;
}

struct sluice_plan_answer sluice_plan_ask(const struct sluice_plan *plan, uint32_t job_id)
{
    struct sluice_plan_answer answer = {.state = SLUICE_PLAN_UNKNOWN};
    const struct known *known = find(plan, job_id);
    uint32_t index = known ? known->first : NONE;
    for (uint32_t i = 0; index != NONE && i < known->started; i++)
        index = plan->entries[index].next;
    if (index != NONE)
        sluice_plan_entry(plan, index, NULL, NULL, &answer);
    return answer;
}

bool sluice_plan_entry(const struct sluice_plan *plan, uint32_t index, uint32_t *job_id, uint32_t *group,
                       struct sluice_plan_answer *answer)
{
    if (!plan || index >= plan->entry_count)
        return false;
    const struct entry *entry = &plan->entries[index];
    if (job_id)
        *job_id = entry->job_id;
    if (group)
        *group = entry->group;
    *answer = (struct sluice_plan_answer){.state = entry->state,
                                          .exact = entry->group != 0,
                                          .start_s = entry->start_s,
                                          .parts = plan->parts + entry->first_part,
                                          .part_count = entry->part_count,
                                          .watts = entry->watts,
                                          .waits_for_power = entry->waits_for_power};
    return true;
}

/* ---- what is reserved ---- */

bool sluice_plan_is_before(const struct sluice_plan_place *one, const struct sluice_plan_place *other)
{
    return one->tier != other->tier           ? one->tier > other->tier
           : one->priority != other->priority ? one->priority > other->priority
                                              : one->job_id < other->job_id;
}

static bool counts_for(const struct sluice_plan *plan, const struct claim *claim,
                       const struct sluice_plan_question *question)
{
    const struct entry *entry = &plan->entries[claim->entry];
    if (entry->job_id == question->job_id || entry->rank < question->rank)
        return false;
    if (question->place && !sluice_plan_is_before(&entry->place, question->place))
        return false;
    if (find(plan, entry->job_id)->started > entry->ordinal)
        return false;
    return question->limit_s <= 0 || claim->start_s < question->now_s + question->limit_s;
}

static uint32_t first_claim(const struct sluice_plan *plan, uint32_t node)
{
    uint32_t low = 0, high = plan->claim_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (plan->claims[middle].node < node)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool fits_with(const struct claim *claim, const struct sluice_part *part)
{
    if (part->exclusive || part->cpus_milli > claim->cpus_milli || part->host_memory_mib > claim->host_memory_mib ||
        (part->nics & claim->nics_taken))
        return false;
    for (uint32_t gpu = 0; gpu < claim->gpu_count; gpu++) {
        int64_t asked = part->gpu_memory_mib ? part->gpu_memory_mib : claim->gpu_total[gpu];
        if (part->gpus >> gpu & 1 &&
            (asked > claim->gpu_free[gpu] || (int64_t)part->gpu_compute_percent > claim->unclaimed[gpu]))
            return false;
    }
    return true;
}

static bool is_planned(const struct sluice_plan_answer *answer, const struct sluice_part *part)
{
    for (uint32_t i = 0; i < answer->part_count; i++) {
        const struct sluice_part *planned = &answer->parts[i];
        if (planned->node == part->node)
            return planned->gpus == part->gpus && planned->gpu_memory_mib >= part->gpu_memory_mib &&
                   planned->gpu_compute_percent >= part->gpu_compute_percent &&
                   planned->cpus_milli >= part->cpus_milli && planned->host_memory_mib >= part->host_memory_mib &&
                   planned->exclusive >= part->exclusive && !(part->nics & ~planned->nics);
    }
    return false;
}

bool sluice_plan_allows_start(const struct sluice_plan *plan, const struct sluice_plan_question *question,
                              const struct sluice_part *parts, uint32_t count)
{
    if (!plan || !plan->claim_count)
        return true;
    struct sluice_plan_answer answer = sluice_plan_ask(plan, question->job_id);
    for (uint32_t i = 0; i < count; i++) {
        if (answer.state == SLUICE_PLAN_NOW && is_planned(&answer, &parts[i]))
            continue;
        for (uint32_t c = first_claim(plan, parts[i].node); c < plan->claim_count; c++) {
            if (plan->claims[c].node != parts[i].node)
                break;
            if (counts_for(plan, &plan->claims[c], question) && !fits_with(&plan->claims[c], &parts[i]))
                return false;
        }
    }
    return true;
}

/* What the plan has counted for a job that may start now. */
static struct sluice_watts_own own_of(const struct sluice_plan *plan, uint32_t job_id)
{
    const struct sluice_plan_answer answer = sluice_plan_ask(plan, job_id);
    const bool kept = answer.state == SLUICE_PLAN_WATTS && answer.start_s <= plan->made_s;
    if (answer.state != SLUICE_PLAN_NOW && !kept)
        return (struct sluice_watts_own){.count = 0};
    return (struct sluice_watts_own){.parts = answer.parts, .count = answer.part_count, .watts = answer.watts};
}

static int64_t end_of(const struct sluice_plan_question *question)
{
    return question->limit_s > 0 ? question->now_s + question->limit_s : INT64_MAX;
}

int32_t sluice_plan_allows_watts(const struct sluice_plan *plan, const struct sluice_plan_question *question,
                                 const struct sluice_job_watts *job, const struct sluice_part *parts, uint32_t count)
{
    if (!job->watts || !job->budgets)
        return job->watts;
    if (!plan || !plan->left)
        return -1;
    const struct sluice_watts_own own = own_of(plan, question->job_id);
    return sluice_watts_allowed(plan->left, job, &own, parts, count, question->now_s, end_of(question));
}

int32_t sluice_plan_allows_watts_anywhere(const struct sluice_plan *plan, const struct sluice_plan_question *question,
                                          const struct sluice_job_watts *job, int64_t gpus)
{
    if (!job->watts || !job->budgets || gpus <= 0)
        return job->watts;
    if (!plan || !plan->left)
        return -1;
    const struct sluice_watts_own own = own_of(plan, question->job_id);
    return sluice_watts_allowed_anywhere(plan->left, job, &own, gpus, question->now_s, end_of(question));
}

void sluice_plan_keep_out_watts(const struct sluice_plan *plan, const struct sluice_plan_question *question,
                                const struct sluice_job_watts *job, int64_t gpus, uint64_t *words, size_t count)
{
    if (!plan || !plan->left || !job->watts)
        return;
    const struct sluice_watts_own own = own_of(plan, question->job_id);
    sluice_watts_keep_out(plan->left, job, &own, gpus, question->now_s, end_of(question), words, count);
}

static bool leaves_nothing(const struct claim *claim)
{
    if (claim->cpus_milli <= 0 || claim->host_memory_mib <= 0)
        return true;
    for (uint32_t gpu = 0; gpu < claim->gpu_count; gpu++)
        if (claim->gpu_free[gpu] > 0)
            return false;
    return claim->gpu_count > 0;
}

void sluice_plan_keep_out(const struct sluice_plan *plan, const struct sluice_plan_question *question, bool whole,
                          uint64_t *words, size_t count)
{
    if (!plan || !plan->claim_count)
        return;
    struct sluice_plan_answer answer = sluice_plan_ask(plan, question->job_id);
    for (uint32_t c = 0; c < plan->claim_count; c++) {
        const struct claim *claim = &plan->claims[c];
        if (claim->node / 64 >= count || !counts_for(plan, claim, question) || (!whole && !leaves_nothing(claim)))
            continue;
        bool due_here = false;
        for (uint32_t i = 0; !whole && answer.state == SLUICE_PLAN_NOW && i < answer.part_count; i++)
            due_here |= answer.parts[i].node == claim->node;
        if (!due_here)
            words[claim->node / 64] &= ~(UINT64_C(1) << claim->node % 64);
    }
}

/* ---- starts ---- */

static void take_off(struct claim *claim, const struct sluice_part *part)
{
    if (part->exclusive)
        claim->cpus_milli = claim->host_memory_mib = 0;
    claim->cpus_milli -= part->cpus_milli;
    claim->host_memory_mib -= part->host_memory_mib;
    claim->nics_taken |= part->exclusive ? UINT32_MAX : part->nics;
    for (uint32_t gpu = 0; gpu < claim->gpu_count; gpu++) {
        bool taken = part->gpus >> gpu & 1;
        if (taken)
            claim->unclaimed[gpu] -= (int32_t)part->gpu_compute_percent;
        if (part->exclusive || (taken && !part->gpu_memory_mib))
            claim->gpu_free[gpu] = 0;
        else if (taken)
            claim->gpu_free[gpu] -= part->gpu_memory_mib;
    }
}

/* A start that the plan does not know yet. */
static void note_start(struct sluice_plan *plan, const struct started *started, const struct sluice_part *parts,
                       uint32_t count)
{
    struct known *known = find(plan, started->job_id);
    struct sluice_plan_answer answer = sluice_plan_ask(plan, started->job_id);
    for (uint32_t i = 0; i < started->count; i++) {
        const struct sluice_part *part = &started->parts[i];
        if (answer.state == SLUICE_PLAN_NOW && is_planned(&answer, part))
            continue; /* what is free next to reservations was computed with it */
        for (uint32_t c = first_claim(plan, part->node); c < plan->claim_count; c++) {
            if (plan->claims[c].node != part->node)
                break;
            if (!started->end_s || plan->claims[c].start_s < started->end_s)
                take_off(&plan->claims[c], part);
        }
    }
    if (plan->left) {
        const struct sluice_watts_own own = own_of(plan, started->job_id);
        const int64_t end_s = started->end_s ? started->end_s : INT64_MAX;
        sluice_watts_take(plan->left, started->power.budgets, -own.watts, own.parts, own.count, end_s);
        sluice_watts_take(plan->left, started->power.budgets, started->power.watts, parts, count, end_s);
    }
    if (known)
        known->started++;
}

void sluice_plan_job_started(uint32_t job_id, uint32_t array_id, const struct sluice_part *parts, uint32_t count,
                             int64_t end_s, const struct sluice_job_watts *power)
{
    struct started started = {.count = count < START_PARTS ? count : START_PARTS, .end_s = end_s};
    if (power)
        started.power = *power;
    memcpy(started.parts, parts, started.count * sizeof *parts);
    pthread_mutex_lock(&lock);
    started.job_id = in_force && find(in_force, job_id) ? job_id : array_id ? array_id : job_id;
    if (in_force)
        note_start(in_force, &started, parts, count);
    const bool cut = started.power.watts && count > START_PARTS; /* not all of its watts would be remembered */
    if (starts && start_count < STARTS_REMEMBERED && !cut)
        starts[start_count++] = started;
    else if (starts)
        outdated = true;
    pthread_mutex_unlock(&lock);
}

void sluice_plan_invalidate(void)
{
    pthread_mutex_lock(&lock);
    struct sluice_plan *old = in_force;
    in_force = NULL;
    outdated = true;
    pthread_mutex_unlock(&lock);
    sluice_plan_release(old);
}

/* ---- planning ---- */

enum sluice_error sluice_planner_new(const struct sluice_planner_config *config, struct sluice_planner **planner,
                                     struct sluice_error_text *text)
{
    (void)text;
    struct sluice_planner *made = calloc(1, sizeof *made);
    if (!made)
        return SLUICE_ERROR_NO_MEMORY;
    made->config = config ? *config : (struct sluice_planner_config){0};
    if (!made->config.max_jobs)
        made->config.max_jobs = 16384;
    if (!made->config.max_nodes)
        made->config.max_nodes = 1024;
    if (!made->config.max_running)
        made->config.max_running = 65536;
    size_t jobs = made->config.max_jobs;
    made->jobs = calloc(jobs, sizeof *made->jobs);
    made->starts = calloc(jobs, sizeof *made->starts);
    made->parts = calloc(2 * jobs, sizeof *made->parts);
    made->running_parts = calloc(SLUICE_MAX_NODES, sizeof *made->running_parts);
    pthread_mutex_lock(&lock);
    if (!starts)
        starts = calloc(STARTS_REMEMBERED, sizeof *starts);
    bool whole = starts && made->jobs && made->starts && made->parts && made->running_parts;
    pthread_mutex_unlock(&lock);
    if (!whole) {
        sluice_planner_free(made);
        return SLUICE_ERROR_NO_MEMORY;
    }
    *planner = made;
    return SLUICE_OK;
}

void sluice_planner_free(struct sluice_planner *planner)
{
    if (!planner)
        return;
    sluice_plan_invalidate();
    pthread_mutex_lock(&lock);
    free(starts);
    starts = NULL;
    start_count = 0;
    pthread_mutex_unlock(&lock);
    sluice_planner_forget(planner);
    sluice_backfill_free(planner->backfill);
    free(planner->jobs);
    free(planner->starts);
    free(planner->parts);
    free(planner->running_parts);
    free(planner->claimed);
    free(planner);
}

void sluice_planner_forget(struct sluice_planner *planner)
{
    sluice_plan_release(planner->last);
    planner->last = NULL;
}

void sluice_planner_set_power(struct sluice_planner *planner, struct sluice_power *power, uint32_t budgets,
                              const uint64_t *counting)
{
    planner->power = power;
    planner->budgets = budgets;
    planner->counting = counting;
}

void sluice_planner_begin(struct sluice_planner *planner)
{
    (void)planner;
    pthread_mutex_lock(&lock);
    start_count = 0;
    outdated = false;
    pthread_mutex_unlock(&lock);
}

/* The core's handle fits the cluster. */
static enum sluice_error make_room(struct sluice_planner *planner, uint32_t nodes, struct sluice_error_text *text)
{
    if (nodes > planner->claimed_room) {
        uint32_t *claimed = realloc(planner->claimed, nodes * sizeof *claimed);
        if (!claimed)
            return SLUICE_ERROR_NO_MEMORY;
        planner->claimed = claimed;
        planner->claimed_room = nodes;
    }
    if (planner->backfill && nodes <= planner->backfill_nodes)
        return SLUICE_OK;
    sluice_backfill_free(planner->backfill);
    planner->backfill = NULL;
    planner->backfill_nodes = nodes > planner->config.max_nodes ? nodes : planner->config.max_nodes;
    struct sluice_backfill_config config = {.max_jobs = planner->config.max_jobs,
                                            .max_running = planner->config.max_running,
                                            .max_planned = 2 * planner->config.max_jobs};
    return sluice_backfill_new(&config, planner->backfill_nodes, &planner->backfill, text);
}

/* The reservation that the last plan has for the ordinal-th waiting task of a job. */
static const struct entry *reservation_of(const struct sluice_plan *last, uint32_t job_id, uint32_t ordinal)
{
    const struct known *known = find(last, job_id);
    for (uint32_t index = known ? known->first : NONE; index != NONE; index = last->entries[index].next) {
        const struct entry *entry = &last->entries[index];
        if (entry->state != SLUICE_PLAN_LATER || entry->ordinal < known->started)
            continue;
        if (ordinal-- == 0)
            return entry;
    }
    return NULL;
}

static struct sluice_plan *plan_new(uint32_t entries, uint32_t parts, uint32_t claims)
{
    uint32_t slots = 16;
    while (slots < 2 * entries)
        slots *= 2;
    struct sluice_plan *plan = calloc(1, sizeof *plan);
    if (!plan)
        return NULL;
    atomic_init(&plan->references, 1);
    plan->known_mask = slots - 1;
    plan->entries = calloc(entries + 1, sizeof *plan->entries);
    plan->parts = calloc(parts + 1, sizeof *plan->parts);
    plan->known = calloc(slots, sizeof *plan->known);
    plan->claims = calloc(claims + 1, sizeof *plan->claims);
    if (plan->entries && plan->parts && plan->known && plan->claims)
        return plan;
    plan_free(plan);
    return NULL;
}

/* Entries of the same record are linked in the order of planning. `tail` has room for an entry each. */
static void link_entry(struct sluice_plan *plan, uint32_t index, uint32_t *tail)
{
    struct entry *entry = &plan->entries[index];
    struct known *known = &plan->known[slot_of(plan, entry->job_id)];
    entry->next = NONE;
    if (!known->job_id) {
        *known = (struct known){.job_id = entry->job_id, .first = index};
    } else {
        struct entry *before = &plan->entries[tail[known->first]];
        before->next = index;
        entry->ordinal = before->ordinal + 1;
    }
    tail[known->first] = index;
}

static bool is_claim(const struct entry *entry)
{
    return entry->state == SLUICE_PLAN_LATER || (entry->state == SLUICE_PLAN_NOW && entry->group);
}

static int by_node(const void *a, const void *b)
{
    const struct claim *one = a, *other = b;
    if (one->node != other->node)
        return one->node < other->node ? -1 : 1;
    return one->entry < other->entry ? -1 : one->entry > other->entry;
}

static void read_claims(struct sluice_planner *planner, struct sluice_plan *plan, const struct sluice_cluster *cluster,
                        uint32_t nodes)
{
    for (uint32_t e = 0; e < plan->entry_count; e++) {
        const struct entry *entry = &plan->entries[e];
        for (uint32_t i = 0; is_claim(entry) && i < entry->part_count; i++)
            plan->claims[plan->claim_count++] = (struct claim){.node = plan->parts[entry->first_part + i].node,
                                                               .entry = e,
                                                               .start_s = entry->start_s,
                                                               .end_s = entry->start_s + entry->limit_s};
    }
    qsort(plan->claims, plan->claim_count, sizeof *plan->claims, by_node);
    memset(planner->claimed, 0xff, nodes * sizeof *planner->claimed);
    for (uint32_t c = plan->claim_count; c-- > 0;) {
        struct claim *claim = &plan->claims[c];
        struct sluice_node_view view;
        planner->claimed[claim->node] = c;
        if (sluice_node_read(cluster, claim->node, &view, NULL) != SLUICE_OK)
            continue; /* nothing next to it */
        claim->cpus_milli = view.cpus_milli;
        claim->host_memory_mib = view.host_memory_mib;
        claim->gpu_count = view.gpu_count;
        memcpy(claim->gpu_total, view.gpu_memory_mib, sizeof claim->gpu_total);
        memcpy(claim->gpu_free, view.gpu_memory_mib, sizeof claim->gpu_free);
        for (uint32_t gpu = 0; gpu < view.gpu_count; gpu++)
            claim->unclaimed[gpu] = 100;
    }
}

/* Take off what holds, or will hold, the part from start_s to end_s. */
static void use_part(struct sluice_planner *planner, struct sluice_plan *plan, const struct sluice_part *part,
                     int64_t start_s, int64_t end_s)
{
    for (uint32_t c = planner->claimed[part->node]; c < plan->claim_count; c++) {
        struct claim *claim = &plan->claims[c];
        if (claim->node != part->node)
            break;
        if (start_s < claim->end_s && end_s > claim->start_s)
            take_off(claim, part);
    }
}

static void compute_claims(struct sluice_planner *planner, struct sluice_plan *plan,
                           const struct sluice_cluster *cluster, int64_t now_s,
                           const struct sluice_backfill_running *running, uint32_t running_count)
{
    struct sluice_cluster_totals totals;
    sluice_cluster_read_totals(cluster, &totals);
    read_claims(planner, plan, cluster, totals.nodes);
    if (!plan->claim_count)
        return;
    for (uint32_t i = 0; i < running_count; i++) {
        uint32_t count = 0;
        int64_t end_s = running[i].end_s > now_s ? running[i].end_s : now_s + 1;
        if (sluice_allocation_read(cluster, running[i].allocation, planner->running_parts, SLUICE_MAX_NODES, &count,
                                   NULL) != SLUICE_OK)
            continue;
        for (uint32_t p = 0; p < count; p++)
            use_part(planner, plan, &planner->running_parts[p], now_s, end_s);
    }
    for (uint32_t e = 0; e < plan->entry_count; e++) {
        const struct entry *entry = &plan->entries[e];
        for (uint32_t p = 0; p < entry->part_count && entry->state != SLUICE_PLAN_WATTS; p++)
            use_part(planner, plan, &plan->parts[entry->first_part + p], entry->start_s,
                     entry->start_s + entry->limit_s);
    }
}

static bool on_nodes(const struct sluice_part *parts, uint32_t count, const uint64_t *words, size_t word_count)
{
    for (uint32_t i = 0; i < count; i++)
        if (parts[i].node / 64 < word_count && words[parts[i].node / 64] >> parts[i].node % 64 & 1)
            return true;
    return false;
}

static struct sluice_plan *make_plan(struct sluice_planner *planner, int64_t now_s, const struct sluice_plan_job *jobs,
                                     uint32_t job_count, uint32_t part_count, const uint64_t *busy, size_t busy_words)
{
    uint32_t claims = 0;
    for (uint32_t i = 0; i < job_count; i++)
        claims += planner->starts[i].start_s != SLUICE_BACKFILL_NO_START ? planner->starts[i].part_count : 0;
    struct sluice_plan *plan = plan_new(job_count, part_count, claims);
    uint32_t *tail = calloc(job_count + 1, sizeof *tail);
    if (!plan || !tail) {
        plan_free(plan);
        free(tail);
        return NULL;
    }
    plan->made_s = now_s;
    plan->entry_count = job_count;
    memcpy(plan->parts, planner->parts, part_count * sizeof *plan->parts);
    for (uint32_t i = 0; i < job_count; i++) {
        const struct sluice_backfill_start *start = &planner->starts[i];
        bool planned = start->start_s != SLUICE_BACKFILL_NO_START;
        plan->entries[i] = (struct entry){.job_id = jobs[i].job_id,
                                          .group = jobs[i].group,
                                          .rank = jobs[i].rank,
                                          .place = jobs[i].place,
                                          .limit_s = jobs[i].limit_s,
                                          .start_s = planned ? start->start_s : 0,
                                          .first_part = planned ? start->first_part : 0,
                                          .part_count = planned ? start->part_count : 0,
                                          .watts = start->watts,
                                          .waits_for_power = start->waits_for_power};
        if (planned && jobs[i].drawing)
            plan->entries[i].state = SLUICE_PLAN_WATTS;
        else if (planned && start->start_s > now_s)
            plan->entries[i].state = SLUICE_PLAN_LATER;
        else if (planned)
            plan->entries[i].state = SLUICE_PLAN_NOW;
        link_entry(plan, i, tail);
    }
    /* Jobs that would start on nodes that take nothing yet get their start at the next moment: a group as a whole. */
    for (uint32_t first = 0, end; first < job_count; first = end) {
        bool waits = false;
        for (end = first; end < job_count; end++) {
            const struct entry *entry = &plan->entries[end];
            if (end > first && (!entry->group || entry->group != plan->entries[first].group))
                break;
            waits |= entry->state == SLUICE_PLAN_NOW && busy &&
                     on_nodes(plan->parts + entry->first_part, entry->part_count, busy, busy_words);
        }
        for (uint32_t i = first; waits && i < end; i++) {
            plan->entries[i].state = SLUICE_PLAN_LATER;
            plan->entries[i].start_s = now_s + 1;
        }
    }
    free(tail);
    return plan;
}

static void count_plan(const struct sluice_planner *planner, const struct sluice_plan *plan, int64_t now_s)
{
    uint32_t now = 0, reserved = 0;
    uint64_t slipped = 0;
    for (uint32_t i = 0; i < plan->entry_count; i++) {
        const struct entry *entry = &plan->entries[i];
        now += entry->state == SLUICE_PLAN_NOW;
        reserved += entry->state == SLUICE_PLAN_LATER;
        const struct sluice_backfill_job *asked = &planner->jobs[i];
        slipped += asked->held_count && !asked->watts_only && asked->held_start_s > now_s &&
                   entry->start_s > asked->held_start_s;
    }
    pthread_mutex_lock(&lock);
    counts.jobs = plan->entry_count;
    counts.now = now;
    counts.reserved = reserved;
    counts.slipped += slipped;
    pthread_mutex_unlock(&lock);
}

/* How large a job is among others: whole GPUs, of all its nodes. */
static int64_t size_of(const struct sluice_plan_job *job)
{
    const struct sluice_request *request = &job->request;
    int64_t nodes = request->nodes_min > 1 && !(request->flags & SLUICE_GPUS_TOTAL) ? request->nodes_min : 1;
    return request->gpu_memory_mib ? 0 : request->gpus * nodes;
}

/* The jobs for the core, each with the reservation of the plan before. Where a larger job comes before it in the order
 * that is not kept: a small one's would keep the large one from a place that came free early, and finds another. */
static void take_jobs(struct sluice_planner *planner, const struct sluice_plan_job *jobs, uint32_t job_count)
{
    uint32_t ordinal = 0;
    int64_t largest = 0;
    for (uint32_t first = 0, end; first < job_count; first = end) {
        int64_t size = 0;
        for (end = first;
             end < job_count && (end == first || (jobs[end].group && jobs[end].group == jobs[first].group)); end++)
            size += size_of(&jobs[end]);
        for (uint32_t i = first; i < end; i++) {
            ordinal = i && jobs[i].job_id == jobs[i - 1].job_id ? ordinal + 1 : 0;
            const struct entry *held = reservation_of(planner->last, jobs[i].job_id, ordinal);
            planner->jobs[i] = (struct sluice_backfill_job){.request = &jobs[i].request,
                                                            .limit_s = jobs[i].limit_s,
                                                            .group = jobs[i].group,
                                                            .watts = jobs[i].power.watts,
                                                            .least_watts = jobs[i].power.least,
                                                            .power_guaranteed = jobs[i].power.guaranteed,
                                                            .power_budgets = jobs[i].power.budgets};
            if (jobs[i].drawing) {
                planner->jobs[i].watts_only = true;
                planner->jobs[i].held = jobs[i].drawing;
                planner->jobs[i].held_count = jobs[i].drawing_count;
                planner->jobs[i].held_start_s = jobs[i].drawing_from_s;
            } else if (held && size >= largest) {
                planner->jobs[i].held = planner->last->parts + held->first_part;
                planner->jobs[i].held_count = held->part_count;
                planner->jobs[i].held_start_s = held->start_s;
            }
        }
        largest = size > largest ? size : largest;
    }
}

enum sluice_error sluice_planner_plan(struct sluice_planner *planner, const struct sluice_cluster *cluster,
                                      int64_t now_s, const struct sluice_backfill_running *running,
                                      uint32_t running_count, const struct sluice_plan_job *jobs, uint32_t job_count,
                                      uint32_t reservations, const uint64_t *busy, size_t busy_words,
                                      struct sluice_plan **plan, struct sluice_error_text *text)
{
    struct sluice_cluster_totals totals;
    sluice_cluster_read_totals(cluster, &totals);
    enum sluice_error error = make_room(planner, totals.nodes, text);
    if (error)
        return error;
    if (job_count > planner->config.max_jobs)
        job_count = planner->config.max_jobs;
    take_jobs(planner, jobs, job_count);
    uint32_t part_count = 0;
    sluice_backfill_set_power(planner->backfill, planner->power);
    error = sluice_backfill_plan(planner->backfill, cluster, now_s, running, running_count, planner->jobs, job_count,
                                 reservations, planner->starts, planner->parts, 2 * planner->config.max_jobs,
                                 &part_count, text);
    if (error)
        return error;
    struct sluice_plan *made = make_plan(planner, now_s, jobs, job_count, part_count, busy, busy_words);
    if (made && planner->power &&
        !(made->left = sluice_watts_left_new(planner->power, planner->budgets, planner->counting, totals.nodes))) {
        plan_free(made);
        made = NULL;
    }
    if (!made)
        return SLUICE_ERROR_NO_MEMORY;
    compute_claims(planner, made, cluster, now_s, running, running_count);
    count_plan(planner, made, now_s);
    sluice_planner_forget(planner);
    atomic_fetch_add(&made->references, 1);
    planner->last = made;
    *plan = made;
    return SLUICE_OK;
}

/* Nothing starts now on nodes where something started since the picture: what is free there is not what the plan counts
 * on. A gang's members stay: Slurm refuses those whose place is taken, and the gang starts as a whole or not at all. */
static void drop_touched(struct sluice_plan *plan)
{
    static uint64_t touched[SLUICE_MAX_NODES / 64]; /* under the lock */
    memset(touched, 0, sizeof touched);
    for (uint32_t s = 0; s < start_count; s++)
        for (uint32_t p = 0; p < starts[s].count; p++)
            if (starts[s].parts[p].node < SLUICE_MAX_NODES)
                touched[starts[s].parts[p].node / 64] |= UINT64_C(1) << starts[s].parts[p].node % 64;
    for (uint32_t e = 0; start_count && e < plan->entry_count; e++) {
        struct entry *entry = &plan->entries[e];
        if (entry->state == SLUICE_PLAN_NOW && !entry->group &&
            on_nodes(plan->parts + entry->first_part, entry->part_count, touched, SLUICE_MAX_NODES / 64))
            entry->state = SLUICE_PLAN_UNKNOWN;
    }
}

void sluice_plan_publish(struct sluice_planner *planner, struct sluice_plan *plan, int64_t valid_s)
{
    (void)planner;
    pthread_mutex_lock(&lock);
    struct sluice_plan *old = in_force;
    bool usable = !outdated;
    for (uint32_t s = 0; usable && s < start_count; s++)
        note_start(plan, &starts[s], starts[s].parts, starts[s].count);
    drop_touched(plan);
    start_count = 0;
    plan->valid_until_s = plan->made_s + valid_s;
    in_force = usable ? plan : NULL;
    counts.plans += usable;
    counts.failures += !usable;
    pthread_mutex_unlock(&lock);
    sluice_plan_release(old);
    if (!usable)
        sluice_plan_release(plan);
}

/* ---- figures ---- */

void sluice_plan_count_pass(uint64_t lock_us, uint64_t plan_us, bool failed)
{
    pthread_mutex_lock(&lock);
    counts.failures += failed;
    counts.lock_us_max = lock_us > counts.lock_us_max ? lock_us : counts.lock_us_max;
    counts.plan_us_max = plan_us > counts.plan_us_max ? plan_us : counts.plan_us_max;
    counts.plan_us_last = plan_us;
    counts.lock_us_last = lock_us;
    pthread_mutex_unlock(&lock);
}

void sluice_plan_count_start(bool started)
{
    pthread_mutex_lock(&lock);
    counts.started += started;
    counts.not_started += !started;
    pthread_mutex_unlock(&lock);
}

struct sluice_plan_counts sluice_plan_counts(void)
{
    pthread_mutex_lock(&lock);
    struct sluice_plan_counts copy = counts;
    pthread_mutex_unlock(&lock);
    return copy;
}
