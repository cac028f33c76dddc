/* Simulated CUDA: when work runs, and who waits for it. */
#include "cuda.h"

static struct line *line_of(CUstream stream)
{
    return (uintptr_t)stream <= 2 ? NULL : &stream->line;
}

uint64_t cuda_stream_end(CUcontext context, CUstream stream)
{
    return line_end(context->device, line_of(stream));
}

uint64_t cuda_enqueue(CUcontext context, CUstream stream, uint64_t began, uint64_t duration)
{
    return line_put_since(context->device, line_of(stream), began, duration);
}

static uint32_t stream_id(CUstream stream)
{
    enum { DEFAULT_STREAM = 7 }; /* as the real one numbers it */
    return line_of(stream) == NULL ? DEFAULT_STREAM : stream->id;
}

void cuda_happened(CUcontext context, CUstream stream, struct sim_activity *activity)
{
    const struct sim_tracer *tracer = sim_tracer();
    if (tracer != NULL) {
        activity->device = (uint32_t)context->device;
        activity->context = (uint32_t)context->device + 1;
        activity->stream = stream_id(stream);
        tracer->happened(activity);
    }
}

static CUresult wait_until(CUcontext context, CUstream stream, uint64_t when, uint32_t how)
{
    struct sim_activity activity = {.kind = SIM_WAITED, .start = line_now(), .waited = how};
    line_sleep_until(when);
    rt_waited(context->device);
    activity.end = line_now();
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
    return result == CUDA_SUCCESS ? wait_until(context, NULL, line_device_end(context->device), CONTEXT_SYNCHRONIZE)
                                  : result;
}

void cuda_stream_waits(CUstream stream, CUcontext context, uint64_t when)
{
    line_waits(context->device, line_of(stream), when);
}

void cuda_run_kernel(CUcontext context, CUstream stream, const struct cuda_kernel *kernel)
{
    uint64_t duration = kernel->function->duration;
    struct sim_gpu gpu;
    if (kernel->function->cycles > 0 && rt_gpu(context->device, &gpu, NULL, NULL) == RT_OK) {
        duration = kernel->function->cycles * 1000u / sim_clock_at_work(&gpu);
    }
    if (duration == 0 && sim_tracer() == NULL) {
        return;
    }
    uint64_t start = line_launch(context->device, line_of(stream), duration);
    struct sim_activity ran = {.kind = SIM_RAN,
                               .start = start,
                               .end = start + duration,
                               .name = kernel->function->name,
                               .grid = kernel->grid,
                               .block = kernel->block};
    cuda_happened(context, stream, &ran);
}
