/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/moves.h"

#include "check.h"
#include "with_checksum.h"

#include <unistd.h>

static const struct sluice_move_view VIEW = {.now_s = 1010, .save_s = 60, .waits = true};

/* Two jobs, asked at 1000, that run since 500 and 600. */
static struct sluice_moves asked(void)
{
    struct sluice_moves moves = {0};
    struct sluice_job_move move = {
        .job_id = 1, .for_job = 7, .started_s = 500, .asked_s = 1000, .from = "n1", .to = "n2", .room = "n1"};
    CHECK(sluice_moves_add(&moves, &move));
    move.job_id = 2;
    move.started_s = 600;
    CHECK(sluice_moves_add(&moves, &move));
    return moves;
}

static struct sluice_move_job running(int64_t started_s, int64_t saved_s)
{
    return (struct sluice_move_job){
        .there = true, .runs = true, .movable = true, .started_s = started_s, .saved_s = saved_s};
}

static void test_all_leave_when_all_have_saved(void)
{
    bool changed;
    struct sluice_moves moves = asked();
    struct sluice_move_job jobs[] = {running(500, 1001), running(600, 900)};
    CHECK(!sluice_moves_follow(&moves, jobs, &VIEW, &changed) && !changed);
    jobs[1].saved_s = 1000;
    CHECK(sluice_moves_follow(&moves, jobs, &VIEW, &changed) && !changed);
    sluice_moves_leave(&moves, 1010);
    CHECK(sluice_moves_of(&moves, 2)->left_s == 1010 && sluice_moves_of(&moves, 1)->saved_s == 1001);
    CHECK(sluice_moves_for(&moves, 7) == 2 && !sluice_moves_for(&moves, 1));
    CHECK(sluice_moves_keep(sluice_moves_open(&moves), 1310) && !sluice_moves_keep(sluice_moves_open(&moves), 1311));
    /* The second one still ends; nobody waits any more, and those that have left come back nevertheless. */
    struct sluice_move_view later = {.now_s = 1020, .save_s = 60};
    jobs[0] = running(1015, 0);
    jobs[1] = (struct sluice_move_job){.there = true};
    CHECK(!sluice_moves_follow(&moves, jobs, &later, &changed) && changed);
    CHECK_INT(moves.items[0].stage, SLUICE_MOVE_BACK);
    CHECK_INT(moves.items[0].back_s, 1015);
    CHECK_INT(moves.items[1].stage, SLUICE_MOVE_LEFT);
    jobs[1].there = false;
    CHECK(!sluice_moves_follow(&moves, jobs, &later, &changed) && changed);
    CHECK_INT(moves.items[1].stage, SLUICE_MOVE_GONE);
    CHECK(!sluice_moves_open(&moves) && !sluice_moves_keep(NULL, 0));
    sluice_moves_free(&moves);
}

static void test_all_stay_if_one_cannot_go(void)
{
    static const struct {
        struct sluice_move_job first;
        struct sluice_move_view view;
        enum sluice_move_why why, other;
    } cases[] = {
        {{true, true, true, 500, 900}, {1061, 60, true}, SLUICE_MOVE_WHY_UNSAVED, SLUICE_MOVE_WHY_OTHER},
        {{true, true, true, 500, 1001}, {1010, 60, false}, SLUICE_MOVE_WHY_WAITS, SLUICE_MOVE_WHY_WAITS},
        {{true, true, false, 500, 1001}, {1061, 60, true}, SLUICE_MOVE_WHY_CHANGED, SLUICE_MOVE_WHY_CHANGED},
        {{true, true, true, 1005, 1006}, {1010, 60, true}, SLUICE_MOVE_WHY_CHANGED, SLUICE_MOVE_WHY_CHANGED},
        {{false, false, false, 0, 0}, {1010, 60, true}, SLUICE_MOVE_WHY_CHANGED, SLUICE_MOVE_WHY_CHANGED},
        {{true, true, true, 500, 1001}, {1091, 60, true}, SLUICE_MOVE_WHY_CHANGED, SLUICE_MOVE_WHY_CHANGED},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        bool changed;
        struct sluice_moves moves = asked();
        struct sluice_move_job jobs[] = {cases[i].first, running(600, 1001)};
        CHECK(!sluice_moves_follow(&moves, jobs, &cases[i].view, &changed) && changed);
        CHECK_INT(moves.items[0].stage, SLUICE_MOVE_STAYED);
        CHECK_INT(moves.items[0].why, cases[i].why);
        CHECK_INT(moves.items[1].why, cases[i].other);
        CHECK(!sluice_moves_open(&moves));
        sluice_moves_free(&moves);
    }
}

static void test_one_that_a_killed_controller_did_not_requeue(void)
{
    bool changed;
    struct sluice_moves moves = asked();
    struct sluice_move_job jobs[] = {running(500, 1001), running(600, 1001)};
    sluice_moves_leave(&moves, 1010);
    struct sluice_move_view view = {.now_s = 1070, .save_s = 60, .waits = true};
    CHECK(!sluice_moves_follow(&moves, jobs, &view, &changed) && !changed);
    view.now_s = 1071;
    CHECK(!sluice_moves_follow(&moves, jobs, &view, &changed) && changed);
    CHECK_INT(moves.items[1].stage, SLUICE_MOVE_STAYED);
    sluice_moves_free(&moves);
}

static void test_bounds(void)
{
    struct sluice_moves moves = asked();
    CHECK_INT(sluice_moves_left(&moves, 3, 1010), 1);
    CHECK_INT(sluice_moves_left(&moves, 1, 1010), 0);
    CHECK_INT(sluice_moves_left(&moves, 3, 4600), 3);
    CHECK(sluice_moves_may(&moves, 1, 500, 2) && !sluice_moves_may(&moves, 1, 500, 1));
    moves.items[0].why = SLUICE_MOVE_WHY_UNSAVED;
    sluice_moves_give_up(&moves, SLUICE_MOVE_WHY_OTHER);
    CHECK_INT(sluice_moves_left(&moves, 3, 1010), 3);
    CHECK(!sluice_moves_may(&moves, 1, 500, 9) && sluice_moves_may(&moves, 1, 501, 1)); /* another run of it */
    CHECK(sluice_moves_may(&moves, 2, 600, 1));
    CHECK(sluice_moves_failed(&moves, 7, 1059) && !sluice_moves_failed(&moves, 7, 1060) &&
          !sluice_moves_failed(&moves, 8, 1010));
    struct sluice_job_move move = moves.items[0];
    move.stage = SLUICE_MOVE_ASKED;
    for (uint32_t i = 0; i < SLUICE_MOVES_MAX; i++) {
        move.job_id = 10 + i;
        CHECK(sluice_moves_add(&moves, &move));
    }
    CHECK_INT(moves.count, SLUICE_MOVES_MAX);
    CHECK(sluice_moves_of(&moves, 9 + SLUICE_MOVES_MAX) && !sluice_moves_of(&moves, 1));
    sluice_moves_free(&moves);
}

static void test_the_file_is_what_was_written(void)
{
    char path[] = "/tmp/sluice-moves-XXXXXX";
    struct sluice_error_text text;
    struct sluice_moves moves = asked(), read = {0};
    int file = mkstemp(path);
    CHECK(file >= 0 && close(file) == 0);
    CHECK_INT(sluice_moves_read(path, &read, &text), SLUICE_ERROR_CORRUPT);
    moves.items[1].stage = SLUICE_MOVE_STAYED;
    moves.items[1].why = SLUICE_MOVE_WHY_REFUSED;
    moves.items[0].lose_s = 4;
    moves.items[0].instead_s = SLUICE_MOVES_MOST_S;
    memset(moves.items[1].room, 'n', SLUICE_MOVES_ROOM - 1); /* a list of nodes, as long as there is room for */
    CHECK(sluice_moves_write(path, &moves));
    CHECK_INT(sluice_moves_read(path, &read, &text), SLUICE_OK);
    CHECK_INT(read.count, 2);
    for (uint32_t i = 0; i < 2; i++) {
        CHECK_INT(read.items[i].job_id, moves.items[i].job_id);
        CHECK_INT(read.items[i].stage, moves.items[i].stage);
        CHECK_INT(read.items[i].why, moves.items[i].why);
        CHECK_INT(read.items[i].started_s, moves.items[i].started_s);
        CHECK_INT(read.items[i].lose_s, moves.items[i].lose_s);
        CHECK_INT(read.items[i].instead_s, moves.items[i].instead_s);
        CHECK(!strcmp(read.items[i].to, moves.items[i].to));
        CHECK(!strcmp(read.items[i].room, moves.items[i].room));
    }
    unlink(path);
    CHECK_INT(sluice_moves_read(path, &read, &text), SLUICE_OK);
    CHECK_INT(read.count, 0);
    CHECK(!sluice_moves_write("/nonexistent/moves", &moves));
    sluice_moves_free(&moves);
    sluice_moves_free(&read);
}

static void test_bad_files(void)
{
    static const char *const bad[] = {
        "1 7 asked 500 1000 0 0 0 n1 n2 n1\n",
        "1 7 lost 500 1000 0 0 0 n1 n2 n1 -\n",
        "1 7 asked 500 1000 0 0 0 n1 n2 n1 why\n",
        "-1 7 asked 500 1000 0 0 0 n1 n2 n1 -\n",
        "1 7 asked 500 1000 0 0 0 n1 n2 n1 - more\n",
        "1 7 asked 500 1000 0 0 9999999999999 n1 n2 n1 -\n",
        "1 7 asked 500 1000 0 0 0 n1 n2 n1 - 4\n",
        "1 7 asked 500 1000 0 0 0 n1 n2 n1 - 4 0\n",
        "1 7 asked 500 1000 0 0 0 n1 n2 n1 - 4 44 4\n",
        "1 7 asked 500 1000 0 0 0 n1 n2 n1 -\n1 7 asked 500 1000 0 0 0 n1 n2 n1 -\n",
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        char body[512];
        struct sluice_moves moves = asked();
        struct sluice_error_text text = {.text = ""};
        snprintf(body, sizeof body, "sluice-moves 1\n%s", bad[i]);
        size_t length;
        char *whole = with_checksum(body, &length);
        CHECK_INT(sluice_moves_parse(whole, length, &moves, &text), SLUICE_ERROR_INVALID);
        CHECK(text.text[0] && moves.count == 2);
        free(whole);
        sluice_moves_free(&moves);
    }
}

int main(void)
{
    test_all_leave_when_all_have_saved();
    test_all_stay_if_one_cannot_go();
    test_one_that_a_killed_controller_did_not_requeue();
    test_bounds();
    test_the_file_is_what_was_written();
    test_bad_files();
    return 0;
}
