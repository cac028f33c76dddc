/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Gang groups: jobs of one user that were submitted with the same --gang=NAME:COUNT start together or not at all.
 *
 *   - A gang is (user, NAME, COUNT). Its members, in the order of their job ids, fill one *instance* of COUNT members
 *     after the other; each task of an array is a member. So a name may be used again, also while an earlier instance
 *     of it runs.
 *   - Members wait held by the administrator (priority 0, reason "Gang NAME: ..."), which their users cannot release;
 *     the placement hook refuses a member that an operator released.
 *   - When the plan has room for all members of an instance now, the planner releases and starts them while it holds
 *     slurmctld's write locks once. What has nodes stays CONFIGURING in an asynchronous PrologSlurmctld until all have:
 *     no prolog and no script of a member runs before. Members whose start Slurm refused (an accounting limit that
 *     another member used up, a node lost at that moment) are tried again until the policy's gang-limit-s; then all are
 *     requeued (Slurm keeps a requeued job waiting for two minutes). Those that cannot be requeued, srun's and
 *     salloc's, are cancelled with a message.
 *   - An incomplete instance is given up some time after its last member was submitted (the policy's
 *     gang-incomplete-s): its members stay held with a reason that says so, and go on when the rest comes; or they are
 *     cancelled (gang-incomplete-cancel).
 *   - Everything needed after a restart or failover is in the job records themselves: the option, the hold and its
 *     reason, CONFIGURING. There is no file of gangs.
 *
 * gang.c is portable: membership and texts. gang_slurm.c holds, starts, releases and requeues.
 */
#ifndef SLUICE_PLANNER_GANG_H
#define SLUICE_PLANNER_GANG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "rules/rules.h"

enum {
    SLUICE_GANG_MAX_MEMBERS = 256, /* the core's SLUICE_MAX_GROUP */
    SLUICE_GANG_REASON_SIZE = 192,
};

/* Every reason of a gang's member begins with this: it identifies our holds. */
#define SLUICE_GANG_MARK "Gang "

/* ---- for the plugins: take slurmctld's job records ---- */
struct job_record;

/* Must this job's start be refused? True for a gang's member unless the planner is starting its instance at this
 * moment. Locks: job read. O(its spank options). False at levels below place. */
bool sluice_gang_refuses(const struct job_record *job);

/*
 * PrologSlurmctld of a job, with the job write lock. True if the job has to stay CONFIGURING. When all members have
 * nodes `go` is called for it, with the write locks, to run the site's own PrologSlurmctld; if that is false, nothing
 * runs in the background for the job, `done` is called with status 0, without locks. When the members are requeued only
 * `done` is.
 */
struct sluice_gang_prolog {
    bool (*go)(struct job_record *job);
    void (*done)(int status, uint32_t job_id, bool timed_out);
};
bool sluice_gang_prolog(struct job_record *job, const struct sluice_gang_prolog *prolog);

/* ---- figures ---- */
struct sluice_gang_counts {
    uint64_t started;   /* instances that all started */
    uint64_t requeued;  /* instances that gave their nodes back */
    uint64_t cancelled; /* instances that stayed incomplete for too long */
    uint64_t members_started;
    uint64_t gpu_seconds_held; /* GPUs times seconds between allocation and release or requeue, of all members */
    uint32_t waiting;          /* members that wait now */
    uint32_t configuring;      /* members that have nodes and wait for others */
};
struct sluice_gang_counts sluice_gang_counts(void);

/* ---- membership: portable ---- */

/* Append only. */
enum sluice_gang_phase {
    SLUICE_GANG_INCOMPLETE = 0, /* too few members have been submitted */
    SLUICE_GANG_BLOCKED = 1,    /* a member cannot start now, whatever is free: held, dependent, not eligible */
    SLUICE_GANG_READY = 2,      /* may start as soon as there is room */
    SLUICE_GANG_STARTING = 3,   /* some members have nodes */
    SLUICE_GANG_GIVEN_UP = 4,   /* too few members, and none was submitted for as long as the policy waits */
};

/* One job record that belongs to a gang, as the picture has it. */
struct sluice_gang_member {
    uint32_t uid;
    uint32_t count; /* the gang's */
    char name[SLUICE_GANG_NAME_MAX + 1];
    uint32_t job_id;     /* the order of members */
    int64_t submitted_s; /* seconds since 1970 */
    uint32_t tasks;      /* how many members the record is: 1, or an array's waiting tasks */
    bool configuring;    /* has nodes and is kept from running */
    bool blocked;        /* waits, and could not start whatever is free ... */
    bool unplaced;       /* ... as the core cannot express its request */
    uint32_t index;      /* the caller's */
};

struct sluice_gang_instance {
    uint32_t first, members; /* in the sorted array; records */
    uint32_t last_tasks;     /* how many tasks of the last record belong to this instance */
    uint32_t present;        /* members there are, up to count */
    uint32_t configuring;    /* of them */
    uint32_t blocked;        /* of them */
    uint32_t unplaced;       /* of those */
    int64_t newest_s;        /* when its last member was submitted */
    enum sluice_gang_phase phase;
};

/*
 * Sort the members (by user, name, count; those with nodes first; then by job id) and form instances. Members with
 * nodes belong to the first instance of their gang. An array that is cut appears once more, in the next instance:
 * `members` must have room for `capacity` records. Returns how many instances there are, at most `room`; *count is how
 * many records there are now. O(n log n).
 */
uint32_t sluice_gang_form(struct sluice_gang_member *members, uint32_t *count, uint32_t capacity,
                          struct sluice_gang_instance *instances, uint32_t room);

/* Incomplete instances whose last member came `after_s` or longer ago are SLUICE_GANG_GIVEN_UP; 0: none. */
void sluice_gang_give_up(struct sluice_gang_instance *instances, uint32_t count, int64_t now_s, uint32_t after_s);

/* What squeue shows of a waiting member. Returns `text`. */
const char *sluice_gang_reason(const struct sluice_gang_member *member, const struct sluice_gang_instance *instance,
                               char *text, size_t size);

#endif
