/* Simulated HIP: code. Whatever is loaded has every function that is asked for, and a function that is launched takes a
 * given time of its stream and does nothing. */
#include "hip.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct hip_function {
    struct hip_function *next;
    const struct hip_module *module; /* NULL: it is unloaded */
    uint64_t number, duration;       /* ns */
    char name[];
} *hipFunction_t;

typedef struct hip_module {
    char unused;
} *hipModule_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static hipFunction_t functions; /* never freed: tracers have their names */
static void (*known)(uint64_t number, const char *name);

/* A tracer gets each function once. */
SIM_API void sluice_sim_kernels(void (*tell)(uint64_t number, const char *name))
{
    pthread_mutex_lock(&lock);
    known = tell;
    for (hipFunction_t function = functions; function != NULL && tell != NULL; function = function->next) {
        tell(function->number, function->name);
    }
    pthread_mutex_unlock(&lock);
}

HIP(hipModuleLoadData, hipModule_t *module, const void *image)
{
    struct rt_context *context;
    hipError_t error = module != NULL && image != NULL ? hip_context(&context) : hipErrorInvalidValue;
    if (error == hipSuccess) {
        *module = calloc(1, sizeof **module);
        error = *module != NULL ? hipSuccess : hipErrorOutOfMemory;
    }
    return hip_told(error);
}

HIP(hipModuleUnload, hipModule_t module)
{
    pthread_mutex_lock(&lock);
    for (hipFunction_t function = functions; function != NULL; function = function->next) {
        function->module = function->module != module ? function->module : NULL;
    }
    pthread_mutex_unlock(&lock);
    free(module);
    return hip_told(module != NULL ? hipSuccess : hipErrorInvalidHandle);
}

/* The lock is held. */
static hipFunction_t add_function(const struct hip_module *module, const char *name)
{
    hipFunction_t added = malloc(sizeof *added + strlen(name) + 1);
    if (added == NULL) {
        return NULL;
    }
    added->next = functions;
    added->module = module;
    added->number = functions != NULL ? functions->number + 1 : 1;
    added->duration = line_duration(name);
    strcpy(added->name, name);
    functions = added;
    if (known != NULL) {
        known(added->number, added->name);
    }
    return added;
}

/* The lock is held. */
static hipFunction_t function_of(const struct hip_module *module, const char *name)
{
    hipFunction_t found = functions;
    while (found != NULL && (found->module != module || strcmp(found->name, name) != 0)) {
        found = found->next;
    }
    return found != NULL ? found : add_function(module, name);
}

uint64_t hip_own_kernel(const char *name)
{
    static const struct hip_module own;
    pthread_mutex_lock(&lock);
    hipFunction_t function = function_of(&own, name);
    pthread_mutex_unlock(&lock);
    return function != NULL ? function->number : 0;
}

HIP(hipModuleGetFunction, hipFunction_t *function, hipModule_t module, const char *name)
{
    if (function == NULL || module == NULL || name == NULL || *name == 0) {
        return hip_told(hipErrorInvalidValue);
    }
    pthread_mutex_lock(&lock);
    *function = function_of(module, name);
    pthread_mutex_unlock(&lock);
    return hip_told(*function != NULL ? hipSuccess : hipErrorOutOfMemory);
}

static void run(hipFunction_t function, hipStream_t stream, const unsigned *grid, const unsigned *block)
{
    const struct sim_tracer *tracer = sim_tracer();
    if (function->duration == 0 && tracer == NULL) {
        return;
    }
    if (tracer != NULL) {
        tracer->launches(false, function->name);
    }
    uint64_t start = line_launch(hip_chosen, hip_line(stream), function->duration);
    hip_happened(hip_chosen, stream,
                 &(struct sim_activity){.kind = SIM_RAN,
                                        .start = start,
                                        .end = start + function->duration,
                                        .kernel = function->number,
                                        .name = function->name,
                                        .grid = grid,
                                        .block = block});
    if (tracer != NULL) {
        tracer->launches(true, function->name);
    }
}

HIP(hipModuleLaunchKernel, hipFunction_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
    unsigned block_y, unsigned block_z, unsigned shared_bytes, hipStream_t stream, void **parameters, void **extra)
{
    uint64_t threads = (uint64_t)block_x * block_y * block_z;
    bool fits = grid_x > 0 && grid_y > 0 && grid_z > 0 && threads > 0 && threads <= 1024;
    (void)shared_bytes;
    (void)parameters;
    (void)extra;
    if (function == NULL || !fits) {
        return hip_told(function == NULL ? hipErrorInvalidHandle : hipErrorInvalidValue);
    }
    run(function, stream, (const unsigned[]){grid_x, grid_y, grid_z}, (const unsigned[]){block_x, block_y, block_z});
    return hipSuccess;
}
