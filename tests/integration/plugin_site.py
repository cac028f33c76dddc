"""A cluster of stock Slurm that Sluice's plugins are installed into, as an admin would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dev_cluster.cluster import DevCluster
from dev_cluster.layout import INSIDE
from policy.compiled import FILE_NAME, CompiledPolicy, Tenant
from sluice.base.slurm_version import SlurmVersion
from sluice.plugin.builder import PluginBuild
from sluice.plugin.install import Places, Result, install
from sluice.plugin.site import INCLUDE, find_plugin_dir, read_site_options
from tests.integration.jobs import sbatch, state
from tests.integration.settled import PATIENCE, until

DESCRIPTION: dict[str, Any] = {
    "nodes": [{"names": "n[1-2]", "platform": "none"}, {"names": "c1", "platform": "none", "config": "configless"}],
    "controllers": 1,
    "accounting": False,
    "users": [{"name": "alice"}],
    "slurm_conf": "SchedulerParameters=bf_interval=2\n",
}
POLICY = CompiledPolicy(source="test", tenants=[Tenant(account="physics")])


class PluginSite:
    """The cluster's /etc/slurm and a search folder that all its hosts see, as seen from outside by `destdir`."""

    def __init__(self, cluster: DevCluster, scratch: Path, version: SlurmVersion, root: Path | None = None) -> None:
        self.cluster = cluster
        self.version = version
        self.stock = find_plugin_dir(root or Path("/"))
        layout = cluster.layout
        (layout.folder / "search").mkdir()
        (scratch / "etc/systemd/system").mkdir(parents=True)
        (scratch / "etc/slurm").symlink_to(layout.slurm)
        (scratch / "run").mkdir()
        (scratch / INSIDE.relative_to("/")).symlink_to(layout.folder)
        self.places = Places(search=INSIDE / "search", destdir=scratch)
        self.conf = layout.slurm / "slurm.conf"

    def install(self, build: PluginBuild) -> Result:
        """As `sluice plugin install`."""
        options = read_site_options(self.conf)
        return install(build, self.places, slurm=self.version, stock=self.stock, options=options)

    def include(self) -> None:
        """What install leaves to the admin: the one line in slurm.conf."""
        with self.conf.open("a") as file:
            file.write(f"Include {INCLUDE}\n")

    def restart(self, *, guard: bool = True) -> None:
        """Restart slurmctld, after its guard as under systemd; return when it answers."""
        self.cluster.stop_daemon("slurmctld@ctl1")
        path = self.places.current / "guard"
        if guard and self.places.real(path).exists():
            self.cluster.run([path], node="ctl1")
        self.cluster.start_daemon("slurmctld@ctl1")
        self.wait_up()

    def wait_up(self) -> None:
        """Wait until slurmctld answers and the node without jobs has registered."""
        self.wait(lambda: self.cluster.run(["scontrol", "ping"], check=False).returncode == 0)
        self.cluster.wait_idle(["n2"], timeout=PATIENCE)

    def wait(self, condition: Any, seconds: float = PATIENCE) -> None:
        """Until it holds."""
        until(condition, timeout=seconds, shows=lambda: self.cluster.log_tail("slurmctld@ctl1", 30))

    def loaded(self) -> set[str]:
        """Names of Sluice's files in slurmctld's memory."""
        pid = next(daemon.pid for daemon in self.cluster.daemons() if daemon.name == "slurmctld@ctl1")
        maps = self.cluster.run(["cat", f"/proc/{pid}/maps"], node="ctl1").stdout
        return {Path(line.split()[-1]).name for line in maps.splitlines() if "/search/" in line}

    def report(self) -> dict[str, Any]:
        """What the plugins in slurmctld say of themselves."""
        report: dict[str, Any] = json.loads((self.cluster.layout.state / "sluice.status.ctl1").read_text())
        return report

    def set_policy(self, policy: CompiledPolicy = POLICY) -> None:
        """As `sluice apply` writes it."""
        policy.write(self.cluster.layout.slurm / FILE_NAME)

    def submit(self, *options: str, user: str = "alice") -> int:
        """A job; its id."""
        return int(sbatch(self.cluster, *options, user=user))

    def job(self, number: int) -> str:
        """Its state, e.g. ``RUNNING``."""
        return state(self.cluster, number)
