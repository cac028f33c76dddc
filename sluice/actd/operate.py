"""What operators and administrators do: return GPUs, silence alerts, the policy, the audit log."""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import Field

from policy.audit import AuditEntry, AuditLog
from sluice.actd.become import Account
from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.base.run import PYTHON, run_command
from sluice.client.models import AuditQuery, BudgetRequest, ReturnRequest, ServiceChange, SilenceRequest
from sluice.exchange.acts import ActError
from sluice.exchange.courier import VERSION, AnswerError, ask, controllers, port
from sluice.exchange.silences import FOLDER, Silence, add_silence, end_silence

_POLICY_S = {
    "policy-drift": 110.0, "policy-check": 60.0, "policy-plan": 110.0, "policy-apply": 900.0, "service-change": 900.0,
}  # fmt: skip
_PLANS = 32
_PLAN_S = 3600.0
_DRIFT_S = 30.0  # the same for all who look meanwhile
_TAIL = 16 << 20
_SILENCE = re.compile(r"[0-9a-f]{8,64}\Z")


def _controller(do: str, remedy: str, **request: Any) -> dict[str, Any]:
    """What the leading controllers' daemon answers. Raises ActError."""
    try:
        return ask(controllers(), port(), json.dumps({"version": VERSION, "do": do, **request}).encode())
    except AnswerError as error:
        raise ActError(422, error.said, remedy=remedy) from error
    except SluiceError as error:
        raise ActError(503, error.what, remedy=error.remedy) from error


def lower_budget(who: Account, body: BudgetRequest) -> dict[str, Any]:
    """Lower a budget of watts for a while, or end that. Raises ActError."""
    asked: dict[str, Any] = {"end": True} if body.watts is None else {"watts": body.watts, "seconds": body.seconds}
    found = _controller("power-budget", "see: sluice power show", name=body.name, by=who.name, **asked)
    return {"schema_version": 1, **found}


def return_gpus(body: ReturnRequest) -> dict[str, Any]:
    """Return GPUs of a node to service, or all that was taken out of it. Raises ActError."""
    done: list[str] = []
    gpus: list[int | None] = [*body.gpus] or [None]
    for gpu in gpus:
        wanted: dict[str, Any] = {"node": body.node} if gpu is None else {"node": body.node, "gpu": gpu}
        done += map(str, _controller("health", "see: sluice health list", **{"return": wanted})["done"])
    return {"schema_version": 1, "node": body.node, "done": done}


def silence(state_save: Path, who: Account, body: SilenceRequest, mark: str) -> dict[str, Any]:
    """Send no notices of a rule for a while. `mark`: the same makes the same silence. Raises SluiceError, OSError."""
    now = time.time()
    name = mark[:8] or secrets.token_hex(4)
    made = Silence(name, body.rule, body.subject, now + body.seconds, who.name, body.comment)
    add_silence(state_save / FOLDER, made, now)
    return {"schema_version": 1, "id": made.id, "until": made.until}


def unsilence(state_save: Path, name: object) -> dict[str, Any]:
    """End a silence. Raises ActError, OSError."""
    if not isinstance(name, str) or not _SILENCE.match(name):
        raise ActError(404, f"silence {name!r:.80}: there is none", remedy="see the list of silences")
    now = time.time()
    try:
        end_silence(state_save / FOLDER, name, now)
    except SluiceError as error:
        raise ActError(404, error.what, remedy=error.remedy) from error
    return {"schema_version": 1, "id": name, "until": now}


class ServiceWords(ServiceChange):
    """A change, and of which service."""

    service: str = Field(min_length=1, max_length=64)


class Policies:
    """Checks, plans and applies, in a process of its own, one at a time; keeps the texts of plans that were shown."""

    def __init__(self, folder: Path, path: Path, site: Mapping[str, str | None]) -> None:
        self._folder = folder
        self._asked = {"path": str(path), **site}
        self._one = threading.Lock()
        self._drift: tuple[float, dict[str, Any]] = (-_DRIFT_S, {})

    def run(self, do: str, who: Account, level: int, words: Mapping[str, Any]) -> dict[str, Any]:
        """What became of it. Raises ActError, OSError."""
        if not self._one.acquire(timeout=5):
            raise ActError(503, "another policy is being planned or applied", remedy="try again", retry_after=10)
        try:
            if do == "policy-drift" and time.monotonic() < self._drift[0] + _DRIFT_S:
                return self._drift[1]
            text = self._text(words["hash"]) if do == "policy-apply" else words.get("text", "")
            asked = {**self._asked, **words, "do": do, "text": text, "user": who.name, "uid": who.uid, "level": level}
            found = self._program(json.dumps(asked), _POLICY_S[do])
            if do == "policy-plan":
                self._keep(found["hash"], text)
            drifted = found if do == "policy-drift" else {}
            self._drift = (time.monotonic() if drifted else -_DRIFT_S), drifted
            return found
        finally:
            self._one.release()

    @staticmethod
    def _program(asked: str, timeout: float) -> dict[str, Any]:
        try:
            done = run_command([*PYTHON, "-m", "sluice.actd.policy_run"], timeout=timeout, input_text=asked)
            found = json.loads(done.stdout)
        except (SluiceError, ValueError) as error:
            raise ActError(503, f"policy: {str(error)[:500]}", remedy="see the log of sluice-actd") from error
        if "error" in found:
            said = found["error"]
            raise ActError(int(said["status"]), said["what"], remedy=said["remedy"])
        return dict(found["ok"])

    def _keep(self, name: str, text: str) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(self._folder / name, text, mode=0o600, follow_links=False)
        plans = sorted(self._folder.glob("[0-9a-f]*"), key=lambda one: one.stat().st_mtime, reverse=True)
        for path in plans[_PLANS:]:
            path.unlink()

    def _text(self, name: str) -> str:
        path = self._folder / name
        with suppress(FileNotFoundError):
            if path.stat().st_mtime > time.time() - _PLAN_S:
                return path.read_text()
        raise ActError(409, f"plan {name[:12]}: not known, or older than an hour", remedy="make a plan, and look at it")


def audited(log: AuditLog, query: AuditQuery, of: str | None = None) -> dict[str, Any]:
    """The newest entries of the audit log that are asked for, the newest first; `of`: this user's alone.

    Raises OSError.
    """
    found: list[dict[str, Any]] = []
    for entry in log.newest(_TAIL):
        if entry.seq <= query.after or len(found) >= query.limit:
            break
        if of in (None, entry.user) and _asked_for(entry, query):
            found.append(entry.document())
    return {"schema_version": 1, "entries": found}


def _asked_for(entry: AuditEntry, query: AuditQuery) -> bool:
    return (
        query.user in ("", entry.user)
        and f"{entry.action} ".startswith(f"{query.action} " if query.action else "")
        and query.request_id in ("", entry.detail.get("request_id"))
        and (query.before == 0 or entry.seq < query.before)
    )
