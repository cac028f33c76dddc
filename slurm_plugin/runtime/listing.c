/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/listing.h"

#include "rules/rules.h"
#include "runtime/fail.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
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

/* The lines between the first and the last, of a content whose kind and checksum are right. */
static enum sluice_error open_lines(const char *data, size_t length, const char *kind, const char **lines,
                                    size_t *bytes, struct sluice_error_text *text)
{
    static const char key[] = "checksum = crc32:";
    enum { LAST = sizeof(key) - 1 + 8 + 1 };
    const char *last = length > LAST ? data + length - LAST : NULL;
    if (!last || last[-1] != '\n' || last[LAST - 1] != '\n' || memcmp(last, key, sizeof(key) - 1) != 0)
        return sluice_fail_with(text, SLUICE_ERROR_CORRUPT, "the last line is not a checksum: the file was cut off");
    char wanted[9];
    const size_t body = length - LAST, named = strlen(kind);
    snprintf(wanted, sizeof(wanted), "%08" PRIx32, sluice_crc32(data, body));
    if (memcmp(wanted, last + sizeof(key) - 1, 8) != 0)
        return sluice_fail_with(text, SLUICE_ERROR_CORRUPT, "the checksum is not the file's, which is %s", wanted);
    if (body <= named || memcmp(data, kind, named) != 0 || data[named] != ' ')
        return sluice_fail_with(text, SLUICE_ERROR_INVALID, "line 1: not a file of kind %s", kind);
    if (body < named + 3 || memcmp(data + named, " 1\n", 3) != 0)
        return sluice_fail_with(text, SLUICE_ERROR_VERSION, "line 1: a format that these plugins do not read");
    *lines = data + named + 3;
    *bytes = body - named - 3;
    return SLUICE_OK;
}

size_t sluice_line_word(struct sluice_line *line, const char **word)
{
    *word = line->at;
    if (!line->at)
        return 0;
    const char *stop = memchr(line->at, line->between, (size_t)(line->end - line->at));
    line->at = stop ? stop + 1 : NULL;
    return (size_t)((stop ? stop : line->end) - *word);
}

bool sluice_line_number(struct sluice_line *line, uint64_t most, uint64_t *number)
{
    const char *word;
    const size_t length = sluice_line_word(line, &word);
    *number = 0;
    for (size_t i = 0; i < length; i++) {
        if (word[i] < '0' || word[i] > '9')
            return false;
        *number = *number * 10 + (uint64_t)(word[i] - '0');
        if (*number > most)
            return false;
    }
    return length > 0;
}

bool sluice_line_name(struct sluice_line *line, char *name, size_t size)
{
    const char *word;
    const size_t length = sluice_line_word(line, &word);
    if (length == 0 || length >= size)
        return false;
    for (size_t i = 0; i < length; i++)
        if (word[i] <= ' ' || word[i] > '~')
            return false;
    memcpy(name, word, length);
    name[length] = '\0';
    return true;
}

struct sluice_listed *sluice_listed_new(const struct sluice_listing_kind *kind, uint32_t count)
{
    struct sluice_listed *made = calloc(1, kind->first + count * kind->size);
    if (made) {
        atomic_init(&made->users, 1);
        made->count = count;
    }
    return made;
}

void sluice_listed_release(const struct sluice_listed *listed)
{
    struct sluice_listed *shared = (struct sluice_listed *)(uintptr_t)listed;
    if (shared && atomic_fetch_sub(&shared->users, 1) == 1)
        free(shared);
}

/* All lines end with a newline. */
static enum sluice_error read_items(const struct sluice_listing_kind *kind, struct sluice_listed *made,
                                    const char *lines, size_t bytes, struct sluice_error_text *text)
{
    char *items = (char *)made + kind->first;
    const char *at = lines;
    for (uint32_t i = 0; i < made->count; i++) {
        const char *end = memchr(at, '\n', (size_t)(lines + bytes - at));
        struct sluice_line line = {.at = at, .end = end, .between = ' '};
        if (!kind->read(&line, items + i * kind->size))
            return sluice_fail_with(text, SLUICE_ERROR_INVALID, "line %" PRIu32 ": not %s", i + 2, kind->wanted);
        at = end + 1;
    }
    qsort(items, made->count, kind->size, kind->compare);
    for (uint32_t i = 1; i < made->count; i++)
        if (!kind->compare(items + (i - 1) * kind->size, items + i * kind->size)) {
            kind->twice(items + i * kind->size, text);
            return SLUICE_ERROR_INVALID;
        }
    return SLUICE_OK;
}

enum sluice_error sluice_listing_parse(const struct sluice_listing_kind *kind, const char *data, size_t length,
                                       struct sluice_listed **made, struct sluice_error_text *text)
{
    const char *lines = NULL;
    size_t bytes = 0;
    uint32_t count = 0;
    struct sluice_error_text unused;
    text = text ? text : &unused;
    *made = NULL;
    if (length > SLUICE_LISTING_MAX_BYTES)
        return sluice_fail_with(text, SLUICE_ERROR_CAPACITY, "larger than %d bytes", SLUICE_LISTING_MAX_BYTES);
    enum sluice_error error = open_lines(data, length, kind->name, &lines, &bytes, text);
    if (error)
        return error;
    for (size_t i = 0; i < bytes; i++)
        count += lines[i] == '\n';
    if (count > kind->most)
        return sluice_fail_with(text, SLUICE_ERROR_CAPACITY, "more than %" PRIu32 " %s", kind->most, kind->items);
    struct sluice_listed *listed = sluice_listed_new(kind, count);
    if (!listed)
        return sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "no memory");
    error = read_items(kind, listed, lines, bytes, text);
    if (error)
        sluice_listed_release(listed);
    else
        *made = listed;
    return error;
}

bool sluice_listing_end(FILE *to, char **text, size_t *length)
{
    fflush(to);
    if (*text)
        fprintf(to, "checksum = crc32:%08" PRIx32 "\n", sluice_crc32(*text, *length));
    return fclose(to) == 0 && *text;
}

bool sluice_listing_write(const char *path, const char *text, size_t length)
{
    char fresh[4096];
    int size = snprintf(fresh, sizeof fresh, "%s.new", path);
    if (size < 0 || (size_t)size >= sizeof fresh) {
        errno = ENAMETOOLONG;
        return false;
    }
    int file = open(fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
    bool good = file >= 0 && write(file, text, length) == (ssize_t)length && fsync(file) == 0;
    good = file >= 0 && close(file) == 0 && good;
    return good && rename(fresh, path) == 0;
}
