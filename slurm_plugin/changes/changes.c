/* SPDX-License-Identifier: Apache-2.0 */
#include "changes/changes.h"

#include "runtime/runtime.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FIRST_ROOM = 4096, KEPT_FILES = 2 };
#define FILE_PREFIX "changes."

/* ---- which ---- */

struct entry {
    uint32_t id;   /* 0: free; Slurm's numbers begin at 1 */
    uint32_t look; /* the last one that saw it */
    uint64_t print;
};

struct sluice_changes {
    struct entry *table;
    uint32_t room, count; /* a power of 2; never more than half full */
    uint32_t look, seen;
    bool failed;
    uint32_t differ_count, gone_count;
    uint32_t differ[SLUICE_CHANGES_MAX_CHANGED], gone[SLUICE_CHANGES_MAX_CHANGED];
};

struct sluice_changes *sluice_changes_new(void)
{
    struct sluice_changes *changes = calloc(1, sizeof *changes);
    struct entry *table = calloc(FIRST_ROOM, sizeof *table);
    if (!changes || !table) {
        free(changes);
        free(table);
        return NULL;
    }
    changes->table = table;
    changes->room = FIRST_ROOM;
    return changes;
}

void sluice_changes_free(struct sluice_changes *changes)
{
    if (changes)
        free(changes->table);
    free(changes);
}

static struct entry *place_of(struct entry *table, uint32_t room, uint32_t id)
{
    uint32_t at = id * UINT32_C(0x9e3779b1) >> 7 & (room - 1);
    while (table[at].id && table[at].id != id)
        at = (at + 1) & (room - 1);
    return &table[at];
}

/* A table of another size; only those that the current look has seen, if `seen`. */
static bool rebuild(struct sluice_changes *changes, uint32_t room, bool seen)
{
    struct entry *table = calloc(room, sizeof *table);
    if (!table)
        return false;
    uint32_t count = 0;
    for (uint32_t i = 0; i < changes->room; i++) {
        const struct entry *old = &changes->table[i];
        if (old->id && (!seen || old->look == changes->look)) {
            *place_of(table, room, old->id) = *old;
            count++;
        }
    }
    free(changes->table);
    changes->table = table;
    changes->room = room;
    changes->count = count;
    return true;
}

void sluice_changes_begin(struct sluice_changes *changes)
{
    changes->look++;
    changes->seen = changes->differ_count = changes->gone_count = 0;
    changes->failed = false;
}

void sluice_changes_see(struct sluice_changes *changes, uint32_t id, uint64_t print)
{
    struct entry *entry = id ? place_of(changes->table, changes->room, id) : NULL;
    if (!entry || (entry->id && entry->look == changes->look))
        return;
    if (!entry->id) {
        if (changes->count >= SLUICE_CHANGES_MAX_JOBS ||
            (changes->count >= changes->room / 2 && !rebuild(changes, changes->room * 2, false))) {
            changes->failed = true;
            return;
        }
        entry = place_of(changes->table, changes->room, id);
        entry->id = id;
        entry->print = ~print;
        changes->count++;
    }
    changes->seen++;
    entry->look = changes->look;
    if (entry->print == print)
        return;
    entry->print = print;
    if (changes->look == 1)
        return;
    if (changes->differ_count < SLUICE_CHANGES_MAX_CHANGED)
        changes->differ[changes->differ_count++] = id;
    else
        changes->failed = true;
}

bool sluice_changes_end(struct sluice_changes *changes)
{
    if (changes->seen < changes->count) {
        for (uint32_t i = 0; i < changes->room; i++) {
            const struct entry *entry = &changes->table[i];
            if (!entry->id || entry->look == changes->look)
                continue;
            if (changes->gone_count < SLUICE_CHANGES_MAX_CHANGED)
                changes->gone[changes->gone_count++] = entry->id;
            else
                changes->failed = true;
        }
        uint32_t room = changes->room;
        while (room > FIRST_ROOM && changes->seen < room / 8)
            room /= 2;
        changes->failed |= !rebuild(changes, room, true);
    }
    return !changes->failed;
}

const uint32_t *sluice_changes_differ(const struct sluice_changes *changes, uint32_t *count)
{
    *count = changes->differ_count;
    return changes->differ;
}

const uint32_t *sluice_changes_gone(const struct sluice_changes *changes, uint32_t *count)
{
    *count = changes->gone_count;
    return changes->gone;
}

uint64_t sluice_print_text(uint64_t print, const char *text, unsigned width)
{
    if (!text)
        return sluice_print_number(print, 1);
    size_t left = strnlen(text, (size_t)SLUICE_CHANGES_MAX_TEXT * width);
    print = sluice_print_number(print, left + 2);
    for (; left; text += left < 8 ? left : 8, left -= left < 8 ? left : 8) {
        uint64_t word = 0;
        memcpy(&word, text, left < 8 ? left : 8);
        print = sluice_print_number(print, word);
    }
    return print;
}

/* ---- lines ---- */

static void append(struct sluice_changes_text *text, const char *bytes, size_t length)
{
    if (text->failed || text->length + length > SLUICE_CHANGES_MAX_LOOK_BYTES) {
        text->failed = true;
        return;
    }
    if (text->length + length > text->room) {
        size_t room = (text->length + length) * 2;
        char *moved = realloc(text->bytes, room);
        if (!moved) {
            text->failed = true;
            return;
        }
        text->bytes = moved;
        text->room = room;
    }
    memcpy(text->bytes + text->length, bytes, length);
    text->length += length;
}

void sluice_changes_put(struct sluice_changes_text *text, const char *raw)
{
    append(text, raw, strlen(raw));
}

void sluice_changes_put_field(struct sluice_changes_text *text, const char *field, unsigned width)
{
    append(text, ", \"", 3);
    size_t left = field ? strnlen(field, (size_t)SLUICE_CHANGES_MAX_TEXT * width) : 0;
    while (left) {
        size_t plain = 0;
        while (plain < left && (unsigned char)field[plain] >= ' ' && field[plain] != '"' && field[plain] != '\\' &&
               field[plain] != 0x7f)
            plain++;
        append(text, field, plain);
        field += plain;
        left -= plain;
        if (left) {
            char escaped[8];
            append(text, escaped, (size_t)snprintf(escaped, sizeof escaped, "\\u%04x", (unsigned char)*field));
            field++;
            left--;
        }
    }
    append(text, "\"", 1);
}

void sluice_changes_put_number(struct sluice_changes_text *text, uint64_t number)
{
    char digits[32];
    append(text, digits, (size_t)snprintf(digits, sizeof digits, ", \"%" PRIu64 "\"", number));
}

/* ---- files ---- */

static void file_name(const struct sluice_changes_files *files, uint64_t number, char *name, size_t size)
{
    snprintf(name, size, "%s/" FILE_PREFIX "%012" PRIu64, files->folder, number);
}

/* The largest number of a file that there is, and all files but the newest `keep` removed. */
static uint64_t clear_old(const struct sluice_changes_files *files, uint64_t keep)
{
    uint64_t largest = 0;
    for (int round = 0; round < 2; round++) { /* the largest is known after the first */
        DIR *folder = opendir(files->folder);
        if (!folder)
            return largest;
        for (const struct dirent *entry; (entry = readdir(folder));) {
            const char *digits = entry->d_name + sizeof FILE_PREFIX - 1;
            if (strncmp(entry->d_name, FILE_PREFIX, sizeof FILE_PREFIX - 1) != 0 || strlen(digits) != 12 ||
                strspn(digits, "0123456789") != 12)
                continue;
            uint64_t number = strtoull(digits, NULL, 10);
            largest = number > largest ? number : largest;
            if (round && number + keep <= largest)
                unlinkat(dirfd(folder), entry->d_name, 0);
        }
        closedir(folder);
    }
    return largest;
}

void sluice_changes_files_start(struct sluice_changes_files *files, const char *folder)
{
    *files = (struct sluice_changes_files){.file = -1};
    snprintf(files->folder, sizeof files->folder, "%s", folder);
    snprintf(files->epoch, sizeof files->epoch, "%ld-%" PRIu64, (long)getpid(), (uint64_t)sluice_wall_us());
}

static bool write_all(int file, const char *bytes, size_t length)
{
    while (length) {
        ssize_t written = write(file, bytes, length);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return false;
        bytes += written;
        length -= (size_t)written;
    }
    return true;
}

static bool next_file(struct sluice_changes_files *files, bool begin)
{
    char name[4096], line[96];
    if (files->file >= 0)
        close(files->file);
    uint64_t largest = clear_old(files, KEPT_FILES - 1);
    files->number = (largest > files->number ? largest : files->number) + 1;
    file_name(files, files->number, name, sizeof name);
    files->file = open(name, O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (files->file < 0)
        return false;
    int length = snprintf(line, sizeof line, "[\"%s\", \"%s\"]\n", begin ? "begin" : "on", files->epoch);
    files->bytes = (size_t)length;
    return write_all(files->file, line, (size_t)length);
}

bool sluice_changes_write(struct sluice_changes_files *files, const struct sluice_changes_text *text, bool begin)
{
    bool good = true;
    if (begin || files->file < 0 || files->bytes >= SLUICE_CHANGES_FILE_BYTES)
        good = next_file(files, begin || files->file < 0);
    good = good && write_all(files->file, text->bytes, text->length);
    files->bytes += text->length;
    if (!good && files->file >= 0) {
        int reason = errno;
        close(files->file);
        files->file = -1;
        errno = reason;
    }
    return good;
}

void sluice_changes_files_stop(struct sluice_changes_files *files)
{
    if (files->file >= 0)
        close(files->file);
    files->file = -1;
    if (files->number)
        clear_old(files, 0);
    files->number = 0;
}
