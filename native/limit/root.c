/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Root's side of a region. It maps `limits`, which only root can write, and never the ledger, which the job's user
 * may shorten or fill with anything at any moment: a few KiB of it are copied, and the copy is read.
 */
#include "region.h"

#include "error.h"
#include "ledger_region.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct sluice_limit {
    const struct limit_file *file;
    size_t file_size;
    int ledger;
};

enum sluice_error sluice_limit_open(const char *folder, struct sluice_limit **limit, struct sluice_error_text *text)
{
    int at = open(folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (at < 0)
        return errno == ENOENT || errno == ENOTDIR
                   ? sluice_fail(text, SLUICE_ERROR_UNKNOWN, "%.160s: no such region", folder)
                   : limit_fail_system(text, "open", folder);
    struct sluice_limit made = {.ledger = -1};
    size_t size;
    enum sluice_error error = limit_map_limits(at, folder, geteuid(), O_RDWR, &made.file, &made.file_size, text);
    if (!error)
        error = limit_open_ledger(at, folder, geteuid(), O_RDONLY, &made.ledger, &size, text);
    close(at);
    struct sluice_limit *handle = error ? NULL : malloc(sizeof *handle);
    if (!error && !handle) {
        error = sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "no memory for a region's handle");
        close(made.ledger);
    }
    if (error) {
        limit_unmap_limits(made.file, made.file_size);
        return error;
    }
    *handle = made;
    *limit = handle;
    return SLUICE_OK;
}

void sluice_limit_close(struct sluice_limit *limit)
{
    if (!limit)
        return;
    limit_unmap_limits(limit->file, limit->file_size);
    close(limit->ledger);
    free(limit);
}

uint32_t sluice_limit_device_count(const struct sluice_limit *limit)
{
    return limit->file->count;
}

static enum sluice_error check_index(const struct sluice_limit *limit, uint32_t device, struct sluice_error_text *text)
{
    return device < limit->file->count
               ? SLUICE_OK
               : sluice_fail(text, SLUICE_ERROR_UNKNOWN, "device %" PRIu32 ": the region has %" PRIu32, device,
                             limit->file->count);
}

enum sluice_error sluice_limit_get_device(const struct sluice_limit *limit, uint32_t device,
                                          struct sluice_limit_device *terms, struct sluice_error_text *text)
{
    enum sluice_error error = check_index(limit, device, text);
    if (!error)
        *terms = limit->file->devices[device];
    return error;
}

enum sluice_error sluice_limit_set(struct sluice_limit *limit, uint32_t device, uint64_t bytes,
                                   struct sluice_error_text *text)
{
    enum sluice_error error = check_index(limit, device, text);
    if (!error)
        error = limit_check(device, &limit->file->devices[device], bytes, text);
    if (error)
        return error;
    /* The pages are made writable for one store; the preloaded library opened them for reading, and cannot. */
    struct limit_file *file = (struct limit_file *)(uintptr_t)limit->file;
    char what[32];
    snprintf(what, sizeof what, "device %" PRIu32, device);
    if (mprotect(file, limit->file_size, PROT_READ | PROT_WRITE) != 0)
        return limit_fail_system(text, "change the limit of", what);
    __atomic_store_n(&file->devices[device].limit, bytes, __ATOMIC_SEQ_CST);
    mprotect(file, limit->file_size, PROT_READ);
    return SLUICE_OK;
}

/* ---- figures ---- */

/* The part of the ledger that has the devices' figures, as it comes first in there. */
struct picture {
    struct ledger_header header;
    struct ledger_device devices[2 * SLUICE_LIMIT_MAX_DEVICES];
};

static enum sluice_error fail_damaged(const char *what, struct sluice_error_text *text)
{
    return sluice_fail(text, SLUICE_ERROR_CORRUPT, "the job's ledger %s; its figures are not known", what);
}

static enum sluice_error copy_ledger(const struct sluice_limit *limit, struct picture *picture,
                                     struct sluice_error_text *text)
{
    struct sluice_ledger_shape shape = limit_shape(limit->file->count, limit->file->processes);
    size_t size = sizeof picture->header + shape.devices * sizeof *picture->devices;
    ssize_t got = pread(limit->ledger, picture, size, (off_t)limit_ledger_offset(limit->file->processes));
    if (got < 0 || (size_t)got != size)
        return fail_damaged("is shorter than it was made", text);
    const struct ledger_header *header = &picture->header;
    if (header->magic != LEDGER_MAGIC || header->version != LEDGER_VERSION ||
        memcmp(&header->shape, &shape, sizeof shape) != 0)
        return fail_damaged("has a damaged head", text);
    return SLUICE_OK;
}

static enum sluice_error read_copy(const struct sluice_limit *limit, const struct picture *picture, uint32_t device,
                                   struct sluice_limit_usage *usage, struct sluice_error_text *text)
{
    const struct ledger_device *on_device = &picture->devices[device];
    const struct ledger_device *on_host = &picture->devices[limit->file->count + device];
    usage->limit = limit_in_force(limit->file, device);
    usage->peak = on_device->peak;
    usage->refused = on_device->refused;
    enum sluice_error error = ledger_read_copy(on_device, device, &usage->charged, text);
    if (!error)
        error = ledger_read_copy(on_host, limit->file->count + device, &usage->spilled, text);
    if (!error && (usage->peak > limit->file->devices[device].total || usage->refused >> 48 != 0))
        error = fail_damaged("has a peak or refusals that no job reaches", text);
    return error;
}

enum sluice_error sluice_limit_get_usage(struct sluice_limit *limit, uint32_t device, struct sluice_limit_usage *usage,
                                         struct sluice_error_text *text)
{
    enum { ATTEMPTS = 4 }; /* a copy made while the job allocates may not be of one moment */
    struct sluice_limit_usage found;
    struct picture picture;
    enum sluice_error error = check_index(limit, device, text);
    if (error)
        return error;
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
        error = copy_ledger(limit, &picture, text);
        if (!error)
            error = read_copy(limit, &picture, device, &found, text);
        if (!error)
            break;
    }
    if (!error)
        *usage = found;
    return error;
}
