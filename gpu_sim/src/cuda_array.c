/* Simulated CUDA: arrays and mipmapped arrays, laid out row by row without padding. */
#include "cuda.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    size_t Width, Height;
    int Format;
    unsigned int NumChannels;
} CUDA_ARRAY_DESCRIPTOR;

typedef struct {
    size_t Width, Height, Depth;
    int Format;
    unsigned int NumChannels, Flags;
} CUDA_ARRAY3D_DESCRIPTOR;

enum { LAYERED = 1, MOST_LEVELS = 21 };

/* What the runtime keeps with the block of an array. */
struct about_array {
    CUDA_ARRAY3D_DESCRIPTOR what[MOST_LEVELS];
    size_t offset[MOST_LEVELS];
    unsigned levels;
};

static size_t texel(int format, unsigned int channels)
{
    size_t bytes = format == 0x01 || format == 0x08                     ? 1
                   : format == 0x02 || format == 0x09 || format == 0x10 ? 2
                   : format == 0x03 || format == 0x0a || format == 0x20 ? 4
                                                                        : 0;
    return channels == 1 || channels == 2 || channels == 4 ? bytes * channels : 0;
}

static size_t bytes_of(const CUDA_ARRAY3D_DESCRIPTOR *what)
{
    return texel(what->Format, what->NumChannels) * what->Width * (what->Height > 0 ? what->Height : 1) *
           (what->Depth > 0 ? what->Depth : 1);
}

/* All levels of detail in one piece: each has half the side lengths of the one before. CUDA clamps their number: one at
 * the least, and none after that of one element. */
static size_t lay_out(struct about_array *about, const CUDA_ARRAY3D_DESCRIPTOR *what, unsigned levels)
{
    CUDA_ARRAY3D_DESCRIPTOR next = *what;
    size_t sum = 0;
    bool more = true;
    for (about->levels = 0; about->levels == 0 || (about->levels < levels && more); about->levels++) {
        more = next.Width > 1 || next.Height > 1 || (next.Depth > 1 && (next.Flags & LAYERED) == 0);
        about->what[about->levels] = next;
        about->offset[about->levels] = sum;
        sum += bytes_of(&next);
        next.Width = next.Width > 1 ? next.Width / 2 : 1;
        next.Height = next.Height > 1 ? next.Height / 2 : next.Height;
        next.Depth = next.Depth > 1 && (next.Flags & LAYERED) == 0 ? next.Depth / 2 : next.Depth;
    }
    return sum;
}

CU(cuMipmappedArrayCreate, CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *what, unsigned int levels)
{
    const size_t most = (size_t)1 << 20;
    if (array == NULL || what == NULL || texel(what->Format, what->NumChannels) == 0 || what->Width == 0 ||
        what->Width > most || what->Height > most || what->Depth > most) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    struct about_array *about = calloc(1, sizeof *about);
    if (about == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUdeviceptr address;
    CUresult result = cuda_allocate(RT_ARRAY, &address, lay_out(about, what, levels));
    if (result != CUDA_SUCCESS) {
        free(about);
        return result;
    }
    rt_describe(cuda_pointer(address), about);
    *array = cuda_pointer(address);
    return CUDA_SUCCESS;
}

CU(cuArray3DCreate_v2, CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *what)
{
    return cuMipmappedArrayCreate(array, what, 1);
}

CU(cuArrayCreate_v2, CUarray *array, const CUDA_ARRAY_DESCRIPTOR *what)
{
    if (what == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    CUDA_ARRAY3D_DESCRIPTOR full = {
        .Width = what->Width, .Height = what->Height, .Format = what->Format, .NumChannels = what->NumChannels};
    return cuArray3DCreate_v2(array, &full);
}

CU(cuArrayDestroy, CUarray array)
{
    CUresult result = result_of(rt_free(array, RT_ARRAY));
    return result == CUDA_ERROR_INVALID_VALUE ? CUDA_ERROR_INVALID_HANDLE : result;
}

ALIAS(cuMipmappedArrayDestroy, cuArrayDestroy, (array), CUarray array)

/* A level is known by its address in the mipmapped array; NULL: no array of ours. */
static const struct about_array *about(CUarray array, unsigned *level)
{
    struct rt_block block;
    if (rt_find(array, &block) != RT_OK || block.kind != RT_ARRAY || block.about == NULL) {
        return NULL;
    }
    const struct about_array *found = block.about;
    for (*level = 0; *level < found->levels; (*level)++) {
        if (block.base + found->offset[*level] == (uintptr_t)array) {
            return found;
        }
    }
    return NULL;
}

bool cuda_array_plane(CUarray array, struct cuda_plane *plane)
{
    unsigned level;
    const struct about_array *it = about(array, &level);
    if (it != NULL) {
        const CUDA_ARRAY3D_DESCRIPTOR *what = &it->what[level];
        *plane = (struct cuda_plane){.start = (char *)array,
                                     .pitch = what->Width * texel(what->Format, what->NumChannels),
                                     .rows = what->Height > 0 ? what->Height : 1};
    }
    return it != NULL;
}

CU(cuArray3DGetDescriptor_v2, CUDA_ARRAY3D_DESCRIPTOR *what, CUarray array)
{
    unsigned level;
    const struct about_array *it = about(array, &level);
    if (what == NULL || it == NULL) {
        return what == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    }
    *what = it->what[level];
    return CUDA_SUCCESS;
}

CU(cuArrayGetDescriptor_v2, CUDA_ARRAY_DESCRIPTOR *what, CUarray array)
{
    CUDA_ARRAY3D_DESCRIPTOR full;
    CUresult result = what != NULL ? cuArray3DGetDescriptor_v2(&full, array) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *what = (CUDA_ARRAY_DESCRIPTOR){full.Width, full.Height, full.Format, full.NumChannels};
    }
    return result;
}

CU(cuMipmappedArrayGetLevel, CUarray *array, CUarray mipmapped, unsigned int level)
{
    unsigned first;
    const struct about_array *it = about(mipmapped, &first);
    if (array == NULL || it == NULL || first + level >= it->levels) {
        return it == NULL ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
    }
    *array = (CUarray)((char *)mipmapped + it->offset[first + level] - it->offset[first]);
    return CUDA_SUCCESS;
}
