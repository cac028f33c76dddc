/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The journal's writer: a thread that appends entries to segments and makes them durable, all that arrived meanwhile
 * with one fdatasync. Callers pass an entry without waiting, and may wait for it for a bounded time.
 *
 * When nothing can be written (a full disk, an error, the journal's own bound) entries stay in memory and are tried
 * again every second and with each new entry, and waiting callers return at once. No partly written entry stays in a
 * file.
 *
 * When submissions became durable is noted in the folder's file `acknowledged`, a line each: the job, and the times at
 * which its entry was passed and was durable, in microseconds since 1970. Nothing depends on that file, which is not
 * synced, and ends after 1 MiB as `acknowledged.1`; what is shown of jobs is made of it.
 *
 * All functions are safe from any thread.
 */
#ifndef SLUICE_JOURNAL_JOURNAL_H
#define SLUICE_JOURNAL_JOURNAL_H

#include "journal/segments.h"

struct sluice_journal;

struct sluice_journal_options {
    const char *folder;                    /* made when it is not there, for its owner alone */
    const char *about;                     /* payload of a segment's first entry */
    uint64_t max_bytes;                    /* of all segments together; 0: 256 MiB */
    uint32_t segment_bytes;                /* after which another is begun; 0: 4 MiB */
    uint64_t max_queued;                   /* bytes in memory; 0: 64 MiB */
    uint64_t next;                         /* sequence number of the first entry, at least 1 */
    int64_t floor_us;                      /* no entry gets an earlier time */
    const struct sluice_segment *segments; /* that are there already */
    uint32_t segment_count;
    /* Called by the thread, without any lock of the journal's, when all up to `ticket` is durable. May be NULL. */
    void (*durable)(uint64_t ticket, void *argument);
    void *argument;
};

/* What is known of it; cheap. */
struct sluice_journal_stats {
    uint64_t entries, syncs, failures; /* written; fdatasync calls; attempts that wrote nothing */
    uint64_t bytes, queued_bytes;      /* of the segments; in memory */
    uint32_t segments, queued;         /* entries in memory */
    int64_t oldest_us;                 /* time of the oldest of these; 0: none */
    int64_t last_us;                   /* time of the newest entry that is durable; 0: none */
    uint32_t longest_sync_us;
    int error; /* errno of the last attempt; 0: it was good */
};

enum sluice_journal_result {
    SLUICE_JOURNAL_DURABLE = 0,
    SLUICE_JOURNAL_LATE,   /* not within the time */
    SLUICE_JOURNAL_FAILED, /* tried, and could not be written */
};

/* NULL, with errno set, when there is no memory, no thread or no folder. */
struct sluice_journal *sluice_journal_open(const struct sluice_journal_options *options);

/* Write what is left, wait for the thread, free. NULL does nothing. */
void sluice_journal_close(struct sluice_journal *journal);

/* Pass an entry to the thread; the payload is copied. A ticket to wait with, or 0 when there is no memory or the queue
 * is full. `now_us` is the time now. */
uint64_t sluice_journal_append(struct sluice_journal *journal, enum sluice_journal_entry_type type, uint32_t job_id,
                               const void *payload, uint32_t length, int64_t now_us);

/* Wait until it is durable, at most `wait_ms`. */
enum sluice_journal_result sluice_journal_wait(struct sluice_journal *journal, uint64_t ticket, uint32_t wait_ms);

/* Take an entry back. False: it is written, or is being written. */
bool sluice_journal_withdraw(struct sluice_journal *journal, uint64_t ticket);

/* Whether it is durable. */
bool sluice_journal_is_durable(struct sluice_journal *journal, uint64_t ticket);

/* Entries before that time are not needed any more; segments that hold no other go. */
void sluice_journal_trim(struct sluice_journal *journal, int64_t before_us);

void sluice_journal_describe(struct sluice_journal *journal, struct sluice_journal_stats *stats);

#endif
