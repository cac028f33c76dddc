/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gate's queues: start-time fair queueing (Goyal 1996) over the tenants of each service, whose unit is a token divided
 * by the tenant's weight. A tenant's flow has the virtual start time of its next ticket; a turn moves it on by what the
 * ticket reserved, its end back by what it did not use. Virtual time is the start of the latest turn, and a flow that it
 * passes while nothing of it waits catches up, so that nobody saves turns for later.
 */
#include "error.h"
#include "gate_parts.h"

#include "fixed.h"

enum { FRACTION_BITS = 16 };

/* ---- flows ---- */

/* A tenant's lead of one step of its ticket's priority. */
static const uint64_t priority_lead = (uint64_t)SLUICE_GATE_PRIORITY_TOKENS << FRACTION_BITS;

static uint64_t later(uint64_t start, uint64_t cost)
{
    return cost > UINT64_MAX - start ? UINT64_MAX : start + cost;
}

uint32_t gate_take_flow(struct sluice_gate *gate, uint32_t service, uint64_t tenant)
{
    uint32_t serial = gate->services[service].serial, row = gate_table_find(&gate->flow_table, serial, tenant);
    if (row || !(row = gate_table_take(gate, &gate->flow_table, serial, tenant)))
        return row;
    gate_put64(gate, &gate->flows[row].start, gate->services[service].virtual_time);
    gate_table_set_idle(gate, &gate->flow_table, row, true);
    return row;
}

/* In its service's heap, where its first ticket and its start put it. */
static void place_flow(struct sluice_gate *gate, struct gate_service *service, uint32_t row)
{
    struct gate_flow *flow = &gate->flows[row];
    const struct gate_ticket *first = &gate->tickets[flow->queue];
    gate_heap_insert(gate, gate_flow_heap(gate), &service->queue, row, flow->start - first->priority * priority_lead,
                     first->sequence);
}

static void displace_flow(struct sluice_gate *gate, struct gate_service *service, uint32_t row)
{
    gate_heap_remove(gate, gate_flow_heap(gate), &service->queue, row);
}

static void count_waiting(struct sluice_gate *gate, const struct gate_ticket *ticket, bool waits)
{
    struct gate_service *service = &gate->services[ticket->service];
    uint32_t sign = waits ? 1 : UINT32_MAX;
    gate_add32(gate, &service->waiting, sign);
    gate_add64(gate, &service->tokens_waiting, waits ? ticket->tokens : -ticket->tokens);
    gate_add32(gate, &gate->flows[ticket->flow].waiting, sign);
    for (int kind = 0; kind < SLUICE_GATE_KINDS; kind++)
        if (ticket->subjects[kind])
            gate_add32(gate, &gate->subjects[ticket->subjects[kind]].waiting, sign);
}

/* Its place in its flow: those that lost a replica, then by priority, then by deadline. */
static uint64_t place_in_flow(const struct gate_ticket *ticket)
{
    const uint64_t latest = (UINT64_C(1) << 59) - 1;
    uint64_t deadline = ticket->deadline_us && ticket->deadline_us < latest ? ticket->deadline_us : latest;
    uint64_t group = ticket->front ? 0 : 1 + SLUICE_GATE_MAX_PRIORITY - ticket->priority;
    return group << 59 | deadline;
}

/* ---- waiting ---- */

void gate_enqueue(struct sluice_gate *gate, uint32_t row, uint64_t now_us)
{
    struct gate_ticket *ticket = &gate->tickets[row];
    struct gate_service *service = &gate->services[ticket->service];
    struct gate_flow *flow = &gate->flows[ticket->flow];
    uint32_t first = flow->queue;
    if (!first && flow->start < service->virtual_time) {
        gate_put64(gate, &flow->start, service->virtual_time);
        gate_add32(gate, &flow->epoch, 1);
    }
    gate_put32(gate, &ticket->state, GATE_WAITING);
    gate_put64(gate, &ticket->waits_since_us, now_us);
    gate_list_append(gate, gate_ticket_links(gate), &service->arrivals, row);
    gate_heap_insert(gate, gate_queue_heap(gate), &flow->queue, row, place_in_flow(ticket), ticket->sequence);
    if (ticket->deadline_us)
        gate_heap_insert(gate, gate_expiry_heap(gate), &gate->header->expiry, row, ticket->deadline_us,
                         ticket->sequence);
    if (flow->queue != first) {
        if (first)
            displace_flow(gate, service, ticket->flow);
        place_flow(gate, service, ticket->flow);
    }
    count_waiting(gate, ticket, true);
    gate_mark_dirty(gate, ticket->service);
    gate_touch_service(gate, ticket->service);
}

void gate_dequeue(struct sluice_gate *gate, uint32_t row)
{
    struct gate_ticket *ticket = &gate->tickets[row];
    struct gate_service *service = &gate->services[ticket->service];
    struct gate_flow *flow = &gate->flows[ticket->flow];
    bool first = flow->queue == row;
    gate_list_remove(gate, gate_ticket_links(gate), &service->arrivals, row);
    gate_heap_remove(gate, gate_queue_heap(gate), &flow->queue, row);
    if (ticket->deadline_us)
        gate_heap_remove(gate, gate_expiry_heap(gate), &gate->header->expiry, row);
    if (first) {
        displace_flow(gate, service, ticket->flow);
        if (flow->queue)
            place_flow(gate, service, ticket->flow);
    }
    count_waiting(gate, ticket, false);
}

/* ---- turns ---- */

/* Reports a ticket to its worker, in one of its lists. */
static void report(struct sluice_gate *gate, uint32_t row, enum gate_ticket_state state)
{
    struct gate_ticket *ticket = &gate->tickets[row];
    struct gate_worker *worker = &gate->workers[ticket->seat];
    gate_put32(gate, &ticket->state, state);
    gate_list_append(gate, gate_ticket_links(gate), state == GATE_GRANTED ? &worker->turns : &worker->expired, row);
    gate_wake(gate, ticket->seat, true);
}

void gate_unlink_pending(struct sluice_gate *gate, uint32_t row)
{
    const struct gate_ticket *ticket = &gate->tickets[row];
    struct gate_worker *worker = &gate->workers[ticket->seat];
    gate_list_remove(gate, gate_ticket_links(gate), ticket->state == GATE_GRANTED ? &worker->turns : &worker->expired,
                     row);
    if (!worker->turns.first && !worker->expired.first)
        gate_wake(gate, ticket->seat, false);
}

/* The first ticket of a service that has free places gets one. */
static void grant(struct sluice_gate *gate, struct gate_service *service, uint64_t now_us)
{
    struct gate_flow *flow = &gate->flows[service->queue];
    uint32_t row = flow->queue, blocks;
    struct gate_ticket *ticket = &gate->tickets[row];
    uint32_t replica = gate_choose_replica(gate, ticket, &blocks);
    uint64_t cost = (ticket->tokens ? ticket->tokens : 1) << FRACTION_BITS;
    cost /= gate->subjects[ticket->subjects[SLUICE_GATE_TENANT]].weight;
    if (flow->node.hi > service->virtual_time)
        gate_put64(gate, &service->virtual_time, flow->node.hi);
    gate_put64(gate, &ticket->cost, cost);
    gate_put32(gate, &ticket->flow_epoch, flow->epoch);
    gate_put64(gate, &flow->start, later(flow->start, cost));
    gate_dequeue(gate, row);
    gate_put32(gate, &ticket->replica, replica);
    gate_put32(gate, &ticket->prefix_found, blocks);
    gate_put64(gate, &ticket->replica_name, gate->replicas[replica].row.id);
    gate_put64(gate, &ticket->granted_us, now_us);
    gate_load_replica(gate, replica, ticket->tokens);
    gate_remember_prefix(gate, ticket, replica);
    report(gate, row, GATE_GRANTED);
}

void gate_leave_replica(struct sluice_gate *gate, uint32_t row, uint64_t used)
{
    struct gate_ticket *ticket = &gate->tickets[row];
    struct gate_flow *flow = &gate->flows[ticket->flow];
    struct gate_service *service = &gate->services[ticket->service];
    uint32_t replica = ticket->replica;
    gate_put32(gate, &ticket->replica, 0);
    gate_unload_replica(gate, replica, ticket->tokens);
    if (ticket->flow_epoch != flow->epoch)
        return; /* it caught up with virtual time meanwhile: what was charged before does not count any more */
    sluice_u128 cost = (sluice_u128)ticket->cost * used / (ticket->tokens ? ticket->tokens : 1);
    uint64_t before = flow->start - ticket->cost;
    gate_put64(gate, &flow->start, later(before, cost > UINT64_MAX ? UINT64_MAX : (uint64_t)cost));
    if (flow->queue) {
        displace_flow(gate, service, ticket->flow);
        place_flow(gate, service, ticket->flow);
    }
}

/* ---- what workers call ---- */

static enum sluice_error expire(struct sluice_gate *gate, uint64_t now_us, uint32_t *steps,
                                struct sluice_error_text *text)
{
    enum sluice_error error = SLUICE_OK;
    uint32_t row;
    while (!error && (row = gate->header->expiry) && gate->tickets[row].deadline_us <= now_us) {
        gate_dequeue(gate, row);
        report(gate, row, GATE_EXPIRED);
        error = gate_pause(gate, steps, text);
    }
    return error;
}

static enum sluice_error give_turns(struct sluice_gate *gate, uint64_t now_us, uint32_t *steps,
                                    struct sluice_error_text *text)
{
    enum sluice_error error = SLUICE_OK;
    uint32_t row;
    while (!error && (row = gate->header->dirty.first)) {
        struct gate_service *service = &gate->services[row];
        if (service->waiting && service->free) {
            grant(gate, service, now_us);
        } else {
            gate_list_remove(gate, gate_dirty_links(gate), &gate->header->dirty, row);
            gate_put32(gate, &service->is_dirty, 0);
            gate_touch_service(gate, row);
        }
        error = gate_pause(gate, steps, text);
    }
    return error;
}

static struct sluice_gate_turn describe_turn(const struct sluice_gate *gate, uint32_t row)
{
    const struct gate_ticket *ticket = &gate->tickets[row];
    return (struct sluice_gate_turn){
        .ticket = gate_ticket_id(gate, row),
        .replica = ticket->replica_name,
        .tag = {ticket->tag[0], ticket->tag[1]},
        .slot = ticket->replica - 1,
        .prefix_blocks = ticket->prefix_found,
    };
}

/* The lock for one worker's call at *now_us, with what has expired reported. */
static enum sluice_error begin(struct sluice_gate *gate, uint32_t worker, uint64_t *now_us, uint32_t *steps,
                               struct sluice_error_text *text)
{
    enum sluice_error error = gate_lock(gate, text);
    if (error)
        return error;
    if (!gate_find_worker(gate, worker))
        return gate_unlock(gate, gate_fail_worker(worker, text), text);
    *now_us = gate_time(gate, *now_us);
    error = expire(gate, *now_us, steps, text);
    return error ? gate_unlock(gate, error, text) : SLUICE_OK;
}

enum sluice_error sluice_gate_turn(struct sluice_gate *gate, uint32_t worker, uint64_t now_us, uint32_t room,
                                   struct sluice_gate_turn *turns, uint32_t *count, struct sluice_error_text *text)
{
    uint32_t steps = 0, found = 0, row;
    enum sluice_error error = begin(gate, worker, &now_us, &steps, text);
    if (error)
        return error;
    gate_begin_trial(gate, now_us);
    error = give_turns(gate, now_us, &steps, text);
    struct gate_worker *self = gate_find_worker(gate, worker);
    while (!error && self && found < room && (row = self->turns.first)) {
        gate_unlink_pending(gate, row);
        gate_put32(gate, &gate->tickets[row].state, GATE_IN_FLIGHT);
        turns[found++] = describe_turn(gate, row);
        error = gate_step(gate, text);
    }
    error = gate_unlock(gate, error, text);
    if (!error)
        *count = found;
    return error;
}

enum sluice_error sluice_gate_expired(struct sluice_gate *gate, uint32_t worker, uint64_t now_us, uint32_t room,
                                      uint64_t *tickets, uint32_t *count, uint64_t *next_us,
                                      struct sluice_error_text *text)
{
    uint32_t steps = 0, found = 0, row;
    enum sluice_error error = begin(gate, worker, &now_us, &steps, text);
    if (error)
        return error;
    struct gate_worker *self = gate_find_worker(gate, worker);
    while (!error && self && found < room && (row = self->expired.first)) {
        gate_unlink_pending(gate, row);
        gate_put32(gate, &gate->tickets[row].state, GATE_LATE);
        tickets[found++] = gate_ticket_id(gate, row);
        error = gate_step(gate, text);
    }
    uint64_t next = gate->header->expiry ? gate->tickets[gate->header->expiry].deadline_us : 0;
    error = gate_unlock(gate, error, text);
    if (!error) {
        *count = found;
        if (next_us)
            *next_us = next;
    }
    return error;
}

uint64_t sluice_gate_wakes(const struct sluice_gate *gate)
{
    return __atomic_load_n(&gate->header->wakes, __ATOMIC_ACQUIRE);
}

enum sluice_error sluice_gate_again(struct sluice_gate *gate, uint64_t id, uint64_t now_us, uint64_t avoid,
                                    uint64_t deadline_us, struct sluice_error_text *text)
{
    enum sluice_error error = gate_lock(gate, text);
    if (error)
        return error;
    uint32_t row = gate_find_ticket(gate, id);
    if (!row)
        return gate_unlock(gate, gate_fail_ticket(id, text), text);
    struct gate_ticket *ticket = &gate->tickets[row];
    if (ticket->state != GATE_GRANTED && ticket->state != GATE_IN_FLIGHT) {
        error = sluice_fail(text, SLUICE_ERROR_INVALID, "ticket %llx has no replica to lose", (unsigned long long)id);
        return gate_unlock(gate, error, text);
    }
    now_us = gate_time(gate, now_us);
    if (ticket->state == GATE_GRANTED)
        gate_unlink_pending(gate, row);
    gate_leave_replica(gate, row, 0);
    gate_put32(gate, &ticket->front, 1);
    gate_put64(gate, &ticket->avoid, avoid);
    if (deadline_us != UINT64_MAX)
        gate_put64(gate, &ticket->deadline_us, deadline_us);
    gate_enqueue(gate, row, now_us);
    return gate_unlock(gate, SLUICE_OK, text);
}
