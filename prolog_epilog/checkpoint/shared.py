"""Images on storage that nodes share, and what nodes must know of each other to go on with them.

Below the site's folder, root's alone: ``images/JOB-RESTARTS`` as on nodes (images.py), ``runs/JOB-RESTARTS``, what
became of each run, and ``nodes/NAME``, what each node that resumes jobs is like. There are no keys in it. An image is
used by the run after the one that it is of: when a later one has begun it is old, wherever it is.
"""

from __future__ import annotations

import json
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prolog_epilog.checkpoint.images import Images, Keys, Run
from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic, write_if_changed

_NOT_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class Last:
    """What is known of the last run of a job that began or was saved."""

    restarts: int
    source: int | None = None
    """Of which run it goes on with the image; None: it began from the start, or is saved."""
    node: str = ""
    """Where it was saved; empty: it was not."""
    excluded: tuple[str, ...] = ()
    """Nodes that were added to those which its user excludes, as they cannot go on with it."""

    def allows(self, image: int, restarts: int) -> bool:
        """Whether a run may go on with the image of that earlier one; asked again it may, too."""
        return image >= self.restarts or (restarts == self.restarts and image == self.source)


class Shared:
    """The site's folder, as `node` uses it."""

    def __init__(self, folder: Path, keys: Keys, node: str) -> None:
        self.folder = folder
        self._node = node
        self.images = Images(folder, keys, node)

    def prepare(self) -> None:
        """Raises SluiceError where the folder is not there, as its storage is not mounted, or not root's alone."""
        try:
            _check_roots(self.folder)
            for name in ("images", "runs", "nodes"):
                (self.folder / name).mkdir(mode=0o700, exist_ok=True)
                _check_roots(self.folder / name, follow=False)
        except OSError as error:
            raise SluiceError(f"{self.folder}: {error.strerror}", remedy="mount the storage that nodes share") from None

    # ---- runs ----

    def last(self, job: int) -> Last | None:
        """Raises OSError."""
        runs = self._runs(job)
        if not runs:
            return None
        restarts = max(runs)
        with suppress(FileNotFoundError, KeyError, TypeError, ValueError):
            found = json.loads(runs[restarts].read_text())
            return Last(restarts, found["source"], found["node"], tuple(found["excluded"]))
        return Last(restarts)

    def note(self, job: int, last: Last) -> None:
        """Each run has a file of its own, so that nodes do not overwrite each other's. Raises OSError."""
        for restarts, path in self._runs(job).items():
            if restarts > last.restarts:  # of another job, which had this number before
                path.unlink(missing_ok=True)
        path = self.folder / "runs" / f"{job}-{last.restarts}"
        write_atomic(path, json.dumps(asdict(last)), mode=0o600, follow_links=False)

    def is_old(self, run: Run) -> bool:
        """Whether a later run has begun. Raises OSError."""
        return any(restarts > run.restarts for restarts in self._runs(run.job))

    def prune(self, before: float) -> None:
        """Remove what is older. Raises OSError."""
        self.images.prune(before)
        for path in (self.folder / "runs").iterdir():
            with suppress(FileNotFoundError):  # another node was faster
                if path.stat().st_mtime < before:
                    path.unlink()

    def _runs(self, job: int) -> dict[int, Path]:
        found = {}
        for path in (self.folder / "runs").iterdir():  # glob would find none in a folder that cannot be read
            of_job, _, restarts = path.name.partition("-")
            if of_job == str(job) and restarts.isdecimal():
                found[int(restarts)] = path
        return found

    # ---- nodes ----

    def announce(self, facts: dict[str, Any] | None) -> None:
        """What this node is like; None: it resumes no job. Raises OSError."""
        path = self.folder / "nodes" / self._node
        if facts is None:
            path.unlink(missing_ok=True)
        else:
            write_if_changed(path, json.dumps(facts), mode=0o600)

    def nodes(self) -> dict[str, dict[str, Any]]:
        """What each is like. Raises OSError."""
        found = {}
        for path in (self.folder / "nodes").iterdir():
            with suppress(FileNotFoundError, ValueError):
                if not path.name.startswith("."):
                    found[path.name] = json.loads(path.read_text())
        return found


def _check_roots(folder: Path, *, follow: bool = True) -> None:
    """Raises SluiceError for what is not a folder of root's alone, OSError."""
    state = folder.stat(follow_symlinks=follow)
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != 0 or state.st_mode & _NOT_OTHERS:
        raise SluiceError(
            f"{folder}: not root's alone", remedy="install -d -m 700 it as root; its storage must not map root"
        )
