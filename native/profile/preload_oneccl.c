/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls of oneCCL's C interface (oneapi/ccl.h, libccl.so.2, exported since its version 2022.0), which has no interface for
 * profilers. Its C++ interface, libccl.so.1, has other names, of other types in each release, and is not seen.
 */
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "preload.h"

enum { ONECCL_ERROR = 1 }; /* onecclResult_t */

typedef void *begin_function(const char *function, uint64_t bytes, uint64_t communicator);
typedef void end_function(void *call);

static _Atomic(begin_function *) begin;
static _Atomic(end_function *) end;

void oneccl_begin(void *library, void *(*look_up)(void *library, const char *name))
{
    begin_function *begins;
    end_function *ends;
    *(void **)&begins = look_up(library, "sluice_profile_collective_begin");
    *(void **)&ends = look_up(library, "sluice_profile_collective_end");
    if (ends != NULL) {
        atomic_store(&end, ends);
        atomic_store(&begin, begins);
    }
}

static void *begin_call(const char *name, uint64_t count, uint32_t datatype, const void *communicator)
{
    static const uint8_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2}; /* onecclDataType_t */
    begin_function *begins = atomic_load_explicit(&begin, memory_order_acquire);
    uint64_t size = datatype < sizeof sizes ? sizes[datatype] : 0;
    return begins != NULL ? begins(name, count * size, (uintptr_t)communicator) : NULL;
}

static void end_call(void *call)
{
    if (call != NULL) {
        atomic_load (&end)(call);
    }
}

/* A library may have oneCCL in it, or have it by another name: its calls come here as well, as ours are found first. */
static void *find(const char *name, const void *caller)
{
    void *found = preload_find(ONECCL_LIBRARY, name);
    return found != NULL ? found : preload_find_next(name, caller);
}

/* CALL(name, parameters, arguments, elements that this rank gives or takes) */
#define ONECCL_CALLS(CALL)                                                                                             \
    CALL(Reduce,                                                                                                       \
         (const void *from, void *to, size_t count, uint32_t datatype, uint32_t operation, int root, void *comm,       \
          void *stream),                                                                                               \
         (from, to, count, datatype, operation, root, comm, stream), count)                                            \
    CALL(AllReduce,                                                                                                    \
         (void *from, void *to, size_t count, uint32_t datatype, uint32_t operation, void *comm, void *stream),        \
         (from, to, count, datatype, operation, comm, stream), count)                                                  \
    CALL(Broadcast, (const void *from, void *to, size_t count, uint32_t datatype, int root, void *comm, void *stream), \
         (from, to, count, datatype, root, comm, stream), count)                                                       \
    CALL(ReduceScatter,                                                                                                \
         (const void *from, void *to, size_t count, uint32_t datatype, uint32_t operation, void *comm, void *stream),  \
         (from, to, count, datatype, operation, comm, stream), count)                                                  \
    CALL(AllGather, (const void *from, void *to, size_t count, uint32_t datatype, void *comm, void *stream),           \
         (from, to, count, datatype, comm, stream), count)                                                             \
    CALL(AllToAll, (const void *from, void *to, size_t count, uint32_t datatype, void *comm, void *stream),            \
         (from, to, count, datatype, comm, stream), count)                                                             \
    CALL(AllToAllV,                                                                                                    \
         (const void *from, const size_t *send_counts, void *to, const size_t *counts, uint32_t datatype, void *comm,  \
          void *stream),                                                                                               \
         (from, send_counts, to, counts, datatype, comm, stream), 0)                                                   \
    CALL(Send, (const void *from, size_t count, uint32_t datatype, int peer, void *comm, void *stream),                \
         (from, count, datatype, peer, comm, stream), count)                                                           \
    CALL(Recv, (void *to, size_t count, uint32_t datatype, int peer, void *comm, void *stream),                        \
         (to, count, datatype, peer, comm, stream), count)

#define WRAP(NAME, PARAMETERS, ARGUMENTS, ELEMENTS)                                                                    \
    EXPORT uint32_t oneccl##NAME PARAMETERS;                                                                           \
    uint32_t oneccl##NAME PARAMETERS                                                                                   \
    {                                                                                                                  \
        uint32_t(*theirs) PARAMETERS;                                                                                  \
        *(void **)&theirs = find("oneccl" #NAME, __builtin_return_address(0));                                         \
        if (theirs == NULL) {                                                                                          \
            return ONECCL_ERROR;                                                                                       \
        }                                                                                                              \
        void *call = begin_call(#NAME, ELEMENTS, datatype, comm);                                                      \
        uint32_t result = theirs ARGUMENTS;                                                                            \
        end_call(call);                                                                                                \
        return result;                                                                                                 \
    }
ONECCL_CALLS(WRAP)

void *oneccl_wrapper(const char *name)
{
    static const struct {
        const char *name;
        void *wrapper;
    } wrappers[] = {
#define ROW(NAME, PARAMETERS, ARGUMENTS, ELEMENTS) {"oneccl" #NAME, (void *)oneccl##NAME},
        ONECCL_CALLS(ROW)
#undef ROW
    };
    for (size_t i = 0; strncmp(name, "oneccl", 6) == 0 && i < sizeof wrappers / sizeof *wrappers; i++) {
        if (strcmp(wrappers[i].name, name) == 0) {
            return wrappers[i].wrapper;
        }
    }
    return NULL;
}
