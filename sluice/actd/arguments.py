"""What Slurm's commands are given. Each value is in one word with its option, so that none can be another option."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sluice.actd.become import Account
from sluice.client.models import JobChange, JobRequest
from sluice.exchange.acts import ActError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_OPTIONS = {
    "name": "job-name", "time_limit": "time", "memory": "mem", "memory_per_cpu": "mem-per-cpu",
    "memory_per_gpu": "mem-per-gpu",
}  # fmt: skip
_FLAGS = ("hold", "exclusive", "gpu_spread")
_ELSEWHERE = frozenset({"script", "environment", "work_dir", "requeue", *_FLAGS})
_UPDATES = {
    "time_limit": "TimeLimit", "priority": "Priority", "comment": "Comment", "name": "JobName", "qos": "QOS",
    "partition": "Partition", "account": "Account", "nice": "Nice", "begin": "StartTime", "deadline": "Deadline",
    "dependency": "Dependency", "reservation": "ReservationName", "nodelist": "ReqNodeList", "exclude": "ExcNodeList",
    "constraint": "Features", "requeue": "Requeue", "mail_type": "MailType", "mail_user": "MailUser",
}  # fmt: skip
_NOT_IN_SCRIPTS = ("bbf", "export-file", "get-user-env", "gid", "nodefile", "test-only", "uid", "wait", "wrap")
"""They read files of this host, or are about this host's process. Slurm takes what an option's name begins with."""
_WHOLE = frozenset({"bb", "export", "wait-all-nodes"})
_NOT_WITH_FILES = ("nodelist", "exclude")
"""A value with a slash is a file of nodes."""
_SHORT = re.compile(r"-[HhkOQsvV]*([FWwx])(.*)")
_VARIABLES_OF_SLURM = ("SLURM_", "SBATCH_", "SALLOC_", "SRUN_", "SPANK_", "_SLURM", "SLUICE_")


def sbatch_words(body: JobRequest, who: Account, environment: int, *, test: bool = False) -> list[str]:
    """sbatch's options. `environment`: the descriptor from which it reads the job's."""
    words = ["--parsable", *(["--test-only"] if test else [])]
    for name in JobRequest.model_fields:
        value = getattr(body, name)
        if value is None or name in _ELSEWHERE:
            continue
        words.append(f"--{_OPTIONS.get(name, name.replace('_', '-'))}={value}")
    words += [f"--{name.replace('_', '-')}" for name in _FLAGS if getattr(body, name)]
    if body.requeue is not None:
        words.append("--requeue" if body.requeue else "--no-requeue")
    words += [f"--chdir={body.work_dir or who.home}", "--propagate=NONE"]
    return [*words, *([] if test else [f"--export-file={environment}"])]  # which makes sbatch forget its own


def environment_of(body: JobRequest, who: Account) -> bytes:
    """The job's environment, as --export-file has it. Raises ActError 422 for what Slurm sets itself."""
    for name in body.environment:
        if name.startswith(_VARIABLES_OF_SLURM):
            raise ActError(422, f"environment {name!r}: Slurm sets it", remedy="use the fields of the request")
    return usual_environment(who, body.environment)


def usual_environment(who: Account, more: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """What each job has, and more."""
    variables = {
        "HOME": who.home, "USER": who.name, "LOGNAME": who.name, "SHELL": who.shell, "PATH": PATH, "LANG": "C.UTF-8",
        **more,
    }  # fmt: skip
    return b"".join(f"{name}={value}".encode() + b"\0" for name, value in variables.items())


def refuse_script(script: str) -> None:
    """Raise ActError 422 for a script with an option that is not for here."""
    if "\0" in script:
        raise ActError(422, "script: has a NUL character", remedy="send text")
    if not script.startswith("#!"):
        raise ActError(422, "script: does not begin with #!", remedy="begin it with #!/bin/sh")
    for line in script.split("\n"):
        if line.strip() and not line.lstrip().startswith("#"):
            return  # Slurm reads options only before it
        if not line.startswith(("#SBATCH", "#SLURM", "#PBS", "#BSUB")):
            continue
        words = re.sub(r"[\"'\\]", "", line).split()[1:]
        for word, after in zip(words, [*words[1:], ""], strict=True):
            if _is_unwanted(word, after):
                raise ActError(
                    422, f"script: {word[:80]!r} in an #SBATCH line is not possible here", remedy="remove it"
                )


def _is_unwanted(word: str, after: str) -> bool:
    """Whether a word of an #SBATCH line, and what is its value if it has none of its own, is not for here."""
    if match := _SHORT.match(word):
        return match[1] in "FW" or "/" in (match[2] or after)
    name, equals, value = word.removeprefix("--").partition("=")
    if not word.startswith("--") or not name or name in _WHOLE:
        return False
    if any(one.startswith(name) for one in _NOT_WITH_FILES):
        return "/" in (value if equals else after)
    return any(one.startswith(name) for one in _NOT_IN_SCRIPTS)


def update_words(job: str, body: JobChange) -> list[str]:
    """Words of scontrol update."""
    found: list[str] = [f"JobId={job}"]
    for name, key in _UPDATES.items():
        value: Any = getattr(body, name)
        if value is not None:
            found.append(f"{key}={int(value) if isinstance(value, bool) else value}")
    return found


assert set(_UPDATES) == set(JobChange.model_fields)  # noqa: S101
