"""Measurements that back every claim of speed or quality: ``python -m benchmarks NAME --json [options]``.

A benchmark is a module of this package with

    OPTIONS: list[click.Option]      its own options, input files among them
    def run(**options) -> Result     the measurement
    MUST: dict[str, tuple[str, float]]   figure -> (operator, bound); only what was promised

It compares with a peer, or with stock Slurm, in the same run, and takes nothing from files of earlier results.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Result:
    """What one benchmark measured. Units are in the figures' names, as in ``p99_us``."""

    figures: dict[str, float]
    peer: dict[str, float] = field(default_factory=dict)
    spread: dict[str, list[float]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    must: dict[str, tuple[str, float]] = field(default_factory=dict)  # besides MUST: bounds that depend on the input
