/* SPDX-License-Identifier: Apache-2.0 */
#ifndef SLUICE_PROFILE_CLOCK_H
#define SLUICE_PROFILE_CLOCK_H

#include <stdint.h>
#include <time.h>

/* ns */
static inline uint64_t clock_now(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

#endif
