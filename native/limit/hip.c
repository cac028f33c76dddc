/* SPDX-License-Identifier: Apache-2.0 */
/*
 * HIP's memory calls, as in cuda.c; driver_wrappers.h has the wrappers that both share. HIP has no contexts to create:
 * a device's context appears with the first call that needs one, so that its cost is charged before the first of the
 * calls below, and given back by hipDeviceReset. What a program allocates below HIP, through HSA itself, is not seen
 * here.
 */

#define WRAPPED(CALL)                                                                                                  \
    CALL(hipGetProcAddress)                                                                                            \
    CALL(hipGetDriverEntryPoint)                                                                                       \
    CALL(hipGetDriverEntryPoint_spt)                                                                                   \
    /* memory */                                                                                                       \
    CALL(hipMalloc)                                                                                                    \
    CALL(hipExtMallocWithFlags)                                                                                        \
    CALL(hipMallocManaged)                                                                                             \
    CALL(hipMallocPitch)                                                                                               \
    CALL(hipMemAllocPitch)                                                                                             \
    CALL(hipMalloc3D)                                                                                                  \
    CALL(hipFree)                                                                                                      \
    CALL(hipMemPrefetchAsync)                                                                                          \
    CALL(hipMemPrefetchAsync_v2)                                                                                       \
    CALL(hipMemAdvise)                                                                                                 \
    CALL(hipMemAdvise_v2)                                                                                              \
    CALL(hipHostMalloc)                                                                                                \
    CALL(hipMemcpy)                                                                                                    \
    CALL(hipMemcpyAsync)                                                                                               \
    CALL(hipMemset)                                                                                                    \
    CALL(hipMemsetAsync)                                                                                               \
    CALL(hipDeviceReset)                                                                                               \
    /* arrays */                                                                                                       \
    CALL(hipMallocArray)                                                                                               \
    CALL(hipMalloc3DArray)                                                                                             \
    CALL(hipArrayCreate)                                                                                               \
    CALL(hipArray3DCreate)                                                                                             \
    CALL(hipMallocMipmappedArray)                                                                                      \
    CALL(hipMipmappedArrayCreate)                                                                                      \
    CALL(hipFreeArray)                                                                                                 \
    CALL(hipArrayDestroy)                                                                                              \
    CALL(hipFreeMipmappedArray)                                                                                        \
    CALL(hipMipmappedArrayDestroy)                                                                                     \
    /* pools */                                                                                                        \
    CALL(hipMallocAsync)                                                                                               \
    CALL(hipMallocAsync_spt)                                                                                           \
    CALL(hipMallocFromPoolAsync)                                                                                       \
    CALL(hipMallocFromPoolAsync_spt)                                                                                   \
    CALL(hipFreeAsync)                                                                                                 \
    CALL(hipFreeAsync_spt)                                                                                             \
    CALL(hipMemPoolCreate)                                                                                             \
    CALL(hipMemGetDefaultMemPool)                                                                                      \
    CALL(hipMemGetMemPool)                                                                                             \
    CALL(hipMemPoolDestroy)                                                                                            \
    CALL(hipMemPoolTrimTo)                                                                                             \
    CALL(hipStreamSynchronize)                                                                                         \
    CALL(hipStreamSynchronize_spt)                                                                                     \
    CALL(hipEventSynchronize)                                                                                          \
    CALL(hipDeviceSynchronize)                                                                                         \
    /* graphs */                                                                                                       \
    CALL(hipGraphInstantiate)                                                                                          \
    CALL(hipGraphInstantiateWithFlags)                                                                                 \
    CALL(hipGraphInstantiateWithParams)                                                                                \
    CALL(hipGraphExecDestroy)                                                                                          \
    CALL(hipGraphLaunch)                                                                                               \
    CALL(hipGraphLaunch_spt)                                                                                           \
    CALL(hipGraphUpload)                                                                                               \
    CALL(hipDeviceGraphMemTrim)                                                                                        \
    /* virtual memory */                                                                                               \
    CALL(hipMemCreate)                                                                                                 \
    CALL(hipMemRelease)                                                                                                \
    CALL(hipMemRetainAllocationHandle)                                                                                 \
    CALL(hipMemMap)                                                                                                    \
    CALL(hipMemUnmap)                                                                                                  \
    CALL(hipMemImportFromShareableHandle)                                                                              \
    /* other processes */                                                                                              \
    CALL(hipIpcGetMemHandle)                                                                                           \
    CALL(hipIpcOpenMemHandle)                                                                                          \
    CALL(hipIpcCloseMemHandle)                                                                                         \
    CALL(hipMemPoolExportToShareableHandle)                                                                            \
    CALL(hipMemPoolImportFromShareableHandle)                                                                          \
    CALL(hipMemExportToShareableHandle)                                                                                \
    /* queries */                                                                                                      \
    CALL(hipMemGetInfo)                                                                                                \
    CALL(hipDeviceTotalMem)                                                                                            \
    CALL(hipGetDeviceProperties)                                                                                       \
    CALL(hipGetDevicePropertiesR0000)                                                                                  \
    CALL(hipGetDevicePropertiesR0600, 0, "hipGetDeviceProperties", 600)

#define NEEDED(CALL)                                                                                                   \
    CALL(hipGetDevice, int *)                                                                                          \
    CALL(hipGetDeviceCount, int *)                                                                                     \
    CALL(hipDeviceGetPCIBusId, char *, int, int)                                                                       \
    CALL(hipStreamGetDevice, void *, int *)                                                                            \
    CALL(hipDeviceGetMemPool, void **, int)                                                                            \
    CALL(hipDeviceGetDefaultMemPool, void **, int)                                                                     \
    CALL(hipMemPoolGetAttribute, void *, int, void *)                                                                  \
    CALL(hipDeviceGetGraphMemAttribute, int, int, void *)                                                              \
    CALL(hipGraphGetNodes, void *, void **, size_t *)                                                                  \
    CALL(hipGraphNodeGetType, void *, int *)                                                                           \
    CALL(hipGraphChildGraphNodeGetGraph, void *, void **)                                                              \
    CALL(hipGraphMemAllocNodeGetParams, void *, struct allocation_node *)                                              \
    CALL(hipMemGetAddressRange, device_address *, size_t *, device_address)

#define API(NAME) hip##NAME
#define MALLOC_MANAGED hipMallocManaged
#define FREE hipFree
#define MALLOC_ASYNC hipMallocAsync
#define MALLOC_FROM_POOL_ASYNC hipMallocFromPoolAsync
#define FREE_ASYNC hipFreeAsync
#define GET_DEVICE_COUNT hipGetDeviceCount
#define GET_ADDRESS_RANGE hipMemGetAddressRange
#define LIBRARY limit_hip
#define ORDINALS LIMIT_HIP
enum { GRANULE = 4096, POOL_STEP = GRANULE };

#include "driver_wrappers.h"

#include <string.h>

struct pitched_memory { /* hipPitchedPtr */
    device_address address;
    size_t pitch, width, height;
};

struct channels {         /* hipChannelFormatDesc */
    int x, y, z, w, kind; /* bits of each */
};

enum { TOTAL_IN_R0600 = 288, TOTAL_IN_R0000 = 256 }; /* where hipDeviceProp_t has totalGlobalMem */

/* ---- devices ---- */

static bool identify(int ordinal, int *device)
{
    char pci[32] = "";
    if (VENDOR(hipDeviceGetPCIBusId, pci, (int)sizeof pci, ordinal) != SUCCESS)
        return false;
    *device = limit_device(NULL, pci, NULL);
    return true;
}

/* Something that is the device's own. */
static const void *owner_of(int ordinal)
{
    struct limit_session *session = limit_session();
    return session && ordinal < LIMIT_ORDINALS ? &session->ordinals[ORDINALS][ordinal] : NULL;
}

/* A context that was there before us is charged late, as far as there is room. */
static bool enter(int *ordinal)
{
    *ordinal = -1;
    if (!limit_outside() || VENDOR(hipGetDevice, ordinal) != SUCCESS)
        return true; /* HIP itself says why */
    struct limit_session *session = limit_session();
    int device = device_of(*ordinal);
    if (!session || device < 0)
        return device == LIMIT_NO_LIMIT || device == LIMIT_NO_DEVICE;
    if (__atomic_load_n(&session->opened[device], __ATOMIC_RELAXED))
        return true;
    pthread_mutex_lock(&session->contexts);
    bool done = session->opened[device] || limit_driver_open_context(&driver, device);
    __atomic_store_n(&session->opened[device], done, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&session->contexts);
    return done;
}

static int stream_ordinal(void *stream, int current)
{
    int ordinal;
    return VENDOR(hipStreamGetDevice, stream, &ordinal) == SUCCESS ? ordinal : current;
}

HOOK(hipDeviceReset, void)
{
    struct limit_session *session = limit_program_session();
    int ordinal;
    int result = VENDOR(hipDeviceReset);
    if (!session || result != SUCCESS || VENDOR(hipGetDevice, &ordinal) != SUCCESS || device_of(ordinal) < 0)
        return result;
    limit_drop_owner(&driver, session, owner_of(ordinal));
    limit_settle_pools(&driver, session);
    pthread_mutex_lock(&session->contexts);
    if (session->opened[device_of(ordinal)])
        limit_close_context(device_of(ordinal));
    session->opened[device_of(ordinal)] = false;
    pthread_mutex_unlock(&session->contexts);
    return result;
}

/* Calls that charge nothing themselves, but bring the context. */
HOOK(hipHostMalloc, void **memory, size_t size, unsigned flags)
{
    int ordinal;
    return enter(&ordinal) ? VENDOR(hipHostMalloc, memory, size, flags) : OUT_OF_MEMORY;
}

HOOK(hipMemcpy, void *to, const void *from, size_t size, int kind)
{
    int ordinal;
    return enter(&ordinal) ? VENDOR(hipMemcpy, to, from, size, kind) : OUT_OF_MEMORY;
}

HOOK(hipMemcpyAsync, void *to, const void *from, size_t size, int kind, void *stream)
{
    int ordinal;
    return enter(&ordinal) ? VENDOR(hipMemcpyAsync, to, from, size, kind, stream) : OUT_OF_MEMORY;
}

HOOK(hipMemset, void *to, int value, size_t size)
{
    int ordinal;
    return enter(&ordinal) ? VENDOR(hipMemset, to, value, size) : OUT_OF_MEMORY;
}

HOOK(hipMemsetAsync, void *to, int value, size_t size, void *stream)
{
    int ordinal;
    return enter(&ordinal) ? VENDOR(hipMemsetAsync, to, value, size, stream) : OUT_OF_MEMORY;
}

/* ---- look-up ---- */

HOOK(hipGetProcAddress, const char *symbol, void **function, int version, uint64_t flags, void *status)
{
    return replaced(VENDOR(hipGetProcAddress, symbol, function, version, flags, status), symbol, function, version,
                    flags);
}

/* These name the form itself. */
HOOK(hipGetDriverEntryPoint, const char *symbol, void **function, unsigned long long flags, int *status)
{
    return replaced(VENDOR(hipGetDriverEntryPoint, symbol, function, flags, status), symbol, function, 0, flags);
}

HOOK(hipGetDriverEntryPoint_spt, const char *symbol, void **function, unsigned long long flags, int *status)
{
    return replaced(VENDOR(hipGetDriverEntryPoint_spt, symbol, function, flags, status), symbol, function, 0,
                    flags ? flags : PER_THREAD);
}

/* ---- memory ---- */

HOOK(hipMalloc, device_address *memory, size_t size)
{
    ALLOCATE(memory, size, VENDOR(hipMalloc, memory, size), spill(memory, size, ordinal));
}

HOOK(hipExtMallocWithFlags, device_address *memory, size_t size, unsigned flags)
{
    ALLOCATE(memory, size, VENDOR(hipExtMallocWithFlags, memory, size, flags), OUT_OF_MEMORY);
}

HOOK(hipMallocManaged, device_address *memory, size_t size, unsigned flags)
{
    ALLOCATE(memory, size, VENDOR(hipMallocManaged, memory, size, flags), spill(memory, size, ordinal));
}

/* Rows are padded to 128 bytes or more. */
static size_t padded(size_t width, size_t height, size_t depth)
{
    enum { PITCH = 128 };
    size_t size = 0, row = width <= SIZE_MAX - PITCH ? (width + PITCH - 1) / PITCH * PITCH : SIZE_MAX;
    if (__builtin_mul_overflow(row, height, &size) || __builtin_mul_overflow(size, depth, &size))
        size = SIZE_MAX / 2;
    return size;
}

HOOK(hipMallocPitch, device_address *memory, size_t *pitch, size_t width, size_t height)
{
    size_t size = padded(width, height, 1);
    ALLOCATE(memory, size, VENDOR(hipMallocPitch, memory, pitch, width, height), OUT_OF_MEMORY);
}

HOOK(hipMemAllocPitch, device_address *memory, size_t *pitch, size_t width, size_t height, unsigned element)
{
    size_t size = padded(width, height, 1);
    ALLOCATE(memory, size, VENDOR(hipMemAllocPitch, memory, pitch, width, height, element), OUT_OF_MEMORY);
}

HOOK(hipMalloc3D, struct pitched_memory *memory, struct extent extent)
{
    size_t size = padded(extent.width, extent.height, extent.depth);
    device_address *address = memory ? &memory->address : NULL;
    ALLOCATE(address, size, VENDOR(hipMalloc3D, memory, extent), OUT_OF_MEMORY);
}

HOOK(hipFree, device_address memory)
{
    FORGET(memory, VENDOR(hipFree, memory));
}

/* ---- arrays ---- */

enum { LAYERED = 1 };

static uint64_t texel_bytes(const struct channels *bits)
{
    return bits && bits->x >= 0 && bits->y >= 0 && bits->z >= 0 && bits->w >= 0
               ? ((uint64_t)bits->x + (uint64_t)bits->y + (uint64_t)bits->z + (uint64_t)bits->w) / 8
               : 0;
}

HOOK(hipMallocArray, void **array, const struct channels *texel, size_t width, size_t height, unsigned flags)
{
    uint64_t size = limit_array_bytes((struct extent){width, height, 0}, 1, false, texel_bytes(texel));
    ALLOCATE(array, size, VENDOR(hipMallocArray, array, texel, width, height, flags), OUT_OF_MEMORY);
}

HOOK(hipMalloc3DArray, void **array, const struct channels *texel, struct extent extent, unsigned flags)
{
    uint64_t size = limit_array_bytes(extent, 1, false, texel_bytes(texel));
    ALLOCATE(array, size, VENDOR(hipMalloc3DArray, array, texel, extent, flags), OUT_OF_MEMORY);
}

HOOK(hipArrayCreate, void **array, const struct array_2d *what)
{
    uint64_t size = limit_array_2d_bytes(what);
    ALLOCATE(array, size, VENDOR(hipArrayCreate, array, what), OUT_OF_MEMORY);
}

HOOK(hipArray3DCreate, void **array, const struct array_3d *what)
{
    uint64_t size = limit_array_3d_bytes(what, 1);
    ALLOCATE(array, size, VENDOR(hipArray3DCreate, array, what), OUT_OF_MEMORY);
}

HOOK(hipMallocMipmappedArray, void **array, const struct channels *texel, struct extent extent, unsigned levels,
     unsigned flags)
{
    uint64_t size = limit_array_bytes(extent, levels, (flags & LAYERED) != 0, texel_bytes(texel));
    ALLOCATE(array, size, VENDOR(hipMallocMipmappedArray, array, texel, extent, levels, flags), OUT_OF_MEMORY);
}

HOOK(hipMipmappedArrayCreate, void **array, const struct array_3d *what, unsigned levels)
{
    uint64_t size = limit_array_3d_bytes(what, levels);
    ALLOCATE(array, size, VENDOR(hipMipmappedArrayCreate, array, what, levels), OUT_OF_MEMORY);
}

#define FREE_ARRAY(NAME)                                                                                               \
    HOOK(NAME, void *array)                                                                                            \
    {                                                                                                                  \
        FORGET(array, VENDOR(NAME, array));                                                                            \
    }

FREE_ARRAY(hipFreeArray)
FREE_ARRAY(hipArrayDestroy)
FREE_ARRAY(hipFreeMipmappedArray)
FREE_ARRAY(hipMipmappedArrayDestroy)

/* ---- pools ---- */

FROM_STREAM(hipMallocAsync)
FROM_STREAM(hipMallocAsync_spt)
FROM_POOL(hipMallocFromPoolAsync)
FROM_POOL(hipMallocFromPoolAsync_spt)
FREED_IN_STREAM(hipFreeAsync)
FREED_IN_STREAM(hipFreeAsync_spt)
MAY_SHRINK(hipStreamSynchronize_spt, void *stream, stream)
MAY_SHRINK(hipDeviceSynchronize, void, )

/* ---- graphs ---- */

#define LAUNCH(NAME)                                                                                                   \
    HOOK(NAME, void *executable, void *stream)                                                                         \
    {                                                                                                                  \
        int ordinal;                                                                                                   \
        return enter(&ordinal) ? launch(CALL_OF(NAME), executable, stream) : OUT_OF_MEMORY;                            \
    }

LAUNCH(hipGraphLaunch)
LAUNCH(hipGraphLaunch_spt)
LAUNCH(hipGraphUpload)

/* ---- queries ---- */

HOOK(hipMemGetInfo, size_t *free_bytes, size_t *total)
{
    int ordinal;
    size_t left, all;
    if (!enter(&ordinal))
        return OUT_OF_MEMORY;
    if (!limit_outside())
        return VENDOR(hipMemGetInfo, free_bytes, total);
    int result = VENDOR(hipMemGetInfo, &left, &all);
    if (result == SUCCESS) {
        limit_pools_may_have_shrunk(&driver);
        limit_narrow(device_of(ordinal), &left, &all);
        if (free_bytes)
            *free_bytes = left;
        if (total)
            *total = all;
    }
    return result;
}

HOOK(hipDeviceTotalMem, size_t *bytes, int ordinal)
{
    int result = VENDOR(hipDeviceTotalMem, bytes, ordinal);
    if (result == SUCCESS && limit_outside())
        limit_narrow(device_of(ordinal), NULL, bytes);
    return result;
}

static int narrowed(int result, void *properties, size_t place, int ordinal)
{
    size_t bytes;
    if (result == SUCCESS && limit_outside()) {
        memcpy(&bytes, (char *)properties + place, sizeof bytes);
        limit_narrow(device_of(ordinal), NULL, &bytes);
        memcpy((char *)properties + place, &bytes, sizeof bytes);
    }
    return result;
}

HOOK(hipGetDeviceProperties, void *properties, int ordinal)
{
    return narrowed(VENDOR(hipGetDeviceProperties, properties, ordinal), properties, TOTAL_IN_R0000, ordinal);
}

HOOK(hipGetDevicePropertiesR0000, void *properties, int ordinal)
{
    return narrowed(VENDOR(hipGetDevicePropertiesR0000, properties, ordinal), properties, TOTAL_IN_R0000, ordinal);
}

HOOK(hipGetDevicePropertiesR0600, void *properties, int ordinal)
{
    return narrowed(VENDOR(hipGetDevicePropertiesR0600, properties, ordinal), properties, TOTAL_IN_R0600, ordinal);
}

/* ---- the table ---- */

static struct limit_call calls[CALLS] = {WRAPPED(LIMIT_ROW) NEEDED(LIMIT_ROW_NEEDED)};
static const char *const sonames[] = {"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5",
                                      NULL};
struct limit_library limit_hip = {.sonames = sonames, .calls = calls, .count = CALLS};
