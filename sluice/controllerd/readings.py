"""What nodes last reported of their GPUs, shared by all duties of a daemon."""

from __future__ import annotations

import weakref

from sluice.controllerd.daemon import Site
from sluice.exchange.live import Readings

_of_site: weakref.WeakKeyDictionary[Site, Readings] = weakref.WeakKeyDictionary()


def readings_of(site: Site) -> Readings:
    """Those of this daemon."""
    found = _of_site.get(site)
    if found is None:
        found = _of_site[site] = Readings()
    return found
