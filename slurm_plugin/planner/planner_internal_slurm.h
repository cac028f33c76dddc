/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * What plan_slurm.c (the planner's thread), picture_slurm.c, start_slurm.c (starting jobs) and gang_slurm.c (gangs in slurmctld) need of
 * each other. All of it is for the planner's thread alone, but for the locks of start_slurm.c.
 */
#ifndef SLUICE_PLANNER_PLANNER_INTERNAL_SLURM_H
#define SLUICE_PLANNER_PLANNER_INTERNAL_SLURM_H

#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

#include "mirror/mirror.h"
#include "planner/emptying.h"
#include "planner/gang.h"
#include "planner/plan.h"
#include "planner/watts_slurm.h"
#include "queue/queue.h"
#include "rules/rules.h"
#include "runtime/runtime.h"
#include "sluice/loss.h"

/* ---- start_slurm.c ---- */

/* Why Slurm would not start a job. Append only. */
enum sluice_start {
    SLUICE_START_DONE = 0,
    SLUICE_START_GONE = 1,    /* not there any more, or not waiting */
    SLUICE_START_LIMITED = 2, /* limits, licences, dependencies: room would not help */
    SLUICE_START_BUSY = 3,    /* no nodes */
};

/* slurmctld's write locks for starting jobs, as sched/backfill takes them. False, and nothing locked: it shuts down. */
bool sluice_start_lock(void);
void sluice_start_unlock(void);

/* Start a waiting job now, in this partition, as sched/backfill does: every check of Slurm's own, its allocation, its
 * launch. Not on nodes that are `kept` for others; NULL: none is. The write locks are held. */
enum sluice_start sluice_start_job(job_record_t *job, const char *partition, const bitstr_t *kept);

/* ---- accrual_slurm.c ---- */

/* Is this waiting job missing in Slurm's accrue_cnt (MaxJobsAccrue), though it waits? Under read locks. */
bool sluice_accrual_lost(const job_record_t *job);
/* Count all such jobs again. Takes the write locks. */
void sluice_accrual_restore_all(void);

/* ---- picture_slurm.c: queue and cluster at one moment ---- */

/* What is known of a pending job in addition to the queue's entry. */
struct sluice_picture_job {
    bool usable;
    bool estimated;              /* stock chooses its nodes: planned by what it takes at the least */
    uint32_t tasks;              /* that may start: of an array as many as its user lets run at once */
    enum sluice_job_stock stock; /* why only Slurm finds it nodes */
    uint32_t rank;
    int64_t begin_s; /* not before */
    struct sluice_request request;
    struct sluice_job_watts power;
    uint32_t words; /* of its allowed nodes: offset in the picture's `words` */

    /* Of one that only Slurm finds nodes for, if budgets count it: its GPUs on the nodes that sched/backfill keeps. */
    uint32_t drawing, drawing_count; /* in the picture's `drawing` */
    int64_t drawing_from_s;
    bool short_of_watts; /* the plan says so; set by the planner */
};

/* Nodes that a reservation of Slurm's keeps from a moment on. */
struct sluice_window {
    int64_t start_s;
    bitstr_t *nodes;
};

/* Nodes that sched/backfill keeps for a job that is not in the plan. */
struct sluice_hold {
    struct sluice_plan_place place;
    uint32_t het_id;         /* whose component it is; 0: of none */
    int64_t pass_s;          /* when the pass of sched/backfill began that expects this start */
    int64_t start_s, seen_s; /* when it is expected to start, and when that was last seen in its record */
    int64_t first_start_s;   /* the earliest start expected since it is counted; 0: none yet */
    uint32_t starts;         /* how often another one was expected since */
    int64_t lapsed_until_s;  /* nothing is kept until then: it did not start when it was expected to */
    bool waits;              /* in the picture that is being taken */
    bool short_of_watts;     /* in the last plan */
    char *names;             /* of `nodes` */
    bool room_came;          /* on nodes that it may use, and that pass did not know; such nodes are kept, too */
    uint64_t nodes[];        /* node_words, and as many for nodes on which room came */
};

/* A node that only one user's jobs may use, as an --exclusive=user job of that user is there. */
struct sluice_owned_node {
    uint32_t node, uid;
};

/* The most that a node of a partition has. */
struct sluice_largest_node {
    struct sluice_node_size size;
    bool known; /* in this picture */
};

/* A running job that can be moved: it has saved in this run. */
struct sluice_movable_job {
    uint32_t index; /* in the queue's running jobs */
    uint64_t allocation;
    int64_t saved_s;
    struct sluice_stake stake;
    struct sluice_picture_job sought;
};

/* A node whose jobs are to leave it: it drains, or maintenance begins soon; or of which that is only asked. */
struct sluice_leaving_node {
    uint32_t node;
    int64_t needed_s;   /* when it is to be empty */
    bool leaves;        /* it is not only asked about */
    bool ordered;       /* an administrator empties it: each job is decided upon by itself, by ... */
    bool asked;         /* `sluice node empty` waits for an answer: nothing is done until it has it */
    int64_t deadline_s; /* 0: none */
    char name[SLUICE_EMPTY_NODE];
};

/* A job on a node that is ordered to be empty, or asked about. */
struct sluice_leaving_job {
    uint32_t leaving, job_id; /* index of the node */
    int64_t end_s;            /* INT64_MAX: no limit */
    enum sluice_leave_why bar;
};

/* Nodes of a move that is under way. */
struct sluice_kept_nodes {
    const char *names;
    uint32_t words; /* offset in the picture's `words` */
};

enum { SLUICE_MOST_MOVABLES = 1024 }; /* running jobs that are looked at for moves */
enum { SLUICE_PICTURE_WINDOWS = 64 }; /* Slurm's reservations that are distinguished */

struct sluice_picture {
    struct sluice_mirror *mirror;
    struct sluice_queue *queue;
    int64_t now_s;
    uint64_t generation;                /* of the mirror */
    struct sluice_picture_job *pending; /* as in the queue */
    uint32_t pending_room;
    uint64_t *words; /* allowed nodes of all pending jobs */
    uint32_t words_used, words_room;
    uint64_t *bitmaps; /* the memory of the next four */
    uint32_t bitmap_room;
    uint64_t *usable, *busy, *asleep; /* nodes; node_words each */
    uint64_t *features;               /* 3 * node_words */
    uint32_t node_words;
    struct sluice_owned_node *owned;
    uint32_t owned_count, owned_room;
    struct sluice_window windows[SLUICE_PICTURE_WINDOWS];
    uint32_t window_count;
    struct sluice_hold **holds; /* kept from picture to picture: each of backfill's passes clears them before it ends */
    uint32_t hold_count, hold_room;
    struct sluice_node_size *sizes; /* of nodes, as the mirror was made */
    uint32_t size_count, size_room;
    uint64_t size_generation;
    struct sluice_largest_node *largest; /* by partition */
    uint32_t largest_count, largest_room;
    struct sluice_backfill_running *running;
    uint32_t running_count, running_room;
    const struct sluice_rules *rules;          /* of the picture that is being taken, as ... */
    const struct sluice_job_times *saves;      /* ... when jobs saved; NULL: no job is moved ... */
    const struct sluice_job_times *save_times; /* ... and how long saves take */
    struct sluice_movable_job *movables;
    uint32_t movable_count, movable_room;
    struct sluice_leaving_node *leaving;
    uint32_t leaving_count, leaving_room;
    uint32_t told_count; /* of them: ordered, or asked about */
    struct sluice_leaving_job *leavers;
    uint32_t leaver_count, leaver_room;
    struct sluice_kept_nodes kept[2 * SLUICE_COMPACTION_MAX_MOVES];
    uint32_t kept_count;
    struct sluice_watts_basis watts; /* of the picture that is being taken; `rules` NULL: no budgets */
    struct sluice_bound_budgets budgets;
    struct sluice_part *drawing;
    uint32_t drawing_count, drawing_room;
    bool failed_memory;
    bool accrual_lost; /* of some job */
};

/* False: no memory; sluice_picture_free() then frees what there is. */
bool sluice_picture_new(struct sluice_picture *picture, struct sluice_error_text *text);
void sluice_picture_free(struct sluice_picture *picture);

/* Take it again, under slurmctld's read locks for `lock_us`. Starts from now on count against the plan that `planner`
 * makes of it. False: slurmctld shuts down, or there is no memory, which is logged. */
bool sluice_picture_take(struct sluice_picture *picture, struct sluice_planner *planner,
                         const struct sluice_rules *rules, const struct sluice_draws *draws, uint64_t *lock_us);

/*
 * Where in picture->words the nodes are that a job of `limit_s` may use of those at `words`: without those that
 * sched/backfill keeps for jobs before it in the order, unless it would have ended by then; the hook lets those start
 * whatever is reserved there for jobs after them. Of heterogeneous jobs whose components are not expected on nodes of
 * their own, also those on which room came since, until sched/backfill has looked. picture->words may move. Without memory
 * nothing is kept.
 */
uint32_t sluice_picture_keep_out(struct sluice_picture *picture, const struct sluice_plan_place *place, int64_t limit_s,
                                 uint32_t words);

/* A job that sched/backfill keeps nodes for waits for watts of a budget, by the plan: it is not expected in vain. */
void sluice_picture_short_of_watts(struct sluice_picture *picture, uint32_t index);

/* Look nodes up, for moves; under the read locks. */
void sluice_picture_keep(struct sluice_picture *picture, char *names);
/* Where in picture->words the nodes are that both have. Without memory: `words`. */
uint32_t sluice_picture_common(struct sluice_picture *picture, uint32_t words, uint32_t others);
/* How many nodes there are at `words`. */
uint32_t sluice_picture_count(const struct sluice_picture *picture, uint32_t words);

/* How long a job may run if it starts now, in seconds. */
int64_t sluice_picture_limit(const struct sluice_picture *picture, const struct sluice_queue_job *entry);

/* ---- moves_slurm.c, whose other half is moves_slurm.h: the picture has the nodes and jobs of moves under way ---- */

void sluice_moving_see(struct sluice_picture *picture);
/* Is the node ordered to be empty, or asked about? */
bool sluice_leaving_is_told(const struct sluice_leaving_node *leaving);
bool sluice_moving_has(uint32_t job_id);
/* The nodes that are asked about; NULL: none. */
const struct sluice_empty_asks *sluice_moving_asks(void);

/* ---- outlook_slurm.c: when GPUs come free, for submissions with a deadline (admission/outlook.h) ---- */

/* What an outlook is made of: the plan that was just made, and the picture that it was made from. */
struct sluice_outlook_basis {
    const struct sluice_plan *plan;
    const struct sluice_picture *picture;
    const struct sluice_plan_job *jobs; /* the plan's, in its order */
    uint32_t job_count;
    int64_t valid_s;
};

/* Publish one, where it is time. Returns how long that took, in microseconds. */
uint64_t sluice_outlook_follow(const struct sluice_outlook_basis *basis);
/* None is in force from now on, and nothing is kept. */
void sluice_outlook_forget(void);

/* ---- gang_slurm.c ---- */

/* A gang instance that is to be planned as a group. */
struct sluice_gang_unit {
    uint32_t instance; /* index */
    uint32_t group;    /* not 0 */
    uint32_t priority; /* of its first member; UINT32_MAX while some of it have nodes */
    uint32_t job_id;   /* its first member */
};

/* A picture begins; each job of the queue is shown, under the read locks; the picture is complete. `usable(index)` says
 * whether the planner could make a request of the pending job. Memory failures leave members out, which then wait. */
void sluice_gang_picture_begin(int64_t now_s, const struct sluice_rules *rules);
void sluice_gang_picture_job(const struct sluice_queue_job *entry, uint32_t index, bool pending, bool usable,
                             const job_record_t *job);
void sluice_gang_picture_end(void);

/* Is this pending job, by its index in the queue, a member of a gang? */
bool sluice_gang_is_member(uint32_t index);

/* The instances that can be planned now; valid until the next picture. */
const struct sluice_gang_unit *sluice_gang_units(uint32_t *count);
/* The index in the queue of the i-th task of a unit that has no nodes yet; false past the last. */
bool sluice_gang_unit_task(const struct sluice_gang_unit *unit, uint32_t i, uint32_t *index);

/* Hold, start, release, requeue: as the picture and the plan require. Takes the write locks where there is something to
 * do. `partition(job_id)` names the partition that a job was planned in. */
void sluice_gang_act(const struct sluice_plan *plan, const char *(*partition)(uint32_t job_id));

/* Levels below place: no member is held or kept CONFIGURING. False: this slurmctld is not in charge. */
bool sluice_gang_abandon(void);
void sluice_gang_fini(void);

#endif
