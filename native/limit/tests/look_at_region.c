/* SPDX-License-Identifier: Apache-2.0 */
/*
 * look_at_region FOLDER: for tests, what the preloaded library would make of a region. Strikes off the dead of all PID
 * namespaces, audits the ledger, and prints, as JSON, how many bytes and processes that were and who is left:
 * [bytes, count, [[pid, space, [bytes of each device]], ...]].
 */
#include "ledger_region.h"
#include "region.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

static enum sluice_error strike_off(struct limit_region *region, uint64_t *bytes, uint32_t *count,
                                    struct sluice_error_text *text)
{
    struct limit_self self = limit_self();
    uint64_t here = 0;
    uint32_t gone = 0;
    enum sluice_error error = limit_reap_dead(region, &self, LIMIT_FULL, &here, &gone, text);
    if (!error)
        error = limit_reap_dead(region, &self, LIMIT_EVERYWHERE, bytes, count, text);
    *bytes += here;
    *count += gone;
    return error;
}

static enum sluice_error print_processes(const struct limit_region *region, struct sluice_error_text *text)
{
    const char *between = "";
    for (uint32_t seat = 0; seat < region->file->processes; seat++) {
        struct sluice_ledger_process who;
        uint32_t id;
        enum sluice_error error = ledger_read_seat(region->ledger, seat, &id, &who, text);
        if (error)
            return error;
        if (!id)
            continue;
        printf("%s[%" PRIu32 ", %" PRIu64 ", [", between, who.pid & ((1u << LIMIT_PID_BITS) - 1),
               (uint64_t)region->spaces[who.pid >> LIMIT_PID_BITS]);
        for (uint32_t device = 0; device < region->file->count; device++) {
            uint64_t bytes = 0;
            if ((error = ledger_read_process(region->ledger, seat, device, &bytes, text)) != SLUICE_OK)
                return error;
            printf("%s%" PRIu64, device ? ", " : "", bytes);
        }
        printf("]]");
        between = ", ";
    }
    return SLUICE_OK;
}

int main(int count, char **words)
{
    struct limit_region region;
    struct sluice_error_text text = {{0}};
    uint64_t bytes = 0;
    uint32_t struck = 0;
    int at = count == 2 ? open(words[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (at < 0) {
        fprintf(stderr, "usage: look_at_region FOLDER\n");
        return 2;
    }
    enum sluice_error error = limit_region_open(at, words[1], geteuid(), &region, &text);
    if (!error)
        error = strike_off(&region, &bytes, &struck, &text);
    if (!error)
        error = sluice_ledger_audit(region.ledger, &text);
    if (!error) {
        printf("[%" PRIu64 ", %" PRIu32 ", [", bytes, struck);
        error = print_processes(&region, &text);
        printf("]]\n");
    }
    if (error)
        fprintf(stderr, "%s\n", text.text);
    return error ? 1 : 0;
}
