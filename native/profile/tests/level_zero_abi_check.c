/* SPDX-License-Identifier: Apache-2.0 */
/* Is level_zero_abi.h what Intel's headers say? Compiled, never run, against those of libze-dev (test_profile_peers.py). */
#include <level_zero/layers/zel_tracing_api.h>
#include <level_zero/layers/zel_tracing_register_cb.h>
#include <level_zero/ze_api.h>

#include "level_zero_abi.h"

#define SAME(OURS, FIELD, THEIRS, THEIR_FIELD)                                                                         \
    _Static_assert(offsetof(struct OURS, FIELD) == offsetof(THEIRS, THEIR_FIELD) &&                                    \
                       sizeof((struct OURS){0}.FIELD) == sizeof((THEIRS){0}.THEIR_FIELD),                              \
                   #THEIRS "." #THEIR_FIELD)
#define SIZE(OURS, THEIRS) _Static_assert(sizeof(struct OURS) == sizeof(THEIRS), #THEIRS)
#define VALUE(OURS, THEIRS) _Static_assert((unsigned)OURS == (unsigned)THEIRS, #THEIRS)

VALUE(ZE_OK, ZE_RESULT_SUCCESS);
VALUE(ZE_NOT_READY, ZE_RESULT_NOT_READY);
VALUE(ZE_NOT_INITIALIZED, ZE_RESULT_ERROR_UNINITIALIZED);
VALUE(ZE_NOT_SUPPORTED, ZE_RESULT_ERROR_UNSUPPORTED_FEATURE);
VALUE(ZE_BAD_ARGUMENT, ZE_RESULT_ERROR_INVALID_ARGUMENT);
VALUE(ZE_TYPE_TRACER, ZEL_STRUCTURE_TYPE_TRACER_DESC);
VALUE(ZE_TYPE_MEMORY, ZE_STRUCTURE_TYPE_DEVICE_MEMORY_PROPERTIES);
VALUE(ZE_TYPE_EVENT_POOL, ZE_STRUCTURE_TYPE_EVENT_POOL_DESC);
VALUE(ZE_TYPE_EVENT, ZE_STRUCTURE_TYPE_EVENT_DESC);
VALUE(ZE_TYPE_HOST_MEMORY, ZE_STRUCTURE_TYPE_HOST_MEM_ALLOC_DESC);
VALUE(ZE_TYPE_ALLOCATION, ZE_STRUCTURE_TYPE_MEMORY_ALLOCATION_PROPERTIES);
VALUE(ZE_TYPE_DEVICE_1_2, ZE_STRUCTURE_TYPE_DEVICE_PROPERTIES_1_2);
VALUE(ZE_POOL_HOST_VISIBLE, ZE_EVENT_POOL_FLAG_HOST_VISIBLE);
VALUE(ZE_POOL_TIMESTAMPS, ZE_EVENT_POOL_FLAG_KERNEL_TIMESTAMP);
VALUE(ZE_SCOPE_HOST, ZE_EVENT_SCOPE_FLAG_HOST);
VALUE(ZE_IN_HOST, ZE_MEMORY_TYPE_HOST);
VALUE(ZE_IN_DEVICE, ZE_MEMORY_TYPE_DEVICE);
VALUE(ZE_IN_SHARED, ZE_MEMORY_TYPE_SHARED);
VALUE(ZE_PROLOGUE, ZEL_REGISTER_PROLOGUE);
VALUE(ZE_EPILOGUE, ZEL_REGISTER_EPILOGUE);

SIZE(ze_group_count, ze_group_count_t);
SAME(ze_event_pool, flags, ze_event_pool_desc_t, flags);
SAME(ze_event_pool, count, ze_event_pool_desc_t, count);
SAME(ze_event, index, ze_event_desc_t, index);
SAME(ze_event, signal, ze_event_desc_t, signal);
SAME(ze_event, wait, ze_event_desc_t, wait);
SAME(ze_times, global, ze_kernel_timestamp_result_t, global);
SAME(ze_span, start, ze_kernel_timestamp_data_t, kernelStart);
SAME(ze_span, end, ze_kernel_timestamp_data_t, kernelEnd);
SIZE(ze_times, ze_kernel_timestamp_result_t);
SAME(ze_device, timer, ze_device_properties_t, timerResolution);
SAME(ze_device, timestamp_bits, ze_device_properties_t, timestampValidBits);
SAME(ze_device, kernel_timestamp_bits, ze_device_properties_t, kernelTimestampValidBits);
SAME(ze_device, uuid, ze_device_properties_t, uuid);
SAME(ze_device, name, ze_device_properties_t, name);
SIZE(ze_device, ze_device_properties_t);
SAME(ze_memory, bytes, ze_device_memory_properties_t, totalSize);
SIZE(ze_memory, ze_device_memory_properties_t);
SIZE(ze_host_memory, ze_host_mem_alloc_desc_t);
SAME(ze_allocation, kind, ze_memory_allocation_properties_t, type);
SIZE(ze_allocation, ze_memory_allocation_properties_t);
SAME(ze_tracer, user, zel_tracer_desc_t, pUserData);

SAME(ze_create_list, list, ze_command_list_create_params_t, pphCommandList);
SAME(ze_launch, list, ze_command_list_append_launch_kernel_params_t, phCommandList);
SAME(ze_launch, kernel, ze_command_list_append_launch_kernel_params_t, phKernel);
SAME(ze_launch, groups, ze_command_list_append_launch_kernel_params_t, ppLaunchFuncArgs);
SAME(ze_launch, signal, ze_command_list_append_launch_kernel_params_t, phSignalEvent);
SAME(ze_launch, list, ze_command_list_append_launch_cooperative_kernel_params_t, phCommandList);
SAME(ze_launch, kernel, ze_command_list_append_launch_cooperative_kernel_params_t, phKernel);
SAME(ze_launch, groups, ze_command_list_append_launch_cooperative_kernel_params_t, ppLaunchFuncArgs);
SAME(ze_launch, signal, ze_command_list_append_launch_cooperative_kernel_params_t, phSignalEvent);
SAME(ze_launch, list, ze_command_list_append_launch_kernel_indirect_params_t, phCommandList);
SAME(ze_launch, kernel, ze_command_list_append_launch_kernel_indirect_params_t, phKernel);
SAME(ze_launch, groups, ze_command_list_append_launch_kernel_indirect_params_t, ppLaunchArgumentsBuffer);
SAME(ze_launch, signal, ze_command_list_append_launch_kernel_indirect_params_t, phSignalEvent);
SAME(ze_copy, list, ze_command_list_append_memory_copy_params_t, phCommandList);
SAME(ze_copy, to, ze_command_list_append_memory_copy_params_t, pdstptr);
SAME(ze_copy, from, ze_command_list_append_memory_copy_params_t, psrcptr);
SAME(ze_copy, bytes, ze_command_list_append_memory_copy_params_t, psize);
SAME(ze_copy, signal, ze_command_list_append_memory_copy_params_t, phSignalEvent);
SAME(ze_fill, list, ze_command_list_append_memory_fill_params_t, phCommandList);
SAME(ze_fill, to, ze_command_list_append_memory_fill_params_t, pptr);
SAME(ze_fill, bytes, ze_command_list_append_memory_fill_params_t, psize);
SAME(ze_fill, signal, ze_command_list_append_memory_fill_params_t, phSignalEvent);
SAME(ze_execute, count, ze_command_queue_execute_command_lists_params_t, pnumCommandLists);
SAME(ze_execute, lists, ze_command_queue_execute_command_lists_params_t, pphCommandLists);
SAME(ze_one, handle, ze_command_list_reset_params_t, phCommandList);
SAME(ze_one, handle, ze_command_list_destroy_params_t, phCommandList);
SAME(ze_one, handle, ze_kernel_destroy_params_t, phKernel);
SAME(ze_one, handle, ze_context_destroy_params_t, phContext);
SAME(ze_one, handle, ze_command_queue_synchronize_params_t, phCommandQueue);
SAME(ze_one, handle, ze_fence_host_synchronize_params_t, phFence);
SAME(ze_one, handle, ze_event_host_synchronize_params_t, phEvent);
SAME(ze_group_size, kernel, ze_kernel_set_group_size_params_t, phKernel);
SAME(ze_group_size, x, ze_kernel_set_group_size_params_t, pgroupSizeX);
SAME(ze_group_size, y, ze_kernel_set_group_size_params_t, pgroupSizeY);
SAME(ze_group_size, z, ze_kernel_set_group_size_params_t, pgroupSizeZ);
SAME(ze_alloc_device, bytes, ze_mem_alloc_device_params_t, psize);
SAME(ze_alloc_device, device, ze_mem_alloc_device_params_t, phDevice);
SAME(ze_alloc_device, memory, ze_mem_alloc_device_params_t, ppptr);
SAME(ze_alloc_shared, bytes, ze_mem_alloc_shared_params_t, psize);
SAME(ze_alloc_shared, device, ze_mem_alloc_shared_params_t, phDevice);
SAME(ze_alloc_shared, memory, ze_mem_alloc_shared_params_t, ppptr);
SAME(ze_alloc_host, bytes, ze_mem_alloc_host_params_t, psize);
SAME(ze_alloc_host, memory, ze_mem_alloc_host_params_t, ppptr);
SAME(ze_free, context, ze_mem_free_params_t, phContext);
SAME(ze_free, memory, ze_mem_free_params_t, pptr);
SIZE(ze_one, ze_context_destroy_params_t);
