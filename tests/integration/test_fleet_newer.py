"""A pool whose nodes are created in slurmctld and deleted while it runs, on newer Slurms: at level `place`, on those
whose plugins are of public headers alone at level `admit`.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.layout import INSIDE
from dev_cluster.slurm_tree import SlurmTree
from sluice.base.files import write_atomic
from sluice.explain.decisions import FOLDER
from sluice.explain.explanation import explain_job, parse_job
from sluice.plugin.builder import ADMITTED
from tests.integration.conftest import MakeCluster
from tests.integration.fleet_site import nodes, placed_by_core, status
from tests.integration.jobs import state as state_of
from tests.integration.jobs import submit
from tests.integration.settled import let_it_save, until
from tests.integration.settled import status as plugins

pytestmark = pytest.mark.cluster

POLICY = f"""
version: 1
level: place
tenants:
  physics: {{members: [alice]}}
failover: {{controller_timeout: 6s}}
fleet: {{programs: {INSIDE}/bin, look_every: 1s}}
pools:
  grow:
    driver: local
    nodes: grow-[1-2]
    dynamic: true
    shapes:
    - {{name: big, gpus: {{h100: 1}}, gpu_memory: 81008M, cpus: 112, memory: 512G, price: 10}}
    idle: 1s
    list_every: 1s
    end_within: 1s
    node_options: Sockets=1 CoresPerSocket=56 ThreadsPerCore=2
"""

DESCRIPTION: dict[str, Any] = {
    "nodes": [
        {"names": "fixed-1", "platform": "none"},
        {"names": "grow-[1-2]", "platform": "h100x1", "pool": True},
    ],
    "partitions": [{"name": "main", "nodes": "fixed-1"}],
    "accounts": [{"name": "physics"}],
    "users": [{"name": "alice", "accounts": ["physics"]}],
    "controllers": 2,
    "sluice": {"level": "place", "policy": ""},
    "slurm_conf": "MaxNodeCount=8\nSlurmctldParameters=power_save_interval=1\n"
    "SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0\n",
    "shards": False,
    "controllerd": True,
    "policy": POLICY,
}


@pytest.fixture(scope="module")
def cluster(newer_root: Path | None, make_shared_cluster: MakeCluster) -> DevCluster:
    if not places(newer_root):
        policy = POLICY.replace("level: place", "level: admit")
        admitting = {"policy": policy, "sluice": {"level": "admit", "policy": ""}}
        made = make_shared_cluster({**DESCRIPTION, **admitting}, root=newer_root)
        until(lambda: set(known(made)), lambda seen: seen == {"grow-1", "grow-2"})
        made.run(["scontrol", "reconfigure"])  # 26.05 finds out now alone that it has nodes to power up and down
        return made
    return make_shared_cluster(DESCRIPTION, root=newer_root)


def places(root: Path | None) -> bool:
    """Whether this Slurm's plugins have level `place`."""
    return root is None or SlurmTree(root=root).version()[:2] not in ADMITTED


@pytest.fixture
def at_level_place(newer_root: Path | None) -> None:
    if not places(newer_root):
        pytest.skip("this Slurm's plugins are of public headers: no level place")


def known(cluster: DevCluster) -> dict[str, str]:
    """The pool's nodes that slurmctld knows, and their states."""
    return {one.name: one.state for one in cluster.node_states() if one.name.startswith("grow")}


def runs(cluster: DevCluster, *words: str) -> str:
    job = submit(cluster, "-A", "physics", "-p", "grow", "--gres=gpu:1", *words, wrap="exec sleep 1")
    until(lambda: state_of(cluster, job), lambda seen: seen == "COMPLETED", shows=lambda: status(cluster).nodes)
    return job


def apply(cluster: DevCluster, text: str) -> str:
    path = cluster.layout.sluice / "sluice.yaml"
    level = next(line for line in path.read_text().splitlines() if line.startswith("level: "))
    write_atomic(path, text.replace("level: place", level))
    return cluster.run(["sluice", "apply", "--yes"], node="ctl1").stderr


def test_nodes_are_created_and_a_job_of_both_runs(cluster: DevCluster) -> None:
    until(lambda: known(cluster), lambda seen: seen == {"grow-1": "idle~", "grow-2": "idle~"})
    runs(cluster, "-N2")


@pytest.mark.usefixtures("at_level_place")
def test_jobs_are_placed_on_created_nodes_by_the_core(cluster: DevCluster) -> None:
    job = runs(cluster, "-N2")
    until(lambda: placed_by_core(cluster, job))
    assert plugins(cluster)["counters"]["arrivals.looks"] > 0


def test_a_pool_shrinks_and_grows_while_slurmctld_runs(cluster: DevCluster, newer_root: Path | None) -> None:
    log = cluster.log("slurmctld@ctl1")
    starts = log.read_text().count("slurmctld version")  # at each reconfiguration, too
    last = submit(cluster, "-A", "physics", "-p", "grow", "-w", "grow-2", "--gres=gpu:1", wrap="exec sleep 600")
    until(lambda: state_of(cluster, last), lambda seen: seen == "RUNNING")
    apply(cluster, POLICY.replace("grow-[1-2]", "grow-1"))
    until(lambda: nodes(cluster)["grow-2"], lambda one: one.difference == "no_pool")
    runs(cluster)
    assert state_of(cluster, last) == "RUNNING", "it keeps its node"
    cluster.run(["scancel", last], user="alice")
    until(lambda: known(cluster), lambda seen: set(seen) == {"grow-1"})
    words = ["sluice", "report", "nodes", "--json", "-S", "now-1days"]
    until(
        lambda: json.loads(cluster.run(words, node="ctl1").stdout)["rows"],
        lambda rows: [one.get("gpu_type") for one in rows if one["node"] == "grow-2" and one["gpu_s"]] == ["h100"],
    )
    apply(cluster, POLICY)
    until(lambda: known(cluster), lambda seen: set(seen) == {"grow-1", "grow-2"})
    job = runs(cluster, "-N2")
    if places(newer_root):
        until(lambda: placed_by_core(cluster, job))
    assert log.read_text().count("slurmctld version") == starts


@pytest.mark.usefixtures("at_level_place")
def test_jobs_that_wait_for_created_nodes_are_ordered_and_planned(cluster: DevCluster) -> None:
    first = submit(cluster, "-A", "physics", "-p", "grow", "-N2", "--gres=gpu:1", "-t", "5", wrap="exec sleep 600")
    until(lambda: state_of(cluster, first), lambda seen: seen == "RUNNING")
    second = submit(cluster, "-A", "physics", "-p", "grow", "-N2", "--gres=gpu:1", "-t", "5", wrap="exec sleep 1")
    seen = until(
        lambda: explain_job(cluster.layout.state / FOLDER, parse_job(second)) or {},
        lambda seen: "order" in seen and seen["waiting"].get("plan"),
    )
    assert seen["waiting"]["plan"]["expected_start"] > time.time()
    shown = cluster.run(["sprio", "-h", "-j", second, "-o", "%S"]).stdout.strip()
    assert int(shown) == seen["order"]["site_factor"] != 0
    cluster.run(["scancel", first], user="alice")
    until(lambda: state_of(cluster, second), lambda seen: seen == "COMPLETED")


def test_nodes_are_made_again_when_the_policy_promises_something_else(cluster: DevCluster) -> None:
    apply(cluster, POLICY.replace("    idle: 1s", "    weight: 77\n    idle: 1s"))
    words = ["sinfo", "-h", "-p", "grow", "-N", "-o", "%w %t"]
    until(lambda: cluster.run(words).stdout.splitlines(), lambda seen: seen == ["77 idle~"] * 2)
    cluster.stop_daemon("fleetd@ctl1")  # Slurm itself starts the job on them, and not as they were powered up ahead
    job = submit(cluster, "-A", "physics", "-p", "grow", "-N2", "--gres=gpu:1", wrap="exec sleep 1")
    until(lambda: state_of(cluster, job), lambda seen: seen == "CONFIGURING")
    cluster.start_daemon("fleetd@ctl1")
    until(lambda: state_of(cluster, job), lambda seen: seen == "COMPLETED", shows=lambda: status(cluster).nodes)


def test_room_for_them_is_asked_for(cluster: DevCluster) -> None:
    until(lambda: set(known(cluster)), lambda seen: seen == {"grow-1", "grow-2"})  # one may be made again just now
    said = apply(cluster, POLICY.replace("grow-[1-2]", "grow-[1-9]"))
    assert "MaxNodeCount 8: slurmctld knows 3 nodes and has no room for grow-[3-9]" in said
    apply(cluster, POLICY)


def test_a_takeover_loses_neither_nodes_nor_jobs(cluster: DevCluster) -> None:
    until(lambda: known(cluster), lambda seen: seen == {"grow-1": "idle~", "grow-2": "idle~"})
    job = submit(cluster, "-A", "physics", "-p", "grow", "-N2", "--gres=gpu:1", wrap="exec sleep 15")
    until(lambda: state_of(cluster, job), lambda seen: seen == "RUNNING")
    let_it_save(cluster, "-A", "physics")
    cluster.stop_daemon("slurmctld@ctl1", number=signal.SIGKILL)
    until(lambda: status(cluster).host, lambda host: host == "ctl2")
    until(lambda: state_of(cluster, job), lambda seen: seen == "COMPLETED", shows=lambda: status(cluster).nodes)
    until(lambda: [one for one in nodes(cluster).values() if one.stage], lambda seen: not seen)
    assert set(known(cluster)) == {"grow-1", "grow-2"}
    runs(cluster)
