/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of NCCL, which NCCL itself tells of (its profiler plugin), and of oneCCL: kept until our thread writes them. */
#ifndef SLUICE_PROFILE_COLLECTIVES_H
#define SLUICE_PROFILE_COLLECTIVES_H

#include <stdbool.h>

#include "file.h"

/* They are reported only while this is on. */
void collectives_collect(bool on);

/* In a child after a fork: they are not reported any more. */
void collectives_abandon(void);

/* For the preloaded library; NULL: nothing is collected. */
__attribute__((visibility("default"))) void *sluice_profile_collective_begin(const char *function, uint64_t bytes,
                                                                             uint64_t communicator);
__attribute__((visibility("default"))) void sluice_profile_collective_end(void *call);

/* Writes those that have ended; how many. Those for which there was no room are written as lost. */
uint64_t collectives_write(struct profile_file *file);

#endif
