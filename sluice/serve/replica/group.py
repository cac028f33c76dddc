"""An engine on several nodes: sluice-replica runs on the first one, and starts the engine's other parts as one step.

The step is `srun` over the other nodes, each with `sluice-replica --member`, which stages the model there, starts the
engine with its rank, and ends with it. When one part ends, all end: srun kills the step, and the replica fails. Members
get the model from the first node, as other replicas do, by TLS.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.base.errors import SluiceError, UsageError
from sluice.base.log import log
from sluice.base.ports import free_port
from sluice.base.run import PYTHON
from sluice.exchange.serving import Orders, Peer
from sluice.serve.engines.base import ALONE, Group, Place, Start
from sluice.serve.engines.known import engine_of
from sluice.serve.replica.engine_process import EngineError, EngineProcess
from sluice.serve.replica.spec import MEMBER, MEMBERS, check_member, parse_spec
from sluice.serve.replica.stage import Staged, find_staged, stage

if TYPE_CHECKING:
    from sluice.exchange.serving import ReplicaSpec
    from sluice.serve.replica.share import Share

_SAID = re.compile(rb"(?:srun: error: |sluice-replica: )(.{1,300})")
_BOTH_S = 2.0  # to see which part ended, where the others end with it
_LOOK_S = 0.2
_MOST = 1 << 20
_NO_RATE = 1  # bytes a second that a member gives: nobody has its key


def group_of(spec: ReplicaSpec) -> Group:
    """Of rank 0, on this node."""
    if spec.nodes == 1:
        return ALONE
    return Group(spec.nodes, 0, os.environ.get("SLURMD_NODENAME") or socket.gethostname(), free_port(""))


class EngineGroup(EngineProcess):
    """The engine's part on this node and, as one process, all others."""

    def __init__(self, start: Start, folder: Path, spec: ReplicaSpec, group: Group, peer: Peer | None) -> None:
        """`peer`: who gives the model to members."""
        given = {
            "members": MEMBERS, "spec": asdict(spec), "group": asdict(group),
            "peers": _credentials(peer, group.nodes - 1),
        }  # fmt: skip
        others = str(group.nodes - 1)
        words = [
            "srun", "--relative=1", f"--nodes={others}", f"--ntasks={others}", "--ntasks-per-node=1", "--export=ALL",
            "--kill-on-bad-exit=1", "--wait=1", *PYTHON, "-m", "sluice.serve.replica.main", MEMBER,
        ]  # fmt: skip
        if shutil.which("srun") is None:
            raise EngineError(
                "srun: no such program", remedy="nodes of services over several nodes need Slurm's clients"
            )
        self._said = ""
        self._members = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
        )
        threading.Thread(target=self._pass_on, name="members' output", daemon=True).start()
        assert self._members.stdin is not None  # noqa: S101 - it is a pipe
        with suppress(BrokenPipeError), self._members.stdin as text:
            text.write(json.dumps(given).encode())
        try:
            super().__init__(start, folder)
        except BaseException:
            self._end_members(0)
            raise

    def ended(self) -> str | None:
        """Why it has ended, in words: where another part ended first, that."""
        why = super().ended()
        if why is not None:  # it may have missed another part, of which srun says so a moment later
            with suppress(subprocess.TimeoutExpired):
                self._members.wait(_BOTH_S)
        code = self._members.poll()
        if code is None:
            return why
        return f"the engine's part on another node has ended: {self._said or f'exit status {code} of srun'}"

    def end(self, seconds: float) -> None:
        """All parts."""
        self._end_members(signal.SIGTERM)
        super().end(seconds)
        with suppress(subprocess.TimeoutExpired):
            self._members.wait(seconds)
        self._end_members(signal.SIGKILL)

    def _end_members(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._members.pid, number or signal.SIGKILL)

    def _pass_on(self) -> None:
        """What members print, to the job's output; the first reason that they or srun give is kept."""
        pipe = self._members.stdout
        assert pipe is not None  # noqa: S101 - it is a pipe
        for line in pipe:
            with suppress(OSError):
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()
            if not self._said and (found := _SAID.match(line)):
                self._said = found[1].decode(errors="replace").strip()


def _credentials(peer: Peer | None, members: int) -> list[str]:
    """The peer and its key, for this user alone: Slurm sends a step's input in clear. One for each member, as munged
    decodes a credential once. Raises SluiceError."""
    if peer is None:
        return []
    from sluice.slurm.munge import encode

    return [encode(json.dumps(asdict(peer)).encode(), readable_by=os.geteuid()) for _ in range(members)]


# ---- on the other nodes ----


def member(gpus: int, parent: str | None) -> int:
    """Run the engine's part of this node until it ends (1) or is told to (0). Raises SluiceError, OSError."""
    document = json.loads(sys.stdin.read(_MOST))
    check_member(document)
    spec = parse_spec(json.dumps(document["spec"]))
    given = document["group"]
    group = Group(
        int(given["nodes"]), 1 + int(os.environ.get("SLURM_PROCID", "0")), str(given["host"]), int(given["port"])
    )
    if not 0 < group.rank < group.nodes:
        raise UsageError(f"rank {group.rank} of {group.nodes} nodes", remedy="it is started by sluice-replica alone")
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    folder = Path(tempfile.mkdtemp(prefix="sluice-replica.", dir=parent))
    engine = engine_of(spec.engine)
    try:
        staged = find_staged(spec) or _stage(spec, stopped, document["peers"][group.rank - 1 :][:1])
        log("member-staged", rank=group.rank, copied=staged.copied, taken=staged.taken, ucx=staged.by_ucx)
        place = Place(folder, 0, "", staged.path, gpus, group)
        process = EngineProcess(engine.start(spec, place), folder)
        process.was_ready = True  # its lines are in the job's output alone: they may have words of requests
        log("member", service=spec.service, rank=group.rank, of=group.nodes)
        while (why := process.ended()) is None and not stopped.wait(_LOOK_S):
            pass
        if why is None:
            process.end(engine.end_s)
            return 0
        raise SluiceError(why, remedy="see what it said, in the job's output")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _stage(spec: ReplicaSpec, stopped: threading.Event, credentials: list[str]) -> Staged:
    """From the peer that the credential names, if there is one; else, or where it gives nothing, from the storage."""
    share = _share(spec, *credentials) if credentials else None
    try:
        return stage(spec, stopped, share)
    finally:
        if share is not None:
            share.end()


def _share(spec: ReplicaSpec, credential: str) -> Share | None:
    """What takes from one peer; nobody knows of this one, or has its key. None: munged does not decode that, as where
    the step began later than a credential holds."""
    from sluice.serve.replica.certificate import make_context
    from sluice.serve.replica.share import Share
    from sluice.slurm.munge import MungeError, decode

    try:
        message = decode(credential)
    except MungeError as error:
        log("share-failed", what=error)
        return None
    if message.uid != os.geteuid():
        raise UsageError(f"a peer of uid {message.uid}", remedy="members are started by sluice-replica alone")
    orders = Orders("go on", (Peer(**json.loads(message.payload)),), reads=False)
    context, _ = make_context("member")
    share = Share(context, secrets.token_hex(32), _NO_RATE, lambda: share.tell(orders), spec.data_path)
    return share  # noqa: RET504 - it is told what to take as soon as there is something to stage
