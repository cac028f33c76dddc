"""Entry point of `sluice`. Command groups are imported only when they are called, so that each starts fast."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from importlib import import_module

import click

from sluice.base.errors import SluiceError
from sluice.base.text import printable

# name -> (module, one line for --help); the module's click command is its attribute `command`.
COMMANDS: dict[str, tuple[str, str]] = {
    "actd": ("sluice.cli.actd", "Do what callers of `sluice web` ask, as them (runs next to it, as root)."),
    "agent": ("sluice.cli.agent", "The node agent: limits, watchdog, and job records."),
    "cluster": ("dev_cluster.commands.cluster", "A whole Slurm cluster on this machine, for tests and demonstrations."),
    "controllerd": ("sluice.cli.controllerd", "The controllers' daemon: job records, health, alerts, metrics."),
    "doctor": ("sluice.cli.doctor", "A read-only look at an existing Slurm site."),
    "explain": ("sluice.cli.explain", "Why a job has its priority and its nodes, or why it still waits."),
    "explaind": ("sluice.cli.explaind", "Answer `sluice explain` of users on other hosts (runs on the controllers)."),
    "fabric": ("sluice.cli.fabric", "The network between nodes: discover it, write it for Slurm, check it."),
    "failover": ("sluice.cli.failover", "The controllers: which one leads, readiness for a takeover, drills, history."),
    "fleetd": ("sluice.cli.fleetd", "The daemon that launches and ends the nodes of pools (on the controllers)."),
    "gateway-rpc": ("sluice.cli.gateway_rpc", "The gRPC door to the models and to batch jobs."),
    "gateway": ("sluice.cli.gateway", "The gateway of model services: the OpenAI API before their replicas."),
    "group": ("sluice.cli.group", "Group GPUs into classes."),
    "health": ("sluice.cli.health", "Faults of GPUs and nodes: checks, out of service, return."),
    "inventory": ("sluice.cli.inventory", "The GPUs of the cluster."),
    "lint": ("sluice.cli.lint", "Errors that slurmd and slurmctld would report in slurm.conf and gres.conf."),
    "gres": ("sluice.cli.gres", "Write gres.conf and node lines from inventories."),
    "mig": ("sluice.cli.mig", "Partition a node's GPUs (MIG, AMD partitions) as the policy says."),
    "node": ("sluice.cli.node", "Empty nodes: drain them, and move their jobs where these can go on."),
    "plugin": ("sluice.cli.plugin", "Sluice's plugins in Slurm: build, install, check, set the level, remove."),
    "pool": ("sluice.cli.pool", "Nodes that come and go: list, show, why, drain, return."),
    "power": ("sluice.cli.power", "Power of GPUs: budgets, what is drawn, why a job has its caps."),
    "profile": ("sluice.cli.profile", "What a job's processes do with their GPUs: start, stop, get, summary."),
    "probe": ("sluice.cli.probe", "The GPUs of this node."),
    "replicad": ("sluice.cli.replicad", "The daemon that keeps the replicas of model services (on the controllers)."),
    "report": ("sluice.cli.report", "What was used, by whom, and how efficiently."),
    "shadow": ("sluice.cli.shadow", "What Sluice would have decided differently (level shadow)."),
    "sim": ("dev_cluster.commands.sim", "Change the simulated GPUs of a cluster on this machine."),
    "serve": ("sluice.cli.serve", "Models as a service: list, show, create, scale, pause, remove."),
    "simulate": ("sluice.cli.simulate", "Replay a job history under other policies."),
    "alerts": ("sluice.cli.alerts", "Alerts: what fires, test sinks, set silences."),
    "apply": ("sluice.cli.apply", "Make the cluster what the policy file says."),
    "audit": ("sluice.cli.audit", "The audit log: who did what, when, by which policy."),
    "drift": ("sluice.cli.drift", "What was changed by hand since the last apply."),
    "import": ("sluice.cli.import_", "A policy file from an existing cluster."),
    "plan": ("sluice.cli.plan", "What the policy file would change."),
    "policy": ("sluice.cli.policy", "The policy file: check it, show it, its schema."),
    "quota": ("sluice.cli.quota", "What tenants may use, and use."),
    "tenant": ("sluice.cli.tenant", "Tenants: list, create, change, remove."),
    "whoami": ("sluice.cli.whoami", "What you may use."),
    "top": ("sluice.cli.top", "The cluster live: GPUs, jobs, tenants, the queue, events."),
    "token": ("sluice.cli.token", "Tokens for `sluice web` and gateways: create, rotate, list, revoke."),
    "web": ("sluice.cli.web", "The REST API."),
    "topo": ("sluice.cli.topo", "How the GPUs of a node are connected."),
}


_MOST_LINE = 800  # characters of what is said of a word on the command line


class LazyGroup(click.Group):
    """A group whose subcommands are listed without being imported."""

    def list_commands(self, context: click.Context) -> list[str]:
        """All names, sorted."""
        return sorted(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Import one command."""
        if name not in COMMANDS:
            return None
        try:
            command = import_module(COMMANDS[name][0]).command
        except ModuleNotFoundError as error:
            if error.name != "dev_cluster":
                raise
            raise SluiceError(
                f"sluice {name}: not installed on this host", remedy="install the package sluice-dev-cluster"
            ) from error
        assert isinstance(command, click.Command)  # noqa: S101 - a mistake in the table above
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """The table's own help lines, so that --help imports nothing."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in sorted(COMMANDS)])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sluice-slurm", message="sluice %(version)s")
def sluice() -> None:
    """Multi-tenant, multi-vendor GPU scheduling on Slurm."""


def main() -> None:
    """Run `sluice`: exit 0 ok, 1 failed, 2 usage; one line on stderr gives the error and its remedy."""
    try:
        code = sluice(prog_name="sluice", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)  # click returns the code of Context.exit
    except click.ClickException as error:
        error.show(said := io.StringIO())
        click.echo("\n".join(line[:_MOST_LINE] for line in printable(said.getvalue()).splitlines()), err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("sluice: interrupted", err=True)
        sys.exit(130)
    except SluiceError as error:
        click.echo(f"sluice: {printable(str(error))}", err=True)
        sys.exit(2 if error.usage else 1)
    except OSError as error:  # a full disk, a device that fails; a reader that went away is a silent 1 of click's
        place = f"{error.filename}: " if error.filename is not None else ""
        click.echo(printable(f"sluice: {place}{error.strerror or error}"), err=True)
        _abandon_output()
        sys.exit(1)


def _abandon_output() -> None:
    """Discard output that could not be written: the interpreter would try, and fail, again at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
