"""The explain service: answers from slurmctld's decisions for users on login nodes, and its client.

One request a connection: a munge credential around a small JSON object, ended by a newline; one answer: a munge
credential that only the asking user can decode. MUNGE identifies the caller, refuses replays, and encrypts. The
service only reads: the decisions, and the output of Slurm's own commands about the job. It runs as SlurmUser.
"""

from __future__ import annotations

import json
import logging
import pwd
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sluice.base.errors import SluiceError, UsageError
from sluice.base.rates import FewLines
from sluice.base.text import one_line
from sluice.exchange.fleet import words_for_job
from sluice.explain.checkpoints import SiteCheckpoints
from sluice.explain.decisions import FOLDER
from sluice.explain.explanation import JobName, explain_job, parse_job
from sluice.explain.moves import leaving, sentences, site_emptying, site_moves
from sluice.explain.preflights import SitePreflights
from sluice.slurm import Commands, SlurmClient, connect
from sluice.slurm.answers import Job
from sluice.slurm.munge import MAX_PAYLOAD, Message, MungeError, decode, encode
from sluice.slurm.munge_service import RefusedError, Service, read_line
from sluice.slurm.refused import reason_in
from sluice.slurm.user import slurm_user

DEFAULT_PORT = 6821
VERSION = 1
MAX_REQUEST = 16 * 1024
MAX_ANSWER = MAX_PAYLOAD
_REQUEST_S = 5.0
_ANSWER_S = 60.0
_CONFIG_S = 30.0

log = logging.getLogger("sluice.explaind")
log.addFilter(FewLines())


# ---- the question ----


def render_request(name: JobName) -> bytes:
    """What a client puts into its credential."""
    return json.dumps({"version": VERSION, "job": str(name)}).encode()


def parse_request(payload: bytes) -> JobName:
    """The job that is asked for. Raises RefusedError for anything that is not a request."""
    if len(payload) > 1024:
        raise RefusedError("request: larger than 1024 bytes")
    try:
        asked = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise RefusedError("request: not JSON") from error
    if not isinstance(asked, dict) or asked.get("version") != VERSION or not isinstance(asked.get("job"), str):
        raise RefusedError(
            f"request: not one of version {VERSION}", remedy="use the sluice of the controller's version"
        )
    try:
        return parse_job(asked["job"])
    except UsageError as error:
        raise RefusedError(str(error)) from error


# ---- who may see what ----


class Site(Protocol):
    """What the service asks of Slurm."""

    def config(self) -> Mapping[str, str]:
        """slurmctld's configuration."""

    def jobs(self, number: int) -> list[Job]:
        """Slurm's records of the job, or those of all tasks of an array; none where Slurm has forgotten it."""

    def checkpoint(self, job: Job) -> dict[str, Any]:
        """Whether the job saves its state, and what came of it."""

    def moves(self, job: Job, *, others: bool) -> list[str]:
        """What is said of moves of the job, and of those for it; `others`: with the numbers of other jobs."""

    def preflights(self, job: Job) -> list[dict[str, Any]]:
        """What preflights found for the job, the oldest first."""

    def is_operator(self, user: str) -> bool:
        """Whether Slurm lets the user look after others' jobs."""

    def is_coordinator(self, user: str, account: str) -> bool:
        """Whether the user coordinates the account."""


_USER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,127}\$?\Z")


@dataclass
class SlurmSite:
    """Slurm by its own commands."""

    client: SlurmClient
    commands: Commands
    _config: tuple[float, Mapping[str, str]] = field(default=(-1e9, {}))
    _checkpoints: SiteCheckpoints | None = None
    _preflights: SitePreflights | None = None

    def config(self) -> Mapping[str, str]:
        """Asked again twice a minute."""
        if time.monotonic() - self._config[0] > _CONFIG_S:
            self._config = time.monotonic(), self.client.config()
        return self._config[1]

    def jobs(self, number: int) -> list[Job]:
        """Jobs that slurmctld knows."""
        return self.client.jobs(ids=[number], states=["all"])

    def checkpoint(self, job: Job) -> dict[str, Any]:
        """By the policy, and what the controllers' daemon has measured."""
        if self._checkpoints is None:
            self._checkpoints = SiteCheckpoints(self.config())
        return self._checkpoints.of(job.id, job.account, job.comment)

    def moves(self, job: Job, *, others: bool) -> list[str]:
        """By slurmctld's files; nothing where they cannot be read."""
        try:
            moved = sentences(site_moves(self.config()), job.id, others=others)
            return moved + leaving(site_emptying(self.config()), job.id)
        except (OSError, SluiceError) as error:
            log.warning("%s", one_line(str(error)))
            return []

    def preflights(self, job: Job) -> list[dict[str, Any]]:
        """By the file of the controllers' daemon; nothing where it cannot be read."""
        self._preflights = self._preflights or SitePreflights(self.config())
        try:
            return self._preflights.of(job.id, job.user)
        except SluiceError as error:
            log.warning("%s", one_line(str(error)))
            return []

    def is_operator(self, user: str) -> bool:
        """By the accounting database; where there is none, nobody is."""
        said = self._ask("show", "user", user, "format=AdminLevel")
        return any(line.strip() in ("Operator", "Administrator") for line in said)

    def is_coordinator(self, user: str, account: str) -> bool:
        """By the accounting database."""
        said = self._ask("show", "account", account, "withcoord", "format=Coordinators")
        return any(user in line.strip().split(",") for line in said)

    def _ask(self, *words: str) -> list[str]:
        if not all(_USER_NAME.match(word) for word in (words[2],)):
            return []
        return self.commands.run("sacctmgr", "--noheader", "--parsable2", "--readonly", *words).stdout.splitlines()


def private_words(config: Mapping[str, str]) -> set[str]:
    """The words of PrivateData, as Slurm reads them."""
    words = {word.strip() for word in config.get("PrivateData", "").lower().split(",")}
    return words | {"jobs", "nodes", "usage"} if "all" in words else words


def _private(site: Site) -> set[str]:
    return private_words(site.config())


def may_see(site: Site, uid: int, owner: int, account: str) -> bool:
    """Whether `uid` may see a job of `owner` in `account`, as in Slurm. Fails closed."""
    return uid == owner or "jobs" not in _private(site) or _looks_after(site, uid, account)


def _looks_after(site: Site, uid: int, account: str = "") -> bool:
    """Whether the user is root, SlurmUser, an operator, or a coordinator of the account. Fails closed."""
    if uid in (0, slurm_user(site.config())):
        return True
    try:
        user = pwd.getpwuid(uid).pw_name
        return site.is_operator(user) or bool(account and site.is_coordinator(user, account))
    except (KeyError, SluiceError) as error:
        log.warning("uid %d: not allowed to see what PrivateData names: %s", uid, one_line(str(error)))
        return False


_COUNTS = {"nodes", "nodes_by_reason", "nodes_that_fit", "gpus_without_nic"}
_OF_NODES = {"decision": _COUNTS | {"choice", "stock_nodes"}, "waiting": _COUNTS}


def withhold(site: Site, uid: int, document: dict[str, Any]) -> None:
    """Take from an explanation what PrivateData keeps from the user; `private` then has the words that did.

    usage: shares and usage of the tenant, but for coordinators of its account (as sshare). nodes: how many nodes are
    in which state, and the score and name of any, but for operators (as sinfo); the job's own nodes and GPUs stay.
    """
    withhold_from(document, _private(site), lambda account: _looks_after(site, uid, account))


def withhold_from(document: dict[str, Any], private: set[str], looks_after: Callable[[str], bool]) -> None:
    """The same for a caller of whom it is known otherwise whose jobs it looks after."""
    withheld = []
    tenant = document.get("order", {}).get("tenant")
    if tenant and "usage" in private and not looks_after(tenant["account"]):
        del document["order"]["tenant"]
        withheld.append("usage")
    of_nodes = {part: kept for part, names in _OF_NODES.items() if (kept := names & document.get(part, {}).keys())}
    if (of_nodes or "pools" in document) and "nodes" in private and not looks_after(""):
        document.pop("pools", None)
        for part, names in of_nodes.items():
            for name in names:
                del document[part][name]
        withheld.append("nodes")
    if withheld:
        document["private"] = withheld


# ---- the answer ----


def _task_numbers(text: str) -> set[int]:
    """``3-9:2,12%4`` as numbers; a range that is too long to be true as its ends."""
    numbers: set[int] = set()
    for piece in text.split("%")[0].split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", piece.strip("[] "))
        if match is None:
            continue
        first, last, step = int(match[1]), int(match[2] or match[1]), max(int(match[3] or 1), 1)
        numbers |= set(range(first, last + 1, step)) if last - first < 5_000_000 else {first, last}
    return numbers


def is_record_of(name: JobName, number: int, array: int | None, tasks: str) -> bool:
    """Whether Slurm's record of this number, with these tasks of this array, is the job's: an array task's own, or the
    one of all tasks that wait."""
    return number == name.id if name.task is None else array == name.id and name.task in _task_numbers(tasks)


def find_job(jobs: Iterable[Job], name: JobName) -> Job | None:
    """Slurm's record of the job."""
    return next((one for one in jobs if is_record_of(name, one.id, one.array_id, one.array_tasks)), None)


def answer(site: Site, decisions: Path, uid: int, name: JobName) -> dict[str, Any]:
    """The explanation of a job for a user. Raises RefusedError when there is none that the user may see."""
    unknown = RefusedError(
        f"job {name}: not known, or you may not see it",
        remedy="see squeue; decisions are kept until they are rotated",
    )
    job = find_job(site.jobs(name.id), name)
    if job is not None and not may_see(site, uid, job.uid, job.account):
        raise unknown
    document = explain_job(decisions, name, submit=job.submit_time if job else None, known_id=job.id if job else None)
    if document is None and job is None:
        raise unknown
    if document is None or (job is not None and document.get("uid", job.uid) != job.uid):
        document = {"schema_version": 1, "job": str(name)}
    if job is None and not may_see(site, uid, document.get("uid", 0), document.get("account", "")):
        raise unknown
    if job is not None:
        document["slurm"] = _slurm_facts(job)
        document["checkpoint"] = site.checkpoint(job)
        if moves := site.moves(job, others="jobs" not in _private(site) or _looks_after(site, uid)):
            document["moves"] = moves
        if preflights := site.preflights(job):
            document["preflights"] = preflights
        if words := words_for_job(job.id, job.state, job.nodes, job.partition):
            document["pools"] = words
    withhold(site, uid, document)
    return document


def _slurm_facts(job: Job) -> dict[str, Any]:
    return {
        "job_id": job.id,
        "name": job.name,
        "user": job.user,
        "account": job.account,
        "partition": job.partition,
        "state": job.state,
        "reason": job.reason,
        "priority": job.priority,
        "submit_time": job.submit_time,
        "eligible_time": job.eligible_time,
        "start_time": job.start_time,
        "end_time": job.end_time,
        "time_limit_s": job.time_limit_s,
        "nodes": job.nodes,
        "refused": reason_in(job.admin_comment),
    }


def _reply(site: Site, decisions: Path, uid: int, payload: bytes) -> bytes:
    """The answer to an authenticated request, never an exception's insides."""
    try:
        document: dict[str, Any] = {
            "version": VERSION,
            "explanation": answer(site, decisions, uid, parse_request(payload)),
        }
    except RefusedError as error:
        document = {"version": VERSION, "error": str(error)}
    except SluiceError as error:
        log.error("uid %d: %s", uid, one_line(str(error)))
        document = {
            "version": VERSION,
            "error": "the controller's decisions or Slurm cannot be read now; see explaind's log",
        }
    except Exception:
        log.exception("uid %d: unexpected", uid)
        document = {"version": VERSION, "error": "explaind failed on this request; see its log"}
    data = json.dumps(document).encode()
    if len(data) > MAX_ANSWER:
        data = json.dumps({"version": VERSION, "error": f"the answer is larger than {MAX_ANSWER} bytes"}).encode()
    return data


# ---- the server ----


class Server:
    """Answers on sockets until `stop`."""

    def __init__(self, site: Site, decisions: Path, sockets: list[socket.socket]) -> None:
        self.site = site
        self.decisions = decisions
        self.sockets = sockets
        self._stop = threading.Event()
        self._service = Service("explain", self._answer, most=MAX_REQUEST, seconds=_REQUEST_S, log=log)

    def _answer(self, message: Message) -> bytes:
        return _reply(self.site, self.decisions, message.uid, message.payload)

    def serve(self) -> None:
        """Answer requests until `stop` is called."""
        self._service.serve(self.sockets, lambda: not self._stop.is_set())

    def stop(self) -> None:
        """Make `serve` return soon."""
        self._stop.set()


def open_site(conf: Path | None = None, prefix: Path | None = None) -> SlurmSite:
    """Slurm's commands as the service uses them."""
    return SlurmSite(connect(conf=conf, prefix=prefix, timeout=15), Commands(prefix=prefix, conf=conf, timeout=15))


def decisions_folder(config: Mapping[str, str]) -> Path:
    """Where the running slurmctld writes its decisions. Raises SluiceError."""
    state = config.get("StateSaveLocation", "")
    if not state.startswith("/"):
        raise SluiceError(f"StateSaveLocation {state!r}: not an absolute path")
    return Path(state) / FOLDER


# ---- the client ----


def ask(
    hosts: Iterable[str], port: int, name: JobName, *, trusted: Iterable[int], timeout: float = _ANSWER_S
) -> dict[str, Any]:
    """Ask the first host that answers. `trusted`: whose credential an answer must be: SlurmUser, who alone can decode
    the request, and root.

    Raises RefusedError with the service's message, or SluiceError when no host answers.
    """
    failures: list[str] = []
    believed = tuple(trusted)
    for host in hosts:
        try:
            return _ask_one(host, port, name, believed, timeout)
        except RefusedError:
            raise
        except (OSError, SluiceError) as error:
            failures.append(f"{host}: {getattr(error, 'strerror', None) or error}")
    raise SluiceError(
        f"no explain service answers on port {port} ({one_line('; '.join(failures)) or 'no controller is configured'})",
        remedy="ask your administrator for `sluice explaind` on the controllers",
    )


def _ask_one(host: str, port: int, name: JobName, trusted: tuple[int, ...], timeout: float) -> dict[str, Any]:
    credential = encode(render_request(name), readable_by=trusted[0])
    with socket.create_connection((host, port), timeout=5) as connection:
        connection.sendall(credential.encode() + b"\n")
        try:
            line = read_line(connection, 2 * MAX_ANSWER, timeout)
        except RefusedError as error:
            raise SluiceError(
                "refused, or no answer in time; check that both hosts have the same MUNGE key and time"
            ) from error
    message = decode(line.decode("ascii", "replace").strip())
    if message.uid not in trusted:
        raise MungeError(f"the answer is from uid {message.uid}, not from SlurmUser")
    try:
        document = json.loads(message.payload)
    except ValueError as error:
        raise SluiceError("the answer is not JSON") from error
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise SluiceError(f"the answer is not one of version {VERSION}")
    if "error" in document:
        raise RefusedError(one_line(str(document["error"])))
    if not isinstance(document.get("explanation"), dict):
        raise SluiceError("the answer has no explanation")
    explanation: dict[str, Any] = document["explanation"]
    return explanation
