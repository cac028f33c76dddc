"""A browser's session: a cookie that is the caller's own proof, so that this process keeps no secret of anybody and a
restart ends nobody's session.

Over TLS its name begins with ``__Host-``: a browser takes such a cookie only from this host, for all paths, over TLS. A
form has, and a script sends, a value that only pages of this session have (CSRF); it is another one in each page, so
that compressed pages do not reveal it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from typing import get_args

from sluice.exchange.acts import Proof, ProofKind

COOKIE = "sluice"
CSRF_FIELD = "csrf"
CSRF_HEADER = "x-csrf-token"
LASTS_S = 12 * 3600
_PIECE = 3800  # browsers take 4096 bytes with the name and the attributes
_MOST_PIECES = 3
MOST_PROOF = _PIECE * _MOST_PIECES - 16
_NONCE = 16
_TEXT = re.compile(r"[A-Za-z0-9._~+/=-]+\Z")


def cookies(proof: Proof | None, *, secure: bool) -> list[str]:
    """Set-Cookie headers of a session that begins, or of one that ends. Raises ValueError for what does not fit."""
    text = "" if proof is None else f"{proof.kind}:{proof.text}"
    if proof is not None and (len(text) > MOST_PROOF or not _TEXT.match(proof.text)):
        raise ValueError("a proof that fits into no cookie")
    pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
    pieces += [""] * (_MOST_PIECES - len(pieces))
    return [_cookie(name, piece, secure) for name, piece in zip(_names(secure), pieces, strict=True)]


def _names(secure: bool) -> list[str]:
    prefix = "__Host-" if secure else ""
    return [prefix + COOKIE, *(f"{prefix}{COOKIE}{number}" for number in range(1, _MOST_PIECES))]


def _cookie(name: str, value: str, secure: bool) -> str:
    age = LASTS_S if value else 0
    return f"{name}={value}; Path=/; Max-Age={age}; HttpOnly; SameSite=Lax{'; Secure' if secure else ''}"


def proof_in(given: Mapping[str, str], *, secure: bool) -> Proof | None:
    """The proof in a request's cookies, or None."""
    kind, colon, text = "".join(given.get(name, "") for name in _names(secure)).partition(":")
    if not colon or not text or kind not in get_args(ProofKind):
        return None
    return Proof(kind, text)  # type: ignore[arg-type]


def csrf(proof: Proof) -> str:
    """A value for one page of a session."""
    nonce = secrets.token_bytes(_NONCE)
    return nonce.hex() + _signed(proof, nonce)


def is_csrf(text: str, proof: Proof) -> bool:
    """Whether a value is of a page of this session."""
    try:
        nonce = bytes.fromhex(text[: 2 * _NONCE])
    except ValueError:
        return False
    return hmac.compare_digest(text[2 * _NONCE :].encode(), _signed(proof, nonce).encode())


def _signed(proof: Proof, nonce: bytes) -> str:
    return hmac.new(proof.text.encode(), b"sluice csrf " + nonce, hashlib.sha256).hexdigest()
