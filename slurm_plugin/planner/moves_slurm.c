/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Moves of running jobs inside slurmctld (moves.h): whom to move is planned here, jobs are asked to save as with scancel
 * and requeued as by an administrator, under slurmctld's write locks. While moves are under way, the job for which they
 * make room and those that were moved are planned as one group, before all others and each on its node.
 */
#include "planner/moves_slurm.h"

#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "failover/failover.h"
#include "runtime/runtime.h"
#include "src/slurmctld/job_scheduler.h"

enum {
    MOST_MOVABLES = SLUICE_MOST_MOVABLES,
    MOST_TRIES = 4,      /* jobs for which room is sought in one pass ... */
    TRIES_US = 100000,   /* ... after which it is sought for no other ... */
    TRY_S = 5,           /* ... and until the next one ... */
    FAILED_S = 60,       /* ... or after the file could not be written */
    MOST_GAIN_S = 86400, /* of a job whose start is not known, too */
    END_S = 5,           /* that a job takes to end */
};

static struct {
    struct sluice_moves moves;
    char path[4096];
    bool read; /* the file, since this controller is in charge, then ... */
    int64_t read_s;
    bool ask_again; /* ... and another one may not have asked those that it says it has */
    struct sluice_move_job *jobs;
    uint32_t job_room;
    struct sluice_compaction *compaction; /* of the mirror's cluster ... */
    uint64_t generation;                  /* ... as it was made then */
    struct sluice_movable movables[MOST_MOVABLES];
    struct sluice_request requests[1 + MOST_MOVABLES]; /* the waiting job's, and those of the movables */
    uint32_t seen[MOST_MOVABLES];                      /* of the movables: which of the picture's */
    uint64_t *words;                                   /* allowed nodes of the requests */
    uint32_t word_room;
    uint32_t tried;        /* waiting jobs for which no room was found, from the first one on */
    uint32_t next_leaving; /* of the nodes to empty */
    int64_t next_try_s;
    struct sluice_part *parts; /* where the waiting job would start */
    uint32_t part_room;
    struct sluice_moving_place places[1 + SLUICE_COMPACTION_MAX_MOVES];
    uint32_t place_count;
    /* nodes to empty by order (emptying.h) */
    struct sluice_listing_file ask_file;
    struct sluice_empty_asks *asks;
    char said_path[4096];
    bool said_nothing; /* there is no file of that */
    struct sluice_leaver *leavers;
    struct sluice_leave *leaves;
    uint32_t leaver_room, leave_room;
} moving;

/* ---- the file ---- */

void sluice_moving_start(const char *folder)
{
    snprintf(moving.path, sizeof moving.path, "%s/" SLUICE_MOVES_FILE, folder);
    snprintf(moving.said_path, sizeof moving.said_path, "%s/" SLUICE_EMPTYING_FILE, folder);
    sluice_listing_follow(&moving.ask_file, folder, SLUICE_EMPTY_FILE);
    moving.read = false;
}

void sluice_moving_not_in_charge(void)
{
    moving.read = false;
    moving.said_nothing = false; /* another controller may say something meanwhile */
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

static void show_open(void)
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

static const struct sluice_movable_job *movable_of(const struct sluice_picture *picture, uint32_t job_id)
{
    for (uint32_t i = 0; i < picture->movable_count; i++)
        if (picture->queue->running[picture->movables[i].index].id == job_id)
            return &picture->movables[i];
    return NULL;
}

static const struct sluice_queue_job *entry_of(const struct sluice_queue_job *entries, uint32_t count, uint32_t job_id)
{
    for (uint32_t i = 0; i < count; i++)
        if (entries[i].id == job_id)
            return &entries[i];
    return NULL;
}

static struct sluice_move_job look(const struct sluice_picture *picture, const struct sluice_job_move *move)
{
    const struct sluice_queue *queue = picture->queue;
    const struct sluice_queue_job *running = entry_of(queue->running, queue->running_count, move->job_id);
    const struct sluice_movable_job *movable = movable_of(picture, move->job_id);
    struct sluice_move_job found = {.runs = running && !(running->flags & SLUICE_QUEUE_COMPLETING),
                                    .movable = movable,
                                    .started_s = running ? running->start_s : 0,
                                    .saved_s = movable ? movable->saved_s : 0};
    found.there = running || entry_of(queue->pending, queue->pending_count, move->job_id);
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

/* Do the moves still lead to where all of them have room? Others may have started there since. */
static bool still_fits(struct sluice_picture *picture, const struct sluice_job_move *open);

/* ---- the places that are kept ---- */

static bool has_node(const uint64_t *words, uint32_t node)
{
    return words[node / 64] >> node % 64 & 1;
}

static const struct sluice_kept_nodes *nodes_named(const struct sluice_picture *picture, const char *names)
{
    for (uint32_t i = 0; i < picture->kept_count; i++)
        if (!strcmp(picture->kept[i].names, names))
            return &picture->kept[i];
    return NULL;
}

static int64_t nodes_of(const struct sluice_request *request)
{
    return request->nodes_min > 1 ? request->nodes_min : 1;
}

/* False: the job cannot use the nodes any more, as one was drained, reserved or removed. It is planned alone then,
 * before all others, on any node. */
static bool keep(struct sluice_picture *picture, const struct sluice_moving_place *place, const char *names)
{
    const struct sluice_kept_nodes *nodes = nodes_named(picture, names);
    if (!nodes || moving.place_count == sizeof moving.places / sizeof *moving.places)
        return false;
    uint32_t words = sluice_picture_common(picture, place->sought->words, nodes->words);
    if (sluice_picture_count(picture, words) < nodes_of(&place->sought->request))
        return false;
    moving.places[moving.place_count] = *place;
    moving.places[moving.place_count++].words = words;
    return true;
}

static bool pending_place(const struct sluice_picture *picture, uint32_t job_id, bool (*plannable)(uint32_t index),
                          struct sluice_moving_place *place)
{
    const struct sluice_queue *queue = picture->queue;
    const struct sluice_queue_job *entry = entry_of(queue->pending, queue->pending_count, job_id);
    if (!entry || !plannable((uint32_t)(entry - queue->pending)))
        return false;
    *place = (struct sluice_moving_place){.entry = entry, .pending = (uint32_t)(entry - queue->pending)};
    place->sought = &picture->pending[place->pending];
    return true;
}

static bool running_place(const struct sluice_picture *picture, uint32_t job_id, struct sluice_moving_place *place)
{
    const struct sluice_movable_job *movable = movable_of(picture, job_id);
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
        const struct sluice_movable_job *movable = sluice_move_is_open(move) ? movable_of(picture, move->job_id) : NULL;
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
        if (!nodes_named(picture, move->to))
            sluice_picture_keep(picture, move->to);
        if (!nodes_named(picture, move->room))
            sluice_picture_keep(picture, move->room);
    }
}

/* Is what the jobs move for still to be? */
static bool is_wanted(const struct sluice_picture *picture, const struct sluice_job_move *open,
                      bool (*plannable)(uint32_t index))
{
    struct sluice_moving_place place;
    if (open->for_job)
        return pending_place(picture, open->for_job, plannable, &place);
    const struct sluice_kept_nodes *room = nodes_named(picture, open->room);
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
    if (all_saved && sluice_failover_keeps_requeues() && still_fits(picture, open))
        leave(picture->now_s);
    if (changed)
        (void)write_file();
    if (acts) {
        end_pauses(picture);
        keep_places(picture, rules, plannable);
    }
}

/* ---- whom to move ---- */

static void set_node(uint64_t *words, uint32_t node)
{
    words[node / 64] |= UINT64_C(1) << node % 64;
}

static int64_t milli_of(const struct sluice_request *request)
{
    int64_t milli = request->gpu_memory_mib ? request->gpu_memory_mib * 1000 / SLUICE_MIRROR_PLAIN_GPU_MIB : 1000;
    return request->gpus * (milli > 0 ? milli : 1);
}

/* The request, on those of its nodes that are not in `taken`, nor `but`. */
static struct sluice_request narrowed(const struct sluice_picture *picture, const struct sluice_picture_job *sought,
                                      const uint64_t *taken, uint32_t but, uint32_t number)
{
    uint64_t *words = moving.words + (size_t)number * picture->node_words;
    struct sluice_request request = sought->request;
    for (uint32_t i = 0; i < picture->node_words; i++)
        words[i] = picture->words[sought->words + i] & ~taken[i] & ~picture->asleep[i];
    if (but / 64 < picture->node_words)
        words[but / 64] &= ~(UINT64_C(1) << but % 64);
    request.allowed = words;
    request.allowed_words = picture->node_words;
    return request;
}

/* The request, on these nodes alone. */
static struct sluice_request only_on(const struct sluice_picture *picture, const struct sluice_picture_job *sought,
                                     const char *names, uint32_t number)
{
    uint64_t *words = moving.words + (size_t)number * picture->node_words;
    struct sluice_request request = sought->request;
    const struct sluice_kept_nodes *nodes = nodes_named(picture, names);
    for (uint32_t i = 0; i < picture->node_words; i++)
        words[i] = nodes ? picture->words[sought->words + i] & picture->words[nodes->words + i] : 0;
    request.allowed = words;
    request.allowed_words = picture->node_words;
    return request;
}

/* A part of a job on one node, and no other. */
static uint32_t node_of(const struct sluice_picture *picture, uint64_t allocation)
{
    struct sluice_part part;
    uint32_t count = 0;
    enum sluice_error failed =
        sluice_allocation_read(sluice_mirror_cluster(picture->mirror), allocation, &part, 1, &count, NULL);
    return failed || count != 1 ? UINT32_MAX : part.node;
}

/* The jobs that may be moved, with what moving them costs; none may go back to its own node, where its first run may not
 * have ended on the node yet. */
static uint32_t list_movables(const struct sluice_picture *picture, const struct sluice_rules *rules,
                              const uint64_t *taken)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < picture->movable_count && count < MOST_MOVABLES; i++) {
        const struct sluice_movable_job *movable = &picture->movables[i];
        const struct sluice_queue_job *entry = &picture->queue->running[movable->index];
        uint32_t node = node_of(picture, movable->allocation);
        if (node == UINT32_MAX || entry->start_s <= 0 ||
            !sluice_moves_may(&moving.moves, entry->id, entry->start_s, rules->compaction_moves_per_job))
            continue;
        moving.seen[count] = i;
        moving.requests[1 + count] = narrowed(picture, &movable->sought, taken, node, 1 + count);
        moving.movables[count] =
            (struct sluice_movable){.allocation = movable->allocation,
                                    .request = 1 + count,
                                    .cost = milli_of(&movable->sought.request) * rules->compaction_move_cost_s};
        count++;
    }
    return count;
}

/* Memory for a plan that makes room for a request. */
static bool has_room(struct sluice_picture *picture, const struct sluice_request *request)
{
    struct sluice_error_text text = {{0}};
    uint32_t words = (1 + MOST_MOVABLES) * picture->node_words;
    int64_t parts = request->nodes_max > request->nodes_min ? request->nodes_max : nodes_of(request);
    if (!sluice_grow_array(&moving.words, &moving.word_room, words, sizeof *moving.words) ||
        !sluice_grow_array(&moving.parts, &moving.part_room, (uint32_t)parts, sizeof *moving.parts))
        return false;
    if (moving.compaction && moving.generation == picture->generation)
        return true;
    sluice_compaction_free(moving.compaction);
    moving.compaction = NULL;
    moving.generation = picture->generation;
    if (!sluice_compaction_new(sluice_mirror_cluster(picture->mirror), MOST_MOVABLES, 1 + MOST_MOVABLES,
                               &moving.compaction, &text))
        return true;
    error("sluice: no job can be moved: %s", text.text);
    return false;
}

static uint32_t wait_on(const struct sluice_picture *picture, const struct sluice_rules *rules, uint32_t node)
{
    uint32_t class = sluice_rules_class_of_type(rules, sluice_mirror_node_type(picture->mirror, node));
    uint32_t own_s = class == SLUICE_NO_CLASS ? 0 : rules->classes[class].compaction_wait_s;
    return own_s ? own_s : rules->compaction_wait_s;
}

/* Of several nodes, the longest. */
static uint32_t wait_on_all(const struct sluice_picture *picture, const struct sluice_rules *rules,
                            const struct sluice_placement *placement)
{
    uint32_t longest_s = 0;
    for (uint32_t p = 0; p < placement->part_count; p++) {
        uint32_t wait_s = wait_on(picture, rules, placement->parts[p].node);
        longest_s = wait_s > longest_s ? wait_s : longest_s;
    }
    return longest_s;
}

static int64_t waited(const struct sluice_picture *picture, const struct sluice_queue_job *entry)
{
    return picture->now_s - (entry->eligible_s ? entry->eligible_s : entry->submit_s);
}

/* Under slurmctld's locks. */
static void name_node(char *name, uint32_t node)
{
    const node_record_t *record = node < (uint32_t)node_record_count ? node_record_table_ptr[node] : NULL;
    snprintf(name, SLUICE_MOVES_NODE, "%s", record && record->name ? record->name : "-");
}

/* False: their list is too long. Under slurmctld's locks. */
static bool name_nodes(char *names, const struct sluice_placement *room)
{
    bitstr_t *bitmap = bit_alloc(node_record_count);
    for (uint32_t p = 0; p < room->part_count; p++)
        if (room->parts[p].node < (uint32_t)node_record_count)
            bit_set(bitmap, room->parts[p].node);
    char *listed = bitmap2node_name(bitmap);
    int length = snprintf(names, SLUICE_MOVES_ROOM, "%s", listed);
    xfree(listed);
    FREE_NULL_BITMAP(bitmap);
    return length > 0 && length < SLUICE_MOVES_ROOM;
}

/* False: no room can be made there. */
static bool begin(const struct sluice_picture *picture, const struct sluice_rules *rules, uint32_t for_job,
                  const struct sluice_placement *room, const struct sluice_move *plan, uint32_t count)
{
    char names[SLUICE_MOVES_ROOM];
    bool good = sluice_queue_lock();
    if (good && !name_nodes(names, room)) {
        sluice_queue_unlock();
        return false;
    }
    bool locked = good;
    for (uint32_t i = 0; i < count && good; i++) {
        const struct sluice_movable_job *movable = &picture->movables[moving.seen[plan[i].movable]];
        const struct sluice_queue_job *entry = &picture->queue->running[movable->index];
        struct sluice_job_move move = {
            .job_id = entry->id, .for_job = for_job, .started_s = entry->start_s, .asked_s = picture->now_s};
        name_node(move.from, node_of(picture, movable->allocation));
        name_node(move.to, plan[i].to.node);
        memcpy(move.room, names, sizeof move.room);
        good = sluice_moves_add(&moving.moves, &move);
    }
    if (locked)
        sluice_queue_unlock();
    good = good && write_file();
    if (good)
        ask(rules->checkpoint_signal);
    else
        give_up(SLUICE_MOVE_WHY_CHANGED);
    if (!good)
        moving.next_try_s = picture->now_s + FAILED_S;
    sluice_plan_wake();
    return true;
}

/* ---- for whom ---- */

/* One look for moves. */
struct search {
    const struct sluice_moving_basis *basis;
    uint64_t *taken;   /* nodes where others start, or have a reserved start before the job that waits */
    uint64_t *settled; /* where anybody starts, or has a reserved start: jobs that leave a node go before all others */
    uint32_t least_wait_s;
    uint64_t until_us; /* no other try begins after that */
    uint32_t passed, tried;
};

static void take_parts(uint64_t *taken, const struct sluice_plan_answer *answer)
{
    for (uint32_t p = 0; p < answer->part_count; p++)
        set_node(taken, answer->parts[p].node);
}

/* Does the plan's i-th entry wait for so long that others may be moved for it? */
static bool may_wish(const struct search *search, uint32_t i, const struct sluice_plan_answer *answer)
{
    const struct sluice_picture *picture = search->basis->picture;
    const struct sluice_plan_job *job = &search->basis->jobs[i];
    uint32_t index = search->basis->job_index[i];
    if (job->group || index == UINT32_MAX || answer->state == SLUICE_PLAN_NOW || answer->waits_for_power)
        return false;
    const struct sluice_queue_job *entry = &picture->queue->pending[index];
    bool fixed = !(job->request.flags & SLUICE_GPUS_TOTAL) || job->request.nodes_max <= 1;
    bool one_task = entry->tasks == 1 && (!entry->array_id || entry->array_task != UINT32_MAX);
    return fixed && one_task && job->request.gpus > 0 && !picture->pending[index].estimated &&
           !sluice_moving_is_away(entry->id) && waited(picture, entry) >= search->least_wait_s;
}

/* Seek moves that make room for it; true: they have begun. */
static bool try_job(const struct search *search, uint32_t i, const struct sluice_plan_answer *answer)
{
    struct sluice_picture *picture = search->basis->picture;
    const struct sluice_rules *rules = search->basis->rules;
    uint32_t index = search->basis->job_index[i], job_id = picture->queue->pending[index].id;
    struct sluice_move plan[SLUICE_COMPACTION_MAX_MOVES];
    if (sluice_moves_failed(&moving.moves, job_id, picture->now_s) ||
        !has_room(picture, &picture->pending[index].request))
        return false;
    struct sluice_placement room = {.parts = moving.parts, .part_capacity = moving.part_room};
    uint32_t moves = 0, count = list_movables(picture, rules, search->taken);
    int64_t gain_s = answer->state == SLUICE_PLAN_LATER ? answer->start_s - picture->now_s : MOST_GAIN_S;
    moving.requests[0] = narrowed(picture, &picture->pending[index], search->taken, UINT32_MAX, 0);
    struct sluice_compaction_limits limits = {
        .moves = sluice_moves_left(&moving.moves, rules->compaction_moves_per_hour, picture->now_s),
        .gain = milli_of(&moving.requests[0]) * nodes_of(&moving.requests[0]) *
                (gain_s < MOST_GAIN_S ? gain_s : MOST_GAIN_S),
        .factor_permille = rules->compaction_factor_permille};
    if (!count || sluice_compaction_plan(moving.compaction, rules->placement, moving.requests, 1 + count, 0,
                                         moving.movables, count, &limits, &room, plan, &moves, NULL))
        return false;
    return moves && waited(picture, &picture->queue->pending[index]) >= wait_on_all(picture, rules, &room) &&
           begin(picture, rules, job_id, &room, plan, moves);
}

static uint32_t least_wait(const struct sluice_rules *rules)
{
    uint32_t least_s = rules->compaction_wait_s;
    for (uint32_t i = 0; i < rules->class_count; i++) {
        uint32_t own_s = rules->classes[i].compaction_wait_s;
        least_s = own_s && own_s < least_s ? own_s : least_s;
    }
    return least_s;
}

/* The jobs in their order, from the one on at which the last look ended. */
static void seek(struct search *search)
{
    struct sluice_plan_answer answer;
    for (uint32_t i = 0; i < search->basis->job_count && sluice_plan_entry(search->basis->plan, i, NULL, NULL, &answer);
         i++) {
        if (may_wish(search, i, &answer) && search->passed++ >= moving.tried) {
            if (search->tried == MOST_TRIES || sluice_now_us() > search->until_us)
                return;
            search->tried++;
            if (try_job(search, i, &answer))
                return;
        }
        if (answer.state == SLUICE_PLAN_LATER)
            take_parts(search->taken, &answer);
    }
    moving.tried = search->tried = 0; /* all were tried: again from the first one on */
}

/* ---- nodes to empty ---- */

enum { LAST = SLUICE_COMPACTION_MAX_MOVES + 1 }; /* of a node's jobs that are looked at */

/* The node's jobs that end last, the very last first. */
static uint32_t last_to_end(const struct sluice_picture *picture, uint32_t node, struct sluice_backfill_running *last)
{
    struct sluice_cluster *cluster = sluice_mirror_cluster(picture->mirror);
    uint32_t count = 0, part_count = 0;
    for (uint32_t r = 0; r < picture->running_count; r++) {
        const struct sluice_backfill_running *job = &picture->running[r];
        bool there = false;
        if (sluice_allocation_read(cluster, job->allocation, moving.parts, moving.part_room, &part_count, NULL))
            continue;
        for (uint32_t p = 0; p < part_count && !there; p++)
            there = moving.parts[p].node == node;
        if (!there || (count == LAST && job->end_s <= last[LAST - 1].end_s))
            continue;
        uint32_t at = count < LAST ? count++ : LAST - 1;
        for (; at > 0 && last[at - 1].end_s < job->end_s; at--)
            last[at] = last[at - 1];
        last[at] = *job;
    }
    return count;
}

/* What it is worth that the first so many leave: the time by which the node is empty earlier, but not before it is to
 * be, times its GPUs. */
static int64_t gain_of(const struct sluice_leaving_node *leaving, uint32_t gpus,
                       const struct sluice_backfill_running *last, uint32_t count, uint32_t leave)
{
    if (!leave)
        return 0;
    int64_t empty_s = leave < count && last[leave].end_s > leaving->needed_s ? last[leave].end_s : leaving->needed_s;
    int64_t gain_s = last[0].end_s - empty_s;
    return (gain_s < 0 ? 0 : gain_s < MOST_GAIN_S ? gain_s : MOST_GAIN_S) * gpus * 1000;
}

static uint32_t movable_with(uint64_t allocation, uint32_t movables)
{
    for (uint32_t i = 0; i < movables; i++)
        if (moving.movables[i].allocation == allocation)
            return i;
    return UINT32_MAX;
}

/* How many of a node's jobs, the last to end first, have places elsewhere, all together; and what that costs. */
static uint32_t place_elsewhere(const struct search *search, const struct sluice_backfill_running *last, uint32_t count,
                                uint32_t movables, struct sluice_move *plan, int64_t *cost)
{
    const struct sluice_rules *rules = search->basis->rules;
    struct sluice_cluster *cluster = sluice_mirror_cluster(search->basis->picture->mirror);
    uint32_t most = sluice_moves_left(&moving.moves, rules->compaction_moves_per_hour, search->basis->picture->now_s);
    uint64_t tried[SLUICE_COMPACTION_MAX_MOVES];
    uint32_t placed = 0;
    for (*cost = 0; placed < count && placed < most; placed++) {
        uint32_t movable = movable_with(last[placed].allocation, movables);
        struct sluice_placement to = {.parts = &plan[placed].to, .part_capacity = 1};
        if (movable == UINT32_MAX ||
            sluice_start(cluster, rules->placement, &moving.requests[1 + movable], &to, &tried[placed], NULL))
            break;
        plan[placed].movable = movable;
        *cost += moving.movables[movable].cost;
    }
    for (uint32_t i = 0; i < placed; i++)
        (void)sluice_release(cluster, tried[i], NULL);
    return placed;
}

/* One after another; true: the jobs of one have begun to move. */
static bool empty_nodes(const struct search *search, uint32_t movables)
{
    struct sluice_picture *picture = search->basis->picture;
    const struct sluice_rules *rules = search->basis->rules;
    for (uint32_t i = 0; i < picture->leaving_count && sluice_now_us() < search->until_us; i++) {
        struct sluice_leaving_node *leaving = &picture->leaving[moving.next_leaving++ % picture->leaving_count];
        struct sluice_backfill_running last[LAST];
        struct sluice_move plan[SLUICE_COMPACTION_MAX_MOVES];
        struct sluice_node_view view;
        int64_t cost;
        if (sluice_leaving_is_told(leaving) ||
            sluice_node_read(sluice_mirror_cluster(picture->mirror), leaving->node, &view, NULL) || !view.parts)
            continue;
        uint32_t count = last_to_end(picture, leaving->node, last);
        uint32_t leave = place_elsewhere(search, last, count, movables, plan, &cost);
        struct sluice_part room = {.node = leaving->node};
        const struct sluice_placement placement = {.parts = &room, .part_capacity = 1, .part_count = 1};
        if (gain_of(leaving, view.gpu_count, last, count, leave) * 1000 > cost * rules->compaction_factor_permille)
            return begin(picture, rules, 0, &placement, plan, leave);
    }
    return false;
}

static bool consider_nodes(const struct search *search)
{
    struct sluice_picture *picture = search->basis->picture;
    const struct sluice_request all_nodes = {.nodes_max = (int64_t)picture->node_words * 64};
    if (picture->leaving_count == picture->told_count || sluice_moves_failed(&moving.moves, 0, picture->now_s) ||
        !has_room(picture, &all_nodes))
        return false;
    struct search narrow = *search;
    narrow.until_us -= TRIES_US / 2; /* many nodes leave time for the jobs that wait */
    narrow.taken = search->settled;
    return empty_nodes(&narrow, list_movables(picture, search->basis->rules, narrow.taken));
}

/* ---- nodes that an administrator empties ---- */

/* What the core says of each job on them; false: nothing. */
static bool decide(const struct search *search)
{
    struct sluice_picture *picture = search->basis->picture;
    const struct sluice_rules *rules = search->basis->rules;
    struct sluice_error_text text = {{0}};
    if (!has_room(picture, &(struct sluice_request){0}) ||
        !sluice_grow_array(&moving.leavers, &moving.leaver_room, picture->leaver_count, sizeof *moving.leavers) ||
        !sluice_grow_array(&moving.leaves, &moving.leave_room, picture->leaver_count, sizeof *moving.leaves))
        return false;
    uint32_t movables = list_movables(picture, rules, search->settled);
    for (uint32_t i = 0; i < picture->leaver_count; i++) {
        const struct sluice_leaving_job *job = &picture->leavers[i];
        uint32_t m = 0;
        while (m < movables && picture->queue->running[picture->movables[moving.seen[m]].index].id != job->job_id)
            m++;
        enum sluice_leave_why bar = job->bar;
        if (!bar && m == movables)
            bar = movable_of(picture, job->job_id) ? SLUICE_LEAVE_WHY_SPENT : SLUICE_LEAVE_WHY_KIND;
        moving.leavers[i] = (struct sluice_leaver){
            .bar = bar, .request = 1 + m, .end_s = job->end_s, .deadline_s = picture->leaving[job->leaving].deadline_s};
    }
    const struct sluice_leave_limits limits = {
        .now_s = picture->now_s,
        .move_s = rules->compaction_move_cost_s,
        .moves = sluice_moves_left(&moving.moves, rules->compaction_moves_per_hour, picture->now_s)};
    if (!sluice_leave_plan(sluice_mirror_cluster(picture->mirror), rules->placement, moving.requests, 1 + movables,
                           moving.leavers, picture->leaver_count, &limits, moving.leaves, &text))
        return true;
    error("sluice: jobs on nodes to empty are not decided upon: %s", text.text);
    return false;
}

/* Names are looked up under the read locks. */
static void say(const struct sluice_picture *picture)
{
    struct sluice_emptying said = {.now_s = picture->now_s};
    struct sluice_emptying_node *nodes = calloc(picture->leaving_count + 1, sizeof *nodes);
    struct sluice_emptying_job *jobs = calloc(picture->leaver_count + 1, sizeof *jobs);
    char(*to)[SLUICE_MOVES_NODE] = calloc(picture->leaver_count + 1, sizeof *to);
    bool locked = nodes && jobs && to && sluice_queue_lock();
    for (uint32_t i = 0; locked && i < picture->leaving_count; i++)
        if (sluice_leaving_is_told(&picture->leaving[i]))
            nodes[said.node_count++] = (struct sluice_emptying_node){.name = picture->leaving[i].name,
                                                                     .deadline_s = picture->leaving[i].deadline_s,
                                                                     .ordered = picture->leaving[i].ordered};
    for (uint32_t i = 0; locked && i < picture->leaver_count; i++) {
        const struct sluice_leaving_job *job = &picture->leavers[i];
        const struct sluice_job_move *open = sluice_moves_of(&moving.moves, job->job_id);
        struct sluice_emptying_job *one = &jobs[said.job_count++];
        *one = (struct sluice_emptying_job){.job_id = job->job_id,
                                            .node = picture->leaving[job->leaving].name,
                                            .end_s = job->end_s,
                                            .decision = open ? SLUICE_LEAVE_MOVES : moving.leaves[i].decision,
                                            .why = open ? SLUICE_LEAVE_WHY_NONE : moving.leaves[i].why};
        if (one->decision != SLUICE_LEAVE_MOVES)
            continue;
        if (!open)
            name_node(to[i], moving.leaves[i].to.node);
        one->to = open ? open->to : to[i];
    }
    if (locked)
        sluice_queue_unlock();
    said.nodes = nodes;
    said.jobs = jobs;
    moving.said_nothing = false;
    if (locked && !sluice_emptying_write(moving.said_path, &said))
        error("sluice: %s: cannot be written: %s", moving.said_path, strerror(errno));
    free(nodes);
    free(jobs);
    free(to);
}

/* Those of one node that move; true: they have begun to. */
static bool carry_out(const struct search *search, uint32_t leaving)
{
    const struct sluice_picture *picture = search->basis->picture;
    struct sluice_move plan[SLUICE_COMPACTION_MAX_MOVES];
    uint32_t count = 0;
    for (uint32_t i = 0; i < picture->leaver_count && count < SLUICE_COMPACTION_MAX_MOVES; i++)
        if (picture->leavers[i].leaving == leaving && moving.leaves[i].decision == SLUICE_LEAVE_MOVES)
            plan[count++] = (struct sluice_move){.movable = moving.leavers[i].request - 1, .to = moving.leaves[i].to};
    struct sluice_part room = {.node = picture->leaving[leaving].node};
    const struct sluice_placement placement = {.parts = &room, .part_capacity = 1, .part_count = 1};
    return count && begin(picture, search->basis->rules, 0, &placement, plan, count);
}

/* What becomes of the jobs on nodes that are ordered to be empty is said, and, if it `may` be, done: for one node after
 * another. True: jobs of one have begun to move. */
static bool follow_orders(const struct search *search, bool may)
{
    struct sluice_picture *picture = search->basis->picture;
    if (!picture->told_count) {
        if (!moving.said_nothing)
            (void)unlink(moving.said_path);
        moving.said_nothing = true;
        return false;
    }
    for (uint32_t i = 0; i < picture->leaving_count; i++)
        if (sluice_leaving_is_told(&picture->leaving[i]))
            set_node(search->settled, picture->leaving[i].node);
    if (!decide(search))
        return false;
    say(picture);
    if (!may || sluice_moves_failed(&moving.moves, 0, picture->now_s))
        return false;
    for (uint32_t i = 0; i < picture->leaving_count; i++) {
        uint32_t leaving = moving.next_leaving++ % picture->leaving_count;
        const struct sluice_leaving_node *node = &picture->leaving[leaving];
        if (node->ordered && !node->asked && carry_out(search, leaving))
            return true;
    }
    return false;
}

/* Whether others may be moved now. */
static bool may_begin(const struct sluice_picture *picture, const struct sluice_rules *rules)
{
    return rules->compaction_wait_s && picture->movable_count && !sluice_moves_open(&moving.moves) &&
           sluice_failover_keeps_requeues() &&
           sluice_moves_left(&moving.moves, rules->compaction_moves_per_hour, picture->now_s);
}

void sluice_moving_consider(const struct sluice_moving_basis *basis)
{
    struct sluice_picture *picture = basis->picture;
    const struct sluice_rules *rules = basis->rules;
    if (moving.moves.count)
        show_open();
    bool may = may_begin(picture, rules);
    if (picture->now_s < moving.next_try_s || (!may && !picture->told_count && moving.said_nothing))
        return;
    moving.next_try_s = picture->now_s + TRY_S;
    uint64_t *words = calloc(2 * (size_t)picture->node_words, sizeof *words);
    if (!words)
        return;
    struct search search = {.basis = basis,
                            .until_us = sluice_now_us() + TRIES_US,
                            .least_wait_s = least_wait(rules),
                            .taken = words,
                            .settled = words + picture->node_words};
    struct sluice_plan_answer answer;
    memcpy(search.taken, picture->busy, picture->node_words * sizeof *search.taken);
    memcpy(search.settled, picture->busy, picture->node_words * sizeof *search.settled);
    for (uint32_t i = 0; sluice_plan_entry(basis->plan, i, NULL, NULL, &answer); i++) {
        if (answer.state == SLUICE_PLAN_NOW)
            take_parts(search.taken, &answer);
        if (answer.state == SLUICE_PLAN_NOW || answer.state == SLUICE_PLAN_LATER)
            take_parts(search.settled, &answer);
    }
    if (!follow_orders(&search, may) && may && !consider_nodes(&search)) {
        seek(&search);
        moving.tried += search.tried;
    }
    free(words);
}

/* Do those that leave a node have their places still, all together? */
static bool still_have_places(const struct sluice_picture *picture)
{
    struct sluice_cluster *cluster = sluice_mirror_cluster(picture->mirror);
    uint64_t tried[SLUICE_COMPACTION_MAX_MOVES];
    uint32_t count = 0;
    bool all = true;
    for (uint32_t i = 0; i < moving.moves.count && all; i++) {
        const struct sluice_job_move *move = &moving.moves.items[i];
        const struct sluice_movable_job *movable =
            move->stage == SLUICE_MOVE_ASKED ? movable_of(picture, move->job_id) : NULL;
        struct sluice_part part;
        struct sluice_placement to = {.parts = &part, .part_capacity = 1};
        if (!movable)
            continue;
        const struct sluice_request request = only_on(picture, &movable->sought, move->to, 0);
        all = count < SLUICE_COMPACTION_MAX_MOVES &&
              !sluice_start(cluster, SLUICE_POLICY_SLUICE, &request, &to, &tried[count], NULL);
        count += all;
    }
    while (count > 0)
        (void)sluice_release(cluster, tried[--count], NULL);
    return all;
}

/* The same question again, with the answer that it had: each on its nodes. */
static bool still_fits(struct sluice_picture *picture, const struct sluice_job_move *open)
{
    const struct sluice_queue *queue = picture->queue;
    if (!open->for_job)
        return has_room(picture, &(struct sluice_request){0}) && still_have_places(picture);
    const struct sluice_queue_job *entry = entry_of(queue->pending, queue->pending_count, open->for_job);
    struct sluice_move plan[SLUICE_COMPACTION_MAX_MOVES];
    uint32_t moves = 0, count = 0;
    if (!entry || !has_room(picture, &picture->pending[entry - queue->pending].request))
        return false;
    struct sluice_placement room = {.parts = moving.parts, .part_capacity = moving.part_room};
    moving.requests[0] = only_on(picture, &picture->pending[entry - queue->pending], open->room, 0);
    for (uint32_t i = 0; i < moving.moves.count && count < SLUICE_COMPACTION_MAX_MOVES; i++) {
        const struct sluice_job_move *move = &moving.moves.items[i];
        const struct sluice_movable_job *movable =
            move->stage == SLUICE_MOVE_ASKED ? movable_of(picture, move->job_id) : NULL;
        if (!movable)
            continue;
        moving.requests[1 + count] = only_on(picture, &movable->sought, move->to, 1 + count);
        moving.movables[count] =
            (struct sluice_movable){.allocation = movable->allocation, .request = 1 + count, .cost = 1};
        count++;
    }
    struct sluice_compaction_limits limits = {
        .moves = SLUICE_COMPACTION_MAX_MOVES, .gain = 1 + SLUICE_COMPACTION_MAX_MOVES, .factor_permille = 1000};
    return !sluice_compaction_plan(moving.compaction, SLUICE_POLICY_SLUICE, moving.requests, 1 + count, 0,
                                   moving.movables, count, &limits, &room, plan, &moves, NULL);
}

void sluice_moving_fini(void)
{
    sluice_compaction_free(moving.compaction);
    sluice_moves_free(&moving.moves);
    free(moving.jobs);
    free(moving.words);
    free(moving.parts);
    free(moving.leavers);
    free(moving.leaves);
    sluice_listed_release((struct sluice_listed *)moving.asks);
    memset(&moving, 0, sizeof moving);
}
