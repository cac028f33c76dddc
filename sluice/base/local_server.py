"""A line server on a local socket for few users: the kernel says whose each connection is."""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from sluice.base.errors import SluiceError
from sluice.base.line_server import Answer, Asker, Kind, LineServer, Listener
from sluice.base.rates import FewLines

_CRED = struct.Struct("3i")

log = logging.getLogger("sluice.local_server")
log.addFilter(FewLines())


def serve_local(
    path: Path,
    answer: Answer,
    kinds: Sequence[Kind],
    kind_of: Callable[[int], Kind | None],
    stopping: threading.Event,
    *,
    remedy: str,
) -> None:
    """Answer until `stopping`. `kind_of`: the kind of a uid's connections; None: they are closed without an answer.

    `remedy` is that of a missing folder. Raises SluiceError, OSError.
    """
    listening = _listen(path, remedy)

    def greet(connection: socket.socket, address: object) -> Asker:
        del address
        _, uid, _ = _CRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CRED.size))
        kind = kind_of(uid)
        if kind is None:
            log.warning("%s: uid %d: refused", path, uid)
            raise PermissionError
        return Asker(kind, (uid,), uid)

    lines = LineServer(tuple(kinds), answer)
    lines.listen(Listener(listening, greet))

    def watch() -> None:
        stopping.wait()
        lines.wake()

    threading.Thread(target=watch, daemon=True).start()
    try:
        lines.serve(lambda: not stopping.is_set())
    finally:
        with suppress(FileNotFoundError):
            path.unlink()


def _listen(path: Path, remedy: str) -> socket.socket:
    """A socket that everybody may connect to, in place of what was at its path. It is there once it listens."""
    if not path.parent.is_dir():
        raise SluiceError(f"{path.parent}: not there", remedy=remedy)
    new = path.with_name(f".{path.name}")
    new.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listening.bind(str(new))
        new.chmod(0o666)
        listening.listen(64)
        new.replace(path)
    except BaseException:
        listening.close()
        raise
    return listening
