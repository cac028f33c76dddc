/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The recorder of decisions, for its own files only: decisions.c (what hooks record; start and end), topology.c
 * (the cluster that an entry names), writer.c (the thread that writes files). encoding.h is the encoding of entries and
 * ring.h the ring that they wait in.
 */
#ifndef SLUICE_DECISIONS_DECISIONS_INTERNAL_H
#define SLUICE_DECISIONS_DECISIONS_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "decisions/decisions.h"
#include "decisions/encoding.h"
#include "decisions/ring.h"

/* Entries of a file, by number; docs/explain.md has their fields. Append only. */
enum entry_type {
    ENTRY_TOPOLOGY = 1,
    ENTRY_IMAGE = 2,
    ENTRY_DECISION = 3,
    ENTRY_START = 4,
    ENTRY_PLAN = 5,
    ENTRY_LOST = 6,
};

/* The last decision about a job. */
struct said {
    uint32_t job;
    uint32_t at_s; /* monotonic */
    uint64_t what;
};

struct image {
    uint32_t length;
    uint8_t *data;
};

/* What only the thread touches. */
struct writer {
    int file;
    uint64_t number;     /* of the file */
    uint64_t file_bytes; /* so far */
    time_t retry;        /* CLOCK_MONOTONIC second before which no file is opened again */
    bool failure_logged;
    struct bytes buffer;
    uint64_t sequence;
    uint64_t lost_recorded; /* of the counter `dropped`, in entries of type LOST */
    struct bytes topology;
    struct image *images; /* by node */
    uint32_t image_room;
};

struct sluice_decision_recorder {
    char *folder;
    uint64_t max_file_bytes;
    uint32_t max_files, repeat_s;
    struct ring ring;

    /* the hook's */
    const struct sluice_cluster *cluster;
    uint32_t node_count;
    uint64_t *dirty; /* a bit for each node whose image is not recorded */
    size_t dirty_words;
    struct bytes topology; /* to be recorded; data NULL: it is */
    struct bytes scratch;
    struct said *said;
    uint32_t said_mask;

    /* the planner's */
    struct bytes plan_scratch;
    struct said *planned;

    atomic_ullong recorded, repeated, dropped, written, failed;
    _Atomic uint64_t consumed; /* place in the ring up to which everything is in the file */
    atomic_bool stop;
    pthread_t thread;
    struct writer writer;
    bool shared; /* slurmctld's own: its counters are shown in the status */
};

/* Seconds, for how long ago something was. */
static inline uint32_t sluice_monotonic_s(void)
{
    return (uint32_t)(sluice_clock_ns(CLOCK_MONOTONIC_COARSE) / 1000000000) + 1; /* never 0 */
}

/* Into the ring, and counted: as recorded, or as dropped (false). Any thread. */
bool sluice_decision_record(struct sluice_decision_recorder *recorder, enum entry_type type,
                            const struct bytes *payload);

/* For the owner of the cluster. Is the topology in the ring? False: what needs it cannot be recorded now. */
bool sluice_decision_record_topology(struct sluice_decision_recorder *recorder);
/* The same: topology and images up to date in the ring? False: the decision that would need them cannot be recorded
 * now. */
bool sluice_decision_record_images(struct sluice_decision_recorder *recorder);

/* The thread, of a recorder: writes what is in the ring until `stop`, and what was recorded before that. */
void *sluice_decision_write_all(void *argument);
/* After the thread's end: what it remembered. */
void sluice_decision_writer_free(struct writer *writer);

#endif /* SLUICE_DECISIONS_DECISIONS_INTERNAL_H */
