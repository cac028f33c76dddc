/* SPDX-License-Identifier: Apache-2.0 */
#include "samples.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <linux/perf_event.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "clock.h"

enum {
    HZ = 99, /* no multiple of what programs do in step */
    PERIOD_NS = 1000000000 / HZ,
    RING_PAGES = 2,    /* of a thread, one of them its head: 128 samples or more, of which ten come between two looks */
    MOST_THREADS = 64, /* what a user may lock by default is enough for them */
    CACHED = 1 << 12,  /* addresses */
};

struct thread {
    pid_t tid; /* 0: a free place */
    struct perf_event_mmap_page *ring;
    bool seen;
};

static struct {
    struct thread threads[MOST_THREADS];
    pid_t own; /* our thread is not the program's */
    bool on, incomplete, reported;
    struct {
        uint64_t address;
        uint32_t name;
    } cache[CACHED];
} all;

/* As perf_event_open(2) has it for IP, TID and TIME. */
struct sample {
    struct perf_event_header header;
    uint64_t address;
    uint32_t pid, tid;
    uint64_t time;
};

/* ---- threads ---- */

static size_t ring_bytes(void)
{
    return RING_PAGES * (size_t)sysconf(_SC_PAGESIZE);
}

static void leave(struct thread *thread)
{
    munmap(thread->ring, ring_bytes());
    *thread = (struct thread){0};
}

/*
 * The ring alone holds the kernel's event: a number of a file would be one that the program may close and use again, and
 * whose files the kernel cannot tell apart. A child after a fork has no ring, as the kernel copies none.
 */
static bool watch(struct thread *thread, pid_t tid)
{
    struct perf_event_attr how = {.type = PERF_TYPE_SOFTWARE,
                                  .size = sizeof how,
                                  .config = PERF_COUNT_SW_CPU_CLOCK,
                                  .sample_period = PERIOD_NS,
                                  .sample_type = PERF_SAMPLE_IP | PERF_SAMPLE_TID | PERF_SAMPLE_TIME,
                                  .exclude_kernel = 1,
                                  .exclude_hv = 1,
                                  .use_clockid = 1,
                                  .clockid = CLOCK_MONOTONIC};
    int fd = (int)syscall(SYS_perf_event_open, &how, tid, -1, -1, PERF_FLAG_FD_CLOEXEC);
    if (fd < 0) {
        all.incomplete |= errno != ESRCH; /* it may have ended meanwhile */
        return false;
    }
    void *ring = mmap(NULL, ring_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (ring == MAP_FAILED) {
        all.incomplete = true;
        return false;
    }
    *thread = (struct thread){.tid = tid, .ring = ring};
    return true;
}

static struct thread *thread_of(pid_t tid)
{
    for (size_t i = 0; i < MOST_THREADS; i++) {
        if (all.threads[i].tid == tid) {
            return &all.threads[i];
        }
    }
    return NULL;
}

static void see(pid_t tid)
{
    struct thread *thread = thread_of(tid);
    if (thread == NULL) {
        thread = thread_of(0);
        all.incomplete |= thread == NULL;
        if (thread == NULL || !watch(thread, tid)) {
            return;
        }
    }
    thread->seen = true;
}

static void find_threads(void)
{
    DIR *folder = opendir("/proc/self/task");
    struct dirent *entry;
    for (size_t i = 0; i < MOST_THREADS; i++) {
        all.threads[i].seen = folder == NULL; /* without a free file those that are known are looked at */
    }
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        pid_t tid = (pid_t)atoi(entry->d_name);
        if (tid > 0 && tid != all.own) {
            see(tid);
        }
    }
    if (folder != NULL) {
        closedir(folder);
    }
}

/* ---- samples ---- */

/*
 * Through the kernel: between dladdr's answer and this the program may unload the library whose text it is. At the end
 * of a page, as the next one may not be there. False: it is gone.
 */
static bool copy_text(const char *text, char *copy, size_t size)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), here = page - (uintptr_t)text % page;
    size_t first = here < size - 1 ? here : size - 1;
    struct iovec to = {.iov_base = copy, .iov_len = size - 1};
    struct iovec from[] = {{.iov_base = (char *)text, .iov_len = first},
                           {.iov_base = (char *)text + first, .iov_len = size - 1 - first}};
    ssize_t got = process_vm_readv(getpid(), &to, 1, from, 2, 0);
    copy[got > 0 ? got : 0] = 0;
    return got > 0;
}

static uint32_t look_up(struct profile_file *file, uint64_t address)
{
    Dl_info found;
    char text[SLUICE_PROFILE_MAX_NAME + 1], path[SLUICE_PROFILE_MAX_NAME - 2];
    void *place;
    memcpy(&place, &address, sizeof place);
    if (dladdr(place, &found) == 0) {
        return file_name(file, "[no library]");
    }
    if (found.dli_sname != NULL && copy_text(found.dli_sname, text, sizeof text)) {
        return file_name(file, text);
    }
    if (found.dli_fname == NULL || !copy_text(found.dli_fname, path, sizeof path)) {
        return file_name(file, "[no library]");
    }
    const char *base = strrchr(path, '/');
    snprintf(text, sizeof text, "[%s]", base != NULL ? base + 1 : path);
    return file_name(file, text);
}

static uint32_t name_of(struct profile_file *file, uint64_t address)
{
    size_t place = (address >> 2) % CACHED;
    if (all.cache[place].address != address) {
        all.cache[place].address = address;
        all.cache[place].name = look_up(file, address);
    }
    return all.cache[place].name;
}

static void write_sample(struct profile_file *file, const struct sample *sample)
{
    file_add(file, &(struct sluice_profile_record){.kind = SLUICE_PROFILE_SAMPLE,
                                                   .device = UINT32_MAX,
                                                   .start = sample->time,
                                                   .end = sample->time + PERIOD_NS,
                                                   .name = name_of(file, sample->address),
                                                   .call = {.thread = sample->tid}});
}

static void note_lost(struct profile_file *file, uint64_t events, enum sluice_profile_reason reason)
{
    uint64_t now = clock_now(CLOCK_MONOTONIC);
    file_add(file, &(struct sluice_profile_record){.kind = SLUICE_PROFILE_LOST,
                                                   .device = UINT32_MAX,
                                                   .start = now,
                                                   .end = now,
                                                   .loss = {.events = events, .reason = reason}});
}

/* Copied out, as a record may go round the ring's end. The kernel alone writes there. */
static void copy_out(const struct perf_event_mmap_page *ring, uint64_t at, void *to, size_t size)
{
    const unsigned char *data = (const unsigned char *)ring + ring->data_offset;
    for (size_t i = 0; i < size; i++) {
        ((unsigned char *)to)[i] = data[(at + i) % ring->data_size];
    }
}

static uint64_t empty(struct profile_file *file, struct perf_event_mmap_page *ring)
{
    uint64_t head = __atomic_load_n(&ring->data_head, __ATOMIC_ACQUIRE), at = ring->data_tail, count = 0;
    while (at < head) {
        struct sample sample;
        copy_out(ring, at, &sample.header, sizeof sample.header);
        if (sample.header.size == 0) {
            break;
        }
        if (sample.header.type == PERF_RECORD_SAMPLE && sample.header.size == sizeof sample) {
            copy_out(ring, at, &sample, sizeof sample);
            write_sample(file, &sample);
            count++;
        } else if (sample.header.type == PERF_RECORD_LOST) {
            uint64_t lost[2] = {0};
            copy_out(ring, at + sizeof sample.header, lost, sizeof lost);
            note_lost(file, lost[1], SLUICE_PROFILE_BUFFERS);
        }
        at += sample.header.size;
    }
    __atomic_store_n(&ring->data_tail, head, __ATOMIC_RELEASE);
    return count;
}

static uint64_t empty_all(struct profile_file *file)
{
    uint64_t count = 0;
    for (size_t i = 0; i < MOST_THREADS; i++) {
        if (all.threads[i].tid != 0) {
            count += empty(file, all.threads[i].ring);
        }
    }
    return count;
}

static void leave_unseen(void)
{
    for (size_t i = 0; i < MOST_THREADS; i++) {
        if (all.threads[i].tid != 0 && !all.threads[i].seen) {
            leave(&all.threads[i]);
        }
    }
}

void samples_begin(void)
{
    all.own = gettid();
    all.incomplete = all.reported = false;
    memset(all.cache, 0, sizeof all.cache);
}

uint64_t samples_collect(struct profile_file *file, bool on)
{
    all.on = on;
    if (on) {
        find_threads();
        return 0;
    }
    uint64_t count = empty_all(file);
    for (size_t i = 0; i < MOST_THREADS; i++) {
        all.threads[i].seen = false;
    }
    leave_unseen();
    return count;
}

uint64_t samples_write(struct profile_file *file)
{
    if (!all.on) {
        return 0;
    }
    find_threads();
    uint64_t count = empty_all(file);
    leave_unseen();
    if (all.incomplete && !all.reported) {
        all.reported = true;
        note_lost(file, 0, SLUICE_PROFILE_FORBIDDEN);
    }
    return count;
}
