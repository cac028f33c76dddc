/* SPDX-License-Identifier: Apache-2.0 */
/* The part of the CUDA driver's binary interface that the limiter touches, from NVIDIA's public documentation of it. */
#ifndef SLUICE_LIMIT_CUDA_H
#define SLUICE_LIMIT_CUDA_H

#include <stddef.h>
#include <stdint.h>

typedef enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NOT_SUPPORTED = 801,
} CUresult;

typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef void *CUcontext, *CUstream, *CUevent, *CUarray, *CUmipmappedArray, *CUmemoryPool, *CUgraph, *CUgraphExec,
    *CUgraphNode;
typedef unsigned long long CUmemHandle; /* CUmemGenericAllocationHandle */

enum { CU_ON_DEVICE = 1 }; /* CU_MEM_LOCATION_TYPE_DEVICE */

typedef struct {
    int type, id;
} CUmemLocation;

typedef struct {
    int type, requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    unsigned char allocFlags[8];
} CUmemAllocationProp;

typedef struct {
    int allocType, handleTypes;
    CUmemLocation location;
    void *win32SecurityAttributes;
    size_t maxSize;
    unsigned char reserved[56];
} CUmemPoolProps;

typedef struct {
    size_t width, height;
    int format;
    unsigned channels;
} CUDA_ARRAY_DESCRIPTOR;

typedef struct {
    size_t width, height, depth;
    int format;
    unsigned channels, flags;
} CUDA_ARRAY3D_DESCRIPTOR;

typedef struct { /* CUDA_MEM_ALLOC_NODE_PARAMS */
    CUmemPoolProps poolProps;
    const void *accessDescs;
    size_t accessDescCount, bytesize;
    CUdeviceptr address;
} CUmemAllocNodeParams;

typedef struct { /* CUarrayMapInfo: sparse arrays */
    int resourceType;
    void *resource;
    int subresourceType;
    uint64_t subresource[4];
    int operation, handleType;
    CUmemHandle handle;
    unsigned long long offset;
    unsigned deviceBitMask, flags, reserved[2];
} CUarrayMapInfo;

#endif
