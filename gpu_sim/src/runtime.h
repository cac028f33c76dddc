/* Device memory as CUDA and HIP programs see it: devices in the order of the visibility variables, contexts, and
 * allocations, each charged to this process on its GPU, MIG instance or AMD partition. The memory is real, ordinary
 * memory of the process that is only backed where it is touched, so that copies and fills work. */
#ifndef RUNTIME_H
#define RUNTIME_H

#include "sim.h"

enum { RT_MAX_DEVICES = SIM_MAX_GPUS * SIM_MAX_INSTANCES };

enum rt_status {
    RT_OK = 0,
    RT_INVALID,     /* an argument makes no sense, or a handle is none */
    RT_NO_MEMORY,   /* of the device, or of the process's address space */
    RT_CLOSED,      /* not initialised, or initialised before a fork */
    RT_NO_DEVICE,   /* no visible device, or no driver */
    RT_BAD_DEVICE,  /* no such ordinal */
    RT_UNAVAILABLE, /* the GPU is lost, or its driver is broken */
    RT_BUSY,        /* still mapped or in use */
};

enum rt_kind { RT_DEVICE, RT_MANAGED, RT_HOST, RT_ARRAY, RT_RANGE, RT_PHYSICAL, RT_POOL, RT_CONTEXT, RT_IMPORT };

enum { RT_EXTRAS = 2 }; /* what a context's own memory can be grown by: print buffer, heap */

struct rt_pool;

struct rt_context {
    int device; /* ordinal */
    bool primary;
    unsigned uses;
    uint64_t extra[RT_EXTRAS]; /* bytes beyond the first size, in whole granules */
};

/* An allocation or handle. Every one has a place in the address space of its own, by which it is found. */
struct rt_block {
    uintptr_t base;
    size_t size;   /* as asked for */
    size_t mapped; /* of the address space */
    uint64_t charge;
    enum rt_kind kind;
    int device;
    struct rt_context *context;
    struct rt_pool *pool;
    unsigned mappings; /* of physical memory */
    unsigned extra_handles;
    bool released;  /* physical memory that only its mappings keep */
    bool unpaid;    /* managed memory that lives on the host: it found no room, or was moved there */
    int file;       /* of what was shared with other processes; 0: none */
    uint64_t inode; /* and which file that is */
    void *about;    /* what a library keeps with it; freed with it */
};

enum rt_home { RT_IN_DEVICE, RT_IN_MANAGED, RT_IN_HOST };

struct rt_pool {
    int device;
    enum rt_home home;
    uint64_t threshold, reserved, used, reserved_high, used_high;
    uint64_t pending; /* freed in a stream, for which the host has not waited since: can be used again, but is kept */
    struct rt_pool *next_pending;
};

/* `lists` are environment variables, applied one on the result of the other; `granule` is what device memory comes
 * in, `pool_step` what pools grow and shrink by. */
enum rt_status rt_open(enum sim_vendor vendor, uint64_t granule, uint64_t pool_step, const char *const *lists,
                       size_t list_count);
enum rt_status rt_ready(void); /* RT_CLOSED before rt_open and after a fork */
int rt_count(void);
/* The GPU behind an ordinal, fresh; `index` and `instance` may be NULL. */
enum rt_status rt_gpu(int device, struct sim_gpu *gpu, unsigned *index, uint8_t *instance);
int rt_ordinal(unsigned index);
enum rt_status rt_memory(int device, uint64_t *free_bytes, uint64_t *total);

SIM_API int sluice_sim_load(int device, unsigned permille);

/* Contexts: the primary one is counted, others are destroyed with all that was allocated in them. */
enum rt_status rt_primary(int device, struct rt_context **context);
enum rt_status rt_primary_release(int device, bool at_once);
bool rt_primary_active(int device);
/* Whether it is active or not; NULL: no such device. */
struct rt_context *rt_primary_handle(int device);
enum rt_status rt_context_new(int device, struct rt_context **context);
enum rt_status rt_context_free(struct rt_context *context);
bool rt_context_valid(struct rt_context *context);
/* Grow or shrink (bytes below 0) what a context takes besides. */
enum rt_status rt_context_grow(struct rt_context *context, unsigned which, int64_t bytes);

enum rt_status rt_alloc(struct rt_context *context, enum rt_kind kind, size_t size, void **memory);
enum rt_status rt_free(void *memory, enum rt_kind kind);
/* Device memory, in a stream: a pool's own keeps it until rt_waited. */
enum rt_status rt_free_in_stream(void *memory);
/* The host has waited for a device: pools give up what was freed in streams, as far as their thresholds say. */
void rt_waited(int device);
/* Keep `about`, which is then its, with an allocation. */
void rt_describe(void *memory, void *about);
/* Move managed memory as a whole; to the device only where it has room. */
enum rt_status rt_move(void *memory, bool to_host);
/* A copy of what is at an address; RT_INVALID when nothing of ours is. */
enum rt_status rt_find(const void *memory, struct rt_block *block);

/* Memory was copied, which took so many ns: how many it takes on its stream, by the GPUs' rates for such copies. A GPU
 * that is set to spoil them has done so then. */
uint64_t rt_copied(void *to, const void *from, size_t bytes, uint64_t took);

struct rt_pool *rt_default_pool(int device, enum rt_home home);
struct rt_pool *rt_current_pool(int device, enum rt_home home);
enum rt_status rt_set_pool(int device, struct rt_pool *pool);
enum rt_status rt_pool_new(int device, enum rt_home home, struct rt_pool **pool);
enum rt_status rt_pool_free(struct rt_pool *pool);
bool rt_pool_valid(struct rt_pool *pool);
enum rt_status rt_pool_alloc(struct rt_context *context, struct rt_pool *pool, size_t size, void **memory);
enum rt_status rt_pool_trim(struct rt_pool *pool, uint64_t keep);
/* A device's memory for graphs, which keeps what it has until it is trimmed; use of it without an address. */
struct rt_pool *rt_graph_pool(int device);
enum rt_status rt_pool_use(struct rt_pool *pool, uint64_t bytes);
void rt_pool_unuse(struct rt_pool *pool, uint64_t bytes);

/* Memory of another process of this node: what is shared stays its owner's, and only the owner is charged. */
struct rt_shared {
    uint64_t magic, size;
    int pid, file;
};
enum rt_status rt_share(void *memory, struct rt_shared *shared);
enum rt_status rt_import(const struct rt_shared *shared, void **memory);

/* Virtual memory: ranges of addresses, physical memory, and mappings of the one onto the other. */
enum rt_status rt_range(size_t size, size_t alignment, void **start);
enum rt_status rt_range_free(void *start, size_t size);
enum rt_status rt_physical(int device, size_t size, uint64_t *handle);
enum rt_status rt_physical_free(uint64_t handle);
/* The same by a file, which keeps the memory as a handle does. */
enum rt_status rt_physical_export(uint64_t handle, int *file);
enum rt_status rt_physical_import(int file, uint64_t *handle);
/* One more handle for what is mapped at an address. */
enum rt_status rt_physical_retain(const void *memory, uint64_t *handle);
enum rt_status rt_map(void *start, size_t size, uint64_t handle);
enum rt_status rt_unmap(void *start, size_t size);

/* Checkpoints. While calls are locked those of other threads that use the device's memory wait. */
struct rt_remap {
    unsigned char from[16], to[16]; /* UUIDs */
};
bool rt_lock_calls(unsigned timeout_ms); /* 0: as long as it takes */
void rt_unlock_calls(void);
/* With calls locked: let go of all devices; what was in their memory stays, on the host. RT_INVALID: managed memory,
 * memory that is shared with other processes, MIG and MPS, which cannot be. */
enum rt_status rt_suspend(void);
/* Take them again, or those that each of them is mapped to. RT_BAD_DEVICE: one is not visible, or not named; RT_INVALID:
 * of another model. */
enum rt_status rt_resume(const struct rt_remap *maps, unsigned count);
/* The 16 bytes of a UUID's text, after "GPU-" or "MIG-". */
void rt_read_uuid(const char *text, unsigned char uuid[16]);

/* Fill `count` elements of `width` bytes. Zero gives whole pages back. */
void rt_fill(void *memory, const void *value, size_t width, size_t count);

#endif
