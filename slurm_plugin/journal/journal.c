/* SPDX-License-Identifier: Apache-2.0 */
#include "journal/journal.h"

#include "runtime/runtime.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    RETRY_MS = 1000,
    BATCH_BYTES = 4 * 1024 * 1024,
    FOLDER = 4096,
    LINE = 64,                        /* the longest of `acknowledged` */
    ACKNOWLEDGED_BYTES = 1024 * 1024, /* of that file, until another is begun */
};

struct queued {
    struct queued *next;
    uint64_t ticket;
    struct sluice_journal_entry entry; /* its payload lies behind it */
};

struct sluice_journal {
    char folder[FOLDER];
    char *about;
    uint64_t max_bytes, max_queued;
    uint32_t segment_bytes;
    void (*durable)(uint64_t, void *);
    void *argument;

    pthread_mutex_t lock;
    pthread_cond_t work, done;
    struct queued *first, **last; /* what waits to be written */
    bool busy;                    /* the thread writes what is no longer in the list */
    bool stopping;
    uint64_t tickets, written, tried; /* given out; durable up to; attempted up to */
    int64_t floor_us, trim_us;
    struct sluice_journal_stats stats;
    pthread_t thread;

    /* The thread's own. */
    struct sluice_segment *segments;
    uint32_t count, segment_room;
    uint64_t next;     /* sequence number */
    uint64_t leftover; /* number of a segment that could not be begun, and whose file could not be removed either */
    int file;          /* of the last segment; -1: another has to be begun */
    uint64_t offset;
    uint8_t *buffer;
    size_t room;
    char *lines; /* of the submissions of one batch */
    uint32_t line_room;
};

/* ---- files: the thread alone ---- */

static bool write_all(int file, const uint8_t *bytes, size_t length, uint64_t offset)
{
    while (length) {
        ssize_t wrote = pwrite(file, bytes, length, (off_t)offset);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote <= 0) {
            errno = wrote ? errno : ENOSPC;
            return false;
        }
        bytes += wrote;
        length -= (size_t)wrote;
        offset += (uint64_t)wrote;
    }
    return true;
}

static bool sync_folder(const char *folder)
{
    int file = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool good = file >= 0 && fsync(file) == 0;
    if (file >= 0)
        close(file);
    return good;
}

/* Room for `length` bytes in the buffer. */
static bool reserve(struct sluice_journal *journal, size_t length)
{
    if (length <= journal->room)
        return true;
    uint8_t *more = realloc(journal->buffer, length);
    if (!more) {
        errno = ENOMEM;
        return false;
    }
    journal->buffer = more;
    journal->room = length;
    return true;
}

/* Another segment, with its first entry. */
static bool begin_segment(struct sluice_journal *journal, int64_t at_us)
{
    char path[FOLDER + SLUICE_SEGMENT_NAME];
    struct sluice_journal_entry opening = {.type = SLUICE_JOURNAL_OPEN,
                                           .sequence = journal->next,
                                           .at_us = at_us,
                                           .payload = (const uint8_t *)journal->about,
                                           .length = (uint32_t)strlen(journal->about)};
    if (!sluice_grow_array(&journal->segments, &journal->segment_room, journal->count + 1, sizeof *journal->segments) ||
        !reserve(journal, sluice_journal_entry_size(&opening)))
        return false;
    sluice_segment_path(journal->folder, journal->next, path, sizeof path);
    if (journal->leftover == journal->next)
        unlink(path);
    int file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file < 0)
        return false;
    sluice_journal_entry_encode(&opening, journal->buffer);
    if (!write_all(file, journal->buffer, sluice_journal_entry_size(&opening), 0) || fdatasync(file) != 0 ||
        !sync_folder(journal->folder)) {
        int error = errno;
        close(file);
        journal->leftover = unlink(path) != 0 && errno != ENOENT ? journal->next : 0;
        errno = error;
        return false;
    }
    journal->file = file;
    journal->offset = sluice_journal_entry_size(&opening);
    journal->segments[journal->count++] =
        (struct sluice_segment){.first = journal->next++, .last_us = at_us, .bytes = journal->offset};
    return true;
}

/* Ends the last segment where its last durable entry ends. */
static void end_segment(struct sluice_journal *journal, bool cut)
{
    if (journal->file < 0)
        return;
    if (cut && ftruncate(journal->file, (off_t)journal->offset) != 0)
        cut = false; /* the reader takes what is behind for a torn entry */
    close(journal->file);
    journal->file = -1;
}

static uint64_t total_bytes(const struct sluice_journal *journal)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < journal->count; i++)
        bytes += journal->segments[i].bytes;
    return bytes;
}

/* Remove segments whose entries are all older; the last one is ended first, if it is large enough. */
static void remove_old(struct sluice_journal *journal, int64_t before_us)
{
    uint32_t gone = 0;
    if (journal->count && journal->file >= 0 && journal->segments[journal->count - 1].last_us < before_us &&
        journal->offset > journal->segment_bytes / 4)
        end_segment(journal, false);
    uint32_t most = journal->file >= 0 ? journal->count - 1 : journal->count;
    /* One is kept for its number: the next has to be higher. */
    while (gone < most && gone + 1 < journal->count && journal->segments[gone].last_us < before_us) {
        char path[FOLDER + SLUICE_SEGMENT_NAME];
        sluice_segment_path(journal->folder, journal->segments[gone].first, path, sizeof path);
        if (unlink(path) != 0 && errno != ENOENT)
            break;
        gone++;
    }
    memmove(journal->segments, journal->segments + gone, (journal->count - gone) * sizeof *journal->segments);
    journal->count -= gone;
}

/* Write the batch and make it durable: all or none. False with errno set. */
static bool commit(struct sluice_journal *journal, const struct queued *batch, size_t length, uint32_t *sync_us)
{
    if (journal->file >= 0 && journal->offset + length > journal->segment_bytes &&
        journal->offset > journal->segment_bytes / 4)
        end_segment(journal, false);
    if (total_bytes(journal) + length > journal->max_bytes) {
        errno = EDQUOT;
        return false;
    }
    if (journal->file < 0 && !begin_segment(journal, batch->entry.at_us))
        return false;
    if (!reserve(journal, length))
        return false;
    size_t at = 0;
    uint64_t sequence = journal->next;
    int64_t last_us = 0;
    for (const struct queued *queued = batch; queued; queued = queued->next) {
        struct sluice_journal_entry entry = queued->entry;
        entry.sequence = sequence++;
        sluice_journal_entry_encode(&entry, journal->buffer + at);
        at += sluice_journal_entry_size(&entry);
        last_us = entry.at_us;
    }
    int64_t began = sluice_clock_us(CLOCK_MONOTONIC);
    bool wrote = write_all(journal->file, journal->buffer, at, journal->offset), good = wrote;
    if (wrote)
        good = fdatasync(journal->file) == 0;
    *sync_us = (uint32_t)(sluice_clock_us(CLOCK_MONOTONIC) - began);
    if (!good) {
        int error = errno;
        /* After a failed sync it is not known what of it is on the disk: these entries go to another file. */
        end_segment(journal, true);
        errno = error;
        return false;
    }
    struct sluice_segment *segment = &journal->segments[journal->count - 1];
    journal->offset += at;
    journal->next = sequence;
    segment->bytes = journal->offset;
    segment->last_us = last_us;
    return true;
}

/* ---- which submissions were durable when ---- */

/* The lines of a batch that is durable now, and how long they are together. */
static size_t list_acknowledged(struct sluice_journal *journal, const struct queued *batch, uint32_t count)
{
    const int64_t now_us = sluice_clock_us(CLOCK_REALTIME);
    size_t length = 0;
    if (count > UINT32_MAX / LINE || !sluice_grow_array(&journal->lines, &journal->line_room, count * LINE, 1))
        return 0;
    for (const struct queued *queued = batch; queued; queued = queued->next)
        if (queued->entry.type == SLUICE_JOURNAL_SUBMIT)
            length += (size_t)snprintf(journal->lines + length, LINE, "%" PRIu32 " %" PRId64 " %" PRId64 "\n",
                                       queued->entry.job_id, queued->entry.at_us, now_us);
    return length;
}

/* Without a lock, and when nobody waits for the batch any more. What cannot be written is left out. */
static void note_acknowledged(struct sluice_journal *journal, size_t length)
{
    char path[FOLDER + sizeof "/acknowledged"], last[FOLDER + sizeof "/acknowledged.1"];
    struct stat status;
    snprintf(path, sizeof path, "%s/acknowledged", journal->folder);
    snprintf(last, sizeof last, "%s/acknowledged.1", journal->folder);
    int file = length ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600) : -1;
    if (file < 0)
        return;
    if (write(file, journal->lines, length) == (ssize_t)length && fstat(file, &status) == 0 &&
        status.st_size >= ACKNOWLEDGED_BYTES)
        rename(path, last);
    close(file);
}

/* ---- the thread ---- */

/* Take entries off the queue, as many as one write should have. */
static struct queued *take_batch(struct sluice_journal *journal, size_t *length, uint32_t *count)
{
    struct queued *batch = journal->first, **end = &batch;
    *length = 0;
    *count = 0;
    while (*end && (!*count || *length + sluice_journal_entry_size(&(*end)->entry) <= BATCH_BYTES)) {
        *length += sluice_journal_entry_size(&(*end)->entry);
        ++*count;
        end = &(*end)->next;
    }
    journal->first = *end;
    if (!journal->first)
        journal->last = &journal->first;
    *end = NULL;
    return batch;
}

static void put_back(struct sluice_journal *journal, struct queued *batch)
{
    struct queued **end = &batch->next;
    while (*end)
        end = &(*end)->next;
    *end = journal->first;
    if (!journal->first)
        journal->last = end;
    journal->first = batch;
}

/* Bookkeeping of an attempt; with the lock held. */
static void note(struct sluice_journal *journal, struct queued *batch, size_t length, uint32_t count, uint32_t sync_us,
                 int error)
{
    struct sluice_journal_stats *stats = &journal->stats;
    uint64_t last = 0;
    for (struct queued *queued = batch; queued; queued = queued->next)
        last = queued->ticket;
    journal->tried = last;
    stats->error = error;
    stats->segments = journal->count;
    stats->bytes = total_bytes(journal);
    if (error) {
        stats->failures++;
        put_back(journal, batch);
        return;
    }
    stats->syncs++;
    stats->entries += count;
    stats->queued -= count;
    stats->queued_bytes -= length;
    stats->last_us = journal->segments[journal->count - 1].last_us;
    if (sync_us > stats->longest_sync_us)
        stats->longest_sync_us = sync_us;
    journal->written = last;
    while (batch) {
        struct queued *queued = batch;
        batch = queued->next;
        free(queued);
    }
}

/* One round with the lock held, released while files are written. False: nothing could be written. */
static bool write_batch(struct sluice_journal *journal)
{
    size_t length;
    uint32_t count, sync_us = 0;
    struct queued *batch = take_batch(journal, &length, &count);
    journal->busy = true;
    pthread_mutex_unlock(&journal->lock);
    int error = commit(journal, batch, length, &sync_us) ? 0 : errno ? errno : EIO;
    const size_t lines = error ? 0 : list_acknowledged(journal, batch, count);
    pthread_mutex_lock(&journal->lock);
    journal->busy = false;
    note(journal, batch, length, count, sync_us, error);
    pthread_cond_broadcast(&journal->done);
    if (!error && journal->durable) {
        uint64_t written = journal->written;
        pthread_mutex_unlock(&journal->lock);
        journal->durable(written, journal->argument);
        pthread_mutex_lock(&journal->lock);
    }
    if (lines) {
        pthread_mutex_unlock(&journal->lock);
        note_acknowledged(journal, lines);
        pthread_mutex_lock(&journal->lock);
    }
    return !error;
}

static void trim(struct sluice_journal *journal)
{
    int64_t before_us = journal->trim_us;
    journal->trim_us = 0;
    pthread_mutex_unlock(&journal->lock);
    remove_old(journal, before_us);
    pthread_mutex_lock(&journal->lock);
    journal->stats.segments = journal->count;
    journal->stats.bytes = total_bytes(journal);
}

static void *run(void *argument)
{
    struct sluice_journal *journal = argument;
    /* At once, so that all that another controller still writes is known to be late. */
    bool good = begin_segment(journal, journal->floor_us);
    int error = good ? 0 : errno;
    pthread_mutex_lock(&journal->lock);
    journal->stats.error = error;
    journal->stats.segments = journal->count;
    journal->stats.bytes = total_bytes(journal);
    for (good = true;;) {
        if (journal->trim_us)
            trim(journal);
        bool all_tried = !journal->first || (!good && journal->tried >= journal->tickets);
        if (all_tried && journal->stopping)
            break;
        if (!journal->first) {
            pthread_cond_wait(&journal->work, &journal->lock);
            continue;
        }
        if (all_tried && !journal->trim_us) {
            struct timespec until = sluice_deadline(CLOCK_MONOTONIC, RETRY_MS);
            uint64_t tickets = journal->tickets;
            while (!journal->stopping && !journal->trim_us && tickets == journal->tickets &&
                   pthread_cond_timedwait(&journal->work, &journal->lock, &until) != ETIMEDOUT)
                ;
        }
        if (journal->first && !journal->trim_us)
            good = write_batch(journal);
    }
    pthread_mutex_unlock(&journal->lock);
    return NULL;
}

/* ---- for all threads ---- */

static void free_all(struct sluice_journal *journal)
{
    while (journal->first) {
        struct queued *queued = journal->first;
        journal->first = queued->next;
        free(queued);
    }
    end_segment(journal, false);
    free(journal->buffer);
    free(journal->lines);
    free(journal->segments);
    free(journal->about);
    pthread_cond_destroy(&journal->work);
    pthread_cond_destroy(&journal->done);
    pthread_mutex_destroy(&journal->lock);
    free(journal);
}

static bool prepare(struct sluice_journal *journal, const struct sluice_journal_options *options)
{
    snprintf(journal->folder, sizeof journal->folder, "%s", options->folder);
    journal->about = strdup(options->about ? options->about : "");
    if (!journal->about || !sluice_grow_array(&journal->segments, &journal->segment_room, options->segment_count + 1,
                                              sizeof *journal->segments)) {
        errno = ENOMEM;
        return false;
    }
    if (options->segment_count)
        memcpy(journal->segments, options->segments, options->segment_count * sizeof *journal->segments);
    journal->count = options->segment_count;
    journal->stats.segments = journal->count;
    journal->stats.bytes = total_bytes(journal);
    if (mkdir(journal->folder, 0700) != 0 && errno != EEXIST)
        return false;
    return true;
}

struct sluice_journal *sluice_journal_open(const struct sluice_journal_options *options)
{
    struct sluice_journal *journal = calloc(1, sizeof *journal);
    pthread_condattr_t attributes;
    if (!journal)
        return NULL;
    journal->max_bytes = options->max_bytes ? options->max_bytes : 256U * 1024 * 1024;
    journal->max_queued = options->max_queued ? options->max_queued : 64U * 1024 * 1024;
    journal->segment_bytes = options->segment_bytes ? options->segment_bytes : 4U * 1024 * 1024;
    journal->durable = options->durable;
    journal->argument = options->argument;
    journal->next = options->next ? options->next : 1;
    journal->floor_us = options->floor_us;
    journal->file = -1;
    journal->last = &journal->first;
    pthread_mutex_init(&journal->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&journal->work, &attributes);
    pthread_cond_init(&journal->done, &attributes);
    pthread_condattr_destroy(&attributes);
    int error = prepare(journal, options) ? pthread_create(&journal->thread, NULL, run, journal) : errno;
    if (error) {
        free_all(journal);
        errno = error;
        return NULL;
    }
    return journal;
}

void sluice_journal_close(struct sluice_journal *journal)
{
    if (!journal)
        return;
    pthread_mutex_lock(&journal->lock);
    journal->stopping = true;
    pthread_cond_broadcast(&journal->work);
    pthread_mutex_unlock(&journal->lock);
    pthread_join(journal->thread, NULL);
    free_all(journal);
}

uint64_t sluice_journal_append(struct sluice_journal *journal, enum sluice_journal_entry_type type, uint32_t job_id,
                               const void *payload, uint32_t length, int64_t now_us)
{
    if (length > SLUICE_JOURNAL_MAX_PAYLOAD)
        return 0;
    struct queued *queued = malloc(sizeof *queued + length);
    if (!queued)
        return 0;
    *queued = (struct queued){.entry = {.type = type, .job_id = job_id, .length = length}};
    queued->entry.payload = (const uint8_t *)(queued + 1);
    if (length)
        memcpy(queued + 1, payload, length);
    uint64_t ticket = 0;
    pthread_mutex_lock(&journal->lock);
    struct sluice_journal_stats *stats = &journal->stats;
    if (!journal->stopping && stats->queued_bytes + sluice_journal_entry_size(&queued->entry) <= journal->max_queued) {
        if (now_us > journal->floor_us)
            journal->floor_us = now_us;
        queued->entry.at_us = journal->floor_us;
        ticket = queued->ticket = ++journal->tickets;
        *journal->last = queued;
        journal->last = &queued->next;
        stats->queued++;
        stats->queued_bytes += sluice_journal_entry_size(&queued->entry);
        pthread_cond_signal(&journal->work);
    }
    pthread_mutex_unlock(&journal->lock);
    if (!ticket)
        free(queued);
    return ticket;
}

enum sluice_journal_result sluice_journal_wait(struct sluice_journal *journal, uint64_t ticket, uint32_t wait_ms)
{
    struct timespec until = sluice_deadline(CLOCK_MONOTONIC, wait_ms);
    enum sluice_journal_result result = SLUICE_JOURNAL_LATE;
    pthread_mutex_lock(&journal->lock);
    for (bool waiting = true;; waiting = pthread_cond_timedwait(&journal->done, &journal->lock, &until) == 0) {
        if (journal->written >= ticket)
            result = SLUICE_JOURNAL_DURABLE;
        else if (journal->tried >= ticket && !journal->busy)
            result = SLUICE_JOURNAL_FAILED;
        if (result != SLUICE_JOURNAL_LATE || !waiting)
            break;
    }
    pthread_mutex_unlock(&journal->lock);
    return result;
}

bool sluice_journal_withdraw(struct sluice_journal *journal, uint64_t ticket)
{
    struct queued *found = NULL;
    pthread_mutex_lock(&journal->lock);
    for (struct queued **at = &journal->first; *at && !found; at = &(*at)->next)
        if ((*at)->ticket == ticket) {
            found = *at;
            *at = found->next;
            if (!*at)
                journal->last = at;
            journal->stats.queued--;
            journal->stats.queued_bytes -= sluice_journal_entry_size(&found->entry);
            break;
        }
    pthread_mutex_unlock(&journal->lock);
    free(found);
    return found != NULL;
}

bool sluice_journal_is_durable(struct sluice_journal *journal, uint64_t ticket)
{
    pthread_mutex_lock(&journal->lock);
    bool durable = journal->written >= ticket;
    pthread_mutex_unlock(&journal->lock);
    return durable;
}

void sluice_journal_trim(struct sluice_journal *journal, int64_t before_us)
{
    pthread_mutex_lock(&journal->lock);
    if (before_us > journal->trim_us)
        journal->trim_us = before_us;
    if (before_us > journal->floor_us)
        journal->floor_us = before_us;
    pthread_cond_signal(&journal->work);
    pthread_mutex_unlock(&journal->lock);
}

void sluice_journal_describe(struct sluice_journal *journal, struct sluice_journal_stats *stats)
{
    pthread_mutex_lock(&journal->lock);
    *stats = journal->stats;
    stats->oldest_us = journal->first ? journal->first->entry.at_us : 0;
    pthread_mutex_unlock(&journal->lock);
}
