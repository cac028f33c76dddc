/* SPDX-License-Identifier: Apache-2.0 */
/* A compaction plan in the making, for compaction.c and exchange.c. */
#ifndef SLUICE_CORE_COMPACTION_H
#define SLUICE_CORE_COMPACTION_H

#include "cluster.h"

enum {
    STEPS_OF_EXCHANGE = 4,
    STEPS_MAX = 16 * SLUICE_COMPACTION_MAX_MOVES,
};

/* Whether there is a place for a request, in one call. */
struct vacancy {
    uint32_t call;
    bool place;
};

/* One step of a what-if: a job was taken off its node, or put on one. */
struct step {
    bool leaves;
    bool first; /* it leaves the place that it really has */
    uint32_t movable;
    struct part part;
};

/* A job's place on a GPU that it shares, or what is free of such a GPU (no job, no share). */
struct slot {
    uint32_t movable;
    uint32_t node;
    int32_t share, free; /* `free` is the GPU's */
    uint32_t next;       /* of its kind; NONE: none */
    uint8_t gpu;
};

struct sluice_compaction {
    struct sluice_cluster *cluster;
    uint32_t max_movables, max_requests;
    /* of the call under way */
    enum sluice_policy policy;
    const struct sluice_request *requests;
    const struct sluice_movable *movables;
    uint32_t request_count, movable_count;
    uint32_t most_moves;
    int64_t most_cost; /* a plan costs less */
    struct need *needs;
    /* what-if */
    struct part *now; /* where each movable job is */
    bool *moved;      /* not where it really is */
    struct step steps[STEPS_MAX];
    uint32_t step_count;
    uint32_t moves;
    int64_t spent;
    struct part *holds; /* the waiting job's places, one a node */
    uint32_t hold_count;
    /* nodes to clear */
    uint32_t *first_on_node; /* movables, by node; NONE: none */
    uint32_t *next_on_node;
    uint32_t *seen; /* per allocation: the call in which it was a movable */
    uint32_t call;
    struct vacancy *vacancies; /* by request */
    bool *barred;              /* by node: held, or tried in vain */
    /* exchanges */
    struct slot *slots;
    uint32_t slot_count;
};

/* Take a job off the node where it is now, and put one on a node, where it must fit. */
void sluice_compaction_take_off(struct sluice_compaction *compaction, uint32_t movable);
void sluice_compaction_put_on(struct sluice_compaction *compaction, uint32_t movable, const struct sluice_part *part);
/* Back to when there were so many steps. */
void sluice_compaction_undo(struct sluice_compaction *compaction, uint32_t step_count);

/* The best exchange of two jobs that share GPUs, or of one with a hole; false where there is none within the limits. */
bool sluice_compaction_exchange(struct sluice_compaction *compaction);

#endif
