"""Pools on real daemons: nodes come as jobs need them and go again, and what goes wrong has a name and an end."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest

from dev_cluster.cluster import DevCluster
from sluice.exchange.fleet import ahead_words
from tests.integration.conftest import MakeCluster
from tests.integration.fleet_site import DESCRIPTION, nodes, placed_by_core, set_notices, set_stock, status
from tests.integration.jobs import state as state_of
from tests.integration.jobs import submit
from tests.integration.settled import set_level, until
from tests.integration.settled import status as plugins

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster(make_shared_cluster: MakeCluster) -> DevCluster:
    made = make_shared_cluster(DESCRIPTION)
    until(lambda: (made.folder / "fleet/status.json").exists())
    return made


def settled(cluster: DevCluster) -> None:
    """Wait until there is no machine any more."""
    until(lambda: [one for one in nodes(cluster).values() if one.stage or one.slurm == "on"], lambda seen: not seen)


def saved(cluster: DevCluster, file: str, text: bytes) -> None:
    """Wait until slurmctld's file of a state has a text."""
    until(lambda: text in (cluster.layout.state / file).read_bytes())


def absent(cluster: DevCluster, prefix: str) -> None:
    """Wait until Slurm may give all nodes of a pool again, `end_within` after it called them off."""
    until(
        lambda: {one.state for one in cluster.node_states() if one.name.startswith(prefix)},
        lambda seen: seen == {"idle~"},
    )


def job_is(cluster: DevCluster, job: str, state: str) -> None:
    until(lambda: state_of(cluster, job), lambda seen: seen == state, shows=lambda: status(cluster).nodes)


def kill_fleetd(cluster: DevCluster) -> None:
    """SIGKILL, and what systemd does then."""
    cluster.stop_daemon("fleetd@ctl1", number=signal.SIGKILL)
    cluster.start_daemon("fleetd@ctl1")


def pool(cluster: DevCluster, *words: str) -> str:
    return cluster.run(["sluice", "pool", *words], node="ctl1").stdout


def happened(cluster: DevCluster, node: str) -> list[str]:
    return [one.what for one in status(cluster).history if one.node == node]


def test_nodes_are_known_before_there_is_one(cluster: DevCluster) -> None:
    shown = {one.name: one for one in cluster.node_states()}
    assert shown["burst-1"].state == "idle~" and "gpu:h100:1" in shown["burst-1"].gres
    assert "nothing to do" in cluster.run(["sluice", "plan"], node="ctl1").stderr


@pytest.fixture
def at_level_place(cluster: DevCluster) -> Iterator[None]:
    set_level(cluster, "place")
    yield
    set_level(cluster, "admit")


@pytest.mark.usefixtures("at_level_place")
def test_a_pool_grows_for_a_job_that_the_core_places_and_shrinks_while_fleetd_is_killed(cluster: DevCluster) -> None:
    job = submit(cluster, "-p", "burst", "-N2", "--gres=gpu:1", wrap="exec sleep 1")
    until(lambda: "launched" in happened(cluster, "burst-1"))
    kill_fleetd(cluster)
    job_is(cluster, job, "COMPLETED")
    assert plugins(cluster)["counters"]["arrivals.looks"] > 0  # it did not wait for slurmctld's own look
    until(lambda: placed_by_core(cluster, job))
    until(lambda: "terminating" in happened(cluster, "burst-1"))
    kill_fleetd(cluster)
    settled(cluster)
    steps = happened(cluster, "burst-1")
    assert steps == ["asked", "launched", "registered", "terminating", "gone: not_wanted"]
    assert "gone: not_wanted" in pool(cluster, "history", "burst", "--node", "burst-1")


def test_without_capacity_the_next_zone_and_the_next_shape_are_asked_at_once(cluster: DevCluster) -> None:
    set_stock(cluster, big__a=0, big__b=1)
    job = submit(cluster, "-p", "burst", "-N3", "--gres=gpu:1", wrap="exec sleep 1")
    job_is(cluster, job, "COMPLETED")
    last = [one for one in status(cluster).history if one.what == "registered"][-3:]
    assert sorted(f"{one.shape}/{one.zone}" for one in last) == ["big/b", "old/a", "old/a"]
    settled(cluster)


def test_with_no_capacity_at_all_the_job_runs_on_another_pool_and_no_node_is_down(cluster: DevCluster) -> None:
    absent(cluster, "burst")
    set_stock(cluster, big=1, old=0)
    job = submit(cluster, "-p", "burst,spare", "-N2", "--gres=gpu:1", wrap="exec sleep 1")
    until(lambda: [one for one in status(cluster).history if one.what == "no_capacity"])
    job_is(cluster, job, "COMPLETED")
    assert "spare" in cluster.run(["squeue", "-h", "-t", "all", "-j", job, "-o", "%N"]).stdout
    set_stock(cluster)
    settled(cluster)  # the one machine of the job that could not be had, too
    absent(cluster, "burst")


def test_a_machine_with_other_gpus_is_drained_and_never_used(cluster: DevCluster) -> None:
    own = cluster.slurm_conf_dir("odd-1") / "gres.conf"
    right = own.read_text()
    own.write_text("")
    job = submit(cluster, "-p", "odd", "--gres=gpu:1", wrap="exec sleep 1")
    until(lambda: nodes(cluster)["odd-1"], lambda one: one.difference == "other_gpus" and one.stage is None)
    shown = until(
        lambda: next(one for one in cluster.node_states() if one.name == "odd-1"), lambda one: "drain" in one.state
    )
    assert "gres/gpu count reported lower than configured" in shown.reason
    assert state_of(cluster, job) == "PENDING"
    assert "other GPUs than the pool promises" in pool(cluster, "why", "odd-1")
    own.write_text(right)
    cluster.run(["scancel", job], user="alice")
    pool(cluster, "return", "odd-1")
    until(lambda: nodes(cluster)["odd-1"], lambda one: one.difference == "none")


def test_a_machine_that_is_taken_back_soon_is_left_by_its_job(cluster: DevCluster) -> None:
    job = submit(cluster, "-p", "spare", "--gres=gpu:1", "--requeue", wrap="exec sleep 600")
    job_is(cluster, job, "RUNNING")
    (first,) = until(lambda: [one for one in nodes(cluster).values() if one.stage == "registered"])
    set_notices(cluster, {first.machine: "ends at 12:00"})
    until(
        lambda: [
            one for one in nodes(cluster).values() if one.stage == "registered" and one.machine != first.machine
        ],
        shows=lambda: (status(cluster).history[-20:], nodes(cluster), state_of(cluster, job)),
    )  # fmt: skip
    job_is(cluster, job, "RUNNING")
    of_first = [one.what for one in status(cluster).history if one.machine == first.machine]
    assert of_first[-4:] == ["registered", "notice", "terminating", "gone: not_wanted"]
    cluster.run(["scancel", job], user="alice")
    settled(cluster)
    absent(cluster, "spare")  # and not drained any more


def test_a_node_is_there_before_the_job_that_is_to_begin_later(cluster: DevCluster) -> None:
    settled(cluster)
    absent(cluster, "burst")
    job = submit(cluster, "-p", "burst", "--begin=now+10", "--gres=gpu:1", wrap="exec sleep 1")
    until(lambda: [one for one in nodes(cluster).values() if one.stage == "registered"])
    assert state_of(cluster, job) == "PENDING"
    job_is(cluster, job, "COMPLETED")
    settled(cluster)
    assert [one.node for one in status(cluster).history if one.what == "registered"][-1:] == [
        cluster.run(["squeue", "-h", "-t", "all", "-j", job, "-o", "%N"]).stdout.strip()
    ]


def test_a_node_is_there_before_the_job_that_waits_for_the_end_of_another(cluster: DevCluster) -> None:
    absent(cluster, "burst")
    first = submit(cluster, "-p", "main", "-t", "1", wrap="exec sleep 600")
    job = submit(cluster, "-p", "burst", f"--dependency=afterany:{first}", "--gres=gpu:1", wrap="exec sleep 1")
    until(lambda: [one for one in nodes(cluster).values() if one.stage == "registered"])
    assert state_of(cluster, job) == "PENDING"
    cluster.run(["scancel", first], user="alice")
    job_is(cluster, job, "COMPLETED")
    settled(cluster)


@pytest.mark.usefixtures("at_level_place")
def test_the_nodes_of_a_gang_at_the_end_of_a_chain_are_there_before_it(cluster: DevCluster) -> None:
    absent(cluster, "burst")
    for _ in range(2):  # from which is learnt how long the chain takes
        job_is(cluster, submit(cluster, "-p", "main", "-t", "5", "-J", "link", wrap="exec sleep 1"), "COMPLETED")
    first = submit(cluster, "-p", "main", "-t", "1", wrap="exec sleep 600")
    then = submit(cluster, "-p", "main", "-t", "5", "-J", "link", f"--dependency=afterany:{first}", wrap="exec sleep 1")
    alone = submit(cluster, "-p", "burst", "--gang=half:2", f"--dependency=afterany:{first}", wrap="exec sleep 1")
    wanted = "-p", "burst", "--gang=ring:2", f"--dependency=afterany:{then}", "--gres=gpu:1"
    ring = [submit(cluster, *wanted, wrap="exec sleep 1") for _ in range(2)]
    until(
        lambda: [one.node for one in nodes(cluster).values() if one.stage == "registered"],
        lambda there: len(there) == 2,
        shows=lambda: (status(cluster).ahead, cluster.run(["squeue", "-o", "%i %T %r %E %S"]).stdout),
    )
    assert [state_of(cluster, job) for job in (alone, then, *ring)] == ["PENDING"] * 4
    asked = {(int(job), "asked") for job in ring}
    found = until(
        lambda: status(cluster),
        lambda one: {(job.job, job.outlook) for job in one.ahead} == asked,
        timeout=30,
        shows=lambda: cluster.run(["scontrol", "show", "job"]).stdout,
    )
    (words,) = ahead_words(found, int(ring[1]), found.at)
    assert f"after {then}; the nodes of its gang of pool burst are there, or asked for ahead of it" in words
    cluster.run(["scancel", first, alone], user="alice")
    for job in ring:
        job_is(cluster, job, "COMPLETED")
    settled(cluster)


def test_a_takeover_while_machines_boot_loses_nothing_and_launches_once(cluster: DevCluster) -> None:
    before = len(list(cluster.layout.machines.iterdir()))
    job = submit(cluster, "-p", "slow", "-N2", "--gres=gpu:1", wrap="exec sleep 1")
    until(lambda: [one for one in nodes(cluster).values() if one.stage == "launched"], lambda seen: len(seen) == 2)
    # Otherwise Slurm forgets that the job has nodes, or that they boot: all of a kind are saved together.
    cluster.run(["scontrol", "update", "NodeName=burst-1", "Comment=saved_since"], node="ctl1")
    saved(cluster, "job_state", b"slow-[1-2]")
    saved(cluster, "node_state", b"saved_since")
    shown = {one["name"]: one["launching"] for one in json.loads(pool(cluster, "list", "--json"))["pools"]}
    assert shown["slow"] == 2
    cluster.stop_daemon("slurmctld@ctl1", number=signal.SIGKILL)
    until(lambda: status(cluster).host, lambda host: host == "ctl2")
    job_is(cluster, job, "COMPLETED")
    settled(cluster)
    for node in ("slow-1", "slow-2"):
        assert happened(cluster, node) == ["asked", "launched", "registered", "terminating", "gone: not_wanted"]
    assert len(list(cluster.layout.machines.iterdir())) == before + 2


def test_with_a_damaged_journal_the_machines_of_running_jobs_are_found_again(cluster: DevCluster) -> None:
    job = submit(cluster, "-p", "spare", "--gres=gpu:1", wrap="exec sleep 600")
    job_is(cluster, job, "RUNNING")
    (before,) = until(lambda: [one for one in nodes(cluster).values() if one.stage == "registered"])
    machines = sorted(cluster.layout.machines.iterdir())
    daemon, folder = f"fleetd@{status(cluster).host}", cluster.folder / "fleet"
    cluster.stop_daemon(daemon, number=signal.SIGKILL)
    (folder / "journal.json").write_text("{")
    cluster.start_daemon(daemon)
    until(lambda: happened(cluster, before.node), lambda steps: steps == ["taken over", "launched", "registered"])
    assert nodes(cluster)[before.node].machine == before.machine and (folder / "journal.json.damaged").exists()
    assert state_of(cluster, job) == "RUNNING"
    cluster.run(["scancel", job], user="alice")
    settled(cluster)
    assert sorted(cluster.layout.machines.iterdir()) == machines
