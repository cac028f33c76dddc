/* SPDX-License-Identifier: Apache-2.0 */
/* The memory ledger's figures: usage, audit, fragmentation and the compaction plan. The protocol is in ledger.c. */
#include "error.h"
#include "ledger_region.h"

#include <inttypes.h>
#include <stdlib.h>

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

/* ---- compaction ---- */

/* The ledger as it was a moment ago, in private memory; a plan is made on it and changes it. */
struct picture {
    uint32_t devices, owners, seats;
    uint32_t *process; /* [seats] 0: free */
    uint32_t *owner;   /* [seats] */
    int64_t *free;     /* [devices] below 0 where a limit was lowered */
    uint64_t *left;    /* [owners][devices]: of the quota */
    uint64_t *held;    /* [seats][devices] */
};

static void free_picture(struct picture *picture)
{
    free(picture->process);
    free(picture->owner);
    free(picture->free);
    free(picture->left);
    free(picture->held);
}

static enum sluice_error take_picture(struct sluice_ledger *ledger, struct picture *picture,
                                      struct sluice_error_text *text)
{
    size_t devices = ledger->shape.devices, owners = ledger->shape.owners, seats = ledger->shape.processes;
    *picture = (struct picture){
        .devices = ledger->shape.devices,
        .owners = ledger->shape.owners,
        .seats = ledger->shape.processes,
        .process = calloc(seats, sizeof *picture->process),
        .owner = calloc(seats, sizeof *picture->owner),
        .free = calloc(devices, sizeof *picture->free),
        .left = calloc(owners * devices, sizeof *picture->left),
        .held = calloc(seats * devices, sizeof *picture->held),
    };
    if (!picture->process || !picture->owner || !picture->free || !picture->left || !picture->held)
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "no memory for a compaction plan");
    enum sluice_error error = SLUICE_OK;
    for (uint32_t device = 0; device < devices && !error; device++) {
        uint64_t limit = ledger_limit(ledger, device), taken = 0;
        error = ledger_read_device(ledger, device, &taken, text);
        picture->free[device] = (int64_t)least(limit, INT64_MAX / 2) - (int64_t)taken;
        for (uint32_t owner = 0; owner < owners && !error; owner++) {
            uint64_t quota = load(&ledger_owner(ledger, owner, device)->quota), owned = 0;
            error = ledger_read_owner(ledger, owner, device, &owned, text);
            picture->left[owner * devices + device] = quota - least(owned, quota);
        }
    }
    for (uint32_t seat = 0; seat < seats && !error; seat++) {
        struct sluice_ledger_process who;
        error = ledger_read_seat(ledger, seat, &picture->process[seat], &who, text);
        picture->owner[seat] = who.owner;
        for (uint32_t device = 0; device < devices && picture->process[seat] && !error; device++)
            error = ledger_read_process(ledger, seat, device, &picture->held[seat * devices + device], text);
    }
    return error;
}

/* Where the seat's holding on `from` fits most tightly, the lowest such device; picture->devices where nowhere. */
static uint32_t find_room(const struct picture *picture, uint32_t seat, uint32_t from)
{
    uint64_t bytes = picture->held[(size_t)seat * picture->devices + from];
    const uint64_t *left = &picture->left[(size_t)picture->owner[seat] * picture->devices];
    uint32_t best = picture->devices;
    for (uint32_t to = 0; to < picture->devices; to++)
        if (to != from && picture->free[to] >= (int64_t)bytes && left[to] >= bytes &&
            (best == picture->devices || picture->free[to] < picture->free[best]))
            best = to;
    return best;
}

/* Books a holding from one device to another, or with the two exchanged, takes that back. */
static void book(struct picture *picture, uint32_t seat, uint32_t from, uint32_t to, uint64_t bytes)
{
    uint64_t *held = &picture->held[(size_t)seat * picture->devices];
    uint64_t *left = &picture->left[(size_t)picture->owner[seat] * picture->devices];
    held[from] -= bytes;
    held[to] += bytes;
    picture->free[from] += (int64_t)bytes;
    picture->free[to] -= (int64_t)bytes;
    left[from] += bytes;
    left[to] -= bytes;
}

struct plan {
    struct sluice_ledger_move *moves; /* [seats] */
    uint32_t count;
    uint64_t bytes;
};

/* The next holding to move off `device`: the smallest of at least `missing` bytes, else the largest; seats if none. */
static uint32_t choose_holding(const struct picture *picture, uint32_t device, uint64_t missing, uint32_t *to)
{
    uint32_t best = picture->seats;
    uint64_t best_bytes = 0;
    for (uint32_t seat = 0; seat < picture->seats; seat++) {
        uint64_t bytes = picture->held[(size_t)seat * picture->devices + device];
        bool better = bytes >= missing ? best_bytes < missing || bytes < best_bytes : bytes > best_bytes;
        if (!bytes || !better)
            continue;
        uint32_t room = find_room(picture, seat, device);
        if (room == picture->devices)
            continue;
        best = seat;
        best_bytes = bytes;
        *to = room;
    }
    return best;
}

/* Plans for one device and leaves the picture as it was. False when the room cannot be made. */
static bool plan_device(struct picture *picture, uint32_t device, int64_t wanted, struct plan *plan)
{
    plan->count = 0;
    plan->bytes = 0;
    while (picture->free[device] < wanted) {
        uint64_t missing = (uint64_t)(wanted - picture->free[device]);
        uint32_t to = 0, seat = choose_holding(picture, device, missing, &to);
        if (seat == picture->seats)
            break;
        uint64_t bytes = picture->held[(size_t)seat * picture->devices + device];
        plan->moves[plan->count++] =
            (struct sluice_ledger_move){.process = picture->process[seat], .from = device, .to = to, .bytes = bytes};
        book(picture, seat, device, to, bytes);
    }
    bool reached = picture->free[device] >= wanted;
    uint64_t surplus = reached ? (uint64_t)(picture->free[device] - wanted) : 0;
    for (uint32_t i = plan->count; i-- > 0;)
        book(picture, plan->moves[i].process & 0xffff, plan->moves[i].to, device, plan->moves[i].bytes);
    /* The last ones may have made earlier ones unnecessary; without them the others still fit. */
    uint32_t kept = 0;
    for (uint32_t i = 0; i < plan->count; i++) {
        if (plan->moves[i].bytes <= surplus) {
            surplus -= plan->moves[i].bytes;
        } else {
            plan->bytes += plan->moves[i].bytes;
            plan->moves[kept++] = plan->moves[i];
        }
    }
    plan->count = kept;
    return reached;
}

enum sluice_error sluice_ledger_plan_compaction(struct sluice_ledger *ledger, uint64_t wanted, uint32_t room,
                                                struct sluice_ledger_move *moves, uint32_t *count, uint32_t *device,
                                                uint64_t *freed, struct sluice_error_text *text)
{
    if (wanted > INT64_MAX / 4)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "%" PRIu64 " free bytes on one device: no device has so many",
                           wanted);
    struct picture picture;
    struct plan best = {.moves = calloc(ledger->shape.processes, sizeof *best.moves)};
    struct plan plan = {.moves = calloc(ledger->shape.processes, sizeof *plan.moves)};
    uint32_t best_device = UINT32_MAX;
    enum sluice_error error = take_picture(ledger, &picture, text);
    if (!error && (!best.moves || !plan.moves))
        error = sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "no memory for a compaction plan");
    for (uint32_t candidate = 0; candidate < picture.devices && !error; candidate++) {
        if (!plan_device(&picture, candidate, (int64_t)wanted, &plan))
            continue;
        if (best_device == UINT32_MAX || plan.bytes < best.bytes ||
            (plan.bytes == best.bytes && plan.count < best.count)) {
            struct plan other = best;
            best = plan;
            plan = other;
            best_device = candidate;
        }
    }
    if (!error && best_device == UINT32_MAX)
        error = sluice_fail(text, SLUICE_ERROR_NO_PLACE,
                            "%" PRIu64 " free bytes on one device: no moves between devices make that room", wanted);
    else if (!error && best.count > room)
        error = sluice_fail(text, SLUICE_ERROR_CAPACITY, "compaction plan of %" PRIu32 " moves: room for %" PRIu32,
                            best.count, room);
    if (!error) {
        for (uint32_t i = 0; i < best.count; i++)
            moves[i] = best.moves[i];
        *count = best.count;
        *device = best_device;
        *freed = best.bytes;
    }
    free_picture(&picture);
    free(best.moves);
    free(plan.moves);
    return error;
}
