/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * What the files of admission share: admission.c checks a request step by step, amounts.c says what it comes to,
 * deadline.c whether it can end in time.
 */
#ifndef SLUICE_ADMISSION_ADMISSION_INTERNAL_H
#define SLUICE_ADMISSION_ADMISSION_INTERNAL_H

#include "admission/admission.h"

/* What the checks pass from one to the next. */
struct sluice_check {
    const struct sluice_rules *rules;
    const struct sluice_tenant *tenant;
    const struct sluice_slurm *slurm;
    const struct sluice_submission *submission;
    struct sluice_tres_request request;
    struct sluice_admission *admission;
    uint64_t nodes; /* the most that the job can get */
};

static inline uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* Absurd numbers stay absurd: a product that would overflow becomes the bound, and several of them can be added up. */
static inline uint64_t mul_saturating(uint64_t a, uint64_t b)
{
    const uint64_t bound = UINT64_C(1) << 58;
    uint64_t product;
    return __builtin_mul_overflow(a, b, &product) || product > bound ? bound : product;
}

/* fabric.c: where in the network its nodes are to be. False with a refusal. */
bool sluice_check_fabric(struct sluice_check *check);

/* roles.c: whether its GPUs are as many as its roles want. False with a refusal. */
bool sluice_check_roles(struct sluice_check *check);

/* amounts.c says what each counts. */
uint32_t sluice_least_nodes(const struct sluice_check *check);
uint64_t sluice_most_nodes(const struct sluice_check *check);
uint64_t sluice_most_tasks(const struct sluice_check *check);
uint64_t sluice_per_socket_factor(const struct sluice_check *check);
uint64_t sluice_total_of(const struct sluice_check *check, const struct sluice_gres_counts *counts);
uint64_t sluice_shared_gpus(const struct sluice_check *check);
uint64_t sluice_shards_of_one_gpu(const struct sluice_check *check);
void sluice_cap_nodes(struct sluice_check *check, uint64_t each, uint64_t limit);
void sluice_bound_gaps(struct sluice_check *check);

/* The type of GPU that the job's constraint names, NULL for none. */
const char *sluice_type_in_constraint(const struct sluice_check *check);

/* False: refused. */
bool sluice_check_deadline(struct sluice_check *check);

#endif
