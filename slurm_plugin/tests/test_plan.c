/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Plans: what is reserved, what may start next to it, and what happens while a plan is being made. */
#include "check.h"
#include "planner/plan.h"

enum { NODES = 4, GPUS = 8, NOW = 1000000 };

static struct sluice_cluster *cluster;
static struct sluice_planner *planner;
static struct sluice_backfill_running running[64];
static uint32_t running_count;

static void make_cluster(void)
{
    struct sluice_node_shape shape = {.gpu_count = GPUS};
    uint32_t model, id, node;
    running_count = 0;
    CHECK_INT(sluice_cluster_new(&(struct sluice_cluster_config){.max_nodes = NODES}, &cluster, NULL), SLUICE_OK);
    CHECK_INT(sluice_cluster_add_model(cluster, "gpu", &model, NULL), SLUICE_OK);
    for (uint32_t gpu = 0; gpu < GPUS; gpu++)
        shape.gpus[gpu] = (struct sluice_gpu_shape){.model = model, .memory_mib = 80000};
    CHECK_INT(sluice_cluster_add_shape(cluster, &shape, &id, NULL), SLUICE_OK);
    for (uint32_t i = 0; i < NODES; i++)
        CHECK_INT(sluice_cluster_add_node(cluster, id, 64000, 512000, 0, &node, NULL), SLUICE_OK);
    CHECK_INT(sluice_planner_new(&(struct sluice_planner_config){.max_jobs = 256, .max_nodes = NODES}, &planner, NULL),
              SLUICE_OK);
}

static void drop_cluster(void)
{
    sluice_planner_free(planner);
    sluice_cluster_free(cluster);
}

/* Something runs on a node until NOW + end_s. */
static void run(uint32_t node, uint32_t gpus, int64_t end_s)
{
    struct sluice_part part = {.node = node, .gpus = gpus, .cpus_milli = 4000, .host_memory_mib = 1000};
    struct sluice_placement placement = {.parts = &part, .part_capacity = 1, .part_count = 1};
    CHECK_INT(sluice_commit(cluster, &placement, &running[running_count].allocation, NULL), SLUICE_OK);
    running[running_count++].end_s = NOW + end_s;
}

static struct sluice_plan_job job(uint32_t id, int64_t gpus, int64_t limit_s)
{
    return (struct sluice_plan_job){
        .job_id = id, .limit_s = limit_s, .request = {.gpus = gpus, .cpus_milli = 4000, .host_memory_mib = 1000}};
}

static struct sluice_plan *plan_at(int64_t now_s, const struct sluice_plan_job *jobs, uint32_t count)
{
    struct sluice_plan *plan = NULL;
    struct sluice_error_text text = {{0}};
    sluice_planner_begin(planner);
    CHECK_INT(
        sluice_planner_plan(planner, cluster, now_s, running, running_count, jobs, count, 8, NULL, 0, &plan, &text),
        SLUICE_OK);
    return plan;
}

static struct sluice_plan *plan(const struct sluice_plan_job *jobs, uint32_t count)
{
    return plan_at(NOW, jobs, count);
}

static bool allowed(const struct sluice_plan *made, uint32_t id, int64_t limit_s, uint32_t node, uint32_t gpus)
{
    struct sluice_part part = {.node = node, .gpus = gpus, .cpus_milli = 4000, .host_memory_mib = 1000};
    return sluice_plan_allows_start(made, &(struct sluice_plan_question){id, limit_s, NOW, 0, NULL}, &part, 1);
}

static void no_plan_allows_everything(void)
{
    uint64_t words = 3;
    CHECK(!sluice_plan_acquire(NOW));
    CHECK(allowed(NULL, 1, 0, 0, 1));
    sluice_plan_keep_out(NULL, &(struct sluice_plan_question){1, 0, NOW, 0, NULL}, true, &words, 1);
    CHECK_INT(words, 3);
    CHECK_INT(sluice_plan_ask(NULL, 1).state, SLUICE_PLAN_UNKNOWN);
    sluice_plan_release(NULL);
}

static void a_reserved_start_is_protected(void)
{
    make_cluster();
    for (uint32_t node = 0; node < NODES; node++)
        run(node, 0x0f, node == 2 ? 600 : 5000);
    struct sluice_plan_job jobs[] = {job(1, 8, 3600), job(2, 2, 300)};
    jobs[0].rank = 5;
    struct sluice_plan *made = plan(jobs, 2);
    struct sluice_plan_answer answer = sluice_plan_ask(made, 1);
    CHECK_INT(answer.state, SLUICE_PLAN_LATER);
    CHECK_INT(answer.start_s, NOW + 600);
    CHECK_INT(answer.parts[0].node, 2);
    CHECK_INT(sluice_plan_ask(made, 2).state, SLUICE_PLAN_NOW);

    CHECK(allowed(made, 9, 600, 2, 0x10)); /* ends in time */
    CHECK(!allowed(made, 9, 601, 2, 0x10));
    CHECK(!allowed(made, 9, 0, 2, 0x10)); /* no limit */
    CHECK(allowed(made, 9, 601, 1, 0x10));
    CHECK(allowed(made, 1, 3600, 2, 0xff)); /* itself */
    struct sluice_part part = {.node = 2, .gpus = 0x10, .cpus_milli = 4000, .host_memory_mib = 1000};
    CHECK(!sluice_plan_allows_start(made, &(struct sluice_plan_question){9, 601, NOW, 5, NULL}, &part, 1));
    CHECK(sluice_plan_allows_start(made, &(struct sluice_plan_question){9, 601, NOW, 6, NULL}, &part, 1));

    uint64_t words = 15;
    sluice_plan_keep_out(made, &(struct sluice_plan_question){9, 700, NOW, 0, NULL}, false, &words, 1);
    CHECK_INT(words, 15 & ~4);
    words = 15;
    sluice_plan_keep_out(made, &(struct sluice_plan_question){9, 500, NOW, 0, NULL}, true, &words, 1);
    CHECK_INT(words, 15);
    sluice_plan_release(made);
    drop_cluster();
}

static void a_start_reserved_for_a_later_job_does_not_count(void)
{
    make_cluster();
    for (uint32_t node = 0; node < NODES; node++)
        run(node, 0x0f, node == 2 ? 600 : 5000);
    struct sluice_plan_job jobs[] = {job(5, 8, 3600)};
    jobs[0].place = (struct sluice_plan_place){.tier = 1, .priority = 100, .job_id = 5};
    struct sluice_plan *made = plan(jobs, 1);
    CHECK_INT(sluice_plan_ask(made, 5).parts[0].node, 2);
    const struct {
        struct sluice_plan_place place;
        bool allowed;
    } cases[] = {{{1, 100, 9}, false}, {{1, 100, 4}, true}, {{1, 101, 9}, true},
                 {{1, 99, 4}, false},  {{2, 1, 9}, true},   {{0, 999, 4}, false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct sluice_part part = {.node = 2, .gpus = 0x10, .cpus_milli = 4000, .host_memory_mib = 1000};
        const struct sluice_plan_question question = {9, 7000, NOW, 0, &cases[i].place};
        uint64_t words = 15;
        CHECK_INT(sluice_plan_allows_start(made, &question, &part, 1), cases[i].allowed);
        sluice_plan_keep_out(made, &question, true, &words, 1);
        CHECK_INT(words, cases[i].allowed ? 15 : 15 & ~4);
    }
    sluice_plan_release(made);
    drop_cluster();
}

static void what_a_reservation_leaves_may_be_used(void)
{
    make_cluster();
    run(0, 0xff, 600);
    for (uint32_t node = 1; node < NODES; node++)
        run(node, 0xff, 5000);
    struct sluice_plan_job jobs[] = {job(1, 4, 3600)};
    struct sluice_plan *made = plan(jobs, 1);
    CHECK_INT(sluice_plan_ask(made, 1).start_s, NOW + 600);
    CHECK_INT(sluice_plan_ask(made, 1).parts[0].gpus, 0x0f);
    CHECK(allowed(made, 9, 7000, 0, 0x10));
    CHECK(!allowed(made, 9, 7000, 0, 0x08));
    struct sluice_part wide = {.node = 0, .cpus_milli = 61000};
    CHECK(!sluice_plan_allows_start(made, &(struct sluice_plan_question){9, 7000, NOW, 0, NULL}, &wide, 1));
    wide.cpus_milli = 60000;
    CHECK(sluice_plan_allows_start(made, &(struct sluice_plan_question){9, 7000, NOW, 0, NULL}, &wide, 1));
    uint64_t words = 1;
    sluice_plan_keep_out(made, &(struct sluice_plan_question){9, 7000, NOW, 0, NULL}, false, &words, 1);
    CHECK_INT(words, 1); /* four other GPUs are free */
    sluice_plan_keep_out(made, &(struct sluice_plan_question){9, 7000, NOW, 0, NULL}, true, &words, 1);
    CHECK_INT(words, 0);
    sluice_plan_release(made);
    drop_cluster();
}

static void compute_that_a_reservation_leaves_may_be_claimed(void)
{
    make_cluster();
    run(0, 0xfe, 5000);
    for (uint32_t node = 1; node < NODES; node++)
        run(node, 0xff, 5000);
    struct sluice_part part = {.node = 0, .gpus = 1, .gpu_memory_mib = 1000, .gpu_compute_percent = 60};
    struct sluice_placement placement = {.parts = &part, .part_capacity = 1, .part_count = 1};
    CHECK_INT(sluice_commit(cluster, &placement, &running[running_count].allocation, NULL), SLUICE_OK);
    running[running_count++].end_s = NOW + 600;
    struct sluice_plan_job jobs[] = {
        {.job_id = 1,
         .limit_s = 3600,
         .request = {.gpus = 1, .gpu_memory_mib = 1000, .gpu_compute_percent = 70, .cpus_milli = 1000}}};
    struct sluice_plan *made = plan(jobs, 1);
    CHECK_INT(sluice_plan_ask(made, 1).start_s, NOW + 600);
    CHECK_INT(sluice_plan_ask(made, 1).parts[0].gpu_compute_percent, 70);
    const struct sluice_plan_question question = {9, 7000, NOW, 0, NULL};
    part.gpu_compute_percent = 30;
    CHECK(sluice_plan_allows_start(made, &question, &part, 1));
    part.gpu_compute_percent = 31;
    CHECK(!sluice_plan_allows_start(made, &question, &part, 1));
    sluice_plan_release(made);
    drop_cluster();
}

static void starts_use_up_what_is_left_and_free_what_was_theirs(void)
{
    make_cluster();
    run(0, 0xff, 600);
    for (uint32_t node = 1; node < NODES; node++)
        run(node, 0xff, 5000);
    struct sluice_plan_job jobs[] = {job(1, 4, 3600)};
    struct sluice_plan *made = plan(jobs, 1), *held;
    sluice_plan_publish(planner, made, 60);
    held = sluice_plan_acquire(NOW);
    CHECK(held == made);
    struct sluice_part taken = {.node = 0, .gpus = 0x30, .cpus_milli = 4000, .host_memory_mib = 1000};
    CHECK(allowed(held, 9, 7000, 0, 0x10));
    sluice_plan_job_started(8, 0, &taken, 1, NOW + 7000, NULL);
    CHECK(!allowed(held, 9, 7000, 0, 0x10));
    CHECK(allowed(held, 9, 7000, 0, 0x40));
    CHECK(!allowed(held, 9, 7000, 0, 0x01));
    taken.gpus = 0x0f;
    sluice_plan_job_started(1, 0, &taken, 1, NOW + 3600, NULL); /* the reserved one itself, early */
    CHECK(allowed(held, 9, 7000, 0, 0x01));
    CHECK_INT(sluice_plan_ask(held, 1).state, SLUICE_PLAN_UNKNOWN);
    sluice_plan_release(held);
    sluice_plan_invalidate();
    CHECK(!sluice_plan_acquire(NOW));
    drop_cluster();
}

static void reservations_never_slip_when_others_come(void)
{
    make_cluster();
    for (uint32_t node = 0; node < NODES; node++)
        run(node, 0xff, 600 + node);
    struct sluice_plan_job jobs[] = {job(1, 8, 3600), job(2, 8, 100)};
    sluice_plan_release(plan(jobs, 1));
    jobs[0] = job(3, 8, 3600); /* before it in the order */
    jobs[1] = job(1, 8, 3600);
    struct sluice_plan *made = plan_at(NOW + 1, jobs, 2);
    CHECK_INT(sluice_plan_ask(made, 1).start_s, NOW + 600);
    CHECK_INT(sluice_plan_ask(made, 3).start_s, NOW + 601);
    sluice_plan_release(made);
    CHECK_INT(sluice_plan_counts().slipped, 0);
    drop_cluster();
}

/* Two GPUs of a node come free early. The small job, whose start is reserved there, does not keep the large one before
 * it from being planned earlier. */
static void a_small_reservation_is_in_no_large_jobs_way(void)
{
    make_cluster();
    for (uint32_t node = 0; node < NODES; node++)
        run(node, 0xff, 600 + 100 * node);
    struct sluice_plan_job jobs[] = {job(1, 8, 3600), job(2, 1, 3600)};
    struct sluice_plan *made = plan(jobs, 2);
    CHECK_INT(sluice_plan_ask(made, 1).start_s, NOW + 600);
    CHECK_INT(sluice_plan_ask(made, 2).start_s, NOW + 700);
    sluice_plan_release(made);
    running[1].end_s = NOW + 300; /* its time limit was cut */
    made = plan_at(NOW + 1, jobs, 2);
    CHECK_INT(sluice_plan_ask(made, 1).start_s, NOW + 300);
    CHECK_INT(sluice_plan_ask(made, 2).start_s, NOW + 600);
    sluice_plan_release(made);
    CHECK_INT(sluice_plan_counts().slipped, 0);
    drop_cluster();
}

static void tasks_of_an_array_are_told_apart(void)
{
    make_cluster();
    for (uint32_t node = 1; node < NODES; node++)
        run(node, 0xff, 600);
    struct sluice_plan_job jobs[] = {job(7, 8, 60), job(7, 8, 60), job(7, 8, 60)};
    struct sluice_plan *made = plan(jobs, 3);
    CHECK_INT(sluice_plan_ask(made, 7).state, SLUICE_PLAN_NOW);
    CHECK_INT(sluice_plan_ask(made, 7).parts[0].node, 0);
    sluice_plan_publish(planner, made, 60);
    struct sluice_plan *held = sluice_plan_acquire(NOW);
    struct sluice_part part = sluice_plan_ask(held, 7).parts[0];
    sluice_plan_job_started(99, 7, &part, 1, NOW + 60, NULL); /* the task got an id of its own */
    CHECK_INT(sluice_plan_ask(held, 7).state, SLUICE_PLAN_LATER);
    CHECK_INT(sluice_plan_ask(held, 7).start_s, NOW + 60);
    sluice_plan_release(held);
    drop_cluster();
}

static void a_group_starts_together_or_waits(void)
{
    make_cluster();
    run(0, 0xff, 600);
    struct sluice_plan_job jobs[] = {job(1, 8, 60), job(2, 8, 60), job(3, 8, 60), job(4, 8, 60)};
    for (uint32_t i = 0; i < 4; i++)
        jobs[i].group = 5;
    struct sluice_plan *made = plan(jobs, 4);
    for (uint32_t id = 1; id <= 4; id++) {
        CHECK_INT(sluice_plan_ask(made, id).state, SLUICE_PLAN_LATER);
        CHECK_INT(sluice_plan_ask(made, id).start_s, NOW + 600);
    }
    sluice_plan_release(made);
    made = plan(jobs, 3);
    for (uint32_t id = 1; id <= 3; id++) {
        CHECK_INT(sluice_plan_ask(made, id).state, SLUICE_PLAN_NOW);
        CHECK(sluice_plan_ask(made, id).exact);
    }
    CHECK(!allowed(made, 9, 1, 1, 1)); /* the place of one that starts this moment */
    sluice_plan_release(made);
    drop_cluster();
}

static void nobody_starts_on_nodes_that_are_busy(void)
{
    make_cluster();
    struct sluice_plan_job jobs[] = {job(1, 8, 60), job(2, 8, 60), job(3, 8, 60)};
    jobs[1].group = jobs[2].group = 1;
    uint64_t busy = 2;
    struct sluice_plan *made = NULL;
    sluice_planner_begin(planner);
    CHECK_INT(sluice_planner_plan(planner, cluster, NOW, NULL, 0, jobs, 3, 8, &busy, 1, &made, NULL), SLUICE_OK);
    CHECK_INT(sluice_plan_ask(made, 1).state, SLUICE_PLAN_NOW);
    for (uint32_t id = 2; id <= 3; id++) { /* one of the two is on node 1: neither starts */
        CHECK_INT(sluice_plan_ask(made, id).state, SLUICE_PLAN_LATER);
        CHECK_INT(sluice_plan_ask(made, id).start_s, NOW + 1);
    }
    CHECK(!allowed(made, 9, 60, 1, 1));
    sluice_plan_release(made);
    drop_cluster();
}

static void what_starts_while_a_plan_is_made_is_seen(void)
{
    make_cluster();
    struct sluice_plan_job jobs[] = {job(1, 8, 60), job(2, 8, 60)};
    struct sluice_plan *made = plan(jobs, 2);
    struct sluice_part part = {.node = 0, .gpus = 1, .cpus_milli = 1000};
    sluice_plan_job_started(77, 0, &part, 1, NOW + 999, NULL);
    sluice_plan_publish(planner, made, 60);
    struct sluice_plan *held = sluice_plan_acquire(NOW);
    CHECK_INT(sluice_plan_ask(held, 1).state, SLUICE_PLAN_UNKNOWN);
    CHECK_INT(sluice_plan_ask(held, 2).state, SLUICE_PLAN_NOW);
    sluice_plan_release(held);

    made = plan(jobs, 2);
    sluice_plan_invalidate(); /* the nodes' configuration changed */
    sluice_plan_publish(planner, made, 60);
    CHECK(!sluice_plan_acquire(NOW));
    drop_cluster();
}

static void an_old_plan_is_not_trusted(void)
{
    make_cluster();
    struct sluice_plan_job jobs[] = {job(1, 8, 60)};
    sluice_plan_publish(planner, plan(jobs, 1), 30);
    struct sluice_plan *held = sluice_plan_acquire(NOW + 30);
    CHECK(held);
    sluice_plan_release(held);
    CHECK(!sluice_plan_acquire(NOW + 31));
    drop_cluster();
}

static void entries_are_in_the_order_of_planning(void)
{
    make_cluster();
    struct sluice_plan_job jobs[] = {job(5, 1, 60), job(4, 1, 60)};
    struct sluice_plan *made = plan(jobs, 2);
    struct sluice_plan_answer answer;
    uint32_t id, group;
    CHECK(sluice_plan_entry(made, 0, &id, &group, &answer));
    CHECK_INT(id, 5);
    CHECK(sluice_plan_entry(made, 1, &id, NULL, &answer));
    CHECK_INT(id, 4);
    CHECK(!sluice_plan_entry(made, 2, &id, &group, &answer));
    sluice_plan_release(made);
    drop_cluster();
}

int main(void)
{
    no_plan_allows_everything();
    a_reserved_start_is_protected();
    a_start_reserved_for_a_later_job_does_not_count();
    what_a_reservation_leaves_may_be_used();
    compute_that_a_reservation_leaves_may_be_claimed();
    starts_use_up_what_is_left_and_free_what_was_theirs();
    reservations_never_slip_when_others_come();
    a_small_reservation_is_in_no_large_jobs_way();
    tasks_of_an_array_are_told_apart();
    a_group_starts_together_or_waits();
    nobody_starts_on_nodes_that_are_busy();
    what_starts_while_a_plan_is_made_is_seen();
    an_old_plan_is_not_trusted();
    entries_are_in_the_order_of_planning();
    return 0;
}
