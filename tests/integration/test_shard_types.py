"""Types of shards: they come while jobs run, and a backup that takes over keeps the nodes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from policy.compiled import CompiledPolicy, Global, Tenant
from sluice.base.files import write_atomic
from tests.integration.jobs import shown, submit
from tests.integration.settled import let_it_save, until

pytestmark = pytest.mark.cluster

TYPED = {"h100-1": "h100", "l40s-1": "l40s"}
NODES = list(TYPED)
CONTROLLERS = ("ctl1", "ctl2")
MIB = 4096
POLICY = CompiledPolicy(settings=Global(journal=True), tenants=[Tenant(account="physics")])


class Site:
    """Two supervised controllers; slurm.conf and gres.conf have types of shards, or not, as they were once written."""

    def __init__(self, cluster: DevCluster) -> None:
        self.cluster = cluster
        self.files = [cluster.layout.slurm / name for name in ("slurm.conf", "gres.conf")]
        self.typed = {file: file.read_text() for file in self.files}

    def write(self, *, typed: bool) -> None:
        for file, text in self.typed.items():
            write_atomic(file, text if typed else without_types(text))

    def restart(self) -> None:
        for host in reversed(CONTROLLERS):
            self.cluster.stop_daemon(f"slurmctld@{host}")
        for host in CONTROLLERS:
            self.cluster.start_daemon(f"slurmctld@{host}")

    def register(self) -> None:
        """All nodes, with what slurmd now reads: before, slurmctld does not check what they have."""
        since = time.strftime("%Y-%m-%dT%H:%M:%S")
        for node in NODES:
            self.cluster.stop_daemon(f"slurmd@{node}")
            self.cluster.start_daemon(f"slurmd@{node}")
        until(
            lambda: [self.node(node).get("SlurmdStartTime", "") for node in NODES],
            lambda times: all(since <= one < "None" for one in times),
        )

    def leader(self) -> str:
        lease = dict(
            line.split(" ", 1) for line in (self.cluster.layout.state / "sluice.lease").read_text().splitlines()
        )
        return lease["host"] if lease["state"] == "held" else ""

    def node(self, name: str) -> dict[str, str]:
        text = self.cluster.run(["scontrol", "show", "node", "-d", "-o", name], check=False).stdout
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def share(self, node: str, *words: str) -> str:
        return submit(self.cluster, "-A", "physics", "-w", node, f"--gpu-mem={MIB}M", *words)

    def await_counts(self, held: dict[str, int]) -> None:
        """Wait until nodes are in service with so many shards in use."""

        def counts() -> dict[str, int | str]:
            found: dict[str, int | str] = {}
            for name in held:
                node = self.node(name)
                used = re.search(r"gres/shard=(\d+)", node.get("AllocTRES", ""))
                wrong = re.search("DRAIN|INVALID|DOWN|NOT_RESPONDING", node.get("State", "DOWN"))
                found[name] = node["State"] if wrong else int(used[1]) if used else 0
            return found

        until(counts, lambda found: found == held, shows=lambda: [self.node(name) for name in held])


def without_types(text: str) -> str:
    """As it was written before."""
    return re.sub(r"(?<=Name=shard )Type=\S+ |(?<=,shard:)[a-z][^:\s]*:", "", text)


@pytest.fixture(scope="module")
def site(newer_root: Path | None, make_shared_cluster: Callable[..., DevCluster]) -> Iterator[Site]:
    platforms = {"h100-1": "dgx-h100", "l40s-1": "l40s-x4"}
    description: dict[str, Any] = {
        "nodes": [{"names": name, "platform": platform} for name, platform in platforms.items()],
        "accounts": [{"name": "physics"}],
        "users": [{"name": "alice", "accounts": ["physics"]}],
        "controllers": 2,
        "agent": True,
        "slurm_conf": "SlurmctldTimeout=6\nDefMemPerCPU=10\nAccountingStorageTRES=gres/gpu,gres/shard\n",
        "sluice": {"level": "place", "policy": POLICY.render(), "supervise": True, "lease": 2.5},
    }
    yield Site(make_shared_cluster(description, root=newer_root))


def test_they_come_while_jobs_run(site: Site) -> None:
    cluster = site.cluster
    nodes, lines = (site.typed[file] for file in site.files)
    for node, kind in TYPED.items():
        assert f",shard:{kind}:" in nodes and f"{node} Name=shard Type={kind} " in lines
    site.write(typed=False)
    assert "shard:h100" not in site.files[0].read_text() and "Name=shard Type" not in site.files[1].read_text()
    site.restart()
    site.register()
    jobs = {node: site.share(node) for node in NODES}
    site.await_counts(dict.fromkeys(NODES, MIB))
    before = {job: shown(cluster, job) for job in jobs.values()}

    def all_is_as_before() -> None:
        site.await_counts(dict.fromkeys(NODES, MIB))
        for job, fields in before.items():
            now = shown(cluster, job)
            assert [now[key] for key in ("JobState", "StartTime", "Restarts", "GRES")] == [
                fields[key] for key in ("JobState", "StartTime", "Restarts", "GRES")
            ]

    site.write(typed=True)
    cluster.run(["scontrol", "reconfigure"])
    site.register()
    all_is_as_before()
    site.write(typed=False)
    site.restart()
    site.register()
    all_is_as_before()
    site.write(typed=True)
    site.restart()
    all_is_as_before()  # before the nodes' slurmd read them
    site.register()
    all_is_as_before()
    more = {node: site.share(node) for node in NODES}
    site.await_counts(dict.fromkeys(NODES, 2 * MIB))
    cluster.run(["scancel", *jobs.values(), *more.values()])
    site.await_counts(dict.fromkeys(NODES, 0))
    assert all("underflow" not in cluster.log(f"slurmctld@{host}").read_text() for host in CONTROLLERS)


def test_a_job_on_nodes_of_several_types(site: Site) -> None:
    """Its GRES have an entry for each type; all of them count, and each node's agent knows the job's part there."""
    job = submit(site.cluster, "-A", "physics", "-N2", f"--gpu-mem={MIB}M")
    site.await_counts(dict.fromkeys(NODES, MIB))
    assert f"gres/shard={2 * MIB}" in shown(site.cluster, job)["AllocTRES"].split(",")
    site.cluster.run(["scancel", job])
    site.await_counts(dict.fromkeys(NODES, 0))
    for node in NODES:
        record = site.cluster.node_folder(node) / f"records/{job}.json"
        until(record.exists, bool)
        found = json.loads(record.read_text())
        assert found["split"] and [grant["limit"] for grant in found["grants"]] == [MIB << 20]


def test_a_backup_that_takes_over_keeps_the_nodes(site: Site) -> None:
    cluster = site.cluster
    runs = {node: site.share(node) for node in NODES}
    waits = {node: site.share(node, f"--dependency=afterany:{job}") for node, job in runs.items()}
    site.await_counts(dict.fromkeys(NODES, MIB))
    before = {job: shown(cluster, job)["StartTime"] for job in runs.values()}

    let_it_save(cluster, "-A", "physics")
    cluster.stop_daemon("slurmctld@ctl1")
    until(site.leader, lambda host: host == "ctl2")
    site.register()
    site.await_counts(dict.fromkeys(NODES, MIB))
    assert {job: shown(cluster, job)["StartTime"] for job in before} == before
    cluster.run(["scancel", *runs.values()])
    for job in waits.values():
        until(lambda job=job: shown(cluster, job)["JobState"], lambda state: state == "RUNNING")  # type: ignore[misc]
    site.await_counts(dict.fromkeys(NODES, MIB))
    cluster.start_daemon("slurmctld@ctl1")
    until(site.leader, lambda host: host == "ctl1")
    site.register()
    site.await_counts(dict.fromkeys(NODES, MIB))
