/* SPDX-License-Identifier: Apache-2.0 */
/* What jobs draw, of any content: as it comes, and with the right checksum put under it. */
#include "runtime/draws.h"

#include "fuzz/checksummed.h"

static int compare(const struct sluice_draw *one, const struct sluice_draw *other)
{
    if (one->kind != other->kind)
        return one->kind < other->kind ? -1 : 1;
    return one->id != other->id ? (one->id < other->id ? -1 : 1) : strcmp(one->name, other->name);
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
    for (uint32_t i = 0; draws && i < draws->listed.count; i++) {
        const struct sluice_draw *line = &draws->lines[i];
        require(line->watts >= 0 && line->watts <= SLUICE_POWER_MAX_WATTS);
        require(!i || compare(&draws->lines[i - 1], line) < 0);
        require(line->kind != SLUICE_DRAW_JOB || sluice_draws_job(draws, line->id) == line->watts);
    }
    sluice_draws_release(draws);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return try_both("sluice-power", "1", data, size, try);
}
