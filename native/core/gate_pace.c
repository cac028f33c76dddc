/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which replicas are slow. Times are compared like with like: those of one kind, of replicas of one service. Of each kind
 * a replica has the average of the binary logarithms of its times, so that one outlier decides nothing, and of what may
 * explain them: tokens of the prompt, tokens of the answer, requests that it had at the time. Engines need at most in
 * proportion more time for more tokens, and at least no less, so a replica is slower than another one by what is left when
 * all that it had more is taken off, and nothing is added for what it had less. Of n times as many requests the square
 * root of n is taken off: engines that batch need no more time, others n times as much, and a slow replica has more because
 * it is slow.
 *
 * A slow replica is out for a time; then it is tried with one request at a time (a circuit breaker, Nygard 2007).
 */
#include "error.h"
#include "gate_parts.h"

#include "fixed.h"

enum {
    FULL = 8,        /* samples until an average counts; each later one is an eighth of it */
    EARLY = 4,       /* samples until a trial may have shown that it is still slow */
    OUT_LEVEL = 2,   /* out: four times as slow */
    STAYS_LEVEL = 1, /* after a trial: twice as slow */
    LEVELS = 16,
    FRESH_S = 60, /* of an average's latest sample */
};
static const int32_t least_time = (int32_t)(13.28771237954945 * (1 << SLUICE_LOG2_FRACTION_BITS)); /* log2 of 10 ms */
static const uint64_t trial_us = 60 * UINT64_C(1000000), forgiven_us = 600 * UINT64_C(1000000);
static const uint64_t first_out_us = 10 * UINT64_C(1000000), most_out_us = 300 * UINT64_C(1000000);

/* ---- averages ---- */

static int32_t log2_of(uint64_t value)
{
    return (int32_t)sluice_log2_fixed(value ? value : 1);
}

static void put(struct sluice_gate *gate, int32_t *at, int32_t value)
{
    if (*at != value && gate_save(gate, at))
        *at = value;
}

static void add(struct sluice_gate *gate, struct gate_pace *pace, const struct gate_pace *sample)
{
    uint32_t count = pace->count < FULL ? pace->count + 1 : FULL;
    for (int i = 0; i < GATE_PACE_TERMS; i++)
        put(gate, &pace->term[i], pace->term[i] + (sample->term[i] - pace->term[i]) / (int32_t)count);
    gate_put32(gate, &pace->count, count);
    gate_put32(gate, &pace->second, sample->second);
}

/* How many times slower `mine` is than `other`, as a whole binary logarithm; 0: not twice. */
static uint32_t level_over(const struct gate_pace *mine, const struct gate_pace *other)
{
    int32_t excess = mine->term[0] - other->term[0];
    for (int i = 1; i < GATE_PACE_TERMS; i++)
        if (mine->term[i] > other->term[i])
            excess -= (mine->term[i] - other->term[i]) / (i == GATE_PACE_REQUESTS ? 2 : 1);
    if (excess <= 0)
        return 0;
    uint32_t level = (uint32_t)excess >> SLUICE_LOG2_FRACTION_BITS;
    return level < LEVELS ? level : LEVELS - 1;
}

static bool is_peer(const struct gate_replica *replica)
{
    return !replica->removed && replica->state == SLUICE_GATE_USABLE && replica->standing == SLUICE_GATE_IN;
}

/* By how much `mine`, of a replica's kind, is slower than more than half of the others that are known; 0 where none is. */
static uint32_t level_of(const struct sluice_gate *gate, uint32_t row, uint32_t kind, const struct gate_pace *mine)
{
    uint32_t others = 0, at_least[LEVELS] = {0};
    uint32_t other = gate->services[gate->replicas[row].service].replicas.first;
    for (; other; other = gate->replicas[other].link.next) {
        const struct gate_pace *pace = &gate->replicas[other].pace[kind];
        if (other == row || !is_peer(&gate->replicas[other]) || pace->count < FULL ||
            mine->second - pace->second > FRESH_S)
            continue;
        others++;
        at_least[level_over(mine, pace)]++;
    }
    uint32_t slower = 0;
    for (uint32_t level = LEVELS - 1; level > 0; level--) {
        slower += at_least[level];
        if (2 * slower > others)
            return level;
    }
    return 0;
}

/* ---- standing ---- */

uint32_t gate_most_out(uint32_t usable)
{
    return usable < 2 ? 0 : usable < 6 ? 1 : usable / 3;
}

static void forget_times(struct sluice_gate *gate, struct gate_replica *replica)
{
    for (int kind = 0; kind < GATE_PACES; kind++)
        gate_put32(gate, &replica->pace[kind].count, 0);
}

/* When the next trial begins. */
static void plan_trials(struct sluice_gate *gate)
{
    uint64_t next = UINT64_MAX;
    for (uint32_t row = 1; row <= gate->header->replicas.fresh; row++) {
        const struct gate_replica *replica = &gate->replicas[row];
        if (replica->row.in_use && replica->standing == SLUICE_GATE_OUT && replica->standing_us < next)
            next = replica->standing_us;
    }
    gate_put64(gate, &gate->header->trial_us, next);
}

void gate_set_standing(struct sluice_gate *gate, uint32_t row, enum sluice_gate_standing standing, uint64_t at_us)
{
    struct gate_replica *replica = &gate->replicas[row];
    gate_contribute(gate, replica, false);
    gate_put32(gate, &replica->standing, standing);
    gate_put64(gate, &replica->standing_us, at_us);
    gate_contribute(gate, replica, true);
    forget_times(gate, replica);
    plan_trials(gate);
    gate_mark_dirty(gate, replica->service);
}

static void put_out(struct sluice_gate *gate, uint32_t row, uint64_t now_us, uint32_t kind, uint32_t level)
{
    struct gate_replica *replica = &gate->replicas[row];
    bool forgiven = replica->standing == SLUICE_GATE_IN && now_us - replica->standing_us > forgiven_us;
    uint32_t times = forgiven ? 0 : replica->times_out;
    uint64_t wait_us = times < 5 ? first_out_us << times : most_out_us;
    gate_put32(gate, &replica->times_out, times < UINT32_MAX ? times + 1 : times);
    gate_put32(gate, &replica->slow_kind, kind);
    gate_put32(gate, &replica->slow_level, level);
    gate_set_standing(gate, row, SLUICE_GATE_OUT, now_us + (wait_us < most_out_us ? wait_us : most_out_us));
}

void gate_bound_out(struct sluice_gate *gate, uint32_t service)
{
    const struct gate_service *row_of = &gate->services[service];
    while (row_of->out > gate_most_out(row_of->usables)) {
        uint32_t next = 0;
        for (uint32_t row = row_of->replicas.first; row; row = gate->replicas[row].link.next) {
            const struct gate_replica *replica = &gate->replicas[row];
            if (gate_is_out(replica) && (!next || replica->standing_us < gate->replicas[next].standing_us))
                next = row;
        }
        gate_set_standing(gate, next, SLUICE_GATE_IN, gate->header->latest_us);
    }
}

void gate_begin_trial(struct sluice_gate *gate, uint64_t now_us)
{
    if (!gate->header->trial_us || now_us < gate->header->trial_us)
        return;
    for (uint32_t row = 1; row <= gate->header->replicas.fresh; row++) {
        const struct gate_replica *replica = &gate->replicas[row];
        if (replica->row.in_use && replica->standing == SLUICE_GATE_OUT && replica->standing_us <= now_us) {
            gate_set_standing(gate, row, SLUICE_GATE_TRIAL, now_us);
            return;
        }
    }
    plan_trials(gate); /* the one that was to be tried is gone */
}

/* ---- what workers report ---- */

/* Decide by a replica's average of one kind, which has another sample. */
static void judge(struct sluice_gate *gate, uint32_t row, uint32_t kind, uint64_t now_us)
{
    const struct gate_replica *replica = &gate->replicas[row];
    const struct gate_service *service = &gate->services[replica->service];
    const struct gate_pace *pace = &replica->pace[kind];
    bool trial = replica->standing == SLUICE_GATE_TRIAL;
    if (pace->count < (trial ? EARLY : FULL))
        return;
    uint32_t level = pace->term[0] < least_time ? 0 : level_of(gate, row, kind, pace);
    if (trial && level >= STAYS_LEVEL)
        put_out(gate, row, now_us, kind, level);
    else if (trial && pace->count == FULL && (kind == replica->slow_kind || now_us - replica->standing_us >= trial_us))
        gate_set_standing(gate, row, SLUICE_GATE_IN, now_us);
    else if (!trial && level >= OUT_LEVEL && replica->state == SLUICE_GATE_USABLE &&
             service->out < gate_most_out(service->usables))
        put_out(gate, row, now_us, kind, level);
}

/* Answers whose prompt the replica had in its cache are of a kind of their own. */
static uint32_t kind_of(enum sluice_gate_time time, const struct gate_ticket *ticket)
{
    bool cached = ticket->prefix_found > 0;
    return time == SLUICE_GATE_TOKEN ? 4U : 2U * (time == SLUICE_GATE_WHOLE) + cached;
}

static void take(struct sluice_gate *gate, const struct gate_ticket *ticket, uint64_t now_us,
                 const struct sluice_gate_took *took)
{
    uint32_t row = ticket->replica, kind = kind_of(took->time, ticket);
    struct gate_replica *replica = &gate->replicas[row];
    if (replica->removed || replica->standing == SLUICE_GATE_OUT ||
        (replica->standing == SLUICE_GATE_TRIAL && ticket->granted_us < replica->standing_us))
        return;
    uint64_t prompt = 0; /* the time from one token to the next hardly depends on it */
    if (took->time != SLUICE_GATE_TOKEN)
        prompt = __atomic_load_n(&ticket->prompt_tokens, __ATOMIC_RELAXED);
    struct gate_pace sample = {
        .term = {log2_of(took->us), log2_of(prompt), log2_of(took->tokens), log2_of(replica->in_flight)},
        .second = (uint32_t)(now_us / 1000000),
    };
    if (took->so_far && (sample.term[0] < least_time || level_of(gate, row, kind, &sample) < OUT_LEVEL))
        return;
    add(gate, &replica->pace[kind], &sample);
    judge(gate, row, kind, now_us);
}

enum sluice_error sluice_gate_took(struct sluice_gate *gate, uint64_t id, uint64_t now_us,
                                   const struct sluice_gate_took *took, struct sluice_gate_replica *changed,
                                   struct sluice_error_text *text)
{
    if ((unsigned)took->time > SLUICE_GATE_WHOLE || took->us > INT64_MAX || took->tokens > SLUICE_GATE_MAX_AMOUNT)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "time of kind %d, %llu us, %llu tokens: kinds are 0 to %d",
                           (int)took->time, (unsigned long long)took->us, (unsigned long long)took->tokens,
                           SLUICE_GATE_WHOLE);
    enum sluice_error error = gate_lock(gate, text);
    if (error)
        return error;
    uint32_t ticket = gate_find_ticket(gate, id);
    uint32_t replica = ticket ? gate->tickets[ticket].replica : 0;
    if (!replica)
        return gate_unlock(gate, gate_fail_ticket(id, text), text);
    uint32_t before = gate->replicas[replica].standing;
    now_us = gate_time(gate, now_us);
    take(gate, &gate->tickets[ticket], now_us, took);
    struct sluice_gate_replica now = gate_show_replica(gate, replica);
    error = gate_unlock(gate, SLUICE_OK, text);
    if (!error)
        *changed = before == (uint32_t)now.standing ? (struct sluice_gate_replica){0} : now;
    return error;
}
