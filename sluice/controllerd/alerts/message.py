"""One message about one rule, and its formats. Untrusted texts stay on their line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sluice.base.errors import SluiceError
from sluice.base.text import one_line

SCHEMA_VERSION = 1
MOST_SUBJECTS = 30
STATES = ("firing", "resolved", "happened", "test")


@dataclass(frozen=True, slots=True)
class Subject:
    """One thing that a rule is about: a GPU, a node, a job, a tenant."""

    name: str
    value: float
    text: str  # for people
    since: float


@dataclass(frozen=True, slots=True)
class Message:
    """One message; `id` is the same for each attempt to deliver it."""

    id: str
    at: float
    cluster: str
    rule: str
    kind: str
    severity: str
    state: str  # one of STATES
    subjects: tuple[Subject, ...] = ()
    more: int = 0  # subjects that are left out

    def document(self) -> dict[str, Any]:
        """For JSON; all texts are of one line."""
        fields = asdict(self)
        fields["subjects"] = [
            {**one, "name": one_line(one["name"]), "text": one_line(one["text"])} for one in fields["subjects"]
        ]
        return {"schema_version": SCHEMA_VERSION, **fields}

    def to_json(self) -> str:
        """One line."""
        return json.dumps(self.document(), allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Message:
        """Read back. Raises SluiceError."""
        try:
            fields = json.loads(text)
            if fields.pop("schema_version") != SCHEMA_VERSION:
                raise ValueError("of another version")
            subjects = tuple(Subject(**one) for one in fields.pop("subjects"))
            return cls(subjects=subjects, **fields)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SluiceError(f"not a message: {error}") from error

    @property
    def title(self) -> str:
        """One line, without characters that could end a mail's header."""
        about = self.subjects[0].name if len(self.subjects) == 1 and not self.more else f"{self.count} cases"
        return one_line(f"[{self.cluster}] {self.state} {self.severity}: {self.rule}: {about}", limit=150)

    @property
    def count(self) -> int:
        """How many subjects."""
        return len(self.subjects) + self.more

    def text(self) -> str:
        """For people, several lines."""
        lines = [
            self.title,
            "",
            f"rule      {one_line(self.rule)} ({self.kind})",
            f"cluster   {one_line(self.cluster)}",
            f"time      {_moment(self.at)}",
        ]
        for one in self.subjects:
            lines.append(f"  {one_line(one.name)}: {one_line(one.text)}, since {_moment(one.since)}")
        if self.more:
            lines.append(f"  and {self.more} more")
        return "\n".join(lines) + "\n"


def make(*, id: str, at: float, cluster: str, rule: Mapping[str, str], state: str, subjects: list[Subject]) -> Message:
    """A message about as many subjects as one may hold. `rule`: its name, kind and severity."""
    return Message(
        id,
        at,
        cluster,
        rule["name"],
        rule["kind"],
        rule["severity"],
        state,
        tuple(subjects[:MOST_SUBJECTS]),
        max(0, len(subjects) - MOST_SUBJECTS),
    )


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
