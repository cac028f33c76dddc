/* A process without its devices: what it held of them is noted, given back, and taken again, maybe of other ones. The
 * content of device memory is the process's own memory here, which is where a driver copies it to. */
#include "runtime_internal.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "vram.h"

static struct {
    struct had {
        uint64_t bytes;
        unsigned char uuid[16];
        char model[sizeof((struct sim_gpu *)0)->name];
        uint64_t memory_mib;
    } devices[RT_MAX_DEVICES];
} suspended;

void rt_read_uuid(const char *text, unsigned char uuid[16])
{
    text += 4;
    for (unsigned i = 0; i < 16 && text[0] != 0 && text[1] != 0; i++, text += 2) {
        text += *text == '-';
        char pair[3] = {text[0], text[1], 0};
        uuid[i] = (unsigned char)strtoul(pair, NULL, 16);
    }
}

bool rt_lock_calls(unsigned timeout_ms)
{
    struct timespec end;
    if (timeout_ms == 0) {
        return pthread_mutex_lock(&rt_all.lock) == 0;
    }
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += timeout_ms / 1000;
    end.tv_nsec += (long)(timeout_ms % 1000) * 1000000L;
    end.tv_sec += end.tv_nsec / 1000000000L;
    end.tv_nsec %= 1000000000L;
    return pthread_mutex_timedlock(&rt_all.lock, &end) == 0;
}

void rt_unlock_calls(void)
{
    pthread_mutex_unlock(&rt_all.lock);
}

static bool cannot; /* of the walk below; calls are locked */

static void check_block(const void *node, VISIT which, int depth)
{
    (void)depth;
    const struct rt_block *block = *(struct rt_block *const *)node;
    bool shared = block->kind == RT_IMPORT || block->file > 0 || (block->kind == RT_PHYSICAL && block->charge == 0);
    if ((which == postorder || which == leaf) && (block->kind == RT_MANAGED || shared)) {
        cannot = true;
    }
}

static void leave_block(const void *node, VISIT which, int depth)
{
    (void)depth;
    const struct rt_block *block = *(struct rt_block *const *)node;
    if ((which == postorder || which == leaf) && block->kind == RT_DEVICE) {
        vram_leave(rt_all.devices[block->device].index, (const void *)block->base, block->size);
    }
}

static bool can_be_suspended(void)
{
    cannot = sim_mps_server != 0;
    twalk(rt_all.blocks, check_block);
    for (int i = 0; i < rt_all.count; i++) {
        const struct rt_device *it = &rt_all.devices[i];
        cannot = cannot || (it->instance != SIM_NO_INSTANCE && sim_held(it->index, it->instance) > 0);
    }
    return !cannot;
}

enum rt_status rt_suspend(void)
{
    struct sim_gpu gpu;
    if (!can_be_suspended()) {
        return RT_INVALID;
    }
    for (int i = 0; i < rt_all.count; i++) {
        const struct rt_device *it = &rt_all.devices[i];
        struct had *had = &suspended.devices[i];
        *had = (struct had){.bytes = sim_held(it->index, it->instance)};
        if (had->bytes > 0 && sim_peek(it->index, &gpu)) {
            rt_read_uuid(gpu.uuid, had->uuid);
            sim_text(had->model, sizeof had->model, gpu.name);
            had->memory_mib = gpu.memory_total_mib;
        }
    }
    twalk(rt_all.blocks, leave_block);
    for (int i = 0; i < rt_all.count; i++) {
        sim_hold(rt_all.devices[i].index, rt_all.devices[i].instance, INT64_MIN + 1);
    }
    sim_let_go();
    return RT_OK;
}

/* The node's index of the visible GPU with this UUID; -1: none. */
static int find_gpu(const unsigned char uuid[16], struct sim_gpu *gpu)
{
    uint8_t visible[SIM_MAX_GPUS];
    unsigned count = sim_visible(visible);
    for (unsigned i = 0; i < count; i++) {
        unsigned char found[16] = {0};
        if (sim_peek(visible[i], gpu)) {
            rt_read_uuid(gpu->uuid, found);
        }
        if (memcmp(found, uuid, sizeof found) == 0) {
            return visible[i];
        }
    }
    return -1;
}

static const unsigned char *mapped(const unsigned char uuid[16], const struct rt_remap *maps, unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        if (memcmp(maps[i].from, uuid, 16) == 0) {
            return maps[i].to;
        }
    }
    return count == 0 ? uuid : NULL;
}

/* A device is another GPU from now on; one that is not in use, and was that GPU, is the other one's. */
static void exchange(struct rt_device *device, unsigned index)
{
    int other = rt_ordinal(index);
    if (other >= 0) {
        rt_all.devices[other].index = device->index;
    }
    device->index = index;
}

enum rt_status rt_resume(const struct rt_remap *maps, unsigned count)
{
    struct sim_gpu gpu;
    unsigned to[RT_MAX_DEVICES];
    enum rt_status status = RT_OK;
    sim_look_again();
    for (int i = 0; i < rt_all.count && status == RT_OK; i++) {
        const struct had *had = &suspended.devices[i];
        if (had->bytes > 0) {
            const unsigned char *uuid = mapped(had->uuid, maps, count);
            int found = uuid != NULL ? find_gpu(uuid, &gpu) : -1;
            bool same = found >= 0 && strcmp(gpu.name, had->model) == 0 && gpu.memory_total_mib == had->memory_mib;
            status = found < 0 ? RT_BAD_DEVICE : same ? RT_OK : RT_INVALID;
            to[i] = (unsigned)found;
        }
    }
    int taken = 0;
    for (; taken < rt_all.count && status == RT_OK; taken++) {
        uint64_t bytes = suspended.devices[taken].bytes;
        if (bytes > 0 && sim_hold(to[taken], SIM_NO_INSTANCE, (int64_t)bytes) != SIM_OK) {
            status = RT_NO_MEMORY;
            break;
        }
    }
    if (status != RT_OK) {
        for (int i = 0; i < taken; i++) {
            if (suspended.devices[i].bytes > 0) {
                sim_hold(to[i], SIM_NO_INSTANCE, INT64_MIN + 1);
            }
        }
        sim_let_go();
        return status;
    }
    for (int i = 0; i < rt_all.count; i++) {
        if (suspended.devices[i].bytes > 0) {
            exchange(&rt_all.devices[i], to[i]);
        }
    }
    return RT_OK;
}
