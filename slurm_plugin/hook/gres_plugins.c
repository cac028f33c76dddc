/* SPDX-License-Identifier: GPL-2.0-or-later */
#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

#include "hook/gres_plugins.h"

#include "src/common/list.h"
#include "src/common/log.h"
#include "src/common/pack.h"

/*
 * The flags are Slurm's own, from the saved state of nodes, with two exceptions. LOADED may have been saved by another
 * slurmctld. And Slurm takes ONE_SHARING from shares that have their plugin as soon as one node has not set it, but does
 * not set it there any more; it reads this flag of nodes only, which have theirs already.
 */
static int load(void *item, void *argument)
{
    const gres_state_t *gres = item;
    bool shared = gres_id_shared(gres->config_flags);
    (void)argument;
    if (!shared && !gres_id_sharing(gres->plugin_id))
        return 0;
    uint32_t flags = gres->config_flags & ~(uint32_t)GRES_CONF_LOADED;
    if (shared)
        flags |= GRES_CONF_ONE_SHARING;
    buf_t *message = init_buf(256);
    pack16(SLURM_PROTOCOL_VERSION, message);
    pack16(1, message); /* records */
    pack32(GRES_MAGIC, message);
    pack64(1, message); /* devices: nothing is loaded for none */
    pack32(0, message); /* processors */
    pack32(flags, message);
    pack32(gres->plugin_id, message);
    packnull(message); /* cores */
    packnull(message); /* links */
    packstr(gres->gres_name, message);
    packnull(message); /* type */
    packnull(message); /* unique id */
    set_buf_offset(message, 0);
    char *node = (char *)"(none yet)";
    if (gres_node_config_unpack(message, node) != SLURM_SUCCESS)
        error("select/sluice: the plugin of gres/%s is not loaded before a node registers: until then prologs and "
              "epilogs have no SLURM_JOB_GPUS",
              gres->gres_name);
    free_buf(message);
    return 0;
}

void sluice_load_gres_plugins(void)
{
    struct xlist *known = NULL; /* all GRES that Slurm knows, as of a node that has none of them */
    gres_init_node_config(NULL, &known);
    if (!known) /* no GresTypes */
        return;
    list_for_each(known, load, NULL);
    FREE_NULL_LIST(known);
}
