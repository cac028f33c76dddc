/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/withdrawn.h"

#include "check.h"
#include "with_checksum.h"

PARSE_WITH_CHECKSUM(parse, sluice_withdrawn_parse, struct sluice_withdrawn)

static void test_good(void)
{
    struct sluice_withdrawn *list;
    struct sluice_error_text text;
    CHECK_INT(parse("sluice-withdrawn 1\n", &list, &text), SLUICE_OK);
    CHECK_INT(list->listed.count, 0);
    sluice_withdrawn_release(list);
    CHECK_INT(parse("sluice-withdrawn 1\nnode-2 10\nnode-2 9\nnode-1.a_b 255\n", &list, &text), SLUICE_OK);
    CHECK_INT(list->listed.count, 3);
    CHECK_STR(list->gpus[0].node, "node-1.a_b");
    CHECK_INT(list->gpus[0].gpu, 255);
    CHECK_INT(list->gpus[1].gpu, 9); /* sorted */
    CHECK_INT(list->gpus[2].gpu, 10);
    sluice_withdrawn_release(list);
    sluice_withdrawn_release(NULL);
}

static void test_bad(void)
{
    static const struct {
        const char *body;
        enum sluice_error error;
        const char *said;
    } cases[] = {
        {"", SLUICE_ERROR_CORRUPT, "checksum"},
        {"sluice-policy 1.0\n", SLUICE_ERROR_INVALID, "line 1"},
        {"sluice-withdrawn 2\n", SLUICE_ERROR_VERSION, "line 1"},
        {"sluice-withdrawn 1\nn1\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-withdrawn 1\nn1 \n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-withdrawn 1\n 1\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-withdrawn 1\nn1 1\n\n", SLUICE_ERROR_INVALID, "line 3"},
        {"sluice-withdrawn 1\nn1 256\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-withdrawn 1\nn1 01\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-withdrawn 1\nn1 -1\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-withdrawn 1\nn1 1 2\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-withdrawn 1\nn;1 1\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-withdrawn 1\nn1 1\nn2 1\nn1 1\n", SLUICE_ERROR_INVALID, "GPU 1 of node n1 is named twice"},
        {"sluice-withdrawn 1\naaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 1\n",
         SLUICE_ERROR_INVALID, "line 2"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        struct sluice_withdrawn *list;
        struct sluice_error_text text = {.text = ""};
        CHECK_INT(parse(cases[i].body, &list, &text), cases[i].error);
        CHECK(list == NULL);
        CHECK(strstr(text.text, cases[i].said) != NULL);
    }
}

static void test_damaged(void)
{
    size_t length;
    char *whole = with_checksum("sluice-withdrawn 1\nn1 1\n", &length);
    struct sluice_withdrawn *list;
    struct sluice_error_text text;
    CHECK_INT(sluice_withdrawn_parse(whole, length, &list, &text), SLUICE_OK);
    sluice_withdrawn_release(list);
    for (size_t cut = 0; cut < length; cut++) {
        CHECK_INT(sluice_withdrawn_parse(whole, cut, &list, &text), SLUICE_ERROR_CORRUPT);
        CHECK(list == NULL);
    }
    for (size_t at = 0; at < length; at++) {
        whole[at] ^= 1;
        CHECK(sluice_withdrawn_parse(whole, length, &list, &text) != SLUICE_OK);
        CHECK(list == NULL);
        whole[at] ^= 1;
    }
    free(whole);
}

int main(void)
{
    test_good();
    test_bad();
    test_damaged();
    return 0;
}
