"""Who is calling: a token of Sluice, a token of Slurm, or the user that a proxy names."""

from __future__ import annotations

import hashlib
import ipaddress
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers

from sluice.base.errors import SluiceError
from sluice.base.tokens import PREFIX, TokenStore
from sluice.web.access import Viewer
from sluice.web.feed import Feed
from sluice.web.problems import ProblemError
from sluice.web.store import Store

_KEPT_S = 60.0  # so long is an answer about a token of Slurm believed
_MOST_KEPT = 10_000
_MOST_TOKEN = 8192
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,127}\$?\Z")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class Proxy:
    """A reverse proxy that has checked who calls: only what comes from its address is believed."""

    peers: Sequence[Network] = ()
    header: str = "x-remote-user"

    def is_peer(self, address: str) -> bool:
        """Whether a connection comes from it."""
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(found in network for network in self.peers)

    def client(self, address: str, forwarded: str) -> str:
        """The address of who calls: the last that the proxy added, where the connection is the proxy's."""
        last = forwarded.rpartition(",")[2].strip()
        if not self.is_peer(address) or not last:
            return address
        try:
            return str(ipaddress.ip_address(last))
        except ValueError:
            return address


@dataclass
class Login:
    """Turns a request's headers into a viewer."""

    store: Store
    tokens: TokenStore
    feed: Feed
    proxy: Proxy = field(default_factory=Proxy)
    may_fail: Callable[[str], None] = lambda _: None
    """Raises ProblemError where too many log-ins from an address were refused."""
    _known: OrderedDict[bytes, tuple[str, float]] = field(default_factory=OrderedDict)

    @property
    def credentials(self) -> tuple[str, ...]:
        """The headers that say who calls."""
        return "authorization", "x-slurm-user-token", *([self.proxy.header.lower()] if self.proxy.peers else [])

    async def viewer(self, headers: Headers, peer: str, address: str) -> Viewer:
        """The caller: the connection's `peer`, and the client's address. Raises ProblemError 401, 429."""
        kind, _, text = headers.get("authorization", "").partition(" ")
        text = text.strip()
        try:
            if kind.lower() == "bearer" and text:
                return await self._bearer(text, address)
            if "x-slurm-user-token" in headers:
                return await self._bearer(headers["x-slurm-user-token"], address)
        except SluiceError as error:
            if isinstance(error, ProblemError):
                raise
            raise _refused(error.what, error.remedy) from error
        names = headers.getlist(self.proxy.header)
        if names and self.proxy.is_peer(peer):
            named = ",".join(names)  # two are none: the proxy has left one that a client sent
            if not _USER.match(named):
                raise _refused(f"{self.proxy.header}: {named[:40]!r} is not a user's name", "correct the proxy")
            return Viewer(named, self.store)
        raise _refused("no token", "send one: Authorization: Bearer TOKEN; make one with: sluice token create")

    async def _bearer(self, text: str, address: str) -> Viewer:
        if len(text) > _MOST_TOKEN:
            raise _refused(f"token: longer than {_MOST_TOKEN} characters", "send a token of Sluice or Slurm")
        if text.startswith(PREFIX):
            token = self.tokens.check(text, "read", time.time())
            return Viewer(token.user, self.store, frozenset(token.scopes))
        return Viewer(await self._of_slurm(text, address), self.store)

    async def _of_slurm(self, text: str, address: str) -> str:
        """The daemon checks it, which has the key; its answer is kept for a short time."""
        digest, now = hashlib.sha256(text.encode()).digest(), time.time()
        user, until = self._known.get(digest, ("", 0.0))
        if now < until:
            return user
        if text.count(".") != 2:
            raise _refused("token: neither of Sluice nor of Slurm", "make one with: sluice token create")
        if digest not in self._known:
            self.may_fail(address)  # what the daemon must look at is bounded; what was good is not locked out
        try:
            answer = await self.feed.ask("jwt", token=text)
        except SluiceError as error:
            if self.store.connected:
                raise
            raise ProblemError(
                503, "tokens of Slurm cannot be checked now", remedy="try again"
            ) from error  # none failed
        self._known[digest] = str(answer["user"]), min(now + _KEPT_S, float(answer["expires"]))
        while len(self._known) > _MOST_KEPT:
            self._known.popitem(last=False)
        return str(answer["user"])


def _refused(what: str, remedy: str) -> ProblemError:
    return ProblemError(401, what, remedy=remedy, headers={"www-authenticate": 'Bearer realm="sluice"'})
