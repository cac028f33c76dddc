"""Who calls: a token of Sluice with the scope `serve`, an identity token of the site's provider, or a token of Slurm.

Answers are kept by the digest of what was sent, so that no key is in memory longer than its request. The store's file
is looked at several times a second: a key that was revoked is refused within that time.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from sluice.base import oidc
from sluice.base.errors import SluiceError
from sluice.base.networks import network_of
from sluice.base.rates import Budgets
from sluice.base.tokens import PREFIX, ScopeError, Token, TokenStore
from sluice.exchange.serving import SCOPE
from sluice.exchange.snapshot import AwayError, ask
from sluice.serve.gateway.bounds import FAILED_KEYS
from sluice.serve.gateway.refusals import RefusalError
from sluice.slurm import jwt

_KEPT_S: Final = 60.0  # an identity token's answer
_MOST_KEPT: Final = 20_000
_MOST_TEXT: Final = oidc.MOST_TOKEN
_MOST_WAIT: Final = 100  # for a check of an identity token, and as many of Slurm
_REMEDY: Final = "send the header `Authorization: Bearer KEY`; make a key with `sluice token create --scope serve`"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a key belongs to."""

    key: str
    """Its public part, as limits and records name it."""
    user: str
    expires: float


class Keys:
    """The check, of one worker. `slurm`: says whose a token of Slurm is, and until when; the key is another's."""

    def __init__(
        self,
        store: TokenStore,
        provider: oidc.Provider | None = None,
        slurm: Callable[[str], tuple[str, float]] | None = None,
    ) -> None:
        self._store = store
        self._provider = provider
        self._slurm = slurm
        self._tokens: Mapping[str, Token] | None = None
        self._known: OrderedDict[bytes, Caller] = OrderedDict()
        self._failed = Budgets(*FAILED_KEYS)
        self._asking = {"oidc": asyncio.Lock(), "slurm": asyncio.Lock()}
        self._waiting = Counter[str]()
        self._revoked: frozenset[str] = frozenset()
        self._silent = False

    def refresh(self) -> None:
        """Look whether the store has changed; what is known is forgotten then. Raises SluiceError."""
        tokens = self._store.tokens()
        if tokens is not self._tokens:
            self._tokens = tokens
            self._known.clear()
        self._failed.forget(time.monotonic())

    def revoked(self, digests: Iterable[str], *, silent: bool) -> None:
        """What was revoked on any host; `silent`: nothing was heard of the others for too long."""
        self._revoked, self._silent = frozenset(digests), silent
        self._known.clear()

    def check(self, authorization: bytes | None, address: str) -> Caller | str:
        """Who calls, or the token that `check_later` has to look at. Raises RefusalError."""
        if authorization is None or authorization[:7].lower() != b"bearer ":
            raise self._refused("no key", address)
        proof = authorization[7:].strip()
        digest = _digest(proof)
        known = self._known_one(digest)
        if known is not None:
            return known
        text = proof.decode("latin-1")
        if not text.startswith(PREFIX) and (self._is_identity(text) or self._may_be_slurms(text)):
            self._may_fail(address)
            return text
        return self._of_store(text, digest, address)

    def _known_one(self, digest: bytes) -> Caller | None:
        known = self._known.get(digest)
        return known if known is not None and time.time() < known.expires else None

    def _of_store(self, text: str, digest: bytes, address: str) -> Caller:
        self._may_fail(address)
        if self._silent:
            raise RefusalError(
                503, "whether keys were revoked is not known: no controller answers", remedy="ask another gateway",
                retry_after=5.0, close=True,
            )  # fmt: skip
        try:
            if self._revoked and hashlib.sha256(text.split("_", 2)[-1].encode()).hexdigest() in self._revoked:
                raise SluiceError("token: was revoked", remedy="get another")
            token = self._store.check(text, SCOPE, time.time())
        except ScopeError as error:
            raise RefusalError(403, error.what, remedy=error.remedy, code="insufficient_scope") from error
        except SluiceError as error:
            raise self._refused(error.what, address) from error
        return self._keep(digest, Caller(token.id, token.user, token.expires))

    def _is_identity(self, text: str) -> bool:
        provider = self._provider
        return provider is not None and len(text) <= _MOST_TEXT and oidc.issuer_of(text) == provider.settings.issuer

    def _may_be_slurms(self, text: str) -> bool:
        return self._slurm is not None and len(text) <= jwt.MOST and text.count(".") == 2

    async def check_later(self, text: str, address: str) -> Caller:
        """Who holds a token of the provider or of Slurm. Raises RefusalError."""
        kind, check = ("oidc", self._of_provider) if self._is_identity(text) else ("slurm", self._of_slurm)
        if self._waiting[kind] >= _MOST_WAIT:
            raise RefusalError(503, "too many tokens wait for a check", remedy="try again", retry_after=1.0, close=True)
        digest = _digest(text.encode("latin-1"))
        self._waiting[kind] += 1
        try:
            async with self._asking[kind]:
                known = self._known_one(digest)  # it was one of those before it
                if known is not None:
                    return known
                self._may_fail(address)  # those before it may have failed meanwhile
                user, expires = await asyncio.to_thread(check, text)
        except (oidc.ProviderError, AwayError) as error:
            raise RefusalError(503, error.what, remedy=error.remedy, retry_after=30.0, close=True) from error
        except SluiceError as error:
            raise self._refused(error.what, address) from error
        finally:
            self._waiting[kind] -= 1
        name = f"{kind}-{hashlib.sha256(user.encode()).hexdigest()[:16]}"
        return self._keep(digest, Caller(name, user, min(expires, time.time() + _KEPT_S)))

    def _of_provider(self, text: str) -> tuple[str, float]:
        provider = cast(oidc.Provider, self._provider)
        found = oidc.verify_id_token(text, provider, time.time())
        return found.user, found.expires

    def _of_slurm(self, text: str) -> tuple[str, float]:
        slurm = cast(Callable[[str], tuple[str, float]], self._slurm)
        return slurm(text)

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


def _digest(proof: bytes) -> bytes:
    """Not SHA-256: OpenSSL's way to it is longer than this one where neither is in the processor's caches."""
    return hashlib.blake2b(proof, digest_size=32).digest()


def ask_controllerd(socket: Path, token: str) -> tuple[str, float]:
    """Whose a token of Slurm is: the controllers' daemon of this host has the key. Raises SluiceError."""
    answer = ask(socket, "jwt", timeout=5.0, token=token)
    return str(answer["user"]), float(answer["expires"])
