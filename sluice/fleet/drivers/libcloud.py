"""OpenStack and other providers through apache-libcloud.

What all of them keep is a machine's name: it is CLUSTER-POOL-NODE-TOKEN, and machines are known by it. Credentials are
the arguments of libcloud's driver: ``{"args": [...], "kwargs": {...}}`` in POOL.json of the credentials' folder.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from libcloud.common.exceptions import BaseHTTPError, RateLimitReachedError
from libcloud.common.types import InvalidCredsError, LibcloudError
from libcloud.compute.providers import get_driver

from sluice.base.errors import SluiceError
from sluice.fleet.driver import DriverSite, Failure, Machine, Order, ProviderError

T = TypeVar("T")
_TOKEN = 32
_ENDING = frozenset({"terminated", "stopped", "stopping", "error", "shutting-down"})
_NO_CAPACITY = ("no valid host", "insufficient capacity", "not enough hosts")


class Libcloud:
    """The driver. libcloud's are not thread-safe: one call at a time."""

    def __init__(self, site: DriverSite) -> None:
        site.only("provider", "image", "options")
        self._site = site
        self._prefix = f"{site.cluster}-{site.pool}-"
        self._lock = threading.Lock()
        given = site.read_credentials("args", "kwargs")
        name = site.setting("provider")
        try:
            self._cloud = get_driver(name)(*given.get("args", ()), **given.get("kwargs", {}))
        except Exception as error:  # each of its drivers has its own; their words may have credentials
            raise SluiceError(
                f"pool {site.pool}: libcloud's driver {name}: {type(error).__name__}",
                remedy="check settings.provider and the file of credentials",
            ) from None

    def launch(self, order: Order) -> Machine:
        """As `Driver.launch`."""
        for machine in self.machines():
            if machine.token == order.token and not machine.ending:
                return machine
        return self._call(lambda: self._make(order))

    def _make(self, order: Order) -> Machine:
        def named(kind: str, wanted: str, found: list[Any]) -> Any:
            for one in found:
                if wanted in (one.id, one.name):
                    return one
            raise ProviderError("refused", f"{self._site.setting('provider')} has no {kind} {wanted!r}")

        words: dict[str, Any] = dict(self._site.settings.get("options", {}))
        if order.zone:
            words["location"] = named("location", order.zone, self._cloud.list_locations())
        name = f"{self._prefix}{order.node}-{order.token}"
        node = self._cloud.create_node(
            name=name,
            size=named("size", order.shape, self._cloud.list_sizes()),
            image=named("image", self._site.setting("image"), self._cloud.list_images()),
            **words,
        )
        if node.name != name:
            self._cloud.destroy_node(node)
            raise ProviderError("refused", f"{self._site.setting('provider')} does not keep the names of machines")
        return self._machine(node, order)

    def terminate(self, machine: str) -> None:
        """As `Driver.terminate`."""
        self._call(
            lambda: [self._cloud.destroy_node(one) for one in self._cloud.list_nodes() if str(one.id) == machine]
        )

    def machines(self) -> list[Machine]:
        """As `Driver.machines`."""
        return self._call(lambda: [self._machine(one) for one in self._cloud.list_nodes() if self._mine(one.name)])

    def _mine(self, name: str) -> bool:
        return name.startswith(self._prefix) and len(name) > len(self._prefix) + _TOKEN + 1

    def _machine(self, node: Any, order: Order | None = None) -> Machine:
        own = node.name[len(self._prefix) :]
        return Machine(
            id=str(node.id),
            token=own[-_TOKEN:],
            node=own[: -_TOKEN - 1],
            shape="" if order is None else order.shape,
            zone="" if order is None else order.zone,
            address=next(iter(node.private_ips or ()), ""),
            ending=str(node.state).lower() in _ENDING,
        )

    def _call(self, ask: Callable[[], T]) -> T:
        try:
            with self._lock:
                return ask()
        except ProviderError:
            raise
        except InvalidCredsError:
            raise ProviderError("credentials", f"{self._site.setting('provider')}: refuses the credentials") from None
        except RateLimitReachedError:
            raise ProviderError("throttled", f"{self._site.setting('provider')}: too many calls") from None
        except (LibcloudError, BaseHTTPError, OSError) as error:
            raise ProviderError(_kind(error), f"{self._site.setting('provider')}: {error}"[:300]) from None


def _kind(error: Exception) -> Failure:
    words = str(error).lower()
    if any(one in words for one in _NO_CAPACITY):
        return "no_capacity"
    if "quota" in words:
        return "quota"
    code = getattr(error, "code", 0)
    return "refused" if code in (400, 404, 422) else "credentials" if code in (401, 403) else "unknown"


def make(site: DriverSite) -> Libcloud:
    """The entry point. Raises SluiceError."""
    return Libcloud(site)
