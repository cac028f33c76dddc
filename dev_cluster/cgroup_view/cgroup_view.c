/* Preloaded into slurmd, slurmstepd and the node agent of a cluster on cgroup version 2. A kernel that has hierarchies
 * of version 1 lists them in every /proc/PID/cgroup, whatever is mounted here, and Slurm then refuses to use version 2.
 * Through open and read such files hold the line of version 2 alone. They stay the kernel's own, so that one that is
 * kept open follows its process, and cannot be read once that has ended. */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SHOWN __attribute__((visibility("default")))
#define MOST_FILES 65536
#define MOST_TEXT 16384

typedef ssize_t read_function(int, void *, size_t);
typedef ssize_t pread_function(int, void *, size_t, off_t);
typedef int close_function(int);

static atomic_bool watched[MOST_FILES]; /* by descriptor */

static bool is_watched(int fd)
{
    return fd >= 0 && fd < MOST_FILES && atomic_load(&watched[fd]);
}

static bool is_cgroup_file(const char *path)
{
    static const char start[] = "/proc/", end[] = "/cgroup";
    size_t length = strlen(path), before = strlen(start), after = strlen(end);
    return length > before + after && strncmp(path, start, before) == 0 && strcmp(path + length - after, end) == 0;
}

static int open_at(int folder, const char *path, int flags, unsigned mode)
{
    int fd = (int)syscall(SYS_openat, folder, path, flags, mode);
    if (fd >= 0 && fd < MOST_FILES) {
        atomic_store(&watched[fd], is_cgroup_file(path));
    }
    return fd;
}

/* What the file shows from an offset on. */
static ssize_t shown(int fd, void *to, size_t size, off_t from)
{
    char text[MOST_TEXT + 1];
    size_t length = 0;
    ssize_t got;
    while ((got = syscall(SYS_pread64, fd, text + length, MOST_TEXT - length, (off_t)length)) > 0) {
        length += (size_t)got;
    }
    if (got < 0) {
        return -1;
    }
    text[length] = 0;
    const char *line = text;
    while (*line != 0 && strncmp(line, "0::", 3) != 0) {
        line += strcspn(line, "\n");
        line += *line == '\n';
    }
    size_t end = strcspn(line, "\n");
    end += line[end] == '\n';
    if (from < 0 || (size_t)from >= end) {
        return 0;
    }
    size_t left = end - (size_t)from;
    size_t count = size < left ? size : left;
    memcpy(to, line + from, count);
    return (ssize_t)count;
}

SHOWN ssize_t pread(int fd, void *to, size_t size, off_t from)
{
    if (is_watched(fd)) {
        return shown(fd, to, size, from);
    }
    static pread_function *next;
    if (next == NULL) {
        next = (pread_function *)dlsym(RTLD_NEXT, "pread64");
    }
    return next(fd, to, size, from);
}

SHOWN ssize_t read(int fd, void *to, size_t size)
{
    if (is_watched(fd)) {
        off_t place = lseek(fd, 0, SEEK_CUR);
        ssize_t got = shown(fd, to, size, place);
        if (got > 0) {
            lseek(fd, place + got, SEEK_SET);
        }
        return got;
    }
    static read_function *next;
    if (next == NULL) {
        next = (read_function *)dlsym(RTLD_NEXT, "read");
    }
    return next(fd, to, size);
}

SHOWN int close(int fd)
{
    if (is_watched(fd)) {
        atomic_store(&watched[fd], false);
    }
    static close_function *next;
    if (next == NULL) {
        next = (close_function *)dlsym(RTLD_NEXT, "close");
    }
    return next(fd);
}

SHOWN int open(const char *path, int flags, ...)
{
    unsigned mode = 0;
    if ((flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE) {
        va_list rest;
        va_start(rest, flags);
        mode = va_arg(rest, unsigned);
        va_end(rest);
    }
    return open_at(AT_FDCWD, path, flags, mode);
}

/* The names that a program calls them by: with large files, and with the checks of _FORTIFY_SOURCE. */
SHOWN int open64(const char *path, int flags, ...) __attribute__((alias("open")));
SHOWN ssize_t pread64(int fd, void *to, size_t size, off_t from) __attribute__((alias("pread")));

SHOWN int __open_2(const char *path, int flags);
SHOWN int __open64_2(const char *path, int flags);
SHOWN ssize_t __read_chk(int fd, void *to, size_t size, size_t room);
SHOWN ssize_t __pread64_chk(int fd, void *to, size_t size, off_t from, size_t room);

int __open_2(const char *path, int flags)
{
    return open_at(AT_FDCWD, path, flags, 0);
}

int __open64_2(const char *path, int flags)
{
    return open_at(AT_FDCWD, path, flags, 0);
}

ssize_t __read_chk(int fd, void *to, size_t size, size_t room)
{
    return read(fd, to, size < room ? size : room);
}

ssize_t __pread64_chk(int fd, void *to, size_t size, off_t from, size_t room)
{
    return pread(fd, to, size < room ? size : room, from);
}
