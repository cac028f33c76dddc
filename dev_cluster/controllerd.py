"""Sluice's daemons on the controllers of a cluster, and its command there."""

from __future__ import annotations

import shlex

from dev_cluster.configuration import ADDRESSES
from dev_cluster.layout import INSIDE, Layout, python_in_tree
from dev_cluster.slurm_tree import SlurmTree
from sluice.base.run import PYTHON

_MAIN = ["-m", "sluice.main"]


def sluice_command(tree: SlurmTree, *words: str) -> list[str]:
    """`sluice` with these words, on a host of the cluster."""
    return [*PYTHON, *_MAIN, *words] if tree.root is None else python_in_tree([*_MAIN, *words])


def controllerd_command(host: str, tree: SlurmTree) -> list[str]:
    """The controllers' daemon on a controller."""
    place = INSIDE / "controllerd" / host
    return sluice_command(tree, "controllerd", "--state", str(place), "--events", str(place / "events.jsonl"), "-v")


def explaind_command(host: str, tree: SlurmTree) -> list[str]:
    """The explain service on a controller, at the controller's own address: all hosts share the network's ports."""
    return sluice_command(tree, "explaind", "--address", ADDRESSES[host])


def fleetd_command(tree: SlurmTree) -> list[str]:
    """The daemon that launches the nodes of pools, on a controller. Both controllers have one journal."""
    return sluice_command(tree, "fleetd", "-v", "--state-dir", str(INSIDE / "fleet"))


def write_power_programs(layout: Layout, tree: SlurmTree) -> None:
    """slurmctld's ResumeProgram and SuspendProgram. Raises OSError."""
    layout.programs.mkdir(mode=0o755, exist_ok=True)
    for do in ("resume", "suspend"):
        program = layout.programs / f"sluice-{do}"
        words = ["-c", f"from sluice.fleet.power import {do}; {do}()"]
        line = [*PYTHON, *words] if tree.root is None else python_in_tree(words)
        program.write_text(f'#!/bin/sh\nexec {shlex.join(line)} "$@"\n')
        program.chmod(0o755)


SERVE_FOLDERS = (
    ("sluice-serve", "/run/sluice-serve", "0755"),
    ("sluice-serve", "/var/lib/sluice/replicad", "0700"),
    ("sluice-gateway", "/var/lib/sluice-gateway", "0755"),
    ("sluice-gateway", "/var/lib/sluice-gateway/requests", "0755"),
    ("sluice-gateway", "/run/sluice-gateway", "0755"),
)
"""Owner, path and mode of what systemd would make for replicad and gateways."""


def serve_commands(host: str, tree: SlurmTree) -> list[tuple[str, str, list[str]]]:
    """Name, user and command line of what keeps services on a controller."""
    address = ["--address", ADDRESSES[host]]
    program = str(INSIDE / "bin/sluice-replica")
    found = [
        ("actd", "root", sluice_command(tree, "actd", "-v", "--replica-program", program)),
        ("replicad", "sluice-serve", sluice_command(tree, "replicad", "-v", *address)),
    ]
    if tree.root is None:  # the gateway's event loop is compiled for this machine
        found.append(("gateway", "sluice-gateway", sluice_command(tree, "gateway", "-v", *address)))
    return found


def write_replica_program(layout: Layout, tree: SlurmTree) -> None:
    """What a replica's job runs on the nodes. Raises OSError."""
    layout.programs.mkdir(mode=0o755, exist_ok=True)
    program = layout.programs / "sluice-replica"
    words = ["-m", "sluice.serve.replica.main"]
    program.write_text(
        f'#!/bin/sh\nexec {shlex.join([*PYTHON, *words] if tree.root is None else python_in_tree(words))} "$@"\n'
    )
    program.chmod(0o755)


def write_program(layout: Layout) -> None:
    """`sluice` for users of a cluster of another system's tree, which has no Python of ours. Raises OSError."""
    layout.programs.mkdir(mode=0o755, exist_ok=True)
    program = layout.programs / "sluice"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(python_in_tree(_MAIN))} "$@"\n')
    program.chmod(0o755)
