/* SPDX-License-Identifier: Apache-2.0 */
/* A segment of the journal: any bytes; and what is accepted is what was written. */
#include "journal/segments.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static bool again(const struct sluice_journal_entry *entry, void *argument)
{
    uint8_t *bytes = malloc(sluice_journal_entry_size(entry));
    struct sluice_journal_entry copy;
    size_t used;
    if (!bytes)
        abort();
    sluice_journal_entry_encode(entry, bytes);
    if (sluice_journal_entry_decode(bytes, sluice_journal_entry_size(entry), &copy, &used) != SLUICE_JOURNAL_GOOD ||
        copy.sequence != entry->sequence || copy.job_id != entry->job_id || copy.at_us != entry->at_us ||
        (copy.type & 0xffff) != (entry->type & 0xffff) || memcmp(copy.payload, entry->payload, entry->length) != 0)
        abort();
    free(bytes);
    ++*(unsigned *)argument;
    return true;
}

/* Entries of the fuzzer's own lengths, one after the other, then cut off or changed at a place of its choice. */
static void damaged(const uint8_t *data, size_t size)
{
    uint8_t bytes[8192];
    size_t length = 0, good;
    unsigned count = 0, seen = 0;
    for (uint64_t next = 1; size > 4 && length + SLUICE_JOURNAL_HEADER + data[0] < sizeof bytes && count < 40; next++) {
        struct sluice_journal_entry entry = {data[1], data[2], next,
                                             data[3], data,    data[0] < size ? data[0] : (uint32_t)size};
        sluice_journal_entry_encode(&entry, bytes + length);
        length += sluice_journal_entry_size(&entry);
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
    (void)sluice_journal_entry_scan(bytes, length, &next, again, &seen, &good);
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
    uint8_t opening[SLUICE_JOURNAL_HEADER];
    struct sluice_journal_entry entry = {.type = SLUICE_JOURNAL_OPEN, .sequence = 1};
    struct sluice_segments found;
    unsigned seen = 0;
    if (!made) {
        if (!mkdtemp(folder))
            abort();
        sluice_segment_path(folder, 1, first, sizeof first);
        sluice_segment_path(folder, 2, second, sizeof second);
        sluice_journal_entry_encode(&entry, opening);
        write_file(first, opening, sizeof opening);
        atexit(clear);
        made = true;
    }
    write_file(second, data, size);
    if (!sluice_segments_read(folder, again, &seen, &found) || found.entries != seen || found.count != 2 ||
        found.torn_bytes + found.lost_bytes > size || (found.lost_bytes && !found.problem[0]))
        abort();
    free(found.items);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    unsigned seen = 0;
    uint64_t next = 0;
    size_t good;
    (void)sluice_journal_entry_scan(data, size, &next, again, &seen, &good);
    if (good > size)
        abort();
    damaged(data, size);
    in_folder(data, size);
    return 0;
}
