/* SPDX-License-Identifier: Apache-2.0 */
/*
 * After set-up nothing that decides takes memory. The linker hands every allocation of the core to the counters below
 * (--wrap, see CMakeLists.txt), and each scene calls what its handles have, successes and refusals, with the count
 * standing still.
 */
#include "check.h"
#include "sluice/core.h"

static uint64_t allocations;

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *memory, size_t size);
void *__real_aligned_alloc(size_t alignment, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *memory, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);

void *__wrap_malloc(size_t size)
{
    allocations++;
    return __real_malloc(size);
}

void *__wrap_calloc(size_t count, size_t size)
{
    allocations++;
    return __real_calloc(count, size);
}

void *__wrap_realloc(void *memory, size_t size)
{
    allocations++;
    return __real_realloc(memory, size);
}

void *__wrap_aligned_alloc(size_t alignment, size_t size)
{
    allocations++;
    return __real_aligned_alloc(alignment, size);
}

/* Set-up must be seen to allocate, or the counters count nothing; from here on it has to stand still. */
static uint64_t set_up_done(uint64_t before)
{
    CHECK(allocations > before);
    return allocations;
}

enum { NODES = 48, GPUS = 8, PARTS = NODES, JOBS = 64 };

static struct sluice_error_text text;
static struct sluice_part parts[JOBS * 8];

static struct sluice_cluster *new_cluster(void)
{
    const struct sluice_cluster_config config = {.max_nodes = NODES};
    struct sluice_cluster *cluster;
    uint32_t models[2], pod, racks[4], shape, node;
    CHECK_INT(sluice_cluster_new(&config, &cluster, &text), SLUICE_OK);
    CHECK_INT(sluice_cluster_add_model(cluster, "a", &models[0], &text), SLUICE_OK);
    CHECK_INT(sluice_cluster_add_model(cluster, "b", &models[1], &text), SLUICE_OK);
    CHECK_INT(sluice_cluster_add_switch(cluster, 0, &pod, &text), SLUICE_OK);
    for (int i = 0; i < 4; i++)
        CHECK_INT(sluice_cluster_add_switch(cluster, pod, &racks[i], &text), SLUICE_OK);
    for (uint32_t n = 0; n < NODES; n++) {
        struct sluice_node_shape kind = {.gpu_count = GPUS};
        for (uint32_t i = 0; i < GPUS; i++) /* some nodes have GPUs of two models */
            kind.gpus[i] = (struct sluice_gpu_shape){.model = models[n % 5 == 0 && i % 2 ? 1 : n % 2],
                                                     .capability = 800,
                                                     .memory_mib = 1000,
                                                     .link_domain = (uint8_t)(i / 4),
                                                     .numa_node = (uint8_t)(i / 4),
                                                     .near_nic = i % 2};
        kind.nics = (struct sluice_nic_groups){.gpu_count = GPUS,
                                               .nic_count = 8,
                                               .gpu_group = {0, 0, 1, 1, 2, 2, 3, 3},
                                               .nic_group = {0, 1, 2, 3},
                                               .nic_plane = {1, 1, 2, 2}};
        CHECK_INT(sluice_cluster_add_shape(cluster, &kind, &shape, &text), SLUICE_OK);
        CHECK_INT(sluice_cluster_add_node(cluster, shape, 64000, 100000, racks[n % 4], &node, &text), SLUICE_OK);
    }
    return cluster;
}

static const uint64_t every_third[] = {UINT64_C(0x249249249249)};
static const struct sluice_request requests[] = {
    {.gpus = 1},
    {.gpus = 1, .gpu_memory_mib = 300, .cpus_milli = 2000},
    {.gpus = 1, .gpu_memory_mib = 300, .gpu_compute_percent = 60},
    {.gpus = 2, .gpu_memory_mib = 700, .flags = SLUICE_GPU_MEMORY_SUM, .cpus_milli_per_gpu = 500},
    {.cpus_milli = 3000, .host_memory_mib = 50},
    {.gpus = 4, .one_link_domain = SLUICE_REQUIRED, .one_numa_node = SLUICE_PREFERRED, .near_nic = SLUICE_PREFERRED},
    {.gpus = 2, .models = 2},
    {.gpus = 3, .layout = SLUICE_SPREAD, .allowed = every_third, .allowed_words = 1},
    {.gpus = 1, .layout = SLUICE_PACK, .flags = SLUICE_EXCLUSIVE},
    {.gpus = 8, .nodes_min = 4},
    {.gpus = 2, .nodes_min = 2, .nodes_max = 6, .one_switch = SLUICE_REQUIRED},
    {.gpus = 2, .nodes_min = 4, .segment = 2},
    {.gpus = 20, .nodes_max = 8, .flags = SLUICE_GPUS_TOTAL},
    {.gpus = 2, .nics = 2},
    {.gpus = 1, .nodes_min = 3, .nics = 1},
    {.gpus = 6, .nodes_max = 3, .flags = SLUICE_GPUS_TOTAL, .nics_per_gpu = 1},
    {.gpus = 1, .nics = 2, .nic_kinds = 1, .one_link_domain = SLUICE_PREFERRED},
    {.gpus = 2, .nics = 2, .nic_planes = SLUICE_PACK},
    {.gpus = 2, .nodes_min = 2, .nics = 2, .nic_planes = SLUICE_SPREAD},
    {.gpus = 1, .nodes_min = NODES + 1}, /* never */
    {.gpus = 9},                         /* never */
    {.gpus = -1},                        /* refused */
};
enum { REQUESTS = sizeof requests / sizeof *requests };

static void test_cluster_and_placement(void)
{
    uint64_t before = allocations;
    struct sluice_cluster *cluster = new_cluster();
    for (int known = 0; known < 2; known++) {
        if (known) /* sets what usually arrives; the next decision computes the prices that follow from it */
            CHECK_INT(sluice_cluster_set_workload(cluster, requests, (uint32_t[]){5, 3, 1, 1, 1}, 5, &text), SLUICE_OK);
        before = set_up_done(before);
        for (int policy = 0; policy < SLUICE_POLICY_COUNT; policy++) {
            uint64_t held[8 * REQUESTS], group[2];
            uint32_t count = 0, part_count;
            for (uint32_t i = 0; i < 8 * REQUESTS; i++) {
                const struct sluice_request *request = &requests[i % REQUESTS];
                struct sluice_placement placement = {.parts = parts, .part_capacity = PARTS};
                struct sluice_explanation explanation;
                (void)sluice_place(cluster, (enum sluice_policy)policy, request, &placement, &text);
                (void)sluice_explain(cluster, (enum sluice_policy)policy, request, &placement, &explanation, &text);
                if (sluice_start(cluster, (enum sluice_policy)policy, request, &placement, &held[count], &text) ==
                    SLUICE_OK)
                    count++;
            }
            CHECK(count > REQUESTS);
            struct sluice_placement placements[2] = {{.parts = parts, .part_capacity = PARTS},
                                                     {.parts = parts + PARTS, .part_capacity = PARTS}};
            CHECK_INT(sluice_start_group(cluster, (enum sluice_policy)policy,
                                         (struct sluice_request[]){{.gpus = 9}, {.gpus = 1}}, placements, group, 2,
                                         &text),
                      SLUICE_ERROR_NEVER);
            CHECK_INT(sluice_allocation_read(cluster, held[0], parts, PARTS, &part_count, &text), SLUICE_OK);
            struct sluice_part paired = parts[0];
            struct sluice_nic_choice nics;
            CHECK_INT(sluice_choose_nics(cluster, &(struct sluice_nic_groups){.gpu_count = GPUS, .nic_count = 4}, 15, 1,
                                         false, &paired, &nics, &text),
                      SLUICE_OK);
            parts[0].cpus_milli = 4000;
            CHECK_INT(sluice_resize(cluster, held[0], parts, &text), SLUICE_OK);
            for (uint32_t i = 0; i < count; i++)
                CHECK_INT(sluice_release(cluster, held[i], &text), SLUICE_OK);
            CHECK_INT(sluice_release(cluster, held[0], &text), SLUICE_ERROR_UNKNOWN);
            CHECK_INT(
                sluice_start_group(cluster, (enum sluice_policy)policy, &requests[8], placements, group, 2, &text),
                SLUICE_OK);
            CHECK_INT(sluice_release(cluster, group[0], &text), SLUICE_OK);
            CHECK_INT(sluice_release(cluster, group[1], &text), SLUICE_OK);
        }
        CHECK_INT(sluice_node_set_state(cluster, 1, SLUICE_NODE_DRAINED, &text), SLUICE_OK);
        CHECK_INT(sluice_node_set_state(cluster, 1, SLUICE_NODE_UP, &text), SLUICE_OK);
        CHECK_INT(sluice_gpu_set_health(cluster, 1, 2, false, &text), SLUICE_OK);
        CHECK_INT(sluice_gpu_set_health(cluster, 1, 2, true, &text), SLUICE_OK);
        CHECK_INT(sluice_gpu_set_utilisation(cluster, 1, 2, 50, &text), SLUICE_OK);
        uint32_t rank[NODES];
        for (uint32_t n = 0; n < NODES; n++)
            rank[n] = NODES - 1 - n;
        CHECK_INT(sluice_cluster_set_order(cluster, rank, NODES, &text), SLUICE_OK);
        CHECK_INT(allocations, before);
    }
    sluice_cluster_free(cluster);
}

static void test_order(void)
{
    const struct sluice_order_policy policy = {.weight = {1, 1, 1, 1, 1, 1, 1},
                                               .age_full_s = 1000,
                                               .laxity_horizon_s = 1000,
                                               .size_full_gpus = 8,
                                               .starvation_s = 500};
    struct sluice_order *order;
    struct sluice_fairshare *fairshare;
    struct sluice_predictor *predictor;
    uint32_t account = 0, ranked[JOBS];
    uint64_t before = allocations;
    CHECK_INT(sluice_order_new(JOBS, &order, &text), SLUICE_OK);
    CHECK_INT(sluice_fairshare_new(8, 3600, &fairshare, &text), SLUICE_OK);
    for (int i = 0; i < 7; i++)
        CHECK_INT(sluice_fairshare_add(fairshare, account / 2, 1 + (uint32_t)i, &account, &text), SLUICE_OK);
    CHECK_INT(sluice_predictor_new(16, 50, &predictor, &text), SLUICE_OK);
    before = set_up_done(before);
    struct sluice_order_job jobs[JOBS];
    for (uint32_t i = 0; i < JOBS; i++) {
        uint64_t keys[] = {i, i % 7};
        int64_t remaining;
        CHECK_INT(sluice_predictor_record(predictor, keys, 2, 10 * i, &text), SLUICE_OK);
        CHECK_INT(sluice_predictor_predict(predictor, keys, 2, 0, 0, &remaining, &text), SLUICE_OK);
        CHECK_INT(sluice_fairshare_charge(fairshare, i % 8, i, i, &text), SLUICE_OK);
        jobs[i] = (struct sluice_order_job){.id = i,
                                            .submit_s = i,
                                            .eligible_s = i,
                                            .deadline_s = i % 3 ? 2000 + i : 0,
                                            .remaining_s = remaining,
                                            .gpus = i % 9,
                                            .priority = i,
                                            .account = i % 8};
    }
    sluice_fairshare_refresh(fairshare, 600);
    CHECK_INT(sluice_order_sort(order, &policy, fairshare, jobs, JOBS, 530, ranked, &text), SLUICE_OK);
    CHECK_INT(sluice_order_sort(order, &policy, fairshare, jobs, JOBS + 1, 530, ranked, &text), SLUICE_ERROR_CAPACITY);
    CHECK_INT(allocations, before);
    sluice_order_free(order);
    sluice_fairshare_free(fairshare);
    sluice_predictor_free(predictor);
}

static void test_preemption_and_backfill(void)
{
    const struct sluice_backfill_config config = {.max_jobs = JOBS, .max_running = 4 * NODES};
    uint64_t before = allocations;
    struct sluice_cluster *cluster = new_cluster();
    struct sluice_preemption *preemption;
    struct sluice_backfill *backfill;
    CHECK_INT(sluice_preemption_new(cluster, NODES, &preemption, &text), SLUICE_OK);
    CHECK_INT(sluice_backfill_new(&config, NODES, &backfill, &text), SLUICE_OK);
    struct sluice_power *power;
    const struct sluice_power_budget budgets[] = {{.watts = 130 * NODES},
                                                  {.watts = 200, .nodes = every_third, .node_words = 1}};
    CHECK_INT(sluice_power_new(NODES, &power, &text), SLUICE_OK);
    CHECK_INT(sluice_power_set(power, budgets, 2, 0, &text), SLUICE_OK);
    before = set_up_done(before);

    struct sluice_candidate candidates[NODES];
    struct sluice_backfill_running running[NODES];
    uint32_t victims[NODES], victim_count, part_count, waiting = 0;
    struct sluice_placement placement = {.parts = parts, .part_capacity = PARTS};
    for (uint32_t i = 0; i < NODES; i++) {
        uint64_t allocation;
        CHECK_INT(sluice_start(cluster, SLUICE_POLICY_SLUICE, &(struct sluice_request){.gpus = 6}, &placement,
                               &allocation, &text),
                  SLUICE_OK);
        candidates[i] = (struct sluice_candidate){.allocation = allocation, .gang = i % 3 ? 0 : i / 6 + 1};
        running[i] = (struct sluice_backfill_running){
            .allocation = allocation, .end_s = 200 + i, .watts = 10, .power_budgets = 3};
    }
    for (uint32_t nodes = 1; nodes <= 4; nodes++) {
        const struct sluice_request wide = {.gpus = 8, .nodes_min = nodes};
        CHECK_INT(sluice_preemption_plan(preemption, SLUICE_POLICY_SLUICE, &wide, &(struct sluice_preemptor){.tier = 1},
                                         candidates, NODES, 100, &placement, victims, &victim_count, &text),
                  SLUICE_OK);
        CHECK(victim_count >= nodes);
    }
    struct sluice_backfill_job jobs[JOBS];
    struct sluice_backfill_start starts[JOBS];
    for (uint32_t i = 0; i < JOBS; i++)
        jobs[i] = (struct sluice_backfill_job){.request = &requests[i % (REQUESTS - 3)],
                                               .limit_s = 50 + i,
                                               .watts = 100,
                                               .least_watts = i % 2 ? 50 : 0,
                                               .power_budgets = 3,
                                               .group = i % 8 == 6   ? i
                                                        : i % 8 == 7 ? i - 1
                                                                     : 0};
    for (uint32_t powered = 0; powered < 4; powered++) {
        const uint32_t reservations = powered % 2 ? JOBS : 1;
        sluice_backfill_set_power(backfill, powered < 2 ? NULL : power);
        CHECK_INT(sluice_power_set(power, budgets, 2, powered, &text), SLUICE_OK);
        CHECK_INT(sluice_backfill_plan(backfill, cluster, 100, running, NODES, jobs, JOBS, reservations, starts, parts,
                                       sizeof parts / sizeof *parts, &part_count, &text),
                  SLUICE_OK);
        for (uint32_t i = 0; i < JOBS; i++)
            waiting += starts[i].start_s > 100;
    }
    CHECK(waiting > 1);
    CHECK_INT(allocations, before);
    sluice_power_free(power);
    sluice_backfill_free(backfill);
    sluice_preemption_free(preemption);
    sluice_cluster_free(cluster);
}

static void test_compaction(void)
{
    /* Each node has one GPU idle and another half used: a job of two has moves that make room, one of eight has none. */
    const struct sluice_request shapes[] = {{.gpus = 6}, {.gpus = 1, .gpu_memory_mib = 500}, {.gpus = 2}, {.gpus = 8}};
    uint64_t before = allocations;
    struct sluice_cluster *cluster = new_cluster();
    struct sluice_compaction *compaction;
    CHECK_INT(sluice_compaction_new(cluster, 2 * NODES, 4, &compaction, &text), SLUICE_OK);
    before = set_up_done(before);

    struct sluice_movable movables[2 * NODES];
    struct sluice_placement placement = {.parts = parts, .part_capacity = PARTS};
    struct sluice_move moves[SLUICE_COMPACTION_MAX_MOVES];
    const struct sluice_compaction_limits limits = {
        .moves = SLUICE_COMPACTION_MAX_MOVES, .gain = 1000, .factor_permille = 1};
    uint32_t count = 0, move_count;
    for (uint32_t request = 0; request < 2; request++) {
        uint64_t allocation;
        for (uint32_t i = 0; i < NODES; i++) {
            CHECK_INT(
                sluice_start(cluster, SLUICE_POLICY_ROUND_ROBIN, &shapes[request], &placement, &allocation, &text),
                SLUICE_OK);
            movables[count++] = (struct sluice_movable){.allocation = allocation, .request = request, .cost = 1};
        }
    }
    for (uint32_t asked = 2; asked < 4; asked++)
        CHECK_INT(sluice_compaction_plan(compaction, SLUICE_POLICY_SLUICE, shapes, 4, asked, movables, count, &limits,
                                         &placement, moves, &move_count, &text),
                  asked == 2 ? SLUICE_OK : SLUICE_ERROR_NO_PLACE);
    CHECK_INT(move_count, 1);
    CHECK_INT(allocations, before);
    sluice_compaction_free(compaction);
    sluice_cluster_free(cluster);
}

static void test_ledger(void)
{
    static _Alignas(SLUICE_LEDGER_ALIGNMENT) unsigned char region[1 << 14];
    const struct sluice_ledger_shape shape = {.devices = 2, .owners = 2, .processes = 3};
    const struct sluice_ledger_device terms = {.capacity = 1000, .granularity = 8, .oversubscription = 1000};
    struct sluice_ledger *ledger;
    struct sluice_ledger_charge charge;
    struct sluice_ledger_usage usage;
    uint32_t process;
    uint64_t released, before = allocations;
    CHECK_INT(sluice_ledger_format(region, sizeof region, &shape, &text), SLUICE_OK);
    CHECK_INT(sluice_ledger_new(region, sizeof region, 0, &ledger, &text), SLUICE_OK);
    before = set_up_done(before);
    CHECK_INT(sluice_ledger_set_device(ledger, 0, &terms, &text), SLUICE_OK);
    CHECK_INT(sluice_ledger_set_quota(ledger, 0, 0, 800, &text), SLUICE_OK);
    CHECK_INT(sluice_ledger_join(ledger, 0, 7, 1, &process, &text), SLUICE_OK);
    CHECK_INT(sluice_ledger_set_context(ledger, process, 0, 100, &text), SLUICE_OK);
    CHECK_INT(sluice_ledger_reserve(ledger, process, 0, 600, 0, &charge, &text), SLUICE_OK);
    CHECK_INT(sluice_ledger_commit(ledger, process, &charge, &text), SLUICE_OK);
    CHECK_INT(sluice_ledger_release(ledger, process, &charge, &text), SLUICE_OK);
    CHECK_INT(sluice_ledger_reserve(ledger, process, 0, 900, 0, &charge, &text), SLUICE_ERROR_QUOTA);
    CHECK_INT(sluice_ledger_device_usage(ledger, 0, &usage, &text), SLUICE_OK);
    CHECK_INT(sluice_ledger_audit(ledger, &text), SLUICE_OK);
    CHECK_INT(sluice_ledger_reap(ledger, 7, 1, &released, &text), SLUICE_OK);
    CHECK_INT(released, 100);
    CHECK_INT(allocations, before);
    sluice_ledger_free(ledger);
}

static void test_gate(void)
{
    static _Alignas(SLUICE_GATE_ALIGNMENT) unsigned char region[1 << 16];
    const struct sluice_gate_shape shape = {1, 8, 1, 1, 4, 8};
    const struct sluice_gate_limit limit = {.requests = 9, .tokens = 100, .concurrent = 4, .queued = 4};
    const struct sluice_gate_request request = {.subjects = {1, 2, 3, 4}, .tokens = 30, .prefix_count = 2};
    struct sluice_gate *gate;
    struct sluice_gate_answer answer;
    struct sluice_gate_turn turn;
    uint32_t worker, count;
    uint64_t expired, before = allocations;
    CHECK_INT(sluice_gate_format(region, sizeof region, &shape, &text), SLUICE_OK);
    CHECK_INT(sluice_gate_new(region, sizeof region, &gate, &text), SLUICE_OK);
    before = set_up_done(before);
    CHECK_INT(sluice_gate_join(gate, 7, 1, UINT32_MAX, &worker, &text), SLUICE_OK);
    CHECK_INT(sluice_gate_set_limit(gate, SLUICE_GATE_KEY, 1, &limit, &text), SLUICE_OK);
    CHECK_INT(sluice_gate_set_weight(gate, 3, 2, &text), SLUICE_OK);
    CHECK_INT(sluice_gate_set_replica(gate, 11, 4, 1, SLUICE_GATE_USABLE, NULL, &text), SLUICE_OK);
    CHECK_INT(sluice_gate_admit(gate, worker, 0, &request, &answer, &text), SLUICE_OK);
    CHECK_INT(sluice_gate_turn(gate, worker, 0, 1, &turn, &count, &text), SLUICE_OK);
    CHECK_INT(count, 1);
    CHECK_INT(sluice_gate_progress(gate, turn.ticket, 1, 1, &text), SLUICE_OK);
    CHECK_INT(sluice_gate_again(gate, turn.ticket, 0, 11, 0, &text), SLUICE_OK);
    CHECK_INT(sluice_gate_expired(gate, worker, 0, 1, &expired, &count, NULL, &text), SLUICE_OK);
    CHECK_INT(sluice_gate_settle(gate, turn.ticket, 0, 1, 1, NULL, &text), SLUICE_OK);
    for (int i = 0; i < 4; i++)
        CHECK_INT(sluice_gate_admit(gate, worker, 0, &request, &answer, &text), SLUICE_OK);
    CHECK_INT(answer.ticket, 0);
    CHECK_INT(sluice_gate_reap(gate, 7, 1, 0, &count, &text), SLUICE_OK);
    CHECK_INT(count, 3);
    CHECK_INT(allocations, before);
    sluice_gate_free(gate);
}

static void test_replay(void)
{
    struct sluice_replay_job jobs[JOBS];
    const struct sluice_guard_policy guard_policy = {.capacity_milli = 1000};
    struct sluice_guard *guard;
    struct sluice_accuracy *accuracy;
    uint32_t critical, ranked[] = {0};
    int64_t expected, longest;
    for (uint32_t i = 0; i < JOBS; i++)
        jobs[i] = (struct sluice_replay_job){.submit = i,
                                             .run = 30 + i % 50,
                                             .estimate = 100,
                                             .request = i % (REQUESTS - 3),
                                             .gpus_milli = 1000,
                                             .tier = i % 2};
    for (int backfill = 0; backfill < 4; backfill++) {
        for (int preemption = 0; preemption < 3; preemption++) {
            if (preemption == SLUICE_REPLAY_ORDER && backfill >= SLUICE_REPLAY_EASY)
                continue;
            const struct sluice_replay_config config = {.placement = SLUICE_POLICY_SLUICE,
                                                        .backfill = (enum sluice_replay_backfill)backfill,
                                                        .preemption = (enum sluice_replay_preemption)preemption,
                                                        .learn = true,
                                                        .guarded = true,
                                                        .sample_interval = 1,
                                                        .second = 1};
            uint32_t ended = 0;
            uint64_t before = allocations;
            struct sluice_cluster *cluster = new_cluster();
            struct sluice_replay *replay;
            CHECK_INT(sluice_replay_new(cluster, &config, requests, REQUESTS - 3, jobs, JOBS, NULL, &replay, &text),
                      SLUICE_OK);
            before = set_up_done(before);
            CHECK_INT(sluice_replay_run(replay, UINT64_MAX, &ended, &text), SLUICE_OK);
            CHECK_INT(ended, JOBS);
            CHECK_INT(allocations, before);
            sluice_replay_free(replay);
            sluice_cluster_free(cluster);
        }
    }
    uint64_t before = allocations;
    CHECK_INT(sluice_guard_new(&guard_policy, 4, &guard, &text), SLUICE_OK);
    CHECK_INT(sluice_accuracy_new(4, &accuracy, &text), SLUICE_OK);
    before = set_up_done(before);
    sluice_guard_arrival(guard, 1, 10, 1000);
    CHECK_INT(sluice_guard_apply(guard, &(struct sluice_guard_job){.longest = 5}, 1, 0, 1, ranked, &critical, &text),
              SLUICE_OK);
    CHECK_INT(sluice_accuracy_record(accuracy, 10, 5, &text), SLUICE_OK);
    sluice_accuracy_remaining(accuracy, 10, 0, &expected, &longest);
    CHECK_INT(allocations, before);
    sluice_guard_free(guard);
    sluice_accuracy_free(accuracy);
}

int main(void)
{
    test_cluster_and_placement();
    test_order();
    test_preemption_and_backfill();
    test_compaction();
    test_ledger();
    test_gate();
    test_replay();
    return 0;
}
