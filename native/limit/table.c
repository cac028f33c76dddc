/* SPDX-License-Identifier: Apache-2.0 */
#include "table.h"

#include <sys/mman.h>

enum { FIRST_ROOM = 64 };

static uint64_t mix(enum limit_class class, uint64_t key)
{
    uint64_t x = key ^ (uint64_t) class << 56; /* the finaliser of SplitMix64 */
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static struct limit_shard *shard_of(struct limit_table *table, uint64_t hash)
{
    return &table->shards[hash >> 58];
}

/* The tenant's own allocator may be anything, so tables are mapped; a forked child has no use for them. */
static struct limit_entry *new_entries(size_t room)
{
    void *memory =
        mmap(NULL, room * sizeof(struct limit_entry), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return NULL;
    madvise(memory, room * sizeof(struct limit_entry), MADV_DONTFORK);
    return memory;
}

static struct limit_entry *place_of(struct limit_shard *shard, enum limit_class class, uint64_t key)
{
    if (shard->room == 0)
        return NULL;
    size_t at = mix(class, key) & (shard->room - 1);
    while (shard->entries[at].class != 0 && (shard->entries[at].key != key || shard->entries[at].class != class))
        at = (at + 1) & (shard->room - 1);
    return &shard->entries[at];
}

static bool grow(struct limit_shard *shard)
{
    if (shard->used * 2 < shard->room)
        return true;
    struct limit_shard wider = {.room = shard->room ? 2 * shard->room : FIRST_ROOM, .used = shard->used};
    wider.entries = new_entries(wider.room);
    if (!wider.entries)
        return false;
    for (size_t i = 0; i < shard->room; i++)
        if (shard->entries[i].class != 0)
            *place_of(&wider, shard->entries[i].class, shard->entries[i].key) = shard->entries[i];
    if (shard->entries)
        munmap(shard->entries, shard->room * sizeof *shard->entries);
    shard->entries = wider.entries;
    shard->room = wider.room;
    return true;
}

/* Closes the gap, so that no search ends before what it looks for. */
static void erase(struct limit_shard *shard, struct limit_entry *entry)
{
    size_t hole = (size_t)(entry - shard->entries), mask = shard->room - 1;
    for (size_t at = (hole + 1) & mask; shard->entries[at].class != 0; at = (at + 1) & mask) {
        size_t home = mix(shard->entries[at].class, shard->entries[at].key) & mask;
        if (((at - home) & mask) >= ((at - hole) & mask)) {
            shard->entries[hole] = shard->entries[at];
            hole = at;
        }
    }
    shard->entries[hole] = (struct limit_entry){0};
    shard->used--;
}

bool limit_table_put(struct limit_table *table, const struct limit_entry *entry)
{
    struct limit_shard *shard = shard_of(table, mix(entry->class, entry->key));
    pthread_mutex_lock(&shard->lock);
    bool done = grow(shard);
    if (done) {
        struct limit_entry *place = place_of(shard, entry->class, entry->key);
        shard->used += place->class == 0;
        *place = *entry;
    }
    pthread_mutex_unlock(&shard->lock);
    return done;
}

static bool look(struct limit_table *table, enum limit_class class, uint64_t key, struct limit_entry *entry, bool take)
{
    struct limit_shard *shard = shard_of(table, mix(class, key));
    pthread_mutex_lock(&shard->lock);
    struct limit_entry *place = place_of(shard, class, key);
    bool found = place && place->class != 0;
    if (found)
        *entry = *place;
    if (found && take)
        erase(shard, place);
    pthread_mutex_unlock(&shard->lock);
    return found;
}

bool limit_table_get(struct limit_table *table, enum limit_class class, uint64_t key, struct limit_entry *entry)
{
    return look(table, class, key, entry, false);
}

bool limit_table_take(struct limit_table *table, enum limit_class class, uint64_t key, struct limit_entry *entry)
{
    return look(table, class, key, entry, true);
}

static bool search(struct limit_table *table, limit_match *match, const void *argument, struct limit_entry *entry,
                   bool take)
{
    bool found = false;
    for (size_t i = 0; i < LIMIT_SHARDS && !found; i++) {
        struct limit_shard *shard = &table->shards[i];
        pthread_mutex_lock(&shard->lock);
        for (size_t k = 0; k < shard->room && !found; k++) {
            found = shard->entries[k].class != 0 && match(&shard->entries[k], argument);
            if (found)
                *entry = shard->entries[k];
            if (found && take)
                erase(shard, &shard->entries[k]);
        }
        pthread_mutex_unlock(&shard->lock);
    }
    return found;
}

bool limit_table_take_any(struct limit_table *table, limit_match *match, const void *argument,
                          struct limit_entry *entry)
{
    return search(table, match, argument, entry, true);
}

bool limit_table_find(struct limit_table *table, limit_match *match, const void *argument, struct limit_entry *entry)
{
    return search(table, match, argument, entry, false);
}

void limit_table_drain(struct limit_table *table, limit_match *match, const void *argument,
                       void (*each)(const struct limit_entry *entry, const void *context), const void *context)
{
    for (size_t i = 0; i < LIMIT_SHARDS; i++) {
        struct limit_shard *shard = &table->shards[i];
        pthread_mutex_lock(&shard->lock);
        for (size_t k = 0; k < shard->room;) {
            struct limit_entry entry = shard->entries[k];
            if (entry.class == 0 || !match(&entry, argument)) {
                k++;
                continue;
            }
            erase(shard, &shard->entries[k]); /* which may have moved another one here */
            each(&entry, context);
        }
        pthread_mutex_unlock(&shard->lock);
    }
}
