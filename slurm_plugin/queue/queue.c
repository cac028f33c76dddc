/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "queue/queue.h"

#include "runtime/runtime.h"

#include <stdlib.h>
#include <string.h>

/* A list that grows as it is needed, up to `most`, and never shrinks. */
struct list {
    void *items;
    uint32_t count, room, most;
    size_t size; /* of an item */
};

struct name {
    char *text;
    uint64_t hash;
};

/* struct sluice_queue with what its readers need not see; the public part comes first. */
struct whole_queue {
    struct sluice_queue seen;
    struct list pending, running, ended, partitions, choices, nodes, names;
    uint32_t *name_table; /* open addressing: number of a name + 1 */
    uint32_t name_table_size;
    uint64_t **partition_nodes; /* bitmaps, by partition, of partition_words[i] words each */
    size_t *partition_words;
};

enum { MAX_NAME_BYTES = 255 };

static struct whole_queue *whole(const struct sluice_queue *queue)
{
    return (struct whole_queue *)(uintptr_t)queue;
}

static struct list list_of(size_t size, uint32_t most)
{
    return (struct list){.most = most, .size = size};
}

/* Room for one more item, zeroed; NULL when the list is full or memory short. */
static void *list_add(struct list *list)
{
    if (list->count >= list->most || !sluice_grow_array(&list->items, &list->room, list->count + 1, list->size))
        return NULL;
    void *item = (char *)list->items + list->size * list->count++;
    memset(item, 0, list->size);
    return item;
}

/* The lists may have moved. */
static void show(struct whole_queue *queue)
{
    queue->seen.pending = queue->pending.items;
    queue->seen.pending_count = queue->pending.count;
    queue->seen.running = queue->running.items;
    queue->seen.running_count = queue->running.count;
    queue->seen.ended = queue->ended.items;
    queue->seen.ended_count = queue->ended.count;
    queue->seen.partitions = queue->partitions.items;
    queue->seen.partition_count = queue->partitions.count;
    queue->seen.choices = queue->choices.items;
    queue->seen.nodes = queue->nodes.items;
}

struct sluice_queue *sluice_queue_new(const struct sluice_queue_config *config)
{
    const struct sluice_queue_config none = {0};
    if (!config)
        config = &none;
    struct whole_queue *queue = calloc(1, sizeof *queue);
    if (!queue)
        return NULL;
    const size_t job = sizeof(struct sluice_queue_job);
    queue->pending = list_of(job, config->max_pending ? config->max_pending : SLUICE_QUEUE_MAX_PENDING);
    queue->running = list_of(job, config->max_running ? config->max_running : SLUICE_QUEUE_MAX_RUNNING);
    queue->ended = list_of(job, config->max_ended ? config->max_ended : SLUICE_QUEUE_MAX_ENDED);
    queue->partitions = list_of(sizeof(struct sluice_queue_partition), SLUICE_QUEUE_MAX_PARTITIONS);
    queue->choices = list_of(sizeof(struct sluice_queue_choice), 2 * SLUICE_QUEUE_MAX_PENDING);
    queue->nodes = list_of(sizeof(uint32_t), SLUICE_QUEUE_MAX_NODE_SHARES);
    queue->names = list_of(sizeof(struct name), SLUICE_QUEUE_MAX_NAMES);
    queue->name_table_size = 2 * SLUICE_QUEUE_MAX_NAMES;
    queue->name_table = calloc(queue->name_table_size, sizeof *queue->name_table);
    queue->partition_nodes = calloc(SLUICE_QUEUE_MAX_PARTITIONS, sizeof *queue->partition_nodes);
    queue->partition_words = calloc(SLUICE_QUEUE_MAX_PARTITIONS, sizeof *queue->partition_words);
    struct name *empty = list_add(&queue->names);
    if (empty)
        empty->text = calloc(1, 1);
    if (!queue->name_table || !queue->partition_nodes || !queue->partition_words || !empty || !empty->text) {
        sluice_queue_free(&queue->seen);
        return NULL;
    }
    return &queue->seen;
}

void sluice_queue_free(struct sluice_queue *queue)
{
    if (!queue)
        return;
    struct whole_queue *all = whole(queue);
    for (uint32_t i = 0; i < all->names.count; i++)
        free(((struct name *)all->names.items)[i].text);
    for (uint32_t i = 0; all->partition_nodes && i < SLUICE_QUEUE_MAX_PARTITIONS; i++)
        free(all->partition_nodes[i]);
    free(all->pending.items);
    free(all->running.items);
    free(all->ended.items);
    free(all->partitions.items);
    free(all->choices.items);
    free(all->nodes.items);
    free(all->names.items);
    free(all->name_table);
    free(all->partition_nodes);
    free(all->partition_words);
    free(all);
}

void sluice_queue_clear(struct sluice_queue *queue, uint32_t node_count)
{
    struct whole_queue *all = whole(queue);
    all->pending.count = all->running.count = all->ended.count = 0;
    all->partitions.count = all->choices.count = all->nodes.count = 0;
    queue->left_out = 0;
    queue->node_count = node_count;
    queue->node_words = ((size_t)node_count + 63) / 64;
    show(all);
}

static struct sluice_queue_job *add_job(struct whole_queue *queue, struct list *list)
{
    struct sluice_queue_job *job = list_add(list);
    if (!job) {
        queue->seen.left_out++;
        return NULL;
    }
    job->tasks = 1;
    job->array_task = UINT32_MAX;
    job->limit_s = -1;
    job->first_choice = queue->choices.count;
    job->first_node = queue->nodes.count;
    show(queue);
    return job;
}

struct sluice_queue_job *sluice_queue_add_pending(struct sluice_queue *queue)
{
    return add_job(whole(queue), &whole(queue)->pending);
}

struct sluice_queue_job *sluice_queue_add_running(struct sluice_queue *queue)
{
    return add_job(whole(queue), &whole(queue)->running);
}

struct sluice_queue_job *sluice_queue_add_ended(struct sluice_queue *queue)
{
    return add_job(whole(queue), &whole(queue)->ended);
}

struct sluice_queue_partition *sluice_queue_add_partition(struct sluice_queue *queue)
{
    struct whole_queue *all = whole(queue);
    uint32_t number = all->partitions.count;
    if (number == SLUICE_QUEUE_MAX_PARTITIONS)
        return NULL;
    if (all->partition_words[number] < queue->node_words) {
        uint64_t *nodes = realloc(all->partition_nodes[number], queue->node_words * sizeof *nodes);
        if (!nodes)
            return NULL;
        all->partition_nodes[number] = nodes;
        all->partition_words[number] = queue->node_words;
    }
    struct sluice_queue_partition *partition = list_add(&all->partitions);
    if (!partition)
        return NULL;
    if (queue->node_words)
        memset(all->partition_nodes[number], 0, queue->node_words * sizeof(uint64_t));
    partition->nodes = all->partition_nodes[number];
    show(all);
    return partition;
}

bool sluice_queue_add_choice(struct sluice_queue *queue, uint32_t partition, uint32_t priority)
{
    struct whole_queue *all = whole(queue);
    struct sluice_queue_choice *choice = list_add(&all->choices);
    if (!choice)
        return false;
    *choice = (struct sluice_queue_choice){.partition = partition, .priority = priority};
    show(all);
    return true;
}

bool sluice_queue_add_node(struct sluice_queue *queue, uint32_t node)
{
    struct whole_queue *all = whole(queue);
    uint32_t *added = list_add(&all->nodes);
    if (!added)
        return false;
    *added = node;
    show(all);
    return true;
}

/* FNV-1a (G. Fowler, L. C. Noll, K.-P. Vo). */
static uint64_t hash_of(const char *text, size_t length)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < length; i++)
        hash = (hash ^ (unsigned char)text[i]) * UINT64_C(0x100000001b3);
    return hash;
}

uint64_t sluice_queue_hash(const char *text)
{
    return text ? hash_of(text, strlen(text)) : 0;
}

sluice_queue_name_t sluice_queue_intern(struct sluice_queue *queue, const char *name)
{
    if (!name || !*name)
        return 0;
    struct whole_queue *all = whole(queue);
    size_t length = strnlen(name, MAX_NAME_BYTES);
    uint64_t hash = hash_of(name, length);
    const struct name *names = all->names.items;
    uint32_t at = (uint32_t)hash & (all->name_table_size - 1);
    for (; all->name_table[at]; at = (at + 1) & (all->name_table_size - 1)) {
        const struct name *known = &names[all->name_table[at] - 1];
        if (known->hash == hash && strncmp(known->text, name, length) == 0 && !known->text[length])
            return all->name_table[at] - 1;
    }
    char *text = strndup(name, length);
    struct name *added = text ? list_add(&all->names) : NULL;
    if (!added) {
        free(text);
        return 0;
    }
    *added = (struct name){.text = text, .hash = hash};
    all->name_table[at] = all->names.count;
    return all->names.count - 1;
}

const char *sluice_queue_name(const struct sluice_queue *queue, sluice_queue_name_t name)
{
    const struct whole_queue *all = whole(queue);
    return ((const struct name *)all->names.items)[name < all->names.count ? name : 0].text;
}
