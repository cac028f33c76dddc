/* SPDX-License-Identifier: Apache-2.0 */
/* The gate under threads, each a worker with a handle of its own; one audits, and reaps workers that have "ended". */
#include "gate_memory.h"

#include <pthread.h>
#include <stdatomic.h>

enum { WORKERS = 4, LIVES = 12 };

struct world {
    void *region;
    size_t size;
    uint32_t steps;
    atomic_uint ended[WORKERS]; /* lives of this worker that are over */
};

struct worker {
    struct world *world;
    uint32_t number;
};

static uint32_t pid_of(uint32_t number, uint32_t life)
{
    return 1000 * (number + 1) + life;
}

/* Lives again and again; whoever notices reaps what is left. */
static void *work(void *argument)
{
    const struct worker *worker = argument;
    struct world *world = worker->world;
    struct sluice_gate *gate = open_gate(world->region, world->size);
    for (uint32_t n = 0; n < LIVES; n++) {
        struct life life = {
            .gate = gate, .worker = join(gate, pid_of(worker->number, n)), .random = 1 + worker->number * LIVES + n};
        for (uint32_t i = 0; i < world->steps; i++)
            live_on(&life);
        atomic_store(&world->ended[worker->number], n + 1);
    }
    sluice_gate_free(gate);
    return NULL;
}

static bool reap_some(struct world *world, struct sluice_gate *gate, uint32_t *reaped)
{
    bool all = true;
    for (uint32_t number = 0; number < WORKERS; number++) {
        uint32_t ended = atomic_load(&world->ended[number]);
        for (; reaped[number] < ended; reaped[number]++)
            CHECK_INT(sluice_gate_reap(gate, pid_of(number, reaped[number]), 1, 0, NULL, NULL), SLUICE_OK);
        all = all && ended == LIVES;
    }
    return all;
}

static void *look(void *argument)
{
    struct world *world = argument;
    struct sluice_gate *gate = open_gate(world->region, world->size);
    uint32_t reaped[WORKERS] = {0};
    while (!reap_some(world, gate, reaped)) {
        audit_gate(gate);
        CHECK(subject(gate, SLUICE_GATE_TENANT, TENANT, 0).open <= 6);
        sluice_gate_wakes(gate);
    }
    sluice_gate_free(gate);
    return NULL;
}

int main(void)
{
    const char *scale = getenv("SLUICE_TEST_SCALE");
    struct world world = {.steps = scale && !strcmp(scale, "full") ? 20000 : 2000};
    struct worker workers[WORKERS];
    pthread_t threads[WORKERS], looking[2];
    /* Seats for those that have ended and are not reaped yet. */
    struct sluice_gate *gate = new_busy_gate(SLUICE_GATE_MAX_WORKERS, &world.region);
    struct sluice_gate_shape shape;
    sluice_gate_get_shape(gate, &shape);
    world.size = sluice_gate_size(&shape);
    for (uint32_t i = 0; i < WORKERS; i++) {
        workers[i] = (struct worker){&world, i};
        CHECK(!pthread_create(&threads[i], NULL, work, &workers[i]));
    }
    for (int i = 0; i < 2; i++) /* two that race for the same dead */
        CHECK(!pthread_create(&looking[i], NULL, look, &world));
    for (uint32_t i = 0; i < WORKERS; i++)
        CHECK(!pthread_join(threads[i], NULL));
    for (int i = 0; i < 2; i++)
        CHECK(!pthread_join(looking[i], NULL));
    audit_gate(gate);
    CHECK_INT(service(gate).waiting + service(gate).in_flight, 0);
    CHECK_INT(subject(gate, SLUICE_GATE_SERVICE, SERVICE, 0).tokens, 0);
    CHECK_INT(sluice_gate_wakes(gate), 0);
    sluice_gate_free(gate);
    return 0;
}
