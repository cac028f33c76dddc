/* Simulated rocprofiler-sdk: tools, contexts, and what the simulated HIP does as records with the layout of AMD's headers
 * (native/profile/rocprofiler_abi.h). SLUICE_SIM_ROCPROFILER_NS makes each record cost the program that much,
 * SLUICE_SIM_ROCPROFILER_VERSION makes it another version. */
#include "rocp_sim.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "sim.h"
#include "trace.h"

enum { CONTEXTS = 16, SERVICES = 32, TOOLS = 4, MOST_OPERATIONS = 16, AGENTS = 64, EPOCH = 1000000007 };

/* HIP's calls that it reports; the first is the launch. */
static const char *const operations[] = {"hipModuleLaunchKernel", "hipDeviceSynchronize", "hipStreamSynchronize",
                                         "hipEventSynchronize", "hipMalloc"};
enum { OPERATIONS = sizeof operations / sizeof *operations, LAUNCH = 0 };

static struct service {
    uint64_t context, buffer; /* buffer 0: it calls back */
    uint32_t kind;
    bool operations[MOST_OPERATIONS];
    rocp_on_call *tell;
    void *data;
} services[SERVICES];

static struct rocp_tool *tools[TOOLS];
static size_t service_count, tool_count, context_count;
static _Atomic uint32_t active; /* bits: contexts */
static _Atomic uint64_t correlations, dispatches;
static _Thread_local uint64_t correlation, launched;
static bool configuring;
static unsigned long cost;

bool rocp_configuring(void)
{
    return configuring;
}

static uint64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint64_t thread_id(void)
{
    static _Thread_local uint64_t mine;
    mine = mine != 0 ? mine : (uint64_t)gettid();
    return mine;
}

static bool is_active(const struct service *service)
{
    return (atomic_load_explicit(&active, memory_order_relaxed) >> service->context & 1) != 0;
}

/* ---- what the driver did ---- */

static void keep(const void *record, size_t operation, uint64_t end)
{
    const struct rocp_record *what = record;
    uint64_t until = cost > 0 ? clock_ns() + cost : 0;
    bool kept = false;
    for (size_t i = 0; i < service_count; i++) {
        const struct service *service = &services[i];
        if (service->buffer != 0 && service->kind == what->kind && is_active(service) &&
            service->operations[operation]) {
            rocp_put(service->buffer, what, end);
            kept = true;
        }
    }
    while (kept && clock_ns() < until) {
    }
}

static void ran(const struct sim_activity *what)
{
    struct rocp_kernel record = {.is = {.size = sizeof record, .kind = ROCP_KERNEL, .operation = 2},
                                 .correlation = correlation,
                                 .thread = thread_id(),
                                 .start = what->start + EPOCH,
                                 .end = what->end + EPOCH,
                                 .dispatch_size = 72,
                                 .agent = what->device + 1,
                                 .queue = what->stream + 1,
                                 .kernel = what->kernel,
                                 .dispatch = atomic_fetch_add(&dispatches, 1) + 1};
    for (int i = 0; i < 3; i++) {
        record.workgroup[i] = what->block[i];
        record.grid[i] = what->grid[i] * what->block[i];
    }
    keep(&record, 0, what->end);
}

static void copied(const struct sim_activity *what)
{
    enum { PINNED = 2, HOST_AGENT = 1000 };
    bool from_device = what->from > PINNED, to_device = what->to > PINNED;
    struct rocp_copy record = {.is = {.size = sizeof record,
                                      .kind = ROCP_COPY,
                                      .operation = from_device
                                                       ? (to_device ? ROCP_DEVICE_TO_DEVICE : ROCP_DEVICE_TO_HOST)
                                                   : to_device ? ROCP_HOST_TO_DEVICE
                                                               : ROCP_HOST_TO_HOST},
                               .correlation = atomic_fetch_add(&correlations, 1) + 1,
                               .thread = thread_id(),
                               .start = what->start + EPOCH,
                               .end = what->end + EPOCH,
                               .from_agent = from_device ? what->device + 1 : HOST_AGENT,
                               .to_agent = to_device ? what->device + 1 : HOST_AGENT,
                               .bytes = what->bytes};
    keep(&record, 0, what->end);
}

static void held(const struct sim_activity *what)
{
    struct rocp_memory record = {.is = {.size = sizeof record,
                                        .kind = ROCP_MEMORY,
                                        .operation = what->kind == SIM_FREED ? ROCP_FREE : ROCP_ALLOCATE},
                                 .correlation = atomic_fetch_add(&correlations, 1) + 1,
                                 .thread = thread_id(),
                                 .start = what->start + EPOCH,
                                 .end = what->end + EPOCH,
                                 .agent = what->device + 1,
                                 .address = what->address,
                                 .bytes = what->bytes};
    keep(&record, 0, what->end);
}

static void called(size_t operation, uint64_t number, uint64_t start, uint64_t end)
{
    struct rocp_call record = {
        .is = {.size = sizeof record, .kind = ROCP_HIP_CALL, .operation = (int32_t)operation + 1},
        .correlation = number,
        .start = start + EPOCH,
        .end = end + EPOCH,
        .thread = thread_id()};
    keep(&record, operation, end);
}

static void waited(const struct sim_activity *what)
{
    static const size_t calls[] = {[1] = 3, [3] = 2, [4] = 1}; /* by CUpti_ActivitySynchronizationType */
    called(calls[what->waited], atomic_fetch_add(&correlations, 1) + 1, what->start, what->end);
}

static void happened(const struct sim_activity *what)
{
    static void (*const notes[])(const struct sim_activity *what) = {
        [SIM_RAN] = ran, [SIM_COPIED] = copied, [SIM_WAITED] = waited, [SIM_ALLOCATED] = held, [SIM_FREED] = held,
    };
    if ((size_t)what->kind < sizeof notes / sizeof *notes &&
        notes[what->kind] != NULL) { /* a fill is a kernel of HIP's own */
        notes[what->kind](what);
    }
}

/* Whether somebody wants to know of a kind: reading the clock for nobody has its price. */
static bool is_wanted(uint32_t kind, size_t operation, bool calls_back)
{
    for (size_t i = 0; i < service_count; i++) {
        if (services[i].kind == kind && (services[i].tell != NULL) == calls_back && is_active(&services[i]) &&
            services[i].operations[operation]) {
            return true;
        }
    }
    return false;
}

static void call_back(uint32_t kind, size_t operation, struct rocp_callback *record)
{
    for (size_t i = 0; i < service_count; i++) {
        const struct service *service = &services[i];
        uint64_t kept = 0;
        if (service->tell != NULL && service->kind == kind && is_active(service) && service->operations[operation]) {
            record->context = service->context;
            service->tell(*record, &kept, service->data);
        }
    }
}

static void launches(bool ended, const char *kernel)
{
    (void)kernel;
    if (!ended) {
        correlation = atomic_fetch_add_explicit(&correlations, 1, memory_order_relaxed) + 1;
        launched = is_wanted(ROCP_HIP_CALL, LAUNCH, false) ? clock_ns() : 0;
    } else if (launched > 0) {
        called(LAUNCH, correlation, launched, clock_ns());
    }
    if (!is_wanted(ROCP_CALL_BACK_HIP, LAUNCH, true)) {
        return;
    }
    struct rocp_callback record = {.thread = thread_id(),
                                   .correlation = correlation,
                                   .kind = ROCP_CALL_BACK_HIP,
                                   .operation = LAUNCH + 1,
                                   .phase = ended ? ROCP_EXIT : ROCP_ENTER};
    call_back(ROCP_CALL_BACK_HIP, LAUNCH, &record);
}

static void known(uint64_t number, const char *name)
{
    char symbol[256];
    snprintf(symbol, sizeof symbol, "%.250s.kd", name);
    struct rocp_symbol what = {.size = sizeof what, .kernel = number, .code = 1, .name = symbol};
    struct rocp_callback record = {
        .kind = ROCP_CALL_BACK_CODE, .operation = ROCP_KERNEL_SYMBOL, .phase = ROCP_ENTER, .what = &what};
    call_back(ROCP_CALL_BACK_CODE, 0, &record);
}

/* ---- the driver ---- */

static void *hip_function(const char *name)
{
    static const char *const libraries[] = {"libamdhip64.so.6", "libamdhip64.so"};
    void *hip = NULL, *function = NULL;
    for (size_t i = 0; i < sizeof libraries / sizeof *libraries && hip == NULL; i++) {
        hip = dlopen(libraries[i], RTLD_LAZY | RTLD_NOLOAD);
    }
    if (hip != NULL) {
        function = dlsym(hip, name);
        dlclose(hip);
    }
    return function;
}

static bool needs_work(const struct service *service)
{
    return is_active(service) && service->kind != ROCP_CALL_BACK_CODE;
}

/* The driver reports its work only while somebody wants it. */
static void listen(void)
{
    static const struct sim_tracer tracer = {.happened = happened, .launches = launches};
    void (*trace)(const struct sim_tracer *) = NULL;
    bool any = false;
    *(void **)&trace = hip_function("sluice_sim_trace");
    for (size_t i = 0; i < service_count; i++) {
        any = any || needs_work(&services[i]) || (services[i].buffer != 0 && is_active(&services[i]));
    }
    if (trace != NULL) {
        trace(any ? &tracer : NULL);
    }
}

/* ---- tools ---- */

static void finalize_tools(void)
{
    for (size_t i = 0; i < tool_count; i++) {
        if (tools[i]->finalize != NULL) {
            tools[i]->finalize(tools[i]->data);
        }
    }
}

static void no_finalize(struct rocp_client client)
{
    (void)client;
}

static void load_tool(const char *path)
{
    static struct rocp_client clients[TOOLS];
    const char *version = getenv("SLUICE_SIM_ROCPROFILER_VERSION");
    void *library = dlopen(path, RTLD_GLOBAL | RTLD_LAZY);
    rocp_configure *configure = NULL;
    if (library != NULL) {
        *(void **)&configure = dlsym(library, "rocprofiler_configure");
    }
    if (configure == NULL || tool_count == TOOLS) {
        return;
    }
    struct rocp_client *client = &clients[tool_count];
    client->size = sizeof *client;
    struct rocp_tool *tool = configure(version != NULL ? (uint32_t)strtoul(version, NULL, 10) : ROCP_FIRST_VERSION,
                                       "simulated", (uint32_t)tool_count, client);
    if (tool != NULL) {
        tools[tool_count++] = tool;
        configuring = true;
        tool->initialize(no_finalize, tool->data);
        configuring = false;
    }
}

static void load_tools(void)
{
    const char *paths = getenv("ROCP_TOOL_LIBRARIES"), *price = getenv("SLUICE_SIM_ROCPROFILER_NS");
    char *copy = paths != NULL ? strdup(paths) : NULL, *rest = copy;
    cost = price != NULL ? strtoul(price, NULL, 10) : 0;
    atexit(finalize_tools);
    for (char *path; rest != NULL && (path = strsep(&rest, ":")) != NULL;) {
        if (*path != 0) {
            load_tool(path);
        }
    }
    free(copy);
}

/* rocprofiler-register calls this for each runtime that a program loads. */
SIM_API int rocprofiler_set_api_table(const char *name, uint64_t version, uint64_t instance, void **tables,
                                      uint64_t count)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)name;
    (void)version;
    (void)instance;
    (void)tables;
    (void)count;
    pthread_once(&once, load_tools);
    return 0;
}

/* ---- rocprofiler-sdk's functions ---- */

#define ROCP(NAME, ...) SIM_API uint32_t rocprofiler_##NAME(__VA_ARGS__)

ROCP(create_context, uint64_t *context)
{
    if (!configuring) {
        return ROCP_LOCKED;
    }
    if (context == NULL || context_count == CONTEXTS) {
        return ROCP_INVALID;
    }
    *context = context_count++;
    return ROCP_OK;
}

/* The names of the kernels that are there already. */
static void tell_of_kernels(void)
{
    void (*kernels)(void (*)(uint64_t, const char *)) = NULL;
    *(void **)&kernels = hip_function("sluice_sim_kernels");
    if (kernels != NULL) {
        kernels(known);
    }
}

ROCP(start_context, uint64_t context)
{
    if (context >= context_count) {
        return ROCP_NO_CONTEXT;
    }
    atomic_fetch_or(&active, 1u << context);
    listen();
    for (size_t i = 0; i < service_count; i++) {
        if (services[i].context == context && services[i].tell != NULL && services[i].kind == ROCP_CALL_BACK_CODE) {
            tell_of_kernels();
        }
    }
    return ROCP_OK;
}

ROCP(stop_context, uint64_t context)
{
    if (context >= context_count) {
        return ROCP_NO_CONTEXT;
    }
    atomic_fetch_and(&active, ~(1u << context));
    listen();
    return ROCP_OK;
}

static uint32_t add_service(struct service added, const int32_t *numbers, size_t count)
{
    if (!configuring) {
        return ROCP_LOCKED;
    }
    if (added.context >= context_count || service_count == SERVICES) {
        return ROCP_NO_CONTEXT;
    }
    for (size_t i = 0; i < service_count; i++) {
        if (services[i].context == added.context && services[i].kind == added.kind &&
            (services[i].tell != NULL) == (added.tell != NULL)) {
            return ROCP_TWICE;
        }
    }
    for (size_t i = 0; i < MOST_OPERATIONS; i++) {
        added.operations[i] = count == 0;
    }
    for (size_t i = 0; i < count; i++) {
        if (numbers[i] < 1 || numbers[i] > OPERATIONS) {
            return ROCP_INVALID;
        }
        added.operations[numbers[i] - 1] = true;
    }
    services[service_count++] = added;
    return ROCP_OK;
}

ROCP(configure_buffer_tracing_service, uint64_t context, uint32_t kind, const int32_t *numbers, size_t count,
     uint64_t buffer)
{
    bool has = kind == ROCP_KERNEL || kind == ROCP_COPY || kind == ROCP_MEMORY || kind == ROCP_HIP_CALL;
    return has && buffer > 0
               ? add_service((struct service){.context = context, .buffer = buffer, .kind = kind}, numbers, count)
               : ROCP_INVALID;
}

ROCP(configure_callback_tracing_service, uint64_t context, uint32_t kind, const int32_t *numbers, size_t count,
     rocp_on_call *tell, void *data)
{
    bool has = (kind == ROCP_CALL_BACK_HIP || kind == ROCP_CALL_BACK_CODE) && tell != NULL;
    return has ? add_service((struct service){.context = context, .kind = kind, .tell = tell, .data = data}, numbers,
                             count)
               : ROCP_INVALID;
}

ROCP(iterate_buffer_tracing_kind_operations, uint32_t kind, rocp_on_operation *tell, void *data)
{
    for (int32_t i = 0; kind == ROCP_HIP_CALL && i < OPERATIONS; i++) {
        tell(kind, i + 1, data);
    }
    return ROCP_OK;
}

ROCP(query_buffer_tracing_kind_operation_name, uint32_t kind, int32_t operation, const char **name, uint64_t *length)
{
    bool has = kind == ROCP_HIP_CALL && operation > 0 && operation <= OPERATIONS;
    if (!has || name == NULL) {
        return ROCP_INVALID;
    }
    *name = operations[operation - 1];
    if (length != NULL) {
        *length = strlen(*name);
    }
    return ROCP_OK;
}

/* One for each device of HIP, which a tool finds by its place on the PCI bus. */
ROCP(query_available_agents, uint32_t version, rocp_on_agents *tell, size_t size, void *data)
{
    static struct rocp_agent agents[AGENTS + 1];
    const void *found[AGENTS + 1] = {&agents[0]};
    int devices = 0, (*ask)(int *) = NULL, (*place)(char *, int, int) = NULL;
    *(void **)&ask = hip_function("hipGetDeviceCount");
    *(void **)&place = hip_function("hipDeviceGetPCIBusId");
    if (tell == NULL || version != ROCP_AGENT_VERSION || size == 0) {
        return ROCP_INVALID;
    }
    agents[0] = (struct rocp_agent){.size = sizeof *agents, .id = 1000, .type = 1}; /* the processor */
    if (ask == NULL || place == NULL || ask(&devices) != 0) {
        devices = 0;
    }
    for (int i = 0; i < devices && i < AGENTS; i++) {
        unsigned domain = 0, bus = 0, slot = 0, function = 0;
        char text[64] = "";
        place(text, sizeof text, i);
        sscanf(text, "%x:%x:%x.%x", &domain, &bus, &slot, &function);
        agents[i + 1] = (struct rocp_agent){.size = sizeof *agents,
                                            .id = (uint64_t)i + 1,
                                            .type = ROCP_AGENT_GPU,
                                            .vendor_id = 0x1002,
                                            .location = bus << 8 | slot << 3 | function,
                                            .domain = domain};
        found[i + 1] = &agents[i + 1];
    }
    return tell(version, found, (size_t)devices + 1, data);
}
