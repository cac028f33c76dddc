"""The controllers' daemon, put together: its duties, and the handlers of nodes' requests."""

from __future__ import annotations

from sluice.controllerd import preflight, roll_up, snapshot, takeovers
from sluice.controllerd.alerts import duty as alerts
from sluice.controllerd.daemon import Duty, Site, collect
from sluice.controllerd.health import controller as health
from sluice.controllerd.inbox import duties_of_inbox
from sluice.controllerd.metrics import cluster as metrics
from sluice.controllerd.power import duty as power
from sluice.controllerd.readings import readings_of
from sluice.controllerd.spans import duty as spans


def duties(site: Site) -> list[Duty]:
    """All of them; a part that cannot begin is logged and left out."""
    return collect(
        {
            "takeovers": takeovers.duties,
            "health": health.duties,
            "alerts": alerts.duties,
            "inbox": _inbox,
            "preflight": preflight.duties,
            "metrics": metrics.duties,
            "roll-up": roll_up.duties,
            "snapshot": snapshot.duties,
            "spans": spans.duties,
            "power": power.duties,
        },
        site,
    )


def _inbox(site: Site) -> list[Duty]:
    control = power.power_of(site)
    handlers = {
        "health": health.controller_of(site).answer,
        "readings": readings_of(site).take,
        "preflight": preflight.coordinator_of(site).answer,
        "preflight-spare": preflight.coordinator_of(site).answer_spare,
        "power": control.powers.take,
        "power-budget": control.lower,
        "power-gpus": lambda _: control.gpus(),
    }
    asked = {"power-show": lambda _request, _uid: control.show(), "power-why": control.why}
    return duties_of_inbox(site, handlers, asked, spans.spans_of_site(site).arrived)
