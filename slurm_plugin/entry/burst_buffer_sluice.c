/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * burst_buffer/sluice: the place in slurmctld from which the failover journal learns of submissions and ends
 * (failover/failover.h). It manages no burst buffer itself. Slurm loads one plugin of this kind: where a site has its
 * own, for example burst_buffer/lua, this file comes before it in PluginDir as burst_buffer_lua.so. Slurm then loads it
 * under that name, it loads the site's, and passes every call to that one, whose configuration stays the same.
 */
#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

#include "failover/failover.h"
#include "runtime/runtime.h"

#include <dlfcn.h>
#include <string.h>
#include <sys/stat.h>

#include "src/common/pack.h"
#include "src/common/plugin.h"
#include "src/common/xmalloc.h"
#include "src/common/xstring.h"

const char plugin_name[] = "Failover journal of Sluice, before the site's own burst buffer";
const char plugin_type[] = "burst_buffer/sluice";
const uint32_t plugin_version = SLURM_VERSION_NUMBER;

enum { STAGE_DONE = 1 };

/* Differences between versions. */
#if SLUICE_SLURM_AT_LEAST(23, 2)
#define STATUS_PARAMETERS uint32_t argc, char **argv, uint32_t uid, uint32_t gid
#define STATUS_ARGUMENTS argc, argv, uid, gid
#define SCRIPT_PARAMETERS                                                                                              \
    char *func, uint32_t job_id, uint32_t argc, char **argv, job_info_msg_t *job_info, char **resp_msg
#define SCRIPT_ARGUMENTS func, job_id, argc, argv, job_info, resp_msg
#else
#define STATUS_PARAMETERS uint32_t argc, char **argv
#define STATUS_ARGUMENTS argc, argv
#define SCRIPT_PARAMETERS char *func, uint32_t job_id, uint32_t argc, char **argv, char **resp_msg
#define SCRIPT_ARGUMENTS func, job_id, argc, argv, resp_msg
#endif

/* The site's own plugin; all NULL without one. */
static struct {
    plugin_handle_t library;
    uint64_t (*get_system_size)(void);
    int (*load_state)(bool init_config);
    char *(*get_status)(STATUS_PARAMETERS);
    int (*state_pack)(uid_t uid, buf_t *buffer, uint16_t protocol_version);
    int (*reconfig)(void);
    int (*job_validate)(job_desc_msg_t *job_desc, uid_t submit_uid, char **err_msg);
    int (*job_validate2)(job_record_t *job_ptr, char **err_msg);
    void (*job_set_tres_cnt)(job_record_t *job_ptr, uint64_t *tres_cnt, bool locked);
    time_t (*job_get_est_start)(job_record_t *job_ptr);
    int (*job_try_stage_in)(struct xlist *job_queue);
    int (*job_test_stage_in)(job_record_t *job_ptr, bool test_only);
    int (*job_begin)(job_record_t *job_ptr);
    int (*job_revoke_alloc)(job_record_t *job_ptr);
    int (*job_start_stage_out)(job_record_t *job_ptr);
    int (*job_test_post_run)(job_record_t *job_ptr);
    int (*job_test_stage_out)(job_record_t *job_ptr);
    int (*job_cancel)(job_record_t *job_ptr);
    int (*run_script)(SCRIPT_PARAMETERS);
    char *(*xlate_bb_2_tres_str)(char *burst_buffer);
    char *(*build_het_job_script)(char *script, uint32_t het_job_offset);
} site;

/* A function of the site's plugin; POSIX lets dlsym's result become one. */
static bool find(const char *name, void *function)
{
    void *found = dlsym(site.library, name);
    memcpy(function, &found, sizeof found);
    if (!found)
        error("burst_buffer/sluice: the site's own plugin has no %s", name);
    return found != NULL;
}

static bool find_all(void)
{
    bool good =
        find("bb_p_get_system_size", &site.get_system_size) && find("bb_p_load_state", &site.load_state) &&
        find("bb_p_get_status", &site.get_status) && find("bb_p_state_pack", &site.state_pack) &&
        find("bb_p_reconfig", &site.reconfig) && find("bb_p_job_validate", &site.job_validate) &&
        find("bb_p_job_validate2", &site.job_validate2) && find("bb_p_job_set_tres_cnt", &site.job_set_tres_cnt) &&
        find("bb_p_job_get_est_start", &site.job_get_est_start) &&
        find("bb_p_job_try_stage_in", &site.job_try_stage_in) &&
        find("bb_p_job_test_stage_in", &site.job_test_stage_in) && find("bb_p_job_begin", &site.job_begin) &&
        find("bb_p_job_revoke_alloc", &site.job_revoke_alloc) &&
        find("bb_p_job_start_stage_out", &site.job_start_stage_out) &&
        find("bb_p_job_test_post_run", &site.job_test_post_run) &&
        find("bb_p_job_test_stage_out", &site.job_test_stage_out) && find("bb_p_job_cancel", &site.job_cancel) &&
        find("bb_p_run_script", &site.run_script) && find("bb_p_xlate_bb_2_tres_str", &site.xlate_bb_2_tres_str);
#if SLUICE_SLURM_AT_LEAST(23, 2)
    good = good && find("bb_p_build_het_job_script", &site.build_het_job_script);
#endif
    return good;
}

/* Another file of PluginDir with this one's name. NULL: there is none; else Slurm's memory. */
static char *find_site(const char *self)
{
    struct stat this, other;
    const char *name = xbasename((char *)self);
    char *folders = xstrdup(slurm_conf.plugindir), *rest = NULL, *path = NULL;
    if (stat(self, &this) == 0)
        for (char *one = strtok_r(folders, ":", &rest); one && !path; one = strtok_r(NULL, ":", &rest)) {
            path = xstrdup_printf("%s/%s", one, name);
            if (stat(path, &other) != 0 || (other.st_dev == this.st_dev && other.st_ino == this.st_ino))
                xfree(path);
        }
    xfree(folders);
    return path;
}

/* Load it as Slurm does, which checks its version and calls its init. */
static bool load_site(const char *self)
{
    char *path = find_site(self);
    if (!path) {
        error("burst_buffer/sluice: no %s of the site's own in PluginDir %s", xbasename((char *)self),
              slurm_conf.plugindir);
        return false;
    }
    bool loaded = (int)sluice_plugin_load(&site.library, path) == SLURM_SUCCESS;
    if (!loaded)
        error("burst_buffer/sluice: %s: the site's own plugin does not start, or is for another Slurm than %s", path,
              SLURM_VERSION_STRING);
    else
        debug("burst_buffer/sluice: every call is passed on to %s", path);
    xfree(path);
    if (loaded && !find_all()) {
        plugin_unload(site.library);
        loaded = false;
    }
    return loaded;
}

/* When this fails Slurm looks into PluginDir's next folder: it loads the site's plugin without us, or ends as it would
 * without us. */
extern int init(void)
{
    Dl_info self;
    memset(&site, 0, sizeof site);
    if (dladdr(plugin_type, &self) == 0)
        return SLURM_ERROR;
    bool alone = !xstrcmp(xbasename((char *)self.dli_fname), "burst_buffer_sluice.so");
    if (!alone && !load_site(self.dli_fname)) {
        memset(&site, 0, sizeof site);
        return SLURM_ERROR;
    }
    if (sluice_in_slurmctld())
        sluice_failover_adapter(true, alone);
    return SLURM_SUCCESS;
}

extern int fini(void)
{
    if (sluice_in_slurmctld())
        sluice_failover_adapter(false, false);
    if (site.library)
        plugin_unload(site.library);
    memset(&site, 0, sizeof site);
    return SLURM_SUCCESS;
}

/* ---- what is journalled ---- */

extern int bb_p_job_validate(job_desc_msg_t *job_desc, uid_t submit_uid, char **err_msg)
{
    int rc = site.library ? site.job_validate(job_desc, submit_uid, err_msg) : SLURM_SUCCESS;
    if (rc == SLURM_SUCCESS)
        sluice_failover_request(job_desc);
    return rc;
}

/* The site's plugin first: what it refuses was never accepted. It has to forget what the journal refuses. */
extern int bb_p_job_validate2(job_record_t *job_ptr, char **err_msg)
{
    int rc = site.library ? site.job_validate2(job_ptr, err_msg) : SLURM_SUCCESS;
    if (rc != SLURM_SUCCESS)
        return rc;
    rc = sluice_failover_submitted(job_ptr, err_msg);
    if (rc != SLURM_SUCCESS && site.library && job_ptr->burst_buffer)
        site.job_cancel(job_ptr);
    return rc;
}

extern int bb_p_job_start_stage_out(job_record_t *job_ptr)
{
    sluice_failover_ended(job_ptr);
    return site.library ? site.job_start_stage_out(job_ptr) : SLURM_SUCCESS;
}

extern int bb_p_job_cancel(job_record_t *job_ptr)
{
    sluice_failover_ended(job_ptr);
    return site.library ? site.job_cancel(job_ptr) : SLURM_SUCCESS;
}

/* ---- only passed to the site's own plugin; without one: what Slurm does without any ---- */

extern uint64_t bb_p_get_system_size(void)
{
    return site.library ? site.get_system_size() : 0;
}

extern int bb_p_load_state(bool init_config)
{
    return site.library ? site.load_state(init_config) : SLURM_SUCCESS;
}

extern char *bb_p_get_status(STATUS_PARAMETERS)
{
    if (site.library)
        return site.get_status(STATUS_ARGUMENTS);
#if SLUICE_SLURM_AT_LEAST(23, 2)
    (void)uid, (void)gid;
#endif
    (void)argc, (void)argv;
    return NULL;
}

extern int bb_p_state_pack(uid_t uid, buf_t *buffer, uint16_t protocol_version)
{
    return site.library ? site.state_pack(uid, buffer, protocol_version) : SLURM_SUCCESS;
}

extern int bb_p_reconfig(void)
{
    return site.library ? site.reconfig() : SLURM_SUCCESS;
}

extern void bb_p_job_set_tres_cnt(job_record_t *job_ptr, uint64_t *tres_cnt, bool locked)
{
    if (site.library)
        site.job_set_tres_cnt(job_ptr, tres_cnt, locked);
}

extern time_t bb_p_job_get_est_start(job_record_t *job_ptr)
{
    return site.library ? site.job_get_est_start(job_ptr) : time(NULL);
}

extern int bb_p_job_try_stage_in(struct xlist *job_queue)
{
    return site.library ? site.job_try_stage_in(job_queue) : SLURM_SUCCESS;
}

extern int bb_p_job_test_stage_in(job_record_t *job_ptr, bool test_only)
{
    return site.library ? site.job_test_stage_in(job_ptr, test_only) : STAGE_DONE;
}

extern int bb_p_job_begin(job_record_t *job_ptr)
{
    return site.library ? site.job_begin(job_ptr) : SLURM_SUCCESS;
}

extern int bb_p_job_revoke_alloc(job_record_t *job_ptr)
{
    return site.library ? site.job_revoke_alloc(job_ptr) : SLURM_SUCCESS;
}

extern int bb_p_job_test_post_run(job_record_t *job_ptr)
{
    return site.library ? site.job_test_post_run(job_ptr) : STAGE_DONE;
}

extern int bb_p_job_test_stage_out(job_record_t *job_ptr)
{
    return site.library ? site.job_test_stage_out(job_ptr) : STAGE_DONE;
}

extern int bb_p_run_script(SCRIPT_PARAMETERS)
{
    if (site.library)
        return site.run_script(SCRIPT_ARGUMENTS);
#if SLUICE_SLURM_AT_LEAST(23, 2)
    (void)job_info;
#endif
    (void)func, (void)job_id, (void)argc, (void)argv, (void)resp_msg;
    return SLURM_ERROR;
}

extern char *bb_p_xlate_bb_2_tres_str(char *burst_buffer)
{
    return site.library ? site.xlate_bb_2_tres_str(burst_buffer) : NULL;
}

#if SLUICE_SLURM_AT_LEAST(23, 2)
extern char *bb_p_build_het_job_script(char *script, uint32_t het_job_offset)
{
    return site.library ? site.build_het_job_script(script, het_job_offset) : xstrdup(script);
}
#endif
