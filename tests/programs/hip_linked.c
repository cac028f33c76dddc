/* SPDX-License-Identifier: Apache-2.0 */
/* Linked to HIP: what three allocations of 101, 60 and 41 MiB answer. */
#include <stddef.h>
#include <stdio.h>

int hipMalloc(void **place, size_t size);

int main(void)
{
    void *memory;
    int first = hipMalloc(&memory, (size_t)101 << 20), second = hipMalloc(&memory, (size_t)60 << 20);
    printf("%d %d %d\n", first, second, hipMalloc(&memory, (size_t)41 << 20));
    return 0;
}
