/* SPDX-License-Identifier: Apache-2.0 */
/* Any packets, times, deaths and a damaged memory: the guard's invariants hold. Packets are parted by newlines. */
#include "watch.h"

#include <stdlib.h>
#include <string.h>

static struct guard_watch watch;
static unsigned calls;

static enum guard_frost any(const char *path)
{
    if (!guard_path_is_job(path))
        abort();
    return (enum guard_frost)(calls++ * 2654435761U >> 30);
}

static int64_t today(void)
{
    return calls;
}

static void save(void)
{
    watch.changed = false;
}

static const struct guard_tools tools = {any, any, any, today, save};

static void check(void)
{
    if (watch.count > GUARD_JOBS || watch.outage_count > GUARD_OUTAGES)
        abort();
    for (uint32_t i = 0; i < watch.count; i++)
        if (!watch.jobs[i].vendors || !guard_path_is_job(watch.jobs[i].path))
            abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int64_t now = 0;
    calls = 0;
    guard_start(&watch, now);
    if (size > 0 && data[0] & 1) {
        FILE *file = fmemopen((void *)(uintptr_t)(data + 1), size - 1, "r");
        if (file) {
            guard_load(&watch, file, now);
            fclose(file);
        }
        check();
    }
    const char *text = (const char *)data;
    while (size > 0) {
        const char *end = memchr(text, '\n', size);
        size_t length = end ? (size_t)(end - text) : size;
        struct guard_message message;
        now += 100 + 4000 * (length % 3);
        if (guard_parse(text, length, &message))
            guard_take(&watch, &tools, &message, now);
        else if (length == 0)
            guard_agent_lost(&watch, &tools, "signal-7", &(struct guard_names){1, {4}}, now);
        else
            guard_agent_starts(&watch, now);
        guard_tick(&watch, &tools, now);
        check();
        size_t taken = length + (end != NULL);
        text += taken;
        size -= taken;
    }
    guard_hangs(&watch, now);
    guard_release(&watch, &tools);
    return 0;
}
