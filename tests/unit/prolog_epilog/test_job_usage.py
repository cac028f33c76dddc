"""How a job used its GPUs, from samples of known shape, without Slurm and without root."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prolog_epilog import accounting as module
from prolog_epilog.accounting import Accounting
from prolog_epilog.cgroups import Place
from prolog_epilog.state import Settings, State
from prolog_epilog.summary import GpuUse, Histogram, Interval, grown_errors, split_energy
from prolog_epilog.watching import Watch
from sluice.base.clock import uptime
from sluice.exchange.record import Grant, JobRecord

GIB = 1 << 30
S = 10**9


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Site:
    """An agent's accounting with a clock and samples of one's own; processes 100 to 199 are of job 1, and so on."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, boot: str = "boot-1") -> None:
        monkeypatch.setattr(module.cgroups, "place_of", lambda pid: Place(pid // 100, "batch") if pid >= 100 else None)
        monkeypatch.setattr(module, "boot_id", lambda: boot)
        self.state = State(Settings(run=folder / "run", library=folder, records=folder / "records"))
        self.clock = Clock()
        self.sums = Accounting(self.state, folder / "running", self.clock)
        self.sums.load()
        self.busy: dict[str, dict[int, int]] = {}
        self.device: dict[str, dict[str, Any]] = {}
        self.usage: list[list[Any]] = []

    def job(self, number: int, uuid: str = "GPU-0", limit: int | None = None, vendor: str = "nvidia") -> JobRecord:
        record = JobRecord(number, 1000, "ann", "physics", "main", "n1", float(number))
        record.grants = [Grant(0, uuid, vendor, "H100", 80 * GIB, limit=limit)]
        self.state.records[number] = record
        return record

    def end(self, record: JobRecord) -> dict[str, Any]:
        with self.state.lock:
            self.state.records.pop(record.job)
            self.sums.finish(record)
        assert record.usage is not None
        return dict(record.usage["gpus"])

    def tick(self, passed: float, vendor: str = "nvidia", full: dict[str, Any] | None = None) -> None:
        self.clock.now += passed
        watch = cast(Watch, SimpleNamespace(worker=SimpleNamespace(vendor=vendor), owners={}))
        answer = {"usage": self.usage, "busy": self.busy, "devices": self.device}
        if full is not None:
            answer["full"] = full
        self.sums.sample(watch, json.loads(json.dumps(answer)))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def told(busy_s: float, energy_j: float = 0.0, throttle: list[str] | None = None, **more: Any) -> dict[str, Any]:
    return {"busy_ns": int(busy_s * S), "energy_mj": int(energy_j * 1000), "throttle": throttle or [], **more}


def run_shape(site: Site, uuid: str, shape: list[tuple[float, dict[int, float], float]], period: float = 0.5) -> None:
    """Phases of (seconds, share of the GPU by process, watts); every process holds a GiB for each tenth of a share."""
    busy: dict[int, float] = {}
    device = energy = 0.0
    site.device[uuid] = told(0)
    site.busy.setdefault(uuid, {})
    site.tick(0)
    for seconds, shares, watts in shape:
        for _ in range(round(seconds / period)):
            for pid, share in shares.items():
                busy[pid] = busy.get(pid, 0.0) + share * period
            device += sum(shares.values()) * period
            energy += watts * period
            site.usage = [[uuid, pid, int(10 * share * GIB)] for pid, share in shares.items()]
            site.busy = {uuid: {pid: int(ns * S) for pid, ns in busy.items()}}
            site.device[uuid] = told(device, energy)
            site.tick(period)


def test_a_whole_gpu(site: Site) -> None:
    record = site.job(1)
    run_shape(site, "GPU-0", [(10, {100: 0.8}, 500), (5, {}, 100), (5, {100: 0.2, 101: 0.2}, 300)])
    use = site.end(record)["GPU-0"]
    assert use["seconds"] == 20 and use["idle_s"] == 5 and use["energy_j"] == 7000 and use["share"] == 1
    assert use["utilisation"] == {"mean": 50.0, "p50": pytest.approx(60, abs=21), "p95": 80.0, "peak": 80.0}
    assert use["memory"]["mean"] == pytest.approx((10 * 8 + 5 * 4) / 20 * GIB, rel=0.011)
    assert use["memory"]["p95"] == pytest.approx(8 * GIB, rel=0.011) and use["memory"]["peak"] == 8 * GIB
    assert use["errors"] == {} and use["rung"] == "none" and use["throttled_s"] == 0


def test_three_jobs_on_one_gpu(site: Site) -> None:
    records = [site.job(number, limit=20 * GIB) for number in (1, 2, 3)]
    run_shape(site, "GPU-0", [(10, {100: 0.5, 200: 0.3}, 400), (10, {300: 0.6}, 200), (10, {}, 100)])
    uses = [site.end(record)["GPU-0"] for record in records]
    assert [use["utilisation"]["mean"] for use in uses] == [pytest.approx(v, abs=0.05) for v in (16.67, 10, 20)]
    assert sum(use["energy_j"] for use in uses) == pytest.approx(7000)
    # by busy time where there is some, else by what was granted
    assert [use["energy_j"] for use in uses] == [pytest.approx(v + 1000 / 3) for v in (2500, 1500, 2000)]
    assert [use["share"] for use in uses] == [0.25] * 3 and [use["idle_s"] for use in uses] == [20, 20, 20]


def test_shared_gpu_of_a_driver_that_tells_nothing_of_processes(site: Site) -> None:
    first, second = site.job(1, vendor="intel"), site.job(2, vendor="intel")
    site.usage = [["GPU-0", 100, GIB], ["GPU-0", 200, 2 * GIB]]
    for step in range(5):
        site.device = {"GPU-0": told(step * 0.5, step * 100)}
        site.tick(1, vendor="intel")
    use = site.end(first)["GPU-0"]
    assert use["attributed"] is False and "utilisation" not in use and use["memory"]["mean"] == GIB
    assert use["energy_j"] == 200
    for step in range(5, 9):
        site.device = {"GPU-0": told(step * 0.5, step * 100)}
        site.tick(1, vendor="intel")
    assert site.end(second)["GPU-0"]["utilisation"]["mean"] == pytest.approx(50)  # alone it is known


def test_a_mig_instance_has_its_part_of_the_energy(site: Site) -> None:
    record = site.job(1, "MIG-1")
    for step in range(5):
        site.device = {"MIG-1": told(step * 0.25, step * 400, share=0.25)}
        site.tick(1)
    use = site.end(record)["MIG-1"]
    assert use["energy_j"] == 400 and use["energy_estimated"] and use["utilisation"]["mean"] == 25


def test_a_job_between_two_samples_of_others(site: Site) -> None:
    long = site.job(1)
    run_shape(site, "GPU-0", [(2, {100: 0.4}, 100)])
    short = site.job(2)
    site.tick(0.1)  # its prolog
    site.usage.append(["GPU-0", 200, 3 * GIB])
    site.busy["GPU-0"][200] = int(0.3 * S)
    site.device["GPU-0"] = told(1.5, 350)
    site.tick(0.5)  # its epilog
    use = site.end(short)["GPU-0"]
    assert (
        use["seconds"] == 0.5 and use["utilisation"]["mean"] == pytest.approx(60) and use["memory"]["peak"] == 3 * GIB
    )
    assert site.end(long)["GPU-0"]["seconds"] == pytest.approx(2.6)


def test_a_gap_is_not_measured_and_not_guessed(site: Site) -> None:
    record = site.job(1)
    run_shape(site, "GPU-0", [(4, {100: 0.5}, 100)])
    site.tick(60)  # the driver hung
    site.busy, site.device = {"GPU-0": {100: 0}}, {"GPU-0": told(0, 1000)}  # its process was started again
    site.tick(0.5)
    site.busy, site.device = {"GPU-0": {100: S // 4}}, {"GPU-0": told(0.25, 1050)}
    site.tick(0.5)
    use = site.end(record)["GPU-0"]
    assert use["seconds"] == 4.5 and use["unmeasured_s"] == 60.5 and use["utilisation"]["mean"] == pytest.approx(50)


def test_a_clock_that_is_set_changes_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    record = site.job(1)
    run_shape(site, "GPU-0", [(2, {100: 0.5}, 100)])
    monkeypatch.setattr(time, "time", lambda: 12.0)  # set back by decades
    site.busy["GPU-0"][100] += S // 2
    site.device["GPU-0"] = told(1.5, 300)
    site.tick(1)
    use = site.end(record)["GPU-0"]
    assert use["seconds"] == 3 and use["utilisation"]["mean"] == pytest.approx(50) and use["energy_j"] == 300


def test_throttling_and_errors(site: Site) -> None:
    record = site.job(1)
    clean = {"GPU-0": {"uuid": "GPU-0", "ecc_corrected": 5, "pcie_replays": 1, "links": [{"number": 0, "replays": 2}]}}
    site.device["GPU-0"] = told(0)
    site.tick(0, full=clean)
    site.device["GPU-0"] = told(0, 0, ["thermal", "idle"])
    site.tick(2)
    site.device["GPU-0"] = told(0, 0, ["idle", "settings"])
    after = {"ecc_corrected": 8, "pcie_replays": 1, "links": [{"number": 0, "replays": 6}], "xids": [[1.0, 48]]}
    dirty = {"GPU-0": {"uuid": "GPU-0", **after}}
    site.tick(3, full=dirty)
    use = site.end(record)["GPU-0"]
    assert (
        use["throttled_s"] == 2 and use["errors"] == {"ecc_corrected": 3, "link_errors": 4} and use["xids"] == {"48": 1}
    )


def test_requeued_jobs_begin_again(site: Site) -> None:
    first = site.job(1)
    run_shape(site, "GPU-0", [(4, {100: 0.9}, 100)])
    assert site.end(first)["GPU-0"]["utilisation"]["mean"] == pytest.approx(90)
    site.busy = {}
    site.tick(0.5)
    second = site.job(1)
    second.started = 50.0
    run_shape(site, "GPU-0", [(2, {150: 0.1}, 100)])
    use = site.end(second)["GPU-0"]
    assert use["utilisation"]["mean"] == pytest.approx(10) and use["seconds"] == 2


def test_a_number_that_becomes_another_process(site: Site) -> None:
    first = site.job(1)
    run_shape(site, "GPU-0", [(2, {100: 0.5}, 100)])
    site.usage = []
    site.tick(0.5)
    place = Place(2, "batch")
    module.cgroups.place_of = lambda pid: place  # type: ignore[assignment]
    second = site.job(2)
    site.tick(0.5)
    site.usage = [["GPU-0", 100, GIB]]
    site.busy["GPU-0"][100] += S // 2
    site.device["GPU-0"] = told(1.5, 300)
    site.tick(1)
    assert site.end(second)["GPU-0"]["utilisation"]["mean"] == pytest.approx(50)
    assert site.end(first)["GPU-0"]["utilisation"]["mean"] == pytest.approx(25)


def test_an_agent_that_restarts_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Site(tmp_path, monkeypatch)
    record = one.job(1)
    run_shape(one, "GPU-0", [(4, {100: 0.5}, 100)])
    one.sums.save()
    two = Site(tmp_path, monkeypatch)
    two.state.records[1] = record
    assert two.sums.cut_off() == []
    run_shape(two, "GPU-0", [(4, {100: 0.7}, 100)])
    use = two.end(record)["GPU-0"]
    assert use["seconds"] == 8 and use["utilisation"]["mean"] == pytest.approx(60) and use["energy_j"] == 800
    assert list((tmp_path / "running").iterdir()) == []


@pytest.mark.parametrize("step", [-86_400.0, -3600.0, 3600.0, 86_400.0])
def test_a_clock_that_is_set_changes_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    """While the agent runs, and while it is away."""
    now, tick = [time.time()], Site.tick

    def tick_and_set(site: Site, *words: Any, **more: Any) -> None:
        tick(site, *words, **more)
        now[0] += step

    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(Site, "tick", tick_and_set)
    one = Site(tmp_path, monkeypatch)
    record = one.job(1)
    record.started, record.started_uptime = now[0], uptime()
    run_shape(one, "GPU-0", [(4, {100: 0.5}, 100)])
    one.sums.save()
    now[0] += step
    two = Site(tmp_path, monkeypatch)
    two.state.records[1] = record
    run_shape(two, "GPU-0", [(4, {100: 0.7}, 100)])
    use = two.end(record)["GPU-0"]
    assert use["seconds"] == 8 and use["energy_j"] == 800 and use["utilisation"]["mean"] == pytest.approx(60)
    assert use.get("unmeasured_s", 0) < 60, "the seconds that this test took"


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_a_clock_that_is_set_before_anybody_looked(site: Site, monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    now = time.time() + step
    record = site.job(1)
    record.started, record.started_uptime = time.time() - 30, uptime() - 30
    monkeypatch.setattr(time, "time", lambda: now)
    run_shape(site, "GPU-0", [(4, {100: 0.5}, 100)])
    use = site.end(record)["GPU-0"]
    assert use["unmeasured_s"] == pytest.approx(30, abs=20) and use["seconds"] == 4


def test_a_reboot_leaves_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Site(tmp_path, monkeypatch)
    one.job(1).started_uptime = uptime() - 30
    run_shape(one, "GPU-0", [(4, {100: 0.5}, 100)])
    one.sums.save()
    two = Site(tmp_path, monkeypatch, boot="boot-2")  # the job does not run any more
    (record,) = two.sums.cut_off()
    assert record.ran_s == pytest.approx(30, abs=20)
    assert record.usage is not None and record.usage["gpus"]["GPU-0"]["utilisation"]["mean"] == pytest.approx(50)
    assert record.ended is not None and record.events[-1].action == "reboot"
    two.sums.drop([record])
    assert Site(tmp_path, monkeypatch, boot="boot-3").sums.cut_off() == []


def test_a_job_that_ended_while_there_was_no_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Site(tmp_path, monkeypatch)
    record = one.job(1)
    run_shape(one, "GPU-0", [(4, {100: 0.5}, 100)])
    one.sums.save()
    two = Site(tmp_path, monkeypatch)
    two.state.records[1] = record
    use = two.end(record)["GPU-0"]  # the agent takes it back as soon as it starts
    assert use["utilisation"]["mean"] == pytest.approx(50) and two.sums.cut_off() == []


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"record": 3}', '{"record": {}, "gpus": {"x": 1}}', "\0"])
def test_damaged_sums_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "running").mkdir()
    (tmp_path / "running/7.json").write_text(text)
    assert Site(tmp_path, monkeypatch).sums.cut_off() == []
    assert list((tmp_path / "running").iterdir()) == []


@pytest.mark.parametrize(
    "answer", [{}, {"usage": [[1]]}, {"usage": [], "devices": {"GPU-0": {}}}, {"usage": [], "devices": 3}]
)
def test_samples_that_make_no_sense_end_nothing(site: Site, answer: dict[str, Any]) -> None:
    site.job(1)
    site.sums.sample(cast(Watch, SimpleNamespace(worker=SimpleNamespace(vendor="nvidia"))), answer)


def test_memory_does_not_grow_with_the_job(site: Site) -> None:
    use = GpuUse()
    for step in range(100_000):
        use.add(Interval(0.5, (step % 997) / 997, step * 997 % (80 * GIB), 1.0))
    assert len(use.utilisation_bins.bins) <= 101 and len(use.memory_bins.bins) <= 1300
    assert GpuUse.from_dict(json.loads(json.dumps(use.to_dict()))).report() == use.report()
    assert GpuUse.from_dict({"told": 3.0}).known_s == 3.0  # sums of an agent that called it so


@given(st.lists(st.tuples(st.integers(0, 1 << 37), st.integers(1, 100)), min_size=1, max_size=50), st.floats(0, 1))
@settings(max_examples=200)
def test_percentiles_of_memory_are_right_within_one_percent(values: list[tuple[int, int]], share: float) -> None:
    histogram = Histogram(True)
    for value, weight in values:
        histogram.add(value, float(weight))
    total, passed, exact = sum(weight for _, weight in values), 0, 0
    for value, weight in sorted(values):
        passed += weight
        exact = value
        if passed >= share * total - 1e-9:
            break
    assert histogram.percentile(share) == pytest.approx(exact, rel=0.0101, abs=1)


@given(st.floats(0, 1e9), st.lists(st.tuples(st.none() | st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=8))
def test_parts_of_the_energy_are_the_whole(energy: float, jobs: list[tuple[float | None, float]]) -> None:
    parts = split_energy(energy, [work for work, _ in jobs], [share for _, share in jobs])
    assert sum(parts) == pytest.approx(energy, rel=1e-6, abs=1e-6) and min(parts) >= 0


def test_errors_of_a_driver_that_was_loaded_again() -> None:
    assert grown_errors({"ecc_corrected": 9, "pcie_replays": None}, {"ecc_corrected": 2, "pcie_replays": 4}) == {
        "ecc_corrected": 2
    }


def test_a_job_that_ran_before_anybody_looked(site: Site) -> None:
    record = site.job(1)
    record.started = time.time() - 30
    run_shape(site, "GPU-0", [(4, {100: 0.5}, 100)])
    use = site.end(record)["GPU-0"]
    assert use["unmeasured_s"] == pytest.approx(30, abs=2) and use["seconds"] == 4
    assert use["utilisation"]["mean"] == pytest.approx(50)
