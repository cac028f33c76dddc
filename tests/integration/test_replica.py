"""sluice-replica in jobs that replicad launches: munge, signals and users of a node, and llama.cpp's own server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.layout import INSIDE
from tests.integration import serve_site
from tests.integration.serve_site import ServeSite
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
WIDE = {
    "command": ["/usr/bin/python3", str(Path(__file__).with_name("group_engine.py")), "{socket}"],
    "nodes": 2,
    "walltime": "10m",
    "ready_within": "60s",
    "drain_within": "2s",
    "idle": "3s",
}


@pytest.fixture(scope="module")
def site(make_shared_cluster: Callable[..., DevCluster]) -> Iterator[ServeSite]:
    """With real replicas in place of the stand-in."""

    def real(cluster: DevCluster) -> None:
        folder = cluster.layout.folder / "models"
        folder.mkdir(mode=0o755)
        make_model(folder / "counting.gguf", "counting").chmod(0o644)
        (folder / "stage").mkdir()
        (folder / "stage").chmod(0o1777)

    patch = pytest.MonkeyPatch()
    patch.setattr(serve_site, "stand_in", real)
    services = {"words": MODEL, "wide": WIDE, serve_site.REAL: {"command": ["/bin/true", ""]}}
    patch.setattr(serve_site, "SERVICES", services)
    yield from serve_site.serve_site(make_shared_cluster)
    patch.undo()


def stream(row: dict[str, Any], number: int) -> bytes:
    body = {"messages": [{"role": "user", "content": "six"}], "max_tokens": number, "stream": True}
    with connect(row["port"], row["secret"], timeout=60) as connection:
        connection.sendall(request("/v1/chat/completions", body))
        return read_all(connection)


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
    thread = threading.Thread(target=lambda: got.append(stream(row, 1900)))
    thread.start()
    time.sleep(0.2)
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
    assert (
        "the engine's part on another node has ended: n2: the engine has ended: signal SIGKILL"
        in site.cluster.log_tail("replicad@ctl1", 200)
    )
    (fresh,) = site.until(
        lambda: list(site.replicas("wide").values()), lambda rows: [one["job"] > row["job"] for one in rows] == [True]
    )
    assert [node for _, node, _ in parts(fresh)] == ["n1", "n2"]
    site.empty("wide")
    left = site.cluster.run(["sh", "-c", "ps -eo args | grep -c '[g]roup_engine' || true"], node="n2")
    assert left.stdout.strip() == "0"
