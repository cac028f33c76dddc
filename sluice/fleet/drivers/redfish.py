"""Machines of one's own that are switched off when idle: power through their BMCs' Redfish, by sushy.

A machine is a node's. What was launched, with which token, is a file for each node in fleetd's state folder, written
before the power is switched on: BMCs have no place for a token that all of them keep. One that is on without such a
file is somebody's, and left alone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import sushy
from sushy.auth import BasicAuth
from sushy.exceptions import AccessError, HTTPError, SushyError

from sluice.base.errors import SluiceError
from sluice.fleet.driver import DriverSite, Machine, Order, ProviderError
from sluice.fleet.records import Record, Records, machine_of

_CONNECT_S, _READ_S = 5, 10
_AT_ONCE = 16
_STARTS_S = 120.0
"""A BMC that was told to switch on may say Off for this time."""
_STOP_S = 120
_URL = re.compile(r"https://[A-Za-z0-9.{}:\[\]-]{1,250}/?")


class Redfish:
    """The driver."""

    def __init__(self, site: DriverSite) -> None:
        site.only("bmc", "system", "ca", "stop_within")
        self._site = site
        self._bmc = site.settings.get("bmc", "")
        for url in self._bmc.values() if isinstance(self._bmc, dict) else [self._bmc]:
            if not isinstance(url, str) or not _URL.fullmatch(url):
                raise SluiceError(
                    f"pool {site.pool}: settings.bmc {url!r}: not an address that begins with https://",
                    remedy="write settings: {bmc: 'https://{node}-bmc.example'}, or bmc: {NODE: 'https://...'}",
                )
        self._ca = site.setting("ca") if "ca" in site.settings else True
        self._path = site.setting("system") if "system" in site.settings else None
        self._stop_s = site.settings.get("stop_within", _STOP_S)
        if not isinstance(self._stop_s, int):
            raise SluiceError(f"pool {site.pool}: settings.stop_within {self._stop_s!r}", remedy="write it in seconds")
        given = site.read_credentials("user", "password")
        self._auth = str(given.get("user", "")), str(given.get("password", ""))
        site.secrets.add(":".join(self._auth))
        self._records = Records(site, "redfish")

    def launch(self, order: Order) -> Machine:
        """As `Driver.launch`."""
        with self._talk(order.node):
            system = self._system(order.node)
            record = self._records.read(order.node)
            on = system.power_state != sushy.PowerState.OFF
            if on and (record is None or record.token != order.token):
                whose = "nobody launched it" if record is None else "its last launch is not over"
                raise ProviderError("broken", f"{order.node}: is {_word(system)}, and {whose}; it is left as it is")
            if not on or record is None:
                record = Record(order.token, order.shape, order.zone, time.time())
                self._records.write(order.node, record)
                self._reset(system, sushy.ResetType.ON, sushy.ResetType.FORCE_ON)
            return machine_of(order.node, record)

    def terminate(self, machine: str) -> None:
        """As `Driver.terminate`: asks the system to stop; called again later than `stop_within`, cuts the power."""
        node, record = self._records.of_machine(machine)
        if record is None:
            return
        with self._talk(node):
            system = self._system(node)
            if system.power_state == sushy.PowerState.OFF:
                self._records.forget(node, record)
            elif record.ending is None:
                self._records.write(node, replace(record, ending=time.time()))
                self._reset(system, sushy.ResetType.GRACEFUL_SHUTDOWN, sushy.ResetType.FORCE_OFF)
            elif not 0 <= time.time() - record.ending <= self._stop_s:
                self._reset(system, sushy.ResetType.FORCE_OFF)

    def machines(self) -> list[Machine]:
        """As `Driver.machines`: those of our records that are not off. A BMC that does not answer says nothing, and
        its machine counts as there; without a record that can be read, nobody can say what is there.
        """
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            return [one for one in threads.map(self._seen, self._records.nodes()) if one is not None]

    def _seen(self, node: str) -> Machine | None:
        record = self._records.listed(node)
        if record is None:
            return None
        with suppress(ProviderError), self._talk(node):
            if self._system(node).power_state == sushy.PowerState.OFF:
                if record.ending is not None or not 0 <= time.time() - record.began <= _STARTS_S:
                    self._records.forget(node, record)
                return None
        return machine_of(node, record)

    def _system(self, node: str) -> Any:
        url = self._bmc.get(node) if isinstance(self._bmc, dict) else self._bmc.replace("{node}", node)
        if url is None:
            raise ProviderError("broken", f"{node}: settings.bmc does not name it")
        root = sushy.Sushy(
            url,
            verify=self._ca,
            auth=BasicAuth(*self._auth),
            server_side_retries=1,  # 0 would be sushy's own number, of requests that change something as well
            server_side_retries_delay=1,
            read_timeout=_READ_S,
            connect_timeout=_CONNECT_S,
        )
        return root.get_system(None if self._path is None else self._path.replace("{node}", node))

    def _reset(self, system: Any, *ways: sushy.ResetType) -> None:
        """By the first way that the system has."""
        allowed = system.get_allowed_reset_system_values()
        system.reset_system(next((one for one in ways if one in allowed), ways[0]))

    @contextmanager
    def _talk(self, node: str) -> Iterator[None]:
        """What fails is this machine's alone: the pool's others have BMCs of their own."""
        try:
            yield
        except AccessError:
            raise ProviderError("broken", f"{node}: its BMC refuses the credentials") from None
        except HTTPError as error:
            raise self._broken(f"{node}: its BMC answers {error.status_code}: {error.detail or error.code}") from None
        except (SushyError, OSError, ValueError) as error:
            raise self._broken(f"{node}: its BMC: {error}") from None

    def _broken(self, words: str) -> ProviderError:
        return ProviderError("broken", self._site.secrets.hide(words)[:300])


def _word(system: Any) -> str:
    return "in no known state" if system.power_state is None else str(system.power_state.value)


def make(site: DriverSite) -> Redfish:
    """The entry point. Raises SluiceError."""
    return Redfish(site)
