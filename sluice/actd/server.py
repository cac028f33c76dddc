"""The helper: it believes nothing of what the web process says, but what it can verify itself.

Of each request it checks who connects (the kernel says so), whose proof it carries, what Slurm's accounting lets that
user do, and every field; only then it acts, as that user. What was done and what was refused is in the audit log.
"""

from __future__ import annotations

import logging
import os
import pwd
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from policy.audit import AuditLog
from policy.document import DEFAULT_FILE
from policy.site import STATE_FOLDER
from sluice.actd.become import Account, account, least_uid
from sluice.actd.jobs import Jobs
from sluice.actd.keys import Entry, Keys
from sluice.actd.operate import Policies, ServiceWords, audited, lower_budget, return_gpus, silence, unsilence
from sluice.actd.profiles import Profiles
from sluice.actd.proofs import Proofs
from sluice.actd.replicas import Replicas
from sluice.base.errors import SluiceError
from sluice.base.line_server import Kind
from sluice.base.local_server import serve_local
from sluice.base.oidc import DEFAULT_FILE as OIDC_FILE
from sluice.base.rates import Budgets, FewLines, Rate
from sluice.base.text import one_line
from sluice.client import models
from sluice.exchange.acts import (
    MOST_REQUEST,
    SOCKET,
    ActError,
    Request,
    parse_request,
    render_answer,
    render_error,
)  # fmt: skip
from sluice.exchange.launches import MOST_REQUEST as MOST_LAUNCH
from sluice.exchange.launches import LaunchRequest, parse_launch
from sluice.exchange.serving import REPLICAD_USER
from sluice.slurm.accounting import Accounting
from sluice.slurm.commands import Commands
from sluice.slurm.text import TextClient
from sluice.slurm.user import slurm_user

WEB_USER = "sluice-web"
_TOO_LONG = render_error(ActError(413, "a request that is too long", remedy="send a shorter script"))
_KINDS = {
    name: Kind(name, places, threads, MOST_REQUEST, 8 * MOST_REQUEST, 30.0, too_long=_TOO_LONG)
    for name, places, threads in (("web", 128, 16), ("root", 16, 4))
}
_SERVE = Kind("serve", 64, 8, MOST_LAUNCH, 64 * MOST_LAUNCH, 10.0, rates=(Rate(200, 20.0),))
_BY_USER = (Rate(4000, 400), Rate(400, 40))
_UNKNOWN = (Rate(200, 5.0),)  # refusals of no known user that are audited
_TURNS = 4  # of a user at a time
_CONFIG_S = 30.0
_SETTLED_S = 12.0  # later than slurmctld can take a message of a program that has ended: its MessageTimeout is 10 s
_QUEUED_S = 600.0  # in which sbatch has queued its job, or ends
_JOB = re.compile(r"[0-9]{1,10}(_[0-9]{1,10})?\Z")
_OPERATOR, _ADMINISTRATOR = 1, 2

log = logging.getLogger("sluice.actd")
log.addFilter(FewLines())


@dataclass(frozen=True, slots=True)
class Settings:
    """Where things are, and who may connect besides root."""

    socket: Path = SOCKET
    user: str = WEB_USER
    tokens: Path = Path("/etc/sluice/tokens.json")
    oidc: Path = OIDC_FILE
    state: Path = STATE_FOLDER
    policy: Path = DEFAULT_FILE
    conf: Path | None = None
    prefix: Path | None = None
    serve_user: str = REPLICAD_USER
    replica: Path = Path(sys.prefix) / "bin/sluice-replica"
    """What a replica's job runs, where nodes have it."""


@dataclass(frozen=True, slots=True)
class Doing:
    """A request whose user, roles and fields are known."""

    who: Account
    level: int
    body: Any
    job: str
    entry: Entry | None

    @property
    def mark(self) -> str:
        """A random word that stays the same when it is asked again."""
        return "" if self.entry is None else self.entry.mark


@dataclass(frozen=True, slots=True)
class Act:
    """What can be asked. `level`: of Slurm's accounting; `job`: it is about one; `writes`: it changes something."""

    run: Callable[[Actd, Doing], dict[str, Any]]
    body: type[BaseModel] | None = None
    level: int = 0
    job: bool = False
    writes: bool = True
    scope: str = "write"


class Actd:
    """The daemon, without its socket."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        commands = Commands(prefix=settings.prefix, conf=settings.conf, timeout=20)
        self.audit = AuditLog(settings.state / "audit")
        self.keys = Keys(settings.state / "actd/keys")
        self.jobs = Jobs(commands)
        self.proofs = Proofs(settings.tokens, self.config, settings.oidc)
        site = {"conf": settings.conf, "prefix": settings.prefix, "state": settings.state}
        self.policies = Policies(
            settings.state / "actd/plans", settings.policy, {k: None if v is None else str(v) for k, v in site.items()}
        )
        self.replicas = Replicas(
            commands, self.jobs, self.keys, settings.state,
            account=self._account, conf=self._conf_folder, uid=self._serve_uid, program=settings.replica,
        )  # fmt: skip
        self._client = TextClient(commands)
        self._accounting = Accounting(commands)
        self.profiles = Profiles(commands, self._account, lambda user: self._accounting.level(user)[0], self.jobs.where)
        self._lock = threading.Lock()
        self._config: Mapping[str, str] = {}
        self._config_at = -_CONFIG_S
        self._budgets, self._unknown = Budgets(*_BY_USER), Budgets(*_UNKNOWN)
        self._turns: Counter[str] = Counter()
        self._least_uid = least_uid()

    def config(self) -> Mapping[str, str]:
        """slurmctld's configuration; what was known last where it does not answer. Raises SluiceError."""
        if not self._config or time.monotonic() > self._config_at + _CONFIG_S:
            try:
                self._config = self._client.config()
                self._config_at = time.monotonic()
            except SluiceError as error:
                if not self._config:
                    raise ActError(503, f"slurmctld: {error.what}", remedy="try again", retry_after=5) from error
        return self._config

    @property
    def state_save(self) -> Path:
        """slurmctld's folder. Raises SluiceError."""
        return Path(self.config().get("StateSaveLocation", ""))

    # ---- one request ----

    def answer(self, line: bytes, who: object = None) -> bytes:
        """The answer to a request's line. `who`: the uid that asks."""
        if who is not None and who != 0 and who == self._serve_uid(-1):
            return self._answer_launch(line)
        try:
            return render_answer(self._answer(parse_request(line)))
        except ActError as error:
            return render_error(error)

    def _answer(self, request: Request) -> dict[str, Any]:
        act, user = ACTS.get(request.do), ""
        try:
            if act is None:
                raise ActError(400, f"{request.do!r:.80}: not known", remedy="install one version of Sluice")
            who = self._who(act, request)
            user = who.name
            return self._audited(act, who, request)
        except ActError as error:
            self._refused(request, user, error)
            raise
        except SluiceError as error:
            status = 422 if error.usage else 503
            refused = ActError(status, error.what, remedy=error.remedy)
            self._refused(request, user, refused)
            raise refused from error
        except OSError as error:
            log.error("%s: %s: %s", request.do, error.filename, error.strerror)
            raise ActError(503, f"{request.do}: {error.strerror}", remedy="see the log of sluice-actd") from error

    def _who(self, act: Act, request: Request) -> Account:
        return self._account(self.proofs.user(request.proof, act.scope, time.time()))

    def _account(self, name: str) -> Account:
        """A user for whom something may be done. Raises ActError 403."""
        never = {os.geteuid()} if os.geteuid() == 0 else set()
        for one in (self.settings.user, self.settings.serve_user):
            with suppress(KeyError):
                never.add(pwd.getpwnam(one).pw_uid)
        never.add(slurm_user(self.config()))
        return account(name, self._least_uid, never)

    # ---- replicas ----

    def _answer_launch(self, line: bytes) -> bytes:
        """The answer to replicad, which may ask nothing else."""
        request: LaunchRequest | None = None
        try:
            request = parse_launch(line)
            self.audit.refuse_unwritable()
            found, detail = self.replicas.do(request)
        except ActError as error:
            return render_error(self._not_launched(request, error))
        except SluiceError as error:
            refused = ActError(422 if error.usage else 503, error.what, remedy=error.remedy)
            return render_error(self._not_launched(request, refused))
        except OSError as error:
            log.error("a replica: %s: %s", error.filename, error.strerror)
            return render_error(ActError(503, f"actd: {error.strerror}", remedy="see the log of sluice-actd"))
        did = {"launch_replica": "serve launch", "end_replica": "serve end"}[request.do]
        self._note(self.settings.serve_user, did, str(found.get("job_id") or ""), {**_launch(request), **detail})
        return render_answer(found)

    def _not_launched(self, request: LaunchRequest | None, error: ActError) -> ActError:
        if error.status == 503:
            log.info("replica %s: %s", request, error.what)
        else:
            self._note_unknown(
                self.settings.serve_user,
                "serve refused",
                {**_launch(request), "status": error.status, "why": one_line(error.what, limit=300)},
            )
        return error

    def _serve_uid(self, unknown: int | None = None) -> int:
        """Replicad's user. Raises SluiceError where there is none, unless `unknown` is given."""
        try:
            return pwd.getpwnam(self.settings.serve_user).pw_uid
        except KeyError:
            if unknown is not None:
                return unknown
            raise SluiceError(
                f"user {self.settings.serve_user!r}: not known on this host", remedy="create it for sluice-replicad"
            ) from None

    def _conf_folder(self) -> Path:
        """Of slurm.conf. Raises SluiceError."""
        conf = self.settings.conf
        if conf is not None:
            return conf if conf.is_dir() else conf.parent
        return Path(self.config().get("SLURM_CONF") or "/etc/slurm/slurm.conf").parent

    def _audited(self, act: Act, who: Account, request: Request) -> dict[str, Any]:
        with self._turn(who.name):
            job, body = _fields(act, request.words)
            level = self._level(who.name, act.level) if act.level else 0
            if act.writes:
                self.audit.refuse_unwritable()
            if request.key is None or not act.writes:
                found, again = act.run(self, Doing(who, level, body, job, None)), False
            else:
                found, again = self._once(act, Doing(who, level, body, job, None), request)
        if act.writes:
            said = {"again": True} if again else {}
            self._note(who.name, f"web {request.do}", _subject(job, body, found), {**_detail(request), **said})
        return found

    def _level(self, user: str, least: int) -> int:
        level, _ = self._accounting.level(user)
        if level < least:
            name = {_OPERATOR: "operators", _ADMINISTRATOR: "administrators"}[least]
            raise ActError(403, f"{user}: this is for {name} of Slurm", remedy="ask one of them")
        return level

    @contextmanager
    def _turn(self, user: str) -> Iterator[None]:
        """A few at a time of each user, and so many a second."""
        now = time.monotonic()
        with self._lock:
            self._budgets.forget(now)
            wait = self._budgets.wait((user,), now)
            if wait > 0 or self._turns[user] >= _TURNS:
                raise ActError(429, f"{user}: too many requests", remedy="ask less often", retry_after=int(wait) + 1)
            self._budgets.take((user,), now)
            self._turns[user] += 1
        try:
            yield
        finally:
            with self._lock:
                self._turns[user] -= 1
                self._turns += Counter()  # without zeros

    # ---- once ----

    def _once(self, act: Act, doing: Doing, request: Request) -> tuple[dict[str, Any], bool]:
        """Do it, unless it was done with the same key; whether it was. Raises ActError."""
        assert request.key is not None  # noqa: S101 - the caller has looked
        entry = self.keys.begin(doing.who.name, request.key, request.do, request.words)
        try:
            if entry.answer is None and entry.again and request.do == "submit":
                self._look_for(entry)
                self.keys.renew(entry)
            if entry.answer is not None:
                return entry.answer, True
            try:
                found = act.run(self, Doing(doing.who, doing.level, doing.body, doing.job, entry))
            except ActError as error:
                if error.status != 503:  # nothing was done
                    self.keys.undo(entry)
                raise
            self.keys.end(entry, found)
            return found, False
        finally:
            self.keys.leave(entry)

    def _look_for(self, entry: Entry) -> None:
        """Note the job of a submission that was begun and has no answer. Raises ActError while that is not known."""
        until = entry.begun + _QUEUED_S
        number = self.jobs.find(entry.user, entry.mark, entry.created, until, self.keys.jobs(entry.user))
        if number is not None:
            said = "it was queued before, and is not queued again"
            self.keys.end(entry, {"schema_version": 1, "job_id": number, "messages": [said]})
            self._note(entry.user, "web submit", str(number), {"found": True})
        elif time.time() < entry.begun + _SETTLED_S:
            raise ActError(
                503, "it is not known yet whether this job was queued", retry_after=2,
                remedy="ask again with the same Idempotency-Key: it is not queued twice",
            )  # fmt: skip

    def recover(self) -> None:
        """Find the jobs of submissions that were begun when this process's predecessor ended, while they are known."""
        for entry in self.keys.open_entries():
            try:
                if entry.do == "submit":
                    with suppress(ActError):
                        self._look_for(entry)
                elif entry.do == "launch_replica":
                    self.replicas.recover(entry)
            except (SluiceError, OSError) as error:
                log.warning("a submission of %s that was begun: %s", entry.user, one_line(str(error)))
            finally:
                self.keys.leave(entry)

    # ---- the audit log ----

    def audit_of(self, it: Doing) -> dict[str, Any]:
        """What an administrator asks for, and of others what they did themselves. Raises SluiceError, OSError."""
        level, _ = self._accounting.level(it.who.name)
        return audited(self.audit, it.body, None if level >= _ADMINISTRATOR else it.who.name)

    def _refused(self, request: Request, user: str, error: ActError) -> None:
        if error.status in (429, 503) or (error.status == 409 and error.retry_after):
            log.info("%s of %s: %s", request.do[:40], user, error.what)
            return
        if not user and not self._may_note():
            return
        detail = {**_detail(request), "do": one_line(request.do, limit=40), "status": error.status}
        self._note(user, "web refused", "", {**detail, "why": one_line(error.what, limit=300)})

    def _may_note(self) -> bool:
        """Whether one more refusal that anybody can cause is audited."""
        now = time.monotonic()
        with self._lock:
            self._unknown.forget(now)
            if self._unknown.wait((), now) > 0:
                return False
            self._unknown.take((), now)
            return True

    def _note_unknown(self, user: str, action: str, detail: dict[str, Any]) -> None:
        if self._may_note():
            self._note(user, action, "", detail)

    def _note(self, user: str, action: str, subject: str, detail: dict[str, Any]) -> None:
        try:
            self.audit.append(user, action, subject, detail)
        except (OSError, SluiceError) as error:
            log.error("audit log: %s of %s is not in it: %s", action, user, error)

    # ---- the socket ----

    def serve(self, stopping: threading.Event) -> None:
        """Answer root and the web process's user until it is to stop. Raises OSError, SluiceError."""
        kinds = {0: _KINDS["root"]}
        for name, kind in ((self.settings.user, _KINDS["web"]), (self.settings.serve_user, _SERVE)):
            try:
                kinds.setdefault(pwd.getpwnam(name).pw_uid, kind)
            except KeyError:
                log.info("no user %s: it may not connect", name)

        threading.Thread(target=self.recover, name="recover", daemon=True).start()
        serve_local(
            self.settings.socket,
            self.answer,
            (*_KINDS.values(), _SERVE),
            kinds.get,
            stopping,
            remedy="sluice-actd.service makes it (RuntimeDirectory)",
        )


def _fields(act: Act, words: Mapping[str, Any]) -> tuple[str, Any]:
    """The job and the fields of a request. Raises ActError 400, 422."""
    given = dict(words)
    job = given.pop("job", "") if act.job else ""
    if act.job and not (isinstance(job, str) and _JOB.match(job)):
        raise ActError(400, f"job {job!r:.40}: not a job's number", remedy="write it as 17, or a task as 17_4")
    if act.body is None:
        if act.job and given:
            raise ActError(422, f"field {next(iter(given))!r:.80}: not known", remedy="send none")
        return job, given
    try:
        return job, act.body.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        name = ".".join(map(str, first["loc"]))
        known = ", ".join(act.body.model_fields)
        raise ActError(422, f"field {name[:80]!r}: {first['msg'][:300]}", remedy=f"known are: {known}") from error


def _subject(job: str, body: Any, found: Mapping[str, Any]) -> str:
    named = job or next((found[name] for name in ("job_id", "node", "id", "service", "hash") if found.get(name)), "")
    return str(named)[:256]


def _launch(request: LaunchRequest | None) -> dict[str, Any]:
    return {} if request is None else {"service": request.service, "launch": request.launch}


def _detail(request: Request) -> dict[str, Any]:
    """What the log has of a request: never its script, environment or proof."""
    detail: dict[str, Any] = {"request_id": one_line(request.request_id), "address": one_line(request.address)}
    detail["proof"] = request.proof.kind
    hidden = {"script", "environment", "text", "job"}
    fields = {name: value for name, value in request.words.items() if name not in hidden}
    detail |= {
        f"field {one_line(name, limit=40)}": one_line(str(value)[:1024]) for name, value in list(fields.items())[:40]
    }
    return detail


ACTS: dict[str, Act] = {
    "submit": Act(lambda actd, it: actd.jobs.submit(
        it.who, it.body, it.mark, -1 if it.entry is None else it.entry.lock), models.JobRequest),
    "what-if": Act(lambda actd, it: actd.jobs.what_if(it.who, it.body), models.JobRequest, writes=False),
    "cancel": Act(lambda actd, it: actd.jobs.cancel(it.who, it.job), job=True),
    "hold": Act(lambda actd, it: actd.jobs.control(it.who, "hold", it.job), job=True),
    "release": Act(lambda actd, it: actd.jobs.control(it.who, "release", it.job), job=True),
    "requeue": Act(lambda actd, it: actd.jobs.control(it.who, "requeue", it.job), job=True),
    "update": Act(lambda actd, it: actd.jobs.update(it.who, it.job, it.body), models.JobChange, job=True),
    "profile-start": Act(lambda actd, it: actd.profiles.change(it.who, "start", it.job, it.body), models.ProfileRequest,
                         job=True),
    "profile-stop": Act(lambda actd, it: actd.profiles.change(it.who, "stop", it.job, it.body), models.ProfileRequest,
                        job=True),
    "profile-summary": Act(lambda actd, it: actd.profiles.summary(it.who, it.job, it.body), models.ProfileRequest,
                           job=True, scope="read"),
    "health-return": Act(lambda actd, it: return_gpus(it.body), models.ReturnRequest, _OPERATOR),
    "power-budget": Act(lambda actd, it: lower_budget(it.who, it.body), models.BudgetRequest, _ADMINISTRATOR),
    "silence": Act(lambda actd, it: silence(actd.state_save, it.who, it.body, it.mark), models.SilenceRequest,
                   _OPERATOR),
    "silence-end": Act(lambda actd, it: unsilence(actd.state_save, it.body.get("id")), None, _OPERATOR),
    "policy-check": Act(lambda actd, it: actd.policies.run("policy-check", it.who, it.level, it.body.model_dump()),
                        models.PolicyText, _OPERATOR, writes=False),
    "policy-plan": Act(lambda actd, it: actd.policies.run("policy-plan", it.who, it.level, it.body.model_dump()),
                       models.PolicyText, _OPERATOR, writes=False),
    "policy-apply": Act(lambda actd, it: actd.policies.run("policy-apply", it.who, it.level, it.body.model_dump()),
                        models.ApplyRequest, _ADMINISTRATOR),
    "service-change": Act(lambda actd, it: actd.policies.run(
        "service-change", it.who, it.level, it.body.model_dump(exclude_none=True)), ServiceWords, _ADMINISTRATOR),
    "policy-drift": Act(lambda actd, it: actd.policies.run("policy-drift", it.who, it.level, {}), models.Nothing,
                        _OPERATOR, writes=False, scope="read"),
    "audit": Act(lambda actd, it: actd.audit_of(it), models.AuditQuery, writes=False, scope="read"),
}  # fmt: skip
