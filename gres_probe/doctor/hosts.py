"""The hosts: clock, names, backups."""

from __future__ import annotations

import ctypes
import queue
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from gres_probe.doctor.check import CannotCheckError, Outcome, SiteView, check, fail, ok, warn
from sluice.base.hostlist import fold

_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised
_MOST_NAMES = 256
_NAMES_TIMEOUT_S = 5.0
_WORKERS = 32
_DUMP = re.compile(r"mysqldump|mariadb-dump|mariabackup|xtrabackup|pg_dump|slurm_acct_db")
_COPY = re.compile(r"(rsync|tar|borg|restic|bacula|snapshot|cp)\b.*(slurm|StateSave)", re.IGNORECASE)


@check("time", "the clock is synchronised")
def clock(site: SiteView) -> Iterator[Outcome]:
    """What the kernel reports (adjtimex): credentials are refused when clocks differ."""
    if site.root != Path("/"):
        raise CannotCheckError("the root folder is not this host's")
    buffer = ctypes.create_string_buffer(512)  # struct timex, with modes = 0: read only
    state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    if state < 0:
        raise CannotCheckError("the kernel does not report it (adjtimex)")
    if state == _TIME_ERROR:
        yield warn("the clock of this host is not synchronised", "run chrony or another NTP client on every host")
    else:
        yield ok("synchronised")


@check("names", "host names resolve")
def names(site: SiteView) -> Iterator[Outcome]:
    """Controllers and nodes, at most 256, all at once."""
    wanted: dict[str, str] = {}
    for line in site.slurm.config.lines:
        if line.head.key.lower() == "slurmctldhost":
            host, _, address = line.head.text.rstrip(")").partition("(")
            wanted[host] = address or host
    for node in site.slurm.nodes.values():
        if node.text("state").upper() not in ("CLOUD", "FUTURE"):
            wanted[node.name] = node.text("nodeaddr") or node.text("nodehostname") or node.name
    chosen = dict(list(wanted.items())[:_MOST_NAMES])
    found = _look_up(chosen)
    slow = [name for name in chosen if name not in found]
    lost = [name for name, resolved in found.items() if not resolved]
    if lost:
        yield fail(f"no address for {fold(lost)}", "add them to DNS or /etc/hosts, or set NodeAddr")
    if slow:
        yield warn(f"no answer for {fold(slow)} within {_NAMES_TIMEOUT_S:.0f} s", "check the resolver")
    if not lost and not slow:
        yield ok(f"{len(chosen)} names")


def _look_up(addresses: Mapping[str, str]) -> dict[str, bool]:
    """Whether each name's address resolves, as far as this is known in time.

    The threads are daemons: a resolver that hangs does not keep the process from ending.
    """
    waiting: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    for item in addresses.items():
        waiting.put(item)
    found: dict[str, bool] = {}

    def work() -> None:
        while True:
            try:
                name, address = waiting.get_nowait()
            except queue.Empty:
                return
            found[name] = _resolves(address)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_WORKERS, len(addresses)))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _NAMES_TIMEOUT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)


def _resolves(address: str) -> bool:
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError):
        return False
    return True


@check("backups", "something backs up the database and the state")
def backups(site: SiteView) -> Iterator[Outcome]:
    """Signs of it in cron and systemd timers of this host; what runs on other hosts cannot be seen."""
    texts = []
    for pattern in ("etc/cron*/*", "etc/crontab", "var/spool/cron/**/*", "etc/systemd/system/*.service"):
        for path in site.root.glob(pattern):
            try:
                if path.is_file() and path.stat().st_size < 1 << 20:
                    texts.append(path.read_text(errors="replace"))
            except OSError:
                continue
    lines = [line for text in texts for line in text.splitlines() if not line.lstrip().startswith("#")]
    dump, copy = any(map(_DUMP.search, lines)), any(map(_COPY.search, lines))
    if not dump:
        yield warn(
            "no dump of the accounting database is scheduled on this host",
            "run mariadb-dump --single-transaction nightly on the database's host",
        )
    if not copy:
        yield warn(
            "no copy of Slurm's configuration and state is scheduled on this host",
            "copy the configuration and StateSaveLocation nightly",
        )
    if dump and copy:
        yield ok("a database dump and a copy of Slurm's files are scheduled here")
