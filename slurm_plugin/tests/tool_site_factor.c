/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The order at scale, for the benchmark site-factor:
 *
 *     tool_site_factor JOBS TENANTS ROUNDS
 *
 * Prints, for each round, microseconds of: one step of the thread; the hook's pass over all jobs; the hook's pass over
 * as many jobs that the table does not have yet; writing the table.
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "order/order.h"

enum { NOW = 1800000000 };

static double now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static void must(bool good, const char *what)
{
    if (!good) {
        fprintf(stderr, "tool_site_factor: %s\n", what);
        exit(1);
    }
}

int main(int count, char **words)
{
    must(count == 4, "usage: tool_site_factor JOBS TENANTS ROUNDS");
    uint32_t jobs = (uint32_t)atoi(words[1]), tenants = (uint32_t)atoi(words[2]), rounds = (uint32_t)atoi(words[3]);
    must(jobs > 0 && jobs <= SLUICE_QUEUE_MAX_PENDING && tenants > 0 && tenants <= 10000, "numbers out of range");
    struct sluice_ranker_tenant *list = calloc(tenants, sizeof *list);
    char(*names)[16] = calloc(tenants, sizeof *names);
    must(list && names, "no memory");
    for (uint32_t i = 0; i < tenants; i++) {
        snprintf(names[i], sizeof names[i], "t%u", i);
        list[i] = (struct sluice_ranker_tenant){
            .account = names[i], .parent = i >= 10 ? names[i / 10] : NULL, .shares = 1 + i % 7, .tier = i % 3};
    }
    struct sluice_ranker_config config = {.half_life_s = 604800, .tenants = list, .tenant_count = tenants};
    for (int factor = 0; factor < SLUICE_FACTOR_COUNT; factor++)
        config.policy.weight[factor] = 1000;
    config.policy.age_full_s = config.policy.laxity_horizon_s = 86400;
    config.policy.size_full_gpus = 64;
    config.policy.starvation_s = 604800;
    struct sluice_ranker *ranker = NULL;
    struct sluice_queue *queue = sluice_queue_new(NULL);
    must(queue && sluice_ranker_new(&config, &ranker, NULL) == SLUICE_OK, "no ranker");
    sluice_queue_clear(queue, 1024);
    queue->taken_s = NOW;
    for (uint32_t i = 0; i < jobs; i++) {
        struct sluice_queue_job *job = sluice_queue_add_pending(queue);
        job->id = 1000 + i;
        job->uid = 1000 + i % 500;
        job->name_hash = i % 37;
        job->account = sluice_queue_intern(queue, names[i % tenants]);
        job->gpus = 1 + i % 8;
        job->limit_s = 60 * (1 + i % 1440);
        job->submit_s = job->eligible_s = NOW - (int64_t)(i * 7 % 100000);
        job->deadline_s = i % 5 == 0 ? NOW + 3600 + (int64_t)(i % 86400) : 0;
    }
    uint32_t *site = calloc(jobs, sizeof *site);
    must(site, "no memory");
    for (uint32_t round = 0; round < rounds; round++) {
        double start = now_us();
        must(sluice_ranker_step(ranker, queue, NULL) == SLUICE_OK, "step");
        double stepped = now_us();
        const struct sluice_ranks *ranks = sluice_ranks_acquire();
        for (uint32_t i = 0; i < jobs; i++) {
            const struct sluice_rank *rank = sluice_ranks_find(ranks, 1000 + i);
            must(rank, "job missing");
            site[i] = UINT32_C(0x80000000) + (uint32_t)rank->site;
        }
        double looked_up = now_us();
        for (uint32_t i = 0; i < jobs; i++) {
            struct sluice_order_job job = {
                .id = 900000 + i, .submit_s = NOW, .eligible_s = NOW, .remaining_s = 3600, .gpus = 1 + i % 8};
            must(!sluice_ranks_find(ranks, 900000 + i), "job known");
            site[i] = UINT32_C(0x80000000) + (uint32_t)sluice_ranks_score(ranks, names[i % tenants], &job, NOW);
        }
        double scored = now_us();
        char path[64];
        snprintf(path, sizeof path, "/tmp/tool_site_factor.%d", (int)getpid());
        must(sluice_ranks_write(ranks, path, NULL) == SLUICE_OK, "write");
        double wrote = now_us();
        unlink(path);
        sluice_ranks_release(ranks);
        printf("%.1f %.1f %.1f %.1f\n", stepped - start, looked_up - stepped, scored - looked_up, wrote - scored);
    }
    free(site);
    sluice_queue_free(queue);
    sluice_ranker_free(ranker);
    sluice_ranks_withdraw();
    free(list);
    free(names);
    return 0;
}
