"""The preloaded limiter's side of a job: its region of limits in /run, made, changed, read and removed by root.

Each region is a tmpfs of its own, of its files' size. Nothing that a tenant writes there is mapped or walked here.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from prolog_epilog.contexts import VENDORS, Contexts
from prolog_epilog.refusals import Refusal
from prolog_epilog.state import RefusalError, State
from sluice.base.errors import SluiceError
from sluice.base.files import mount_of, write_atomic, write_if_changed
from sluice.base.log import log
from sluice.base.text import one_line
from sluice.core import limit
from sluice.core.errors import CoreError
from sluice.exchange.record import Grant, JobRecord


def check_library(library: Path) -> None:
    """Refuse a limiter that users cannot open, as the loader goes on without it, or that others can change."""
    remedy = (
        "install Sluice where users can read and only root can write, e.g. below /opt, or name a copy with --library"
    )
    for path in (library, *library.resolve().parents):
        try:
            facts = path.stat()
        except OSError as error:
            raise SluiceError(f"limiter {library}: {error.strerror}", remedy="install Sluice again") from error
        mode = facts.st_mode
        if not mode & (stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH):
            raise SluiceError(
                f"limiter {library}: users cannot open it, as {path} has mode {stat.S_IMODE(mode):o}", remedy=remedy
            )
        shared = mode & (stat.S_IWGRP | stat.S_IWOTH) and not (stat.S_ISDIR(mode) and mode & stat.S_ISVTX)
        if facts.st_uid != 0 or shared:
            raise SluiceError(
                f"limiter {library}: others than root can replace it, as {path} is of user {facts.st_uid} with mode "
                f"{stat.S_IMODE(mode):o}",
                remedy=remedy,
            )


def check_mounts(folder: Path) -> None:
    """Refuse a mount namespace from which slurmd and its jobs would not see what is mounted in `folder`.

    systemd makes such a namespace for ProtectHome= and the like. It differs from process 1's and receives mounts from
    there ("master:" in mountinfo) without passing any back. Raises SluiceError, OSError.
    """
    with suppress(PermissionError):  # a process 1 that even root may not inspect
        if Path("/proc/self/ns/mnt").readlink() == Path("/proc/1/ns/mnt").readlink():
            return
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        mount = mount_of(descriptor)
    finally:
        os.close(descriptor)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        number, *fields = line.split(" - ")[0].split()
        if number == mount and any(field.startswith("master:") for field in fields):
            raise SluiceError(
                f"sluice agent: slurmd would not see the jobs' limits that are mounted in {folder}, as the agent has a "
                "mount namespace of its own",
                remedy="remove ProtectHome=, ProtectSystem=, Private*=, ReadWritePaths= and all that makes one "
                "from sluice-agent.service and its drop-ins; see: systemctl cat sluice-agent",
            )


class Regions:
    """One region a job, below ``/run/sluice/limit``. The caller holds the state's lock."""

    def __init__(self, state: State, contexts: Contexts) -> None:
        self._state = state
        self._contexts = contexts
        self._open: dict[int, limit.Region] = {}
        self.folder = state.settings.run / "limit"

    def prepare(self) -> None:
        """What a job's mount namespace is made from. Raises SluiceError, OSError."""
        for folder in (self.folder, self.folder / "job"):
            folder.mkdir(mode=0o755, exist_ok=True)
        check_mounts(self.folder)
        library = self._state.settings.library
        check_library(library)
        system = Path("/etc/ld.so.preload")
        if not system.exists():
            write_atomic(system, "")
        others = [line for line in system.read_text().splitlines() if line and line != str(library)]
        # A job's namespace has this file mounted over; one that is replaced could not be mounted over there.
        write_if_changed(self._state.settings.run / "preload", "\n".join([str(library), *others]) + "\n")

    def is_partition(self, grant: Grant) -> bool:
        """Whether a grant is of a part of a GPU."""
        return bool(self._state.devices[grant.index].partition)

    def of(self, job: int) -> Path | None:
        """Where the job's region lies; None when it has none."""
        return self._folder(job) if job in self._open else None

    def _folder(self, job: int) -> Path:
        return self.folder / f"job_{job}"

    def take_over(self, job: int) -> None:
        """Open what an earlier agent made."""
        if (self._folder(job) / "limits").exists():
            try:
                with self._state.guard.about(job):
                    self._open[job] = limit.Region(self._folder(job))
            except CoreError as error:
                log("problem", job=job, what=error)

    def make(self, record: JobRecord) -> None:
        """Make the job's region, or change its limits to those of the record. Raises RefusalError, CoreError."""
        limited: list[limit.Device] = []
        for grant in record.grants:  # a GPU that is not in the region would get nothing
            if grant.vendor not in VENDORS:
                continue
            device = self._state.devices[grant.index]
            measured = self._contexts.of(device)
            if measured is None:
                raise RefusalError(
                    f"{device.model}: the size of a driver context is not known, so no limit can be set",
                    Refusal.CONTEXT_UNKNOWN,
                    remedy="see the agent's log; restart sluice-agent when the driver works",
                )
            limited.append(
                limit.Device(
                    total=measured["total"],
                    limit=grant.limit if grant.limit is not None else measured["total"],
                    context=measured["context"],
                    uuid=device.uuid if grant.vendor == "nvidia" else "",
                    pci=device.pci,
                )
            )
        region = self._open.get(record.job)
        if region is None:
            self.remove(record.job)  # of an agent that was killed before it recorded that it made it
            limit.create(self._folder(record.job), limited, record.uid)
            self._open[record.job] = limit.Region(self._folder(record.job))
            return
        for index, (old, new) in enumerate(zip(region.devices, limited, strict=True)):
            if old.limit != new.limit:
                region.set_limit(index, new.limit)

    def remove(self, job: int) -> None:
        """Remove the region; nothing where there is none."""
        region = self._open.pop(job, None)
        if region is not None:
            region.close()
        limit.remove(self._folder(job))

    def collect(self, record: JobRecord) -> None:
        """Copy the limiter's figures into the record: the tenant's claims; damaged ones are left out."""
        region = self._open.get(record.job)
        if region is None:
            return
        limited = [grant for grant in record.grants if grant.vendor in VENDORS]
        for index, grant in enumerate(limited):
            try:
                with self._state.guard.about(record.job):
                    usage = region.usage(index)
            except CoreError as error:
                record.note("refuse", why=one_line(str(error)))
                return
            grant.peak = max(grant.peak, min(usage.peak, grant.total))
            grant.refused = usage.refused
