/* Simulated CUDA: code. Whatever is loaded has every function and every variable that is asked for, and a function that
 * is launched takes a given time of its stream and does nothing. */
#include "cuda.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* A module, or a library; a function of it is the kernel, too. */
typedef struct cu_code {
    CUfunction functions;
} *CUmodule;

/* A variable of code has an address in each context that uses the code. */
struct variable {
    struct variable *next;
    const struct cu_code *code;
    CUcontext context;
    CUdeviceptr address;
    char name[];
};

/* Of every variable: no image is read, which would have it. All constants of a module have no more. */
enum { VARIABLE_SIZE = 64 << 10 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct variable *variables;

/* ---- variables ---- */

/* Of code, in all contexts, or of a context, which takes its memory along; the other one is NULL. */
static void drop_variables(const struct cu_code *code, CUcontext context)
{
    pthread_mutex_lock(&lock);
    for (struct variable **place = &variables, *it; (it = *place) != NULL;) {
        if (it->code != code && it->context != context) {
            place = &it->next;
            continue;
        }
        *place = it->next;
        if (context == NULL) {
            rt_free(cuda_pointer(it->address), RT_DEVICE);
        }
        free(it);
    }
    pthread_mutex_unlock(&lock);
}

void cuda_drop_variables(CUcontext context)
{
    drop_variables(NULL, context);
}

/* The lock is held. */
static CUresult add_variable(struct variable **added, const struct cu_code *code, CUcontext context, const char *name)
{
    void *memory;
    struct variable *it = malloc(sizeof *it + strlen(name) + 1);
    CUresult result =
        it != NULL ? result_of(rt_alloc(context, RT_DEVICE, VARIABLE_SIZE, &memory)) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result != CUDA_SUCCESS) {
        free(it);
        return result;
    }
    *it = (struct variable){variables, code, context, (uintptr_t)memory};
    strcpy(it->name, name);
    *added = variables = it;
    return CUDA_SUCCESS;
}

CU(cuModuleGetGlobal_v2, CUdeviceptr *address, size_t *size, const struct cu_code *code, const char *name)
{
    CUcontext context;
    CUresult result = code != NULL && name != NULL && *name != 0 ? cuda_context(&context) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS) {
        return result;
    }
    pthread_mutex_lock(&lock);
    struct variable *it = variables;
    while (it != NULL && (it->code != code || it->context != context || strcmp(it->name, name) != 0)) {
        it = it->next;
    }
    if (it == NULL) {
        result = add_variable(&it, code, context, name);
    }
    if (it != NULL && address != NULL) {
        *address = it->address;
    }
    pthread_mutex_unlock(&lock);
    if (size != NULL) {
        *size = VARIABLE_SIZE;
    }
    return result;
}

ALIAS(cuLibraryGetGlobal, cuModuleGetGlobal_v2, (address, size, library, name), CUdeviceptr *address, size_t *size,
      const struct cu_code *library, const char *name)

/* ---- loading ---- */

CUresult cuda_load(struct cu_code **code, const void *image)
{
    if (code == NULL || image == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *code = calloc(1, sizeof **code);
    return *code != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult load_module(CUmodule *module, const void *image)
{
    CUcontext context;
    CUresult result = cuda_context(&context);
    return result == CUDA_SUCCESS ? cuda_load(module, image) : result;
}

CU(cuModuleLoadDataEx, CUmodule *module, const void *image, unsigned int count, int *options, void **values)
{
    (void)count;
    (void)options;
    (void)values;
    return load_module(module, image);
}

CU(cuModuleLoadData, CUmodule *module, const void *image)
{
    return load_module(module, image);
}

ALIAS(cuModuleLoadFatBinary, cuModuleLoadData, (module, image), CUmodule *module, const void *image)

CU(cuLibraryLoadData, CUmodule *library, const void *image, int *jit, void **jit_values, unsigned int jit_count,
   int *options, void **values, unsigned int count)
{
    (void)jit;
    (void)jit_values;
    (void)jit_count;
    (void)options;
    (void)values;
    (void)count;
    return rt_ready() == RT_OK ? cuda_load(library, image) : CUDA_ERROR_NOT_INITIALIZED;
}

CU(cuModuleUnload, CUmodule module)
{
    if (module == NULL) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    for (CUfunction function = module->functions, next; function != NULL; function = next) {
        next = function->next;
        free(function);
    }
    drop_variables(module, NULL);
    free(module);
    return CUDA_SUCCESS;
}

ALIAS(cuLibraryUnload, cuModuleUnload, (library), CUmodule library)

CU(cuModuleGetLoadingMode, int *mode)
{
    enum { LAZY = 2 };
    if (mode == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *mode = LAZY;
    return CUDA_SUCCESS;
}

CU(cuModuleGetFunction, CUfunction *function, CUmodule module, const char *name)
{
    if (function == NULL || module == NULL || name == NULL || *name == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_lock(&lock);
    CUfunction found = module->functions;
    while (found != NULL && strcmp(found->name, name) != 0) {
        found = found->next;
    }
    if (found == NULL && (found = malloc(sizeof *found + strlen(name) + 1)) != NULL) {
        found->code = module;
        found->next = module->functions;
        found->duration = line_duration(name);
        found->cycles = line_cycles(name);
        strcpy(found->name, name);
        module->functions = found;
    }
    pthread_mutex_unlock(&lock);
    *function = found;
    return found != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

ALIAS(cuLibraryGetKernel, cuModuleGetFunction, (kernel, library, name), CUfunction *kernel, CUmodule library,
      const char *name)

CU(cuLibraryGetModule, CUmodule *module, CUmodule library)
{
    if (module == NULL || library == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *module = library;
    return CUDA_SUCCESS;
}

CU(cuKernelGetFunction, CUfunction *function, CUfunction kernel)
{
    if (function == NULL || kernel == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *function = kernel;
    return CUDA_SUCCESS;
}

CU(cuFuncGetModule, CUmodule *module, CUfunction function)
{
    if (module == NULL || function == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *module = function->code;
    return CUDA_SUCCESS;
}

ALIAS(cuKernelGetLibrary, cuFuncGetModule, (library, kernel), CUmodule *library, CUfunction kernel)

/* ---- functions ---- */

CU(cuFuncGetAttribute, int *value, int attribute, CUfunction function)
{
    enum { MAX_THREADS = 0, REGISTERS = 4, MAX_DYNAMIC_SHARED = 8, ATTRIBUTES = 16 };
    if (value == NULL || function == NULL || attribute < 0 || attribute >= ATTRIBUTES) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *value = attribute == MAX_THREADS          ? 1024
             : attribute == REGISTERS          ? 32
             : attribute == MAX_DYNAMIC_SHARED ? 48 << 10
                                               : 0;
    return CUDA_SUCCESS;
}

CU(cuFuncSetAttribute, CUfunction function, int attribute, int value)
{
    (void)attribute;
    (void)value;
    return function != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CU(cuKernelGetAttribute, int *value, int attribute, CUfunction kernel, CUdevice device)
{
    (void)device;
    return cuFuncGetAttribute(value, attribute, kernel);
}

CU(cuKernelSetAttribute, int attribute, int value, CUfunction kernel, CUdevice device)
{
    (void)device;
    return cuFuncSetAttribute(kernel, attribute, value);
}

CU(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, int *blocks, CUfunction function, int threads,
   size_t shared_bytes, unsigned int flags)
{
    (void)shared_bytes;
    (void)flags;
    if (blocks == NULL || function == NULL || threads <= 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *blocks = threads <= 1024 ? 2048 / threads : 0;
    return CUDA_SUCCESS;
}

CU(cuOccupancyMaxActiveBlocksPerMultiprocessor, int *blocks, CUfunction function, int threads, size_t shared_bytes)
{
    return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared_bytes, 0);
}

CU(cuFuncSetCacheConfig, CUfunction function, int preference)
{
    return cuFuncSetAttribute(function, 0, preference);
}

ALIAS(cuFuncSetSharedMemConfig, cuFuncSetCacheConfig, (function, banks), CUfunction function, int banks)

CU(cuKernelSetCacheConfig, CUfunction kernel, int preference, CUdevice device)
{
    (void)device;
    return cuFuncSetCacheConfig(kernel, preference);
}

CU(cuFuncGetName, const char **name, CUfunction function)
{
    if (name == NULL || function == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *name = function->name;
    return CUDA_SUCCESS;
}

ALIAS(cuKernelGetName, cuFuncGetName, (name, kernel), const char **name, CUfunction kernel)

CU(cuOccupancyAvailableDynamicSMemPerBlock, size_t *bytes, CUfunction function, int blocks, int threads)
{
    if (bytes == NULL || function == NULL || blocks <= 0 || threads <= 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *bytes = (size_t)(48 << 10) / (size_t)blocks;
    return CUDA_SUCCESS;
}

/* How a function that moves tiles sees a tensor; the caller keeps it and does not look inside. */
CU(cuTensorMapEncodeTiled, void *map, int type, uint32_t rank, void *tensor, const uint64_t *sizes,
   const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int l2,
   int outside)
{
    enum { MAP_SIZE = 128, MAP_ALIGNMENT = 64, MAX_RANK = 5 };
    (void)type;
    (void)interleave;
    (void)swizzle;
    (void)l2;
    (void)outside;
    if (map == NULL || (uintptr_t)map % MAP_ALIGNMENT != 0 || rank == 0 || rank > MAX_RANK || tensor == NULL ||
        sizes == NULL || (strides == NULL && rank > 1) || box == NULL || steps == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    memset(map, 0, MAP_SIZE);
    return CUDA_SUCCESS;
}

/* ---- launches ---- */

static CUresult launch(CUstream stream, const struct cuda_kernel *kernel)
{
    const struct sim_tracer *tracer = sim_tracer();
    if (kernel->function == NULL) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (tracer != NULL) {
        tracer->launches(false, kernel->function->name);
    }
    CUresult result = cuda_submit(stream, &(struct cuda_work){.kind = CUDA_KERNEL, .kernel = *kernel});
    if (tracer != NULL) {
        tracer->launches(true, kernel->function->name);
    }
    return result;
}

CU(cuLaunchKernel, CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
   unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes, CUstream stream,
   void **parameters, void **extra)
{
    (void)shared_bytes;
    (void)parameters;
    (void)extra;
    uint64_t threads = (uint64_t)block_x * block_y * block_z;
    bool fits = grid_x > 0 && grid_y > 0 && grid_z > 0 && threads > 0 && threads <= 1024;
    return fits ? launch(stream, &(struct cuda_kernel){.function = function,
                                                       .grid = {grid_x, grid_y, grid_z},
                                                       .block = {block_x, block_y, block_z}})
                : CUDA_ERROR_INVALID_VALUE;
}

CU(cuLaunchCooperativeKernel, CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
   unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes, CUstream stream,
   void **parameters)
{
    return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, parameters,
                          NULL);
}

typedef struct {
    unsigned int grid[3], block[3], shared_bytes;
    CUstream stream;
    void *attributes;
    unsigned int attribute_count;
} CUlaunchConfig;

CU(cuLaunchKernelEx, const CUlaunchConfig *how, CUfunction function, void **parameters, void **extra)
{
    return how != NULL ? cuLaunchKernel(function, how->grid[0], how->grid[1], how->grid[2], how->block[0],
                                        how->block[1], how->block[2], how->shared_bytes, how->stream, parameters, extra)
                       : CUDA_ERROR_INVALID_VALUE;
}

static CUresult clusters(int *count, CUfunction function, const CUlaunchConfig *how, int value)
{
    if (count == NULL || function == NULL || how == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *count = value;
    return CUDA_SUCCESS;
}

CU(cuOccupancyMaxActiveClusters, int *count, CUfunction function, const CUlaunchConfig *how)
{
    return clusters(count, function, how, 16);
}

CU(cuOccupancyMaxPotentialClusterSize, int *size, CUfunction function, const CUlaunchConfig *how)
{
    return clusters(size, function, how, 8);
}

CU(cuLaunchHostFunc, CUstream stream, void (*function)(void *), void *argument)
{
    struct cuda_work work = {.kind = CUDA_CALL, .call = {.function = function, .argument = argument}};
    return function != NULL ? cuda_submit(stream, &work) : CUDA_ERROR_INVALID_VALUE;
}
