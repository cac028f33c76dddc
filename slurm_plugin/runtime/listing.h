/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Small files that the controllers' daemon and `sluice gres write` write for the plugins: a first line KIND 1, lines, and
 * a checksum as the last one. They are replaced as a whole; those of the daemon are looked at every half second.
 */
#ifndef SLUICE_RUNTIME_LISTING_H
#define SLUICE_RUNTIME_LISTING_H

#include "sluice/core.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/stat.h>

enum { SLUICE_LISTING_MAX_BYTES = 8 << 20, SLUICE_LISTING_PERIOD_MS = 500 };

struct sluice_listing_file {
    char path[4096];
    struct stat seen;
    bool there; /* when it was looked at last */
    int failed; /* errno of then, if it could not be read; 0: it could */
};

void sluice_listing_follow(struct sluice_listing_file *file, const char *folder, const char *name);

enum sluice_listing { SLUICE_LISTING_SAME, SLUICE_LISTING_GONE, SLUICE_LISTING_NEW };

/* What happened to the file since the last look. NEW: *data is its content, to be freed, or NULL, and `text` says why it
 * cannot be read; that is tried again with each look, and said once. */
enum sluice_listing sluice_listing_look(struct sluice_listing_file *file, char **data, size_t *length,
                                        struct sluice_error_text *text);

/* What is left of a line: words with one `between` two of them; `at` is NULL behind the last of them. */
struct sluice_line {
    const char *at, *end;
    char between;
};

/* The next word's length; 0: there is none. */
size_t sluice_line_word(struct sluice_line *line, const char **word);
/* The next word, digits alone. `most` is below 2^60. */
bool sluice_line_number(struct sluice_line *line, uint64_t most, uint64_t *number);
/* The next word, printable, with a terminating zero in `size` bytes. */
bool sluice_line_name(struct sluice_line *line, char *name, size_t size);

/* What a file's items, in one block, begin with. */
struct sluice_listed {
    atomic_uint users;
    uint32_t count;
};

/* A kind of file, with an item in each line. */
struct sluice_listing_kind {
    const char *name;   /* in the first line */
    const char *items;  /* in a message: more than 10 ITEMS */
    const char *wanted; /* in a message: line 2: not WANTED */
    uint32_t most;      /* items */
    size_t first, size; /* of an item: where in its block the first one is, and bytes */
    bool (*read)(struct sluice_line *line, void *item);
    int (*compare)(const void *item, const void *other);
    /* What a message says of an item that is there twice. */
    void (*twice)(const void *item, struct sluice_error_text *text);
};

/* A block with `count` items, all zero, and one user; NULL without memory. */
struct sluice_listed *sluice_listed_new(const struct sluice_listing_kind *kind, uint32_t count);
/* A user less; the last one frees it. NULL does nothing. */
void sluice_listed_release(const struct sluice_listed *listed);

/* Read a content, which needs no terminating zero: its items, sorted, are the caller's, to be released. On failure *made
 * is NULL. Errors: INVALID (`text` says the line), VERSION, CORRUPT, CAPACITY, NO_MEMORY. */
enum sluice_error sluice_listing_parse(const struct sluice_listing_kind *kind, const char *data, size_t length,
                                       struct sluice_listed **made, struct sluice_error_text *text);

/* Files of slurmctld's own in this form: put the checksum under what was written `to` an open_memstream of *text and
 * *length, and close it. False: no memory; *text is the caller's in any case. */
bool sluice_listing_end(FILE *to, char **text, size_t *length);
/* Replace a file. Durable when it returns, and whole at any time. False: errno says why. */
bool sluice_listing_write(const char *path, const char *text, size_t length);

#endif
