/* Contexts, and memory that is allocated by itself. */
#include "runtime_internal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "vram.h"

/* ---- blocks: a tree of disjoint address ranges, in which equal means that they overlap ---- */

static int compare_blocks(const void *a, const void *b)
{
    const struct rt_block *one = a, *other = b;
    if (one->base + one->mapped <= other->base) {
        return -1;
    }
    return one->base >= other->base + other->mapped;
}

struct rt_block *rt_block_at(uintptr_t address)
{
    struct rt_block key = {.base = address, .mapped = 1}, **found = tfind(&key, &rt_all.blocks, compare_blocks);
    return found != NULL ? *found : NULL;
}

struct rt_block *rt_block_of(const void *handle, enum rt_kind kind)
{
    struct rt_block *block = rt_block_at((uintptr_t)handle);
    return block != NULL && block->base == (uintptr_t)handle && block->kind == kind ? block : NULL;
}

bool rt_remember(struct rt_block *block)
{
    return tsearch(block, &rt_all.blocks, compare_blocks) != NULL;
}

/* ---- contexts ---- */

static uint64_t context_bytes(int device)
{
    struct sim_gpu gpu;
    return sim_peek(rt_all.devices[device].index, &gpu) ? gpu.context_mib * SIM_MIB : 0;
}

struct rt_block *rt_new_handle(enum rt_kind kind, int device, uint64_t charge, void *memory)
{
    struct rt_block *block = calloc(1, sizeof *block);
    if (block == NULL || memory == NULL) {
        free(block);
        return NULL;
    }
    *block =
        (struct rt_block){.base = (uintptr_t)memory, .mapped = 1, .charge = charge, .kind = kind, .device = device};
    if (!rt_remember(block)) {
        free(block);
        return NULL;
    }
    return block;
}

/* In the place of *context, or, where that is NULL, of its own. */
static enum rt_status make_context(int device, struct rt_context **context)
{
    struct sim_gpu gpu;
    enum rt_status status = rt_gpu(device, &gpu, NULL, NULL);
    uint64_t bytes = context_bytes(device);
    if (status == RT_OK) {
        status = rt_hold(device, (int64_t)bytes);
    }
    if (status != RT_OK) {
        return status;
    }
    struct rt_context *made = *context != NULL ? *context : calloc(1, sizeof *made);
    if (rt_new_handle(RT_CONTEXT, device, bytes, made) == NULL) {
        if (made != *context) {
            free(made);
        }
        rt_give_back(device, bytes);
        return RT_NO_MEMORY;
    }
    made->device = device;
    made->uses = 1;
    *context = made;
    return RT_OK;
}

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
        twalk(rt_all.blocks, visit);
        if (victim == NULL) {
            break;
        }
        rt_forget(victim);
    }
    rt_settle_pending(context->device);
    struct rt_block *block = rt_block_of(context, RT_CONTEXT);
    if (block != NULL) {
        for (unsigned i = 0; i < RT_EXTRAS; i++) {
            rt_give_back(block->device, context->extra[i]);
            context->extra[i] = 0;
        }
        rt_forget(block);
    }
    context->uses = 0;
    if (!context->primary) {
        free(context);
    }
}

enum rt_status rt_context_grow(struct rt_context *context, unsigned which, int64_t bytes)
{
    if (!rt_context_valid(context) || which >= RT_EXTRAS) {
        return RT_INVALID;
    }
    pthread_mutex_lock(&rt_all.lock);
    uint64_t *extra = &context->extra[which];
    if (bytes < 0 && (uint64_t)-bytes > *extra) {
        bytes = -(int64_t)*extra;
    }
    enum rt_status status = rt_hold(context->device, bytes);
    if (status == RT_OK) {
        *extra += (uint64_t)bytes;
    }
    pthread_mutex_unlock(&rt_all.lock);
    return status;
}

enum rt_status rt_primary(int device, struct rt_context **context)
{
    enum rt_status status = rt_check_device(device);
    if (status != RT_OK) {
        return status;
    }
    pthread_mutex_lock(&rt_all.lock);
    *context = &rt_all.devices[device].primary;
    if ((*context)->uses == 0) {
        status = make_context(device, context);
    } else {
        (*context)->uses++;
    }
    pthread_mutex_unlock(&rt_all.lock);
    return status;
}

struct rt_context *rt_primary_handle(int device)
{
    return rt_check_device(device) == RT_OK ? &rt_all.devices[device].primary : NULL;
}

enum rt_status rt_primary_release(int device, bool at_once)
{
    enum rt_status status = rt_check_device(device);
    if (status != RT_OK) {
        return status;
    }
    pthread_mutex_lock(&rt_all.lock);
    struct rt_device *it = &rt_all.devices[device];
    if (it->primary.uses == 0) {
        status = at_once ? RT_OK : RT_INVALID;
    } else if (at_once || --it->primary.uses == 0) {
        drop_context(&it->primary);
    }
    pthread_mutex_unlock(&rt_all.lock);
    return status;
}

bool rt_primary_active(int device)
{
    return rt_check_device(device) == RT_OK && rt_all.devices[device].primary.uses > 0;
}

enum rt_status rt_context_new(int device, struct rt_context **context)
{
    enum rt_status status = rt_check_device(device);
    if (status == RT_OK) {
        pthread_mutex_lock(&rt_all.lock);
        *context = NULL;
        status = make_context(device, context);
        pthread_mutex_unlock(&rt_all.lock);
    }
    return status;
}

bool rt_context_valid(struct rt_context *context)
{
    pthread_mutex_lock(&rt_all.lock);
    bool valid = rt_ready() == RT_OK && rt_block_of(context, RT_CONTEXT) != NULL;
    pthread_mutex_unlock(&rt_all.lock);
    return valid;
}

enum rt_status rt_context_free(struct rt_context *context)
{
    if (!rt_context_valid(context) || context->primary) {
        return RT_INVALID;
    }
    pthread_mutex_lock(&rt_all.lock);
    drop_context(context);
    pthread_mutex_unlock(&rt_all.lock);
    return RT_OK;
}

/* ---- allocations ---- */

uint64_t rt_round_up(uint64_t bytes, uint64_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

/* What one more allocation of `size` bytes costs: whole granules, small ones share theirs. */
static uint64_t cost(struct rt_device *device, size_t size, bool more)
{
    if (size >= rt_all.granule / 2) {
        return rt_round_up(size, rt_all.granule);
    }
    uint64_t part = rt_round_up(size, 512), before = rt_round_up(device->small, rt_all.granule);
    device->small = more ? device->small + part : device->small - part;
    uint64_t after = rt_round_up(device->small, rt_all.granule);
    return more ? after - before : before - after;
}

static bool on_device(enum rt_kind kind)
{
    return kind == RT_DEVICE || kind == RT_MANAGED || kind == RT_ARRAY;
}

void *rt_reserve(size_t size, int protection)
{
    void *memory = mmap(NULL, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

void rt_pool_release(struct rt_pool *pool, uint64_t keep)
{
    uint64_t busy = pool->used + pool->pending, stay = busy > keep ? busy : keep;
    if (pool->reserved > stay) {
        uint64_t steps = rt_round_up(stay, rt_all.pool_step);
        if (pool->reserved > steps) {
            if (pool->home != RT_IN_HOST) {
                rt_give_back(pool->device, pool->reserved - steps);
            }
            pool->reserved = steps;
        }
    }
}

/* Take a block out of the tree, give back what it holds, and free it. */
void rt_forget(struct rt_block *block)
{
    tdelete(block, &rt_all.blocks, compare_blocks);
    if (block->pool != NULL) {
        block->pool->used -= block->charge;
        rt_pool_release(block->pool, block->pool->threshold);
    } else if (on_device(block->kind) && !block->unpaid) {
        rt_give_back(block->device, cost(&rt_all.devices[block->device], block->size, false));
    } else if (block->kind == RT_CONTEXT || block->kind == RT_PHYSICAL) {
        rt_give_back(block->device, block->charge);
    }
    if (block->file > 0 && block->kind != RT_PHYSICAL) {
        close(block->file);
    }
    if (block->kind == RT_DEVICE) {
        vram_leave(rt_all.devices[block->device].index, (void *)block->base, block->size);
    }
    if (on_device(block->kind) || block->kind == RT_HOST || block->kind == RT_RANGE || block->kind == RT_IMPORT) {
        munmap((void *)block->base, block->mapped);
    }
    free(block->about);
    free(block);
}

/* Memory in the address space of this process for a block that is paid for. */
struct rt_block *rt_place(struct rt_context *context, enum rt_kind kind, size_t size)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    struct rt_block *block = calloc(1, sizeof *block);
    void *start = block != NULL ? rt_reserve(rt_round_up(size, page), PROT_READ | PROT_WRITE) : NULL;
    if (start == NULL) {
        free(block);
        return NULL;
    }
    *block = (struct rt_block){.base = (uintptr_t)start,
                               .size = size,
                               .mapped = rt_round_up(size, page),
                               .kind = kind,
                               .device = context != NULL ? context->device : -1,
                               .context = context};
    if (!rt_remember(block)) {
        munmap(start, block->mapped);
        free(block);
        return NULL;
    }
    return block;
}

static enum rt_status alloc_locked(struct rt_context *context, enum rt_kind kind, size_t size, void **memory)
{
    struct rt_device *device = on_device(kind) ? &rt_all.devices[context->device] : NULL;
    uint64_t bytes = device != NULL ? cost(device, size, true) : 0;
    enum rt_status paid = device != NULL ? rt_hold(context->device, (int64_t)bytes) : RT_OK;
    if (paid != RT_OK && device != NULL) {
        cost(device, size, false);
    }
    if (paid != RT_OK && !(paid == RT_NO_MEMORY && kind == RT_MANAGED)) {
        return paid;
    }
    struct rt_block *block = rt_place(context, kind, size);
    if (block == NULL) {
        if (device != NULL && paid == RT_OK) {
            cost(device, size, false);
            rt_give_back(context->device, bytes);
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
        pthread_mutex_lock(&rt_all.lock);
        status = alloc_locked(context, kind, size, memory);
        pthread_mutex_unlock(&rt_all.lock);
    }
    return status;
}

enum rt_status rt_free(void *memory, enum rt_kind kind)
{
    enum rt_status status = rt_ready();
    if (status != RT_OK) {
        return status;
    }
    pthread_mutex_lock(&rt_all.lock);
    struct rt_block *block = rt_block_at((uintptr_t)memory);
    bool match = block != NULL && block->base == (uintptr_t)memory &&
                 (block->kind == kind || (kind == RT_DEVICE && block->kind == RT_MANAGED));
    if (match) {
        rt_forget(block);
    }
    pthread_mutex_unlock(&rt_all.lock);
    return match ? RT_OK : RT_INVALID;
}

enum rt_status rt_free_in_stream(void *memory)
{
    pthread_mutex_lock(&rt_all.lock);
    struct rt_block *block = rt_ready() == RT_OK ? rt_block_of(memory, RT_DEVICE) : NULL;
    struct rt_pool *pool = block != NULL ? block->pool : NULL;
    if (pool != NULL) {
        if (pool->pending == 0) {
            pool->next_pending = rt_all.pending;
            rt_all.pending = pool;
        }
        pool->pending += block->charge;
        rt_forget(block);
    }
    pthread_mutex_unlock(&rt_all.lock);
    return pool != NULL ? RT_OK : rt_free(memory, RT_DEVICE);
}

enum rt_status rt_find(const void *memory, struct rt_block *block)
{
    pthread_mutex_lock(&rt_all.lock);
    struct rt_block *found = rt_ready() == RT_OK ? rt_block_at((uintptr_t)memory) : NULL;
    if (found != NULL) {
        *block = *found;
    }
    pthread_mutex_unlock(&rt_all.lock);
    return found != NULL ? RT_OK : RT_INVALID;
}

void rt_describe(void *memory, void *about)
{
    pthread_mutex_lock(&rt_all.lock);
    struct rt_block *block = rt_block_at((uintptr_t)memory);
    if (block != NULL) {
        block->about = about;
    } else {
        free(about);
    }
    pthread_mutex_unlock(&rt_all.lock);
}

enum rt_status rt_move(void *memory, bool to_host)
{
    pthread_mutex_lock(&rt_all.lock);
    struct rt_block *block = rt_ready() == RT_OK ? rt_block_at((uintptr_t)memory) : NULL;
    enum rt_status status = block != NULL && block->kind == RT_MANAGED ? RT_OK : RT_INVALID;
    if (status == RT_OK && block->unpaid != to_host) {
        struct rt_device *device = &rt_all.devices[block->device];
        uint64_t bytes = cost(device, block->size, !to_host);
        status = to_host ? RT_OK : rt_hold(block->device, (int64_t)bytes);
        if (to_host) {
            rt_give_back(block->device, bytes);
        } else if (status != RT_OK) {
            cost(device, block->size, false);
        }
        block->unpaid = status == RT_OK ? to_host : block->unpaid;
    }
    pthread_mutex_unlock(&rt_all.lock);
    return status == RT_NO_MEMORY ? RT_OK : status; /* a hint, not an order */
}

/* ---- filling ---- */

void rt_fill(void *memory, const void *value, size_t width, size_t count)
{
    static const char zero[8];
    size_t page = (size_t)sysconf(_SC_PAGESIZE), size = width * count;
    uintptr_t start = rt_round_up((uintptr_t)memory, page), end = ((uintptr_t)memory + size) / page * page;
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
