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
#define SLUICE_TRACE_WORD "traceparent:" /* before it in a job's AdminComment */
enum { SLUICE_TRACE_SIZE = 56, SLUICE_TRACE_RANDOM = 16 };

/*
 * Whether `text` (NULL is none) is a traceparent by W3C's grammar, of any version; then `parent` is its IDs and its
 * flag "sampled", written as version 00.
 */
bool sluice_trace_parse(const char *text, char parent[SLUICE_TRACE_SIZE]);

/* The parent of a job that nobody traces: a trace of its own, which is known by its span ID, the trace ID's beginning. */
void sluice_trace_begin(const unsigned char random[SLUICE_TRACE_RANDOM], char parent[SLUICE_TRACE_SIZE]);

/* The job's own traceparent in the trace of `parent`, which `sluice_trace_parse` wrote. */
void sluice_trace_of_job(const char *parent, const char *cluster, uint32_t job, char own[SLUICE_TRACE_SIZE]);

#endif
