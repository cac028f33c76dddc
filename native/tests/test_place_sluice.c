/* SPDX-License-Identifier: Apache-2.0 */
/* The sluice policy: its search finds what scoring every node finds, its index follows every change, its score is the
 * one that docs/scheduling.md describes. */
#include "check.h"
#include "score_index.h"

static uint64_t random_state;

static uint64_t random_next(void)
{
    uint64_t z = random_state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static int64_t draw(int64_t low, int64_t high)
{
    return low + (int64_t)(random_next() % (uint64_t)(high - low + 1));
}

static bool chance(int percent)
{
    return draw(1, 100) <= percent;
}

/* ---- clusters ---- */

static uint32_t add_model(struct sluice_cluster *cluster, const char *name)
{
    uint32_t model;
    CHECK_INT(sluice_cluster_add_model(cluster, name, &model, NULL), SLUICE_OK);
    return model;
}

static uint32_t add_shape(struct sluice_cluster *cluster, uint32_t gpus, uint32_t model, uint32_t capability,
                          int64_t memory_mib)
{
    struct sluice_node_shape shape = {.gpu_count = gpus};
    uint32_t id;
    for (uint32_t i = 0; i < gpus; i++)
        shape.gpus[i] = (struct sluice_gpu_shape){.model = model, .capability = capability, .memory_mib = memory_mib};
    CHECK_INT(sluice_cluster_add_shape(cluster, &shape, &id, NULL), SLUICE_OK);
    return id;
}

static uint32_t add_node(struct sluice_cluster *cluster, uint32_t shape, int64_t cpus, int64_t memory_gib)
{
    uint32_t node;
    CHECK_INT(sluice_cluster_add_node(cluster, shape, cpus * 1000, memory_gib * 1024, 0, &node, NULL), SLUICE_OK);
    return node;
}

static struct sluice_cluster *new_cluster(uint32_t max_nodes)
{
    struct sluice_cluster_config config = {.max_nodes = max_nodes};
    struct sluice_cluster *cluster;
    CHECK_INT(sluice_cluster_new(&config, &cluster, NULL), SLUICE_OK);
    return cluster;
}

static void set_workload(struct sluice_cluster *cluster)
{
    static const struct sluice_request usual[] = {
        {.gpus = 1, .gpu_memory_mib = 8000, .cpus_milli = 3000},
        {.gpus = 1, .gpu_memory_mib = 3000, .cpus_milli = 9000},
        {.gpus = 1, .cpus_milli = 12000},
        {.gpus = 1, .cpus_milli = 24000, .models = 2},
        {.gpus = 4, .cpus_milli = 32000},
        {.gpus = 8, .cpus_milli = 120000},
        {.gpus = 0, .cpus_milli = 16000},
        {.gpus = 2, .gpu_memory_mib = 20000, .models = 1},
        {.gpus = 1, .gpu_memory_mib_min = 100000}, /* no GPU is so large */
    };
    static const uint32_t weights[] = {40, 30, 100, 20, 3, 2, 50, 1, 5};
    CHECK_INT(sluice_cluster_set_workload(cluster, usual, weights, 9, NULL), SLUICE_OK);
}

/* Nodes of several kinds, with and without GPUs, some with GPUs of two models. */
static struct sluice_cluster *random_cluster(uint32_t nodes)
{
    struct sluice_cluster *cluster = new_cluster(nodes);
    uint32_t models[] = {add_model(cluster, "a"), add_model(cluster, "b"), add_model(cluster, "c")};
    uint32_t shapes[] = {
        add_shape(cluster, 8, models[0], 80, 24000),  add_shape(cluster, 4, models[1], 70, 16000),
        add_shape(cluster, 1, models[1], 70, 16000),  add_shape(cluster, 2, models[2], 90, 81920),
        add_shape(cluster, 16, models[0], 80, 24000), add_shape(cluster, 0, 0, 0, 0),
    };
    struct sluice_node_shape mixed = {.gpu_count = 3};
    for (uint32_t i = 0; i < 3; i++)
        mixed.gpus[i] =
            (struct sluice_gpu_shape){.model = models[i], .capability = 80, .memory_mib = 16000 + 8000 * (int64_t)i};
    uint32_t mixed_shape;
    CHECK_INT(sluice_cluster_add_shape(cluster, &mixed, &mixed_shape, NULL), SLUICE_OK);
    for (uint32_t i = 0; i < nodes; i++)
        add_node(cluster, chance(10) ? mixed_shape : shapes[draw(0, 5)], 16 * draw(1, 8), 64 * draw(1, 8));
    return cluster;
}

static struct sluice_request random_request(uint64_t *allowed, size_t words)
{
    struct sluice_request request = {.cpus_milli = draw(0, 20000), .host_memory_mib = draw(0, 65536)};
    if (chance(15)) {
        request.cpus_milli *= 2;
    } else if (chance(60)) {
        request.gpus = 1;
        request.gpu_memory_mib = draw(1, chance(90) ? 24000 : 82000);
    } else if (chance(20)) {
        request.gpus = draw(2, 4);
        request.gpu_memory_mib = draw(1, 12000);
    } else {
        request.gpus = chance(80) ? 1 : draw(2, 16);
        request.cpus_milli = request.gpus * draw(0, 12000);
    }
    if (request.gpus && chance(20))
        request.gpu_compute_percent = draw(1, 10) * 10;
    if (request.gpus && chance(30))
        request.models = (uint64_t)draw(1, 7);
    if (request.gpus && chance(10))
        request.capability_min = draw(70, 90);
    if (request.gpus && chance(10))
        request.gpu_memory_mib_min = draw(1, 30000);
    if (chance(25)) { /* few nodes, some, most, or one run of them */
        int percent = (int[]){5, 20, 80}[draw(0, 2)];
        size_t from = chance(50) ? 0 : (size_t)draw(0, (int64_t)words * 32), to = words * 64;
        if (from)
            percent = 100;
        memset(allowed, 0, words * sizeof *allowed);
        for (size_t i = from; i < to; i++)
            allowed[i / 64] |= (uint64_t)chance(percent) << (i % 64);
        request.allowed = allowed;
        request.allowed_words = words;
    }
    return request;
}

/* ---- tests ---- */

/* sluice_place answers what scoring every node answers: the best score, then the lowest rank, and the same GPUs. */
static void check_choice(struct sluice_cluster *cluster, const struct sluice_request *request,
                         const struct sluice_placement *placement, enum sluice_error answer)
{
    struct need need;
    struct choice best;
    CHECK_INT(sluice_need_from_request(cluster, request, &need, NULL), SLUICE_OK);
    CHECK(need.plain);
    bool found = sluice_scan(cluster, &sluice_policies[SLUICE_POLICY_SLUICE], &need, &best);
    CHECK_INT(answer == SLUICE_OK, found);
    if (!found)
        return;
    CHECK_INT(placement->score, best.score);
    CHECK_INT(placement->parts[0].node, best.node);
    CHECK_INT(placement->parts[0].gpus, best.gpus);
}

static void shuffle_order(struct sluice_cluster *cluster)
{
    static uint32_t rank[1024];
    uint32_t count = cluster->node_count;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t j = (uint32_t)draw(0, i);
        rank[i] = rank[j];
        rank[j] = i;
    }
    CHECK_INT(sluice_cluster_set_order(cluster, rank, count, NULL), SLUICE_OK);
}

static void change_a_node(struct sluice_cluster *cluster)
{
    uint32_t node = (uint32_t)draw(0, cluster->node_count - 1), gpus = sluice_shape_of(cluster, node)->gpu_count;
    switch (draw(0, 4)) {
    case 0:
        sluice_node_set_state(cluster, node, chance(70) ? SLUICE_NODE_UP : SLUICE_NODE_DRAINED, NULL);
        break;
    case 1:
        if (gpus)
            sluice_gpu_set_health(cluster, node, (uint32_t)draw(0, gpus - 1), chance(70), NULL);
        break;
    case 2:
        sluice_node_resize(cluster, node, 8000 * draw(1, 20), 65536 * draw(1, 9), NULL); /* may be refused */
        break;
    case 3:
        if (chance(5))
            shuffle_order(cluster);
        break;
    default:
        if (chance(20))
            set_workload(cluster);
    }
}

enum { LIVE = 2000 };

static void test_search_equals_scan(uint64_t seed, uint32_t nodes, int decisions)
{
    random_state = seed;
    struct sluice_cluster *cluster = random_cluster(nodes);
    uint64_t *allowed = malloc((nodes / 64 + 1) * sizeof *allowed);
    static uint64_t live[LIVE];
    int live_count = 0, placed = 0;
    CHECK(allowed);
    for (int i = 0; i < decisions; i++) {
        struct sluice_request request = random_request(allowed, nodes / 64);
        struct sluice_part part;
        struct sluice_placement placement = {.parts = &part, .part_capacity = 1};
        enum sluice_error answer = sluice_place(cluster, SLUICE_POLICY_SLUICE, &request, &placement, NULL);
        check_choice(cluster, &request, &placement, answer);
        if (answer == SLUICE_OK && live_count < LIVE) {
            CHECK_INT(sluice_commit(cluster, &placement, &live[live_count++], NULL), SLUICE_OK);
            placed++;
        }
        if (live_count && (answer != SLUICE_OK || live_count == LIVE || chance(30))) {
            int64_t gone = draw(0, live_count - 1);
            CHECK_INT(sluice_release(cluster, live[gone], NULL), SLUICE_OK);
            live[gone] = live[--live_count];
        }
        if (chance(5))
            change_a_node(cluster);
        if (i % 64 == 0)
            CHECK(sluice_index_sound(cluster));
    }
    CHECK(sluice_index_sound(cluster));
    CHECK(placed > decisions / 4);
    sluice_cluster_free(cluster);
    free(allowed);
}

static void test_kappa(void)
{
    static const struct {
        int32_t cpus_milli;
        int used; /* whole GPUs of four */
        int kappa;
    } cases[] = {
        {3999, 0, 0},    {4000, 0, 1},        {5659, 0, 1},     {5660, 0, 2},     {8000, 0, 3},
        {45256, 0, 8},   {45255, 0, 7},       {45255, 2, 9},    {48000, 3, 12},   {999, 3, 0},
        {500000, 3, 18}, {1000000000, 0, 22}, {1448154, 3, 21}, {1448155, 3, 22}, {48000, 4, KAPPA_CLOSED},
        {0, 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct sluice_cluster *cluster = new_cluster(1);
        uint32_t node, shape = add_shape(cluster, 4, add_model(cluster, "a"), 0, 1000);
        CHECK_INT(sluice_cluster_add_node(cluster, shape, cases[i].cpus_milli, 0, 0, &node, NULL), SLUICE_OK);
        struct sluice_part part = {.node = 0, .gpus = (1u << cases[i].used) - 1};
        struct sluice_placement placement = {.parts = &part, .part_capacity = 1, .part_count = 1};
        uint64_t id;
        if (cases[i].used)
            CHECK_INT(sluice_commit(cluster, &placement, &id, NULL), SLUICE_OK);
        CHECK_INT(sluice_kappa_of(cluster, 0), cases[i].kappa);
        sluice_cluster_free(cluster);
    }
}

/* A request with a choice of two nodes takes the one that the rest of the workload misses less. */
static void test_preferences(void)
{
    static const struct sluice_request scarce = {.gpus = 1, .models = 1}, any = {.gpus = 1},
                                       large = {.gpus = 1, .gpu_memory_mib = 700},
                                       small = {.gpus = 1, .gpu_memory_mib = 300},
                                       hungry = {.gpus = 1, .cpus_milli = 16000}, block = {.gpus = 4},
                                       hungry_block = {.gpus = 4, .cpus_milli = 40000},
                                       cpus_only = {.cpus_milli = 8000};
    static const struct {
        const char *name;
        struct { /* two nodes: GPUs, their model, CPUs, memory in use on GPU 0 */
            uint32_t gpus, model;
            int64_t cpus, used_mib;
        } node[2];
        const struct sluice_request *workload[2];
        struct sluice_request request;
        uint32_t expected;
    } cases[] = {
        {"leave the model that others must have", {{1, 0, 16, 0}, {1, 1, 16, 0}}, {&scarce, &any}, {.gpus = 1}, 1},
        {"a gap that nothing usual fits into",
         {{1, 0, 16, 0}, {1, 0, 16, 650}},
         {&large, &any},
         {.gpus = 1, .gpu_memory_mib = 300},
         1},
        {"the tighter of two gaps",
         {{1, 0, 16, 200}, {1, 0, 16, 600}},
         {&large, &small},
         {.gpus = 1, .gpu_memory_mib = 400},
         1},
        {"leave CPUs where they are short",
         {{4, 0, 36, 0}, {1, 0, 48, 0}},
         {&hungry, &hungry},
         {.gpus = 1, .cpus_milli = 12000},
         1},
        {"CPUs only: away from GPUs that need them",
         {{4, 0, 36, 0}, {1, 0, 48, 0}},
         {&hungry, &hungry},
         {.cpus_milli = 16000},
         1},
        {"CPUs that only a request for several GPUs wants have no price",
         {{4, 0, 44, 0}, {4, 0, 48, 0}},
         {&hungry_block, &any},
         {.cpus_milli = 8000},
         0},
        {"keep a block whole", {{4, 0, 64, 0}, {2, 0, 32, 0}}, {&block, &any}, {.gpus = 1}, 1},
        {"equally good: the first", {{1, 0, 16, 0}, {1, 0, 16, 0}}, {&any, &cpus_only}, {.gpus = 1}, 0},
        {"a GPU in use, with no workload given",
         {{1, 0, 16, 0}, {1, 0, 16, 500}},
         {NULL, NULL},
         {.gpus = 1, .gpu_memory_mib = 300},
         1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct sluice_cluster *cluster = new_cluster(2);
        uint32_t models[] = {add_model(cluster, "a"), add_model(cluster, "b")};
        struct sluice_part part;
        struct sluice_placement placement = {.parts = &part, .part_capacity = 1};
        for (uint32_t n = 0; n < 2; n++) {
            uint32_t shape = add_shape(cluster, cases[i].node[n].gpus, models[cases[i].node[n].model], 0, 1000);
            add_node(cluster, shape, cases[i].node[n].cpus, 64);
            uint64_t id;
            part = (struct sluice_part){.node = n, .gpus = 1, .gpu_memory_mib = cases[i].node[n].used_mib};
            placement.part_count = 1;
            if (part.gpu_memory_mib)
                CHECK_INT(sluice_commit(cluster, &placement, &id, NULL), SLUICE_OK);
        }
        if (cases[i].workload[0]) {
            struct sluice_request usual[] = {*cases[i].workload[0], *cases[i].workload[1]};
            CHECK_INT(sluice_cluster_set_workload(cluster, usual, (const uint32_t[]){1, 1}, 2, NULL), SLUICE_OK);
        }
        CHECK_INT(sluice_place(cluster, SLUICE_POLICY_SLUICE, &cases[i].request, &placement, NULL), SLUICE_OK);
        if (part.node != cases[i].expected)
            fprintf(stderr, "%s:\n", cases[i].name);
        CHECK_INT(part.node, cases[i].expected);
        sluice_cluster_free(cluster);
    }
}

/* A contradiction in the index does not escape sluice_cluster_check. */
static void test_check_looks_at_the_index(void)
{
    random_state = 5;
    struct sluice_cluster *cluster = random_cluster(50);
    struct score_index *index = cluster->index;
    CHECK_INT(sluice_cluster_check(cluster, NULL), SLUICE_OK);
    uint32_t node = 0;
    while (index->filings[node].kind == KIND_OTHER)
        node++;
    /* The node's own entry is its last. */
    uint32_t gpus = index->kinds[index->filings[node].kind]->gpu_count;
    struct entry *entry = &index->entries[index->filings[node].first_entry + gpus + 1];
    int32_t *fields[] = {&entry->free.cpus, &entry->bounds.host_memory};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        ++*fields[i];
        CHECK_INT(sluice_cluster_check(cluster, NULL), SLUICE_ERROR_CORRUPT);
        --*fields[i];
    }
    index->filings[node].kappa ^= 1;
    CHECK_INT(sluice_cluster_check(cluster, NULL), SLUICE_ERROR_CORRUPT);
    index->filings[node].kappa ^= 1;
    CHECK_INT(sluice_cluster_check(cluster, NULL), SLUICE_OK);
    sluice_cluster_free(cluster);
}

/* More kinds of nodes than the index has room for: the rest is scanned, and nothing is lost. */
static void test_many_kinds(void)
{
    struct sluice_cluster *cluster = new_cluster(400);
    uint32_t shape = add_shape(cluster, 2, add_model(cluster, "a"), 0, 1000);
    struct sluice_part part;
    struct sluice_placement placement = {.parts = &part, .part_capacity = 1};
    uint64_t id;
    for (uint32_t i = 0; i < 400; i++)
        add_node(cluster, shape, 4 + i, 64);
    CHECK(sluice_index_sound(cluster));
    CHECK_INT(cluster->index->kind_count, MAX_NODE_KINDS);
    for (int i = 0; i < 800; i++) {
        struct sluice_request request = {.gpus = 1, .cpus_milli = 100};
        enum sluice_error answer = sluice_place(cluster, SLUICE_POLICY_SLUICE, &request, &placement, NULL);
        CHECK_INT(answer, SLUICE_OK);
        check_choice(cluster, &request, &placement, answer);
        CHECK_INT(sluice_commit(cluster, &placement, &id, NULL), SLUICE_OK);
    }
    CHECK(sluice_index_sound(cluster));
    sluice_cluster_free(cluster);
}

/* The largest amounts of everything do not overflow: a lone huge request still beats none. */
static void test_extremes(void)
{
    struct sluice_cluster *cluster = new_cluster(2);
    uint32_t shape = add_shape(cluster, 16, add_model(cluster, "a"), 0, SLUICE_MAX_GPU_MEMORY_MIB / 16), node;
    for (int i = 0; i < 2; i++)
        CHECK_INT(
            sluice_cluster_add_node(cluster, shape, SLUICE_MAX_CPUS_MILLI, SLUICE_MAX_HOST_MEMORY_MIB, 0, &node, NULL),
            SLUICE_OK);
    static const struct sluice_request usual[] = {
        {.gpus = 16, .cpus_milli = 1},
        {.gpus = 1, .cpus_milli = 1},
        {.gpus = 1, .cpus_milli = SLUICE_MAX_CPUS_MILLI},
        {.gpus = 16, .cpus_milli = SLUICE_MAX_CPUS_MILLI},
    };
    CHECK_INT(
        sluice_cluster_set_workload(cluster, usual, (const uint32_t[]){250000000, 250000000, 1, 499999999}, 4, NULL),
        SLUICE_OK);
    struct sluice_part part;
    struct sluice_placement placement = {.parts = &part, .part_capacity = 1};
    struct sluice_request request = {.gpus = 16, .cpus_milli = SLUICE_MAX_CPUS_MILLI};
    enum sluice_error answer = sluice_place(cluster, SLUICE_POLICY_SLUICE, &request, &placement, NULL);
    CHECK_INT(answer, SLUICE_OK);
    check_choice(cluster, &request, &placement, answer);
    CHECK(placement.score <= 0);
    sluice_cluster_free(cluster);
}

int main(void)
{
    int scale = getenv("SLUICE_TEST_SCALE") ? 20 : 1;
    test_kappa();
    test_preferences();
    test_check_looks_at_the_index();
    test_many_kinds();
    test_extremes();
    for (uint64_t seed = 1; seed <= 4; seed++)
        test_search_equals_scan(seed, seed % 2 ? 60 : 700, 6000 * scale);
    return 0;
}
