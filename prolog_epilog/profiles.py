"""Folders for profiles of jobs (`sluice profile`): one for each job with GPUs, its user's own.

Root makes and removes them, and reads nothing in them: the injected library and the collector, both programs of the
job's user, meet there. What the user left is removed by a process of that user, with a bound on its time.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from prolog_epilog.cgroups import Place
from sluice.base.log import log
from sluice.exchange.record import JobRecord

LIBRARY = "libsluice_profile.so"
_LOADERS = ("CUDA_INJECTION64_PATH", "NCCL_PROFILER_PLUGIN")  # of CUDA's driver, and of NCCL from 2.27 on
_REMOVE = ("/usr/bin/find", ".", "-xdev", "-mindepth", "1", "-delete")
_REMOVE_S = 5.0
_NOGROUP = 65534
_ENDED = ".ended-"


class Profiles:
    """`folder` is on a disk: what is in memory would count as the job's. The caller holds the state's lock."""

    def __init__(self, folder: Path, link: Path, library: Path) -> None:
        self.folder = folder
        self._link = link
        self._library = library
        self.on_retired: Callable[[], None] = lambda: None

    def prepare(self) -> None:
        """Make the folder, through which all users can pass, and the link by which their programs find it.

        Raises OSError.
        """
        self.folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        self.folder.chmod(0o711)
        fresh = self._link.with_name(f".{self._link.name}")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(self.folder)
        fresh.replace(self._link)

    def make(self, record: JobRecord) -> None:
        """A folder for a job that starts. Without one, e.g. on a full disk, the job runs and has no profile."""
        self.retire(record)  # of its run before
        try:
            self._of(record).mkdir(mode=0o700)
            os.chown(self._of(record), record.uid, -1)
        except OSError as error:
            log("problem", job=record.job, what=f"no profile: {error.filename}: {error.strerror}")

    def exports(self, record: JobRecord, place: Place) -> dict[str, str]:
        """Variables for a task: where its step's profile is to be, and the library that writes it."""
        if not place.step or not self._of(record).is_dir():
            return {}
        found = {"SLUICE_PROFILE_FOLDER": str(self._link / str(record.job) / place.step)}
        if self._library.exists() and any(grant.vendor == "nvidia" for grant in record.grants):
            found |= dict.fromkeys(_LOADERS, str(self._library))
        return found

    def retire(self, record: JobRecord) -> None:
        """A job has ended: nobody finds its folder any more, and `sweep` removes it."""
        with suppress(FileNotFoundError):
            self._of(record).rename(self.folder / f"{_ENDED}{record.job}-{time.time_ns()}")
            self.on_retired()

    def sweep(self) -> None:
        """A duty, without the lock: remove what ended jobs left, each as its user and for a bounded time.

        Raises OSError.
        """
        left: OSError | None = None
        for ended in self.folder.glob(f"{_ENDED}*"):
            owner = ended.lstat().st_uid
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    _REMOVE, cwd=ended, user=owner, group=_NOGROUP, extra_groups=[], env={}, timeout=_REMOVE_S,
                    check=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )  # fmt: skip
            try:
                ended.rmdir()
            except OSError as error:
                left = error
        if left is not None:
            raise left

    def _of(self, record: JobRecord) -> Path:
        return self.folder / str(record.job)
