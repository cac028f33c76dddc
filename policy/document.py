"""Reading sluice.yaml: every mistake at once, each with line, place, value and remedy."""

from __future__ import annotations

import difflib
import hashlib
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from policy.checks import mistakes
from policy.model import Policy
from sluice.base.documents import compose_document, line_of
from sluice.base.errors import UsageError
from sluice.base.text import one_line

DEFAULT_FILE = Path("/etc/sluice/sluice.yaml")
MOST_BYTES = 16 * 1024 * 1024
_REFERENCE = "man sluice.yaml describes every field"
_MOST_SHOWN = 500
_MOST_TEXT = 120  # characters of a value or key
"""Mistakes: each is looked for in the text, and compared with the others."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a policy file."""

    source: str
    line: int
    place: str
    what: str
    remedy: str

    def __str__(self) -> str:
        place = f"{self.place}: " if self.place else ""
        return one_line(f"{self.source}:{self.line}: {place}{self.what}; {self.remedy}", limit=None)


class PolicyError(UsageError):
    """A policy file with mistakes; carries all of them."""

    def __init__(self, problems: list[Problem]) -> None:
        more = f" (and {len(problems) - 1} more: sluice policy check)" if len(problems) > 1 else ""
        first = problems[0]
        place = f"{first.place}: " if first.place else ""
        super().__init__(f"{first.source}:{first.line}: {place}{first.what}{more}", remedy=first.remedy)
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Source:
    """A policy with the text that it was read from."""

    path: Path
    text: str
    policy: Policy

    @property
    def digest(self) -> str:
        """Which version of the file this is."""
        return digest(self.text)


def digest(text: str) -> str:
    """The name of a version of a file."""
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def read(path: Path) -> str:
    """A policy file's text. Raises UsageError for what cannot be one."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{path}: not a regular file", remedy="name a policy file")
        if status.st_size > MOST_BYTES:
            raise UsageError(f"{path}: larger than {MOST_BYTES} bytes", remedy="name a policy file")
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", remedy="name a policy file that can be read") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text at byte {error.start}", remedy="save it as UTF-8") from error


def load(path: Path) -> Source:
    """A policy file. Raises PolicyError with all its mistakes."""
    text = read(path)
    return Source(path, text, parse(text, source=str(path)))


def parse(text: str, *, source: str = "policy") -> Policy:
    """A policy from text; `source` names it in errors. Raises PolicyError with all its mistakes."""
    policy, problems = check(text, source=source)
    if policy is None or problems:
        raise PolicyError(problems)
    return policy


def check(text: str, *, source: str = "policy") -> tuple[Policy | None, list[Problem]]:
    """The policy, where its fields can be read, and every mistake. Raises UsageError for what is not YAML."""
    root, document = compose_document(text, source=source, remedy=_REFERENCE)
    try:
        policy = Policy.model_validate({} if document is None else document)
    except ValidationError as error:
        return None, _unique([_problem(one, root, source) for one in _meant(error.errors()[:_MOST_SHOWN])])
    return policy, [
        Problem(source, line_of(root, one.place), _dotted(one.place), one.what, one.remedy) for one in mistakes(policy)
    ]


def _meant(errors: list[Any]) -> list[Any]:
    """Without the errors of a union's branch for a word, where a mapping was written: the mapping's say more."""

    def elsewhere(one: Any) -> bool:
        union = one["loc"][:-1]
        return any(other is not one and other["loc"][: len(union)] == union for other in errors)

    words = ("string_type", "literal_error")
    return [one for one in errors if not (one["type"] in words and isinstance(one["input"], dict) and elsewhere(one))]


def _unique(problems: list[Problem]) -> list[Problem]:
    """A value that fits no branch of a union is one mistake, not one for each branch."""
    found: dict[tuple[int, str], Problem] = {}
    for problem in problems:
        found.setdefault((problem.line, problem.place.split("[")[0]), problem)
    return list(found.values())


def _problem(error: Any, root: Any, source: str) -> Problem:
    location = tuple(error["loc"])
    message = str(error["msg"]).removeprefix("Value error, ")
    what, _, remedy = message.partition("; ")
    given = error["input"]
    if error["type"] == "extra_forbidden":
        key = str(location[-1])
        near = difflib.get_close_matches(key, _known_keys(location[:-1]), n=1)
        what = f"unknown key {key[:_MOST_TEXT]!r}"
        remedy = f"did you mean {near[0]!r}?" if near else _REFERENCE
    elif isinstance(given, str | int | float | bool | None) and repr(given) not in what:
        what = f"{what}, got {given[:_MOST_TEXT] if isinstance(given, str) else given!r}"
    return Problem(source, line_of(root, location), _dotted(_real(location)), what, remedy or _REFERENCE)


def _real(location: tuple[Any, ...]) -> tuple[Any, ...]:
    """Without the names of union branches, which are in no file. Names of services may begin like those."""
    kept = 2 if location[:1] == ("services",) else 0
    return tuple(
        part
        for place, part in enumerate(location)
        if place < kept or not isinstance(part, str) or not ("[" in part or part[:1].isupper())
    )


def _dotted(place: tuple[Any, ...]) -> str:
    return ".".join(str(part)[:_MOST_TEXT] for part in place if part != "str")


def _known_keys(location: tuple[Any, ...]) -> list[str]:
    model: Any = Policy
    for part in location:
        fields = getattr(model, "model_fields", {})
        if part in fields:
            model = next((one for one in _models(fields[part].annotation)), None)
        elif not fields:
            return []
    return list(getattr(model, "model_fields", {}))


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    found: list[type[BaseModel]] = []
    for part in getattr(annotation, "__args__", ()):
        found.extend(_models(part))
    return found
