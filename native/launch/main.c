/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sluice-launch init SCRIPT
 * sluice-launch wait INIT GATE JOB UID HELPER
 *
 * Started by the SPANK plugin (slurm_plugin/entry/launch.c) alone, as root and without an environment.
 */
#include "launch.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint32_t number(const char *text)
{
    char *end;
    errno = 0;
    unsigned long value = strtoul(text, &end, 10);
    if (errno || end == text || *end || value > UINT32_MAX)
        exit(2);
    return (uint32_t)value;
}

int main(int count, char *words[])
{
    if (count == 3 && strcmp(words[1], "init") == 0)
        launch_init((pid_t)number(words[2]));
    if (count == 7 && strcmp(words[1], "wait") == 0) {
        struct launch launch = {
            .init = (pid_t)number(words[2]),
            .gate = (int)number(words[3]),
            .job = number(words[4]),
            .user = number(words[5]),
            .helper = words[6],
        };
        launch_wait(&launch);
    }
    fputs("usage: sluice-launch is started by Slurm's SPANK plugin spank_sluice_limit.so\n", stderr);
    return 2;
}
