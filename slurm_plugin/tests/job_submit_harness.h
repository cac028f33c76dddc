/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * job_submit/sluice outside slurmctld: includes the plugin whole and replaces what slurmctld gives it (its allocator,
 * its records), for the fuzz target and the benchmark. Policy and level are real files, read by the real code.
 */
#ifndef SLUICE_TESTS_JOB_SUBMIT_HARNESS_H
#define SLUICE_TESTS_JOB_SUBMIT_HARNESS_H

#include "admission/description_slurm.c"
#include "admission/submit_slurm.c"
#include "admission/trace_slurm.c"
#include "entry/job_submit_sluice.c"

#include <stdlib.h>
#include <unistd.h>

slurm_conf_t slurm_conf;

char *slurm_xstrdup(const char *text)
{
    return strdup(text);
}

void slurm_xfree(void **item)
{
    free(*item);
    *item = NULL;
}

/* Of pointers: what is new is NULL. */
void *slurm_xrecalloc(void **item, size_t count, size_t size, bool clear, bool may_fail, const char *file, int line,
                      const char *function)
{
    void *made = realloc(*item, count * size);
    (void)clear, (void)may_fail, (void)file, (void)line, (void)function;
    return *item = made;
}

/* Lists of hosts: as many as there are words between commas, each N of "xN" with a number, at most a thousand. */
struct hostlist {
    int count;
};

sluice_hostlist slurm_hostlist_create(const char *list)
{
    struct hostlist *made = calloc(1, sizeof *made);
    for (; made && list; list = strchr(list, ',') ? strchr(list, ',') + 1 : NULL) {
        long many = list[0] == 'x' ? strtol(list + 1, NULL, 10) : 1;
        made->count += many > 0 && many < 1000 ? (int)many : 1;
    }
    return made;
}

int slurm_hostlist_count(sluice_hostlist list)
{
    return list->count;
}

void slurm_hostlist_destroy(sluice_hostlist list)
{
    free(list);
}

/* Users of odd numbers have "memory" as their default account; user 1 is an operator. */
bool sluice_default_account(uint32_t user_id, char *account, size_t size)
{
    return user_id % 2 && snprintf(account, size, "memory") > 0;
}

bool sluice_is_operator(uint32_t user_id)
{
    return user_id == 1;
}

void sluice_job_show_reason(struct job_record *record, const char *message)
{
    (void)record;
    (void)message;
}

void sluice_failover_modified(uint32_t job_id, uint32_t uid, const char *what)
{
    (void)job_id, (void)uid, (void)what;
}

void sluice_failover_components(uint32_t count)
{
    (void)count;
}

#define require(holds)                                                                                                 \
    do {                                                                                                               \
        if (!(holds)) {                                                                                                \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #holds);                                 \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

static void write_file(const char *folder, const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "w");
    require(file && fputs(text, file) >= 0 && fclose(file) == 0);
}

/* Starts the plugin at level place with a policy, given without its first lines and checksum. */
static void start_plugin(const char *policy)
{
    char folder[] = "/tmp/sluice-job-submit-XXXXXX", path[256];
    const char *const names[] = {SLUICE_LEVEL_FILE, SLUICE_POLICY_FILE};
    size_t size = strlen(policy) + 256;
    char *text = malloc(size);
    require(text && mkdtemp(folder));
    int length = snprintf(text, size, "sluice-policy 1.0\ngenerated-s = 1\nsource = harness\n%s", policy);
    snprintf(text + length, size - (size_t)length, "checksum = crc32:%08x\n", sluice_crc32(text, (size_t)length));
    write_file(folder, names[0], "place\n");
    write_file(folder, names[1], text);
    require(sluice_settings_start(folder) && sluice_settings_level() == SLUICE_LEVEL_PLACE);
    for (size_t i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        unlink(path);
    }
    rmdir(folder);
    free(text);
    init();
    active = true;
}

#endif
