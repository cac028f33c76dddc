/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Replay of a job trace under a policy: an event is an arrival or an end, and a decision follows it.
 *
 * A job's progress is brought up to date only when it matters (settle): what it was served, and what of its restart it
 * still has to pay before it goes on. Running jobs lie in two heaps, by when they will end, which only the replay
 * knows, and by when the policy expects them to end, which it reserves by.
 */
#include "cluster.h"
#include "error.h"

#include <stdlib.h>
#include <string.h>

enum {
    ACCURACY_HISTORY = 4096,
    TIER_TRIES = 16,      /* blocked jobs that preemption makes room for at one decision */
    TYPICAL = 64,         /* request shapes that fragmentation is measured with: the most frequent ones */
    RENEWALS = 16,        /* a reservation is looked for again after a sixteenth of the wait that it predicted */
    PLAN_PARTS = 1 << 20, /* most parts that run or are planned at a time under conservative backfill */
    CHARGE_PERIOD = 60,   /* fair-share's units of time between charges of what runs; an end is charged at once */
    HOUR_S = 3600,        /* in which so many moves are made at most */
    MOST_GAIN_S = 86400,  /* of a start that moves make possible */
    ENDS = 0,             /* the heaps */
    EXPECTED = 1,
};

struct job {
    int64_t served;  /* ticks of work done */
    int64_t since;   /* `served` and `debt` are as of then */
    int64_t debt;    /* of the restart, still to be paid in this run */
    int64_t started; /* this run */
    int64_t charged; /* fair-share usage is charged up to then */
    int64_t key[2];  /* in the heaps */
    uint32_t place[2];
    uint64_t allocation;
};

struct request_class {
    struct sluice_request request;
    struct need need;
    uint32_t jobs;
    bool never;
    uint32_t full;   /* decision in which it found no place */
    uint32_t vetoed; /* decision in which it would have delayed the reservation */
};

struct heap {
    uint32_t count;
    uint32_t *jobs;
};

struct reservation {
    bool held;
    uint32_t job;
    int64_t start; /* when it can start if running jobs end as expected */
    int64_t renew; /* from when on it is looked for again, because jobs may have ended early */
};

/* Room for a conservative plan. */
struct plan {
    struct sluice_backfill *backfill;
    struct sluice_backfill_running *running;
    struct sluice_backfill_job *jobs;
    struct sluice_backfill_start *starts;
    struct sluice_part *parts;
    uint32_t part_capacity;
};

/* Room for moves of running jobs. */
struct moves {
    struct sluice_compaction *compaction;
    struct sluice_request *requests; /* by class */
    struct sluice_movable *movables;
    uint32_t *jobs; /* whose they are */
    int64_t hour;   /* of the last move */
    uint32_t within_hour;
};

struct sluice_replay {
    struct sluice_cluster *cluster;
    struct sluice_replay_config config;
    struct sluice_fairshare *fairshare;
    struct request_class *classes;
    uint32_t class_count;
    struct sluice_replay_job *trace;
    struct job *jobs;
    struct sluice_replay_outcome *outcomes;
    uint32_t count, next, ended;

    int64_t now;
    int64_t next_charge;   /* of running jobs' usage */
    int64_t next_decision; /* not before; only with an interval */
    bool decision_due;     /* something happened since the last one */
    bool room_made;        /* something ended since the last one */
    uint32_t first_new;    /* jobs submitted since the last one */
    uint32_t decision;
    uint64_t decisions;

    uint32_t *pending; /* in order of submission */
    uint32_t pending_count;
    struct heap heap[2];

    struct sluice_order *order;
    struct sluice_order_job *order_jobs;
    struct sluice_guard_job *guard_jobs;
    uint32_t *active; /* the jobs that order_jobs are about */
    uint32_t *ranked;
    struct sluice_accuracy *accuracy;
    struct sluice_guard *guard;
    struct sluice_preemption *preemption;
    struct plan plan;
    struct moves moves;
    struct sluice_candidate *candidates;
    uint32_t *victims;
    uint32_t *suspended;
    struct reservation reservation;
    uint64_t *reserved_nodes; /* bitmap: where the first job that cannot start has its reservation */
    struct heap scratch;
    struct sluice_placement placement;
    int64_t gpus_held_milli;

    struct sluice_replay_sample samples[SLUICE_REPLAY_MAX_SAMPLES];
    uint32_t sample_count;
    int64_t next_sample;
    uint32_t typical[TYPICAL];
    uint32_t typical_count;
    uint64_t typical_weight;
};

/* ---- heaps of running jobs, least key first ---- */

static void heap_set(struct sluice_replay *replay, int which, uint32_t place, uint32_t job)
{
    replay->heap[which].jobs[place] = job;
    replay->jobs[job].place[which] = place;
}

/* Is `a` before `b`? Ties by job, so that the sequence does not depend on history. */
static bool heap_before(const struct sluice_replay *replay, int which, uint32_t a, uint32_t b)
{
    int64_t left = replay->jobs[a].key[which], right = replay->jobs[b].key[which];
    return left != right ? left < right : a < b;
}

static void heap_settle(struct sluice_replay *replay, int which, uint32_t place)
{
    struct heap *heap = &replay->heap[which];
    uint32_t job = heap->jobs[place];
    while (place && heap_before(replay, which, job, heap->jobs[(place - 1) / 2])) {
        heap_set(replay, which, place, heap->jobs[(place - 1) / 2]);
        place = (place - 1) / 2;
    }
    for (;;) {
        uint32_t child = 2 * place + 1;
        if (child >= heap->count)
            break;
        if (child + 1 < heap->count && heap_before(replay, which, heap->jobs[child + 1], heap->jobs[child]))
            child++;
        if (!heap_before(replay, which, heap->jobs[child], job))
            break;
        heap_set(replay, which, place, heap->jobs[child]);
        place = child;
    }
    heap_set(replay, which, place, job);
}

static void heap_add(struct sluice_replay *replay, int which, uint32_t job)
{
    heap_set(replay, which, replay->heap[which].count++, job);
    heap_settle(replay, which, replay->jobs[job].place[which]);
}

static void heap_remove(struct sluice_replay *replay, int which, uint32_t job)
{
    struct heap *heap = &replay->heap[which];
    uint32_t place = replay->jobs[job].place[which], last = heap->jobs[--heap->count];
    if (last == job)
        return;
    heap_set(replay, which, place, last);
    heap_settle(replay, which, place);
}

/* ---- one job's progress ---- */

static int64_t later(int64_t time, int64_t by)
{
    int64_t sum;
    return __builtin_add_overflow(time, by, &sum) ? INT64_MAX : sum;
}

static void settle(struct sluice_replay *replay, uint32_t index)
{
    struct job *job = &replay->jobs[index];
    int64_t elapsed = replay->now - job->since;
    int64_t paid = elapsed < job->debt ? elapsed : job->debt;
    job->debt -= paid;
    job->served += elapsed - paid;
    job->since = replay->now;
    replay->outcomes[index].busy += elapsed;
}

static void remaining(const struct sluice_replay *replay, uint32_t index, int64_t *expected, int64_t *longest)
{
    sluice_accuracy_remaining(replay->accuracy, replay->trace[index].estimate, replay->jobs[index].served, expected,
                              longest);
}

/* When it will end, and when that is expected, if it goes on as it is; both are settled. */
static void schedule_end(struct sluice_replay *replay, uint32_t index)
{
    struct job *job = &replay->jobs[index];
    int64_t expected, longest;
    remaining(replay, index, &expected, &longest);
    job->key[ENDS] = later(replay->now, job->debt + replay->trace[index].run - job->served);
    job->key[EXPECTED] = later(later(replay->now, job->debt), expected);
}

static void charge(struct sluice_replay *replay, uint32_t index)
{
    const struct sluice_replay_job *trace = &replay->trace[index];
    struct job *job = &replay->jobs[index];
    int64_t units = (replay->now - job->charged) / replay->config.second;
    if (!replay->fairshare || units < 1)
        return;
    job->charged += units * replay->config.second;
    uint64_t usage, most = UINT64_C(1) << 40;
    if (__builtin_mul_overflow((uint64_t)units, (uint64_t)trace->gpus_milli, &usage) || usage > most)
        usage = most;
    (void)sluice_fairshare_charge(replay->fairshare, trace->account, usage, replay->now / replay->config.second,
                                  NULL); /* the account was checked at the start */
}

/* ---- starting and stopping ---- */

static void enter(struct sluice_replay *replay, uint32_t index, uint64_t allocation)
{
    struct job *job = &replay->jobs[index];
    struct sluice_replay_outcome *outcome = &replay->outcomes[index];
    job->allocation = allocation;
    job->since = job->started = job->charged = replay->now;
    job->debt = replay->config.restart_each_decision ? 0 : replay->trace[index].restart;
    outcome->state = SLUICE_REPLAY_RUNNING;
    if (outcome->start < 0)
        outcome->start = replay->now;
    replay->gpus_held_milli += replay->trace[index].gpus_milli;
    schedule_end(replay, index);
    heap_add(replay, ENDS, index);
    heap_add(replay, EXPECTED, index);
}

/* Off the cluster; its progress is settled. The allocation is the caller's to release. */
static void leave(struct sluice_replay *replay, uint32_t index)
{
    charge(replay, index);
    heap_remove(replay, ENDS, index);
    heap_remove(replay, EXPECTED, index);
    replay->gpus_held_milli -= replay->trace[index].gpus_milli;
}

static enum sluice_error place(struct sluice_replay *replay, uint32_t index, uint64_t *allocation,
                               struct sluice_error_text *text)
{
    struct request_class *class = &replay->classes[replay->trace[index].request];
    if (class->full == replay->decision)
        return SLUICE_ERROR_NO_PLACE;
    class->request.seed = index;
    enum sluice_error error =
        sluice_start(replay->cluster, replay->config.placement, &class->request, &replay->placement, allocation, text);
    if (error == SLUICE_ERROR_NO_PLACE)
        class->full = replay->decision; /* within a decision there is only less and less room */
    return error;
}

static enum sluice_error finish(struct sluice_replay *replay, uint32_t index, struct sluice_error_text *text)
{
    const struct sluice_replay_job *trace = &replay->trace[index];
    settle(replay, index);
    leave(replay, index);
    replay->outcomes[index].state = SLUICE_REPLAY_ENDED;
    replay->outcomes[index].end = replay->now;
    replay->ended++;
    replay->decision_due = replay->room_made = true;
    enum sluice_error error = sluice_release(replay->cluster, replay->jobs[index].allocation, text);
    if (!error && replay->accuracy)
        error = sluice_accuracy_record(replay->accuracy, trace->estimate, trace->run, text);
    return error;
}

/* Back into the queue, at its place by submission. */
static void requeue(struct sluice_replay *replay, uint32_t index)
{
    struct job *job = &replay->jobs[index];
    int64_t step = replay->config.checkpoint;
    if (step)
        job->served = step < 0 ? 0 : job->served - job->served % step;
    replay->outcomes[index].state = SLUICE_REPLAY_PENDING;
    replay->outcomes[index].preemptions++;
    uint32_t at = replay->pending_count++;
    for (; at && replay->pending[at - 1] > index; at--)
        replay->pending[at] = replay->pending[at - 1];
    replay->pending[at] = index;
}

/* Take the jobs that no longer wait out of the queue. */
static void close_ranks(struct sluice_replay *replay)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < replay->pending_count; i++) {
        if (replay->outcomes[replay->pending[i]].state == SLUICE_REPLAY_PENDING)
            replay->pending[kept++] = replay->pending[i];
    }
    replay->pending_count = kept;
}

/* ---- the reservation of the first job that cannot start ---- */

static bool fits_now(struct sluice_replay *replay, uint32_t job)
{
    return !sluice_place(replay->cluster, replay->config.placement,
                         &replay->classes[replay->trace[job].request].request, &replay->placement, NULL);
}

static int64_t expected_end(const struct sluice_replay *replay, uint32_t job)
{
    int64_t end = replay->jobs[job].key[EXPECTED];
    return end > replay->now ? end : replay->now + 1; /* overdue: expected to end now */
}

/* A copy of the running jobs to take them from, in order of their expected ends. */
static void list_expected(struct sluice_replay *replay)
{
    const struct heap *running = &replay->heap[EXPECTED];
    replay->scratch.count = running->count;
    memcpy(replay->scratch.jobs, running->jobs, running->count * sizeof *running->jobs);
}

static uint32_t pop_expected(struct sluice_replay *replay)
{
    struct heap *heap = &replay->scratch;
    uint32_t first = heap->jobs[0], moved = heap->jobs[--heap->count], at = 0;
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= heap->count)
            break;
        if (child + 1 < heap->count && heap_before(replay, EXPECTED, heap->jobs[child + 1], heap->jobs[child]))
            child++;
        if (!heap_before(replay, EXPECTED, heap->jobs[child], moved))
            break;
        heap->jobs[at] = heap->jobs[child];
        at = child;
    }
    heap->jobs[at] = moved;
    return first;
}

/* Have the first `to` of `suspended` suspended, where so far the first `from` are. */
static void suspend(struct sluice_replay *replay, uint32_t from, uint32_t to)
{
    for (; from < to; from++)
        sluice_allocation_suspend(replay->cluster, replay->jobs[replay->suspended[from]].allocation);
    for (; from > to; from--)
        sluice_allocation_resume(replay->cluster, replay->jobs[replay->suspended[from - 1]].allocation);
}

/* Where and when the first job can start: after the fewest expected ends that make room for it, which are found at
 * doubling distances, then by bisection, because a job that fits goes on fitting when more ends. */
static void reserve(struct sluice_replay *replay, uint32_t job)
{
    list_expected(replay);
    uint32_t too_few = 0, enough = 0, suspended = 0;
    do {
        too_few = enough;
        for (uint32_t wanted = enough ? 2 * enough : 1; enough < wanted && replay->scratch.count; enough++)
            replay->suspended[enough] = pop_expected(replay);
        suspend(replay, suspended, enough);
        suspended = enough;
    } while (!fits_now(replay, job) && replay->scratch.count);
    while (enough - too_few > 1) {
        uint32_t middle = too_few + (enough - too_few) / 2;
        suspend(replay, suspended, middle);
        suspended = middle;
        if (fits_now(replay, job))
            enough = middle;
        else
            too_few = middle;
    }
    suspend(replay, suspended, enough);
    memset(replay->reserved_nodes, 0, replay->cluster->words * sizeof *replay->reserved_nodes);
    if (fits_now(replay, job)) {
        for (uint32_t i = 0; i < replay->placement.part_count; i++) {
            uint32_t node = replay->placement.parts[i].node;
            replay->reserved_nodes[node / 64] |= UINT64_C(1) << (node % 64);
        }
    }
    suspend(replay, enough, 0);
    int64_t start = enough ? expected_end(replay, replay->suspended[enough - 1]) : replay->now;
    replay->reservation = (struct reservation){
        .held = true, .job = job, .start = start, .renew = replay->now + (start - replay->now) / RENEWALS};
}

static bool touches_reserved(const struct sluice_replay *replay, uint64_t allocation)
{
    const struct part *parts = replay->cluster->parts;
    for (uint32_t part = sluice_allocation_first_part(replay->cluster, allocation); part != NONE;
         part = parts[part].next) {
        if (sluice_bit(replay->reserved_nodes, parts[part].node))
            return true;
    }
    return false;
}

/* With a candidate running beyond the reservation's start, does the first job still fit on the nodes it has reserved?
 * Only what happens on those nodes matters. */
static bool keeps(struct sluice_replay *replay, uint64_t candidate)
{
    if (!touches_reserved(replay, candidate))
        return true;
    const struct heap *running = &replay->heap[EXPECTED];
    uint32_t count = 0;
    for (uint32_t i = 0; i < running->count; i++) {
        if (expected_end(replay, running->jobs[i]) > replay->reservation.start)
            continue;
        uint64_t allocation = replay->jobs[running->jobs[i]].allocation;
        if (touches_reserved(replay, allocation)) {
            sluice_allocation_suspend(replay->cluster, allocation);
            replay->victims[count++] = running->jobs[i];
        }
    }
    struct sluice_request *request = &replay->classes[replay->trace[replay->reservation.job].request].request;
    request->allowed = replay->reserved_nodes;
    request->allowed_words = replay->cluster->words;
    bool fits = fits_now(replay, replay->reservation.job);
    request->allowed = NULL;
    request->allowed_words = 0;
    while (count)
        sluice_allocation_resume(replay->cluster, replay->jobs[replay->victims[--count]].allocation);
    return fits;
}

/* ---- decisions ---- */

static void describe(const struct sluice_replay *replay, uint32_t place_in_list, uint32_t index)
{
    const struct sluice_replay_job *trace = &replay->trace[index];
    int64_t expected, longest;
    remaining(replay, index, &expected, &longest);
    replay->active[place_in_list] = index;
    replay->order_jobs[place_in_list] = (struct sluice_order_job){
        .id = index,
        .submit_s = trace->submit,
        .eligible_s = trace->submit,
        .deadline_s = trace->deadline,
        .remaining_s = expected,
        .gpus = (trace->gpus_milli + 999) / 1000,
        .priority = trace->priority,
        .account = trace->account,
    };
    replay->guard_jobs[place_in_list] = (struct sluice_guard_job){
        .submit = trace->submit, .expected = expected, .longest = longest, .gpus_milli = trace->gpus_milli};
}

static bool plain_fifo(const struct sluice_replay_config *config)
{
    for (int factor = 0; factor < SLUICE_FACTOR_COUNT; factor++) {
        if (config->order.weight[factor])
            return false;
    }
    return !config->guarded;
}

/* Ranks the first `count` of `active`. */
static enum sluice_error rank(struct sluice_replay *replay, uint32_t count, struct sluice_error_text *text)
{
    if (replay->config.order.weight[SLUICE_FACTOR_FAIR_SHARE]) {
        if (replay->now >= replay->next_charge) {
            for (uint32_t i = 0; i < replay->heap[ENDS].count; i++)
                charge(replay, replay->heap[ENDS].jobs[i]);
            replay->next_charge = later(replay->now, CHARGE_PERIOD * replay->config.second);
        }
        sluice_fairshare_refresh(replay->fairshare, replay->now / replay->config.second);
    }
    enum sluice_error error = sluice_order_sort(replay->order, &replay->config.order, replay->fairshare,
                                                replay->order_jobs, count, replay->now, replay->ranked, text);
    uint32_t critical;
    if (!error && replay->guard)
        error = sluice_guard_apply(replay->guard, replay->guard_jobs, count, sluice_accuracy_spread(replay->accuracy),
                                   replay->now, replay->ranked, &critical, text);
    return error;
}

/* Place all jobs again, in sequence, on the empty cluster. */
static enum sluice_error decide_from_scratch(struct sluice_replay *replay, struct sluice_error_text *text)
{
    enum sluice_error error = SLUICE_OK;
    uint32_t count = 0;
    for (uint32_t i = 0; i < replay->heap[ENDS].count && !error; i++) {
        uint32_t index = replay->heap[ENDS].jobs[i];
        if (replay->config.restart_each_decision) /* a job that ends before the next decision does not pay it */
            replay->jobs[index].debt = replay->trace[index].restart;
        settle(replay, index);
        if (replay->config.restart_each_decision)
            replay->jobs[index].debt = 0;
        error = sluice_release(replay->cluster, replay->jobs[index].allocation, text);
        replay->victims[count] = index;
        describe(replay, count++, index);
    }
    uint32_t were_running = count;
    for (uint32_t i = 0; i < replay->pending_count; i++)
        describe(replay, count++, replay->pending[i]);
    if (!error)
        error = rank(replay, count, text);
    for (uint32_t i = 0; i < count && !error; i++) {
        uint32_t index = replay->active[replay->ranked[i]];
        struct job *job = &replay->jobs[index];
        uint64_t allocation = 0;
        error = place(replay, index, &allocation, text);
        if (error == SLUICE_ERROR_NO_PLACE) {
            error = SLUICE_OK;
            job->allocation = 0;
            if (replay->config.backfill == SLUICE_REPLAY_STRICT) {
                for (uint32_t rest = i + 1; rest < count; rest++)
                    replay->jobs[replay->active[replay->ranked[rest]]].allocation = 0;
                break;
            }
        } else if (!error && replay->outcomes[index].state == SLUICE_REPLAY_RUNNING) {
            job->allocation = allocation;
        } else if (!error) {
            enter(replay, index, allocation);
        }
    }
    close_ranks(replay);
    for (uint32_t i = 0; i < were_running && !error; i++) {
        uint32_t index = replay->victims[i];
        if (!replay->jobs[index].allocation) {
            leave(replay, index);
            requeue(replay, index);
        } else {
            schedule_end(replay, index);
            heap_settle(replay, ENDS, replay->jobs[index].place[ENDS]);
            heap_settle(replay, EXPECTED, replay->jobs[index].place[EXPECTED]);
        }
    }
    return error;
}

/* Make room for a job of a higher tier, if that can be done. */
static enum sluice_error preempt_for(struct sluice_replay *replay, uint32_t index, bool *started,
                                     struct sluice_error_text *text)
{
    const struct sluice_replay_job *trace = &replay->trace[index];
    uint32_t candidates = 0, victims = 0;
    for (uint32_t i = 0; i < replay->heap[ENDS].count; i++) {
        uint32_t other = replay->heap[ENDS].jobs[i];
        const struct job *job = &replay->jobs[other];
        if (replay->trace[other].tier >= trace->tier)
            continue;
        int64_t step = replay->config.checkpoint;
        int64_t ran = replay->now - job->started;
        replay->suspended[candidates] = other;
        replay->candidates[candidates++] = (struct sluice_candidate){
            .allocation = job->allocation,
            .started_s = job->started,
            .checkpoint_s = step < 0    ? 0
                            : step == 0 ? replay->now
                                        : job->started + ran - ran % step,
            .tier = replay->trace[other].tier,
        };
    }
    *started = false;
    struct sluice_preemptor preemptor = {.tier = trace->tier};
    enum sluice_error error = sluice_preemption_plan(
        replay->preemption, replay->config.placement, &replay->classes[trace->request].request, &preemptor,
        replay->candidates, candidates, replay->now, &replay->placement, replay->victims, &victims, text);
    if (error == SLUICE_ERROR_NO_PLACE)
        return SLUICE_OK;
    close_ranks(replay); /* a victim may have started in this very decision */
    for (uint32_t i = 0; i < victims && !error; i++) {
        uint32_t victim = replay->suspended[replay->victims[i]];
        settle(replay, victim);
        leave(replay, victim);
        error = sluice_release(replay->cluster, replay->jobs[victim].allocation, text);
        requeue(replay, victim);
    }
    uint64_t allocation;
    if (!error)
        error = sluice_commit(replay->cluster, &replay->placement, &allocation, text);
    if (!error) {
        enter(replay, index, allocation);
        *started = true;
    }
    return error;
}

/* ---- moves ---- */

static uint32_t list_movables(const struct sluice_replay *replay)
{
    int64_t cost_s = replay->config.move_cost / replay->config.second;
    uint32_t count = 0;
    for (uint32_t i = 0; i < replay->heap[ENDS].count; i++) {
        uint32_t index = replay->heap[ENDS].jobs[i];
        const struct sluice_replay_job *trace = &replay->trace[index];
        if (!trace->movable || replay->classes[trace->request].need.nodes_max > 1 || !trace->gpus_milli ||
            replay->outcomes[index].moves >= replay->config.moves_per_job)
            continue;
        replay->moves.jobs[count] = index;
        replay->moves.movables[count++] =
            (struct sluice_movable){.allocation = replay->jobs[index].allocation,
                                    .request = trace->request,
                                    .cost = trace->gpus_milli * (cost_s > 0 ? cost_s : 1)};
    }
    return count;
}

static uint32_t moves_left(struct sluice_replay *replay)
{
    int64_t hour = replay->now / replay->config.second / HOUR_S;
    if (hour != replay->moves.hour)
        replay->moves.within_hour = 0;
    replay->moves.hour = hour;
    uint32_t most = replay->config.moves_per_hour, made = replay->moves.within_hour;
    return made < most ? most - made : 0;
}

/* It goes on there, when it has paid for the move. */
static enum sluice_error move_to(struct sluice_replay *replay, uint32_t index, const struct sluice_part *to,
                                 struct sluice_error_text *text)
{
    struct job *job = &replay->jobs[index];
    struct sluice_part part = *to;
    const struct sluice_placement placement = {.parts = &part, .part_capacity = 1, .part_count = 1};
    settle(replay, index);
    heap_remove(replay, ENDS, index);
    heap_remove(replay, EXPECTED, index);
    job->debt = later(job->debt, replay->config.move_cost);
    schedule_end(replay, index);
    heap_add(replay, ENDS, index);
    heap_add(replay, EXPECTED, index);
    replay->outcomes[index].moves++;
    replay->moves.within_hour++;
    return sluice_commit(replay->cluster, &placement, &job->allocation, text);
}

/* All that moves leaves, then each goes to its new place, and the job starts. */
static enum sluice_error carry_out(struct sluice_replay *replay, uint32_t index, const struct sluice_move *moves,
                                   uint32_t count, const struct sluice_placement *placement,
                                   struct sluice_error_text *text)
{
    enum sluice_error error = SLUICE_OK;
    uint64_t allocation;
    for (uint32_t i = 0; i < count && !error; i++)
        error = sluice_release(replay->cluster, replay->moves.movables[moves[i].movable].allocation, text);
    for (uint32_t i = 0; i < count && !error; i++)
        error = move_to(replay, replay->moves.jobs[moves[i].movable], &moves[i].to, text);
    if (!error)
        error = sluice_commit(replay->cluster, placement, &allocation, text);
    if (!error)
        enter(replay, index, allocation);
    return error;
}

/* The first job that cannot start: if it has waited for too long, others may be moved for it. */
static enum sluice_error move_for(struct sluice_replay *replay, uint32_t index, bool *started,
                                  struct sluice_error_text *text)
{
    const struct sluice_replay_config *config = &replay->config;
    const struct sluice_replay_job *trace = &replay->trace[index];
    uint32_t left = moves_left(replay), count = 0;
    *started = false;
    if (!left || replay->classes[trace->request].need.total || !trace->gpus_milli ||
        replay->now - trace->submit < config->move_wait)
        return SLUICE_OK;
    reserve(replay, index);
    int64_t gain_s = (replay->reservation.start - replay->now) / config->second;
    struct sluice_compaction_limits limits = {.moves = left,
                                              .gain = trace->gpus_milli * (gain_s < MOST_GAIN_S ? gain_s : MOST_GAIN_S),
                                              .factor_permille = config->move_factor_permille};
    struct sluice_move moves[SLUICE_COMPACTION_MAX_MOVES];
    uint32_t movables = list_movables(replay);
    enum sluice_error error = sluice_compaction_plan(
        replay->moves.compaction, config->placement, replay->moves.requests, replay->class_count, trace->request,
        replay->moves.movables, movables, &limits, &replay->placement, moves, &count, text);
    if (error == SLUICE_ERROR_NO_PLACE)
        return SLUICE_OK;
    if (!error)
        error = carry_out(replay, index, moves, count, &replay->placement, text);
    *started = !error;
    replay->reservation.held = false; /* others may be where it was */
    return error;
}

/* Ticks as whole seconds, rounded up and within what a plan can look ahead. */
static int64_t plan_seconds(const struct sluice_replay *replay, int64_t ticks)
{
    int64_t seconds = ticks / replay->config.second + (ticks % replay->config.second != 0);
    return seconds < 1 ? 1 : seconds < SLUICE_BACKFILL_HORIZON_S / 2 ? seconds : SLUICE_BACKFILL_HORIZON_S / 2;
}

/* Start those whose planned start is now, where the plan has them. The first `tries` of the ranked jobs are planned. */
static enum sluice_error decide_by_plan(struct sluice_replay *replay, uint32_t tries, struct sluice_error_text *text)
{
    struct plan *plan = &replay->plan;
    uint32_t running = replay->heap[ENDS].count, part_count;
    for (uint32_t i = 0; i < running; i++) {
        uint32_t index = replay->heap[ENDS].jobs[i];
        plan->running[i] = (struct sluice_backfill_running){
            .allocation = replay->jobs[index].allocation,
            .end_s = plan_seconds(replay, expected_end(replay, index) - replay->now),
        };
    }
    for (uint32_t i = 0; i < tries; i++) {
        uint32_t index = replay->active[replay->ranked[i]];
        int64_t expected, longest;
        remaining(replay, index, &expected, &longest);
        plan->jobs[i] = (struct sluice_backfill_job){
            .request = &replay->classes[replay->trace[index].request].request,
            .limit_s = plan_seconds(replay, later(replay->trace[index].restart, expected)),
        };
    }
    enum sluice_error error =
        sluice_backfill_plan(plan->backfill, replay->cluster, 0, plan->running, running, plan->jobs, tries, tries,
                             plan->starts, plan->parts, plan->part_capacity, &part_count, text);
    bool any = false;
    for (uint32_t i = 0; i < tries && !error; i++) {
        const struct sluice_backfill_start *start = &plan->starts[i];
        if (start->start_s != 0)
            continue;
        struct sluice_placement placement = {.parts = plan->parts + start->first_part,
                                             .part_capacity = start->part_count,
                                             .part_count = start->part_count};
        uint64_t allocation;
        error = sluice_commit(replay->cluster, &placement, &allocation, text);
        if (!error)
            enter(replay, replay->active[replay->ranked[i]], allocation);
        any = true;
    }
    if (any)
        close_ranks(replay);
    return error;
}

/* One walk over the ranked jobs. */
struct walk {
    bool reserved; /* a job before this one could not start and has its reservation */
    bool blocked;  /* a job before this one could not start */
    bool any;      /* has started */
    uint32_t preempting;
};

/* The queue's jobs from `from` on, in their order. */
static enum sluice_error rank_pending(struct sluice_replay *replay, uint32_t from, uint32_t count,
                                      struct sluice_error_text *text)
{
    if (!plain_fifo(&replay->config)) {
        for (uint32_t i = 0; i < count; i++)
            describe(replay, i, replay->pending[from + i]);
        return rank(replay, count, text);
    }
    for (uint32_t i = 0; i < count; i++) {
        replay->active[i] = replay->pending[from + i];
        replay->ranked[i] = i;
    }
    return SLUICE_OK;
}

/* Start it where there is room for it. *settled: it has started, or may not, as it would delay the reserved start. */
static enum sluice_error start_in_room(struct sluice_replay *replay, uint32_t index, struct walk *walk, bool *settled,
                                       struct sluice_error_text *text)
{
    struct request_class *class = &replay->classes[replay->trace[index].request];
    bool beyond = false;
    uint64_t allocation;
    *settled = true;
    if (walk->reserved) {
        int64_t expected = 0, longest = 0;
        remaining(replay, index, &expected, &longest);
        beyond = later(later(replay->now, replay->trace[index].restart), expected) > replay->reservation.start;
        if (beyond && class->vetoed == replay->decision)
            return SLUICE_OK;
    }
    enum sluice_error error = place(replay, index, &allocation, text);
    if (error) {
        *settled = false;
        return error == SLUICE_ERROR_NO_PLACE ? SLUICE_OK : error;
    }
    if (beyond && !keeps(replay, allocation)) {
        class->vetoed = replay->decision;
        return sluice_release(replay->cluster, allocation, text);
    }
    enter(replay, index, allocation);
    walk->any = true;
    return SLUICE_OK;
}

/* Start it where others make room for it: jobs of lower tiers, or those that can be moved. */
static enum sluice_error start_with_room_made(struct sluice_replay *replay, uint32_t index, struct walk *walk,
                                              bool *started, struct sluice_error_text *text)
{
    const struct sluice_replay_config *config = &replay->config;
    enum sluice_error error = SLUICE_OK;
    *started = false;
    if (config->preemption == SLUICE_REPLAY_TIERS && replay->trace[index].tier && walk->preempting++ < TIER_TRIES &&
        !walk->reserved) {
        error = preempt_for(replay, index, started, text);
        if (*started)
            replay->reservation.held = false; /* it may have taken what was reserved */
    }
    if (!error && !*started && config->move_wait && !walk->blocked)
        error = move_for(replay, index, started, text);
    walk->any |= *started;
    return error;
}

static void reserve_first(struct sluice_replay *replay, uint32_t index, struct walk *walk)
{
    const struct reservation *last = &replay->reservation;
    if (walk->reserved)
        return;
    if (!last->held || last->job != index || replay->now >= last->renew)
        reserve(replay, index);
    walk->reserved = true;
}

/* Start what may start, running jobs staying where they are. `from`: the first of the queue that is to be tried. */
static enum sluice_error decide(struct sluice_replay *replay, uint32_t from, struct sluice_error_text *text)
{
    const struct sluice_replay_config *config = &replay->config;
    uint32_t count = replay->pending_count - from;
    uint32_t tries = config->depth && config->depth < count ? config->depth : count;
    enum sluice_error error = rank_pending(replay, from, count, text);
    if (!error && config->backfill == SLUICE_REPLAY_CONSERVATIVE)
        return decide_by_plan(replay, tries, text);
    struct walk walk = {0};
    for (uint32_t i = 0; i < tries && !error; i++) {
        uint32_t index = replay->active[replay->ranked[i]];
        bool settled;
        error = start_in_room(replay, index, &walk, &settled, text);
        if (!error && !settled)
            error = start_with_room_made(replay, index, &walk, &settled, text);
        if (error || settled)
            continue;
        walk.blocked = true;
        if (config->backfill == SLUICE_REPLAY_STRICT)
            break;
        if (config->backfill == SLUICE_REPLAY_EASY)
            reserve_first(replay, index, &walk);
    }
    if (walk.any)
        close_ranks(replay);
    return error;
}

static enum sluice_error make_decision(struct sluice_replay *replay, struct sluice_error_text *text)
{
    const struct sluice_replay_config *config = &replay->config;
    /* Without new room only new jobs can start, if no other job's place in the sequence matters to them. */
    bool only_new = !replay->room_made && config->preemption == SLUICE_REPLAY_NEVER &&
                    (config->backfill == SLUICE_REPLAY_GREEDY || replay->first_new == 0);
    uint32_t from = only_new ? replay->first_new : 0;
    replay->decision++;
    replay->decisions++;
    replay->decision_due = replay->room_made = false;
    replay->next_decision = later(replay->now, config->interval);
    enum sluice_error error =
        config->preemption == SLUICE_REPLAY_ORDER ? decide_from_scratch(replay, text) : decide(replay, from, text);
    replay->first_new = replay->pending_count;
    return error;
}

/* ---- samples ---- */

/* Idle GPU memory that the typical requests cannot use, weighted by how frequent they are. */
static uint32_t fragmented(const struct sluice_replay *replay)
{
    const struct sluice_cluster *cluster = replay->cluster;
    uint64_t idle = 0, unusable = 0;
    for (uint32_t node = 0; node < cluster->node_count; node++) {
        uint64_t here = (uint64_t)cluster->nodes[node].gpu_free;
        idle += here;
        for (uint32_t i = 0; here && i < replay->typical_count; i++) {
            const struct request_class *class = &replay->classes[replay->typical[i]];
            struct offer offer = sluice_offer_now(cluster, node, &class->need);
            uint64_t usable = 0;
            for (uint32_t gpu = 0; offer.units && gpu < SLUICE_MAX_GPUS; gpu++)
                usable += offer.fit >> gpu & 1 ? (uint64_t)cluster->gpu_free[node].mib[gpu] : 0;
            unusable += (here - (usable < here ? usable : here)) * class->jobs;
        }
    }
    return idle && replay->typical_weight ? (uint32_t)(unusable * 1000 / replay->typical_weight / idle) : 0;
}

static void sample(struct sluice_replay *replay, int64_t until)
{
    while (replay->next_sample <= until) {
        if (replay->sample_count == SLUICE_REPLAY_MAX_SAMPLES) {
            for (uint32_t i = 0; i < SLUICE_REPLAY_MAX_SAMPLES / 2; i++)
                replay->samples[i] = replay->samples[2 * i];
            replay->sample_count /= 2;
            replay->next_sample += replay->config.sample_interval;
            replay->config.sample_interval *= 2;
            continue;
        }
        replay->samples[replay->sample_count++] = (struct sluice_replay_sample){
            .at = replay->next_sample,
            .gpus_milli = replay->gpus_held_milli,
            .running = replay->heap[ENDS].count,
            .pending = replay->pending_count,
            .fragmented_permille = fragmented(replay),
        };
        replay->next_sample = later(replay->next_sample, replay->config.sample_interval);
    }
}

/* ---- the loop ---- */

static int64_t time_of_next(const struct sluice_replay *replay)
{
    int64_t time = replay->next < replay->count ? replay->trace[replay->next].submit : INT64_MAX;
    if (replay->heap[ENDS].count) {
        int64_t end = replay->jobs[replay->heap[ENDS].jobs[0]].key[ENDS];
        time = end < time ? end : time;
    }
    if (replay->decision_due && replay->next_decision < time)
        time = replay->next_decision;
    return time;
}

static void arrive(struct sluice_replay *replay, uint32_t index)
{
    const struct sluice_replay_job *trace = &replay->trace[index];
    if (replay->classes[trace->request].never) {
        replay->outcomes[index].state = SLUICE_REPLAY_REJECTED;
        replay->ended++;
        return;
    }
    replay->outcomes[index].state = SLUICE_REPLAY_PENDING;
    replay->pending[replay->pending_count++] = index;
    replay->decision_due = true;
    if (replay->guard) {
        int64_t expected, longest;
        remaining(replay, index, &expected, &longest);
        sluice_guard_arrival(replay->guard, replay->now, expected, trace->gpus_milli);
    }
}

enum sluice_error sluice_replay_run(struct sluice_replay *replay, uint64_t events, uint32_t *ended,
                                    struct sluice_error_text *text)
{
    enum sluice_error error = SLUICE_OK;
    while (!error && events && replay->ended < replay->count) {
        int64_t time = time_of_next(replay);
        if (time == INT64_MAX)
            return sluice_fail(text, SLUICE_ERROR_RANGE, "replay: %u jobs will never end: times overflow",
                               replay->count - replay->ended);
        sample(replay, time - 1); /* the state before the events of this time */
        replay->now = time;
        while (replay->heap[ENDS].count && replay->jobs[replay->heap[ENDS].jobs[0]].key[ENDS] <= time && !error) {
            error = finish(replay, replay->heap[ENDS].jobs[0], text);
            events -= events > 0;
        }
        while (replay->next < replay->count && replay->trace[replay->next].submit <= time) {
            arrive(replay, replay->next++);
            events -= events > 0;
        }
        if (!error && replay->decision_due && replay->next_decision <= time)
            error = make_decision(replay, text);
    }
    if (!error)
        *ended = replay->ended;
    return error;
}

const struct sluice_replay_outcome *sluice_replay_outcomes(const struct sluice_replay *replay)
{
    return replay->outcomes;
}

const struct sluice_replay_sample *sluice_replay_samples(const struct sluice_replay *replay, uint32_t *count)
{
    *count = replay->sample_count;
    return replay->samples;
}

uint64_t sluice_replay_decisions(const struct sluice_replay *replay)
{
    return replay->decisions;
}

/* ---- setting up ---- */

static enum sluice_error check_config(const struct sluice_replay_config *config, struct sluice_error_text *text)
{
    if (config->backfill > SLUICE_REPLAY_CONSERVATIVE || config->preemption > SLUICE_REPLAY_ORDER)
        return sluice_fail(text, SLUICE_ERROR_INVALID, "replay: backfill %d, preemption %d: unknown",
                           (int)config->backfill, (int)config->preemption);
    if (config->preemption == SLUICE_REPLAY_ORDER && config->backfill >= SLUICE_REPLAY_EASY)
        return sluice_fail(
            text, SLUICE_ERROR_INVALID,
            "replay: EASY and conservative backfill reserve for jobs that cannot preempt: not with preemption"
            " by order");
    if (config->restart_each_decision && config->preemption != SLUICE_REPLAY_ORDER)
        return sluice_fail(text, SLUICE_ERROR_INVALID,
                           "replay: restarts at each decision come only with preemption by order");
    if (config->move_wait &&
        (config->move_wait < 0 || config->move_cost < 1 || config->move_factor_permille < 1 ||
         config->moves_per_hour > SLUICE_COMPACTION_MAX_MOVES || config->preemption == SLUICE_REPLAY_ORDER ||
         config->backfill == SLUICE_REPLAY_CONSERVATIVE))
        return sluice_fail(
            text, SLUICE_ERROR_INVALID,
            "replay: moves: wait %lld, cost %lld, factor %u permille, %u an hour: at least 1 each, at most"
            " %d an hour, and neither with conservative backfill nor with preemption by order",
            (long long)config->move_wait, (long long)config->move_cost, config->move_factor_permille,
            config->moves_per_hour, SLUICE_COMPACTION_MAX_MOVES);
    if (config->interval < 0 || config->sample_interval < 1 || config->second < 1)
        return sluice_fail(text, SLUICE_ERROR_RANGE,
                           "replay: interval %lld, sample interval %lld, second %lld:"
                           " at least 0, 1 and 1",
                           (long long)config->interval, (long long)config->sample_interval, (long long)config->second);
    return SLUICE_OK;
}

static enum sluice_error check_jobs(const struct sluice_replay *replay, struct sluice_error_text *text)
{
    const int64_t most = INT64_MAX / 4;
    for (uint32_t i = 0; i < replay->count; i++) {
        const struct sluice_replay_job *job = &replay->trace[i];
        if (job->submit < 0 || job->run < 0 || job->estimate < 1 || job->deadline < 0 || job->restart < 0 ||
            job->submit > most || job->run > most || job->estimate > most || job->restart > most)
            return sluice_fail(
                text, SLUICE_ERROR_RANGE,
                "replay: job %u: submitted at %lld, run time %lld, estimate %lld, deadline %lld, restart "
                "%lld: must not be negative or too large, the estimate at least 1",
                i, (long long)job->submit, (long long)job->run, (long long)job->estimate, (long long)job->deadline,
                (long long)job->restart);
        if (i && job->submit < replay->trace[i - 1].submit)
            return sluice_fail(text, SLUICE_ERROR_INVALID,
                               "replay: job %u is submitted before job %u: sort by submission", i, i - 1);
        if (job->request >= replay->class_count)
            return sluice_fail(text, SLUICE_ERROR_UNKNOWN, "replay: job %u: request %u of %u", i, job->request,
                               replay->class_count);
        struct sluice_order_job probe = {.submit_s = job->submit,
                                         .eligible_s = job->submit,
                                         .deadline_s = job->deadline,
                                         .priority = job->priority,
                                         .account = job->account};
        struct sluice_order_terms terms;
        enum sluice_error error =
            sluice_order_score(&replay->config.order, replay->fairshare, &probe, job->submit, &terms, text);
        uint64_t usage;
        if (!error && replay->fairshare)
            error = sluice_fairshare_usage(replay->fairshare, job->account, 0, &usage, text);
        if (error)
            return error;
    }
    return SLUICE_OK;
}

/* The most frequent shapes that ask for GPUs represent what arrives. */
static void choose_typical(struct sluice_replay *replay)
{
    for (uint32_t class = 0; class < replay->class_count; class ++) {
        const struct request_class *one = &replay->classes[class];
        if (!one->need.gpus || one->never || !one->jobs)
            continue;
        uint32_t at = replay->typical_count < TYPICAL ? replay->typical_count++ : TYPICAL;
        for (; at && replay->classes[replay->typical[at - 1]].jobs < one->jobs; at--) {
            if (at < TYPICAL)
                replay->typical[at] = replay->typical[at - 1];
        }
        if (at < TYPICAL)
            replay->typical[at] = class;
    }
    for (uint32_t i = 0; i < replay->typical_count; i++)
        replay->typical_weight += replay->classes[replay->typical[i]].jobs;
}

static enum sluice_error set_up_classes(struct sluice_replay *replay, const struct sluice_request *requests,
                                        struct sluice_error_text *text)
{
    for (uint32_t i = 0; i < replay->class_count; i++) {
        struct request_class *class = &replay->classes[i];
        class->request = requests[i];
        enum sluice_error error = sluice_need_from_request(replay->cluster, &requests[i], &class->need, text);
        if (!error)
            error = sluice_place(replay->cluster, replay->config.placement, &class->request, &replay->placement, text);
        class->never = error == SLUICE_ERROR_NEVER || error == SLUICE_ERROR_NO_PLACE;
        if (error && !class->never)
            return error;
    }
    for (uint32_t i = 0; i < replay->count; i++)
        replay->classes[replay->trace[i].request].jobs++;
    choose_typical(replay);
    return SLUICE_OK;
}

static bool allocate(struct sluice_replay *replay)
{
    size_t jobs = replay->count ? replay->count : 1;
    size_t classes = replay->class_count ? replay->class_count : 1;
    replay->classes = calloc(classes, sizeof *replay->classes);
    replay->trace = calloc(jobs, sizeof *replay->trace);
    replay->jobs = calloc(jobs, sizeof *replay->jobs);
    replay->outcomes = calloc(jobs, sizeof *replay->outcomes);
    replay->pending = calloc(jobs, sizeof *replay->pending);
    replay->heap[ENDS].jobs = calloc(jobs, sizeof *replay->pending);
    replay->heap[EXPECTED].jobs = calloc(jobs, sizeof *replay->pending);
    replay->scratch.jobs = calloc(jobs, sizeof *replay->pending);
    replay->order_jobs = calloc(jobs, sizeof *replay->order_jobs);
    replay->guard_jobs = calloc(jobs, sizeof *replay->guard_jobs);
    replay->active = calloc(jobs, sizeof *replay->active);
    replay->ranked = calloc(jobs, sizeof *replay->ranked);
    replay->victims = calloc(jobs, sizeof *replay->victims);
    replay->suspended = calloc(jobs, sizeof *replay->suspended);
    replay->candidates = calloc(jobs, sizeof *replay->candidates);
    replay->reserved_nodes = calloc(replay->cluster->words, sizeof *replay->reserved_nodes);
    replay->placement.parts = calloc(SLUICE_MAX_NODES, sizeof *replay->placement.parts);
    replay->placement.part_capacity = SLUICE_MAX_NODES; /* as wide as any request */
    return replay->classes && replay->trace && replay->jobs && replay->outcomes && replay->pending &&
           replay->heap[ENDS].jobs && replay->heap[EXPECTED].jobs && replay->scratch.jobs && replay->order_jobs &&
           replay->guard_jobs && replay->active && replay->ranked && replay->victims && replay->suspended &&
           replay->candidates && replay->reserved_nodes && replay->placement.parts;
}

/* Room for as many parts as can run or be planned: what each job's request can have at most. */
static enum sluice_error set_up_plan(struct sluice_replay *replay, struct sluice_error_text *text)
{
    struct plan *plan = &replay->plan;
    uint64_t parts = 1;
    for (uint32_t i = 0; i < replay->count; i++) {
        const struct request_class *class = &replay->classes[replay->trace[i].request];
        uint32_t nodes = replay->cluster->node_count;
        parts += class->never ? 0 : class->need.nodes_max < nodes ? class->need.nodes_max : nodes;
    }
    uint32_t jobs = replay->count ? replay->count : 1;
    plan->part_capacity = parts < PLAN_PARTS ? (uint32_t)parts : PLAN_PARTS;
    struct sluice_backfill_config config = {
        .max_jobs = jobs, .max_running = plan->part_capacity, .max_planned = plan->part_capacity};
    plan->running = calloc(jobs, sizeof *plan->running);
    plan->jobs = calloc(jobs, sizeof *plan->jobs);
    plan->starts = calloc(jobs, sizeof *plan->starts);
    plan->parts = calloc(plan->part_capacity, sizeof *plan->parts);
    if (!plan->running || !plan->jobs || !plan->starts || !plan->parts)
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "replay of %u jobs: out of host memory", replay->count);
    return sluice_backfill_new(&config, replay->cluster->node_count, &plan->backfill, text);
}

static enum sluice_error set_up_moves(struct sluice_replay *replay, struct sluice_error_text *text)
{
    struct moves *moves = &replay->moves;
    size_t jobs = replay->count ? replay->count : 1, classes = replay->class_count ? replay->class_count : 1;
    moves->requests = calloc(classes, sizeof *moves->requests);
    moves->movables = calloc(jobs, sizeof *moves->movables);
    moves->jobs = calloc(jobs, sizeof *moves->jobs);
    if (!moves->requests || !moves->movables || !moves->jobs)
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "replay of %u jobs: out of host memory", replay->count);
    for (uint32_t i = 0; i < replay->class_count; i++)
        moves->requests[i] = replay->classes[i].request;
    return sluice_compaction_new(replay->cluster, (uint32_t)jobs, (uint32_t)classes, &moves->compaction, text);
}

static enum sluice_error set_up(struct sluice_replay *replay, const struct sluice_request *requests,
                                const struct sluice_replay_job *jobs, struct sluice_error_text *text)
{
    const struct sluice_replay_config *config = &replay->config;
    if (!allocate(replay))
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "replay of %u jobs: out of host memory", replay->count);
    if (replay->count)
        memcpy(replay->trace, jobs, replay->count * sizeof *jobs);
    for (uint32_t i = 0; i < replay->count; i++)
        replay->outcomes[i].start = replay->outcomes[i].end = -1;
    replay->next_sample = replay->now = replay->count ? replay->trace[0].submit : 0;

    enum sluice_error error = check_jobs(replay, text);
    if (!error)
        error = set_up_classes(replay, requests, text);
    if (!error)
        error = sluice_order_new(replay->count, &replay->order, text);
    if (!error && config->learn)
        error = sluice_accuracy_new(ACCURACY_HISTORY, &replay->accuracy, text);
    if (!error && config->guarded) {
        struct sluice_guard_policy policy = {.capacity_milli = (int64_t)replay->cluster->totals.gpus * 1000,
                                             .margin_permille = config->guard_margin_permille,
                                             .doubt_permille = config->guard_doubt_permille};
        error = sluice_guard_new(&policy, replay->count, &replay->guard, text);
    }
    if (!error && config->backfill == SLUICE_REPLAY_CONSERVATIVE)
        error = set_up_plan(replay, text);
    if (!error && config->move_wait)
        error = set_up_moves(replay, text);
    if (!error && config->preemption == SLUICE_REPLAY_TIERS)
        error = sluice_preemption_new(replay->cluster, replay->count ? replay->count : 1, &replay->preemption, text);
    return error;
}

enum sluice_error sluice_replay_new(struct sluice_cluster *cluster, const struct sluice_replay_config *config,
                                    const struct sluice_request *requests, uint32_t request_count,
                                    const struct sluice_replay_job *jobs, uint32_t count,
                                    struct sluice_fairshare *fairshare, struct sluice_replay **replay,
                                    struct sluice_error_text *text)
{
    enum sluice_error error = check_config(config, text);
    if (error)
        return error;
    if (cluster->totals.allocations)
        return sluice_fail(text, SLUICE_ERROR_INVALID, "replay: the cluster holds %u allocations: it must be idle",
                           cluster->totals.allocations);
    struct sluice_replay *made = calloc(1, sizeof *made);
    if (!made)
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "replay of %u jobs: out of host memory", count);
    made->cluster = cluster;
    made->config = *config;
    made->fairshare = fairshare;
    made->class_count = request_count;
    made->count = count;
    error = set_up(made, requests, jobs, text);
    if (error) {
        sluice_replay_free(made);
        return error;
    }
    *replay = made;
    return SLUICE_OK;
}

void sluice_replay_free(struct sluice_replay *replay)
{
    if (!replay)
        return;
    if (replay->jobs && replay->outcomes) {
        for (uint32_t i = 0; i < replay->heap[ENDS].count; i++)
            (void)sluice_release(replay->cluster, replay->jobs[replay->heap[ENDS].jobs[i]].allocation, NULL);
    }
    sluice_order_free(replay->order);
    sluice_accuracy_free(replay->accuracy);
    sluice_guard_free(replay->guard);
    sluice_preemption_free(replay->preemption);
    sluice_backfill_free(replay->plan.backfill);
    sluice_compaction_free(replay->moves.compaction);
    free(replay->moves.requests);
    free(replay->moves.movables);
    free(replay->moves.jobs);
    free(replay->plan.running);
    free(replay->plan.jobs);
    free(replay->plan.starts);
    free(replay->plan.parts);
    free(replay->classes);
    free(replay->trace);
    free(replay->jobs);
    free(replay->outcomes);
    free(replay->pending);
    free(replay->heap[ENDS].jobs);
    free(replay->heap[EXPECTED].jobs);
    free(replay->scratch.jobs);
    free(replay->order_jobs);
    free(replay->guard_jobs);
    free(replay->active);
    free(replay->ranked);
    free(replay->victims);
    free(replay->suspended);
    free(replay->candidates);
    free(replay->reserved_nodes);
    free(replay->placement.parts);
    free(replay);
}
