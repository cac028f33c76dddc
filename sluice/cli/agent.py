"""`sluice agent`: the node agent, what it knows, and the records of jobs."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prolog_epilog.guarding import MEMORY, PROGRAM, VARIABLE
from sluice.base.errors import SluiceError
from sluice.base.text import one_line
from sluice.core.limit import library_path

if TYPE_CHECKING:
    from sluice.exchange.record import JobRecord

SOCKET = "/run/sluice/agent.sock"
ROOTS = "/run/sluice/ask/0"  # where root does not wait for others
RECORDS = "/var/lib/sluice/records"
_BYTES = ("asked", "bytes", "charged", "limit")
# By default glibc gives threads up to 8 arenas for each core, and keeps in each what was freed there.
_ARENAS = {"MALLOC_ARENA_MAX": "2"}


@click.group("agent", invoke_without_command=True)
@click.option("--run", "run", default="/run/sluice", show_default=True, type=click.Path(path_type=Path))
@click.option("--records", default=RECORDS, show_default=True, type=click.Path(path_type=Path))
@click.option(
    "--policy",
    default="/etc/slurm/sluice.policy",
    show_default=True,
    type=click.Path(path_type=Path),
    help="The compiled policy with the tenants' caps per GPU.",
)
@click.option(
    "--library", type=click.Path(path_type=Path), help="The preloaded limiter. Default: the one that came with Sluice."
)
@click.pass_context
def command(context: click.Context, run: Path, records: Path, policy: Path, library: Path | None) -> None:
    """Run the node agent (as root, one a node), until SIGTERM."""
    if context.invoked_subcommand is not None:
        return
    if VARIABLE not in os.environ:
        _become_guard(run)
    from prolog_epilog.daemon import serve
    from prolog_epilog.state import Settings

    serve(Settings(run=run, records=records, policy=policy, library=library or library_path()))


def _become_guard(run: Path) -> None:
    """The small program that restarts this command as its child. Raises SluiceError, OSError."""
    if os.geteuid() != 0:
        raise SluiceError("sluice agent: not root", remedy="start it by systemd, or with sudo")
    run.mkdir(mode=0o755, parents=True, exist_ok=True)
    program = library_path().with_name(PROGRAM)
    words = [str(program), str((run / MEMORY).parent.absolute()), sys.executable, *sys.orig_argv[1:]]
    try:
        os.execve(program, words, _ARENAS | dict(os.environ))  # noqa: S606 - no shell
    except OSError as error:
        raise SluiceError(f"{program}: {error.strerror}", remedy="install Sluice again") from error


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Print the agent's whole answer.")
def status(as_json: bool) -> None:
    """What the agent of this node knows: GPUs, drivers, jobs and their limits (root only)."""
    answer = _ask(do="status")
    if as_json:
        click.echo(json.dumps(answer))
        return
    click.echo(f"node {answer['node']}: {len(answer['devices'])} devices, {len(answer['jobs'])} jobs")
    for vendor, state in answer["vendors"].items():
        click.echo(f"driver {vendor}: {state}")
    click.echo(f"policy: {answer['policy']}")
    click.echo(f"rungs: {answer['rungs']}")
    for job in answer["jobs"]:
        for grant in job["grants"]:
            limit = "whole" if grant["limit"] is None else f"{grant['limit'] >> 20} MiB"
            limit += f" by {grant['rung']}" if grant["rung"] != "none" else ""
            share = f", {job['share_percent']} % by {job['share_by']}" if job["share_percent"] else ""
            click.echo(
                f"job {job['job']} ({job['user']}): GPU {grant['index']}, {limit}{share}, "
                f"peak {grant['peak'] >> 20} MiB"
            )


@command.command()
@click.argument("job", type=int)
@click.option("--json", "as_json", is_flag=True, help="The whole record, as JSON.")
@click.option("--records", default=RECORDS, show_default=True, type=click.Path(path_type=Path))
def record(job: int, as_json: bool, records: Path) -> None:
    """The record of a job that ran on this node: what it was given, what held it, what was done to it."""
    from sluice.exchange.record import Store

    found = Store(records).load(job)
    if as_json:
        click.echo(found.to_json(), nl=False)
        return
    click.echo("\n".join(_record_lines(found)))


def _record_lines(found: JobRecord) -> list[str]:
    ended = "running" if found.ended is None else f"ended {_clock(found.ended)}"
    lines = [
        f"job {found.job}: {found.user}, account {found.account}, on {found.node} from {_clock(found.started)}, {ended}"
    ]
    for grant in found.grants:
        request = "all of it" if grant.asked is None else _size(grant.asked)
        held = "no limit" if grant.limit is None else f"{_size(grant.limit)}, held by: {grant.rung}"
        clean = {None: "", True: "; returned clean", False: "; NOT returned clean"}[grant.clean]
        lines.append(
            f"GPU {grant.index} {grant.model}: asked {request}, limit {held}, peak {_size(grant.peak)}, "
            f"refused {grant.refused} times{clean}"
        )
    indices = {grant.uuid: f"GPU {grant.index}" for grant in found.grants}
    for event in found.events:
        words = []
        for key, value in event.detail.items():
            if key in ("uuid", "uuids"):
                words += [indices.get(uuid, uuid) for uuid in ([value] if key == "uuid" else value)]
            else:
                words.append(f"{key}={_size(value) if key in _BYTES and value is not None else value}")
        if event.times > 1:
            words.append(f"({event.times} times)")
        lines.append(f"{_clock(event.time)} {event.action} {' '.join(words)}")
    if found.events_left_out:
        lines.append(f"and {found.events_left_out} events more")
    return [one_line(line, limit=None) for line in lines]


def _clock(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment))


def _size(count: int) -> str:
    return f"{count / (1 << 20):,.0f} MiB"


def _ask(**request: Any) -> dict[str, Any]:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(20)
            connection.connect(ROOTS if os.access(ROOTS, os.W_OK) else SOCKET)
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as lines:
                answer = json.loads(lines.readline() or b'{"error": "no answer"}')
    except OSError as error:
        raise SluiceError(
            f"the node agent at {SOCKET}: {error.strerror or error}", remedy="start it: systemctl start sluice-agent"
        ) from error
    if "error" in answer:
        raise SluiceError(f"the node agent: {answer['error']}")
    return dict(answer["ok"])
