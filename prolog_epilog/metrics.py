"""The node agent's metrics: of each GPU, job and process, from the samples that the agent takes anyway."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policy.monitoring import NodeMetrics
from policy.node import FILE_NAME, NodePolicyFile
from prolog_epilog.accounting import Tick, error_counters, share_of
from prolog_epilog.agent import Agent
from prolog_epilog.nics import Job
from prolog_epilog.watching import Watch
from sluice.base.log import log
from sluice.exchange.readings import Reading, readings_of
from sluice.exchange.record import Grant, JobRecord
from sluice.metrics.output import Output
from sluice.metrics.points import Point, Value

SPOOL = Path("/var/lib/sluice/metrics")
_LOOK_S = 1.0  # within which a change of the policy is noticed
_NOBODY_S = 60  # between samples that are sent nowhere: drivers keep events until they are read
_SLOW_SAMPLES = 10  # skipped one after the other before it is logged again

# reading's field -> metric's, factor
_PLAIN: tuple[tuple[str, str, float], ...] = (
    ("utilisation_percent", "utilisation_ratio", 0.01),
    ("memory_bandwidth_percent", "memory_bandwidth_ratio", 0.01),
    ("encoder_percent", "encoder_ratio", 0.01),
    ("decoder_percent", "decoder_ratio", 0.01),
    ("memory_used_bytes", "memory_used_bytes", 1),
    ("memory_total_bytes", "memory_total_bytes", 1),
    ("power_mw", "power_watts", 0.001),
    ("power_limit_mw", "power_limit_watts", 0.001),
    ("energy_mj", "energy_joules_total", 0.001),
    ("temperature_c", "temperature_celsius", 1),
    ("temperature_memory_c", "memory_temperature_celsius", 1),
    ("fan_percent", "fan_ratio", 0.01),
    ("clock_graphics_mhz", "clock_graphics_hertz", 1e6),
    ("clock_memory_mhz", "clock_memory_hertz", 1e6),
    ("clock_video_mhz", "clock_video_hertz", 1e6),
    ("rows_failed", "remap_failed", 1),
    ("pages_retired", "retired_pages", 1),
    ("pcie_generation", "pcie_generation", 1),
    ("pcie_width", "pcie_lanes", 1),
)
_COUNTERS = {
    "ecc_corrected": "ecc_corrected_errors_total",
    "ecc_uncorrected": "ecc_uncorrected_errors_total",
    "ras_uncorrected": "ras_uncorrected_errors_total",
    "pcie_replays": "pcie_replays_total",
    "link_errors": "link_errors_total",
}


def gpu_fields(reading: Reading, xids: int) -> dict[str, Value]:
    """A reading in the metrics' names and units."""
    fields: dict[str, Value] = {"up": int(reading.problem is None)}
    for source, name, factor in _PLAIN:
        value = getattr(reading, source)
        if value is not None:
            fields[name] = round(float(value) * factor, 6)
    counters = error_counters(reading)
    for source, name in _COUNTERS.items():
        count = counters[source]
        if count is not None:
            fields[name] = count
    if reading.throttle is not None:
        for word in ("power", "thermal", "brake", "hardware"):
            fields[f"throttled_{word}"] = int(word in reading.throttle)
    if reading.rows_correctable is not None:
        fields["remapped_rows"] = reading.rows_correctable + (reading.rows_uncorrectable or 0)
    pending = [one for one in (reading.rows_pending, reading.pages_pending) if one is not None]
    if pending:
        fields["remap_pending"] = int(any(pending))
    known = [link for link in reading.links if link.up is not None]
    if known:
        fields["links_up"] = sum(bool(link.up) for link in known)
        fields["links_down"] = len(known) - int(fields["links_up"])
    for source, name in (("tx_bytes", "link_transmit_bytes_total"), ("rx_bytes", "link_receive_bytes_total")):
        values = [getattr(link, source) for link in reading.links if getattr(link, source) is not None]
        if values:
            fields[name] = sum(values)
    fields["xid_errors_total"] = xids
    return fields


class Slots:
    """Small numbers for things of one GPU, the smallest free one for each, so that series stay few."""

    def __init__(self) -> None:
        self._taken: dict[str, dict[object, int]] = {}

    def of(self, gpu: str, things: Iterable[object]) -> dict[object, int]:
        """The numbers of all things that are there now; those of others are free again."""
        wanted = list(things)
        taken = {thing: number for thing, number in self._taken.get(gpu, {}).items() if thing in set(wanted)}
        free = (number for number in range(len(wanted)) if number not in set(taken.values()))
        for thing in wanted:
            if thing not in taken:
                taken[thing] = next(free)
        self._taken[gpu] = taken
        return taken


@dataclass
class _Sum:
    """Of one job on one GPU since the points before."""

    seconds: float = 0.0
    known_s: float = 0.0
    busy: float = 0.0


class NodeExporter:
    """Hooks into an agent before it starts."""

    def __init__(self, agent: Agent, spool: Path = SPOOL, clock: Callable[[], float] = time.monotonic) -> None:
        self.agent = agent
        self.state = agent.state
        self.policy = NodePolicyFile(agent.state.settings.policy.with_name(FILE_NAME))
        self.output = Output(spool, self.state.node, lambda text: log("metrics", what=text))
        self._clock = clock
        self._next = 0.0
        self._asked: dict[str, float] = {}  # vendor -> when the sample was asked for that has not come
        self._samples: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._in_a_row: Counter[str] = Counter()
        self._xids: Counter[str] = Counter()
        self._sums: dict[tuple[int, str], _Sum] = {}
        self._before: dict[str, tuple[float, dict[str, dict[int, int]]]] = {}  # vendor -> time, busy by GPU and process
        self._job_slots, self._process_slots, self._nic_slots = Slots(), Slots(), Slots()
        self._problem = ""
        agent.watcher.on_sample.append(self.sample)
        agent.accounting.on_tick.append(self.tick)
        agent.duties.add("metrics", _LOOK_S, self.look)

    @property
    def settings(self) -> NodeMetrics:
        """In force now."""
        return self.policy.current().metrics

    # ---- when ----

    def look(self) -> float:
        """A duty: ask for whole readings when the interval is over; skip a driver that has not answered the last.

        Seconds until it is to be called again.
        """
        settings = self.settings
        self.output.host = self.state.node
        self.output.configure(settings)
        if self.policy.problem is not None and str(self.policy.problem) != self._problem:
            log("problem", what=self.policy.problem.what, remedy=self.policy.problem.remedy)
        self._problem = str(self.policy.problem or "")
        now = self._clock()
        interval = settings.interval if settings.url or settings.prometheus else _NOBODY_S
        self._next = min(self._next, now + interval)  # the interval may have become shorter
        if now < self._next:
            return min(self._next - now, _LOOK_S)
        self._next = max(self._next + interval, now - interval)
        if self._next <= now:  # the first time, or after a long sleep
            self._next = now + interval
        for vendor, watch in self.agent.watcher.watches.items():
            since = self._asked.get(vendor)
            if since is not None:
                self._skip(vendor, now - since)
            if since is None or watch.problem is not None:
                self._ask(vendor, watch, now)
        stamp = self.output.stamp()
        self.output.put("nics", [*self._nic_points(stamp), *self._job_nic_points(stamp)])
        self.output.put("agent", [*self._agent_points(stamp), *self.output.sender_points(stamp)])
        return min(max(0.0, self._next - self._clock()), _LOOK_S)

    def _ask(self, vendor: str, watch: Watch, now: float) -> None:
        watch.full = True
        self._asked[vendor] = now
        watch.wanted.set()

    def _skip(self, vendor: str, seconds: float) -> None:
        self._skipped[vendor] += 1
        self._in_a_row[vendor] += 1
        if self._in_a_row[vendor] % _SLOW_SAMPLES == 1:
            log("slow", vendor=vendor, what=f"no sample, as the driver has not answered for {seconds:.1f} s")

    def _agent_points(self, stamp: int) -> list[Point]:
        return [
            Point(
                "sluice_agent",
                {"node": self.state.node, "vendor": vendor},
                {
                    "samples_total": self._samples[vendor],
                    "samples_skipped_total": self._skipped[vendor],
                    "driver_up": int(watch.problem is None),
                },
                stamp,
            )
            for vendor, watch in self.agent.watcher.watches.items()
        ]

    # ---- what ----

    def _nic_points(self, stamp: int) -> Iterable[Point]:
        for nic in self.agent.nics.interfaces() or ():
            fields: dict[str, Value] = {"present": int(nic.present), "full_counters": nic.full}
            if nic.up is not None:
                fields["up"] = int(nic.up)
            fields |= {f"{name}_total": count for name, count in nic.counts.items()}
            yield Point("sluice_nic", {"node": self.state.node, "nic": nic.name, "kind": nic.kind}, fields, stamp)

    def _job_nic_points(self, stamp: int) -> Iterable[Point]:
        with self.state.lock:
            records = {(record.job, record.started): record for record in self.state.records.values()}
        jobs: dict[str, dict[Job, dict[str, Any]]] = {}
        for job, nics in self.agent.nics.uses().items():
            for nic, use in nics.items() if job in records else ():
                jobs.setdefault(nic, {})[job] = use
        for nic, uses in jobs.items():
            slots = self._nic_slots.of(nic, uses)
            for job, use in uses.items():
                record = records[job]
                fields: dict[str, Value] = {"shared": int(use["shared"])}
                fields |= {f"{name}_total": count for name, count in use.items() if name != "shared"}
                tags = {"node": self.state.node, "nic": nic, "account": record.account, "user": record.user}
                tags |= {"partition": record.partition, "slot": str(slots[job])}
                named, identity = self._named(tags, {"job": record.job})
                yield Point("sluice_jobnic", named, fields, stamp, identity)

    def tick(self, tick: Tick) -> None:
        """A reader of what each sample says of jobs (`Accounting.on_tick`)."""
        for job, interval in tick.intervals.items():
            one = self._sums.setdefault((job, tick.uuid), _Sum())
            one.seconds += interval.seconds
            if interval.utilisation is not None:
                one.known_s += interval.seconds
                one.busy += interval.seconds * interval.utilisation

    def sample(self, watch: Watch, answer: dict[str, Any]) -> None:
        """A reader of samples (`Watcher.on_sample`): points of each that has whole readings."""
        vendor = watch.worker.vendor
        if "full" not in answer:
            if not watch.full:  # the sample that was to have them failed
                self._asked.pop(vendor, None)
            return
        asked = self._asked.pop(vendor, None)
        if self._in_a_row.pop(vendor, 0):
            log("recovered", vendor=vendor, what="samples are taken again")
        try:
            readings = readings_of(answer)
            for uuid, reading in readings.items():
                self._xids[uuid] += len(reading.xids)
            if asked is None:
                return  # it was requested by others
            self._samples[vendor] += 1
            stamp = self.output.stamp()
            points = [*self._gpu_points(readings, stamp), *self._job_points(vendor, answer, stamp)]
            if self.settings.job_ids != "none":
                points += self._process_points(vendor, answer, stamp)
            self.output.put(vendor, points)
        except (KeyError, TypeError, ValueError, AttributeError) as error:  # it runs in the watchdog's thread
            log("problem", vendor=vendor, what=f"a sample that cannot be reported: {error!r}")

    def _gpu_points(self, readings: Mapping[str, Reading], stamp: int) -> Iterable[Point]:
        places = {device.uuid: device for device in self.state.devices}
        for uuid, reading in readings.items():
            device = next((places[one] for one in (uuid, *reading.parts) if one in places), None)
            tags = {"node": self.state.node, "gpu": uuid}
            if device is not None:
                tags |= {"index": str(device.index), "vendor": device.vendor, "model": device.model}
            yield Point("sluice_gpu", tags, gpu_fields(reading, self._xids[uuid]), stamp)

    def _jobs(self, vendor: str) -> list[tuple[JobRecord, Grant]]:
        with self.state.lock:
            records = list(self.state.records.values())
            return [(record, grant) for record in records for grant in record.grants if grant.vendor == vendor]

    def _named(self, tags: dict[str, str], identity: dict[str, Value]) -> tuple[dict[str, str], dict[str, Value]]:
        """Tags and identity as `job_ids` sets them."""
        how = self.settings.job_ids
        if how == "tags":
            named = {name: str(value) for name, value in identity.items() if name != "pid"}
            rest = {name: value for name, value in identity.items() if name == "pid"}
            return tags | named, rest
        return tags, identity if how == "fields" else {}

    def _job_points(self, vendor: str, answer: Mapping[str, Any], stamp: int) -> Iterable[Point]:
        jobs = self._jobs(vendor)
        totals = self.agent.accounting.totals()
        memory: Counter[tuple[int, str]] = Counter()
        processes: Counter[tuple[int, str]] = Counter()
        for uuid, pid, size in answer["usage"]:
            place = self.agent.accounting.place(vendor, int(pid))
            if place is not None:
                memory[place.job, uuid] += int(size)
                processes[place.job, uuid] += 1
        for uuid in {grant.uuid for _, grant in jobs}:
            here = [(record, grant) for record, grant in jobs if grant.uuid == uuid]
            slots = self._job_slots.of(uuid, [record.job for record, _ in here])
            for record, grant in here:
                key = (record.job, uuid)
                one = self._sums.pop(key, _Sum())
                fields: dict[str, Value] = {
                    "memory_used_bytes": memory[key],
                    "share_ratio": round(share_of(grant), 6),
                    "processes": processes[key],
                }
                if one.known_s:
                    fields["utilisation_ratio"] = round(one.busy / one.known_s, 6)
                if grant.limit is not None:
                    fields["memory_limit_bytes"] = grant.limit
                use = totals.get((record.job, record.started), {}).get(uuid)
                if use is not None:
                    fields["gpu_seconds_total"] = round(use.seconds, 3)
                    fields["busy_seconds_total"] = round(use.busy, 3)
                    if use.energy_mj is not None:
                        fields["energy_joules_total"] = round(use.energy_mj / 1000, 3)
                tags = {"node": self.state.node, "gpu": uuid, "account": record.account, "user": record.user}
                tags |= {"partition": record.partition, "slot": str(slots[record.job])}
                named, identity = self._named(tags, {"job": record.job})
                yield Point("sluice_job", named, fields, stamp, identity)
        running = {(record.job, grant.uuid) for record, grant in jobs}
        mine = {device.uuid for device in self.state.devices if device.vendor == vendor}
        for key in [key for key in self._sums if key[1] in mine and key not in running]:
            del self._sums[key]

    def _process_points(self, vendor: str, answer: Mapping[str, Any], stamp: int) -> Iterable[Point]:
        owners = {record.job: record for record, _ in self._jobs(vendor)}
        now = self._clock()
        busy = {uuid: {int(p): int(n) for p, n in found.items()} for uuid, found in answer.get("busy", {}).items()}
        before = self._before.get(vendor)
        self._before[vendor] = (now, busy)
        for uuid in sorted({uuid for uuid, _, _ in answer["usage"]}):
            here = {int(pid): int(size) for one, pid, size in answer["usage"] if one == uuid}
            slots = self._process_slots.of(uuid, sorted(here))
            for pid, size in here.items():
                place = self.agent.accounting.place(vendor, pid)
                record = None if place is None else owners.get(place.job)
                if place is None or record is None:
                    continue
                fields: dict[str, Value] = {"memory_used_bytes": size}
                if before is not None and uuid in busy and uuid in before[1] and now > before[0]:
                    grown = busy[uuid].get(pid, 0) - before[1][uuid].get(pid, 0)
                    fields["utilisation_ratio"] = round(min(1.0, max(0.0, grown / 1e9 / (now - before[0]))), 6)
                tags = {"node": self.state.node, "gpu": uuid, "account": record.account, "user": record.user}
                tags["slot"] = str(slots[pid])
                named, identity = self._named(tags, {"job": place.job, "step": place.step, "pid": pid})
                yield Point("sluice_process", named, fields, stamp, identity)
