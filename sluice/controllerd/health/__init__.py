"""Faults of GPUs and nodes, handled by the controllers."""
