/* SPDX-License-Identifier: Apache-2.0 */
/* Asks for memory by forms of 32-bit addresses. */
#include <stdio.h>

extern int cuMemAlloc(void *, unsigned), cuArrayCreate(void *, void *);

int main(void)
{
    return printf("%d %d\n", cuMemAlloc(0, 1), cuArrayCreate(0, 0)) < 0;
}
