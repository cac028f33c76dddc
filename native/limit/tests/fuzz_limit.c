/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What root reads of a region, of any content: the ledger, which the job's user writes at any moment, while root has it
 * open; and the file of limits, when it is opened. The first byte of the input chooses: odd, bytes of `limits` are
 * changed, three bytes of input each; else words of the ledger's head and devices, nine bytes each, and where its
 * second two next bits are set the ledger is cut off behind them.
 */
#include "ledger_region.h"
#include "region.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { DEVICES = 2, PROCESSES = 4, READ = sizeof(struct ledger_header) + 2 * DEVICES * sizeof(struct ledger_device) };

static char folder[] = "/dev/shm/fuzz_limit_XXXXXX";
static struct sluice_limit *opened;
static int files[2]; /* limits, ledger */
static unsigned char good[2][1 << 16];
static size_t sizes[2];
static unsigned char *ledger; /* mapped, as the job has it */

static void clean(void)
{
    sluice_limit_close(opened);
    sluice_limit_remove(folder, NULL);
}

static void make(void)
{
    const struct sluice_limit_device devices[DEVICES] = {{.uuid = "GPU-1", .total = 1000, .limit = 500},
                                                         {.uuid = "GPU-2", .total = 1 << 20, .limit = 1 << 20}};
    const char *const names[] = {"limits", "ledger"};
    if (!mkdtemp(folder) || rmdir(folder) != 0 ||
        sluice_limit_create(folder, devices, DEVICES, PROCESSES, (uint32_t)geteuid(), false, NULL) != SLUICE_OK ||
        sluice_limit_open(folder, &opened, NULL) != SLUICE_OK)
        abort();
    for (int i = 0; i < 2; i++) {
        char path[64];
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        files[i] = open(path, O_RDWR);
        ssize_t size = read(files[i], good[i], sizeof good[i]);
        if (size <= 0)
            abort();
        sizes[i] = (size_t)size;
    }
    ledger = mmap(NULL, sizes[1], PROT_READ | PROT_WRITE, MAP_SHARED, files[1], 0);
    if (ledger == MAP_FAILED || atexit(clean) != 0)
        abort();
}

static void put(int file, const void *content, size_t size)
{
    if (pwrite(files[file], content, size, 0) != (ssize_t)size)
        abort();
}

static void check_text(enum sluice_error error, const struct sluice_error_text *text)
{
    if (error && (!memchr(text->text, 0, sizeof text->text) || !*text->text))
        abort();
}

static void read_figures(struct sluice_limit *limit)
{
    for (uint32_t i = 0; i <= sluice_limit_device_count(limit); i++) {
        struct sluice_error_text text = {{0}};
        struct sluice_limit_usage usage;
        enum sluice_error error = sluice_limit_get_usage(limit, i, &usage, &text);
        check_text(error, &text);
        if (!error && (usage.charged >> 47 || usage.spilled >> 47 || usage.peak > 1 << 20 || usage.refused >> 48))
            abort();
    }
}

static void change_ledger(const uint8_t *data, size_t size, bool cut)
{
    unsigned char changed[READ];
    size_t at = limit_ledger_offset(PROCESSES), end = sizes[1];
    memcpy(changed, good[1] + at, sizeof changed);
    for (; size >= 9; data += 9, size -= 9) {
        size_t word = data[0] % (sizeof changed / 8) * 8;
        memcpy(changed + word, data + 1, 8);
        end = cut ? at + word : end;
    }
    memcpy(ledger + at, changed, sizeof changed);
    if (end < sizes[1] && ftruncate(files[1], (off_t)end) != 0)
        abort();
    read_figures(opened);
    if (end < sizes[1])
        put(1, good[1], sizes[1]);
    else
        memcpy(ledger + at, good[1] + at, sizeof changed);
}

static void change_limits(const uint8_t *data, size_t size)
{
    struct sluice_error_text text = {{0}};
    struct sluice_limit *limit;
    unsigned char changed[sizeof good[0]];
    memcpy(changed, good[0], sizes[0]);
    for (; size >= 3; data += 3, size -= 3)
        changed[(data[0] | data[1] << 8) % (int)sizes[0]] = data[2];
    put(0, changed, sizes[0]);
    enum sluice_error error = sluice_limit_open(folder, &limit, &text);
    check_text(error, &text);
    if (!error)
        sluice_limit_close(limit);
    put(0, good[0], sizes[0]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!opened)
        make();
    if (size > 1 && data[0] & 1)
        change_limits(data + 1, size - 1);
    else if (size > 1)
        change_ledger(data + 1, size - 1, (data[0] & 6) == 6);
    return 0;
}
