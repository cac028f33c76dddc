"""Changes of a running cluster through scontrol and scancel, as the invoking user."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sluice.base.errors import SluiceError
from sluice.slurm.answers import Job
from sluice.slurm.commands import Commands

SAVE_SIGNAL = 62
"""What a job with --checkpoint=system gets to be saved; its launcher takes it (native/launch/launch.h)."""
SAVE_WORDS = (f"--signal={SAVE_SIGNAL}", "--batch")
"""As scancel's."""


class Control:
    """slurmctld's own changes. All raise SluiceError with Slurm's message."""

    def __init__(self, commands: Commands | None = None) -> None:
        self.commands = commands or Commands()

    def create_reservation(
        self, name: str, *, accounts: Iterable[str], nodes: int, feature: str, flags: Sequence[str] = ()
    ) -> None:
        """Reserve nodes that have a feature for accounts, from now on without an end; running jobs stay."""
        self.commands.output(
            "scontrol",
            "create",
            "reservation",
            f"ReservationName={name}",
            "StartTime=now",
            "Duration=UNLIMITED",
            f"Accounts={','.join(sorted(accounts))}",
            f"NodeCnt={nodes}",
            f"Features={feature}",
            f"Flags={','.join(['IGNORE_JOBS', *flags])}",
            f"PartitionName={self._partition(feature)}",
        )

    def update_reservation(
        self,
        name: str,
        *,
        accounts: Iterable[str],
        nodes: int,
        flags: Sequence[str] = (),
        users_to_drop: Iterable[str] = (),
    ) -> None:
        """Change a reservation; Slurm changes no features. Its longest one ends after a year: it is renewed."""
        dropped = ",".join(sorted(users_to_drop))
        self.commands.output(
            "scontrol",
            "update",
            f"ReservationName={name}",
            f"NodeCnt={nodes}",
            f"Accounts={','.join(sorted(accounts))}",
            *([f"Users-={dropped}"] if dropped else []),
            *([f"Flags={','.join(flags)}"] if flags else []),
            "EndTime=now+365days",
        )

    def delete_reservation(self, name: str) -> None:
        """End a reservation."""
        self.commands.output("scontrol", "delete", f"ReservationName={name}")

    def reconfigure(self) -> None:
        """Let the daemons read their files again."""
        self.commands.output("scontrol", "reconfigure")

    def cancel(self, jobs: Iterable[Job], *, only_waiting: bool = False) -> None:
        """Cancel jobs; those that have ended already are not an error."""
        self._scancel(jobs, "--quiet", *(["--state=PENDING"] if only_waiting else []))

    def signal(self, jobs: Iterable[Job], name: str) -> None:
        """Signal the batch scripts and all steps of jobs; those that have ended already are not an error."""
        self._scancel(jobs, f"--signal={name}", "--full")

    def save(self, jobs: Iterable[Job]) -> None:
        """Have jobs with --checkpoint=system saved, which ends this run of them."""
        self._scancel(jobs, *SAVE_WORDS)

    def _scancel(self, jobs: Iterable[Job], *words: str) -> None:
        """Many at once: for most words scancel first asks slurmctld for all jobs that there are."""
        names = [job.own_name for job in jobs]
        for at in range(0, len(names), 500):
            self.commands.run("scancel", *words, *names[at : at + 500], check=False)

    def _partition(self, feature: str) -> str:
        """A partition with all nodes of the feature: the default one where it has, else the largest that has some."""
        from sluice.slurm.text import TextClient

        client = TextClient(self.commands)
        having: dict[str, int] = {}
        for node in client.nodes():
            if feature in node.features:
                for partition in node.partitions:
                    having[partition] = having.get(partition, 0) + 1
        if not having:
            raise SluiceError(
                f"feature {feature!r}: no node has it",
                remedy="write features with `sluice gres write`, or set `feature`",
            )
        default = {partition.name for partition in client.partitions() if partition.default}
        return max(having, key=lambda name: (having[name], name in default, name))
