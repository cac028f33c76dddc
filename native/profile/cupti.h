/* SPDX-License-Identifier: Apache-2.0 */
/* NVIDIA's tracing library: found when it is needed, and its records as ours. */
#ifndef SLUICE_PROFILE_CUPTI_H
#define SLUICE_PROFILE_CUPTI_H

#include "cupti_abi.h"
#include "tracer.h"

struct cupti {
#define CUPTI_POINTER(NAME, PARAMETERS) uint32_t(*NAME) PARAMETERS;
    CUPTI_CALLS(CUPTI_POINTER)
#undef CUPTI_POINTER
};

extern const struct tracer cupti_tracer;

/* Writes the records of a buffer; how many there were. */
uint64_t cupti_write(const struct cupti *cupti, struct profile_file *file, uint8_t *data, size_t valid, int64_t clock);

#endif
