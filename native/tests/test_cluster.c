/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"
#include "cluster.h"

static struct sluice_error_text text;

static struct sluice_node_shape shape_of(uint32_t model, uint32_t gpus, int64_t memory)
{
    struct sluice_node_shape shape = {.gpu_count = gpus};
    for (uint32_t i = 0; i < gpus && i < SLUICE_MAX_GPUS; i++)
        shape.gpus[i] = (struct sluice_gpu_shape){.model = model, .memory_mib = memory};
    return shape;
}

static struct sluice_cluster *new_cluster(uint32_t nodes, uint32_t *shape)
{
    struct sluice_cluster_config config = {
        .max_nodes = nodes, .max_switches = SLUICE_SWITCH_LEVELS + 4, .max_allocations = 4, .max_parts = 6};
    struct sluice_cluster *cluster;
    uint32_t model;
    CHECK_INT(sluice_cluster_new(&config, &cluster, &text), SLUICE_OK);
    CHECK_INT(sluice_cluster_add_model(cluster, "H100", &model, &text), SLUICE_OK);
    struct sluice_node_shape eight = shape_of(model, 8, 81920);
    CHECK_INT(sluice_cluster_add_shape(cluster, &eight, shape, &text), SLUICE_OK);
    return cluster;
}

static void check_sizes(void)
{
    static const struct {
        struct sluice_cluster_config config;
        enum sluice_error error;
    } cases[] = {
        {{0}, SLUICE_OK},
        {{.max_nodes = 1, .max_switches = 1, .max_allocations = 1, .max_parts = 1}, SLUICE_OK},
        {{.max_nodes = SLUICE_MAX_NODES + 1}, SLUICE_ERROR_RANGE},
        {{.max_nodes = UINT32_MAX}, SLUICE_ERROR_RANGE},
        {{.max_switches = SLUICE_MAX_SWITCHES + 1}, SLUICE_ERROR_RANGE},
        {{.max_allocations = SLUICE_MAX_ALLOCATIONS + 1}, SLUICE_ERROR_RANGE},
        {{.max_parts = UINT32_MAX}, SLUICE_ERROR_RANGE},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct sluice_cluster *cluster = NULL;
        CHECK_INT(sluice_cluster_new(&cases[i].config, &cluster, &text), cases[i].error);
        CHECK((cluster != NULL) == (cases[i].error == SLUICE_OK));
        sluice_cluster_free(cluster);
    }
}

static void check_models_and_shapes(void)
{
    uint32_t id, again, shape;
    struct sluice_cluster *cluster = new_cluster(2, &shape);
    char name[70] = "";
    CHECK_INT(sluice_cluster_add_model(cluster, "", &id, &text), SLUICE_ERROR_RANGE);
    memset(name, 'm', 64);
    CHECK_INT(sluice_cluster_add_model(cluster, name, &id, &text), SLUICE_ERROR_RANGE);
    name[63] = '\0';
    CHECK_INT(sluice_cluster_add_model(cluster, name, &id, &text), SLUICE_OK);
    CHECK_STR(sluice_cluster_model_name(cluster, id), name);
    CHECK_INT(sluice_cluster_add_model(cluster, name, &again, &text), SLUICE_OK);
    CHECK_INT(again, id);
    for (int i = 2; i < SLUICE_MAX_MODELS; i++) {
        snprintf(name, sizeof name, "model %d", i);
        CHECK_INT(sluice_cluster_add_model(cluster, name, &id, &text), SLUICE_OK);
        CHECK_INT(id, i);
    }
    CHECK_INT(sluice_cluster_add_model(cluster, "one more", &id, &text), SLUICE_ERROR_CAPACITY);
    CHECK(sluice_cluster_model_name(cluster, SLUICE_MAX_MODELS) == NULL);

    struct sluice_node_shape wrong = shape_of(0, 17, 1000);
    CHECK_INT(sluice_cluster_add_shape(cluster, &wrong, &id, &text), SLUICE_ERROR_RANGE);
    wrong = shape_of(SLUICE_MAX_MODELS, 1, 1000);
    CHECK_INT(sluice_cluster_add_shape(cluster, &wrong, &id, &text), SLUICE_ERROR_UNKNOWN);
    wrong = shape_of(0, 1, 0);
    CHECK_INT(sluice_cluster_add_shape(cluster, &wrong, &id, &text), SLUICE_ERROR_RANGE);
    wrong = shape_of(0, 1, (int64_t)SLUICE_MAX_GPU_MEMORY_MIB + 1);
    CHECK_INT(sluice_cluster_add_shape(cluster, &wrong, &id, &text), SLUICE_ERROR_RANGE);
    wrong = shape_of(0, 2, 1000);
    wrong.links[0][1] = 4;
    CHECK_INT(sluice_cluster_add_shape(cluster, &wrong, &id, &text), SLUICE_ERROR_INVALID);
    struct sluice_node_shape same = shape_of(0, 8, 81920);
    same.links[3][3] = 9;          /* the diagonal says nothing, */
    same.gpus[9].memory_mib = 123; /* nor does what lies beyond the last GPU */
    CHECK_INT(sluice_cluster_add_shape(cluster, &same, &id, &text), SLUICE_OK);
    CHECK_INT(id, shape);
    for (int i = 1; i < SLUICE_MAX_SHAPES; i++) {
        struct sluice_node_shape other = shape_of(0, 1, i);
        CHECK_INT(sluice_cluster_add_shape(cluster, &other, &id, &text), SLUICE_OK);
        CHECK_INT(id, i);
    }
    same.gpu_count = 7;
    CHECK_INT(sluice_cluster_add_shape(cluster, &same, &id, &text), SLUICE_ERROR_CAPACITY);
    sluice_cluster_free(cluster);
}

static void check_switches(void)
{
    uint32_t shape, pod, rack, node, id = 77;
    struct sluice_cluster *cluster = new_cluster(3, &shape);
    CHECK_INT(sluice_cluster_add_switch(cluster, 1, &id, &text), SLUICE_ERROR_UNKNOWN);
    CHECK_INT(id, 77);
    CHECK_INT(sluice_cluster_add_switch(cluster, 0, &pod, &text), SLUICE_OK);
    CHECK_INT(sluice_cluster_add_switch(cluster, pod, &rack, &text), SLUICE_OK);
    CHECK_INT(sluice_cluster_add_node(cluster, shape, 1000, 1000, pod, &node, &text), SLUICE_ERROR_INVALID);
    CHECK_INT(sluice_cluster_add_node(cluster, shape, 1000, 1000, 3, &node, &text), SLUICE_ERROR_UNKNOWN);
    CHECK_INT(sluice_cluster_add_node(cluster, shape, 1000, 1000, rack, &node, &text), SLUICE_OK);
    CHECK_INT(sluice_cluster_add_switch(cluster, rack, &id, &text), SLUICE_ERROR_INVALID);
    uint32_t deep = pod;
    for (int level = 2; level <= SLUICE_SWITCH_LEVELS; level++)
        CHECK_INT(sluice_cluster_add_switch(cluster, deep, &deep, &text), SLUICE_OK);
    CHECK_INT(sluice_cluster_add_switch(cluster, deep, &deep, &text), SLUICE_ERROR_RANGE);
    CHECK_INT(cluster->switches[pod].height, SLUICE_SWITCH_LEVELS - 1);
    CHECK_INT(cluster->switches[rack].height, 0);
    for (int i = SLUICE_SWITCH_LEVELS + 1; i < SLUICE_SWITCH_LEVELS + 4; i++)
        CHECK_INT(sluice_cluster_add_switch(cluster, 0, &id, &text), SLUICE_OK);
    CHECK_INT(sluice_cluster_add_switch(cluster, 0, &id, &text), SLUICE_ERROR_CAPACITY);
    sluice_cluster_free(cluster);
}

static void check_nodes(void)
{
    uint32_t shape, node;
    struct sluice_cluster *cluster = new_cluster(3, &shape);
    CHECK_INT(sluice_cluster_add_node(cluster, shape + 1, 1000, 1000, 0, &node, &text), SLUICE_ERROR_UNKNOWN);
    CHECK_INT(sluice_cluster_add_node(cluster, shape, -1, 1000, 0, &node, &text), SLUICE_ERROR_RANGE);
    CHECK_INT(sluice_cluster_add_node(cluster, shape, 1000, INT64_MAX, 0, &node, &text), SLUICE_ERROR_RANGE);
    for (uint32_t i = 0; i < 3; i++) {
        CHECK_INT(sluice_cluster_add_node(cluster, shape, 64000, 1000, 0, &node, &text), SLUICE_OK);
        CHECK_INT(node, i);
    }
    CHECK_INT(sluice_cluster_add_node(cluster, shape, 64000, 1000, 0, &node, &text), SLUICE_ERROR_CAPACITY);
    CHECK_INT(cluster->class_count, 1);

    CHECK_INT(sluice_node_set_state(cluster, 3, SLUICE_NODE_UP, &text), SLUICE_ERROR_UNKNOWN);
    CHECK_INT(sluice_node_set_state(cluster, 1, (enum sluice_node_state)3, &text), SLUICE_ERROR_RANGE);
    CHECK_INT(sluice_gpu_set_health(cluster, 1, 8, false, &text), SLUICE_ERROR_UNKNOWN);
    CHECK_STR(text.text, "node 1: GPU 8 is not known, it has 8");
    CHECK_INT(sluice_gpu_set_utilisation(cluster, 1, 7, 101, &text), SLUICE_ERROR_RANGE);

    struct sluice_node_view view;
    CHECK_INT(sluice_gpu_set_health(cluster, 1, 0, false, &text), SLUICE_OK);
    CHECK_INT(sluice_gpu_set_utilisation(cluster, 1, 7, 42, &text), SLUICE_OK);
    CHECK_INT(sluice_node_read(cluster, 1, &view, &text), SLUICE_OK);
    CHECK_INT(view.gpus_healthy, 0xfe);
    CHECK_INT(view.gpus_idle, 0xfe);
    CHECK_INT(view.gpu_utilisation[7], 42);
    CHECK_INT(sluice_node_read(cluster, 3, &view, &text), SLUICE_ERROR_UNKNOWN);
    CHECK(!sluice_bit(cluster->open[8], 1) && sluice_bit(cluster->open[7], 1));
    CHECK_INT(sluice_node_set_state(cluster, 1, SLUICE_NODE_DRAINED, &text), SLUICE_OK);
    CHECK(!sluice_bit(cluster->open[0], 1));

    struct sluice_part parts[2] = {{.node = 1, .gpus = 3, .cpus_milli = 60000}, {.node = 2, .gpus = 1}};
    struct sluice_placement placement = {.parts = parts, .part_count = 2};
    uint64_t allocation;
    /* What runs already is recorded even on a drained node with a failed GPU. */
    CHECK_INT(sluice_commit(cluster, &placement, &allocation, &text), SLUICE_OK);
    CHECK_INT(sluice_cluster_check(cluster, &text), SLUICE_OK);
    CHECK_INT(sluice_node_resize(cluster, 1, 59999, 1000, &text), SLUICE_ERROR_CAPACITY);
    CHECK_STR(text.text, "node 1: 59999 thousandths of a CPU are less than the 60000 in use");
    CHECK_INT(sluice_node_resize(cluster, 1, 60000, 0, &text), SLUICE_OK);
    CHECK_INT(cluster->class_count, 2);
    CHECK_INT(sluice_node_read(cluster, 1, &view, &text), SLUICE_OK);
    CHECK_INT(view.cpus_milli_free, 0);
    CHECK_INT(sluice_cluster_check(cluster, &text), SLUICE_OK);

    const uint32_t short_order[] = {1, 0}, twice[] = {0, 1, 1}, far[] = {0, 1, 3}, order[] = {2, 1, 0};
    CHECK_INT(sluice_cluster_set_order(cluster, short_order, 2, &text), SLUICE_ERROR_INVALID);
    CHECK_INT(sluice_cluster_set_order(cluster, twice, 3, &text), SLUICE_ERROR_DUPLICATE);
    CHECK_INT(sluice_cluster_set_order(cluster, far, 3, &text), SLUICE_ERROR_RANGE);
    CHECK_INT(cluster->nodes[0].rank, 0);
    CHECK_INT(sluice_cluster_set_order(cluster, order, 3, &text), SLUICE_OK);
    CHECK_INT(cluster->nodes[0].rank, 2);
    CHECK_INT(sluice_cluster_set_order(cluster, NULL, 0, &text), SLUICE_OK);
    CHECK_INT(cluster->nodes[0].rank, 0);

    /* The check finds what does not follow from the allocations. */
    cluster->gpu_free[2].mib[5]--;
    CHECK_INT(sluice_cluster_check(cluster, &text), SLUICE_ERROR_CORRUPT);
    CHECK_STR(text.text, "node 2: free GPU memory do not follow from the allocations");
    cluster->gpu_free[2].mib[5]++;
    cluster->totals.cpus_milli_free++;
    CHECK_INT(sluice_cluster_check(cluster, &text), SLUICE_ERROR_CORRUPT);
    cluster->totals.cpus_milli_free--;
    cluster->open[3][0] ^= 1;
    CHECK_INT(sluice_cluster_check(cluster, &text), SLUICE_ERROR_CORRUPT);
    cluster->open[3][0] ^= 1;
    CHECK_INT(sluice_cluster_check(cluster, &text), SLUICE_OK);
    sluice_cluster_free(cluster);
}

/* A small xorshift: tests must not depend on the C library's. */
static uint64_t random_state = 88172645463325252u;
static uint32_t draw(uint32_t below)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)((random_state >> 32) % below);
}

/* Commits, resizes, releases and refusals in any order keep the model whole, and all given back it is as new. */
static void check_random_history(void)
{
    enum { NODES = 12, ALLOCATIONS = 200 };
    struct sluice_cluster_config config = {.max_nodes = NODES, .max_allocations = ALLOCATIONS, .max_parts = 300};
    struct sluice_cluster *cluster;
    uint32_t model, shape, node;
    CHECK_INT(sluice_cluster_new(&config, &cluster, &text), SLUICE_OK);
    CHECK_INT(sluice_cluster_add_model(cluster, "X", &model, &text), SLUICE_OK);
    for (uint32_t i = 0; i < NODES; i++) {
        struct sluice_node_shape kind = shape_of(model, i % (SLUICE_MAX_GPUS + 1), 1000 + i);
        CHECK_INT(sluice_cluster_add_shape(cluster, &kind, &shape, &text), SLUICE_OK);
        CHECK_INT(sluice_cluster_add_node(cluster, shape, 64000, 64000, 0, &node, &text), SLUICE_OK);
    }
    struct sluice_cluster_totals before, after;
    sluice_cluster_read_totals(cluster, &before);
    uint64_t held[ALLOCATIONS + 1];
    uint32_t count = 0, refused = 0;
    for (int step = 0; step < 20000; step++) {
        struct sluice_part parts[4];
        struct sluice_placement placement = {.parts = parts, .part_count = 1 + draw(4)};
        for (uint32_t i = 0; i < placement.part_count; i++)
            parts[i] = (struct sluice_part){.node = draw(NODES + 1),
                                            .gpus = draw(3) ? 0 : 1u << draw(8),
                                            .gpu_memory_mib = draw(2) ? draw(400) : 0,
                                            .cpus_milli = draw(6000),
                                            .host_memory_mib = draw(6000),
                                            .exclusive = draw(20) == 0};
        uint32_t at = count ? draw(count) : 0;
        switch (draw(5)) {
        case 0:
        case 1:
            if (sluice_commit(cluster, &placement, &held[count], &text) == SLUICE_OK)
                count++;
            else
                refused++;
            break;
        case 2:
        case 3:
            if (count) {
                CHECK_INT(sluice_release(cluster, held[at], &text), SLUICE_OK);
                CHECK_INT(sluice_release(cluster, held[at], &text), SLUICE_ERROR_UNKNOWN);
                held[at] = held[--count];
            }
            break;
        default:
            if (count) {
                uint32_t part_count;
                CHECK_INT(sluice_allocation_read(cluster, held[at], parts, 4, &part_count, &text), SLUICE_OK);
                parts[0].cpus_milli = draw(9000);
                parts[0].gpu_memory_mib = draw(4) ? parts[0].gpu_memory_mib : draw(500);
                refused += sluice_resize(cluster, held[at], &parts[0], &text) != SLUICE_OK;
            }
        }
        if (step % 100 == 0)
            CHECK_INT(sluice_cluster_check(cluster, &text), SLUICE_OK);
    }
    CHECK(refused > 1000);
    while (count > 0)
        CHECK_INT(sluice_release(cluster, held[--count], &text), SLUICE_OK);
    CHECK_INT(sluice_cluster_check(cluster, &text), SLUICE_OK);
    sluice_cluster_read_totals(cluster, &after);
    CHECK(memcmp(&before, &after, sizeof before) == 0);
    sluice_cluster_free(cluster);
}

static void check_allocations(void)
{
    uint32_t shape, node, count = 99;
    struct sluice_cluster *cluster = new_cluster(4, &shape);
    for (int i = 0; i < 4; i++)
        CHECK_INT(sluice_cluster_add_node(cluster, shape, 64000, 1000, 0, &node, &text), SLUICE_OK);
    struct sluice_part parts[4] = {
        {.node = 0, .gpus = 1, .gpu_memory_mib = 40000}, {.node = 1}, {.node = 2}, {.node = 3}};
    struct sluice_placement placement = {.parts = parts, .part_count = 4};
    uint64_t first, other;
    CHECK_INT(sluice_commit(cluster, &placement, &first, &text), SLUICE_OK);
    CHECK_INT(sluice_commit(cluster, &placement, &other, &text), SLUICE_ERROR_CAPACITY); /* parts: 6 */
    placement.part_count = 1;
    CHECK_INT(sluice_commit(cluster, &placement, &other, &text), SLUICE_OK);
    CHECK_INT(sluice_commit(cluster, &placement, &other, &text), SLUICE_ERROR_CAPACITY); /* GPU memory */
    CHECK_STR(text.text, "node 0 GPU 0: 40000 MiB asked, 1920 free");
    parts[0].gpus = 0;
    parts[0].gpu_memory_mib = 0;
    CHECK_INT(sluice_commit(cluster, &placement, &other, &text), SLUICE_OK);
    CHECK_INT(sluice_commit(cluster, &placement, &other, &text), SLUICE_ERROR_CAPACITY); /* parts again */
    CHECK_INT(sluice_allocation_read(cluster, first, parts, 3, &count, &text), SLUICE_ERROR_CAPACITY);
    CHECK_INT(count, 99);
    CHECK_INT(sluice_allocation_read(cluster, 0, parts, 4, &count, &text), SLUICE_ERROR_UNKNOWN);
    CHECK_INT(sluice_allocation_read(cluster, UINT64_MAX, parts, 4, &count, &text), SLUICE_ERROR_UNKNOWN);

    static const struct {
        struct sluice_part part;
        enum sluice_error error;
    } resizes[] = {
        {{.node = 0, .gpus = 1, .gpu_memory_mib = 41920}, SLUICE_OK},
        {{.node = 0, .gpus = 1, .gpu_memory_mib = 41921}, SLUICE_ERROR_CAPACITY},
        {{.node = 0, .gpus = 2, .gpu_memory_mib = 1}, SLUICE_ERROR_INVALID},
        {{.node = 0, .gpus = 1}, SLUICE_ERROR_INVALID},
        {{.node = 0, .gpus = 1, .gpu_memory_mib = 1, .exclusive = true}, SLUICE_ERROR_INVALID},
        {{.node = 0, .gpus = 1, .gpu_memory_mib = -1}, SLUICE_ERROR_RANGE},
        {{.node = 1, .cpus_milli = 64000}, SLUICE_OK},
        {{.node = 1, .cpus_milli = 64001}, SLUICE_ERROR_CAPACITY},
        {{.node = 4}, SLUICE_ERROR_UNKNOWN},
    };
    for (size_t i = 0; i < sizeof resizes / sizeof resizes[0]; i++)
        CHECK_INT(sluice_resize(cluster, first, &resizes[i].part, &text), resizes[i].error);
    CHECK_INT(sluice_cluster_check(cluster, &text), SLUICE_OK);

    /* A slot whose generations are used up never comes back. */
    CHECK_INT(sluice_release(cluster, first, &text), SLUICE_OK);
    uint32_t slot = cluster->free_allocation;
    cluster->allocations[slot].generation = UINT32_MAX - 3;
    CHECK_INT(sluice_commit(cluster, &placement, &first, &text), SLUICE_OK);
    CHECK_INT((uint32_t)first, slot);
    CHECK_INT(sluice_release(cluster, first, &text), SLUICE_OK);
    CHECK(cluster->free_allocation != slot);
    CHECK_INT(sluice_cluster_check(cluster, &text), SLUICE_OK);
    sluice_cluster_free(cluster);
}

int main(void)
{
    sluice_cluster_free(NULL);
    check_sizes();
    check_models_and_shapes();
    check_switches();
    check_nodes();
    check_allocations();
    check_random_history();
    return 0;
}
