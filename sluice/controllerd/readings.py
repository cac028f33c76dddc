"""What nodes last reported of their GPUs and running jobs, shared by all duties of a daemon."""

from __future__ import annotations

from sluice.controllerd.daemon import of_site
from sluice.exchange.live import Readings
from sluice.exchange.running import Running

readings_of = of_site(lambda _: Readings())
"""The readings of this daemon."""
running_of = of_site(lambda _: Running())
"""The records until now of running jobs."""
