"""What was saved of jobs: a folder for each, encrypted with the job's key, complete or not there.

Below `folder`, root's alone: ``keys/job-JOB`` and ``keys/UID``, ``images/JOB-RESTARTS`` and ``work/JOB``, where CRIU
works, and where its files are, decrypted, while a job is resumed. A file is a sequence of pieces of AES-256-GCM, each
bound to its job, user, run, name and place in the file, so that none can be changed, left out, or put in another's
place. It is encrypted as it comes, while the piece before is written. What is not finished has another name, and is
removed.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import io
import json
import mmap
import os
import re
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, BinaryIO

from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic

_IMAGE = re.compile(r"(?P<job>\d{1,10})-(?P<restarts>\d{1,10})\Z")
_FACTS = "facts"  # the file that is written last; no name of CRIU's
_HALF = ".half-"
_WRITERS = 4  # files that are written at once
_NONCE, _TAG, _KEY = 12, 16, 32
_HEAD = 4 + _NONCE  # before each piece: its size, the tag included
_ON_DISK = 4 << 20  # a piece with all that belongs to it
_PIECE = _ON_DISK - _HEAD - _TAG
_LARGEST_PIECE = 4 << 20  # of earlier versions


@dataclass(frozen=True, slots=True)
class Run:
    """Whose state it is, of which run of the job."""

    job: int
    uid: int
    restarts: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.job}-{self.restarts}"


class Cipher:
    """AES-256-GCM with one key. Raises SluiceError where its library is missing."""

    def __init__(self, key: bytes) -> None:
        try:
            from cryptography.hazmat.primitives import ciphers
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise SluiceError(
                "states of jobs cannot be encrypted", remedy="install cryptography: pip install 'sluice[checkpoint]'"
            ) from None
        self._ciphers, self._key, self._aead = ciphers, key, AESGCM(key)

    def seal(self, nonce: bytes, plain: memoryview, place: bytes, target: memoryview) -> None:
        """What `AESGCM.encrypt` returns, into `target`, whose size is that of `plain` and of the tag: for large pieces
        that takes two thirds of the processor time."""
        at_work = self._ciphers.Cipher(
            self._ciphers.algorithms.AES(self._key), self._ciphers.modes.GCM(nonce)
        ).encryptor()
        at_work.authenticate_additional_data(place)
        at_work.update_into(plain, target)
        at_work.finalize()
        target[len(plain) :] = at_work.tag

    def open(self, nonce: bytes, sealed: bytes, place: bytes) -> bytes:
        """The reverse. Raises ValueError for what is not whole, or of another place or key."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._aead.decrypt(nonce, sealed, place)
        except InvalidTag:
            raise ValueError from None


class Keys:
    """A job's own key, which slurmctld made and its prolog brings to the nodes where it starts, and to no others. A job
    without one has a key of its user's, which never leaves the node, as do then its images."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, job: int, key: bytes) -> None:
        """Raises SluiceError, OSError."""
        if len(key) != _KEY:
            raise SluiceError(f"the key of job {job} has {len(key)} bytes, not {_KEY}")
        write_atomic(self._of_job(job), key, mode=0o600, follow_links=False)

    def has(self, job: int) -> bool:
        """Whether it has its own."""
        return self._of_job(job).exists()

    def prune(self, before: float, needed: Callable[[int], bool]) -> None:
        """Remove older ones of jobs that do not need them. Raises OSError."""
        for path in self.folder.glob("job-*"):
            if path.stat().st_mtime < before and not needed(int(path.name.removeprefix("job-"))):
                path.unlink(missing_ok=True)

    def cipher(self, run: Run) -> Cipher:
        """Raises SluiceError, OSError."""
        path = self._of_job(run.job)
        if not path.exists():
            path = self._of_user(run.uid)
        key = path.read_bytes()
        if len(key) != _KEY:
            raise SluiceError(f"{path}: not a key", remedy="remove it: what was saved with it is lost")
        return Cipher(key)

    def _of_job(self, job: int) -> Path:
        return self.folder / f"job-{job}"

    def _of_user(self, uid: int) -> Path:
        """It is made once."""
        path = self.folder / str(uid)
        if not path.exists():
            fresh = path.with_name(f".{uid}-{time.time_ns()}")
            with fresh.open("xb") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(os.urandom(_KEY))
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):
                path.hardlink_to(fresh)
            fresh.unlink()
        return path


class Images:
    """Used by one thread for each job. `keys`: where they are elsewhere; `node`: which of several writes here."""

    def __init__(self, folder: Path, keys: Keys | None = None, node: str = "") -> None:
        self.folder = folder
        self.keys = keys or Keys(folder / "keys")
        self._images = folder / "images"
        self._half = f"{_HALF}{node}=" if node else _HALF  # no character of a node's name

    def prepare(self) -> None:
        """Make the folders, and remove what an agent that was killed left unfinished. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        for folder in (self.keys.folder, self._images, self.folder / "work"):
            folder.mkdir(mode=0o700, exist_ok=True)
        self.sweep()

    def sweep(self) -> None:
        """Remove what this node left unfinished. Raises OSError."""
        self._images.mkdir(mode=0o700, exist_ok=True)
        for half in self._images.glob(f"{glob.escape(self._half)}*"):
            shutil.rmtree(half, ignore_errors=True)

    def work(self, job: int) -> Path:
        """Where CRIU's files of a job are."""
        return self.folder / "work" / str(job)

    def find(self, job: int) -> tuple[int, Path] | None:
        """Of which run a job's last image is, and where."""
        return max(((int(path.name.partition("-")[2]), path) for path in self._of(job)), default=None)

    def _of(self, job: int) -> list[Path]:
        """All of a job. Raises OSError; glob would find none in a folder that cannot be read."""
        paths = self._images.iterdir()
        return [path for path in paths if (match := _IMAGE.match(path.name)) and match["job"] == str(job)]

    def size(self, uid: int) -> int:
        """Bytes of all images of a user."""
        total = 0
        for image in self._images.iterdir():
            with suppress(OSError):  # it is just removed
                if image.stat().st_uid == uid:
                    total += sum(file.stat().st_size for file in image.iterdir())
        return total

    def size_of(self, run: Run) -> int:
        """Bytes of one image. Raises OSError."""
        return sum(file.stat().st_size for file in (self._images / run.name).iterdir())

    def drop(self, run: Run) -> None:
        """Remove what was begun of this run."""
        shutil.rmtree(self._images / f"{self._half}{run.name}", ignore_errors=True)

    @contextmanager
    def writing(self, run: Run) -> Iterator[Writer]:
        """A new image of this run: there when this ends after `Writer.end`; else nothing is left of it.

        Raises SluiceError, OSError.
        """
        half = self._begin(run)
        try:
            with ThreadPoolExecutor(_WRITERS) as disk:
                made = Writer(half, self.keys.cipher(run), run, disk)
                yield made
            if made.ended:
                self.complete(run)
        finally:
            shutil.rmtree(half, ignore_errors=True)

    def _begin(self, run: Run) -> Path:
        half = self._images / f"{self._half}{run.name}"
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir(mode=0o700)
        os.chown(half, run.uid, -1)  # whose it is, for `size`; the folder above is root's alone
        return half

    def complete(self, run: Run) -> None:
        """What was begun is an image from now on. Raises OSError."""
        half = self._images / f"{self._half}{run.name}"
        _sync(half)
        half.rename(self._images / run.name)
        _sync(self._images)

    def has(self, run: Run) -> bool:
        """Whether there is an image of it."""
        return (self._images / run.name).exists()

    def runs(self) -> list[Run]:
        """Of which there is an image."""
        found = []
        for image in self._images.iterdir():
            if match := _IMAGE.match(image.name):
                with suppress(FileNotFoundError):  # it is just removed
                    found.append(Run(int(match["job"]), image.stat().st_uid, int(match["restarts"])))
        return found

    def copy(self, run: Run, to: Images, paced: Callable[[int], None]) -> None:
        """Begin the same image there: all of it is on disk, and was read again and decrypted. `to.complete` ends it.

        `paced` gets the number of bytes that come next, and waits. Raises SluiceError, OSError; leaves nothing there.
        """
        half = to._begin(run)
        try:
            for path in sorted((self._images / run.name).iterdir()):
                with path.open("rb") as source, (half / path.name).open("xb") as file:
                    while piece := source.read(_LARGEST_PIECE):
                        paced(len(piece))
                        file.write(piece)
                    file.flush()
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            to._check(run, half, paced)
        except BaseException:
            shutil.rmtree(half, ignore_errors=True)
            raise

    def _check(self, run: Run, image: Path, paced: Callable[[int], None]) -> None:
        cipher = self.keys.cipher(run)
        for name in self._facts(run, image)["files"]:
            with (image / name).open("rb") as file:
                for piece in _decrypt(cipher, run, name, file):
                    paced(len(piece))

    def read(self, run: Run, target: Path) -> dict[str, Any]:
        """Decrypt the image of this run into the new folder `target`; the facts that were given to `Writer.end`.

        Raises SluiceError for one that is damaged, incomplete or of another job or user; OSError.
        """
        image = self._images / run.name
        cipher = self.keys.cipher(run)
        facts = self.facts(run)
        target.mkdir(mode=0o700)
        for name in facts["files"]:
            with (image / name).open("rb") as file, (target / name).open("xb") as plain:
                for piece in _decrypt(cipher, run, name, file):
                    plain.write(piece)
        return facts

    def facts(self, run: Run) -> dict[str, Any]:
        """Those that were given to `Writer.end`. Raises as `read`."""
        return self._facts(run, self._images / run.name)

    def _facts(self, run: Run, image: Path) -> dict[str, Any]:
        with (image / _FACTS).open("rb") as file:
            found: dict[str, Any] = json.loads(b"".join(_decrypt(self.keys.cipher(run), run, _FACTS, file)))
        return found

    def forget(self, job: int, restarts: int | None = None) -> None:
        """Remove all images of a job, or that of one run, each in one step. Raises OSError."""
        for image in self._of(job):
            if restarts is not None and image.name != f"{job}-{restarts}":
                continue
            gone = image.with_name(f"{self._half}{image.name}-{time.time_ns()}")
            with suppress(FileNotFoundError):  # another node was faster
                image.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def prune(self, before: float) -> None:
        """Remove images that are older. Raises OSError."""
        for image in self._images.iterdir():
            match = _IMAGE.match(image.name)
            if match and image.stat().st_mtime < before:
                self.forget(int(match["job"]))


class Writer:
    """Writes one image, file by file; several threads may add files."""

    def __init__(self, folder: Path, cipher: Cipher, run: Run, disk: Executor) -> None:
        self._folder, self._cipher, self._run, self._disk = folder, cipher, run, disk
        self._names: list[str] = []
        self.ended = False

    def add(self, name: str, plain: BinaryIO, most: int) -> None:
        """Encrypt a file while it is read, and write it meanwhile; it is on disk at the end. `most`: bytes of it.

        Raises SluiceError, OSError.
        """
        file = _open_new(self._folder / name)
        try:
            self._write(file, _pieces(plain, name, most), name)
            os.fsync(file)
        finally:
            os.close(file)
        self._names.append(name)

    def _write(self, file: int, pieces: Iterator[tuple[memoryview, bool]], name: str) -> None:
        buffers = cycle((mmap.mmap(-1, _ON_DISK), mmap.mmap(-1, _ON_DISK)))  # O_DIRECT wants whole pages
        begin, written = 0, self._disk.submit(int)
        try:
            for number, (piece, last) in enumerate(pieces):
                nonce, size = os.urandom(_NONCE), len(piece) + _TAG
                content = memoryview(next(buffers))[: _HEAD + size]
                content[:_HEAD] = struct.pack(">I", size) + nonce
                self._cipher.seal(nonce, piece, _place(self._run, name, number, last), content[_HEAD:])
                written.result()  # the piece before
                written = self._disk.submit(_write, file, begin, content)
                begin += len(content)
        finally:
            written.result()  # it uses the file

    def content(self, name: str) -> bytes:
        """Of a file that was added. Raises SluiceError, OSError."""
        with (self._folder / name).open("rb") as file:
            return b"".join(_decrypt(self._cipher, self._run, name, file))

    def end(self, facts: dict[str, Any]) -> None:
        """There are no more; `facts` come last, with their names. Raises SluiceError, OSError."""
        content = json.dumps({**facts, "files": sorted(self._names)}).encode()
        self.add(_FACTS, io.BytesIO(content), len(content))
        self.ended = True


def _place(run: Run, name: str, number: int, last: bool) -> bytes:
    """What a piece is bound to."""
    return f"{run.job} {run.uid} {run.restarts} {name} {number} {int(last)}".encode()


def _open_new(path: Path) -> int:
    """A file that is written around the kernel's cache, where its file system can: that takes a tenth of the processor
    time, leaves the memory to jobs, and has nothing left to do when it is synced. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    path.unlink(missing_ok=True)  # some make it before they refuse
    return os.open(path, flags, 0o600)


def _write(file: int, begin: int, content: memoryview) -> int:
    """Bytes. Raises OSError."""
    if len(content) < _ON_DISK:  # the last piece has not whole blocks
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)
    done = 0
    while done < len(content):
        done += os.pwrite(file, content[done:], begin + done)
    return done


def _pieces(plain: BinaryIO, name: str, most: int) -> Iterator[tuple[memoryview, bool]]:
    """Each, and whether it is the last one; one is valid until the next. Raises SluiceError, OSError."""
    this, following = mmap.mmap(-1, _PIECE), mmap.mmap(-1, _PIECE)  # a small file takes no more memory than it has
    total = size = plain.readinto(this)  # type: ignore[attr-defined]  # all that are read have it
    while True:
        more = plain.readinto(following)  # type: ignore[attr-defined]
        if (total := total + more) > most:
            raise SluiceError(f"{name} of it has more than {most >> 20} MiB, the limit")
        yield memoryview(this)[:size], not more
        if not more:
            return
        this, following, size = following, this, more


def _decrypt(cipher: Cipher, run: Run, name: str, file: BinaryIO) -> Iterator[bytes]:
    number, head = 0, file.read(_HEAD)
    while True:
        size = int.from_bytes(head[:4], "big")
        sealed = file.read(size) if len(head) == _HEAD and _TAG <= size <= _LARGEST_PIECE + _TAG else b""
        following = file.read(_HEAD)
        sealed = sealed if len(sealed) == size else b""
        try:
            yield cipher.open(head[4:], sealed, _place(run, name, number, not following))
        except ValueError:
            raise SluiceError(f"what was saved of job {run.job} is damaged: {name}") from None
        if not following:
            return
        number, head = number + 1, following


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
