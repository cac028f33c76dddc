/* Simulated CUDA: copies and fills, in streams and without them. Each is one description, which a stream that is
 * recorded keeps and any other carries out at once, as far as memory goes: on their streams they take as long as that took. */
#include "cuda.h"

#include <string.h>

enum { HOST = 1, DEVICE, ARRAY, UNIFIED };

static bool plane_of(const cuda_place *place, const cuda_copy *copy, struct cuda_plane *plane)
{
    if (place->type == ARRAY) {
        if (place->array == NULL || !cuda_array_plane(place->array, plane)) {
            return false;
        }
    } else {
        plane->start = place->type == HOST ? (char *)(uintptr_t)place->host : cuda_pointer(place->device);
        plane->pitch = place->pitch > 0 ? place->pitch : place->x + copy->width;
        plane->rows = place->height > 0 ? place->height : place->y + copy->height;
    }
    bool fits = plane->start != NULL && place->type >= HOST && place->type <= UNIFIED &&
                (copy->height <= 1 || place->x + copy->width <= plane->pitch);
    plane->start = fits ? plane->start + (place->z * plane->rows + place->y) * plane->pitch + place->x : NULL;
    return fits;
}

static CUresult do_copy(const cuda_copy *copy)
{
    struct cuda_plane from, to;
    if (copy->width == 0 || copy->height == 0 || copy->depth == 0) {
        return CUDA_SUCCESS;
    }
    if (!plane_of(&copy->from, copy, &from) || !plane_of(&copy->to, copy, &to)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t z = 0; z < copy->depth; z++) {
        for (size_t y = 0; y < copy->height; y++) {
            memmove(to.start + (z * to.rows + y) * to.pitch, from.start + (z * from.rows + y) * from.pitch,
                    copy->width);
        }
    }
    return CUDA_SUCCESS;
}

static CUresult do_fill(const struct cuda_work *work)
{
    char *to = cuda_pointer(work->fill.to);
    if (to == NULL && work->fill.width > 0 && work->fill.height > 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t y = 0; y < work->fill.height; y++) {
        rt_fill(to + y * work->fill.pitch, &work->fill.value, work->fill.element, work->fill.width);
    }
    return CUDA_SUCCESS;
}

/* CUpti_ActivityMemoryKind */
static uint8_t memory_kind(const cuda_place *place)
{
    enum { PAGEABLE = 1, PINNED, ON_DEVICE, IN_ARRAY, MANAGED };
    struct rt_block block;
    const void *at = place->type == HOST ? place->host : cuda_pointer(place->device);
    if (place->type == ARRAY) {
        return IN_ARRAY;
    }
    if (rt_find(at, &block) != RT_OK) {
        return PAGEABLE;
    }
    return block.kind == RT_HOST ? PINNED : block.kind == RT_MANAGED ? MANAGED : ON_DEVICE;
}

/* Where a place of one row is; NULL: of an array. */
static void *row_of(const cuda_place *place)
{
    return place->type == ARRAY  ? NULL
           : place->type == HOST ? (char *)(uintptr_t)place->host + place->x
                                 : (char *)cuda_pointer(place->device) + place->x;
}

/* ns of what was begun at `began` and is done on its stream after as many. */
static uint64_t duration_of(const struct cuda_work *work, uint64_t began)
{
    uint64_t took = line_now() - began;
    const cuda_copy *copy = &work->copy;
    bool row = work->kind == CUDA_COPY && copy->height == 1 && copy->depth == 1;
    void *to = row ? row_of(&copy->to) : NULL, *from = row ? row_of(&copy->from) : NULL;
    return to != NULL && from != NULL ? rt_copied(to, from, copy->width, took) : took;
}

static void moved(CUcontext context, CUstream stream, const struct cuda_work *work, uint64_t began)
{
    uint64_t took = duration_of(work, began);
    uint64_t start = cuda_enqueue(context, stream, began, took);
    struct sim_activity activity = {.start = start, .end = start + took};
    if (sim_tracer() == NULL) {
        return;
    }
    if (work->kind == CUDA_COPY) {
        activity.kind = SIM_COPIED;
        activity.bytes = work->copy.width * work->copy.height * work->copy.depth;
        activity.from = memory_kind(&work->copy.from);
        activity.to = memory_kind(&work->copy.to);
    } else {
        activity.kind = SIM_FILLED;
        activity.bytes = work->fill.width * work->fill.height * work->fill.element;
        activity.to = memory_kind(&(cuda_place){.type = UNIFIED, .device = work->fill.to});
    }
    cuda_happened(context, stream, &activity);
}

static CUresult move(CUcontext context, CUstream stream, const struct cuda_work *work)
{
    uint64_t start = line_now();
    CUresult result = work->kind == CUDA_COPY ? do_copy(&work->copy) : do_fill(work);
    if (result == CUDA_SUCCESS) {
        moved(context, stream, work, start);
    }
    return result;
}

CUresult cuda_do(CUcontext context, CUstream stream, const struct cuda_work *work)
{
    switch (work->kind) {
    case CUDA_COPY:
    case CUDA_FILL:
        return move(context, stream, work);
    case CUDA_CALL:
        work->call.function(work->call.argument);
        return CUDA_SUCCESS;
    case CUDA_KERNEL:
        cuda_run_kernel(context, stream, &work->kernel);
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuda_submit(CUstream stream, const struct cuda_work *work)
{
    CUcontext context;
    CUresult result = cuda_context(&context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    struct cu_graph *graph = cuda_recording(stream);
    return graph != NULL ? cuda_graph_capture_work(graph, work) : cuda_do(context, stream, work);
}

/* Calls that name no stream return when the work is done. */
static CUresult finished(CUresult result)
{
    return result == CUDA_SUCCESS ? cuda_wait(NULL) : result;
}

/* ---- copies of one dimension ---- */

static CUresult copy(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    struct cuda_work work = {.kind = CUDA_COPY,
                             .copy = {.from = {.type = UNIFIED, .device = from},
                                      .to = {.type = UNIFIED, .device = to},
                                      .width = size,
                                      .height = 1,
                                      .depth = 1}};
    return cuda_submit(stream, &work);
}

/* Addresses are those of this process, on the host or not. */
#define COPY(NAME, VERSION, TO, FROM)                                                                                  \
    CU(cuMemcpy##NAME##VERSION, TO to, FROM from, size_t size)                                                         \
    {                                                                                                                  \
        return finished(copy((CUdeviceptr)to, (CUdeviceptr)from, size, NULL));                                         \
    }                                                                                                                  \
    CU(cuMemcpy##NAME##Async##VERSION, TO to, FROM from, size_t size, CUstream stream)                                 \
    {                                                                                                                  \
        return copy((CUdeviceptr)to, (CUdeviceptr)from, size, stream);                                                 \
    }

COPY(, , CUdeviceptr, CUdeviceptr)
COPY(HtoD, _v2, CUdeviceptr, const void *)
COPY(DtoH, _v2, void *, CUdeviceptr)
COPY(DtoD, _v2, CUdeviceptr, CUdeviceptr)

CU(cuMemcpyPeerAsync, CUdeviceptr to, CUcontext there, CUdeviceptr from, CUcontext here, size_t size, CUstream stream)
{
    return rt_context_valid(there) && rt_context_valid(here) ? copy(to, from, size, stream)
                                                             : CUDA_ERROR_INVALID_CONTEXT;
}

CU(cuMemcpyPeer, CUdeviceptr to, CUcontext there, CUdeviceptr from, CUcontext here, size_t size)
{
    return finished(cuMemcpyPeerAsync(to, there, from, here, size, NULL));
}

/* ---- copies of two and three dimensions ---- */

CU(cuMemcpy3DAsync_v2, const cuda_copy *what, CUstream stream)
{
    if (what == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return cuda_submit(stream, &(struct cuda_work){.kind = CUDA_COPY, .copy = *what});
}

CU(cuMemcpy3D_v2, const cuda_copy *what)
{
    return finished(cuMemcpy3DAsync_v2(what, NULL));
}

ALIAS(cuMemcpy3DPeerAsync, cuMemcpy3DAsync_v2, (what, stream), const cuda_copy *what, CUstream stream)
ALIAS(cuMemcpy3DPeer, cuMemcpy3D_v2, (what), const cuda_copy *what)

typedef struct {
    size_t x, y;
    int type;
    const void *host;
    CUdeviceptr device;
    CUarray array;
    size_t pitch;
} flat_place;

typedef struct {
    flat_place from, to;
    size_t width, height;
} CUDA_MEMCPY2D;

static cuda_place place_of(const flat_place *flat)
{
    return (cuda_place){.x = flat->x,
                        .y = flat->y,
                        .type = flat->type,
                        .host = flat->host,
                        .device = flat->device,
                        .array = flat->array,
                        .pitch = flat->pitch};
}

CU(cuMemcpy2DAsync_v2, const CUDA_MEMCPY2D *what, CUstream stream)
{
    if (what == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    cuda_copy full = {.from = place_of(&what->from),
                      .to = place_of(&what->to),
                      .width = what->width,
                      .height = what->height,
                      .depth = 1};
    return cuMemcpy3DAsync_v2(&full, stream);
}

CU(cuMemcpy2D_v2, const CUDA_MEMCPY2D *what)
{
    return finished(cuMemcpy2DAsync_v2(what, NULL));
}

ALIAS(cuMemcpy2DUnaligned_v2, cuMemcpy2D_v2, (what), const CUDA_MEMCPY2D *what)

/* ---- fills ---- */

static CUresult fill(CUdeviceptr to, size_t pitch, unsigned value, unsigned element, size_t width, size_t height,
                     CUstream stream)
{
    struct cuda_work work = {
        .kind = CUDA_FILL,
        .fill = {.to = to, .pitch = pitch, .width = width, .height = height, .element = element, .value = value}};
    return cuda_submit(stream, &work);
}

#define MEMSET(NAME, TYPE)                                                                                             \
    CU(cuMemset##NAME##_v2, CUdeviceptr to, TYPE value, size_t count)                                                  \
    {                                                                                                                  \
        return fill(to, 0, value, sizeof value, count, 1, NULL);                                                       \
    }                                                                                                                  \
    CU(cuMemset##NAME##Async, CUdeviceptr to, TYPE value, size_t count, CUstream stream)                               \
    {                                                                                                                  \
        return fill(to, 0, value, sizeof value, count, 1, stream);                                                     \
    }                                                                                                                  \
    CU(cuMemsetD2##NAME##_v2, CUdeviceptr to, size_t pitch, TYPE value, size_t width, size_t height)                   \
    {                                                                                                                  \
        return fill(to, pitch, value, sizeof value, width, height, NULL);                                              \
    }                                                                                                                  \
    CU(cuMemsetD2##NAME##Async, CUdeviceptr to, size_t pitch, TYPE value, size_t width, size_t height,                 \
       CUstream stream)                                                                                                \
    {                                                                                                                  \
        return fill(to, pitch, value, sizeof value, width, height, stream);                                            \
    }

MEMSET(D8, unsigned char)
MEMSET(D16, unsigned short)
MEMSET(D32, unsigned int)

/* A stream's own writes are fills of one element. */
CU(cuStreamWriteValue32, CUstream stream, CUdeviceptr to, uint32_t value, unsigned int flags)
{
    (void)flags;
    return fill(to, 0, value, sizeof value, 1, 1, stream);
}

ALIAS(cuStreamWriteValue32_v2, cuStreamWriteValue32, (stream, to, value, flags), CUstream stream, CUdeviceptr to,
      uint32_t value, unsigned int flags)
