/* SPDX-License-Identifier: Apache-2.0 */
/* A static program, which loads nothing; says whether the limiter is in it, and stays. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(void)
{
    char line[512];
    int limited = 0;
    for (FILE *maps = fopen("/proc/self/maps", "r"); fgets(line, sizeof line, maps);)
        limited |= strstr(line, "libsluice") != NULL;
    printf("pid %d\nlimited %d\n", getpid(), limited);
    fflush(stdout);
    sleep(600);
    return 0;
}
