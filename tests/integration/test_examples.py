"""examples/: each file's comment is a session at a terminal, which is typed here again; `...` stands for any text."""

from __future__ import annotations

import doctest
import itertools
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.layout import INSIDE
from sluice.client import ApiError, Client
from tests.integration.settled import PATIENCE, await_policy, until

pytestmark = pytest.mark.cluster

EXAMPLES = Path(__file__).parents[2] / "examples"
POLICY = EXAMPLES / "policy.yaml"
PROGRAMS = sorted([*EXAMPLES.glob("*.sh"), *EXAMPLES.glob("*.py")])
NODES = ["l40s-1", "l40s-2"]
LINES = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
DESCRIPTION: dict[str, Any] = {
    "nodes": [{"names": ",".join(NODES), "platform": "l40s-x4"}],
    "users": [{"name": name} for name in ("alice", "bob", "carol", "sluice-web")],
    "agent": True,
    "controllerd": True,
    "sluice": {"level": "place", "policy": "", "supervise": True, "lease": 2.5},
    "slurm_conf": "PriorityType=priority/multifactor\nSlurmctldTimeout=6\n",
}
WEB = "sluice-web"
HERE = {"SHARDS": "--migrate-shards", "START": ""}
"""Of the examples' variables, those that this cluster needs: it has shards already, and no systemd."""
IN_FOLDER = f"""
mkdir -p {INSIDE}/scratch/state
test $(id -u) != 0 || mount --bind {INSIDE}/scratch/state /var/lib/sluice
cd {INSIDE}/scratch/examples
exec sh -c "$1" 2>&1
"""


@dataclass
class Typed:
    """A command, and what it prints."""

    user: str
    host: str
    command: str
    prints: str


def session(path: Path) -> Iterator[Typed]:
    """What the comment at the top of a file says that one types."""
    comment = itertools.takewhile(lambda line: re.match(r"#(!| |$)", line), path.read_text().splitlines())
    _, *typed = re.split(r"^# (\w+)@(\S+)\$ (.*)\n", "".join(f"{line}\n" for line in comment), flags=re.MULTILINE)
    for user, host, command, prints in zip(*[iter(typed)] * 4, strict=True):
        yield Typed(user, host, command, re.sub("^# ?", "", prints, flags=re.MULTILINE))


def replay(cluster: DevCluster, path: Path) -> None:
    """Type it."""
    steps = list(session(path))
    assert steps, f"{path}: no line `# USER@HOST$ COMMAND` in the comment at its top"
    for step in steps:
        words = ["unshare", "-m"] if step.user == "root" else []
        words += ["sh", "-c", IN_FOLDER, "sh", step.command]
        done = cluster.run(words, user=step.user, node=step.host, env=HERE, check=False, timeout=2 * PATIENCE)
        if not doctest.OutputChecker().check_output(step.prints, done.stdout, LINES):
            pytest.fail(f"{path.name}: {step.command}: it prints\n{done.stdout}\nand not\n{step.prints}", pytrace=False)


@pytest.fixture(scope="module")
def cluster(make_shared_cluster: Callable[..., DevCluster]) -> DevCluster:
    """With the tenants of policy.yaml, which the others use."""
    made = make_shared_cluster(DESCRIPTION)
    shutil.copytree(EXAMPLES, made.layout.scratch / "examples")
    (made.layout.scratch / "examples").chmod(0o777)
    replay(made, POLICY)
    await_policy(made)
    return made


@contextmanager
def one_gpu_of_each_node_taken(cluster: DevCluster) -> Iterator[None]:
    """So that only two of the three others are of one NUMA node."""
    words = ["sbatch", "--parsable", "--gres=gpu:1", "-o/dev/null", "--wrap=exec sleep 600", "-w"]
    jobs = [cluster.run([*words, node], user="alice", cwd="/").stdout.strip() for node in NODES]
    until(lambda: cluster.run(["squeue", "-h", "-t", "R", "-u", "alice"]).stdout.count("\n") == len(jobs))
    try:
        yield
    finally:
        cluster.run(["scancel", *jobs])


@contextmanager
def primary_that_returns(cluster: DevCluster) -> Iterator[None]:
    """What `systemctl start slurmctld` is elsewhere, once the backup leads and answers."""

    def start() -> None:
        lease = cluster.layout.state / "sluice.lease"
        until(lambda: "host ctl2" in lease.read_text())
        until(lambda: cluster.run(["squeue", "-h"], check=False).returncode == 0)
        cluster.start_daemon("slurmctld@ctl1")

    with ThreadPoolExecutor(1) as other:
        started = other.submit(start)
        yield
        started.result()


@contextmanager
def web_server(cluster: DevCluster) -> Iterator[None]:
    """`sluice web` and root's helper, and alice's token where the client looks for it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    create = ["sluice", "token", "create", "alice", "--for", "1h", "--scope", "read", "--scope", "write"]
    token = cluster.run(create, node="ctl1", cwd="/").stdout
    cluster.run(["chgrp", WEB, "/etc/sluice/tokens.json"], node="ctl1", cwd="/")
    keep = "umask 077; mkdir -p ~/.config/sluice; cat >~/.config/sluice/token"
    cluster.run(["sh", "-c", keep], user="alice", input_text=token)
    cluster.start_program("actd", ["sluice", "actd"], node="ctl1")
    cluster.start_program("web", ["sluice", "web", "--port", str(port)], node="ctl1", user=WEB)
    HERE["PATH"] = f"{Path(sys.executable).parent}:{cluster.environment()['PATH']}"  # where sluice.client is installed
    HERE["SLUICE_URL"] = f"http://127.0.0.1:{port}"
    with Client(HERE["SLUICE_URL"], token=token.strip(), retries=1) as client:

        def ready() -> bool:
            try:
                return client.overview().parts["jobs"].at is not None
            except ApiError:
                return False

        until(ready, shows=lambda: cluster.log_tail("web", 20))
    yield


AROUND = {
    "affinity.sh": one_gpu_of_each_node_taken,
    "failover-drill.sh": primary_that_returns,
    "rest_client.py": web_server,
}


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_an_example_prints_what_its_comment_says(cluster: DevCluster, path: Path) -> None:
    cluster.wait_idle(NODES, timeout=PATIENCE)
    with AROUND.get(path.name, nullcontext)(cluster):
        replay(cluster, path)


def test_the_table_has_every_example() -> None:
    named = re.findall(r"^\| `(\S+)` \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    folders = [f"{path.name}/" for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert sorted(named) == sorted([*(path.name for path in [*PROGRAMS, POLICY]), *folders])
