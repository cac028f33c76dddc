"""What templates use: numbers with their units, times, states, and what is sent again only when it has changed."""

# ruff: noqa: E501 - tables

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

from markupsafe import Markup

from sluice.web.pages import static
from sluice.web.pages.words import Say, translate_problem

NOTHING = "\u2013"
"""Where a value is not known."""
_MOST_HAVE = 2000
_PLAIN, _NOT_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,64}"), re.compile(r"[^A-Za-z0-9_-]")  # ids of pieces
_MOST_SPREAD = 20 << 10
"""Characters of what a refresh sends; compressed they are less than 5 KB."""
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
# Words of Slurm and of Sluice: how each looks, and a sign, as colour alone says nothing to some.
STATES = {
    "PENDING": ("wait", "◔"), "RUNNING": ("run", "▶"), "COMPLETED": ("good", "✓"), "COMPLETING": ("run", "▶"),
    "FAILED": ("bad", "✕"), "TIMEOUT": ("bad", "✕"), "OUT_OF_MEMORY": ("bad", "✕"), "NODE_FAIL": ("bad", "✕"),
    "CANCELLED": ("off", "⊘"), "SUSPENDED": ("wait", "‖"), "PREEMPTED": ("off", "⊘"), "REQUEUED": ("wait", "↻"),
    "BOOT_FAIL": ("bad", "✕"), "DEADLINE": ("bad", "✕"), "CONFIGURING": ("wait", "◔"), "HELD": ("wait", "‖"),
    "idle": ("good", "✓"), "allocated": ("run", "▶"), "mixed": ("run", "◐"), "down": ("bad", "✕"),
    "drained": ("warn", "⚠"), "draining": ("warn", "⚠"), "unknown": ("off", "?"), "ok": ("good", "✓"),
    "out": ("bad", "✕"), "fault": ("bad", "✕"), "warning": ("warn", "⚠"), "firing": ("bad", "⚠"),
    "waiting": ("wait", "◔"), "silenced": ("off", "‖"), "problem": ("bad", "✕"), "remark": ("warn", "⚠"),
    "ready": ("good", "✓"), "running": ("run", "▶"), "starting": ("wait", "◔"), "queued": ("wait", "◔"),
    "failed": ("bad", "✕"), "paused": ("off", "‖"), "gone": ("off", "⊘"),
    "free": ("good", "✓"), "whole": ("run", "▶"), "shared": ("run", "◐"),
}  # fmt: skip

# Slurm's reasons, for people.
REASONS = {
    "Priority": "jobs of higher priority go first", "Resources": "not enough is free now",
    "Dependency": "waits for another job", "DependencyNeverSatisfied": "waits for a job that failed: it can never start",
    "BeginTime": "its begin time has not come", "JobHeldUser": "held by its user", "JobHeldAdmin": "held by an operator",
    "Reservation": "its reservation has not begun", "ReqNodeNotAvail": "a node that it asks for is not available",
    "PartitionDown": "the partition is down", "PartitionInactive": "the partition starts no jobs",
    "PartitionTimeLimit": "asks for more time than the partition gives",
    "PartitionNodeLimit": "asks for more nodes than the partition gives",
    "Licenses": "waits for a licence", "InvalidAccount": "its account is not known", "InvalidQOS": "its QOS is not known",
    "NodeDown": "a node that it needs is down", "BadConstraints": "no node is as it asks",
    "JobArrayTaskLimit": "as many tasks of the array run as it allows", "Cleaning": "the run before it is being cleaned up",
    "None": "has not been looked at yet", "": "has not been looked at yet",
}  # fmt: skip
RESOURCES = {
    "gres/gpu": "GPUs", "gres/gpu hours": "GPU hours", "gres/shard": "GPU memory in MiB", "cpu": "CPUs", "mem": "Memory in MiB",
    "node": "Nodes", "jobs": "Jobs", "billing": "Billing",
}  # fmt: skip
_REASONS_BEGIN = (
    ("AssocGrpGRES", "the tenant's limit of GPUs is reached"), ("AssocGrp", "the tenant's limit is reached"),
    ("AssocMax", "a limit of the account is reached"), ("QOSMaxGRESPerUser", "your limit of GPUs is reached"),
    ("QOSMax", "a limit of the QOS for one user is reached"), ("QOSGrp", "the limit of the QOS is reached"),
    ("launch", "could not be launched"), ("Job", "held after a failure"),
)  # fmt: skip


def visible(text: object) -> str:
    """A text without what is not seen: control characters, and those that turn the direction of what follows."""
    return _HIDDEN.sub("\ufffd", str(text))


def count(value: float, digits: int = 1) -> str:
    """A number for people: thousands apart, and no zeros behind the point."""
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


@dataclass
class Ui:
    """Helpers of one answer. `have`: the pieces that the browser has, with their digests."""

    t: Say
    path: str
    """This page's, quoted."""
    query: Mapping[str, str] = field(default_factory=dict)
    csrf_text: str = ""
    have: Mapping[str, str] = field(default_factory=dict)
    language: str = "en"

    def problem(self, text: str) -> str:
        """What a problem says."""
        return translate_problem(self.language, text)

    # ---- numbers and times ----

    def number(self, value: float | None, unit: str = "", digits: int = 1) -> str:
        """With its unit."""
        if value is None:
            return NOTHING
        return f"{count(value, digits)}\u00a0{unit}" if unit else count(value, digits)

    def percent(self, part: float | None, whole: float | None = 100.0) -> str:
        """A share."""
        return NOTHING if part is None or not whole else f"{count(100 * part / whole, 0)}\u00a0%"

    def mib(self, value: float | None) -> str:
        """Memory."""
        if value is None:
            return NOTHING
        for unit in ("MiB", "GiB"):
            if abs(value) < 1024:
                return self.number(value, unit)
            value /= 1024
        return self.number(value, "TiB")

    def duration(self, seconds: float | None) -> str:
        """A duration with its two largest units."""
        if seconds is None:
            return NOTHING
        if seconds < 0:
            return self.t("no limit")
        left = int(seconds)
        said: list[str] = []
        for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
            if left >= size or (unit == "s" and not said):
                said.append(f"{left // size}\u00a0{unit}")
                left %= size
        return " ".join(said[:2])

    def time(self, seconds: float | None) -> Markup:
        """A moment, in UTC; a script writes it in the viewer's zone."""
        if not seconds:
            return Markup(NOTHING)
        try:
            moment = datetime.fromtimestamp(seconds, UTC)
        except (ValueError, OverflowError, OSError):
            return Markup(NOTHING)
        return Markup('<time datetime="{}">{}</time>').format(
            moment.strftime("%Y-%m-%dT%H:%M:%SZ"), moment.strftime("%Y-%m-%d %H:%M UTC")
        )

    def day(self, seconds: float) -> str:
        """A day, which is the same in all zones."""
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")

    # ---- words ----

    def state(self, word: str, text: str | None = None) -> Markup:
        """A state with its sign."""
        look, sign = STATES.get(word.partition(" ")[0].rstrip("*~#!%$@^-+"), ("off", "•"))
        said = self.t(word) if text is None else text
        return Markup('<span class="state {}"><span aria-hidden="true">{}</span> {}</span>').format(
            look, sign, visible(said)
        )

    def short(self, text: str, most: int = 48) -> str:
        """The beginning of a text that may be of any length: a list has many."""
        return text if len(text) <= most else text[: most - 1] + "\u2026"

    def what(self, name: str) -> str:
        """What is limited or used: Slurm's names of it in words."""
        known = RESOURCES.get(name)
        return self.t(known) if known else name

    def reason(self, word: str) -> str:
        """Why a job waits, in words; Slurm's own word where there are none."""
        word = word.strip("()")
        known = REASONS.get(word) or next((said for start, said in _REASONS_BEGIN if word.startswith(start)), None)
        return self.t(known) if known else word

    def bar(self, used: float | None, limit: float | None, label: str = "", *, plain: bool = False) -> Markup:
        """How much of a limit is used; `plain`: nearly all of it is nothing to look out for."""
        if used is None or not limit or limit <= 0:
            return Markup("")
        percent = max(0, min(100, round(100 * used / limit)))
        look = "" if plain else "full" if used >= limit else "near" if percent >= 80 else ""
        return Markup(
            '<svg class="bar {}" viewBox="0 0 100 6" preserveAspectRatio="none" role="img" aria-label="{}">'
            '<rect class="all" width="100" height="6"/><rect class="part" width="{}" height="6"/></svg>'
        ).format(look, label or f"{percent} %", percent)

    # ---- addresses ----

    def static(self, name: str) -> str:
        """Where a browser gets a file."""
        return static.address(name)

    def url(self, path: str, /, **query: object) -> str:
        """A path of this site, with what is not empty of the query."""
        given = {name: str(value) for name, value in query.items() if value not in ("", None)}
        return f"{path}?{urlencode(given)}" if given else path

    @property
    def here(self) -> str:
        """This page."""
        return self.url(self.path, **self.query)

    def but(self, **query: object) -> str:
        """This page with something else in its query."""
        return self.url(self.path, **{**self.query, **query})

    def to(self, *pieces: object) -> str:
        """A path of this site from its pieces, whatever they contain."""
        return "/" + "/".join(quote(str(piece), safe="") for piece in pieces)

    # ---- forms ----

    def csrf(self) -> Markup:
        """The field without which no form is taken."""
        return Markup('<input type="hidden" name="csrf" value="{}">').format(self.csrf_text)

    def key(self, kept: str = "") -> Markup:
        """The field that makes a form that is sent twice be done once. `kept`: of a form of which that is not known."""
        return Markup('<input type="hidden" name="key" value="{}">').format(kept or secrets.token_hex(16))

    # ---- what is live ----

    def live(self, topics: str, seconds: int = 3) -> Markup:
        """Attributes of an element whose block is asked for again when something of these topics has changed."""
        return Markup(
            'hx-get="{}" hx-trigger="sluice-refresh" hx-swap="pieces" hx-ext="pieces" data-topics="{}" data-pace="{}"'
        ).format(self.here, topics, seconds)

    def piece(self, tag: str, name: object, caller: Callable[[], str], **attributes: str) -> Markup:
        """An element that is sent empty where the browser has it as it is."""
        return self._stub_or_all(tag, str(name), caller(), attributes)

    def spread(
        self, tag: str, name: str, things: Sequence[Any], caller: Callable[[Any], str], **attributes: str
    ) -> Markup:
        """Such an element for each thing. Of those that have changed no more are sent than a refresh may have; the
        others follow with the next ones, none of them always last."""
        begin = secrets.randbelow(len(things)) if things else 0
        made: dict[int, Markup] = {}
        left = _MOST_SPREAD
        for at in (*range(begin, len(things)), *range(begin)):
            known, inside = f"{name}-{at}", caller(things[at])
            whole = self._stub_or_all(tag, known, inside, attributes)
            if self.have and len(whole) > left and known in self.have:
                whole = _stub(tag, known)
            left -= len(whole)
            made[at] = whole
        return Markup("").join(made[at] for at in range(len(things)))

    def _stub_or_all(self, tag: str, name: str, inside: str, attributes: Mapping[str, str]) -> Markup:
        known = _id_of(name)
        more = Markup("").join(
            Markup(' {}="{}"').format(one.rstrip("_").replace("_", "-"), value) for one, value in attributes.items()
        )
        digest = hashlib.blake2s(f"{more}{inside}".encode(), digest_size=5).hexdigest()
        if self.have.get(known) == digest:
            return _stub(tag, known)
        return Markup('<{} id="{}" data-v="{}"{}>{}</{}>').format(
            tag, known, digest, more, Markup(inside), tag
        )  # fmt: skip


def _id_of(name: str) -> str:
    """An element's id: with another's, a stub would bring the other's row to its place."""
    if _PLAIN.fullmatch(name):
        return name
    return f"{_NOT_PLAIN.sub('_', name)[:47]}-{hashlib.blake2s(name.encode(), digest_size=8).hexdigest()}"


def _stub(tag: str, name: str) -> Markup:
    return Markup('<{} id="{}" data-keep></{}>').format(tag, name, tag)


def parse_have(text: str) -> dict[str, str]:
    """The pieces that a browser says it has: ``name.digest name.digest``."""
    return {
        name: digest
        for name, dot, digest in (word.rpartition(".") for word in text.split(" ", _MOST_HAVE)[:_MOST_HAVE])
        if dot
    }


def first(values: Iterable[Any]) -> Any:
    """The first, or None."""
    return next(iter(values), None)
