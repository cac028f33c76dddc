"""The inbox as duties of the controllers' daemon: what nodes send is received, stored, and later pruned."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from sluice.base.errors import SluiceError
from sluice.controllerd.accounting import Comments
from sluice.controllerd.daemon import Duty, Site
from sluice.controllerd.readings import running_of
from sluice.exchange.courier import port
from sluice.exchange.inbox import AskedHandler, Handler, Inbox
from sluice.exchange.job_records import FOLDER, JobRecords, check_record
from sluice.exchange.record import JobRecord
from sluice.slurm.munge_service import listen
from sluice.slurm.user import slurm_user

UserHandler = Callable[[dict[str, Any], int | None], dict[str, Any]]
"""A handler of a request that any user may make; gets the uid whose things alone may be shown, None: all."""
_KEPT_S = 400 * 86400.0
_PRUNE_S = 86400.0


def store_records(store: JobRecords, *arrived: Callable[[JobRecord], None]) -> Handler:
    """The handler of ``records``: store them all or none, then say that they arrived."""

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        given = request.get("records")
        if not isinstance(given, list):
            raise SluiceError("records: not a list")
        records = [JobRecord.from_json(json.dumps(one), "record") for one in given]
        for record in records:
            check_record(record)
        store.append(records)
        for record in records:
            for take in arrived:
                take(record)
        return {"stored": len(records)}

    return handle


def duties_of_inbox(
    site: Site,
    others: Mapping[str, Handler],
    of_users: Mapping[str, UserHandler],
    *arrived: Callable[[JobRecord], None],
) -> list[Duty]:
    """The service, the comments in Slurm's accounting, and the end of old records.

    `others`: handlers of other requests, by their ``do``; `of_users`: those that any user may make. `arrived`: who else
    is given each record.
    """
    store = JobRecords(site.state_save / FOLDER)
    comments = Comments(store)
    running = running_of(site)
    handlers: dict[str, Handler] = {
        "records": store_records(store, comments.arrived, *arrived),
        "running": running.take,
    }
    handlers |= others

    def serve(site: Site) -> None:
        trusted = {0, slurm_user(site.config())}

        def for_user(handler: UserHandler) -> AskedHandler:
            return lambda request, uid: handler(request, None if uid in trusted else uid)

        asked = {name: for_user(one) for name, one in {"ask-running": running.answer, **of_users}.items()}
        inbox = Inbox(handlers, trusted, asked)
        inbox.serve(listen((), port()), lambda: site.leads() and not site.stopping.is_set())

    def prune(site: Site) -> None:
        del site
        store.prune(time.time() - _KEPT_S)

    return [
        Duty("job-records", 2.0, serve, lasting=True),
        Duty("admin-comment", 2.0, comments.run),
        Duty("job-records-prune", _PRUNE_S, prune),
    ]
