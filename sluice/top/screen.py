"""The live view as lines of text: which part, how sorted and filtered, where the cursor is. Knows no terminal."""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sluice.base.sizes import format_mib
from sluice.base.text import one_line
from sluice.top.look import DeviceLine, EventLine, JobLine, Look, NodeLine, TenantLine, on_node

PLAIN, HEAD, CURSOR, WARN = "plain", "head", "cursor", "warn"
Line = tuple[str, str]  # text, style


@dataclass(frozen=True)
class Column:
    """A column of a part; `width` 0: what is left."""

    name: str
    width: int
    shown: Callable[[Any], str]
    order: Callable[[Any], Any]
    right: bool = False


def _mib(value: int) -> str:
    return format_mib(value) if value else "-"


def _count(value: int) -> str:
    return str(value) if value else "-"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part // whole}%" if whole else "-"


def _span(seconds: float) -> str:
    minutes = max(0, int(seconds)) // 60
    if minutes < 60:
        return f"{minutes}m"
    return f"{minutes // 60}h{minutes % 60:02}" if minutes < 2880 else f"{minutes // 1440}d{minutes % 1440 // 60}h"


def _age(job: JobLine) -> float:
    return time.time() - job.since if job.since else 0.0


def _shown(percent: float | None) -> str:
    return "-" if percent is None else f"{percent:.0f}%"


def _utilisation(row: JobLine | NodeLine) -> str:
    return _shown(row.percent)


def _known(mib: int | None) -> str:
    return "-" if mib is None else format_mib(mib)


def _filled(row: DeviceLine) -> float | None:
    now = row.now
    return 100 * now.used_mib / now.total_mib if now.used_mib is not None and now.total_mib else None


def _order(percent: float | None) -> float:
    return -1.0 if percent is None else percent


_SHORT = {"RUNNING": "R", "PENDING": "PD", "COMPLETING": "CG", "CONFIGURING": "CF", "SUSPENDED": "S"}

NODES = (
    Column("NODE", 12, lambda row: row.name, lambda row: row.name),
    Column("STATE", 6, lambda row: row.state, lambda row: row.state),
    Column("TYPE", 9, lambda row: row.gpu_type or "-", lambda row: row.gpu_type),
    Column("GPUS", 17, lambda row: row.picture or "-", lambda row: (row.gpus_allocated, len(row.shared))),
    Column("USED", 5, lambda row: f"{row.gpus_allocated}/{row.gpus}", lambda row: row.gpus_allocated, True),
    Column("UTIL", 4, _utilisation, lambda row: _order(row.percent), True),
    Column("SHARES", 6, lambda row: _percent(row.shards_allocated, row.shards), lambda row: row.shards_allocated, True),
    Column("CPUS", 5, lambda row: _percent(row.cpus_allocated, row.cpus), lambda row: row.cpus_allocated, True),
    Column("REASON", 0, lambda row: row.reason, lambda row: row.reason),
)
JOBS = (
    Column("JOB", 10, lambda row: row.id, lambda row: row.id.rjust(24)),
    Column("USER", 8, lambda row: row.user, lambda row: row.user),
    Column("ACCOUNT", 9, lambda row: row.account, lambda row: row.account),
    Column("ST", 2, lambda row: _SHORT.get(row.state, row.state[:2]), lambda row: row.state),
    Column("GPUS", 4, lambda row: _count(row.gpus), lambda row: row.gpus, True),
    Column("GPUMEM", 6, lambda row: _mib(row.gpu_mem_mib), lambda row: row.gpu_mem_mib, True),
    Column("UTIL", 4, _utilisation, lambda row: _order(row.percent), True),
    Column("USED", 6, lambda row: _known(row.used_mib), lambda row: _order(row.used_mib), True),
    Column("TIME", 6, lambda row: _span(_age(row)), _age, True),
    Column("WHERE", 7, lambda row: row.nodes or "-", lambda row: row.nodes),
    Column("NAME", 0, lambda row: row.name, lambda row: row.name),
)
QUEUE = (
    Column("JOB", 11, lambda row: row.id, lambda row: row.id.rjust(24)),
    Column("USER", 9, lambda row: row.user, lambda row: row.user),
    Column("ACCOUNT", 10, lambda row: row.account, lambda row: row.account),
    Column("PRIORITY", 10, lambda row: str(row.priority), lambda row: -row.priority, True),
    Column("GPUS", 4, lambda row: _count(row.gpus), lambda row: row.gpus, True),
    Column("GPUMEM", 6, lambda row: _mib(row.gpu_mem_mib), lambda row: row.gpu_mem_mib, True),
    Column("WAITS", 6, lambda row: _span(_age(row)), _age, True),
    Column("REASON", 0, lambda row: row.reason, lambda row: row.reason),
)
TENANTS = (
    Column("TENANT", 16, lambda row: row.name or "-", lambda row: row.name),
    Column("RUNNING", 7, lambda row: str(row.running), lambda row: row.running, True),
    Column("WAITING", 7, lambda row: str(row.pending), lambda row: row.pending, True),
    Column("GPUS", 6, lambda row: _count(row.gpus), lambda row: row.gpus, True),
    Column("GPUMEM", 8, lambda row: _mib(row.gpu_mem_mib), lambda row: row.gpu_mem_mib, True),
    Column("WANTED", 6, lambda row: _count(row.gpus_wanted), lambda row: row.gpus_wanted, True),
    Column("USERS", 5, lambda row: str(row.users), lambda row: row.users, True),
)
EVENTS = (
    Column("WHEN", 8, lambda row: datetime.fromtimestamp(row.time).strftime("%H:%M:%S"), lambda row: -row.time),
    Column("WHAT", 0, lambda row: row.what, lambda row: row.what),
)

DEVICES = (
    Column("NODE", 12, lambda row: row.node, lambda row: (row.node, row.index)),
    Column("GPU", 3, lambda row: str(row.index), lambda row: row.index, True),
    Column("TYPE", 9, lambda row: row.gpu_type or "-", lambda row: row.gpu_type),
    Column("USE", 6, lambda row: row.use, lambda row: row.use),
    Column("UTIL", 4, lambda row: _shown(row.now.percent), lambda row: _order(row.now.percent), True),
    Column("USED", 6, lambda row: _known(row.now.used_mib), lambda row: _order(row.now.used_mib), True),
    Column("OF", 6, lambda row: _known(row.now.total_mib), lambda row: _order(row.now.total_mib), True),
    Column("FULL", 4, lambda row: _shown(_filled(row)), lambda row: _order(_filled(row)), True),
    Column(
        "TEMP",
        4,
        lambda row: "-" if row.now.temperature_c is None else f"{row.now.temperature_c:.0f}C",
        lambda row: _order(row.now.temperature_c),
        True,
    ),
    Column("JOBS", 0, lambda row: ",".join(map(str, row.jobs)) or "-", lambda row: row.jobs),
)

PARTS: dict[str, tuple[Column, ...]] = {
    "gpus": NODES,
    "jobs": JOBS,
    "tenants": TENANTS,
    "queue": QUEUE,
    "events": EVENTS,
    "devices": DEVICES,
}
KEYS = "1-6 part  enter open  esc back  s sort  r turn  / filter  p pause  q quit"


@dataclass
class Screen:
    """What the user chose, and the look that is shown."""

    look: Look = field(default_factory=Look)
    part: str = "gpus"
    sort: dict[str, int] = field(default_factory=dict)
    turned: dict[str, bool] = field(default_factory=dict)
    filter: str = ""
    typing: str | None = None  # the filter that is being typed
    cursor: int = 0
    top: int = 0
    paused: bool = False
    scope: tuple[str, str] | None = None  # jobs of ("node"|"tenant", name)
    detail: JobLine | NodeLine | None = None

    # ---- what is shown ----

    def rows(self) -> list[Any]:
        """The rows of the part, filtered and sorted."""
        columns = PARTS[self.part]
        rows = [row for row in self._all() if self._matches(columns, row)]
        column = columns[self.sort.get(self.part, 0)]
        return sorted(rows, key=column.order, reverse=self.turned.get(self.part, False))

    def _all(self) -> Sequence[Any]:
        look = self.look
        if self.part == "gpus":
            return look.nodes
        if self.part == "devices":
            return look.devices()
        if self.part == "tenants":
            return look.tenants
        if self.part == "events":
            return look.events
        if self.part == "queue":
            return [job for job in look.jobs if job.state == "PENDING"]
        if self.scope is None:
            return look.jobs
        kind, name = self.scope
        return on_node(look.jobs, name) if kind == "node" else [job for job in look.jobs if job.account == name]

    def _matches(self, columns: tuple[Column, ...], row: Any) -> bool:
        wanted = (self.typing if self.typing is not None else self.filter).lower()
        return not wanted or any(wanted in column.shown(row).lower() for column in columns)

    def lines(self, width: int, height: int) -> list[Line]:
        """Exactly `height` lines of at most `width` cells."""
        width, height = max(width, 20), max(height, 4)
        head = [(fit(text, width), style) for text, style in self._head(width)]
        foot = [(fit(self._foot(), width), HEAD)]
        room = height - len(head) - len(foot)
        body = self._detail(width) if self.detail is not None else self._table(width, room)
        body = body[: max(0, room)]
        return [*head, *body, *[("", PLAIN)] * (room - len(body)), *foot][:height]

    def _head(self, width: int) -> list[Line]:
        nodes, jobs = self.look.nodes, self.look.jobs
        gpus, used = sum(node.gpus for node in nodes), sum(node.gpus_allocated for node in nodes)
        shared = sum(len(node.shared) for node in nodes)
        waiting = sum(job.state == "PENDING" for job in jobs)
        clock = datetime.fromtimestamp(self.look.at).strftime("%H:%M:%S") if self.look.at else "--:--:--"
        paused = " PAUSED" if self.paused else ""
        first = (
            f"sluice top {clock}{paused}  GPUs {used}+{shared} shared of {gpus}  jobs {len(jobs) - waiting}"
            f"  waiting {waiting}"
        )
        tabs = "  ".join(
            f"[{number} {name}]" if name == self.part else f" {number} {name} "
            for number, name in enumerate(PARTS, start=1)
        )
        lines: list[Line] = [(first, PLAIN), (tabs, PLAIN)]
        if self.look.problem:
            lines.append((f"! {self.look.problem}", WARN))
        return lines

    def _foot(self) -> str:
        if self.typing is not None:
            return f"filter: {self.typing}_   (enter keeps it, esc drops it)"
        parts = [f"filter: {one_line(self.filter)}"] if self.filter else []
        if self.scope is not None and self.part == "jobs":
            parts.append(f"of {self.scope[0]} {self.scope[1]}")
        return "  ".join([*parts, KEYS])

    def _table(self, width: int, room: int) -> list[Line]:
        columns, rows = PARTS[self.part], self.rows()
        self.cursor = max(0, min(self.cursor, len(rows) - 1))
        visible = max(1, room - 1)
        self.top = max(0, min(self.top, self.cursor, max(0, len(rows) - visible)))
        if self.cursor >= self.top + visible:
            self.top = self.cursor - visible + 1
        sorted_by = self.sort.get(self.part, 0)
        heads = [one.name + ("*" if place == sorted_by else "") for place, one in enumerate(columns)]
        lines: list[Line] = [(_cells(columns, heads, width), HEAD)]
        for place, row in enumerate(rows[self.top : self.top + visible], start=self.top):
            style = CURSOR if place == self.cursor else WARN if _troubled(row) else PLAIN
            lines.append((_cells(columns, [one.shown(row) for one in columns], width), style))
        if not rows:
            lines.append(("nothing to show" + (" by this filter" if self.filter or self.typing else ""), PLAIN))
        return lines

    def _detail(self, width: int) -> list[Line]:
        row = self.detail
        if not isinstance(row, JobLine):
            return []
        facts = [
            ("job", row.id),
            ("name", row.name),
            ("user", f"{row.user} ({row.account})"),
            ("partition", row.partition),
            ("state", row.state + (f" ({row.reason})" if row.reason else "")),
            ("GPUs", _count(row.gpus)),
            ("GPU memory", _mib(row.gpu_mem_mib)),
            ("nodes", row.nodes or "-"),
            ("waits" if row.state == "PENDING" else "runs", _span(_age(row))),
            ("time limit", _span(row.limit_s) if row.limit_s and row.limit_s > 0 else "-"),
            ("priority", str(row.priority)),
            *((f"{one.node} GPU {one.index}", f"{_shown(one.percent)}, {_known(one.used_mib)}") for one in row.now),
        ]
        lines = [(fit(f"{name:<11} {value}", width), PLAIN) for name, value in facts]
        more = f"more: sluice report job {row.id}   sluice explain {row.id}"
        return [*lines, ("", PLAIN), (fit(more, width), PLAIN)]

    # ---- what the user does ----

    def key(self, key: str) -> bool:
        """Act on a key: a character, or "up", "down", "pageup", "pagedown", "home", "end", "enter", "esc", "back".

        False: the user wants to leave.
        """
        if self.typing is not None:
            self._type(key)
            return True
        if key in ("q", "Q"):
            return False
        moves = {
            "up": -1,
            "k": -1,
            "down": 1,
            "j": 1,
            "pageup": -15,
            "pagedown": 15,
            "home": -(1 << 30),
            "end": 1 << 30,
        }
        names = list(PARTS)
        if key in moves:
            self.cursor = max(0, min(self.cursor + moves[key], len(self.rows()) - 1))
        elif key in tuple("123456"):
            self.show(names[int(key) - 1])
        elif key in ("\t", "right", "left"):
            step = -1 if key == "left" else 1
            self.show(names[(names.index(self.part) + step) % len(names)])
        elif key == "s":
            self.sort[self.part] = (self.sort.get(self.part, 0) + 1) % len(PARTS[self.part])
        elif key == "r":
            self.turned[self.part] = not self.turned.get(self.part, False)
        elif key == "/":
            self.typing = self.filter
        elif key == "p":
            self.paused = not self.paused
        elif key == "enter":
            self._open()
        elif key in ("esc", "back"):
            self._back()
        return True

    def show(self, part: str) -> None:
        """Another part, all of it."""
        self.part, self.scope, self.detail, self.cursor, self.top = part, None, None, 0, 0

    def _type(self, key: str) -> None:
        assert self.typing is not None  # noqa: S101 - the caller looked
        if key == "enter":
            self.filter, self.typing = self.typing, None
        elif key == "esc":
            self.filter, self.typing = "", None
        elif key == "back":
            self.typing = self.typing[:-1]
        elif len(key) == 1 and key.isprintable() and len(self.typing) < 60:
            self.typing += key
        self.cursor = 0

    def _open(self) -> None:
        rows = self.rows()
        if self.detail is not None or not rows:
            return
        row = rows[self.cursor]
        if isinstance(row, JobLine):
            self.detail = row
        elif isinstance(row, NodeLine | TenantLine):
            kind = "node" if isinstance(row, NodeLine) else "tenant"
            self.show("jobs")
            self.scope, self.filter = (kind, row.name), ""

    def _back(self) -> None:
        if self.detail is not None:
            self.detail = None
        elif self.scope is not None:
            self.show("gpus" if self.scope[0] == "node" else "tenants")
        else:
            self.filter = ""


def _troubled(row: Any) -> bool:
    if isinstance(row, NodeLine):
        return row.state not in ("idle", "mixed", "allocated", "completing")
    return isinstance(row, EventLine) and any(word in row.what for word in ("drain", "down", "fail"))


def _cells(columns: Sequence[Column], texts: Sequence[str], width: int) -> str:
    taken = sum(one.width + 1 for one in columns)
    cells = []
    for one, text in zip(columns, texts, strict=True):
        room = one.width or max(8, width - taken)
        cells.append(fit(text, room, right=one.right, pad=True))
    return fit(" ".join(cells), width).rstrip()


def fit(text: str, width: int, *, right: bool = False, pad: bool = False) -> str:
    """The text on at most so many cells of a terminal, cut with a ``+``; what cannot be printed is taken out."""
    text = one_line(text, limit=None) if any(not one.isprintable() for one in text) else text
    if sum(map(_cell, text)) > width:
        kept, used = "", 0
        for one in text:
            if used + _cell(one) > width - 1:
                break
            kept, used = kept + one, used + _cell(one)
        text = kept + "+"
    if not pad:
        return text
    gap = " " * max(0, width - sum(map(_cell, text)))
    return gap + text if right else text + gap


def _cell(one: str) -> int:
    if one.isascii():
        return 1
    if unicodedata.combining(one):
        return 0
    return 2 if unicodedata.east_asian_width(one) in "WF" else 1
