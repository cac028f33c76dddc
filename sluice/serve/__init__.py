"""Models as services: replicas are jobs of Slurm, and gateways give them one address."""

from sluice.serve.model import model, run

__all__ = ["model", "run"]
