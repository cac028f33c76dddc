/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The ring between hooks and the thread that writes decision records: many writers, one reader, records in the order in
 * which they were reserved. No lock and no system call; whoever finds no room goes on without.
 */
#ifndef SLUICE_CONTROLLER_DECISION_RING_H
#define SLUICE_CONTROLLER_DECISION_RING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

/* Before each record. `length`: of the record with this header, a multiple of 8; 0: not complete yet. Where the ring
 * ends too early for a record, one of type 0 fills the rest. */
struct slot {
    _Atomic uint32_t length;
    uint16_t type;
    uint16_t unused;
    uint32_t payload;
    uint32_t more_unused;
    int64_t time_us;
};

struct ring {
    uint8_t *data; /* zero wherever no record is */
    uint64_t size;
    _Alignas(64) _Atomic uint64_t head; /* reserved up to here */
    _Alignas(64) _Atomic uint64_t tail; /* read up to here */
};

/* Microseconds since 1970. */
static inline int64_t sluice_wall_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* Append a record of that type (not 0), stamped with the time. False when there is no room. Any thread. */
bool sluice_ring_push(struct ring *ring, unsigned type, const void *payload, size_t length);
/* The next complete record, its payload behind it, or NULL. It stays until sluice_ring_done. The reader's. */
const struct slot *sluice_ring_peek(struct ring *ring);
void sluice_ring_done(struct ring *ring);

#endif /* SLUICE_CONTROLLER_DECISION_RING_H */
