/* Simulated rocprofiler-sdk: buffers. A thread of the library's own brings their records to the tool: when the watermark
 * is reached, and at a flush; those alone that are complete on the device. */
#include "rocp_sim.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "sim.h"

enum { BUFFERS = 16, LARGEST = 256, EPOCH = 1000000007 };

struct slot {
    uint64_t end;
    struct rocp_header header;
    uint64_t record[LARGEST / 8];
};

static struct buffer {
    struct slot *slots, *spare; /* the one is filled while the other is delivered */
    size_t used, most, watermark;
    uint64_t context, dropped;
    rocp_on_records *tell;
    void *data;
    bool wanted; /* by the thread */
} buffers[BUFFERS];

static size_t count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER, done = PTHREAD_COND_INITIALIZER;
static bool begun;

static uint64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* What is not complete on the device goes back. The lock is held. */
static void put_back(struct buffer *buffer, const struct slot *slot)
{
    if (buffer->used == buffer->most) {
        buffer->dropped++;
    } else {
        buffer->slots[buffer->used++] = *slot;
    }
}

/* The lock is held, and let go for the tool's time. */
static void deliver(size_t number)
{
    struct buffer *buffer = &buffers[number];
    struct slot *slots = buffer->slots;
    size_t used = buffer->used, complete = 0;
    uint64_t now = clock_ns(), dropped = buffer->dropped;
    buffer->slots = buffer->spare;
    buffer->spare = slots;
    buffer->used = buffer->dropped = 0;
    pthread_mutex_unlock(&lock);
    struct rocp_header **headers = calloc(used + 1, sizeof *headers);
    for (size_t i = 0; headers != NULL && i < used; i++) {
        if (slots[i].end <= now) {
            slots[i].header.record = slots[i].record;
            headers[complete++] = &slots[i].header;
        }
    }
    if (complete > 0 || dropped > 0) {
        buffer->tell(buffer->context, number + 1, headers, complete, buffer->data, dropped);
    }
    free(headers);
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < used; i++) {
        if (slots[i].end > now) {
            put_back(buffer, &slots[i]);
        }
    }
    buffer->wanted = false;
    pthread_cond_broadcast(&done);
}

static void *bring(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        bool any = false;
        for (size_t i = 0; i < count; i++) {
            if (buffers[i].wanted) {
                deliver(i);
                any = true;
            }
        }
        if (!any) {
            pthread_cond_wait(&work, &lock);
        }
    }
    return NULL;
}

static void begin(void)
{
    pthread_t thread;
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    begun = begun || pthread_create(&thread, NULL, bring, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void rocp_put(uint64_t number, const struct rocp_record *record, uint64_t end)
{
    struct buffer *buffer = &buffers[number - 1];
    pthread_mutex_lock(&lock);
    if (buffer->used == buffer->most) {
        buffer->dropped++;
    } else {
        struct slot *slot = &buffer->slots[buffer->used++];
        slot->end = end;
        slot->header = (struct rocp_header){.category = ROCP_CATEGORY_TRACING, .kind = record->kind};
        memcpy(slot->record, record, record->size);
    }
    if (buffer->used >= buffer->watermark && !buffer->wanted) {
        buffer->wanted = true;
        pthread_cond_signal(&work);
    }
    pthread_mutex_unlock(&lock);
}

#define ROCP(NAME, ...) SIM_API uint32_t rocprofiler_##NAME(__VA_ARGS__)

ROCP(create_buffer, uint64_t context, size_t size, size_t watermark, uint32_t policy, rocp_on_records *tell, void *data,
     uint64_t *number)
{
    enum { TYPICAL = 200 }; /* bytes of a record */
    if (!rocp_configuring()) {
        return ROCP_LOCKED;
    }
    if (count == BUFFERS || tell == NULL || number == NULL || policy != ROCP_DISCARD || watermark > size) {
        return ROCP_INVALID;
    }
    struct buffer *buffer = &buffers[count];
    *buffer = (struct buffer){.slots = calloc(size / TYPICAL, sizeof(struct slot)),
                              .spare = calloc(size / TYPICAL, sizeof(struct slot)),
                              .most = size / TYPICAL,
                              .watermark = watermark / TYPICAL,
                              .context = context,
                              .tell = tell,
                              .data = data};
    if (buffer->slots == NULL || buffer->spare == NULL) {
        return ROCP_REFUSED;
    }
    begin();
    *number = ++count;
    return ROCP_OK;
}

ROCP(flush_buffer, uint64_t number)
{
    if (number == 0 || number > count) {
        return ROCP_NO_BUFFER;
    }
    pthread_mutex_lock(&lock);
    buffers[number - 1].wanted = true;
    pthread_cond_signal(&work);
    while (buffers[number - 1].wanted) {
        pthread_cond_wait(&done, &lock);
    }
    pthread_mutex_unlock(&lock);
    return ROCP_OK;
}

/* This clock is not the system's. */
ROCP(get_timestamp, uint64_t *now)
{
    if (now == NULL) {
        return ROCP_INVALID;
    }
    *now = clock_ns() + EPOCH;
    return ROCP_OK;
}
