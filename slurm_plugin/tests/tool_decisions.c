/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * A churn of a cluster with recorded decisions, for the tests of their replay:
 *
 *     tool_decisions FOLDER SEED STEPS MAX_FILE_BYTES RING_BYTES
 *
 * Places, starts, ends, resizes, drains and breaks at random, records every decision, and prints the counters.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "decisions/decisions.h"

enum { NODES = 70, MAX_JOBS = 4096, PARTS = 64 };

static uint64_t state;

static uint32_t draw(uint32_t below)
{
    state ^= state << 13; /* xorshift64 (G. Marsaglia, 2003) */
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 33) % below;
}

static void must(enum sluice_error error, const struct sluice_error_text *text)
{
    if (error != SLUICE_OK) {
        fprintf(stderr, "%s\n", text->text);
        exit(1);
    }
}

struct job {
    uint64_t allocation;
    struct sluice_part parts[PARTS];
    uint32_t part_count;
};

static struct sluice_cluster *cluster;
static struct sluice_decision_recorder *recorder;
static struct sluice_decision_topology *topology;
static struct job jobs[MAX_JOBS];
static uint32_t job_count;

static void make_cluster(void)
{
    struct sluice_error_text text;
    must(sluice_cluster_new(&(struct sluice_cluster_config){.max_nodes = NODES, .max_allocations = MAX_JOBS}, &cluster,
                            &text),
         &text);
    topology = sluice_decision_topology_new();
    const char *names[] = {"h100", "a100"};
    uint32_t shapes[3], switches[2], id;
    for (uint32_t i = 0; i < 2; i++) {
        must(sluice_cluster_add_model(cluster, names[i], &id, &text), &text);
        sluice_decision_note_model(topology, names[i]);
    }
    for (uint32_t i = 0; i < 3; i++) {
        struct sluice_node_shape shape = {.gpu_count = i == 0 ? 8 : i == 1 ? 4 : 0};
        for (uint32_t gpu = 0; gpu < shape.gpu_count; gpu++) {
            shape.gpus[gpu] = (struct sluice_gpu_shape){.model = i,
                                                        .capability = i ? 800 : 900,
                                                        .memory_mib = i ? 40960 : 81920,
                                                        .link_domain = (uint8_t)(gpu / 4),
                                                        .numa_node = (uint8_t)(gpu / 4),
                                                        .near_nic = gpu % 2 == 0};
            for (uint32_t other = 0; other < shape.gpu_count; other++)
                shape.links[gpu][other] = gpu == other ? 0 : gpu / 4 == other / 4 ? 90 : 20;
        }
        if (i == 0) {
            shape.nics = (struct sluice_nic_groups){.gpu_count = 8, .nic_count = 10};
            for (uint8_t gpu = 0; gpu < 8; gpu++)
                shape.nics.gpu_group[gpu] = gpu;
            for (uint8_t nic = 0; nic < 10; nic++) {
                shape.nics.nic_group[nic] = nic;
                shape.nics.nic_kind[nic] = nic > 7;
                shape.nics.nic_plane[nic] = nic > 7 ? 0 : 1 + nic % 2;
            }
        }
        must(sluice_cluster_add_shape(cluster, &shape, &shapes[i], &text), &text);
        sluice_decision_note_shape(topology, &shape);
    }
    for (uint32_t i = 0; i < 2; i++) {
        must(sluice_cluster_add_switch(cluster, 0, &switches[i], &text), &text);
        sluice_decision_note_switch(topology, 0);
    }
    for (uint32_t node = 0; node < NODES; node++) {
        char name[32];
        uint32_t shape = shapes[node < 40 ? 0 : node < 65 ? 1 : 2], at = switches[node % 2];
        snprintf(name, sizeof name, "node-%03u", node);
        must(sluice_cluster_add_node(cluster, shape, 64000, 512000, at, &id, &text), &text);
        sluice_decision_note_node(topology, name, shape, 64000, 512000, at);
    }
    uint32_t rank[NODES];
    for (uint32_t node = 0; node < NODES; node++)
        rank[node] = NODES - 1 - node;
    must(sluice_cluster_set_order(cluster, rank, NODES, &text), &text);
    sluice_decision_note_order(topology, rank, NODES);
    struct sluice_request usual[] = {
        {.gpus = 1}, {.gpus = 8, .cpus_milli = 8000}, {.gpus = 1, .gpu_memory_mib = 10240}};
    uint32_t weights[] = {50, 20, 30};
    must(sluice_cluster_set_workload(cluster, usual, weights, 3, &text), &text);
    sluice_decision_note_workload(topology, usual, weights, 3);
    must(sluice_decision_set_topology(recorder, topology, cluster, &text), &text);
}

static struct sluice_request random_request(uint64_t *allowed)
{
    struct sluice_request request = {.gpus = 1 + draw(8),
                                     .cpus_milli = 1000 * (int64_t)(1 + draw(16)),
                                     .host_memory_mib = 1024 * (int64_t)draw(64),
                                     .seed = draw(1000)};
    if (draw(3) == 0) {
        request.gpus = 1;
        request.gpu_memory_mib = 1024 * (int64_t)(1 + draw(30));
        request.gpu_compute_percent = draw(2) ? 0 : 10 * (1 + draw(10));
    } else if (draw(6) == 0) {
        request.gpus = 0;
    } else if (draw(6) == 0) {
        request.nodes_min = 2 + draw(3);
        request.segment = request.nodes_min % 2 || draw(2) ? 0 : 2;
        request.switch_layout = draw(2) ? SLUICE_SPREAD : SLUICE_LAYOUT_POLICY;
    } else if (draw(12) == 0) {
        request.nodes_min = 2 + draw(3);
        request.one_switch = SLUICE_REQUIRED;
        request.switch_level = 1; /* all of the cluster's are lower */
        request.lower_switches = 1 + draw(2);
    } else if (draw(8) == 0) {
        request.flags = SLUICE_EXCLUSIVE;
    }
    if (request.gpus && draw(5) == 0) {
        request.nics = draw(2) ? request.gpus : 1;
        request.nic_kinds = draw(3) == 0;
        request.nic_planes = (enum sluice_layout)draw(3);
    }
    if (draw(30) == 0) /* all that was appended to decisions later, in one */
        request = (struct sluice_request){.gpus = 1,
                                          .gpu_memory_mib = 1024,
                                          .gpu_compute_percent = 10,
                                          .nodes_min = 4,
                                          .segment = 2,
                                          .nics_per_gpu = 2,
                                          .nic_kinds = 1,
                                          .nic_planes = SLUICE_PACK};
    if (request.gpus && draw(4) == 0)
        request.models = 1u << draw(2);
    if (request.gpus && draw(5) == 0)
        request.one_link_domain = (enum sluice_wish)draw(3);
    if (draw(3) == 0) { /* some kinds of bitmap */
        uint32_t kind = draw(3);
        for (uint32_t word = 0; word < 2; word++)
            allowed[word] = kind == 0   ? 0
                            : kind == 1 ? UINT64_MAX
                                        : ((uint64_t)draw(UINT32_MAX) << 32 | draw(UINT32_MAX));
        allowed[1] &= (UINT64_C(1) << (NODES - 64)) - 1;
        request.allowed = allowed;
        request.allowed_words = 2;
    }
    return request;
}

static void changed(const struct sluice_part *parts, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        sluice_decision_node_changed(recorder, parts[i].node);
}

static void try_job(uint32_t id)
{
    static const enum sluice_policy policies[] = {SLUICE_POLICY_SLUICE, SLUICE_POLICY_SLUICE,
                                                  SLUICE_POLICY_FGD,    SLUICE_POLICY_BEST_FIT,
                                                  SLUICE_POLICY_RANDOM, SLUICE_POLICY_LEAST_LOADED};
    struct sluice_error_text text;
    uint64_t allowed[2];
    struct sluice_request request = random_request(allowed);
    struct job *job = &jobs[job_count];
    struct sluice_placement placement = {.parts = job->parts, .part_capacity = PARTS};
    enum sluice_policy policy = policies[draw(6)];
    enum sluice_error verdict = sluice_place(cluster, policy, &request, &placement, &text);
    if (verdict != SLUICE_OK && verdict != SLUICE_ERROR_NO_PLACE && verdict != SLUICE_ERROR_NEVER)
        must(verdict, &text);
    struct sluice_decision_job facts = {.id = id,
                                        .array_task = UINT32_MAX,
                                        .uid = 1000,
                                        .submit_s = 1800000000,
                                        .limit_s = -1,
                                        .account = "physics",
                                        .partition = "main"};
    sluice_decision_placed(
        recorder,
        &(struct sluice_decision){.job = facts,
                                  .mode = SLUICE_DECISION_RUN_NOW,
                                  .outcome = verdict == SLUICE_OK ? SLUICE_DECISION_USED : SLUICE_DECISION_REFUSED,
                                  .policy = policy,
                                  .request = &request,
                                  .verdict = verdict,
                                  .placement = &placement});
    if (verdict != SLUICE_OK || job_count + 1 == MAX_JOBS ||
        sluice_commit(cluster, &placement, &job->allocation, &text) != SLUICE_OK)
        return;
    job->part_count = placement.part_count;
    changed(job->parts, job->part_count);
    uint32_t gpus[2 * PARTS]; /* of each part the first GPU has another role than the others */
    for (uint32_t i = 0; i < job->part_count; i++) {
        gpus[2 * i] = job->parts[i].gpus & -job->parts[i].gpus;
        gpus[2 * i + 1] = job->parts[i].gpus & ~gpus[2 * i];
    }
    const struct sluice_decision_roles roles = {.count = id % 3 ? 0 : 2, .names = {"learner", "actor"}, .gpus = gpus};
    sluice_decision_started(recorder, &facts, job->parts, job->part_count, &roles);
    job_count++;
}

static void end_job(uint32_t which)
{
    struct sluice_error_text text;
    must(sluice_release(cluster, jobs[which].allocation, &text), &text);
    changed(jobs[which].parts, jobs[which].part_count);
    jobs[which] = jobs[--job_count];
}

static void disturb(void)
{
    struct sluice_error_text text;
    uint32_t node = draw(NODES);
    switch (draw(4)) {
    case 0:
        must(sluice_node_set_state(cluster, node, (enum sluice_node_state)draw(3), &text), &text);
        break;
    case 1:
        must(sluice_node_set_state(cluster, node, SLUICE_NODE_UP, &text), &text);
        break;
    case 2:
        if (node < 65)
            must(sluice_gpu_set_health(cluster, node, draw(4), draw(2), &text), &text);
        break;
    default:
        if (node < 65)
            must(sluice_gpu_set_utilisation(cluster, node, draw(4), draw(100), &text), &text);
    }
    sluice_decision_node_changed(recorder, node);
}

int main(int count, char **words)
{
    if (count != 6) {
        fprintf(stderr, "usage: tool_decisions FOLDER SEED STEPS MAX_FILE_BYTES RING_BYTES\n");
        return 2;
    }
    struct sluice_error_text text;
    state = strtoull(words[2], NULL, 10) * UINT64_C(0x9e3779b97f4a7c15) + 1;
    must(sluice_decision_new(&(struct sluice_decision_config){.folder = words[1],
                                                              .max_file_bytes = strtoull(words[4], NULL, 10),
                                                              .max_files = 4,
                                                              .ring_bytes = strtoull(words[5], NULL, 10)},
                             &recorder, &text),
         &text);
    make_cluster();
    uint32_t steps = (uint32_t)strtoul(words[3], NULL, 10);
    for (uint32_t step = 1; step <= steps; step++) {
        if (draw(10) == 0)
            disturb();
        else if (job_count > 150 || (job_count > 0 && draw(3) == 0))
            end_job(draw(job_count));
        else
            try_job(step);
        if (step % 1000 == 0) /* the topology may be given again at any time */
            must(sluice_decision_set_topology(recorder, topology, cluster, &text), &text);
        if (step % 300 == 0)
            sluice_decision_flush(recorder, 5000);
    }
    sluice_decision_planned(recorder, &(struct sluice_decision_plan){.job_id = steps, .start_s = -1, .reason = "x"});
    struct sluice_decision_counters counters;
    if (!sluice_decision_flush(recorder, 10000))
        return 1;
    sluice_decision_read_counters(recorder, &counters);
    printf("recorded %llu repeated %llu dropped %llu failed %llu\n", (unsigned long long)counters.recorded,
           (unsigned long long)counters.repeated, (unsigned long long)counters.dropped,
           (unsigned long long)counters.failed);
    sluice_decision_free(recorder);
    sluice_decision_topology_free(topology);
    sluice_cluster_free(cluster);
    return 0;
}
