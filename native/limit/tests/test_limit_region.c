/* SPDX-License-Identifier: Apache-2.0 */
/* Regions: made, opened, changed, removed; and every byte of the file of limits damaged in turn. */
#include "check.h"
#include "region.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static char folder[64];

static struct sluice_limit_device gpu(const char *uuid)
{
    struct sluice_limit_device device = {.total = 1000, .limit = 500, .context = 100, .spill = 70};
    snprintf(device.uuid, sizeof device.uuid, "%s", uuid);
    return device;
}

static void test_use(void)
{
    struct sluice_limit_device devices[] = {gpu("GPU-1"), gpu("GPU-2")}, back;
    struct sluice_limit_usage usage;
    struct sluice_error_text text;
    struct sluice_limit *limit;
    CHECK(sluice_limit_create(folder, devices, 2, 8, (uint32_t)getuid(), &text) == SLUICE_OK);
    CHECK(sluice_limit_create(folder, devices, 2, 8, 0, &text) == SLUICE_ERROR_DUPLICATE);
    CHECK(sluice_limit_open(folder, &limit, &text) == SLUICE_OK);
    CHECK(sluice_limit_device_count(limit) == 2);
    CHECK(sluice_limit_get_device(limit, 1, &back, NULL) == SLUICE_OK && memcmp(&back, &devices[1], sizeof back) == 0);
    CHECK(sluice_limit_get_device(limit, 2, &back, &text) == SLUICE_ERROR_UNKNOWN);
    CHECK(sluice_limit_set(limit, 1, 101, NULL) == SLUICE_OK && limit_in_force(limit, 1) == 101);
    CHECK(sluice_limit_set(limit, 1, 100, &text) == SLUICE_ERROR_RANGE);
    CHECK(sluice_limit_set(limit, 1, 1001, &text) == SLUICE_ERROR_RANGE);
    CHECK(sluice_limit_set(limit, 2, 200, &text) == SLUICE_ERROR_UNKNOWN);
    CHECK(sluice_limit_audit(limit, &text) == SLUICE_OK);

    /* One who has died, one who lives, one of a PID namespace that nobody is in. */
    struct limit_self self = limit_self();
    pid_t child = fork();
    if (child == 0)
        _exit(0);
    CHECK(waitpid(child, NULL, 0) == child);
    struct {
        uint32_t pid;
        uint64_t start;
    } who[] = {{limit_ledger_pid(limit, (uint32_t)child, self.space), 1},
               {limit_ledger_pid(limit, self.pid, self.space), self.start},
               {limit_ledger_pid(limit, self.pid, 12345), self.start}};
    for (int i = 0; i < 3; i++) {
        uint32_t process;
        struct sluice_ledger_charge charge;
        CHECK(sluice_ledger_join(limit->ledger, 0, who[i].pid, who[i].start, &process, NULL) == SLUICE_OK);
        CHECK(sluice_ledger_reserve(limit->ledger, process, 0, 100, 1, &charge, NULL) == SLUICE_OK);
    }
    uint64_t released;
    uint32_t count;
    CHECK(limit_reap_dead(limit, &self, LIMIT_FULL, &released, &count, NULL) == SLUICE_OK);
    CHECK(released == 100 && count == 1);
    CHECK(sluice_limit_reap(limit, &released, &count, NULL) == SLUICE_OK && released == 100 && count == 1);
    CHECK(sluice_limit_get_usage(limit, 0, &usage, NULL) == SLUICE_OK);
    CHECK(usage.limit == 500 && usage.charged == 100 && usage.peak == 300 && usage.spilled == 0);
    struct sluice_limit_process processes[2];
    uint64_t bytes;
    CHECK(sluice_limit_processes(limit, 2, processes, &count, NULL) == SLUICE_OK && count == 1);
    CHECK(processes[0].pid == self.pid && processes[0].space == self.space && processes[0].start == self.start);
    CHECK(sluice_limit_process_usage(limit, processes[0].id, 0, &bytes, NULL) == SLUICE_OK && bytes == 100);
    sluice_limit_close(limit);
}

static void test_damage(void)
{
    char path[80];
    unsigned char content[4096];
    struct sluice_limit *limit;
    struct sluice_error_text text;
    snprintf(path, sizeof path, "%s/limits", folder);
    int file = open(path, O_RDWR);
    ssize_t size = read(file, content, sizeof content);
    CHECK(size > 500);
    size_t first = sizeof(struct limit_file) + offsetof(struct sluice_limit_device, limit);
    for (ssize_t i = 0; i < size; i++) {
        unsigned char damaged = content[i] ^ 0x41;
        bool in_a_limit = ((size_t)i - first) % sizeof(struct sluice_limit_device) < 8 && (size_t)i >= first;
        CHECK(pwrite(file, &damaged, 1, i) == 1);
        enum sluice_error error = sluice_limit_open(folder, &limit, &text);
        CHECK(in_a_limit ? error == SLUICE_OK : error == SLUICE_ERROR_CORRUPT || error == SLUICE_ERROR_VERSION);
        if (!error)
            sluice_limit_close(limit);
        CHECK(pwrite(file, &content[i], 1, i) == 1);
    }
    for (ssize_t left = size - 1; left >= 0; left -= 37) {
        CHECK(ftruncate(file, left) == 0);
        CHECK(sluice_limit_open(folder, &limit, &text) == SLUICE_ERROR_CORRUPT);
    }
    close(file);
    CHECK(sluice_limit_remove(folder, &text) == SLUICE_OK && sluice_limit_remove(folder, &text) == SLUICE_OK);
    CHECK(sluice_limit_open(folder, &limit, &text) == SLUICE_ERROR_UNKNOWN);
}

int main(void)
{
    char parent[] = "/tmp/test_limit_XXXXXX";
    CHECK(mkdtemp(parent) != NULL);
    snprintf(folder, sizeof folder, "%s/job", parent);
    test_use();
    test_damage();
    CHECK(rmdir(parent) == 0);
    return 0;
}
