"""The collector: a step of the job on all its nodes (`srun --overlap`) that starts and stops profiles and sends files.

It uses what the job has, as the job's user; nothing of a node's daemons takes part. It removes nothing on the nodes, so
that a collector that dies has lost nothing: the next one gets all of it again. What it answers is bounded here.
"""

from __future__ import annotations

import binascii
import re
import selectors
import subprocess
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from sluice.base.errors import SluiceError
from sluice.base.text import one_line
from sluice.profile.timeline import Offset, write_clocks

PROGRAM = "sluice-profile-node"
MOST_OF_NODE = 256 << 20
"""Bytes of a node's files, before they are compressed."""
MOST = 4 << 30
"""Of all nodes: what is written to the collector's disk."""
ALL, WITH_SAMPLES = 47, 47 | 64
"""What is collected: SLUICE_PROFILE_WANT_ALL; and samples of the processor."""
_ROUNDS = 8
_BEGIN_S, _ANSWER_S, _SEND_S = 60.0, 15.0, 300.0
_MOST_LINE = 4096
_PIECE = 1 << 16
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}\.profile\Z")
_WORD = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
_STEP = re.compile(r"[A-Za-z0-9]{1,16}\Z")
_MOST_PROBLEMS = 64
_MOST_FILES = 4096  # of a node, those that were sent again included


@dataclass(slots=True)
class _Node:
    """What one task of the step has said."""

    name: str = ""
    boot: str = ""
    said: set[str] = field(default_factory=set)
    count: int = 0
    files: int = 0
    best: tuple[int, int] | None = None
    """The shortest round trip, and the node's clock in its middle before this host's."""
    file: IO[bytes] | None = None
    inflate: zlib._Decompress | None = None
    left: int = 0

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        self.file = self.inflate = None


class Collector:
    """One step on all nodes of a job. A context manager."""

    def __init__(
        self, words: Sequence[str], tasks: int, folder: Path, env: dict[str, str] | None = None, most: int = MOST
    ) -> None:
        """`words`: what starts `tasks` node programs; `folder`: where files are written, NODE.STEP/NAME each.

        `most`: bytes of all of them.
        """
        self.problems: list[str] = []
        self._tasks, self._folder = tasks, folder
        self._nodes: dict[int, _Node] = {}
        self._most = self._room = min(most, MOST)
        self._asked_at = 0
        self._buffer = b""
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        try:
            self._step = subprocess.Popen(
                list(words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._complaints, env=env, bufsize=0
            )
        except OSError as error:
            raise SluiceError(
                f"{words[0]}: {error.strerror}", remedy="install Slurm's commands on this host"
            ) from error
        assert self._step.stdout is not None  # noqa: S101 - it is a pipe
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._step.stdout, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        try:
            self._await("hello", _BEGIN_S)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the step."""
        for node in self._nodes.values():
            node.close()
        assert self._step.stdin is not None and self._step.stdout is not None  # noqa: S101
        try:
            self._step.stdin.close()
            self._step.wait(5)
        except (OSError, subprocess.TimeoutExpired):
            self._step.kill()
            self._step.wait()
        self._selector.close()
        self._step.stdout.close()
        self._complaints.close()

    @property
    def nodes(self) -> list[str]:
        """Those that have answered."""
        return [node.name for node in self._nodes.values()]

    # ---- what is asked ----

    def start(self, step: str, seconds: int, wanted: int = ALL) -> int:
        """Start a profile; in how many steps of nodes. Raises SluiceError, OSError."""
        self._compare_clocks()
        number = time.time_ns() // 10**8 % (1 << 32)  # a later one is larger
        self._ask(f"start {step} {number} {seconds} {wanted}", "started")
        return sum(node.count for node in self._nodes.values())

    def stop(self, step: str) -> None:
        """Stop it, and wait until the files are complete. Raises SluiceError."""
        self._ask(f"stop {step}", "stopped")

    def collect(self, step: str) -> int:
        """Get all files; how many bytes had no room. Raises SluiceError, OSError."""
        self._compare_clocks()
        self._ask(f"send {step} {min(MOST_OF_NODE, self._room // self._tasks)}", "sent", _SEND_S)
        return sum(node.count for node in self._nodes.values())

    def wait(self, seconds: float) -> bool:
        """Until so much time has passed, or the job has ended and what it sent is here. Raises SluiceError, OSError."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not self._read(left):
                return False
        return True

    def _compare_clocks(self) -> None:
        """As NTP does, with the shortest of several round trips."""
        for number in range(_ROUNDS):
            self._ask(f"clock {number}", "clock")
        now = time.time_ns() - time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        clocks = {}
        for node in self._nodes.values():
            if node.best is not None:
                took, before = node.best
                clocks[node.name, node.boot] = Offset(node.name, now - before, took // 2)
        write_clocks(self._folder, clocks)

    def _ask(self, line: str, answer: str, seconds: float = _ANSWER_S) -> None:
        for node in self._nodes.values():
            node.said.discard(answer)
            node.count = 0
        assert self._step.stdin is not None  # noqa: S101
        self._asked_at = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        try:
            self._step.stdin.write(line.encode() + b"\n")
        except BrokenPipeError:
            raise self._ended() from None
        self._await(answer, seconds)

    def _await(self, answer: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        while sum(answer in node.said for node in self._nodes.values()) < self._tasks:
            left = end - time.monotonic()
            if left <= 0:
                if not self._nodes:
                    raise SluiceError(
                        f"no node has answered within {seconds:g} s{self._complaint()}",
                        remedy="see whether the job runs: squeue",
                    )
                silent = self._tasks - sum(answer in node.said for node in self._nodes.values())
                self._problem(f"{silent} of {self._tasks} nodes have not answered within {seconds:g} s")
                return
            if not self._read(left):
                raise self._ended()

    def _ended(self) -> SluiceError:
        return SluiceError(
            f"the job's step has ended{self._complaint()}", remedy="see whether the job still runs: squeue"
        )

    def _complaint(self) -> str:
        self._complaints.seek(0)
        said = one_line(self._complaints.read(4096).decode("utf-8", "replace").replace("srun: ", ""))
        return f": {said}" if said else ""

    def _problem(self, text: str) -> None:
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(one_line(text))

    # ---- what is answered ----

    def _read(self, seconds: float) -> bool:
        """Take what is there, or wait for it; whether there may be more. Raises OSError of this host's disk."""
        if not self._selector.select(seconds):
            return True
        assert self._step.stdout is not None  # noqa: S101
        piece = self._step.stdout.read(_PIECE)
        if not piece:
            return False
        lines = (self._buffer + piece).split(b"\n")
        self._buffer = lines.pop()
        if len(self._buffer) > _MOST_LINE:
            raise SluiceError("a node sends a line that is too long", remedy="install one version of Sluice")
        for line in lines:
            self._take(line)
        return True

    def _take(self, line: bytes) -> None:
        task, _, rest = line.partition(b" ")
        word, _, rest = rest.partition(b" ")
        if not task.isdigit() or len(task) > 6 or int(task) >= self._tasks:
            return  # what srun itself says, e.g. of a task that ended
        node = self._nodes.setdefault(int(task), _Node())
        if word == b"data":
            self._data(node, rest)
            return
        try:
            self._answer(node, word.decode("ascii"), rest.decode("ascii", "replace").split(" "))
        except (ValueError, LookupError):
            self._problem(f"task {int(task)}: an answer without sense")

    def _answer(self, node: _Node, word: str, fields: list[str]) -> None:
        if word == "hello":
            if not _WORD.match(fields[0]):
                raise ValueError(fields[0])
            node.name, node.boot = fields[0], one_line(fields[1], limit=40)
        elif word == "clock":
            now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
            took = now - self._asked_at
            if node.best is None or took < node.best[0]:
                node.best = took, int(fields[1]) - (now + self._asked_at) // 2
        elif word == "file":
            self._open(node, fields)
        elif word == "problem":
            self._problem(f"{node.name}: {' '.join(fields)}")
        else:
            node.close()
            node.count = min(1 << 40, int(fields[0]))
        node.said.add(word)

    def _open(self, node: _Node, fields: list[str]) -> None:
        node.close()
        step, name, size = fields[0], fields[1], int(fields[2])
        if not _STEP.match(step) or not _NAME.match(name) or not node.name or size < 0:
            raise ValueError(name)
        node.files += 1
        if node.files > _MOST_FILES:
            raise ValueError(name)
        folder = self._folder / f"{node.name}.{step}"
        folder.mkdir(mode=0o700, exist_ok=True)
        node.left = min(size, self._room)
        if node.left < size:
            self._problem(f"{node.name}: {name} is not whole: {self._most >> 20} MiB are collected")
        self._room -= node.left
        node.file = (folder / name).open("wb")
        node.inflate = zlib.decompressobj()

    def _data(self, node: _Node, text: bytes) -> None:
        if node.file is None or node.inflate is None:
            return
        try:
            data = node.inflate.decompress(binascii.a2b_base64(text), node.left + 1)
        except (binascii.Error, zlib.error):
            self._problem(f"{node.name}: a file came damaged")
            node.close()
            return
        if len(data) > node.left:
            data = data[: node.left]
            self._problem(f"{node.name}: a file is larger than it was said to be")
            node.file.write(data)
            node.close()
            return
        node.left -= len(data)
        node.file.write(data)
