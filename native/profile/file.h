/* SPDX-License-Identifier: Apache-2.0 */
/* A profile as it is written: sluice/profile.h has the format. For one thread. */
#ifndef SLUICE_PROFILE_FILE_H
#define SLUICE_PROFILE_FILE_H

#include <stdbool.h>
#include <stddef.h>

#include "sluice/profile.h"

struct profile_file;

/*
 * Makes folder/HOST.PID.NUMBER.profile, never over another file; NULL with errno set. `limit` is the most bytes that it
 * may have. The header's text, process and Slurm's numbers are filled in.
 */
struct profile_file *file_create(int folder, const struct sluice_profile_header *header, uint64_t limit);

/* The number of a name; written when it is new. 0: no room for more names. */
uint32_t file_name(struct profile_file *file, const char *text);

void file_add(struct profile_file *file, const struct sluice_profile_record *record);

/* Everything added so far reaches the kernel. */
void file_flush(struct profile_file *file);

/* 0, or why nothing more is written: SLUICE_PROFILE_QUOTA or SLUICE_PROFILE_DISK. What was added since is counted. */
enum sluice_profile_reason file_failed(const struct profile_file *file);

/* Writes the first record and closes; `words` may be NULL. The reason is the file's own, where it failed before. */
void file_end(struct profile_file *file, enum sluice_profile_reason reason, const char *words, uint64_t cost);

/* In a child after a fork: the parent's file is closed, and nothing else touched. */
void file_abandon(const struct profile_file *file);

#endif
