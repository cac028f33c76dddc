/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/controller.h"

#include "runtime/log.h"
#include "runtime/settings.h"
#include "runtime/status.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned users;
static struct sluice_module *modules;

/*
 * Asked of the program itself: Slurm's own plugins define slurmctld's variables as well, to be loadable elsewhere, so
 * the default scope, which ends with this library's, has them in every process.
 */
bool sluice_in_slurmctld(void)
{
    static int known; /* 0: not yet; all threads would write the same */
    int found = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!found) {
        void *program = dlopen(NULL, RTLD_LAZY);
        found = program && dlsym(program, "job_allocate") ? 1 : -1;
        if (program)
            dlclose(program);
        __atomic_store_n(&known, found, __ATOMIC_RELAXED);
    }
    return found > 0;
}

void sluice_controller_module(struct sluice_module *module)
{
    pthread_mutex_lock(&lock);
    struct sluice_module **at = &modules; /* by name, as constructors run in any order */
    while (*at && strcmp((*at)->name, module->name) < 0)
        at = &(*at)->next;
    module->next = *at;
    *at = module;
    pthread_mutex_unlock(&lock);
}

static bool start_all(const struct sluice_site *site)
{
    char folder[4096];
    snprintf(folder, sizeof(folder), "%s",
             site->slurm_conf && *site->slurm_conf ? site->slurm_conf : "/etc/slurm/slurm.conf");
    char *slash = strrchr(folder, '/');
    if (slash)
        *slash = '\0';
    else
        snprintf(folder, sizeof(folder), ".");
    sluice_status_start(site->state_folder ? site->state_folder : folder, site->slurm_version);
    if (!sluice_settings_start(folder)) {
        sluice_log_error("sluice: no memory for settings: everything passes through to stock Slurm");
        return false;
    }
    for (struct sluice_module *module = modules; module; module = module->next) {
        module->started = module->start(site);
        if (!module->started)
            sluice_log_error("sluice: %s could not be started; the rest goes on without it", module->name);
    }
    return true;
}

static void stop_all(void)
{
    for (struct sluice_module *module = modules; module; module = module->next) {
        if (module->started)
            module->stop();
        module->started = false;
    }
    sluice_settings_stop();
    sluice_status_stop();
}

bool sluice_controller_start(const char *type, const struct sluice_site *site)
{
    pthread_mutex_lock(&lock);
    bool good = users > 0 || start_all(site);
    if (good) {
        users++;
        sluice_status_plugin(type, true);
    }
    pthread_mutex_unlock(&lock);
    if (good)
        sluice_status_write();
    return good;
}

void sluice_controller_stop(const char *type)
{
    pthread_mutex_lock(&lock);
    if (users > 0) {
        sluice_status_plugin(type, false);
        if (--users == 0)
            stop_all();
    }
    pthread_mutex_unlock(&lock);
}
