/* The simulated HIP runtime: devices and errors. */
#include "hip.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Thread_local int hip_chosen;
_Thread_local hipError_t hip_last;

hipError_t hip_result(enum rt_status status)
{
    static const hipError_t results[] = {
        [RT_OK] = hipSuccess,
        [RT_INVALID] = hipErrorInvalidValue,
        [RT_NO_MEMORY] = hipErrorOutOfMemory,
        [RT_CLOSED] = hipErrorNotInitialized,
        [RT_NO_DEVICE] = hipErrorNoDevice,
        [RT_BAD_DEVICE] = hipErrorInvalidDevice,
        [RT_UNAVAILABLE] = hipErrorUnknown,
        [RT_BUSY] = hipErrorIllegalState,
    };
    return results[status];
}

hipError_t hip_told(hipError_t error)
{
    hip_last = error != hipSuccess ? error : hip_last;
    return error;
}

/* ---- the driver and its devices ---- */

/* What rocprofiler-register does for the runtime: with tools there must be a rocprofiler-sdk, which loads them. */
static void load_tools(void)
{
    const char *tools = getenv("ROCP_TOOL_LIBRARIES");
    int (*tell)(const char *, uint64_t, uint64_t, void **, uint64_t) = NULL;
    if (tools == NULL || *tools == 0) {
        return;
    }
    void *library = dlopen("librocprofiler-sdk.so.1", RTLD_GLOBAL | RTLD_LAZY);
    if (library != NULL) {
        *(void **)&tell = dlsym(library, "rocprofiler_set_api_table");
    }
    if (tell == NULL) {
        fprintf(stderr, "rocprofiler_set_api_table not found. Tried to dlopen librocprofiler-sdk.so\n");
        abort();
    }
    tell("hip", 60000, 0, NULL, 0);
}

hipError_t hip_start(void)
{
    static const char *const lists[] = {"ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"};
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    hipError_t error = hip_result(rt_open(SIM_VENDOR_AMD, HIP_GRANULE, HIP_GRANULE, lists, 2));
    static _Thread_local bool loading; /* tools may use HIP */
    if (error == hipSuccess && !loading) {
        loading = true;
        pthread_once(&once, load_tools);
        loading = false;
    }
    return error;
}

static hipError_t device_of(int device, struct sim_gpu *gpu)
{
    hipError_t error = hip_start();
    return error == hipSuccess ? hip_result(rt_gpu(device, gpu, NULL, NULL)) : error;
}

hipError_t hip_context(struct rt_context **context)
{
    hipError_t error = hip_start();
    if (error != hipSuccess) {
        return error;
    }
    error = hip_result(rt_primary(hip_chosen, context));
    if (error == hipSuccess && (*context)->uses > 1) {
        (*context)->uses--; /* not counted here: hipDeviceReset ends it */
    }
    return error;
}

HIP(hipInit, unsigned int flags)
{
    return hip_told(flags != 0 ? hipErrorInvalidValue : hip_start());
}

static hipError_t version_of(int *version)
{
    struct sim_state head;
    if (version == NULL) {
        return hipErrorInvalidValue;
    }
    hipError_t error = hip_start();
    if (error == hipSuccess && sim_enter(0, &head) == SIM_OK) {
        *version = (int)head.drivers[SIM_VENDOR_AMD].runtime;
    }
    return error;
}

HIP(hipRuntimeGetVersion, int *version)
{
    return hip_told(version_of(version));
}

HIP(hipDriverGetVersion, int *version)
{
    return hip_told(version_of(version));
}

HIP(hipGetDeviceCount, int *count)
{
    if (count == NULL) {
        return hip_told(hipErrorInvalidValue);
    }
    *count = 0;
    hipError_t error = hip_start();
    if (error == hipSuccess) {
        *count = rt_count();
    }
    return hip_told(error);
}

HIP(hipSetDevice, int device)
{
    struct sim_gpu gpu;
    hipError_t error = device_of(device, &gpu);
    if (error == hipSuccess) {
        hip_chosen = device;
    }
    return hip_told(error);
}

HIP(hipGetDevice, int *device)
{
    hipError_t error = device != NULL ? hip_start() : hipErrorInvalidValue;
    if (error == hipSuccess) {
        *device = hip_chosen;
    }
    return hip_told(error);
}

HIP(hipDeviceGet, int *device, int ordinal)
{
    struct sim_gpu gpu;
    hipError_t error = device != NULL ? device_of(ordinal, &gpu) : hipErrorInvalidValue;
    if (error == hipSuccess) {
        *device = ordinal;
    }
    return hip_told(error);
}

HIP(hipDeviceGetName, char *name, int size, int device)
{
    struct sim_gpu gpu;
    hipError_t error = name != NULL && size > 0 ? device_of(device, &gpu) : hipErrorInvalidValue;
    if (error == hipSuccess) {
        sim_text(name, (size_t)size, gpu.name);
    }
    return hip_told(error);
}

/* As ROCm prints it after "GPU-": the sixteen digits of the serial number, which are also the identifier's bytes. */
static void serial_of(const struct sim_gpu *gpu, unsigned char *out)
{
    char text[17] = "";
    if (strlen(gpu->uuid) == 36) {
        snprintf(text, sizeof text, "%.2s%.2s%.12s", gpu->uuid, gpu->uuid + 21, gpu->uuid + 24);
    }
    memcpy(out, text, 16);
}

HIP(hipDeviceGetUuid, unsigned char *uuid, int device)
{
    struct sim_gpu gpu;
    hipError_t error = uuid != NULL ? device_of(device, &gpu) : hipErrorInvalidValue;
    if (error == hipSuccess) {
        serial_of(&gpu, uuid);
    }
    return hip_told(error);
}

HIP(hipDeviceTotalMem, size_t *bytes, int device)
{
    uint64_t left, total;
    hipError_t error = bytes != NULL ? hip_start() : hipErrorInvalidValue;
    if (error == hipSuccess) {
        error = hip_result(rt_memory(device, &left, &total));
    }
    if (error == hipSuccess) {
        *bytes = total;
    }
    return hip_told(error);
}

HIP(hipDeviceGetPCIBusId, char *text, int size, int device)
{
    struct sim_gpu gpu;
    hipError_t error = text != NULL && size > 0 ? device_of(device, &gpu) : hipErrorInvalidValue;
    if (error == hipSuccess) {
        snprintf(text, (size_t)size, "%04x:%02x:%02x.%x", gpu.pci.domain, gpu.pci.bus, gpu.pci.device,
                 gpu.pci.function);
    }
    return hip_told(error);
}

HIP(hipDeviceGetByPCIBusId, int *device, const char *text)
{
    unsigned domain, bus, slot;
    hipError_t error = device != NULL && text != NULL ? hip_start() : hipErrorInvalidValue;
    if (error != hipSuccess || sscanf(text, "%x:%x:%x", &domain, &bus, &slot) != 3) {
        return hip_told(error != hipSuccess ? error : hipErrorInvalidValue);
    }
    for (int i = 0; i < rt_count(); i++) {
        struct sim_gpu gpu;
        if (rt_gpu(i, &gpu, NULL, NULL) == RT_OK && gpu.pci.domain == domain && gpu.pci.bus == bus &&
            gpu.pci.device == slot) {
            *device = i;
            return hipSuccess;
        }
    }
    return hip_told(hipErrorInvalidDevice);
}

HIP(hipDeviceCanAccessPeer, int *can, int device, int peer)
{
    struct sim_gpu one, other;
    unsigned index = 0;
    hipError_t error = can != NULL ? device_of(device, &one) : hipErrorInvalidValue;
    if (error == hipSuccess) {
        error = hip_result(rt_gpu(peer, &other, &index, NULL));
    }
    if (error == hipSuccess) {
        *can = device != peer && (one.link_count > 0 || one.p2p[index]);
    }
    return hip_told(error);
}

static int gfx_part(const char *target, bool major)
{
    unsigned long number = strncmp(target, "gfx", 3) == 0 ? strtoul(target + 3, NULL, 16) : 0;
    return (int)(major ? number >> 8 : number >> 4 & 0xF); /* gfx942: 9 and 4 */
}

HIP(hipGetDevicePropertiesR0600, hipDeviceProp_t *out, int device)
{
    struct sim_gpu gpu;
    uint8_t part = SIM_NO_INSTANCE;
    hipError_t error = out != NULL ? device_of(device, &gpu) : hipErrorInvalidValue;
    if (error == hipSuccess) {
        error = hip_result(rt_gpu(device, &gpu, NULL, &part));
    }
    if (error != hipSuccess) {
        return hip_told(error);
    }
    *out = (hipDeviceProp_t){
        .totalGlobalMem = sim_capacity(&gpu, part),
        .sharedMemPerBlock = 65536,
        .regsPerBlock = 65536,
        .warpSize = 64,
        .maxThreadsPerBlock = 1024,
        .maxThreadsDim = {1024, 1024, 1024},
        .maxGridSize = {2147483647, 65536, 65536},
        .clockRate = (int)gpu.clock_graphics_max * 1000,
        .major = gfx_part(gpu.architecture_name, true),
        .minor = gfx_part(gpu.architecture_name, false),
        .multiProcessorCount = (int)sim_multiprocessors(&gpu, part),
        .canMapHostMemory = 1,
        .concurrentKernels = 1,
        .ECCEnabled = (int)gpu.ecc_enabled,
        .pciBusID = gpu.pci.bus,
        .pciDeviceID = gpu.pci.device,
        .pciDomainID = (int)gpu.pci.domain,
        .unifiedAddressing = 1,
        .memoryClockRate = (int)gpu.clock_memory_max * 1000,
        .memoryBusWidth = (int)gpu.bus_width,
        .maxThreadsPerMultiProcessor = 2048,
        .managedMemory = 1,
        .memoryPoolsSupported = 1,
        .isLargeBar = gpu.bar1_mib >= gpu.memory_total_mib,
    };
    sim_text(out->name, sizeof out->name, gpu.name);
    serial_of(&gpu, out->uuid);
    snprintf(out->gcnArchName, sizeof out->gcnArchName, "%s:sramecc%c:xnack-", gpu.architecture_name,
             gpu.ecc_enabled ? '+' : '-');
    return hipSuccess;
}

HIP(hipDeviceGetAttribute, int *value, int attribute, int device)
{
    struct sim_gpu gpu;
    hipError_t error = value != NULL ? device_of(device, &gpu) : hipErrorInvalidValue;
    if (error == hipSuccess) { /* the first of the list: ECC */
        *value = attribute == 0 ? (int)gpu.ecc_enabled : 0;
    }
    return hip_told(error);
}

HIP(hipDeviceSynchronize, void)
{
    enum { CONTEXT_SYNCHRONIZE = 4 };
    struct sim_gpu gpu;
    hipError_t error = device_of(hip_chosen, &gpu);
    if (error == hipSuccess) {
        hip_wait(NULL, line_device_end(hip_chosen), CONTEXT_SYNCHRONIZE);
    }
    return hip_told(error);
}

HIP(hipDeviceReset, void)
{
    hipError_t error = hip_start();
    return hip_told(error == hipSuccess ? hip_result(rt_primary_release(hip_chosen, true)) : error);
}

HIP(hipDevicePrimaryCtxGetState, int device, unsigned int *flags, int *active)
{
    hipError_t error = flags != NULL && active != NULL ? hip_start() : hipErrorInvalidValue;
    if (error == hipSuccess) {
        *flags = 0;
        *active = rt_primary_active(device);
    }
    return hip_told(error);
}

/* ---- errors ---- */

static const struct {
    hipError_t code;
    const char *name, *text;
} errors[] = {
    {hipSuccess, "hipSuccess", "no error"},
    {hipErrorInvalidValue, "hipErrorInvalidValue", "invalid argument"},
    {hipErrorOutOfMemory, "hipErrorOutOfMemory", "out of memory"},
    {hipErrorNotInitialized, "hipErrorNotInitialized", "initialization error"},
    {hipErrorInvalidDevicePointer, "hipErrorInvalidDevicePointer", "invalid device pointer"},
    {hipErrorNoDevice, "hipErrorNoDevice", "no ROCm-capable device is detected"},
    {hipErrorInvalidDevice, "hipErrorInvalidDevice", "invalid device ordinal"},
    {hipErrorInvalidHandle, "hipErrorInvalidHandle", "invalid resource handle"},
    {hipErrorIllegalState, "hipErrorIllegalState", "the operation cannot be performed in the present state"},
    {hipErrorNotFound, "hipErrorNotFound", "named symbol not found"},
    {hipErrorNotReady, "hipErrorNotReady", "device not ready"},
    {hipErrorNotSupported, "hipErrorNotSupported", "operation not supported"},
};

static const char *error_text(hipError_t error, bool name)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        if (errors[i].code == error) {
            return name ? errors[i].name : errors[i].text;
        }
    }
    return name ? "hipErrorUnknown" : "unknown error";
}

SIM_API const char *hipGetErrorName(hipError_t error)
{
    return error_text(error, true);
}

SIM_API const char *hipGetErrorString(hipError_t error)
{
    return error_text(error, false);
}

HIP(hipPeekAtLastError, void)
{
    return hip_last;
}

HIP(hipGetLastError, void)
{
    hipError_t error = hip_last;
    hip_last = hipSuccess;
    return error;
}
