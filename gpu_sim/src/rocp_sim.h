/* What the files of the simulated rocprofiler-sdk share. */
#ifndef ROCP_SIM_H
#define ROCP_SIM_H

#include <stdbool.h>

#include "rocprofiler_abi.h"

enum {
    ROCP_REFUSED = 1,
    ROCP_NO_CONTEXT = 2,
    ROCP_NO_BUFFER = 3,
    ROCP_TWICE = 15,
    ROCP_LOCKED = 16, /* ROCPROFILER_STATUS_ERROR... */
    ROCP_INVALID = 19,
};

/* Puts a record that is complete at `end` (ns of CLOCK_MONOTONIC) into a buffer. */
void rocp_put(uint64_t buffer, const struct rocp_record *record, uint64_t end);

/* What is complete in all buffers is delivered, and no more comes. */
void rocp_end_buffers(void);

/* Whether the tool may still configure. */
bool rocp_configuring(void);

#endif
