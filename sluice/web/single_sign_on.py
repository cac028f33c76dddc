"""Log-in at the site's provider: OpenID Connect's code flow with PKCE.

What is needed when the browser is back is in a short-lived cookie of each log-in, so that this process keeps nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import time
from base64 import b64encode, urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from urllib.parse import quote, quote_plus, urlencode

from sluice.base import oidc
from sluice.base.errors import SluiceError
from sluice.exchange.acts import Proof
from sluice.web.login import Login
from sluice.web.problems import ProblemError

LASTS_S = 600
_COOKIE = "sluice-login-"
_MOST_BEGUN = 8  # log-ins of one browser, in several tabs
_MOST_NEXT = 512
_AT_A_TIME = 4
_MOST_WAITING = 64
_NOT_SILENT = frozenset(
    {"login_required", "interaction_required", "consent_required", "account_selection_required"}
)  # OpenID Connect Core 1.0, 3.1.2.6


class AskError(SluiceError):
    """A silent log-in is not possible: the user has to be asked."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A log-in until the browser is back."""

    state: str
    nonce: str
    verifier: str
    next: str
    silent: bool

    @property
    def name(self) -> str:
        """Of its cookie, without the prefix."""
        return _COOKIE + self.state[:12]

    def cookie(self, *, secure: bool) -> str:
        """Its Set-Cookie header."""
        return _cookie(
            _prefix(secure) + self.name, urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode(), secure
        )


class SingleSignOn:
    """Log-ins at the provider that `login` knows."""

    def __init__(self, login: Login) -> None:
        self.login = login
        self._turns = asyncio.Semaphore(_AT_A_TIME)
        self._waiting = 0

    @property
    def provider(self) -> oidc.Provider:
        """The provider. Raises ProblemError where none is set up."""
        if self.login.provider is None:
            raise ProblemError(404, "no identity provider is set up here", remedy="log in with a token")
        return self.login.provider

    async def endpoints(self) -> oidc.Endpoints:
        """The provider's. Raises ProviderError."""
        if self.provider.found is not None:
            return self.provider.found
        async with self._turns:
            return await asyncio.to_thread(self.provider.endpoints, time.time())

    async def begin(
        self, where: str, cookies: Mapping[str, str], *, silent: bool, secure: bool
    ) -> tuple[str, list[str]]:
        """Where to send the browser, and its Set-Cookie headers. Raises ProviderError."""
        settings = self.provider.settings
        endpoints = await self.endpoints()
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        begun = Begun(state, nonce, verifier, where if len(where) <= _MOST_NEXT else "/", silent)
        asked = {
            "response_type": "code", "client_id": settings.client_id, "redirect_uri": settings.redirect_uri,
            "scope": " ".join(settings.scopes), "state": begun.state, "nonce": begun.nonce,
            "code_challenge": _challenge(begun.verifier), "code_challenge_method": "S256",
            **({"prompt": "none"} if silent else {}),
        }  # fmt: skip
        older = [name for name in cookies if name.startswith(_prefix(secure) + _COOKIE)]
        gone = [_cookie(name, "", secure) for name in older] if len(older) >= _MOST_BEGUN else []
        joint = "&" if "?" in endpoints.authorization else "?"
        return f"{endpoints.authorization}{joint}{urlencode(asked)}", [*gone, begun.cookie(secure=secure)]

    def begun(self, state: str, cookies: Mapping[str, str], *, secure: bool) -> Begun:
        """The log-in that a browser comes back from. Raises ProblemError for one that it did not begin."""
        try:
            found = Begun(**json.loads(urlsafe_b64decode(cookies[f"{_prefix(secure)}{_COOKIE}{state[:12]}"])))
            if not hmac.compare_digest(found.state.encode(), state.encode()) or not state:
                raise ValueError("another one")
            if not all(isinstance(one, str) for one in (found.nonce, found.verifier, found.next)):
                raise TypeError("not one of ours")
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ProblemError(
                400, "this log-in was not begun in this browser, or was too long ago", remedy="log in again"
            ) from error
        return found

    @staticmethod
    def forget(begun: Begun, *, secure: bool) -> str:
        """The Set-Cookie header after it."""
        return _cookie(_prefix(secure) + begun.name, "", secure)

    async def finish(self, begun: Begun, said: Mapping[str, str]) -> Proof:
        """What the provider gives for its code. Raises AskError, ProblemError, SluiceError."""
        settings = self.provider.settings
        if said.get("iss", settings.issuer) != settings.issuer:
            raise ProblemError(400, "an answer of another provider", remedy="log in again")
        if "error" in said:
            wrong = said.get("error_description") or said["error"]
            if begun.silent and said["error"] in _NOT_SILENT:
                raise AskError(f"{settings.name}: {wrong[:200]}")
            raise ProblemError(403, f"{settings.name}: {wrong[:200]}", remedy="log in again, or with a token")
        text = await self._token(said.get("code", ""), begun.verifier)
        identity = await self.login.identity(text)
        if identity.nonce is None or not hmac.compare_digest(identity.nonce.encode(), begun.nonce.encode()):
            raise ProblemError(401, "identity token: of another log-in", remedy="log in again")
        return Proof("oidc", text)

    def end_url(self) -> str | None:
        """Where a user can log out of the provider, too; None where it has no such page."""
        found = self.provider.found
        if found is None or found.end_session is None:
            return None
        settings = self.provider.settings
        back = settings.redirect_uri.removesuffix(oidc.CALLBACK) + "/login"
        joint = "&" if "?" in found.end_session else "?"
        asked = {"client_id": settings.client_id, "post_logout_redirect_uri": back}
        return f"{found.end_session}{joint}{urlencode(asked)}"

    async def _token(self, code: str, verifier: str) -> str:
        """The identity token for a code. Raises ProblemError, ProviderError."""
        if not code or len(code) > 4096:
            raise ProblemError(400, "an answer without a code", remedy="log in again")
        if self._waiting >= _MOST_WAITING:
            raise ProblemError(
                503, "too many log-ins wait for the provider", remedy="try again", headers={"retry-after": "10"}
            )
        self._waiting += 1
        try:
            async with self._turns:
                return await asyncio.to_thread(self._exchange, code, verifier)
        finally:
            self._waiting -= 1

    def _exchange(self, code: str, verifier: str) -> str:
        settings, endpoints = self.provider.settings, self.provider.endpoints(time.time())
        form = {
            "grant_type": "authorization_code", "code": code, "redirect_uri": settings.redirect_uri,
            "code_verifier": verifier,
        }  # fmt: skip
        headers = {}
        secret = self._secret()
        if secret is not None and endpoints.basic:
            pair = f"{quote_plus(settings.client_id)}:{quote_plus(secret)}"
            headers["authorization"] = f"Basic {b64encode(pair.encode()).decode()}"
        else:
            form["client_id"] = settings.client_id
            if secret is not None:
                form["client_secret"] = secret
        status, found = oidc.fetch(endpoints.token, form, headers)
        text = found.get("id_token")
        if status != 200 or not isinstance(text, str):
            said = str(found.get("error_description") or found.get("error") or f"status {status}")[:200]
            raise ProblemError(401, f"{settings.name}: {said!r}", remedy="log in again, or with a token")
        return text

    def _secret(self) -> str | None:
        path = self.provider.settings.client_secret_file
        if path is None:
            return None
        try:
            with path.open(encoding="utf-8") as file:
                return file.read(4096).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise oidc.ProviderError(f"{path}: cannot be read", remedy="let sluice-web read it") from error


def _challenge(verifier: str) -> str:
    return urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).decode().rstrip("=")


def _prefix(secure: bool) -> str:
    return "__Host-" if secure else ""


def _cookie(name: str, value: str, secure: bool) -> str:
    age = LASTS_S if value else 0
    return (
        f"{name}={quote(value, safe='=')}; Path=/; Max-Age={age}; HttpOnly; SameSite=Lax{'; Secure' if secure else ''}"
    )
