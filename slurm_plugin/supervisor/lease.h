/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The lease in the shared state folder: which controller may write state.
 *
 * No clock is compared between hosts. The holder rewrites the lease with a new `seq`; a watcher measures by its own
 * clock how long it has not changed. A holder gives up `valid` after it began its last successful renewal; a watcher
 * waits `valid` and a half, by its own clock, from when it first saw that renewal, which is later. (Gray and Cheriton,
 * "Leases", 1989.) Of two that take it at the same time, only one can create the file named after the next epoch's
 * number. The highest epoch counts, so that a paused holder can overwrite the lease, but not win it.
 */
#ifndef SLUICE_SUPERVISOR_LEASE_H
#define SLUICE_SUPERVISOR_LEASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { SLUICE_LEASE_NAME = 128, SLUICE_LEASE_BOOT = 40, SLUICE_LEASE_TEXT = 1024 };

struct sluice_lease {
    uint64_t epoch, seq;
    bool held; /* else given back */
    char host[SLUICE_LEASE_NAME];
    char boot[SLUICE_LEASE_BOOT]; /* boot id of the host */
    uint64_t valid_ms;
    uint64_t boottime_ms; /* of the host, for people */
    uint64_t time_s;      /* of the host, for people */
};

/* The file's text; its length, or 0 when `size` is too small. */
size_t sluice_lease_format(const struct sluice_lease *lease, char *text, size_t size);

/* The reverse; false for anything that sluice_lease_format could not have written. */
bool sluice_lease_parse(const char *text, size_t length, struct sluice_lease *lease);

/* One controller's side of it. Zeroed but for the first group. */
struct sluice_lease_side {
    int folder; /* descriptor of the shared folder */
    char host[SLUICE_LEASE_NAME];
    char boot[SLUICE_LEASE_BOOT];
    int64_t valid_ns;
    int64_t (*now_ns)(void); /* CLOCK_BOOTTIME; tests have their own */

    struct sluice_lease seen; /* the newest that was read */
    bool any, damaged;        /* `seen` is there; what is there cannot be read */
    int64_t seen_ns;          /* when it last changed, by our clock */
    uint64_t claimed;         /* an epoch that another one has claimed ... */
    int64_t claimed_ns;       /* ... which we saw then */

    bool holds;
    uint64_t epoch, seq; /* ours, while `holds` */
    int64_t from_ns;     /* when the last successful renewal began */
};

enum sluice_lease_answer {
    SLUICE_LEASE_OURS,  /* taken, or renewed */
    SLUICE_LEASE_WAIT,  /* another holds it, or may */
    SLUICE_LEASE_LOST,  /* it was ours, and no longer is: it lapsed, or another one has it */
    SLUICE_LEASE_ERROR, /* the folder fails, errno says how; when ours it stays so until it lapses */
};

/* How long a renewal that does not change is another's, by a watcher's clock. */
int64_t sluice_lease_stale_ns(int64_t valid_ns);

/* Read it: who leads? False: the folder fails (errno). Does I/O that may hang. */
bool sluice_lease_watch(struct sluice_lease_side *side);

/* Take it when it is free, or renew it. Does I/O that may hang. */
enum sluice_lease_answer sluice_lease_hold(struct sluice_lease_side *side);

/* Give it back, when it is ours: our process has ended, or writes no more. */
enum sluice_lease_answer sluice_lease_release(struct sluice_lease_side *side);

#endif
