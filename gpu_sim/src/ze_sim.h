/* What the files of the simulated Level Zero share beyond its system management: work on devices, and its tracing. Structures are
 * those that the library of profiles reads (native/profile/level_zero_abi.h). */
#ifndef ZE_SIM_H
#define ZE_SIM_H

#include "level_zero_abi.h"
#include "line.h"
#include "sim.h"

#define ZE(NAME, ...) SIM_API uint32_t NAME(__VA_ARGS__)

enum { ZE_IN_USE = 0x78000006, ZE_NO_DEVICE_MEMORY = 0x70000003 };

/* ---- level_zero.c: devices ---- */

bool ze_sim_device(ze_handle device, unsigned *index);

/* ---- ze_trace.c: the loader's tracing layer ---- */

/* CALL(name without ze, of a call that can be traced) */
#define ZE_TRACED(CALL)                                                                                                \
    CALL(CommandListAppendLaunchKernel)                                                                                \
    CALL(CommandListAppendLaunchCooperativeKernel)                                                                     \
    CALL(CommandListAppendLaunchKernelIndirect)                                                                        \
    CALL(CommandListAppendMemoryCopy)                                                                                  \
    CALL(CommandListAppendMemoryFill)                                                                                  \
    CALL(CommandQueueExecuteCommandLists)                                                                              \
    CALL(KernelSetGroupSize)                                                                                           \
    CALL(CommandQueueSynchronize)                                                                                      \
    CALL(CommandListHostSynchronize)                                                                                   \
    CALL(FenceHostSynchronize)                                                                                         \
    CALL(EventHostSynchronize)                                                                                         \
    CALL(MemAllocDevice)                                                                                               \
    CALL(MemAllocShared)                                                                                               \
    CALL(MemAllocHost)                                                                                                 \
    CALL(MemFree)                                                                                                      \
    CALL(CommandListCreate)                                                                                            \
    CALL(CommandListReset)                                                                                             \
    CALL(CommandListDestroy)                                                                                           \
    CALL(KernelDestroy)                                                                                                \
    CALL(ContextDestroy)

#define ZE_NUMBER(NAME) TRACED_##NAME,
enum ze_traced { ZE_TRACED(ZE_NUMBER) ZE_TRACED_CALLS };
#undef ZE_NUMBER

enum { ZE_TRACERS = 8 };

struct ze_trace { /* one call, from its beginning to its end */
    enum ze_traced call;
    unsigned tracers; /* bits of those that see it */
    void *parameters, *kept[ZE_TRACERS];
};

void ze_trace_before(struct ze_trace *trace, enum ze_traced call, void *parameters);
uint32_t ze_trace_after(struct ze_trace *trace, uint32_t result);

/* A call that can be traced: CALL's arguments are where the struct TYPE says, DO does it. */
#define ZE_TRACE(CALL, TYPE, DO, ...)                                                                                  \
    struct TYPE parameters = {__VA_ARGS__};                                                                            \
    struct ze_trace trace;                                                                                             \
    ze_trace_before(&trace, TRACED_##CALL, &parameters);                                                               \
    return ze_trace_after(&trace, DO)

/* ---- ze_event.c ---- */

struct ze_sim_context {
    _Atomic unsigned pools; /* event pools in it */
};

struct ze_sim_event {
    struct ze_sim_pool *pool;
    _Atomic uint64_t start, end; /* ns; end 0: it has no signal */
    _Atomic uint64_t awaited;    /* ns: until then a command of a device waits for it */
};

uint64_t ze_sim_cycles(uint64_t ns);
void ze_sim_signal(struct ze_sim_event *event, uint64_t start, uint64_t end);
bool ze_sim_has_times(const struct ze_sim_event *event);
struct ze_times ze_sim_times(const struct ze_sim_event *event);
/* ZE_NOT_READY after `timeout` ns. */
uint32_t ze_sim_wait(uint64_t until, uint64_t timeout);

#endif
