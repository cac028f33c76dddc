"""site_factor/sluice, decisions, `sluice explain` and `sluice shadow` on real daemons."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from sluice.base.files import write_atomic
from sluice.cli.explain import render
from sluice.explain.decisions import Rank, check_file, list_files
from sluice.explain.explanation import explain_job, parse_job
from sluice.explain.order_table import read_order_table
from tests.integration.jobs import sbatch
from tests.integration.private_slurm import free_ports
from tests.integration.settled import await_policy, set_level, until
from tests.integration.versions import NATIVE_FIRST

pytestmark = pytest.mark.cluster

POLICY = """[global]
weight.size = 800
weight.deadline = 50000
weight.fair-share = 1000
size-full-gpus = 8
laxity-horizon-s = 7200
fair-share-half-life-s = 86400
deadlines = yes
placement = sluice
[tenant physics]
shares = 10
deadline = yes
[tenant biology]
shares = 30
deadline = yes
"""


def compiled(body: str) -> str:
    """The policy as a file's text."""
    text = f"sluice-policy 1.0\ngenerated-s = {int(time.time())}\nsource = test\n{body}"
    return f"{text}checksum = crc32:{zlib.crc32(text.encode()):08x}\n"


SLUICE = [sys.executable, "-m", "sluice.main"]


def description(**more: Any) -> dict[str, Any]:
    return {
        "nodes": [{"names": "n[1-4]", "platform": "dgx-h100"}],
        "accounts": [{"name": "physics"}, {"name": "biology"}],
        "users": [
            {"name": "alice", "accounts": ["physics"]},
            {"name": "bob", "accounts": ["biology"]},
            {"name": "carol", "accounts": ["biology"]},
            {"name": "dave", "accounts": ["biology"]},
            {"name": "erin", "accounts": ["physics"]},
        ],
        "controllers": 1,
        "slurm_conf": "PriorityType=priority/multifactor\nPriorityCalcPeriod=60\nPrivateData=jobs,usage\n"  # an hour
        "SchedulerParameters=bf_interval=2,sched_interval=2\n",
        "sluice": {"level": "place", "policy": compiled(POLICY)},
        **more,
    }


@pytest.fixture(scope="module", params=NATIVE_FIRST)
def system(request: pytest.FixtureRequest) -> str:
    """Whose Slurm: this machine's, or that of the Debian 13 tree."""
    return str(request.param)


@pytest.fixture(scope="module")
def cluster(system: str, request: pytest.FixtureRequest, make_shared_cluster: Callable[..., DevCluster]) -> DevCluster:
    if system == "native":
        return make_shared_cluster(description())
    return make_shared_cluster(description(), root=request.getfixturevalue("trixie_root"))


@pytest.fixture
def native(system: str, cluster: DevCluster) -> DevCluster:
    """The cluster in which this Python runs on every host."""
    if system != "native":
        pytest.skip("the Debian 13 tree has another Python")
    return cluster


@pytest.fixture(autouse=True)
def _clean(cluster: DevCluster) -> Iterator[None]:
    set_level(cluster, "place")
    yield
    for user in ("alice", "bob", "carol", "dave", "erin"):
        cluster.run(["scancel", "--user", user])
    until(lambda: cluster.run(["squeue", "-h", "-a"]).stdout, lambda left: not left)


def submit(cluster: DevCluster, user: str, *options: str, wrap: str = "exec sleep 600") -> str:
    return sbatch(cluster, "-n1", "--mem=1G", "--time=10", *options, f"--wrap={wrap}", user=user)


def fill(cluster: DevCluster) -> list[str]:
    """All GPUs are taken."""
    jobs = [submit(cluster, "alice", "--gres=gpu:8") for _ in range(4)]
    until(lambda: states(cluster), lambda seen: all(seen.get(job) == "RUNNING" for job in jobs))
    return jobs


def states(cluster: DevCluster) -> dict[str, str]:
    lines = cluster.run(["squeue", "-h", "-a", "-o", "%i %T"]).stdout.splitlines()
    return {line.split()[0]: line.split()[1] for line in lines}


def sites(cluster: DevCluster) -> dict[str, int]:
    """What sprio shows as SITE."""
    lines = cluster.run(["sprio", "-h", "-o", "%i %S"]).stdout.splitlines()
    return {line.split()[0]: int(line.split()[1]) for line in lines}


def decisions(cluster: DevCluster) -> Path:
    return cluster.layout.state / "sluice.records"


def explain(cluster: DevCluster, job: str) -> dict[str, Any]:
    document = explain_job(decisions(cluster), parse_job(job))
    assert document is not None
    return document


def test_order_is_the_cores_and_sprio_shows_it(cluster: DevCluster) -> None:
    fill(cluster)
    large = submit(cluster, "alice", "--gres=gpu:8")
    small = submit(cluster, "alice", "--gres=gpu:2")
    other = submit(cluster, "bob", "--gres=gpu:2")
    urgent = submit(cluster, "bob", "--gres=gpu:8", "--deadline=now+30minutes")
    seen = until(
        lambda: sites(cluster), lambda seen: len(seen) == 4 and seen[other] > seen[small] and seen[urgent] > 20000
    )
    assert seen[large] - seen[small] == 600, "six GPUs more of eight, by a weight of 800"
    # The deadline leaves 20 of 120 minutes to spare.
    assert 0.75 * 50000 < seen[urgent] < 0.95 * 50000
    # In sprio's words and in ours: the same jobs in the same order.

    def both() -> tuple[dict[str, int], dict[str, Rank]]:
        table = read_order_table(decisions(cluster))
        return sites(cluster), {str(job): rank for job, (rank, _) in table.jobs.items()} if table else {}

    _, ranks = until(both, lambda seen: {job: rank.site for job, rank in seen[1].items()} == seen[0] != {})
    assert sorted(ranks, key=lambda job: ranks[job].place) == [urgent, large, other, small]
    assert ranks[large].terms["size"] == 800
    assert ranks[large].weights == {"size": 800, "deadline": 50000, "fair-share": 1000} | dict.fromkeys(
        ("priority", "age", "service", "time"), 0
    )


def test_a_change_that_cannot_wait_is_applied_at_once(cluster: DevCluster) -> None:
    """Long before PriorityCalcPeriod, which is an hour here and a minute at least."""
    fill(cluster)
    job = submit(cluster, "bob", "--gres=gpu:8", "--deadline=now+30minutes")
    until(lambda: sites(cluster), lambda seen: seen.get(job, 0) > 20000)
    policy = cluster.layout.slurm / "sluice.policy"
    before = policy.read_bytes()
    try:
        policy.write_text(compiled(POLICY.replace("weight.deadline = 50000", "weight.deadline = 100000")))
        until(lambda: sites(cluster), lambda seen: seen[job] > 70000)
    finally:
        policy.write_bytes(before)


ORDER = """[global]
weight.priority = 40000
weight.service = 600000
weight.age = 36000
weight.fair-share = {fair_share}
age-full-s = 3600
fair-share-half-life-s = 86400
starvation-s = {starvation}
placement = sluice
[tenant physics]
shares = 10
default-priority = 1000000
[tenant biology]
shares = 10
"""


def by_priority(cluster: DevCluster) -> list[str]:
    """Pending jobs as squeue orders them."""
    return cluster.run(["squeue", "-h", "-a", "-t", "PD", "-S", "-p", "-o", "%i"]).stdout.split()


def test_priority_service_age_and_starvation_order(cluster: DevCluster) -> None:
    """Times of run are expected from a user's earlier jobs: carol, dave and erin run none in other tests."""

    def put_in_force(fair_share: int, starvation: int) -> None:
        write_atomic(policy, compiled(ORDER.format(fair_share=fair_share, starvation=starvation)))
        await_policy(cluster)

    def ranks() -> dict[str, Rank]:
        table = read_order_table(decisions(cluster))
        return {str(job): rank for job, (rank, _) in table.jobs.items()} if table else {}

    policy = cluster.layout.slurm / "sluice.policy"
    before = policy.read_text()
    try:
        put_in_force(fair_share=1000, starvation=0)
        runs = [submit(cluster, "dave", "--gres=gpu:8", wrap="true") for _ in range(2)]
        until(lambda: states(cluster), lambda seen: not seen.keys() & set(runs))
        fill(cluster)
        first = submit(cluster, "carol", "--gres=gpu:8")
        fewer_gpus = submit(cluster, "carol", "--gres=gpu:2")
        privileged = submit(cluster, "erin", "--gres=gpu:8")
        short = submit(cluster, "dave", "--gres=gpu:8")
        until(ranks, lambda seen: first in seen and seen[first].terms["age"] >= 30)
        last = submit(cluster, "carol", "--gres=gpu:8")
        seen = until(ranks, lambda seen: last in seen and seen[short].remaining_s < 60)
        assert seen[first].remaining_s == 600, "nothing is known of carol's jobs"
        # Age and service wait for PriorityCalcPeriod, an hour here; with fair-share's change they are applied to all.
        begun = sites(cluster)
        put_in_force(fair_share=9000, starvation=0)
        shown = until(lambda: sites(cluster), lambda shown: all(shown[job] > begun[job] + 2000 for job in begun))
        expected = [short, privileged, fewer_gpus, first, last]
        assert sorted(shown, key=lambda job: -shown[job]) == by_priority(cluster) == expected
        aged = shown[first] - shown[last]
        assert aged >= 20, "ten a second"
        # A quarter of the GPU-seconds: two of sixty doublings.
        assert 20000 - 1 <= shown[fewer_gpus] - shown[last] <= 20000 + aged + 1
        # Jobs that waited too long are in the order of submission, whatever the weights are.
        put_in_force(fair_share=9000, starvation=1)
        shown = until(lambda: sites(cluster), lambda shown: min(shown.values()) > 1 << 30)
        expected = [first, fewer_gpus, privileged, short, last]
        assert sorted(shown, key=lambda job: -shown[job]) == by_priority(cluster) == expected
    finally:
        write_atomic(policy, before)
        await_policy(cluster)


def test_usage_survives_a_restart(cluster: DevCluster) -> None:
    jobs = fill(cluster)
    time.sleep(7)
    waiting = submit(cluster, "alice", "--gres=gpu:8")

    def used() -> float:
        table = read_order_table(decisions(cluster))
        return next((one.gpu_seconds for one in table.tenants if one.account == "physics"), 0.0) if table else 0.0

    before = until(used, lambda usage: usage > 32)
    cluster.stop_daemon("slurmctld@ctl1", number=signal.SIGTERM)
    (decisions(cluster) / "order.ranks").unlink()
    cluster.start_daemon("slurmctld@ctl1")
    until(lambda: cluster.run(["scontrol", "ping"], check=False).stdout, lambda said: "is UP" in said)
    after = until(used, lambda usage: usage > 0)
    assert after > before, "what was used, and what ran meanwhile"
    assert states(cluster)[waiting] == "PENDING"
    assert all(states(cluster)[job] == "RUNNING" for job in jobs)


def test_an_operators_site_factor_is_kept(cluster: DevCluster) -> None:
    """At once, over changes of the policy and a restart, until it is set to 0; the array's tasks have it, too."""

    def kept(job: str) -> int | None:
        document = explain_job(decisions(cluster), parse_job(job)) or {}
        return document.get("order", {}).get("operators_site_factor")

    def set_factor(job: str, factor: int) -> None:
        cluster.run(["scontrol", "update", f"jobid={job}", f"sitefactor={factor}"])

    running = fill(cluster)
    job, other = submit(cluster, "bob", "--gres=gpu:8"), submit(cluster, "bob", "--gres=gpu:8")
    array = submit(cluster, "alice", "--gres=gpu:8", "--array=1-3", "--nice=100")
    until(lambda: sites(cluster), lambda seen: len(seen) == 3 and all(0 < site < 2000 for site in seen.values()))
    set_factor(job, 77)
    set_factor(array, 7777)
    assert (sites(cluster)[job], sites(cluster)[array]) == (77, 7777)
    policy = cluster.layout.slurm / "sluice.policy"
    before = policy.read_bytes()
    try:  # all factors are set again
        policy.write_text(compiled(POLICY.replace("weight.fair-share = 1000", "weight.fair-share = 9000")))
        until(lambda: sites(cluster), lambda seen: seen[other] > 3000)
        assert (sites(cluster)[job], sites(cluster)[array]) == (77, 7777)
    finally:
        policy.write_bytes(before)
    until(lambda: (kept(job), kept(array), kept(other)), lambda seen: seen == (77, 7777, None))
    cluster.stop_daemon("slurmctld@ctl1", number=signal.SIGTERM)
    cluster.start_daemon("slurmctld@ctl1")
    until(lambda: cluster.run(["scontrol", "ping"], check=False).stdout, lambda said: "is UP" in said)
    until(lambda: sites(cluster), lambda seen: seen.get(other, 0) > 0)
    assert (sites(cluster)[job], sites(cluster)[array]) == (77, 7777)
    cluster.run(["scancel", running[0]])
    until(lambda: states(cluster), lambda seen: seen.get(f"{array}_1") == "RUNNING")
    set_factor(other, 9999)
    set_factor(job, 0)
    assert sites(cluster)[job] > 77
    assert [sites(cluster)[one] for one in (other, array)] == [9999, 7777]
    until(lambda: (kept(job), kept(other)), lambda seen: seen == (None, 9999))
    cluster.run(["scancel", running[1]])
    until(lambda: states(cluster), lambda seen: seen.get(other) == "RUNNING")
    assert kept(other) == 9999, "as it was at the start"
    log = cluster.log("slurmctld@ctl1").read_text()
    assert log.count(f"job {job}: site factor 77 was set by an operator") == 1


def test_below_place_nothing_is_ordered(cluster: DevCluster) -> None:
    set_level(cluster, "shadow")
    fill(cluster)
    job = submit(cluster, "bob", "--gres=gpu:8", "--deadline=now+30minutes")
    table = until(
        lambda: read_order_table(decisions(cluster)),
        lambda table: table is not None and int(job) in table.jobs,
    )
    assert table.jobs[int(job)][0].site > 20000, "decided and recorded"
    assert sites(cluster)[job] == 0, "but not used"


@pytest.mark.skipif(os.environ.get("SLUICE_TEST_SCALE") != "full", reason="PriorityCalcPeriod is a minute at least")
def test_what_was_ordered_is_taken_back(cluster: DevCluster) -> None:
    """Also where slurmctld was restarted in between, and an administrator's own site factor stays."""
    fill(cluster)
    job, own = submit(cluster, "bob", "--gres=gpu:8"), submit(cluster, "alice", "--gres=gpu:8")
    until(lambda: sites(cluster), lambda seen: seen.get(job, 0) > 0)
    (cluster.layout.slurm / "sluice.level").write_text("off\n")
    cluster.stop_daemon("slurmctld@ctl1", number=signal.SIGTERM)
    conf = cluster.layout.slurm / "slurm.conf"
    conf.write_text(conf.read_text().replace("PriorityCalcPeriod=60", "PriorityCalcPeriod=1"))
    cluster.start_daemon("slurmctld@ctl1")
    until(lambda: cluster.run(["scontrol", "ping"], check=False).stdout, lambda said: "is UP" in said)
    until(lambda: sites(cluster), lambda seen: seen[job] == seen[own] == 0, timeout=140)
    cluster.run(["scontrol", "update", f"job={own}", "sitefactor=77"])
    time.sleep(130)
    assert sites(cluster) == {job: 0, own: 77}


def test_every_decision_of_a_churn_replays(cluster: DevCluster) -> None:
    rng = random.Random(7)
    count = 400 if os.environ.get("SLUICE_TEST_SCALE") == "full" else 40
    jobs: list[str] = []
    for number in range(count):
        user = rng.choice(["alice", "bob"])
        ask = rng.choice(
            ["--gres=gpu:1", "--gres=gpu:2", "--gres=gpu:8", "--gres=shard:20000", "--gres=shard:5000", "-n4"]
        )
        jobs.append(submit(cluster, user, ask, f"--time={rng.randrange(1, 30)}", wrap=f"sleep {rng.randrange(1, 4)}"))
        if number % 9 == 5:
            cluster.run(["scancel", rng.choice(jobs)], check=False)
        if number % 13 == 6:
            cluster.run(["scontrol", "update", "node=n3", "state=drain", "reason=test"])
        if number % 13 == 11:
            cluster.run(["scontrol", "update", "node=n3", "state=resume"], check=False)
    cluster.run(["scontrol", "update", "node=n3", "state=resume"], check=False)
    until(lambda: states(cluster), lambda seen: not seen, timeout=240)
    checks = until(
        lambda: [check_file(path) for path in list_files(decisions(cluster))],
        lambda checks: sum(check.replayed for check in checks) > count // 2,
    )
    assert [line for check in checks for line in check.different] == []
    assert sum(check.lost for check in checks) == 0


def test_explains_a_started_and_a_waiting_job(cluster: DevCluster) -> None:
    running = fill(cluster)
    waiting = submit(cluster, "bob", "--gres=gpu:8", "--time=5")
    document = until(
        lambda: explain_job(decisions(cluster), parse_job(waiting)), lambda seen: seen and "decision" in seen
    )
    document = until(lambda: explain(cluster, waiting), lambda seen: "order" in seen)
    assert document["waiting"]["nodes"] == 4
    assert sum(entry["nodes"] for entry in document["waiting"]["nodes_by_reason"]) == 4
    assert document["waiting"]["would_start_now"] == []
    assert {term["name"] for term in document["order"]["terms"]} == {"size", "deadline", "fair-share"}
    assert (document["decision"]["planned"], document["decision"]["replayed"]) == (False, True)
    for job in running:
        started = explain(cluster, job)
        assert started["start"]["parts"][0]["node"].startswith("n")
        assert len(started["start"]["parts"][0]["gpus"]) == 8
        # A place that the planner gave is not put to the core again.
        assert started["decision"]["replayed"] is (None if started["decision"]["planned"] else True)
    cluster.run(["scancel", running[0]])
    until(lambda: states(cluster), lambda seen: seen.get(waiting) == "RUNNING")


def test_what_smaller_request_would_start_starts(cluster: DevCluster) -> None:
    """Half a node is free: four GPUs would start, eight do not."""
    running = [submit(cluster, "alice", f"--gres=gpu:{gpus}") for gpus in (8, 8, 8, 4)]
    until(lambda: states(cluster), lambda seen: all(seen.get(job) == "RUNNING" for job in running))
    waiting = submit(cluster, "bob", "--gres=gpu:8")
    document = until(
        lambda: explain_job(decisions(cluster), parse_job(waiting)),
        lambda seen: seen and seen["waiting"].get("would_start_now"),
    )
    assert document["waiting"]["would_start_now"] == [{"what": "gpus", "value": 4, "unit": ""}]
    assert (document["waiting"]["fits_now"], document["waiting"]["never"]) == (False, False)
    assert "    with 4 GPUs" in render(document)
    smaller = submit(cluster, "bob", "--gres=gpu:4", "--time=1")  # ends before any start that is reserved
    seen = until(lambda: states(cluster), lambda seen: seen.get(smaller) == "RUNNING")
    assert seen[waiting] == "PENDING"


def test_a_share_of_a_gpu_is_explained_as_it_was_chosen(cluster: DevCluster) -> None:
    job = submit(cluster, "alice", "--gres=shard:10240")
    document = until(lambda: explain_job(decisions(cluster), parse_job(job)), lambda seen: seen and "start" in seen)
    assert document["start"]["as_chosen"]
    text = "\n".join(render(document))
    assert "(10G of each)\n" in text
    assert " 0 CPUs" not in text


def test_a_job_that_is_left_to_slurm_says_why(cluster: DevCluster) -> None:
    fill(cluster)
    waiting = submit(cluster, "bob", "--gres=gpu:1", "--contiguous")
    document = until(
        lambda: explain_job(decisions(cluster), parse_job(waiting)), lambda seen: seen and "plan" in seen["waiting"]
    )
    assert document["waiting"]["plan"]["expected_start"] is None
    assert "contiguous nodes" in document["waiting"]["plan"]["reason"]


def test_decisions_are_slurm_users_only(cluster: DevCluster) -> None:
    fill(cluster)
    folder = decisions(cluster)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())
    inside = "/run/sluice-cluster/state/sluice.records"
    assert cluster.run(["ls", inside], user="alice", check=False).returncode != 0


# ---- the service ----


@pytest.fixture(scope="module")
def service(system: str, cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The explain service on the controller, started by root; its port."""
    if system != "native":
        pytest.skip("the Debian 13 tree has another Python")
    log = tmp_path_factory.mktemp("explaind") / "log"
    (port,) = free_ports(1)
    command = cluster.command([*SLUICE, "explaind", "-v", "--port", str(port)], node="ctl1", user="root")
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        until(log.read_text, lambda said: "listening" in said)
        yield port
    finally:
        process.terminate()
        process.wait(timeout=90)
    assert "unexpected" not in log.read_text()


def ask(cluster: DevCluster, port: int, user: str, job: str) -> tuple[int, str, str]:
    done = cluster.run([*SLUICE, "explain", "--json", "--port", str(port), job], user=user, check=False)
    return done.returncode, done.stdout, done.stderr


def test_users_ask_from_the_login_node(native: DevCluster, service: int) -> None:
    running = fill(native)[0]
    until(lambda: explain_job(decisions(native), parse_job(running)), lambda seen: seen and "start" in seen)
    code, out, error = ask(native, service, "alice", running)
    assert (code, error) == (0, "")
    document = json.loads(out)
    assert document["slurm"]["state"] == "RUNNING"
    assert document["slurm"]["user"] == "alice"
    assert document["start"]["parts"]
    waiting = submit(native, "bob", "--gres=gpu:8")
    until(lambda: explain_job(decisions(native), parse_job(waiting)), lambda seen: seen and "decision" in seen)
    text = native.run([*SLUICE, "explain", "--port", str(service), waiting], user="bob").stdout
    assert f"Job {waiting} of bob (biology), partition main: pending" in text
    assert "too few GPUs free" in text or "A place for it is free" in text


def test_tasks_of_an_array(native: DevCluster, service: int) -> None:
    array = submit(native, "alice", "--gres=gpu:8", "--array=3-8")
    until(lambda: list(states(native).values()).count("RUNNING"), lambda running: running == 4)
    until(lambda: explain_job(decisions(native), parse_job(array)), lambda seen: seen and "decision" in seen)
    code, out, error = ask(native, service, "alice", f"{array}_3")
    assert (code, error) == (0, "")
    document = json.loads(out)
    assert document["slurm"]["state"] == "RUNNING"
    assert len(document["start"]["parts"][0]["gpus"]) == 8
    code, out, error = ask(native, service, "alice", f"{array}_8")
    assert (code, error) == (0, "")
    assert json.loads(out)["slurm"]["state"] == "PENDING"
    assert "start" not in json.loads(out)
    assert ask(native, service, "alice", f"{array}_9")[0] == 1


def test_usage_of_an_account_is_private(native: DevCluster, service: int) -> None:
    """To a member of the account; not to its coordinator, nor to who looks after all jobs."""
    fill(native)
    waiting = submit(native, "erin", "--gres=gpu:8")
    until(lambda: explain_job(decisions(native), parse_job(waiting)), lambda seen: seen and "order" in seen)
    native.run(["sacctmgr", "-i", "add", "coordinator", "account=physics", "names=dave"])
    try:
        code, out, _ = ask(native, service, "erin", waiting)
        document = json.loads(out)
        assert (code, document["private"]) == (0, ["usage"])
        assert {term["name"] for term in document["order"]["terms"]} == {"size", "deadline", "fair-share"}
        assert "tenant" not in document["order"]
        for user in ("dave", "root"):
            document = json.loads(ask(native, service, user, waiting)[1])
            assert document["order"]["tenant"]["account"] == "physics", user
            assert document["order"]["tenant"]["shares"] == 10
    finally:
        native.run(["sacctmgr", "-i", "delete", "coordinator", "account=physics", "names=dave"])


def test_private_data_holds(native: DevCluster, service: int) -> None:
    job = fill(native)[0]
    native.run(["sacctmgr", "-i", "modify", "user", "carol", "set", "adminlevel=Operator"])
    native.run(["sacctmgr", "-i", "add", "coordinator", "account=physics", "names=dave"])
    try:
        code, out, error = ask(native, service, "bob", job)
        assert (code, out) == (1, "")
        assert error == ask(native, service, "bob", "4000000")[2].replace(
            "4000000", job
        ), "as if there were no such job"
        for user in ("alice", "carol", "dave", "root"):
            assert ask(native, service, user, job)[0] == 0, user
    finally:
        native.run(["sacctmgr", "-i", "modify", "user", "carol", "set", "adminlevel=None"])
        native.run(["sacctmgr", "-i", "delete", "coordinator", "account=physics", "names=dave"])


def test_the_service_runs_as_slurm_user(native: DevCluster, service: int) -> None:
    lines = native.run(["ps", "-eo", "user:20,args"], node="ctl1").stdout.splitlines()
    assert {
        line.split()[0] for line in lines if f"explaind -v --port {service}" in line and "python" in line.split()[1]
    } == {"slurm"}


ATTACK = """
import socket, sys
from sluice.slurm.munge import decode, encode
from sluice.explain.explain_service import render_request, parse_job
port = int(sys.argv[1])
def send(data):
    with socket.create_connection(("ctl1", port), timeout=10) as connection:
        answer = b""
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65536):
                answer += piece
        except OSError:  # closed before all was sent
            pass
        return answer
credential = encode(render_request(parse_job("1"))).encode() + b"\\n"
first = send(credential)
assert decode(first.decode().strip()).payload.startswith(b"{"), first
assert send(credential) == b"", "a credential counts once"
for nonsense in (b"\\n", b"GET / HTTP/1.0\\r\\n\\r\\n", b"x" * 100000, bytes(range(256)), b"MUNGE:AAAA:\\n", b""):
    assert send(nonsense) == b"", nonsense
bad = [b"", b"null", b"[" * 1000, b'{"version": 1, "job": "1; rm -rf /"}', b'{"version": 1, "job": 7}', b"\\xff" * 500]
for payload in bad:
    answer = decode(send(encode(payload).encode() + b"\\n").decode().strip())
    assert b'"error"' in answer.payload, answer
foreign = encode(render_request(parse_job("1")), readable_by=12345).encode() + b"\\n"
assert send(foreign) == b"", "not for the service's eyes"
print("survived")
"""


def test_hostile_requests_are_dropped(native: DevCluster, service: int) -> None:
    done = native.run([sys.executable, "-c", ATTACK, str(service)], user="bob")
    assert done.stdout == "survived\n"
    assert ask(native, service, "bob", "4000000")[0] == 1


def test_shadow_report_compares(cluster: DevCluster) -> None:
    set_level(cluster, "shadow")
    for number in range(6):
        submit(cluster, "alice", f"--gres=gpu:{number % 3 + 1}", wrap="sleep 2")
        submit(cluster, "bob", "--gres=shard:20000", wrap="sleep 2")
    until(lambda: states(cluster), lambda seen: not seen)
    ask = [*SLUICE, "shadow", "report", "--decisions", decisions(cluster), "--json"]
    report = until(
        lambda: json.loads(subprocess.run(ask, capture_output=True, text=True, check=True, timeout=60).stdout),
        lambda report: report["decisions"] >= 12,
    )
    assert report["both_start"] >= report["same_nodes"]
    assert report["stock"]["idle_nodes_broken"] >= 1
    assert report["sluice_us_median"] < report["stock_us_median"]
