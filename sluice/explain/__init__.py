"""Answers from slurmctld's decisions: why a job has its place, what Sluice would have decided differently."""
