/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The table of jobs that hold something, and the core's allocations of each. */
#include "mirror/mirror_internal.h"

#include <stdlib.h>

static uint32_t slot_of(const struct sluice_mirror *mirror, uint32_t job_id)
{
    uint32_t mask = mirror->table_size - 1, at = job_id * UINT32_C(2654435761) & mask;
    while (mirror->table[at].job_id && mirror->table[at].job_id != job_id)
        at = (at + 1) & mask;
    return at;
}

struct entry *sluice_mirror_find_entry(const struct sluice_mirror *mirror, uint32_t job_id)
{
    if (!mirror->table_size)
        return NULL;
    struct entry *entry = &mirror->table[slot_of(mirror, job_id)];
    return entry->job_id ? entry : NULL;
}

static bool grow_table(struct sluice_mirror *mirror)
{
    uint32_t size = mirror->table_size ? mirror->table_size * 2 : 1024;
    struct entry *old = mirror->table, *table = calloc(size, sizeof(*table));
    if (!table)
        return false;
    uint32_t old_size = mirror->table_size;
    mirror->table = table;
    mirror->table_size = size;
    for (uint32_t i = 0; i < old_size; i++)
        if (old[i].job_id)
            table[slot_of(mirror, old[i].job_id)] = old[i];
    free(old);
    return true;
}

struct entry *sluice_mirror_add_entry(struct sluice_mirror *mirror, uint32_t job_id)
{
    if (mirror->entries * 2 >= mirror->table_size && !grow_table(mirror))
        return NULL;
    struct entry *entry = &mirror->table[slot_of(mirror, job_id)];
    if (!entry->job_id) {
        *entry = (struct entry){.job_id = job_id, .first = NONE};
        mirror->entries++;
        mirror->foreign += job_id >= FOREIGN;
    }
    return entry;
}

/* Remove an entry; those after it in its run move up. */
static void remove_entry(struct sluice_mirror *mirror, uint32_t slot)
{
    uint32_t mask = mirror->table_size - 1, hole = slot, at = slot;
    mirror->foreign -= mirror->table[slot].job_id >= FOREIGN;
    mirror->sharing -= mirror->table[slot].sharing;
    mirror->clipped -= mirror->table[slot].clipped;
    mirror->entries--;
    for (;;) {
        at = (at + 1) & mask;
        if (!mirror->table[at].job_id)
            break;
        uint32_t home = mirror->table[at].job_id * UINT32_C(2654435761) & mask;
        if (((at - home) & mask) >= ((at - hole) & mask)) {
            mirror->table[hole] = mirror->table[at];
            hole = at;
        }
    }
    mirror->table[hole] = (struct entry){0};
}

static bool add_holding(struct sluice_mirror *mirror, struct entry *entry, uint64_t allocation)
{
    uint32_t holding = mirror->free_holding;
    if (holding != NONE) {
        mirror->free_holding = mirror->holdings[holding].next;
    } else {
        if (mirror->holding_count == mirror->holding_room) {
            uint32_t room = mirror->holding_room ? mirror->holding_room * 2 : 1024;
            struct holding *holdings = realloc(mirror->holdings, room * sizeof(*holdings));
            if (!holdings)
                return false;
            mirror->holdings = holdings;
            mirror->holding_room = room;
        }
        holding = mirror->holding_count++;
    }
    mirror->holdings[holding] = (struct holding){.allocation = allocation, .next = entry->first};
    entry->first = holding;
    return true;
}

/* ---- allocations ---- */

static void note_changed(struct sluice_mirror *mirror, const struct sluice_part *parts, uint32_t count)
{
    if (mirror->recorder)
        for (uint32_t i = 0; i < count; i++)
            sluice_decision_node_changed(mirror->recorder, parts[i].node);
}

void sluice_mirror_hold(struct sluice_mirror *mirror, struct entry *entry, struct sluice_part *parts, uint32_t count)
{
    struct sluice_placement placement = {.parts = parts, .part_capacity = count, .part_count = count};
    uint64_t allocation = 0;
    if (!count || sluice_commit(mirror->cluster, &placement, &allocation, NULL))
        return; /* believed free: stock will say no where it is not */
    if (!add_holding(mirror, entry, allocation))
        sluice_release(mirror->cluster, allocation, NULL);
    note_changed(mirror, parts, count);
}

void sluice_mirror_let_go(struct sluice_mirror *mirror, uint32_t job_id)
{
    if (!mirror->table_size)
        return;
    uint32_t slot = slot_of(mirror, job_id);
    struct entry *entry = &mirror->table[slot];
    if (!entry->job_id)
        return;
    mirror->reshare |= entry->pooled;
    for (uint32_t at = entry->first, next; at != NONE; at = next) {
        uint32_t count = 0;
        next = mirror->holdings[at].next;
        if (!sluice_allocation_read(mirror->cluster, mirror->holdings[at].allocation, mirror->parts, mirror->part_room,
                                    &count, NULL))
            note_changed(mirror, mirror->parts, count);
        sluice_release(mirror->cluster, mirror->holdings[at].allocation, NULL);
        mirror->holdings[at].next = mirror->free_holding;
        mirror->free_holding = at;
    }
    remove_entry(mirror, slot);
    mirror->counts.jobs_freed += job_id < FOREIGN;
}

uint32_t sluice_mirror_allocations(const struct sluice_mirror *mirror, uint32_t job_id, uint64_t *allocations,
                                   uint32_t capacity)
{
    const struct entry *entry = sluice_mirror_find_entry(mirror, job_id);
    uint32_t count = 0;
    for (uint32_t at = entry ? entry->first : NONE; at != NONE; at = mirror->holdings[at].next, count++)
        if (count < capacity)
            allocations[count] = mirror->holdings[at].allocation;
    return count;
}

const struct sluice_part *sluice_mirror_parts(struct sluice_mirror *mirror, uint32_t job_id, uint32_t *count)
{
    const struct entry *entry = sluice_mirror_find_entry(mirror, job_id);
    *count = 0;
    for (uint32_t at = entry ? entry->first : NONE; at != NONE; at = mirror->holdings[at].next) {
        uint32_t more = 0;
        if (!sluice_allocation_read(mirror->cluster, mirror->holdings[at].allocation, mirror->parts + *count,
                                    mirror->part_room - *count, &more, NULL))
            *count += more;
    }
    return mirror->parts;
}
