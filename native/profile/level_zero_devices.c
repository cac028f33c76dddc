/* SPDX-License-Identifier: Apache-2.0 */
/* Intel's GPUs and their clocks: counters of some ten MHz and often 32 bits, each with a beginning of its own. */
#include "level_zero.h"

#include <string.h>

#include "clock.h"

enum { TOLERANCE_NS = 5000 };

struct ze_gpu {
    ze_handle handle;
    uint32_t number;
    uint64_t frequency, mask, kernel_mask;
    bool compared;
    uint64_t cycles; /* at the last comparison, without overflows */
    int64_t offset;  /* what to add to a time of the device, to get CLOCK_MONOTONIC */
    struct ze_device properties;
};

static struct ze_gpu gpus[TRACER_DEVICES];
static unsigned gpu_count;

static uint64_t mask_of(uint32_t bits)
{
    return bits == 0 || bits >= 64 ? UINT64_MAX : (UINT64_C(1) << bits) - 1;
}

static void add_device(ze_handle handle)
{
    struct ze_gpu *gpu = &gpus[gpu_count];
    *gpu = (struct ze_gpu){.handle = handle, .number = gpu_count, .properties = {.type = ZE_TYPE_DEVICE_1_2}};
    if (ze.zeDeviceGetProperties(handle, &gpu->properties) == ZE_OK) {
        gpu->frequency = gpu->properties.timer != 0 ? gpu->properties.timer : 1;
        gpu->mask = mask_of(gpu->properties.timestamp_bits);
        gpu->kernel_mask = mask_of(gpu->properties.kernel_timestamp_bits);
        gpu_count++;
    }
}

static void add_driver(ze_handle driver)
{
    ze_handle devices[TRACER_DEVICES];
    uint32_t count = TRACER_DEVICES - gpu_count;
    if (count > 0 && ze.zeDeviceGet(driver, &count, devices) == ZE_OK) {
        for (uint32_t i = 0; i < count; i++) {
            add_device(devices[i]);
        }
    }
}

static const struct ze_gpu *find(ze_handle device)
{
    for (unsigned i = 0; i < gpu_count; i++) {
        if (gpus[i].handle == device) {
            return &gpus[i];
        }
    }
    return NULL;
}

const struct ze_gpu *ze_gpu_of(ze_handle device)
{
    ze_handle root = NULL;
    const struct ze_gpu *gpu = find(device);
    return gpu == NULL && ze.zeDeviceGetRootDevice(device, &root) == ZE_OK ? find(root) : gpu;
}

uint32_t ze_gpu_number(const struct ze_gpu *gpu)
{
    return gpu != NULL ? gpu->number : UINT32_MAX;
}

/* ---- clocks ---- */

static uint64_t in_ns(const struct ze_gpu *gpu, uint64_t cycles)
{
    const uint64_t second = 1000000000u;
    return cycles / gpu->frequency * second + cycles % gpu->frequency * second / gpu->frequency;
}

/* The offset is between what the two readings around it say. It is changed only where they prove it wrong: with each
 * comparison's uncertainty in it, work of one list would seem to overlap. Answers how uncertain this one is, ns. */
static uint64_t compare(struct ze_gpu *gpu)
{
    uint64_t host, cycles, before = clock_now(CLOCK_MONOTONIC);
    if (ze.zeDeviceGetGlobalTimestamps(gpu->handle, &host, &cycles) != ZE_OK) {
        return 0;
    }
    uint64_t after = clock_now(CLOCK_MONOTONIC);
    gpu->cycles += gpu->compared ? (cycles - gpu->cycles) & gpu->mask : (cycles & gpu->mask) - gpu->cycles;
    int64_t theirs = (int64_t)in_ns(gpu, gpu->cycles), least = (int64_t)before - theirs, most = (int64_t)after - theirs;
    if (!gpu->compared) {
        gpu->offset = least + (most - least) / 2;
    } else if (gpu->offset < least - TOLERANCE_NS) {
        gpu->offset = least;
    } else if (gpu->offset > most + TOLERANCE_NS) {
        gpu->offset = most;
    }
    gpu->compared = true;
    return after - before;
}

/* The best of some. */
static void compare_first(struct ze_gpu *gpu)
{
    enum { TRIES = 16, GOOD_NS = 2000 };
    uint64_t best = UINT64_MAX;
    int64_t offset = 0;
    for (int i = 0; i < TRIES && best > GOOD_NS; i++) {
        gpu->compared = false;
        uint64_t uncertain = compare(gpu);
        if (uncertain < best) {
            best = uncertain;
            offset = gpu->offset;
        }
    }
    gpu->offset = offset;
}

void ze_compare_clocks(void)
{
    for (unsigned i = 0; i < gpu_count; i++) {
        compare(&gpus[i]);
    }
}

void ze_find_devices(void)
{
    enum { DRIVERS = 8 };
    ze_handle drivers[DRIVERS];
    uint32_t count = DRIVERS;
    if (gpu_count == 0 && ze.zeDriverGet(&count, drivers) == ZE_OK) {
        for (uint32_t i = 0; i < count; i++) {
            add_driver(drivers[i]);
        }
    }
    for (unsigned i = 0; i < gpu_count; i++) {
        compare_first(&gpus[i]);
    }
}

uint64_t ze_when(const struct ze_gpu *gpu, uint64_t cycles)
{
    if (gpu == NULL || !gpu->compared) {
        return 0;
    }
    uint64_t later = (cycles - gpu->cycles) & gpu->kernel_mask, earlier = (gpu->cycles - cycles) & gpu->kernel_mask;
    uint64_t all = later < earlier ? gpu->cycles + later : gpu->cycles - earlier;
    return in_ns(gpu, all) + (uint64_t)gpu->offset;
}

/* ---- what a profile says of them ---- */

static uint64_t memory_of(ze_handle device)
{
    enum { MEMORIES = 8 };
    struct ze_memory memories[MEMORIES];
    uint32_t count = MEMORIES;
    uint64_t bytes = 0;
    memset(memories, 0, sizeof memories);
    for (int i = 0; i < MEMORIES; i++) {
        memories[i].type = ZE_TYPE_MEMORY;
    }
    if (ze.zeDeviceGetMemoryProperties(device, &count, memories) == ZE_OK) {
        for (uint32_t i = 0; i < count; i++) {
            bytes += memories[i].bytes;
        }
    }
    return bytes;
}

void ze_note_devices(struct profile_file *file)
{
    for (unsigned i = 0; i < gpu_count; i++) {
        struct sluice_profile_record record = {.kind = SLUICE_PROFILE_DEVICE, .device = gpus[i].number};
        memcpy(record.device_info.uuid, gpus[i].properties.uuid, sizeof record.device_info.uuid);
        record.device_info.memory = memory_of(gpus[i].handle);
        gpus[i].properties.name[sizeof gpus[i].properties.name - 1] = 0;
        record.name = file_name(file, gpus[i].properties.name);
        file_add(file, &record);
    }
}
