/* Simulated NVML: GPM, from Hopper on. The one metric is how long the GPU, or a MIG instance, was at work. */
#include <stdlib.h>

#include "nvml.h"

enum { HOPPER = 9, GRAPHICS_UTIL = 1 };

struct nvml_gpm_sample {
    uint64_t at_ns, busy_ns;
};

typedef struct {
    unsigned int version, isSupportedDevice;
} nvmlGpmSupport_t;

typedef struct {
    unsigned int metricId;
    nvmlReturn_t nvmlReturn;
    double value;
    const char *shortName, *longName, *unit;
} nvmlGpmMetric_t;

typedef struct {
    unsigned int version, numMetrics;
    struct nvml_gpm_sample *sample1, *sample2;
    nvmlGpmMetric_t metrics[];
} nvmlGpmMetricsGet_t;

SIM_API nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *out)
{
    struct target t;
    nvmlReturn_t result = out != NULL ? nvml_enter(device, R520, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && out->version != 1) {
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    if (result == NVML_SUCCESS) {
        out->isSupportedDevice = t.gpu.architecture >= HOPPER;
    }
    return result;
}

SIM_API nvmlReturn_t nvmlGpmSampleAlloc(struct nvml_gpm_sample **sample)
{
    enum sim_status status = sim_enter(R520, NULL);
    if (status != SIM_OK || sample == NULL) {
        return status != SIM_OK ? nvml_error(status) : NVML_ERROR_INVALID_ARGUMENT;
    }
    *sample = calloc(1, sizeof **sample);
    return *sample != NULL ? NVML_SUCCESS : NVML_ERROR_MEMORY;
}

SIM_API nvmlReturn_t nvmlGpmSampleFree(struct nvml_gpm_sample *sample)
{
    free(sample);
    return NVML_SUCCESS;
}

static nvmlReturn_t enter(nvmlDevice_t device, struct target *t)
{
    nvmlReturn_t result = nvml_enter_whole(device, R520, t);
    return result == NVML_SUCCESS && t->gpu.architecture < HOPPER ? NVML_ERROR_NOT_SUPPORTED : result;
}

static void take(const struct target *t, uint8_t instance, struct nvml_gpm_sample *sample)
{
    *sample = (struct nvml_gpm_sample){.at_ns = sim_now_ns(), .busy_ns = sim_busy(t->index, &t->gpu, instance)};
}

SIM_API nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, struct nvml_gpm_sample *sample)
{
    struct target t;
    nvmlReturn_t result = sample != NULL ? enter(device, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        take(&t, SIM_NO_INSTANCE, sample);
    }
    return result;
}

SIM_API nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t device, unsigned int gpu_instance, struct nvml_gpm_sample *sample)
{
    struct target t;
    nvmlReturn_t result = sample != NULL ? enter(device, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result != NVML_SUCCESS) {
        return result;
    }
    for (uint8_t k = 0; k < SIM_MAX_INSTANCES; k++) {
        if (t.gpu.instances[k].used && t.gpu.instances[k].gpu_instance == gpu_instance) {
            take(&t, k, sample);
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

SIM_API nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *get)
{
    enum sim_status status = sim_enter(R520, NULL);
    if (status != SIM_OK || get == NULL || get->sample1 == NULL || get->sample2 == NULL) {
        return status != SIM_OK ? nvml_error(status) : NVML_ERROR_INVALID_ARGUMENT;
    }
    if (get->version != 1) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    uint64_t passed = get->sample2->at_ns - get->sample1->at_ns;
    if (get->sample2->at_ns <= get->sample1->at_ns) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    /* What ended processes took is gone from the second sample. */
    bool grew = get->sample2->busy_ns > get->sample1->busy_ns;
    double share = grew ? 100.0 * (double)(get->sample2->busy_ns - get->sample1->busy_ns) / (double)passed : 0.0;
    for (unsigned int i = 0; i < get->numMetrics; i++) {
        bool known = get->metrics[i].metricId == GRAPHICS_UTIL;
        get->metrics[i].nvmlReturn = known ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
        get->metrics[i].value = share < 100.0 ? share : 100.0;
    }
    return NVML_SUCCESS;
}
