/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Samples of the processor: where each thread of this process is, 99 times in a second of its processor time, through
 * perf_event_open. The kernel keeps them until our thread writes them; no signal reaches the program.
 */
#ifndef SLUICE_PROFILE_SAMPLES_H
#define SLUICE_PROFILE_SAMPLES_H

#include <stdbool.h>

#include "file.h"

/* Once for each profile. */
void samples_begin(void);

/* With all threads; new ones are found by samples_write. Off: what has come is written, and then they cost nothing.
 * Answers how many were written. */
uint64_t samples_collect(struct profile_file *file, bool on);

/* Writes those that have come; how many. That not all threads can be sampled is reported once, as a LOST. */
uint64_t samples_write(struct profile_file *file);

/* ns of the program's time that a sample costs, as is assumed: an interrupt, and what it does to the caches. */
enum { SAMPLES_PRICE = 5000 };

#endif
