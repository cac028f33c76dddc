/* SPDX-License-Identifier: Apache-2.0 */
/* Asks for what no command of Slurm's would ask; prints a line for each: "accepted", or "refused: " and the reason. */
#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void submit(const char *tres_per_node, const char *first, const char *second, uint32_t nodes)
{
    char *environment[] = {"PATH=/bin", NULL};
    char *options[] = {(char *)first, (char *)second, NULL};
    job_desc_msg_t job;
    slurm_init_job_desc_msg(&job);
    job.user_id = getuid();
    job.group_id = getgid();
    job.name = "malformed";
    job.min_nodes = job.max_nodes = nodes;
    job.tres_per_node = (char *)tres_per_node;
    job.environment = environment;
    job.env_size = 1;
    job.work_dir = "/tmp";
    job.spank_job_env = options;
    job.spank_job_env_size = second ? 2 : first ? 1 : 0;
    will_run_response_msg_t *answer = NULL;
    if (slurm_job_will_run2(&job, &answer))
        printf("refused: %s\n", slurm_strerror(slurm_get_errno()));
    else
        printf("accepted\n");
}

int main(void)
{
    static char huge[100000];
    memset(huge, 'g', sizeof huge - 1);
    slurm_init(NULL);
    submit(NULL, "_SLURM_SPANK_OPTION_sluice_gpu_mem=1G", "_SLURM_SPANK_OPTION_sluice_gpu_mem=2G", 1);
    submit(NULL, "_SLURM_SPANK_OPTION_sluice_gpu_mem=1\x1b[31mG", NULL, 1);
    submit(NULL, "_SLURM_SPANK_OPTION_sluice_unheard_of=1", NULL, 1);
    submit(NULL, "_SLURM_SPANK_OPTION_sluice_gang=a\nb:2", NULL, 1);
    submit("gres:gpu:+8", NULL, NULL, 1);
    submit("foogres:gpu:8", NULL, NULL, 1);
    submit("gres:gpu:18446744073709551615", NULL, NULL, 1);
    submit(huge, "_SLURM_SPANK_OPTION_sluice_gpu_mem=1G", NULL, 4294967290u);
    submit("gres:gpu:1", NULL, NULL, 1);
    return 0;
}
