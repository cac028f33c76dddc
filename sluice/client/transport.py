"""What both clients do with a call: token, retries, errors. It says what to send and how long to wait; they do it.

A call is tried again only where that is safe: reads, and writes with a key by which the server does them once.
"""

from __future__ import annotations

import email.utils
import ipaddress
import os
import secrets
import ssl
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import quote, urlsplit

from pydantic import BaseModel, ValidationError

from sluice.base.errors import SluiceError, UsageError
from sluice.base.private import read_private
from sluice.base.text import one_line
from sluice.client import models

if TYPE_CHECKING:
    import httpx

PREFIX = "/api/v1"
DEFAULT_URL = "http://127.0.0.1:6823"
TOKEN_FILE = "~/.config/sluice/token"  # noqa: S105 - a file's name
LONGEST_PAUSE_S = 60.0
"""A server that wants a longer pause is not waited for."""
_MOST_TOKEN = 8192
_FIRST_PAUSE_S = 0.5
_CONNECT_S = 10.0
_PROXY_ERRORS = (502, 504)  # of what is before the server
_MAY_PASS = (409, 429, 503)  # where the server says when: 409 of a write that is still being done

T = TypeVar("T", bound=BaseModel)


class ApiError(SluiceError):
    """A call that failed. `status`: HTTP's, 0: no answer; `where`: the call; `request_id`: by which its log has it."""

    def __init__(self, status: int, what: str, *, where: str, remedy: str = "", request_id: str = "") -> None:
        super().__init__(what, remedy=remedy, usage=400 <= status < 500)
        self.status = status
        self.where = where
        self.request_id = request_id

    def __str__(self) -> str:
        known = f" (request {self.request_id})" if self.request_id else ""
        return f"{self.where}: {super().__str__()}{known}"


@dataclass(frozen=True)
class Call(Generic[T]):
    """One call of the API, and the model of its answer."""

    model: type[T]
    method: str
    path: str
    names: Mapping[str, str | int] = field(default_factory=dict)
    """Of the path's parameters."""
    query: Mapping[str, str | int | float | date | None] = field(default_factory=dict)
    """What is None or empty is not sent."""
    body: Mapping[str, Any] | None = None
    key: str = ""
    """The write's key; empty: one is made."""

    @property
    def where(self) -> str:
        """Which call it is, for errors."""
        return f"{self.method} {PREFIX}{self._filled}"

    @property
    def _filled(self) -> str:
        """The path, with each name quoted: it is one part of it, whatever it is."""
        if bad := [name for name, value in self.names.items() if str(value) in ("", ".", "..")]:
            raise UsageError(f"{bad[0]} {str(self.names[bad[0]])!r}: not a name", remedy="give one")
        return self.path.format(**{name: quote(str(value), safe="") for name, value in self.names.items()})

    def request(
        self, http: httpx.Client | httpx.AsyncClient, headers: Mapping[str, str], **options: Any
    ) -> httpx.Request:
        """What to send."""
        query = {name: str(value) for name, value in self.query.items() if value not in (None, "")}
        body: dict[str, Any] = {} if self.body is None else {"json": _without_none(self.body)}
        return http.build_request(self.method, self._filled, params=query, headers=headers, **body, **options)


@dataclass(frozen=True)
class Connection:
    """Where the server is, as whom one calls it, and how patiently.

    `token`: else $SLUICE_TOKEN, else what is in `token_file`, which nobody else may read. `ca`: the certificates that
    are trusted instead of the host's. `timeout`: seconds for each attempt. `without_tls`: send the
    token unencrypted to other hosts, too.
    """

    url: str = ""
    token: str = field(default="", repr=False)
    token_file: str | Path = ""
    ca: str | Path | None = None
    timeout: float = 30.0
    without_tls: bool = False

    def options(self) -> dict[str, Any]:
        """How httpx is to be set up. Raises UsageError, SluiceError."""
        import_httpx()
        url = (self.url or os.environ.get("SLUICE_URL", "") or DEFAULT_URL).rstrip("/")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise UsageError(f"url {url[:200]!r}: not an address of a server", remedy="write https://HOST:PORT")
        tls = parts.scheme == "https"
        if not tls and not self.without_tls and not _is_here(parts.hostname):
            raise UsageError(f"url {url[:200]!r}: the token could be read on the way", remedy="write https://")
        return {
            "base_url": url + PREFIX,
            "headers": {"authorization": f"Bearer {self._found_token()}", "accept": "application/json"},
            "timeout": self.timeout,
            "verify": ssl.create_default_context(cafile=self.ca) if tls else True,
            "trust_env": tls,  # a proxy of the environment gets no token that is not encrypted
            "follow_redirects": False,  # none gets the token
        }

    def _found_token(self) -> str:
        text = self.token or os.environ.get("SLUICE_TOKEN", "") or read_token(self.token_file)
        if not text.isascii() or not text.isprintable() or " " in text or len(text) > _MOST_TOKEN:
            raise UsageError("token: not one of Sluice or Slurm", remedy="make one with: sluice token create")
        return text


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.model_dump(mode="json", exclude_none=True) if isinstance(value, BaseModel) else value
        for name, value in values.items()
        if value is not None
    }


def import_httpx() -> None:
    """Raises SluiceError where it is not installed."""
    try:
        import httpx  # noqa: F401
    except ModuleNotFoundError as error:
        raise SluiceError("httpx: not installed", remedy="pip install 'sluice-slurm[client]'") from error


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_token(path: str | Path) -> str:
    """The token in a file that only its owner may read; `~/.config/sluice/token` where no file is named.
    Raises SluiceError."""
    file = Path(path or TOKEN_FILE).expanduser()
    try:
        return read_private(file, _MOST_TOKEN + 2).decode("ascii", "replace").strip()
    except FileNotFoundError as error:
        remedy = "name it by token, $SLUICE_TOKEN or token_file; make one with: sluice token create"
        raise SluiceError(f"no token, and {file}: {error.strerror}", remedy=remedy) from error


# ---- calls ----


def steps(
    call: Call[T], http: httpx.Client | httpx.AsyncClient, retries: int
) -> Generator[httpx.Request | float, Any, T]:
    """Makes a call: yields what to send or how long to wait, and gets answers or httpx's errors. Raises ApiError."""
    key = {} if call.method == "GET" else {"idempotency-key": call.key or secrets.token_hex(16)}
    for attempt in range(retries + 1):
        answer = yield call.request(http, key)
        error = None if isinstance(answer, Exception) else error_of(answer, call.where)
        if not isinstance(answer, Exception) and error is None:
            return _parse(call, answer)
        pause = pause_after(answer, attempt)
        if pause is None or attempt == retries:
            break
        yield pause
    if error is None:
        raise no_answer(answer, call.where) from answer
    raise error


def _parse(call: Call[T], answer: httpx.Response) -> T:
    if call.model is models.Text:
        return call.model.model_validate({"text": answer.text})
    try:
        return call.model.model_validate_json(answer.content or b"{}")
    except ValidationError as error:
        first = error.errors()[0]
        what = f"its answer is not a {call.model.__name__}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        remedy = "does the address have a Sluice of this version?"
        raise ApiError(answer.status_code, one_line(what, limit=400), where=call.where, remedy=remedy) from error


def no_answer(error: Exception, where: str) -> ApiError:
    """What httpx says when there was no answer."""
    said = one_line(str(error), limit=300) or type(error).__name__
    return ApiError(0, f"no answer: {said}", where=where, remedy="is this the address, and is sluice web running?")


def error_of(answer: httpx.Response, where: str) -> ApiError | None:
    """The error that an answer is, or None."""
    if answer.is_success:
        return None
    request_id = answer.headers.get("x-request-id", "")
    if answer.is_redirect:
        to = one_line(answer.headers.get("location", ""), limit=200)
        what = f"the server sends callers to {to!r}, where the token is not sent"
        return ApiError(answer.status_code, what, where=where, remedy="give that address", request_id=request_id)
    try:
        problem = models.Problem.model_validate_json(answer.content)
    except ValidationError:
        what = f"HTTP {answer.status_code} {one_line(answer.text, limit=200)}".rstrip()
        return ApiError(answer.status_code, what, where=where, remedy="is it a Sluice?", request_id=request_id)
    what, remedy = (one_line(text, limit=1000) for text in (problem.detail, problem.remedy))
    return ApiError(answer.status_code, what, where=where, remedy=remedy, request_id=problem.request_id or request_id)


def pause_after(answer: httpx.Response | Exception, attempt: int) -> float | None:
    """How long to wait before the next attempt; None: there is none."""
    usual = (
        _FIRST_PAUSE_S * float(1 << attempt) * (1 + secrets.randbelow(1000) / 2000)
    )  # clients do not come back all at once
    if isinstance(answer, Exception):
        return usual
    wanted = _retry_after(answer.headers.get("retry-after", ""))
    if answer.status_code in _PROXY_ERRORS or (answer.status_code in _MAY_PASS and wanted is not None):
        longer = max(usual, wanted or 0.0)
        return longer if longer <= LONGEST_PAUSE_S else None
    return None


def _retry_after(text: str) -> float | None:
    """Seconds; None where the server does not say."""
    if text.isdecimal():
        return float(text[:10])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None
