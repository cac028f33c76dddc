/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slow replicas: a service in simulated time. Clients ask one request after the other; replicas prefill and decode as
 * engines do, between those that batch without loss and those that do not batch at all.
 */
#include "gate_memory.h"

enum { REPLICAS = 6, CLIENTS = 24, MS = 1000, S = 1000000 };

struct client {
    uint64_t ticket; /* 0: it thinks */
    uint64_t replica;
    uint64_t next_us; /* its next event */
    uint64_t granted_us, began_us, token_us, patience_us;
    uint32_t prompt, tokens, done;
    bool streams, first_came;
};

struct site {
    struct sluice_gate *gate;
    uint32_t worker;
    uint64_t now_us, random;
    uint32_t replicas, clients;
    uint32_t no_batching;        /* percent: time of each further request at a time, of one alone */
    uint64_t slow[REPLICAS + 1]; /* percent of a healthy one's time, by name */
    uint32_t in_flight[REPLICAS + 1];
    uint64_t served[REPLICAS + 1];
    uint32_t outs[REPLICAS + 1], ins[REPLICAS + 1];
    struct client client[CLIENTS];
};

static struct site new_site(uint32_t replicas, uint32_t clients, uint32_t no_batching, uint64_t seed)
{
    static const struct sluice_gate_shape shape = {
        .workers = 1, .subjects = 80, .services = 1, .replicas = REPLICAS, .tickets = CLIENTS, .prefixes = 64};
    void *region;
    struct site site = {.replicas = replicas, .clients = clients, .no_batching = no_batching, .random = seed + 1};
    site.gate = new_gate(shape, &region);
    site.worker = join(site.gate, 7);
    for (uint32_t name = 1; name <= replicas; name++) {
        replica(site.gate, name, 8, SLUICE_GATE_USABLE);
        site.slow[name] = 100;
    }
    return site;
}

/* A time of `us` on a replica as it is now: noise of a quarter to four times, most of it small. */
static uint64_t on_replica(struct site *site, uint64_t name, uint64_t us)
{
    uint64_t noise = 100;
    for (int i = 0; i < 4; i++)
        noise = noise * (75 + next_random(&site->random) % 60) / 100;
    uint64_t busy = 100 + site->no_batching * (site->in_flight[name] - 1);
    return us * site->slow[name] / 100 * busy / 100 * noise / 100 + 1;
}

static void report(struct site *site, struct client *client, enum sluice_gate_time time, uint64_t us, bool so_far)
{
    struct sluice_gate_took took = {.us = us, .time = time, .so_far = so_far};
    struct sluice_gate_replica changed;
    if (time == SLUICE_GATE_WHOLE)
        took.tokens = client->tokens;
    CHECK_INT(sluice_gate_took(site->gate, client->ticket, site->now_us, &took, &changed, NULL), SLUICE_OK);
    if (!changed.name)
        return;
    CHECK_INT(changed.name, client->replica);
    site->outs[changed.name] += changed.standing == SLUICE_GATE_OUT;
    site->ins[changed.name] += changed.standing == SLUICE_GATE_IN;
}

static void ask_again(struct site *site, struct client *client)
{
    struct sluice_gate_request request = request_of((uint64_t)(client - site->client), 0);
    client->prompt = 10 << next_random(&site->random) % 9;
    client->tokens = 1 + (uint32_t)(next_random(&site->random) % 100);
    client->streams = next_random(&site->random) % 3 != 0;
    client->first_came = false;
    client->done = 0;
    request.prompt_tokens = client->prompt;
    request.tokens = client->prompt + client->tokens;
    client->ticket = admit(site->gate, site->worker, site->now_us, request);
    client->next_us = NONE; /* its turn */
}

static void begin(struct site *site, const struct sluice_gate_turn *turn)
{
    struct client *client = site->client;
    while (client->ticket != turn->ticket)
        client++;
    site->in_flight[turn->replica]++;
    client->replica = turn->replica;
    client->granted_us = client->began_us = site->now_us;
    client->patience_us = S;
    uint64_t us = on_replica(site, turn->replica, 20 * MS + client->prompt * UINT64_C(100));
    if (!client->streams)
        us += client->tokens * on_replica(site, turn->replica, 30 * MS);
    client->next_us = site->now_us + us;
}

static void end(struct site *site, struct client *client)
{
    settle(site->gate, client->ticket, site->now_us, client->prompt, client->tokens);
    site->in_flight[client->replica]--;
    site->served[client->replica]++;
    client->ticket = 0;
    client->next_us = site->now_us + next_random(&site->random) % (200 * MS);
}

/* Sixteen tokens of a stream, or what is left of it. */
static void decode(struct site *site, struct client *client)
{
    uint32_t count = client->tokens - client->done < 16 ? client->tokens - client->done : 16;
    client->done += count;
    client->token_us = on_replica(site, client->replica, 30 * MS);
    client->next_us = site->now_us + count * client->token_us;
    client->began_us = site->now_us;
    client->patience_us = S;
}

static void happen(struct site *site, struct client *client)
{
    if (!client->ticket) {
        ask_again(site, client);
    } else if (!client->streams) {
        report(site, client, SLUICE_GATE_WHOLE, site->now_us - client->granted_us, false);
        end(site, client);
    } else if (!client->first_came) {
        client->first_came = true;
        report(site, client, SLUICE_GATE_FIRST, site->now_us - client->granted_us, false);
        decode(site, client);
    } else {
        report(site, client, SLUICE_GATE_TOKEN, client->token_us, false);
        if (client->done == client->tokens)
            end(site, client);
        else
            decode(site, client);
    }
}

/* What a worker says while nothing comes. */
static void wait_on(struct site *site, struct client *client)
{
    if (!client->ticket || client->next_us == NONE)
        return;
    uint64_t silent_us = site->now_us - client->began_us;
    if (client->first_came)
        silent_us %= client->token_us;
    if (silent_us < client->patience_us)
        return;
    enum sluice_gate_time time = client->first_came ? SLUICE_GATE_TOKEN
                                 : client->streams  ? SLUICE_GATE_FIRST
                                                    : SLUICE_GATE_WHOLE;
    report(site, client, time, silent_us, true);
    client->patience_us = 2 * silent_us;
}

static uint32_t out_now(struct site *site)
{
    uint32_t count, out = 0;
    struct sluice_gate_replica found[REPLICAS];
    CHECK_INT(sluice_gate_replicas(site->gate, REPLICAS, found, &count, NULL), SLUICE_OK);
    for (uint32_t i = 0; i < count; i++) {
        out += found[i].standing != SLUICE_GATE_IN;
        CHECK((found[i].standing == SLUICE_GATE_IN) == (found[i].times_slower == 0));
    }
    CHECK_INT(service(site->gate).out, out);
    return out;
}

/* For so many seconds; what must hold at each time does. */
static void go_on(struct site *site, uint64_t seconds)
{
    uint64_t until_us = site->now_us + seconds * S, step = 0;
    while (site->now_us < until_us) {
        struct sluice_gate_turn turns[CLIENTS];
        uint64_t next_us = site->now_us + 250 * MS;
        for (uint32_t i = 0; i < site->clients; i++)
            next_us = site->client[i].next_us < next_us ? site->client[i].next_us : next_us;
        site->now_us = next_us > site->now_us ? next_us : site->now_us;
        for (uint32_t i = 0; i < site->clients; i++) {
            if (site->client[i].next_us <= site->now_us)
                happen(site, &site->client[i]);
            wait_on(site, &site->client[i]);
        }
        uint32_t count = take_turns(site->gate, site->worker, site->now_us, turns, CLIENTS);
        for (uint32_t i = 0; i < count; i++)
            begin(site, &turns[i]);
        if (++step % 64)
            continue;
        audit_gate(site->gate);
        uint32_t out = out_now(site);
        CHECK(out <= (site->replicas < 6 ? site->replicas > 1 : site->replicas / 3));
    }
}

static uint64_t all_outs(const struct site *site)
{
    uint64_t outs = 0;
    for (uint32_t name = 1; name <= site->replicas; name++)
        outs += site->outs[name];
    return outs;
}

static void free_site(struct site *site)
{
    audit_gate(site->gate);
    sluice_gate_free(site->gate);
}

/* ---- what is asked of it ---- */

/* Nobody is taken for slow by chance, whatever the engine, its load and the requests. */
static void test_healthy_ones_stay_in(void)
{
    for (uint64_t seed = 0; seed < 24; seed++) {
        struct site site =
            new_site(2 + (uint32_t)(seed % 5), 1 + (uint32_t)(seed * 7 % CLIENTS), (uint32_t)(seed % 3) * 50, seed);
        site.slow[1] = 150; /* nodes are not all the same */
        go_on(&site, 600);
        CHECK_INT(all_outs(&site), 0);
        free_site(&site);
    }
}

/*
 * One that is eight times as slow, or more, gets next to nothing, and its part again when it is well. Where engines do not batch, a
 * slow one with little to do is no slower than others that are full, which is as it should be: here nobody is full.
 */
static void test_a_slow_one_is_out_until_it_is_well(void)
{
    for (uint64_t seed = 0; seed < 24; seed++) {
        uint32_t replicas = 2 + (uint32_t)(seed % 5), no_batching = (uint32_t)(seed % 3) * 50;
        struct site site = new_site(replicas, no_batching ? 2 * replicas : 4 * replicas, no_batching, seed);
        go_on(&site, 60);
        site.slow[2] = 800 + 8 * no_batching;
        go_on(&site, no_batching ? 180 : 60); /* so few requests take their time to show it */
        CHECK(site.outs[2] >= 1);
        uint64_t before = site.served[2], all = site.served[1];
        go_on(&site, 600);
        CHECK((site.served[2] - before) * 10 < site.served[1] - all);
        CHECK(site.outs[2] <= 9);
        CHECK_INT(site.outs[2], all_outs(&site));
        site.slow[2] = 100;
        go_on(&site, 400);
        CHECK_INT(out_now(&site), 0);
        before = site.served[2], all = site.served[1];
        go_on(&site, 60);
        CHECK((site.served[2] - before) * 3 > site.served[1] - all);
        free_site(&site);
    }
}

/* One that answers nothing at all any more, and whose requests never end. */
static void test_one_that_hangs(void)
{
    for (uint64_t seed = 0; seed < 8; seed++) {
        struct site site = new_site(3, 16, 0, seed);
        go_on(&site, 60);
        site.slow[3] = 100000000;
        go_on(&site, 30);
        CHECK(site.outs[3] >= 1);
        uint32_t held = site.in_flight[3];
        uint64_t before = site.served[1] + site.served[2];
        go_on(&site, 300);
        CHECK(site.in_flight[3] <= held + 1);
        CHECK(site.served[1] + site.served[2] - before > 1000);
        free_site(&site);
    }
}

/* It comes and goes each half minute: it is left alone for longer each time. */
static void test_it_does_not_swing(void)
{
    struct site site = new_site(4, 16, 50, 1);
    for (int round = 0; round < 60; round++) {
        site.slow[4] = round % 2 ? 100 : 800;
        go_on(&site, 30);
    }
    CHECK(site.outs[4] >= 3 && site.outs[4] <= 12); /* in half an hour */
    CHECK_INT(site.outs[4], all_outs(&site));
    free_site(&site);
}

/* Where most are slow, slow is what is usual; where some go, those that are out are in again. */
static void test_the_last_ones_stay(void)
{
    struct site site = new_site(6, 24, 0, 1);
    go_on(&site, 30);
    for (uint32_t name = 2; name <= 6; name++)
        site.slow[name] = 1000;
    go_on(&site, 300);
    CHECK_INT(all_outs(&site), 0);
    for (uint32_t name = 3; name <= 6; name++)
        site.slow[name] = 100;
    site.slow[1] = 1000;
    go_on(&site, 120);
    CHECK(site.outs[1] && site.outs[2]);
    CHECK_INT(out_now(&site), 2);
    for (uint64_t name = 3; name <= 5; name++)
        replica(site.gate, name, 8, SLUICE_GATE_NOT_USABLE);
    CHECK_INT(out_now(&site), 1);
    replica(site.gate, 6, 8, SLUICE_GATE_LAST);
    CHECK(out_now(&site) <= 1);
    CHECK_INT(sluice_gate_remove_replica(site.gate, 6, NULL), SLUICE_OK);
    CHECK_INT(sluice_gate_remove_replica(site.gate, 2, NULL), SLUICE_OK);
    audit_gate(site.gate);
    CHECK_INT(service(site.gate).out, 0); /* the only one */
    CHECK_INT(service(site.gate).slots, 8);
    free_site(&site);
}

/* Fast enough is fast enough, whatever the others take; and what is asked must make sense. */
static void test_times(void)
{
    struct site site = new_site(2, 1, 0, 1);
    struct sluice_gate_took took = {.time = SLUICE_GATE_TOKEN};
    struct sluice_gate_replica changed;
    uint64_t tickets[2];
    for (int i = 0; i < 2; i++)
        tickets[i] = admit(site.gate, site.worker, 0, request_of(0, 10));
    CHECK_INT(sluice_gate_took(site.gate, tickets[0], 0, &took, &changed, NULL), SLUICE_ERROR_UNKNOWN);
    struct sluice_gate_turn turns[2];
    CHECK_INT(take_turns(site.gate, site.worker, 0, turns, 2), 2);
    for (int i = 0; i < 100; i++)
        for (int j = 0; j < 2; j++) {
            took.us = j ? 9999 : 10;
            CHECK_INT(sluice_gate_took(site.gate, tickets[j], 0, &took, &changed, NULL), SLUICE_OK);
            CHECK_INT(changed.name, 0);
        }
    took.us = 20000;
    int samples = 0;
    do
        CHECK_INT(sluice_gate_took(site.gate, tickets[1], 5, &took, &changed, NULL), SLUICE_OK);
    while (!changed.name && ++samples < 20);
    CHECK_INT(changed.name, turns[1].replica);
    CHECK(changed.standing == SLUICE_GATE_OUT && changed.slow_time == SLUICE_GATE_TOKEN && changed.times_slower >= 512);
    CHECK_INT(changed.standing_us, 10 * S + 5);
    took.time = (enum sluice_gate_time)3;
    CHECK_INT(sluice_gate_took(site.gate, tickets[1], 5, &took, &changed, NULL), SLUICE_ERROR_RANGE);
    free_site(&site);
}

int main(void)
{
    test_times();
    test_healthy_ones_stay_in();
    test_a_slow_one_is_out_until_it_is_well();
    test_one_that_hangs();
    test_it_does_not_swing();
    test_the_last_ones_stay();
    return 0;
}
