/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The planner publishes plans while a hook asks them and reports starts; for ThreadSanitizer. */
#include "check.h"
#include "planner/plan.h"

#include <pthread.h>
#include <stdatomic.h>

enum { NODES = 4, GPUS = 8, NOW = 1000000, ROUNDS = 300 };

static atomic_bool done;

static void *ask(void *argument)
{
    uint64_t asked = 0;
    (void)argument;
    for (uint32_t round = 0; !atomic_load(&done); round++) {
        uint32_t id = 1 + round % 20;
        struct sluice_plan *plan = sluice_plan_acquire(NOW);
        struct sluice_plan_question question = {.job_id = id, .limit_s = 100, .now_s = NOW};
        struct sluice_part part = {.node = round % NODES, .gpus = 1, .cpus_milli = 1000, .host_memory_mib = 1};
        uint64_t words = 15;
        struct sluice_plan_answer answer = sluice_plan_ask(plan, id);
        asked += answer.part_count ? answer.parts[0].gpus : 0;
        sluice_plan_keep_out(plan, &question, false, &words, 1);
        if (sluice_plan_allows_start(plan, &question, &part, 1))
            sluice_plan_job_started(id, round % 3 ? 0 : id, &part, 1, NOW + 100, NULL);
        sluice_plan_release(plan);
        if (round % 1000 == 999)
            sluice_plan_invalidate();
        asked += sluice_plan_counts().plans;
    }
    CHECK(asked > 0);
    return NULL;
}

int main(void)
{
    struct sluice_cluster *cluster;
    struct sluice_planner *planner;
    struct sluice_node_shape shape = {.gpu_count = GPUS};
    struct sluice_plan_job jobs[20];
    uint32_t model, id, node;
    pthread_t hook;
    CHECK_INT(sluice_cluster_new(&(struct sluice_cluster_config){.max_nodes = NODES}, &cluster, NULL), SLUICE_OK);
    CHECK_INT(sluice_cluster_add_model(cluster, "gpu", &model, NULL), SLUICE_OK);
    for (uint32_t gpu = 0; gpu < GPUS; gpu++)
        shape.gpus[gpu] = (struct sluice_gpu_shape){.model = model, .memory_mib = 80000};
    CHECK_INT(sluice_cluster_add_shape(cluster, &shape, &id, NULL), SLUICE_OK);
    for (uint32_t i = 0; i < NODES; i++)
        CHECK_INT(sluice_cluster_add_node(cluster, id, 64000, 512000, 0, &node, NULL), SLUICE_OK);
    for (uint32_t i = 0; i < 20; i++)
        jobs[i] = (struct sluice_plan_job){
            .job_id = i + 1, .limit_s = 60 + i, .group = i > 15 ? 1 : 0, .request = {.gpus = 1 + i % GPUS}};
    CHECK_INT(sluice_planner_new(&(struct sluice_planner_config){.max_jobs = 64, .max_nodes = NODES}, &planner, NULL),
              SLUICE_OK);
    CHECK_INT(pthread_create(&hook, NULL, ask, NULL), 0);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        struct sluice_plan *plan;
        sluice_planner_begin(planner);
        CHECK_INT(sluice_planner_plan(planner, cluster, NOW, NULL, 0, jobs, 20, 8, NULL, 0, &plan, NULL), SLUICE_OK);
        sluice_plan_publish(planner, plan, 60);
    }
    atomic_store(&done, true);
    CHECK_INT(pthread_join(hook, NULL), 0);
    CHECK(sluice_plan_counts().plans > 0);
    sluice_planner_free(planner);
    sluice_cluster_free(cluster);
    return 0;
}
