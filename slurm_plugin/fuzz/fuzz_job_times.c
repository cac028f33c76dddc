/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of jobs and times, of any content: as they come, and with the right checksum put under them. */
#include "runtime/job_times.h"

#include "fuzz/checksummed.h"

static void try(const char *data, size_t length)
{
    struct sluice_job_times *times = NULL;
    struct sluice_error_text text;
    memset(text.text, 'x', sizeof(text.text));
    enum sluice_error error = sluice_job_times_parse("sluice-saves", data, length, &times, &text);
    require((error == SLUICE_OK) == (times != NULL));
    if (error)
        require(memchr(text.text, '\0', sizeof(text.text)) != NULL);
    for (uint32_t i = 0; times && i < times->listed.count; i++) {
        require(!i || times->jobs[i - 1].job_id < times->jobs[i].job_id);
        require(sluice_job_times_of(times, times->jobs[i].job_id) == times->jobs[i].at_s);
    }
    sluice_job_times_release(times);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return try_both("sluice-saves", "1", data, size, try);
}
