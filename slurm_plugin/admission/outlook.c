/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "admission/outlook.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* Run times that are distinguished, in seconds: a job's is rounded up to the next one. */
static const int64_t runs_s[] = {600, 1800, 3600, 7200, 14400, 43200, 86400, 604800, INT64_C(366) * 86400};
enum { RUNS = sizeof runs_s / sizeof *runs_s, NEVER = -1, NAME = 64, MANY_SPANS = 64 };

struct partition {
    char name[NAME];
    bool usual;
    uint64_t *nodes;
};

struct sluice_outlook {
    atomic_uint references;
    int64_t made_s, valid_until_s;
    uint32_t node_count, partition_count;
    int32_t *first;      /* [run][gpus - 1][node]: seconds from made_s on; NEVER */
    char (*types)[NAME]; /* of nodes */
    struct partition *partitions;
    uint64_t *words; /* of all partitions */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct sluice_outlook *in_force;

static void outlook_free(struct sluice_outlook *outlook)
{
    if (!outlook)
        return;
    free(outlook->first);
    free(outlook->types);
    free(outlook->partitions);
    free(outlook->words);
    free(outlook);
}

void sluice_outlook_release(struct sluice_outlook *outlook)
{
    if (outlook && atomic_fetch_sub(&outlook->references, 1) == 1)
        outlook_free(outlook);
}

struct sluice_outlook *sluice_outlook_acquire(int64_t now_s)
{
    pthread_mutex_lock(&lock);
    struct sluice_outlook *outlook = in_force && now_s <= in_force->valid_until_s ? in_force : NULL;
    if (outlook)
        atomic_fetch_add(&outlook->references, 1);
    pthread_mutex_unlock(&lock);
    return outlook;
}

void sluice_outlook_publish(struct sluice_outlook *outlook, int64_t valid_until_s)
{
    if (outlook)
        outlook->valid_until_s = valid_until_s;
    pthread_mutex_lock(&lock);
    struct sluice_outlook *old = in_force;
    in_force = outlook;
    pthread_mutex_unlock(&lock);
    sluice_outlook_release(old);
}

int64_t sluice_outlook_made_s(const struct sluice_outlook *outlook)
{
    return outlook->made_s;
}

/* ---- making one ---- */

static int by_node(const void *a, const void *b)
{
    const struct sluice_outlook_span *one = a, *other = b;
    if (one->node != other->node)
        return one->node < other->node ? -1 : 1;
    return one->end_s < other->end_s ? -1 : one->end_s > other->end_s;
}

static int32_t *cell(const struct sluice_outlook *outlook, int run, uint32_t gpus, uint32_t node)
{
    return &outlook->first[((size_t)run * SLUICE_OUTLOOK_GPUS + gpus - 1) * outlook->node_count + node];
}

/* The GPUs that are free from `at` on for `run_s`. */
static uint32_t free_gpus(uint32_t gpus, const struct sluice_outlook_span *spans, uint32_t count, int64_t at,
                          int64_t run_s)
{
    for (uint32_t i = 0; i < count; i++)
        if (spans[i].end_s > at && spans[i].start_s < at + run_s)
            gpus &= ~spans[i].gpus;
    return (uint32_t)__builtin_popcount(gpus);
}

/* A node's cells. More GPUs come free only when something ends: these times are tried in order. */
static void look_at_node(struct sluice_outlook *outlook, uint32_t node, uint32_t gpus,
                         const struct sluice_outlook_span *spans, uint32_t count)
{
    uint32_t all = (uint32_t)__builtin_popcount(gpus);
    /* If there are very many ends, only some are used: a later time is a safe answer, too. */
    uint32_t step = count / MANY_SPANS + 1;
    for (int run = 0; run < RUNS; run++) {
        uint32_t found = 0, i = 0;
        for (;;) {
            int64_t at = i && spans[i - 1].end_s > outlook->made_s ? spans[i - 1].end_s : outlook->made_s;
            uint32_t now_free = free_gpus(gpus, spans, count, at, runs_s[run]);
            for (; found < now_free && found < SLUICE_OUTLOOK_GPUS; found++)
                *cell(outlook, run, found + 1, node) = (int32_t)(at - outlook->made_s);
            if (found == all || i == count)
                break;
            i = i + step < count ? i + step : count;
        }
    }
}

static bool copy_partitions(struct sluice_outlook *outlook, const struct sluice_outlook_parts *parts)
{
    size_t words = ((size_t)parts->node_count + 63) / 64;
    outlook->partitions = calloc(parts->partition_count + 1, sizeof *outlook->partitions);
    outlook->words = calloc(words * parts->partition_count + 1, sizeof *outlook->words);
    if (!outlook->partitions || !outlook->words)
        return false;
    for (uint32_t i = 0; i < parts->partition_count; i++) {
        const struct sluice_outlook_partition *from = &parts->partitions[i];
        struct partition *to = &outlook->partitions[outlook->partition_count];
        if (strlen(from->name) >= NAME)
            continue;
        memcpy(to->name, from->name, strlen(from->name) + 1);
        to->usual = from->usual;
        to->nodes = outlook->words + words * outlook->partition_count++;
        memcpy(to->nodes, from->nodes, words * sizeof *to->nodes);
    }
    return true;
}

struct sluice_outlook *sluice_outlook_new(const struct sluice_outlook_parts *parts)
{
    if (parts->node_count > SLUICE_OUTLOOK_MAX_NODES)
        return NULL;
    struct sluice_outlook *outlook = calloc(1, sizeof *outlook);
    if (!outlook)
        return NULL;
    atomic_init(&outlook->references, 1);
    outlook->made_s = parts->now_s;
    outlook->node_count = parts->node_count;
    size_t cells = (size_t)RUNS * SLUICE_OUTLOOK_GPUS * parts->node_count;
    outlook->first = malloc((cells + 1) * sizeof *outlook->first);
    outlook->types = calloc(parts->node_count + 1, sizeof *outlook->types);
    if (!outlook->first || !outlook->types || !copy_partitions(outlook, parts)) {
        outlook_free(outlook);
        return NULL;
    }
    for (size_t i = 0; i < cells; i++)
        outlook->first[i] = NEVER;
    if (parts->span_count)
        qsort(parts->spans, parts->span_count, sizeof *parts->spans, by_node);
    uint32_t span = 0;
    for (uint32_t node = 0; node < parts->node_count; node++) {
        const struct sluice_outlook_node *from = &parts->nodes[node];
        uint32_t first = span;
        while (span < parts->span_count && parts->spans[span].node == node)
            span++;
        if (from->type && strlen(from->type) < NAME)
            memcpy(outlook->types[node], from->type, strlen(from->type) + 1);
        look_at_node(outlook, node, from->gpus, parts->spans + first, span - first);
    }
    return outlook;
}

/* ---- asking ---- */

/* The time from which `question->nodes` nodes of a partition have the GPUs; NEVER. */
static int32_t first_in(const struct sluice_outlook *outlook, const struct partition *partition,
                        const struct sluice_outlook_question *question, int run)
{
    int32_t best[SLUICE_OUTLOOK_NODES]; /* the smallest so far, ascending */
    uint32_t count = 0;
    const int32_t *row = cell(outlook, run, question->gpus, 0);
    bool typed = question->type && question->type[0];
    for (uint32_t node = 0; node < outlook->node_count; node++) {
        int32_t first = row[node];
        if (first == NEVER || !(partition->nodes[node / 64] >> node % 64 & 1) ||
            (count == question->nodes && first >= best[count - 1]) ||
            (typed && strcmp(outlook->types[node], question->type) != 0))
            continue;
        uint32_t at = count < question->nodes ? count++ : count - 1;
        for (; at > 0 && best[at - 1] > first; at--)
            best[at] = best[at - 1];
        best[at] = first;
    }
    return count == question->nodes ? best[count - 1] : NEVER;
}

static bool is_meant(const struct partition *partition, const char *asked)
{
    if (!asked || !*asked)
        return partition->usual;
    size_t length = strlen(partition->name);
    for (; *asked; asked += strcspn(asked, ","), asked += *asked == ',') {
        if (strcspn(asked, ",") == length && memcmp(asked, partition->name, length) == 0)
            return true;
    }
    return false;
}

bool sluice_outlook_ask(const struct sluice_outlook *outlook, const struct sluice_outlook_question *question,
                        int64_t *start_s)
{
    int32_t best = NEVER;
    int run = 0;
    if (!question->gpus || question->gpus > SLUICE_OUTLOOK_GPUS || !question->nodes ||
        question->nodes > SLUICE_OUTLOOK_NODES || question->run_s > runs_s[RUNS - 1] || !outlook->node_count)
        return false;
    while (runs_s[run] < question->run_s)
        run++;
    for (uint32_t i = 0; i < outlook->partition_count; i++) {
        if (!is_meant(&outlook->partitions[i], question->partitions))
            continue;
        int32_t first = first_in(outlook, &outlook->partitions[i], question, run);
        if (first != NEVER && (best == NEVER || first < best))
            best = first;
    }
    *start_s = outlook->made_s + best;
    return best != NEVER;
}
