/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lower bounds of the first start that each node offers to a request, and the search for the node that offers the
 * earliest.
 *
 * While a plan is made, what is free only shrinks, so the first start that a node offers to a kind of request only
 * moves later: what was true once stays a lower bound. A kind (requests rounded down) keeps one bound per node. Kinds
 * form chains from a rough one, which many jobs share, to close ones: what bounds a kind's parent bounds it too. So a
 * node that others took is usually found once, for a rough kind, and all close kinds know it.
 */
#ifndef SLUICE_CORE_FIRST_STARTS_H
#define SLUICE_CORE_FIRST_STARTS_H

#include "power.h"
#include "timeline.h"

enum {
    FIRST_STARTS_MAX_KINDS = 1024,
    FIRST_STARTS_KIND_TABLE = 4 * FIRST_STARTS_MAX_KINDS,
    FIRST_STARTS_JOBS_OF_KIND = 1 << 14,
};

/* A kind of request: `need` and `duration` are a lower bound of all its requests. */
struct kind {
    struct need need;
    int32_t duration;
    int32_t last; /* where the search for a request of this kind ended last */
    uint64_t hash;
    const struct kind *parent; /* rougher, so that its bounds hold here too; or NULL */
};

struct first_starts {
    const struct timelines *timelines;
    struct sluice_power *power; /* may be NULL */
    uint32_t max_nodes, node_count;
    uint32_t *node_at;     /* by position: nodes by rank */
    uint32_t *position_of; /* by node */

    struct kind kinds[FIRST_STARTS_MAX_KINDS];
    uint32_t kind_count, max_kinds;
    uint32_t kind_table[FIRST_STARTS_KIND_TABLE];     /* 1 + kind, by hash; 0: empty */
    uint32_t jobs_of_kind[FIRST_STARTS_JOBS_OF_KIND]; /* how many jobs of the queue are of each kind, by hash */

    size_t bounds_each; /* a multiple of a group's nodes */
    int32_t *bounds;    /* [kind][bounds_each] by position */
    int32_t *lows;      /* [kind][groups] a lower bound of a group's bounds */
    size_t sure_each;   /* max_kinds and a gap */
    uint16_t *sure;     /* [16 positions][sure_each] a bit per position: the bound is the kind's true first start */
    uint8_t *possible;  /* per class of node: whether a kind fits on an idle one; 2: not asked yet */
};

bool first_starts_new(struct first_starts *first_starts, const struct timelines *timelines, uint32_t max_nodes);
void first_starts_free(struct first_starts *first_starts);

/* For a new plan, whose timelines are of `cluster`: nothing is known yet. */
void first_starts_reset(struct first_starts *first_starts, const struct sluice_cluster *cluster);

/* Before anything is planned: a job of the queue asks `need` of a node for `duration`. */
void first_starts_expect(struct first_starts *first_starts, const struct need *need, int32_t duration);

/* The first start of a request for one node, `latest` at the latest, and the position of its node: of several that of
 * lowest rank. TIMELINE_NEVER if there is none. */
int32_t first_starts_find(struct first_starts *first_starts, const struct need *need, int32_t duration, int32_t latest,
                          uint32_t *position);

/* The first time from `from` on at which a node can take its share of the need, and the budgets have its watts. */
int32_t first_starts_on_node(const struct first_starts *first_starts, uint32_t node, const struct need *need,
                             int32_t duration, int32_t from);

/* The closest kind of a request; valid until the next call of this or of first_starts_find. */
const struct kind *first_starts_kind(struct first_starts *first_starts, const struct need *need, int32_t duration);

/* What is known of a node's first start for a kind. */
int32_t first_starts_bound(const struct first_starts *first_starts, const struct kind *kind, uint32_t position);

/* The same, after asking the node if it might be `time` or earlier. */
int32_t first_starts_ask(struct first_starts *first_starts, const struct kind *kind, uint32_t position, int32_t time);

/* The node has less free than before, or more from `time` on. */
void first_starts_taken(struct first_starts *first_starts, uint32_t node);
void first_starts_given(struct first_starts *first_starts, uint32_t node, int32_t time);

#endif
