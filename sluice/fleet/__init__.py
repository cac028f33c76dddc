"""Nodes that come and go: what Slurm wants of pools is made true, exactly once."""
