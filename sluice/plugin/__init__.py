"""Sluice inside Slurm: the plugins' sources, and how they are built, installed, checked and removed."""
