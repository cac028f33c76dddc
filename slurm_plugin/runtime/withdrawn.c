/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/withdrawn_internal.h"

#include "runtime/controller.h"
#include "runtime/log.h"
#include "runtime/status.h"
#include "runtime/ticker.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PERIOD_MS = 500 };

static struct {
    pthread_mutex_t lock; /* guards `current` */
    struct shared_list *current;
    char path[4096];
    struct stat seen;
    bool there; /* the file, when it was looked at last */
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

static bool as_seen(const struct stat *facts, bool there)
{
    return there == withdrawn.there &&
           (!there ||
            (facts->st_mtim.tv_sec == withdrawn.seen.st_mtim.tv_sec &&
             facts->st_mtim.tv_nsec == withdrawn.seen.st_mtim.tv_nsec && facts->st_ino == withdrawn.seen.st_ino &&
             facts->st_size == withdrawn.seen.st_size && facts->st_dev == withdrawn.seen.st_dev));
}

/* The whole file; NULL and errno. */
static char *read_whole(size_t *length, struct stat *facts)
{
    int file = open(withdrawn.path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW), failed = 0;
    char *data = NULL;
    if (file < 0)
        return NULL;
    if (fstat(file, facts) < 0)
        failed = errno;
    else if (!S_ISREG(facts->st_mode))
        failed = EINVAL;
    else if (facts->st_size > SLUICE_WITHDRAWN_MAX_BYTES)
        failed = EFBIG;
    else if (!(data = malloc((size_t)facts->st_size + 1)))
        failed = ENOMEM;
    *length = 0;
    while (!failed && *length < (size_t)facts->st_size) {
        ssize_t got = read(file, data + *length, (size_t)facts->st_size - *length);
        if (got < 0 && errno != EINTR)
            failed = errno;
        else if (got == 0)
            break;
        else if (got > 0)
            *length += (size_t)got;
    }
    close(file);
    if (failed) {
        free(data);
        data = NULL;
    }
    errno = failed;
    return data;
}

/* Look at the file. */
static void look(void *unused)
{
    (void)unused;
    struct stat facts = {0};
    bool there = lstat(withdrawn.path, &facts) == 0;
    if ((!there && errno != ENOENT) || as_seen(&facts, there))
        return;
    struct sluice_withdrawn *list = NULL;
    struct sluice_error_text text = {.text = ""};
    size_t length = 0;
    if (!there) {
        struct shared_list *empty = sluice_withdrawn_new(0);
        list = empty ? &empty->shown : NULL;
    } else {
        char *data = read_whole(&length, &facts);
        if (!data)
            snprintf(text.text, sizeof(text.text), "%s", strerror(errno));
        else
            (void)sluice_withdrawn_parse(data, length, &list, &text);
        free(data);
    }
    withdrawn.seen = facts;
    withdrawn.there = there;
    if (list)
        publish((struct shared_list *)list);
    else
        sluice_log_error("sluice: %s: %s; the GPUs that were out of service stay so", withdrawn.path, text.text);
}

static bool start(const struct sluice_site *site)
{
    snprintf(withdrawn.path, sizeof(withdrawn.path), "%s/%s", site->state_folder, SLUICE_WITHDRAWN_FILE);
    withdrawn.listed = sluice_status_counter("withdrawn.listed");
    withdrawn.there = false;
    struct shared_list *empty = sluice_withdrawn_new(0);
    if (!empty)
        return false;
    publish(empty);
    look(NULL);
    withdrawn.tick = sluice_ticker_add("withdrawn", PERIOD_MS, look, NULL);
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
