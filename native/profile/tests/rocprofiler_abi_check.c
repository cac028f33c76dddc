/* SPDX-License-Identifier: Apache-2.0 */
/* Is rocprofiler_abi.h what AMD's headers say? Compiled, never run, against those of ROCm (test_profile_peers.py). */
#include <rocprofiler-sdk/agent.h>
#include <rocprofiler-sdk/buffer.h>
#include <rocprofiler-sdk/buffer_tracing.h>
#include <rocprofiler-sdk/callback_tracing.h>
#include <rocprofiler-sdk/context.h>
#include <rocprofiler-sdk/registration.h>
#include <rocprofiler-sdk/rocprofiler.h>

#include "rocprofiler_abi.h"

#define SAME(OURS, FIELD, THEIRS, THEIR_FIELD)                                                                         \
    _Static_assert(offsetof(struct OURS, FIELD) == offsetof(THEIRS, THEIR_FIELD) &&                                    \
                       sizeof((struct OURS){0}.FIELD) == sizeof((THEIRS){0}.THEIR_FIELD),                              \
                   #THEIRS "." #THEIR_FIELD)
#define VALUE(OURS, THEIRS) _Static_assert((int)OURS == (int)THEIRS, #THEIRS)

VALUE(ROCP_OK, ROCPROFILER_STATUS_SUCCESS);
VALUE(ROCP_CATEGORY_TRACING, ROCPROFILER_BUFFER_CATEGORY_TRACING);
VALUE(ROCP_ENTER, ROCPROFILER_CALLBACK_PHASE_ENTER);
VALUE(ROCP_EXIT, ROCPROFILER_CALLBACK_PHASE_EXIT);
VALUE(ROCP_DISCARD, ROCPROFILER_BUFFER_POLICY_DISCARD);
VALUE(ROCP_AGENT_GPU, ROCPROFILER_AGENT_TYPE_GPU);
VALUE(ROCP_AGENT_VERSION, ROCPROFILER_AGENT_INFO_VERSION_0);
VALUE(ROCP_CALL_BACK_HIP, ROCPROFILER_CALLBACK_TRACING_HIP_RUNTIME_API);
VALUE(ROCP_CALL_BACK_CODE, ROCPROFILER_CALLBACK_TRACING_CODE_OBJECT);
VALUE(ROCP_KERNEL_SYMBOL, ROCPROFILER_CODE_OBJECT_DEVICE_KERNEL_SYMBOL_REGISTER);
VALUE(ROCP_HIP_CALL, ROCPROFILER_BUFFER_TRACING_HIP_RUNTIME_API);
VALUE(ROCP_COPY, ROCPROFILER_BUFFER_TRACING_MEMORY_COPY);
VALUE(ROCP_KERNEL, ROCPROFILER_BUFFER_TRACING_KERNEL_DISPATCH);
VALUE(ROCP_RCCL_CALL, ROCPROFILER_BUFFER_TRACING_RCCL_API);
VALUE(ROCP_MEMORY, ROCPROFILER_BUFFER_TRACING_MEMORY_ALLOCATION);
VALUE(ROCP_HOST_TO_HOST, ROCPROFILER_MEMORY_COPY_HOST_TO_HOST);
VALUE(ROCP_HOST_TO_DEVICE, ROCPROFILER_MEMORY_COPY_HOST_TO_DEVICE);
VALUE(ROCP_DEVICE_TO_HOST, ROCPROFILER_MEMORY_COPY_DEVICE_TO_HOST);
VALUE(ROCP_DEVICE_TO_DEVICE, ROCPROFILER_MEMORY_COPY_DEVICE_TO_DEVICE);
VALUE(ROCP_ALLOCATE, ROCPROFILER_MEMORY_ALLOCATION_ALLOCATE);
VALUE(ROCP_RANGE_ALLOCATE, ROCPROFILER_MEMORY_ALLOCATION_VMEM_ALLOCATE);
VALUE(ROCP_FREE, ROCPROFILER_MEMORY_ALLOCATION_FREE);
VALUE(ROCP_RANGE_FREE, ROCPROFILER_MEMORY_ALLOCATION_VMEM_FREE);

SAME(rocp_header, category, rocprofiler_record_header_t, category);
SAME(rocp_header, kind, rocprofiler_record_header_t, kind);
SAME(rocp_header, record, rocprofiler_record_header_t, payload);

#define OF_RECORD(OURS, FIELD, KIND, THEIRS) SAME(OURS, FIELD, rocprofiler_buffer_tracing_##KIND##_record_t, THEIRS)
#define RECORD(OURS, KIND)                                                                                             \
    OF_RECORD(OURS, is.size, KIND, size);                                                                              \
    OF_RECORD(OURS, is.kind, KIND, kind);                                                                              \
    OF_RECORD(OURS, is.operation, KIND, operation);                                                                    \
    OF_RECORD(OURS, correlation, KIND, correlation_id.internal);                                                       \
    OF_RECORD(OURS, thread, KIND, thread_id);                                                                          \
    OF_RECORD(OURS, start, KIND, start_timestamp);                                                                     \
    OF_RECORD(OURS, end, KIND, end_timestamp)
RECORD(rocp_kernel, kernel_dispatch);
RECORD(rocp_copy, memory_copy);
RECORD(rocp_memory, memory_allocation);
RECORD(rocp_call, hip_api);
RECORD(rocp_call, rccl_api);

#define DISPATCH(FIELD, THEIRS) OF_RECORD(rocp_kernel, FIELD, kernel_dispatch, dispatch_info.THEIRS)
DISPATCH(agent, agent_id);
DISPATCH(queue, queue_id);
DISPATCH(kernel, kernel_id);
DISPATCH(workgroup[0], workgroup_size.x);
DISPATCH(workgroup[2], workgroup_size.z);
DISPATCH(grid[0], grid_size.x);
DISPATCH(grid[2], grid_size.z);

OF_RECORD(rocp_copy, to_agent, memory_copy, dst_agent_id);
OF_RECORD(rocp_copy, from_agent, memory_copy, src_agent_id);
OF_RECORD(rocp_copy, bytes, memory_copy, bytes);
OF_RECORD(rocp_memory, agent, memory_allocation, agent_id);
OF_RECORD(rocp_memory, address, memory_allocation, address);
OF_RECORD(rocp_memory, bytes, memory_allocation, allocation_size);

#define CALLBACK(FIELD, THEIRS) SAME(rocp_callback, FIELD, rocprofiler_callback_tracing_record_t, THEIRS)
CALLBACK(thread, thread_id);
CALLBACK(correlation, correlation_id.internal);
CALLBACK(kind, kind);
CALLBACK(operation, operation);
CALLBACK(phase, phase);
CALLBACK(what, payload);
_Static_assert(sizeof(struct rocp_callback) == sizeof(rocprofiler_callback_tracing_record_t), "it is passed by value");

#define SYMBOL(FIELD, THEIRS)                                                                                          \
    SAME(rocp_symbol, FIELD, rocprofiler_callback_tracing_code_object_kernel_symbol_register_data_t, THEIRS)
SYMBOL(size, size);
SYMBOL(kernel, kernel_id);
SYMBOL(name, kernel_name);

SAME(rocp_agent, size, rocprofiler_agent_v0_t, size);
SAME(rocp_agent, id, rocprofiler_agent_v0_t, id);
SAME(rocp_agent, type, rocprofiler_agent_v0_t, type);
SAME(rocp_agent, vendor_id, rocprofiler_agent_v0_t, vendor_id);
SAME(rocp_agent, location, rocprofiler_agent_v0_t, location_id);
SAME(rocp_agent, domain, rocprofiler_agent_v0_t, domain);

SAME(rocp_client, size, rocprofiler_client_id_t, size);
SAME(rocp_client, name, rocprofiler_client_id_t, name);
SAME(rocp_client, handle, rocprofiler_client_id_t, handle);
SAME(rocp_tool, size, rocprofiler_tool_configure_result_t, size);
SAME(rocp_tool, initialize, rocprofiler_tool_configure_result_t, initialize);
SAME(rocp_tool, finalize, rocprofiler_tool_configure_result_t, finalize);
SAME(rocp_tool, data, rocprofiler_tool_configure_result_t, tool_data);
_Static_assert(sizeof(struct rocp_tool) == sizeof(rocprofiler_tool_configure_result_t), "rocprofiler_tool_...");

/* Handles are passed as numbers. */
_Static_assert(sizeof(rocprofiler_context_id_t) == 8 && sizeof(rocprofiler_buffer_id_t) == 8, "a number each");

/* Each call is there. */
#define CALL(NAME, PARAMETERS) __typeof__(&rocprofiler_##NAME) profile_uses_##NAME;
ROCP_CALLS(CALL)
