"""An engine on two nodes: its other part gets the model from the first one, and the step's input keeps the key."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sluice.exchange.serving import DataPath, State
from sluice.serve.replica import group
from sluice.slurm import munge
from tests.unit.serve.replica_bed import PROGRAM, ROOT, Registry, Replica, replica, spec_of
from tests.unit.serve.ucx_bed import OVER_TCP, needs_ucx

SIZE = 9 << 20
# The other node: another disk, and what the step's input was.
SRUN = """#!/bin/sh
while [ "${{1#--}}" != "$1" ]; do shift; done
export SLURM_PROCID=0
tee {folder}/input | sed 's#{folder}/disk#{folder}/other#g;{change}' | {python} -P {folder}/member.py --member
"""


@pytest.fixture
def registry() -> Iterator[Registry]:
    one = Registry()
    yield one
    one.socket.close()


@contextmanager
def two_nodes(
    folder: Path, registry: Registry, broadcast: int = 1024, change: str = "", path: DataPath = "auto"
) -> Iterator[Replica]:
    """A replica of two; `change`: of what the other node gets, as a sed script."""
    (folder / "model").write_bytes(b"0123456789abcdef" * (SIZE // 16))
    for name in ("disk", "other", "bin"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "member.py").write_text(PROGRAM)
    (folder / "bin/srun").write_text(SRUN.format(folder=folder, python=sys.executable, change=change))
    (folder / "bin/srun").chmod(0o755)
    os.utime(folder / "model", (0, 0))  # the same model each time
    engine = str(ROOT / "tests/integration/group_engine.py")
    spec = spec_of(
        folder / "model", engine="openai", command=(sys.executable, engine, "{socket}"), options=(), nodes=2,
        stage=str(folder / "disk"), broadcast=broadcast, registries=(registry.address,), health="/v1/models",
        data_path=path,
    )  # fmt: skip
    registry.beats.clear()
    programs = f"{folder}/bin:{os.environ['PATH']}"
    with replica(spec, folder, SLURMD_NODENAME="127.0.0.1", PATH=programs, **OVER_TCP) as one:
        yield one


def staged_by_the_member(folder: Path, registry: Registry, broadcast: int) -> tuple[int, int]:
    """Bytes that the other node copied, and how many of them it has from the first one."""
    with two_nodes(folder, registry, broadcast) as one:
        registry.wait(State.READY)
        found = re.search(r"member-staged rank=1 copied=(\d+) taken=(\d+)", one.said)
    assert found is not None
    return int(found[1]), int(found[2])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ('s/"members": [0-9]*/"members": 9/', "members 9; here: members 1"),
        ('s/"members": [0-9]*, //', "members None"),
        ('s/"nodes": 2, "broadcast"/"draft": "x", &/;s/"broadcast"/"draft": 1, &/', "the spec has draft"),
        ('s/"drain_s"/"drains"/', "the spec has drains"),
    ],
)
def test_a_node_with_another_sluice_refuses_before_its_engine_starts(
    tmp_path: Path, registry: Registry, change: str, why: str
) -> None:
    with two_nodes(tmp_path, registry, change=change) as one:
        assert one.ended() == 1
        last = registry.beats[-1]
        assert last.state is State.FAILED and "the first node runs another Sluice" in last.why and why in last.why
        assert "member-staged" not in one.said and State.READY not in registry.states


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")
def test_a_member_without_room_says_so(tmp_path: Path, registry: Registry) -> None:
    (tmp_path / "other").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "small", tmp_path / "other"], check=True)
    try:
        with two_nodes(tmp_path, registry) as one:
            assert one.ended() == 1
            why = registry.beats[-1].why
            assert "the model needs 9" in why and "free" in why
    finally:
        subprocess.run(["umount", "-l", tmp_path / "other"], check=True)


@needs_ucx
def test_the_other_node_gets_the_model_over_ucx(tmp_path: Path, registry: Registry) -> None:
    with two_nodes(tmp_path, registry, path="ucx") as one:
        registry.wait(State.READY)
        assert f"member-staged rank=1 copied={SIZE} taken={SIZE} ucx={SIZE}\n" in one.said


def test_the_other_node_gets_the_model_from_the_first_one(tmp_path: Path, registry: Registry) -> None:
    assert staged_by_the_member(tmp_path, registry, 1024) == (SIZE, SIZE)
    given = (tmp_path / "input").read_text()
    assert f'"{os.geteuid()}:' in given and "fingerprint" not in given, "the key is in a credential for this user"
    shutil.rmtree(tmp_path / "other")
    assert staged_by_the_member(tmp_path, registry, 1024) == (SIZE, SIZE), "which has it already"


def test_without_broadcast_each_node_reads_the_storage(tmp_path: Path, registry: Registry) -> None:
    assert staged_by_the_member(tmp_path, registry, 0) == (SIZE, 0)


def test_a_member_whose_credential_is_over_reads_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step began later than munged decodes what it was given: the replica does not fail for that."""

    def expired(credential: str) -> munge.Message:
        raise munge.MungeError(f"munge: Expired credential {credential}")

    monkeypatch.setattr(munge, "decode", expired)
    (tmp_path / "model").write_bytes(bytes(SIZE))
    (tmp_path / "disk").mkdir()
    spec = spec_of(tmp_path / "model", stage=str(tmp_path / "disk"))
    staged = group._stage(spec, threading.Event(), ["MUNGE:x:"])
    staged.release()
    assert (staged.copied, staged.taken) == (SIZE, 0)
