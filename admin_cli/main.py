"""Entry point of `sluice`. Command groups are imported only when they are called, so that each starts fast."""

from __future__ import annotations

import contextlib
import os
import sys
from importlib import import_module

import click

from sluice_base.errors import SluiceError

# name -> (module, one line for --help); the module's click command is its attribute `command`.
COMMANDS: dict[str, tuple[str, str]] = {
    "agent": ("admin_cli.agent", "The node agent: limits, watchdog, and what each job had."),
    "cluster": ("admin_cli.cluster", "A whole Slurm cluster on this machine, for tests and demonstrations."),
    "controllerd": ("admin_cli.controllerd", "What Sluice does again and again on the controllers (a daemon)."),
    "doctor": ("admin_cli.doctor", "A read-only look at an existing Slurm site."),
    "explain": ("admin_cli.explain", "Why a job has its priority and its nodes, or why it still waits."),
    "explaind": ("admin_cli.explaind", "Answer `sluice explain` of users on other hosts (runs on the controllers)."),
    "failover": ("admin_cli.failover", "The controllers: who leads, is the other one ready, drills, what happened."),
    "group": ("admin_cli.group", "Group GPUs into classes."),
    "health": ("admin_cli.health", "Faults of GPUs and nodes: found, out of service, and back."),
    "inventory": ("admin_cli.inventory", "The GPUs of the cluster."),
    "lint": ("admin_cli.lint", "What slurmd and slurmctld would complain about in slurm.conf and gres.conf."),
    "gres": ("admin_cli.gres", "Write gres.conf and node lines from inventories."),
    "mig": ("admin_cli.mig", "Lay out a node's GPUs in MIG instances or AMD partitions as the policy says."),
    "plugin": ("admin_cli.plugin", "Sluice's plugins in Slurm: build, install, watch, switch, take away."),
    "probe": ("admin_cli.probe", "The GPUs of this node."),
    "report": ("admin_cli.report", "What was used, by whom, and how well."),
    "shadow": ("admin_cli.shadow", "What Sluice would have done otherwise (level shadow)."),
    "sim": ("admin_cli.sim", "Change the simulated GPUs of a cluster on this machine."),
    "simulate": ("admin_cli.simulate", "Replay a job history under other policies."),
    "alerts": ("admin_cli.alerts", "What fires, whether the sinks work, and silence."),
    "apply": ("admin_cli.apply", "Make the cluster what the policy file says."),
    "audit": ("admin_cli.audit", "Who did what, when, by which policy."),
    "drift": ("admin_cli.drift", "What was changed by hand since the last apply."),
    "import": ("admin_cli.import_", "A policy file from an existing cluster."),
    "plan": ("admin_cli.plan", "What the policy file would change."),
    "policy": ("admin_cli.policy", "The policy file: check it, show it, its schema."),
    "quota": ("admin_cli.quota", "What tenants may use, and use."),
    "tenant": ("admin_cli.tenant", "Tenants: list, create, change, remove."),
    "whoami": ("admin_cli.whoami", "What may I use?"),
    "top": ("admin_cli.top", "The cluster live: GPUs, jobs, tenants, the queue, events."),
    "topo": ("admin_cli.topo", "How the GPUs of a node are linked."),
}


class LazyGroup(click.Group):
    """A group whose subcommands are listed without being imported."""

    def list_commands(self, context: click.Context) -> list[str]:
        """All names, sorted."""
        return sorted(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Import one command."""
        if name not in COMMANDS:
            return None
        command = import_module(COMMANDS[name][0]).command
        assert isinstance(command, click.Command)  # noqa: S101 - a mistake in the table above
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """The table's own help lines, so that --help imports nothing."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in sorted(COMMANDS)])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sluice", message="sluice %(version)s")
def sluice() -> None:
    """Multi-tenant, multi-vendor GPU scheduling on Slurm."""


def main() -> None:
    """Run `sluice`: exit 0 ok, 1 failed, 2 usage; one line on stderr says what is wrong and what to do."""
    try:
        code = sluice(prog_name="sluice", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)  # click returns the code of Context.exit
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("sluice: interrupted", err=True)
        sys.exit(130)
    except SluiceError as error:
        click.echo(f"sluice: {error}", err=True)
        sys.exit(2 if error.usage else 1)
    except OSError as error:  # a full disk, a device that fails; of a reader that went away click makes a silent 1
        place = f"{error.filename}: " if error.filename is not None else ""
        click.echo(f"sluice: {place}{error.strerror or error}", err=True)
        _abandon_output()
        sys.exit(1)


def _abandon_output() -> None:
    """What could not be written would be tried once more at the interpreter's end, and fail there a second time."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
