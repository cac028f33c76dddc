/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A node's clock that is set, for one process: preloaded into the node agent, it adds the seconds in the file
 * $SHIFTED_CLOCK (a line) to CLOCK_REALTIME. The agent's processes that ask drivers keep the true time, as the
 * simulated drivers and their jobs, which share counters by it, have it too.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const char *file;

static size_t content(const char *path, char *text, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? 0 : read(fd, text, size - 1);
    if (fd >= 0)
        close(fd);
    text[length > 0 ? length : 0] = '\0';
    return length > 0 ? (size_t)length : 0;
}

__attribute__((constructor)) static void start(void)
{
    char line[4096];
    size_t length = content("/proc/self/cmdline", line, sizeof(line));
    for (size_t i = 0; i < length; i++)
        if (!line[i])
            line[i] = ' ';
    if (!strstr(line, "prolog_epilog.sampling"))
        file = getenv("SHIFTED_CLOCK");
}

static long shift(void)
{
    char text[32];
    return file && content(file, text, sizeof(text)) ? strtol(text, NULL, 10) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    long result = syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && clock == CLOCK_REALTIME)
        now->tv_sec += shift();
    return (int)result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    long result = syscall(SYS_gettimeofday, now, zone);
    if (result == 0)
        now->tv_sec += shift();
    return (int)result;
}

time_t time(time_t *at)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at)
        *at = now.tv_sec;
    return now.tv_sec;
}
