/* SPDX-License-Identifier: Apache-2.0 */
/* What is known of the program's handles, and names that are never freed. The caller holds a lock. */
#ifndef SLUICE_PROFILE_LEVEL_ZERO_TABLES_H
#define SLUICE_PROFILE_LEVEL_ZERO_TABLES_H

#include <stddef.h>

#include "level_zero_abi.h"

enum { ZE_BUCKETS = 1 << 10 };

struct ze_known { /* the beginning of each entry */
    struct ze_known *next;
    ze_handle handle;
};

struct ze_table {
    struct ze_known *buckets[ZE_BUCKETS];
};

void *ze_table_find(struct ze_table *table, ze_handle handle);
/* A new entry of `size` bytes, all 0 behind its beginning; NULL: no memory. */
void *ze_table_add(struct ze_table *table, ze_handle handle, size_t size);
void ze_table_remove(struct ze_table *table, ze_handle handle);
void ze_table_clear(struct ze_table *table);

/* A copy that is never freed, the same for the same text; NULL: no room. */
const char *ze_name(const char *text);

#endif
