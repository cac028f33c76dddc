"""Machines of one's own that are switched off when idle and have no BMC: woken by a magic packet, stopped by a command.

A machine is a node's; what was launched is in `records`. It is on when its host answers at a TCP port (that of sshd);
one that answers without a record is somebody's, and left alone.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from wakeonlan import wake

from sluice.base.errors import SluiceError
from sluice.base.run import CommandError, run_command
from sluice.base.text import one_line
from sluice.fleet.driver import DriverSite, Machine, Order, ProviderError, check_program
from sluice.fleet.records import Record, Records, machine_of

_ANSWERS_S = 2.0
_STOP_S = 20.0
_AT_ONCE = 16
_MAC = re.compile(r"[0-9A-Fa-f]{2}(?:[:-][0-9A-Fa-f]{2}){5}")
_SETTINGS = ("broadcast", "macs", "port", "stop", "wake_port")


class WakeOnLan:
    """The driver."""

    def __init__(self, site: DriverSite) -> None:
        site.only(*_SETTINGS)
        macs, stop = site.settings.get("macs"), site.settings.get("stop")
        if not isinstance(macs, dict) or not all(_MAC.fullmatch(one) for one in macs.values()):
            raise SluiceError(
                f"pool {site.pool}: settings.macs {macs!r:.200}: not hardware addresses by node",
                remedy="write settings: {macs: {n1: '00:25:90:ab:cd:ef'}}",
            )
        if not isinstance(stop, list) or not stop:
            raise SluiceError(
                f"pool {site.pool}: settings.stop {stop!r:.200}: not a program with its arguments",
                remedy="write settings: {stop: [/usr/bin/ssh, '-oBatchMode=yes', 'power@{node}', sudo, poweroff]}",
            )
        check_program(Path(stop[0]))
        self._macs, self._stop = macs, stop
        self._broadcast = site.setting("broadcast", "255.255.255.255")
        self._port, self._wake_port = (
            self._number(site, name, usual) for name, usual in (("port", 22), ("wake_port", 9))
        )
        self._records = Records(site, "wakeonlan")

    @staticmethod
    def _number(site: DriverSite, name: str, usual: int) -> int:
        value = site.settings.get(name, usual)
        if not isinstance(value, int) or not 1 <= value <= 65535:
            raise SluiceError(f"pool {site.pool}: settings.{name} {value!r}: not a port", remedy="write 1 to 65535")
        return value

    def launch(self, order: Order) -> Machine:
        """As `Driver.launch`. A packet may be lost: it is sent again for a machine that does not answer."""
        if order.node not in self._macs:
            raise ProviderError("broken", f"{order.node}: settings.macs does not name it")
        record = self._records.read(order.node)
        on = self._answers(order.node)
        if on and (record is None or record.token != order.token):
            whose = "nobody launched it" if record is None else "its last launch is not over"
            raise ProviderError("broken", f"{order.node}: is on, and {whose}; it is left as it is")
        if record is None or record.token != order.token:
            record = Record(order.token, order.shape, order.zone, time.time())
            self._records.write(order.node, record)
        if not on:
            self._wake(order.node)
        return machine_of(order.node, record)

    def _wake(self, node: str) -> None:
        try:
            wake(self._macs[node], host=self._broadcast, port=self._wake_port)
        except OSError as error:
            raise ProviderError("broken", f"{node}: no packet to {self._broadcast}: {error.strerror}") from error

    def terminate(self, machine: str) -> None:
        """As `Driver.terminate`: runs the command as long as the machine answers."""
        node, record = self._records.of_machine(machine)
        if record is None:
            return
        if record.ending is None:
            self._records.write(node, replace(record, ending=time.time()))
        if not self._answers(node):
            return
        try:
            run_command([word.replace("{node}", node) for word in self._stop], timeout=_STOP_S, env=_environment())
        except CommandError as error:
            if self._answers(node):  # else it lost its connection as it went
                raise ProviderError("broken", f"{node}: settings.stop: {one_line(str(error))}"[:300]) from error

    def machines(self) -> list[Machine]:
        """As `Driver.machines`: those that were launched, until they are to end and do not answer any more."""
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            return [one for one in threads.map(self._seen, self._records.nodes()) if one is not None]

    def _seen(self, node: str) -> Machine | None:
        record = self._records.listed(node)
        if record is None:
            return None
        with suppress(ProviderError):  # of which nothing is known, it counts as there
            if record.ending is not None and not self._answers(node):
                self._records.forget(node, record)
                return None
        return machine_of(node, record)

    def _answers(self, node: str) -> bool:
        """Whether its host is there: one that refuses the connection is as well. Raises ProviderError where this host
        could not ask: its name service or network fails, or it has no file descriptor left.
        """
        try:
            socket.create_connection((node, self._port), timeout=_ANSWERS_S).close()
        except ConnectionError:
            return True
        except OSError as error:
            if isinstance(error, TimeoutError) or error.errno == errno.EHOSTUNREACH:
                return False
            raise ProviderError("broken", f"{node}: whether it is on is not known: {error.strerror}") from error
        return True


def _environment() -> dict[str, str]:
    """Of the command: what SSH needs, and nothing that other drivers find their credentials in."""
    return {name: os.environ[name] for name in ("PATH", "HOME", "SSH_AUTH_SOCK") if name in os.environ}


def make(site: DriverSite) -> WakeOnLan:
    """The entry point. Raises SluiceError."""
    return WakeOnLan(site)
