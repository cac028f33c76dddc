/* SPDX-License-Identifier: Apache-2.0 */
/* What jobs draw, of any content: as it comes, and with the right checksum put under it. */
#include "runtime/draws.h"

#include "fuzz/checksummed.h"

static void in_order(const struct sluice_draw *lines, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        require(lines[i].watts >= 0 && lines[i].watts <= SLUICE_POWER_MAX_WATTS);
        require(!i || lines[i - 1].id < lines[i].id ||
                (lines[i - 1].id == lines[i].id && strcmp(lines[i - 1].name, lines[i].name) < 0));
    }
}

static void try(const char *data, size_t length)
{
    struct sluice_draws *draws = NULL;
    struct sluice_error_text text;
    memset(text.text, 'x', sizeof(text.text));
    enum sluice_error error = sluice_draws_parse(data, length, &draws, &text);
    require((error == SLUICE_OK) == (draws != NULL));
    if (error)
        require(memchr(text.text, '\0', sizeof(text.text)) != NULL);
    if (draws) {
        in_order(draws->estimates, draws->estimate_count);
        in_order(draws->jobs, draws->job_count);
        in_order(draws->budgets, draws->budget_count);
        for (uint32_t i = 0; i < draws->job_count; i++)
            require(sluice_draws_job(draws, draws->jobs[i].id) == draws->jobs[i].watts);
    }
    sluice_draws_release(draws);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    try((const char *)data, size);
    size_t length = 0;
    char *whole = checksummed("sluice-power", "1", data, size, &length);
    try(whole, length);
    free(whole);
    return 0;
}
