/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "rules/trace.h"

#include "check.h"

#include <string.h>

#define TRACE "4bf92f3577b34da6a3ce929d0e0e4736"
#define SPAN "00f067aa0ba902b7"

static void check_grammar(void)
{
    static const struct {
        const char *text, *parent;
    } good[] = {
        {"00-" TRACE "-" SPAN "-01", "00-" TRACE "-" SPAN "-01"},
        {"00-" TRACE "-" SPAN "-00", "00-" TRACE "-" SPAN "-00"},
        {"00-" TRACE "-" SPAN "-ff", "00-" TRACE "-" SPAN "-01"},
        {"00-" TRACE "-" SPAN "-02", "00-" TRACE "-" SPAN "-00"},
        {"cc-" TRACE "-" SPAN "-01", "00-" TRACE "-" SPAN "-01"},
        {"cc-" TRACE "-" SPAN "-01-what-the-future-brings", "00-" TRACE "-" SPAN "-01"},
    };
    static const char *const bad[] = {
        "",
        "00",
        "00-" TRACE "-" SPAN,
        "00-" TRACE "-" SPAN "-",
        "00-" TRACE "-" SPAN "-0",
        "00-" TRACE "-" SPAN "-0g",
        "00-" TRACE "-" SPAN "-01 ",
        "00-" TRACE "-" SPAN "-01-more",
        "cc-" TRACE "-" SPAN "-01.more",
        "ff-" TRACE "-" SPAN "-01",
        "0g-" TRACE "-" SPAN "-01",
        " 00-" TRACE "-" SPAN "-01",
        "00_" TRACE "-" SPAN "-01",
        "00-" TRACE "_" SPAN "-01",
        "00-" TRACE "-" SPAN "_01",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-" SPAN "-01",
        "00-00000000000000000000000000000000-" SPAN "-01",
        "00-" TRACE "-0000000000000000-01",
        "00-4bf92f3577b34da6a3ce929d0e0e473-000f067aa0ba902b7-01",
    };
    char parent[SLUICE_TRACE_SIZE];
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        CHECK(sluice_trace_parse(good[i].text, parent));
        CHECK_STR(parent, good[i].parent);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        CHECK(!sluice_trace_parse(bad[i], parent));
    CHECK(!sluice_trace_parse(NULL, parent));
}

static void check_ids(void)
{
    char own[SLUICE_TRACE_SIZE], other[SLUICE_TRACE_SIZE], parent[SLUICE_TRACE_SIZE];
    /* tests/unit/controllerd/test_span_identity.py expects the same. */
    sluice_trace_of_job("00-" TRACE "-" SPAN "-01", "main", 17, own);
    CHECK_STR(own, "00-" TRACE "-7329bf17e919b308-01");
    sluice_trace_of_job("00-" TRACE "-" SPAN "-00", "main", 18, other);
    CHECK(strncmp(own + 36, other + 36, 16) != 0);
    CHECK_STR(other + 52, "-00");
    sluice_trace_of_job("00-" TRACE "-" SPAN "-01", "other", 17, other);
    CHECK(strncmp(own + 36, other + 36, 16) != 0);

    static const unsigned char random[SLUICE_TRACE_RANDOM] = {0xa0, [15] = 7};
    sluice_trace_begin(random, parent);
    CHECK_STR(parent, "00-a1000000000000000000000000000007-a100000000000000-01");
    CHECK(sluice_trace_parse(parent, other));
}

static void check_comments(void)
{
    static const char *const bad[] = {"",
                                      "0760000000123456",
                                      "176000000012345",
                                      "17600000001234567",
                                      "176000000012345 ",
                                      " 176000000012345",
                                      "-760000000123456",
                                      "1760000000.23456"};
    char comment[SLUICE_TRACE_COMMENT_SIZE];
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        CHECK(!sluice_trace_is_time(bad[i]));
    CHECK(!sluice_trace_is_time(NULL) && sluice_trace_is_time("1760000000123456"));
    /* tests/unit/controllerd/test_span_identity.py reads both. */
    const char *parent = "00-" TRACE "-" SPAN "-01";
    sluice_trace_comment(parent, 1760000000200000, 37, "1760000000123456", comment);
    CHECK_STR(comment, "traceparent:00-" TRACE "-" SPAN "-01 submitted:1760000000200000,37,1760000000123456");
    sluice_trace_comment(parent, 1760000000200000, UINT64_MAX, NULL, comment);
    CHECK_STR(comment, "traceparent:00-" TRACE "-" SPAN "-01 submitted:1760000000200000,999999999");
    sluice_trace_comment(parent, 1760000000200000, UINT64_MAX, "1760000000123456", comment);
    CHECK(strlen(comment) < sizeof comment - 1); /* the longest is whole */
}

int main(void)
{
    check_grammar();
    check_ids();
    check_comments();
    return 0;
}
