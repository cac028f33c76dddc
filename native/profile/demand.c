/* SPDX-License-Identifier: Apache-2.0 */
#include "demand.h"

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

enum { MOST_THREADS = 64 };

static void add_thread(struct demand *sum, int folder, const char *tid)
{
    char path[300], text[128];
    struct demand one;
    snprintf(path, sizeof path, "%s/schedstat", tid);
    int file = openat(folder, path, O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        return;
    }
    ssize_t got = read(file, text, sizeof text - 1);
    close(file);
    text[got > 0 ? got : 0] = 0;
    if (sscanf(text, "%" SCNu64 " %" SCNu64, &one.ran, &one.waited) == 2) {
        sum->ran += one.ran;
        sum->waited += one.waited;
    }
}

struct demand demand_now(void)
{
    struct demand sum = {0};
    DIR *folder = opendir("/proc/self/task");
    struct dirent *entry;
    for (int left = MOST_THREADS; folder != NULL && left > 0 && (entry = readdir(folder)) != NULL;) {
        if (entry->d_name[0] != '.') {
            add_thread(&sum, dirfd(folder), entry->d_name);
            left--;
        }
    }
    if (folder != NULL) {
        closedir(folder);
    }
    return sum;
}

/* A thread that has ended took its part along. */
static uint64_t more(uint64_t before, uint64_t now)
{
    return now > before ? now - before : 0;
}

uint64_t demand_lost(const struct demand *before, const struct demand *now, uint64_t passed)
{
    uint64_t ran = more(before->ran, now->ran), waited = more(before->waited, now->waited);
    if (waited == 0) {
        return 0;
    }
    double wanted = (double)ran + (double)waited, length = wanted < (double)passed ? wanted : (double)passed;
    return (uint64_t)(length * (double)waited / wanted);
}
