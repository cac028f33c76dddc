/* The simulated CUDA driver: devices and contexts. Kernels are not run; cuda_time.c says how long they take. */
#include "cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "mps.h"

/* ---- the driver and its devices ---- */

static void inject(void)
{
    const char *path = getenv("CUDA_INJECTION64_PATH");
    void *library = path != NULL && *path != 0 ? dlopen(path, RTLD_LAZY | RTLD_LOCAL) : NULL;
    int (*start)(void) = NULL;
    if (library != NULL) {
        *(void **)&start = dlsym(library, "InitializeInjection");
    }
    if (start != NULL) {
        start();
    }
}

static uint64_t pool_step(void)
{
    const char *mib = getenv("SLUICE_SIM_POOL_STEP_MIB");
    long step = mib != NULL ? strtol(mib, NULL, 10) : 0;
    return step > 0 && step <= 1024 && step % 2 == 0 ? (uint64_t)step * SIM_MIB : POOL_STEP;
}

static void begin(void)
{
    cuda_await_checkpoints();
    inject();
}

static bool in_user_namespace(void)
{
    unsigned long count = 0;
    FILE *map = fopen("/proc/self/uid_map", "re");
    bool known = map != NULL && fscanf(map, "%*u %*u %lu", &count) == 1;
    if (map != NULL) {
        fclose(map);
    }
    return known && count != UINT32_MAX;
}

/* NVIDIA's driver opens the file of its thread's name, and does not start where /proc is of another PID namespace
 * (580.159 on an H200). In a user namespace this one does: where the machine's /proc is partly covered, none can be
 * mounted there, and what tests do in containers would end here. */
static bool finds_itself(void)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%ld/comm", syscall(SYS_gettid));
    return access(path, F_OK) == 0 || in_user_namespace();
}

CU(cuInit, unsigned int flags)
{
    static const char *const lists[] = {"CUDA_VISIBLE_DEVICES"};
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (!finds_itself()) {
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    CUresult result =
        flags != 0 ? CUDA_ERROR_INVALID_VALUE : result_of(rt_open(SIM_VENDOR_NVIDIA, GRANULE, pool_step(), lists, 1));
    if (result == CUDA_SUCCESS) {
        pthread_once(&once, begin);
    }
    return result;
}

CU(cuDriverGetVersion, int *version)
{
    struct sim_state head;
    if (version == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    bool opened = sim_open(SIM_VENDOR_NVIDIA) == SIM_OK; /* it may be asked before cuInit */
    *version = opened && sim_enter(0, &head) == SIM_OK ? (int)head.drivers[SIM_VENDOR_NVIDIA].runtime : 12040;
    if (opened) {
        sim_close();
    }
    return CUDA_SUCCESS;
}

CU(cuDeviceGetCount, int *count)
{
    CUresult result = count != NULL ? result_of(rt_ready()) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *count = rt_count();
    }
    return result;
}

CU(cuDeviceGet, CUdevice *device, int ordinal)
{
    CUresult result = device != NULL ? result_of(rt_ready()) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && (ordinal < 0 || ordinal >= rt_count())) {
        result = CUDA_ERROR_INVALID_DEVICE;
    }
    if (result == CUDA_SUCCESS) {
        *device = ordinal;
    }
    return result;
}

CU(cuDeviceGetName, char *name, int size, CUdevice device)
{
    struct sim_gpu gpu;
    uint8_t instance;
    CUresult result =
        name != NULL && size > 0 ? result_of(rt_gpu(device, &gpu, NULL, &instance)) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        char text[192];
        bool whole = instance == SIM_NO_INSTANCE;
        snprintf(text, sizeof text, "%s%s%s", gpu.name, whole ? "" : " MIG ",
                 whole ? "" : gpu.profiles[gpu.instances[instance].profile].name);
        sim_text(name, (size_t)size, text);
    }
    return result;
}

CU(cuDeviceGetUuid_v2, unsigned char *uuid, CUdevice device)
{
    struct sim_gpu gpu;
    uint8_t instance;
    CUresult result = uuid != NULL ? result_of(rt_gpu(device, &gpu, NULL, &instance)) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) { /* after "GPU-" or "MIG-" */
        rt_read_uuid(instance == SIM_NO_INSTANCE ? gpu.uuid : gpu.instances[instance].uuid, uuid);
    }
    return result;
}

ALIAS(cuDeviceGetUuid, cuDeviceGetUuid_v2, (uuid, device), unsigned char *uuid, CUdevice device)

CU(cuDeviceTotalMem_v2, size_t *bytes, CUdevice device)
{
    uint64_t free_bytes, total;
    CUresult result = bytes != NULL ? result_of(rt_memory(device, &free_bytes, &total)) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *bytes = total;
    }
    return result;
}

CU(cuDeviceComputeCapability, int *major, int *minor, CUdevice device)
{
    struct sim_gpu gpu;
    CUresult result =
        major != NULL && minor != NULL ? result_of(rt_gpu(device, &gpu, NULL, NULL)) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *major = (int)gpu.capability_major;
        *minor = (int)gpu.capability_minor;
    }
    return result;
}

CU(cuDeviceGetAttribute, int *value, int attribute, CUdevice device)
{
    struct sim_gpu gpu;
    uint8_t instance;
    CUresult result = value != NULL ? result_of(rt_gpu(device, &gpu, NULL, &instance)) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS) {
        return result;
    }
    uint32_t sms = (sim_multiprocessors(&gpu, instance) * mps_percentage() + 99) / 100;
    const struct {
        int attribute;
        uint32_t value;
    } known[] = {
        {1, 1024},                           /* threads a block */
        {2, 1024},                           /* its sides */
        {3, 1024},                           /* its sides */
        {4, 64},                             /* its sides */
        {5, INT32_MAX},                      /* sides of a grid */
        {6, UINT16_MAX},                     /* sides of a grid */
        {7, UINT16_MAX},                     /* sides of a grid */
        {8, 48 << 10},                       /* shared memory a block */
        {9, 64 << 10},                       /* constant memory */
        {10, 32},                            /* warp */
        {11, INT32_MAX},                     /* pitch */
        {12, 64 << 10},                      /* registers a block */
        {13, gpu.clock_graphics_max * 1000}, /* kHz */
        {14, 512},                           /* texture alignment */
        {15, 1},                             /* copies next to kernels */
        {16, sms},                           /* multiprocessors */
        {19, 1},                             /* maps host memory */
        {20, gpu.compute_mode},              /* compute mode */
        {21, 1 << 17},                       /* sides of a texture */
        {22, 1 << 17},                       /* sides of a texture */
        {23, 1 << 16},                       /* sides of a texture */
        {31, 1},                             /* concurrent kernels */
        {32, gpu.ecc_enabled},               /* ECC */
        {33, gpu.pci.bus},                   /* PCI bus */
        {34, gpu.pci.device},                /* PCI device */
        {36, gpu.clock_memory_max * 1000},   /* kHz */
        {37, gpu.bus_width},                 /* bits */
        {39, 2048},                          /* threads a multiprocessor */
        {40, 3},                             /* copy engines */
        {41, 1},                             /* unified addressing */
        {50, gpu.pci.domain},                /* PCI domain */
        {51, 32},                            /* texture pitch alignment */
        {75, gpu.capability_major},          /* compute capability */
        {76, gpu.capability_minor},          /* compute capability */
        {78, 1},                             /* priorities of streams */
        {81, 100 << 10},                     /* shared memory a multiprocessor */
        {82, 64 << 10},                      /* registers a multiprocessor */
        {83, 1},                             /* managed memory */
        {89, 1},                             /* concurrent managed access */
        {90, 1},                             /* preemption */
        {95, 1},                             /* cooperative launch */
        {97, 99 << 10},                      /* shared memory that a block may opt in to */
        {99, 1},                             /* registers host memory */
        {102, 1},                            /* virtual memory management */
        {103, 1},                            /* handles that are file descriptors */
        {106, 32},                           /* blocks a multiprocessor */
        {115, 1},                            /* memory pools */
        {119, 1},                            /* pools' handles: file descriptors */
    };
    *value = 0;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (known[i].attribute == attribute) {
            *value = (int)known[i].value;
        }
    }
    return attribute > 0 && attribute < 200 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CU(cuDeviceGetPCIBusId, char *text, int size, CUdevice device)
{
    struct sim_gpu gpu;
    CUresult result = text != NULL && size > 0 ? result_of(rt_gpu(device, &gpu, NULL, NULL)) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        snprintf(text, (size_t)size, "%04X:%02X:%02X.%X", gpu.pci.domain, gpu.pci.bus, gpu.pci.device,
                 gpu.pci.function);
    }
    return result;
}

CU(cuDeviceGetByPCIBusId, CUdevice *device, const char *text)
{
    unsigned domain, bus, slot;
    CUresult result = device != NULL && text != NULL ? result_of(rt_ready()) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS || sscanf(text, "%x:%x:%x", &domain, &bus, &slot) != 3) {
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_INVALID_VALUE;
    }
    for (int i = 0; i < rt_count(); i++) {
        struct sim_gpu gpu;
        if (rt_gpu(i, &gpu, NULL, NULL) == RT_OK && gpu.pci.domain == domain && gpu.pci.bus == bus &&
            gpu.pci.device == slot) {
            *device = i;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_DEVICE;
}

CU(cuDeviceCanAccessPeer, int *can, CUdevice device, CUdevice peer)
{
    struct sim_gpu one, other;
    unsigned index;
    CUresult result = can != NULL ? result_of(rt_gpu(device, &one, NULL, NULL)) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        result = result_of(rt_gpu(peer, &other, &index, NULL));
    }
    if (result == CUDA_SUCCESS) {
        *can = device != peer && (one.link_count > 0 || one.p2p[index]) && !one.mig_enabled && !other.mig_enabled;
    }
    return result;
}

CU(cuDeviceGetP2PAttribute, int *value, int attribute, CUdevice device, CUdevice peer)
{
    enum { ACCESS = 2, NATIVE_ATOMICS = 3, ARRAYS = 4 };
    int can = 0;
    CUresult result =
        value != NULL && device != peer ? cuDeviceCanAccessPeer(&can, device, peer) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *value = attribute >= ACCESS && attribute <= ARRAYS && can;
    }
    return result;
}

CU(cuDeviceGetTexture1DLinearMaxWidth, size_t *width, int format, unsigned int channels, CUdevice device)
{
    (void)format;
    (void)channels;
    if (width == NULL || device < 0 || device >= rt_count()) {
        return width == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_DEVICE;
    }
    *width = (size_t)1 << 28;
    return CUDA_SUCCESS;
}

/* ---- contexts: a stack for each thread ---- */

enum { STACK = 32 };
static _Thread_local CUcontext stack[STACK];
static _Thread_local int depth;

static CUcontext current(void)
{
    return depth > 0 && rt_ready() == RT_OK && rt_context_valid(stack[depth - 1]) ? stack[depth - 1] : NULL;
}

CUresult cuda_context(CUcontext *context)
{
    CUresult result = result_of(rt_ready());
    *context = result == CUDA_SUCCESS ? current() : NULL;
    return result == CUDA_SUCCESS && *context == NULL ? CUDA_ERROR_INVALID_CONTEXT : result;
}

/* A primary context may be made current before it is active. */
static bool is_primary(CUcontext context)
{
    for (int i = 0; i < rt_count(); i++) {
        if (rt_primary_handle(i) == context) {
            return true;
        }
    }
    return false;
}

CU(cuCtxPushCurrent_v2, CUcontext context)
{
    if (rt_ready() != RT_OK) {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    if ((!rt_context_valid(context) && !is_primary(context)) || depth == STACK) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

CU(cuCtxPopCurrent_v2, CUcontext *context)
{
    if (depth == 0) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    depth--;
    if (context != NULL) {
        *context = stack[depth];
    }
    return CUDA_SUCCESS;
}

CU(cuCtxSetCurrent, CUcontext context)
{
    if (rt_ready() != RT_OK) {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    if (context != NULL && !rt_context_valid(context) && !is_primary(context)) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    depth -= depth > 0;
    return context != NULL ? cuCtxPushCurrent_v2(context) : CUDA_SUCCESS;
}

CU(cuCtxGetCurrent, CUcontext *context)
{
    if (context == NULL || rt_ready() != RT_OK) {
        return context == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_NOT_INITIALIZED;
    }
    bool there = depth > 0 && (rt_context_valid(stack[depth - 1]) || is_primary(stack[depth - 1]));
    *context = there ? stack[depth - 1] : NULL;
    return CUDA_SUCCESS;
}

CU(cuCtxGetDevice, CUdevice *device)
{
    CUcontext context;
    CUresult result = device != NULL ? cuda_context(&context) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *device = context->device;
    }
    return result;
}

CUresult cuda_create_context(CUcontext *context, unsigned int flags, CUdevice device)
{
    (void)flags;
    CUresult result = context != NULL ? result_of(rt_context_new(device, context)) : CUDA_ERROR_INVALID_VALUE;
    return result == CUDA_SUCCESS ? cuCtxPushCurrent_v2(*context) : result;
}

ALIAS(cuCtxCreate_v2, cuda_create_context, (context, flags, device), CUcontext *context, unsigned int flags,
      CUdevice device)

CU(cuCtxCreate_v3, CUcontext *context, void *affinity, int count, unsigned int flags, CUdevice device)
{
    (void)affinity;
    (void)count;
    return cuda_create_context(context, flags, device);
}

CU(cuCtxCreate_v4, CUcontext *context, void *parameters, unsigned int flags, CUdevice device)
{
    (void)parameters;
    return cuda_create_context(context, flags, device);
}

CU(cuCtxDestroy_v2, CUcontext context)
{
    if (depth > 0 && stack[depth - 1] == context) {
        depth--;
    }
    if (rt_context_valid(context)) {
        cuda_context_ends(context);
    }
    CUresult result = result_of(rt_context_free(context));
    return result == CUDA_ERROR_INVALID_VALUE ? CUDA_ERROR_INVALID_CONTEXT : result;
}

CU(cuDevicePrimaryCtxRetain, CUcontext *context, CUdevice device)
{
    return context != NULL ? result_of(rt_primary(device, context)) : CUDA_ERROR_INVALID_VALUE;
}

static CUresult end_primary(CUdevice device, bool at_once)
{
    CUresult result = result_of(rt_primary_release(device, at_once));
    if (result == CUDA_SUCCESS && !rt_primary_active(device)) {
        cuda_context_ends(rt_primary_handle(device));
        cuda_graph_drop(device);
    }
    return result;
}

CU(cuDevicePrimaryCtxRelease_v2, CUdevice device)
{
    CUresult result = end_primary(device, false);
    return result == CUDA_ERROR_INVALID_VALUE ? CUDA_ERROR_INVALID_CONTEXT : result;
}

CU(cuDevicePrimaryCtxReset_v2, CUdevice device)
{
    return end_primary(device, true);
}

/* Libraries look for these names of before. */
ALIAS(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (device), CUdevice device)
ALIAS(cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2, (device), CUdevice device)
ALIAS(cuCtxPushCurrent, cuCtxPushCurrent_v2, (context), CUcontext context)
ALIAS(cuCtxPopCurrent, cuCtxPopCurrent_v2, (context), CUcontext *context)

/* ---- green contexts: a part of a device's primary context, which they keep ---- */

typedef struct {
    CUdevice device;
} *CUgreenCtx;

CU(cuGreenCtxCreate, CUgreenCtx *green, const void *resources, CUdevice device, unsigned int flags)
{
    CUcontext context;
    CUgreenCtx made = green != NULL && resources != NULL && flags <= 1 ? malloc(sizeof *made) : NULL;
    CUresult result = made != NULL ? result_of(rt_primary(device, &context)) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS) {
        free(made);
        return result;
    }
    made->device = device;
    *green = made;
    return CUDA_SUCCESS;
}

CU(cuGreenCtxDestroy, CUgreenCtx green)
{
    CUresult result = green != NULL ? end_primary(green->device, false) : CUDA_ERROR_INVALID_CONTEXT;
    free(green);
    return result;
}

CU(cuCtxFromGreenCtx, CUcontext *context, CUgreenCtx green)
{
    if (context == NULL || green == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *context = rt_primary_handle(green->device);
    return CUDA_SUCCESS;
}

CU(cuDevicePrimaryCtxGetState, CUdevice device, unsigned int *flags, int *active)
{
    if (flags == NULL || active == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *flags = 0;
    *active = rt_primary_active(device);
    return result_of(rt_ready());
}

CU(cuDevicePrimaryCtxSetFlags_v2, CUdevice device, unsigned int flags)
{
    (void)flags;
    return device >= 0 && device < rt_count() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CU(cuCtxGetFlags, unsigned int *flags)
{
    CUcontext context;
    CUresult result = flags != NULL ? cuda_context(&context) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *flags = 0;
    }
    return result;
}

CU(cuCtxGetApiVersion, CUcontext context, unsigned int *version)
{
    (void)context;
    if (version == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *version = 3020;
    return CUDA_SUCCESS;
}

enum { LIMIT_PRINT = 1, LIMIT_HEAP = 2 }; /* the buffer of printf and the heap of malloc in kernels */

static size_t first_size(int limit)
{
    return limit == LIMIT_HEAP ? 8 * SIM_MIB : SIM_MIB;
}

CU(cuCtxGetLimit, size_t *value, int limit)
{
    CUcontext context;
    CUresult result = value != NULL && limit < 7 ? cuda_context(&context) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *value = limit == LIMIT_PRINT || limit == LIMIT_HEAP ? first_size(limit) + context->extra[limit - 1] : 1024;
    }
    return result;
}

CU(cuCtxSetLimit, int limit, size_t value)
{
    CUcontext context;
    CUresult result = limit < 7 ? cuda_context(&context) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS &&
        (limit == LIMIT_PRINT || limit == LIMIT_HEAP)) { /* beyond its first size: device memory */
        size_t first = first_size(limit), beyond = value > first ? value - first : 0;
        uint64_t wanted = (beyond + GRANULE - 1) / GRANULE * GRANULE, before = context->extra[limit - 1];
        result = result_of(rt_context_grow(context, (unsigned)limit - 1, (int64_t)(wanted - before)));
    }
    return result;
}

CU(cuCtxEnablePeerAccess, CUcontext peer, unsigned int flags)
{
    (void)flags;
    return rt_context_valid(peer) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

ALIAS(cuCtxDisablePeerAccess, cuCtxEnablePeerAccess, (peer, 0), CUcontext peer)

/* ---- hints, which change nothing ---- */

static int cache_preference;

CU(cuCtxGetCacheConfig, int *preference)
{
    CUcontext context;
    CUresult result = preference != NULL ? cuda_context(&context) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *preference = cache_preference;
    }
    return result;
}

CU(cuCtxSetCacheConfig, int preference)
{
    CUcontext context;
    CUresult result = preference >= 0 && preference <= 3 ? cuda_context(&context) : CUDA_ERROR_INVALID_VALUE;
    cache_preference = result == CUDA_SUCCESS ? preference : cache_preference;
    return result;
}

CU(cuCtxSynchronize, void);
ALIAS(cuCtxResetPersistingL2Cache, cuCtxSynchronize, (), void)
ALIAS(cuProfilerStart, cuCtxSynchronize, (), void)
ALIAS(cuProfilerStop, cuCtxSynchronize, (), void)
