/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A job's place in a trace: W3C's traceparent of who submitted it, which is a tenant's text, and the one that the job
 * gets. sluice/controllerd/spans/identity.py computes the same IDs.
 */
#ifndef SLUICE_RULES_TRACE_H
#define SLUICE_RULES_TRACE_H

#include <stdbool.h>
#include <stdint.h>

#define SLUICE_TRACE_VARIABLE "TRACEPARENT"
#define SLUICE_TRACE_BEGAN "SLUICE_TRACE_BEGAN" /* when the client had read its options, by its host's clock */
#define SLUICE_TRACE_WORD "traceparent:"        /* before it in a job's AdminComment */
enum { SLUICE_TRACE_SIZE = 56, SLUICE_TRACE_RANDOM = 16, SLUICE_TRACE_TIME_SIZE = 17, SLUICE_TRACE_COMMENT_SIZE = 128 };

/*
 * Whether `text` (NULL is none) is a traceparent by W3C's grammar, of any version; then `parent` is its IDs and its
 * flag "sampled", written as version 00.
 */
bool sluice_trace_parse(const char *text, char parent[SLUICE_TRACE_SIZE]);

/* The parent of a job that nobody traces: a trace of its own, which is known by its span ID, the trace ID's beginning. */
void sluice_trace_begin(const unsigned char random[SLUICE_TRACE_RANDOM], char parent[SLUICE_TRACE_SIZE]);

/* Whether `text` (NULL is none) is a time as a client sends it: microseconds since 1970, in 16 digits. */
bool sluice_trace_is_time(const char *text);

/*
 * What is kept of a submission: "traceparent:PARENT submitted:ARRIVED,TOOK" and, where `began` is not NULL,
 * ",BEGAN"; when it came to slurmctld, how long its checks took, and when the client began, in microseconds. `parent`:
 * as `sluice_trace_parse` wrote it, `began`: as `sluice_trace_is_time` takes it.
 */
void sluice_trace_comment(const char *parent, int64_t arrived_us, uint64_t took_us, const char *began,
                          char comment[SLUICE_TRACE_COMMENT_SIZE]);

/* The job's own traceparent in the trace of `parent`, which `sluice_trace_parse` wrote. */
void sluice_trace_of_job(const char *parent, const char *cluster, uint32_t job, char own[SLUICE_TRACE_SIZE]);

#endif
