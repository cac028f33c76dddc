/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "decisions/ring.h"

#include <string.h>

static struct slot *slot_at(const struct ring *ring, uint64_t place)
{
    return (struct slot *)(void *)(ring->data + (place & (ring->size - 1)));
}

bool sluice_ring_push(struct ring *ring, unsigned type, const void *payload, size_t length)
{
    const uint64_t needed = (sizeof(struct slot) + length + 7) & ~UINT64_C(7);
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed), filler;
    do {
        uint64_t left = ring->size - (head & (ring->size - 1));
        filler = left < needed ? left : 0;
        if (head + filler + needed - atomic_load_explicit(&ring->tail, memory_order_acquire) > ring->size)
            return false;
    } while (!atomic_compare_exchange_weak_explicit(&ring->head, &head, head + filler + needed, memory_order_relaxed,
                                                    memory_order_relaxed));
    if (filler) { /* its other fields may not fit; they are zero, as type 0 */
        atomic_store_explicit(&slot_at(ring, head)->length, (uint32_t)filler, memory_order_release);
        head += filler;
    }
    struct slot *slot = slot_at(ring, head);
    slot->type = (uint16_t)type;
    slot->payload = (uint32_t)length;
    slot->time_us = sluice_wall_us();
    memcpy(slot + 1, payload, length);
    atomic_store_explicit(&slot->length, (uint32_t)needed, memory_order_release);
    return true;
}

const struct slot *sluice_ring_peek(struct ring *ring)
{
    for (;;) {
        uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
        struct slot *slot = slot_at(ring, tail);
        uint32_t length = atomic_load_explicit(&slot->length, memory_order_acquire);
        if (length == 0)
            return NULL;
        if (length >= sizeof *slot && slot->type)
            return slot;
        memset(slot, 0, sizeof(uint32_t)); /* a filler: nothing else of it was written */
        atomic_store_explicit(&ring->tail, tail + length, memory_order_release);
    }
}

void sluice_ring_done(struct ring *ring)
{
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    struct slot *slot = slot_at(ring, tail);
    uint32_t length = atomic_load_explicit(&slot->length, memory_order_relaxed);
    memset((void *)slot, 0, length);
    atomic_store_explicit(&ring->tail, tail + length, memory_order_release);
}
