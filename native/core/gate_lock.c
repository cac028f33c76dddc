/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gate's lock, and why what a killed process began is undone.
 *
 * An admission checks and charges four subjects, and a turn reads a whole queue, so the lock-free protocol of the ledger
 * (one decision, two words) does not carry over: one lock orders everything. It is a robust, process-shared mutex, which
 * the kernel marks when its owner dies. What must then be true is that every call happened wholly or not at all. To
 * rebuild sums and queues from tickets would do for what is derived, but the buckets' levels are not, and it would stop
 * all workers for as long as it takes to read every ticket. Instead each word is written into a log before it changes
 * (gate_put), and the log is emptied, with one store, where a step is complete. The next owner puts the words back that
 * a dead one has logged, newest first: some hundred stores at most, whatever the gate's size, and a process that dies
 * while it undoes leaves the log as it was. The log costs two stores for each one.
 *
 * A worker that is stopped, not killed, while it has the lock stops all others: sections are some 100 ns long, and whoever
 * stops a worker (SIGSTOP, a debugger) can as well stop them all.
 */
#include "error.h"
#include "gate_parts.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

enum { SPINS = 64, STEPS_AT_ONCE = 16 };

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void gate_undo(struct sluice_gate *gate)
{
    struct gate_header *header = gate->header;
    uint32_t count = header->log_count < GATE_LOG_ENTRIES ? header->log_count : GATE_LOG_ENTRIES;
    for (uint32_t i = count; i-- > 0;)
        memcpy((char *)header + header->log[i].offset, &header->log[i].before, sizeof header->log[i].before);
    gate_order();
    header->log_count = 0;
    gate_order();
    gate->overflow = false;
}

/* Sections are shorter than a sleep and a wake-up: look some times first. */
static int acquire(pthread_mutex_t *mutex)
{
    for (int spin = 0; spin < SPINS; spin++, relax()) {
        int result = pthread_mutex_trylock(mutex);
        if (result != EBUSY)
            return result;
    }
    return pthread_mutex_lock(mutex);
}

enum sluice_error gate_lock(struct sluice_gate *gate, struct sluice_error_text *text)
{
    pthread_mutex_t *mutex = &gate->header->mutex;
    int result = acquire(mutex);
    if (result == EOWNERDEAD) {
        gate_undo(gate);
        result = pthread_mutex_consistent(mutex);
    }
    if (result)
        return sluice_fail(text, SLUICE_ERROR_CORRUPT, "the gate's lock: %s; format the gate again", strerror(result));
    return SLUICE_OK;
}

enum sluice_error gate_step(struct sluice_gate *gate, struct sluice_error_text *text)
{
    if (gate->overflow) {
        gate_undo(gate);
        return sluice_fail(text, SLUICE_ERROR_CORRUPT, "one step of the gate changes more than %d words; report a bug",
                           GATE_LOG_ENTRIES);
    }
    gate_order();
    gate->header->log_count = 0;
    gate_order();
    return SLUICE_OK;
}

enum sluice_error gate_unlock(struct sluice_gate *gate, enum sluice_error error, struct sluice_error_text *text)
{
    if (error)
        gate_undo(gate);
    else
        error = gate_step(gate, text);
    pthread_mutex_unlock(&gate->header->mutex);
    return error;
}

enum sluice_error gate_pause(struct sluice_gate *gate, uint32_t *steps, struct sluice_error_text *text)
{
    enum sluice_error error = gate_step(gate, text);
    if (error || ++*steps % STEPS_AT_ONCE)
        return error;
    pthread_mutex_unlock(&gate->header->mutex);
    return gate_lock(gate, text);
}

uint64_t gate_time(struct sluice_gate *gate, uint64_t now_us)
{
    struct gate_header *header = gate->header;
    if (now_us > header->latest_us)
        gate_put64(gate, &header->latest_us, now_us);
    return header->latest_us;
}

void gate_wake(struct sluice_gate *gate, uint32_t seat, bool wake)
{
    uint64_t *wakes = &gate->header->wakes, bit = UINT64_C(1) << seat;
    uint64_t after = wake ? *wakes | bit : *wakes & ~bit;
    if (after != *wakes && gate_save(gate, wakes))
        __atomic_store_n(wakes, after, __ATOMIC_RELEASE);
}
