/* SPDX-License-Identifier: Apache-2.0 */
/* The gate's audit: everything that is derived is computed again from the tickets, and compared. */
#include "error.h"
#include "gate_parts.h"

#include <inttypes.h>
#include <stdlib.h>

/* What the tickets say; rows as in the gate. */
struct sums {
    struct gate_subject *subjects; /* open, waiting, tokens */
    struct gate_service *services; /* waiting, in_flight, tokens of both, and what replicas contribute */
    struct gate_flow *flows;       /* open, waiting */
    struct gate_replica *replicas; /* in_flight, tokens */
    uint32_t workers[SLUICE_GATE_MAX_WORKERS];
    uint32_t tickets, with_deadline;
};

static enum sluice_error differs(struct sluice_error_text *text, const char *what, uint64_t id, uint64_t kept,
                                 uint64_t found)
{
    return sluice_fail(text, SLUICE_ERROR_CORRUPT,
                       "%s of %" PRIx64 ": %" PRIu64 " kept, %" PRIu64 " found; format the gate again", what, id, kept,
                       found);
}

/* ---- sums ---- */

static void free_sums(struct sums *sums)
{
    free(sums->subjects);
    free(sums->services);
    free(sums->flows);
    free(sums->replicas);
}

static bool new_sums(const struct sluice_gate *gate, struct sums *sums)
{
    *sums = (struct sums){
        .subjects = calloc(gate->shape.subjects + 1, sizeof *sums->subjects),
        .services = calloc(gate->shape.services + 1, sizeof *sums->services),
        .flows = calloc(gate->shape.tickets + 1, sizeof *sums->flows),
        .replicas = calloc(gate->shape.replicas + 1, sizeof *sums->replicas),
    };
    return sums->subjects && sums->services && sums->flows && sums->replicas;
}

static void add_ticket(const struct gate_ticket *ticket, struct sums *sums)
{
    bool waits = ticket->state == GATE_WAITING;
    sums->tickets++;
    sums->workers[ticket->seat]++;
    sums->flows[ticket->flow].open++;
    sums->flows[ticket->flow].waiting += waits;
    sums->with_deadline += waits && ticket->deadline_us;
    for (int kind = 0; kind < SLUICE_GATE_KINDS; kind++) {
        struct gate_subject *subject = &sums->subjects[ticket->subjects[kind]];
        subject->open++;
        subject->waiting += waits;
        subject->tokens += ticket->tokens;
    }
    struct gate_service *service = &sums->services[ticket->service];
    if (waits) {
        service->waiting++;
        service->tokens_waiting += ticket->tokens;
    } else if (ticket->replica) {
        service->in_flight++;
        service->tokens_in_flight += ticket->tokens;
        sums->replicas[ticket->replica].in_flight++;
        sums->replicas[ticket->replica].tokens += ticket->tokens;
    }
}

static bool ticket_is_sound(const struct sluice_gate *gate, const struct gate_ticket *ticket)
{
    bool has_replica = ticket->state == GATE_GRANTED || ticket->state == GATE_IN_FLIGHT;
    return ticket->state <= GATE_LATE && ticket->seat < gate->shape.workers && gate->workers[ticket->seat].pid &&
           ticket->flow && ticket->flow <= gate->shape.tickets && ticket->service &&
           ticket->service <= gate->shape.services && ticket->replica <= gate->shape.replicas &&
           (ticket->replica != 0) == has_replica && ticket->subjects[SLUICE_GATE_TENANT];
}

static enum sluice_error sum_tickets(const struct sluice_gate *gate, struct sums *sums, struct sluice_error_text *text)
{
    for (uint32_t row = 1; row <= gate->header->ticket_fresh; row++) {
        const struct gate_ticket *ticket = &gate->tickets[row];
        if (ticket->state == GATE_FREE)
            continue;
        if (!ticket_is_sound(gate, ticket))
            return differs(text, "state of ticket", row, ticket->state, 0);
        add_ticket(ticket, sums);
    }
    return SLUICE_OK;
}

/* ---- what is kept ---- */

static enum sluice_error audit_subjects(const struct sluice_gate *gate, const struct sums *sums,
                                        struct sluice_error_text *text)
{
    for (uint32_t row = 1; row <= gate->header->subjects.fresh; row++) {
        const struct gate_subject *kept = &gate->subjects[row], *found = &sums->subjects[row];
        if (!kept->row.in_use && !found->open)
            continue;
        if (kept->open != found->open)
            return differs(text, "tickets of subject", kept->row.id, kept->open, found->open);
        if (kept->waiting != found->waiting)
            return differs(text, "waiting tickets of subject", kept->row.id, kept->waiting, found->waiting);
        if (kept->tokens != found->tokens)
            return differs(text, "tokens of subject", kept->row.id, kept->tokens, found->tokens);
        const struct sluice_gate_limit *limit = &kept->limit;
        if (kept->requests_level > (int64_t)limit->requests_burst * GATE_BUCKET_UNIT || kept->requests_level < 0)
            return differs(text, "requests left to subject", kept->row.id, (uint64_t)kept->requests_level,
                           limit->requests_burst);
        if (kept->tokens_level > (int64_t)limit->tokens_burst * GATE_BUCKET_UNIT)
            return differs(text, "tokens left to subject", kept->row.id, (uint64_t)kept->tokens_level,
                           limit->tokens_burst);
    }
    return SLUICE_OK;
}

static enum sluice_error audit_replicas(const struct sluice_gate *gate, const struct sums *sums,
                                        struct sluice_error_text *text)
{
    for (uint32_t row = 1; row <= gate->header->replicas.fresh; row++) {
        const struct gate_replica *kept = &gate->replicas[row], *found = &sums->replicas[row];
        if (!kept->row.in_use && !found->in_flight)
            continue;
        if (kept->in_flight != found->in_flight || !kept->row.in_use)
            return differs(text, "tickets of replica", kept->row.id, kept->in_flight, found->in_flight);
        if (kept->tokens != found->tokens)
            return differs(text, "tokens of replica", kept->row.id, kept->tokens, found->tokens);
        struct gate_service *service = &sums->services[kept->service];
        service->known++;
        if (kept->removed || kept->state == SLUICE_GATE_NOT_USABLE)
            continue;
        bool out = kept->state == SLUICE_GATE_USABLE && kept->standing != SLUICE_GATE_IN;
        uint32_t slots = !out ? kept->slots : kept->standing == SLUICE_GATE_TRIAL && kept->slots;
        service->out += out;
        service->slots += slots;
        service->replica_count++;
        service->usables += kept->state == SLUICE_GATE_USABLE;
        service->free += slots > kept->in_flight ? slots - kept->in_flight : 0;
    }
    return SLUICE_OK;
}

static enum sluice_error audit_services(const struct sluice_gate *gate, const struct sums *sums,
                                        struct sluice_error_text *text)
{
    for (uint32_t row = 1; row <= gate->header->services.fresh; row++) {
        const struct gate_service *kept = &gate->services[row], *found = &sums->services[row];
        const uint64_t pairs[][2] = {{kept->waiting, found->waiting},
                                     {kept->in_flight, found->in_flight},
                                     {kept->tokens_waiting, found->tokens_waiting},
                                     {kept->tokens_in_flight, found->tokens_in_flight},
                                     {kept->slots, found->slots},
                                     {kept->replica_count, found->replica_count},
                                     {kept->usables, found->usables},
                                     {kept->out, found->out},
                                     {kept->free, found->free},
                                     {kept->known, found->known}};
        static const char *const names[] = {"waiting tickets of service", "tickets in flight of service",
                                            "waiting tokens of service",  "tokens in flight of service",
                                            "slots of service",           "replicas of service",
                                            "usable replicas of service", "slow replicas of service",
                                            "free places of service",     "known replicas of service"};
        if (!kept->row.in_use && !found->waiting && !found->in_flight && !found->known)
            continue;
        for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
            if (pairs[i][0] != pairs[i][1])
                return differs(text, names[i], kept->row.id, pairs[i][0], pairs[i][1]);
        if (kept->out > gate_most_out(kept->usables))
            return differs(text, "most slow replicas of service", kept->row.id, kept->out,
                           gate_most_out(kept->usables));
        if (kept->waiting && kept->free && !kept->is_dirty)
            return differs(text, "places not given out of service", kept->row.id, kept->free, kept->waiting);
    }
    return SLUICE_OK;
}

static enum sluice_error audit_flows(const struct sluice_gate *gate, const struct sums *sums,
                                     struct sluice_error_text *text)
{
    for (uint32_t row = 1; row <= gate->header->flows.fresh; row++) {
        const struct gate_flow *kept = &gate->flows[row], *found = &sums->flows[row];
        if (!kept->row.in_use && !found->open)
            continue;
        if (kept->open != found->open)
            return differs(text, "tickets of the queue of tenant", kept->row.id, kept->open, found->open);
        if (kept->waiting != found->waiting || !kept->waiting != !kept->queue)
            return differs(text, "waiting tickets of the queue of tenant", kept->row.id, kept->waiting, found->waiting);
    }
    return SLUICE_OK;
}

/* ---- heaps and lists ---- */

static const struct gate_node *node_at(struct gate_heap heap, uint32_t row)
{
    return (const struct gate_node *)(const void *)(heap.rows + row * heap.stride + heap.node);
}

/* A node belongs where it is: below a lesser one that knows it, or at the root. Keys rise, so there is no cycle. */
static bool node_is_sound(struct gate_heap heap, uint32_t root, uint32_t row)
{
    const struct gate_node *node = node_at(heap, row);
    uint32_t left = node->left ? node_at(heap, node->left)->rank : 0;
    uint32_t right = node->right ? node_at(heap, node->right)->rank : 0;
    if (left < right || node->rank != right + 1)
        return false;
    if (!node->parent)
        return root == row;
    const struct gate_node *above = node_at(heap, node->parent);
    bool later = above->hi != node->hi ? above->hi < node->hi : above->lo < node->lo;
    return later && (above->left == row || above->right == row);
}

static enum sluice_error audit_heaps(const struct sluice_gate *gate, struct sluice_error_text *text)
{
    for (uint32_t row = 1; row <= gate->header->ticket_fresh; row++) {
        const struct gate_ticket *ticket = &gate->tickets[row];
        if (ticket->state != GATE_WAITING)
            continue;
        if (!node_is_sound(gate_queue_heap(gate), gate->flows[ticket->flow].queue, row))
            return differs(text, "place in its queue of ticket", row, ticket->queue.parent, ticket->queue.rank);
        if (ticket->deadline_us && !node_is_sound(gate_expiry_heap(gate), gate->header->expiry, row))
            return differs(text, "place among deadlines of ticket", row, ticket->expiry.parent, ticket->expiry.rank);
    }
    for (uint32_t row = 1; row <= gate->header->flows.fresh; row++) {
        const struct gate_flow *flow = &gate->flows[row];
        if (!flow->row.in_use || !flow->queue)
            continue;
        const struct gate_service *service = &gate->services[gate->tickets[flow->queue].service];
        if (!node_is_sound(gate_flow_heap(gate), service->queue, row))
            return differs(text, "place of the queue of tenant", flow->row.id, flow->node.parent, flow->node.rank);
    }
    return SLUICE_OK;
}

/* How many rows a list has; a number over `most` where it has no end, or its links contradict each other. */
static uint32_t length(struct gate_links links, struct gate_list list, uint32_t most)
{
    uint32_t count = 0, previous = 0;
    for (uint32_t row = list.first; row && count <= most; count++) {
        const struct gate_link *link =
            (const struct gate_link *)(const void *)(links.rows + row * links.stride + links.link);
        if (link->previous != previous)
            return UINT32_MAX;
        previous = row;
        row = link->next;
    }
    return previous == list.last ? count : UINT32_MAX;
}

static enum sluice_error audit_workers(const struct sluice_gate *gate, const struct sums *sums,
                                       struct sluice_error_text *text)
{
    uint64_t wakes = 0;
    for (uint32_t seat = 0; seat < gate->shape.workers; seat++) {
        const struct gate_worker *worker = &gate->workers[seat];
        uint32_t count = length(gate_own_links(gate), worker->tickets, gate->shape.tickets);
        if (worker->count != sums->workers[seat] || count != worker->count)
            return differs(text, "tickets of seat", seat, worker->count, sums->workers[seat]);
        if (worker->turns.first || worker->expired.first)
            wakes |= UINT64_C(1) << seat;
    }
    if (wakes != gate->header->wakes)
        return differs(text, "wakes", 0, gate->header->wakes, wakes);
    return SLUICE_OK;
}

static enum sluice_error audit_table(const struct gate_table *table, const char *what, struct sluice_error_text *text)
{
    uint32_t idle = 0, unused = 0, free_rows = 0;
    for (uint32_t row = 1; row <= table->state->fresh; row++) {
        const struct gate_row *head = gate_table_row(table, row);
        idle += head->is_idle;
        unused += !head->in_use;
        if (head->in_use && gate_table_find(table, head->kind, head->id) != row)
            return differs(text, what, head->id, row, gate_table_find(table, head->kind, head->id));
    }
    struct gate_links links = {table->rows, table->stride, offsetof(struct gate_row, idle)};
    uint32_t listed = length(links, table->state->idle, table->capacity);
    if (listed != idle)
        return differs(text, what, 0, listed, idle);
    for (uint32_t row = table->state->free; row && free_rows <= unused; row = gate_table_row(table, row)->next)
        free_rows++;
    return free_rows == unused ? SLUICE_OK : differs(text, what, 0, free_rows, unused);
}

static enum sluice_error audit_lists(const struct sluice_gate *gate, const struct sums *sums,
                                     struct sluice_error_text *text)
{
    const struct gate_header *header = gate->header;
    uint32_t free_rows = 0;
    for (uint32_t row = header->ticket_free; row && free_rows <= gate->shape.tickets; free_rows++)
        row = gate->tickets[row].own.next;
    if (header->ticket_count != sums->tickets || free_rows + sums->tickets != header->ticket_fresh)
        return differs(text, "tickets", 0, header->ticket_count, sums->tickets);
    if (!header->expiry != !sums->with_deadline)
        return differs(text, "deadlines", 0, header->expiry, sums->with_deadline);
    for (uint32_t row = 1; row <= header->services.fresh; row++) {
        const struct gate_service *service = &gate->services[row];
        if (!service->row.in_use)
            continue;
        uint32_t arrivals = length(gate_ticket_links(gate), service->arrivals, gate->shape.tickets);
        uint32_t replicas = length(gate_replica_links(gate), service->replicas, gate->shape.replicas);
        if (arrivals != service->waiting || replicas != service->known)
            return differs(text, "lists of service", service->row.id, arrivals, replicas);
    }
    return SLUICE_OK;
}

static enum sluice_error audit(const struct sluice_gate *gate, struct sums *sums, struct sluice_error_text *text)
{
    enum sluice_error error = sum_tickets(gate, sums, text);
    if (!error)
        error = audit_subjects(gate, sums, text);
    if (!error)
        error = audit_replicas(gate, sums, text);
    if (!error)
        error = audit_services(gate, sums, text);
    if (!error)
        error = audit_flows(gate, sums, text);
    if (!error)
        error = audit_heaps(gate, text);
    if (!error)
        error = audit_workers(gate, sums, text);
    if (!error)
        error = audit_lists(gate, sums, text);
    const struct gate_table *const tables[] = {&gate->subject_table, &gate->service_table, &gate->flow_table,
                                               &gate->replica_table};
    static const char *const names[] = {"table of subjects", "table of services", "table of queues",
                                        "table of replicas"};
    for (size_t i = 0; i < sizeof tables / sizeof *tables && !error; i++)
        error = audit_table(tables[i], names[i], text);
    return error;
}

enum sluice_error sluice_gate_audit(struct sluice_gate *gate, struct sluice_error_text *text)
{
    struct sums sums;
    enum sluice_error error = new_sums(gate, &sums)
                                  ? gate_lock(gate, text)
                                  : sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "no memory for an audit of the gate");
    if (!error)
        error = gate_unlock(gate, audit(gate, &sums, text), text);
    free_sums(&sums);
    return error;
}
