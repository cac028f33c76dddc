/* SPDX-License-Identifier: Apache-2.0 */
/* A HIP runtime that grants everything, for functions that the simulated one does not have. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    void *address;
    size_t pitch, width, height;
} pitched;

typedef struct {
    size_t width, height, depth;
} extent;

typedef struct {
    char bytes[64];
} handle;

static int give(void **place)
{
    *place = malloc(16);
    return *place ? 0 : 2;
}

static int take(void *address)
{
    free(address);
    return 0;
}

int hipInit(unsigned flags)
{
    (void)flags;
    return 0;
}

int hipGetDevice(int *device)
{
    *device = 0;
    return 0;
}

int hipSetDevice(int device)
{
    return device == 0 ? 0 : 101;
}

int hipGetDeviceCount(int *count)
{
    *count = 1;
    return 0;
}

int hipDeviceGetPCIBusId(char *text, int size, int device)
{
    (void)device;
    return snprintf(text, (size_t)size, "0000:05:00.0") < size ? 0 : 1;
}

int hipMemGetInfo(size_t *left, size_t *total)
{
    *left = *total = 1UL << 40;
    return 0;
}

int hipMalloc(void **place, size_t size)
{
    (void)size;
    return give(place);
}

int hipFree(void *address)
{
    return take(address);
}

int hipMalloc3D(pitched *memory, extent size)
{
    memory->pitch = memory->width = size.width;
    memory->height = size.height;
    return give(&memory->address);
}

#define ARRAY(NAME, ...)                                                                                               \
    int NAME(void **array, __VA_ARGS__)                                                                                \
    {                                                                                                                  \
        return give(array);                                                                                            \
    }
ARRAY(hipArrayCreate, const void *what)
ARRAY(hipArray3DCreate, const void *what)
ARRAY(hipMallocMipmappedArray, const void *what, extent size, unsigned levels, unsigned flags)
ARRAY(hipMipmappedArrayCreate, const void *what, unsigned levels)
int hipArrayDestroy(void *array)
{
    return take(array);
}

int hipFreeMipmappedArray(void *array)
{
    return take(array);
}

int hipMipmappedArrayDestroy(void *array)
{
    return take(array);
}

int hipIpcGetMemHandle(handle *made, void *address)
{
    memcpy(made->bytes, &address, sizeof address);
    return 0;
}

int hipIpcOpenMemHandle(void **place, handle given, unsigned flags)
{
    (void)flags;
    memcpy(place, given.bytes, sizeof *place);
    return 0;
}

int hipIpcCloseMemHandle(void *address)
{
    (void)address;
    return 0;
}

int hipMemPoolExportToShareableHandle(int *file, void *pool, int type, unsigned flags)
{
    (void)pool, (void)type, (void)flags;
    *file = 42;
    return 0;
}

int hipMemPoolImportFromShareableHandle(void **pool, void *file, int type, unsigned flags)
{
    (void)file, (void)type, (void)flags;
    return give(pool);
}

/* As HIP 7 does: by its own name, with dlsym, and the form for per-thread default streams only where there is one. */
static int found(const char *name, void **function, int per_thread)
{
    char form[128];
    void *own = dlopen("libamdhip64.so.7", RTLD_LAZY);
    snprintf(form, sizeof form, "%s%s", name, per_thread ? "_spt" : "");
    *function = dlsym(own, form);
    if (!*function)
        *function = dlsym(own, name);
    return *function ? 0 : 1;
}

int hipGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *status)
{
    *status = found(name, function, flags == 2);
    return *status;
}

int hipGetDriverEntryPoint_spt(const char *name, void **function, unsigned long long flags, int *status)
{
    *status = found(name, function, flags != 1);
    return *status;
}

/* hipMalloc by the look-up and by the linker, as parts of HIP itself do. */
int hipExtMallocWithFlags(void **place, size_t size, unsigned flags)
{
    int (*allocate)(void **, size_t), status;
    (void)flags;
    if (hipGetDriverEntryPoint("hipMalloc", (void **)&allocate, 0, &status) || allocate(place, size))
        return 2;
    hipFree(*place);
    return hipMalloc(place, size);
}

int hipMallocAsync(void **place, size_t size, void *stream)
{
    (void)stream;
    return hipMalloc(place, size);
}

int hipGetDeviceProperties(void *properties, int device)
{
    memset(properties, 0, 792);
    memcpy((char *)properties + 256, &(size_t){1UL << 40}, sizeof(size_t));
    return device;
}

int hipGetDevicePropertiesR0600(void *properties, int device)
{
    memset(properties, 0, 1472);
    memcpy((char *)properties + 288, &(size_t){1UL << 40}, sizeof(size_t));
    return device;
}

#ifdef HIP7
int hipGetProcAddress(const char *name, void **function, int version, uint64_t flags, void *status)
{
    (void)status;
    int newer = version >= 600 && strcmp(name, "hipGetDeviceProperties") == 0;
    return found(newer ? "hipGetDevicePropertiesR0600" : name, function, flags == 2);
}
#else
int hipGetProcAddress(const char *name, void **function, int version, uint64_t flags, void *status)
{
    (void)version, (void)flags, (void)status;
    void *own = dlopen("libamdhip64.so.6", RTLD_NOW | RTLD_NOLOAD);
    *function = dlvsym(RTLD_DEFAULT, name, "none");
    if (!*function)
        *function = dlsym(own, name);
    return *function ? 0 : 1;
}
#endif
