/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/saves.h"

#include "runtime/controller.h"
#include "runtime/published.h"

static struct sluice_listing_kind saves_kind, times_kind;
static struct sluice_published saves = {.kind = &saves_kind,
                                        .name = "saves",
                                        .file = SLUICE_SAVES_FILE,
                                        .kept = "what was known of saves stays so",
                                        .lock = PTHREAD_MUTEX_INITIALIZER};
static struct sluice_published times = {.kind = &times_kind,
                                        .name = "save-times",
                                        .file = SLUICE_SAVE_TIMES_FILE,
                                        .kept = "what was known of how long saves take stays so",
                                        .lock = PTHREAD_MUTEX_INITIALIZER};

const struct sluice_job_times *sluice_saves_acquire(void)
{
    return (const struct sluice_job_times *)sluice_published_acquire(&saves);
}

const struct sluice_job_times *sluice_save_times_acquire(void)
{
    return (const struct sluice_job_times *)sluice_published_acquire(&times);
}

static bool start_saves(const struct sluice_site *site)
{
    return sluice_published_start(&saves, site->state_folder);
}

static void stop_saves(void)
{
    sluice_published_stop(&saves);
}

static bool start_times(const struct sluice_site *site)
{
    return sluice_published_start(&times, site->state_folder);
}

static void stop_times(void)
{
    sluice_published_stop(&times);
}

__attribute__((constructor)) static void enlist(void)
{
    static struct sluice_module of_saves = {.name = "saves", .start = start_saves, .stop = stop_saves};
    static struct sluice_module of_times = {.name = "save-times", .start = start_times, .stop = stop_times};
    saves_kind = sluice_job_times_kind("sluice-saves");
    times_kind = sluice_job_times_kind("sluice-save-times");
    sluice_controller_module(&of_saves);
    sluice_controller_module(&of_times);
}
