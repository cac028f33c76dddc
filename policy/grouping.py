"""The section `grouping` of sluice.yaml: how GPUs are put into classes.

grouping:
  prefix: class_
  strategies:                # a class is one value of each; their names are joined by "-"
    - by: model
    - by: memory
      step: 8G
    - by: performance
      threshold: 0.15
    - by: expression
      classes:
        training: memory_gib >= 80 and link_size >= 4
        inference: memory_gib < 80
  performance:               # declared, in any unit, by GRES type; measured figures go before these
    h100: 989
    mi300x: 1307
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from sluice_base.errors import SluiceError, UsageError
from sluice_base.sizes import parse_mib

_MOST_BYTES = 4 << 20
_WORD = r"^[a-z0-9][a-z0-9_.]*$"
Word = Annotated[str, Field(pattern=_WORD, max_length=64)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ByModel(_Section):
    """One class for each GRES type: ``h100``, ``h100_1g.10gb``."""

    by: Literal["model"]


class ByVendor(_Section):
    """One class for each vendor."""

    by: Literal["vendor"]


class ByMemory(_Section):
    """Classes of memory size; `step` rounds up, so that 79.6G and 80G are one class."""

    by: Literal["memory"]
    step_mib: Annotated[int, Field(alias="step", ge=1)] = 1024

    @field_validator("step_mib", mode="before")
    @classmethod
    def _size(cls, value: object) -> object:
        return parse_mib(str(value)) if isinstance(value, str | int) and not isinstance(value, bool) else value


class ByCompatibility(_Section):
    """What one binary runs on: vendor and capability, and the driver's major version with `driver`."""

    by: Literal["compatibility"]
    driver: bool = False


class ByLinkDomain(_Section):
    """Kind and size of the set of GPUs joined by NVLink, xGMI or Xe Link, e.g. ``nvlink8``; ``nolink`` without one."""

    by: Literal["link-domain"]


class ByPerformance(_Section):
    """Classes of speed: a class holds figures up to `threshold` above its slowest (0.1: ten per cent)."""

    by: Literal["performance"]
    threshold: Annotated[float, Field(gt=0, le=100)] = 0.1


class ByExpression(_Section):
    """The first class whose expression holds; `otherwise` where none does."""

    by: Literal["expression"]
    classes: Annotated[dict[Word, Annotated[str, Field(max_length=1000)]], Field(min_length=1, max_length=1000)]
    otherwise: Word = "other"


Strategy = Annotated[
    ByModel | ByVendor | ByMemory | ByCompatibility | ByLinkDomain | ByPerformance | ByExpression,
    Field(discriminator="by"),
]


class Grouping(_Section):
    """How GPUs are put into classes."""

    prefix: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=32)] = "class_"
    strategies: Annotated[list[Strategy], Field(min_length=1, max_length=16)] = [ByModel(by="model")]
    performance: dict[Word, Annotated[float, Field(gt=0)]] = {}


def load_grouping(path: Path) -> Grouping:
    """The section `grouping` of a policy file; the default (by model) where it has none. Raises SluiceError."""
    import yaml

    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path}: larger than any policy file", remedy="name a sluice.yaml")
        document: Any = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", remedy="name a policy file that can be read") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise SluiceError(
            f"{path}{line}: not YAML: {getattr(error, 'problem', None) or error}", remedy="correct the line"
        ) from error
    if not isinstance(document, dict):
        raise SluiceError(f"{path}: no mapping of sections", remedy="begin with a section, e.g. grouping:")
    section = document.get("grouping")
    return Grouping() if section is None else parse_grouping(section, f"{path}: grouping")


def parse_grouping(section: object, source: str) -> Grouping:
    """Validate a section; `source` names its origin in errors."""
    try:
        return Grouping.model_validate(section)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise SluiceError(f"{source}.{place}: {first['msg']}", remedy="see sluice-group(1)") from error
    except UsageError as error:
        raise SluiceError(f"{source}: {error.what}", remedy=error.remedy) from error
