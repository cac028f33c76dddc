/* Virtual memory: ranges of addresses, physical memory, and mappings; and memory of other processes. */
#include "runtime_internal.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>

struct rt_mapping {
    uintptr_t base;
    size_t size;
    struct rt_block *physical;
};

static int compare_mappings(const void *a, const void *b)
{
    const struct rt_mapping *one = a, *other = b;
    if (one->base + one->size <= other->base) {
        return -1;
    }
    return one->base >= other->base + other->size;
}

enum rt_status rt_range(size_t size, size_t alignment, void **start)
{
    enum rt_status status = rt_ready();
    if (status != RT_OK || size == 0 || size % rt_all.granule != 0 || (alignment & (alignment - 1)) != 0) {
        return status != RT_OK ? status : RT_INVALID;
    }
    pthread_mutex_lock(&rt_all.lock);
    size_t unit = alignment > rt_all.granule ? alignment : rt_all.granule;
    char *memory = rt_reserve(size + unit, PROT_NONE);
    struct rt_block *block = memory != NULL ? calloc(1, sizeof *block) : NULL;
    if (block == NULL) {
        status = RT_NO_MEMORY;
    } else {
        char *aligned = (char *)rt_round_up((uintptr_t)memory, unit);
        if (aligned > memory) {
            munmap(memory, (size_t)(aligned - memory));
        }
        munmap(aligned + size, (size_t)(memory + unit - aligned));
        *block =
            (struct rt_block){.base = (uintptr_t)aligned, .size = size, .mapped = size, .kind = RT_RANGE, .device = -1};
        *start = aligned;
        status = rt_remember(block) ? RT_OK : RT_NO_MEMORY;
    }
    pthread_mutex_unlock(&rt_all.lock);
    return status;
}

static struct rt_mapping *mapping_in(uintptr_t base, size_t size)
{
    struct rt_mapping key = {.base = base, .size = size}, **found = tfind(&key, &rt_all.mappings, compare_mappings);
    return found != NULL ? *found : NULL;
}

enum rt_status rt_range_free(void *start, size_t size)
{
    pthread_mutex_lock(&rt_all.lock);
    struct rt_block *block = rt_ready() == RT_OK ? rt_block_of(start, RT_RANGE) : NULL;
    enum rt_status status = block == NULL || block->size != size         ? RT_INVALID
                            : mapping_in((uintptr_t)start, size) != NULL ? RT_BUSY
                                                                         : RT_OK;
    if (status == RT_OK) {
        rt_forget(block);
    }
    pthread_mutex_unlock(&rt_all.lock);
    return status;
}

static void drop_orphans(void);

enum rt_status rt_physical(int device, size_t size, uint64_t *handle)
{
    struct sim_gpu gpu;
    enum rt_status status = rt_gpu(device, &gpu, NULL, NULL);
    if (status != RT_OK || size == 0 || size % rt_all.granule != 0) {
        return status != RT_OK ? status : RT_INVALID;
    }
    pthread_mutex_lock(&rt_all.lock);
    drop_orphans();
    status = rt_hold(device, (int64_t)size);
    if (status == RT_OK) {
        void *handle_place = malloc(1); /* its address is the handle */
        struct rt_block *block = rt_new_handle(RT_PHYSICAL, device, size, handle_place);
        if (block == NULL) {
            free(handle_place);
            rt_give_back(device, size);
            status = RT_NO_MEMORY;
        } else {
            block->size = size;
            *handle = (uint64_t)(uintptr_t)handle_place;
        }
    }
    pthread_mutex_unlock(&rt_all.lock);
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
        void *handle_place = (void *)block->base;
        rt_forget(block);
        free(handle_place);
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
        twalk(rt_all.blocks, visit_orphan);
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
    pthread_mutex_lock(&rt_all.lock);
    struct rt_block *block = rt_ready() == RT_OK ? rt_block_of((void *)(uintptr_t)handle, RT_PHYSICAL) : NULL;
    enum rt_status status = block != NULL && !block->released ? RT_OK : RT_INVALID;
    struct stat stamp;
    if (status == RT_OK) {
        struct exported what = {.magic = RT_SHARED_MAGIC, .size = block->size, .device = block->device};
        *file = memfd_create("sluice-sim-physical", MFD_CLOEXEC);
        bool done = *file >= 0 && pwrite(*file, &what, sizeof what, 0) == sizeof what && fstat(*file, &stamp) == 0;
        status = done ? RT_OK : RT_NO_MEMORY;
        block->file = done ? *file : block->file;
        block->inode = done ? stamp.st_ino : block->inode;
    }
    pthread_mutex_unlock(&rt_all.lock);
    return status;
}

/* Charged to its exporter, not here. */
enum rt_status rt_physical_import(int file, uint64_t *handle)
{
    struct exported what;
    enum rt_status status = rt_ready();
    if (status != RT_OK || pread(file, &what, sizeof what, 0) != sizeof what || what.magic != RT_SHARED_MAGIC) {
        return status != RT_OK ? status : RT_INVALID;
    }
    pthread_mutex_lock(&rt_all.lock);
    void *handle_place = malloc(1);
    struct rt_block *block = rt_new_handle(RT_PHYSICAL, what.device, 0, handle_place);
    if (block == NULL) {
        free(handle_place);
        status = RT_NO_MEMORY;
    } else {
        block->size = what.size;
        *handle = (uint64_t)(uintptr_t)handle_place;
    }
    pthread_mutex_unlock(&rt_all.lock);
    return status;
}

enum rt_status rt_physical_free(uint64_t handle)
{
    pthread_mutex_lock(&rt_all.lock);
    struct rt_block *block = rt_ready() == RT_OK ? rt_block_of((void *)(uintptr_t)handle, RT_PHYSICAL) : NULL;
    bool valid = block != NULL && !block->released;
    if (valid && block->extra_handles > 0) {
        block->extra_handles--;
    } else if (valid) {
        block->released = true;
        settle_physical(block);
    }
    drop_orphans();
    pthread_mutex_unlock(&rt_all.lock);
    return valid ? RT_OK : RT_INVALID;
}

enum rt_status rt_physical_retain(const void *memory, uint64_t *handle)
{
    pthread_mutex_lock(&rt_all.lock);
    struct rt_mapping *mapping = rt_ready() == RT_OK ? mapping_in((uintptr_t)memory, 1) : NULL;
    if (mapping != NULL) {
        struct rt_block *block = mapping->physical;
        block->extra_handles += !block->released;
        block->released = false;
        *handle = block->base;
    }
    pthread_mutex_unlock(&rt_all.lock);
    return mapping != NULL ? RT_OK : RT_INVALID;
}

enum rt_status rt_map(void *start, size_t size, uint64_t handle)
{
    pthread_mutex_lock(&rt_all.lock);
    struct rt_block *physical = rt_ready() == RT_OK ? rt_block_of((void *)(uintptr_t)handle, RT_PHYSICAL) : NULL;
    struct rt_block *range = rt_block_at((uintptr_t)start);
    struct rt_mapping *mapping = calloc(1, sizeof *mapping);
    bool good = mapping != NULL && physical != NULL && !physical->released && size == physical->size && range != NULL &&
                range->kind == RT_RANGE && (uintptr_t)start + size <= range->base + range->size &&
                mapping_in((uintptr_t)start, size) == NULL;
    if (good) {
        *mapping = (struct rt_mapping){.base = (uintptr_t)start, .size = size, .physical = physical};
        good = mprotect(start, size, PROT_READ | PROT_WRITE) == 0 &&
               tsearch(mapping, &rt_all.mappings, compare_mappings) != NULL;
    }
    if (good) {
        physical->mappings++;
    } else {
        free(mapping);
    }
    pthread_mutex_unlock(&rt_all.lock);
    return good ? RT_OK : RT_INVALID;
}

enum rt_status rt_unmap(void *start, size_t size)
{
    pthread_mutex_lock(&rt_all.lock);
    bool any = false;
    for (struct rt_mapping *mapping; size > 0 && (mapping = mapping_in((uintptr_t)start, size)) != NULL;) {
        if (mapping->base < (uintptr_t)start || mapping->base + mapping->size > (uintptr_t)start + size) {
            break; /* a mapping goes as a whole */
        }
        struct rt_block *physical = mapping->physical;
        madvise((void *)mapping->base, mapping->size, MADV_DONTNEED);
        mprotect((void *)mapping->base, mapping->size, PROT_NONE);
        tdelete(mapping, &rt_all.mappings, compare_mappings);
        free(mapping);
        physical->mappings--;
        settle_physical(physical);
        any = true;
    }
    pthread_mutex_unlock(&rt_all.lock);
    return any ? RT_OK : RT_INVALID;
}

/* ---- sharing with other processes ---- */

enum rt_status rt_share(void *memory, struct rt_shared *shared)
{
    pthread_mutex_lock(&rt_all.lock);
    struct rt_block *block = rt_ready() == RT_OK ? rt_block_of(memory, RT_DEVICE) : NULL;
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
        *shared = (struct rt_shared){
            .magic = RT_SHARED_MAGIC, .size = block->size, .pid = (int)getpid(), .file = block->file};
    }
    pthread_mutex_unlock(&rt_all.lock);
    return status;
}

enum rt_status rt_import(const struct rt_shared *shared, void **memory)
{
    char path[64];
    enum rt_status status = rt_ready();
    if (status != RT_OK || shared->magic != RT_SHARED_MAGIC || shared->size == 0) {
        return status != RT_OK ? status : RT_INVALID;
    }
    snprintf(path, sizeof path, "/proc/%d/fd/%d", shared->pid, shared->file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    size_t mapped = rt_round_up(shared->size, (size_t)sysconf(_SC_PAGESIZE));
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
    pthread_mutex_lock(&rt_all.lock);
    status = rt_remember(block) ? RT_OK : RT_NO_MEMORY;
    pthread_mutex_unlock(&rt_all.lock);
    *memory = start;
    return status;
}
