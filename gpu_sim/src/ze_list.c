/* Simulated Level Zero: kernels, command lists and queues. A kernel takes a given time and does nothing; what is recorded in a
 * list runs when a queue executes it. SLUICE_SIM_LEVEL_ZERO_NS makes each event with times cost the program that much;
 * SLUICE_SIM_LEVEL_ZERO_SEEN_NS is how long after a signal a command sees it that waits for it. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "ze_sim.h"

enum { FIRST_COMMANDS = 16 };

struct kernel_description { /* ze_kernel_desc_t */
    uint32_t type;
    const void *next;
    uint32_t flags;
    const char *name;
};

struct ze_sim_kernel {
    uint64_t duration; /* ns */
    uint32_t group[3];
    char name[];
};

enum what { RUN, COPY, FILL, JOIN, TIMES };

struct command {
    enum what what;
    uint64_t duration;
    void *to;
    const void *from;
    size_t bytes;
    uint8_t pattern[16];
    size_t pattern_bytes;
    struct ze_sim_event *signal, *timed; /* `timed`: whose times are copied */
    uint64_t after;                      /* ns: what it waits for has its signal then */
};

struct ze_sim_list { /* or a queue */
    ze_handle context, device;
    unsigned index;
    bool immediate, closed;
    struct command *commands;
    size_t count, room;
    struct line line;
};

/* ---- modules and kernels ---- */

ZE(zeModuleCreate, ze_handle context, ze_handle device, const void *how, ze_handle *module, ze_handle *log)
{
    (void)log;
    if (context == NULL || device == NULL || how == NULL || module == NULL) {
        return ZE_BAD_ARGUMENT;
    }
    *module = calloc(1, 1);
    return *module != NULL ? ZE_OK : ZE_NO_DEVICE_MEMORY;
}

ZE(zeModuleDestroy, ze_handle module)
{
    free(module);
    return ZE_OK;
}

ZE(zeKernelCreate, ze_handle module, const struct kernel_description *how, struct ze_sim_kernel **kernel)
{
    if (module == NULL || how == NULL || how->name == NULL || kernel == NULL) {
        return ZE_BAD_ARGUMENT;
    }
    *kernel = calloc(1, sizeof **kernel + strlen(how->name) + 1);
    if (*kernel == NULL) {
        return ZE_NO_DEVICE_MEMORY;
    }
    (*kernel)->duration = line_duration(how->name);
    strcpy((*kernel)->name, how->name);
    return ZE_OK;
}

static uint32_t destroy_kernel(struct ze_sim_kernel *kernel)
{
    free(kernel);
    return ZE_OK;
}

ZE(zeKernelDestroy, ze_handle kernel)
{
    ZE_TRACE(KernelDestroy, ze_one, destroy_kernel(kernel), &kernel);
}

static uint32_t set_group(struct ze_sim_kernel *kernel, uint32_t x, uint32_t y, uint32_t z)
{
    kernel->group[0] = x;
    kernel->group[1] = y;
    kernel->group[2] = z;
    return x > 0 && y > 0 && z > 0 ? ZE_OK : ZE_BAD_ARGUMENT;
}

ZE(zeKernelSetGroupSize, ze_handle kernel, uint32_t x, uint32_t y, uint32_t z)
{
    ZE_TRACE(KernelSetGroupSize, ze_group_size, set_group(kernel, x, y, z), &kernel, &x, &y, &z);
}

ZE(zeKernelGetName, struct ze_sim_kernel *kernel, size_t *size, char *name)
{
    size_t length = strlen(kernel->name) + 1;
    if (name != NULL && *size >= length) {
        memcpy(name, kernel->name, length);
    }
    *size = length;
    return ZE_OK;
}

/* ---- lists and queues ---- */

static uint32_t create(ze_handle context, ze_handle device, bool immediate, struct ze_sim_list **made)
{
    unsigned index;
    if (context == NULL || !ze_sim_device(device, &index) || made == NULL) {
        return ZE_BAD_ARGUMENT;
    }
    *made = calloc(1, sizeof **made);
    if (*made == NULL) {
        return ZE_NO_DEVICE_MEMORY;
    }
    (*made)->context = context;
    (*made)->device = device;
    (*made)->index = index;
    (*made)->immediate = immediate;
    (*made)->line.alone = true;
    return ZE_OK;
}

ZE(zeCommandQueueCreate, ze_handle context, ze_handle device, const void *how, struct ze_sim_list **queue)
{
    (void)how;
    return create(context, device, false, queue);
}

ZE(zeCommandListCreate, ze_handle context, ze_handle device, const void *how, ze_handle *list)
{
    ZE_TRACE(CommandListCreate, ze_create_list, create(context, device, false, (struct ze_sim_list **)list), &context,
             &device, &how, &list);
}

ZE(zeCommandListCreateImmediate, ze_handle context, ze_handle device, const void *how, struct ze_sim_list **list)
{
    (void)how;
    return create(context, device, true, list);
}

ZE(zeCommandQueueDestroy, struct ze_sim_list *queue)
{
    free(queue);
    return ZE_OK;
}

static uint32_t destroy_list(struct ze_sim_list *list)
{
    free(list->commands);
    free(list);
    return ZE_OK;
}

ZE(zeCommandListDestroy, ze_handle list)
{
    ZE_TRACE(CommandListDestroy, ze_one, destroy_list(list), &list);
}

static uint32_t reset_list(struct ze_sim_list *list)
{
    list->count = 0;
    list->closed = false;
    return ZE_OK;
}

ZE(zeCommandListReset, ze_handle list)
{
    ZE_TRACE(CommandListReset, ze_one, reset_list(list), &list);
}

ZE(zeCommandListClose, struct ze_sim_list *list)
{
    list->closed = true;
    return ZE_OK;
}

ZE(zeCommandListGetDeviceHandle, struct ze_sim_list *list, ze_handle *device)
{
    *device = list->device;
    return ZE_OK;
}

ZE(zeCommandListGetContextHandle, struct ze_sim_list *list, ze_handle *context)
{
    *context = list->context;
    return ZE_OK;
}

ZE(zeCommandListIsImmediate, struct ze_sim_list *list, uint8_t *immediate)
{
    *immediate = list->immediate;
    return ZE_OK;
}

/* ---- commands ---- */

static void fill(uint8_t *to, const struct command *command)
{
    for (size_t i = 0; i < command->bytes; i++) {
        to[i] = command->pattern[i % command->pattern_bytes];
    }
}

static void execute(struct ze_sim_list *where, const struct command *command)
{
    uint64_t began = line_now(), duration = command->duration;
    if (command->what == COPY) {
        memmove(command->to, command->from, command->bytes);
    } else if (command->what == FILL) {
        fill(command->to, command);
    }
    if (command->what == COPY || command->what == FILL) {
        duration = line_now() - began;
    }
    line_waits((int)where->index, &where->line, command->after);
    uint64_t start = command->what == RUN ? line_launch((int)where->index, &where->line, duration)
                                          : line_put((int)where->index, &where->line, duration);
    if (command->what == TIMES) {
        const struct ze_times times = ze_sim_times(command->timed);
        memcpy(command->to, &times, sizeof times);
    }
    ze_sim_signal(command->signal, start, start + duration);
}

static uint32_t record(struct ze_sim_list *list, const struct command *command)
{
    if (list->count == list->room) {
        size_t room = list->room > 0 ? 2 * list->room : FIRST_COMMANDS;
        struct command *larger = realloc(list->commands, room * sizeof *larger);
        if (larger == NULL) {
            return ZE_NO_DEVICE_MEMORY;
        }
        list->commands = larger;
        list->room = room;
    }
    list->commands[list->count++] = *command;
    return ZE_OK;
}

static uint64_t setting(const char *name, _Atomic long *known)
{
    if (*known < 0) {
        const char *text = getenv(name);
        *known = text != NULL ? strtol(text, NULL, 10) : 0;
    }
    return (uint64_t)*known;
}

static void pay(const struct ze_sim_event *event)
{
    static _Atomic long known = -1;
    uint64_t cost = setting("SLUICE_SIM_LEVEL_ZERO_NS", &known);
    uint64_t end = event != NULL && cost > 0 && ze_sim_has_times(event) ? line_now() + cost : 0;
    while (end > line_now()) {
    }
}

/* ns: when a command that waits for this event sees its signal. */
static uint64_t seen(struct ze_sim_event *event)
{
    static _Atomic long known = -1;
    uint64_t when = event->end + setting("SLUICE_SIM_LEVEL_ZERO_SEEN_NS", &known), last = event->awaited;
    while (last < when && !atomic_compare_exchange_weak(&event->awaited, &last, when)) {
    }
    return when;
}

static uint32_t append(struct ze_sim_list *list, struct command command, uint32_t wait_count, ze_handle *waits)
{
    if (list == NULL || list->closed || (wait_count > 0 && waits == NULL)) {
        return ZE_BAD_ARGUMENT;
    }
    for (uint32_t i = 0; i < wait_count && list->immediate;
         i++) { /* in a recorded list they come from it, in its order */
        uint64_t end = seen(waits[i]);
        command.after = end > command.after ? end : command.after;
    }
    uint32_t result = ZE_OK;
    if (list->immediate) {
        execute(list, &command);
    } else {
        result = record(list, &command);
    }
    pay(command.signal);
    return result;
}

static uint32_t launch(ze_handle list, const struct ze_sim_kernel *kernel, ze_handle signal, uint32_t wait_count,
                       ze_handle *waits)
{
    return kernel != NULL && kernel->group[0] > 0
               ? append(list, (struct command){.what = RUN, .duration = kernel->duration, .signal = signal}, wait_count,
                        waits)
               : ZE_BAD_ARGUMENT;
}

#define LAUNCH(NAME)                                                                                                   \
    ZE(ze##NAME, ze_handle list, ze_handle kernel, const struct ze_group_count *groups, ze_handle signal,              \
       uint32_t wait_count, ze_handle *waits)                                                                          \
    {                                                                                                                  \
        ZE_TRACE(NAME, ze_launch, launch(list, kernel, signal, wait_count, waits), &list, &kernel, &groups, &signal,   \
                 &wait_count, &waits);                                                                                 \
    }
LAUNCH(CommandListAppendLaunchKernel)
LAUNCH(CommandListAppendLaunchCooperativeKernel)
LAUNCH(CommandListAppendLaunchKernelIndirect)

static uint32_t append_copy(ze_handle list, void *to, const void *from, size_t bytes, ze_handle signal,
                            uint32_t wait_count, ze_handle *waits)
{
    const struct command command = {.what = COPY, .to = to, .from = from, .bytes = bytes, .signal = signal};
    return append(list, command, wait_count, waits);
}

ZE(zeCommandListAppendMemoryCopy, ze_handle list, void *to, const void *from, size_t bytes, ze_handle signal,
   uint32_t wait_count, ze_handle *waits)
{
    ZE_TRACE(CommandListAppendMemoryCopy, ze_copy, append_copy(list, to, from, bytes, signal, wait_count, waits), &list,
             &to, &from, &bytes, &signal, &wait_count, &waits);
}

static uint32_t append_fill(ze_handle list, void *to, const void *pattern, size_t pattern_bytes, size_t bytes,
                            ze_handle signal, uint32_t wait_count, ze_handle *waits)
{
    struct command command = {.what = FILL, .to = to, .bytes = bytes, .pattern_bytes = pattern_bytes, .signal = signal};
    if (pattern_bytes == 0 || pattern_bytes > sizeof command.pattern) {
        return ZE_BAD_ARGUMENT;
    }
    memcpy(command.pattern, pattern, pattern_bytes);
    return append(list, command, wait_count, waits);
}

ZE(zeCommandListAppendMemoryFill, ze_handle list, void *to, const void *pattern, size_t pattern_bytes, size_t bytes,
   ze_handle signal, uint32_t wait_count, ze_handle *waits)
{
    ZE_TRACE(CommandListAppendMemoryFill, ze_fill,
             append_fill(list, to, pattern, pattern_bytes, bytes, signal, wait_count, waits), &list, &to, &pattern,
             &pattern_bytes, &bytes, &signal, &wait_count, &waits);
}

ZE(zeCommandListAppendBarrier, ze_handle list, ze_handle signal, uint32_t wait_count, ze_handle *waits)
{
    return append(list, (struct command){.what = JOIN, .signal = signal}, wait_count, waits);
}

ZE(zeCommandListAppendQueryKernelTimestamps, ze_handle list, uint32_t count, ze_handle *events, void *times,
   const size_t *offsets, ze_handle signal, uint32_t wait_count, ze_handle *waits)
{
    if (count != 1 || offsets != NULL || !ze_sim_has_times(events[0])) {
        return ZE_BAD_ARGUMENT;
    }
    return append(list, (struct command){.what = TIMES, .to = times, .timed = events[0], .signal = signal}, wait_count,
                  waits);
}

/* ---- execution, and waiting for it ---- */

static uint32_t execute_lists(struct ze_sim_list *queue, uint32_t count, ze_handle *lists)
{
    for (uint32_t i = 0; i < count; i++) {
        const struct ze_sim_list *list = lists[i];
        if (!list->closed || list->immediate) {
            return ZE_BAD_ARGUMENT;
        }
        for (size_t j = 0; j < list->count; j++) {
            execute(queue, &list->commands[j]);
        }
    }
    return ZE_OK;
}

ZE(zeCommandQueueExecuteCommandLists, ze_handle queue, uint32_t count, ze_handle *lists, ze_handle fence)
{
    ZE_TRACE(CommandQueueExecuteCommandLists, ze_execute, execute_lists(queue, count, lists), &queue, &count, &lists,
             &fence);
}

static uint32_t synchronize(struct ze_sim_list *list, uint64_t timeout)
{
    return ze_sim_wait(line_end((int)list->index, &list->line), timeout);
}

ZE(zeCommandQueueSynchronize, ze_handle queue, uint64_t timeout)
{
    ZE_TRACE(CommandQueueSynchronize, ze_one, synchronize(queue, timeout), &queue);
}

ZE(zeCommandListHostSynchronize, ze_handle list, uint64_t timeout)
{
    ZE_TRACE(CommandListHostSynchronize, ze_one, synchronize(list, timeout), &list);
}
