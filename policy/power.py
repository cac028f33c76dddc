"""The policy's section `power`: caps of GPUs, budgets of watts, and who gives way first. docs/power.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from policy.names import Name, TenantName
from policy.units import Seconds
from sluice.base.errors import UsageError
from sluice.base.hostlist import expand

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MIN = 24 * 60
WEEK_MIN = 7 * DAY_MIN
MOST_GPU_W = 100_000
MOST_WATTS = 1_000_000_000
MOST_BUDGETS = 64
MOST_HOURS = 256
_FACTORS = {"": 1, "w": 1, "kw": 1000, "mw": 1_000_000}
_UNITS = {"": "W", "w": "W", "kw": "kW", "mw": "MW"}


def parse_watts(text: str) -> int:
    """``400``, ``400W``, ``90kW``, ``1.5MW`` in watts. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,10}(?:\.\d{1,6})?) ?([kKmM]?[wW])?", text.strip())
    if match is None:
        raise ValueError(f"{text[:80]!r} is not an amount of watts: write e.g. 400W, 90kW or 1.5MW")
    watts = float(match[1]) * _FACTORS[(match[2] or "").lower()]
    if watts != int(watts) or watts > MOST_WATTS:
        raise ValueError(f"{text[:80]!r}: want whole watts, at most {show_watts(MOST_WATTS)}")
    return int(watts)


def show_watts(watts: float) -> str:
    """As people write it: ``400 W``, ``90.0 kW``."""
    if abs(watts) < 1000:
        return f"{watts:.0f} W"
    return f"{watts / 1000:.1f} kW" if abs(watts) < 1_000_000 else f"{watts / 1_000_000:.2f} MW"


def _watts(value: object) -> object:
    return parse_watts(value) if isinstance(value, str) else value


def _percent(value: object) -> object:
    if isinstance(value, str):
        match = re.fullmatch(r"(\d{1,3}) ?%", value.strip())
        if match is None:
            raise ValueError(f"{value[:40]!r} is not whole percent: write e.g. 60%")
        return int(match[1])
    return value


def _minute(value: str) -> int:
    match = re.fullmatch(r"(\d{2}):(\d{2})", value)
    if match is None or int(match[2]) > 59 or int(match[1]) * 60 + int(match[2]) > DAY_MIN:
        raise ValueError(f"{value[:40]!r} is not a time of day from 00:00 to 24:00")
    return int(match[1]) * 60 + int(match[2])


def _clock(value: str) -> str:
    _minute(value)
    return value


def _days(value: str) -> str:
    parse_days(value)
    return value


def parse_days(text: str) -> tuple[int, ...]:
    """``mon-fri``, ``sat,sun`` as numbers of days, Monday 0. Raises ValueError."""
    found: set[int] = set()
    for word in text.lower().replace(" ", "").split(","):
        first, dash, last = word.partition("-")
        if first not in DAYS or (dash and last not in DAYS):
            raise ValueError(f"{text[:40]!r} is not days of the week: write e.g. mon-fri, or sat,sun")
        begin, end = DAYS.index(first), DAYS.index(last or first)
        found.update(day % 7 for day in range(begin, end + (1 if end >= begin else 8)))
    return tuple(sorted(found))


Watts = Annotated[int, BeforeValidator(_watts), Field(ge=0, le=MOST_WATTS)]
GpuWatts = Annotated[int, BeforeValidator(_watts), Field(ge=1, le=MOST_GPU_W)]
WholePercent = Annotated[int, BeforeValidator(_percent), Field(ge=1, le=100)]
Clock = Annotated[str, AfterValidator(_clock)]
Days = Annotated[str, AfterValidator(_days)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, populate_by_name=True)


class GpuPower(_Section):
    """What a GPU of a class draws, and what can be set."""

    idle: Annotated[int, BeforeValidator(_watts), Field(ge=0, le=MOST_GPU_W)] = 0
    """Draw of a GPU without a job: budgets count all GPUs of their nodes with it. Example: `55W`."""
    least: GpuWatts
    """The lowest limit that the hardware takes; `sluice power show --gpus` has it. Example: `100W`."""
    default: GpuWatts
    """Its limit where nobody sets one. Example: `400W`."""
    most: GpuWatts
    """The highest limit that the hardware takes. Example: `400W`."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.least <= self.default <= self.most:
            raise ValueError(
                f"least {self.least} W, default {self.default} W, most {self.most} W: want least <= default <= most; "
                "see sluice power show --gpus"
            )
        if self.idle >= self.least:
            raise ValueError(
                f"idle {self.idle} W is not below least {self.least} W; give what a GPU without a job draws"
            )
        return self


class PowerCap(_Section):
    """A cap of the GPUs of jobs."""

    gpu: Name | None = None
    """Class of the GPUs; default: all. Example: `a100`."""
    tenant: TenantName | None = None
    """Tenant of the jobs, with those below it; default: all. Example: `physics`."""
    watts: GpuWatts
    """The cap of each GPU. Example: `300W`."""
    at_most: GpuWatts | None = None
    """What a job may ask for with `--gpu-power`; default: `watts`. Example: `400W`."""

    @model_validator(mode="after")
    def _at_most(self) -> Self:
        if self.at_most is not None and self.at_most < self.watts:
            raise ValueError(f"at_most {self.at_most} W is less than watts {self.watts} W; raise it, or leave it out")
        return self


class Thermal(_Section):
    """A GPU that slows down by heat gets a lower cap before it goes out of service."""

    after: Annotated[Seconds, Field(ge=1, le=3600)] = 10
    """How long it has been slowed down before each step. Example: `30s`."""
    lower_by: Annotated[WholePercent, Field(le=50)] = 10
    """Of the default limit, each step. Example: `5%`."""
    at_least: WholePercent = 60
    """Of the default limit: no step goes below. Example: `70%`."""


class PowerHours(_Section):
    """Other watts at some hours of the week, in the controllers' local time."""

    days: Days = "mon-sun"
    """Days of the week. Example: `mon-fri`."""
    begin: Annotated[Clock, Field(alias="from")] = "00:00"
    """From then on. Example: `08:00`."""
    end: Annotated[Clock, Field(alias="to")] = "24:00"
    """Until then; earlier than `from`: on the next day. Example: `18:00`."""
    watts: Watts
    """The budget then. Example: `90kW`."""

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """First minute of the week, minute after the last, watts; Monday 00:00 is 0."""
        begin, end = _minute(self.begin), _minute(self.end)
        length = end - begin if end > begin else end + DAY_MIN - begin
        for day in parse_days(self.days):
            start = day * DAY_MIN + begin
            stop = start + length
            yield start, min(stop, WEEK_MIN), self.watts
            if stop > WEEK_MIN:
                yield 0, stop - WEEK_MIN, self.watts


class PowerBudget(_Section):
    """Watts that all GPUs of some nodes, or of a tenant's jobs, may draw together."""

    name: Name
    """Its name, in commands and messages. Example: `hall`."""
    nodes: str | None = None
    """Its nodes, a hostlist; `*`: all. Example: `gpu-[1-16]`."""
    switch: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,63}$")] | None = None
    """Instead: a switch of the topology, with all nodes below it. Example: `row1`."""
    tenant: TenantName | None = None
    """Instead: jobs of this tenant and of those below it, wherever they run. Example: `physics`."""
    watts: Watts
    """The budget. Example: `120kW`."""
    hours: list[PowerHours] = []
    """Other watts at some hours. Example: `[{days: mon-fri, from: "08:00", to: "18:00", watts: 90kW}]`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if sum(one is not None for one in (self.nodes, self.switch, self.tenant)) != 1:
            raise ValueError(f"budget {self.name!r}: write one of nodes, switch and tenant")
        if self.nodes is not None and self.nodes != "*":
            try:
                named = expand(self.nodes)
            except UsageError as error:
                raise ValueError(error.what) from error
            if not named:
                raise ValueError(f'budget {self.name!r}: no nodes; name some, or write nodes: "*"')
        spans = self.week()
        for (_, end, _), (begin, _, _) in pairwise(spans):
            if begin < end:
                raise ValueError(
                    f"budget {self.name!r}: two of its hours have {moment(begin)}; let each end before the next"
                )
        if len(spans) > MOST_HOURS:
            raise ValueError(f"budget {self.name!r}: {len(spans)} spans of hours, at most {MOST_HOURS}; join some")
        return self

    def week(self) -> list[tuple[int, int, int]]:
        """The spans of all its hours, in the order of the week."""
        return sorted(span for one in self.hours for span in one.spans())

    @property
    def lowest(self) -> int:
        """The least that it is at any hour."""
        return min([self.watts, *(one.watts for one in self.hours)])


def moment(minute: int) -> str:
    """A minute of the week: ``Mon 18:00``."""
    minute %= WEEK_MIN
    return f"{DAYS[minute // DAY_MIN].title()} {minute % DAY_MIN // 60:02}:{minute % 60:02}"


class Power(_Section):
    """Power of GPUs: what it costs, and what may be drawn."""

    price_kwh: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Price of a kWh, for reports; in the site's currency. Example: `0.31`."""
    gpus: dict[Name, GpuPower] = {}
    """What GPUs of each class draw; classes that are not here need no watts of a budget. Example:
    `{a100: {idle: 55W, least: 100W, default: 400W, most: 400W}}`."""
    caps: Annotated[list[PowerCap], Field(max_length=256)] = []
    """Caps by class and tenant; the first that fits counts."""
    thermal: Thermal | None = None
    """Lower caps of GPUs that are too hot; default: none."""
    budgets: Annotated[list[PowerBudget], Field(max_length=MOST_BUDGETS)] = []
    """Budgets; a GPU may be in several of them."""
    lowest_cap: WholePercent = 60
    """No cap that is set to keep a budget is below this part of the GPU's default limit; then jobs are stopped instead.
    Example: `50%`."""
    lower_first: list[Name] = []
    """QOS whose jobs give way first: their caps are lowered, and then they are requeued; all others follow, guaranteed
    jobs are the last and never stopped. Example: `[scavenger, normal]`."""

    @model_validator(mode="after")
    def _once(self) -> Self:
        names = [one.name for one in self.budgets]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"budget {name!r} is given twice; rename one")
        for name in self.lower_first:
            if self.lower_first.count(name) > 1:
                raise ValueError(f"lower_first names {name!r} twice; name it once")
        return self
