"""Where nodes send the records of jobs that ended: a service of `sluice controllerd` on the leading controller.

One request a connection: a munge credential around a JSON object, ended by a newline; one answer: a munge credential
that only the asking user can decode. munge says who asks; root of a node is believed, as everywhere in Slurm.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import BoundedSemaphore
from typing import Any

from prolog_epilog.courier import MAX_REQUEST, VERSION, port
from prolog_epilog.record import JobRecord
from sluice_base.errors import SluiceError
from sluice_base.text import one_line
from slurm_client.munge import decode, encode
from slurm_plugin.explain_service import listen, read_line, slurm_user
from usage.admin_comment import Comments
from usage.controllerd import Duty, Site
from usage.job_records import FOLDER, JobRecords

_WORKERS = 4
_WAITING = 64
_REQUEST_S = 10.0
_KEPT_S = 400 * 86400.0
_PRUNE_S = 86400.0

Handler = Callable[[dict[str, Any]], dict[str, Any]]
HANDLERS: dict[str, Callable[[Site], Handler]] = {}
"""Requests of other parts by their ``do``, put in when these are imported; made anew for each daemon."""

log = logging.getLogger("sluice.inbox")


class Inbox:
    """The service. `handlers`: what answers each request, by its ``do``; `trusted`: the uids that may ask."""

    def __init__(self, handlers: dict[str, Handler], trusted: Iterable[int]) -> None:
        self.handlers = handlers
        self.trusted = frozenset(trusted)
        self._slots = BoundedSemaphore(_WORKERS + _WAITING)

    def serve(self, sockets: list[socket.socket], goes_on: Callable[[], bool]) -> None:
        """Answer for as long as `goes_on` says, asked every second or so."""
        import selectors

        with selectors.DefaultSelector() as selector, ThreadPoolExecutor(_WORKERS, "inbox") as pool:
            for listening in sockets:
                listening.setblocking(False)
                selector.register(listening, selectors.EVENT_READ)
            while goes_on():
                for key, _ in selector.select(timeout=1.0):
                    self._accept(key.fileobj, pool)

    def _accept(self, listening: Any, pool: ThreadPoolExecutor) -> None:
        try:
            connection, address = listening.accept()
        except OSError:
            return
        if not self._slots.acquire(blocking=False):
            connection.close()
            return
        pool.submit(self._serve_one, connection, address)

    def _serve_one(self, connection: socket.socket, address: Any) -> None:
        try:
            with connection:
                message = decode(read_line(connection, 2 * MAX_REQUEST, _REQUEST_S).decode("ascii", "replace").strip())
                if message.uid not in self.trusted:
                    raise SluiceError(f"uid {message.uid}: neither root nor SlurmUser")
                reply = json.dumps(self.answer(message.payload)).encode()
                connection.settimeout(_REQUEST_S)
                connection.sendall(encode(reply, readable_by=message.uid).encode() + b"\n")
        except (SluiceError, OSError) as error:
            # Who is not authenticated learns nothing, not even why.
            log.warning("%s: refused: %s", one_line(str(address)), one_line(str(error)))
        except Exception:
            log.exception("%s: unexpected", one_line(str(address)))
        finally:
            self._slots.release()

    def answer(self, payload: bytes) -> dict[str, Any]:
        """The answer to what an authenticated asker sent."""
        try:
            request = json.loads(payload)
            if not isinstance(request, dict) or request.get("version") != VERSION:
                raise SluiceError(
                    f"not a request of version {VERSION}", remedy="bring node and controller to one Sluice"
                )
            handler = self.handlers.get(str(request.get("do")))
            if handler is None:
                raise SluiceError(f"request {str(request.get('do'))[:40]!r}: not known")
            return {"version": VERSION, "ok": handler(request)}
        except (ValueError, RecursionError):
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
            _check(record)
        store.append(records)
        for record in records:
            comments.arrived(record)
        return {"stored": len(records)}

    return handle


def _check(record: JobRecord) -> None:
    """What later readers rely on."""
    whole = isinstance(record.job, int) and isinstance(record.uid, int)
    texts = all(isinstance(text, str) for text in (record.user, record.account, record.partition, record.node))
    times = isinstance(record.started, int | float) and isinstance(record.ended, int | float)
    sizes = all(
        isinstance(number, int) and number >= 0
        for grant in record.grants
        for number in (grant.total, grant.peak, grant.refused, grant.limit or 0, grant.asked or 0)
    )
    if not (whole and texts and times and sizes):
        raise SluiceError(f"record of job {one_line(str(record.job))[:20]}: fields of the wrong kind")


def duties(site: Site) -> list[Duty]:
    """The service, the comments in Slurm's accounting, and the end of old records."""
    store = JobRecords(site.state_save / FOLDER)
    comments = Comments(store)
    handlers: dict[str, Handler] = {"records": store_records(store, comments)}
    handlers |= {name: make(site) for name, make in HANDLERS.items()}

    def serve(site: Site) -> None:
        sockets = listen((), port())
        try:
            trusted = {0, slurm_user(site.config())}
            Inbox(handlers, trusted).serve(sockets, lambda: site.leads() and not site.stopping.is_set())
        finally:
            for one in sockets:
                one.close()

    def prune(site: Site) -> None:
        del site
        import time

        store.prune(time.time() - _KEPT_S)

    return [
        Duty("job-records", 2.0, serve, lasting=True),
        Duty("admin-comment", 2.0, comments.run),
        Duty("job-records-prune", _PRUNE_S, prune),
    ]
