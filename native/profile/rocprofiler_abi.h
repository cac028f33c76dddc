/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of AMD's rocprofiler-sdk that profiles use, from its public documentation: no header of AMD's is needed to
 * build it. It is that of versions 1.0 and later (ROCm 7), in which records of newer ones only grow at their end; earlier
 * ones pass other records. rocprofiler_abi_check.c compares all of it with AMD's headers.
 */
#ifndef SLUICE_ROCPROFILER_ABI_H
#define SLUICE_ROCPROFILER_ABI_H

#include <stddef.h>
#include <stdint.h>

enum { ROCP_OK = 0 };                   /* ROCPROFILER_STATUS_SUCCESS */
enum { ROCP_FIRST_VERSION = 10000 };    /* 10000 * major + 100 * minor + patch */
enum { ROCP_CATEGORY_TRACING = 1 };     /* rocprofiler_buffer_category_t */
enum { ROCP_ENTER = 1, ROCP_EXIT = 2 }; /* rocprofiler_callback_phase_t */
enum { ROCP_DISCARD = 1 };              /* rocprofiler_buffer_policy_t */
enum { ROCP_AGENT_GPU = 2, ROCP_AGENT_VERSION = 1 };
enum { ROCP_CALL_BACK_HIP = 5, ROCP_CALL_BACK_CODE = 10 }; /* rocprofiler_callback_tracing_kind_t */
enum { ROCP_KERNEL_SYMBOL = 2 };                           /* rocprofiler_code_object_operation_t */

enum rocp_kind { /* rocprofiler_buffer_tracing_kind_t */
                 ROCP_HIP_CALL = 5,
                 ROCP_COPY = 10,
                 ROCP_KERNEL = 11,
                 ROCP_RCCL_CALL = 14,
                 ROCP_MEMORY = 16,
};

enum rocp_direction { /* rocprofiler_memory_copy_operation_t */
                      ROCP_HOST_TO_HOST = 1,
                      ROCP_HOST_TO_DEVICE,
                      ROCP_DEVICE_TO_HOST,
                      ROCP_DEVICE_TO_DEVICE,
};

enum rocp_allocation { /* rocprofiler_memory_allocation_operation_t */
                       ROCP_ALLOCATE = 1,
                       ROCP_RANGE_ALLOCATE,
                       ROCP_FREE,
                       ROCP_RANGE_FREE,
};

/* ---- records ---- */

struct rocp_header { /* of each record in a buffer */
    uint32_t category, kind;
    void *record;
};

struct rocp_record {
    uint64_t size; /* of all of it: newer versions have more */
    uint32_t kind;
    int32_t operation;
};

struct rocp_kernel {
    struct rocp_record is;
    uint64_t correlation, external, thread, start, end;
    uint64_t dispatch_size, agent, queue, kernel, dispatch;
    uint32_t private_bytes, group_bytes, workgroup[3], grid[3]; /* the grid in threads, as HSA has it */
};

struct rocp_copy {
    struct rocp_record is;
    uint64_t correlation, external, thread, start, end;
    uint64_t to_agent, from_agent, bytes;
};

struct rocp_memory {
    struct rocp_record is;
    uint64_t correlation, external, ancestor, thread, start, end;
    uint64_t agent, address, bytes;
};

struct rocp_call { /* of HIP, and of RCCL */
    struct rocp_record is;
    uint64_t correlation, external, ancestor, start, end, thread;
};

struct rocp_callback { /* passed by value */
    uint64_t context, thread, correlation, external, ancestor;
    uint32_t kind;
    int32_t operation;
    uint32_t phase;
    void *what;
};

struct rocp_symbol {
    uint64_t size, kernel, code;
    const char *name;
};

struct rocp_agent { /* the beginning of rocprofiler_agent_v0_t */
    uint64_t size, id;
    uint32_t type, figures[21];
    uint16_t vendor_id, device_id;
    uint32_t location, domain; /* of PCI: bus, device and function in 16 bits */
};

/* ---- what a tool is ---- */

struct rocp_client {
    size_t size;
    const char *name;
    uint32_t handle;
};

struct rocp_tool {
    size_t size;
    int (*initialize)(void (*finalize)(struct rocp_client), void *data);
    void (*finalize)(void *data);
    void *data;
};

typedef struct rocp_tool *rocp_configure(uint32_t version, const char *words, uint32_t priority,
                                         struct rocp_client *client);

/* ---- calls ---- */

typedef void rocp_on_records(uint64_t context, uint64_t buffer, struct rocp_header **headers, size_t count, void *data,
                             uint64_t dropped);
typedef void rocp_on_call(struct rocp_callback record, uint64_t *kept, void *data);
typedef uint32_t rocp_on_agents(uint32_t version, const void **agents, size_t count, void *data);
typedef int rocp_on_operation(uint32_t kind, int32_t operation, void *data);

/* CALL(name without rocprofiler_, parameters): each returns rocprofiler_status_t; handles are structures of one number. */
#define ROCP_CALLS(CALL)                                                                                               \
    CALL(create_context, (uint64_t * context))                                                                         \
    CALL(start_context, (uint64_t context))                                                                            \
    CALL(stop_context, (uint64_t context))                                                                             \
    CALL(create_buffer, (uint64_t context, size_t size, size_t watermark, uint32_t policy, rocp_on_records * function, \
                         void *data, uint64_t *buffer))                                                                \
    CALL(flush_buffer, (uint64_t buffer))                                                                              \
    CALL(configure_buffer_tracing_service,                                                                             \
         (uint64_t context, uint32_t kind, const int32_t *operations, size_t count, uint64_t buffer))                  \
    CALL(configure_callback_tracing_service, (uint64_t context, uint32_t kind, const int32_t *operations,              \
                                              size_t count, rocp_on_call *function, void *data))                       \
    CALL(iterate_buffer_tracing_kind_operations, (uint32_t kind, rocp_on_operation * function, void *data))            \
    CALL(query_buffer_tracing_kind_operation_name,                                                                     \
         (uint32_t kind, int32_t operation, const char **name, uint64_t *length))                                      \
    CALL(query_available_agents, (uint32_t version, rocp_on_agents * function, size_t size, void *data))               \
    CALL(get_timestamp, (uint64_t * now))

#endif
