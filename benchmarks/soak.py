"""A long run of all of Sluice: `python -m benchmarks.soak 72h`, which `make soak DURATION=72h` calls, as root.

A cluster with two supervised controllers at level place, four nodes with agents, controllerd and explaind runs under
jobs, users' commands and policy changes. It goes in rounds: in every other one the leader is killed and the backup
takes over, in the others a node loses all its processes at once, and another one its agent. After each round every job
that was acknowledged is accounted for.

Samples go to a file; from them comes the slope of each series (benchmarks.trend), with its error. A series leaks if its
slope less three errors is above its bound. A quarter of the run, half an hour at most, of each process's life is its
warm-up: controllerd alone keeps what nodes send for ten minutes.

Exit 1: a leak, a job that was lost or ran twice, or a daemon that ended by itself; 2: it could not run.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click

from benchmarks.__main__ import machine, run_program
from benchmarks.soak_samples import Sampler
from benchmarks.soak_site import Soak
from benchmarks.trend import Reading, TooShortError, Trend, trend
from dev_cluster.chaos.judge import Outcome
from dev_cluster.handle import require_root
from sluice.base.errors import SluiceError, UsageError
from sluice.base.files import write_atomic

ROOT = Path(__file__).resolve().parents[1]
SHORTEST_S = 120.0
ROUNDS = 4  # at least
LONGEST_ROUND_S = 3600.0
LONGEST_WARM_UP_S = 1800.0  # of lives of two rounds
SAMPLES = 500  # of a short run; a long one has one a minute
WRONG = ("lost", "revived", "run_again", "started_again", "id_twice", "at_once", "left")


@dataclass(frozen=True, slots=True)
class Bound:
    """What a series may grow by: so much an hour, so much once in a run, and so much with each job."""

    an_hour: float
    once: float
    a_job: float = 0.0

    def at(self, hours: float, jobs_an_hour: float) -> float:
        """In units an hour, for a run of so many hours."""
        return self.an_hour + self.once / hours + self.a_job * jobs_an_hour


BOUNDS = {
    "pss_kib": Bound(128, 1024),
    "descriptors": Bound(0.1, 2),
    "threads": Bound(0.1, 2),
    "kib": Bound(64, 512),
    "files": Bound(1, 10),
}
# History that is kept on purpose, for a time or up to a size: pattern of the series, kind, bound.
HISTORY = (
    ("journal", "kib", Bound(64, 8192)),  # two segments: one goes when Slurm has saved what it holds
    ("decisions", "kib", Bound(64, 512, a_job=4)),
    ("job records", "kib", Bound(64, 512, a_job=4)),
    ("agent@* records", "kib", Bound(64, 512, a_job=4)),
    ("agent@* records", "files", Bound(1, 10, a_job=2)),
)


def bound_of(series: str, kind: str) -> Bound:
    """What a series may grow by."""
    special = (bound for pattern, of, bound in HISTORY if of == kind and fnmatchcase(series, pattern))
    return next(special, BOUNDS[kind])


@dataclass(frozen=True, slots=True)
class Verdict:
    """One series."""

    series: str
    kind: str
    bound: float
    trend: Trend | None
    note: str

    @property
    def leaks(self) -> bool:
        """Whether it grows by more than its bound, for certain."""
        return self.trend is not None and self.trend.exceeds(self.bound)


# ---- the run ----


def parse_duration(text: str) -> float:
    """Seconds of "90s", "20m" or "72h". Raises UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if found is None:
        raise UsageError(f"duration {text!r}: not a time", remedy="write e.g. 20m or 72h")
    seconds = float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]
    if seconds < SHORTEST_S:
        raise UsageError(
            f"duration {text!r}: too short for a slope", remedy=f"at least {SHORTEST_S:g} s; hours to find slow leaks"
        )
    return seconds


def soak(seconds: float, *, rate: float, plugins: Path | None, file: Path) -> None:
    """Run, and append to the file. Raises SluiceError."""
    round_s = min(seconds / ROUNDS, LONGEST_ROUND_S)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    click.echo(f"the cluster starts; samples go to {file}", err=True)
    with Soak(plugins=plugins) as site:
        sampler = Sampler(site, file, period_s=max(2.0, min(60.0, seconds / SAMPLES)))
        sampler.write(about={"rate": rate, "warm_up_s": min(seconds / ROUNDS, LONGEST_WARM_UP_S), "machine": machine()})
        questions = threading.Thread(target=site.ask_questions)
        sampler.start()
        questions.start()
        try:
            number = 0
            while (left := seconds - sampler.hours * 3600) > round_s / 2:
                begun = time.monotonic()
                outcome = site.round(number, seconds=min(round_s, left), rate=rate)
                sampler.write(outcome=asdict(outcome), acts=site.acts, ended=site.ended_daemons())
                number += 1
                took = time.monotonic() - begun
                click.echo(f"round {number}: {outcome.acknowledged} jobs, {outcome.lost} lost, {took:.0f} s", err=True)
                if sampler.problem is not None:
                    raise sampler.problem
        finally:
            site.stop_questions()
            questions.join()
            sampler.stop()


# ---- the report ----


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of samples. Raises SluiceError."""
    try:
        text = file.read_text()
    except OSError as error:
        raise SluiceError(f"{file}: {error.strerror}", remedy="name a file that a run has written") from error
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def series_of(lines: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[Reading]]:
    """The readings of each series and kind."""
    found: dict[tuple[str, str], list[Reading]] = {}
    for line in lines:
        for name, values in line.get("sample", {}).items():
            for kind in BOUNDS.keys() & values.keys():
                found.setdefault((name, kind), []).append(Reading(line["hours"], values[kind], values["life"]))
    return found


def judge(lines: Sequence[Mapping[str, Any]], *, warm_up_hours: float, jobs_an_hour: float) -> list[Verdict]:
    """A verdict on each series. Raises TooShortError if there is none that can be judged."""
    verdicts = []
    for (name, kind), readings in sorted(series_of(lines).items()):
        bound = bound_of(name, kind)
        try:
            found = trend(readings, warm_up_hours=warm_up_hours)
        except TooShortError as error:
            verdicts.append(Verdict(name, kind, 0.0, None, error.what))
        else:
            verdicts.append(Verdict(name, kind, bound.at(found.hours, jobs_an_hour), found, ""))
    if all(one.trend is None for one in verdicts):
        raise TooShortError("no series has enough readings after its warm-up", remedy="run for longer")
    return verdicts


def report(file: Path) -> dict[str, Any]:
    """What a file of samples says, as one JSON object. Raises SluiceError."""
    lines = read_lines(file)
    if not lines or "about" not in lines[0]:
        raise SluiceError(f"{file}: no samples of a soak", remedy="name a file that a run has written")
    about = lines[0]["about"]
    rounds = [line for line in lines if "outcome" in line]
    outcome = Outcome()
    for line in rounds:
        outcome.add(Outcome(**line["outcome"]))
    hours = lines[-1]["hours"]
    jobs_an_hour = outcome.acknowledged / hours if hours else 0.0
    verdicts = judge(lines, warm_up_hours=about["warm_up_s"] / 3600, jobs_an_hour=jobs_an_hour)
    return {
        **about,
        "hours": hours,
        "rounds": len(rounds),
        "acts": rounds[-1]["acts"] if rounds else {},
        "jobs": asdict(outcome),
        "ended_daemons": sorted({name for line in rounds for name in line["ended"]}),
        "leaks": [f"{one.series} {one.kind}" for one in verdicts if one.leaks],
        "series": [{**asdict(one), "leaks": one.leaks} for one in verdicts],
    }


def problems(document: Mapping[str, Any]) -> list[str]:
    """What makes a run fail."""
    found = [f"leak: {name}" for name in document["leaks"]]
    found += [f"{name} = {document['jobs'][name]}" for name in WRONG if document["jobs"][name]]
    return found + [f"{name} ended by itself" for name in document["ended_daemons"]]


def print_report(document: Mapping[str, Any]) -> None:
    """A table of all series, and what became of the jobs."""
    click.echo(f"{'series':<28} {'kind':<12} {'mean':>10} {'slope/h':>10} {'error':>9} {'bound':>9}  verdict")
    for one in document["series"]:
        left = f"{one['series']:<28} {one['kind']:<12}"
        if one["trend"] is None:
            click.echo(f"{left} {one['note']}")
            continue
        numbers = f"{one['trend']['mean']:>10.1f} {one['trend']['slope']:>10.2f} {one['trend']['error']:>9.2f}"
        click.echo(f"{left} {numbers} {one['bound']:>9.1f}  {'LEAK' if one['leaks'] else 'ok'}")
    jobs = ", ".join(f"{name} {document['jobs'][name]}" for name in ("acknowledged", "cancelled", *WRONG))
    click.echo(f"{document['hours']:.2f} h, {document['rounds']} rounds; jobs: {jobs}")
    click.echo("; ".join(f"{name} {count}" for name, count in Counter(document["acts"]).most_common()))
    for line in problems(document):
        click.echo(f"FAILED: {line}")


@click.command(help=__doc__)
@click.argument("duration", required=False)
@click.option("--report", "reported", is_flag=True, help="Run nothing: report the samples of an earlier run.")
@click.option("--rate", envvar="RATE", type=click.FloatRange(0.1, 50), default=0.5, show_default=True, help="Jobs/s.")
@click.option("--plugins", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Built plugins.")
@click.option("--samples", type=click.Path(path_type=Path), default=ROOT / "build/soak.samples", show_default=True)
@click.option("--json", "file", type=click.Path(path_type=Path), default=ROOT / "build/soak.json", show_default=True)
def main(duration: str | None, reported: bool, rate: float, plugins: Path | None, samples: Path, file: Path) -> None:
    """Run for DURATION, then report."""
    if not reported:
        if duration is None:
            raise UsageError(
                "no duration", remedy="name one, e.g. 20m or 72h, or --report for an earlier run's samples"
            )
        require_root("up")
        soak(parse_duration(duration), rate=rate, plugins=plugins, file=samples)
    document = report(samples)
    write_atomic(file, json.dumps(document, indent=1) + "\n")
    print_report(document)
    click.echo(f"the results are in {file}")
    sys.exit(1 if problems(document) else 0)


if __name__ == "__main__":
    run_program(main, "benchmarks.soak")
