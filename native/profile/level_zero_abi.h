/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of Level Zero that profiles use, with its loader's tracing layer, from the public specification: no header of
 * Intel's is needed to build it. level_zero_abi_check.c compares it with the headers of libze-dev.
 */
#ifndef SLUICE_LEVEL_ZERO_ABI_H
#define SLUICE_LEVEL_ZERO_ABI_H

#include <stddef.h>
#include <stdint.h>

enum {
    ZE_OK = 0,
    ZE_NOT_READY = 1,
    ZE_NOT_INITIALIZED = 0x78000001,
    ZE_NOT_SUPPORTED = 0x78000003,
    ZE_BAD_ARGUMENT = 0x78000004,
};

enum ze_type { /* ze_structure_type_t, zel_structure_type_t */
               ZE_TYPE_TRACER = 1,
               ZE_TYPE_MEMORY = 7,
               ZE_TYPE_EVENT_POOL = 0x10,
               ZE_TYPE_EVENT = 0x11,
               ZE_TYPE_HOST_MEMORY = 0x16,
               ZE_TYPE_ALLOCATION = 0x17,
               ZE_TYPE_DEVICE_1_2 = 0x20006, /* its timer's resolution is in cycles a second */
};

enum { ZE_POOL_HOST_VISIBLE = 1, ZE_POOL_TIMESTAMPS = 4 }; /* ze_event_pool_flag_t */
enum { ZE_SCOPE_HOST = 4 };
enum { ZE_IN_HOST = 1, ZE_IN_DEVICE = 2, ZE_IN_SHARED = 3 }; /* ze_memory_type_t */
enum { ZE_PROLOGUE = 0, ZE_EPILOGUE = 1 };

typedef void *ze_handle;

struct ze_group_count {
    uint32_t x, y, z;
};

struct ze_event_pool {
    uint32_t type;
    const void *next;
    uint32_t flags, count;
};

struct ze_event {
    uint32_t type;
    const void *next;
    uint32_t index, signal, wait;
};

struct ze_span {
    uint64_t start, end; /* cycles */
};

struct ze_times {
    struct ze_span global, context;
};

struct ze_device {
    uint32_t type;
    void *next;
    uint32_t kind, vendor, id, flags, subdevice, clock;
    uint64_t largest_allocation;
    uint32_t contexts, priorities, threads, simd, units, subslices, slices;
    uint64_t timer;
    uint32_t timestamp_bits, kernel_timestamp_bits;
    uint8_t uuid[16];
    char name[256];
};

struct ze_memory {
    uint32_t type;
    void *next;
    uint32_t flags, clock, width;
    uint64_t bytes;
    char name[256];
};

struct ze_host_memory {
    uint32_t type;
    const void *next;
    uint32_t flags;
};

struct ze_allocation {
    uint32_t type;
    void *next;
    uint32_t kind;
    uint64_t id, page;
};

struct ze_tracer {
    uint32_t type;
    const void *next;
    void *user;
};

/* ---- parameters of traced calls: where each argument is, which a prologue may change ---- */

struct ze_launch {
    ze_handle *list, *kernel;
    const struct ze_group_count **groups;
    ze_handle *signal;
    uint32_t *wait_count;
    ze_handle **waits;
};

struct ze_copy {
    ze_handle *list;
    void **to;
    const void **from;
    size_t *bytes;
    ze_handle *signal;
    uint32_t *wait_count;
    ze_handle **waits;
};

struct ze_fill {
    ze_handle *list;
    void **to;
    const void **pattern;
    size_t *pattern_bytes, *bytes;
    ze_handle *signal;
    uint32_t *wait_count;
    ze_handle **waits;
};

struct ze_execute {
    ze_handle *queue;
    uint32_t *count;
    ze_handle **lists;
    ze_handle *fence;
};

struct ze_create_list {
    ze_handle *context, *device;
    const void **how;
    ze_handle **list;
};

struct ze_one { /* calls with a handle and perhaps more: a list is reset, a queue waited for */
    ze_handle *handle;
};

struct ze_group_size {
    ze_handle *kernel;
    uint32_t *x, *y, *z;
};

struct ze_alloc_device {
    ze_handle *context;
    const void **how;
    size_t *bytes, *alignment;
    ze_handle *device;
    void ***memory;
};

struct ze_alloc_shared {
    ze_handle *context;
    const void **how, **how_host;
    size_t *bytes, *alignment;
    ze_handle *device;
    void ***memory;
};

struct ze_alloc_host {
    ze_handle *context;
    const void **how;
    size_t *bytes, *alignment;
    void ***memory;
};

struct ze_free {
    ze_handle *context;
    void **memory;
};

/* `kept`: what the prologue of the same call left there. */
typedef void ze_callback(void *parameters, uint32_t result, void *user, void **kept);

/* CALL(name, parameters): each returns ze_result_t. */
#define ZE_CALLS(CALL)                                                                                                 \
    CALL(zelTracerCreate, (const struct ze_tracer *how, ze_handle *tracer))                                            \
    CALL(zelTracerDestroy, (ze_handle tracer))                                                                         \
    CALL(zelTracerSetEnabled, (ze_handle tracer, uint8_t enable))                                                      \
    CALL(zeDriverGet, (uint32_t * count, ze_handle * drivers))                                                         \
    CALL(zeDeviceGet, (ze_handle driver, uint32_t * count, ze_handle * devices))                                       \
    CALL(zeDeviceGetProperties, (ze_handle device, struct ze_device * properties))                                     \
    CALL(zeDeviceGetMemoryProperties, (ze_handle device, uint32_t * count, struct ze_memory * memories))               \
    CALL(zeDeviceGetGlobalTimestamps, (ze_handle device, uint64_t * host, uint64_t * cycles))                          \
    CALL(zeDeviceGetRootDevice, (ze_handle device, ze_handle * root))                                                  \
    CALL(zeEventPoolCreate,                                                                                            \
         (ze_handle context, const struct ze_event_pool *how, uint32_t count, ze_handle *devices, ze_handle *pool))    \
    CALL(zeEventPoolDestroy, (ze_handle pool))                                                                         \
    CALL(zeEventCreate, (ze_handle pool, const struct ze_event *how, ze_handle *event))                                \
    CALL(zeEventDestroy, (ze_handle event))                                                                            \
    CALL(zeEventHostReset, (ze_handle event))                                                                          \
    CALL(zeEventQueryStatus, (ze_handle event))                                                                        \
    CALL(zeEventQueryKernelTimestamp, (ze_handle event, struct ze_times * times))                                      \
    CALL(zeEventGetEventPool, (ze_handle event, ze_handle * pool))                                                     \
    CALL(zeEventPoolGetFlags, (ze_handle pool, uint32_t * flags))                                                      \
    CALL(zeKernelGetName, (ze_handle kernel, size_t * size, char *name))                                               \
    CALL(zeCommandListGetDeviceHandle, (ze_handle list, ze_handle * device))                                           \
    CALL(zeCommandListGetContextHandle, (ze_handle list, ze_handle * context))                                         \
    CALL(zeCommandListIsImmediate, (ze_handle list, uint8_t * immediate))                                              \
    CALL(zeCommandListAppendBarrier, (ze_handle list, ze_handle signal, uint32_t wait_count, ze_handle * waits))       \
    CALL(zeCommandListAppendQueryKernelTimestamps,                                                                     \
         (ze_handle list, uint32_t count, ze_handle * events, void *times, const size_t *offsets, ze_handle signal,    \
          uint32_t wait_count, ze_handle *waits))                                                                      \
    CALL(zeMemAllocHost,                                                                                               \
         (ze_handle context, const struct ze_host_memory *how, size_t bytes, size_t alignment, void **memory))         \
    CALL(zeMemFree, (ze_handle context, void *memory))                                                                 \
    CALL(zeMemGetAddressRange, (ze_handle context, const void *memory, void **base, size_t *bytes))                    \
    CALL(zeMemGetAllocProperties,                                                                                      \
         (ze_handle context, const void *memory, struct ze_allocation *properties, ze_handle *device))

/* zelTracerThisRegisterCallback, for each zeThis that is traced. */
typedef uint32_t ze_register(ze_handle tracer, uint32_t when, ze_callback *callback);

#endif
