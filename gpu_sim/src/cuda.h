/* What the files of the simulated CUDA driver share. */
#ifndef CUDA_H
#define CUDA_H

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
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_ILLEGAL_STATE = 401,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE = 708,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_UNKNOWN = 999
} CUresult;

typedef struct {
    int type, id;
} CUmemLocation;

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

#define GRANULE (2 * SIM_MIB) /* device memory comes in pages of 2 MiB */
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

CU(cuMemFree_v2, CUdeviceptr address);

struct cu_stream {
    int priority;
    CUcontext context;
    struct cu_graph *capture; /* the graph that is recorded, or NULL */
};

/* Recorded calls become nodes; the address is the one that each launch of the graph will use. */
CUresult cuda_graph_capture_alloc(struct cu_graph *graph, CUdevice device, CUdeviceptr *address, size_t size);
CUresult cuda_graph_capture_free(struct cu_graph *graph, CUdeviceptr address);
/* Free what a graph allocated; false: it is no graph's, or not allocated now. */
bool cuda_graph_free(CUdeviceptr address);

#endif
