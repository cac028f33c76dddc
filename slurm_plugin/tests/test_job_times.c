/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/job_times.h"

#include "check.h"
#include "with_checksum.h"

static enum sluice_error parse_saves(const char *data, size_t length, struct sluice_job_times **made,
                                     struct sluice_error_text *text)
{
    return sluice_job_times_parse("sluice-saves", data, length, made, text);
}

PARSE_WITH_CHECKSUM(parse, parse_saves, struct sluice_job_times)

static void test_good(void)
{
    struct sluice_job_times *times;
    CHECK_INT(parse("sluice-saves 1\n", &times, NULL), SLUICE_OK);
    CHECK_INT(sluice_job_times_of(times, 1), 0);
    sluice_job_times_release(times);
    CHECK_INT(parse("sluice-saves 1\n4294967295 1099511627776\n7 1764374400\n12 5\n", &times, NULL), SLUICE_OK);
    CHECK_INT(sluice_job_times_of(times, 7), 1764374400);
    CHECK_INT(sluice_job_times_of(times, 12), 5);
    CHECK_INT(sluice_job_times_of(times, UINT32_MAX), SLUICE_JOB_TIMES_MAX_S);
    CHECK(!sluice_job_times_of(times, 8) && !sluice_job_times_of(NULL, 7));
    sluice_job_times_release(times);
    sluice_job_times_release(NULL);
}

static void test_bad(void)
{
    static const struct {
        const char *body;
        enum sluice_error error;
        const char *said;
    } cases[] = {
        {"sluice-power 1\n", SLUICE_ERROR_INVALID, "line 1: not a file of kind sluice-saves"},
        {"sluice-saves 2\n", SLUICE_ERROR_VERSION, "line 1"},
        {"sluice-saves 1\n7\n", SLUICE_ERROR_INVALID, "line 2: not a job's id and a time"},
        {"sluice-saves 1\n7 \n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-saves 1\n 7 1\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-saves 1\n7 1 \n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-saves 1\n7 -1\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-saves 1\n7 1\n\n", SLUICE_ERROR_INVALID, "line 3"},
        {"sluice-saves 1\n4294967296 1\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-saves 1\n7 1099511627777\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-saves 1\n7 1\n8 1\n7 2\n", SLUICE_ERROR_INVALID, "job 7 is there twice"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        struct sluice_job_times *times;
        struct sluice_error_text text = {.text = ""};
        CHECK_INT(parse(cases[i].body, &times, &text), cases[i].error);
        CHECK(times == NULL);
        CHECK(strstr(text.text, cases[i].said) != NULL);
    }
    struct sluice_job_times *times;
    CHECK_INT(parse_saves("sluice-saves 1\n", 15, &times, NULL), SLUICE_ERROR_CORRUPT);
}

int main(void)
{
    test_good();
    test_bad();
    return 0;
}
