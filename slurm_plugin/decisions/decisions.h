/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Decisions: what the core decided in slurmctld, so complete that `sluice explain` and tests replay every
 * decision through the same core and get the same answer.
 *
 * How a decision becomes an entry of a file
 *   - A hook calls sluice_decision_*: it copies the facts into a ring in memory (no lock, no system call, no
 *     allocation) and continues. If the ring is full the entry is dropped and counted: nothing waits.
 *   - A thread takes them out and appends them to a file; files have a bounded size and number, the oldest goes first.
 *     They lie in a folder of their own with mode 0700, files 0600: readable by SlurmUser only.
 *
 * What makes an entry replayable: it names the *image* of every node at that moment. An image is what the core knows of
 * a node (struct sluice_node_view): as decisions depend on nothing else, the images, the topology and the request give
 * the decision again. Images are recorded only when a node changed since the last entry: code that changes the cluster
 * calls sluice_decision_node_changed (a bit is set), and the next entry includes what changed. A file starts with the
 * topology and all images, so that each file replays alone; that costs the hook nothing, as the thread remembers them.
 * An entry that would refer to an image that was lost is dropped with it, and the image is tried again.
 *
 * The format is in docs/explain.md; sluice/explain/decisions.py reads it. This header includes no header of Slurm.
 *
 * Threads: the functions about one recorder's images and decisions are for the owner of the cluster (the select hook,
 * under slurmctld's locks): calls must not overlap. sluice_decision_planned is for one planner thread, sluice_decision_
 * counters for any; both may overlap with the others.
 */
#ifndef SLUICE_DECISIONS_DECISIONS_H
#define SLUICE_DECISIONS_DECISIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "sluice/core.h"

enum { SLUICE_DECISION_FORMAT = 1 };

struct sluice_decision_recorder;

/* 0 or NULL takes the default in its comment. */
struct sluice_decision_config {
    const char *folder;      /* needed; made where it does not exist (its parent must) */
    uint64_t ring_bytes;     /* 8 MiB; a power of two */
    uint64_t max_file_bytes; /* 32 MiB */
    uint32_t max_files;      /* 8 */
    uint32_t repeat_s;       /* 60: a refusal that says the same of the same job is recorded once in so many seconds */
    uint32_t max_jobs;       /* 65536: jobs whose last decision is remembered */
    bool shared;             /* it is slurmctld's recorder: its counters are shown in the status */
};

/* Starts the thread. Errors: NO_MEMORY, SYSTEM (the folder), RANGE. */
enum sluice_error sluice_decision_new(const struct sluice_decision_config *config,
                                      struct sluice_decision_recorder **recorder, struct sluice_error_text *text);
/* Writes what is in the ring, ends the thread and frees all. NULL is allowed. */
void sluice_decision_free(struct sluice_decision_recorder *recorder);

/*
 * The recorder of this slurmctld, or NULL; it exists from the first plugin's start to the last one's end. Makes no file
 * before something is recorded. One atomic load.
 */
struct sluice_decision_recorder *sluice_decision_shared(void);

/* ---- the cluster that decisions are made on ---- */

/*
 * How a cluster was made: the calls that made it, in their sequence. Code that makes a core cluster notes each call
 * here and then gives the notes to the recorder. Memory failures are remembered and make sluice_decision_set_topology
 * fail.
 */
struct sluice_decision_topology;
struct sluice_decision_topology *sluice_decision_topology_new(void);
void sluice_decision_topology_free(struct sluice_decision_topology *topology);
void sluice_decision_note_model(struct sluice_decision_topology *topology, const char *name);
void sluice_decision_note_shape(struct sluice_decision_topology *topology, const struct sluice_node_shape *shape);
void sluice_decision_note_switch(struct sluice_decision_topology *topology, uint32_t parent);
/* `name` is Slurm's name of the node: explanations show it. */
void sluice_decision_note_node(struct sluice_decision_topology *topology, const char *name, uint32_t shape,
                               int64_t cpus_milli, int64_t host_memory_mib, uint32_t switch_id);
void sluice_decision_note_order(struct sluice_decision_topology *topology, const uint32_t *rank, uint32_t node_count);
void sluice_decision_note_workload(struct sluice_decision_topology *topology, const struct sluice_request *shapes,
                                   const uint32_t *weights, uint32_t count);

/*
 * From now on decisions are made on `cluster`, which was made by the noted calls; a copy of the notes is taken, and all
 * nodes count as changed. Call it again whenever a model, shape, switch, node, order or workload was added or the
 * cluster was made again. Allocates: when the configuration changes, not for a decision. Errors: NO_MEMORY.
 */
enum sluice_error sluice_decision_set_topology(struct sluice_decision_recorder *recorder,
                                               const struct sluice_decision_topology *topology,
                                               const struct sluice_cluster *cluster, struct sluice_error_text *text);

/* Something of the node changed: state, size, health, utilisation, or what is held on it. O(1). */
void sluice_decision_node_changed(struct sluice_decision_recorder *recorder, uint32_t node);

/* ---- decisions ---- */

/* For what purpose Slurm asked. Append only. */
enum sluice_decision_mode {
    SLUICE_DECISION_RUN_NOW = 0,
    SLUICE_DECISION_WILL_RUN = 1,
    SLUICE_DECISION_TEST_ONLY = 2,
};

/* What was made of the core's answer. Append only. */
enum sluice_decision_outcome {
    SLUICE_DECISION_USED = 0,        /* stock Slurm was given the core's nodes and took them */
    SLUICE_DECISION_REFUSED = 1,     /* the core found no place, and this was the answer */
    SLUICE_DECISION_OVERRULED = 2,   /* stock Slurm refused the core's nodes, and then chose itself */
    SLUICE_DECISION_SHADOWED = 3,    /* level shadow: stock Slurm chose, as if the core had not been asked */
    SLUICE_DECISION_RESERVED = 4,    /* fits, but would delay a reserved start or break a power budget: it waits */
    SLUICE_DECISION_STOCK_FOUND = 5, /* the core found no place, stock Slurm was asked and found one */
};

/* Who is asking; strings may be NULL and are copied (at most 255 bytes each). */
struct sluice_decision_job {
    uint32_t id;
    uint32_t array_id;   /* 0: no array */
    uint32_t array_task; /* UINT32_MAX: none */
    uint32_t uid;
    uint32_t priority;
    uint32_t gpus;
    int64_t submit_s;
    int64_t limit_s; /* -1: none */
    const char *account;
    const char *partition;
};

struct sluice_decision {
    struct sluice_decision_job job;
    enum sluice_decision_mode mode;
    enum sluice_decision_outcome outcome;
    bool planned;  /* the placement is the planner's, not the answer to this request: shown, but not replayed */
    bool backfill; /* asked by the backfill scheduler, where that is known */
    enum sluice_policy policy;
    const struct sluice_request *request;     /* as it was given to the core, `allowed` included */
    enum sluice_error verdict;                /* the core's answer: SLUICE_OK, NO_PLACE, NEVER, others: not replayed */
    const struct sluice_placement *placement; /* where the verdict is SLUICE_OK */
    bool stock_answered;                      /* stock Slurm was asked, and said: */
    bool stock_fits;
    const uint32_t *stock_nodes; /* where it fits: its nodes, ascending; core's numbers */
    uint32_t stock_node_count;
    uint32_t core_ns, stock_ns; /* how long each took; 0: not measured */
};

/*
 * Record a decision, to be called after the core was asked and before its cluster changes. O(nodes that changed since
 * the last entry + words of `allowed` + parts). A refusal (verdict NO_PLACE or NEVER) or a WILL_RUN/TEST_ONLY answer
 * that repeats the last one of this job within repeat_s is not recorded again.
 */
void sluice_decision_placed(struct sluice_decision_recorder *recorder, const struct sluice_decision *decision);

/* Which GPUs of a started job belong to which of its roles. */
struct sluice_decision_roles {
    uint32_t count; /* 0: it has none */
    const char *names[SLUICE_MAX_ROLES];
    const uint32_t *gpus; /* [part * count + role]: bit i for GPU i */
};

/*
 * The job got its nodes and GPUs (select_p_job_begin, after stock). `parts`: what it holds, in the core's numbers;
 * `roles` may be NULL.
 * Terms of its priority are added from what was last published (order.h).
 */
void sluice_decision_started(struct sluice_decision_recorder *recorder, const struct sluice_decision_job *job,
                             const struct sluice_part *parts, uint32_t part_count,
                             const struct sluice_decision_roles *roles);

/* ---- the planner ---- */

struct sluice_decision_plan {
    uint32_t job_id;
    uint32_t gang;                   /* 0: none */
    int64_t planned_s;               /* when it was planned */
    int64_t start_s;                 /* SLUICE_BACKFILL_NO_START: not planned */
    const struct sluice_part *parts; /* of a planned start; in Slurm's (= the hook's) node numbers */
    uint32_t part_count;
    const char *reason; /* what it waits for, one line; may be NULL */
};

/* Where the planner expects a job to start. Calls with the same content as the last one of that job cost only a
 * look-up. */
void sluice_decision_planned(struct sluice_decision_recorder *recorder, const struct sluice_decision_plan *plan);

/* ---- watching ---- */

struct sluice_decision_counters {
    uint64_t recorded; /* recorded in the ring */
    uint64_t repeated; /* left out, as they repeated the last one */
    uint64_t dropped;  /* the ring was full */
    uint64_t written;  /* bytes, into files */
    uint64_t failed;   /* entries that could not be written (disk full, ...) */
};
void sluice_decision_read_counters(const struct sluice_decision_recorder *recorder,
                                   struct sluice_decision_counters *counters);

/* Wait until all that was recorded before the call is in the file, at most `timeout_ms`; for tests. False: not yet. */
bool sluice_decision_flush(struct sluice_decision_recorder *recorder, uint32_t timeout_ms);

#endif /* SLUICE_DECISIONS_DECISIONS_H */
