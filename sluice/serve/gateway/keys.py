"""Who calls: a token of Sluice with the scope `serve`, or an identity token of the site's provider.

Answers are kept by the digest of what was sent, so that no key is in memory longer than its request. The store's file
is looked at several times a second: a key that was revoked is refused within that time.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from sluice.base import oidc
from sluice.base.errors import SluiceError
from sluice.base.networks import network_of
from sluice.base.rates import Budgets
from sluice.base.tokens import PREFIX, ScopeError, Token, TokenStore
from sluice.exchange.serving import SCOPE
from sluice.serve.gateway.bounds import FAILED_KEYS
from sluice.serve.gateway.refusals import RefusalError

_KEPT_S: Final = 60.0  # an identity token's answer
_MOST_KEPT: Final = 20_000
_MOST_TEXT: Final = oidc.MOST_TOKEN
_REMEDY: Final = "send the header `Authorization: Bearer KEY`; make a key with `sluice token create --scope serve`"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a key belongs to."""

    key: str
    """Its public part, as limits and records name it."""
    user: str
    expires: float


class Keys:
    """The check, of one worker."""

    def __init__(self, store: TokenStore, provider: oidc.Provider | None = None) -> None:
        self._store = store
        self._provider = provider
        self._tokens: dict[str, Token] | None = None
        self._known: OrderedDict[bytes, Caller] = OrderedDict()
        self._failed = Budgets(*FAILED_KEYS)
        self._asking = asyncio.Lock()

    def refresh(self) -> None:
        """Look whether the store has changed; what is known is forgotten then. Raises SluiceError."""
        tokens = self._store.tokens()
        if tokens is not self._tokens:
            self._tokens = tokens
            self._known.clear()
        self._failed.forget(time.monotonic())

    def check(self, authorization: bytes | None, address: str) -> Caller | str:
        """Who calls, or the identity token that `check_later` has to look at. Raises RefusalError."""
        if authorization is None or authorization[:7].lower() != b"bearer ":
            raise self._refused("no key", address)
        digest = hashlib.sha256(authorization).digest()
        known = self._known.get(digest)
        if known is not None and time.time() < known.expires:
            return known
        text = authorization[7:].strip().decode("latin-1")
        if not text.startswith(PREFIX) and self._is_identity(text):
            self._may_fail(address)
            return text
        return self._of_store(text, digest, address)

    def _of_store(self, text: str, digest: bytes, address: str) -> Caller:
        self._may_fail(address)
        try:
            token = self._store.check(text, SCOPE, time.time())
        except ScopeError as error:
            raise RefusalError(403, error.what, remedy=error.remedy, code="insufficient_scope") from error
        except SluiceError as error:
            raise self._refused(error.what, address) from error
        return self._keep(digest, Caller(token.id, token.user, token.expires))

    def _is_identity(self, text: str) -> bool:
        provider = self._provider
        return provider is not None and len(text) <= _MOST_TEXT and oidc.issuer_of(text) == provider.settings.issuer

    async def check_later(self, text: str, address: str) -> Caller:
        """Who holds an identity token. Raises RefusalError."""
        provider = self._provider
        if provider is None:
            raise self._refused("identity token: no provider is set up", address)
        try:
            async with self._asking:
                found = await asyncio.to_thread(oidc.verify_id_token, text, provider, time.time())
        except oidc.ProviderError as error:
            raise RefusalError(503, error.what, remedy=error.remedy, retry_after=30.0, close=True) from error
        except SluiceError as error:
            raise self._refused(error.what, address) from error
        name = "oidc-" + hashlib.sha256(found.user.encode()).hexdigest()[:16]
        digest = hashlib.sha256(b"Bearer " + text.encode()).digest()
        return self._keep(digest, Caller(name, found.user, min(found.expires, time.time() + _KEPT_S)))

    def _keep(self, digest: bytes, caller: Caller) -> Caller:
        self._known[digest] = caller
        while len(self._known) > _MOST_KEPT:
            self._known.popitem(last=False)
        return caller

    def _may_fail(self, address: str) -> None:
        wait = self._failed.wait(network_of(address), time.monotonic())
        if wait > 0:
            raise RefusalError(
                429, "too many requests with keys that are not known, from this address", remedy="correct the key",
                retry_after=wait, close=True,
            )  # fmt: skip

    def _refused(self, what: str, address: str) -> RefusalError:
        self._failed.take(network_of(address), time.monotonic())
        return RefusalError(401, what, remedy=_REMEDY, code="invalid_api_key", close=True)
