"""What a node remembers of its GPUs between two rounds of checks, and between two agents."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic

SCHEMA_VERSION = 1
MOST_EVENTS = 500
_MAX_BYTES = 8 << 20


@dataclass
class Found:
    """A finding that lasts. `jobs`: those that had the GPU when it began."""

    began: float
    text: str
    jobs: list[int] = field(default_factory=list)


@dataclass
class Xid:
    """An event of NVIDIA's driver. `blamed`: "gpu", "job", or "" while undecided; `many`: GPUs of the job had it;
    `users`: whose the jobs are."""

    at: float
    xid: int
    jobs: list[int] = field(default_factory=list)
    blamed: str = ""
    many: bool = False
    users: list[int] = field(default_factory=list)


@dataclass
class Subject:
    """A GPU, by its UUID, or the node."""

    since: dict[str, float] = field(default_factory=dict)  # by check: since when its condition has held
    details: dict[str, str] = field(default_factory=dict)  # by check: of what `since` holds
    last: dict[str, float] = field(default_factory=dict)  # by check: the counter's last value
    grown: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # by check: when, by how much
    shares: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # by check: when, value
    found: dict[str, Found] = field(default_factory=dict)  # by check
    xids: list[Xid] = field(default_factory=list)
    fatal: list[float] = field(default_factory=list)  # when fatal findings began
    kept: str = ""  # why it stays out of service until a person returns it
    passes: int = 0  # rounds in a row in which every check that acts passed
    least_residual: int | None = None


@dataclass
class Memory:
    """The whole node; `skew_s` from the controller's last answer."""

    subjects: dict[str, Subject] = field(default_factory=dict)
    skew_s: float | None = None
    skew_at: float = 0.0
    last_round: float = 0.0

    def of(self, name: str) -> Subject:
        """What is remembered of a GPU or of ``node``; empty at first."""
        return self.subjects.setdefault(name, Subject())


def load(path: Path) -> Memory:
    """What an earlier agent wrote; empty where there is none. Raises SluiceError for what cannot be read."""
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(_MAX_BYTES))
        if document["schema_version"] != SCHEMA_VERSION:
            raise ValueError("another version's")
        return Memory({str(name): _subject(one) for name, one in document["subjects"].items()})
    except FileNotFoundError:
        return Memory()
    except OSError as error:
        raise SluiceError(f"{path}: {error.strerror}", remedy="the agent starts with an empty one") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SluiceError(f"{path}: damaged: {error}", remedy="the agent starts with an empty one") from error


def copy_of(memory: Memory) -> dict[str, Any]:
    """What `save` writes; the memory may change meanwhile."""
    subjects = {name: asdict(one) for name, one in memory.subjects.items()}
    return {"schema_version": SCHEMA_VERSION, "subjects": subjects}


def save(path: Path, copy: dict[str, Any]) -> None:
    """Write a copy atomically. Raises OSError."""
    write_atomic(path, json.dumps(copy, separators=(",", ":")) + "\n", mode=0o600)


def _subject(fields: dict[str, Any]) -> Subject:
    return Subject(
        since={str(key): float(value) for key, value in fields["since"].items()},
        details={str(key): str(value) for key, value in fields["details"].items()},
        last={str(key): float(value) for key, value in fields["last"].items()},
        grown={str(key): _pairs(value) for key, value in fields["grown"].items()},
        shares={str(key): _pairs(value) for key, value in fields["shares"].items()},
        found={
            str(key): Found(float(one["began"]), str(one["text"]), [int(job) for job in one["jobs"]])
            for key, one in fields["found"].items()
        },
        xids=[
            Xid(
                float(one["at"]),
                int(one["xid"]),
                [int(job) for job in one["jobs"]],
                str(one["blamed"]),
                bool(one["many"]),
                [int(user) for user in one.get("users", ())],
            )
            for one in fields["xids"][-MOST_EVENTS:]
        ],
        fatal=[float(when) for when in fields["fatal"]],
        kept=str(fields["kept"]),
        passes=int(fields["passes"]),
        least_residual=None if fields["least_residual"] is None else int(fields["least_residual"]),
    )


def _pairs(values: list[list[float]]) -> list[tuple[float, float]]:
    return [(float(when), float(value)) for when, value in values]
