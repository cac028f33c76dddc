/* SPDX-License-Identifier: Apache-2.0 */
#include "sort.h"

#include <stdbool.h>
#include <string.h>

/* Merges the sorted runs [0, middle) and [middle, count) of `from` into `to`. */
static void merge(const char *from, char *to, size_t middle, size_t count, size_t size,
                  int (*compare)(const void *, const void *))
{
    size_t left = 0, right = middle;
    for (size_t i = 0; i < count; i++) {
        bool take_left = right == count || (left < middle && compare(from + left * size, from + right * size) <= 0);
        memcpy(to + i * size, from + (take_left ? left++ : right++) * size, size);
    }
}

void sluice_sort(void *items, void *scratch, size_t count, size_t size, int (*compare)(const void *, const void *))
{
    char *from = items, *to = scratch;
    for (size_t run = 1; run < count; run *= 2) {
        for (size_t begin = 0; begin < count; begin += 2 * run) {
            size_t rest = count - begin;
            size_t merged = rest < 2 * run ? rest : 2 * run;
            merge(from + begin * size, to + begin * size, run < merged ? run : merged, merged, size, compare);
        }
        char *swapped = from;
        from = to;
        to = swapped;
    }
    if (from != items)
        memcpy(items, from, count * size);
}
