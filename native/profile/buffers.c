/* SPDX-License-Identifier: Apache-2.0 */
#include "buffers.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>

#include "clock.h"

enum { COUNT = 64, SIZE = 256 << 10 }; /* small ones, so that the governor soon sees what came */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t full_one;
    uint8_t *memory;
    uint8_t *free[COUNT];
    struct buffer full[COUNT]; /* a ring */
    unsigned free_count, first, full_count;
    bool woken;
} all = {.lock = PTHREAD_MUTEX_INITIALIZER};

static atomic_bool abandoned;

bool buffers_open(void)
{
    pthread_condattr_t attributes;
    if (all.memory != NULL) {
        return true;
    }
    void *memory = mmap(NULL, (size_t)COUNT * SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        return false;
    }
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&all.full_one, &attributes);
    pthread_condattr_destroy(&attributes);
    all.memory = memory;
    for (unsigned i = 0; i < COUNT; i++) {
        all.free[all.free_count++] = all.memory + (size_t)i * SIZE;
    }
    return true;
}

uint8_t *buffers_take(size_t *size)
{
    uint8_t *data = NULL;
    *size = 0;
    if (atomic_load(&abandoned)) {
        return NULL;
    }
    pthread_mutex_lock(&all.lock);
    if (all.free_count > 0) {
        data = all.free[--all.free_count];
        *size = SIZE;
    }
    pthread_mutex_unlock(&all.lock);
    return data;
}

void buffers_fill(uint8_t *data, size_t valid)
{
    bool ours = all.memory <= data && data < all.memory + (size_t)COUNT * SIZE;
    if (!ours || atomic_load(&abandoned)) {
        return;
    }
    pthread_mutex_lock(&all.lock);
    all.full[(all.first + all.full_count++) % COUNT] = (struct buffer){.data = data, .valid = valid};
    pthread_cond_signal(&all.full_one);
    pthread_mutex_unlock(&all.lock);
}

bool buffers_wait(struct buffer *buffer, uint64_t ns)
{
    uint64_t until = clock_now(CLOCK_MONOTONIC) + ns;
    struct timespec then = {.tv_sec = (time_t)(until / 1000000000u), .tv_nsec = (long)(until % 1000000000u)};
    int failed = 0;
    pthread_mutex_lock(&all.lock);
    while (all.full_count == 0 && !all.woken && failed == 0) {
        failed = pthread_cond_timedwait(&all.full_one, &all.lock, &then);
    }
    all.woken = false;
    bool found = all.full_count > 0;
    if (found) {
        *buffer = all.full[all.first];
        all.first = (all.first + 1) % COUNT;
        all.full_count--;
    }
    pthread_mutex_unlock(&all.lock);
    return found;
}

void buffers_return(const struct buffer *buffer)
{
    pthread_mutex_lock(&all.lock);
    all.free[all.free_count++] = buffer->data;
    pthread_mutex_unlock(&all.lock);
}

void buffers_wake(void)
{
    pthread_mutex_lock(&all.lock);
    all.woken = true;
    pthread_cond_signal(&all.full_one);
    pthread_mutex_unlock(&all.lock);
}

void buffers_rest(void)
{
    pthread_mutex_lock(&all.lock);
    for (unsigned i = 0; i < all.free_count; i++) {
        madvise(all.free[i], SIZE, MADV_DONTNEED);
    }
    pthread_mutex_unlock(&all.lock);
}

void buffers_abandon(void)
{
    atomic_store(&abandoned, true);
}
