/* SPDX-License-Identifier: Apache-2.0 */
/* Has CUDA's runtime library linked into it, which asks the driver for all of its functions. */
#include <stddef.h>
#include <stdio.h>

int cudaMalloc(void **address, size_t size);
int cudaFree(void *address);
int cudaMallocManaged(void **address, size_t size, unsigned flags);
int cudaMallocAsync(void **address, size_t size, void *stream);
int cudaMemGetInfo(size_t *left, size_t *total);
int cudaDeviceReset(void);

static size_t left(void)
{
    size_t bytes = 0, total;
    cudaMemGetInfo(&bytes, &total);
    return bytes >> 20;
}

int main(void)
{
    void *all, *one;
    printf("%zu ", left());
    printf("%d ", cudaMalloc(&all, 302 << 20));
    printf("%d ", cudaMalloc(&all, 300 << 20));
    printf("%d %d %d ", cudaMalloc(&one, 1), cudaMallocManaged(&one, 1, 1), cudaMallocAsync(&one, 1, NULL));
    printf("%zu ", left());
    cudaFree(all);
    printf("%zu ", left());
    printf("%d\n", cudaDeviceReset());
    return 0;
}
