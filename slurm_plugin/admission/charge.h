/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a submission takes of its account's submissions per minute, and gives back if it was only a question.
 *
 * job_submit does not know whether `--test-only` was asked: the request is the same, and what its client says of itself
 * must not be trusted. But for such a request Slurm asks select/cons_tres when the job would run, in the same thread,
 * right after the job record was made; it never asks that for a submission. A question that Slurm refuses before (an
 * unknown QOS, say) keeps what it took.
 */
#ifndef SLUICE_ADMISSION_CHARGE_H
#define SLUICE_ADMISSION_CHARGE_H

#include <stdbool.h>
#include <stdint.h>

/*
 * A request begins in this thread: what the one before took is no longer given back. With a limit (`per_minute`) it
 * takes one submission of `account`. False: the account has used up its minute, with the milliseconds until the next
 * one in *wait_ms; -1: its limit is 0. Thread-safe.
 */
void sluice_charge_begin(void);
bool sluice_charge_take(const char *account, uint32_t per_minute, int64_t *wait_ms);

/* This thread's request was a question, about a job record made at `submitted_s` (seconds since 1970): what it took is
 * given back. Does nothing where it took nothing, or did so after that. */
void sluice_charge_give_back(int64_t submitted_s);

#endif
