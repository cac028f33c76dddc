/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * prep/script with a PrologSlurmctld of ours, which keeps a gang's members CONFIGURING until all of them have nodes
 * (planner/gang.h). It comes before Slurm's own plugin of this name and links it: all that is not defined here is
 * stock's. On a node it gives the prolog how much of each GPU its job has (entry/prep_shares.h). The site's
 * PrologSlurmctld runs as it would without us; that of a gang's members only when all have nodes, as it is a prolog,
 * too. A job also waits CONFIGURING until its start is in the failover journal (failover/failover.h); then the site's
 * program runs.
 *
 * Slurm counts one asynchronous prolog of a plugin: stock's and ours never run at once. A member that waits has ours;
 * when it continues, either stock's takes over and ends it, or we end it.
 */
#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

#include "entry/prep_shares.h"
#include "failover/failover.h"
#include "planner/planner.h"
#include "runtime/runtime.h"

#include <dlfcn.h>

const char plugin_name[] = "Script PrEp plugin, gangs held by Sluice";
const char plugin_type[] = "prep/script";
const uint32_t plugin_version = SLURM_VERSION_NUMBER;

static struct {
    int (*init)(void);
    void (*fini)(void);
    void (*register_callbacks)(prep_callbacks_t *);
    int (*prolog)(job_env_t *, slurm_cred_t *);
    int (*prolog_slurmctld)(job_record_t *, bool *);
    void (*required)(prep_call_type_t, bool *);
} stock;
static bool active;
static struct sluice_gang_prolog prolog;
static struct sluice_failover_prolog launch;

/* Stock's function; POSIX lets dlsym's result become one. */
static bool find(void *library, const char *name, void *function)
{
    void *found = dlsym(library, name);
    memcpy(function, &found, sizeof found);
    if (!found)
        sluice_log_error("prep/sluice: Slurm's own prep/script has no %s", name);
    return found != NULL;
}

/* The site's own PrologSlurmctld; whether it continues in the background. */
static bool go(job_record_t *job)
{
    bool async = false;
    stock.prolog_slurmctld(job, &async);
    return async;
}

/* The start is journalled first, if the policy asks for it. */
static bool journal_and_go(job_record_t *job)
{
    return sluice_failover_started(job, &launch) || go(job);
}

extern int init(void)
{
    void *library = dlopen("prep_script.so", RTLD_LAZY | RTLD_NOLOAD);
    if (!library || !find(library, "init", &stock.init) || !find(library, "fini", &stock.fini) ||
        !find(library, "prep_p_register_callbacks", &stock.register_callbacks) ||
        !find(library, "prep_p_prolog", &stock.prolog) ||
        !find(library, "prep_p_prolog_slurmctld", &stock.prolog_slurmctld) ||
        !find(library, "prep_p_required", &stock.required))
        return SLURM_ERROR;
    if (sluice_in_slurmctld())
        active = sluice_controller_start(
            "prep", &(struct sluice_site){slurm_conf.slurm_conf, slurm_conf.state_save_location, SLURM_VERSION_STRING});
    return stock.init();
}

extern void fini(void)
{
    stock.fini();
    if (active)
        sluice_controller_stop("prep");
    active = false;
}

extern void prep_p_register_callbacks(prep_callbacks_t *callbacks)
{
    prolog = (struct sluice_gang_prolog){.go = journal_and_go, .done = callbacks->prolog_slurmctld};
    launch = (struct sluice_failover_prolog){.go = go, .done = callbacks->prolog_slurmctld};
    stock.register_callbacks(callbacks);
}

extern int prep_p_prolog(job_env_t *environment, slurm_cred_t *credential)
{
    sluice_prep_export_shares(environment, credential);
    return stock.prolog(environment, credential);
}

extern int prep_p_prolog_slurmctld(job_record_t *job, bool *async)
{
    /* slurmctld sends nothing to nodes any more, and would save the job as launched. A job that is saved without the end
     * of its prolog has it again in the next slurmctld. */
    if (active && slurmctld_config.shutdown_time) {
        *async = true;
        return SLURM_SUCCESS;
    }
    if (active && prolog.done && sluice_gang_prolog(job, &prolog)) {
        *async = true;
        return SLURM_SUCCESS;
    }
    if (!IS_JOB_RUNNING(job)) { /* requeued or cancelled before its prolog began */
        *async = false;
        return SLURM_SUCCESS;
    }
    if (active && launch.done && sluice_failover_started(job, &launch)) {
        *async = true;
        return SLURM_SUCCESS;
    }
    return stock.prolog_slurmctld(job, async);
}

extern void prep_p_required(prep_call_type_t type, bool *required)
{
    stock.required(type, required);
    /* Slurm asks once, when it starts: any later job may belong to a gang. */
    if (type == PREP_PROLOG_SLURMCTLD && active)
        *required = true;
}
