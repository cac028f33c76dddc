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
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from sluice.base.documents import load_document
from sluice.base.sizes import parse_mib

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
    """One class for what one binary runs on: vendor and capability, and the driver's major version with `driver`."""

    by: Literal["compatibility"]
    driver: bool = False


class ByLinkDomain(_Section):
    """Kind and size of the set of GPUs joined by NVLink, xGMI or Xe Link, e.g. ``nvlink8``; ``nolink`` without one."""

    by: Literal["link-domain"]


class ByPerformance(_Section):
    """Classes of speed: a class holds figures up to `threshold` above its slowest (0.1: 10 percent)."""

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


class _File(BaseModel):
    """A policy file, of which only this section matters here."""

    grouping: Grouping | None = None


def load_grouping(path: Path) -> Grouping:
    """The section `grouping` of a policy file; the default (by model) where it has none. Raises UsageError."""
    return load_document(path, _File, remedy="see sluice-group(1)").grouping or Grouping()
