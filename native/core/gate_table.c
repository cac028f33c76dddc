/* SPDX-License-Identifier: Apache-2.0 */
/* The gate's hash tables: chains of rows that stay where they are, and a list of those that may be used for another id. */
#include "gate_parts.h"

#include <string.h>

/* The finaliser of MurmurHash3 (Appleby, public domain). */
uint64_t gate_mix(uint64_t value)
{
    value ^= value >> 33;
    value *= UINT64_C(0xff51afd7ed558ccd);
    value ^= value >> 33;
    value *= UINT64_C(0xc4ceb9fe1a85ec53);
    return value ^ value >> 33;
}

struct gate_row *gate_table_row(const struct gate_table *table, uint32_t row)
{
    return (struct gate_row *)(void *)(table->rows + row * table->stride);
}

static uint32_t *bucket_of(const struct gate_table *table, uint32_t kind, uint64_t id)
{
    return &table->buckets[gate_mix(id + kind * UINT64_C(0x9e3779b97f4a7c15)) & table->mask];
}

static struct gate_links idle_links(const struct gate_table *table)
{
    return (struct gate_links){table->rows, table->stride, offsetof(struct gate_row, idle)};
}

uint32_t gate_table_find(const struct gate_table *table, uint32_t kind, uint64_t id)
{
    uint32_t row = *bucket_of(table, kind, id);
    while (row) {
        const struct gate_row *head = gate_table_row(table, row);
        if (head->id == id && head->kind == kind)
            break;
        row = head->next;
    }
    return row;
}

void gate_table_set_idle(struct sluice_gate *gate, const struct gate_table *table, uint32_t row, bool idle)
{
    struct gate_row *head = gate_table_row(table, row);
    if (head->is_idle == idle)
        return;
    gate_put32(gate, &head->is_idle, idle);
    if (idle)
        gate_list_append(gate, idle_links(table), &table->state->idle, row);
    else
        gate_list_remove(gate, idle_links(table), &table->state->idle, row);
}

void gate_table_drop(struct sluice_gate *gate, const struct gate_table *table, uint32_t row)
{
    struct gate_row *head = gate_table_row(table, row);
    gate_table_set_idle(gate, table, row, false);
    uint32_t *at = bucket_of(table, head->kind, head->id);
    while (*at != row)
        at = &gate_table_row(table, *at)->next;
    gate_put32(gate, at, head->next);
    gate_put32(gate, &head->in_use, 0);
    gate_put32(gate, &head->next, table->state->free);
    gate_put32(gate, &table->state->free, row);
}

/* A row that is not in use, or 0. */
static uint32_t unused_row(struct sluice_gate *gate, const struct gate_table *table)
{
    struct gate_table_state *state = table->state;
    if (!state->free && state->fresh < table->capacity) {
        gate_put32(gate, &state->fresh, state->fresh + 1);
        return state->fresh;
    }
    if (!state->free && state->idle.first)
        gate_table_drop(gate, table, state->idle.first);
    uint32_t row = state->free;
    if (row)
        gate_put32(gate, &state->free, gate_table_row(table, row)->next);
    return row;
}

uint32_t gate_table_take(struct sluice_gate *gate, const struct gate_table *table, uint32_t kind, uint64_t id)
{
    uint32_t row = unused_row(gate, table);
    if (!row)
        return 0;
    char *at = (char *)gate_table_row(table, row);
    for (size_t offset = sizeof(struct gate_row); offset < table->stride; offset += sizeof(uint64_t)) {
        uint64_t word;
        memcpy(&word, at + offset, sizeof word);
        if (word && gate_save(gate, at + offset))
            memset(at + offset, 0, sizeof word);
    }
    struct gate_row *head = gate_table_row(table, row);
    uint32_t *bucket = bucket_of(table, kind, id);
    gate_put64(gate, &head->id, id);
    gate_put32(gate, &head->kind, kind);
    gate_put32(gate, &head->in_use, 1);
    gate_put32(gate, &head->next, *bucket);
    gate_put32(gate, bucket, row);
    return row;
}
