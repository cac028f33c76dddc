/* SPDX-License-Identifier: Apache-2.0 */
/* Typical calls of a CUDA program, through what dlsym answers, and past it: the C library's own dlsym leads to the
 * driver itself. */
#include "bench.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef void *handle;
typedef uint64_t address;

struct driver {
    int (*init)(unsigned), (*retain)(handle *, int), (*set)(handle), (*stream)(handle *, unsigned), (*wait)(handle);
    int (*alloc)(address *, size_t), (*release)(address);
    int (*alloc_async)(address *, size_t, handle), (*free_async)(address, handle);
    int (*pool)(handle *, int), (*set_pool)(handle, int, void *);
    int (*fill)(address, unsigned char, size_t, handle);
    int (*load)(handle *, const void *), (*function)(handle *, handle, const char *);
    int (*launch)(handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle, void **,
                  void **);
};

static bool open_driver(struct driver *driver, bool bare)
{
    const struct {
        const char *name;
        void *place;
    } needed[] = {
        {"cuInit", &driver->init},
        {"cuDevicePrimaryCtxRetain", &driver->retain},
        {"cuCtxSetCurrent", &driver->set},
        {"cuStreamCreate", &driver->stream},
        {"cuStreamSynchronize", &driver->wait},
        {"cuMemAlloc_v2", &driver->alloc},
        {"cuMemFree_v2", &driver->release},
        {"cuMemAllocAsync", &driver->alloc_async},
        {"cuMemFreeAsync", &driver->free_async},
        {"cuDeviceGetDefaultMemPool", &driver->pool},
        {"cuMemPoolSetAttribute", &driver->set_pool},
        {"cuMemsetD8Async", &driver->fill},
        {"cuModuleLoadData", &driver->load},
        {"cuModuleGetFunction", &driver->function},
        {"cuLaunchKernel", &driver->launch},
    };
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17"};
    void *(*look)(void *, const char *) = dlsym;
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *libc = dlopen("libc.so.6", RTLD_NOW),
         *libc_dlsym = NULL;
    for (size_t i = 0; bare && libc && !libc_dlsym && i < sizeof versions / sizeof *versions; i++)
        libc_dlsym = dlvsym(libc, "dlsym", versions[i]);
    if (libc_dlsym)
        memcpy(&look, &libc_dlsym, sizeof look);
    for (size_t i = 0; library && i < sizeof needed / sizeof *needed; i++) {
        void *found = look(library, needed[i].name);
        if (!found)
            return false;
        memcpy(needed[i].place, &found, sizeof found);
    }
    return library != NULL;
}

/* One call as often as a program makes it between two readings of the clock; the driver's first error. */
static int once(const struct driver *driver, enum sluice_bench_cuda_loop loop, handle stream, handle function,
                address scratch)
{
    enum { PIECE = 2 << 20, SMALL = 1024, LAUNCHES = 64, FILLED = 64 };
    address memory;
    int code = 0;
    switch (loop) {
    case SLUICE_BENCH_CUDA_PAIR:
    case SLUICE_BENCH_CUDA_SMALL_PAIR:
        code = driver->alloc(&memory, loop == SLUICE_BENCH_CUDA_PAIR ? PIECE : SMALL);
        return code ? code : driver->release(memory);
    case SLUICE_BENCH_CUDA_POOL_PAIR:
        code = driver->alloc_async(&memory, PIECE, stream);
        return code ? code : driver->free_async(memory, stream);
    case SLUICE_BENCH_CUDA_LAUNCHES:
        for (int i = 0; i < LAUNCHES && code == 0; i++) { /* the simulated driver runs nothing, and says so */
            int launched = driver->launch(function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
            code = function && launched ? launched : driver->fill(scratch, 0, FILLED, stream);
        }
        return code ? code : driver->wait(stream);
    }
    return -1;
}

/* A context of device 0, a stream and a function; the driver's first error. No function where the driver loads no code. */
static int begin(const struct driver *driver, handle *stream, handle *function)
{
    static const char empty[] = ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry empty() { ret; }\n";
    handle context, module;
    int code = driver->init(0);
    if (!code && !(code = driver->retain(&context, 0)) && !(code = driver->set(context)))
        code = driver->stream(stream, 0);
    if (!code && driver->load(&module, empty) == 0)
        code = driver->function(function, module, "empty");
    return code;
}

static enum sluice_error said(int code, struct sluice_error_text *text)
{
    if (code && text)
        snprintf(text->text, sizeof text->text, "the CUDA driver answers %d (-1: there is none)", code);
    return code ? SLUICE_ERROR_SYSTEM : SLUICE_OK;
}

enum sluice_error sluice_bench_cuda(enum sluice_bench_cuda_loop loop, uint32_t count, uint64_t *times,
                                    uint64_t *bare_times, struct sluice_error_text *text)
{
    struct driver seen, bare;
    handle stream = NULL, pool, function = NULL;
    address scratch = 0;
    uint64_t everything = UINT64_MAX;
    int code = open_driver(&seen, false) && open_driver(&bare, true) ? 0 : -1;
    if (!code && !(code = begin(&seen, &stream, &function)) && !(code = seen.pool(&pool, 0)) &&
        !(code = seen.set_pool(pool, 4, &everything)))
        code = seen.alloc(&scratch, 4096);
    for (uint32_t i = 0; i < 2 * count && !code; i++) { /* in turn, and each as often before as behind the other */
        bool is_bare = (i ^ i >> 1) & 1;
        uint64_t before = bench_now_ns();
        code = once(is_bare ? &bare : &seen, loop, stream, function, scratch);
        (is_bare ? bare_times : times)[i / 2] = bench_now_ns() - before;
    }
    return said(code, text);
}
