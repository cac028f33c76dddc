/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Replay of the failover journal: jobs' scripts and environments in Slurm's state folder. */
#include "failover/replay_internal_slurm.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "src/common/xmalloc.h"

void sluice_script_move_aside(uint32_t job_id)
{
    char from[SLUICE_FAILOVER_PATH], folder[SLUICE_FAILOVER_PATH], to[SLUICE_FAILOVER_PATH + 64];
    snprintf(from, sizeof from, "%s/hash.%u/job.%u", slurm_conf.state_save_location, job_id % 10, job_id);
    snprintf(folder, sizeof folder, "%s/aside", sluice_failover_folder());
    snprintf(to, sizeof to, "%s/job.%u.%" PRId64, folder, job_id, sluice_replay.began_us);
    if (mkdir(folder, 0700) != 0 && errno != EEXIST)
        error("sluice: failover journal: %s: %m", folder);
    if (rename(from, to) != 0 && errno != ENOENT)
        error("sluice: failover journal: %s: %m", from);
}

void sluice_script_forget_aside(uint32_t job_id)
{
    static const char *const names[] = {"/script", "/environment", ""};
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++) {
        char path[SLUICE_FAILOVER_PATH];
        snprintf(path, sizeof path, "%s/aside/job.%u.%" PRId64 "%s", sluice_failover_folder(), job_id,
                 sluice_replay.began_us, names[i]);
        if (names[i][0])
            (void)unlink(path);
        else
            (void)rmdir(path);
    }
}

/* A file with that content, durable. */
static bool write_file(const char *path, mode_t mode, const void *head, size_t head_size, char *const *texts,
                       uint32_t count)
{
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, mode);
    bool good = file >= 0 && write(file, head, head_size) == (ssize_t)head_size;
    for (uint32_t i = 0; i < count && good; i++)
        good = write(file, texts[i], strlen(texts[i]) + 1) == (ssize_t)strlen(texts[i]) + 1;
    good = good && fsync(file) == 0;
    if (!good)
        error("sluice: failover journal: %s: %m", path);
    if (file >= 0)
        close(file);
    return good;
}

static bool is_empty(const char *path)
{
    struct stat facts;
    return stat(path, &facts) != 0 || facts.st_size == 0;
}

void sluice_script_repair(const struct picture *picture)
{
    char folder[SLUICE_FAILOVER_PATH], script[SLUICE_FAILOVER_PATH + 16], environment[SLUICE_FAILOVER_PATH + 16];
    const job_record_t *job = find_job_record(picture->job_id);
    if (!job || !job->batch_flag || !picture->submit.length || (IS_JOB_FINISHED(job) && !job->array_recs))
        return;
    snprintf(folder, sizeof folder, "%s/hash.%u", slurm_conf.state_save_location, picture->job_id % 10);
    (void)mkdir(folder, 0700);
    snprintf(folder, sizeof folder, "%s/hash.%u/job.%u", slurm_conf.state_save_location, picture->job_id % 10,
             picture->job_id);
    snprintf(script, sizeof script, "%s/script", folder);
    snprintf(environment, sizeof environment, "%s/environment", folder);
    if (!is_empty(script) && !is_empty(environment))
        return;
    struct sluice_submission_facts facts;
    job_desc_msg_t *request = sluice_picture_request(picture, &facts);
    if (request && request->script && (mkdir(folder, 0700) == 0 || errno == EEXIST)) {
        write_file(environment, 0600, &request->env_size, sizeof request->env_size, request->environment,
                   request->env_size);
        write_file(script, 0700, "", 0, &request->script, 1);
        info("sluice: failover journal: JobId=%u: its script and environment were lost, and are written again",
             picture->job_id);
    }
    if (request)
        slurm_free_job_desc_msg(request);
    xfree(facts.name);
    xfree(facts.tasks);
}
