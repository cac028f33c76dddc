"""Where nodes send the records of jobs: a service of `sluice controllerd` on the leading controller.

A request is a JSON object (`sluice.slurm.munge_service`). MUNGE identifies the caller; root of a node is trusted, as
everywhere in Slurm. Users may ask what their own running jobs use; all else that they send is not answered.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Iterable
from typing import Any

from sluice.base.errors import SluiceError
from sluice.base.rates import FewLines
from sluice.base.text import one_line
from sluice.exchange.courier import MAX_REQUEST, VERSION
from sluice.slurm.munge import Message
from sluice.slurm.munge_service import RefusedError, Service

_REQUEST_S = 10.0

Handler = Callable[[dict[str, Any]], dict[str, Any]]
AskedHandler = Callable[[dict[str, Any], int], dict[str, Any]]
"""A handler of a request that any user may make; gets the user's uid."""

log = logging.getLogger("sluice.inbox")
log.addFilter(FewLines())


class Inbox:
    """What answers requests, by their ``do``: those of root and SlurmUser (`trusted`: uids), and those of any user."""

    def __init__(
        self, handlers: dict[str, Handler], trusted: Iterable[int], asked: dict[str, AskedHandler] | None = None
    ) -> None:
        self.handlers = handlers
        self.trusted = frozenset(trusted)
        self.asked = asked or {}

    def serve(self, sockets: list[socket.socket], goes_on: Callable[[], bool]) -> None:
        """Answer for as long as `goes_on` says, asked every half second; the sockets are closed then."""
        service = Service("inbox", self._reply, most=2 * MAX_REQUEST, seconds=_REQUEST_S, log=log, trusted=self.trusted)
        service.serve(sockets, goes_on)

    def _reply(self, message: Message) -> bytes:
        return json.dumps(self.answer(message.payload, message.uid)).encode()

    def answer(self, payload: bytes, uid: int = 0) -> dict[str, Any]:
        """The answer to what an authenticated user sent. Raises RefusedError for what that user may not send."""
        try:
            request = json.loads(payload)
            do = str(request.get("do")) if isinstance(request, dict) else ""
            asked = self.asked.get(do)
            if uid not in self.trusted and asked is None:
                raise RefusedError(f"uid {uid}: not root or SlurmUser")
            if not isinstance(request, dict) or request.get("version") != VERSION:
                raise SluiceError(
                    f"not a request of version {VERSION}", remedy="install one version of Sluice on node and controller"
                )
            if asked is not None:
                return {"version": VERSION, "ok": asked(request, uid)}
            handler = self.handlers.get(do)
            if handler is None:
                raise SluiceError(f"request {do[:40]!r}: not known")
            return {"version": VERSION, "ok": handler(request)}
        except RefusedError:
            raise
        except (ValueError, RecursionError):
            if uid not in self.trusted:
                raise RefusedError(f"uid {uid}: not a request") from None
            return {"version": VERSION, "error": "request: not JSON"}
        except (SluiceError, OSError) as error:
            log.error("%s", one_line(str(error)))
            return {"version": VERSION, "error": one_line(str(error))}
