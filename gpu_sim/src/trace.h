/* What a simulated tracing library sees of a simulated driver. Times are ns of CLOCK_MONOTONIC. */
#ifndef SIM_TRACE_H
#define SIM_TRACE_H

#include <stdbool.h>
#include <stdint.h>

enum sim_activity_kind { SIM_RAN, SIM_COPIED, SIM_FILLED, SIM_WAITED, SIM_ALLOCATED, SIM_FREED };

struct sim_activity {
    enum sim_activity_kind kind;
    uint32_t device, context, stream;
    uint64_t start, end; /* on the device; of a wait, in the program */
    uint64_t bytes, address;
    uint8_t from, to; /* CUpti_ActivityMemoryKind */
    uint32_t waited;  /* CUpti_ActivitySynchronizationType */
    uint64_t kernel;  /* its number, where the library numbers them */
    const char *name;
    const unsigned *grid, *block; /* three each */
};

struct sim_tracer {
    void (*happened)(const struct sim_activity *activity);
    /* Before and after a launch, in the thread that launches. */
    void (*launches)(bool done, const char *kernel);
};

/* NULL: nobody traces. The table must live as long as the process. */
void sluice_sim_trace(const struct sim_tracer *tracer);

#endif
