/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a file of the controllers' daemon lists (listing.h), followed while the controller runs and shared as immutable
 * snapshots. If the file cannot be read or is damaged, the last good one stays in force, and this is logged.
 */
#ifndef SLUICE_RUNTIME_PUBLISHED_H
#define SLUICE_RUNTIME_PUBLISHED_H

#include "runtime/listing.h"

#include <pthread.h>

struct sluice_published {
    const struct sluice_listing_kind *kind;
    const char *name; /* of the ticker's function */
    const char *file; /* in StateSaveLocation */
    const char *kept; /* in the log: what of the last good one stays so */
    /* Called just before `next` takes the place of `before`, which may be NULL. Where there is such a function, an empty
     * list is in force without a file; otherwise nothing is. */
    void (*announce)(struct sluice_listed *next, const struct sluice_listed *before);
    pthread_mutex_t lock; /* guards `current`, which only start, the ticker and stop change */
    struct sluice_listed *current;
    struct sluice_listing_file followed;
    struct sluice_tick *tick;
};

bool sluice_published_start(struct sluice_published *published, const char *folder);
void sluice_published_stop(struct sluice_published *published);

/* What is in force, which stays as it is until it is released (sluice_listed_release); NULL: nothing. */
const struct sluice_listed *sluice_published_acquire(struct sluice_published *published);

#endif
