/* SPDX-License-Identifier: GPL-2.0-or-later */
/* An array that grows. */
#ifndef SLUICE_RUNTIME_ARRAY_H
#define SLUICE_RUNTIME_ARRAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

/* `*array` gets room for `wanted` elements of `size` bytes. False: no memory, and it is as it was. */
static inline bool sluice_grow_array(void *array, uint32_t *room, uint32_t wanted, size_t size)
{
    if (wanted <= *room)
        return true;
    uint32_t larger = wanted < 256 ? 256 : wanted + wanted / 2;
    void **pointer = array, *moved = realloc(*pointer, larger * size);
    if (!moved)
        return false;
    *pointer = moved;
    *room = larger;
    return true;
}

#endif
