"""The node's part in a job's preflight: it asks the controllers what to measure, measures, and gets the verdict.

A request of the prolog, for jobs with GPUs. What measures are programs without rights (programs/fabric_test.py between
nodes, programs/gpu_test.py on GPUs), of whose output only numbers are believed. Where no controller answers, or time is
over, the job starts without a verdict.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from policy.preflight import MOST_DRAIN_S, NodePreflight
from prolog_epilog.devices import NodeDevice
from prolog_epilog.preflight_gpus import TOOL, GpuTests, said_of, whole_gpus
from prolog_epilog.preflight_programs import Program, figure
from prolog_epilog.server import Peer
from prolog_epilog.state import State
from sluice.base.errors import SluiceError
from sluice.base.log import log
from sluice.base.text import one_line
from sluice.exchange.courier import VERSION
from sluice.exchange.record import JobRecord

PROGRAM = Path(__file__).parent / "programs/fabric_test.py"
_START_S = 5.0
_LOCKED = 1 << 30
_DRAIN_S = float(MOST_DRAIN_S)
_DRAIN_LOOK_S = 0.2
_AGAIN_S = (0.02, 5.0)  # the least and the most between two questions

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
        self.on_found: Callable[[Iterable[str]], None] = lambda _: None  # called with the health checks

    def found(self) -> dict[str, list[str]] | None:
        """For health checks; None where there was no preflight since the agent started, or since the policy wants some.

        What was found before is forgotten where none are wanted: that finding has ended, and would be another one.
        """
        if self._policy().when == "never":
            self._found = None
        return self._found

    def longest_s(self) -> int:
        """So many seconds at most a job waits; 0 where no job is tested."""
        return self._policy().longest_s

    def tests_one_node(self, record: JobRecord) -> bool:
        """Whether a job of this node alone may have to be tested: it has GPUs that can be."""
        policy = self._policy()
        wanted = policy.when != "never" and policy.gpus
        return wanted and bool(self._gpus(record))

    def _gpus(self, record: JobRecord) -> list[NodeDevice]:
        """Those to be measured: of the job alone, also where a suspended job or one that is not cleared away has
        some of them."""
        with self._state.lock:
            others = [one for job, one in self._state.records.items() if job != record.job]
            return whole_gpus(record, self._state.devices, others)

    def run(self, *, peer: Peer, job: int, alone: bool = False) -> dict[str, Any]:
        """A request: take part until the verdict. The answer's `fault` says why the node is drained, where it is.

        `alone`: the job has no other nodes.
        """
        del peer
        policy = self._policy()
        end = time.monotonic() + policy.bound_s + _DRAIN_S  # what is waited for a program to end is none of the job's
        with self._state.lock:
            record = self._state.records.get(job)
        if policy.when == "never" or record is None or record.refused:
            return {}
        with record.stage("prolog.preflight"):
            outcome = self._within(record, policy, alone=alone)
        if outcome is None:
            return {}
        words = one_line(str(outcome["text"]), limit=1000)
        self._note(record, words, one_line(str(outcome.get("verdict", "")), limit=20))
        faults = {str(name): [one_line(str(one)) for one in some] for name, some in dict(outcome["faults"]).items()}
        if faults or outcome.get("good") is True:
            self._found = faults
        if faults:
            self.on_found(faults)
            if self._is_drained(record, words, end):
                return {"fault": f"{words}; see: sluice fabric check, sluice health list"}
        return {}

    def _note(self, record: JobRecord, words: str, verdict: str) -> None:
        """In the job's record; where that cannot be written, what was found holds all the same."""
        try:
            with self._state.lock:
                record.note("preflight", what=words, verdict=verdict)
                self._state.jobs.save(record)
        except OSError as error:
            log("problem", job=record.job, what=f"the job's record is not written: {error}")

    def _within(self, record: JobRecord, policy: NodePreflight, *, alone: bool) -> dict[str, Any] | None:
        """The controllers' verdict, if there is one in time, whatever hangs: they, a program or the pipe to it."""
        verdict: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        seconds = policy.bound_s
        end = time.monotonic() + seconds
        gpus = self._gpus(record) if policy.gpus else []

        def judge(measuring: Measuring, gpu_tests: GpuTests) -> None:
            outcome = None
            try:
                nics, types = self._devices(record)
                about = {**said_of(record, gpus), "alone": alone, "types": types, "nics": nics}
                begun = self._ask(record, **about, begins=True)
                ask = partial(self._ask, record)
                outcome = take_part(ask, begun, about, self._interface, (measuring, gpu_tests), end)
            except (SluiceError, OSError, ValueError, TypeError, LookupError, ArithmeticError) as error:
                log("problem", job=record.job, what=f"no preflight: {one_line(str(error) or repr(error))}")
            verdict.put(outcome)

        with Measuring() as measuring, GpuTests(gpus) as gpu_tests, suppress(queue.Empty):
            threading.Thread(target=judge, args=(measuring, gpu_tests), daemon=True).start()
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

    def _is_drained(self, record: JobRecord, words: str, end: float) -> bool:
        """Wait until the node is drained, by its health report, or until `end`: Slurm then starts the job elsewhere.

        Where the controllers do not drain it (a policy in shadow, the breaker) the job starts here.
        """
        end = min(end, time.monotonic() + _DRAIN_S)
        while time.monotonic() < end:
            drained = False
            with suppress(SluiceError):
                drained = self._ask(record).get("drained") is True
            if drained:
                return True
            time.sleep(_DRAIN_LOOK_S)
        log("problem", job=record.job, what=f"the node is not drained for what was found: {words}")
        return False


def take_part(
    ask: Callable[..., dict[str, Any]],
    answer: dict[str, Any],
    about: Mapping[str, Any],
    interface: Callable[[], str],
    programs: tuple[Measuring, GpuTests],
    end: float,
) -> dict[str, Any] | None:
    """The controllers' last answer; None where there is no preflight, or no time left.

    `ask`: asks them for this preflight; `answer`: to what was asked first. `about`: interfaces and GPUs that can be
    measured, and whether the job has other nodes. Raises SluiceError, OSError.
    """
    measuring, gpu_tests = programs
    batch: int | None = None
    while time.monotonic() < end:
        if answer["state"] in ("none", "done"):
            return answer if answer["state"] == "done" else None
        if answer["state"] == "join":
            hello = {"port": 0, "tools": []} if about["alone"] else measuring.start()
            if about.get("gpus") and answer.get("gpus") is True:
                gpu_tests.start()
            answer = ask(**about, port=hello["port"], tools=hello["tools"], interface=interface())
        elif answer["state"] == "test":
            results = _measured(answer["rounds"], measuring, gpu_tests, end)
            batch = int(answer["batch"])
            answer = ask(batch=batch, results=results)
        else:
            time.sleep(min(max(float(answer["again_s"]), _AGAIN_S[0]), _AGAIN_S[1]))
            answer = ask(batch=batch)
    raise SluiceError("no verdict in time")


def _measured(
    rounds: Sequence[Sequence[Mapping[str, Any]]], measuring: Measuring, gpu_tests: GpuTests, end: float
) -> dict[str, list[Any]]:
    """What the tests gave: of GPUs first, as interfaces share their PCIe switches. Raises SluiceError, OSError."""
    of_gpus = [test for tests in rounds for test in tests if test["tool"] == TOOL]
    others = [[test for test in tests if test["tool"] != TOOL] for tests in rounds]
    results = gpu_tests.measure(of_gpus, end) if of_gpus else {}
    return results | (measuring.measure(others, end) if any(others) else {})


class Measuring(Program):
    """The program that measures between nodes."""

    @property
    def path(self) -> Path:
        """See Program."""
        return PROGRAM

    def __enter__(self) -> Measuring:
        return self

    def locked(self) -> int:
        """What RDMA transfers is locked in memory: UCX wants more than the 8 MiB that systemd gives to a service."""
        return _LOCKED

    def start(self) -> dict[str, Any]:
        """Start it, and return where it listens. Raises SluiceError."""
        self.begin()
        said = self.line(time.monotonic() + _START_S)
        return {"port": int(said["port"]), "tools": [str(one) for one in said["tools"]][:8]}

    def measure(self, rounds: Sequence[Sequence[Mapping[str, Any]]], end: float) -> dict[str, list[Any]]:
        """Bandwidth and latency of each test that this node asks for or makes alone. Raises SluiceError."""
        self.say(rounds)
        mine = {str(test["id"]): test["role"] for tests in rounds for test in tests}
        left, results = set(mine), dict[str, list[Any]]()
        while left:
            said = self.line(end)
            one = str(said.get("id"))
            left.discard(one)
            if mine.get(one) in ("ask", "alone"):
                results[one] = [figure(said.get("gbs")), figure(said.get("us"))]
        return results
