"""The node's part in a job's preflight: it asks the controllers what to measure, measures, and gets the verdict.

A request of the prolog, for jobs with GPUs. What measures is a program without rights (programs/fabric_test.py), of
whose output only numbers are believed. Where no controller answers, or time is over, the job starts without a verdict.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from policy.preflight import NodePreflight
from prolog_epilog.server import Peer
from prolog_epilog.state import State
from sluice.base.errors import SluiceError
from sluice.base.log import log
from sluice.base.text import one_line
from sluice.exchange.courier import VERSION
from sluice.exchange.record import JobRecord

PROGRAM = Path(__file__).parent / "programs/fabric_test.py"
_PYTHON = "/usr/bin/python3"
_NOBODYS = 65533  # not nobody's: services share that one, and could trace or end the program
_FIND = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_START_S = 5.0
_DRAIN_S = 10.0  # after the bound, in which the controllers take a faulty node out of service
_DRAIN_LOOK_S = 0.2
_AGAIN_S = (0.02, 5.0)  # the least and the most between two questions
_MOST_LINE = 4096
_MOST_RESULTS = 4096

Send = Callable[[dict[str, Any]], dict[str, Any]]
"""Asks the controllers' daemon. Raises SluiceError."""


class Preflights:
    """Answers the request ``preflight``; `found` holds what the last one found on this node, by health check."""

    def __init__(
        self, state: State, policy: Callable[[], NodePreflight], send: Send, interface: Callable[[], str]
    ) -> None:
        self._state = state
        self._policy = policy
        self._send = send
        self._interface = interface
        self._found: dict[str, list[str]] | None = None
        self.on_found: Callable[[], None] = lambda: None  # a round of health checks is due

    def found(self) -> dict[str, list[str]] | None:
        """For health checks; None where there was no preflight since the agent started, or none is wanted."""
        return None if self._policy().when == "never" else self._found

    def longest_s(self) -> int:
        """So many seconds at most a job waits; 0 where no job is tested."""
        policy = self._policy()
        return 0 if policy.when == "never" else policy.bound_s + math.ceil(_DRAIN_S) + 1

    def run(self, *, peer: Peer, job: int) -> dict[str, Any]:
        """A request: take part until the verdict. The answer's `fault` says why the node is drained, where it is."""
        del peer
        policy = self._policy()
        with self._state.lock:
            record = self._state.records.get(job)
        if policy.when == "never" or record is None or record.refused:
            return {}
        outcome = self._within(record, policy.bound_s)
        if outcome is None:
            return {}
        words = one_line(str(outcome["text"]), limit=1000)
        with self._state.lock:
            record.note("preflight", what=words, verdict=one_line(str(outcome.get("verdict", "")), limit=20))
            self._state.jobs.save(record)
        faults = {str(name): [one_line(str(one)) for one in some] for name, some in dict(outcome["faults"]).items()}
        if faults or outcome.get("good") is True:
            self._found = faults
        if faults:
            self.on_found()
            if self._is_drained(record, words):
                return {"fault": f"{words}; see: sluice fabric check, sluice health list"}
        return {}

    def _within(self, record: JobRecord, seconds: float) -> dict[str, Any] | None:
        """The controllers' verdict, if there is one in time, whatever hangs: they, this program or the pipe to it."""
        verdict: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        end = time.monotonic() + seconds

        def take_part(measuring: Measuring) -> None:
            outcome = None
            try:
                outcome = self._take_part(record, measuring, end)
            except (SluiceError, OSError, ValueError, TypeError, LookupError, ArithmeticError) as error:
                log("problem", job=record.job, what=f"no preflight: {one_line(str(error) or repr(error))}")
            verdict.put(outcome)

        with Measuring() as measuring, suppress(queue.Empty):
            threading.Thread(target=take_part, args=(measuring,), daemon=True).start()
            return verdict.get(timeout=seconds)
        log("problem", job=record.job, what=f"no preflight: no verdict in {seconds:g} s")
        return None

    def _ask(self, record: JobRecord, **more: Any) -> dict[str, Any]:
        head = {"version": VERSION, "do": "preflight", "job": record.job}
        return self._send({**head, "node": self._state.node, **more})

    def _devices(self, record: JobRecord) -> tuple[list[str], list[str]]:
        """RDMA interfaces near the job's GPUs, and their GRES types."""
        granted = {grant.uuid for grant in record.grants}
        devices = [one for one in self._state.devices if one.uuid in granted]
        nics = dict.fromkeys(nic for one in devices for nic in one.nics[:1])
        return sorted(nics), sorted({one.type for one in devices if one.type})

    def _take_part(self, record: JobRecord, measuring: Measuring, end: float) -> dict[str, Any] | None:
        """The controllers' last answer; None where there is no preflight, or no time left."""
        nics, types = self._devices(record)
        batch: int | None = None
        answer = self._ask(record, types=types, begins=True)
        while time.monotonic() < end:
            if answer["state"] in ("none", "done"):
                return answer if answer["state"] == "done" else None
            if answer["state"] == "join":
                hello = measuring.start()
                join = {"port": hello["port"], "tools": hello["tools"], "nics": nics, "types": types}
                answer = self._ask(record, **join, interface=self._interface())
            elif answer["state"] == "test":
                results = measuring.measure(answer["rounds"], end)
                batch = int(answer["batch"])
                answer = self._ask(record, batch=batch, results=results)
            else:
                time.sleep(min(max(float(answer["again_s"]), _AGAIN_S[0]), _AGAIN_S[1]))
                answer = self._ask(record, batch=batch)
        raise SluiceError("no verdict in time")

    def _is_drained(self, record: JobRecord, words: str) -> bool:
        """Wait until the node is drained, by its health report: Slurm then starts the job elsewhere.

        Where the controllers do not drain it (a policy in shadow, the breaker) the job starts here.
        """
        end = time.monotonic() + _DRAIN_S
        while time.monotonic() < end:
            drained = False
            with suppress(SluiceError):
                drained = self._ask(record).get("drained") is True
            if drained:
                return True
            time.sleep(_DRAIN_LOOK_S)
        log("problem", job=record.job, what=f"the node is not drained for what was found: {words}")
        return False


class Measuring:
    """The program that measures, and what it says; it ends with this object."""

    def __init__(self) -> None:
        self._program: subprocess.Popen[bytes] | None = None
        self._lines: queue.Queue[bytes] = queue.Queue(_MOST_RESULTS)
        self._lock = threading.Lock()
        self._over = False

    def __enter__(self) -> Measuring:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over = True
        if self._program is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._program.pid, signal.SIGKILL)  # with its perftest
            self._program.wait()

    def start(self) -> dict[str, Any]:
        """Start it, and return where it listens. Raises SluiceError."""
        with self._lock:
            if self._over or self._program is not None:
                raise SluiceError("the controllers have begun another preflight of the job, or time is over")
            self._program = program = self._start()
        threading.Thread(target=self._read, args=(program,), daemon=True).start()
        said = self._line(time.monotonic() + _START_S)
        return {"port": int(said["port"]), "tools": [str(one) for one in said["tools"]][:8]}

    def _start(self) -> subprocess.Popen[bytes]:
        """As a user of its own, from a file that only root may be able to reach. Raises OSError."""
        descriptor = os.open(PROGRAM, os.O_RDONLY | os.O_CLOEXEC)
        try:
            root = os.geteuid() == 0
            return subprocess.Popen(
                [_PYTHON, "-IS", f"/proc/self/fd/{descriptor}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(descriptor,),
                cwd="/",
                env={"PATH": _FIND},
                user=_NOBODYS if root else None,
                group=_NOBODYS if root else None,
                extra_groups=[] if root else None,
                start_new_session=True,
            )
        finally:
            os.close(descriptor)

    def _read(self, program: subprocess.Popen[bytes]) -> None:
        assert program.stdout is not None  # noqa: S101 - it is a pipe
        with suppress(queue.Full):
            while line := program.stdout.readline(_MOST_LINE):
                self._lines.put_nowait(line)

    def _line(self, end: float) -> Mapping[str, Any]:
        """The next line. Raises SluiceError where none comes until `end`."""
        try:
            said = json.loads(self._lines.get(timeout=max(0.0, end - time.monotonic())))
        except (queue.Empty, ValueError, RecursionError):
            raise SluiceError(f"{PROGRAM.name} said nothing that can be read in time") from None
        if not isinstance(said, dict):
            raise SluiceError(f"{PROGRAM.name} said something else than an object")
        return said

    def measure(self, rounds: Sequence[Sequence[Mapping[str, Any]]], end: float) -> dict[str, list[float | None]]:
        """Bandwidth and latency of each test that this node asks for or makes alone. Raises SluiceError."""
        if self._program is None or self._program.stdin is None:
            raise SluiceError(f"{PROGRAM.name} was not started")
        self._program.stdin.write(json.dumps(rounds).encode() + b"\n")
        self._program.stdin.flush()
        mine = {str(test["id"]): test["role"] for tests in rounds for test in tests}
        left, results = set(mine), dict[str, list[float | None]]()
        while left:
            said = self._line(end)
            one = str(said.get("id"))
            left.discard(one)
            if mine.get(one) in ("ask", "alone"):
                results[one] = [_figure(said.get("gbs")), _figure(said.get("us"))]
        return results


def _figure(value: object) -> float | None:
    return value if isinstance(value, float) else None
