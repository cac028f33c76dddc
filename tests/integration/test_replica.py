"""Replicas with llama.cpp's own server in jobs that replicad launches: signals and users of a node, what is handed over
while clients ask all the time, and GPUs that are lent."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.layout import INSIDE
from tests.integration import serve_site
from tests.integration.jobs import state, submit
from tests.integration.serve_site import ServeSite
from tests.integration.serve_traffic import Traffic
from tests.serve_models import counted, make_model
from tests.unit.serve.replica_bed import connect, read_all, request
from tests.unit.serve.test_replica_life import words_of

pytest.importorskip("xllamacpp", reason="needs the package xllamacpp (pip install -e '.[dev]')")
pytestmark = pytest.mark.cluster

MODEL = {
    "engine": "llama.cpp",
    "model": str(INSIDE / "models/counting.gguf"),
    "stage": str(INSIDE / "models/stage"),
    "options": ["--ctx-size", "32768", "--threads", "1"],
    "command": [],
    "memory": "400M",
    "drain_within": "30s",
    "ready_within": "60s",
    "walltime": "10m",
    "idle": "3s",
}
SLOW = MODEL | {
    "model": str(INSIDE / "models/slow.gguf"),
    "gpus": 2,
    "borrow": True,
    "drain_within": "20s",
    "idle": "4s",
}
WIDE = {
    "command": ["/usr/bin/python3", str(Path(__file__).with_name("group_engine.py")), "{socket}"],
    "nodes": 2,
    "walltime": "10m",
    "ready_within": "60s",
    "drain_within": "2s",
    "idle": "3s",
}
WEIGHTS = INSIDE / "models/weights"
WEIGHTS_SIZE = 24 << 20
DISK = "/run/sluice-models"
"""On each node's own disk."""
STAGED = WIDE | {
    "model": str(WEIGHTS),
    "sha256": hashlib.sha256(bytes(range(256)) * (WEIGHTS_SIZE // 256)).hexdigest(),
    "stage": DISK,
    "broadcast": "2M",
    "logs": str(INSIDE / "models/logs"),
}
SERVICES = {
    "words": MODEL,
    "wide": WIDE,
    "staged": STAGED,
    "steady": SLOW
    | {"tenant": "biology", "user": "carol", "replicas": {"least": 1, "most": 1, "slots": 4}}
    | {"paused": True},
    "grows": SLOW | {"replicas": {"least": 1, "most": 3, "slots": 2}, "callers": "*", "paused": True},
}
"""`steady` has lent replicas alone, as its tenant has no guarantee; of `grows` only those above `least` are."""
TENANTS = {
    "physics": {"borrow": True, "guarantee": {"gpus": 2}},
    "chemistry": {"guarantee": {"gpus": 6}},
    "biology": {"members": ["carol"], "borrow": True},
}
GRACE_S = 30
"""The policy's usual one: guaranteed work waits so long at most."""


@pytest.fixture(scope="module")
def site(make_shared_cluster: Callable[..., DevCluster]) -> Iterator[ServeSite]:
    """With real replicas in place of the stand-in."""

    def real(cluster: DevCluster) -> None:
        folder = cluster.layout.folder / "models"
        folder.mkdir(mode=0o755)
        make_model(folder / "counting.gguf", "counting").chmod(0o644)
        make_model(folder / "slow.gguf", "counting", layers=6, feed=4096).chmod(0o644)
        weights = folder / "weights"
        weights.write_bytes(bytes(range(256)) * (WEIGHTS_SIZE // 256))
        weights.chmod(0o644)
        for name in ("stage", "logs"):
            (folder / name).mkdir()
            (folder / name).chmod(0o1777)

    yield from serve_site.serve_site(
        make_shared_cluster, services=SERVICES, prepare=real, platform="l40s-x4", tenants=TENANTS
    )


def stream(row: dict[str, Any], number: int, begun: threading.Event | None = None) -> bytes:
    """An answer; `begun` is set when it begins to come."""
    body = {"messages": [{"role": "user", "content": "six"}], "max_tokens": number, "stream": True}
    with connect(row["port"], row["secret"], timeout=60) as connection:
        connection.sendall(request("/v1/chat/completions", body))
        first = connection.recv(1)
        if begun is not None:
            begun.set()
        return first + read_all(connection)


def ready(site: ServeSite) -> dict[str, Any]:
    site.need(waiting=1)
    (row,) = site.until(lambda: list(site.replicas().values()), lambda rows: len(rows) == 1)
    return dict(row)


def test_from_nothing_to_the_first_words(site: ServeSite) -> None:
    began = time.monotonic()
    row = ready(site)
    shown = time.monotonic()
    assert words_of(stream(row, 30)) == (counted(6, 30), "length")
    print(f"ready after {shown - began:.2f} s, first stream after {time.monotonic() - began:.2f} s")
    assert row["abilities"]["resume"] == "tokens" and row["slots"] == 4
    ((job, _, _),) = site.jobs()
    assert row["job"] == job


def test_another_tenant_of_the_node_gets_nothing(site: ServeSite) -> None:
    row = ready(site)
    tried = (
        "import glob, os, socket, sys\n"
        "found = glob.glob('/tmp/sluice-replica.*/engine.sock') + glob.glob('/tmp/sluice-replica.*')\n"
        "print([os.access(one, os.R_OK) or os.access(one, os.X_OK) for one in found])\n"
        "secret = sys.stdin.read()\n"
        "print(any(secret in open(f'/proc/{p}/cmdline').read() for p in os.listdir('/proc') if p.isdigit()))\n"
        "s = socket.create_connection(('127.0.0.1', int(sys.argv[1])), 10)\n"
        "s.sendall(b'GET /v1/models HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n')\n"
        "got = b''\n"
        "try:\n"
        "    while piece := s.recv(100): got += piece\n"
        "except ConnectionResetError: pass\n"
        "print(b'HTTP' in got)\n"
    )
    said = site.cluster.run(
        ["python3", "-c", tried, str(row["port"])], node=row["host"], user="mallory", input_text=row["secret"]
    ).stdout.splitlines()
    assert said[0].count("False") >= 1 and "True" not in said[0], said
    assert said[1:] == ["False", "False"], said
    with connect(row["port"], "0" * 64) as connection:
        assert read_all(connection) == b""


def test_preempted_it_finishes_what_it_has(site: ServeSite) -> None:
    row = ready(site)
    got: list[bytes] = []
    begun = threading.Event()
    thread = threading.Thread(target=lambda: got.append(stream(row, 1900, begun)))
    thread.start()
    assert begun.wait(60)
    site.cluster.run(["scancel", "--signal=TERM", "--batch", str(row["job"])])
    site.until(
        lambda: site.replicas("words", "draining"), lambda found: row["launch"] in found or not thread.is_alive()
    )
    thread.join(60)
    assert words_of(got[0]) == (counted(6, 1900), "length")
    site.until(site.jobs, lambda jobs: row["job"] not in [job for job, _, _ in jobs])


def command_of(site: ServeSite, row: dict[str, Any], pid: str) -> bytes:
    done = site.cluster.run(["cat", f"/proc/{pid}/cmdline"], node=row["host"], check=False)
    return done.stdout.encode()


def test_nothing_is_left_of_a_killed_replica(site: ServeSite) -> None:
    row = ready(site)
    pids = site.cluster.run(["scontrol", "listpids", str(row["job"])], node=row["host"]).stdout.split("\n")[1:]
    own = [pid for pid in (line.split()[0] for line in pids if line) if b"serve.replica" in command_of(site, row, pid)]
    assert len(own) == 1, pids
    site.cluster.run(["kill", "-KILL", *own], node=row["host"])
    site.until(site.jobs, lambda jobs: row["job"] not in [job for job, _, _ in jobs])
    (fresh,) = site.until(
        lambda: list(site.replicas().values()), lambda rows: len(rows) == 1 and rows[0]["job"] != row["job"]
    )
    assert words_of(stream(fresh, 10)) == (counted(6, 10), "length")
    site.empty()
    left = site.cluster.run(["sh", "-c", "ps -eo user,args | grep -c '[x]llamacpp_server' || true"], node=row["host"])
    assert left.stdout.strip() == "0"


def parts(row: dict[str, Any]) -> list[list[str]]:
    """Rank, node and process of each part of the engine on two nodes."""
    with connect(row["port"], row["secret"], timeout=60) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.0\r\nhost: x\r\n\r\n")
        return [one.split() for one in json.loads(read_all(connection).partition(b"\r\n\r\n")[2])["data"]]


def test_a_replica_over_two_nodes_lives_and_dies_as_one(site: ServeSite) -> None:
    site.empty()
    site.need("wide", waiting=1)
    (row,) = site.until(lambda: list(site.replicas("wide").values()), lambda rows: len(rows) == 1)
    found = parts(row)
    assert [(rank, node) for rank, node, _ in found] == [("0", "n1"), ("1", "n2")]
    site.cluster.run(["pkill", "-KILL", "-f", "[g]roup_engine.py"], node="n2")
    site.until(lambda: site.jobs("wide"), lambda jobs: row["job"] not in [job for job, _, _ in jobs])
    ended = "the engine's part on another node has ended: n2: the engine has ended: signal SIGKILL"
    site.until(lambda: site.cluster.log_tail("replicad@ctl1", 200), lambda said: ended in said)
    (fresh,) = site.until(
        lambda: list(site.replicas("wide").values()), lambda rows: [one["job"] > row["job"] for one in rows] == [True]
    )
    assert [node for _, node, _ in parts(fresh)] == ["n1", "n2"]
    site.empty("wide")
    left = site.cluster.run(["sh", "-c", "ps -eo args | grep -c '[g]roup_engine' || true"], node="n2")
    assert left.stdout.strip() == "0"


def on(site: ServeSite, node: str, script: str) -> str:
    """What a shell says on a node, as root."""
    return site.cluster.run(["sh", "-c", script], node=node).stdout.strip()


def test_the_model_gets_from_node_to_node_whatever_happens_on_the_way(site: ServeSite) -> None:
    """The first node is killed while it gives, what it gives is damaged, the other one's disk is full."""
    for node in ("n1", "n2"):
        on(site, node, f"install -d -m 1777 {DISK}")
    copy = f"{DISK}/sluice-*/weights.*/model"
    whole = f"cmp -s {copy} {WEIGHTS} && echo whole || echo not"
    coming = f"ls -d {DISK}/sluice-*/.part.* 2>/dev/null || true"

    site.need("staged", waiting=1)
    site.until(lambda: on(site, "n2", coming))
    (first,) = [job for job, _, _ in site.jobs("staged", "RUNNING")]
    on(site, "n1", "pkill -KILL -f '[s]luice.serve.replica.main' || pkill -KILL -f '[s]luice-replica'")
    rows = site.until(lambda: list(site.replicas("staged").values()), timeout=120)
    assert [one["job"] > first for one in rows] == [True]
    assert [on(site, node, whole) for node in ("n1", "n2")] == ["whole", "whole"] and not on(site, "n2", coming)
    assert [node for _, node, _ in parts(rows[0])] == ["n1", "n2"]

    logs = site.cluster.layout.folder / "models/logs"

    def said() -> str:
        return "".join(one.read_text(errors="replace") for one in logs.iterdir())

    taken = re.search(r"member-staged rank=1 copied=(\d+) taken=(\d+)", said())
    assert taken is not None and int(taken[1]) == WEIGHTS_SIZE and int(taken[2]) > 0

    site.empty("staged")
    on(site, "n2", f"rm -rf {DISK}/sluice-*")
    on(site, "n1", f"printf xx | dd of=$(ls {copy}) bs=1 seek=9000000 conv=notrunc status=none")
    site.need("staged", waiting=1)
    site.until(lambda: list(site.replicas("staged").values()), timeout=120)
    assert on(site, "n2", whole) == "whole" and "not what its SHA-256 says" in said()

    site.empty("staged")
    on(site, "n2", f"rm -rf {DISK}/sluice-*; mount -t tmpfs -o size=8m,mode=1777 small {DISK}")
    site.need("staged", waiting=1)
    site.until(lambda: "n2: stage " in site.cluster.log_tail("replicad@ctl1", 200), timeout=120)
    assert "the model needs 24M, and 7" in site.cluster.log_tail("replicad@ctl1", 200)
    site.need("staged")
    on(site, "n2", f"umount -l {DISK}")
    site.empty("staged")


# ---- while clients ask all the time: GPUs are lent, and replicas handed over ----


@pytest.fixture(scope="module")
def gateway(site: ServeSite) -> tuple[str, str]:
    """Its address, and a key."""
    words = ["sluice", "token", "create", "carol", "--for", "1h", "--scope", "serve"]
    key = site.cluster.run(words, node="ctl1", cwd="/").stdout.strip()
    site.cluster.run(["chgrp", "sluice-gateway", "/etc/sluice/tokens.json"], node="ctl1", cwd="/")
    return f"http://127.0.1.1:{site.cluster.facts['environment']['SLUICE_GATEWAY_PORT']}/v1", key


def qos(site: ServeSite) -> dict[str, str]:
    """Of the jobs of the service `grows` that run, by launch."""
    lines = site.cluster.run(["squeue", "--noheader", "--all", "--states=RUNNING", "--format=%j %q"]).stdout.split("\n")
    named = [line.rpartition(".")[2].split() for line in lines if line.startswith("sluice-serve.grows.")]
    return dict(named)


def test_gpus_are_lent_and_taken_back_and_lent_again(site: ServeSite, gateway: tuple[str, str]) -> None:
    """Three replicas have six of eight GPUs; guaranteed work comes for six."""
    site.pause("grows", paused=False)
    with Traffic(*gateway, "grows", clients=6) as asking:
        site.until(lambda: site.replicas("grows"), lambda rows: len(rows) == 3)
        before = qos(site)
        assert sorted(before.values()) == ["physics", "sluice_over", "sluice_over"]
        began = time.monotonic()
        words = ("-Achemistry", "--gres=gpu:2", "--mem=10M")
        batch = [submit(site.cluster, *words, user="mallory", cwd="/") for _ in range(3)]
        site.until(lambda: {state(site.cluster, job) for job in batch}, lambda states: states == {"RUNNING"})
        took = time.monotonic() - began
        site.until(lambda: site.replicas("grows"), lambda rows: len(rows) == 1)
        (own,) = site.replicas("grows")
        assert before[own] == "physics"
        asked = asking.asked
        site.until(lambda: asking.asked > asked + 4)
        site.cluster.run(["scancel", *batch])
        began = time.monotonic()
        site.until(lambda: site.replicas("grows"), lambda rows: len(rows) == 3)
        print(f"taken back in {took:.1f} s, lent again in {time.monotonic() - began:.1f} s")
        assert took < GRACE_S + 10 and own in site.replicas("grows")
        asking.clients = 0
        site.until(lambda: qos(site), lambda found: found == {own: "physics"})
    assert asking.asked > asked and not asking.failed
    site.pause("grows", paused=True)


@pytest.fixture(scope="module")
def asking(site: ServeSite, gateway: tuple[str, str]) -> Iterator[Traffic]:
    """Clients of the service `steady`, during all tests that follow."""
    site.pause("steady", paused=False)
    site.watched = "steady"
    site.until(lambda: site.replicas("steady"))
    with Traffic(*gateway, "steady") as traffic:
        yield traffic


@contextmanager
def replaced(site: ServeSite, asking: Traffic, *, notice: bool = True) -> Iterator[dict[str, Any]]:
    """What happens in it to the replica that is given brings another one, and no client sees it. `notice`: one is ready
    at each moment."""
    (old,) = site.until(lambda: list(site.replicas("steady").values()), lambda rows: len(rows) == 1)
    site.until(lambda: len(site.jobs("steady")) == 1)
    asked, looks = asking.asked, len(site.short)
    began = time.monotonic()
    yield old
    site.until(lambda: set(site.replicas("steady")), lambda now: len(now) == 1 and old["launch"] not in now)
    site.until(lambda: site.jobs("steady"), lambda jobs: len(jobs) == 1 and jobs[0][0] != old["job"])
    print(f"handed over in {time.monotonic() - began:.1f} s")
    assert not notice or all(site.short[looks:]), "one was ready at each moment"
    site.until(lambda: asking.asked >= asked + 4)
    assert not asking.failed


def test_a_drained_node(site: ServeSite, asking: Traffic) -> None:
    with replaced(site, asking) as old:
        site.cluster.run(["scontrol", "update", f"NodeName={old['host']}", "State=DRAIN", "Reason=fan"])
    site.cluster.run(["scontrol", "update", f"NodeName={old['host']}", "State=RESUME"])


def test_maintenance_of_the_cluster(site: ServeSite, asking: Traffic) -> None:
    with replaced(site, asking) as old:
        words = ["ReservationName=m", "StartTime=now+75", "Duration=60", "Users=root", "Flags=MAINT,IGNORE_JOBS"]
        site.cluster.run(["scontrol", "create", "reservation", *words, f"Nodes={old['host']}"])
    site.cluster.run(["scontrol", "delete", "ReservationName=m"])


@pytest.mark.parametrize("mode", ["requeue", "cancel"])
def test_preemption(site: ServeSite, asking: Traffic, mode: str) -> None:
    """Guaranteed work takes the whole node, after its successor is ready on the other one."""
    site.cluster.run(["sacctmgr", "--immediate", "modify", "qos", "sluice_over", "set", f"PreemptMode={mode}"])
    with replaced(site, asking) as old:
        batch = submit(
            site.cluster, "-Achemistry", "--gres=gpu:4", f"-w{old['host']}", "--mem=10M", user="mallory", cwd="/"
        )
    site.until(lambda: state(site.cluster, batch), lambda now: now == "RUNNING")
    site.cluster.run(["scancel", batch])


def test_an_end_that_is_brought_forward(site: ServeSite, asking: Traffic) -> None:
    """As preemption does at sites whose Slurm signals job steps alone."""
    with replaced(site, asking) as old:
        site.cluster.run(["scontrol", "update", f"JobId={old['job']}", "TimeLimit=1"])


def test_requeue(site: ServeSite, asking: Traffic) -> None:
    """Slurm refuses it; where somebody has allowed it, there is no notice, and the job is not waited for."""
    with replaced(site, asking, notice=False) as old:
        refused = site.cluster.run(["scontrol", "requeue", str(old["job"])], check=False)
        assert refused.returncode != 0
        site.cluster.run(["scontrol", "update", f"JobId={old['job']}", "Requeue=1"])
        site.cluster.run(["scontrol", "requeue", str(old["job"])])


def test_a_node_fails(site: ServeSite, asking: Traffic) -> None:
    with replaced(site, asking, notice=False) as old:
        node, job = str(old["host"]), str(old["job"])
        pids = site.cluster.run(["scontrol", "listpids", job], node=node).stdout.split("\n")[1:]
        site.cluster.stop_daemon(f"slurmd@{node}", number=9)
        site.cluster.run(["sh", "-c", f"pkill -KILL -f 'slurmstepd: .{job}\\.'"], node=node, check=False)
        site.cluster.run(["kill", "-KILL", *(line.split()[0] for line in pids if line)], node=node, check=False)
        site.cluster.run(["scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=power"])
    site.cluster.start_daemon(f"slurmd@{node}")
    site.cluster.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=False)  # or is back already
    site.until(site.cluster.node_states, lambda nodes: all(one.state in ("idle", "mixed") for one in nodes))
