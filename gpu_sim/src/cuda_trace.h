/* What a simulated tracing library sees of the simulated CUDA driver. Times are ns of CLOCK_MONOTONIC. */
#ifndef CUDA_TRACE_H
#define CUDA_TRACE_H

#include <stdbool.h>
#include <stdint.h>

enum cuda_activity_kind { CUDA_RAN, CUDA_COPIED, CUDA_FILLED, CUDA_WAITED, CUDA_ALLOCATED, CUDA_FREED };

struct cuda_activity {
    enum cuda_activity_kind kind;
    uint32_t device, context, stream;
    uint64_t start, end; /* on the device; of a wait, in the program */
    uint64_t bytes, address;
    uint8_t from, to; /* CUpti_ActivityMemoryKind */
    uint32_t waited;  /* CUpti_ActivitySynchronizationType */
    const char *name;
    const unsigned *grid, *block; /* three each */
};

struct cuda_tracer {
    void (*happened)(const struct cuda_activity *activity);
    /* Before and after a launch, in the thread that launches. */
    void (*launches)(bool done, const char *kernel);
};

/* NULL: nobody traces. The table must live as long as the process. */
void sluice_sim_trace(const struct cuda_tracer *tracer);

#endif
