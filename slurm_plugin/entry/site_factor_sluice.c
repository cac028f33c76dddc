/* SPDX-License-Identifier: GPL-2.0-or-later */
/* site_factor/sluice: the core's order of pending jobs as Slurm's site factor. */
#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

#include "failover/failover.h"
#include "order/order_slurm.h"
#include "runtime/runtime.h"

const char plugin_name[] = "Sluice's order of jobs";
const char plugin_type[] = "site_factor/sluice";
const uint32_t plugin_version = SLURM_VERSION_NUMBER;

static bool active;

int init(void)
{
    if (sluice_in_slurmctld())
        active = sluice_controller_start(
            "site_factor",
            &(struct sluice_site){slurm_conf.slurm_conf, slurm_conf.state_save_location, SLURM_VERSION_STRING});
    if (active && (!slurm_conf.priority_type || strcmp(slurm_conf.priority_type, "priority/multifactor") != 0))
        error(
            "site_factor/sluice: PriorityType=%s does not ask for site factors; set PriorityType=priority/multifactor",
            slurm_conf.priority_type);
#if !SLUICE_SELECT_NODEINFO /* priorities are prepared each time before a configuration is read to lead */
    if (sluice_in_slurmctld())
        sluice_fence_lead();
#endif
    return SLURM_SUCCESS;
}

SLUICE_FINI_TYPE fini(void)
{
    if (active)
        sluice_controller_stop("site_factor");
    active = false;
    SLUICE_FINI_RETURN;
}

#if SLUICE_SITE_FACTOR_RECONFIG
void site_factor_p_reconfig(void);
void site_factor_p_reconfig(void)
{
    sluice_order_wake();
}
#endif

void site_factor_p_set(job_record_t *job);
void site_factor_p_set(job_record_t *job)
{
    if (active)
        sluice_order_site_set(job);
}

void site_factor_p_update(void);
void site_factor_p_update(void)
{
    if (active)
        sluice_order_site_update();
}
