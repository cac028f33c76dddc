"""Sluice's policy: simulation of job histories under other policies."""
