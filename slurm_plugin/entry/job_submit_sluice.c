/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * job_submit/sluice: passes new and changed jobs to admission (admission_slurm.h), counts them, and reports changes to
 * the failover journal. Public headers of Slurm only.
 */
#include "slurm_compat.h"

#include "admission/admission_slurm.h"
#include "failover/failover.h"
#include "runtime/runtime.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

const char plugin_name[] = "Submissions checked and completed by Sluice";
const char plugin_type[] = "job_submit/sluice";
const uint32_t plugin_version = SLURM_VERSION_NUMBER;

static const uint64_t slow_ns = 50000; /* what a submission may cost */

static bool active;
static struct {
    _Atomic uint64_t *submitted, *modified, *refused, *total_ns, *slowest_ns, *slow;
} counters;

static void count(_Atomic uint64_t *kind, uint64_t began_ns, int code)
{
    uint64_t took = sluice_now_ns() - began_ns,
             slowest = atomic_load_explicit(counters.slowest_ns, memory_order_relaxed);
    atomic_fetch_add_explicit(kind, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(counters.total_ns, took, memory_order_relaxed);
    if (code)
        atomic_fetch_add_explicit(counters.refused, 1, memory_order_relaxed);
    if (took > slow_ns)
        atomic_fetch_add_explicit(counters.slow, 1, memory_order_relaxed);
    while (took > slowest && !atomic_compare_exchange_weak_explicit(counters.slowest_ns, &slowest, took,
                                                                    memory_order_relaxed, memory_order_relaxed))
        ;
}

extern int init(void)
{
    counters.submitted = sluice_status_counter("submit.submitted");
    counters.modified = sluice_status_counter("submit.modified");
    counters.refused = sluice_status_counter("submit.refused");
    counters.total_ns = sluice_status_counter("submit.total_ns");
    counters.slowest_ns = sluice_status_counter("submit.slowest_ns");
    counters.slow = sluice_status_counter("submit.over_50_us");
    static char version[24]; /* as Slurm writes it: 22.05.8 */
    snprintf(version, sizeof version, "%u.%02u.%u", (unsigned)SLURM_VERSION_MAJOR(plugin_version),
             (unsigned)SLURM_VERSION_MINOR(plugin_version), (unsigned)SLURM_VERSION_MICRO(plugin_version));
    if (sluice_in_slurmctld())
        active = sluice_controller_start(
            "job_submit", &(struct sluice_site){slurm_conf.slurm_conf, slurm_conf.state_save_location, version});
    return SLURM_SUCCESS;
}

extern SLUICE_FINI_TYPE fini(void)
{
    if (active)
        sluice_controller_stop("job_submit");
    active = false;
    SLUICE_FINI_RETURN;
}

/* What a change is about, for a report after a failover. */
static void journal_change(const job_desc_msg_t *job_desc, uint32_t submit_uid)
{
    char text[256];
    uint32_t job_id = SLUICE_DESCRIBED_JOB(job_desc);
    if (!sluice_failover_modified)
        return;
    if ((!job_id || job_id == NO_VAL) && job_desc->job_id_str)
        job_id = (uint32_t)strtoul(job_desc->job_id_str, NULL, 10);
    snprintf(text, sizeof text, "job %.40s:%s%s%s%s%s%s", job_desc->job_id_str ? job_desc->job_id_str : "",
             job_desc->priority == 0          ? " hold"
             : job_desc->priority == INFINITE ? " release"
             : job_desc->priority != NO_VAL   ? " priority"
                                              : "",
             job_desc->time_limit != NO_VAL ? " time limit" : "", job_desc->partition ? " partition" : "",
             job_desc->qos ? " QOS" : "", job_desc->dependency ? " dependency" : "",
             job_desc->begin_time ? " begin" : "");
    sluice_failover_modified(job_id, submit_uid, text);
}

static int check_submission(job_desc_msg_t *job_desc, char **err_msg)
{
    if (!active || sluice_settings_level() == SLUICE_LEVEL_OFF)
        return sluice_refuse_options(job_desc, err_msg);
    uint64_t began = sluice_now_ns();
    sluice_charge_begin();
    const struct sluice_settings *settings = sluice_settings_acquire();
    int code = sluice_submit(job_desc, settings, err_msg);
    sluice_settings_release(settings);
    count(counters.submitted, began, code);
    return code;
}

extern int job_submit(job_desc_msg_t *job_desc, uint32_t submit_uid, char **err_msg)
{
    (void)submit_uid; /* as in Slurm, an account's limits hold for anyone who submits for it */
    uint64_t began = sluice_now_ns();
    /* Slurm calls this for each component of a heterogeneous job in turn, then creates the jobs, in this thread. */
    if (active && sluice_failover_components)
        sluice_failover_components(job_desc->het_job_offset == NO_VAL ? 0 : job_desc->het_job_offset + 1);
    int code = check_submission(job_desc, err_msg);
    if (code == SLURM_SUCCESS)
        sluice_keep_trace(job_desc, sluice_now_ns() - began);
    return code;
}

#if SLUICE_JOB_MODIFY_HAS_MESSAGE
extern int job_modify(job_desc_msg_t *job_desc, struct job_record *job_ptr, uint32_t submit_uid, char **err_msg)
{
#else
extern int job_modify(job_desc_msg_t *job_desc, struct job_record *job_ptr, uint32_t submit_uid)
{
    char **err_msg = NULL;
#endif
    if (active && sluice_end_notice_apply && sluice_is_end_notice(job_desc->admin_comment))
        return sluice_end_notice_apply(job_ptr, job_desc->admin_comment, submit_uid);
    if (!active || sluice_settings_level() == SLUICE_LEVEL_OFF)
        return SLURM_SUCCESS;
    journal_change(job_desc, submit_uid);
    if (sluice_accrual_restore && sluice_settings_level() >= SLUICE_LEVEL_PLACE)
        sluice_accrual_restore(job_ptr);
    if (!sluice_modifies_request(job_desc))
        return SLURM_SUCCESS;
    uint64_t began = sluice_now_ns();
    /* As in Slurm, what an operator changes is not held to limits. */
    if (submit_uid == 0 || (sluice_is_operator && sluice_is_operator(submit_uid)))
        return SLURM_SUCCESS;
    const struct sluice_settings *settings = sluice_settings_acquire();
    int code = sluice_modify(job_desc, job_ptr, settings, err_msg);
    sluice_settings_release(settings);
    count(counters.modified, began, code);
    return code;
}
