/* SPDX-License-Identifier: Apache-2.0 */
/* rocprofiler-sdk's records as ours. */
#include "rocprofiler.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- calls that mean something ---- */

static bool is_one_of(const char *name, const char *const *names)
{
    while (*names != NULL && strcmp(name, *names) != 0) {
        names++;
    }
    return *names != NULL;
}

static uint32_t waits_for(const char *call)
{
    static const struct {
        const char *name;
        uint32_t what;
    } waits[] = {
        {"hipDeviceSynchronize", SLUICE_PROFILE_SYNC_CONTEXT},
        {"hipStreamSynchronize", SLUICE_PROFILE_SYNC_STREAM},
        {"hipStreamSynchronize_spt", SLUICE_PROFILE_SYNC_STREAM},
        {"hipEventSynchronize", SLUICE_PROFILE_SYNC_EVENT},
    };
    for (size_t i = 0; i < sizeof waits / sizeof *waits; i++) {
        if (strcmp(call, waits[i].name) == 0) {
            return waits[i].what;
        }
    }
    return SLUICE_PROFILE_SYNC_OTHER;
}

bool rocp_waits(const char *call)
{
    return waits_for(call) != SLUICE_PROFILE_SYNC_OTHER;
}

bool rocp_does_not_wait(const char *call)
{
    return !rocp_waits(call);
}

bool rocp_launches(const char *call)
{
    static const char *const names[] = {
        "hipLaunchKernel",    "hipLaunchKernel_spt",      "hipModuleLaunchKernel", "hipExtLaunchKernel",
        "hipLaunchKernelExC", "hipExtModuleLaunchKernel", "hipDrvLaunchKernelEx",  NULL};
    return is_one_of(call, names);
}

bool rocp_communicates(const char *call)
{
    static const char *const names[] = {
        "ncclAllReduce", "ncclAllGather", "ncclReduceScatter", "ncclBroadcast", "ncclReduce",
        "ncclAllToAll",  "ncclAllToAllv", "ncclSend",          "ncclRecv",      NULL};
    return is_one_of(call, names);
}

/* ---- kernels ---- */

enum { KERNEL_BUCKETS = 1 << 10, MOST_KERNELS = 1 << 16 };

struct kernel {
    struct kernel *next;
    uint64_t number;
    char name[];
};

static struct {
    pthread_mutex_t lock;
    struct kernel *buckets[KERNEL_BUCKETS];
    unsigned count;
} kernels = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* A kernel's symbol is that of its descriptor: add.kd of add. */
static size_t name_length(const char *symbol)
{
    size_t length = strnlen(symbol, SLUICE_PROFILE_MAX_NAME);
    return length > 3 && memcmp(symbol + length - 3, ".kd", 3) == 0 ? length - 3 : length;
}

void rocp_learn_kernel(uint64_t number, const char *name)
{
    size_t length = name_length(name);
    struct kernel *kernel = malloc(sizeof *kernel + length + 1);
    if (kernel == NULL) {
        return;
    }
    kernel->number = number;
    memcpy(kernel->name, name, length);
    kernel->name[length] = 0;
    pthread_mutex_lock(&kernels.lock);
    bool room = kernels.count < MOST_KERNELS;
    if (room) {
        struct kernel **bucket = &kernels.buckets[number % KERNEL_BUCKETS];
        kernel->next = *bucket;
        *bucket = kernel;
        kernels.count++;
    }
    pthread_mutex_unlock(&kernels.lock);
    if (!room) {
        free(kernel);
    }
}

/* None is ever removed. */
static const char *kernel_name(uint64_t number)
{
    pthread_mutex_lock(&kernels.lock);
    const struct kernel *kernel = kernels.buckets[number % KERNEL_BUCKETS];
    while (kernel != NULL && kernel->number != number) {
        kernel = kernel->next;
    }
    pthread_mutex_unlock(&kernels.lock);
    return kernel != NULL ? kernel->name : NULL;
}

/* ---- devices: HIP's, where their place on the PCI bus says which agent of the library it is ---- */

static struct agent {
    uint64_t id;
    uint32_t location, domain, device;
} agents[TRACER_DEVICES];
static unsigned agent_count;

static uint32_t take_agents(uint32_t version, const void **found, size_t count, void *data)
{
    (void)version;
    (void)data;
    for (size_t i = 0; i < count && agent_count < TRACER_DEVICES; i++) {
        const struct rocp_agent *agent = found[i];
        if (agent->type == ROCP_AGENT_GPU) {
            agents[agent_count++] = (struct agent){
                .id = agent->id, .location = agent->location, .domain = agent->domain, .device = UINT32_MAX};
        }
    }
    return ROCP_OK;
}

void rocp_find_agents(const struct rocprofiler *library)
{
    if (agent_count == 0) {
        library->query_available_agents(ROCP_AGENT_VERSION, take_agents, sizeof(struct rocp_agent), NULL);
    }
}

static uint32_t device_of(uint64_t agent)
{
    for (unsigned i = 0; i < agent_count; i++) {
        if (agents[i].id == agent) {
            return agents[i].device;
        }
    }
    return UINT32_MAX;
}

static void name_agent(const char *place, uint32_t device)
{
    unsigned domain, bus, slot, function;
    if (sscanf(place, "%x:%x:%x.%x", &domain, &bus, &slot, &function) != 4) {
        return;
    }
    for (unsigned i = 0; i < agent_count; i++) {
        if (agents[i].domain == domain && agents[i].location == (bus << 8 | slot << 3 | function)) {
            agents[i].device = device;
        }
    }
}

static void note_device(struct profile_file *file, int device, void *hip)
{
    struct sluice_profile_record record = {.kind = SLUICE_PROFILE_DEVICE, .device = (uint32_t)device};
    int (*uuid)(unsigned char *, int), (*name)(char *, int, int), (*place)(char *, int, int), (*memory)(size_t *, int);
    char text[128] = "";
    size_t bytes = 0;
    *(void **)&uuid = dlsym(hip, "hipDeviceGetUuid");
    *(void **)&name = dlsym(hip, "hipDeviceGetName");
    *(void **)&place = dlsym(hip, "hipDeviceGetPCIBusId");
    *(void **)&memory = dlsym(hip, "hipDeviceTotalMem");
    if (uuid == NULL || name == NULL || place == NULL || memory == NULL || place(text, sizeof text - 1, device) != 0) {
        return;
    }
    name_agent(text, (uint32_t)device);
    uuid(record.device_info.uuid, device);
    record.name = name(text, sizeof text - 1, device) == 0 ? file_name(file, text) : 0;
    record.device_info.memory = memory(&bytes, device) == 0 ? bytes : 0;
    file_add(file, &record);
}

void rocp_note_devices(struct profile_file *file)
{
    static const char *const names[] = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"};
    int count = 0, (*ask)(int *) = NULL;
    void *hip = NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names && hip == NULL; i++) {
        hip = dlopen(names[i], RTLD_LAZY | RTLD_NOLOAD);
    }
    if (hip == NULL) {
        return;
    }
    *(void **)&ask = dlsym(hip, "hipGetDeviceCount");
    if (ask == NULL || ask(&count) != 0) {
        count = 0;
    }
    for (int device = 0; device < count && device < TRACER_DEVICES; device++) {
        note_device(file, device, hip);
    }
    dlclose(hip);
}

/* ---- records ---- */

struct reading {
    const struct rocprofiler *library;
    struct profile_file *file;
    int64_t clock;
};

static uint64_t when(const struct reading *reading, uint64_t theirs)
{
    return theirs != 0 ? theirs + (uint64_t)reading->clock : 0;
}

static void of_kernel(const struct reading *reading, const struct rocp_record *record)
{
    const struct rocp_kernel *theirs = (const struct rocp_kernel *)record;
    const char *name = kernel_name(theirs->kernel);
    struct sluice_profile_record ours = {.kind = SLUICE_PROFILE_KERNEL,
                                         .device = device_of(theirs->agent),
                                         .start = when(reading, theirs->start),
                                         .end = when(reading, theirs->end),
                                         .stream = (uint32_t)theirs->queue,
                                         .correlation = (uint32_t)theirs->correlation,
                                         .name = name != NULL ? file_name(reading->file, name) : 0};
    for (size_t i = 0; i < 3; i++) { /* HSA's grids are in threads */
        uint32_t block = theirs->workgroup[i] > 0 ? theirs->workgroup[i] : 1;
        ours.kernel.block[i] = block;
        ours.kernel.grid[i] = (uint32_t)(((uint64_t)theirs->grid[i] + block - 1) / block);
    }
    file_add(reading->file, &ours);
}

static void of_copy(const struct reading *reading, const struct rocp_record *record)
{
    const struct rocp_copy *theirs = (const struct rocp_copy *)record;
    bool from_device = record->operation == ROCP_DEVICE_TO_HOST || record->operation == ROCP_DEVICE_TO_DEVICE;
    bool to_device = record->operation == ROCP_HOST_TO_DEVICE || record->operation == ROCP_DEVICE_TO_DEVICE;
    uint32_t from = device_of(theirs->from_agent), to = device_of(theirs->to_agent);
    file_add(reading->file, &(struct sluice_profile_record){
                                .kind = SLUICE_PROFILE_COPY,
                                .device = to_device ? to : from,
                                .start = when(reading, theirs->start),
                                .end = when(reading, theirs->end),
                                .stream = 0, /* no queue's: copies have engines of their own */
                                .correlation = (uint32_t)theirs->correlation,
                                .copy = {.bytes = theirs->bytes,
                                         .from = from_device ? SLUICE_PROFILE_ON_DEVICE : SLUICE_PROFILE_PAGEABLE,
                                         .to = to_device ? SLUICE_PROFILE_ON_DEVICE : SLUICE_PROFILE_PAGEABLE,
                                         .peer = from_device && to_device && from != to ? from : UINT32_MAX}});
}

static void of_memory(const struct reading *reading, const struct rocp_record *record)
{
    const struct rocp_memory *theirs = (const struct rocp_memory *)record;
    uint32_t device = device_of(theirs->agent);
    bool released = record->operation == ROCP_FREE || record->operation == ROCP_RANGE_FREE;
    file_add(reading->file,
             &(struct sluice_profile_record){
                 .kind = SLUICE_PROFILE_MEMORY,
                 .device = device,
                 .start = when(reading, theirs->end),
                 .end = when(reading, theirs->end),
                 .correlation = (uint32_t)theirs->correlation,
                 .memory = {.bytes = theirs->bytes,
                            .address = theirs->address,
                            .where = device != UINT32_MAX ? SLUICE_PROFILE_ON_DEVICE : SLUICE_PROFILE_UNKNOWN,
                            .released = released}});
}

static void of_call(const struct reading *reading, const struct rocp_record *record)
{
    const struct rocp_call *theirs = (const struct rocp_call *)record;
    const char *name = NULL;
    uint64_t length = 0;
    reading->library->query_buffer_tracing_kind_operation_name(record->kind, record->operation, &name, &length);
    name = name != NULL ? name : "";
    bool collective = record->kind == ROCP_RCCL_CALL;
    uint32_t what = waits_for(name);
    struct sluice_profile_record ours = {.kind = SLUICE_PROFILE_CALL,
                                         .device = UINT32_MAX,
                                         .start = when(reading, theirs->start),
                                         .end = when(reading, theirs->end),
                                         .correlation = (uint32_t)theirs->correlation};
    if (what != SLUICE_PROFILE_SYNC_OTHER) {
        ours.kind = SLUICE_PROFILE_SYNC;
        ours.sync.what = what;
    } else {
        ours.kind = collective ? SLUICE_PROFILE_COLLECTIVE : SLUICE_PROFILE_CALL;
        ours.name = file_name(reading->file, collective && *name != 0 ? name + strlen("nccl") : name);
        ours.call.thread = (uint32_t)theirs->thread;
    }
    file_add(reading->file, &ours);
}

static void write_record(const struct reading *reading, const struct rocp_record *record)
{
    static const struct {
        uint32_t kind;
        size_t least;
        void (*write)(const struct reading *reading, const struct rocp_record *record);
    } kinds[] = {
        {ROCP_KERNEL, sizeof(struct rocp_kernel), of_kernel}, {ROCP_COPY, sizeof(struct rocp_copy), of_copy},
        {ROCP_MEMORY, sizeof(struct rocp_memory), of_memory}, {ROCP_HIP_CALL, sizeof(struct rocp_call), of_call},
        {ROCP_RCCL_CALL, sizeof(struct rocp_call), of_call},
    };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (kinds[i].kind == record->kind && record->size >= kinds[i].least) {
            kinds[i].write(reading, record);
            return;
        }
    }
}

uint64_t rocp_write(const struct rocprofiler *library, struct profile_file *file, const struct buffer *buffer,
                    int64_t clock)
{
    struct reading reading = {.library = library, .file = file, .clock = clock};
    uint64_t count = 0;
    for (size_t at = 0; at + sizeof(struct rocp_record) <= buffer->valid;) {
        const struct rocp_record *record = (const struct rocp_record *)(buffer->data + at);
        write_record(&reading, record);
        at += record->size;
        count++;
    }
    return count;
}
