#include "runtime.h"

#include "mps.h"
#include "vram.h"

#include <fcntl.h>
#include <pthread.h>
#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct device {
    unsigned index;
    uint8_t instance;
    uint64_t small; /* bytes of allocations below a granule, which share granules */
    struct rt_context *primary;
    struct rt_pool standard, graphs, *current;
};

struct mapping {
    uintptr_t base;
    size_t size;
    struct rt_block *physical;
};

static struct {
    pthread_mutex_t lock;
    pid_t owner; /* 0: closed */
    bool forked; /* since then: a driver does not survive that */
    uint64_t granule;
    int count;
    struct device devices[RT_MAX_DEVICES];
    void *blocks;   /* tree of struct rt_block by address */
    void *mappings; /* tree of struct mapping by address */
} runtime = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- trees of disjoint address ranges: equal means that they overlap ---- */

static int compare_blocks(const void *a, const void *b)
{
    const struct rt_block *one = a, *other = b;
    if (one->base + one->mapped <= other->base) {
        return -1;
    }
    return one->base >= other->base + other->mapped;
}

static int compare_mappings(const void *a, const void *b)
{
    const struct mapping *one = a, *other = b;
    if (one->base + one->size <= other->base) {
        return -1;
    }
    return one->base >= other->base + other->size;
}

static struct rt_block *block_at(uintptr_t address)
{
    struct rt_block key = {.base = address, .mapped = 1}, **found = tfind(&key, &runtime.blocks, compare_blocks);
    return found != NULL ? *found : NULL;
}

static struct rt_block *block_of(const void *handle, enum rt_kind kind)
{
    struct rt_block *block = block_at((uintptr_t)handle);
    return block != NULL && block->base == (uintptr_t)handle && block->kind == kind ? block : NULL;
}

static bool remember(struct rt_block *block)
{
    return tsearch(block, &runtime.blocks, compare_blocks) != NULL;
}

/* ---- devices ---- */

static bool names_device(const char *word, size_t length, const struct device *device, size_t ordinal)
{
    struct sim_gpu gpu;
    if (length == 0 || !sim_peek(device->index, &gpu)) {
        return false;
    }
    char text[64], *end;
    if (length >= sizeof text) {
        return false;
    }
    memcpy(text, word, length);
    text[length] = 0;
    unsigned long number = strtoul(text, &end, 10);
    if (end != text && *end == 0) {
        return number == ordinal;
    }
    const char *uuid = device->instance == SIM_NO_INSTANCE ? gpu.uuid : gpu.instances[device->instance].uuid;
    if (gpu.vendor == SIM_VENDOR_AMD && strncasecmp(text, "GPU-", 4) == 0 && strlen(gpu.uuid) == 36) {
        char serial[32]; /* AMD's short form: the 16 digits of the serial number */
        memcpy(serial, gpu.uuid, 2);
        memcpy(serial + 2, gpu.uuid + 21, 2);
        memcpy(serial + 4, gpu.uuid + 24, 13);
        return strcasecmp(text + 4, serial) == 0;
    }
    return length >= 8 && strncasecmp(uuid, text, length) == 0; /* an abbreviation is enough */
}

/* Keep the devices that a list names, in its order; what is wrong in it ends it. */
static int apply_list(const char *list, const struct device *from, int count, struct device *to)
{
    int chosen = 0;
    while (list != NULL && chosen < RT_MAX_DEVICES) {
        const char *comma = strchr(list, ',');
        size_t length = comma != NULL ? (size_t)(comma - list) : strlen(list);
        int place = 0;
        while (place < count && !names_device(list, length, &from[place], (size_t)place)) {
            place++;
        }
        for (int i = 0; i < chosen; i++) { /* nothing twice */
            if (place < count && to[i].index == from[place].index && to[i].instance == from[place].instance) {
                return chosen;
            }
        }
        if (place == count) {
            return chosen;
        }
        to[chosen++] = from[place];
        list = comma != NULL ? comma + 1 : NULL;
    }
    return chosen;
}

static bool is_mig_list(const char *list)
{
    return list != NULL && strncasecmp(list, "MIG-", 4) == 0;
}

/* All devices that a program could use: whole GPUs, AMD partitions and, in MIG mode, instances; only the first of these
 * unless named. */
static int all_devices(struct device *devices, bool every_instance)
{
    uint8_t visible[SIM_MAX_GPUS];
    unsigned gpus = sim_visible(visible);
    int count = 0;
    bool instance_taken = false;
    for (unsigned i = 0; i < gpus; i++) {
        struct sim_gpu gpu;
        if (!sim_peek(visible[i], &gpu)) {
            continue;
        }
        bool parts = gpu.vendor == SIM_VENDOR_AMD && gpu.instances[0].used;
        if (!gpu.mig_enabled && !parts) {
            devices[count++] = (struct device){.index = visible[i], .instance = SIM_NO_INSTANCE};
            continue;
        }
        for (uint8_t k = 0; k < SIM_MAX_INSTANCES && (parts || every_instance || !instance_taken); k++) {
            if (gpu.instances[k].used && !gpu.instances[k].bare && sim_instance_visible(&gpu, &gpu.instances[k])) {
                devices[count++] = (struct device){.index = visible[i], .instance = k};
                instance_taken = !parts;
            }
        }
    }
    return count;
}

static void find_devices(const char *const *lists, size_t list_count)
{
    static struct device stages[2][SIM_MAX_GPUS * SIM_MAX_INSTANCES];
    bool mig = false;
    for (size_t i = 0; i < list_count; i++) {
        mig = mig || is_mig_list(getenv(lists[i]));
    }
    struct device *from = stages[0], *to = stages[1];
    int count = all_devices(from, mig);
    for (size_t i = 0; i < list_count; i++) {
        const char *list = getenv(lists[i]);
        if (list != NULL) {
            count = apply_list(list, from, count, to);
            struct device *swap = from;
            from = to;
            to = swap;
        }
    }
    runtime.count = count < RT_MAX_DEVICES ? count : RT_MAX_DEVICES;
    for (int i = 0; i < runtime.count; i++) {
        runtime.devices[i] = from[i];
        runtime.devices[i].standard = (struct rt_pool){.device = i};
        runtime.devices[i].graphs = (struct rt_pool){.device = i, .threshold = UINT64_MAX};
        runtime.devices[i].current = &runtime.devices[i].standard;
    }
}

static enum rt_status status_of(enum sim_status status)
{
    switch (status) {
    case SIM_OK:
        return RT_OK;
    case SIM_NO_MEMORY:
        return RT_NO_MEMORY;
    case SIM_CLOSED:
        return RT_CLOSED;
    case SIM_NOT_LOADED:
        return RT_NO_DEVICE;
    case SIM_NO_DEVICE:
        return RT_BAD_DEVICE;
    case SIM_OLD_DRIVER:
        return RT_INVALID;
    case SIM_CORRUPT:
    case SIM_LOST:
    case SIM_IO:
    case SIM_DENIED:
    case SIM_BUSY:
    case SIM_REFUSED:
        break;
    }
    return RT_UNAVAILABLE;
}

static void leave_content(const void *node, VISIT which, int depth)
{
    (void)depth;
    const struct rt_block *block = *(struct rt_block *const *)node;
    if ((which == postorder || which == leaf) && block->kind == RT_DEVICE) {
        vram_leave(runtime.devices[block->device].index, (const void *)block->base, block->size);
    }
}

/* What this process holds goes with it; an orderly end gives it back at once. */
static void leave(void)
{
    if (runtime.owner != getpid()) {
        return;
    }
    twalk(runtime.blocks, leave_content);
    struct sim_gpu gpu;
    for (int i = 0; i < runtime.count; i++) {
        if (sim_peek(runtime.devices[i].index, &gpu)) {
            sim_hold(runtime.devices[i].index, runtime.devices[i].instance, INT64_MIN + 1);
        }
    }
}

static void after_fork(void)
{
    runtime.forked = runtime.owner != 0;
}

enum rt_status rt_open(enum sim_vendor vendor, uint64_t granule, const char *const *lists, size_t list_count)
{
    pthread_mutex_lock(&runtime.lock);
    enum rt_status status = RT_OK;
    if (runtime.owner == 0) {
        status = status_of(sim_open(vendor));
        if (status == RT_OK) {
            runtime.owner = getpid();
            runtime.granule = granule;
            find_devices(lists, list_count);
            vram_find();
            if (vendor == SIM_VENDOR_NVIDIA) {
                mps_join();
            }
            atexit(leave);
            pthread_atfork(NULL, NULL, after_fork);
        }
    } else if (runtime.forked) {
        status = RT_CLOSED;
    }
    if (status == RT_OK && runtime.count == 0) {
        status = RT_NO_DEVICE;
    }
    pthread_mutex_unlock(&runtime.lock);
    return status;
}

/* Asked at every call, as by a driver, so without a system call. */
enum rt_status rt_ready(void)
{
    return runtime.owner != 0 && !runtime.forked ? RT_OK : RT_CLOSED;
}

int rt_count(void)
{
    return runtime.count;
}

int rt_ordinal(unsigned index)
{
    for (int i = 0; i < runtime.count; i++) {
        if (runtime.devices[i].index == index) {
            return i;
        }
    }
    return -1;
}

static enum rt_status check_device(int device)
{
    enum rt_status status = rt_ready();
    return status == RT_OK && (device < 0 || device >= runtime.count) ? RT_BAD_DEVICE : status;
}

enum rt_status rt_gpu(int device, struct sim_gpu *gpu, unsigned *index, uint8_t *instance)
{
    enum rt_status status = check_device(device);
    if (status != RT_OK) {
        return status;
    }
    const struct device *it = &runtime.devices[device];
    if (index != NULL) {
        *index = it->index;
    }
    if (instance != NULL) {
        *instance = it->instance;
    }
    status = status_of(sim_gpu(0, it->index, gpu));
    bool gone = it->instance != SIM_NO_INSTANCE && !gpu->instances[it->instance].used;
    return status == RT_OK && gone ? RT_UNAVAILABLE : status;
}

enum rt_status rt_memory(int device, uint64_t *free_bytes, uint64_t *total)
{
    struct sim_gpu gpu;
    unsigned index;
    uint8_t instance;
    enum rt_status status = rt_gpu(device, &gpu, &index, &instance);
    if (status == RT_OK) {
        *total = sim_capacity(&gpu, instance);
        *free_bytes = *total - sim_used(index, &gpu, instance);
        struct sim_cgroup_limit limit;
        if (instance == SIM_NO_INSTANCE && sim_own_limits(index, &limit) && limit.hard < *total) {
            uint64_t left = limit.used < limit.hard ? limit.hard - limit.used : 0;
            *total = limit.hard;
            *free_bytes = left < *free_bytes ? left : *free_bytes;
        }
    }
    return status;
}

/* Not the vendor's: a program of tests says how busy it keeps a device, in thousandths. 0, or a status of sim.h. */
SIM_API int sluice_sim_load(int device, unsigned permille)
{
    if (check_device(device) != RT_OK) {
        return SIM_NO_DEVICE;
    }
    return (int)sim_load(runtime.devices[device].index, runtime.devices[device].instance, permille);
}

static enum rt_status hold(int device, int64_t change)
{
    if (change > 0 && mps_lost()) {
        return RT_UNAVAILABLE;
    }
    return change == 0 ? RT_OK
                       : status_of(sim_hold(runtime.devices[device].index, runtime.devices[device].instance, change));
}

/* Like the others below: the lock is held. */
static void give_back(int device, uint64_t bytes)
{
    hold(device, -(int64_t)bytes);
}

/* ---- contexts ---- */

static uint64_t context_bytes(int device)
{
    struct sim_gpu gpu;
    return sim_peek(runtime.devices[device].index, &gpu) ? gpu.context_mib * SIM_MIB : 0;
}

static struct rt_block *new_handle(enum rt_kind kind, int device, uint64_t charge, void *memory)
{
    struct rt_block *block = calloc(1, sizeof *block);
    if (block == NULL || memory == NULL) {
        free(block);
        return NULL;
    }
    *block =
        (struct rt_block){.base = (uintptr_t)memory, .mapped = 1, .charge = charge, .kind = kind, .device = device};
    if (!remember(block)) {
        free(block);
        return NULL;
    }
    return block;
}

static enum rt_status make_context(int device, struct rt_context **context)
{
    struct sim_gpu gpu;
    enum rt_status status = rt_gpu(device, &gpu, NULL, NULL);
    uint64_t bytes = context_bytes(device);
    if (status == RT_OK) {
        status = hold(device, (int64_t)bytes);
    }
    if (status != RT_OK) {
        return status;
    }
    *context = calloc(1, sizeof **context);
    if (new_handle(RT_CONTEXT, device, bytes, *context) == NULL) {
        free(*context);
        give_back(device, bytes);
        return RT_NO_MEMORY;
    }
    (*context)->device = device;
    (*context)->uses = 1;
    return RT_OK;
}

static void forget(struct rt_block *block);

static _Thread_local struct rt_context *wanted; /* of the walk below */
static _Thread_local struct rt_block *victim;

static void visit(const void *node, VISIT which, int depth)
{
    (void)depth;
    struct rt_block *block = *(struct rt_block *const *)node;
    if ((which == postorder || which == leaf) && block->context == wanted) {
        victim = block;
    }
}

static void drop_context(struct rt_context *context)
{
    for (;;) { /* a tree must not change while it is walked */
        wanted = context;
        victim = NULL;
        twalk(runtime.blocks, visit);
        if (victim == NULL) {
            break;
        }
        forget(victim);
    }
    struct rt_block *block = block_of(context, RT_CONTEXT);
    if (block != NULL) {
        for (unsigned i = 0; i < RT_EXTRAS; i++) {
            give_back(block->device, context->extra[i]);
        }
        forget(block);
    }
    free(context);
}

enum rt_status rt_context_grow(struct rt_context *context, unsigned which, int64_t bytes)
{
    if (!rt_context_valid(context) || which >= RT_EXTRAS) {
        return RT_INVALID;
    }
    pthread_mutex_lock(&runtime.lock);
    uint64_t *extra = &context->extra[which];
    if (bytes < 0 && (uint64_t)-bytes > *extra) {
        bytes = -(int64_t)*extra;
    }
    enum rt_status status = hold(context->device, bytes);
    if (status == RT_OK) {
        *extra += (uint64_t)bytes;
    }
    pthread_mutex_unlock(&runtime.lock);
    return status;
}

enum rt_status rt_primary(int device, struct rt_context **context)
{
    enum rt_status status = check_device(device);
    if (status != RT_OK) {
        return status;
    }
    pthread_mutex_lock(&runtime.lock);
    struct device *it = &runtime.devices[device];
    if (it->primary == NULL) {
        status = make_context(device, &it->primary);
        if (status == RT_OK) {
            it->primary->primary = true;
        }
    } else {
        it->primary->uses++;
    }
    *context = it->primary;
    pthread_mutex_unlock(&runtime.lock);
    return status;
}

enum rt_status rt_primary_release(int device, bool at_once)
{
    enum rt_status status = check_device(device);
    if (status != RT_OK) {
        return status;
    }
    pthread_mutex_lock(&runtime.lock);
    struct device *it = &runtime.devices[device];
    if (it->primary == NULL) {
        status = at_once ? RT_OK : RT_INVALID;
    } else if (at_once || --it->primary->uses == 0) {
        drop_context(it->primary);
        it->primary = NULL;
    }
    pthread_mutex_unlock(&runtime.lock);
    return status;
}

bool rt_primary_active(int device)
{
    return check_device(device) == RT_OK && runtime.devices[device].primary != NULL;
}

enum rt_status rt_context_new(int device, struct rt_context **context)
{
    enum rt_status status = check_device(device);
    if (status == RT_OK) {
        pthread_mutex_lock(&runtime.lock);
        status = make_context(device, context);
        pthread_mutex_unlock(&runtime.lock);
    }
    return status;
}

bool rt_context_valid(struct rt_context *context)
{
    pthread_mutex_lock(&runtime.lock);
    bool valid = rt_ready() == RT_OK && block_of(context, RT_CONTEXT) != NULL;
    pthread_mutex_unlock(&runtime.lock);
    return valid;
}

enum rt_status rt_context_free(struct rt_context *context)
{
    if (!rt_context_valid(context) || context->primary) {
        return RT_INVALID;
    }
    pthread_mutex_lock(&runtime.lock);
    drop_context(context);
    pthread_mutex_unlock(&runtime.lock);
    return RT_OK;
}

/* ---- allocations ---- */

static uint64_t round_up(uint64_t bytes, uint64_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

/* What one more allocation of `size` bytes costs: whole granules, small ones share theirs. */
static uint64_t cost(struct device *device, size_t size, bool more)
{
    if (size >= runtime.granule / 2) {
        return round_up(size, runtime.granule);
    }
    uint64_t part = round_up(size, 512), before = round_up(device->small, runtime.granule);
    device->small = more ? device->small + part : device->small - part;
    uint64_t after = round_up(device->small, runtime.granule);
    return more ? after - before : before - after;
}

static bool on_device(enum rt_kind kind)
{
    return kind == RT_DEVICE || kind == RT_MANAGED || kind == RT_ARRAY;
}

static void *reserve(size_t size, int protection)
{
    void *memory = mmap(NULL, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static void pool_release(struct rt_pool *pool, uint64_t keep)
{
    uint64_t stay = pool->used > keep ? pool->used : keep;
    if (pool->reserved > stay) {
        uint64_t granules = round_up(stay, runtime.granule);
        if (pool->reserved > granules) {
            give_back(pool->device, pool->reserved - granules);
            pool->reserved = granules;
        }
    }
}

/* Take a block out of the tree, give back what it holds, and free it. */
static void forget(struct rt_block *block)
{
    tdelete(block, &runtime.blocks, compare_blocks);
    if (block->pool != NULL) {
        block->pool->used -= block->charge;
        pool_release(block->pool, block->pool->threshold);
    } else if (on_device(block->kind) && !block->unpaid) {
        give_back(block->device, cost(&runtime.devices[block->device], block->size, false));
    } else if (block->kind == RT_CONTEXT || block->kind == RT_PHYSICAL) {
        give_back(block->device, block->charge);
    }
    if (block->file > 0 && block->kind != RT_PHYSICAL) {
        close(block->file);
    }
    if (block->kind == RT_DEVICE) {
        vram_leave(runtime.devices[block->device].index, (void *)block->base, block->size);
    }
    if (on_device(block->kind) || block->kind == RT_HOST || block->kind == RT_RANGE || block->kind == RT_IMPORT) {
        munmap((void *)block->base, block->mapped);
    }
    free(block);
}

/* Memory in the address space of this process for a block that is paid for. */
static struct rt_block *place(struct rt_context *context, enum rt_kind kind, size_t size)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    struct rt_block *block = calloc(1, sizeof *block);
    void *start = block != NULL ? reserve(round_up(size, page), PROT_READ | PROT_WRITE) : NULL;
    if (start == NULL) {
        free(block);
        return NULL;
    }
    *block = (struct rt_block){.base = (uintptr_t)start,
                               .size = size,
                               .mapped = round_up(size, page),
                               .kind = kind,
                               .device = context != NULL ? context->device : -1,
                               .context = context};
    if (!remember(block)) {
        munmap(start, block->mapped);
        free(block);
        return NULL;
    }
    return block;
}

static enum rt_status alloc_locked(struct rt_context *context, enum rt_kind kind, size_t size, void **memory)
{
    struct device *device = on_device(kind) ? &runtime.devices[context->device] : NULL;
    uint64_t bytes = device != NULL ? cost(device, size, true) : 0;
    enum rt_status paid = device != NULL ? hold(context->device, (int64_t)bytes) : RT_OK;
    if (paid != RT_OK && device != NULL) {
        cost(device, size, false);
    }
    if (paid != RT_OK && !(paid == RT_NO_MEMORY && kind == RT_MANAGED)) {
        return paid;
    }
    struct rt_block *block = place(context, kind, size);
    if (block == NULL) {
        if (device != NULL && paid == RT_OK) {
            cost(device, size, false);
            give_back(context->device, bytes);
        }
        return RT_NO_MEMORY;
    }
    block->unpaid = paid != RT_OK;
    *memory = (void *)block->base;
    if (kind == RT_DEVICE) {
        vram_show(device->index, *memory, size);
    }
    return RT_OK;
}

enum rt_status rt_alloc(struct rt_context *context, enum rt_kind kind, size_t size, void **memory)
{
    struct sim_gpu gpu;
    if (size == 0 || size > (size_t)1 << 46) {
        return size == 0 ? RT_INVALID : RT_NO_MEMORY;
    }
    enum rt_status status = kind == RT_HOST ? rt_ready() : rt_gpu(context->device, &gpu, NULL, NULL);
    if (status == RT_OK) {
        pthread_mutex_lock(&runtime.lock);
        status = alloc_locked(context, kind, size, memory);
        pthread_mutex_unlock(&runtime.lock);
    }
    return status;
}

enum rt_status rt_free(void *memory, enum rt_kind kind)
{
    enum rt_status status = rt_ready();
    if (status != RT_OK) {
        return status;
    }
    pthread_mutex_lock(&runtime.lock);
    struct rt_block *block = block_at((uintptr_t)memory);
    bool match = block != NULL && block->base == (uintptr_t)memory &&
                 (block->kind == kind || (kind == RT_DEVICE && block->kind == RT_MANAGED));
    if (match) {
        forget(block);
    }
    pthread_mutex_unlock(&runtime.lock);
    return match ? RT_OK : RT_INVALID;
}

enum rt_status rt_find(const void *memory, struct rt_block *block)
{
    pthread_mutex_lock(&runtime.lock);
    struct rt_block *found = rt_ready() == RT_OK ? block_at((uintptr_t)memory) : NULL;
    if (found != NULL) {
        *block = *found;
    }
    pthread_mutex_unlock(&runtime.lock);
    return found != NULL ? RT_OK : RT_INVALID;
}

enum rt_status rt_move(void *memory, bool to_host)
{
    pthread_mutex_lock(&runtime.lock);
    struct rt_block *block = rt_ready() == RT_OK ? block_at((uintptr_t)memory) : NULL;
    enum rt_status status = block != NULL && block->kind == RT_MANAGED ? RT_OK : RT_INVALID;
    if (status == RT_OK && block->unpaid != to_host) {
        struct device *device = &runtime.devices[block->device];
        uint64_t bytes = cost(device, block->size, !to_host);
        status = to_host ? RT_OK : hold(block->device, (int64_t)bytes);
        if (to_host) {
            give_back(block->device, bytes);
        } else if (status != RT_OK) {
            cost(device, block->size, false);
        }
        block->unpaid = status == RT_OK ? to_host : block->unpaid;
    }
    pthread_mutex_unlock(&runtime.lock);
    return status == RT_NO_MEMORY ? RT_OK : status; /* a wish, not an order */
}

/* ---- sharing with other processes ---- */

#define SHARED_MAGIC 0x73696d2d69706331u

enum rt_status rt_share(void *memory, struct rt_shared *shared)
{
    pthread_mutex_lock(&runtime.lock);
    struct rt_block *block = rt_ready() == RT_OK ? block_of(memory, RT_DEVICE) : NULL;
    enum rt_status status = block != NULL && block->pool == NULL ? RT_OK : RT_INVALID;
    if (status == RT_OK && block->file == 0) { /* from now on its bytes live in a file that others can open */
        int file = memfd_create("sluice-sim-shared", MFD_CLOEXEC);
        void *start = (void *)block->base;
        if (file < 0 || ftruncate(file, (off_t)block->mapped) != 0 ||
            pwrite(file, start, block->size, 0) != (ssize_t)block->size ||
            mmap(start, block->mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) {
            status = RT_NO_MEMORY;
            if (file >= 0) {
                close(file);
            }
        } else {
            block->file = file;
        }
    }
    if (status == RT_OK) {
        *shared =
            (struct rt_shared){.magic = SHARED_MAGIC, .size = block->size, .pid = (int)getpid(), .file = block->file};
    }
    pthread_mutex_unlock(&runtime.lock);
    return status;
}

enum rt_status rt_import(const struct rt_shared *shared, void **memory)
{
    char path[64];
    enum rt_status status = rt_ready();
    if (status != RT_OK || shared->magic != SHARED_MAGIC || shared->size == 0) {
        return status != RT_OK ? status : RT_INVALID;
    }
    snprintf(path, sizeof path, "/proc/%d/fd/%d", shared->pid, shared->file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    size_t mapped = round_up(shared->size, (size_t)sysconf(_SC_PAGESIZE));
    void *start = file >= 0 ? mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
    if (file >= 0) {
        close(file);
    }
    struct rt_block *block = start != MAP_FAILED ? calloc(1, sizeof *block) : NULL;
    if (block == NULL) {
        return start != MAP_FAILED ? RT_NO_MEMORY : RT_INVALID; /* its owner is gone, or freed it */
    }
    *block = (struct rt_block){
        .base = (uintptr_t)start, .size = shared->size, .mapped = mapped, .kind = RT_IMPORT, .device = 0};
    pthread_mutex_lock(&runtime.lock);
    status = remember(block) ? RT_OK : RT_NO_MEMORY;
    pthread_mutex_unlock(&runtime.lock);
    *memory = start;
    return status;
}

void rt_fill(void *memory, const void *value, size_t width, size_t count)
{
    static const char zero[8];
    size_t page = (size_t)sysconf(_SC_PAGESIZE), size = width * count;
    uintptr_t start = round_up((uintptr_t)memory, page), end = ((uintptr_t)memory + size) / page * page;
    if (memcmp(value, zero, width) == 0 && end > start && end - start >= 64 * page) {
        memset(memory, 0, start - (uintptr_t)memory);
        madvise((void *)start, end - start, MADV_DONTNEED); /* fresh pages are zero, and cost nothing */
        memset((void *)end, 0, (uintptr_t)memory + size - end);
        return;
    }
    for (size_t i = 0; i < count; i++) {
        memcpy((char *)memory + i * width, value, width);
    }
}

/* ---- pools ---- */

struct rt_pool *rt_default_pool(int device)
{
    return check_device(device) == RT_OK ? &runtime.devices[device].standard : NULL;
}

struct rt_pool *rt_current_pool(int device)
{
    return check_device(device) == RT_OK ? runtime.devices[device].current : NULL;
}

bool rt_pool_valid(struct rt_pool *pool)
{
    bool valid = false;
    pthread_mutex_lock(&runtime.lock);
    for (int i = 0; i < runtime.count; i++) {
        valid = valid || pool == &runtime.devices[i].standard || pool == &runtime.devices[i].graphs;
    }
    valid = rt_ready() == RT_OK && (valid || block_of(pool, RT_POOL) != NULL);
    pthread_mutex_unlock(&runtime.lock);
    return valid;
}

enum rt_status rt_set_pool(int device, struct rt_pool *pool)
{
    if (check_device(device) != RT_OK || !rt_pool_valid(pool) || pool->device != device) {
        return RT_INVALID;
    }
    runtime.devices[device].current = pool;
    return RT_OK;
}

enum rt_status rt_pool_new(int device, struct rt_pool **pool)
{
    enum rt_status status = check_device(device);
    if (status != RT_OK) {
        return status;
    }
    pthread_mutex_lock(&runtime.lock);
    *pool = calloc(1, sizeof **pool);
    if (new_handle(RT_POOL, device, 0, *pool) == NULL) {
        free(*pool);
        status = RT_NO_MEMORY;
    } else {
        (*pool)->device = device;
    }
    pthread_mutex_unlock(&runtime.lock);
    return status;
}

enum rt_status rt_pool_free(struct rt_pool *pool)
{
    pthread_mutex_lock(&runtime.lock);
    struct rt_block *block = rt_ready() == RT_OK ? block_of(pool, RT_POOL) : NULL;
    enum rt_status status = block == NULL ? RT_INVALID : pool->used > 0 ? RT_BUSY : RT_OK;
    if (status == RT_OK) {
        pool_release(pool, 0);
        if (runtime.devices[pool->device].current == pool) {
            runtime.devices[pool->device].current = &runtime.devices[pool->device].standard;
        }
        forget(block);
        free(pool);
    }
    pthread_mutex_unlock(&runtime.lock);
    return status;
}

/* The lock is held. */
static enum rt_status pool_grow(struct rt_pool *pool, uint64_t bytes)
{
    uint64_t need = pool->used + bytes;
    enum rt_status status = RT_OK;
    if (need > pool->reserved) {
        uint64_t more = round_up(need - pool->reserved, runtime.granule);
        status = hold(pool->device, (int64_t)more);
        pool->reserved += status == RT_OK ? more : 0;
    }
    return status;
}

static void pool_take(struct rt_pool *pool, uint64_t bytes)
{
    pool->used += bytes;
    pool->used_high = pool->used > pool->used_high ? pool->used : pool->used_high;
    pool->reserved_high = pool->reserved > pool->reserved_high ? pool->reserved : pool->reserved_high;
}

struct rt_pool *rt_graph_pool(int device)
{
    return check_device(device) == RT_OK ? &runtime.devices[device].graphs : NULL;
}

enum rt_status rt_pool_use(struct rt_pool *pool, uint64_t bytes)
{
    pthread_mutex_lock(&runtime.lock);
    enum rt_status status = pool_grow(pool, round_up(bytes, 512));
    if (status == RT_OK) {
        pool_take(pool, round_up(bytes, 512));
    }
    pthread_mutex_unlock(&runtime.lock);
    return status;
}

void rt_pool_unuse(struct rt_pool *pool, uint64_t bytes)
{
    pthread_mutex_lock(&runtime.lock);
    pool->used -= round_up(bytes, 512);
    pool_release(pool, pool->threshold);
    pthread_mutex_unlock(&runtime.lock);
}

enum rt_status rt_pool_alloc(struct rt_context *context, struct rt_pool *pool, size_t size, void **memory)
{
    struct sim_gpu gpu;
    if (size == 0 || !rt_pool_valid(pool)) {
        return RT_INVALID;
    }
    enum rt_status status = rt_gpu(pool->device, &gpu, NULL, NULL);
    if (status != RT_OK) {
        return status;
    }
    pthread_mutex_lock(&runtime.lock);
    uint64_t bytes = round_up(size, 512);
    status = pool_grow(pool, bytes);
    struct rt_block *block = status == RT_OK ? place(context, RT_DEVICE, size) : NULL;
    if (block != NULL) {
        block->charge = bytes;
        block->pool = pool;
        *memory = (void *)block->base;
        pool_take(pool, bytes);
    } else {
        status = status == RT_OK ? RT_NO_MEMORY : status;
        pool_release(pool, pool->threshold);
    }
    pthread_mutex_unlock(&runtime.lock);
    return status;
}

enum rt_status rt_pool_trim(struct rt_pool *pool, uint64_t keep)
{
    if (!rt_pool_valid(pool)) {
        return RT_INVALID;
    }
    pthread_mutex_lock(&runtime.lock);
    pool_release(pool, keep);
    pthread_mutex_unlock(&runtime.lock);
    return RT_OK;
}

/* ---- virtual memory ---- */

enum rt_status rt_range(size_t size, size_t alignment, void **start)
{
    enum rt_status status = rt_ready();
    if (status != RT_OK || size == 0 || size % runtime.granule != 0 || (alignment & (alignment - 1)) != 0) {
        return status != RT_OK ? status : RT_INVALID;
    }
    pthread_mutex_lock(&runtime.lock);
    size_t unit = alignment > runtime.granule ? alignment : runtime.granule;
    char *memory = reserve(size + unit, PROT_NONE);
    struct rt_block *block = memory != NULL ? calloc(1, sizeof *block) : NULL;
    if (block == NULL) {
        status = RT_NO_MEMORY;
    } else {
        char *aligned = (char *)round_up((uintptr_t)memory, unit);
        if (aligned > memory) {
            munmap(memory, (size_t)(aligned - memory));
        }
        munmap(aligned + size, (size_t)(memory + unit - aligned));
        *block =
            (struct rt_block){.base = (uintptr_t)aligned, .size = size, .mapped = size, .kind = RT_RANGE, .device = -1};
        *start = aligned;
        status = remember(block) ? RT_OK : RT_NO_MEMORY;
    }
    pthread_mutex_unlock(&runtime.lock);
    return status;
}

static struct mapping *mapping_in(uintptr_t base, size_t size)
{
    struct mapping key = {.base = base, .size = size}, **found = tfind(&key, &runtime.mappings, compare_mappings);
    return found != NULL ? *found : NULL;
}

enum rt_status rt_range_free(void *start, size_t size)
{
    pthread_mutex_lock(&runtime.lock);
    struct rt_block *block = rt_ready() == RT_OK ? block_of(start, RT_RANGE) : NULL;
    enum rt_status status = block == NULL || block->size != size         ? RT_INVALID
                            : mapping_in((uintptr_t)start, size) != NULL ? RT_BUSY
                                                                         : RT_OK;
    if (status == RT_OK) {
        forget(block);
    }
    pthread_mutex_unlock(&runtime.lock);
    return status;
}

static void drop_orphans(void);

enum rt_status rt_physical(int device, size_t size, uint64_t *handle)
{
    struct sim_gpu gpu;
    enum rt_status status = rt_gpu(device, &gpu, NULL, NULL);
    if (status != RT_OK || size == 0 || size % runtime.granule != 0) {
        return status != RT_OK ? status : RT_INVALID;
    }
    pthread_mutex_lock(&runtime.lock);
    drop_orphans();
    status = hold(device, (int64_t)size);
    if (status == RT_OK) {
        void *place_of_own = malloc(1); /* its address is the handle */
        struct rt_block *block = new_handle(RT_PHYSICAL, device, size, place_of_own);
        if (block == NULL) {
            free(place_of_own);
            give_back(device, size);
            status = RT_NO_MEMORY;
        } else {
            block->size = size;
            *handle = (uint64_t)(uintptr_t)place_of_own;
        }
    }
    pthread_mutex_unlock(&runtime.lock);
    return status;
}

static bool file_keeps(const struct rt_block *block)
{
    struct stat stamp;
    return block->file > 0 && fstat(block->file, &stamp) == 0 && stamp.st_ino == block->inode;
}

static void settle_physical(struct rt_block *block)
{
    if (block->released && block->mappings == 0 && !file_keeps(block)) {
        void *place_of_own = (void *)block->base;
        forget(block);
        free(place_of_own);
    }
}

static _Thread_local struct rt_block *orphan; /* of the walk below */

static void visit_orphan(const void *node, VISIT which, int depth)
{
    (void)depth;
    struct rt_block *block = *(struct rt_block *const *)node;
    bool over = block->kind == RT_PHYSICAL && block->released && block->mappings == 0 && !file_keeps(block);
    if ((which == postorder || which == leaf) && over) {
        orphan = block;
    }
}

/* What only a file kept that is closed by now. */
static void drop_orphans(void)
{
    do {
        orphan = NULL;
        twalk(runtime.blocks, visit_orphan);
        if (orphan != NULL) {
            settle_physical(orphan);
        }
    } while (orphan != NULL);
}

struct exported {
    uint64_t magic, size;
    int device;
};

enum rt_status rt_physical_export(uint64_t handle, int *file)
{
    pthread_mutex_lock(&runtime.lock);
    struct rt_block *block = rt_ready() == RT_OK ? block_of((void *)(uintptr_t)handle, RT_PHYSICAL) : NULL;
    enum rt_status status = block != NULL && !block->released ? RT_OK : RT_INVALID;
    struct stat stamp;
    if (status == RT_OK) {
        struct exported what = {.magic = SHARED_MAGIC, .size = block->size, .device = block->device};
        *file = memfd_create("sluice-sim-physical", MFD_CLOEXEC);
        bool done = *file >= 0 && pwrite(*file, &what, sizeof what, 0) == sizeof what && fstat(*file, &stamp) == 0;
        status = done ? RT_OK : RT_NO_MEMORY;
        block->file = done ? *file : block->file;
        block->inode = done ? stamp.st_ino : block->inode;
    }
    pthread_mutex_unlock(&runtime.lock);
    return status;
}

/* Charged to its exporter, not here. */
enum rt_status rt_physical_import(int file, uint64_t *handle)
{
    struct exported what;
    enum rt_status status = rt_ready();
    if (status != RT_OK || pread(file, &what, sizeof what, 0) != sizeof what || what.magic != SHARED_MAGIC) {
        return status != RT_OK ? status : RT_INVALID;
    }
    pthread_mutex_lock(&runtime.lock);
    void *place_of_own = malloc(1);
    struct rt_block *block = new_handle(RT_PHYSICAL, what.device, 0, place_of_own);
    if (block == NULL) {
        free(place_of_own);
        status = RT_NO_MEMORY;
    } else {
        block->size = what.size;
        *handle = (uint64_t)(uintptr_t)place_of_own;
    }
    pthread_mutex_unlock(&runtime.lock);
    return status;
}

enum rt_status rt_physical_free(uint64_t handle)
{
    pthread_mutex_lock(&runtime.lock);
    struct rt_block *block = rt_ready() == RT_OK ? block_of((void *)(uintptr_t)handle, RT_PHYSICAL) : NULL;
    bool valid = block != NULL && !block->released;
    if (valid && block->extra_handles > 0) {
        block->extra_handles--;
    } else if (valid) {
        block->released = true;
        settle_physical(block);
    }
    drop_orphans();
    pthread_mutex_unlock(&runtime.lock);
    return valid ? RT_OK : RT_INVALID;
}

enum rt_status rt_physical_retain(const void *memory, uint64_t *handle)
{
    pthread_mutex_lock(&runtime.lock);
    struct mapping *mapping = rt_ready() == RT_OK ? mapping_in((uintptr_t)memory, 1) : NULL;
    if (mapping != NULL) {
        struct rt_block *block = mapping->physical;
        block->extra_handles += !block->released;
        block->released = false;
        *handle = block->base;
    }
    pthread_mutex_unlock(&runtime.lock);
    return mapping != NULL ? RT_OK : RT_INVALID;
}

enum rt_status rt_map(void *start, size_t size, uint64_t handle)
{
    pthread_mutex_lock(&runtime.lock);
    struct rt_block *physical = rt_ready() == RT_OK ? block_of((void *)(uintptr_t)handle, RT_PHYSICAL) : NULL;
    struct rt_block *range = block_at((uintptr_t)start);
    struct mapping *mapping = calloc(1, sizeof *mapping);
    bool good = mapping != NULL && physical != NULL && !physical->released && size == physical->size && range != NULL &&
                range->kind == RT_RANGE && (uintptr_t)start + size <= range->base + range->size &&
                mapping_in((uintptr_t)start, size) == NULL;
    if (good) {
        *mapping = (struct mapping){.base = (uintptr_t)start, .size = size, .physical = physical};
        good = mprotect(start, size, PROT_READ | PROT_WRITE) == 0 &&
               tsearch(mapping, &runtime.mappings, compare_mappings) != NULL;
    }
    if (good) {
        physical->mappings++;
    } else {
        free(mapping);
    }
    pthread_mutex_unlock(&runtime.lock);
    return good ? RT_OK : RT_INVALID;
}

enum rt_status rt_unmap(void *start, size_t size)
{
    pthread_mutex_lock(&runtime.lock);
    bool any = false;
    for (struct mapping *mapping; size > 0 && (mapping = mapping_in((uintptr_t)start, size)) != NULL;) {
        if (mapping->base < (uintptr_t)start || mapping->base + mapping->size > (uintptr_t)start + size) {
            break; /* a mapping goes as a whole */
        }
        struct rt_block *physical = mapping->physical;
        madvise((void *)mapping->base, mapping->size, MADV_DONTNEED);
        mprotect((void *)mapping->base, mapping->size, PROT_NONE);
        tdelete(mapping, &runtime.mappings, compare_mappings);
        free(mapping);
        physical->mappings--;
        settle_physical(physical);
        any = true;
    }
    pthread_mutex_unlock(&runtime.lock);
    return any ? RT_OK : RT_INVALID;
}
