/* SPDX-License-Identifier: Apache-2.0 */
/*
 * OpenCL's memory objects and shared virtual memory. An object is charged on every device of its context that the job
 * is limited on, as a driver may place it on any, and until the implementation itself destroys it (a destructor
 * callback: it alone knows who still uses it). A CPU is limited only where the region names it.
 */
#include "hook.h"
#include "session.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int cl_int;
typedef unsigned cl_uint;
typedef uint64_t cl_ulong;
typedef void *cl_context, *cl_mem, *cl_device_id, *cl_platform_id, *cl_queue, *cl_event;

enum {
    CL_OUT_OF_RESOURCES = -5,
    CL_MEM_OBJECT_ALLOCATION_FAILURE = -4,
    CL_INVALID_PLATFORM = -32,
    CL_DEVICE_TYPE = 0x1000,
    CL_DEVICE_VENDOR_ID = 0x1001,
    CL_DEVICE_MAX_MEM_ALLOC_SIZE = 0x1010,
    CL_DEVICE_GLOBAL_MEM_SIZE = 0x101F,
    CL_DEVICE_NAME = 0x102B,
    CL_DEVICE_UUID_KHR = 0x106A,
    CL_DEVICE_PCI_BUS_INFO_KHR = 0x410F,
    CL_DEVICE_TOPOLOGY_AMD = 0x4037,
    CL_DEVICE_GLOBAL_FREE_MEMORY_AMD = 0x4039,
    CL_CONTEXT_DEVICES = 0x1081,
};

typedef struct {
    cl_uint order, type;
} cl_image_format;

typedef struct {
    cl_uint type;
    size_t width, height, depth, array_size, row_pitch, slice_pitch;
    cl_uint mip_levels, samples;
    cl_mem object; /* whose memory it is */
} cl_image_desc;

#define HOOK(TYPE, NAME, ...) LIMIT_EXPORT TYPE NAME(__VA_ARGS__)

#define WRAPPED(CALL)                                                                                                  \
    CALL(clGetExtensionFunctionAddress)                                                                                \
    CALL(clGetExtensionFunctionAddressForPlatform)                                                                     \
    CALL(clCreateContext)                                                                                              \
    CALL(clCreateContextFromType)                                                                                      \
    CALL(clCreateBuffer)                                                                                               \
    CALL(clCreateBufferWithProperties)                                                                                 \
    CALL(clCreateImage)                                                                                                \
    CALL(clCreateImageWithProperties)                                                                                  \
    CALL(clCreateImage2D)                                                                                              \
    CALL(clCreateImage3D)                                                                                              \
    CALL(clCreatePipe)                                                                                                 \
    CALL(clSVMAlloc)                                                                                                   \
    CALL(clSVMFree)                                                                                                    \
    CALL(clEnqueueSVMFree)                                                                                             \
    CALL(clGetDeviceInfo)

#define NEEDED(CALL)                                                                                                   \
    CALL(clGetContextInfo, cl_context, cl_uint, size_t, void *, size_t *)                                              \
    CALL(clReleaseContext, cl_context)                                                                                 \
    CALL(clReleaseEvent, cl_event)                                                                                     \
    CALL(clSetEventCallback, cl_event, cl_int, void (*)(cl_event, cl_int, void *), void *)                             \
    CALL(clSetMemObjectDestructorCallback, cl_mem, void (*)(cl_mem, void *), void *)

enum { WRAPPED(LIMIT_NUMBER) NEEDED(LIMIT_NUMBER) CALLS };
static struct limit_call calls[CALLS];
NEEDED(LIMIT_DECLARE)

static cl_int absent(void)
{
    return CL_INVALID_PLATFORM;
}

static void *absent_object(void)
{
    return NULL;
}

#define FUNCTION_OF(NAME, ABSENT)                                                                                      \
    ((__typeof__(&NAME))limit_function_of(&limit_opencl, &calls[CALL_##NAME], (limit_function *)(ABSENT)))
/* The vendor's function, of those that answer with a number, and of those that answer with an object. */
#define VENDOR(NAME, ...) LIMIT_IN(FUNCTION_OF(NAME, absent)(__VA_ARGS__))
#define VENDOR_OBJECT(NAME, ...) LIMIT_IN(FUNCTION_OF(NAME, absent_object)(__VA_ARGS__))

HOOK(cl_int, clGetDeviceInfo, cl_device_id, cl_uint, size_t, void *, size_t *);

/* ---- devices ---- */

static bool info(cl_device_id device, cl_uint what, void *value, size_t size)
{
    return VENDOR(clGetDeviceInfo, device, what, size, value, NULL) == 0;
}

static bool pci_of(cl_device_id device, char text[32])
{
    struct {
        cl_uint domain, bus, device, function;
    } khronos;
    struct {
        cl_uint type;
        unsigned char unused[17], bus, device, function;
    } amd;
    if (info(device, CL_DEVICE_PCI_BUS_INFO_KHR, &khronos, sizeof khronos))
        return snprintf(text, 32, "%04x:%02x:%02x.%x", khronos.domain & 0xffff, khronos.bus & 0xff,
                        khronos.device & 0xff, khronos.function & 0xf) > 0;
    if (info(device, CL_DEVICE_TOPOLOGY_AMD, &amd, sizeof amd))
        return snprintf(text, 32, "0000:%02x:%02x.%x", amd.bus, amd.device, amd.function & 0xfu) > 0;
    return false;
}

static int find_device(cl_device_id device)
{
    enum { CPU = 2 };
    unsigned char uuid[16];
    char pci[32], name[SLUICE_LIMIT_NAME_SIZE] = "";
    cl_ulong type = 0;
    info(device, CL_DEVICE_TYPE, &type, sizeof type);
    info(device, CL_DEVICE_NAME, name, sizeof name - 1);
    bool has_uuid = info(device, CL_DEVICE_UUID_KHR, uuid, sizeof uuid), has_pci = pci_of(device, pci);
    int found = limit_device(has_uuid ? uuid : NULL, has_pci ? pci : NULL, *name ? name : NULL);
    return found == LIMIT_CLOSED && type == CPU ? LIMIT_NO_LIMIT : found;
}

struct cl_device {
    int device; /* of the ledger */
    uint64_t granule;
};

static struct cl_device device_of(cl_device_id id)
{
    enum { NVIDIA = 0x10de };
    struct limit_session *session = limit_session();
    struct limit_entry entry;
    if (!session)
        return (struct cl_device){.device = find_device(id)};
    if (!limit_table_get(&session->table, LIMIT_CL_DEVICE, (uint64_t)(uintptr_t)id, &entry)) {
        cl_uint vendor = 0;
        info(id, CL_DEVICE_VENDOR_ID, &vendor, sizeof vendor);
        entry = (struct limit_entry){.class = LIMIT_CL_DEVICE,
                                     .key = (uint64_t)(uintptr_t)id,
                                     .device = find_device(id),
                                     .size = vendor == NVIDIA ? 2 << 20 : 4096};
        limit_table_put(&session->table, &entry);
    }
    return (struct cl_device){.device = entry.device, .granule = entry.size};
}

enum { MOST_DEVICES = SLUICE_LIMIT_MAX_DEVICES };

/* A context's devices; how many. */
static size_t devices_of(cl_context context, cl_device_id devices[MOST_DEVICES])
{
    size_t size = 0;
    return VENDOR(clGetContextInfo, context, CL_CONTEXT_DEVICES, MOST_DEVICES * sizeof *devices, devices, &size) == 0
               ? size / sizeof *devices
               : 0;
}

/* ---- what an object holds, on each device ---- */

struct held {
    size_t count;
    struct {
        struct limit_entry entry;
        uint64_t granule;
    } on[MOST_DEVICES];
};

static void give(struct held *held)
{
    for (size_t i = 0; held && i < held->count; i++)
        limit_give_piece(&held->on[i].entry, held->on[i].granule);
    free(held);
}

/* NULL: no room on one of them. */
static struct held *take(cl_context context, uint64_t size)
{
    cl_device_id devices[MOST_DEVICES];
    struct held *held = calloc(1, sizeof *held);
    size_t count = held ? devices_of(context, devices) : 0;
    for (size_t i = 0; i < count; i++) {
        struct cl_device device = device_of(devices[i]);
        if (device.device == LIMIT_NO_LIMIT)
            continue;
        held->on[held->count].granule = device.granule;
        if (size == 0 || !limit_take_piece(device.device, size, device.granule, &held->on[held->count].entry)) {
            give(held);
            return NULL;
        }
        held->count++;
    }
    return held;
}

static void destroyed(cl_mem object, void *held)
{
    (void)object;
    give(held);
}

/* `CREATION` makes an object of SIZE bytes in CONTEXT. */
#define CREATE(CONTEXT, SIZE, ERROR, CREATION)                                                                         \
    do {                                                                                                               \
        uint64_t wanted = (SIZE);                                                                                      \
        if (limit_inside != 0 || wanted == 0)                                                                          \
            return CREATION;                                                                                           \
        struct held *held = take(CONTEXT, wanted);                                                                     \
        if (!held) {                                                                                                   \
            if (ERROR)                                                                                                 \
                *(ERROR) = CL_MEM_OBJECT_ALLOCATION_FAILURE;                                                           \
            return NULL;                                                                                               \
        }                                                                                                              \
        cl_mem made = CREATION;                                                                                        \
        if (!made)                                                                                                     \
            give(held);                                                                                                \
        else                                                                                                           \
            VENDOR(clSetMemObjectDestructorCallback, made, destroyed, held); /* or it stays charged */                 \
        return made;                                                                                                   \
    } while (0)

HOOK(cl_mem, clCreateBuffer, cl_context context, cl_ulong flags, size_t size, void *host, cl_int *error)
{
    CREATE(context, size, error, VENDOR_OBJECT(clCreateBuffer, context, flags, size, host, error));
}

HOOK(cl_mem, clCreateBufferWithProperties, cl_context context, const cl_ulong *properties, cl_ulong flags, size_t size,
     void *host, cl_int *error)
{
    CREATE(context, size, error,
           VENDOR_OBJECT(clCreateBufferWithProperties, context, properties, flags, size, host, error));
}

/* Bytes of a pixel; the widest where one is not known. */
static uint64_t pixel_bytes(const cl_image_format *format)
{
    static const unsigned char channels[] = {1, 1, 2, 2, 3, 4, 4, 4, 1, 1, 2, 3, 4, 1, 2, 3, 4, 4, 4, 4};
    static const unsigned char bytes[] = {1, 2, 1, 2, 0, 0, 0, 1, 2, 4, 1, 2, 4, 2, 4};
    enum { FIRST_ORDER = 0x10B0, FIRST_TYPE = 0x10D0 };
    cl_uint order = format->order - FIRST_ORDER, type = format->type - FIRST_TYPE;
    uint64_t wide = order < sizeof channels ? channels[order] : 4;
    if (type < sizeof bytes && bytes[type] == 0)
        return 4; /* packed: 565, 555, 101010 */
    return wide * (type < sizeof bytes ? bytes[type] : 4);
}

static uint64_t image_bytes(const cl_image_format *format, uint64_t width, uint64_t height, uint64_t depth,
                            uint64_t layers)
{
    enum { MAX_SIDE = 1 << 24 };
    uint64_t bytes = format ? pixel_bytes(format) : 0;
    const uint64_t sides[] = {width, height, depth, layers};
    for (size_t i = 0; i < sizeof sides / sizeof *sides; i++) {
        uint64_t side = sides[i] ? sides[i] : 1;
        if (side > MAX_SIDE || bytes > (UINT64_C(1) << 50) / side)
            return UINT64_C(1) << 50;
        bytes *= side;
    }
    return bytes;
}

static uint64_t described(const cl_image_format *format, const cl_image_desc *what)
{
    if (!what || what->object)
        return 0; /* of a buffer's memory, or refused by the vendor */
    uint64_t bytes = image_bytes(format, what->width, what->height, what->depth, what->array_size);
    return what->mip_levels > 1 ? bytes / 3 * 4 + bytes % 3 + 64 : bytes; /* 1 + 1/4 + 1/16 + ... */
}

HOOK(cl_mem, clCreateImage, cl_context context, cl_ulong flags, const cl_image_format *format,
     const cl_image_desc *what, void *host, cl_int *error)
{
    CREATE(context, described(format, what), error,
           VENDOR_OBJECT(clCreateImage, context, flags, format, what, host, error));
}

HOOK(cl_mem, clCreateImageWithProperties, cl_context context, const cl_ulong *properties, cl_ulong flags,
     const cl_image_format *format, const cl_image_desc *what, void *host, cl_int *error)
{
    CREATE(context, described(format, what), error,
           VENDOR_OBJECT(clCreateImageWithProperties, context, properties, flags, format, what, host, error));
}

HOOK(cl_mem, clCreateImage2D, cl_context context, cl_ulong flags, const cl_image_format *format, size_t width,
     size_t height, size_t pitch, void *host, cl_int *error)
{
    CREATE(context, image_bytes(format, width, height, 1, 1), error,
           VENDOR_OBJECT(clCreateImage2D, context, flags, format, width, height, pitch, host, error));
}

HOOK(cl_mem, clCreateImage3D, cl_context context, cl_ulong flags, const cl_image_format *format, size_t width,
     size_t height, size_t depth, size_t pitch, size_t slice, void *host, cl_int *error)
{
    CREATE(context, image_bytes(format, width, height, depth, 1), error,
           VENDOR_OBJECT(clCreateImage3D, context, flags, format, width, height, depth, pitch, slice, host, error));
}

HOOK(cl_mem, clCreatePipe, cl_context context, cl_ulong flags, cl_uint packet, cl_uint packets,
     const intptr_t *properties, cl_int *error)
{
    CREATE(context, (uint64_t)packet * packets, error,
           VENDOR_OBJECT(clCreatePipe, context, flags, packet, packets, properties, error));
}

/* ---- shared virtual memory ---- */

HOOK(void *, clSVMAlloc, cl_context context, cl_ulong flags, size_t size, cl_uint alignment)
{
    struct limit_session *session = limit_inside == 0 && size > 0 ? limit_session() : NULL;
    if (limit_inside != 0 || size == 0)
        return VENDOR_OBJECT(clSVMAlloc, context, flags, size, alignment);
    struct held *held = take(context, size);
    void *made = held ? VENDOR_OBJECT(clSVMAlloc, context, flags, size, alignment) : NULL;
    struct limit_entry entry = {
        .class = LIMIT_CL_SVM, .key = (uint64_t)(uintptr_t)made, .link = (uint64_t)(uintptr_t)held};
    if (!made)
        give(held);
    else if (session)
        limit_table_put(&session->table, &entry);
    return made;
}

static struct held *forget_svm(void *address)
{
    struct limit_session *session = limit_inside == 0 ? limit_session() : NULL;
    struct limit_entry entry;
    return session && limit_table_take(&session->table, LIMIT_CL_SVM, (uint64_t)(uintptr_t)address, &entry)
               ? (struct held *)(uintptr_t)entry.link
               : NULL;
}

HOOK(void, clSVMFree, cl_context context, void *address)
{
    struct held *held = forget_svm(address);
    limit_inside++;
    FUNCTION_OF(clSVMFree, absent)(context, address);
    limit_inside--;
    give(held);
}

struct late {
    cl_uint count;
    struct held *held[];
};

static void freed_late(cl_event event, cl_int status, void *argument)
{
    struct late *late = argument;
    (void)event;
    (void)status;
    for (cl_uint i = 0; i < late->count; i++)
        give(late->held[i]);
    free(late);
}

/* Freed when the queue comes to it; a program with a callback of its own frees in there, by clSVMFree. */
HOOK(cl_int, clEnqueueSVMFree, cl_queue queue, cl_uint count, void *addresses[],
     void (*callback)(cl_queue, cl_uint, void *[], void *), void *data, cl_uint waits, const cl_event *wait,
     cl_event *event)
{
    cl_event created = NULL;
    struct late *late =
        !callback && limit_inside == 0 && addresses ? calloc(1, sizeof *late + count * sizeof(void *)) : NULL;
    cl_int result = VENDOR(clEnqueueSVMFree, queue, count, addresses, callback, data, waits, wait,
                           event || !late ? event : &created);
    if (late && result == 0) {
        cl_event done = event ? *event : created;
        for (cl_uint i = 0; i < count; i++)
            late->held[late->count++] = forget_svm(addresses[i]);
        if (VENDOR(clSetEventCallback, done, 0, freed_late, late) != 0)
            freed_late(done, 0, late);
    } else {
        free(late);
    }
    if (created)
        VENDOR(clReleaseEvent, created);
    return result;
}

/* ---- contexts: their cost on a device is charged with the first ---- */

static bool open_device(cl_device_id id)
{
    struct limit_session *session = limit_session();
    int device = device_of(id).device;
    if (device == LIMIT_NO_LIMIT)
        return true;
    if (!session || device < 0)
        return false;
    pthread_mutex_lock(&session->contexts);
    bool done = session->opened[device] || limit_open_context(device);
    session->opened[device] = done;
    pthread_mutex_unlock(&session->contexts);
    return done;
}

HOOK(cl_context, clCreateContext, const intptr_t *properties, cl_uint count, const cl_device_id *devices,
     void (*notify)(const char *, const void *, size_t, void *), void *data, cl_int *error)
{
    for (cl_uint i = 0; limit_inside == 0 && devices && i < count; i++)
        if (!open_device(devices[i])) {
            if (error)
                *error = CL_OUT_OF_RESOURCES;
            return NULL;
        }
    return VENDOR_OBJECT(clCreateContext, properties, count, devices, notify, data, error);
}

HOOK(cl_context, clCreateContextFromType, const intptr_t *properties, cl_ulong type,
     void (*notify)(const char *, const void *, size_t, void *), void *data, cl_int *error)
{
    cl_context made = VENDOR_OBJECT(clCreateContextFromType, properties, type, notify, data, error);
    cl_device_id devices[MOST_DEVICES];
    size_t count = made && limit_inside == 0 ? devices_of(made, devices) : 0;
    for (size_t i = 0; i < count; i++)
        if (!open_device(devices[i])) {
            VENDOR(clReleaseContext, made);
            if (error)
                *error = CL_OUT_OF_RESOURCES;
            return NULL;
        }
    return made;
}

/* ---- queries and look-up ---- */

HOOK(cl_int, clGetDeviceInfo, cl_device_id id, cl_uint what, size_t size, void *value, size_t *needed)
{
    cl_int result = VENDOR(clGetDeviceInfo, id, what, size, value, needed);
    bool memory = what == CL_DEVICE_GLOBAL_MEM_SIZE || what == CL_DEVICE_MAX_MEM_ALLOC_SIZE ||
                  what == CL_DEVICE_GLOBAL_FREE_MEMORY_AMD;
    if (result != 0 || !memory || !value || size < sizeof(cl_ulong) || limit_inside != 0)
        return result;
    int device = device_of(id).device;
    cl_ulong bytes;
    size_t left, total;
    memcpy(&bytes, value, sizeof bytes);
    left = total = what == CL_DEVICE_GLOBAL_FREE_MEMORY_AMD ? bytes * 1024 : bytes; /* AMD's are in KiB */
    limit_narrow(device, &left, &total);
    bytes = what == CL_DEVICE_GLOBAL_FREE_MEMORY_AMD ? left / 1024 : total;
    memcpy(value, &bytes, sizeof bytes);
    if (what == CL_DEVICE_GLOBAL_FREE_MEMORY_AMD && size >= 2 * sizeof bytes) /* and the largest piece of it */
        memcpy((char *)value + sizeof bytes, &bytes, sizeof bytes);
    return result;
}

HOOK(void *, clGetExtensionFunctionAddress, const char *name)
{
    void *found = VENDOR_OBJECT(clGetExtensionFunctionAddress, name);
    struct limit_call *call = found ? limit_find_call(&limit_opencl, name) : NULL;
    return call ? limit_replace(call, found) : found;
}

HOOK(void *, clGetExtensionFunctionAddressForPlatform, cl_platform_id platform, const char *name)
{
    void *found = VENDOR_OBJECT(clGetExtensionFunctionAddressForPlatform, platform, name);
    struct limit_call *call = found ? limit_find_call(&limit_opencl, name) : NULL;
    return call ? limit_replace(call, found) : found;
}

static struct limit_call calls[CALLS] = {WRAPPED(LIMIT_ROW) NEEDED(LIMIT_ROW_NEEDED)};
static const char *const sonames[] = {"libOpenCL.so.1", NULL};
struct limit_library limit_opencl = {.sonames = sonames, .calls = calls, .count = CALLS};
