/* SPDX-License-Identifier: Apache-2.0 */
/* Launches in a row. CUDA and HIP have the same calls for it; Level Zero has others. */
#include "bench.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef void *handle;

enum { MOST_CALLS = 12 };

struct loop { /* a stream and a function on device 0 */
    handle stream, function;
    int (*launch)(const struct loop *loop), (*wait)(const struct loop *loop);
    void *calls[MOST_CALLS];
};

/* The driver's call of this number, to be called with these types. */
#define CALL(LOOP, NUMBER, ...) (((int (*)(__VA_ARGS__))(LOOP)->calls[NUMBER]))

/* ---- CUDA and HIP ---- */

enum { INIT, STREAM, WAIT, LOAD, FUNCTION, LAUNCH, RETAIN, SET }; /* the last two are CUDA's alone */

static int launch_cuda(const struct loop *loop)
{
    return CALL(loop, LAUNCH, handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle,
                void **, void **)(loop->function, 1, 1, 1, 1, 1, 1, 0, loop->stream, NULL, NULL);
}

static int wait_cuda(const struct loop *loop)
{
    return CALL(loop, WAIT, handle)(loop->stream);
}

static int begin_cuda(struct loop *loop)
{
    static const char empty[] = ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry empty() { ret; }\n";
    handle context, module;
    loop->launch = launch_cuda;
    loop->wait = wait_cuda;
    int code = CALL(loop, INIT, unsigned)(0);
    if (!code && loop->calls[RETAIN] && !(code = CALL(loop, RETAIN, handle *, int)(&context, 0)))
        code = CALL(loop, SET, handle)(context);
    if (!code && !(code = CALL(loop, STREAM, handle *, unsigned)(&loop->stream, 0)) &&
        !(code = CALL(loop, LOAD, handle *, const void *)(&module, empty)))
        code = CALL(loop, FUNCTION, handle *, handle, const char *)(&loop->function, module, "empty");
    return code;
}

/* ---- Level Zero ---- */

enum { ZE_INIT, ZE_DRIVER, ZE_DEVICE, ZE_CONTEXT, ZE_MODULE, ZE_KERNEL, ZE_GROUP, ZE_LIST, ZE_LAUNCH, ZE_WAIT };

static int launch_level_zero(const struct loop *loop)
{
    static const uint32_t groups[] = {1, 1, 1};
    return CALL(loop, ZE_LAUNCH, handle, handle, const void *, handle, uint32_t, handle *)(loop->stream, loop->function,
                                                                                           groups, NULL, 0, NULL);
}

static int wait_level_zero(const struct loop *loop)
{
    return CALL(loop, ZE_WAIT, handle, uint64_t)(loop->stream, UINT64_MAX);
}

static int begin_level_zero(struct loop *loop)
{
    static const struct {
        uint32_t type;
        const void *next;
        uint32_t flags;
        const char *name;
    } kernel = {.type = 0x1d, .name = "empty"}; /* ZE_STRUCTURE_TYPE_KERNEL_DESC */
    static const char how[256];
    handle driver, device, context, module;
    uint32_t one = 1;
    loop->launch = launch_level_zero;
    loop->wait = wait_level_zero;
    int code = CALL(loop, ZE_INIT, uint32_t)(0);
    if (!code && !(code = CALL(loop, ZE_DRIVER, uint32_t *, handle *)(&one, &driver)) &&
        !(code = CALL(loop, ZE_DEVICE, handle, uint32_t *, handle *)(driver, &one, &device)) &&
        !(code = CALL(loop, ZE_CONTEXT, handle, const void *, handle *)(driver, how, &context)) &&
        !(code = CALL(loop, ZE_MODULE, handle, handle, const void *, handle *, handle *)(context, device, how, &module,
                                                                                         NULL)) &&
        !(code = CALL(loop, ZE_KERNEL, handle, const void *, handle *)(module, &kernel, &loop->function)) &&
        !(code = CALL(loop, ZE_GROUP, handle, uint32_t, uint32_t, uint32_t)(loop->function, 1, 1, 1)))
        code = CALL(loop, ZE_LIST, handle, handle, const void *, handle *)(context, device, how, &loop->stream);
    return code;
}

/* ---- the loop ---- */

static const struct {
    const char *library;
    int (*begin)(struct loop *loop);
    const char *calls[MOST_CALLS];
} vendors[] = {
    [SLUICE_BENCH_CUDA] = {"libcuda.so.1",
                           begin_cuda,
                           {"cuInit", "cuStreamCreate", "cuStreamSynchronize", "cuModuleLoadData",
                            "cuModuleGetFunction", "cuLaunchKernel", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"}},
    [SLUICE_BENCH_HIP] = {"libamdhip64.so.6",
                          begin_cuda,
                          {"hipInit", "hipStreamCreateWithFlags", "hipStreamSynchronize", "hipModuleLoadData",
                           "hipModuleGetFunction", "hipModuleLaunchKernel"}},
    [SLUICE_BENCH_LEVEL_ZERO] = {"libze_loader.so.1",
                                 begin_level_zero,
                                 {"zeInit", "zeDriverGet", "zeDeviceGet", "zeContextCreate", "zeModuleCreate",
                                  "zeKernelCreate", "zeKernelSetGroupSize", "zeCommandListCreateImmediate",
                                  "zeCommandListAppendLaunchKernel", "zeCommandListHostSynchronize"}},
};

static bool open_driver(struct loop *loop, enum sluice_bench_driver vendor)
{
    void *library = dlopen(vendors[vendor].library, RTLD_NOW | RTLD_LOCAL);
    for (size_t i = 0; library && i < MOST_CALLS && vendors[vendor].calls[i]; i++) {
        loop->calls[i] = dlsym(library, vendors[vendor].calls[i]);
        if (!loop->calls[i])
            return false;
    }
    return library != NULL;
}

enum sluice_error sluice_bench_launches(enum sluice_bench_driver vendor, uint32_t blocks, uint32_t launches,
                                        uint32_t work, uint64_t *times, struct sluice_error_text *text)
{
    static struct loop loops[sizeof vendors / sizeof *vendors]; /* a program begins once with its driver */
    struct loop *loop = &loops[vendor];
    int code = loop->stream ? 0 : open_driver(loop, vendor) ? vendors[vendor].begin(loop) : -1;
    for (uint32_t i = 0; i < blocks && !code; i++) {
        uint64_t before = bench_now_ns();
        for (uint32_t j = 0; j < launches && !code; j++) {
            for (volatile uint32_t done = 0; done < work; done++) {
            }
            code = loop->launch(loop);
        }
        code = code ? code : loop->wait(loop);
        times[i] = bench_now_ns() - before;
    }
    if (code && text)
        snprintf(text->text, sizeof text->text, "%s answers %d (-1: there is none)", vendors[vendor].library, code);
    return code ? SLUICE_ERROR_SYSTEM : SLUICE_OK;
}
