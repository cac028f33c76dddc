/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The ring between hooks and the thread that writes decisions: many writers, one reader, entries in the order in
 * which they were reserved. No lock and no system call; a writer that finds no room continues without.
 */
#ifndef SLUICE_DECISIONS_RING_H
#define SLUICE_DECISIONS_RING_H

#include "runtime/runtime.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

/* Before each entry. `length`: of the entry with this header, a multiple of 8; 0: not complete yet. Where the ring
 * ends too early for an entry, one of type 0 fills the rest. */
struct slot {
    _Atomic uint32_t length;
    uint16_t type;
    uint16_t unused;
    uint32_t payload;
    uint32_t more_unused;
    int64_t time_us;
};

struct ring {
    uint8_t *data; /* zero wherever no entry is */
    uint64_t size;
    _Alignas(64) _Atomic uint64_t head; /* reserved up to here */
    _Alignas(64) _Atomic uint64_t tail; /* read up to here */
};

/* Append an entry of that type (not 0), stamped with the time. False when there is no room. Any thread. */
bool sluice_ring_push(struct ring *ring, unsigned type, const void *payload, size_t length);
/* The next complete entry, its payload behind it, or NULL. It stays until sluice_ring_done. The reader's. */
const struct slot *sluice_ring_peek(struct ring *ring);
void sluice_ring_done(struct ring *ring);

#endif /* SLUICE_DECISIONS_RING_H */
