/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The fence (fence.h) as a module of the controller, and how slurmctld shows that it is a backup again. */
#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

#include "controller/controller.h"
#include "controller/fence.h"

/* Slurm 22.05 can hang when it is to be a backup again moments after it took over: a thread waits for a signal that
 * came before it did. State is saved by then. The primary waits 30 s for it, and its supervisor (patience) longer. */
enum { GIVE_BACK_S = 20 };

/*
 * Slurm has no hook for it. A backup that gives its place back saves all state, then begins its main loop anew, where
 * it sets control_time to 0 and resume_backup to false. (A backup of 24.11 that was reconfigured while in charge has no
 * control_time: for it the second counts.) Asked every 50 ms by one thread; giving back takes a second at least.
 */
static bool relinquished(void)
{
    static bool led, asked;
    bool giving_back = slurmctld_config.resume_backup && slurmctld_config.shutdown_time;
    if (giving_back && difftime(time(NULL), slurmctld_config.shutdown_time) > GIVE_BACK_S)
        sluice_fence_end("sluice: slurmctld hangs while it gives its place back to the primary, and ends\n");
    bool back = (led && !control_time) || (asked && !slurmctld_config.resume_backup && !slurmctld_config.shutdown_time);
    led = !back && (led || control_time);
    asked = !back && (asked || slurmctld_config.resume_backup);
    return back;
}

static bool start(const struct sluice_site *site)
{
    return sluice_fence_start(site->state_folder, slurm_conf.slurmctld_timeout, relinquished);
}

static struct sluice_module module = {.name = "fence", .start = start, .stop = sluice_fence_stop};

__attribute__((constructor)) static void add(void)
{
    sluice_controller_module(&module);
}
