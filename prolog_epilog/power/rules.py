"""Which power cap a job and a GPU have: pure functions over the policy, what jobs ask for, and what hardware can do.

A cap is of the whole GPU. Where several jobs are on one, the greatest of their caps counts, and a job without one has
the site's own setting: no job is slowed down by what another asked for. Controllers and heat only lower that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from policy.node_power import MOST_WATTS, NodeCap, NodePower
from prolog_epilog.power_limits import PowerLimit
from prolog_epilog.refusals import Refusal
from prolog_epilog.state import RefusalError

_WATTS = re.compile(r"([1-9][0-9]{0,5})W?")  # as job_submit/sluice writes it (slurm_plugin/rules/options.c)


def read_watts(text: str, option: str = "--gpu-power") -> int:
    """Watts of an option as job_submit/sluice writes it. Raises RefusalError for what it would never write.

    Where that plugin is not loaded the text is the user's own.
    """
    match = _WATTS.fullmatch(text)
    if match is None or int(match[1]) > MOST_WATTS:
        raise RefusalError(
            f"{option}={text[:32]!r} is not a number of watts",
            Refusal.POWER_UNREADABLE,
            remedy="use whole watts, e.g. --gpu-power=300W",
        )
    return int(match[1])


def cap_for(policy: NodePower, gpu_type: str, account: str) -> NodeCap | None:
    """The first of the policy's caps that fits."""
    return next(
        (
            cap
            for cap in policy.caps
            if (not cap.gpu_types or gpu_type in cap.gpu_types) and (not cap.accounts or account in cap.accounts)
        ),
        None,
    )


@dataclass(frozen=True, slots=True)
class JobCap:
    """What bounds a job on a GPU, mW: `own` by the policy or --gpu-power; `planned` for its start within a budget,
    until controllers order another. None: nothing."""

    own: int | None = None
    planned: int | None = None

    def of(self, site_mw: int) -> int:
        """The bound, where the site's own setting is `site_mw`."""
        own = site_mw if self.own is None else self.own
        return own if self.planned is None else min(own, self.planned)


def within(watts: int, limit: PowerLimit) -> int:
    """The nearest that the hardware can be set to, mW."""
    return max(limit.least_mw, min(watts * 1000, limit.most_mw))


def job_cap(cap: NodeCap | None, asked: int | None, limit: PowerLimit, site_mw: int) -> int | None:
    """A job's own cap of a GPU in mW; None: as the site has set it. Raises RefusalError for what it may not ask for.

    `asked`: with --gpu-power, watts. `site_mw`: what the GPU had before anything of ours, which only a cap of the
    policy lets a job exceed.
    """
    if asked is None:
        return None if cap is None else within(cap.watts, limit)
    most = (cap.at_most or cap.watts) if cap else min(site_mw, limit.most_mw) // 1000
    if asked > most:
        raise RefusalError(
            f"--gpu-power={asked}W: at most {most} W on this GPU",
            Refusal.POWER_OVER_POLICY,
            remedy="ask for less, or leave the option out",
        )
    if not limit.least_mw <= asked * 1000 <= limit.most_mw:
        raise RefusalError(
            f"--gpu-power={asked}W: this GPU takes {-(-limit.least_mw // 1000)} to {limit.most_mw // 1000} W",
            Refusal.POWER_OUT_OF_RANGE,
            remedy="ask for a value of this range, or name another type of GPU",
        )
    return asked * 1000


@dataclass(frozen=True, slots=True)
class Wanted:
    """The cap that a GPU is to have, and what it comes from: "job", "order", "thermal"; empty: the site's setting."""

    mw: int
    why: str = ""


def wanted(
    limit: PowerLimit, site_mw: int, jobs: Iterable[JobCap], order_mw: int | None, heat_percent: int | None
) -> Wanted:
    """What a GPU is to have. `site_mw`: what it had before anything of ours; `jobs`: the caps of those on it;
    `heat_percent`: how much of the cap heat leaves."""
    caps = [cap.of(site_mw) for cap in jobs]
    found = Wanted(max(caps), "job") if caps else Wanted(site_mw)
    if order_mw is not None and order_mw < found.mw:
        found = Wanted(order_mw, "order")
    if heat_percent is not None:
        found = Wanted(found.mw * heat_percent // 100_000 * 1000, "thermal")
    mw = max(limit.least_mw, min(found.mw, limit.most_mw)) if found.mw != site_mw else site_mw
    return Wanted(mw, found.why if mw != site_mw else "")
