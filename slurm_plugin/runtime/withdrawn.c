/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/withdrawn_internal.h"

#include "runtime/controller.h"
#include "runtime/listing.h"
#include "runtime/log.h"
#include "runtime/status.h"
#include "runtime/ticker.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>

static struct {
    pthread_mutex_t lock; /* guards `current` */
    struct shared_list *current;
    struct sluice_listing_file file;
    struct sluice_tick *tick;
    _Atomic uint64_t *listed;
} withdrawn = {.lock = PTHREAD_MUTEX_INITIALIZER};

static _Atomic uint64_t generation_now;

uint64_t sluice_withdrawn_generation(void)
{
    return atomic_load_explicit(&generation_now, memory_order_acquire);
}

const struct sluice_withdrawn *sluice_withdrawn_acquire(void)
{
    pthread_mutex_lock(&withdrawn.lock);
    struct shared_list *current = withdrawn.current;
    if (current)
        atomic_fetch_add(&current->users, 1);
    pthread_mutex_unlock(&withdrawn.lock);
    return current ? &current->shown : NULL;
}

void sluice_withdrawn_release(const struct sluice_withdrawn *list)
{
    sluice_withdrawn_free((struct sluice_withdrawn *)(uintptr_t)list);
}

static void publish(struct shared_list *list)
{
    pthread_mutex_lock(&withdrawn.lock);
    struct shared_list *before = withdrawn.current;
    list->shown.generation = atomic_load(&generation_now) + 1;
    withdrawn.current = list;
    pthread_mutex_unlock(&withdrawn.lock);
    atomic_store_explicit(&generation_now, list->shown.generation, memory_order_release);
    atomic_store_explicit(withdrawn.listed, list->shown.count, memory_order_relaxed);
    if (list->shown.count || (before && before->shown.count))
        sluice_log_info("sluice: %" PRIu32 " GPUs are out of service", list->shown.count);
    sluice_withdrawn_free(before ? &before->shown : NULL);
}

/* Look at the file. */
static void look(void *unused)
{
    (void)unused;
    char *data;
    size_t length;
    struct sluice_withdrawn *list = NULL;
    struct sluice_error_text text = {.text = ""};
    enum sluice_listing found = sluice_listing_look(&withdrawn.file, &data, &length, &text);
    if (found == SLUICE_LISTING_SAME)
        return;
    if (found == SLUICE_LISTING_GONE) {
        struct shared_list *empty = sluice_withdrawn_new(0);
        list = empty ? &empty->shown : NULL;
    } else if (data) {
        (void)sluice_withdrawn_parse(data, length, &list, &text);
        free(data);
    }
    if (list)
        publish((struct shared_list *)list);
    else
        sluice_log_error("sluice: %s: %s; the GPUs that were out of service stay so", withdrawn.file.path, text.text);
}

static bool start(const struct sluice_site *site)
{
    sluice_listing_follow(&withdrawn.file, site->state_folder, SLUICE_WITHDRAWN_FILE);
    withdrawn.listed = sluice_status_counter("withdrawn.listed");
    struct shared_list *empty = sluice_withdrawn_new(0);
    if (!empty)
        return false;
    publish(empty);
    look(NULL);
    withdrawn.tick = sluice_ticker_add("withdrawn", SLUICE_LISTING_PERIOD_MS, look, NULL);
    return withdrawn.tick != NULL;
}

static void stop(void)
{
    sluice_ticker_remove(withdrawn.tick);
    withdrawn.tick = NULL;
    pthread_mutex_lock(&withdrawn.lock);
    struct shared_list *last = withdrawn.current;
    withdrawn.current = NULL;
    pthread_mutex_unlock(&withdrawn.lock);
    sluice_withdrawn_free(last ? &last->shown : NULL);
}

__attribute__((constructor)) static void enlist(void)
{
    static struct sluice_module module = {.name = "withdrawn", .start = start, .stop = stop};
    sluice_controller_module(&module);
}
