"""What preflights found for jobs: the controllers' daemon writes it to StateSaveLocation, `sluice explain` reads it.

Times are seconds since 1970.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, TypeAdapter, ValidationError

from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic

FILE_NAME = "sluice.preflight-jobs.json"
"""Below StateSaveLocation."""
SCHEMA_VERSION: Final = 1
_MOST_JOBS = 1024  # the latest
_MOST_OF_JOB = 4
_MOST_BYTES = 64 << 20

Verdict = Literal["good", "fault", "undecided", "none"]
"""fault: a node is to be drained; undecided: nodes are suspected; none: nothing was judged."""

Moment = Annotated[float, Field(ge=0, le=1e11)]
"""Seconds since 1970, of which a date can be made."""


@dataclass
class AtFault:
    """A node, and what is at fault of it."""

    node: str
    what: str


@dataclass
class JobPreflight:
    """One preflight of a job; one that starts again has another one. Nodes are hostlists."""

    user: str  # whose job: numbers are used again
    time: Moment  # of the verdict
    nodes: str
    rounds: int
    seconds: float
    tool: str
    verdict: Verdict
    words: str
    at_fault: list[AtFault] = field(default_factory=list)
    suspected: str = ""
    left_out: str = ""  # they did not join
    requeued: Moment | None = None  # the job, as a node was at fault
    released: Moment | None = None  # when it was let start again, before Slurm's own pause was over


@dataclass
class _Document:
    schema_version: Literal[1] = SCHEMA_VERSION
    jobs: dict[int, list[JobPreflight]] = field(default_factory=dict)


_ADAPTER: TypeAdapter[_Document] = TypeAdapter(_Document)


def read_preflights(path: Path) -> dict[int, list[JobPreflight]]:
    """By job, the oldest of each first; none where there is no file. Raises SluiceError."""
    try:
        with path.open("rb") as file:
            return _ADAPTER.validate_json(file.read(_MOST_BYTES)).jobs
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise SluiceError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        raise SluiceError(
            f"{path}: {_damage(error)}", remedy="remove it: what earlier ones found is then no longer shown"
        ) from error


def _damage(error: ValidationError) -> str:
    versions = [str(one["input"])[:40] for one in error.errors() if one["loc"] == ("schema_version",)]
    return f"schema {versions[0]!r}, this Sluice reads {SCHEMA_VERSION}" if versions else "not a list of preflights"


def write_preflights(path: Path, jobs: Mapping[int, list[JobPreflight]]) -> None:
    """Those of the latest jobs. Raises SluiceError, OSError."""
    latest = dict(list(jobs.items())[-_MOST_JOBS:])
    write_atomic(path, json.dumps(_ADAPTER.dump_python(_Document(jobs=latest))) + "\n", mode=0o600)


def keep_preflight(jobs: dict[int, list[JobPreflight]], job: int, preflight: JobPreflight) -> None:
    """Add one, or replace that of the same time. What is known of another user's job of this number is dropped."""
    earlier = [one for one in jobs.pop(job, ()) if one.user == preflight.user and one.time != preflight.time]
    jobs[job] = [*earlier, preflight][-_MOST_OF_JOB:]
