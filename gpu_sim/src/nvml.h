/* What the simulated NVML's files share. */
#ifndef NVML_H
#define NVML_H

#include "nvml_abi.h"
#include "sim.h"

/* The driver branch that brought a function; older ones answer NVML_ERROR_FUNCTION_NOT_FOUND. */
#define R450 450u
#define R470 470u
#define R510 510u
#define R520 520u
#define R535 535u
#define R570 570u
#define R615 615u

/* What a device handle means. */
struct target {
    struct sim_gpu gpu;
    unsigned index;   /* the node's number of the GPU */
    uint8_t instance; /* MIG instance's place, or SIM_NO_INSTANCE */
    nvmlDevice_t handle;
};

nvmlReturn_t nvml_error(enum sim_status status);
/* Resolve a handle; a lost GPU gives NVML_ERROR_GPU_IS_LOST. */
nvmlReturn_t nvml_enter(nvmlDevice_t device, uint32_t since, struct target *target);
/* The same for what only a whole GPU has: a MIG device's handle gives NVML_ERROR_NOT_SUPPORTED. */
nvmlReturn_t nvml_enter_whole(nvmlDevice_t device, uint32_t since, struct target *target);
nvmlDevice_t nvml_handle(unsigned index, uint8_t instance);
/* The ordinal of a GPU among the visible ones; SIM_MAX_GPUS when it is not. */
unsigned nvml_ordinal(unsigned index);
void nvml_pci(const struct sim_pci *from, nvmlPciInfo_t *to);
/* A MIG profile of a GPU by NVML's number of its kind, or by its ID; NULL when the GPU has none. */
const struct sim_profile *nvml_mig_profile(const struct sim_gpu *gpu, unsigned int number, bool by_id);
/* The compute instance over all of it: NVML's number of its kind, which is its ID here. */
unsigned int nvml_compute_kind(const struct sim_profile *profile);
/* Where it may begin, what is taken left out unless `empty`; how many, and into `out` (8 at most) where it is given. */
unsigned nvml_mig_places(const struct sim_gpu *gpu, const struct sim_profile *profile, bool empty,
                         nvmlPlacement_t *out);
nvmlReturn_t nvml_copy(char *to, unsigned int size, const char *from);

/* A function `NAME(device, TYPE *out)` that gives VALUE of target `t` where SUPPORTED, on whole GPUs only. */
#define NVML_READ(NAME, SINCE, TYPE, SUPPORTED, VALUE)                                                                 \
    SIM_API nvmlReturn_t NAME(nvmlDevice_t device, TYPE *out)                                                          \
    {                                                                                                                  \
        struct target t;                                                                                               \
        nvmlReturn_t result = out != NULL ? nvml_enter_whole(device, SINCE, &t) : NVML_ERROR_INVALID_ARGUMENT;         \
        if (result == NVML_SUCCESS && !(SUPPORTED)) {                                                                  \
            result = NVML_ERROR_NOT_SUPPORTED;                                                                         \
        }                                                                                                              \
        if (result == NVML_SUCCESS) {                                                                                  \
            *out = (VALUE);                                                                                            \
        }                                                                                                              \
        return result;                                                                                                 \
    }

#endif
