/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ledger's shared region: its layout and the two-word atomics that it uses.
 *
 *   header | device[devices] | seat[processes] | owner_account[owners][devices] | process_account[processes][devices]
 *
 * Every part is a multiple of 64 bytes: no two parts share a cache line. All of it is zero after formatting, but for
 * the header.
 */
#ifndef SLUICE_CORE_LEDGER_REGION_H
#define SLUICE_CORE_LEDGER_REGION_H

#include "sluice/core.h"

#include <assert.h>
#include <stdalign.h>
#include <stdatomic.h>

/* Two words that change together. `mark` takes a new value, never used before in this place, with every change. */
struct ledger_words {
    uint64_t value;
    uint64_t mark;
};

union ledger_pair {
    alignas(16) struct ledger_words words;
    unsigned __int128 whole;
};

/*
 * Both words at one moment: equal marks before and after mean that nothing changed in between. Returns false when
 * another process was faster.
 */
static inline bool ledger_pair_load(union ledger_pair *pair, struct ledger_words *words)
{
    words->mark = __atomic_load_n(&pair->words.mark, __ATOMIC_ACQUIRE);
    words->value = __atomic_load_n(&pair->words.value, __ATOMIC_ACQUIRE);
    return __atomic_load_n(&pair->words.mark, __ATOMIC_ACQUIRE) == words->mark;
}

/* __sync rather than __atomic: it compiles to the processor's own instruction, not to a call of libatomic. */
static inline bool ledger_pair_swap(union ledger_pair *pair, struct ledger_words expected, struct ledger_words desired)
{
    union ledger_pair from = {.words = expected}, to = {.words = desired};
    return __sync_bool_compare_and_swap(&pair->whole, from.whole, to.whole);
}

#define LEDGER_MAGIC 0x72656764656c6c73u /* "slledger", little-endian */
enum { LEDGER_VERSION = 1 };

struct ledger_header {
    alignas(64) atomic_uint_least64_t magic; /* written last */
    uint32_t version;
    struct sluice_ledger_shape shape;
};

/* An account: bytes charged (value) as of operation number `mark` of its device. */
struct ledger_device {
    alignas(64) union ledger_pair decision; /* the latest operation on the device, see ledger.c */
    union ledger_pair total;
    atomic_uint_least64_t limit;
    atomic_uint_least64_t granularity;
    atomic_uint_least64_t peak;
    atomic_uint_least64_t refused;
};

/* A process's seat: its occupant, as packed by ledger.c; a free seat has pid 0. */
struct ledger_seat {
    alignas(64) union ledger_pair occupant;
};

struct ledger_owner_account {
    alignas(64) union ledger_pair charged;
    atomic_uint_least64_t quota;
    atomic_uint_least64_t peak;
    atomic_uint_least64_t refused;
};

/* Only the living process writes the plain counters, and they decide nothing. */
struct ledger_process_account {
    alignas(64) union ledger_pair charged;
    atomic_uint_least64_t committed;
    atomic_uint_least64_t context;
    atomic_uint_least64_t slack;
};

static_assert(sizeof(struct ledger_header) == 64 && sizeof(struct ledger_device) == 64 &&
                  sizeof(struct ledger_seat) == 64 && sizeof(struct ledger_owner_account) == 64 &&
                  sizeof(struct ledger_process_account) == 64,
              "the layout is an interface between processes");

/* A process's view of a region. The shape is a copy: it was checked once and cannot change under us. */
struct sluice_ledger {
    struct sluice_ledger_shape shape;
    uint32_t attempts;
    const uint64_t
        *limits[SLUICE_LEDGER_MAX_DEVICES]; /* where each device's limit is: in the region, or out of reach */
    struct ledger_device *devices;
    struct ledger_seat *seats;
    struct ledger_owner_account *owner_accounts;
    struct ledger_process_account *process_accounts;
};

static inline uint64_t ledger_limit(const struct sluice_ledger *ledger, uint32_t device)
{
    return __atomic_load_n(ledger->limits[device], __ATOMIC_RELAXED);
}

static inline struct ledger_owner_account *ledger_owner(const struct sluice_ledger *ledger, uint32_t owner,
                                                        uint32_t device)
{
    return &ledger->owner_accounts[(size_t)owner * ledger->shape.devices + device];
}

/* What an owner is charged; for an only owner that is the device's total, which saves a cache line. */
static inline union ledger_pair *ledger_owned(const struct sluice_ledger *ledger, uint32_t owner, uint32_t device)
{
    return ledger->shape.owners == 1 ? &ledger->devices[device].total : &ledger_owner(ledger, owner, device)->charged;
}

static inline struct ledger_process_account *ledger_process(const struct sluice_ledger *ledger, uint32_t seat,
                                                            uint32_t device)
{
    return &ledger->process_accounts[(size_t)seat * ledger->shape.devices + device];
}

/*
 * What one account held at one moment; the device's latest operation is completed first. Errors: CORRUPT, BUSY.
 */
enum sluice_error ledger_read_device(const struct sluice_ledger *ledger, uint32_t device, uint64_t *bytes,
                                     struct sluice_error_text *text);
enum sluice_error ledger_read_owner(const struct sluice_ledger *ledger, uint32_t owner, uint32_t device,
                                    uint64_t *bytes, struct sluice_error_text *text);
enum sluice_error ledger_read_process(const struct sluice_ledger *ledger, uint32_t seat, uint32_t device,
                                      uint64_t *bytes, struct sluice_error_text *text);

/*
 * What a private copy of a device's part of the region says it is charged. CORRUPT: impossible in a ledger at rest; a
 * copy taken while the device was in use may be, too.
 */
enum sluice_error ledger_read_copy(const struct ledger_device *copy, uint32_t device, uint64_t *bytes,
                                   struct sluice_error_text *text);

/* A seat's occupant; *process is 0 for a free seat, else the process's public name. */
enum sluice_error ledger_read_seat(const struct sluice_ledger *ledger, uint32_t seat, uint32_t *process,
                                   struct sluice_ledger_process *who, struct sluice_error_text *text);

#endif
