/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "hook/cache.h"

#include <stdlib.h>
#include <string.h>

/* A request may have a positive and a negative answer, for different candidates: each has its own entry. */
enum { WAYS = 4 };

struct entry {
    struct sluice_job_shape shape; /* count 0: empty */
    int rc;
    uint64_t used;
    uint64_t *nodes; /* rc 0: stock's choice; else: the candidates that it had */
};

struct sluice_cache {
    uint32_t entries;
    size_t words;
    uint64_t now;
    struct entry *entry;
    uint64_t *bitmaps;
};

struct sluice_cache *sluice_cache_new(uint32_t entries, size_t words)
{
    struct sluice_cache *cache = calloc(1, sizeof(*cache));
    if (!cache)
        return NULL;
    cache->entries = entries < WAYS ? WAYS : entries;
    cache->words = words;
    cache->entry = calloc(cache->entries, sizeof(*cache->entry));
    cache->bitmaps = calloc(cache->entries, (words ? words : 1) * sizeof(uint64_t));
    if (!cache->entry || !cache->bitmaps) {
        sluice_cache_free(cache);
        return NULL;
    }
    for (uint32_t i = 0; i < cache->entries; i++)
        cache->entry[i].nodes = cache->bitmaps + i * words;
    return cache;
}

void sluice_cache_free(struct sluice_cache *cache)
{
    if (!cache)
        return;
    free(cache->entry);
    free(cache->bitmaps);
    free(cache);
}

void sluice_cache_clear(struct sluice_cache *cache)
{
    for (uint32_t i = 0; i < cache->entries; i++)
        cache->entry[i].shape.count = 0;
}

static bool same_shape(const struct sluice_job_shape *a, const struct sluice_job_shape *b)
{
    return a->hash == b->hash && a->count == b->count && !memcmp(a->words, b->words, a->count * sizeof(a->words[0]));
}

/* The first of the entries where a request's answers may be. */
static struct entry *places_of(const struct sluice_cache *cache, const struct sluice_job_shape *shape)
{
    uint32_t sets = cache->entries / WAYS;
    return &cache->entry[(shape->hash >> 32) % sets * WAYS];
}

bool sluice_cache_find(struct sluice_cache *cache, const struct sluice_job_shape *shape, const uint64_t *candidates,
                       int *rc, const uint64_t **nodes)
{
    if (!shape->count)
        return false;
    struct entry *place = places_of(cache, shape);
    for (uint32_t way = 0; way < WAYS; way++) {
        struct entry *entry = &place[way];
        if (!entry->shape.count || !same_shape(&entry->shape, shape))
            continue;
        size_t word = 0;
        if (entry->rc == 0)
            while (word < cache->words && !(entry->nodes[word] & ~candidates[word]))
                word++;
        else
            while (word < cache->words && entry->nodes[word] == candidates[word])
                word++;
        if (word < cache->words)
            continue;
        entry->used = ++cache->now;
        *rc = entry->rc;
        *nodes = entry->nodes;
        return true;
    }
    return false;
}

void sluice_cache_put(struct sluice_cache *cache, const struct sluice_job_shape *shape, const uint64_t *candidates,
                      int rc, const uint64_t *nodes)
{
    if (!shape->count)
        return;
    struct entry *place = places_of(cache, shape), *oldest = place;
    for (uint32_t way = 0; way < WAYS; way++) {
        if (!place[way].shape.count) {
            oldest = &place[way];
            break;
        }
        if (place[way].used < oldest->used)
            oldest = &place[way];
    }
    oldest->shape = *shape;
    oldest->rc = rc;
    oldest->used = ++cache->now;
    memcpy(oldest->nodes, rc == 0 ? nodes : candidates, cache->words * sizeof(uint64_t));
}
