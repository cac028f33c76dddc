/* SPDX-License-Identifier: Apache-2.0 */
#include "cupti.h"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"

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

bool cupti_load(struct cupti *cupti, char *words, size_t size)
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
        memcpy((char *)cupti + i * sizeof function, &function, sizeof function);
    }
    return true;
}

/* ---- what is collected ---- */

uint32_t cupti_collect(const struct cupti *cupti, uint32_t wanted, bool on)
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
            uint32_t result =
                on ? cupti->cuptiActivityEnable(kinds[i].kind) : cupti->cuptiActivityDisable(kinds[i].kind);
            refused = refused != CUPTI_OK ? refused : result;
        }
    }
    return refused;
}

void cupti_watch_launches(const struct cupti *cupti, void *subscriber, bool on)
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
        cupti->cuptiEnableCallback(on, subscriber, launches[i].domain, launches[i].function);
    }
}

int64_t cupti_clock(const struct cupti *cupti)
{
    enum { TRIES = 3 };
    uint64_t best = UINT64_MAX;
    int64_t offset = 0;
    for (int i = 0; i < TRIES; i++) {
        uint64_t theirs = 0, before = clock_now(CLOCK_MONOTONIC);
        cupti->cuptiGetTimestamp(&theirs);
        uint64_t took = clock_now(CLOCK_MONOTONIC) - before;
        if (took < best) {
            best = took;
            offset = (int64_t)(before + took / 2 - theirs);
        }
    }
    return offset;
}

/* ---- records ---- */

struct reading {
    const struct cupti *cupti;
    struct profile_file *file;
    int64_t clock;
};

/* 0 is CUPTI's word for a time that it does not know. */
static uint64_t when(const struct reading *reading, uint64_t theirs)
{
    return theirs != 0 ? theirs + (uint64_t)reading->clock : 0;
}

static uint8_t place(unsigned kind)
{
    return (uint8_t)(kind == CUPTI_MEMORY_STATIC     ? SLUICE_PROFILE_ON_DEVICE
                     : kind == CUPTI_MANAGED_STATIC  ? SLUICE_PROFILE_MANAGED
                     : kind > SLUICE_PROFILE_MANAGED ? SLUICE_PROFILE_UNKNOWN
                                                     : kind);
}

static void of_kernel(const struct reading *reading, const struct cupti_record *record)
{
    const struct cupti_kernel *theirs = (const struct cupti_kernel *)record;
    struct sluice_profile_record ours = {.kind = SLUICE_PROFILE_KERNEL,
                                         .device = theirs->device,
                                         .start = when(reading, theirs->start),
                                         .end = when(reading, theirs->end),
                                         .context = theirs->context,
                                         .stream = theirs->stream,
                                         .correlation = theirs->correlation};
    for (int i = 0; i < 3; i++) {
        ours.kernel.grid[i] = (uint32_t)theirs->grid[i];
        ours.kernel.block[i] = (uint32_t)theirs->block[i];
    }
    ours.name = theirs->name != NULL ? file_name(reading->file, theirs->name) : 0;
    file_add(reading->file, &ours);
}

static void of_memcpy(const struct reading *reading, const struct cupti_record *record)
{
    const struct cupti_memcpy *theirs = (const struct cupti_memcpy *)record;
    file_add(reading->file, &(struct sluice_profile_record){.kind = SLUICE_PROFILE_COPY,
                                                            .device = theirs->device,
                                                            .start = when(reading, theirs->start),
                                                            .end = when(reading, theirs->end),
                                                            .context = theirs->context,
                                                            .stream = theirs->stream,
                                                            .correlation = theirs->correlation,
                                                            .copy = {.bytes = theirs->bytes,
                                                                     .from = place(theirs->from),
                                                                     .to = place(theirs->to),
                                                                     .peer = UINT32_MAX}});
}

static void of_memcpy2(const struct reading *reading, const struct cupti_record *record)
{
    const struct cupti_memcpy2 *theirs = (const struct cupti_memcpy2 *)record;
    uint32_t peer = theirs->device == theirs->from_device ? theirs->to_device : theirs->from_device;
    file_add(reading->file,
             &(struct sluice_profile_record){
                 .kind = SLUICE_PROFILE_COPY,
                 .device = theirs->device,
                 .start = when(reading, theirs->start),
                 .end = when(reading, theirs->end),
                 .context = theirs->context,
                 .stream = theirs->stream,
                 .correlation = theirs->correlation,
                 .copy = {.bytes = theirs->bytes, .from = place(theirs->from), .to = place(theirs->to), .peer = peer}});
}

static void of_memset(const struct reading *reading, const struct cupti_record *record)
{
    const struct cupti_memset *theirs = (const struct cupti_memset *)record;
    file_add(reading->file,
             &(struct sluice_profile_record){
                 .kind = SLUICE_PROFILE_FILL,
                 .device = theirs->device,
                 .start = when(reading, theirs->start),
                 .end = when(reading, theirs->end),
                 .context = theirs->context,
                 .stream = theirs->stream,
                 .correlation = theirs->correlation,
                 .copy = {.bytes = theirs->bytes, .to = place(theirs->memory_kind), .peer = UINT32_MAX}});
}

static void of_memory(const struct reading *reading, const struct cupti_record *record)
{
    const struct cupti_memory *theirs = (const struct cupti_memory *)record;
    uint64_t at = when(reading, theirs->when);
    file_add(reading->file,
             &(struct sluice_profile_record){.kind = SLUICE_PROFILE_MEMORY,
                                             .device = theirs->device,
                                             .start = at,
                                             .end = at,
                                             .context = theirs->context,
                                             .stream = theirs->stream,
                                             .correlation = theirs->correlation,
                                             .memory = {.bytes = theirs->bytes,
                                                        .address = theirs->address,
                                                        .where = place(theirs->memory_kind),
                                                        .released = theirs->operation == CUPTI_MEMORY_RELEASE}});
}

static void of_synchronization(const struct reading *reading, const struct cupti_record *record)
{
    const struct cupti_synchronization *theirs = (const struct cupti_synchronization *)record;
    uint32_t what = theirs->type <= SLUICE_PROFILE_SYNC_CONTEXT ? theirs->type : SLUICE_PROFILE_SYNC_OTHER;
    file_add(reading->file, &(struct sluice_profile_record){.kind = SLUICE_PROFILE_SYNC,
                                                            .device = UINT32_MAX, /* CUPTI says the context alone */
                                                            .start = when(reading, theirs->start),
                                                            .end = when(reading, theirs->end),
                                                            .context = theirs->context,
                                                            .stream = theirs->stream,
                                                            .correlation = theirs->correlation,
                                                            .sync = {.what = what, .event = theirs->event}});
}

static void of_call(const struct reading *reading, const struct cupti_record *record)
{
    const struct cupti_api *theirs = (const struct cupti_api *)record;
    const char *name = NULL;
    reading->cupti->cuptiGetCallbackName(CUPTI_DRIVER_API, theirs->function, &name);
    uint32_t number = name != NULL ? file_name(reading->file, name) : 0;
    file_add(reading->file,
             &(struct sluice_profile_record){.kind = SLUICE_PROFILE_CALL,
                                             .device = UINT32_MAX,
                                             .start = when(reading, theirs->start),
                                             .end = when(reading, theirs->end),
                                             .correlation = theirs->correlation,
                                             .name = number,
                                             .call = {.thread = theirs->thread, .result = (int32_t)theirs->result}});
}

static void write_record(const struct reading *reading, const struct cupti_record *record)
{
    static const struct {
        uint32_t kind;
        void (*write)(const struct reading *reading, const struct cupti_record *record);
    } kinds[] = {
        {CUPTI_KERNEL, of_kernel},   {CUPTI_MEMCPY, of_memcpy}, {CUPTI_SYNCHRONIZATION, of_synchronization},
        {CUPTI_MEMCPY2, of_memcpy2}, {CUPTI_MEMSET, of_memset}, {CUPTI_MEMORY2, of_memory},
        {CUPTI_DRIVER, of_call},
    };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (kinds[i].kind == record->kind) {
            kinds[i].write(reading, record);
            return;
        }
    }
}

uint64_t cupti_write(const struct cupti *cupti, struct profile_file *file, uint8_t *data, size_t valid, int64_t clock)
{
    struct reading reading = {.cupti = cupti, .file = file, .clock = clock};
    struct cupti_record *record = NULL;
    uint64_t count = 0;
    while (cupti->cuptiActivityGetNextRecord(data, valid, &record) == CUPTI_OK) {
        write_record(&reading, record);
        count++;
    }
    return count;
}
