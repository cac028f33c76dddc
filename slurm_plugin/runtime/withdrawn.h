/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The GPUs that are out of service, as immutable snapshots.
 *
 * The controllers' daemon writes them to `sluice.withdrawn` in StateSaveLocation, where a backup controller finds them,
 * too; the file is checked every half second. If it cannot be read or is damaged, the last good one stays in force, and
 * this is logged; if it is removed, the list is empty.
 *
 *   sluice-withdrawn 1
 *   NODE NUMBER                    a GPU: bit NUMBER of the node's gres/gpu; a line each, any order, no duplicates
 *   checksum = crc32:0123abcd      of all bytes before this line
 */
#ifndef SLUICE_RUNTIME_WITHDRAWN_H
#define SLUICE_RUNTIME_WITHDRAWN_H

#include "runtime/listing.h"

#define SLUICE_WITHDRAWN_FILE "sluice.withdrawn"

enum {
    SLUICE_WITHDRAWN_MAX = 65536,   /* GPUs */
    SLUICE_WITHDRAWN_MAX_NAME = 63, /* bytes of a node's name */
    SLUICE_WITHDRAWN_MAX_GPU = 255, /* the highest number */
};

struct sluice_withdrawn_gpu {
    char node[SLUICE_WITHDRAWN_MAX_NAME + 1];
    uint32_t gpu;
};

struct sluice_withdrawn {
    struct sluice_listed listed;
    uint64_t generation;                /* grows with each change */
    struct sluice_withdrawn_gpu gpus[]; /* sorted by node and number */
};

/* Read a file's content; needs no terminating zero. On success *list is the caller's, to be released. Errors: INVALID
 * (`text` says the line), VERSION, CORRUPT, CAPACITY, NO_MEMORY. */
enum sluice_error sluice_withdrawn_parse(const char *data, size_t length, struct sluice_withdrawn **list,
                                         struct sluice_error_text *text);

/* Grows with each change of the list in force. One atomic load. */
uint64_t sluice_withdrawn_generation(void);
/* The list in force, which stays as it is until it is released; NULL before the controller's start. */
const struct sluice_withdrawn *sluice_withdrawn_acquire(void);
void sluice_withdrawn_release(const struct sluice_withdrawn *list);

#endif
