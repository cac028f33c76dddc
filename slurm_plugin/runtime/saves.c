/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/saves.h"

#include "runtime/controller.h"
#include "runtime/published.h"

static struct sluice_listing_kind kind;
static struct sluice_published saves = {.kind = &kind,
                                        .name = "saves",
                                        .file = SLUICE_SAVES_FILE,
                                        .kept = "what was known of saves stays so",
                                        .lock = PTHREAD_MUTEX_INITIALIZER};

const struct sluice_job_times *sluice_saves_acquire(void)
{
    return (const struct sluice_job_times *)sluice_published_acquire(&saves);
}

static bool start(const struct sluice_site *site)
{
    return sluice_published_start(&saves, site->state_folder);
}

static void stop(void)
{
    sluice_published_stop(&saves);
}

__attribute__((constructor)) static void enlist(void)
{
    static struct sluice_module module = {.name = "saves", .start = start, .stop = stop};
    kind = sluice_job_times_kind("sluice-saves");
    sluice_controller_module(&module);
}
