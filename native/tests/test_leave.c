/* SPDX-License-Identifier: Apache-2.0 */
/* Jobs that leave nodes that are to be empty: the rule case by case, then random jobs against every set that could move. */
#include "check.h"
#include "cluster.h"

enum { NODES = 4, GPUS = 4, MAX_JOBS = 7, ROUNDS = 2000, NOW = 1000, MOVE = 60 };

static struct sluice_error_text text;

/* Nodes of GPUs, of which node 0 is to be empty; requests[0] is for a GPU on the others, requests[1] for eight. */
struct scene {
    struct sluice_cluster *cluster;
    uint64_t allowed;
    struct sluice_request requests[2];
};

static void make_scene(struct scene *scene)
{
    const struct sluice_cluster_config config = {.max_nodes = NODES};
    struct sluice_node_shape shape = {.gpu_count = GPUS};
    uint32_t model, shape_id, node;
    CHECK_INT(sluice_cluster_new(&config, &scene->cluster, &text), SLUICE_OK);
    CHECK_INT(sluice_cluster_add_model(scene->cluster, "a", &model, &text), SLUICE_OK);
    for (int gpu = 0; gpu < GPUS; gpu++)
        shape.gpus[gpu] = (struct sluice_gpu_shape){.model = model, .memory_mib = 1000};
    CHECK_INT(sluice_cluster_add_shape(scene->cluster, &shape, &shape_id, &text), SLUICE_OK);
    for (int i = 0; i < NODES; i++)
        CHECK_INT(sluice_cluster_add_node(scene->cluster, shape_id, 8000, 64000, 0, &node, &text), SLUICE_OK);
    scene->allowed = 0xe;
    for (int i = 0; i < 2; i++)
        scene->requests[i] =
            (struct sluice_request){.gpus = i ? 2 * GPUS : 1, .allowed = &scene->allowed, .allowed_words = 1};
}

/* So many GPUs of the node are used. */
static uint64_t use(struct scene *scene, uint32_t node, uint32_t gpus)
{
    struct sluice_part part = {.node = node, .gpus = (1u << gpus) - 1};
    const struct sluice_placement placement = {.parts = &part, .part_capacity = 1, .part_count = 1};
    uint64_t allocation;
    CHECK_INT(sluice_commit(scene->cluster, &placement, &allocation, &text), SLUICE_OK);
    return allocation;
}

static void plan(struct scene *scene, const struct sluice_leaver *leavers, uint32_t count, uint32_t moves,
                 struct sluice_leave *leaves)
{
    const struct sluice_leave_limits limits = {.now_s = NOW, .moves = moves};
    struct sluice_node_view before[NODES], after;
    for (uint32_t node = 0; node < NODES; node++)
        CHECK_INT(sluice_node_read(scene->cluster, node, &before[node], &text), SLUICE_OK);
    CHECK_INT(sluice_leave_plan(scene->cluster, SLUICE_POLICY_SLUICE, scene->requests, 2, leavers, count, &limits,
                                leaves, &text),
              SLUICE_OK);
    for (uint32_t node = 0; node < NODES; node++) {
        CHECK_INT(sluice_node_read(scene->cluster, node, &after, &text), SLUICE_OK);
        CHECK_INT(after.parts, before[node].parts);
    }
}

/* ends is from now on. */
static void test_the_rule(void)
{
    static const struct {
        int64_t ends_s, deadline_s;
        enum sluice_leave_why bar;
        uint32_t request, moves;
        enum sluice_leave_decision decision;
        enum sluice_leave_why why;
    } cases[] = {
        {600, 0, 0, 0, 8, SLUICE_LEAVE_MOVES, 0},
        {INT64_MAX - NOW, 0, 0, 0, 8, SLUICE_LEAVE_MOVES, 0},
        {600, 601, 0, 0, 8, SLUICE_LEAVE_ENDS, SLUICE_LEAVE_WHY_IN_TIME},
        {600, 600, 0, 0, 8, SLUICE_LEAVE_ENDS, SLUICE_LEAVE_WHY_IN_TIME},
        {600, 599, 0, 0, 8, SLUICE_LEAVE_MOVES, 0},
        {600, -5, 0, 0, 8, SLUICE_LEAVE_MOVES, 0}, /* the deadline is over */
        {60, 0, 0, 0, 8, SLUICE_LEAVE_ENDS, SLUICE_LEAVE_WHY_SOON},
        {61, 0, 0, 0, 8, SLUICE_LEAVE_MOVES, 0},
        {60, 10, 0, 0, 8, SLUICE_LEAVE_ENDS, SLUICE_LEAVE_WHY_SOON},
        {-30, 0, 0, 0, 8, SLUICE_LEAVE_ENDS, SLUICE_LEAVE_WHY_SOON}, /* over its limit */
        {600, 0, 0, 1, 8, SLUICE_LEAVE_LATER, SLUICE_LEAVE_WHY_PLACE},
        {600, 0, 0, 0, 0, SLUICE_LEAVE_LATER, SLUICE_LEAVE_WHY_HOUR},
        {600, 700, SLUICE_LEAVE_WHY_UNSAVED, 0, 8, SLUICE_LEAVE_ENDS, SLUICE_LEAVE_WHY_IN_TIME},
        {30, 0, SLUICE_LEAVE_WHY_TENANT, 0, 8, SLUICE_LEAVE_ENDS, SLUICE_LEAVE_WHY_SOON},
        {600, 0, SLUICE_LEAVE_WHY_OFF, 9, 8, SLUICE_LEAVE_STAYS, SLUICE_LEAVE_WHY_OFF},
        {600, 0, SLUICE_LEAVE_WHY_KIND, 9, 8, SLUICE_LEAVE_STAYS, SLUICE_LEAVE_WHY_KIND},
        {600, 599, SLUICE_LEAVE_WHY_REQUEUE, 0, 8, SLUICE_LEAVE_STAYS, SLUICE_LEAVE_WHY_REQUEUE},
        {600, 0, SLUICE_LEAVE_WHY_TENANT, 0, 0, SLUICE_LEAVE_STAYS, SLUICE_LEAVE_WHY_TENANT},
        {600, 0, SLUICE_LEAVE_WHY_UNSAVED, 0, 8, SLUICE_LEAVE_STAYS, SLUICE_LEAVE_WHY_UNSAVED},
        {600, 0, SLUICE_LEAVE_WHY_SPENT, 0, 8, SLUICE_LEAVE_STAYS, SLUICE_LEAVE_WHY_SPENT},
    };
    struct scene scene;
    make_scene(&scene);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct sluice_leaver leaver = {.bar = cases[i].bar,
                                             .request = cases[i].request,
                                             .move_s = MOVE,
                                             .end_s = NOW + cases[i].ends_s,
                                             .deadline_s = cases[i].deadline_s ? NOW + cases[i].deadline_s : 0};
        struct sluice_leave leave;
        plan(&scene, &leaver, 1, cases[i].moves, &leave);
        if (leave.decision != cases[i].decision || leave.why != cases[i].why)
            fprintf(stderr, "case %zu\n", i);
        CHECK_INT(leave.decision, cases[i].decision);
        CHECK_INT(leave.why, cases[i].why);
        CHECK(leave.decision != SLUICE_LEAVE_MOVES || (leave.to.node > 0 && leave.to.gpus));
    }
    sluice_cluster_free(scene.cluster);
}

static void test_bad_calls(void)
{
    struct scene scene;
    make_scene(&scene);
    struct sluice_leaver leaver = {.request = 2, .end_s = NOW + 600};
    struct sluice_leave leave;
    const struct sluice_leave_limits limits = {.now_s = NOW, .moves = 1};
    CHECK_INT(
        sluice_leave_plan(scene.cluster, SLUICE_POLICY_SLUICE, scene.requests, 2, &leaver, 1, &limits, &leave, &text),
        SLUICE_ERROR_RANGE);
    CHECK_STR(text.text, "job 0: request 2 of 2");
    leaver = (struct sluice_leaver){.end_s = NOW + 600, .move_s = -1};
    CHECK_INT(
        sluice_leave_plan(scene.cluster, SLUICE_POLICY_SLUICE, scene.requests, 2, &leaver, 1, &limits, &leave, &text),
        SLUICE_ERROR_RANGE);
    CHECK_STR(text.text, "job 0: a move of -1 s: at least 0");
    sluice_cluster_free(scene.cluster);
}

/* When the last of those ends that could move and are not in the set. */
static int64_t last_end(const struct sluice_leaver *leavers, uint32_t count, uint32_t set)
{
    int64_t last_s = 0;
    for (uint32_t i = 0; i < count; i++)
        if (!(set >> i & 1) && !leavers[i].bar && leavers[i].end_s - NOW > leavers[i].move_s &&
            leavers[i].end_s > last_s)
            last_s = leavers[i].end_s;
    return last_s;
}

/* No set of so many jobs, of those that may move and need to, empties the node earlier of them. */
static void test_no_other_set_empties_it_earlier(void)
{
    uint32_t whole = 0, partial = 0;
    srand(20);
    for (int round = 0; round < ROUNDS; round++) {
        struct scene scene;
        struct sluice_leaver leavers[MAX_JOBS];
        struct sluice_leave leaves[MAX_JOBS];
        uint32_t count = 1 + (uint32_t)rand() % MAX_JOBS, moves = (uint32_t)rand() % (MAX_JOBS + 1);
        uint32_t room = 0, moved = 0, on_node[NODES] = {0};
        make_scene(&scene);
        for (uint32_t node = 0; node < NODES; node++) {
            uint32_t used = node ? 1 + (uint32_t)rand() % GPUS : GPUS;
            use(&scene, node, used);
            room += node ? GPUS - used : 0;
        }
        for (uint32_t i = 0; i < count; i++)
            leavers[i] = (struct sluice_leaver){.bar = rand() % 4 ? SLUICE_LEAVE_WHY_NONE : SLUICE_LEAVE_WHY_UNSAVED,
                                                .end_s = NOW + rand() % 300,
                                                .move_s = MOVE / 2 + rand() % MOVE};
        plan(&scene, leavers, count, moves, leaves);
        for (uint32_t i = 0; i < count; i++) {
            if (leaves[i].decision != SLUICE_LEAVE_MOVES)
                continue;
            moved |= 1u << i;
            on_node[leaves[i].to.node]++;
            CHECK(!leavers[i].bar && leavers[i].end_s - NOW > leavers[i].move_s && leaves[i].to.node > 0);
        }
        uint32_t most = room < moves ? room : moves;
        CHECK((uint32_t)__builtin_popcount(moved) <= most);
        for (uint32_t set = 0; set < 1u << count; set++)
            if ((uint32_t)__builtin_popcount(set) <= most)
                CHECK(last_end(leavers, count, moved) <= last_end(leavers, count, set));
        whole += moved && !last_end(leavers, count, moved);
        partial += last_end(leavers, count, moved) != 0;
        sluice_cluster_free(scene.cluster);
    }
    CHECK(whole > ROUNDS / 10 && partial > ROUNDS / 10);
}

int main(void)
{
    test_the_rule();
    test_bad_calls();
    test_no_other_set_empties_it_earlier();
    return 0;
}
