/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The parts of the cluster model, for the files of the core that place jobs. Rules:
 *   - Only cluster.c and allocation.c write node state, and each change ends in sluice_node_changed, which brings the
 *     bitmaps and the policies' indexes up to date: O(what changed).
 *   - Decisions read; their scratch memory lies in the cluster, so that they never allocate.
 */
#ifndef SLUICE_CORE_CLUSTER_H
#define SLUICE_CORE_CLUSTER_H

#include "error.h"

/* One amount for each GPU of a node: one cache line. */
struct gpu_amounts {
    _Alignas(64) int32_t mib[SLUICE_MAX_GPUS];
};

enum { ALL_COMPUTE = 100 };

/* For each GPU of a node the percent of its compute that is not claimed. Only shared GPUs can lack it: an idle GPU has
 * all of it. */
struct gpu_percents {
    _Alignas(16) uint8_t percent[SLUICE_MAX_GPUS];
};

/* A kind of node, with precomputed values for decisions. Sets of GPUs are bit masks. */
struct shape {
    struct gpu_amounts memory;
    uint32_t gpu_count;
    uint16_t all;
    uint16_t near_nic;
    uint16_t link_group[SLUICE_MAX_GPUS]; /* the link domains, by their lowest GPU */
    uint16_t numa_group[SLUICE_MAX_GPUS];
    uint8_t link_groups, numa_groups;
    bool uniform;       /* all GPUs are of one model, capability and memory */
    bool uniform_links; /* all pairs of GPUs have the same weight */
    int32_t memory_sum;
    uint8_t model[SLUICE_MAX_GPUS];
    uint32_t capability[SLUICE_MAX_GPUS];
    uint8_t links[SLUICE_MAX_GPUS][SLUICE_MAX_GPUS];
    struct sluice_nic_groups nics;
    uint32_t all_nics;
    bool several_planes; /* of its NICs, not all are in one */
    uint8_t near_count;  /* groups that have both GPUs and NICs */
    struct {
        uint32_t nics;
        uint16_t gpus;
    } near[SLUICE_MAX_GPUS];
};

/* Nodes that are the same when idle. */
struct node_class {
    uint32_t shape;
    int32_t cpus;
    int32_t host_memory;
    uint32_t nodes; /* how many there are; 0 after they were all resized */
};

/* The state that decisions read, two nodes to a cache line. */
struct node {
    int32_t cpus_free;
    int32_t host_memory_free;
    int32_t gpu_free; /* sum over healthy GPUs */
    uint32_t class_id;
    uint32_t parts;
    uint16_t leaf;    /* its switch */
    uint16_t healthy; /* GPUs that may be given out */
    uint16_t idle;    /* healthy and wholly free */
    uint8_t state;    /* enum sluice_node_state */
    bool exclusive;
    uint32_t rank; /* among equals the lowest wins */
};

/* One node's share of an allocation, in a list. Free ones are listed by `next`, too. */
struct part {
    uint32_t node;
    uint32_t next;
    int32_t share; /* MiB of each of `gpus`; 0: they are held whole */
    int32_t cpus;
    int32_t host_memory;
    uint16_t gpus;
    bool exclusive;
    uint8_t kind;    /* see sluice_kind */
    uint8_t compute; /* percent of each of `gpus` */
    uint32_t nics;
};

struct allocation {
    uint32_t first;      /* part, or the next free allocation */
    uint32_t generation; /* odd while in use */
};

struct network_switch {
    uint32_t parent; /* 0: the top */
    uint32_t first_child, next_sibling;
    uint32_t nodes;
    uint32_t leaves; /* below it; of a leaf switch 1 */
    uint8_t depth;   /* 1 just below the top */
    uint8_t height;  /* 0 without switches below it */
};

struct nic_index;   /* nic_index.c */
struct score_index; /* place_sluice.c */
struct fgd_state;   /* place_fgd.c */

enum { NONE = UINT32_MAX };
enum {
    KINDS = SLUICE_MAX_GPUS + 1, /* of parts: GPU shares (0), or 1 .. 16 whole GPUs */
    NO_KIND = 255,               /* a part without GPUs */
};

struct sluice_cluster {
    struct sluice_cluster_config size;

    uint32_t model_count, shape_count, class_count, switch_count, node_count;
    char (*models)[64];
    struct shape *shapes;
    struct node_class *classes;
    uint32_t *class_table; /* open addressing, a power of two */
    uint32_t class_table_size;
    /* switch 0 is the top; nodes whose place is unknown are on leaf `unplaced`, the last one */
    struct network_switch *switches;
    uint32_t unplaced;

    struct node *nodes;
    struct gpu_amounts *gpu_free;      /* per node; also of GPUs that are not healthy */
    struct gpu_percents *compute_free; /* the same */
    uint32_t *nics_free;               /* per node */
    uint8_t (*utilisation)[SLUICE_MAX_GPUS];
    uint32_t (*kinds)[KINDS];                 /* per node: parts of each kind */
    uint32_t *version;                        /* per node: grows with each change, for code that remembers scores */
    uint8_t *level;                           /* per node: in how many of `open` its bit is set */
    bool ordered;                             /* ranks were set by the caller */
    int32_t largest_cpus, largest_gpu_memory; /* of any node; published scores are scaled by it */

    /* bitmaps over nodes: bit n of open[k] says that node n may take new parts and has at least k idle GPUs */
    size_t words;
    uint64_t *open[KINDS];
    struct nic_index *nic_index; /* NULL: no shape has NICs */
    uint32_t planes;             /* of NICs; the highest number */

    struct allocation *allocations;
    struct part *parts;
    uint32_t free_allocation, free_part, free_parts;
    struct sluice_cluster_totals totals;
    uint32_t last_node; /* the last that was given out, for round-robin; NONE: none yet */

    uint32_t *stamp; /* per node: marks nodes met in this call */
    uint32_t stamp_now;

    struct gang_scratch *gang;
    struct score_index *index;
    struct fgd_state *fgd;
};

/* A request that has been checked, in the form decisions use. */
struct need {
    int32_t gpus;                              /* on each node, or for all where `total` */
    int32_t share;                             /* MiB of each GPU; 0: whole GPUs */
    int32_t compute;                           /* percent of each GPU */
    int32_t cpus, host_memory;                 /* on a node, its GPUs' part included unless `total` */
    int32_t cpus_per_gpu, host_memory_per_gpu; /* 0 unless `total` */
    uint64_t models;                           /* 0: every model */
    uint32_t capability;
    int32_t gpu_memory_min;
    uint32_t nodes_min, nodes_max;
    uint32_t nics;         /* on a node, its GPUs' part included unless `total` */
    uint32_t nics_per_gpu; /* 0 unless `total` */
    uint64_t nic_kinds;    /* 0: every kind */
    uint32_t plane;        /* NICs of this one alone; 0: of any */
    bool all_paired;       /* a node gives only GPUs that are near a free NIC; where `total` */
    uint32_t segment;      /* at least 1; both of the above are multiples of it */
    uint32_t lower_most; /* switches one level below switch_level that nodes_min (= nodes_max) nodes may fill; 0: any */
    bool spread;         /* over the leaf switches */
    bool one_plane;      /* for all NICs, where there is room in one */
    bool spread_planes;  /* the NICs of each node over planes */
    bool total;
    bool exclusive;
    bool any_gpu;     /* no condition on what kind of GPU */
    bool preferences; /* any of link, numa, nic is not SLUICE_ANY */
    bool plain; /* one node, no preferences, NICs, not exclusive, policy's layout: only CPUs, memory and GPUs matter */
    uint8_t link, numa, nic, one_switch, layout; /* enum sluice_wish, sluice_layout */
    uint8_t switch_level;
    const uint64_t *allowed; /* may be NULL */
    size_t allowed_words;
    uint32_t allowed_count; /* of the candidates, how many are allowed at most; 0: not counted */
    uint64_t seed;
    uint64_t power_budgets; /* of backfill only, as is what follows */
    int32_t watts;          /* of each GPU */
};

/* One node chosen. Candidates are compared by preferences that hold, then pairs with NICs, then layout, then score
 * (larger is better), then rank (lower is). */
struct choice {
    uint32_t node;
    uint32_t nics;
    uint16_t gpus;
    uint16_t pairs;    /* of its GPUs and NICs */
    int32_t preferred; /* how many preferences hold */
    int32_t layout;    /* by use of the node; 0 under the policy's own layout */
    int64_t score;
};

/* Up to SLUICE_MAX_TERMS terms of a score, for explanations. */
struct terms {
    uint32_t count;
    struct sluice_term term[SLUICE_MAX_TERMS];
};

/*
 * A placement policy. `score` rates `node` for `need` and chooses need->gpus GPUs (`gpus` of them where total) among
 * `fit`, those that can take part; `terms` is NULL but in explanations. `choose` finds the best single node for a plain
 * need (need->allowed may be set), or is NULL: then every node is scored.
 */
struct policy {
    const char *name;
    int64_t (*score)(const struct sluice_cluster *cluster, uint32_t node, const struct need *need, int gpus,
                     uint16_t fit, uint16_t *chosen, struct terms *terms);
    bool (*choose)(struct sluice_cluster *cluster, const struct need *need, struct choice *choice);
};
extern const struct policy sluice_policies[SLUICE_POLICY_COUNT];

/* ---- policies.c: how GPUs are picked within a node, among `fit` ---- */
/* The least free ones that fit, lowest index first. */
uint16_t sluice_pick_tightest(const struct sluice_cluster *cluster, uint32_t node, uint16_t fit, int gpus);
/* As a node's GPUs are picked where the policy has no opinion: well linked where preferred, tight where shared. */
uint16_t sluice_pick(const struct sluice_cluster *cluster, uint32_t node, const struct need *need, int gpus,
                     uint16_t fit);
void sluice_add_term(struct terms *terms, const char *name, int64_t value);

/* ---- cluster.c ---- */
/* After every change of a node's row, class or availability. */
void sluice_node_changed(struct sluice_cluster *cluster, uint32_t node);
enum sluice_error sluice_find_node(const struct sluice_cluster *cluster, uint32_t node, struct sluice_error_text *text);
/* A mark that no entry of `stamp` carries yet. */
uint32_t sluice_new_stamp(struct sluice_cluster *cluster);

/* ---- allocation.c: what-if ---- */
bool sluice_allocation_known(const struct sluice_cluster *cluster, uint64_t allocation);
/* The allocation's first part; parts[].next leads on until NONE. The allocation must be known, here and below. */
uint32_t sluice_allocation_first_part(const struct sluice_cluster *cluster, uint64_t allocation);
/* Take an allocation's parts off their nodes, as if it had been released, and put them back. Between the two nothing
 * may be committed or released. */
void sluice_allocation_suspend(struct sluice_cluster *cluster, uint64_t allocation);
void sluice_allocation_resume(struct sluice_cluster *cluster, uint64_t allocation);
/* A part as it is held, and as callers see it. */
struct part sluice_part_held(const struct sluice_part *part);
struct sluice_part sluice_part_shown(const struct part *part);
/* Put a part that belongs to no allocation on its node, where it must fit, and take it off again. */
void sluice_part_take(struct sluice_cluster *cluster, const struct part *part);
void sluice_part_give(struct sluice_cluster *cluster, const struct part *part);

/* ---- request.c ---- */
enum sluice_error sluice_need_from_request(const struct sluice_cluster *cluster, const struct sluice_request *request,
                                           struct need *need, struct sluice_error_text *text);

/* ---- place.c ---- */
/* What a node can give to a request: how many GPUs of `fit`, or with CPU-only requests whether anything. */
struct offer {
    uint16_t fit;      /* GPUs from which any subset will do */
    uint8_t units;     /* where need->total: the most GPUs it can give; else 1 if it can take one node's share, or 0 */
    uint8_t preferred; /* how many preferences hold */
};
/* What a node of this shape offers that has so much free, and these GPUs to choose from. */
struct offer sluice_offer_of(const struct shape *shape, const struct need *need, int32_t cpus, int32_t host_memory,
                             uint16_t fit);
/* What the node offers now. */
struct offer sluice_offer_now(const struct sluice_cluster *cluster, uint32_t node, const struct need *need);
/* What it would offer, were it up, healthy and idle. */
struct offer sluice_offer_idle(const struct sluice_cluster *cluster, const struct node_class *class,
                               const struct need *need);
/* The GPUs of `mask` among which `gpus` can be chosen freely, under the request's preferences; 0 if there are none. */
uint16_t sluice_best_group(const struct shape *shape, const struct need *need, int gpus, uint16_t mask,
                           uint8_t *preferred);
/* Score a node that offers `gpus` of `fit`. */
struct choice sluice_score_node(const struct sluice_cluster *cluster, const struct policy *policy,
                                const struct need *need, uint32_t node, int gpus, uint16_t fit, uint8_t preferred,
                                struct terms *terms);
/* Is `a` the better one? Never equal for two nodes, as ranks differ. */
bool sluice_choice_better(const struct sluice_cluster *cluster, const struct choice *a, const struct choice *b);
struct sluice_part sluice_part_of(const struct need *need, uint32_t node, uint16_t gpus, uint32_t nics);
/* Place a need, whatever it says of NICs: with them, as sluice_score_node chooses them. */
bool sluice_find(struct sluice_cluster *cluster, const struct policy *policy, const struct need *need,
                 struct sluice_placement *placement);
/* Choose `gpus` GPUs of a node and score it; false when it does not fit, is closed or not allowed. */
bool sluice_try_node(const struct sluice_cluster *cluster, const struct policy *policy, const struct need *need,
                     int gpus, uint32_t node, struct choice *choice, struct terms *terms);
/* The best single node by scoring every candidate; false when none fits. */
bool sluice_scan(const struct sluice_cluster *cluster, const struct policy *policy, const struct need *need,
                 struct choice *best);
/* The bitmap of nodes that may take part, and a word of it within what the request allows. */
const uint64_t *sluice_candidates(const struct sluice_cluster *cluster, const struct need *need);
uint64_t sluice_candidate_word(const struct need *need, const uint64_t *candidates, size_t word);

/* ---- nics.c ---- */
/* Of a node with so many GPUs: groups and kinds within bounds. Errors: INVALID, RANGE. */
enum sluice_error sluice_check_nics(const struct sluice_nic_groups *groups, uint32_t gpu_count,
                                    struct sluice_error_text *text);
/* The NICs of a shape that are of an accepted kind, and in this plane (0: in any). */
uint32_t sluice_nics_accepted(const struct shape *shape, uint64_t kinds, uint32_t plane);
/* How many planes these NICs are in, at least. */
uint32_t sluice_count_planes(const struct shape *shape, uint32_t nics);
/* How many pairs of one of these GPUs and one of these NICs there are, each in one pair at most. */
int sluice_count_pairs(const struct shape *shape, uint16_t gpus, uint32_t nics);
/* What is left of an offer for a need of NICs where these are free. */
struct offer sluice_offer_with_nics(const struct shape *shape, const struct need *need, uint32_t nics_free,
                                    struct offer offer);
/* The NICs for the chosen GPUs, which are exchanged for others of `fit` where that makes more pairs. */
void sluice_choose_pairs(const struct sluice_cluster *cluster, const struct need *need, uint16_t fit,
                         struct choice *choice);
/* Of these NICs so many, which must be there, with the most pairs with so many of these GPUs, and over the planes as
 * evenly as can be; of more than 10, as evenly as a greedy search finds. O((1000 + NICs^2) * groups). */
uint32_t sluice_nics_evenly(const struct shape *shape, uint16_t gpus, int gpu_count, uint16_t idle, uint32_t nics,
                            int nic_count);
/* So many of these NICs, which must be there, with the most pairs with just these GPUs. */
uint32_t sluice_nics_for(const struct shape *shape, uint16_t gpus, uint32_t nics, int count);
/* The most pairs of so many of these GPUs and so many of these NICs, which must be there. O(groups). */
int sluice_most_pairs(const struct shape *shape, uint16_t gpus, int gpu_count, uint32_t nics, int nic_count);

/* ---- nic_index.c ---- */
/* For a cluster that has none: when its first shape with NICs is added. Errors: NO_MEMORY. */
enum sluice_error sluice_nic_index_new(struct sluice_cluster *cluster);
void sluice_nic_index_free(struct sluice_cluster *cluster);
/* The node's row changed. Called immediately after each change. */
void sluice_nic_index_node_changed(struct sluice_cluster *cluster, uint32_t node);
/* Does the index agree with the nodes? For sluice_cluster_check. */
bool sluice_nic_index_sound(const struct sluice_cluster *cluster);
/* As sluice_find, for a need with NICs: nodes with more pairs first. */
bool sluice_find_near_nics(struct sluice_cluster *cluster, const struct policy *policy, const struct need *need,
                           struct sluice_placement *placement);

/* ---- place_sluice.c, score_index.c: the sluice policy and its index ---- */
enum sluice_error sluice_index_new(struct sluice_cluster *cluster);
void sluice_index_free(struct sluice_cluster *cluster);
/* The node's row changed: free amounts, class, availability (open[0]). Called immediately after each change. */
void sluice_index_node_changed(struct sluice_cluster *cluster, uint32_t node);
/* The caller's order of nodes changed: all ranks. */
void sluice_index_order_changed(struct sluice_cluster *cluster);
/* Does the index agree with the nodes? For sluice_cluster_check. */
bool sluice_index_sound(const struct sluice_cluster *cluster);
enum sluice_error sluice_index_set_workload(struct sluice_cluster *cluster, const struct need *shapes,
                                            const uint32_t *weights, uint32_t count);
int64_t sluice_score_sluice(const struct sluice_cluster *cluster, uint32_t node, const struct need *need, int gpus,
                            uint16_t fit, uint16_t *chosen, struct terms *terms);
bool sluice_choose_sluice(struct sluice_cluster *cluster, const struct need *need, struct choice *choice);

/* ---- place_fgd.c ---- */
enum sluice_error sluice_fgd_set_workload(struct sluice_cluster *cluster, const struct need *shapes,
                                          const uint32_t *weights, uint32_t count);
void sluice_fgd_free(struct sluice_cluster *cluster);
int64_t sluice_score_fgd(const struct sluice_cluster *cluster, uint32_t node, const struct need *need, int gpus,
                         uint16_t fit, uint16_t *chosen, struct terms *terms);

/* ---- blocks.c ---- */
/* Of the switches that a job may fill (sluice_blocks_ask), one. */
struct lower {
    uint32_t id;
    uint32_t nodes; /* that fit below it */
    uint32_t taken;
    bool whole; /* each leaf switch below it has some of them */
};
/* Which of them a job of so many nodes fills, at most `most`: how many, 0 if it cannot. They are the first ones then. */
uint32_t sluice_fill_lower(struct lower *lower, struct lower *scratch, uint32_t count, uint32_t most, uint32_t nodes);

/* ---- gang.c ---- */
enum sluice_error sluice_gang_new(struct sluice_cluster *cluster);
void sluice_gang_free(struct sluice_cluster *cluster);
/* Place a need for several nodes: SLUICE_OK with the parts and the score, or SLUICE_ERROR_NO_PLACE. */
enum sluice_error sluice_gang_place(struct sluice_cluster *cluster, const struct policy *policy,
                                    const struct need *need, struct sluice_placement *placement);
/* Would it find a place, were every allowed node up, healthy and idle? */
bool sluice_gang_possible(struct sluice_cluster *cluster, const struct need *need);

/* ---- small things on hot paths ---- */

static inline bool sluice_bit(const uint64_t *words, uint32_t bit)
{
    return words[bit / 64] >> (bit % 64) & 1;
}

static inline const struct node_class *sluice_class_of(const struct sluice_cluster *cluster, uint32_t node)
{
    return &cluster->classes[cluster->nodes[node].class_id];
}

static inline const struct shape *sluice_shape_of(const struct sluice_cluster *cluster, uint32_t node)
{
    return &cluster->shapes[sluice_class_of(cluster, node)->shape];
}

/* May new parts go there? */
static inline bool sluice_node_open(const struct sluice_cluster *cluster, uint32_t node)
{
    return sluice_bit(cluster->open[0], node);
}

static inline bool sluice_node_allowed(const struct need *need, uint32_t node)
{
    return !need->allowed || (node / 64 < need->allowed_words && sluice_bit(need->allowed, node));
}

static inline bool sluice_gpu_eligible(const struct shape *shape, const struct need *need, uint32_t gpu)
{
    return (!need->models || (need->models >> shape->model[gpu] & 1)) && shape->capability[gpu] >= need->capability &&
           shape->memory.mib[gpu] >= need->gpu_memory_min;
}

/* The GPUs of a shape that are of a kind the request accepts. */
static inline uint16_t sluice_eligible(const struct shape *shape, const struct need *need)
{
    if (need->any_gpu || !shape->gpu_count)
        return shape->all;
    if (shape->uniform)
        return sluice_gpu_eligible(shape, need, 0) ? shape->all : 0;
    uint16_t mask = 0;
    for (uint32_t i = 0; i < shape->gpu_count; i++)
        mask |= (uint16_t)(sluice_gpu_eligible(shape, need, i) << i);
    return mask;
}

/* The GPUs of `mask` that have at least `share` MiB free. */
static inline uint16_t sluice_with_free(const struct gpu_amounts *free_amounts, uint16_t mask, int32_t share)
{
    unsigned enough = 0;
    for (unsigned i = 0; i < SLUICE_MAX_GPUS; i++)
        enough |= (unsigned)(free_amounts->mib[i] >= share) << i;
    return (uint16_t)(enough & mask);
}

/* The GPUs of `mask` that have at least `compute` percent unclaimed. */
static inline uint16_t sluice_with_compute(const uint8_t *compute_free, uint16_t mask, int32_t compute)
{
    uint16_t enough = 0;
    for (unsigned set = compute ? mask : 0; set; set &= set - 1) {
        unsigned gpu = (unsigned)__builtin_ctz(set);
        enough |= (uint16_t)((compute_free[gpu] >= compute) << gpu);
    }
    return compute ? enough : mask;
}

/* The GPUs of a node that can take part in the request now, whatever its other conditions. */
static inline uint16_t sluice_fitting_gpus(const struct sluice_cluster *cluster, uint32_t node, const struct need *need)
{
    const struct node *row = &cluster->nodes[node];
    uint16_t mask = sluice_eligible(sluice_shape_of(cluster, node), need);
    if (!need->share)
        return mask & row->idle;
    mask = sluice_with_free(&cluster->gpu_free[node], mask & row->healthy, need->share);
    return sluice_with_compute(cluster->compute_free[node].percent, mask, need->compute);
}

/* Set the node's bit in the first `now` of these bitmaps only; it was set in the first *before. */
static inline void sluice_set_level(uint64_t *const *bitmaps, uint32_t node, int now, uint8_t *before)
{
    uint64_t bit = (uint64_t)1 << (node % 64);
    for (int k = *before; k < now; k++)
        bitmaps[k][node / 64] |= bit;
    for (int k = now; k < *before; k++)
        bitmaps[k][node / 64] &= ~bit;
    *before = (uint8_t)now;
}

static inline int sluice_count(uint16_t mask)
{
    return __builtin_popcount(mask);
}

static inline uint16_t sluice_lowest(uint16_t mask, int count)
{
    uint16_t chosen = 0;
    while (count-- > 0 && mask) {
        uint16_t bit = (uint16_t)(mask & -mask);
        chosen |= bit;
        mask ^= bit;
    }
    return chosen;
}

/* What sort of part the request makes on a node, for GPU clustering: 0 shares, 1 .. 16 whole GPUs. */
static inline uint8_t sluice_kind(int gpus, int32_t share)
{
    return (uint8_t)(gpus == 0 ? NO_KIND : share ? 0 : gpus);
}

#endif
