/* SPDX-License-Identifier: Apache-2.0 */
/* The gate's subjects: token buckets, counts, and what refuses a request. */
#include "error.h"
#include "gate_parts.h"

#include <inttypes.h>

static const uint64_t no_limit = UINT64_MAX;

static bool is_limited(const struct sluice_gate_limit *limit)
{
    return limit->requests != no_limit || limit->tokens != no_limit || limit->concurrent != no_limit ||
           limit->queued != no_limit;
}

/* ---- buckets ---- */

/* What a bucket of this rate and burst holds at `now_us`; a debt has a lower end, which no limit reaches in a year. */
static int64_t level_at(int64_t level, uint64_t rate, uint64_t burst, uint64_t at_us, uint64_t now_us)
{
    if (rate == no_limit)
        return 0;
    int64_t full = (int64_t)burst * GATE_BUCKET_UNIT;
    uint64_t missing = level < full ? (uint64_t)(full - level) : 0;
    uint64_t elapsed = now_us > at_us ? now_us - at_us : 0;
    if (missing == 0 || (rate && elapsed >= (missing + rate - 1) / rate))
        return full;
    return level + (int64_t)(elapsed * rate);
}

/* Microseconds until the bucket holds `amount`; UINT64_MAX: never. */
static uint64_t time_until(int64_t level, uint64_t rate, uint64_t burst, uint64_t amount)
{
    if (amount > burst)
        return UINT64_MAX;
    int64_t needed = (int64_t)amount * GATE_BUCKET_UNIT;
    if (level >= needed)
        return 0;
    return rate ? ((uint64_t)(needed - level) + rate - 1) / rate : UINT64_MAX;
}

/* What a subject has of a bucket: a part of one does not refill. */
static int64_t requests_at(const struct gate_subject *subject, uint64_t now_us)
{
    const struct sluice_gate_limit *limit = &subject->limit;
    return level_at(subject->requests_level, limit->requests, limit->requests_burst, subject->at,
                    subject->shared ? subject->at : now_us);
}

static int64_t tokens_at(const struct gate_subject *subject, uint64_t now_us)
{
    const struct sluice_gate_limit *limit = &subject->limit;
    return level_at(subject->tokens_level, limit->tokens, limit->tokens_burst, subject->at,
                    subject->shared ? subject->at : now_us);
}

static void refill(struct sluice_gate *gate, struct gate_subject *subject, uint64_t now_us)
{
    gate_put_signed(gate, &subject->requests_level, requests_at(subject, now_us));
    gate_put_signed(gate, &subject->tokens_level, tokens_at(subject, now_us));
    gate_put64(gate, &subject->at, now_us);
}

/* In whole units, rounded down. */
static int64_t whole(int64_t level, uint64_t rate)
{
    if (rate == no_limit)
        return INT64_MAX;
    int64_t units = level / GATE_BUCKET_UNIT;
    return level < 0 && level % GATE_BUCKET_UNIT ? units - 1 : units;
}

/* ---- rows ---- */

uint32_t gate_take_subject(struct sluice_gate *gate, uint32_t kind, uint64_t id)
{
    uint32_t row = gate_table_find(&gate->subject_table, kind, id);
    if (row || !(row = gate_table_take(gate, &gate->subject_table, kind, id)))
        return row;
    struct gate_subject *subject = &gate->subjects[row];
    gate_put64(gate, &subject->limit.requests, no_limit);
    gate_put64(gate, &subject->limit.tokens, no_limit);
    gate_put64(gate, &subject->limit.concurrent, no_limit);
    gate_put64(gate, &subject->limit.queued, no_limit);
    gate_put32(gate, &subject->weight, 1);
    gate_table_set_idle(gate, &gate->subject_table, row, true);
    return row;
}

/* A row that has neither tickets nor anything set may be used for another subject. */
static void touch(struct sluice_gate *gate, uint32_t row)
{
    const struct gate_subject *subject = &gate->subjects[row];
    bool idle = !subject->open && subject->weight == 1 && !is_limited(&subject->limit);
    gate_table_set_idle(gate, &gate->subject_table, row, idle);
}

/* ---- what refuses ---- */

/* A limit that can never be passed, one without a time, one with. */
static int strength(const struct sluice_gate_answer *refusal)
{
    if (refusal->retry_after_us == UINT64_MAX)
        return 2;
    return refusal->retry_after_us == 0;
}

void gate_refuse(struct sluice_gate_answer *answer, bool *refused, struct sluice_gate_answer refusal)
{
    bool stronger = !*refused || strength(&refusal) > strength(answer) ||
                    (strength(&refusal) == strength(answer) && refusal.retry_after_us > answer->retry_after_us);
    if (stronger)
        *answer = refusal;
    *refused = true;
}

static void check_bucket(int64_t level, uint64_t rate, uint64_t burst, uint64_t amount,
                         struct sluice_gate_answer refusal, struct sluice_gate_answer *answer, bool *refused)
{
    if (rate == no_limit)
        return;
    refusal.retry_after_us = time_until(level, rate, burst, amount);
    if (!refusal.retry_after_us)
        return;
    if (refusal.part && refusal.retry_after_us != UINT64_MAX)
        refusal.retry_after_us = 0; /* of the whole limit nothing is known here */
    int64_t left = whole(level, rate);
    refusal.limit = burst;
    refusal.used = (uint64_t)((int64_t)burst - left);
    gate_refuse(answer, refused, refusal);
}

static void check_count(uint64_t used, uint64_t limit, uint64_t part, struct sluice_gate_answer refusal,
                        struct sluice_gate_answer *answer, bool *refused)
{
    if (used < limit && used < part)
        return;
    refusal.limit = limit;
    refusal.used = used;
    refusal.retry_after_us = limit ? 0 : UINT64_MAX;
    gate_refuse(answer, refused, refusal);
}

static uint64_t concurrent_part(const struct gate_subject *subject)
{
    return subject->shared && subject->limit.concurrent != no_limit ? subject->concurrent_part
                                                                    : subject->limit.concurrent;
}

static uint64_t queued_part(const struct gate_subject *subject)
{
    return subject->shared && subject->limit.queued != no_limit ? subject->queued_part : subject->limit.queued;
}

void gate_check_subject(const struct sluice_gate *gate, uint32_t row, uint64_t now_us, uint64_t tokens, bool may_queue,
                        struct sluice_gate_answer *answer, bool *refused)
{
    const struct gate_subject *subject = &gate->subjects[row];
    const struct sluice_gate_limit *limit = &subject->limit;
    struct sluice_gate_answer refusal = {.kind = (enum sluice_gate_kind)subject->row.kind, .part = subject->shared};
    if (subject->shared && now_us >= gate->header->parts_until_us) {
        refusal.reason = SLUICE_GATE_NO_PART;
        gate_refuse(answer, refused, refusal);
        return;
    }
    int64_t left = tokens_at(subject, now_us);
    refusal.reason = SLUICE_GATE_REQUESTS;
    check_bucket(requests_at(subject, now_us), limit->requests, limit->requests_burst, 1, refusal, answer, refused);
    refusal.reason = SLUICE_GATE_TOKENS;
    check_bucket(left, limit->tokens, limit->tokens_burst, tokens, refusal, answer, refused);
    refusal.reason = SLUICE_GATE_CONCURRENT;
    check_count(subject->open, limit->concurrent, concurrent_part(subject), refusal, answer, refused);
    refusal.reason = SLUICE_GATE_QUEUED;
    if (!may_queue && subject->waiting >= queued_part(subject)) {
        refusal.limit = limit->queued;
        refusal.used = subject->waiting;
        refusal.retry_after_us = 0;
        gate_refuse(answer, refused, refusal);
    }
}

/* ---- charge and settle ---- */

void gate_charge_subject(struct sluice_gate *gate, uint32_t row, uint64_t now_us, uint64_t tokens, uint32_t *epoch)
{
    struct gate_subject *subject = &gate->subjects[row];
    bool counts_tokens = subject->limit.tokens != no_limit;
    if (is_limited(&subject->limit))
        refill(gate, subject, now_us);
    if (subject->limit.requests != no_limit)
        gate_put_signed(gate, &subject->requests_level, subject->requests_level - GATE_BUCKET_UNIT);
    if (counts_tokens)
        gate_put_signed(gate, &subject->tokens_level, subject->tokens_level - (int64_t)tokens * GATE_BUCKET_UNIT);
    gate_put32(gate, epoch, counts_tokens ? subject->epoch : 0);
    gate_add32(gate, &subject->open, 1);
    gate_add64(gate, &subject->tokens, tokens);
    touch(gate, row);
}

void gate_settle_subject(struct sluice_gate *gate, uint32_t row, uint64_t now_us, uint64_t tokens, uint64_t used,
                         uint32_t epoch)
{
    struct gate_subject *subject = &gate->subjects[row];
    if (subject->limit.tokens != no_limit && epoch == subject->epoch) {
        const int64_t deepest = INT64_MIN / 4;
        int64_t full = (int64_t)subject->limit.tokens_burst * GATE_BUCKET_UNIT;
        refill(gate, subject, now_us);
        int64_t level = subject->tokens_level + ((int64_t)tokens - (int64_t)used) * GATE_BUCKET_UNIT;
        if (subject->shared) { /* what is over is not this gate's, and there is never more of it than a full bucket */
            int64_t over = subject->tokens_over + (level > subject->tokens_most ? level - subject->tokens_most : 0);
            gate_put_signed(gate, &subject->tokens_over, over > full ? full : over);
            full = subject->tokens_most;
        }
        level = level > full ? full : level;
        gate_put_signed(gate, &subject->tokens_level, level < deepest ? deepest : level);
    }
    gate_add32(gate, &subject->open, UINT32_MAX);
    gate_add64(gate, &subject->tokens, -tokens);
    touch(gate, row);
}

/* ---- what is set ---- */

static bool amount_is_valid(uint64_t amount)
{
    return amount == no_limit || amount <= SLUICE_GATE_MAX_AMOUNT;
}

static enum sluice_error check_limit(enum sluice_gate_kind kind, uint64_t id, const struct sluice_gate_limit *limit,
                                     struct sluice_error_text *text)
{
    if ((unsigned)kind >= SLUICE_GATE_KINDS)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "kind %d of a subject: 0 to %d", (int)kind, SLUICE_GATE_KINDS - 1);
    if (!id)
        return sluice_fail(text, SLUICE_ERROR_INVALID, "limit of subject 0: 0 is no subject");
    const uint64_t amounts[] = {limit->requests, limit->tokens,         limit->concurrent,
                                limit->queued,   limit->requests_burst, limit->tokens_burst};
    for (size_t i = 0; i < sizeof amounts / sizeof *amounts; i++)
        if (!amount_is_valid(amounts[i]) || (i >= 4 && amounts[i] == no_limit))
            return sluice_fail(text, SLUICE_ERROR_RANGE, "limit %" PRIu64 " of subject %" PRIx64 ": at most %d",
                               amounts[i], id, SLUICE_GATE_MAX_AMOUNT);
    return SLUICE_OK;
}

/* A bucket that begins is full, or empty where it is a part; another keeps what it has. */
static int64_t changed_level(int64_t level, uint64_t before, uint64_t rate, uint64_t burst, bool shared)
{
    if (rate == no_limit)
        return 0;
    int64_t full = (int64_t)burst * GATE_BUCKET_UNIT;
    if (before == no_limit)
        return shared ? 0 : full;
    return level > full ? full : level;
}

static void change_limit(struct sluice_gate *gate, struct gate_subject *subject, struct sluice_gate_limit limit,
                         bool shared)
{
    if (!limit.requests_burst)
        limit.requests_burst = limit.requests;
    if (!limit.tokens_burst)
        limit.tokens_burst = limit.tokens;
    struct sluice_gate_limit *now = &subject->limit;
    refill(gate, subject, gate->header->latest_us);
    if (!shared && subject->shared) /* its part is what it has to begin with */
        gate_put_signed(gate, &subject->tokens_over, 0);
    if (shared && !subject->shared) {
        bool had = is_limited(now);
        gate_put64(gate, &subject->concurrent_part, had && now->concurrent != no_limit ? now->concurrent : 0);
        gate_put64(gate, &subject->queued_part, had && now->queued != no_limit ? now->queued : 0);
    }
    gate_put_signed(
        gate, &subject->requests_level,
        changed_level(subject->requests_level, now->requests, limit.requests, limit.requests_burst, shared));
    gate_put_signed(gate, &subject->tokens_level,
                    changed_level(subject->tokens_level, now->tokens, limit.tokens, limit.tokens_burst, shared));
    if (shared && !subject->shared) { /* parts are whole */
        gate_put_signed(gate, &subject->requests_level, subject->requests_level / GATE_BUCKET_UNIT * GATE_BUCKET_UNIT);
        gate_put_signed(gate, &subject->tokens_level, subject->tokens_level / GATE_BUCKET_UNIT * GATE_BUCKET_UNIT);
        gate_put_signed(gate, &subject->tokens_most, subject->tokens_level > 0 ? subject->tokens_level : 0);
    }
    gate_put32(gate, &subject->shared, shared);
    if (now->tokens == no_limit && limit.tokens != no_limit)
        gate_add32(gate, &subject->epoch, 1);
    gate_put64(gate, &now->requests, limit.requests);
    gate_put64(gate, &now->tokens, limit.tokens);
    gate_put64(gate, &now->concurrent, limit.concurrent);
    gate_put64(gate, &now->queued, limit.queued);
    gate_put64(gate, &now->requests_burst, limit.requests == no_limit ? 0 : limit.requests_burst);
    gate_put64(gate, &now->tokens_burst, limit.tokens == no_limit ? 0 : limit.tokens_burst);
}

static enum sluice_error fail_full(const struct sluice_gate *gate, uint64_t id, struct sluice_error_text *text)
{
    return sluice_fail(text, SLUICE_ERROR_CAPACITY,
                       "subject %" PRIx64 ": all %" PRIu32 " subjects are in use; format a larger gate", id,
                       gate->shape.subjects);
}

static enum sluice_error set_limit(struct sluice_gate *gate, enum sluice_gate_kind kind, uint64_t id,
                                   const struct sluice_gate_limit *limit, bool shared, bool convert,
                                   struct sluice_error_text *text)
{
    enum sluice_error error = check_limit(kind, id, limit, text);
    if (!error)
        error = gate_lock(gate, text);
    if (error)
        return error;
    shared = shared && is_limited(limit);
    bool known = is_limited(limit) || gate_table_find(&gate->subject_table, kind, id);
    uint32_t row = known ? gate_take_subject(gate, kind, id) : 0;
    const struct gate_subject *subject = &gate->subjects[row];
    bool keeps = row && shared && !convert && !subject->shared && is_limited(&subject->limit);
    if (row && !keeps) {
        change_limit(gate, &gate->subjects[row], *limit, shared);
        touch(gate, row);
    } else if (known && !row) {
        error = fail_full(gate, id, text);
    }
    return gate_unlock(gate, error, text);
}

enum sluice_error sluice_gate_set_limit(struct sluice_gate *gate, enum sluice_gate_kind kind, uint64_t id,
                                        const struct sluice_gate_limit *limit, struct sluice_error_text *text)
{
    return set_limit(gate, kind, id, limit, false, true, text);
}

enum sluice_error sluice_gate_set_weight(struct sluice_gate *gate, uint64_t tenant, uint64_t weight,
                                         struct sluice_error_text *text)
{
    if (!tenant)
        return sluice_fail(text, SLUICE_ERROR_INVALID, "weight of tenant 0: 0 is no tenant");
    if (!weight || weight > SLUICE_GATE_MAX_WEIGHT)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "weight %" PRIu64 " of tenant %" PRIx64 ": 1 to %d", weight,
                           tenant, SLUICE_GATE_MAX_WEIGHT);
    enum sluice_error error = gate_lock(gate, text);
    if (error)
        return error;
    bool known = weight != 1 || gate_table_find(&gate->subject_table, SLUICE_GATE_TENANT, tenant);
    uint32_t row = known ? gate_take_subject(gate, SLUICE_GATE_TENANT, tenant) : 0;
    if (row) {
        gate_put32(gate, &gate->subjects[row].weight, (uint32_t)weight);
        touch(gate, row);
    } else if (known) {
        error = fail_full(gate, tenant, text);
    }
    return gate_unlock(gate, error, text);
}

/* ---- parts ---- */

enum sluice_error sluice_gate_share(struct sluice_gate *gate, enum sluice_gate_kind kind, uint64_t id,
                                    const struct sluice_gate_limit *limit, bool convert, struct sluice_error_text *text)
{
    return set_limit(gate, kind, id, limit, true, convert, text);
}

enum sluice_error sluice_gate_parts_until(struct sluice_gate *gate, uint64_t until_us, struct sluice_error_text *text)
{
    enum sluice_error error = gate_lock(gate, text);
    if (error)
        return error;
    gate_put64(gate, &gate->header->parts_until_us, until_us);
    return gate_unlock(gate, SLUICE_OK, text);
}

/* The shared subject, or NULL, which `error` says. */
static struct gate_subject *find_shared(struct sluice_gate *gate, enum sluice_gate_kind kind, uint64_t id,
                                        const struct sluice_gate_part *part, enum sluice_error *error,
                                        struct sluice_error_text *text)
{
    uint32_t row = gate_table_find(&gate->subject_table, kind, id);
    if (!row || !gate->subjects[row].shared) {
        *error = sluice_fail(text, SLUICE_ERROR_UNKNOWN, "subject %" PRIx64 ": has no limits that are shared", id);
        return NULL;
    }
    if (part->requests < 0 || part->requests > SLUICE_GATE_MAX_AMOUNT || part->tokens < 0 ||
        part->tokens > SLUICE_GATE_MAX_AMOUNT) {
        *error = sluice_fail(text, SLUICE_ERROR_RANGE, "part of subject %" PRIx64 ": 0 to %d requests and tokens", id,
                             SLUICE_GATE_MAX_AMOUNT);
        return NULL;
    }
    return &gate->subjects[row];
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

enum sluice_error sluice_gate_give(struct sluice_gate *gate, enum sluice_gate_kind kind, uint64_t id, uint64_t now_us,
                                   const struct sluice_gate_part *more, struct sluice_error_text *text)
{
    enum sluice_error error = gate_lock(gate, text);
    if (error)
        return error;
    struct gate_subject *subject = find_shared(gate, kind, id, more, &error, text);
    if (!subject)
        return gate_unlock(gate, error, text);
    const struct sluice_gate_limit *limit = &subject->limit;
    refill(gate, subject, gate_time(gate, now_us));
    if (limit->requests != no_limit)
        gate_put_signed(gate, &subject->requests_level,
                        least(subject->requests_level + more->requests * GATE_BUCKET_UNIT,
                              (int64_t)limit->requests_burst * GATE_BUCKET_UNIT));
    if (limit->tokens != no_limit) {
        int64_t full = (int64_t)limit->tokens_burst * GATE_BUCKET_UNIT, added = more->tokens * GATE_BUCKET_UNIT;
        gate_put_signed(gate, &subject->tokens_level, least(subject->tokens_level + added, full));
        gate_put_signed(gate, &subject->tokens_most, least(subject->tokens_most + added, full));
    }
    gate_put64(gate, &subject->concurrent_part, more->concurrent);
    gate_put64(gate, &subject->queued_part, more->queued);
    return gate_unlock(gate, SLUICE_OK, text);
}

/* Of a level, what is over `most`, or all of a debt. */
static int64_t take_over(struct sluice_gate *gate, int64_t *level, int64_t most)
{
    int64_t back = *level < 0 ? *level : *level > most * GATE_BUCKET_UNIT ? *level - most * GATE_BUCKET_UNIT : 0;
    back = back / GATE_BUCKET_UNIT * GATE_BUCKET_UNIT;
    gate_put_signed(gate, level, *level - back);
    return back / GATE_BUCKET_UNIT;
}

enum sluice_error sluice_gate_keep(struct sluice_gate *gate, enum sluice_gate_kind kind, uint64_t id, uint64_t now_us,
                                   const struct sluice_gate_part *most, struct sluice_gate_kept *kept,
                                   struct sluice_error_text *text)
{
    enum sluice_error error = gate_lock(gate, text);
    if (error)
        return error;
    struct gate_subject *subject = find_shared(gate, kind, id, most, &error, text);
    if (!subject)
        return gate_unlock(gate, error, text);
    struct sluice_gate_kept found = {.open = subject->open, .waiting = subject->waiting};
    refill(gate, subject, gate_time(gate, now_us));
    found.requests_back = take_over(gate, &subject->requests_level, most->requests);
    found.tokens_back = take_over(gate, &subject->tokens_level, most->tokens);
    found.tokens_over = subject->tokens_over / GATE_BUCKET_UNIT;
    gate_put_signed(gate, &subject->tokens_over, subject->tokens_over % GATE_BUCKET_UNIT);
    gate_put_signed(gate, &subject->tokens_most, subject->tokens_level > 0 ? subject->tokens_level : 0);
    uint64_t concurrent = most->concurrent > subject->open ? most->concurrent : subject->open;
    uint64_t queued = most->queued > subject->waiting ? most->queued : subject->waiting;
    if (subject->concurrent_part > concurrent)
        gate_put64(gate, &subject->concurrent_part, concurrent);
    if (subject->queued_part > queued)
        gate_put64(gate, &subject->queued_part, queued);
    found.part = (struct sluice_gate_part){
        .requests = whole(subject->requests_level, subject->limit.requests),
        .tokens = whole(subject->tokens_level, subject->limit.tokens),
        .concurrent = subject->concurrent_part > subject->open ? subject->concurrent_part : subject->open,
        .queued = subject->queued_part > subject->waiting ? subject->queued_part : subject->waiting,
    };
    error = gate_unlock(gate, SLUICE_OK, text);
    if (!error)
        *kept = found;
    return error;
}

/* ---- what is read ---- */

static void read_subject(const struct gate_subject *subject, uint64_t now_us, struct sluice_gate_subject *figures)
{
    const struct sluice_gate_limit *limit = &subject->limit;
    *figures = (struct sluice_gate_subject){
        .limit = *limit,
        .weight = subject->weight,
        .open = subject->open,
        .waiting = subject->waiting,
        .tokens = subject->tokens,
        .requests_left = whole(requests_at(subject, now_us), limit->requests),
        .tokens_left = whole(tokens_at(subject, now_us), limit->tokens),
        .refused = subject->refused,
    };
}

enum sluice_error sluice_gate_get_subject(struct sluice_gate *gate, enum sluice_gate_kind kind, uint64_t id,
                                          uint64_t now_us, struct sluice_gate_subject *figures,
                                          struct sluice_error_text *text)
{
    const struct gate_subject nothing = {.limit = {no_limit, no_limit, no_limit, no_limit, 0, 0}, .weight = 1};
    enum sluice_error error = gate_lock(gate, text);
    if (error)
        return error;
    uint32_t row = gate_table_find(&gate->subject_table, kind, id);
    uint64_t latest = gate->header->latest_us;
    read_subject(row ? &gate->subjects[row] : &nothing, now_us > latest ? now_us : latest, figures);
    return gate_unlock(gate, SLUICE_OK, text);
}
