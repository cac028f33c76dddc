"""Tokens that Sluice gives out itself: `sluice token create`. One store for every service that takes them.

The store is one file of JSON. A token is ``sluice_ID_SECRET``; the file has the SHA-256 of the secret, which is 256
random bits, so that whoever reads the file cannot use a token. Every use looks at the file, so that a token that was
revoked is refused at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from sluice.base.errors import SluiceError, UsageError
from sluice.base.files import write_atomic

DEFAULT_FILE = Path("/etc/sluice/tokens.json")
VERSION = 1
SCOPES = ("read", "write", "serve")
"""What a token may be for. A service adds its own here."""
PREFIX = "sluice_"
MOST_TOKENS = 100_000
MOST_OVERLAP_S = 31 * 86_400
"""Time that an old secret may hold on after its rotation."""
_MOST_S = 10 * 366 * 86_400
_MOST_BYTES = 64 << 20
_TOKEN = re.compile(r"sluice_([0-9a-f]{16})_([A-Za-z0-9_-]{43})\Z")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,127}\$?\Z")


class ScopeError(SluiceError):
    """A token that holds, and is not for this."""


@dataclass(frozen=True, slots=True)
class Token:
    """What is known of a token; times are seconds since 1970."""

    id: str
    user: str
    scopes: tuple[str, ...]
    created: float
    expires: float
    digest: str  # SHA-256 of the secret, in hexadecimal
    comment: str = ""
    old_digest: str = ""  # of the secret before the last rotation
    old_until: float = 0.0  # when that one ends


NO_STORE: Final[Mapping[str, Token]] = MappingProxyType({})
"""Where there is no file, which is not a file without tokens."""


class TokenStore:
    """The file. Readers keep what they read until it is replaced."""

    def __init__(self, path: Path = DEFAULT_FILE) -> None:
        self.path = path
        self._stamp: tuple[int, int, int] | None = None
        self._tokens: dict[str, Token] = {}

    def tokens(self) -> Mapping[str, Token]:
        """All of them, by their ids; NO_STORE where there is no file. Raises SluiceError where it cannot be used."""
        try:
            facts = self.path.stat()
        except FileNotFoundError:
            return NO_STORE
        except OSError as error:
            raise SluiceError(f"{self.path}: {error.strerror}", remedy="see: sluice token --help") from error
        stamp = facts.st_ino, facts.st_mtime_ns, facts.st_size
        if stamp != self._stamp:
            self._tokens = self._read()
            self._stamp = stamp
        return self._tokens

    def check(self, text: str, scope: str, now: float) -> Token:
        """The token that a client sent, if it holds now and is for `scope`. Raises SluiceError, ScopeError."""
        match = _TOKEN.match(text)
        known = self.tokens().get(match[1]) if match else None
        digest = hashlib.sha256(match[2].encode() if match else b"").hexdigest()
        if known is None or not _holds(known, digest, now):
            raise SluiceError("token: not known, over, or revoked", remedy="get another: sluice token create")
        if scope not in known.scopes:
            raise ScopeError(
                f"token {known.id}: not for {scope!r}", remedy=f"its scopes are {', '.join(known.scopes) or 'none'}"
            )
        return known

    def create(
        self, user: str, scopes: Iterable[str], *, now: float, seconds: float, comment: str = ""
    ) -> tuple[Token, str]:
        """Add a token; it and its text, which is nowhere else. Raises UsageError, SluiceError, OSError."""
        wanted = tuple(dict.fromkeys(scopes))
        for scope in wanted:
            if scope not in SCOPES:
                raise UsageError(f"scope {scope!r}: not known", remedy=f"use {', '.join(SCOPES)}")
        if not _USER.match(user):
            raise UsageError(f"user {user!r}: not a user's name", remedy="name a user of Slurm")
        if not wanted or not 0 < seconds <= _MOST_S:
            raise UsageError("a token needs a scope, and an end within ten years", remedy="--scope read --for 30d")
        secret = secrets.token_urlsafe(32)
        made = Token(
            secrets.token_hex(8), user, wanted, now, now + seconds, hashlib.sha256(secret.encode()).hexdigest(), comment
        )
        with self._locked():
            kept = [one for one in self.tokens().values() if one.expires > now]
            if len(kept) >= MOST_TOKENS:
                raise SluiceError(f"{self.path}: has {MOST_TOKENS} tokens", remedy="revoke some: sluice token revoke")
            self._write([*kept, made])
        return made, f"{PREFIX}{made.id}_{secret}"

    def rotate(self, name: str, *, now: float, old_for: float, seconds: float | None = None) -> tuple[Token, str]:
        """Give a token a new secret; it and its text, which is nowhere else.

        The secret before this one holds for `old_for` more seconds, one before that no longer. `seconds`: how long the
        token holds from now on; None: its end stays. Raises UsageError, SluiceError, OSError.
        """
        if not 0 <= old_for <= MOST_OVERLAP_S:
            raise UsageError(
                f"{old_for:g} s for the old secret: more than {MOST_OVERLAP_S // 86_400} days", remedy="use less"
            )
        if seconds is not None and not 0 < seconds <= _MOST_S:
            raise UsageError("a token needs an end within ten years", remedy="--for 30d")
        secret = secrets.token_urlsafe(32)
        with self._locked():
            known = dict(self.tokens())
            before = known.get(name)
            if before is None or before.expires <= now:
                raise UsageError(f"token {name!r}: not known, or over", remedy="see: sluice token list")
            made = replace(
                before,
                digest=hashlib.sha256(secret.encode()).hexdigest(),
                expires=before.expires if seconds is None else now + seconds,
                old_digest=before.digest if old_for else "",
                old_until=now + old_for if old_for else 0.0,
            )
            known[name] = made
            self._write(known.values())
        return made, f"{PREFIX}{made.id}_{secret}"

    def revoke(self, ids: Iterable[str]) -> list[Token]:
        """Remove tokens; those that were there. Raises UsageError where one is not, and removes none then."""
        with self._locked():
            known = dict(self.tokens())
            wanted = list(dict.fromkeys(ids))
            for one in wanted:
                if one not in known:
                    raise UsageError(f"token {one!r}: not known", remedy="see: sluice token list")
            removed = [known.pop(one) for one in wanted]
            self._write(known.values())
        return removed

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One writer at a time. With a file that others cannot open: who holds its lock could prevent revoking."""
        path = self.path.with_name(f".{self.path.name}.lock")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SluiceError(f"{path}: {error.strerror}", remedy="run it as root") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _write(self, tokens: Iterable[Token]) -> None:
        """Keeps the file's group, through which a service may read it."""
        document = {"version": VERSION, "tokens": [asdict(one) for one in tokens]}
        try:
            facts: os.stat_result | None = self.path.stat()
        except FileNotFoundError:
            facts = None
        mode = 0o640 if facts is None else facts.st_mode & 0o640
        write_atomic(self.path, json.dumps(document) + "\n", mode=mode, follow_links=False, like=facts)

    def _read(self) -> dict[str, Token]:
        remedy = "restore it, or remove it and make new tokens"
        try:
            with self.path.open("rb") as file:
                document = json.loads(file.read(_MOST_BYTES))
            if document["version"] != VERSION:
                raise SluiceError(f"{self.path}: of another version", remedy=remedy)
            return {one["id"]: _token(one) for one in document["tokens"]}
        except OSError as error:
            raise SluiceError(f"{self.path}: {error.strerror}", remedy="run it as root or the web user") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SluiceError(f"{self.path}: damaged: {error!r:.200}", remedy=remedy) from error


def _holds(known: Token, digest: str, now: float) -> bool:
    """Whether a secret's digest is that of the token, or of the one before it in its last time. In constant time."""
    new = hmac.compare_digest(digest, known.digest)
    old = hmac.compare_digest(digest, known.old_digest) and now < known.old_until
    return (new or old) and now < known.expires


def _token(one: Mapping[str, Any]) -> Token:
    texts = [str(one[name]) for name in ("id", "user", "digest")]
    scopes = tuple(str(scope) for scope in one["scopes"])
    return Token(
        texts[0], texts[1], scopes, float(one["created"]), float(one["expires"]), texts[2], str(one["comment"]),
        str(one.get("old_digest", "")), float(one.get("old_until", 0.0)),
    )  # fmt: skip
