/* What the files of the simulated CUDA driver share. */
#ifndef CUDA_H
#define CUDA_H

#include <stdatomic.h>

#include "line.h"
#include "runtime.h"

typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct rt_context *CUcontext;
typedef struct rt_pool *CUmemoryPool;
typedef struct cu_stream *CUstream;

typedef enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_DEVICE_UNAVAILABLE = 46,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_OPERATING_SYSTEM = 304,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_ILLEGAL_STATE = 401,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE = 708,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_UNKNOWN = 999
} CUresult;

typedef struct {
    int type, id;
} CUmemLocation;

enum { CU_ON_DEVICE = 1, CU_IN_DOMAIN = 6 };

/* The device of a location; -1: none. Each device has one domain of locality, which is all of its memory. */
static inline CUdevice cuda_device_at(const CUmemLocation *where)
{
    return where->type == CU_ON_DEVICE ? where->id : where->type == CU_IN_DOMAIN ? where->id & 0xff : -1;
}

typedef struct {
    int allocType, handleTypes;
    CUmemLocation location;
    void *win32SecurityAttributes;
    size_t maxSize;
    unsigned char reserved[56];
} CUmemPoolProps;

typedef struct {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;

#define GRANULE (2 * SIM_MIB)    /* device memory comes in pages of 2 MiB */
#define POOL_STEP (32 * SIM_MIB) /* pools grow by: measured on an H200, driver 580.159.04; of graphs' memory assumed */
static inline CUresult result_of(enum rt_status status)
{
    static const CUresult results[] = {
        [RT_OK] = CUDA_SUCCESS,
        [RT_INVALID] = CUDA_ERROR_INVALID_VALUE,
        [RT_NO_MEMORY] = CUDA_ERROR_OUT_OF_MEMORY,
        [RT_CLOSED] = CUDA_ERROR_NOT_INITIALIZED,
        [RT_NO_DEVICE] = CUDA_ERROR_NO_DEVICE,
        [RT_BAD_DEVICE] = CUDA_ERROR_INVALID_DEVICE,
        [RT_UNAVAILABLE] = CUDA_ERROR_DEVICE_UNAVAILABLE,
        [RT_BUSY] = CUDA_ERROR_ILLEGAL_STATE,
    };
    return results[status];
}

#define CU(NAME, ...) SIM_API CUresult NAME(__VA_ARGS__)

/* A second exported name with the same behaviour. */
#define ALIAS(NEW, OLD, PARAMETERS, ...)                                                                               \
    CU(NEW, __VA_ARGS__)                                                                                               \
    {                                                                                                                  \
        return OLD PARAMETERS;                                                                                         \
    }

static inline void *cuda_pointer(CUdeviceptr address)
{
    return (void *)(uintptr_t)address;
}

/* The calling thread's context; CUDA_ERROR_INVALID_CONTEXT when it has none. */
CUresult cuda_context(CUcontext *context);
CUresult cuda_create_context(CUcontext *context, unsigned int flags, CUdevice device);

/* Says that an allocation was made, or is about to be released. */
void cuda_held(CUcontext context, enum sim_activity_kind kind, CUdeviceptr address);
CUresult cuda_allocate(enum rt_kind kind, CUdeviceptr *address, size_t size);

/* An array, or a level of a mipmapped one: rows of `pitch` bytes without padding. */
typedef struct cu_array *CUarray;
struct cuda_plane {
    char *start;
    size_t pitch, rows; /* rows of one of the planes of three dimensions */
};
bool cuda_array_plane(CUarray array, struct cuda_plane *plane);

typedef struct {
    size_t x, y, z, level;
    int type;
    const void *host;
    CUdeviceptr device;
    CUarray array;
    void *context;
    size_t pitch, height;
} cuda_place;

/* CUDA_MEMCPY3D, and CUDA_MEMCPY3D_PEER, which has contexts where the other one has nothing. */
typedef struct {
    cuda_place from, to;
    size_t width, height, depth;
} cuda_copy;

typedef struct cu_function {
    struct cu_code *code;
    struct cu_function *next;
    uint64_t duration; /* ns that a launch of it takes on the device */
    uint64_t cycles;   /* of its clock, instead, where there are any */
    char name[];
} *CUfunction;

struct cuda_kernel {
    CUfunction function;
    unsigned grid[3], block[3];
};

/* What a stream does, at once or, recorded, when its graph is launched. */
struct cuda_work {
    enum cuda_work_kind { CUDA_KERNEL, CUDA_COPY, CUDA_FILL, CUDA_CALL } kind;
    union {
        struct cuda_kernel kernel;
        cuda_copy copy;
        struct {
            CUdeviceptr to;
            size_t pitch, width, height; /* `width` elements of `element` bytes */
            unsigned element, value;
        } fill;
        struct {
            void (*function)(void *argument);
            void *argument;
        } call;
    };
};
CUresult cuda_do(CUcontext context, CUstream stream, const struct cuda_work *work);
CUresult cuda_submit(CUstream stream, const struct cuda_work *work);
void cuda_run_kernel(CUcontext context, CUstream stream, const struct cuda_kernel *kernel);

/* Time, in ns of CLOCK_MONOTONIC: when a stream has nothing left to do; when what is put behind it begins. */
uint64_t cuda_stream_end(CUcontext context, CUstream stream);
uint64_t cuda_enqueue(CUcontext context, CUstream stream, uint64_t began, uint64_t duration);
void cuda_stream_waits(CUstream stream, CUcontext context, uint64_t when);
/* The program waits. */
CUresult cuda_wait(CUstream stream);
CUresult cuda_wait_for_event(uint64_t when);

/* Reports it to the tracer, if there is one; fills in where it was. */
void cuda_happened(CUcontext context, CUstream stream, struct sim_activity *activity);

CUresult cuda_load(struct cu_code **code, const void *image);
void cuda_drop_variables(CUcontext context);

CU(cuDriverGetVersion, int *version);
CU(cuDeviceGetUuid_v2, unsigned char *uuid, CUdevice device);
CU(cuMemFree_v2, CUdeviceptr address);
CUresult cuda_free_in_stream(CUdeviceptr address);
/* Before a context is gone: what the runtime library keeps with it. */
void cuda_context_ends(CUcontext context);

/* Start the thread that suspends and resumes this process for others (cuda_checkpoint.c). */
void cuda_await_checkpoints(void);

struct cu_stream {
    int priority;
    unsigned flags;
    CUcontext context;
    struct cu_graph *capture; /* the graph that is recorded, or NULL */
    uint32_t id;
    struct line line;
};

/* The graph that a stream is recorded to, or NULL. */
static inline struct cu_graph *cuda_recording(CUstream stream)
{
    return (uintptr_t)stream > 2 ? stream->capture : NULL;
}

/* Recorded calls become nodes; the address is the one that each launch of the graph will use. */
CUresult cuda_graph_capture_alloc(struct cu_graph *graph, CUdevice device, CUdeviceptr *address, size_t size);
CUresult cuda_graph_capture_free(struct cu_graph *graph, CUdeviceptr address);
CUresult cuda_graph_capture_work(struct cu_graph *graph, const struct cuda_work *work);
/* All that graphs hold on a device: it is reset. */
void cuda_graph_drop(CUdevice device);
/* Free what a graph allocated; false: it is no graph's, or not allocated now. */
bool cuda_graph_free(CUdeviceptr address);

#endif
