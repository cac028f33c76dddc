"""The compiled policy: the one file that Sluice's plugins in slurmctld read. docs/plugins.md describes its format.

`CompiledPolicy` holds the fields, `render` writes the file's text and `parse` reads it, by the same rules as the
plugins' own parser (slurm_plugin/rules/policy.c), so that what passes here passes there.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from signal import SIGUSR1
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sluice.base.errors import SluiceError, UsageError
from sluice.base.files import write_atomic
from sluice.exchange.plugin_list import checksummed

FILE_NAME = "sluice.policy"
"""Its name next to slurm.conf."""
MAJOR, MINOR = 1, 0
MAX_BYTES = 16 * 1024 * 1024
MAX_TYPES = 1024

_REMEDY = "write it again with: sluice apply"
_NAME = r"^[!$%+./0-9:<>?@A-Z^_`a-z{}~-]{1,128}$"
_LAST = re.compile(rb"checksum = crc32:([0-9a-f]{8})\n\Z")
_MOST_S = 315360000
MOST_PLANNED = 16384  # pending jobs: what a pass of the planner has room for
_MOST_GPUS = 10000000
_MOST_MIB = 1 << 40

Name = Annotated[str, Field(pattern=_NAME)]
Names = Annotated[list[Name], Field(max_length=256)]
Seconds = Annotated[int, Field(ge=0, le=_MOST_S)]
Positive = Annotated[int, Field(ge=1, le=_MOST_S)]
Gpus = Annotated[int, Field(ge=0, le=_MOST_GPUS)]
Mib = Annotated[int, Field(ge=0, le=_MOST_MIB)]
Weight = Annotated[int, Field(ge=0, le=1000000)]
Watts = Annotated[int, Field(ge=0, le=100000)]
MAX_BUDGET_WATTS = 1000000000
MINUTES_OF_WEEK = 10080
BudgetWatts = Annotated[int, Field(ge=0, le=MAX_BUDGET_WATTS)]

Placement = Literal[
    "first-fit",
    "round-robin",
    "least-loaded",
    "best-fit",
    "dot-product",
    "gpu-packing",
    "gpu-clustering",
    "random",
    "fgd",
    "sluice",
]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _no_duplicates(names: list[str], what: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{what}: {name!r} is named twice")


class Weights(_Section):
    """What an order is composed of; see docs/scheduling.md."""

    priority: Weight = 0
    age: Weight = 0
    fair_share: Weight = 0
    deadline: Weight = 0
    service: Weight = 0
    time: Weight = 0
    size: Weight = 0


class Global(_Section):
    """What holds for all."""

    weight: Weights = Weights()
    age_full_s: Positive | None = None
    laxity_horizon_s: Positive | None = None
    size_full_gpus: Annotated[int, Field(ge=1, le=_MOST_GPUS)] | None = None
    starvation_s: Seconds = 0
    """A job that has waited this long goes before all that have not; 0: never."""
    fair_share_half_life_s: Seconds = 604800
    """0: usage never decays."""
    placement: Placement = "sluice"
    spread_nodes: bool = False
    """Jobs of several nodes are spread over leaf switches; a class's own goes before it."""
    nic_planes: Annotated[int, Field(ge=0, le=2)] = 0
    """RDMA interfaces of a job: 1 in one plane, 2 over several, 0 anywhere; a class's own goes before it."""
    backfill_reservations: Annotated[int, Field(ge=0, le=100000)] = 64
    backfill_depth: Annotated[int, Field(ge=1, le=MOST_PLANNED)] = 10000
    planner_interval_ms: Annotated[int, Field(ge=100, le=600000)] = 2000
    gang_limit_s: Annotated[int, Field(ge=1, le=86400)] = 300
    gang_incomplete_s: Annotated[int, Field(ge=0, le=2_592_000)] = 3600
    """An incomplete gang is given up this long after its last member was submitted; 0: never."""
    gang_incomplete_cancel: bool = False
    """Its members are then cancelled; else they stay held, with another reason."""
    deadlines: bool = True
    cpus_per_gpu_milli: Annotated[int, Field(ge=0, le=1000000)] = 0
    """Default of a job that names no CPUs, in thousandths; 0: Slurm's."""
    memory_mib_per_gpu: Mib = 0
    """Default of a job that names no memory; 0: Slurm's."""
    gpu_shares: bool = False
    """Nodes hold jobs to shares of a GPU's compute time."""
    checkpoint_signal: Annotated[int, Field(ge=1, le=31)] = SIGUSR1
    """What jobs with --checkpoint=app get when they are preempted."""
    compaction_wait_s: Seconds = 0
    """A job that has waited so long may have others moved to make room; 0: none is moved."""
    compaction_factor_permille: Annotated[int, Field(ge=1, le=1_000_000)] = 2000
    """Gain over cost, at the least."""
    compaction_move_cost_s: Annotated[int, Field(ge=1, le=86400)] = 120
    compaction_save_s: Annotated[int, Field(ge=1, le=3600)] = 60
    """The longest that a job has to save."""
    compaction_moves_per_job: Annotated[int, Field(ge=1, le=1000)] = 2
    compaction_moves_per_hour: Annotated[int, Field(ge=1, le=64)] = 8
    compaction_moves_unlisted: bool = True
    """Jobs of accounts that are no tenants may be moved."""
    compaction_empty_within_s: Seconds = 0
    """Nodes that drain, or have maintenance within so long, are emptied; 0: none is."""
    checkpoint_system: bool = False
    """Nodes save jobs as they run."""
    journal: bool = False
    """What happens to jobs is journalled for failover."""
    journal_wait_ms: Annotated[int, Field(ge=1, le=10000)] = 500
    """The longest that slurmctld waits for a journal entry."""
    journal_warn: bool = False
    """What cannot be journalled is accepted with a warning, not refused."""
    journal_max_mib: Annotated[int, Field(ge=8, le=65536)] = 256

    @model_validator(mode="after")
    def _needed(self) -> Self:
        for factor, name in (("age", "age_full_s"), ("deadline", "laxity_horizon_s"), ("size", "size_full_gpus")):
            if getattr(self.weight, factor) and getattr(self, name) is None:
                raise ValueError(f"weight.{factor} needs {_key(name)}")
        return self


class GpuClass(_Section):
    """A class of GPUs."""

    name: Name
    gpu_types: Names = []
    """GRES types, e.g. ``h100``; a type belongs to one class."""
    strategy: Literal["static", "dynamic", "hybrid"] = "dynamic"
    gpu_memory_mib: Mib = 0
    """Of one GPU, the largest of the class; 0: not known."""
    reserved_permille: Annotated[int, Field(ge=0, le=1000)] = 0
    cpus_per_gpu_milli: Annotated[int, Field(ge=0, le=1000000)] = 0
    memory_mib_per_gpu: Mib = 0
    power_least_w: Watts = 0
    """What the limit of a GPU's power can be set to; 0: not known."""
    power_most_w: Watts = 0
    power_default_w: Watts = 0
    """Of one GPU without a cap; 0: `power_most_w`."""
    power_idle_w: Watts = 0
    """Of one GPU that does nothing."""
    power_start_least_w: Watts = 0
    """A job that budgets are short for may start with a cap down to this; 0: it waits."""
    compaction_wait_s: Seconds = 0
    """As the global one, for jobs that would start here; 0: that one."""
    spread_nodes: bool = False
    """Jobs of several nodes with its GPUs are spread over leaf switches."""
    nic_planes: Annotated[int, Field(ge=0, le=2)] = 0
    """As the global one, for jobs with its GPUs."""

    @model_validator(mode="after")
    def _once(self) -> Self:
        _no_duplicates(self.gpu_types, "gpu-types")
        return self


class ClassRule(_Section):
    """What a tenant may do with one class; None: as much as it likes."""

    gpus_per_job: Gpus | None = None
    run_time_s: Seconds | None = None
    gpus_limit: Gpus | None = None
    """Running at once."""
    gpus_guaranteed: Gpus = 0
    power_w: Watts = 0
    """Power cap of each GPU of a job; 0: none."""
    power_most_w: Watts = 0
    """What a job may ask for with --gpu-power; 0: `power_w`."""


class Tenant(_Section):
    """A tenant: one Slurm account. None: no limit, or Slurm's own default."""

    account: Name
    parent: Name | None = None
    qos: Name | None = None
    partitions: Names = []
    features: Names = []
    shares: Annotated[int, Field(ge=0, le=1000000)] = 1
    tier: Annotated[int, Field(ge=0, le=1000)] = 0
    default_priority: Annotated[int, Field(ge=0, le=1000000)] = 0
    gpu_memory_mib_per_job: Mib | None = None
    gpu_memory_mib_per_gpu: Mib | None = None
    gpus_per_job: Gpus | None = None
    run_time_s: Seconds | None = None
    submissions_per_minute: Annotated[int, Field(ge=0, le=1000000)] | None = None
    expires_s: Annotated[int, Field(ge=0, le=1 << 40)] = 0
    """Unix time from which nothing is admitted; 0: never."""
    one_block_s: Annotated[int, Field(ge=0, le=2_592_000)] = 0
    """Its jobs of several nodes wait so long for nodes of one block or leaf switch; 0: they do not."""
    gang: bool = True
    deadline: bool = True
    borrow: bool = True
    movable: bool = True
    """Its running jobs may be moved to make room."""
    classes: Names | None = None
    """Allowed classes; None: all."""
    class_rules: dict[Name, ClassRule] = {}

    @model_validator(mode="after")
    def _once(self) -> Self:
        for name in ("partitions", "features", "classes"):
            _no_duplicates(getattr(self, name) or [], name)
        return self


class Budget(_Section):
    """A power budget: of nodes, or of a tenant's jobs."""

    name: Name
    nodes: Annotated[str, Field(pattern=r"^[!-~]{1,4096}$")] | None = None
    """A hostlist expression; None: all."""
    tenant: Name | None = None
    """Account: jobs of it and of those below it; None: all jobs."""
    watts: BudgetWatts = 0
    """Outside `hours`."""
    kept: BudgetWatts = 0
    """Of them, above what idle GPUs draw, for jobs within guarantees."""
    hours: Annotated[
        list[Annotated[str, Field(pattern=r"^[0-9]{1,5}-[0-9]{1,5}:[0-9]{1,10}$")]], Field(max_length=256)
    ] = []
    """FROM-TO:WATTS, in minutes of the week, Monday 00:00 being 0."""

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        before = 0
        for hours in self.hours:
            start, end, watts = (int(number) for number in re.split("[-:]", hours))
            if not before <= start < end <= MINUTES_OF_WEEK or watts > MAX_BUDGET_WATTS:
                raise ValueError(f"hours: {hours}: times must ascend, without overlap, within a week")
            before = end
        return self


class CompiledPolicy(_Section):
    """A whole compiled policy."""

    generated_s: Annotated[int, Field(ge=0, le=1 << 40)] = 0
    """Unix time."""
    source: Annotated[str, Field(pattern=r"^$|" + _NAME)] = ""
    """What it was made from, e.g. ``sha256:...``."""
    settings: Global = Global()
    classes: Annotated[list[GpuClass], Field(max_length=64)] = []
    tenants: Annotated[list[Tenant], Field(max_length=65536)] = []
    budgets: Annotated[list[Budget], Field(max_length=64)] = []

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        known = set()
        for gpu_class in self.classes:
            if gpu_class.name in known:
                raise ValueError(f"class {gpu_class.name!r} is given twice")
            known.add(gpu_class.name)
        types: dict[str, str] = {}
        for gpu_class in self.classes:
            for gpu_type in gpu_class.gpu_types:
                if gpu_type in types:
                    raise ValueError(f"GPU type {gpu_type!r} is in class {types[gpu_type]} and in {gpu_class.name}")
                types[gpu_type] = gpu_class.name
        if len(types) > MAX_TYPES:
            raise ValueError(f"{len(types)} GPU types, at most {MAX_TYPES}")
        names = set()
        for budget in self.budgets:
            if budget.name in names:
                raise ValueError(f"budget {budget.name!r} is given twice")
            names.add(budget.name)
        accounts = set()
        for tenant in self.tenants:
            if tenant.account in accounts:
                raise ValueError(f"tenant {tenant.account!r} is given twice")
            accounts.add(tenant.account)
            for name in (*(tenant.classes or []), *tenant.class_rules):
                if name not in known:
                    raise ValueError(f"tenant {tenant.account!r}: {name!r} is not a class")
        return self

    # ---- writing ----

    def render(self) -> str:
        """The file's text."""
        lines = [f"sluice-policy {MAJOR}.{MINOR}", f"generated-s = {self.generated_s}"]
        if self.source:
            lines.append(f"source = {self.source}")
        lines += ["", "[global]", *_lines(self.settings.weight, "weight.", Weights())]
        lines += _lines(self.settings, skip=("weight",))
        for gpu_class in self.classes:
            lines += ["", f"[class {gpu_class.name}]", *_lines(gpu_class, skip=("name",))]
        for tenant in self.tenants:
            lines += ["", f"[tenant {tenant.account}]"]
            lines += _lines(tenant, skip=("account", "class_rules"), default=Tenant(account="-"))
            for name, rule in tenant.class_rules.items():
                lines += _lines(rule, f"class.{name}.", ClassRule())
        for budget in self.budgets:
            lines += ["", f"[budget {budget.name}]", *_lines(budget, skip=("name",), default=Budget(name="-"))]
        return checksummed("\n".join(lines) + "\n")

    def write(self, path: Path) -> None:
        """Replace a file by this policy, in one step. Raises OSError."""
        write_atomic(path, self.render())


def complete(sections: str) -> str:
    """Sections written by hand as a whole file's text, with first line and checksum; their content is not checked."""
    return checksummed(f"sluice-policy {MAJOR}.{MINOR}\n{sections.rstrip()}\n")


def _key(name: str) -> str:
    return name.replace("_", "-")


def _lines(
    section: BaseModel, prefix: str = "", default: BaseModel | None = None, skip: tuple[str, ...] = ()
) -> Iterator[str]:
    """`KEY = VALUE` for each field but those in `skip`, those that are None, and those that are as in `default`."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if name in skip or value is None or (default is not None and value == getattr(default, name)):
            continue
        if isinstance(value, bool):
            value = "yes" if value else "no"
        elif isinstance(value, list):
            value = ",".join(value)
        yield f"{prefix}{_key(name)} = {value}".rstrip()


# ---- reading ----


class _Reader:
    """The sections of a file as the models' keyword arguments, with the line that each began in."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.line = 1
        self.head: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        self.classes: list[dict[str, Any]] = []
        self.tenants: list[dict[str, Any]] = []
        self.budgets: list[dict[str, Any]] = []
        self.section: dict[str, Any] | None = self.head
        self.model: type[BaseModel] | None = CompiledPolicy
        self.warnings: list[str] = []

    def fail(self, what: str) -> SluiceError:
        return SluiceError(f"{self.source}:{self.line}: {what}", remedy=_REMEDY)

    def warn(self, what: str) -> None:
        self.warnings.append(f"line {self.line}: {what}: not known to this version, ignored")

    def begin(self, line: str) -> None:
        match = re.fullmatch(r"\[([^\] ]*)(?: ([^\]]*))?\]", line)
        if match is None:
            raise self.fail(f"{line[:60]!r}: a section is written [NAME]")
        kind, name = match[1], match[2]
        if kind == "global" and name is None:
            if self.section is not self.head:
                raise self.fail("[global] must come before all other sections")
            self.section, self.model = self.settings, Global
        elif kind in ("class", "tenant", "budget"):
            if name is None or not re.match(_NAME, name):
                raise self.fail(f"[{kind} {name or ''}]: not a name")
            if kind == "class":
                if self.tenants:
                    raise self.fail(f"[class {name}]: classes must come before the tenants")
                self.section, self.model = {"name": name}, GpuClass
                self.classes.append(self.section)
            elif kind == "budget":
                self.section, self.model = {"name": name}, Budget
                self.budgets.append(self.section)
            else:
                self.section, self.model = {"account": name, "class_rules": {}}, Tenant
                self.tenants.append(self.section)
        else:
            self.warn(f"[{kind}]")
            self.section, self.model = None, None

    def set(self, key: str, value: str) -> None:
        section, model = self.section, self.model
        if section is None or model is None:
            return
        if model is Tenant and key.startswith("class."):
            name, dot, key = key.removeprefix("class.").rpartition(".")
            if not dot:
                raise self.fail(f"class.{key}: write class.NAME.KEY")
            if name not in [one["name"] for one in self.classes]:
                raise self.fail(f"{name!r} is not a class above this line")
            rule: dict[str, Any] = section["class_rules"].setdefault(name, {})
            rule.pop(key.replace("-", "_"), None)  # the last one holds
            section, model = rule, ClassRule
        elif model is Global and key.startswith("weight."):
            weights: dict[str, Any] = section.setdefault("weight", {})
            section, model, key = weights, Weights, key.removeprefix("weight.")
        name = key.replace("-", "_")
        field = model.model_fields.get(name)
        hidden = {"name", "account", "class_rules", "settings", "weight", "tenants", "budgets"}
        if field is None or "_" in key or name in hidden or (model is CompiledPolicy and name == "classes"):
            self.warn(key)
            return
        if name in section and model is not CompiledPolicy:
            raise self.fail(f"{key}: given twice in one section")
        section[name] = self.value(key, value, str(field.annotation))

    def value(self, key: str, value: str, annotation: str) -> Any:
        if "bool" in annotation:
            if value not in ("yes", "no"):
                raise self.fail(f"{key}: {value!r} is not yes or no")
            return value == "yes"
        if "list" in annotation:
            return value.split(",") if value else []
        if "int" in annotation:
            if re.fullmatch(r"[0-9]{1,40}", value) is None:
                raise self.fail(f"{key}: {value!r} is not a number")
            return int(value)
        return value


def parse(data: bytes, *, source: str = "policy") -> tuple[CompiledPolicy, list[str]]:
    """A compiled policy from a file's content, and warnings about what this version does not know.

    `source` names the file in errors. Raises SluiceError with the line's number.
    """
    if len(data) > MAX_BYTES:
        raise SluiceError(f"{source}: {len(data)} bytes, at most {MAX_BYTES}", remedy=_REMEDY)
    last = _LAST.search(data)
    body = data[: last.start()] if last else b""
    if last is None or not body.endswith(b"\n"):
        raise SluiceError(
            f"{source}: the last line is not a checksum: the file was cut off, or written by hand", remedy=_REMEDY
        )
    if int(last[1], 16) != zlib.crc32(body):
        raise SluiceError(
            f"{source}: checksum {last[1].decode()}, but the file's is {zlib.crc32(body):08x}: it was changed by hand "
            "or damaged",
            remedy=_REMEDY,
        )
    reader = _Reader(source)
    for number, line in enumerate(body.decode("latin-1")[:-1].split("\n"), 1):
        reader.line = number
        _read_line(reader, line)
    try:
        policy = CompiledPolicy(
            **reader.head,
            settings=Global(**reader.settings),
            classes=[GpuClass(**one) for one in reader.classes],
            tenants=[Tenant(**one) for one in reader.tenants],
            budgets=[Budget(**one) for one in reader.budgets],
        )
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(_key(str(part)) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise SluiceError(f"{source}: {f'{place}: ' if place else ''}{message}", remedy=_REMEDY) from error
    return policy, reader.warnings


def _read_line(reader: _Reader, line: str) -> None:
    if "\0" in line or "\r" in line:
        raise reader.fail("control characters")
    if reader.line == 1:
        match = re.fullmatch(r"sluice-policy ([0-9]{1,4})\.([0-9]{1,4})", line)
        if match is None:
            raise reader.fail(f"{line[:60]!r}: a compiled policy begins with sluice-policy MAJOR.MINOR")
        if int(match[1]) != MAJOR:
            raise reader.fail(f"policy format {match[1]}.{match[2]}, but this Sluice reads {MAJOR}.x")
        return
    if not line or line.startswith("#"):
        return
    if line.startswith("["):
        reader.begin(line)
        return
    key, separator, value = line.partition(" = ")
    if not separator:
        if not line.endswith(" ="):
            raise reader.fail(f"{line[:60]!r}: a line is written KEY = VALUE")
        key, value = line.removesuffix(" ="), ""
    reader.set(key, value)


def load(path: Path) -> tuple[CompiledPolicy, list[str]]:
    """Read a file as `parse` does. Raises UsageError where it cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", remedy="name a compiled policy that can be read") from error
    return parse(data, source=str(path))
