/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The failover journal's entries: what happened to a job, in the order in which it happened. Knows no Slurm, files or
 * clocks.
 *
 * An entry is a header of SLUICE_JOURNAL_HEADER bytes, all numbers little-endian, and a payload:
 *
 *   0 magic "SLJR"   4 type u16   6 format u16   8 payload's length u32   12 job id u32
 *   16 sequence u64  24 time i64 (microseconds since 1970)   32 sum u32
 *
 * The sum is the payload's CRC-32 (zlib's), exclusive-or that of the header before it rotated left by one bit. Sequence
 * numbers grow by one from entry to entry; times never decrease.
 */
#ifndef SLUICE_JOURNAL_ENTRY_H
#define SLUICE_JOURNAL_ENTRY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    SLUICE_JOURNAL_HEADER = 36,
    SLUICE_JOURNAL_FORMAT = 1,
    SLUICE_JOURNAL_MAX_PAYLOAD = 32 * 1024 * 1024,
};

/* Append-only: numbers are in files. */
enum sluice_journal_entry_type {
    SLUICE_JOURNAL_OPEN = 1,    /* a segment begins; payload: host and Slurm version, each with its length */
    SLUICE_JOURNAL_SUBMIT = 2,  /* a job was taken in */
    SLUICE_JOURNAL_START = 3,   /* it was given nodes, and may be launched */
    SLUICE_JOURNAL_END = 4,     /* it has ended, in whatever way */
    SLUICE_JOURNAL_REQUEUE = 5, /* what ran of it has ended; it waits again */
    SLUICE_JOURNAL_VOID = 6,    /* its submission was refused in the end */
    SLUICE_JOURNAL_MODIFY = 7,  /* a user asked to change it; payload: text */
    SLUICE_JOURNAL_ARRAY = 8,   /* the tasks of an array that still wait; payload: text */
};

/* "submit", "start" ...; "unknown" for what a later version wrote. Static storage. */
const char *sluice_journal_entry_type_name(unsigned type);

struct sluice_journal_entry {
    unsigned type; /* enum sluice_journal_entry_type, or a later version's */
    uint32_t job_id;
    uint64_t sequence;
    int64_t at_us;
    const uint8_t *payload; /* not copied */
    uint32_t length;
};

/* Bytes of the entry as it is in a file. */
size_t sluice_journal_entry_size(const struct sluice_journal_entry *entry);

/* Write it to `bytes`, which has that room. O(length). */
void sluice_journal_entry_encode(const struct sluice_journal_entry *entry, uint8_t *bytes);

/* Why the bytes at hand are no entry. */
enum sluice_journal_entry_fault {
    SLUICE_JOURNAL_GOOD = 0,
    SLUICE_JOURNAL_TORN,    /* they end within one */
    SLUICE_JOURNAL_CORRUPT, /* they are something else, or were changed */
    SLUICE_JOURNAL_NEWER,   /* a format that is not known */
};

/*
 * Read the entry at the beginning of `length` bytes; *entry's payload points into them, *used is what it takes. The
 * bytes are checked before any of them is used.
 */
enum sluice_journal_entry_fault sluice_journal_entry_decode(const uint8_t *bytes, size_t length,
                                                            struct sluice_journal_entry *entry, size_t *used);

/* The header at the beginning of `length` bytes, not verified; the payload is NULL. False: there is none. */
bool sluice_journal_entry_peek(const uint8_t *bytes, size_t length, struct sluice_journal_entry *entry);

/*
 * Read the entries of one segment, in order, until one is not good or does not follow the one before. `visit` is called
 * for each; false from it ends the reading. Returns what ended it; *good is the length of the good part, and *next, in
 * and out, the sequence number that has to come next (0: any).
 */
enum sluice_journal_entry_fault sluice_journal_entry_scan(const uint8_t *bytes, size_t length, uint64_t *next,
                                                          bool (*visit)(const struct sluice_journal_entry *, void *),
                                                          void *argument, size_t *good);

#endif
