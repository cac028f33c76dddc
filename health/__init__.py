"""Faults of GPUs and nodes: found on the nodes, acted upon by the controllers' daemon. See docs/health.md."""
