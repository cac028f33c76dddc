/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/first.h"

#include "runtime/controller.h"
#include "runtime/published.h"

static struct sluice_listing_kind kind;
static struct sluice_published first = {.kind = &kind,
                                        .name = "first",
                                        .file = SLUICE_FIRST_FILE,
                                        .kept = "the jobs that went first still do",
                                        .lock = PTHREAD_MUTEX_INITIALIZER};

const struct sluice_job_times *sluice_first_acquire(void)
{
    return (const struct sluice_job_times *)sluice_published_acquire(&first);
}

static bool start(const struct sluice_site *site)
{
    return sluice_published_start(&first, site->state_folder);
}

static void stop(void)
{
    sluice_published_stop(&first);
}

__attribute__((constructor)) static void enlist(void)
{
    static struct sluice_module module = {.name = "first", .start = start, .stop = stop};
    kind = sluice_job_times_kind("sluice-first");
    sluice_controller_module(&module);
}
