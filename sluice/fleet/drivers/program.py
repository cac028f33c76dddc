"""A site's own program: one JSON object on its standard input, one on its standard output, then it ends.

It gets ``{"version": 1, "do": "launch" | "terminate" | "list", "cluster", "pool", "tags", "settings"}``, with ``order``
(token, node, shape, zone) or ``machine`` (an id), and answers ``{"machine": {...}}``, ``{}`` or ``{"machines":
[{...}]}``, or ``{"error": {"kind", "text"}}`` with one of the kinds of `sluice.fleet.driver.Failure`.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from sluice.base.run import Finished, finish, input_file
from sluice.base.text import one_line
from sluice.fleet.driver import DriverSite, Failure, Machine, Order, ProviderError, check_program

VERSION = 1
_TIMEOUT_S = 25.0
_MOST_BYTES = 8 << 20
_MOST_MACHINES = 10_000


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Machine(_Strict):
    id: str
    token: str
    node: str
    shape: str = ""
    zone: str = ""
    address: str = ""
    ending: bool = False
    notice: str = ""
    at_risk: str = ""

    def plain(self) -> Machine:
        return Machine(**self.model_dump())


class _Error(_Strict):
    kind: Failure
    text: str


class _Answer(_Strict):
    machine: _Machine | None = None
    machines: list[_Machine] | None = None
    error: _Error | None = None


class Program:
    """The driver."""

    def __init__(self, site: DriverSite) -> None:
        site.only("program", "options")
        self._site = site
        self._program = Path(site.setting("program"))
        check_program(self._program)

    def launch(self, order: Order) -> Machine:
        """As `Driver.launch`."""
        words = {"token": order.token, "node": order.node, "shape": order.shape, "zone": order.zone}
        answer = self._ask("launch", order=words, tags=self._site.tags_of(order))
        if answer.machine is None or answer.machine.token != order.token:
            raise ProviderError("unknown", f"{self._program}: launch: no machine of this token in its answer")
        return answer.machine.plain()

    def terminate(self, machine: str) -> None:
        """As `Driver.terminate`."""
        self._ask("terminate", machine=machine)

    def machines(self) -> list[Machine]:
        """As `Driver.machines`."""
        answer = self._ask("list")
        if answer.machines is None or len(answer.machines) > _MOST_MACHINES:
            raise ProviderError("unknown", f"{self._program}: list: no list of at most {_MOST_MACHINES} machines")
        return [one.plain() for one in answer.machines]

    def _ask(self, do: str, **words: Any) -> _Answer:
        request = {
            "version": VERSION, "do": do, "cluster": self._site.cluster, "pool": self._site.pool,
            "tags": self._site.tags, "settings": dict(self._site.settings), **words,
        }  # fmt: skip
        done = self._run(do, (json.dumps(request) + "\n").encode())
        try:
            answer = _Answer.model_validate_json(done.out)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise ProviderError("unknown", f"{self._program}: {do}: {place}: {first['msg']}") from error
        if answer.error is not None:
            raise ProviderError(answer.error.kind, answer.error.text)
        return answer

    def _run(self, do: str, request: bytes) -> Finished:
        """Run it to its end, and what it has started with it: nothing of a request is carried out later."""
        try:
            with input_file(request) as stdin:
                child = subprocess.Popen(
                    [str(self._program)],
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    cwd="/",
                    env={"PATH": "/usr/bin:/bin"},
                    start_new_session=True,
                )
        except OSError as error:
            raise ProviderError("unknown", f"{self._program}: {error.strerror}") from error
        done = finish(child, _TIMEOUT_S, _MOST_BYTES)
        if done.status is None:
            most = f"no answer within {_TIMEOUT_S:g} s, or one of more than {_MOST_BYTES >> 20} MiB"
            raise ProviderError("unknown", f"{self._program}: {do}: {most}")
        if done.status != 0:
            said = one_line(done.err) or f"exit status {done.status}"
            raise ProviderError("unknown", f"{self._program}: {do}: {said}")
        return done


def make(site: DriverSite) -> Program:
    """The entry point. Raises SluiceError."""
    return Program(site)
