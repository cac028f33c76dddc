/* SPDX-License-Identifier: Apache-2.0 */
#include "bench.h"

uint64_t sluice_bench_clock_ns(void)
{
    uint64_t least = UINT64_MAX;
    for (int i = 0; i < 10000; i++) {
        uint64_t before = bench_now_ns();
        uint64_t difference = bench_now_ns() - before;
        least = difference < least ? difference : least;
    }
    return least;
}
