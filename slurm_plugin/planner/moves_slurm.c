/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Moves of running jobs inside slurmctld (moves.h), once they are chosen (choice_slurm.c): jobs are asked to save as with
 * scancel and requeued as by an administrator, under slurmctld's write locks. While moves are under way, the job for which
 * they make room and those that were moved are planned as one group, before all others and each on its node.
 */
#include "planner/choice_slurm.h"

#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "failover/failover.h"
#include "planner/instead.h"
#include "runtime/runtime.h"
#include "src/slurmctld/job_scheduler.h"

enum { END_S = 5 /* that a job takes to end */ };

static struct {
    struct sluice_moves moves;
    char path[4096];
    bool read; /* the file, since this controller is in charge, then ... */
    int64_t read_s;
    bool ask_again; /* ... and another one may not have asked those that it says it has */
    struct sluice_move_job *jobs;
    uint32_t job_room;
    struct sluice_moving_place places[1 + SLUICE_COMPACTION_MAX_MOVES];
    uint32_t place_count;
    struct sluice_listing_file ask_file; /* of nodes to empty (emptying.h) */
    struct sluice_empty_asks *asks;
} moving;

/* ---- the file ---- */

void sluice_moving_start(const char *folder)
{
    snprintf(moving.path, sizeof moving.path, "%s/" SLUICE_MOVES_FILE, folder);
    sluice_listing_follow(&moving.ask_file, folder, SLUICE_EMPTY_FILE);
    sluice_choosing_start(folder);
    moving.read = false;
}

void sluice_moving_not_in_charge(void)
{
    moving.read = false;
    sluice_choosing_not_in_charge();
}

static void read_file(void)
{
    struct sluice_error_text text;
    if (moving.read)
        return;
    moving.read = true;
    moving.read_s = time(NULL);
    if (sluice_moves_read(moving.path, &moving.moves, &text)) {
        sluice_moves_free(&moving.moves); /* of an earlier time in charge */
        error("sluice: %s: %s; what was moved before is not known any more", moving.path, text.text);
    }
    moving.ask_again = sluice_moves_open(&moving.moves);
}

/* What `sluice node empty` asks. */
static void read_asks(void)
{
    struct sluice_error_text text = {{0}};
    char *data = NULL;
    size_t length = 0;
    if (sluice_listing_look(&moving.ask_file, &data, &length, &text) == SLUICE_LISTING_SAME)
        return;
    sluice_listed_release((struct sluice_listed *)moving.asks);
    moving.asks = NULL;
    if (data)
        (void)sluice_empty_asks_parse(data, length, &moving.asks, &text);
    free(data);
    if (text.text[0])
        error("sluice: %s: %s; it gets no answer", moving.ask_file.path, text.text);
}

/* What is not written is not done: a controller that takes over would not know of it. */
static bool write_file(void)
{
    if (sluice_moves_write(moving.path, &moving.moves))
        return true;
    error("sluice: %s: cannot be written: %s; no job is moved", moving.path, strerror(errno));
    return false;
}

/* Of this slurmctld's life. */
static void count_made(void)
{
    atomic_fetch_add(sluice_status_counter("moves.made"), 1);
}

static void count_not_made(uint32_t count)
{
    atomic_fetch_add(sluice_status_counter("moves.not_made"), count);
}

static uint32_t count_asked(void)
{
    uint32_t asked = 0;
    for (uint32_t i = 0; i < moving.moves.count; i++)
        asked += moving.moves.items[i].stage == SLUICE_MOVE_ASKED;
    return asked;
}

void sluice_moving_show_open(void)
{
    uint64_t open = 0;
    for (uint32_t i = 0; i < moving.moves.count; i++)
        open += sluice_move_is_open(&moving.moves.items[i]);
    atomic_store(sluice_status_counter("moves.under_way"), open);
}

static void give_up(enum sluice_move_why why)
{
    count_not_made(count_asked());
    sluice_moves_give_up(&moving.moves, why);
}

/* ---- jobs on their way ---- */

const struct sluice_movable_job *sluice_movable_of(const struct sluice_picture *picture, uint32_t job_id)
{
    for (uint32_t i = 0; i < picture->movable_count; i++)
        if (picture->queue->running[picture->movables[i].index].id == job_id)
            return &picture->movables[i];
    return NULL;
}

const struct sluice_queue_job *sluice_entry_of(const struct sluice_queue_job *entries, uint32_t count, uint32_t job_id)
{
    for (uint32_t i = 0; i < count; i++)
        if (entries[i].id == job_id)
            return &entries[i];
    return NULL;
}

static struct sluice_move_job look(const struct sluice_picture *picture, const struct sluice_job_move *move)
{
    const struct sluice_queue *queue = picture->queue;
    const struct sluice_queue_job *running = sluice_entry_of(queue->running, queue->running_count, move->job_id);
    const struct sluice_movable_job *movable = sluice_movable_of(picture, move->job_id);
    struct sluice_move_job found = {.runs = running && !(running->flags & SLUICE_QUEUE_COMPLETING),
                                    .movable = movable,
                                    .started_s = running ? running->start_s : 0,
                                    .saved_s = movable ? movable->saved_s : 0};
    found.there = running || sluice_entry_of(queue->pending, queue->pending_count, move->job_id);
    return found;
}

/*
 * Slurm lets requeued jobs wait until the credentials of their first run have expired and a second more, as that run may
 * not have ended on the node. It has: the job is not completing any more. What remains is the second in which it ended:
 * slurmd takes a credential of that second for a revoked one and fails the job, which may be on its first node again if
 * its destination was drained. Not so for a job that an earlier controller requeued: the journal's replay brings it back
 * as waiting while its node may still end it. A user's own time is later. True: it may start by the next second. Under
 * the write locks.
 */
static bool end_pause(uint32_t job_id)
{
    const struct sluice_job_move *move = sluice_moves_of(&moving.moves, job_id);
    job_record_t *job = move && move->left_s >= moving.read_s ? find_job_record(job_id) : NULL;
    time_t now = time(NULL), pause = sluice_credential_lifetime();
    if (!job || !IS_JOB_PENDING(job) || IS_JOB_COMPLETING(job) || !job->details || !job->details->begin_time ||
        job->details->begin_time > now + pause + 1)
        return false;
    if (job->details->begin_time <= now + 1)
        return true;
    time_t second_after = job->details->begin_time - pause;
    job->details->begin_time = second_after > now ? second_after : now;
    last_job_update = now;
    return true;
}

static void end_pauses(struct sluice_picture *picture)
{
    struct sluice_queue *queue = picture->queue;
    bool locked = false;
    for (uint32_t i = 0; sluice_moves_open(&moving.moves) && i < queue->pending_count; i++) {
        struct sluice_queue_job *entry = &queue->pending[i];
        if (!(entry->flags & SLUICE_QUEUE_NOT_ELIGIBLE) || !sluice_moving_is_away(entry->id))
            continue;
        if (!locked && !(locked = sluice_start_lock()))
            return;
        if (end_pause(entry->id))
            entry->flags &= ~(uint32_t)SLUICE_QUEUE_NOT_ELIGIBLE;
    }
    if (locked)
        sluice_start_unlock();
}

static bool still_runs(const job_record_t *job, const struct sluice_job_move *move)
{
    return job && IS_JOB_RUNNING(job) && !IS_JOB_COMPLETING(job) && job->start_time == move->started_s;
}

/* A node to empty: the picture was asked. */
static bool still_waits(uint32_t job_id)
{
    const job_record_t *job = find_job_record(job_id);
    return !job_id || (job && IS_JOB_PENDING(job) && job->priority);
}

/* For the log. */
struct purpose {
    char words[SLUICE_MOVES_ROOM + 64];
};

static struct purpose purpose_of(const struct sluice_job_move *move)
{
    struct purpose purpose;
    if (move->for_job)
        snprintf(purpose.words, sizeof purpose.words, "make room for job %u on %s", move->for_job, move->room);
    else
        snprintf(purpose.words, sizeof purpose.words, "empty %s", move->room);
    return purpose;
}

/* All at once, under the write locks: no job leaves where one could not, or nobody waits for its room any more. */
static bool all_can_leave(int64_t left_s)
{
    for (uint32_t i = 0; i < moving.moves.count; i++) {
        const struct sluice_job_move *move = &moving.moves.items[i];
        const job_record_t *job = move->stage == SLUICE_MOVE_LEFT ? find_job_record(move->job_id) : NULL;
        if (move->stage == SLUICE_MOVE_LEFT && move->left_s == left_s &&
            (!still_runs(job, move) || !job->details || !job->details->requeue || !still_waits(move->for_job)))
            return false;
    }
    return true;
}

static void requeue(struct sluice_job_move *move, bool can)
{
    job_record_t *job = can && sluice_failover_keeps_requeues() ? find_job_record(move->job_id) : NULL;
    if (job && sluice_job_requeue(job) == SLURM_SUCCESS) {
        info("sluice: job %u, saved %" PRId64 " s ago, moves from %s to %s to %s", move->job_id,
             move->left_s - move->saved_s, move->from, move->to, purpose_of(move).words);
        count_made();
        return;
    }
    count_not_made(1);
    move->stage = SLUICE_MOVE_STAYED;
    move->why = can ? SLUICE_MOVE_WHY_REFUSED : SLUICE_MOVE_WHY_CHANGED;
}

/* Ask all of them to save, once that is written down. */
static void ask(uint32_t number)
{
    if (!sluice_start_lock()) {
        give_up(SLUICE_MOVE_WHY_CHANGED);
        return;
    }
    for (uint32_t i = 0; i < moving.moves.count; i++) {
        struct sluice_job_move *move = &moving.moves.items[i];
        job_record_t *job = move->stage == SLUICE_MOVE_ASKED ? find_job_record(move->job_id) : NULL;
        if (job && still_runs(job, move) && still_waits(move->for_job)) {
            job_signal(job, (uint16_t)number, KILL_FULL_JOB, 0, false);
            info("sluice: job %u is asked to save, to move from %s to %s and %s", move->job_id, move->from, move->to,
                 purpose_of(move).words);
        }
    }
    sluice_start_unlock();
}

/* After a start of slurmctld: they have as long as if they were asked for the first time. */
static void ask_again(const struct sluice_picture *picture, const struct sluice_rules *rules)
{
    for (uint32_t i = 0; i < moving.moves.count; i++)
        if (moving.moves.items[i].stage == SLUICE_MOVE_ASKED)
            moving.moves.items[i].asked_s = picture->now_s;
    if (write_file())
        ask(rules->checkpoint_signal);
}

/* All have saved: they are requeued, once that is written down. Slurm saves its state seconds later, and would take a
 * job that it requeued for one that SIGTERM ended, were it killed before: the journal has each requeue before the job's
 * node hears of it. */
static void leave(int64_t now_s)
{
    sluice_moves_leave(&moving.moves, now_s);
    if (!write_file() || !sluice_start_lock()) {
        for (uint32_t i = 0; i < moving.moves.count; i++)
            if (moving.moves.items[i].stage == SLUICE_MOVE_LEFT && moving.moves.items[i].left_s == now_s)
                moving.moves.items[i].stage = SLUICE_MOVE_ASKED;
        return;
    }
    bool can = all_can_leave(now_s);
    sluice_failover_wait_for_all(true);
    for (uint32_t i = 0; i < moving.moves.count; i++) {
        struct sluice_job_move *move = &moving.moves.items[i];
        if (move->stage == SLUICE_MOVE_LEFT && move->left_s == now_s)
            requeue(move, can);
    }
    sluice_failover_wait_for_all(false);
    sluice_start_unlock();
    (void)write_file();
    sluice_plan_wake();
}

/* ---- the places that are kept ---- */

static bool has_node(const uint64_t *words, uint32_t node)
{
    return words[node / 64] >> node % 64 & 1;
}

const struct sluice_kept_nodes *sluice_kept_named(const struct sluice_picture *picture, const char *names)
{
    for (uint32_t i = 0; i < picture->kept_count; i++)
        if (!strcmp(picture->kept[i].names, names))
            return &picture->kept[i];
    return NULL;
}

/* False: the job cannot use the nodes any more, as one was drained, reserved or removed. It is planned alone then,
 * before all others, on any node. */
static bool keep(struct sluice_picture *picture, const struct sluice_moving_place *place, const char *names)
{
    const struct sluice_kept_nodes *nodes = sluice_kept_named(picture, names);
    if (!nodes || moving.place_count == sizeof moving.places / sizeof *moving.places)
        return false;
    uint32_t words = sluice_picture_common(picture, place->sought->words, nodes->words);
    if (sluice_picture_count(picture, words) < sluice_nodes_of(&place->sought->request))
        return false;
    moving.places[moving.place_count] = *place;
    moving.places[moving.place_count++].words = words;
    return true;
}

static bool pending_place(const struct sluice_picture *picture, uint32_t job_id, bool (*plannable)(uint32_t index),
                          struct sluice_moving_place *place)
{
    const struct sluice_queue *queue = picture->queue;
    const struct sluice_queue_job *entry = sluice_entry_of(queue->pending, queue->pending_count, job_id);
    if (!entry || !plannable((uint32_t)(entry - queue->pending)))
        return false;
    *place = (struct sluice_moving_place){.entry = entry, .pending = (uint32_t)(entry - queue->pending)};
    place->sought = &picture->pending[place->pending];
    return true;
}

static bool running_place(const struct sluice_picture *picture, uint32_t job_id, struct sluice_moving_place *place)
{
    const struct sluice_movable_job *movable = sluice_movable_of(picture, job_id);
    if (movable)
        *place = (struct sluice_moving_place){
            .entry = &picture->queue->running[movable->index], .sought = &movable->sought, .pending = UINT32_MAX};
    return movable;
}

/* Jobs that are to leave, or have left since the picture, end when they had to have saved, at the latest: until then
 * nothing long starts where they go. */
static void end_soon(struct sluice_picture *picture, const struct sluice_rules *rules)
{
    for (uint32_t i = 0; i < moving.moves.count; i++) {
        const struct sluice_job_move *move = &moving.moves.items[i];
        const struct sluice_movable_job *movable =
            sluice_move_is_open(move) ? sluice_movable_of(picture, move->job_id) : NULL;
        int64_t end_s = move->asked_s + rules->compaction_save_s + END_S;
        for (uint32_t r = 0; movable && r < picture->running_count; r++)
            if (picture->running[r].allocation == movable->allocation && picture->running[r].end_s > end_s)
                picture->running[r].end_s = end_s;
    }
}

static void keep_places(struct sluice_picture *picture, const struct sluice_rules *rules,
                        bool (*plannable)(uint32_t index))
{
    const struct sluice_job_move *open = sluice_moves_open(&moving.moves);
    struct sluice_moving_place place;
    moving.place_count = 0;
    if (!sluice_moves_keep(open, picture->now_s))
        return;
    if (open->for_job &&
        (!pending_place(picture, open->for_job, plannable, &place) || !keep(picture, &place, open->room)))
        return;
    for (uint32_t i = 0; i < moving.moves.count; i++) {
        const struct sluice_job_move *move = &moving.moves.items[i];
        if (sluice_move_is_open(move) &&
            (running_place(picture, move->job_id, &place) || pending_place(picture, move->job_id, plannable, &place)))
            (void)keep(picture, &place, move->to);
    }
    end_soon(picture, rules);
}

const struct sluice_moving_place *sluice_moving_places(uint32_t *count)
{
    *count = moving.place_count;
    return moving.places;
}

bool sluice_moving_is_away(uint32_t job_id)
{
    const struct sluice_job_move *move = sluice_moves_of(&moving.moves, job_id);
    return move && move->stage == SLUICE_MOVE_LEFT;
}

const struct sluice_empty_asks *sluice_moving_asks(void)
{
    return moving.asks;
}

bool sluice_moving_has(uint32_t job_id)
{
    return sluice_moves_of(&moving.moves, job_id);
}

uint32_t sluice_moving_count(uint32_t for_job)
{
    return sluice_moves_for(&moving.moves, for_job);
}

/* ---- what choosing needs ---- */

const struct sluice_moves *sluice_moving_list(void)
{
    return &moving.moves;
}

bool sluice_moving_ask(const struct sluice_rules *rules, const struct sluice_job_move *plan, uint32_t count)
{
    bool good = true;
    for (uint32_t i = 0; i < count && good; i++)
        good = sluice_moves_add(&moving.moves, &plan[i]);
    good = good && write_file();
    if (good)
        ask(rules->checkpoint_signal);
    else
        give_up(SLUICE_MOVE_WHY_CHANGED);
    return good;
}

/* ---- a pass ---- */

void sluice_moving_begin(void)
{
    if (!sluice_in_charge())
        return;
    read_file();
    read_asks();
}

/* The names of nodes are looked up under the read locks. */
void sluice_moving_see(struct sluice_picture *picture)
{
    picture->kept_count = 0;
    for (uint32_t i = 0; i < moving.moves.count; i++) {
        struct sluice_job_move *move = &moving.moves.items[i];
        if (!sluice_move_is_open(move))
            continue;
        if (!sluice_kept_named(picture, move->to))
            sluice_picture_keep(picture, move->to);
        if (!sluice_kept_named(picture, move->room))
            sluice_picture_keep(picture, move->room);
    }
}

/* Is what the jobs move for still to be? Not for a job that preempts others meanwhile. */
static bool is_wanted(const struct sluice_picture *picture, const struct sluice_job_move *open,
                      bool (*plannable)(uint32_t index))
{
    struct sluice_moving_place place;
    if (open->for_job)
        return !sluice_instead_of(open->for_job, picture->now_s).preempts &&
               pending_place(picture, open->for_job, plannable, &place);
    const struct sluice_kept_nodes *room = sluice_kept_named(picture, open->room);
    for (uint32_t i = 0; room && i < picture->leaving_count; i++)
        if (picture->leaving[i].leaves && has_node(picture->words + room->words, picture->leaving[i].node))
            return true;
    return false;
}

void sluice_moving_follow(struct sluice_picture *picture, const struct sluice_rules *rules, bool acts,
                          bool (*plannable)(uint32_t index))
{
    const struct sluice_job_move *open = sluice_moves_open(&moving.moves);
    bool changed = false;
    moving.place_count = 0;
    if (!open || !sluice_grow_array(&moving.jobs, &moving.job_room, moving.moves.count, sizeof *moving.jobs))
        return;
    for (uint32_t i = 0; i < moving.moves.count; i++)
        if (sluice_move_is_open(&moving.moves.items[i]))
            moving.jobs[i] = look(picture, &moving.moves.items[i]);
    struct sluice_move_view view = {.now_s = picture->now_s,
                                    .save_s = rules->compaction_save_s,
                                    .waits = acts && rules->compaction_wait_s && rules->journal &&
                                             is_wanted(picture, open, plannable)};
    uint32_t asked = count_asked();
    if (moving.ask_again && view.waits && asked)
        ask_again(picture, rules);
    moving.ask_again = false;
    bool all_saved = sluice_moves_follow(&moving.moves, moving.jobs, &view, &changed);
    count_not_made(asked - count_asked());
    if (all_saved && sluice_failover_keeps_requeues() && sluice_choice_still_fits(picture, open))
        leave(picture->now_s);
    if (changed)
        (void)write_file();
    if (acts) {
        end_pauses(picture);
        keep_places(picture, rules, plannable);
    }
}

void sluice_moving_fini(void)
{
    sluice_choosing_fini();
    sluice_moves_free(&moving.moves);
    free(moving.jobs);
    sluice_listed_release((struct sluice_listed *)moving.asks);
    memset(&moving, 0, sizeof moving);
}
