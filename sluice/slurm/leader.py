"""Which controller leads, and waiting for one."""

from __future__ import annotations

import logging
import re
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from sluice.base.errors import SluiceError
from sluice.base.service import notify
from sluice.base.text import one_line

log = logging.getLogger("sluice.slurm")
_HEARTBEAT = struct.Struct(">QQ")  # time, index among SlurmctldHost (slurmctld/heartbeat.c)


def leads(config: Mapping[str, str], host: str, is_up: Callable[[], bool], now: float | None = None) -> bool:
    """Whether `host` (its short name) runs the active slurmctld.

    With several controllers the active one writes its number into StateSaveLocation/heartbeat every quarter of
    SlurmctldTimeout; with one, it leads when it answers. Raises OSError when the heartbeat cannot be read.
    """
    order = sorted(
        (int(match[1]), value.partition("(")[0].partition(".")[0])
        for key, value in config.items()
        if (match := re.fullmatch(r"SlurmctldHost\[(\d+)\]", key))
    )
    names = [name for _, name in order]
    if host not in names:
        return False
    if len(names) == 1:
        return is_up()
    try:
        data = (Path(config["StateSaveLocation"]) / "heartbeat").read_bytes()
    except FileNotFoundError:
        return False  # replaced just now, or no controller ever led
    if len(data) != _HEARTBEAT.size:
        return False
    written, index = (int(part) for part in _HEARTBEAT.unpack(data))
    timeout = re.match(r"\d{1,9}", config.get("SlurmctldTimeout", ""))  # "120 sec"
    patience = float(timeout[0]) if timeout else 120.0
    age = (time.time() if now is None else now) - written
    return -patience <= age <= patience and index < len(names) and names[index] == host


def wait_for_config(
    read: Callable[[], Mapping[str, str]], stopping: threading.Event, pause: float = 5.0
) -> Mapping[str, str] | None:
    """slurmctld's configuration as soon as one answers; None when stopped before."""
    said = ""
    while not stopping.is_set():
        try:
            return read()
        except SluiceError as error:
            if str(error) != said:
                said = str(error)
                log.warning("waiting for slurmctld: %s", one_line(said))
                notify("READY=1", "STATUS=waits for slurmctld")  # nothing waits for this daemon
        stopping.wait(pause)
    return None
