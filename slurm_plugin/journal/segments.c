/* SPDX-License-Identifier: Apache-2.0 */
#include "journal/segments.h"

#include "runtime/runtime.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char suffix[] = ".journal";
enum { DIGITS = 16, READ_AGAIN = 8 };

void sluice_segment_path(const char *folder, uint64_t first, char *path, size_t size)
{
    snprintf(path, size, "%s/%016" PRIx64 "%s", folder, first, suffix);
}

static __attribute__((format(printf, 2, 3))) void problem(struct sluice_segments *found, const char *format, ...)
{
    va_list arguments;
    if (found->problem[0])
        return;
    va_start(arguments, format);
    vsnprintf(found->problem, sizeof found->problem, format, arguments);
    va_end(arguments);
}

static bool is_segment(const char *name, uint64_t *first)
{
    if (strlen(name) != DIGITS + sizeof suffix - 1 || strcmp(name + DIGITS, suffix) != 0 ||
        strspn(name, "0123456789abcdef") != DIGITS)
        return false;
    *first = strtoull(name, NULL, 16);
    return *first > 0;
}

static int by_first(const void *left, const void *right)
{
    uint64_t a = ((const struct sluice_segment *)left)->first, b = ((const struct sluice_segment *)right)->first;
    return (a > b) - (a < b);
}

/* The segments that are there, in order. */
static bool list(const char *folder, struct sluice_segments *found)
{
    DIR *listing = opendir(folder);
    if (!listing) {
        if (errno == ENOENT)
            return true;
        problem(found, "%s: %s", folder, strerror(errno));
        return false;
    }
    bool good = true;
    uint32_t room = 0;
    uint64_t first;
    for (struct dirent *entry; good && (entry = readdir(listing));)
        if (is_segment(entry->d_name, &first)) {
            good = found->count < SLUICE_SEGMENTS_MAX &&
                   sluice_grow_array(&found->items, &room, found->count + 1, sizeof *found->items);
            if (good)
                found->items[found->count++] = (struct sluice_segment){.first = first};
        }
    closedir(listing);
    if (!good)
        problem(found, "%s: more segments than can be read, or no memory", folder);
    else if (found->count)
        qsort(found->items, found->count, sizeof *found->items, by_first);
    return good;
}

/* A file's content, malloc()ed; NULL with errno set. */
static uint8_t *load(const char *path, size_t *length)
{
    uint8_t *bytes = NULL;
    struct stat facts;
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (file < 0)
        return NULL;
    if (fstat(file, &facts) == 0 && S_ISREG(facts.st_mode) && facts.st_size <= SLUICE_SEGMENT_MAX_BYTES &&
        (bytes = malloc((size_t)facts.st_size + 1))) {
        *length = 0;
        while (*length < (size_t)facts.st_size) {
            ssize_t got = read(file, bytes + *length, (size_t)facts.st_size - *length);
            if (got < 0 && errno == EINTR)
                continue;
            if (got <= 0)
                break;
            *length += (size_t)got;
        }
    } else if (!errno)
        errno = EFBIG;
    close(file);
    return bytes;
}

/* What one segment's entries go through. */
struct pass {
    struct sluice_segments *found;
    struct sluice_segment *segment;
    uint64_t end; /* sequence number at which the next segment begins */
    bool used;    /* nothing before is missing */
    bool late, stopped;
    bool (*visit)(const struct sluice_journal_entry *, void *);
    void *argument;
};

static bool take(const struct sluice_journal_entry *entry, void *argument)
{
    struct pass *pass = argument;
    struct sluice_segments *found = pass->found;
    if (entry->job_id > found->highest_id)
        found->highest_id = entry->job_id;
    if (entry->sequence >= pass->end) {
        pass->late = true;
        return true;
    }
    if (entry->at_us > pass->segment->last_us)
        pass->segment->last_us = entry->at_us;
    if (!pass->used)
        return true;
    found->entries++;
    found->next = entry->sequence + 1;
    if (entry->at_us > found->last_us)
        found->last_us = entry->at_us;
    pass->stopped = pass->visit && !pass->visit(entry, pass->argument);
    return !pass->stopped;
}

/*
 * Entries after a damaged place are not used, but the ids in them were given out. Payloads are users' scripts, which
 * may hold what looks like entries: only numbers that can come here count, and no more is summed than READ_AGAIN times
 * the bytes. False: there is no entry behind it.
 */
static bool learn_ids(struct sluice_segments *found, const uint8_t *bytes, size_t length, uint64_t next)
{
    struct sluice_journal_entry entry;
    size_t used, budget = READ_AGAIN * length;
    uint64_t most = next + length / SLUICE_JOURNAL_HEADER;
    bool any = false;
    for (size_t at = 0; at < length; at++) {
        if (!sluice_journal_entry_peek(bytes + at, length - at, &entry) || entry.sequence <= next ||
            entry.sequence > most || entry.length > length)
            continue;
        if (entry.length > budget)
            break;
        budget -= entry.length;
        if (sluice_journal_entry_decode(bytes + at, length - at, &entry, &used) != SLUICE_JOURNAL_GOOD)
            continue;
        if (entry.job_id > found->highest_id)
            found->highest_id = entry.job_id;
        any = true;
        next = entry.sequence;
        at += used - 1;
    }
    return any;
}

static const char *fault_name(enum sluice_journal_entry_fault fault)
{
    return fault == SLUICE_JOURNAL_NEWER ? "written by a later version" : "corrupt";
}

/* One segment; false: the visitor has had enough, or there is no memory. */
static bool read_one(const char *folder, struct pass *pass)
{
    struct sluice_segments *found = pass->found;
    char path[4400];
    size_t length = 0, good = 0;
    sluice_segment_path(folder, pass->segment->first, path, sizeof path);
    errno = 0;
    uint8_t *bytes = load(path, &length);
    if (!bytes) {
        problem(found, "%s: %s", path, strerror(errno ? errno : EIO));
        pass->used = false;
        return errno != ENOMEM;
    }
    if (pass->used && found->next != pass->segment->first && found->next > 1) {
        problem(found, "%s: entries %" PRIu64 " to %" PRIu64 " are missing before it", path, found->next,
                pass->segment->first - 1);
        pass->used = false;
    }
    uint64_t next = pass->segment->first;
    pass->late = false;
    enum sluice_journal_entry_fault fault = sluice_journal_entry_scan(bytes, length, &next, take, pass, &good);
    pass->segment->bytes = length;
    if (fault != SLUICE_JOURNAL_GOOD && learn_ids(found, bytes + good, length - good, next) &&
        fault == SLUICE_JOURNAL_TORN)
        fault = SLUICE_JOURNAL_CORRUPT; /* it is not cut off: its length is damaged */
    if (pass->late)
        found->late_bytes += length;
    else if (!pass->used)
        found->lost_bytes += length;
    else if (fault == SLUICE_JOURNAL_TORN)
        found->torn_bytes += length - good;
    else if (fault != SLUICE_JOURNAL_GOOD)
        found->lost_bytes += length - good;
    if (pass->late)
        problem(found, "%s: another controller wrote to it after this one had taken over; that part is not used", path);
    else if (fault > SLUICE_JOURNAL_TORN)
        problem(found, "%s: %s at byte %zu of %zu; what follows is not used", path, fault_name(fault), good, length);
    free(bytes);
    return !pass->stopped;
}

bool sluice_segments_read(const char *folder, bool (*visit)(const struct sluice_journal_entry *, void *),
                          void *argument, struct sluice_segments *found)
{
    *found = (struct sluice_segments){.next = 1};
    if (!list(folder, found))
        return false;
    struct pass pass = {.found = found, .used = true, .visit = visit, .argument = argument};
    for (uint32_t i = 0; i < found->count; i++) {
        pass.segment = &found->items[i];
        pass.end = i + 1 < found->count ? found->items[i + 1].first : UINT64_MAX;
        if (!read_one(folder, &pass)) {
            if (!pass.stopped)
                return false;
            break;
        }
    }
    /* A number is never used twice, however much of the last segment could be read. */
    if (found->count && found->next <= found->items[found->count - 1].first)
        found->next = found->items[found->count - 1].first + 1;
    return true;
}
