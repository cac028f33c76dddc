/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * All that differs between Slurm's versions: 22.05, 24.11 and 26.05. Nothing else in slurm_plugin asks for a version.
 *
 * Before including it, define SLUICE_SLURM_PRIVATE in files that are built against a configured source tree.
 */
#ifndef SLUICE_SLURM_COMPAT_H
#define SLUICE_SLURM_COMPAT_H

#ifdef SLUICE_SLURM_PRIVATE
#include "config.h"
#endif

#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>

#include <stdbool.h>
#include <stdint.h>

#define SLUICE_SLURM_AT_LEAST(major, minor) (SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM((major), (minor), 0))

/* job_modify has a last parameter for a message to the user. */
#if SLUICE_SLURM_AT_LEAST(23, 2)
#define SLUICE_JOB_MODIFY_HAS_MESSAGE 1
#else
#define SLUICE_JOB_MODIFY_HAS_MESSAGE 0
#endif

/* fini of a plugin returns nothing; use: SLUICE_FINI_TYPE fini(void) { ...; SLUICE_FINI_RETURN; } */
#if SLUICE_SLURM_AT_LEAST(25, 11)
#define SLUICE_FINI_TYPE void
#define SLUICE_FINI_RETURN return
#else
#define SLUICE_FINI_TYPE int
#define SLUICE_FINI_RETURN return SLURM_SUCCESS
#endif

/* site_factor_p_reconfig is asked for. */
#if SLUICE_SLURM_AT_LEAST(24, 5)
#define SLUICE_SITE_FACTOR_RECONFIG 0
#else
#define SLUICE_SITE_FACTOR_RECONFIG 1
#endif

/* The job that a change is about. */
#if SLUICE_SLURM_AT_LEAST(25, 11)
#define SLUICE_DESCRIBED_JOB(description) ((description)->step_id.job_id)
#else
#define SLUICE_DESCRIBED_JOB(description) ((description)->job_id)
#endif

/* A job's flag that each of its tasks has shares of a GPU of its own. */
#ifdef GRES_ONE_TASK_PER_SHARING
#define SLUICE_ONE_TASK_PER_SHARING(flags) (((flags) & GRES_ONE_TASK_PER_SHARING) != 0)
#define SLUICE_SET_ONE_TASK_PER_SHARING(flags) ((flags) |= GRES_ONE_TASK_PER_SHARING)
#else
#define SLUICE_ONE_TASK_PER_SHARING(flags) ((void)(flags), false)
#define SLUICE_SET_ONE_TASK_PER_SHARING(flags) ((void)(flags))
#endif
/* Tasks of one node may have shares of different GPUs. From 25.11 on the bit is one of an enumeration. */
#if SLUICE_SLURM_AT_LEAST(25, 11)
#define MULTIPLE_SHARING_GRES_PJ SELECT_MULTIPLE_SHARING_GRES_PJ
#endif
#if defined(MULTIPLE_SHARING_GRES_PJ) && defined(GRES_ONE_TASK_PER_SHARING)
#define SLUICE_TASKS_SHARE_SEVERAL ((slurm_conf.select_type_param & MULTIPLE_SHARING_GRES_PJ) != 0)
#else
#define SLUICE_TASKS_SHARE_SEVERAL false
#endif

/* GRES in a request are written gres/gpu; before, gres:gpu. */
#if SLUICE_SLURM_AT_LEAST(23, 11)
#define SLUICE_GRES_SLASH true
#else
#define SLUICE_GRES_SLASH false
#endif

/* srun, sbatch and salloc have --segment of their own. */
#define SLUICE_HAS_SEGMENT SLUICE_SLURM_AT_LEAST(24, 5)
#if SLUICE_HAS_SEGMENT
#define SLUICE_DESCRIPTION_SEGMENT(description) ((description)->segment_size)
#define SLUICE_NEVER_IN_TOPOLOGY ESLURM_REQUESTED_TOPO_CONFIG_UNAVAILABLE
#else
#define SLUICE_DESCRIPTION_SEGMENT(description) 0
#define SLUICE_NEVER_IN_TOPOLOGY SLURM_ERROR
#endif
/* Topologies may be in topology.yaml, which slurm.conf does not name. */
#define SLUICE_TOPOLOGY_FILE SLUICE_SLURM_AT_LEAST(25, 5)

/* A job that names more nodes than it asks for gets some of them; before, all. */
#define SLUICE_NODELIST_OFFERS SLUICE_SLURM_AT_LEAST(24, 5)

/* A list of hosts: slurm_hostlist_create and the functions with it. */
#if SLUICE_SLURM_AT_LEAST(23, 11)
typedef hostlist_t *sluice_hostlist;
#else
typedef hostlist_t sluice_hostlist;
#endif

/* Slurm's allocator, which it frees a request's strings with; exported by libslurmfull of every version. */
extern char *slurm_xstrdup(const char *text);
extern void slurm_xfree(void **item);
extern void *slurm_xrecalloc(void **item, size_t count, size_t size, bool clear, bool may_fail, const char *file,
                             int line, const char *function);

/* The configuration that slurmctld runs with; in libslurmfull of every version, its structure in the public header. */
extern slurm_conf_t slurm_conf;

#ifdef SLUICE_SLURM_PRIVATE
#define SLUICE_SLURM_RELEASE (SLURM_VERSION_NUMBER & ~0xff)
#if SLUICE_SLURM_RELEASE != SLURM_VERSION_NUM(22, 5, 0) && SLUICE_SLURM_RELEASE != SLURM_VERSION_NUM(24, 11, 0) &&     \
    SLUICE_SLURM_RELEASE != SLURM_VERSION_NUM(26, 5, 0)
#error "This version of Slurm has not been tried: the plugins are made for 22.05, 24.11 and 26.05"
#endif

#include "src/slurmctld/slurmctld.h"
#if SLUICE_SLURM_AT_LEAST(24, 11)
#include "src/interfaces/select.h"
#else
#include "src/common/select.h"
#endif

/* select_p_job_test: the parameters behind preemptee_job_list, and their names for a call of stock's function. */
#if SLUICE_SLURM_AT_LEAST(23, 11)
#define SLUICE_JOB_TEST_REST resv_exc_t *reservations, will_run_data_t *will_run
#define SLUICE_JOB_TEST_REST_NAMES reservations, will_run
#else
#define SLUICE_JOB_TEST_REST bitstr_t *excluded_cores
#define SLUICE_JOB_TEST_REST_NAMES excluded_cores
#endif

/* select_p_job_test's last parameters as one thing, as arguments of a call, and what they say: that cores or GRES are
 * kept for a reservation, that a later time is meant. */
#if SLUICE_SLURM_AT_LEAST(23, 11)
struct sluice_job_test_rest {
    resv_exc_t *reservations;
    will_run_data_t *will_run;
};
#define SLUICE_REST_ARGUMENTS(rest) (rest).reservations, (rest).will_run
#define SLUICE_REST_RESERVED(rest)                                                                                     \
    ((rest).reservations &&                                                                                            \
     ((rest).reservations->exc_cores || (rest).reservations->gres_list_exc || (rest).reservations->gres_list_inc))
#define SLUICE_REST_FUTURE(rest, now) ((rest).will_run && (rest).will_run->start > (now))
#else
struct sluice_job_test_rest {
    bitstr_t *excluded_cores;
};
#define SLUICE_REST_ARGUMENTS(rest) (rest).excluded_cores
#define SLUICE_REST_RESERVED(rest) ((rest).excluded_cores != NULL)
#define SLUICE_REST_FUTURE(rest, now) false
#endif

/* Cores that stock must not use in one call of its job_test, as if they were reserved: begin, any number of cores, end.
 * `rest` is then the call's. */
#if SLUICE_SLURM_AT_LEAST(23, 11)
struct sluice_core_exclusion {
    resv_exc_t reservations;
};
static inline void sluice_exclusion_begin(struct sluice_core_exclusion *exclusion, struct sluice_job_test_rest *rest)
{
    if (rest->reservations)
        exclusion->reservations = *rest->reservations;
    else
        exclusion->reservations = (resv_exc_t){0};
    exclusion->reservations.exc_cores = xcalloc((size_t)node_record_count, sizeof(bitstr_t *));
    rest->reservations = &exclusion->reservations;
}
static inline void sluice_exclusion_core(struct sluice_core_exclusion *exclusion, uint32_t node, uint32_t core)
{
    bitstr_t **cores = &exclusion->reservations.exc_cores[node];
    if (!*cores)
        *cores = bit_alloc(node_record_table_ptr[node]->tot_cores);
    bit_set(*cores, core);
}
static inline void sluice_exclusion_end(struct sluice_core_exclusion *exclusion)
{
    for (int node = 0; node < node_record_count; node++)
        FREE_NULL_BITMAP(exclusion->reservations.exc_cores[node]);
    xfree(exclusion->reservations.exc_cores);
}
#else
struct sluice_core_exclusion {
    bitstr_t *cores;
};
static inline void sluice_exclusion_begin(struct sluice_core_exclusion *exclusion, struct sluice_job_test_rest *rest)
{
    exclusion->cores = bit_alloc(cr_get_coremap_offset((uint32_t)node_record_count));
    rest->excluded_cores = exclusion->cores;
}
static inline void sluice_exclusion_core(struct sluice_core_exclusion *exclusion, uint32_t node, uint32_t core)
{
    bit_set(exclusion->cores, cr_get_coremap_offset(node) + core);
}
static inline void sluice_exclusion_end(struct sluice_core_exclusion *exclusion)
{
    FREE_NULL_BITMAP(exclusion->cores);
}
#endif

/* Does slurmctld end when it spreads a job whose GRES are counted for all nodes together? Its _eval_nodes_spread has
 * eval_nodes_gres write through a null pointer. */
#define SLUICE_SPREAD_ENDS_SLURMCTLD SLUICE_SLURM_AT_LEAST(24, 11)

/* Does stock lose the cores of a node that a job gave back, until it makes its rows of all jobs again? The end of another
 * job removes that job's cores and unmarks the rows (part_data_build_row_bitmaps). */
#define SLUICE_RESIZE_LOSES_CORES SLUICE_SLURM_AT_LEAST(23, 11)

/* Headers of stock's select plugin: what it knows of nodes' memory and partitions' cores. */
#if SLUICE_SLURM_AT_LEAST(23, 11)
#define SLUICE_STOCK_NODE_DATA "src/plugins/select/cons_tres/node_data.h"
#define SLUICE_STOCK_PART_DATA "src/plugins/select/cons_tres/part_data.h"
#define SLUICE_ROWS_STALE(part) ((part)->rebuild_rows)
#else
#define SLUICE_STOCK_NODE_DATA "src/plugins/select/cons_common/node_data.h"
#define SLUICE_STOCK_PART_DATA "src/plugins/select/cons_common/part_data.h"
#define SLUICE_ROWS_STALE(part) false
#endif
#if SLUICE_SLURM_AT_LEAST(22, 11)
#include "src/interfaces/preempt.h"
#else
#include "src/slurmctld/preempt.h"
#endif

/* A node's weight: nodes of lower weight are used first. */
#define SLUICE_NODE_WEIGHT(node) ((node)->config_ptr ? (node)->config_ptr->weight : (node)->weight)

/* Nodes that are powered down or on their way there. */
#if SLUICE_SLURM_AT_LEAST(23, 11)
#define SLUICE_POWERED_DOWN power_down_node_bitmap
#else
#define SLUICE_POWERED_DOWN power_node_bitmap
#endif

/* Jobs' features. */
#if SLUICE_SLURM_AT_LEAST(23, 11)
#include "src/common/job_features.h"
#endif

/* GRES of nodes and jobs. */
#if SLUICE_SLURM_AT_LEAST(22, 11)
#include "src/interfaces/gres.h"
#else
#include "src/common/gres.h"
#endif
/* The other half of a pair of GRES that share devices (gpu and shard), as node state, or NULL. */
#if SLUICE_SLURM_AT_LEAST(23, 2)
#define SLUICE_GRES_OTHER(node_state)                                                                                  \
    ((node_state)->alt_gres ? (gres_node_state_t *)(node_state)->alt_gres->gres_data : NULL)
#else
#define SLUICE_GRES_OTHER(node_state) ((node_state)->alt_gres_ns)
#endif
/* Shares of several GPUs for one job on a node: their amounts, one for each GPU, or NULL. */
#if SLUICE_SLURM_AT_LEAST(23, 11)
#define SLUICE_GRES_SHARES(job_state, n) ((job_state)->gres_per_bit_alloc ? (job_state)->gres_per_bit_alloc[n] : NULL)
#define SLUICE_GRES_SHARES_CHOSEN(job_state, node)                                                                     \
    ((job_state)->gres_per_bit_select ? (job_state)->gres_per_bit_select[node] : NULL)
#else
#define SLUICE_GRES_SHARES(job_state, n) ((uint64_t *)NULL)
#define SLUICE_GRES_SHARES_CHOSEN(job_state, node) ((uint64_t *)NULL)
#endif
/* One job may have shares of several GPUs of a node. */
#ifdef MULTIPLE_SHARING_GRES_PJ
#define SLUICE_SHARES_OF_SEVERAL (slurm_conf.select_type_param & MULTIPLE_SHARING_GRES_PJ)
#else
#define SLUICE_SHARES_OF_SEVERAL 0
#endif

/* --exclusive=user, =mcs or =topo, or a partition's ExclusiveUser: the nodes are kept from others' jobs only. */
#define SLUICE_EXCLUSIVE_OF_OTHERS(job)                                                                                \
    (((job)->details->whole_node && !SLUICE_WHOLE_NODE((job)->details)) ||                                             \
     ((job)->part_ptr->flags & PART_FLAG_EXCLUSIVE_USER))
/* --exclusive: the whole node, not merely one user's. */
#if SLUICE_SLURM_AT_LEAST(23, 2)
#define SLUICE_WHOLE_NODE(details) ((details)->whole_node & WHOLE_NODE_REQUIRED)
#else
#define SLUICE_WHOLE_NODE(details) ((details)->whole_node == WHOLE_NODE_REQUIRED)
#endif

/* A job's preferences about the network, beyond --switches, and conditions on what nodes report. */
#if SLUICE_SLURM_AT_LEAST(24, 5)
#define SLUICE_TOPOLOGY_PREFERENCES(job) ((job)->details->job_size_bitmap || IS_JOB_WHOLE_TOPO(job))
/* Nodes of each segment of a job (--segment); 0: none. */
#define SLUICE_SEGMENT(job) ((job)->details->segment_size)
#define SLUICE_EXTRA_CONSTRAINTS(job) ((job)->extra_constraints != NULL)
#else
#define SLUICE_TOPOLOGY_PREFERENCES(job) false
#define SLUICE_SEGMENT(job) 0
#define SLUICE_EXTRA_CONSTRAINTS(job) false
#endif
#if SLUICE_SLURM_AT_LEAST(23, 2)
#define SLUICE_MAX_CPUS_PER_SOCKET(part) ((part)->max_cpus_per_socket)
#else
#define SLUICE_MAX_CPUS_PER_SOCKET(part) INFINITE
#endif

/* A node's place in the network, as "switch.switch.node". */
#if SLUICE_SLURM_AT_LEAST(22, 11)
#include "src/interfaces/topology.h"
#define sluice_node_address(name, address, pattern) topology_g_get_node_addr((name), (address), (pattern))
#else
#include "src/common/slurm_topology.h"
#define sluice_node_address(name, address, pattern) slurm_topo_get_node_addr((name), (address), (pattern))
#endif
/* Slurm's topology as `scontrol show topology` prints it, for xfree; NULL: none, or a version that prints no sizes of
 * blocks. Locks: node read. */
static inline char *sluice_topology_text(void)
{
    char *text = NULL;
#if SLUICE_SLURM_AT_LEAST(24, 11)
    dynamic_plugin_data_t *known = NULL;
#if SLUICE_SLURM_AT_LEAST(25, 5)
    if (topology_g_get(TOPO_DATA_TOPOLOGY_PTR, NULL, &known))
        return NULL;
#else
    if (topology_g_get(TOPO_DATA_TOPOLOGY_PTR, &known))
        return NULL;
#endif
    if (!known)
        return NULL;
#if SLUICE_SLURM_AT_LEAST(25, 11)
    topology_g_topoinfo_print(known, NULL, NULL, &text);
    topology_g_topoinfo_free(known);
#elif SLUICE_SLURM_AT_LEAST(25, 5)
    topology_g_topology_print(known, NULL, NULL, &text);
    topology_g_topology_free(known);
#else
    topology_g_topology_print(known, NULL, &text);
    topology_g_topology_free(known);
#endif
#endif
    return text;
}

/* What the parts of a job's priority are kept in, its request, and its
 * priorities in each of several partitions (NULL: it has one). */
#if SLUICE_SLURM_AT_LEAST(23, 11)
typedef priority_factors_t sluice_prio_factors;
typedef job_details_t sluice_job_details;
#if SLUICE_SLURM_AT_LEAST(26, 5)
#define SLUICE_PARTITION_PRIORITIES(job) ((job)->prio_mult ? (job)->prio_mult->priority_array : NULL)
#else
#define SLUICE_PARTITION_PRIORITIES(job) ((job)->part_prio ? (job)->part_prio->priority_array : NULL)
#endif
#else
typedef priority_factors_object_t sluice_prio_factors;
typedef struct job_details sluice_job_details;
#define SLUICE_PARTITION_PRIORITIES(job) ((job)->priority_array)
#endif
/* Whether this slurmctld is in charge: the primary, or a backup since it took over (control_time; not in Slurm's
 * headers, exported by every version). Backups load the plugins, too. A backup of 24.11 that was reconfigured while in
 * charge has no control_time: it counts as not in charge. */
extern time_t control_time;
static inline bool sluice_in_charge(void)
{
    return (slurmctld_primary || control_time) && !slurmctld_config.shutdown_time;
}

/* How long a prolog may take, in seconds; 0 and NO_VAL16: not bounded. */
#if SLUICE_SLURM_AT_LEAST(25, 5)
#define SLUICE_PROLOG_TIMEOUT (slurm_conf.prolog_timeout)
#else
#define SLUICE_PROLOG_TIMEOUT (slurm_conf.prolog_epilog_timeout)
#endif

/* Starting jobs, as sched/backfill does: the allocation alone, with the write locks held. */
#include "src/slurmctld/node_scheduler.h"
#if SLUICE_SLURM_AT_LEAST(24, 11)
#include "src/common/node_features.h"
#include "src/interfaces/prep.h"
#include "src/interfaces/priority.h"
#include "src/slurmctld/proc_req.h"
#include "src/stepmgr/srun_comm.h"
static inline int sluice_slurm_select_nodes(job_record_t *job)
{
    job_node_select_t select = {.job_ptr = job};
    return select_nodes(&select, false, false, SLURMDB_JOB_FLAG_BACKFILL);
}
#else
#include "src/common/prep.h"
#include "src/common/slurm_priority.h"
#include "src/slurmctld/srun_comm.h"
static inline int sluice_slurm_select_nodes(job_record_t *job)
{
    return select_nodes(job, false, NULL, NULL, false, SLURMDB_JOB_FLAG_BACKFILL);
}
#endif
/* A job's GRES say what it has of each GPU's shards. */
#if SLUICE_SLURM_AT_LEAST(24, 11)
#define SLUICE_SHARES_BY_GPU 1
#define SLUICE_HOSTLIST_POINTER *
#else
#define SLUICE_HOSTLIST_POINTER
#endif
/* A job's state, its end in accounting's limits and reservations, and a task that leaves its array's record. */
#if SLUICE_SLURM_AT_LEAST(24, 11)
#include "src/interfaces/accounting_storage.h"
#include "src/interfaces/cred.h"
#include "src/stepmgr/stepmgr.h"
#define sluice_job_state_set(job, state) job_state_set((job), (state))
#include "src/interfaces/mcs.h"
/* What accepting a job needs, and Slurm prepares only after job state is loaded. */
#define sluice_make_ready_to_submit() (mcs_g_init() == SLURM_SUCCESS)
/* priority/multifactor is started only after job state is loaded, and takes slurmctld's locks then: no priority may be
 * asked for before. It computes all waiting jobs' priorities when it starts. */
#define SLUICE_PRIORITIES_COME_LATER false
#define sluice_credential_lifetime() cred_expiration()
#define sluice_job_array_post_sched(job) job_array_post_sched((job), true)
#define sluice_acct_policy_job_begin(job) acct_policy_job_begin((job), false)
#define sluice_job_claim_reservation(job) resv_replace_update(job)
#define sluice_node_bitmap(names, bitmap) node_name2bitmap((names), false, (bitmap), NULL)
#define sluice_set_tres_counts(counts, text) assoc_mgr_set_tres_cnt_array((counts), (text), 0, false, false, NULL)
#else
#include "src/common/slurm_accounting_storage.h"
#define sluice_make_ready_to_submit() true
#define SLUICE_PRIORITIES_COME_LATER (!xstrcmp(slurm_conf.priority_type, "priority/multifactor"))
#define sluice_job_state_set(job, state) ((job)->job_state = (state))
static inline int sluice_credential_lifetime(void)
{
    int seconds = 120;
    (void)slurm_cred_ctx_get(slurmctld_config.cred_ctx, SLURM_CRED_OPT_EXPIRY_WINDOW, &seconds);
    return seconds;
}
#define sluice_job_array_post_sched(job) job_array_post_sched(job)
#define sluice_acct_policy_job_begin(job) acct_policy_job_begin(job)
#define sluice_job_claim_reservation(job) job_claim_resv(job)
#define sluice_node_bitmap(names, bitmap) node_name2bitmap((names), false, (bitmap))
#define sluice_set_tres_counts(counts, text) assoc_mgr_set_tres_cnt_array((counts), (text), 0, false)
#endif
/* What select plugins are asked for: their part of a node's record, and to look at jobs that have just been loaded.
 * Without the latter there is no failover journal: nothing of it is replayed, so none is written. */
#if SLUICE_SLURM_AT_LEAST(26, 5)
#define SLUICE_SELECT_NODEINFO 0
#define SLUICE_SELECT_JOB_INIT 0
#else
#define SLUICE_SELECT_NODEINFO 1
#define SLUICE_SELECT_JOB_INIT 1
#endif
/* select plugins hear of each registration of a node. */
#if SLUICE_SLURM_AT_LEAST(22, 6)
#define SLUICE_SELECT_UPDATE_NODE 0
#else
#define SLUICE_SELECT_UPDATE_NODE 1
#endif
/* A job as squeue gets it, packed and unpacked inside slurmctld, and the words for its reason. */
#if SLUICE_SLURM_AT_LEAST(26, 5)
#define SLUICE_PACKS_JOBS 0 /* not tried */
#else
#define SLUICE_PACKS_JOBS 1
#endif
#if SLUICE_SLURM_AT_LEAST(24, 11)
#define sluice_reason_string(reason) job_state_reason_string(reason)
#else
#define sluice_reason_string(reason) job_reason_string(reason)
#endif
/* SelectTypeParameters. */
#if SLUICE_SLURM_AT_LEAST(25, 11)
#define SLUICE_SELECT_LLN SELECT_LLN
#define SLUICE_SELECT_MEMORY SELECT_MEMORY
#else
#define SLUICE_SELECT_LLN CR_LLN
#define SLUICE_SELECT_MEMORY CR_MEMORY
#endif
/* A job that ended, one that is queued again, one whose nodes are counted, and a plugin that is loaded by its path. */
#if SLUICE_SLURM_AT_LEAST(26, 5)
#define sluice_job_complete(job, uid, status) job_complete(&(job)->step_id, (uid), false, false, (status))
#define sluice_job_requeue(job) job_requeue_internal(0, (job), false, 0)
#define sluice_build_node_details(job) build_node_details(job)
#define sluice_plugin_load(handle, path) plugin_load_from_file((handle), (path), true)
#else
#define sluice_job_complete(job, uid, status) job_complete((job)->job_id, (uid), false, false, (status))
#define sluice_job_requeue(job) job_requeue(0, (job)->job_id, NULL, false, 0)
#define sluice_build_node_details(job) build_node_details((job), false)
#define sluice_plugin_load(handle, path) plugin_load_from_file((handle), (path))
#endif
/* slurmctld's own variables. Weak, as users' commands on a controller load some of our plugins, too, and lack them: a
 * strong reference to a variable, unlike one to a function, would keep the plugin from being loaded. */
#pragma weak accounting_enforce
#pragma weak acct_db_conn
#pragma weak active_feature_list
#pragma weak avail_node_bitmap
#pragma weak backup_inx
#pragma weak booting_node_bitmap
#pragma weak cg_node_bitmap
#pragma weak default_part_loc
#pragma weak idle_node_bitmap
#pragma weak job_list
#pragma weak last_job_update
#pragma weak last_part_update
#pragma weak part_list
#pragma weak power_down_node_bitmap
#pragma weak power_node_bitmap
#pragma weak resv_list
#pragma weak share_node_bitmap
#pragma weak slurmctld_config
#pragma weak slurmctld_diag_stats
#pragma weak slurmctld_primary
#pragma weak control_time
#pragma weak free_step_record /* its address is taken */
#pragma weak up_node_bitmap
#endif /* SLUICE_SLURM_PRIVATE */

#endif
