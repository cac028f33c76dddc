"""Launches that were asked for, on disk before they are asked: a process that is killed asks the same again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic

VERSION = 1
_MOST = 100_000


@dataclass(frozen=True, slots=True)
class Intent:
    """A launch. `job` None: it is not known yet whether it became a job."""

    service: str
    launch: str
    user: str
    asked: float
    job: int | None = None
    lent: bool = False


class Journal:
    """The file, which is replaced as a whole; launches are in it until their jobs are over."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> list[Intent]:
        """What was asked for. Raises SluiceError for a file that cannot be used: then nothing must be launched."""
        try:
            document = json.loads(self.path.read_bytes())
            if document["version"] != VERSION:
                raise ValueError("another version")
            return [
                Intent(
                    str(one["service"]),
                    str(one["launch"]),
                    str(one["user"]),
                    float(one["asked"]),
                    _number(one["job"]),
                    one.get("lent") is True,
                )  # fmt: skip
                for one in document["launches"][:_MOST]
            ]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise SluiceError(f"{self.path}: {error.strerror}", remedy="it is the daemon's user's") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise SluiceError(
                f"{self.path}: damaged: {error!r:.200}",
                remedy="remove it: launches that have become jobs are found in Slurm",
            ) from error

    def save(self, launches: list[Intent]) -> None:
        """Replace it. Raises OSError."""
        document = {"version": VERSION, "launches": [asdict(one) for one in launches]}
        write_atomic(self.path, json.dumps(document) + "\n", mode=0o600, follow_links=False)


def _number(job: object) -> int | None:
    return job if type(job) is int else None
