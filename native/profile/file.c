/* SPDX-License-Identifier: Apache-2.0 */
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "clock.h"

enum {
    RECORD = sizeof(struct sluice_profile_record),
    HELD = 1024,           /* records that are written together */
    NAMES = 1 << 16,       /* of one file, at most */
    NAME_BYTES = 16 << 20, /* and all their text */
    BUCKETS = 1 << 12,
    TRIES = 100, /* of a file's name: a process's number is used again in other PID namespaces */
    LEAST_LIMIT = 64 << 10,
};

_Static_assert(sizeof(struct sluice_profile_record) == 64, "the format");
_Static_assert(sizeof(struct sluice_profile_header) == 256, "the format");
_Static_assert(sizeof(struct sluice_profile_control) == 64, "the format");

struct name {
    struct name *next;
    uint64_t hash;
    uint32_t number;
    char text[];
};

struct profile_file {
    int fd;
    dev_t device; /* which file it is: a program may close what it did not open, and reuse the number */
    ino_t inode;
    uint64_t started, limit, bytes; /* written and held */
    uint64_t events, lost;
    enum sluice_profile_reason failed;
    uint32_t names;
    size_t name_bytes, held;
    struct name *buckets[BUCKETS];
    struct sluice_profile_record records[HELD];
};

/* ---- the header ---- */

static uint32_t number_in(const char *variable)
{
    const char *text = getenv(variable);
    char *end = NULL;
    unsigned long value = text != NULL ? strtoul(text, &end, 10) : 0;
    return text != NULL && end != text && *end == 0 && value < UINT32_MAX ? (uint32_t)value : UINT32_MAX;
}

static void first_line(const char *path, char *text, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd >= 0 ? read(fd, text, size - 1) : 0;
    text[got > 0 ? got : 0] = 0;
    text[strcspn(text, "\n")] = 0;
    if (fd >= 0) {
        close(fd);
    }
}

static void fill_in(struct sluice_profile_header *header)
{
    memcpy(header->magic, SLUICE_PROFILE_MAGIC, sizeof header->magic);
    header->version = SLUICE_PROFILE_VERSION;
    header->header_bytes = sizeof *header;
    header->record_bytes = RECORD;
    header->started = clock_now(CLOCK_MONOTONIC);
    header->time_of_day = clock_now(CLOCK_REALTIME);
    header->pid = (uint32_t)getpid();
    header->job = number_in("SLURM_JOB_ID");
    header->step = number_in("SLURM_STEP_ID");
    header->rank = number_in("SLURM_PROCID");
    header->node = number_in("SLURM_NODEID");
    gethostname(header->host, sizeof header->host - 1);
    first_line("/proc/self/comm", header->program, sizeof header->program);
    first_line("/proc/sys/kernel/random/boot_id", header->boot, sizeof header->boot);
}

static int create(int folder, const struct sluice_profile_header *header)
{
    char name[128];
    for (unsigned i = 0; i < TRIES; i++) {
        char again[16] = "";
        if (i > 0) {
            snprintf(again, sizeof again, "-%u", i);
        }
        snprintf(name, sizeof name, "%s.%u.%u%s" SLUICE_PROFILE_SUFFIX, header->host, header->pid, header->number,
                 again);
        int fd = openat(folder, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (fd >= 0 || errno != EEXIST) {
            return fd;
        }
    }
    return -1;
}

/* ---- writing ---- */

/* As much as the kernel took. A signal is no failure. */
static size_t write_all(int fd, const void *data, size_t size)
{
    size_t done = 0;
    while (done < size) {
        ssize_t wrote = write(fd, (const char *)data + done, size - done);
        if (wrote > 0) {
            done += (size_t)wrote;
        } else if (wrote == 0 || errno != EINTR) {
            break;
        }
    }
    return done;
}

static void forget(struct profile_file *file)
{
    if (file->fd >= 0) {
        close(file->fd);
    }
    for (size_t i = 0; i < BUCKETS; i++) {
        for (struct name *name = file->buckets[i], *next; name != NULL; name = next) {
            next = name->next;
            free(name);
        }
    }
    free(file);
}

static bool is_ours(const struct profile_file *file)
{
    struct stat now;
    return fstat(file->fd, &now) == 0 && now.st_dev == file->device && now.st_ino == file->inode;
}

static bool remember(struct profile_file *file)
{
    struct stat now;
    bool known = fstat(file->fd, &now) == 0;
    file->device = known ? now.st_dev : 0;
    file->inode = known ? now.st_ino : 0;
    return known;
}

struct profile_file *file_create(int folder, const struct sluice_profile_header *wanted, uint64_t limit)
{
    struct {
        struct sluice_profile_header header;
        struct sluice_profile_record end;
    } start = {.header = *wanted};
    struct profile_file *file = calloc(1, sizeof *file);
    if (file == NULL) {
        return NULL;
    }
    fill_in(&start.header);
    file->fd = create(folder, &start.header);
    file->started = start.header.started;
    file->limit = limit > LEAST_LIMIT ? limit : LEAST_LIMIT;
    file->bytes = sizeof start;
    if (file->fd < 0 || !remember(file) || write_all(file->fd, &start, sizeof start) != sizeof start) {
        int saved = errno;
        forget(file);
        errno = saved;
        return NULL;
    }
    return file;
}

void file_flush(struct profile_file *file)
{
    size_t size = file->held * RECORD;
    bool able = size == 0 || file->failed == SLUICE_PROFILE_DISK ||
                (is_ours(file) && write_all(file->fd, file->records, size) == size);
    if (!able) {
        file->failed = SLUICE_PROFILE_DISK;
        file->lost += file->held; /* a part of them may be there */
    }
    file->held = 0;
}

static void append(struct profile_file *file, const struct sluice_profile_record *record)
{
    if (file->failed != 0) {
        file->lost++;
        return;
    }
    file->records[file->held++] = *record;
    file->bytes += RECORD;
    if (file->held == HELD) {
        file_flush(file);
    }
}

/* Room for the last name, a LOST and a last CLOCK is always left. */
static bool has_room(struct profile_file *file, size_t records)
{
    enum { RESERVED = SLUICE_PROFILE_MAX_NAME + 8 * RECORD };
    if (file->failed == 0 && file->bytes + records * RECORD + RESERVED > file->limit) {
        file->failed = SLUICE_PROFILE_QUOTA;
    }
    return file->failed == 0;
}

void file_add(struct profile_file *file, const struct sluice_profile_record *record)
{
    if (has_room(file, 1)) {
        append(file, record);
        file->events++;
    } else {
        file->lost++;
    }
}

/* ---- names ---- */

static void write_name(struct profile_file *file, uint32_t number, const char *text, size_t size)
{
    size_t slots = (size + RECORD - 1) / RECORD;
    append(file, &(struct sluice_profile_record){
                     .kind = SLUICE_PROFILE_NAME, .slots = (uint16_t)slots, .name = number, .bytes = size});
    for (size_t i = 0; i < slots; i++) {
        struct sluice_profile_record slot = {0};
        size_t left = size - i * RECORD;
        memcpy(&slot, text + i * RECORD, left < RECORD ? left : RECORD);
        append(file, &slot);
    }
}

static uint64_t hash_of(const char *text, size_t size)
{
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (size_t i = 0; i < size; i++) {
        hash = (hash ^ (unsigned char)text[i]) * 1099511628211u;
    }
    return hash;
}

uint32_t file_name(struct profile_file *file, const char *text)
{
    size_t size = strnlen(text, SLUICE_PROFILE_MAX_NAME);
    uint64_t hash = hash_of(text, size);
    struct name **bucket = &file->buckets[hash % BUCKETS];
    for (struct name *name = *bucket; name != NULL; name = name->next) {
        if (name->hash == hash && strncmp(name->text, text, size) == 0 && name->text[size] == 0) {
            return name->number;
        }
    }
    if (file->names == NAMES || file->name_bytes + size > NAME_BYTES || !has_room(file, 1 + size / RECORD + 1)) {
        return 0;
    }
    struct name *name = malloc(sizeof *name + size + 1);
    if (name == NULL) {
        return 0;
    }
    *name = (struct name){.next = *bucket, .hash = hash, .number = ++file->names};
    memcpy(name->text, text, size);
    name->text[size] = 0;
    *bucket = name;
    file->name_bytes += size;
    write_name(file, name->number, name->text, size);
    return name->number;
}

/* ---- the end ---- */

enum sluice_profile_reason file_failed(const struct profile_file *file)
{
    return file->failed;
}

void file_end(struct profile_file *file, enum sluice_profile_reason reason, const char *words, uint64_t cost)
{
    enum { LAST_NAME = NAMES + 1 };
    uint64_t now = clock_now(CLOCK_MONOTONIC);
    struct sluice_profile_record end = {.kind = SLUICE_PROFILE_END,
                                        .start = file->started,
                                        .end = now,
                                        .loss = {.events = file->events, .reason = reason, .cost = cost}};
    if (file->failed != 0) {
        end.loss.reason = file->failed;
    }
    if (file->failed == SLUICE_PROFILE_QUOTA) { /* there is room for this */
        file->failed = 0;
    }
    if (file->lost > 0) {
        append(file, &(struct sluice_profile_record){.kind = SLUICE_PROFILE_LOST,
                                                     .start = now,
                                                     .end = now,
                                                     .loss = {.events = file->lost, .reason = end.loss.reason}});
    }
    if (words != NULL) {
        end.name = LAST_NAME;
        write_name(file, LAST_NAME, words, strnlen(words, SLUICE_PROFILE_MAX_NAME));
    }
    file_flush(file);
    end.name = file->failed == SLUICE_PROFILE_DISK ? 0 : end.name;
    if (!is_ours(file)) {
        file->fd = -1; /* the program's now */
    } else if (pwrite(file->fd, &end, sizeof end, sizeof(struct sluice_profile_header)) != sizeof end) {
        /* Then it reads as that of a process that died, which is all that can still be said. */
    }
    forget(file);
}

void file_abandon(const struct profile_file *file)
{
    if (is_ours(file)) {
        close(file->fd);
    }
}
