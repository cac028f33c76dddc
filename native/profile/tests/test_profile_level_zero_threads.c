/* SPDX-License-Identifier: Apache-2.0 */
/* Threads launch kernels and end contexts while profiles begin and end: each event of ours is used once at a time. */
#include "check.h"
#include "level_zero.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 4, PROFILES = 20, CONTEXTS_LEAST = 20, LAUNCHES = 40 };

struct level_zero ze;

struct event {
    _Atomic bool signalled;
};

struct list {
    ze_handle context;
    bool immediate;
};

static char device;
static _Atomic unsigned pools, events;
static atomic_bool over;

static uint32_t get_device(ze_handle driver, uint32_t *count, ze_handle *devices)
{
    (void)driver;
    *count = 1;
    devices[0] = &device;
    return ZE_OK;
}

static uint32_t get_drivers(uint32_t *count, ze_handle *drivers)
{
    return get_device(NULL, count, drivers);
}

static uint32_t get_properties(ze_handle handle, struct ze_device *properties)
{
    (void)handle;
    properties->timer = 1000000000;
    properties->timestamp_bits = properties->kernel_timestamp_bits = 64;
    return ZE_OK;
}

static uint32_t get_timestamps(ze_handle handle, uint64_t *host, uint64_t *cycles)
{
    (void)handle;
    *host = *cycles = 1;
    return ZE_OK;
}

static uint32_t create_pool(ze_handle context, const struct ze_event_pool *how, uint32_t count, ze_handle *devices,
                            ze_handle *pool)
{
    (void)context, (void)how, (void)count, (void)devices;
    pools++;
    *pool = &pools;
    return ZE_OK;
}

static uint32_t destroy_pool(ze_handle pool)
{
    (void)pool;
    pools--;
    return ZE_OK;
}

static uint32_t create_event(ze_handle pool, const struct ze_event *how, ze_handle *event)
{
    (void)pool, (void)how;
    events++;
    *event = calloc(1, sizeof(struct event));
    return *event != NULL ? ZE_OK : ZE_NOT_READY;
}

static uint32_t destroy_event(ze_handle event)
{
    events--;
    free(event);
    return ZE_OK;
}

static uint32_t reset_event(ze_handle event)
{
    ((struct event *)event)->signalled = false;
    return ZE_OK;
}

static uint32_t query_event(ze_handle event)
{
    return ((struct event *)event)->signalled ? ZE_OK : ZE_NOT_READY;
}

static uint32_t query_times(ze_handle event, struct ze_times *times)
{
    memset(times, 0, sizeof *times);
    return query_event(event);
}

static uint32_t name_of(ze_handle kernel, size_t *size, char *name)
{
    (void)kernel;
    *size = sizeof "gemm";
    strcpy(name, "gemm");
    return ZE_OK;
}

static uint32_t device_of(ze_handle list, ze_handle *found)
{
    (void)list;
    *found = &device;
    return ZE_OK;
}

static uint32_t context_of(ze_handle list, ze_handle *context)
{
    *context = ((struct list *)list)->context;
    return ZE_OK;
}

static uint32_t is_immediate(ze_handle list, uint8_t *immediate)
{
    *immediate = ((struct list *)list)->immediate;
    return ZE_OK;
}

static uint32_t no_memory(ze_handle context, const struct ze_host_memory *how, size_t bytes, size_t alignment,
                          void **memory)
{
    (void)context, (void)how, (void)bytes, (void)alignment, (void)memory;
    return ZE_NOT_READY;
}

static void launch(struct list *list, ze_handle kernel)
{
    const struct sluice_profile_record record = {.kind = SLUICE_PROFILE_KERNEL};
    ze_handle signal = NULL;
    struct ze_work *work = ze_work_begin(list, &signal, &record, kernel);
    CHECK((work == NULL) == (signal == NULL));
    if (work == NULL) {
        return;
    }
    if (list->immediate) {
        CHECK(!atomic_exchange(&((struct event *)signal)->signalled, true)); /* nobody else has it */
    }
    ze_work_end(work, list, true);
}

static void use_context(ze_handle context)
{
    char kernel;
    struct list immediate = {.context = context, .immediate = true}, recorded = {.context = context};
    ze_handle list = &recorded;
    for (int i = 0; i < LAUNCHES; i++) {
        launch(&immediate, &kernel);
        launch(&recorded, &kernel);
        ze_lists_begin(1, &list);
        ze_lists_end(1, &list);
    }
    ze_forget_list(&recorded, true);
    ze_forget_list(&immediate, true);
    ze_forget_kernel(&kernel);
    ze_forget_context(context);
}

/* Lists of this thread, whose counts are its own while other threads make and end theirs. */
static void run_recorded(uint64_t *unseen)
{
    char list, immediate;
    ze_handle lists[] = {&list, &immediate};
    ze_recorded_made(&list);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < LAUNCHES; i++) {
            ze_recorded_append(&list, ZE_RECORDED_KERNELS);
            ze_recorded_append(&list, ZE_RECORDED_COPIES);
            ze_recorded_append(&immediate, ZE_RECORDED_KERNELS);
        }
        ze_recorded_execute(2, lists, 1u << ZE_RECORDED_KERNELS);
        *unseen += LAUNCHES;
        ze_recorded_execute(2, lists, 1u << ZE_RECORDED_KERNELS | 1u << ZE_RECORDED_COPIES);
        *unseen += 2 * LAUNCHES;
        ze_recorded_reset(&list);
        ze_recorded_execute(2, lists, 1u << ZE_RECORDED_KERNELS | 1u << ZE_RECORDED_COPIES);
    }
    ze_recorded_gone(&list);
    ze_recorded_execute(2, lists, 1u << ZE_RECORDED_KERNELS);
}

static void *program(void *unseen)
{
    char contexts[2];
    for (int i = 0; i < CONTEXTS_LEAST || !over; i++) {
        use_context(&contexts[i % 2]);
        run_recorded(unseen);
    }
    return NULL;
}

static uint64_t profile(void)
{
    uint64_t count = 0;
    struct buffer buffer;
    ze_work_open();
    ze_keep_open(true);
    for (int i = 0; i < 3; i++) {
        ze_harvest();
        while (buffers_wait(&buffer, 1000000)) {
            count += buffer.valid;
            buffers_return(&buffer);
        }
    }
    ze_keep_open(false);
    ze_work_close();
    return count;
}

int main(void)
{
    ze = (struct level_zero){.zeDriverGet = get_drivers,
                             .zeDeviceGet = get_device,
                             .zeDeviceGetProperties = get_properties,
                             .zeDeviceGetGlobalTimestamps = get_timestamps,
                             .zeEventPoolCreate = create_pool,
                             .zeEventPoolDestroy = destroy_pool,
                             .zeEventCreate = create_event,
                             .zeEventDestroy = destroy_event,
                             .zeEventHostReset = reset_event,
                             .zeEventQueryStatus = query_event,
                             .zeEventQueryKernelTimestamp = query_times,
                             .zeKernelGetName = name_of,
                             .zeCommandListGetDeviceHandle = device_of,
                             .zeCommandListGetContextHandle = context_of,
                             .zeCommandListIsImmediate = is_immediate,
                             .zeMemAllocHost = no_memory};
    pthread_t threads[THREADS];
    uint64_t collected = 0, unseen[THREADS] = {0}, counted = 0;
    CHECK(buffers_open());
    for (int i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, program, &unseen[i]) == 0);
    }
    for (int i = 0; i < PROFILES; i++) {
        collected += profile();
        counted += ze_recorded_unseen();
    }
    over = true;
    for (int i = 0; i < THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
        counted -= unseen[i];
    }
    CHECK(counted + ze_recorded_unseen() == 0);
    ze_work_open();
    CHECK(ze_work_close() && collected > 0 && pools == 0 && events == 0);
    return 0;
}
