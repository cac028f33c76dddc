"""Chapter: what the GPUs are, and how they are configured in Slurm."""

from __future__ import annotations

from dev_cluster.demo.stage import Stage
from dev_cluster.layout import INSIDE


def discover(stage: Stage) -> None:
    """Probe, inventory, topology, and what became of them in Slurm."""
    stage.step(
        "Find the GPUs of a node",
        "The probe asks each vendor's own library. On this node NVIDIA's device numbers differ from its ordinals; "
        "Slurm needs the file, not the number.",
    )
    probed = stage.sluice("probe", node="mixed-1")
    stage.expect(all(word in probed for word in ("nvidia", "intel", "amd")), "all three vendors were found")

    stage.step("The whole cluster", "Every node left its inventory in the drop folder; nothing is typed by hand.")
    inventory = stage.sluice("inventory", "--by", "model", "--inventory-dir", f"{INSIDE}/inventory")
    stage.expect("H100" in inventory and "MI300X" in inventory, "models of several vendors are listed")

    stage.step(
        "How GPUs are linked", "The matrix known from nvidia-smi topo -m, for every vendor: here Intel's Xe Link."
    )
    stage.sluice("topo", node="max1550-1", lines=6)

    stage.step(
        "What is configured in Slurm",
        "From the inventories Sluice wrote gres.conf and the node lines. One shard is one MiB of GPU memory. The "
        "linter knows what slurmd and slurmctld would complain about.",
    )
    listed = stage.run(["sinfo", "-N", "-o", "%.10N %.6t %G"])
    stage.expect("gpu:mi300x:8" in listed and "gpu:h100:8" in listed, "sinfo shows the GPUs")
    stage.sluice("lint", "--no-devices", "--inventory-dir", f"{INSIDE}/inventory")
