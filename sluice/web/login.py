"""Who is calling: a token of Sluice, of Slurm, or of the site's identity provider, or the user that a proxy names.

What a browser sends by itself, its cookie, is one of these tokens. A proxy's word is no proof: such callers only read.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from starlette.datastructures import Headers
from starlette.requests import cookie_parser

from sluice.base import oidc
from sluice.base.errors import SluiceError
from sluice.base.networks import Network, client_of, within
from sluice.base.tokens import PREFIX, TokenStore
from sluice.exchange.acts import Proof, ProofKind
from sluice.web import session
from sluice.web.access import Viewer
from sluice.web.feed import Feed
from sluice.web.problems import ProblemError
from sluice.web.store import Store

_KEPT_S = 60.0  # so long is an answer about a token believed
_MOST_KEPT = 10_000
_MOST_TOKEN = oidc.MOST_TOKEN
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,127}\$?\Z")

_ALL = frozenset({"read", "write"})
_CHALLENGE = {"www-authenticate": 'Bearer realm="sluice"'}


@dataclass(frozen=True)
class Proxy:
    """A reverse proxy that has checked who calls: only what comes from its address is believed."""

    peers: Sequence[Network] = ()
    header: str = "x-remote-user"

    def is_peer(self, address: str) -> bool:
        """Whether a connection comes from it."""
        return within(address, self.peers)

    def client(self, address: str, forwarded: str) -> str:
        """The address of who calls: the last that the proxy added, where the connection is the proxy's."""
        return client_of(address, forwarded, self.peers)


class NobodyError(ProblemError):
    """No proof was sent, or one that has ended: a caller that does not guess."""

    def __init__(self, what: str) -> None:
        super().__init__(401, what, remedy="send a token: Authorization: Bearer TOKEN", headers=_CHALLENGE)


@dataclass
class Login:
    """Turns a request's headers into a viewer."""

    store: Store
    tokens: TokenStore
    feed: Feed
    proxy: Proxy = field(default_factory=Proxy)
    provider: oidc.Provider | None = None
    may_fail: Callable[[str], None] = lambda _: None
    """Raises ProblemError where too many log-ins from an address were refused."""
    _known: OrderedDict[bytes, tuple[str, float]] = field(default_factory=OrderedDict)
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def credentials(self) -> tuple[str, ...]:
        """The headers that say who calls."""
        proxy = [self.proxy.header.lower()] if self.proxy.peers else []
        return "authorization", "x-slurm-user-token", "cookie", *proxy

    async def viewer(self, headers: Headers, peer: str, address: str, secure: bool = False) -> Viewer:
        """The caller: the connection's `peer`, and the client's address; `secure`: its cookies are those of TLS.

        Raises ProblemError 401, 429, 503.
        """
        kind, _, text = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and text.strip():
            return await self.of_text(text.strip(), address)
        if "x-slurm-user-token" in headers:
            return await self.of_text(headers["x-slurm-user-token"], address)
        proof = session.proof_in(cookie_parser(headers.get("cookie", "")), secure=secure)
        named = self._named(headers, peer)
        if proof is not None:
            try:
                return replace(await self._of(proof, address), by_cookie=True)
            except ProblemError as error:
                if named is None or error.status != 401:
                    raise
        if named is None:
            raise NobodyError("no token")
        return Viewer(named, self.store)

    async def of_text(self, text: str, address: str) -> Viewer:
        """Who holds a token of any kind. Raises ProblemError 401, 429, 503."""
        return await self._of(Proof(self._kind(text), text), address)

    def may_write(self, headers: Headers, viewer: Viewer) -> None:
        """Whether a write was made on purpose by the caller: a cookie, which a browser adds by itself, is no purpose.

        Raises ProblemError 403.
        """
        if not viewer.by_cookie or viewer.proof is None:
            return
        if not session.is_csrf(headers.get(session.CSRF_HEADER, ""), viewer.proof):
            raise ProblemError(
                403, f"{session.CSRF_HEADER}: not of a page of this session", remedy="load the page again, then send it"
            )

    def _named(self, headers: Headers, peer: str) -> str | None:
        """The user that the proxy names; None where it names none."""
        names = headers.getlist(self.proxy.header)
        if not names or not self.proxy.is_peer(peer):
            return None
        named = ",".join(names)  # two are none: the proxy has left one that a client sent
        if not _USER.match(named):
            raise _refused(f"{self.proxy.header}: {named[:40]!r} is not a user's name", "correct the proxy")
        return named

    def _kind(self, text: str) -> ProofKind:
        """Which check it needs: that one decides."""
        if text.startswith(PREFIX):
            return "sluice"
        if self.provider is not None and oidc.issuer_of(text) == self.provider.settings.issuer:
            return "oidc"
        return "slurm"

    async def _of(self, proof: Proof, address: str) -> Viewer:
        if len(proof.text) > _MOST_TOKEN:
            raise _refused(f"token: longer than {_MOST_TOKEN} characters", "send a token of Sluice or Slurm")
        try:
            if proof.kind == "sluice":
                token = self.tokens.check(proof.text, "read", time.time())
                return Viewer(token.user, self.store, frozenset(token.scopes), proof)
            ask = self._of_slurm if proof.kind == "slurm" else self._of_provider
            return Viewer(await self._once(proof, address, ask), self.store, _ALL, proof)
        except ProblemError:
            raise
        except oidc.OverError as error:
            raise NobodyError(error.what) from error
        except oidc.ProviderError as error:
            raise ProblemError(503, error.what, remedy=error.remedy, headers={"retry-after": "30"}) from error
        except SluiceError as error:
            raise _refused(error.what, error.remedy) from error

    async def _once(self, proof: Proof, address: str, ask: Callable[[str], Awaitable[tuple[str, float]]]) -> str:
        """Whose it is, if that was not known a short time ago."""
        digest, now = hashlib.sha256(f"{proof.kind}:{proof.text}".encode()).digest(), time.time()
        user, until = self._known.get(digest, ("", 0.0))
        if now < until:
            return user
        if digest not in self._known:
            self.may_fail(address)  # what costs a check is bounded; what was good is not locked out
        user, expires = await ask(proof.text)
        self._known[digest] = user, min(now + _KEPT_S, expires)
        while len(self._known) > _MOST_KEPT:
            self._known.popitem(last=False)
        return user

    async def _of_slurm(self, text: str) -> tuple[str, float]:
        """The daemon checks it, which has the key."""
        if text.count(".") != 2:
            raise _refused("token: neither of Sluice nor of Slurm", "make one with: sluice token create")
        try:
            answer = await self.feed.ask("jwt", token=text)
        except SluiceError as error:
            if self.store.connected:
                raise
            raise ProblemError(
                503, "tokens of Slurm cannot be checked now", remedy="try again"
            ) from error  # none failed
        return str(answer["user"]), float(answer["expires"])

    async def _of_provider(self, text: str) -> tuple[str, float]:
        found = await self.identity(text)
        return found.user, found.expires

    async def identity(self, text: str) -> oidc.Identity:
        """What an identity token says. Raises SluiceError."""
        if self.provider is None:
            raise _refused("identity token: no provider is set up here", "log in with a token of Sluice or Slurm")
        if not self.provider.waits(text, time.time()):
            return oidc.verify_id_token(text, self.provider, time.time())
        async with self._asking:  # one thread waits for the provider, not one for each who waits
            return await asyncio.to_thread(oidc.verify_id_token, text, self.provider, time.time())


def _refused(what: str, remedy: str) -> ProblemError:
    return ProblemError(401, what, remedy=remedy, headers=_CHALLENGE)
