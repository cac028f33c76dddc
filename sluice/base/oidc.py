"""Who is calling, by an identity token of an OpenID Connect provider: settings, keys, and the check of a token.

Used by every service that takes such a token, each for itself. Keys are kept, so that who has logged in is known while
the provider is away, and are read again where a token names one that is not known, seldom: callers choose that name.
Needs the optional package joserfc, but for the settings.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode, urlsplit

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from sluice.base.errors import SluiceError, UsageError

DEFAULT_FILE = Path("/etc/sluice/oidc.json")
CALLBACK = "/login/oidc/callback"
"""Where the provider sends a browser back to."""
MOST_TOKEN = 11_000
"""Characters of a token: what fits into a browser's cookies."""
LEEWAY_S = 60
"""By which the provider's clock may be ahead."""
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512")
_REMEDY = "see sluice-web(1), OPENID CONNECT"
_MOST_FILE = 64 << 10
_MOST_ANSWER = 256 << 10
_MOST_KEYS = 100
_LEAST_RSA = 2048
_STEP_S = 5.0  # each step of a connection
_ANSWER_S = 10.0  # the whole answer
_FRESH_S = 3600.0
_KEPT_S = 24 * 3600.0  # so long do keys hold that cannot be read again
_AGAIN_S = 30.0
_USER = re.compile(r"[a-z_][a-z0-9_.-]{0,31}\Z")
_DOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?\Z")
_NEVER = frozenset({"root", "slurm"})  # an account at a provider is not these
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

Text = Annotated[str, Field(min_length=1, max_length=1024)]


class ProviderError(SluiceError):
    """The provider does not answer, or not as one."""


class OverError(SluiceError):
    """A token that was good, and has ended."""


def checked_url(url: object, *, local: bool = True) -> str:
    """A URL that may be asked: https, or http of this host where `local`. Raises ValueError."""
    if not isinstance(url, str) or not url.isascii() or not url.isprintable() or " " in url or len(url) > 2048:
        raise ValueError(f"{url!r:.200} is not a URL")
    where = urlsplit(url)
    _ = where.port  # raises for what is no number
    if where.username is not None or where.fragment or not where.hostname:
        raise ValueError(f"{url!r:.200}: not a plain URL of a host")
    if where.scheme != "https" and not (local and where.scheme == "http" and where.hostname in _LOOPBACK):
        raise ValueError(f"{url!r:.200}: not https")
    return url


def _callback(url: str) -> str:
    if urlsplit(checked_url(url)).path != CALLBACK or "?" in url:
        raise ValueError(f"does not end in {CALLBACK}")
    return url


def _domain(text: str) -> str:
    if text and not _DOMAIN.match(text):
        raise ValueError("not a domain in lower case")
    return text


def _scopes(words: tuple[str, ...]) -> tuple[str, ...]:
    if "openid" not in words:
        raise ValueError("without openid there is no identity token")
    return words


class Settings(BaseModel, extra="forbid", frozen=True):
    """/etc/sluice/oidc.json."""

    issuer: Annotated[str, AfterValidator(checked_url)]
    """The provider, as it names itself in tokens."""
    client_id: Text
    redirect_uri: Annotated[str, AfterValidator(_callback)]
    client_secret_file: Path | None = None
    """Read by `sluice web` alone; none for a public client."""
    user_claim: Text = "preferred_username"
    domain: Annotated[str, AfterValidator(_domain)] = ""
    """Of alice@site.org, which is alice here. Users of others are refused, and so are names without one."""
    scopes: Annotated[tuple[Text, ...], AfterValidator(_scopes)] = ("openid", "profile")
    name: Text = "single sign-on"
    """What the log-in page calls the provider."""


def load_settings(path: Path = DEFAULT_FILE) -> Settings | None:
    """The settings; None where there is no file. Raises UsageError."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_FILE + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", remedy="let sluice-web read it") from error
    try:
        if len(data) > _MOST_FILE:
            raise ValueError(f"longer than {_MOST_FILE} bytes")
        return Settings.model_validate(json.loads(data, object_pairs_hook=_once))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(f"{path}: {place}: {first['msg'].removeprefix('Value error, ')}", remedy=_REMEDY) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a document of JSON: {error}", remedy=_REMEDY) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is given twice")
    return found


def fetch(
    url: str, form: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """Get a URL, or send a form to it: the status and the object of JSON. Follows nothing, waits at most some seconds.

    Raises ProviderError.
    """
    where = urlsplit(url)
    kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
    connection = kind(where.hostname or "", where.port, timeout=_STEP_S)
    target = (where.path or "/") + (f"?{where.query}" if where.query else "")
    sent = {"accept": "application/json", **(headers or {})}
    if form is not None:
        sent["content-type"] = "application/x-www-form-urlencoded"
    try:
        connection.connect()
        cut = threading.Timer(_ANSWER_S, _cut, [connection.sock])
        cut.daemon = True
        cut.start()
        try:
            connection.request(
                "GET" if form is None else "POST", target, None if form is None else urlencode(form), sent
            )
            answer = connection.getresponse()
            body = answer.read(_MOST_ANSWER + 1)
        finally:
            cut.cancel()
        if len(body) > _MOST_ANSWER:
            raise ValueError(f"more than {_MOST_ANSWER} bytes")
        document = json.loads(body)
        if not isinstance(document, dict):
            raise ValueError("not an object of JSON")
        return answer.status, document
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        said = str(error)[:200] or type(error).__name__
        raise ProviderError(f"{url}: {said}", remedy="try again later, or log in with a token") from error
    finally:
        connection.close()


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # TLS's own would wait


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Of the provider, from its discovery document."""

    authorization: str
    token: str
    keys: str
    end_session: str | None
    basic: bool
    """Whether a client shows its secret in a header, as all providers take unless they say otherwise."""


class Provider:
    """What is known of the provider. Thread-safe; where it must ask, its caller waits."""

    def __init__(self, settings: Settings, fetch: Callable[..., tuple[int, dict[str, Any]]] = fetch) -> None:
        self.settings = settings
        self.problem = ""
        """Why it could not be read the last time."""
        self.found: Endpoints | None = None
        """What it said of itself."""
        self._fetch = fetch
        self._lock = threading.Lock()
        self._keys: dict[str, Any] = {}
        self._read_at = self._tried_at = float("-inf")

    def endpoints(self, now: float) -> Endpoints:
        """Where to send a browser. Raises ProviderError."""
        self._refresh(now, needed=self.found is None)
        if self.found is None:
            raise self._away()
        return self.found

    def key(self, name: str, now: float) -> Any:
        """The key of that name. Raises SluiceError where there is none, ProviderError where that is not known."""
        known = self._keys.get(name) if self._holds(now) else None
        self._refresh(now, needed=known is None)
        if known is None and not self._holds(now):
            raise self._away()
        known = known or self._keys.get(name)
        if known is None:
            raise _refused("its key is not one of the provider's")
        return known

    def waits(self, text: str, now: float) -> bool:
        """Whether the check of a token has to wait for the provider."""
        with suppress(SluiceError):
            known = _key_name(_part(text, 0)) in self._keys and self._holds(now)
            return not known and self._may_ask(now)
        return False

    def _away(self) -> ProviderError:
        said = self.problem or "not read yet"
        return ProviderError(f"{self.settings.issuer}: {said}", remedy="try again, or log in with a token")

    def _holds(self, now: float) -> bool:
        return abs(now - self._read_at) < _KEPT_S

    def _may_ask(self, now: float) -> bool:
        return not abs(now - self._tried_at) < _AGAIN_S

    def _refresh(self, now: float, *, needed: bool) -> None:
        """Read the provider's keys: now where `needed`, else, where they are old, while this goes on."""
        if not self._may_ask(now):
            return
        if needed:
            with self._lock:
                if self._may_ask(now):
                    self._read(now)
        elif not abs(now - self._read_at) < _FRESH_S and self._lock.acquire(blocking=False):
            threading.Thread(target=self._read_and_release, args=[now], daemon=True).start()

    def _read_and_release(self, now: float) -> None:
        try:
            self._read(now)
        finally:
            self._lock.release()

    def _read(self, now: float) -> None:
        try:
            self.found = self._discover()
            self._keys = _keys_of(self._get(self.found.keys))
            self._read_at, self.problem = now, ""
        except SluiceError as error:
            self.problem = error.what
        self._tried_at = now  # after it: who comes meanwhile waits for its end

    def _discover(self) -> Endpoints:
        issuer = self.settings.issuer
        url = issuer.rstrip("/") + "/.well-known/openid-configuration"
        found = self._get(url)
        if found.get("issuer") != issuer:
            raise ProviderError(f"{url}: of issuer {found.get('issuer')!r:.200}", remedy="correct issuer in oidc.json")
        local = urlsplit(issuer).hostname in _LOOPBACK
        try:
            names = ("authorization_endpoint", "token_endpoint", "jwks_uri")
            authorization, token, keys = (checked_url(found.get(name), local=local) for name in names)
            end = found.get("end_session_endpoint")
            ending = None if end is None else checked_url(end, local=local)
            methods = found.get("token_endpoint_auth_methods_supported") or ["client_secret_basic"]
            return Endpoints(authorization, token, keys, ending, "client_secret_basic" in methods)
        except (ValueError, TypeError) as error:
            raise ProviderError(f"{url}: {error}", remedy="correct the provider") from error

    def _get(self, url: str) -> dict[str, Any]:
        status, found = self._fetch(url)
        if status != 200:
            raise ProviderError(f"{url}: status {status}", remedy="see the provider's log")
        return found


def _keys_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that may sign, by their names; one without a name is "" where it is the only one."""
    from joserfc.errors import JoseError
    from joserfc.jwk import ECKey, RSAKey

    rows = document.get("keys")
    if not isinstance(rows, list) or len(rows) > _MOST_KEYS:
        raise ProviderError("its keys are not a list of few", remedy="correct the provider")
    found: dict[str, Any] = {}
    for row in rows:
        if not isinstance(row, dict) or row.get("use", "sig") != "sig" or row.get("kty") not in ("RSA", "EC"):
            continue
        public = {name: row[name] for name in ("kty", "kid", "alg", "use", "n", "e", "crv", "x", "y") if name in row}
        with suppress(JoseError, ValueError, TypeError, KeyError, AttributeError):
            key: Any = (RSAKey if row["kty"] == "RSA" else ECKey).import_key(public)
            if row["kty"] == "EC" or key.public_key.key_size >= _LEAST_RSA:
                found[str(row.get("kid", ""))] = key
    if len(found) == 1:
        found[""] = next(iter(found.values()))
    return found


@dataclass(frozen=True, slots=True)
class Identity:
    """What a token says."""

    user: str
    expires: float
    nonce: str | None


def issuer_of(text: str) -> str | None:
    """Who says that it made a token, which is not checked: which check it needs. None for what is no token."""
    try:
        found = _part(text, 1).get("iss")
    except SluiceError:
        return None
    return found if isinstance(found, str) else None


def verify_id_token(text: str, provider: Provider, now: float) -> Identity:
    """Who holds an identity token, if it is of this provider, for this client, and holds now.

    Raises ProviderError where that cannot be known now, SluiceError for a token that is refused.
    """
    from joserfc import jws, jwt
    from joserfc.errors import JoseError

    if len(text) > MOST_TOKEN or not text.isascii():
        raise _refused("longer than is allowed")
    header = _part(text, 0)
    if header.get("alg") not in ALGORITHMS:
        raise _refused(f"alg {header.get('alg')!r:.40}: not one of {', '.join(ALGORITHMS)}")
    if header.get("typ", "JWT") not in ("JWT", "jwt"):
        raise _refused(f"typ {header['typ']!r:.40}: not an identity token")
    registry = jws.JWSRegistry(algorithms=list(ALGORITHMS), strict_check_header=False)
    registry.max_header_length = MOST_TOKEN
    key = provider.key(_key_name(header), now)
    try:
        claims = jwt.decode(text, key, algorithms=list(ALGORITHMS), registry=registry).claims
    except (JoseError, ValueError, TypeError, RecursionError) as error:
        raise _refused(f"not signed by the provider ({type(error).__name__})") from error
    _check_claims(claims, provider.settings, now)
    nonce = claims.get("nonce")
    return Identity(user_of(claims, provider.settings), float(claims["exp"]), nonce if isinstance(nonce, str) else None)


def _check_claims(claims: Mapping[str, Any], settings: Settings, now: float) -> None:
    if claims.get("iss") != settings.issuer:
        raise _refused("iss: of another provider")
    audience = claims.get("aud")
    audiences = [audience] if isinstance(audience, str) else audience
    if not isinstance(audiences, list) or settings.client_id not in audiences:
        raise _refused("aud: for another service")
    if ("azp" in claims or len(audiences) > 1) and claims.get("azp") != settings.client_id:
        raise _refused("azp: for another service")
    times = {name: claims[name] for name in ("exp", "iat", "nbf") if name in claims}
    for name in ("exp", "iat"):
        if name not in times:
            raise _refused(f"{name}: not there")
    if not all(type(value) in (int, float) and 0 <= value < 1e12 for value in times.values()):
        raise _refused("exp, iat, nbf: not times")
    if now >= times["exp"]:
        raise OverError("identity token: over", remedy="log in again")
    if max(times["iat"], times.get("nbf", 0)) > now + LEEWAY_S:
        raise _refused("iat, nbf: in the future; compare the clocks")
    if not isinstance(claims.get("sub"), str) or not claims["sub"]:
        raise _refused("sub: not there")


def user_of(claims: Mapping[str, Any], settings: Settings) -> str:
    """The user of Slurm that a token names. Raises SluiceError."""
    name = claims.get(settings.user_claim)
    if settings.user_claim == "email" and claims.get("email_verified") is not True:
        raise _refused("email: not verified by the provider")
    user = name if isinstance(name, str) else ""
    if settings.domain:
        user, at, domain = user.partition("@")
        if not at or domain.lower() != settings.domain:
            raise _refused(f"{settings.user_claim} {name!r:.80}: not of {settings.domain}")
    if not _USER.match(user) or user in _NEVER:
        raise _refused(f"{settings.user_claim} {name!r:.80}: not a user's name here")
    return user


def _part(text: str, number: int) -> dict[str, Any]:
    """The header or the claims, which are not checked."""
    from base64 import urlsafe_b64decode

    parts = text.split(".")
    if len(parts) != 3 or len(text) > MOST_TOKEN:
        raise _refused("not one")
    try:
        found = json.loads(urlsafe_b64decode(parts[number] + "=" * (-len(parts[number]) % 4)))
    except (ValueError, RecursionError) as error:
        raise _refused("not one") from error
    if not isinstance(found, dict):
        raise _refused("not one")
    return found


def _key_name(header: Mapping[str, Any]) -> str:
    name = header.get("kid", "")
    if not isinstance(name, str):
        raise _refused("kid: not a name")
    return name


def _refused(why: str) -> SluiceError:
    return SluiceError(f"identity token: {why}", remedy="log in again")
