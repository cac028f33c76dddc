"""States that move to storage which nodes share: whole or not at all, never twice, and to nodes that can go on."""

from __future__ import annotations

import os
import random
import shutil
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from policy.checkpoint import NodeSystem
from prolog_epilog.checkpoint import cpus, drains, opened
from prolog_epilog.checkpoint.drains import Drains, Place
from prolog_epilog.checkpoint.gpus import Gpu, to_facts
from prolog_epilog.checkpoint.images import Images, Run
from prolog_epilog.checkpoint.saver import Saver
from prolog_epilog.checkpoint.shared import Last, Shared
from prolog_epilog.server import Peer
from sluice.base.errors import SluiceError
from sluice.slurm import job as slurm_job
from tests.unit.prolog_epilog.saved_images import write_image

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="images of several users need root")

ALICE = 2001
KEY = bytes(range(32))
RUN = Run(7, ALICE, 0)
CPU = {"machine": "x86_64", "vendor": "GenuineIntel", "flags": ["avx", "avx2"]}
H100 = Gpu("GPU-1", "nvidia", "H100", 81559, "580.65.06")
KILLS = 300 if os.environ.get("SLUICE_TEST_SCALE") == "full" else 8


class Slurm:
    """Answers for job 7, which waits on a cluster of three nodes."""

    def __init__(self, excluded: str = "", state: str = "PENDING") -> None:
        self.excluded, self.state = excluded, state
        self.updates: list[list[str]] = []

    def output(self, name: str, *words: str) -> str:
        if name == "sinfo":
            return "n1\nn2\nn3\nn2\n"
        if name == "scontrol":
            self.updates.append([word for word in words if word.startswith(("StartTime", "ExcNodeList"))])
            self.excluded = next((word[12:] for word in words if word.startswith("ExcNodeList=")), self.excluded)
            return ""
        if "%n|%x|%a|%k" in words:
            return f"(null)|{self.excluded or '(null)'}|physics|sluice:checkpoint=system\n"
        values = {"JobID": "7", "State": self.state, "Requeue": "1", "BatchFlag": "1", "RestartCnt": "1"}
        return "".join(values.get(key, "").ljust(width) for key, width in slurm_job._WIDTHS.items()) + "\n"


class Site:
    """Node n1, with an image of RUN, and the storage that it shares with others."""

    def __init__(self, folder: Path, pages: bytes = os.urandom(100), **policy: Any) -> None:
        self.folder = folder
        self.storage = folder / "storage"
        self.storage.mkdir(mode=0o700)
        self.images = Images(folder / "n1")
        self.images.prepare()
        self.images.keys.put(7, KEY)
        self.shared = Shared(self.storage, self.images.keys, "n1")
        self.shared.prepare()
        self.slurm, self.told = Slurm(), list[str]()
        self.policy = NodeSystem(shared=str(self.storage), **policy)
        self.stopping = threading.Event()
        self.save(RUN, pages)

    def save(self, run: Run, pages: bytes, **facts: Any) -> None:
        known = {"cpu": CPU, "gpus": [], "node": "n1", "opened": [], "named": []}
        write_image(self.images, run, known | facts, **{"pages-1.img": pages})

    def drains(self) -> Drains:
        @contextmanager
        def alone(job: int, seconds: float) -> Iterator[int]:
            yield -1

        place = Place(
            self.images, "n1", lambda: self.shared, lambda: self.policy, alone,
            lambda _, words: self.told.append(words), self.stopping,
        )  # fmt: skip
        return Drains(place, self.slurm)  # type: ignore[arg-type]

    def here(self) -> bool:
        return self.images.has(RUN)

    def there(self) -> bool:
        return self.shared.images.has(RUN)

    def pages(self) -> bytes:
        """As another node reads them, which the job's prolog gave its key."""
        other = Images(self.folder / "n2")
        other.prepare()
        other.keys.put(7, KEY)
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        Images(self.storage, other.keys, "n2").read(RUN, out)
        return (out / "pages-1.img").read_bytes()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_an_image_moves_whole_and_without_its_key(tmp_path: Path) -> None:
    pages = os.urandom(9 << 20)
    site = Site(tmp_path, pages)
    assert site.drains().run() is None
    assert site.there() and not site.here() and site.pages() == pages
    files = [path for path in site.storage.rglob("*") if path.is_file()]
    assert all(KEY not in path.read_bytes() and pages[:16] not in path.read_bytes() for path in files)
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in site.storage.iterdir())
    stranger = Images(tmp_path / "n3")
    stranger.prepare()
    with pytest.raises(SluiceError, match="damaged"):  # n3's own key for this user is another one
        Images(site.storage, stranger.keys, "n3").read(RUN, tmp_path / "out-3")


def test_a_job_whose_key_did_not_come_stays_on_its_node(site: Site) -> None:
    (site.images.folder / "keys/job-7").unlink()
    site.drains().run()
    assert site.here() and not site.there()


def test_the_rate_is_kept(tmp_path: Path) -> None:
    site = Site(tmp_path, bytes(16 << 20), rate_bytes=16 << 20)
    began = time.monotonic()
    site.drains().run()
    assert site.there() and time.monotonic() - began >= 1.9  # written, and read again


class Resumed(Site):
    """The same site for another agent."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.storage = folder, folder / "storage"
        self.images = Images(folder / "n1")
        self.images.prepare()
        self.shared = Shared(self.storage, self.images.keys, "n1")
        self.slurm, self.told = Slurm(), []
        self.policy = NodeSystem(shared=str(self.storage), rate_bytes=32 << 20)
        self.stopping = threading.Event()


def test_an_agent_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    """At each moment one of the two is whole; what is there under its name is."""
    pages = os.urandom(4 << 20)
    for number in range(KILLS):
        folder = tmp_path / str(number)
        folder.mkdir()
        site = Site(folder, pages)
        agent = os.fork()
        if agent == 0:
            with suppress(BaseException):
                Resumed(folder).drains().run()
            os._exit(0)
        deadline = time.monotonic() + 60
        while not list((site.storage / "images").iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.3))
        os.kill(agent, signal.SIGKILL)
        os.waitpid(agent, 0)
        assert site.there() or site.here()
        if site.there():
            assert site.pages() == pages
        Resumed(folder).drains().run()
        assert not site.here() and site.pages() == pages
        assert [path.name for path in (site.storage / "images").iterdir()] == [RUN.name]
        shutil.rmtree(folder)


def test_a_full_target_costs_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path, os.urandom(4 << 20))
    small = tmp_path / "storage"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "none", small], check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        duty = site.drains()
        site.shared.prepare()
        assert duty.run() == drains.AGAIN_S and site.here() and not list((small / "images").iterdir())
        assert duty.run() == drains.AGAIN_S
        assert site.told == [
            "saved on n1 alone ([Errno 28] No space left on device): elsewhere it begins again from its start"
        ]
        subprocess.run(["mount", "-o", "remount,size=20m", small], check=True)
        assert duty.run() is None and site.there() and not site.here()
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_users_quota_there_is_kept(tmp_path: Path) -> None:
    site = Site(tmp_path, bytes(3 << 20), shared_quota_bytes=5 << 20)
    duty = site.drains()
    duty.run()
    site.images.keys.put(8, KEY)
    site.save(Run(8, ALICE, 0), bytes(3 << 20))
    assert duty.run() == drains.AGAIN_S and "quota" in site.told[-1] and not site.shared.images.has(Run(8, ALICE, 0))


def test_what_was_damaged_on_its_way_does_not_replace_what_is_here(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def damages(run: Run, image: Path, paced: Callable[[int], None]) -> None:
        with (image / "pages-1.img").open("r+b") as file:
            file.seek(40)
            file.write(b"x")
        check(run, image, paced)

    check = site.shared.images._check
    monkeypatch.setattr(site.shared.images, "_check", damages)
    site.drains().run()
    assert site.here() and not list((site.storage / "images").iterdir()) and "damaged" in site.told[0]


def test_storage_that_is_not_mounted_or_not_roots_alone_is_not_written(tmp_path: Path, site: Site) -> None:
    missing = Shared(tmp_path / "missing", site.images.keys, "n1")
    with pytest.raises(SluiceError, match="No such file"):
        missing.prepare()
    assert not missing.folder.exists()
    site.storage.chmod(0o750)
    with pytest.raises(SluiceError, match="not root's alone"):
        site.shared.prepare()


@pytest.mark.parametrize("name", ["images", "runs", "nodes"])
def test_folders_that_another_has_made_there_are_not_used(tmp_path: Path, site: Site, name: str) -> None:
    folder = site.storage / name
    os.chown(folder, ALICE, -1)
    with pytest.raises(SluiceError, match=f"{name}: not root's alone"):
        site.shared.prepare()
    shutil.rmtree(folder)
    folder.symlink_to(tmp_path)
    with pytest.raises(SluiceError, match=f"{name}: not root's alone"):
        site.shared.prepare()


def test_where_runs_cannot_be_read_none_is_taken_for_the_last(site: Site) -> None:
    site.shared.note(7, Last(1))
    assert site.shared.is_old(RUN)
    shutil.rmtree(site.storage / "runs")
    with pytest.raises(OSError, match="runs"):
        site.shared.is_old(RUN)
    shutil.rmtree(site.storage / "images")
    for act in (site.shared.images.find, site.shared.images.forget):
        with pytest.raises(OSError, match="images"):
            act(7)


@pytest.mark.parametrize("facts", ["[]", "3", "{}", '{"cpu": 1, "gpus": []}', '{"cpu": {}, "gpus": [{"color": 1}]}'])
def test_a_node_of_another_version_is_not_like_any(site: Site, facts: str) -> None:
    (site.storage / "nodes/n2").write_text(facts)
    site.drains().run()
    assert site.there() and not site.here() and "no other node is like n1" in site.told[0]


@pytest.mark.parametrize("seed", range(6))
def test_no_image_is_used_after_a_later_run_has_begun(tmp_path: Path, seed: int) -> None:
    """Runs on three nodes, saved or not, moved or not, in any order: what a run goes on with is the state that the run
    before it was saved with, or none."""
    chance = random.Random(seed)
    storage = tmp_path / "storage"
    storage.mkdir(mode=0o700)
    policy = NodeSystem(shared=str(storage))
    savers = []
    for node in ("n1", "n2", "n3"):
        saver = Saver(tmp_path / node, lambda: policy, tmp_path / "ready", lambda *_: None, node=node)
        saver.images.prepare()
        saver.take_key(peer=Peer(1, 0), job=7, key=KEY.hex())
        saver.drains._commands = Slurm(state="RUNNING")  # type: ignore[assignment]
        savers.append(saver)
    saved: int | None = None  # which run has just been
    for restarts in range(20):
        here = chance.choice(savers)
        found = here._find(7, ALICE, restarts)
        assert found is None or found[0].restarts == saved, (restarts, found)
        here._begin(7, restarts, found[0].restarts if found else None)
        again = here._find(7, ALICE, restarts)  # an agent that was killed is asked again
        assert (again and again[0]) == (found and found[0])
        if found is not None and chance.random() < 0.8:  # else the agent dies before it is forgotten
            here._forget(7)
        saved = None
        if chance.random() < 0.6:
            write_image(here.images, Run(7, ALICE, restarts), {"cpu": CPU, "gpus": []})
            here._where(Run(7, ALICE, restarts))
            saved = restarts
        for saver in savers:
            if chance.random() < 0.5:
                saver.drains.run()


def test_nodes_that_cannot_go_on_are_excluded_before_one_is_chosen(site: Site) -> None:
    site.shared.announce({"cpu": CPU, "gpus": []})
    Shared(site.storage, site.images.keys, "n2").announce({"cpu": CPU | {"flags": ["avx", "avx2", "sse"]}, "gpus": []})
    Shared(site.storage, site.images.keys, "n3").announce({"cpu": CPU | {"flags": ["avx"]}, "gpus": []})
    site.drains().run()
    assert site.slurm.updates == [["ExcNodeList=n3"]]
    assert site.told == ["saved, and on shared storage: goes on on n1 and 1 other node"]
    # The next time only what its user excludes is taken for the user's.
    site.slurm.excluded = "n[2-3]"
    Shared(site.storage, site.images.keys, "n3").announce({"cpu": CPU, "gpus": []})
    site.save(Run(7, ALICE, 1), b"later")
    site.drains().run()
    assert site.slurm.updates[1:] == [["ExcNodeList=n2"]]


def test_where_no_other_node_is_like_it_none_is_excluded(site: Site) -> None:
    site.shared.announce({"cpu": CPU, "gpus": []})
    site.drains().run()
    assert site.slurm.updates == [] and "no other node is like n1" in site.told[0]


@pytest.mark.parametrize(
    ("node", "why"),
    [
        ({"cpu": CPU, "gpus": to_facts([H100])}, ""),
        ({"cpu": CPU, "gpus": []}, "no other GPU H100"),
        ({"cpu": CPU, "gpus": to_facts([Gpu("GPU-2", "nvidia", "H100", 81559, "590.1")])}, "driver 580.65.06"),
        ({"cpu": CPU | {"vendor": "AuthenticAMD"}, "gpus": to_facts([H100])}, "vendor was GenuineIntel"),
        ({"cpu": CPU | {"flags": ["avx"]}, "gpus": to_facts([H100])}, "lacks avx2"),
    ],
)
def test_which_nodes_are_alike(node: dict[str, Any], why: str) -> None:
    found = drains.why_not({"cpu": CPU, "gpus": to_facts([H100])}, node)
    assert why in found and bool(why) == bool(found)


def test_a_cpu_is_its_instructions() -> None:
    found = cpus.parse(
        "vendor_id\t: GenuineIntel\nflags\t\t: fpu vmx avx2 ibrs ept_ad amx_tile\n\nflags: other\n", "x86_64"
    )
    assert found == {"machine": "x86_64", "vendor": "GenuineIntel", "flags": ["amx_tile", "avx2", "fpu"]}
    assert cpus.parse("Features\t: fp sve\nCPU implementer\t: 0x41\n", "aarch64")["flags"] == ["fp", "sve"]
    assert cpus.why_not(cpus.here(), cpus.here()) == "" and cpus.here()["flags"]


def test_a_job_waits_while_its_state_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only for as long as somebody moves it."""
    monkeypatch.setattr(drains, "_EXTEND_S", 0.0)
    site = Site(tmp_path, bytes(9 << 20))
    Shared(site.storage, site.images.keys, "n2").announce({"cpu": CPU, "gpus": []})
    site.drains().run()
    assert site.slurm.updates[0] == ["StartTime=now+120"] and "StartTime=now" in site.slurm.updates[-1]


def test_nodes_are_excluded_also_where_the_state_is_moved_before_the_run_has_ended(site: Site) -> None:
    for node in ("n1", "n2"):
        Shared(site.storage, site.images.keys, node).announce({"cpu": CPU, "gpus": []})
    duty = site.drains()
    for site.slurm.state in ("COMPLETING", "FAILED"):
        assert duty.run() == 1.0 and site.there() and site.here() and site.told == []
    site.slurm.state = "PENDING"
    assert duty.run() is None and site.slurm.updates == [["ExcNodeList=n3"]] and not site.here()


def test_files_of_another_node_are_known_by_name(tmp_path: Path) -> None:
    """Another inode with the name, size and times of the one that it was; and nothing else."""
    file = tmp_path / "library"

    def process() -> subprocess.Popen[bytes]:
        with file.open() as opened_file:
            return subprocess.Popen(["sleep", "60"], user=ALICE, pass_fds=(opened_file.fileno(),))

    def check(change: str) -> str | None:
        made = process()
        try:
            deadline = time.monotonic() + 10
            while Path(f"/proc/{made.pid}/stat").read_text().split()[2] != "S":
                assert time.monotonic() < deadline
            if change == "look":
                known.update(opened.look_by_name(made.pid, ALICE))
            return opened.stranger(made.pid, ALICE, known, Path("/dev/null"), time.time_ns(), by_name=True)
        finally:
            made.kill()
            made.wait()

    known: set[opened.Named] = set()
    file.write_text("of root's")
    os.utime(file, ns=(1, 5))
    assert check("look") is None
    for change in ("same", "mtime", "size", "mode", "link"):
        file.unlink()
        file.write_text("of root's" + "!" * (change == "size"))
        os.utime(file, ns=(1, 5 + (change == "mtime")))
        if change == "mode":
            file.chmod(0o600)
        if change == "link":
            file.rename(tmp_path / "secret")
            file.symlink_to(tmp_path / "secret")
        found = check(change)
        assert (found is None) == (change == "same"), change


def test_a_key_is_one(tmp_path: Path) -> None:
    saver = Saver(tmp_path / "n1", lambda: None, tmp_path / "ready", lambda *_: None, node="n1")
    saver.images.prepare()
    for bad in ("", "00", "zz" * 32, "00" * 33):
        with pytest.raises(SluiceError, match="key of job 7"):
            saver.take_key(peer=Peer(1, 0), job=7, key=bad)
    saver.take_key(peer=Peer(1, 0), job=7, key=KEY.hex())
    path = tmp_path / "n1/keys/job-7"
    assert path.read_bytes() == KEY and stat.S_IMODE(path.stat().st_mode) == 0o600
    os.utime(path, (1, 1))
    saver.images.keys.prune(2, lambda job: True)
    assert path.exists()
    saver.prune()  # it does not run here, and has no image
    assert not path.exists()


def test_what_a_node_cannot_go_on_with_begins_again_and_says_so(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.drains().run()
    told: list[str] = []
    other = Saver(tmp_path / "n2", lambda: site.policy, tmp_path / "ready", lambda *_: None, node="n2")
    other.images.prepare()
    other.problem = lambda: ""  # type: ignore[method-assign]
    other.told = lambda _, words: told.append(words)
    with pytest.raises(SluiceError, match="damaged"):  # its prolog brought no key
        other.resume(peer=Peer(1, 0), job=7, uid=ALICE, restarts=1)
    assert "begins again from its start" in told[0] and not site.there()
    site.save(Run(7, ALICE, 1), b"more", cpu=cpus.here() | {"flags": ["an-instruction"]})
    site.drains().run()
    other.take_key(peer=Peer(1, 0), job=7, key=KEY.hex())
    with pytest.raises(SluiceError, match="lacks an-instruction"):
        other.resume(peer=Peer(1, 0), job=7, uid=ALICE, restarts=2)
    assert "begins again from its start" in told[1]


def test_a_job_whose_state_is_on_another_node_says_which(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.shared.note(7, Last(0, None, "n1"))
    told: list[str] = []
    other = Saver(tmp_path / "n2", lambda: site.policy, tmp_path / "ready", lambda *_: None, node="n2")
    other.images.prepare()
    other.told = lambda _, words: told.append(words)
    assert other.resume(peer=Peer(1, 0), job=7, uid=ALICE, restarts=1) == {"words": []}
    assert told == ["begins again from its start, as what was saved of it is on n1 alone"]
    site.drains().run()  # it is old now, and is removed
    assert not site.here() and not site.there()
