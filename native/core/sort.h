/* SPDX-License-Identifier: Apache-2.0 */
#ifndef SLUICE_CORE_SORT_H
#define SLUICE_CORE_SORT_H

#include <stddef.h>

/* Stable sort in O(n log n) that allocates nothing (libc's qsort may): `scratch` is as large as `items`, count * size
 * bytes, and has no defined content afterwards. */
void sluice_sort(void *items, void *scratch, size_t count, size_t size, int (*compare)(const void *, const void *));

#endif
