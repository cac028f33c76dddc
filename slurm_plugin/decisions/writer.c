/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The thread that writes decisions: files of a bounded size and number, each complete by itself. */
#include "decisions/decisions_internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "rules/rules.h"
#include "runtime/runtime.h"

enum {
    BUFFER_BYTES = 256 * 1024,
    SHORTEST_NAP_MS = 5,
    LONGEST_NAP_MS = 200,
    RETRY_S = 10, /* after a file could not be written */
    MAX_NODE_CHECK = SLUICE_MAX_NODES,
};
static const char MAGIC[8] = "SLUICEDR";
#define FILE_PREFIX "decisions."

static void file_name(const struct sluice_decision_recorder *recorder, uint64_t number, char *name, size_t size)
{
    snprintf(name, size, "%s/" FILE_PREFIX "%012" PRIu64, recorder->folder, number);
}

/* The number of a decision file of this name; false for any other. */
static bool file_number(const char *name, uint64_t *number)
{
    if (strncmp(name, FILE_PREFIX, sizeof FILE_PREFIX - 1) != 0)
        return false;
    name += sizeof FILE_PREFIX - 1;
    if (strlen(name) != 12 || strspn(name, "0123456789") != 12)
        return false;
    *number = strtoull(name, NULL, 10);
    return true;
}

/* Remove the oldest files until `keep` are left; returns the largest number there is. */
static uint64_t clear_old(const struct sluice_decision_recorder *recorder, uint32_t keep)
{
    uint64_t largest = 0;
    for (bool again = true; again;) {
        DIR *folder = opendir(recorder->folder);
        uint64_t number, smallest = UINT64_MAX, count = 0;
        if (!folder)
            return largest;
        for (const struct dirent *entry; (entry = readdir(folder));) {
            if (!file_number(entry->d_name, &number))
                continue;
            count++;
            largest = number > largest ? number : largest;
            smallest = number < smallest ? number : smallest;
        }
        closedir(folder);
        char name[4096];
        file_name(recorder, smallest, name, sizeof name);
        again = count > keep && unlink(name) == 0;
    }
    return largest;
}

static void complain(struct sluice_decision_recorder *recorder, const char *what, int reason)
{
    struct writer *writer = &recorder->writer;
    if (!writer->failure_logged)
        sluice_log_error("sluice: decisions in %s: %s: %s; trying again every %d s", recorder->folder, what,
                         strerror(reason), RETRY_S);
    writer->failure_logged = true;
    writer->retry = (time_t)sluice_monotonic_s() + RETRY_S;
    if (writer->file >= 0)
        close(writer->file);
    writer->file = -1;
    writer->buffer.length = 0;
}

static void write_out(struct sluice_decision_recorder *recorder)
{
    struct writer *writer = &recorder->writer;
    size_t done = 0;
    while (writer->file >= 0 && done < writer->buffer.length) {
        ssize_t wrote = write(writer->file, writer->buffer.data + done, writer->buffer.length - done);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote <= 0) {
            atomic_fetch_add(&recorder->failed, 1);
            complain(recorder, "write", wrote < 0 ? errno : ENOSPC);
            return;
        }
        done += (size_t)wrote;
        atomic_fetch_add(&recorder->written, (unsigned long long)wrote);
        writer->file_bytes += (uint64_t)wrote;
    }
    writer->buffer.length = 0;
}

static void put_fixed(struct bytes *to, uint64_t number, int bytes)
{
    uint8_t data[8];
    for (int i = 0; i < bytes; i++)
        data[i] = (uint8_t)(number >> (8 * i));
    sluice_put_bytes(to, data, (size_t)bytes);
}

/* Length, type, sequence number, time, payload, checksum of all that. */
static void append(struct sluice_decision_recorder *recorder, enum entry_type type, int64_t time_us,
                   const uint8_t *payload, size_t length)
{
    struct writer *writer = &recorder->writer;
    struct bytes *to = &writer->buffer;
    if (to->length > BUFFER_BYTES)
        write_out(recorder);
    size_t from = to->length;
    put_fixed(to, length, 4);
    put_fixed(to, type, 2);
    put_fixed(to, 0, 2);
    put_fixed(to, writer->sequence++, 8);
    put_fixed(to, (uint64_t)time_us, 8);
    sluice_put_bytes(to, payload, length);
    if (!to->full)
        put_fixed(to, sluice_crc32(to->data + from, to->length - from), 4);
    if (to->full) {
        atomic_fetch_add(&recorder->failed, 1);
        to->full = false;
        to->length = from;
    }
}

/* A new file begins with all that its entries will refer to. */
static void append_base(struct sluice_decision_recorder *recorder, int64_t time_us)
{
    struct writer *writer = &recorder->writer;
    sluice_put_bytes(&writer->buffer, MAGIC, sizeof MAGIC);
    put_fixed(&writer->buffer, SLUICE_DECISION_FORMAT, 4);
    put_fixed(&writer->buffer, 0, 4);
    if (!writer->topology.length)
        return;
    append(recorder, ENTRY_TOPOLOGY, time_us, writer->topology.data, writer->topology.length);
    for (uint32_t node = 0; node < writer->image_room; node++) {
        if (writer->images[node].length)
            append(recorder, ENTRY_IMAGE, time_us, writer->images[node].data, writer->images[node].length);
    }
}

static bool make_folder(struct sluice_decision_recorder *recorder)
{
    struct stat status;
    if (mkdir(recorder->folder, 0700) != 0 && errno != EEXIST) {
        complain(recorder, "cannot be made", errno);
        return false;
    }
    if (lstat(recorder->folder, &status) != 0 || !S_ISDIR(status.st_mode) || status.st_uid != geteuid() ||
        (status.st_mode & 0022)) {
        complain(recorder, "must be a folder of SlurmUser's that only it can write", EPERM);
        return false;
    }
    return true;
}

static bool open_file(struct sluice_decision_recorder *recorder)
{
    struct writer *writer = &recorder->writer;
    if ((time_t)sluice_monotonic_s() < writer->retry || !make_folder(recorder))
        return false;
    uint64_t largest = clear_old(recorder, recorder->max_files - 1);
    writer->number = (largest > writer->number ? largest : writer->number) + 1;
    char name[4096];
    file_name(recorder, writer->number, name, sizeof name);
    writer->file = open(name, O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (writer->file < 0) {
        complain(recorder, name, errno);
        return false;
    }
    writer->failure_logged = false;
    writer->file_bytes = 0;
    writer->buffer.length = 0;
    append_base(recorder, sluice_wall_us());
    return true;
}

static void close_file(struct sluice_decision_recorder *recorder)
{
    struct writer *writer = &recorder->writer;
    write_out(recorder);
    if (writer->file >= 0) {
        fsync(writer->file);
        close(writer->file);
    }
    writer->file = -1;
}

static void forget_images(struct writer *writer)
{
    for (uint32_t node = 0; node < writer->image_room; node++)
        free(writer->images[node].data);
    free(writer->images);
    writer->images = NULL;
    writer->image_room = 0;
}

/* An image begins with the node's number. */
static uint32_t image_node(const uint8_t *data, size_t length)
{
    uint64_t number = 0;
    for (size_t i = 0; i < length && i < 5; i++) {
        number |= (uint64_t)(data[i] & 0x7f) << (7 * i);
        if (!(data[i] & 0x80))
            break;
    }
    return number < MAX_NODE_CHECK ? (uint32_t)number : 0;
}

static void remember_image(struct sluice_decision_recorder *recorder, const uint8_t *data, size_t length)
{
    struct writer *writer = &recorder->writer;
    uint32_t node = image_node(data, length);
    uint32_t had = writer->image_room;
    uint8_t *copy = NULL;
    if (sluice_grow_array(&writer->images, &writer->image_room, node + 1, sizeof *writer->images)) {
        memset(writer->images + had, 0, (writer->image_room - had) * sizeof *writer->images);
        copy = realloc(writer->images[node].data, length);
    }
    if (!copy) {
        atomic_fetch_add(&recorder->failed, 1);
        return;
    }
    memcpy(copy, data, length);
    writer->images[node] = (struct image){.data = copy, .length = (uint32_t)length};
}

static void take_topology(struct writer *writer, const void *payload)
{
    free(writer->topology.data);
    memcpy(&writer->topology, payload, sizeof writer->topology);
    forget_images(writer);
}

static void record_lost(struct sluice_decision_recorder *recorder)
{
    struct writer *writer = &recorder->writer;
    uint64_t dropped = atomic_load(&recorder->dropped);
    if (dropped == writer->lost_recorded || writer->file < 0)
        return;
    uint8_t data[10];
    struct bytes payload = {.data = data, .room = sizeof data};
    sluice_put(&payload, dropped - writer->lost_recorded);
    append(recorder, ENTRY_LOST, sluice_wall_us(), payload.data, payload.length);
    writer->lost_recorded = dropped;
}

static void handle(struct sluice_decision_recorder *recorder, const struct slot *slot)
{
    struct writer *writer = &recorder->writer;
    const uint8_t *payload = (const uint8_t *)(slot + 1);
    size_t length = slot->payload;
    bool was_open = writer->file >= 0;
    if (slot->type == ENTRY_TOPOLOGY) {
        take_topology(writer, payload);
        payload = writer->topology.data;
        length = writer->topology.length;
    } else if (slot->type == ENTRY_IMAGE) {
        remember_image(recorder, payload, length);
    }
    if (was_open && writer->file_bytes + writer->buffer.length > recorder->max_file_bytes) {
        close_file(recorder);
        was_open = false;
    }
    if (!was_open) {
        if (!open_file(recorder)) {
            atomic_fetch_add(&recorder->failed, 1);
            return;
        }
        if (slot->type == ENTRY_TOPOLOGY || slot->type == ENTRY_IMAGE)
            return; /* the file's base has it */
    }
    append(recorder, slot->type, slot->time_us, payload, length);
}

static void show_counters(const struct sluice_decision_recorder *recorder)
{
    struct sluice_decision_counters counters;
    sluice_decision_read_counters(recorder, &counters);
    atomic_store(sluice_status_counter("decisions.recorded"), counters.recorded);
    atomic_store(sluice_status_counter("decisions.repeated"), counters.repeated);
    atomic_store(sluice_status_counter("decisions.dropped"), counters.dropped);
    atomic_store(sluice_status_counter("decisions.failed"), counters.failed);
    atomic_store(sluice_status_counter("decisions.written_bytes"), counters.written);
}

static void nap(uint32_t milliseconds)
{
    struct timespec time = {.tv_sec = milliseconds / 1000, .tv_nsec = (long)(milliseconds % 1000) * 1000000};
    nanosleep(&time, NULL);
}

void *sluice_decision_write_all(void *argument)
{
    struct sluice_decision_recorder *recorder = argument;
    uint32_t nap_ms = SHORTEST_NAP_MS;
    for (bool last = false; !last;) {
        last = atomic_load(&recorder->stop); /* what was recorded before is still written */
        bool worked = false;
        for (const struct slot *slot; (slot = sluice_ring_peek(&recorder->ring)); worked = true) {
            handle(recorder, slot);
            sluice_ring_done(&recorder->ring);
        }
        record_lost(recorder);
        write_out(recorder);
        atomic_store(&recorder->consumed, atomic_load(&recorder->ring.tail));
        if (worked && recorder->shared)
            show_counters(recorder);
        nap_ms = worked ? SHORTEST_NAP_MS : nap_ms * 2 < LONGEST_NAP_MS ? nap_ms * 2 : LONGEST_NAP_MS;
        if (!last)
            nap(nap_ms);
    }
    close_file(recorder);
    return NULL;
}

void sluice_decision_writer_free(struct writer *writer)
{
    forget_images(writer);
    free(writer->topology.data);
    free(writer->buffer.data);
}

bool sluice_decision_flush(struct sluice_decision_recorder *recorder, uint32_t timeout_ms)
{
    uint64_t wanted = atomic_load(&recorder->ring.head);
    for (uint32_t waited = 0; atomic_load(&recorder->consumed) < wanted; waited += SHORTEST_NAP_MS) {
        if (waited > timeout_ms)
            return false;
        nap(SHORTEST_NAP_MS);
    }
    return true;
}
