/* SPDX-License-Identifier: Apache-2.0 */
#include "changes/changes.h"

#include "check.h"

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

static void look(struct sluice_changes *changes, uint32_t from, uint32_t until, uint64_t print)
{
    sluice_changes_begin(changes);
    for (uint32_t id = from; id < until; id++)
        sluice_changes_see(changes, id, print);
}

static void test_which(void)
{
    struct sluice_changes *changes = sluice_changes_new();
    uint32_t differ, gone;
    CHECK(changes != NULL);
    look(changes, 1, 100001, 7); /* the first: nothing differs, though all is new */
    CHECK(sluice_changes_end(changes));
    (void)sluice_changes_differ(changes, &differ);
    CHECK_INT(differ, 0);
    look(changes, 1, 100001, 7);
    sluice_changes_see(changes, 500, 8); /* the second time in a look: passed over */
    sluice_changes_see(changes, 0, 8);   /* no job */
    CHECK(sluice_changes_end(changes));
    (void)sluice_changes_differ(changes, &differ);
    (void)sluice_changes_gone(changes, &gone);
    CHECK_INT(differ + gone, 0);

    sluice_changes_begin(changes);
    for (uint32_t id = 11; id < 100003; id++) /* ten gone, one differs, two are new */
        sluice_changes_see(changes, id, id == 500 ? 0 : 7);
    CHECK(sluice_changes_end(changes));
    const uint32_t *ids = sluice_changes_differ(changes, &differ);
    CHECK_INT(differ, 3);
    CHECK_INT(ids[0], 500);
    CHECK_INT(ids[2], 100002);
    ids = sluice_changes_gone(changes, &gone);
    CHECK_INT(gone, 10);
    for (uint32_t i = 0; i < gone; i++)
        CHECK(ids[i] >= 1 && ids[i] <= 10);

    sluice_changes_begin(changes); /* a number that comes again is new */
    for (uint32_t id = 10; id < 100003; id++)
        sluice_changes_see(changes, id, id == 500 ? 0 : 7);
    CHECK(sluice_changes_end(changes));
    (void)sluice_changes_differ(changes, &differ);
    CHECK_INT(differ, 1);
    sluice_changes_free(changes);
    sluice_changes_free(NULL);
}

static void test_too_many(void)
{
    struct sluice_changes *changes = sluice_changes_new();
    uint32_t differ, gone;
    look(changes, 1, 40001, 7);
    CHECK(sluice_changes_end(changes));
    look(changes, 1, 40001, 8);
    CHECK(!sluice_changes_end(changes));
    look(changes, 1, 40001, 8); /* it was lost, and is known from now on */
    CHECK(sluice_changes_end(changes));
    (void)sluice_changes_differ(changes, &differ);
    CHECK_INT(differ, 0);
    look(changes, 1, 1, 8); /* all gone at once */
    CHECK(!sluice_changes_end(changes));
    look(changes, 1, 2, 8);
    CHECK(sluice_changes_end(changes));
    (void)sluice_changes_differ(changes, &differ);
    (void)sluice_changes_gone(changes, &gone);
    CHECK_INT(differ, 1);
    CHECK_INT(gone, 0);
    sluice_changes_free(changes);
}

static void test_prints(void)
{
    static const char *const texts[] = {NULL, "", "a", "b", "aa", "aaaaaaa", "aaaaaaaa", "aaaaaaaab", "aaaaaaaac"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        for (size_t j = 0; j < i; j++)
            CHECK(sluice_print_text(5, texts[i], 1) != sluice_print_text(5, texts[j], 1));
    CHECK(sluice_print_text(sluice_print_text(0, "ab", 1), "c", 1) !=
          sluice_print_text(sluice_print_text(0, "a", 1), "bc", 1));
    enum { LONG = 3 * SLUICE_CHANGES_MAX_TEXT };
    char *one = malloc(LONG + 1), *other = malloc(LONG + 1);
    CHECK(one != NULL && other != NULL);
    memset(one, 'x', LONG);
    memset(other, 'x', LONG);
    one[LONG] = other[LONG] = 0;
    other[2 * SLUICE_CHANGES_MAX_TEXT] = 'y'; /* the first byte that is not written */
    CHECK(sluice_print_text(0, one, 2) == sluice_print_text(0, other, 2));
    CHECK(sluice_print_text(0, one, 3) != sluice_print_text(0, other, 3));
    other[2 * SLUICE_CHANGES_MAX_TEXT - 1] = 'y';
    CHECK(sluice_print_text(0, one, 2) != sluice_print_text(0, other, 2));
    free(one);
    free(other);
}

static void test_lines(void)
{
    struct sluice_changes_text text = {0};
    sluice_changes_put(&text, "[\"job\"");
    sluice_changes_put_number(&text, UINT64_MAX);
    sluice_changes_put_field(&text, "a\"b\\c\n\x1f\x7f\xc3\xa9", 1);
    sluice_changes_put_field(&text, NULL, 1);
    sluice_changes_put(&text, "]\n");
    CHECK_INT(text.length,
              strlen("[\"job\", \"18446744073709551615\", \"a\\u0022b\\u005cc\\u000a\\u001f\\u007f\xc3\xa9\", "
                     "\"\"]\n"));
    CHECK(memcmp(text.bytes,
                 "[\"job\", \"18446744073709551615\", \"a\\u0022b\\u005cc\\u000a\\u001f\\u007f\xc3\xa9\", \"\"]\n",
                 text.length) == 0);
    char *large = malloc(1 << 20);
    CHECK(large != NULL);
    memset(large, '\n', 1 << 20);
    large[(1 << 20) - 1] = 0;
    size_t before = text.length;
    sluice_changes_put_field(&text, large, 2); /* each byte is six */
    CHECK_INT(text.length - before, 4 + 6 * 2 * SLUICE_CHANGES_MAX_TEXT);
    for (int i = 0; i < 1000; i++)
        sluice_changes_put_field(&text, large, 2);
    CHECK(text.failed);
    CHECK(text.length <= SLUICE_CHANGES_MAX_LOOK_BYTES);
    free(large);
    free(text.bytes);
}

static uint32_t count_files(const char *folder)
{
    uint32_t count = 0;
    DIR *entries = opendir(folder);
    CHECK(entries != NULL);
    for (const struct dirent *entry; (entry = readdir(entries));)
        count += strncmp(entry->d_name, "changes.", 8) == 0;
    closedir(entries);
    return count;
}

static void test_files(void)
{
    char folder[] = "/tmp/test_changes.XXXXXX", name[128], line[64];
    struct sluice_changes_files files;
    struct sluice_changes_text text = {0};
    struct stat facts;
    CHECK(mkdtemp(folder) != NULL);
    umask(0);
    snprintf(name, sizeof name, "%s/changes.000000000007", folder); /* another process's */
    FILE *other = fopen(name, "w");
    CHECK(other && fclose(other) == 0);
    sluice_changes_files_start(&files, folder);
    sluice_changes_put(&text, "[\"look\", 5, 0]\n");
    CHECK(sluice_changes_write(&files, &text, true));
    CHECK(sluice_changes_write(&files, &text, false));
    snprintf(name, sizeof name, "%s/changes.000000000008", folder);
    CHECK(stat(name, &facts) == 0);
    CHECK_INT(facts.st_mode & 0777, 0600);
    FILE *file = fopen(name, "r");
    CHECK(file && fgets(line, sizeof line, file) && strncmp(line, "[\"begin\", \"", 11) == 0);
    CHECK(fgets(line, sizeof line, file) && fgets(line, sizeof line, file) && !fgets(name, 2, file));
    CHECK_STR(line, "[\"look\", 5, 0]\n");
    fclose(file);

    char *filler = malloc(1 << 20);
    CHECK(filler != NULL);
    memset(filler, 'x', (1 << 20) - 1);
    filler[(1 << 20) - 1] = 0;
    for (int i = 0; i < 4; i++)
        sluice_changes_put(&text, filler);
    for (int i = 0; i < 12; i++)
        CHECK(sluice_changes_write(&files, &text, false));
    CHECK_INT(count_files(folder), 2);
    snprintf(name, sizeof name, "%s/changes.%012" PRIu64, folder, files.number);
    file = fopen(name, "r");
    CHECK(file && fgets(line, sizeof line, file) && strncmp(line, "[\"on\", \"", 8) == 0);
    fclose(file);
    sluice_changes_files_stop(&files);
    CHECK_INT(count_files(folder), 0);
    CHECK(rmdir(folder) == 0);
    CHECK(!sluice_changes_write(&files, &text, true)); /* no folder */
    sluice_changes_files_stop(&files);
    free(filler);
    free(text.bytes);
}

int main(void)
{
    test_which();
    test_too_many();
    test_prints();
    test_lines();
    test_files();
    return 0;
}
