/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a supervisor (supervise.c) and the plugins in its slurmctld (failover/fence.c) exchange: one page of shared
 * memory, a file named by an environment variable so that it outlives an exec of slurmctld.
 *
 * Times are nanoseconds of CLOCK_BOOTTIME, which includes the time in which the host is suspended.
 */
#ifndef SLUICE_SUPERVISOR_SUPERVISOR_H
#define SLUICE_SUPERVISOR_SUPERVISOR_H

#include <stdint.h>
#include <time.h>

#define SLUICE_WATCH_ENV "SLUICE_SUPERVISE"
#define SLUICE_WATCH_MAGIC UINT64_C(0x3157454349554c53) /* "SLUICEW1" */

enum {
    SLUICE_WATCH_FOLDER = 2048,
    SLUICE_FENCED_STATUS = 75, /* exit status of a process that must not continue; sysexits' EX_TEMPFAIL */
};

enum sluice_watch_role {
    SLUICE_STANDBY = 0, /* writes no state */
    SLUICE_ASKS = 1,    /* waits for the lease, before it reads any state */
    SLUICE_LEADS = 2,
};

struct sluice_watch {
    /* the supervisor's, constant */
    uint64_t magic;
    int64_t supervisor;  /* its pid */
    int64_t lease_ns;    /* how long a renewal is good */
    int64_t patience_ns; /* how long one may ask */
    /* the supervisor's */
    _Atomic int64_t until_ns; /* the lease is ours until then; 0: it is not */
    _Atomic uint64_t epoch;   /* number of this leadership; grows with every change */
    /* the plugins' */
    _Atomic int64_t tick_ns;          /* when slurmctld last showed that it runs */
    _Atomic uint32_t role;            /* enum sluice_watch_role */
    _Atomic uint32_t ready;           /* what follows is there */
    uint32_t timeout_s;               /* SlurmctldTimeout */
    char folder[SLUICE_WATCH_FOLDER]; /* StateSaveLocation */
};

static inline int64_t sluice_boottime_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

#endif
