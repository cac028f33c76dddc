/* SPDX-License-Identifier: Apache-2.0 */
#include "governor.h"

#include <stdlib.h>

enum {
    MILLION = 1000000,
    FULL_NS = 1000000000, /* the bucket holds the budget of this long */
    AGAIN_NS = 200000000, /* collection starts again with the budget of this long */
    FIRST_PRICE = 2000,   /* until it is measured */
    LEAST_PRICE = 20,     /* a median hides what is below */
    LEAST_SAMPLES = 8,
    LONGEST_NS = 100000000, /* between two looks */
    SHORTEST_NS = 5000000,
};

static int64_t share(const struct governor *governor, uint64_t ns)
{
    return (int64_t)(ns * governor->budget / MILLION);
}

void governor_start(struct governor *governor, uint32_t budget, uint64_t now)
{
    *governor = (struct governor){
        .budget = budget < MILLION ? budget : MILLION, .price = FIRST_PRICE, .looked = now, .on = true};
    governor->credit = share(governor, AGAIN_NS);
    governor->rate = FULL_NS; /* the worst, until it is known */
}

void governor_look(struct governor *governor, uint64_t now, uint64_t usable, uint64_t events, uint64_t own_ns)
{
    uint64_t passed = now > governor->looked ? now - governor->looked : 0;
    uint64_t spent = events * governor->price + own_ns;
    int64_t full = share(governor, FULL_NS);
    /* Longer than the bucket takes to fill changes nothing, and would not fit. */
    governor->credit += share(governor, usable < 60 * (uint64_t)FULL_NS ? usable : 60 * (uint64_t)FULL_NS);
    governor->credit -= (int64_t)spent;
    governor->credit = governor->credit < full ? governor->credit : full;
    governor->cost += spent;
    governor->events += events;
    governor->collected += governor->on ? passed : 0;
    governor->looked = now;
    if (governor->on && passed > 0) {
        uint64_t rate = (uint64_t)((double)spent / (double)passed * FULL_NS);
        governor->rate = rate > governor->rate / 2 ? rate : governor->rate / 2; /* trust grows slowly */
    }
    governor->on = governor->on ? governor->credit >= 0 : governor->credit >= share(governor, AGAIN_NS);
}

uint64_t governor_interval(const struct governor *governor)
{
    double left = (double)governor->credit * FULL_NS / (double)(governor->rate + 1);
    if (!governor->on || left > LONGEST_NS) {
        return LONGEST_NS;
    }
    return left > SHORTEST_NS ? (uint64_t)left : SHORTEST_NS;
}

uint64_t governor_estimate(const struct governor *governor, uint64_t ns)
{
    if (governor->collected == 0) {
        return 0;
    }
    return (uint64_t)((double)governor->events / (double)governor->collected * (double)ns);
}

static int by_size(const void *one, const void *other)
{
    uint32_t a = *(const uint32_t *)one, b = *(const uint32_t *)other;
    return (a > b) - (a < b);
}

static uint32_t median(uint32_t *values, size_t count)
{
    qsort(values, count, sizeof *values, by_size);
    return values[count / 2];
}

bool governor_measure(struct governor *governor, uint32_t *without, size_t without_count, uint32_t *with,
                      size_t with_count)
{
    if (without_count < LEAST_SAMPLES || with_count < LEAST_SAMPLES) {
        return false;
    }
    uint32_t off = median(without, without_count), on = median(with, with_count);
    governor->price = on > off + LEAST_PRICE ? on - off : LEAST_PRICE;
    governor->rate = FULL_NS;
    return true;
}
