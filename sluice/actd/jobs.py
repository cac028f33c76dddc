"""Jobs: sbatch, scancel and scontrol as the user, so that Slurm itself decides what the user may do."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence, Set
from typing import Any

from sluice.actd.arguments import PATH, environment_of, refuse_script, sbatch_words, update_words, usual_environment
from sluice.actd.become import Account, run_as
from sluice.base.run import Finished, input_file
from sluice.base.text import one_line
from sluice.client.models import JobChange, JobRequest, Smaller, WhatIf
from sluice.exchange.acts import MOST_SCRIPT, ActError
from sluice.slurm.commands import Commands

_COMMAND_S = 40.0
_ENV, _NO_FOLDER = "/usr/bin/env", 125
_MOST_TESTS = 6
_MOST_AHEAD_S = 366 * 86400.0
_MARK = "\n# sluice request {mark}\n"
_MARKED = re.compile(r"^# sluice request ([0-9a-f]{32})$", re.MULTILINE)
_SLACK_S = 2.0  # between the clocks of controllers
_SEARCH_S = 15.0
_MOST_MARKS = 100_000
_MOST_MESSAGES = 50
_TEST = re.compile(r"Job \d+ to start at (\S+) using (\d+) processors on nodes (\S*) in partition (\S+)")
_AWAY = (
    "Unable to contact", "Socket timed out", "Connection timed out", "Zero Bytes", "in standby mode",
    "Connection refused", "temporarily unable", "Communication connection failure", "Transport endpoint",
    "Unexpected missing socket", "Resource temporarily unavailable", "No route to host", "Connection reset",
    "Send/recv operation", "Message receive failure", "Unable to establish", "Munge encode", "Munge decode",
    "Protocol authentication", "failed to fetch config",
)  # fmt: skip
_STATUS = {
    "Invalid job id": 404,
    "permission denied": 403,
    "Invalid user id": 403,
    "not authorized": 403,
    "not permitted to": 403,
    "already completing or completed": 409,
    "already finished": 409,
    "is pending execution": 409,
    "is no longer pending": 409,
    "not pending nor running": 409,
    "is disabled for operation": 409,
    "being requeued": 409,
    "Duplicate job id": 409,
}
_REMEDIES = {
    404: "see the list of jobs",
    403: "Slurm lets its owner, coordinators of its account and operators do this",
    409: "look at the job's state",
    422: "change the request as Slurm says",
    503: "try again; with the same Idempotency-Key nothing is done twice",
}


class Jobs:
    """Slurm's commands for jobs."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._programs: dict[str, str] = {}
        self._marks: dict[int, str] = {}  # of jobs' scripts

    # ---- submitting ----

    def submit(self, who: Account, body: JobRequest, mark: str = "", lock: int = -1) -> dict[str, Any]:
        """Queue a job. `mark` is written into its script, `lock` is held open while sbatch runs. Raises ActError."""
        refuse_script(body.script)
        done = self._sbatch(who, body, mark, lock)
        number = done.out.strip().partition(";")[0]
        if done.status != 0 or not number.isdecimal():
            raise refusal("sbatch", done)
        return {"schema_version": 1, "job_id": int(number), "messages": _messages("sbatch", done.err)}

    def queue(self, who: Account, options: Sequence[str], script: str, lock: int = -1) -> int:
        """Queue a job of these options, in the user's home and with nothing of this process's environment; its number.

        Raises ActError.
        """
        with input_file(usual_environment(who)) as environment:
            words = ["--parsable", *options, f"--chdir={who.home}", "--propagate=NONE", f"--export-file={environment}"]
            files = (environment, *([lock] if lock >= 0 else []))
            done = self._run(who, "sbatch", words, given=script.encode(), files=files)
        number = done.out.strip().partition(";")[0]
        if done.status != 0 or not number.isdecimal():
            raise refusal("sbatch", done)
        return int(number)

    def find(self, user: str, mark: str, since: float, until: float, known: Set[int]) -> int | None:
        """The job with a mark in its script, that a user has queued in a time; not one of `known`.

        Raises SluiceError; ActError 503 where there are so many jobs that more must be looked at later.
        """
        listed = self._commands.output(
            "squeue", "--noheader", "--states=all", f"--user={user}", "--format=%F %V"
        ).splitlines()
        rows = {
            (int(number), float(submitted))
            for number, _, submitted in (line.strip().partition(" ") for line in listed)
            if number.isdecimal() and submitted.isdecimal()
        }
        recent = sorted((abs(at - since), number) for number, at in rows if since - _SLACK_S <= at <= until)
        end = time.monotonic() + _SEARCH_S
        for _, number in recent:
            if number in known:
                continue
            if number not in self._marks:
                if time.monotonic() > end:
                    raise ActError(503, "its job is still being looked for", remedy=_REMEDIES[503], retry_after=1)
                self._marks[number] = self._mark_of(number)
            if self._marks[number] == mark:
                return number
        return None

    def _mark_of(self, number: int) -> str:
        """What is written at the end of a job's script; empty where there is none."""
        while len(self._marks) >= _MOST_MARKS:
            self._marks.pop(next(iter(self._marks)), None)
        found = self._commands.run("scontrol", "write", "batch_script", str(number), "-", check=False)
        marks = _MARKED.findall(found.stdout)
        return str(marks[-1]) if marks else ""

    def _sbatch(
        self, who: Account, body: JobRequest, mark: str = "", lock: int = -1, *, test: bool = False
    ) -> Finished:
        script = body.script.encode() + (_MARK.format(mark=mark).encode() if mark else b"")
        with input_file(environment_of(body, who)) as environment:
            words = sbatch_words(body, who, environment, test=test)
            files = (environment, *([lock] if lock >= 0 else []))
            done = self._run(who, "sbatch", words, given=script, files=files, folder="" if test else _folder(body, who))
            if done.status == _NO_FOLDER and "/env: " in done.err:  # it is there on nodes only
                os.lseek(environment, 0, os.SEEK_SET)
                done = self._run(who, "sbatch", words, given=script, files=files)
            return done

    # ---- what would be ----

    def what_if(self, who: Account, body: JobRequest) -> dict[str, Any]:
        """What would become of a request; nothing is queued. Raises ActError."""
        refuse_script(body.script)
        first = self._test(who, body)
        if not first.accepted or first.starts_now:
            return first.model_dump(mode="json")
        earliest = first.start_time or float("inf")
        for changed in _smaller(body)[: _MOST_TESTS - 1]:
            found = self._test(who, body.model_copy(update=changed))
            if found.accepted and found.start_time is not None and found.start_time < earliest - 1:
                earliest = found.start_time
                first.smaller = Smaller(changed=changed, start_time=found.start_time, nodes=found.nodes)
                if found.starts_now:
                    break
        return first.model_dump(mode="json")

    def _test(self, who: Account, body: JobRequest) -> WhatIf:
        done = self._sbatch(who, body, test=True)
        messages = _messages("sbatch", done.err)
        match = _TEST.search(done.err)
        if match is None:
            error = refusal("sbatch", done)
            if error.status == 503:
                raise error
            return _would(accepted=False, refused=messages or [error.what])
        start = float(match[1]) if match[1].isdecimal() else None
        if start is not None and start > time.time() + _MOST_AHEAD_S:
            start = None  # Slurm counts the limits of waiting jobs before it, and takes `unlimited` for 8,000 years
        others = [one for one in messages if not _TEST.search(one)]
        return _would(
            accepted=True,
            messages=others,
            start_time=start,
            starts_now=start is not None and start <= time.time() + 5,
            nodes=match[3],
            partition=match[4],
            cpus=int(match[2]),
            becomes=_becomes(body) | ({} if body.partition else {"partition": match[4]}),
        )

    # ---- changing ----

    def cancel(self, who: Account, job: str) -> dict[str, Any]:
        """End a job, or a task."""
        return self._did("cancel", job, "scancel", self._run(who, "scancel", ["--verbose", job]))

    def control(self, who: Account, did: str, job: str) -> dict[str, Any]:
        """hold, release or requeue a job. Raises ActError."""
        return self._did(did, job, "scontrol", self._run(who, "scontrol", [did, job]))

    def update(self, who: Account, job: str, body: JobChange) -> dict[str, Any]:
        """Change fields of a job. Raises ActError."""
        done = self._run(who, "scontrol", ["update", *update_words(job, body)])
        return self._did("update", job, "scontrol", done)

    def _did(self, did: str, job: str, name: str, done: Finished) -> dict[str, Any]:
        if done.status != 0 or "error:" in done.err:
            raise refusal(name, done)
        return {"schema_version": 1, "job": job, "did": did, "messages": _messages(name, done.err)}

    def _run(
        self,
        who: Account,
        name: str,
        words: list[str],
        *,
        given: bytes = b"",
        files: tuple[int, ...] = (),
        folder: str = "",
    ) -> Finished:
        env = {"PATH": PATH, "LC_ALL": "C.UTF-8", "HOME": "/", "SLURM_TIME_FORMAT": "%s", **self.where()}
        start = [_ENV, f"--chdir={folder}"] if folder else []
        return run_as(who, [*start, self._program(name), *words], env=env, timeout=_COMMAND_S, given=given, files=files)

    def where(self) -> Mapping[str, str]:
        """Which cluster Slurm's commands talk to."""
        conf = self._commands.environment().get("SLURM_CONF")
        return {"SLURM_CONF": conf} if conf else {}

    def _program(self, name: str) -> str:
        if name not in self._programs:
            found = shutil.which(self._commands.program(name))
            if found is None:
                raise ActError(503, f"{name}: not installed on this host", remedy="install Slurm's commands")
            self._programs[name] = found
        return self._programs[name]


def _folder(body: JobRequest, who: Account) -> str:
    """Where sbatch runs, which is SLURM_SUBMIT_DIR in the job."""
    return body.work_dir or who.home


def _messages(name: str, text: str) -> list[str]:
    """What a command said, each line once, without its name before it."""
    lines = (line.strip().removeprefix(f"{name}: ").removeprefix("error: ") for line in text.splitlines())
    kept = (line for line in dict.fromkeys(lines) if line and not line.startswith("Terminating job"))
    return [one_line(line, limit=1000) for line in kept][:_MOST_MESSAGES]


def refusal(name: str, done: Finished) -> ActError:
    """What a command's failure is: Slurm is away, or has refused it."""
    if done.status is None:
        return ActError(503, f"{name}: no answer in time", remedy=_REMEDIES[503], retry_after=5)
    said = _messages(name, done.err) or _messages(name, done.out) or [f"exit status {done.status}"]
    text = "; ".join(said)
    if any(word in text for word in _AWAY):
        return ActError(503, text, remedy=_REMEDIES[503], retry_after=5)
    status = next((status for words, status in _STATUS.items() if words.lower() in text.lower()), 422)
    if name == "sbatch":
        status = 422
    return ActError(status, text, remedy=_REMEDIES[status])


def _would(**known: Any) -> WhatIf:
    nothing: dict[str, Any] = {
        "refused": [], "messages": [], "start_time": None, "starts_now": False, "nodes": "", "partition": "",
        "cpus": None, "becomes": {}, "smaller": None,
    }  # fmt: skip
    return WhatIf(**{**nothing, **known})


# ---- smaller requests ----


def _smaller(body: JobRequest) -> list[dict[str, Any]]:
    """What would be less, the largest first, of each kind in turn."""
    kinds = [
        [{name: one} for one in _halves(getattr(body, name))]
        for name in ("gpus", "gpus_per_node", "gpu_mem", "time_limit")
        if getattr(body, name) is not None
    ]
    return [kind[place] for place in range(3) for kind in kinds if place < len(kind)]


def _halves(text: str) -> list[str]:
    """A half, a quarter and an eighth of what a field asks for, where that is something."""
    match = re.fullmatch(r"((?:[A-Za-z][A-Za-z0-9_.-]*:)?)(\d+)([KMGTkmgt]?)", text)
    seconds = _seconds(text) if ":" in text and match is None else None
    found: list[str] = []
    for part in (2, 4, 8):
        if match is not None and int(match[2]) >= part:
            found.append(f"{match[1]}{int(match[2]) // part}{match[3]}")
        elif seconds is not None and seconds >= 60 * part:
            found.append(str(seconds // 60 // part))
    return found


def _seconds(text: str) -> int | None:
    """Of 1-12:00:00, 12:00:00 or 30:00."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return None
    days, first, second, third = (int(one or 0) for one in match.groups())
    if match[1] is not None or match[4] is not None:
        return days * 86400 + first * 3600 + second * 60 + third
    return first * 60 + second


def _becomes(body: JobRequest) -> dict[str, str]:
    """What job_submit/sluice is known to make of it."""
    found = {}
    if body.gpu_mem is not None and (match := re.fullmatch(r"(\d+)([KMGTkmgt]?)", body.gpu_mem)):
        unit = {"": 1024, "M": 1024, "K": 1, "G": 1024**2, "T": 1024**3}[match[2].upper()]
        found["gres"] = f"shard:{-(-int(match[1]) * unit // 1024)}"
    return found


assert MOST_SCRIPT < 4 << 20  # noqa: S101 - room for the mark
