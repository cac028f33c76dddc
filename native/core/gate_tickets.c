/* SPDX-License-Identifier: Apache-2.0 */
/* The gate's tickets: admission, progress, and their end. */
#include "error.h"
#include "gate_parts.h"

#include <inttypes.h>

/* ---- names ---- */

uint64_t gate_ticket_id(const struct sluice_gate *gate, uint32_t row)
{
    return (uint64_t)gate->tickets[row].generation << 32 | row;
}

uint32_t gate_find_ticket(const struct sluice_gate *gate, uint64_t id)
{
    uint32_t row = (uint32_t)id;
    if (!row || row > gate->shape.tickets || gate->tickets[row].generation != id >> 32)
        return 0;
    return gate->tickets[row].state == GATE_FREE ? 0 : row;
}

enum sluice_error gate_fail_ticket(uint64_t id, struct sluice_error_text *text)
{
    return sluice_fail(text, SLUICE_ERROR_UNKNOWN, "ticket %" PRIx64 " is not in the gate: it has ended", id);
}

/* ---- admission ---- */

static enum sluice_error check_request(const struct sluice_gate_request *request, struct sluice_error_text *text)
{
    if (!request->subjects[SLUICE_GATE_TENANT] || !request->subjects[SLUICE_GATE_SERVICE])
        return sluice_fail(text, SLUICE_ERROR_INVALID,
                           "request of tenant %" PRIx64 " for service %" PRIx64 ": 0 is neither",
                           request->subjects[SLUICE_GATE_TENANT], request->subjects[SLUICE_GATE_SERVICE]);
    if (request->tokens > SLUICE_GATE_MAX_AMOUNT || request->prompt_tokens > SLUICE_GATE_MAX_AMOUNT)
        return sluice_fail(text, SLUICE_ERROR_RANGE,
                           "request of %" PRIu64 " tokens, %" PRIu64 " of them its prompt's: at most %d",
                           request->tokens, request->prompt_tokens, SLUICE_GATE_MAX_AMOUNT);
    if (request->priority > SLUICE_GATE_MAX_PRIORITY || request->prefix_count > SLUICE_GATE_MAX_PREFIX)
        return sluice_fail(text, SLUICE_ERROR_RANGE,
                           "request of priority %" PRIu32 " with %" PRIu32 " blocks of prefix: at most %d and %d",
                           request->priority, request->prefix_count, SLUICE_GATE_MAX_PRIORITY, SLUICE_GATE_MAX_PREFIX);
    return SLUICE_OK;
}

static struct sluice_gate_answer refusal_of(enum sluice_gate_reason reason, uint64_t limit, uint64_t used)
{
    return (struct sluice_gate_answer){.reason = reason, .kind = SLUICE_GATE_SERVICE, .limit = limit, .used = used};
}

/* Whether all that the request concerns would admit it; `answer` says why not. */
static bool is_admissible(const struct sluice_gate *gate, const struct sluice_gate_request *request, uint64_t now_us,
                          struct sluice_gate_answer *answer)
{
    bool refused = false;
    uint32_t row = gate_table_find(&gate->service_table, 0, request->subjects[SLUICE_GATE_SERVICE]);
    const struct gate_service *service = row ? &gate->services[row] : NULL;
    bool has_place = service && service->free > service->waiting;
    for (uint32_t kind = 0; kind < SLUICE_GATE_KINDS; kind++) {
        uint64_t id = request->subjects[kind];
        uint32_t subject = id ? gate_table_find(&gate->subject_table, kind, id) : 0;
        if (subject)
            gate_check_subject(gate, subject, now_us, request->tokens, has_place, answer, &refused);
    }
    if (request->needs_replica && (!service || !service->replica_count))
        gate_refuse(answer, &refused, refusal_of(SLUICE_GATE_NO_REPLICAS, 0, 0));
    if (!gate->header->ticket_free && gate->header->ticket_fresh == gate->shape.tickets)
        gate_refuse(answer, &refused, refusal_of(SLUICE_GATE_FULL, gate->shape.tickets, gate->header->ticket_count));
    return !refused;
}

static void count_refusal(struct sluice_gate *gate, const struct sluice_gate_request *request,
                          const struct sluice_gate_answer *answer)
{
    uint32_t row = gate_table_find(&gate->subject_table, answer->kind, request->subjects[answer->kind]);
    if (row)
        gate_add64(gate, &gate->subjects[row].refused, 1);
}

/* A ticket's row, not linked anywhere. */
static uint32_t new_row(struct sluice_gate *gate)
{
    struct gate_header *header = gate->header;
    uint32_t row = header->ticket_free;
    if (row) {
        gate_put32(gate, &header->ticket_free, gate->tickets[row].own.next);
    } else {
        gate_put32(gate, &header->ticket_fresh, header->ticket_fresh + 1);
        row = header->ticket_fresh;
    }
    gate_add32(gate, &header->ticket_count, 1);
    gate_add64(gate, &header->sequence, 1);
    return row;
}

/* What the caller says of it. Rows that nobody uses need no log: a killed process leaves them unused. */
static void fill(struct sluice_gate *gate, uint32_t row, const struct sluice_gate_request *request, uint64_t now_us)
{
    struct gate_ticket *ticket = &gate->tickets[row];
    ticket->priority = request->priority;
    ticket->front = 0;
    ticket->replica = 0;
    ticket->tag[0] = request->tag[0];
    ticket->tag[1] = request->tag[1];
    ticket->tokens = request->tokens;
    ticket->deadline_us = request->deadline_us;
    ticket->admitted_us = now_us;
    ticket->granted_us = 0;
    ticket->sequence = gate->header->sequence;
    ticket->replica_name = ticket->avoid = 0;
    ticket->prefix_count = request->prefix_count;
    for (uint32_t i = 0; i < request->prefix_count; i++)
        ticket->prefix[i] = request->prefix[i];
    __atomic_store_n(&ticket->prompt_tokens, request->prompt_tokens, __ATOMIC_RELAXED);
    __atomic_store_n(&ticket->completion_tokens, 0, __ATOMIC_RELAXED);
}

/* Rows of all that the request concerns; false: one of the tables is full, and all of it is to be undone. */
static bool take_rows(struct sluice_gate *gate, struct gate_ticket *ticket, const struct sluice_gate_request *request,
                      uint64_t now_us)
{
    for (uint32_t kind = 0; kind < SLUICE_GATE_KINDS; kind++) {
        uint32_t row = request->subjects[kind] ? gate_take_subject(gate, kind, request->subjects[kind]) : 0;
        if (request->subjects[kind] && !row)
            return false;
        ticket->subjects[kind] = row;
        if (row)
            gate_charge_subject(gate, row, now_us, request->tokens, &ticket->epochs[kind]);
    }
    ticket->service = gate_take_service(gate, request->subjects[SLUICE_GATE_SERVICE]);
    if (!ticket->service)
        return false;
    gate_table_set_idle(gate, &gate->service_table, ticket->service, false);
    ticket->flow = gate_take_flow(gate, ticket->service, request->subjects[SLUICE_GATE_TENANT]);
    if (!ticket->flow)
        return false;
    gate_table_set_idle(gate, &gate->flow_table, ticket->flow, false);
    gate_add32(gate, &gate->flows[ticket->flow].open, 1);
    return true;
}

/* 0: a table is full. */
static uint32_t make_ticket(struct sluice_gate *gate, struct gate_worker *worker,
                            const struct sluice_gate_request *request, uint64_t now_us)
{
    uint32_t row = new_row(gate);
    struct gate_ticket *ticket = &gate->tickets[row];
    fill(gate, row, request, now_us);
    if (!take_rows(gate, ticket, request, now_us))
        return 0;
    ticket->seat = (uint32_t)(worker - gate->workers);
    gate_list_append(gate, gate_own_links(gate), &worker->tickets, row);
    gate_add32(gate, &worker->count, 1);
    gate_enqueue(gate, row, now_us);
    return row;
}

enum sluice_error sluice_gate_admit(struct sluice_gate *gate, uint32_t worker, uint64_t now_us,
                                    const struct sluice_gate_request *request, struct sluice_gate_answer *answer,
                                    struct sluice_error_text *text)
{
    struct sluice_gate_answer found = {0};
    enum sluice_error error = check_request(request, text);
    if (!error)
        error = gate_lock(gate, text);
    if (error)
        return error;
    struct gate_worker *self = gate_find_worker(gate, worker);
    if (!self)
        return gate_unlock(gate, gate_fail_worker(worker, text), text);
    now_us = gate_time(gate, now_us);
    if (is_admissible(gate, request, now_us, &found)) {
        uint32_t row = make_ticket(gate, self, request, now_us);
        if (row) {
            found.ticket = gate_ticket_id(gate, row);
        } else {
            gate_undo(gate);
            found = refusal_of(SLUICE_GATE_FULL, 0, 0);
        }
    }
    if (!found.ticket && !found.part)
        count_refusal(gate, request, &found);
    error = gate_unlock(gate, error, text);
    if (!error)
        *answer = found;
    return error;
}

/* ---- progress and end ---- */

enum sluice_error sluice_gate_progress(struct sluice_gate *gate, uint64_t id, uint64_t prompt_tokens,
                                       uint64_t completion_tokens, struct sluice_error_text *text)
{
    uint32_t row = (uint32_t)id;
    if (!row || row > gate->shape.tickets ||
        __atomic_load_n(&gate->tickets[row].generation, __ATOMIC_RELAXED) != id >> 32)
        return gate_fail_ticket(id, text);
    struct gate_ticket *ticket = &gate->tickets[row];
    if (prompt_tokens)
        __atomic_store_n(&ticket->prompt_tokens, prompt_tokens, __ATOMIC_RELAXED);
    __atomic_store_n(&ticket->completion_tokens, completion_tokens, __ATOMIC_RELAXED);
    return SLUICE_OK;
}

static uint64_t most(uint64_t tokens)
{
    return tokens < SLUICE_GATE_MAX_AMOUNT ? tokens : SLUICE_GATE_MAX_AMOUNT;
}

void gate_describe(const struct sluice_gate *gate, uint32_t row, uint64_t now_us, struct sluice_gate_settled *settled)
{
    const struct gate_ticket *ticket = &gate->tickets[row];
    uint64_t completion = most(__atomic_load_n(&ticket->completion_tokens, __ATOMIC_RELAXED));
    uint64_t prompt = most(__atomic_load_n(&ticket->prompt_tokens, __ATOMIC_RELAXED));
    *settled = (struct sluice_gate_settled){
        .ticket = gate_ticket_id(gate, row),
        .tag = {ticket->tag[0], ticket->tag[1]},
        .replica = ticket->replica_name,
        .reserved = ticket->tokens,
        .prompt_tokens = completion ? prompt : 0,
        .completion_tokens = completion,
        .admitted_us = ticket->admitted_us,
        .granted_us = ticket->granted_us,
        .ended_us = now_us,
    };
    for (int kind = 0; kind < SLUICE_GATE_KINDS; kind++)
        if (ticket->subjects[kind])
            settled->subjects[kind] = gate->subjects[ticket->subjects[kind]].row.id;
}

void gate_end_ticket(struct sluice_gate *gate, uint32_t row, uint64_t now_us, const struct sluice_gate_settled *settled)
{
    struct gate_ticket *ticket = &gate->tickets[row];
    struct gate_worker *worker = &gate->workers[ticket->seat];
    struct gate_flow *flow = &gate->flows[ticket->flow];
    uint64_t used = settled->prompt_tokens + settled->completion_tokens;
    uint32_t state = ticket->state;
    if (state == GATE_WAITING)
        gate_dequeue(gate, row);
    if (state == GATE_GRANTED || state == GATE_EXPIRED)
        gate_unlink_pending(gate, row);
    if (state == GATE_GRANTED || state == GATE_IN_FLIGHT)
        gate_leave_replica(gate, row, used ? used : 1);
    for (int kind = 0; kind < SLUICE_GATE_KINDS; kind++)
        if (ticket->subjects[kind])
            gate_settle_subject(gate, ticket->subjects[kind], now_us, ticket->tokens, used, ticket->epochs[kind]);
    gate_add32(gate, &flow->open, UINT32_MAX);
    gate_table_set_idle(gate, &gate->flow_table, ticket->flow, !flow->open);
    gate_touch_service(gate, ticket->service);
    gate_list_remove(gate, gate_own_links(gate), &worker->tickets, row);
    gate_add32(gate, &worker->count, UINT32_MAX);
    gate_put32(gate, &ticket->state, GATE_FREE);
    gate_add32(gate, &ticket->generation, 1); /* its id names nothing from now on */
    gate_put32(gate, &ticket->own.next, gate->header->ticket_free);
    gate_put32(gate, &gate->header->ticket_free, row);
    gate_add32(gate, &gate->header->ticket_count, UINT32_MAX);
}

/* Ends a ticket: `used` is NULL where what its worker reported is billed, else prompt's and completion's tokens. */
static enum sluice_error end(struct sluice_gate *gate, uint64_t id, uint64_t now_us, const uint64_t *used,
                             struct sluice_gate_settled *settled, struct sluice_error_text *text)
{
    struct sluice_gate_settled found;
    enum sluice_error error = gate_lock(gate, text);
    if (error)
        return error;
    uint32_t row = gate_find_ticket(gate, id);
    if (!row)
        return gate_unlock(gate, gate_fail_ticket(id, text), text);
    now_us = gate_time(gate, now_us);
    gate_describe(gate, row, now_us, &found);
    if (used) {
        found.prompt_tokens = used[0];
        found.completion_tokens = used[1];
    }
    gate_end_ticket(gate, row, now_us, &found);
    error = gate_unlock(gate, error, text);
    if (!error && settled)
        *settled = found;
    return error;
}

enum sluice_error sluice_gate_settle(struct sluice_gate *gate, uint64_t ticket, uint64_t now_us, uint64_t prompt_tokens,
                                     uint64_t completion_tokens, struct sluice_gate_settled *settled,
                                     struct sluice_error_text *text)
{
    const uint64_t used[] = {prompt_tokens, completion_tokens};
    if (prompt_tokens > SLUICE_GATE_MAX_AMOUNT || completion_tokens > SLUICE_GATE_MAX_AMOUNT)
        return sluice_fail(text, SLUICE_ERROR_RANGE,
                           "ticket %" PRIx64 " used %" PRIu64 " and %" PRIu64 " tokens: at most %d each", ticket,
                           prompt_tokens, completion_tokens, SLUICE_GATE_MAX_AMOUNT);
    return end(gate, ticket, now_us, used, settled, text);
}

enum sluice_error sluice_gate_abandon(struct sluice_gate *gate, uint64_t ticket, uint64_t now_us,
                                      struct sluice_gate_settled *settled, struct sluice_error_text *text)
{
    return end(gate, ticket, now_us, NULL, settled, text);
}
