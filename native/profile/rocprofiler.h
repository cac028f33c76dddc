/* SPDX-License-Identifier: Apache-2.0 */
/* AMD's tracing library, which loads this one into programs that ask for it (ROCP_TOOL_LIBRARIES). */
#ifndef SLUICE_PROFILE_ROCPROFILER_H
#define SLUICE_PROFILE_ROCPROFILER_H

#include "rocprofiler_abi.h"
#include "tracer.h"

struct rocprofiler {
#define ROCP_POINTER(NAME, PARAMETERS) uint32_t(*NAME) PARAMETERS;
    ROCP_CALLS(ROCP_POINTER)
#undef ROCP_POINTER
};

extern const struct tracer rocprofiler_tracer;

/* ---- rocprofiler_records.c ---- */

/* What the library says of a kernel, by its number, before it is launched. From any thread. */
void rocp_learn_kernel(uint64_t number, const char *name);

/* Notes the GPUs that the library knows; once. */
void rocp_find_agents(const struct rocprofiler *library);

/* Writes the records of a buffer, one behind the other; how many there were. */
uint64_t rocp_write(const struct rocprofiler *library, struct profile_file *file, const struct buffer *buffer,
                    int64_t clock);

void rocp_note_devices(struct profile_file *file);

/* Calls by their names: the process waits for a device; it launches a kernel; ranks communicate. */
bool rocp_waits(const char *call);
bool rocp_does_not_wait(const char *call);
bool rocp_launches(const char *call);
bool rocp_communicates(const char *call);

#endif
