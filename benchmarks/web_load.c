/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fills slurmctld with jobs of many users, and changes them. As root:
 *   web_load submit FIRST COUNT HELD_PERCENT USERS ACCOUNTS   prints the number of each job that is not held
 *   web_load change PER_SECOND SECONDS FIRST LAST             a new comment for one job after the other
 */
#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { FIRST_UID = 2001 };

static int fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, slurm_strerror(errno));
    return 1;
}

static int submit(long number, long held_percent, long users, long accounts)
{
    char *environment[] = {"PATH=/bin", NULL}, name[64], account[32], gpus[32];
    long user = number % users;
    snprintf(name, sizeof name, "train-%ld-%ld", number % 97, number);
    snprintf(account, sizeof account, "a%ld", user % accounts);
    snprintf(gpus, sizeof gpus, "gres:gpu:%ld", number % 4 + 1);
    bool held = number * 37 % 100 < held_percent;
    job_desc_msg_t job;
    submit_response_msg_t *response = NULL;
    slurm_init_job_desc_msg(&job);
    job.user_id = job.group_id = (uint32_t)(FIRST_UID + user);
    job.name = name;
    job.account = account;
    job.partition = number % 3 ? "main" : "long";
    job.min_nodes = job.max_nodes = 1;
    job.num_tasks = 1;
    job.time_limit = (uint32_t)(600 + number % 60);
    job.pn_min_memory = 10;
    job.tres_per_node = gpus;
    if (held)
        job.priority = 0;
    job.script = "#!/bin/sh\nexec sleep 36000\n";
    job.work_dir = "/tmp";
    job.std_out = job.std_err = "/dev/null";
    job.environment = environment;
    job.env_size = 1;
    while (slurm_submit_batch_job(&job, &response)) {
        if (errno != EAGAIN)
            return fail("submit");
        usleep(100000);
    }
    if (!held)
        printf("%u\n", response->job_id);
    slurm_free_submit_response_response_msg(response);
    return 0;
}

static int change(long number, long round)
{
    char comment[32];
    snprintf(comment, sizeof comment, "round %ld", round);
    job_desc_msg_t job;
    slurm_init_job_desc_msg(&job);
    job.job_id = (uint32_t)number;
    job.comment = comment;
    return slurm_update_job(&job) ? fail("update") : 0;
}

int main(int count, char **words)
{
    long number[5] = {0};
    for (int i = 2; i < count && i < 7; i++)
        number[i - 2] = strtol(words[i], NULL, 10);
    slurm_init(NULL);
    if (count == 7 && strcmp(words[1], "submit") == 0) {
        for (long i = number[0]; i < number[0] + number[1]; i++)
            if (submit(i, number[2], number[3], number[4]))
                return 1;
    } else if (count == 6 && strcmp(words[1], "change") == 0) {
        struct timespec pause = {0, 1000000000L / number[0] - 1};
        long range = number[3] - number[2] + 1;
        for (long i = 0; i < number[0] * number[1]; i++) {
            change(number[2] + i * 7919 % range, i);
            nanosleep(&pause, NULL);
        }
    } else {
        return 2;
    }
    return 0;
}
