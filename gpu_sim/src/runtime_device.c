/* The devices that a program sees, and what it holds of them. */
#include "runtime_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "mps.h"
#include "vram.h"

struct rt_state rt_all = {.lock = PTHREAD_MUTEX_INITIALIZER};

static bool names_device(const char *word, size_t length, const struct rt_device *device, size_t ordinal)
{
    struct sim_gpu gpu;
    if (length == 0 || !sim_peek(device->index, &gpu)) {
        return false;
    }
    char text[64], *end;
    if (length >= sizeof text) {
        return false;
    }
    memcpy(text, word, length);
    text[length] = 0;
    unsigned long number = strtoul(text, &end, 10);
    if (end != text && *end == 0) {
        return number == ordinal;
    }
    const char *uuid = device->instance == SIM_NO_INSTANCE ? gpu.uuid : gpu.instances[device->instance].uuid;
    if (gpu.vendor == SIM_VENDOR_AMD && strncasecmp(text, "GPU-", 4) == 0 && strlen(gpu.uuid) == 36) {
        char serial[32]; /* AMD's short form: the 16 digits of the serial number */
        memcpy(serial, gpu.uuid, 2);
        memcpy(serial + 2, gpu.uuid + 21, 2);
        memcpy(serial + 4, gpu.uuid + 24, 13);
        return strcasecmp(text + 4, serial) == 0;
    }
    return length >= 8 && strncasecmp(uuid, text, length) == 0; /* an abbreviation is enough */
}

/* Keep the devices that a list names, in its order; what is wrong in it ends it. */
static int apply_list(const char *list, const struct rt_device *from, int count, struct rt_device *to)
{
    int chosen = 0;
    while (list != NULL && chosen < RT_MAX_DEVICES) {
        const char *comma = strchr(list, ',');
        size_t length = comma != NULL ? (size_t)(comma - list) : strlen(list);
        int place = 0;
        while (place < count && !names_device(list, length, &from[place], (size_t)place)) {
            place++;
        }
        for (int i = 0; i < chosen; i++) { /* nothing twice */
            if (place < count && to[i].index == from[place].index && to[i].instance == from[place].instance) {
                return chosen;
            }
        }
        if (place == count) {
            return chosen;
        }
        to[chosen++] = from[place];
        list = comma != NULL ? comma + 1 : NULL;
    }
    return chosen;
}

static bool is_mig_list(const char *list)
{
    return list != NULL && strncasecmp(list, "MIG-", 4) == 0;
}

/* All devices that a program could use: whole GPUs, AMD partitions and, in MIG mode, instances; only the first of these
 * unless named. */
static int all_devices(struct rt_device *devices, bool every_instance)
{
    uint8_t visible[SIM_MAX_GPUS];
    unsigned gpus = sim_visible(visible);
    int count = 0;
    bool instance_taken = false;
    for (unsigned i = 0; i < gpus; i++) {
        struct sim_gpu gpu;
        if (!sim_peek(visible[i], &gpu)) {
            continue;
        }
        bool parts = gpu.vendor == SIM_VENDOR_AMD && gpu.instances[0].used;
        if (!gpu.mig_enabled && !parts) {
            devices[count++] = (struct rt_device){.index = visible[i], .instance = SIM_NO_INSTANCE};
            continue;
        }
        for (uint8_t k = 0; k < SIM_MAX_INSTANCES && (parts || every_instance || !instance_taken); k++) {
            if (gpu.instances[k].used && !gpu.instances[k].bare && sim_instance_visible(&gpu, &gpu.instances[k])) {
                devices[count++] = (struct rt_device){.index = visible[i], .instance = k};
                instance_taken = !parts;
            }
        }
    }
    return count;
}

static void find_devices(const char *const *lists, size_t list_count)
{
    static struct rt_device stages[2][SIM_MAX_GPUS * SIM_MAX_INSTANCES];
    bool mig = false;
    for (size_t i = 0; i < list_count; i++) {
        mig = mig || is_mig_list(getenv(lists[i]));
    }
    struct rt_device *from = stages[0], *to = stages[1];
    int count = all_devices(from, mig);
    for (size_t i = 0; i < list_count; i++) {
        const char *list = getenv(lists[i]);
        if (list != NULL) {
            count = apply_list(list, from, count, to);
            struct rt_device *swap = from;
            from = to;
            to = swap;
        }
    }
    rt_all.count = count < RT_MAX_DEVICES ? count : RT_MAX_DEVICES;
    for (int i = 0; i < rt_all.count; i++) {
        rt_all.devices[i] = from[i];
        rt_all.devices[i].primary = (struct rt_context){.device = i, .primary = true};
        rt_all.devices[i].standard = (struct rt_pool){.device = i};
        rt_all.devices[i].graphs = (struct rt_pool){.device = i, .threshold = UINT64_MAX};
        rt_all.devices[i].current = &rt_all.devices[i].standard;
        rt_all.devices[i].managed = (struct rt_pool){.device = i, .home = RT_IN_MANAGED};
        rt_all.devices[i].current_managed = &rt_all.devices[i].managed;
        rt_all.host = (struct rt_pool){.home = RT_IN_HOST};
    }
}

static enum rt_status status_of(enum sim_status status)
{
    switch (status) {
    case SIM_OK:
        return RT_OK;
    case SIM_NO_MEMORY:
        return RT_NO_MEMORY;
    case SIM_CLOSED:
        return RT_CLOSED;
    case SIM_NOT_LOADED:
        return RT_NO_DEVICE;
    case SIM_NO_DEVICE:
        return RT_BAD_DEVICE;
    case SIM_OLD_DRIVER:
        return RT_INVALID;
    case SIM_CORRUPT:
    case SIM_LOST:
    case SIM_IO:
    case SIM_DENIED:
    case SIM_BUSY:
    case SIM_REFUSED:
        break;
    }
    return RT_UNAVAILABLE;
}

static void leave_content(const void *node, VISIT which, int depth)
{
    (void)depth;
    const struct rt_block *block = *(struct rt_block *const *)node;
    if ((which == postorder || which == leaf) && block->kind == RT_DEVICE) {
        vram_leave(rt_all.devices[block->device].index, (const void *)block->base, block->size);
    }
}

/* What this process holds goes with it; an orderly end gives it back at once. */
static void leave(void)
{
    if (rt_all.owner != getpid()) {
        return;
    }
    twalk(rt_all.blocks, leave_content);
    struct sim_gpu gpu;
    for (int i = 0; i < rt_all.count; i++) {
        if (sim_peek(rt_all.devices[i].index, &gpu)) {
            sim_hold(rt_all.devices[i].index, rt_all.devices[i].instance, INT64_MIN + 1);
        }
    }
}

static void after_fork(void)
{
    rt_all.forked = rt_all.owner != 0;
}

enum rt_status rt_open(enum sim_vendor vendor, uint64_t granule, uint64_t pool_step, const char *const *lists,
                       size_t list_count)
{
    pthread_mutex_lock(&rt_all.lock);
    enum rt_status status = RT_OK;
    if (rt_all.owner == 0) {
        status = status_of(sim_open(vendor));
        if (status == RT_OK) {
            rt_all.owner = getpid();
            rt_all.granule = granule;
            rt_all.pool_step = pool_step;
            find_devices(lists, list_count);
            vram_find();
            if (vendor == SIM_VENDOR_NVIDIA) {
                mps_join();
            }
            atexit(leave);
            pthread_atfork(NULL, NULL, after_fork);
        }
    } else if (rt_all.forked) {
        status = RT_CLOSED;
    }
    if (status == RT_OK && rt_all.count == 0) {
        status = RT_NO_DEVICE;
    }
    pthread_mutex_unlock(&rt_all.lock);
    return status;
}

/* Asked at every call, as by a driver, so without a system call. */
enum rt_status rt_ready(void)
{
    return rt_all.owner != 0 && !rt_all.forked ? RT_OK : RT_CLOSED;
}

int rt_count(void)
{
    return rt_all.count;
}

int rt_ordinal(unsigned index)
{
    for (int i = 0; i < rt_all.count; i++) {
        if (rt_all.devices[i].index == index) {
            return i;
        }
    }
    return -1;
}

enum rt_status rt_check_device(int device)
{
    enum rt_status status = rt_ready();
    return status == RT_OK && (device < 0 || device >= rt_all.count) ? RT_BAD_DEVICE : status;
}

enum rt_status rt_gpu(int device, struct sim_gpu *gpu, unsigned *index, uint8_t *instance)
{
    enum rt_status status = rt_check_device(device);
    if (status != RT_OK) {
        return status;
    }
    const struct rt_device *it = &rt_all.devices[device];
    if (index != NULL) {
        *index = it->index;
    }
    if (instance != NULL) {
        *instance = it->instance;
    }
    status = status_of(sim_gpu(0, it->index, gpu));
    bool gone = it->instance != SIM_NO_INSTANCE && !gpu->instances[it->instance].used;
    return status == RT_OK && gone ? RT_UNAVAILABLE : status;
}

enum rt_status rt_memory(int device, uint64_t *free_bytes, uint64_t *total)
{
    struct sim_gpu gpu;
    unsigned index;
    uint8_t instance;
    enum rt_status status = rt_gpu(device, &gpu, &index, &instance);
    if (status == RT_OK) {
        *total = sim_capacity(&gpu, instance);
        *free_bytes = *total - sim_used(index, &gpu, instance);
        struct sim_cgroup_limit limit;
        if (instance == SIM_NO_INSTANCE && sim_process_cgroup_limits(index, &limit) && limit.hard < *total) {
            uint64_t left = limit.used < limit.hard ? limit.hard - limit.used : 0;
            *total = limit.hard;
            *free_bytes = left < *free_bytes ? left : *free_bytes;
        }
    }
    return status;
}

/* Not the vendor's: a program of tests says how busy it keeps a device, in thousandths. 0, or a status of sim.h. */
SIM_API int sluice_sim_load(int device, unsigned permille)
{
    if (rt_check_device(device) != RT_OK) {
        return SIM_NO_DEVICE;
    }
    return (int)sim_load(rt_all.devices[device].index, rt_all.devices[device].instance, permille);
}

enum rt_status rt_hold(int device, int64_t change)
{
    if (change > 0 && mps_lost()) {
        return RT_UNAVAILABLE;
    }
    return change == 0 ? RT_OK
                       : status_of(sim_hold(rt_all.devices[device].index, rt_all.devices[device].instance, change));
}

/* Like the others below: the lock is held. */
void rt_give_back(int device, uint64_t bytes)
{
    rt_hold(device, -(int64_t)bytes);
}
