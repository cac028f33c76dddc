/* SPDX-License-Identifier: Apache-2.0 */
#include "journal/record.h"

#include "policy/policy.h"

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

const char *sluice_record_type_name(unsigned type)
{
    static const char *const names[] = {"unknown", "open", "submit", "start", "end",
                                        "requeue", "void", "modify", "array"};
    return names[type < sizeof(names) / sizeof(*names) ? type : 0];
}

size_t sluice_record_size(const struct sluice_record *record)
{
    return SLUICE_RECORD_HEADER + (size_t)record->length;
}

/* Of header and payload, the sum itself left out. */
static uint32_t sum_of(const uint8_t *bytes, uint32_t length)
{
    uint32_t header = sluice_crc32(bytes, SLUICE_RECORD_HEADER - 4);
    uint32_t payload = sluice_crc32(bytes + SLUICE_RECORD_HEADER, length);
    return payload ^ ((header << 1) | (header >> 31));
}

void sluice_record_encode(const struct sluice_record *record, uint8_t *bytes)
{
    memcpy(bytes, magic, sizeof magic);
    put(bytes + 4, 2, record->type);
    put(bytes + 6, 2, SLUICE_RECORD_FORMAT);
    put(bytes + 8, 4, record->length);
    put(bytes + 12, 4, record->job_id);
    put(bytes + 16, 8, record->sequence);
    put(bytes + 24, 8, (uint64_t)record->at_us);
    if (record->length)
        memcpy(bytes + SLUICE_RECORD_HEADER, record->payload, record->length);
    put(bytes + 32, 4, sum_of(bytes, record->length));
}

bool sluice_record_peek(const uint8_t *bytes, size_t length, struct sluice_record *record)
{
    if (length < SLUICE_RECORD_HEADER || memcmp(bytes, magic, sizeof magic) != 0)
        return false;
    *record = (struct sluice_record){
        .type = (unsigned)get(bytes + 4, 2),
        .job_id = (uint32_t)get(bytes + 12, 4),
        .sequence = get(bytes + 16, 8),
        .at_us = (int64_t)get(bytes + 24, 8),
        .length = (uint32_t)get(bytes + 8, 4),
    };
    return true;
}

enum sluice_record_fault sluice_record_decode(const uint8_t *bytes, size_t length, struct sluice_record *record,
                                              size_t *used)
{
    if (memcmp(bytes, magic, length < sizeof magic ? length : sizeof magic) != 0)
        return SLUICE_RECORD_CORRUPT;
    if (length < SLUICE_RECORD_HEADER)
        return SLUICE_RECORD_TORN;
    struct sluice_record found;
    (void)sluice_record_peek(bytes, length, &found);
    if (found.length > SLUICE_RECORD_MAX_PAYLOAD)
        return SLUICE_RECORD_CORRUPT;
    if (length - SLUICE_RECORD_HEADER < found.length)
        return SLUICE_RECORD_TORN;
    if (get(bytes + 32, 4) != sum_of(bytes, found.length))
        return SLUICE_RECORD_CORRUPT;
    if (get(bytes + 6, 2) != SLUICE_RECORD_FORMAT)
        return SLUICE_RECORD_NEWER;
    found.payload = bytes + SLUICE_RECORD_HEADER;
    *record = found;
    *used = sluice_record_size(record);
    return SLUICE_RECORD_GOOD;
}

enum sluice_record_fault sluice_record_scan(const uint8_t *bytes, size_t length, uint64_t *next,
                                            bool (*visit)(const struct sluice_record *, void *), void *argument,
                                            size_t *good)
{
    *good = 0;
    while (*good < length) {
        struct sluice_record record;
        size_t used;
        enum sluice_record_fault fault = sluice_record_decode(bytes + *good, length - *good, &record, &used);
        if (fault != SLUICE_RECORD_GOOD)
            return fault;
        if (!record.sequence || (*next && record.sequence != *next))
            return SLUICE_RECORD_CORRUPT;
        *next = record.sequence + 1;
        *good += used;
        if (!visit(&record, argument))
            break;
    }
    return SLUICE_RECORD_GOOD;
}
