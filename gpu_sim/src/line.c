/* Simulated time of streams, and the tracer that gets what happens in it. */
#include "line.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "runtime.h"

static struct line default_lines[RT_MAX_DEVICES];
static _Atomic uint64_t device_ends[RT_MAX_DEVICES]; /* of all streams */
static const struct sim_tracer *_Atomic tracer_now;

SIM_API void sluice_sim_trace(const struct sim_tracer *tracer)
{
    atomic_store(&tracer_now, tracer);
}

const struct sim_tracer *sim_tracer(void)
{
    return atomic_load_explicit(&tracer_now, memory_order_acquire);
}

uint64_t line_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void line_sleep_until(uint64_t when)
{
    struct timespec then = {.tv_sec = (time_t)(when / 1000000000u), .tv_nsec = (long)(when % 1000000000u)};
    while (when > line_now() && clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &then, NULL) == EINTR) {
    }
}

static struct line *line_of(int device, struct line *line)
{
    return line != NULL ? line : &default_lines[device];
}

uint64_t line_end(int device, struct line *line)
{
    return atomic_load(&line_of(device, line)->end);
}

uint64_t line_device_end(int device)
{
    return atomic_load(&device_ends[device]);
}

static void raise_to(_Atomic uint64_t *end, uint64_t to)
{
    uint64_t was = atomic_load(end);
    while (was < to && !atomic_compare_exchange_weak(end, &was, to)) {
    }
}

void line_waits(int device, struct line *line, uint64_t when)
{
    raise_to(&line_of(device, line)->end, when);
}

static uint64_t others_end(int device, const struct line *line)
{
    if (line == NULL) {
        return atomic_load(&device_ends[device]);
    }
    return line->alone ? 0 : atomic_load(&default_lines[device].end);
}

uint64_t line_put(int device, struct line *line, uint64_t duration)
{
    return line_put_since(device, line, line_now(), duration);
}

uint64_t line_put_since(int device, struct line *line, uint64_t began, uint64_t duration)
{
    _Atomic uint64_t *end = &line_of(device, line)->end;
    uint64_t first = began, others = others_end(device, line), was = atomic_load(end), start;
    first = others > first ? others : first;
    do {
        start = was > first ? was : first;
    } while (!atomic_compare_exchange_weak(end, &was, start + duration));
    raise_to(&device_ends[device], start + duration);
    return start;
}

uint64_t line_launch(int device, struct line *line, uint64_t duration)
{
    struct line *its = line_of(device, line);
    _Atomic uint64_t *end = &its->ends[atomic_fetch_add(&its->launches, 1) % LINE_QUEUED];
    line_sleep_until(atomic_load(end));
    uint64_t start = line_put(device, line, duration);
    atomic_store(end, start + duration);
    return start;
}

uint64_t line_cycles(const char *kernel)
{
    static const char mark[] = "_cycles_";
    const char *at = strstr(kernel, mark);
    char *rest;
    uint64_t cycles = at != NULL ? strtoull(at + sizeof mark - 1, &rest, 10) : 0;
    return at != NULL && *rest == 0 ? cycles : 0;
}

uint64_t line_duration(const char *kernel)
{
    const char *text = getenv("SLUICE_SIM_KERNEL_US");
    double us = 0;
    for (; text != NULL && *text != 0; text = strchr(text, ',') != NULL ? strchr(text, ',') + 1 : NULL) {
        size_t length = strcspn(text, "=,");
        if (text[length] != '=') {
            us = strtod(text, NULL);
        } else if (strlen(kernel) == length && strncmp(text, kernel, length) == 0) {
            us = strtod(text + length + 1, NULL);
            break;
        }
    }
    return us > 0 ? (uint64_t)(us * 1e3) : 0;
}
