"""The pyslurm backend against a package of that name whose records behave as those of pyslurm 25.11.2 did."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.base.errors import SluiceError
from sluice.slurm import SlurmClient, connect
from sluice.slurm.answers import UNLIMITED, Job

YEAR_2100 = 4102444800
PYSLURM = f"""
class Count:
    def __init__(self, type_and_name, count):
        self.type_and_name, self.count = type_and_name, count

class Tres:
    mem = energy = pages = vmem = billing = None
    license, fs, interconnect = {{}}, {{}}, {{}}
    def __init__(self, cpu):
        print("bb cray bb/cray")  # so pyslurm does, to stdout
        self.cpu, self.node = Count("cpu", cpu), Count("node", 1)
        self.gres = {{"gpu:h100": Count("gres/gpu:h100", 2)}}
        self.other = {{"bb/cray": Count("bb/cray", 7)}}

class Record:
    def __init__(self, **known):
        self.__dict__.update(known)
    def __getattr__(self, name):
        return None

class Job(Record):
    @property
    def name(self):
        return self.raw_name.decode()

class Node(Record):
    @property
    def configured_gres(self):
        raise ValueError("invalid literal for int() with base 10: '640K'")

class Jobs:
    def load():
        common = dict(raw_name=b"a", state="RUNNING", state_reason="None", time_limit=90)
        return {{number: Job(**common | job) for number, job in {{
            1: dict(id=1, raw_name=b"a\\xffb", allocated_tres=Tres(4), requested_tres=Tres(2), time_limit=None,
                    end_time={YEAR_2100}),
            2: dict(id=2, array_id=2, state="CONFIGURING", end_time={YEAR_2100}, constraints=["a&b", "c"]),
            3: dict(id=3, array_id=2, array_task_id=1, state="CANCELLED"),
            4: dict(id=4, array_id=4, array_tasks_waiting="0-5:2", array_tasks_parallel=3, state="PENDING",
                    state_reason="NoneOfYours", requested_tres=Tres(1)),
        }}.items()}}

class Nodes:
    def load():
        return {{"n1": Node(name="n1", state="MIXED+DRAIN", total_cpus=32, real_memory=100, allocated_memory=50,
                          allocated_cpus=4, allocated_tres={{"cpu": 4, "mem": "1.50G", "gres/gpu": 2}})}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Slurm prefix and a pyslurm of one version."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sinfo").write_text("#!/bin/sh\necho slurm 25.11.7\n")
    (tmp_path / "bin/sinfo").chmod(0o755)
    (tmp_path / "pyslurm.py").write_text(PYSLURM)
    describe(tmp_path, "25.11.2")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def describe(folder: Path, version: str) -> None:
    """What an installed package says of itself."""
    (folder / "pyslurm.dist-info").mkdir(exist_ok=True)
    (folder / "pyslurm.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: pyslurm\nVersion: {version}\n")


@pytest.fixture
def client(folder: Path) -> SlurmClient:
    return connect(prefix=folder, backend="pyslurm")


def jobs(client: SlurmClient) -> dict[int, Job]:
    return {job.id: job for job in client.jobs(states=["all"])}


def test_another_slurm_is_refused(folder: Path) -> None:
    describe(folder, "24.11.0")
    with pytest.raises(SluiceError, match=r"pyslurm 24\.11\.0 does not fit Slurm 25\.11\.7.*text backend"):
        connect(prefix=folder, backend="pyslurm")


def test_a_name_that_is_not_utf8_ends_no_listing(client: SlurmClient) -> None:
    assert jobs(client)[1].name == "a\ufffdb"


def test_task_0_is_not_the_array(client: SlurmClient) -> None:
    found = jobs(client)
    assert (found[1].array_tasks, found[2].array_tasks, found[3].array_tasks) == ("", "0", "1")
    assert (found[2].own_name, found[4].array_tasks) == ("2_0", "0-5:2%3")


def test_tres_have_slurms_names(client: SlurmClient) -> None:
    """What pyslurm prints while it reads them does not get into the answer."""
    found = jobs(client)
    assert found[1].tres == {"cpu": 4, "node": 1, "gres/gpu:h100": 2, "bb/cray": 7}  # allocated
    assert (found[4].tres["cpu"], found[2].tres) == (1, {})


def test_a_job_without_a_limit_has_no_end(client: SlurmClient) -> None:
    found = jobs(client)
    assert (found[1].time_limit_s, found[1].end_time) == (UNLIMITED, None)
    assert (found[2].time_limit_s, found[2].end_time) == (5400, YEAR_2100)


def test_words_of_a_job(client: SlurmClient) -> None:
    found = jobs(client)
    assert (found[1].reason, found[4].reason, found[2].features) == ("", "NoneOfYours", "a&b,c")


def test_by_default_all_that_have_not_ended(client: SlurmClient) -> None:
    assert [job.id for job in client.jobs()] == [1, 2, 4]
    assert [job.id for job in client.jobs(states=["running"])] == [1]
    assert [job.id for job in client.jobs(ids=[2], states=["all"])] == [2, 3]


def test_nodes_leave_out_what_pyslurm_cannot_say(client: SlurmClient) -> None:
    [node] = client.nodes("n[1]")
    assert (node.state, node.flags, node.available) == ("mixed", frozenset({"drain"}), False)
    assert node.tres_allocated == {"cpu": 4, "mem": 1536, "gres/gpu": 2}
    assert {"Node.gres", "Node.gres_used", "Node.tres"} < client.unknown
    assert (node.gres, node.gres_used, node.tres) == ("", "", {})


def test_a_failure_is_one_line(client: SlurmClient, folder: Path) -> None:
    (folder / "pyslurm.py").write_text("raise RuntimeError('Unable to contact slurm controller')\n")
    with pytest.raises(SluiceError, match="^pyslurm: Jobs: RuntimeError: Unable to contact slurm controller"):
        client.jobs()
