"""Where a site's Slurm has its things, and which lines of slurm.conf load the plugins."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from sluice_base.errors import UsageError
from slurm_plugin.builder import PluginBuild

_ANY_PLUGIN = "select_cons_tres.so"


def find_plugin_dir(root: Path = Path("/"), prefix: Path = Path("/usr")) -> Path:
    """Slurm's own plugin folder (its path inside `root`). Raises UsageError when it is nowhere to be found."""
    triplet = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    inside = prefix.relative_to("/")
    for name in (f"lib/{triplet}/slurm-wlm", "lib/slurm-wlm", f"lib/{triplet}/slurm", "lib64/slurm", "lib/slurm"):
        if (root / inside / name / _ANY_PLUGIN).is_file():
            return Path("/") / inside / name
    raise UsageError(
        f"{root / inside}: Slurm's plugin folder is not found there",
        remedy="name it with --slurm-plugin-dir (scontrol show config: PluginDir)",
    )


def plugin_parameters(
    build: PluginBuild, *, folder: Path, stock: Path, job_submit: str = "", site_factor: bool = True
) -> list[tuple[str, str]]:
    """The parameters of slurm.conf that load a build, which slurmctld finds in `folder`, before Slurm's own in `stock`.

    `job_submit` is what the site has as JobSubmitPlugins itself; ours comes last, as what it decides must stand.
    Without `site_factor` another one is the site's.
    """
    parameters = [("PluginDir", f"{folder}:{stock}")]
    if build.has("job_submit_sluice"):
        others = [name for name in job_submit.split(",") if name and name != "sluice"]
        parameters.append(("JobSubmitPlugins", ",".join([*others, "sluice"])))
    if build.has("site_factor_sluice") and site_factor:
        parameters.append(("PrioritySiteFactorPlugin", "site_factor/sluice"))
    return parameters
