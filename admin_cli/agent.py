"""`sluice agent`: the node agent, what it knows, and the records of jobs."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import click

from sluice_base.errors import SluiceError

SOCKET = "/run/sluice/agent.sock"
RECORDS = "/var/lib/sluice/records"


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
    from prolog_epilog.agent import Agent
    from prolog_epilog.state import Settings
    from sluice_core.limit import library_path
    from usage.metrics.node import NodeExporter

    agent = Agent(Settings(run=run, records=records, policy=policy, library=library or library_path()))
    metrics = NodeExporter(agent, records.parent / "metrics")
    agent.start()
    agent.serve()
    metrics.output.close()
    if agent.again:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - this very program


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
    for job in answer["jobs"]:
        for grant in job["grants"]:
            limit = "whole" if grant["limit"] is None else f"{grant['limit'] >> 20} MiB by {grant['rung']}"
            click.echo(
                f"job {job['job']} ({job['user']}): GPU {grant['index']}, {limit}, peak {grant['peak'] >> 20} MiB"
            )


@command.command()
@click.argument("job", type=int)
@click.option("--records", default=RECORDS, show_default=True, type=click.Path(path_type=Path))
def record(job: int, records: Path) -> None:
    """The record of a job that ran on this node, as JSON."""
    from prolog_epilog.record import Store

    click.echo(Store(records).load(job).to_json(), nl=False)


def _ask(**request: Any) -> dict[str, Any]:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(20)
            connection.connect(SOCKET)
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
