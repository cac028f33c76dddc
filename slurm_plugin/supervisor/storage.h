/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The process that touches the shared folder for the supervisor, as slurmctld's user: a storage that hangs blocks only
 * this process. It holds the lease when it is wanted, and writes there what `sluice failover` shows:
 *   sluice.supervise.HOST       how it is, a JSON object, every two seconds
 *   sluice.failover.HOST.jsonl  what happened, a JSON object a line, as sluice/base/events.py has them
 */
#ifndef SLUICE_SUPERVISOR_STORAGE_H
#define SLUICE_SUPERVISOR_STORAGE_H

#include <stdint.h>
#include <sys/types.h>

enum { SLUICE_STORAGE_WHY = 256 };

/* Shared by the two processes; times of CLOCK_BOOTTIME. */
struct sluice_storage {
    /* the supervisor's */
    _Atomic int64_t beat_ns;      /* when it last showed that it runs: without, nothing is renewed */
    _Atomic uint32_t wanted;      /* hold the lease */
    _Atomic uint32_t ended;       /* slurmctld has ended: give the lease back, and end */
    _Atomic int32_t child;        /* slurmctld's pid */
    _Atomic int32_t status;       /* how it ended, as of waitpid */
    char why[SLUICE_STORAGE_WHY]; /* why it was killed; empty: it was not. Set before `ended` */
    /* the process's */
    _Atomic int64_t from_ns; /* when the last successful renewal began; 0: the lease is not ours */
    _Atomic uint64_t epoch;  /* of the lease that is ours */
    _Atomic uint32_t lost;   /* the lease was ours and is not any more: slurmctld must end */
    char leader[256];        /* who has it, if another; may be torn, for people only */
};

/* Start it; its pid, or -1 (errno). `uid` and `gid` are what it becomes, `folder` the shared one. */
pid_t sluice_storage_start(struct sluice_storage *shared, const char *folder, uid_t uid, gid_t gid, int64_t valid_ns);

#endif
