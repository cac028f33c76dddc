"""The stage of the demonstration: every command is real, and so is what it prints."""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Sequence

from dev_cluster.cluster import DevCluster
from dev_cluster.layout import LOGIN
from sluice.base.errors import SluiceError
from sluice.base.run import PYTHON

SLUICE = (*PYTHON, "-m", "sluice.main")


class Stage:
    """Prints what happens and why, runs it, and checks it."""

    def __init__(self, cluster: DevCluster) -> None:
        self.cluster = cluster
        self.colour = sys.stdout.isatty()
        self.steps = 0
        self.plugins = True
        self.acknowledged: list[str] = []  # jobs whose submission the failover outlived

    def step(self, title: str, why: str) -> None:
        """Announce a step."""
        self.steps += 1
        head = f"{self.steps}. {title}"
        print(f"\n\033[1m{head}\033[0m" if self.colour else f"\n{head}")
        print(textwrap.fill(why, 110, initial_indent="   ", subsequent_indent="   "), flush=True)

    def run(
        self,
        words: Sequence[str],
        *,
        user: str = "root",
        node: str = LOGIN,
        shown: str | None = None,
        lines: int = 40,
        check: bool = True,
    ) -> str:
        """Run a command inside the cluster, show it as typed and what it printed, and return that."""
        typed = shown or shlex.join(words)
        done = self.cluster.run(list(words), user=user, node=node, timeout=120, check=check)
        output = done.stdout + done.stderr
        prompt = f"   {user}@{node}$ "
        print(f"\033[36m{prompt}{typed}\033[0m" if self.colour else prompt + typed)
        printed = output.rstrip().splitlines()
        for line in printed[:lines]:
            print(f"   {line}")
        if len(printed) > lines:
            print(f"   ... {len(printed) - lines} more lines")
        sys.stdout.flush()
        return output

    def sluice(self, *words: str, node: str = LOGIN, lines: int = 40) -> str:
        """A command of Sluice itself."""
        return self.run([*SLUICE, *words], node=node, shown=shlex.join(["sluice", *words]), lines=lines)

    def expect(self, truth: bool, claim: str) -> None:
        """Stop unless what was just shown is what was claimed."""
        if not truth:
            raise SluiceError(f"demo, step {self.steps}: not as it should be: {claim}")

    def wait(self, what: str, done: Callable[[], bool], timeout: float = 180) -> None:
        """Wait quietly until something has happened."""
        deadline = time.monotonic() + timeout
        while not done():
            if time.monotonic() > deadline:
                raise SluiceError(f"demo, step {self.steps}: {what}: not within {timeout:g} s")
            time.sleep(0.2)

    def state(self, job: str) -> str:
        """A job's state; empty when slurmctld does not know it."""
        return self.cluster.run(["squeue", "-h", "-j", job, "-o", "%T"], check=False).stdout.strip()

    def gpus(self, job: str) -> str:
        """The indices of a job's GPUs on its node, as Slurm has them."""
        shown = self.cluster.run(["scontrol", "show", "job", "-d", job]).stdout
        found = re.search(r" GRES=\S*?\((?:IDX:)?([^)]*)\)", shown)
        words = found[1].split(",") if found else ["?"]
        if "/" in words[0]:  # of shards Slurm 24.11 shows how many of each GPU
            words = [str(index) for index, word in enumerate(words) if not word.startswith("0/")]
        return ",".join(words)
