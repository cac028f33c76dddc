/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/draws.h"

#include "runtime/controller.h"
#include "runtime/listing.h"
#include "runtime/log.h"
#include "runtime/ticker.h"

#include <pthread.h>
#include <stdlib.h>

static struct {
    pthread_mutex_t lock; /* guards `current` */
    struct sluice_draws *current;
    struct sluice_listing_file file;
    struct sluice_tick *tick;
} draws = {.lock = PTHREAD_MUTEX_INITIALIZER};

const struct sluice_draws *sluice_draws_acquire(void)
{
    pthread_mutex_lock(&draws.lock);
    struct sluice_draws *current = draws.current;
    if (current)
        atomic_fetch_add(&current->users, 1);
    pthread_mutex_unlock(&draws.lock);
    return current;
}

static void publish(struct sluice_draws *next)
{
    pthread_mutex_lock(&draws.lock);
    struct sluice_draws *before = draws.current;
    draws.current = next;
    pthread_mutex_unlock(&draws.lock);
    sluice_draws_release(before);
}

static void look(void *unused)
{
    (void)unused;
    char *data;
    size_t length;
    struct sluice_draws *next = NULL;
    struct sluice_error_text text = {.text = ""};
    enum sluice_listing found = sluice_listing_look(&draws.file, &data, &length, &text);
    if (found == SLUICE_LISTING_SAME)
        return;
    if (data)
        (void)sluice_draws_parse(data, length, &next, &text);
    free(data);
    if (next || found == SLUICE_LISTING_GONE)
        publish(next);
    else
        sluice_log_error("sluice: %s: %s; what was known of jobs' power stays so", draws.file.path, text.text);
}

static bool start(const struct sluice_site *site)
{
    sluice_listing_follow(&draws.file, site->state_folder, SLUICE_DRAWS_FILE);
    look(NULL);
    draws.tick = sluice_ticker_add("power", SLUICE_LISTING_PERIOD_MS, look, NULL);
    return draws.tick != NULL;
}

static void stop(void)
{
    sluice_ticker_remove(draws.tick);
    draws.tick = NULL;
    publish(NULL);
}

__attribute__((constructor)) static void enlist(void)
{
    static struct sluice_module module = {.name = "power", .start = start, .stop = stop};
    sluice_controller_module(&module);
}
