/* SPDX-License-Identifier: Apache-2.0 */
/* Requests and placements worked out by hand; tests/unit/core compares random ones with a plain reference. */
#include "check.h"
#include "cluster.h"

static struct sluice_error_text text;
static struct sluice_part room[64];
static struct sluice_placement placement = {.parts = room, .part_capacity = 64};

/* `racks` racks of `nodes` nodes with 8 GPUs of 1000 MiB: two NUMA nodes, four link pairs, odd GPUs near a NIC; two
 * racks to a pod. */
static struct sluice_cluster *new_cluster(uint32_t racks, uint32_t nodes)
{
    struct sluice_cluster_config config = {.max_nodes = racks * nodes + 1, .max_switches = 2 * racks + 1};
    struct sluice_cluster *cluster;
    uint32_t model, shape, pod = 0, rack, node;
    CHECK_INT(sluice_cluster_new(&config, &cluster, &text), SLUICE_OK);
    CHECK_INT(sluice_cluster_add_model(cluster, "A", &model, &text), SLUICE_OK);
    struct sluice_node_shape eight = {.gpu_count = 8};
    for (uint8_t i = 0; i < 8; i++) {
        eight.gpus[i] = (struct sluice_gpu_shape){.model = model,
                                                  .capability = 900,
                                                  .memory_mib = 1000,
                                                  .link_domain = i / 2,
                                                  .numa_node = i / 4,
                                                  .near_nic = i % 2 == 1};
        for (uint8_t j = 0; j < 8; j++)
            eight.links[i][j] = i / 2 == j / 2 ? 12 : i / 4 == j / 4 ? 4 : 1;
    }
    CHECK_INT(sluice_cluster_add_shape(cluster, &eight, &shape, &text), SLUICE_OK);
    for (uint32_t r = 0; r < racks; r++) {
        if (r % 2 == 0)
            CHECK_INT(sluice_cluster_add_switch(cluster, 0, &pod, &text), SLUICE_OK);
        CHECK_INT(sluice_cluster_add_switch(cluster, pod, &rack, &text), SLUICE_OK);
        for (uint32_t n = 0; n < nodes; n++)
            CHECK_INT(sluice_cluster_add_node(cluster, shape, 64000, 64000, rack, &node, &text), SLUICE_OK);
    }
    return cluster;
}

static void hold(struct sluice_cluster *cluster, uint32_t node, uint32_t gpus)
{
    struct sluice_part part = {.node = node, .gpus = gpus};
    struct sluice_placement one = {.parts = &part, .part_count = 1};
    uint64_t allocation;
    CHECK_INT(sluice_commit(cluster, &one, &allocation, &text), SLUICE_OK);
}

static void check_requests(void)
{
    static const uint64_t beyond[] = {0, 2}, words[] = {1};
    static const struct {
        struct sluice_request request;
        enum sluice_error error;
        const char *text;
    } cases[] = {
        {{.gpus = 1}, SLUICE_OK, ""},
        {{.cpus_milli = 1}, SLUICE_OK, ""},
        {{.flags = SLUICE_EXCLUSIVE}, SLUICE_OK, ""},
        {{.gpus = 1, .allowed = words, .allowed_words = 1}, SLUICE_OK, ""},
        {{.gpus = 16, .nodes_min = SLUICE_MAX_NODES}, SLUICE_OK, ""},
        {{.gpus = 4, .gpu_memory_mib = 4000, .flags = SLUICE_GPU_MEMORY_SUM}, SLUICE_OK, ""},
        {{.gpus = INT64_MIN}, SLUICE_ERROR_RANGE, "gpus -9223372036854775808: must be 0 to 16"},
        {{.gpus = INT64_MAX, .flags = SLUICE_GPUS_TOTAL},
         SLUICE_ERROR_RANGE,
         "gpus 9223372036854775807: must be 0 to 2097152"},
        {{.gpus = 1, .nodes_max = -1}, SLUICE_ERROR_RANGE, "nodes_max -1: must be 0 to 131072"},
        {{.gpus = 1, .gpu_memory_mib = INT64_MAX},
         SLUICE_ERROR_RANGE,
         "gpu_memory_mib 9223372036854775807: must be 0 to 67108864"},
        {{.gpus = 1, .capability_min = -9}, SLUICE_ERROR_RANGE, "capability_min -9: must be 0 to 4294967295"},
        {{.gpus = 1, .flags = 8}, SLUICE_ERROR_INVALID, "flags 8: no such choice"},
        {{.gpus = 1, .near_nic = (enum sluice_wish)3}, SLUICE_ERROR_INVALID, "near_nic 3: no such choice"},
        {{.gpus = 1, .layout = (enum sluice_layout)3}, SLUICE_ERROR_INVALID, "layout 3: no such choice"},
        {{.gpus = 1, .models = 2}, SLUICE_ERROR_UNKNOWN, "GPU model 1 is not known: the cluster has 1 models"},
        {{.gpus = 1, .allowed = beyond, .allowed_words = 2},
         SLUICE_ERROR_UNKNOWN,
         "allowed: node 65 is not known: the cluster has 16 nodes"},
        {{.gpus = 1, .allowed_words = 1}, SLUICE_ERROR_INVALID, "allowed is NULL, but has 1 words"},
    };
    struct sluice_cluster *cluster = new_cluster(4, 4);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        text.text[0] = '\0';
        CHECK_INT(sluice_request_check(cluster, &cases[i].request, &text), cases[i].error);
        CHECK_STR(text.text, cases[i].text);
        if (cases[i].error) {
            CHECK_INT(sluice_place(cluster, SLUICE_POLICY_FIRST_FIT, &cases[i].request, &placement, NULL),
                      cases[i].error);
        }
    }
    struct sluice_request many = {.gpus = 1, .nodes_min = 65};
    CHECK_INT(sluice_place(cluster, SLUICE_POLICY_FIRST_FIT, &many, &placement, &text), SLUICE_ERROR_CAPACITY);
    CHECK_INT(sluice_place(cluster, (enum sluice_policy)10, &cases[0].request, &placement, &text),
              SLUICE_ERROR_UNKNOWN);
    CHECK(sluice_policy_name((enum sluice_policy)10) == NULL);
    sluice_cluster_free(cluster);
}

/* Which GPUs of an 8-GPU node of which `held` are in use. */
static void check_gpus(void)
{
    static const struct {
        struct sluice_request request;
        uint32_t held, gpus; /* 0: no place now */
    } cases[] = {
        {{.gpus = 2}, 0x01, 0x06},
        {{.gpus = 2, .one_link_domain = SLUICE_PREFERRED}, 0x01, 0x0c},
        {{.gpus = 2, .one_link_domain = SLUICE_REQUIRED}, 0x55, 0},
        {{.gpus = 2, .one_link_domain = SLUICE_PREFERRED}, 0x55, 0x0a}, /* no pair left: the best linked */
        {{.gpus = 3, .one_numa_node = SLUICE_REQUIRED}, 0x03, 0x70},
        {{.gpus = 2, .one_numa_node = SLUICE_REQUIRED}, 0x03, 0x0c}, /* the smaller group that has room */
        {{.gpus = 3, .one_numa_node = SLUICE_REQUIRED}, 0x33, 0},
        {{.gpus = 3, .one_numa_node = SLUICE_PREFERRED}, 0x33, 0x4c},
        {{.gpus = 2, .near_nic = SLUICE_REQUIRED}, 0x00, 0x0a},
        {{.gpus = 2, .near_nic = SLUICE_PREFERRED, .one_link_domain = SLUICE_REQUIRED}, 0x00, 0x03},
        {{.gpus = 2, .near_nic = SLUICE_PREFERRED, .one_numa_node = SLUICE_PREFERRED}, 0x02, 0xa0},
        {{.gpus = 8}, 0x80, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct sluice_cluster *cluster = new_cluster(1, 1);
        if (cases[i].held)
            hold(cluster, 0, cases[i].held);
        enum sluice_error error = sluice_place(cluster, SLUICE_POLICY_BEST_FIT, &cases[i].request, &placement, &text);
        CHECK_INT(error, cases[i].gpus ? SLUICE_OK : SLUICE_ERROR_NO_PLACE);
        if (!error)
            CHECK_INT(room[0].gpus, cases[i].gpus);
        sluice_cluster_free(cluster);
    }
}

/* Racks of 4 nodes, two to a pod; nodes of `busy` have no idle GPU. Expected: the nodes chosen, -1 ends. */
static void check_gangs(void)
{
    static const struct {
        struct sluice_request request;
        uint32_t busy;
        int nodes[17];
    } cases[] = {
        /* the lowest switch with room, and of two the one with the fewest nodes that fit */
        {{.gpus = 8, .nodes_min = 3}, 0x0000, {0, 1, 2, -1}},
        {{.gpus = 8, .nodes_min = 3}, 0x0010, {5, 6, 7, -1}},
        {{.gpus = 8, .nodes_min = 3}, 0x1113, {5, 6, 7, -1}},
        /* a pod where no rack has room: the fuller rack whole, the rest from the other */
        {{.gpus = 8, .nodes_min = 5}, 0x0001, {1, 4, 5, 6, 7, -1}},
        {{.gpus = 8, .nodes_min = 6}, 0x0f03, {2, 3, 4, 5, 6, 7, -1}},
        /* across pods: whole pods first */
        {{.gpus = 8, .nodes_min = 9}, 0x0000, {0, 1, 2, 3, 4, 5, 6, 7, 8, -1}},
        /* the last switch is the smallest that has the rest */
        {{.gpus = 8, .nodes_min = 9}, 0x1000, {0, 1, 2, 3, 4, 5, 6, 7, 13, -1}},
        /* a range: as many as there are below one switch, or few where packed */
        {{.gpus = 8, .nodes_min = 2, .nodes_max = 4, .one_switch = SLUICE_REQUIRED}, 0x3331, {1, 2, 3, -1}},
        {{.gpus = 8, .nodes_min = 2, .nodes_max = 4, .layout = SLUICE_PACK}, 0x3331, {6, 7, -1}},
        {{.gpus = 8, .nodes_min = 4, .one_switch = SLUICE_REQUIRED, .switch_level = 1}, 0x7777, {-1}},
        {{.gpus = 8, .nodes_min = 2, .one_switch = SLUICE_REQUIRED, .switch_level = 1}, 0x7777, {3, 7, -1}},
        {{.gpus = 8, .nodes_min = 9, .one_switch = SLUICE_REQUIRED, .switch_level = 3}, 0, {-1}},
        /* GPUs in total: few nodes, the last one tight; or spread over many */
        {{.gpus = 20, .nodes_min = 1, .nodes_max = 8, .flags = SLUICE_GPUS_TOTAL}, 0x0001, {1, 2, 3, -1}},
        {{.gpus = 3, .nodes_min = 1, .nodes_max = 8, .flags = SLUICE_GPUS_TOTAL, .layout = SLUICE_SPREAD},
         0x0000,
         {0, 1, 2, -1}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct sluice_cluster *cluster = new_cluster(4, 4);
        for (uint32_t node = 0; node < 16; node++)
            if (cases[i].busy >> node & 1)
                hold(cluster, node, 0xff);
        enum sluice_error error = sluice_place(cluster, SLUICE_POLICY_FIRST_FIT, &cases[i].request, &placement, &text);
        bool possible = cases[i].nodes[0] >= 0;
        if (!possible)
            CHECK(error == SLUICE_ERROR_NO_PLACE || error == SLUICE_ERROR_NEVER);
        else
            CHECK_INT(error, SLUICE_OK);
        for (uint32_t n = 0; possible && n < placement.part_count; n++)
            CHECK_INT(room[n].node, cases[i].nodes[n]);
        if (possible)
            CHECK_INT(cases[i].nodes[placement.part_count], -1);
        sluice_cluster_free(cluster);
    }
}

static void check_totals(void)
{
    struct sluice_cluster *cluster = new_cluster(1, 4);
    hold(cluster, 0, 0x0f);
    hold(cluster, 1, 0x3f);
    hold(cluster, 3, 0x01);
    static const struct {
        struct sluice_request request;
        int gpus[4];
    } cases[] = {
        /* 8 of node 2, and as the last one that with the least more than the 2 that are left */
        {{.gpus = 10, .nodes_max = 4, .flags = SLUICE_GPUS_TOTAL}, {0, 2, 8, 0}},
        {{.gpus = 12, .nodes_max = 4, .flags = SLUICE_GPUS_TOTAL}, {4, 0, 8, 0}},
        {{.gpus = 12, .nodes_min = 3, .nodes_max = 4, .flags = SLUICE_GPUS_TOTAL}, {0, 1, 8, 3}},
        {{.gpus = 9, .nodes_max = 4, .flags = SLUICE_GPUS_TOTAL, .layout = SLUICE_SPREAD}, {2, 2, 3, 2}},
        /* CPUs that come with each GPU bound what a node gives */
        {{.gpus = 12, .nodes_max = 4, .cpus_milli_per_gpu = 16000, .flags = SLUICE_GPUS_TOTAL}, {4, 0, 4, 4}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        CHECK_INT(sluice_place(cluster, SLUICE_POLICY_FIRST_FIT, &cases[i].request, &placement, &text), SLUICE_OK);
        int gpus[4] = {0};
        for (uint32_t n = 0; n < placement.part_count; n++)
            gpus[room[n].node] = sluice_count((uint16_t)room[n].gpus);
        for (int n = 0; n < 4; n++)
            CHECK_INT(gpus[n], cases[i].gpus[n]);
    }
    sluice_cluster_free(cluster);
}

static void check_verdicts(void)
{
    struct sluice_cluster *cluster = new_cluster(2, 2);
    static const uint64_t first[] = {1};
    static const struct {
        struct sluice_request request;
        enum sluice_error busy;    /* while node 0 is in use, */
        enum sluice_error down;    /* and with node 1 down */
        enum sluice_reason reason; /* of the most nodes then */
    } cases[] = {
        {{.gpus = 8}, SLUICE_OK, SLUICE_OK, SLUICE_REASON_FITS},
        {{.gpus = 9}, SLUICE_ERROR_NEVER, SLUICE_ERROR_NEVER, SLUICE_REASON_GPU_COUNT},
        {{.gpus = 8, .allowed = first, .allowed_words = 1},
         SLUICE_ERROR_NO_PLACE,
         SLUICE_ERROR_NO_PLACE,
         SLUICE_REASON_NOT_ALLOWED},
        {{.gpus = 1, .gpu_memory_mib = 1001}, SLUICE_ERROR_NEVER, SLUICE_ERROR_NEVER, SLUICE_REASON_GPU_SIZE},
        {{.gpus = 1, .capability_min = 901}, SLUICE_ERROR_NEVER, SLUICE_ERROR_NEVER, SLUICE_REASON_CAPABILITY},
        {{.gpus = 5, .near_nic = SLUICE_REQUIRED}, SLUICE_ERROR_NEVER, SLUICE_ERROR_NEVER, SLUICE_REASON_NIC},
        {{.gpus = 3, .one_link_domain = SLUICE_REQUIRED}, SLUICE_ERROR_NEVER, SLUICE_ERROR_NEVER, SLUICE_REASON_LINK},
        {{.gpus = 5, .one_numa_node = SLUICE_REQUIRED}, SLUICE_ERROR_NEVER, SLUICE_ERROR_NEVER, SLUICE_REASON_NUMA},
        {{.gpus = 8, .nodes_min = 3}, SLUICE_OK, SLUICE_ERROR_NO_PLACE, SLUICE_REASON_GANG},
        {{.gpus = 8, .nodes_min = 4}, SLUICE_ERROR_NO_PLACE, SLUICE_ERROR_NO_PLACE, SLUICE_REASON_GANG},
        {{.gpus = 8, .nodes_min = 5}, SLUICE_ERROR_NEVER, SLUICE_ERROR_NEVER, SLUICE_REASON_GANG},
        {{.gpus = 4, .nodes_min = 3, .one_switch = SLUICE_REQUIRED},
         SLUICE_ERROR_NEVER,
         SLUICE_ERROR_NEVER,
         SLUICE_REASON_SWITCH},
        {{.cpus_milli = 64001}, SLUICE_ERROR_NEVER, SLUICE_ERROR_NEVER, SLUICE_REASON_CPUS},
        {{.host_memory_mib = 64001}, SLUICE_ERROR_NEVER, SLUICE_ERROR_NEVER, SLUICE_REASON_HOST_MEMORY},
        {{.flags = SLUICE_EXCLUSIVE}, SLUICE_OK, SLUICE_OK, SLUICE_REASON_FITS},
    };
    hold(cluster, 0, 0x01);
    for (int down = 0; down < 2; down++) {
        if (down)
            CHECK_INT(sluice_node_set_state(cluster, 1, SLUICE_NODE_DOWN, &text), SLUICE_OK);
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            enum sluice_error expected = down ? cases[i].down : cases[i].busy;
            struct sluice_explanation explanation;
            CHECK_INT(sluice_place(cluster, SLUICE_POLICY_BEST_FIT, &cases[i].request, &placement, NULL), expected);
            CHECK_INT(
                sluice_explain(cluster, SLUICE_POLICY_BEST_FIT, &cases[i].request, &placement, &explanation, &text),
                SLUICE_OK);
            CHECK_INT(explanation.verdict, expected);
            uint32_t sum = 0, most = 0;
            for (int reason = 0; reason < SLUICE_REASON_COUNT; reason++) {
                sum += explanation.by_reason[reason];
                most = explanation.by_reason[reason] > most ? explanation.by_reason[reason] : most;
            }
            CHECK_INT(sum, 4);
            if (down)
                CHECK_INT(explanation.by_reason[cases[i].reason], most);
            CHECK((explanation.term_count > 0) == (expected == SLUICE_OK));
        }
    }
    sluice_cluster_free(cluster);
}

/* With groups, round robin and a failure half way: nothing is left behind, not even the position. */
static void check_groups(void)
{
    struct sluice_cluster *cluster = new_cluster(2, 2);
    struct sluice_part parts[3][4];
    struct sluice_placement placements[3];
    struct sluice_request requests[3] = {{.gpus = 4}, {.gpus = 8, .nodes_min = 3}, {.gpus = 5}};
    uint64_t allocations[3] = {7, 7, 7};
    for (int i = 0; i < 3; i++)
        placements[i] = (struct sluice_placement){.parts = parts[i], .part_capacity = 4};
    hold(cluster, 2, 0x01);
    uint32_t last = cluster->last_node;
    CHECK_INT(sluice_start_group(cluster, SLUICE_POLICY_ROUND_ROBIN, requests, placements, allocations, 3, &text),
              SLUICE_ERROR_NO_PLACE);
    CHECK_STR(text.text, "request 0 of the group: no place now; sluice_explain says why");
    CHECK_INT(cluster->last_node, last);
    CHECK_INT(cluster->totals.allocations, 1);
    CHECK_INT(allocations[0], 7);
    CHECK_INT(sluice_start_group(cluster, SLUICE_POLICY_ROUND_ROBIN, requests, placements, allocations, 2, &text),
              SLUICE_OK);
    CHECK_INT(placements[0].parts[0].node, 2);
    CHECK_INT(placements[1].part_count, 3);
    CHECK_INT(sluice_cluster_check(cluster, &text), SLUICE_OK);
    CHECK_INT(sluice_start_group(cluster, SLUICE_POLICY_FGD, requests, placements, allocations, 0, &text),
              SLUICE_ERROR_RANGE);
    requests[1].gpus = -1;
    CHECK_INT(sluice_start_group(cluster, SLUICE_POLICY_FGD, requests, placements, allocations, 2, &text),
              SLUICE_ERROR_RANGE);
    CHECK_STR(text.text, "request 1: gpus -1: must be 0 to 16");
    sluice_cluster_free(cluster);
}

static void check_workload(void)
{
    struct sluice_cluster *cluster = new_cluster(1, 2);
    struct sluice_request shapes[2] = {{.gpus = 1, .gpu_memory_mib = 500}, {.gpus = 1, .nodes_min = 2}};
    uint32_t weights[2] = {1, 1}, too_heavy[2] = {1000000000, 1};
    CHECK_INT(sluice_cluster_set_workload(cluster, shapes, weights, 2, &text), SLUICE_ERROR_INVALID);
    CHECK_STR(text.text, "usual request 1 is for 2 nodes, not one");
    shapes[1].nodes_min = 0;
    CHECK_INT(sluice_cluster_set_workload(cluster, shapes, too_heavy, 2, &text), SLUICE_ERROR_RANGE);
    CHECK_INT(sluice_cluster_set_workload(cluster, shapes, weights, SLUICE_MAX_WORKLOAD + 1, &text),
              SLUICE_ERROR_RANGE);
    CHECK_INT(sluice_cluster_set_workload(cluster, shapes, weights, 2, &text), SLUICE_OK);
    /* With 600 of a GPU gone no usual request can use the rest of 400; 500 and 500 leave nothing unusable. */
    hold(cluster, 1, 0xff);
    struct sluice_request first = {.gpus = 1, .gpu_memory_mib = 500}, second = {.gpus = 1, .gpu_memory_mib = 500};
    uint64_t allocation;
    CHECK_INT(sluice_start(cluster, SLUICE_POLICY_FGD, &first, &placement, &allocation, &text), SLUICE_OK);
    CHECK_INT(room[0].gpus, 1);
    CHECK_INT(sluice_start(cluster, SLUICE_POLICY_FGD, &second, &placement, &allocation, &text), SLUICE_OK);
    CHECK_INT(room[0].gpus, 1);
    CHECK_INT(sluice_cluster_set_workload(cluster, NULL, NULL, 0, &text), SLUICE_OK);
    sluice_cluster_free(cluster);
}

static void test_names(void)
{
    for (int policy = 0; policy < SLUICE_POLICY_COUNT; policy++) {
        enum sluice_policy found = (enum sluice_policy) - 1;
        CHECK_INT(sluice_policy_by_name(sluice_policy_name((enum sluice_policy)policy), &found, &text), SLUICE_OK);
        CHECK_INT(found, policy);
    }
    enum sluice_policy found = SLUICE_POLICY_FGD;
    CHECK(sluice_policy_name((enum sluice_policy)SLUICE_POLICY_COUNT) == NULL);
    CHECK_INT(sluice_policy_by_name("Sluice", &found, &text), SLUICE_ERROR_UNKNOWN);
    CHECK_INT(found, SLUICE_POLICY_FGD);
    CHECK(strstr(text.text, "gpu-packing") != NULL);
}

int main(void)
{
    test_names();
    for (int reason = 0; reason < SLUICE_REASON_COUNT; reason++)
        CHECK(strcmp(sluice_reason_text((enum sluice_reason)reason), "unknown reason") != 0);
    CHECK_STR(sluice_reason_text((enum sluice_reason)SLUICE_REASON_COUNT), "unknown reason");
    check_requests();
    check_gpus();
    check_gangs();
    check_totals();
    check_verdicts();
    check_groups();
    check_workload();
    return 0;
}
