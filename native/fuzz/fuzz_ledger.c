/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A ledger's region that anyone may have written: opening and using it gives errors, never a crash or a hang. The input
 * is a list of 12-byte edits (offset, mask) to a region in use; an offset past its end replaces all of it by the rest
 * of the input.
 */
#include "sluice/core.h"

#include <stdlib.h>
#include <string.h>

static const struct sluice_ledger_shape shape = {.devices = 2, .owners = 2, .processes = 3};

static void use(void *region, size_t size)
{
    struct sluice_ledger *ledger;
    struct sluice_error_text text;
    if (sluice_ledger_new(region, size, 64, &ledger, &text))
        return;
    struct sluice_ledger_charge charge = {.asked = 5, .charged = 8, .device = 1, .committed = 1};
    struct sluice_ledger_usage usage;
    struct sluice_ledger_fragmentation fragmentation;
    struct sluice_ledger_process processes[2];
    uint32_t ids[2] = {1 << 16, 1 << 16}, count;
    uint64_t bytes;
    sluice_ledger_processes(ledger, 2, ids, processes, &count, &text);
    sluice_ledger_audit(ledger, &text);
    sluice_ledger_get_fragmentation(ledger, &fragmentation, &text);
    for (uint32_t i = 0; i < 2; i++) {
        sluice_ledger_device_usage(ledger, i, &usage, &text);
        sluice_ledger_owner_usage(ledger, i, i, &usage, &text);
        sluice_ledger_process_usage(ledger, ids[i], i, &usage, &text);
        sluice_ledger_release(ledger, ids[i], &charge, &text);
        if (!sluice_ledger_reserve(ledger, ids[i], i, 7, 0, &charge, &text))
            sluice_ledger_commit(ledger, ids[i], &charge, &text);
        sluice_ledger_set_context(ledger, ids[i], i, 9, &text);
    }
    sluice_ledger_join(ledger, 1, 12, 2, &ids[0], &text);
    sluice_ledger_reap(ledger, 11, 1, &bytes, &text);
    sluice_ledger_free(ledger);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t data_size)
{
    static _Alignas(SLUICE_LEDGER_ALIGNMENT) unsigned char region[1 << 12];
    size_t size = sluice_ledger_size(&shape);
    if (size > sizeof region)
        abort();
    struct sluice_ledger *ledger;
    struct sluice_ledger_device terms = {.capacity = 1000, .granularity = 8, .oversubscription = 1500};
    struct sluice_ledger_charge charge;
    uint32_t process;
    if (sluice_ledger_format(region, size, &shape, NULL) || sluice_ledger_new(region, size, 0, &ledger, NULL))
        abort();
    for (uint32_t i = 0; i < 2; i++)
        if (sluice_ledger_set_device(ledger, i, &terms, NULL) || sluice_ledger_set_quota(ledger, 0, i, 800, NULL))
            abort();
    if (sluice_ledger_join(ledger, 0, 11, 1, &process, NULL) ||
        sluice_ledger_reserve(ledger, process, 1, 100, 0, &charge, NULL))
        abort();
    sluice_ledger_free(ledger);

    while (data_size >= 12) {
        uint32_t offset;
        uint64_t mask, word;
        memcpy(&offset, data, 4);
        memcpy(&mask, data + 4, 8);
        data += 12;
        data_size -= 12;
        offset %= 2 * (uint32_t)size;
        if (offset + 8 > size) {
            memcpy(region, data, data_size < size ? data_size : size);
            break;
        }
        offset &= ~7u;
        memcpy(&word, region + offset, 8);
        word ^= mask;
        memcpy(region + offset, &word, 8);
    }
    use(region, size);
    return 0;
}
