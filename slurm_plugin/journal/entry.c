/* SPDX-License-Identifier: Apache-2.0 */
#include "journal/entry.h"

#include "rules/rules.h"

#include <string.h>

static const uint8_t magic[4] = {'S', 'L', 'J', 'R'};

static void put(uint8_t *bytes, unsigned size, uint64_t value)
{
    for (unsigned i = 0; i < size; i++)
        bytes[i] = (uint8_t)(value >> (8 * i));
}

static uint64_t get(const uint8_t *bytes, unsigned size)
{
    uint64_t value = 0;
    for (unsigned i = 0; i < size; i++)
        value |= (uint64_t)bytes[i] << (8 * i);
    return value;
}

const char *sluice_journal_entry_type_name(unsigned type)
{
    static const char *const names[] = {"unknown", "open", "submit", "start", "end",
                                        "requeue", "void", "modify", "array"};
    return names[type < sizeof(names) / sizeof(*names) ? type : 0];
}

size_t sluice_journal_entry_size(const struct sluice_journal_entry *entry)
{
    return SLUICE_JOURNAL_HEADER + (size_t)entry->length;
}

/* Of header and payload, the sum itself left out. */
static uint32_t sum_of(const uint8_t *bytes, uint32_t length)
{
    uint32_t header = sluice_crc32(bytes, SLUICE_JOURNAL_HEADER - 4);
    uint32_t payload = sluice_crc32(bytes + SLUICE_JOURNAL_HEADER, length);
    return payload ^ ((header << 1) | (header >> 31));
}

void sluice_journal_entry_encode(const struct sluice_journal_entry *entry, uint8_t *bytes)
{
    memcpy(bytes, magic, sizeof magic);
    put(bytes + 4, 2, entry->type);
    put(bytes + 6, 2, SLUICE_JOURNAL_FORMAT);
    put(bytes + 8, 4, entry->length);
    put(bytes + 12, 4, entry->job_id);
    put(bytes + 16, 8, entry->sequence);
    put(bytes + 24, 8, (uint64_t)entry->at_us);
    if (entry->length)
        memcpy(bytes + SLUICE_JOURNAL_HEADER, entry->payload, entry->length);
    put(bytes + 32, 4, sum_of(bytes, entry->length));
}

bool sluice_journal_entry_peek(const uint8_t *bytes, size_t length, struct sluice_journal_entry *entry)
{
    if (length < SLUICE_JOURNAL_HEADER || memcmp(bytes, magic, sizeof magic) != 0)
        return false;
    *entry = (struct sluice_journal_entry){
        .type = (unsigned)get(bytes + 4, 2),
        .job_id = (uint32_t)get(bytes + 12, 4),
        .sequence = get(bytes + 16, 8),
        .at_us = (int64_t)get(bytes + 24, 8),
        .length = (uint32_t)get(bytes + 8, 4),
    };
    return true;
}

enum sluice_journal_entry_fault sluice_journal_entry_decode(const uint8_t *bytes, size_t length,
                                                            struct sluice_journal_entry *entry, size_t *used)
{
    if (memcmp(bytes, magic, length < sizeof magic ? length : sizeof magic) != 0)
        return SLUICE_JOURNAL_CORRUPT;
    if (length < SLUICE_JOURNAL_HEADER)
        return SLUICE_JOURNAL_TORN;
    struct sluice_journal_entry found;
    (void)sluice_journal_entry_peek(bytes, length, &found);
    if (found.length > SLUICE_JOURNAL_MAX_PAYLOAD)
        return SLUICE_JOURNAL_CORRUPT;
    if (length - SLUICE_JOURNAL_HEADER < found.length)
        return SLUICE_JOURNAL_TORN;
    if (get(bytes + 32, 4) != sum_of(bytes, found.length))
        return SLUICE_JOURNAL_CORRUPT;
    if (get(bytes + 6, 2) != SLUICE_JOURNAL_FORMAT)
        return SLUICE_JOURNAL_NEWER;
    found.payload = bytes + SLUICE_JOURNAL_HEADER;
    *entry = found;
    *used = sluice_journal_entry_size(entry);
    return SLUICE_JOURNAL_GOOD;
}

enum sluice_journal_entry_fault sluice_journal_entry_scan(const uint8_t *bytes, size_t length, uint64_t *next,
                                                          bool (*visit)(const struct sluice_journal_entry *, void *),
                                                          void *argument, size_t *good)
{
    *good = 0;
    while (*good < length) {
        struct sluice_journal_entry entry;
        size_t used;
        enum sluice_journal_entry_fault fault =
            sluice_journal_entry_decode(bytes + *good, length - *good, &entry, &used);
        if (fault != SLUICE_JOURNAL_GOOD)
            return fault;
        if (!entry.sequence || (*next && entry.sequence != *next))
            return SLUICE_JOURNAL_CORRUPT;
        *next = entry.sequence + 1;
        *good += used;
        if (!visit(&entry, argument))
            break;
    }
    return SLUICE_JOURNAL_GOOD;
}
