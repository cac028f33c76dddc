/* SPDX-License-Identifier: Apache-2.0 */
/* What the gate's tests share: a formatted region in memory that forked children share, short calls, and a random worker. */
#ifndef SLUICE_TESTS_GATE_MEMORY_H
#define SLUICE_TESTS_GATE_MEMORY_H

#include "ledger_region_memory.h"

enum { SERVICE = 500, TENANT = 300, USER = 200, KEY = 100, NONE32 = -1 };
#define NONE UINT64_MAX

static inline struct sluice_gate *open_gate(void *region, size_t size)
{
    struct sluice_gate *gate;
    CHECK_INT(sluice_gate_new(region, size, &gate, NULL), SLUICE_OK);
    return gate;
}

static inline struct sluice_gate *new_gate(struct sluice_gate_shape shape, void **region)
{
    size_t size = sluice_gate_size(&shape);
    CHECK(size > 0);
    *region = shared_memory(size);
    CHECK_INT(sluice_gate_format(*region, size, &shape, NULL), SLUICE_OK);
    return open_gate(*region, size);
}

/* Fails with the audit's own words. */
static inline void audit_gate(struct sluice_gate *gate)
{
    struct sluice_error_text text = {""};
    enum sluice_error error = sluice_gate_audit(gate, &text);
    if (error)
        fprintf(stderr, "audit: %s\n", text.text);
    CHECK_INT(error, SLUICE_OK);
}

static inline uint32_t join(struct sluice_gate *gate, uint32_t pid)
{
    uint32_t worker;
    CHECK_INT(sluice_gate_join(gate, pid, 1, UINT32_MAX, &worker, NULL), SLUICE_OK);
    return worker;
}

static inline void limit(struct sluice_gate *gate, enum sluice_gate_kind kind, uint64_t id,
                         struct sluice_gate_limit terms)
{
    CHECK_INT(sluice_gate_set_limit(gate, kind, id, &terms, NULL), SLUICE_OK);
}

static inline void replica(struct sluice_gate *gate, uint64_t name, uint32_t slots, enum sluice_gate_state state)
{
    CHECK_INT(sluice_gate_set_replica(gate, name, SERVICE, slots, state, NULL, NULL), SLUICE_OK);
}

/* A request of tenant TENANT + n, with what all of them have in common. */
static inline struct sluice_gate_request request_of(uint64_t n, uint64_t tokens)
{
    return (struct sluice_gate_request){.subjects = {KEY + n, USER + n, TENANT + n, SERVICE}, .tokens = tokens};
}

static inline struct sluice_gate_answer ask(struct sluice_gate *gate, uint32_t worker, uint64_t now_us,
                                            struct sluice_gate_request request)
{
    struct sluice_gate_answer answer;
    CHECK_INT(sluice_gate_admit(gate, worker, now_us, &request, &answer, NULL), SLUICE_OK);
    return answer;
}

static inline uint64_t admit(struct sluice_gate *gate, uint32_t worker, uint64_t now_us,
                             struct sluice_gate_request request)
{
    struct sluice_gate_answer answer = ask(gate, worker, now_us, request);
    CHECK(answer.ticket != 0);
    return answer.ticket;
}

static inline uint32_t take_turns(struct sluice_gate *gate, uint32_t worker, uint64_t now_us,
                                  struct sluice_gate_turn *turns, uint32_t room)
{
    uint32_t count;
    CHECK_INT(sluice_gate_turn(gate, worker, now_us, room, turns, &count, NULL), SLUICE_OK);
    return count;
}

/* Exactly one, which is returned. */
static inline struct sluice_gate_turn take_turn(struct sluice_gate *gate, uint32_t worker, uint64_t now_us)
{
    struct sluice_gate_turn turns[2];
    CHECK_INT(take_turns(gate, worker, now_us, turns, 2), 1);
    return turns[0];
}

static inline void settle(struct sluice_gate *gate, uint64_t ticket, uint64_t now_us, uint64_t prompt,
                          uint64_t completion)
{
    CHECK_INT(sluice_gate_settle(gate, ticket, now_us, prompt, completion, NULL, NULL), SLUICE_OK);
}

static inline struct sluice_gate_subject subject(struct sluice_gate *gate, enum sluice_gate_kind kind, uint64_t id,
                                                 uint64_t now_us)
{
    struct sluice_gate_subject figures;
    CHECK_INT(sluice_gate_get_subject(gate, kind, id, now_us, &figures, NULL), SLUICE_OK);
    return figures;
}

static inline struct sluice_gate_service service(struct sluice_gate *gate)
{
    struct sluice_gate_service figures;
    CHECK_INT(sluice_gate_get_service(gate, SERVICE, &figures, NULL), SLUICE_OK);
    return figures;
}

/* ---- a worker that does anything at random ---- */

enum { LIFE_HELD = 16, LIFE_TENANTS = 5, LIFE_REPLICAS = 3 };

struct life {
    struct sluice_gate *gate;
    uint32_t worker;
    uint64_t random, now_us;
    uint64_t held[LIFE_HELD]; /* tickets */
};

static inline void life_forget(struct life *life, uint64_t ticket)
{
    for (int i = 0; i < LIFE_HELD; i++)
        if (life->held[i] == ticket)
            life->held[i] = 0;
}

static inline void life_admit(struct life *life, uint64_t *place)
{
    struct sluice_gate_request request = request_of(next_random(&life->random) % LIFE_TENANTS, 0);
    struct sluice_gate_answer answer;
    request.tokens = next_random(&life->random) % 300;
    request.prompt_tokens = request.tokens / 2;
    request.priority = (uint32_t)(next_random(&life->random) % (SLUICE_GATE_MAX_PRIORITY + 1));
    request.deadline_us = next_random(&life->random) % 2 ? life->now_us + next_random(&life->random) % 5000 : 0;
    request.prefix_count = (uint32_t)(next_random(&life->random) % 4);
    for (uint32_t i = 0; i < request.prefix_count; i++)
        request.prefix[i] = 1 + i + next_random(&life->random) % 3;
    CHECK_INT(sluice_gate_admit(life->gate, life->worker, life->now_us, &request, &answer, NULL), SLUICE_OK);
    *place = answer.ticket;
}

static inline void life_fetch(struct life *life)
{
    struct sluice_gate_turn turns[4];
    uint64_t tickets[4];
    uint32_t count;
    CHECK_INT(sluice_gate_turn(life->gate, life->worker, life->now_us, 4, turns, &count, NULL), SLUICE_OK);
    for (uint32_t i = 0; i < count; i++)
        if (next_random(&life->random) % 8 == 0)
            CHECK_INT(sluice_gate_again(life->gate, turns[i].ticket, life->now_us, turns[i].replica, NONE, NULL),
                      SLUICE_OK);
        else
            CHECK_INT(sluice_gate_progress(life->gate, turns[i].ticket, 0, 1 + next_random(&life->random) % 50, NULL),
                      SLUICE_OK);
    CHECK_INT(sluice_gate_expired(life->gate, life->worker, life->now_us, 4, tickets, &count, NULL, NULL), SLUICE_OK);
    for (uint32_t i = 0; i < count; i++) {
        CHECK_INT(sluice_gate_abandon(life->gate, tickets[i], life->now_us, NULL, NULL), SLUICE_OK);
        life_forget(life, tickets[i]);
    }
}

/* A small step; every ticket that it holds is its own, so nothing may be refused but admissions. */
static inline void live_on(struct life *life)
{
    uint64_t *place = &life->held[next_random(&life->random) % LIFE_HELD];
    life->now_us += next_random(&life->random) % 500;
    uint64_t choice = next_random(&life->random) % 64;
    if (choice == 0) {
        uint64_t name = 1 + next_random(&life->random) % LIFE_REPLICAS;
        replica(life->gate, name, (uint32_t)(next_random(&life->random) % 9),
                (enum sluice_gate_state)(next_random(&life->random) % 3));
    } else if (choice == 1) {
        enum sluice_error error =
            sluice_gate_remove_replica(life->gate, 1 + next_random(&life->random) % LIFE_REPLICAS, NULL);
        CHECK(error == SLUICE_OK || error == SLUICE_ERROR_UNKNOWN);
    } else if (choice == 2) {
        CHECK_INT(sluice_gate_set_weight(life->gate, TENANT + 1, 1 + next_random(&life->random) % 4, NULL), SLUICE_OK);
    } else if (!*place) {
        life_admit(life, place);
    } else if (choice < 32) {
        life_fetch(life);
    } else {
        CHECK_INT(sluice_gate_settle(life->gate, *place, life->now_us, 3, next_random(&life->random) % 200, NULL, NULL),
                  SLUICE_OK);
        *place = 0;
    }
}

/* A gate for such workers: some limits that refuse, some that never do. */
static inline struct sluice_gate *new_busy_gate(uint32_t workers, void **region)
{
    struct sluice_gate *gate = new_gate((struct sluice_gate_shape){.workers = workers,
                                                                   .subjects = 3 * LIFE_TENANTS + 1,
                                                                   .services = 1,
                                                                   .replicas = LIFE_REPLICAS,
                                                                   .tickets = 40,
                                                                   .prefixes = 16},
                                        region);
    for (uint64_t name = 1; name <= LIFE_REPLICAS; name++)
        replica(gate, name, 4, SLUICE_GATE_USABLE);
    limit(gate, SLUICE_GATE_TENANT, TENANT,
          (struct sluice_gate_limit){.requests = NONE, .tokens = NONE, .concurrent = 6, .queued = NONE});
    limit(gate, SLUICE_GATE_USER, USER + 1,
          (struct sluice_gate_limit){.requests = 60000, .tokens = 600000, .concurrent = NONE, .queued = 4});
    limit(gate, SLUICE_GATE_SERVICE, SERVICE,
          (struct sluice_gate_limit){.requests = NONE, .tokens = 9000000, .concurrent = 30, .queued = NONE});
    return gate;
}

#endif
