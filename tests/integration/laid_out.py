"""A cluster whose node lines and GRES are Sluice's, so that `sluice mig apply` can change the layout of GPUs."""

from __future__ import annotations

import re

from dev_cluster.cluster import DevCluster


def take_over_gres(cluster: DevCluster, node: str) -> None:
    """Let the cluster's only node have its lines from Sluice's files, as the admin guide has it."""
    conf = cluster.slurm_conf_dir()
    text = (conf / "slurm.conf").read_text()
    [line] = re.findall(r"^NodeName=.*$", text, re.M)
    port = re.search(r"Port=\d+", line)
    assert port is not None
    (conf / "nodes.site.conf").write_text(f"NodeName={node} {port[0]}\n")
    (conf / "nodes.sluice.conf").write_text(line + "\n")
    (conf / "slurm.conf").write_text(text.replace(line, "include nodes.sluice.conf"))
    (conf / "gres.sluice.conf").write_text((conf / "gres.conf").read_text())
    (conf / "gres.conf").write_text("include gres.sluice.conf\n")


def restart_slurm(cluster: DevCluster, node: str) -> None:
    """As Slurm takes another number of GPUs."""
    for daemon in (f"slurmd@{node}", "slurmctld@ctl1"):
        cluster.stop_daemon(daemon)
    for daemon in ("slurmctld@ctl1", f"slurmd@{node}"):
        cluster.start_daemon(daemon)
