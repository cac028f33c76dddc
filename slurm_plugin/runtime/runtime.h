/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What all plugins share inside slurmctld: start and stop (controller.h), level and policy in force (settings.h), the
 * GPUs that are out of service (withdrawn.h), what jobs draw (draws.h), when they last saved (saves.h), which of them go
 * first (first.h), which NICs are near which GPUs (nics.h), files that are replaced as a whole (listing.h), the
 * background thread (ticker.h), the status file (status.h), log, clocks, arrays and errors. No Slurm headers.
 */
#ifndef SLUICE_RUNTIME_RUNTIME_H
#define SLUICE_RUNTIME_RUNTIME_H

#include "runtime/array.h"
#include "runtime/clock.h"
#include "runtime/controller.h"
#include "runtime/draws.h"
#include "runtime/fail.h"
#include "runtime/first.h"
#include "runtime/listing.h"
#include "runtime/log.h"
#include "runtime/nics.h"
#include "runtime/saves.h"
#include "runtime/settings.h"
#include "runtime/status.h"
#include "runtime/ticker.h"
#include "runtime/withdrawn.h"

#endif
