/* SPDX-License-Identifier: Apache-2.0 */
/* Fixed-point arithmetic: the order must be the same on every machine, so no floating point decides. */
#ifndef SLUICE_CORE_FIXED_H
#define SLUICE_CORE_FIXED_H

#include <stdint.h>

__extension__ typedef unsigned __int128 sluice_u128;

enum { SLUICE_LOG2_FRACTION_BITS = 24 };

/* log2(value) with 24 fraction bits, rounded down; value >= 1. Digit by digit: squaring the mantissa yields one bit
 * each. */
static inline uint64_t sluice_log2_fixed(uint64_t value)
{
    unsigned exponent = 63U - (unsigned)__builtin_clzll(value);
    uint64_t mantissa = value << (63U - exponent); /* [1, 2) with 63 fraction bits */
    uint64_t result = exponent;
    for (int bit = 0; bit < SLUICE_LOG2_FRACTION_BITS; bit++) {
        sluice_u128 square = (sluice_u128)mantissa * mantissa; /* [1, 4) with 126 fraction bits */
        unsigned carry = (unsigned)(square >> 127);
        mantissa = (uint64_t)(square >> (63U + carry));
        result = (result << 1) | carry;
    }
    return result;
}

/* value * part / whole, rounded down and without overflow; part <= whole, whole >= 1. */
static inline uint64_t sluice_scale(uint64_t value, uint64_t part, uint64_t whole)
{
    return (uint64_t)((sluice_u128)value * part / whole);
}

/* value * 2^(-age / half_life), rounded down; half_life >= 1, age >= 0. */
uint64_t sluice_decay(uint64_t value, int64_t age, int64_t half_life);

#endif
