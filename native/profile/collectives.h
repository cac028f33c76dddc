/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL's calls, which NCCL itself tells of (its profiler plugin): kept until our thread writes them. */
#ifndef SLUICE_PROFILE_COLLECTIVES_H
#define SLUICE_PROFILE_COLLECTIVES_H

#include <stdbool.h>

#include "file.h"

/* NCCL tells of its calls only while this is on. */
void collectives_collect(bool on);

/* Writes those that have ended; how many. Those for which there was no room are written as lost. */
uint64_t collectives_write(struct profile_file *file);

#endif
