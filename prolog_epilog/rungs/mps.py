"""NVIDIA MPS: a control daemon for each job, which holds each client to a memory limit and to a share of the GPU.

The daemon and its folder are root's; of the users only the job's can read the folder, and only root sends commands.
What a client sets in its environment can only be less than what the daemon sets. MPS holds every process by itself: the
sum over the job's processes is held by the limiter, which this rung needs with it. docs.nvidia.com, Multi-Process
Service.
"""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from prolog_epilog import cgroups
from prolog_epilog.rungs.base import LIMITER, MPS
from prolog_epilog.state import MIB, State
from sluice.base.errors import SluiceError
from sluice.base.log import log
from sluice.core import limit
from sluice.core.errors import CoreError
from sluice.exchange.record import Grant, JobRecord

CONTROL = "nvidia-cuda-mps-control"
_START_S = 3.0  # under the lock that the watchdog needs, too; no process of the tenant runs yet
_ANSWER_S = 2.0
_SILENCE_S = 60.0  # a daemon that gave no answer is not asked again for this time: its tenant may have made it hang
_END_S = 3.0
_ROOM, _FILES = 16 * MIB, 256  # for pipes and logs, which the tenant can fill
_PIDFILE = "nvidia-cuda-mps-control.pid"  # the daemon writes it into its pipe folder
_SEARCH, _WRITE = 1, 7


class Mps:
    """See `base.Rung`. Also used for shares of compute time (`share.Shares`)."""

    name = MPS
    needs: tuple[str, ...] = (LIMITER,)

    def __init__(self, state: State) -> None:
        self._state = state
        self.folder = state.settings.run / "mps"
        self._sent: dict[tuple[int, str], tuple[int | None, int | None, int | None]] = {}  # daemon, limit, share
        self._silent: dict[int | None, float] = {}  # until when a daemon is not asked

    def unavailable(self, record: JobRecord, grant: Grant) -> str:
        """A whole NVIDIA GPU, and the daemon installed."""
        del record
        if grant.vendor != "nvidia":
            return f"{grant.vendor} has no MPS"
        if self._state.devices[grant.index].partition:
            return "MPS is not used on an instance of MIG"
        if shutil.which(CONTROL) is None:
            return f"no {CONTROL} on this node"
        return ""

    def apply(self, record: JobRecord, grant: Grant) -> bool:
        """Start the job's daemon unless it runs, and set the grant's limit and the job's share in it."""
        pid = self._pid(record)
        wanted = (pid, grant.limit, record.share_percent)
        if pid is not None and self._sent.get((record.job, grant.uuid)) == wanted:
            return False  # one more task of the job
        if pid is None:
            self._start(record)
        place = self._devices(record).index(grant.uuid)
        servers = self._ask(record, "get_server_list").split()
        percent = record.share_percent or 100
        commands = [f"set_default_active_thread_percentage {percent}"]
        commands += [f"set_active_thread_percentage {server} {percent}" for server in servers]
        if grant.limit is not None:
            size = f"{grant.limit // MIB}M"
            commands.append(f"set_default_device_pinned_mem_limit {place} {size}")
            commands += [f"set_device_pinned_mem_limit {server} {place} {size}" for server in servers]
        answer = self._ask(record, *commands)
        if "nvalid" in answer or "nrecognized" in answer:
            raise SluiceError(f"MPS of job {record.job}: {answer.strip()}", remedy="see its control.log")
        self._sent[record.job, grant.uuid] = (self._pid(record), grant.limit, record.share_percent)
        return True

    def verify(self, record: JobRecord, grant: Grant) -> str:
        """Whether the daemon answers with this limit, as far as it reports it: whole GiB, from 1 GiB on."""
        if not self.runs(record):
            return "its MPS daemon has ended"
        place = self._devices(record).index(grant.uuid)
        commands = ["get_default_active_thread_percentage", f"get_default_device_pinned_mem_limit {place}"]
        try:
            percent, answer = [*self._ask(record, *commands).splitlines(), "", ""][:2]
            given = float(percent.strip() or 0)
        except (SluiceError, ValueError) as error:
            return str(error) if self.runs(record) else "its MPS daemon has ended"  # while it was asked
        if given != (record.share_percent or 100):
            return f"its MPS daemon gives it {given:g} % of the GPU"
        if grant.limit is None or answer.strip() in (f"{grant.limit >> 30}G", f"{grant.limit >> 20}M"):
            return ""
        return f"its MPS daemon reports {answer.strip() or 'nothing'} for {grant.limit >> 20}M"

    def runs(self, record: JobRecord) -> bool:
        """Whether the job's daemon is there."""
        return self._pid(record) is not None

    def stop(self, record: JobRecord) -> None:
        """End the daemon and its server, whose own memory would be missing for the next job."""
        pid = self._pid(record)
        if pid is None:
            return
        with suppress(SluiceError):
            self._ask(record, "quit -t 1")
            end = time.monotonic() + _END_S
            while time.monotonic() < end and Path(f"/proc/{pid}").exists():
                time.sleep(0.02)
        if self._pid(record) == pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def remove(self, record: JobRecord) -> None:
        """The daemon, and its folder."""
        self.stop(record)
        self._clear(record)
        for grant in record.grants:
            self._sent.pop((record.job, grant.uuid), None)

    def exports(self, record: JobRecord) -> dict[str, str]:
        """Variables by which a task finds its daemon; empty where the job has none."""
        home = self._home(record)
        if not home.exists():
            return {}
        return {"CUDA_MPS_PIPE_DIRECTORY": str(home / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(home / "log")}

    # ---- the daemon ----

    def _home(self, record: JobRecord) -> Path:
        return self.folder / f"job_{record.job}"

    def _devices(self, record: JobRecord) -> list[str]:
        return [
            grant.uuid
            for grant in record.grants
            if grant.vendor == "nvidia" and not self._state.devices[grant.index].partition
        ]

    def _start(self, record: JobRecord) -> None:
        """Pipes that of the users only the job's can reach, logs to which that user can add; both are root's."""
        self.stop(record)
        self._make_home(record)
        try:
            done = subprocess.run(
                [CONTROL, "-d"],
                env=self._environment(record) | {"CUDA_VISIBLE_DEVICES": ",".join(self._devices(record))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_START_S,
                start_new_session=True,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SluiceError(
                f"MPS of job {record.job}: {CONTROL} -d: {error}", remedy="see its control.log"
            ) from error
        if done.returncode != 0:
            raise SluiceError(f"MPS of job {record.job}: {done.stdout.strip()}", remedy="see its control.log")

    def _make_home(self, record: JobRecord) -> None:
        """The folders of a daemon that died stay mounted, as running tasks use them; their content is not touched."""
        home = self._home(record)
        self.folder.mkdir(mode=0o711, exist_ok=True)
        if home.is_mount() and (home / "log/control.log").exists():  # which is made last
            for left in (home / "pipe").iterdir():  # root's: the tenant cannot write there
                left.unlink()
            return
        self._clear(record)
        limit.make_folder(home, record.uid, _ROOM, _FILES)
        (home / "pipe").mkdir(mode=0o700)
        (home / "log").mkdir(mode=0o700)
        (home / "log").chmod(0o1700)  # sticky: the server, which is the user's, cannot replace root's files
        allow(home / "pipe", record.uid, _SEARCH)
        allow(home / "log", record.uid, _WRITE)
        (home / "log/control.log").touch(mode=0o600)

    def _clear(self, record: JobRecord) -> None:
        """Remove the job's folder; one of an earlier version, which is no file system of its own, is renamed."""
        home = self._home(record)
        try:
            limit.remove_folder(home)
        except CoreError as error:  # what is in there is the tenant's, and not walked
            log("problem", job=record.job, what=error, remedy="restart the node, or remove the rest of it by hand")
            with suppress(OSError):
                home.rename(self.folder / f"left-{time.time_ns()}")

    def _environment(self, record: JobRecord) -> dict[str, str]:
        kept = {
            name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "SLUICE_SIM_STATE") if name in os.environ
        }
        home = self._home(record)
        return kept | {"CUDA_MPS_PIPE_DIRECTORY": str(home / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(home / "log")}

    def _ask(self, record: JobRecord, *commands: str) -> str:
        """The daemon's answer to commands. Raises SluiceError when it gives none, or gave none recently."""
        command, pid, now = "; ".join(commands), self._pid(record), time.monotonic()
        if now < self._silent.get(pid, 0.0):
            raise SluiceError(f"MPS of job {record.job}: {command}: the daemon does not answer")
        try:
            done = subprocess.run(
                [CONTROL],
                env=self._environment(record),
                input="".join(f"{one}\n" for one in commands),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_ANSWER_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            self._silent = {one: until for one, until in list(self._silent.items()) if until > now}
            self._silent[pid] = now + _SILENCE_S
            raise SluiceError(f"MPS of job {record.job}: {command}: {error}") from error
        if done.returncode != 0 or "Cannot find MPS" in done.stdout:
            raise SluiceError(f"MPS of job {record.job}: {command}: {done.stdout.strip()}")
        return done.stdout

    def _pid(self, record: JobRecord) -> int | None:
        """The daemon's number, if it is still this daemon's: another process may have got it."""
        try:
            pid = int((self._home(record) / "pipe" / _PIDFILE).read_text())
            ours = cgroups.uid_of(pid) == os.getuid() and CONTROL.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        return pid if ours else None


def allow(folder: Path, uid: int, rights: int) -> None:
    """Give one user rights (of rwx) to a folder by its access list; the owner root keeps all, others have none."""
    none = 0xFFFFFFFF
    entries = [(0x01, 7, none), (0x02, rights, uid), (0x04, 0, none), (0x10, rights, none), (0x20, 0, none)]
    value = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(folder, "system.posix_acl_access", value)
