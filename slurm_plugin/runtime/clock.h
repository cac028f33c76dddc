/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The clocks: monotonic, for how long something took; wall, for when it was. */
#ifndef SLUICE_RUNTIME_CLOCK_H
#define SLUICE_RUNTIME_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline int64_t sluice_clock_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static inline int64_t sluice_clock_us(clockid_t clock)
{
    return sluice_clock_ns(clock) / 1000;
}

/* Monotonic. */
static inline uint64_t sluice_now_ns(void)
{
    return (uint64_t)sluice_clock_ns(CLOCK_MONOTONIC);
}

static inline uint64_t sluice_now_us(void)
{
    return sluice_now_ns() / 1000;
}

/* Microseconds since 1970. */
static inline int64_t sluice_wall_us(void)
{
    return sluice_clock_us(CLOCK_REALTIME);
}

static inline struct timespec sluice_timespec(int64_t ns)
{
    return (struct timespec){.tv_sec = ns / INT64_C(1000000000), .tv_nsec = ns % INT64_C(1000000000)};
}

/* So long from now, for pthread_cond_timedwait on a condition with that clock. */
static inline struct timespec sluice_deadline(clockid_t clock, int64_t ms)
{
    return sluice_timespec(sluice_clock_ns(clock) + ms * 1000000);
}

#endif /* SLUICE_RUNTIME_CLOCK_H */
