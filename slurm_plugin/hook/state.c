/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What the hook keeps between calls: made, updated and freed. */
#include "hook/hook_internal.h"

#include "hook/gpus.h"
#include "hook/nics.h"
#include "hook/workload.h"

#include "runtime/runtime.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { CACHE_ENTRIES = 512 };
/* Boundaries of the histogram of the hook's own time, in microseconds. */
static const uint32_t time_classes_us[] = {5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 150, 200, 500, 1000};
_Static_assert(sizeof(time_classes_us) / sizeof(time_classes_us[0]) + 1 == TIME_CLASSES,
               "one class is for what is longer");

struct sluice_hook_state sluice_hook;

/* ---- getting ready ---- */

static bool fit_scratch(void)
{
    uint32_t nodes = sluice_mirror_nodes(sluice_hook.mirror);
    sluice_hook.words = sluice_mirror_words(sluice_hook.mirror);
    free(sluice_hook.allowed);
    free(sluice_hook.up);
    free(sluice_hook.tried);
    free(sluice_hook.saved);
    free(sluice_hook.parts);
    free(sluice_hook.chosen);
    sluice_cache_free(sluice_hook.cache);
    sluice_preemption_free(sluice_hook.preemption);
    sluice_hook.preemption = NULL;
    sluice_hook.chosen_job = 0;
    sluice_hook.allowed = calloc(sluice_hook.words + 1, sizeof(uint64_t));
    sluice_hook.up = calloc(sluice_hook.words + 1, sizeof(uint64_t));
    sluice_hook.tried = calloc(sluice_hook.words + 1, sizeof(uint64_t));
    sluice_hook.saved = calloc(sluice_hook.words + 1, sizeof(uint64_t));
    sluice_hook.parts = calloc((size_t)nodes + 1, sizeof(*sluice_hook.parts));
    sluice_hook.chosen = calloc((size_t)nodes + 1, sizeof(*sluice_hook.chosen));
    sluice_hook.cache = sluice_cache_new(CACHE_ENTRIES, sluice_hook.words);
    return sluice_hook.allowed && sluice_hook.up && sluice_hook.tried && sluice_hook.saved && sluice_hook.parts &&
           sluice_hook.chosen && sluice_hook.cache;
}

bool sluice_hook_follow(time_t now)
{
    struct sluice_error_text text = {.text = ""};
    uint64_t begin = sluice_now_ns();
    sluice_mirror_record(sluice_hook.mirror, sluice_decision_shared());
    if (!sluice_hook.following)
        sluice_mirror_invalidate(sluice_hook.mirror);
    enum sluice_error failed = sluice_mirror_sync(sluice_hook.mirror, false, now, &text);
    if (!failed && sluice_mirror_generation(sluice_hook.mirror) != sluice_hook.generation) {
        if (!fit_scratch())
            failed = SLUICE_ERROR_NO_MEMORY;
        else
            sluice_hook.generation = sluice_mirror_generation(sluice_hook.mirror);
        sluice_workload_apply(sluice_hook.mirror);
    }
    sluice_hook.following = !failed; /* without scratch nothing is chosen for a start, either */
    if (failed && !sluice_hook.failed)
        sluice_log_error("select/sluice: stock Slurm places all jobs: %s", text.text[0] ? text.text : "out of memory");
    sluice_hook.failed = failed != SLUICE_OK;
    struct sluice_mirror_counts counts = sluice_mirror_counts(sluice_hook.mirror);
    atomic_store_explicit(sluice_hook.mirror_builds, counts.builds, memory_order_relaxed);
    atomic_store_explicit(sluice_hook.mirror_mismatches, counts.mismatches, memory_order_relaxed);
    if (sluice_hook.mirror_built == counts.builds) /* else it was made again, which is not an error */
        note_time(sluice_hook.follow_us_most, begin);
    sluice_hook.mirror_built = counts.builds;
    return !failed;
}

void sluice_hook_check_mirror(void)
{
    struct sluice_error_text text = {.text = ""};
    if (!sluice_hook.check_every || ++sluice_hook.decisions % sluice_hook.check_every)
        return;
    count(sluice_hook.checks);
    if (sluice_mirror_check(sluice_hook.mirror, sluice_gpus_free_of_node, &text)) {
        count(sluice_hook.check_failures);
        error("select/sluice: the mirror differs from Slurm: %s", text.text);
        sluice_mirror_invalidate(sluice_hook.mirror);
    }
}

void sluice_hook_count_time(uint64_t hook_us)
{
    uint32_t class = 0;
    while (class + 1 < TIME_CLASSES && hook_us > time_classes_us[class])
        class ++;
    count(sluice_hook.times[class]);
}

/* ---- start and stop ---- */

static uint32_t from_environment(const char *name, uint32_t most)
{
    const char *text = getenv(name);
    char *end = NULL;
    unsigned long value = text ? strtoul(text, &end, 10) : 0;
    return text && end != text && !*end && value <= most ? (uint32_t)value : 0;
}

bool sluice_hook_start(sluice_stock_test stock)
{
    static const char *const names[] = {
        "select.asked",          "select.stock_alone",      "select.narrowed",
        "select.fell_back",      "select.refused",          "select.shadowed",
        "select.kept_waiting",   "select.cross_checked",    "select.cross_wrong",
        "select.remembered",     "select.stock_tests",      "select.preempted",
        "select.index_asked",    "select.index_kept",       "select.index_denied",
        "select.overlaps_moved", "select.overlaps_refused", "select.checks",
        "select.check_failures", "select.mirror_builds",    "select.mirror_mismatches",
        "select.follow_us_most", "select.workload_us_most", "select.nothing_allocated",
        "select.layout_refused", "select.held_back",
    };
    counter **const counters[] = {
        &sluice_hook.asked,          &sluice_hook.stock_alone,      &sluice_hook.narrowed,
        &sluice_hook.fell_back,      &sluice_hook.refused,          &sluice_hook.shadowed,
        &sluice_hook.kept_waiting,   &sluice_hook.cross_checked,    &sluice_hook.cross_wrong,
        &sluice_hook.remembered,     &sluice_hook.stock_tests,      &sluice_hook.preempted,
        &sluice_hook.index_asked,    &sluice_hook.index_kept,       &sluice_hook.index_denied,
        &sluice_hook.overlaps_moved, &sluice_hook.overlaps_refused, &sluice_hook.checks,
        &sluice_hook.check_failures, &sluice_hook.mirror_builds,    &sluice_hook.mirror_mismatches,
        &sluice_hook.follow_us_most, &sluice_hook.workload_us_most, &sluice_hook.nothing_allocated,
        &sluice_hook.layout_refused, &sluice_hook.held_back,
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        *counters[i] = sluice_status_counter(names[i]);
    char name[SLUICE_STATUS_NAME];
    for (uint32_t i = 0; i < TIME_CLASSES; i++) {
        if (i + 1 < TIME_CLASSES)
            snprintf(name, sizeof(name), "select.hook_us_to_%u", time_classes_us[i]);
        else
            snprintf(name, sizeof(name), "select.hook_us_more");
        sluice_hook.times[i] = sluice_status_counter(name);
    }
    for (uint32_t i = 0; i < SLUICE_STOCK_COUNT; i++) {
        snprintf(name, sizeof(name), "select.stock_alone.%s", sluice_job_stock_name(i));
        sluice_hook.by_reason[i] = sluice_status_counter(name);
    }
    sluice_hook.stock = stock;
    sluice_hook.cross_permille = from_environment("SLUICE_CROSS_CHECK_PERMILLE", 1000);
    sluice_hook.check_every = from_environment("SLUICE_MIRROR_CHECK_EVERY", UINT32_MAX);
    sluice_hook.random = (uint64_t)time(NULL);
    sluice_nics_start();
    return sluice_mirror_new(&sluice_hook.mirror, NULL) == SLUICE_OK;
}

void sluice_hook_stop(void)
{
    sluice_nics_stop();
    sluice_preemption_free(sluice_hook.preemption);
    sluice_mirror_free(sluice_hook.mirror);
    sluice_cache_free(sluice_hook.cache);
    free(sluice_hook.allowed);
    free(sluice_hook.up);
    free(sluice_hook.tried);
    free(sluice_hook.saved);
    free(sluice_hook.parts);
    free(sluice_hook.chosen);
    free(sluice_hook.candidates);
    free(sluice_hook.candidate_jobs);
    free(sluice_hook.victims);
    memset(&sluice_hook, 0, sizeof(sluice_hook));
}
