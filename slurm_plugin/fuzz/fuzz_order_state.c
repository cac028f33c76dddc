/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The file in which the order keeps usage and run times: any bytes, as they are and with a right last line. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "order/order.h"
#include "rules/policy.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint32_t sum_of(const char *text)
{
    uint32_t sum = 0;
    for (const char *end; (end = strchr(text, '\n')); text = end + 1)
        sum = sluice_crc32(text, (size_t)(end - text)) + ((sum << 5) | (sum >> 27));
    return sum;
}

static void load(struct sluice_ranker *ranker, const char *path, const uint8_t *data, size_t size, bool complete)
{
    FILE *file = fopen(path, "w");
    char *text = calloc(1, size + 2);
    if (!file || !text)
        abort();
    memcpy(text, data, size);
    if (complete && size && text[strlen(text) ? strlen(text) - 1 : 0] != '\n')
        text[strlen(text)] = '\n';
    fwrite(text, 1, complete ? strlen(text) : size, file);
    if (complete)
        fprintf(file, "end %08" PRIx32 "\n", sum_of(text));
    fclose(file);
    free(text);
    struct sluice_error_text error;
    (void)sluice_ranker_load(ranker, path, &error);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    /* Made once: they are large. What is loaded adds up, as on no controller, which loads once. */
    static struct sluice_ranker *ranker;
    static uint32_t runs;
    const struct sluice_ranker_tenant tenant = {.account = "a", .shares = 1};
    const struct sluice_ranker_config config = {.half_life_s = 100, .tenants = &tenant, .tenant_count = 1};
    char path[64];
    if (!ranker && sluice_ranker_new(&config, &ranker, NULL) != SLUICE_OK)
        return 0;
    snprintf(path, sizeof path, "/dev/shm/fuzz_order_state.%d", (int)getpid());
    load(ranker, path, data, size, false);
    load(ranker, path, data, size, true);
    if (++runs % 64 == 0) { /* what was written is read */
        if (sluice_ranker_save(ranker, path, NULL) != SLUICE_OK || sluice_ranker_load(ranker, path, NULL) != SLUICE_OK)
            abort();
    }
    unlink(path);
    return 0;
}
