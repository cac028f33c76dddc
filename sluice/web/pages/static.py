"""Style, scripts and pictures. Browsers keep them for ever, as a changed file has another address."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from sluice.web.problems import not_found

FOLDER = Path(__file__).parents[1] / "static"
PREFIX = "/static"
_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}


@dataclass(frozen=True)
class Asset:
    """One file."""

    address: str
    kind: str
    plain: bytes
    packed: bytes


@cache
def assets() -> dict[str, Asset]:
    """All of them by name, as ``vendor/htmx.min.js``."""
    found = {}
    for path in sorted(FOLDER.rglob("*")):
        if path.suffix in _TYPES:
            name, plain = path.relative_to(FOLDER).as_posix(), path.read_bytes()
            digest = hashlib.sha256(plain).hexdigest()[:12]
            address = f"{PREFIX}/{digest}/{name}"
            found[name] = Asset(address, _TYPES[path.suffix], plain, gzip.compress(plain, 9, mtime=0))
    return found


def address(name: str) -> str:
    """Where a browser gets a file."""
    return assets()[name].address


def serve(request: Request) -> Response:
    """One file."""
    asset = assets().get(request.path_params["name"])
    if asset is None or request.url.path != asset.address:
        raise not_found(request.url.path[:200])
    headers = {"cache-control": "public, max-age=31536000, immutable", "vary": "accept-encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(asset.packed, headers={**headers, "content-encoding": "gzip"}, media_type=asset.kind)
    return Response(asset.plain, headers=headers, media_type=asset.kind)
