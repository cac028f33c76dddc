/* SPDX-License-Identifier: Apache-2.0 */
/* Moves instead of preemption: nobody is held back for longer than it says, whatever the planner does. */
#include "planner/instead.h"

#include "check.h"

enum { JOB = 7, NOW = 1000 };

static bool hold_at(int64_t now_s)
{
    bool asked;
    return sluice_instead_hold(JOB, 5000, now_s, &asked);
}

/* The hook has asked. */
static void ask(void)
{
    bool asked;
    sluice_instead_forget();
    sluice_instead_open(true, NOW);
    CHECK(sluice_instead_hold(JOB, 5000, NOW, &asked) && asked);
    CHECK(sluice_instead_hold(JOB, 6000, NOW + 1, &asked) && !asked); /* once */
}

static void test_nobody_is_held_back_where_the_planner_does_not_look(void)
{
    bool asked;
    sluice_instead_forget();
    CHECK(!sluice_instead_hold(JOB, 5000, NOW, &asked) && !asked);
    sluice_instead_open(true, NOW - SLUICE_INSTEAD_OPEN_S - 1); /* it hangs */
    CHECK(!hold_at(NOW));
    sluice_instead_open(true, NOW);
    sluice_instead_open(false, NOW);
    CHECK(!hold_at(NOW));
    CHECK_INT(sluice_instead_of(JOB, NOW).state, SLUICE_INSTEAD_NONE);
}

static void test_without_an_answer_it_preempts(void)
{
    struct sluice_instead jobs[SLUICE_INSTEAD_MOST];
    ask();
    CHECK_INT(sluice_instead_list(jobs, SLUICE_INSTEAD_LOOK, NOW), 1);
    CHECK(jobs[0].job_id == JOB && jobs[0].victims_lose == 5000);
    CHECK(hold_at(NOW + SLUICE_INSTEAD_LOOK_S));
    CHECK(!hold_at(NOW + SLUICE_INSTEAD_LOOK_S + 1));
    CHECK_INT(sluice_instead_list(jobs, SLUICE_INSTEAD_LOOK, NOW + SLUICE_INSTEAD_LOOK_S + 1), 0);
    sluice_instead_answer(JOB, SLUICE_INSTEAD_MOVES, 1, NOW + 12, NOW + 99); /* too late */
    CHECK(!hold_at(NOW + 12));

    ask();
    sluice_instead_answer(JOB, SLUICE_INSTEAD_MOVES, 1, NOW + 12, NOW + 99); /* late, but it has not preempted */
    CHECK(hold_at(NOW + 12));
}

static void test_what_the_planner_answers(void)
{
    struct sluice_instead jobs[SLUICE_INSTEAD_MOST];
    ask();
    sluice_instead_answer(JOB, SLUICE_INSTEAD_PREEMPT, 0, NOW + 2, 0);
    CHECK(!hold_at(NOW + 2) && !hold_at(NOW + 2 + SLUICE_INSTEAD_AGAIN_S));
    CHECK(!sluice_instead_of(JOB, NOW + 3).preempts);
    sluice_instead_open(true, NOW + 60);
    CHECK(hold_at(NOW + 3 + SLUICE_INSTEAD_AGAIN_S)); /* it still waits, and more may have changed */
    sluice_instead_gone(JOB, NOW + 70);
    CHECK_INT(sluice_instead_list(jobs, SLUICE_INSTEAD_LOOK, NOW + 70), 0);

    ask();
    sluice_instead_answer(JOB, SLUICE_INSTEAD_MOVES, 300, NOW + 2, NOW + 50);
    CHECK(sluice_instead_of(JOB, NOW + 3).state == SLUICE_INSTEAD_MOVES &&
          sluice_instead_of(JOB, NOW + 3).moves_lose == 300);
    CHECK_INT(sluice_instead_list(jobs, SLUICE_INSTEAD_MOVES, NOW + 50), 1);
    CHECK(hold_at(NOW + 50) && !hold_at(NOW + 51)); /* they take too long */
    CHECK_INT(sluice_instead_list(jobs, SLUICE_INSTEAD_MOVES, NOW + 51), 0);

    ask();
    sluice_instead_answer(JOB, SLUICE_INSTEAD_MOVES, 300, NOW + 2, NOW + 50);
    sluice_instead_moved(JOB, NOW + 5);
    CHECK(!hold_at(NOW + 5));
    sluice_instead_answer(JOB + 1, SLUICE_INSTEAD_MOVES, 1, NOW, NOW + 9); /* of whom nobody asked */
    CHECK_INT(sluice_instead_of(JOB + 1, NOW).state, SLUICE_INSTEAD_NONE);
}

/* Slurm looks at a job once in `passes_s`: it preempts at the second look, or the third, after moves that failed. */
static void test_it_preempts_however_rarely_slurm_looks(void)
{
    static const int64_t passes_s[] = {1, 30, 61, 71, 120, 600, 3 * 3600};
    for (size_t i = 0; i < sizeof passes_s / sizeof *passes_s; i++) {
        for (int answer = 0; answer < 3; answer++) {
            ask();
            if (answer == 1)
                sluice_instead_answer(JOB, SLUICE_INSTEAD_PREEMPT, 0, NOW, 0);
            if (answer == 2)
                sluice_instead_answer(JOB, SLUICE_INSTEAD_MOVES, 1, NOW, NOW + 90);
            int64_t first_s = NOW + (answer == 1 ? 0 : answer == 2 ? 90 : SLUICE_INSTEAD_LOOK_S), now_s = NOW + 1;
            while (now_s <= first_s) {
                CHECK(answer != 1 && hold_at(now_s));
                now_s += passes_s[i];
            }
            sluice_instead_open(true, now_s);
            CHECK(!hold_at(now_s));
        }
    }
}

static void test_whoever_preempts_is_known_to(void)
{
    sluice_instead_forget();
    sluice_instead_preempts(JOB, 800, NOW);
    CHECK(sluice_instead_of(JOB, NOW).preempts && sluice_instead_of(JOB, NOW).victims_lose == 800);
    sluice_instead_preempts(JOB, 900, NOW + 50);
    CHECK(sluice_instead_of(JOB, NOW + 110).preempts);
    CHECK(!sluice_instead_of(JOB, NOW + 111).preempts);
}

static void test_too_many_jobs_are_not_held_back(void)
{
    bool asked;
    ask();
    for (uint32_t job = 100; job < 100 + SLUICE_INSTEAD_MOST - 1; job++)
        CHECK(sluice_instead_hold(job, 1, NOW, &asked));
    CHECK(!sluice_instead_hold(5, 1, NOW, &asked));
    sluice_instead_preempts(5, 1, NOW);
    CHECK_INT(sluice_instead_of(5, NOW).state, SLUICE_INSTEAD_NONE);
    sluice_instead_open(true, NOW + 100);
    CHECK(!sluice_instead_hold(5, 1, NOW + 100, &asked)); /* none of them has heard that it may preempt */
    sluice_instead_gone(100, NOW + 100);
    CHECK(sluice_instead_hold(5, 1, NOW + 100, &asked));
    sluice_instead_open(true, NOW + 101);
    CHECK(!sluice_instead_hold(101, 1, NOW + 101, &asked)); /* it has heard; what is over makes room */
    sluice_instead_open(true, NOW + 200);
    CHECK(sluice_instead_hold(6, 1, NOW + 200, &asked));
}

int main(void)
{
    test_nobody_is_held_back_where_the_planner_does_not_look();
    test_without_an_answer_it_preempts();
    test_what_the_planner_answers();
    test_it_preempts_however_rarely_slurm_looks();
    test_whoever_preempts_is_known_to();
    test_too_many_jobs_are_not_held_back();
    return 0;
}
