"""An idle node stands by for preflights of jobs of other nodes, where these alone do not say which of them is at fault.

It asks the controllers, which say how often; one that is asked to take part starts the program that measures between
nodes, by the interfaces near its GPUs, and no test of GPUs. A job that comes ends that at once. Nothing follows for
this node but that it may be suspected, and tested with its next job.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any

from policy.preflight import NodePreflight
from prolog_epilog import cgroups
from prolog_epilog.preflight import Measuring, Send, take_part
from prolog_epilog.preflight_gpus import GpuTests
from prolog_epilog.state import State
from sluice.base.duties import NotYet
from sluice.base.errors import SluiceError
from sluice.base.log import log
from sluice.base.text import one_line
from sluice.exchange.courier import VERSION

SELDOM_S = 60.0
_BUSY_S = 5.0  # until it is looked again whether the node is idle, and wanted
_MOST_S = 600.0  # between two questions


class Spare:
    """The duty, and what ends it when a job comes. Thread-safe."""

    def __init__(
        self, state: State, policy: Callable[[], NodePreflight], send: Send, interface: Callable[[], str]
    ) -> None:
        self._state = state
        self._policy = policy
        self._send = send
        self._interface = interface
        self._lock = threading.Lock()
        self._measuring: Measuring | None = None
        self._job_came = float("-inf")

    def leave(self) -> None:
        """A job comes: what measures for other nodes ends."""
        with self._lock:
            self._job_came = time.monotonic()
            measuring, self._measuring = self._measuring, None
        if measuring is not None:
            measuring.__exit__()

    def run(self) -> float:
        """Ask whether a preflight needs this node, and take part; in how many seconds it is to be asked again.

        Raises SluiceError.
        """
        policy = self._policy()
        types = sorted({one.type for one in self._state.devices if one.type})
        if not self._may_help(policy, types) or not self._is_idle():
            return NotYet(_BUSY_S)
        answer = self._send(self._request("preflight-spare", types=types))
        if answer.get("state") == "join":
            self._take_part(int(answer["job"]), types, policy.bound_s)
            return 0.0
        return min(max(float(answer["again_s"]), 0.2), _MOST_S)

    def _request(self, do: str, **more: Any) -> dict[str, Any]:
        return {"version": VERSION, "do": do, "node": self._state.node, **more}

    def _may_help(self, policy: NodePreflight, types: Collection[str]) -> bool:
        """Whether jobs that have GPUs like this node's are tested: no others keep the places of those that help."""
        tested = not policy.types or not set(policy.types).isdisjoint(types)
        return policy.when != "never" and bool(self._state.devices) and tested

    def _is_idle(self) -> bool:
        """No job, and none whose prolog has just begun: it is registered a moment later."""
        with self._state.lock:
            known = bool(self._state.records)
        return not known and time.monotonic() - self._job_came > _BUSY_S and not cgroups.jobs_here()

    def _take_part(self, job: int, types: list[str], seconds: float) -> None:
        """Until the verdict, which is of the job's own nodes, or a job comes here."""
        nics = sorted({nic for one in self._state.devices for nic in one.nics[:1]})
        about = {"alone": False, "types": types, "nics": nics}
        ask = partial(self._ask, job)
        end = time.monotonic() + seconds
        with Measuring() as measuring, GpuTests([]) as gpu_tests:
            with self._lock:
                self._measuring = measuring
            try:
                self._yield_to_jobs()
                take_part(ask, {"state": "join"}, about, self._interface, (measuring, gpu_tests), end)
            except (SluiceError, OSError, ValueError, TypeError, LookupError, ArithmeticError) as error:
                log("preflight", job=job, what=f"takes part no longer: {one_line(str(error) or repr(error))}")
                with suppress(SluiceError):
                    self._send(self._request("preflight", job=job, leaves=True))
            finally:
                with self._lock:
                    self._measuring = None

    def _yield_to_jobs(self) -> None:
        if not self._is_idle():
            raise SluiceError("a job has come")

    def _ask(self, job: int, **more: Any) -> dict[str, Any]:
        """Raises SluiceError where a job has come, too: one without GPUs does not come to `leave`."""
        self._yield_to_jobs()
        return self._send(self._request("preflight", job=job, **more))
