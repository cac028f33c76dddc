/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Small files that the controllers' daemon and `sluice gres write` write for the plugins: a first line KIND 1, lines, and
 * a checksum as the last one. They are replaced as a whole; those of the daemon are looked at every half second.
 */
#ifndef SLUICE_RUNTIME_LISTING_H
#define SLUICE_RUNTIME_LISTING_H

#include "sluice/core.h"

#include <stdbool.h>
#include <stddef.h>
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

/* Check a content's kind and checksum: its lines between the first and the last. Errors: CORRUPT, INVALID (another kind),
 * VERSION. */
enum sluice_error sluice_listing_open(const char *data, size_t length, const char *kind, const char **lines,
                                      size_t *bytes, struct sluice_error_text *text);

#endif
