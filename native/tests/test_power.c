/* SPDX-License-Identifier: Apache-2.0 */
/* Power budgets in plans: no budget is exceeded at any moment, jobs wait or start with fewer watts, and who is named. */
#include "check.h"
#include "power.h"
#include "sluice/core.h"

enum { NODES = 16, GPUS = 8, JOBS = 300, PARTS = 4 * JOBS, HOUR = 3600, WEEK_S = 1000 * SLUICE_POWER_WEEK_S };
/* A Monday, 08:00 */
enum { NOW_HOUR = 8 };
enum { RUNS = 3584 }; /* s; on the grid of what changes so far ahead */
static const int64_t now = (int64_t)WEEK_S + NOW_HOUR * HOUR;

static struct sluice_error_text text;

static uint64_t next_random(uint64_t *state, uint64_t below)
{
    *state = *state * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return (*state >> 33) % below;
}

static struct sluice_cluster *new_cluster(void)
{
    struct sluice_cluster_config config = {.max_nodes = NODES};
    struct sluice_node_shape shape = {.gpu_count = GPUS};
    struct sluice_cluster *cluster;
    uint32_t id, node, model;
    CHECK_INT(sluice_cluster_new(&config, &cluster, &text), SLUICE_OK);
    CHECK_INT(sluice_cluster_add_model(cluster, "m", &model, &text), SLUICE_OK);
    for (uint32_t i = 0; i < GPUS; i++)
        shape.gpus[i] = (struct sluice_gpu_shape){.model = model, .memory_mib = 1000};
    CHECK_INT(sluice_cluster_add_shape(cluster, &shape, &id, &text), SLUICE_OK);
    for (uint32_t i = 0; i < NODES; i++)
        CHECK_INT(sluice_cluster_add_node(cluster, id, 64000, 100000, 0, &node, &text), SLUICE_OK);
    return cluster;
}

static struct sluice_power *new_power(const struct sluice_power_budget *budgets, uint32_t count)
{
    struct sluice_power *power;
    CHECK_INT(sluice_power_new(NODES, &power, &text), SLUICE_OK);
    CHECK_INT(sluice_power_set(power, budgets, count, WEEK_S, &text), SLUICE_OK);
    return power;
}

static struct sluice_backfill *new_backfill(struct sluice_power *power)
{
    struct sluice_backfill *backfill;
    CHECK_INT(sluice_backfill_new(&(struct sluice_backfill_config){.max_jobs = JOBS, .max_planned = PARTS}, NODES,
                                  &backfill, &text),
              SLUICE_OK);
    sluice_backfill_set_power(backfill, power);
    return backfill;
}

static const uint64_t low_half[] = {0x00ff}, high_half[] = {0xff00};
static const struct sluice_power_hours day[] = {{8 * HOUR, 18 * HOUR, 20000}, {32 * HOUR, 42 * HOUR, 20000}};
static const struct sluice_power_hours morning[] = {{9 * HOUR, 10 * HOUR, 0}};
static const struct sluice_power_budget budgets[] = {
    {.watts = 30000, .base_watts = 2000, .hours = day, .hour_count = 2},
    {.watts = 9000, .nodes = low_half, .node_words = 1},
    {.watts = 14000, .nodes = high_half, .node_words = 1, .lowered_watts = 7000, .lowered_until_s = WEEK_S + 9 * HOUR},
    {.watts = 6000, .base_watts = 1000}, /* of a tenant */
};
enum { BUDGETS = sizeof budgets / sizeof *budgets };

static bool on_budget(uint32_t budget, uint32_t node)
{
    return !budgets[budget].nodes || (budgets[budget].nodes[0] >> node & 1);
}

/* What the planned jobs draw of a budget at a time, from their starts alone. */
static int64_t drawn(const struct sluice_backfill_job *jobs, const struct sluice_backfill_start *starts,
                     const struct sluice_part *parts, uint32_t budget, int64_t at_s)
{
    int64_t watts = 0;
    for (uint32_t i = 0; i < JOBS; i++) {
        if (starts[i].start_s == SLUICE_BACKFILL_NO_START || starts[i].start_s > at_s ||
            starts[i].start_s + jobs[i].limit_s <= at_s || !(jobs[i].power_budgets >> budget & 1))
            continue;
        for (uint32_t p = 0; p < starts[i].part_count; p++) {
            const struct sluice_part *part = &parts[starts[i].first_part + p];
            if (on_budget(budget, part->node))
                watts += (int64_t)starts[i].watts * __builtin_popcount(part->gpus);
        }
    }
    return watts;
}

static void random_jobs(uint64_t *random, struct sluice_request *requests, struct sluice_backfill_job *jobs)
{
    for (uint32_t i = 0; i < JOBS; i++) {
        requests[i] = (struct sluice_request){.gpus = (int64_t)next_random(random, 5), .cpus_milli = 1000};
        if (requests[i].gpus == 1 && next_random(random, 2))
            requests[i].gpu_memory_mib = 300;
        if (next_random(random, 8) == 0)
            requests[i].nodes_min = 2 + (int64_t)next_random(random, 4);
        if (requests[i].gpus > 1 && !requests[i].nodes_min && next_random(random, 8) == 0) {
            requests[i].gpus = 12;
            requests[i].nodes_min = 1;
            requests[i].nodes_max = 4;
            requests[i].flags = SLUICE_GPUS_TOTAL;
        }
        const int32_t watts = (int32_t)next_random(random, 700);
        jobs[i] = (struct sluice_backfill_job){.request = &requests[i],
                                               .limit_s = 1 + (int64_t)next_random(random, 20 * HOUR),
                                               .group = i % 40 < 2 ? i / 40 + 1 : 0,
                                               .watts = watts,
                                               .least_watts = next_random(random, 2) ? watts / 2 : 0,
                                               .power_budgets = 7 | next_random(random, 2) << 3,
                                               .power_guaranteed = next_random(random, 4) == 0};
    }
}

/* Of some jobs only the watts are planned, on nodes that they have from somebody else. */
static void leave_nodes_to_others(uint64_t *random, struct sluice_backfill_job *jobs)
{
    static struct sluice_part drawing[JOBS];
    for (uint32_t i = 0; i + 2 < JOBS; i += 11) {
        if (jobs[i].group)
            continue;
        for (uint32_t p = 0; p < 3; p++)
            drawing[i + p] = (struct sluice_part){.node = (uint32_t)next_random(random, NODES / 4) + 4 * p,
                                                  .gpus = (1u << next_random(random, GPUS)) - 1};
        jobs[i].watts_only = true;
        jobs[i].request = NULL;
        jobs[i].held = &drawing[i];
        jobs[i].held_count = 3;
        jobs[i].held_start_s = next_random(random, 2) ? now + (int64_t)next_random(random, HOUR) : now;
    }
}

static uint32_t lower, waits, later; /* jobs of all plans: that start with fewer watts, that wait for some */

static void test_no_budget_is_exceeded(uint64_t random)
{
    static struct sluice_request requests[JOBS];
    static struct sluice_backfill_job jobs[JOBS];
    static struct sluice_backfill_start starts[JOBS], again[JOBS];
    static struct sluice_part parts[PARTS], parts_again[PARTS];
    uint32_t count;
    struct sluice_cluster *cluster = new_cluster();
    struct sluice_power *power = new_power(budgets, BUDGETS);
    struct sluice_backfill *backfill = new_backfill(power);
    random_jobs(&random, requests, jobs);
    leave_nodes_to_others(&random, jobs);
    CHECK_INT(sluice_backfill_plan(backfill, cluster, now, NULL, 0, jobs, JOBS, UINT32_MAX, starts, parts, PARTS,
                                   &count, &text),
              SLUICE_OK);
    for (uint32_t i = 0; i < JOBS; i++) { /* what changes only changes at starts */
        if (starts[i].start_s == SLUICE_BACKFILL_NO_START)
            continue;
        for (uint32_t budget = 0; budget < BUDGETS; budget++) {
            const int64_t most = sluice_power_watts(power, budget, starts[i].start_s) - budgets[budget].base_watts;
            CHECK(drawn(jobs, starts, parts, budget, starts[i].start_s) <= most);
        }
        CHECK(starts[i].watts == jobs[i].watts || starts[i].start_s == now || jobs[i].watts_only);
        CHECK(!jobs[i].watts_only || starts[i].start_s >= jobs[i].held_start_s);
        later += jobs[i].watts_only && starts[i].waits_for_power;
        CHECK(starts[i].watts <= jobs[i].watts);
        const int32_t least = jobs[i].least_watts ? jobs[i].least_watts : jobs[i].watts;
        CHECK(starts[i].watts >= (jobs[i].power_guaranteed ? 0 : least));
        CHECK(starts[i].start_s > now || !starts[i].waits_for_power);
        lower += starts[i].watts < jobs[i].watts;
        waits += starts[i].waits_for_power != 0;
    }
    for (uint32_t budget = 0; budget < BUDGETS; budget++) /* and at the hours */
        for (int64_t at_s = now; at_s < now + SLUICE_POWER_WEEK_S; at_s += HOUR)
            CHECK(drawn(jobs, starts, parts, budget, at_s) <=
                  sluice_power_watts(power, budget, at_s) - budgets[budget].base_watts);
    for (uint32_t i = 0; i < JOBS; i++) {
        if (starts[i].start_s == SLUICE_BACKFILL_NO_START || starts[i].watts < jobs[i].watts || jobs[i].watts_only)
            continue;
        jobs[i].held_start_s = starts[i].start_s;
        jobs[i].held = &parts[starts[i].first_part];
        jobs[i].held_count = starts[i].part_count;
    }
    for (uint32_t i = 0; i < JOBS; i++) /* the reservations of groups go together */
        if (jobs[i].group)
            jobs[i].held_count = 0;
    CHECK_INT(sluice_backfill_plan(backfill, cluster, now, NULL, 0, jobs, JOBS, UINT32_MAX, again, parts_again, PARTS,
                                   &count, &text),
              SLUICE_OK);
    for (uint32_t i = 0; i < JOBS; i++)
        CHECK(!jobs[i].held_count || jobs[i].watts_only ||
              (again[i].start_s != SLUICE_BACKFILL_NO_START && again[i].start_s <= starts[i].start_s));
    sluice_backfill_free(backfill);
    sluice_power_free(power);
    sluice_cluster_free(cluster);
}

/* Budgets that are never short change nothing. */
static void test_ample_budgets_change_nothing(uint64_t random)
{
    static struct sluice_request requests[JOBS];
    static struct sluice_backfill_job jobs[JOBS];
    static struct sluice_backfill_start without[JOBS], with[JOBS];
    static struct sluice_part parts[PARTS], parts_with[PARTS];
    uint32_t count, count_with;
    const struct sluice_power_budget ample[] = {{.watts = 1000000},
                                                {.watts = 1000000, .nodes = low_half, .node_words = 1}};
    struct sluice_cluster *cluster = new_cluster();
    struct sluice_power *power = new_power(ample, 2);
    struct sluice_backfill *backfill = new_backfill(NULL);
    random_jobs(&random, requests, jobs);
    CHECK_INT(
        sluice_backfill_plan(backfill, cluster, now, NULL, 0, jobs, JOBS, 5, without, parts, PARTS, &count, &text),
        SLUICE_OK);
    sluice_backfill_set_power(backfill, power);
    CHECK_INT(sluice_backfill_plan(backfill, cluster, now, NULL, 0, jobs, JOBS, 5, with, parts_with, PARTS, &count_with,
                                   &text),
              SLUICE_OK);
    CHECK_INT(count, count_with);
    CHECK(memcmp(parts, parts_with, count * sizeof *parts) == 0);
    for (uint32_t i = 0; i < JOBS; i++) {
        CHECK_INT(without[i].start_s, with[i].start_s);
        CHECK_INT(without[i].watts, 0);
        CHECK_INT(with[i].waits_for_power, 0);
    }
    sluice_backfill_free(backfill);
    sluice_power_free(power);
    sluice_cluster_free(cluster);
}

struct scene {
    const char *name;
    struct sluice_power_budget budget;
    struct sluice_backfill_job job;
    int32_t running_watts; /* of four GPUs */
    int64_t start_s;       /* after now; -1: none */
    int32_t watts;
    uint32_t waits;
};

static void test_one_job(void)
{
    static const struct sluice_request request = {.gpus = 4, .cpus_milli = 1000};
    static const struct scene scenes[] = {
        {"enough", {.watts = 2000}, {.limit_s = 60, .watts = 300}, 200, 0, 300, 0},
        {"waits for the running one", {.watts = 1900}, {.limit_s = 60, .watts = 300}, 200, RUNS, 300, 1},
        {"starts with fewer", {.watts = 1900}, {.limit_s = 60, .watts = 300, .least_watts = 100}, 200, 0, 275, 0},
        {"too few for its least", {.watts = 1100}, {.limit_s = 60, .watts = 300, .least_watts = 100}, 200, -1, 0, 1},
        {"idle GPUs count", {.watts = 2000, .base_watts = 1}, {.limit_s = 60, .watts = 300}, 200, RUNS, 300, 1},
        {"guaranteed, enough",
         {.watts = 2000},
         {.limit_s = 60, .watts = 300, .power_guaranteed = true},
         200,
         0,
         300,
         0},
        {"with what is left", {.watts = 900}, {.limit_s = 60, .watts = 300, .power_guaranteed = true}, 200, 0, 25, 0},
        {"with none", {.watts = 700}, {.limit_s = 60, .watts = 300, .power_guaranteed = true}, 200, 0, 0, 0},
        {"the night's watts",
         {.watts = 5000, .hours = day, .hour_count = 2, .base_watts = 19000},
         {.limit_s = 60, .watts = 300},
         0,
         -1,
         0,
         1},
        {"after the day",
         {.watts = 30000, .hours = day, .hour_count = 2, .base_watts = 19500},
         {.limit_s = 60, .watts = 300},
         0,
         10 * HOUR,
         300,
         1},
        {"ends before the day",
         {.watts = 30000, .hours = morning, .hour_count = 1},
         {.limit_s = HOUR, .watts = 300},
         0,
         0,
         300,
         0},
        {"reaches into the day",
         {.watts = 30000, .hours = morning, .hour_count = 1},
         {.limit_s = HOUR + 1, .watts = 300},
         0,
         2 * HOUR,
         300,
         1},
        {"lowered for a while",
         {.watts = 9000, .lowered_watts = 10, .lowered_until_s = WEEK_S + 8 * HOUR + 90},
         {.limit_s = 60, .watts = 300},
         0,
         90,
         300,
         1},
        {"draws nothing", {.watts = 0}, {.limit_s = 60}, 0, 0, 0, 0},
    };
    for (size_t i = 0; i < sizeof scenes / sizeof *scenes; i++) {
        const struct scene *scene = &scenes[i];
        struct sluice_cluster *cluster = new_cluster();
        struct sluice_power *power = new_power(&scene->budget, 1);
        struct sluice_backfill *backfill = new_backfill(power);
        struct sluice_backfill_job job = scene->job;
        struct sluice_backfill_start start;
        struct sluice_backfill_running running = {
            .end_s = now + RUNS, .watts = scene->running_watts, .power_budgets = 1};
        struct sluice_part part, held;
        struct sluice_placement placement = {.parts = &held, .part_capacity = 1};
        uint32_t count;
        job.request = &request;
        job.power_budgets = 1;
        CHECK_INT(sluice_start(cluster, SLUICE_POLICY_FIRST_FIT, &request, &placement, &running.allocation, &text),
                  SLUICE_OK);
        CHECK_INT(
            sluice_backfill_plan(backfill, cluster, now, &running, 1, &job, 1, 1, &start, &part, 1, &count, &text),
            SLUICE_OK);
        if (start.start_s != (scene->start_s < 0 ? SLUICE_BACKFILL_NO_START : now + scene->start_s) ||
            start.watts != scene->watts || start.waits_for_power != scene->waits)
            fprintf(stderr, "%s: starts after %lld s, %d W, waits for %u\n", scene->name,
                    (long long)(start.start_s - now), start.watts, start.waits_for_power);
        CHECK_INT(start.start_s, scene->start_s < 0 ? SLUICE_BACKFILL_NO_START : now + scene->start_s);
        CHECK_INT(start.watts, scene->watts);
        CHECK_INT(start.waits_for_power, scene->waits);
        sluice_backfill_free(backfill);
        sluice_power_free(power);
        sluice_cluster_free(cluster);
    }
}

/* However many changes there are, a budget has few segments, and what was taken and given back leaves nothing. */
static void test_profiles_are_bounded(void)
{
    const struct sluice_power_budget budget = {.watts = 1000000};
    struct sluice_power *power = new_power(&budget, 1);
    static int64_t starts_s[POWER_SEGMENTS], watts[POWER_SEGMENTS];
    uint64_t random = 5;
    power_reset(power, now);
    for (int sign = 1; sign >= -1; sign -= 2) {
        random = 5;
        for (int i = 0; i < 60000; i++) {
            int32_t from = (int32_t)(next_random(&random, INT32_MAX) >> next_random(&random, 31));
            int32_t length = 1 + (int32_t)(next_random(&random, INT32_MAX) >> next_random(&random, 31));
            power_change(power, 1, sign * (int64_t)(1 + next_random(&random, 500)), from,
                         from > INT32_MAX - length ? INT32_MAX : from + length);
        }
    }
    uint32_t count = sluice_power_profile(power, 0, POWER_SEGMENTS, starts_s, watts);
    CHECK(count > 1000 && count < 2500);
    for (uint32_t i = 0; i < count; i++)
        CHECK_INT(watts[i], 1000000);
    CHECK_INT(sluice_power_profile(power, 1, POWER_SEGMENTS, starts_s, watts), 0);
    sluice_power_free(power);
}

static void test_refusals(void)
{
    const struct sluice_power_hours overlap[] = {{10, 20, 5}, {19, 30, 5}},
                                    beyond[] = {{0, SLUICE_POWER_WEEK_S + 1, 5}};
    const struct {
        struct sluice_power_budget budget;
        enum sluice_error error;
    } wrong[] = {
        {{.watts = -1}, SLUICE_ERROR_RANGE},
        {{.watts = INT64_MAX}, SLUICE_ERROR_RANGE},
        {{.base_watts = INT64_MIN}, SLUICE_ERROR_RANGE},
        {{.lowered_watts = -5}, SLUICE_ERROR_RANGE},
        {{.hours = overlap, .hour_count = 2}, SLUICE_ERROR_INVALID},
        {{.hours = beyond, .hour_count = 1}, SLUICE_ERROR_INVALID},
        {{.hours = overlap, .hour_count = SLUICE_POWER_MAX_HOURS + 1}, SLUICE_ERROR_CAPACITY},
    };
    const struct sluice_power_budget good = {.watts = 77};
    struct sluice_power *power = new_power(&good, 1), *none = NULL;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        CHECK_INT(sluice_power_set(power, &wrong[i].budget, 1, 0, &text), wrong[i].error);
    CHECK_INT(sluice_power_set(power, &good, SLUICE_POWER_MAX_BUDGETS + 1, 0, &text), SLUICE_ERROR_CAPACITY);
    CHECK_INT(sluice_power_watts(power, 0, now), 77); /* as it was */
    CHECK_INT(sluice_power_watts(power, 1, now), 0);
    CHECK_INT(sluice_power_new(0, &none, &text), SLUICE_ERROR_RANGE);
    CHECK_INT(sluice_power_new(SLUICE_MAX_NODES + 1, &none, &text), SLUICE_ERROR_RANGE);
    struct sluice_cluster *cluster = new_cluster();
    struct sluice_backfill *backfill = new_backfill(power);
    const struct sluice_request request = {.gpus = 1};
    const int32_t watts[][2] = {{-1, 0}, {100, 101}, {SLUICE_POWER_MAX_GPU_WATTS + 1, 0}, {5, -1}};
    for (size_t i = 0; i < sizeof watts / sizeof *watts; i++) {
        struct sluice_backfill_job job = {
            .request = &request, .limit_s = 5, .watts = watts[i][0], .least_watts = watts[i][1]};
        struct sluice_backfill_start start;
        struct sluice_part part;
        uint32_t count;
        CHECK_INT(sluice_backfill_plan(backfill, cluster, now, NULL, 0, &job, 1, 1, &start, &part, 1, &count, &text),
                  SLUICE_ERROR_RANGE);
    }
    sluice_backfill_free(backfill);
    sluice_power_free(power);
    sluice_power_free(NULL);
    sluice_cluster_free(cluster);
}

int main(void)
{
    test_one_job();
    for (uint64_t seed = 1; seed <= 8; seed++) {
        test_no_budget_is_exceeded(seed);
        test_ample_budgets_change_nothing(seed);
    }
    CHECK(lower > 8 && waits > 100 && later > 8);
    test_profiles_are_bounded();
    test_refusals();
    return 0;
}
