"""What hosts and switches hear by LLDP: the output of ``lldpctl -f json`` of each, in files of their names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gres_probe.machine import natural
from sluice.base.errors import SluiceError, UsageError
from sluice.base.text import one_line
from sluice.fabric.model import Device, End, Link, Reported

_MOST_BYTES = 16 << 20
_REMEDY = "write it with: lldpctl -f json"
_SWITCH_ROLES = ("Bridge", "Router")


def read_lldp(path: Path) -> Reported:
    """A file NAME.json of the host or switch NAME, or a folder of such files.

    Whoever hears of NAME as a bridge or router makes it a switch; otherwise NAME is a node. Raises SluiceError for a
    file that is not as lldpctl writes it.
    """
    try:
        files = sorted(path.glob("*.json"), key=lambda one: natural(one.name)) if path.is_dir() else [path]
        texts = {file: _content(file) for file in files}
    except OSError as error:
        raise SluiceError(f"{path}: {error.strerror}", remedy="name a file or a folder that can be read") from error
    if not texts:
        raise UsageError(f"{path}: no files NAME.json", remedy=_REMEDY)
    return parse_lldp({file.stem: (str(file), text) for file, text in texts.items()})


def _content(file: Path) -> bytes:
    with file.open("rb") as opened:
        data = opened.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise SluiceError(f"{file}: more than {_MOST_BYTES >> 20} MiB", remedy=_REMEDY)
    return data


def parse_lldp(texts: dict[str, tuple[str, bytes]]) -> Reported:
    """From the output of each host or switch by its name, with the origin for errors."""
    heard = {name: list(_heard(text, source)) for name, (source, text) in texts.items()}
    switches = {far for ends in heard.values() for _, far, _, is_switch in ends if is_switch}
    devices: dict[str, Device] = {}
    reported = Reported()
    for name, ends in heard.items():
        for interface, far, port, _ in ends:
            one, other = _end(name, interface, switches), _end(far, port, switches)
            for device in (one, other):
                devices[device.id] = device
            # A node has an adapter for each interface; a switch one device with many ports.
            reported.links.append(Link(End(one.id, interface), End(other.id, port)))
    reported.devices = list(devices.values())
    return reported


def _end(name: str, port: str, switches: set[str]) -> Device:
    return Device(name, name) if name in switches else Device(f"{name} {port}", port, name.partition(".")[0])


def _heard(text: bytes, source: str) -> Iterator[tuple[str, str, str, bool]]:
    """Interface, name and port of the other end, and whether that is a switch."""
    try:
        document = json.loads(text)
        interfaces = document["lldp"].get("interface", [])
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise SluiceError(f"{source}: not of lldpctl ({one_line(str(error), limit=80)})", remedy=_REMEDY) from error
    for entry in interfaces if isinstance(interfaces, list) else [interfaces]:
        for interface, neighbour in entry.items() if isinstance(entry, dict) else ():
            name, chassis = _chassis(neighbour.get("chassis") if isinstance(neighbour, dict) else None)
            port = _port(neighbour.get("port") if isinstance(neighbour, dict) else None)
            if name and port:
                yield one_line(interface), name, port, _is_switch(chassis.get("capability"))


def _chassis(value: object) -> tuple[str, dict[str, Any]]:
    """lldpctl writes the neighbour's name as a key, and where it has none its ID alone."""
    if not isinstance(value, dict):
        return "", {}
    for name, inner in value.items():
        if name != "id" and isinstance(inner, dict):
            return one_line(name), inner
    return _identity(value.get("id")), value


def _port(value: object) -> str:
    return _identity(value.get("id")) if isinstance(value, dict) else ""


def _identity(value: object) -> str:
    text = value.get("value") if isinstance(value, dict) else None
    return one_line(text) if isinstance(text, str) else ""


def _is_switch(capabilities: object) -> bool:
    listed = capabilities if isinstance(capabilities, list) else [capabilities]
    return any(
        isinstance(one, dict) and one.get("type") in _SWITCH_ROLES and one.get("enabled") is True for one in listed
    )
