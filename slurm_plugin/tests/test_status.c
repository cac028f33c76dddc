/* SPDX-License-Identifier: Apache-2.0 */
/* Counters, and the file that shows them. */
#include "runtime/status.h"

#include "check.h"

#include <stdatomic.h>
#include <unistd.h>

static char *read_whole(const char *path)
{
    static char text[1 << 16];
    FILE *file = fopen(path, "r");
    CHECK(file != NULL);
    size_t length = fread(text, 1, sizeof(text) - 1, file);
    fclose(file);
    text[length] = '\0';
    return text;
}

static int occurrences(const char *text, const char *word)
{
    int count = 0;
    for (const char *at = text; (at = strstr(at, word)); at++)
        count++;
    return count;
}

/* As many as there is room for are shown; those after them count unseen, and it is said once. */
static void test_room(const char *folder)
{
    char name[32], path[512], log[512], host[256] = "";
    CHECK(gethostname(host, sizeof(host) - 1) == 0);
    for (int i = 0; i < SLUICE_STATUS_COUNTERS; i++) {
        snprintf(name, sizeof(name), "test.counter_%d", i);
        _Atomic uint64_t *counter = sluice_status_counter(name);
        CHECK(counter == sluice_status_counter(name));
        CHECK_INT(atomic_fetch_add(counter, (uint64_t)i), 0);
    }
    snprintf(log, sizeof(log), "%s/log", folder);
    fflush(stderr);
    int before = dup(STDERR_FILENO);
    CHECK(before >= 0 && freopen(log, "w", stderr) != NULL);
    _Atomic uint64_t *unseen = sluice_status_counter("test.one_too_many");
    CHECK(unseen && unseen == sluice_status_counter("test.another"));
    atomic_fetch_add(unseen, 7);
    fflush(stderr);
    CHECK(dup2(before, STDERR_FILENO) >= 0);
    const char *said = read_whole(log);
    CHECK_INT(occurrences(said, "no room for more than 256 counters: test.one_too_many,"), 1);
    CHECK_INT(occurrences(said, "\n"), 1);
    CHECK_INT(atomic_load(sluice_status_counter("test.counter_255")), 255);

    sluice_status_start(folder, "22.05.8");
    sluice_status_write();
    snprintf(path, sizeof(path), "%s/sluice.status.%s", folder, host);
    const char *shown = read_whole(path);
    CHECK_INT(occurrences(shown, "\"test.counter_"), SLUICE_STATUS_COUNTERS);
    CHECK(strstr(shown, "\"test.counter_255\": 255}}") != NULL);
    CHECK(strstr(shown, "one_too_many") == NULL);
    sluice_status_stop();
    CHECK(access(path, F_OK) != 0);
    CHECK(unlink(log) == 0);
}

int main(void)
{
    char folder[] = "/tmp/sluice-status-XXXXXX";
    CHECK(mkdtemp(folder) != NULL);
    test_room(folder);
    CHECK(rmdir(folder) == 0);
    return 0;
}
