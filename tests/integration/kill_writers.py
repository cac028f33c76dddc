"""Submissions through `sluice web` while it and its helper are killed: each job once, none lost."""

from __future__ import annotations

import itertools
import random
import secrets
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sluice.base.errors import SluiceError
from tests.integration.settled import until
from tests.integration.web_site import Site

SCRIPT = "#!/bin/sh\nsleep 600\n"
_AGAIN = (0, 409, 429, 503)
_WRITERS = 4


@dataclass
class Outcome:
    """What became of so many submissions."""

    wanted: int
    tag: str = field(default_factory=lambda: secrets.token_hex(4))
    acknowledged: dict[int, int] = field(default_factory=dict)  # the job of each submission
    queued: Counter[str] = field(default_factory=Counter)  # how many jobs of each name there are
    requests: int = 0
    kills: int = 0
    refused: list[object] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def lost(self) -> int:
        """Acknowledged, and not there."""
        return sum(self.queued[f"{self.tag}-{number}"] == 0 for number in range(self.wanted))

    @property
    def doubled(self) -> int:
        """More than once there."""
        return sum(count > 1 for count in self.queued.values())


def submit_while_killed(site: Site, count: int, *, every: int = 12, user: str = "mallory") -> Outcome:
    """Submit `count` held jobs by some writers, while the web process and its helper are killed in turn,
    after `every` acknowledgements on average."""
    found, numbers, lock = Outcome(count), iter(range(count)), threading.Lock()
    token, stop = site.tokens[user], threading.Event()

    def send(number: int) -> tuple[int, dict[str, Any]]:
        body = {"script": SCRIPT, "name": f"{found.tag}-{number}", "hold": True, "memory": "1M"}
        return site.send("/jobs", body, token=token, key=f"{found.tag}-{number}")

    def write() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            for _ in range(1000):
                status, said = send(number)
                with lock:
                    found.requests += 1
                if status == 201:
                    found.acknowledged[number] = said["job_id"]
                    break
                if status not in _AGAIN:
                    found.refused.append((number, status, said))
                    break
                time.sleep(0.2)

    def kill() -> None:
        for name in itertools.cycle(("actd", "web", "actd", "both")):
            enough = len(found.acknowledged) + random.randint(1, 2 * every)
            while len(found.acknowledged) < enough:
                if stop.wait(random.uniform(0.001, 0.01)):
                    return
            for one in ("web", "actd") if name == "both" else (name,):
                with suppress(SluiceError):
                    site.cluster.stop_daemon(one, number=signal.SIGKILL)
                (site.start_web if one == "web" else site.start_actd)()
                found.kills += 1

    began = time.monotonic()
    killer = threading.Thread(target=kill)
    writers = [threading.Thread(target=write) for _ in range(_WRITERS)]
    for one in (killer, *writers):
        one.start()
    for one in writers:
        one.join()
    stop.set()
    killer.join()
    until(lambda: send(0)[0] not in _AGAIN)  # the last kill may have been just now
    found.took_s = time.monotonic() - began
    names = site.cluster.run(["squeue", "--noheader", "--states=all", "-u", user, "--format=%j"]).stdout.split()
    found.queued.update(name for name in names if name.startswith(found.tag))
    return found
