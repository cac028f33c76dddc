/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The memory ledger: exact accounting in shared memory, lock-free, and correct whenever a process is killed.
 *
 * The protocol
 *   A device's operations form one sequence, numbered 1, 2, 3 ... Its `decision` holds the latest: number, seat, owner
 *   and signed bytes, in two words that change together (a 16-byte compare-and-swap). An operation
 *     1. reads the decision, number n, and completes it (`settle`), whichever process made it;
 *     2. reads the accounts that it concerns and checks limit, quota and holdings;
 *     3. swaps the decision it read for its own, number n + 1; if that fails, it begins again;
 *     4. completes its own (`complete`).
 *   Completing number n means to add its bytes to the process's account, the owner's and the device's total, in this
 *   order. Each account holds its bytes and the number of the operation that changed it last, and both words are
 *   swapped together. Where there is only one owner, the total is its account, too.
 *
 * Why it is exact
 *   - Applied at most once: an account is swapped only from a state read with a mark below n to one marked n, and marks
 *     only rise, so of all who complete n exactly one succeeds, and one who slept since an earlier time fails.
 *   - Applied at least once before n + 1 exists: a process that makes n + 1 has completed n, and the total, which comes
 *     last, shows that the other two are done.
 *   - Checks hold when they take effect: accounts change only through later decisions, so if the swap in 3 succeeds,
 *     everything read in 2 is still true. A refusal is valid too: the decision is read again and must still be n.
 *   - Killed before 3: nothing happened. Killed after it: the operation happened, and the next one, or the next reader,
 *     completes it. There is no moment in between, so there is nothing to journal or repair. For the same reason a
 *     stopped process delays no other, and when it continues, its swaps fail or repeat nothing.
 *   - Lock-free: a swap in 3 fails only if another operation succeeded.
 *
 * Seats
 *   A process takes a seat, with pid, start time and owner, and leaves it, in one swap; no seat is ever half taken.
 *   Reaping releases device by device what the account of the seat holds, each an ordinary operation of the reaping
 *   process, then frees the seat. Between reading decision n with bytes in the account and the swap in 3 the occupant
 *   is checked. If the swap succeeds, the account held those bytes throughout; a seat is freed only after its account
 *   was seen empty on each device, so the occupant was the same throughout, and a slow second reaper can never take
 *   from the seat's next occupant. The decision names the owner itself, so completing it does not depend on the seat
 *   either.
 *
 * Numbers have 48 bits: nine years of a million operations a second on one device; the device then refuses with
 * CORRUPT.
 */
#include "error.h"
#include "ledger_region.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { DEFAULT_ATTEMPTS = 1 << 20, AUDIT_ATTEMPTS = 1 << 12, LOOKS = 8, MAX_OVERSUBSCRIPTION = 8000 };

static const uint64_t max_bytes = UINT64_C(1) << 46; /* sums of two fit a decision's 47 bits and a sign */
static const uint64_t max_granularity = UINT64_C(1) << 30;
static const uint64_t max_number = (UINT64_C(1) << 48) - 1;

/* ---- words ---- */

struct operation {
    uint64_t number;
    uint32_t seat;
    uint32_t owner;
    int64_t bytes;
};

static struct ledger_words pack_operation(struct operation operation)
{
    return (struct ledger_words){
        .mark = operation.number << 16 | operation.seat,
        .value = (uint64_t)operation.bytes << 16 | operation.owner,
    };
}

static struct operation unpack_operation(struct ledger_words words)
{
    return (struct operation){
        .number = words.mark >> 16,
        .seat = words.mark & 0xffff,
        .owner = words.value & 0xffff,
        .bytes = (int64_t)words.value >> 16,
    };
}

/* A seat's occupant: value is the start time, mark pid, owner and a count of occupants (never 0, modulo 2^16). */
static struct ledger_words pack_occupant(uint32_t pid, uint64_t start, uint32_t owner, uint32_t sequence)
{
    return (struct ledger_words){.mark = (uint64_t)pid << 32 | owner << 16 | sequence, .value = start};
}

static uint32_t occupant_pid(struct ledger_words occupant)
{
    return (uint32_t)(occupant.mark >> 32);
}

static uint32_t occupant_owner(struct ledger_words occupant)
{
    return occupant.mark >> 16 & 0xffff;
}

static uint32_t occupant_sequence(struct ledger_words occupant)
{
    return occupant.mark & 0xffff;
}

static uint32_t process_name(uint32_t seat, struct ledger_words occupant)
{
    return occupant_sequence(occupant) << 16 | seat;
}

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static enum sluice_error fail_busy(const struct sluice_ledger *ledger, uint32_t device, struct sluice_error_text *text)
{
    return sluice_fail(text, SLUICE_ERROR_BUSY, "device %" PRIu32 ": lost %" PRIu32 " races in a row; try again",
                       device, ledger->attempts);
}

static enum sluice_error fail_corrupt(uint32_t device, const char *what, uint64_t value, struct sluice_error_text *text)
{
    return sluice_fail(text, SLUICE_ERROR_CORRUPT, "device %" PRIu32 ": %s %" PRIu64 "; format the ledger again",
                       device, what, value);
}

/* ---- the protocol ---- */

static void raise_peak(atomic_uint_least64_t *peak, uint64_t bytes)
{
    uint64_t seen = atomic_load_explicit(peak, memory_order_relaxed);
    while (seen < bytes &&
           !atomic_compare_exchange_weak_explicit(peak, &seen, bytes, memory_order_relaxed, memory_order_relaxed)) {
    }
}

/* Adds the operation to one account, unless that is done already. The peak is updated first: later it would be lost. */
static enum sluice_error apply(const struct sluice_ledger *ledger, union ledger_pair *account,
                               atomic_uint_least64_t *peak, struct operation operation, uint32_t device,
                               struct sluice_error_text *text)
{
    for (uint32_t attempt = 0; attempt < ledger->attempts; attempt++) {
        struct ledger_words before;
        if (!ledger_pair_load(account, &before))
            continue;
        if (before.mark >= operation.number)
            return SLUICE_OK;
        struct ledger_words after = {.value = before.value + (uint64_t)operation.bytes, .mark = operation.number};
        if (before.value > max_bytes || after.value > max_bytes)
            return fail_corrupt(device, "an account would hold", after.value, text);
        if (peak)
            raise_peak(peak, after.value);
        if (ledger_pair_swap(account, before, after))
            return SLUICE_OK;
    }
    return fail_busy(ledger, device, text);
}

/* Applies the device's latest operation to its accounts, as far as that is not done yet. */
static enum sluice_error complete(const struct sluice_ledger *ledger, uint32_t device, struct operation operation,
                                  struct sluice_error_text *text)
{
    struct ledger_device *shared = &ledger->devices[device];
    if (operation.seat >= ledger->shape.processes)
        return fail_corrupt(device, "its latest operation names seat", operation.seat, text);
    if (operation.owner >= ledger->shape.owners)
        return fail_corrupt(device, "its latest operation names owner", operation.owner, text);
    struct ledger_process_account *process = ledger_process(ledger, operation.seat, device);
    struct ledger_owner_account *owner = ledger_owner(ledger, operation.owner, device);
    enum sluice_error error = apply(ledger, &process->charged, NULL, operation, device, text);
    if (!error && ledger->shape.owners > 1)
        error = apply(ledger, &owner->charged, &owner->peak, operation, device, text);
    if (!error)
        error = apply(ledger, &shared->total, &shared->peak, operation, device, text);
    return error;
}

/*
 * The same for another process's operation. That process is most likely completing it now, and two that do so take each
 * other's cache lines: check a few times (some 100 ns) before helping.
 */
static enum sluice_error settle(const struct sluice_ledger *ledger, uint32_t device, struct operation operation,
                                struct sluice_error_text *text)
{
    const union ledger_pair *total = &ledger->devices[device].total;
    for (int look = 0; look < LOOKS; look++, relax())
        if (__atomic_load_n(&total->words.mark, __ATOMIC_ACQUIRE) >= operation.number)
            return SLUICE_OK;
    return complete(ledger, device, operation, text);
}

static bool still_latest(const struct sluice_ledger *ledger, uint32_t device, struct ledger_words decision)
{
    return __atomic_load_n(&ledger->devices[device].decision.words.mark, __ATOMIC_ACQUIRE) == decision.mark;
}

/* A member's seat and its expected occupant. */
struct member {
    uint32_t seat;
    struct ledger_words occupant;
};

enum purpose {
    CHARGE,  /* `bytes` within limit and quota */
    RELEASE, /* `bytes`, no more than the process holds */
    EMPTY,   /* all that the process holds; `bytes` says how much */
};

/* What an operation is to do, given the accounts as they are; *change in bytes, 0 for nothing. */
static enum sluice_error decide(const struct sluice_ledger *ledger, struct member member, uint32_t device,
                                enum purpose purpose, uint64_t bytes, uint64_t total, uint64_t owned, uint64_t held,
                                int64_t *change, struct sluice_error_text *text)
{
    uint32_t owner = occupant_owner(member.occupant);
    switch (purpose) {
    case CHARGE: {
        uint64_t limit = ledger_limit(ledger, device);
        uint64_t quota = atomic_load_explicit(&ledger_owner(ledger, owner, device)->quota, memory_order_relaxed);
        if (owned > quota || bytes > quota - owned)
            return sluice_fail(text, SLUICE_ERROR_QUOTA,
                               "%" PRIu64 " bytes of device %" PRIu32 ": owner %" PRIu32 " holds %" PRIu64
                               " of its quota of %" PRIu64 "; release some or raise the quota",
                               bytes, device, owner, owned, quota);
        if (limit > max_bytes)
            return fail_corrupt(device, "its limit is", limit, text);
        if (total > limit || bytes > limit - total)
            return sluice_fail(text, SLUICE_ERROR_CAPACITY,
                               "%" PRIu64 " bytes of device %" PRIu32 ": %" PRIu64 " of %" PRIu64
                               " are taken; release some or ask for less",
                               bytes, device, total, limit);
        *change = (int64_t)bytes;
        return SLUICE_OK;
    }
    case RELEASE:
        if (bytes > held)
            return sluice_fail(text, SLUICE_ERROR_INVALID,
                               "release of %" PRIu64 " bytes of device %" PRIu32 ": process holds only %" PRIu64, bytes,
                               device, held);
        *change = -(int64_t)bytes;
        return SLUICE_OK;
    case EMPTY:
        if (held > max_bytes)
            return fail_corrupt(device, "a process holds", held, text);
        *change = -(int64_t)held;
        return SLUICE_OK;
    }
    return SLUICE_ERROR_INVALID;
}

/* One operation on a device: steps 1 to 4 above. */
static enum sluice_error operate(const struct sluice_ledger *ledger, struct member member, uint32_t device,
                                 enum purpose purpose, uint64_t *bytes, struct sluice_error_text *text)
{
    struct ledger_device *shared = &ledger->devices[device];
    uint32_t owner = occupant_owner(member.occupant);
    for (uint32_t attempt = 0; attempt < ledger->attempts; attempt++, relax()) {
        struct ledger_words decision, total, owned, held, occupant;
        if (!ledger_pair_load(&shared->decision, &decision))
            continue;
        enum sluice_error error = settle(ledger, device, unpack_operation(decision), text);
        if (error)
            return error;
        bool loaded = ledger_pair_load(&shared->total, &total) &&
                      ledger_pair_load(ledger_owned(ledger, owner, device), &owned) &&
                      ledger_pair_load(&ledger_process(ledger, member.seat, device)->charged, &held) &&
                      ledger_pair_load(&ledger->seats[member.seat].occupant, &occupant);
        int64_t change = 0;
        if (loaded) {
            if (occupant.mark != member.occupant.mark || occupant.value != member.occupant.value)
                return sluice_fail(text, SLUICE_ERROR_UNKNOWN,
                                   "process %" PRIu32 " on seat %" PRIu32 " is no longer in the ledger: join again",
                                   occupant_pid(member.occupant), member.seat);
            error =
                decide(ledger, member, device, purpose, *bytes, total.value, owned.value, held.value, &change, text);
        }
        if (!loaded || !still_latest(ledger, device, decision))
            continue;
        uint64_t number = unpack_operation(decision).number;
        if (total.mark != number || owned.mark > number || held.mark > number || number == max_number)
            return fail_corrupt(device, "its accounts do not belong to operation", number, text);
        if (error || !change)
            return error;
        struct operation operation = {.number = number + 1, .seat = member.seat, .owner = owner, .bytes = change};
        if (!ledger_pair_swap(&shared->decision, decision, pack_operation(operation)))
            continue;
        if (purpose == EMPTY)
            *bytes += held.value;
        /* Decided. If others keep us from completing it, they completed it themselves. */
        error = complete(ledger, device, operation, text);
        return error == SLUICE_ERROR_BUSY ? SLUICE_OK : error;
    }
    return fail_busy(ledger, device, text);
}

/* One account at one moment. */
static enum sluice_error read_account(const struct sluice_ledger *ledger, uint32_t device, union ledger_pair *account,
                                      uint64_t *bytes, struct sluice_error_text *text)
{
    for (uint32_t attempt = 0; attempt < ledger->attempts; attempt++, relax()) {
        struct ledger_words decision, words;
        if (!ledger_pair_load(&ledger->devices[device].decision, &decision))
            continue;
        enum sluice_error error = settle(ledger, device, unpack_operation(decision), text);
        if (error)
            return error;
        if (!ledger_pair_load(account, &words) || !still_latest(ledger, device, decision))
            continue;
        if (words.value > max_bytes)
            return fail_corrupt(device, "an account holds", words.value, text);
        *bytes = words.value;
        return SLUICE_OK;
    }
    return fail_busy(ledger, device, text);
}

enum sluice_error ledger_read_device(const struct sluice_ledger *ledger, uint32_t device, uint64_t *bytes,
                                     struct sluice_error_text *text)
{
    return read_account(ledger, device, &ledger->devices[device].total, bytes, text);
}

enum sluice_error ledger_read_owner(const struct sluice_ledger *ledger, uint32_t owner, uint32_t device,
                                    uint64_t *bytes, struct sluice_error_text *text)
{
    return read_account(ledger, device, ledger_owned(ledger, owner, device), bytes, text);
}

enum sluice_error ledger_read_process(const struct sluice_ledger *ledger, uint32_t seat, uint32_t device,
                                      uint64_t *bytes, struct sluice_error_text *text)
{
    return read_account(ledger, device, &ledger_process(ledger, seat, device)->charged, bytes, text);
}

enum sluice_error ledger_read_copy(const struct ledger_device *copy, uint32_t device, uint64_t *bytes,
                                   struct sluice_error_text *text)
{
    struct operation latest = unpack_operation(copy->decision.words);
    struct ledger_words total = copy->total.words;
    uint64_t number = total.mark;
    if (latest.number == number + 1) { /* decided, and its process was killed before it completed it */
        total.value += (uint64_t)latest.bytes;
        number++;
    }
    if (latest.number != number || total.value > max_bytes)
        return fail_corrupt(device, "its accounts hold", total.value, text);
    *bytes = total.value;
    return SLUICE_OK;
}

/* ---- regions and handles ---- */

static bool shape_is_valid(const struct sluice_ledger_shape *shape)
{
    return shape->devices >= 1 && shape->devices <= SLUICE_LEDGER_MAX_DEVICES && shape->owners >= 1 &&
           shape->owners <= SLUICE_LEDGER_MAX_OWNERS && shape->processes >= 1 &&
           shape->processes <= SLUICE_LEDGER_MAX_PROCESSES;
}

size_t sluice_ledger_size(const struct sluice_ledger_shape *shape)
{
    if (!shape || !shape_is_valid(shape))
        return 0;
    size_t devices = shape->devices, owners = shape->owners, processes = shape->processes;
    return sizeof(struct ledger_header) + devices * sizeof(struct ledger_device) +
           processes * sizeof(struct ledger_seat) + owners * devices * sizeof(struct ledger_owner_account) +
           processes * devices * sizeof(struct ledger_process_account);
}

static enum sluice_error check_region(const void *region, size_t size, size_t needed, struct sluice_error_text *text)
{
    if (!region || (uintptr_t)region % SLUICE_LEDGER_ALIGNMENT)
        return sluice_fail(text, SLUICE_ERROR_INVALID, "ledger at %p: must be aligned to %d bytes", region,
                           SLUICE_LEDGER_ALIGNMENT);
    if (size < needed)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY, "ledger of %zu bytes: needs %zu", size, needed);
    return SLUICE_OK;
}

enum sluice_error sluice_ledger_format(void *region, size_t size, const struct sluice_ledger_shape *shape,
                                       struct sluice_error_text *text)
{
    if (!shape)
        return sluice_fail(text, SLUICE_ERROR_INVALID, "no ledger shape");
    size_t needed = sluice_ledger_size(shape);
    if (!needed)
        return sluice_fail(text, SLUICE_ERROR_RANGE,
                           "ledger of %" PRIu32 " devices, %" PRIu32 " owners, %" PRIu32
                           " processes: at least 1 of each, at most %d, %d, %d",
                           shape->devices, shape->owners, shape->processes, SLUICE_LEDGER_MAX_DEVICES,
                           SLUICE_LEDGER_MAX_OWNERS, SLUICE_LEDGER_MAX_PROCESSES);
    enum sluice_error error = check_region(region, size, needed, text);
    if (error)
        return error;
    memset(region, 0, needed);
    struct ledger_header *header = region;
    header->version = LEDGER_VERSION;
    header->shape = *shape;
    atomic_store_explicit(&header->magic, LEDGER_MAGIC, memory_order_release);
    return SLUICE_OK;
}

enum sluice_error sluice_ledger_new(void *region, size_t size, uint32_t attempts, struct sluice_ledger **ledger,
                                    struct sluice_error_text *text)
{
    if (!ledger)
        return sluice_fail(text, SLUICE_ERROR_INVALID, "no place for the ledger's handle");
    enum sluice_error error = check_region(region, size, sizeof(struct ledger_header), text);
    if (error)
        return error;
    struct ledger_header *header = region;
    if (atomic_load_explicit(&header->magic, memory_order_acquire) != LEDGER_MAGIC)
        return sluice_fail(text, SLUICE_ERROR_CORRUPT, "this memory holds no ledger: format it first");
    uint32_t version = *(volatile uint32_t *)&header->version;
    if (version != LEDGER_VERSION)
        return sluice_fail(text, SLUICE_ERROR_VERSION, "ledger of version %" PRIu32 ": this library reads %d", version,
                           LEDGER_VERSION);
    struct sluice_ledger_shape shape = *(volatile struct sluice_ledger_shape *)&header->shape;
    size_t needed = sluice_ledger_size(&shape);
    if (!needed || needed > size)
        return sluice_fail(text, SLUICE_ERROR_CORRUPT,
                           "ledger of %" PRIu32 " devices, %" PRIu32 " owners, %" PRIu32 " processes in %zu bytes",
                           shape.devices, shape.owners, shape.processes, size);
    struct sluice_ledger *made = malloc(sizeof *made);
    if (!made)
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "no memory for a ledger's handle");
    made->shape = shape;
    made->attempts = attempts ? attempts : DEFAULT_ATTEMPTS;
    made->devices = (struct ledger_device *)(header + 1);
    made->seats = (struct ledger_seat *)(made->devices + shape.devices);
    made->owner_accounts = (struct ledger_owner_account *)(made->seats + shape.processes);
    made->process_accounts =
        (struct ledger_process_account *)(made->owner_accounts + (size_t)shape.owners * shape.devices);
    for (uint32_t i = 0; i < shape.devices; i++)
        made->limits[i] = (const uint64_t *)&made->devices[i].limit;
    *ledger = made;
    return SLUICE_OK;
}

void sluice_ledger_free(struct sluice_ledger *ledger)
{
    free(ledger);
}

void sluice_ledger_get_shape(const struct sluice_ledger *ledger, struct sluice_ledger_shape *shape)
{
    *shape = ledger->shape;
}

static enum sluice_error check_device(const struct sluice_ledger *ledger, uint32_t device,
                                      struct sluice_error_text *text)
{
    if (device >= ledger->shape.devices)
        return sluice_fail(text, SLUICE_ERROR_UNKNOWN, "device %" PRIu32 ": the ledger has %" PRIu32, device,
                           ledger->shape.devices);
    return SLUICE_OK;
}

static enum sluice_error check_owner(const struct sluice_ledger *ledger, uint32_t owner, struct sluice_error_text *text)
{
    if (owner >= ledger->shape.owners)
        return sluice_fail(text, SLUICE_ERROR_UNKNOWN, "owner %" PRIu32 ": the ledger has %" PRIu32, owner,
                           ledger->shape.owners);
    return SLUICE_OK;
}

static bool is_granularity(uint64_t granularity)
{
    return granularity && granularity <= max_granularity && !(granularity & (granularity - 1));
}

enum sluice_error sluice_ledger_set_device(struct sluice_ledger *ledger, uint32_t device,
                                           const struct sluice_ledger_device *terms, struct sluice_error_text *text)
{
    enum sluice_error error = check_device(ledger, device, text);
    if (error)
        return error;
    if (!is_granularity(terms->granularity))
        return sluice_fail(text, SLUICE_ERROR_RANGE,
                           "granularity %" PRIu64 " of device %" PRIu32 ": must be a power of two up to 2^30",
                           terms->granularity, device);
    if (terms->oversubscription < 1000 || terms->oversubscription > MAX_OVERSUBSCRIPTION)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "oversubscription %" PRIu32 " of device %" PRIu32 ": 1000 to %d",
                           terms->oversubscription, device, MAX_OVERSUBSCRIPTION);
    uint64_t limit = terms->capacity > max_bytes ? UINT64_MAX : terms->capacity * terms->oversubscription / 1000;
    if (limit > max_bytes)
        return sluice_fail(text, SLUICE_ERROR_RANGE,
                           "capacity %" PRIu64 " of device %" PRIu32 ": with oversubscription at most 2^46 bytes",
                           terms->capacity, device);
    struct ledger_device *shared = &ledger->devices[device];
    atomic_store_explicit(&shared->granularity, terms->granularity, memory_order_relaxed);
    atomic_store_explicit(&shared->limit, limit & ~(terms->granularity - 1), memory_order_relaxed);
    return SLUICE_OK;
}

enum sluice_error sluice_ledger_set_quota(struct sluice_ledger *ledger, uint32_t owner, uint32_t device, uint64_t quota,
                                          struct sluice_error_text *text)
{
    enum sluice_error error = check_device(ledger, device, text);
    if (!error)
        error = check_owner(ledger, owner, text);
    if (!error)
        atomic_store_explicit(&ledger_owner(ledger, owner, device)->quota, quota, memory_order_relaxed);
    return error;
}

/* ---- processes ---- */

static enum sluice_error load_occupant(const struct sluice_ledger *ledger, uint32_t seat, struct ledger_words *occupant,
                                       struct sluice_error_text *text)
{
    for (uint32_t attempt = 0; attempt < ledger->attempts; attempt++, relax())
        if (ledger_pair_load(&ledger->seats[seat].occupant, occupant)) {
            if (occupant_owner(*occupant) >= ledger->shape.owners)
                return sluice_fail(text, SLUICE_ERROR_CORRUPT,
                                   "seat %" PRIu32 " is of owner %" PRIu32 "; format the ledger again", seat,
                                   occupant_owner(*occupant));
            return SLUICE_OK;
        }
    return sluice_fail(text, SLUICE_ERROR_BUSY, "seat %" PRIu32 ": lost %" PRIu32 " races in a row; try again", seat,
                       ledger->attempts);
}

enum sluice_error ledger_read_seat(const struct sluice_ledger *ledger, uint32_t seat, uint32_t *process,
                                   struct sluice_ledger_process *who, struct sluice_error_text *text)
{
    struct ledger_words occupant;
    enum sluice_error error = load_occupant(ledger, seat, &occupant, text);
    if (error)
        return error;
    *process = occupant_pid(occupant) ? process_name(seat, occupant) : 0;
    *who = (struct sluice_ledger_process){
        .owner = occupant_owner(occupant), .pid = occupant_pid(occupant), .start = occupant.value};
    return SLUICE_OK;
}

/* The member that `process` names, checked again by each operation. */
static enum sluice_error find_member(const struct sluice_ledger *ledger, uint32_t process, struct member *member,
                                     struct sluice_error_text *text)
{
    member->seat = process & 0xffff;
    if (member->seat >= ledger->shape.processes)
        return sluice_fail(text, SLUICE_ERROR_UNKNOWN, "process %" PRIu32 ": no such seat", process);
    enum sluice_error error = load_occupant(ledger, member->seat, &member->occupant, text);
    if (error)
        return error;
    if (!occupant_pid(member->occupant) || process_name(member->seat, member->occupant) != process)
        return sluice_fail(text, SLUICE_ERROR_UNKNOWN, "process %" PRIu32 " is not in the ledger: join first", process);
    return SLUICE_OK;
}

/* Releases what the member holds and frees its seat; a second reaper finds nothing to do. */
static enum sluice_error dismiss(const struct sluice_ledger *ledger, struct member member, uint64_t *released,
                                 struct sluice_error_text *text)
{
    for (uint32_t device = 0; device < ledger->shape.devices; device++) {
        enum sluice_error error = operate(ledger, member, device, EMPTY, released, text);
        if (error == SLUICE_ERROR_UNKNOWN)
            return SLUICE_OK;
        if (error)
            return error;
    }
    struct ledger_words vacant = pack_occupant(0, 0, 0, occupant_sequence(member.occupant));
    ledger_pair_swap(&ledger->seats[member.seat].occupant, member.occupant, vacant);
    return SLUICE_OK;
}

enum sluice_error sluice_ledger_join(struct sluice_ledger *ledger, uint32_t owner, uint32_t pid, uint64_t start,
                                     uint32_t *process, struct sluice_error_text *text)
{
    if (!pid)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "pid 0: names no process");
    enum sluice_error error = check_owner(ledger, owner, text);
    if (error)
        return error;
    struct member member;
    for (member.seat = 0; member.seat < ledger->shape.processes; member.seat++) {
        uint64_t released = 0;
        if ((error = load_occupant(ledger, member.seat, &member.occupant, text)))
            return error;
        if (occupant_pid(member.occupant) == pid && (error = dismiss(ledger, member, &released, text)))
            return error;
    }
    for (uint32_t seat = 0; seat < ledger->shape.processes; seat++) {
        struct ledger_words vacant;
        if ((error = load_occupant(ledger, seat, &vacant, text)))
            return error;
        uint32_t sequence = occupant_sequence(vacant) % 0xffff + 1;
        struct ledger_words occupant = pack_occupant(pid, start, owner, sequence);
        if (occupant_pid(vacant) || !ledger_pair_swap(&ledger->seats[seat].occupant, vacant, occupant))
            continue;
        for (uint32_t device = 0; device < ledger->shape.devices; device++) {
            struct ledger_process_account *account = ledger_process(ledger, seat, device);
            atomic_store_explicit(&account->committed, 0, memory_order_relaxed);
            atomic_store_explicit(&account->context, 0, memory_order_relaxed);
            atomic_store_explicit(&account->slack, 0, memory_order_relaxed);
        }
        *process = process_name(seat, occupant);
        return SLUICE_OK;
    }
    return sluice_fail(text, SLUICE_ERROR_CAPACITY, "pid %" PRIu32 ": all %" PRIu32 " seats are taken; reap dead ones",
                       pid, ledger->shape.processes);
}

enum sluice_error sluice_ledger_reap(struct sluice_ledger *ledger, uint32_t pid, uint64_t start, uint64_t *released,
                                     struct sluice_error_text *text)
{
    if (!pid)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "pid 0: names no process");
    uint64_t bytes = 0;
    struct member member;
    for (member.seat = 0; member.seat < ledger->shape.processes; member.seat++) {
        enum sluice_error error = load_occupant(ledger, member.seat, &member.occupant, text);
        if (!error && occupant_pid(member.occupant) == pid && member.occupant.value == start)
            error = dismiss(ledger, member, &bytes, text);
        if (error)
            return error;
    }
    if (released)
        *released = bytes;
    return SLUICE_OK;
}

/* ---- charges ---- */

static enum sluice_error count_refusal(const struct sluice_ledger *ledger, struct member member, uint32_t device,
                                       enum sluice_error error)
{
    atomic_uint_least64_t *refused = NULL;
    if (error == SLUICE_ERROR_CAPACITY)
        refused = &ledger->devices[device].refused;
    else if (error == SLUICE_ERROR_QUOTA)
        refused = &ledger_owner(ledger, occupant_owner(member.occupant), device)->refused;
    if (refused)
        atomic_fetch_add_explicit(refused, 1, memory_order_relaxed);
    return error;
}

enum sluice_error sluice_ledger_reserve(struct sluice_ledger *ledger, uint32_t process, uint32_t device, uint64_t bytes,
                                        uint64_t granularity, struct sluice_ledger_charge *charge,
                                        struct sluice_error_text *text)
{
    struct member member;
    enum sluice_error error = check_device(ledger, device, text);
    if (!error)
        error = find_member(ledger, process, &member, text);
    if (error)
        return error;
    if (!bytes || bytes > max_bytes)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "%" PRIu64 " bytes of device %" PRIu32 ": must be 1 to 2^46",
                           bytes, device);
    bool of_device = granularity == 0;
    if (of_device)
        granularity = atomic_load_explicit(&ledger->devices[device].granularity, memory_order_relaxed);
    if (of_device && granularity == 0)
        granularity = 1; /* the device's terms were never set: it is refused below, as it has no limit */
    if (!is_granularity(granularity))
        return of_device ? fail_corrupt(device, "its granularity is", granularity, text)
                         : sluice_fail(text, SLUICE_ERROR_RANGE,
                                       "granularity %" PRIu64 ": must be a power of two up to 2^30", granularity);
    uint64_t charged = (bytes + granularity - 1) & ~(granularity - 1);
    error = operate(ledger, member, device, CHARGE, &charged, text);
    if (error)
        return count_refusal(ledger, member, device, error);
    *charge = (struct sluice_ledger_charge){.asked = bytes, .charged = charged, .device = device};
    return SLUICE_OK;
}

static enum sluice_error check_charge(const struct sluice_ledger *ledger, const struct sluice_ledger_charge *charge,
                                      struct sluice_error_text *text)
{
    enum sluice_error error = check_device(ledger, charge->device, text);
    if (error)
        return error;
    if (!charge->charged)
        return sluice_fail(text, SLUICE_ERROR_INVALID, "a charge of device %" PRIu32 " that was released already",
                           charge->device);
    if (charge->charged > max_bytes || charge->asked > charge->charged || !charge->asked)
        return sluice_fail(text, SLUICE_ERROR_INVALID,
                           "a charge of %" PRIu64 " bytes for %" PRIu64 " asked: not made by sluice_ledger_reserve",
                           charge->charged, charge->asked);
    return SLUICE_OK;
}

static void add(atomic_uint_least64_t *counter, uint64_t bytes)
{
    atomic_fetch_add_explicit(counter, bytes, memory_order_relaxed);
}

enum sluice_error sluice_ledger_commit(struct sluice_ledger *ledger, uint32_t process,
                                       struct sluice_ledger_charge *charge, struct sluice_error_text *text)
{
    struct member member;
    enum sluice_error error = check_charge(ledger, charge, text);
    if (!error)
        error = find_member(ledger, process, &member, text);
    if (error)
        return error;
    if (charge->committed)
        return sluice_fail(text, SLUICE_ERROR_INVALID, "a charge of %" PRIu64 " bytes that was committed already",
                           charge->charged);
    struct ledger_process_account *account = ledger_process(ledger, member.seat, charge->device);
    add(&account->committed, charge->charged);
    add(&account->slack, charge->charged - charge->asked);
    charge->committed = 1;
    return SLUICE_OK;
}

enum sluice_error sluice_ledger_release(struct sluice_ledger *ledger, uint32_t process,
                                        struct sluice_ledger_charge *charge, struct sluice_error_text *text)
{
    struct member member;
    enum sluice_error error = check_charge(ledger, charge, text);
    if (!error)
        error = find_member(ledger, process, &member, text);
    if (!error)
        error = operate(ledger, member, charge->device, RELEASE, &charge->charged, text);
    if (error)
        return error;
    if (charge->committed) {
        struct ledger_process_account *account = ledger_process(ledger, member.seat, charge->device);
        add(&account->committed, -charge->charged);
        add(&account->slack, charge->asked - charge->charged);
    }
    charge->charged = 0;
    return SLUICE_OK;
}

enum sluice_error sluice_ledger_set_context(struct sluice_ledger *ledger, uint32_t process, uint32_t device,
                                            uint64_t bytes, struct sluice_error_text *text)
{
    struct member member;
    enum sluice_error error = check_device(ledger, device, text);
    if (!error)
        error = find_member(ledger, process, &member, text);
    if (error)
        return error;
    if (bytes > max_bytes)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "context of %" PRIu64 " bytes on device %" PRIu32 ": at most 2^46",
                           bytes, device);
    struct ledger_process_account *account = ledger_process(ledger, member.seat, device);
    uint64_t before = atomic_load_explicit(&account->context, memory_order_relaxed);
    if (before > max_bytes)
        return fail_corrupt(device, "a context takes", before, text);
    if (bytes == before)
        return SLUICE_OK;
    uint64_t difference = bytes > before ? bytes - before : before - bytes;
    error = operate(ledger, member, device, bytes > before ? CHARGE : RELEASE, &difference, text);
    if (error)
        return count_refusal(ledger, member, device, error);
    add(&account->committed, bytes - before);
    atomic_store_explicit(&account->context, bytes, memory_order_relaxed);
    return SLUICE_OK;
}

/* ---- audit ---- */

/* Sums of the accounts of a device; *number: the highest operation that any of them has seen. */
static enum sluice_error sum_accounts(const struct sluice_ledger *ledger, uint32_t device, uint64_t *owned,
                                      uint64_t *held, uint64_t *number, struct sluice_error_text *text)
{
    *owned = *held = *number = 0;
    for (uint32_t owner = 0; owner < ledger->shape.owners; owner++) {
        struct ledger_words words;
        if (!ledger_pair_load(ledger_owned(ledger, owner, device), &words))
            return SLUICE_ERROR_BUSY;
        *owned += words.value;
        *number = words.mark > *number ? words.mark : *number;
    }
    for (uint32_t seat = 0; seat < ledger->shape.processes; seat++) {
        struct ledger_words words, occupant;
        if (!ledger_pair_load(&ledger->seats[seat].occupant, &occupant) ||
            !ledger_pair_load(&ledger_process(ledger, seat, device)->charged, &words))
            return SLUICE_ERROR_BUSY;
        if (words.value && !occupant_pid(occupant))
            return fail_corrupt(device, "a free seat holds", words.value, text);
        *held += words.value;
        *number = words.mark > *number ? words.mark : *number;
    }
    return SLUICE_OK;
}

static enum sluice_error audit_device(const struct sluice_ledger *ledger, uint32_t device,
                                      struct sluice_error_text *text)
{
    struct ledger_device *shared = &ledger->devices[device];
    for (uint32_t attempt = 0; attempt < AUDIT_ATTEMPTS; attempt++, relax()) {
        struct ledger_words decision, total;
        uint64_t owned, held, number;
        if (!ledger_pair_load(&shared->decision, &decision))
            continue;
        enum sluice_error error = settle(ledger, device, unpack_operation(decision), text);
        if (error)
            return error;
        if (!ledger_pair_load(&shared->total, &total))
            continue;
        error = sum_accounts(ledger, device, &owned, &held, &number, text);
        if (error == SLUICE_ERROR_BUSY || !still_latest(ledger, device, decision))
            continue;
        if (error)
            return error;
        if (total.mark != decision.mark >> 16 || number > total.mark)
            return fail_corrupt(device, "its accounts do not belong to operation", decision.mark >> 16, text);
        if (total.value != owned || total.value != held)
            return sluice_fail(text, SLUICE_ERROR_CORRUPT,
                               "device %" PRIu32 ": %" PRIu64 " bytes are charged, %" PRIu64 " to owners, %" PRIu64
                               " to processes; format the ledger again",
                               device, total.value, owned, held);
        return SLUICE_OK;
    }
    return sluice_fail(text, SLUICE_ERROR_BUSY, "device %" PRIu32 ": never at rest in %d looks; try again", device,
                       AUDIT_ATTEMPTS);
}

enum sluice_error sluice_ledger_audit(struct sluice_ledger *ledger, struct sluice_error_text *text)
{
    for (uint32_t device = 0; device < ledger->shape.devices; device++) {
        enum sluice_error error = audit_device(ledger, device, text);
        if (error)
            return error;
    }
    return SLUICE_OK;
}
