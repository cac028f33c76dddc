/* SPDX-License-Identifier: Apache-2.0 */
/* A segment of the journal: any bytes; and what is accepted is what was written. */
#include "journal/segments.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static bool again(const struct sluice_record *record, void *argument)
{
    uint8_t *bytes = malloc(sluice_record_size(record));
    struct sluice_record copy;
    size_t used;
    if (!bytes)
        abort();
    sluice_record_encode(record, bytes);
    if (sluice_record_decode(bytes, sluice_record_size(record), &copy, &used) != SLUICE_RECORD_GOOD ||
        copy.sequence != record->sequence || copy.job_id != record->job_id || copy.at_us != record->at_us ||
        (copy.type & 0xffff) != (record->type & 0xffff) || memcmp(copy.payload, record->payload, record->length) != 0)
        abort();
    free(bytes);
    ++*(unsigned *)argument;
    return true;
}

/* Records of the fuzzer's own lengths, one after the other, then cut off or changed at a place of its choice. */
static void damaged(const uint8_t *data, size_t size)
{
    uint8_t bytes[8192];
    size_t length = 0, good;
    unsigned count = 0, seen = 0;
    for (uint64_t next = 1; size > 4 && length + SLUICE_RECORD_HEADER + data[0] < sizeof bytes && count < 40; next++) {
        struct sluice_record record = {data[1], data[2], next,
                                       data[3], data,    data[0] < size ? data[0] : (uint32_t)size};
        sluice_record_encode(&record, bytes + length);
        length += sluice_record_size(&record);
        data += 4;
        size -= 4;
        count++;
    }
    uint64_t next = 0;
    if (!length)
        return;
    size_t place = size > 1 ? ((size_t)data[0] << 8 | data[1]) % length : 0;
    if (size > 2 && data[2])
        bytes[place] ^= data[2];
    else
        length = place;
    (void)sluice_record_scan(bytes, length, &next, again, &seen, &good);
    if (seen > count || good > length || (size > 2 && data[2] && good > place))
        abort();
}

static char folder[] = "/tmp/fuzz_journal.XXXXXX", first[64], second[64];

static void clear(void)
{
    unlink(first);
    unlink(second);
    rmdir(folder);
}

static void write_file(const char *path, const uint8_t *data, size_t size)
{
    FILE *file = fopen(path, "w");
    if (!file || fwrite(data, 1, size, file) != size || fclose(file) != 0)
        abort();
}

/* The same as the second of two segments of a folder, of which every byte is counted once. */
static void in_folder(const uint8_t *data, size_t size)
{
    static bool made;
    uint8_t opening[SLUICE_RECORD_HEADER];
    struct sluice_record record = {.type = SLUICE_RECORD_OPEN, .sequence = 1};
    struct sluice_segments found;
    unsigned seen = 0;
    if (!made) {
        if (!mkdtemp(folder))
            abort();
        sluice_segment_path(folder, 1, first, sizeof first);
        sluice_segment_path(folder, 2, second, sizeof second);
        sluice_record_encode(&record, opening);
        write_file(first, opening, sizeof opening);
        atexit(clear);
        made = true;
    }
    write_file(second, data, size);
    if (!sluice_segments_read(folder, again, &seen, &found) || found.records != seen || found.count != 2 ||
        found.torn_bytes + found.lost_bytes > size || (found.lost_bytes && !found.problem[0]))
        abort();
    free(found.items);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    unsigned seen = 0;
    uint64_t next = 0;
    size_t good;
    (void)sluice_record_scan(data, size, &next, again, &seen, &good);
    if (good > size)
        abort();
    damaged(data, size);
    in_folder(data, size);
    return 0;
}
