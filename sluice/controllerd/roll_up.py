"""Rolls up the days that are over, on the controller that leads."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from sluice.base.text import one_line
from sluice.controllerd.daemon import Duty, Site
from sluice.exchange.job_records import FOLDER, JobRecords
from sluice.report.collect import Source, cluster_name, roll_up
from sluice.report.rollup import Rollup, day_of, missing_days
from sluice.slurm import Commands

PERIOD_S = 1800.0
DAYS = 62  # of the past, when there is nothing yet
KEPT_DAYS = 800

log = logging.getLogger("sluice.report")


def duties(site: Site) -> Iterable[Duty]:
    """One duty; nothing without accounting."""
    del site
    return [Duty("report-roll-up", PERIOD_S, run)]


def run(site: Site) -> None:
    """Count what is missing, one day after the other; the next run continues where this one was stopped."""
    if not site.config().get("AccountingStorageType", "").endswith("slurmdbd"):
        return
    commands = Commands(prefix=site.commands.prefix, conf=site.commands.conf, timeout=600)
    source = Source(
        site.client, commands, JobRecords(site.state_save / FOLDER), note=lambda text: log.info("%s", one_line(text))
    )
    source.rolled = Rollup(site.state / "report", cluster_name(source))
    for day in missing_days(source.rolled, DAYS, source.now):
        if site.stopping.is_set() or not site.leads():
            return
        for _, jobs in roll_up(source, [day]):
            log.info("%s: %d jobs", day, jobs)
    source.rolled.prune(day_of(time.time() - KEPT_DAYS * 86_400))
