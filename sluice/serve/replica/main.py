"""`sluice-replica`: what a service's job runs. Reads its spec from standard input, or from the file that it is given.

The engine is started first of all, if its model is there; what is slow to import comes after that.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.base.errors import SluiceError, UsageError
from sluice.base.log import log
from sluice.base.ports import free_port
from sluice.serve.engines.base import Engine, Place
from sluice.serve.engines.known import engine_of
from sluice.serve.replica.engine_process import EngineProcess
from sluice.serve.replica.spec import MEMBER, parse_spec
from sluice.serve.replica.stage import Staged, find_staged, stage

if TYPE_CHECKING:
    from threading import Event

    from sluice.exchange.serving import Peer, ReplicaSpec
    from sluice.serve.replica.life import Start
    from sluice.serve.replica.share import Share

_MOST = 1 << 20
_PREFIX = "sluice-replica."
_LATER_S = 5.0  # not while the engine starts
_OLD_S = 60.0  # a folder that is not locked for so long is of a replica that was killed
_GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def main() -> int:
    """The exit status: 0 it served and drained, 1 it failed, 2 it was not started as it should be."""
    began = time.monotonic()
    os.umask(0o077)
    if sys.argv[1:] == [MEMBER]:
        return _member()
    try:
        spec = parse_spec(_read(sys.argv[1:]))
        engine = engine_of(spec.engine)
    except (SluiceError, OSError) as error:
        print(f"sluice-replica: {error}", file=sys.stderr)
        return 2
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_parent()))
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(held, fcntl.LOCK_EX)
    except OSError as error:
        print(f"sluice-replica: {error}", file=sys.stderr)
        return 1
    try:
        return _run(spec, engine, folder, began)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _member() -> int:
    """The engine's part on another node than the first."""
    from sluice.serve.replica.group import member

    try:
        return member(_gpus(), _parent())
    except (SluiceError, OSError, ValueError, KeyError) as error:
        print(f"sluice-replica: {os.environ.get('SLURMD_NODENAME', 'a node')}: {error}", file=sys.stderr)
        return 1


def _run(spec: ReplicaSpec, engine: Engine, folder: Path, began: float) -> int:
    secret = secrets.token_hex(32)
    process, staged, problem = None, None, None
    place = Place(folder, free_port(), secret, Path(spec.model), _gpus())
    try:
        staged = find_staged(spec)
        if staged is not None and spec.nodes > 1 and spec.stage is not None:
            staged.release()  # first it is to be given to the other nodes
            staged = None
        if staged is not None:
            process = _launch(spec, engine, place, staged, None)
    except (SluiceError, OSError) as error:
        problem = error
    try:
        return _live(_start(spec, engine, place, secret, began, process, staged), problem)
    finally:
        if process is not None and process.ended() is None:
            process.end(0)


def _start(
    spec: ReplicaSpec, engine: Engine, place: Place, secret: str, began: float, process: EngineProcess | None,
    staged: Staged | None,
) -> Start:  # fmt: skip
    from sluice.serve.replica.life import Start

    return Start(spec, engine, place, secret, began, process, staged)


def _live(start: Start, problem: Exception | None) -> int:
    import asyncio

    from sluice.serve.replica.certificate import make_context
    from sluice.serve.replica.life import Life

    def staged(stopped: Event, share: Share | None) -> Staged:
        if problem is not None:
            raise problem
        return stage(start.spec, stopped, share)

    def launch(model: Staged, peer: Peer | None) -> EngineProcess:
        return _launch(start.spec, start.engine, start.place, model, peer)

    async def live() -> int:
        asyncio.get_running_loop().call_later(_LATER_S, _remove_left, start.place.folder.parent)
        return await Life(start, staged, launch).run(lambda: make_context(start.spec.service))

    try:
        import uvloop
    except ImportError:
        log("problem", what="uvloop is not installed: the relay takes more CPU")
        return asyncio.run(live())
    return uvloop.run(live())


def _launch(spec: ReplicaSpec, engine: Engine, place: Place, staged: Staged, peer: Peer | None) -> EngineProcess:
    """`peer`: who gives the model to other nodes."""
    if spec.nodes == 1:
        placed = replace(place, model=staged.path)
        return EngineProcess(engine.start(spec, placed), place.folder)
    from sluice.serve.replica.group import EngineGroup, group_of

    placed = replace(place, model=staged.path, group=group_of(spec))
    return EngineGroup(engine.start(spec, placed), place.folder, spec, placed.group, peer)


def _read(arguments: list[str]) -> str:
    if len(arguments) > 1:
        raise UsageError("sluice-replica takes one argument", remedy="the file of its spec, or nothing: standard input")
    if arguments:
        with Path(arguments[0]).open(encoding="utf-8") as file:
            return file.read(_MOST)
    return sys.stdin.read(_MOST)


def _parent() -> str | None:
    """Where its folder is: $TMPDIR where a socket's path there is not too long (108 bytes), else /tmp."""
    given = os.environ.get("TMPDIR", "")
    return given if given.startswith("/") and len(given) < 60 else "/tmp"  # noqa: S108 - mkdtemp


def _remove_left(parent: Path) -> None:
    """Folders of this user's replicas that were killed; each that runs holds its folder's lock."""
    for left in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            folder = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                facts = os.fstat(folder)
                if facts.st_uid == os.geteuid() and facts.st_mtime < time.time() - _OLD_S:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(folder)


def _gpus() -> int:
    """How many the job has on this node."""
    with suppress(KeyError, ValueError):
        return int(os.environ["SLURM_GPUS_ON_NODE"])
    for name in _GPU_VARIABLES:
        if found := [one for one in os.environ.get(name, "").split(",") if one]:
            return len(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
