/* SPDX-License-Identifier: Apache-2.0 */
/* The governor, over hours of made-up time: what tracing costs stays below its part, whatever events do. */
#include "check.h"
#include "governor.h"

enum { SECOND = 1000000000, MS = 1000000, BUFFER = 1000 };

/* Time goes by as the governor wants to look, or a full buffer makes it; `rate` events a second while it collects. What
 * was spent, ns. */
static uint64_t run(struct governor *governor, uint64_t *now, uint64_t ns, uint64_t rate)
{
    uint64_t end = *now + ns, before = governor->cost;
    while (*now < end) {
        uint64_t step = governor_interval(governor);
        step = governor->on && rate * step / SECOND > BUFFER ? 5 * MS : step;
        *now += step;
        governor_look(governor, *now, step, governor->on ? rate * step / SECOND : 0, 0);
    }
    return governor->cost - before;
}

static void test_budget_is_kept(void)
{
    static const uint64_t rates[] = {0, 1000, 4000, 20000, 200000, 5000000};
    for (size_t i = 0; i < sizeof rates / sizeof *rates; i++) {
        struct governor governor;
        uint64_t now = 5 * (uint64_t)SECOND;
        governor_start(&governor, 10000, now);
        uint64_t spent = run(&governor, &now, 100 * (uint64_t)SECOND, rates[i]);
        uint64_t allowed = SECOND + 10 * MS;       /* of 100 s, and what a second may cost at the start */
        uint64_t one_look = rates[i] * 2000 / 200; /* the shortest, 5 ms */
        CHECK(spent <= allowed + one_look);
        if (rates[i] * 2000 < 10 * MS) { /* it fits */
            CHECK(governor.on && spent >= rates[i] * 2000 * 99);
        } else {
            CHECK(spent > allowed * 3 / 4); /* and is used */
        }
    }
}

static void test_quiet_does_not_save_up(void)
{
    struct governor governor;
    uint64_t now = SECOND;
    governor_start(&governor, 10000, now);
    run(&governor, &now, 3600 * (uint64_t)SECOND, 0);
    CHECK(run(&governor, &now, SECOND, 1000000) <= 2 * 10 * MS + 10 * MS);
    now += 86400 * (uint64_t)SECOND; /* suspended, or a clock that jumps */
    governor_look(&governor, now, 86400 * (uint64_t)SECOND, 0, 0);
    CHECK_INT(governor.credit, 10 * MS);
    governor_look(&governor, now - SECOND, 0, 0, 0);
    CHECK_INT(governor.credit, 10 * MS);
}

static void test_price(void)
{
    struct governor governor;
    uint32_t off[GOVERNOR_SAMPLES], on[GOVERNOR_SAMPLES];
    governor_start(&governor, 10000, 0);
    uint64_t first = governor.price;
    for (uint32_t i = 0; i < GOVERNOR_SAMPLES; i++) {
        off[i] = 3000 + i % 7;
        on[i] = i % 10 == 0 ? 900000 : 3150 + i % 7; /* some wait for the device */
    }
    CHECK(!governor_measure(&governor, off, 7, on, GOVERNOR_SAMPLES));
    CHECK_INT(governor.price, first);
    CHECK(governor_measure(&governor, off, GOVERNOR_SAMPLES, on, GOVERNOR_SAMPLES));
    CHECK(governor.price > 140 && governor.price < 160);
    CHECK(governor_measure(&governor, on, GOVERNOR_SAMPLES, off, GOVERNOR_SAMPLES));
    CHECK_INT(governor.price, 20);
}

static void test_what_is_missing_is_estimated(void)
{
    struct governor governor;
    uint64_t now = 0;
    governor_start(&governor, 1000000, now);
    CHECK_INT(governor_estimate(&governor, SECOND), 0);
    run(&governor, &now, SECOND, 5000);
    CHECK(governor_estimate(&governor, SECOND) > 4900 && governor_estimate(&governor, SECOND) <= 5000);
}

int main(void)
{
    test_budget_is_kept();
    test_quiet_does_not_save_up();
    test_price();
    test_what_is_missing_is_estimated();
    return 0;
}
