/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libsluice_controller.so: what the plugins share inside slurmctld. Each plugin starts it in `init` and stops it in
 * `fini`; the first start and the last stop do the work. Elsewhere (users' commands and slurmd load some of the
 * plugins, too) nothing is started, and every hook passes through to stock Slurm at once.
 *
 *   int init(void)
 *   {
 *       if (sluice_in_slurmctld())
 *           sluice_controller_start("select", &(struct sluice_site){slurm_conf.slurm_conf,
 *                                             slurm_conf.state_save_location, SLURM_VERSION_STRING});
 *       return SLURM_SUCCESS;
 *   }
 */
#ifndef SLUICE_RUNTIME_CONTROLLER_H
#define SLUICE_RUNTIME_CONTROLLER_H

#include <stdbool.h>

/* Where slurmctld has its files. */
struct sluice_site {
    const char *slurm_conf;    /* path of slurm.conf; level and policy are in its folder */
    const char *state_folder;  /* StateSaveLocation */
    const char *slurm_version; /* that the plugin was built for */
};

/* Our folder in the state folder: decisions, and what the order keeps over a restart. */
#define SLUICE_STATE_FOLDER "sluice.records"

/* Whether this process is slurmctld: only its program has the function that accepts jobs. Constant in a process;
 * cheap. */
bool sluice_in_slurmctld(void);

/*
 * Start for one plugin, `type` being its kind ("select", "job_submit" ...). False, and logged, when there is no memory:
 * the plugin then passes through, as the level is off. Not to be called with locks of Slurm's held, as it reads the two
 * files.
 */
bool sluice_controller_start(const char *type, const struct sluice_site *site);

/* The reverse; once for each start that was true. */
void sluice_controller_stop(const char *type);

/*
 * A module's part of start and stop: called with the first start, after settings are there, and the last stop, before
 * they go. `name` is a static string. To be called before the first start, from a constructor
 * (__attribute__((constructor))).
 */
struct sluice_module {
    const char *name;
    bool (*start)(const struct sluice_site *site); /* false: logged, the rest continues without it */
    void (*stop)(void);
    struct sluice_module *next; /* ours */
    bool started;               /* ours */
};
void sluice_controller_module(struct sluice_module *module);

#endif
