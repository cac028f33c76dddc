"""The steps around a change of a node's partitions: it is drained before; after, its GRES is written and it is resumed.

The node's reason in Slurm shows who drained it, so nothing else has to be remembered: a run that was killed is
finished by the next one, and a node that somebody else drained stays drained.

A restart of the node removes the layout. `restore` makes it again before slurmd starts, when nothing has to be
drained for it, and drains the node where that fails.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from gres_probe.children import read_all
from gres_probe.collect import DEFAULT_DIR, load_inventories, write_inventory
from gres_probe.deploy import gres_changes
from gres_probe.probe import probe_node
from sluice.base.errors import SluiceError
from sluice.base.run import CommandError
from sluice.base.slurm_version import SlurmVersion
from sluice.base.text import one_line
from sluice.slurm.answers import Node
from sluice.slurm.commands import Commands
from sluice.slurm.slurm_conf import read_config, read_slurm_conf
from sluice.slurm.text import TextClient

REASON = "sluice mig: the layout of its GPUs changes"
NOT_RESTORED = "sluice mig: its GPUs are not laid out after its start"
SOCKET = "/run/sluice/agent.sock"
_PROBE_S = 60.0  # without persistence mode, a driver initialises each GPU again
_LONGEST_REASON = 240  # slurmdbd keeps 255 bytes


class Relayout:
    """One node. `progress` gets lines for people."""

    def __init__(
        self,
        node: str,
        commands: Commands,
        progress: Callable[[str], None],
        *,
        agent: str = SOCKET,
        period: float = 1.0,
    ) -> None:
        self.name = node
        self._commands = commands
        self._client = TextClient(commands)
        self._progress = progress
        self._agent = agent
        self._period = period

    def node(self) -> Node:
        """The node as slurmctld has it. Raises SluiceError."""
        for one in self._client.nodes():
            if one.name == self.name:
                return one
        raise SluiceError(f"node {self.name!r}: not in Slurm's configuration", remedy="name it with --node")

    def drain(self, wait: float) -> None:
        """No new jobs, and the running ones ended. Raises SluiceError when they have not within `wait` seconds."""
        node = self.node()
        if "drain" not in node.flags:
            self._update("state=drain", f"reason={REASON}")
        elif not _ours(node):
            self._progress(f"node {self.name} was drained already ({node.reason}): it stays drained")
        end = time.monotonic() + wait
        while _has_jobs(state := self.node()):
            if time.monotonic() >= end:
                raise SluiceError(
                    f"node {self.name}: jobs are on it ({state.state}); it is drained, and no GPU was touched",
                    remedy="run it again when they have ended, or with --wait SECONDS",
                )
            time.sleep(self._period)

    def restore(self, lay_out: Callable[[], None], *, limit: float, wait: float) -> None:
        """After the node's start, before its agent and slurmd: `lay_out` partitions the GPUs as the policy says.

        It runs in its own process, for `limit` seconds at most. Where it fails the node is drained with the
        reason; that is tried for `wait` seconds while no controller answers. Raises SluiceError.
        """
        if (Path(self._agent).parent / "agent/lock").exists():  # /run is empty when a node starts
            raise SluiceError(
                f"node {self.name}: its agent has run since it started, so jobs may be on it",
                remedy="lay out a node in service with: sluice mig apply",
            )
        failure = _try_bounded(lay_out, limit)
        if failure is None:
            return
        try:
            self._put_away(failure.what, wait)
        except SluiceError as error:
            self._progress(f"node {self.name} could not be drained: {error}")
        raise failure

    def _put_away(self, why: str, wait: float) -> None:
        """Drain it; a node that is drained keeps its reason. Raises SluiceError."""
        reason = one_line(f"{NOT_RESTORED}: {why}", limit=_LONGEST_REASON)
        end = time.monotonic() + wait
        while True:
            try:
                if "drain" not in (node := self.node()).flags:
                    self._update("state=drain", f"reason={reason}")
                    self._progress(f"node {self.name} is drained; remove the cause, then run: sluice mig apply")
                else:
                    self._progress(f"node {self.name} was drained already ({node.reason}): it stays drained")
                return
            except CommandError:
                if time.monotonic() >= end:
                    raise
            time.sleep(self._period)

    def write_gres(
        self, slurm_conf: Path, inventories: Path | None, version: SlurmVersion, vendors: Collection[str]
    ) -> None:
        """Probe this node, put its inventory with the others, write GRES. Raises SluiceError until Slurm has it.

        `vendors`: whose GPUs are laid out here.
        """
        folder, inventory = inventories or DEFAULT_DIR, probe_node(node=self.name, timeout=_PROBE_S)
        partitioned = {(gpu.vendor, gpu.index) for gpu in inventory.gpus if gpu.partitioned}
        read = {gpu.vendor for gpu in inventory.gpus}
        for problem in inventory.problems:
            # What gres.conf does not name Slurm leaves open to every job.
            unread = problem.vendor in vendors and problem.vendor not in read
            if unread or (problem.vendor, problem.index) in partitioned:
                raise SluiceError(
                    f"node {self.name}: GRES is not written: {problem.what}",
                    remedy=f"{'see: sluice probe, dmesg' if unread else problem.remedy}; then run: sluice mig apply",
                )
            self._progress(f"left out of GRES: {problem.what}")
        write_inventory(folder, inventory)
        collected = load_inventories(folder)
        for failure in collected.failures.values():
            raise SluiceError(f"GRES is not written: {failure}", remedy="remove the cause, then run: sluice mig apply")
        gres = slurm_conf.parent / "gres.conf"
        changes = gres_changes(
            collected.inventories.values(),
            slurm_conf.parent,
            slurm=read_slurm_conf(slurm_conf),
            gres=read_config(gres) if gres.is_file() else None,
            slurm_version=version,
        )
        for path in changes.write():
            self._progress(f"wrote {path}")
        for step in changes.steps:
            self._progress(f"to do: {step}")
        has, wanted = self.node().gres, changes.configuration.nodes[self.name].gres
        if _plain(has) != _plain(wanted):
            # With `scontrol reconfigure` slurmctld accepts no other number of GPUs, and marks the node invalid.
            still = f"Slurm still has {has or 'none'}; it stays drained"
            raise SluiceError(
                f"node {self.name}: its GRES is written ({wanted}), and {still}",
                remedy="restart slurmctld and the node's slurmd, then run again: sluice mig apply",
            )

    def pause_agent(self) -> None:
        """Let the node's agent close the drivers: MIG mode cannot be changed while any process has the GPU open."""
        self._ask_agent("pause")

    def refresh_agent(self) -> None:
        """Let the node's agent find its devices again."""
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
        return "drain" in node.flags and _ours(node)

    def resume(self) -> None:
        """Only what this drained."""
        if self.drained_by_us():
            self._update("state=resume")
            self._progress(f"node {self.name} is resumed")

    def _update(self, *words: str) -> None:
        self._commands.output("scontrol", "update", f"nodename={self.name}", *words)


def _ours(node: Node) -> bool:
    """Whether the reason of a drained node is one of those above."""
    return node.reason.partition(" [")[0] == REASON or node.reason.startswith(NOT_RESTORED)


def _try_bounded(work: Callable[[], None], limit: float) -> SluiceError | None:
    """The error of work that may crash or hang in a driver; None: it succeeded."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            os.write(writing, json.dumps(_failure(work)).encode())  # one line: a pipe takes it at once
        finally:
            os._exit(0)
    os.close(writing)
    output = read_all([reading], deadline=time.monotonic() + limit, limit=1 << 16)[reading]
    os.close(reading)
    if not output.ended:
        os.kill(child, signal.SIGKILL)  # not waited for: what hangs in a driver does not end
        return SluiceError(f"a driver gave no answer for {limit:.0f} s", remedy="see: dmesg")
    _, status = os.waitpid(child, 0)
    if not output.data:
        return SluiceError(f"a driver's library crashed ({os.waitstatus_to_exitcode(status)})", remedy="see: dmesg")
    what, remedy = json.loads(output.data)
    return SluiceError(what, remedy=remedy) if what else None


def _failure(work: Callable[[], None]) -> tuple[str, str]:
    """The error and its remedy; empty: it succeeded."""
    try:
        work()
    except SluiceError as error:
        return one_line(error.what, limit=1000), one_line(error.remedy, limit=1000)
    except Exception as error:  # with any error the node must not go into service
        traceback.print_exc()
        return one_line(f"{type(error).__name__}: {error}", limit=1000), ""
    return "", ""


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
