/* SPDX-License-Identifier: Apache-2.0 */
/* The gate's workers: who is there, and what a dead one leaves. */
#include "error.h"
#include "gate_parts.h"

#include <inttypes.h>

static uint32_t worker_id(const struct sluice_gate *gate, uint32_t seat)
{
    return gate->workers[seat].sequence * SLUICE_GATE_MAX_WORKERS + seat;
}

struct gate_worker *gate_find_worker(struct sluice_gate *gate, uint32_t worker)
{
    uint32_t seat = worker % SLUICE_GATE_MAX_WORKERS;
    if (seat >= gate->shape.workers || !gate->workers[seat].pid || worker_id(gate, seat) != worker)
        return NULL;
    return &gate->workers[seat];
}

enum sluice_error gate_fail_worker(uint32_t worker, struct sluice_error_text *text)
{
    return sluice_fail(text, SLUICE_ERROR_UNKNOWN, "worker %" PRIu32 " is not in the gate: join first", worker);
}

/* The seat of a process, or UINT32_MAX. */
static uint32_t seat_of(const struct sluice_gate *gate, uint32_t pid, uint64_t start)
{
    for (uint32_t seat = 0; seat < gate->shape.workers; seat++)
        if (gate->workers[seat].pid == pid && gate->workers[seat].start == start && pid)
            return seat;
    return UINT32_MAX;
}

static enum sluice_error choose_seat(const struct sluice_gate *gate, uint32_t pid, uint32_t *seat,
                                     struct sluice_error_text *text)
{
    if (*seat != UINT32_MAX) {
        if (!gate->workers[*seat].pid)
            return SLUICE_OK;
        return sluice_fail(text, SLUICE_ERROR_BUSY,
                           "seat %" PRIu32 " for pid %" PRIu32 ": pid %" PRIu32 " has it; reap it when it has ended",
                           *seat, pid, gate->workers[*seat].pid);
    }
    for (*seat = 0; *seat < gate->shape.workers; ++*seat)
        if (!gate->workers[*seat].pid)
            return SLUICE_OK;
    return sluice_fail(text, SLUICE_ERROR_CAPACITY,
                       "pid %" PRIu32 ": all %" PRIu32 " seats are taken; reap workers that have ended", pid,
                       gate->shape.workers);
}

static enum sluice_error take_seat(struct sluice_gate *gate, uint32_t pid, uint64_t start, uint32_t seat,
                                   uint32_t *worker, struct sluice_error_text *text)
{
    if (seat_of(gate, pid, start) != UINT32_MAX)
        return sluice_fail(text, SLUICE_ERROR_DUPLICATE,
                           "pid %" PRIu32 " started at %" PRIu64 " is in the gate already", pid, start);
    enum sluice_error error = choose_seat(gate, pid, &seat, text);
    if (error)
        return error;
    struct gate_worker *self = &gate->workers[seat];
    const uint32_t sequences = UINT32_MAX / SLUICE_GATE_MAX_WORKERS;
    gate_put32(gate, &self->sequence, self->sequence % sequences + 1);
    gate_put64(gate, &self->start, start);
    gate_put32(gate, &self->pid, pid);
    *worker = worker_id(gate, seat);
    return SLUICE_OK;
}

enum sluice_error sluice_gate_join(struct sluice_gate *gate, uint32_t pid, uint64_t start, uint32_t seat,
                                   uint32_t *worker, struct sluice_error_text *text)
{
    uint32_t joined = 0;
    if (!pid)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "pid 0: names no process");
    if (seat != UINT32_MAX && seat >= gate->shape.workers)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "seat %" PRIu32 " for pid %" PRIu32 ": the gate has %" PRIu32,
                           seat, pid, gate->shape.workers);
    enum sluice_error error = gate_lock(gate, text);
    if (error)
        return error;
    error = gate_unlock(gate, take_seat(gate, pid, start, seat, &joined, text), text);
    if (!error)
        *worker = joined;
    return error;
}

enum sluice_error sluice_gate_left(struct sluice_gate *gate, uint32_t pid, uint64_t start, uint32_t room,
                                   struct sluice_gate_settled *settled, uint32_t *count, struct sluice_error_text *text)
{
    uint32_t found = 0;
    enum sluice_error error = gate_lock(gate, text);
    if (error)
        return error;
    uint32_t seat = seat_of(gate, pid, start);
    uint32_t row = seat != UINT32_MAX ? gate->workers[seat].tickets.first : 0;
    for (; row; row = gate->tickets[row].own.next) {
        if (!gate->tickets[row].replica_name)
            continue;
        if (found < room)
            gate_describe(gate, row, gate->header->latest_us, &settled[found]);
        found++;
    }
    *count = found;
    return gate_unlock(gate, SLUICE_OK, text);
}

enum sluice_error sluice_gate_reap(struct sluice_gate *gate, uint32_t pid, uint64_t start, uint64_t now_us,
                                   uint32_t *ended, struct sluice_error_text *text)
{
    uint32_t steps = 0, count = 0, seat, row;
    enum sluice_error error = gate_lock(gate, text);
    if (error)
        return error;
    /* Looked up again each time: others may reap it as well whenever the lock is theirs. */
    while (!error && (seat = seat_of(gate, pid, start)) != UINT32_MAX) {
        struct gate_worker *self = &gate->workers[seat];
        if (!(row = self->tickets.first)) {
            gate_put32(gate, &self->pid, 0);
            gate_wake(gate, seat, false);
            break;
        }
        struct sluice_gate_settled settled;
        uint64_t at_us = gate_time(gate, now_us);
        gate_describe(gate, row, at_us, &settled);
        gate_end_ticket(gate, row, at_us, &settled);
        count++;
        error = gate_pause(gate, &steps, text);
    }
    error = gate_unlock(gate, error, text);
    if (!error && ended)
        *ended = count;
    return error;
}

enum sluice_error sluice_gate_workers(struct sluice_gate *gate, uint32_t room, struct sluice_gate_worker *workers,
                                      uint32_t *count, struct sluice_error_text *text)
{
    uint32_t found = 0;
    enum sluice_error error = gate_lock(gate, text);
    if (error)
        return error;
    for (uint32_t seat = 0; seat < gate->shape.workers; seat++) {
        const struct gate_worker *self = &gate->workers[seat];
        if (!self->pid)
            continue;
        if (found < room)
            workers[found] = (struct sluice_gate_worker){
                .worker = worker_id(gate, seat), .pid = self->pid, .start = self->start, .tickets = self->count};
        found++;
    }
    *count = found;
    return gate_unlock(gate, SLUICE_OK, text);
}
