/* SPDX-License-Identifier: Apache-2.0 */
/* What the ledger's tests share: a formatted region in memory that forked children share, and a small generator. */
#ifndef SLUICE_TESTS_LEDGER_REGION_MEMORY_H
#define SLUICE_TESTS_LEDGER_REGION_MEMORY_H

#include "check.h"
#include "sluice/core.h"

#include <sys/mman.h>

#define MIB (UINT64_C(1) << 20)

static inline void *shared_memory(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

/* A ledger whose devices have `capacity` bytes each, in units of `granularity`; owners may take all of it. */
static inline struct sluice_ledger *new_ledger(struct sluice_ledger_shape shape, uint64_t capacity,
                                               uint64_t granularity, void **region)
{
    struct sluice_ledger *ledger;
    size_t size = sluice_ledger_size(&shape);
    *region = shared_memory(size);
    CHECK_INT(sluice_ledger_format(*region, size, &shape, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_new(*region, size, 0, &ledger, NULL), SLUICE_OK);
    for (uint32_t device = 0; device < shape.devices; device++) {
        struct sluice_ledger_device terms = {
            .capacity = capacity, .granularity = granularity, .oversubscription = 1000};
        CHECK_INT(sluice_ledger_set_device(ledger, device, &terms, NULL), SLUICE_OK);
        for (uint32_t owner = 0; owner < shape.owners; owner++)
            CHECK_INT(sluice_ledger_set_quota(ledger, owner, device, UINT64_MAX, NULL), SLUICE_OK);
    }
    return ledger;
}

static inline uint64_t device_charged(struct sluice_ledger *ledger, uint32_t device)
{
    struct sluice_ledger_usage usage;
    CHECK_INT(sluice_ledger_device_usage(ledger, device, &usage, NULL), SLUICE_OK);
    CHECK(usage.charged <= usage.limit);
    CHECK(usage.peak >= usage.charged && usage.peak <= usage.limit);
    return usage.charged;
}

/* xorshift64*, Vigna 2016 */
static inline uint64_t next_random(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(2685821657736338717);
}

#endif
