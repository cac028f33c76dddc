/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Which running jobs to move, where, and for whom: to make room for a job that waits, or to empty a node. moves_slurm.c
 * does what is chosen here.
 */
#include "planner/choice_slurm.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "failover/failover.h"
#include "planner/instead.h"
#include "runtime/runtime.h"
#include "src/slurmctld/slurmctld.h"

enum {
    MOST_MOVABLES = SLUICE_MOST_MOVABLES,
    MOST_TRIES = 4,      /* jobs for which room is sought in one pass ... */
    TRIES_US = 100000,   /* ... after which it is sought for no other ... */
    TRY_S = 5,           /* ... and until the next one ... */
    FAILED_S = 60,       /* ... or after the file could not be written */
    MOST_GAIN_S = 86400, /* of a job whose start is not known, too */
    LATE_S = 30,         /* by which moves may take longer than the policy says until others are preempted instead */
};
#define MOST_GAIN (INT64_MAX / 1000)
#define MOST_COST (INT64_MAX / 1000000 / SLUICE_COMPACTION_MAX_MOVES) /* of a move: all of a plan, times the factor */

static struct {
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
    /* nodes to empty by order (emptying.h) */
    char said_path[4096];
    bool said_nothing; /* there is no file of that */
    struct sluice_leaver *leavers;
    struct sluice_leave *leaves;
    uint32_t leaver_room, leave_room;
} choosing;

void sluice_choosing_start(const char *folder)
{
    snprintf(choosing.said_path, sizeof choosing.said_path, "%s/" SLUICE_EMPTYING_FILE, folder);
}

void sluice_choosing_not_in_charge(void)
{
    choosing.said_nothing = false; /* another controller may say something meanwhile */
}

/* ---- whom to move ---- */

static void set_node(uint64_t *words, uint32_t node)
{
    words[node / 64] |= UINT64_C(1) << node % 64;
}

/* The memory of a GPU that has as much as a waiting job asks: of the first such node that it may use. */
static int64_t memory_for(const struct sluice_picture *picture, const struct sluice_picture_job *sought)
{
    const uint64_t *words = picture->words + sought->words;
    for (uint32_t node = 0; node < picture->node_words * 64; node++) {
        struct sluice_node_view view;
        if ((words[node / 64] >> node % 64 & 1) &&
            !sluice_node_read(sluice_mirror_cluster(picture->mirror), node, &view, NULL) && view.gpu_count &&
            view.gpu_memory_mib[0] >= sought->request.gpu_memory_mib)
            return view.gpu_memory_mib[0];
    }
    return SLUICE_MIRROR_PLAIN_GPU_MIB;
}

/* What a waiting job asks, in thousandths of a GPU, as sluice_allocation_gpus_milli has it of one that runs. */
static int64_t milli_of(const struct sluice_picture *picture, const struct sluice_picture_job *sought)
{
    int64_t share = sought->request.gpu_memory_mib, whole = share ? memory_for(picture, sought) : 1;
    return sought->request.gpus * (share ? (1000 * share + whole - 1) / whole : 1000);
}

/* The request, on those of its nodes that are not in `taken`, nor `but`. */
static struct sluice_request narrowed(const struct sluice_picture *picture, const struct sluice_picture_job *sought,
                                      const uint64_t *taken, uint32_t but, uint32_t number)
{
    uint64_t *words = choosing.words + (size_t)number * picture->node_words;
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
    uint64_t *words = choosing.words + (size_t)number * picture->node_words;
    struct sluice_request request = sought->request;
    const struct sluice_kept_nodes *nodes = sluice_kept_named(picture, names);
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
            !sluice_moves_may(sluice_moving_list(), entry->id, entry->start_s, rules->compaction_moves_per_job))
            continue;
        int64_t loss = sluice_loss(&movable->stake, SLUICE_WAY_MOVE, picture->now_s);
        choosing.seen[count] = i;
        choosing.requests[1 + count] = narrowed(picture, &movable->sought, taken, node, 1 + count);
        choosing.movables[count] = (struct sluice_movable){.allocation = movable->allocation,
                                                           .request = 1 + count,
                                                           .cost = loss < 1           ? 1
                                                                   : loss < MOST_COST ? loss
                                                                                      : MOST_COST};
        count++;
    }
    return count;
}

/* Memory for a plan that makes room for a request. */
static bool has_room(struct sluice_picture *picture, const struct sluice_request *request)
{
    struct sluice_error_text text = {{0}};
    uint32_t words = (1 + MOST_MOVABLES) * picture->node_words;
    int64_t parts = request->nodes_max > request->nodes_min ? request->nodes_max : sluice_nodes_of(request);
    if (!sluice_grow_array(&choosing.words, &choosing.word_room, words, sizeof *choosing.words) ||
        !sluice_grow_array(&choosing.parts, &choosing.part_room, (uint32_t)parts, sizeof *choosing.parts))
        return false;
    if (choosing.compaction && choosing.generation == picture->generation)
        return true;
    sluice_compaction_free(choosing.compaction);
    choosing.compaction = NULL;
    choosing.generation = picture->generation;
    if (!sluice_compaction_new(sluice_mirror_cluster(picture->mirror), MOST_MOVABLES, 1 + MOST_MOVABLES,
                               &choosing.compaction, &text))
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

/* What all moves of a plan lose. */
static int64_t loss_of(const struct sluice_move *plan, uint32_t count)
{
    int64_t loss = 0;
    for (uint32_t i = 0; i < count; i++)
        loss += choosing.movables[plan[i].movable].cost;
    return loss;
}

static int64_t gpu_seconds(int64_t loss)
{
    int64_t seconds = loss / 1000 + (loss % 1000 != 0);
    return seconds < SLUICE_MOVES_MOST_S ? seconds : SLUICE_MOVES_MOST_S;
}

/* `victims_lose`: who is not preempted, as jobs are moved; 0: nobody. False: no room can be made there. */
static bool begin(const struct sluice_picture *picture, const struct sluice_rules *rules, uint32_t for_job,
                  int64_t victims_lose, const struct sluice_placement *room, const struct sluice_move *plan,
                  uint32_t count)
{
    char names[SLUICE_MOVES_ROOM];
    bool good = sluice_queue_lock();
    if (good && !name_nodes(names, room)) {
        sluice_queue_unlock();
        return false;
    }
    struct sluice_job_move moves[SLUICE_COMPACTION_MAX_MOVES];
    for (uint32_t i = 0; good && i < count; i++) {
        const struct sluice_movable_job *movable = &picture->movables[choosing.seen[plan[i].movable]];
        const struct sluice_queue_job *entry = &picture->queue->running[movable->index];
        moves[i] = (struct sluice_job_move){.job_id = entry->id,
                                            .for_job = for_job,
                                            .started_s = entry->start_s,
                                            .asked_s = picture->now_s,
                                            .lose_s = victims_lose ? gpu_seconds(loss_of(plan, count)) : 0,
                                            .instead_s = gpu_seconds(victims_lose)};
        name_node(moves[i].from, node_of(picture, movable->allocation));
        name_node(moves[i].to, plan[i].to.node);
        memcpy(moves[i].room, names, sizeof moves[i].room);
    }
    if (good)
        sluice_queue_unlock();
    if (!good || !sluice_moving_ask(rules, moves, count))
        choosing.next_try_s = picture->now_s + FAILED_S;
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

/* Could others be moved for the plan's i-th entry? */
static bool can_be_helped(const struct search *search, uint32_t i, const struct sluice_plan_answer *answer)
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
           !sluice_moving_is_away(entry->id);
}

/* Does it wait for so long that others may be moved? Not for a job that preempts. */
static bool may_wish(const struct search *search, uint32_t i, const struct sluice_plan_answer *answer)
{
    const struct sluice_picture *picture = search->basis->picture;
    if (!can_be_helped(search, i, answer))
        return false;
    const struct sluice_queue_job *entry = &picture->queue->pending[search->basis->job_index[i]];
    return waited(picture, entry) >= search->least_wait_s && !sluice_instead_of(entry->id, picture->now_s).preempts;
}

/* Seek moves that make room for it, where that gains so much. `instead`: of preempting others, which it may at once; NULL:
 * it has to have waited. True: they have begun. */
static bool try_job(const struct search *search, uint32_t i, int64_t gain, const struct sluice_instead *instead)
{
    struct sluice_picture *picture = search->basis->picture;
    const struct sluice_rules *rules = search->basis->rules;
    uint32_t index = search->basis->job_index[i], job_id = picture->queue->pending[index].id;
    struct sluice_move plan[SLUICE_COMPACTION_MAX_MOVES];
    if (sluice_moves_failed(sluice_moving_list(), job_id, picture->now_s) ||
        !has_room(picture, &picture->pending[index].request))
        return false;
    struct sluice_placement room = {.parts = choosing.parts, .part_capacity = choosing.part_room};
    uint32_t moves = 0, count = list_movables(picture, rules, search->taken);
    choosing.requests[0] = narrowed(picture, &picture->pending[index], search->taken, UINT32_MAX, 0);
    struct sluice_compaction_limits limits = {
        .moves = sluice_moves_left(sluice_moving_list(), rules->compaction_moves_per_hour, picture->now_s),
        .gain = gain < MOST_GAIN ? gain : MOST_GAIN,
        .factor_permille = rules->compaction_factor_permille};
    if (!count || sluice_compaction_plan(choosing.compaction, rules->placement, choosing.requests, 1 + count, 0,
                                         choosing.movables, count, &limits, &room, plan, &moves, NULL))
        return false;
    return moves &&
           (instead || waited(picture, &picture->queue->pending[index]) >= wait_on_all(picture, rules, &room)) &&
           begin(picture, rules, job_id, instead ? instead->victims_lose : 0, &room, plan, moves);
}

/* Of an earlier start: the time until the reserved one, times its GPUs. */
static int64_t gain_of_start(const struct search *search, uint32_t i, const struct sluice_plan_answer *answer)
{
    const struct sluice_picture *picture = search->basis->picture;
    const struct sluice_picture_job *sought = &picture->pending[search->basis->job_index[i]];
    int64_t gain_s = answer->state == SLUICE_PLAN_LATER ? answer->start_s - picture->now_s : MOST_GAIN_S;
    return milli_of(picture, sought) * sluice_nodes_of(&sought->request) *
           (gain_s < MOST_GAIN_S ? gain_s : MOST_GAIN_S);
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
        if (may_wish(search, i, &answer) && search->passed++ >= choosing.tried) {
            if (search->tried == MOST_TRIES || sluice_now_us() > search->until_us)
                return;
            search->tried++;
            if (try_job(search, i, gain_of_start(search, i, &answer), NULL))
                return;
        }
        if (answer.state == SLUICE_PLAN_LATER)
            take_parts(search->taken, &answer);
    }
    choosing.tried = search->tried = 0; /* all were tried: again from the first one on */
}

/* ---- instead of preemption ---- */

/* Are jobs moved for one that would preempt others now? Since an earlier controller asked, or from now on, where that
 * loses less by the policy's factor. */
static bool is_helped(const struct search *search, uint32_t i, const struct sluice_plan_answer *answer,
                      const struct sluice_instead *instead, bool may)
{
    if (may && sluice_now_us() < search->until_us && can_be_helped(search, i, answer))
        (void)try_job(search, i, instead->victims_lose, instead);
    return sluice_moves_for(sluice_moving_list(), instead->job_id);
}

static int64_t loss_for(uint32_t job_id)
{
    const struct sluice_moves *moves = sluice_moving_list();
    for (uint32_t i = moves->count; i-- > 0;)
        if (moves->items[i].for_job == job_id && sluice_move_is_open(&moves->items[i]))
            return moves->items[i].lose_s * 1000;
    return 0;
}

/* Answer the hook for the jobs in their order. Some cannot be planned: they preempt. */
static void answer_all(struct search *search, const struct sluice_instead *jobs, uint32_t count, bool may)
{
    const struct sluice_picture *picture = search->basis->picture;
    const struct sluice_rules *rules = search->basis->rules;
    /* A move may cost a day; places are not kept for longer than this. */
    int64_t kept_s =
        rules->compaction_move_cost_s < SLUICE_MOVES_KEEP_S ? rules->compaction_move_cost_s : SLUICE_MOVES_KEEP_S;
    int64_t until_s = picture->now_s + rules->compaction_save_s + kept_s + LATE_S;
    struct sluice_plan_answer answer;
    uint32_t job_id;
    for (uint32_t i = 0;
         i < search->basis->job_count && sluice_plan_entry(search->basis->plan, i, &job_id, NULL, &answer); i++) {
        for (uint32_t j = 0; j < count; j++)
            if (jobs[j].job_id == job_id && search->basis->job_index[i] != UINT32_MAX &&
                is_helped(search, i, &answer, &jobs[j], may && !sluice_moves_open(sluice_moving_list())))
                sluice_instead_answer(job_id, SLUICE_INSTEAD_MOVES, loss_for(job_id), picture->now_s, until_s);
        if (answer.state == SLUICE_PLAN_LATER)
            take_parts(search->taken, &answer);
    }
    const struct sluice_queue *queue = picture->queue;
    for (uint32_t j = 0; j < count; j++)
        if (sluice_entry_of(queue->pending, queue->pending_count, jobs[j].job_id)) /* others are new: the next pass */
            sluice_instead_answer(jobs[j].job_id, SLUICE_INSTEAD_PREEMPT, 0, picture->now_s, 0);
}

/* Jobs whose moves have failed preempt, and those that still wait when all have moved. True: there are such jobs. */
static bool see_moved(const struct sluice_picture *picture)
{
    struct sluice_instead jobs[SLUICE_INSTEAD_MOST];
    uint32_t count = sluice_instead_list(jobs, SLUICE_INSTEAD_MOVES, picture->now_s);
    bool any = false;
    for (uint32_t j = 0; j < count; j++)
        if (!sluice_moves_for(sluice_moving_list(), jobs[j].job_id)) {
            sluice_instead_moved(jobs[j].job_id, picture->now_s);
            any = true;
        }
    return any;
}

/* Jobs that do not wait any more leave room for others. In a flood it is not known which these are. */
static void forget_gone(const struct sluice_picture *picture)
{
    const struct sluice_queue *queue = picture->queue;
    struct sluice_instead jobs[SLUICE_INSTEAD_MOST];
    uint32_t count = queue->left_out ? 0 : sluice_instead_list(jobs, SLUICE_INSTEAD_PREEMPT, picture->now_s);
    for (uint32_t j = 0; j < count; j++)
        if (!sluice_entry_of(queue->pending, queue->pending_count, jobs[j].job_id))
            sluice_instead_gone(jobs[j].job_id, picture->now_s);
}

/* Nodes where others start now take no part. NULL: no memory. */
static uint64_t *taken_now(const struct sluice_moving_basis *basis)
{
    const struct sluice_picture *picture = basis->picture;
    uint64_t *taken = calloc(picture->node_words, sizeof *taken);
    struct sluice_plan_answer answer;
    if (taken)
        memcpy(taken, picture->busy, picture->node_words * sizeof *taken);
    for (uint32_t i = 0; taken && sluice_plan_entry(basis->plan, i, NULL, NULL, &answer); i++)
        if (answer.state == SLUICE_PLAN_NOW)
            take_parts(taken, &answer);
    return taken;
}

/* Tell the hook which of the jobs that would preempt others are to wait for moves. */
static void answer_hook(const struct sluice_moving_basis *basis, bool may)
{
    struct sluice_picture *picture = basis->picture;
    struct sluice_instead jobs[SLUICE_INSTEAD_MOST];
    forget_gone(picture);
    bool preempt = see_moved(picture);
    uint32_t count = sluice_instead_list(jobs, SLUICE_INSTEAD_LOOK, picture->now_s);
    struct search search = {
        .basis = basis, .until_us = sluice_now_us() + TRIES_US, .taken = count ? taken_now(basis) : NULL};
    if (search.taken)
        answer_all(&search, jobs, count, may);
    for (uint32_t j = 0; j < count; j++)
        preempt |= sluice_instead_of(jobs[j].job_id, picture->now_s).state == SLUICE_INSTEAD_PREEMPT;
    free(search.taken);
    if (preempt)
        queue_job_scheduler(); /* Slurm asks the hook again */
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
        if (sluice_allocation_read(cluster, job->allocation, choosing.parts, choosing.part_room, &part_count, NULL))
            continue;
        for (uint32_t p = 0; p < part_count && !there; p++)
            there = choosing.parts[p].node == node;
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
        if (choosing.movables[i].allocation == allocation)
            return i;
    return UINT32_MAX;
}

/* How many of a node's jobs, the last to end first, have places elsewhere, all together; and what that costs. */
static uint32_t place_elsewhere(const struct search *search, const struct sluice_backfill_running *last, uint32_t count,
                                uint32_t movables, struct sluice_move *plan, int64_t *cost)
{
    const struct sluice_rules *rules = search->basis->rules;
    struct sluice_cluster *cluster = sluice_mirror_cluster(search->basis->picture->mirror);
    uint32_t most =
        sluice_moves_left(sluice_moving_list(), rules->compaction_moves_per_hour, search->basis->picture->now_s);
    uint64_t tried[SLUICE_COMPACTION_MAX_MOVES];
    uint32_t placed = 0;
    for (*cost = 0; placed < count && placed < most; placed++) {
        uint32_t movable = movable_with(last[placed].allocation, movables);
        struct sluice_placement to = {.parts = &plan[placed].to, .part_capacity = 1};
        if (movable == UINT32_MAX ||
            sluice_start(cluster, rules->placement, &choosing.requests[1 + movable], &to, &tried[placed], NULL))
            break;
        plan[placed].movable = movable;
        *cost += choosing.movables[movable].cost;
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
        struct sluice_leaving_node *leaving = &picture->leaving[choosing.next_leaving++ % picture->leaving_count];
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
            return begin(picture, rules, 0, 0, &placement, plan, leave);
    }
    return false;
}

static bool consider_nodes(const struct search *search)
{
    struct sluice_picture *picture = search->basis->picture;
    const struct sluice_request all_nodes = {.nodes_max = (int64_t)picture->node_words * 64};
    if (picture->leaving_count == picture->told_count || sluice_moves_failed(sluice_moving_list(), 0, picture->now_s) ||
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
        !sluice_grow_array(&choosing.leavers, &choosing.leaver_room, picture->leaver_count, sizeof *choosing.leavers) ||
        !sluice_grow_array(&choosing.leaves, &choosing.leave_room, picture->leaver_count, sizeof *choosing.leaves))
        return false;
    uint32_t movables = list_movables(picture, rules, search->settled);
    for (uint32_t i = 0; i < picture->leaver_count; i++) {
        const struct sluice_leaving_job *job = &picture->leavers[i];
        uint32_t m = 0;
        while (m < movables && picture->queue->running[picture->movables[choosing.seen[m]].index].id != job->job_id)
            m++;
        const struct sluice_movable_job *movable = sluice_movable_of(picture, job->job_id);
        enum sluice_leave_why bar = job->bar;
        if (!bar && m == movables)
            bar = movable ? SLUICE_LEAVE_WHY_SPENT : SLUICE_LEAVE_WHY_KIND;
        choosing.leavers[i] =
            (struct sluice_leaver){.bar = bar,
                                   .request = 1 + m,
                                   .end_s = job->end_s,
                                   .deadline_s = picture->leaving[job->leaving].deadline_s,
                                   .move_s = movable ? sluice_lost_s(&movable->stake, SLUICE_WAY_MOVE, picture->now_s)
                                                     : rules->compaction_move_cost_s};
    }
    const struct sluice_leave_limits limits = {
        .now_s = picture->now_s,
        .moves = sluice_moves_left(sluice_moving_list(), rules->compaction_moves_per_hour, picture->now_s)};
    if (!sluice_leave_plan(sluice_mirror_cluster(picture->mirror), rules->placement, choosing.requests, 1 + movables,
                           choosing.leavers, picture->leaver_count, &limits, choosing.leaves, &text))
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
        const struct sluice_job_move *open = sluice_moves_of(sluice_moving_list(), job->job_id);
        struct sluice_emptying_job *one = &jobs[said.job_count++];
        *one = (struct sluice_emptying_job){.job_id = job->job_id,
                                            .node = picture->leaving[job->leaving].name,
                                            .end_s = job->end_s,
                                            .decision = open ? SLUICE_LEAVE_MOVES : choosing.leaves[i].decision,
                                            .why = open ? SLUICE_LEAVE_WHY_NONE : choosing.leaves[i].why};
        if (one->decision != SLUICE_LEAVE_MOVES)
            continue;
        if (!open)
            name_node(to[i], choosing.leaves[i].to.node);
        one->to = open ? open->to : to[i];
    }
    if (locked)
        sluice_queue_unlock();
    said.nodes = nodes;
    said.jobs = jobs;
    choosing.said_nothing = false;
    if (locked && !sluice_emptying_write(choosing.said_path, &said))
        error("sluice: %s: cannot be written: %s", choosing.said_path, strerror(errno));
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
        if (picture->leavers[i].leaving == leaving && choosing.leaves[i].decision == SLUICE_LEAVE_MOVES)
            plan[count++] =
                (struct sluice_move){.movable = choosing.leavers[i].request - 1, .to = choosing.leaves[i].to};
    struct sluice_part room = {.node = picture->leaving[leaving].node};
    const struct sluice_placement placement = {.parts = &room, .part_capacity = 1, .part_count = 1};
    return count && begin(picture, search->basis->rules, 0, 0, &placement, plan, count);
}

/* What becomes of the jobs on nodes that are ordered to be empty is said, and, if it `may` be, done: for one node after
 * another. True: jobs of one have begun to move. */
static bool follow_orders(const struct search *search, bool may)
{
    struct sluice_picture *picture = search->basis->picture;
    if (!picture->told_count) {
        if (!choosing.said_nothing)
            (void)unlink(choosing.said_path);
        choosing.said_nothing = true;
        return false;
    }
    for (uint32_t i = 0; i < picture->leaving_count; i++)
        if (sluice_leaving_is_told(&picture->leaving[i]))
            set_node(search->settled, picture->leaving[i].node);
    if (!decide(search))
        return false;
    say(picture);
    if (!may || sluice_moves_failed(sluice_moving_list(), 0, picture->now_s))
        return false;
    for (uint32_t i = 0; i < picture->leaving_count; i++) {
        uint32_t leaving = choosing.next_leaving++ % picture->leaving_count;
        const struct sluice_leaving_node *node = &picture->leaving[leaving];
        if (node->ordered && !node->asked && carry_out(search, leaving))
            return true;
    }
    return false;
}

/* Whether others may be moved now. */
static bool may_begin(const struct sluice_picture *picture, const struct sluice_rules *rules)
{
    return rules->compaction_wait_s && picture->movable_count && !sluice_moves_open(sluice_moving_list()) &&
           sluice_failover_keeps_requeues() &&
           sluice_moves_left(sluice_moving_list(), rules->compaction_moves_per_hour, picture->now_s);
}

void sluice_moving_consider(const struct sluice_moving_basis *basis)
{
    struct sluice_picture *picture = basis->picture;
    const struct sluice_rules *rules = basis->rules;
    if (sluice_moving_list()->count)
        sluice_moving_show_open();
    bool may = may_begin(picture, rules);
    bool some = picture->movable_count || sluice_moves_open(sluice_moving_list()); /* of an earlier controller, too */
    sluice_instead_open(rules->compaction_wait_s && some && sluice_failover_keeps_requeues(), picture->now_s);
    answer_hook(basis, may);
    may = may && !sluice_moves_open(sluice_moving_list());
    if (picture->now_s < choosing.next_try_s || (!may && !picture->told_count && choosing.said_nothing))
        return;
    choosing.next_try_s = picture->now_s + TRY_S;
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
        choosing.tried += search.tried;
    }
    free(words);
}

/* Do those that leave a node have their places still, all together? */
static bool still_have_places(const struct sluice_picture *picture)
{
    const struct sluice_moves *moves = sluice_moving_list();
    struct sluice_cluster *cluster = sluice_mirror_cluster(picture->mirror);
    uint64_t tried[SLUICE_COMPACTION_MAX_MOVES];
    uint32_t count = 0;
    bool all = true;
    for (uint32_t i = 0; i < moves->count && all; i++) {
        const struct sluice_job_move *move = &moves->items[i];
        const struct sluice_movable_job *movable =
            move->stage == SLUICE_MOVE_ASKED ? sluice_movable_of(picture, move->job_id) : NULL;
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
bool sluice_choice_still_fits(struct sluice_picture *picture, const struct sluice_job_move *open)
{
    const struct sluice_queue *queue = picture->queue;
    if (!open->for_job)
        return has_room(picture, &(struct sluice_request){0}) && still_have_places(picture);
    const struct sluice_queue_job *entry = sluice_entry_of(queue->pending, queue->pending_count, open->for_job);
    const struct sluice_moves *under_way = sluice_moving_list();
    struct sluice_move plan[SLUICE_COMPACTION_MAX_MOVES];
    uint32_t moves = 0, count = 0;
    if (!entry || !has_room(picture, &picture->pending[entry - queue->pending].request))
        return false;
    struct sluice_placement room = {.parts = choosing.parts, .part_capacity = choosing.part_room};
    choosing.requests[0] = only_on(picture, &picture->pending[entry - queue->pending], open->room, 0);
    for (uint32_t i = 0; i < under_way->count && count < SLUICE_COMPACTION_MAX_MOVES; i++) {
        const struct sluice_job_move *move = &under_way->items[i];
        const struct sluice_movable_job *movable =
            move->stage == SLUICE_MOVE_ASKED ? sluice_movable_of(picture, move->job_id) : NULL;
        if (!movable)
            continue;
        choosing.requests[1 + count] = only_on(picture, &movable->sought, move->to, 1 + count);
        choosing.movables[count] =
            (struct sluice_movable){.allocation = movable->allocation, .request = 1 + count, .cost = 1};
        count++;
    }
    struct sluice_compaction_limits limits = {
        .moves = SLUICE_COMPACTION_MAX_MOVES, .gain = 1 + SLUICE_COMPACTION_MAX_MOVES, .factor_permille = 1000};
    return !sluice_compaction_plan(choosing.compaction, SLUICE_POLICY_SLUICE, choosing.requests, 1 + count, 0,
                                   choosing.movables, count, &limits, &room, plan, &moves, NULL);
}

void sluice_choosing_fini(void)
{
    sluice_instead_forget();
    sluice_compaction_free(choosing.compaction);
    free(choosing.words);
    free(choosing.parts);
    free(choosing.leavers);
    free(choosing.leaves);
    memset(&choosing, 0, sizeof choosing);
}
