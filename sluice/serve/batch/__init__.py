"""Batch inference: what runs in the job that the service Jobs submits."""
