"""The output of ibnetdiscover (infiniband-diags): switches, adapters, and each link from both of its ends."""

from __future__ import annotations

import re

from sluice.base.errors import SluiceError
from sluice.base.run import run_command
from sluice.base.text import one_line
from sluice.fabric.model import Device, End, Link, Reported

PROGRAM = "ibnetdiscover"
_REMEDY = "give the output of ibnetdiscover without options, as it is"
_DEVICE = re.compile(r'(Switch|Ca|Rt)\s+\d+\s+"([SHR]-[0-9a-fA-F]{1,16})"\s*(?:#\s*"(.*)")?')
_PORT = re.compile(
    r'\[(\d+)\](?:\[ext \d+\])?(?:\([0-9a-fA-F]+\))?\s+"([SHR]-[0-9a-fA-F]{1,16})"\[(\d+)\](?:\[ext \d+\])?'
    r"(?:\([0-9a-fA-F]+\))?(.*)"
)
_SPEED = re.compile(r"\b(\d+x[A-Z0-9]+)\s*$")
_ATTRIBUTE = re.compile(r"(vendid|devid|sysimgguid|switchguid|caguid|rtguid)=|Chassis |#|DR path ")


def read_ibnetdiscover(text: str, source: str) -> Reported:
    """Parse it; `source` names its origin in errors. Raises SluiceError for a line that is none of ibnetdiscover."""
    reported = Reported(both_ends=True)
    here = ""
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if match := _DEVICE.match(stripped):
            here = match[2][2:].lower().zfill(16)
            reported.devices.append(_device(match[1], here, one_line(match[3] or "")))
        elif here and (match := _PORT.match(stripped)):
            speed = _SPEED.search(match[4])
            far = End(match[2][2:].lower().zfill(16), match[3])
            reported.links.append(Link(End(here, match[1]), far, speed[1] if speed else ""))
        elif stripped and not _ATTRIBUTE.match(stripped):
            raise SluiceError(f"{source}:{number}: {one_line(stripped, limit=60)!r} is not understood", remedy=_REMEDY)
    if not reported.devices:
        raise SluiceError(f"{source}: no switch and no adapter", remedy=_REMEDY)
    return reported


def _device(kind: str, guid: str, description: str) -> Device:
    """An adapter describes itself as its node and its name, ``n1 mlx5_0`` or ``n1 HCA-1``."""
    if kind != "Ca":
        return Device(guid, description.split(";")[-1].split(":")[0].strip() or guid)
    words = description.strip("'").split()
    node = words[0].partition(".")[0] if words else guid
    return Device(guid, words[1] if len(words) > 1 else "", node)


def run_ibnetdiscover(timeout: float) -> Reported:
    """Ask the fabric that this host is plugged into. Raises SluiceError where the program is missing or fails."""
    try:
        done = run_command([PROGRAM], timeout=timeout)
    except SluiceError as error:
        raise SluiceError(
            one_line(error.what), remedy="run it as root on a host with InfiniBand (package infiniband-diags)"
        ) from error
    return read_ibnetdiscover(done.stdout, PROGRAM)
