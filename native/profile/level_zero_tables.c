/* SPDX-License-Identifier: Apache-2.0 */
#include "level_zero_tables.h"

#include <stdlib.h>
#include <string.h>

#include "sluice/profile.h"

enum { MOST_NAMES = 1 << 16 };

static struct ze_known **bucket_of(struct ze_table *table, ze_handle handle)
{
    uintptr_t bits = (uintptr_t)handle;
    return &table->buckets[(bits >> 4 ^ bits >> 14) % ZE_BUCKETS];
}

void *ze_table_find(struct ze_table *table, ze_handle handle)
{
    struct ze_known *found = *bucket_of(table, handle);
    while (found != NULL && found->handle != handle) {
        found = found->next;
    }
    return found;
}

void *ze_table_add(struct ze_table *table, ze_handle handle, size_t size)
{
    struct ze_known *added = calloc(1, size), **bucket = bucket_of(table, handle);
    if (added != NULL) {
        *added = (struct ze_known){.next = *bucket, .handle = handle};
        *bucket = added;
    }
    return added;
}

void ze_table_remove(struct ze_table *table, ze_handle handle)
{
    struct ze_known **place = bucket_of(table, handle);
    while (*place != NULL && (*place)->handle != handle) {
        place = &(*place)->next;
    }
    struct ze_known *found = *place;
    if (found != NULL) {
        *place = found->next;
        free(found);
    }
}

void ze_table_clear(struct ze_table *table)
{
    for (size_t i = 0; i < ZE_BUCKETS; i++) {
        for (struct ze_known *known = table->buckets[i], *next; known != NULL; known = next) {
            next = known->next;
            free(known);
        }
        table->buckets[i] = NULL;
    }
}

/* ---- names ---- */

static struct name {
    struct name *next;
    char text[];
} *names[ZE_BUCKETS];
static unsigned name_count;

const char *ze_name(const char *text)
{
    size_t length = strnlen(text, SLUICE_PROFILE_MAX_NAME);
    uint32_t hash = 2166136261u;
    for (size_t i = 0; i < length; i++) {
        hash = (hash ^ (uint8_t)text[i]) * 16777619u;
    }
    struct name **bucket = &names[hash % ZE_BUCKETS], *found = *bucket;
    while (found != NULL && (strlen(found->text) != length || memcmp(found->text, text, length) != 0)) {
        found = found->next;
    }
    if (found == NULL && name_count < MOST_NAMES && (found = malloc(sizeof *found + length + 1)) != NULL) {
        memcpy(found->text, text, length);
        found->text[length] = 0;
        found->next = *bucket;
        *bucket = found;
        name_count++;
    }
    return found != NULL ? found->text : NULL;
}
