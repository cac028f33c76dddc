/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of jobs that saved their work, of any content: as they come, and with the right checksum put under them. */
#include "runtime/saves.h"

#include "fuzz/checksummed.h"

static void try(const char *data, size_t length)
{
    struct sluice_saves *saves = NULL;
    struct sluice_error_text text;
    memset(text.text, 'x', sizeof(text.text));
    enum sluice_error error = sluice_saves_parse(data, length, &saves, &text);
    require((error == SLUICE_OK) == (saves != NULL));
    if (error)
        require(memchr(text.text, '\0', sizeof(text.text)) != NULL);
    for (uint32_t i = 0; saves && i < saves->listed.count; i++) {
        require(!i || saves->jobs[i - 1].job_id < saves->jobs[i].job_id);
        require(sluice_saves_of(saves, saves->jobs[i].job_id) == saves->jobs[i].at_s);
    }
    sluice_saves_release(saves);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return try_both("sluice-saves", "1", data, size, try);
}
