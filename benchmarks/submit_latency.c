/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Submits batch jobs one after another as one client: submit_latency COUNT ACCOUNT OPTION. OPTION is "gres" (the job
 * names its shards) or "option" (--gpu-mem, as the SPANK plugin sends it). Prints each submission's nanoseconds. The
 * jobs begin in a day, so that nothing is started.
 */
#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static long long now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

int main(int count, char **words)
{
    if (count != 4)
        return 2;
    char *environment[] = {"PATH=/bin", NULL}, *options[] = {"_SLURM_SPANK_OPTION_sluice_gpu_mem=10G", NULL};
    slurm_init(NULL);
    for (long i = strtol(words[1], NULL, 10); i > 0; i--) {
        job_desc_msg_t job;
        submit_response_msg_t *response = NULL;
        slurm_init_job_desc_msg(&job);
        job.user_id = getuid();
        job.group_id = getgid();
        job.name = "latency";
        job.account = words[2];
        job.min_nodes = job.max_nodes = 1;
        job.num_tasks = 1;
        job.time_limit = 60;
        job.pn_min_memory = 100;
        job.begin_time = time(NULL) + 86400;
        job.script = "#!/bin/sh\ntrue\n";
        job.work_dir = "/tmp";
        job.std_out = job.std_err = "/dev/null";
        job.environment = environment;
        job.env_size = 1;
        if (strcmp(words[3], "gres") == 0) {
            job.tres_per_node = "gres:shard:10240";
        } else {
            job.spank_job_env = options;
            job.spank_job_env_size = 1;
        }
        long long began = now_ns();
        if (slurm_submit_batch_job(&job, &response)) {
            fprintf(stderr, "submit: %s\n", slurm_strerror(slurm_get_errno()));
            return 1;
        }
        printf("%lld\n", now_ns() - began);
        slurm_free_submit_response_response_msg(response);
    }
    return 0;
}
