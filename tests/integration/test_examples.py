"""examples/: each file's comment is a session at a terminal, which is typed here again; `...` stands for any text."""

from __future__ import annotations

import doctest
import itertools
import json
import re
import shutil
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
from policy.node import FILE_NAME, NodePolicy
from policy.traces import NodeTraces
from sluice.client import ApiError, Client
from tests.integration.jobs import shown, submit
from tests.integration.private_slurm import free_ports
from tests.integration.settled import PATIENCE, await_policy, until
from tests.otlp_receiver import OtlpReceiver, attribute

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
    (port,) = free_ports(1)
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


def test_a_pipeline_and_its_jobs_are_one_trace(cluster: DevCluster) -> None:
    """From TRACEPARENT of the submitting environment to spans at a receiver: a requeued job, an array that waits for
    it, a step, and who gets which parent. Without the plugin's `trace`, a job's environment stays as it was."""
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    pipeline = {"TRACEPARENT": f"00-{trace}-{parent}-01"}
    stack, node_policy = cluster.layout.slurm / "plugstack.conf", cluster.layout.slurm / FILE_NAME
    before = stack.read_text(), node_policy.read_bytes() if node_policy.exists() else None
    output = cluster.layout.scratch / "trace"
    output.mkdir()
    output.chmod(0o777)
    say = f"echo $TRACEPARENT >> {INSIDE}/scratch/trace/$SLURM_JOB_ID"
    with OtlpReceiver() as receiver:
        try:
            stack.write_text(before[0].replace("spank_sluice.so", "spank_sluice.so trace"))
            settings = NodeTraces(endpoint=receiver.endpoint, settle=1, headers_file="/etc/slurm/none")
            node_policy.write_text(NodePolicy(traces=settings).render())
            until(
                (cluster.layout.state / "sluice.spans/state.json").exists,
                shows=lambda: cluster.log_tail("controllerd@ctl1", 20),
            )
            twice = f"{say}; srun sh -c '{say}'; exec sleep 600"
            first = submit(cluster, "--gres=gpu:1", "--mem=10M", "--requeue", wrap=twice, env=pipeline, cwd="/")
            array = submit(
                cluster, "--mem=10M", "--array=0-1", f"--dependency=afterany:{first}", wrap=say, env=pipeline, cwd="/"
            )
            alone = cluster.run(
                ["srun", "--mem=10M", "sh", "-c", "echo $TRACEPARENT"], user="alice", cwd="/"
            ).stdout.strip()
            until(lambda: len((output / first).read_text().splitlines()) == 2)
            known = cluster.layout.state / "sluice.spans/state.json"
            until(lambda: json.loads(known.read_text())["waits_for"].get(array), lambda one: one == [int(first)])
            cluster.run(["scontrol", "requeue", first])
            until(lambda: shown(cluster, first)["Restarts"] == "1")
            cluster.run(["scancel", first])
            own_of_alone = alone.split("-")[2]
            until(
                lambda: (own_of_alone in receiver.by_id(), tasks_of(receiver, array)),
                lambda found: found == (True, ["0", "1"]),
                shows=lambda: spans_seen(cluster),
            )
            until(lambda: receiver.jobs("slurm.job.id", first))
        finally:
            stack.write_text(before[0])
            node_policy.write_bytes(before[1] or NodePolicy().render().encode())
    spans = receiver.by_id()
    [job] = receiver.jobs("slurm.job.id", first)
    own = f"00-{trace}-{job.span_id.hex()}-01"
    assert (output / first).read_text().splitlines()[:2] == [own, own]
    assert job.parent_span_id.hex() == parent and attribute(job, "user.name") == "alice"
    attempts = [span.parent_span_id for span in spans.values() if span.name == "slurm.job.attempt"]
    assert attempts.count(job.span_id) in (1, 2)  # accounting may have no row of one that was cancelled as it waited
    for task in receiver.jobs("slurm.array.job_id", array):
        assert (task.trace_id.hex(), task.parent_span_id.hex()) == (trace, parent)
        assert [link.span_id for link in task.links] == [job.span_id]
        number = attribute(task, "slurm.job.id")
        assert (output / number).read_text().split() == [f"00-{trace}-{task.span_id.hex()}-01"]
    begun = spans[own_of_alone]
    assert (begun.name, begun.trace_id.hex(), begun.parent_span_id) == ("slurm.job", alone.split("-")[1], b"")
    names = {span.name for span in spans.values() if span.trace_id.hex() == trace}
    assert names >= {
        "slurm.job.wait.reason",
        "slurm.job.decision",
        "slurm.job.run",
        "slurm.step",
        "slurm.node",
        "slurm.node.limits",
        "slurm.node.prolog",
        *(f"slurm.node.prolog.{stage}" for stage in ("drivers", "health", "grant", "power")),
        "slurm.node.epilog",
        *(f"slurm.node.epilog.{stage}" for stage in ("reclaim", "reset", "return")),
    }
    for one in (job, begun):  # of sbatch and srun: the client's part, and slurmctld's
        children = {span.parent_span_id: span for span in spans.values() if span.name.startswith("slurm.job.submit")}
        submission = children[one.span_id]
        checks = children[submission.span_id]
        assert one.start_time_unix_nano <= submission.start_time_unix_nano < checks.start_time_unix_nano
        assert checks.start_time_unix_nano <= checks.end_time_unix_nano == submission.end_time_unix_nano
    within = [span for span in spans.values() if span.name != "slurm.job"]
    assert all(span.parent_span_id.hex() in spans for span in within)
    assert submit_and_read(cluster, output, say) == ""


def tasks_of(receiver: OtlpReceiver, array: str) -> list[str]:
    """The tasks whose jobs' spans came."""
    spans = receiver.jobs("slurm.array.job_id", array)
    return sorted(attribute(span, "slurm.array.task_id") for span in spans)


def spans_seen(cluster: DevCluster) -> str:
    """Where spans are that do not arrive."""
    folder = cluster.layout.state / "sluice.spans"
    files = [f"{path.name}: {path.read_bytes()[:1000]!r}" for path in folder.iterdir()]
    columns = ["-D", "-n", "-P", "-o", "JobID,JobIDRaw,State,Submit,Start,End,AdminComment"]
    accounted = cluster.run(["sacct", "-a", *columns]).stdout
    waits = cluster.run(["squeue", "-a", "-t", "all", "-o", "%i %A %T %r %S %N"]).stdout
    duties = cluster.run(["sluice", "controllerd", "status"], node="ctl1", check=False).stdout
    return "\n".join([accounted, waits, duties, *files, *cluster.log_tail("controllerd@ctl1", 500).splitlines()[-60:]])


def submit_and_read(cluster: DevCluster, output: Path, say: str) -> str:
    """What a job says of its trace now."""
    job = submit(cluster, "--mem=10M", wrap=say, cwd="/")
    until((output / job).exists)
    return until(lambda: (output / job).read_text(), lambda text: text.endswith("\n")).strip()
