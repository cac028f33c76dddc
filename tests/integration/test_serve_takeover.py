"""Services of models on two controllers, of this system's Slurm and of a newer one: a takeover loses no replica."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from dev_cluster.accounts import SERVE_USERS
from dev_cluster.cluster import DevCluster
from dev_cluster.configuration import ADDRESSES
from dev_cluster.layout import INSIDE
from sluice.base.errors import SluiceError
from sluice.base.tokens import TokenStore
from sluice.exchange.serving import LeaseReport, LeaseRow
from sluice.serve.replicad.leases import FRESH_S, HOLD_US
from tests.integration.private_slurm import free_ports
from tests.integration.serve_site import ServeSite, serve_site

pytestmark = pytest.mark.cluster
_NUMBERS = itertools.count(1)
_HOSTS = ("ctl1", "ctl2")


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


@dataclass(frozen=True, slots=True)
class Revocation:
    """Of a key at `began`, in the store of `host`; `took`: seconds until the gateway of the host `seen` refused it."""

    began: float
    host: str
    seen: str
    took: float


class Revoking(threading.Thread):
    """A gateway on each controller with a store of its own; keys that both have are revoked in one of the two."""

    def __init__(self, site: ServeSite) -> None:
        super().__init__(daemon=True)
        self.site = site
        self.found: list[Revocation] = []
        self.led: list[tuple[float, list[bool]]] = []
        """When who said that it leads."""
        self.slowest = 0.0
        """Of the answers to keys that hold: how slow this machine is."""
        self._rounds = 0
        self.over, self.error = threading.Event(), ""
        folder = site.cluster.layout.folder
        self._stores = {host: TokenStore(folder / f"keys-{host}.json") for host in _HOSTS}
        self._ports = dict(zip(_HOSTS, free_ports(2), strict=True))
        one, other = self._stores.values()
        made = [one.create("alice", ["serve"], now=time.time(), seconds=3600) for _ in range(400)]
        self._keys = iter([(token.id, key) for token, key in made])
        other.path.write_bytes(one.path.read_bytes())
        for host, store in self._stores.items():
            os.chown(store.path, 0, SERVE_USERS["sluice-gateway"])
            store.path.chmod(0o640)
            records = f"/var/lib/sluice-gateway/{host}"
            site.cluster.run(["install", "-d", "-o", "sluice-gateway", records], node=host, cwd="/")
            words = ["--address", ADDRESSES[host], "--port", str(self._ports[host]), "--workers", "1", "-v"]
            words += ["--tokens", str(INSIDE / store.path.name), "--records", records]
            site.cluster.start_program(f"keys@{host}", ["sluice", "gateway", *words], node=host, user="sluice-gateway")

    def run(self) -> None:
        """Two keys at a time, one in each store."""
        try:
            while not self.over.wait(1.0):
                self._revoke({host: next(self._keys) for host in _HOSTS})
        except Exception as error:
            self.error = repr(error)

    def _revoke(self, keys: dict[str, tuple[str, str]]) -> None:
        self._rounds += 1
        left = {(host, seen): key for host, (_, key) in keys.items() for seen in _HOSTS}
        for (_, seen), key in left.items():
            began = time.monotonic()
            assert self.status(seen, key) == 200
            self.slowest = max(self.slowest, time.monotonic() - began)
        began = time.monotonic()
        for host, (name, _) in keys.items():
            self._stores[host].revoke([name])
        while left and not self.over.is_set():
            self.led.append((time.monotonic(), [leads(self.site, host) for host in _HOSTS]))
            for (host, seen), key in list(left.items()):
                if (status := self.status(seen, key)) != 200:
                    assert status == 401, status
                    del left[host, seen]
                    self.found.append(Revocation(began, host, seen, time.monotonic() - began))
            time.sleep(0.02)

    def status(self, host: str, key: str) -> int:
        """What a gateway says to one who asks for its models; 0: nothing. From other addresses in each round, as those
        that send unknown keys are slowed down."""
        client = f"127.{1 + self._rounds % 250}.0.1"
        asking = http.client.HTTPConnection(ADDRESSES[host], self._ports[host], 60, (client, 0))
        with suppress(OSError), closing(asking) as asked:
            asked.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
            return asked.getresponse().status
        return 0

    def since(self, begin: float, count: int) -> list[Revocation]:
        """So many at least that began then or later, as soon as there are."""

        def look() -> list[Revocation]:
            assert not self.error, self.error
            return [one for one in self.found if one.began >= begin]

        found: list[Revocation] = self.site.until(look, lambda seen: len(seen) >= count)
        return found

    @property
    def most_s(self) -> float:
        """A second, and what this machine needs more."""
        return 1.0 + 20 * self.slowest


@pytest.fixture(scope="module")
def revoking(site: ServeSite) -> Iterator[Revoking]:
    if site.cluster.facts["root"] is not None:
        pytest.skip("the gateway's event loop is compiled for this system")
    made = Revoking(site)
    _, key = next(made._keys)
    for host in _HOSTS:
        site.until(lambda host=host: made.status(host, key) == 200)
    made.start()
    yield made
    made.over.set()
    made.join()


def test_a_key_that_is_revoked_on_one_host_is_refused_on_both_within_a_second(revoking: Revoking) -> None:
    revoking.since(0, 4)  # the first ones, while gateways make themselves known
    found = revoking.since(time.monotonic(), 12)
    print(sorted(round(one.took, 2) for one in found), revoking.slowest)
    assert {(one.host, one.seen) for one in found} == {(host, seen) for host in _HOSTS for seen in _HOSTS}
    assert max(one.took for one in found) <= revoking.most_s, found


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


def test_keys_that_are_revoked_in_a_takeover_are_refused_on_both_hosts(revoking: Revoking) -> None:
    """On their own host within a second; on the other one as soon as the new authority answers, and from then on within
    a second again."""
    begin = next(after for (_, led), (after, now) in itertools.pairwise(revoking.led) if led != now)
    begin = max(at for at, led in revoking.led if at < begin and led == [True, False])
    end = next(at for at, led in revoking.led if led == [False, True]) + FRESH_S + HOLD_US / 1e6
    after = revoking.since(end, 12)
    during = [one for one in revoking.since(0, 1) if begin - revoking.most_s <= one.began < end]
    print(f"{end - begin:.1f} s of a takeover:", [(one.host, one.seen, round(one.took, 2)) for one in during])
    print("after it:", sorted(round(one.took, 2) for one in after), revoking.slowest)
    assert max(one.took for one in after) <= revoking.most_s, after
    assert {one.host for one in during} == set(_HOSTS)
    for one in during:
        assert one.took <= (revoking.most_s if one.host == one.seen else end - one.began + revoking.most_s), one
    revoking.over.set()


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
