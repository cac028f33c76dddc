/* SPDX-License-Identifier: Apache-2.0 */
#include "cupti.h"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "buffers.h"
#include "clock.h"
#include "inject.h"
#include "launches.h"

static struct cupti cupti; /* loaded once, never unloaded */
static void *subscriber;

/* ---- finding it ---- */

#define CUPTI_VARIABLE "SLUICE_PROFILE_CUPTI"

struct loaded { /* of what the process has loaded already */
    char cupti[PATH_MAX], runtime[PATH_MAX];
};

static int look_at_library(struct dl_phdr_info *info, size_t size, void *found)
{
    struct loaded *loaded = found;
    const char *base = strrchr(info->dlpi_name, '/');
    (void)size;
    if (base != NULL && strncmp(base, "/libcupti.so", 12) == 0) {
        snprintf(loaded->cupti, sizeof loaded->cupti, "%s", info->dlpi_name);
    } else if (base != NULL && strncmp(base, "/libcudart.so", 13) == 0) {
        snprintf(loaded->runtime, sizeof loaded->runtime, "%.*s", (int)(base - info->dlpi_name), info->dlpi_name);
    }
    return 0;
}

static void *open_at(const char *folder, const char *rest)
{
    char path[2 * PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, rest);
    return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

/* CUDA's major version, as the driver has it; 0: there is no driver. */
static int driver_version(void)
{
    int version = 0;
    int (*ask)(int *) = NULL;
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (driver != NULL) {
        *(void **)&ask = dlsym(driver, "cuDriverGetVersion");
        if (ask != NULL && ask(&version) != 0) {
            version = 0;
        }
        dlclose(driver);
    }
    return version / 1000;
}

/* The one that belongs to the runtime library that is loaded: of its wheel, or of its toolkit. */
static void *next_to_runtime(const char *folder, int version)
{
    static const char *const places[] = {"libcupti.so.%d", "../../cuda_cupti/lib/libcupti.so.%d",
                                         "../extras/CUPTI/lib64/libcupti.so.%d"};
    void *library = NULL;
    for (size_t i = 0; i < sizeof places / sizeof *places && library == NULL; i++) {
        char rest[64];
        snprintf(rest, sizeof rest, places[i], version);
        library = open_at(folder, rest);
    }
    return library;
}

/* One of a newer CUDA than the driver's would refuse. */
static void *find_library(void)
{
    static struct loaded loaded;
    const char *said = getenv(CUPTI_VARIABLE);
    if (said != NULL && *said != 0) {
        return dlopen(said, RTLD_NOW | RTLD_LOCAL);
    }
    dl_iterate_phdr(look_at_library, &loaded);
    if (loaded.cupti[0] != 0) {
        return dlopen(loaded.cupti, RTLD_NOW | RTLD_LOCAL);
    }
    void *library = NULL;
    for (int version = driver_version(); version >= 11 && library == NULL; version--) {
        char name[32];
        snprintf(name, sizeof name, "libcupti.so.%d", version);
        library = loaded.runtime[0] != 0 ? next_to_runtime(loaded.runtime, version) : NULL;
        library = library != NULL ? library : dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    return library != NULL ? library : open_at("/usr/local/cuda/extras/CUPTI/lib64", "libcupti.so");
}

static bool load(char *words, size_t size)
{
    static const char *const names[] = {
#define CUPTI_NAME(NAME, PARAMETERS) #NAME,
        CUPTI_CALLS(CUPTI_NAME)
#undef CUPTI_NAME
    };
    void *library = find_library();
    if (library == NULL) {
        const char *why = dlerror();
        snprintf(words, size,
                 "no CUPTI was found (%s); load NVIDIA's CUDA toolkit, or install nvidia-cuda-cupti next to "
                 "the program's CUDA libraries, or set " CUPTI_VARIABLE " to the library's path",
                 why != NULL ? why : "");
        return false;
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        void *function = dlsym(library, names[i]);
        if (function == NULL) {
            snprintf(words, size, "this CUPTI has no %s; one of CUDA 11 or later is needed", names[i]);
            return false;
        }
        memcpy((char *)&cupti + i * sizeof function, &function, sizeof function);
    }
    return true;
}

/* ---- what is collected ---- */

static uint32_t enable(uint32_t wanted, bool on)
{
    static const struct {
        uint32_t wanted, kind;
    } kinds[] = {
        {SLUICE_PROFILE_WANT_KERNELS, CUPTI_KERNEL},
        {SLUICE_PROFILE_WANT_COPIES, CUPTI_MEMCPY},
        {SLUICE_PROFILE_WANT_COPIES, CUPTI_MEMCPY2},
        {SLUICE_PROFILE_WANT_COPIES, CUPTI_MEMSET},
        {SLUICE_PROFILE_WANT_SYNCHRONISATION, CUPTI_SYNCHRONIZATION},
        {SLUICE_PROFILE_WANT_MEMORY, CUPTI_MEMORY2},
        {SLUICE_PROFILE_WANT_CALLS, CUPTI_DRIVER},
    };
    uint32_t refused = CUPTI_OK;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if ((wanted & kinds[i].wanted) != 0) {
            uint32_t result = on ? cupti.cuptiActivityEnable(kinds[i].kind) : cupti.cuptiActivityDisable(kinds[i].kind);
            refused = refused != CUPTI_OK ? refused : result;
        }
    }
    return refused;
}

static void watch_launches(bool on)
{
    static const struct {
        uint32_t domain, function;
    } launches[] = {
        {CUPTI_DRIVER_API, CUPTI_DRIVER_LAUNCH},      {CUPTI_DRIVER_API, CUPTI_DRIVER_LAUNCH_PTSZ},
        {CUPTI_DRIVER_API, CUPTI_DRIVER_LAUNCH_EX},   {CUPTI_DRIVER_API, CUPTI_DRIVER_LAUNCH_EX_PTSZ},
        {CUPTI_RUNTIME_API, CUPTI_RUNTIME_LAUNCH},    {CUPTI_RUNTIME_API, CUPTI_RUNTIME_LAUNCH_PTSZ},
        {CUPTI_RUNTIME_API, CUPTI_RUNTIME_LAUNCH_EX}, {CUPTI_RUNTIME_API, CUPTI_RUNTIME_LAUNCH_EX_PTSZ},
    };
    for (size_t i = 0; i < sizeof launches / sizeof *launches; i++) {
        cupti.cuptiEnableCallback(on, subscriber, launches[i].domain, launches[i].function);
    }
}

static uint64_t now(void)
{
    uint64_t theirs = 0;
    cupti.cuptiGetTimestamp(&theirs);
    return theirs;
}

/* ---- devices ---- */

static void note_device(struct profile_file *file, int device, void *driver)
{
    struct sluice_profile_record record = {.kind = SLUICE_PROFILE_DEVICE, .device = (uint32_t)device};
    int (*uuid)(unsigned char *, int), (*name)(char *, int, int), (*memory)(size_t *, int);
    char text[128] = "";
    size_t bytes = 0;
    *(void **)&uuid = dlsym(driver, "cuDeviceGetUuid_v2"); /* a MIG instance's own */
    *(void **)&name = dlsym(driver, "cuDeviceGetName");
    *(void **)&memory = dlsym(driver, "cuDeviceTotalMem_v2");
    if (uuid == NULL || name == NULL || memory == NULL || uuid(record.device_info.uuid, device) != 0) {
        return;
    }
    if (name(text, sizeof text - 1, device) == 0) {
        record.name = file_name(file, text);
    }
    record.device_info.memory = memory(&bytes, device) == 0 ? bytes : 0;
    file_add(file, &record);
}

static void note_devices(struct profile_file *file)
{
    int count = 0, (*ask)(int *) = NULL;
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (driver == NULL) {
        return;
    }
    *(void **)&ask = dlsym(driver, "cuDeviceGetCount");
    if (ask == NULL || ask(&count) != 0) {
        count = 0;
    }
    for (int device = 0; device < count && device < TRACER_DEVICES; device++) {
        note_device(file, device, driver);
    }
    dlclose(driver);
}

/* ---- buffers ---- */

static void cupti_takes(uint8_t **data, size_t *size, size_t *records)
{
    *data = buffers_take(size);
    *records = 0; /* as many as fit */
}

static void cupti_returns(void *context, uint32_t stream, uint8_t *data, size_t size, size_t valid)
{
    (void)context;
    (void)stream;
    (void)size;
    buffers_fill(data, valid);
}

/* ---- the tracer ---- */

/* A launch of the runtime is one of the driver, too. */
static void on_launch(void *user, uint32_t domain, uint32_t function, const struct cupti_callback_data *data)
{
    (void)user;
    (void)domain;
    (void)function;
    if (data->site == CUPTI_ENTER) {
        launches_begin();
    } else {
        launches_end();
    }
}

static enum sluice_profile_reason refused(const char *call, uint32_t result, char *words, size_t size)
{
    const char *text = NULL;
    cupti.cuptiGetResultString(result, &text);
    bool occupied = result == CUPTI_OCCUPIED;
    snprintf(words, size, "%s%s answered %u (%s)",
             occupied ? "another profiler, such as PyTorch's, is at work in this process: " : "", call, result,
             text != NULL ? text : "?");
    return occupied ? SLUICE_PROFILE_OCCUPIED : SLUICE_PROFILE_LIBRARY;
}

/* CUPTI has one subscriber: whoever is first. */
static enum sluice_profile_reason open_tracer(char *words, size_t size)
{
    static bool loaded;
    loaded = loaded || load(words, size);
    if (!loaded) {
        return SLUICE_PROFILE_LIBRARY;
    }
    uint32_t result = cupti.cuptiSubscribe(&subscriber, on_launch, NULL);
    if (result != CUPTI_OK) {
        return refused("cuptiSubscribe", result, words, size);
    }
    result = cupti.cuptiActivityRegisterCallbacks(cupti_takes, cupti_returns);
    if (result != CUPTI_OK) {
        cupti.cuptiUnsubscribe(subscriber);
        return refused("cuptiActivityRegisterCallbacks", result, words, size);
    }
    return 0;
}

static void close_tracer(void)
{
    cupti.cuptiUnsubscribe(subscriber);
}

static enum sluice_profile_reason collect(uint32_t wanted, bool on, char *words, size_t size)
{
    static bool end_registered;
    uint32_t result = enable(wanted, on);
    if (!end_registered) { /* once CUPTI has registered its own end: the last one that was registered is called first */
        end_registered = atexit(inject_end) == 0;
    }
    return result != CUPTI_OK ? refused("cuptiActivityEnable", result, words, size) : 0;
}

static void flush(bool all)
{
    cupti.cuptiActivityFlushAll(all ? CUPTI_FLUSH_FORCED : 0);
}

static uint64_t dropped(void)
{
    size_t count = 0;
    cupti.cuptiActivityGetNumDroppedRecords(NULL, 0, &count);
    return count;
}

static uint64_t write_buffer(struct profile_file *file, const struct buffer *buffer, int64_t clock)
{
    return cupti_write(&cupti, file, buffer->data, buffer->valid, clock);
}

const struct tracer cupti_tracer = {.vendor = SLUICE_PROFILE_NVIDIA,
                                    .open = open_tracer,
                                    .close = close_tracer,
                                    .collect = collect,
                                    .watch_launches = watch_launches,
                                    .flush = flush,
                                    .now = now,
                                    .write = write_buffer,
                                    .dropped = dropped,
                                    .note_devices = note_devices};
