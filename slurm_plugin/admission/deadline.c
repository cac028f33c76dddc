/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Whether a job can end before its --deadline. */
#include "admission/admission_internal.h"
#include "admission/wording.h"

#include <inttypes.h>
#include <stdio.h>

/* Whole GPUs of each node, where that can be said before Slurm chooses nodes; 0: it cannot. */
static uint64_t gpus_of_each_node(const struct sluice_check *check, uint64_t nodes)
{
    const struct sluice_gres_counts *gpus = &check->request.gpus[0];
    if (check->request.gpu_types != 1)
        return 0;
    if (gpus->per[SLUICE_PER_NODE])
        return gpus->per[SLUICE_PER_NODE];
    if (gpus->per[SLUICE_PER_JOB])
        return (gpus->per[SLUICE_PER_JOB] - 1) / nodes + 1;
    return nodes == 1 && gpus->per[SLUICE_PER_TASK]
               ? mul_saturating(gpus->per[SLUICE_PER_TASK], sluice_most_tasks(check))
               : 0;
}

/* The start that the job can count on after all that is planned, not before `from`. False: not known, as for jobs that
 * the outlook cannot describe, and for changed ones, which are in the plan themselves. */
static bool expected_start(const struct sluice_check *check, int64_t from, int64_t run_s, int64_t *start)
{
    const struct sluice_submission *submission = check->submission;
    const char *partition = check->admission->partition[0] ? check->admission->partition : submission->partition;
    uint64_t nodes = sluice_least_nodes(check), gpus = gpus_of_each_node(check, nodes);
    if (!check->slurm->outlook || submission->admitted_before || submission->heterogeneous ||
        submission->options.gang_count || !gpus || gpus > SLUICE_OUTLOOK_GPUS || nodes > SLUICE_OUTLOOK_NODES)
        return false;
    const char *type = check->request.gpus[0].type[0] ? check->request.gpus[0].type
                       : check->rules                 ? sluice_type_in_constraint(check)
                                                      : NULL;
    struct sluice_outlook_question question = {
        .partitions = partition, .type = type, .gpus = (uint32_t)gpus, .nodes = (uint32_t)nodes, .run_s = run_s};
    if (!sluice_outlook_ask(check->slurm->outlook, &question, start))
        return false;
    *start = *start > from ? *start : from;
    return true;
}

/* The job's times, as texts. */
struct deadline {
    char given[SLUICE_STAMP_MAX], run[SLUICE_DURATION_MAX], alone[SLUICE_STAMP_MAX], began[SLUICE_STAMP_MAX];
    char made[SLUICE_STAMP_MAX], start[SLUICE_STAMP_MAX],
        end[SLUICE_STAMP_MAX]; /* by the plan; "" where it is not known or changes nothing */
};

static bool refuse_deadline(struct sluice_check *check, const struct deadline *texts)
{
    char planned[3 * SLUICE_STAMP_MAX + 96] = "";
    const char *soonest = texts->end[0] ? texts->end : texts->alone;
    const bool time_min = check->submission->time_min;
    if (texts->end[0])
        snprintf(planned, sizeof planned,
                 "; after all that is planned (at %s, each job taking its whole time limit) it ends at %s", texts->made,
                 texts->end);
    return sluice_refuse(check->admission, time_min ? SLUICE_REFUSED_TIME_MIN : SLUICE_REFUSED_TIME,
                         "--deadline=%s cannot be met: started %s%s, a job of %s ends at %s%s; ask for --deadline=%s "
                         "or later, or for a shorter --time%s",
                         texts->given, texts->began[0] ? "with --begin at " : "now", texts->began, texts->run,
                         texts->alone, planned, soonest, time_min ? "-min" : "");
}

static void warn_of_deadline(struct sluice_check *check, const struct deadline *texts)
{
    char text[SLUICE_REFUSAL_MAX];
    snprintf(
        text, sizeof text,
        "--deadline=%s may be missed: after all that is planned (at %s, each job taking its whole time limit) this "
        "job of %s starts by %s and ends at %s; sooner where others end before their limits",
        texts->given, texts->made, texts->run, texts->start, texts->end);
    sluice_notice(check->admission, text);
}

/* Only what cannot be met whatever the queue does is refused: others may end before their limits. The user gets a
 * notice of the rest. */
bool sluice_check_deadline(struct sluice_check *check)
{
    const struct sluice_submission *submission = check->submission;
    const int64_t deadline = submission->deadline, now = check->slurm->now;
    uint32_t minutes = submission->time_min ? submission->time_min : submission->time_limit;
    struct deadline texts = {.end = ""};
    if (!deadline)
        return true;
    if (check->tenant && !check->tenant->deadline)
        return sluice_refuse(check->admission, SLUICE_REFUSED_LIMIT,
                             "--deadline is not open to account %s; submit without it", check->tenant->account);
    sluice_stamp(deadline, texts.given);
    if (minutes == UINT32_MAX)
        return sluice_refuse(check->admission, SLUICE_REFUSED_TIME,
                             "--deadline=%s for a job without a time limit; add --time", texts.given);
    const int64_t farthest = now + (INT64_C(1) << 40); /* absurd times stay absurd, and can be added to */
    int64_t from = submission->begin > farthest ? farthest : submission->begin > now ? submission->begin : now;
    int64_t run_s = (int64_t)minutes * 60, start;
    sluice_duration(larger(minutes, 1), texts.run);
    sluice_stamp(from + run_s > now ? from + run_s : now + 60, texts.alone);
    if (from > now)
        sluice_stamp(from, texts.began);
    bool waits = expected_start(check, from, run_s, &start) && start > from;
    if (waits) {
        sluice_stamp(sluice_outlook_made_s(check->slurm->outlook), texts.made);
        sluice_stamp(start, texts.start);
        sluice_stamp(start + run_s, texts.end);
    }
    if (deadline < from + run_s || deadline <= now)
        return refuse_deadline(check, &texts);
    if (waits && deadline < start + run_s)
        warn_of_deadline(check, &texts);
    return true;
}
