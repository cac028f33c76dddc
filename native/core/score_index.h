/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The index under the sluice policy. The policy sees a node only through a few coarse numbers, so nodes that look the
 * same to it lie in one *bucket*, and a decision compares buckets instead of nodes:
 *
 *   kind    what an idle node is: model, capability and memory of its GPUs (all alike), how many, and how many CPUs
 *   kappa   free CPUs for each open GPU, in half octaves; a GPU is open with a quarter or more of its memory free
 *   slot    which part of the node: a GPU in use by its level of free memory, a number of idle GPUs, or the node
 *
 * A bucket is a treap of entries ordered by node rank. Each entry carries the largest free CPUs, host memory, GPU
 * memory and GPU compute of its subtree, so the lowest ranked node that fits is found in logarithmic time. Priorities
 * are hashes of the entries' numbers: the same on every machine.
 *
 * Buckets do not depend on the workload: prices may change without moving a node. A change of one node costs the moves
 * of its own entries. Nodes with GPUs of several kinds, and those of kinds beyond MAX_NODE_KINDS, are in no bucket but
 * in the list `others`.
 */
#ifndef SLUICE_CORE_SCORE_INDEX_H
#define SLUICE_CORE_SCORE_INDEX_H

#include "cluster.h"

enum {
    LEVELS = 100,       /* free GPU memory in hundredths of a GPU; LEVELS is an idle GPU */
    KAPPAS = 24,        /* classes of free CPUs per open GPU */
    KAPPA_CLOSED = 23,  /* no open GPU */
    SLOT_IDLE = LEVELS, /* + k - 1: k idle GPUs */
    SLOT_NODE = LEVELS + SLUICE_MAX_GPUS,
    SLOTS = SLOT_NODE + 1,
    SLOT_WORDS = (SLOTS + 63) / 64,
    NO_SLOT = 255,
    ENTRIES = SLUICE_MAX_GPUS + 2, /* of a node: its GPUs in use, its idle GPUs, itself */
    ENTRY_IDLE = SLUICE_MAX_GPUS,
    ENTRY_NODE = SLUICE_MAX_GPUS + 1,
    KIND_OTHER = 0, /* of the nodes that lie in no bucket */
    MAX_NODE_KINDS = 256,
    FRACTION_BITS = 20, /* of a price: a level is worth 2^20 to a workload that can use all of it */
    CPU_BITS = 12,      /* further ones of the price of a thousandth of a CPU */
};

/* Upper bounds of what a bucket's or subtree's entries have free. */
struct bounds {
    int32_t cpus, host_memory, gpu_memory;
    int32_t compute; /* percent of a GPU */
};

struct bucket {
    uint32_t root;        /* entry, or NO_ENTRY */
    uint32_t first_rank;  /* lowest */
    struct bounds bounds; /* of all its entries */
};

/* The buckets of one kind and kappa. */
struct group {
    uint64_t filled[SLOT_WORDS]; /* slots whose bucket is not empty */
    struct bucket buckets[SLOTS];
};

/* A kind's prices under the workload, by kappa; see place_sluice.c. What a decision compares is adjacent in memory. */
struct prices {
    int64_t cpu[KAPPAS];                    /* of a thousandth of a CPU, in 2^-CPU_BITS */
    int64_t least_loss[LEVELS + 1][KAPPAS]; /* a bound on what a share of so many levels costs; 0: a whole GPU */
    int64_t worth[KAPPAS][LEVELS + 1];      /* of a GPU, by its level */
    int64_t block[SLUICE_MAX_GPUS + 1];     /* of k idle GPUs together, beyond their single worth */
};

struct node_kind {
    uint8_t model;
    uint32_t capability;
    int32_t memory;     /* of a GPU */
    uint32_t gpu_count; /* 0: a node without GPUs */
    int32_t cpus;
    uint32_t nodes;  /* of this kind, in whatever state */
    uint32_t kappas; /* bit k: groups[k] has nodes */
    struct prices prices;
    struct group groups[KAPPAS];
};

struct entry {
    uint32_t left, right; /* NO_ENTRY: none */
    uint32_t rank, node;
    struct bounds free;   /* what is free, of the entry's GPUs where it is GPU memory or compute */
    struct bounds bounds; /* of the subtree */
};
enum { NO_ENTRY = 0 }; /* entry 0 stays empty, with bounds of nothing */

/* Where a node's entries are. */
struct filing {
    uint32_t first_entry;  /* its entries: one for each GPU, one for the idle ones, one for itself; 0: not yet given */
    uint8_t kind, kappa;   /* the kind counts it as soon as it has entries */
    uint8_t slot[ENTRIES]; /* NO_SLOT: not filed */
};

struct score_index {
    uint32_t kind_count;
    struct node_kind *kinds[MAX_NODE_KINDS];
    struct filing *filings; /* per node */
    struct entry *entries;
    uint32_t entry_count;
    uint64_t *others; /* bitmap of the open nodes that lie in no bucket */
    bool priced;      /* prices are those of this workload and these nodes */
    uint32_t workload_count;
    struct need *workload;
    uint32_t *weights;
};

/* The level of a GPU with `free` of `memory` MiB free, and the levels that a share takes: rounded against the share. */
static inline uint32_t sluice_level(int32_t free, int32_t memory)
{
    return (uint32_t)((int64_t)free * LEVELS / memory);
}

static inline uint32_t sluice_levels_needed(int32_t share, int32_t memory)
{
    return (uint32_t)(((int64_t)share * LEVELS + memory - 1) / memory);
}

/* Least thousandths of a CPU per open GPU of class `kappa`; 0 for the lowest class. Not for KAPPA_CLOSED. */
int32_t sluice_kappa_floor(int kappa);
/* The class of a node as it is now. */
int sluice_kappa_of(const struct sluice_cluster *cluster, uint32_t node);

/* How far a search goes. */
struct reach {
    uint32_t from, before; /* ranks */
    uint32_t met;          /* nodes with room that the request does not allow, so far */
    uint32_t patience;     /* the search is given up when more are met */
};

/*
 * The node of lowest rank in the bucket that has room for `need` and is allowed, within reach; NONE if there is none,
 * or the search is given up. O(log nodes), and as much again for each run of nodes met that are not allowed (for each
 * such node, where the caller has set an order).
 */
uint32_t sluice_bucket_first(const struct sluice_cluster *cluster, const struct bucket *bucket, const struct need *need,
                             struct reach *reach);

/* The lowest number of an allowed node from `node` on, NONE if there is none. */
uint32_t sluice_next_allowed(const struct need *need, uint32_t node);

#endif
