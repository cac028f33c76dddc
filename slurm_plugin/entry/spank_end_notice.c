/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * On a node: writes how a batch script ended to a file for the node agent, which reports it to the controllers in case
 * they never received slurmstepd's own report (prolog_epilog/end_notices.py). The epilog, which runs once a controller knows,
 * removes it. Nothing here can fail a job.
 *
 *   sluice-ended 1 JOB RESTARTS UID STATUS TIME PID     all decimal; PID: of the slurmstepd that reports the end itself
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "entry/freezer.h"

#include <slurm/slurm.h>
#include <slurm/spank.h>

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define FOLDER "/run/sluice/ended" /* the agent's: a link to where it keeps the notes */

#define RESTARTS "SLURM_RESTART_COUNT"

static pid_t stepd; /* of a batch script, else 0; task_exit may run in a process of its own */

/* The agent's folder, if only root can write it. */
static int open_folder(void)
{
    struct stat facts;
    int folder = open(FOLDER, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder >= 0 && (fstat(folder, &facts) != 0 || facts.st_uid != 0 || (facts.st_mode & 022))) {
        slurm_error("sluice: %s can be written by others than root: the job's end is not noted", FOLDER);
        close(folder);
        return -1;
    }
    return folder;
}

/* Written whole or not at all. Not synced: the agent syncs what remains. */
static bool write_note(int folder, const char *name, const char *text)
{
    char fresh[64];
    size_t length = strlen(text);
    snprintf(fresh, sizeof fresh, ".%s", name);
    (void)unlinkat(folder, fresh, 0);
    int file = openat(folder, fresh, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (file < 0)
        return false;
    bool good = write(file, text, length) == (ssize_t)length;
    good = close(file) == 0 && good;
    good = good && renameat(folder, fresh, folder, name) == 0;
    if (!good)
        (void)unlinkat(folder, fresh, 0);
    return good;
}

static bool is_batch(spank_t spank)
{
    uint32_t step = 0;
    return spank_get_item(spank, S_JOB_STEPID, &step) == ESPANK_SUCCESS && step == SLURM_BATCH_SCRIPT;
}

/*
 * How often the job was requeued before it ran. slurmstepd sets the variable if that is not 0 (and
 * S_SLURM_RESTART_COUNT never); its value in the environment that the job was submitted with, e.g. by a requeued one,
 * is removed first.
 */
static bool count_restarts(spank_t spank, unsigned long *restarts)
{
    char text[32], *end = text;
    spank_err_t found = spank_getenv(spank, RESTARTS, text, sizeof text);
    *restarts = found == ESPANK_SUCCESS ? strtoul(text, &end, 10) : 0;
    return found == ESPANK_ENV_NOEXIST || (found == ESPANK_SUCCESS && end > text && !*end);
}

int slurm_spank_init(spank_t spank, int argument_count, char *arguments[])
{
    (void)argument_count, (void)arguments;
    if (spank_remote(spank) != 1)
        return ESPANK_SUCCESS;
    freezer_close();
    if (is_batch(spank)) {
        stepd = getpid();
        (void)spank_unsetenv(spank, RESTARTS);
    }
    return ESPANK_SUCCESS;
}

int slurm_spank_task_exit(spank_t spank, int argument_count, char *arguments[])
{
    uint32_t job = 0;
    unsigned long restarts = 0;
    uid_t user = 0;
    int status = 0;
    char name[32], text[160];
    (void)argument_count, (void)arguments;
    if (!stepd || geteuid() != 0 || spank_get_item(spank, S_JOB_ID, &job) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_JOB_UID, &user) != ESPANK_SUCCESS || !count_restarts(spank, &restarts) ||
        spank_get_item(spank, S_TASK_EXIT_STATUS, &status) != ESPANK_SUCCESS)
        return ESPANK_SUCCESS;
    int folder = open_folder();
    if (folder < 0)
        return ESPANK_SUCCESS;
    snprintf(name, sizeof name, "%" PRIu32, job);
    snprintf(text, sizeof text, "sluice-ended 1 %" PRIu32 " %lu %ju %d %jd %jd\n", job, restarts, (uintmax_t)user,
             status & 0xffff, (intmax_t)time(NULL), (intmax_t)stepd);
    if (!write_note(folder, name, text))
        slurm_error("sluice: %s/%s: %s: the job's end is not noted", FOLDER, name, strerror(errno));
    close(folder);
    return ESPANK_SUCCESS;
}
