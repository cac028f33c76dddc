"""The table of pending jobs that slurmctld's order thread writes (sluice_ranks_write of order/files.c)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sluice.core import lib
from sluice.explain.decisions import FACTORS, SLURM_TERMS, DecisionError, Rank

FILE_NAME = "order.ranks"
"""In the folder of the decisions."""
_MAX_BYTES = 64 * 1024 * 1024
_NUMBER = re.compile(r"-?[0-9]{1,20}\Z")
_POLICY_FIELDS = len(FACTORS) + 4
_JOB_FIELDS = 9 + len(FACTORS) + len(SLURM_TERMS)


@dataclass(frozen=True, slots=True)
class TenantRank:
    """One account of the fair-share tree."""

    account: str  # "(others)" for all accounts that are no tenants
    shares: int
    factor: float  # 1: first in the tree, towards 0: last
    gpu_seconds: float  # usage, decayed
    priority: float
    tier: int  # among the tiers in use: 0 the lowest


@dataclass(frozen=True, slots=True)
class OrderTable:
    """All pending jobs as of one moment."""

    taken: int  # seconds since 1970
    weights: dict[str, int]
    age_full_s: int
    laxity_horizon_s: int
    starvation_s: int
    tenants: tuple[TenantRank, ...]
    jobs: dict[int, tuple[Rank, int]]  # job id -> its rank, index of its tenant


def read_order_table(folder: Path, *, job: int | None = None) -> OrderTable | None:
    """The table, or of all its jobs the one of that id; None where there is none. Raises DecisionError."""
    path = folder / FILE_NAME
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DecisionError(f"{path}: larger than {_MAX_BYTES} bytes")
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DecisionError(f"{path}: {error.strerror}") from error
    return parse_order_table(text, source=str(path), job=job)


def parse_order_table(text: str, *, source: str, job: int | None = None) -> OrderTable:
    """Like `read_order_table`, from text. Raises DecisionError with the line of the mistake."""
    lines = text.split("\n")
    if lines[0] != "sluice-ranks 1":
        raise DecisionError(f"{source}:1: {lines[0][:40]!r}: not a table of ranks that this Sluice reads")
    taken, policy, tenants, jobs = 0, [0] * _POLICY_FIELDS, [], {}
    operators: dict[int, int] = {}
    wanted = None if job is None else f"job {job} "
    for number, line in enumerate(lines[1:], start=2):
        word, _, rest = line.partition(" ")
        where = f"{source}:{number}"
        if word == "job":
            if wanted is None or line.startswith(wanted):
                rank = _numbers(rest, _JOB_FIELDS, where)
                jobs[rank[0]] = (rank, rank[3])
        elif word == "operator":
            job_id, factor = _numbers(rest, 2, where)
            operators[job_id] = factor
        elif word == "tenant":
            values = rest.split(" ", 5)
            shares, factor, usage, priority, tier = _numbers(" ".join(values[:5]), 5, where)
            one = int(lib.SLUICE_FACTOR_ONE)
            account = values[5] if len(values) > 5 else ""
            tenants.append(TenantRank(account, shares, factor / one, usage / 1000, priority / one, tier))
        elif word == "policy":
            policy = _numbers(rest, _POLICY_FIELDS, where)
        elif word == "taken":
            (taken,) = _numbers(rest, 1, where)
        elif word == "end":
            break
        else:
            raise DecisionError(f"{where}: {line[:40]!r}: unknown")
    else:
        raise DecisionError(f"{source}: cut off")
    weights = dict(zip(FACTORS, policy, strict=False))
    age_full_s, laxity_horizon_s, _, starvation_s = policy[len(FACTORS) :]
    return OrderTable(
        taken=taken,
        weights=weights,
        age_full_s=age_full_s,
        laxity_horizon_s=laxity_horizon_s,
        starvation_s=starvation_s,
        tenants=tuple(tenants),
        jobs={
            number: (_rank(fields, taken, weights, operators.get(number)), tenant)
            for number, (fields, tenant) in jobs.items()
        },
    )


def _numbers(text: str, count: int, where: str) -> list[int]:
    words = text.split(" ")
    if len(words) != count or not all(_NUMBER.match(word) for word in words):
        raise DecisionError(f"{where}: {text[:60]!r}: not {count} numbers")
    return [int(word) for word in words]


def _rank(fields: list[int], taken: int, weights: dict[str, int], operators: int | None) -> Rank:
    terms = fields[9 : 9 + len(FACTORS)]
    return Rank(
        taken=taken,
        site=fields[1],
        place=fields[2],
        gpus=fields[4],
        remaining_s=fields[5],
        deadline=fields[6],
        starving=bool(fields[7]),
        laxity_s=fields[8],
        weights=weights,
        terms={name: term / int(lib.SLUICE_FACTOR_ONE) for name, term in zip(FACTORS, terms, strict=True)},
        slurm=dict(zip(SLURM_TERMS, fields[9 + len(FACTORS) :], strict=True)),
        operators_site=operators,
    )
