/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any sequence of calls of the gate: each call is some bytes of the input. After every call everything that is derived
 * must be what the tickets say, no limit may be exceeded by an admission, and in the end nothing may be left.
 */
#include "sluice/core.h"

#include <stdlib.h>
#include <string.h>

static const struct sluice_gate_shape shape = {
    .workers = 2, .subjects = 12, .services = 2, .replicas = 3, .tickets = 12, .prefixes = 16};
enum { TICKETS = 16, MOST_OPEN = 5 };

struct input {
    const uint8_t *data;
    size_t left;
};

static uint32_t take(struct input *input)
{
    if (!input->left)
        return 0;
    input->left--;
    return *input->data++;
}

static void require(bool holds)
{
    if (!holds)
        abort();
}

struct state {
    struct sluice_gate *gate;
    uint32_t workers[2];
    uint64_t now_us;
    uint64_t tickets[TICKETS];
    uint32_t owners[TICKETS]; /* numbers of workers */
};

static void admit(struct state *state, struct input *input)
{
    uint32_t flags = take(input);
    struct sluice_gate_answer answer;
    struct sluice_gate_request request = {
        .subjects = {flags & 3, flags >> 2 & 3, 1 + (flags >> 4 & 3), 1 + (flags >> 6 & 1)},
        .tokens = take(input),
        .priority = take(input) % 9, /* 8 is refused */
        .deadline_us = flags & 1 ? state->now_us + take(input) : 0,
        .needs_replica = flags >> 7,
        .prefix_count = take(input) % 4,
        .prefix = {take(input), take(input), 7},
    };
    enum sluice_error error =
        sluice_gate_admit(state->gate, state->workers[flags >> 3 & 1], state->now_us, &request, &answer, NULL);
    require(error == SLUICE_OK || (error == SLUICE_ERROR_RANGE && request.priority == 8));
    if (error || !answer.ticket)
        return;
    for (int i = 0; i < TICKETS; i++)
        if (!state->tickets[i]) {
            state->tickets[i] = answer.ticket;
            state->owners[i] = flags >> 3 & 1;
            return;
        }
    abort(); /* more tickets than there is room for */
}

static void fetch(struct state *state, struct input *input)
{
    struct sluice_gate_turn turns[3];
    uint64_t expired[3];
    uint32_t count, worker = state->workers[take(input) % 2];
    require(!sluice_gate_turn(state->gate, worker, state->now_us, 3, turns, &count, NULL) && count <= 3);
    for (uint32_t i = 0; i < count; i++)
        require(!sluice_gate_progress(state->gate, turns[i].ticket, 0, take(input), NULL));
    require(!sluice_gate_expired(state->gate, worker, state->now_us, 3, expired, &count, NULL, NULL) && count <= 3);
}

static void set(struct state *state, struct input *input)
{
    uint32_t flags = take(input);
    uint64_t none = UINT64_MAX;
    struct sluice_gate_limit limit = {
        .requests = flags & 1 ? take(input) : none,
        .tokens = flags & 2 ? 10 * take(input) : none,
        .concurrent = flags & 4 ? take(input) % 8 : none,
        .queued = flags & 8 ? take(input) % 4 : none,
        .tokens_burst = take(input),
    };
    enum sluice_error error =
        sluice_gate_set_limit(state->gate, (enum sluice_gate_kind)(flags >> 4 & 1), 1 + (flags >> 5), &limit, NULL);
    require(error == SLUICE_OK || error == SLUICE_ERROR_CAPACITY);
    error = sluice_gate_set_weight(state->gate, 1 + (flags >> 6), 1 + take(input), NULL);
    require(error == SLUICE_OK || error == SLUICE_ERROR_CAPACITY);
}

static void share(struct state *state, struct input *input)
{
    uint32_t flags = take(input);
    enum sluice_gate_kind kind = (enum sluice_gate_kind)(flags >> 4 & 1);
    uint64_t id = 1 + (flags >> 5), none = UINT64_MAX;
    struct sluice_gate_limit limit = {
        .requests = 100, .tokens = 1000, .concurrent = flags & 8 ? 4 : none, .queued = none};
    struct sluice_gate_part part = {take(input), 5 * take(input), take(input) % 8, take(input) % 4};
    struct sluice_gate_kept kept;
    enum sluice_error error = SLUICE_OK;
    switch (flags & 3) {
    case 0:
        error = sluice_gate_share(state->gate, kind, id, &limit, flags >> 2 & 1, NULL);
        require(error == SLUICE_OK || error == SLUICE_ERROR_CAPACITY);
        break;
    case 1:
        error = sluice_gate_give(state->gate, kind, id, state->now_us, &part, NULL);
        require(error == SLUICE_OK || error == SLUICE_ERROR_UNKNOWN);
        break;
    case 2:
        error = sluice_gate_keep(state->gate, kind, id, state->now_us, &part, &kept, NULL);
        require(error == SLUICE_OK || error == SLUICE_ERROR_UNKNOWN);
        if (!error)
            require(kept.part.requests <= part.requests && kept.part.requests >= 0 && kept.tokens_over >= 0);
        break;
    default:
        require(!sluice_gate_parts_until(state->gate, state->now_us + take(input), NULL));
    }
}

static void change_replica(struct state *state, struct input *input)
{
    uint32_t flags = take(input), name = 1 + flags % 5;
    if (flags & 128) {
        (void)sluice_gate_remove_replica(state->gate, name, NULL);
        return;
    }
    (void)sluice_gate_set_replica(state->gate, name, 1 + name % 2, flags >> 3 & 3,
                                  (enum sluice_gate_state)((flags >> 5) % 3), NULL, NULL);
}

/* Times that differ a thousand times, and many samples at once: replicas come out, on trial and in. */
static void took(struct state *state, uint64_t ticket, struct input *input)
{
    uint32_t flags = take(input);
    struct sluice_gate_replica changed;
    struct sluice_gate_took sample = {.us = UINT64_C(1000) << (flags & 31),
                                      .tokens = take(input),
                                      .time = (enum sluice_gate_time)(flags >> 5 & 3),
                                      .so_far = flags >> 7};
    for (uint32_t i = take(input) % 16; i > 0; i--) {
        enum sluice_error error = sluice_gate_took(state->gate, ticket, state->now_us, &sample, &changed, NULL);
        require(error == SLUICE_OK || error == SLUICE_ERROR_UNKNOWN || (error == SLUICE_ERROR_RANGE && flags & 64));
        require(error || !changed.name || changed.standing <= SLUICE_GATE_TRIAL);
    }
}

static void end(struct state *state, struct input *input)
{
    uint32_t choice = take(input);
    if (choice & 32) {
        took(state, state->tickets[choice % TICKETS], input);
        return;
    }
    uint64_t *ticket = &state->tickets[choice % TICKETS];
    enum sluice_error error;
    if (choice & 128) {
        error = sluice_gate_again(state->gate, *ticket, state->now_us, take(input) % 5, take(input) - 1u, NULL);
        require(error == SLUICE_OK || error == SLUICE_ERROR_INVALID || error == SLUICE_ERROR_UNKNOWN);
        return;
    }
    if (choice & 64)
        error = sluice_gate_abandon(state->gate, *ticket, state->now_us, NULL, NULL);
    else
        error = sluice_gate_settle(state->gate, *ticket, state->now_us, take(input), take(input), NULL, NULL);
    require(error == (*ticket ? SLUICE_OK : SLUICE_ERROR_UNKNOWN));
    *ticket = 0;
}

static void reap(struct state *state, uint32_t number)
{
    struct sluice_gate_settled left[TICKETS];
    uint32_t count;
    require(!sluice_gate_left(state->gate, 1 + number, 1, TICKETS, left, &count, NULL) && count <= TICKETS);
    require(!sluice_gate_reap(state->gate, 1 + number, 1, state->now_us, &count, NULL));
    for (int i = 0; i < TICKETS; i++)
        if (state->tickets[i] && state->owners[i] == number) {
            state->tickets[i] = 0;
            count--;
        }
    require(count == 0);
    require(!sluice_gate_join(state->gate, 1 + number, 1, number, &state->workers[number], NULL));
}

static void check(struct state *state)
{
    struct sluice_gate_subject tenant;
    require(!sluice_gate_audit(state->gate, NULL));
    require(!sluice_gate_get_subject(state->gate, SLUICE_GATE_TENANT, 1, state->now_us, &tenant, NULL));
    require(tenant.open <= MOST_OPEN);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static _Alignas(SLUICE_GATE_ALIGNMENT) unsigned char region[1 << 16];
    struct input input = {data, size};
    struct state state = {.now_us = 1000};
    struct sluice_gate_limit limit = {UINT64_MAX, UINT64_MAX, MOST_OPEN, UINT64_MAX, 0, 0};
    require(sluice_gate_size(&shape) <= sizeof region);
    require(!sluice_gate_format(region, sizeof region, &shape, NULL));
    require(!sluice_gate_new(region, sizeof region, &state.gate, NULL));
    require(!sluice_gate_set_limit(state.gate, SLUICE_GATE_TENANT, 1, &limit, NULL));
    for (uint32_t i = 0; i < 2; i++)
        require(!sluice_gate_join(state.gate, 1 + i, 1, i, &state.workers[i], NULL));
    while (input.left) {
        uint32_t choice = take(&input);
        state.now_us += (uint64_t)(choice >> 3) * 1000;
        switch (choice % 8) {
        case 0:
        case 1:
            admit(&state, &input);
            break;
        case 2:
            fetch(&state, &input);
            break;
        case 3:
            set(&state, &input);
            break;
        case 4:
            change_replica(&state, &input);
            break;
        case 5:
            share(&state, &input);
            break;
        case 6:
            end(&state, &input);
            break;
        default:
            reap(&state, choice >> 7);
        }
        check(&state);
    }
    reap(&state, 0);
    reap(&state, 1);
    check(&state);
    for (uint64_t service = 1; service <= 2; service++) {
        struct sluice_gate_service figures;
        require(!sluice_gate_get_service(state.gate, service, &figures, NULL));
        require(!figures.waiting && !figures.in_flight);
    }
    sluice_gate_free(state.gate);
    return 0;
}
