"""Services of models on two controllers, of this system's Slurm and of a newer one: a takeover loses no replica."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from sluice.base.errors import SluiceError
from sluice.exchange.serving import LeaseReport, LeaseRow
from tests.integration.serve_site import ServeSite, serve_site

pytestmark = pytest.mark.cluster
_NUMBERS = itertools.count(1)


@pytest.fixture(scope="module", params=["native", pytest.param("24.11", marks=pytest.mark.trixie)])
def site(request: pytest.FixtureRequest, make_shared_cluster: Callable[..., DevCluster]) -> Iterator[ServeSite]:
    options = {} if request.param == "native" else {"root": request.getfixturevalue("trixie_root")}
    yield from serve_site(make_shared_cluster, controllers=2, **options)


def leads(site: ServeSite, host: str) -> bool:
    """Whether controllerd of a controller says so."""
    return bool(json.loads((site.cluster.folder / "controllerd" / host / "status.json").read_text())["leads"])


def launches(site: ServeSite, host: str) -> int:
    """Of replicas of the service that the tests ask for, by the root's helper of a controller."""
    return sum(one["detail"]["service"] == "words" for one in site.audited("serve launch", host))


def test_both_hear_the_replica_that_one_launches(site: ServeSite) -> None:
    site.gateways = "ctl2"  # whose replicad does not lead
    site.need(waiting=1)
    for host in ("ctl1", "ctl2"):
        (row,) = site.until(lambda host=host: site.replicas(host=host)).values()
        assert row["secret"] == "cd" * 32
    assert launches(site, "ctl1") == 1 and not site.audited("serve launch", "ctl2")
    assert len(site.jobs()) == 1


def lease(site: ServeSite, host: str, number: int) -> dict[str, Any]:
    """What a gateway gets, over replicad of its host, of the ten requests at once that alice may have."""
    need = LeaseRow("user", "alice", (0, 0, 0, 0), (0, 0), need=(0, 0, 10, 0))
    report = LeaseReport(f"gateway-{host}", number, number - 1, (need,))
    found: dict[str, Any] = site.ask("lease", host, report=asdict(report))["lease"]
    return found


def leased(site: ServeSite) -> dict[str, dict[str, Any]]:
    """As soon as both gateways are answered, and given what there is."""

    def ask() -> dict[str, dict[str, Any]]:
        with suppress(SluiceError):
            return {host: lease(site, host, next(_NUMBERS)) for host in ("ctl1", "ctl2")}
        return {}

    found: dict[str, dict[str, Any]] = site.until(
        ask, lambda seen: bool(seen) and all(one["granted"] for one in seen.values())
    )
    return found


def test_gateways_of_both_hosts_get_their_parts_of_limits_from_one_of_them(site: ServeSite) -> None:
    found = leased(site)
    assert len({one["epoch"] for one in found.values()}) == 1  # the one that does not lead passes the question on
    assert len({one["part"] for one in found.values()}) == 2  # of the gateways that there are


def test_a_takeover_loses_no_replica_and_goes_on(site: ServeSite) -> None:
    site.gateways = "ctl1"
    site.need(in_flight=1)
    ((before, _),) = site.until(site.replicas).items()
    site.cluster.run(["scontrol", "takeover"], node="ctl2", check=False)
    site.until(lambda: [leads(site, host) for host in ("ctl1", "ctl2")], lambda seen: seen == [False, True])
    time.sleep(10)  # in which what the old controller saw before is too old to act on
    site.need(waiting=4, in_flight=4, oldest_s=3.0, delay_s=3.0)
    found = site.until(lambda: site.replicas(host="ctl2"), lambda rows: len(rows) == 2, timeout=90)
    assert before in found
    assert launches(site, "ctl2") == 1, site.logs()
    time.sleep(2)
    assert {launch for _, _, launch in site.jobs()} == set(found)
    assert len({one["epoch"] for one in leased(site).values()}) == 1


def test_the_other_ones_death_changes_nothing(site: ServeSite) -> None:
    site.cluster.stop_daemon("replicad@ctl1", number=9)
    site.gateways = "ctl2"
    site.need(in_flight=8)
    before = site.until(lambda: site.replicas(host="ctl2"), lambda rows: len(rows) == 2)
    site.cluster.run(["scancel", str(next(iter(before.values()))["job"])])
    site.until(
        lambda: set(site.replicas(host="ctl2")), lambda now: len(now) == 2 and len(now & set(before)) == 1, timeout=90
    )
    site.empty()
