/* SPDX-License-Identifier: Apache-2.0 */
/* A region's two files of any content: opened, or refused with a reason; and once open, read without harm. */
#include "region.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char folder[] = "/tmp/fuzz_limit_XXXXXX";

static void clean(void)
{
    sluice_limit_remove(folder, NULL);
}

static void put(const char *name, const uint8_t *data, size_t size)
{
    char path[64];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (file < 0 || write(file, data, size) != (ssize_t)size)
        abort();
    close(file);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static bool made;
    static unsigned char good[2][1 << 17];
    static size_t sizes[2];
    struct sluice_error_text text;
    struct sluice_limit *limit;
    if (!made) { /* a good region, of which the input changes bytes: at two places, by one */
        struct sluice_limit_device device = {.uuid = "GPU-1", .total = 1000, .limit = 500};
        if (!mkdtemp(folder) || rmdir(folder) != 0 ||
            sluice_limit_create(folder, &device, 1, 4, (uint32_t)geteuid(), &text) != SLUICE_OK)
            abort();
        const char *const names[] = {"limits", "ledger"};
        for (int i = 0; i < 2; i++) {
            char path[64];
            snprintf(path, sizeof path, "%s/%s", folder, names[i]);
            FILE *file = fopen(path, "re");
            sizes[i] = file ? fread(good[i], 1, sizeof good[i], file) : 0;
            if (file)
                fclose(file);
        }
        made = atexit(clean) == 0;
    }
    if (size < 1)
        return 0;
    bool ledger = data[0] & 1, raw = data[0] & 2;
    static unsigned char changed[1 << 17];
    memcpy(changed, good[ledger], sizes[ledger]);
    for (size_t i = 1; !raw && i + 4 <= size; i += 4)
        changed[(data[i] | data[i + 1] << 8 | data[i + 2] << 16) % (int)sizes[ledger]] = data[i + 3];
    put(ledger ? "ledger" : "limits", raw ? data + 1 : changed, raw ? size - 1 : sizes[ledger]);
    if (sluice_limit_open(folder, &limit, &text) == SLUICE_OK) {
        struct sluice_limit_usage usage;
        struct sluice_limit_process processes[8];
        uint64_t released;
        uint32_t count;
        (void)sluice_limit_get_usage(limit, 0, &usage, &text);
        (void)sluice_limit_processes(limit, 8, processes, &count, &text);
        (void)sluice_limit_reap(limit, &released, &count, &text);
        sluice_limit_close(limit);
    } else if (!memchr(text.text, 0, sizeof text.text) || !*text.text) {
        abort();
    }
    put("limits", good[0], sizes[0]);
    put("ledger", good[1], sizes[1]);
    return 0;
}
