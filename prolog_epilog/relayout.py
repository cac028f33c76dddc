"""What goes around a change of a node's partitions: drained before, its GRES written and itself resumed after.

The node's reason in Slurm says who drained it, so that nothing else has to be remembered: a run that was killed is
finished by the next one, and a node that somebody else drained stays drained.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gres_probe.collect import DEFAULT_DIR, load_inventories, write_inventory
from gres_probe.deploy import plan
from gres_probe.probe import probe_node
from gres_probe.slurm_conf import read_config, read_slurm_conf
from sluice_base.errors import SluiceError
from sluice_base.slurm_version import SlurmVersion
from slurm_client.commands import Commands
from slurm_client.model import Node
from slurm_client.text import TextClient

REASON = "sluice mig: the layout of its GPUs changes"
SOCKET = "/run/sluice/agent.sock"


class Relayout:
    """One node. `tell` gets lines for people."""

    def __init__(
        self, node: str, commands: Commands, tell: Callable[[str], None], *, agent: str = SOCKET, period: float = 1.0
    ) -> None:
        self.name = node
        self._commands = commands
        self._client = TextClient(commands)
        self._tell = tell
        self._agent = agent
        self._period = period

    def node(self) -> Node:
        """The node as slurmctld has it. Raises SluiceError."""
        for one in self._client.nodes():
            if one.name == self.name:
                return one
        raise SluiceError(f"node {self.name!r}: Slurm has none of that name", remedy="name it with --node")

    def drain(self, wait: float) -> None:
        """No new jobs, and the running ones ended. Raises SluiceError when they have not within `wait` seconds."""
        node = self.node()
        if "drain" not in node.flags:
            self._update("state=drain", f"reason={REASON}")
        elif node.reason.partition(" [")[0] != REASON:
            self._tell(f"node {self.name} was drained already ({node.reason}): it stays so")
        end = time.monotonic() + wait
        while _has_jobs(state := self.node()):
            if time.monotonic() >= end:
                raise SluiceError(
                    f"node {self.name}: jobs are on it ({state.state}); it is drained, and no GPU was touched",
                    remedy="run it again when they have ended, or with --wait SECONDS",
                )
            time.sleep(self._period)

    def write_gres(self, slurm_conf: Path, inventories: Path | None, version: SlurmVersion) -> None:
        """Probe this node, put its inventory with the others, write GRES. Raises SluiceError until Slurm has it."""
        folder = inventories or DEFAULT_DIR
        write_inventory(folder, probe_node(node=self.name))
        collected = load_inventories(folder)
        for failure in collected.failures.values():
            raise SluiceError(f"GRES is not written: {failure}", remedy="mend it, then run: sluice mig apply")
        gres = slurm_conf.parent / "gres.conf"
        planned = plan(
            collected.inventories.values(),
            slurm_conf.parent,
            slurm=read_slurm_conf(slurm_conf),
            gres=read_config(gres) if gres.is_file() else None,
            slurm_version=version,
        )
        for path in planned.write():
            self._tell(f"wrote {path}")
        for step in planned.steps:
            self._tell(f"to do: {step}")
        has, wanted = self.node().gres, planned.configuration.nodes[self.name].gres
        if _plain(has) != _plain(wanted):
            # By `scontrol reconfigure` slurmctld takes no other number of GPUs, and calls the node invalid.
            still = f"Slurm still has {has or 'none'}; it stays drained"
            raise SluiceError(
                f"node {self.name}: its GRES is written ({wanted}), and {still}",
                remedy="restart slurmctld and the node's slurmd, then run again: sluice mig apply",
            )

    def pause_agent(self) -> None:
        """Let the node's agent close the drivers: MIG mode is not changed while anybody has the GPU open."""
        self._ask_agent("pause")

    def refresh_agent(self) -> None:
        """Let the node's agent find its devices anew."""
        self._ask_agent("restart")

    def _ask_agent(self, request: str) -> None:
        """Without an agent there is nothing to do. Raises SluiceError when it refuses."""
        with suppress(FileNotFoundError, ConnectionRefusedError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(20)
            connection.connect(self._agent)
            connection.sendall(json.dumps({"do": request}).encode() + b"\n")
            with connection.makefile("rb") as lines:
                answer = json.loads(lines.readline() or b"{}")
            if "error" in answer:
                raise SluiceError(f"the node agent: {answer['error']}", remedy="restart sluice-agent")

    def drained_by_us(self) -> bool:
        """Whether the node is drained, and by a run of this."""
        node = self.node()
        return "drain" in node.flags and node.reason.partition(" [")[0] == REASON

    def resume(self) -> None:
        """Only what this drained."""
        if self.drained_by_us():
            self._update("state=resume")
            self._tell(f"node {self.name} is resumed")

    def _update(self, *words: str) -> None:
        self._commands.output("scontrol", "update", f"nodename={self.name}", *words)


def _has_jobs(node: Node) -> bool:
    """Whether jobs run on a node, or their epilogs."""
    return bool(node.cpus_allocated) or node.state not in ("idle", "down") or "completing" in node.flags


def _plain(gres: str) -> dict[str, int]:
    """Counts by type, without the sockets that Slurm adds; of shards, their sum."""
    found: dict[str, int] = {}
    for word in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, *rest = word.split(":")
        count = re.fullmatch(r"(\d+)([KMG]?)", rest[-1]) if rest else None
        if count:
            key = name if name == "shard" else ":".join([name, *rest[:-1]])
            found[key] = found.get(key, 0) + int(count[1]) * 1024 ** " KMG".index(count[2] or " ")
    return found
