"""Faults of controllers, storage and network on a cluster under load, and what became of every job. Not installed."""
