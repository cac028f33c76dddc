"""What CRIU writes is taken while it writes: whole, or CRIU fails with it and lets the job go on."""

from __future__ import annotations

import fcntl
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import pytest

from prolog_epilog.checkpoint import stream
from prolog_epilog.checkpoint.criu import BrokenOffError, Criu
from prolog_epilog.checkpoint.images import Images, Run
from prolog_epilog.checkpoint.stream import taken
from sluice.base.errors import SluiceError
from tests.unit.prolog_epilog.saved_images import fake_criu

RUN = Run(7, 2001, 0)
WRITES = 'head -c 3000000 /dev/zero >"$2/pages-1.img"; printf magicmag >"$2/files.img"; '


class Streamer:
    """CRIU's side, file by file."""

    def __init__(self, folder: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        above = os.open(folder, os.O_PATH)
        self.socket.connect(f"/proc/self/fd/{above}/{stream.SOCKET}")
        os.close(above)

    def open(self, name: str) -> BinaryIO:
        size, length = len(name), []
        while size >= 128:
            length.append(size & 127 | 128)
            size >>= 7
        message = bytes([10, *length, size]) + name.encode()
        self.socket.sendall(len(message).to_bytes(4, "little") + message)
        end, pipe = os.pipe()
        socket.send_fds(self.socket, [b"x"], [end])
        os.close(end)
        return os.fdopen(pipe, "wb", buffering=0)


@pytest.fixture
def images(tmp_path: Path) -> Images:
    made = Images(tmp_path / "checkpoints")
    made.prepare()
    return made


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    made = subprocess.Popen(["sleep", "600"])
    yield made
    made.kill()
    made.wait()


def write_slowly(file: BinaryIO, content: bytes, chance: random.Random) -> None:
    while content:
        size = chance.randint(1, 400_000)
        file.write(content[:size])
        content = content[size:]
    file.close()


def test_many_files_that_are_open_at_once_are_taken_whole(images: Images, tmp_path: Path) -> None:
    """Each at its own pace, more than are waited for at once, with names of all lengths."""
    chance = random.Random(1)
    files = {f"core-{number}.img": chance.randbytes(chance.choice((0, 1, 5000))) for number in range(300)}
    files |= {f"pages-{number}.img": chance.randbytes(number << 20 | number) for number in range(1, 4)}
    files["n" * 200] = b"long"
    with images.writing(RUN) as image:
        with taken(tmp_path, lambda name, plain: image.add(name, plain, 1 << 40), 60) as found:
            criu = Streamer(tmp_path)
            writers = []
            for name, content in files.items():
                pipe = criu.open(name)
                if len(content) > 1 << 16:
                    writers.append(threading.Thread(target=write_slowly, args=(pipe, content, chance)))
                    writers[-1].start()
                else:
                    with pipe:
                        pipe.write(content)
            for writer in writers:
                writer.join()
            criu.socket.close()
        assert found.error is None
        image.end({"x": 1})
    assert images.read(RUN, tmp_path / "out") == {"x": 1, "files": sorted(files)}
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == files
    assert not (tmp_path / stream.SOCKET).exists()


def test_whoever_does_not_take_a_file_breaks_its_pipe(tmp_path: Path) -> None:
    def take(name: str, plain: BinaryIO) -> None:
        if name == "bad":
            plain.read(10)
            raise SluiceError("not this one")
        plain.read()

    with taken(tmp_path, take, 60) as found:
        criu = Streamer(tmp_path)
        with criu.open("good") as good, criu.open("bad") as bad:
            good.write(b"x")
            with pytest.raises(BrokenPipeError):
                for _ in range(1000):
                    bad.write(bytes(1000))
            good.write(b"x")
        criu.socket.close()
    assert str(found.error) == "not this one"


@pytest.mark.parametrize(
    "said",
    [b"\x02\0\0\0\x12\0", b"\x03\0\0\0\x0a\x05x", b"\xff\xff\xff\x7f", b"\x03\0\0\0\x0a\x01x"],
)
def test_what_is_no_file_is_an_error_and_not_waited_for(tmp_path: Path, said: bytes) -> None:
    """The last one is a file without a pipe."""
    with taken(tmp_path, lambda name, plain: None, 60) as found:
        criu = Streamer(tmp_path)
        criu.socket.sendall(said)
        criu.socket.close()
    assert isinstance(found.error, SluiceError)


def test_a_criu_that_never_connects_is_not_waited_for(tmp_path: Path) -> None:
    began = time.monotonic()
    with taken(tmp_path, lambda name, plain: None, 60) as found:
        pass
    assert found.error is None and time.monotonic() - began < 30


@pytest.mark.parametrize("held", ["pipe", "connection"])
def test_what_another_holds_open_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    """More files may come by the connection: what was taken is not all."""
    monkeypatch.setattr(stream, "_ENDS_S", 0.2)
    with taken(tmp_path, lambda name, plain: plain.read() and None, 1) as found:
        criu = Streamer(tmp_path)
        pipe = criu.open("pages-1.img")
        (criu.socket if held == "pipe" else pipe).close()
    pipe.close()
    criu.socket.close()
    # On a machine that takes a second to begin, it had not even begun to read.
    assert re.search("does not come to its end|not saved in time", str(found.error))


def test_a_disk_may_take_all_of_the_time_when_criu_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a large file was written through the kernel's cache, and is synced."""
    monkeypatch.setattr(stream, "_ENDS_S", 0.2)

    def take(name: str, plain: BinaryIO) -> None:
        plain.read()
        time.sleep(1)

    with taken(tmp_path, take, 60) as found:
        criu = Streamer(tmp_path)
        criu.open("pages-1.img").close()
        criu.socket.close()
    assert found.error is None


def test_a_file_for_which_there_is_no_thread_breaks_its_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CRIU fails at once; it would wait for its reader until it is killed, and the job with it."""

    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with taken(tmp_path, lambda name, plain: None, 60) as found:
        criu = Streamer(tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fails)
            pipe = criu.open("pages-1.img")
            with pytest.raises(BrokenPipeError):
                until(lambda: pipe.write(b"x") is None)
        pipe.close()
        criu.socket.close()
    assert "can't start" in str(found.error)


def test_a_small_file_takes_little_memory(images: Images, tmp_path: Path) -> None:
    """A job of many processes has many, each of which waits for the disk."""
    before = resident()
    with images.writing(RUN) as image:
        with taken(tmp_path, lambda name, plain: image.add(name, plain, 1 << 40), 60) as found:
            criu = Streamer(tmp_path)
            pipes = [criu.open(f"core-{number}.img") for number in range(60)]
            for pipe in pipes:
                pipe.write(b"x")
            until(lambda: not any(unread(pipe) for pipe in pipes))
            size = resident() - before
            for pipe in pipes:
                pipe.close()
            criu.socket.close()
        assert found.error is None and size < 100 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def unread(pipe: BinaryIO) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def dump(images: Images, program: Path, pid: int, seconds: float = 60, take_s: float = 0) -> None:
    work = images.work(7)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    with images.writing(RUN) as image:

        def take(name: str, plain: BinaryIO) -> None:
            time.sleep(take_s)
            image.add(name, plain, 1 << 40)

        Criu(program).save(pid, work, seconds, 2, take)
        image.end({})


@pytest.mark.parametrize(
    ("act", "then", "error", "why"),
    [
        (WRITES, "", None, ""),
        (WRITES, "exit 7", SluiceError, "ended with 7"),
        (WRITES, "kill -9 $$", BrokenOffError, "killed by signal 9"),
        (WRITES + "kill -9 $$", "", BrokenOffError, "killed by signal 9"),
        (WRITES, 'touch "$2/left.img"', SluiceError, "CRIU keeps left.img"),
    ],
)
def test_what_was_taken_counts_when_criu_has_ended_without_an_error(
    images: Images, tmp_path: Path, process: subprocess.Popen[bytes], act: str, then: str,
    error: type[SluiceError] | None, why: str,
) -> None:  # fmt: skip
    program = fake_criu(tmp_path / "criu", act, then)
    if error is None:
        dump(images, program, process.pid)
        assert images.facts(RUN)["files"] == ["files.img", "pages-1.img"]
        return
    with pytest.raises(error, match=why):
        dump(images, program, process.pid)
    assert not list((images.folder / "images").iterdir())


def test_a_disk_that_is_too_slow_does_not_cost_the_job_its_run(
    images: Images, tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    """CRIU is not killed: its files are not taken any more, and it lets the job go on."""
    with pytest.raises(SluiceError, match="not saved in time") as raised:
        dump(images, fake_criu(tmp_path / "criu", WRITES), process.pid, seconds=2, take_s=2.5)
    assert not isinstance(raised.value, BrokenOffError) and not list((images.folder / "images").iterdir())


@pytest.mark.parametrize("victim", ["agent", "CRIU"])
def test_nothing_is_left_of_what_was_killed_at_any_moment(
    images: Images, tmp_path: Path, victim: str, process: subprocess.Popen[bytes]
) -> None:
    """An agent takes, encrypts and writes in one process. The next one removes what is not complete."""
    chance = random.Random(2)
    program = fake_criu(tmp_path / "criu", f"echo $$ >{tmp_path}/pid; " + WRITES * 2, "sleep 0.2")
    for _ in range(20 if os.environ.get("SLUICE_TEST_SCALE") == "full" else 4):
        (tmp_path / "pid").unlink(missing_ok=True)
        agent = os.fork()
        if agent == 0:
            try:
                dump(images, program, process.pid)
            finally:
                os._exit(0)
        until((tmp_path / "pid").exists)
        until(lambda: (tmp_path / "pid").read_text().endswith("\n"))
        criu = int((tmp_path / "pid").read_text())
        time.sleep(chance.uniform(0, 0.3))
        with suppress(ProcessLookupError):
            os.kill(agent if victim == "agent" else criu, signal.SIGKILL)
        os.waitpid(agent, 0)
        until(lambda pid=criu: not Path(f"/proc/{pid}").exists())  # type: ignore[misc]  # it does not outlive its pipe
        images.prepare()
        if images.has(RUN):
            assert images.read(RUN, tmp_path / "out")["files"] == ["files.img", "pages-1.img"]
            images.forget(7)
        assert not list((images.folder / "images").iterdir())


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)
