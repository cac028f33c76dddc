/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernels, copies and fills: each gets an event of our own, in which the device leaves when it ran.
 *
 *   - Without an event of the program's, it signals ours.
 *   - With one that has times itself, it signals that one as it would, and the device copies the times behind it.
 *   - With any other, it signals ours, and a barrier behind it signals the program's.
 *
 * What goes to an immediate list is under way at once; a recorded list keeps its work, which is under way whenever it is
 * executed. Two locks: `harvest` is held while events are read, `lock` for the tables.
 */
#include <pthread.h>
#include <string.h>

#include "level_zero_events.h"
#include "level_zero_tables.h"

enum { AT_ONCE = 256 };

struct list {
    struct ze_known known;
    struct ze_context *context;
    const struct ze_gpu *gpu;
    uint32_t number;
    bool immediate;
    struct ze_work *works;
};

struct kernel {
    struct ze_known known;
    const char *name;
    uint32_t block[3];
};

static struct {
    pthread_mutex_t harvest, lock;
    struct ze_table lists, kernels;
    uint32_t list_count, correlations;
    struct ze_work *first, *last; /* under way */
    unsigned under_way;
    bool open;         /* a profile wants work */
    uint32_t profiles; /* that have begun */
} all = {.harvest = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- kernels ---- */

static struct kernel *kernel_of(ze_handle handle)
{
    struct kernel *kernel = ze_table_find(&all.kernels, handle);
    if (kernel == NULL && (kernel = ze_table_add(&all.kernels, handle, sizeof *kernel)) != NULL) {
        char text[SLUICE_PROFILE_MAX_NAME + 1] = "";
        size_t size = sizeof text - 1;
        kernel->name = ze.zeKernelGetName(handle, &size, text) == ZE_OK ? ze_name(text) : NULL;
    }
    return kernel;
}

void ze_kernel_group(ze_handle handle, const uint32_t *block)
{
    pthread_mutex_lock(&all.lock);
    struct kernel *kernel = all.open ? kernel_of(handle) : NULL;
    if (kernel != NULL) {
        memcpy(kernel->block, block, sizeof kernel->block);
    }
    pthread_mutex_unlock(&all.lock);
}

void ze_forget_kernel(ze_handle handle)
{
    pthread_mutex_lock(&all.lock);
    ze_table_remove(&all.kernels, handle);
    pthread_mutex_unlock(&all.lock);
}

/* ---- lists ---- */

/* The lock is held. */
static struct list *list_of(ze_handle handle)
{
    ze_handle device = NULL, context = NULL;
    uint8_t immediate = 0;
    struct list *list = ze_table_find(&all.lists, handle);
    if (list != NULL || ze.zeCommandListGetDeviceHandle(handle, &device) != ZE_OK ||
        ze.zeCommandListGetContextHandle(handle, &context) != ZE_OK ||
        ze.zeCommandListIsImmediate(handle, &immediate) != ZE_OK) {
        return list;
    }
    list = ze_table_add(&all.lists, handle, sizeof *list);
    if (list != NULL) {
        list->context = ze_context_of(context);
        list->gpu = ze_gpu_of(device);
        list->number = ++all.list_count;
        list->immediate = immediate != 0;
    }
    return list;
}

uint8_t ze_place(uint32_t kind)
{
    static const uint8_t places[] = {
        [ZE_IN_HOST] = SLUICE_PROFILE_PINNED,
        [ZE_IN_DEVICE] = SLUICE_PROFILE_ON_DEVICE,
        [ZE_IN_SHARED] = SLUICE_PROFILE_MANAGED,
    };
    return kind < sizeof places ? places[kind] : SLUICE_PROFILE_UNKNOWN;
}

uint8_t ze_place_of(ze_handle handle, const void *memory)
{
    struct ze_allocation properties = {.type = ZE_TYPE_ALLOCATION};
    pthread_mutex_lock(&all.lock);
    const struct list *list = all.open ? list_of(handle) : NULL;
    ze_handle context = list != NULL && list->context != NULL ? ze_context_handle(list->context) : NULL;
    pthread_mutex_unlock(&all.lock);
    bool known = context != NULL && ze.zeMemGetAllocProperties(context, memory, &properties, NULL) == ZE_OK;
    uint8_t place = known ? ze_place(properties.kind) : SLUICE_PROFILE_UNKNOWN;
    return place != SLUICE_PROFILE_UNKNOWN ? place : SLUICE_PROFILE_PAGEABLE; /* what no driver has allocated */
}

/* ---- reading events: `harvest` is held ---- */

static void keep(struct ze_work *work)
{
    struct ze_times times;
    bool known;
    if (work->copied) {
        times = *work->times;
        known = times.global.start != times.global.end; /* else the program has reset its event before it was copied */
    } else {
        known = ze.zeEventQueryKernelTimestamp(work->event, &times) == ZE_OK;
    }
    if (!known) {
        ze_lose(1);
        return;
    }
    work->record.start = ze_when(work->gpu, times.global.start);
    work->record.end = ze_when(work->gpu, times.global.end);
    ze_keep(&work->record, work->name);
}

/* The lock is held in these three. */
static void set_out(struct ze_work *work)
{
    work->next = NULL;
    if (all.first == NULL) {
        all.first = work;
    } else {
        all.last->next = work;
    }
    all.last = work;
    all.under_way++;
    work->under_way = true;
}

static struct ze_work *take_first(void)
{
    struct ze_work *work = all.first;
    if (work != NULL) {
        all.first = work->next;
        all.under_way--;
    }
    return work;
}

static void come_back(struct ze_work *work)
{
    work->under_way = false;
    if (!work->recorded) {
        ze_event_return(work);
    }
}

/* Looks at some of those under way, no further than the first that is not complete if it is `hurried`; how many. */
static unsigned harvest_some(unsigned most, bool hurried)
{
    struct ze_work *taken[AT_ONCE];
    bool done[AT_ONCE] = {false};
    unsigned count = 0, seen = 0;
    pthread_mutex_lock(&all.lock);
    for (; count < most && count < AT_ONCE && (taken[count] = take_first()) != NULL; count++) {
    }
    pthread_mutex_unlock(&all.lock);
    for (; seen < count; seen++) {
        done[seen] = ze.zeEventQueryStatus(taken[seen]->event) != ZE_NOT_READY;
        if (done[seen]) {
            keep(taken[seen]);
            ze.zeEventHostReset(taken[seen]->event);
        } else if (hurried) {
            break;
        }
    }
    pthread_mutex_lock(&all.lock);
    for (unsigned i = 0; i < count; i++) {
        done[i] ? come_back(taken[i]) : set_out(taken[i]);
    }
    pthread_mutex_unlock(&all.lock);
    return count;
}

static unsigned under_way(void)
{
    pthread_mutex_lock(&all.lock);
    unsigned count = all.under_way;
    pthread_mutex_unlock(&all.lock);
    return count;
}

static void harvest_all(void)
{
    for (unsigned left = under_way(), seen = 1; left > 0 && seen > 0; left -= seen) {
        seen = harvest_some(left, false);
    }
}

void ze_harvest(void)
{
    pthread_mutex_lock(&all.harvest);
    ze_compare_clocks();
    pthread_mutex_unlock(&all.harvest);
    for (unsigned left = under_way(), seen = 1; left > 0 && seen > 0; left -= seen) {
        pthread_mutex_lock(&all.harvest); /* for a moment only: a thread of the program may want it */
        seen = harvest_some(left, false);
        pthread_mutex_unlock(&all.harvest);
    }
    pthread_mutex_lock(&all.harvest); /* what such a thread is reading just now is complete, too */
    ze_pass_on();
    pthread_mutex_unlock(&all.harvest);
}

/* ---- work that is appended ---- */

/* The lock is held. Where all events are in use, what is complete by now is read here, if nobody reads already. */
static struct ze_work *take_event(struct ze_context *context)
{
    struct ze_work *work = ze_event_take(context);
    if (work != NULL) {
        return work;
    }
    uint32_t profile = all.profiles;
    pthread_mutex_unlock(&all.lock);
    if (pthread_mutex_trylock(&all.harvest) == 0) {
        harvest_some(AT_ONCE, true);
        pthread_mutex_unlock(&all.harvest);
    }
    pthread_mutex_lock(&all.lock);
    bool goes_on = all.open && all.profiles == profile; /* else the context and the list may be none any more */
    return goes_on ? ze_event_take(context) : NULL;
}

/* Whether the device writes when its work ran into this event of the program's. */
static bool has_times(ze_handle event)
{
    ze_handle pool = NULL;
    uint32_t flags = 0;
    return ze.zeEventGetEventPool(event, &pool) == ZE_OK && ze.zeEventPoolGetFlags(pool, &flags) == ZE_OK &&
           (flags & ZE_POOL_TIMESTAMPS) != 0;
}

/* The lock is held. */
static struct ze_work *take_work(const struct list *list, bool copied)
{
    struct ze_work *work = list != NULL && list->context != NULL ? take_event(list->context) : NULL;
    if (work != NULL && copied && work->times == NULL) {
        ze_event_return(work);
        work = NULL;
    }
    return work;
}

/* The lock is held. */
static void describe(struct ze_work *work, const struct list *list, ze_handle handle)
{
    const struct kernel *kernel = handle != NULL ? kernel_of(handle) : NULL;
    work->name = NULL;
    if (kernel != NULL) {
        work->name = kernel->name;
        memcpy(work->record.kernel.block, kernel->block, sizeof kernel->block);
    }
    work->record.device = ze_gpu_number(list->gpu);
    work->record.context = ze_context_number(list->context);
    work->record.stream = list->number;
    work->record.correlation = ++all.correlations;
    work->gpu = list->gpu;
    work->recorded = !list->immediate;
}

struct ze_work *ze_work_begin(ze_handle handle, ze_handle *signal, const struct sluice_profile_record *record,
                              ze_handle kernel)
{
    bool copied = *signal != NULL && has_times(*signal);
    pthread_mutex_lock(&all.lock);
    bool open = all.open;
    const struct list *list = open ? list_of(handle) : NULL;
    struct ze_work *work = take_work(list, copied);
    if (work != NULL) {
        work->record = *record;
        describe(work, list, kernel);
        work->copied = copied;
        work->theirs = *signal;
    }
    pthread_mutex_unlock(&all.lock);
    if (work == NULL) {
        ze_lose(open);
    } else if (!copied) {
        *signal = work->event;
    }
    return work;
}

/*
 * The program's own event gets its signal, or the device copies its times: behind a barrier that waits for no event. A
 * device that waits for one hangs if it is reset before the device has seen its signal, be it by us or by the program.
 */
static bool join_event(struct ze_work *work, ze_handle list)
{
    uint32_t result = ze.zeCommandListAppendBarrier(list, work->copied ? NULL : work->theirs, 0, NULL);
    if (result == ZE_OK && work->copied) {
        result = ze.zeCommandListAppendQueryKernelTimestamps(list, 1, &work->theirs, work->times, NULL, work->event, 0,
                                                             NULL);
    }
    return result == ZE_OK || !work->copied; /* else ours gets no signal */
}

uint32_t ze_work_end(struct ze_work *work, ze_handle handle, bool appended)
{
    uint32_t correlation = work->record.correlation;
    bool wanted = appended && (work->theirs == NULL || join_event(work, handle));
    pthread_mutex_lock(&all.lock);
    struct list *list = wanted && work->recorded ? ze_table_find(&all.lists, handle) : NULL;
    if (list != NULL) {
        work->sibling = list->works;
        list->works = work;
    } else if (wanted && !work->recorded) {
        set_out(work);
    } else {
        ze_event_return(work);
    }
    pthread_mutex_unlock(&all.lock);
    return correlation;
}

/* ---- recorded lists ---- */

/* Their events are reset: what an execution before left in them is read, or lost. */
void ze_lists_begin(uint32_t count, const ze_handle *handles)
{
    pthread_mutex_lock(&all.harvest);
    harvest_all();
    pthread_mutex_lock(&all.lock);
    for (uint32_t i = 0; i < count; i++) {
        const struct list *list = ze_table_find(&all.lists, handles[i]);
        for (struct ze_work *work = list != NULL ? list->works : NULL; work != NULL; work = work->sibling) {
            ze.zeEventHostReset(work->event);
            if (work->under_way) {
                ze_lose(1);
            }
        }
    }
    pthread_mutex_unlock(&all.lock);
    pthread_mutex_unlock(&all.harvest);
}

void ze_lists_end(uint32_t count, const ze_handle *handles)
{
    pthread_mutex_lock(&all.lock);
    for (uint32_t i = 0; i < count; i++) {
        const struct list *list = ze_table_find(&all.lists, handles[i]);
        for (struct ze_work *work = list != NULL ? list->works : NULL; work != NULL; work = work->sibling) {
            if (!work->under_way) {
                set_out(work);
            }
        }
    }
    pthread_mutex_unlock(&all.lock);
}

/* ---- what ends ---- */

void ze_forget_list(ze_handle handle, bool destroyed)
{
    pthread_mutex_lock(&all.lock);
    struct list *list = ze_table_find(&all.lists, handle);
    struct ze_work *next;
    for (struct ze_work *work = list != NULL ? list->works : NULL; work != NULL; work = next) {
        next = work->sibling;
        work->recorded = false;
        if (!work->under_way) {
            ze_event_return(work);
        }
    }
    if (list != NULL) {
        list->works = NULL;
    }
    if (destroyed) {
        ze_table_remove(&all.lists, handle);
    }
    pthread_mutex_unlock(&all.lock);
}

/* The lock is held. */
static void forget_work(const struct ze_context *context)
{
    unsigned left = all.under_way;
    for (; left > 0; left--) {
        struct ze_work *work = take_first();
        if (work->context != context) {
            set_out(work);
        }
    }
    for (size_t i = 0; i < ZE_BUCKETS; i++) {
        for (struct ze_known *known = all.lists.buckets[i], *next; known != NULL; known = next) {
            next = known->next;
            if (((struct list *)known)->context == context) {
                ze_table_remove(&all.lists, known->handle);
            }
        }
    }
}

void ze_forget_context(ze_handle handle)
{
    pthread_mutex_lock(&all.harvest);
    harvest_all();
    pthread_mutex_lock(&all.lock);
    struct ze_context *context = ze_context_find(handle);
    if (context != NULL) {
        forget_work(context);
        ze_events_destroy(context);
    }
    pthread_mutex_unlock(&all.lock);
    pthread_mutex_unlock(&all.harvest);
}

/* ---- profiles ---- */

void ze_work_open(void)
{
    pthread_mutex_lock(&all.harvest);
    ze_find_devices();
    harvest_all(); /* what came late for an earlier profile is nobody's */
    pthread_mutex_lock(&all.lock);
    ze_table_clear(&all.kernels); /* what is known of their groups may have changed */
    all.open = true;
    all.profiles++;
    pthread_mutex_unlock(&all.lock);
    pthread_mutex_unlock(&all.harvest);
}

bool ze_work_close(void)
{
    pthread_mutex_lock(&all.harvest);
    harvest_all();
    pthread_mutex_lock(&all.lock);
    all.open = false;
    bool nothing = !ze_events_used();
    if (nothing) {
        ze_events_destroy_all();
        ze_table_clear(&all.lists);
        ze_table_clear(&all.kernels);
    }
    pthread_mutex_unlock(&all.lock);
    pthread_mutex_unlock(&all.harvest);
    return nothing;
}
