/* Simulated NVML: start and end, the system, handles. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "nvml.h"

/* Handles are addresses within these; what is there is never read. */
static char whole_handles[SIM_MAX_GPUS];
static char instance_handles[SIM_MAX_GPUS * SIM_MAX_INSTANCES];

nvmlReturn_t nvml_error(enum sim_status status)
{
    switch (status) {
    case SIM_OK:
        return NVML_SUCCESS;
    case SIM_NOT_LOADED:
        return NVML_ERROR_DRIVER_NOT_LOADED;
    case SIM_CORRUPT:
        return NVML_ERROR_CORRUPTED_INFOROM;
    case SIM_CLOSED:
        return NVML_ERROR_UNINITIALIZED;
    case SIM_OLD_DRIVER:
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    case SIM_NO_DEVICE:
        return NVML_ERROR_NOT_FOUND;
    case SIM_LOST:
        return NVML_ERROR_GPU_IS_LOST;
    case SIM_NO_MEMORY:
        return NVML_ERROR_INSUFFICIENT_RESOURCES;
    case SIM_DENIED:
        return NVML_ERROR_NO_PERMISSION;
    case SIM_BUSY:
        return NVML_ERROR_IN_USE;
    case SIM_REFUSED:
        return NVML_ERROR_INVALID_ARGUMENT;
    case SIM_IO:
        break;
    }
    return NVML_ERROR_UNKNOWN;
}

nvmlDevice_t nvml_handle(unsigned index, uint8_t instance)
{
    char *place =
        instance == SIM_NO_INSTANCE ? &whole_handles[index] : &instance_handles[index * SIM_MAX_INSTANCES + instance];
    return (nvmlDevice_t)(void *)place;
}

static bool resolve(nvmlDevice_t device, unsigned *index, uint8_t *instance)
{
    uintptr_t whole = (uintptr_t)device - (uintptr_t)whole_handles;
    uintptr_t part = (uintptr_t)device - (uintptr_t)instance_handles;
    if (whole < sizeof whole_handles) {
        *index = (unsigned)whole;
        *instance = SIM_NO_INSTANCE;
        return true;
    }
    *index = (unsigned)(part / SIM_MAX_INSTANCES);
    *instance = (uint8_t)(part % SIM_MAX_INSTANCES);
    return part < sizeof instance_handles;
}

nvmlReturn_t nvml_enter(nvmlDevice_t device, uint32_t since, struct target *target)
{
    if (!resolve(device, &target->index, &target->instance)) {
        enum sim_status status = sim_enter(since, NULL);
        return status != SIM_OK ? nvml_error(status) : NVML_ERROR_INVALID_ARGUMENT;
    }
    target->handle = device;
    enum sim_status status = sim_gpu(since, target->index, &target->gpu);
    if (status == SIM_NO_DEVICE) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    if (status == SIM_OK && target->instance != SIM_NO_INSTANCE && !target->gpu.instances[target->instance].used) {
        return NVML_ERROR_NOT_FOUND; /* the layout changed */
    }
    return nvml_error(status);
}

nvmlReturn_t nvml_enter_whole(nvmlDevice_t device, uint32_t since, struct target *target)
{
    nvmlReturn_t result = nvml_enter(device, since, target);
    return result == NVML_SUCCESS && target->instance != SIM_NO_INSTANCE ? NVML_ERROR_NOT_SUPPORTED : result;
}

unsigned nvml_ordinal(unsigned index)
{
    uint8_t visible[SIM_MAX_GPUS];
    unsigned count = sim_visible(visible);
    for (unsigned i = 0; i < count; i++) {
        if (visible[i] == index) {
            return i;
        }
    }
    return SIM_MAX_GPUS;
}

nvmlReturn_t nvml_copy(char *to, unsigned int size, const char *from)
{
    if (to == NULL) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    return sim_text(to, size, from) ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

void nvml_pci(const struct sim_pci *from, nvmlPciInfo_t *to)
{
    *to = (nvmlPciInfo_t){
        .domain = from->domain,
        .bus = from->bus,
        .device = from->device,
        .pciDeviceId = (unsigned int)from->device_id << 16 | from->vendor_id,
        .pciSubSystemId = (unsigned int)from->sub_device_id << 16 | from->sub_vendor_id,
    };
    snprintf(to->busId, sizeof to->busId, "%08X:%02X:%02X.%X", from->domain, from->bus, from->device, from->function);
    snprintf(to->busIdLegacy, sizeof to->busIdLegacy, "%04X:%02X:%02X.%X", from->domain & 0xFFFF, from->bus,
             from->device, from->function & 7);
}

/* ---- start and end ---- */

SIM_API nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    return nvml_error(sim_open(SIM_VENDOR_NVIDIA));
}

SIM_API nvmlReturn_t nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

SIM_API nvmlReturn_t nvmlInit(void)
{
    return nvmlInitWithFlags(0);
}

SIM_API nvmlReturn_t nvmlShutdown(void)
{
    return nvml_error(sim_close());
}

SIM_API const char *nvmlErrorString(nvmlReturn_t result)
{
    static const struct {
        int code;
        const char *text;
    } texts[] = {
        {NVML_SUCCESS, "Success"},
        {NVML_ERROR_UNINITIALIZED, "Uninitialized"},
        {NVML_ERROR_INVALID_ARGUMENT, "Invalid Argument"},
        {NVML_ERROR_NOT_SUPPORTED, "Not Supported"},
        {NVML_ERROR_NO_PERMISSION, "Insufficient Permissions"},
        {NVML_ERROR_NOT_FOUND, "Not Found"},
        {NVML_ERROR_INSUFFICIENT_SIZE, "Insufficient Size"},
        {NVML_ERROR_DRIVER_NOT_LOADED, "Driver Not Loaded"},
        {NVML_ERROR_TIMEOUT, "Timeout"},
        {NVML_ERROR_FUNCTION_NOT_FOUND, "Function Not Found"},
        {NVML_ERROR_CORRUPTED_INFOROM, "Corrupted infoROM"},
        {NVML_ERROR_GPU_IS_LOST, "GPU is lost"},
        {NVML_ERROR_IN_USE, "In use by another client"},
        {NVML_ERROR_MEMORY, "Insufficient Memory"},
        {NVML_ERROR_INSUFFICIENT_RESOURCES, "Insufficient Resources"},
        {NVML_ERROR_ARGUMENT_VERSION_MISMATCH, "Argument version mismatch"},
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        if (texts[i].code == (int)result) {
            return texts[i].text;
        }
    }
    return "Unknown Error";
}

/* ---- the system ---- */

SIM_API nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    struct sim_state head;
    enum sim_status status = sim_enter(0, &head);
    return status != SIM_OK ? nvml_error(status) : nvml_copy(version, length, head.drivers[SIM_VENDOR_NVIDIA].version);
}

SIM_API nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    struct sim_state head;
    enum sim_status status = sim_enter(0, &head);
    return status != SIM_OK ? nvml_error(status) : nvml_copy(version, length, head.drivers[SIM_VENDOR_NVIDIA].library);
}

SIM_API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    struct sim_state head;
    enum sim_status status = sim_enter(0, &head);
    if (status == SIM_OK && version != NULL) {
        *version = (int)head.drivers[SIM_VENDOR_NVIDIA].runtime;
    }
    return version == NULL ? NVML_ERROR_INVALID_ARGUMENT : nvml_error(status);
}

SIM_API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

static const char *made_up_name(uint32_t pid, struct sim_gpu *gpu)
{
    for (unsigned i = 0; sim_peek(i, gpu); i++) {
        for (unsigned k = 0; k < gpu->process_count; k++) {
            if (gpu->processes[k].pid == pid && gpu->processes[k].name[0] != 0) {
                return gpu->processes[k].name;
            }
        }
    }
    return NULL;
}

SIM_API nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length)
{
    enum sim_status status = sim_enter(0, NULL);
    if (status != SIM_OK || name == NULL || length == 0) {
        return status != SIM_OK ? nvml_error(status) : NVML_ERROR_INVALID_ARGUMENT;
    }
    struct sim_gpu gpu;
    const char *made_up = made_up_name(pid, &gpu);
    if (made_up != NULL) {
        return nvml_copy(name, length, made_up);
    }
    char path[64], text[4096];
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd >= 0 ? read(fd, text, sizeof text - 1) : -1;
    if (fd >= 0) {
        close(fd);
    }
    if (size <= 0) {
        return NVML_ERROR_NOT_FOUND;
    }
    text[size] = 0;
    sim_text(name, length, text); /* cut where it is too long, as the driver does */
    return NVML_SUCCESS;
}

/* ---- handles ---- */

SIM_API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    enum sim_status status = sim_enter(0, NULL);
    uint8_t visible[SIM_MAX_GPUS];
    if (status == SIM_OK && count != NULL) {
        *count = sim_visible(visible);
    }
    return count == NULL ? NVML_ERROR_INVALID_ARGUMENT : nvml_error(status);
}

SIM_API nvmlReturn_t nvmlDeviceGetCount(unsigned int *count)
{
    return nvmlDeviceGetCount_v2(count);
}

static nvmlReturn_t found(unsigned index, uint8_t instance, nvmlDevice_t *device)
{
    struct target target;
    nvmlReturn_t result = nvml_enter(nvml_handle(index, instance), 0, &target);
    if (result == NVML_SUCCESS) {
        *device = target.handle;
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    uint8_t visible[SIM_MAX_GPUS];
    if (device == NULL || index >= sim_visible(visible)) {
        enum sim_status status = sim_enter(0, NULL);
        return status != SIM_OK ? nvml_error(status) : NVML_ERROR_INVALID_ARGUMENT;
    }
    return found(visible[index], SIM_NO_INSTANCE, device);
}

SIM_API nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

/* The visible GPU, or with `instances` also the MIG device, that `matches` accepts. */
static nvmlReturn_t search(bool (*matches)(const struct target *, const char *), const char *word, nvmlDevice_t *device)
{
    enum sim_status status = sim_enter(0, NULL);
    if (status != SIM_OK || word == NULL || device == NULL) {
        return status != SIM_OK ? nvml_error(status) : NVML_ERROR_INVALID_ARGUMENT;
    }
    uint8_t visible[SIM_MAX_GPUS];
    unsigned count = sim_visible(visible);
    for (unsigned i = 0; i < count; i++) {
        struct target target = {.index = visible[i], .instance = SIM_NO_INSTANCE};
        if (!sim_peek(visible[i], &target.gpu)) {
            continue;
        }
        if (matches(&target, word)) {
            return found(target.index, SIM_NO_INSTANCE, device);
        }
        for (uint8_t k = 0; k < SIM_MAX_INSTANCES; k++) {
            target.instance = k;
            if (target.gpu.instances[k].used && matches(&target, word) &&
                sim_instance_visible(&target.gpu, &target.gpu.instances[k])) {
                return found(target.index, k, device);
            }
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

static bool has_uuid(const struct target *target, const char *uuid)
{
    const struct sim_gpu *gpu = &target->gpu;
    return strcasecmp(target->instance == SIM_NO_INSTANCE ? gpu->uuid : gpu->instances[target->instance].uuid, uuid) ==
           0;
}

static bool has_serial(const struct target *target, const char *serial)
{
    return target->instance == SIM_NO_INSTANCE && strcmp(target->gpu.serial, serial) == 0;
}

static bool has_pci(const struct target *target, const char *address)
{
    unsigned domain = 0, bus, device, function = 0;
    if (sscanf(address, "%x:%x:%x.%x", &domain, &bus, &device, &function) < 3) {
        domain = 0;
        if (sscanf(address, "%x:%x.%x", &bus, &device, &function) < 2) {
            return false;
        }
    }
    const struct sim_pci *pci = &target->gpu.pci;
    return target->instance == SIM_NO_INSTANCE && pci->domain == domain && pci->bus == bus && pci->device == device &&
           pci->function == function;
}

SIM_API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    return search(has_uuid, uuid, device);
}

SIM_API nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device)
{
    return search(has_serial, serial, device);
}

SIM_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *address, nvmlDevice_t *device)
{
    return search(has_pci, address, device);
}
