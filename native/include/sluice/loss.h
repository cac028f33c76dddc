/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What it costs that a running job leaves its GPUs: one measure for moves, for victims of preemption and for nodes to
 * empty, so that they can be compared.
 *
 * Units: times are whole seconds of one clock; GPUs are thousandths of a GPU (a whole one is 1000); a loss is thousandths
 * of a GPU-second, of GPUs that are held and do no work that lasts. That another job uses the GPUs while this one waits
 * is no loss.
 *
 * Pure functions: no handle, no memory, any thread. O(1).
 */
#ifndef SLUICE_LOSS_H
#define SLUICE_LOSS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What is known of a running job. Times below 0 count as 0. */
struct sluice_stake {
    int64_t started_s; /* since when it runs; at most now */
    int64_t saved_s;   /* when it last saved its work; before started_s, or 0: not in this run */
    int64_t save_s;    /* for which it does no work while it saves, measured or estimated; 0: it cannot be saved */
    int64_t
        restart_s; /* for which it does no work besides, once there is a place for it: its end, its start, and the read
                          of its state */
    int64_t gpus_milli;
};

/* How it leaves. Append only. */
enum sluice_way {
    SLUICE_WAY_MOVE = 0,    /* it is saved, and goes on in a place that is kept for it */
    SLUICE_WAY_PREEMPT = 1, /* it is asked to end: saved first if it can be, and goes on when there is a place for it */
    SLUICE_WAY_REQUEUE = 2, /* it is ended at once: it begins again where it saved last, or from its start */
};

/*
 * The seconds of its work that are lost:
 *
 *   MOVE, PREEMPT of a job that can be saved        save_s + restart_s
 *   PREEMPT of one that cannot be saved, REQUEUE    now_s - (its last save, or start) + restart_s
 *   MOVE of one that cannot be saved                INT64_MAX: it is not to be moved
 *
 * Never below 0; INT64_MAX where it is more.
 */
int64_t sluice_lost_s(const struct sluice_stake *stake, enum sluice_way way, int64_t now_s);

/* The same, for all of its GPUs: the loss. */
int64_t sluice_loss(const struct sluice_stake *stake, enum sluice_way way, int64_t now_s);

#ifdef __cplusplus
}
#endif

#endif
