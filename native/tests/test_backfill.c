/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backfill plans hold what they promise: carried out on the cluster itself, start by start and end by end, nothing is
 * ever short of room; and planned again with their reservations, nothing slips. That the plan is the one that the rules
 * name, tests/unit/core/test_backfill.py compares with a plain reference.
 */
#include "check.h"
#include "sluice/core.h"

enum { NODES = 40, JOBS = 400, PARTS = 4 * JOBS, NOW = 5000 };

static uint64_t next_random(uint64_t *state, uint64_t below)
{
    *state = *state * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return (*state >> 33) % below;
}

static struct sluice_cluster *new_cluster(uint32_t nodes)
{
    struct sluice_cluster_config config = {.max_nodes = nodes};
    struct sluice_node_shape shape = {.gpu_count = 8};
    struct sluice_cluster *cluster;
    uint32_t id, node, model;
    CHECK_INT(sluice_cluster_new(&config, &cluster, NULL), SLUICE_OK);
    CHECK_INT(sluice_cluster_add_model(cluster, "m", &model, NULL), SLUICE_OK);
    for (uint32_t i = 0; i < shape.gpu_count; i++)
        shape.gpus[i] = (struct sluice_gpu_shape){.model = model, .memory_mib = 1000, .link_domain = (uint8_t)(i / 4)};
    CHECK_INT(sluice_cluster_add_shape(cluster, &shape, &id, NULL), SLUICE_OK);
    for (uint32_t i = 0; i < nodes; i++)
        CHECK_INT(sluice_cluster_add_node(cluster, id, 64000, 100000, 0, &node, NULL), SLUICE_OK);
    return cluster;
}

static struct sluice_request random_request(uint64_t *random)
{
    struct sluice_request request = {.gpus = (int64_t)next_random(random, 5),
                                     .cpus_milli = 1 + (int64_t)next_random(random, 20000)};
    if (request.gpus == 1 && next_random(random, 2))
        request.gpu_memory_mib = 1 + (int64_t)next_random(random, 1000);
    if (request.gpus && next_random(random, 10) == 0)
        request.one_link_domain = SLUICE_REQUIRED;
    if (next_random(random, 10) == 0)
        request.nodes_min = 2 + (int64_t)next_random(random, 3);
    if (next_random(random, 30) == 0)
        request.flags = SLUICE_EXCLUSIVE;
    if (request.gpus && next_random(random, 30) == 0) {
        request.flags |= SLUICE_GPUS_TOTAL;
        request.gpus = 12;
        request.gpu_memory_mib = 0;
        request.nodes_max = 4;
        request.nodes_min = 1;
    }
    return request;
}

struct event {
    int64_t time;
    uint32_t job;
    bool start;
};

static int by_time(const void *a, const void *b)
{
    const struct event *x = a, *y = b;
    if (x->time != y->time)
        return x->time < y->time ? -1 : 1;
    return x->start - y->start; /* ends first */
}

/* Starts and ends every job as planned; a job that runs already ends at its own time. */
static void carry_out(struct sluice_cluster *cluster, const struct sluice_backfill_running *running,
                      uint32_t running_count, const struct sluice_backfill_job *jobs,
                      const struct sluice_backfill_start *starts, struct sluice_part *parts)
{
    static struct event events[3 * JOBS];
    static uint64_t allocations[JOBS];
    size_t count = 0;
    for (uint32_t i = 0; i < running_count; i++)
        events[count++] = (struct event){running[i].end_s > NOW ? running[i].end_s : NOW + 1, JOBS + i, false};
    for (uint32_t i = 0; i < JOBS; i++) {
        if (starts[i].start_s == SLUICE_BACKFILL_NO_START)
            continue;
        events[count++] = (struct event){starts[i].start_s, i, true};
        events[count++] = (struct event){starts[i].start_s + jobs[i].limit_s, i, false};
    }
    qsort(events, count, sizeof *events, by_time);
    for (size_t i = 0; i < count; i++) {
        uint32_t job = events[i].job;
        if (events[i].start) {
            struct sluice_placement placement = {.parts = &parts[starts[job].first_part],
                                                 .part_capacity = starts[job].part_count,
                                                 .part_count = starts[job].part_count};
            CHECK_INT(sluice_commit(cluster, &placement, &allocations[job], NULL), SLUICE_OK);
        } else {
            uint64_t allocation = job < JOBS ? allocations[job] : running[job - JOBS].allocation;
            CHECK_INT(sluice_release(cluster, allocation, NULL), SLUICE_OK);
        }
    }
}

static void test_plans_can_be_carried_out(uint64_t random)
{
    static struct sluice_request requests[JOBS];
    static struct sluice_backfill_job jobs[JOBS];
    static struct sluice_backfill_running running[JOBS];
    static struct sluice_backfill_start starts[JOBS], again[JOBS];
    static struct sluice_part parts[PARTS], parts_again[PARTS];
    struct sluice_cluster *cluster = new_cluster(NODES);
    struct sluice_backfill *backfill;
    struct sluice_error_text text;
    uint32_t running_count = 0, part_count;
    CHECK_INT(sluice_backfill_new(&(struct sluice_backfill_config){.max_jobs = JOBS, .max_planned = PARTS}, NODES,
                                  &backfill, NULL),
              SLUICE_OK);
    while (running_count < JOBS / 2) {
        struct sluice_request request = random_request(&random);
        struct sluice_placement placement = {.parts = parts, .part_capacity = PARTS};
        if (!sluice_start(cluster, SLUICE_POLICY_FIRST_FIT, &request, &placement, &running[running_count].allocation,
                          NULL))
            running[running_count].end_s = NOW - 10 + (int64_t)next_random(&random, 2000);
        else
            break;
        running_count++;
    }
    for (uint32_t i = 0; i < JOBS; i++) {
        requests[i] = random_request(&random);
        jobs[i] = (struct sluice_backfill_job){.request = &requests[i],
                                               .limit_s = 1 + (int64_t)next_random(&random, 1000),
                                               .group = i % 50 < 2 ? i / 50 + 1 : 0};
    }
    CHECK_INT(sluice_backfill_plan(backfill, cluster, NOW, running, running_count, jobs, JOBS, UINT32_MAX, starts,
                                   parts, PARTS, &part_count, &text),
              SLUICE_OK);
    uint32_t reserved = 0;
    for (uint32_t i = 0; i < JOBS; i++) {
        CHECK(starts[i].start_s >= NOW);
        CHECK(!jobs[i].group || i % 50 == 0 || starts[i].start_s == starts[i - 1].start_s);
        reserved += starts[i].start_s > NOW;
        jobs[i].held_start_s = starts[i].start_s;
        jobs[i].held = &parts[starts[i].first_part];
        jobs[i].held_count = starts[i].part_count;
    }
    CHECK(reserved > JOBS / 2);

    /* Some of what runs ended early, and priorities changed: everything may only move forward. */
    for (uint32_t i = 0; i < running_count / 3; i++) {
        CHECK_INT(sluice_release(cluster, running[i].allocation, NULL), SLUICE_OK);
        running[i] = running[--running_count];
    }
    for (uint32_t i = 0; i + 60 < JOBS; i += 60) {
        struct sluice_backfill_job job = jobs[i + 10];
        jobs[i + 10] = jobs[i + 11];
        jobs[i + 11] = job;
    }
    CHECK_INT(sluice_backfill_plan(backfill, cluster, NOW, running, running_count, jobs, JOBS, 1, again, parts_again,
                                   PARTS, &part_count, &text),
              SLUICE_OK);
    for (uint32_t i = 0; i < JOBS; i++)
        CHECK(again[i].start_s >= NOW && again[i].start_s <= jobs[i].held_start_s);
    carry_out(cluster, running, running_count, jobs, again, parts_again);
    CHECK_INT(sluice_cluster_check(cluster, NULL), SLUICE_OK);
    sluice_backfill_free(backfill);
    sluice_cluster_free(cluster);
}

/* Whatever a held reservation says, it is dropped or kept, and what it says is never trusted. */
static void test_senseless_reservations(void)
{
    struct sluice_cluster *cluster = new_cluster(2);
    struct sluice_backfill *backfill;
    CHECK_INT(sluice_backfill_new(NULL, 2, &backfill, NULL), SLUICE_OK);
    const struct sluice_part cases[] = {
        {.node = 2, .gpus = 1},           {.node = 0, .gpus = 0x100},           {.gpus = 1, .gpu_memory_mib = -1},
        {.gpus = 1, .cpus_milli = -1},    {.gpus = 1, .cpus_milli = INT64_MAX}, {.gpus = 1, .gpu_memory_mib = 1001},
        {.gpus = 1, .cpus_milli = 64001},
    };
    struct sluice_request request = {.gpus = 1};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct sluice_part part;
        struct sluice_backfill_start start;
        uint32_t count;
        struct sluice_backfill_job job = {
            .request = &request, .limit_s = 5, .held = &cases[i], .held_count = 1, .held_start_s = NOW + 7};
        CHECK_INT(sluice_backfill_plan(backfill, cluster, NOW, NULL, 0, &job, 1, 1, &start, &part, 1, &count, NULL),
                  SLUICE_OK);
        CHECK_INT(start.start_s, NOW);
        CHECK(part.node == 0 && part.gpus == 1);
        CHECK_INT(sluice_backfill_plan(backfill, cluster, NOW, NULL, 0, &job, 1, 1, &start, &part, 0, &count, NULL),
                  SLUICE_ERROR_CAPACITY);
    }
    sluice_backfill_free(backfill);
    sluice_backfill_free(NULL);
    sluice_cluster_free(cluster);
}

int main(void)
{
    for (uint64_t seed = 1; seed <= 6; seed++)
        test_plans_can_be_carried_out(seed);
    test_senseless_reservations();
    return 0;
}
