/* SPDX-License-Identifier: Apache-2.0 */
/* slurmstepd puts the process that it has started into the job's cgroups; what that one has started before follows. */
#include "launch.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define PROCS "/cgroup.procs"
#define ROOT "/sys/fs/cgroup"

static bool put(const char *folder, pid_t pid)
{
    char path[PATH_MAX + sizeof PROCS], text[16];
    snprintf(path, sizeof path, "%s" PROCS, folder);
    int file = open(path, O_WRONLY | O_CLOEXEC);
    if (file < 0)
        return false;
    int length = snprintf(text, sizeof text, "%d", (int)pid);
    bool done = write(file, text, (size_t)length) == length;
    int error = errno;
    close(file);
    errno = error;
    return done;
}

/* `line`: of /proc/self/cgroup, "4:memory:/slurm/uid_1000/job_7"; version 2 has no controllers in it. */
static bool join(char *line, pid_t pid)
{
    char folder[PATH_MAX];
    char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!path)
        return true;
    *path++ = '\0';
    controllers++;
    path[strcspn(path, "\n")] = '\0';
    if (*controllers) {
        const char *name = strncmp(controllers, "name=", 5) == 0 ? controllers + 5 : controllers;
        snprintf(folder, sizeof folder, ROOT "/%s%s", name, path);
        /* A hierarchy that is not mounted holds nobody. */
        return put(folder, pid) || errno == ENOENT;
    }
    snprintf(folder, sizeof folder, ROOT "%s", path);
    if (put(folder, pid))
        return true;
    snprintf(folder, sizeof folder, ROOT "/unified%s", path);
    return put(folder, pid) || errno == ENOENT;
}

static bool join_all(pid_t pid)
{
    char line[PATH_MAX];
    bool done = true;
    FILE *own = fopen("/proc/self/cgroup", "re");
    if (!own)
        return false;
    while (done && fgets(line, sizeof line, own))
        done = join(line, pid);
    int error = errno;
    fclose(own);
    errno = error;
    return done;
}

bool launch_join(pid_t pid)
{
    char path[64];
    int child;
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)pid, (int)pid);
    FILE *children = fopen(path, "re");
    bool done = children && join_all(pid);
    while (done && fscanf(children, "%d", &child) == 1)
        done = join_all(child);
    int error = errno;
    if (children)
        fclose(children);
    errno = error;
    return done;
}
