/* What the parts of the simulated AMD SMI share: its devices, and how they are entered. */
#ifndef AMD_H
#define AMD_H

#include "amd_smi_abi.h"
#include "sim.h"

/* A device of the library: a GPU, or a partition of one. Of the GPU as a whole each partition's handle reports the
 * same, as `amd-smi monitor` shows it; only what names the device and its processes are its own. */
struct amd_target {
    struct sim_gpu gpu;
    unsigned index;
    uint8_t part; /* SIM_NO_INSTANCE: the GPU is not partitioned */
};

enum { AMD_MAX_DEVICES = SIM_MAX_GPUS * SIM_MAX_INSTANCES };

amdsmi_status_t amd_failure(enum sim_status status);
amdsmi_status_t amd_enter(amdsmi_processor_handle handle, struct amd_target *t);
amdsmi_status_t amd_copy(char *to, size_t size, const char *from);
/* All devices in the library's order, as they were when it was opened; `out` holds AMD_MAX_DEVICES. */
unsigned amd_devices(amdsmi_processor_handle *out);
/* The GPU behind a handle, by the node's index, and the device's place among all; UINT32_MAX: none. */
unsigned amd_gpu_of(amdsmi_processor_handle handle);
uint32_t amd_ordinal(const struct amd_target *t);
uint64_t amd_bdf(const struct sim_pci *pci, uint8_t part);
/* What the driver counts as used: with what it keeps for itself. */
uint64_t amd_used(const struct amd_target *t);

/* A function `NAME(handle, TYPE *out)` that gives VALUE of target `t` where SUPPORTED. */
#define AMD_READ(NAME, TYPE, SUPPORTED, ...)                                                                           \
    SIM_API amdsmi_status_t NAME(amdsmi_processor_handle handle, TYPE *out)                                            \
    {                                                                                                                  \
        struct amd_target t;                                                                                           \
        amdsmi_status_t result = out != NULL ? amd_enter(handle, &t) : AMDSMI_STATUS_INVAL;                            \
        if (result == AMDSMI_STATUS_SUCCESS && !(SUPPORTED)) {                                                         \
            result = AMDSMI_STATUS_NOT_SUPPORTED;                                                                      \
        }                                                                                                              \
        if (result == AMDSMI_STATUS_SUCCESS) {                                                                         \
            *out = (__VA_ARGS__);                                                                                      \
        }                                                                                                              \
        return result;                                                                                                 \
    }

#endif
