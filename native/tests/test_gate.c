/* SPDX-License-Identifier: Apache-2.0 */
/* The request gate in one process: limits, order, choice of replica, and what each call refuses. */
#include "gate_memory.h"

static const struct sluice_gate_shape shape = {
    .workers = 3, .subjects = 24, .services = 2, .replicas = 5, .tickets = 32, .prefixes = 64};
static const struct sluice_gate_limit unlimited = {NONE, NONE, NONE, NONE, 0, 0};

/* ---- limits ---- */

static void check_refusal(struct sluice_gate_answer answer, enum sluice_gate_reason reason, enum sluice_gate_kind kind,
                          uint64_t most, uint64_t used, uint64_t retry_after_us)
{
    CHECK_INT(answer.ticket, 0);
    CHECK_INT(answer.reason, reason);
    CHECK_INT(answer.kind, kind);
    CHECK_INT(answer.limit, most);
    CHECK_INT(answer.used, used);
    CHECK(answer.retry_after_us == retry_after_us);
}

static void test_requests_a_minute(void)
{
    void *region;
    struct sluice_gate *gate = new_gate(shape, &region);
    uint32_t worker = join(gate, 7);
    struct sluice_gate_limit terms = unlimited;
    terms.requests = 60;
    terms.requests_burst = 2;
    limit(gate, SLUICE_GATE_KEY, KEY, terms);
    settle(gate, admit(gate, worker, 1000, request_of(0, 1)), 1000, 0, 0);
    settle(gate, admit(gate, worker, 1000, request_of(0, 1)), 1000, 0, 0);
    check_refusal(ask(gate, worker, 1000, request_of(0, 1)), SLUICE_GATE_REQUESTS, SLUICE_GATE_KEY, 2, 2, 1000000);
    check_refusal(ask(gate, worker, 1000999, request_of(0, 1)), SLUICE_GATE_REQUESTS, SLUICE_GATE_KEY, 2, 2, 1);
    admit(gate, worker, 1001000, request_of(0, 1));
    check_refusal(ask(gate, worker, 900000, request_of(0, 1)), SLUICE_GATE_REQUESTS, SLUICE_GATE_KEY, 2, 2, 1000000);
    CHECK_INT(subject(gate, SLUICE_GATE_KEY, KEY, 0).refused, 3);
    CHECK_INT(subject(gate, SLUICE_GATE_KEY, KEY, 9000000).requests_left, 2);
    admit(gate, worker, 1001000, request_of(1, 1)); /* another key's request is not concerned */
    terms.requests = 0;
    terms.requests_burst = 0;
    limit(gate, SLUICE_GATE_KEY, KEY, terms);
    check_refusal(ask(gate, worker, 1 << 30, request_of(0, 1)), SLUICE_GATE_REQUESTS, SLUICE_GATE_KEY, 0, 0, NONE);
    limit(gate, SLUICE_GATE_KEY, KEY, unlimited);
    admit(gate, worker, 1 << 30, request_of(0, 1));
    audit_gate(gate);
    sluice_gate_free(gate);
}

static void test_tokens_a_minute(void)
{
    void *region;
    struct sluice_gate *gate = new_gate(shape, &region);
    uint32_t worker = join(gate, 7);
    struct sluice_gate_limit terms = unlimited;
    terms.tokens = 6000; /* one every 10 ms */
    limit(gate, SLUICE_GATE_TENANT, TENANT, terms);
    check_refusal(ask(gate, worker, 0, request_of(0, 6001)), SLUICE_GATE_TOKENS, SLUICE_GATE_TENANT, 6000, 0, NONE);
    uint64_t ticket = admit(gate, worker, 0, request_of(0, 5999));
    check_refusal(ask(gate, worker, 0, request_of(0, 3)), SLUICE_GATE_TOKENS, SLUICE_GATE_TENANT, 6000, 5999, 20000);
    CHECK_INT(subject(gate, SLUICE_GATE_TENANT, TENANT, 0).tokens, 5999);
    settle(gate, ticket, 0, 100, 899); /* 5000 are given back */
    CHECK_INT(subject(gate, SLUICE_GATE_TENANT, TENANT, 0).tokens_left, 5001);
    CHECK_INT(subject(gate, SLUICE_GATE_TENANT, TENANT, 0).tokens, 0);
    ticket = admit(gate, worker, 0, request_of(0, 5001));
    settle(gate, ticket, 0, 5001, 7000); /* a debt of 7000 */
    CHECK_INT(subject(gate, SLUICE_GATE_TENANT, TENANT, 0).tokens_left, -7000);
    check_refusal(ask(gate, worker, 0, request_of(0, 1)), SLUICE_GATE_TOKENS, SLUICE_GATE_TENANT, 6000, 13000,
                  70010000);
    admit(gate, worker, 70010000, request_of(0, 1));
    /* What was admitted before there was a limit is not given back to it. */
    struct sluice_gate_request other = request_of(1, 4000);
    ticket = admit(gate, worker, 70010000, other);
    limit(gate, SLUICE_GATE_KEY, KEY + 1, terms);
    uint64_t second = admit(gate, worker, 70010000, other);
    settle(gate, ticket, 70010000, 0, 0);
    CHECK_INT(subject(gate, SLUICE_GATE_KEY, KEY + 1, 70010000).tokens_left, 2000);
    settle(gate, second, 70010000, 1000, 0);
    CHECK_INT(subject(gate, SLUICE_GATE_KEY, KEY + 1, 70010000).tokens_left, 5000);
    audit_gate(gate);
    sluice_gate_free(gate);
}

/* Whatever refuses for a time: one microsecond earlier it still does, then it does not. */
static void test_retry_after_is_true(void)
{
    void *region;
    struct sluice_gate *gate = new_gate(shape, &region);
    uint32_t worker = join(gate, 7);
    uint64_t random = 0x9e3779b97f4a7c15u, now_us = 0, refusals = 0;
    for (int round = 0; round < 3000; round++) {
        now_us += next_random(&random) % 2000000;
        struct sluice_gate_limit terms = unlimited;
        terms.requests = 1 + next_random(&random) % 100;
        terms.tokens = 1 + next_random(&random) % 10000;
        terms.requests_burst = 1 + next_random(&random) % 5;
        terms.tokens_burst = 100 + next_random(&random) % 1000;
        uint32_t kind = (uint32_t)(next_random(&random) % SLUICE_GATE_KINDS);
        struct sluice_gate_request request = request_of(0, next_random(&random) % 100);
        limit(gate, (enum sluice_gate_kind)kind, request.subjects[kind], terms);
        struct sluice_gate_answer answer = ask(gate, worker, now_us, request);
        if (!answer.ticket) {
            refusals++;
            CHECK(answer.retry_after_us > 0 && answer.retry_after_us < NONE);
            now_us += answer.retry_after_us - 1;
            CHECK_INT(ask(gate, worker, now_us, request).ticket, 0);
            answer.ticket = admit(gate, worker, ++now_us, request);
        }
        settle(gate, answer.ticket, now_us, next_random(&random) % 300, 0);
    }
    CHECK(refusals > 300);
    audit_gate(gate);
    sluice_gate_free(gate);
}

static void test_counts(void)
{
    void *region;
    struct sluice_gate *gate = new_gate(shape, &region);
    uint32_t worker = join(gate, 7);
    struct sluice_gate_limit terms = unlimited;
    terms.concurrent = 2;
    limit(gate, SLUICE_GATE_USER, USER, terms);
    uint64_t first = admit(gate, worker, 0, request_of(0, 5));
    admit(gate, worker, 0, request_of(0, 5));
    check_refusal(ask(gate, worker, 0, request_of(0, 5)), SLUICE_GATE_CONCURRENT, SLUICE_GATE_USER, 2, 2, 0);
    settle(gate, first, 0, 0, 0);
    admit(gate, worker, 0, request_of(0, 5));
    /* Of two refusals the one that nothing can help, then the one without a time, then the longest. */
    struct sluice_gate_limit slow = unlimited;
    slow.tokens = 10;
    limit(gate, SLUICE_GATE_TENANT, TENANT, slow);
    check_refusal(ask(gate, worker, 0, request_of(0, 11)), SLUICE_GATE_TOKENS, SLUICE_GATE_TENANT, 10, 0, NONE);
    check_refusal(ask(gate, worker, 0, request_of(0, 5)), SLUICE_GATE_CONCURRENT, SLUICE_GATE_USER, 2, 2, 0);
    /* A queue: who finds a free place does not wait. */
    terms = unlimited;
    terms.queued = 1;
    limit(gate, SLUICE_GATE_SERVICE, SERVICE, terms);
    check_refusal(ask(gate, worker, 0, request_of(2, 5)), SLUICE_GATE_QUEUED, SLUICE_GATE_SERVICE, 1, 2, 0);
    replica(gate, 1, 3, SLUICE_GATE_USABLE);
    admit(gate, worker, 0, request_of(2, 5));
    check_refusal(ask(gate, worker, 0, request_of(2, 5)), SLUICE_GATE_QUEUED, SLUICE_GATE_SERVICE, 1, 3, 0);
    struct sluice_gate_turn turns[4];
    CHECK_INT(take_turns(gate, worker, 0, turns, 4), 3);
    admit(gate, worker, 0, request_of(2, 5));
    check_refusal(ask(gate, worker, 0, request_of(2, 5)), SLUICE_GATE_QUEUED, SLUICE_GATE_SERVICE, 1, 1, 0);
    audit_gate(gate);
    sluice_gate_free(gate);
}

static void test_room(void)
{
    void *region;
    struct sluice_gate_shape small = {1, 8, 1, 1, 2, 1};
    struct sluice_gate *gate = new_gate(small, &region);
    uint32_t worker = join(gate, 7);
    struct sluice_gate_request request = request_of(0, 5);
    request.needs_replica = 1;
    check_refusal(ask(gate, worker, 0, request), SLUICE_GATE_NO_REPLICAS, SLUICE_GATE_SERVICE, 0, 0, 0);
    /* Subjects without tickets make room for others: eight rows serve any number of keys. */
    for (uint64_t n = 0; n < 50; n++)
        settle(gate, admit(gate, worker, 0, request_of(n, 5)), 0, 0, 0);
    uint64_t first = admit(gate, worker, 0, request_of(50, 5));
    uint64_t second = admit(gate, worker, 0, request_of(51, 5));
    check_refusal(ask(gate, worker, 0, request_of(51, 5)), SLUICE_GATE_FULL, SLUICE_GATE_SERVICE, 2, 2, 0);
    settle(gate, first, 0, 0, 0);
    /* Limited ones stay: with six of them and a ticket's four there is no room for four others. */
    for (uint64_t n = 0; n < 4; n++)
        limit(gate, SLUICE_GATE_KEY, n + 1, (struct sluice_gate_limit){1, 1, 1, 1, 0, 0});
    CHECK_INT(sluice_gate_set_limit(gate, SLUICE_GATE_KEY, 9, &(struct sluice_gate_limit){1, 1, 1, 1, 0, 0}, NULL),
              SLUICE_ERROR_CAPACITY);
    CHECK_INT(sluice_gate_set_limit(gate, SLUICE_GATE_KEY, 9, &unlimited, NULL), SLUICE_OK);
    check_refusal(ask(gate, worker, 0, request_of(52, 5)), SLUICE_GATE_FULL, SLUICE_GATE_SERVICE, 0, 0, 0);
    audit_gate(gate);
    settle(gate, second, 0, 0, 0);
    request = request_of(52, 5);
    request.subjects[SLUICE_GATE_SERVICE] = SERVICE + 1; /* the only row of a service is free again */
    request.subjects[SLUICE_GATE_KEY] = request.subjects[SLUICE_GATE_USER] = 0;
    settle(gate, admit(gate, worker, 0, request), 0, 0, 0);
    CHECK_INT(sluice_gate_set_replica(gate, 1, SERVICE, 1, SLUICE_GATE_USABLE, NULL, NULL), SLUICE_OK);
    CHECK_INT(sluice_gate_set_replica(gate, 2, SERVICE, 1, SLUICE_GATE_USABLE, NULL, NULL), SLUICE_ERROR_CAPACITY);
    check_refusal(ask(gate, worker, 0, request), SLUICE_GATE_FULL, SLUICE_GATE_SERVICE, 0, 0, 0);
    audit_gate(gate);
    sluice_gate_free(gate);
}

/* ---- order ---- */

/* The tenant, from 0, whose ticket gets the only place next. */
static uint64_t next_tenant(struct sluice_gate *gate, uint32_t worker, uint64_t used)
{
    struct sluice_gate_settled settled;
    struct sluice_gate_turn turn = take_turn(gate, worker, 0);
    CHECK_INT(sluice_gate_settle(gate, turn.ticket, 0, used, 0, &settled, NULL), SLUICE_OK);
    return settled.subjects[SLUICE_GATE_TENANT] - TENANT;
}

static void test_shares(void)
{
    void *region;
    struct sluice_gate *gate = new_gate(shape, &region);
    uint32_t worker = join(gate, 7);
    uint64_t turns[3] = {0};
    CHECK_INT(sluice_gate_set_weight(gate, TENANT + 1, 3, NULL), SLUICE_OK);
    for (int i = 0; i < 5; i++)
        for (uint64_t n = 0; n < 3; n++)
            admit(gate, worker, 0, request_of(n, n == 2 ? 1000 : 100)); /* tenant 2 reserves ten times what it uses */
    replica(gate, 1, 1, SLUICE_GATE_USABLE);
    for (int i = 0; i < 1000; i++) {
        uint64_t n = next_tenant(gate, worker, 100);
        turns[n]++;
        admit(gate, worker, 0, request_of(n, n == 2 ? 1000 : 100));
    }
    CHECK(turns[1] >= 595 && turns[1] <= 605); /* of weights 1, 3, 1 */
    CHECK(turns[0] >= 195 && turns[0] <= 205);
    CHECK(turns[2] >= 195 && turns[2] <= 205);
    audit_gate(gate);
    sluice_gate_free(gate);
}

/* Who was idle gets its share from now on, not what it left to others. */
static void test_nothing_is_saved_up(void)
{
    void *region;
    struct sluice_gate *gate = new_gate(shape, &region);
    uint32_t worker = join(gate, 7);
    uint64_t turns[2] = {0};
    replica(gate, 1, 1, SLUICE_GATE_USABLE);
    settle(gate, admit(gate, worker, 0, request_of(1, 100)), 0, 0, 0);
    for (int i = 0; i < 50; i++) {
        admit(gate, worker, 0, request_of(0, 100));
        CHECK_INT(next_tenant(gate, worker, 100), 0);
    }
    for (int i = 0; i < 10; i++)
        for (uint64_t n = 0; n < 2; n++)
            admit(gate, worker, 0, request_of(n, 100));
    for (int i = 0; i < 10; i++)
        turns[next_tenant(gate, worker, 100)]++;
    CHECK(turns[0] >= 4 && turns[0] <= 6);
    sluice_gate_free(gate);
}

static void test_priority_is_a_bounded_lead(void)
{
    void *region;
    struct sluice_gate *gate = new_gate(shape, &region);
    uint32_t worker = join(gate, 7);
    struct sluice_gate_request high = request_of(1, SLUICE_GATE_PRIORITY_TOKENS / 2), low = request_of(0, high.tokens);
    high.priority = 2;
    for (int i = 0; i < 10; i++) {
        admit(gate, worker, 0, low);
        admit(gate, worker, 0, high);
    }
    replica(gate, 1, 1, SLUICE_GATE_USABLE);
    for (int i = 0; i < 4; i++) /* two steps of lead are four of its tickets */
        CHECK_INT(next_tenant(gate, worker, high.tokens), 1);
    uint64_t turns[2] = {0};
    for (int i = 0; i < 12; i++)
        turns[next_tenant(gate, worker, high.tokens)]++;
    CHECK_INT(turns[0], 6);
    sluice_gate_free(gate);
}

static void test_order_within_a_tenant(void)
{
    void *region;
    struct sluice_gate *gate = new_gate(shape, &region);
    uint32_t worker = join(gate, 7);
    struct sluice_gate_request request = request_of(0, 10);
    const uint64_t deadlines[] = {0, 900, 800, 900, 0};
    const uint32_t priorities[] = {0, 0, 0, 1, 1};
    const int expected[] = {3, 4, 2, 1, 0};
    uint64_t tickets[5];
    for (int i = 0; i < 5; i++) {
        request.deadline_us = deadlines[i];
        request.priority = priorities[i];
        tickets[i] = admit(gate, worker, (uint64_t)i, request);
    }
    CHECK_INT(service(gate).oldest_us, 0);
    CHECK_INT(service(gate).waiting, 5);
    replica(gate, 1, 1, SLUICE_GATE_USABLE);
    struct sluice_gate_turn turn = take_turn(gate, worker, 10);
    CHECK_INT(turn.ticket, tickets[expected[0]]);
    /* It loses its replica: before all others, even if they are more urgent. */
    request.priority = 7;
    uint64_t urgent = admit(gate, worker, 11, request);
    CHECK_INT(sluice_gate_again(gate, turn.ticket, 12, 1, 0, NULL), SLUICE_OK);
    CHECK_INT(sluice_gate_again(gate, turn.ticket, 12, 1, 0, NULL), SLUICE_ERROR_INVALID);
    CHECK_INT(take_turn(gate, worker, 13).ticket, tickets[expected[0]]);
    settle(gate, tickets[expected[0]], 14, 1, 1);
    CHECK_INT(take_turn(gate, worker, 15).ticket, urgent);
    settle(gate, urgent, 16, 1, 1);
    for (int i = 1; i < 5; i++) {
        CHECK_INT(take_turn(gate, worker, 20).ticket, tickets[expected[i]]);
        settle(gate, tickets[expected[i]], 20, 1, 1);
    }
    CHECK_INT(service(gate).waiting + service(gate).in_flight, 0);
    audit_gate(gate);
    sluice_gate_free(gate);
}

static void test_deadlines(void)
{
    void *region;
    struct sluice_gate *gate = new_gate(shape, &region);
    uint32_t first = join(gate, 7), second = join(gate, 8), count;
    uint64_t expired[4], next_us;
    struct sluice_gate_request request = request_of(0, 10);
    request.deadline_us = 100;
    uint64_t a = admit(gate, first, 0, request);
    request.deadline_us = 200;
    uint64_t b = admit(gate, second, 0, request);
    CHECK_INT(sluice_gate_expired(gate, first, 99, 4, expired, &count, &next_us, NULL), SLUICE_OK);
    CHECK(count == 0 && next_us == 100);
    CHECK_INT(sluice_gate_wakes(gate), 0);
    CHECK_INT(sluice_gate_expired(gate, second, 100, 4, expired, &count, &next_us, NULL), SLUICE_OK);
    CHECK(count == 0 && next_us == 200);
    CHECK_INT(sluice_gate_wakes(gate), 1); /* it is to be reported to the first worker */
    replica(gate, 1, 4, SLUICE_GATE_USABLE);
    struct sluice_gate_turn turns[2];
    CHECK_INT(take_turns(gate, first, 200, turns, 2), 0); /* neither gets a turn: the second has expired, too */
    CHECK_INT(sluice_gate_wakes(gate), 3);
    CHECK_INT(sluice_gate_expired(gate, first, 200, 4, expired, &count, &next_us, NULL), SLUICE_OK);
    CHECK(count == 1 && expired[0] == a && next_us == 0);
    CHECK_INT(sluice_gate_expired(gate, first, 200, 4, expired, &count, NULL, NULL), SLUICE_OK);
    CHECK_INT(count, 0);
    CHECK_INT(sluice_gate_wakes(gate), 2);
    CHECK_INT(sluice_gate_again(gate, a, 200, 0, 0, NULL), SLUICE_ERROR_INVALID);
    audit_gate(gate);
    CHECK_INT(sluice_gate_abandon(gate, a, 200, NULL, NULL), SLUICE_OK);
    CHECK_INT(sluice_gate_abandon(gate, b, 200, NULL, NULL), SLUICE_OK); /* before it was reported */
    CHECK_INT(sluice_gate_wakes(gate), 0);
    CHECK_INT(subject(gate, SLUICE_GATE_SERVICE, SERVICE, 200).open, 0);
    audit_gate(gate);
    sluice_gate_free(gate);
}

/* ---- replicas ---- */

static uint64_t replica_for(struct sluice_gate *gate, uint32_t worker, struct sluice_gate_request request,
                            uint32_t blocks)
{
    uint64_t ticket = admit(gate, worker, 0, request);
    struct sluice_gate_turn turn = take_turn(gate, worker, 0);
    CHECK_INT(turn.ticket, ticket);
    CHECK_INT(turn.prefix_blocks, blocks);
    return turn.replica;
}

static void test_least_tokens_and_states(void)
{
    void *region;
    struct sluice_gate_turn turns[2];
    struct sluice_gate *gate = new_gate(shape, &region);
    uint32_t worker = join(gate, 7);
    replica(gate, 11, 2, SLUICE_GATE_USABLE);
    replica(gate, 12, 3, SLUICE_GATE_USABLE);
    replica(gate, 13, 9, SLUICE_GATE_LAST);
    replica(gate, 14, 9, SLUICE_GATE_NOT_USABLE);
    CHECK_INT(replica_for(gate, worker, request_of(0, 100), 0), 11);
    CHECK_INT(replica_for(gate, worker, request_of(0, 30), 0), 12);
    CHECK_INT(replica_for(gate, worker, request_of(0, 30), 0), 12);
    CHECK_INT(replica_for(gate, worker, request_of(0, 50), 0), 12);
    CHECK_INT(replica_for(gate, worker, request_of(0, 50), 0), 11); /* 12 is full */
    CHECK_INT(replica_for(gate, worker, request_of(0, 1), 0), 13);  /* and then the last ones */
    CHECK_INT(service(gate).slots, 14);
    CHECK(service(gate).replicas == 3 && service(gate).usable == 2);
    replica(gate, 13, 1, SLUICE_GATE_LAST);
    uint64_t ticket = admit(gate, worker, 0, request_of(0, 1));
    CHECK_INT(take_turns(gate, worker, 0, turns, 2), 0); /* never more than its slots */
    replica(gate, 14, 1, SLUICE_GATE_USABLE);
    CHECK_INT(take_turn(gate, worker, 0).replica, 14);
    /* The replica that it lost is a last resort. */
    replica(gate, 13, 2, SLUICE_GATE_LAST);
    CHECK_INT(sluice_gate_again(gate, ticket, 0, 14, NONE, NULL), SLUICE_OK);
    CHECK_INT(take_turn(gate, worker, 0).replica, 13);
    CHECK_INT(sluice_gate_again(gate, ticket, 0, 14, NONE, NULL), SLUICE_OK);
    replica(gate, 13, 0, SLUICE_GATE_LAST);
    CHECK_INT(take_turn(gate, worker, 0).replica, 14);
    audit_gate(gate);
    sluice_gate_free(gate);
}

static void test_prefixes(void)
{
    void *region;
    struct sluice_gate *gate = new_gate(shape, &region);
    uint32_t worker = join(gate, 7);
    struct sluice_gate_request first = request_of(0, 10), second = first, third = first;
    first.prefix_count = 3;
    second.prefix_count = 2;
    third.prefix_count = 4;
    for (uint64_t i = 0; i < 4; i++) {
        first.prefix[i] = 1 + i;
        second.prefix[i] = i ? 100 + i : 1; /* shares one block */
        third.prefix[i] = 1 + i;
    }
    replica(gate, 11, 8, SLUICE_GATE_USABLE);
    replica(gate, 12, 8, SLUICE_GATE_USABLE);
    CHECK_INT(replica_for(gate, worker, first, 0), 11);
    CHECK_INT(replica_for(gate, worker, request_of(0, 500), 0), 12);
    CHECK_INT(replica_for(gate, worker, request_of(0, 500), 0), 11);
    CHECK_INT(replica_for(gate, worker, request_of(0, 10), 0), 12);
    CHECK_INT(replica_for(gate, worker, third, 3), 11); /* although 12 has the same load or less */
    CHECK_INT(replica_for(gate, worker, second, 1), 11);
    CHECK_INT(replica_for(gate, worker, third, 4), 11);
    /* 5 and 2 in flight: a sixth would be more than 5/4 of its share of 8, rounded up, so load decides. */
    CHECK_INT(replica_for(gate, worker, third, 0), 12);
    CHECK_INT(replica_for(gate, worker, third, 4), 12); /* now both have it, and 12 has fewer tokens */
    /* Forgotten with its replica, and after ten minutes. */
    CHECK_INT(sluice_gate_remove_replica(gate, 12, NULL), SLUICE_OK);
    CHECK_INT(replica_for(gate, worker, third, 4), 11);
    uint64_t later = 601 * UINT64_C(1000000);
    admit(gate, worker, later, third);
    CHECK_INT(take_turn(gate, worker, later).prefix_blocks, 0);
    audit_gate(gate);
    sluice_gate_free(gate);
}

static void test_replicas_come_and_go(void)
{
    void *region;
    struct sluice_gate *gate = new_gate(shape, &region);
    uint32_t worker = join(gate, 7), count, slot = 9;
    struct sluice_gate_replica known[5];
    CHECK_INT(sluice_gate_remove_replica(gate, 11, NULL), SLUICE_ERROR_UNKNOWN);
    CHECK_INT(sluice_gate_set_replica(gate, 11, SERVICE, 1, SLUICE_GATE_USABLE, &slot, NULL), SLUICE_OK);
    CHECK_INT(slot, 0);
    CHECK_INT(sluice_gate_set_replica(gate, 11, SERVICE + 1, 1, SLUICE_GATE_USABLE, NULL, NULL), SLUICE_ERROR_INVALID);
    CHECK_INT(sluice_gate_set_replica(gate, 0, SERVICE, 1, SLUICE_GATE_USABLE, NULL, NULL), SLUICE_ERROR_INVALID);
    CHECK_INT(sluice_gate_set_replica(gate, 1, SERVICE, 65536, SLUICE_GATE_USABLE, NULL, NULL), SLUICE_ERROR_RANGE);
    uint64_t ticket = admit(gate, worker, 0, request_of(0, 7));
    CHECK_INT(take_turn(gate, worker, 0).slot, 0);
    CHECK_INT(sluice_gate_remove_replica(gate, 11, NULL), SLUICE_OK);
    CHECK_INT(sluice_gate_replicas(gate, 5, known, &count, NULL), SLUICE_OK);
    CHECK_INT(count, 1);
    CHECK(known[0].removed && known[0].in_flight == 1 && known[0].tokens == 7 && known[0].name == 11);
    CHECK_INT(service(gate).slots, 0);
    audit_gate(gate);
    settle(gate, ticket, 0, 1, 1);
    CHECK_INT(sluice_gate_replicas(gate, 5, known, &count, NULL), SLUICE_OK);
    CHECK_INT(count, 0);
    audit_gate(gate);
    sluice_gate_free(gate);
}

/* ---- workers ---- */

static void test_workers(void)
{
    void *region;
    struct sluice_gate *gate = new_gate(shape, &region);
    uint32_t worker, count;
    struct sluice_gate_worker workers[3];
    CHECK_INT(sluice_gate_join(gate, 0, 1, UINT32_MAX, &worker, NULL), SLUICE_ERROR_RANGE);
    CHECK_INT(sluice_gate_join(gate, 5, 1, 3, &worker, NULL), SLUICE_ERROR_RANGE);
    CHECK_INT(sluice_gate_join(gate, 5, 1, 2, &worker, NULL), SLUICE_OK);
    CHECK_INT(worker % SLUICE_GATE_MAX_WORKERS, 2);
    CHECK_INT(sluice_gate_join(gate, 5, 1, 1, &worker, NULL), SLUICE_ERROR_DUPLICATE);
    CHECK_INT(sluice_gate_join(gate, 6, 1, 2, &worker, NULL), SLUICE_ERROR_BUSY);
    CHECK_INT(sluice_gate_join(gate, 5, 2, UINT32_MAX, &worker, NULL), SLUICE_OK);
    CHECK_INT(sluice_gate_join(gate, 6, 1, UINT32_MAX, &worker, NULL), SLUICE_OK);
    CHECK_INT(sluice_gate_join(gate, 7, 1, UINT32_MAX, &worker, NULL), SLUICE_ERROR_CAPACITY);
    CHECK_INT(sluice_gate_workers(gate, 1, workers, &count, NULL), SLUICE_OK);
    CHECK(count == 3 && workers[0].pid == 5 && workers[0].start == 2);
    uint32_t ended = 9;
    CHECK_INT(sluice_gate_reap(gate, 6, 2, 0, &ended, NULL), SLUICE_OK); /* not the one that is there */
    CHECK_INT(ended, 0);
    CHECK_INT(sluice_gate_reap(gate, 6, 1, 0, &ended, NULL), SLUICE_OK);
    uint32_t next = join(gate, 6);
    CHECK(next != worker && next % SLUICE_GATE_MAX_WORKERS == worker % SLUICE_GATE_MAX_WORKERS);
    struct sluice_gate_turn turn;
    CHECK_INT(sluice_gate_turn(gate, worker, 0, 1, &turn, &count, NULL), SLUICE_ERROR_UNKNOWN);
    audit_gate(gate);
    sluice_gate_free(gate);
}

static void test_what_a_dead_worker_leaves(void)
{
    void *region;
    struct sluice_gate *gate = new_gate(shape, &region);
    uint32_t worker = join(gate, 7), other = join(gate, 8), count, ended;
    struct sluice_gate_limit terms = unlimited;
    struct sluice_gate_settled left[4];
    struct sluice_gate_turn turns[2];
    terms.tokens = 1000;
    limit(gate, SLUICE_GATE_TENANT, TENANT, terms);
    replica(gate, 11, 2, SLUICE_GATE_USABLE);
    struct sluice_gate_request request = request_of(0, 100);
    request.prompt_tokens = 40;
    request.tag[0] = 5;
    request.tag[1] = 6;
    uint64_t streaming = admit(gate, worker, 1, request);
    admit(gate, worker, 2, request);
    admit(gate, worker, 3, request);
    uint64_t waiting = admit(gate, other, 4, request);
    CHECK_INT(take_turns(gate, worker, 5, turns, 1), 1);
    CHECK_INT(sluice_gate_progress(gate, streaming, 0, 17, NULL), SLUICE_OK);
    CHECK_INT(sluice_gate_left(gate, 7, 1, 1, left, &count, NULL), SLUICE_OK);
    CHECK_INT(count, 2); /* two had a replica, one of them without knowing */
    CHECK_INT(sluice_gate_left(gate, 7, 1, 4, left, &count, NULL), SLUICE_OK);
    CHECK(left[0].ticket == streaming && left[0].prompt_tokens == 40 && left[0].completion_tokens == 17);
    CHECK(left[0].tag[0] == 5 && left[0].tag[1] == 6 && left[0].replica == 11 && left[0].granted_us == 5);
    CHECK(left[0].subjects[SLUICE_GATE_KEY] == KEY && left[0].reserved == 100 && left[0].admitted_us == 1);
    CHECK(left[1].prompt_tokens == 0 && left[1].completion_tokens == 0);
    CHECK_INT(sluice_gate_reap(gate, 7, 1, 5, &ended, NULL), SLUICE_OK);
    CHECK_INT(ended, 3);
    CHECK_INT(subject(gate, SLUICE_GATE_TENANT, TENANT, 5).tokens_left, 1000 - 57 - 100);
    CHECK_INT(sluice_gate_left(gate, 7, 1, 4, left, &count, NULL), SLUICE_OK);
    CHECK_INT(count, 0);
    CHECK_INT(take_turn(gate, other, 6).ticket, waiting);
    CHECK_INT(sluice_gate_progress(gate, streaming + (UINT64_C(2) << 32), 0, 1, NULL), SLUICE_ERROR_UNKNOWN);
    CHECK_INT(sluice_gate_settle(gate, streaming, 6, 0, 0, NULL, NULL), SLUICE_ERROR_UNKNOWN);
    CHECK_INT(sluice_gate_progress(gate, streaming, 0, 1, NULL), SLUICE_ERROR_UNKNOWN);
    CHECK_INT(sluice_gate_settle(gate, waiting, 6, UINT64_C(1) << 31, 0, NULL, NULL), SLUICE_ERROR_RANGE);
    audit_gate(gate);
    sluice_gate_free(gate);
}

/* A turn of another worker's ticket is announced until that worker has fetched it. */
static void test_wakes(void)
{
    void *region;
    struct sluice_gate *gate = new_gate(shape, &region);
    uint32_t first = join(gate, 7), second = join(gate, 8);
    struct sluice_gate_turn turns[4];
    admit(gate, second, 0, request_of(0, 5));
    admit(gate, second, 0, request_of(0, 5));
    replica(gate, 11, 2, SLUICE_GATE_USABLE);
    CHECK_INT(take_turns(gate, first, 0, turns, 4), 0);
    CHECK_INT(sluice_gate_wakes(gate), 2);
    CHECK_INT(sluice_gate_wakes(gate), 2);
    CHECK_INT(take_turns(gate, second, 0, turns, 1), 1);
    CHECK_INT(sluice_gate_wakes(gate), 2);
    CHECK_INT(take_turns(gate, second, 0, turns, 4), 1);
    CHECK_INT(sluice_gate_wakes(gate), 0);
    CHECK_INT(take_turns(gate, second, 0, turns, 4), 0);
    audit_gate(gate);
    sluice_gate_free(gate);
}

/* ---- arguments and regions ---- */

static void test_arguments(void)
{
    void *region;
    struct sluice_error_text text;
    struct sluice_gate *gate = new_gate(shape, &region);
    uint32_t worker = join(gate, 7);
    struct sluice_gate_answer answer;
    struct sluice_gate_request request = request_of(0, UINT64_C(1) << 31);
    CHECK_INT(sluice_gate_admit(gate, worker, 0, &request, &answer, &text), SLUICE_ERROR_RANGE);
    CHECK_STR(text.text, "request of 2147483648 tokens, 0 of them its prompt's: at most 2147483647");
    request = request_of(0, 1);
    request.priority = 8;
    CHECK_INT(sluice_gate_admit(gate, worker, 0, &request, &answer, NULL), SLUICE_ERROR_RANGE);
    request = request_of(0, 1);
    request.prefix_count = SLUICE_GATE_MAX_PREFIX + 1;
    CHECK_INT(sluice_gate_admit(gate, worker, 0, &request, &answer, NULL), SLUICE_ERROR_RANGE);
    request = request_of(0, 1);
    request.subjects[SLUICE_GATE_TENANT] = 0;
    CHECK_INT(sluice_gate_admit(gate, worker, 0, &request, &answer, NULL), SLUICE_ERROR_INVALID);
    request = request_of(0, 1);
    CHECK_INT(sluice_gate_admit(gate, worker + 1, 0, &request, &answer, NULL), SLUICE_ERROR_UNKNOWN);
    struct sluice_gate_limit terms = unlimited;
    terms.queued = UINT64_C(1) << 31;
    CHECK_INT(sluice_gate_set_limit(gate, SLUICE_GATE_KEY, KEY, &terms, NULL), SLUICE_ERROR_RANGE);
    CHECK_INT(sluice_gate_set_limit(gate, (enum sluice_gate_kind)4, KEY, &unlimited, NULL), SLUICE_ERROR_RANGE);
    CHECK_INT(sluice_gate_set_limit(gate, SLUICE_GATE_KEY, 0, &unlimited, NULL), SLUICE_ERROR_INVALID);
    CHECK_INT(sluice_gate_set_weight(gate, TENANT, 0, NULL), SLUICE_ERROR_RANGE);
    CHECK_INT(sluice_gate_set_weight(gate, TENANT, 65537, NULL), SLUICE_ERROR_RANGE);
    CHECK_INT(sluice_gate_set_weight(gate, 0, 1, NULL), SLUICE_ERROR_INVALID);
    CHECK_INT(subject(gate, SLUICE_GATE_KEY, 999, 0).requests_left, INT64_MAX);
    audit_gate(gate);
    sluice_gate_free(gate);
}

static void test_regions(void)
{
    struct sluice_gate *gate;
    struct sluice_gate_shape bad = shape, read;
    size_t size = sluice_gate_size(&shape);
    char *region = shared_memory(size + 64);
    bad.workers = 65;
    CHECK_INT(sluice_gate_size(&bad), 0);
    CHECK_INT(sluice_gate_format(region, size, &bad, NULL), SLUICE_ERROR_RANGE);
    CHECK_INT(sluice_gate_format(region, size - 1, &shape, NULL), SLUICE_ERROR_CAPACITY);
    CHECK_INT(sluice_gate_format(region + 8, size, &shape, NULL), SLUICE_ERROR_INVALID);
    CHECK_INT(sluice_gate_new(region, size, &gate, NULL), SLUICE_ERROR_CORRUPT);
    CHECK_INT(sluice_gate_format(region, size, &shape, NULL), SLUICE_OK);
    CHECK_INT(sluice_gate_new(region, size - 1, &gate, NULL), SLUICE_ERROR_CORRUPT);
    CHECK_INT(sluice_gate_new(region, size, &gate, NULL), SLUICE_OK);
    sluice_gate_get_shape(gate, &read);
    CHECK(!memcmp(&read, &shape, sizeof shape));
    sluice_gate_free(gate);
    region[8]++; /* the version */
    CHECK_INT(sluice_gate_new(region, size, &gate, NULL), SLUICE_ERROR_VERSION);
    sluice_gate_free(NULL);
}

/* A worker that does anything at random: the sums hold after each call, and in the end nothing is left. */
static void test_random_life(void)
{
    void *region;
    struct sluice_gate *gate = new_busy_gate(2, &region);
    struct life lives[2] = {{.gate = gate, .worker = join(gate, 7), .random = 3},
                            {.gate = gate, .worker = join(gate, 8), .random = 4}};
    for (int i = 0; i < 20000; i++) {
        live_on(&lives[i % 2]);
        audit_gate(gate);
    }
    CHECK_INT(sluice_gate_reap(gate, 7, 1, 0, NULL, NULL), SLUICE_OK);
    audit_gate(gate);
    CHECK_INT(sluice_gate_reap(gate, 8, 1, 0, NULL, NULL), SLUICE_OK);
    audit_gate(gate);
    CHECK_INT(service(gate).waiting + service(gate).in_flight, 0);
    CHECK_INT(subject(gate, SLUICE_GATE_SERVICE, SERVICE, 0).open, 0);
    sluice_gate_free(gate);
}

int main(void)
{
    test_requests_a_minute();
    test_tokens_a_minute();
    test_retry_after_is_true();
    test_counts();
    test_room();
    test_shares();
    test_nothing_is_saved_up();
    test_priority_is_a_bounded_lead();
    test_order_within_a_tenant();
    test_deadlines();
    test_least_tokens_and_states();
    test_prefixes();
    test_replicas_come_and_go();
    test_workers();
    test_what_a_dead_worker_leaves();
    test_wakes();
    test_arguments();
    test_regions();
    test_random_life();
    return 0;
}
