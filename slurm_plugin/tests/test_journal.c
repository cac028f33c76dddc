/* SPDX-License-Identifier: Apache-2.0 */
/* The journal's entries and segments: what is written is read, and what is damaged is not believed. */
#include "journal/journal.h"
#include "journal/segments.h"

#include "check.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[64];

static void fresh_folder(void)
{
    snprintf(folder, sizeof folder, "/tmp/test_journal.XXXXXX");
    CHECK(mkdtemp(folder));
}

static void remove_folder(void)
{
    DIR *listing = opendir(folder);
    for (struct dirent *entry; listing && (entry = readdir(listing));)
        unlinkat(dirfd(listing), entry->d_name, 0);
    if (listing)
        closedir(listing);
    rmdir(folder);
}

struct seen {
    unsigned count;
    uint32_t jobs[4096];
    unsigned types[4096];
    uint64_t last;
    unsigned stop_after;
};

static bool see(const struct sluice_journal_entry *entry, void *argument)
{
    struct seen *seen = argument;
    CHECK(entry->sequence > seen->last);
    seen->last = entry->sequence;
    if (entry->type == SLUICE_JOURNAL_OPEN)
        return true;
    seen->jobs[seen->count] = entry->job_id;
    seen->types[seen->count++] = entry->type;
    return !seen->stop_after || seen->count < seen->stop_after;
}

static struct sluice_segments read_all(struct seen *seen)
{
    struct sluice_segments found;
    *seen = (struct seen){0};
    CHECK(sluice_segments_read(folder, see, seen, &found));
    return found;
}

static struct sluice_journal *open_journal(struct sluice_journal_options options)
{
    struct sluice_segments found;
    CHECK(sluice_segments_read(folder, NULL, NULL, &found));
    options.folder = folder;
    options.about = "host 24.11";
    options.next = found.next;
    options.floor_us = found.last_us;
    options.segments = found.items;
    options.segment_count = found.count;
    struct sluice_journal *journal = sluice_journal_open(&options);
    CHECK(journal);
    free(found.items);
    return journal;
}

static void test_entry(void)
{
    uint8_t bytes[256], payload[] = "script";
    struct sluice_journal_entry entry = {SLUICE_JOURNAL_SUBMIT, 77, 5, 1700000000000000, payload, sizeof payload}, read;
    size_t used, size = sluice_journal_entry_size(&entry);
    sluice_journal_entry_encode(&entry, bytes);
    CHECK_INT(sluice_journal_entry_decode(bytes, sizeof bytes, &read, &used), SLUICE_JOURNAL_GOOD);
    CHECK_INT(used, size);
    CHECK_INT(read.job_id, 77);
    CHECK_INT(read.sequence, 5);
    CHECK_INT(read.at_us, 1700000000000000);
    CHECK_INT(memcmp(read.payload, payload, sizeof payload), 0);
    for (size_t length = 0; length < size; length++)
        CHECK_INT(sluice_journal_entry_decode(bytes, length, &read, &used), SLUICE_JOURNAL_TORN);
    for (size_t at = 0; at < size; at++) /* no changed bit is believed */
        for (unsigned bit = 0; bit < 8; bit++) {
            bytes[at] ^= (uint8_t)(1U << bit);
            CHECK(sluice_journal_entry_decode(bytes, size, &read, &used) != SLUICE_JOURNAL_GOOD);
            bytes[at] ^= (uint8_t)(1U << bit);
        }
    CHECK_STR(sluice_journal_entry_type_name(SLUICE_JOURNAL_REQUEUE), "requeue");
    CHECK_STR(sluice_journal_entry_type_name(99), "unknown");
}

static void test_written_is_read(void)
{
    fresh_folder();
    struct sluice_journal *journal = open_journal((struct sluice_journal_options){0});
    for (uint32_t job = 1; job <= 100; job++) {
        uint64_t ticket = sluice_journal_append(journal, SLUICE_JOURNAL_SUBMIT, job, &job, sizeof job, 1000 + job);
        CHECK_INT(ticket, job);
        CHECK_INT(sluice_journal_wait(journal, ticket, 10000), SLUICE_JOURNAL_DURABLE);
        CHECK(sluice_journal_is_durable(journal, ticket));
    }
    struct sluice_journal_stats stats;
    sluice_journal_describe(journal, &stats);
    CHECK_INT(stats.entries, 100);
    CHECK_INT(stats.queued, 0);
    CHECK_INT(stats.last_us, 1100);
    sluice_journal_close(journal);
    struct seen seen;
    struct sluice_segments found = read_all(&seen);
    CHECK_INT(seen.count, 100);
    CHECK_INT(seen.jobs[99], 100);
    CHECK_INT(found.highest_id, 100);
    CHECK_INT(found.next, 102);
    CHECK_INT(found.last_us, 1100);
    CHECK_INT(found.torn_bytes + found.lost_bytes + found.late_bytes, 0);
    CHECK_STR(found.problem, "");
    free(found.items);
    remove_folder();
}

/* Each submission that is durable has one line, and nothing else has; a long file ends, and one before it is kept. */
static void test_when_submissions_were_durable(void)
{
    enum { JOBS = 60000 };
    uint32_t job = 0;
    fresh_folder();
    struct sluice_journal *journal = open_journal((struct sluice_journal_options){0});
    for (uint64_t ticket = 0; job < JOBS; ticket++) {
        const bool submitted = ticket % 2 == 0;
        job += submitted;
        CHECK(sluice_journal_append(journal, submitted ? SLUICE_JOURNAL_SUBMIT : SLUICE_JOURNAL_START, job, "x", 1,
                                    INT64_C(1000000000000000) + job));
    }
    sluice_journal_close(journal);
    uint32_t lines = 0, last = 0;
    for (int which = 1; which >= 0; which--) {
        char path[128];
        uint32_t id;
        int64_t passed_us, durable_us;
        snprintf(path, sizeof path, "%s/acknowledged%s", folder, which ? ".1" : "");
        FILE *file = fopen(path, "r");
        for (; file && fscanf(file, "%" SCNu32 " %" SCNd64 " %" SCNd64 "\n", &id, &passed_us, &durable_us) == 3;
             lines++) {
            CHECK(!last || id == last + 1);
            CHECK(passed_us == INT64_C(1000000000000000) + id && durable_us > passed_us);
            last = id;
        }
        if (file)
            fclose(file);
    }
    CHECK_INT(last, JOBS);
    CHECK(lines > 20000); /* a MiB of them at the least */
    remove_folder();
}

/* Path of the only segment, or of the last. */
static void last_path(char *path, size_t size)
{
    struct seen seen;
    struct sluice_segments found = read_all(&seen);
    sluice_segment_path(folder, found.items[found.count - 1].first, path, size);
    free(found.items);
}

static void fill(uint32_t from, uint32_t to)
{
    struct sluice_journal *journal = open_journal((struct sluice_journal_options){0});
    for (uint32_t job = from; job <= to; job++)
        CHECK(sluice_journal_append(journal, SLUICE_JOURNAL_END, job, "0123456789", 10, job));
    sluice_journal_close(journal);
}

static void test_torn_end(void)
{
    struct seen seen;
    fresh_folder();
    fill(1, 10);
    char path[128];
    struct stat facts;
    last_path(path, sizeof path);
    CHECK(stat(path, &facts) == 0);
    CHECK(truncate(path, facts.st_size - 3) == 0);
    struct sluice_segments found = read_all(&seen);
    CHECK_INT(seen.count, 9);
    CHECK_INT(found.torn_bytes, 46 - 3);
    CHECK_STR(found.problem, "");
    free(found.items);
    fill(11, 12); /* the next controller goes on behind the good part */
    found = read_all(&seen);
    CHECK_INT(seen.count, 11);
    CHECK_INT(seen.jobs[9], 11);
    CHECK_STR(found.problem, "");
    free(found.items);
    remove_folder();
}

static void test_corrupt(void)
{
    struct seen seen;
    fresh_folder();
    fill(1, 10);
    char path[128];
    last_path(path, sizeof path);
    fill(11, 12);
    int file = open(path, O_RDWR);
    CHECK(pwrite(file, "x", 1, 200) == 1);
    close(file);
    struct sluice_segments found = read_all(&seen);
    CHECK_INT(seen.count, 3); /* the good part; what follows is not used, but its ids are known */
    CHECK(found.lost_bytes > 300);
    CHECK(strstr(found.problem, "corrupt at byte 184"));
    CHECK_INT(found.highest_id, 12);
    CHECK(found.next > 12);
    free(found.items);
    sluice_segment_path(folder, 12, path, sizeof path);
    CHECK(unlink(path) == 0); /* ids behind the damage, in the same segment */
    found = read_all(&seen);
    CHECK_INT(found.highest_id, 10);
    free(found.items);
    remove_folder();
}

/* A user's script that holds what looks like entries, in an entry that was cut off: none of it is believed. */
static void test_forged_in_a_torn_entry(void)
{
    struct seen seen;
    fresh_folder();
    fill(1, 10);
    uint8_t script[1000], *at = script;
    for (uint64_t sequence = 5; sequence <= 1000000; sequence *= 10) { /* too low, and much too high */
        struct sluice_journal_entry forged = {
            .type = SLUICE_JOURNAL_SUBMIT, .job_id = 60000000, .sequence = sequence, .payload = at, .length = 0};
        sluice_journal_entry_encode(&forged, at);
        at += SLUICE_JOURNAL_HEADER;
    }
    struct sluice_journal *journal = open_journal((struct sluice_journal_options){0});
    CHECK(sluice_journal_append(journal, SLUICE_JOURNAL_SUBMIT, 11, script, sizeof script, 11));
    sluice_journal_close(journal);
    char path[128];
    struct stat facts;
    last_path(path, sizeof path);
    CHECK(stat(path, &facts) == 0);
    CHECK(truncate(path, facts.st_size - 1) == 0);
    struct sluice_segments found = read_all(&seen);
    CHECK_INT(seen.count, 10);
    CHECK_INT(found.highest_id, 10);
    CHECK_INT(found.torn_bytes, SLUICE_JOURNAL_HEADER + sizeof script - 1);
    CHECK_STR(found.problem, "");
    free(found.items);
    remove_folder();
}

/* An entry whose length was damaged is not the segment's end. */
static void test_damaged_length(void)
{
    struct seen seen;
    fresh_folder();
    fill(1, 10);
    char path[128];
    last_path(path, sizeof path);
    int file = open(path, O_RDWR);
    CHECK(pwrite(file, "\0\0\1", 3, 184 + 8) == 3); /* 64 KiB */
    close(file);
    struct sluice_segments found = read_all(&seen);
    CHECK_INT(seen.count, 3);
    CHECK_INT(found.torn_bytes, 0);
    CHECK_INT(found.lost_bytes, 7 * 46);
    CHECK(strstr(found.problem, "corrupt at byte 184"));
    CHECK_INT(found.highest_id, 10);
    free(found.items);
    remove_folder();
}

static void test_late_writer(void)
{
    struct seen seen;
    fresh_folder();
    struct sluice_journal *old = open_journal((struct sluice_journal_options){0});
    CHECK_INT(sluice_journal_wait(old, sluice_journal_append(old, SLUICE_JOURNAL_SUBMIT, 1, "", 0, 1), 10000), 0);
    fill(2, 3); /* another controller takes over */
    CHECK_INT(sluice_journal_wait(old, sluice_journal_append(old, SLUICE_JOURNAL_SUBMIT, 99, "", 0, 2), 10000), 0);
    sluice_journal_close(old);
    struct sluice_segments found = read_all(&seen);
    CHECK_INT(seen.count, 3);
    CHECK_INT(seen.jobs[2], 3);
    CHECK(found.late_bytes > 0);
    CHECK(strstr(found.problem, "another controller"));
    CHECK_INT(found.highest_id, 99); /* not given out again */
    free(found.items);
    remove_folder();
}

static void test_trim_and_bound(void)
{
    struct seen seen;
    struct sluice_journal_stats stats;
    fresh_folder();
    struct sluice_journal *journal =
        open_journal((struct sluice_journal_options){.segment_bytes = 400, .max_bytes = 2000});
    uint64_t ticket = 0, refused = 0;
    for (uint32_t job = 1; job <= 60 && !refused; job++) {
        ticket = sluice_journal_append(journal, SLUICE_JOURNAL_END, job, "0123456789", 10, job);
        enum sluice_journal_result result = sluice_journal_wait(journal, ticket, 10000);
        if (result == SLUICE_JOURNAL_FAILED)
            refused = job;
        else
            CHECK_INT(result, SLUICE_JOURNAL_DURABLE);
    }
    CHECK(refused > 30);
    sluice_journal_describe(journal, &stats);
    CHECK_INT(stats.error, EDQUOT);
    CHECK_INT(stats.queued, 1);
    CHECK(stats.segments > 3 && stats.bytes <= 2000);
    CHECK(sluice_journal_withdraw(journal, ticket));
    CHECK(!sluice_journal_withdraw(journal, ticket));
    sluice_journal_trim(journal, (int64_t)refused + 1); /* all of it is in Slurm's state */
    ticket = sluice_journal_append(journal, SLUICE_JOURNAL_END, 1000, "", 0, 1000);
    CHECK_INT(sluice_journal_wait(journal, ticket, 10000), SLUICE_JOURNAL_DURABLE);
    sluice_journal_describe(journal, &stats);
    CHECK(stats.bytes < 1000);
    CHECK_INT(stats.error, 0);
    sluice_journal_close(journal);
    struct sluice_segments found = read_all(&seen);
    CHECK_STR(found.problem, "");
    CHECK_INT(seen.jobs[seen.count - 1], 1000);
    free(found.items);
    remove_folder();
}

static void test_full_disk(void)
{
    struct seen seen;
    struct sluice_journal_stats stats;
    fresh_folder();
    struct sluice_journal *journal = open_journal((struct sluice_journal_options){0});
    CHECK_INT(sluice_journal_wait(journal, sluice_journal_append(journal, SLUICE_JOURNAL_SUBMIT, 1, "", 0, 1), 9999),
              0);
    char path[128], *large = calloc(1, 100000);
    last_path(path, sizeof path);
    CHECK(large);
    /* No file may grow beyond 4 KiB: as on a full disk, a part is written before the error. */
    CHECK(signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
    struct rlimit before, limit;
    CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
    limit = before;
    limit.rlim_cur = 4096;
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    uint64_t ticket = sluice_journal_append(journal, SLUICE_JOURNAL_SUBMIT, 2, large, 100000, 2);
    CHECK_INT(sluice_journal_wait(journal, ticket, 10000), SLUICE_JOURNAL_FAILED);
    sluice_journal_describe(journal, &stats);
    CHECK_INT(stats.error, EFBIG);
    CHECK(sluice_journal_withdraw(journal, ticket));
    ticket = sluice_journal_append(journal, SLUICE_JOURNAL_SUBMIT, 3, large, 100000, 3);
    CHECK_INT(sluice_journal_wait(journal, ticket, 10000), SLUICE_JOURNAL_FAILED);
    CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
    CHECK_INT(sluice_journal_wait(journal, ticket, 10000), SLUICE_JOURNAL_FAILED);
    uint64_t next = sluice_journal_append(journal, SLUICE_JOURNAL_SUBMIT, 4, "", 0, 4); /* what waited goes with it */
    CHECK_INT(sluice_journal_wait(journal, next, 10000), SLUICE_JOURNAL_DURABLE);
    CHECK_INT(sluice_journal_wait(journal, ticket, 10000), SLUICE_JOURNAL_DURABLE);
    sluice_journal_close(journal);
    free(large);
    struct sluice_segments found = read_all(&seen);
    CHECK_INT(seen.count, 3);
    CHECK_INT(seen.jobs[1], 3);
    CHECK_INT(seen.jobs[2], 4);
    CHECK_INT(found.torn_bytes, 0); /* nothing half written stays */
    CHECK_STR(found.problem, "");
    free(found.items);
    remove_folder();
}

static void test_limits(void)
{
    fresh_folder();
    struct sluice_journal *journal = open_journal((struct sluice_journal_options){.max_queued = 1000});
    CHECK_INT(sluice_journal_append(journal, SLUICE_JOURNAL_SUBMIT, 1, folder, UINT32_MAX, 1), 0);
    char text[2000] = "";
    CHECK_INT(sluice_journal_append(journal, SLUICE_JOURNAL_SUBMIT, 1, text, sizeof text, 1), 0);
    uint64_t ticket = sluice_journal_append(journal, SLUICE_JOURNAL_SUBMIT, 1, "", 0, 5000);
    CHECK_INT(sluice_journal_wait(journal, ticket, 10000), 0);
    ticket = sluice_journal_append(journal, SLUICE_JOURNAL_SUBMIT, 1, "", 0, 1); /* the clock went back */
    CHECK_INT(sluice_journal_wait(journal, ticket, 10000), 0);
    struct sluice_journal_stats stats;
    sluice_journal_describe(journal, &stats);
    CHECK_INT(stats.last_us, 5000);
    sluice_journal_close(journal);
    remove_folder();
    struct sluice_segments found;
    CHECK(sluice_segments_read("/no/such/folder", NULL, NULL, &found));
    CHECK_INT(found.next, 1);
    CHECK(!sluice_segments_read("/proc/self/mem", NULL, NULL, &found));
    CHECK(sluice_journal_open(&(struct sluice_journal_options){.folder = "/no/such/folder/journal"}) == NULL);
    sluice_journal_close(NULL);
}

int main(void)
{
    test_entry();
    test_written_is_read();
    test_when_submissions_were_durable();
    test_torn_end();
    test_corrupt();
    test_forged_in_a_torn_entry();
    test_damaged_length();
    test_late_writer();
    test_trim_and_bound();
    test_full_disk();
    test_limits();
    return 0;
}
