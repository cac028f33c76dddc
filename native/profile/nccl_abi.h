/* SPDX-License-Identifier: Apache-2.0 */
/* The part of NCCL's profiler plugin interface, version 4 (NCCL 2.27 and later), that profiles use. */
#ifndef SLUICE_NCCL_ABI_H
#define SLUICE_NCCL_ABI_H

#include <stddef.h>
#include <stdint.h>

enum { NCCL_OK = 0 };
enum { NCCL_COLLECTIVE = 1 << 1, NCCL_POINT_TO_POINT = 1 << 2 }; /* ncclProfileColl, ncclProfileP2p */

struct nccl_event { /* ncclProfilerEventDescr_v4_t; NCCL's goes on */
    uint8_t type;
    void *parent;
    int rank;
    union {
        struct {
            uint64_t sequence;
            const char *function;
            const void *send;
            void *receive;
            size_t count;
            int root;
            const char *datatype;
        } collective;
        struct {
            const char *function;
            void *buffer;
            const char *datatype;
            size_t count;
            int peer;
        } point_to_point;
    };
};

struct nccl_profiler { /* ncclProfiler_v4_t; each call answers with ncclResult_t */
    const char *name;
    int (*init)(void **context, int *mask, const char *name, uint64_t communicator, int nodes, int ranks, int rank,
                void *log);
    int (*start)(void *context, void **handle, const struct nccl_event *event);
    int (*stop)(void *handle);
    int (*state)(void *handle, int state, void *arguments);
    int (*finalize)(void *context);
};

#endif
