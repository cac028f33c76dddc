/* SPDX-License-Identifier: Apache-2.0 */
/* Is cupti_abi.h what NVIDIA's headers say? Compiled, never run, against those of each version (test_profile_peers.py). */
#include <cupti.h>

#include "cupti_abi.h"
#include "sluice/profile.h"

#define SAME(OURS, FIELD, THEIRS, THEIR_FIELD)                                                                         \
    _Static_assert(offsetof(struct OURS, FIELD) == offsetof(THEIRS, THEIR_FIELD) &&                                    \
                       sizeof((struct OURS){0}.FIELD) == sizeof((THEIRS){0}.THEIR_FIELD),                              \
                   #THEIRS "." #THEIR_FIELD)
#define VALUE(OURS, THEIRS) _Static_assert((int)OURS == (int)THEIRS, #THEIRS)

VALUE(CUPTI_OK, CUPTI_SUCCESS);
VALUE(CUPTI_NO_MORE, CUPTI_ERROR_MAX_LIMIT_REACHED);
VALUE(CUPTI_OCCUPIED, CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED);
VALUE(CUPTI_MEMCPY, CUPTI_ACTIVITY_KIND_MEMCPY);
VALUE(CUPTI_MEMSET, CUPTI_ACTIVITY_KIND_MEMSET);
VALUE(CUPTI_DRIVER, CUPTI_ACTIVITY_KIND_DRIVER);
VALUE(CUPTI_RUNTIME, CUPTI_ACTIVITY_KIND_RUNTIME);
VALUE(CUPTI_KERNEL, CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
VALUE(CUPTI_MEMCPY2, CUPTI_ACTIVITY_KIND_MEMCPY2);
VALUE(CUPTI_SYNCHRONIZATION, CUPTI_ACTIVITY_KIND_SYNCHRONIZATION);
VALUE(CUPTI_MEMORY2, CUPTI_ACTIVITY_KIND_MEMORY2);
VALUE(CUPTI_FLUSH_FORCED, CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
VALUE(CUPTI_DRIVER_API, CUPTI_CB_DOMAIN_DRIVER_API);
VALUE(CUPTI_RUNTIME_API, CUPTI_CB_DOMAIN_RUNTIME_API);
VALUE(CUPTI_ENTER, CUPTI_API_ENTER);
VALUE(CUPTI_EXIT, CUPTI_API_EXIT);
VALUE(CUPTI_MEMORY_RELEASE, CUPTI_ACTIVITY_MEMORY_OPERATION_TYPE_RELEASE);
VALUE(CUPTI_MEMORY_STATIC, CUPTI_ACTIVITY_MEMORY_KIND_DEVICE_STATIC);
VALUE(CUPTI_MANAGED_STATIC, CUPTI_ACTIVITY_MEMORY_KIND_MANAGED_STATIC);
VALUE(CUPTI_DRIVER_LAUNCH, CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel);
VALUE(CUPTI_DRIVER_LAUNCH_PTSZ, CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel_ptsz);
VALUE(CUPTI_DRIVER_LAUNCH_EX, CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx);
VALUE(CUPTI_DRIVER_LAUNCH_EX_PTSZ, CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx_ptsz);
VALUE(CUPTI_RUNTIME_LAUNCH, CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernel_v7000);
VALUE(CUPTI_RUNTIME_LAUNCH_PTSZ, CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernel_ptsz_v7000);
VALUE(CUPTI_RUNTIME_LAUNCH_EX, CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernelExC_v11060);
VALUE(CUPTI_RUNTIME_LAUNCH_EX_PTSZ, CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernelExC_ptsz_v11060);

/* A profile has CUPTI's numbers for these. */
VALUE(SLUICE_PROFILE_PAGEABLE, CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE);
VALUE(SLUICE_PROFILE_PINNED, CUPTI_ACTIVITY_MEMORY_KIND_PINNED);
VALUE(SLUICE_PROFILE_ON_DEVICE, CUPTI_ACTIVITY_MEMORY_KIND_DEVICE);
VALUE(SLUICE_PROFILE_ARRAY, CUPTI_ACTIVITY_MEMORY_KIND_ARRAY);
VALUE(SLUICE_PROFILE_MANAGED, CUPTI_ACTIVITY_MEMORY_KIND_MANAGED);
VALUE(SLUICE_PROFILE_SYNC_EVENT, CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_EVENT_SYNCHRONIZE);
VALUE(SLUICE_PROFILE_SYNC_STREAM_WAIT, CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_WAIT_EVENT);
VALUE(SLUICE_PROFILE_SYNC_STREAM, CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_SYNCHRONIZE);
VALUE(SLUICE_PROFILE_SYNC_CONTEXT, CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_CONTEXT_SYNCHRONIZE);

SAME(cupti_record, kind, CUpti_Activity, kind);

#define KERNEL(FIELD, THEIRS) SAME(cupti_kernel, FIELD, KERNEL_TYPE, THEIRS)
KERNEL(kind, kind);
KERNEL(start, start);
KERNEL(end, end);
KERNEL(device, deviceId);
KERNEL(context, contextId);
KERNEL(stream, streamId);
KERNEL(grid[0], gridX);
KERNEL(grid[2], gridZ);
KERNEL(block[0], blockX);
KERNEL(block[2], blockZ);
KERNEL(correlation, correlationId);
KERNEL(name, name);

#define MEMCPY(FIELD, THEIRS) SAME(cupti_memcpy, FIELD, MEMCPY_TYPE, THEIRS)
MEMCPY(from, srcKind);
MEMCPY(to, dstKind);
MEMCPY(bytes, bytes);
MEMCPY(start, start);
MEMCPY(end, end);
MEMCPY(device, deviceId);
MEMCPY(context, contextId);
MEMCPY(stream, streamId);
MEMCPY(correlation, correlationId);

#define MEMCPY2(FIELD, THEIRS) SAME(cupti_memcpy2, FIELD, CUpti_ActivityMemcpyPtoP4, THEIRS)
MEMCPY2(from, srcKind);
MEMCPY2(to, dstKind);
MEMCPY2(bytes, bytes);
MEMCPY2(start, start);
MEMCPY2(end, end);
MEMCPY2(device, deviceId);
MEMCPY2(context, contextId);
MEMCPY2(stream, streamId);
MEMCPY2(from_device, srcDeviceId);
MEMCPY2(to_device, dstDeviceId);
MEMCPY2(correlation, correlationId);

#define MEMSET(FIELD, THEIRS) SAME(cupti_memset, FIELD, MEMSET_TYPE, THEIRS)
MEMSET(bytes, bytes);
MEMSET(start, start);
MEMSET(end, end);
MEMSET(device, deviceId);
MEMSET(context, contextId);
MEMSET(stream, streamId);
MEMSET(correlation, correlationId);
MEMSET(memory_kind, memoryKind);

#define MEMORY(FIELD, THEIRS) SAME(cupti_memory, FIELD, CUpti_ActivityMemory4, THEIRS)
MEMORY(operation, memoryOperationType);
MEMORY(memory_kind, memoryKind);
MEMORY(correlation, correlationId);
MEMORY(address, address);
MEMORY(bytes, bytes);
MEMORY(when, timestamp);
MEMORY(device, deviceId);
MEMORY(context, contextId);
MEMORY(stream, streamId);

#define SYNCHRONIZATION(FIELD, THEIRS) SAME(cupti_synchronization, FIELD, CUpti_ActivitySynchronization2, THEIRS)
SYNCHRONIZATION(type, type);
SYNCHRONIZATION(start, start);
SYNCHRONIZATION(end, end);
SYNCHRONIZATION(correlation, correlationId);
SYNCHRONIZATION(context, contextId);
SYNCHRONIZATION(stream, streamId);
SYNCHRONIZATION(event, cudaEventId);

#define API(FIELD, THEIRS) SAME(cupti_api, FIELD, CUpti_ActivityAPI, THEIRS)
API(function, cbid);
API(start, start);
API(end, end);
API(thread, threadId);
API(correlation, correlationId);
API(result, returnValue);

#define CALLBACK(FIELD, THEIRS) SAME(cupti_callback_data, FIELD, CUpti_CallbackData, THEIRS)
CALLBACK(site, callbackSite);
CALLBACK(function, functionName);
CALLBACK(symbol, symbolName);
CALLBACK(context_id, contextUid);
CALLBACK(correlation, correlationId);

/* Each call, with as many parameters. */
#define CALL(NAME, PARAMETERS) __typeof__(&NAME) profile_uses_##NAME;
CUPTI_CALLS(CALL)
