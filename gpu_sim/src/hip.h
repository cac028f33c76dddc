/* What the files of the simulated HIP runtime share. */
#ifndef HIP_H
#define HIP_H

#include "line.h"
#include "runtime.h"

typedef struct hip_stream *hipStream_t;
typedef struct hip_event *hipEvent_t;
typedef struct rt_pool *hipMemPool_t;

typedef enum {
    hipSuccess = 0,
    hipErrorInvalidValue = 1,
    hipErrorOutOfMemory = 2,
    hipErrorNotInitialized = 3,
    hipErrorInvalidDevicePointer = 17,
    hipErrorNoDevice = 100,
    hipErrorInvalidDevice = 101,
    hipErrorInvalidHandle = 400,
    hipErrorIllegalState = 401,
    hipErrorNotFound = 500,
    hipErrorNotReady = 600,
    hipErrorNotSupported = 801,
    hipErrorUnknown = 999
} hipError_t;

typedef struct {
    int type, id;
} hipMemLocation;

typedef struct {
    int type, requestedHandleType;
    hipMemLocation location;
    void *win32HandleMetaData;
    unsigned char allocFlags[8];
} hipMemAllocationProp;

typedef struct {
    int allocType, handleTypes;
    hipMemLocation location;
    void *win32SecurityAttributes;
    size_t maxSize;
    unsigned char reserved[56];
} hipMemPoolProps;

typedef struct {
    hipMemLocation location;
    int flags;
} hipMemAccessDesc;

typedef struct {
    int type, device;
    void *devicePointer, *hostPointer;
    int isManaged;
    unsigned allocationFlags;
} hipPointerAttribute_t;

/* hipDeviceProp_t of HIP 6 (symbol hipGetDevicePropertiesR0600); figures that no program reads are left out by size. */
typedef struct {
    char name[256];
    unsigned char uuid[16];
    char luid[8];
    unsigned int luidDeviceNodeMask;
    size_t totalGlobalMem, sharedMemPerBlock;
    int regsPerBlock, warpSize;
    size_t memPitch;
    int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3], clockRate;
    size_t totalConstMem;
    int major, minor;
    size_t textureAlignment, texturePitchAlignment;
    int deviceOverlap, multiProcessorCount, kernelExecTimeoutEnabled, integrated, canMapHostMemory, computeMode;
    int textures[40];
    size_t surfaceAlignment;
    int concurrentKernels, ECCEnabled, pciBusID, pciDeviceID, pciDomainID, tccDriver, asyncEngineCount,
        unifiedAddressing, memoryClockRate, memoryBusWidth, l2CacheSize, persistingL2CacheMaxSize,
        maxThreadsPerMultiProcessor, streamPrioritiesSupported, globalL1CacheSupported, localL1CacheSupported;
    size_t sharedMemPerMultiprocessor;
    int regsPerMultiprocessor, managedMemory, features[10];
    size_t sharedMemPerBlockOptin;
    int blocks[4];
    size_t reservedSharedMemPerBlock;
    int registration[4], memoryPoolsSupported, rdma[3], arrays[5], reserved[63], hipReserved[32];
    char gcnArchName[256];
    size_t maxSharedMemoryPerMultiProcessor;
    int clockInstructionRate;
    unsigned int arch;
    unsigned int *hdpMemFlushCntl, *hdpRegFlushCntl;
    int cooperative[4], isLargeBar, asicRevision;
} hipDeviceProp_t;

#define HIP_GRANULE ((uint64_t)4096) /* device memory comes in pages of 4 KiB */

#define HIP(NAME, ...) SIM_API hipError_t NAME(__VA_ARGS__)

/* Of the calling thread: its device, and the last error that it got. */
extern _Thread_local int hip_chosen;
extern _Thread_local hipError_t hip_last;

hipError_t hip_result(enum rt_status status);
/* Remember an error for hipGetLastError; the same error. */
hipError_t hip_told(hipError_t error);
/* Every function starts the runtime where it was not. */
hipError_t hip_start(void);
/* The context of this thread's device: there is one for each, from its first use to the end. */
hipError_t hip_context(struct rt_context **context);

struct hip_stream {
    int device;
    uint32_t id;
    struct line line;
};

static inline struct line *hip_line(hipStream_t stream)
{
    return stream != NULL ? &stream->line : NULL;
}

/* Reports it to the tracer, if there is one; fills in where it was. */
void hip_happened(int device, hipStream_t stream, struct sim_activity *activity);
/* The number of a kernel of the runtime's own. */
uint64_t hip_own_kernel(const char *name);
/* The program waits, which a tracer sees; `how`: CUpti_ActivitySynchronizationType. */
void hip_wait(hipStream_t stream, uint64_t when, uint32_t how);

HIP(hipFree, void *memory);

#endif
