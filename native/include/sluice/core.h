/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sluice's scheduling core: where jobs go, in which order, and who holds how much GPU memory.
 *
 * Contract of the whole header
 *   - The core knows no Slurm, files, clocks or logging: `now` is a parameter, so every decision can be
 *     replayed.
 *   - Handles are opaque, made by *_new and given back by *_free; *_free(NULL) does nothing.
 *   - Distinct handles are independent; calls on one handle must not overlap, unless a function says
 *     otherwise.
 *   - Every function that can fail returns enum sluice_error and writes results through out-pointers, which
 *     it leaves untouched on failure. A last parameter `struct sluice_error_text *text` may be NULL; on failure
 *     it receives one line that names the value, the place and the remedy. A failed call changes nothing.
 *   - After set-up no function on the decision path allocates memory.
 *   - Decisions are deterministic: the same calls give the same results on every machine. No floating point
 *     decides.
 *   - Memory is in MiB, CPUs in thousandths of a CPU, time in seconds, unless a name says otherwise.
 *
 * cffi definitions are generated from this file: declarations, enums and structs only, no function-like
 * macros.
 */
#ifndef SLUICE_CORE_H
#define SLUICE_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ======== errors ======== */

/* Append only: values are part of the ABI. */
enum sluice_error {
    SLUICE_OK = 0,
    SLUICE_ERROR_NO_MEMORY = 1, /* the host is out of memory */
    SLUICE_ERROR_INVALID = 2,   /* an argument is malformed or contradicts another */
    SLUICE_ERROR_RANGE = 3,     /* a number is negative, overflows or lies outside its documented bounds */
    SLUICE_ERROR_UNKNOWN = 4,   /* an id or name that the handle does not know */
    SLUICE_ERROR_DUPLICATE = 5, /* an id or name that the handle knows already */
    SLUICE_ERROR_CAPACITY = 6,  /* more than the handle was made for, or more than a device has */
    SLUICE_ERROR_NO_PLACE = 7,  /* valid, but nothing fits now; see sluice_explanation */
    SLUICE_ERROR_NEVER = 8,     /* valid, but nothing would fit even on an idle cluster */
    SLUICE_ERROR_QUOTA = 9,     /* an owner's quota or limit forbids it */
    SLUICE_ERROR_CORRUPT = 10,  /* shared or serialised state fails its checks */
    SLUICE_ERROR_BUSY = 11,     /* in use; try again */
    SLUICE_ERROR_VERSION = 12,  /* made by an incompatible version */
    SLUICE_ERROR_SYSTEM = 13,   /* the operating system refused; text carries errno's words */
};

enum { SLUICE_ERROR_TEXT_SIZE = 256 };

/* Caller-owned room for one line of explanation; always NUL-terminated after a failed call. */
struct sluice_error_text {
    char text[SLUICE_ERROR_TEXT_SIZE];
};

/* The error's name in words, e.g. "no place now". Never NULL; static storage. */
const char *sluice_strerror(enum sluice_error error);

/* Version of this library, "MAJOR.MINOR.PATCH"; static storage. */
const char *sluice_core_version(void);

/* ======== cluster model (nodes, GPUs, state) ======== */

/*
 * A cluster is a list of nodes, numbered 0, 1, 2 ... in the order they were added. What many nodes share is stored
 * once: a *model* is an interned GPU model name, a *shape* the GPUs of a kind of node with their links, a *switch* one
 * switch of the network tree. What a node has of its own is its shape, CPUs, host memory, leaf switch and state.
 *
 * GPU capacity is MiB of memory. A GPU may be shared by as many holders as its memory allows, or be held whole. A
 * caller that shares GPUs by another measure scales it: a share of s thousandths of a GPU is s MiB of a 1000-MiB GPU. A
 * GPU also has 100 percent of compute, of which a holder may claim a part; those who claim none compete for what is
 * left.
 */
enum {
    SLUICE_MAX_NODES = 131072,
    SLUICE_MAX_GPUS = 16,     /* of one node */
    SLUICE_MAX_MODELS = 64,   /* so that a set of models is one uint64_t */
    SLUICE_MAX_SHAPES = 4096, /* kinds of node */
    SLUICE_MAX_SWITCHES = 65534,
    SLUICE_SWITCH_LEVELS = 16, /* leaf switches are level 0 */
    SLUICE_MAX_ALLOCATIONS = 16777216,
    SLUICE_MAX_CPUS_MILLI = 1000000000,      /* of one node: a million CPUs */
    SLUICE_MAX_HOST_MEMORY_MIB = 1073741824, /* of one node: 1 PiB */
    SLUICE_MAX_GPU_MEMORY_MIB = 67108864,    /* of one GPU: 64 TiB */
};

struct sluice_cluster;

/* The sizes a cluster is made for; it never grows. 0 takes the default in its comment. */
struct sluice_cluster_config {
    uint32_t max_nodes;       /* 1024 */
    uint32_t max_switches;    /* max_nodes */
    uint32_t max_allocations; /* 64 per node */
    uint32_t max_parts;       /* node shares of all allocations together: max_allocations + 16 per node */
};

/* One GPU of a shape. */
struct sluice_gpu_shape {
    uint32_t model;      /* from sluice_cluster_add_model */
    uint32_t capability; /* grows with what the GPU can do, e.g. 100 * major + minor; 0: unknown */
    int64_t memory_mib;
    uint8_t link_domain; /* GPUs of one domain reach each other over the fast links; any small number */
    uint8_t numa_node;
    bool near_nic; /* has an RDMA NIC on its own PCIe switch or root port */
};

enum { SLUICE_MAX_NICS = 32 };                                      /* of one node */
enum { SLUICE_MAX_NIC_GROUPS = SLUICE_MAX_GPUS + SLUICE_MAX_NICS }; /* each may be alone in its own */
enum { SLUICE_MAX_NIC_KINDS = 64 };                                 /* so that a set of kinds is one uint64_t */
enum { SLUICE_MAX_NIC_PLANES = 32 };                                /* of a cluster */

/* Which GPUs and RDMA NICs of a node reach each other through PCIe switches alone (PXB or nearer): those of one group. */
struct sluice_nic_groups {
    uint32_t gpu_count, nic_count;
    uint8_t gpu_group[SLUICE_MAX_GPUS]; /* below SLUICE_MAX_NIC_GROUPS */
    uint8_t nic_group[SLUICE_MAX_NICS];
    uint8_t nic_kind[SLUICE_MAX_NICS];  /* the caller's number of its type, below SLUICE_MAX_NIC_KINDS */
    uint8_t nic_plane[SLUICE_MAX_NICS]; /* the network that it is in, of all nodes: 1 .. SLUICE_MAX_NIC_PLANES; 0: not
                                           known */
};

/* The GPUs of a kind of node. links[i][j] is the weight of the path between GPUs i and j (larger is faster, 0 unknown);
 * it must be symmetric, its diagonal is ignored. */
struct sluice_node_shape {
    uint32_t gpu_count;
    struct sluice_gpu_shape gpus[SLUICE_MAX_GPUS];
    uint8_t links[SLUICE_MAX_GPUS][SLUICE_MAX_GPUS];
    struct sluice_nic_groups nics; /* no NICs: those that requests count; else its gpu_count is the shape's */
};

/* Append only. */
enum sluice_node_state {
    SLUICE_NODE_UP = 0,
    SLUICE_NODE_DRAINED = 1, /* what runs may continue; nothing new is placed */
    SLUICE_NODE_DOWN = 2,    /* as drained; its allocations are kept until they are released */
};

/* A node as it is now. */
struct sluice_node_view {
    uint32_t shape;
    uint32_t switch_id; /* 0: unknown */
    enum sluice_node_state state;
    bool exclusive; /* one allocation holds the node alone */
    uint32_t parts; /* allocations with a part here */
    int64_t cpus_milli, cpus_milli_free;
    int64_t host_memory_mib, host_memory_mib_free;
    uint32_t gpu_count;
    uint32_t gpus_healthy; /* bit i: GPU i may be given out */
    uint32_t gpus_idle;    /* bit i: GPU i is healthy and nothing of it is held */
    int64_t gpu_memory_mib[SLUICE_MAX_GPUS];
    int64_t gpu_memory_mib_free[SLUICE_MAX_GPUS]; /* also counts GPUs that are not healthy */
    uint32_t gpu_compute_free[SLUICE_MAX_GPUS];   /* percent that is not claimed; likewise */
    uint32_t gpu_utilisation[SLUICE_MAX_GPUS];    /* percent */
    uint32_t nic_count;
    uint32_t nics_free; /* bit i: NIC i is held by nobody */
};

/* Sums over all nodes, whatever their state. */
struct sluice_cluster_totals {
    uint32_t nodes;
    uint32_t nodes_up;
    uint32_t gpus;
    uint32_t allocations;
    int64_t cpus_milli, cpus_milli_free;
    int64_t host_memory_mib, host_memory_mib_free;
    int64_t gpu_memory_mib, gpu_memory_mib_free;
};

/*
 * Make an empty cluster with all the memory that it will ever need for decisions: about 1100 bytes a node (1200 where
 * nodes have NICs), 120 a switch, 8 an allocation and 32 a part. Errors: RANGE (a size over its SLUICE_MAX_*), NO_MEMORY.
 */
enum sluice_error sluice_cluster_new(const struct sluice_cluster_config *config, struct sluice_cluster **cluster,
                                     struct sluice_error_text *text);
void sluice_cluster_free(struct sluice_cluster *cluster);

/* Intern a model name (1 to 63 bytes, copied); a name known already gives its id again. Errors: RANGE, CAPACITY. */
enum sluice_error sluice_cluster_add_model(struct sluice_cluster *cluster, const char *name, uint32_t *model,
                                           struct sluice_error_text *text);
/* The name of a model, or NULL for an unknown id; valid as long as the cluster. */
const char *sluice_cluster_model_name(const struct sluice_cluster *cluster, uint32_t model);

/* Add a shape (copied); an equal one gives its id again. Errors: RANGE, UNKNOWN (model), INVALID (links), CAPACITY. */
enum sluice_error sluice_cluster_add_shape(struct sluice_cluster *cluster, const struct sluice_node_shape *shape,
                                           uint32_t *id, struct sluice_error_text *text);

/*
 * Add a switch below `parent`, or at the top of the tree where parent is 0; ids start at 1. Only leaf switches have
 * nodes: a switch with nodes takes no switches, and the reverse. Errors: UNKNOWN (parent), INVALID (parent has nodes),
 * RANGE (deeper than SLUICE_SWITCH_LEVELS), CAPACITY.
 */
enum sluice_error sluice_cluster_add_switch(struct sluice_cluster *cluster, uint32_t parent, uint32_t *id,
                                            struct sluice_error_text *text);

/*
 * Add an idle node, up and healthy; `switch_id` 0 means that its place in the network is unknown.
 * Errors: RANGE, UNKNOWN (shape, switch), INVALID (switch has switches below it), CAPACITY, NO_MEMORY.
 */
enum sluice_error sluice_cluster_add_node(struct sluice_cluster *cluster, uint32_t shape, int64_t cpus_milli,
                                          int64_t host_memory_mib, uint32_t switch_id, uint32_t *node,
                                          struct sluice_error_text *text);

/*
 * Changes of one node. Each costs what changed, not the cluster. Errors: UNKNOWN (node, GPU), RANGE, and for a resize
 * CAPACITY when more is held than would remain, or NO_MEMORY: a size that no node had before is a new class of nodes,
 * which is kept.
 */
enum sluice_error sluice_node_set_state(struct sluice_cluster *cluster, uint32_t node, enum sluice_node_state state,
                                        struct sluice_error_text *text);
enum sluice_error sluice_node_resize(struct sluice_cluster *cluster, uint32_t node, int64_t cpus_milli,
                                     int64_t host_memory_mib, struct sluice_error_text *text);
/* A GPU that is not healthy keeps its holders and gets no new ones. */
enum sluice_error sluice_gpu_set_health(struct sluice_cluster *cluster, uint32_t node, uint32_t gpu, bool healthy,
                                        struct sluice_error_text *text);
enum sluice_error sluice_gpu_set_utilisation(struct sluice_cluster *cluster, uint32_t node, uint32_t gpu,
                                             uint32_t percent, struct sluice_error_text *text);

/*
 * Among equally good nodes the one of lowest rank wins: rank[n] is node n's, and each of 0 .. node_count-1 occurs once.
 * NULL returns to the order of the node numbers. Nodes added later come after all others. O(nodes). Errors: INVALID
 * (count is not the cluster's), RANGE, DUPLICATE.
 */
enum sluice_error sluice_cluster_set_order(struct sluice_cluster *cluster, const uint32_t *rank, uint32_t node_count,
                                           struct sluice_error_text *text);

/* Read the state. Errors: UNKNOWN (node). */
enum sluice_error sluice_node_read(const struct sluice_cluster *cluster, uint32_t node, struct sluice_node_view *view,
                                   struct sluice_error_text *text);
void sluice_cluster_read_totals(const struct sluice_cluster *cluster, struct sluice_cluster_totals *totals);

/*
 * Recompute everything that is derived (free amounts, sums, bitmaps, indexes) from the allocations and compare. O(nodes
 * + parts); for tests and checks. Errors: CORRUPT, with the first difference; NO_MEMORY.
 */
enum sluice_error sluice_cluster_check(const struct sluice_cluster *cluster, struct sluice_error_text *text);

/* ======== requests, placement, gang, release, explain ======== */

/* How much a property of the placement matters. Append only. */
enum sluice_wish {
    SLUICE_ANY = 0,
    SLUICE_PREFERRED = 1, /* counts before the policy's score, never makes a request wait */
    SLUICE_REQUIRED = 2,
};

/* Append only. */
enum sluice_layout {
    SLUICE_LAYOUT_POLICY = 0, /* as the policy has it; a range of nodes is used up to its end, a total on few nodes */
    SLUICE_PACK = 1,          /* few nodes, first those that are already in use */
    SLUICE_SPREAD = 2,        /* many nodes, first those that are least in use */
};

/* Bits of sluice_request.flags. */
enum {
    SLUICE_GPUS_TOTAL = 1,     /* `gpus` is for all nodes together, each giving at least one; else per node */
    SLUICE_GPU_MEMORY_SUM = 2, /* `gpu_memory_mib` is for all `gpus` together, in equal shares; else of each GPU */
    SLUICE_EXCLUSIVE = 4,      /* no other allocation on the nodes */
};

/*
 * What a job asks. All zero, with gpus = 1, is a valid request: one whole GPU of any kind on one node.
 */
struct sluice_request {
    int64_t nodes_min;      /* 0: one */
    int64_t nodes_max;      /* 0: nodes_min */
    int64_t gpus;           /* on each node, or SLUICE_GPUS_TOTAL; 0: none, and then no other GPU field may be set */
    int64_t gpu_memory_mib; /* of each GPU, or SLUICE_GPU_MEMORY_SUM; 0: whole GPUs */
    int64_t gpu_compute_percent; /* of each GPU's compute, at most 100; 0: claims none */
    int64_t cpus_milli;          /* on each node */
    int64_t host_memory_mib;
    int64_t cpus_milli_per_gpu; /* on each node as well, for each of its GPUs */
    int64_t host_memory_mib_per_gpu;
    uint64_t models;                  /* bit m: model m is accepted; 0: every model */
    int64_t capability_min;           /* least sluice_gpu_shape.capability */
    int64_t gpu_memory_mib_min;       /* least memory that the whole GPU must have */
    enum sluice_wish one_link_domain; /* the GPUs of each node within one link domain */
    enum sluice_wish one_numa_node;   /* the GPUs of each node on one NUMA node */
    enum sluice_wish near_nic;        /* every GPU near an RDMA NIC */
    enum sluice_wish one_switch;      /* all nodes below one switch of level `switch_level` at most */
    uint32_t switch_level;
    int64_t segment; /* the nodes of each segment, of so many, below one leaf switch; 0 or 1: none */
    enum sluice_layout layout;
    uint32_t flags;
    const uint64_t *allowed; /* bit n % 64 of word n / 64: node n may be used; NULL: every node. Caller's */
    size_t allowed_words;    /* nodes beyond the last word may not be used */
    uint64_t seed;           /* SLUICE_POLICY_RANDOM draws from it: another seed for each decision */
    int64_t nics;            /* RDMA NICs on each node, near its GPUs where there are such: see sluice_place */
    int64_t nics_per_gpu;    /* on each node as well, for each of its GPUs */
    uint64_t nic_kinds;      /* bit k: NICs of kind k are accepted; 0: every kind */
    int64_t lower_switches;  /* with one_switch required and so many GPUs on each node: nodes_min nodes below at most so
                               many of the switches one level below `switch_level`, filled as Slurm's topology/block
                               fills them (sluice_blocks_ask); 0: any number */
    enum sluice_layout switch_layout; /* SLUICE_SPREAD: evenly over the leaf switches; else as near as possible */
    enum sluice_layout nic_planes; /* SLUICE_PACK: all NICs in one plane; SLUICE_SPREAD: those of each node evenly over
                                         planes; see sluice_place */
};

/* What one allocation holds, or is to hold, on one node. */
struct sluice_part {
    uint32_t node;
    uint32_t gpus;          /* bit i: GPU i */
    int64_t gpu_memory_mib; /* of each of them; 0: they are held whole */
    int64_t cpus_milli;
    int64_t host_memory_mib;
    bool exclusive;
    uint32_t gpu_compute_percent; /* of each of the GPUs */
    uint32_t nics;                /* bit i: NIC i */
};

/* A placement: parts are the caller's, `part_capacity` says how many there is room for. No node occurs twice; parts are
 * in ascending order of node. */
struct sluice_placement {
    struct sluice_part *parts;
    uint32_t part_capacity;
    uint32_t part_count; /* result */
    int64_t score;       /* result: the policy's, larger is better; of several nodes the sum */
    uint32_t nic_pairs;  /* result: pairs of a GPU and a NIC that are near each other; see sluice_choose_nics */
};

/* How nodes are ranked; docs/scheduling.md has each one's score and source. Append only. */
enum sluice_policy {
    SLUICE_POLICY_FIRST_FIT = 0,      /* the first node that fits */
    SLUICE_POLICY_ROUND_ROBIN = 1,    /* the next one after the last that was given out */
    SLUICE_POLICY_LEAST_LOADED = 2,   /* lowest current utilisation */
    SLUICE_POLICY_BEST_FIT = 3,       /* least left over */
    SLUICE_POLICY_DOT_PRODUCT = 4,    /* free amounts least along the request */
    SLUICE_POLICY_GPU_PACKING = 5,    /* GPUs in use, then nodes in use, then idle nodes */
    SLUICE_POLICY_GPU_CLUSTERING = 6, /* to requests of the same kind */
    SLUICE_POLICY_RANDOM = 7,
    SLUICE_POLICY_FGD = 8, /* least growth of fragmentation; see sluice_cluster_set_workload */
    SLUICE_POLICY_SLUICE = 9,
};
enum { SLUICE_POLICY_COUNT = 10 };

/* The name, e.g. "first-fit", or NULL for no policy; static storage. */
const char *sluice_policy_name(enum sluice_policy policy);
/* The policy of a name. Errors: UNKNOWN, with the list of names. */
enum sluice_error sluice_policy_by_name(const char *name, enum sluice_policy *policy, struct sluice_error_text *text);

/*
 * Set what usually arrives, for the fragmentation-aware policies: `count` request shapes with their weights (how often
 * each is seen), all copied. Only CPUs, GPUs, GPU memory and models of a shape count; it must be for one node. Without
 * it FGD sees no fragmentation. May be called at any time; not on the decision path. Errors: RANGE (weight sum over
 * 10^9, count over SLUICE_MAX_WORKLOAD), NO_MEMORY, and those of sluice_request_check.
 */
enum { SLUICE_MAX_WORKLOAD = 1024 };
enum sluice_error sluice_cluster_set_workload(struct sluice_cluster *cluster, const struct sluice_request *shapes,
                                              const uint32_t *weights, uint32_t count, struct sluice_error_text *text);

/*
 * Is the request well-formed? O(1) but for `allowed`'s words beyond the last node. Errors: RANGE (negative, too large),
 * UNKNOWN (model, allowed node), INVALID (options that contradict each other).
 */
enum sluice_error sluice_request_check(const struct sluice_cluster *cluster, const struct sluice_request *request,
                                       struct sluice_error_text *text);

/*
 * Choose nodes and GPUs; nothing changes. A request for several nodes is a gang: all or nothing, on switches as few and
 * as low as possible. Ties go to the node of lowest rank.
 * With switch_layout SLUICE_SPREAD it is below the highest switch that is allowed, over as many leaf switches as
 * possible, each giving as many nodes (segments) as the others, as far as it has them.
 * Where NICs are asked, nodes that have more pairs of GPUs and NICs for the request (see sluice_choose_nics) go before
 * others: after what is preferred of links, NUMA nodes and NICs, before the layout and the policy's score, and for gangs
 * before the switches as well.
 * With nic_planes SLUICE_PACK all NICs of all nodes are in one plane, wherever one has room for the request: of these
 * planes the one with most pairs, then the highest score, then the lowest number; else as without it. With SLUICE_SPREAD
 * those of each node are over its planes as evenly as can be without a loss of pairs (where more than 10 are free, as a
 * greedy search finds); NICs whose plane is not known come last. Nothing changes where planes are not known.
 * O(nodes) for the published policies, less for SLUICE_POLICY_SLUICE and one node.
 * Errors: those of sluice_request_check; UNKNOWN (policy); CAPACITY (more nodes than the placement has room for);
 * NO_PLACE (nothing fits now); NEVER (nothing would, were every allowed node up, healthy and idle).
 */
enum sluice_error sluice_place(struct sluice_cluster *cluster, enum sluice_policy policy,
                               const struct sluice_request *request, struct sluice_placement *placement,
                               struct sluice_error_text *text);

/*
 * Hold what a placement says, from sluice_place or from elsewhere (a job that runs already). Nodes need not be up. The
 * id is never 0 and never used twice. O(parts). Errors: UNKNOWN (node, GPU), DUPLICATE (a node twice), RANGE, INVALID,
 * CAPACITY (more than is free, or the cluster's allocations or parts are used up).
 */
enum sluice_error sluice_commit(struct sluice_cluster *cluster, const struct sluice_placement *placement,
                                uint64_t *allocation, struct sluice_error_text *text);

/* sluice_place and sluice_commit in one; where only the commit fails (CAPACITY), the placement is set all the same. */
enum sluice_error sluice_start(struct sluice_cluster *cluster, enum sluice_policy policy,
                               const struct sluice_request *request, struct sluice_placement *placement,
                               uint64_t *allocation, struct sluice_error_text *text);

/*
 * Start several requests together or none of them: placements[i] and allocations[i] belong to requests[i]. They are
 * placed largest first (most GPUs; of equally many whole ones, then large shares; then CPUs; then as given), each
 * within what the ones before it left; the search does not come back to an earlier choice. On failure the placements'
 * contents are undefined. Errors: those of sluice_place and sluice_commit, with the number of the request that failed;
 * NO_PLACE or NEVER is about that request alone; RANGE (count is 0 or over SLUICE_MAX_GROUP).
 */
enum { SLUICE_MAX_GROUP = 256 };
enum sluice_error sluice_start_group(struct sluice_cluster *cluster, enum sluice_policy policy,
                                     const struct sluice_request *requests, struct sluice_placement *placements,
                                     uint64_t *allocations, uint32_t count, struct sluice_error_text *text);

/* Give back all that an allocation holds. O(its parts). Errors: UNKNOWN. */
enum sluice_error sluice_release(struct sluice_cluster *cluster, uint64_t allocation, struct sluice_error_text *text);

/*
 * Change what an allocation holds on `part->node`: the same GPUs, other amounts. O(parts of the allocation).
 * Errors: UNKNOWN (allocation, node), INVALID (other GPUs or NICs, or whole GPUs made shares or the other way round),
 * RANGE, CAPACITY.
 */
enum sluice_error sluice_resize(struct sluice_cluster *cluster, uint64_t allocation, const struct sluice_part *part,
                                struct sluice_error_text *text);

/* What an allocation holds; `parts` has room for `capacity`, part_count says how many there are.
 * Errors: UNKNOWN (allocation), CAPACITY. */
enum sluice_error sluice_allocation_read(const struct sluice_cluster *cluster, uint64_t allocation,
                                         struct sluice_part *parts, uint32_t capacity, uint32_t *part_count,
                                         struct sluice_error_text *text);

/* The GPUs that an allocation holds, in thousandths of a GPU: a share of one counts by its memory, rounded up. 0: the
 * cluster does not know it. */
int64_t sluice_allocation_gpus_milli(const struct sluice_cluster *cluster, uint64_t allocation);

/* ---- GPUs and RDMA NICs of a node ---- */

/* NICs of a part. */
struct sluice_nic_choice {
    uint32_t nics;  /* bit i: NIC i */
    uint32_t pairs; /* with the part's GPUs */
};

/*
 * Choose `nic_count` of the NICs `nics_free` for a part that has none (what `groups` and `nics_free` say counts, not
 * what the cluster knows of the node's NICs), and exchange its GPUs where that makes more pairs. A pair is a GPU and a NIC
 * of one group; each NIC is in at most as many as there are GPUs for each NIC, rounded up, and each GPU likewise. No
 * other choice of the node's GPUs and NICs has more pairs. Among choices with as many, one with the part's own GPUs
 * comes first, then one within a link domain.
 * GPUs are exchanged for idle ones of the same model, capability and memory, unless `keep_gpus`, the part has shares of
 * GPUs, or its GPUs differ. O(GPUs * NICs). Errors: UNKNOWN (node), INVALID (a part without GPUs or with others than the
 * node has; groups of another number of GPUs), RANGE (group, number of NICs), CAPACITY (fewer are free).
 */
enum sluice_error sluice_choose_nics(const struct sluice_cluster *cluster, const struct sluice_nic_groups *groups,
                                     uint32_t nics_free, uint32_t nic_count, bool keep_gpus, struct sluice_part *part,
                                     struct sluice_nic_choice *choice, struct sluice_error_text *text);

/* ---- roles inside of one allocation ---- */

enum {
    SLUICE_MAX_ROLES = 8,
    SLUICE_MAX_ROLE_GPUS = 4096, /* of one allocation that has roles */
};

/*
 * Give each GPU of `parts` to one of the roles, of which role r gets wanted[r], so that each role's are in few domains:
 * of leaf switches first, then of nodes, then of link domains and NUMA nodes of a node (first of what makes fewer parts of
 * its GPUs). At each level, and for what the wider ones leave, the pairs of a role and a domain that it has GPUs in are the
 * fewest where there are two roles, and at most role_count - 1 more than that for any number. Only the order of
 * the parts decides between equal ones. gpus[p * role_count + r] are the GPUs of part p that role r has, bit i for GPU i.
 * Allocates. O(domains * GPUs * roles). Errors: RANGE (more roles or GPUs), UNKNOWN (node, GPU), INVALID (the sum wanted is
 * not the number of GPUs), NO_MEMORY.
 */
enum sluice_error sluice_lay_out_roles(const struct sluice_cluster *cluster, const struct sluice_part *parts,
                                       uint32_t part_count, const uint32_t *wanted, uint32_t role_count, uint32_t *gpus,
                                       struct sluice_error_text *text);

/* Why a node cannot take (a node's share of) a request: the first that applies, in this order. Append only. */
enum sluice_reason {
    SLUICE_REASON_FITS = 0,
    SLUICE_REASON_NOT_ALLOWED = 1,  /* not in `allowed` */
    SLUICE_REASON_STATE = 2,        /* drained or down */
    SLUICE_REASON_EXCLUSIVE = 3,    /* held by an exclusive allocation, or in use while exclusive is asked */
    SLUICE_REASON_GPU_COUNT = 4,    /* has fewer GPUs than asked, whatever their kind */
    SLUICE_REASON_MODEL = 5,        /* fewer than asked are of an accepted model */
    SLUICE_REASON_CAPABILITY = 6,   /* ... and of the capability */
    SLUICE_REASON_GPU_SIZE = 7,     /* ... and have gpu_memory_mib_min, or the share, in total */
    SLUICE_REASON_NIC = 8,          /* ... and are near an RDMA NIC, where that is required */
    SLUICE_REASON_CPUS = 9,         /* too few CPUs free */
    SLUICE_REASON_HOST_MEMORY = 10, /* too little host memory free */
    SLUICE_REASON_HEALTH = 11,      /* enough GPUs of the right kind, but not enough of them healthy */
    SLUICE_REASON_GPU_BUSY = 12, /* of the healthy ones too few have enough free memory, or are idle for whole ones */
    SLUICE_REASON_GPU_COMPUTE = 17, /* ... and enough unclaimed compute; checked before LINK */
    SLUICE_REASON_LINK = 13,        /* of those that remain too few lie in one link domain, where that is required */
    SLUICE_REASON_NUMA = 14,        /* ... on one NUMA node (and in one link domain) */
    SLUICE_REASON_SWITCH = 15,      /* fits alone, but no switch of the required level has enough such nodes */
    SLUICE_REASON_GANG = 16,        /* fits alone, but too few such nodes, or GPUs in total, in the cluster */
    SLUICE_REASON_NICS = 18,        /* has fewer NICs of an accepted kind than asked; checked after NIC */
    SLUICE_REASON_NICS_BUSY = 19,   /* has the GPUs, but too few NICs free; checked last of what a node has */
    SLUICE_REASON_SEGMENT = 20,     /* ... enough of them, but not enough whole segments below leaf switches */
};
enum { SLUICE_REASON_COUNT = 21 };

/* The reason in words, e.g. "too few CPUs free". Never NULL; static storage. */
const char *sluice_reason_text(enum sluice_reason reason);

/* One term of a score; the name is static storage. */
struct sluice_term {
    const char *name;
    int64_t value;
};
enum { SLUICE_MAX_TERMS = 8 };

/* Why a decision was made. */
struct sluice_explanation {
    enum sluice_error verdict; /* what sluice_place answers: SLUICE_OK, NO_PLACE or NEVER */
    uint32_t nodes;            /* all nodes; each is counted once below */
    uint32_t by_reason[SLUICE_REASON_COUNT];
    uint32_t term_count; /* of the placement's first node where the verdict is SLUICE_OK */
    struct sluice_term terms[SLUICE_MAX_TERMS];
};

/* Explain what sluice_place answers for the same arguments. Sets `placement` as it does. O(nodes). Errors: those of
 * sluice_place but NO_PLACE and NEVER, which are answers here. */
enum sluice_error sluice_explain(struct sluice_cluster *cluster, enum sluice_policy policy,
                                 const struct sluice_request *request, struct sluice_placement *placement,
                                 struct sluice_explanation *explanation, struct sluice_error_text *text);

/* ======== order: priority, fair-share, deadline ... ======== */

/* A factor of one; every factor lies in [0, SLUICE_FACTOR_ONE]. */
enum { SLUICE_FACTOR_ONE = 1 << 30 };

/* The factors of an order. Append only. With all weights zero the order is FIFO. */
enum sluice_factor {
    SLUICE_FACTOR_PRIORITY = 0,   /* the job's own priority, normalised by the caller (partition, QOS, nice ...) */
    SLUICE_FACTOR_AGE = 1,        /* time eligible / age_full_s */
    SLUICE_FACTOR_FAIR_SHARE = 2, /* Fair Tree rank of the job's account */
    SLUICE_FACTOR_DEADLINE = 3,   /* least laxity first; 0 without a deadline or when it cannot be met any more */
    SLUICE_FACTOR_SERVICE = 4,    /* least remaining GPU-seconds first, on a logarithmic scale */
    SLUICE_FACTOR_TIME = 5,       /* least remaining seconds first, on a logarithmic scale */
    SLUICE_FACTOR_SIZE = 6,       /* GPUs asked / size_full_gpus: larger first */
};
enum { SLUICE_FACTOR_COUNT = 7, SLUICE_ORDER_MAX_WEIGHT = 1000000 };

/* How jobs are ordered: score = sum of weight * factor; see sluice_order_sort for the complete order. */
struct sluice_order_policy {
    uint32_t weight[SLUICE_FACTOR_COUNT]; /* by enum sluice_factor, 0 to SLUICE_ORDER_MAX_WEIGHT */
    int64_t age_full_s;                   /* > 0 where AGE has weight */
    int64_t laxity_horizon_s;             /* > 0 where DEADLINE has weight: laxity at which urgency begins */
    uint32_t size_full_gpus;              /* > 0 where SIZE has weight */
    int64_t starvation_s;                 /* a job that waited so long goes before all that did not; 0: never */
};

/* One pending (or preemptible running) job as input of the order. Times in seconds of the caller's clock. */
struct sluice_order_job {
    uint64_t id;         /* last tie-break */
    int64_t submit_s;    /* FIFO's key */
    int64_t eligible_s;  /* age counts from here; at least submit_s */
    int64_t deadline_s;  /* 0: none */
    int64_t remaining_s; /* predicted run time that is left, >= 0; see sluice_predictor_predict */
    uint32_t gpus;       /* whole GPUs asked; a share of one counts as one */
    uint32_t priority;   /* 0 to SLUICE_FACTOR_ONE */
    uint32_t account;    /* of the fair-share tree; ignored without one */
    uint32_t reserved;   /* 0 */
};

enum sluice_deadline_verdict {
    SLUICE_DEADLINE_NONE = 0,
    SLUICE_DEADLINE_FEASIBLE = 1,
    SLUICE_DEADLINE_INFEASIBLE = 2, /* even a start now would end after the deadline */
};

/* Why a job has its place in the order. */
struct sluice_order_terms {
    int64_t score;                     /* sum of term[] */
    int64_t term[SLUICE_FACTOR_COUNT]; /* weight * factor, in units of 1 / SLUICE_FACTOR_ONE */
    int64_t laxity_s;                  /* deadline - now - remaining; 0 without a deadline */
    enum sluice_deadline_verdict deadline;
    bool starving;
};

struct sluice_fairshare;

/* The score of one job. `fairshare` may be NULL when FAIR_SHARE has no weight. O(1).
 * INVALID: a policy or job outside the bounds above; UNKNOWN: an account that the tree does not know. */
enum sluice_error sluice_order_score(const struct sluice_order_policy *policy, const struct sluice_fairshare *fairshare,
                                     const struct sluice_order_job *job, int64_t now_s,
                                     struct sluice_order_terms *terms, struct sluice_error_text *text);

struct sluice_order;

/* Room for ordering up to `capacity` jobs. Errors: NO_MEMORY. */
enum sluice_error sluice_order_new(uint32_t capacity, struct sluice_order **order, struct sluice_error_text *text);
void sluice_order_free(struct sluice_order *order);

/* Writes to `ranked[0..count)` the indices into `jobs`, first to run first: starving jobs by submit time, then the rest
 * by falling score; ties by what is left exactly (GPU-seconds where SERVICE has weight, seconds where TIME has), then
 * submit time, then id. O(n log n), no allocation. On failure (as in sluice_order_score, or
 * CAPACITY) `ranked` is untouched and the text names the job. */
enum sluice_error sluice_order_sort(struct sluice_order *order, const struct sluice_order_policy *policy,
                                    const struct sluice_fairshare *fairshare, const struct sluice_order_job *jobs,
                                    uint32_t count, int64_t now_s, uint32_t *ranked, struct sluice_error_text *text);

/*
 * Fair-share: a tree of accounts with shares and usage that decays by half every half-life. The factor is the account's
 * place in the Fair Tree (R. Cox, L. Morrison, "Fair Tree: Fairshare Algorithm for Slurm", 2014): at each level
 * siblings are ordered by shares over usage, each normalised among the siblings, and a subtree's accounts all come
 * before those of the next subtree, so that what happens in one subtree never lowers an account of another.
 */
enum { SLUICE_FAIRSHARE_ROOT = 0 };

/* `max_accounts` includes the root; half_life_s > 0, or 0 for usage that never decays. Errors: RANGE, NO_MEMORY. */
enum sluice_error sluice_fairshare_new(uint32_t max_accounts, int64_t half_life_s, struct sluice_fairshare **fairshare,
                                       struct sluice_error_text *text);
void sluice_fairshare_free(struct sluice_fairshare *fairshare);

/* Adds an account below `parent`, less than 64 levels deep; ids count up from 1. shares: 0 (only idle GPUs) to
 * 1,000,000. O(depth). Errors: UNKNOWN (parent), RANGE (shares, depth), CAPACITY. */
enum sluice_error sluice_fairshare_add(struct sluice_fairshare *fairshare, uint32_t parent, uint32_t shares,
                                       uint32_t *account, struct sluice_error_text *text);
enum sluice_error sluice_fairshare_set_shares(struct sluice_fairshare *fairshare, uint32_t account, uint32_t shares,
                                              struct sluice_error_text *text);

/* Charges `usage` (any unit, e.g. GPU-milliseconds; at most 2^40 a call) to an account and all above it. An earlier
 * now_s than the latest seen is treated as the latest seen. O(depth). Errors: UNKNOWN (account), RANGE (usage, or a
 * time below 0). */
enum sluice_error sluice_fairshare_charge(struct sluice_fairshare *fairshare, uint32_t account, uint64_t usage,
                                          int64_t now_s, struct sluice_error_text *text);

/* Usage decayed to now_s. O(1). Errors: UNKNOWN (account). */
enum sluice_error sluice_fairshare_usage(const struct sluice_fairshare *fairshare, uint32_t account, int64_t now_s,
                                         uint64_t *usage, struct sluice_error_text *text);

/* Recomputes every account's factor; call it before a pass, not for each job. O(n log n), no allocation. */
void sluice_fairshare_refresh(struct sluice_fairshare *fairshare, int64_t now_s);

/* The factor as of the last refresh: SLUICE_FACTOR_ONE for the first in the tree, towards 0 for the last. O(1). Errors:
 * UNKNOWN (account). */
enum sluice_error sluice_fairshare_factor(const struct sluice_fairshare *fairshare, uint32_t account, uint32_t *factor,
                                          struct sluice_error_text *text);

/*
 * Run-time prediction from a user's own history: the quantile of the last run times that were recorded under the most
 * specific key with at least two of them (after D. Tsafrir, Y. Etsion, D. Feitelson, "Backfilling Using
 * System-Generated Predictions Rather than User Runtime Estimates", IEEE TPDS 2007, who average the user's last two).
 */
struct sluice_predictor;
enum { SLUICE_PREDICTOR_HISTORY = 8, SLUICE_PREDICTOR_MAX_KEYS = 4 };

/* Remembers up to `capacity` keys; the key that was recorded least recently is replaced. `quantile_percent`: 1 to 100.
 * Errors: RANGE, NO_MEMORY. */
enum sluice_error sluice_predictor_new(uint32_t capacity, uint32_t quantile_percent,
                                       struct sluice_predictor **predictor, struct sluice_error_text *text);
void sluice_predictor_free(struct sluice_predictor *predictor);

/* Records a finished run under all of its keys (hashes chosen by the caller, most specific first, e.g. of user + name +
 * GPUs, user + GPUs, user; 1 to SLUICE_PREDICTOR_MAX_KEYS). O(keys). Errors: RANGE (number of keys, run_s below 0). */
enum sluice_error sluice_predictor_record(struct sluice_predictor *predictor, const uint64_t *keys, uint32_t key_count,
                                          int64_t run_s, struct sluice_error_text *text);

/* Predicted seconds that are left to a job that ran `elapsed_s` so far (0: not started) under a limit of `limit_s` (0:
 * none). Without history the limit itself. A job that ran longer than its prediction is expected to run as long again,
 * which is the median of a heavy-tailed run time of index one; never more than the limit leaves. O(keys). Errors: RANGE
 * (number of keys, a time below 0). */
enum sluice_error sluice_predictor_predict(const struct sluice_predictor *predictor, const uint64_t *keys,
                                           uint32_t key_count, int64_t elapsed_s, int64_t limit_s, int64_t *remaining_s,
                                           struct sluice_error_text *text);

/* ======== preemption ======== */

/* A running job that might have to make room. Times in seconds of the caller's clock. */
struct sluice_candidate {
    uint64_t allocation;  /* in the cluster */
    uint64_t gang;        /* candidates of one gang are preempted together or not at all; 0: alone */
    int64_t started_s;    /* at most now */
    int64_t checkpoint_s; /* when it last saved its work; 0: never */
    int64_t min_run_s;    /* it is not preempted until it ran so long */
    uint32_t tier;        /* higher tiers may preempt lower ones */
    bool over_quota;      /* runs on what its tenant borrowed */
    int64_t save_s;       /* it is saved before it goes, which takes so long; 0: it is not (struct sluice_stake) */
    int64_t restart_s;    /* besides, for which it does no work (struct sluice_stake) */
};

/* The job that asks for room. */
struct sluice_preemptor {
    uint32_t tier;
    bool reclaims;      /* within its tenant's guarantee: may take back borrowed GPUs from its own tier, too */
    bool weighs_shares; /* a share of a GPU counts in the loss by its memory; false: as a GPU */
};

struct sluice_preemption;

/* Room for plans over `max_candidates` of the cluster, which must outlive it. Errors: RANGE, NO_MEMORY. */
enum sluice_error sluice_preemption_new(struct sluice_cluster *cluster, uint32_t max_candidates,
                                        struct sluice_preemption **preemption, struct sluice_error_text *text);
void sluice_preemption_free(struct sluice_preemption *preemption);

/*
 * The candidates that have to be preempted so that the request can start, and where it starts then; nothing is changed.
 *
 * A candidate may be preempted when its tier is below the preemptor's, or when it is over quota, not above the
 * preemptor's tier and the preemptor reclaims; when its minimum run time is over; and when all of its gang may. The
 * cost, in this order of weight: the highest tier touched (within a tier, quota before over-quota), the loss
 * (SLUICE_WAY_PREEMPT of sluice/loss.h, of whole gangs; shares as the preemptor says), and the number of candidates.
 * For a request on one node the cost is the least possible, unless a node needs more than SLUICE_PREEMPTION_TRIES
 * tries; for one on several nodes the cheapest node is freed until the request fits. No victim is unnecessary.
 *
 * `victims` has room for `count` indices into `candidates`, ascending. A request that fits already has no victims.
 * O(parts of candidates + nodes they are on * SLUICE_PREEMPTION_TRIES). Errors: those of sluice_place (NO_PLACE: not
 * even then); CAPACITY (count); UNKNOWN (allocation); DUPLICATE (allocation); RANGE (a time that is negative or to
 * come).
 */
enum { SLUICE_PREEMPTION_TRIES = 4096 };
enum sluice_error sluice_preemption_plan(struct sluice_preemption *preemption, enum sluice_policy policy,
                                         const struct sluice_request *request, const struct sluice_preemptor *preemptor,
                                         const struct sluice_candidate *candidates, uint32_t count, int64_t now_s,
                                         struct sluice_placement *placement, uint32_t *victims, uint32_t *victim_count,
                                         struct sluice_error_text *text);

/* What the victims of the last plan lose, all together, in thousandths of a GPU-second (sluice/loss.h). 0: none, or no plan
 * was found. */
int64_t sluice_preemption_loss(const struct sluice_preemption *preemption);

/* ======== compaction ======== */

/* A running job that may be moved: one that can be saved, or whose service has another replica. */
struct sluice_movable {
    uint64_t allocation; /* in the cluster, on one node */
    uint32_t request;    /* what it asked: index into the call's requests */
    int64_t cost;        /* of moving it, in the caller's unit, as SLUICE_WAY_MOVE of sluice/loss.h; at least 1 */
};

struct sluice_compaction_limits {
    uint32_t moves;           /* of one plan */
    int64_t gain;             /* of the waiting job's start, in the unit of the costs */
    uint32_t factor_permille; /* a plan's gain over its cost exceeds this; at least 1 */
};

struct sluice_move {
    uint32_t movable; /* index */
    struct sluice_part to;
};

enum { SLUICE_COMPACTION_MAX_MOVES = 64 };

struct sluice_compaction;

/* Room for plans over `max_movables` jobs of `max_requests` different requests. The cluster must outlive it. Errors:
 * RANGE, NO_MEMORY. */
enum sluice_error sluice_compaction_new(struct sluice_cluster *cluster, uint32_t max_movables, uint32_t max_requests,
                                        struct sluice_compaction **compaction, struct sluice_error_text *text);
void sluice_compaction_free(struct sluice_compaction *compaction);

/*
 * Which jobs to move, and where, so that requests[asked] can start, and where it starts then; nothing is changed.
 *
 * The plan holds once all that it moves has left: then each moved job fits where it goes, and the waiting one where it
 * starts, all of them together. No job is moved twice, each goes only where its request allows, and the gain over the sum
 * of the costs exceeds the factor. A request that fits already has no moves.
 *
 * First the node is cleared that costs least, of jobs for which there are places now; a request for several nodes has
 * all nodes where there is room for it, and as many more are cleared one after another. If that cannot be, jobs that
 * share GPUs are exchanged, each time so that the sum of the squares of what GPUs have free grows most for each moved
 * job, until the request fits. A plan is not always found where there is one.
 *
 * `moves` has room for limits->moves. O(requests * a decision) and O(nodes + jobs) for each node that is cleared in each
 * of 16 tries, and O(nodes + jobs + kinds^2) for each exchange, of which there are at most 511; kinds, of equal share and
 * free memory, are at most 1024, and jobs of further ones are not exchanged.
 * Errors: those of sluice_place (NO_PLACE: no plan was found within the limits); RANGE (limits); CAPACITY (count,
 * request_count); UNKNOWN, DUPLICATE (allocation); INVALID (SLUICE_GPUS_TOTAL on several nodes; a job on several, its
 * request or cost).
 */
enum sluice_error sluice_compaction_plan(struct sluice_compaction *compaction, enum sluice_policy policy,
                                         const struct sluice_request *requests, uint32_t request_count, uint32_t asked,
                                         const struct sluice_movable *movables, uint32_t count,
                                         const struct sluice_compaction_limits *limits,
                                         struct sluice_placement *placement, struct sluice_move *moves,
                                         uint32_t *move_count, struct sluice_error_text *text);

/* ======== nodes to empty ======== */

/* Why a job leaves its node or not. Append only: files have their names. */
enum sluice_leave_why {
    SLUICE_LEAVE_WHY_NONE = 0,
    SLUICE_LEAVE_WHY_IN_TIME = 1, /* it ends before the node is to be empty */
    SLUICE_LEAVE_WHY_SOON = 2,    /* it ends before a move would be over */
    SLUICE_LEAVE_WHY_PLACE = 3,   /* there is no place for it elsewhere now */
    SLUICE_LEAVE_WHY_HOUR = 4,    /* as many as may be were moved lately */
    /* it may not be moved: */
    SLUICE_LEAVE_WHY_OFF = 5,     /* no job is, here */
    SLUICE_LEAVE_WHY_KIND = 6,    /* not a batch job with GPUs on one node that the core finds nodes for */
    SLUICE_LEAVE_WHY_REQUEUE = 7, /* it may not be requeued */
    SLUICE_LEAVE_WHY_TENANT = 8,  /* nor may any of its tenant's */
    SLUICE_LEAVE_WHY_UNSAVED = 9, /* it has not saved since it started */
    SLUICE_LEAVE_WHY_SPENT = 10,  /* it was moved as often as may be, or did not save when it was asked to */
};
enum { SLUICE_LEAVE_WHYS = 11 };

enum sluice_leave_decision {
    SLUICE_LEAVE_MOVES = 0, /* now */
    SLUICE_LEAVE_LATER = 1, /* as soon as it can: PLACE, HOUR */
    SLUICE_LEAVE_ENDS = 2,  /* by itself: IN_TIME, SOON */
    SLUICE_LEAVE_STAYS = 3, /* until it ends, or somebody ends it: OFF and what follows */
};
enum { SLUICE_LEAVE_DECISIONS = 4 };

/* A job on a node that is to be empty. Times in seconds of one clock. */
struct sluice_leaver {
    enum sluice_leave_why bar; /* OFF and what follows; NONE: it may be moved */
    uint32_t request;          /* then: what it asked, and where it may go; index into the call's requests */
    int64_t end_s;             /* at the latest */
    int64_t deadline_s;        /* the node is to be empty by then; 0: as soon as can be */
    int64_t move_s;            /* for which it would do no work if it were moved (sluice_lost_s of sluice/loss.h) */
};

struct sluice_leave_limits {
    int64_t now_s;
    uint32_t moves; /* at most so many move */
};

struct sluice_leave {
    enum sluice_leave_decision decision;
    enum sluice_leave_why why;
    struct sluice_part to; /* MOVES: where */
};

/*
 * Which jobs leave the nodes where they are. leaves[i] is said of leavers[i]; nothing is changed.
 *
 * A job that ends in time, or before a move would be over, ends there; of the others those that may be moved get places,
 * all of them at once, the last to end first, then in the caller's order: as long as there are moves left. `request`
 * must not allow nodes that are to be empty. O(leavers^2 + leavers * a decision). Errors: NO_MEMORY; RANGE (request,
 * move_s); those of sluice_place but NO_PLACE and NEVER, and of sluice_commit.
 */
enum sluice_error sluice_leave_plan(struct sluice_cluster *cluster, enum sluice_policy policy,
                                    const struct sluice_request *requests, uint32_t request_count,
                                    const struct sluice_leaver *leavers, uint32_t count,
                                    const struct sluice_leave_limits *limits, struct sluice_leave *leaves,
                                    struct sluice_error_text *text);

/* ======== power budgets ======== */

/*
 * Watts as something that a plan books over time, as it does GPUs: budgets for all nodes or some of them, by the hour of
 * the week. What belongs to which budget is the caller's: `nodes` of a budget, and the budgets of a job (bits).
 *
 * A budget has `watts`, or in some hours others; less what plans may not give away (`base_watts`): what is drawn there
 * whatever runs, e.g. by idle GPUs, and what is kept for guaranteed jobs, whose own `watts` are what they draw above
 * that. Until `lowered_until_s` it is no more than `lowered_watts`. A plan looks at the hours of a week from its now on;
 * what lasts longer, or starts later, has to do with the least of the week. Where a job's watts begin or end, that counts
 * as up to a 64th of the time until then earlier or later, so that a plan's cost does not depend on how many jobs run.
 */
struct sluice_power;

enum {
    SLUICE_POWER_MAX_BUDGETS = 64,
    SLUICE_POWER_MAX_HOURS = 256,        /* of one budget */
    SLUICE_POWER_MAX_WATTS = 1000000000, /* of one budget */
    SLUICE_POWER_MAX_GPU_WATTS = 100000,
    SLUICE_POWER_WEEK_S = 604800,
};

/* Part of a week, in seconds from its beginning. */
struct sluice_power_hours {
    int32_t from_s, to_s;
    int64_t watts;
};

struct sluice_power_budget {
    int64_t watts; /* outside `hours` */
    int64_t base_watts;
    int64_t lowered_watts, lowered_until_s; /* on the caller's clock; lowered_until_s 0: not lowered */
    const struct sluice_power_hours *hours; /* ascending, without overlap */
    uint32_t hour_count;
    uint32_t node_words;
    const uint64_t *nodes; /* bit n % 64 of word n / 64: node n; NULL: all nodes */
};

/* Room for budgets of clusters with up to `max_nodes` nodes: 3 MiB, touched as it is needed. Errors: RANGE, NO_MEMORY. */
enum sluice_error sluice_power_new(uint32_t max_nodes, struct sluice_power **power, struct sluice_error_text *text);
void sluice_power_free(struct sluice_power *power);

/* The budgets from now on, copied; `week_s`: a moment at which a week began. Errors, the budgets staying as they were:
 * RANGE (watts), INVALID (hours), CAPACITY. O(budgets * nodes). */
enum sluice_error sluice_power_set(struct sluice_power *power, const struct sluice_power_budget *budgets,
                                   uint32_t count, int64_t week_s, struct sluice_error_text *text);

/* A budget's watts at a time, base_watts included; 0 for a budget that there is not. */
int64_t sluice_power_watts(const struct sluice_power *power, uint32_t budget, int64_t at_s);

/* What the last plan left of a budget for more jobs: so many watts (below 0: too much is drawn) from each start to the
 * next one's, the last ones for ever. Returns how many there are, and writes up to `capacity`.
 * Nothing before the first plan. */
uint32_t sluice_power_profile(const struct sluice_power *power, uint32_t budget, uint32_t capacity, int64_t *starts_s,
                              int64_t *watts);

/* ======== backfill ======== */

/*
 * When each pending job will start, and where: running jobs with the latest moment at which they end, and a queue in
 * order of priority, give a plan that keeps the order except where going ahead delays no reserved start.
 *
 * The rules, exactly
 *   - What runs is held until its end, or until now + 1 when that has passed; what the cluster holds but `running` does
 *     not name, until for ever. Nodes that are not up and GPUs that are not healthy take nothing.
 *   - Jobs are planned one after the other. Candidate starts are now and every later moment at which something starts
 *     or ends. A job starts at the first one from which on its request fits, for its whole limit, with everything
 *     planned before it.
 *   - One node: it fits where CPUs, host memory and GPUs (the same ones throughout) are free for the whole time, under
 *     what the request requires; what it prefers, its layout and placement policies do not count. Of the nodes where it
 *     fits, that of lowest rank is taken. On it shares go to the GPUs with the least free memory (its minimum over the
 *     time), then the lowest index; whole GPUs are taken by lowest index. Where one link domain, one NUMA node or a
 *     near NIC is required, GPUs come from the smallest group that has enough, the first of these.
 *   - Several nodes: the nodes_min lowest ranks of those where one node's share fits; with one switch required, those
 *     of the switch with the lowest id (the highest switch of an allowed level above each node) that has enough. GPUs
 *     in total: nodes that can give most come first, then low ranks, until the total is reached, at most nodes_max,
 *     each giving at least one, at least nodes_min. In segments: of the leaf switches, the lowest id first, as many
 *     whole segments as each has. With lower_switches: of the first switch that has enough of them, those switches that
 *     sluice_place fills, the lowest ids and ranks first.
 *   - NICs: so many of the accepted kinds must be free, the same ones throughout. Which GPUs they are near does not count
 *     for where and when; of those that are free, the ones with the most pairs with the job's GPUs are booked. With
 *     nic_planes SLUICE_PACK all are in one plane, on nodes by the rules above, where one has room at the first start:
 *     the first such plane. Where none has, they are in any then, as sluice_place would choose. With SLUICE_SPREAD those
 *     of a node are over planes as evenly as can be without a loss of pairs.
 *   - A group (jobs with the same `group` that follow each other) starts together: at the first candidate start at
 *     which its members fit one after the other; with the NICs of one in one plane only where that leaves room for all.
 *   - Reservations are given to the first `reservations` jobs or groups that cannot start now: 1 is EASY backfill, as
 *     many as there are jobs conservative backfill. All others start now or are not planned.
 *   - A job may bring the reservation of an earlier plan. All of those are held from the outset; in its turn each job
 *     gives its own up and takes the first start by these rules, or its own again where that is earlier. So a reserved
 *     start never slips, as long as run times are upper bounds and no node or GPU is lost.
 *   - Power (sluice_backfill_set_power): a job also needs its watts in every budget that counts it, throughout. A node
 *     whose share of them is not free is passed over. A job that could start now but for watts, and that may start with
 *     fewer (least_watts), starts with as many a GPU as are free, at most `watts`; a group with least_watts each.
 * EASY: D. Lifka, JSSPP 1995; conservative: A. Mu'alem, D. Feitelson, IEEE TPDS 12(6), 2001.
 */
struct sluice_backfill;

enum { SLUICE_BACKFILL_MAX_JOBS = 1048576 };
/* The furthest that a plan looks ahead, and the longest limit, in seconds: 68 years. */
enum { SLUICE_BACKFILL_HORIZON_S = 2147483646 };
/* No start: not planned, or never within the horizon. */
enum { SLUICE_BACKFILL_NO_START = -1 };

/* The sizes that plans are made for; 0 takes the default in its comment. */
struct sluice_backfill_config {
    uint32_t max_jobs;    /* 16384 */
    uint32_t max_running; /* 65536: parts (node shares) of running allocations */
    uint32_t max_planned; /* 2 * max_jobs: parts of all planned starts together */
};

struct sluice_backfill_running {
    uint64_t allocation;
    int64_t end_s;          /* at the latest, on the caller's clock */
    uint64_t power_budgets; /* as of a job */
    int32_t watts;
};

struct sluice_backfill_job {
    const struct sluice_request *request;
    int64_t limit_s; /* run time at most, 1 to SLUICE_BACKFILL_HORIZON_S */
    uint32_t group;  /* 0: alone */
    uint32_t held_count;
    int64_t held_start_s;           /* the reservation from an earlier plan; ignored where held_count is 0 */
    const struct sluice_part *held; /* its parts */

    /* Only with power budgets. */
    uint64_t power_budgets; /* bit b: budget b counts it, on its nodes */
    int32_t watts;         /* of each GPU, or share of one, above what it draws idle; 0 to SLUICE_POWER_MAX_GPU_WATTS */
    int32_t least_watts;   /* the fewest that it may start with; 0: `watts` */
    bool power_guaranteed; /* it may start with none: what it needs is kept for it */
    bool watts_only; /* somebody else finds its nodes: of `held` only the watts are planned, from held_start_s on at
                              the earliest and with least_watts or more; the request is not read */
};

/* A job's planned start: its parts are parts[first_part .. first_part + part_count). */
struct sluice_backfill_start {
    int64_t start_s; /* now: start it; later: reserved; SLUICE_BACKFILL_NO_START */
    uint32_t first_part;
    uint32_t part_count;
    int32_t watts;            /* of each GPU that are booked; 0 without power budgets */
    uint32_t waits_for_power; /* 1 + a budget without which it could start now; 0: none */
};

/*
 * Room for plans for clusters with up to `max_nodes` nodes, taken at once and touched as it is needed: about 2 KiB a
 * node, 400 bytes a running and 1.6 KiB a planned part, and 64 MiB for what is remembered of kinds of request. Errors:
 * RANGE, NO_MEMORY.
 */
enum sluice_error sluice_backfill_new(const struct sluice_backfill_config *config, uint32_t max_nodes,
                                      struct sluice_backfill **backfill, struct sluice_error_text *text);
void sluice_backfill_free(struct sluice_backfill *backfill);

/* Plans from now on book watts of these budgets, made for as many nodes; NULL: of none. They have to outlive that, and
 * serve one plan at a time. */
void sluice_backfill_set_power(struct sluice_backfill *backfill, struct sluice_power *power);

/*
 * Plan; the cluster does not change. starts[i] belongs to jobs[i]; parts of each start are in ascending order of node,
 * as sluice_commit takes them. A held reservation that no longer fits (a node or GPU was lost, a job overran) is
 * dropped, and its job planned like one without.
 * A job of one node looks through what is remembered of its kind, a few instructions for every 16 nodes, and typically
 * at about 40 nodes themselves; O(nodes) for several nodes; O(nodes * candidate starts) for groups and GPUs in total.
 * With power budgets a job of one node looks at nodes a little longer, and O(nodes * candidate starts) for several.
 * Errors: those of sluice_request_check, with the job's number; RANGE (limit_s, watts, now_s below 0, more nodes than
 * the handle or the budgets were made for); UNKNOWN and DUPLICATE (running allocation); CAPACITY (more jobs or parts than there is room
 * for).
 */
enum sluice_error sluice_backfill_plan(struct sluice_backfill *backfill, const struct sluice_cluster *cluster,
                                       int64_t now_s, const struct sluice_backfill_running *running,
                                       uint32_t running_count, const struct sluice_backfill_job *jobs,
                                       uint32_t job_count, uint32_t reservations, struct sluice_backfill_start *starts,
                                       struct sluice_part *parts, uint32_t part_capacity, uint32_t *part_count,
                                       struct sluice_error_text *text);

/* ======== blocks of nodes ======== */

/*
 * The blocks of Slurm's topology/block (24.11 to 26.05). Base blocks, in the order of its configuration, are together
 * in larger ones: size[1] of them each, from the first on, in a block of level 1, and so on up to one that has all. As
 * switches of a cluster, base blocks are leaf switches, and all of them have the same number of switches above.
 */
struct sluice_blocks {
    uint32_t base_nodes;  /* of a base block as Slurm counts them: the first of BlockSizes */
    uint32_t base_blocks; /* how many there are */
    uint32_t levels;
    uint32_t configured;                 /* of them; where BlockSizes has none that has all, one is added */
    uint32_t size[SLUICE_SWITCH_LEVELS]; /* base blocks in a block of each level, ascending, the first 1 */
};

/*
 * From BlockSizes, in nodes: the first is that of a base block, the others are it times powers of two. Errors: RANGE (a
 * size or count of 0), INVALID (a size that is no such multiple), CAPACITY (more levels than there is room for).
 */
enum sluice_error sluice_blocks_make(const uint32_t *block_sizes, uint32_t size_count, uint32_t base_blocks,
                                     struct sluice_blocks *blocks, struct sluice_error_text *text);

/*
 * What topology/block asks of a job of at least `nodes` nodes, written to the request's one_switch, switch_level and
 * lower_switches: it takes them below one block of the first level that is large enough, and of the blocks one level
 * lower as few as such a number of nodes fills. Those it takes from the one with most nodes to the one with fewest, and
 * gives up at one of which a base block gives no node, unless that is the last. Sets of nodes that the core chooses
 * for such a request are therefore: of some lower blocks all nodes that fit, where each base block has such; then of one
 * more what is missing, which is less than each of the others gives where a base block of it has none.
 * Source: eval_nodes_block.c of Slurm 24.11.5 and 26.05.3.
 */
void sluice_blocks_ask(const struct sluice_blocks *blocks, uint32_t nodes, struct sluice_request *request);

/* ======== memory ledger ======== */

/*
 * Who holds how much memory of which device, exact to the byte, in memory that processes share.
 *
 * The caller maps the region (shared and writable) into every process and passes it here; the ledger does no I/O and
 * keeps no pointers in it, so each process may map it elsewhere. In it are
 *   devices    GPUs or MIG instances, each with its capacity, granularity and oversubscription;
 *   owners     jobs or tenants, each with a quota on every device;
 *   processes  each of one owner, known by pid and start time, because a pid alone is used again.
 * For every device at every moment: the charge of the device is the sum of its owners' charges and of its processes'
 * charges, and is granted only within the device's limit and the owner's quota. A process may be killed or stopped at
 * any instruction: no byte is lost or counted twice, and no other process waits for it. What a dead process held stays
 * charged until a process that knows that it is dead calls sluice_ledger_reap.
 *
 * Use: reserve, then allocate on the device, then commit; or release where the device refused. In that order the sum of
 * allocations never exceeds a limit, whichever processes race.
 *
 * Unlike other handles a ledger may be used by many threads at once, except where a function says otherwise. Every
 * operation is lock-free; after `attempts` lost races in a row (a hostile or corrupt peer) it gives SLUICE_ERROR_BUSY.
 * Nothing in the region is trusted: impossible values give SLUICE_ERROR_CORRUPT. But a process that can write the
 * region can falsify the figures in it, so a limit on hostile code needs a stronger guard in addition to the ledger.
 */
struct sluice_ledger;

enum {
    SLUICE_LEDGER_MAX_DEVICES = 128,
    SLUICE_LEDGER_MAX_OWNERS = 4096,
    SLUICE_LEDGER_MAX_PROCESSES = 4096,
    SLUICE_LEDGER_ALIGNMENT = 64, /* of a region's address */
};

/* How much a region has room for; each at least 1. */
struct sluice_ledger_shape {
    uint32_t devices;
    uint32_t owners;
    uint32_t processes; /* alive at one time, of all owners */
};

struct sluice_ledger_device {
    uint64_t capacity;         /* bytes; times oversubscription at most 2^46; 0 closes the device */
    uint64_t granularity;      /* charges are rounded up to a multiple of it: a power of two, e.g. 2 MiB for CUDA */
    uint32_t oversubscription; /* limit = capacity * this / 1000, rounded down to the granularity: 1000 to 8000 */
    uint32_t reserved;         /* 0 */
};

/* One reservation or allocation. The caller keeps it, next to the allocation's address, until it is released. */
struct sluice_ledger_charge {
    uint64_t asked;   /* bytes */
    uint64_t charged; /* bytes, asked rounded up; 0: this charge holds nothing */
    uint32_t device;
    uint32_t committed; /* 1 after sluice_ledger_commit */
};

/* Bytes of a device, or of one owner or one process on it. charged = committed + what is reserved. */
struct sluice_ledger_usage {
    uint64_t limit;     /* device: capacity with oversubscription; owner and process: the owner's quota */
    uint64_t charged;   /* exact at one moment */
    uint64_t available; /* what one more reservation may get, device's limit and owner's quota considered */
    uint64_t peak;      /* highest `charged` ever; a process's: 0 */
    uint64_t committed; /* of charged: allocated, contexts included */
    uint64_t context;   /* of committed: driver contexts */
    uint64_t slack;     /* of committed: lost to rounding */
    uint64_t refused;   /* reservations refused for lack of room or quota; a process's: 0 */
};

struct sluice_ledger_process {
    uint32_t owner;
    uint32_t pid;
    uint64_t start; /* as given to sluice_ledger_join */
};

/*
 * Free memory that large requests cannot use. The driver maps any free page of a device at any address, so inside a
 * device nothing is fragmented; what fragments is free memory spread over several devices.
 */
struct sluice_ledger_fragmentation {
    uint64_t free;              /* bytes, over all devices */
    uint64_t largest;           /* most that one device has free: the largest request that fits */
    uint32_t largest_device;    /* the lowest that has it */
    uint32_t external_permille; /* 1000 * (free - largest) / free, rounded down; 0 when nothing is free */
    uint64_t slack;             /* bytes charged but not asked for, over all devices */
};

/* Bytes that a region of this shape takes; 0 when the shape is out of bounds. */
size_t sluice_ledger_size(const struct sluice_ledger_shape *shape);

/*
 * Make an empty ledger in `region`, before anyone else uses it. Devices are closed and owners have no quota yet.
 * SLUICE_ERROR_RANGE: shape; SLUICE_ERROR_CAPACITY: size; SLUICE_ERROR_INVALID: address not aligned.
 */
enum sluice_error sluice_ledger_format(void *region, size_t size, const struct sluice_ledger_shape *shape,
                                       struct sluice_error_text *text);

/*
 * A handle on a formatted region, which must stay mapped until sluice_ledger_free. `attempts`: lost races in a row
 * before SLUICE_ERROR_BUSY; 0 for 2^20. Errors: INVALID, CORRUPT, VERSION, NO_MEMORY.
 */
enum sluice_error sluice_ledger_new(void *region, size_t size, uint32_t attempts, struct sluice_ledger **ledger,
                                    struct sluice_error_text *text);
void sluice_ledger_free(struct sluice_ledger *ledger);

void sluice_ledger_get_shape(const struct sluice_ledger *ledger, struct sluice_ledger_shape *shape);

/*
 * Terms of a device and quota of an owner on it (bytes; UINT64_MAX: only the device's limit). May change at any time;
 * when lowered below what is charged, nothing is taken away, but nothing more is granted either. O(1). Errors: UNKNOWN
 * (device, owner), RANGE (terms), BUSY, CORRUPT.
 */
enum sluice_error sluice_ledger_set_device(struct sluice_ledger *ledger, uint32_t device,
                                           const struct sluice_ledger_device *terms, struct sluice_error_text *text);
enum sluice_error sluice_ledger_set_quota(struct sluice_ledger *ledger, uint32_t owner, uint32_t device, uint64_t quota,
                                          struct sluice_error_text *text);

/*
 * Enter the process (pid not 0, start time in any unit, both as all users of the region see them) under `owner`.
 * *process names it until it is reaped, also in other processes that use the region. Whatever the same pid left in the
 * ledger, before exec or in an earlier life, is released first. Once per process; a forked child joins again.
 * SLUICE_ERROR_CAPACITY: no slot is free: reap dead processes.
 */
enum sluice_error sluice_ledger_join(struct sluice_ledger *ledger, uint32_t owner, uint32_t pid, uint64_t start,
                                     uint32_t *process, struct sluice_error_text *text);

/*
 * Release everything that a process holds and remove it. For a process that has ended, or by that process itself after
 * its last operation. Any number of callers may do so at once, and again after one was killed in it. A process that is
 * not in the ledger releases 0 bytes, which is no error. *released (may be NULL): bytes, over all devices.
 */
enum sluice_error sluice_ledger_reap(struct sluice_ledger *ledger, uint32_t pid, uint64_t start, uint64_t *released,
                                     struct sluice_error_text *text);

/*
 * Charge `bytes` (1 or more), rounded up to `granularity` (a power of two; 0: the device's). Granted at once or refused
 * at once: SLUICE_ERROR_CAPACITY: the device's limit; SLUICE_ERROR_QUOTA: the owner's. O(1), no system call.
 */
enum sluice_error sluice_ledger_reserve(struct sluice_ledger *ledger, uint32_t process, uint32_t device, uint64_t bytes,
                                        uint64_t granularity, struct sluice_ledger_charge *charge,
                                        struct sluice_error_text *text);

/* The device has granted what was reserved. Charges of one process are independent; one charge is the caller's. */
enum sluice_error sluice_ledger_commit(struct sluice_ledger *ledger, uint32_t process,
                                       struct sluice_ledger_charge *charge, struct sluice_error_text *text);

/* Give a charge back, committed or not; it holds nothing afterwards, and releasing it again is INVALID. O(1). */
enum sluice_error sluice_ledger_release(struct sluice_ledger *ledger, uint32_t process,
                                        struct sluice_ledger_charge *charge, struct sluice_error_text *text);

/*
 * Set how much the process's driver context takes on a device: charges (or gives back) the difference to the previous
 * value, exactly, without rounding; 0 when the context is gone. Errors as sluice_ledger_reserve. Calls for one process
 * and device must not overlap.
 */
enum sluice_error sluice_ledger_set_context(struct sluice_ledger *ledger, uint32_t process, uint32_t device,
                                            uint64_t bytes, struct sluice_error_text *text);

/* Figures of a device, of an owner on it, of a process on it. O(processes), O(processes) and O(1). */
enum sluice_error sluice_ledger_device_usage(struct sluice_ledger *ledger, uint32_t device,
                                             struct sluice_ledger_usage *usage, struct sluice_error_text *text);
enum sluice_error sluice_ledger_owner_usage(struct sluice_ledger *ledger, uint32_t owner, uint32_t device,
                                            struct sluice_ledger_usage *usage, struct sluice_error_text *text);
enum sluice_error sluice_ledger_process_usage(struct sluice_ledger *ledger, uint32_t process, uint32_t device,
                                              struct sluice_ledger_usage *usage, struct sluice_error_text *text);

/*
 * The processes in the ledger, up to `room` of them (their names in ids[], who they are in processes[]); *count is how
 * many there are, which may be more. O(processes).
 */
enum sluice_error sluice_ledger_processes(struct sluice_ledger *ledger, uint32_t room, uint32_t *ids,
                                          struct sluice_ledger_process *processes, uint32_t *count,
                                          struct sluice_error_text *text);

/*
 * Audit: for every device the charge equals the sum over owners and the sum over processes, at one moment while others
 * go on. SLUICE_ERROR_CORRUPT says where not. O(devices * (owners + processes)).
 */
enum sluice_error sluice_ledger_audit(struct sluice_ledger *ledger, struct sluice_error_text *text);

/* How free memory is spread over the devices. O(devices * processes). Errors: BUSY, CORRUPT. */
enum sluice_error sluice_ledger_get_fragmentation(struct sluice_ledger *ledger,
                                                  struct sluice_ledger_fragmentation *fragmentation,
                                                  struct sluice_error_text *text);

/* ======== request gate ======== */

/*
 * Which request of a model service may go to which replica, and when, over all worker processes of a host, in memory
 * that they share.
 *
 * The caller maps the region (shared and writable) into every worker and passes it here; the gate does no I/O, has no
 * clock and keeps no pointers in it. In it are
 *   workers    processes that serve requests, each on a numbered seat, known by pid and start time;
 *   subjects   keys, users, tenants and services, known by 64-bit ids (hashes of names; 0 is no subject), with limits;
 *   replicas   what runs a service, known by 64-bit names (its launch), each with a number of requests at a time;
 *   tickets    requests that were admitted and have not ended.
 * A ticket's life: sluice_gate_admit checks and charges all its subjects, or refuses and charges none; it waits in its
 * service's queue; sluice_gate_turn gives it a replica in weighted fair order; sluice_gate_settle ends it and gives back
 * what it did not use. Each call happens wholly or not at all, also when its process is killed in it. What a dead worker
 * leaves stays charged until a process that knows that it is dead calls sluice_gate_reap.
 *
 * Limits. Requests and tokens a minute are token buckets: a full bucket holds `burst`, and refills continuously, exact
 * to the microsecond. A bucket is never overdrawn by an admission; a ticket that settles for more than it reserved leaves
 * a debt that refills first. `concurrent` counts tickets, waiting ones included; `queued` those that wait, and is not
 * asked while the service has more free places than waiting tickets.
 *
 * Parts. Where gates of several hosts share a subject's limit, sluice_gate_share says so, and each gate has a part: its
 * buckets do not refill but get what sluice_gate_give adds, and its counts are what that sets. sluice_gate_keep gives
 * back what is not needed here. Parts hold until the time of sluice_gate_parts_until, and admit nothing afterwards; the
 * sum of all parts is their giver's to keep within the limit. A refusal says where more may be had.
 *
 * Order of a service's queue: weighted fair queueing over tenants (start-time fair queueing; a turn costs its reserved
 * tokens over the tenant's weight, and settling gives back the rest). A tenant's first ticket of priority p goes ahead
 * as if its tenant had used p * SLUICE_GATE_PRIORITY_TOKENS fewer tokens a unit of weight: a bounded lead that does not
 * change shares. Within a tenant: tickets that lost their replica, then the higher priority, then the earlier deadline,
 * then the earlier admission.
 *
 * Choice of a replica: never one without a free place; then usable ones, then those that are LAST, then the one that
 * the ticket has lost. Among equal ones the replica that is known to have the longest prefix of the request, unless it has
 * more than 5/4 of its share of what is in flight; else the one with the fewest tokens in flight, then the lowest slot.
 *
 * Slow replicas. Workers report with sluice_gate_took what answers took. A usable replica whose average is at least four
 * times that of more than half of the service's others is out: it keeps what it has and gets nothing. After 10 s, twice
 * as long each time up to 300 s, it is on trial: one request at a time, which it gets before all others. If it is then not
 * twice as slow it is in again. Of a service's usable replicas at most a third is out or on trial, one of two to five, and
 * never the only one; where fewer are usable, those that would be tried next are in again.
 *
 * Times are microseconds of any clock that all workers share (CLOCK_MONOTONIC); a `now_us` before an earlier call's
 * counts as that one's. Calls on one handle must not overlap, unless a function says otherwise; each process, and each
 * thread, opens its own. One lock orders all calls of all processes for some 100 ns each. Only one user's processes may
 * have the region: one that writes it otherwise can falsify it, and SLUICE_ERROR_CORRUPT is no promise against that.
 */
struct sluice_gate;

enum {
    SLUICE_GATE_MAX_WORKERS = 64, /* a set of workers is one uint64_t */
    SLUICE_GATE_MAX_SUBJECTS = 1048576,
    SLUICE_GATE_MAX_SERVICES = 4096,
    SLUICE_GATE_MAX_REPLICAS = 4096,
    SLUICE_GATE_MAX_TICKETS = 1048576,
    SLUICE_GATE_MAX_PREFIXES = 16777216,
    SLUICE_GATE_MAX_SLOTS = 65535,       /* requests at a time of one replica */
    SLUICE_GATE_MAX_PREFIX = 16,         /* blocks of one request's prefix */
    SLUICE_GATE_MAX_PRIORITY = 7,        /* 0 is the lowest */
    SLUICE_GATE_MAX_WEIGHT = 65536,      /* of a tenant; 1 unless set */
    SLUICE_GATE_PRIORITY_TOKENS = 32768, /* lead of one step of priority */
    SLUICE_GATE_MAX_AMOUNT = 2147483647, /* tokens of one ticket; a limit; a burst */
    SLUICE_GATE_ALIGNMENT = 64,          /* of a region's address */
};

/* How much a region has room for; each at least 1. Subjects without limit or weight take room only while they have
 * tickets. About 490 bytes a ticket, 184 a subject, 248 a replica, 16 a prefix block. */
struct sluice_gate_shape {
    uint32_t workers;
    uint32_t subjects;
    uint32_t services;
    uint32_t replicas;
    uint32_t tickets;
    uint32_t prefixes; /* blocks of prompts that are remembered, rounded up to a power of two of at least 8 */
};

/* Kinds of subject. Append only. */
enum sluice_gate_kind {
    SLUICE_GATE_KEY = 0,
    SLUICE_GATE_USER = 1,
    SLUICE_GATE_TENANT = 2,
    SLUICE_GATE_SERVICE = 3,
};
enum { SLUICE_GATE_KINDS = 4 };

/* What refused a request. Append only. */
enum sluice_gate_reason {
    SLUICE_GATE_REQUESTS = 0,    /* requests a minute */
    SLUICE_GATE_TOKENS = 1,      /* tokens a minute */
    SLUICE_GATE_CONCURRENT = 2,  /* requests at a time */
    SLUICE_GATE_QUEUED = 3,      /* waiting requests */
    SLUICE_GATE_FULL = 4,        /* the region has no room: tickets, services or subjects are all in use */
    SLUICE_GATE_NO_REPLICAS = 5, /* the service has no replica, and the request would not wait for one */
    SLUICE_GATE_NO_PART = 6,     /* the time of all parts is over */
};

/* Limits of a subject; UINT64_MAX: no limit, else at most SLUICE_GATE_MAX_AMOUNT. */
struct sluice_gate_limit {
    uint64_t requests; /* a minute */
    uint64_t tokens;   /* a minute */
    uint64_t concurrent;
    uint64_t queued;
    uint64_t requests_burst; /* what a full bucket holds; 0: a minute's worth */
    uint64_t tokens_burst;
};

/* A part of a subject's limits. What the subject has no limit of is not looked at. */
struct sluice_gate_part {
    int64_t requests; /* left of it; below 0: debt */
    int64_t tokens;
    uint64_t concurrent;
    uint64_t queued;
};

/* What a gate keeps of a part, and what it gives back: a debt is given back as less than 0. */
struct sluice_gate_kept {
    struct sluice_gate_part part; /* concurrent and queued: at least what is there */
    int64_t requests_back;
    int64_t tokens_back;
    int64_t tokens_over; /* settled beyond the part since the last time: given back, too */
    uint64_t open;       /* tickets */
    uint64_t waiting;    /* of these */
};

/* What a worker asks for. */
struct sluice_gate_request {
    uint64_t subjects[SLUICE_GATE_KINDS]; /* ids by kind; 0 for key or user: none */
    uint64_t tag[2];                      /* the caller's, e.g. the request's id; given back in turns and at the end */
    uint64_t tokens;                      /* to reserve: prompt and completion; at most SLUICE_GATE_MAX_AMOUNT */
    uint64_t prompt_tokens;               /* of these: the prompt's, at least as estimated */
    uint64_t deadline_us;                 /* until when it waits for its turn; 0: for ever */
    uint32_t priority;                    /* 0 to SLUICE_GATE_MAX_PRIORITY */
    uint32_t needs_replica;               /* 1: refuse it where the service has no replica; 0: it waits for one */
    uint32_t prefix_count;
    uint32_t reserved; /* 0 */
    uint64_t
        prefix[SLUICE_GATE_MAX_PREFIX]; /* a hash of all of the prompt up to the end of each block, shortest first */
};

/* The answer: a ticket, or a refusal. */
struct sluice_gate_answer {
    uint64_t ticket; /* 0: refused */
    enum sluice_gate_reason reason;
    enum sluice_gate_kind kind; /* of the subject whose limit it is */
    uint64_t limit; /* the limit (burst of a bucket), and what is taken of it; 0 and 0: no room in the region */
    uint64_t used;
    /* After so many microseconds the same request succeeds if nobody else asked, or settled a debt, meanwhile. UINT64_MAX: never, it is larger
     * than the limit. 0: no time can be known, as it depends on when others end, or on whether there is more than the part. */
    uint64_t retry_after_us;
    uint32_t part; /* 1: it is this gate's part that is used up; 0: the whole limit */
    uint32_t reserved;
};

/* A ticket whose turn it is. */
struct sluice_gate_turn {
    uint64_t ticket;
    uint64_t replica; /* its name */
    uint64_t tag[2];
    uint32_t slot;          /* of the replica */
    uint32_t prefix_blocks; /* of the request's prefix: known to be there */
};

/* How a ticket ended. */
struct sluice_gate_settled {
    uint64_t ticket;
    uint64_t tag[2];
    uint64_t subjects[SLUICE_GATE_KINDS];
    uint64_t replica;       /* 0: it had none */
    uint64_t reserved;      /* tokens */
    uint64_t prompt_tokens; /* used */
    uint64_t completion_tokens;
    uint64_t admitted_us;
    uint64_t granted_us; /* its last turn; 0: it had none */
    uint64_t ended_us;
};

/* Append only. */
enum sluice_gate_state {
    SLUICE_GATE_USABLE = 0,
    SLUICE_GATE_LAST = 1,       /* suspect: chosen where no usable one has a free place */
    SLUICE_GATE_NOT_USABLE = 2, /* drains: keeps what it has, gets nothing */
};

/* Whether a replica is slow. Append only. */
enum sluice_gate_standing {
    SLUICE_GATE_IN = 0,
    SLUICE_GATE_OUT = 1,   /* slow: gets nothing */
    SLUICE_GATE_TRIAL = 2, /* was slow: gets one request at a time */
};

/* Times that are compared. Append only. */
enum sluice_gate_time {
    SLUICE_GATE_FIRST = 0, /* from a ticket's turn to the first token of its stream */
    SLUICE_GATE_TOKEN = 1, /* from one token of a stream to the next one */
    SLUICE_GATE_WHOLE = 2, /* from a ticket's turn to the end of an answer that is not streamed */
};

/* What a replica took for a ticket. */
struct sluice_gate_took {
    uint64_t us;
    uint64_t tokens; /* of a whole answer; at most SLUICE_GATE_MAX_AMOUNT */
    enum sluice_gate_time time;
    uint32_t so_far; /* 1: it is not over yet, and takes at least so long; counts only where that is slow already */
};

struct sluice_gate_replica {
    uint64_t name;
    uint64_t service;
    uint64_t tokens; /* in flight */
    uint32_t slots;
    uint32_t in_flight;
    enum sluice_gate_state state;
    uint32_t removed;     /* 1: forgotten as soon as nothing is in flight */
    uint64_t standing_us; /* in, on trial: since then; out: until then */
    enum sluice_gate_standing standing;
    enum sluice_gate_time slow_time; /* not in: why */
    uint32_t times_slower;           /* than more than half of the others, when it was put out: 2, 4, 8, ...; in: 0 */
    uint32_t reserved;
};

struct sluice_gate_service {
    uint64_t waiting;
    uint64_t in_flight;
    uint64_t tokens_waiting;
    uint64_t tokens_in_flight;
    uint64_t oldest_us; /* since when the first of those that wait has waited; 0: none waits */
    uint64_t slots;     /* of its replicas that are usable or last */
    uint32_t replicas;  /* usable or last */
    uint32_t usable;
    uint32_t out; /* of the usable ones: slow, or on trial */
    uint32_t reserved;
};

struct sluice_gate_subject {
    struct sluice_gate_limit limit; /* bursts as they are, not 0 */
    uint64_t weight;
    uint64_t open;         /* tickets */
    uint64_t waiting;      /* of these */
    uint64_t tokens;       /* reserved by these */
    int64_t requests_left; /* in the bucket, rounded down; below 0: debt; INT64_MAX: no limit */
    int64_t tokens_left;
    uint64_t refused; /* requests that a limit of this subject refused */
};

struct sluice_gate_worker {
    uint32_t worker;
    uint32_t pid;
    uint64_t start;
    uint64_t tickets;
};

/* Bytes that a region of this shape takes; 0 when the shape is out of bounds. */
size_t sluice_gate_size(const struct sluice_gate_shape *shape);

/*
 * Make an empty gate in `region`, before anyone else uses it. RANGE: shape; CAPACITY: size; INVALID: address not
 * aligned; SYSTEM: no lock.
 */
enum sluice_error sluice_gate_format(void *region, size_t size, const struct sluice_gate_shape *shape,
                                     struct sluice_error_text *text);

/* A handle on a formatted region, which must stay mapped until sluice_gate_free. Errors: INVALID, CORRUPT, VERSION,
 * NO_MEMORY. */
enum sluice_error sluice_gate_new(void *region, size_t size, struct sluice_gate **gate, struct sluice_error_text *text);
void sluice_gate_free(struct sluice_gate *gate);
void sluice_gate_get_shape(const struct sluice_gate *gate, struct sluice_gate_shape *shape);

/* All functions below: CORRUPT where the region contradicts itself or its lock cannot be had. */

/*
 * Enter a worker (pid not 0) on seat `seat`, or on a free one where that is UINT32_MAX. *worker names it until it is
 * reaped; its seat is worker % SLUICE_GATE_MAX_WORKERS. May be called on the worker's behalf. DUPLICATE: this pid and
 * start time are there already; CAPACITY: all seats are taken; BUSY: this one is; RANGE: pid or seat.
 */
enum sluice_error sluice_gate_join(struct sluice_gate *gate, uint32_t pid, uint64_t start, uint32_t seat,
                                   uint32_t *worker, struct sluice_error_text *text);

/*
 * What a worker would leave if it ended now: the tickets that were given a replica, up to `room` of them, with the tokens
 * that it reported (none where it reported no completion); *count is how many there are, which may be more. For the bills
 * of a dead worker, written before it is reaped. O(its tickets). A worker that is not there has none.
 */
enum sluice_error sluice_gate_left(struct sluice_gate *gate, uint32_t pid, uint64_t start, uint32_t room,
                                   struct sluice_gate_settled *settled, uint32_t *count,
                                   struct sluice_error_text *text);

/*
 * End all tickets of a worker that has ended, as sluice_gate_settle does with the tokens that sluice_gate_left shows,
 * and free its seat; *ended (may be NULL) counts them. Ticket by ticket: others go on meanwhile, and it may be called
 * again after its caller was killed in it. A worker that is not there is no error. O(its tickets).
 */
enum sluice_error sluice_gate_reap(struct sluice_gate *gate, uint32_t pid, uint64_t start, uint64_t now_us,
                                   uint32_t *ended, struct sluice_error_text *text);

/* Those in the gate, as sluice_gate_left counts. */
enum sluice_error sluice_gate_workers(struct sluice_gate *gate, uint32_t room, struct sluice_gate_worker *workers,
                                      uint32_t *count, struct sluice_error_text *text);

/*
 * Set a subject's limits (all UINT64_MAX: none), or a tenant's weight in all queues (1 to SLUICE_GATE_MAX_WEIGHT).
 * A bucket that had no limit before begins full, others keep what they have, at most the burst. Nothing is taken from
 * what was admitted. O(1). Errors: RANGE, INVALID (id 0), CAPACITY (subjects).
 */
enum sluice_error sluice_gate_set_limit(struct sluice_gate *gate, enum sluice_gate_kind kind, uint64_t id,
                                        const struct sluice_gate_limit *limit, struct sluice_error_text *text);
enum sluice_error sluice_gate_set_weight(struct sluice_gate *gate, uint64_t tenant, uint64_t weight,
                                         struct sluice_error_text *text);

/*
 * A subject's limits are shared with other gates, and `limit` is the whole of them. One that had none before has nothing
 * of them yet. One that has limits of its own keeps them, unless `convert`: then what it has is its part. Limits that are
 * shared already are changed, and nothing is lost. sluice_gate_set_limit ends it. O(1). Errors: as sluice_gate_set_limit.
 */
enum sluice_error sluice_gate_share(struct sluice_gate *gate, enum sluice_gate_kind kind, uint64_t id,
                                    const struct sluice_gate_limit *limit, bool convert,
                                    struct sluice_error_text *text);
/* Add requests and tokens to a part, and set its counts. O(1). Errors: UNKNOWN (no shared subject), RANGE. */
enum sluice_error sluice_gate_give(struct sluice_gate *gate, enum sluice_gate_kind kind, uint64_t id, uint64_t now_us,
                                   const struct sluice_gate_part *more, struct sluice_error_text *text);
/*
 * Keep at most `most` of a part: what is over is given back, once. Counts stay at what is there. From now on what is
 * settled goes to the part up to what it has now, and what is beyond is given back, too. O(1). Errors: as above.
 */
enum sluice_error sluice_gate_keep(struct sluice_gate *gate, enum sluice_gate_kind kind, uint64_t id, uint64_t now_us,
                                   const struct sluice_gate_part *most, struct sluice_gate_kept *kept,
                                   struct sluice_error_text *text);
/* All parts hold until then; 0: none does. */
enum sluice_error sluice_gate_parts_until(struct sluice_gate *gate, uint64_t until_us, struct sluice_error_text *text);

/*
 * Make a replica known, or change it: any process may, any number of times. *slot (may be NULL): its number while it is
 * known. A replica never changes its service. INVALID: name or service 0, another service; RANGE: `slots` over
 * SLUICE_GATE_MAX_SLOTS; CAPACITY: replicas, services. O(1).
 */
enum sluice_error sluice_gate_set_replica(struct sluice_gate *gate, uint64_t name, uint64_t service, uint32_t slots,
                                          enum sluice_gate_state state, uint32_t *slot, struct sluice_error_text *text);
/* It gets nothing more, and is forgotten as soon as nothing is in flight to it. UNKNOWN: the name. O(1). */
enum sluice_error sluice_gate_remove_replica(struct sluice_gate *gate, uint64_t name, struct sluice_error_text *text);

/* Those that are known, as sluice_gate_left counts. */
enum sluice_error sluice_gate_replicas(struct sluice_gate *gate, uint32_t room, struct sluice_gate_replica *replicas,
                                       uint32_t *count, struct sluice_error_text *text);

/*
 * Admit a request or refuse it; both are answers and SLUICE_OK. Of several limits that refuse, the answer names one that
 * it can never pass, else one without a time, else the one that takes longest. O(log tickets). Errors: UNKNOWN (worker),
 * RANGE, INVALID (no tenant, no service).
 */
enum sluice_error sluice_gate_admit(struct sluice_gate *gate, uint32_t worker, uint64_t now_us,
                                    const struct sluice_gate_request *request, struct sluice_gate_answer *answer,
                                    struct sluice_error_text *text);

/*
 * Give free places to waiting tickets, of all workers, in order; then this worker's tickets whose turn it is, up to
 * `room`, each once. Call it after admissions, ends and changes of replicas, and when sluice_gate_wakes names the worker.
 * O((log tickets + replicas of the service) * turns). Errors: UNKNOWN (worker).
 */
enum sluice_error sluice_gate_turn(struct sluice_gate *gate, uint32_t worker, uint64_t now_us, uint32_t room,
                                   struct sluice_gate_turn *turns, uint32_t *count, struct sluice_error_text *text);

/*
 * Bit s: the worker on seat s has turns or expired tickets that it has not fetched. Stays set until it has, so that a
 * notice is never lost with the process that was to send it. May be called by any thread; one atomic load.
 */
uint64_t sluice_gate_wakes(const struct sluice_gate *gate);

/*
 * This worker's tickets whose deadline passed while they waited, up to `room`, each once. They wait no more and get no
 * turn; each must still be ended. Expires tickets of all workers. *next_us (may be NULL): the next deadline of any that
 * waits, 0: none. O(log tickets * expired). Errors: UNKNOWN (worker).
 */
enum sluice_error sluice_gate_expired(struct sluice_gate *gate, uint32_t worker, uint64_t now_us, uint32_t room,
                                      uint64_t *tickets, uint32_t *count, uint64_t *next_us,
                                      struct sluice_error_text *text);

/*
 * A ticket's replica failed: it waits again, before all others of its tenant, with the same reservation; it gets the
 * replica named `avoid` (0: none) only where there is no other with a free place. deadline_us: the new one, 0: none,
 * UINT64_MAX: as it was. Errors: UNKNOWN (ticket), INVALID (it has no replica).
 */
enum sluice_error sluice_gate_again(struct sluice_gate *gate, uint64_t ticket, uint64_t now_us, uint64_t avoid,
                                    uint64_t deadline_us, struct sluice_error_text *text);

/*
 * How many tokens a ticket has used so far: what is billed if its worker dies; prompt_tokens 0: as before, or as admitted.
 * Takes no lock: two stores. For its worker alone. Errors: UNKNOWN (ticket).
 */
enum sluice_error sluice_gate_progress(struct sluice_gate *gate, uint64_t ticket, uint64_t prompt_tokens,
                                       uint64_t completion_tokens, struct sluice_error_text *text);

/*
 * What a ticket's replica took for it. *changed: the replica, where its standing is another one by that; else all 0.
 * Times of less than 10 ms are never slow. O(replicas of the service). Errors: UNKNOWN (ticket, or it has no replica),
 * RANGE.
 */
enum sluice_error sluice_gate_took(struct sluice_gate *gate, uint64_t ticket, uint64_t now_us,
                                   const struct sluice_gate_took *took, struct sluice_gate_replica *changed,
                                   struct sluice_error_text *text);

/*
 * End a ticket, in whichever state, with what it used: reserved tokens that it did not use go back to all its subjects,
 * more than it reserved becomes their debt. Its request stays counted. sluice_gate_abandon: with the tokens that
 * sluice_gate_left shows. *settled may be NULL. O(log tickets). Errors: UNKNOWN (ticket), RANGE (over
 * SLUICE_GATE_MAX_AMOUNT).
 */
enum sluice_error sluice_gate_settle(struct sluice_gate *gate, uint64_t ticket, uint64_t now_us, uint64_t prompt_tokens,
                                     uint64_t completion_tokens, struct sluice_gate_settled *settled,
                                     struct sluice_error_text *text);
enum sluice_error sluice_gate_abandon(struct sluice_gate *gate, uint64_t ticket, uint64_t now_us,
                                      struct sluice_gate_settled *settled, struct sluice_error_text *text);

/* Figures of a service and of a subject; of one that is not there all is 0, limits UINT64_MAX. O(1). */
enum sluice_error sluice_gate_get_service(struct sluice_gate *gate, uint64_t service,
                                          struct sluice_gate_service *figures, struct sluice_error_text *text);
enum sluice_error sluice_gate_get_subject(struct sluice_gate *gate, enum sluice_gate_kind kind, uint64_t id,
                                          uint64_t now_us, struct sluice_gate_subject *figures,
                                          struct sluice_error_text *text);

/*
 * Audit: all sums, queues and lists are what the tickets say. CORRUPT says where not. O(all of it), under the lock, and
 * takes memory: for tests and checks. Errors: NO_MEMORY.
 */
enum sluice_error sluice_gate_audit(struct sluice_gate *gate, struct sluice_error_text *text);

/* ======== estimates and the makespan guard ======== */

/*
 * How far estimates of run time can be trusted: the ratios actual / estimate of the jobs that ended last. Any unit of
 * time will do, here and in the replay below, as long as it is one; it is called a tick.
 */
struct sluice_accuracy;
enum { SLUICE_ACCURACY_MAX_HISTORY = 65536 };

/* Remembers the last `history` ends, 1 to SLUICE_ACCURACY_MAX_HISTORY. Errors: RANGE, NO_MEMORY. */
enum sluice_error sluice_accuracy_new(uint32_t history, struct sluice_accuracy **accuracy,
                                      struct sluice_error_text *text);
void sluice_accuracy_free(struct sluice_accuracy *accuracy);

/* A job that was estimated to run `estimate` (>= 1) ended after `actual`. O(history), no allocation. */
enum sluice_error sluice_accuracy_record(struct sluice_accuracy *accuracy, int64_t estimate, int64_t actual,
                                         struct sluice_error_text *text);

/* What is left to a job that ran `elapsed` of its estimate: the mean over the remembered jobs that had not ended by
 * then, and what the worst of them would have had left; both at least 1. Without history (`accuracy` NULL, few ends,
 * none so late) the estimate is used, and a job that ran longer is expected to run as long again. O(log history). */
void sluice_accuracy_remaining(const struct sluice_accuracy *accuracy, int64_t estimate, int64_t elapsed,
                               int64_t *expected, int64_t *longest);

/* 1000 * (1 - 5th percentile of the ratios / 95th): 0 where estimates are exact or all equally wrong. */
uint32_t sluice_accuracy_spread(const struct sluice_accuracy *accuracy);

/*
 * Brings jobs to the front that would otherwise end after all others. With the present work and what is expected to
 * arrive while the longest job runs, the cluster is busy until its horizon; a job whose longest remaining time comes
 * within a margin of the horizon is critical and goes before all others.
 */
struct sluice_guard_policy {
    int64_t capacity_milli;   /* GPUs of the cluster, in thousandths, >= 1 */
    uint32_t margin_permille; /* of the horizon, at most 1000 */
    uint32_t doubt_permille;  /* added to the margin in proportion to the estimates' spread, at most 1000 */
};

struct sluice_guard_job {
    int64_t submit;
    int64_t expected, longest; /* remaining run time, see sluice_accuracy_remaining */
    uint32_t gpus_milli;
    uint32_t reserved; /* 0 */
};

struct sluice_guard;
/* Room for `max_jobs`; the policy is copied. Errors: RANGE, NO_MEMORY. */
enum sluice_error sluice_guard_new(const struct sluice_guard_policy *policy, uint32_t max_jobs,
                                   struct sluice_guard **guard, struct sluice_error_text *text);
void sluice_guard_free(struct sluice_guard *guard);

/* A job of this work arrived: keeps the arrival rate, over the last 64 arrivals. */
void sluice_guard_arrival(struct sluice_guard *guard, int64_t now, int64_t expected, uint32_t gpus_milli);

/*
 * `ranked` holds the indices of all `count` jobs, pending and running, in an order's sequence; moves the critical ones
 * to its front, *critical of them: the longest first where estimates are good, else in order of submission, because
 * sorting by bad estimates would only shuffle them. The others keep their sequence. O(n log n), no allocation.
 * Errors: CAPACITY.
 */
enum sluice_error sluice_guard_apply(struct sluice_guard *guard, const struct sluice_guard_job *jobs, uint32_t count,
                                     uint32_t spread_permille, int64_t now, uint32_t *ranked, uint32_t *critical,
                                     struct sluice_error_text *text);

/* ======== replay ======== */

/*
 * A list of jobs with known run times, run through the cluster under a policy: which would have started when. The
 * policy sees a job when it is submitted, and of its run time only the estimate.
 */

/* Which jobs may start before one that cannot. Append only. */
enum sluice_replay_backfill {
    SLUICE_REPLAY_STRICT = 0, /* none: jobs start in the order's sequence */
    SLUICE_REPLAY_GREEDY = 1, /* every job that fits, even if that makes the first one wait longer */
    SLUICE_REPLAY_EASY = 2,   /* those that do not delay the first one's reservation, by the estimates */
    SLUICE_REPLAY_CONSERVATIVE =
        3, /* those that delay no reservation: sluice_backfill_plan, which has its own placements, without NICs */
};

/* Whether running jobs are preempted. Append only. */
enum sluice_replay_preemption {
    SLUICE_REPLAY_NEVER = 0,
    SLUICE_REPLAY_TIERS = 1, /* jobs of lower tiers for a job that cannot start; see sluice_preemption_plan */
    SLUICE_REPLAY_ORDER = 2, /* each decision places all jobs again, in sequence, on the empty cluster */
};

struct sluice_replay_config {
    enum sluice_policy placement;
    enum sluice_replay_backfill backfill;
    enum sluice_replay_preemption preemption;
    struct sluice_order_policy order; /* its times in ticks */
    bool learn;                       /* correct estimates by the ends seen so far */
    bool guarded;                     /* makespan guard; its capacity is the cluster's */
    bool restart_each_decision; /* with SLUICE_REPLAY_ORDER: every running job pays its restart at every decision */
    uint32_t guard_margin_permille, guard_doubt_permille;
    uint32_t depth;          /* pending jobs tried at a decision; 0: all */
    int64_t interval;        /* least ticks between decisions; 0: one at every arrival and every end */
    int64_t checkpoint;      /* ticks of work between checkpoints: what a preempted job keeps; 0: all, < 0: nothing */
    int64_t sample_interval; /* ticks between samples, >= 1; doubled whenever SLUICE_REPLAY_MAX_SAMPLES are there */
    int64_t second;          /* ticks per second, >= 1: what fair-share usage and conservative plans are counted in */

    /* Moves of running jobs: see sluice_compaction_plan. Not with conservative backfill. */
    int64_t move_wait;             /* the first job that cannot start may have others moved so long after its
                                      submission; 0: none are moved */
    int64_t move_cost;             /* ticks for which a job that is moved does no work, >= 1 */
    uint32_t move_factor_permille; /* gain over cost, >= 1 */
    uint32_t moves_per_job;
    uint32_t moves_per_hour; /* of all jobs, and of a plan: at most SLUICE_COMPACTION_MAX_MOVES */
};
enum { SLUICE_REPLAY_MAX_SAMPLES = 1024 };

struct sluice_replay_job {
    int64_t submit;
    int64_t run;      /* how long it ran, or would have, without restarts */
    int64_t estimate; /* what the policy sees, >= 1 */
    int64_t deadline; /* 0: none */
    int64_t restart;  /* what a start costs, the first one included */
    uint32_t request; /* index into the requests */
    uint32_t gpus_milli;
    uint32_t priority; /* as in struct sluice_order_job */
    uint32_t account;
    uint32_t tier;    /* see struct sluice_candidate */
    uint32_t movable; /* 1: it can be saved, and moved */
};

/* Append only. */
enum sluice_replay_state {
    SLUICE_REPLAY_FUTURE = 0,
    SLUICE_REPLAY_PENDING = 1,
    SLUICE_REPLAY_RUNNING = 2,
    SLUICE_REPLAY_ENDED = 3,
    SLUICE_REPLAY_REJECTED = 4, /* would not fit an idle cluster */
};

struct sluice_replay_outcome {
    int64_t start; /* first start; -1: none */
    int64_t end;   /* -1: none */
    int64_t busy;  /* ticks that it held its place */
    uint32_t preemptions;
    enum sluice_replay_state state;
    uint32_t moves;
};

struct sluice_replay_sample {
    int64_t at;
    int64_t gpus_milli;           /* held */
    uint32_t running, pending;    /* jobs */
    uint32_t fragmented_permille; /* of idle GPU memory: what the average request cannot use; see docs/scheduling.md */
    uint32_t reserved;
};

struct sluice_replay;

/*
 * Room for the replay of `count` jobs in order of submission; requests and jobs are copied (but not a request's
 * `allowed`). The cluster must be idle, and outlive the replay with `fairshare` (NULL: without). Errors: RANGE and
 * INVALID with the job's index, those of sluice_request_check, sluice_order_score and sluice_guard_new, NO_MEMORY.
 */
enum sluice_error sluice_replay_new(struct sluice_cluster *cluster, const struct sluice_replay_config *config,
                                    const struct sluice_request *requests, uint32_t request_count,
                                    const struct sluice_replay_job *jobs, uint32_t count,
                                    struct sluice_fairshare *fairshare, struct sluice_replay **replay,
                                    struct sluice_error_text *text);
void sluice_replay_free(struct sluice_replay *replay);

/* Goes on for up to `events` arrivals and ends; *ended counts the jobs that have ended or been rejected, and reaches
 * the number of jobs at the end. No allocation. Errors: those of the placing and ordering calls. */
enum sluice_error sluice_replay_run(struct sluice_replay *replay, uint64_t events, uint32_t *ended,
                                    struct sluice_error_text *text);

/* The jobs' outcomes so far, and the samples: valid until the next call on the handle. */
const struct sluice_replay_outcome *sluice_replay_outcomes(const struct sluice_replay *replay);
const struct sluice_replay_sample *sluice_replay_samples(const struct sluice_replay *replay, uint32_t *count);
uint64_t sluice_replay_decisions(const struct sluice_replay *replay);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_CORE_H */
