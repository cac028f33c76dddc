/* SPDX-License-Identifier: Apache-2.0 */
/* The memory ledger's figures: usage, audit and fragmentation. The protocol is in ledger.c. */
#include "error.h"
#include "ledger_region.h"

#include <inttypes.h>

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t load(const atomic_uint_least64_t *counter)
{
    return atomic_load_explicit(counter, memory_order_relaxed);
}

static enum sluice_error check_indices(const struct sluice_ledger *ledger, uint32_t owner, uint32_t device,
                                       struct sluice_error_text *text)
{
    if (device >= ledger->shape.devices)
        return sluice_fail(text, SLUICE_ERROR_UNKNOWN, "device %" PRIu32 ": the ledger has %" PRIu32, device,
                           ledger->shape.devices);
    if (owner >= ledger->shape.owners)
        return sluice_fail(text, SLUICE_ERROR_UNKNOWN, "owner %" PRIu32 ": the ledger has %" PRIu32, owner,
                           ledger->shape.owners);
    return SLUICE_OK;
}

/* ---- usage ---- */

/*
 * Adds what one seat's process committed. Its counters follow its charges a moment later, and a process that died in
 * that moment leaves them behind, so they are taken as parts of what is charged.
 */
static enum sluice_error add_process(const struct sluice_ledger *ledger, uint32_t seat, uint32_t device,
                                     struct sluice_ledger_usage *usage, struct sluice_error_text *text)
{
    const struct ledger_process_account *account = ledger_process(ledger, seat, device);
    uint64_t charged;
    enum sluice_error error = ledger_read_process(ledger, seat, device, &charged, text);
    if (error)
        return error;
    uint64_t committed = least(load(&account->committed), charged);
    uint64_t context = least(load(&account->context), committed);
    usage->committed += committed;
    usage->context += context;
    usage->slack += least(load(&account->slack), committed - context);
    return SLUICE_OK;
}

static enum sluice_error add_processes(const struct sluice_ledger *ledger, uint32_t owner, uint32_t device,
                                       struct sluice_ledger_usage *usage, struct sluice_error_text *text)
{
    for (uint32_t seat = 0; seat < ledger->shape.processes; seat++) {
        struct sluice_ledger_process who;
        uint32_t process;
        enum sluice_error error = ledger_read_seat(ledger, seat, &process, &who, text);
        if (!error && process && (owner == UINT32_MAX || who.owner == owner))
            error = add_process(ledger, seat, device, usage, text);
        if (error)
            return error;
    }
    usage->committed = least(usage->committed, usage->charged);
    return SLUICE_OK;
}

enum sluice_error sluice_ledger_device_usage(struct sluice_ledger *ledger, uint32_t device,
                                             struct sluice_ledger_usage *usage, struct sluice_error_text *text)
{
    struct sluice_ledger_usage found = {0};
    enum sluice_error error = check_indices(ledger, 0, device, text);
    if (!error)
        error = ledger_read_device(ledger, device, &found.charged, text);
    if (!error)
        error = add_processes(ledger, UINT32_MAX, device, &found, text);
    if (error)
        return error;
    const struct ledger_device *shared = &ledger->devices[device];
    uint64_t granularity = load(&shared->granularity);
    found.limit = ledger_limit(ledger, device);
    found.available = found.limit - least(found.charged, found.limit);
    if (granularity)
        found.available -= found.available % granularity;
    found.peak = load(&shared->peak);
    found.refused = load(&shared->refused);
    *usage = found;
    return SLUICE_OK;
}

/* An owner's limit and what is left of it, in `usage`. */
static enum sluice_error read_owner_limits(const struct sluice_ledger *ledger, uint32_t owner, uint32_t device,
                                           struct sluice_ledger_usage *usage, struct sluice_error_text *text)
{
    uint64_t taken, owned;
    enum sluice_error error = ledger_read_device(ledger, device, &taken, text);
    if (!error)
        error = ledger_read_owner(ledger, owner, device, &owned, text);
    if (error)
        return error;
    const struct ledger_device *shared = &ledger->devices[device];
    uint64_t limit = ledger_limit(ledger, device), granularity = load(&shared->granularity);
    usage->limit = least(load(&ledger_owner(ledger, owner, device)->quota), limit);
    usage->available = least(usage->limit - least(owned, usage->limit), limit - least(taken, limit));
    if (granularity)
        usage->available -= usage->available % granularity;
    usage->charged = owned;
    return SLUICE_OK;
}

enum sluice_error sluice_ledger_owner_usage(struct sluice_ledger *ledger, uint32_t owner, uint32_t device,
                                            struct sluice_ledger_usage *usage, struct sluice_error_text *text)
{
    struct sluice_ledger_usage found = {0};
    enum sluice_error error = check_indices(ledger, owner, device, text);
    if (!error)
        error = read_owner_limits(ledger, owner, device, &found, text);
    if (!error)
        error = add_processes(ledger, owner, device, &found, text);
    if (error)
        return error;
    found.peak =
        load(ledger->shape.owners == 1 ? &ledger->devices[device].peak : &ledger_owner(ledger, owner, device)->peak);
    found.refused = load(&ledger_owner(ledger, owner, device)->refused);
    *usage = found;
    return SLUICE_OK;
}

enum sluice_error sluice_ledger_process_usage(struct sluice_ledger *ledger, uint32_t process, uint32_t device,
                                              struct sluice_ledger_usage *usage, struct sluice_error_text *text)
{
    struct sluice_ledger_usage found = {0};
    struct sluice_ledger_process who = {0};
    uint32_t seat = process & 0xffff, sitting = 0;
    enum sluice_error error = check_indices(ledger, 0, device, text);
    if (!error && seat < ledger->shape.processes)
        error = ledger_read_seat(ledger, seat, &sitting, &who, text);
    if (!error && (!process || sitting != process))
        error = sluice_fail(text, SLUICE_ERROR_UNKNOWN, "process %" PRIu32 " is not in the ledger", process);
    if (!error)
        error = read_owner_limits(ledger, who.owner, device, &found, text);
    if (!error)
        error = ledger_read_process(ledger, seat, device, &found.charged, text);
    if (!error)
        error = add_process(ledger, seat, device, &found, text);
    if (!error)
        *usage = found;
    return error;
}

enum sluice_error sluice_ledger_processes(struct sluice_ledger *ledger, uint32_t room, uint32_t *ids,
                                          struct sluice_ledger_process *processes, uint32_t *count,
                                          struct sluice_error_text *text)
{
    uint32_t found = 0;
    for (uint32_t seat = 0; seat < ledger->shape.processes; seat++) {
        struct sluice_ledger_process who;
        uint32_t process;
        enum sluice_error error = ledger_read_seat(ledger, seat, &process, &who, text);
        if (error)
            return error;
        if (!process)
            continue;
        if (found < room) {
            ids[found] = process;
            processes[found] = who;
        }
        found++;
    }
    *count = found;
    return SLUICE_OK;
}

enum sluice_error sluice_ledger_get_fragmentation(struct sluice_ledger *ledger,
                                                  struct sluice_ledger_fragmentation *fragmentation,
                                                  struct sluice_error_text *text)
{
    struct sluice_ledger_fragmentation found = {0};
    for (uint32_t device = 0; device < ledger->shape.devices; device++) {
        struct sluice_ledger_usage usage;
        enum sluice_error error = sluice_ledger_device_usage(ledger, device, &usage, text);
        if (error)
            return error;
        uint64_t left = usage.limit - least(usage.charged, usage.limit);
        found.free += left;
        found.slack += usage.slack;
        if (left > found.largest) {
            found.largest = left;
            found.largest_device = device;
        }
    }
    if (found.free)
        found.external_permille = (uint32_t)(1000 * (found.free - found.largest) / found.free);
    *fragmentation = found;
    return SLUICE_OK;
}
