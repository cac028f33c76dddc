/* SPDX-License-Identifier: Apache-2.0 */
/* Is linked with the driver: allocates 90 MiB, then 20 MiB. Prints its parent first, for cuda_interposer.c. */
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

extern int cuInit(unsigned), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
extern int cuMemAlloc_v2(uint64_t *, size_t);

int main(void)
{
    void *context;
    uint64_t address;
    printf("%d\n", getppid());
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context))
        return 1;
    printf("%d ", cuMemAlloc_v2(&address, 90 << 20));
    printf("%d\n", cuMemAlloc_v2(&address, 20 << 20));
    return 0;
}
