"""What is known of jobs that save their state when they are signalled, and of failures of nodes.

The controllers' daemon writes it to StateSaveLocation, where the backup controller's daemon and `sluice explain` find
it. Times are seconds since 1970.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic, write_if_changed
from sluice.exchange.plugin_list import checksummed

SAVES_FILE = "sluice.checkpoints.json"
"""Below StateSaveLocation."""
PLUGINS_FILE = "sluice.saves"
"""The same folder: what slurmctld's plugins read (`slurm_plugin/runtime/saves.h`) of when jobs saved."""
TIMES_FILE = "sluice.save-times"
"""... and of how long saves take."""
UNMEASURED_S = 60
"""That a save is taken to last, where none of the job or of another one of its account was measured."""
SCHEMA_VERSION = 1
_MOST_PLUGINS_JOBS = 65_536
_MOST_BYTES = 64 << 20


@dataclass
class JobSaves:
    """One job, over all its runs. A save counts when all nodes of the job have said so."""

    started: float = 0.0  # its latest run
    seen: float = 0.0  # when it last ran
    signalled: float = 0.0  # in this run; 0: not yet
    signals: int = 0
    answers: int = 0  # signals after which all its nodes saved
    saved: float | None = None  # when the last of its saves ended on the node that was first
    save_s: float | None = None  # from the last answered signal until the last node had saved
    interval_s: int | None = None  # between two signals; None: no periodic ones
    daly: bool = False  # the interval is Daly's
    mttf_s: float | None = None  # mean time to a failure of one of its nodes, for `daly`
    ending: bool = False  # it got the signal before its time limit
    unsaved: str = ""  # why its node cannot save it as it runs, in this run; empty: it can, or has not said
    savable: bool = False  # its node has said, in this run, that it can
    account: str = ""


@dataclass
class ClassFailures:
    """Nodes with GPUs of one type, while jobs ran there."""

    node_s: float = 0.0
    failures: int = 0  # that ended jobs


@dataclass
class Saves:
    """The whole file."""

    jobs: dict[int, JobSaves] = field(default_factory=dict)
    classes: dict[str, ClassFailures] = field(default_factory=dict)
    accounts: dict[str, float] = field(default_factory=dict)  # seconds that saves of an account's jobs take of late

    def save_s(self, job: int) -> int:
        """That a save of the job takes: as its last one, or on average those of its account."""
        one = self.jobs[job]
        save_s = self.accounts.get(one.account, UNMEASURED_S) if one.save_s is None else one.save_s
        return max(1, math.ceil(save_s))

    def write(self, path: Path) -> None:
        """Raises OSError."""
        document = {
            "schema_version": SCHEMA_VERSION,
            "jobs": {str(job): vars(one) for job, one in self.jobs.items()},
            "classes": {name: vars(one) for name, one in self.classes.items()},
            "accounts": self.accounts,
        }
        write_atomic(path, json.dumps(document, separators=(",", ":")) + "\n", mode=0o600)


def write_for_plugins(path: Path, saves: Saves) -> bool:
    """When jobs saved that have since they last started, and, in `TIMES_FILE` next to `path`, how long a save takes of
    each job that saves when it is asked to; of both the latest where there are too many. Whether one of the files is
    new. Raises OSError."""
    saved = {job: one.saved for job, one in saves.jobs.items() if one.saved is not None and one.saved > one.started}
    latest = sorted(((at, job) for job, at in saved.items()), reverse=True)[:_MOST_PLUGINS_JOBS]
    savers = sorted(((one.seen, job) for job, one in saves.jobs.items() if job in saved or one.savable), reverse=True)[
        :_MOST_PLUGINS_JOBS
    ]
    times = "".join(f"{job} {int(at)}\n" for at, job in latest)
    lasts = "".join(f"{job} {saves.save_s(job)}\n" for _, job in savers)
    written = write_if_changed(path, checksummed(f"sluice-saves 1\n{times}"), mode=0o644)
    body = f"sluice-save-times 1\n{lasts}"
    return write_if_changed(path.with_name(TIMES_FILE), checksummed(body), mode=0o644) or written


def read_saves(path: Path) -> Saves:
    """Empty where there is no file. Raises SluiceError for one that is damaged or cannot be read."""
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(_MOST_BYTES))
        if document["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema {document['schema_version']!r}, this Sluice reads {SCHEMA_VERSION}")
        jobs = {int(job): _read(JobSaves, one) for job, one in document["jobs"].items()}
        classes = {str(name): _read(ClassFailures, one) for name, one in document["classes"].items()}
        accounts = {str(name): float(save_s) for name, save_s in document.get("accounts", {}).items()}
        return Saves(jobs, classes, accounts)
    except FileNotFoundError:
        return Saves()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SluiceError(
            f"{path}: {error}", remedy="remove it: intervals and failures are then measured again"
        ) from error


def _read(kind: Any, fields: dict[str, Any]) -> Any:
    return kind(**{name: value for name, value in fields.items() if name in kind.__dataclass_fields__})
