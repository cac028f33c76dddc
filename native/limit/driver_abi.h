/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of CUDA's driver and HIP's runtime that the limiter sees, from the vendors' public documentation. Both pass
 * the same structures and numbers under other names. Streams, pools, graphs and other objects are pointers.
 */
#ifndef SLUICE_LIMIT_DRIVER_ABI_H
#define SLUICE_LIMIT_DRIVER_ABI_H

#include <stddef.h>
#include <stdint.h>

enum { SUCCESS = 0, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NOT_SUPPORTED = 801 };

typedef uint64_t device_address;          /* CUdeviceptr; HIP's void * is passed in the same way */
typedef unsigned long long memory_handle; /* CUmemGenericAllocationHandle */

/* CU_MEM_LOCATION_TYPE_*; a domain is a part of a device's memory, named by its device in the lowest byte of `id`. */
enum { ON_DEVICE = 1, ON_HOST = 2, ON_HOST_NODE = 3, ON_THIS_HOST_NODE = 4, IN_DOMAIN = 6 };
enum { MANAGED_MEMORY = 2 }; /* CU_MEM_ALLOCATION_TYPE_MANAGED */

struct location {
    int type, id;
};

struct allocation_properties { /* CUmemAllocationProp */
    int type, requested_handle_types;
    struct location location;
    void *win32_metadata;
    unsigned char flags[8];
};

struct pool_properties { /* CUmemPoolProps */
    int type, handle_types;
    struct location location;
    void *win32_security;
    size_t max_size;
    unsigned char reserved[56];
};

struct allocation_node { /* CUDA_MEM_ALLOC_NODE_PARAMS */
    struct pool_properties pool;
    const void *access;
    size_t access_count, bytes;
    device_address address;
};

struct extent {
    size_t width, height, depth;
};

struct array_2d { /* CUDA_ARRAY_DESCRIPTOR */
    size_t width, height;
    int format;
    unsigned channels;
};

struct array_3d { /* CUDA_ARRAY3D_DESCRIPTOR */
    struct extent extent;
    int format;
    unsigned channels, flags;
};

struct ipc_memory { /* CUipcMemHandle */
    char bytes[64];
};

#endif
