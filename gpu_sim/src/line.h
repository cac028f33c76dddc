/* When work runs: each stream is a line of time on which work follows work. Nothing is computed, so a stream is no more
 * than the moment at which it will have nothing left to do. Times are ns of CLOCK_MONOTONIC. */
#ifndef LINE_H
#define LINE_H

#include <stdbool.h>
#include <stdint.h>

#include "trace.h"

enum { LINE_QUEUED = 1024 }; /* launches that a stream takes before the next one waits */

struct line {
    bool alone;                                        /* it does not wait for the device's default stream */
    _Atomic uint64_t end, launches, ends[LINE_QUEUED]; /* nothing left to do; when the last launches are done */
};

uint64_t line_now(void);
void line_sleep_until(uint64_t when);

/* In all of these `line` may be NULL: the device's default stream. It and the others wait for each other. */
uint64_t line_end(int device, struct line *line);
void line_waits(int device, struct line *line, uint64_t when);
/* Put work behind what is there; when it begins. */
uint64_t line_put(int device, struct line *line, uint64_t duration);
/* The same for work that was begun then. */
uint64_t line_put_since(int device, struct line *line, uint64_t began, uint64_t duration);
/* The same for a launch, which waits until the stream has room. */
uint64_t line_launch(int device, struct line *line, uint64_t duration);
/* When all streams of a device have nothing left to do. */
uint64_t line_device_end(int device);

/* SLUICE_SIM_KERNEL_US: "20" of all kernels, "gemm=500,20" of one and of all others. ns */
uint64_t line_duration(const char *kernel);

/* How many cycles of the GPU's clock a kernel takes: N of one whose name ends with _cycles_N; 0: of any other. */
uint64_t line_cycles(const char *kernel);

/* The tracer of this library, or NULL. */
const struct sim_tracer *sim_tracer(void);

#endif
