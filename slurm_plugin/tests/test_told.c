/* SPDX-License-Identifier: Apache-2.0 */
#include "journal/told.h"

#include "check.h"

static void test_good(void)
{
    struct sluice_told told;
    CHECK(sluice_told_read("sluice-ended 1 42 3 1000 256 1700000000 gpu-node_1.site", &told));
    CHECK_INT(told.job, 42);
    CHECK_INT(told.restarts, 3);
    CHECK_INT(told.uid, 1000);
    CHECK_INT(told.status, 256);
    CHECK_INT(told.ended, 1700000000);
    CHECK_STR(told.node, "gpu-node_1.site");
    CHECK(sluice_told_read("sluice-ended 1 4294967295 0 4294967295 65535 4294967295 n", &told));
    CHECK_INT(told.job, UINT32_MAX);
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
    struct sluice_told told;
    char name[SLUICE_TOLD_NODE + 64] = "sluice-ended 1 42 3 1000 256 1700000000 ";
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK(!sluice_told_read(bad[i], &told));
    size_t head = strlen(name);
    memset(name + head, 'n', SLUICE_TOLD_NODE);
    CHECK(!sluice_told_read(name, &told));
    name[head + SLUICE_TOLD_NODE - 1] = '\0';
    CHECK(sluice_told_read(name, &told));
}

/* What people write is theirs. */
static void test_others(void)
{
    CHECK(!sluice_told_is(NULL));
    CHECK(!sluice_told_is(""));
    CHECK(!sluice_told_is("the job ended; see sluice-ended 1"));
    CHECK(sluice_told_is("sluice-ended nonsense"));
}

int main(void)
{
    test_good();
    test_bad();
    test_others();
    return 0;
}
