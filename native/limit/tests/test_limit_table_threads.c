/* SPDX-License-Identifier: Apache-2.0 */
/* Threads put and take entries of their own, while one searches them all. */
#include "check.h"
#include "table.h"

#include <stdlib.h>

enum { THREADS = 4, ROUNDS = 20000 };

static struct limit_table table;

static bool marked(const struct limit_entry *entry, const void *argument)
{
    (void)argument;
    return entry->bytes == UINT64_MAX;
}

static void *work(void *argument)
{
    uint64_t base = (uint64_t)(uintptr_t)argument << 40;
    for (uint64_t i = 0; i < ROUNDS; i++) {
        struct limit_entry entry = {.class = LIMIT_ADDRESS, .key = base + i % 97, .bytes = i}, back;
        CHECK(limit_table_put(&table, &entry));
        CHECK(limit_table_get(&table, LIMIT_ADDRESS, entry.key, &back) && back.bytes == i);
        CHECK(limit_table_take(&table, LIMIT_ADDRESS, entry.key, &back) && back.bytes == i);
    }
    return NULL;
}

int main(void)
{
    pthread_t threads[THREADS];
    struct limit_entry entry;
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, work, (void *)(i + 1)) == 0);
    for (int i = 0; i < 500; i++)
        CHECK(!limit_table_take_any(&table, marked, NULL, &entry));
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    CHECK(!limit_table_find(&table, marked, NULL, &entry));
    return 0;
}
