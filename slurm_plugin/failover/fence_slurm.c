/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The fence (fence.h) as a module of the controller, and how slurmctld reports that it is a backup again. */
#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

#include "failover/fence.h"
#include "runtime/runtime.h"

#include <pthread.h>

/*
 * In 24.11 a backup that is to give its place back hangs for 29 s: what answers the primary waits for the main loop,
 * which waits for all answers to be given. It is woken; an answer that is early does no harm, as the primary waits for
 * the lease, which we give back when all state is saved.
 */
enum { WAKE_S = 2, GIVE_BACK_S = 45 };

static void wake_main_loop(void)
{
    double since = difftime(time(NULL), slurmctld_config.shutdown_time);
    if (!slurmctld_config.resume_backup || since < WAKE_S)
        return;
#if SLUICE_SLURM_AT_LEAST(24, 5)
    pthread_cond_broadcast(&slurmctld_config.backup_finish_cond);
#endif
    if (since > GIVE_BACK_S)
        sluice_fence_end("sluice: slurmctld hangs while it gives its place back to the primary, and ends\n");
}

/*
 * Slurm has no hook for it. A backup that gives its place back saves all state, then begins its main loop again, where
 * it sets control_time to 0 and resume_backup to false. (A backup of 24.11 that was reconfigured while in charge has no
 * control_time: for it the second counts.) Asked every 50 ms by one thread; giving back takes a second at least.
 */
static bool relinquished(void)
{
    static bool led, asked;
    if (slurmctld_config.shutdown_time)
        wake_main_loop();
    bool back = (led && !control_time) || (asked && !slurmctld_config.resume_backup && !slurmctld_config.shutdown_time);
    led = !back && (led || control_time);
    asked = !back && (asked || slurmctld_config.resume_backup);
    return back;
}

/* No answer is sent: a controller that gives its place back shows it by the lease. */
static void *ask(void *unused)
{
    (void)unused;
    for (uint32_t i = 1; i < slurm_conf.control_cnt; i++) {
        slurm_msg_t request;
        slurm_msg_t_init(&request);
        slurm_msg_set_r_uid(&request, slurm_conf.slurm_user_id);
        slurm_set_addr(&request.address, (uint16_t)slurm_conf.slurmctld_port, slurm_conf.control_addr[i]);
        request.msg_type = REQUEST_CONTROL;
        (void)slurm_send_only_node_msg(&request);
    }
    return NULL;
}

/*
 * A primary asks the backups for its place once, as it starts. One that takes over in that very second does not listen
 * yet: it is asked again. A backup that waits takes no notice.
 */
static void ask_again(void)
{
    pthread_t thread;
    if (backup_inx != 0 || pthread_create(&thread, NULL, ask, NULL) != 0)
        return;
    pthread_detach(thread);
    info("sluice: asks the backup for its place again");
}

static bool start(const struct sluice_site *site)
{
    sluice_fence_at_gate(ask_again);
    return sluice_fence_start(site->state_folder, slurm_conf.slurmctld_timeout, relinquished);
}

static struct sluice_module module = {.name = "fence", .start = start, .stop = sluice_fence_stop};

__attribute__((constructor)) static void add(void)
{
    sluice_controller_module(&module);
}
