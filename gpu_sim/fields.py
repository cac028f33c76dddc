"""Fields of a simulated GPU that can be read and changed by name, and which values the hardware could not have."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_sim import layout
from gpu_sim.partitions import set_partitions
from gpu_sim.power_curve import drawn_mw
from gpu_sim.state import Holding, NodeState, changing, clear_mig, holdings, read_state, set_mig_layout
from sluice.base.errors import UsageError
from sluice.base.sizes import parse_mib

_NS = 10**9
_ON = {"yes", "on", "1", "true", "up"}
_OFF = {"no", "off", "0", "false", "down"}
# NVML's bits for why clocks are low
_THROTTLE = {
    "idle": 0x1,
    "applications_clocks": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
    "display_clocks": 0x100,
}
_LINK_COUNTERS = {
    "replays": "replay_errors",
    "recoveries": "recovery_errors",
    "crc": "crc_errors",
    "tx": "tx_kib",
    "rx": "rx_kib",
}
_LINK_FIELD = re.compile(r"link(\d+)(?:_(\w+))?")


@dataclass(slots=True)
class Change:
    """What a field's setter works on."""

    state: NodeState
    index: int
    held: list[Holding]  # by live processes, on this GPU

    @property
    def gpu(self) -> layout.Gpu:
        """The GPU that is changed."""
        return self.state.gpus[self.index]

    def refuse(self, field: str, text: str, why: str) -> UsageError:
        """The error for a value that this GPU could not have."""
        return UsageError(f"{field}={text}: {why}", remedy=f"GPU {self.index} is a {self.gpu.name.decode()}")


@dataclass(frozen=True, slots=True)
class Field:
    """One field: what it is, how it reads, and how it is set."""

    help: str
    get: Callable[[NodeState, layout.Gpu], str]
    set: Callable[[Change, str, str], None]  # (change, field name, text); raises UsageError


def set_values(folder: Path, gpu: int | str, values: Mapping[str, str]) -> None:
    """Change fields of one GPU, all or none; `gpu` is an index or UUID.

    Raises UsageError for an unknown field or a value that the hardware could not have, SluiceError when the node's
    state cannot be read. Running programs see the change with their next call.
    """
    held = holdings(folder)
    with changing(folder) as state:
        _apply(state, held, gpu, values)


def check_values(folder: Path, gpu: int | str, values: Mapping[str, str]) -> None:
    """Raise what `set_values` would raise, and change nothing."""
    _apply(read_state(folder), holdings(folder), gpu, values)


def _apply(state: NodeState, held: Sequence[Holding], gpu: int | str, values: Mapping[str, str]) -> None:
    index = state.find(gpu)
    change = Change(state, index, [holding for holding in held if holding.gpu == index])
    for name, text in values.items():
        _setter(name)(change, name, text)
    _check_memory(change)


def get_values(folder: Path, gpu: int | str) -> dict[str, str]:
    """All fields of one GPU by name, as text."""
    state = read_state(folder)
    record = state.gpus[state.find(gpu)]
    values = {name: field.get(state, record) for name, field in FIELDS.items()}
    for number in range(record.link_count):
        values[f"link{number}"] = "up" if record.links[number].up else "down"
    return values


def _setter(name: str) -> Callable[[Change, str, str], None]:
    if name in FIELDS:
        return FIELDS[name].set
    if _LINK_FIELD.fullmatch(name):
        return _set_link
    raise UsageError(f"field {name!r}: there is none of that name", remedy="see: sluice sim fields")


# ---- kinds of fields ----


def _whole(change: Change, field: str, text: str, low: int, high: int, unit: str = "") -> int:
    try:
        value = int(text)
    except ValueError:
        raise change.refuse(field, text, "not a whole number") from None
    if not low <= value <= high:
        raise change.refuse(field, text, f"out of its range {low} to {high}{unit and ' ' + unit}")
    return value


def _number(
    help_text: str,
    attribute: str,
    high: int | Callable[[layout.Gpu], int],
    *,
    low: int = 0,
    unit: str = "",
    needs: Callable[[layout.Gpu], str] | None = None,
) -> Field:
    """A plain number; `needs` says why a GPU has no such figure, or nothing."""

    def get(_state: NodeState, gpu: layout.Gpu) -> str:
        return "" if needs and needs(gpu) else str(getattr(gpu, attribute))

    def put(change: Change, field: str, text: str) -> None:
        lack = needs(change.gpu) if needs else ""
        if lack:
            raise change.refuse(field, text, lack)
        top = high(change.gpu) if callable(high) else high
        setattr(change.gpu, attribute, _whole(change, field, text, low, top, unit))

    return Field(help_text, get, put)


def _truth(change: Change, field: str, text: str) -> int:
    if text.lower() not in _ON | _OFF:
        raise change.refuse(field, text, "want yes or no")
    return int(text.lower() in _ON)


def _flag(help_text: str, attribute: str, needs: Callable[[layout.Gpu], str] | None = None) -> Field:
    def get(_state: NodeState, gpu: layout.Gpu) -> str:
        return "" if needs and needs(gpu) else ("yes" if getattr(gpu, attribute) else "no")

    def put(change: Change, field: str, text: str) -> None:
        lack = needs(change.gpu) if needs else ""
        if lack:
            raise change.refuse(field, text, lack)
        setattr(change.gpu, attribute, _truth(change, field, text))

    return Field(help_text, get, put)


def _driver_number(help_text: str, attribute: str, high: int, unit: str = "") -> Field:
    def get(state: NodeState, gpu: layout.Gpu) -> str:
        return str(getattr(state.driver(gpu), attribute))

    def put(change: Change, field: str, text: str) -> None:
        setattr(change.state.driver(change.gpu), attribute, _whole(change, field, text, 0, high, unit))

    return Field(help_text, get, put)


def _driver_flag(help_text: str, attribute: str) -> Field:
    def get(state: NodeState, gpu: layout.Gpu) -> str:
        return "yes" if getattr(state.driver(gpu), attribute) else "no"

    def put(change: Change, field: str, text: str) -> None:
        setattr(change.state.driver(change.gpu), attribute, _truth(change, field, text))

    return Field(help_text, get, put)


# ---- what a GPU may lack ----


def _no_ecc(gpu: layout.Gpu) -> str:
    return "" if gpu.ecc_supported else "it has no ECC"


def _ecc_off(gpu: layout.Gpu) -> str:
    return _no_ecc(gpu) or ("" if gpu.ecc_enabled else "its ECC is off")


def _no_remapping(gpu: layout.Gpu) -> str:
    return "" if gpu.remap_supported else "it has no row remapping"


def _no_retirement(gpu: layout.Gpu) -> str:
    return _no_ecc(gpu) or ("it remaps rows instead of retiring pages" if gpu.remap_supported else "")


def _no_fan(gpu: layout.Gpu) -> str:
    return "" if gpu.fan_percent else "it is passively cooled"


def _no_memory_sensor(gpu: layout.Gpu) -> str:
    return "" if gpu.temperature_max_memory else "it has no memory temperature sensor"


def _not_nvidia(gpu: layout.Gpu) -> str:
    return "" if gpu.vendor == layout.Vendor.NVIDIA else "only NVIDIA's driver has it"


def _no_video_clock(gpu: layout.Gpu) -> str:
    return "" if gpu.clock_video_max else "its driver reports no video clock"


# ---- fields with a rule of their own ----


def _set_ecc_count(change: Change, field: str, text: str) -> None:
    lack = _ecc_off(change.gpu)
    if lack:
        raise change.refuse(field, text, lack)
    value = _whole(change, field, text, 0, 2**48)
    before = getattr(change.gpu, field)
    setattr(change.gpu, field, value)
    total = f"{field}_total"  # new errors count for the GPU's life too; a reset since boot does not
    setattr(change.gpu, total, getattr(change.gpu, total) + max(0, value - before))


def _ecc_count(help_text: str, attribute: str) -> Field:
    return Field(help_text, lambda _s, gpu: "" if _ecc_off(gpu) else str(getattr(gpu, attribute)), _set_ecc_count)


def _set_power(change: Change, field: str, text: str) -> None:
    gpu = change.gpu
    try:
        watts = float(text)
    except ValueError:
        raise change.refuse(field, text, "not a number of watts") from None
    top = gpu.power_limit_max_mw / 1000 * 1.25  # short peaks above the limit are seen on real ones
    if not 0 <= watts <= top:
        raise change.refuse(field, text, f"out of its range 0 to {top:.0f} W")
    _count_energy(gpu)
    gpu.power_mw = round(watts * 1000)


def _count_energy(gpu: layout.Gpu) -> None:
    """What was drawn until now, before that changes."""
    now = time.time_ns()
    gpu.energy_mj += drawn_mw(gpu) * max(0, now - gpu.energy_since_ns) // _NS
    gpu.energy_since_ns = now


def _activity(help_text: str, attribute: str) -> Field:
    """A utilisation that counters of time at work follow."""

    def put(change: Change, field: str, text: str) -> None:
        gpu = change.gpu
        value = _whole(change, field, text, 0, 100, "%")
        now = time.time_ns()
        passed = max(0, now - gpu.active_since_ns) // 1000
        gpu.active_us += passed * gpu.utilisation // 100
        gpu.active_memory_us += passed * gpu.utilisation_memory // 100
        gpu.active_since_ns = now
        setattr(gpu, attribute, value)

    return Field(help_text, lambda _s, gpu: str(getattr(gpu, attribute)), put)


def _set_power_limit(change: Change, field: str, text: str) -> None:
    gpu = change.gpu
    low, high = gpu.power_limit_min_mw // 1000, gpu.power_limit_max_mw // 1000
    limit = gpu.power_limit_default_mw if text == "default" else _whole(change, field, text, low, high, "W") * 1000
    _count_energy(gpu)
    gpu.power_limit_mw = limit


def _set_throttle(change: Change, field: str, text: str) -> None:
    bits = 0
    for word in text.split(","):
        if word.strip() not in _THROTTLE and word.strip() not in ("none", ""):
            raise change.refuse(field, text, f"no throttle reason {word!r}; known: none, {', '.join(_THROTTLE)}")
        bits |= _THROTTLE.get(word.strip(), 0)
    change.gpu.throttle_reasons = bits


def _get_throttle(_state: NodeState, gpu: layout.Gpu) -> str:
    return ",".join(name for name, bit in _THROTTLE.items() if gpu.throttle_reasons & bit) or "none"


def _set_xid(change: Change, field: str, text: str) -> None:
    lack = _not_nvidia(change.gpu)
    if lack:
        raise change.refuse(field, text, lack)
    for word in text.split(","):
        xid = _whole(change, field, word, 1, 999)
        newest = max(event.sequence for event in change.gpu.events)
        change.gpu.events[newest % layout.MAX_EVENTS] = layout.Event(sequence=newest + 1, xid=xid)


def _get_xid(_state: NodeState, gpu: layout.Gpu) -> str:
    events = sorted((event.sequence, event.xid) for event in gpu.events if event.sequence)
    return ",".join(str(xid) for _, xid in events)


def _set_pcie_width(change: Change, field: str, text: str) -> None:
    value = _whole(change, field, text, 1, change.gpu.pcie_width_max)
    if value not in (1, 2, 4, 8, 16, 32):
        raise change.refuse(field, text, "a PCIe link has 1, 2, 4, 8 or 16 lanes")
    change.gpu.pcie_width = value


def _copies(kind: layout.CopyKind) -> Field:
    """How fast programs copy between two kinds of memory."""

    def put(change: Change, field: str, text: str) -> None:
        change.gpu.copy_mbps[kind] = _whole(change, field, text, 0, 10**7, "MB/s")

    return Field(
        f"MB/s of programs' copies ({kind.name.lower()}); 0: as fast as this machine copies",
        lambda _s, gpu: str(gpu.copy_mbps[kind]),
        put,
    )


def _set_copy_wrong(change: Change, field: str, text: str) -> None:
    kinds = {kind.name.lower(): 1 << kind for kind in layout.CopyKind}
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in kinds and word != "none":
            raise change.refuse(field, text, f"no kind of copies {word!r}; known: none, {', '.join(kinds)}")
    change.gpu.copy_wrong = sum(kinds.get(word, 0) for word in set(words))


def _get_copy_wrong(_state: NodeState, gpu: layout.Gpu) -> str:
    return ",".join(kind.name.lower() for kind in layout.CopyKind if gpu.copy_wrong >> kind & 1) or "none"


def _require_links(change: Change, field: str, text: str) -> None:
    if change.gpu.link_count == 0:
        raise change.refuse(field, text, "it has no NVLink, xGMI or Xe Link")


def _set_links(change: Change, field: str, text: str) -> None:
    _require_links(change, field, text)
    up = _truth(change, field, text)
    for number in range(change.gpu.link_count):
        _switch_link(change, number, up)


def _get_links(_state: NodeState, gpu: layout.Gpu) -> str:
    up = sum(bool(gpu.links[number].up) for number in range(gpu.link_count))
    return f"{up} of {gpu.link_count} up" if gpu.link_count else ""


def _set_link(change: Change, field: str, text: str) -> None:
    _require_links(change, field, text)
    match = _LINK_FIELD.fullmatch(field)
    assert match is not None  # noqa: S101 - chosen by this very pattern
    number, counter = int(match[1]), match[2]
    if number >= change.gpu.link_count:
        raise change.refuse(field, text, f"it has links 0 to {change.gpu.link_count - 1}")
    if counter is None:
        _switch_link(change, number, _truth(change, field, text))
    elif counter in _LINK_COUNTERS:
        setattr(change.gpu.links[number], _LINK_COUNTERS[counter], _whole(change, field, text, 0, 2**31))
    else:
        raise change.refuse(field, text, f"a link has the counters {', '.join(_LINK_COUNTERS)}")


def _switch_link(change: Change, number: int, up: int) -> None:
    """Both ends see that a link is down: the other one is switched as well."""
    link = change.gpu.links[number]
    link.up = up
    if link.peer == layout.LinkPeer.GPU:
        change.state.gpus[link.peer_gpu].links[link.remote_link].up = up


def _refuse_in_use(change: Change, field: str, text: str) -> None:
    if change.held or change.gpu.process_count:
        raise change.refuse(field, text, "processes use it; the driver would not change it either")


def _set_mig(change: Change, field: str, text: str) -> None:
    _refuse_in_use(change, field, text)
    if _truth(change, field, text):
        set_mig_layout(change.state, change.index, [])
    else:
        clear_mig(change.gpu)


def _set_mig_layout(change: Change, field: str, text: str) -> None:
    _refuse_in_use(change, field, text)
    set_mig_layout(change.state, change.index, [word.strip() for word in text.split(",") if word.strip()])


def _get_mig_layout(_state: NodeState, gpu: layout.Gpu) -> str:
    used = sorted((i.start, gpu.profiles[i.profile].name.decode()) for i in gpu.instances if i.used)
    return ",".join(name for _, name in used)


def _set_partitions(change: Change, field: str, text: str) -> None:
    _refuse_in_use(change, field, text)
    set_partitions(change.gpu, text)


def _get_partitions(_state: NodeState, gpu: layout.Gpu) -> str:
    return f"{layout.Compute(gpu.compute_partition).name}-nps{gpu.memory_partition}".lower() if gpu.dies else ""


def _set_memory_used(change: Change, field: str, text: str) -> None:
    change.gpu.memory_used_mib = parse_mib(text)


def _set_process(change: Change, field: str, text: str) -> None:
    """``PID:SIZE[:compute|graphics[:NAME[:GPU INSTANCE]]]``; size 0 takes the process away."""
    gpu = change.gpu
    words = text.split(":")
    if not 2 <= len(words) <= 5 or not words[0].isdigit() or not 0 < int(words[0]) < 2**22:
        raise change.refuse(field, text, "want PID:SIZE[:compute|graphics[:NAME[:GPU_INSTANCE]]]")
    number, size, kind, name, where = (*words, *("", "", "compute", "", "")[len(words) :])
    if kind not in ("compute", "graphics"):
        raise change.refuse(field, text, f"no kind of process {kind!r}")
    if not where and (gpu.mig_enabled or any(instance.used for instance in gpu.instances)):
        raise change.refuse(field, text, "in MIG mode a process is in an instance: name its GPU instance")
    made_up = layout.Process(
        pid=int(number),
        graphics=kind == "graphics",
        instance=_instance_place(change, field, text, where) if where else layout.NO_INSTANCE,
        memory_mib=parse_mib(size),
        name=name.encode()[:31],
    )
    records = [gpu.processes[i] for i in range(gpu.process_count) if gpu.processes[i].pid != made_up.pid]
    if made_up.memory_mib:
        records.append(made_up)
    if len(records) > layout.MAX_PROCESSES:
        raise change.refuse(field, text, f"at most {layout.MAX_PROCESSES} made-up processes")
    _store_processes(gpu, records)


def _instance_place(change: Change, field: str, text: str, word: str) -> int:
    for place, instance in enumerate(change.gpu.instances):
        if instance.used and str(instance.gpu_instance) == word:
            return place
    raise change.refuse(field, text, f"it has no GPU instance {word!r}")


def _set_processes(change: Change, field: str, text: str) -> None:
    if text != "none":
        raise change.refuse(field, text, "only none can be set; add one with process=PID:SIZE")
    _store_processes(change.gpu, [])


def _store_processes(gpu: layout.Gpu, records: Iterable[layout.Process]) -> None:
    kept = [layout.Process.from_buffer_copy(record) for record in records]  # not views of what is overwritten
    gpu.process_count = len(kept)
    for place in range(layout.MAX_PROCESSES):
        gpu.processes[place] = kept[place] if place < len(kept) else layout.Process()


def _get_processes(_state: NodeState, gpu: layout.Gpu) -> str:
    made_up = (gpu.processes[i] for i in range(gpu.process_count))
    return ",".join(f"{process.pid}:{process.memory_mib}M" for process in made_up)


def _check_memory(change: Change) -> None:
    """Nothing can hold more than there is."""
    gpu = change.gpu
    made_up = [gpu.processes[i] for i in range(gpu.process_count)]
    used = gpu.memory_used_mib + sum(p.memory_mib for p in made_up) + sum(h.memory_mib for h in change.held)
    usable = gpu.memory_total_mib - gpu.memory_reserved_mib
    if used > usable:
        raise UsageError(
            f"GPU {change.index}: {used} MiB in use of {usable} usable",
            remedy=f"{gpu.memory_total_mib} MiB less {gpu.memory_reserved_mib} that the driver keeps is all there is",
        )
    for place, instance in enumerate(gpu.instances):
        inside = sum(p.memory_mib for p in made_up if p.instance == place)
        room = gpu.profiles[instance.profile].memory_mib if instance.used else 0
        if inside > room:
            raise UsageError(
                f"GPU {change.index}, GPU instance {instance.gpu_instance}: {inside} MiB in use of {room}",
                remedy="give the process less, or another instance",
            )


def _refuse(change: Change, field: str, text: str) -> None:
    raise change.refuse(field, text, "it is what the hardware is, and cannot be changed")


def _text(help_text: str, attribute: str) -> Field:
    return Field(help_text, lambda _s, gpu: str(getattr(gpu, attribute).decode()), _refuse)


FIELDS: dict[str, Field] = {
    "name": _text("product; fixed", "name"),
    "uuid": _text("fixed", "uuid"),
    "temperature": _number("of the chip, C", "temperature", lambda gpu: gpu.temperature_shutdown + 5, unit="C"),
    "temperature_memory": _number(
        "of the memory, C",
        "temperature_memory",
        lambda gpu: gpu.temperature_max_memory + 15,
        unit="C",
        needs=_no_memory_sensor,
    ),
    "power": Field("draw, W; at most its limit", lambda _s, gpu: f"{gpu.power_mw / 1000:g}", _set_power),
    "power_drawn": Field("W, under its limit", lambda _s, gpu: f"{drawn_mw(gpu) / 1000:g}", _refuse),
    "power_limit": Field(
        "W, or default: as after a reboot", lambda _s, gpu: str(gpu.power_limit_mw // 1000), _set_power_limit
    ),
    "fan": _number("percent", "fan_percent", 100, low=1, unit="%", needs=_no_fan),
    "utilisation": _activity("percent, in addition to what processes take", "utilisation"),
    "utilisation_memory": _activity("of the memory's bandwidth, percent", "utilisation_memory"),
    "utilisation_encoder": _number("percent", "utilisation_encoder", 100, unit="%"),
    "utilisation_decoder": _number("percent", "utilisation_decoder", 100, unit="%"),
    "clock_graphics": _number("MHz", "clock_graphics", lambda gpu: gpu.clock_graphics_max, unit="MHz"),
    "clock_memory": _number("MHz", "clock_memory", lambda gpu: gpu.clock_memory_max, unit="MHz"),
    "clock_video": _number("MHz", "clock_video", lambda gpu: gpu.clock_video_max, unit="MHz", needs=_no_video_clock),
    "throttle": Field("why clocks are low: " + ", ".join(_THROTTLE), _get_throttle, _set_throttle),
    "performance_state": _number("P-state", "performance_state", 15, needs=_not_nvidia),
    "memory_used": Field(
        "held by nobody: what a job left behind; a size such as 10G",
        lambda _s, gpu: f"{gpu.memory_used_mib}M",
        _set_memory_used,
    ),
    "process": Field(
        "add a made-up one, PID:SIZE[:compute|graphics[:NAME[:GPU_INSTANCE]]]; size 0 takes it away",
        _get_processes,
        _set_process,
    ),
    "processes": Field("made-up ones; set to none to clear", _get_processes, _set_processes),
    "ecc_corrected": _ecc_count("errors since boot", "ecc_corrected"),
    "ecc_uncorrected": _ecc_count("errors since boot", "ecc_uncorrected"),
    "ecc_corrected_total": _number("errors over its life", "ecc_corrected_total", 2**48, needs=_ecc_off),
    "ecc_uncorrected_total": _number("errors over its life", "ecc_uncorrected_total", 2**48, needs=_ecc_off),
    "ecc": _flag("whether error correction is on", "ecc_enabled", _no_ecc),
    "ecc_pending": _flag("whether it will be on after a reboot", "ecc_pending", _no_ecc),
    "remapped_correctable": _number("rows", "remapped_correctable", 512, needs=_no_remapping),
    "remapped_uncorrectable": _number("rows", "remapped_uncorrectable", 512, needs=_no_remapping),
    "remap_pending": _flag("a row waits for a reset", "remap_pending", _no_remapping),
    "remap_failed": _flag("a row could not be remapped", "remap_failed", _no_remapping),
    "retired_single": _number("pages retired after single-bit errors", "retired_single", 64, needs=_no_retirement),
    "retired_double": _number("pages retired after double-bit errors", "retired_double", 64, needs=_no_retirement),
    "retired_pending": _flag("a page waits for a reboot", "retired_pending", _no_retirement),
    "xid": Field("raise these XIDs, e.g. 79 or 48,63", _get_xid, _set_xid),
    "lost": _flag("fallen off the bus", "lost"),
    "links": Field("all its links up or down; one: link3=down; counters: link3_replays=5", _get_links, _set_links),
    "pcie_generation": _number("of the link now", "pcie_generation", lambda gpu: gpu.pcie_generation_max, low=1),
    "pcie_width": Field("lanes of the link now", lambda _s, gpu: str(gpu.pcie_width), _set_pcie_width),
    "pcie_replays": _number("since boot", "pcie_replays", 2**31),
    "pcie_tx": _number("KB/s", "pcie_tx_kb", 2**31),
    "pcie_rx": _number("KB/s", "pcie_rx_kb", 2**31),
    "copy_host": _copies(layout.CopyKind.HOST),
    "copy_local": _copies(layout.CopyKind.LOCAL),
    "copy_peer": _copies(layout.CopyKind.PEER),
    "copy_wrong": Field("programs' copies that lose a bit: host, local, peer", _get_copy_wrong, _set_copy_wrong),
    "compute_mode": _number("0 default, 2 prohibited, 3 exclusive", "compute_mode", 3, needs=_not_nvidia),
    "persistence": _flag("persistence mode", "persistence", _not_nvidia),
    "mig": Field(
        "MIG mode on (without instances) or off", lambda _s, gpu: "yes" if gpu.mig_enabled else "no", _set_mig
    ),
    "mig_layout": Field("MIG instances by profile, e.g. 3g.40gb,2g.20gb", _get_mig_layout, _set_mig_layout),
    "partitions": Field("of an AMD GPU, e.g. cpx-nps4; spx-nps1: none", _get_partitions, _set_partitions),
    "driver_loaded": _driver_flag("of the GPU's vendor on this node", "loaded"),
    "driver_hang": _driver_flag("its calls do not return until set to no", "hang"),
    "driver_delay": _driver_number("added to each of its calls, ms", "delay_ms", 600_000, "ms"),
    "driver_power_limits": _driver_number("0 can be set, 1 setters fail, 2 not supported", "power_limits", 2),
    "driver_generation": _driver_number("its branch, e.g. 470: newer functions are missing", "generation", 99_999),
}
