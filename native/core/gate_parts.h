/* SPDX-License-Identifier: Apache-2.0 */
/* What the gate's files do for each other. All of it under the lock, between gate_lock and gate_unlock. */
#ifndef SLUICE_CORE_GATE_PARTS_H
#define SLUICE_CORE_GATE_PARTS_H

#include "gate_region.h"

/* ---- gate_lock.c ---- */

/* Take the lock; undoes first what a process that died in it had begun. Errors: CORRUPT. */
enum sluice_error gate_lock(struct sluice_gate *gate, struct sluice_error_text *text);
/* What was done since the last step, or the lock, is done for good; CORRUPT: undone, as the log was too small. */
enum sluice_error gate_step(struct sluice_gate *gate, struct sluice_error_text *text);
/* Undo what was done since the last step. */
void gate_undo(struct sluice_gate *gate);
/* Step, or undo where `error` is set, and give the lock back; the first error. */
enum sluice_error gate_unlock(struct sluice_gate *gate, enum sluice_error error, struct sluice_error_text *text);
/* Step; every so many of them let others have the lock. */
enum sluice_error gate_pause(struct sluice_gate *gate, uint32_t *steps, struct sluice_error_text *text);
/* The time of this call: never before an earlier call's. */
uint64_t gate_time(struct sluice_gate *gate, uint64_t now_us);
/* Set a worker's bit of wakes, or clear it. */
void gate_wake(struct sluice_gate *gate, uint32_t seat, bool wake);
/* The worker that `worker` names, or NULL; fail_worker says so. */
struct gate_worker *gate_find_worker(struct sluice_gate *gate, uint32_t worker);
enum sluice_error gate_fail_worker(uint32_t worker, struct sluice_error_text *text);

/* ---- gate_list.c: links are at `link` of rows that are `stride` bytes long, and begin at `rows` ---- */

struct gate_links {
    char *rows;
    size_t stride, link;
};
void gate_list_append(struct sluice_gate *gate, struct gate_links links, struct gate_list *list, uint32_t row);
void gate_list_remove(struct sluice_gate *gate, struct gate_links links, struct gate_list *list, uint32_t row);

struct gate_links gate_own_links(const struct sluice_gate *gate);
struct gate_links gate_ticket_links(const struct sluice_gate *gate);
struct gate_links gate_replica_links(const struct sluice_gate *gate);
struct gate_links gate_dirty_links(const struct sluice_gate *gate);

/* ---- gate_heap.c: leftist heaps; insert, remove and the first in O(log n), n >= any heap's size ---- */

struct gate_heap {
    char *rows;
    size_t stride, node;
};
void gate_heap_insert(struct sluice_gate *gate, struct gate_heap heap, uint32_t *root, uint32_t row, uint64_t hi,
                      uint64_t lo);
void gate_heap_remove(struct sluice_gate *gate, struct gate_heap heap, uint32_t *root, uint32_t row);

struct gate_heap gate_queue_heap(const struct sluice_gate *gate);  /* of a flow: tickets */
struct gate_heap gate_expiry_heap(const struct sluice_gate *gate); /* tickets */
struct gate_heap gate_flow_heap(const struct sluice_gate *gate);   /* of a service: flows */

/* ---- gate_table.c: rows by (kind, id) ---- */

/* Its number, or 0. */
uint32_t gate_table_find(const struct gate_table *table, uint32_t kind, uint64_t id);
/* A row that was not there, all zero after its head; 0: all are in use. Takes an idle one where no other is free. */
uint32_t gate_table_take(struct sluice_gate *gate, const struct gate_table *table, uint32_t kind, uint64_t id);
/* Whether a row may be taken for another id. */
void gate_table_set_idle(struct sluice_gate *gate, const struct gate_table *table, uint32_t row, bool idle);
void gate_table_drop(struct sluice_gate *gate, const struct gate_table *table, uint32_t row);
struct gate_row *gate_table_row(const struct gate_table *table, uint32_t row);
/* A well mixed function of all bits. */
uint64_t gate_mix(uint64_t value);

/* ---- gate_limits.c ---- */

/* The row of a subject, made where it is not there; 0: no room. */
uint32_t gate_take_subject(struct sluice_gate *gate, uint32_t kind, uint64_t id);
/*
 * Whether a subject would admit `tokens` at `now_us`; if not, `answer` gets the refusal unless the one in it is
 * stronger. `may_queue`: its tickets need not wait, so the limit of waiting ones is not asked.
 */
void gate_check_subject(const struct sluice_gate *gate, uint32_t subject, uint64_t now_us, uint64_t tokens,
                        bool may_queue, struct sluice_gate_answer *answer, bool *refused);
/* A refusal, unless the one that is there is stronger. */
void gate_refuse(struct sluice_gate_answer *answer, bool *refused, struct sluice_gate_answer refusal);
/* A ticket of `tokens` begins, waiting, or has ended with `used`; *epoch: see struct gate_ticket. */
void gate_charge_subject(struct sluice_gate *gate, uint32_t subject, uint64_t now_us, uint64_t tokens, uint32_t *epoch);
void gate_settle_subject(struct sluice_gate *gate, uint32_t subject, uint64_t now_us, uint64_t tokens, uint64_t used,
                         uint32_t epoch);

/* ---- gate_replicas.c ---- */

/* The row of a service, made where it is not there; 0: no room. */
uint32_t gate_take_service(struct sluice_gate *gate, uint64_t id);
/* Whether nothing needs the service's row any more. */
void gate_touch_service(struct sluice_gate *gate, uint32_t service);
/* It may have a turn to give. */
void gate_mark_dirty(struct sluice_gate *gate, uint32_t service);
/* The replica for a ticket of a service with free places, and how many blocks of its prefix are there. */
uint32_t gate_choose_replica(const struct sluice_gate *gate, const struct gate_ticket *ticket, uint32_t *blocks);
/* A ticket's tokens begin on a replica, or end there. */
void gate_load_replica(struct sluice_gate *gate, uint32_t replica, uint64_t tokens);
void gate_unload_replica(struct sluice_gate *gate, uint32_t replica, uint64_t tokens);
/* Add to its service what a replica contributes, or take it away: around each change of what decides that. */
void gate_contribute(struct sluice_gate *gate, const struct gate_replica *replica, bool add);
/* How many requests it may have at a time, as it is now. */
uint32_t gate_slots_of(const struct gate_replica *replica);
/* It would get requests if it was not slow, or on trial. */
bool gate_is_out(const struct gate_replica *replica);
struct sluice_gate_replica gate_show_replica(const struct sluice_gate *gate, uint32_t replica);

/* ---- gate_pace.c ---- */

/* How many of a service's usable replicas may be out. */
uint32_t gate_most_out(uint32_t usable);
/* Of a service whose replicas have changed: those that are too many to be out are in again. O(replicas), if there are. */
void gate_bound_out(struct sluice_gate *gate, uint32_t service);
void gate_set_standing(struct sluice_gate *gate, uint32_t replica, enum sluice_gate_standing standing, uint64_t at_us);
/* The first replica whose time to be tried has come is on trial. O(1), O(replicas) where there is one. */
void gate_begin_trial(struct sluice_gate *gate, uint64_t now_us);

/* ---- gate_prefix.c ---- */

/*
 * Which replica has the longest prefix of the ticket's, of those that `suits` accepts; of several the one that is `better`;
 * 0: none has any. *blocks: how many.
 */
struct gate_choice; /* gate_replicas.c: what suits */
uint32_t gate_find_prefix(const struct sluice_gate *gate, const struct gate_ticket *ticket,
                          const struct gate_choice *choice, uint32_t *blocks);
bool gate_choice_suits(const struct sluice_gate *gate, const struct gate_choice *choice, uint32_t replica);
bool gate_choice_better(const struct sluice_gate *gate, uint32_t replica, uint32_t than);
void gate_remember_prefix(struct sluice_gate *gate, const struct gate_ticket *ticket, uint32_t replica);

/* ---- gate_queue.c ---- */

/* A ticket, with all that is known of it set, begins to wait; one that lost its replica goes to the front. */
void gate_enqueue(struct sluice_gate *gate, uint32_t ticket, uint64_t now_us);
/* It waits no more, whatever comes next. */
void gate_dequeue(struct sluice_gate *gate, uint32_t ticket);
/* It leaves its replica having used `used`; its flow gets back what it did not use. */
void gate_leave_replica(struct sluice_gate *gate, uint32_t ticket, uint64_t used);
/* The flow of a tenant in a service's queue, made where it is not there; 0: no room, which cannot be. */
uint32_t gate_take_flow(struct sluice_gate *gate, uint32_t service, uint64_t tenant);
/* It is not reported to its worker any more. */
void gate_unlink_pending(struct sluice_gate *gate, uint32_t ticket);

/* ---- gate_tickets.c ---- */

/* The ticket that `id` names, or 0. */
uint32_t gate_find_ticket(const struct sluice_gate *gate, uint64_t id);
uint64_t gate_ticket_id(const struct sluice_gate *gate, uint32_t ticket);
enum sluice_error gate_fail_ticket(uint64_t id, struct sluice_error_text *text);
/* What is billed of a ticket if it ends now, as its worker reported. */
void gate_describe(const struct sluice_gate *gate, uint32_t ticket, uint64_t now_us,
                   struct sluice_gate_settled *settled);
/* End it with what `settled` says that it used. */
void gate_end_ticket(struct sluice_gate *gate, uint32_t ticket, uint64_t now_us,
                     const struct sluice_gate_settled *settled);

#endif
