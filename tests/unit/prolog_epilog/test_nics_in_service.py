"""What network interfaces count while jobs run: by interface, and by the job that has one to itself."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from gres_probe.inventory import Inventory, Nic
from policy.health import NodeHealth
from prolog_epilog.agent import Agent
from prolog_epilog.health.judge import judge
from prolog_epilog.health.memory import Memory
from prolog_epilog.metrics import NodeExporter
from prolog_epilog.nics import Nics
from prolog_epilog.state import Settings, State
from sluice.exchange.record import JobRecord
from tests.unit.prolog_epilog.facts_of import gpu, node

COUNTERS = ("port_xmit_data", "port_rcv_data", "symbol_error", "link_downed", "link_error_recovery", "port_xmit_wait")
HARDWARE = ("packet_seq_err", "local_ack_timeout_err", "out_of_sequence", "rp_cnp_handled")


class Site:
    """Interfaces in a folder, and the jobs that can open them."""

    def __init__(self, folder: Path, *names: str, layer: str = "InfiniBand") -> None:
        self.root = folder / "sys"
        self.state = State(Settings(run=folder / "run"))
        self.here: set[int] = set()
        self.now = 1000.0
        self.nics = Nics(self.state, self.root, lambda: self.now, lambda: self.here)
        (folder / "dev").mkdir(parents=True)
        for name in names:
            self.state.nics[name] = str(folder / "dev" / name)
            Path(self.state.nics[name]).touch()
            self.plug(name, layer)
        self.nics.start(Inventory("n1", nics=[Nic(name, f"0000:{i:02x}:00.0") for i, name in enumerate(names)]))

    def port(self, name: str) -> Path:
        return self.root / "class/infiniband" / name / "ports/1"

    def plug(self, name: str, layer: str = "InfiniBand") -> None:
        port = self.port(name)
        for folder in ("counters", "hw_counters", "gid_attrs/ndevs"):
            (port / folder).mkdir(parents=True)
        (port / "state").write_text("4: ACTIVE\n")
        (port / "link_layer").write_text(f"{layer}\n")
        (port / "gid_attrs/ndevs/0").write_text(f"net_{name}\n")
        for file in COUNTERS:
            (port / "counters" / file).write_text("0\n")
        for file in HARDWARE:
            (port / "hw_counters" / file).write_text("0\n")

    def ethernet(self, name: str, *, hardware: bool = True) -> Path:
        folder = self.root / "class/net" / name
        (folder / "statistics").mkdir(parents=True)
        if hardware:
            (folder / "device").mkdir()
        (folder / "carrier").write_text("1\n")
        (folder / "carrier_down_count").write_text("0\n")
        for file in ("rx_bytes", "tx_bytes", "rx_errors", "tx_errors", "rx_crc_errors"):
            (folder / "statistics" / file).write_text("0\n")
        return folder

    def set(self, nic: str, file: str, value: int) -> None:
        (self.port(nic) / file).write_text(f"{value}\n")

    def job(self, number: int, *nics: str) -> JobRecord:
        record = JobRecord(number, 1000, "alice", "physics", "gpu", "n1", started=float(number))
        self.state.records[number] = record
        self.here.add(number)
        self.nics.opened(record, nics)
        return record

    def end(self, record: JobRecord) -> dict[str, dict[str, int]]:
        record.usage = {}
        del self.state.records[record.job]
        self.here.discard(record.job)
        self.nics.finish(record)
        found: dict[str, dict[str, int]] = record.usage.get("nics", {})
        return found

    def counts(self, nic: str) -> dict[str, int]:
        self.nics.run()
        (one,) = [one for one in self.nics.interfaces() or [] if one.name == nic]
        return {name: count for name, count in one.counts.items() if count}


def test_counters_of_infiniband_in_their_units(tmp_path: Path) -> None:
    site = Site(tmp_path, "mlx5_0")
    for file in COUNTERS:  # what was counted before the agent came is nobody's
        site.set("mlx5_0", f"counters/{file}", 7)
    assert site.counts("mlx5_0") == {}
    for number, file in enumerate(COUNTERS, start=1):
        site.set("mlx5_0", f"counters/{file}", 7 + number)
    for number, file in enumerate(HARDWARE, start=1):
        site.set("mlx5_0", f"hw_counters/{file}", number)
    assert site.counts("mlx5_0") == {
        "transmit_bytes": 4, "receive_bytes": 8, "symbol_errors": 3, "link_downs": 4, "link_recoveries": 5,
        "transmit_wait_ticks": 6, "retransmissions": 1 + 2, "out_of_sequence": 3, "congestion_notifications": 4,
    }  # fmt: skip


def test_roce_and_plain_ethernet(tmp_path: Path) -> None:
    """Errors of RoCE's wire are those of its network interface, which is not shown a second time."""
    site = Site(tmp_path, "mlx5_0", layer="Ethernet")
    wire, plain = site.ethernet("net_mlx5_0"), site.ethernet("eno1")
    site.ethernet("docker0", hardware=False)
    assert site.counts("mlx5_0") == {}
    assert [(one.name, one.kind) for one in site.nics.interfaces() or []] == [("eno1", "ethernet"), ("mlx5_0", "roce")]
    (wire / "carrier_down_count").write_text("2\n")
    (wire / "statistics/rx_bytes").write_text("999\n")
    (plain / "statistics/tx_bytes").write_text("17\n")
    site.set("mlx5_0", "counters/port_xmit_data", 5)
    site.set("mlx5_0", "counters/link_downed", 9)
    assert site.counts("mlx5_0") == {"link_downs": 2, "transmit_bytes": 20}
    assert site.counts("eno1") == {"transmit_bytes": 17}


def test_counters_that_wrap_are_reset_or_stay_at_their_maximum(tmp_path: Path) -> None:
    """Against the truth, for random steps and resets."""
    chance = random.Random(22)
    site = Site(tmp_path, "mlx5_0")
    site.nics.run()
    wrapping = truth = 0
    staying = errors = 0
    for _ in range(150):
        if chance.random() < 0.05 and wrapping < 3 << 30:  # the driver is loaded again
            wrapping, staying = 0, 0
            site.set("mlx5_0", "hw_counters/packet_seq_err", 0)
            site.set("mlx5_0", "counters/symbol_error", 0)
            site.nics.run()
        step, more = chance.randrange(1 << 29), chance.randrange(900)
        truth += step
        wrapping = (wrapping + step) % (1 << 32)
        errors += min(more, 0xFFFF - staying)
        staying = min(staying + more, 0xFFFF)
        site.set("mlx5_0", "hw_counters/packet_seq_err", wrapping)
        site.set("mlx5_0", "counters/symbol_error", staying)
        counts = site.counts("mlx5_0")
        assert (counts["retransmissions"], counts["symbol_errors"]) == (truth, errors)
        (one,) = site.nics.interfaces() or []
        assert one.full == (staying == 0xFFFF)


def test_an_adapter_that_vanishes_in_the_middle_of_a_job(tmp_path: Path) -> None:
    site = Site(tmp_path, "mlx5_0", "mlx5_1")
    job = site.job(1, "mlx5_0", "mlx5_1")
    site.nics.run()
    site.set("mlx5_1", "counters/port_xmit_data", 10)
    site.nics.run()
    shutil.rmtree(site.root / "class/infiniband/mlx5_1")
    assert site.counts("mlx5_1") == {"transmit_bytes": 40}
    assert site.nics.gone() == ["mlx5_1"]
    assert [(one.present, one.up) for one in site.nics.interfaces() or []] == [(True, True), (False, None)]
    site.plug("mlx5_1")  # its counters begin again
    site.set("mlx5_1", "counters/port_xmit_data", 3)
    site.nics.run()
    assert site.nics.gone() == []
    assert site.end(job) == {"mlx5_0": {"shared": False}, "mlx5_1": {"shared": False, "transmit_bytes": 52}}


def test_an_interface_that_hangs_is_not_known(tmp_path: Path) -> None:
    site = Site(tmp_path, "mlx5_0")
    assert site.nics.interfaces() is None
    assert site.nics.gone() is None
    site.nics.run()
    site.now += 20
    assert site.nics.interfaces() is not None
    site.now += 1  # the thread that reads waits for its driver
    assert site.nics.interfaces() is None
    assert site.nics.rdma_counts() is None


def test_virtual_functions_without_number_do_not_hide_adapters_of_the_inventory(tmp_path: Path) -> None:
    site = Site(tmp_path, "mlx5_2")
    for number in range(100, 165):  # sorted by name they come first
        site.plug(f"mlx5_{number}")
    site.nics.run()
    assert site.nics.gone() == []
    assert len(site.nics.interfaces() or ()) == 64


def test_names_that_come_and_go_are_forgotten(tmp_path: Path) -> None:
    site = Site(tmp_path, "mlx5_0")
    for number in range(70):
        folder = site.ethernet(f"vf{number:02}")
        site.nics.run()
        shutil.rmtree(folder)
    shutil.rmtree(site.root / "class/infiniband/mlx5_0")
    site.nics.run()
    names = [one.name for one in site.nics.interfaces() or ()]
    assert names == ["mlx5_0", *(f"vf{number:02}" for number in range(6, 70))]


def test_what_is_counted_while_a_short_job_comes_and_goes_between_two_readings_is_nobodys(tmp_path: Path) -> None:
    site = Site(tmp_path, "mlx5_0")
    site.end(site.job(999))  # devices are confined
    job = site.job(1, "mlx5_0")
    site.nics.run()
    short = site.job(2, "mlx5_0")
    site.set("mlx5_0", "counters/port_xmit_data", 10)
    site.end(short)
    site.nics.run()
    site.set("mlx5_0", "counters/port_xmit_data", 15)
    site.nics.run()
    assert site.end(job) == {"mlx5_0": {"shared": True, "transmit_bytes": 20}}
    site.job(3, "mlx5_0")  # the interface's last owner has ended, and no reading has seen it


def test_a_step_of_an_earlier_version_may_use_what_is_not_confined(tmp_path: Path) -> None:
    site = Site(tmp_path, "mlx5_0")
    site.job(1).nics = None  # it did not say what its step can open
    site.nics._closed.clear()
    job = site.job(2, "mlx5_0")
    site.nics.run()
    site.set("mlx5_0", "counters/port_xmit_data", 10)
    site.nics.run()
    assert site.end(job) == {"mlx5_0": {"shared": True}}


@pytest.mark.parametrize("confined", [True, False])
def test_growth_is_the_jobs_that_has_the_interface_alone_and_never_twice(confined: bool, tmp_path: Path) -> None:
    """Jobs with random interfaces come and go; the truth is kept by looking at each interval by itself."""
    chance = random.Random(7)
    names = [f"mlx5_{i}" for i in range(4)]
    site = Site(tmp_path, *names)
    if confined:  # some job could open none: its devices are confined, and so are those of others
        site.end(site.job(999))
    value: Counter[str] = Counter()
    jobs: dict[int, JobRecord] = {}
    given: dict[int, list[str]] = {}
    owned: dict[str, int | None] = dict.fromkeys(names)
    truth: dict[int, Counter[str]] = {}
    shared: dict[int, set[str]] = {}
    reported: Counter[str] = Counter()
    strangers = False
    for number in range(1, 150):
        if chance.random() < 0.5:
            given[number] = chance.sample(names, chance.randrange(1, 3)) if confined else names
            jobs[number] = site.job(number, *given[number])
            truth[number], shared[number] = Counter(), set()
            for nic in given[number]:
                if (owner := owned[nic]) is not None and owner in jobs:
                    shared[owner].add(nic)
                owned[nic] = None
        if jobs and chance.random() < 0.5:
            ended = chance.choice(sorted(jobs))
            seen = site.end(jobs.pop(ended))
            assert {nic: use.get("transmit_bytes", 0) for nic, use in seen.items() if use.get("transmit_bytes")} == {
                nic: count for nic, count in truth[ended].items() if count
            }
            assert {nic for nic, use in seen.items() if use["shared"]} == shared[ended]
            reported.update({nic: use.get("transmit_bytes", 0) for nic, use in seen.items()})
        if chance.random() < 0.1:  # a job without GPUs
            strangers = not strangers
            site.here ^= {5000}
        step = {nic: chance.randrange(100) for nic in names}
        value.update(step)
        for nic in names:
            site.set(nic, "counters/port_xmit_data", value[nic])
        site.nics.run()
        for nic in names:
            having = [job for job in jobs if nic in given[job]]
            alone = len(having) == 1 and (confined or (len(jobs) == 1 and not strangers))
            now = having[0] if alone else None
            if now is not None and owned[nic] == now:
                truth[now][nic] += 4 * step[nic]
            for job in having if not alone else ():
                shared[job].add(nic)
            owned[nic] = now
    assert sum(reported.values()) > 0
    assert all(reported[nic] <= 4 * value[nic] for nic in names)


def test_metrics_name_the_job_and_say_that_an_interface_is_shared(agent: Agent, tmp_path: Path) -> None:
    site = Site(tmp_path / "site", "mlx5_0", "mlx5_1")
    agent.nics, agent.state.records = site.nics, site.state.records
    site.job(1, "mlx5_0", "mlx5_1")
    site.job(2, "mlx5_1")
    site.nics.run()
    for nic in ("mlx5_0", "mlx5_1"):
        site.set(nic, "counters/link_downed", 2)
    site.nics.run()
    exporter = NodeExporter(agent, tmp_path / "metrics", clock=lambda: 0.0)
    exporter.look()
    page = exporter.output.page()
    lines = [line for line in page.splitlines() if "link_downs_total{" in line or "jobnic_shared{" in line]
    kept = sorted((line.partition("{")[0], line.rpartition("}")[2].split()[0], "mlx5_1" in line) for line in lines)
    assert kept == [
        ("sluice_jobnic_link_downs_total", "2", False),
        ("sluice_jobnic_shared", "0", False),
        ("sluice_jobnic_shared", "1", True),
        ("sluice_jobnic_shared", "1", True),
        ("sluice_nic_link_downs_total", "2", False),
        ("sluice_nic_link_downs_total", "2", True),
    ]


def test_health_finds_what_grows_within_the_window_and_adapters_that_are_gone() -> None:
    memory, seen = Memory(), []
    for minute, downs in enumerate((5, 5, 7, 8, 8)):  # what was there when it began does not count
        counts = {"mlx5_0": {"link_downs": downs, "symbol_errors": 40 * minute}, "mlx5_1": {"retransmissions": 1}}
        facts = node(1000.0 + 60 * minute, gpu(), nic_counts=counts, lost_nics=["mlx5_2"] if minute > 2 else [])
        seen.append({one.check: one.text for one in judge(facts, memory, NodeHealth(mode="enforce")).findings})
    assert [one.get("fabric_flaps") for one in seen[:3]] == [None, None, None]
    assert seen[3]["fabric_flaps"] == "3 link failures within 1h (since the agent started: mlx5_0 8)"
    assert seen[3]["fabric_errors"] == "120 errors on links within 1h (since the agent started: mlx5_0 120)"
    assert "fabric_lost" not in seen[3]  # not for 30 s yet
    assert seen[4]["fabric_lost"] == "not there any more: mlx5_2"
    assert not any("fabric_retransmissions" in one for one in seen)


def test_health_says_what_it_does_not_know() -> None:
    silent = node(1000.0, gpu(), lost_nics=None, nic_counts=None)
    unknown = judge(silent, Memory(), NodeHealth(mode="enforce")).unknown["node"]
    assert {"fabric_lost", "fabric_flaps", "fabric_errors", "fabric_retransmissions"} <= set(unknown)
    silent = node(1000.0, gpu(), nics={}, lost_nics=None, nic_counts=None)  # no adapter near a GPU
    assert "node" not in judge(silent, Memory(), NodeHealth(mode="enforce")).unknown
