"""Finds the GPUs of a node, writes and lints Slurm's GRES, and groups GPUs into classes."""
