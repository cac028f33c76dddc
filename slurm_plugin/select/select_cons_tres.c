/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * select/cons_tres with our word in the choice of nodes. It stands before Slurm's own plugin of this name and links it:
 * whatever is not defined here, plugin_type and plugin_id included, is found in stock's.
 */
#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

#include "controller/controller.h"
#include "controller/log.h"
#include "controller/settings.h"

#include <dlfcn.h>

const char plugin_name[] = "Consumable resources on trackable resources, placed by Sluice";
const char plugin_type[] = "select/cons_tres";
const uint32_t plugin_version = SLURM_VERSION_NUMBER;

static struct {
    int (*init)(void);
    int (*fini)(void);
    int (*reconfigure)(void);
    int (*job_test)(job_record_t *, bitstr_t *, uint32_t, uint32_t, uint32_t, uint16_t, struct xlist *, struct xlist **,
                    SLUICE_JOB_TEST_REST);
} stock;
static bool active;

/* Stock's function; POSIX lets dlsym's result become one. */
static bool find(void *library, const char *name, void *function)
{
    void *found = dlsym(library, name);
    memcpy(function, &found, sizeof(found));
    if (!found)
        sluice_log_error("select/sluice: Slurm's own select/cons_tres has no %s", name);
    return found != NULL;
}

extern int init(void)
{
    void *library = dlopen("select_cons_tres.so", RTLD_LAZY | RTLD_NOLOAD);
    if (!library || !find(library, "init", &stock.init) || !find(library, "fini", &stock.fini) ||
        !find(library, "select_p_reconfigure", &stock.reconfigure) ||
        !find(library, "select_p_job_test", &stock.job_test))
        return SLURM_ERROR;
    if (sluice_in_slurmctld())
        active = sluice_controller_start(
            "select",
            &(struct sluice_site){slurm_conf.slurm_conf, slurm_conf.state_save_location, SLURM_VERSION_STRING});
    return stock.init();
}

extern int fini(void)
{
    int rc = stock.fini();
    if (active)
        sluice_controller_stop("select");
    active = false;
    return rc;
}

extern int select_p_reconfigure(void)
{
    if (active)
        sluice_settings_poke();
    return stock.reconfigure();
}

extern int select_p_job_test(job_record_t *job_ptr, bitstr_t *node_bitmap, uint32_t min_nodes, uint32_t max_nodes,
                             uint32_t req_nodes, uint16_t mode, struct xlist *preemptee_candidates,
                             struct xlist **preemptee_job_list, SLUICE_JOB_TEST_REST)
{
    return stock.job_test(job_ptr, node_bitmap, min_nodes, max_nodes, req_nodes, mode, preemptee_candidates,
                          preemptee_job_list, SLUICE_JOB_TEST_REST_NAMES);
}
