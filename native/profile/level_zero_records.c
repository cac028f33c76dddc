/* SPDX-License-Identifier: Apache-2.0 */
/* Records on their way from the program's threads to ours. */
#include "level_zero.h"

#include <pthread.h>
#include <string.h>

struct entry {
    struct sluice_profile_record record;
    const char *name;
};

static struct {
    pthread_mutex_t lock;
    bool open;
    uint8_t *taken;
    size_t used, size;
    uint64_t lost;
} all = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* The lock is held. */
static void pass_on(void)
{
    if (all.taken != NULL) {
        buffers_fill(all.taken, all.used);
        all.taken = NULL;
    }
}

void ze_keep(const struct sluice_profile_record *record, const char *name)
{
    pthread_mutex_lock(&all.lock);
    if (all.taken != NULL && all.used + sizeof(struct entry) > all.size) {
        pass_on();
    }
    if (all.open && all.taken == NULL) {
        all.taken = buffers_take(&all.size);
        all.used = 0;
    }
    if (all.open && all.taken == NULL) {
        all.lost++;
    } else if (all.open) {
        struct entry *entry = (struct entry *)(void *)(all.taken + all.used);
        *entry = (struct entry){.record = *record, .name = name};
        all.used += sizeof *entry;
    }
    pthread_mutex_unlock(&all.lock);
}

void ze_keep_open(bool on)
{
    pthread_mutex_lock(&all.lock);
    all.open = on;
    all.lost = 0;
    pass_on();
    pthread_mutex_unlock(&all.lock);
}

void ze_lose(uint64_t events)
{
    pthread_mutex_lock(&all.lock);
    all.lost += events;
    pthread_mutex_unlock(&all.lock);
}

uint64_t ze_lost(void)
{
    pthread_mutex_lock(&all.lock);
    uint64_t lost = all.lost;
    all.lost = 0;
    pthread_mutex_unlock(&all.lock);
    return lost;
}

void ze_pass_on(void)
{
    pthread_mutex_lock(&all.lock);
    pass_on();
    pthread_mutex_unlock(&all.lock);
}

uint64_t ze_write(struct profile_file *file, const struct buffer *buffer)
{
    uint64_t count = 0;
    for (size_t at = 0; at + sizeof(struct entry) <= buffer->valid; at += sizeof(struct entry)) {
        struct entry entry;
        memcpy(&entry, buffer->data + at, sizeof entry);
        entry.record.name = entry.name != NULL ? file_name(file, entry.name) : 0;
        file_add(file, &entry.record);
        count++;
    }
    return count;
}
