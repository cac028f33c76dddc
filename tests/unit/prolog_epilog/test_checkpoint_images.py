"""What is saved of jobs that run: whose it is, that it is whole, and what may be open when it is resumed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from policy.checkpoint import Checkpoint, NodeSystem, compile_checkpoint
from prolog_epilog.checkpoint import contents, opened
from prolog_epilog.checkpoint import images as images_module
from prolog_epilog.checkpoint.criu import Criu
from prolog_epilog.checkpoint.images import Images, Run
from prolog_epilog.checkpoint.saver import Saver
from prolog_epilog.server import Peer
from sluice.base.errors import SluiceError
from tests.unit.prolog_epilog.saved_images import fake_criu, write_image

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="images of several users need root")

ALICE, BOB = 2001, 2002
SECRET = os.urandom(1 << 10)
ROOT = Peer(1, 0)


@pytest.fixture
def images(tmp_path: Path) -> Images:
    made = Images(tmp_path / "checkpoints")
    made.prepare()
    return made


def saved(images: Images, run: Run, pages: bytes = SECRET) -> Path:
    write_image(images, run, {"opened": [[1, 2, 3]]}, pages=pages, empty=b"")
    found = images.find(run.job)
    assert found is not None and found[0] == run.restarts
    return found[1]


@pytest.mark.parametrize("size", [0, 1, 4 << 20, (4 << 20) + 1, 9 << 20])
def test_what_was_saved_is_read_again_and_is_not_on_disk(images: Images, tmp_path: Path, size: int) -> None:
    run = Run(7, ALICE, 0)
    pages = os.urandom(size)
    folder = saved(images, run, pages)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE(images.folder.stat().st_mode) == 0o700
    assert size < 16 or pages[:16] not in (folder / "pages").read_bytes()
    facts = images.read(run, tmp_path / "out")
    assert facts["opened"] == [[1, 2, 3]]
    assert (tmp_path / "out/pages").read_bytes() == pages and (tmp_path / "out/empty").read_bytes() == b""


def test_another_tenants_image_is_none(images: Images, tmp_path: Path) -> None:
    """Neither with the other's key, nor under the other's name or as another run of the same job."""
    folder = saved(images, Run(7, ALICE, 0))
    saved(images, Run(8, BOB, 0))
    for other in (Run(7, BOB, 0), Run(9, ALICE, 0), Run(7, ALICE, 1)):
        if other.name != folder.name:
            shutil.copytree(folder, folder.with_name(other.name))
        with pytest.raises(SluiceError, match="damaged"):
            images.read(other, tmp_path / f"out-{other.name}-{other.uid}")
    keys = [key.read_bytes() for key in (images.folder / "keys").iterdir()]
    assert len({*keys}) == 2
    assert all(stat.S_IMODE(key.stat().st_mode) == 0o600 for key in (images.folder / "keys").iterdir())


def test_no_byte_can_be_changed_and_nothing_left_out(images: Images, tmp_path: Path) -> None:
    run = Run(7, ALICE, 0)
    folder = saved(images, run, os.urandom(2 * images_module._PIECE + 10))
    piece = images_module._PIECE + 32

    def refused(name: str, content: bytes) -> None:
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        with pytest.raises(SluiceError, match="damaged"):
            images.read(run, tmp_path / "out")
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        (folder / name).write_bytes(before)

    for name in ("pages", "facts", "empty"):
        whole = (folder / name).read_bytes()
        for at in (0, 3, 4, 15, 20, len(whole) // 2, len(whole) - 1):
            refused(name, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        refused(name, whole[:-1])
        refused(name, b"")
        refused(name, whole + whole)
    whole = (folder / "pages").read_bytes()
    refused("pages", whole[: 2 * piece])  # without its last piece
    refused("pages", whole[piece : 2 * piece] + whole[:piece] + whole[2 * piece :])
    (folder / "pages").unlink()
    with pytest.raises(FileNotFoundError):
        images.read(run, tmp_path / "out")


def test_what_is_not_finished_is_not_found(images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, at every call that syncs; and an agent that is killed, whose leftovers the next one removes."""
    run, count = Run(7, ALICE, 0), 0
    real = os.fsync
    while True:
        left = [count]

        def full(file: int, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(28, "No space left on device")
            real(file)

        monkeypatch.setattr(os, "fsync", full)
        try:
            write_image(images, run, a=b"1", b=b"2")
            break
        except OSError:
            found = images.find(7)
            # The last sync is of the folder above: the image is whole by then.
            assert found is None or images.facts(run)["files"] == ["a", "b"]
            images.forget(7)
        finally:
            monkeypatch.undo()
        count += 1
    assert count >= 5
    images.forget(7)
    (images.folder / "images/.half-7-0").mkdir()
    images.prepare()
    assert images.find(7) is None and list((images.folder / "images").iterdir()) == []


def test_images_are_kept_for_a_while(images: Images, tmp_path: Path) -> None:
    old, fresh = saved(images, Run(7, ALICE, 0)), saved(images, Run(8, ALICE, 2))
    os.utime(old, (1, 1))
    images.prune(time.time() - 60)
    assert images.find(7) is None and images.find(8) == (2, fresh)
    assert images.size(ALICE) > len(SECRET) and images.size(BOB) == 0


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A process of Alice's that has a file of root's open, which she may read, and one of her own."""
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.write_text("x")
    own.write_text("x")
    os.chown(own, ALICE, -1)
    with shared.open() as first, own.open() as second:
        files = (first.fileno(), second.fileno())
        process = subprocess.Popen(["sleep", "60"], user=ALICE, pass_fds=files)
    yield process, shared
    process.kill()
    process.wait()


def test_a_resumed_job_has_nothing_that_it_did_not_have(job: tuple[subprocess.Popen[bytes], Path]) -> None:
    process, shared = job
    asleep(process)
    known = opened.look(process.pid, ALICE)
    assert opened.stranger(process.pid, ALICE, known, Path("/dev/null"), time.time_ns()) is None
    state = shared.stat()
    was = (state.st_dev, state.st_ino, state.st_ctime_ns, stat.S_IRUSR)
    assert was in known
    # In its place is another file of root's, as if the name had led there; or the same number, given to a new file; or
    # the job had it open to read it alone, and a file of its own, to write, whose name then led there.
    for other in ((0, 0, 0, 0), (*was[:2], 5, was[3]), (*was[:3], stat.S_IRUSR | stat.S_IWUSR)):
        assert opened.stranger(process.pid, ALICE, (known - {was}) | {other}, Path("/dev/null"), time.time_ns()) == str(
            shared
        )


def asleep(process: subprocess.Popen[bytes]) -> None:
    """Wait until it has loaded all that it will."""
    deadline = time.monotonic() + 10
    while Path(f"/proc/{process.pid}/stat").read_text().split()[2] != "S":
        assert time.monotonic() < deadline


def test_memory_that_is_older_than_the_resumed_job_is_a_strangers() -> None:
    """A name can lead to the memory of another process, through /proc."""
    memory = os.memfd_create("root's")
    process = subprocess.Popen(["sleep", "60"], user=ALICE, pass_fds=(memory,))
    asleep(process)
    try:
        known = {one for one in opened.look(process.pid, ALICE) if one[1] != os.fstat(memory).st_ino}
        made = os.fstat(memory).st_ctime_ns
        assert opened.stranger(process.pid, ALICE, known, Path("/dev/null"), made) is None
        assert "root's" in str(opened.stranger(process.pid, ALICE, known, Path("/dev/null"), made + 1))
    finally:
        os.close(memory)
        process.kill()
        process.wait()


def test_what_the_kernel_shows_as_files_is_not_resumed() -> None:
    """Root would have opened it: what may be written there depends on that."""
    with Path("/proc/self/status").open() as file:
        process = subprocess.Popen(["sleep", "60"], user=ALICE, pass_fds=(file.fileno(),))
    try:
        with pytest.raises(SluiceError, match="which is the kernel's"):
            opened.look(process.pid, ALICE)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("user", [ALICE, BOB, 0])
def test_a_job_has_its_users_rights_alone(user: int) -> None:
    start = f"import os, time; os.fork() or (os.setgroups([7]), os.setgid(5), os.setuid({user})); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", start])
    try:
        deadline = time.monotonic() + 10
        while "Groups:\t7" not in "".join(
            Path(f"/proc/{pid}/status").read_text() for pid in opened.processes(process.pid)[1:]
        ):
            assert time.monotonic() < deadline
        time.sleep(0.5)
        if user == ALICE:
            [rights] = opened.rights(process.pid, ALICE)
            assert "Gid:5 5 5 5 Groups:7" in rights
        else:
            with pytest.raises(SluiceError, match="rights that are not its user's"):
                opened.rights(process.pid, ALICE)
    finally:
        for pid in reversed(opened.processes(process.pid)):
            os.kill(pid, 9)
        process.wait()


def test_what_has_ended_has_no_rights() -> None:
    """CRIU makes what had ended, and was not waited for, as root, and it ends as root."""
    start = f"import os, time; os.fork() or (os.fork() or os._exit(0), os.setuid({ALICE})); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", start])
    try:
        deadline = time.monotonic() + 60
        while not (found := states(process.pid)) >= {("Z", 0), ("S", ALICE)}:
            assert time.monotonic() < deadline, found
        assert len(opened.rights(process.pid, ALICE)) == 1
    finally:
        for pid in reversed(opened.processes(process.pid)):
            os.kill(pid, 9)
        process.wait()


def states(init: int) -> set[tuple[str, int]]:
    """And users, of the processes below it."""
    texts = [Path(f"/proc/{pid}/status").read_text() for pid in opened.processes(init)[1:]]
    found = [dict(line.split(":", 1) for line in text.splitlines()) for text in texts]
    return {(values["State"].split()[0], int(values["Uid"].split()[0])) for values in found}


def entry(kind: int, socket_name: bytes = b"") -> bytes:
    """A file, as CRIU writes it."""
    socket = bytes([8, 31, 11 << 3 | 2, len(socket_name)]) + socket_name
    message = bytes([8, kind, 16, 31, 16 << 3 & 127 | 128 | 2, 1, len(socket)]) + socket
    return len(message).to_bytes(4, "little") + message


@pytest.mark.parametrize(
    ("files", "others", "why"),
    [
        (entry(1) + entry(2) + entry(5) + entry(5, b"\0name"), ("pages-1.img", "core-7.img"), None),
        (entry(5, b"/tmp/socket\0"), (), "a socket with a name"),
        (entry(3), (), "of a kind"),
        (entry(8), (), "of a kind"),
        (entry(1)[:-1], (), "not understood"),
        (entry(1), ("ghost-file-1.img",), "a deleted file"),
        (entry(1), ("remap-fpath.img",), "a deleted file"),
        (entry(1), ("sk-queues.img",), "on its way in a socket"),
        (entry(1), ("fifo-data.img",), "fifo-data.img"),
        (entry(1), ("netns-9.img",), "netns-9.img"),
    ],
)
def test_nothing_is_kept_for_which_root_would_change_a_folder(
    files: bytes, others: tuple[str, ...], why: str | None
) -> None:
    def check() -> None:
        for name in ("files.img", *others):
            contents.check_name(name)
        contents.check_files(b"magicmag" + files)

    if why is None:
        check()
        return
    with pytest.raises(SluiceError, match=why):
        check()


def test_devices_of_memory_are_not_harmless() -> None:
    states = {name: Path(f"/dev/{name}").stat() for name in ("null", "zero", "mem") if Path(f"/dev/{name}").exists()}
    assert [name for name, state in states.items() if opened._is_harmless(state)] == ["null", "zero"]


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('case $1 in --version) echo "Version: 4.2.1";; esac', ""),
        ('case $1 in --version) echo "Version: 3.17";; esac', "4.2 or later is needed"),
        ("echo hello", "4.2 or later is needed"),
        ('case $1 in --version) echo "Version: 4.2";; check) echo no kernel >&2; exit 1;; esac', "no kernel"),
    ],
)
def test_whether_criu_can_save_is_known(tmp_path: Path, text: str, problem: str) -> None:
    found = Criu(script(tmp_path / "criu", text)).problem()
    assert problem in found and bool(found) == bool(problem)


def test_a_site_without_criu_says_so(tmp_path: Path) -> None:
    assert "No such file" in Criu(tmp_path / "criu").problem()


def saver_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str, **policy: Any) -> tuple[Saver, list[Any]]:
    """With a CRIU that does `act` for a dump; and what it orders."""
    criu = fake_criu(tmp_path / "criu", act)
    ordered: list[Any] = []
    system = NodeSystem(criu=str(criu), **policy)
    saver = Saver(tmp_path / "checkpoints", lambda: system, tmp_path / "ready", lambda *run: ordered.append(run))
    saver.images.prepare()
    saver.images.work(7).mkdir()
    for name in ("log", "files.img"):
        (saver.images.work(7) / name).touch()
    monkeypatch.setattr("prolog_epilog.checkpoint.criu.mount_own_proc", lambda init: None)  # it is in the node's
    monkeypatch.setattr("prolog_epilog.checkpoint.criu.is_restoring", lambda init: True)  # no CRIU has made it
    monkeypatch.setattr(saver, "_cannot_return", lambda run: "")
    return saver, ordered


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    script = "import time; print(flush=True); time.sleep(600)"
    made = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert made.stdout is not None and made.stdout.readline()
    yield made
    made.kill()
    made.wait()


def save(saver: Saver, process: subprocess.Popen[bytes]) -> None:
    saver.save(peer=ROOT, job=7, uid=ALICE, restarts=0, init=process.pid)


def test_a_saved_job_is_requeued_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]
) -> None:
    saver, ordered = saver_of(tmp_path, monkeypatch, 'echo state >"$2/pages-1.img"; printf magicmag >"$2/files.img"')
    save(saver, process)
    assert ordered == [(7, 0)] and process.wait(10) == -9
    assert saver.images.find(7) is not None
    answer = saver.resume(peer=ROOT, job=7, uid=ALICE, restarts=1)
    assert (saver.images.work(7) / "pages-1.img").read_text() == "state\n" and "restore" in answer["words"]
    assert saver.resume(peer=ROOT, job=7, uid=ALICE, restarts=0) == {"words": []}  # of this run itself
    with pytest.raises(SluiceError):
        saver.resume(peer=ROOT, job=7, uid=BOB, restarts=1)
    assert saver.images.find(7) is None  # what could not be resumed is not tried again


def test_an_agent_that_was_killed_after_the_save_does_not_save_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]
) -> None:
    saver, ordered = saver_of(tmp_path, monkeypatch, "exit 1")
    write_image(saver.images, Run(7, ALICE, 0), {"opened": []}, pages=b"state")
    process.send_signal(signal.SIGSTOP)  # as CRIU left it
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0] != "T":
        time.sleep(0.01)
    save(saver, process)
    assert ordered == [(7, 0)] and process.wait(10) == -9


def test_what_was_saved_of_a_job_that_has_run_since_is_not_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]
) -> None:
    """Its launcher let it go on, as no agent answered: the image is an earlier one, and would repeat its work."""
    saver, ordered = saver_of(tmp_path, monkeypatch, "exit 1")
    write_image(saver.images, Run(7, ALICE, 0), {"opened": []}, pages=b"state")
    with pytest.raises(SluiceError, match="ended with 1"):
        save(saver, process)
    assert ordered == [] and process.poll() is None and saver.images.find(7) is None


def test_an_image_whose_job_was_not_requeued_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]
) -> None:
    saver, _ = saver_of(tmp_path, monkeypatch, 'printf magicmag >"$2/files.img"')

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(saver, "_requeue", full)
    with pytest.raises(OSError, match="no space"):
        save(saver, process)
    assert process.poll() is None and saver.images.find(7) is None


@pytest.mark.parametrize(
    ("act", "policy", "why"),
    [
        (
            'echo "(00.1) Error (criu/sk-inet.c:1): inet: Connected TCP socket" >"$2/log"; exit 1',
            {},
            "a TCP connection",
        ),
        ("exit 3", {}, "ended with 3"),
        ("head -c 2000000 /dev/zero >$2/pages-1.img", {"most_bytes": 1 << 20}, "over the limit"),
        ("echo x >$2/pages-1.img", {"quota_bytes": 1}, "over the quota"),
    ],
)
def test_a_job_that_cannot_be_saved_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    process: subprocess.Popen[bytes],
    act: str,
    policy: dict[str, Any],
    why: str,
) -> None:
    saver, ordered = saver_of(tmp_path, monkeypatch, act, **policy)
    told: list[str] = []
    saver.told = lambda job, words: told.append(words)
    with pytest.raises(SluiceError, match=why):
        save(saver, process)
    assert process.poll() is None and ordered == [] and why in told[0]
    assert saver.images.find(7) is None and not saver.images.work(7).exists()


@pytest.mark.parametrize(("act", "policy"), [("kill -9 $$", {}), ("exec sleep 60", {"time_s": 1})])
def test_what_criu_may_have_damaged_begins_anew(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    process: subprocess.Popen[bytes],
    act: str,
    policy: dict[str, Any],
) -> None:
    saver, ordered = saver_of(tmp_path, monkeypatch, act, **policy)
    monkeypatch.setattr("prolog_epilog.checkpoint.criu._LETS_GO_S", 0.5)
    save(saver, process)
    assert ordered == [(7, 0)] and process.wait(10) == -9 and saver.images.find(7) is None


def test_nothing_is_resumed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]
) -> None:
    """The same request again is of an agent that was killed before it answered: the job runs on."""
    saver, _ = saver_of(tmp_path, monkeypatch, "exit 1")
    known = [list(one) for one in opened.look(process.pid, ALICE)]
    write_image(saver.images, Run(7, ALICE, 0), {"opened": known, "rights": []}, pages=b"state")
    for rights in (False, False, True, True):
        saver.restored(peer=ROOT, job=7, uid=ALICE, restarts=1, init=process.pid, rights=rights)
        assert saver.images.find(7) is None
    for _ in range(2):
        saver.resumed(peer=ROOT, job=7, uid=ALICE, restarts=1, init=process.pid)
    assert process.poll() is None
    other = subprocess.Popen(["sleep", "60"])
    with pytest.raises(SluiceError, match="nothing to resume"):
        saver.restored(peer=ROOT, job=7, uid=ALICE, restarts=1, init=other.pid, rights=False)
    assert other.wait(10) == -9


def resume(saver: Saver) -> dict[str, Any]:
    return saver.resume(peer=ROOT, job=7, uid=ALICE, restarts=1)


def not_started(saver: Saver) -> dict[str, Any]:
    """What the helper says where CRIU was killed."""
    return saver.resumed(peer=ROOT, job=7, uid=ALICE, restarts=1, init=0)


def resumable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pid: int) -> Saver:
    saver, _ = saver_of(tmp_path, monkeypatch, "exit 1")
    facts = {"opened": [list(one) for one in opened.look(pid, ALICE)], "rights": []}
    write_image(saver.images, Run(7, ALICE, 0), facts, **{"files.img": b"state"})
    return saver


def test_where_criu_was_killed_before_any_of_it_ran_it_is_tried_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]
) -> None:
    saver = resumable(tmp_path, monkeypatch, process.pid)
    told: list[str] = []
    saver.told = lambda job, words: told.append(words)
    assert resume(saver)["words"] and not_started(saver) == {"again": True}
    assert "tried again" in told[0] and not saver.images.work(7).exists()
    # The next agent counts on.
    again = Saver(saver.images.folder, saver._policy_now, tmp_path / "ready", lambda *_: None)
    assert resume(again)["words"]
    with pytest.raises(SluiceError, match="no reason"):
        not_started(again)
    assert again.images.find(7) is None and resume(again) == {"words": []}


@pytest.mark.parametrize("asked", [not_started, resume], ids=["CRIU was killed", "its helper was killed"])
@pytest.mark.parametrize("moment", ["noted", "forgotten", "forgotten here alone"])
def test_where_some_of_it_may_have_run_it_is_not_tried_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    process: subprocess.Popen[bytes],
    moment: str,
    asked: Callable[[Saver], Any],
) -> None:
    """An agent that is killed as it answers CRIU, and one that cannot reach all places where the image is."""
    saver = resumable(tmp_path, monkeypatch, process.pid)
    resume(saver)
    (saver.images.work(7) / "log").touch()
    with monkeypatch.context() as patch:
        if moment == "noted":
            patch.setattr(saver, "_forget", lambda job: (_ for _ in ()).throw(KeyboardInterrupt))
            patch.setattr(saver, "_give_up", lambda job, why: None)
        if moment == "forgotten here alone":
            patch.setattr(saver, "_forget", lambda job: None)
        with suppress(KeyboardInterrupt):
            saver.restored(peer=ROOT, job=7, uid=ALICE, restarts=1, init=process.pid, rights=False)
    assert (saver.images.find(7) is None) == (moment == "forgotten")
    with pytest.raises(SluiceError):
        asked(saver)
    assert saver.images.find(7) is None


def test_an_agent_that_is_killed_before_it_says_again_leaves_no_old_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]
) -> None:
    """Its helper asks again, and is refused: the job begins from its start, and a later run must not repeat that."""
    saver = resumable(tmp_path, monkeypatch, process.pid)
    assert resume(saver)["words"] and not_started(saver) == {"again": True}
    with pytest.raises(SluiceError, match="refused"):
        not_started(saver)
    assert saver.images.find(7) is None


def test_what_a_killed_criu_still_asks_costs_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]
) -> None:
    saver = resumable(tmp_path, monkeypatch, process.pid)
    monkeypatch.undo()
    with pytest.raises(SluiceError, match="CRIU has ended"):
        saver.restored(peer=ROOT, job=7, uid=ALICE, restarts=1, init=process.pid, rights=False)
    assert process.wait(10) == -9 and saver.images.find(7) is not None


@pytest.mark.parametrize("times", [1, 2])
def test_a_full_disk_is_tried_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes], times: int
) -> None:
    saver = resumable(tmp_path, monkeypatch, process.pid)
    real, left = Images.read, [times]

    def read(self: Images, run: Run, target: Path) -> dict[str, Any]:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOSPC, "no space")
        return real(self, run, target)

    monkeypatch.setattr(Images, "read", read)
    assert resume(saver) == {"again": True}
    if times == 1:
        assert resume(saver)["words"] and (saver.images.work(7) / "files.img").read_bytes() == b"state"
    else:
        with pytest.raises(OSError, match="no space"):
            resume(saver)
        assert saver.images.find(7) is None


@pytest.mark.parametrize("looked_at", [(), (False,), (True,)])
def test_what_was_not_looked_at_does_not_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    process: subprocess.Popen[bytes],
    looked_at: tuple[bool, ...],
) -> None:
    """CRIU goes on although what it asked has died, as it does before the last step."""
    saver, _ = saver_of(tmp_path, monkeypatch, "exit 1")
    known = [list(one) for one in opened.look(process.pid, ALICE)]
    write_image(saver.images, Run(7, ALICE, 0), {"opened": known, "rights": []}, pages=b"state")
    request: dict[str, Any] = {"peer": ROOT, "job": 7, "uid": ALICE, "restarts": 1, "init": process.pid}
    with pytest.raises(SluiceError, match="looked at"):
        for rights in looked_at:
            saver.restored(**request, rights=rights)
        saver.resumed(**request)
    assert process.wait(10) == -9 and saver.images.find(7) is None


def test_a_job_with_a_strangers_file_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]
) -> None:
    saver, _ = saver_of(tmp_path, monkeypatch, "exit 1")
    write_image(saver.images, Run(7, ALICE, 0), {"opened": [], "rights": []}, pages=b"state")
    with pytest.raises(SluiceError, match="is another file than it was"):
        saver.restored(peer=ROOT, job=7, uid=ALICE, restarts=1, init=process.pid, rights=False)
    assert process.wait(10) == -9 and saver.images.find(7) is None


def test_the_policy_reaches_nodes() -> None:
    section = Checkpoint.model_validate(
        {"system": {"limit": "8G", "quota": "16G", "time": "1m", "keep": "2h", "shared": "/home/.states", "rate": "1G"}}
    )
    system = compile_checkpoint(section, lambda name: [name]).system
    assert system is not None and compile_checkpoint(Checkpoint(), lambda name: [name]).system is None
    assert json.loads(system.model_dump_json()) == {
        "criu": "/usr/sbin/criu", "most_bytes": 8 << 30, "quota_bytes": 16 << 30, "time_s": 60, "keep_s": 7200,
        "shared": "/home/.states", "rate_bytes": 1 << 30, "shared_quota_bytes": 1 << 40,
    }  # fmt: skip


def test_processes_that_end_meanwhile_are_no_error() -> None:
    busy = subprocess.Popen(["sh", "-c", "while :; do /bin/true & /bin/true; done"])
    try:
        for _ in range(100):
            assert opened.processes(busy.pid)[0] == busy.pid
    finally:
        busy.kill()
        busy.wait()
