/* SPDX-License-Identifier: Apache-2.0 */
#include "cgroup.h"

#include "message.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

/* The files that freeze, by version: `below` a step's folder, and what is written. */
struct version {
    const char *below, *file, *frozen, *thawed;
};

static const struct version version_1 = {".", "freezer.state", "FROZEN", "THAWED"};
static const struct version version_2 = {"user", "cgroup.freeze", "1", "0"};

enum { FOLDER = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC };

struct entry { /* as getdents64 writes it */
    uint64_t inode;
    int64_t offset;
    unsigned short size;
    unsigned char type;
    char name[];
};

static int fail_closed(int folder, int number)
{
    close(folder);
    errno = number;
    return -1;
}

/* The folder, opened a word at a time so that no link is followed; from the mount point down all are root's. */
static int open_job(const char *path, const struct version **version)
{
    int folder = open("/", FOLDER);
    char words[GUARD_PATH];
    strncpy(words, path, sizeof words - 1);
    words[sizeof words - 1] = '\0';
    char *rest = NULL;
    for (char *word = strtok_r(words, "/", &rest); word && folder >= 0; word = strtok_r(NULL, "/", &rest)) {
        int next = openat(folder, word, FOLDER);
        int number = errno;
        struct stat facts;
        if (next < 0)
            return fail_closed(folder, number);
        close(folder);
        folder = next;
        if (fstat(folder, &facts) || facts.st_uid != 0 || facts.st_mode & (S_IWGRP | S_IWOTH))
            return fail_closed(folder, EPERM);
    }
    struct statfs facts;
    if (folder < 0 || fstatfs(folder, &facts))
        return folder < 0 ? -1 : fail_closed(folder, errno);
    if (facts.f_type == CGROUP2_SUPER_MAGIC)
        *version = &version_2;
    else if (facts.f_type == CGROUP_SUPER_MAGIC)
        *version = &version_1;
    else
        return fail_closed(folder, EPERM);
    return folder;
}

typedef enum guard_frost on_step(int folder, const struct version *version);

/* One step; a step that ends meanwhile is no failure. */
static enum guard_frost do_step(int job, const char *name, const struct version *version, on_step *act)
{
    int step = openat(job, name, FOLDER);
    if (step < 0)
        return errno == ENOENT ? GUARD_DONE : GUARD_FAILED;
    int folder = openat(step, version->below, FOLDER);
    int number = errno;
    close(step);
    errno = number;
    if (folder < 0)
        return errno == ENOENT ? GUARD_DONE : GUARD_FAILED;
    enum guard_frost done = act(folder, version);
    number = errno;
    close(folder);
    errno = number;
    return done == GUARD_FAILED && (errno == ENOENT || errno == ENODEV) ? GUARD_DONE : done;
}

/* `act` on every step, without allocating. The worst of what came of it. */
static enum guard_frost each_step(int job, const struct version *version, on_step *act)
{
    _Alignas(struct entry) char buffer[4096];
    enum guard_frost worst = GUARD_DONE;
    if (lseek(job, 0, SEEK_SET) < 0)
        return GUARD_FAILED;
    for (;;) {
        long size = syscall(SYS_getdents64, job, buffer, sizeof buffer);
        if (size <= 0)
            return size < 0 ? GUARD_FAILED : worst;
        for (long at = 0; at < size;) {
            const struct entry *entry = (const struct entry *)(buffer + at);
            at += entry->size;
            if (strncmp(entry->name, "step_", 5) == 0) {
                enum guard_frost done = do_step(job, entry->name, version, act);
                worst = done > worst ? done : worst;
            }
        }
    }
}

static enum guard_frost write_state(int folder, const struct version *version, const char *state)
{
    int file = openat(folder, version->file, O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
    if (file < 0)
        return GUARD_FAILED;
    bool written = write(file, state, strlen(state)) == (ssize_t)strlen(state);
    int number = errno;
    close(file);
    errno = number;
    return written ? GUARD_DONE : GUARD_FAILED;
}

static enum guard_frost freeze_step(int folder, const struct version *version)
{
    return write_state(folder, version, version->frozen);
}

static enum guard_frost thaw_step(int folder, const struct version *version)
{
    return write_state(folder, version, version->thawed);
}

static enum guard_frost look_at_step(int folder, const struct version *version)
{
    char state[16] = "";
    int file = openat(folder, version->file, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (file < 0)
        return GUARD_FAILED;
    ssize_t size = read(file, state, sizeof state - 1);
    close(file);
    state[size > 0 ? size : 0] = '\0';
    return state[0] == version->frozen[0] ? GUARD_OTHERS : GUARD_DONE; /* FROZEN, FREEZING */
}

static enum guard_frost each_step_of(const char *path, on_step *act)
{
    const struct version *version;
    int job = open_job(path, &version);
    if (job < 0)
        return errno == ENOENT ? GUARD_GONE : GUARD_FAILED;
    enum guard_frost done = each_step(job, version, act);
    int number = errno;
    close(job);
    errno = number;
    return done;
}

enum guard_frost guard_look(const char *path)
{
    return each_step_of(path, look_at_step);
}

enum guard_frost guard_freeze(const char *path)
{
    const struct version *version;
    int job = open_job(path, &version);
    if (job < 0)
        return errno == ENOENT ? GUARD_GONE : GUARD_FAILED;
    enum guard_frost done = each_step(job, version, look_at_step);
    if (done == GUARD_DONE)
        done = each_step(job, version, freeze_step);
    int number = errno;
    if (done == GUARD_FAILED)
        each_step(job, version, thaw_step); /* else the next try would count it as suspended by others */
    close(job);
    errno = number;
    return done;
}

enum guard_frost guard_thaw(const char *path)
{
    return each_step_of(path, thaw_step);
}
