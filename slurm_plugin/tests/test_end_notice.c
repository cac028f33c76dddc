/* SPDX-License-Identifier: Apache-2.0 */
#include "failover/end_notice.h"

#include "check.h"

static void test_good(void)
{
    struct sluice_end_notice notice;
    CHECK(sluice_end_notice_parse("sluice-ended 1 42 3 1000 256 1700000000 gpu-node_1.site", &notice));
    CHECK_INT(notice.job, 42);
    CHECK_INT(notice.restarts, 3);
    CHECK_INT(notice.uid, 1000);
    CHECK_INT(notice.status, 256);
    CHECK_INT(notice.ended, 1700000000);
    CHECK_STR(notice.node, "gpu-node_1.site");
    CHECK(sluice_end_notice_parse("sluice-ended 1 4294967295 0 4294967295 65535 4294967295 n", &notice));
    CHECK_INT(notice.job, UINT32_MAX);
}

static void test_bad(void)
{
    static const char *const bad[] = {
        "sluice-ended 1 42 3 1000 256 1700000000",
        "sluice-ended 1 42 3 1000 256 1700000000 ",
        "sluice-ended 2 42 3 1000 256 1700000000 n",
        "sluice-ended 1 0 3 1000 256 1700000000 n",
        "sluice-ended 1 4294967296 3 1000 256 1700000000 n",
        "sluice-ended 1 42 -3 1000 256 1700000000 n",
        "sluice-ended 1 42 3 1000 65536 1700000000 n",
        "sluice-ended 1 42  3 1000 256 1700000000 n",
        "sluice-ended 1 42 3 1000 256 1700000000 n m",
        "sluice-ended 1 42 3 1000 256 1700000000 n\n",
        "sluice-ended 1 42 3 1000 256 99999999999999999999 n",
        "sluice-ended ",
        "sluice-ended",
    };
    struct sluice_end_notice notice;
    char name[SLUICE_END_NOTICE_NODE + 64] = "sluice-ended 1 42 3 1000 256 1700000000 ";
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK(!sluice_end_notice_parse(bad[i], &notice));
    size_t head = strlen(name);
    memset(name + head, 'n', SLUICE_END_NOTICE_NODE);
    CHECK(!sluice_end_notice_parse(name, &notice));
    name[head + SLUICE_END_NOTICE_NODE - 1] = '\0';
    CHECK(sluice_end_notice_parse(name, &notice));
}

/* What people write is theirs. */
static void test_others(void)
{
    CHECK(!sluice_is_end_notice(NULL));
    CHECK(!sluice_is_end_notice(""));
    CHECK(!sluice_is_end_notice("the job ended; see sluice-ended 1"));
    CHECK(sluice_is_end_notice("sluice-ended nonsense"));
}

int main(void)
{
    test_good();
    test_bad();
    test_others();
    return 0;
}
