/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"
#include "message.h"

#define JOB "/sys/fs/cgroup/freezer/slurm_n1/uid_1000/job_12"
#define SCOPE "/sys/fs/cgroup/system.slice/n1_slurmstepd.scope/"

static bool parses(const char *text, struct guard_message *message)
{
    return guard_parse(text, strlen(text), message);
}

static void test_messages(void)
{
    static const struct {
        const char *text;
        enum guard_kind kind;
    } good[] = {
        {"ready", GUARD_READY},
        {"beat nvidia", GUARD_BEAT},
        {"sample intel", GUARD_SAMPLE},
        {"watch 12 nvidia " JOB, GUARD_WATCH},
        {"watch 4294967295 amd,nvidia " SCOPE "s0123456789AB", GUARD_WATCH},
        {"watch 1 amd " SCOPE "system-slurm\\x2dstepd:1@a/job_12", GUARD_WATCH},
        {"forget 12", GUARD_FORGET},
        {"bound 0", GUARD_BOUND},
        {"bound 86400", GUARD_BOUND},
    };
    struct guard_message message;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        CHECK(parses(good[i].text, &message));
        CHECK_INT(message.kind, good[i].kind);
    }
    CHECK(parses("watch 12 amd,nvidia " JOB, &message));
    CHECK_INT(message.job, 12);
    CHECK_INT(message.vendors, 1 << GUARD_AMD | 1 << GUARD_NVIDIA);
    CHECK_STR(message.path, JOB);
    CHECK(parses("bound 77", &message));
    CHECK_INT(message.seconds, 77);
}

static void test_what_is_none(void)
{
    static const char *const bad[] = {
        "",
        " ",
        "ready ",
        "ready now",
        "Ready",
        "beat",
        "beat ",
        "beat nvidia ",
        "beat other",
        "beat nvidia amd",
        "sample nvidia,amd",
        "forget",
        "forget 0",
        "forget -1",
        "forget 1x",
        "forget 4294967296",
        "forget 99999999999",
        "bound",
        "bound 86401",
        "bound 1.5",
        "watch 12 nvidia",
        "watch 12 nvidia ",
        "watch 0 nvidia " JOB,
        "watch 12  " JOB,
        "watch 12 nvidia,nvidia " JOB,
        "watch 12 nvidia, " JOB,
        "watch 12 ,nvidia " JOB,
        "watch 12 nvidia " JOB " ",
        "watch 12 nvidia " JOB "/",
        "watch 12 nvidia " JOB "/step_0",
        "watch 12 nvidia job_12",
        "watch 12 nvidia /",
        "watch 12 nvidia //job_12",
        "watch 12 nvidia /a/../job_12",
        "watch 12 nvidia /a/./job_12",
        "watch 12 nvidia /a/job_",
        "watch 12 nvidia /a/job_12345678901",
        "watch 12 nvidia /a/job_1*",
        "watch 12 nvidia /a/s0123456789AI",
        "watch 12 nvidia /a/s0123456789A",
        "watch 12 nvidia /a\t/job_12",
    };
    struct guard_message message;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (parses(bad[i], &message)) {
            fprintf(stderr, "taken for a message: \"%s\"\n", bad[i]);
            exit(1);
        }
    CHECK(!guard_parse("forget 1\0002", 10, &message));
    CHECK(!guard_parse("watch 12 nvidia /a\0/job_12", 26, &message));
    char longest[GUARD_MESSAGE + 1];
    memset(longest, 'a', sizeof longest);
    memcpy(longest, "watch 12 nvidia /", 17);
    CHECK(!guard_parse(longest, sizeof longest, &message));
    memcpy(longest + 300, "/job_12", 7);
    CHECK(!guard_parse(longest, 307, &message)); /* longer than a path may be */
}

int main(void)
{
    test_messages();
    test_what_is_none();
    return 0;
}
