"""OpenStack and other providers through apache-libcloud.

What all of them keep is a machine's name: it is CLUSTER-POOL-MARK-NODE-TOKEN, and machines are known by it. MARK is a
digest of cluster and pool: a-b of c and a of b-c are not the same. Credentials are the arguments of libcloud's driver:
``{"args": [...], "kwargs": {...}}`` in POOL.json of the credentials' folder. Its shape is in its metadata, where the
provider has some, else it is what the provider calls its size.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from libcloud.common.exceptions import RateLimitReachedError
from libcloud.common.types import InvalidCredsError
from libcloud.compute.providers import get_driver

from sluice.base.errors import SluiceError
from sluice.fleet.driver import DriverSite, Failure, Machine, Order, ProviderError

T = TypeVar("T")
_TURN_S = 30.0  # for which a call waits for the one before; nothing was asked when it is over
_SHAPE = "sluice-shape"
_SIZES = ("flavorId", "instance_type", "size")
"""What libcloud's drivers call a machine's size among its other facts, where it has no `size`."""
_ENDING = frozenset({"terminated", "stopped", "stopping", "error", "shutting-down"})
_NO_CAPACITY = ("no valid host", "insufficient capacity", "not enough hosts")


class Libcloud:
    """The driver. libcloud's are not thread-safe: one call at a time."""

    def __init__(self, site: DriverSite) -> None:
        site.only("provider", "image", "options")
        self._site = site
        mark = hashlib.sha256(f"{site.cluster}/{site.pool}".encode()).hexdigest()[:8]
        self._prefix = f"{site.cluster}-{site.pool}-{mark}-"
        self._name = re.compile(re.escape(self._prefix) + r"(?P<node>.+)-(?P<token>[0-9a-f]{32})")
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}  # of sizes, by id
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
        return self._call(lambda: self._find(order.token) or self._make(order))

    def _find(self, token: str) -> Machine | None:
        """Looked for under the lock of the launch that follows: another call may just be making it."""
        return next((one for one in self._list() if one.token == token and not one.ending), None)

    def _make(self, order: Order) -> Machine:
        def named(kind: str, wanted: str, found: list[Any]) -> Any:
            for one in found:
                if wanted in (one.id, one.name):
                    return one
            raise ProviderError("refused", f"{self._site.setting('provider')} has no {kind} {wanted!r}")

        words: dict[str, Any] = dict(self._site.settings.get("options", {}))
        if order.zone:
            words["location"] = named("location", order.zone, self._cloud.list_locations())
        if "ex_metadata" in inspect.signature(self._cloud.create_node).parameters:
            words["ex_metadata"] = {**words.get("ex_metadata", {}), _SHAPE: order.shape}
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
        return self._machine(node, order.node, order.token, order.shape, order.zone)

    def terminate(self, machine: str) -> None:
        """As `Driver.terminate`."""
        self._call(
            lambda: [self._cloud.destroy_node(one) for one in self._cloud.list_nodes() if str(one.id) == machine]
        )

    def machines(self) -> list[Machine]:
        """As `Driver.machines`."""
        return self._call(self._list)

    def _list(self) -> list[Machine]:
        found = [(one, self._name.fullmatch(one.name)) for one in self._cloud.list_nodes()]
        return [self._machine(one, name["node"], name["token"], self._shape(one)) for one, name in found if name]

    def _shape(self, node: Any) -> str:
        """As the policy names it; empty where neither the machine nor its size says so."""
        extra = node.extra or {}
        for kept in (extra.get("metadata"), extra.get("tags")):
            if isinstance(kept, dict) and _SHAPE in kept:
                return str(kept[_SHAPE])
        size = next((str(extra[key]) for key in _SIZES if extra.get(key)), "") if node.size is None else node.size.id
        return next((one for one in self._site.shapes if one in (size, self._name_of(size))), size)

    def _name_of(self, size: str) -> str:
        if size and size not in self._names:
            self._names |= {size: size, **{str(one.id): one.name for one in self._cloud.list_sizes()}}
        return self._names.get(size, size)

    def _machine(self, node: Any, name: str, token: str, shape: str = "", zone: str = "") -> Machine:
        return Machine(
            id=str(node.id),
            token=token,
            node=name,
            shape=shape,
            zone=zone,
            address=next(iter(node.private_ips or ()), ""),
            ending=str(node.state).lower() in _ENDING,
        )

    def _call(self, ask: Callable[[], T]) -> T:
        provider = self._site.setting("provider")
        if not self._lock.acquire(timeout=_TURN_S):
            raise ProviderError("throttled", f"{provider}: an earlier call still has no answer")
        try:
            return ask()
        except ProviderError:
            raise
        except InvalidCredsError:
            raise ProviderError("credentials", f"{provider}: refuses the credentials") from None
        except RateLimitReachedError:
            raise ProviderError("throttled", f"{provider}: too many calls") from None
        except Exception as error:  # each of its drivers has its own; their words may have credentials
            raise ProviderError(_kind(error), f"{provider}: {self._site.secrets.hide(str(error))}"[:300]) from None
        finally:
            self._lock.release()


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
