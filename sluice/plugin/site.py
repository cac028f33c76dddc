"""What a site's Slurm is, and which lines of slurm.conf load the plugins."""

from __future__ import annotations

import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from sluice.base.errors import SluiceError, UsageError
from sluice.base.run import run_command
from sluice.base.slurm_version import SlurmVersion, parse_slurm_version
from sluice.plugin.builder import PluginBuild
from sluice.slurm.slurm_conf import read_config

INCLUDE = "sluice.plugins.conf"
"""The file that slurm.conf includes to load the plugins."""
LEVEL_FILE = "sluice.level"
ADAPTER = "burst_buffer_sluice"
"""The plugin by which the failover journal learns of jobs; under the name of a site's own it comes before that one."""
LEVELS = ("off", "admit", "shadow", "place")

_ANY_PLUGIN = "select_cons_tres.so"
_OURS = ("plugindir", "jobsubmitplugins", "prioritysitefactorplugin")


def find_plugin_dir(root: Path = Path("/"), prefix: Path = Path("/usr")) -> Path:
    """Slurm's own plugin folder (its path inside `root`). Raises UsageError when it is not found."""
    triplet = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    inside = prefix.relative_to("/")
    for name in (f"lib/{triplet}/slurm-wlm", "lib/slurm-wlm", f"lib/{triplet}/slurm", "lib64/slurm", "lib/slurm"):
        if (root / inside / name / _ANY_PLUGIN).is_file():
            return Path("/") / inside / name
    raise UsageError(
        f"{root / inside}: Slurm's plugin folder is not found there",
        remedy="name it with --slurm-plugin-dir (scontrol show config: PluginDir)",
    )


def find_program(*names: str, prefix: Path | None = None) -> Path:
    """The first of Slurm's programs that is installed. Raises SluiceError when none is."""
    folders = "/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin" if prefix is None else f"{prefix}/sbin:{prefix}/bin"
    for name in names:
        found = shutil.which(name, path=folders)
        if found is not None:
            return Path(found)
    raise SluiceError(f"{names[0]}: not installed on this host", remedy="name Slurm's folder with --slurm-prefix")


def program_version(program: Path) -> SlurmVersion:
    """The version that one of Slurm's programs reports. Raises SluiceError."""
    return parse_slurm_version(run_command([program, "-V"], timeout=20).stdout)


@dataclass(frozen=True, slots=True)
class SiteOptions:
    """The site's own options, in slurm.conf and all that it includes except our file."""

    plugin_dir: str = ""
    job_submit: str = ""
    site_factor: str = ""
    select_type: str = ""
    prep: str = ""
    burst_buffer: str = ""
    state_folder: str = ""
    includes_us: bool = False

    @property
    def burst_buffer_name(self) -> str:
        """Of the site's own burst buffer plugin, as Slurm reads it: ``lua``; empty: it has none."""
        name = self.burst_buffer.split(",")[0].strip().removeprefix("burst_buffer/")
        return "" if name == "sluice" else name


def read_site_options(slurm_conf: Path) -> SiteOptions:
    """Read slurm.conf. Raises SluiceError for a file that cannot be read."""
    config = read_config(slurm_conf)
    values: dict[str, str] = {}
    include = slurm_conf.parent / INCLUDE
    for line in config.lines:
        for value in line.pairs:
            if value.place.file != include:
                values[value.key.lower()] = value.text
    wanted = [fault.what for fault in config.faults if fault.kind == "include" and INCLUDE in fault.what]
    return SiteOptions(
        plugin_dir=values.get("plugindir", ""),
        job_submit=values.get("jobsubmitplugins", ""),
        site_factor=values.get("prioritysitefactorplugin", ""),
        select_type=values.get("selecttype", ""),
        prep=values.get("prepplugins", ""),
        burst_buffer=values.get("burstbuffertype", ""),
        state_folder=values.get("statesavelocation", "/var/spool"),
        includes_us=include in config.files or bool(wanted),
    )


def plugin_parameters(
    build: PluginBuild,
    *,
    folder: Path,
    stock: Path | str,
    job_submit: str = "",
    site_factor: bool = True,
    burst_buffer: bool = True,
) -> list[tuple[str, str]]:
    """The parameters of slurm.conf that load a build, which slurmctld finds in `folder`, before Slurm's own in `stock`.

    `job_submit` is what the site has as JobSubmitPlugins itself; ours comes last, as its decision must be final.
    Without `site_factor`, and without `burst_buffer`, another one is the site's. The latter is loaded whether there is
    a failover journal or not, as Slurm does not change it without a restart; it does nothing until the policy asks.
    """
    parameters = [("PluginDir", f"{folder}:{stock}")]
    if build.has("job_submit_sluice"):
        others = [name for name in job_submit.split(",") if name and name != "sluice"]
        parameters.append(("JobSubmitPlugins", ",".join([*others, "sluice"])))
    if build.has("site_factor_sluice") and site_factor:
        parameters.append(("PrioritySiteFactorPlugin", "site_factor/sluice"))
    if build.has(ADAPTER) and burst_buffer:
        parameters.append(("BurstBufferType", "burst_buffer/sluice"))
    return parameters


def stock_parameters(options: SiteOptions) -> list[tuple[str, str]]:
    """The parameters that leave everything as it is without us: the site's own, where the include file has ours."""
    given = (
        ("PluginDir", options.plugin_dir),
        ("JobSubmitPlugins", options.job_submit),
        ("PrioritySiteFactorPlugin", options.site_factor),
    )
    return [(key, value) for key, value in given if value]
