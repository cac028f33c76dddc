/* SPDX-License-Identifier: Apache-2.0 */
/* The gate's services and replicas, and which replica a ticket gets. */
#include "error.h"
#include "gate_parts.h"

#include <inttypes.h>

/* ---- services ---- */

uint32_t gate_take_service(struct sluice_gate *gate, uint64_t id)
{
    uint32_t row = gate_table_find(&gate->service_table, 0, id);
    if (row || !(row = gate_table_take(gate, &gate->service_table, 0, id)))
        return row;
    struct gate_service *service = &gate->services[row];
    gate_add32(gate, &gate->header->serial, 1);
    gate_put32(gate, &service->serial, gate->header->serial);
    gate_put64(gate, &service->virtual_time, GATE_FIRST_VIRTUAL_TIME);
    gate_table_set_idle(gate, &gate->service_table, row, true);
    return row;
}

void gate_touch_service(struct sluice_gate *gate, uint32_t row)
{
    const struct gate_service *service = &gate->services[row];
    bool idle = !service->waiting && !service->in_flight && !service->known && !service->is_dirty;
    gate_table_set_idle(gate, &gate->service_table, row, idle);
}

void gate_mark_dirty(struct sluice_gate *gate, uint32_t row)
{
    struct gate_service *service = &gate->services[row];
    if (service->is_dirty || !service->waiting || !service->free)
        return;
    gate_put32(gate, &service->is_dirty, 1);
    gate_list_append(gate, gate_dirty_links(gate), &gate->header->dirty, row);
}

/* ---- replicas ---- */

static bool counts(const struct gate_replica *replica)
{
    return !replica->removed && replica->state != SLUICE_GATE_NOT_USABLE;
}

bool gate_is_out(const struct gate_replica *replica)
{
    return !replica->removed && replica->state == SLUICE_GATE_USABLE && replica->standing != SLUICE_GATE_IN;
}

uint32_t gate_slots_of(const struct gate_replica *replica)
{
    if (!gate_is_out(replica))
        return replica->slots;
    return replica->standing == SLUICE_GATE_TRIAL && replica->slots;
}

static uint32_t free_places(const struct gate_replica *replica)
{
    uint32_t slots = gate_slots_of(replica);
    return counts(replica) && slots > replica->in_flight ? slots - replica->in_flight : 0;
}

void gate_contribute(struct sluice_gate *gate, const struct gate_replica *replica, bool add)
{
    struct gate_service *service = &gate->services[replica->service];
    uint32_t sign = add ? 1 : UINT32_MAX;
    gate_add32(gate, &service->free, sign * free_places(replica));
    if (!counts(replica))
        return;
    gate_add32(gate, &service->slots, sign * gate_slots_of(replica));
    gate_add32(gate, &service->replica_count, sign);
    if (replica->state == SLUICE_GATE_USABLE)
        gate_add32(gate, &service->usables, sign);
    if (gate_is_out(replica))
        gate_add32(gate, &service->out, sign);
}

static void forget_if_gone(struct sluice_gate *gate, uint32_t row)
{
    struct gate_replica *replica = &gate->replicas[row];
    if (!replica->removed || replica->in_flight)
        return;
    struct gate_service *service = &gate->services[replica->service];
    gate_list_remove(gate, gate_replica_links(gate), &service->replicas, row);
    gate_add32(gate, &service->known, UINT32_MAX);
    gate_touch_service(gate, replica->service);
    gate_table_drop(gate, &gate->replica_table, row);
}

void gate_load_replica(struct sluice_gate *gate, uint32_t row, uint64_t tokens)
{
    struct gate_replica *replica = &gate->replicas[row];
    struct gate_service *service = &gate->services[replica->service];
    uint32_t before = free_places(replica);
    gate_add32(gate, &replica->in_flight, 1);
    gate_add64(gate, &replica->tokens, tokens);
    gate_add32(gate, &service->free, free_places(replica) - before);
    gate_add32(gate, &service->in_flight, 1);
    gate_add64(gate, &service->tokens_in_flight, tokens);
}

void gate_unload_replica(struct sluice_gate *gate, uint32_t row, uint64_t tokens)
{
    struct gate_replica *replica = &gate->replicas[row];
    uint32_t service_row = replica->service;
    struct gate_service *service = &gate->services[service_row];
    uint32_t before = free_places(replica);
    gate_add32(gate, &replica->in_flight, UINT32_MAX);
    gate_add64(gate, &replica->tokens, -tokens);
    gate_add32(gate, &service->free, free_places(replica) - before);
    gate_add32(gate, &service->in_flight, UINT32_MAX);
    gate_add64(gate, &service->tokens_in_flight, -tokens);
    forget_if_gone(gate, row);
    gate_mark_dirty(gate, service_row);
    gate_touch_service(gate, service_row);
}

/* ---- the choice ---- */

/* Replicas in the order in which kinds of them are used. */
enum rank { RANK_USABLE = 0, RANK_LAST = 1, RANK_AVOIDED = 2, RANKS = 3 };

/* Of one rank: its best replica by load, and how loaded all of them are. */
struct group {
    uint32_t best;
    uint64_t in_flight, slots;
};

struct gate_choice {
    uint64_t avoid;
    uint32_t service;
    enum rank rank;
    struct group group;
    uint32_t trial; /* a replica that is to be tried */
};

static enum rank rank_of(const struct gate_replica *replica, uint64_t avoid)
{
    if (avoid && replica->row.id == avoid)
        return RANK_AVOIDED;
    return replica->state == SLUICE_GATE_USABLE ? RANK_USABLE : RANK_LAST;
}

bool gate_choice_better(const struct sluice_gate *gate, uint32_t row, uint32_t than)
{
    const struct gate_replica *a = &gate->replicas[row], *b = &gate->replicas[than];
    return !than || (a->tokens != b->tokens ? a->tokens < b->tokens : row < than);
}

/* Not more than 5/4 of its share with one more in flight (consistent hashing with bounded loads, Mirrokni 2018). */
static bool within_share(const struct gate_replica *replica, const struct group *group)
{
    uint64_t share = (5 * (group->in_flight + 1) * gate_slots_of(replica) + 4 * group->slots - 1) / (4 * group->slots);
    return replica->in_flight + 1 <= share;
}

bool gate_choice_suits(const struct sluice_gate *gate, const struct gate_choice *choice, uint32_t row)
{
    const struct gate_replica *replica = &gate->replicas[row];
    return replica->row.in_use && replica->service == choice->service && free_places(replica) &&
           rank_of(replica, choice->avoid) == choice->rank && within_share(replica, &choice->group);
}

static struct gate_choice look(const struct sluice_gate *gate, uint32_t service, uint64_t avoid)
{
    struct group groups[RANKS] = {0};
    uint32_t trial = 0;
    uint32_t row = gate->services[service].replicas.first;
    for (; row; row = gate->replicas[row].link.next) {
        const struct gate_replica *replica = &gate->replicas[row];
        if (!counts(replica) || (gate_is_out(replica) && replica->standing == SLUICE_GATE_OUT))
            continue;
        struct group *group = &groups[rank_of(replica, avoid)];
        group->in_flight += replica->in_flight;
        group->slots += gate_slots_of(replica);
        if (gate_is_out(replica) && free_places(replica) && replica->row.id != avoid && !trial)
            trial = row;
        if (free_places(replica) && gate_choice_better(gate, row, group->best))
            group->best = row;
    }
    enum rank rank = RANK_USABLE;
    while (rank < RANK_AVOIDED && !groups[rank].best)
        rank++;
    return (struct gate_choice){
        .avoid = avoid, .service = service, .rank = rank, .group = groups[rank], .trial = trial};
}

uint32_t gate_choose_replica(const struct sluice_gate *gate, const struct gate_ticket *ticket, uint32_t *blocks)
{
    struct gate_choice choice = look(gate, ticket->service, ticket->avoid);
    *blocks = 0;
    if (choice.trial && !ticket->front) /* else it would never be tried where others have less to do */
        return choice.trial;
    if (!choice.group.best || !ticket->prefix_count)
        return choice.group.best;
    uint32_t found = gate_find_prefix(gate, ticket, &choice, blocks);
    return found ? found : choice.group.best;
}

/* ---- what is set and read ---- */

static enum sluice_error check_replica(uint64_t name, uint64_t service, uint32_t slots, enum sluice_gate_state state,
                                       struct sluice_error_text *text)
{
    if (!name || !service)
        return sluice_fail(text, SLUICE_ERROR_INVALID, "replica %" PRIx64 " of service %" PRIx64 ": 0 is no name", name,
                           service);
    if (slots > SLUICE_GATE_MAX_SLOTS || (unsigned)state > SLUICE_GATE_NOT_USABLE)
        return sluice_fail(text, SLUICE_ERROR_RANGE,
                           "replica %" PRIx64 " with %" PRIu32 " slots in state %d: at most %d slots, state 0 to %d",
                           name, slots, (int)state, SLUICE_GATE_MAX_SLOTS, SLUICE_GATE_NOT_USABLE);
    return SLUICE_OK;
}

/* A new replica's row; its service's as well, if that is new. */
static enum sluice_error add_replica(struct sluice_gate *gate, uint64_t name, uint64_t service_id, uint32_t *row,
                                     struct sluice_error_text *text)
{
    uint32_t service = gate_take_service(gate, service_id);
    *row = service ? gate_table_take(gate, &gate->replica_table, 0, name) : 0;
    if (!*row)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY,
                           "replica %" PRIx64 ": %" PRIu32 " services or %" PRIu32
                           " replicas are in use; format a larger gate",
                           name, gate->shape.services, gate->shape.replicas);
    struct gate_replica *replica = &gate->replicas[*row];
    gate_add32(gate, &gate->header->serial, 1);
    gate_put32(gate, &replica->generation, gate->header->serial & 0xffff);
    gate_put32(gate, &replica->service, service);
    gate_put32(gate, &replica->state, SLUICE_GATE_NOT_USABLE); /* it contributes nothing yet */
    gate_add32(gate, &gate->services[service].known, 1);
    gate_list_append(gate, gate_replica_links(gate), &gate->services[service].replicas, *row);
    gate_touch_service(gate, service);
    return SLUICE_OK;
}

static void change_replica(struct sluice_gate *gate, uint32_t row, uint32_t slots, enum sluice_gate_state state,
                           bool removed)
{
    struct gate_replica *replica = &gate->replicas[row];
    gate_contribute(gate, replica, false);
    gate_put32(gate, &replica->slots, slots);
    gate_put32(gate, &replica->state, state);
    gate_put32(gate, &replica->removed, removed);
    gate_contribute(gate, replica, true);
    gate_bound_out(gate, replica->service);
    gate_mark_dirty(gate, replica->service);
}

enum sluice_error sluice_gate_set_replica(struct sluice_gate *gate, uint64_t name, uint64_t service, uint32_t slots,
                                          enum sluice_gate_state state, uint32_t *slot, struct sluice_error_text *text)
{
    enum sluice_error error = check_replica(name, service, slots, state, text);
    if (!error)
        error = gate_lock(gate, text);
    if (error)
        return error;
    uint32_t row = gate_table_find(&gate->replica_table, 0, name);
    if (!row)
        error = add_replica(gate, name, service, &row, text);
    else if (gate->services[gate->replicas[row].service].row.id != service)
        error = sluice_fail(text, SLUICE_ERROR_INVALID,
                            "replica %" PRIx64 " of service %" PRIx64 ": it is of service %" PRIx64, name, service,
                            gate->services[gate->replicas[row].service].row.id);
    if (!error)
        change_replica(gate, row, slots, state, false);
    error = gate_unlock(gate, error, text);
    if (!error && slot)
        *slot = row - 1;
    return error;
}

enum sluice_error sluice_gate_remove_replica(struct sluice_gate *gate, uint64_t name, struct sluice_error_text *text)
{
    enum sluice_error error = gate_lock(gate, text);
    if (error)
        return error;
    uint32_t row = gate_table_find(&gate->replica_table, 0, name);
    if (row) {
        const struct gate_replica *replica = &gate->replicas[row];
        change_replica(gate, row, replica->slots, (enum sluice_gate_state)replica->state, true);
        forget_if_gone(gate, row);
    } else {
        error = sluice_fail(text, SLUICE_ERROR_UNKNOWN, "replica %" PRIx64 " is not known", name);
    }
    return gate_unlock(gate, error, text);
}

struct sluice_gate_replica gate_show_replica(const struct sluice_gate *gate, uint32_t row)
{
    const struct gate_replica *replica = &gate->replicas[row];
    return (struct sluice_gate_replica){
        .name = replica->row.id,
        .service = gate->services[replica->service].row.id,
        .tokens = replica->tokens,
        .slots = replica->slots,
        .in_flight = replica->in_flight,
        .state = (enum sluice_gate_state)replica->state,
        .removed = replica->removed,
        .standing_us = replica->standing_us,
        .standing = (enum sluice_gate_standing)replica->standing,
        .slow_time = replica->slow_kind == 4  ? SLUICE_GATE_TOKEN
                     : replica->slow_kind < 2 ? SLUICE_GATE_FIRST
                                              : SLUICE_GATE_WHOLE,
        .times_slower = replica->standing == SLUICE_GATE_IN ? 0 : 1U << replica->slow_level,
    };
}

enum sluice_error sluice_gate_replicas(struct sluice_gate *gate, uint32_t room, struct sluice_gate_replica *replicas,
                                       uint32_t *count, struct sluice_error_text *text)
{
    uint32_t found = 0;
    enum sluice_error error = gate_lock(gate, text);
    if (error)
        return error;
    for (uint32_t row = 1; row <= gate->header->replicas.fresh; row++) {
        const struct gate_replica *replica = &gate->replicas[row];
        if (!replica->row.in_use)
            continue;
        if (found < room)
            replicas[found] = gate_show_replica(gate, row);
        found++;
    }
    *count = found;
    return gate_unlock(gate, SLUICE_OK, text);
}

enum sluice_error sluice_gate_get_service(struct sluice_gate *gate, uint64_t id, struct sluice_gate_service *figures,
                                          struct sluice_error_text *text)
{
    enum sluice_error error = gate_lock(gate, text);
    if (error)
        return error;
    uint32_t row = gate_table_find(&gate->service_table, 0, id);
    *figures = (struct sluice_gate_service){0};
    if (row) {
        const struct gate_service *service = &gate->services[row];
        uint32_t first = service->arrivals.first;
        *figures = (struct sluice_gate_service){
            .waiting = service->waiting,
            .in_flight = service->in_flight,
            .tokens_waiting = service->tokens_waiting,
            .tokens_in_flight = service->tokens_in_flight,
            .oldest_us = first ? gate->tickets[first].waits_since_us : 0,
            .slots = service->slots,
            .replicas = service->replica_count,
            .usable = service->usables,
            .out = service->out,
        };
    }
    return gate_unlock(gate, SLUICE_OK, text);
}
