/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The gate of the fence. Making the first node record is slurmctld's first call of a plugin when it reads its
 * configuration to lead, at its start and when a backup takes over; jobs, nodes and partitions are loaded after it.
 * Where records of nodes are made without us (SLUICE_SELECT_NODEINFO), the gate is in site_factor_sluice.c.
 */
#include "hook/hook.h"

#include "failover/failover.h"
#include "runtime/runtime.h"

#include <dlfcn.h>

#if SLUICE_SELECT_NODEINFO
extern select_nodeinfo_t *select_p_select_nodeinfo_alloc(void)
{
    static select_nodeinfo_t *(*stock)(void); /* all threads would write the same */
    if (!stock) {
        void *library = dlopen("select_cons_tres.so", RTLD_LAZY | RTLD_NOLOAD);
        void *found = library ? dlsym(library, "select_p_select_nodeinfo_alloc") : NULL;
        memcpy(&stock, &found, sizeof(stock));
    }
    if (sluice_in_slurmctld()) {
        sluice_fence_lead();
        sluice_failover_reconfigured();
    }
    return stock ? stock() : NULL;
}
#endif
