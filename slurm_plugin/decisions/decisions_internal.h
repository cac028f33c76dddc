/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The recorder of decision records, for its own files only: decision.c (what hooks record; start and end),
 * decision_topology.c (the cluster that a record names), decision_writer.c (the thread that writes files). Beside them,
 * decision_bytes.h is the encoding of records and decision_ring.h the ring that they wait in.
 */
#ifndef SLUICE_CONTROLLER_DECISION_OWN_H
#define SLUICE_CONTROLLER_DECISION_OWN_H

#include <pthread.h>
#include <stdatomic.h>

#include "controller/decision.h"
#include "controller/decision_bytes.h"
#include "controller/decision_ring.h"

/* Records of a file, by number; docs/explain.md has their fields. Append only. */
enum record_type {
    RECORD_TOPOLOGY = 1,
    RECORD_IMAGE = 2,
    RECORD_DECISION = 3,
    RECORD_START = 4,
    RECORD_PLAN = 5,
    RECORD_LOST = 6,
};

/* What was said last of a job. */
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
    bool complained;
    struct bytes buffer;
    uint64_t sequence;
    uint64_t lost_told; /* of the counter `dropped`, in records of type LOST */
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
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return (uint32_t)now.tv_sec + 1; /* never 0 */
}

/* Into the ring, and counted: as recorded, or as dropped (false). Any thread. */
bool sluice_decision_record(struct sluice_decision_recorder *recorder, enum record_type type,
                            const struct bytes *payload);

/* For whoever holds the cluster. Is the topology in the ring? False: what needs it cannot be recorded now. */
bool sluice_decision_record_topology(struct sluice_decision_recorder *recorder);
/* The same: topology and images up to date in the ring? False: the decision that would need them cannot be recorded
 * now. */
bool sluice_decision_record_images(struct sluice_decision_recorder *recorder);

/* The thread, of a recorder: writes what is in the ring until `stop`, and what was recorded before that. */
void *sluice_decision_write_all(void *argument);
/* After the thread's end: what it remembered. */
void sluice_decision_writer_free(struct writer *writer);

#endif /* SLUICE_CONTROLLER_DECISION_OWN_H */
