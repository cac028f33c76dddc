/* SPDX-License-Identifier: Apache-2.0 */
/* Comes to the driver as CUDA's runtime library does, static or not: one symbol by dlsym, the others from it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef int get_t(const char *, void **, int, uint64_t, int *);
typedef int alloc_t(uint64_t *, size_t), init_t(unsigned), retain_t(void **, int), current_t(void *);
typedef int async_t(uint64_t *, size_t, void *);

int main(int count, char **words)
{
    void *context;
    uint64_t address;
    void *library = dlopen(count > 1 ? words[1] : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *found;
    get_t *get = library ? (get_t *)dlsym(library, "cuGetProcAddress_v2") : NULL;
    if (!get)
        return 2;
#define GET(NAME, FLAGS) (get(NAME, &found, 12050, FLAGS, NULL) == 0 ? found : NULL)
    init_t *init = (init_t *)GET("cuInit", 0);
    retain_t *retain = (retain_t *)GET("cuDevicePrimaryCtxRetain", 0);
    current_t *current = (current_t *)GET("cuCtxSetCurrent", 0);
    alloc_t *alloc = (alloc_t *)GET("cuMemAlloc", 0);
    async_t *async = (async_t *)GET("cuMemAllocAsync", 0);
    get_t *again = (get_t *)GET("cuGetProcAddress", 0);
    void *second = NULL;
    again("cuMemAlloc", &second, 12050, 0, NULL);
    if (init(0) || retain(&context, 0) || current(context))
        return 3;
    printf("%d ", alloc(&address, 90 << 20));
    printf("%d ", alloc(&address, 20 << 20));
    printf("%d %d\n", async(&address, 20 << 20, NULL), second == (void *)alloc);
    return 0;
}
