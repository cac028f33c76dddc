/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * When whole GPUs come free: the answer to a submission with a deadline, without planning it. The planner makes an
 * outlook from its plan every few seconds: for each node the first time from which a number of its GPUs is free for a
 * duration, after all that runs and all that the plan starts, each job taking its whole time limit. It is an upper
 * bound for a job that goes last. It does not model CPUs and memory.
 *
 * Immutable once published; everything may be called from any thread. No Slurm, no clock.
 */
#ifndef SLUICE_ADMISSION_OUTLOOK_H
#define SLUICE_ADMISSION_OUTLOOK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    SLUICE_OUTLOOK_GPUS = 16,         /* of one node */
    SLUICE_OUTLOOK_NODES = 64,        /* that may be asked for */
    SLUICE_OUTLOOK_MAX_NODES = 16384, /* of a cluster; there is none for larger ones */
};

struct sluice_outlook;

/* A node: which GPUs it has (bit i: GPU i; 0 where nothing may start) and their type, "" where they differ or have
 * none. */
struct sluice_outlook_node {
    uint32_t gpus;
    const char *type;
};

/* GPUs that are taken from start_s until end_s, in seconds since 1970. */
struct sluice_outlook_span {
    uint32_t node, gpus;
    int64_t start_s, end_s;
};

struct sluice_outlook_partition {
    const char *name;
    const uint64_t *nodes; /* bit n % 64 of word n / 64: node n */
    bool usual;            /* where no partition is named */
};

/* What an outlook is made of; copied. `spans` are sorted by node on the way. */
struct sluice_outlook_parts {
    int64_t now_s;
    const struct sluice_outlook_node *nodes;
    uint32_t node_count;
    struct sluice_outlook_span *spans;
    uint32_t span_count;
    const struct sluice_outlook_partition *partitions;
    uint32_t partition_count;
};

/* NULL: no memory, or a cluster that is too large. O(nodes * spans of a node squared). */
struct sluice_outlook *sluice_outlook_new(const struct sluice_outlook_parts *parts);

/* Put it in force until valid_until_s, in place of the previous one; NULL: none is in force from now on. */
void sluice_outlook_publish(struct sluice_outlook *outlook, int64_t valid_until_s);

/* The one in force, or NULL; to be given back. */
struct sluice_outlook *sluice_outlook_acquire(int64_t now_s);
void sluice_outlook_release(struct sluice_outlook *outlook);

/* When it was made. */
int64_t sluice_outlook_made_s(const struct sluice_outlook *outlook);

struct sluice_outlook_question {
    const char *partitions; /* NULL or "": the usual one; several, with commas: the one that is first */
    const char *type;       /* NULL or "": any */
    uint32_t gpus, nodes;   /* so many GPUs on each of so many nodes */
    int64_t run_s;          /* for so long */
};

/* The start that can be counted on, in seconds since 1970. False: it is not known (no such partition, more than the
 * bounds above, never enough GPUs). O(nodes). */
bool sluice_outlook_ask(const struct sluice_outlook *outlook, const struct sluice_outlook_question *question,
                        int64_t *start_s);

#endif
