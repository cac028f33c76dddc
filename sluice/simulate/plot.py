"""A picture of several replays of one trace."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from policy.metrics import Metrics
from policy.simulate import Simulation
from policy.traces import MICROSECOND
from sluice_base.errors import SluiceError, UsageError
from sluice_base.files import write_atomic
from sluice_core.replay import State

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png")
HOUR = 3600
SMALLEST_WAIT_S = 1.0  # waits are drawn on a logarithmic scale


def check_plot(path: Path) -> None:
    """Raise before the long work whatever would keep the picture from being drawn."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--plot {path}: ends in {path.suffix or 'nothing'!r}", remedy="name it .svg or .png")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: no folder {path.parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SluiceError(
            f"--plot {path}: matplotlib is not installed", remedy="install it with: pip install matplotlib"
        ) from None


def save_plot(figure: Figure, path: Path) -> None:
    """Write a picture, whole or not at all, in the form that its name says. Raises SluiceError."""
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:])
    try:
        write_atomic(path, picture.getvalue())
    except OSError as error:
        raise SluiceError(f"--plot {path}: {error.strerror}") from error


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
