"""Slurm 24.11 with all of it at once: supervised controllers, journal, accounting, gang groups, order, planner, and
explain; reconfigured before.

24.11 reconfigures by starting itself again, the waiting backup as well.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from policy.compiled import CompiledPolicy, Global, Tenant, Weights
from sluice.explain.explanation import explain_job, parse_job
from tests.integration.test_journal import Site, until

pytestmark = [pytest.mark.cluster, pytest.mark.trixie]

POLICY = CompiledPolicy(
    settings=Global(weight=Weights(size=800), size_full_gpus=8, planner_interval_ms=500, gang_limit_s=30, journal=True),
    tenants=[Tenant(account="physics")],
)


@pytest.fixture(scope="module")
def site(trixie_root: Path, make_shared_cluster: Callable[..., DevCluster]) -> Iterator[Site]:
    description: dict[str, Any] = {
        "nodes": [{"names": "n[1-3]", "platform": "dgx-h100"}],
        "accounts": [{"name": "physics"}],
        "users": [{"name": "alice", "accounts": ["physics"]}],
        "controllers": 2,
        "slurm_conf": "SlurmctldTimeout=6\nDefMemPerCPU=10\n",
        "sluice": {
            "level": "place",
            "policy": POLICY.render(),
            "supervise": True,
            "lease": 2.5,
        },
    }
    yield Site(make_shared_cluster(description, root=trixie_root))


def report(site: Site, host: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((site.state / f"sluice.status.{host}").read_text())
    return found


def leader(site: Site) -> str:
    lines = dict(line.split(" ", 1) for line in (site.state / "sluice.lease").read_text().splitlines())
    return lines["host"] if lines["state"] == "held" else ""


def both_up(site: Site) -> bool:
    said = site.cluster.run(["scontrol", "ping"], check=False).stdout
    return "ctl1 is UP" in said and "ctl2 is UP" in said


def member(site: Site, gang: str) -> str:
    return site.submit(f"--gang={gang}", "-N1", "--gres=gpu:4")


def accounted(site: Site, *jobs: str) -> list[str]:
    words = ["sacct", "-n", "-X", "-P", "-D", "-j", ",".join(jobs), "-o", "JobIDRaw,State"]
    return sorted(site.cluster.run(words).stdout.splitlines())


@pytest.fixture(scope="module")
def jobs(site: Site) -> dict[str, list[str]]:
    """Reconfigured first. What is submitted then is in the journal alone when the primary dies."""
    started = report(site, "ctl1")["started"]
    site.cluster.run(["scontrol", "reconfigure"])
    until(lambda: report(site, "ctl1")["started"], lambda now: bool(now != started))
    until(lambda: both_up(site), bool, 40)
    assert leader(site) == "ctl1"
    until(lambda: site.counter("journal.open"), lambda value: bool(value == 1))
    site.stop_saving()
    found = {"pair": [member(site, "pair:2") for _ in range(2)], "trio": [member(site, "trio:3") for _ in range(2)]}
    found["done"] = [site.submit(script="exit 3")]
    found["cancelled"] = [site.submit("-H")]
    site.cluster.run(["scancel", *found["cancelled"]], user="alice")
    site.wait_for(found["done"][0], "FAILED")
    for job in found["pair"]:
        site.wait_for(job, "RUNNING")
    until(
        lambda: [site.jobs()[job][1] for job in found["trio"]],
        lambda why: all("Gang trio: 2 of 3 members" in one for one in why),
    )
    return found


def starts(site: Site, jobs: list[str]) -> list[tuple[str, str]]:
    """State and start of each."""
    shown = site.jobs()
    return [(shown[job][0], shown[job][2]) for job in jobs]


def test_the_backup_takes_over_after_a_reconfiguration(site: Site, jobs: dict[str, list[str]]) -> None:
    pair = starts(site, jobs["pair"])
    site.kill()
    site.wait_for_answer(timeout=60)
    assert leader(site) == "ctl2"
    replayed = site.replay()
    assert replayed["controller"] == "ctl2"
    assert replayed["unsettled"] == []
    assert starts(site, jobs["pair"]) == pair
    assert site.job_state(jobs["done"][0]) == "FAILED"
    assert site.job_state(jobs["cancelled"][0]) in ("CANCELLED", "MISSING")
    assert [site.job_state(job) for job in jobs["trio"]] == ["PENDING"] * 2
    jobs["trio"].append(member(site, "trio:3"))
    for job in jobs["trio"]:  # the gang is what it was, and starts with the member that was missing
        site.wait_for(job, "RUNNING")
    assert starts(site, jobs["pair"]) == pair


def test_and_gives_back(site: Site, jobs: dict[str, list[str]]) -> None:
    gangs = jobs["pair"] + jobs["trio"]
    before = starts(site, gangs)
    site.cluster.start_daemon("slurmctld@ctl1")
    until(lambda: leader(site), lambda host: bool(host == "ctl1"), 40)
    site.wait_for_answer()
    until(lambda: both_up(site), bool, 40)
    assert starts(site, gangs) == before
    until(lambda: site.counter("journal.open"), lambda value: bool(value == 1))
    entries = site.counter("journal.entries")
    site.submit("-H")
    until(lambda: site.counter("journal.entries"), lambda now: bool(now > entries))


def test_each_job_is_in_the_accounting_once(site: Site, jobs: dict[str, list[str]]) -> None:
    running = jobs["pair"] + jobs["trio"]
    site.cluster.run(["scancel", *running], user="alice")
    wanted = sorted([f"{job}|CANCELLED" for job in running] + [f"{jobs['done'][0]}|FAILED"])
    until(
        lambda: [row.split(" ")[0] for row in accounted(site, *running, jobs["done"][0])],
        lambda rows: bool(rows == wanted),
    )


def test_a_reserved_start_is_ordered_planned_and_explained(site: Site) -> None:
    def explained() -> dict[str, Any]:
        return explain_job(site.state / "sluice.records", parse_job(waiting)) or {}

    def nodes(job: str) -> str:
        return site.cluster.run(["squeue", "-h", "-j", job, "-o", "%N"]).stdout.strip()

    until(lambda: site.cluster.run(["squeue", "-h", "-t", "R,CG", "-o", "%i"]).stdout, lambda left: not left)
    begin = time.time()
    busy = [site.submit("-N1", "--gres=gpu:8") for _ in range(3)]
    for job in busy:
        site.wait_for(job, "RUNNING")
    running = time.time()
    waiting = site.submit("-N1", "--gres=gpu:4")
    found = until(
        explained,
        lambda seen: "order" in seen
        and "nodes" in seen["waiting"]
        and seen["waiting"].get("plan", {}).get("expected_start"),
    )
    assert begin + 299 <= found["waiting"]["plan"]["expected_start"] <= running + 301  # when the first of them ends
    assert (found["decision"]["replayed"], found["waiting"]["nodes"]) == (True, 3)
    assert [(term["name"], term["value"]) for term in found["order"]["terms"]] == [("size", 400)]
    assert site.cluster.run(["sprio", "-h", "-j", waiting, "-o", "%i %S"]).stdout.split() == [waiting, "400"]
    freed = nodes(busy[1])
    site.cluster.run(["scancel", busy[1]])
    site.wait_for(waiting, "RUNNING")
    assert nodes(waiting) == freed
    found = until(explained, lambda seen: "start" in seen)
    assert found["start"]["as_chosen"]
    assert [(part["node"], len(part["gpus"])) for part in found["start"]["parts"]] == [(freed, 4)]
