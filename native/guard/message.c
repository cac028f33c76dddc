/* SPDX-License-Identifier: Apache-2.0 */
#include "message.h"

#include <string.h>

enum { MAX_SECONDS = 86400, SLUID_LENGTH = 13, MAX_JOB_DIGITS = 10 };

const char *const guard_vendor_names[GUARD_VENDORS] = {"nvidia", "amd", "intel"};

struct words {
    const char *at;
    size_t left;
};

/* The next word; its length, 0 at the end. Words are parted by one blank. */
static size_t next_word(struct words *words, const char **word)
{
    const char *end = memchr(words->at, ' ', words->left);
    size_t length = end ? (size_t)(end - words->at) : words->left;
    *word = words->at;
    size_t taken = length + (end != NULL);
    words->at += taken;
    words->left -= taken;
    return length;
}

static bool is(const char *word, size_t length, const char *name)
{
    return length == strlen(name) && memcmp(word, name, length) == 0;
}

static bool take_number(struct words *words, uint32_t most, uint32_t *number)
{
    const char *word;
    size_t length = next_word(words, &word);
    if (length == 0 || length > MAX_JOB_DIGITS)
        return false;
    uint64_t sum = 0;
    for (size_t i = 0; i < length; i++) {
        if (word[i] < '0' || word[i] > '9')
            return false;
        sum = 10 * sum + (uint64_t)(word[i] - '0');
    }
    *number = (uint32_t)sum;
    return sum <= most;
}

static bool take_job(struct words *words, uint32_t *job)
{
    return take_number(words, UINT32_MAX, job) && *job > 0;
}

static bool vendor_of(const char *word, size_t length, enum guard_vendor *vendor)
{
    for (int one = 0; one < GUARD_VENDORS; one++) {
        if (is(word, length, guard_vendor_names[one])) {
            *vendor = (enum guard_vendor)one;
            return true;
        }
    }
    return false;
}

unsigned guard_vendors_of(const char *text, size_t length)
{
    unsigned found = 0;
    for (;;) {
        const char *comma = memchr(text, ',', length);
        size_t one = comma ? (size_t)(comma - text) : length;
        enum guard_vendor vendor;
        if (!vendor_of(text, one, &vendor) || found & 1U << vendor)
            return 0;
        found |= 1U << vendor;
        if (!comma)
            return found;
        text += one + 1;
        length -= one + 1;
    }
}

static bool plain(const char *word, size_t length)
{
    static const char others[] = "_-.:@\\";
    for (size_t i = 0; i < length; i++) {
        char one = word[i];
        if (!((one >= 'a' && one <= 'z') || (one >= 'A' && one <= 'Z') || (one >= '0' && one <= '9') ||
              memchr(others, one, sizeof others - 1)))
            return false;
    }
    return length > 0 && !is(word, length, ".") && !is(word, length, "..");
}

static bool names_job(const char *word, size_t length)
{
    static const char digits[] = "0123456789", sluid[] = "0123456789ABCDEFGHJKMNPQRSTVWXYZ";
    if (length > 4 && memcmp(word, "job_", 4) == 0)
        return length - 4 <= MAX_JOB_DIGITS && strspn(word + 4, digits) == length - 4;
    return length == SLUID_LENGTH && word[0] == 's' && strspn(word + 1, sluid) == length - 1;
}

bool guard_path_is_job(const char *path)
{
    if (path[0] != '/')
        return false;
    for (const char *word = path + 1;;) {
        size_t length = strcspn(word, "/");
        if (!plain(word, length))
            return false;
        if (!word[length])
            return names_job(word, length);
        word += length + 1;
    }
}

static bool take_path(struct words *words, char path[GUARD_PATH])
{
    const char *word;
    size_t length = next_word(words, &word);
    if (length == 0 || length >= GUARD_PATH || memchr(word, 0, length))
        return false;
    memcpy(path, word, length);
    path[length] = '\0';
    return guard_path_is_job(path);
}

static bool take_vendor(struct words *words, struct guard_message *message)
{
    const char *word;
    size_t length = next_word(words, &word);
    return vendor_of(word, length, &message->vendor);
}

static bool take_vendors(struct words *words, struct guard_message *message)
{
    const char *word;
    size_t length = next_word(words, &word);
    message->vendors = guard_vendors_of(word, length);
    return message->vendors != 0;
}

static bool take_rest(struct words *words, struct guard_message *message)
{
    switch (message->kind) {
    case GUARD_READY:
        return true;
    case GUARD_BEAT:
    case GUARD_SAMPLE:
        return take_vendor(words, message);
    case GUARD_WATCH:
        return take_job(words, &message->job) && take_vendors(words, message) && take_path(words, message->path);
    case GUARD_FORGET:
        return take_job(words, &message->job);
    case GUARD_BOUND:
        return take_number(words, MAX_SECONDS, &message->seconds);
    }
    return false;
}

bool guard_parse(const char *text, size_t length, struct guard_message *message)
{
    static const char *const kinds[] = {"ready", "beat", "sample", "watch", "forget", "bound"};
    if (length == 0 || length > GUARD_MESSAGE || text[length - 1] == ' ')
        return false;
    struct words words = {text, length};
    const char *word;
    size_t size = next_word(&words, &word);
    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; kind++) {
        if (is(word, size, kinds[kind])) {
            *message = (struct guard_message){.kind = (enum guard_kind)kind};
            return take_rest(&words, message) && words.left == 0;
        }
    }
    return false;
}
