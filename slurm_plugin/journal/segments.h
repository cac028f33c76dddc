/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The journal's folder: segments, each a file of entries named after its first entry's sequence number. A controller
 * that opens the journal begins a segment of its own. What another one still writes to an older segment after that has
 * sequence numbers that are taken, and is ignored.
 */
#ifndef SLUICE_JOURNAL_SEGMENTS_H
#define SLUICE_JOURNAL_SEGMENTS_H

#include "journal/entry.h"

enum { SLUICE_SEGMENT_NAME = 32, SLUICE_SEGMENT_MAX_BYTES = 64 * 1024 * 1024, SLUICE_SEGMENTS_MAX = 4096 };

struct sluice_segment {
    uint64_t first;  /* sequence number of its first entry */
    int64_t last_us; /* time of its last good entry */
    uint64_t bytes;  /* of the file */
};

/* What reading the folder has found. */
struct sluice_segments {
    struct sluice_segment *items; /* in order; the caller's, to be freed with free() */
    uint32_t count;
    uint64_t entries;    /* good ones, in order: those that were visited */
    uint64_t next;       /* the sequence number after the last of them; 1: there are none */
    int64_t last_us;     /* time of the last of them; 0: none */
    uint64_t torn_bytes; /* at the end of segments: an entry whose write was cut off */
    uint64_t late_bytes; /* written to a segment after another controller had begun the next */
    uint64_t lost_bytes; /* behind what is corrupt or missing: not used */
    uint32_t highest_id; /* of a job, in all that could be read, used or not */
    char problem[256];   /* the first that an admin should know; empty: none */
};

/* "<folder>/<name of the segment>" to `path`. */
void sluice_segment_path(const char *folder, uint64_t first, char *path, size_t size);

/*
 * Read all of the journal in `folder`, in order. A torn end of a segment is what a SIGKILL or power cut leaves, and is
 * counted; if something is corrupt or missing, the good part before it is used, and the rest is counted and described
 * in `problem`. A folder that is not there is an empty journal. False only when the folder cannot be read or there is
 * no memory (said in `problem`). `visit` may be NULL.
 */
bool sluice_segments_read(const char *folder, bool (*visit)(const struct sluice_journal_entry *, void *),
                          void *argument, struct sluice_segments *found);

#endif
