"""What `sluice replicad` asks of root's helper, `sluice actd`: to launch and to end a replica of a service.

One line, and one line as answer (`sluice.exchange.acts.parse_answer`). It says which service and which launch, and
whether it is launched on lent resources, and no more: all else of the job comes from the policy that root applied. The
same launch asked twice is one job.
"""

from __future__ import annotations

import json
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from sluice.exchange.acts import ActError, parse_answer

VERSION = 2
MOST_REQUEST = 512
"""Bytes of a request; a longer one is refused."""
Do = Literal["launch_replica", "end_replica"]
_FIELDS = ("do", "service", "launch", "lent")
_SERVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
_LAUNCH = re.compile(r"[0-9a-f]{16}\Z")


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """One request."""

    do: Do
    service: str
    launch: str
    lent: bool = False
    """Launch it as over-quota work, where the service borrows."""


def render_launch(request: LaunchRequest) -> bytes:
    """Its line."""
    words = {"do": request.do, "service": request.service, "launch": request.launch, "lent": request.lent}
    return json.dumps({"version": VERSION, **words}, separators=(",", ":")).encode() + b"\n"


def parse_launch(line: bytes) -> LaunchRequest:
    """A request. Raises ActError 400."""
    bad = ActError(400, f"not a request of version {VERSION}", remedy="install one version of Sluice, restart both")
    try:
        one = json.loads(line[:MOST_REQUEST])
    except (ValueError, RecursionError) as error:
        raise bad from error
    if not isinstance(one, dict) or set(one) != {"version", *_FIELDS} or one["version"] != VERSION:
        raise bad
    if one["do"] not in get_args(Do):
        raise ActError(400, f"{one['do']!r:.80}: not known", remedy="install one version of Sluice, restart both")
    if not isinstance(one["service"], str) or not _SERVICE.match(one["service"]):
        raise ActError(400, f"service {one['service']!r:.80}: not a service's name", remedy="see: sluice serve list")
    if not isinstance(one["launch"], str) or not _LAUNCH.match(one["launch"]):
        raise ActError(400, f"launch {one['launch']!r:.80}: not 16 hexadecimal digits", remedy="choose another")
    if type(one["lent"]) is not bool:
        raise ActError(400, f"lent {one['lent']!r:.80}: not true or false", remedy="install one version of Sluice")
    return LaunchRequest(one["do"], one["service"], one["launch"], one["lent"])


def ask_actd(path: Path, request: LaunchRequest, *, timeout: float = 60.0) -> dict[str, Any]:
    """Ask the helper at a socket. Raises ActError: 503 where it is not known what was done."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(str(path))
            connection.sendall(render_launch(request))
            with connection.makefile("rb") as answers:
                return parse_answer(answers.readline())
    except OSError as error:
        remedy = "is sluice-actd running on this host, and is this the user of its --serve-user?"
        raise ActError(503, f"{path}: {error.strerror or error}", remedy=remedy, retry_after=1) from error
