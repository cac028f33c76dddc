/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which prefixes of prompts replicas have seen lately: sets of eight blocks each, by the block's hash, in which the one
 * unused for longest makes room. A block unused for ten minutes, or of a replica that is gone, is not there.
 */
#include "gate_parts.h"

enum { PREFIX_AGE_S = 600 };

static uint64_t pack(uint32_t second, uint32_t generation, uint32_t replica)
{
    return (uint64_t)second << 32 | (uint64_t)generation << 16 | replica;
}

static uint32_t replica_of(struct gate_prefix block)
{
    return (uint32_t)(block.where & 0xffff);
}

static uint32_t second_of(struct gate_prefix block)
{
    return (uint32_t)(block.where >> 32);
}

static bool is_there(const struct sluice_gate *gate, struct gate_prefix block, uint32_t second)
{
    uint32_t replica = replica_of(block);
    return replica && replica <= gate->shape.replicas && gate->replicas[replica].row.in_use &&
           gate->replicas[replica].generation == (block.where >> 16 & 0xffff) &&
           second - second_of(block) <= PREFIX_AGE_S;
}

static uint32_t this_second(const struct sluice_gate *gate)
{
    return (uint32_t)(gate->header->latest_us / 1000000);
}

static struct gate_prefix *set_of(const struct sluice_gate *gate, uint64_t hash)
{
    return &gate->prefixes[(gate_mix(hash) & gate->prefix_sets) * GATE_PREFIX_WAYS];
}

uint32_t gate_find_prefix(const struct sluice_gate *gate, const struct gate_ticket *ticket,
                          const struct gate_choice *choice, uint32_t *blocks)
{
    uint32_t second = this_second(gate), best = 0;
    for (uint32_t i = ticket->prefix_count; i-- > 0 && !best;) {
        const struct gate_prefix *set = set_of(gate, ticket->prefix[i]);
        for (uint32_t way = 0; way < GATE_PREFIX_WAYS; way++) {
            if (set[way].hash != ticket->prefix[i] || !is_there(gate, set[way], second))
                continue;
            uint32_t replica = replica_of(set[way]);
            if (gate_choice_suits(gate, choice, replica) && gate_choice_better(gate, replica, best)) {
                best = replica;
                *blocks = i + 1;
            }
        }
    }
    return best;
}

/* The block's own place, else a free one, else the one unused for longest. */
static struct gate_prefix *place_for(const struct sluice_gate *gate, uint64_t hash, uint32_t replica, uint32_t second)
{
    struct gate_prefix *set = set_of(gate, hash), *place = NULL;
    for (uint32_t way = 0; way < GATE_PREFIX_WAYS; way++) {
        bool there = is_there(gate, set[way], second);
        if (there && set[way].hash == hash && replica_of(set[way]) == replica)
            return &set[way];
        if (!place || !is_there(gate, *place, second))
            place = place ? place : &set[way];
        else if (!there || second - second_of(set[way]) > second - second_of(*place))
            place = &set[way];
    }
    return place;
}

void gate_remember_prefix(struct sluice_gate *gate, const struct gate_ticket *ticket, uint32_t replica)
{
    uint32_t second = this_second(gate);
    for (uint32_t i = 0; i < ticket->prefix_count; i++) {
        struct gate_prefix *place = place_for(gate, ticket->prefix[i], replica, second);
        place->where = 0;
        gate_order();
        place->hash = ticket->prefix[i];
        gate_order();
        place->where = pack(second, gate->replicas[replica].generation, replica);
    }
}
