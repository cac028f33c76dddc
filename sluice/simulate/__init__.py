"""Traces of jobs, replayed under other policies."""
