"""What nodes last reported of their GPUs and running jobs, shared by all duties of a daemon."""

from __future__ import annotations

import weakref

from sluice.controllerd.daemon import Site
from sluice.exchange.live import Readings
from sluice.exchange.running import Running

_of_site: weakref.WeakKeyDictionary[Site, Readings] = weakref.WeakKeyDictionary()
_running: weakref.WeakKeyDictionary[Site, Running] = weakref.WeakKeyDictionary()


def readings_of(site: Site) -> Readings:
    """Those of this daemon."""
    found = _of_site.get(site)
    if found is None:
        found = _of_site[site] = Readings()
    return found


def running_of(site: Site) -> Running:
    """The records until now of running jobs."""
    found = _running.get(site)
    if found is None:
        found = _running[site] = Running()
    return found
