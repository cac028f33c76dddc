/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which jobs differ from the look before, and the files that say so to the controllers' daemon.
 *
 * The table keeps 64 bits of each job, not the job. The files are lines of JSON in `changes.NNNNNNNNNNNN` of the state
 * folder's SLUICE_STATE_FOLDER, mode 0600, as they hold what users wrote: at most SLUICE_CHANGES_FILE_BYTES and one
 * look more each, and the newest two are kept.
 *
 *   ["begin", EPOCH]               what came before is not continued: all jobs have to be listed
 *   ["on", EPOCH]                  the file before this one is continued
 *   ["job", "17", ...]             a job that is new or differs, its fields as squeue writes them
 *   ["gone", 17]                   slurmctld does not know it any more
 *   ["lost"]                       too much changed at once: all jobs have to be listed
 *   ["look", SECONDS, MS]          all that had changed until then (since 1970) is above; MS: time under the locks
 *
 * A reader that finds only half a line, or no line of a look after the last, reads on later. This header includes no
 * header of Slurm. One thread.
 */
#ifndef SLUICE_CHANGES_CHANGES_H
#define SLUICE_CHANGES_CHANGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    SLUICE_CHANGES_MAX_JOBS = 1048576,  /* in the table; of more, none is followed */
    SLUICE_CHANGES_MAX_CHANGED = 16384, /* of one look, gone ones included */
    SLUICE_CHANGES_MAX_TEXT = 4096,     /* bytes of a field; the rest is cut off */
    SLUICE_CHANGES_MAX_LOOK_BYTES = 16 << 20,
    SLUICE_CHANGES_FILE_BYTES = 8 << 20,
};

/* ---- which ---- */

struct sluice_changes;

/* NULL when memory is short. sluice_changes_free(NULL) does nothing. */
struct sluice_changes *sluice_changes_new(void);
void sluice_changes_free(struct sluice_changes *changes);

/* A look: begin, each job once with its print, end. The first look after _new finds nothing that differs. */
void sluice_changes_begin(struct sluice_changes *changes);
void sluice_changes_see(struct sluice_changes *changes, uint32_t id, uint64_t print);
/* False: too many jobs, too many changes, or no memory; what was seen is forgotten or kept, but not known by number. */
bool sluice_changes_end(struct sluice_changes *changes);
/* Of the look that has ended: those that are new or differ, and those that are gone. */
const uint32_t *sluice_changes_differ(const struct sluice_changes *changes, uint32_t *count);
const uint32_t *sluice_changes_gone(const struct sluice_changes *changes, uint32_t *count);

/* A print of several values, one after the other, from 0. NULL and "" differ. Of a text as much as is written of it: a
 * job's dependency may have 128 KiB, and is looked at under slurmctld's locks. */
static inline uint64_t sluice_print_number(uint64_t print, uint64_t value)
{
    print = (print ^ value) * UINT64_C(0x9e3779b97f4a7c15);
    return print ^ print >> 32;
}
uint64_t sluice_print_text(uint64_t print, const char *text, unsigned width);

/* ---- lines ---- */

/* Text that grows; zero at first. `failed`: memory was short, or there is more than SLUICE_CHANGES_MAX_LOOK_BYTES. */
struct sluice_changes_text {
    char *bytes;
    size_t length, room;
    bool failed;
};
void sluice_changes_put(struct sluice_changes_text *text, const char *raw);
/* `, "field"`, escaped, cut after SLUICE_CHANGES_MAX_TEXT bytes times `width`; NULL is "". */
void sluice_changes_put_field(struct sluice_changes_text *text, const char *field, unsigned width);
void sluice_changes_put_number(struct sluice_changes_text *text, uint64_t number);

/* ---- files ---- */

struct sluice_changes_files {
    char folder[3072];
    uint64_t number; /* of the file that is written; 0: none yet */
    int file;        /* -1: none */
    size_t bytes;    /* in it */
    char epoch[40];  /* of this process and time */
};
void sluice_changes_files_start(struct sluice_changes_files *files, const char *folder);
/* Append the lines of a look, in a new file where the one is full, or where `begin`. False, with errno: not written,
 * and the next has to begin again. May block as long as the file system does. */
bool sluice_changes_write(struct sluice_changes_files *files, const struct sluice_changes_text *text, bool begin);
/* Close and remove all of them. */
void sluice_changes_files_stop(struct sluice_changes_files *files);

#endif
