"""A picture of several replays of one trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.base.pictures import save_plot
from sluice.core.replay import State
from sluice.simulate.metrics import Metrics
from sluice.simulate.simulation import Simulation
from sluice.simulate.traces import MICROSECOND

if TYPE_CHECKING:
    pass

HOUR = 3600
SMALLEST_WAIT_S = 1.0  # waits are drawn on a logarithmic scale


def draw_plot(path: Path, simulations: Sequence[Simulation], measured: Sequence[Metrics]) -> None:
    """Three panels: GPUs allocated and jobs waiting over time, and how long which part of the jobs waited."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 10), layout="constrained")
    allocated, pending, waits = figure.subplots(3, 1)
    for simulation, one in zip(simulations, measured, strict=True):
        samples = simulation.replayed.samples
        hours = [sample.at / MICROSECOND / HOUR for sample in samples]
        shares = [sample.gpus_milli / 10 / max(1, simulation.gpus) for sample in samples]
        allocated.step(hours, shares, where="post", label=f"{simulation.policy.name} ({one.allocation_percent:.1f}%)")
        pending.step(hours, [sample.pending for sample in samples], where="post", label=simulation.policy.name)
        waited = sorted(
            max(SMALLEST_WAIT_S, (outcome.start - job.submit) / MICROSECOND)
            for job, outcome in zip(simulation.trace.jobs, simulation.replayed.outcomes, strict=True)
            if outcome.state == State.ENDED
        )
        parts = [100 * (place + 1) / len(waited) for place in range(len(waited))]
        waits.step(waited, parts, where="post", label=f"{simulation.policy.name} (mean {one.wait_mean_s / HOUR:.2f} h)")
    allocated.set(ylabel="GPUs allocated (%)", xlabel="time (h)", ylim=(0, 105))
    pending.set(ylabel="jobs waiting", xlabel="time (h)")
    waits.set(ylabel="jobs that waited at most so long (%)", xlabel="wait (s)", xscale="log", ylim=(0, 105))
    for panel in (allocated, pending, waits):
        panel.legend(loc="best", fontsize="small")
        panel.grid(alpha=0.3)
    save_plot(figure, path)
