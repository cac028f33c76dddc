"""A whole Slurm cluster on this machine: bring it up, work with it, bring it down.

    cluster = DevCluster(Path("/run/mine"))
    cluster.up("demo")
    print(cluster.run(["sinfo"], user="alice").stdout)
    cluster.down()

Everything needs root. docs/dev-cluster.md describes how it is built.
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from dev_cluster.handle import ClusterHandle, Progress, require_root
from dev_cluster.slurm_tree import SlurmTree
from sluice.base.errors import SluiceError, UsageError

if TYPE_CHECKING:
    from dev_cluster.boot import Boot
    from dev_cluster.description import ClusterDescription


class DevCluster(ClusterHandle):
    """The cluster of a state folder, which may not exist yet."""

    def up(
        self,
        description: ClusterDescription | str | Path,
        *,
        slurm_prefix: Path | None = None,
        root: Path | None = None,
        progress: Progress | None = None,
        wait: bool = True,
        attached: bool = False,
        timeout: float = 300,
    ) -> None:
        """Bring a cluster up and return when all its nodes are idle.

        `description` is a shipped cluster's name, a file, or a description made in Python. `slurm_prefix` names
        another Slurm than the distribution's, `root` another system's tree to take everything from. `progress` is
        called with one line for each step. Without `wait`, nodes need not become idle. If `attached`, the cluster's
        processes end with the calling process. Raises SluiceError with the last log lines of the daemon that failed;
        then everything is down again.
        """
        from dev_cluster.boot import Boot
        from dev_cluster.description import ClusterDescription, load_description

        require_root("up")
        if not isinstance(description, ClusterDescription):
            description = load_description(description)
        tree = SlurmTree(slurm_prefix or Path("/usr"), root)
        tree.check(accounting=description.accounting)
        boot = Boot(self, description, tree, progress or (lambda _: None), time.monotonic() + timeout)
        with closing(boot.claim):
            lifeline = self._boot(boot, wait)
        if attached:
            self._lifeline = lifeline
        else:
            os.write(lifeline, b"\0")
            os.close(lifeline)

    def _boot(self, boot: Boot, wait: bool) -> int:
        """Make the folder ours and run `boot`; on failure everything is down again."""
        self._make_folder()
        with self._locked():
            if not self._is_ours():
                raise UsageError(f"{self.folder}: not a cluster's folder, nor empty", remedy="name another with --dir")
            if any(self.folder.iterdir()):
                raise UsageError(
                    f"{self.folder}: there is a cluster already, or what is left of one",
                    remedy=f"bring it down first: sluice cluster down --dir {self.folder}",
                )
            umask = os.umask(0o022)  # the cluster's users must be able to read
            try:
                self.folder.chmod(0o755)
                self.write_facts({"state": "starting"})
                return boot.run(wait=wait)
            except BaseException as error:
                self._tear_down()
                if isinstance(error, OSError):  # a full disk above all
                    place = error.filename2 or error.filename or self.folder
                    raise SluiceError(f"{place}: {error.strerror or error}; everything is down again") from error
                raise
            finally:
                os.umask(umask)
