/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Inside of admission: what is written to users and to Slurm. */
#ifndef SLUICE_ADMISSION_WORDING_H
#define SLUICE_ADMISSION_WORDING_H

#include "admission/submission.h"

/* Writes a refusal; returns false, so that a check can end with it. */
__attribute__((format(printf, 3, 4))) bool sluice_refuse(struct sluice_admission *admission,
                                                         enum sluice_refusal refusal, const char *format, ...);

/* "gres:gpu" or "gres/gpu", as this Slurm writes it. */
void sluice_gres_text(const struct sluice_slurm *slurm, const char *name, const char *type, uint64_t count, char *text,
                      size_t size);

/* Adds a notice for the user to the message. */
void sluice_notice(struct sluice_admission *admission, const char *text);

enum { SLUICE_DURATION_MAX = 32, SLUICE_STAMP_MAX = 32 };

/* A run time as Slurm writes it, and a time in the form that --deadline takes. Both return `text`. */
const char *sluice_duration(uint64_t minutes, char text[SLUICE_DURATION_MAX]);
const char *sluice_stamp(int64_t seconds, char text[SLUICE_STAMP_MAX]);

#endif
