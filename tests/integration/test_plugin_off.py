"""At level off, and without a policy at any level, every scheduling result is stock Slurm's."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from policy.compiled import complete
from sluice.base.files import write_atomic
from sluice.base.hostlist import expand
from tests.integration.settled import status, until
from tests.integration.slurm_features import POLICY, gpu_indices
from tests.integration.stock_results import FEATURES, Results, description, results
from tests.integration.versions import NATIVE_FIRST

pytestmark = pytest.mark.cluster

# What is no policy, in addition to no file at all: a file without a byte, and compiled policies that say nothing.
EMPTY = ["", complete(""), complete("generated-s = 1\nsource = nothing"), complete("# nothing\n\n[global]")]
ALL = ["backfill", "heterogeneous", "requests", *FEATURES, "reservations", "preemption"]


class EmptyPolicies:
    """Puts one empty policy after the other where slurmctld reads it; when called, the next one is in force."""

    def __init__(self, cluster: DevCluster) -> None:
        self.cluster = cluster
        self.left = list(EMPTY)
        self.first = True

    def __call__(self) -> None:
        if self.first:  # there is no file yet
            self.first = False
        else:
            before = self._read()
            write_atomic(self.cluster.layout.slurm / "sluice.policy", self.left.pop(0))
            until(self._read, lambda now: now > before)
        said = until(lambda: status(self.cluster), lambda now: now["level_asked"] == "place")
        assert (said["level"], said["policy"], said["policy_error"]) == ("off", None, ""), said

    def _read(self) -> int:
        return self.cluster.log("slurmctld@ctl1").read_text().count("sluice: no policy in force")


def _is_off(cluster: DevCluster) -> None:
    assert until(lambda: status(cluster)["level"]) == "off"
    assert status(cluster)["policy"] is not None


@pytest.fixture(scope="module", params=NATIVE_FIRST)
def found(request: pytest.FixtureRequest, make_shared_cluster: Callable[..., DevCluster]) -> dict[str, Results]:
    """What jobs get: of stock Slurm, at level off, and at level place with policies that are empty."""
    newer = request.param == "trixie"
    root = {"root": request.getfixturevalue("trixie_root")} if newer else {}
    arms: dict[str, tuple[dict[str, Any] | None, Callable[[DevCluster], Callable[[], None]]]] = {
        "stock": (None, lambda _: lambda: None),
        "off": ({"level": "off", "policy": POLICY}, lambda cluster: lambda: _is_off(cluster)),
        "empty": ({"level": "place"}, EmptyPolicies),
    }
    with ThreadPoolExecutor(len(arms)) as pool:
        running = {}
        for name, (sluice, between) in arms.items():
            cluster = make_shared_cluster(description(sluice), **root)
            running[name] = pool.submit(results, cluster, between(cluster))
        return {name: one.result() for name, one in running.items()}


def of(arm: Results, feature: str) -> Results:
    """The jobs that are about a feature."""
    return {name: job for name, job in arm.items() if re.match(rf"{feature}\b", name)}


@pytest.mark.parametrize("arm", ["off", "empty"])
@pytest.mark.parametrize("feature", ALL)
def test_same_as_stock(found: dict[str, Results], feature: str, arm: str) -> None:
    assert of(found["stock"], feature)
    assert of(found[arm], feature) == of(found["stock"], feature)


def test_nothing_is_left_out(found: dict[str, Results]) -> None:
    compared = {name for feature in ALL for name in of(found["stock"], feature)}
    assert compared == set(found["stock"]) == set(found["off"]) == set(found["empty"])


def test_jobs_make_use_of_what_they_are_about(found: dict[str, Results]) -> None:
    """Else two clusters that both do without it would be equal, too."""
    stock = found["stock"]

    def nodes(name: str) -> str:
        found = re.search(r" NodeList=(\S*)", stock[name])
        assert found
        return found[1].replace("(null)", "")

    def count(feature: str, words: str) -> int:
        return sum(words in job for job in of(stock, feature).values())

    for feature in ("backfill", "requests"):
        assert count(feature, "JobState=RUNNING") >= 8
        assert count(feature, "JobState=PENDING") >= 1
        assert len({job.split("Priority=")[1].split()[0] for job in of(stock, feature).values()}) >= 3
    assert count("heterogeneous", "JobState=RUNNING") == 3
    alone = nodes("exclusive.0")
    jobs = [name for feature in FEATURES for name in of(stock, feature) if nodes(name)]
    assert [name for name in jobs if alone in expand(nodes(name))] == ["exclusive.0"]
    assert len(expand(nodes("gpus-per-task.0"))) == 2
    assert set(re.findall(r" GRES=gpu:h100:(\d+)", stock["gpus-per-task.0"])) == {"4"}
    assert count("arrays", "JobState=RUNNING") == 3
    assert count("arrays", "Reason=JobArrayTaskLimit") == 1
    halves = [gpu_indices(stock[f"mps.{number}"].split(" GRES=")[1]) for number in range(2)]
    assert len(halves[0]) == 1
    assert halves[0] == halves[1]
    assert nodes("features.0") in ("n1", "n2")
    assert nodes("features.1") in ("n3", "n4", "n5", "n6")
    assert count("licences", "JobState=RUNNING") == 2
    assert count("licences", "Reason=Licenses") == 1
    assert nodes("topology.0") in ("n[1-2]", "n[3-4]", "n[5-6]")
    assert "JobState=CONFIGURING" in stock["power-saving.0"]
    assert (nodes("power-saving.0"), nodes("power-saving.1")) == ("n8", "n7")
    assert nodes("reservations-own.0") in ("n1", "n2")
    assert nodes("reservations-short.0") in ("n3", "n4")
    assert {nodes(f"reservations-long.{number}") for number in range(3)} == {"n5", "n6", ""}
    assert count("preemption", "Restarts=1") == 2
    assert count("preemption-urgent", "JobState=RUNNING") == 1
