/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One background thread for small regular work: files to check, records to write, snapshots to refresh. A function that
 * takes longer than some milliseconds delays all others: planning and sorting have threads of their own.
 *
 * Functions are called without any lock of Slurm's or ours held, one at a time. All calls here are safe from any
 * thread, but sluice_ticker_remove not from within a ticker's function, nor while holding a lock that the removed
 * function takes.
 */
#ifndef SLUICE_RUNTIME_TICKER_H
#define SLUICE_RUNTIME_TICKER_H

#include <stdbool.h>
#include <stdint.h>

struct sluice_tick;

/*
 * Call function(argument) every `period_ms` (10 to 3,600,000), first after one period. `name` is copied. The thread is
 * started with the first. NULL when there is no memory or thread.
 */
struct sluice_tick *sluice_ticker_add(const char *name, uint32_t period_ms, void (*function)(void *), void *argument);

/* Call it as soon as possible, out of its turn. */
void sluice_ticker_wake(struct sluice_tick *tick);

/* Never call it again: returns when it is not running. The thread is joined with the last. NULL does nothing. */
void sluice_ticker_remove(struct sluice_tick *tick);

#endif
