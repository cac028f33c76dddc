/* SPDX-License-Identifier: Apache-2.0 */
#include "planner/emptying.h"

#include "check.h"
#include "with_checksum.h"

#include <unistd.h>

static void test_orders(void)
{
    static const struct {
        const char *reason;
        bool ordered;
        int64_t deadline_s;
    } cases[] = {
        {"sluice empty: new fan", true, 0},
        {"sluice empty by 2026-11-30T03:00:00Z: new fan", true, 1796007600},
        {"sluice empty by 2026-11-30T03:00:00: new fan", false, 0},
        {"sluice empty by tomorrow: new fan", false, 0},
        {"sluice empty by 2026-11-30T03:00:00Z", false, 1796007600},
        {"sluice empty by 2026-11-30T03:00:00Zulu: x", false, 1796007600},
        {"sluice empty by 2026-11-30T03:00:0", false, 0},
        {"sluice empty by ", false, 0},
        {"sluice empty by 1960-01-01T00:00:00Z: x", false, 0},
        {"sluice empty by 1970-01-01T00:00:00Z: x", false, 0},
        {"sluice empty by 2026-13-30T03:00:00Z: x", false, 0},
        {"sluice empty by 2026-11-30T25:00:00Z: x", false, 0},
        {"sluice empty by 2026--1-30T03:00:00Z: x", false, 0},
        {"sluice empty by  026-11-30T03:00:00Z: x", false, 0},
        {"sluice empty by 9999-12-31T23:59:59Z: x", true, 253402300799},
        {"sluice empty", false, 0},
        {"sluice emptyish: x", false, 0},
        {"new fan", false, 0},
        {"", false, 0},
        {NULL, false, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t deadline_s = 7;
        CHECK_INT(sluice_empty_ordered(cases[i].reason, &deadline_s), cases[i].ordered);
        CHECK_INT(deadline_s, cases[i].deadline_s);
    }
}

PARSE_WITH_CHECKSUM(parse, sluice_empty_asks_parse, struct sluice_empty_asks)

static void test_what_is_asked(void)
{
    struct sluice_empty_asks *asks = NULL;
    struct sluice_error_text text = {.text = ""};
    CHECK_INT(parse("sluice-empty 1\nn2 1000 0\nn1 1001 2000\n", &asks, &text), SLUICE_OK);
    CHECK_INT(asks->listed.count, 2);
    CHECK_STR(asks->items[0].node, "n1");
    CHECK_INT(asks->items[0].until_s, 1001);
    CHECK_INT(asks->items[0].deadline_s, 2000);
    sluice_listed_release(&asks->listed);
    static const char *const bad[] = {"n1 1000\n", "n1 1000 0 1\n", "n1 -1 0\n", "n1 0 9999999999999\n",
                                      "n1 1 0\nn1 1 0\n"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char body[256];
        snprintf(body, sizeof body, "sluice-empty 1\n%s", bad[i]);
        text.text[0] = '\0';
        CHECK_INT(parse(body, &asks, &text), SLUICE_ERROR_INVALID);
        CHECK(!asks && text.text[0]);
    }
}

static void test_what_is_said(void)
{
    char path[] = "/tmp/sluice-emptying-XXXXXX", found[512] = "";
    const struct sluice_emptying_node nodes[] = {{.name = "n1", .ordered = true}, {.name = "n2", .deadline_s = 2000}};
    const struct sluice_emptying_job jobs[] = {
        {.job_id = 7, .node = "n1", .to = "n3", .end_s = INT64_MAX},
        {.job_id = 8, .node = "n2", .end_s = 1900, .decision = SLUICE_LEAVE_ENDS, .why = SLUICE_LEAVE_WHY_IN_TIME},
        {.job_id = 9, .node = "n2", .end_s = 5000, .decision = SLUICE_LEAVE_STAYS, .why = SLUICE_LEAVE_WHY_SPENT},
    };
    const struct sluice_emptying said = {.now_s = 1000, .nodes = nodes, .node_count = 2, .jobs = jobs, .job_count = 3};
    int file = mkstemp(path);
    CHECK(file >= 0 && close(file) == 0);
    CHECK(sluice_emptying_write(path, &said));
    FILE *from = fopen(path, "r");
    CHECK(from && fread(found, 1, sizeof found - 1, from) > 0 && fclose(from) == 0);
    size_t length;
    char *wanted =
        with_checksum("sluice-emptying 1\nat 1000\nnode n1 0 order\nnode n2 2000 ask\njob 7 n1 moves - 0 n3\n"
                      "job 8 n2 ends in-time 1900 -\njob 9 n2 stays spent 5000 -\n",
                      &length);
    CHECK_STR(found, wanted);
    free(wanted);
    CHECK(unlink(path) == 0);
    CHECK(!sluice_emptying_write("/nowhere/sluice.emptying", &said));
}

int main(void)
{
    test_orders();
    test_what_is_asked();
    test_what_is_said();
    return 0;
}
