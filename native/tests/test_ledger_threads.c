/* SPDX-License-Identifier: Apache-2.0 */
/* The memory ledger under threads: processes of several threads, a reader, and reapers that race for the same dead. */
#include "ledger_region_memory.h"

#include <pthread.h>
#include <stdatomic.h>

enum { PROCESSES = 3, THREADS_EACH = 2, DEVICES = 2, HELD = 6, DEAD = 200 };

struct world {
    struct sluice_ledger *ledger;
    uint32_t process[PROCESSES];
    uint32_t operations;
    atomic_uint_least64_t held[PROCESSES][DEVICES];
    atomic_bool done;
    atomic_uint dead; /* pids 1000 .. 1000 + dead - 1 were born, charged 3 bytes and ended */
};

struct worker {
    struct world *world;
    uint32_t number;
};

static void *allocate(void *argument)
{
    const struct worker *worker = argument;
    struct world *world = worker->world;
    uint32_t p = worker->number % PROCESSES;
    uint64_t random = 88172645463325252u + worker->number;
    struct sluice_ledger_charge charges[HELD] = {0};
    for (uint32_t i = 0; i < world->operations; i++) {
        struct sluice_ledger_charge *charge = &charges[next_random(&random) % HELD];
        if (charge->charged) {
            atomic_fetch_sub(&world->held[p][charge->device], charge->charged);
            CHECK_INT(sluice_ledger_release(world->ledger, world->process[p], charge, NULL), SLUICE_OK);
        } else {
            uint32_t device = (uint32_t)(next_random(&random) % DEVICES);
            enum sluice_error error = sluice_ledger_reserve(world->ledger, world->process[p], device,
                                                            1 + next_random(&random) % 400, 0, charge, NULL);
            CHECK(error == SLUICE_OK || error == SLUICE_ERROR_CAPACITY || error == SLUICE_ERROR_QUOTA);
            if (!error) {
                atomic_fetch_add(&world->held[p][device], charge->charged);
                CHECK_INT(sluice_ledger_commit(world->ledger, world->process[p], charge, NULL), SLUICE_OK);
            }
        }
    }
    return NULL;
}

static void *look(void *argument)
{
    struct world *world = argument;
    while (!atomic_load(&world->done)) {
        for (uint32_t device = 0; device < DEVICES; device++)
            device_charged(world->ledger, device);
        enum sluice_error error = sluice_ledger_audit(world->ledger, NULL);
        CHECK(error == SLUICE_OK || error == SLUICE_ERROR_BUSY);
    }
    return NULL;
}

/* Born, charged, dead: by one thread, so that the "process" has ended when `dead` says so. */
static void *live_and_die(void *argument)
{
    struct world *world = argument;
    for (uint32_t i = 0; i < DEAD; i++) {
        struct sluice_ledger_charge charge;
        uint32_t process;
        enum sluice_error error;
        while ((error = sluice_ledger_join(world->ledger, 2, 1000 + i, i, &process, NULL)) == SLUICE_ERROR_CAPACITY)
            ;
        CHECK_INT(error, SLUICE_OK);
        CHECK_INT(sluice_ledger_reserve(world->ledger, process, i % DEVICES, 3, 1, &charge, NULL), SLUICE_OK);
        atomic_store(&world->dead, i + 1);
    }
    return NULL;
}

static void *reap(void *argument)
{
    struct world *world = argument;
    uint64_t *sum = calloc(1, sizeof *sum), released;
    for (uint32_t i = 0; i < DEAD; i++) {
        while (atomic_load(&world->dead) <= i)
            ;
        CHECK_INT(sluice_ledger_reap(world->ledger, 1000 + i, i, &released, NULL), SLUICE_OK);
        *sum += released;
    }
    return sum;
}

int main(void)
{
    enum { WORKERS = PROCESSES * THREADS_EACH, REAPERS = 2 };
    const char *scale = getenv("SLUICE_TEST_SCALE");
    struct world world = {.operations = scale && !strcmp(scale, "full") ? 1000000 : 20000};
    struct worker workers[WORKERS];
    pthread_t threads[WORKERS + REAPERS + 2];
    size_t count = 0;
    void *region;
    world.ledger =
        new_ledger((struct sluice_ledger_shape){.devices = DEVICES, .owners = 3, .processes = 8}, 4096, 16, &region);
    /* Owner 2, of the short-lived, is never refused; the others race for the rest. */
    for (uint32_t device = 0; device < DEVICES; device++)
        for (uint32_t owner = 0; owner < 2; owner++)
            CHECK_INT(sluice_ledger_set_quota(world.ledger, owner, device, 2000, NULL), SLUICE_OK);
    for (uint32_t p = 0; p < PROCESSES; p++)
        CHECK_INT(sluice_ledger_join(world.ledger, p % 2, 10 + p, 1, &world.process[p], NULL), SLUICE_OK);
    for (uint32_t i = 0; i < WORKERS; i++) {
        workers[i] = (struct worker){&world, i};
        CHECK(!pthread_create(&threads[count++], NULL, allocate, &workers[i]));
    }
    for (int i = 0; i < REAPERS; i++)
        CHECK(!pthread_create(&threads[count++], NULL, reap, &world));
    CHECK(!pthread_create(&threads[count++], NULL, live_and_die, &world));
    CHECK(!pthread_create(&threads[count], NULL, look, &world));
    uint64_t reaped = 0;
    for (size_t i = 0; i < count; i++) {
        void *result;
        CHECK(!pthread_join(threads[i], &result));
        if (result)
            reaped += *(uint64_t *)result;
        free(result);
    }
    atomic_store(&world.done, true);
    CHECK(!pthread_join(threads[count], NULL));

    CHECK_INT(reaped, 3 * DEAD);
    for (uint32_t device = 0; device < DEVICES; device++) {
        uint64_t sum = 0;
        for (uint32_t p = 0; p < PROCESSES; p++) {
            struct sluice_ledger_usage usage;
            CHECK_INT(sluice_ledger_process_usage(world.ledger, world.process[p], device, &usage, NULL), SLUICE_OK);
            CHECK_INT(usage.charged, atomic_load(&world.held[p][device]));
            CHECK_INT(usage.committed, usage.charged);
            sum += usage.charged;
        }
        CHECK_INT(device_charged(world.ledger, device), sum);
    }
    CHECK_INT(sluice_ledger_audit(world.ledger, NULL), SLUICE_OK);
    sluice_ledger_free(world.ledger);
    return 0;
}
