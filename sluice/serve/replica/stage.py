"""Models on the node's disk: one copy for all replicas of a user, complete and checked, or none.

STAGE/sluice-UID/ is that user's alone (0700). In it, NAME.DIGEST is a model, NAME.DIGEST.lock its lock: held shared by
each replica that uses it, alone by the one that copies or removes it. What is not used is removed, the least recently
used first, when a copy needs the room. A copy is made under another name and renamed when it is whole. Its pieces come
from other replicas, as far as they have them, else from the storage.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from sluice.base.errors import SluiceError
from sluice.base.log import log
from sluice.base.sizes import format_mib
from sluice.exchange.serving import ReplicaSpec
from sluice.serve.replica.pieces import ModelFile, Pieces

if TYPE_CHECKING:
    from sluice.serve.replica.share import Share

_PIECE = 16 << 20
_THREADS = 4
_LOOK_S = 0.1  # whether another one has copied it
_MOST_FILES = 100_000
_SPARE = 0.02
"""Share of the disk that stays free."""
_ENTRY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}\.[0-9a-f]{32}\Z")
_PART = ".part."
_PIECES = "pieces"
"""File of an entry: the digests of its pieces."""
_HEARD_S = 3.0  # for replicad to name other replicas
_STALLED_S = 15.0  # so long after the last piece the storage is read: later than replicad names another reader
_WAIT_S = 0.05


class StageError(SluiceError):
    """The model cannot be used, or there is no room for it."""


@dataclass(slots=True)
class Staged:
    """A model that can be used, as long as this is kept: `lock` keeps others from removing it."""

    path: Path
    lock: int | None = None
    copied: int = 0  # bytes, by this replica
    taken: int = 0  # of them, from other replicas
    by_ucx: int = 0  # of these, over UCX

    def release(self) -> None:
        """Others may remove it."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None


def find_staged(spec: ReplicaSpec) -> Staged | None:
    """The model, where it can be used without copying and checking anything. Raises StageError."""
    if not spec.model:
        return Staged(Path())
    if spec.stage is None:
        return None if spec.sha256 else Staged(_existing(spec.model))
    folder = _own_folder(Path(spec.stage))
    entry = folder / _entry_name(spec, _files(_existing(spec.model)))
    return _use(entry)


def stage(spec: ReplicaSpec, stopped: Event | None = None, share: Share | None = None) -> Staged:
    """The model, copied and checked where it was not. Takes as long as that does, or until `stopped`. `share`: with
    other replicas. Raises StageError."""
    stopped = stopped or Event()
    source = _existing(spec.model)
    files = _files(source)
    if spec.stage is None:
        with ThreadPoolExecutor(_THREADS) as pool:
            _check(spec, _digest(files, pool.map(lambda file: _sha256(file, stopped), files)))
        return Staged(source)
    folder = _own_folder(Path(spec.stage))
    entry = folder / _entry_name(spec, files)
    copied = taken = 0
    while (used := _use(entry, stopped)) is None:
        lock = _open_lock(entry)
        try:
            _lock(lock, fcntl.LOCK_EX, stopped)
            if not entry.exists() and _is_lock_of(lock, entry):
                taken = _copy(spec, files, entry, stopped, share)
                copied = sum(file.size for file in files)
        finally:
            os.close(lock)
    used.copied, used.taken = copied, taken
    used.by_ucx = share.ucx.taken if share is not None else 0
    return used


def pieces_of(staged: Staged) -> Pieces | None:
    """What other replicas can have of a staged model; None: nothing."""
    entry = staged.path.parent
    try:
        return Pieces(entry.name, staged.path, _files(staged.path), (entry / _PIECES).read_bytes())
    except (OSError, ValueError, StageError):  # copied by a version before, or damaged since
        return None


def _existing(model: str) -> Path:
    path = Path(model)
    if not path.exists():
        raise StageError(f"model {model}: not there, or not readable by uid {os.geteuid()}", remedy="correct `model`")
    return path


def _files(source: Path) -> list[ModelFile]:
    """All files of a model, sorted by the bytes of their names. Links to files are followed: caches consist of them."""
    if source.is_file():
        facts = source.stat()
        return [ModelFile("", source, facts.st_size, facts.st_mtime_ns)]
    found = []
    for folder, folders, names in os.walk(source):
        for name in folders:
            if (Path(folder) / name).is_symlink():
                raise StageError(f"model {Path(folder) / name}: a link to a folder", remedy="put the folder there")
        for name in names:
            path = Path(folder) / name
            facts = path.stat()
            if not stat.S_ISREG(facts.st_mode):
                raise StageError(f"model {path}: no plain file", remedy="take it out of the model's folder")
            found.append(ModelFile(str(path.relative_to(source)), path, facts.st_size, facts.st_mtime_ns))
            if len(found) > _MOST_FILES:
                raise StageError(f"model {source}: more than {_MOST_FILES} files", remedy="correct `model`")
    if not found:
        raise StageError(f"model {source}: an empty folder", remedy="correct `model`")
    return sorted(found, key=lambda file: os.fsencode(file.name))


def _entry_name(spec: ReplicaSpec, files: list[ModelFile]) -> str:
    """By the given hash, else by the files' names, sizes and times: a model that is replaced is staged again."""
    facts = [spec.sha256 or "", *(f"{file.name}\0{file.size}\0{file.changed}" for file in files)]
    digest = hashlib.sha256("\n".join([spec.model, *facts]).encode(errors="surrogateescape")).hexdigest()[:32]
    name = re.sub(r"[^A-Za-z0-9._-]", "_", Path(spec.model).name)[-64:].lstrip(".") or "model"
    return f"{name}.{digest}"


def _own_folder(stage_folder: Path) -> Path:
    """This user's folder in it. Others may be able to write there, too: nothing of theirs is used."""
    folder = stage_folder / f"sluice-{os.geteuid()}"
    try:
        around = stage_folder.stat()
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        facts = folder.lstat()
    except OSError as error:
        raise StageError(
            f"stage {error.filename}: {error.strerror}",
            remedy=f"make {stage_folder} on the node's disk, root's, mode 1777",
        ) from error
    if around.st_uid not in (0, os.geteuid()) or (around.st_mode & 0o022 and not around.st_mode & stat.S_ISVTX):
        raise StageError(
            f"stage {stage_folder}: others may rename what is in it", remedy="make it root's, with mode 1777 or 0755"
        )
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise StageError(f"stage {folder}: not a folder of uid {os.geteuid()} alone", remedy="remove it as root")
    return folder


def _open_lock(entry: Path) -> int:
    name = entry.with_name(f"{entry.name}.lock")
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _lock(lock: int, kind: int, stopped: Event) -> None:
    """Wait for it."""
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
            return
        _go_on(stopped, _LOOK_S)


def _go_on(stopped: Event, seconds: float = 0.0) -> None:
    if stopped.wait(seconds) if seconds else stopped.is_set():
        raise StageError("the model is not staged any more", remedy="see why the replica ends")


def _is_lock_of(lock: int, entry: Path) -> bool:
    """Whether the file is still there by its name: who removes a model removes its lock."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(lock), entry.with_name(f"{entry.name}.lock").lstat())
    return False


def _use(entry: Path, stopped: Event | None = None) -> Staged | None:
    """The entry with its shared lock, if it is there. `stopped`: the lock is waited for, until then."""
    if stopped is None and not entry.exists():
        return None
    lock = _open_lock(entry)
    try:
        if stopped is None:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        else:
            _lock(lock, fcntl.LOCK_SH, stopped)
        if entry.exists() and _is_lock_of(lock, entry):
            os.utime(lock)  # when it was used
            return Staged(entry / "model", lock)
    except BlockingIOError:
        pass
    except (OSError, StageError):
        os.close(lock)
        raise
    os.close(lock)
    return None


def _copy(spec: ReplicaSpec, files: list[ModelFile], entry: Path, stopped: Event, share: Share | None) -> int:
    """Copy it under another name, check it, rename it; how many bytes came from other replicas. Under its lock."""
    size = sum(file.size for file in files)
    part = entry.with_name(f"{_PART}{entry.name}")
    _remove(part)  # before there is room, as it takes some
    _make_room(entry, size)
    try:
        pieces = _copied(spec, files, part, entry, stopped, share)
        digest = _digest(files, pieces.file_digests()) if spec.sha256 else ""
        if share is not None and pieces.taken and digest != (spec.sha256 or "").lower():
            log("share-refused", model=spec.model, what="what other replicas gave has another SHA-256")
            share.withdraw()
            pieces = _copied(spec, files, part, entry, stopped, None)
            digest = _digest(files, pieces.file_digests())
        _check(spec, digest)
        if _files(Path(spec.model)) != files:
            raise StageError(f"model {spec.model}: it changed while it was copied", remedy="rename it when it is whole")
        pieces.sync()
        (part / _PIECES).write_bytes(pieces.digests)
        part.rename(entry)
        pieces.target = entry / "model"
        return pieces.taken
    except OSError as error:
        _remove(part)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_room(entry, size) from error
        raise StageError(f"{error.filename or part}: {error.strerror}", remedy="see the service's `stage`") from error
    except BaseException:
        _remove(part)
        raise


def _copied(
    spec: ReplicaSpec, files: list[ModelFile], part: Path, entry: Path, stopped: Event, share: Share | None
) -> Pieces:
    """A copy whose pieces are there and right, if those who gave them had the model. Raises OSError, StageError."""
    _remove(part)
    part.mkdir(mode=0o700)
    pieces = Pieces(entry.name, part / "model", files, hashed=bool(spec.sha256))
    pieces.make_files()
    if share is not None:
        share.offer(pieces)
        share.told.wait(_HEARD_S)
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            for done in [pool.submit(_fill, pieces, share, stopped) for _ in range(_THREADS)]:
                done.result()
    finally:
        if share is not None:
            share.close_links()
    return pieces


def _fill(pieces: Pieces, share: Share | None, stopped: Event) -> None:
    """Get pieces until all are there: from others that have them, else from the storage. By several threads."""
    alone = share is None
    try:
        while not pieces.whole and not pieces.given_up:
            _go_on(stopped)
            if share is not None and _take(pieces, share):
                alone = False
                continue
            alone = alone or pieces.idle_s() > _STALLED_S
            if alone or (share is not None and share.reads):
                number = pieces.claim()
                if number is not None:
                    data = pieces.read_source(number)
                    pieces.put(number, data, hashlib.sha256(data).digest())
                    continue
            _go_on(stopped, _WAIT_S)
    except BaseException:
        pieces.given_up = True
        raise


def _take(pieces: Pieces, share: Share) -> bool:
    """Get a piece from another replica; False: none has one that is missing."""
    for link in share.links():
        number = None
        try:
            link.look()
            number = pieces.claim(link.has)
            data, digest = link.get(number) if number is not None else (bytearray(), b"")
        except (OSError, ValueError) as error:
            if number is not None:
                pieces.give_back(number)
            share.failed(link, error)
            continue
        share.give_back(link)
        if number is not None:
            pieces.put(number, data, digest, taken=True)
            return True
    return False


def _sha256(file: ModelFile, stopped: Event) -> str:
    digest, piece = hashlib.sha256(), bytearray(min(_PIECE, max(file.size, 1)))
    with file.path.open("rb", buffering=0) as source, memoryview(piece) as view:
        while count := source.readinto(piece):
            _go_on(stopped)
            digest.update(view[:count])
    return digest.hexdigest()


def _digest(files: list[ModelFile], digests: Iterable[str]) -> str:
    """A model's hash from those of its files."""
    if not files[0].name:
        return next(iter(digests))
    lines = [f"{digest}  {file.name}\n" for digest, file in zip(digests, files, strict=True)]
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()


def _check(spec: ReplicaSpec, digest: str) -> None:
    if spec.sha256 and digest != spec.sha256.lower():
        raise StageError(
            f"model {spec.model}: its SHA-256 is {digest}, and not {spec.sha256}",
            remedy="restore the model, or correct `sha256`",
        )


def _make_room(entry: Path, size: int) -> None:
    """Remove models that nobody uses, the least recently used first, until this one has room."""
    for left in entry.parent.glob(f"{_PART}*"):
        _remove_unused(left.with_name(left.name.removeprefix(_PART)), left)
    for old in _oldest_first(entry):
        if _free(entry.parent) >= size:
            return
        _remove_unused(old, old)
    if _free(entry.parent) < size:
        raise _no_room(entry, size)


def _free(folder: Path) -> int:
    facts = os.statvfs(folder)
    return int(facts.f_bavail * facts.f_frsize - _SPARE * facts.f_blocks * facts.f_frsize)


def _no_room(entry: Path, size: int) -> StageError:
    free = max(0, _free(entry.parent))
    return StageError(
        f"stage {entry.parent}: the model needs {format_mib(-(-size >> 20))}, and {format_mib(free >> 20)} are free",
        remedy="free room there, or name a larger disk in the service's `stage`",
    )


def _oldest_first(but: Path) -> list[Path]:
    found = []
    for one in but.parent.iterdir():
        if _ENTRY.match(one.name) and one != but:
            with suppress(FileNotFoundError):
                found.append((one.with_name(f"{one.name}.lock").lstat().st_mtime, one))
    return [path for _, path in sorted(found)]


def _remove_unused(entry: Path, what: Path) -> None:
    """Remove the entry, or what a replica left of it that was killed while it copied."""
    lock = _open_lock(entry)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_lock_of(lock, entry):
            _remove(what)
            if not entry.exists():
                entry.with_name(f"{entry.name}.lock").unlink()
    except BlockingIOError:
        pass
    finally:
        os.close(lock)


def _remove(path: Path) -> None:
    """A folder of this user; what is in it is removed, not what links lead to."""
    with suppress(FileNotFoundError):
        shutil.rmtree(path)
