/* The tracing layer of the simulated Level Zero loader: there if the program began with ZE_ENABLE_TRACING_LAYER=1. Callbacks
 * come before and after a call, may change its arguments, and are not traced themselves. */
#include <stdlib.h>
#include <string.h>

#include "ze_sim.h"

static struct tracer {
    bool used, on;
    _Atomic unsigned calls; /* under way */
    void *user;
    ze_callback *before[ZE_TRACED_CALLS], *after[ZE_TRACED_CALLS];
} tracers[ZE_TRACERS];

static _Atomic unsigned enabled[ZE_TRACED_CALLS]; /* bits: tracers that see a call */
static _Thread_local bool calling_back;

static bool has_layer(void)
{
    const char *asked = getenv("ZE_ENABLE_TRACING_LAYER");
    return asked != NULL && strcmp(asked, "1") == 0;
}

static struct tracer *tracer_of(ze_handle handle)
{
    for (unsigned i = 0; i < ZE_TRACERS; i++) {
        if (handle == (ze_handle)&tracers[i] && tracers[i].used) {
            return &tracers[i];
        }
    }
    return NULL;
}

static unsigned bit_of(const struct tracer *tracer)
{
    return 1u << (tracer - tracers);
}

ZE(zelTracerCreate, const struct ze_tracer *how, ze_handle *handle)
{
    struct sim_state head;
    if (sim_enter(0, &head) != SIM_OK || !has_layer()) {
        return ZE_NOT_INITIALIZED;
    }
    for (unsigned i = 0; i < ZE_TRACERS && how != NULL && how->user != NULL && handle != NULL; i++) {
        if (!tracers[i].used) {
            tracers[i] = (struct tracer){.used = true, .user = how->user};
            *handle = &tracers[i];
            return ZE_OK;
        }
    }
    return ZE_BAD_ARGUMENT;
}

static void enable(const struct tracer *tracer, bool on)
{
    for (unsigned call = 0; call < ZE_TRACED_CALLS; call++) {
        bool sees = on && (tracer->before[call] != NULL || tracer->after[call] != NULL);
        if (sees) {
            enabled[call] |= bit_of(tracer);
        } else {
            enabled[call] &= ~bit_of(tracer);
        }
    }
}

ZE(zelTracerSetEnabled, ze_handle handle, uint8_t on)
{
    struct tracer *tracer = tracer_of(handle);
    if (tracer != NULL) {
        tracer->on = on != 0;
        enable(tracer, tracer->on);
    }
    return tracer != NULL ? ZE_OK : ZE_BAD_ARGUMENT;
}

ZE(zelTracerDestroy, ze_handle handle)
{
    struct tracer *tracer = tracer_of(handle);
    if (tracer == NULL) {
        return ZE_BAD_ARGUMENT;
    }
    enable(tracer, false);
    while (tracer->calls > 0) { /* it stalls until the last callback is over */
        line_sleep_until(line_now() + 1000);
    }
    tracer->used = false;
    return ZE_OK;
}

static uint32_t put_in(ze_handle handle, uint32_t when, ze_callback *callback, enum ze_traced call)
{
    struct tracer *tracer = tracer_of(handle);
    if (tracer == NULL || tracer->on) {
        return ZE_BAD_ARGUMENT; /* those of an enabled one may not be changed */
    }
    *(when == ZE_PROLOGUE ? &tracer->before[call] : &tracer->after[call]) = callback;
    return ZE_OK;
}

#define REGISTER(NAME)                                                                                                 \
    ZE(zelTracer##NAME##RegisterCallback, ze_handle tracer, uint32_t when, ze_callback *callback)                      \
    {                                                                                                                  \
        return put_in(tracer, when, callback, TRACED_##NAME);                                                          \
    }
ZE_TRACED(REGISTER)

/* Bits of `left`, one after the other: the first, which is taken from it. */
static unsigned first_of(unsigned *left)
{
    unsigned first = (unsigned)__builtin_ctz(*left);
    *left &= *left - 1;
    return first;
}

static void call_back(struct ze_trace *trace, bool after, uint32_t result)
{
    calling_back = true;
    for (unsigned left = trace->tracers; left != 0;) {
        unsigned i = first_of(&left);
        ze_callback *callback = after ? tracers[i].after[trace->call] : tracers[i].before[trace->call];
        if (callback != NULL) {
            callback(trace->parameters, result, tracers[i].user, &trace->kept[i]);
        }
    }
    calling_back = false;
}

void ze_trace_before(struct ze_trace *trace, enum ze_traced call, void *parameters)
{
    trace->call = call;
    trace->parameters = parameters;
    trace->tracers = calling_back ? 0 : enabled[call];
    for (unsigned left = trace->tracers; left != 0;) {
        unsigned i = first_of(&left);
        trace->kept[i] = NULL;
        tracers[i].calls++;
    }
    if (trace->tracers != 0) {
        call_back(trace, false, ZE_OK);
    }
}

uint32_t ze_trace_after(struct ze_trace *trace, uint32_t result)
{
    if (trace->tracers != 0) {
        call_back(trace, true, result);
    }
    for (unsigned left = trace->tracers; left != 0;) {
        tracers[first_of(&left)].calls--;
    }
    return result;
}
