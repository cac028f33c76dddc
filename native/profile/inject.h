/* SPDX-License-Identifier: Apache-2.0 */
/* The thread that waits until a profile is asked for. */
#ifndef SLUICE_PROFILE_INJECT_H
#define SLUICE_PROFILE_INJECT_H

#include "tracer.h"

/* Once for the process: a program that uses two vendors' GPUs is profiled on those of the first. */
void inject_start(const struct tracer *tracer);

/* The process, or what its tracer needs of it, ends: a profile that runs is ended, and within a bounded time complete. */
void inject_end(void);

#endif
