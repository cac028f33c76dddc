/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gate's shared region: its layout, and how words in it are changed.
 *
 *   header with lock and undo log | wakes | workers | subjects | services | flows | replicas | tickets | hash buckets of
 *   subjects, services, flows and replicas | prefix blocks
 *
 * Rows are numbered from 1, so that 0 is "none" and zeroed memory is empty; row 0 of each table is not used.
 */
#ifndef SLUICE_CORE_GATE_REGION_H
#define SLUICE_CORE_GATE_REGION_H

#include "sluice/core.h"

#include <assert.h>
#include <pthread.h>
#include <stdalign.h>

#define GATE_MAGIC 0x6574616765636973u /* "sicegate", little-endian */
enum { GATE_VERSION = 3, GATE_LOG_ENTRIES = 2048, GATE_PREFIX_WAYS = 8 };

/* A doubly linked list of rows; the row has the link. */
struct gate_list {
    uint32_t first, last;
};
struct gate_link {
    uint32_t previous, next;
};

/* A node of a heap, least (hi, lo) first: gate_heap.c. */
struct gate_node {
    uint64_t hi, lo;
    uint32_t left, right, parent, rank;
};

/* What each row of a hash table begins with: gate_table.c. */
struct gate_row {
    uint64_t id;
    uint32_t kind;
    uint32_t next; /* in its bucket; in the list of free rows */
    struct gate_link idle;
    uint32_t is_idle;
    uint32_t in_use;
};

struct gate_table_state {
    uint32_t fresh; /* rows that were ever used: 1 to this one */
    uint32_t free;
    struct gate_list idle; /* rows that may be used for another id, the longest idle first */
};

/* A bucket's level is counted in amount * GATE_BUCKET_UNIT, so that it refills by its rate every microsecond. */
#define GATE_BUCKET_UNIT INT64_C(60000000)

struct gate_subject {
    struct gate_row row;
    struct sluice_gate_limit limit; /* bursts as they are */
    uint64_t at;                    /* when the levels were as they are */
    int64_t requests_level, tokens_level;
    uint64_t tokens;
    uint64_t refused;
    uint32_t open, waiting;
    uint32_t weight;
    uint32_t epoch; /* counts the times that it got a limit of tokens; 0: never had one */
    /* Where other gates share its limits. Its levels are whole requests and tokens, and do not refill. */
    uint64_t concurrent_part, queued_part;
    int64_t tokens_most, tokens_over; /* the most that its level may be, and what was settled beyond that; as levels */
    uint32_t shared, reserved;
};

/* Where a service's virtual time begins: more than the lead that any priority has. */
#define GATE_FIRST_VIRTUAL_TIME (UINT64_C(1) << 40)

struct gate_service {
    struct gate_row row;
    uint64_t virtual_time;
    uint64_t tokens_waiting, tokens_in_flight;
    struct gate_list arrivals; /* waiting tickets, the longest waiting first */
    struct gate_list replicas;
    struct gate_link dirty; /* in the header's list of services that may have a turn to give */
    uint32_t is_dirty;
    uint32_t serial; /* a number that no other service ever had: the flows' kind */
    uint32_t queue;  /* heap of flows that have waiting tickets */
    uint32_t waiting, in_flight;
    uint32_t free;                          /* places of replicas that are usable or last */
    uint32_t slots, replica_count, usables; /* likewise */
    uint32_t out;                           /* of the usable ones: slow, or on trial */
    uint32_t reserved;
    uint32_t known; /* replicas of any state */
};

/* What one tenant has in one service's queue. */
struct gate_flow {
    struct gate_row row; /* kind: the service's serial; id: the tenant's */
    struct gate_node node;
    uint64_t start; /* virtual start time of its next ticket */
    uint32_t queue; /* heap of its waiting tickets */
    uint32_t waiting, open;
    uint32_t epoch; /* counts the times that virtual time passed it while it was idle */
};

/* What answers of one kind took lately, and what may explain it: averages of binary logarithms. gate_pace.c. */
enum { GATE_PACE_REQUESTS = 3, GATE_PACE_TERMS = 4, GATE_PACES = 5 };
struct gate_pace {
    int32_t term[GATE_PACE_TERMS]; /* microseconds; tokens of the prompt, of the answer, requests that it had */
    uint32_t count;                /* of samples, as far as it matters */
    uint32_t second;               /* of the latest one */
};

struct gate_replica {
    struct gate_row row; /* id: its name */
    struct gate_link link;
    uint64_t tokens;
    uint64_t standing_us; /* in, on trial: since then; out: until then */
    uint32_t service;
    uint32_t slots, in_flight;
    uint32_t state;
    uint32_t removed;
    uint32_t generation; /* of the row's use, 16 bits */
    uint32_t standing;   /* enum sluice_gate_standing */
    uint32_t times_out;  /* one after the other */
    uint32_t slow_kind;  /* why it was put out: a row of `pace`, and by how much, as a binary logarithm */
    uint32_t slow_level;
    struct gate_pace pace[GATE_PACES];
};

enum gate_ticket_state {
    GATE_FREE = 0,
    GATE_WAITING = 1,   /* link: in its service's arrivals */
    GATE_GRANTED = 2,   /* link: in its worker's turns */
    GATE_IN_FLIGHT = 3, /* its worker knows its replica */
    GATE_EXPIRED = 4,   /* link: in its worker's expired ones */
    GATE_LATE = 5,      /* its worker knows that it expired */
};

struct gate_ticket {
    uint32_t state;      /* enum gate_ticket_state */
    uint32_t generation; /* how many tickets have ended in this row */
    uint32_t seat;
    uint32_t priority;
    uint32_t subjects[SLUICE_GATE_KINDS];
    uint32_t epochs[SLUICE_GATE_KINDS]; /* of the subjects whose bucket of tokens it charged; 0: not charged */
    uint32_t service, flow;
    uint32_t replica; /* while it is granted or in flight */
    uint32_t front;   /* it lost a replica */
    uint64_t tag[2];
    uint64_t tokens;
    uint64_t deadline_us, admitted_us, granted_us, waits_since_us;
    uint64_t sequence;
    uint64_t replica_name; /* its last one */
    uint64_t avoid;
    uint64_t cost;       /* what its flow was charged for its turn */
    uint32_t flow_epoch; /* when that was */
    uint32_t prefix_count;
    uint32_t prefix_found; /* blocks that its replica is known to have */
    uint32_t reserved;
    struct gate_link own; /* in its worker's tickets; next: in the list of free ones */
    struct gate_link link;
    struct gate_node queue, expiry;
    /* Not in the log: written by its worker alone, without the lock. */
    uint64_t prompt_tokens, completion_tokens;
    uint64_t prefix[SLUICE_GATE_MAX_PREFIX];
};

struct gate_worker {
    uint64_t start;
    uint32_t pid; /* 0: the seat is free */
    uint32_t sequence;
    uint32_t count;
    uint32_t reserved;
    struct gate_list tickets, turns, expired;
};

/* Hints, not in the log: torn or stale ones cost a worse choice of replica and nothing else. */
struct gate_prefix {
    uint64_t hash;
    uint64_t where; /* second it was last used << 32 | generation << 16 | replica; 0: empty */
};

struct gate_log_entry {
    uint64_t offset; /* of an aligned word in the region */
    uint64_t before;
};

struct gate_header {
    alignas(64) uint64_t magic; /* written last */
    uint32_t version;
    struct sluice_gate_shape shape;
    alignas(64) pthread_mutex_t mutex;
    alignas(64) uint64_t wakes; /* read without the lock */
    alignas(64) uint32_t log_count;
    uint32_t not_logged; /* the other half of the log's own word */
    uint64_t latest_us, sequence;
    uint64_t parts_until_us;
    uint64_t trial_us; /* when a replica that is out is to be tried; 0 or UINT64_MAX: none is */
    uint32_t serial, reserved;
    uint32_t ticket_fresh, ticket_free;
    uint32_t ticket_count;
    uint32_t expiry; /* heap of waiting tickets that have a deadline */
    struct gate_list dirty;
    struct gate_table_state subjects, services, flows, replicas;
    struct gate_log_entry log[GATE_LOG_ENTRIES];
};

/* A table of rows as this process sees it. */
struct gate_table {
    struct gate_table_state *state;
    char *rows;
    uint32_t *buckets;
    size_t stride;
    uint32_t capacity, mask;
};

/* A process's view of a region. The shape is a copy: it was checked once and cannot change under us. */
struct sluice_gate {
    struct sluice_gate_shape shape;
    struct gate_header *header;
    struct gate_worker *workers; /* by seat, from 0 */
    struct gate_subject *subjects;
    struct gate_service *services;
    struct gate_flow *flows;
    struct gate_replica *replicas;
    struct gate_ticket *tickets;
    struct gate_prefix *prefixes;
    uint64_t prefix_sets; /* less 1 */
    struct gate_table subject_table, service_table, flow_table, replica_table;
    bool overflow; /* the log was too small: what this call does is undone */
};

/* The compiler keeps the order of what is before and after; processors do so for a process that was killed. */
static inline void gate_order(void)
{
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

/* Remembers the aligned word that `at` lies in, before it changes. False: there is no room, it must not change. */
static inline bool gate_save(struct sluice_gate *gate, const void *at)
{
    struct gate_header *header = gate->header;
    uint64_t offset = (uint64_t)((const char *)at - (const char *)header) & ~UINT64_C(7);
    uint32_t count = header->log_count;
    if (count >= GATE_LOG_ENTRIES) {
        gate->overflow = true;
        return false;
    }
    struct gate_log_entry *entry = &header->log[count];
    entry->offset = offset;
    __builtin_memcpy(&entry->before, (const char *)header + offset, sizeof entry->before);
    gate_order();
    header->log_count = count + 1;
    gate_order();
    return true;
}

static inline void gate_put32(struct sluice_gate *gate, uint32_t *at, uint32_t value)
{
    if (*at != value && gate_save(gate, at))
        *at = value;
}

static inline void gate_put64(struct sluice_gate *gate, uint64_t *at, uint64_t value)
{
    if (*at != value && gate_save(gate, at))
        *at = value;
}

static inline void gate_put_signed(struct sluice_gate *gate, int64_t *at, int64_t value)
{
    if (*at != value && gate_save(gate, at))
        *at = value;
}

/* Unsigned sums that wrap: `by` may be a negative number. */
static inline void gate_add32(struct sluice_gate *gate, uint32_t *at, uint32_t by)
{
    gate_put32(gate, at, *at + by);
}

static inline void gate_add64(struct sluice_gate *gate, uint64_t *at, uint64_t by)
{
    gate_put64(gate, at, *at + by);
}

#endif
