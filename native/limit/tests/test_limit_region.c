/* SPDX-License-Identifier: Apache-2.0 */
/* Regions: made, opened, changed, removed; and every byte of the file of limits damaged in turn. */
#include "check.h"
#include "ledger_region.h"
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
    CHECK(sluice_limit_create(folder, devices, 2, 8, (uint32_t)getuid(), false, &text) == SLUICE_OK);
    CHECK(sluice_limit_create(folder, devices, 2, 8, 0, false, &text) == SLUICE_ERROR_DUPLICATE);
    CHECK(sluice_limit_open(folder, &limit, &text) == SLUICE_OK);
    CHECK(sluice_limit_device_count(limit) == 2);
    CHECK(sluice_limit_get_device(limit, 1, &back, NULL) == SLUICE_OK && memcmp(&back, &devices[1], sizeof back) == 0);
    CHECK(sluice_limit_get_device(limit, 2, &back, &text) == SLUICE_ERROR_UNKNOWN);
    CHECK(sluice_limit_set(limit, 1, 100, &text) == SLUICE_ERROR_RANGE);
    CHECK(sluice_limit_set(limit, 1, 1001, &text) == SLUICE_ERROR_RANGE);
    CHECK(sluice_limit_set(limit, 2, 200, &text) == SLUICE_ERROR_UNKNOWN);

    struct limit_region region;
    int at = open(folder, O_RDONLY | O_DIRECTORY);
    CHECK(limit_region_open(at, folder, getuid(), &region, &text) == SLUICE_OK);
    close(at);

    /* One that has died, one that lives, two of PID namespaces without processes. */
    struct limit_self self = limit_self();
    pid_t child = fork();
    if (child == 0)
        _exit(0);
    CHECK(waitpid(child, NULL, 0) == child);
    struct {
        uint32_t pid;
        uint64_t start;
    } who[] = {{limit_ledger_pid(&region, (uint32_t)child, self.space), 1},
               {limit_ledger_pid(&region, self.pid, self.space), self.start},
               {limit_ledger_pid(&region, self.pid, 12345), self.start},
               {limit_ledger_pid(&region, self.pid, 12346), self.start}};
    struct sluice_ledger_charge charge;
    uint32_t process[4];
    for (int i = 0; i < 4; i++) {
        CHECK(sluice_ledger_join(region.ledger, 0, who[i].pid, who[i].start, &process[i], NULL) == SLUICE_OK);
        CHECK(sluice_ledger_reserve(region.ledger, process[i], 0, 100, 1, &charge, NULL) == SLUICE_OK);
        CHECK(limit_has_joined(&region, who[i].pid));
    }
    uint64_t released;
    uint32_t count;
    CHECK(limit_reap_dead(&region, &self, LIMIT_FULL, &released, &count, NULL) == SLUICE_OK);
    CHECK(released == 100 && count == 1 && !limit_has_joined(&region, who[0].pid));
    struct limit_self inside = self; /* a process in a container sees only those of its container */
    inside.space = 12345;
    CHECK(limit_reap_dead(&region, &inside, LIMIT_EVERYWHERE, &released, &count, NULL) == SLUICE_OK);
    CHECK(released == 0 && count == 0);
    CHECK(limit_reap_dead(&region, &self, LIMIT_EVERYWHERE, &released, &count, NULL) == SLUICE_OK);
    CHECK(released == 200 && count == 2);
    CHECK(sluice_limit_get_usage(limit, 0, &usage, NULL) == SLUICE_OK);
    CHECK(usage.limit == 500 && usage.charged == 100 && usage.peak == 400 && usage.spilled == 0 && usage.refused == 0);

    /* The limit in force is the file's, at once; what the ledger says of it does not matter. */
    CHECK(sluice_limit_set(limit, 0, 150, NULL) == SLUICE_OK && limit_in_force(region.file, 0) == 150);
    atomic_store(&region.ledger->devices[0].limit, UINT64_MAX / 2);
    CHECK(sluice_ledger_reserve(region.ledger, process[1], 0, 51, 1, &charge, NULL) == SLUICE_ERROR_CAPACITY);
    CHECK(sluice_limit_set(limit, 0, 151, NULL) == SLUICE_OK);
    CHECK(sluice_ledger_reserve(region.ledger, process[1], 0, 51, 1, &charge, NULL) == SLUICE_OK);
    CHECK(sluice_ledger_reserve(region.ledger, process[1], 2, 71, 1, &charge, NULL) == SLUICE_ERROR_CAPACITY);
    CHECK(sluice_ledger_reserve(region.ledger, process[1], 2, 70, 1, &charge, NULL) == SLUICE_OK);
    CHECK(sluice_limit_get_usage(limit, 0, &usage, NULL) == SLUICE_OK);
    CHECK(usage.limit == 151 && usage.charged == 151 && usage.spilled == 70 && usage.refused == 1);
    limit_region_close(&region);
    sluice_limit_close(limit);
}

static void write_ledger(const char *content, size_t size)
{
    char path[80];
    snprintf(path, sizeof path, "%s/ledger", folder);
    int file = open(path, O_WRONLY | O_TRUNC);
    CHECK(file >= 0 && write(file, content, size) == (ssize_t)size);
    close(file);
}

/* While root has it open: shortened, all ones, and a process killed between its decision and its completion. */
static void test_a_ledger_is_a_claim(void)
{
    struct sluice_limit *limit;
    struct sluice_limit_usage usage;
    struct sluice_error_text text;
    static _Alignas(SLUICE_LEDGER_ALIGNMENT) char content[1 << 17], good[1 << 17];
    char path[80];
    snprintf(path, sizeof path, "%s/ledger", folder);
    int file = open(path, O_RDONLY);
    size_t size = (size_t)read(file, good, sizeof good);
    close(file);
    CHECK(sluice_limit_open(folder, &limit, &text) == SLUICE_OK);
    for (size_t left = 0; left < limit_ledger_offset(8) + 64 + 4 * 64; left += 64) {
        write_ledger(good, left);
        CHECK(sluice_limit_get_usage(limit, 0, &usage, &text) == SLUICE_ERROR_CORRUPT);
    }
    memset(content, 0xff, size);
    write_ledger(content, size);
    CHECK(sluice_limit_get_usage(limit, 0, &usage, &text) == SLUICE_ERROR_CORRUPT);
    memcpy(content, good, size);
    struct ledger_device *device = (struct ledger_device *)(content + limit_ledger_offset(8) + 64);
    device->decision.words.mark += UINT64_C(1) << 16;
    device->decision.words.value = UINT64_C(7) << 16;
    write_ledger(content, size);
    CHECK(sluice_limit_get_usage(limit, 0, &usage, &text) == SLUICE_OK && usage.charged == 151 + 7);
    device->decision.words.mark += UINT64_C(1) << 16;
    write_ledger(content, size);
    CHECK(sluice_limit_get_usage(limit, 0, &usage, &text) == SLUICE_ERROR_CORRUPT);
    write_ledger(good, size);
    CHECK(sluice_limit_get_usage(limit, 0, &usage, &text) == SLUICE_OK && usage.charged == 151);
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
    test_a_ledger_is_a_claim();
    test_damage();
    CHECK(rmdir(parent) == 0);
    return 0;
}
