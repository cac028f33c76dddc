/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Processor time that the process has had, and that it has waited for: on a busy node its threads are ready to run and
 * do not, which is no time of the program's. Time in which they sleep, e.g. until a GPU is done, is.
 */
#ifndef SLUICE_PROFILE_DEMAND_H
#define SLUICE_PROFILE_DEMAND_H

#include <stdint.h>

/* ns, of all threads together, since they began. */
struct demand {
    uint64_t ran, waited;
};

/* Of 64 threads at most, by /proc/self/task/TID/schedstat; zeros where the kernel has no such files. */
struct demand demand_now(void);

/*
 * How much of the time that has `passed` between two of them the program has lost by waiting, ns: what its threads
 * wanted, as if they ran one after the other, and no more than has passed; of that, the part for which they waited.
 */
uint64_t demand_lost(const struct demand *before, const struct demand *now, uint64_t passed);

#endif
