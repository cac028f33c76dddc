"""A report as a picture: bars of the largest rows, with what was wasted or measured in another colour."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from sluice.base.pictures import check_plot, save_plot
from sluice.base.text import one_line
from sluice.report.count import Span
from sluice.report.fields import GROUPED_BY, Row, entitled_s, wasted_gpu_s

MOST_BARS = 25
_HOUR = 3600
_LABEL = 32


def plot(path: Path, kind: str, span: Span, rows: Sequence[Row]) -> None:
    """Draw `rows` of a report into an .svg or .png file. Raises SluiceError where matplotlib or a folder is missing."""
    check_plot(path)
    from matplotlib.figure import Figure

    largest = sorted(rows, key=lambda row: -entitled_s(row.tally))[:MOST_BARS][::-1]
    labels = [_label(kind, row) for row in largest]
    figure = Figure(figsize=(10, 1.6 + 0.32 * max(3, len(largest))), layout="constrained")
    hours, waits = figure.subplots(1, 2, width_ratios=(3, 1))
    places = range(len(largest))
    used = [entitled_s(row.tally) / _HOUR for row in largest]
    wasted = [(wasted_gpu_s(row.tally) or 0) / _HOUR for row in largest]
    hours.barh(places, used, color="#4878a8", label="GPU-hours held (whole and shared)")
    if any(wasted):
        hours.barh(places, wasted, height=0.4, color="#d1603d", label="of them measured and not used")
    hours.set(xlabel="GPU-hours", yticks=list(places))
    # Names are text: a pair of $ would be read as a formula.
    hours.set_yticklabels(labels, parse_math=False)
    hours.legend(loc="lower right", fontsize="small")
    waits.barh(places, [(row.tally.waits.percentile(95) or 0) / 60 for row in largest], color="#8a8a8a")
    waits.set(xlabel="95 % waited at most (min)", yticks=[])
    for panel in (hours, waits):
        panel.grid(axis="x", alpha=0.3)
    begin, end = (datetime.fromtimestamp(one).strftime("%Y-%m-%d %H:%M") for one in (span.start, span.end))
    left_out = f", the largest {MOST_BARS} of {len(rows)}" if len(rows) > MOST_BARS else ""
    figure.suptitle(f"{kind}, {begin} to {end}{left_out}", fontsize="medium")
    save_plot(figure, path)


def _label(kind: str, row: Row) -> str:
    if row.job is not None:
        return one_line(f"{row.job.label} {row.job.name}", limit=_LABEL)
    names = [row.names[name] for name in GROUPED_BY.get(kind, ()) if name in row.names] or list(row.names.values())
    return one_line(" ".join(names), limit=_LABEL) or "none"
