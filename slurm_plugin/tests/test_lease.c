/* SPDX-License-Identifier: Apache-2.0 */
/* The lease between controllers in one folder, with a clock of our own. */
#include "supervisor/lease.h"

#include "check.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#define MS INT64_C(1000000)
#define VALID (4000 * MS)

static int64_t now = 1000 * VALID;
static char folder[64];

static int64_t clock_ns(void)
{
    return now;
}

static struct sluice_lease_side make(const char *host, const char *boot)
{
    struct sluice_lease_side side = {.valid_ns = VALID, .now_ns = clock_ns};
    side.folder = open(folder, O_RDONLY | O_DIRECTORY);
    CHECK(side.folder >= 0);
    snprintf(side.host, sizeof(side.host), "%s", host);
    snprintf(side.boot, sizeof(side.boot), "%s", boot);
    return side;
}

static void clear(void)
{
    DIR *dir = opendir(folder);
    for (struct dirent *entry; (entry = readdir(dir));)
        if (strncmp(entry->d_name, "sluice", 6) == 0 || strncmp(entry->d_name, ".sluice", 7) == 0)
            CHECK(unlinkat(dirfd(dir), entry->d_name, 0) == 0);
    closedir(dir);
}

static void put(const char *text)
{
    char path[128];
    snprintf(path, sizeof(path), "%s/sluice.lease", folder);
    FILE *file = fopen(path, "w");
    CHECK(file && fputs(text, file) >= 0 && fclose(file) == 0);
}

static void test_text(void)
{
    struct sluice_lease lease = {7, 8, true, "ctl-1.x", "b-1", 4000, 123, 1763740000}, back;
    char text[SLUICE_LEASE_TEXT], cut[SLUICE_LEASE_TEXT];
    size_t length = sluice_lease_format(&lease, text, sizeof(text));
    CHECK(length > 0 && sluice_lease_parse(text, length, &back));
    CHECK(back.epoch == 7 && back.seq == 8 && back.held && back.valid_ms == 4000 && back.time_s == 1763740000);
    CHECK_STR(back.host, "ctl-1.x");
    for (size_t i = 0; i < length; i++) { /* torn anywhere, or damaged anywhere so that it is no text of ours */
        CHECK(!sluice_lease_parse(text, i, &back));
        memcpy(cut, text, length);
        cut[i] = '\1';
        CHECK(!sluice_lease_parse(cut, length, &back));
    }
    CHECK_INT(sluice_lease_format(&lease, text, 20), 0);
}

static void test_one_holds(void)
{
    clear();
    struct sluice_lease_side one = make("ctl1", "b"), two = make("ctl2", "b");
    CHECK_INT(sluice_lease_hold(&one), SLUICE_LEASE_OURS);
    CHECK_INT(one.epoch, 1);
    for (int i = 0; i < 40; i++) {
        CHECK_INT(sluice_lease_hold(&two), SLUICE_LEASE_WAIT);
        now += 500 * MS;
        CHECK_INT(sluice_lease_hold(&one), SLUICE_LEASE_OURS);
    }
    CHECK_STR(two.seen.host, "ctl1");
    /* given back: taken at once */
    CHECK_INT(sluice_lease_release(&one), SLUICE_LEASE_OURS);
    CHECK_INT(sluice_lease_hold(&two), SLUICE_LEASE_OURS);
    CHECK_INT(two.epoch, 2);
    CHECK_INT(sluice_lease_hold(&one), SLUICE_LEASE_WAIT);
}

static void test_a_dead_holder(void)
{
    clear();
    struct sluice_lease_side one = make("ctl1", "b"), two = make("ctl2", "b");
    CHECK_INT(sluice_lease_hold(&one), SLUICE_LEASE_OURS);
    int64_t died = now;
    CHECK_INT(sluice_lease_hold(&two), SLUICE_LEASE_WAIT);
    enum sluice_lease_answer answer;
    while ((answer = sluice_lease_hold(&two)) == SLUICE_LEASE_WAIT)
        now += 100 * MS;
    CHECK_INT(answer, SLUICE_LEASE_OURS);
    CHECK(now - died > sluice_lease_stale_ns(VALID) && now - died < 2 * VALID);
    /* it was paused only: it comes back, and has lost it, also where its own clock shows no gap */
    CHECK_INT(sluice_lease_hold(&one), SLUICE_LEASE_LOST);
    one.holds = true;
    one.from_ns = now;
    CHECK_INT(sluice_lease_hold(&one), SLUICE_LEASE_LOST);
}

static void test_a_late_renewal_is_lost(void)
{
    clear();
    struct sluice_lease_side one = make("ctl1", "b");
    CHECK_INT(sluice_lease_hold(&one), SLUICE_LEASE_OURS);
    now += VALID;
    CHECK_INT(sluice_lease_hold(&one), SLUICE_LEASE_LOST);
    CHECK_INT(sluice_lease_hold(&one), SLUICE_LEASE_WAIT); /* not even its own, before the time is over */
}

static void test_a_late_writer_does_not_win(void)
{
    clear();
    struct sluice_lease_side one = make("ctl1", "b"), two = make("ctl2", "b");
    CHECK_INT(sluice_lease_hold(&one), SLUICE_LEASE_OURS);
    char old[SLUICE_LEASE_TEXT];
    struct sluice_lease lease = one.seen;
    lease.seq = 99;
    old[sluice_lease_format(&lease, old, sizeof(old) - 1)] = '\0';
    CHECK_INT(sluice_lease_hold(&two), SLUICE_LEASE_WAIT);
    now += 2 * VALID;
    CHECK_INT(sluice_lease_hold(&two), SLUICE_LEASE_OURS);
    put(old); /* a renewal that was on its way */
    CHECK_INT(sluice_lease_hold(&two), SLUICE_LEASE_OURS);
    CHECK_INT(sluice_lease_hold(&one), SLUICE_LEASE_LOST);
}

static void test_claims(void)
{
    clear();
    struct sluice_lease_side one = make("ctl1", "b"), two = make("ctl2", "b");
    /* somebody claimed epoch 1 and died */
    CHECK(close(openat(one.folder, "sluice.lease.claim.1", O_CREAT | O_EXCL | O_WRONLY, 0644)) == 0);
    CHECK_INT(sluice_lease_hold(&one), SLUICE_LEASE_WAIT);
    now += sluice_lease_stale_ns(VALID);
    CHECK_INT(sluice_lease_hold(&one), SLUICE_LEASE_WAIT);
    now += 1;
    CHECK_INT(sluice_lease_hold(&one), SLUICE_LEASE_OURS);
    CHECK_INT(one.epoch, 2);
    /* many changes: claims are cleared away */
    for (int i = 0; i < 50; i++) {
        struct sluice_lease_side *from = i % 2 ? &two : &one, *to = i % 2 ? &one : &two;
        CHECK_INT(sluice_lease_release(from), SLUICE_LEASE_OURS);
        CHECK_INT(sluice_lease_hold(to), SLUICE_LEASE_OURS);
        CHECK_INT(to->epoch, i + 3);
    }
    int files = 0;
    DIR *dir = opendir(folder);
    for (struct dirent *entry; (entry = readdir(dir));)
        files += strncmp(entry->d_name, "sluice.lease.claim.", 19) == 0;
    closedir(dir);
    CHECK(files > 0 && files <= 17);
}

static void test_damage_and_restarts(void)
{
    clear();
    struct sluice_lease_side one = make("ctl1", "b"), two = make("ctl2", "b");
    put("sluice-lease 1\nepoch 5");
    CHECK_INT(sluice_lease_hold(&two), SLUICE_LEASE_WAIT); /* whose is it? */
    now += 2 * VALID;
    CHECK_INT(sluice_lease_hold(&two), SLUICE_LEASE_OURS);
    /* the same host, restarted: at once */
    CHECK_INT(sluice_lease_hold(&one), SLUICE_LEASE_WAIT);
    struct sluice_lease_side again = make("ctl2", "other-boot"), same = make("ctl2", "b");
    CHECK_INT(sluice_lease_hold(&same), SLUICE_LEASE_WAIT);
    CHECK_INT(sluice_lease_hold(&again), SLUICE_LEASE_OURS);
}

static void test_a_folder_that_fails(void)
{
    clear();
    struct sluice_lease_side one = make("ctl1", "b");
    CHECK_INT(sluice_lease_hold(&one), SLUICE_LEASE_OURS);
    int good = one.folder;
    one.folder = open("/proc/self", O_RDONLY | O_DIRECTORY); /* nothing can be written there */
    one.seen.epoch = one.epoch;
    CHECK_INT(sluice_lease_hold(&one), SLUICE_LEASE_ERROR);
    CHECK(one.holds); /* until it lapses */
    one.folder = good;
    CHECK_INT(sluice_lease_hold(&one), SLUICE_LEASE_OURS);
}

int main(void)
{
    snprintf(folder, sizeof(folder), "/tmp/sluice-lease-XXXXXX");
    CHECK(mkdtemp(folder));
    test_text();
    test_one_holds();
    test_a_dead_holder();
    test_a_late_renewal_is_lost();
    test_a_late_writer_does_not_win();
    test_claims();
    test_damage_and_restarts();
    test_a_folder_that_fails();
    clear();
    CHECK(rmdir(folder) == 0);
    return 0;
}
