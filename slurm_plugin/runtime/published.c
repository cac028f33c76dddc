/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/published.h"

#include "runtime/log.h"
#include "runtime/ticker.h"

#include <stdlib.h>

const struct sluice_listed *sluice_published_acquire(struct sluice_published *published)
{
    pthread_mutex_lock(&published->lock);
    struct sluice_listed *current = published->current;
    if (current)
        atomic_fetch_add(&current->users, 1);
    pthread_mutex_unlock(&published->lock);
    return current;
}

static void publish(struct sluice_published *published, struct sluice_listed *next)
{
    if (next && published->announce)
        published->announce(next, published->current);
    pthread_mutex_lock(&published->lock);
    struct sluice_listed *before = published->current;
    published->current = next;
    pthread_mutex_unlock(&published->lock);
    sluice_listed_release(before);
}

/* What is in force without a file. False: no memory. */
static bool publish_none(struct sluice_published *published)
{
    struct sluice_listed *empty = published->announce ? sluice_listed_new(published->kind, 0) : NULL;
    if (published->announce && !empty)
        return false;
    publish(published, empty);
    return true;
}

static void look(void *of)
{
    struct sluice_published *published = of;
    char *data;
    size_t length;
    struct sluice_listed *next = NULL;
    struct sluice_error_text text = {.text = ""};
    enum sluice_listing found = sluice_listing_look(&published->followed, &data, &length, &text);
    if (found == SLUICE_LISTING_SAME || (found == SLUICE_LISTING_GONE && publish_none(published)))
        return;
    if (data)
        (void)sluice_listing_parse(published->kind, data, length, &next, &text);
    free(data);
    if (next)
        publish(published, next);
    else
        sluice_log_error("sluice: %s: %s; %s", published->followed.path, text.text, published->kept);
}

bool sluice_published_start(struct sluice_published *published, const char *folder)
{
    sluice_listing_follow(&published->followed, folder, published->file);
    if (!publish_none(published))
        return false;
    look(published);
    published->tick = sluice_ticker_add(published->name, SLUICE_LISTING_PERIOD_MS, look, published);
    return published->tick != NULL;
}

void sluice_published_stop(struct sluice_published *published)
{
    sluice_ticker_remove(published->tick);
    published->tick = NULL;
    publish(published, NULL);
}
