"""The one way to Slurm from Python: a small typed interface, and backends that are held to the same tests.

``connect()`` gives a `SlurmClient`; `sluice.slurm.answers` has the types of its answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from sluice.base.errors import UsageError
from sluice.base.slurm_version import SlurmVersion
from sluice.slurm.answers import AccountingJob, Controller, Job, Node, Partition, Reservation, SeenJob
from sluice.slurm.commands import Commands

__all__ = ["BACKENDS", "Commands", "SlurmClient", "connect"]

BACKENDS = ("text", "pyslurm")


class SlurmClient(Protocol):
    """What every backend answers. All raise SluiceError, with Slurm's own message, when Slurm does not answer."""

    @property
    def name(self) -> str:
        """One of BACKENDS."""

    @property
    def unknown(self) -> frozenset[str]:
        """Fields that this backend cannot fill, as `Job.dependency`: empty in its answers, whatever Slurm has there."""

    def version(self) -> SlurmVersion:
        """Version of the commands in use."""

    def ping(self) -> list[Controller]:
        """The controllers, the primary first, and whether each answers."""

    def config(self) -> dict[str, str]:
        """slurmctld's configuration in effect, as `scontrol show config` names it; unset values are empty."""

    def nodes(self, names: str | None = None) -> list[Node]:
        """All nodes, or those of a hostlist."""

    def partitions(self) -> list[Partition]:
        """All partitions, hidden ones included."""

    def reservations(self) -> list[Reservation]:
        """All reservations."""

    def jobs(self, *, ids: Iterable[int] = (), states: Iterable[str] = (), users: Iterable[str] = ()) -> list[Job]:
        """Jobs that slurmctld knows; each filter that is given must hold. Default: pending and running ones."""

    def planned_nodes(self) -> dict[int, str]:
        """By job that waits: the nodes that Slurm's backfill has chosen for it, as a hostlist."""

    def each_job(self) -> Iterator[SeenJob]:
        """All jobs that slurmctld knows, without having all in memory; it may fail after some of them."""

    def accounting_jobs(
        self,
        *,
        start: int | None = None,
        end: int | None = None,
        ids: Iterable[int] = (),
        users: Iterable[str] = (),
        states: Iterable[str] = (),
    ) -> list[AccountingJob]:
        """Jobs of the accounting database that were active between `start` and `end` (seconds since 1970)."""


def connect(
    *, conf: Path | None = None, prefix: Path | None = None, backend: str = "text", timeout: float = 60
) -> SlurmClient:
    """A client of the cluster of `conf` (slurm.conf or its folder), with the Slurm installed in `prefix`.

    `timeout`: seconds for one command. Raises SluiceError when the backend cannot work here.
    """
    commands = Commands(prefix=prefix, conf=conf, timeout=timeout)
    if backend == "text":
        from sluice.slurm.text import TextClient

        return TextClient(commands)
    if backend == "pyslurm":
        from sluice.slurm.pyslurm_client import PyslurmClient

        return PyslurmClient(commands)
    raise UsageError(f"backend {backend!r}: unknown", remedy=f"use one of {', '.join(BACKENDS)}")
