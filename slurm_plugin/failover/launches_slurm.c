/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * What a controller leaves that dies during a launch: between the moment at which a job's start is durable and its
 * node's answer.
 *
 * A job that was cancelled stays cancelled. slurmd, which cannot confirm the launch, asks the next controller to
 * requeue the job, and slurmctld does that with a cancelled one, too. A node cannot be distinguished there from an
 * administrator, so the job itself is marked as not to be requeued: one whose launch an earlier controller may have
 * begun, and that was cancelled when this one began to lead or soon after.
 *
 * A job whose launch was not sent is run again. Nobody knows which ones these are, so none is launched a second time.
 * slurmctld finds a job missing, and requeues it, when its node registers; but it asks a node for that at every
 * twentieth ping only, which is every half an hour with SlurmdTimeout=300. Therefore a controller that began to lead
 * asks the nodes of the batch jobs that an earlier one started, once: when a job that is not there counts as missing
 * (BatchStartTimeout), and their prologs are over (PrologEpilogTimeout), during which a node does not name the job.
 */
#include "failover/failover_internal_slurm.h"

#include <stdatomic.h>

#include "src/common/read_config.h"
#include "src/common/xmalloc.h"
#include "src/slurmctld/agent.h"
#include "src/slurmctld/locks.h"
#include "src/slurmctld/ping_nodes.h"

enum { LAUNCH_S = 600 }; /* from a job's start until its node no longer tries to confirm it: several time-outs */
enum { ROUNDING_S = 2 }; /* Slurm compares whole seconds */
enum { UNBOUNDED_PROLOG_S = 300 }; /* what a prolog may take where slurm.conf does not bound it */

static time_t led_since;      /* under the job write lock */
static _Atomic time_t ask_at; /* 0: all are asked */

static bool may_be_launched_by_another(const job_record_t *job)
{
    return job->batch_flag && job->start_time <= led_since && job->start_time > led_since - LAUNCH_S;
}

/* ---- cancelled ---- */

void sluice_failover_cancelled(job_record_t *job)
{
    if (!may_be_launched_by_another(job) || time(NULL) > led_since + LAUNCH_S || !job->details ||
        !job->details->requeue)
        return;
    job->details->requeue = 0;
    info("sluice: JobId=%u is cancelled and cannot be requeued: its node may still ask for it, as the last "
         "controller ended during its launch",
         job->job_id);
}

static int look(void *item, void *argument)
{
    job_record_t *job = item;
    (void)argument;
    if (IS_JOB_CANCELLED(job) && IS_JOB_COMPLETING(job))
        sluice_failover_cancelled(job);
    return 0;
}

/* ---- not sent ---- */

static time_t until_missing(void)
{
    uint16_t prolog = SLUICE_PROLOG_TIMEOUT;
    bool bounded = prolog && prolog != NO_VAL16;
    return slurm_conf.batch_start_timeout + MIN(DEFAULT_MSG_TIMEOUT, slurm_conf.msg_timeout) +
           (bounded ? prolog : UNBOUNDED_PROLOG_S) + ROUNDING_S;
}

static int add_node(void *item, void *argument)
{
    const job_record_t *job = item;
    agent_arg_t *request = argument;
    const node_record_t *node;
    if (!IS_JOB_RUNNING(job) || IS_JOB_CONFIGURING(job) || !may_be_launched_by_another(job) ||
        !(node = find_node_record(job->batch_host)))
        return 0;
    request->protocol_version = MIN(request->protocol_version, node->protocol_version);
    hostlist_push_host(request->hostlist, node->name);
    return 0;
}

void sluice_failover_ask_nodes(void)
{
    const slurmctld_lock_t locks = {.conf = READ_LOCK, .job = READ_LOCK, .node = READ_LOCK};
    if (!ask_at || time(NULL) < ask_at || !sluice_in_charge())
        return;
    ask_at = 0;
    agent_arg_t *request = xmalloc(sizeof *request); /* it and its list are the agent's then */
    request->msg_type = REQUEST_NODE_REGISTRATION_STATUS;
    request->protocol_version = SLURM_PROTOCOL_VERSION;
    request->hostlist = hostlist_create(NULL);
    set_agent_arg_r_uid(request, (uid_t)SLURM_AUTH_UID_ANY);
    lock_slurmctld(locks);
    list_for_each(job_list, add_node, request);
    unlock_slurmctld(locks);
    hostlist_uniq(request->hostlist);
    request->node_count = (uint32_t)hostlist_count(request->hostlist);
    if (!request->node_count) {
        hostlist_destroy(request->hostlist);
        xfree(request);
        return;
    }
    debug("sluice: %u nodes are asked whether jobs that the last controller started are there", request->node_count);
    ping_begin(); /* the agent ends it */
    agent_queue_request(request);
}

void sluice_failover_leads(void)
{
    led_since = time(NULL);
    ask_at = led_since + until_missing();
    list_for_each(job_list, look, NULL);
}
