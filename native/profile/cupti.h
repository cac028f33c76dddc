/* SPDX-License-Identifier: Apache-2.0 */
/* NVIDIA's tracing library: found when it is needed, and its records as ours. */
#ifndef SLUICE_PROFILE_CUPTI_H
#define SLUICE_PROFILE_CUPTI_H

#include <stdbool.h>

#include "cupti_abi.h"
#include "file.h"

struct cupti {
#define CUPTI_POINTER(NAME, PARAMETERS) uint32_t(*NAME) PARAMETERS;
    CUPTI_CALLS(CUPTI_POINTER)
#undef CUPTI_POINTER
};

/* False, with words for a person, where there is none. Loaded once, for good. */
bool cupti_load(struct cupti *cupti, char *words, size_t size);

/* Starts or stops the collection of what is wanted; the first refusal, or CUPTI_OK. */
uint32_t cupti_collect(const struct cupti *cupti, uint32_t wanted, bool on);

/* Callbacks of launches, on or off. */
void cupti_watch_launches(const struct cupti *cupti, void *subscriber, bool on);

/* What to add to CUPTI's times to get CLOCK_MONOTONIC's. */
int64_t cupti_clock(const struct cupti *cupti);

/* Writes the records of a buffer; how many there were. */
uint64_t cupti_write(const struct cupti *cupti, struct profile_file *file, uint8_t *data, size_t valid, int64_t clock);

#endif
