"""Power caps of a node: rules, what drivers are asked, what is restored; with simulated drivers of all vendors."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gpu_sim import library_dir, load_platform, write_node_state
from gpu_sim.fields import get_values, set_values
from policy.node_power import NodeCap, NodePower, NodeThermal
from prolog_epilog.devices import NodeDevice
from prolog_epilog.power.heat import Heat
from prolog_epilog.power.journal import Journal
from prolog_epilog.power.keeper import PowerKeeper
from prolog_epilog.power.reports import PowerReports
from prolog_epilog.power.rules import JobCap, Wanted, cap_for, job_cap, read_watts, wanted, within
from prolog_epilog.power_limits import PowerLimit
from prolog_epilog.refusals import Refusal
from prolog_epilog.state import RefusalError, Settings, State
from prolog_epilog.watching import Watch, Watcher
from prolog_epilog.worker import Worker
from sluice.base.duties import NotYet
from sluice.base.errors import SluiceError
from sluice.exchange.power import NodePowers, PowerOrder, PowerReport
from sluice.exchange.record import Grant, JobRecord
from tests.unit.prolog_epilog.examples import device

H100 = PowerLimit(700_000, 700_000, 200_000, 700_000)
PLATFORMS = {"nvidia": "dgx-h100", "amd": "mi300x-platform", "intel": "intel-max-1550x4"}
TYPES = {"nvidia": "h100", "amd": "mi300x", "intel": "max_1550"}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may set power limits")


# ---- rules ----


@pytest.mark.parametrize(
    ("site", "jobs", "order", "heat", "expected"),
    [
        (700, [], None, None, Wanted(700_000)),
        (700, [300], None, None, Wanted(300_000, "job")),
        (700, [300, 500], None, None, Wanted(500_000, "job")),  # no job is slowed down by what another asked for
        (700, [300, None], None, None, Wanted(700_000)),
        (400, [300, None], None, None, Wanted(400_000)),
        (400, [500, None], None, None, Wanted(500_000, "job")),  # as the policy allows
        (700, [300], 400, None, Wanted(300_000, "job")),
        (700, [500], 400, None, Wanted(400_000, "order")),
        (700, [], 400, None, Wanted(400_000, "order")),
        (700, [500], 400, 75, Wanted(300_000, "thermal")),
        (700, [], None, 90, Wanted(630_000, "thermal")),
        (431, [None], None, 90, Wanted(387_000, "thermal")),  # whole watts
        (700, [], 50, None, Wanted(200_000, "order")),  # as low as the hardware goes
        (700, [], 900, None, Wanted(700_000)),
    ],
)
def test_the_cap_of_a_gpu(
    site: int, jobs: list[int | None], order: int | None, heat: int | None, expected: Wanted
) -> None:
    def mw(watts: int | None) -> int | None:
        return None if watts is None else watts * 1000

    assert wanted(H100, site * 1000, [JobCap(mw(job)) for job in jobs], mw(order), heat) == expected


def test_the_first_cap_of_the_policy_that_fits_counts() -> None:
    policy = NodePower(
        caps=(
            NodeCap(gpu_types=("h100",), accounts=("physics", "optics"), watts=300, at_most=400),
            NodeCap(gpu_types=("h100",), watts=500),
            NodeCap(accounts=("chemistry",), watts=250),
        )
    )
    found = [cap_for(policy, *about) for about in (("h100", "optics"), ("h100", "chemistry"), ("a100", "chemistry"))]
    assert [one and one.watts for one in found] == [300, 500, 250]
    assert cap_for(policy, "a100", "physics") is None


def test_what_a_job_may_ask_for() -> None:
    cap = NodeCap(watts=300, at_most=400)
    assert job_cap(None, None, H100, 700_000) is None
    assert job_cap(cap, None, H100, 700_000) == 300_000
    assert job_cap(cap, 400, H100, 700_000) == 400_000 and job_cap(cap, 250, H100, 700_000) == 250_000
    assert job_cap(NodeCap(watts=900), None, H100, 700_000) == 700_000
    for asked, refusal in ((401, Refusal.POWER_OVER_POLICY), (199, Refusal.POWER_OUT_OF_RANGE)):
        with pytest.raises(RefusalError) as told:
            job_cap(cap, asked, H100, 700_000)
        assert told.value.refusal is refusal
    with pytest.raises(RefusalError, match="at most 700 W"):
        job_cap(None, 701, H100, 700_000)
    with pytest.raises(RefusalError, match="at most 500 W"):
        job_cap(None, 501, H100, 500_000)  # what the site has set
    assert job_cap(NodeCap(watts=300, at_most=600), 600, H100, 500_000) == 600_000


def test_a_job_is_held_to_the_lower_of_its_own_cap_and_what_was_planned() -> None:
    assert [JobCap(*caps).of(600) for caps in ((), (700,), (700, 350), (300, 350), (None, 350), (None, 650))] == [
        600, 700, 350, 300, 350, 600,
    ]  # fmt: skip
    assert [within(watts, H100) for watts in (100, 350, 900)] == [200_000, 350_000, 700_000]


def test_watts_are_read_as_job_submit_writes_them() -> None:
    assert read_watts("400W") == read_watts("400") == 400
    for text in ("", "0W", "W", "-1", "4e2", "400w", "400 W", "100001", "١٢", "9" * 5000):
        with pytest.raises(RefusalError, match="not a number of watts"):
            read_watts(text)


def test_heat_lowers_the_cap_step_by_step_and_lets_it_go_slowly() -> None:
    policy, heat = NodeThermal(after_s=10, lower_percent=10, least_percent=75), Heat()
    seen = []
    for second in range(60):
        heat.look(True, float(second), policy)
        seen.append(heat.percent(policy))
    assert [seen[at] for at in (9, 10, 20, 30, 59)] == [100, 90, 80, 75, 75] and heat.steps == 3
    for second in range(60, 300):
        heat.look(False, float(second), policy)
        seen.append(heat.percent(policy))
    assert seen[118] == 75 and seen[119] == 80 and seen[-1] == 100 and heat.steps == 0
    for second in range(300, 360):  # now and then is no reason
        assert not heat.look(second % 3 == 0, float(second), policy)
    assert not heat.look(True, 10_000.0, policy)  # nor is a long time without a sample


# ---- journal ----


def test_the_journal_is_of_one_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "power.json"
    made = Journal(path)
    made.keep("GPU-0", 700_000)
    made.keep("GPU-0", 300_000)  # the first counts
    again = Journal(path)
    again.load()
    assert again.before == {"GPU-0": 700_000}
    monkeypatch.setattr("prolog_epilog.power.journal.boot_id", lambda: "another")
    rebooted = Journal(path)
    rebooted.load()
    assert rebooted.before == {} and rebooted.order == PowerOrder()


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    path = tmp_path / "power.json"
    for text in ("", "[]", "{}", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(SluiceError, match=r"power.json: not the journal"):
            Journal(path).load()


def test_nothing_is_remembered_that_could_not_be_written(tmp_path: Path) -> None:
    made = Journal(tmp_path / "missing/power.json")
    with pytest.raises(OSError, match="No such file"):
        made.keep("GPU-0", 700_000)
    assert made.before == {}


# ---- a node ----


@dataclass
class Site:
    """A simulated node and its keeper."""

    folder: Path
    state: State
    watcher: Watcher
    keeper: PowerKeeper
    policy: NodePower

    def limit(self, gpu: int = 0) -> int:
        return int(get_values(self.folder, gpu)["power_limit"])

    def set(self, gpu: int = 0, **values: object) -> None:
        set_values(self.folder, gpu, {name: str(value) for name, value in values.items()})

    def job(
        self, job: int, *gpus: int, asked: str | None = None, account: str = "physics", planned: str | None = None
    ) -> JobRecord:
        """A job's prolog, as far as power goes."""
        chosen = [self.state.devices[gpu] for gpu in gpus]
        plan = self.keeper.plan(account, chosen, asked, planned)
        grants = [Grant(one.index, one.uuid, one.vendor, one.model, 1 << 30) for one in chosen]
        record = JobRecord(job, 1000, "ann", account, "main", "n1", time.time(), grants=grants)
        self.keeper.give(record, plan)
        self.state.records[job] = record
        self.keeper.began(record)
        return record

    def end(self, record: JobRecord) -> None:
        del self.state.records[record.job]
        self.keeper.ended(record)

    def again(self) -> None:
        """A new agent."""
        self.keeper = PowerKeeper(self.state, self.watcher, lambda: self.policy)
        self.keeper.load()


@pytest.fixture
def make_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Site]]:
    made: list[Site] = []

    def make(vendor: str) -> Site:
        folder = tmp_path / "sim"
        write_node_state(folder, load_platform(PLATFORMS[vendor]), "n1", shared=tmp_path / "shared")
        monkeypatch.setenv("SLUICE_SIM_STATE", str(folder / "state"))
        monkeypatch.setenv("LD_LIBRARY_PATH", str(library_dir()))
        state = State(Settings(run=tmp_path / "run", records=tmp_path / "records"))
        state.node = "n1"
        (tmp_path / "run/agent").mkdir(parents=True)
        watcher = Watcher(state, lambda: None)  # type: ignore[arg-type,return-value]
        watcher.watches[vendor] = Watch(Worker(vendor, timeout=20.0))
        state.devices = _devices(watcher.watches[vendor])
        made.append(Site(folder, state, watcher, None, NodePower()))  # type: ignore[arg-type]
        made[-1].again()
        return made[-1]

    yield make
    for site in made:
        site.watcher.close()


def _devices(watch: Watch) -> list[NodeDevice]:
    """As the vendor's library lists them; instances of the first GPU come first."""
    vendor = watch.worker.vendor
    uuids = list(watch.worker.ask(do="sample", used=True)["used"])
    return [device(index, vendor=vendor, uuid=uuid, type=TYPES[vendor]) for index, uuid in enumerate(uuids)]


@needs_root
@pytest.mark.parametrize("vendor", PLATFORMS)
def test_jobs_caps_and_what_was_before(make_site: Callable[[str], Site], vendor: str) -> None:
    site = make_site(vendor)
    default = site.limit()
    site.set(power_limit=default - 50)  # the site's own setting
    one = site.job(1, 0, asked=f"{default // 2}W")
    assert site.limit() == default // 2 and site.limit(1) == default
    other = site.job(2, 0, asked=f"{default // 2 + 100}W")
    assert site.limit() == default // 2 + 100
    third = site.job(3, 0)
    assert site.limit() == default - 50  # a job without a cap has the site's
    for record, left in ((third, default // 2 + 100), (other, default // 2), (one, default - 50)):
        site.end(record)
        assert site.limit() == left
    with pytest.raises(RefusalError) as told:
        site.job(4, 0, asked=f"{default + 1}W")
    assert told.value.refusal in (Refusal.POWER_OVER_POLICY, Refusal.POWER_OUT_OF_RANGE)


@needs_root
def test_no_job_raises_what_the_site_has_set(make_site: Callable[[str], Site]) -> None:
    site = make_site("nvidia")
    site.set(power_limit=500)
    site.job(1, 0, asked="300W")
    with pytest.raises(RefusalError, match="at most 500 W"):
        site.job(2, 0, asked="501W")  # also while another's cap is in force
    site.job(3, 0, asked="500W")
    assert site.limit() == 500


@needs_root
def test_the_policys_cap_and_one_without(make_site: Callable[[str], Site]) -> None:
    site = make_site("nvidia")
    site.policy = NodePower(caps=(NodeCap(gpu_types=("h100",), accounts=("physics",), watts=300, at_most=400),))
    capped = site.job(1, 0)
    assert site.limit() == 300 and capped.events[-1].detail["watts"] == 300.0
    site.job(2, 1, account="chemistry")
    assert site.limit(1) == 700
    with pytest.raises(RefusalError, match="at most 400 W"):
        site.job(3, 2, asked="401W")
    site.set(power_limit=650)  # somebody changes it under the job
    assert site.keeper.run() == 5.0 and site.limit() == 300


@needs_root
def test_drivers_that_refuse_or_have_no_limits(make_site: Callable[[str], Site]) -> None:
    site = make_site("nvidia")
    site.policy = NodePower(caps=(NodeCap(watts=300),))
    site.set(driver_power_limits=2)
    assert site.job(1, 0).grants[0].power_mw is None  # the policy cannot be met on such hardware: the job runs
    with pytest.raises(RefusalError) as told:
        site.job(2, 1, asked="250W")
    assert told.value.refusal is Refusal.POWER_UNSUPPORTED
    site.set(driver_power_limits=1)
    with pytest.raises(RefusalError) as told:
        site.job(3, 2)
    assert told.value.refusal is Refusal.POWER_NOT_SET and "Unknown Error" in str(told.value)
    process = site.watcher.watches["nvidia"].worker._process
    assert process is not None and process.poll() is None  # samples go on
    record = site.state.records.pop(3)
    site.set(driver_power_limits=0)
    site.keeper.ended(record)
    assert site.limit(2) == 700
    capped = site.job(4, 3)
    site.set(driver_power_limits=1)
    site.end(capped)  # it cannot be restored now
    assert site.limit(3) == 300 and site.keeper.run() == 1.0
    assert "Unknown Error" in next(one.problem for one in PowerReports(
        site.state, site.keeper, lambda: site.policy, lambda _: {}
    ).report().gpus if one.uuid == site.state.devices[3].gpu_uuid)  # fmt: skip
    site.set(driver_power_limits=0)
    site.keeper.run()
    assert site.limit(3) == 700


@needs_root
def test_a_slow_driver_is_waited_for(make_site: Callable[[str], Site]) -> None:
    site = make_site("nvidia")
    site.job(1, 0, asked="300W")
    site.set(driver_delay=100)
    site.job(2, 1, asked="400W")
    assert site.limit(1) == 400


@needs_root
def test_a_mig_gpu_has_one_cap(make_site: Callable[[str], Site]) -> None:
    site = make_site("nvidia")
    gpu = site.state.devices[0].uuid
    site.set(mig_layout="3g.40gb,3g.40gb")
    site.watcher.close()  # the library opens again
    devices = _devices(site.watcher.watches["nvidia"])
    assert [one.uuid[:4] for one in devices[:3]] == ["MIG-", "MIG-", "GPU-"]
    site.state.devices = [replace(one, partition="3g.40gb", parent=gpu) for one in devices[:2]]
    low, high = site.job(1, 0, asked="300W"), site.job(2, 1, asked="400W")
    assert site.limit() == 400
    site.end(high)
    assert site.limit() == 300
    site.end(low)
    assert site.limit() == 700


@needs_root
def test_orders_of_the_controllers(make_site: Callable[[str], Site], monkeypatch: pytest.MonkeyPatch) -> None:
    site, controllers = make_site("nvidia"), NodePowers()
    site.policy = NodePower(report=True)
    uuid = site.state.devices[0].gpu_uuid
    site.set(power=650)
    reports = PowerReports(site.state, site.keeper, lambda: site.policy, controllers.take)
    wait = reports.run()
    assert wait is not None and wait <= 0.8
    [before] = [one for one in controllers.latest()["n1"].report.gpus if one.uuid == uuid]
    assert (before.cap_w, before.default_w, before.least_w, before.most_w) == (700, 700, 200, 700)
    first = controllers.order("n1", {uuid: 300})
    assert controllers.order("n1", {uuid: 300}) is first  # the same again
    reports.run()
    assert site.limit() == 300 and site.keeper.order.number == first.number
    time.sleep(0.3)
    report = reports.report()
    [now] = [one for one in report.gpus if one.uuid == uuid]
    assert (now.cap_w, now.before_w, now.why, report.order) == (300, 700, "order", first.number)
    assert now.power_w == pytest.approx(300, rel=0.4)  # 650 W without the cap
    site.again()  # the order outlives the agent
    assert site.keeper.order == first
    site.keeper.obey(PowerOrder(first.number + 1, {uuid: 250}))
    assert site.limit() == 250
    monkeypatch.setattr("prolog_epilog.power.journal.boot_id", lambda: "another")
    site.set(power_limit="default")  # as hardware does
    site.again()
    assert site.keeper.order.number == 0 and site.keeper.run() == 5.0 and site.limit() == 700
    monkeypatch.undo()
    site.keeper.obey(first)
    site.policy = NodePower()  # the budgets are gone
    assert isinstance(PowerReports(site.state, site.keeper, lambda: site.policy, controllers.take).run(), NotYet)
    assert site.limit() == 700


def test_orders_grow_over_restarts_of_the_controllers() -> None:
    ahead = NodePowers(wall=lambda: 2e9).order("n1", {"GPU-0": 300})
    later = NodePowers(wall=lambda: 1e9)  # another controller, whose clock is behind
    assert later.take(PowerReport("n1", ahead.number).to_dict()) == {}
    order = later.order("n1", {"GPU-0": 400})
    assert order.number > ahead.number
    assert later.take(PowerReport("n1", ahead.number).to_dict()) == {"order": order.to_dict()}
    assert later.take(PowerReport("n1", order.number).to_dict()) == {}
    unseen = NodePowers(wall=lambda: 1e9)
    unseen.order("n2", {"GPU-0": 250})  # before its first report
    [found] = unseen.take(PowerReport("n2", ahead.number).to_dict()).values()
    assert found["number"] > ahead.number and found["caps"] == {"GPU-0": 250}


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"node": "", "order": 0, "gpus": []},
        {"node": "n1", "order": -1, "gpus": []},
        {"node": "n1", "order": True, "gpus": []},
        {"node": "n1", "order": 0, "gpus": [{}] * 65},
        {"node": "n1", "order": 0, "gpus": [{"uuid": "x" * 97}]},
        {"node": "n1", "order": 0, "gpus": [{"uuid": "a", "cap_w": "300"}]},
        {"node": "n1", "order": 0, "gpus": [{"uuid": "a", "cap_w": float("nan")}]},
        {"node": "n1", "order": 0, "gpus": [{"uuid": "a", "jobs": [-1]}]},
        {"node": "n1", "order": 0, "gpus": [{"uuid": "a", "why": "\x1b"}]},
    ],
)
def test_what_no_node_sends_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SluiceError, match="power: not a node's report"):
        NodePowers().take(wrong)


def test_what_is_no_order_is_refused() -> None:
    for wrong in ({}, {"number": 1, "caps": {"a": None}}, {"number": "1", "caps": {}}, {"number": 1, "caps": [1]},
                  {"number": 1, "caps": {}, "lifted": 1}, {"number": 1, "caps": {}, "lifted": [-1]}):  # fmt: skip
        with pytest.raises(SluiceError, match="not an order of caps"):
            PowerOrder.from_dict(wrong)


@needs_root
def test_a_planned_cap_holds_until_the_controllers_order_another(make_site: Callable[[str], Site]) -> None:
    site = make_site("nvidia")
    site.state.jobs.prepare()
    site.policy = NodePower(report=True)
    reports = PowerReports(site.state, site.keeper, lambda: site.policy, lambda _: {})
    uuids = [site.state.devices[gpu].gpu_uuid for gpu in (0, 1)]

    def reported() -> list[tuple[float | None, ...]]:
        found = {one.uuid: one for one in reports.report().gpus}
        return [(found[uuid].cap_w, found[uuid].jobs_w, found[uuid].planned_w) for uuid in uuids]

    site.job(1, 0, planned="350")
    second = site.job(2, 1, asked="500W", planned="350")
    assert reported() == [(350, None, 350), (350, 500, 350)]
    site.keeper.obey(PowerOrder(1, dict.fromkeys(uuids, 450.0)))  # not of these jobs: a controller that knew none here
    assert reported() == [(350, None, 350), (350, 500, 350)]
    site.keeper.obey(PowerOrder(2, dict.fromkeys(uuids, 450.0), lifted=(1, 2)))
    assert reported() == [(450, None, None), (450, 500, None)]
    assert site.state.jobs.load(2).grants[0].planned_mw is None
    site.keeper.obey(PowerOrder(3))
    assert reported() == [(700, None, None), (500, 500, None)]
    site.end(second)
    site.job(3, 1, planned="300")
    assert reported()[1] == (300, None, 300)


@needs_root
def test_an_agent_that_dies_as_it_lifts_a_planned_cap_leaves_the_rest_to_the_next(
    make_site: Callable[[str], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site("nvidia")
    site.state.jobs.prepare()
    site.job(1, 0, planned="350")
    with monkeypatch.context() as killed:
        killed.setattr(PowerKeeper, "_lift", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            site.keeper.obey(PowerOrder(1, {site.state.devices[0].gpu_uuid: 450.0}, lifted=(1,)))
    assert site.limit() == 350
    with monkeypatch.context() as full:
        full.setattr(site.state.jobs, "save", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        site.again()
    site.again()
    site.keeper.run()
    assert site.limit() == 450


@needs_root
def test_an_order_lifts_a_planned_cap_only_of_gpus_for_which_it_has_one(make_site: Callable[[str], Site]) -> None:
    """E.g. as the driver did not answer for the other GPU when the controllers decided."""
    site = make_site("nvidia")
    site.state.jobs.prepare()
    site.job(1, 0, 1, planned="350")
    first, second = (site.state.devices[gpu].gpu_uuid for gpu in (0, 1))
    site.keeper.obey(PowerOrder(1, {first: 450.0}, lifted=(1,)))
    site.keeper.run()
    assert (site.limit(0), site.limit(1)) == (450, 350)
    site.keeper.obey(PowerOrder(2, {first: 450.0, second: 400.0}, lifted=(1,)))
    assert (site.limit(0), site.limit(1)) == (450, 400)


@needs_root
def test_an_order_for_one_run_lifts_nothing_of_the_next_for_a_later_agent(make_site: Callable[[str], Site]) -> None:
    site = make_site("nvidia")
    site.state.jobs.prepare()
    record = site.job(1, 0, planned="350")
    site.keeper.obey(PowerOrder(1, {site.state.devices[0].gpu_uuid: 450.0}, lifted=(1,)))
    site.end(record)
    site.job(1, 0, planned="300")  # it was requeued; the controllers are away
    site.again()
    site.keeper.run()
    assert site.limit() == 300


@needs_root
def test_a_run_that_starts_as_an_order_is_obeyed_keeps_its_record(
    make_site: Callable[[str], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site("nvidia")
    site.state.jobs.prepare()
    record = site.job(1, 0, planned="350")
    settle = site.keeper.settle

    def slow(uuids: Iterable[str]) -> dict[str, str]:
        monkeypatch.setattr(site.keeper, "settle", settle)
        site.end(record)
        site.state.jobs.save(site.job(1, 1, planned="300"))
        return settle(uuids)

    monkeypatch.setattr(site.keeper, "settle", slow)
    site.keeper.obey(PowerOrder(1, {site.state.devices[0].gpu_uuid: 450.0}, lifted=(1,)))
    assert [grant.planned_mw for grant in site.state.jobs.load(1).grants] == [300_000]


@needs_root
def test_heat_lowers_the_cap_of_a_busy_gpu(make_site: Callable[[str], Site]) -> None:
    site, now = make_site("nvidia"), [0.0]
    site.policy = NodePower(thermal=NodeThermal(after_s=10, lower_percent=20, least_percent=60))
    site.keeper = PowerKeeper(site.state, site.watcher, lambda: site.policy, lambda: now[0])
    woken: list[float] = []
    site.keeper.on_due = lambda: woken.append(now[0])
    record = site.job(1, 0)
    uuid, watch = site.state.devices[0].uuid, site.watcher.watches["nvidia"]
    for second in range(12):
        now[0] = float(second)
        site.keeper.on_sample(watch, {"devices": {uuid: {"throttle": ["thermal"]}}})
    site.keeper.on_sample(watch, {"devices": {uuid: 5}})  # no sample: nobody's watch ends
    assert woken == [10.0]
    site.keeper.run()
    assert site.limit() == 560
    site.again()  # a new agent goes on with it
    site.keeper.run()
    assert site.limit() == 560
    site.end(record)
    site.keeper.run()
    assert site.limit() == 700


# ---- SIGKILL ----

AGENT = """
import json, random, sys, time
from pathlib import Path
from policy.node_power import NodePower
from prolog_epilog.power.keeper import PowerKeeper
from prolog_epilog.state import Settings, State
from prolog_epilog.watching import Watch, Watcher
from prolog_epilog.worker import Worker
from sluice.exchange.power import PowerOrder
from sluice.exchange.record import Grant, JobRecord
from tests.unit.prolog_epilog.examples import device
from tests.unit.prolog_epilog.examples import device

run, seed, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
choose = random.Random(seed)
state = State(Settings(run=run, records=run / "records"))
state.devices = [device(i, uuid=uuid) for i, uuid in enumerate(json.loads(sys.argv[4]))]
state.jobs.prepare()
state.find_jobs()
watcher = Watcher(state, None)
watcher.watches["nvidia"] = Watch(Worker("nvidia", timeout=20.0))
keeper = PowerKeeper(state, watcher, NodePower)
keeper.load()
keeper._unsure_until = 0.0  # what is restored is forgotten at once: calls of a simulated driver end with their process
keeper.look()  # the driver's process has started
print("ready", flush=True)
if rounds == 0:  # the last agent: all jobs have ended, and the order is withdrawn
    for record in list(state.records.values()):
        del state.records[record.job]
        state.jobs.remove(record.job)
        keeper.ended(record)
    keeper.obey(PowerOrder())
    keeper.run()
for number in range(rounds):
    job, gpu = choose.randrange(3), choose.randrange(len(state.devices))
    if choose.random() < 0.1:
        keeper.obey(PowerOrder(keeper.order.number + 1, {state.devices[gpu].uuid: choose.randrange(200, 700)}))
    elif job in state.records:
        record = state.records.pop(job)
        state.jobs.remove(job)
        keeper.ended(record)
    else:
        one = state.devices[gpu]
        grant = Grant(one.index, one.uuid, "nvidia", "H100", 1 << 30, power_mw=1000 * choose.randrange(200, 700))
        record = JobRecord(job, 1000, "ann", "physics", "main", "n1", 1.0, grants=[grant])
        state.jobs.save(record)
        state.records[job] = record
        keeper.began(record)
watcher.close()
print("done", flush=True)
"""


@needs_root
def test_limits_are_restored_exactly_whenever_the_agent_is_killed(
    make_site: Callable[[str], Site], full_scale: bool
) -> None:
    """Agents that set and restore caps all the time, killed at any moment; what was set before is a site's own."""
    site, choose = make_site("nvidia"), random.Random(5)
    before = [700, 650, 431, 200]
    uuids = [one.uuid for one in site.state.devices[: len(before)]]
    for gpu, watts in enumerate(before):
        site.set(gpu, power_limit=watts)

    def start(seed: int, rounds: int) -> subprocess.Popen[str]:
        arguments = [str(site.state.settings.run), str(seed), str(rounds), json.dumps(uuids)]
        return subprocess.Popen(
            [sys.executable, "-c", AGENT, *arguments],
            stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3], start_new_session=True,
        )  # fmt: skip

    kills = 1000 if full_scale else 24
    changed = 0
    for number in range(kills):
        with start(number, 10_000) as agent:
            assert agent.stdout is not None and agent.stdout.readline() == "ready\n"
            time.sleep(choose.uniform(0.0, 0.2))
            os.kill(agent.pid, signal.SIGKILL)  # not its driver's process, which ends with the pipe
        changed += [site.limit(gpu) for gpu in range(len(before))] != before
    assert changed > kills // 8  # caps were in force when it was killed
    with start(0, 0) as agent:
        out, _ = agent.communicate(timeout=60)
    assert out == "ready\ndone\n"
    assert [site.limit(gpu) for gpu in range(len(before))] == before
