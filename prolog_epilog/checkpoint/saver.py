"""Answers what sluice-launch asks for a job (native/launch/launch.h): to save it, and to resume it.

A job is stopped while it is saved. It is ended when its image is complete and the order to requeue it is on disk, and
goes on when anything fails before. An image is forgotten before what was resumed from it runs: none is resumed twice.
Where CRIU fails before, as when it is killed, nothing has run yet, and the same image is tried once more.
CRIU is root's and works with what users can change meanwhile, so a job is saved only with what contents.py lists, and
is looked at by opened.py before it runs again. What it has on GPUs is on the host while CRIU works (gpus.py): taken off
before, and put back, on other GPUs where it has others, when the job was looked at and before any of it runs. Where the
site has storage that nodes share, images move there (drains.py), and a job goes on on any node that is like its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from policy.checkpoint import NodeSystem
from prolog_epilog.cgroups import jobs_here, memory_room
from prolog_epilog.checkpoint import contents, cpus, criu, drains, opened
from prolog_epilog.checkpoint.criu import BrokenOffError, Criu
from prolog_epilog.checkpoint.drains import Drains, Place
from prolog_epilog.checkpoint.gpus import Gpu, Gpus, NeverError, Pairs, from_facts, to_facts
from prolog_epilog.checkpoint.images import Images, Run, Writer
from prolog_epilog.checkpoint.shared import Last, Shared
from prolog_epilog.server import Peer, Server
from sluice.base.clock import uptime
from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.base.log import log
from sluice.slurm.commands import Commands
from sluice.slurm.job import read_job

_LOCK_S = 600.0
_COMMAND_S = 20.0
_STOP_S = 10.0  # for a process that waits for a disk
_GPU_S = 60.0  # for work on GPUs that has begun to end
_DAY_S = 86400.0
PRUNE_S = 3600.0
ANNOUNCE_S = 5.0


class Saver:
    """`requeue` puts the order that a run of a job is to start again on disk: job, restarts. `ready` is there while
    jobs can be saved (slurm_plugin/entry/spank_sluice_limit.c). `node`: this one's name."""

    def __init__(
        self,
        folder: Path,
        policy: Callable[[], NodeSystem | None],
        ready: Path,
        requeue: Callable[[int, int], None],
        gpus: Gpus | None = None,
        *,
        node: str = "",
        stopping: threading.Event | None = None,
    ) -> None:
        self.images = Images(folder)
        self.node = node
        self.gpus = gpus or Gpus()
        self._policy_now = policy
        self._ready = ready
        self._requeue = requeue
        self._criu = Criu(Path())
        self._commands = Commands(timeout=_COMMAND_S)
        self._lock = threading.Lock()
        self.told: Callable[[int, str], None] = lambda job, words: None
        """What happened to a job, for its record."""
        self.restored_from: Callable[[int, float], None] = lambda job, began: None
        """What was saved of a job runs, or cannot; `began`: when it was asked for, as of `uptime`. Raises nothing."""
        self._resuming: dict[int, float] = {}  # since when, by job
        self.found_unsaved: Callable[[int, str], None] = lambda job, why: None
        """What a job's program does with its GPUs cannot be saved, as its driver has said."""
        self.node_gpus: Callable[[], list[Gpu]] = list
        """All of this node's."""
        self.on_moved: Callable[[], None] = lambda: None
        """There is an image to move."""
        place = Place(
            self.images, node, self._shared, self._policy, self._alone, lambda job, words: self.told(job, words),
            stopping or threading.Event(),
        )  # fmt: skip
        self.drains = Drains(place, self._commands)

    def answer_to(self, server: Server) -> None:
        """Take requests."""
        server.add("key", self.take_key)
        server.add("save", self.save)
        server.add("resume", self.resume)
        server.add("restored", self.restored)
        server.add("resumed", self.resumed)

    def problem(self) -> str:
        """Why no job can be saved here; empty: it can."""
        if self._policy_now() is None:
            return "the policy has no checkpoint.system"
        return self._program().problem()

    def why_not(self, job: int) -> str:
        """Why a job that is about to start here cannot be saved, as far as that is known; empty: it can."""
        return self.problem() or self.gpus.problem(self.gpus.given(job))

    def announce(self) -> None:
        """A duty: the SPANK plugin starts jobs below the launcher where they can be saved. Raises OSError."""
        problem = self.problem()
        if problem:
            self._ready.unlink(missing_ok=True)
        elif not self._ready.exists():
            self._ready.touch(mode=0o644)
        if (shared := self._shared()) is not None:
            shared.announce(None if problem else drains.node_facts(to_facts(self.node_gpus())))

    def take_key(self, *, peer: Peer, job: int, key: str) -> dict[str, Any]:
        """A request: the key of a job that starts here, from its prolog. Raises SluiceError, OSError."""
        del peer
        try:
            self.images.keys.put(job, bytes.fromhex(key))
        except ValueError:
            raise SluiceError(f"the key of job {job} is not one") from None
        return {}

    def _shared(self) -> Shared | None:
        """Storage that nodes share, by the policy. Raises SluiceError where it is not there."""
        folder = drains.folder_of(self._policy_now())
        if folder is None:
            return None
        found = Shared(folder, self.images.keys, self.node)
        found.prepare()
        return found

    def _policy(self) -> NodeSystem:
        return self._policy_now() or NodeSystem()

    def _program(self) -> Criu:
        path = Path(self._policy().criu)
        with self._lock:
            if path != self._criu.path:
                self._criu = Criu(path)
            return self._criu

    # ---- save ----

    def save(self, *, peer: Peer, job: int, uid: int, restarts: int, init: int) -> dict[str, Any]:
        """A request: save this run of a job, end it, and have it requeued. Raises SluiceError, OSError: it goes on."""
        del peer
        run = Run(job, uid, restarts)
        began, steps = time.monotonic(), ""
        with self._alone(job) as lock:
            try:
                if not self._is_saved(run, init):  # else the agent that saved it was killed before it could say so
                    steps = self._save(run, init, lock)
                words = f"saved in {time.monotonic() - began:.2f} s{steps}; {self._where(run)}"
                self._requeue(job, restarts)
            except BrokenOffError as error:
                words = f"not saved, begins again from its start: {error}"
                self._begin_again(run, init)
            except BaseException as error:
                words = f"not saved: {error}"
                if not self._let_go_on(run, init, lock):
                    words += "; begins again from its start, as its state could not be put back on its GPUs"
                    self._begin_again(run, init)
                self.told(job, words)
                raise
            finally:
                shutil.rmtree(self.images.work(job), ignore_errors=True)
                self._saving(job).unlink(missing_ok=True)
            _end(init)
        log("saved", job=job, uid=uid, what=words)
        self.told(job, words)
        self.on_moved()
        return {}

    def _where(self, run: Run) -> str:
        """Where it can go on, as far as it is known now; it is noted for other nodes, too."""
        try:
            shared = self._shared()
            if shared is None:
                return drains.on_one_node(self.node)
            before = shared.last(run.job)
            shared.note(run.job, Last(run.restarts, None, self.node, before.excluded if before else ()))
        except (OSError, SluiceError) as error:
            return drains.on_one_node(self.node, str(error))
        if not self.images.keys.has(run.job):
            return drains.on_one_node(self.node, "no key came with it from slurmctld")
        return "waits until its state is on shared storage"

    def _begin_again(self, run: Run, init: int) -> None:
        """Where this run can neither be saved nor go on: it is ended, even if the order does not get on disk."""
        try:
            self._requeue(run.job, run.restarts)
        finally:
            _end(init)

    def settle(self) -> None:
        """A duty: a job that a killed agent left stopped, or off its GPUs, goes on, unless it is saved, and its helper
        asks again.

        Raises OSError.
        """
        for note in (self.images.folder / "work").glob(".*.saving"):
            job = int(note.name.split(".")[1])
            with suppress(SluiceError, FileNotFoundError, ValueError), self._alone(job, seconds=0) as lock:
                facts = json.loads(note.read_text())
                run, init = Run(job, facts["uid"], facts["restarts"]), facts["init"]
                if _started(init) != facts["started"]:  # it has ended, maybe after it had gone on without an agent
                    for images in self._places():
                        images.forget(job, run.restarts)
                    note.unlink()
                elif not self._is_saved(run, init):
                    if not self._let_go_on(run, init, lock):
                        self._begin_again(run, init)
                    note.unlink()

    def _saving(self, job: int) -> Path:
        """A note that it is being saved: maybe it is stopped, sees the node's /proc, and what it has on GPUs is on the
        host."""
        return self.images.folder / "work" / f".{job}.saving"

    def _is_saved(self, run: Run, init: int) -> bool:
        """Whether its last image is what it is now: it has not run since."""
        return any(images.has(run) for images in self._places()) and _is_stopped(init)

    def _places(self) -> list[Images]:
        """Where images may be: here, and on shared storage as far as that can be reached."""
        try:
            shared = self._shared()
        except SluiceError as error:
            log("problem", what=error.what, remedy=error.remedy)
            shared = None
        return [self.images] if shared is None else [self.images, shared.images]

    def _forget(self, job: int) -> None:
        """Raises OSError."""
        for images in self._places():
            images.forget(job)

    def _find(self, job: int, uid: int, restarts: int) -> tuple[Run, Images] | None:
        """The image with which this run goes on, and where it is. Raises SluiceError, OSError."""
        shared = self._shared()
        last = shared.last(job) if shared is not None else None
        found = None
        for images in (self.images, *([shared.images] if shared is not None else [])):
            image = images.find(job)
            if image is None or image[0] >= restarts or (last is not None and not last.allows(image[0], restarts)):
                continue
            if found is None or image[0] > found[0].restarts:
                found = Run(job, uid, image[0]), images
        return found

    def _let_go_on(self, run: Run, init: int, lock: int) -> bool:
        """As if it had not been asked to save. False: it cannot, and is to be ended."""
        try:
            if any(images.has(run) for images in self._places()):
                self._forget(run.job)
            criu.uncover_proc(init)
            self.gpus.resume(self.gpus.given(run.job), opened.processes(init)[1:], [], lock)
        except (OSError, SluiceError) as error:
            log("problem", job=run.job, what=f"does not go on: {error}")
            return False
        _go_on(init)
        return True

    def _save(self, run: Run, init: int, lock: int) -> str:
        """How long its steps took, in words."""
        policy = self._policy()
        gpus = self.gpus.given(run.job)
        if problem := self.problem() or self.gpus.problem(gpus) or self._cannot_return(run):
            raise SluiceError(problem)
        _go_on(init)  # an agent that was killed may have left it stopped
        self._check_room(run, init, policy)
        work = self._fresh_work(run.job)
        note = {"uid": run.uid, "restarts": run.restarts, "init": init, "started": _started(init)}
        write_atomic(self._saving(run.job), json.dumps(note), mode=0o600)
        times = [time.monotonic()]
        with self.images.writing(run) as image:
            try:
                self.gpus.suspend(gpus, init, opened.processes(init)[1:], _GPU_S, lock)
            except NeverError as error:
                self.found_unsaved(run.job, error.what)
                raise
            times.append(time.monotonic())
            _stop(init)
            self._program().save(init, work, policy.time_s, lock, partial(_take, image, policy))
            times.append(time.monotonic())
            contents.check_files(image.content(contents.FILES))
            image.end(
                {
                    "opened": sorted(opened.look(init, run.uid)),
                    "rights": sorted(opened.rights(init, run.uid)),
                    "named": sorted(opened.look_by_name(init, run.uid)),
                    "node": self.node,
                    "cpu": cpus.here(),
                    "gpus": to_facts(gpus),
                    "saved": time.time(),
                }
            )
        times.append(time.monotonic())
        return " (GPU {:.2f}, memory to disk {:.2f}, end {:.2f})".format(*(end - at for at, end in pairwise(times)))

    def _cannot_return(self, run: Run) -> str:
        """Why Slurm would not start this job again; empty: it would."""
        facts = read_job(self._commands, run.job)
        if facts is None or facts.restarts != run.restarts:
            return "it does not run any more"
        return "" if facts.batch and facts.requeue else "it may not be requeued (--no-requeue)"

    def _check_room(self, run: Run, init: int, policy: NodeSystem) -> None:
        """Before the job is stopped; memory that several processes share is counted for each. Raises SluiceError."""
        on_gpus = self.gpus.held(run.job)
        wanted = sum(_resident(pid) for pid in opened.processes(init)) + on_gpus
        if wanted > policy.most_bytes:
            raise SluiceError(f"its memory, {wanted >> 20} MiB, is over the limit of {policy.most_bytes >> 20} MiB")
        room = memory_room(init)
        if on_gpus > room:  # it goes to the host as memory of the job's own
            raise SluiceError(f"the {on_gpus >> 20} MiB on its GPUs do not fit into the rest of its memory, "
                              f"{room >> 20} MiB (--mem)")  # fmt: skip
        used = self.images.size(run.uid)
        if used + wanted > policy.quota_bytes:
            raise SluiceError(f"with {used >> 20} MiB of other jobs its user would be over the quota here")
        disk = os.statvfs(self.images.folder)
        if disk.f_bavail * disk.f_frsize < 2 * wanted:  # encrypted, and decrypted when it is resumed
            raise SluiceError(f"the disk of {self.images.folder} has no room for it")

    def _fresh_work(self, job: int) -> Path:
        work = self.images.work(job)
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(mode=0o700)
        return work

    # ---- resume ----

    def resume(self, *, peer: Peer, job: int, uid: int, restarts: int) -> dict[str, Any]:
        """A request: prepare what was saved of an earlier run. The command that starts it, none: there is nothing.

        ``again``: it is to be made again. Raises SluiceError, OSError: the job begins again from its start.
        """
        del peer
        with self._alone(job):
            work = self.images.work(job)
            self._resuming[job] = uptime()
            try:
                if self._may_have_run(job, restarts):  # and a helper was killed, or a place was not to be reached
                    raise SluiceError("some of it may have run")
                found = self._find(job, uid, restarts)
                self._begin(job, restarts, found[0].restarts if found else None)
                if found is None:
                    return {"words": []}
                run, images = found
                facts = images.facts(run)
                if problem := self.problem() or self._cannot_go_on(facts):
                    raise SluiceError(problem)
                self._pairs(job, facts)
                shutil.rmtree(work, ignore_errors=True)
                images.read(run, work)
            except (OSError, SluiceError) as error:
                if isinstance(error, OSError) and self._once_more(job, restarts, str(error)):
                    return {"again": True}
                self._give_up(job, str(error))
                raise
            return {"words": self._program().resume_words(work), "pid": str(work / "pid")}

    def _begin(self, job: int, restarts: int, source: int | None) -> None:
        """What earlier runs have saved is old from now on, but for what this run goes on with. Raises OSError."""
        shared = self._shared()
        if shared is None:
            return
        last = shared.last(job)
        if source is None and last is not None and last.node not in ("", self.node) and last.restarts < restarts:
            self.told(job, f"begins again from its start, as what was saved of it is on {last.node} alone")
        shared.note(job, Last(restarts, source, "", last.excluded if last else ()))

    def _cannot_go_on(self, facts: dict[str, Any]) -> str:
        """Why not here with what was saved on another node; empty: it can."""
        return "" if facts.get("node", self.node) == self.node else cpus.why_not(facts["cpu"], cpus.here())

    def _pairs(self, job: int, facts: dict[str, Any]) -> Pairs:
        """Which GPU it has here instead of which. Raises SluiceError where it cannot go on with these."""
        had, has = from_facts(facts.get("gpus", ())), self.gpus.given(job)
        if had and (problem := self.gpus.problem(has)):
            raise SluiceError(problem)
        return self.gpus.pairs(had, has)

    def restored(self, *, peer: Peer, job: int, uid: int, restarts: int, init: int, rights: bool) -> dict[str, Any]:
        """A request of CRIU's, which goes on when it is answered: all processes are there, and none has run.

        They are root's, so that nobody else can let them run, and have their files; later, with `rights`, they are
        their user's. Raises SluiceError, OSError: they are ended, the job begins again from its start.
        """
        del peer
        with self._alone(job):
            try:
                if rights:
                    self._check_rights(job, uid, restarts, init)
                else:
                    self._check_files(job, uid, restarts, init)
            except BaseException as error:
                goes_on = criu.is_restoring(init)
                _end(init)
                if goes_on or rights:  # else CRIU was killed, and `resumed` says what becomes of the job
                    self._give_up(job, str(error))
                raise
        return {}

    def resumed(self, *, peer: Peer, job: int, uid: int, restarts: int, init: int) -> dict[str, Any]:
        """A request: what `resume` gave was started, and is stopped; 0: it could not be. Lets it run.

        ``again``: `resume` is to be asked again, when what was started has ended. Raises SluiceError, OSError: it does
        not run, the job begins again from its start.
        """
        del peer
        with self._alone(job) as lock:
            if not init and not self.images.work(job).exists():
                self._forget(job)  # where an agent that was killed has not: the job begins again from its start
                raise SluiceError("it was refused")  # and its job told why
            try:
                if not init:
                    why = criu.why_not(self.images.work(job))
                    is_there = not self._may_have_run(job, restarts) and self._find(job, uid, restarts) is not None
                    if is_there and self._once_more(job, restarts, why):
                        return {"again": True}
                    raise SluiceError(why)
                looked_at = self._looked_at(job, restarts, init)
                if looked_at is None or not looked_at["all"]:
                    raise SluiceError("CRIU did not have it looked at")
                criu.mount_own_proc(init)
                pairs = [(str(old), str(new)) for old, new in looked_at["pairs"]]
                self.gpus.resume(self.gpus.given(job), opened.processes(init)[1:], pairs, lock)
            except (OSError, SluiceError) as error:
                if init:
                    _end(init)
                self._give_up(job, str(error))
                raise
            shutil.rmtree(self.images.work(job), ignore_errors=True)
            _go_on(init)
        self._note_restored(job)
        log("resumed", job=job, uid=uid, restarts=restarts)
        self.told(job, "resumed")
        return {}

    def _may_have_run(self, job: int, restarts: int) -> bool:
        """Whether some of this run may. CRIU lets no process go before it was answered that its files are those that
        it had (`restored`), which is noted first, and the image forgotten. Raises OSError."""
        try:
            return bool(json.loads(self._note(job).read_text())["restarts"] == restarts)
        except FileNotFoundError:
            return False
        except ValueError:
            return True

    def _once_more(self, job: int, restarts: int, why: str) -> bool:
        """Whether this run is tried again; only once, whatever fails."""
        shutil.rmtree(self.images.work(job), ignore_errors=True)  # the disk may be full
        tried = self.images.folder / "work" / f".{job}.tried"
        try:
            if tried.exists() and tried.read_text() == str(restarts):
                return False
            write_atomic(tried, str(restarts), mode=0o600)
        except OSError as error:
            log("problem", job=job, what=f"not tried again: {error}")
            return False
        log("problem", job=job, what=f"not resumed, is tried again: {why}")
        self.told(job, f"not resumed, is tried again: {why}")
        return True

    def _check_files(self, job: int, uid: int, restarts: int, init: int) -> None:
        """Then the image is forgotten."""
        if self._looked_at(job, restarts, init) is None:  # else an agent that was killed has done so
            found = self._find(job, uid, restarts)
            if found is None:
                raise SluiceError("there is nothing to resume")
            facts = found[1].facts(found[0])
            by_name = facts.get("node", self.node) != self.node
            known = {tuple(one) for one in facts["named" if by_name else "opened"]}
            work = self.images.work(job)
            began_ns = (work / contents.FILES).stat().st_mtime_ns
            stranger = opened.stranger(init, uid, known, criu.log_in(work), began_ns, by_name=by_name)
            if stranger is not None:
                raise SluiceError(f"{stranger} is another file than it was")
            pairs = self._pairs(job, facts)
            if not criu.is_restoring(init):  # the image would be forgotten for a run that does not begin
                raise SluiceError("CRIU has ended")
            self._note_looked_at(job, restarts, init, {"rights": facts["rights"], "pairs": pairs, "all": False})
        self._forget(job)

    def _check_rights(self, job: int, uid: int, restarts: int, init: int) -> None:
        looked_at = self._looked_at(job, restarts, init)
        if looked_at is None:
            raise SluiceError("its files were not looked at")
        if not opened.rights(init, uid) <= {*looked_at["rights"]}:
            raise SluiceError("its processes would have other rights than they had")
        self._note_looked_at(job, restarts, init, {**looked_at, "all": True})

    def _note_looked_at(self, job: int, restarts: int, init: int, facts: dict[str, Any]) -> None:
        note = {**facts, "restarts": restarts, "init": init}
        write_atomic(self._note(job), json.dumps(note), mode=0o600)

    def _looked_at(self, job: int, restarts: int, init: int) -> dict[str, Any] | None:
        """What was noted of this run; None: nothing yet."""
        with suppress(FileNotFoundError, ValueError):
            found: dict[str, Any] = json.loads(self._note(job).read_text())
            if (found["restarts"], found["init"]) == (restarts, init):
                return found
        return None

    def _note(self, job: int) -> Path:
        return self.images.folder / "work" / f".{job}.runs"

    def _note_restored(self, job: int) -> None:
        if (began := self._resuming.pop(job, None)) is not None:  # else an earlier agent was asked
            self.restored_from(job, began)

    def _give_up(self, job: int, why: str) -> None:
        """The job begins again from its start; what cannot be resumed once is not tried again."""
        log("problem", job=job, what=f"not resumed, begins again from its start: {why}")
        self.told(job, f"not resumed, begins again from its start: {why}")
        self._note_restored(job)
        shutil.rmtree(self.images.work(job), ignore_errors=True)
        with suppress(OSError):
            self._forget(job)

    # ---- others ----

    @contextmanager
    def _alone(self, job: int, seconds: float = _LOCK_S) -> Iterator[int]:
        """One at a time for a job; CRIU and who asks the driver, which outlive an agent that is killed, get the lock,
        too. Raises SluiceError."""
        lock = os.open(self.images.folder / "work" / f".{job}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            end = time.monotonic() + seconds
            while not _is_locked(lock):
                if time.monotonic() > end:
                    raise SluiceError(f"job {job} is just saved by another")
                time.sleep(0.05)
            yield lock
        finally:
            os.close(lock)

    def prune(self) -> None:
        """A duty: remove what was kept long enough. Raises OSError."""
        now, asked = time.time(), uptime() - _DAY_S
        for job in [job for job, began in [*self._resuming.items()] if began < asked]:
            self._resuming.pop(job, None)
        self.images.prune(now - self._policy().keep_s)
        running = jobs_here()
        self.images.keys.prune(now - PRUNE_S, lambda job: job in running or self.images.find(job) is not None)
        if (shared := self._shared()) is not None:
            shared.prune(now - self._policy().keep_s)
        for left in (self.images.folder / "work").iterdir():
            if left.stat().st_mtime < now - _DAY_S:
                if left.is_dir():  # of a job that did not ask again: what it had in memory
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    left.unlink()


def _take(image: Writer, policy: NodeSystem, name: str, plain: BinaryIO) -> None:
    """One of CRIU's files. Raises SluiceError, OSError."""
    contents.check_name(name)
    image.add(name, plain, contents.FILES_MOST if name == contents.FILES else policy.most_bytes)


def _is_locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _stop(init: int) -> None:
    """All of it, with what it starts meanwhile: the node's /proc, which CRIU needs, is nothing for its processes.

    Raises SluiceError.
    """
    end = time.monotonic() + _STOP_S
    while running := [pid for pid in opened.processes(init) if _runs(pid)]:
        if time.monotonic() > end:
            raise SluiceError(f"its process {running[0]} does not stop")
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    """Whether any of its threads does: the first may have ended."""
    threads: list[str] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        threads = os.listdir(f"/proc/{pid}/task")
    return any(_state(int(thread)) not in "TtZX" for thread in threads)


def _state(thread: int) -> str:
    try:
        return _stat(thread)[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def _go_on(init: int) -> None:
    """It passes the signal on to all of its PID namespace."""
    try:
        criu.uncover_proc(init)
    except (OSError, SluiceError) as error:
        log("problem", what=f"process {init} sees the node's /proc: {error}")
    with suppress(ProcessLookupError):
        os.kill(init, signal.SIGCONT)


def _end(init: int) -> None:
    """End it, and with it all of its PID namespace. It may belong to a parent that does not look yet."""
    with suppress(ProcessLookupError):
        os.kill(init, signal.SIGKILL)


def _is_stopped(init: int) -> bool:
    """All of it is, as CRIU leaves it."""
    with suppress(OSError, SluiceError):
        return _started(init) > 0 and not any(_runs(pid) for pid in opened.processes(init))
    return False


def _stat(pid: int) -> list[str]:
    """From the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()


def _started(pid: int) -> int:
    """In ticks since the node booted; 0: there is no such process."""
    with suppress(OSError):
        return int(_stat(pid)[19])
    return 0


def _resident(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
