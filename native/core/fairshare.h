/* SPDX-License-Identifier: Apache-2.0 */
#ifndef SLUICE_CORE_FAIRSHARE_H
#define SLUICE_CORE_FAIRSHARE_H

#include "sluice/core.h"

/* Whether the tree knows the account. */
bool sluice_fairshare_knows(const struct sluice_fairshare *fairshare, uint32_t account);

/* The factor of a known account. */
uint32_t sluice_fairshare_factor_of(const struct sluice_fairshare *fairshare, uint32_t account);

#endif
