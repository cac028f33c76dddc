/* SPDX-License-Identifier: Apache-2.0 */
#include "fixed.h"

/* 2^(-1/2), 2^(-1/4), ... 2^(-1/2^16) in units of 2^-64, rounded down. */
static const uint64_t ROOTS_OF_HALF[16] = {
    0xB504F333F9DE6484, 0xD744FCCAD69D6AF4, 0xEAC0C6E7DD24392E, 0xF5257D152486CC2C,
    0xFA83B2DB722A033A, 0xFD3E0C0CF486C174, 0xFE9E115C7B8F884B, 0xFF4ECB59511EC8A5,
    0xFFA756521C8DAED1, 0xFFD3A751C0F7E10B, 0xFFE9D2B2F7DB2755, 0xFFF4E91BFF1B8C3D,
    0xFFFA747EA0040664, 0xFFFD3A3B7814EB53, 0xFFFE9D1CC60DDAB1, 0xFFFF4E8E25879BFA,
};

uint64_t sluice_decay(uint64_t value, int64_t age, int64_t half_life)
{
    uint64_t halvings = (uint64_t)age / (uint64_t)half_life;
    if (halvings >= 64)
        return 0;
    value >>= halvings;
    uint64_t fraction = (uint64_t)(((sluice_u128)((uint64_t)age % (uint64_t)half_life) << 16) / (uint64_t)half_life);
    for (unsigned bit = 0; bit < 16; bit++) {
        if (fraction & (UINT64_C(1) << (15U - bit)))
            value = (uint64_t)(((sluice_u128)value * ROOTS_OF_HALF[bit]) >> 64);
    }
    return value;
}
