/* Simulated CUDA: when work runs. Each stream is a line of time on which work follows work; nothing is computed, so a
 * stream is no more than the moment at which it will have nothing left to do. */
#include "cuda.h"

#include <errno.h>
#include <stdatomic.h>
#include <time.h>

static struct cuda_line default_lines[RT_MAX_DEVICES];
static _Atomic uint64_t device_ends[RT_MAX_DEVICES]; /* of all streams */
static const struct cuda_tracer *_Atomic tracer_now;

SIM_API void sluice_sim_trace(const struct cuda_tracer *tracer)
{
    atomic_store(&tracer_now, tracer);
}

const struct cuda_tracer *cuda_tracer(void)
{
    return atomic_load_explicit(&tracer_now, memory_order_acquire);
}

uint64_t cuda_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static bool is_default(CUstream stream)
{
    return (uintptr_t)stream <= 2;
}

static struct cuda_line *line_of(CUcontext context, CUstream stream)
{
    return is_default(stream) ? &default_lines[context->device] : &stream->line;
}

uint64_t cuda_stream_end(CUcontext context, CUstream stream)
{
    return atomic_load(&line_of(context, stream)->end);
}

static void raise_to(_Atomic uint64_t *end, uint64_t to)
{
    uint64_t was = atomic_load(end);
    while (was < to && !atomic_compare_exchange_weak(end, &was, to)) {
    }
}

/* The default stream and the others wait for each other, unless they say that they do not. */
static uint64_t others_end(CUcontext context, CUstream stream)
{
    enum { NON_BLOCKING = 1 };
    if (is_default(stream)) {
        return atomic_load(&device_ends[context->device]);
    }
    return (stream->flags & NON_BLOCKING) != 0 ? 0 : atomic_load(&default_lines[context->device].end);
}

uint64_t cuda_enqueue(CUcontext context, CUstream stream, uint64_t duration)
{
    _Atomic uint64_t *end = &line_of(context, stream)->end;
    uint64_t first = cuda_now(), others = others_end(context, stream), was = atomic_load(end), start;
    first = others > first ? others : first;
    do {
        start = was > first ? was : first;
    } while (!atomic_compare_exchange_weak(end, &was, start + duration));
    raise_to(&device_ends[context->device], start + duration);
    return start;
}

void cuda_sleep_until(uint64_t when)
{
    struct timespec then = {.tv_sec = (time_t)(when / 1000000000u), .tv_nsec = (long)(when % 1000000000u)};
    while (when > cuda_now() && clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &then, NULL) == EINTR) {
    }
}

static uint32_t stream_id(CUstream stream)
{
    enum { DEFAULT_STREAM = 7 }; /* as the real one numbers it */
    return is_default(stream) ? DEFAULT_STREAM : stream->id;
}

void cuda_happened(CUcontext context, CUstream stream, struct cuda_activity *activity)
{
    const struct cuda_tracer *tracer = cuda_tracer();
    if (tracer != NULL) {
        activity->device = (uint32_t)context->device;
        activity->context = (uint32_t)context->device + 1;
        activity->stream = stream_id(stream);
        tracer->happened(activity);
    }
}

static CUresult wait_until(CUcontext context, CUstream stream, uint64_t when, uint32_t how)
{
    struct cuda_activity activity = {.kind = CUDA_WAITED, .start = cuda_now(), .waited = how};
    cuda_sleep_until(when);
    activity.end = cuda_now();
    cuda_happened(context, stream, &activity);
    return CUDA_SUCCESS;
}

CUresult cuda_wait(CUstream stream)
{
    enum { STREAM_SYNCHRONIZE = 3 };
    CUcontext context;
    CUresult result = cuda_context(&context);
    return result == CUDA_SUCCESS ? wait_until(context, stream, cuda_stream_end(context, stream), STREAM_SYNCHRONIZE)
                                  : result;
}

CUresult cuda_wait_for_event(uint64_t when)
{
    enum { EVENT_SYNCHRONIZE = 1 };
    CUcontext context;
    CUresult result = cuda_context(&context);
    return result == CUDA_SUCCESS ? wait_until(context, NULL, when, EVENT_SYNCHRONIZE) : result;
}

CU(cuCtxSynchronize, void)
{
    enum { CONTEXT_SYNCHRONIZE = 4 };
    CUcontext context;
    CUresult result = cuda_context(&context);
    return result == CUDA_SUCCESS
               ? wait_until(context, NULL, atomic_load(&device_ends[context->device]), CONTEXT_SYNCHRONIZE)
               : result;
}

void cuda_stream_waits(CUstream stream, CUcontext context, uint64_t when)
{
    raise_to(&line_of(context, stream)->end, when);
}

void cuda_run_kernel(CUcontext context, CUstream stream, const struct cuda_kernel *kernel)
{
    uint64_t duration = kernel->function->duration;
    if (duration == 0 && cuda_tracer() == NULL) {
        return;
    }
    struct cuda_line *line = line_of(context, stream);
    _Atomic uint64_t *end = &line->ends[atomic_fetch_add(&line->launches, 1) % CUDA_QUEUED];
    cuda_sleep_until(atomic_load(end));
    uint64_t start = cuda_enqueue(context, stream, duration);
    atomic_store(end, start + duration);
    struct cuda_activity ran = {.kind = CUDA_RAN,
                                .start = start,
                                .end = start + duration,
                                .name = kernel->function->name,
                                .grid = kernel->grid,
                                .block = kernel->block};
    cuda_happened(context, stream, &ran);
}
