/* SPDX-License-Identifier: Apache-2.0 */
/* Many threads hand over entries, wait, take back and trim; also under ThreadSanitizer. */
#include "journal/journal.h"

#include "check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

enum { THREADS = 8, EACH = 200 };

static struct sluice_journal *journal;
static atomic_uint durable, kept, calls;
static _Atomic uint64_t announced;

static void announce(uint64_t ticket, void *argument)
{
    CHECK(argument == &calls);
    CHECK(ticket > atomic_load(&announced));
    atomic_store(&announced, ticket);
    atomic_fetch_add(&calls, 1);
}

static void *work(void *argument)
{
    uint32_t base = *(const uint32_t *)argument;
    char payload[500] = "a script";
    for (uint32_t i = 0; i < EACH; i++) {
        struct sluice_journal_stats stats;
        uint64_t ticket = sluice_journal_append(journal, SLUICE_JOURNAL_SUBMIT, base + i, payload, sizeof payload, i);
        CHECK(ticket);
        if (i % 16 == 3 && sluice_journal_withdraw(journal, ticket))
            continue;
        atomic_fetch_add(&kept, 1);
        if (i % 4 == 0) {
            CHECK_INT(sluice_journal_wait(journal, ticket, 30000), SLUICE_JOURNAL_DURABLE);
            CHECK(sluice_journal_is_durable(journal, ticket));
            atomic_fetch_add(&durable, 1);
        }
        if (i % 50 == 0)
            sluice_journal_trim(journal, 0);
        sluice_journal_describe(journal, &stats);
    }
    return NULL;
}

static bool count(const struct sluice_journal_entry *entry, void *argument)
{
    *(unsigned *)argument += entry->type == SLUICE_JOURNAL_SUBMIT;
    return true;
}

int main(void)
{
    char folder[] = "/tmp/test_journal_threads.XXXXXX";
    CHECK(mkdtemp(folder));
    journal = sluice_journal_open(&(struct sluice_journal_options){
        .folder = folder, .segment_bytes = 65536, .durable = announce, .argument = &calls});
    CHECK(journal);
    pthread_t threads[THREADS];
    uint32_t bases[THREADS];
    for (uint32_t i = 0; i < THREADS; i++) {
        bases[i] = (i + 1) * 1000;
        CHECK_INT(pthread_create(&threads[i], NULL, work, &bases[i]), 0);
    }
    for (unsigned i = 0; i < THREADS; i++)
        CHECK_INT(pthread_join(threads[i], NULL), 0);
    sluice_journal_close(journal);
    CHECK_INT(atomic_load(&durable), THREADS * EACH / 4);
    CHECK(atomic_load(&calls) > 0);
    struct sluice_segments found;
    unsigned entries = 0;
    CHECK(sluice_segments_read(folder, count, &entries, &found));
    CHECK_INT(entries, atomic_load(&kept));
    CHECK_STR(found.problem, "");
    for (uint32_t i = 0; i < found.count; i++) {
        char path[128];
        sluice_segment_path(folder, found.items[i].first, path, sizeof path);
        CHECK(unlink(path) == 0);
    }
    free(found.items);
    char acknowledged[128];
    snprintf(acknowledged, sizeof acknowledged, "%s/acknowledged", folder);
    CHECK(unlink(acknowledged) == 0);
    CHECK(rmdir(folder) == 0);
    return 0;
}
