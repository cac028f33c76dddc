/* Simulated NVML: events. The state keeps each GPU's latest XIDs; a set reports those that came after its
 * registration. */
#include <stdlib.h>
#include <time.h>

#include "nvml.h"

#define XID_EVENT 8ull                             /* nvmlEventTypeXidCriticalError */
#define SUPPORTED_EVENTS (XID_EVENT | 1ull | 2ull) /* single-bit and double-bit ECC errors */

struct nvml_event_set {
    struct {
        bool registered;
        uint64_t seen; /* sequence number of the last event reported, or there at registration */
    } gpus[SIM_MAX_GPUS];
};

static uint64_t newest(const struct sim_gpu *gpu)
{
    uint64_t sequence = 0;
    for (unsigned i = 0; i < SIM_MAX_EVENTS; i++) {
        sequence = gpu->events[i].sequence > sequence ? gpu->events[i].sequence : sequence;
    }
    return sequence;
}

SIM_API nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    enum sim_status status = sim_enter(0, NULL);
    if (status != SIM_OK || set == NULL) {
        return status != SIM_OK ? nvml_error(status) : NVML_ERROR_INVALID_ARGUMENT;
    }
    *set = calloc(1, sizeof **set);
    return *set != NULL ? NVML_SUCCESS : NVML_ERROR_MEMORY;
}

SIM_API nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    free(set);
    return NVML_SUCCESS;
}

SIM_API nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
    struct target t;
    nvmlReturn_t result = types != NULL ? nvml_enter_whole(device, 0, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        *types = SUPPORTED_EVENTS;
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
    struct target t;
    nvmlReturn_t result = set != NULL ? nvml_enter_whole(device, 0, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && (types & ~SUPPORTED_EVENTS) != 0) {
        result = NVML_ERROR_NOT_SUPPORTED;
    }
    if (result == NVML_SUCCESS && (types & XID_EVENT) && !set->gpus[t.index].registered) {
        set->gpus[t.index].registered = true;
        set->gpus[t.index].seen = newest(&t.gpu);
    }
    return result;
}

/* The oldest event of any registered GPU that was not reported yet. A lost GPU still reports its last XIDs. */
static bool next_event(nvmlEventSet_t set, nvmlEventData_t *data)
{
    for (unsigned index = 0; index < SIM_MAX_GPUS; index++) {
        struct sim_gpu gpu;
        if (!set->gpus[index].registered || !sim_peek(index, &gpu)) {
            continue;
        }
        const struct sim_event *next = NULL;
        for (unsigned i = 0; i < SIM_MAX_EVENTS; i++) {
            const struct sim_event *event = &gpu.events[i];
            if (event->sequence > set->gpus[index].seen && (next == NULL || event->sequence < next->sequence)) {
                next = event;
            }
        }
        if (next != NULL) {
            set->gpus[index].seen = next->sequence;
            *data = (nvmlEventData_t){.device = nvml_handle(index, SIM_NO_INSTANCE),
                                      .eventType = XID_EVENT,
                                      .eventData = next->xid,
                                      .gpuInstanceId = NVML_NO_VALUE,
                                      .computeInstanceId = NVML_NO_VALUE};
            return true;
        }
    }
    return false;
}

SIM_API nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)
{
    enum { STEP_MS = 10 };
    if (set == NULL || data == NULL) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    for (unsigned int waited = 0;; waited += STEP_MS) {
        enum sim_status status = sim_enter(0, NULL);
        if (status != SIM_OK) {
            return nvml_error(status);
        }
        if (next_event(set, data)) {
            return NVML_SUCCESS;
        }
        if (waited >= timeout_ms) {
            return NVML_ERROR_TIMEOUT;
        }
        nanosleep(&(struct timespec){.tv_nsec = STEP_MS * 1000000L}, NULL);
    }
}
