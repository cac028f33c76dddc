/* SPDX-License-Identifier: Apache-2.0 */
/* The benchmarks' inner loops, timed in C so that Python's own time is not measured. Times in nanoseconds. */
#ifndef SLUICE_BENCH_H
#define SLUICE_BENCH_H

#include "sluice/core.h"

/* What one reading of the clock costs: the least difference between two that follow each other. */
uint64_t sluice_bench_clock_ns(void);

/* ======== memory ledger ======== */

/* How the shared figures are protected. */
enum sluice_bench_guard {
    SLUICE_BENCH_LEDGER = 0,
    SLUICE_BENCH_ROBUST_MUTEX = 1, /* counters under one process-shared robust pthread mutex */
};

/*
 * `processes` processes, started together, each time `pairs` pairs of allocation (reserve and commit) and free of
 * `bytes` on one device, all within its limit. times[process * pairs + i] receives the time of a process's i-th pair,
 * one reading of the clock included; *elapsed_ns from start to the last one's end. Errors: SYSTEM (fork, mmap),
 * CORRUPT (the figures do not add up afterwards).
 */
enum sluice_error sluice_bench_ledger(enum sluice_bench_guard guard, uint32_t processes, uint32_t pairs, uint64_t bytes,
                                      uint64_t *times, uint64_t *elapsed_ns, struct sluice_error_text *text);

/*
 * `processes` processes allocate and free without end on one device, one random one of them is killed `kills` times at
 * a random moment, reaped and replaced; at last all of them. *lost: bytes still charged afterwards, or charged twice,
 * over all owners, processes and devices, which must be 0; *reaped: bytes that the dead left behind.
 */
enum sluice_error sluice_bench_ledger_kills(uint32_t processes, uint32_t kills, uint64_t seed, uint64_t *lost,
                                            uint64_t *reaped, struct sluice_error_text *text);

/* ======== request gate ======== */

/*
 * `processes` processes, started together, each a worker of one gate, each time `rounds` requests of one tenant and
 * service: admit, turn, settle, with limits of every kind on key, user, tenant and service, `replicas` replicas with free
 * places, four blocks of prefix, and `waiting` tickets of other tenants in another service's queue. times[process *
 * rounds + i] receives the time of a process's i-th request, one reading of the clock included; *elapsed_ns from start to
 * the last one's end. Errors: RANGE, SYSTEM (fork, mmap), CORRUPT (the audit, or something is left over).
 */
enum sluice_error sluice_bench_gate(uint32_t processes, uint32_t rounds, uint32_t replicas, uint32_t waiting,
                                    uint64_t *times, uint64_t *elapsed_ns, struct sluice_error_text *text);

/* ======== preloaded limiter ======== */

enum sluice_bench_cuda_loop {
    SLUICE_BENCH_CUDA_PAIR = 0,       /* 2 MiB allocated and freed */
    SLUICE_BENCH_CUDA_SMALL_PAIR = 1, /* 1 KiB */
    SLUICE_BENCH_CUDA_POOL_PAIR = 2,  /* 2 MiB from a pool that keeps them */
    SLUICE_BENCH_CUDA_LAUNCHES = 3,   /* 64 times a kernel and a small fill, then waiting for them */
};

/*
 * Do one of these on device 0 `count` times as a program would, and `count` times past what is preloaded, in turn,
 * through the libcuda.so.1 that the loader finds. times[i] and bare_times[i] receive how long the i-th took, a reading
 * of the clock included. Errors: SYSTEM (no driver, or what it says).
 */
enum sluice_error sluice_bench_cuda(enum sluice_bench_cuda_loop loop, uint32_t count, uint64_t *times,
                                    uint64_t *bare_times, struct sluice_error_text *text);

enum sluice_bench_driver { SLUICE_BENCH_CUDA, SLUICE_BENCH_HIP, SLUICE_BENCH_LEVEL_ZERO };

/*
 * `blocks` times: `launches` kernels on device 0, each after `work` rounds of a loop that does nothing else, and waiting
 * for them. times[i] receives how long the i-th block took. Errors: as above.
 */
enum sluice_error sluice_bench_launches(enum sluice_bench_driver driver, uint32_t blocks, uint32_t launches,
                                        uint32_t work, uint64_t *times, struct sluice_error_text *text);

/* ======== placement ======== */

/*
 * Place and commit one request after another; nothing departs. arrivals[i] says which of `requests` is the i-th, its
 * seed is i; placed[i] receives whether it found a place. Errors: RANGE (an arrival beyond the requests), and those of
 * sluice_start but NO_PLACE and NEVER.
 */
enum sluice_error sluice_bench_replay(struct sluice_cluster *cluster, enum sluice_policy policy,
                                      const struct sluice_request *requests, uint32_t request_count,
                                      const uint32_t *arrivals, uint32_t arrival_count, bool *placed,
                                      uint64_t *elapsed_ns, struct sluice_error_text *text);

/* A replay in which jobs move; what it finds out is zeroed by the caller. */
struct sluice_bench_moves {
    const bool *movable;                    /* of each arrival, whether it can be saved */
    const int64_t *gains;                   /* of each request: what its start is worth */
    const int64_t *costs;                   /* and what moving it costs */
    struct sluice_compaction_limits limits; /* its gain is that of the arrival */
    uint32_t budget;                        /* moves in all */
    uint32_t moved;                         /* arrivals that moved, each once */
    uint32_t plans, started;                /* arrivals that a plan was looked for, and found for */
    uint64_t plan_ns, longest_plan_ns;
};

/*
 * As sluice_bench_replay, but an arrival that finds no place starts, where the budget allows, by moving others that have
 * not moved yet: sluice_compaction_plan. Errors: also CORRUPT (a plan that does not hold).
 */
enum sluice_error sluice_bench_moves(struct sluice_cluster *cluster, enum sluice_policy policy,
                                     const struct sluice_request *requests, uint32_t request_count,
                                     const uint32_t *arrivals, uint32_t arrival_count, struct sluice_bench_moves *moves,
                                     bool *placed, struct sluice_error_text *text);

/* What sluice_bench_steady measures; zeroed by the caller but for the first three. */
struct sluice_bench_steady_result {
    uint32_t *start_ns; /* time of each decision, placing and committing, one reading of the clock included; or NULL */
    uint32_t *release_ns; /* of each release, at most `decisions` of them; or NULL */
    bool check;           /* compare each decision with the best of scoring every node; then nothing is timed */
    uint32_t releases;
    uint32_t refused;      /* decisions that found no place */
    uint32_t wrong;        /* decisions that differ from the best score, its node of lowest rank, or its GPUs */
    uint32_t use_permille; /* mean share of GPU memory in use */
};

/*
 * `decisions` decisions while `use_permille` of the GPU memory is in use: fill the cluster, then release random
 * allocations to make room for each next request. Requests are drawn from `pool`, their GPU memory and host memory
 * blurred to between half and one and a half, to the MiB. Errors: RANGE, NO_MEMORY, and those of sluice_start.
 */
enum sluice_error sluice_bench_steady(struct sluice_cluster *cluster, enum sluice_policy policy,
                                      const struct sluice_request *pool, uint32_t pool_count, uint32_t use_permille,
                                      uint32_t decisions, uint64_t seed, struct sluice_bench_steady_result *result,
                                      struct sluice_error_text *text);

/* How many of the first `decisions` requests that sluice_bench_steady draws with this seed are different from all
 * before them. */
enum sluice_error sluice_bench_shapes(const struct sluice_request *pool, uint32_t pool_count, uint32_t decisions,
                                      uint64_t seed, uint32_t *distinct, struct sluice_error_text *text);

/* ======== gangs ======== */

/* What sluice_bench_gang measures; the arrays are the caller's, one entry for each decision. */
struct sluice_bench_gang_result {
    uint32_t *start_ns;   /* time to place and commit a gang, one reading of the clock included */
    uint32_t *release_ns; /* time to give it back */
    uint32_t *leaves;     /* leaf switches that it used */
    bool *interrupted;    /* the system ran another thread during its start */
    uint32_t started;     /* how many entries are set; zeroed by the caller, as what follows */
    uint32_t refused;     /* gangs that found no place */
};

/*
 * Start and release `decisions` gangs, one at a time, on a cluster of which a share of `busy_permille` of the nodes,
 * others each time, has a GPU in use. With `node_by_node` the gang's nodes are placed one after another, as by a
 * scheduler that knows no gangs: the peer. Errors: NO_MEMORY, CORRUPT (the model contradicts itself afterwards), and
 * those of sluice_start but NO_PLACE.
 */
enum sluice_error sluice_bench_gang(struct sluice_cluster *cluster, enum sluice_policy policy,
                                    const struct sluice_request *gang, bool node_by_node, uint32_t busy_permille,
                                    uint32_t decisions, uint64_t seed, struct sluice_bench_gang_result *result,
                                    struct sluice_error_text *text);

/* ======== GPUs near NICs ======== */

/* What sluice_bench_nics measures; the arrays are the caller's, one entry for each decision. One reading of the clock is
 * in each time. */
struct sluice_bench_nics_result {
    uint32_t *without_ns; /* sluice_place of the request without its NICs */
    uint32_t *with_ns;    /* ... and with them, on the same cluster; every other time before it */
    uint64_t wanted;      /* pairs that there would be, were all near; zeroed by the caller, as what follows */
    uint64_t pairs;       /* by sluice_place */
    uint64_t node_pairs;  /* the most that are possible on the node that the policy chooses without NICs */
    uint64_t elsewhere;   /* placements on another node than that */
};

/*
 * Place and commit `decisions` jobs of 1 to 8 GPUs with a NIC for each `gpus_per_nic`, on a cluster whose shapes have 8
 * GPUs and as many NICs at least; of eight jobs, one has GPUs only and one NICs only. Random ones end to make room.
 * Errors: NO_MEMORY, RANGE (a node has fewer than 8 GPUs or NICs), and those of the calls.
 */
enum sluice_error sluice_bench_nics(struct sluice_cluster *cluster, uint32_t gpus_per_nic, uint32_t decisions,
                                    uint64_t seed, struct sluice_bench_nics_result *result,
                                    struct sluice_error_text *text);

/* ======== load ======== */

/* One job of a load; times in seconds. */
struct sluice_bench_job {
    uint64_t arrival;
    uint64_t duration; /* from its start */
    uint32_t request;  /* index; for one node */
};

/* What sluice_bench_load measures; sums over the measured span, zeroed by the caller but for `wait`. */
struct sluice_bench_load_result {
    uint64_t *wait;    /* per job: seconds from arrival to start, UINT64_MAX where it still waits at the end */
    double used_mib_s; /* GPU memory in use, times seconds */
    double used_cpu_s; /* CPUs in use, times seconds */
    double waiting_s;  /* waiting jobs, times seconds */
    uint32_t waiting;  /* jobs that wait at the end */
};

/*
 * Let jobs, in order of arrival, run on an empty cluster. Those that wait are tried in order of arrival whenever jobs
 * end, and may be overtaken by others that find a place, as under backfill; but for one that waited longer than
 * `patience` seconds, and is the first of its request, a node is set aside where no other job is placed until it has
 * started; at most `kept_most` nodes at a time. Measures from `from` until `until`, when it ends. Errors: RANGE (an
 * unknown request, jobs out of order), NO_MEMORY, CORRUPT, and those of sluice_start but NO_PLACE.
 */
enum sluice_error sluice_bench_load(struct sluice_cluster *cluster, enum sluice_policy policy,
                                    const struct sluice_request *requests, uint32_t request_count,
                                    const struct sluice_bench_job *jobs, uint32_t job_count, uint64_t patience,
                                    uint32_t kept_most, uint64_t from, uint64_t until,
                                    struct sluice_bench_load_result *result, struct sluice_error_text *text);

/* ======== backfill ======== */

/*
 * A conservative plan by sluice_backfill_plan's rules, for jobs without groups, preferences, limits to nodes or GPUs in
 * total, made without its index: every node is asked again for every job. start_s[i] is job i's; the time excludes
 * set-up.
 */
enum sluice_error sluice_bench_backfill_scan(const struct sluice_cluster *cluster, int64_t now_s,
                                             const struct sluice_backfill_running *running, uint32_t running_count,
                                             const struct sluice_backfill_job *jobs, uint32_t job_count,
                                             int64_t *start_s, uint64_t *elapsed_ns, struct sluice_error_text *text);

#endif
