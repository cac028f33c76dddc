/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/listing.h"

#include "rules/rules.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void sluice_listing_follow(struct sluice_listing_file *file, const char *folder, const char *name)
{
    *file = (struct sluice_listing_file){.there = false};
    snprintf(file->path, sizeof(file->path), "%s/%s", folder, name);
}

static bool as_seen(const struct sluice_listing_file *file, const struct stat *facts, bool there)
{
    return there == file->there && !file->failed &&
           (!there || (facts->st_mtim.tv_sec == file->seen.st_mtim.tv_sec &&
                       facts->st_mtim.tv_nsec == file->seen.st_mtim.tv_nsec && facts->st_ino == file->seen.st_ino &&
                       facts->st_size == file->seen.st_size && facts->st_dev == file->seen.st_dev));
}

/* The whole file; NULL and errno. */
static char *read_whole(const char *path, size_t *length, struct stat *facts)
{
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW), failed = 0;
    char *data = NULL;
    if (file < 0)
        return NULL;
    if (fstat(file, facts) < 0)
        failed = errno;
    else if (!S_ISREG(facts->st_mode))
        failed = EINVAL;
    else if (facts->st_size > SLUICE_LISTING_MAX_BYTES)
        failed = EFBIG;
    else if (!(data = malloc((size_t)facts->st_size + 1)))
        failed = ENOMEM;
    *length = 0;
    while (!failed && *length < (size_t)facts->st_size) {
        ssize_t got = read(file, data + *length, (size_t)facts->st_size - *length);
        if (got < 0 && errno != EINTR)
            failed = errno;
        else if (got == 0)
            break;
        else if (got > 0)
            *length += (size_t)got;
    }
    close(file);
    if (failed) {
        free(data);
        data = NULL;
    }
    errno = failed;
    return data;
}

enum sluice_listing sluice_listing_look(struct sluice_listing_file *file, char **data, size_t *length,
                                        struct sluice_error_text *text)
{
    struct stat facts = {0};
    bool there = lstat(file->path, &facts) == 0;
    *data = NULL;
    if ((!there && errno != ENOENT) || as_seen(file, &facts, there))
        return SLUICE_LISTING_SAME;
    const int failed = there && !(*data = read_whole(file->path, length, &facts)) ? errno : 0;
    const bool said = failed && failed == file->failed;
    if (failed)
        snprintf(text->text, sizeof(text->text), "%s", strerror(failed));
    file->seen = facts;
    file->there = there;
    file->failed = failed;
    return said ? SLUICE_LISTING_SAME : there ? SLUICE_LISTING_NEW : SLUICE_LISTING_GONE;
}

__attribute__((format(printf, 3, 4))) static enum sluice_error refuse(struct sluice_error_text *text,
                                                                      enum sluice_error error, const char *format, ...)
{
    va_list words;
    va_start(words, format);
    if (text)
        vsnprintf(text->text, sizeof(text->text), format, words);
    va_end(words);
    return error;
}

enum sluice_error sluice_listing_open(const char *data, size_t length, const char *kind, const char **lines,
                                      size_t *bytes, struct sluice_error_text *text)
{
    static const char key[] = "checksum = crc32:";
    enum { LAST = sizeof(key) - 1 + 8 + 1 };
    const char *last = length > LAST ? data + length - LAST : NULL;
    if (!last || last[-1] != '\n' || last[LAST - 1] != '\n' || memcmp(last, key, sizeof(key) - 1) != 0)
        return refuse(text, SLUICE_ERROR_CORRUPT, "the last line is not a checksum: the file was cut off");
    char wanted[9];
    const size_t body = length - LAST, named = strlen(kind);
    snprintf(wanted, sizeof(wanted), "%08" PRIx32, sluice_crc32(data, body));
    if (memcmp(wanted, last + sizeof(key) - 1, 8) != 0)
        return refuse(text, SLUICE_ERROR_CORRUPT, "the checksum is not the file's, which is %s", wanted);
    if (body <= named || memcmp(data, kind, named) != 0 || data[named] != ' ')
        return refuse(text, SLUICE_ERROR_INVALID, "line 1: not a file of kind %s", kind);
    if (body < named + 3 || memcmp(data + named, " 1\n", 3) != 0)
        return refuse(text, SLUICE_ERROR_VERSION, "line 1: a format that these plugins do not read");
    *lines = data + named + 3;
    *bytes = body - named - 3;
    return SLUICE_OK;
}
