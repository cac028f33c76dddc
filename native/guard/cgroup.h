/* SPDX-License-Identifier: Apache-2.0 */
/* Stopping and continuing all tasks of a job, as Slurm's own suspend does: of each step, without its slurmstepd. */
#ifndef SLUICE_GUARD_CGROUP_H
#define SLUICE_GUARD_CGROUP_H

enum guard_frost {
    GUARD_DONE,
    GUARD_GONE,   /* the job has no cgroup any more */
    GUARD_OTHERS, /* a step of it is frozen already: Slurm has suspended the job */
    GUARD_FAILED, /* errno says why; EPERM: not a folder of root's in a cgroup file system */
};

/* `path`: the job's folder in version 2, or in version 1's freezer hierarchy. */
enum guard_frost guard_look(const char *path); /* whether it can be frozen */
enum guard_frost guard_freeze(const char *path);
enum guard_frost guard_thaw(const char *path);

#endif
