/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Decisions (decisions/decisions.h): threads at the same time, bounds, repeats. What the files say is read and
 * replayed in tests/unit/explain/test_decisions.py. */
#include <dirent.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "decisions/decisions.h"

enum { DECISIONS = 3000, PLANS = 20000 };

static char folder[64];
static struct sluice_cluster *cluster;
static struct sluice_decision_topology *topology;

static struct sluice_decision_recorder *new_recorder(uint64_t ring_bytes, uint64_t file_bytes)
{
    struct sluice_decision_recorder *recorder = NULL;
    struct sluice_error_text text;
    snprintf(folder, sizeof folder, "/tmp/test_decision.%d", (int)getpid());
    CHECK_INT(sluice_decision_new(
                  &(struct sluice_decision_config){
                      .folder = folder, .ring_bytes = ring_bytes, .max_file_bytes = file_bytes, .max_files = 3},
                  &recorder, &text),
              SLUICE_OK);
    return recorder;
}

static uint32_t remove_files(void)
{
    uint32_t files = 0;
    DIR *listed = opendir(folder);
    for (const struct dirent *entry; listed && (entry = readdir(listed));) {
        char path[512];
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        files += entry->d_name[0] != '.' && unlink(path) == 0;
    }
    if (listed)
        closedir(listed);
    rmdir(folder);
    return files;
}

static void make_cluster(void)
{
    struct sluice_node_shape shape = {.gpu_count = 8};
    uint32_t id;
    CHECK_INT(sluice_cluster_new(&(struct sluice_cluster_config){.max_nodes = 16}, &cluster, NULL), SLUICE_OK);
    topology = sluice_decision_topology_new();
    CHECK_INT(sluice_cluster_add_model(cluster, "h100", &id, NULL), SLUICE_OK);
    sluice_decision_note_model(topology, "h100");
    for (uint32_t gpu = 0; gpu < 8; gpu++)
        shape.gpus[gpu].memory_mib = 81920;
    CHECK_INT(sluice_cluster_add_shape(cluster, &shape, &id, NULL), SLUICE_OK);
    sluice_decision_note_shape(topology, &shape);
    for (int node = 0; node < 16; node++) {
        CHECK_INT(sluice_cluster_add_node(cluster, 0, 64000, 512000, 0, &id, NULL), SLUICE_OK);
        sluice_decision_note_node(topology, "n", 0, 64000, 512000, 0);
    }
}

static struct sluice_decision decision_of(uint32_t job, const struct sluice_request *request,
                                          struct sluice_placement *placement)
{
    enum sluice_error verdict = sluice_place(cluster, SLUICE_POLICY_SLUICE, request, placement, NULL);
    return (struct sluice_decision){.job = {.id = job, .array_task = UINT32_MAX, .account = "physics"},
                                    .outcome = verdict == SLUICE_OK ? SLUICE_DECISION_USED : SLUICE_DECISION_REFUSED,
                                    .policy = SLUICE_POLICY_SLUICE,
                                    .request = request,
                                    .verdict = verdict,
                                    .placement = placement};
}

static void *plan(void *argument)
{
    for (uint32_t i = 1; i <= PLANS; i++)
        sluice_decision_planned(argument, &(struct sluice_decision_plan){
                                              .job_id = i, .planned_s = i, .start_s = i * 10, .reason = "reserved"});
    return NULL;
}

static void *watch(void *argument)
{
    for (int i = 0; i < 1000; i++) {
        struct sluice_decision_counters counters;
        sluice_decision_read_counters(argument, &counters);
        CHECK(counters.recorded <= DECISIONS * 20 + PLANS);
    }
    return NULL;
}

/* The hook, the planner, someone who looks, and the recorder's own thread. */
static void test_threads(uint64_t ring_bytes, bool whole)
{
    struct sluice_decision_recorder *recorder = new_recorder(ring_bytes, 64 * 1024);
    pthread_t planner, watcher;
    CHECK_INT(sluice_decision_set_topology(recorder, topology, cluster, NULL), SLUICE_OK);
    CHECK_INT(pthread_create(&planner, NULL, plan, recorder), 0);
    CHECK_INT(pthread_create(&watcher, NULL, watch, recorder), 0);
    for (uint32_t i = 1; i <= DECISIONS; i++) {
        struct sluice_part parts[4];
        struct sluice_placement placement = {.parts = parts, .part_capacity = 4};
        struct sluice_request request = {.gpus = 1 + i % 8};
        struct sluice_decision decision = decision_of(i, &request, &placement);
        uint64_t allocation;
        sluice_decision_placed(recorder, &decision);
        if (decision.verdict == SLUICE_OK && sluice_commit(cluster, &placement, &allocation, NULL) == SLUICE_OK) {
            sluice_decision_node_changed(recorder, parts[0].node);
            sluice_decision_started(recorder, &decision.job, parts, placement.part_count, NULL);
            CHECK_INT(sluice_release(cluster, allocation, NULL), SLUICE_OK);
            sluice_decision_node_changed(recorder, parts[0].node);
        }
    }
    pthread_join(planner, NULL);
    pthread_join(watcher, NULL);
    CHECK(sluice_decision_flush(recorder, 20000));
    struct sluice_decision_counters counters;
    sluice_decision_read_counters(recorder, &counters);
    CHECK_INT(counters.failed, 0);
    CHECK(!whole || counters.dropped == 0);
    CHECK(whole || counters.dropped > 0);
    CHECK(counters.written > 0);
    sluice_decision_free(recorder);
    uint32_t files = remove_files();
    CHECK(files >= 1 && files <= 3);
}

/* A start that the core was not asked about has the topology before it, once. */
static void test_starts_alone_have_a_topology(void)
{
    struct sluice_decision_recorder *recorder = new_recorder(1 << 20, 1 << 20);
    struct sluice_decision_counters counters;
    const struct sluice_decision_job job = {.id = 7};
    const struct sluice_part part = {.node = 3, .gpus = 1};
    CHECK_INT(sluice_decision_set_topology(recorder, topology, cluster, NULL), SLUICE_OK);
    sluice_decision_started(recorder, &job, &part, 1, NULL);
    sluice_decision_read_counters(recorder, &counters);
    CHECK_INT(counters.recorded, 2);
    sluice_decision_started(recorder, &job, &part, 1, NULL);
    sluice_decision_read_counters(recorder, &counters);
    CHECK_INT(counters.recorded, 3);
    sluice_decision_free(recorder);
    CHECK_INT(remove_files(), 1);
}

static void test_repeats_are_left_out(void)
{
    struct sluice_decision_recorder *recorder = new_recorder(1 << 20, 1 << 20);
    struct sluice_decision_counters counters;
    struct sluice_part parts[4];
    struct sluice_placement placement = {.parts = parts, .part_capacity = 4};
    struct sluice_request never = {.gpus = 9}, other = {.gpus = 10};
    CHECK_INT(sluice_decision_set_topology(recorder, topology, cluster, NULL), SLUICE_OK);
    struct sluice_decision refusal = decision_of(7, &never, &placement);
    CHECK_INT(refusal.verdict, SLUICE_ERROR_NEVER);
    for (int i = 0; i < 10; i++)
        sluice_decision_placed(recorder, &refusal);
    sluice_decision_read_counters(recorder, &counters);
    CHECK_INT(counters.repeated, 9);
    CHECK_INT(counters.recorded, 1 + 16 + 1);     /* topology, images, the refusal */
    refusal = decision_of(7, &other, &placement); /* the job asks something else now */
    sluice_decision_placed(recorder, &refusal);
    other.nics = 1;
    sluice_decision_placed(recorder, &refusal);
    other.nics = 2;
    sluice_decision_placed(recorder, &refusal);
    other.segment = 2;
    sluice_decision_placed(recorder, &refusal);
    other.segment = 4;
    sluice_decision_placed(recorder, &refusal);
    other.lower_switches = 2;
    sluice_decision_placed(recorder, &refusal);
    other.switch_layout = SLUICE_SPREAD;
    sluice_decision_placed(recorder, &refusal);
    other.nic_planes = SLUICE_SPREAD;
    sluice_decision_placed(recorder, &refusal);
    refusal.job.id = 8; /* another job */
    sluice_decision_placed(recorder, &refusal);
    sluice_decision_read_counters(recorder, &counters);
    CHECK_INT(counters.repeated, 9);
    struct sluice_request fits = {.gpus = 1}; /* what starts a job is always recorded */
    struct sluice_decision start = decision_of(9, &fits, &placement);
    sluice_decision_placed(recorder, &start);
    sluice_decision_placed(recorder, &start);
    sluice_decision_read_counters(recorder, &counters);
    CHECK_INT(counters.repeated, 9);
    sluice_decision_free(recorder);
    remove_files();
}

static void test_what_cannot_be_recorded(void)
{
    struct sluice_decision_recorder *recorder = NULL;
    struct sluice_error_text text;
    CHECK_INT(
        sluice_decision_new(&(struct sluice_decision_config){.folder = "/tmp/x", .ring_bytes = 5000}, &recorder, &text),
        SLUICE_ERROR_RANGE);
    recorder = new_recorder(0, 0);
    struct sluice_part parts[4];
    struct sluice_placement placement = {.parts = parts, .part_capacity = 4};
    struct sluice_request request = {.gpus = 1};
    struct sluice_decision decision = decision_of(1, &request, &placement);
    sluice_decision_placed(recorder, &decision); /* no topology yet: dropped, not wrong */
    sluice_decision_placed(NULL, &decision);
    sluice_decision_node_changed(recorder, 3);
    struct sluice_decision_topology *fewer = sluice_decision_topology_new();
    CHECK_INT(sluice_decision_set_topology(recorder, fewer, cluster, &text), SLUICE_ERROR_INVALID);
    sluice_decision_topology_free(fewer);
    struct sluice_decision_counters counters;
    sluice_decision_read_counters(recorder, &counters);
    CHECK_INT(counters.recorded, 0);
    CHECK_INT(counters.dropped, 1);
    sluice_decision_free(recorder);
    CHECK_INT(remove_files(), 0);
    sluice_decision_free(NULL);
}

int main(void)
{
    make_cluster();
    test_threads(16 << 20, true);
    test_threads(4096, false);
    test_starts_alone_have_a_topology();
    test_repeats_are_left_out();
    test_what_cannot_be_recorded();
    sluice_decision_topology_free(topology);
    sluice_cluster_free(cluster);
    return 0;
}
