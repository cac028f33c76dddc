/* SPDX-License-Identifier: Apache-2.0 */
/* Files that are followed while others read what they list: new, damaged and removed; also under ThreadSanitizer. */
#include "runtime/controller.h"
#include "runtime/saves.h"
#include "runtime/withdrawn.h"

#include "check.h"
#include "with_checksum.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

static char folder[] = "/tmp/sluice-published-XXXXXX", saves[64], withdrawn[64];

/* As a whole, as the daemon does; a damaged one has a wrong checksum. */
static void put(const char *path, const char *body, bool damaged)
{
    char next[80];
    size_t length;
    char *whole = with_checksum(body, &length);
    whole[0] ^= damaged;
    snprintf(next, sizeof(next), "%s.new", path);
    FILE *to = fopen(next, "w");
    CHECK(to && fwrite(whole, 1, length, to) == length && fclose(to) == 0 && rename(next, path) == 0);
    free(whole);
}

static int64_t saved(void)
{
    const struct sluice_job_times *known = sluice_saves_acquire();
    const int64_t at_s = known ? sluice_job_times_of(known, 7) : -1;
    sluice_job_times_release(known);
    return at_s;
}

/* -1 before the start, otherwise how many GPUs are listed. */
static int64_t listed(void)
{
    const struct sluice_withdrawn *list = sluice_withdrawn_acquire();
    const int64_t count = list ? (int64_t)list->listed.count : -1;
    CHECK(!list || list->generation <= sluice_withdrawn_generation());
    sluice_withdrawn_release(list);
    return count;
}

static void nap(long us)
{
    nanosleep(&(struct timespec){.tv_nsec = us * 1000}, NULL);
}

static void wait_for(int64_t (*what)(void), int64_t wanted)
{
    for (int i = 0; what() != wanted; i++) {
        CHECK(i < 10000);
        nap(1000);
    }
}

static atomic_bool over;

static void *read_on(void *unused)
{
    (void)unused;
    while (!atomic_load(&over)) {
        (void)(saved() + listed());
        nap(20);
    }
    return NULL;
}

int main(void)
{
    pthread_t reader;
    CHECK(mkdtemp(folder) != NULL);
    snprintf(saves, sizeof(saves), "%s/%s", folder, SLUICE_SAVES_FILE);
    snprintf(withdrawn, sizeof(withdrawn), "%s/%s", folder, SLUICE_WITHDRAWN_FILE);
    const struct sluice_site site = {.slurm_conf = saves, .state_folder = folder, .slurm_version = "test"};
    put(saves, "sluice-saves 1\n7 100\n", false);
    CHECK(saved() == -1 && listed() == -1);
    CHECK(sluice_controller_start("test", &site));
    CHECK(saved() == 100 && listed() == 0); /* read at once; no file: an empty list */
    CHECK(pthread_create(&reader, NULL, read_on, NULL) == 0);
    const uint64_t before = sluice_withdrawn_generation();
    put(saves, "sluice-saves 1\n7 200\n", true);
    put(withdrawn, "sluice-withdrawn 1\nn1 0\nn1 1\n", false);
    wait_for(listed, 2);
    put(withdrawn, "sluice-withdrawn 1\nn1 0\n", false);
    wait_for(listed, 1); /* twice, so that the other file was looked at, too */
    CHECK_INT(saved(), 100);
    CHECK_INT(sluice_withdrawn_generation(), before + 2);
    put(withdrawn, "sluice-withdrawn 1\n", true);
    put(saves, "sluice-saves 1\n7 300\n", false);
    wait_for(saved, 300);
    put(saves, "sluice-saves 1\n7 400\n", false);
    wait_for(saved, 400);
    CHECK_INT(listed(), 1);
    CHECK(unlink(saves) == 0 && unlink(withdrawn) == 0);
    wait_for(saved, -1);
    wait_for(listed, 0);
    atomic_store(&over, true);
    CHECK(pthread_join(reader, NULL) == 0);
    sluice_controller_stop("test");
    CHECK(saved() == -1 && listed() == -1);
    CHECK(rmdir(folder) == 0);
    return 0;
}
