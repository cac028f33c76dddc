"""Sluice inside Slurm: the plugins' sources, and how they are built, installed, watched and taken away."""
