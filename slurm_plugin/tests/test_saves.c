/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/saves.h"

#include "check.h"
#include "with_checksum.h"

PARSE_WITH_CHECKSUM(parse, sluice_saves_parse, struct sluice_saves)

static void test_good(void)
{
    struct sluice_saves *saves;
    CHECK_INT(parse("sluice-saves 1\n", &saves, NULL), SLUICE_OK);
    CHECK_INT(sluice_saves_of(saves, 1), 0);
    sluice_saves_release(saves);
    CHECK_INT(parse("sluice-saves 1\n4294967295 1099511627776\n7 1764374400\n12 5\n", &saves, NULL), SLUICE_OK);
    CHECK_INT(sluice_saves_of(saves, 7), 1764374400);
    CHECK_INT(sluice_saves_of(saves, 12), 5);
    CHECK_INT(sluice_saves_of(saves, UINT32_MAX), SLUICE_SAVES_MAX_S);
    CHECK(!sluice_saves_of(saves, 8) && !sluice_saves_of(NULL, 7));
    sluice_saves_release(saves);
    sluice_saves_release(NULL);
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
        struct sluice_saves *saves;
        struct sluice_error_text text = {.text = ""};
        CHECK_INT(parse(cases[i].body, &saves, &text), cases[i].error);
        CHECK(saves == NULL);
        CHECK(strstr(text.text, cases[i].said) != NULL);
    }
    struct sluice_saves *saves;
    CHECK_INT(sluice_saves_parse("sluice-saves 1\n", 15, &saves, NULL), SLUICE_ERROR_CORRUPT);
}

int main(void)
{
    test_good();
    test_bad();
    return 0;
}
