/* SPDX-License-Identifier: Apache-2.0 */
/* The benchmarks' inner loops, timed in C so that Python's own time is not measured. Times in nanoseconds. */
#ifndef SLUICE_BENCH_H
#define SLUICE_BENCH_H

#include "sluice/core.h"

/* What one reading of the clock costs: the least difference between two that follow each other. */
uint64_t sluice_bench_clock_ns(void);

/* ======== memory ledger ======== */

/* What guards the shared figures. */
enum sluice_bench_guard {
    SLUICE_BENCH_LEDGER = 0,
    SLUICE_BENCH_ROBUST_MUTEX = 1, /* counters under one process-shared robust pthread mutex */
};

/*
 * `processes` processes, started together, each time `pairs` pairs of allocation (reserve and commit) and free of
 * `bytes` on one device, all within its limit. times[process * pairs + i] receives the time of a process's i-th pair,
 * one reading of the clock included; *elapsed_ns from start to the last one's end. Errors: SYSTEM (fork, mmap),
 * CORRUPT (the figures do not add up afterwards).
 */
enum sluice_error sluice_bench_ledger(enum sluice_bench_guard guard, uint32_t processes, uint32_t pairs, uint64_t bytes,
                                      uint64_t *times, uint64_t *elapsed_ns, struct sluice_error_text *text);

/*
 * `processes` processes allocate and free without end on one device, one random one of them is killed `kills` times at
 * a random moment, reaped and replaced; at last all of them. *lost: bytes still charged afterwards, or charged twice,
 * over all owners, processes and devices, which must be 0; *reaped: bytes that the dead left behind.
 */
enum sluice_error sluice_bench_ledger_kills(uint32_t processes, uint32_t kills, uint64_t seed, uint64_t *lost,
                                            uint64_t *reaped, struct sluice_error_text *text);

#endif
