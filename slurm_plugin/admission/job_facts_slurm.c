/* SPDX-License-Identifier: GPL-2.0-or-later */
#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

#include "admission/job_facts.h"
#include "runtime/runtime.h"

#include "src/common/assoc_mgr.h"
#include "src/common/xmalloc.h"
#include "src/common/xstring.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static uint32_t given32(uint32_t value)
{
    return value == NO_VAL ? 0 : value;
}

static uint32_t given16(uint16_t value)
{
    return value == NO_VAL16 || value == INFINITE16 ? 0 : value;
}

enum sluice_topology sluice_known_topology(void)
{
    const char *plugin = slurm_conf.topology_plugin;
    if (plugin && strstr(plugin, "block"))
        return SLUICE_TOPOLOGY_BLOCK;
    bool switches = plugin && (strstr(plugin, "tree") || strstr(plugin, "hypercube") || strstr(plugin, "3d_torus"));
    return switches || SLUICE_TOPOLOGY_FILE ? SLUICE_TOPOLOGY_SWITCHES : SLUICE_TOPOLOGY_NONE;
}

void sluice_job_facts(const struct job_record *job, struct sluice_job_facts *facts)
{
    const sluice_job_details *details = job->details;
    *facts = (struct sluice_job_facts){
        .account = job->account,
        .user_id = job->user_id,
        .partition = job->partition,
        .qos = job->qos_ptr ? job->qos_ptr->name : NULL,
        .tres_per_job = job->tres_per_job,
        .tres_per_node = job->tres_per_node,
        .tres_per_socket = job->tres_per_socket,
        .tres_per_task = job->tres_per_task,
        .cpus_per_tres = job->cpus_per_tres,
        .mem_per_tres = job->mem_per_tres,
        .spank_env = job->spank_job_env,
        .spank_env_count = job->spank_job_env ? job->spank_job_env_size : 0,
        .time_limit = given32(job->time_limit),
        .time_min = given32(job->time_min),
        .deadline = job->deadline == (time_t)NO_VAL ? 0 : (int64_t)job->deadline,
        .heterogeneous = job->het_job_id != 0,
        .pending = IS_JOB_PENDING(job),
        .nodes = IS_JOB_PENDING(job) ? 0 : job->node_cnt,
        .one_task_per_sharing = SLUICE_ONE_TASK_PER_SHARING(job->bit_flags),
    };
    if (!details)
        return;
    facts->features = details->features;
    facts->prefer = details->prefer;
    facts->required_nodes = details->req_nodes;
    facts->begin = (int64_t)details->begin_time;
    facts->min_nodes = given32(details->min_nodes);
    facts->max_nodes = given32(details->max_nodes);
    facts->tasks = given32(details->num_tasks);
    facts->tasks_per_node = given16(details->ntasks_per_node);
    facts->tasks_per_gpu = given16(details->ntasks_per_tres);
    facts->cpus_per_task = given16(details->cpus_per_task);
    facts->min_cpus = given32(details->orig_min_cpus); /* min_cpus grows while nodes are looked for */
    facts->min_cpus_per_node = given16((uint16_t)details->pn_min_cpus);
    facts->memory_asked = details->pn_min_memory != NO_VAL64;
    facts->whole_nodes = SLUICE_WHOLE_NODE(details);
    facts->sockets_per_node = details->mc_ptr ? given16(details->mc_ptr->sockets_per_node) : 0;
}

void sluice_job_show_reason(struct job_record *job, const char *message)
{
    if (!IS_JOB_PENDING(job))
        return;
    xfree(job->state_desc);
    job->state_desc = xstrdup(message);
}

/* ---- default accounts ----  slurmctld keeps users in a list, and a search through 10,000 of them would take longer
 * than the rest of a submission. Where there are many, a sorted copy is made every second; a user that it lacks is
 * looked up in the list. */

enum { MANY_USERS = 1000, REFRESH_MS = 1000, ACCOUNT_ROOM = 64 };

struct user {
    uint32_t id;
    char account[ACCOUNT_ROOM];
};

struct users {
    size_t count, room;
    struct user *sorted;
};

static pthread_rwlock_t users_lock = PTHREAD_RWLOCK_INITIALIZER; /* held for a swap or a search, never with another */
static struct users users;
static struct sluice_tick *refresh;

static int compare_users(const void *one, const void *other)
{
    const struct user *a = one, *b = other;
    return (a->id > b->id) - (a->id < b->id);
}

static int copy_user(void *item, void *argument)
{
    const slurmdb_user_rec_t *user = item;
    struct users *copies = argument;
    bool usable = user->uid != NO_VAL && user->default_acct && strlen(user->default_acct) < ACCOUNT_ROOM;
    if (!usable || copies->count == copies->room)
        return 0;
    struct user *copy = &copies->sorted[copies->count++];
    copy->id = user->uid;
    memcpy(copy->account, user->default_acct, strlen(user->default_acct) + 1);
    return 0;
}

static void swap_users(struct users *with)
{
    struct users old;
    pthread_rwlock_wrlock(&users_lock);
    old = users;
    users = *with;
    pthread_rwlock_unlock(&users_lock);
    free(old.sorted);
}

static void refresh_users(void *unused)
{
    (void)unused;
    assoc_mgr_lock_t locks = {.user = READ_LOCK};
    struct users copies = {.count = 0};
    if (sluice_settings_level() != SLUICE_LEVEL_OFF) {
        assoc_mgr_lock(&locks);
        int count = assoc_mgr_user_list ? list_count(assoc_mgr_user_list) : 0;
        if (count > MANY_USERS && (copies.sorted = calloc((size_t)count, sizeof *copies.sorted))) {
            copies.room = (size_t)count;
            list_for_each_ro(assoc_mgr_user_list, copy_user, &copies);
        }
        assoc_mgr_unlock(&locks);
    }
    if (copies.count)
        qsort(copies.sorted, copies.count, sizeof *copies.sorted, compare_users);
    swap_users(&copies);
}

static bool start(const struct sluice_site *site)
{
    (void)site;
    refresh = sluice_ticker_add("users", REFRESH_MS, refresh_users, NULL);
    return refresh != NULL;
}

static void stop(void)
{
    struct users none = {.count = 0};
    sluice_ticker_remove(refresh);
    refresh = NULL;
    swap_users(&none);
}

__attribute__((constructor)) static void announce(void)
{
    static struct sluice_module module = {.name = "users", .start = start, .stop = stop};
    sluice_controller_module(&module);
}

static bool find_copied(uint32_t user_id, char *account, size_t size)
{
    struct user key = {.id = user_id};
    pthread_rwlock_rdlock(&users_lock);
    const struct user *found =
        users.count ? bsearch(&key, users.sorted, users.count, sizeof *users.sorted, compare_users) : NULL;
    bool fits = found && strlen(found->account) < size;
    if (fits)
        memcpy(account, found->account, strlen(found->account) + 1);
    pthread_rwlock_unlock(&users_lock);
    return fits;
}

bool sluice_default_account(uint32_t user_id, char *account, size_t size)
{
    assoc_mgr_lock_t locks = {.user = READ_LOCK};
    slurmdb_user_rec_t user = {.uid = user_id};
    bool found = false;
    if (find_copied(user_id, account, size))
        return true;
    assoc_mgr_lock(&locks);
    if (assoc_mgr_fill_in_user(acct_db_conn, &user, accounting_enforce, NULL, true) == SLURM_SUCCESS &&
        user.default_acct && strlen(user.default_acct) < size) {
        memcpy(account, user.default_acct, strlen(user.default_acct) + 1);
        found = true;
    }
    assoc_mgr_unlock(&locks);
    return found;
}

static int is_association(void *item, void *key)
{
    const slurmdb_assoc_rec_t *one = item, *wanted = key;
    return one->uid == wanted->uid && !xstrcmp(one->acct, wanted->acct);
}

bool sluice_has_account(uint32_t user_id, const char *account)
{
    assoc_mgr_lock_t locks = {.assoc = READ_LOCK};
    slurmdb_assoc_rec_t wanted = {.uid = user_id, .acct = (char *)account}, asked = wanted;
    if (assoc_mgr_fill_in_assoc(acct_db_conn, &asked, accounting_enforce, NULL, false) == SLURM_SUCCESS)
        return true;
    assoc_mgr_lock(&locks);
    bool found = assoc_mgr_assoc_list && list_find_first_ro(assoc_mgr_assoc_list, is_association, &wanted);
    assoc_mgr_unlock(&locks);
    return found;
}

bool sluice_is_operator(uint32_t user_id)
{
    return validate_operator(user_id);
}
