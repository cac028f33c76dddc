/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NVML inside a job: of the job's devices, memory is what the job may hold, and processes are the job's. Everything
 * else, other devices too, is as NVML says. NVML allocates nothing, so that nothing is refused here.
 */
#include "hook.h"
#include "session.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int nvmlReturn_t;
typedef void *nvmlDevice_t;
enum { NVML_SUCCESS = 0, NVML_ERROR_UNINITIALIZED = 1 };

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
} nvmlProcessInfo_v1_t;

typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
    unsigned gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;

typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
    unsigned gpuInstanceId, computeInstanceId;
    unsigned long long usedGpuCcProtectedMemory;
} nvmlProcessDetail_t;

typedef struct {
    unsigned version, mode, count;
    nvmlProcessDetail_t *list;
} nvmlProcessDetailList_t;

#define HOOK(NAME, ...) LIMIT_EXPORT nvmlReturn_t NAME(__VA_ARGS__)

#define WRAPPED(CALL)                                                                                                  \
    CALL(nvmlDeviceGetMemoryInfo)                                                                                      \
    CALL(nvmlDeviceGetMemoryInfo_v2)                                                                                   \
    CALL(nvmlDeviceGetComputeRunningProcesses)                                                                         \
    CALL(nvmlDeviceGetComputeRunningProcesses_v2)                                                                      \
    CALL(nvmlDeviceGetComputeRunningProcesses_v3)                                                                      \
    CALL(nvmlDeviceGetGraphicsRunningProcesses)                                                                        \
    CALL(nvmlDeviceGetGraphicsRunningProcesses_v2)                                                                     \
    CALL(nvmlDeviceGetGraphicsRunningProcesses_v3)                                                                     \
    CALL(nvmlDeviceGetMPSComputeRunningProcesses)                                                                      \
    CALL(nvmlDeviceGetMPSComputeRunningProcesses_v2)                                                                   \
    CALL(nvmlDeviceGetMPSComputeRunningProcesses_v3)                                                                   \
    CALL(nvmlDeviceGetRunningProcessDetailList)

#define NEEDED(CALL) CALL(nvmlDeviceGetUUID, nvmlDevice_t, char *, unsigned)

enum { WRAPPED(LIMIT_NUMBER) NEEDED(LIMIT_NUMBER) CALLS };
static struct limit_call calls[CALLS];
NEEDED(LIMIT_DECLARE)

static nvmlReturn_t absent(void)
{
    return NVML_ERROR_UNINITIALIZED;
}

#define VENDOR(NAME, ...)                                                                                              \
    LIMIT_IN(((__typeof__(&NAME))limit_function_of(&limit_nvml, &calls[CALL_##NAME], (limit_function *)absent))(       \
        __VA_ARGS__))

static unsigned digit(char c)
{
    return (unsigned)(c >= '0' && c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10) & 15u;
}

/* The device of the ledger; below 0: not the job's. */
static int device_of(nvmlDevice_t handle)
{
    char text[96] = "";
    unsigned char uuid[16] = {0};
    unsigned digits = 0;
    if (VENDOR(nvmlDeviceGetUUID, handle, text, sizeof text) != NVML_SUCCESS || strlen(text) < 4)
        return LIMIT_CLOSED;
    for (const char *at = text + 4; *at && digits < 32; at++) /* after GPU- or MIG- */
        if (*at != '-') {
            uuid[digits / 2] = (unsigned char)(uuid[digits / 2] << 4 | digit(*at));
            digits++;
        }
    return digits == 32 ? limit_device(uuid, NULL, NULL) : LIMIT_CLOSED;
}

static void narrow(nvmlDevice_t handle, unsigned long long *total, unsigned long long *left, unsigned long long *used,
                   unsigned long long *reserved)
{
    int device = limit_inside == 0 ? device_of(handle) : LIMIT_CLOSED;
    size_t all = (size_t)*total, rest = SIZE_MAX;
    if (device < 0)
        return;
    limit_narrow(device, &rest, &all);
    *total = all;
    *left = rest < all ? rest : all;
    *used = *total - *left;
    if (reserved)
        *reserved = 0; /* the driver's own part is not the job's */
}

HOOK(nvmlDeviceGetMemoryInfo, nvmlDevice_t device, nvmlMemory_t *memory)
{
    nvmlReturn_t result = VENDOR(nvmlDeviceGetMemoryInfo, device, memory);
    if (result == NVML_SUCCESS)
        narrow(device, &memory->total, &memory->free, &memory->used, NULL);
    return result;
}

HOOK(nvmlDeviceGetMemoryInfo_v2, nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    nvmlReturn_t result = VENDOR(nvmlDeviceGetMemoryInfo_v2, device, memory);
    if (result == NVML_SUCCESS)
        narrow(device, &memory->total, &memory->free, &memory->used, &memory->reserved);
    return result;
}

/* Keep the job's processes, in order; `size` is that of an element, which begins with the process's number. */
static void keep_jobs(nvmlDevice_t handle, unsigned *count, void *list, size_t size)
{
    struct limit_session *session = limit_inside == 0 && list && device_of(handle) >= 0 ? limit_session() : NULL;
    uint32_t kept = 0;
    for (uint32_t i = 0; session && i < *count; i++) {
        uint32_t pid;
        memcpy(&pid, (char *)list + i * size, sizeof pid);
        if (limit_has_joined(&session->region, limit_ledger_pid(&session->region, pid, session->self.space)))
            memmove((char *)list + kept++ * size, (char *)list + i * size, size);
    }
    if (session)
        *count = kept;
}

#define PROCESSES(NAME, TYPE)                                                                                          \
    HOOK(NAME, nvmlDevice_t device, unsigned *count, TYPE *list)                                                       \
    {                                                                                                                  \
        nvmlReturn_t result = VENDOR(NAME, device, count, list);                                                       \
        if (result == NVML_SUCCESS)                                                                                    \
            keep_jobs(device, count, list, sizeof *list);                                                              \
        return result;                                                                                                 \
    }

PROCESSES(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t)
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_t)
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_t)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_t)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t)

HOOK(nvmlDeviceGetRunningProcessDetailList, nvmlDevice_t device, nvmlProcessDetailList_t *list)
{
    nvmlReturn_t result = VENDOR(nvmlDeviceGetRunningProcessDetailList, device, list);
    if (result == NVML_SUCCESS)
        keep_jobs(device, &list->count, list->list, sizeof *list->list);
    return result;
}

static struct limit_call calls[CALLS] = {WRAPPED(LIMIT_ROW) NEEDED(LIMIT_ROW_NEEDED)};
static const char *const sonames[] = {"libnvidia-ml.so.1", NULL};
struct limit_library limit_nvml = {.sonames = sonames, .calls = calls, .count = CALLS};
