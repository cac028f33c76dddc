/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Submits a batch job with strings for prologs that no command of Slurm's would send.
 * forged_submit REQUEUE ARRAY|- TRES-PER-NODE SCRIPT [STRING | +BYTES]...; prints the job's id, or why not. JOB_NAME in
 * the environment names the job.
 */
#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* "+70000" is a string of 70,000 bytes. */
static char *expand(char *word)
{
    if (word[0] != '+')
        return word;
    size_t size = strtoul(word + 1, NULL, 10);
    char *text = malloc(size + 1);
    memset(text, 'x', size);
    memcpy(text, "A=", 2);
    text[size] = '\0';
    return text;
}

int main(int count, char *words[])
{
    char *environment[] = {"PATH=/usr/bin:/bin", NULL};
    submit_response_msg_t *answer = NULL;
    job_desc_msg_t job;
    if (count < 5)
        return 2;
    slurm_init(NULL);
    slurm_init_job_desc_msg(&job);
    job.user_id = getuid();
    job.group_id = getgid();
    job.name = getenv("JOB_NAME") ? getenv("JOB_NAME") : "forged";
    job.min_nodes = job.max_nodes = 1;
    job.requeue = (uint16_t)atoi(words[1]);
    job.array_inx = strcmp(words[2], "-") ? words[2] : NULL;
    job.tres_per_node = words[3];
    job.script = words[4];
    job.environment = environment;
    job.env_size = 1;
    job.work_dir = "/tmp";
    job.std_out = "/run/sluice-cluster/home/alice/forged-%j";
    job.spank_job_env = words + 5;
    job.spank_job_env_size = (uint32_t)(count - 5);
    for (int i = 5; i < count; i++)
        words[i] = expand(words[i]);
    if (slurm_submit_batch_job(&job, &answer))
        printf("refused: %s\n", slurm_strerror(slurm_get_errno()));
    else
        printf("%u\n", answer->job_id);
    return 0;
}
