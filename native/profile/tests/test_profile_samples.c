/* SPDX-License-Identifier: Apache-2.0 */
/* Samples of a program that unloads the library in which it was sampled, before its name is read. */
#include "check.h"
#include "samples.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <linux/perf_event.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const char *symbol, *library;

/* What samples.c calls in the loader's place. */
int dladdr(const void *address, Dl_info *found)
{
    (void)address;
    *found = (Dl_info){.dli_sname = symbol, .dli_fname = library};
    return 1;
}

static atomic_bool over;

static void *compute(void *unused)
{
    while (!atomic_load(&over)) {
    }
    return unused;
}

/* As samples.c asks for them. */
static bool permitted(void)
{
    struct perf_event_attr how = {.type = PERF_TYPE_SOFTWARE,
                                  .size = sizeof how,
                                  .config = PERF_COUNT_SW_CPU_CLOCK,
                                  .sample_period = 10000000,
                                  .exclude_kernel = 1,
                                  .exclude_hv = 1};
    int fd = (int)syscall(SYS_perf_event_open, &how, 0, -1, -1, PERF_FLAG_FD_CLOEXEC);
    if (fd >= 0) {
        close(fd);
    }
    return fd >= 0;
}

/* The file's bytes after a profile of a busy thread. */
static size_t sample(int folder, uint32_t number, char *bytes, size_t size)
{
    struct sluice_profile_header header = {.number = number};
    struct profile_file *file = file_create(folder, &header, 1 << 20);
    struct timespec pause = {.tv_nsec = 10000000};
    uint64_t count = 0;
    char path[128] = "", host[64] = "";
    CHECK(file != NULL);
    samples_begin();
    samples_collect(file, true);
    for (int tries = 0; tries < 500 && count == 0; tries++) {
        nanosleep(&pause, NULL);
        count = samples_write(file);
    }
    count += samples_collect(file, false);
    file_end(file, SLUICE_PROFILE_STOPPED, NULL, 0);
    gethostname(host, sizeof host - 1);
    snprintf(path, sizeof path, "%s.%d.%u.profile", host, (int)getpid(), number);
    int written = openat(folder, path, O_RDONLY);
    ssize_t got = read(written, bytes, size);
    close(written);
    unlinkat(folder, path, 0);
    CHECK(count > 0 && got > 0);
    return (size_t)got;
}

static bool has(const char *bytes, size_t size, const char *text)
{
    return memmem(bytes, size, text, strlen(text) + 1) != NULL;
}

int main(void)
{
    enum { SKIPPED = 77 }; /* CMakeLists.txt */
    static char bytes[1 << 20];
    char path[] = "/tmp/sluice-samples-XXXXXX";
    size_t page = (size_t)sysconf(_SC_PAGESIZE), size;
    char *pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    pthread_t thread;
    if (!permitted()) {
        puts("perf_event_open is forbidden here");
        return SKIPPED;
    }
    CHECK(pages != MAP_FAILED && mkdtemp(path) != NULL && mprotect(pages + page, page, PROT_NONE) == 0);
    int folder = open(path, O_RDONLY | O_DIRECTORY);
    CHECK(pthread_create(&thread, NULL, compute, NULL) == 0);

    symbol = memcpy(pages + page - 5, "gemm", 5); /* the last of its library */
    library = "/lib/libmath.so";
    size = sample(folder, 1, bytes, sizeof bytes);
    CHECK(has(bytes, size, "gemm"));
    symbol = pages + page; /* it is gone */
    size = sample(folder, 2, bytes, sizeof bytes);
    CHECK(has(bytes, size, "[libmath.so]"));
    library = pages + page;
    size = sample(folder, 3, bytes, sizeof bytes);
    CHECK(has(bytes, size, "[no library]"));
    atomic_store(&over, true);
    pthread_join(thread, NULL);
    close(folder);
    CHECK(rmdir(path) == 0);
    return 0;
}
