"""`sluice profile`: what a job's processes do with their GPUs."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sluice.cli.site_options import ClusterOptions, cluster_options

if TYPE_CHECKING:
    from sluice.profile.job import ProfiledJob
    from sluice.slurm.commands import Commands

_SECONDS = click.IntRange(1, 86_400)


@click.group("profile")
def command() -> None:
    """Profiles of jobs: kernels, copies, synchronisation and memory, of all nodes on one time line.

    JOB is 17 or 17_4; 17.0 and 17.batch are one step of it. A profile that is asked for with the job (srun
    --gpu-profile) stays next to its output.
    """


_CPU = click.option("--cpu", is_flag=True, help="Sample the processor, too: 99 times a second of each thread's time.")


def _of_job(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.argument("name", metavar="JOB[.STEP]")(cluster_options(command))


def _of_running(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option(
            "--events", type=click.IntRange(1000, 100_000_000), default=2_000_000, show_default=True, metavar="N",
            help="Most events of all processes that are read: 300 bytes of memory each.",
        ),
        click.option(
            "--seconds", type=_SECONDS, metavar="N", help="Profile the job for so long first; else what is there."
        ),
        _CPU,
    ):  # fmt: skip
        command = option(command)
    return _of_job(command)


def _job(did: str, name: str, cluster: ClusterOptions) -> tuple[Commands, ProfiledJob]:
    """The job, as whose user this process is from now on. Raises SluiceError."""
    from policy.audit import AuditLog
    from policy.site import STATE_FOLDER
    from sluice.profile.job import find_job, own_or_raise
    from sluice.slurm.commands import Commands
    from sluice.slurm.user import drop_privileges

    commands = Commands(prefix=cluster.prefix, conf=cluster.conf, timeout=60)
    job = find_job(commands, name)
    if os.geteuid() == 0 and job.uid != 0:
        audit = AuditLog((cluster.state or STATE_FOLDER) / "audit")
        audit.append("root", f"profile {did}", str(job.number), {"uid": job.uid, "step": job.step})
        drop_privileges(job.uid)
    own_or_raise(job)
    return commands, job


def _wanted(cpu: bool, seconds: int | None = 0) -> int:
    """What is collected from now on. Raises UsageError where nothing is."""
    from sluice.base.errors import UsageError
    from sluice.profile.collect import ALL, WITH_SAMPLES

    if cpu and seconds is None:
        raise UsageError("--cpu: nothing is collected without --seconds", remedy="add --seconds, or start with --cpu")
    return WITH_SAMPLES if cpu else ALL


@contextmanager
def _place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sluice-profile-") as folder:
        yield Path(folder)


@command.command("start")
@click.option("--seconds", type=_SECONDS, metavar="N", help="Until then; without it, until `sluice profile stop`.")
@_CPU
@_of_job
def start(name: str, seconds: int | None, cpu: bool, cluster: ClusterOptions) -> None:
    """Start a profile of a job that runs."""
    from sluice.base.errors import SluiceError
    from sluice.profile.job import collector

    commands, job = _job("start", name, cluster)
    with _place() as folder, collector(commands, job, folder) as nodes:
        count = nodes.start(job.step or "*", seconds or 0, _wanted(cpu))
        _say_problems(nodes.problems)
        if not count:
            raise SluiceError(
                f"job {name}: no step with GPUs", remedy="profiled are steps that sluice-task-prolog has seen"
            )
        click.echo(f"started on {len(nodes.nodes)} nodes", err=True)


@command.command("stop")
@_of_job
def stop(name: str, cluster: ClusterOptions) -> None:
    """Stop the profile of a job. What it has stays on the nodes until the job ends."""
    from sluice.profile.job import collector

    commands, job = _job("stop", name, cluster)
    with _place() as folder, collector(commands, job, folder) as nodes:
        nodes.stop(job.step or "*")
        _say_problems(nodes.problems)
        click.echo(f"stopped on {len(nodes.nodes)} nodes", err=True)


@command.command("get")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Default: sluice-profile-JOB.json.gz in this folder.",
)  # fmt: skip
@_of_running
def get(
    name: str,
    output: Path | None,
    seconds: int | None,
    events: int,
    cpu: bool,
    cluster: ClusterOptions,
) -> None:
    """Write a profile as a file that https://ui.perfetto.dev opens."""
    from sluice.profile.job import timeline
    from sluice.profile.trace import write

    wanted = _wanted(cpu, seconds)
    commands, job = _job("get", name, cluster)
    path = output or Path(f"sluice-profile-{name}.json.gz")
    with timeline(commands, job, seconds, events, wanted) as found:
        count = write(found, path)
        _say_problems(found.notes)
    click.echo(f"{path}: {count} events; open it in https://ui.perfetto.dev", err=True)


@command.command("summary")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@_of_running
def summary(
    name: str,
    seconds: int | None,
    events: int,
    cpu: bool,
    as_json: bool,
    cluster: ClusterOptions,
) -> None:
    """What GPUs did: busy, copies, idle, what overlaps, the kernels that took longest, the slowest rank."""
    from sluice.profile.job import timeline
    from sluice.profile.summary import render, summarise

    wanted = _wanted(cpu, seconds)
    commands, job = _job("summary", name, cluster)
    with timeline(commands, job, seconds, events, wanted) as found:
        document = summarise(found)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        click.echo("\n".join(render(document)))


def _say_problems(problems: list[str]) -> None:
    from sluice.base.text import one_line

    for problem in problems[:32]:
        click.echo(f"note: {one_line(problem)}", err=True)
