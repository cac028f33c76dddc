/* SPDX-License-Identifier: Apache-2.0 */
/* Files of profiles: names, limits, and what a program finds that has the same number in another PID namespace. */
#include "check.h"
#include "file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

enum { START = sizeof(struct sluice_profile_header), RECORD = sizeof(struct sluice_profile_record) };

static char folder[64] = "/tmp/sluice-profile-XXXXXX";
static int folder_fd;

static struct sluice_profile_record kernel(struct profile_file *file, const char *name)
{
    return (struct sluice_profile_record){.kind = SLUICE_PROFILE_KERNEL, .start = 1, .name = file_name(file, name)};
}

static void path_of(char *path, size_t size, uint32_t number, const char *again)
{
    char host[64] = "";
    gethostname(host, sizeof host - 1);
    snprintf(path, size, "%s/%s.%d.%u%s.profile", folder, host, (int)getpid(), number, again);
}

static off_t size_of(uint32_t number, const char *again)
{
    char path[256];
    struct stat status;
    path_of(path, sizeof path, number, again);
    return stat(path, &status) == 0 ? status.st_size : -1;
}

/* The `place`-th record; the END is the first. */
static struct sluice_profile_record record_of(uint32_t number, unsigned place)
{
    char path[256];
    struct sluice_profile_record record = {0};
    path_of(path, sizeof path, number, "");
    int file = open(path, O_RDONLY);
    CHECK(pread(file, &record, sizeof record, START + (off_t)place * RECORD) == (ssize_t)sizeof record);
    close(file);
    return record;
}

static struct profile_file *new_file(uint32_t number, uint64_t limit)
{
    struct sluice_profile_header header = {.vendor = SLUICE_PROFILE_NVIDIA, .number = number};
    return file_create(folder_fd, &header, limit);
}

static void test_names(void)
{
    struct profile_file *file = new_file(1, 1 << 20);
    char longest[2 * SLUICE_PROFILE_MAX_NAME];
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = 0;
    uint32_t gemm = file_name(file, "gemm"), cut = file_name(file, longest);
    CHECK(gemm == 1 && cut == 2 && file_name(file, "gemm") == gemm && file_name(file, longest) == cut);
    CHECK(file_name(file, "gem") == 3 && file_name(file, "gemmm") == 4 && file_name(file, "") == 5);
    struct sluice_profile_record one = kernel(file, "gemm");
    file_add(file, &one);
    CHECK_INT(record_of(1, 0).kind, 0); /* as of a process that runs */
    file_end(file, SLUICE_PROFILE_STOPPED, "why", 77);
    struct sluice_profile_record end = record_of(1, 0), first = record_of(1, 1), second = record_of(1, 3);
    CHECK_INT(end.kind, SLUICE_PROFILE_END);
    CHECK(end.loss.reason == SLUICE_PROFILE_STOPPED && end.loss.events == 1 && end.loss.cost == 77 && end.name != 0);
    CHECK(first.kind == SLUICE_PROFILE_NAME && first.slots == 1 && first.bytes == 4 && first.name == gemm);
    CHECK(second.slots == SLUICE_PROFILE_MAX_NAME / RECORD && second.bytes == SLUICE_PROFILE_MAX_NAME);
}

static void test_limit(void)
{
    struct profile_file *file = new_file(2, 100000);
    struct sluice_profile_record one = kernel(file, "gemm");
    for (int i = 0; i < 10000; i++) {
        file_add(file, &one);
    }
    CHECK_INT(file_failed(file), SLUICE_PROFILE_QUOTA);
    CHECK_INT(file_name(file, "one more"), 0);
    CHECK_INT(file_name(file, "gemm"), 1);
    file_end(file, SLUICE_PROFILE_STOPPED, NULL, 0);
    CHECK(size_of(2, "") <= 100000 && size_of(2, "") > 90000);
    struct sluice_profile_record end = record_of(2, 0);
    CHECK(end.loss.reason == SLUICE_PROFILE_QUOTA && end.loss.events < 10000);
    struct sluice_profile_record lost = record_of(2, (unsigned)((size_of(2, "") - START) / RECORD) - 1);
    CHECK(lost.kind == SLUICE_PROFILE_LOST && lost.loss.events + end.loss.events == 10000);
}

static void test_no_file_is_replaced(void)
{
    struct profile_file *file = new_file(3, 0), *other = new_file(3, 0);
    file_end(file, SLUICE_PROFILE_STOPPED, NULL, 0);
    file_end(other, SLUICE_PROFILE_EXIT, NULL, 0);
    CHECK(size_of(3, "") == START + RECORD && size_of(3, "-1") == START + RECORD);
    CHECK_INT(record_of(3, 0).loss.reason, SLUICE_PROFILE_STOPPED);
}

static void test_a_file_of_the_program_is_not_written(void)
{
    char theirs[128];
    int before = open("/dev/null", O_RDONLY); /* the number that the profile will have */
    close(before);
    struct profile_file *file = new_file(4, 0);
    struct sluice_profile_record one = kernel(file, "gemm");
    file_add(file, &one);
    file_flush(file);
    off_t size = size_of(4, "");
    snprintf(theirs, sizeof theirs, "%s/theirs", folder);
    int other = open(theirs, O_RDWR | O_CREAT, 0600);
    CHECK(dup2(other, before) == before);
    file_add(file, &one);
    file_flush(file);
    CHECK_INT(file_failed(file), SLUICE_PROFILE_DISK);
    file_end(file, SLUICE_PROFILE_STOPPED, "why", 0);
    CHECK(lseek(other, 0, SEEK_END) == 0 && lseek(before, 0, SEEK_END) == 0); /* and still open */
    CHECK(size_of(4, "") == size && record_of(4, 0).kind == 0);
    close(before);
    close(other);
}

static void clean_up(void)
{
    DIR *open_folder = fdopendir(folder_fd);
    for (struct dirent *entry = readdir(open_folder); entry != NULL; entry = readdir(open_folder)) {
        unlinkat(folder_fd, entry->d_name, 0);
    }
    closedir(open_folder);
    rmdir(folder);
}

int main(void)
{
    CHECK(mkdtemp(folder) != NULL);
    folder_fd = open(folder, O_RDONLY | O_DIRECTORY);
    test_names();
    test_limit();
    test_no_file_is_replaced();
    test_a_file_of_the_program_is_not_written();
    clean_up();
    return 0;
}
