"""The same contract for every backend of sluice/slurm, against real daemons."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from gres_probe.collect import write_inventory
from policy.alerts import NodeRule
from prolog_epilog.end_notices import EndNotice, report
from sluice.base.errors import SluiceError
from sluice.controllerd.alerts.duty import Alerting
from sluice.slurm import BACKENDS, Commands, SlurmClient, connect
from sluice.slurm.answers import UNLIMITED, Job, Node
from sluice.slurm.control import Control
from tests.integration.private_slurm import NEEDS, NODE, entered, free_ports, head, running, wrappers
from tests.integration.versions import TREES
from tests.unit.gres_probe import machines

pytestmark = NEEDS

HOSTILE_NAME = "a|b\x1fc\n4 JobState=RUNNING UserId=root(0) \"q\" 'q' $(x) %n"
ACCOUNTED_NAME = HOSTILE_NAME.replace('"', "")  # slurmdbd turns double quotes into backquotes
HOSTILE_COMMENT = "\x1f\x1e\nNodeName=n9 State=DOWN\nJobId=1"


@dataclass(frozen=True)
class Site:
    """A running Slurm: its folder, and the prefix of its commands."""

    folder: Path
    prefix: Path | None = None

    def connect(self, backend: str) -> SlurmClient:
        return connect(conf=self.folder, prefix=self.prefix, backend=backend)


@pytest.fixture(scope="module", params=["native", *TREES])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two nodes, n2 drained with a hostile reason, a running, a waiting and a held job."""
    folder = tmp_path_factory.mktemp("site")
    if request.param == "native":
        yield from _site(folder)
    else:
        with entered(request.getfixturevalue(f"{request.param}_root"), tmp_path_factory.getbasetemp()) as prefix:
            yield from _site(folder, prefix)


def _site(folder: Path, inside: Sequence[str] = ()) -> Iterator[Site]:
    prefix = wrappers(folder / "commands", inside) if inside else None
    for number in range(4):
        os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o600, os.makedev(195, number))
    ports = free_ports(3)
    (folder / "slurm.conf").write_text(
        f"{head(folder, ports[0])}GresTypes=gpu,shard\n"
        f"NodeName=n1 {NODE} Port={ports[1]} Gres=gpu:h100:4,shard:4000 Feature=fast,class_h100-nvlink8 Weight=7\n"
        f"NodeName=n2 {NODE} Port={ports[2]}\n"
        "NodeSet=class_h100 Nodes=n1\n"
        "PartitionName=main Nodes=ALL Default=YES MaxTime=2-00:00:00 DefaultTime=30\n"
        "PartitionName=gpus Nodes=class_h100 PriorityTier=3 Hidden=YES\n"
    )
    (folder / "gres.conf").write_text(
        f"NodeName=n1 Name=gpu Type=h100 File={folder}/gpu[0-3]\n"
        f"NodeName=n1 Name=shard Count=4000 File={folder}/gpu[0-3]\n"
    )
    with running(folder, ["n1", "n2"], inside):
        environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

        def command(*arguments: str) -> str:
            done = subprocess.run(
                [*inside, *arguments], env=environment, capture_output=True, text=True, cwd=folder, timeout=60
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        command("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=bad\nNodeName=n1 State=DOWN Weight=9")
        submit = ("sbatch", "-D", str(folder), "--wrap=exec sleep 900")
        command(*submit, "-J", HOSTILE_NAME, "--comment", HOSTILE_COMMENT, "--gres=gpu:h100:2")
        command(*submit, "-J", "shards", "--gres=shard:500", "-t", "90", "-C", "class_h100-nvlink8")
        command(*submit, "-J", "waits", "-H", "--array=1-3%2", "-N2", "--mem=10")
        command(
            "scontrol",
            "create",
            "reservation",
            "ReservationName=maint",
            "StartTime=now+1hour",
            "Duration=60",
            "Nodes=n2",
            "Users=root",
            "Flags=MAINT",
        )
        deadline = time.monotonic() + 60
        while set(command("squeue", "-h", "-t", "R", "-o", "%i").split()) != {"1", "2"}:
            assert time.monotonic() < deadline, command("squeue")
            time.sleep(0.2)
        yield Site(folder, prefix)


@pytest.fixture(params=BACKENDS)
def client(request: pytest.FixtureRequest, site: Site) -> SlurmClient:
    try:
        return site.connect(request.param)
    except SluiceError as error:
        pytest.skip(f"{request.param}: {error.what}")


def by_id(jobs: list[Job]) -> dict[int, Job]:
    return {job.id: job for job in jobs}


def known(record: Job | Node, backend: SlurmClient) -> dict[str, Any]:
    """The fields that the backend may be asked for."""
    kind = type(record).__name__
    return {name: value for name, value in asdict(record).items() if f"{kind}.{name}" not in backend.unknown}


def test_version_and_controllers(client: SlurmClient) -> None:
    assert client.version() >= (22, 5, 0)
    [controller] = client.ping()
    assert (controller.role, controller.up) == ("primary", True)


def test_config(client: SlurmClient, site: Site) -> None:
    config = client.config()
    assert config["ClusterName"] == "private"
    assert config["GresTypes"] == "gpu,shard"
    assert config["StateSaveLocation"] == f"{site.folder}/state"
    assert config["HealthCheckProgram"] == ""


def test_what_a_backend_does_not_know_is_empty(client: SlurmClient) -> None:
    fields: dict[str, list[Any]] = {}
    for record in (*client.jobs(), *client.nodes()):
        for name, value in asdict(record).items():
            fields.setdefault(f"{type(record).__name__}.{name}", []).append(value)
    assert client.unknown < fields.keys() and (not client.unknown or client.name != "text")
    assert not any(value for name in client.unknown for value in fields[name])


def test_nodes(client: SlurmClient) -> None:
    n1, n2 = client.nodes()
    assert (n1.name, n1.state, n1.flags, n1.reason) == ("n1", "mixed", frozenset(), "")
    assert (n1.sockets, n1.cores_per_socket, n1.threads_per_core, n1.cpus, n1.memory_mib) == (2, 8, 2, 32, 100)
    assert "Node.gres" in client.unknown or (n1.gres.startswith("gpu:h100:4") and "shard" in n1.gres)
    assert "Node.gres_used" in client.unknown or n1.gres_used.startswith("gpu:h100:2")
    assert n1.features == n1.active_features == ("fast", "class_h100-nvlink8")
    assert sorted(n1.partitions) == ["gpus", "main"]
    assert (n1.weight, n1.version.split(".")[0]) == (7, str(client.version()[0]))
    assert "Node.tres" in client.unknown or (n1.tres["cpu"], n1.tres["mem"]) == (32, 100)
    assert n1.tres_allocated["cpu"] == n1.cpus_allocated > 0
    assert n1.available
    assert (n2.state, n2.flags, n2.weight) == ("idle", frozenset({"drain"}), 1)
    assert n2.reason.startswith("bad\nNodeName=n1 State=DOWN")
    assert not n2.available


def test_some_nodes(client: SlurmClient) -> None:
    assert [node.name for node in client.nodes("n[2]")] == ["n2"]
    with pytest.raises(SluiceError, match="n9"):
        client.nodes("n9")


def test_partitions(client: SlurmClient) -> None:
    parts = {partition.name: partition for partition in client.partitions()}
    main, gpus = parts["main"], parts["gpus"]
    assert (main.state, main.default, main.nodes, main.node_count, main.cpus) == ("up", True, "n[1-2]", 2, 64)
    assert (main.max_time_s, main.default_time_s) == (2 * 86400, 1800)
    assert (gpus.default, gpus.node_count, gpus.priority_tier, gpus.max_time_s) == (False, 1, 3, UNLIMITED)
    assert gpus.tres["cpu"] == 32


def test_reservations(client: SlurmClient) -> None:
    [reservation] = client.reservations()
    assert (reservation.name, reservation.nodes, reservation.users) == ("maint", "n2", ("root",))
    assert reservation.end_time is not None and reservation.start_time is not None
    assert reservation.end_time - reservation.start_time == 3600
    assert "MAINT" in reservation.flags


def test_jobs(client: SlurmClient, site: Site) -> None:
    jobs = by_id(client.jobs())
    assert sorted(jobs) == [1, 2, 3]
    first, second, third = jobs[1], jobs[2], jobs[3]
    assert (first.name, first.comment) == (HOSTILE_NAME, HOSTILE_COMMENT)
    assert (first.user, first.uid, first.state, first.nodes, first.partition) == ("root", 0, "RUNNING", "n1", "main")
    assert "Job.tres_per_node" in client.unknown or "gpu:h100:2" in first.tres_per_node
    assert (first.array_id, first.array_tasks, first.work_dir) == (None, "", str(site.folder))
    assert first.start_time is not None and first.submit_time is not None and first.start_time >= first.submit_time
    assert first.time_limit_s == 1800
    assert (second.time_limit_s, second.features) == (5400, "class_h100-nvlink8")
    assert "Job.tres_per_node" in client.unknown or "shard:500" in second.tres_per_node
    assert (third.state, third.array_id, third.array_tasks, third.node_count) == ("PENDING", 3, "1-3%2", 2)
    assert (third.start_time, third.end_time, third.nodes) == (None, None, "")
    assert third.tres["mem"] == 20


def test_each_job(client: SlurmClient) -> None:
    """The same jobs, one after the other; what did not change has the same print."""
    first = list(client.each_job())
    assert {one.id: one.job() for one in first} == by_id(client.jobs(states=["all"]))
    assert {one.id: one.print_ for one in first} == {one.id: one.print_ for one in client.each_job()}


def test_some_jobs(client: SlurmClient) -> None:
    assert sorted(by_id(client.jobs(states=["RUNNING"]))) == [1, 2]
    assert sorted(by_id(client.jobs(ids=[3]))) == [3]
    assert sorted(by_id(client.jobs(states=["pending"], users=["root"]))) == [3]
    assert client.jobs(users=["nobody"]) == []


def test_no_accounting_is_said(client: SlurmClient) -> None:
    if client.name == "text":
        with pytest.raises(SluiceError, match="accounting storage is disabled"):
            client.accounting_jobs()


def test_backends_agree(site: Site, client: SlurmClient) -> None:
    """What one backend knows, the other says, too."""
    agree(site.connect("text"), client)
    assert site.connect("text").partitions() == client.partitions()


def agree(text: SlurmClient, other: SlurmClient, **selection: Any) -> None:
    def steady(nodes: list[Node]) -> list[dict[str, Any]]:
        return [known(node, other) | {"memory_free_mib": None} for node in nodes]

    of_text, of_other = by_id(text.jobs(**selection)), by_id(other.jobs(**selection))
    assert of_text.keys() == of_other.keys()
    for key, one in of_text.items():
        assert known(one, other) == known(of_other[key], other)
    assert steady(text.nodes()) == steady(other.nodes())


def test_backends_agree_on_what_users_may_write(site: Site, client: SlurmClient) -> None:
    """A name that is not UTF-8, and task 0 of an array, which is not the whole array."""
    text, commands = site.connect("text"), Commands(conf=site.folder, prefix=site.prefix)
    if client.name == "text":
        pytest.skip("it is what others are compared with")
    submit = ("--parsable", "-D", str(site.folder), "--wrap=exec sleep 900")
    requests: list[tuple[str, ...]] = [
        ("--array=0-1", "--mem-per-gpu=1", "-G1"),
        ("-H", "-J", os.fsdecode(b"a\xffb"), "-d", "afterok:1"),
        ("-H", "--array=0-5:2%1", "--gres=shard:1K"),
        ("-t", "UNLIMITED", "-p", "gpus"),
        ("-H", "--gpus-per-task=h100:1", "-n2"),
    ]
    numbers: list[int] = []
    deadline = time.monotonic() + 60
    try:
        for request in requests:
            numbers.append(int(commands.output("sbatch", *submit, *request)))
        while not text.jobs(ids=numbers[:1], states=["RUNNING"]):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        agree(text, client, ids=numbers)
        assert f"{numbers[0]}_0" in {job.own_name for job in client.jobs(ids=numbers)}
    finally:
        commands.output("scancel", *map(str, numbers))
    while any(job.state == "COMPLETING" for job in text.jobs()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    agree(text, client, states=["all"])


def test_migration_of_shards_names_the_jobs(site: Site, tmp_path: Path) -> None:
    """The site uses shards of its own: nothing is written unasked, and the jobs that ask for them are listed."""
    write_inventory(tmp_path, machines.dgx("n1"))
    command = [sys.executable, "-m", "sluice.main", "gres", "write", "--inventory-dir", str(tmp_path)]
    command += ["--slurm-conf", str(site.folder), "--output-dir", str(tmp_path), "--slurm-version", "22.05"]
    command += ["--slurm-prefix", str(site.prefix)] if site.prefix else []
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 1 and not list(tmp_path.glob("*.conf"))
    assert "this site already uses shards; nothing written" in refused.stderr
    done = subprocess.run([*command, "--migrate-shards"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and len(list(tmp_path.glob("*.conf"))) == 2
    for said in (refused.stderr, done.stderr):
        jobs = [line for line in said.splitlines() if line.startswith("  ") and "RUNNING" in line]
        assert len(jobs) == 1 and jobs[0].startswith("  2 root RUNNING ") and "shard:500" in jobs[0]


def test_nobody_answers(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text(
        f"{head(tmp_path, free_ports(1)[0])}MessageTimeout=2\nNodeName=n1 {NODE}\nPartitionName=all Nodes=ALL\n"
    )
    client = connect(conf=tmp_path, timeout=30)
    [controller] = client.ping()
    assert not controller.up
    with pytest.raises(SluiceError, match="squeue|sinfo|no answer"):
        client.jobs()


_ASK = """
import json, sys
from dataclasses import asdict
from sluice.slurm import connect
jobs = connect().accounting_jobs(users=["alice"], start=int(sys.argv[1]))
print(json.dumps([asdict(job) for job in jobs]))
"""


def test_accounting(demo: DevCluster) -> None:
    """Ended jobs of a user, with a hostile name."""
    before = int(time.time()) - 5
    demo.run(
        ["sbatch", "--wait", "-o/dev/null", "-J", ACCOUNTED_NAME, "-t2", "--wrap=true"], node="login", user="alice"
    )
    demo.run(
        ["sbatch", "--wait", "-o/dev/null", "-J", "fails", "-t2", "-G1", "--wrap=exit 3"],
        node="login",
        user="alice",
        check=False,
    )
    deadline = time.monotonic() + 60
    while True:
        done = demo.run([sys.executable, "-c", _ASK, str(before)], node="login")
        jobs = {job["state"]: job for job in json.loads(done.stdout)}
        if {"COMPLETED", "FAILED"} <= jobs.keys():
            break
        assert time.monotonic() < deadline, jobs
        time.sleep(0.5)
    assert (jobs["FAILED"]["exit_code"], jobs["FAILED"]["time_limit_s"]) == (3, 120)
    assert jobs["FAILED"]["tres_allocated"]["gres/gpu"] == 1
    assert jobs["FAILED"]["user"] == "alice"


# ---- one task of an array is meant ----


def array(site: Site, commands: Commands, tasks: str) -> tuple[int, dict[int, str]]:
    """The number of an array with a running task of that number, and its tasks' states."""
    said = commands.output("sbatch", "--parsable", "-D", str(site.folder), f"--array={tasks}", "--wrap=exec sleep 900")
    number = int(said)

    def states() -> dict[int, str]:
        return {job.id: job.state for job in site.connect("text").jobs(ids=[number])}

    deadline = time.monotonic() + 60
    while "RUNNING" not in (found := states()).values() or ("%" not in tasks and len(set(found.values())) > 1):
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    assert number in found
    return number, found


def test_the_task_that_bears_the_arrays_number_is_ended_alone(site: Site) -> None:
    commands = Commands(conf=site.folder, prefix=site.prefix)
    number, tasks = array(site, commands, "1-2")
    [other] = set(tasks) - {number}
    report(EndNotice(number, 0, 0, 0, int(time.time()), 1), "n1", commands)
    comments = {job.id: job.admin_comment for job in site.connect("text").jobs(ids=[number])}
    assert comments[number].startswith(f"sluice-ended 1 {number} ") and not comments[other]

    controller: Any = SimpleNamespace(client=site.connect("text"), commands=commands, leads=lambda: True)
    Alerting(controller)._act(NodeRule(name="idle", kind="gpu-idle", threshold=1, duration=60), "cancel", number)
    assert "RUNNING" not in state_of(commands, f"{number}_2") and state_of(commands, f"{number}_1") == "RUNNING"
    Control(commands).cancel(site.connect("text").jobs(ids=[number]))


def state_of(commands: Commands, name: str) -> str:
    return commands.output("squeue", "-h", "-t", "all", "-j", name, "-o", "%T").strip()


def test_of_an_array_that_runs_what_waits_is_cancelled_alone(site: Site) -> None:
    commands = Commands(conf=site.folder, prefix=site.prefix)
    number, _ = array(site, commands, "1-3%1")
    control, client = Control(commands), site.connect("text")
    control.cancel(client.jobs(ids=[number]), only_waiting=True)
    assert [job.state for job in client.jobs(ids=[number])] == ["RUNNING"]
    control.cancel(client.jobs(ids=[number]))
