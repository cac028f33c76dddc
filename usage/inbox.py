"""Where nodes send the records of jobs: a service of `sluice controllerd` on the leading controller.

A request is a JSON object (`slurm_client.munge_service`). munge says who asks; root of a node is believed, as
everywhere in Slurm. Users may ask what their own running jobs use; what else they send is not answered.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Iterable
from typing import Any

from prolog_epilog.courier import MAX_REQUEST, VERSION, port
from prolog_epilog.record import JobRecord
from sluice_base.errors import SluiceError
from sluice_base.text import one_line
from slurm_client.munge import Message
from slurm_client.munge_service import RefusedError, Service, listen
from slurm_plugin.explain_service import slurm_user
from usage.admin_comment import Comments
from usage.controllerd import Duty, Site
from usage.job_records import FOLDER, JobRecords, check_record
from usage.running import Running

_REQUEST_S = 10.0
_KEPT_S = 400 * 86400.0
_PRUNE_S = 86400.0

Handler = Callable[[dict[str, Any]], dict[str, Any]]
AskedHandler = Callable[[dict[str, Any], int], dict[str, Any]]
"""Of a request that any user may make; gets the user's uid."""
HANDLERS: dict[str, Callable[[Site], Handler]] = {}
"""Requests of other parts by their ``do``, put in when these are imported; made anew for each daemon."""

log = logging.getLogger("sluice.inbox")


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
        """The answer to what an authenticated user sent. Raises RefusedError for what is not that user's to send."""
        try:
            request = json.loads(payload)
            do = str(request.get("do")) if isinstance(request, dict) else ""
            asked = self.asked.get(do)
            if uid not in self.trusted and asked is None:
                raise RefusedError(f"uid {uid}: neither root nor SlurmUser")
            if not isinstance(request, dict) or request.get("version") != VERSION:
                raise SluiceError(
                    f"not a request of version {VERSION}", remedy="bring node and controller to one Sluice"
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
                raise RefusedError(f"uid {uid}: no request") from None
            return {"version": VERSION, "error": "request: not JSON"}
        except (SluiceError, OSError) as error:
            log.error("%s", one_line(str(error)))
            return {"version": VERSION, "error": one_line(str(error))}


def store_records(store: JobRecords, comments: Comments) -> Handler:
    """The handler of ``records``: store them all or none, then let Slurm's accounting know."""

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        given = request.get("records")
        if not isinstance(given, list):
            raise SluiceError("records: not a list")
        records = [JobRecord.from_json(json.dumps(one), "record") for one in given]
        for record in records:
            check_record(record)
        store.append(records)
        for record in records:
            comments.arrived(record)
        return {"stored": len(records)}

    return handle


def duties(site: Site) -> list[Duty]:
    """The service, the comments in Slurm's accounting, and the end of old records."""
    store = JobRecords(site.state_save / FOLDER)
    comments = Comments(store)
    running = Running()
    handlers: dict[str, Handler] = {"records": store_records(store, comments), "running": running.take}
    handlers |= {name: make(site) for name, make in HANDLERS.items()}

    def serve(site: Site) -> None:
        trusted = {0, slurm_user(site.config())}
        asked = {"ask-running": lambda request, uid: running.answer(request, None if uid in trusted else uid)}
        inbox = Inbox(handlers, trusted, asked)
        inbox.serve(listen((), port()), lambda: site.leads() and not site.stopping.is_set())

    def prune(site: Site) -> None:
        del site
        import time

        store.prune(time.time() - _KEPT_S)

    return [
        Duty("job-records", 2.0, serve, lasting=True),
        Duty("admin-comment", 2.0, comments.run),
        Duty("job-records-prune", _PRUNE_S, prune),
    ]
