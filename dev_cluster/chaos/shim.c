/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Faults of storage and network below the controllers of a test cluster, preloaded into slurmctld and its supervisor.
 * In $SLUICE_CHAOS a file switches each on, at once and for every process; the state folder is $SLUICE_CHAOS_STATE:
 *
 *   - full: writes into the state folder fail with ENOSPC, as do new files
 *   - hang: they do not come back, nor do fsync, rename and link, until the file is gone
 *   - slow: fsync and fdatasync there take 40 ms more
 *   - cut.HOST: connections of that host's processes to the addresses in it (one a line) time out
 *   - boottime.HOST: seconds by which CLOCK_BOOTTIME is off for that host's processes: what it gained while the host
 *     was suspended, or lacks where a hypervisor stops a machine with its clocks
 *   - trace: each write, rename and link in the state folder adds a line to it: "MILLISECONDS HOST CALL PATH"
 *     (CLOCK_MONOTONIC)
 *   - power: before each fsync in the state folder is answered, what would be left after a power cut is written down in
 *     $SLUICE_CHAOS/durable: the file's content as of its last fsync, and, as journalling file systems have it (ext4's
 *     transactions and xfs's log are in order), all names as of the last fsync of any file. A file that was never
 *     synced is empty then. Nothing becomes durable by time alone, which is harsher than both.
 *     durable/names: "d PATH" or "f KEY PATH" a line; durable/KEY: the content.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static const char *chaos, *state;

__attribute__((constructor)) static void start(void)
{
    chaos = getenv("SLUICE_CHAOS");
    state = getenv("SLUICE_CHAOS_STATE");
}

static bool is_on(const char *name)
{
    char path[4096];
    struct stat facts;
    snprintf(path, sizeof(path), "%s/%s", chaos ? chaos : "/nonexistent", name);
    return chaos && state && syscall(SYS_newfstatat, AT_FDCWD, path, &facts, 0) == 0;
}

static bool below(const char *path)
{
    size_t length = strlen(state);
    return strncmp(path, state, length) == 0 && (path[length] == '/' || path[length] == '\0');
}

static bool is_ours(int file)
{
    char link[64], path[4096];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", file);
    ssize_t length = chaos && state ? readlink(link, path, sizeof(path) - 1) : -1;
    if (length <= 0)
        return false;
    path[length] = '\0';
    return below(path);
}

static long content(const char *name, char *text, size_t size)
{
    char path[4096];
    snprintf(path, sizeof(path), "%s/%s", chaos, name);
    int file = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return -1;
    long length = syscall(SYS_read, file, text, size - 1);
    syscall(SYS_close, file);
    text[length > 0 ? length : 0] = '\0';
    return length;
}

static void of_host(const char *fault, char *name, size_t size)
{
    char host[256] = "";
    gethostname(host, sizeof(host) - 1);
    snprintf(name, size, "%s.%s", fault, host);
}

/* Before the call: what is not in the trace was not done. */
static void trace(const char *call, const char *path)
{
    char file_name[4096], host[256] = "", line[4600];
    struct timespec now = {0};
    snprintf(file_name, sizeof(file_name), "%s/trace", chaos);
    int file = (int)syscall(SYS_openat, AT_FDCWD, file_name, O_WRONLY | O_APPEND | O_CLOEXEC);
    if (file < 0)
        return;
    gethostname(host, sizeof(host) - 1);
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    int length = snprintf(line, sizeof(line), "%lld %s %s %s\n", (long long)now.tv_sec * 1000 + now.tv_nsec / 1000000,
                          host, call, path);
    syscall(SYS_write, file, line, length);
    syscall(SYS_close, file);
}

static void trace_file(const char *call, int file)
{
    char link[64], path[4096];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof(path) - 1);
    if (length > 0) {
        path[length] = '\0';
        trace(call, path);
    }
}

static void hang(void)
{
    while (is_on("hang"))
        usleep(50000);
}

static void *real(const char *name)
{
    return dlsym(RTLD_NEXT, name);
}

/* ---- what is durable ---- */

static void key_of(int folder, const char *name, char *key, size_t size)
{
    struct statx facts = {0};
    if (statx(folder, name, *name ? 0 : AT_EMPTY_PATH, STATX_INO | STATX_BTIME, &facts) != 0)
        *key = '\0';
    else
        snprintf(key, size, "%llu-%lld-%u", (unsigned long long)facts.stx_ino, (long long)facts.stx_btime.tv_sec,
                 facts.stx_btime.tv_nsec);
}

static void keep_content(int file)
{
    char key[96], path[4096], fresh[4200], link[64], buffer[65536];
    key_of(file, "", key, sizeof(key));
    snprintf(link, sizeof(link), "/proc/self/fd/%d", file);
    snprintf(path, sizeof(path), "%s/durable/%s", chaos, key);
    snprintf(fresh, sizeof(fresh), "%s.new", path);
    int from = (int)syscall(SYS_openat, AT_FDCWD, link, O_RDONLY | O_CLOEXEC);
    int to = (int)syscall(SYS_openat, AT_FDCWD, fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    long length;
    while (from >= 0 && to >= 0 && (length = syscall(SYS_read, from, buffer, sizeof(buffer))) > 0)
        syscall(SYS_write, to, buffer, length);
    if (from >= 0)
        syscall(SYS_close, from);
    if (to >= 0)
        syscall(SYS_close, to);
    syscall(SYS_renameat, AT_FDCWD, fresh, AT_FDCWD, path);
}

static void list(const char *folder, FILE *to)
{
    DIR *dir = opendir(folder);
    if (!dir)
        return;
    for (struct dirent *entry; (entry = readdir(dir));) {
        char path[4096], key[96];
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name);
        if (entry->d_type == DT_DIR) {
            fprintf(to, "d %s\n", path + strlen(state) + 1);
            list(path, to);
        } else if (entry->d_type == DT_REG) {
            key_of(AT_FDCWD, path, key, sizeof(key));
            if (*key)
                fprintf(to, "f %s %s\n", key, path + strlen(state) + 1);
        }
    }
    closedir(dir);
}

static void keep(int file)
{
    char path[4096], fresh[4096], *text = NULL;
    size_t size = 0;
    struct stat facts;
    snprintf(path, sizeof(path), "%s/durable/lock", chaos);
    int lock = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (lock < 0)
        return;
    flock(lock, LOCK_EX);
    if (fstat(file, &facts) == 0 && S_ISREG(facts.st_mode))
        keep_content(file);
    FILE *to = open_memstream(&text, &size);
    if (to) {
        list(state, to);
        fclose(to);
        snprintf(path, sizeof(path), "%s/durable/names", chaos);
        snprintf(fresh, sizeof(fresh), "%s/durable/names.new", chaos);
        int names = (int)syscall(SYS_openat, AT_FDCWD, fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
        if (names >= 0 && syscall(SYS_write, names, text, size) == (long)size)
            syscall(SYS_renameat, AT_FDCWD, fresh, AT_FDCWD, path);
        if (names >= 0)
            syscall(SYS_close, names);
        free(text);
    }
    syscall(SYS_close, lock);
}

static void keep_all(const char *folder)
{
    DIR *dir = opendir(folder);
    if (!dir)
        return;
    for (struct dirent *entry; (entry = readdir(dir));) {
        char path[4096];
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name);
        if (entry->d_type == DT_DIR)
            keep_all(path);
        int file = entry->d_type == DT_REG ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC) : -1;
        if (file >= 0) {
            keep_content(file);
            syscall(SYS_close, file);
        }
    }
    closedir(dir);
}

static int synced(int file, int (*call)(int))
{
    bool ours = is_ours(file);
    if (ours)
        hang();
    if (ours && is_on("slow"))
        usleep(40000);
    int rc = call(file);
    int failed = errno;
    if (rc == 0 && ours && is_on("power"))
        keep(file);
    errno = failed;
    return rc;
}

int fsync(int file)
{
    return synced(file, (int (*)(int))real("fsync"));
}

int fdatasync(int file)
{
    return synced(file, (int (*)(int))real("fdatasync"));
}

int syncfs(int file)
{
    bool ours = is_ours(file);
    if (ours)
        hang();
    int rc = (int)syscall(SYS_syncfs, file);
    if (rc == 0 && ours && is_on("power")) {
        keep_all(state);
        keep(file);
    }
    return rc;
}

/* ---- writes ---- */

static bool refuse(int file)
{
    if (!chaos || !is_ours(file))
        return false;
    hang();
    if (!is_on("full")) {
        trace_file("write", file);
        return false;
    }
    errno = ENOSPC;
    return true;
}

ssize_t write(int file, const void *data, size_t size)
{
    return refuse(file) ? -1 : syscall(SYS_write, file, data, size);
}

ssize_t pwrite(int file, const void *data, size_t size, off_t at)
{
    return refuse(file) ? -1 : syscall(SYS_pwrite64, file, data, size, at);
}

ssize_t pwrite64(int file, const void *data, size_t size, off_t at)
{
    return pwrite(file, data, size, at);
}

ssize_t writev(int file, const struct iovec *parts, int count)
{
    return refuse(file) ? -1 : syscall(SYS_writev, file, parts, count);
}

int rename(const char *from, const char *to)
{
    if (chaos && state && below(to)) {
        hang();
        trace("rename", to);
    }
    return (int)syscall(SYS_renameat, AT_FDCWD, from, AT_FDCWD, to);
}

int link(const char *from, const char *to)
{
    if (chaos && state && below(to)) {
        hang();
        trace("link", to);
    }
    return (int)syscall(SYS_linkat, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int mkdir(const char *path, mode_t mode)
{
    if (chaos && state && below(path) && is_on("full")) {
        errno = ENOSPC;
        return -1;
    }
    return (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}

/* ---- network ---- */

static bool is_cut(const struct sockaddr *address)
{
    char name[300], text[4096], shown[64];
    if (!chaos || address->sa_family != AF_INET)
        return false;
    of_host("cut", name, sizeof(name));
    if (content(name, text, sizeof(text)) < 0)
        return false;
    inet_ntop(AF_INET, &((const struct sockaddr_in *)address)->sin_addr, shown, sizeof(shown));
    for (char *rest = NULL, *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest))
        if (strcmp(line, shown) == 0)
            return true;
    return false;
}

int connect(int file, const struct sockaddr *address, socklen_t size)
{
    if (address && is_cut(address)) {
        usleep(200000); /* a lost packet, in short */
        errno = ETIMEDOUT;
        return -1;
    }
    return (int)syscall(SYS_connect, file, address, size);
}

/* ---- time ---- */

int clock_gettime(clockid_t clock, struct timespec *now)
{
    char name[300], text[64];
    int rc = (int)syscall(SYS_clock_gettime, clock, now);
    if (rc != 0 || clock != CLOCK_BOOTTIME || !chaos)
        return rc;
    of_host("boottime", name, sizeof(name));
    if (content(name, text, sizeof(text)) > 0)
        now->tv_sec += atoi(text);
    return 0;
}
