/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The failover journal's records: what happened to a job, in the order in which it happened. Knows no Slurm, files or
 * clocks.
 *
 * A record is a header of SLUICE_RECORD_HEADER bytes, all numbers little-endian, and a payload:
 *
 *   0 magic "SLJR"   4 type u16   6 format u16   8 payload's length u32   12 job id u32
 *   16 sequence u64  24 time i64 (microseconds since 1970)   32 sum u32
 *
 * The sum is the payload's CRC-32 (zlib's), exclusive-or that of the header before it rotated left by one bit.
 * Sequence numbers grow by one from record to record; times never go back.
 */
#ifndef SLUICE_JOURNAL_RECORD_H
#define SLUICE_JOURNAL_RECORD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    SLUICE_RECORD_HEADER = 36,
    SLUICE_RECORD_FORMAT = 1,
    SLUICE_RECORD_MAX_PAYLOAD = 32 * 1024 * 1024,
};

/* Append-only: numbers are in files. */
enum sluice_record_type {
    SLUICE_RECORD_OPEN = 1,    /* a segment begins; payload: host and Slurm version, each with its length */
    SLUICE_RECORD_SUBMIT = 2,  /* a job was taken in */
    SLUICE_RECORD_START = 3,   /* it was given nodes, and may be launched */
    SLUICE_RECORD_END = 4,     /* it has ended, in whatever way */
    SLUICE_RECORD_REQUEUE = 5, /* what ran of it has ended; it waits again */
    SLUICE_RECORD_VOID = 6,    /* its submission was refused after all */
    SLUICE_RECORD_MODIFY = 7,  /* somebody meant to change it; payload: text */
    SLUICE_RECORD_ARRAY = 8,   /* the tasks of an array that still wait; payload: text */
};

/* "submit", "start" ...; "unknown" for what a later version wrote. Static storage. */
const char *sluice_record_type_name(unsigned type);

struct sluice_record {
    unsigned type; /* enum sluice_record_type, or a later version's */
    uint32_t job_id;
    uint64_t sequence;
    int64_t at_us;
    const uint8_t *payload; /* not copied */
    uint32_t length;
};

/* Bytes of the record as it is in a file. */
size_t sluice_record_size(const struct sluice_record *record);

/* Write it to `bytes`, which has that room. O(length). */
void sluice_record_encode(const struct sluice_record *record, uint8_t *bytes);

/* Why the bytes at hand are no record. */
enum sluice_record_fault {
    SLUICE_RECORD_GOOD = 0,
    SLUICE_RECORD_TORN,    /* they end within one */
    SLUICE_RECORD_CORRUPT, /* they are something else, or were changed */
    SLUICE_RECORD_NEWER,   /* a format that is not known */
};

/*
 * Read the record at the beginning of `length` bytes; *record's payload points into them, *used is what it takes. What
 * the bytes are is looked at before anything is believed of them.
 */
enum sluice_record_fault sluice_record_decode(const uint8_t *bytes, size_t length, struct sluice_record *record,
                                              size_t *used);

/* What the header at the beginning of `length` bytes says, which nothing has confirmed; the payload is NULL. False:
 * there is none. */
bool sluice_record_peek(const uint8_t *bytes, size_t length, struct sluice_record *record);

/*
 * Read the records of one segment, in order, until one is not good or does not follow the one before. `visit` is called
 * for each; false from it ends the reading. Returns what ended it; *good is the length of the good part, and *next, in
 * and out, the sequence number that has to come next (0: any).
 */
enum sluice_record_fault sluice_record_scan(const uint8_t *bytes, size_t length, uint64_t *next,
                                            bool (*visit)(const struct sluice_record *, void *), void *argument,
                                            size_t *good);

#endif
