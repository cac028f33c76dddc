"""Slurm's tokens (auth/jwt): JSON Web Tokens that are signed with HS256 by the cluster's key.

Whoever has the key can make a token of any user: only SlurmUser's processes read it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.base.errors import SluiceError

MOST = 8192
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,127}\$?\Z")
_LEAST_KEY = 16
_LEEWAY_S = 5.0


@dataclass(frozen=True, slots=True)
class Claims:
    """Who a token is, and until when."""

    user: str
    expires: float


def key_file(config: Mapping[str, str]) -> Path:
    """The key that slurm.conf names. Raises SluiceError where tokens are not set up."""
    types = config.get("AuthAltTypes", "")
    if "auth/jwt" not in types.split(",") and config.get("AuthType") != "auth/jwt":
        raise SluiceError("Slurm's tokens are not set up here", remedy="AuthAltTypes=auth/jwt in slurm.conf")
    for word in config.get("AuthAltParameters", "").split(","):
        name, _, value = word.partition("=")
        if name.strip() == "jwt_key" and value.startswith("/"):
            return Path(value)
    return Path(config.get("StateSaveLocation", "")) / "jwt_hs256.key"


def verify(token: str, key: bytes, now: float) -> Claims:
    """The claims of a token whose signature and time hold. Raises SluiceError."""
    remedy = "get one with: scontrol token"
    if len(token) > MOST:
        raise SluiceError(f"token: longer than {MOST} characters", remedy=remedy)
    if len(key) < _LEAST_KEY:
        raise SluiceError(f"Slurm's key for tokens: shorter than {_LEAST_KEY} bytes", remedy="make another")
    try:
        head, body, signature = token.split(".")
        signed = hmac.new(key, f"{head}.{body}".encode("ascii"), hashlib.sha256).digest()
        if not hmac.compare_digest(signed, _decode(signature)):
            raise SluiceError("token: its signature is not of this cluster's key", remedy=remedy)
        header, claims = _object(head), _object(body)
    except (ValueError, binascii.Error, RecursionError) as error:
        raise SluiceError("token: not a JSON Web Token", remedy=remedy) from error
    if header.get("alg") != "HS256":
        raise SluiceError(f"token: signed by {str(header.get('alg'))[:20]!r}, not HS256", remedy=remedy)
    expires, begins = _time(claims.get("exp")), _time(claims.get("nbf", claims.get("iat", 0)))
    user = claims.get("sun", claims.get("username"))
    if expires is None or begins is None or not isinstance(user, str) or not _USER.match(user):
        raise SluiceError("token: without a user (sun) or an end (exp)", remedy=remedy)
    if not begins - _LEEWAY_S <= now < expires:
        raise SluiceError("token: it is over, or does not hold yet", remedy=remedy)
    return Claims(user, expires)


def _decode(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)


def _object(text: str) -> dict[str, Any]:
    found = json.loads(_decode(text))
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def _time(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        return None
    return float(value)
