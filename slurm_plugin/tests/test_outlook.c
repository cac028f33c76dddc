/* SPDX-License-Identifier: GPL-2.0-or-later */
/* When GPUs come free, after what runs and what is planned. */
#include "admission/outlook.h"
#include "check.h"

#include <stdlib.h>
#include <string.h>

enum { NOW = 1000000, MINUTE = 60, HOUR = 3600 };

static struct sluice_outlook_node nodes[4] = {{0xff, "h100"}, {0xff, "h100"}, {0xf, "a100"}, {0xff, ""}};
static const uint64_t all = 0xf, fast = 0x3, none = 0;
static const struct sluice_outlook_partition partitions[] = {
    {"main", &all, true}, {"fast", &fast, false}, {"empty", &none, false}};

static struct sluice_outlook *make(struct sluice_outlook_span *spans, uint32_t count)
{
    struct sluice_outlook_parts parts = {.now_s = NOW,
                                         .nodes = nodes,
                                         .node_count = 4,
                                         .spans = spans,
                                         .span_count = count,
                                         .partitions = partitions,
                                         .partition_count = 3};
    return sluice_outlook_new(&parts);
}

/* Seconds from now on; -1: not known. */
static int64_t ask(const struct sluice_outlook *outlook, const char *partition, const char *type, uint32_t gpus,
                   uint32_t count, int64_t run_s)
{
    struct sluice_outlook_question question = {
        .partitions = partition, .type = type, .gpus = gpus, .nodes = count, .run_s = run_s};
    int64_t start_s;
    return sluice_outlook_ask(outlook, &question, &start_s) ? start_s - NOW : -1;
}

static void an_idle_cluster_has_all_at_once(void)
{
    struct sluice_outlook *outlook = make(NULL, 0);
    CHECK(outlook && sluice_outlook_made_s(outlook) == NOW);
    CHECK_INT(ask(outlook, NULL, NULL, 8, 3, HOUR), 0);
    CHECK_INT(ask(outlook, NULL, NULL, 8, 4, HOUR), -1); /* one has four */
    CHECK_INT(ask(outlook, "", "", 4, 4, HOUR), 0);
    CHECK_INT(ask(outlook, "main", "a100", 4, 1, HOUR), 0);
    CHECK_INT(ask(outlook, "main", "a100", 5, 1, HOUR), -1);
    CHECK_INT(ask(outlook, "fast", "a100", 1, 1, HOUR), -1);
    CHECK_INT(ask(outlook, "fast", NULL, 8, 2, INT64_C(300) * 24 * HOUR), 0);
    CHECK_INT(ask(outlook, "empty", NULL, 1, 1, HOUR), -1);
    CHECK_INT(ask(outlook, "empty,fast", NULL, 1, 1, HOUR), 0);
    CHECK_INT(ask(outlook, "fas", NULL, 1, 1, HOUR), -1);
    CHECK_INT(ask(outlook, NULL, NULL, 0, 1, HOUR), -1);
    CHECK_INT(ask(outlook, NULL, NULL, 17, 1, HOUR), -1);
    CHECK_INT(ask(outlook, NULL, NULL, 1, SLUICE_OUTLOOK_NODES + 1, HOUR), -1);
    CHECK_INT(ask(outlook, NULL, NULL, 1, 1, INT64_C(400) * 24 * HOUR), -1);
    sluice_outlook_release(outlook);
}

static void ends_and_planned_starts_count(void)
{
    struct sluice_outlook_span spans[] = {
        {1, 0xff, 0, NOW + 2 * HOUR},              /* runs */
        {0, 0x0f, 0, NOW + HOUR},                  /* runs */
        {0, 0xff, NOW + 3 * HOUR, NOW + 5 * HOUR}, /* is planned */
        {3, 0xff, 0, NOW + INT64_C(30) * 24 * HOUR},
        {2, 0x1, 0, NOW - 5}, /* should have ended */
    };
    struct sluice_outlook *outlook = make(spans, 5);
    CHECK_INT(ask(outlook, "fast", NULL, 4, 1, HOUR), 0);            /* the other half of node 0 */
    CHECK_INT(ask(outlook, "fast", NULL, 4, 1, 4 * HOUR), 2 * HOUR); /* ... but for the planned start */
    CHECK_INT(ask(outlook, "fast", NULL, 8, 1, HOUR), HOUR);         /* before the planned start */
    CHECK_INT(ask(outlook, "fast", NULL, 8, 1, 2 * HOUR), HOUR);
    CHECK_INT(ask(outlook, "fast", NULL, 8, 1, 2 * HOUR + MINUTE), 2 * HOUR); /* as four hours: on node 1 */
    CHECK_INT(ask(outlook, "fast", NULL, 8, 2, 4 * HOUR), 5 * HOUR);
    CHECK_INT(ask(outlook, "main", "a100", 4, 1, HOUR), 0);
    CHECK_INT(ask(outlook, "main", NULL, 8, 3, HOUR), INT64_C(30) * 24 * HOUR);
    sluice_outlook_release(outlook);
}

static void very_many_ends_give_a_later_answer_at_most(void)
{
    enum { MANY = 1000 };
    static struct sluice_outlook_span spans[MANY];
    for (uint32_t i = 0; i < MANY; i++)
        spans[i] = (struct sluice_outlook_span){0, 1U << i % 8, 0, NOW + (i + 1) * MINUTE};
    struct sluice_outlook *outlook = make(spans, MANY);
    CHECK_INT(ask(outlook, "fast", NULL, 8, 2, HOUR), MANY * MINUTE);
    int64_t one = ask(outlook, "main", "h100", 4, 2, HOUR);
    CHECK(one >= (MANY - 4) * MINUTE && one <= MANY * MINUTE);
    sluice_outlook_release(outlook);
}

static void one_is_in_force_for_a_time(void)
{
    CHECK(!sluice_outlook_acquire(NOW));
    struct sluice_outlook *made = make(NULL, 0);
    sluice_outlook_publish(made, NOW + 30);
    struct sluice_outlook *held = sluice_outlook_acquire(NOW + 30);
    CHECK(held == made);
    CHECK(!sluice_outlook_acquire(NOW + 31));
    sluice_outlook_publish(make(NULL, 0), NOW + 60); /* what is held stays */
    CHECK_INT(ask(held, NULL, NULL, 1, 1, HOUR), 0);
    sluice_outlook_release(held);
    sluice_outlook_publish(NULL, 0);
    CHECK(!sluice_outlook_acquire(NOW));
    struct sluice_outlook_parts large = {.node_count = SLUICE_OUTLOOK_MAX_NODES + 1};
    CHECK(!sluice_outlook_new(&large));
}

int main(void)
{
    an_idle_cluster_has_all_at_once();
    ends_and_planned_starts_count();
    very_many_ends_give_a_later_answer_at_most();
    one_is_in_force_for_a_time();
    return 0;
}
