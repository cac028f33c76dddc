/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * A bounded copy of slurmctld's job and partition lists, for threads that order and plan.
 *
 * sluice_queue_take() copies what ordering and planning need while the caller holds read locks, a few hundred
 * nanoseconds a job; everything slow happens afterwards, on the copy. Use:
 *
 *     struct sluice_queue *queue = sluice_queue_new(NULL);      once, in the thread
 *     sluice_queue_lock();                                      config, job, node and partition read locks
 *     sluice_queue_take(queue, visit, argument);                and what belongs to the same moment (mirror_sync)
 *     sluice_queue_unlock();
 *
 * Lock order: sluice_queue_lock() takes slurmctld's locks and must be called without any lock of Sluice that a hook
 * also takes; never from a hook, which runs under slurmctld's locks already. A queue belongs to one thread and keeps
 * its memory from take to take. This header includes no header of Slurm, so that ordering can be tested without it.
 */
#ifndef SLUICE_QUEUE_QUEUE_H
#define SLUICE_QUEUE_QUEUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct job_record;

enum {
    SLUICE_QUEUE_MAX_PENDING = 65536, /* records; a waiting array is one record */
    SLUICE_QUEUE_MAX_RUNNING = 65536,
    SLUICE_QUEUE_MAX_ENDED = 65536,
    SLUICE_QUEUE_MAX_NODE_SHARES = 1048576, /* of running jobs together */
    SLUICE_QUEUE_MAX_JOB_PARTITIONS = 8,    /* of one job; more are left out */
    SLUICE_QUEUE_MAX_PARTITIONS = 1024,
    SLUICE_QUEUE_MAX_NAMES = 65536, /* accounts, QOS and partitions together */
};

/* Index 0 of sluice_queue_name() is the empty string; it is also the name of all that exceed SLUICE_QUEUE_MAX_NAMES. */
typedef uint32_t sluice_queue_name_t;

/* Bits of sluice_queue_job.flags. */
enum {
    SLUICE_QUEUE_HELD = 1,            /* priority 0: by the user, an administrator or a gang */
    SLUICE_QUEUE_DEPENDENT = 2,       /* waits for other jobs */
    SLUICE_QUEUE_NOT_ELIGIBLE = 4,    /* its begin time is still to come (or Slurm has not set one yet) */
    SLUICE_QUEUE_HETEROGENEOUS = 8,   /* component of a heterogeneous job */
    SLUICE_QUEUE_PRIORITY_FIXED = 16, /* set directly: no factor changes it */
    SLUICE_QUEUE_RESERVATION = 32,    /* asks for a reservation */
    SLUICE_QUEUE_CONFIGURING = 64,    /* running jobs: nodes boot, or the prolog on the controller goes on */
    SLUICE_QUEUE_COMPLETING = 128,    /* ended, but nodes are not given back yet */
    SLUICE_QUEUE_SUSPENDED = 256,
    SLUICE_QUEUE_EXCLUSIVE = 512,  /* whole nodes */
    SLUICE_QUEUE_CUT = 2048,       /* its partitions or nodes were too many and were cut */
    SLUICE_QUEUE_RAN_OUT = 4096,   /* ended: ran to its own end or its limit, so that its run time says something */
    SLUICE_QUEUE_SITE_KEPT = 8192, /* an operator set its site factor (the order's thread says it) */
};

/* Slurm's own terms of a priority, weighted, as sprio shows them. */
enum sluice_queue_term {
    SLUICE_QUEUE_TERM_AGE = 0,
    SLUICE_QUEUE_TERM_ASSOC = 1,
    SLUICE_QUEUE_TERM_FAIR_SHARE = 2,
    SLUICE_QUEUE_TERM_JOB_SIZE = 3,
    SLUICE_QUEUE_TERM_PARTITION = 4,
    SLUICE_QUEUE_TERM_QOS = 5,
    SLUICE_QUEUE_TERM_TRES = 6,
    SLUICE_QUEUE_TERM_NICE = 7, /* negative: it lowers */
};
enum { SLUICE_QUEUE_TERM_COUNT = 8 };

/* One partition of a job, with the job's priority in it. */
struct sluice_queue_choice {
    uint32_t partition; /* index into queue.partitions */
    uint32_t priority;
};

/* One job. Times in seconds since 1970, 0: not set; durations in seconds. */
struct sluice_queue_job {
    uint32_t id;
    uint32_t array_id;   /* 0: no array */
    uint32_t array_task; /* UINT32_MAX: no array, or the record of all tasks that wait */
    uint32_t tasks;      /* how many tasks wait in this record; 1 for all others */
    uint32_t het_id;     /* 0: not part of a heterogeneous job */
    uint32_t uid;
    sluice_queue_name_t account;
    sluice_queue_name_t qos;
    uint64_t name_hash; /* of the job's name */
    uint32_t state;     /* Slurm's job_state */
    uint32_t reason;    /* Slurm's state_reason */
    uint32_t flags;     /* SLUICE_QUEUE_* */
    uint32_t priority;
    uint32_t site_factor; /* as in the job: value + NICE_OFFSET */
    int32_t slurm_term[SLUICE_QUEUE_TERM_COUNT];
    int64_t submit_s;
    int64_t eligible_s;
    int64_t start_s;         /* running and ended: when it started; pending: Slurm's own estimate */
    int64_t end_s;           /* running: latest end by its limit (INT64_MAX: none); ended: when it ended */
    int64_t deadline_s;      /* 0: none */
    int64_t limit_s;         /* run time at most; -1: none. The partition's default or maximum where none was asked */
    int64_t suspended_s;     /* in all */
    uint32_t gpus;           /* whole GPUs, asked or held; in all */
    uint64_t gpu_memory_mib; /* of shared GPUs (shards), asked or held; in all */
    uint32_t nodes_min, nodes_max;
    uint32_t first_choice, choices; /* in queue.choices; the first is the partition that the job is in now */
    uint32_t first_node, nodes;     /* in queue.nodes; running: which nodes, as indices into Slurm's node table */
};

struct sluice_queue_partition {
    sluice_queue_name_t name;
    uint32_t tier;   /* PriorityTier: higher ones are scheduled first */
    int64_t limit_s; /* longest run time; -1: none */
    bool up;         /* takes and starts jobs */
    bool usual;      /* the default one */
    bool exclusive_user;
    uint32_t oversubscribe; /* Slurm's max_share; 0: whole nodes */
    uint64_t *nodes;        /* bit n % 64 of word n / 64: Slurm's node n is in it; node_words words, all 0 at first */
};

struct sluice_queue {
    int64_t taken_s;       /* seconds since 1970 */
    uint64_t taken_us;     /* how long the copying took: time under the locks */
    uint64_t taken_cpu_us; /* of that, time on a CPU: the rest it was kept waiting for one */
    int64_t job_update_s;  /* Slurm's last_job_update at that moment */
    uint32_t node_count;   /* of Slurm's node table */
    size_t node_words;
    uint32_t pending_count, running_count, ended_count, partition_count;
    uint32_t left_out;                /* jobs that exceed the bounds above; 0 but in a flood */
    struct sluice_queue_job *pending; /* in the order of Slurm's list: by submission */
    struct sluice_queue_job *running; /* running, suspended, and completing ones that still hold nodes */
    struct sluice_queue_job *ended;   /* those that slurmctld still remembers (MinJobAge) */
    struct sluice_queue_partition *partitions;
    struct sluice_queue_choice *choices;
    uint32_t *nodes;
};

struct sluice_queue_config {
    uint32_t max_pending, max_running, max_ended; /* 0: the bounds above */
};

/* NULL when memory is short. `config` may be NULL. sluice_queue_free(NULL) does nothing. */
struct sluice_queue *sluice_queue_new(const struct sluice_queue_config *config);
void sluice_queue_free(struct sluice_queue *queue);

/* The slurmctld read locks that sluice_queue_take needs: configuration, jobs, nodes, partitions. Blocks while a writer
 * holds one: only for threads. sluice_queue_lock() is false, and nothing locked, while slurmctld is not in charge or
 * shuts down. */
bool sluice_queue_lock(void);
void sluice_queue_unlock(void);

/*
 * Called under the locks for each job that was copied, `entry` being where: pending first, then running. For callers
 * that need more of a job than struct sluice_queue_job has (a planner's request). Must be short and must not block.
 */
typedef void (*sluice_queue_visit)(void *argument, const struct sluice_queue *queue,
                                   const struct sluice_queue_job *entry, struct job_record *job);

/* Copy the lists; the caller holds the locks. Replaces what the queue held before. `visit` may be NULL. */
void sluice_queue_take(struct sluice_queue *queue, sluice_queue_visit visit, void *argument);

/* The text of a name; valid as long as the queue. Names keep their numbers from take to take. */
const char *sluice_queue_name(const struct sluice_queue *queue, sluice_queue_name_t name);

/* ---- how a queue is filled: by sluice_queue_take, and by tests and benchmarks, which have no slurmctld ---- */
/* Of a job's name, for sluice_queue_job.name_hash; 0 for NULL. */
uint64_t sluice_queue_hash(const char *text);
/* The number of a name, added where it is new; names are cut at 255 bytes. */
sluice_queue_name_t sluice_queue_intern(struct sluice_queue *queue, const char *name);
/* An empty pending, running or ended entry at the end of its list; NULL when that is full. */
struct sluice_queue_job *sluice_queue_add_pending(struct sluice_queue *queue);
struct sluice_queue_job *sluice_queue_add_running(struct sluice_queue *queue);
struct sluice_queue_job *sluice_queue_add_ended(struct sluice_queue *queue);
struct sluice_queue_partition *sluice_queue_add_partition(struct sluice_queue *queue);
/* Append to queue.choices and queue.nodes; false when full. */
bool sluice_queue_add_choice(struct sluice_queue *queue, uint32_t partition, uint32_t priority);
bool sluice_queue_add_node(struct sluice_queue *queue, uint32_t node);
/* Remove all jobs and partitions, keep the names. `node_count`: of Slurm's node table; sets node_words. */
void sluice_queue_clear(struct sluice_queue *queue, uint32_t node_count);

#endif /* SLUICE_QUEUE_QUEUE_H */
