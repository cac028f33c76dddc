/* SPDX-License-Identifier: Apache-2.0 */
/* The limiter's table against a plain array, over random operations. */
#include "check.h"
#include "table.h"

#include <stdlib.h>
#include <string.h>

enum { KEYS = 3000, STEPS = 300000 };

static struct limit_table table;
static struct limit_entry plain[2][KEYS];

static bool large(const struct limit_entry *entry, const void *argument)
{
    return entry->bytes > *(const uint64_t *)argument;
}

static void count(const struct limit_entry *entry, const void *counter)
{
    CHECK(entry->bytes > 900);
    ++*(size_t *)(uintptr_t)counter;
}

int main(void)
{
    uint64_t chance = 88172645463325252u, found_bytes = 900;
    struct limit_entry entry;
    CHECK(!limit_table_get(&table, LIMIT_ADDRESS, 1, &entry));
    for (int step = 0; step < STEPS; step++) {
        chance ^= chance << 13, chance ^= chance >> 7, chance ^= chance << 17;
        enum limit_class class = chance >> 20 & 1 ? LIMIT_ADDRESS : LIMIT_MAPPING;
        uint64_t key = (chance >> 24) % KEYS;
        struct limit_entry *place = &plain[class == LIMIT_MAPPING][key];
        uint64_t address = key * 4096; /* as addresses are: far from random */
        if (chance % 3 == 0 && place->class == 0) {
            *place = (struct limit_entry){.class = class, .key = address, .bytes = chance % 1000};
            CHECK(limit_table_put(&table, place));
        } else if (chance % 3 == 1) {
            CHECK(limit_table_take(&table, class, address, &entry) == (place->class != 0));
            CHECK(place->class == 0 || entry.bytes == place->bytes);
            *place = (struct limit_entry){0};
        } else {
            CHECK(limit_table_get(&table, class, address, &entry) == (place->class != 0));
            CHECK(place->class == 0 || (entry.key == address && entry.bytes == place->bytes));
        }
    }
    size_t expected = 0, taken = 0;
    for (int i = 0; i < 2 * KEYS; i++)
        expected += plain[i / KEYS][i % KEYS].class != 0 && plain[i / KEYS][i % KEYS].bytes > found_bytes;
    CHECK(expected > 10 && limit_table_find(&table, large, &found_bytes, &entry));
    CHECK(limit_table_take_any(&table, large, &found_bytes, &entry));
    limit_table_drain(&table, large, &found_bytes, count, &taken);
    CHECK(taken + 1 == expected && !limit_table_find(&table, large, &found_bytes, &entry));
    return 0;
}
