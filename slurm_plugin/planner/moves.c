/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/moves.h"

#include "rules/rules.h"
#include "runtime/runtime.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    HOUR_S = 3600,
    STUCK_S = 30, /* all have saved, and still could not be requeued */
    STILL_S = 60, /* a job that was requeued, and still runs so long afterwards, was not */
};

static const char *const stages[SLUICE_MOVE_STAGES] = {"asked", "left", "back", "stayed", "gone"};
static const char *const whys[SLUICE_MOVE_WHYS] = {"-", "unsaved", "other", "waits", "changed", "refused"};

/* ---- the file ---- */

struct listed_moves {
    struct sluice_listed listed;
    struct sluice_job_move moves[];
};

static bool read_time(struct sluice_line *line, int64_t *time_s)
{
    uint64_t number;
    bool good = sluice_line_number(line, SLUICE_MOVES_MOST_S, &number);
    *time_s = (int64_t)number;
    return good;
}

static bool read_word(struct sluice_line *line, const char *const *words, uint32_t count, uint32_t *found)
{
    char word[16];
    if (!sluice_line_name(line, word, sizeof word))
        return false;
    for (*found = 0; *found < count && strcmp(words[*found], word) != 0; ++*found)
        ;
    return *found < count;
}

static bool read_move(struct sluice_line *line, void *item)
{
    struct sluice_job_move *move = item;
    uint64_t job, for_job;
    uint32_t stage, why;
    if (!sluice_line_number(line, UINT32_MAX, &job) || !sluice_line_number(line, UINT32_MAX, &for_job) ||
        !read_word(line, stages, SLUICE_MOVE_STAGES, &stage) || !read_time(line, &move->started_s) ||
        !read_time(line, &move->asked_s) || !read_time(line, &move->saved_s) || !read_time(line, &move->left_s) ||
        !read_time(line, &move->back_s) || !sluice_line_name(line, move->from, sizeof move->from) ||
        !sluice_line_name(line, move->to, sizeof move->to) || !sluice_line_name(line, move->room, sizeof move->room) ||
        !read_word(line, whys, SLUICE_MOVE_WHYS, &why))
        return false;
    if (line->at && (!read_time(line, &move->lose_s) || !read_time(line, &move->instead_s) || !move->instead_s))
        return false;
    move->job_id = (uint32_t)job;
    move->for_job = (uint32_t)for_job;
    move->stage = stage;
    move->why = why;
    return !line->at;
}

static int compare(const void *a, const void *b)
{
    const struct sluice_job_move *one = a, *other = b;
    if (one->asked_s != other->asked_s)
        return one->asked_s < other->asked_s ? -1 : 1;
    return (one->job_id > other->job_id) - (one->job_id < other->job_id);
}

static void say_twice(const void *item, struct sluice_error_text *text)
{
    const struct sluice_job_move *move = item;
    snprintf(text->text, sizeof text->text, "job %" PRIu32 " is there twice", move->job_id);
}

static const struct sluice_listing_kind kind = {.name = "sluice-moves",
                                                .items = "moves",
                                                .wanted = "a move",
                                                .most = SLUICE_MOVES_MAX,
                                                .first = offsetof(struct listed_moves, moves),
                                                .size = sizeof(struct sluice_job_move),
                                                .read = read_move,
                                                .compare = compare,
                                                .twice = say_twice};

enum sluice_error sluice_moves_parse(const char *data, size_t length, struct sluice_moves *moves,
                                     struct sluice_error_text *text)
{
    struct sluice_listed *listed;
    struct sluice_moves read = {0};
    enum sluice_error error = sluice_listing_parse(&kind, data, length, &listed, text);
    if (error)
        return error;
    const struct listed_moves *found = (const struct listed_moves *)listed;
    bool room = sluice_grow_array(&read.items, &read.room, found->listed.count, sizeof *read.items);
    for (uint32_t i = 0; room && i < found->listed.count; i++)
        read.items[read.count++] = found->moves[i];
    sluice_listed_release(listed);
    if (!room)
        return SLUICE_ERROR_NO_MEMORY;
    sluice_moves_free(moves);
    *moves = read;
    return SLUICE_OK;
}

enum sluice_error sluice_moves_read(const char *path, struct sluice_moves *moves, struct sluice_error_text *text)
{
    struct sluice_listing_file file = {.path = ""};
    char *data = NULL;
    size_t length = 0;
    snprintf(file.path, sizeof file.path, "%s", path);
    text->text[0] = '\0';
    if (sluice_listing_look(&file, &data, &length, text) != SLUICE_LISTING_NEW) {
        sluice_moves_free(moves);
        return SLUICE_OK;
    }
    if (!data)
        return SLUICE_ERROR_INVALID;
    enum sluice_error error = sluice_moves_parse(data, length, moves, text);
    free(data);
    return error;
}

static void render(FILE *to, const struct sluice_moves *moves)
{
    fputs("sluice-moves 1\n", to);
    for (uint32_t i = 0; i < moves->count; i++) {
        const struct sluice_job_move *move = &moves->items[i];
        fprintf(to,
                "%" PRIu32 " %" PRIu32 " %s %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %s %s %s %s",
                move->job_id, move->for_job, stages[move->stage], move->started_s, move->asked_s, move->saved_s,
                move->left_s, move->back_s, move->from, move->to, move->room, whys[move->why]);
        if (move->instead_s)
            fprintf(to, " %" PRId64 " %" PRId64, move->lose_s, move->instead_s);
        fputc('\n', to);
    }
}

bool sluice_moves_write(const char *path, const struct sluice_moves *moves)
{
    char *text = NULL;
    size_t length = 0;
    FILE *to = open_memstream(&text, &length);
    if (!to)
        return false;
    render(to, moves);
    bool good = sluice_listing_end(to, &text, &length) && sluice_listing_write(path, text, length);
    free(text);
    return good;
}

/* ---- the list ---- */

void sluice_moves_free(struct sluice_moves *moves)
{
    free(moves->items);
    *moves = (struct sluice_moves){0};
}

bool sluice_move_is_open(const struct sluice_job_move *move)
{
    return move->stage == SLUICE_MOVE_ASKED || move->stage == SLUICE_MOVE_LEFT;
}

/* A plan begins when the last one is through: those under way are among so many of the latest. */
static uint32_t first_of_plan(const struct sluice_moves *moves)
{
    return moves->count > SLUICE_COMPACTION_MAX_MOVES ? moves->count - SLUICE_COMPACTION_MAX_MOVES : 0;
}

const struct sluice_job_move *sluice_moves_open(const struct sluice_moves *moves)
{
    for (uint32_t i = moves->count; i-- > first_of_plan(moves);)
        if (sluice_move_is_open(&moves->items[i]))
            return &moves->items[i];
    return NULL;
}

const struct sluice_job_move *sluice_moves_of(const struct sluice_moves *moves, uint32_t job_id)
{
    for (uint32_t i = moves->count; i-- > first_of_plan(moves);)
        if (moves->items[i].job_id == job_id && sluice_move_is_open(&moves->items[i]))
            return &moves->items[i];
    return NULL;
}

uint32_t sluice_moves_for(const struct sluice_moves *moves, uint32_t for_job)
{
    uint32_t count = 0;
    for (uint32_t i = moves->count; i-- > first_of_plan(moves);)
        count += moves->items[i].for_job == for_job && sluice_move_is_open(&moves->items[i]);
    return count;
}

bool sluice_moves_add(struct sluice_moves *moves, const struct sluice_job_move *move)
{
    if (!sluice_grow_array(&moves->items, &moves->room, moves->count + 1, sizeof *moves->items))
        return false;
    if (moves->count == SLUICE_MOVES_MAX) {
        uint32_t oldest = 0;
        while (oldest < moves->count - 1 && sluice_move_is_open(&moves->items[oldest]))
            oldest++;
        memmove(&moves->items[oldest], &moves->items[oldest + 1], (--moves->count - oldest) * sizeof *moves->items);
    }
    moves->items[moves->count++] = *move;
    return true;
}

/* Did the job stop for it, or will it? */
static bool counts(const struct sluice_job_move *move)
{
    return move->stage != SLUICE_MOVE_STAYED;
}

uint32_t sluice_moves_left(const struct sluice_moves *moves, uint32_t most, int64_t now_s)
{
    uint32_t lately = 0;
    for (uint32_t i = 0; i < moves->count; i++)
        lately += counts(&moves->items[i]) && moves->items[i].asked_s > now_s - HOUR_S;
    return lately < most ? most - lately : 0;
}

bool sluice_moves_may(const struct sluice_moves *moves, uint32_t job_id, int64_t started_s, uint32_t most)
{
    uint32_t moved = 0;
    for (uint32_t i = 0; i < moves->count; i++) {
        const struct sluice_job_move *move = &moves->items[i];
        if (move->job_id != job_id)
            continue;
        if (move->why == SLUICE_MOVE_WHY_UNSAVED && move->started_s == started_s)
            return false;
        moved += counts(move);
    }
    return moved < most;
}

bool sluice_moves_failed(const struct sluice_moves *moves, uint32_t for_job, int64_t now_s)
{
    for (uint32_t i = 0; i < moves->count; i++) {
        const struct sluice_job_move *move = &moves->items[i];
        if (move->for_job == for_job && move->stage == SLUICE_MOVE_STAYED &&
            move->asked_s > now_s - SLUICE_MOVES_AGAIN_S)
            return true;
    }
    return false;
}

/* ---- the plan under way ---- */

void sluice_moves_give_up(struct sluice_moves *moves, enum sluice_move_why why)
{
    for (uint32_t i = 0; i < moves->count; i++) {
        struct sluice_job_move *move = &moves->items[i];
        if (move->stage != SLUICE_MOVE_ASKED)
            continue;
        move->stage = SLUICE_MOVE_STAYED;
        move->why = move->why ? move->why : why;
    }
}

void sluice_moves_leave(struct sluice_moves *moves, int64_t now_s)
{
    for (uint32_t i = 0; i < moves->count; i++) {
        struct sluice_job_move *move = &moves->items[i];
        if (move->stage != SLUICE_MOVE_ASKED)
            continue;
        move->stage = SLUICE_MOVE_LEFT;
        move->left_s = now_s;
    }
}

/* One that has left. */
static bool follow_left(struct sluice_job_move *move, const struct sluice_move_job *job, int64_t now_s)
{
    if (!job->there) {
        move->stage = SLUICE_MOVE_GONE;
    } else if (job->runs && job->started_s != move->started_s) {
        move->stage = SLUICE_MOVE_BACK;
        move->back_s = job->started_s;
    } else if (job->runs && now_s > move->left_s + STILL_S) { /* a controller died before it was requeued */
        move->stage = SLUICE_MOVE_STAYED;
        move->why = SLUICE_MOVE_WHY_CHANGED;
    } else {
        return false;
    }
    return true;
}

bool sluice_moves_follow(struct sluice_moves *moves, const struct sluice_move_job *jobs,
                         const struct sluice_move_view *view, bool *changed)
{
    uint32_t asked = 0, saved = 0, late = 0, lost = 0;
    *changed = false;
    for (uint32_t i = 0; i < moves->count; i++) {
        struct sluice_job_move *move = &moves->items[i];
        const struct sluice_move_job *job = &jobs[i];
        if (move->stage == SLUICE_MOVE_LEFT)
            *changed |= follow_left(move, job, view->now_s);
        if (move->stage != SLUICE_MOVE_ASKED)
            continue;
        asked++;
        bool over = view->now_s > move->asked_s + view->save_s;
        lost += !job->runs || job->started_s != move->started_s || (over && !job->movable) ||
                view->now_s > move->asked_s + view->save_s + STUCK_S;
        move->saved_s = job->saved_s >= move->asked_s ? job->saved_s : 0;
        saved += move->saved_s != 0;
        if (move->saved_s || !over || !job->movable)
            continue;
        move->why = SLUICE_MOVE_WHY_UNSAVED;
        late++;
    }
    if (!asked || (view->waits && !lost && !late))
        return asked && saved == asked;
    sluice_moves_give_up(moves, !view->waits ? SLUICE_MOVE_WHY_WAITS
                                : lost       ? SLUICE_MOVE_WHY_CHANGED
                                             : SLUICE_MOVE_WHY_OTHER);
    *changed = true;
    return false;
}

bool sluice_moves_keep(const struct sluice_job_move *open, int64_t now_s)
{
    return open && (open->stage == SLUICE_MOVE_ASKED || now_s <= open->left_s + SLUICE_MOVES_KEEP_S);
}
