/* SPDX-License-Identifier: GPL-2.0-or-later */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "entry/freezer.h"

#include <slurm/slurm.h>
#include <slurm/spank.h>

#include <errno.h>
#include <glob.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FOLDERS "/sys/fs/cgroup/freezer/slurm*"

static int close_folder(const char *path)
{
    return chmod(path, 0700);
}

static int take_folder(const char *path)
{
    return lchown(path, 0, 0);
}

static void each(const char *pattern, int (*change)(const char *path))
{
    glob_t found;
    if (glob(pattern, GLOB_NOSORT, NULL, &found) != 0)
        return;
    for (size_t i = 0; i < found.gl_pathc; i++)
        if (change(found.gl_pathv[i]) != 0 && errno != ENOENT)
            slurm_error("sluice: %s still belongs to its user: %s", found.gl_pathv[i], strerror(errno));
    globfree(&found);
}

void freezer_close(void)
{
    each(FOLDERS, close_folder);
}

void freezer_take_steps(uint32_t job, uid_t user)
{
    char pattern[128];
    snprintf(pattern, sizeof pattern, FOLDERS "/uid_%ju/job_%" PRIu32 "/step_*", (uintmax_t)user, job);
    each(pattern, take_folder);
}
