/* SPDX-License-Identifier: Apache-2.0 */
/* LANES numbers compared at once, with the compiler's vectors. Bit i of an answer is of numbers[i]. */
#ifndef SLUICE_CORE_LANES_H
#define SLUICE_CORE_LANES_H

#include <stdint.h>
#include <string.h>
#ifdef __SSE4_1__
#include <smmintrin.h>
#endif

enum { LANES = 16, LANES_ALL = (1 << LANES) - 1 };

typedef int32_t four_lanes __attribute__((vector_size(16)));
typedef int64_t two_lanes __attribute__((vector_size(16)));

static inline four_lanes lanes_load(const int32_t *numbers)
{
    four_lanes lanes;
    memcpy(&lanes, numbers, sizeof lanes);
    return lanes;
}

static inline four_lanes lanes_same(int32_t number)
{
    return (four_lanes){number, number, number, number};
}

static inline four_lanes lanes_min(four_lanes a, four_lanes b)
{
#ifdef __SSE4_1__
    return (four_lanes)_mm_min_epi32((__m128i)a, (__m128i)b);
#else
    const four_lanes less = a < b;
    return (a & less) | (b & ~less);
#endif
}

static inline four_lanes lanes_max(four_lanes a, four_lanes b)
{
#ifdef __SSE4_1__
    return (four_lanes)_mm_max_epi32((__m128i)a, (__m128i)b);
#else
    const four_lanes less = a < b;
    return (b & less) | (a & ~less);
#endif
}

/* The bits of LANES truth values, each 0 or -1. */
static inline uint32_t lanes_bits(const four_lanes truth[4])
{
    const four_lanes bits = (truth[0] & (four_lanes){1, 1 << 1, 1 << 2, 1 << 3}) |
                            (truth[1] & (four_lanes){1 << 4, 1 << 5, 1 << 6, 1 << 7}) |
                            (truth[2] & (four_lanes){1 << 8, 1 << 9, 1 << 10, 1 << 11}) |
                            (truth[3] & (four_lanes){1 << 12, 1 << 13, 1 << 14, 1 << 15});
    const two_lanes halves = (two_lanes)bits;
    const uint64_t both = (uint64_t)(halves[0] | halves[1]);
    return (uint32_t)(both | both >> 32);
}

static inline uint32_t lanes_below(const int32_t *numbers, int32_t limit)
{
    four_lanes below[4];
    for (int i = 0; i < 4; i++)
        below[i] = lanes_same(limit) > lanes_load(&numbers[4 * i]);
    return lanes_bits(below);
}

#endif
