/* Simulated Level Zero: memory. It is ordinary memory of the process; a device's counts against its GPU. */
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "ze_sim.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct block {
    struct block *next;
    void *memory;
    size_t bytes;
    uint32_t kind;
    ze_handle device;
} *blocks;

static int64_t held_by(const struct block *block)
{
    return block->kind == ZE_IN_DEVICE ? (int64_t)block->bytes : 0;
}

static uint32_t allocate(uint32_t kind, size_t bytes, ze_handle device, void **memory)
{
    unsigned index = 0;
    struct block made = {.bytes = bytes, .kind = kind, .device = device};
    if (memory == NULL || bytes == 0 || (device != NULL && !ze_sim_device(device, &index))) {
        return ZE_BAD_ARGUMENT;
    }
    struct block *block = malloc(sizeof *block);
    made.memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (block == NULL || made.memory == MAP_FAILED ||
        (held_by(&made) > 0 && sim_hold(index, SIM_NO_INSTANCE, held_by(&made)) != SIM_OK)) {
        if (made.memory != MAP_FAILED) {
            munmap(made.memory, bytes);
        }
        free(block);
        return ZE_NO_DEVICE_MEMORY;
    }
    pthread_mutex_lock(&lock);
    *block = made;
    block->next = blocks;
    blocks = block;
    pthread_mutex_unlock(&lock);
    *memory = made.memory;
    return ZE_OK;
}

ZE(zeMemAllocDevice, ze_handle context, const void *how, size_t bytes, size_t alignment, ze_handle device,
   void **memory)
{
    ZE_TRACE(MemAllocDevice, ze_alloc_device,
             device != NULL ? allocate(ZE_IN_DEVICE, bytes, device, memory) : ZE_BAD_ARGUMENT, &context, &how, &bytes,
             &alignment, &device, &memory);
}

ZE(zeMemAllocShared, ze_handle context, const void *how, const void *how_host, size_t bytes, size_t alignment,
   ze_handle device, void **memory)
{
    ZE_TRACE(MemAllocShared, ze_alloc_shared, allocate(ZE_IN_SHARED, bytes, device, memory), &context, &how, &how_host,
             &bytes, &alignment, &device, &memory);
}

ZE(zeMemAllocHost, ze_handle context, const void *how, size_t bytes, size_t alignment, void **memory)
{
    ZE_TRACE(MemAllocHost, ze_alloc_host, allocate(ZE_IN_HOST, bytes, NULL, memory), &context, &how, &bytes, &alignment,
             &memory);
}

/* The lock is held. */
static struct block **place_of(const void *memory)
{
    struct block **place = &blocks;
    while (*place != NULL && ((const char *)memory < (char *)(*place)->memory ||
                              (const char *)memory >= (char *)(*place)->memory + (*place)->bytes)) {
        place = &(*place)->next;
    }
    return place;
}

static uint32_t release(void *memory)
{
    unsigned index = 0;
    pthread_mutex_lock(&lock);
    struct block **place = place_of(memory), *block = *place;
    if (block != NULL) {
        *place = block->next;
    }
    pthread_mutex_unlock(&lock);
    if (block == NULL) {
        return ZE_BAD_ARGUMENT;
    }
    if (held_by(block) > 0 && ze_sim_device(block->device, &index)) {
        sim_hold(index, SIM_NO_INSTANCE, -held_by(block));
    }
    munmap(block->memory, block->bytes);
    free(block);
    return ZE_OK;
}

ZE(zeMemFree, ze_handle context, void *memory)
{
    ZE_TRACE(MemFree, ze_free, release(memory), &context, &memory);
}

ZE(zeMemGetAddressRange, ze_handle context, const void *memory, void **base, size_t *bytes)
{
    (void)context;
    pthread_mutex_lock(&lock);
    const struct block *block = *place_of(memory);
    if (block != NULL && base != NULL) {
        *base = block->memory;
    }
    if (block != NULL && bytes != NULL) {
        *bytes = block->bytes;
    }
    pthread_mutex_unlock(&lock);
    return block != NULL ? ZE_OK : ZE_BAD_ARGUMENT;
}

ZE(zeMemGetAllocProperties, ze_handle context, const void *memory, struct ze_allocation *properties, ze_handle *device)
{
    (void)context;
    pthread_mutex_lock(&lock);
    const struct block *block = *place_of(memory);
    properties->kind = block != NULL ? block->kind : 0; /* not the driver's */
    if (device != NULL) {
        *device = block != NULL ? block->device : NULL;
    }
    pthread_mutex_unlock(&lock);
    return ZE_OK;
}
