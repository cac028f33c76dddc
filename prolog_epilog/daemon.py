"""The node agent, put together: the watch first, then jobs and their limits, health, and metrics of what it samples."""

from __future__ import annotations

from prolog_epilog.state import Settings
from prolog_epilog.vigil import Vigil


def serve(settings: Settings) -> None:
    """Until SIGTERM. Raises SluiceError, OSError."""
    vigil = Vigil(settings)
    vigil.begin()

    from prolog_epilog.agent import Agent  # takes longer to load than the watch takes to start
    from prolog_epilog.metrics import NodeExporter

    agent = Agent(settings, vigil)
    metrics = NodeExporter(agent, settings.records.parent / "metrics")
    agent.start()
    agent.serve()
    metrics.output.close()
