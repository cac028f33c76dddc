/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * select/cons_tres, with nodes chosen by Sluice. It comes before Slurm's own plugin of this name and links it: all that
 * is not defined here, plugin_type and plugin_id included, is found in stock's. Entry points only; hook/ decides.
 */
#include "hook/hook.h"

#include "admission/admission.h"
#include "failover/failover.h"
#include "runtime/runtime.h"

#include <dlfcn.h>

const char plugin_name[] = "Consumable resources on trackable resources, placed by Sluice";
const char plugin_type[] = "select/cons_tres";
const uint32_t plugin_version = SLURM_VERSION_NUMBER;

static struct {
    int (*init)(void);
    SLUICE_FINI_TYPE (*fini)(void);
    int (*reconfigure)(void);
    int (*node_init)(void);
#if SLUICE_SELECT_JOB_INIT
    int (*job_init)(struct xlist *);
#endif
    sluice_stock_test job_test;
    int (*job_begin)(job_record_t *);
    int (*job_fini)(job_record_t *);
    int (*job_expand)(job_record_t *, job_record_t *);
    int (*job_resized)(job_record_t *, node_record_t *);
    int (*job_suspend)(job_record_t *, bool);
    int (*job_resume)(job_record_t *, bool);
    int (*nodeinfo_set)(job_record_t *);
} stock;
static bool active;        /* in slurmctld, and the controller has started */
static bool reconfiguring; /* stock calls select_p_node_init itself then */

/* Before Slurm is asked for free GPUs: its counts are right, and those out of service are not free. */
static void correct_records(void)
{
    sluice_recount_apply();
    if (sluice_withdrawn_apply())
        sluice_mirrors_outdated();
}

/* Stock's function; POSIX lets dlsym's result become one. */
static bool find(void *library, const char *name, void *function)
{
    void *found = dlsym(library, name);
    memcpy(function, &found, sizeof(found));
    if (!found)
        sluice_log_error("select/sluice: Slurm's own select/cons_tres has no %s", name);
    return found != NULL;
}

static bool find_stock(void)
{
    void *library = dlopen("select_cons_tres.so", RTLD_LAZY | RTLD_NOLOAD);
    return library && find(library, "init", &stock.init) && find(library, "fini", &stock.fini) &&
           find(library, "select_p_reconfigure", &stock.reconfigure) &&
           find(library, "select_p_node_init", &stock.node_init) &&
#if SLUICE_SELECT_JOB_INIT
           find(library, "select_p_job_init", &stock.job_init) &&
#endif
           find(library, "select_p_job_test", &stock.job_test) &&
           find(library, "select_p_job_begin", &stock.job_begin) &&
           find(library, "select_p_job_fini", &stock.job_fini) &&
           find(library, "select_p_job_expand", &stock.job_expand) &&
           find(library, "select_p_job_resized", &stock.job_resized) &&
           find(library, "select_p_job_suspend", &stock.job_suspend) &&
           find(library, "select_p_job_resume", &stock.job_resume) &&
           find(library, "select_p_select_nodeinfo_set", &stock.nodeinfo_set);
}

extern int init(void)
{
    if (!find_stock())
        return SLURM_ERROR;
    if (sluice_in_slurmctld())
        active = sluice_controller_start(
            "select",
            &(struct sluice_site){slurm_conf.slurm_conf, slurm_conf.state_save_location, SLURM_VERSION_STRING});
    if (active && !sluice_hook_start(stock.job_test)) {
        sluice_controller_stop("select");
        active = false;
    }
    return stock.init();
}

static void stop(void)
{
    if (active) {
        sluice_recount_stop();
        sluice_withdrawn_stop();
        sluice_hook_stop();
        sluice_controller_stop("select");
    }
    active = false;
}

#if SLUICE_SLURM_AT_LEAST(25, 11)
extern void fini(void)
{
    stock.fini();
    stop();
}
#else
extern int fini(void)
{
    int rc = stock.fini();
    stop();
    return rc;
}
#endif

extern int select_p_reconfigure(void)
{
    if (active) {
        sluice_settings_wake();
        sluice_hook_reconfigured();
    }
    reconfiguring = true;
    int rc = stock.reconfigure();
    if (active) /* the last call when Slurm starts */
        sluice_failover_ready(stock.reconfigure);
    reconfiguring = false;
    if (active) {
        sluice_recount_forget();
        sluice_withdrawn_forget();
        correct_records();
        sluice_hook_share_created();
    }
    return rc;
}

#if SLUICE_SELECT_JOB_INIT
/* Job state has been loaded, and nothing has been derived from it yet. */
extern int select_p_job_init(struct xlist *jobs)
{
    int rc = stock.job_init(jobs);
    if (active)
        sluice_failover_loaded();
    return rc;
}
#endif

extern int select_p_node_init(void)
{
    if (active) {
        sluice_hook_reconfigured();
        sluice_recount_forget();
        sluice_withdrawn_forget();
        if (!reconfiguring)
            sluice_load_gres_plugins();
    }
#if !SLUICE_SELECT_NODEINFO
    if (active && !reconfiguring) {
        if (!sluice_fence_holds())
            sluice_fence_end("sluice: this Slurm gets the lease before it loads state only with PriorityType="
                             "priority/multifactor and PrioritySiteFactorPlugin=site_factor/sluice; slurmctld ends\n");
        sluice_failover_reconfigured();
    }
#endif
    return stock.node_init();
}

extern int select_p_job_test(job_record_t *job_ptr, bitstr_t *node_bitmap, uint32_t min_nodes, uint32_t max_nodes,
                             uint32_t req_nodes, uint16_t mode, struct xlist *preemptee_candidates,
                             struct xlist **preemptee_job_list, SLUICE_JOB_TEST_REST)
{
    if (!active)
        return stock.job_test(job_ptr, node_bitmap, min_nodes, max_nodes, req_nodes, mode, preemptee_candidates,
                              preemptee_job_list, SLUICE_JOB_TEST_REST_NAMES);
    if (mode == SELECT_MODE_WILL_RUN && job_ptr->details)
        sluice_charge_give_back(job_ptr->details->submit_time);
    sluice_recount_apply();
    if (sluice_recount_jobs()) {
        sluice_withdrawn_forget();
        sluice_mirrors_outdated();
    }
    correct_records();
    return sluice_hook_test(&(struct sluice_hook_call){
        .job = job_ptr,
        .nodes = node_bitmap,
        .min_nodes = min_nodes,
        .max_nodes = max_nodes,
        .req_nodes = req_nodes,
        .mode = mode,
        .preemptees = preemptee_candidates,
        .preempted = preemptee_job_list,
        .rest = {SLUICE_JOB_TEST_REST_NAMES},
    });
}

#if SLUICE_SELECT_UPDATE_NODE
/* A node has registered. Stock only looks at the number. */
extern int select_p_update_node_config(int index)
{
    if (active)
        sluice_recount_registered();
    return index < node_record_count ? SLURM_SUCCESS : SLURM_ERROR;
}
#endif

/* Newer Slurm marks a job that it has signalled to make room for another, and queues it again when it ends. A job that was
 * requeued meanwhile, as its work was saved, keeps the mark: the end of its next run would not count, and it would run
 * once more. */
static void clear_preemption_mark(job_record_t *job)
{
#ifdef GRACE_PREEMPT
    job->bit_flags &= ~(uint64_t)GRACE_PREEMPT;
#else
    (void)job;
#endif
}

extern int select_p_job_begin(job_record_t *job_ptr)
{
    if (active) {
        clear_preemption_mark(job_ptr);
        sluice_hook_begin(job_ptr);
    }
    return stock.job_begin(job_ptr);
}

/* Stock enters a starting job's allocation here. */
extern int select_p_select_nodeinfo_set(job_record_t *job_ptr)
{
    int rc = stock.nodeinfo_set(job_ptr);
    if (active)
        sluice_hook_started(job_ptr);
    return rc;
}

extern int select_p_job_fini(job_record_t *job_ptr)
{
    if (active) /* its GRES are taken from the counts */
        sluice_recount_apply();
    int rc = stock.job_fini(job_ptr);
    if (active) {
        sluice_withdrawn_look_again();
        correct_records();
        sluice_hook_changed(job_ptr, SLUICE_MIRROR_ENDED);
    }
    return rc;
}

extern int select_p_job_expand(job_record_t *from_job_ptr, job_record_t *to_job_ptr)
{
    int rc = stock.job_expand(from_job_ptr, to_job_ptr);
    if (active) {
        sluice_hook_changed(from_job_ptr, SLUICE_MIRROR_RUNS);
        sluice_hook_changed(to_job_ptr, SLUICE_MIRROR_RUNS);
    }
    return rc;
}

extern int select_p_job_resized(job_record_t *job_ptr, node_record_t *node_ptr)
{
    if (active)
        sluice_recount_apply();
    int rc = stock.job_resized(job_ptr, node_ptr);
    if (active) {
        sluice_withdrawn_look_again();
        correct_records();
        sluice_hook_changed(job_ptr, SLUICE_MIRROR_RUNS);
    }
    return rc;
}

/* Not `indf_susp`: by gang scheduling, which leaves the job its cores. */
extern int select_p_job_suspend(job_record_t *job_ptr, bool indf_susp)
{
    int rc = stock.job_suspend(job_ptr, indf_susp);
    if (active && indf_susp)
        sluice_hook_changed(job_ptr, SLUICE_MIRROR_SUSPENDED);
    return rc;
}

extern int select_p_job_resume(job_record_t *job_ptr, bool indf_susp)
{
    int rc = stock.job_resume(job_ptr, indf_susp);
    if (active && indf_susp)
        sluice_hook_changed(job_ptr, SLUICE_MIRROR_RUNS);
    return rc;
}
