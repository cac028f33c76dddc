"""Folders for profiles of jobs (`sluice profile`): one for each job with GPUs, its user's own.

Root makes and removes them, and reads nothing in them: the injected library and the collector, both programs of the
job's user, meet there. Of one file in it, which the job touches when it has saved its state, root reads the time. What
the user left is removed by a process of that user, with a bound on its time. What the user has mounted there (FUSE)
is not asked.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Container
from contextlib import suppress
from pathlib import Path

from prolog_epilog.cgroups import Place
from sluice.base.files import open_unmounted
from sluice.base.log import log
from sluice.exchange.record import JobRecord

LIBRARY = "libsluice_profile.so"
PRELOAD = "libsluice_profile_preload.so"  # next to it, for drivers that load nothing
# Where it was asked for: AMD's brings its whole tracing library into each program, and stops one whose ROCm has none;
# Intel's is in every program of the step, and a branch in its calls of Level Zero.
_ASKED_ALONE = frozenset({"amd", "intel"})
_FIND = ("/usr/bin/find", ".", "-xdev", "-mindepth", "1")
_REMOVE = (*_FIND, "-delete")
# Five digits take the set-group-ID bit, too: RestrictSUIDSGID= of the agent's unit refuses a mode that has it.
_OPEN = (*_FIND, "-type", "d", "!", "-perm", "-u=rwx", "-exec", "chmod", "00700", "{}", ";")
_REMOVE_S = 5.0  # for all three of a round
_NOGROUP = 65534  # not the user's: no program of the user can attach to what runs here
_ENDED = ".ended-"
_SAVED = "checkpoint.saved"  # no step's name


class Profiles:
    """`folder` is on a disk: what is in memory would count as the job's. The caller holds the state's lock."""

    def __init__(self, folder: Path, link: Path, library: Path, everyone: Callable[[], bool] = lambda: True) -> None:
        """`everyone`: whether programs load the library also in jobs that did not ask for a profile."""
        self.folder = folder
        self._everyone = everyone
        self._link = link
        self._library = library
        self.on_retired: Callable[[], None] = lambda: None

    def prepare(self, running: Container[int]) -> None:
        """Make the folder, through which all users can pass, and the link by which their programs find it.

        Folders of jobs that are not `running` are of those that ended with the node, whose records ended with it, too.
        Raises OSError.
        """
        self.folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        self.folder.chmod(0o711)
        fresh = self._link.with_name(f".{self._link.name}")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(self.folder)
        fresh.replace(self._link)
        for folder in self.folder.iterdir():
            if folder.name.isdecimal() and int(folder.name) not in running:
                self._retire(folder)

    def make(self, record: JobRecord) -> None:
        """A folder for a job that starts. Without one, e.g. on a full disk, the job runs and has no profile."""
        self.retire(record)  # of its run before
        try:
            self._of(record).mkdir(mode=0o700)
            os.chown(self._of(record), record.uid, -1)
        except OSError as error:
            log("problem", job=record.job, what=f"no profile: {error.filename}: {error.strerror}")

    def exports(self, record: JobRecord, place: Place, asked: bool = False) -> dict[str, str]:
        """Variables for a task: where its step's profile is to be, and the library that writes it.

        `asked`: the step has --gpu-profile, by its own environment.
        """
        if not place.step or not self._is_made(record):
            return {}
        own = self._link / str(record.job)
        found = {"SLUICE_PROFILE_FOLDER": str(own / place.step), "SLUICE_CHECKPOINT_FILE": str(own / _SAVED)}
        if record.unsaved == "":  # what the library has open would be missing where the job is resumed
            return found
        for vendor in {grant.vendor for grant in record.grants}:
            wanted = asked or (self._everyone() and vendor not in _ASKED_ALONE)
            if wanted and self._library.exists():
                found |= _loaders(self._library).get(vendor, {})
        return found

    def saved(self, record: JobRecord) -> float | None:
        """When the job last touched the file that says that it has saved its state: by the kernel's time of the last
        change, which no user can set. None: not in this run."""
        try:
            with open_unmounted(self.folder, str(record.job), _SAVED) as file:
                return os.fstat(file).st_ctime
        except OSError:
            return None

    def _is_made(self, record: JobRecord) -> bool:
        try:
            with open_unmounted(self.folder, str(record.job)):
                return True
        except OSError:
            return False

    def retire(self, record: JobRecord) -> None:
        """A job has ended: nobody finds its folder any more, and `sweep` removes it."""
        self._retire(self._of(record))

    def _retire(self, folder: Path) -> None:
        try:
            folder.rename(self.folder / f"{_ENDED}{folder.name}-{time.time_ns()}")
        except FileNotFoundError:
            return
        except OSError as error:  # the next agent tries again
            log("problem", what=f"a profile's folder stays: {folder}: {error.strerror}")
            return
        self.on_retired()

    def sweep(self) -> None:
        """A duty, without the lock: remove what ended jobs left, each as its user and for a bounded time.

        Raises OSError.
        """
        left: OSError | None = None
        for ended in self.folder.glob(f"{_ENDED}*"):
            try:
                _empty(ended)
                ended.rmdir()
            except OSError as error:
                left = error
        if left is not None:
            raise left

    def _of(self, record: JobRecord) -> Path:
        return self.folder / str(record.job)


def _loaders(library: Path) -> dict[str, dict[str, str]]:
    """By vendor: the variables with which programs load the library."""
    path = str(library)
    return {
        "nvidia": {"CUDA_INJECTION64_PATH": path, "NCCL_PROFILER_PLUGIN": path},  # CUDA's driver; NCCL from 2.27 on
        "amd": {"ROCP_TOOL_LIBRARIES": path},
        "intel": {"LD_PRELOAD": str(library.with_name(PRELOAD)), "ZE_ENABLE_TRACING_LAYER": "1"},
    }


def _empty(folder: Path) -> None:
    """Remove what is in it, as its owner; folders that the owner closed are opened. Raises OSError."""
    words = (_REMOVE, _OPEN, _REMOVE)
    with open_unmounted(folder.parent, folder.name) as opened:
        itself = Path(f"/proc/self/fd/{opened}")  # also when something is mounted over its name meanwhile
        owner = os.fstat(opened).st_uid
        itself.chmod(0o700)  # find does not even begin in a closed one
        for one in words:
            with suppress(subprocess.TimeoutExpired):
                done = subprocess.run(
                    one, cwd=itself, user=owner, group=_NOGROUP, extra_groups=[], env={}, check=False,
                    timeout=_REMOVE_S / len(words), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )  # fmt: skip
                if done.returncode == 0 and one is _REMOVE:
                    return
