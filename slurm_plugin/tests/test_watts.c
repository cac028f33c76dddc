/* SPDX-License-Identifier: Apache-2.0 */
/* What jobs draw (sluice.power, caps, defaults), and what a plan leaves of power budgets for starts that it does not have. */
#include "check.h"
#include "with_checksum.h"

#include "planner/plan.h"
#include "planner/watts.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static struct sluice_error_text text;

static enum sluice_error parse_draws(const char *body, struct sluice_draws **draws)
{
    size_t length;
    char *whole = with_checksum(body, &length);
    enum sluice_error error = sluice_draws_parse(whole, length, draws, &text);
    free(whole);
    return error;
}

static struct sluice_rules *new_rules(const char *body)
{
    size_t length;
    char *whole = with_checksum(body, &length);
    struct sluice_rules *rules;
    CHECK_INT(sluice_rules_parse(whole, length, &rules, &text), SLUICE_OK);
    free(whole);
    return rules;
}

static void test_draws(void)
{
    static const struct {
        const char *body, *words;
        enum sluice_error error;
    } wrong[] = {
        {"sluice-withdrawn 1\n", "line 1: not a file of kind sluice-power", SLUICE_ERROR_INVALID},
        {"sluice-power 2\n", "line 1: a format", SLUICE_ERROR_VERSION},
        {"sluice-power 1\nestimate 5 h100\n", "line 2: ", SLUICE_ERROR_INVALID},
        {"sluice-power 1\nestimate 5 h100 100001\n", "line 2: ", SLUICE_ERROR_INVALID},
        {"sluice-power 1\nestimate -1 h100 5\n", "line 2: ", SLUICE_ERROR_INVALID},
        {"sluice-power 1\nestimate 5  h100 5\n", "line 2: ", SLUICE_ERROR_INVALID},
        {"sluice-power 1\njob 7 5 \n", "", SLUICE_OK},
        {"sluice-power 1\njob 7 5 6\n", "line 2: ", SLUICE_ERROR_INVALID},
        {"sluice-power 1\njob 4294967295 5\n", "line 2: ", SLUICE_ERROR_INVALID},
        {"sluice-power 1\n\n", "line 2: ", SLUICE_ERROR_INVALID},
        {"sluice-power 1\nbudget hall 5\n", "line 2: ", SLUICE_ERROR_INVALID},
        {"sluice-power 1\nbudgets hall 5 0\n", "line 2: ", SLUICE_ERROR_INVALID},
        {"sluice-power 1\njob 7 5\njob 7 6\n", "7 is there twice", SLUICE_ERROR_INVALID},
    };
    struct sluice_draws *draws;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK_INT(parse_draws(wrong[i].body, &draws), wrong[i].error);
        CHECK(wrong[i].error == SLUICE_OK || strncmp(text.text, wrong[i].words, strlen(wrong[i].words)) == 0);
        sluice_draws_release(draws);
    }
    CHECK_INT(sluice_draws_parse("sluice-power 1\n", 15, &draws, &text), SLUICE_ERROR_CORRUPT);
    CHECK_INT(parse_draws("sluice-power 1\nbudget hall 90000 0\njob 9 250\nestimate - h100 400\nestimate 5 h100 300\n"
                          "budget row 10 77\n",
                          &draws),
              SLUICE_OK);
    CHECK_INT(sluice_draws_estimate(draws, 5, "h100"), 300);
    CHECK_INT(sluice_draws_estimate(draws, 6, "h100"), 400);
    CHECK_INT(sluice_draws_estimate(draws, 5, "a100"), 0);
    CHECK_INT(sluice_draws_job(draws, 9), 250);
    CHECK_INT(sluice_draws_job(draws, 8), 0);
    CHECK(sluice_draws_budget(draws, "hall")->until_s == INT64_MAX);
    CHECK_INT(sluice_draws_budget(draws, "row")->until_s, 77);
    CHECK(!sluice_draws_budget(draws, "other") && !sluice_draws_budget(NULL, "hall"));
    sluice_draws_release(draws);
}

static const char policy[] = "sluice-policy 1.0\n"
                             "[class h100]\ngpu-types = h100\ngpu-memory-mib = 80000\npower-default-w = 700\n"
                             "power-idle-w = 100\npower-least-w = 200\npower-start-least-w = 300\n"
                             "[class a100]\ngpu-types = a100\npower-most-w = 400\n"
                             "[class other]\n"
                             "[tenant sure]\nqos = sure\nclass.h100.gpus-guaranteed = 4\n"
                             "[tenant physics]\nclass.h100.power-w = 500\n[tenant atoms]\nparent = physics\n"
                             "[tenant loop]\nparent = loop\n"
                             "[budget hall]\nwatts = 9000\n[budget physics]\ntenant = physics\nwatts = 500\n";

static const char policy_of_a_row[] = "sluice-policy 1.0\n"
                                      "[class h100]\ngpu-types = h100\npower-default-w = 700\npower-idle-w = 100\n"
                                      "power-least-w = 200\npower-start-least-w = 300\n"
                                      "[tenant sure]\nqos = sure\nclass.h100.gpus-guaranteed = 4\n"
                                      "[budget row]\nnodes = n[1-2]\nwatts = 4000\nkept = 400\n";

static void test_jobs(void)
{
    static const struct {
        struct sluice_job_draw job;
        int32_t watts, least, counted;
        uint64_t budgets;
    } cases[] = {
        {{.classes = 1, .account = "chem"}, 600, 200, 100, 1}, /* what its GPU draws by default */
        {{.classes = 1}, 600, 200, 100, 1},
        {{.classes = 3, .account = "chem"}, 600, 200, 100, 1}, /* of several the hungriest */
        {{.classes = 2, .account = "chem"}, 400, 0, 0, 1},
        {{.classes = 4, .account = "chem"}, 0, 0, 0, 1}, /* nothing is known of it */
        {{.classes = 1, .account = "physics"}, 400, 200, 100, 3},
        {{.classes = 1, .account = "atoms"}, 600, 200, 100, 3},
        {{.classes = 1, .account = "loop"}, 600, 200, 100, 1},
        {{.classes = 1, .account = "physics", .cap_w = 350}, 250, 200, 100, 3},
        {{.classes = 1, .account = "chem", .cap_w = 1}, 100, 0, 100, 1}, /* no GPU has a cap that low */
        {{.classes = 1, .account = "chem", .user = 5}, 350, 200, 100, 1},
        {{.classes = 1, .account = "chem", .job_id = 9}, 150, 0, 100, 1},
        {{.classes = 1, .account = "chem", .gpu_memory_mib = 20000}, 150, 0, 100, 1}, /* a quarter of a GPU */
        {{.classes = 1, .account = "chem", .gpu_memory_mib = 90000}, 600, 0, 100, 1},
        /* 200 W of each GPU are kept for what runs within a guarantee */
        {{.classes = 1, .account = "sure", .qos = "sure"}, 400, 0, 300, 1},
        {{.classes = 1, .account = "sure", .qos = "sure", .cap_w = 300}, 0, 0, 0, 1},
        {{.classes = 1, .account = "sure", .qos = "sure", .job_id = 9}, 0, 0, 0, 1},
        {{.classes = 2, .account = "sure", .qos = "sure"}, 400, 0, 0, 1}, /* none of this class */
        {{.classes = 1, .account = "sure", .qos = "over"}, 600, 200, 100, 1},
        {{.classes = 1, .account = "sure"}, 600, 200, 100, 1},
        {{.classes = 1, .account = "sure", .qos = "sure", .gpu_memory_mib = 20000}, 150, 0, 100, 1},
    };
    struct sluice_rules *rules = new_rules(policy);
    struct sluice_draws *draws;
    CHECK_INT(parse_draws("sluice-power 1\nestimate 5 h100 450\njob 9 250\n", &draws), SLUICE_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct sluice_job_watts found = sluice_watts_of(rules, draws, &cases[i].job);
        if (found.watts != cases[i].watts || found.least != cases[i].least)
            fprintf(stderr, "case %zu: %d W, at least %d\n", i, found.watts, found.least);
        CHECK_INT(found.watts, cases[i].watts);
        CHECK_INT(found.least, cases[i].least);
        CHECK(!found.watts || found.counted == cases[i].counted);
        CHECK_INT(found.budgets, cases[i].budgets);
        CHECK(found.guaranteed == (found.counted > 100)); /* more than idle */
    }
    CHECK_INT(sluice_watts_of(rules, NULL, &cases[0].job).watts, 600);
    const int64_t week_s = sluice_watts_week(1764340000); /* a Friday */
    CHECK(week_s <= 1764340000 - 4 * 86400 && week_s > 1764340000 - 5 * 86400 - 3600);
    sluice_draws_release(draws);
    sluice_rules_free(rules);
}

static void test_hours_on_the_day_of_summer_time(void)
{
    const int64_t noon_s = 1774778400; /* a Sunday, 9 hours after clocks went from 2 to 3 */
    setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3", 1);
    tzset();
    CHECK_INT(noon_s - sluice_watts_week(noon_s), (6 * 24 + 12) * 3600);
    unsetenv("TZ");
    tzset();
}

enum { NOW = 1000, NODES = 4 };

static struct sluice_cluster *new_cluster(void)
{
    struct sluice_cluster_config config = {.max_nodes = NODES};
    struct sluice_node_shape shape = {.gpu_count = 4};
    struct sluice_cluster *cluster;
    uint32_t id, node, model;
    CHECK_INT(sluice_cluster_new(&config, &cluster, &text), SLUICE_OK);
    CHECK_INT(sluice_cluster_add_model(cluster, "m", &model, &text), SLUICE_OK);
    for (uint32_t i = 0; i < 4; i++)
        shape.gpus[i] = (struct sluice_gpu_shape){.model = model, .memory_mib = 1000};
    CHECK_INT(sluice_cluster_add_shape(cluster, &shape, &id, &text), SLUICE_OK);
    for (uint32_t i = 0; i < NODES; i++)
        CHECK_INT(sluice_cluster_add_node(cluster, id, 64000, 100000, 0, &node, &text), SLUICE_OK);
    return cluster;
}

/* One job of the plan starts now and one later; others have what is left until then, and what starts is taken off. */
static void test_starts_beside_a_plan(void)
{
    static const uint64_t counting[NODES] = {1, 1, 1, 1};
    const struct sluice_power_budget budget = {.watts = 1000};
    struct sluice_cluster *cluster = new_cluster();
    struct sluice_power *power;
    struct sluice_planner *planner;
    struct sluice_plan *plan;
    CHECK_INT(sluice_power_new(NODES, &power, &text), SLUICE_OK);
    CHECK_INT(sluice_power_set(power, &budget, 1, 0, &text), SLUICE_OK);
    CHECK_INT(sluice_planner_new(NULL, &planner, &text), SLUICE_OK);
    sluice_planner_set_power(planner, power, 1, counting);
    const struct sluice_job_watts draws = {.watts = 300, .budgets = 1};
    struct sluice_plan_job jobs[] = {
        {.job_id = 1, .limit_s = 100, .request = {.gpus = 2, .cpus_milli = 1000}, .power = draws},
        {.job_id = 2, .limit_s = 100, .request = {.gpus = 3, .cpus_milli = 1000}, .power = draws},
    };
    sluice_planner_begin(planner);
    CHECK_INT(sluice_planner_plan(planner, cluster, NOW, NULL, 0, jobs, 2, 2, NULL, 0, &plan, &text), SLUICE_OK);
    sluice_plan_publish(planner, plan, 30);
    plan = sluice_plan_acquire(NOW);
    struct sluice_plan_answer answer = sluice_plan_ask(plan, 1);
    CHECK(answer.state == SLUICE_PLAN_NOW && answer.watts == 300 && !answer.waits_for_power);
    CHECK_INT(sluice_plan_ask(plan, 2).start_s, NOW + 100);
    CHECK_INT(sluice_plan_ask(plan, 2).waits_for_power, 1);

    struct sluice_plan_question question = {.job_id = 1, .limit_s = 100, .now_s = NOW};
    const struct sluice_part here = answer.parts[0], one = {.node = 3, .gpus = 1}, two = {.node = 3, .gpus = 3};
    CHECK_INT(sluice_plan_allows_watts(plan, &question, &draws, &here, 1), 300);
    question.job_id = 7;
    const struct sluice_job_watts modest = {.watts = 300, .least = 100, .budgets = 1}, none = {0},
                                  elsewhere = {.watts = 300},
                                  guaranteed = {.watts = 600, .guaranteed = true, .budgets = 1};
    CHECK_INT(sluice_plan_allows_watts(plan, &question, &draws, &one, 1), 300);
    CHECK_INT(sluice_plan_allows_watts(plan, &question, &draws, &two, 1), -1);
    CHECK_INT(sluice_plan_allows_watts(plan, &question, &modest, &two, 1), 200);
    CHECK_INT(sluice_plan_allows_watts(plan, &question, &none, &two, 1), 0);
    CHECK_INT(sluice_plan_allows_watts(plan, &question, &elsewhere, &two, 1), 300);
    CHECK_INT(sluice_plan_allows_watts(plan, &question, &guaranteed, &two, 1), 200);
    CHECK_INT(sluice_plan_allows_watts(NULL, &question, &draws, &one, 1), -1);
    CHECK_INT(sluice_plan_allows_watts(NULL, &question, &none, &one, 1), 0);
    question.limit_s = 150; /* the reserved start leaves 100 W then */
    CHECK_INT(sluice_plan_allows_watts(plan, &question, &draws, &one, 1), -1);
    CHECK_INT(sluice_plan_allows_watts(plan, &question, &modest, &one, 1), 100);
    question.limit_s = 100;
    uint64_t nodes = 8; /* 400 W are too few for five GPUs, but where some are kept for them */
    sluice_plan_keep_out_watts(plan, &question, &guaranteed, 5, &nodes, 1);
    CHECK(nodes == 8);
    sluice_plan_keep_out_watts(plan, &question, &modest, 5, &nodes, 1);
    CHECK(nodes == 0);
    sluice_plan_job_started(1, 0, &here, 1, NOW + 100, &draws); /* as planned: changes nothing */
    CHECK_INT(sluice_plan_allows_watts(plan, &question, &draws, &one, 1), 300);
    sluice_plan_job_started(7, 0, &one, 1, NOW + 100, &draws);
    question.job_id = 8;
    CHECK_INT(sluice_plan_allows_watts(plan, &question, &draws, &one, 1), -1);
    CHECK_INT(sluice_plan_allows_watts(plan, &question, &modest, &one, 1), 100);
    sluice_plan_release(plan);
    sluice_planner_free(planner);
    sluice_power_free(power);
    sluice_cluster_free(cluster);
}

/* Watts are kept for a job whose nodes Slurm finds, in its place in the order. */
static void test_watts_alone(void)
{
    static const uint64_t counting[NODES] = {1, 1, 1, 1};
    static const struct sluice_part expected[] = {{.node = 2, .gpus = 7}}, others[] = {{.node = 1, .gpus = 7}},
                                    one[] = {{.node = 0, .gpus = 1}};
    const struct sluice_power_budget budget = {.watts = 1000};
    struct sluice_cluster *cluster = new_cluster();
    struct sluice_power *power;
    struct sluice_planner *planner;
    struct sluice_plan *plan;
    CHECK_INT(sluice_power_new(NODES, &power, &text), SLUICE_OK);
    CHECK_INT(sluice_power_set(power, &budget, 1, 0, &text), SLUICE_OK);
    CHECK_INT(sluice_planner_new(NULL, &planner, &text), SLUICE_OK);
    sluice_planner_set_power(planner, power, 1, counting);
    const struct sluice_job_watts draws = {.watts = 300, .budgets = 1};
    struct sluice_plan_job jobs[] = {
        {.job_id = 1, .limit_s = 100, .request = {.gpus = 2, .cpus_milli = 1000}, .power = draws},
        {.job_id = 9, .limit_s = 100, .power = draws, .drawing = expected, .drawing_count = 1, .drawing_from_s = NOW},
        {.job_id = 2, .limit_s = 101, .request = {.gpus = 1, .cpus_milli = 1000}, .power = draws},
        {.job_id = 3, .limit_s = 100, .request = {.gpus = 1, .cpus_milli = 1000}, .power = draws},
    };
    sluice_planner_begin(planner);
    CHECK_INT(sluice_planner_plan(planner, cluster, NOW, NULL, 0, jobs, 4, 4, NULL, 0, &plan, &text), SLUICE_OK);
    struct sluice_plan_answer answer = sluice_plan_ask(plan, 9);
    CHECK(answer.state == SLUICE_PLAN_WATTS && answer.start_s == NOW + 100 && answer.waits_for_power == 1);
    CHECK_INT(sluice_plan_ask(plan, 2).start_s, NOW + 200); /* not in its way */
    CHECK_INT(sluice_plan_ask(plan, 3).state, SLUICE_PLAN_NOW);
    struct sluice_plan_question question = {.job_id = 9, .limit_s = 100, .now_s = NOW};
    CHECK_INT(sluice_plan_allows_watts(plan, &question, &draws, others, 1), -1);
    sluice_plan_release(plan);

    sluice_planner_begin(planner);
    CHECK_INT(sluice_planner_plan(planner, cluster, NOW, NULL, 0, jobs + 1, 2, 2, NULL, 0, &plan, &text), SLUICE_OK);
    sluice_plan_publish(planner, plan, 30);
    plan = sluice_plan_acquire(NOW);
    answer = sluice_plan_ask(plan, 9);
    CHECK(answer.state == SLUICE_PLAN_WATTS && answer.start_s == NOW && !answer.waits_for_power);
    CHECK_INT(sluice_plan_allows_watts(plan, &question, &draws, others, 1), 300); /* on other nodes than expected */
    CHECK_INT(sluice_plan_allows_watts_anywhere(plan, &question, &draws, 3), 300);
    CHECK_INT(sluice_plan_allows_watts_anywhere(plan, &question, &draws, 4), -1);
    uint64_t nodes = 15; /* no node is reserved with its watts */
    sluice_plan_keep_out(plan, &(struct sluice_plan_question){.job_id = 7, .now_s = NOW}, true, &nodes, 1);
    CHECK(nodes == 15 - 1); /* but for job 2, which starts later */
    question.job_id = 7;
    CHECK_INT(sluice_plan_allows_watts(plan, &question, &draws, one, 1), -1);
    sluice_plan_job_started(9, 0, others, 1, NOW + 100, &draws);
    CHECK_INT(sluice_plan_allows_watts(plan, &question, &draws, one, 1), -1);
    question.job_id = 9; /* what was kept for it is used */
    CHECK_INT(sluice_plan_allows_watts(plan, &question, &draws, one, 1), -1);
    sluice_plan_release(plan);
    sluice_planner_free(planner);
    sluice_power_free(power);
    sluice_cluster_free(cluster);
}

/* Nodes 0 and 1 are a row, whose budget keeps what two of its GPUs start with. Guaranteed jobs have `gpus` on each of
 * them: how many watts one GPU of another job gets there (-1: none now), and whether a guaranteed job starts. */
static int32_t left_in_a_row(const struct sluice_rules *rules, uint16_t gpus, bool *guaranteed_starts)
{
    static const uint64_t counting[NODES] = {1, 1}, row = 3;
    const struct sluice_job_draw guaranteed = {.classes = 1, .account = "sure", .qos = "sure"},
                                 other = {.classes = 1, .account = "chem"};
    const struct sluice_job_watts draws = sluice_watts_of(rules, NULL, &guaranteed);
    int64_t kept[SLUICE_POWER_MAX_BUDGETS] = {0};
    struct sluice_cluster *cluster = new_cluster();
    struct sluice_backfill_running running[2];
    struct sluice_power *power;
    struct sluice_planner *planner;
    struct sluice_plan *plan;
    for (uint32_t node = 0; node < 2; node++) {
        struct sluice_part part = {.node = node, .gpus = (1u << gpus) - 1, .cpus_milli = 1000};
        const struct sluice_placement there = {.parts = &part, .part_capacity = 1, .part_count = 1};
        running[node] =
            (struct sluice_backfill_running){.end_s = NOW + 1000, .watts = draws.watts, .power_budgets = draws.budgets};
        CHECK_INT(sluice_commit(cluster, &there, &running[node].allocation, &text), SLUICE_OK);
        sluice_watts_count_kept(kept, counting, 2, &draws, &part, 1);
        const struct sluice_part outside = {.node = 2 + node, .gpus = 1};
        sluice_watts_count_kept(kept, counting, 2 + node, &draws, &outside, 1); /* not in the row */
    }
    struct sluice_power_budget budget = sluice_watts_budget(&rules->budgets[0], NULL, 800, kept[0]);
    budget.nodes = &row;
    budget.node_words = 1;
    CHECK_INT(sluice_power_new(NODES, &power, &text), SLUICE_OK);
    CHECK_INT(sluice_power_set(power, &budget, 1, 0, &text), SLUICE_OK);
    CHECK_INT(sluice_planner_new(NULL, &planner, &text), SLUICE_OK);
    sluice_planner_set_power(planner, power, 1, counting);
    struct sluice_plan_job jobs[] = {
        {.job_id = 1, .limit_s = 100, .power = sluice_watts_of(rules, NULL, &other)},
        {.job_id = 2, .limit_s = 100, .power = draws},
    };
    for (int i = 0; i < 2; i++)
        jobs[i].request = (struct sluice_request){.gpus = 1, .cpus_milli = 1000, .allowed = &row, .allowed_words = 1};
    sluice_planner_begin(planner);
    CHECK_INT(sluice_planner_plan(planner, cluster, NOW, running, 2, jobs, 2, 2, NULL, 0, &plan, &text), SLUICE_OK);
    const struct sluice_plan_answer answer = sluice_plan_ask(plan, 1);
    *guaranteed_starts = sluice_plan_ask(plan, 2).state == SLUICE_PLAN_NOW;
    const int32_t watts = answer.state == SLUICE_PLAN_NOW ? answer.watts : -1;
    CHECK(watts >= 0 || answer.waits_for_power == 1);
    sluice_plan_release(plan);
    sluice_planner_free(planner);
    sluice_power_free(power);
    sluice_cluster_free(cluster);
    return watts;
}

/* Of 4000 W, 800 are drawn idle. A guaranteed GPU has 200 W that are kept and 400 W that are booked, another 200 at the
 * least and 600 at the most. */
static void test_a_row_with_more_guaranteed_gpus_than_its_part(void)
{
    struct sluice_rules *rules = new_rules(policy_of_a_row);
    bool starts = false;
    CHECK_INT(left_in_a_row(rules, 1, &starts), 600); /* its part: 4000 - 800 - 2 * 600 are left */
    CHECK(starts);
    CHECK_INT(left_in_a_row(rules, 2, &starts), 600); /* 800 are left */
    CHECK(starts);
    CHECK_INT(left_in_a_row(rules, 3, &starts), -1); /* 400 too much; with what its part is alone, 400 were left */
    CHECK(starts);
    sluice_rules_free(rules);
}

int main(void)
{
    test_a_row_with_more_guaranteed_gpus_than_its_part();
    test_watts_alone();
    test_draws();
    test_jobs();
    test_hours_on_the_day_of_summer_time();
    test_starts_beside_a_plan();
    return 0;
}
