/* SPDX-License-Identifier: Apache-2.0 */
/* Allocates 8 GiB as a setuid program, which loads nothing that its caller wants preloaded. */
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>

int main(void)
{
    void *cu = dlopen("libcuda.so.1", RTLD_NOW), *context, *address;
    int (*init)(unsigned) = dlsym(cu, "cuInit"), (*retain)(void **, int) = dlsym(cu, "cuDevicePrimaryCtxRetain");
    int (*set)(void *) = dlsym(cu, "cuCtxSetCurrent"), (*alloc)(void **, size_t) = dlsym(cu, "cuMemAlloc_v2");
    if (geteuid() != 0 || init(0) || retain(&context, 0) || set(context))
        return 1;
    printf("code %d\n", alloc(&address, 8192UL << 20));
    return 0;
}
