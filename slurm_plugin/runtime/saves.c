/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/saves.h"

#include "runtime/controller.h"
#include "runtime/listing.h"
#include "runtime/log.h"
#include "runtime/ticker.h"

#include <pthread.h>
#include <stdlib.h>

static struct {
    pthread_mutex_t lock; /* guards `current` */
    struct sluice_saves *current;
    struct sluice_listing_file file;
    struct sluice_tick *tick;
} saves = {.lock = PTHREAD_MUTEX_INITIALIZER};

const struct sluice_saves *sluice_saves_acquire(void)
{
    pthread_mutex_lock(&saves.lock);
    struct sluice_saves *current = saves.current;
    if (current)
        atomic_fetch_add(&current->users, 1);
    pthread_mutex_unlock(&saves.lock);
    return current;
}

static void publish(struct sluice_saves *next)
{
    pthread_mutex_lock(&saves.lock);
    struct sluice_saves *before = saves.current;
    saves.current = next;
    pthread_mutex_unlock(&saves.lock);
    sluice_saves_release(before);
}

static void look(void *unused)
{
    (void)unused;
    char *data;
    size_t length;
    struct sluice_saves *next = NULL;
    struct sluice_error_text text = {.text = ""};
    enum sluice_listing found = sluice_listing_look(&saves.file, &data, &length, &text);
    if (found == SLUICE_LISTING_SAME)
        return;
    if (data)
        (void)sluice_saves_parse(data, length, &next, &text);
    free(data);
    if (next || found == SLUICE_LISTING_GONE)
        publish(next);
    else
        sluice_log_error("sluice: %s: %s; what was known of saves stays so", saves.file.path, text.text);
}

static bool start(const struct sluice_site *site)
{
    sluice_listing_follow(&saves.file, site->state_folder, SLUICE_SAVES_FILE);
    look(NULL);
    saves.tick = sluice_ticker_add("saves", SLUICE_LISTING_PERIOD_MS, look, NULL);
    return saves.tick != NULL;
}

static void stop(void)
{
    sluice_ticker_remove(saves.tick);
    saves.tick = NULL;
    publish(NULL);
}

__attribute__((constructor)) static void enlist(void)
{
    static struct sluice_module module = {.name = "saves", .start = start, .stop = stop};
    sluice_controller_module(&module);
}
