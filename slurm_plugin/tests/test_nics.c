/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/listing.h"
#include "runtime/nics.h"

#include "check.h"
#include "with_checksum.h"

#include <stdbool.h>
#include <sys/resource.h>
#include <unistd.h>

PARSE_WITH_CHECKSUM(parse, sluice_nics_parse, struct sluice_nics)

static void test_good(void)
{
    struct sluice_nics *nics;
    struct sluice_error_text text;
    CHECK_INT(parse("sluice-nics 1\n", &nics, &text), SLUICE_OK);
    CHECK(!sluice_nics_of(nics, "n1"));
    sluice_nics_free(nics);
    CHECK_INT(parse("sluice-nics 1\nn2 0,1 1,47/32,0/1\nn1.a_b 3 3\n", &nics, &text), SLUICE_OK);
    const struct sluice_nic_groups *groups = sluice_nics_of(nics, "n2");
    CHECK_INT(groups->gpu_count, 2);
    CHECK_INT(groups->gpu_group[1], 1);
    CHECK_INT(groups->nic_count, 3);
    CHECK_INT(groups->nic_group[1], 47);
    CHECK_INT(groups->nic_group[2], 0);
    CHECK_INT(groups->nic_plane[0], 0);
    CHECK_INT(groups->nic_plane[1], 32);
    CHECK_INT(groups->nic_plane[2], 1);
    CHECK_INT(sluice_nics_of(nics, "n1.a_b")->nic_group[0], 3);
    CHECK(!sluice_nics_of(nics, "n1") && !sluice_nics_of(NULL, "n2"));
    sluice_nics_free(nics);
    sluice_nics_free(NULL);
}

static void test_bad(void)
{
    static const struct {
        const char *body;
        enum sluice_error error;
        const char *said;
    } cases[] = {
        {"sluice-power 1\n", SLUICE_ERROR_INVALID, "line 1: not a file of kind sluice-nics"},
        {"sluice-nics 2\n", SLUICE_ERROR_VERSION, "line 1"},
        {"sluice-nics 1\nn1\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-nics 1\nn1 0\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-nics 1\nn1 0 \n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-nics 1\nn1 0 0 \n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-nics 1\nn1 0 0 0\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-nics 1\n 0 0\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-nics 1\nn1 0 0\n\n", SLUICE_ERROR_INVALID, "line 3"},
        {"sluice-nics 1\nn1 0,,1 0\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-nics 1\nn1 0, 0\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-nics 1\nn1 -1 0\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-nics 1\nn1 48 0\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-nics 1\nn1 0/1 0\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-nics 1\nn1 0 0/\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-nics 1\nn1 0 0/0\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-nics 1\nn1 0 0/33\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-nics 1\nn1 0 0/1/1\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-nics 1\nn1 0 /1\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-nics 1\nn1 0 4294967296\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-nics 1\nn1 0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0 0\n", SLUICE_ERROR_INVALID, "line 2"},
        {"sluice-nics 1\nn1 0 0\nn2 0 0\nn1 0 0\n", SLUICE_ERROR_INVALID, "node n1 is there twice"},
        {"sluice-nics 1\naaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 0 0\n", SLUICE_ERROR_INVALID,
         "line 2"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        struct sluice_nics *nics;
        struct sluice_error_text text = {.text = ""};
        CHECK_INT(parse(cases[i].body, &nics, &text), cases[i].error);
        CHECK(nics == NULL);
        CHECK(strstr(text.text, cases[i].said) != NULL);
    }
    struct sluice_nics *nics;
    CHECK_INT(sluice_nics_parse("sluice-nics 1\n", 14, &nics, NULL), SLUICE_ERROR_CORRUPT);
}

static enum sluice_listing look(struct sluice_listing_file *file, bool readable)
{
    char *data;
    size_t length;
    struct sluice_error_text text = {.text = ""};
    enum sluice_listing found = sluice_listing_look(file, &data, &length, &text);
    CHECK((data != NULL) == (readable && found == SLUICE_LISTING_NEW));
    CHECK(found != SLUICE_LISTING_NEW || (text.text[0] == 0) == readable);
    free(data);
    return found;
}

/* A file that cannot be read for a while, here as there are too many open ones, is read later, although it is the same. */
static void test_unreadable(void)
{
    char folder[] = "/tmp/sluice-nics-XXXXXX";
    struct sluice_listing_file file;
    struct rlimit files, none;
    CHECK(mkdtemp(folder) && getrlimit(RLIMIT_NOFILE, &files) == 0);
    none = (struct rlimit){.rlim_cur = 0, .rlim_max = files.rlim_max};
    sluice_listing_follow(&file, folder, SLUICE_NICS_FILE);
    CHECK_INT(look(&file, true), SLUICE_LISTING_SAME);
    FILE *to = fopen(file.path, "w");
    CHECK(to && fputs("sluice-nics 1\n", to) >= 0 && fclose(to) == 0);
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
    CHECK_INT(look(&file, false), SLUICE_LISTING_NEW);
    CHECK_INT(look(&file, false), SLUICE_LISTING_SAME);
    CHECK(setrlimit(RLIMIT_NOFILE, &files) == 0);
    CHECK_INT(look(&file, true), SLUICE_LISTING_NEW);
    CHECK_INT(look(&file, true), SLUICE_LISTING_SAME);
    CHECK(unlink(file.path) == 0 && rmdir(folder) == 0);
    CHECK_INT(look(&file, true), SLUICE_LISTING_GONE);
    CHECK_INT(look(&file, true), SLUICE_LISTING_SAME);
}

int main(void)
{
    test_good();
    test_bad();
    test_unreadable();
    return 0;
}
