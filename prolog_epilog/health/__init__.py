"""Faults of GPUs and nodes: found on the nodes, handled by the controllers' daemon. See docs/health.md."""
