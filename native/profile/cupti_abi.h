/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of CUPTI that profiles use, from NVIDIA's public documentation: no header of NVIDIA's is needed to build it.
 * Records of all versions since CUDA 11 begin like these; newer versions append. cupti_abi_check.c compares all of it
 * with the headers of the wheels of CUDA 12 and 13.
 */
#ifndef SLUICE_CUPTI_ABI_H
#define SLUICE_CUPTI_ABI_H

#include <stddef.h>
#include <stdint.h>

enum { CUPTI_OK = 0, CUPTI_NO_MORE = 12, CUPTI_OCCUPIED = 39 }; /* CUPTI_SUCCESS, _MAX_LIMIT_REACHED, _MULTIPLE_... */

enum cupti_kind { /* CUpti_ActivityKind */
                  CUPTI_MEMCPY = 1,
                  CUPTI_MEMSET = 2,
                  CUPTI_DRIVER = 4,
                  CUPTI_RUNTIME = 5,
                  CUPTI_KERNEL = 10, /* _CONCURRENT_KERNEL; _KERNEL would run them one after the other */
                  CUPTI_MEMCPY2 = 22,
                  CUPTI_SYNCHRONIZATION = 38,
                  CUPTI_MEMORY2 = 49,
};

enum { CUPTI_FLUSH_FORCED = 1 };
enum { CUPTI_DRIVER_API = 1, CUPTI_RUNTIME_API = 2 };       /* CUpti_CallbackDomain */
enum { CUPTI_ENTER = 0, CUPTI_EXIT = 1 };                   /* CUpti_ApiCallbackSite */
enum { CUPTI_MEMORY_RELEASE = 2 };                          /* CUpti_ActivityMemoryOperationType */
enum { CUPTI_MEMORY_STATIC = 6, CUPTI_MANAGED_STATIC = 7 }; /* CUpti_ActivityMemoryKind; those before are a profile's */

enum cupti_launch { /* CUpti_driver_api_trace_cbid, CUpti_runtime_api_trace_cbid */
                    CUPTI_DRIVER_LAUNCH = 307,
                    CUPTI_DRIVER_LAUNCH_PTSZ = 442,
                    CUPTI_DRIVER_LAUNCH_EX = 652,
                    CUPTI_DRIVER_LAUNCH_EX_PTSZ = 653,
                    CUPTI_RUNTIME_LAUNCH = 211,
                    CUPTI_RUNTIME_LAUNCH_PTSZ = 214,
                    CUPTI_RUNTIME_LAUNCH_EX = 430,
                    CUPTI_RUNTIME_LAUNCH_EX_PTSZ = 431,
};

#define CUPTI_RECORD __attribute__((packed, aligned(8)))

struct CUPTI_RECORD cupti_record {
    uint32_t kind;
};

struct CUPTI_RECORD cupti_kernel { /* CUpti_ActivityKernel4 and later */
    uint32_t kind;
    uint8_t cache_config, shared_config;
    uint16_t registers;
    uint32_t cache_requested, cache_executed;
    uint64_t start, end, completed;
    uint32_t device, context, stream;
    int32_t grid[3], block[3];
    int32_t static_shared, dynamic_shared;
    uint32_t local_per_thread, local_total, correlation;
    int64_t grid_id;
    const char *name;
};

struct CUPTI_RECORD cupti_memcpy { /* CUpti_ActivityMemcpy3 and later */
    uint32_t kind;
    uint8_t copy_kind, from, to, flags;
    uint64_t bytes, start, end;
    uint32_t device, context, stream, correlation;
};

struct CUPTI_RECORD cupti_memcpy2 { /* CUpti_ActivityMemcpyPtoP and later: from one device to another */
    uint32_t kind;
    uint8_t copy_kind, from, to, flags;
    uint64_t bytes, start, end;
    uint32_t device, context, stream;
    uint32_t from_device, from_context, to_device, to_context;
    uint32_t correlation;
};

struct CUPTI_RECORD cupti_memset { /* CUpti_ActivityMemset and later */
    uint32_t kind, value;
    uint64_t bytes, start, end;
    uint32_t device, context, stream, correlation;
    uint16_t flags, memory_kind;
};

struct CUPTI_RECORD cupti_memory { /* CUpti_ActivityMemory2 and later */
    uint32_t kind, operation, memory_kind, correlation;
    uint64_t address, bytes, when, pc;
    uint32_t process, device, context, stream;
};

struct CUPTI_RECORD cupti_synchronization { /* CUpti_ActivitySynchronization and later */
    uint32_t kind, type;
    uint64_t start, end;
    uint32_t correlation, context, stream, event;
};

struct CUPTI_RECORD cupti_api { /* CUpti_ActivityAPI */
    uint32_t kind, function;
    uint64_t start, end;
    uint32_t process, thread, correlation, result;
};

struct cupti_callback_data { /* CUpti_CallbackData */
    uint32_t site;
    const char *function;
    const void *parameters;
    void *result;
    const char *symbol;
    void *context;
    uint32_t context_id;
    uint64_t *kept;
    uint32_t correlation;
};

typedef void cupti_callback(void *user, uint32_t domain, uint32_t function, const struct cupti_callback_data *data);
typedef void cupti_buffer_requested(uint8_t **buffer, size_t *size, size_t *records);
typedef void cupti_buffer_completed(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid);

/* CALL(name, parameters): each returns CUptiResult. */
#define CUPTI_CALLS(CALL)                                                                                              \
    CALL(cuptiSubscribe, (void **subscriber, cupti_callback *callback, void *user))                                    \
    CALL(cuptiUnsubscribe, (void *subscriber))                                                                         \
    CALL(cuptiEnableCallback, (uint32_t enable, void *subscriber, uint32_t domain, uint32_t function))                 \
    CALL(cuptiActivityRegisterCallbacks, (cupti_buffer_requested * requested, cupti_buffer_completed * completed))     \
    CALL(cuptiActivityEnable, (uint32_t kind))                                                                         \
    CALL(cuptiActivityDisable, (uint32_t kind))                                                                        \
    CALL(cuptiActivityFlushAll, (uint32_t flags))                                                                      \
    CALL(cuptiActivityGetNextRecord, (uint8_t * buffer, size_t valid, struct cupti_record * *record))                  \
    CALL(cuptiActivityGetNumDroppedRecords, (void *context, uint32_t stream, size_t *dropped))                         \
    CALL(cuptiGetTimestamp, (uint64_t * now))                                                                          \
    CALL(cuptiGetResultString, (uint32_t result, const char **text))                                                   \
    CALL(cuptiGetCallbackName, (uint32_t domain, uint32_t function, const char **name))

#endif
