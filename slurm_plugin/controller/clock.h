/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Time that only goes forward, for measuring how long something took. */
#ifndef SLUICE_CONTROLLER_CLOCK_H
#define SLUICE_CONTROLLER_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline uint64_t sluice_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

static inline uint64_t sluice_now_us(void)
{
    return sluice_now_ns() / 1000;
}

#endif /* SLUICE_CONTROLLER_CLOCK_H */
